"""Backend `eager`: the reference, on any device. Blocked, so that memory is O(S * k * block)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import reference
from ..ops import _allocate
from ..ops import attention as attention_op
from ..ops import attention_backward as attention_backward_op
from .contract import Backend, Contract, Problem, TorchArithmetic
from .identity import backend_identity

CONTRACT = Contract()


def _launch_forward(q: Tensor, *args: Any) -> None:
    # Autocast of the caller would reach the products inside.
    with torch.autocast(q.device.type, enabled=False):
        reference.attention(q, *args)


def _launch_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse_log2: Tensor,
    delta: Tensor,
    kv_indices: Tensor,
    kv_num_blocks: Tensor,
    q_indices: Tensor | None,
    q_offsets: Tensor | None,
    kv_block_sizes: Tensor,
    sm_scale: float,
    block_size: int,
    dq_accum: Tensor,
    dk: Tensor,
    dv: Tensor,
) -> None:
    needs_dq, needs_dkv = dq_accum.dim() == 4, dk.dim() == 4
    with torch.autocast(q.device.type, enabled=False):
        grads = reference.attention_backward(
            dout, q, k, v, lse_log2, delta, kv_indices, kv_num_blocks, kv_block_sizes, sm_scale, block_size,
            needs_dq, needs_dkv,
        )  # fmt: skip
    for target, grad in zip((dq_accum, dk, dv), grads, strict=True):
        if grad is not None:
            target.copy_(grad)


def _allocate_gradients(
    q: Tensor, k: Tensor, v: Tensor, needs_dq: bool, needs_dkv: bool
) -> tuple[Tensor, Tensor, Tensor]:
    _, dk, dv = _allocate.gradients(q, k, v, False, needs_dkv)
    return q.new_empty(q.shape if needs_dq else (0,), dtype=_allocate.statistics_dtype(q.dtype)), dk, dv


def _refuse(problem: Problem, direction: str) -> str | None:
    return None


class EagerLayoutKernels:
    """`LayoutKernels` by the references."""

    def tile(self, xs: Sequence[Tensor], slot_token: Tensor, outs: Sequence[Tensor]) -> None:
        for out, tiled in zip(outs, reference.tile_to_bhsd(xs, slot_token), strict=True):
            out.copy_(tiled)

    def norm_rope_tile(self, xs: Sequence[Tensor], *args: Any) -> None:
        arguments, outputs = args[:-3], args[-3:]
        for targets, values in zip(outputs, reference.norm_rope_tile(xs, *arguments), strict=True):
            for target, value in zip(targets, values, strict=True):
                target.copy_(value)

    def norm_rope_tile_backward(self, dtiled: Tensor, *args: Any) -> None:
        *arguments, dx, dweight = args
        for target, value in zip((dx, dweight), reference.norm_rope_tile_backward(dtiled, *arguments), strict=True):
            if value is not None:
                target.copy_(value)

    def tile_sums(self, x: Tensor, block_size: int, out: Tensor) -> None:
        out.copy_(reference.tile_sums(x, block_size))

    def untile(self, x: Tensor, token_slot: Tensor, out: Tensor) -> None:
        out.copy_(reference.untile(x, token_slot, token_slot))

    def gated_combine(self, out: Tensor, gate: Tensor | None, *args: Any) -> None:
        *arguments, combined = args
        combined.copy_(reference.gated_combine(out, gate, *arguments))

    def gated_combine_backward(self, dout: Tensor, out: Tensor | None, gate: Tensor | None, *args: Any) -> None:
        arguments, targets = args[:-4], args[-4:]
        values = reference.gated_combine_backward(dout, out, gate, *arguments)
        for target, value in zip(targets, values, strict=True):
            target.copy_(value)

    def select_blocks(self, scores: Tensor, k: int, num_forced: int, kv_indices: Tensor, kv_num_blocks: Tensor) -> None:
        ids, counts = reference.select_blocks(scores, k, num_forced)
        kv_indices.copy_(ids)
        kv_num_blocks.copy_(counts)

    def transpose_blocks(
        self, kv_indices: Tensor, kv_num_blocks: Tensor, num_kv_blocks: int, q_indices: Tensor, q_offsets: Tensor
    ) -> None:
        ids, offsets = reference.transpose_blocks(kv_indices, kv_num_blocks, num_kv_blocks)
        q_indices.copy_(ids)
        q_offsets.copy_(offsets)


LAYOUT_KERNELS = EagerLayoutKernels()

BACKEND = Backend(
    name="eager",
    identity=backend_identity("eager", "reference"),
    refuse=_refuse,
    forward_native=attention_op.define_native("eager", _launch_forward),
    backward_native=attention_backward_op.define_native("eager", _launch_backward, _allocate_gradients),
    contract=CONTRACT,
    arithmetic=TorchArithmetic(),
)
