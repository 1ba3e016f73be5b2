"""Reference of `vsa::gated_combine`: the sparse branch in raster order plus the gated coarse branch."""

from __future__ import annotations

from torch import Tensor

from .untile import untile


def gated_combine(
    out: Tensor, gate: Tensor | None, coarse: Tensor, token_slot: Tensor, slot_token: Tensor, block_size: int
) -> Tensor:
    """out ``[B, H, S_pad, D]``, gate ``[B, S, H, D]`` or None, coarse ``[B, H, N, D]`` -> ``[B, S, H, D]``.

    Computed in the dtype of coarse and rounded once to that of out.
    """
    per_token = rows_of_tokens(coarse, token_slot, block_size)
    weighted = per_token if gate is None else gate.to(coarse.dtype) * per_token
    sparse = untile(out, token_slot, slot_token).to(coarse.dtype)
    return (sparse + weighted).to(out.dtype).contiguous()


def rows_of_tokens(rows: Tensor, token_slot: Tensor, block_size: int) -> Tensor:
    """One row per block, given to every token of the block: ``[B, H, N, D]`` -> ``[B, S, H, D]``."""
    return rows.transpose(1, 2).index_select(1, (token_slot // block_size).long())
