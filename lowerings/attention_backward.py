"""Lowering of `vsa::attention_backward`: generated pre- and post-processing around one opaque call.

What stands around the call follows from the backend's contract and is written in `backends/contract.py`, for eager too.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch

from vsa_inductor.backends import capability
from vsa_inductor.backends.contract import backward_around
from vsa_inductor.options import AUTO

from . import _inductor_compat as compat

_aten = torch.ops.aten


class InductorArithmetic:
    """`vsa_inductor.backends.contract.Arithmetic` on IR boxes."""

    def dtype(self, x: Any) -> torch.dtype:
        return x.get_dtype()

    def shape(self, x: Any) -> Sequence[Any]:
        return x.get_size()

    def to(self, x: Any, dtype: torch.dtype) -> Any:
        return compat.convert(x, dtype)

    def mul(self, x: Any, y: Any) -> Any:
        return compat.aten(_aten.mul.Tensor, x, y)

    def sub(self, x: Any, y: Any) -> Any:
        return compat.aten(_aten.sub.Tensor, x, y)

    def scaled(self, x: Any, scale: float, dtype: torch.dtype) -> Any:
        return self.to(self.mul(x, scale), dtype)

    def row_dot(self, x: Any, y: Any, dtype: torch.dtype) -> Any:
        return compat.aten(_aten.sum.dim_IntList, self.mul(self.to(x, dtype), self.to(y, dtype)), [-1])

    def permute(self, x: Any, dims: Sequence[int]) -> Any:
        return compat.aten(_aten.permute.default, x, list(dims))

    def view(self, x: Any, shape: Sequence[Any]) -> Any:
        return compat.aten(_aten.view.default, x, list(shape))

    def contiguous(self, x: Any) -> Any:
        return compat.contiguous(x)

    def block_lengths(self, q_offsets: Any) -> Any:
        size = q_offsets.get_size()[-1]
        first = compat.aten(_aten.slice.Tensor, q_offsets, -1, 0, size - 1)
        return compat.aten(_aten.sub.Tensor, compat.aten(_aten.slice.Tensor, q_offsets, -1, 1, size), first)

    def any_of(self, x: Any) -> Any:
        return compat.aten(_aten.gt.Scalar, compat.aten(_aten.amax.default, x, [-1]), 0)

    def keep_where(self, condition: Any, x: Any) -> Any:
        zero = compat.aten(_aten.full.default, [], 0, dtype=x.get_dtype(), device=x.get_device())
        return compat.aten(_aten.where.self, condition, x, zero)


def lower(*args: Any) -> Any:
    """Arguments of `vsa::attention_backward`."""
    *operands, backend, needs_dq, needs_dkv = args
    if backend == AUTO:
        return compat.opaque(OP, *args)
    chosen = capability.backend_named(backend)

    def native(*arguments: Any) -> Any:
        return compat.opaque_at_partition(OP, chosen.backward_op, *arguments)

    arguments = (*operands, needs_dq, needs_dkv, _known_row_sums())
    grads = backward_around(InductorArithmetic(), chosen.contract, native, *arguments)
    compat.notes()[compat.current_node()] = grads
    return grads


def readers_of(dout: torch.fx.Node) -> list[Any]:
    """The calls of `vsa::attention_backward` whose dout it is."""
    return [user for user in dout.users if user.target is OP and user.args[0] is dout]


def free_dout(node: torch.fx.Node | None) -> None:
    """Keeps dout of a `vsa::attention_backward` out of memory where only its transpose is wanted there."""
    if node is not None and not reads_rows(node):
        compat.free_layouts(node)


def reads_rows(node: torch.fx.Node | None) -> bool:
    """Whether the backend of a `vsa::attention_backward` reads dout as rows, and not only through its transpose."""
    if node is None or node.args[15] == AUTO:
        return True
    return capability.backend_named(str(node.args[15])).contract.reads_rows


def _known_row_sums() -> Any | None:
    """rowsum(out * dout) where the call that made dout left it (`gated_combine_backward`)."""
    dout, out = (compat.current_node().args[place] for place in (0, 5))
    source = dout.args[0] if dout.target is operator.getitem else dout
    of_out, sums = compat.notes().get(source, (None, None))
    return sums if of_out is out else None


def decompose(*args: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same in ATen around the native operator."""
    *operands, backend, needs_dq, needs_dkv = args
    if backend == AUTO:
        return NotImplemented
    return capability.backend_named(backend).trace_backward(*operands, needs_dq, needs_dkv)


OP = torch.ops.vsa.attention_backward.default
