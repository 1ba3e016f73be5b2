"""`vsa::untile_blocks`: one row per block, given to every token of the block. The coarse branch in raster order.

Compiled by its decomposition on purpose: `aten.index` is an operator that min-cut recomputes, so that the backward
keeps the rows and not their copy for every token. The backward is a sum over each block in a fixed order, where that of
an index would add with atomics.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _allocate, _check, _resolve
from ._library import define, register_autograd


def _check_arguments(rows: Tensor, token_slot: Tensor, slot_token: Tensor, block_size: int) -> None:
    _check.rank("rows", rows, "[B, H, N, D]")
    _check.slot_tables("rows", rows, token_slot, slot_token)
    _check.size("rows.shape[2]", rows.shape[2], "the number of blocks of the layout", slot_token.shape[0] // block_size)


def _implementation(rows: Tensor, token_slot: Tensor, slot_token: Tensor, block_size: int) -> Tensor:
    _check_arguments(rows, token_slot, slot_token, block_size)
    out = _allocate.untiled(rows, token_slot)
    _resolve.layout_kernels(rows).untile_blocks(rows, token_slot, block_size, out)
    return out


def _fake(rows: Tensor, token_slot: Tensor, slot_token: Tensor, block_size: int) -> Tensor:
    _check_arguments(rows, token_slot, slot_token, block_size)
    return _allocate.untiled(rows, token_slot)


untile_blocks = define(
    "untile_blocks(Tensor rows, Tensor token_slot, Tensor slot_token, int block_size) -> Tensor",
    implementation=_implementation,
    fake=_fake,
    tags=(torch.Tag.pointwise, torch.Tag.flexible_layout),
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1], inputs[2])
    ctx.block_size = inputs[3]


def _backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None, None, None]:
    tiled = torch.ops.vsa.tile(dout, *ctx.saved_tensors)
    return tiled.unflatten(2, (-1, ctx.block_size)).sum(3), None, None, None


register_autograd("untile_blocks", _backward, _setup_context)
