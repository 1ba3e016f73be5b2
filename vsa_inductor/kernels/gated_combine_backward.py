"""Gradients of the gated sum of the sparse and the coarse branch, in one pass over dout.

    dout, gate [B, S, H, D] by strides, last 1        out, dout_tiles [B, H, S_pad, D] contiguous
    coarse, dcoarse [B, H, N, D] fp32 contiguous      dgate [B, S, H, D] contiguous     delta [B, H, S_pad] fp32

One program per (batch, tile, head): it gathers the tile's rows of dout and gate by their tokens, a few slots at a step,
writes them out in tile order, and adds up gate * dout over the tile in registers. Heads are the fastest axis of the
grid: programs that run at once read and write neighbouring runs of the same raster rows. What is not asked for is
neither read nor computed. No atomics: one program owns each row of dcoarse.

        slot_token --> rows of dout --+--> dout_tiles
                                      +-- * out ----------> delta
                                      +-- * coarse row ---> dgate
                       rows of gate --+-- * gate, summed -> dcoarse row
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vsa_inductor.kernels.configs import on_device_of, padded_head_dim

# Slots per step. Many small programs overlap each other's loads; larger steps and pipelining within a program measured
# slower (NOTES.md).
_ROWS = 16


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
    head = (pid % heads).to(tl.int64)
    block = pid // heads % num_blocks
    batch = (pid // heads // num_blocks).to(tl.int64)
    cols = tl.arange(0, PADDED_D)
    coarse_row = ((batch * heads + head) * num_blocks + block) * D + cols
    if NEEDS_DGATE:
        coarse = tl.load(coarse_ptr + coarse_row, mask=cols < D, other=0.0)[None, :]
    # Added up slot by slot of a step, so that threads meet once per tile.
    total = tl.zeros([ROWS, PADDED_D], wide)
    for first in range(0, BLOCK, ROWS):
        slots = block * BLOCK + first + tl.arange(0, ROWS)
        token = tl.load(slot_token_ptr + slots).to(tl.int64)[:, None]
        inside = (token >= 0) & (cols < D)[None, :] if PADDED_D > D else token >= 0
        dout_rows = dout_ptr + batch * dout_b + head * dout_h + token * dout_s
        dout = tl.load(dout_rows + cols[None, :], mask=inside, other=0.0)
        slot_rows = (batch * heads + head) * (num_blocks * BLOCK) + slots
        tile = slot_rows[:, None] * D + cols[None, :]
        if NEEDS_DELTA:
            # Masked like dout: what stands in an empty slot of out may be NaN.
            out = tl.load(out_ptr + tile, mask=inside, other=0.0)
        if NEEDS_DCOARSE and HAS_GATE:
            gate_rows = gate_ptr + batch * gate_b + head * gate_h + token * gate_s
            gate = tl.load(gate_rows + cols[None, :], mask=inside, other=0.0)
        if PADDED_D > D:
            tl.store(dout_tiles_ptr + tile, dout, mask=(cols < D)[None, :])
        else:
            tl.store(dout_tiles_ptr + tile, dout)
        value = dout.to(wide)
        if NEEDS_DELTA:
            tl.store(delta_ptr + slot_rows, tl.sum(out.to(wide) * value, 1))
        if NEEDS_DGATE:
            dgate_rows = dgate_ptr + ((batch * num_tokens + token) * heads + head) * D
            tl.store(dgate_rows + cols[None, :], (value * coarse).to(dtype), mask=inside)
        if NEEDS_DCOARSE:
            total += gate.to(wide) * value if HAS_GATE else value
    if NEEDS_DCOARSE:
        tl.store(dcoarse_ptr + coarse_row, tl.sum(total, 0), mask=cols < D)


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
    width = padded_head_dim(head_dim)
    with on_device_of(dout):
        _gated_combine_backward_kernel[(batch * num_blocks * heads,)](
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
            ROWS=_ROWS,
            D=head_dim,
            PADDED_D=width,
            HAS_GATE=gate is not None,
            NEEDS_DELTA=out is not None,
            NEEDS_DGATE=needs_dgate,
            NEEDS_DCOARSE=needs_dcoarse,
            # 32 elements of each operand to a thread: twice as many would not stay in registers.
            num_warps=max(2, width // 64),
        )
