"""Reference of `vsa::norm_rope_tile`: RMSNorm, rotary embedding, tile order and tile sums."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .tile import tile
from .tile_sums import tile_sums


def norm_rope_tile(
    x: Tensor,
    weight: Tensor | None,
    tables: Sequence[Tensor],
    slot_token: Tensor,
    x_index: Sequence[int],
    weight_index: Sequence[int],
    table_index: Sequence[int],
    signs: Sequence[float],
    sizes: Sequence[int],
    rotation: str,
    norm: str,
    divisor: float,
    eps: float,
    block_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Arguments as the operator's.

    Returns:
        Tiles ``[B, H, S_pad, D]`` in the dtype of x. The sums of squares ``[B, S]``, with ``norm="head"``
        ``[B, S, H]``, with ``norm="none"`` ``[0]``. The sums over blocks ``[B, H, N, D]``, ``[0]`` with ``block_size``
        0. Sums are fp32, fp64 for fp64.
    """
    B, S, H, D = sizes
    wide = torch.promote_types(x.dtype, torch.float32)
    values = _view(x, (B, S, H, D), (*x_index[:3], 1), x_index[3]).to(wide)
    sums, normed = values.new_empty(0), values
    if norm != "none":
        sums = values.square().sum(3 if norm == "head" else (2, 3))
        normed = values * torch.rsqrt(sums / divisor + eps).view(B, S, H if norm == "head" else 1, 1)
        if weight is not None:
            normed = normed * _view(weight, (H, D), (weight_index[0], 1), weight_index[1]).to(wide)
    if rotation == "none":
        rotated = normed
    else:
        axis, pair = (-1, (-1, 2)) if rotation == "interleaved" else (-2, (2, -1))
        a, b = normed.unflatten(-1, pair).unbind(axis)
        factors = [
            sign * _view(table, (B, S, H, D // 2), table_index[5 * i : 5 * i + 4], table_index[5 * i + 4]).to(wide)
            for i, (table, sign) in enumerate(zip(tables, signs, strict=True))
        ]
        pairs = (a * factors[0] + b * factors[1], a * factors[2] + b * factors[3])
        rotated = torch.stack(pairs, axis).flatten(-2)
    tiled = tile(rotated.to(x.dtype), slot_token, slot_token)
    return tiled, sums, tile_sums(tiled, block_size) if block_size else values.new_empty(0)


def _view(x: Tensor, shape: Sequence[int], strides: Sequence[int], offset: int) -> Tensor:
    return x.as_strided(tuple(shape), tuple(strides), x.storage_offset() + offset)
