"""A backward backend of which only the contract exists: the one that leaves most work to what stands around it.

A contract of a kind that data center Blackwell asks for: the tensor core reads operands through their transposes, dq is
added up in fp32 in the order in which threads hold it, and nothing is written for blocks that nobody selected.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from vsa_inductor import reference
from vsa_inductor.backends import capability
from vsa_inductor.backends.contract import AccumulatorOrder, Backend, Contract, TorchArithmetic
from vsa_inductor.ops import _allocate
from vsa_inductor.ops import attention as attention_op
from vsa_inductor.ops import attention_backward as attention_backward_op

BLOCK_SIZE, HEAD_DIM = 64, 128
# A thread holds a row of the block, and stores 16 bytes of it at a time beside those of the other rows.
DQ_ORDER = AccumulatorOrder(factors=(HEAD_DIM // 4, BLOCK_SIZE, 4), permutation=(1, 0, 2))


def _allocate_gradients(
    q: Tensor, k: Tensor, v: Tensor, needs_dq: bool, needs_dkv: bool
) -> tuple[Tensor, Tensor, Tensor]:
    _, dk, dv = _allocate.gradients(k, k, v, False, needs_dkv)
    B, _, S, D = k.shape
    # q is transposed, [H * D, B * S].
    accumulator = (B, q.shape[0] // D, S // BLOCK_SIZE, BLOCK_SIZE * D)
    return k.new_empty(accumulator if needs_dq else 0, dtype=torch.float32), dk, dv


def _never_launched(*args: Any) -> None:
    raise AssertionError("only the code around the call is generated")


@functools.cache
def _backend() -> Backend:
    return Backend(
        name="asking",
        identity="asking@00000000",
        refuse=lambda problem, direction: None,
        forward_native=attention_op.define_native("asking", reference.attention),
        backward_native=attention_backward_op.define_native("asking", _never_launched, _allocate_gradients),
        arithmetic=TorchArithmetic(),
        contract=Contract(reads_rows=False, dq_final=False, dq_order=DQ_ORDER, writes_unselected=False),
    )


@contextlib.contextmanager
def everything_asked() -> Iterator[None]:
    """Inside, there is a backend named "asking"."""
    backend = _backend()
    capability._ORDER.append(backend)
    capability._resolve.cache_clear()
    try:
        yield
    finally:
        capability._ORDER.remove(backend)
        capability._resolve.cache_clear()
