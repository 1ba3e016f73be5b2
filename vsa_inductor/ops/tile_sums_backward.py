"""`vsa::tile_sums_backward`: the gradient of a sum over each block, the same row for every slot of the block.

An operator so that the un-tile behind it can take the rows as they are (`lowerings/norm_rope_tile_backward.py`); its
lowering is generated code.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _allocate, _check
from ._library import define, register_autograd


def _check_arguments(dsums: Tensor, block_size: int, dtype: torch.dtype) -> None:
    _check.rank("dsums", dsums, "[B, H, N, D]")
    _check.floating("dsums", dsums)
    _check.whole_blocks("dsums.shape[2] * block_size", dsums.shape[2] * block_size, block_size)


def _implementation(dsums: Tensor, block_size: int, dtype: torch.dtype) -> Tensor:
    _check_arguments(dsums, block_size, dtype)
    out = _allocate.spread_rows(dsums, block_size, dtype)
    out.unflatten(2, (-1, block_size)).copy_(dsums.unsqueeze(3))
    return out


def _fake(dsums: Tensor, block_size: int, dtype: torch.dtype) -> Tensor:
    _check_arguments(dsums, block_size, dtype)
    return _allocate.spread_rows(dsums, block_size, dtype)


tile_sums_backward = define(
    "tile_sums_backward(Tensor dsums, int block_size, ScalarType dtype) -> Tensor",
    implementation=_implementation,
    fake=_fake,
    tags=(torch.Tag.pointwise, torch.Tag.flexible_layout),
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.dtype = inputs[0].dtype
    ctx.block_size = inputs[1]


def _backward(ctx: Any, drows: Tensor) -> tuple[Tensor, None, None]:
    return torch.ops.vsa.tile_sums(drows, ctx.block_size).to(ctx.dtype), None, None


register_autograd("tile_sums_backward", _backward, _setup_context)
