"""`vsa::attention`, the logical operator, and the native operators `vsa::attention_<backend>` behind it.

Graphs, checkpoint policies, sharding, FLOP counts and autograd see the logical operator; the backend's name and
implementation hash are among its arguments, hence in the graph and in every cache key. Its lowering, and its eager
implementation, call the native one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from . import _allocate, _check, _resolve
from ._library import define, define_out, register_autograd, supplied_by_library


def check_arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_indices: Tensor,
    kv_num_blocks: Tensor,
    kv_block_sizes: Tensor,
    block_size: int,
) -> None:
    """Everything about the arguments that can be told without reading device memory."""
    num_q_blocks, num_kv_blocks = _check.attention_operands(q, k, v, block_size)
    _check.block_lists(q, kv_indices, kv_num_blocks, kv_block_sizes, num_q_blocks, num_kv_blocks)


def _implementation(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_indices: Tensor,
    kv_num_blocks: Tensor,
    kv_block_sizes: Tensor,
    sm_scale: float,
    block_size: int,
    return_lse: bool,
    deterministic: bool,
    backend: str,
    backward_backend: str,
) -> tuple[Tensor, Tensor]:
    check_arguments(q, k, v, kv_indices, kv_num_blocks, kv_block_sizes, block_size)
    chosen = _resolve.backend(backend, "forward", q, block_size, q.shape[1] != k.shape[1], deterministic)
    return chosen.forward(
        q, k, v, kv_indices, kv_num_blocks, kv_block_sizes, sm_scale, block_size, return_lse, deterministic
    )


def _fake(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    kv_indices, kv_num_blocks, kv_block_sizes, _, block_size, return_lse = args[:6]
    check_arguments(q, k, v, kv_indices, kv_num_blocks, kv_block_sizes, block_size)
    return _allocate.attention_outputs(q, return_lse)


attention = define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor kv_indices, Tensor kv_num_blocks, Tensor kv_block_sizes,"
    " float sm_scale, int block_size, bool return_lse, bool deterministic, str backend, str backward_backend)"
    " -> (Tensor out, Tensor lse_log2)",
    implementation=_implementation,
    fake=_fake,
    tags=(torch.Tag.needs_exact_strides,),
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, kv_indices, kv_num_blocks, kv_block_sizes, sm_scale, block_size, return_lse, deterministic = inputs[:10]
    if not return_lse:
        raise RuntimeError(
            "vsa::attention: got return_lse=False with a gradient needed; allowed: return_lse=True, because the "
            "backward reads lse_log2. A graph traced or exported without gradients must be made again with them"
        )
    out, lse_log2 = output
    ctx.save_for_backward(q, k, v, out, lse_log2, kv_indices, kv_num_blocks, kv_block_sizes)
    ctx.constants = (sm_scale, block_size, deterministic, inputs[11])
    # A loss that does not touch lse has dlse = None, and its term vanishes from the generated delta.
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse_log2, kv_indices, kv_num_blocks, kv_block_sizes = ctx.saved_tensors
    sm_scale, block_size, deterministic, backend = ctx.constants
    needs_dq, needs_dk, needs_dv = ctx.needs_input_grad[:3]
    needs_dkv = needs_dk or needs_dv
    if dout is None and dlse is None:
        return (None,) * 12
    if dout is None:
        dout = torch.zeros_like(out)
    q_indices = q_offsets = None
    if needs_dkv:
        # Transposed here and not in the forward, so that only kv_indices is saved.
        q_indices, q_offsets = torch.ops.vsa.transpose_blocks(kv_indices, kv_num_blocks, kv_block_sizes.shape[0])
    dq, dk, dv = torch.ops.vsa.attention_backward(
        dout,
        dlse,
        q,
        k,
        v,
        out,
        lse_log2,
        kv_indices,
        kv_num_blocks,
        q_indices,
        q_offsets,
        kv_block_sizes,
        sm_scale,
        block_size,
        deterministic,
        backend,
        needs_dq,
        needs_dkv,
    )
    return (dq if needs_dq else None, dk if needs_dk else None, dv if needs_dv else None, *(None,) * 9)


register_autograd("attention", _backward, _setup_context)


@register_flop_formula([torch.ops.vsa.attention])
def _flops(
    q_shape: Sequence[int],
    k_shape: Sequence[int],
    v_shape: Sequence[int],
    kv_indices_shape: Sequence[int],
    kv_num_blocks_shape: Sequence[int],
    kv_block_sizes_shape: Sequence[int],
    sm_scale: float,
    block_size: int,
    *args: Any,
    out_shape: Any = None,
    **kwargs: Any,
) -> int:
    """4 * B * H * S_q * M * block_size * D: two products per listed block, an upper bound where counts are below M."""
    B, H, S_q, D = q_shape
    return 4 * B * H * S_q * kv_indices_shape[3] * block_size * D


NativeForward = Callable[..., None]

_NATIVE_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor kv_indices, Tensor kv_num_blocks, Tensor kv_block_sizes,"
    " float sm_scale, int block_size, bool return_lse, bool deterministic"
)


def define_native(
    backend: str, launch: NativeForward
) -> tuple[torch._ops.OpOverload, Callable[..., tuple[Tensor, Tensor]]]:
    """Defines ``vsa::attention_<backend>`` and its ``.out`` form; returns the operator and what it runs.

    ``launch(q, k, v, kv_indices, kv_num_blocks, kv_block_sizes, sm_scale, block_size, out, lse_log2)`` must write every
    element of both outputs; ``lse_log2`` is empty where it is not wanted.
    """

    def functional(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv_indices: Tensor,
        kv_num_blocks: Tensor,
        kv_block_sizes: Tensor,
        sm_scale: float,
        block_size: int,
        return_lse: bool,
        deterministic: bool,
    ) -> tuple[Tensor, Tensor]:
        out, lse_log2 = _allocate.attention_outputs(q, return_lse)
        launch(q, k, v, kv_indices, kv_num_blocks, kv_block_sizes, sm_scale, block_size, out, lse_log2)
        return out, lse_log2

    def into(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv_indices: Tensor,
        kv_num_blocks: Tensor,
        kv_block_sizes: Tensor,
        sm_scale: float,
        block_size: int,
        return_lse: bool,
        deterministic: bool,
        *,
        out: Tensor,
        lse_log2: Tensor,
    ) -> None:
        launch(q, k, v, kv_indices, kv_num_blocks, kv_block_sizes, sm_scale, block_size, out, lse_log2)

    return _define_both(backend, functional, into), functional


def define_in_library(
    backend: str, unavailable: Callable[[], Exception]
) -> tuple[torch._ops.OpOverload, Callable[..., tuple[Tensor, Tensor]]]:
    """As `define_native`, with both forms implemented by a native library, which allocates as the fake does."""
    missing = supplied_by_library(unavailable)
    op = _define_both(backend, missing, missing)
    return op, op


def _define_both(
    backend: str, functional: Callable[..., tuple[Tensor, Tensor]], into: Callable[..., None]
) -> torch._ops.OpOverload:
    def fake(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
        return _allocate.attention_outputs(q, args[5])

    op = define(
        f"attention_{backend}({_NATIVE_ARGUMENTS}) -> (Tensor out, Tensor lse_log2)",
        implementation=functional,
        fake=fake,
        tags=(torch.Tag.needs_exact_strides,),
        batched=False,
    )
    define_out(f"attention_{backend}.out({_NATIVE_ARGUMENTS}, *, Tensor(a!) out, Tensor(b!) lse_log2) -> ()", into)
    return op
