"""Commands: run a kernel by hand, list what is covered, run corpus, truth and mutants, measure speed.

python -m tests.ptx_emulator run FILE.ptx --grid 2 --block 128 --array x=in.npy --array y=empty:float32:1024:out.npy
                                 --args x y 1024
python -m tests.ptx_emulator opcodes [FILE.ptx ...]
python -m tests.ptx_emulator corpus | truth | mutants | speed   (--help of each)
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from . import Device, load, registry
from .command_line import add_options, options_of
from .errors import EmulatorError, LaunchError, UnknownInstructions
from .instruction_set import load_all
from .profile import summary

TOOLS = {"corpus": "corpus.command", "truth": "truth.command", "mutants": "mutants.command", "speed": "speed"}


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.replace("x", ",").split(","))


def run(argv: list[str]) -> int:
    """Arrays come from .npy files; those with an output path are written back after the run."""
    parser = argparse.ArgumentParser(prog="python -m tests.ptx_emulator run", description=run.__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--kernel", help="its name; not needed where the file has one")
    parser.add_argument("--grid", type=numbers, default=(1,))
    parser.add_argument("--block", type=numbers, default=(32,))
    parser.add_argument("--cluster", type=numbers)
    parser.add_argument("--shared", type=int, default=0, help="bytes of dynamic shared memory")
    parser.add_argument(
        "--array", action="append", default=[], metavar="NAME=FILE.npy[:OUT.npy] | NAME=empty:DTYPE:SHAPE[:OUT.npy]"
    )
    parser.add_argument(
        "--map",
        action="append",
        default=[],
        metavar="NAME=ARRAY,element=bf16,dims=64x128,box=64x64,strides=128,swizzle=128B,fill=zero",
        help="a tensor map of an array, innermost dimension first",
    )
    parser.add_argument("--args", nargs="*", default=[], help="parameters in order: names of arrays and maps, numbers")
    add_options(parser)
    args = parser.parse_args(argv)
    device = Device()
    values, outputs = _arrays(device, args.array)
    for item in args.map:
        name, _, text = item.partition("=")
        array, *pairs = text.split(",")
        if array not in values:
            raise LaunchError(f"--map {item}: no array {array!r}; --array gave {', '.join(values) or 'none'}")
        values[name] = device.tensor_map(values[array], **_map_arguments(pairs))
    module = load(args.file.read_text())
    started = time.perf_counter()
    report = device.launch(
        module,
        grid=args.grid,
        block=args.block,
        cluster=args.cluster,
        shared=args.shared,
        kernel=args.kernel,
        args=[values[a] if a in values else _number(a) for a in args.args],
        options=options_of(args),
    )
    print(summary(report, time.perf_counter() - started))
    for finding in report.findings:
        print(f"\n{finding.kind}: {finding}")
    for path, buffer in outputs:
        np.save(path, buffer.array)
    return 1 if report.findings else 0


def _arrays(device: Device, items: list[str]) -> tuple[dict[str, Any], list[tuple[str, Any]]]:
    values: dict[str, Any] = {}
    outputs = []
    for item in items:
        name, _, text = item.partition("=")
        parts = text.split(":")
        if parts[0] == "empty":
            if len(parts) < 3:
                raise LaunchError(f"--array {item}: NAME=empty:DTYPE:SHAPE is needed")
            values[name] = device.empty(numbers(parts[2]), parts[1])
            parts = parts[2:]
        else:
            values[name] = device.upload(np.load(parts[0]))
        if len(parts) > 1:
            outputs.append((parts[1], values[name]))
    return values, outputs


def _map_arguments(pairs: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for pair in pairs:
        key, _, value = pair.partition("=")
        found[key] = numbers(value) if key in ("dims", "box", "strides", "element_strides") else value
    return found


def _number(text: str) -> int | float:
    try:
        return int(text, 0)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        raise LaunchError(f"--args {text}: neither an array, a tensor map nor a number") from None


def opcodes(argv: list[str]) -> int:
    """Without files: every instruction prefix that has a meaning. With files: what of theirs has none, and why."""
    if not argv:
        load_all()
        print("\n".join(registry.names()))
        return 0
    missing: dict[str, str] = {}
    for name in argv:
        try:
            load(Path(name).read_text())
        except UnknownInstructions as unknown:
            for opcode, sample in unknown.missing.items():
                missing.setdefault(opcode, f"{name} {sample}")
    for opcode, sample in sorted(missing.items()):
        print(f"{opcode}: {sample}")
    return 1 if missing else 0


def main(argv: list[str]) -> int:
    commands = {"run": run, "opcodes": opcodes}
    if not argv or argv[0] not in (*commands, *TOOLS):
        print(__doc__)
        return 2
    try:
        if argv[0] in commands:
            return commands[argv[0]](argv[1:])
        return importlib.import_module(f"{__package__}.{TOOLS[argv[0]]}").main(argv[1:])
    except (EmulatorError, OSError) as error:
        print(f"{getattr(error, 'kind', type(error).__name__)}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
