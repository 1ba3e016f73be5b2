"""`vsa::attention_backward`, the logical operator, and the native operators `vsa::attention_backward_<backend>`.

The native operators take delta and what their contract asks for, and return dq's accumulator in its own order. What
stands around them, before and after, is in `backends/contract.py`, written once for eager, decomposition and lowering.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..errors import ArgumentError
from . import _allocate, _check, _resolve
from ._library import define, define_out, register_autograd, supplied_by_library
from .attention import check_arguments as check_attention_arguments


def _check_arguments(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse_log2: Tensor,
    kv_indices: Tensor,
    kv_num_blocks: Tensor,
    q_indices: Tensor | None,
    q_offsets: Tensor | None,
    kv_block_sizes: Tensor,
    block_size: int,
    needs_dkv: bool,
) -> None:
    check_attention_arguments(q, k, v, kv_indices, kv_num_blocks, kv_block_sizes, block_size)
    statistics = _allocate.statistics_dtype(q.dtype)
    for name, x, dtype, shape in (
        ("dout", dout, q.dtype, q.shape),
        ("out", out, q.dtype, q.shape),
        ("lse_log2", lse_log2, statistics, q.shape[:3]),
        ("dlse", dlse, statistics, q.shape[:3]),
    ):
        if x is None:
            continue
        if x.dtype != dtype:
            raise ArgumentError(name, x.dtype, str(dtype))
        if x.device != q.device:
            _check.same_device(name, x, "q", q)
        if x.shape != shape:
            raise ArgumentError(f"{name}.shape", tuple(x.shape), f"{tuple(shape)}, after q")
    if needs_dkv and (q_indices is None or q_offsets is None):
        raise ArgumentError("q_indices, q_offsets", None, "the lists of vsa::transpose_blocks, as needs_dkv is set")
    B, H, N_q, M = kv_indices.shape
    for name, lists, length in (
        ("q_indices", q_indices, N_q * M),
        ("q_offsets", q_offsets, kv_block_sizes.shape[0] + 1),
    ):
        if lists is None:
            continue
        _check.int32(name, lists)
        _check.same_device(name, lists, "q", q)
        if lists.shape != (B, H, length):
            allowed = f"{(B, H, length)}, as vsa::transpose_blocks gives it"
            raise ArgumentError(f"{name}.shape", tuple(lists.shape), allowed)


def _implementation(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse_log2: Tensor,
    kv_indices: Tensor,
    kv_num_blocks: Tensor,
    q_indices: Tensor | None,
    q_offsets: Tensor | None,
    kv_block_sizes: Tensor,
    sm_scale: float,
    block_size: int,
    deterministic: bool,
    backend: str,
    needs_dq: bool,
    needs_dkv: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    _check_arguments(
        dout, dlse, q, k, v, out, lse_log2, kv_indices, kv_num_blocks, q_indices, q_offsets, kv_block_sizes, block_size,
        needs_dkv,
    )  # fmt: skip
    chosen = _resolve.backend(backend, "backward", q, block_size, q.shape[1] != k.shape[1], deterministic)
    return chosen.run_backward(
        dout, dlse, q, k, v, out, lse_log2, kv_indices, kv_num_blocks, q_indices, q_offsets, kv_block_sizes, sm_scale,
        block_size, deterministic, needs_dq, needs_dkv,
    )  # fmt: skip


def _fake(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *args: Any
) -> tuple[Tensor, Tensor, Tensor]:
    *tensors, _, block_size, _, _, needs_dq, needs_dkv = args
    checked: tuple[Any, ...] = (dout, dlse, q, k, v, *tensors, block_size, needs_dkv)
    _check_arguments(*checked)
    return _allocate.gradients(q, k, v, needs_dq, needs_dkv)


attention_backward = define(
    "attention_backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse_log2,"
    " Tensor kv_indices, Tensor kv_num_blocks, Tensor? q_indices, Tensor? q_offsets, Tensor kv_block_sizes,"
    " float sm_scale, int block_size, bool deterministic, str backend, bool needs_dq, bool needs_dkv)"
    " -> (Tensor dq, Tensor dk, Tensor dv)",
    implementation=_implementation,
    fake=_fake,
    tags=(torch.Tag.needs_exact_strides,),
)


def _refuse(ctx: Any, *grads: Tensor) -> None:
    raise RuntimeError(
        "vsa::attention_backward: a gradient of a gradient was asked for; allowed: first derivatives of sparse "
        "attention only (drop create_graph=True)"
    )


register_autograd("attention_backward", _refuse, lambda ctx, inputs, output: None)


@register_flop_formula([torch.ops.vsa.attention_backward])
def _flops(
    dout_shape: Sequence[int],
    dlse_shape: Sequence[int] | None,
    q_shape: Sequence[int],
    k_shape: Sequence[int],
    v_shape: Sequence[int],
    out_shape_: Sequence[int],
    lse_shape: Sequence[int],
    kv_indices_shape: Sequence[int],
    kv_num_blocks_shape: Sequence[int],
    q_indices_shape: Sequence[int] | None,
    q_offsets_shape: Sequence[int] | None,
    kv_block_sizes_shape: Sequence[int],
    sm_scale: float,
    block_size: int,
    deterministic: bool,
    backend: str,
    needs_dq: bool,
    needs_dkv: bool,
    *args: Any,
    out_shape: Any = None,
    **kwargs: Any,
) -> int:
    """2 * B * H * S_q * M * block_size * D per product: S and dP, then dQ, then dK and dV, as far as they are needed.

    All five make 2.5 times the forward. A backend that computes S and dP twice does not count more.
    """
    B, H, S_q, D = q_shape
    products = 2 + needs_dq + 2 * needs_dkv
    return 2 * products * B * H * S_q * kv_indices_shape[3] * block_size * D


NativeBackward = Callable[..., None]
AllocateGradients = Callable[[Tensor, Tensor, Tensor, bool, bool], tuple[Tensor, Tensor, Tensor]]

_NATIVE_ARGUMENTS = (
    "Tensor dout, Tensor q, Tensor k, Tensor v, Tensor lse_log2, Tensor delta, Tensor kv_indices,"
    " Tensor kv_num_blocks, Tensor? q_indices, Tensor? q_offsets, Tensor kv_block_sizes, float sm_scale,"
    " int block_size, bool deterministic, bool needs_dq, bool needs_dkv"
)


def define_native(
    backend: str, launch: NativeBackward, allocate: AllocateGradients
) -> tuple[torch._ops.OpOverload, Callable[..., tuple[Tensor, Tensor, Tensor]]]:
    """Defines ``vsa::attention_backward_<backend>`` and its ``.out`` form; returns the operator and what it runs.

    ``allocate(q, k, v, needs_dq, needs_dkv)`` gives dq's accumulator, dk and dv (``[0]`` where not needed), for the
    fake too. ``launch(dout, q, k, v, lse_log2, delta, kv_indices, kv_num_blocks, q_indices, q_offsets, kv_block_sizes,
    sm_scale, block_size, dq_accum, dk, dv)`` fills them, and zeroes the accumulator itself if it adds to it.
    """

    def functional(
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
        deterministic: bool,
        needs_dq: bool,
        needs_dkv: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        grads = allocate(q, k, v, needs_dq, needs_dkv)
        launch(dout, q, k, v, lse_log2, delta, kv_indices, kv_num_blocks, q_indices, q_offsets, kv_block_sizes,
               sm_scale, block_size, *grads)  # fmt: skip
        return grads

    def into(*args: Any, dq_accum: Tensor, dk: Tensor, dv: Tensor) -> None:
        launch(*args[:13], dq_accum, dk, dv)

    return _define_both(backend, functional, into, allocate), functional


def define_in_library(
    backend: str, unavailable: Callable[[], Exception], allocate: AllocateGradients
) -> tuple[torch._ops.OpOverload, Callable[..., tuple[Tensor, Tensor, Tensor]]]:
    """As `define_native`, with both forms implemented by a native library, which allocates as ``allocate`` does."""
    missing = supplied_by_library(unavailable)
    op = _define_both(backend, missing, missing, allocate)
    return op, op


def define_eager_in_library(backend: str, unavailable: Callable[[], Exception]) -> torch._ops.OpOverload:
    """``vsa::attention_backward_<backend>_eager``: the logical operator in one trip, by a native library.

    It takes what `vsa::attention_backward` does without its backend and returns the same. Only eager calls it; in
    compiled graphs the work around the kernel is generated code.
    """

    def fake(dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *args: Any) -> tuple[Tensor, ...]:
        return _allocate.gradients(q, k, v, args[10], args[11])

    return define(
        f"attention_backward_{backend}_eager(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out,"
        " Tensor lse_log2, Tensor kv_indices, Tensor kv_num_blocks, Tensor? q_indices, Tensor? q_offsets,"
        " Tensor kv_block_sizes, float sm_scale, int block_size, bool deterministic, bool needs_dq, bool needs_dkv)"
        " -> (Tensor dq, Tensor dk, Tensor dv)",
        implementation=supplied_by_library(unavailable),
        fake=fake,
        tags=(torch.Tag.needs_exact_strides,),
        batched=False,
    )


def _define_both(
    backend: str,
    functional: Callable[..., tuple[Tensor, Tensor, Tensor]],
    into: Callable[..., None],
    allocate: AllocateGradients,
) -> torch._ops.OpOverload:
    def fake(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        return allocate(q, k, v, args[10], args[11])

    op = define(
        f"attention_backward_{backend}({_NATIVE_ARGUMENTS}) -> (Tensor dq_accum, Tensor dk, Tensor dv)",
        implementation=functional,
        fake=fake,
        tags=(torch.Tag.needs_exact_strides,),
        batched=False,
    )
    outputs = "Tensor(a!) dq_accum, Tensor(b!) dk, Tensor(c!) dv"
    define_out(f"attention_backward_{backend}.out({_NATIVE_ARGUMENTS}, *, {outputs}) -> ()", into)
    return op
