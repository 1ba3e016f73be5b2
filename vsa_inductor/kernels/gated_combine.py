"""Tile order to raster order with the gated coarse branch added: the eager route, compiled graphs generate it.

    out [B, H, S_pad, D]    gate [B, S, H, D], both by strides, last 1    coarse [B, H, N, D] contiguous
    combined [B, S, H, D] contiguous = out in raster order + gate * coarse of the token's tile, rounded once
One program per (batch, rows of a tile, head): it knows the one row of coarse that its tokens share. Heads are the
fastest axis, so that neighbours read and write the same raster rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vsa_inductor.kernels.configs import on_device_of, padded_head_dim

_ROWS = 64


@triton.jit
def _gated_combine_kernel(
    out_ptr,
    gate_ptr,
    coarse_ptr,
    slot_token_ptr,
    combined_ptr,
    heads,
    num_slots,
    num_tokens,
    out_b,
    out_h,
    out_s,
    gate_b,
    gate_s,
    gate_h,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    PADDED_D: tl.constexpr,
    HAS_GATE: tl.constexpr,
):
    wide: tl.constexpr = coarse_ptr.dtype.element_ty
    pid = tl.program_id(0)
    head = (pid % heads).to(tl.int64)
    groups = num_slots // ROWS
    group = pid // heads % groups
    batch = (pid // heads // groups).to(tl.int64)
    slots = group * ROWS + tl.arange(0, ROWS)
    tokens = tl.load(slot_token_ptr + slots)
    real = (tokens >= 0)[:, None]
    tokens = tokens.to(tl.int64)[:, None]
    cols = tl.arange(0, PADDED_D)
    inside = real & (cols < D)[None, :] if PADDED_D > D else real
    rows = out_ptr + batch * out_b + head * out_h + slots.to(tl.int64)[:, None] * out_s
    value = tl.load(rows + cols[None, :], mask=inside, other=0.0).to(wide)
    block = (batch * heads + head) * (num_slots // BLOCK) + group // (BLOCK // ROWS)
    coarse = tl.load(coarse_ptr + block * D + cols, mask=cols < D, other=0.0)[None, :]
    if HAS_GATE:
        gate_rows = gate_ptr + batch * gate_b + head * gate_h + tokens * gate_s
        value += tl.load(gate_rows + cols[None, :], mask=inside, other=0.0).to(wide) * coarse
    else:
        value += coarse
    to = combined_ptr + ((batch * num_tokens + tokens) * heads + head) * D
    tl.store(to + cols[None, :], value.to(combined_ptr.dtype.element_ty), mask=inside)


def launch_gated_combine(
    out: torch.Tensor,
    gate: torch.Tensor | None,
    coarse: torch.Tensor,
    token_slot: torch.Tensor,
    slot_token: torch.Tensor,
    block_size: int,
    combined: torch.Tensor,
) -> None:
    """Fill `combined`; arguments as those of `vsa::gated_combine`.

    Args:
        out: `[B, H, S_pad, D]`; gate: `[B, S, H, D]` or None; last stride 1.
        coarse: `[B, H, N, D]` fp32, or fp64 for fp64 operands: the dtype of the arithmetic. Copied if not contiguous.
        combined: `[B, S, H, D]` contiguous, the dtype of out, written everywhere.
    """
    batch, heads, num_slots, head_dim = out.shape
    if combined.numel() == 0:
        return
    with on_device_of(out):
        _gated_combine_kernel[(batch * heads * (num_slots // _ROWS),)](
            out,
            out if gate is None else gate,
            coarse.contiguous(),
            slot_token,
            combined,
            heads,
            num_slots,
            token_slot.shape[0],
            *out.stride()[:3],
            *((0, 0, 0) if gate is None else gate.stride()[:3]),
            BLOCK=block_size,
            ROWS=_ROWS,
            D=head_dim,
            PADDED_D=padded_head_dim(head_dim),
            HAS_GATE=gate is not None,
            num_warps=8,
        )
