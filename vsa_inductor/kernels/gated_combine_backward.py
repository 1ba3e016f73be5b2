"""Gradients of the gated sum of the sparse and the coarse branch, in one pass over dout.

    dout, gate [B, S, H, D] by strides, last 1        out, dout_tiles [B, H, S_pad, D] contiguous
    coarse, dcoarse [B, H, N, D] fp32 contiguous      dgate [B, S, H, D] contiguous     delta [B, H, S_pad] fp32

One program per (batch, tile, HEADS heads): it gathers the tile's rows of dout and gate by their tokens, ROWS slots at a
step, writes them out in tile order, and adds up gate * dout over the tile in registers. Heads are the fastest axis of
the grid: programs that run at once read and write neighbouring runs of the same raster rows. What is not asked for is
neither read nor computed. No atomics: one program owns each row of dcoarse.

        slot_token --> rows of dout --+--> dout_tiles
                                      +-- * out ----------> delta
                                      +-- * coarse row ---> dgate
                       rows of gate --+-- * gate, summed -> dcoarse row
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from vsa_inductor.kernels.configs import on_device_of, padded_head_dim


class CombineConfig(NamedTuple):
    """How the work is cut.

    Attributes:
        rows: slots per step; divides block_size.
        heads: heads per program, at most; a power of two, reduced to a divisor of H.
        num_warps: warps per program.
        num_stages: steps whose loads are under way at once; 1 leaves overlap to other programs.
    """

    rows: int
    heads: int
    num_warps: int
    num_stages: int


CONFIG = CombineConfig(rows=64, heads=1, num_warps=8, num_stages=1)


@triton.jit
def _gated_combine_backward_kernel(
    dout_ptr,
    out_ptr,
    gate_ptr,
    coarse_ptr,
    slot_token_ptr,
    dout_tiles_ptr,
    delta_ptr,
    dgate_ptr,
    dcoarse_ptr,
    heads,
    num_blocks,
    num_tokens,
    dout_b,
    dout_s,
    dout_h,
    gate_b,
    gate_s,
    gate_h,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    STAGES: tl.constexpr,
    D: tl.constexpr,
    PADDED_D: tl.constexpr,
    HAS_GATE: tl.constexpr,
    NEEDS_DELTA: tl.constexpr,
    NEEDS_DGATE: tl.constexpr,
    NEEDS_DCOARSE: tl.constexpr,
):
    wide: tl.constexpr = coarse_ptr.dtype.element_ty
    dtype: tl.constexpr = dout_ptr.dtype.element_ty
    pid = tl.program_id(0)
    groups = heads // HEADS
    block = pid // groups % num_blocks
    batch = (pid // groups // num_blocks).to(tl.int64)
    # Tiles are [slot, head, channel].
    head_1d = (pid % groups * HEADS + tl.arange(0, HEADS)).to(tl.int64)
    head = head_1d[None, :, None]
    cols = tl.arange(0, PADDED_D)[None, None, :]
    coarse_row = ((batch * heads + head_1d) * num_blocks + block)[:, None] * D + tl.arange(0, PADDED_D)[None, :]
    coarse_inside = (tl.arange(0, PADDED_D) < D)[None, :]
    if NEEDS_DGATE:
        coarse = tl.load(coarse_ptr + coarse_row, mask=coarse_inside, other=0.0)[None, :, :]
    # Added up slot by slot of a step, so that threads meet once per tile.
    total = tl.zeros([ROWS, HEADS, PADDED_D], wide)
    for first in tl.range(0, BLOCK, ROWS, num_stages=STAGES):
        slots = block * BLOCK + first + tl.arange(0, ROWS)
        tokens = tl.load(slot_token_ptr + slots).to(tl.int64)
        real = (tokens >= 0)[:, None, None]
        token = tokens[:, None, None]
        inside = real & (cols < D) if PADDED_D > D else real
        dout = tl.load(
            dout_ptr + batch * dout_b + token * dout_s + head * dout_h + cols,
            mask=inside,
            other=0.0,
        )
        tile_row = (batch * heads + head) * (num_blocks * BLOCK) + slots[:, None, None]
        if NEEDS_DELTA:
            # Masked like dout: what stands in an empty slot of out may be NaN.
            out = tl.load(out_ptr + tile_row * D + cols, mask=inside, other=0.0)
        if NEEDS_DCOARSE and HAS_GATE:
            gate = tl.load(gate_ptr + batch * gate_b + token * gate_s + head * gate_h + cols, mask=inside, other=0.0)
        if PADDED_D > D:
            tl.store(dout_tiles_ptr + tile_row * D + cols, dout, mask=cols < D)
        else:
            tl.store(dout_tiles_ptr + tile_row * D + cols, dout)
        value = dout.to(wide)
        if NEEDS_DELTA:
            delta = tl.sum(out.to(wide) * value, 2)
            delta_row = (batch * heads + head_1d)[None, :] * (num_blocks * BLOCK) + slots[:, None]
            tl.store(delta_ptr + delta_row, delta)
        if NEEDS_DGATE:
            dgate_row = ((batch * num_tokens + token) * heads + head) * D
            tl.store(dgate_ptr + dgate_row + cols, (value * coarse).to(dtype), mask=inside)
        if NEEDS_DCOARSE:
            total += gate.to(wide) * value if HAS_GATE else value
    if NEEDS_DCOARSE:
        tl.store(dcoarse_ptr + coarse_row, tl.sum(total, 0), mask=coarse_inside)


def launch_gated_combine_backward(
    dout: torch.Tensor,
    out: torch.Tensor | None,
    gate: torch.Tensor | None,
    coarse: torch.Tensor,
    token_slot: torch.Tensor,
    slot_token: torch.Tensor,
    block_size: int,
    needs_dgate: bool,
    needs_dcoarse: bool,
    dout_tiles: torch.Tensor,
    delta: torch.Tensor,
    dgate: torch.Tensor,
    dcoarse: torch.Tensor,
    config: CombineConfig | None = None,
) -> None:
    """Fill the outputs; arguments as those of `vsa::gated_combine_backward`.

    Args:
        dout: `[B, S, H, D]`; gate: the same or None; last stride 1.
        out: `[B, H, S_pad, D]` or None; coarse: `[B, H, N, D]` fp32, or fp64 for fp64 operands: the dtype of the
            arithmetic. Copied if not contiguous.
        dout_tiles, delta, dgate, dcoarse: contiguous, written everywhere; not touched where not needed.
    """
    batch, num_tokens, heads, head_dim = dout.shape
    num_blocks = slot_token.shape[0] // block_size
    if dout_tiles.numel() == 0:
        return
    config = CONFIG if config is None else config
    heads_each = 1
    while heads_each < config.heads and heads % (2 * heads_each) == 0:
        heads_each *= 2
    width = padded_head_dim(head_dim)
    with on_device_of(dout):
        _gated_combine_backward_kernel[(batch * num_blocks * (heads // heads_each),)](
            dout,
            dout if out is None else out.contiguous(),
            dout if gate is None else gate,
            coarse.contiguous(),
            slot_token,
            dout_tiles,
            delta,
            dgate,
            dcoarse,
            heads,
            num_blocks,
            num_tokens,
            *dout.stride()[:3],
            *((0, 0, 0) if gate is None else gate.stride()[:3]),
            BLOCK=block_size,
            # Wide fp32 rows would not stay in registers.
            ROWS=max(1, min(config.rows, block_size, 64 * 128 * 2 // (width * dout.element_size()))),
            HEADS=heads_each,
            STAGES=config.num_stages,
            D=head_dim,
            PADDED_D=width,
            HAS_GATE=gate is not None,
            NEEDS_DELTA=out is not None,
            NEEDS_DGATE=needs_dgate,
            NEEDS_DCOARSE=needs_dcoarse,
            num_warps=config.num_warps,
        )
