"""The self-attention of a Wan block, without its projections: what a model pays for it.

    python -m benchmarks.bench_attention_block [--quick] [--precompile N] [--shapes 480p 720p] [--heads 12 40] \
        [--sparsity 0.8 0.9 0.95] [--lists selected random overlap80] [--parts times breakdown memory] \
        [--providers P ...] [--all]

Parts. times: inference (forward under no_grad) and training step (forward, gradients of q, k, v and gate) of ours
eager, ours compiled, dense cuDNN attention compiled, FlexAttention VSA compiled. breakdown: the kernels of ours
compiled by name against the memory floor (block_breakdown.py says what counts). memory: peak of a training step of 1
and 8 blocks with their projections, with and without activation checkpointing, and what a layer holds
(block_memory.py).

What is measured by default. Ours, eager and compiled: every video, number of heads and sparsity, on the lists that the
coarse stage selects. Dense: once per video and heads; it depends on nothing else. At the main sparsity (0.9, else the
first): FlexAttention, whose search for a backward takes longest, and the given lists (random; neighbouring query tiles
sharing 80 %), ours compiled only. ``--all`` measures every provider on every case.

Compilation takes most of the time. ``--precompile N`` first compiles everything in N processes, each of which runs a
block once and records nothing, into caches that the timing then reads, in this process and with the GPU to itself. On
one H200 with 16 cores, one video takes one command of below ten minutes:

    python -m benchmarks.bench_attention_block --precompile 14 --shapes 480p
    python -m benchmarks.bench_attention_block --precompile 14 --shapes 720p

Rows are appended to data/bench_attention_block.csv, every one at once; the tables printed last and the plot beside it
are made from the rows of the last commit, so that several commands end in one plot (``python -m
benchmarks.block_report`` makes them again, without a GPU). Read the ratios of one machine.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import vsa_inductor as vsa
from benchmarks.block_breakdown import DIRECTIONS, Sizes, added_time, kernel_lines, profiled, selection_time, shares
from benchmarks.block_memory import (
    ATTENTIONS,
    Model,
    Stack,
    expected_saved_bytes,
    growth_per_layer,
    padded,
    peak_memory,
    saved_per_layer,
)
from benchmarks.block_precompile import Job, precompile, stack_jobs, use_cache
from benchmarks.block_providers import PROVIDERS, Block, BlockCase, dense
from benchmarks.block_report import MODES, RECORD, plot, report
from benchmarks.harness import Quantiles, RowWriter, latest_rows, measure, read_rows

PARTS = ("times", "breakdown", "memory")
MAIN_SPARSITY = 0.9


@dataclass(frozen=True)
class Run:
    """One provider on one case; ``kernels``: the breakdown also writes a row for each kernel."""

    case: BlockCase
    provider: str
    times: bool
    breakdown: bool
    kernels: bool = False


def plan(
    cases: list[BlockCase], providers: list[str], parts: list[str], main_sparsity: float, everything: bool
) -> list[Run]:
    """What is measured, in order; the module's docstring says by which rule."""
    runs: list[Run] = []
    for case in cases:
        main = case.sparsity == main_sparsity
        for provider in providers:
            ours = provider == "ours_compiled"
            once = [(run.case.video, run.case.heads) for run in runs if run.provider == "dense_compiled"]
            wanted = everything or (ours if case.lists != "selected" else provider != "flex_compiled")
            wanted |= main and case.lists == "selected"
            wanted &= everything or main or case.lists == "selected"
            if provider == "dense_compiled":
                wanted = (case.video, case.heads) not in once
            if not wanted:
                continue
            # Lists change nothing but the time of the attention itself.
            breakdown = "breakdown" in parts and ours and (everything or case.lists == "selected")
            if "times" in parts or breakdown:
                runs.append(Run(case, provider, "times" in parts, breakdown, breakdown and main))
    return runs


class Bench:
    """The parts of the benchmark; every figure becomes a row at once, so that a run cut short leaves what it had."""

    def __init__(self, writer: RowWriter, backend: str, verbose: bool) -> None:
        self.writer, self.backend, self.verbose = writer, backend, verbose
        self.failed: list[str] = []
        self._copy_rate: float | None = None
        self._outputs: dict[BlockCase, torch.Tensor] = {}

    def guarded(self, what: str, run: Callable[..., Any], *args: Any) -> Any:
        """``run(*args)``, or None and a remembered failure: the other parts still run."""
        started = time.perf_counter()
        try:
            return run(*args)
        except Exception as error:
            traceback.print_exc(limit=-3)
            self.failed.append(f"{what}: {type(error).__name__}: {str(error).strip()[:160]}")
            return None
        finally:
            caches = torch._dynamo.utils.counters["inductor"]
            hits = ", ".join(f"{caches[f'fxgraph_cache_{name}']} {name}" for name in ("hit", "miss", "bypass"))
            print(f"# {what}: {time.perf_counter() - started:.1f} s ({hits})", file=sys.stderr, flush=True)
            torch._dynamo.utils.counters.clear()
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
        q, k, v = case.randn(3, case.batch, case.tokens, case.heads, case.head_dim)
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
        quantiles = timed(lambda: dense(q, k, v), case.device)
        config: dict[str, Any] = {"density": 1.0, "sparsity": 0.0, "lists": "none"}
        self.record(case, "cudnn_dense", "inference", "time", "ms", quantiles, "attention", **config)

    def measure(self, run: Run) -> None:
        block = Block(run.provider, run.case)
        if run.times:
            self.measure_times(block)
        if run.breakdown:
            self.break_down(block, run.kernels)

    def measure_times(self, block: Block) -> None:
        """Inference and step; sparse providers must agree on the output."""
        case, provider = block.case, block.provider
        config: dict[str, Any] = {"gate": provider != "dense_compiled"}
        out = block.forward()
        if provider == "dense_compiled":
            config |= {"density": 1.0, "sparsity": 0.0, "lists": "none"}
            if case.device == "cuda":
                names = [kernel.name for kernel in profiled(lambda _: block.forward(), repeats=1)]
                if not any("cudnn" in name for name in names):
                    raise RuntimeError(f"dense attention did not run in cuDNN but in one of {', '.join(names)[:300]}")
        else:
            self.check_output(case, provider, out, config)
        for mode, run in zip(MODES, (block.forward, block.step), strict=True):
            if mode == "step" and provider == "flex_compiled" and case.device == "cpu":
                continue  # FlexAttention has no backward there
            self.record(case, provider, mode, "time", "ms", timed(run, case.device), **config)

    def check_output(self, case: BlockCase, provider: str, out: torch.Tensor, config: dict[str, Any]) -> None:
        """Against the first sparse provider's output on this case, ours in eager where none was measured."""
        if case not in self._outputs:
            self._outputs = {case: out if provider == "ours_eager" else Block("ours_eager", case).forward()}
        if provider != "ours_eager":
            expected = self._outputs[case].float()
            # Rounding moves some of the selected blocks; a wrong computation is off by about 1.
            deviation = float((out.float() - expected).norm() / expected.norm())
            self.record(case, provider, "inference", "deviation", "ratio", deviation, **config)
            if not deviation <= (0.3 if case.lists == "selected" else 0.03):
                self.failed.append(f"{case.name} {provider}: output deviates by {deviation:.3f}")

    def break_down(self, block: Block, kernel_rows: bool) -> None:
        """Kernels of ours compiled, and the region against its floor, for inference and both directions of a step."""
        case = block.case
        rate, sizes = self.copy_rate(case), Sizes.of(case)
        block.forward(), block.step()
        runs: list[tuple[Callable[..., Any], Callable[[], Any]]] = [
            (lambda _: block.forward(), lambda: None),
            (lambda _: block.training_forward(), lambda: None),
            (block.backward, block.training_forward),
        ]
        for mode, (run, prepare) in zip(DIRECTIONS, runs, strict=True):
            kernels = profiled(run, prepare, repeats=5 if case.device == "cuda" else 1, sizes=sizes)
            total = added_time(kernels)
            if case.device == "cuda" and not any(kernel.category == "opaque" for kernel in kernels):
                raise RuntimeError(f"{mode}: the profiler saw no attention kernel among {len(kernels)} kernels")
            for place, kernel in enumerate(kernels if kernel_rows else ()):
                self.record(
                    case, "ours_compiled", mode, "kernel_time", "ms", kernel.milliseconds, x=("order", place),
                    kernel_name=kernel.name, category=kernel.category, place=kernel.place, operator=kernel.operator,
                    launches=kernel.launches, minimal_bytes=_number(kernel.minimal_bytes),
                    floor_ms=_number(kernel.minimal_bytes / rate),
                )  # fmt: skip
            for part in shares(kernels, case, mode, rate):
                config: dict[str, Any] = {"category": part.category, "place": part.place or "all"}
                self.record(case, "ours_compiled", mode, "share_time", "ms", part.milliseconds, **config)
                self.record(
                    case, "ours_compiled", mode, "floor", "ms", part.floor, floor_bytes=part.floor_bytes, **config
                )
                self.record(case, "ours_compiled", mode, "time_over_floor", "ratio", part.ratio, **config)
                if part.category == "region":
                    kernel_bytes = part.kernel_bytes / part.floor_bytes
                    self.record(case, "ours_compiled", mode, "kernel_bytes_over_floor", "ratio", kernel_bytes, **config)
                if part.category == "coarse" and total:
                    coarse_share = (part.milliseconds + selection_time(kernels)) / total
                    self.record(case, "ours_compiled", mode, "coarse_and_selection", "ratio", coarse_share)
            if self.verbose:
                print(f"{case.name} {mode}: {total:.3f} ms in kernels", *kernel_lines(kernels, rate), sep="\n")

    def measure_memory(self, case: BlockCase, attention: str, num_blocks: int) -> None:
        """Peak memory of a training step, and what a layer holds, of one model with and without checkpointing."""
        provider = "dense_compiled" if attention == "dense" else "ours_compiled"
        model = Model(case, attention)
        x = ("blocks", num_blocks)
        for checkpointed in (False, True):
            config: dict[str, Any] = {"attention": attention, "checkpointed": checkpointed}
            config["kernel"] = "attention_block_stack"
            for blocks in (num_blocks,) if checkpointed else (1, num_blocks):
                peak, held = peak_memory(model, blocks, checkpointed)
                if not math.isnan(peak):
                    more: dict[str, Any] = {"held_between_steps": round(held, 3), "x": ("blocks", blocks)}
                    self.record(case, provider, "step", "peak_memory", "GiB", peak, **config, **more)
            if attention.endswith(" model"):
                continue  # what a layer holds is told of the attention alone
            expected = expected_saved_bytes(case, attention)
            stack = Stack(model, num_blocks, checkpointed)
            held_by_layer = growth_per_layer(stack)
            config["expected_bytes"] = expected["block input"] if checkpointed else sum(expected.values())
            if not checkpointed:
                saved = saved_per_layer(stack)
                config |= {"expected": expected, "padded": padded(saved, case), "saved": [list(x) for x in saved]}
                if math.isnan(held_by_layer):
                    held_by_layer = sum(x.bytes for x in saved)
            if not math.isnan(held_by_layer):
                self.record(case, provider, "forward", "saved_bytes_per_layer", "bytes", held_by_layer, x=x, **config)


def _number(value: float) -> float | None:
    """JSON has no NaN."""
    return None if math.isnan(value) else value


def timed(fn: Callable[[], Any], device: str) -> Quantiles:
    """Milliseconds of ``fn``, which also compiles here."""
    if device == "cuda":
        fn()
        torch.cuda.synchronize()
        started = time.perf_counter()
        fn()
        torch.cuda.synchronize()
        # At least five calls, where one takes long.
        return measure(fn, warmup_ms=50, repeat_ms=int(max(300, 5000 * (time.perf_counter() - started))))
    times = []
    for _ in range(4):
        started = time.perf_counter()
        fn()
        times.append((time.perf_counter() - started) * 1000)
    times = sorted(times[1:])
    return Quantiles(times[1], times[0], times[2])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="480p, 12 heads, sparsity 0.9 only, where not given")
    parser.add_argument("--precompile", type=int, metavar="N", help="compile in N processes first")
    parser.add_argument("--cache", type=Path, help="where they leave it; default: a folder of the temporary ones")
    parser.add_argument("--providers", nargs="+", choices=PROVIDERS)
    parser.add_argument("--shapes", nargs="+", choices=("480p", "720p"))
    parser.add_argument("--heads", type=int, nargs="+")
    parser.add_argument("--sparsity", type=float, nargs="+")
    parser.add_argument("--lists", nargs="+", help="selected, random, overlapNN (NN %%)")
    parser.add_argument("--all", action="store_true", help="every provider on every case")
    parser.add_argument("--parts", nargs="+", choices=PARTS)
    parser.add_argument("--backend", default="auto", help="as in vsa.options; auto is the best that runs here")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--verbose", action="store_true", help="print every kernel of the breakdown")
    parser.add_argument("--output", type=Path, default=RECORD)
    parser.add_argument("--plot", type=Path, help="default: beside the CSV, .svg")
    parser.add_argument("--commit", help="recorded commit, where the checkout has no git")
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device: a block is measured on the GPU only")
    small = args.quick or args.tiny
    args.providers = args.providers or (["ours_eager", "ours_compiled"] if args.tiny else list(PROVIDERS))
    args.lists = args.lists or (["selected"] if small else ["selected", "random", "overlap80"])
    args.parts = args.parts or list(PARTS)
    args.shapes = ["tiny"] if args.tiny else args.shapes or (["480p"] if args.quick else ["480p", "720p"])
    args.heads = args.heads or ([2] if args.tiny else [12] if args.quick else [12, 40])
    args.sparsity = args.sparsity or ([MAIN_SPARSITY] if small else [0.8, 0.9, 0.95])
    if bad := [name for name in args.lists if not re.fullmatch(r"selected|random|overlap\d\d?|overlap100", name)]:
        parser.error(f"--lists: got {', '.join(bad)}; allowed: selected, random, overlap0 to overlap100")
    if args.precompile is not None and args.precompile < 1:
        parser.error(f"--precompile: got {args.precompile}; allowed: 1 or more processes")
    if args.device == "cpu" and args.output.parent == RECORD.parent:
        args.output = Path(os.devnull)  # figures of a machine without a GPU are no record
    return args


def jobs_of(runs: list[Run], stacks: list[BlockCase]) -> list[Job]:
    """What has to be compiled. Eager runs only the kernels that the compiled code calls too."""
    return [
        *(
            Job(run.case, run.provider, what)
            for run in runs
            for what in ("forward", "step")
            if run.provider != "ours_eager"
            and not (run.case.device == "cpu" and run.provider == "flex_compiled" and what == "step")
        ),
        *(job for case in stacks for job in stack_jobs(case)),
    ]


def main() -> None:
    args = parse()
    shape = {"device": args.device, "seed": args.seed}
    if args.tiny:
        shape |= {"head_dim": 32, "dtype": torch.float32}
    cases = [
        BlockCase(video, number, sparsity, lists, **shape)
        for video in args.shapes
        for number in args.heads
        for sparsity in args.sparsity
        for lists in args.lists
    ]
    main_sparsity = MAIN_SPARSITY if MAIN_SPARSITY in args.sparsity else args.sparsity[0]
    runs = plan(cases, args.providers, args.parts, main_sparsity, args.all)
    stacks: list[BlockCase] = []
    if "memory" in args.parts:
        stacks = list(dict.fromkeys(replace(case, lists="selected", sparsity=main_sparsity) for case in cases))
    bench = Bench(RowWriter(args.output, args.commit), args.backend, args.verbose)
    if args.precompile:
        use_cache(args.cache or Path(tempfile.gettempdir()) / "vsa_inductor_block_benchmark")
        started = time.perf_counter()
        for line in precompile(jobs_of(runs, stacks), args.precompile, args.backend):
            print(f"# {line}", file=sys.stderr)
        print(f"# precompiled in {time.perf_counter() - started:.1f} s", file=sys.stderr, flush=True)
    with vsa.options(backend=args.backend) if args.backend != "auto" else nullcontext():
        if "times" in args.parts:
            for case in {(case.video, case.heads): case for case in cases}.values():
                bench.guarded(f"{case.name} dense alone", bench.measure_dense_alone, case)
        for run in runs:
            bench.guarded(f"{run.case.name} {run.provider}", bench.measure, run)
        for case in stacks:
            for attention in ATTENTIONS:
                blocks = 3 if args.tiny else 8
                bench.guarded(f"{case.name} memory {attention}", bench.measure_memory, case, attention, blocks)
    # A command of its own run earlier at this commit belongs to the same table and plot.
    rows = latest_rows(read_rows(args.output)) or bench.writer.rows
    print(report(rows))
    if str(args.output) != os.devnull or args.plot:
        plot(rows, args.plot or args.output.with_suffix(".svg"))
    if bench.failed:
        sys.exit("\n".join(["failed:", *bench.failed]))


if __name__ == "__main__":
    main()
