"""Variants of the sm_90a forward kernel side by side: right, the same bits every time, and how fast.

    python -m benchmarks.sm90_forward_variants --build PATH     compiles them into one library; needs nvcc, no GPU
    python -m benchmarks.sm90_forward_variants --library PATH   measures them; needs an H100 or H200

All variants are one library: of kernels of one name in several libraries, a process seemed to run the first only. A
variant whose bits differ from run to run has a race, however small its errors are.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import subprocess
import sys
from pathlib import Path

import torch
import triton.testing

from benchmarks.block_providers import block_lists
from benchmarks.shapes import AttentionShape

ROOT = Path(__file__).resolve().parents[1]
# Template arguments of ForwardTraits after T and head dim: tiles in a block, stages of K and of V.
VARIANTS = {
    "chosen": "1, 7, 7",
    "6 + 8 stages": "1, 6, 8",
    "8 + 6 stages": "1, 8, 6",
}
HEAD_DIM = 128
SOURCE = """
#include "common/tensor_map.h"
#include "sm90/fwd/run.cuh"
using namespace vsa;
extern "C" int run(int variant, void* q, void* k, void* v, void* out, float* lse, const int* indices, const int* counts,
                   const int* sizes, int B, int H, int N, int M, float scale_log2, cudaStream_t stream) {{
  const int64_t S = int64_t{{N}} * 64;
  const auto map = [&](void* x) {{
    return block_map({{x, {{B, H, S, {d}}}, {{H * S * {d}, S * {d}, {d}, 1}}}}, Dtype::kBFloat16);
  }};
  AttentionForwardParams p{{map(k), map(v), q, {{H * S * {d}, S * {d}, {d}}}, out, lse, indices, counts, sizes,
                           B, H, H, N, N, M, scale_log2}};
  try {{
    switch (variant) {{
{cases}
    }}
  }} catch (const std::exception&) {{
    return 1;
  }}
  return 0;
}}
"""
CASE = """      case {i}:
        sm90::fwd::launch_kernel<sm90::fwd::ForwardTraits<__nv_bfloat16, {d}, {arguments}>>(p, stream);
        break;"""


def build(path: Path) -> None:
    """Writes the library, and its source beside it."""
    cases = (CASE.format(i=i, d=HEAD_DIM, arguments=arguments) for i, arguments in enumerate(VARIANTS.values()))
    source = path.with_suffix(".cu")
    source.write_text(SOURCE.format(cases="\n".join(cases), d=HEAD_DIM))
    command = ["nvcc", "-gencode=arch=compute_90a,code=sm_90a", "-std=c++17", "-O3", "-lineinfo", "-shared"]
    command += ["--expt-relaxed-constexpr", "-Xcompiler", "-fPIC", "-cudart", "static", f"-I{ROOT / 'csrc'}"]
    files = [str(source), str(ROOT / "csrc" / "common" / "tensor_map.cpp"), "-o", str(path)]
    subprocess.run([*command, *files], check=True)


class Problem:
    """One shape with its lists; `launch` runs a variant into `out` and `lse`."""

    def __init__(self, library: ctypes.CDLL, shape: AttentionShape, overlap: float | None) -> None:
        self.library, self.shape = library, shape
        self.q, self.k, self.v = shape.tensors(3)
        self.indices, self.counts, self.sizes = shape.block_lists()
        if overlap is not None:
            generator = torch.Generator("cuda").manual_seed(shape.seed)
            self.indices, self.counts = block_lists(
                shape.batch, shape.heads, shape.num_blocks, shape.selected, overlap, generator
            )
        self.out = torch.empty_like(self.q)
        self.lse = torch.empty(self.q.shape[:3], device="cuda")

    def launch(self, variant: int) -> None:
        tensors = (self.q, self.k, self.v, self.out, self.lse, self.indices, self.counts, self.sizes)
        shape = (self.shape.batch, self.shape.heads, self.shape.num_blocks, self.indices.shape[3])
        scale = ctypes.c_float(self.shape.head_dim**-0.5 * math.log2(math.e))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        pointers = (ctypes.c_void_p(x.data_ptr()) for x in tensors)
        if self.library.run(variant, *pointers, *shape, scale, stream):
            raise RuntimeError(f"{list(VARIANTS)[variant]}: the launch failed")

    def triton(self) -> None:
        from vsa_inductor.kernels.attention import launch_attention

        lists = self.indices, self.counts, self.sizes
        launch_attention(self.q, self.k, self.v, *lists, self.shape.head_dim**-0.5, 64, self.out, self.lse)

    def unequal_runs(self, variant: int, runs: int = 20) -> int:
        """Runs whose bits differ from those of the first."""
        results = []
        for _ in range(runs):
            self.out.fill_(math.nan)
            self.launch(variant)
            results.append((self.out.clone(), self.lse.clone()))
        first_out, first_lse = results[0]
        return sum(not (torch.equal(out, first_out) and torch.equal(lse, first_lse)) for out, lse in results)

    def tflops(self, variant: int | None) -> float:
        step = self.triton if variant is None else lambda: self.launch(variant)
        return (
            self.shape.flops("forward") * 1e-9 / triton.testing.do_bench(step, warmup=10, rep=40, return_mode="median")
        )


def measure(path: Path, tokens: list[int], overlaps: list[float | None]) -> None:
    library = ctypes.CDLL(str(path.resolve()))
    for s in tokens:
        for overlap in overlaps:
            problem = Problem(library, AttentionShape(s, head_dim=HEAD_DIM), overlap)
            print(f"{s} tokens, lists {'random' if overlap is None else f'overlap {overlap:.0%}'}")
            print(f"  {'Triton':20s} {problem.tflops(None):5.0f} TFLOPS")
            expected = problem.out.float()
            for variant, name in enumerate(VARIANTS):
                unequal = problem.unequal_runs(variant)
                error = (problem.out.float() - expected).abs().max() / expected.abs().max()
                tflops = problem.tflops(variant)
                print(
                    f"  {name:20s} {tflops:5.0f} TFLOPS, off by {error:.1e}, {unequal} of 20 runs unequal", flush=True
                )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sm90_forward_variants", description=__doc__)
    parser.add_argument("--build", type=Path)
    parser.add_argument("--library", type=Path)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384, 65536])
    parser.add_argument("--overlaps", type=float, nargs="*", default=[0.8])
    args = parser.parse_args()
    if not args.build and not args.library:
        parser.error("--build PATH or --library PATH is needed")
    if args.build:
        build(args.build)
    if args.library:
        measure(args.library, args.tokens, [None, *args.overlaps])
    return 0


if __name__ == "__main__":
    sys.exit(main())
