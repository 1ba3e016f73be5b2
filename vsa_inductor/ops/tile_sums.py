"""`vsa::tile_sums`: the sum over the slots of each block, what tile means are made of.

An operator, so that the kernel that writes the tiles may give the sums along with them (`norm_rope_tile`), and the
tiles are not read again for their means.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _allocate, _check, _resolve
from ._library import define, register_autograd


def _check_arguments(x: Tensor, block_size: int) -> None:
    _check.rank("x", x, "[B, H, S_pad, D]")
    _check.floating("x", x)
    _check.whole_blocks("x.shape[2]", x.shape[2], block_size)


def _implementation(x: Tensor, block_size: int) -> Tensor:
    _check_arguments(x, block_size)
    out = _allocate.block_sums(x, block_size)
    _resolve.layout_kernels(x).tile_sums(x, block_size, out)
    return out


def _fake(x: Tensor, block_size: int) -> Tensor:
    _check_arguments(x, block_size)
    return _allocate.block_sums(x, block_size)


tile_sums = define(
    "tile_sums(Tensor x, int block_size) -> Tensor",
    implementation=_implementation,
    fake=_fake,
    tags=(torch.Tag.flexible_layout,),
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    # Its dtype and nothing of x itself: the gradient is the same for every slot of a block.
    ctx.dtype = inputs[0].dtype
    ctx.block_size = inputs[1]


def _backward(ctx: Any, dsums: Tensor) -> tuple[Tensor, None]:
    return torch.ops.vsa.tile_sums_backward(dsums, ctx.block_size, ctx.dtype), None


register_autograd("tile_sums", _backward, _setup_context)
