"""Host time of one call of the native attention, at a size where the device waits for the host.

    python -m benchmarks.bench_native_host [--library PATH] [--output PATH]

Microseconds from call to return, tensor maps included, of calls in a row that the device keeps up with: the functional
operator, its `.out` form, the public eager call without gradients, and the same of the Triton backend. Read the ratios:
the speed of the host moves by a factor of two between machines.
"""

from __future__ import annotations

import argparse
import functools
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import vsa_inductor as vsa
from benchmarks.harness import Quantiles, RowWriter

BATCHES, CALLS = 60, 100
# (batch, heads, tokens, head dim) of a problem that takes the device a few microseconds.
SHAPE = (1, 1, 512, 128)
SELECTED = 2
CONFIG = {"shape": SHAPE, "dtype": "bfloat16", "block_size": 64, "selected": SELECTED, "seed": 0}


def host_time(fn: Callable[[], Any]) -> Quantiles:
    """Microseconds per call: quantiles over batches, the device idle at the start of each."""
    for _ in range(CALLS):
        fn()
    times = []
    for _ in range(BATCHES):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            fn()
        times.append((time.perf_counter() - start) / CALLS * 1e6)
    times.sort()
    return Quantiles(times[BATCHES // 2], times[BATCHES // 5], times[BATCHES * 4 // 5])


def calls() -> dict[tuple[str, str, str], Callable[[], Any]]:
    """By (provider, mode, form), every call that is measured."""
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v, dout = (torch.randn(SHAPE, device="cuda", dtype=torch.bfloat16, generator=generator) for _ in range(4))
    batch, heads, tokens, head_dim = SHAPE
    blocks = tokens // 64
    scores = torch.rand(batch, heads, blocks, blocks, device="cuda", generator=generator)
    ids = scores.topk(SELECTED).indices.sort().values.int()
    counts = torch.full((batch, heads, blocks), SELECTED, device="cuda", dtype=torch.int32)
    sizes = torch.full((blocks,), 64, device="cuda", dtype=torch.int32)
    static = (head_dim**-0.5, 64)
    out, lse = torch.empty_like(q), torch.empty(SHAPE[:3], device="cuda")
    q_indices, q_offsets = torch.ops.vsa.transpose_blocks(ids, counts, blocks)
    grads = (torch.empty(SHAPE, device="cuda"), torch.empty_like(k), torch.empty_like(v))
    found: dict[tuple[str, str, str], Callable[[], Any]] = {}
    for provider in ("sm90", "triton"):
        forward = getattr(torch.ops.vsa, f"attention_{provider}")
        backward = getattr(torch.ops.vsa, f"attention_backward_{provider}")
        args = (q, k, v, ids, counts, sizes, *static, True, False)
        found[provider, "forward", "functional"] = functools.partial(forward.default, *args)
        found[provider, "forward", "out"] = functools.partial(forward.out, *args, out=out, lse_log2=lse)
        gradient_args = (
            dout, q, k, v, lse, lse, ids, counts, q_indices, q_offsets, sizes, *static, False, True, True,
        )  # fmt: skip
        found[provider, "backward", "functional"] = functools.partial(backward.default, *gradient_args)
        if provider == "sm90":
            outs = dict(zip(("dq_accum", "dk", "dv"), grads, strict=True))
            found[provider, "backward", "out"] = functools.partial(backward.out, *gradient_args, **outs)

        def public() -> None:
            vsa.block_sparse_attention(q, k, v, ids, counts, sizes)

        found[provider, "inference", "public"] = public
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Host time of the native attention.")
    parser.add_argument("--library", help="a native library to load (default: the packaged one)")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "data" / "native_host.csv")
    arguments = parser.parse_args()
    if arguments.library:
        vsa.load_library(arguments.library)
    rows = RowWriter(arguments.output)
    print(f"{'provider':8} {'mode':9} {'form':10} {'us':>7} {'p20':>7} {'p80':>7}")
    for (provider, mode, form), call in calls().items():
        with vsa.options(backend=provider, strict=True), torch.no_grad():
            quantiles = host_time(call)
        assert math.isfinite(quantiles.p50)
        print(f"{provider:8} {mode:9} {form:10} {quantiles.p50:7.2f} {quantiles.p20:7.2f} {quantiles.p80:7.2f}")
        rows.write(
            kernel="attention", provider=provider, mode=mode, metric="host_time", unit="us", x_name="tokens",
            x_value=SHAPE[2], quantiles=quantiles, config={**CONFIG, "form": form},
        )  # fmt: skip


if __name__ == "__main__":
    main()
