"""What a backend's main kernel wants, and the work around it that follows from that.

The backward is written once, against `Arithmetic`: eager runs it on tensors, the decomposition traces it, and the
lowering builds generated code from it. It reads the contract and never names an architecture.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ..ops._allocate import statistics_dtype

INV_LN2 = 1 / math.log(2)


@dataclass(frozen=True)
class AccumulatorOrder:
    """How dq's accumulator stands in memory, as a view of one block and the permutation back to token order.

    The accumulator is ``[B, H, N, block_size * D]``; the last axis is viewed as ``factors``, whose axes in the order
    ``permutation`` give ``(block_size, D)`` row-major. Factors that are -1 are what is left (at most one).
    """

    factors: tuple[int, ...]
    permutation: tuple[int, ...]


@dataclass(frozen=True)
class Contract:
    """What the native backward operator of a backend wants and gives.

    Attributes:
        reads_rows: Q and dO are read as rows ``[B, H, S, D]``; otherwise only through Q^T and dO^T ``[H*D, B*S]``.
        dq_final: dq comes back scaled and in the operand dtype; otherwise as an unscaled sum in the statistics dtype.
        dq_order: the order of dq's accumulator; None is token order.
        writes_unselected: dk and dv rows of kv blocks that nobody selects are exact zeros; otherwise they are garbage.

    Every kernel masks key slots past kv_block_sizes itself, whatever they hold: that is not left to the surroundings.
    """

    reads_rows: bool = True
    dq_final: bool = False
    dq_order: AccumulatorOrder | None = None
    writes_unselected: bool = True


@dataclass(frozen=True)
class Problem:
    """The static facts a choice of backend may depend on. Never lengths, counts or strides."""

    device_type: str
    capability: tuple[int, int] | None
    dtype: torch.dtype
    head_dim: int
    block_size: int
    grouped: bool
    needs_grad: bool
    deterministic: bool


def _on_cuda(problem: Problem) -> bool:
    return problem.device_type == "cuda"


@dataclass(frozen=True)
class Backend:
    """One way to run `vsa::attention`.

    Attributes:
        name: its name in options, op names and graphs.
        identity: the name with a short hash of its sources, the value of the op's backend argument.
        refuse: (problem, "forward" | "backward") -> why it cannot run it, in a sentence, or None.
        forward_native, backward_native: the native operators, each with the function it runs: eager calls that
            directly, since a second trip through the dispatcher costs as much as a launch.
        contract: what the backward operator wants.
        arithmetic: how eager does the work around it.
        expected: whether it is what runs such a problem's device, so that its refusal is a surprise.
        eager_backward: an operator that runs the whole backward in one trip, if there is one.
        note: what users have to know of it, for reports.
    """

    name: str
    identity: str
    refuse: Callable[[Problem, str], str | None]
    forward_native: tuple[torch._ops.OpOverload, Callable[..., tuple[Tensor, Tensor]]]
    backward_native: tuple[torch._ops.OpOverload, Callable[..., tuple[Tensor, Tensor, Tensor]]]
    contract: Contract
    arithmetic: TorchArithmetic
    expected: Callable[[Problem], bool] = _on_cuda
    eager_backward: torch._ops.OpOverload | None = None
    note: str = ""

    @property
    def forward_op(self) -> torch._ops.OpOverload:
        """``vsa::attention_<name>``."""
        return self.forward_native[0]

    @property
    def backward_op(self) -> torch._ops.OpOverload:
        """``vsa::attention_backward_<name>``."""
        return self.backward_native[0]

    def forward(self, *args: Any) -> tuple[Tensor, Tensor]:
        """What the native forward operator runs."""
        return self.forward_native[1](*args)

    def run_backward(self, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        """The backward on tensors; ``args`` as `vsa::attention_backward` without its backend."""
        if self.eager_backward is not None:
            return self.eager_backward(*args)
        return backward_around(self.arithmetic, self.contract, self.backward_native[1], *args)

    def trace_backward(self, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        """The same with the native operator as a call that a trace records."""
        return backward_around(TorchArithmetic(), self.contract, self.backward_op, *args)


class Arithmetic(Protocol):
    """The few operations the work around a kernel needs; values are tensors, or Inductor's boxes of them."""

    def dtype(self, x: Any) -> torch.dtype: ...
    def shape(self, x: Any) -> Sequence[Any]: ...
    def to(self, x: Any, dtype: torch.dtype) -> Any: ...
    def mul(self, x: Any, y: Any) -> Any: ...
    def sub(self, x: Any, y: Any) -> Any: ...
    def scaled(self, x: Any, scale: float, dtype: torch.dtype) -> Any: ...
    def row_dot(self, x: Any, y: Any, dtype: torch.dtype) -> Any: ...
    def permute(self, x: Any, dims: Sequence[int]) -> Any: ...
    def view(self, x: Any, shape: Sequence[Any]) -> Any: ...
    def contiguous(self, x: Any) -> Any: ...
    def block_lengths(self, q_offsets: Any) -> Any: ...
    def any_of(self, x: Any) -> Any: ...
    def keep_where(self, condition: Any, x: Any) -> Any: ...


class TorchArithmetic:
    """`Arithmetic` on tensors."""

    def dtype(self, x: Tensor) -> torch.dtype:
        return x.dtype

    def shape(self, x: Tensor) -> Sequence[int]:
        return x.shape

    def to(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.to(dtype)

    def mul(self, x: Tensor, y: Tensor | float) -> Tensor:
        return x * y

    def sub(self, x: Tensor, y: Tensor) -> Tensor:
        return x - y

    def scaled(self, x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
        """``x * scale``, rounded to ``dtype`` once."""
        return (x * scale).to(dtype)

    def row_dot(self, x: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
        """Sum of products over the last axis, computed in ``dtype``."""
        return (x.to(dtype) * y.to(dtype)).sum(-1)

    def permute(self, x: Tensor, dims: Sequence[int]) -> Tensor:
        return x.permute(*dims)

    def view(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        return x.reshape(*shape)

    def contiguous(self, x: Tensor) -> Tensor:
        return x.contiguous()

    def block_lengths(self, q_offsets: Tensor) -> Tensor:
        """``[B, H, N_kv + 1]`` -> ``[B, H, N_kv]``: how many q blocks of the head attend the kv block."""
        return q_offsets[..., 1:] - q_offsets[..., :-1]

    def any_of(self, x: Tensor) -> Tensor:
        """Whether any element of the last axis is above 0."""
        return x.amax(-1) > 0

    def keep_where(self, condition: Tensor, x: Tensor) -> Tensor:
        return torch.where(condition, x, 0)


def delta(arithmetic: Arithmetic, dout: Any, dlse: Any, out: Any, rows: Any = None) -> Any:
    """rowsum(out * dout) - dlse / ln 2 in the statistics dtype: what the softmax backward subtracts from dP.

    ``rows``: the sums, where whatever made dout has them already.
    """
    if rows is None:
        rows = arithmetic.row_dot(out, dout, statistics_dtype(arithmetic.dtype(out)))
    # lse is base 2: d lse_log2 / d score = P / ln 2 in units of the natural score.
    return rows if dlse is None else arithmetic.sub(rows, arithmetic.mul(dlse, INV_LN2))


def _transposed(arithmetic: Arithmetic, x: Any) -> Any:
    """``[B, H, S, D]`` -> ``[H * D, B * S]``, token contiguous."""
    B, H, S, D = arithmetic.shape(x)
    return arithmetic.contiguous(arithmetic.view(arithmetic.permute(x, (1, 3, 0, 2)), (H * D, B * S)))


def _by_token(arithmetic: Arithmetic, order: AccumulatorOrder, accum: Any, shape: Sequence[Any], block: int) -> Any:
    """The accumulator with its axes in token order: ``[B, H, N, ...]``, a view of ``[B, H, S, D]`` once it is dense."""
    B, H, S, D = shape
    # In numbers: of an empty accumulator the factor that is left cannot be told.
    rest = block * D // abs(math.prod(order.factors))
    factors = (rest if factor == -1 else factor for factor in order.factors)
    blocks = arithmetic.view(accum, (B, H, S // block, *factors))
    return arithmetic.permute(blocks, (0, 1, 2, *(3 + axis for axis in order.permutation)))


def backward_around(
    arithmetic: Arithmetic,
    contract: Contract,
    native: Callable[..., tuple[Any, Any, Any]],
    dout: Any,
    dlse: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse_log2: Any,
    kv_indices: Any,
    kv_num_blocks: Any,
    q_indices: Any,
    q_offsets: Any,
    kv_block_sizes: Any,
    sm_scale: float,
    block_size: int,
    deterministic: bool,
    needs_dq: bool,
    needs_dkv: bool,
    out_dot_dout: Any = None,
) -> tuple[Any, Any, Any]:
    """dq, dk, dv from one call of the native operator and what its contract leaves to its surroundings.

    ``out_dot_dout``: rowsum(out * dout) where it is known.
    """
    rows_delta = delta(arithmetic, dout, dlse, out, out_dot_dout)
    q_read, dout_read = q, dout
    if not contract.reads_rows:
        q_read, dout_read = _transposed(arithmetic, q), _transposed(arithmetic, dout)
    dq, dk, dv = native(
        dout_read, q_read, k, v, lse_log2, arithmetic.contiguous(rows_delta), kv_indices, kv_num_blocks, q_indices,
        q_offsets, kv_block_sizes, sm_scale, block_size, deterministic, needs_dq, needs_dkv,
    )  # fmt: skip
    if needs_dq:
        shape = arithmetic.shape(q)
        if contract.dq_order is not None:
            dq = _by_token(arithmetic, contract.dq_order, dq, shape, block_size)
        # Scaled before the axes are merged, which needs dense ones: eager reads the accumulator once.
        if not contract.dq_final:
            dq = arithmetic.scaled(dq, sm_scale, arithmetic.dtype(q))
        if contract.dq_order is not None:
            dq = arithmetic.view(dq, shape)
    if needs_dkv and not contract.writes_unselected:
        dk, dv = (_zero_unselected(arithmetic, q_offsets, x, block_size) for x in (dk, dv))
    return dq, dk, dv


def _zero_unselected(arithmetic: Arithmetic, q_offsets: Any, x: Any, block_size: int) -> Any:
    B, H, S, D = arithmetic.shape(x)
    num_blocks = S // block_size
    # Grouped queries: a block is listed if any query head of its kv head lists it.
    groups = arithmetic.shape(q_offsets)[1] // H
    listed = arithmetic.view(arithmetic.block_lengths(q_offsets), (B, H, groups, num_blocks))
    listed = arithmetic.any_of(arithmetic.permute(listed, (0, 1, 3, 2)))
    blocks = arithmetic.view(x, (B, H, num_blocks, block_size, D))
    kept = arithmetic.keep_where(arithmetic.view(listed, (B, H, num_blocks, 1, 1)), blocks)
    return arithmetic.view(kept, (B, H, S, D))
