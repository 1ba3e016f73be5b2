"""`vsa::tile`: raster order to tile order. Lowered to a scatter that fuses with the producer; backward is `untile`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _allocate, _check, _resolve
from ._library import define, register_autograd


def _check_arguments(x: Tensor, token_slot: Tensor, slot_token: Tensor) -> None:
    _check.rank("x", x, "[B, S, H, D]")
    _check.slot_tables("x", x, token_slot, slot_token)
    _check.size("x.shape[1]", x.shape[1], "the number of tokens of the layout", token_slot.shape[0])


def _implementation(x: Tensor, token_slot: Tensor, slot_token: Tensor) -> Tensor:
    _check_arguments(x, token_slot, slot_token)
    out = _allocate.tiled(x, slot_token)
    _resolve.layout_kernels(x).tile([x], slot_token, [out])
    return out


def _fake(x: Tensor, token_slot: Tensor, slot_token: Tensor) -> Tensor:
    _check_arguments(x, token_slot, slot_token)
    return _allocate.tiled(x, slot_token)


# pointwise: otherwise Inductor materialises a torch.cat (rotate-half RoPE) in front of it.
# flexible_layout: otherwise it copies x to its eager strides first.
tile = define(
    "tile(Tensor x, Tensor token_slot, Tensor slot_token) -> Tensor",
    implementation=_implementation,
    fake=_fake,
    tags=(torch.Tag.pointwise, torch.Tag.flexible_layout),
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1], inputs[2])


def _backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None, None]:
    return torch.ops.vsa.untile(dout, *ctx.saved_tensors), None, None


register_autograd("tile", _backward, _setup_context)
