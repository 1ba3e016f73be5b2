"""Backend `triton`: our Triton kernels, on CUDA devices of compute capability 8.0 and later.

Two launches per backward (dQ, and dK with dV), no atomics: deterministic. dq leaves the kernel scaled and in the
operand dtype, because the pass has the whole sum in registers: an accumulator in memory would only cost bandwidth.
"""

from __future__ import annotations

import functools
import importlib.metadata
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

CONTRACT = Contract(dq_final=True)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LEAST_CAPABILITY = (8, 0)
LEAST_TRITON = (3, 6)
MAX_HEAD_DIM = 256
MAX_KV_BLOCKS = 65536


@functools.cache
def _triton_version() -> tuple[int, int] | None:
    """Major and minor version of the installed Triton; it is not imported for that."""
    try:
        major, minor = importlib.metadata.version("triton").split(".")[:2]
    except importlib.metadata.PackageNotFoundError:
        return None
    return int(major), int(minor)


def _refuse(problem: Problem, direction: str) -> str | None:
    version = _triton_version()
    if version is None or version < LEAST_TRITON:
        found = "not installed" if version is None else "version " + ".".join(map(str, version))
        return f"the package triton is {found}; supported: triton >= {'.'.join(map(str, LEAST_TRITON))}"
    if problem.device_type != "cuda" or problem.capability is None:
        return f"asked for a {problem.device_type} device; supported: CUDA devices of compute capability >= 8.0"
    if problem.capability < LEAST_CAPABILITY:
        major, minor = problem.capability
        return f"asked for compute capability {major}.{minor}; supported: 8.0 and later"
    if problem.dtype not in DTYPES:
        return f"asked for {problem.dtype}; supported: {', '.join(str(dtype) for dtype in DTYPES)}"
    if problem.head_dim % 16 != 0 or not 16 <= problem.head_dim <= MAX_HEAD_DIM:
        return f"asked for head dim {problem.head_dim}; supported: multiples of 16 up to {MAX_HEAD_DIM}"
    return None


def _readable(x: Tensor) -> Tensor:
    """``x``, or a copy where the kernels cannot read it: rows must be contiguous and start at 16-byte steps.

    A zero stride, such as the gradient of a sum, is fine: nothing is written through it.
    """
    itemsize = x.element_size()
    aligned = x.stride(-1) == 1 and all(stride * itemsize % 16 == 0 for stride in x.stride()[:-1])
    return x if aligned and x.data_ptr() % 16 == 0 else x.contiguous()


def _with_dense_rows(x: Tensor) -> Tensor:
    """``x``, or a copy where its last stride is not 1, which the layout kernels take for granted."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _launch_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_indices: Tensor,
    kv_num_blocks: Tensor,
    kv_block_sizes: Tensor,
    sm_scale: float,
    block_size: int,
    out: Tensor,
    lse_log2: Tensor,
) -> None:
    from ..kernels.attention import launch_attention

    q, k, v = (_readable(x) for x in (q, k, v))
    launch_attention(q, k, v, kv_indices, kv_num_blocks, kv_block_sizes, sm_scale, block_size, out, lse_log2)


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
    from ..kernels.attention_backward import launch_attention_backward

    dout, q, k, v = (_readable(x) for x in (dout, q, k, v))
    needs_dq, needs_dkv = dq_accum.dim() == 4, dk.dim() == 4
    launch_attention_backward(
        dout, q, k, v, lse_log2, delta, kv_indices, kv_num_blocks, q_indices, q_offsets, kv_block_sizes, sm_scale,
        block_size, dq_accum if needs_dq else None, dk if needs_dkv else None, dv if needs_dkv else None,
    )  # fmt: skip


class TritonArithmetic(TorchArithmetic):
    """What torch would take several launches for."""

    def row_dot(self, x: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
        from ..kernels.delta import launch_delta

        rows = x.new_empty(x.shape[:-1], dtype=dtype)
        launch_delta(x.contiguous(), y, rows)
        return rows


class TritonLayoutKernels:
    """`LayoutKernels` by Triton, one launch per call (transpose_blocks: a few)."""

    def tile(self, xs: Sequence[Tensor], slot_token: Tensor, outs: Sequence[Tensor]) -> None:
        from ..kernels.tile_to_bhsd import MAX_TENSORS, launch_tile_to_bhsd

        xs = [_with_dense_rows(x) for x in xs]
        for first in range(0, len(xs), MAX_TENSORS):
            span = slice(first, first + MAX_TENSORS)
            launch_tile_to_bhsd(xs[span], slot_token, outs[span])

    def norm_rope_tile(self, xs: Sequence[Tensor], *args: Any) -> None:
        from ..kernels.norm_rope_tile import launch_norm_rope_tile

        launch_norm_rope_tile(xs, *args)

    def norm_rope_tile_backward(self, dtiled: Tensor, dtile_sums: Tensor | None, *args: Any) -> None:
        from ..kernels.norm_rope_tile_backward import launch_norm_rope_tile_backward

        dtile_sums = None if dtile_sums is None else dtile_sums.contiguous()
        launch_norm_rope_tile_backward(dtiled.contiguous(), dtile_sums, *args)

    def tile_sums(self, x: Tensor, block_size: int, out: Tensor) -> None:
        # One reduction of torch's own; compiled graphs fuse it or get the sums along with the tiles.
        out.copy_(reference.tile_sums(x, block_size))

    def untile(self, x: Tensor, token_slot: Tensor, out: Tensor) -> None:
        from ..kernels.untile import launch_untile

        launch_untile(_with_dense_rows(x), token_slot, out)

    def gated_combine(self, out: Tensor, gate: Tensor | None, *args: Any) -> None:
        from ..kernels.gated_combine import launch_gated_combine

        launch_gated_combine(_with_dense_rows(out), None if gate is None else _with_dense_rows(gate), *args)

    def gated_combine_backward(self, dout: Tensor, out: Tensor | None, gate: Tensor | None, *args: Any) -> None:
        from ..kernels.gated_combine_backward import launch_gated_combine_backward

        gate = None if gate is None else _with_dense_rows(gate)
        launch_gated_combine_backward(_with_dense_rows(dout), out, gate, *args)

    def select_blocks(self, scores: Tensor, k: int, num_forced: int, kv_indices: Tensor, kv_num_blocks: Tensor) -> None:
        from ..kernels.select_blocks import launch_select_blocks

        if scores.dtype == torch.float64 or scores.shape[3] > MAX_KV_BLOCKS:
            # The kernel ranks 32-bit keys (fp64 scores only come from tests of gradients) of rows it can hold.
            for target, value in zip(
                (kv_indices, kv_num_blocks), reference.select_blocks(scores, k, num_forced), strict=True
            ):
                target.copy_(value)
            return
        launch_select_blocks(scores, k, num_forced, kv_indices, kv_num_blocks)

    def transpose_blocks(
        self, kv_indices: Tensor, kv_num_blocks: Tensor, num_kv_blocks: int, q_indices: Tensor, q_offsets: Tensor
    ) -> None:
        from ..kernels.transpose_blocks import launch_transpose_blocks

        launch_transpose_blocks(kv_indices, kv_num_blocks, num_kv_blocks, q_indices, q_offsets)


LAYOUT_KERNELS = TritonLayoutKernels()

BACKEND = Backend(
    name="triton",
    identity=backend_identity("triton", "kernels"),
    refuse=_refuse,
    forward_native=attention_op.define_native("triton", _launch_forward),
    backward_native=attention_backward_op.define_native("triton", _launch_backward, _allocate.gradients),
    contract=CONTRACT,
    arithmetic=TritonArithmetic(),
)
