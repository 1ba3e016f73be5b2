"""What stands for a call when it is lowered on trial, where Inductor would copy or leave the call to a library.

Inductor generates no code for complex numbers. A complex tensor of a trial is a real one with a last axis of two, real
and imaginary part; RoPE written as a complex product then reads as what it computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import _inductor_compat as compat

_aten = torch.ops.aten


def substitute(node: torch.fx.Node) -> Callable[..., Any] | None:
    """A lowering in place of the call ``node``, taking the same arguments; None for its own."""
    if node.target is _aten.cat.default:
        return compat.cat_in_loops
    if not any(is_complex(n) for n in (node, *node.all_input_nodes)):
        return None
    return REAL_FORMS[str(node.target)]


def is_complex(node: torch.fx.Node) -> bool:
    """Whether ``node`` is a complex tensor."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_complex()


def _same(x: Any, *args: Any, **kwargs: Any) -> Any:
    return x


def _parts(x: Any) -> list[Any]:
    return [compat.aten(_aten.select.int, x, -1, part) for part in (0, 1)]


def _joined(real: Any, imaginary: Any) -> Any:
    last = [compat.aten(_aten.unsqueeze.default, part, -1) for part in (real, imaginary)]
    return compat.cat_in_loops(last, -1)


def _mul(x: Any, y: Any) -> Any:
    (a, b), (c, d) = _parts(x), _parts(y)
    mul, add, sub = (getattr(_aten, name).Tensor for name in ("mul", "add", "sub"))
    real = compat.aten(sub, compat.aten(mul, a, c), compat.aten(mul, b, d))
    return _joined(real, compat.aten(add, compat.aten(mul, a, d), compat.aten(mul, b, c)))


def _conj(x: Any) -> Any:
    real, imaginary = _parts(x)
    return _joined(real, compat.aten(_aten.neg.default, imaginary))


def _viewed(op: Any) -> Callable[..., Any]:
    return lambda x, size: compat.aten(op, x, [*size, 2])


def _along(op: Any) -> Callable[..., Any]:
    """A view along one axis, counted from the front or from the back."""
    return lambda x, dim, *args: compat.aten(op, x, dim - 1 if dim < 0 else dim, *args)


def _permuted(x: Any, dims: Sequence[int]) -> Any:
    rank = len(dims)
    return compat.aten(_aten.permute.default, x, [*(dim % rank for dim in dims), rank])


REAL_FORMS: dict[str, Callable[..., Any]] = {
    "aten.view_as_complex.default": _same,
    "aten.view_as_real.default": _same,
    "aten.clone.default": _same,
    "aten.alias.default": _same,
    "prims.convert_element_type.default": _same,
    "aten.complex.default": _joined,
    "aten.mul.Tensor": _mul,
    "aten._conj.default": _conj,
    "aten._conj_physical.default": _conj,
    "aten.conj_physical.default": _conj,
    "aten.view.default": _viewed(_aten.view.default),
    "aten.reshape.default": _viewed(_aten.reshape.default),
    "aten.expand.default": _viewed(_aten.expand.default),
    "aten.unsqueeze.default": _along(_aten.unsqueeze.default),
    "aten.select.int": _along(_aten.select.int),
    "aten.slice.Tensor": _along(_aten.slice.Tensor),
    "aten.permute.default": _permuted,
}
