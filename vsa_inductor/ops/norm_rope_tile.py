"""`vsa::norm_rope_tile`: RMSNorm, rotary embedding, tile order and tile sums of one operand in one pass over its rows.

Only the lowering of `vsa::tile` calls it, where it recognises the formula of the user's own norm and rotation in front
of the tile (`lowerings/norm_rope_tile.py`). Operands are addressed as flat memory, because
that is what a formula knows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import ArgumentError
from . import _allocate, _check, _resolve
from ._library import define

ROTATIONS = ("interleaved", "half", "none")
NORMS = ("all", "head", "none")


def _check_arguments(slot_token: Tensor, rotation: str, norm: str, block_size: int) -> None:
    if rotation not in ROTATIONS:
        raise ArgumentError("rotation", rotation, f"one of {ROTATIONS}")
    if norm not in NORMS:
        raise ArgumentError("norm", norm, f"one of {NORMS}")
    if block_size != 0:
        _check.whole_blocks("slot_token.shape[0]", slot_token.shape[0], block_size)


def _implementation(
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
    _check_arguments(slot_token, rotation, norm, block_size)
    outputs = _allocate.normed_tiles(x, slot_token, sizes, norm, block_size)
    _resolve.layout_kernels(x).norm_rope_tile(
        x, weight, tables, slot_token, x_index, weight_index, table_index, signs, sizes, rotation, norm, divisor, eps,
        block_size, *outputs,
    )  # fmt: skip
    return outputs


def _fake(
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
    _check_arguments(slot_token, rotation, norm, block_size)
    return _allocate.normed_tiles(x, slot_token, sizes, norm, block_size)


# sizes: B, S, H, D. x_index: strides of batch, token and head, and the offset of the first element; the head dim has
# stride 1. weight_index: stride of a head, offset. table_index: for each of the four tables, strides of batch, token,
# head and pair, and the offset. norm: over "all" heads together, each "head", or "none", which has no weight and gives
# empty square_sums. rotation: "interleaved", "half" or "none", which has no tables. signs: of the four products. For
# the pair (a, b) of normed values:
#   first  = signs[0] * a * tables[0] + signs[1] * b * tables[1]
#   second = signs[2] * a * tables[2] + signs[3] * b * tables[3]
# tile_sums: of the values as stored, over the slots of each block; empty with block_size 0.
norm_rope_tile = define(
    "norm_rope_tile(Tensor x, Tensor? weight, Tensor[] tables, Tensor slot_token, SymInt[] x_index,"
    " SymInt[] weight_index, SymInt[] table_index, float[] signs, SymInt[] sizes, str rotation, str norm,"
    " float divisor, float eps, int block_size) -> (Tensor tiled, Tensor square_sums, Tensor tile_sums)",
    implementation=_implementation,
    fake=_fake,
    tags=(torch.Tag.needs_exact_strides,),
)
