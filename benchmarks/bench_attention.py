"""Block-sparse attention of ours and of every peer that is installed, on the same lists, beside dense cuDNN attention.

    python -m benchmarks.bench_attention [--plan bars | lengths | quick] [--tokens N ...] [--lists NAME ...]
        [--head-dim D] [--block-size N] [--providers P ...] [--flex-tokens N ...] [--budget-ms MS] [--stop-after S]
        [--output PATH]

Rows are appended to data/attention_sm90.csv, and a table says how ours compares with the best peer (attention_bars.py).
TFLOPS on selected blocks (dense: on all), backward counted as 2.5 forwards. Backward times include everything that a
training step pays for it: list transposition, delta, what stands before and behind the main kernels. The providers of a
row take turns (harness.py). Short problems are also timed as CUDA graphs, without what their launches cost the host.
Absolute numbers move from run to run: read the ratios of one run.

Plans. bars: everything that something was promised for, about two minutes on one H200. lengths: random lists, 4k to
131k. quick: two lengths. ``--tokens`` and the like describe problems of their own instead.
"""

from __future__ import annotations

import argparse
import gc
import math
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from benchmarks.attention_bars import MODES, RECORD, all_rates, table
from benchmarks.attention_lists import neighbours_share
from benchmarks.attention_providers import PROVIDERS, AttentionProblem, Unavailable, ours
from benchmarks.harness import Quantiles, RowWriter, measure_in_turns, replay
from benchmarks.shapes import QUICK_TOKENS, TOKENS, AttentionShape

# Below this many tokens the launches are a part of the time.
GRAPH_TOKENS = 8192
# Two right answers in bf16 differ by a few thousandths; gradients, summed in another order, by somewhat more.
LARGEST_DEVIATION = {"forward": 0.02, "backward": 0.04}


def planned(plan: str) -> list[AttentionShape]:
    if plan != "bars":
        return [AttentionShape(tokens) for tokens in (QUICK_TOKENS if plan == "quick" else TOKENS)]
    shapes = [AttentionShape(tokens) for tokens in TOKENS]
    shapes += [AttentionShape(tokens, lists="overlap80") for tokens in TOKENS if tokens >= 16384]
    for lists in ("overlap25", "overlap50", "overlap65", "pixels_bikes", "pixels_bunny"):
        shapes += [AttentionShape(tokens, lists=lists) for tokens in (16384, 65536)]
    shapes += [AttentionShape(tokens, head_dim=64) for tokens in (16384, 65536)]
    shapes += [AttentionShape(tokens, block_size=128) for tokens in (16384, 65536)]
    return shapes


def asked_of(shape: AttentionShape, provider: str, flex_tokens: list[int]) -> bool:
    """Dense does not depend on lists; FlexAttention, whose search takes longest, runs where it was asked for."""
    if provider == "cudnn_dense":
        return shape.lists == "random" and shape.block_size == 64
    if provider == "flex_attention":
        usual = (shape.lists, shape.head_dim, shape.block_size) == ("random", 128, 64)
        return usual and shape.tokens in flex_tokens
    return True


class Bench:
    """Measures shape by shape; a provider that fails is a blank in the table and a line on stderr."""

    def __init__(self, writer: RowWriter, providers: list[str], flex_tokens: list[int], budget_ms: float) -> None:
        self.writer, self.providers, self.flex_tokens, self.budget_ms = writer, providers, flex_tokens, budget_ms
        self.wrong: list[str] = []
        self._told: set[str] = set()

    def run(self, shape: AttentionShape) -> None:
        started = time.perf_counter()
        problem = AttentionProblem.of(shape)
        config = {"neighbours_share": round(neighbours_share(problem.kv_indices, shape.num_blocks), 4)}
        for mode in MODES:
            fns = self.called_once(problem, mode)
            launches = {"eager": fns}
            if shape.tokens <= GRAPH_TOKENS:
                # Dense is context, and autograd's threads do not always let themselves be captured.
                captured = {name: fn for name, fn in fns.items() if name != "cudnn_dense"}
                graphs = {
                    name: self.guarded(name, shape, mode, lambda fn=fn: replay(fn)) for name, fn in captured.items()
                }
                launches["cuda_graph"] = {name: graph for name, graph in graphs.items() if graph}
            for launch, group in launches.items():
                for name, quantiles in measure_in_turns(group, budget_ms=self.budget_ms).items():
                    self.record(shape, name, mode, quantiles, launch=launch, **config)
            # They hold the outputs that they start from.
            del fns, launches
            gc.collect()
        print(f"# {shape.tokens} {shape.lists} D {shape.head_dim} block {shape.block_size}: "
              f"{time.perf_counter() - started:.1f} s", file=sys.stderr, flush=True)  # fmt: skip

    def called_once(self, problem: AttentionProblem, mode: str) -> dict[str, Any]:
        """The functions of a mode by provider, compiled, run, and compared with our Triton kernels."""
        shape, fns, reference = problem.shape, {}, None
        # For the reference; it is what runs everywhere.
        expected = ours(problem, "triton")[mode]()
        reference = [x.float() for x in (expected[:1] if mode == "forward" else expected)]
        for name in self.providers:
            if not asked_of(shape, name, self.flex_tokens):
                continue
            started = time.perf_counter()
            fn = self.guarded(name, shape, mode, lambda name=name: PROVIDERS[name](problem)[mode])
            result = self.guarded(name, shape, mode, fn) if fn else None
            if result is None:
                continue
            torch.cuda.synchronize()
            if (seconds := time.perf_counter() - started) > 1:
                print(f"#   {name} {mode}: first call {seconds:.1f} s", file=sys.stderr, flush=True)
            fns[name] = fn
            if name != "cudnn_dense":
                self.compare(shape, name, mode, result, reference)
        return fns

    def compare(self, shape: AttentionShape, name: str, mode: str, result: Any, reference: list[torch.Tensor]) -> None:
        tensors = (result,) if isinstance(result, torch.Tensor) else result
        for part, (x, wanted) in enumerate(zip(tensors, reference, strict=False)):
            deviation = float((x.float() - wanted).norm() / wanted.norm())
            if not deviation <= LARGEST_DEVIATION[mode]:
                text = f"{name} {mode}, {shape.tokens} tokens, {shape.lists}, D {shape.head_dim}, blocks of "
                self.wrong.append(f"{text}{shape.block_size}: result {part} deviates by {deviation:.4f}")
                print(f"# WRONG: {self.wrong[-1]}", file=sys.stderr, flush=True)

    def guarded(self, name: str, shape: AttentionShape, mode: str, run: Any) -> Any:
        """``run()``, or None; why not is told once."""
        try:
            return run()
        except Unavailable as error:
            text = f"{name} {mode}: skipped, {error}"
        except Exception as error:  # a peer that cannot run a shape is a blank in the table, not the end of the run
            if name == "triton":
                raise
            text = f"{name} {mode}: {type(error).__name__}: {str(error).strip()[:300]}"
            if text not in self._told:
                traceback.print_exc(limit=-4)
        if text not in self._told:
            self._told.add(text)
            print(f"# {shape.tokens} tokens: {text}", file=sys.stderr, flush=True)
        return None

    def record(self, shape: AttentionShape, name: str, mode: str, times: Quantiles, **config: Any) -> None:
        whole = name == "cudnn_dense"
        self.writer.write(
            kernel="attention",
            provider=name,
            mode=mode,
            metric="throughput",
            unit="TFLOPS",
            x_name="tokens",
            x_value=shape.tokens,
            quantiles=times.rate(shape.flops(mode, dense=whole) / 1e9),
            config=shape.config(**config, **({"attended": "all"} if whole else {})),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", choices=("bars", "lengths", "quick"), default="bars")
    parser.add_argument("--tokens", type=int, nargs="+", help="sequence lengths, instead of a plan")
    parser.add_argument("--lists", nargs="+", default=["random"], help="with --tokens: names of attention_lists.py")
    parser.add_argument("--head-dim", type=int, default=128, help="with --tokens")
    parser.add_argument("--block-size", type=int, default=64, help="with --tokens")
    parser.add_argument("--density", type=float, default=0.25, help="with --tokens")
    parser.add_argument("--providers", nargs="+", choices=list(PROVIDERS), default=list(PROVIDERS))
    parser.add_argument("--flex-tokens", type=int, nargs="*", default=[16384], help="where FlexAttention runs")
    parser.add_argument("--budget-ms", type=float, default=80, help="device time of a figure, about")
    parser.add_argument(
        "--stop-after", type=float, default=math.inf, metavar="S", help="begin no problem after S seconds"
    )
    parser.add_argument("--output", type=Path, default=RECORD)
    parser.add_argument("--commit", help="recorded commit, where the checkout has no git")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device: these kernels are measured on the GPU only")
    shapes = planned(args.plan)
    if args.tokens:
        shapes = [
            AttentionShape(
                tokens, head_dim=args.head_dim, block_size=args.block_size, density=args.density, lists=lists
            )
            for lists in args.lists
            for tokens in args.tokens
        ]
    bench = Bench(RowWriter(args.output, args.commit), args.providers, args.flex_tokens, args.budget_ms)
    started = time.perf_counter()
    for shape in shapes:
        if time.perf_counter() - started > args.stop_after:
            print(f"# not measured for want of time: {shape}", file=sys.stderr)
            continue
        bench.run(shape)
        torch.cuda.empty_cache()
    print(f"# {time.perf_counter() - started:.0f} s in all", file=sys.stderr)
    print(all_rates(bench.writer.rows, args.providers), table(bench.writer.rows), sep="\n\n")
    if bench.wrong:
        sys.exit("\n".join(["wrong results:", *bench.wrong]))


if __name__ == "__main__":
    main()
