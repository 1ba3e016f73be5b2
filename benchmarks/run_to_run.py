"""Forward and backward of a long problem twice on one backend, and once on another: do they agree?

    python -m benchmarks.run_to_run [--backend sm100] [--other triton] [--tokens 65536] [--heads 4] [--selected 128]

Exits with 1 where a difference is above the bar. Two runs of one backend may differ only by the order in which dq is
summed: max|diff| / max|ref| <= 2e-2 and mean|diff| <= 1e-4. An error that begins where tensor memory is used again too
early shows here and in no short problem. Against the other backend: 2e-2 and 2e-3.
"""

from __future__ import annotations

import argparse
import sys

import torch
from torch import Tensor

import vsa_inductor as vsa

NAMES = ("out", "dq", "dk", "dv")
TWO_RUNS = (2e-2, 1e-4)
TWO_BACKENDS = (2e-2, 2e-3)


def results(backend: str, tokens: int, heads: int, selected: int, device: str = "cuda") -> tuple[Tensor, ...]:
    """out, dq, dk and dv of random lists, the same for every call."""
    generator = torch.Generator(device).manual_seed(0)
    blocks = tokens // 64
    q, k, v = (
        torch.randn(1, heads, tokens, 128, device=device, generator=generator).bfloat16().requires_grad_()
        for _ in range(3)
    )
    scores = torch.rand(1, heads, blocks, blocks, device=device, generator=generator)
    ids = scores.topk(min(selected, blocks)).indices.sort().values.int()
    counts = torch.full(ids.shape[:3], ids.shape[3], device=device, dtype=torch.int32)
    sizes = torch.full((blocks,), 64, device=device, dtype=torch.int32)
    with vsa.options(backend=backend, strict=True):
        out = vsa.block_sparse_attention(q, k, v, ids, counts, sizes)
        assert isinstance(out, Tensor)
        return (out.detach(), *torch.autograd.grad(out.float().square().sum(), (q, k, v)))


def compare(title: str, first: tuple[Tensor, ...], second: tuple[Tensor, ...], bars: tuple[float, float]) -> bool:
    """Prints both differences of every result; whether all are within ``bars`` (relative maximum, mean)."""
    agree = True
    for name, x, y in zip(NAMES, first, second, strict=True):
        difference = (x.double() - y.double()).abs()
        figures = (float(difference.max() / y.double().abs().max()), float(difference.mean()))
        # NaN is above every bar.
        within = all(figure <= bar for figure, bar in zip(figures, bars, strict=True))
        same = "same bits" if torch.equal(x, y) else ""
        print(f"{title} {name}: max {figures[0]:.2e} mean {figures[1]:.2e} {'ok' if within else 'TOO FAR'} {same}")
        agree &= within
    return agree


def main() -> int:
    parser = argparse.ArgumentParser(description="Compares two runs of a backend, and one with another backend.")
    parser.add_argument("--backend", default="sm100")
    parser.add_argument("--other", default="triton")
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--selected", type=int, default=128)
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    shape = (arguments.tokens, arguments.heads, arguments.selected, arguments.device)
    first, again = results(arguments.backend, *shape), results(arguments.backend, *shape)
    agree = compare(f"{arguments.backend}, again:", first, again, TWO_RUNS)
    other = results(arguments.other, *shape)
    return 0 if compare(f"{arguments.backend}, {arguments.other}:", first, other, TWO_BACKENDS) and agree else 1


if __name__ == "__main__":
    sys.exit(main())
