"""Speed of the emulator on this machine: warp instructions a second, plain and with race detection.

python -m tests.ptx_emulator speed [--case NAME ...] [--repeat 3]
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from . import Device, Options, load
from .corpus import cases
from .errors import LaunchError

DEFAULT_CASES = ("sm_100a/triton/attention_ws",)


def measure(name: str, race: bool, repeat: int) -> tuple[int, list[float]]:
    """(warp instructions, seconds of each launch) of a case of the corpus; parsing and lowering are not timed.

    Raises `LaunchError` for a name that no case has.
    """
    case = next((c for c in cases() if f"{c.target}/{c.name}" == name), None)
    if case is None:
        raise LaunchError(f"--case {name}: no such case; `corpus` prints their names")
    program = case.make()
    module = load(program.ptx)
    seconds, instructions = [], 0
    for _ in range(repeat):
        device = Device()
        args, _expected = program.build(device, np.random.default_rng(0))
        started = time.perf_counter()
        report = program.launch(device, module, args, Options(race=race))
        seconds.append(time.perf_counter() - started)
        instructions = report.instructions
    return instructions, seconds


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.ptx_emulator speed", description=__doc__)
    parser.add_argument("--case", action="append")
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args(argv)
    print(f"{'case':40} {'race':>5} {'warp instructions':>18} {'seconds':>8} {'k/s':>6}")
    for name in args.case or DEFAULT_CASES:
        for race in (False, True):
            n, times = measure(name, race, args.repeat)
            seconds = float(np.median(times))
            print(f"{name:40} {'yes' if race else 'no':>5} {n:>18} {seconds:>8.2f} {n / seconds / 1e3:>6.0f}")
    return 0
