"""Reference of `vsa::norm_rope_tile_backward`: the gradient through tile order, rotary embedding and RMSNorm."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .norm_rope_tile import rotated, signed_tables, view


def norm_rope_tile_backward(
    dtiled: Tensor,
    dtile_sums: Tensor | None,
    x: Tensor | None,
    rstd: Tensor | None,
    weight: Tensor | None,
    tables: Sequence[Tensor],
    slot_token: Tensor,
    x_index: Sequence[int],
    rstd_index: Sequence[int],
    weight_index: Sequence[int],
    table_index: Sequence[int],
    signs: Sequence[float],
    sizes: Sequence[int],
    rotation: str,
    norm: str,
    divisor: float,
    block_size: int,
    needs_dx: bool,
    needs_dweight: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Arguments as the operator's: dx ``[B, S, H, D]`` and dweight ``[H, D]``; None for what is not needed."""
    B, S, H, D = sizes
    wide = torch.promote_types(dtiled.dtype, torch.float32)
    tiles = dtiled.to(wide)
    if dtile_sums is not None:
        tiles = tiles + dtile_sums.to(wide).repeat_interleave(block_size, 2)
    real = slot_token >= 0
    u = tiles.new_empty(B, S, H, D)
    u[:, slot_token[real].long()] = tiles[:, :, real].transpose(1, 2)
    u = rotated(u, signed_tables(tables, table_index, signs, sizes, wide), rotation)
    if x is None or rstd is None:
        return u.to(dtiled.dtype) if needs_dx else None, None
    values = view(x, (B, S, H, D), (*x_index[:3], 1), x_index[3]).to(wide)
    heads = H if norm == "head" else 1
    root = view(rstd, (B, S, heads, 1), (*rstd_index[:3], 0), rstd_index[3]).to(wide)
    dweight = (u * values * root).sum((0, 1)) if needs_dweight else None
    if not needs_dx:
        return None, dweight
    if weight is not None:
        u = u * view(weight, (H, D), (weight_index[0], 1), weight_index[1]).to(wide)
    dot = (u * values).sum(3 if norm == "head" else (2, 3), keepdim=True)
    dx = root * u - values * (root**3 / divisor * dot)
    return dx.to(x.dtype), dweight
