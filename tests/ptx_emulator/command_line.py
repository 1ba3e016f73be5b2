"""The options of a launch as the commands take them."""

from __future__ import annotations

import argparse

from .errors import KINDS
from .launch import Options
from .schedule import ORDERS, SCHEDULES


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of `launch.Options`, for a command that launches kernels."""
    parser.add_argument("--no-race", action="store_true", help="without happens-before checks")
    parser.add_argument("--strict", action="store_true", help="demand tcgen05 fences and clean ends too")
    parser.add_argument("--schedule", choices=SCHEDULES, default="earliest")
    parser.add_argument("--order", choices=ORDERS, default="forward", help="of the blocks")
    parser.add_argument(
        "--seed", type=int, default=0, help="of random schedules and orders: the same seed, the same run"
    )
    parser.add_argument(
        "--severity", action="append", default=[], metavar="KIND=LEVEL", help=f"kinds: {', '.join(KINDS)}"
    )
    parser.add_argument("--collect", action="store_true", help="list findings instead of stopping at the first")


def options_of(args: argparse.Namespace) -> Options:
    """What `add_options` parsed. Raises `LaunchError` for a kind or level that does not exist."""
    severity = {kind: level for kind, _, level in (item.partition("=") for item in args.severity)}
    return Options(
        race=not args.no_race,
        strict=args.strict,
        schedule=args.schedule,
        order=args.order,
        seed=args.seed,
        severity=severity,
        collect=args.collect,
    )
