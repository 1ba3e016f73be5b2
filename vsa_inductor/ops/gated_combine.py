"""`vsa::gated_combine`: the sparse branch in raster order, with the coarse branch added to it under a gate.

One operator and not three, so that min-cut finds nothing in raster order to save but the gate: the coarse branch of
every token would be as large as q, in fp32. Lowered to a gather that fuses with the gate's producer and the consumer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import ArgumentError
from . import _allocate, _check, _resolve
from ._library import define, register_autograd


def check_branches(
    raster: tuple[int, ...],
    like: tuple[str, Tensor],
    gate: Tensor | None,
    coarse: Tensor,
    token_slot: Tensor,
    slot_token: Tensor,
    block_size: int,
) -> None:
    """gate and coarse fit ``raster``, the sizes ``(B, S, H, D)`` of the result, and the tables fit both.

    ``like``: name and value of the tensor that dtype and device come from.
    """
    name, x = like
    _check.floating(name, x)
    _check.slot_tables(name, x, token_slot, slot_token)
    B, S, H, D = raster
    num_slots = slot_token.shape[0]
    _check.whole_blocks("slot_token.shape[0]", num_slots, block_size)
    if gate is not None:
        _branch("gate", gate, "[B, S, H, D]", x.dtype, (B, S, H, D), like)
    expected = (B, H, num_slots // block_size, D)
    _branch("coarse", coarse, "[B, H, N, D]", _allocate.statistics_dtype(x.dtype), expected, like)


def _branch(
    name: str, x: Tensor, layout: str, dtype: torch.dtype, shape: tuple[int, ...], like: tuple[str, Tensor]
) -> None:
    _check.rank(name, x, layout)
    if x.dtype != dtype:
        raise ArgumentError(name, x.dtype, f"{dtype}, for {like[0]} in {like[1].dtype}")
    _check.same_device(name, x, *like)
    if x.shape != shape:
        raise ArgumentError(f"{name}.shape", tuple(x.shape), f"{shape}, {layout}")


def _check_arguments(
    out: Tensor, gate: Tensor | None, coarse: Tensor, token_slot: Tensor, slot_token: Tensor, block_size: int
) -> None:
    _check.rank("out", out, "[B, H, S_pad, D]")
    B, H, S_pad, D = out.shape
    raster = (B, token_slot.shape[0], H, D)
    check_branches(raster, ("out", out), gate, coarse, token_slot, slot_token, block_size)
    _check.size("out.shape[2]", S_pad, "the number of slots of the layout", slot_token.shape[0])


def _implementation(
    out: Tensor, gate: Tensor | None, coarse: Tensor, token_slot: Tensor, slot_token: Tensor, block_size: int
) -> Tensor:
    _check_arguments(out, gate, coarse, token_slot, slot_token, block_size)
    combined = _allocate.untiled(out, token_slot)
    _resolve.layout_kernels(out).gated_combine(out, gate, coarse, token_slot, slot_token, block_size, combined)
    return combined


def _fake(
    out: Tensor, gate: Tensor | None, coarse: Tensor, token_slot: Tensor, slot_token: Tensor, block_size: int
) -> Tensor:
    _check_arguments(out, gate, coarse, token_slot, slot_token, block_size)
    return _allocate.untiled(out, token_slot)


gated_combine = define(
    "gated_combine(Tensor out, Tensor? gate, Tensor coarse, Tensor token_slot, Tensor slot_token, int block_size)"
    " -> Tensor",
    implementation=_implementation,
    fake=_fake,
    tags=(torch.Tag.pointwise, torch.Tag.flexible_layout),
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, gate, coarse, token_slot, slot_token, block_size = inputs
    # Not out: its gradient does not depend on it. Nor a gate that is a constant beside a constant.
    ctx.save_for_backward(gate if any(ctx.needs_input_grad[1:3]) else None, coarse, token_slot, slot_token)
    ctx.block_size = block_size


def _backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    needs_dout_tiles, needs_dgate, needs_dcoarse = ctx.needs_input_grad[:3]
    dout_tiles, _, dgate, dcoarse = torch.ops.vsa.gated_combine_backward(
        dout, None, *ctx.saved_tensors, ctx.block_size, needs_dgate, needs_dcoarse
    )
    return (
        dout_tiles if needs_dout_tiles else None,
        dgate if needs_dgate else None,
        dcoarse if needs_dcoarse else None,
        *(None,) * 3,
    )


register_autograd("gated_combine", _backward, _setup_context)
