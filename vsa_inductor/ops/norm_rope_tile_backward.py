"""`vsa::norm_rope_tile_backward`: the gradient through tile order, rotary embedding and RMSNorm in one pass over rows.

Only lowerings call it, where they recognise the formula that `vsa::norm_rope_tile` computes. Operands besides the
gradients are addressed as flat memory, because that is what a formula knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import ArgumentError
from . import _allocate, _check, _resolve
from ._library import define
from .norm_rope_tile import NORMS


def _check_arguments(
    dtiled: Tensor,
    dtile_sums: Tensor | None,
    x: Tensor | None,
    rstd: Tensor | None,
    weight: Tensor | None,
    slot_token: Tensor,
    sizes: Sequence[int],
    norm: str,
    block_size: int,
    needs_dweight: bool,
) -> None:
    _check.rank("dtiled", dtiled, "[B, H, S_pad, D]")
    _check.rank("slot_token", slot_token, "[S_pad]")
    _check.int32("slot_token", slot_token)
    _check.size("dtiled.shape[2]", dtiled.shape[2], "the number of slots of the layout", slot_token.shape[0])
    B, _, H, D = sizes
    for axis, what, expected in ((0, "the batch", B), (1, "the heads", H), (3, "the head dim", D)):
        _check.size(f"dtiled.shape[{axis}]", dtiled.shape[axis], f"{what} in sizes", expected)
    if dtile_sums is not None:
        _check.rank("dtile_sums", dtile_sums, "[B, H, N, D]")
        if block_size < 1:
            raise ArgumentError("block_size", block_size, "the slots of a tile, as dtile_sums is given")
        for axis, what, expected in ((0, "batch", B), (1, "heads", H), (3, "head dim", D)):
            _check.size(f"dtile_sums.shape[{axis}]", dtile_sums.shape[axis], f"the {what} in sizes", expected)
        # Equal products, not a quotient: what a symbolic number of slots can answer.
        slots = dtile_sums.shape[2] * block_size
        _check.size("dtile_sums.shape[2] * block_size", slots, "the number of slots", dtiled.shape[2])
    if norm not in NORMS:
        raise ArgumentError("norm", norm, '"all", "head" or "none"')
    normed = norm != "none"
    for name, operand in (("x", x), ("rstd", rstd)):
        if (operand is not None) != normed:
            raise ArgumentError(name, "None" if operand is None else "a tensor", f"{_wanted(normed)} for norm {norm!r}")
    if not normed and (weight is not None or needs_dweight):
        raise ArgumentError("weight", "a weight or its gradient asked for", 'neither of them for norm "none"')


def _wanted(normed: bool) -> str:
    return "a tensor" if normed else "None"


def _allocate_checked(
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
) -> tuple[Tensor, Tensor]:
    """The fake; what the implementation fills."""
    _check_arguments(dtiled, dtile_sums, x, rstd, weight, slot_token, sizes, norm, block_size, needs_dweight)
    return _allocate.norm_gradients(dtiled if x is None else x, sizes, needs_dx, needs_dweight)


def _implementation(*arguments: Any) -> tuple[Tensor, Tensor]:
    *_, needs_dx, needs_dweight = arguments
    outputs = _allocate_checked(*arguments)
    if needs_dx or needs_dweight:
        _resolve.layout_kernels(arguments[0]).norm_rope_tile_backward(*arguments, *outputs)
    return outputs


# sizes, x_index, weight_index, table_index, signs, rotation, norm: as of vsa::norm_rope_tile. rstd_index: strides of
# batch, token and head, and the offset. With g the gradient of a token's row in raster order, dtile_sums added to the
# rows of its tile, and its pairs (g1, g2) rotated back:
#   u1 = signs[0] * g1 * tables[0] + signs[1] * g2 * tables[1]
#   u2 = signs[2] * g1 * tables[2] + signs[3] * g2 * tables[3]
#   dx      = rstd * weight * u - x * rstd**3 / divisor * sum(weight * u * x)    [B, S, H, D], the dtype of x
#   dweight = sum of u * x * rstd over batch and tokens                          [H, D] fp32
# norm "none": dx = u, in the dtype of dtiled; x, rstd, weight are None. A gradient that is not needed is [0].
# slot_token as a TileLayout has it: the tokens of a block come before its empty slots, which are not looked behind.
norm_rope_tile_backward = define(
    "norm_rope_tile_backward(Tensor dtiled, Tensor? dtile_sums, Tensor? x, Tensor? rstd, Tensor? weight,"
    " Tensor[] tables, Tensor slot_token, SymInt[] x_index, SymInt[] rstd_index, SymInt[] weight_index,"
    " SymInt[] table_index, float[] signs, SymInt[] sizes, str rotation, str norm, float divisor, int block_size,"
    " bool needs_dx, bool needs_dweight) -> (Tensor dx, Tensor dweight)",
    implementation=_implementation,
    fake=_allocate_checked,
    tags=(torch.Tag.needs_exact_strides,),
    batched=False,
)
