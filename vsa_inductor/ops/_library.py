"""How every operator of the `vsa` namespace is registered: one library, one helper, one place for what all refuse.

Schemas and tags are defined here in Python, so that fakes, autograd and lowerings work without a native library; a
native library only adds implementations. Nothing here imports a backend.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

NAMESPACE = "vsa"
_KEY = "CompositeExplicitAutograd"


class _Library(torch.library.Library):
    """Refuses forward-mode differentiation in front of every gradient formula.

    Where nothing requires a gradient, what `torch.library.register_autograd` registers drops tangents silently.
    """

    def impl(self, op_name: Any, fn: Callable[..., Any], dispatch_key: str = "", **kwargs: Any) -> None:
        if dispatch_key == "Autograd":
            fn = _refuse_tangents(op_name, fn)
        super().impl(op_name, fn, dispatch_key, **kwargs)


def _refuse_tangents(name: str, formula: Callable[..., Any]) -> Callable[..., Any]:
    def checked(keyset: Any, *args: Any) -> Any:
        # Outside every dual level there are no tangents to look for, and looking costs a microsecond per tensor.
        for arg in args if forward_ad._current_level >= 0 else ():
            for x in arg if isinstance(arg, (list, tuple)) else (arg,):
                if isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None:
                    raise RuntimeError(
                        f"vsa::{name}: got a tensor with a tangent (torch.func.jvp, dual tensors); allowed: "
                        "reverse-mode differentiation only"
                    )
        return formula(keyset, *args)

    return checked


LIBRARY = _Library(NAMESPACE, "DEF")


def define(
    schema: str,
    *,
    implementation: Callable[..., Any],
    fake: Callable[..., Any],
    tags: Sequence[torch.Tag],
) -> torch._ops.OpOverload:
    """Defines one operator and returns its default overload. ``torch.func.vmap`` over it is refused.

    Args:
        schema: the schema without the namespace.
        implementation: runs on real tensors of any device.
        fake: returns outputs with exactly the sizes and strides of ``implementation``.
        tags: besides ``pt2_compliant_tag``, which every operator has.
    """
    name = schema.partition("(")[0]
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag, *tags))
    LIBRARY.impl(name, implementation, _KEY)
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=LIBRARY)

    def refuse_vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        raise RuntimeError(
            f"vsa::{name} does not support torch.func.vmap: fold the mapped dimension into the batch dimension"
        )

    torch.library.register_vmap(f"{NAMESPACE}::{name}", refuse_vmap, lib=LIBRARY)
    return getattr(torch.ops.vsa, name).default


def define_out(schema: str, implementation: Callable[..., None]) -> None:
    """Defines the ``.out`` form of an operator: it fills the outputs it is given and returns nothing.

    Without ``Tag.out`` (2.13 and later), for which Inductor would plan the buffers itself, also the empty ones.
    """
    name = schema.partition("(")[0]
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(name, implementation, _KEY)
    torch.library.register_fake(f"{NAMESPACE}::{name}", lambda *args, **kwargs: None, lib=LIBRARY)


def register_autograd(name: str, backward: Callable[..., Any], setup_context: Callable[..., None]) -> None:
    """The gradient formula of ``vsa::name``, by ``register_autograd`` only: export loses an ``autograd.Function``'s."""
    torch.library.register_autograd(f"{NAMESPACE}::{name}", backward, setup_context=setup_context, lib=LIBRARY)
