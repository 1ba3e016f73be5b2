"""python -m tests.fake_gpu.run MODULE:FUNCTION ... --arch 90 --out DIR [--inference] [--no-compile]

Writes DIR/FUNCTION/{forward.py, backward.py, graphs.json, kernels.json}, a fresh process being the only place where the
no-op device can still be loaded before torch. FUNCTION is a builder as `generate` takes it.
"""

import argparse
import dataclasses
import importlib
import json
import sys
import time
import traceback
import warnings
from pathlib import Path

from .preload import load


def _write(builder: str, arguments: argparse.Namespace) -> None:
    from .generate import generate
    from .kernels import compile_kernels

    module, function = builder.split(":")
    started = time.perf_counter()
    code = generate(getattr(importlib.import_module(module), function), arguments.arch, not arguments.inference)
    directory = arguments.out / function
    code.save(directory)
    generated = time.perf_counter()
    if not arguments.no_compile:
        compiled = [dataclasses.asdict(kernel) for kernel in compile_kernels(code, arguments.arch)]
        (directory / "kernels.json").write_text(json.dumps(compiled, indent=1))
    print(
        f"{function}: sm_{arguments.arch}, {len(code.kernels)} kernels, generated in {generated - started:.1f} s, "
        f"compiled in {time.perf_counter() - generated:.1f} s",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fake_gpu.run", description=__doc__.split("\n\n")[1])
    parser.add_argument("builders", nargs="+", metavar="MODULE:FUNCTION", help="what to compile")
    parser.add_argument("--arch", type=int, choices=(90, 100), required=True, help="compute capability to pretend")
    parser.add_argument("--out", type=Path, required=True, help="folder that the code is written to")
    parser.add_argument("--inference", action="store_true", help="compile under no_grad, forward only")
    parser.add_argument("--no-compile", action="store_true", help="write the kernels without compiling them")
    arguments = parser.parse_args()

    load()
    # Caches are off on purpose; torch says so once per process.
    warnings.filterwarnings("ignore", message="dynamo_pgo force disabled")
    failed = []
    for builder in arguments.builders:
        try:
            _write(builder, arguments)
        except Exception:
            # The other builders still run: one failure must not hide what the rest would show.
            traceback.print_exc()
            failed.append(builder)
    if failed:
        sys.exit(f"not generated: {', '.join(failed)}")


if __name__ == "__main__":
    main()
