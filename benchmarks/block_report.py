"""Tables and the plot of the block benchmark, from the rows of its record alone.

    python -m benchmarks.block_report [CSV] [--plot PATH]

Takes the rows of the commit and machine that wrote last, so that several commands make one table and one plot; of two
rows for the same figure the later one counts. Needs no GPU. Compare only figures of one machine's run.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.block_breakdown import DIRECTIONS
from benchmarks.block_providers import PROVIDERS, VIDEO_SHAPES
from benchmarks.harness import latest_rows, read_rows

RECORD = Path(__file__).parent / "data" / "bench_attention_block.csv"
MODES = ("inference", "step")

# FastVideo under torch.compile on one H200, milliseconds, 12 heads, sparsity 0.9; the factor to beat it by.
FASTVIDEO = {"480p": {"inference": 4.21, "step": 14.0}, "720p": {"inference": 17.7, "step": 62.5}}
FASTVIDEO_FACTOR = {"480p": {"inference": 1.3, "step": 1.2}, "720p": {"inference": 1.2, "step": 1.15}}
# Dense cuDNN attention alone in the session of those figures: milliseconds, tokens, heads.
DENSE_REFERENCE = (10.6, 32760, 12)
REGION_BAR, COARSE_BAR, MEMORY_BAR, DENSE_BLOCK_BAR = 1.4, 0.15, 1.1, 4.0
# Rounding of allocations and what is too small to list.
SAVED_BAR = 1.02


class Key(NamedTuple):
    """One case of the benchmark, without seed and backend."""

    video: str
    heads: int
    sparsity: float
    lists: str

    @property
    def name(self) -> str:
        return f"{self.video} H{self.heads} {self.sparsity:g} {self.lists}"

    @classmethod
    def of(cls, row: dict[str, Any]) -> Key:
        config = row["config"]
        return cls(config["video"], config["heads"], config["sparsity"], config["lists"])


def _order(key: Key) -> tuple[Any, ...]:
    lists = (key.lists != "selected", key.lists != "random", key.lists)
    return list(VIDEO_SHAPES).index(key.video), key.heads, key.sparsity, lists


class Figures:
    """The medians of a record, by case."""

    def __init__(self, rows: Iterable[dict[str, Any]]) -> None:
        self.rows = list(rows)
        self._times: dict[tuple[Key, str, str], float] = {}
        self._dense: dict[tuple[str, int, str], float] = {}
        self.dense_alone: dict[tuple[str, int], float] = {}
        for row in self.rows:
            if row["metric"] != "time":
                continue
            key, milliseconds = Key.of(row), float(row["p50"])
            if row["provider"] == "cudnn_dense":
                self.dense_alone[key.video, key.heads] = milliseconds
            elif row["provider"] == "dense_compiled":
                self._dense[key.video, key.heads, row["mode"]] = milliseconds
            else:
                self._times[key, row["provider"], row["mode"]] = milliseconds

    @property
    def keys(self) -> list[Key]:
        return sorted({key for key, _, _ in self._times}, key=_order)

    def time(self, key: Key, provider: str, mode: str) -> float:
        """Milliseconds, NaN where not measured. Dense attention depends on neither sparsity nor lists."""
        if provider == "dense_compiled":
            return self._dense.get((key.video, key.heads, mode), math.nan)
        return self._times.get((key, provider, mode), math.nan)

    def fastvideo(self, key: Key, mode: str) -> float:
        """FastVideo's figure in this run's milliseconds, else NaN; dense attention grows with the tokens' square."""
        dense_alone = self.dense_alone.get((key.video, key.heads))
        known = key.heads == 12 and key.sparsity == 0.9 and key.lists == "selected" and key.video in FASTVIDEO
        if not known or dense_alone is None:
            return math.nan
        milliseconds, tokens, heads = DENSE_REFERENCE
        scale = (math.prod(VIDEO_SHAPES[key.video]) / tokens) ** 2 * key.heads / heads
        return FASTVIDEO[key.video][mode] * dense_alone / (milliseconds * scale)

    def latest(self, metric: str, *names: str) -> dict[tuple[Any, ...], dict[str, Any]]:
        """Rows of a metric by case, mode, and the named fields of their config."""
        return {
            (Key.of(row), row["mode"], *(row["config"].get(name) for name in names)): row
            for row in self.rows
            if row["metric"] == metric
        }


def verdict(figure: float, bar: float) -> str:
    """Whether ``figure`` is at most ``bar``; what is 0 or NaN was not measured."""
    return "-" if not (figure > 0 and bar > 0) else "ok" if figure <= bar else "MISSED"


def table(figures: Figures) -> list[str]:
    """Milliseconds per provider, ours over dense, and the bar from FastVideo's figure."""
    short = [name.removesuffix("_compiled") for name in PROVIDERS]
    head = "".join(f"{name.replace('_eager', ' eager'):>11}" for name in short)
    lines = [f"{'ms':<24} {'':<9}{head} ours/dense  FastVideo scaled / factor = bar"]
    for key in figures.keys:
        for mode in MODES:
            times = [figures.time(key, name, mode) for name in PROVIDERS]
            compiled, dense_block = times[1], times[2]
            line = f"{key.name:<24} {mode:<9}" + "".join(f"{time:>11.3f}" for time in times)
            line += f"{compiled / dense_block:>11.3f}"
            if mode == "inference" and key.sparsity == 0.9 and key.video == "480p":
                line += f" (1/{DENSE_BLOCK_BAR:g} {verdict(compiled, dense_block / DENSE_BLOCK_BAR)})"
            peer = figures.fastvideo(key, mode)
            if not math.isnan(peer):
                factor = FASTVIDEO_FACTOR[key.video][mode]
                line += f"  {peer:.2f} / {factor} = {peer / factor:.2f} {verdict(compiled, peer / factor)}"
            lines.append(line)
    for (video, heads), milliseconds in figures.dense_alone.items():
        lines.append(f"dense attention alone, {video} H{heads}: {milliseconds:.2f} ms")
    return lines if len(lines) > 1 else []


def region_table(figures: Figures) -> list[str]:
    """Region time over its floor, and what the other categories take, one line per case and direction."""
    floors = figures.latest("floor", "category", "place")
    times = figures.latest("share_time", "category", "place")
    bytes_over_floor = figures.latest("kernel_bytes_over_floor", "category", "place")
    coarse_shares = figures.latest("coarse_and_selection")
    lines = []
    places = {place[:2] for place in floors}
    for key, mode in sorted(places, key=lambda place: (_order(place[0]), DIRECTIONS.index(place[1]))):

        def value(rows: dict[tuple[Any, ...], dict[str, Any]], *rest: str, key: Key = key, mode: str = mode) -> float:
            row = rows.get((key, mode, *rest))
            return float(row["p50"]) if row else math.nan

        def ratio(place: str) -> float:
            floor = value(floors, "region", place)
            return value(times, "region", place) / floor if floor else math.nan

        share = value(coarse_shares)
        lines.append(
            f"{key.name:<24} {mode:<9} {value(times, 'region', 'all'):7.3f} / {value(floors, 'region', 'all'):6.3f} = "
            f"{ratio('all'):5.2f} {verdict(ratio('all'), REGION_BAR):<6} ({ratio('before'):.2f}, {ratio('after'):.2f})"
            f"  {value(bytes_over_floor, 'region', 'all'):5.2f}  {value(times, 'opaque', 'all'):8.3f} "
            f"{value(times, 'coarse', 'all'):7.3f} {share:6.1%}"
            + (f" {verdict(share, COARSE_BAR)}" if mode == "inference" else "")
        )
    head = f"{'ms':<24} {'':<9}  region / floor (before, after), kernels' bytes / floor, opaque, coarse, with top-k"
    return [head, *lines] if lines else []


def memory_table(figures: Figures) -> list[str]:
    """Peak memory of a step against the dense model, and what a layer holds between forward and backward."""
    peaks: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in figures.rows:
        if row["metric"] == "peak_memory":
            config = row["config"]
            checkpointed = config.get("checkpointed", False)
            place = (Key.of(row), int(float(row["x_value"])), checkpointed)
            peaks.setdefault(place, {})[config["attention"]] = float(row["p50"])
    lines = []
    for (key, blocks, checkpointed), found in sorted(peaks.items(), key=lambda x: (_order(x[0][0]), x[0][1:])):
        for dense, ours in (("dense", "ungated"), ("dense", "gated"), ("dense model", "ungated model")):
            if dense in found and ours in found:
                what = f"step of {blocks}{', checkpointed' if checkpointed else ''}"
                lines.append(
                    f"{key.video} H{key.heads} peak, {what}: {dense} {found[dense]:.2f} GiB, {ours} {found[ours]:.2f}"
                    f" = x{found[ours] / found[dense]:.3f} "
                    f"{verdict(found[ours], MEMORY_BAR * found[dense])}"
                )
    for row in figures.latest("saved_bytes_per_layer", "attention", "checkpointed").values():
        config, held = row["config"], float(row["p50"])
        expected = config["expected_bytes"]
        kind = config["attention"] + (" checkpointed" if config["checkpointed"] else "")
        lines.append(
            f"{config['video']} H{config['heads']} {kind}: a layer holds {held / 2**20:.2f} MiB, expected "
            f"{expected / 2**20:.2f} {verdict(held, SAVED_BAR * expected)}"
            + (f", {config['padded']} in tile order" if config.get("padded") is not None else "")
        )
    return lines


def report(rows: Sequence[dict[str, Any]]) -> str:
    """All tables that the rows have something for."""
    figures = Figures(rows)
    parts = (table(figures), region_table(figures), memory_table(figures))
    return "\n\n".join("\n".join(part) for part in parts if part)


def plot(rows: Sequence[dict[str, Any]], path: Path) -> bool:
    """Times over the dense block of the same case; False where there are none or matplotlib is missing."""
    try:
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ImportError:
        print("matplotlib is not installed: no plot", file=sys.stderr)
        return False
    figures = Figures(rows)
    keys = [key for key in figures.keys if figures.time(key, "dense_compiled", "inference") > 0]
    if not keys:
        return False
    figure = Figure(figsize=(max(7.0, 0.9 * len(keys) + 3), 7), layout="constrained")
    FigureCanvasSVG(figure)
    for axes, mode in zip(figure.subplots(2, 1, sharex=True), MODES, strict=True):
        for place, provider in enumerate(PROVIDERS):
            bars = [figures.time(key, provider, mode) / figures.time(key, "dense_compiled", mode) for key in keys]
            axes.bar([i + 0.2 * (place - 1.5) for i in range(len(keys))], bars, 0.19, label=provider.replace("_", " "))
        label = "FastVideo compiled, scaled"
        for i, key in enumerate(keys):
            peer = figures.fastvideo(key, mode) / figures.time(key, "dense_compiled", mode)
            if not math.isnan(peer):
                axes.hlines(peer, i - 0.4, i + 0.4, colors="black", linestyles="dashed", label=label)
                label = ""  # one entry of the legend
        axes.set_ylabel(f"{mode}: time / dense block")
        axes.set_xticks(range(len(keys)), [key.name.replace(" ", "\n") for key in keys], fontsize="small")
        axes.legend(fontsize="small", ncols=5, loc="lower left", bbox_to_anchor=(0, 1), frameon=False)
    figure.suptitle("Self-attention of a Wan block, time over the compiled block with dense cuDNN attention")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path, nargs="?", default=RECORD)
    parser.add_argument("--plot", type=Path, help="default: beside the record, .svg")
    args = parser.parse_args()
    rows = latest_rows(read_rows(args.record))
    if not rows:
        parser.error(f"{args.record}: no rows")
    print(report(rows))
    plot(rows, args.plot or args.record.with_suffix(".svg"))


if __name__ == "__main__":
    main()
