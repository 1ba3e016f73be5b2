"""Reference of `vsa::gated_combine_backward`: the gradients of the gated sum, and delta where out is given."""

from __future__ import annotations

from torch import Tensor

from .gated_combine import rows_of_tokens
from .tile import tile


def gated_combine_backward(
    dout: Tensor,
    out: Tensor | None,
    gate: Tensor | None,
    coarse: Tensor,
    token_slot: Tensor,
    slot_token: Tensor,
    block_size: int,
    needs_dgate: bool,
    needs_dcoarse: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dout_tiles ``[B, H, S_pad, D]``, delta ``[B, H, S_pad]``, dgate ``[B, S, H, D]`` and dcoarse ``[B, H, N, D]``.

    ``[0]`` stands for what is not asked for. Sums are taken in the dtype of coarse.
    """
    wide = coarse.dtype
    dout_tiles = tile(dout, token_slot, slot_token)
    delta, dcoarse = coarse.new_empty(0), coarse.new_empty(0)
    dgate = dout.new_empty(0)
    if out is not None:
        # Masked, not multiplied by zero: what stands in an empty slot of out may be NaN.
        delta = (out.to(wide) * dout_tiles.to(wide)).sum(-1).masked_fill(slot_token < 0, 0)
    if needs_dgate:
        dgate = (dout.to(wide) * rows_of_tokens(coarse, token_slot, block_size)).to(dout.dtype).contiguous()
    if needs_dcoarse:
        weighted = dout.to(wide) if gate is None else gate.to(wide) * dout.to(wide)
        dcoarse = tile(weighted, token_slot, slot_token).unflatten(2, (-1, block_size)).sum(3)
    return dout_tiles, delta, dgate, dcoarse
