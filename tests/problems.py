"""Random block-sparse problems, and how far from the reference an answer may be."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from reference_attention import block_mask, dense_attention, dense_gradients, key_is_real, token_mask
from torch import Tensor

GPU = pytest.mark.gpu
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]
BACKENDS = [
    pytest.param("cpu", "eager", id="cpu-eager"),
    pytest.param("cuda", "eager", id="cuda-eager", marks=GPU),
    pytest.param("cuda", "triton", id="cuda-triton", marks=GPU),
]

# (max|diff| / max|ref|, mean|diff|, |diff| of lse_log2): for 16 bits the bars every backend has to meet.
BARS = {
    torch.bfloat16: (1e-2, 1e-3, 1e-3),
    torch.float16: (1e-2, 1e-3, 1e-3),
    torch.float32: (1e-4, 1e-5, 1e-4),
    torch.float64: (1e-9, 1e-9, 1e-9),
}


@dataclass(frozen=True)
class Problem:
    """Arguments of `vsa::attention` in tile order, and a gradient of its output."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    kv_indices: Tensor
    kv_num_blocks: Tensor
    kv_block_sizes: Tensor
    sm_scale: float
    block_size: int

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v

    @property
    def lists(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.kv_indices, self.kv_num_blocks, self.kv_block_sizes

    @property
    def mask(self) -> Tensor:
        return token_mask(*self.lists, self.block_size)

    def forward(self, backend: str, return_lse: bool = True, deterministic: bool = False) -> tuple[Tensor, Tensor]:
        return attention(*self.operands, self, backend, return_lse, deterministic)

    def gradients(self, backend: str, dout: Tensor | None = None, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv of sum(out * dout)."""
        leaves = [x.detach().requires_grad_() for x in self.operands]
        out, _ = attention(*leaves, self, backend, **kwargs)
        return torch.autograd.grad(out, leaves, self.dout if dout is None else dout)

    def dense(self) -> tuple[Tensor, Tensor]:
        return dense_attention(*self.operands, self.mask, self.sm_scale)

    def dense_gradients(self, dlse: Tensor | None = None, dout: Tensor | None = None) -> tuple[Tensor, ...]:
        """out, lse_log2, dq, dk, dv in fp64."""
        return dense_gradients(*self.operands, self.mask, self.sm_scale, self.dout if dout is None else dout, dlse)

    def unselected(self) -> Tensor:
        """bool ``[B, H_kv, N_kv]``: kv blocks that no query head of the group lists."""
        listed = block_mask(self.kv_indices, self.kv_num_blocks, self.kv_block_sizes.shape[0]).any(2)
        return ~listed.unflatten(1, (self.k.shape[1], -1)).any(2)

    def unread(self) -> Tensor:
        """bool ``[B, H_kv, S_kv]``: key slots that no query may read, past a size or in a block nobody lists."""
        real = key_is_real(self.kv_block_sizes, self.block_size)
        return self.unselected().repeat_interleave(self.block_size, 2) | ~real

    def poisoned(self) -> Problem:
        """The same problem with NaN wherever nothing may be read."""
        hidden = self.unread()[..., None]
        return replace(self, k=self.k.masked_fill(hidden, math.nan), v=self.v.masked_fill(hidden, math.nan))


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    problem: Problem,
    backend: str,
    return_lse: bool = True,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor]:
    """The operator on other operands than the problem's own, forward and backward on ``backend``."""
    return torch.ops.vsa.attention(
        q, k, v, *problem.lists, problem.sm_scale, problem.block_size, return_lse, deterministic, backend, backend
    )


def random_problem(
    *,
    batch: int = 1,
    heads: int = 2,
    kv_heads: int | None = None,
    num_q: int = 3,
    num_kv: int = 4,
    width: int = 3,
    head_dim: int = 32,
    block_size: int = 64,
    counts: str | int = "full",
    sizes: str | Sequence[int] = "full",
    past_count: int | str = -1,
    sm_scale: float | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    view: str = "contiguous",
    seed: int = 0,
) -> Problem:
    """One problem.

    Args:
        counts: "full", "varying" (0..width, both ends present), or one number for every row.
        sizes: "full", "ragged" (0..block_size; block 0 is empty and stands first in every list), or the sizes.
        past_count: what stands past the count of a row: -1, or "valid" for an id that the row does not list.
        view: how q, k, v, dout stand in memory, see `operand`.
    """
    generator = torch.Generator().manual_seed(seed)
    kv_heads = heads if kv_heads is None else kv_heads
    kv_indices, kv_num_blocks = random_lists(
        batch, heads, num_q, num_kv, width, counts=counts, past_count=past_count, first=sizes == "ragged",
        generator=generator,
    )  # fmt: skip
    if sizes == "full":
        kv_block_sizes = torch.full((num_kv,), block_size, dtype=torch.int32)
    elif sizes == "ragged":
        kv_block_sizes = torch.randint(0, block_size + 1, (num_kv,), dtype=torch.int32, generator=generator)
        kv_block_sizes[0] = 0
    else:
        kv_block_sizes = torch.tensor(sizes, dtype=torch.int32)
    shapes = [(batch, n, blocks * block_size, head_dim) for n, blocks in ((heads, num_q), (kv_heads, num_kv))]
    q, k, v, dout = (operand(shapes[i], view, dtype, device, generator) for i in (0, 1, 1, 0))
    return Problem(
        q,
        k,
        v,
        dout,
        kv_indices.to(device),
        kv_num_blocks.to(device),
        kv_block_sizes.to(device),
        head_dim**-0.5 if sm_scale is None else sm_scale,
        block_size,
    )


def random_lists(
    batch: int,
    heads: int,
    num_q: int,
    num_kv: int,
    width: int,
    *,
    counts: str | int = "full",
    past_count: int | str = -1,
    first: bool = False,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """kv_indices and kv_num_blocks: ascending distinct ids; with ``first``, block 0 in every list that is not empty."""
    rows = batch * heads * num_q
    if counts == "varying":
        numbers = torch.randint(0, width + 1, (rows,), generator=generator)
        numbers[0], numbers[-1] = 0, width
    else:
        numbers = torch.full((rows,), width if counts == "full" else int(counts))
    ids = torch.full((rows, width), -1, dtype=torch.int32)
    for row in range(rows):
        order = torch.randperm(num_kv, generator=generator)
        if first:
            order = torch.cat((order[order == 0], order[order != 0]))
        n = int(numbers[row])
        ids[row, :n] = order[:n].sort().values
        # An over-read of such an entry changes the result; reading -1 might only read other memory.
        ids[row, n:] = order[n] if past_count == "valid" and n < num_kv else -1
    shape = (batch, heads, num_q)
    return ids.view(*shape, width), numbers.to(torch.int32).view(shape)


VIEWS = ("contiguous", "transposed", "chunk", "expanded")


def operand(
    shape: Sequence[int],
    view: str = "contiguous",
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    generator: torch.Generator | None = None,
) -> Tensor:
    """Random ``[B, H, S, D]``: contiguous; of ``[B, S, H, D]``; the middle third of ``[B, S, H, 3 * D]``; or with one
    head in memory that stands for all."""
    B, H, S, D = shape

    def values(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64).to(device, dtype)

    if view == "contiguous":
        return values(B, H, S, D)
    if view == "transposed":
        return values(B, S, H, D).transpose(1, 2)
    if view == "chunk":
        return values(B, S, H, 3 * D).chunk(3, -1)[1].transpose(1, 2)
    assert view == "expanded"
    return values(B, 1, S, D).expand(B, H, S, D)


def assert_close(name: str, value: Tensor, reference: Tensor, dtype: torch.dtype) -> None:
    """Within the bars of ``dtype``. NaN and infinity never pass."""
    largest, mean, _ = BARS[dtype]
    assert value.shape == reference.shape, f"{name}: shape {tuple(value.shape)}, expected {tuple(reference.shape)}"
    diff = (value.double() - reference).abs()
    ratio = float(diff.max() / reference.abs().max().clamp(min=1e-3))
    assert ratio <= largest, f"{name}: max|diff| / max|ref| = {ratio:.2e} > {largest}"
    assert float(diff.mean()) <= mean, f"{name}: mean|diff| = {float(diff.mean()):.2e} > {mean}"


def assert_same_values(value: Tensor, other: Tensor, backend: str) -> None:
    """Bit for bit, except where garbage makes the Triton kernels repeat a walk in other steps: then up to rounding."""
    if (backend == "triton" and other.dtype.itemsize == 2) or (backend == "triton" and other.dim() == 3):
        torch.testing.assert_close(value, other, atol=4e-3, rtol=1.6e-2)
    else:
        assert torch.equal(value, other)


def assert_lse_close(value: Tensor, reference: Tensor, dtype: torch.dtype) -> None:
    """-inf exactly where the reference has it, elsewhere within the bar."""
    empty = reference == -math.inf
    assert torch.equal(value == -math.inf, empty), "lse_log2: -inf in other rows than the reference"
    diff = float((value.double() - reference)[~empty].abs().max()) if bool((~empty).any()) else 0.0
    assert diff <= BARS[dtype][2], f"lse_log2: max|diff| = {diff:.2e} > {BARS[dtype][2]}"
