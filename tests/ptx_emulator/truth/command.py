"""Compare the emulator with what an H200 computed, case by case."""

from __future__ import annotations

import argparse
import time

from .. import Options
from .cases import cases
from .replay import check, replay


def main(argv: list[str]) -> int:
    """Returns the number of cases that failed, 99 at most."""
    parser = argparse.ArgumentParser(prog="python -m tests.ptx_emulator truth", description=__doc__)
    parser.add_argument("names", nargs="*", help="only cases whose name contains one of these")
    parser.add_argument("--numpy", action="store_true", help="compare the GPU with numpy instead of with the emulator")
    parser.add_argument("--no-race", action="store_true", help="without race detection")
    parser.add_argument("--strict", action="store_true", help="demand what is demanded of our own kernels")
    parser.add_argument("--schedule", default="earliest", help="earliest, latest or random")
    parser.add_argument("--order", default="forward", help="forward, reversed or shuffled")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args(argv)
    options = Options(
        race=not chosen.no_race,
        strict=chosen.strict,
        schedule=chosen.schedule,
        order=chosen.order,
        seed=chosen.seed,
    )
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
    print(f"{count - failed} of {count} cases agree")
    return min(failed, 99)
