"""Block-sparse attention: our Triton kernels, FlexAttention on the same lists, dense cuDNN attention.

    python -m benchmarks.bench_attention [--quick] [--tokens N ...] [--no-flex] [--output PATH]

TFLOPS on selected blocks (dense: on all), backward counted as 2.5 forwards. Backward times include everything a
training step pays for it: list transposition, delta, both passes. Absolute numbers move from run to run: read the
ratios to dense of one run.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from benchmarks.harness import Quantiles, RowWriter, measure, replay
from benchmarks.shapes import PEER_OVER_DENSE, PEER_TFLOPS, QUICK_TOKENS, TOKENS, AttentionShape
from vsa_inductor.kernels.attention import launch_attention
from vsa_inductor.kernels.attention_backward import launch_attention_backward
from vsa_inductor.kernels.delta import launch_delta
from vsa_inductor.kernels.transpose_blocks import launch_transpose_blocks

MODES = ("forward", "backward")
Lists = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

# FlexAttention's default backward has no valid tile at 64, whatever its options: only max-autotune finds one.
FLEX_FORWARD: dict[str, Any] = {"BLOCK_M": 64, "BLOCK_N": 64, "fwd_num_warps": 4, "fwd_num_stages": 3}


@torch.compile(dynamic=False)
def _delta(out: torch.Tensor, dout: torch.Tensor) -> torch.Tensor:
    delta = out.new_empty(out.shape[:3], dtype=torch.float32)
    launch_delta(out, dout, delta)
    return delta


def _transposed(shape: AttentionShape, lists: Lists) -> tuple[torch.Tensor, torch.Tensor]:
    size = (shape.batch, shape.heads)
    n = shape.num_blocks
    q_indices = torch.empty((*size, n * shape.selected), device="cuda", dtype=torch.int32)
    q_offsets = torch.empty((*size, n + 1), device="cuda", dtype=torch.int32)
    launch_transpose_blocks(lists[0], lists[1], n, q_indices, q_offsets)
    return q_indices, q_offsets


def triton_steps(shape: AttentionShape, lists: Lists) -> dict[str, Callable[[], Any]]:
    """Forward and backward of our kernels; outputs are allocated inside, as the operators do."""
    q, k, v, dout = shape.tensors(4)
    indices, counts, sizes = lists
    sm_scale = shape.head_dim**-0.5

    def forward() -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = torch.empty_like(q), torch.empty(q.shape[:3], device="cuda")
        launch_attention(q, k, v, indices, counts, sizes, sm_scale, shape.block_size, out, lse)
        return out, lse

    out, lse = forward()

    def backward() -> tuple[torch.Tensor, ...]:
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        transposed = _transposed(shape, lists)
        delta = _delta(out, dout)
        launch_attention_backward(
            dout, q, k, v, lse, delta, indices, counts, *transposed, sizes, sm_scale, shape.block_size, *grads
        )
        return grads

    return {"forward": forward, "backward": backward}


def _autograd_steps(attend: Callable[..., torch.Tensor], shape: AttentionShape) -> dict[str, Callable[[], Any]]:
    *qkv, dout = shape.tensors(4)
    leaves = [x.requires_grad_() for x in qkv]
    out = attend(*leaves)
    return {
        "forward": lambda: attend(*leaves),
        "backward": lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True),
    }


def flex_steps(shape: AttentionShape, lists: Lists) -> dict[str, Callable[[], Any]]:
    """FlexAttention with every listed block full: no mask is evaluated inside a block."""
    indices, counts, _ = lists
    padded = F.pad(indices, (0, shape.num_blocks - shape.selected))
    mask = BlockMask.from_kv_blocks(
        torch.zeros_like(counts), torch.zeros_like(padded), counts, padded, BLOCK_SIZE=shape.block_size
    )
    torch.compiler.reset()
    tuned: Callable[..., torch.Tensor] = torch.compile(flex_attention, dynamic=False)
    q, k, v = shape.tensors(3)

    def backward() -> Any:
        if not steps:
            searched: Callable[..., torch.Tensor] = torch.compile(
                flex_attention, dynamic=False, mode="max-autotune-no-cudagraphs"
            )
            steps.update(_autograd_steps(lambda *x: searched(*x, block_mask=mask), shape))
        return steps["backward"]()

    steps: dict[str, Callable[[], Any]] = {}
    return {"forward": lambda: tuned(q, k, v, block_mask=mask, kernel_options=FLEX_FORWARD), "backward": backward}


def dense_steps(shape: AttentionShape) -> dict[str, Callable[[], Any]]:
    """What sparsity has to beat: cuDNN's dense attention through SDPA."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v)

    return _autograd_steps(attend, shape)


def peer_ratio(shape: AttentionShape, mode: str, dense_tflops: float) -> float | None:
    """The bar: FastVideo-Triton over dense; its TFLOPS over this run's dense where no ratio was measured."""
    known = PEER_OVER_DENSE[mode].get(shape.tokens)
    peer = PEER_TFLOPS[mode].get(shape.tokens)
    return known if known is not None else (peer / dense_tflops if peer else None)


def run_shape(shape: AttentionShape, writer: RowWriter, flex: bool) -> list[str]:
    """Measure one shape, write its rows, return its lines of the table."""
    lists = shape.block_lists()

    def record(
        kernel: str, provider: str, mode: str, metric: str, unit: str, quantiles: Quantiles, launch: str = "eager"
    ) -> None:
        writer.write(
            kernel=kernel,
            provider=provider,
            mode=mode,
            metric=metric,
            unit=unit,
            x_name="tokens",
            x_value=shape.tokens,
            quantiles=quantiles,
            config=shape.config(
                launch=launch, **({"lists": "none", "density": 1.0} if provider == "cudnn_dense" else {})
            ),
        )

    tflops: dict[tuple[str, str], float] = {}

    def rate(provider: str, build: Callable[[], dict[str, Callable[[], Any]]]) -> None:
        try:
            steps = build()
            for mode in MODES:
                quantiles = measure(steps[mode]).rate(shape.flops(mode, dense=provider == "cudnn_dense") / 1e9)
                tflops[provider, mode] = quantiles.p50
                record("attention", provider, mode, "throughput", "TFLOPS", quantiles)
                if provider == "triton":
                    quantiles = measure(replay(steps[mode])).rate(shape.flops(mode) / 1e9)
                    tflops["graph", mode] = quantiles.p50
                    record("attention", provider, mode, "throughput", "TFLOPS", quantiles, "cuda_graph")
        except Exception as error:  # a peer that cannot run the shape is a blank in the table, not the end of the run
            if provider == "triton":
                raise
            print(f"{provider} at {shape.tokens} tokens: {type(error).__name__}: {str(error)[:200]}")

    rate("triton", lambda: triton_steps(shape, lists))
    rate("cudnn_dense", lambda: dense_steps(shape))
    if flex:
        rate("flex_attention", lambda: flex_steps(shape, lists))
    transpose = measure(lambda: _transposed(shape, lists))
    record("transpose_blocks", "triton", "backward", "time", "ms", transpose)

    lines = []
    for mode in MODES:
        figures = [
            tflops.get((name, mode), float("nan")) for name in ("triton", "graph", "flex_attention", "cudnn_dense")
        ]
        bar = peer_ratio(shape, mode, figures[-1])
        note = f"   transposition {transpose.p50:.3f} ms" if mode == "backward" else ""
        lines.append(
            f"{shape.tokens:>7} {mode:<8} "
            + "".join(f"{figure:>6.0f} " for figure in figures)
            + f"{figures[0] / figures[-1]:>10.2f} {float('nan') if bar is None else bar:>6.2f}{note}"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two lengths only")
    parser.add_argument("--tokens", type=int, nargs="+", help="sequence lengths (default: 4k to 131k)")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--density", type=float, default=0.25)
    parser.add_argument("--no-flex", action="store_true", help="skip FlexAttention (its compilation takes a while)")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "data" / "attention.csv")
    parser.add_argument("--commit", help="recorded commit, where the checkout has no git")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device: these kernels are measured on the GPU only")
    writer = RowWriter(args.output, args.commit)
    names = ("ours", "graph", "flex", "dense")
    lines = [f"{'tokens':>7} {'mode':<8} " + "".join(f"{n:>6} " for n in names) + "ours/dense    bar   (TFLOPS)"]
    for tokens in args.tokens or (QUICK_TOKENS if args.quick else TOKENS):
        shape = AttentionShape(tokens, head_dim=args.head_dim, block_size=args.block_size, density=args.density)
        lines += run_shape(shape, writer, flex=not args.no_flex)
        torch.cuda.empty_cache()
    print("\n".join(lines))


if __name__ == "__main__":
    main()
