"""The self-attention of a Wan block, without its projections: what a model pays for it.

    python -m benchmarks.bench_attention_block [--quick] [--providers P ...] [--shapes 480p 720p] [--heads 12 40] \
        [--sparsity 0.8 0.9 0.95] [--lists selected random overlap80] [--parts times breakdown memory]

times: inference (forward under no_grad) and training step (forward, gradients of q, k, v and gate) of ours eager, ours
compiled, dense cuDNN attention compiled, FlexAttention VSA compiled. breakdown: the kernels of ours compiled by name
against the memory floor (block_breakdown.py says what counts). memory: peak of a training step of 1 and 8 blocks with
their projections. Rows go to data/bench_attention_block.csv, a plot beside it. Read the ratios of one run.
"""

from __future__ import annotations

import argparse
import gc
import os
import re
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

import vsa_inductor as vsa
from benchmarks.block_breakdown import added_time, kernel_lines, profiled, selection_time, shares
from benchmarks.block_providers import PROVIDERS, Block, BlockCase, dense, stacked_step
from benchmarks.harness import Quantiles, RowWriter, measure

MODES = ("inference", "step")
PARTS = ("times", "breakdown", "memory")
DATA = Path(__file__).parent / "data"

# FastVideo under torch.compile on one H200, milliseconds, 12 heads, sparsity 0.9; the factor to beat it by.
FASTVIDEO = {"480p": {"inference": 4.21, "step": 14.0}, "720p": {"inference": 17.7, "step": 62.5}}
FASTVIDEO_FACTOR = {"480p": {"inference": 1.3, "step": 1.2}, "720p": {"inference": 1.2, "step": 1.15}}
# Dense cuDNN attention alone in the session of those figures: milliseconds, tokens, heads.
DENSE_REFERENCE = (10.6, 32760, 12)
REGION_BAR, COARSE_BAR, MEMORY_BAR, DENSE_BLOCK_BAR = 1.4, 0.15, 1.1, 4.0


@dataclass
class Results:
    """What one run found, by (case, provider, mode) and as lines to print last."""

    milliseconds: dict[tuple[BlockCase, str, str], float] = field(default_factory=dict)
    dense_alone: dict[tuple[str, int], float] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


class Bench:
    """The parts of the benchmark; every figure becomes a row at once, so that a run cut short leaves what it had."""

    def __init__(self, writer: RowWriter, backend: str, verbose: bool) -> None:
        self.writer, self.backend, self.verbose = writer, backend, verbose
        self.results = Results()
        self._copy_rate: float | None = None

    def guarded(self, what: str, run: Callable[..., Any], *args: Any) -> Any:
        """``run(*args)``, or None and a remembered failure: the other parts still run."""
        started = time.perf_counter()
        try:
            return run(*args)
        except Exception as error:
            traceback.print_exc(limit=-3)
            self.results.failed.append(f"{what}: {type(error).__name__}: {str(error).strip()[:160]}")
            return None
        finally:
            print(f"# {what}: {time.perf_counter() - started:.1f} s", file=sys.stderr, flush=True)
            gc.collect()
            torch.compiler.reset()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def record(
        self,
        case: BlockCase,
        provider: str,
        mode: str,
        metric: str,
        unit: str,
        figure: Quantiles | float,
        kernel: str = "attention_block",
        x: tuple[str, float] | None = None,
        **config: Any,
    ) -> None:
        quantiles = figure if isinstance(figure, Quantiles) else Quantiles(figure, figure, figure)
        x_name, x_value = x or ("tokens", case.tokens)
        self.writer.write(
            kernel=kernel,
            provider=provider,
            mode=mode,
            metric=metric,
            unit=unit,
            x_name=x_name,
            x_value=x_value,
            quantiles=quantiles,
            config=case.config(backend=self.backend, **config),
        )

    def copy_rate(self, case: BlockCase) -> float:
        """Bytes read plus written per millisecond by a device copy, measured once."""
        if self._copy_rate is None:
            size = 1 << (30 if case.device == "cuda" else 22)
            source = torch.empty(size, dtype=torch.uint8, device=case.device)
            target = torch.empty_like(source)
            rate = timed(lambda: target.copy_(source), case.device).rate(2 * size)
            self._copy_rate = rate.p50
            in_terabytes = Quantiles(*(value / 1e9 for value in rate))
            self.record(case, "torch", "inference", "bandwidth", "TB/s", in_terabytes, "device_copy", ("bytes", size))
        return self._copy_rate

    def measure_dense_alone(self, case: BlockCase) -> None:
        """Dense attention without anything around it: the yardstick between this run and the published figures."""
        if (case.video, case.heads) in self.results.dense_alone:
            return
        q, k, v = case.randn(3, case.batch, case.tokens, case.heads, case.head_dim)
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
        quantiles = timed(lambda: dense(q, k, v), case.device)
        self.results.dense_alone[case.video, case.heads] = quantiles.p50
        config: dict[str, Any] = {"density": 1.0, "sparsity": 0.0, "lists": "none"}
        self.record(case, "cudnn_dense", "inference", "time", "ms", quantiles, "attention", **config)

    def measure_provider(
        self, case: BlockCase, provider: str, expected: torch.Tensor | None, times: bool, breakdown: bool
    ) -> torch.Tensor | None:
        """The figures of one provider; returns the output that the next sparse one is compared with."""
        block = Block(provider, case)
        if times:
            expected = self.measure_times(block, expected)
        if breakdown:
            self.break_down(block)
        return expected

    def measure_times(self, block: Block, expected: torch.Tensor | None) -> torch.Tensor | None:
        """Inference and step; ``expected`` is the output of another sparse provider."""
        case, provider = block.case, block.provider
        config: dict[str, Any] = {"gate": provider != "dense_compiled"}
        out = block.forward()
        if provider == "dense_compiled":
            config |= {"density": 1.0, "sparsity": 0.0, "lists": "none"}
        elif expected is None:
            expected = out
        else:
            # Rounding moves some of the selected blocks; a wrong computation is off by about 1.
            deviation = float((out.float() - expected.float()).norm() / expected.float().norm())
            self.record(case, provider, "inference", "deviation", "ratio", deviation, **config)
            if not deviation <= (0.3 if case.lists == "selected" else 0.03):
                self.results.failed.append(f"{case.name} {provider}: output deviates by {deviation:.3f}")
        if provider == "dense_compiled" and case.device == "cuda":
            names = [kernel.name for kernel in profiled(lambda _: block.forward(), repeats=1)]
            if not any("cudnn" in name for name in names):
                raise RuntimeError(f"dense attention did not run in cuDNN but in one of {', '.join(names)[:300]}")
        for mode, run in (("inference", block.forward), ("step", block.step)):
            if mode == "step" and provider == "flex_compiled" and case.device == "cpu":
                continue  # FlexAttention has no backward there
            quantiles = timed(run, case.device)
            self.results.milliseconds[case, provider, mode] = quantiles.p50
            self.record(case, provider, mode, "time", "ms", quantiles, **config)
        return expected

    def break_down(self, block: Block) -> None:
        """Kernels of ours compiled, and the region against its floor, for inference and both directions of a step."""
        case = block.case
        rate = self.copy_rate(case)
        block.forward(), block.step()
        directions: dict[str, tuple[Callable[..., Any], Callable[[], Any]]] = {
            "inference": (lambda _: block.forward(), lambda: None),
            "forward": (lambda _: block.training_forward(), lambda: None),
            "backward": (block.backward, block.training_forward),
        }
        for mode, (run, prepare) in directions.items():
            kernels = profiled(run, prepare)
            total = added_time(kernels)
            if case.device == "cuda" and not any(kernel.category == "opaque" for kernel in kernels):
                raise RuntimeError(f"{mode}: the profiler saw no attention kernel among {len(kernels)} kernels")
            for place, kernel in enumerate(kernels):
                self.record(
                    case, "ours_compiled", mode, "kernel_time", "ms", kernel.milliseconds, x=("order", place),
                    kernel_name=kernel.name, category=kernel.category, place=kernel.place, operator=kernel.operator,
                )  # fmt: skip
            parts = shares(kernels, case, mode, rate)
            for part in parts:
                config: dict[str, Any] = {"category": part.category, "place": part.place or "all"}
                self.record(case, "ours_compiled", mode, "share_time", "ms", part.milliseconds, **config)
                self.record(case, "ours_compiled", mode, "floor", "ms", part.floor, **config)
                self.record(case, "ours_compiled", mode, "time_over_floor", "ratio", part.ratio, **config)
            opaque, coarse, before, after, region = parts
            coarse_share = (coarse.milliseconds + selection_time(kernels)) / total if total else float("nan")
            self.record(case, "ours_compiled", mode, "coarse_and_selection", "ratio", coarse_share)
            self.results.lines.append(
                f"{case.name:<24} {mode:<9} region {region.milliseconds:7.3f} / floor {region.floor:6.3f} = "
                f"{region.ratio:5.2f} {verdict(region.ratio, REGION_BAR)} (before {before.ratio:.2f}, after "
                f"{after.ratio:.2f})  opaque {opaque.milliseconds:.3f} ({opaque.ratio:.1f} floors)  coarse "
                f"{coarse.milliseconds:.3f}  coarse + selection {coarse_share:.1%}"
                + (f" {verdict(coarse_share, COARSE_BAR)}" if mode == "inference" else "")
            )
            if self.verbose:
                print(f"{case.name} {mode}: {total:.3f} ms in kernels", *kernel_lines(kernels), sep="\n", flush=True)

    def measure_memory(self, case: BlockCase) -> None:
        """Peak memory of a training step of 1 and 8 blocks, against the same model with dense attention."""
        peaks: dict[tuple[str, int], float] = {}
        for attention in ("dense", "ungated", "gated"):
            provider = "dense_compiled" if attention == "dense" else "ours_compiled"
            for blocks in (1, 8):
                peak, held = peak_memory(stacked_step, case, attention, blocks)
                peaks[attention, blocks] = peak
                config: dict[str, Any] = {"attention": attention, "held_between_steps": round(held, 3)}
                config |= {"kernel": "attention_block_stack", "x": ("blocks", blocks)}
                self.record(case, provider, "step", "peak_memory", "GiB", peak, **config)
            torch.compiler.reset()
        for blocks in (1, 8):
            ours, gated, reference = (peaks[name, blocks] for name in ("ungated", "gated", "dense"))
            self.results.lines.append(
                f"{case.name:<24} peak memory, step of {blocks} blocks: ours {ours:.2f} GiB (gated {gated:.2f}), dense "
                f"{reference:.2f}, ratio {ours / reference:.2f} {verdict(ours, MEMORY_BAR * reference)} "
                f"(gated {gated / reference:.2f})"
            )


def timed(fn: Callable[[], Any], device: str) -> Quantiles:
    """Milliseconds of ``fn``, which also compiles here."""
    if device == "cuda":
        fn()
        return measure(fn, warmup_ms=50, repeat_ms=300)
    times = []
    for _ in range(4):
        started = time.perf_counter()
        fn()
        times.append((time.perf_counter() - started) * 1000)
    times = sorted(times[1:])
    return Quantiles(times[1], times[0], times[2])


def peak_memory(build: Callable[..., Callable[[], None]], *args: Any) -> tuple[float, float]:
    """GiB: the peak of a second step of ``build(*args)``, and what it holds between steps."""
    on_gpu = torch.cuda.is_available()
    gc.collect()
    before = torch.cuda.memory_allocated() if on_gpu else 0
    step = build(*args)
    step()
    gc.collect()
    if not on_gpu:
        return float("nan"), float("nan")
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    step()
    return (torch.cuda.max_memory_allocated() - before) / 2**30, (held - before) / 2**30


def verdict(figure: float, bar: float) -> str:
    """Whether ``figure`` is at most ``bar``; what is 0 or NaN was not measured."""
    return "-" if not (figure > 0 and bar > 0) else "ok" if figure <= bar else "MISSED"


def fastvideo_scaled(results: Results, case: BlockCase, mode: str) -> float | None:
    """FastVideo's figure in this run's milliseconds; dense attention grows with the square of the tokens."""
    dense_alone = results.dense_alone.get((case.video, case.heads))
    known = case.heads == 12 and case.sparsity == 0.9 and case.video in FASTVIDEO
    if not known or dense_alone is None:
        return None
    milliseconds, tokens, heads = DENSE_REFERENCE
    return FASTVIDEO[case.video][mode] * dense_alone / (milliseconds * (case.tokens / tokens) ** 2 * case.heads / heads)


def table(results: Results, cases: list[BlockCase]) -> list[str]:
    """Milliseconds per provider, ours over dense, and the bar from FastVideo's figure."""
    short = [name.removesuffix("_compiled") for name in PROVIDERS]
    head = "".join(f"{name.replace('_eager', ' eager'):>11}" for name in short)
    lines = [f"{'ms':<24} {'':<9}{head} ours/dense  FastVideo scaled / factor = bar"]
    for case in cases:
        for mode in MODES:
            figures = [results.milliseconds.get((case, name, mode), float("nan")) for name in PROVIDERS]
            compiled, dense_block = figures[1], figures[2]
            line = f"{case.name:<24} {mode:<9}" + "".join(f"{figure:>11.3f}" for figure in figures)
            line += f"{compiled / dense_block:>11.3f}"
            if mode == "inference" and case.sparsity == 0.9 and case.video == "480p":
                line += f" (1/{DENSE_BLOCK_BAR:g} {verdict(compiled, dense_block / DENSE_BLOCK_BAR)})"
            peer = fastvideo_scaled(results, case, mode)
            if peer is not None:
                factor = FASTVIDEO_FACTOR[case.video][mode]
                line += f"  {peer:.2f} / {factor} = {peer / factor:.2f} {verdict(compiled, peer / factor)}"
            lines.append(line)
    for (video, heads), milliseconds in results.dense_alone.items():
        lines.append(f"dense attention alone, {video} H{heads}: {milliseconds:.2f} ms")
    return lines


def plot(results: Results, cases: list[BlockCase], path: Path) -> None:
    """Times over the dense block of the same case; skipped where matplotlib is missing."""
    try:
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ImportError:
        print("matplotlib is not installed: no plot", file=sys.stderr)
        return
    figure = Figure(figsize=(max(7.0, 1.1 * len(cases) + 3), 7), layout="constrained")
    FigureCanvasSVG(figure)
    for axes, mode in zip(figure.subplots(2, 1, sharex=True), MODES, strict=True):
        for place, provider in enumerate(PROVIDERS):
            bars = [
                results.milliseconds.get((case, provider, mode), float("nan"))
                / results.milliseconds.get((case, "dense_compiled", mode), float("nan"))
                for case in cases
            ]
            axes.bar([i + 0.2 * (place - 1.5) for i in range(len(cases))], bars, 0.19, label=provider.replace("_", " "))
        label = "FastVideo compiled, scaled"
        for i, case in enumerate(cases):
            peer = fastvideo_scaled(results, case, mode)
            block = results.milliseconds.get((case, "dense_compiled", mode))
            if peer is not None and block:
                axes.hlines(peer / block, i - 0.4, i + 0.4, colors="black", linestyles="dashed", label=label)
                label = ""  # one entry of the legend
        axes.set_ylabel(f"{mode}: time / dense block")
        axes.set_xticks(range(len(cases)), [case.name.replace(" ", "\n") for case in cases])
        axes.legend(fontsize="small", ncols=5, loc="lower left", bbox_to_anchor=(0, 1), frameon=False)
    figure.suptitle("Self-attention of a Wan block, time over the compiled block with dense cuDNN attention")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="480p, 12 heads, sparsity 0.9 only, where not given")
    parser.add_argument("--providers", nargs="+", choices=PROVIDERS, default=list(PROVIDERS))
    parser.add_argument("--shapes", nargs="+", choices=("480p", "720p"))
    parser.add_argument("--heads", type=int, nargs="+")
    parser.add_argument("--sparsity", type=float, nargs="+")
    parser.add_argument("--lists", nargs="+", default=["selected"], help="selected, random, overlapNN (NN %%)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--backend", default="auto", help="as in vsa.options; auto is the best that runs here")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--verbose", action="store_true", help="print every kernel of the breakdown")
    parser.add_argument("--output", type=Path, default=DATA / "bench_attention_block.csv")
    parser.add_argument("--plot", type=Path, help="default: beside the CSV, .svg")
    parser.add_argument("--commit", help="recorded commit, where the checkout has no git")
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device: a block is measured on the GPU only")
    if bad := [name for name in args.lists if not re.fullmatch(r"selected|random|overlap\d\d?|overlap100", name)]:
        parser.error(f"--lists: got {', '.join(bad)}; allowed: selected, random, overlap0 to overlap100")
    if args.device == "cpu" and args.output.parent == DATA:
        args.output = Path(os.devnull)  # figures of a machine without a GPU are no record
    return args


def main() -> None:
    args = parse()
    shape = {"device": args.device, "seed": args.seed}
    if args.tiny:
        shape |= {"head_dim": 32, "dtype": torch.float32}
    videos = ["tiny"] if args.tiny else args.shapes or (["480p"] if args.quick else ["480p", "720p"])
    heads = args.heads or ([2] if args.tiny else [12] if args.quick else [12, 40])
    sparsities = args.sparsity or ([0.9] if args.quick or args.tiny else [0.8, 0.9, 0.95])
    cases = [
        BlockCase(video, number, sparsity, lists, **shape)
        for video in videos
        for number in heads
        for sparsity in sparsities
        for lists in args.lists
    ]
    bench = Bench(RowWriter(args.output, args.commit), args.backend, args.verbose)
    results = bench.results
    with vsa.options(backend=args.backend) if args.backend != "auto" else nullcontext():
        for case in cases:
            if "times" in args.parts:
                bench.guarded(f"{case.name} dense alone", bench.measure_dense_alone, case)
            expected = None
            for provider in args.providers:
                breaks_down = "breakdown" in args.parts and provider == "ours_compiled"
                if "times" in args.parts or breaks_down:
                    what = (case, provider, expected, "times" in args.parts, breaks_down)
                    out = bench.guarded(f"{case.name} {provider}", bench.measure_provider, *what)
                    expected = expected if out is None else out
        if "memory" in args.parts:
            for case in dict.fromkeys(replace(case, lists="selected", sparsity=sparsities[0]) for case in cases):
                bench.guarded(f"{case.name} memory", bench.measure_memory, case)
    if "times" in args.parts:
        svg = args.plot or args.output.with_suffix(".svg")
        if str(args.output) != os.devnull or args.plot:
            plot(results, cases, svg)
        print("\n".join(table(results, cases)))
    print("\n".join(results.lines))
    if results.failed:
        sys.exit("\n".join(["failed:", *results.failed]))


if __name__ == "__main__":
    main()
