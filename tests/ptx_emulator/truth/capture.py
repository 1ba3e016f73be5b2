"""Run the cases on a GPU of compute capability 9.0 and keep what they read and wrote.

From the folder above this one: `python -m truth.capture --out FOLDER [--only TEXT]`. Needs numpy and the driver alone.
Every case runs twice from the same inputs; a case whose outputs differ is reported and not kept. Modules run in
processes of their own, so that a fault or a hang of one case costs no other.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from .case import Case, Map, MapPointer, Struct
from .cases import cases
from .driver import Driver

SECONDS = 25  # for the cases of one process


def _arguments(driver: Driver, case: Case, at: dict[str, int]) -> tuple[list[bytes], list[int]]:
    """The bytes of each parameter, and what was allocated for them."""
    allocated: list[int] = []

    def encode(m: Map) -> bytes:
        return driver.tensor_map(at[m.buffer], m.element, m.dims, m.strides, m.box, m.traversal, m.swizzle, m.fill)

    packed = []
    for argument in case.args:
        if isinstance(argument, str):
            packed.append(np.uint64(at[argument]).tobytes())
        elif isinstance(argument, Map):
            packed.append(encode(argument))
        elif isinstance(argument, MapPointer):
            allocated.append(driver.upload(np.frombuffer(encode(argument.map), np.uint8)))
            packed.append(np.uint64(allocated[-1]).tobytes())
        elif isinstance(argument, Struct):
            packed.append(argument.pack(lambda name: at[name]))
        else:
            packed.append(argument.tobytes())
    return packed, allocated


def run(driver: Driver, function, case: Case) -> dict[str, np.ndarray]:
    """The outputs of one launch from the initial buffers."""
    at = {name: driver.upload(array) for name, array in case.buffers.items()}
    packed, allocated = _arguments(driver, case, at)
    driver.launch(function, case.grid, case.block, case.cluster, case.shared, packed)
    outputs = {name: driver.download(at[name], case.buffers[name]) for name in case.outputs}
    for address in [*at.values(), *allocated]:
        driver.free(address)
    return outputs


def _keep(path: Path, case: Case, results: dict[str, np.ndarray]) -> None:
    arrays: Any = {f"in.{name}": array for name, array in case.buffers.items()} | results
    np.savez_compressed(path, **arrays)


def capture(selected: list[Case], out: Path) -> int:
    """Capture cases of one module, printing a line each; the number of failures."""
    driver = Driver()
    module = driver.module(selected[0].ptx.read_bytes())
    failures = 0
    for case in selected:
        print("start", case.name, flush=True)
        function = driver.function(module, case.kernel)
        try:
            first = run(driver, function, case)
        except RuntimeError as error:
            # The context is lost: the cases that follow run in another process.
            _keep(out / case.data.name, case, {"fault": np.array(str(error))})
            print("kept" if case.faults else "fault", case.name, error, flush=True)
            return failures + 1
        second = run(driver, function, case)
        changed = [name for name in case.outputs if first[name].tobytes() != second[name].tobytes()]
        if changed:
            print("differs between runs", case.name, changed, flush=True)
            failures += 1
            continue
        if case.faults:
            print("no fault", case.name, flush=True)
        _keep(out / case.data.name, case, {f"out.{name}": array for name, array in first.items()})
        print("kept", case.name, flush=True)
    return failures


def _spawn(module: str, names: list[str], out: Path) -> list[str]:
    """Capture in a process of its own; returns the cases that were not started."""
    command = [sys.executable, "-m", "truth.capture", "--out", str(out), "--module", module, "--names", *names]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
        text, code = done.stdout + done.stderr[-1500:], done.returncode
    except subprocess.TimeoutExpired as error:
        text, code = (error.stdout or b"").decode() + "\ntimed out", 1
    started = [line.split()[1] for line in text.splitlines() if line.startswith("start ")]
    kept = [line.split()[1] for line in text.splitlines() if line.startswith("kept ")]
    print(f"{module}: {len(kept)} of {len(names)} kept", flush=True)
    for line in text.splitlines():
        if not line.startswith(("start ", "kept ")):
            print("   ", line)
    if code and started:
        print(f"    last started: {started[-1]}")
    return names[len(started) :] if code and started else []


def main() -> None:
    """Entry of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--module", default="", help="(internal) one module in this process")
    parser.add_argument("--names", nargs="*", default=[])
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    known = [case for case in cases() if options.only in case.name]
    if options.module:
        sys.exit(capture([case for case in known if case.name in options.names], options.out) > 0)
    begin = time.time()
    for module in dict.fromkeys(case.module for case in known):
        names = [case.name for case in known if case.module == module]
        while names:
            names = _spawn(module, names, options.out)
    print(f"{time.time() - begin:.0f} s")


if __name__ == "__main__":
    main()
