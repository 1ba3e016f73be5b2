"""Reference of `vsa::norm_rope_tile`: RMSNorm, rotary embedding and tile order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .tile import tile


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
    per_head: bool,
    divisor: float,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Arguments as the operator's: tiles ``[B, H, S_pad, D]`` in the dtype of x, and the sums of squares."""
    B, S, H, D = sizes
    wide = torch.promote_types(x.dtype, torch.float32)
    values = _view(x, (B, S, H, D), (*x_index[:3], 1), x_index[3]).to(wide)
    sums = values.square().sum(3 if per_head else (2, 3))
    normed = values * torch.rsqrt(sums / divisor + eps).view(B, S, H if per_head else 1, 1)
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
    return tile(rotated.to(x.dtype), slot_token, slot_token), sums


def _view(x: Tensor, shape: Sequence[int], strides: Sequence[int], offset: int) -> Tensor:
    return x.as_strided(tuple(shape), tuple(strides), x.storage_offset() + offset)
