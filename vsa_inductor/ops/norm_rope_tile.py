"""`vsa::norm_rope_tile`: RMSNorm, rotary embedding and tile order of one operand in one pass over its rows.

Only the lowering of `vsa::tile` calls it, where it recognises the formula of the user's own norm and rotation in front
of the tile (`lowerings/norm_rope_tile.py`). Operands are addressed as flat memory, because
that is what a formula knows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import _allocate, _resolve
from ._library import define


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
    per_head: bool,
    divisor: float,
    eps: float,
) -> tuple[Tensor, Tensor]:
    tiled, sums = _allocate.normed_tiles(x, slot_token, sizes, per_head)
    _resolve.layout_kernels(x).norm_rope_tile(
        x, weight, tables, slot_token, x_index, weight_index, table_index, signs, sizes, rotation, per_head, divisor,
        eps, tiled, sums,
    )  # fmt: skip
    return tiled, sums


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
    per_head: bool,
    divisor: float,
    eps: float,
) -> tuple[Tensor, Tensor]:
    return _allocate.normed_tiles(x, slot_token, sizes, per_head)


# sizes: B, S, H, D. x_index: strides of batch, token and head, and the offset of the first element; the head dim has
# stride 1. weight_index: stride of a head, offset. table_index: for each of the four tables, strides of batch, token,
# head and pair, and the offset. rotation: "interleaved", "half" or "none", which has no tables. signs: of the four
# products. For the pair (a, b) of normed values:
#   first  = signs[0] * a * tables[0] + signs[1] * b * tables[1]
#   second = signs[2] * a * tables[2] + signs[3] * b * tables[3]
norm_rope_tile = define(
    "norm_rope_tile(Tensor x, Tensor? weight, Tensor[] tables, Tensor slot_token, SymInt[] x_index,"
    " SymInt[] weight_index, SymInt[] table_index, float[] signs, SymInt[] sizes, str rotation, bool per_head,"
    " float divisor, float eps) -> (Tensor tiled, Tensor square_sums)",
    implementation=_implementation,
    fake=_fake,
    tags=(torch.Tag.needs_exact_strides,),
)
