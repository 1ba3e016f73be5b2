"""`vsa::tile_to_bhsd`: q, k, v and gate to tile order in one launch. For eager inference; graphs use `tile`.

No lowering: compiled graphs call `tile`, which fuses with what made each tensor, so this operator does not occur there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _allocate, _check, _resolve
from ._library import define, register_autograd


def _check_arguments(xs: list[Tensor], slot_token: Tensor) -> None:
    for i, x in enumerate(xs):
        _check.rank(f"xs[{i}]", x, "[B, S, H, D]")
        _check.slot_tables(f"xs[{i}]", x, slot_token, slot_token)
        for axis, what in ((0, "the batch"), (1, "the tokens"), (3, "the head dim")):
            _check.size(f"xs[{i}].shape[{axis}]", x.shape[axis], f"{what} of xs[0]", xs[0].shape[axis])


def _implementation(xs: list[Tensor], slot_token: Tensor) -> list[Tensor]:
    _check_arguments(xs, slot_token)
    outs = [_allocate.tiled(x, slot_token) for x in xs]
    if xs:
        _resolve.layout_kernels(xs[0]).tile(xs, slot_token, outs)
    return outs


def _fake(xs: list[Tensor], slot_token: Tensor) -> list[Tensor]:
    _check_arguments(xs, slot_token)
    return [_allocate.tiled(x, slot_token) for x in xs]


tile_to_bhsd = define(
    "tile_to_bhsd(Tensor[] xs, Tensor slot_token) -> Tensor[]",
    implementation=_implementation,
    fake=_fake,
    tags=(torch.Tag.flexible_layout,),
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.num_tokens = inputs[0][0].shape[1] if inputs[0] else 0
    ctx.save_for_backward(inputs[1])


def _backward(ctx: Any, douts: list[Tensor]) -> tuple[list[Tensor], None]:
    (slot_token,) = ctx.saved_tensors
    # The inverse table: every token has exactly one slot, so the order of the writes does not matter.
    slots = torch.arange(slot_token.shape[0], dtype=torch.int32, device=slot_token.device)
    token_slot = slot_token.new_zeros(ctx.num_tokens + 1)
    token_slot = token_slot.index_put((torch.where(slot_token < 0, ctx.num_tokens, slot_token).long(),), slots)
    token_slot = token_slot[: ctx.num_tokens]
    return [torch.ops.vsa.untile(dout, token_slot, slot_token) for dout in douts], None


register_autograd("tile_to_bhsd", _backward, _setup_context)
