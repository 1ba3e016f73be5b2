"""`vsa::norm_rope_tile`: RMSNorm, rotary embedding, tile order and tile sums of q, k and v in one pass over their rows.

Only the lowering of `vsa::tile` calls it, where it recognises the formula of the user's own norm and rotation in front
of the tile (`lowerings/norm_rope_tile.py`). Operands are addressed as flat memory, because that is what a formula
knows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import ArgumentError
from . import _allocate, _check, _resolve
from ._library import define, define_overload

ROTATIONS = ("interleaved", "half", "none")
NORMS = ("all", "head", "none")


def _check_arguments(
    xs: Sequence[Tensor],
    weights: Sequence[Tensor],
    tables: Sequence[Tensor],
    slot_token: Tensor,
    x_index: Sequence[int],
    weight_index: Sequence[int],
    table_index: Sequence[int],
    signs: Sequence[float],
    rotation: str,
    norm: str,
    num_plain: int,
    block_size: int,
) -> None:
    if rotation not in ROTATIONS:
        raise ArgumentError("rotation", rotation, f"one of {ROTATIONS}")
    if norm not in NORMS:
        raise ArgumentError("norm", norm, f"one of {NORMS}")
    if block_size != 0:
        _check.whole_blocks("slot_token.shape[0]", slot_token.shape[0], block_size)
    if not xs:
        raise ArgumentError("xs", "no tensors", "at least one")
    if not 0 <= num_plain <= len(xs):
        raise ArgumentError("num_plain", num_plain, f"0 to the number of xs, {len(xs)}")
    for i, x in enumerate(xs):
        if x.dtype != xs[0].dtype:
            raise ArgumentError(f"xs[{i}]", x.dtype, f"the dtype of xs[0], {xs[0].dtype}")
    num_normed = len(xs) - num_plain
    if len(weights) not in (0, num_normed):
        raise ArgumentError("weights", f"{len(weights)} tensors", f"none, or one for each normed x, {num_normed}")
    num_tables = 0 if rotation == "none" else 4
    for name, given, expected in (
        ("x_index", x_index, 4 * len(xs)),
        ("weight_index", weight_index, 2 * len(weights)),
        ("tables", tables, num_tables),
        ("table_index", table_index, 5 * num_tables),
        ("signs", signs, num_tables),
    ):
        if len(given) != expected:
            raise ArgumentError(name, f"{len(given)} entries", f"{expected} entries")


def _allocate_checked(
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
    """The fake; what the implementation fills."""
    _check_arguments(
        xs, weights, tables, slot_token, x_index, weight_index, table_index, signs, rotation, norm, num_plain,
        block_size,
    )  # fmt: skip
    return _allocate.normed_tiles(xs, slot_token, sizes, norm, num_plain, block_size)


def _implementation(*arguments: Any) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    outputs = _allocate_checked(*arguments)
    _resolve.layout_kernels(arguments[0][0]).norm_rope_tile(*arguments, *outputs)
    return outputs


# xs: of one dtype and the same sizes, B, S, H, D. The last num_plain of them are only tiled and summed; the others are
# normed and rotated, by the same tables. x_index: for each x, strides of batch, token and head, and the offset of the
# first element; the head dim has stride 1. weights: one for each normed x, or none at all. weight_index: for each
# weight, stride of a head, offset. table_index: for each of the four tables, strides of batch, token, head and pair,
# and the offset. norm: over "all" heads together, each "head", or "none", which has no weight and gives empty
# square_sums, as for the plain ones. rotation: "interleaved", "half" or "none", which has no tables. signs: of the four
# products. For the pair (a, b) of normed values:
#   first  = signs[0] * a * tables[0] + signs[1] * b * tables[1]
#   second = signs[2] * a * tables[2] + signs[3] * b * tables[3]
# tile_sums: of the values as stored, over the slots of each block; empty with block_size 0.
# Each of the three results has one tensor for each x.
_ARGUMENTS = (
    "Tensor[] xs, Tensor[] weights, Tensor[] tables, Tensor slot_token, SymInt[] x_index, SymInt[] weight_index,"
    " SymInt[] table_index, float[] signs, SymInt[] sizes, str rotation, str norm, int num_plain, float divisor,"
    " float eps, int block_size"
)
norm_rope_tile = define(
    f"norm_rope_tile({_ARGUMENTS}) -> (Tensor[] tiled, Tensor[] square_sums, Tensor[] tile_sums)",
    implementation=_implementation,
    fake=_allocate_checked,
    tags=(torch.Tag.needs_exact_strides,),
    batched=False,
)


def _in_one_list(
    function: Callable[..., tuple[list[Tensor], list[Tensor], list[Tensor]]],
) -> Callable[..., list[Tensor]]:
    return lambda *arguments: [x for result in function(*arguments) for x in result]


# The three results as one list: Inductor's C++ wrapper takes no list of lists.
define_overload(
    f"norm_rope_tile.flat({_ARGUMENTS}) -> Tensor[]",
    implementation=_in_one_list(_implementation),
    fake=_in_one_list(_allocate_checked),
    tags=(torch.Tag.needs_exact_strides,),
)
