"""Runs cases of the corpus one after the other and prints what became of each."""

from __future__ import annotations

import argparse
import time

from ..command_line import add_options, options_of
from ..errors import EmulatorError
from . import cases, run


def main(argv: list[str]) -> int:
    """Returns the number of cases that failed, 99 at most."""
    parser = argparse.ArgumentParser(prog="python -m tests.ptx_emulator corpus", description=__doc__)
    parser.add_argument("names", nargs="*", help="run only cases whose target/name contains one of these")
    parser.add_argument("--small", action="store_true", help="only the cases that CI runs")
    parser.add_argument("--target", help="sm_90a, sm_100a, sm_120a or sm_121a")
    add_options(parser)
    chosen = parser.parse_args(argv)
    options = options_of(chosen)
    failed = count = 0
    for case in cases(chosen.target, chosen.small):
        title = f"{case.target}/{case.name}"
        if chosen.names and not any(name in title for name in chosen.names):
            continue
        count += 1
        start = time.perf_counter()
        try:
            report = run(case, options, chosen.seed)
        except Exception as error:
            failed += 1
            first = (str(error).strip() or "no message").splitlines()[0]
            print(f"{title}: {type(error).__name__}: {first}", flush=True)
            continue
        seconds = time.perf_counter() - start
        print(
            f"{title}: ok, {report.instructions} instructions, {len(report.lints)} lints, {seconds:.1f} s", flush=True
        )
    if count == 0:
        raise EmulatorError(f"no case has a name with {' or '.join(chosen.names)}; without names all are run")
    print(f"{count - failed} of {count} cases agree")
    return min(failed, 99)
