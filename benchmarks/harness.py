"""Timing and records of the benchmarks: one CSV row per figure, so that every number in a document can be traced."""

from __future__ import annotations

import csv
import datetime
import json
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton.testing

COLUMNS = (
    "kernel", "provider", "mode", "metric", "unit", "x_name", "x_value", "p50", "p20", "p80",
    "config", "gpu", "torch", "commit", "time",
)  # fmt: skip


class Quantiles(NamedTuple):
    """Median, 20th and 80th percentile of one measured quantity."""

    p50: float
    p20: float
    p80: float

    def rate(self, amount: float) -> Quantiles:
        """Amount per unit of time: the fast percentile of the time is the slow one of the rate."""
        return Quantiles(amount / self.p50, amount / self.p80, amount / self.p20)


def measure(fn: Callable[[], Any], *, warmup_ms: int = 25, repeat_ms: int = 100) -> Quantiles:
    """Device time of `fn` in milliseconds, L2 flushed between runs (triton.testing.do_bench)."""
    times = triton.testing.do_bench(fn, warmup=warmup_ms, rep=repeat_ms, quantiles=[0.5, 0.2, 0.8])
    return Quantiles(*times)


def measure_in_turns(
    fns: Mapping[str, Callable[[], Any]], *, budget_ms: float = 100, rounds: int = 4
) -> dict[str, Quantiles]:
    """Device time in milliseconds of several functions, called already, that are to be compared.

    They take turns, so that clocks and temperature favour none; L2 is flushed before every call. Each gets about
    ``budget_ms`` in all, and at least one call a round.
    """
    flushed = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")

    def calls(fn: Callable[[], Any], number: int) -> list[float]:
        events = [tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(number)]
        for start, end in events:
            flushed.zero_()
            start.record()
            fn()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in events]

    numbers = {name: max(1, round(budget_ms / rounds / max(calls(fn, 2)[1], 1e-3))) for name, fn in fns.items()}
    times: dict[str, list[float]] = {name: [] for name in fns}
    for _ in range(rounds):
        for name, fn in fns.items():
            times[name] += calls(fn, min(numbers[name], 200))
    levels = torch.tensor([0.5, 0.2, 0.8])
    return {name: Quantiles(*torch.tensor(found).quantile(levels).tolist()) for name, found in times.items()}


def replay(fn: Callable[[], Any]) -> Callable[[], Any]:
    """`fn` as a CUDA graph: short kernels are then timed without the host's launch costs."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        fn()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fn()
    return graph.replay


def git_commit() -> str:
    """Short hash of the checkout with "+" when it has changes besides the records, or "unknown" outside of one."""
    root = Path(__file__).resolve().parent
    try:
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True, check=True
        ).stdout.strip()
        # Rows of the run before must not make the rows of this one another commit's.
        status = ["git", "status", "--porcelain", "--untracked-files=no", "--", ":/", ":(exclude)data"]
        changed = subprocess.run(status, cwd=root, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit + ("+" if changed.strip() else "")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a record, ``config`` as a dictionary; none where there is no file."""
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return [{**row, "config": json.loads(row["config"])} for row in csv.DictReader(file)]


def latest_rows(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of the commit and machine that wrote last, whichever number of commands wrote them."""
    if not rows:
        return []
    same = ("commit", "gpu", "torch")
    return [row for row in rows if all(row[name] == rows[-1][name] for name in same)]


class RowWriter:
    """Appends rows to a CSV file; machine, versions, commit and time are filled in. ``rows``: what this one wrote."""

    def __init__(self, path: Path, commit: str | None = None) -> None:
        self._path = path
        self.rows: list[dict[str, Any]] = []
        self._same = {
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
            "torch": torch.__version__,
            "commit": commit or git_commit(),
        }

    def write(
        self,
        *,
        kernel: str,
        provider: str,
        mode: str,
        metric: str,
        unit: str,
        x_name: str,
        x_value: float,
        quantiles: Quantiles,
        config: dict[str, Any],
    ) -> None:
        """Append one row; `mode` is forward, backward, step or inference."""
        new = not self._path.exists()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        row: dict[str, Any] = {
            "kernel": kernel,
            "provider": provider,
            "mode": mode,
            "metric": metric,
            "unit": unit,
            "x_name": x_name,
            "x_value": x_value,
            **{name: f"{value:.5g}" for name, value in quantiles._asdict().items()},
            "config": json.dumps(config, sort_keys=True),
            **self._same,
            "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        }
        self.rows.append({name: str(value) for name, value in row.items()} | {"config": json.loads(row["config"])})
        with self._path.open("a", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            if new:
                writer.writeheader()
            writer.writerow(row)
