"""The mutation score of the emulator, printed and, with --write, stored beside this file.

The table that is stored (score.csv, summary.csv) is of the default kernels and limits.
"""

from __future__ import annotations

import argparse
import time
from concurrent.futures import ProcessPoolExecutor

from ..corpus import cases
from .plan import KERNELS, subject
from .score import MISSED, REDUNDANT, Row, score_kernel, sums, table, verdicts, write

REQUIRED = 0.95


def one_kernel(title: str, limit: int | None, kinds: tuple[str, ...]) -> tuple[list[Row], float]:
    """Rows of one member of the corpus, and the seconds that it took."""
    started = time.perf_counter()
    rows = score_kernel(subject(title), limit, lambda kind: not kinds or any(k in kind for k in kinds))
    return rows, time.perf_counter() - started


def main(argv: list[str]) -> int:
    """Returns 1 where the score is below what is required."""
    parser = argparse.ArgumentParser(prog="python -m tests.ptx_emulator mutants", description=__doc__)
    parser.add_argument("names", nargs="*", help="only kernels whose target/name contains one of these")
    parser.add_argument("--kind", action="append", default=[], help="only kinds that contain this text")
    parser.add_argument("--limit", type=int, help="mutants of a kind in a kernel (0: all)")
    parser.add_argument("--all-kernels", action="store_true", help="every small member of the corpus")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--redundant", action="store_true", help="list the redundant ones too")
    parser.add_argument("--write", action="store_true", help="store the table")
    args = parser.parse_args(argv)
    titles = [f"{c.target}/{c.name}" for c in cases(small_only=True)] if args.all_kernels else list(KERNELS)
    titles = [t for t in titles if not args.names or any(n in t for n in args.names)]
    rows: list[Row] = []
    with ProcessPoolExecutor(args.jobs) as pool:
        jobs = [pool.submit(one_kernel, title, args.limit, tuple(args.kind)) for title in titles]
        for title, job in zip(titles, jobs, strict=True):
            found, seconds = job.result()
            rows += found
            missed = sum(r.verdict == MISSED for r in found)
            print(f"{title}: {len(found)} mutants, {missed} missed, {seconds:.0f} s", flush=True)
    results = sums(rows)
    for by in ("kernel", "kind", "all"):
        print("\n" + table(results, by))
    print("\n" + verdicts(rows))
    for r in rows:
        if r.verdict in (MISSED, "crash", "refused") or (args.redundant and r.verdict == REDUNDANT):
            print(f"{r.verdict} {r.note}: {r.kernel} line {r.line}: {r.kind} {r.fault}: {r.instruction}")
    if args.write:
        write(rows)
    total = results[-1] if results else None
    return 0 if total is None or total.score >= REQUIRED else 1
