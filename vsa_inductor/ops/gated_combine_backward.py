"""`vsa::gated_combine_backward`: the gradients of `vsa::gated_combine` in one pass over the output gradient.

A token's rows of dout and gate are read once for all that needs them: the output gradient in tile order, the gate's
gradient, the sum over each tile for the coarse branch, and, where out is given, the delta that the gradient of
attention starts with.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import ArgumentError
from . import _allocate, _check, _resolve
from ._library import define, register_autograd
from .gated_combine import check_branches


def _check_arguments(
    dout: Tensor,
    out: Tensor | None,
    gate: Tensor | None,
    coarse: Tensor,
    token_slot: Tensor,
    slot_token: Tensor,
    block_size: int,
    needs_dgate: bool,
) -> None:
    _check.rank("dout", dout, "[B, S, H, D]")
    B, S, H, D = dout.shape
    _check.size("dout.shape[1]", S, "the number of tokens of the layout", token_slot.shape[0])
    check_branches((B, S, H, D), ("dout", dout), gate, coarse, token_slot, slot_token, block_size)
    if needs_dgate and gate is None:
        raise ArgumentError("needs_dgate", True, "False, as gate is None")
    if out is None:
        return
    if out.dtype != dout.dtype:
        raise ArgumentError("out", out.dtype, f"the dtype of dout, {dout.dtype}")
    _check.same_device("out", out, "dout", dout)
    tiled = (B, H, slot_token.shape[0], D)
    if out.shape != tiled:
        raise ArgumentError("out.shape", tuple(out.shape), f"{tiled}, [B, H, S_pad, D]")


def _allocate_checked(
    dout: Tensor,
    out: Tensor | None,
    gate: Tensor | None,
    coarse: Tensor,
    token_slot: Tensor,
    slot_token: Tensor,
    block_size: int,
    needs_dgate: bool,
    needs_dcoarse: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The fake; what the implementation fills."""
    _check_arguments(dout, out, gate, coarse, token_slot, slot_token, block_size, needs_dgate)
    return _allocate.combine_gradients(dout, out, coarse, slot_token, needs_dgate, needs_dcoarse)


def _implementation(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    outputs = _allocate_checked(*arguments)
    _resolve.layout_kernels(arguments[0]).gated_combine_backward(*arguments, *outputs)
    return outputs


gated_combine_backward = define(
    "gated_combine_backward(Tensor dout, Tensor? out, Tensor? gate, Tensor coarse, Tensor token_slot,"
    " Tensor slot_token, int block_size, bool needs_dgate, bool needs_dcoarse)"
    " -> (Tensor dout_tiles, Tensor delta, Tensor dgate, Tensor dcoarse)",
    implementation=_implementation,
    fake=_allocate_checked,
    tags=(torch.Tag.flexible_layout,),
)


def _refuse(ctx: Any, *grads: Tensor) -> None:
    raise RuntimeError(
        "vsa::gated_combine_backward: a gradient of a gradient was asked for; allowed: first derivatives of sparse "
        "attention only (drop create_graph=True)"
    )


register_autograd("gated_combine_backward", _refuse, lambda ctx, inputs, output: None)
