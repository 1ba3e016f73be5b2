"""Tile order to raster order: `[B, H, S_pad, D]` -> `[B, S, H, D]`, a gather (the eager route of the tile layout)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vsa_inductor.kernels.configs import on_device_of, padded_head_dim


@triton.jit
def _untile_kernel(
    x_ptr,
    out_ptr,
    token_slot_ptr,
    num_tokens,
    heads,
    stride_b,
    stride_h,
    stride_s,
    TOKENS: tl.constexpr,
    D: tl.constexpr,
    PADDED_D: tl.constexpr,
):
    pid = tl.program_id(0)
    # Heads are the fastest axis: neighbours write the same raster rows.
    head = pid % heads
    groups = tl.cdiv(num_tokens, TOKENS)
    group = pid // heads % groups
    batch = (pid // heads // groups).to(tl.int64)
    tokens = group * TOKENS + tl.arange(0, TOKENS)
    inside = tokens < num_tokens
    slots = tl.load(token_slot_ptr + tokens, mask=inside, other=0)
    cols = tl.arange(0, PADDED_D)
    mask = inside[:, None] & (cols < D)[None, :]
    source = x_ptr + batch * stride_b + head.to(tl.int64) * stride_h
    x = tl.load(source + slots.to(tl.int64)[:, None] * stride_s + cols[None, :], mask=mask)
    row = (batch * num_tokens + tokens) * heads + head
    tl.store(out_ptr + row[:, None] * D + cols[None, :], x, mask=mask)


def launch_untile(x: torch.Tensor, token_slot: torch.Tensor, out: torch.Tensor) -> None:
    """Gather tile order into raster order.

    Args:
        x: `[B, H, S_pad, D]`, last stride 1.
        token_slot: `[S]` int32, the slot of each token.
        out: `[B, S, H, D]` contiguous, the dtype of x, written everywhere.
    """
    batch, heads, _, head_dim = x.shape
    num_tokens = token_slot.shape[0]
    tokens = 64
    grid = batch * heads * triton.cdiv(num_tokens, tokens)
    if grid == 0:
        return
    with on_device_of(x):
        _untile_kernel[(grid,)](
            x,
            out,
            token_slot,
            num_tokens,
            heads,
            *x.stride()[:3],
            TOKENS=tokens,
            D=head_dim,
            PADDED_D=padded_head_dim(head_dim),
            num_warps=8,
        )
