"""Compare the emulator with what an H200 computed, case by case."""

from __future__ import annotations

import argparse
import time

from ..command_line import add_options, options_of
from ..errors import EmulatorError
from .cases import cases
from .replay import check, replay


def main(argv: list[str]) -> int:
    """Returns the number of cases that failed, 99 at most."""
    parser = argparse.ArgumentParser(prog="python -m tests.ptx_emulator truth", description=__doc__)
    parser.add_argument("names", nargs="*", help="only cases whose name contains one of these")
    parser.add_argument("--numpy", action="store_true", help="compare the GPU with numpy instead of with the emulator")
    add_options(parser)
    chosen = parser.parse_args(argv)
    options = options_of(chosen)
    failed = count = 0
    for case in cases():
        if chosen.names and not any(name in case.name for name in chosen.names):
            continue
        count += 1
        start = time.perf_counter()
        try:
            report = None
            if chosen.numpy:
                check(case)
            else:
                report = replay(case, options)
        except Exception as error:
            failed += 1
            print(f"{case.name}: {type(error).__name__}: {error}", flush=True)
            continue
        seconds = time.perf_counter() - start
        if report is not None:
            print(f"{case.name}: {report.instructions} warp instructions, {seconds:.2f} s", flush=True)
        else:
            print(f"{case.name}: {'refused, as on the GPU' if case.faults else 'as numpy'}", flush=True)
    if count == 0:
        raise EmulatorError(f"no case has a name with {' or '.join(chosen.names)}; without names all are run")
    print(f"{count - failed} of {count} cases agree")
    return min(failed, 99)
