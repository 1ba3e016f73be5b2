"""What the native kernels of sm_90 have to reach, and a table that says which of it they do reach.

    python -m benchmarks.attention_bars [--record PATH] [--block PATH] [--host PATH]

made from the rows of the last commit and machine in the records of bench_attention, bench_attention_block and
bench_native_host; without a GPU.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.attention_providers import PEERS
from benchmarks.harness import latest_rows, read_rows

DATA = Path(__file__).parent / "data"
RECORD = DATA / "attention_sm90.csv"
MODES = ("forward", "backward")
OURS = "sm90"
# From here on the device is what takes the time, not the host.
LONG = 16384
# Over the best peer of the row, by lists: (forward, backward) from LONG tokens on, and below.
OVER_PEERS = {"random": ((1.08, 1.05), (1.15, 1.15)), "overlap80": ((1.30, 1.25), None)}
HALF_HEAD_DIM = 0.8
# Milliseconds of the attention block of a model, compiled (480p, 12 heads, sparsity 0.9), by lists and mode.
BLOCK_MS = {
    ("overlap80", "inference"): 2.4,
    ("overlap80", "step"): 8.5,
    ("random", "inference"): 2.6,
    ("random", "step"): 9.0,
}
DENSE_BLOCK = 4.0
# Microseconds of the host for one native call, by mode and form.
HOST_US = {("forward", "functional"): 16.0, ("forward", "out"): 13.0, ("inference", "public"): 60.0}


class Case(NamedTuple):
    """What a row of the table is about."""

    tokens: int
    lists: str
    head_dim: int
    block_size: int
    launch: str


class Bar(NamedTuple):
    """Ours against ``against``; ``wanted`` is the least ratio, NaN where none was promised."""

    case: Case
    mode: str
    ours: float
    name: str
    against: float
    wanted: float

    @property
    def ratio(self) -> float:
        return self.ours / self.against

    @property
    def verdict(self) -> str:
        if math.isnan(self.wanted):
            return ""
        return "reached" if self.ratio >= self.wanted else "MISSED" if not math.isnan(self.ratio) else "not measured"


class Rates:
    """TFLOPS by case, provider and mode; of several rows, the last."""

    def __init__(self, rows: Sequence[dict[str, Any]]) -> None:
        self._found: dict[tuple[Case, str, str], float] = {}
        self.shares: dict[Case, float] = {}
        for row in rows:
            if row["kernel"] == "attention" and row["metric"] == "throughput":
                config = row["config"]
                case = Case(
                    int(float(row["x_value"])), config["lists"], config["head_dim"], config["block_size"],
                    config["launch"],
                )  # fmt: skip
                self._found[case, row["provider"], row["mode"]] = float(row["p50"])
                self.shares[case] = config.get("neighbours_share", math.nan)

    @property
    def cases(self) -> list[Case]:
        order = ("random", "overlap25", "overlap50", "overlap65", "overlap80")
        rank = {name: place for place, name in enumerate(order)}
        cases = {case for case, _, _ in self._found}
        return sorted(
            cases, key=lambda c: (c.block_size, -c.head_dim, rank.get(c.lists, 9), c.lists, c.tokens, c.launch)
        )

    def get(self, case: Case, provider: str, mode: str) -> float:
        return self._found.get((case, provider, mode), math.nan)

    def best_peer(self, case: Case, mode: str) -> tuple[str, float]:
        known = [(self.get(case, peer, mode), peer) for peer in PEERS]
        rate, name = max(((r, n) for r, n in known if not math.isnan(r)), default=(math.nan, "no peer"))
        return name, rate


def wanted_ratio(case: Case, mode: str) -> float:
    """What was promised over the best peer, NaN where nothing was."""
    if case.head_dim != 128 or case.lists not in OVER_PEERS:
        return math.nan
    if case.block_size == 128:
        return 1.0 if mode == "forward" and case.lists == "random" else math.nan
    levels = OVER_PEERS[case.lists][case.tokens < LONG]
    return levels[MODES.index(mode)] if levels else math.nan


def bars(rows: Sequence[dict[str, Any]]) -> list[Bar]:
    """One for every case and mode that ours was measured on, and one more for the smaller head dim."""
    rates = Rates(rows)
    found = []
    for mode in MODES:
        for case in rates.cases:
            own = rates.get(case, OURS, mode)
            name, rate = rates.best_peer(case, mode)
            if math.isnan(own) and math.isnan(rate):
                continue
            found.append(Bar(case, mode, own, name, rate, wanted_ratio(case, mode)))
            if case.head_dim == 64:
                whole = rates.get(case._replace(head_dim=128), OURS, mode)
                found.append(Bar(case, mode, own, "ours at D 128", whole, HALF_HEAD_DIM))
    return found


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The bars, one a line, with dense attention and how much neighbours share beside them."""
    rates = Rates(rows)
    lines = [
        f"{'tokens':>7} {'lists':13} {'share':>5} {'D':>3} {'block':>5} {'launch':10} {'mode':8} {'ours':>5} "
        f"{'best peer':>16} {'':>5} {'ratio':>6} {'bar':>5} {'':8} {'dense':>5}"
    ]
    for bar in bars(rows):
        case = bar.case
        dense = rates.get(case, "cudnn_dense", bar.mode)
        lines.append(
            f"{case.tokens:>7} {case.lists:13} {_figure(rates.shares[case], '.2f'):>5} {case.head_dim:>3} "
            f"{case.block_size:>5} {case.launch:10} {bar.mode:8} {_figure(bar.ours):>5} {bar.name:>16} "
            f"{_figure(bar.against):>5} {_figure(bar.ratio, '.3f'):>6} {_figure(bar.wanted, '.2f'):>5} "
            f"{bar.verdict:8} {_figure(dense):>5}"
        )
    verdicts = [bar.verdict for bar in bars(rows) if bar.verdict]
    lines.append(f"{verdicts.count('reached')} of {len(verdicts)} bars reached")
    return "\n".join(lines)


def block_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The block of a model at 480p against what it may take, and against the one with dense attention."""

    def found(provider: str, lists: str, mode: str) -> float:
        times = [
            float(row["p50"])
            for row in rows
            if (row["kernel"], row["provider"], row["mode"], row["metric"])
            == ("attention_block", provider, mode, "time")
            and (row["config"]["video"], row["config"]["heads"], row["config"]["lists"]) == ("480p", 12, lists)
            and (lists == "none" or row["config"]["sparsity"] == 0.9)
        ]
        return times[-1] if times else math.nan

    lines = []
    for (lists, mode), most in BLOCK_MS.items():
        own = found("ours_compiled", lists, mode)
        lines.append(_limit(f"block 480p {lists} {mode}, ms", own, most))
        if mode == "inference":
            speedup = found("dense_compiled", "none", mode) / own
            lines.append(_limit(f"dense block / block {lists}", -speedup, -DENSE_BLOCK))
    return lines


def host_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The host's time for one native call against what it may take."""
    found = {(row["mode"], row["config"]["form"]): float(row["p50"]) for row in rows if row["provider"] == OURS}
    return [_limit(f"host {' '.join(key)}, us", found.get(key, math.nan), most) for key, most in HOST_US.items()]


def _limit(what: str, value: float, most: float) -> str:
    """A line; what must not be less is given with both signs turned."""
    verdict = "not measured" if math.isnan(value) else "reached" if value <= most else "MISSED"
    return f"{what:32} {_figure(abs(value), '.3g'):>6} {'>=' if most < 0 else '<='} {abs(most):<5g} {verdict}"


def all_rates(rows: Sequence[dict[str, Any]], providers: Iterable[str]) -> str:
    """TFLOPS of everybody, a line for each case and mode."""
    rates, names = Rates(rows), list(providers)
    lines = [f"{'tokens':>7} {'lists':13} {'D':>3} {'block':>5} {'launch':10} {'mode':8} " + " ".join(names)]
    for mode in MODES:
        for case in rates.cases:
            figures = " ".join(f"{_figure(rates.get(case, name, mode)):>{len(name)}}" for name in names)
            lines.append(
                f"{case.tokens:>7} {case.lists:13} {case.head_dim:>3} {case.block_size:>5} {case.launch:10} "
                f"{mode:8} {figures}"
            )
    return "\n".join(lines)


def _figure(value: float, form: str = ".0f") -> str:
    return "-" if math.isnan(value) else format(value, form)


def main() -> None:
    parser = argparse.ArgumentParser(description="The bars of the native kernels.")
    parser.add_argument("--record", type=Path, default=RECORD)
    parser.add_argument("--block", type=Path, default=DATA / "bench_attention_block.csv")
    parser.add_argument("--host", type=Path, default=DATA / "native_host.csv")
    args = parser.parse_args()
    print(table(latest_rows(read_rows(args.record))))
    print("", *block_lines(latest_rows(read_rows(args.block))), sep="\n")
    print("", *host_lines(latest_rows(read_rows(args.host))), sep="\n")


if __name__ == "__main__":
    main()
