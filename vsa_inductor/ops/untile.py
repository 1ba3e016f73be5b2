"""`vsa::untile`: tile order to raster order. Lowered to a gather that fuses with the consumer; backward is `tile`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _allocate, _check, _resolve
from ._library import define, register_autograd


def _check_arguments(x: Tensor, token_slot: Tensor, slot_token: Tensor) -> None:
    _check.rank("x", x, "[B, H, S_pad, D]")
    _check.slot_tables("x", x, token_slot, slot_token)
    _check.size("x.shape[2]", x.shape[2], "the number of slots of the layout", slot_token.shape[0])


def _implementation(x: Tensor, token_slot: Tensor, slot_token: Tensor) -> Tensor:
    _check_arguments(x, token_slot, slot_token)
    out = _allocate.untiled(x, token_slot)
    _resolve.layout_kernels(x).untile(x, token_slot, out)
    return out


def _fake(x: Tensor, token_slot: Tensor, slot_token: Tensor) -> Tensor:
    _check_arguments(x, token_slot, slot_token)
    return _allocate.untiled(x, token_slot)


untile = define(
    "untile(Tensor x, Tensor token_slot, Tensor slot_token) -> Tensor",
    implementation=_implementation,
    fake=_fake,
    tags=(torch.Tag.pointwise, torch.Tag.flexible_layout),
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1], inputs[2])


def _backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None, None]:
    return torch.ops.vsa.tile(dout, *ctx.saved_tensors), None, None


register_autograd("untile", _backward, _setup_context)
