"""Reference of `vsa::norm_rope_tile_backward`: the gradient through tile order, rotary embedding and RMSNorm."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


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
    if rotation != "none":
        axis, pair = (-1, (-1, 2)) if rotation == "interleaved" else (-2, (2, -1))
        first, second = u.unflatten(-1, pair).unbind(axis)
        factors = [
            sign * _view(table, (B, S, H, D // 2), table_index[5 * i : 5 * i + 4], table_index[5 * i + 4]).to(wide)
            for i, (table, sign) in enumerate(zip(tables, signs, strict=True))
        ]
        pairs = (first * factors[0] + second * factors[1], first * factors[2] + second * factors[3])
        u = torch.stack(pairs, axis).flatten(-2)
    if x is None or rstd is None:
        return u.to(dtiled.dtype) if needs_dx else None, None
    values = _view(x, (B, S, H, D), (*x_index[:3], 1), x_index[3]).to(wide)
    heads = H if norm == "head" else 1
    root = _view(rstd, (B, S, heads, 1), (*rstd_index[:3], 0), rstd_index[3]).to(wide)
    dweight = (u * values * root).sum((0, 1)) if needs_dweight else None
    if not needs_dx:
        return None, dweight
    if weight is not None:
        u = u * _view(weight, (H, D), (weight_index[0], 1), weight_index[1]).to(wide)
    dot = (u * values).sum(3 if norm == "head" else (2, 3), keepdim=True)
    dx = root * u - values * (root**3 / divisor * dot)
    return dx.to(x.dtype), dweight


def _view(x: Tensor, shape: Sequence[int], strides: Sequence[int], offset: int) -> Tensor:
    return x.as_strided(tuple(shape), tuple(strides), x.storage_offset() + offset)
