"""Raster order to tile order for q, k, v and gate in one launch (the eager route of the tile layout).

    x [B, S, H, D] any strides with last stride 1  ->  out [B, H, S_pad, D] contiguous; empty slots are zero
One program per (batch, group of slots, head); heads are the fastest axis, so that neighbours read the same raster rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from vsa_inductor.kernels.configs import on_device_of, padded_head_dim

MAX_TENSORS = 4


@triton.jit
def _tile_one(x_ptr, out_ptr, stride_b, stride_s, stride_h, heads, batch, head, slots, tokens, num_slots, cols, D):
    if head < heads:
        source = x_ptr + batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h
        source = source + tokens.to(tl.int64)[:, None] * stride_s + cols[None, :]
        inside = (slots < num_slots)[:, None] & (cols < D)[None, :]
        x = tl.load(source, mask=inside & (tokens >= 0)[:, None], other=0.0)
        row = (batch * heads + head).to(tl.int64) * num_slots
        tl.store(out_ptr + (row + slots)[:, None] * D + cols[None, :], x, mask=inside)


@triton.jit
def _tile_to_bhsd_kernel(
    x0_ptr,
    x1_ptr,
    x2_ptr,
    x3_ptr,
    out0_ptr,
    out1_ptr,
    out2_ptr,
    out3_ptr,
    slot_token_ptr,
    num_slots,
    max_heads,
    heads0,
    stride_b0,
    stride_s0,
    stride_h0,
    heads1,
    stride_b1,
    stride_s1,
    stride_h1,
    heads2,
    stride_b2,
    stride_s2,
    stride_h2,
    heads3,
    stride_b3,
    stride_s3,
    stride_h3,
    COUNT: tl.constexpr,
    SLOTS: tl.constexpr,
    D: tl.constexpr,
    PADDED_D: tl.constexpr,
):
    pid = tl.program_id(0)
    head = pid % max_heads
    groups = tl.cdiv(num_slots, SLOTS)
    group = pid // max_heads % groups
    batch = pid // max_heads // groups
    slots = group * SLOTS + tl.arange(0, SLOTS)
    tokens = tl.load(slot_token_ptr + slots, mask=slots < num_slots, other=-1)
    cols = tl.arange(0, PADDED_D)
    _tile_one(x0_ptr, out0_ptr, stride_b0, stride_s0, stride_h0, heads0, batch, head, slots, tokens, num_slots, cols, D)
    if COUNT > 1:
        _tile_one(
            x1_ptr, out1_ptr, stride_b1, stride_s1, stride_h1, heads1, batch, head, slots, tokens, num_slots, cols, D
        )
    if COUNT > 2:
        _tile_one(
            x2_ptr, out2_ptr, stride_b2, stride_s2, stride_h2, heads2, batch, head, slots, tokens, num_slots, cols, D
        )
    if COUNT > 3:
        _tile_one(
            x3_ptr, out3_ptr, stride_b3, stride_s3, stride_h3, heads3, batch, head, slots, tokens, num_slots, cols, D
        )


def launch_tile_to_bhsd(xs: Sequence[torch.Tensor], slot_token: torch.Tensor, outs: Sequence[torch.Tensor]) -> None:
    """Gather 1 to 4 raster tensors into tile order; empty slots become zero.

    Args:
        xs: `[B, S, H_i, D]` each, last stride 1; B, S and D agree, H_i and dtype may differ.
        slot_token: `[S_pad]` int32, the token in a slot or -1.
        outs: `[B, H_i, S_pad, D]` each, contiguous, written everywhere.
    """
    if not 1 <= len(xs) <= MAX_TENSORS or len(outs) != len(xs):
        raise ValueError(f"xs: {len(xs)} tensors and {len(outs)} outputs given, 1 to {MAX_TENSORS} pairs allowed")
    batch, _, _, head_dim = xs[0].shape
    num_slots = slot_token.shape[0]
    max_heads = max(x.shape[2] for x in xs)
    slots = 64
    grid = batch * max_heads * triton.cdiv(num_slots, slots)
    if grid == 0:
        return
    padding = MAX_TENSORS - len(xs)
    sources = [*xs, *[xs[0]] * padding]
    targets = [*outs, *[outs[0]] * padding]
    shapes = [n for x in sources for n in (x.shape[2], x.stride(0), x.stride(1), x.stride(2))]
    with on_device_of(slot_token):
        _tile_to_bhsd_kernel[(grid,)](
            *sources,
            *targets,
            slot_token,
            num_slots,
            max_heads,
            *shapes,
            COUNT=len(xs),
            SLOTS=slots,
            D=head_dim,
            PADDED_D=padded_head_dim(head_dim),
            num_warps=8,
        )
