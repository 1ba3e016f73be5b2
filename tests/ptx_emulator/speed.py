"""Speed of the emulator on this machine: warp instructions a second, plain and with race detection.

    python -m tests.ptx_emulator speed [--case NAME ...] [--repeat 3]
"""

from __future__ import annotations

import argparse
import time

from . import Options

DEFAULT_CASES = ("triton/attention_ws",)


def measure(name: str, race: bool, repeat: int) -> tuple[int, float]:
    """(warp instructions, best seconds) of a case of the corpus; lowering is not counted, launches are."""
    from .corpus import cases, prepare

    case = next(c for c in cases() if c.name == name)
    best, instructions = float("inf"), 0
    prepared = prepare(case)
    for _ in range(repeat):
        launch = prepared()
        started = time.perf_counter()
        instructions = launch(Options(race=race)).instructions
        best = min(best, time.perf_counter() - started)
    return instructions, best


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.ptx_emulator speed", description=__doc__)
    parser.add_argument("--case", action="append")
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args(argv)
    print(f"{'case':40} {'race':>5} {'warp instructions':>18} {'seconds':>8} {'k/s':>6}")
    for name in args.case or DEFAULT_CASES:
        for race in (False, True):
            n, seconds = measure(name, race, args.repeat)
            print(f"{name:40} {'yes' if race else 'no':>5} {n:>18} {seconds:>8.2f} {n / seconds / 1e3:>6.0f}")
    return 0
