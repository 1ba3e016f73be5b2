"""Reference of `vsa::norm_rope_tile`: RMSNorm, rotary embedding, tile order and tile sums."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .tile import tile
from .tile_sums import tile_sums


def norm_rope_tile(
    xs: Sequence[Tensor],
    weights: Sequence[Tensor],
    tables: Sequence[Tensor],
    slot_token: Tensor,
    x_index: Sequence[int],
    weight_index: Sequence[int],
    table_index: Sequence[int],
    signs: Sequence[float],
    sizes: Sequence[int],
    rotation: str,
    norm: str,
    num_plain: int,
    divisor: float,
    eps: float,
    block_size: int,
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Arguments as the operator's.

    Returns:
        For each x: tiles ``[B, H, S_pad, D]`` in the dtype of x; the sums of squares ``[B, S]``, with ``norm="head"``
        ``[B, S, H]``, with ``norm="none"`` and for the last ``num_plain`` ``[0]``; the sums over blocks
        ``[B, H, N, D]``, ``[0]`` with ``block_size`` 0. Sums are fp32, fp64 for fp64.
    """
    B, S, H, D = sizes
    wide = torch.promote_types(xs[0].dtype, torch.float32)
    factors = signed_tables(tables, table_index, signs, sizes, wide)
    all_tiles, all_squares, all_sums = [], [], []
    for i, x in enumerate(xs):
        *strides, offset = x_index[4 * i : 4 * i + 4]
        values = view(x, (B, S, H, D), (*strides, 1), offset).to(wide)
        squares = values.new_empty(0)
        if i < len(xs) - num_plain:
            if norm != "none":
                squares = values.square().sum(3 if norm == "head" else (2, 3))
                values = values * torch.rsqrt(squares / divisor + eps).view(B, S, H if norm == "head" else 1, 1)
                if weights:
                    weight = view(weights[i], (H, D), (weight_index[2 * i], 1), weight_index[2 * i + 1])
                    values = values * weight.to(wide)
            values = rotated(values, factors, rotation)
        tiled = tile(values.to(x.dtype), slot_token, slot_token)
        all_tiles.append(tiled)
        all_squares.append(squares)
        all_sums.append(tile_sums(tiled, block_size) if block_size else values.new_empty(0))
    return all_tiles, all_squares, all_sums


def signed_tables(
    tables: Sequence[Tensor],
    table_index: Sequence[int],
    signs: Sequence[float],
    sizes: Sequence[int],
    dtype: torch.dtype,
) -> list[Tensor]:
    """What a rotation multiplies by: each table, times its sign, as ``[B, S, H, D / 2]`` in ``dtype``."""
    B, S, H, D = sizes
    factors = []
    for i, (table, sign) in enumerate(zip(tables, signs, strict=True)):
        *strides, offset = table_index[5 * i : 5 * i + 5]
        factors.append(sign * view(table, (B, S, H, D // 2), strides, offset).to(dtype))
    return factors


def rotated(x: Tensor, factors: Sequence[Tensor], rotation: str) -> Tensor:
    """``x`` ``[B, S, H, D]`` with its pairs combined by the four ``factors``."""
    if rotation == "none":
        return x
    axis, pair = (-1, (-1, 2)) if rotation == "interleaved" else (-2, (2, -1))
    a, b = x.unflatten(-1, pair).unbind(axis)
    return torch.stack((a * factors[0] + b * factors[1], a * factors[2] + b * factors[3]), axis).flatten(-2)


def view(x: Tensor, shape: Sequence[int], strides: Sequence[int], offset: int) -> Tensor:
    """``x`` as flat memory, in ``shape`` by ``strides`` from ``offset`` on."""
    return x.as_strided(tuple(shape), tuple(strides), x.storage_offset() + offset)
