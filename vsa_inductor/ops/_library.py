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
from torch.utils import _pytree as pytree

from . import _functorch_compat

NAMESPACE = "vsa"
_KEY = "CompositeExplicitAutograd"
# Arguments that are one for the whole batch.
_SHARED = ("token_slot", "slot_token", "kv_block_sizes")


class _Library(torch.library.Library):
    """Puts what `torch.library.register_autograd` lacks in front of every gradient formula.

    It drops tangents silently where nothing requires a gradient, and refuses `torch.func` transforms.
    """

    def impl(self, op_name: Any, fn: Callable[..., Any], dispatch_key: str = "", **kwargs: Any) -> None:
        if dispatch_key == "Autograd":
            fn = _with_transforms(op_name, fn)
        super().impl(op_name, fn, dispatch_key, **kwargs)


# The formulas of operators as autograd functions for one level of `torch.func`, by name.
_single_level: dict[str, Any] = {}


def _with_transforms(name: str, formula: Callable[..., Any]) -> Callable[..., Any]:
    def autograd(keyset: Any, *args: Any) -> Any:
        # Outside every dual level there are no tangents to look for, and looking costs a microsecond per tensor.
        for arg in args if _functorch_compat.may_have_tangents() else ():
            for x in arg if isinstance(arg, (list, tuple)) else (arg,):
                if isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None:
                    raise RuntimeError(
                        f"vsa::{name}: got a tensor with a tangent (torch.func.jvp, dual tensors); allowed: "
                        "reverse-mode differentiation only"
                    )
        if (
            name in _single_level
            and _functorch_compat.transforms_active()
            and torch.is_grad_enabled()
            and any(isinstance(x, Tensor) and x.requires_grad for x in args)
        ):
            return _functorch_compat.apply_on_this_level(_single_level[name], args)
        return formula(keyset, *args)

    return autograd


LIBRARY = _Library(NAMESPACE, "DEF")


def define(
    schema: str,
    *,
    implementation: Callable[..., Any],
    fake: Callable[..., Any],
    tags: Sequence[torch.Tag],
    batched: bool = True,
) -> torch._ops.OpOverload:
    """Defines one operator and returns its default overload.

    Args:
        schema: the schema without the namespace.
        implementation: runs on real tensors of any device.
        fake: returns outputs with exactly the sizes and strides of ``implementation``.
        tags: besides ``pt2_compliant_tag``, which every operator has.
        batched: every tensor but the tables of a layout has the batch dimension first, and ``torch.func.vmap`` folds
            the mapped dimension into it; a mapped table is refused. False: it refuses the operator.
    """
    name = schema.partition("(")[0]
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag, *tags))
    LIBRARY.impl(name, implementation, _KEY)
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=LIBRARY)
    rule = _folding_rule(name) if batched else _refusing_rule(name)
    torch.library.register_vmap(f"{NAMESPACE}::{name}", rule, lib=LIBRARY)
    return getattr(torch.ops.vsa, name).default


def _refusing_rule(name: str) -> Callable[..., Any]:
    def rule(info: Any, in_dims: Any, *args: Any) -> Any:
        raise RuntimeError(
            f"vsa::{name} does not support torch.func.vmap: call it in a loop, or fold the mapped dimension into the "
            "batch dimension, where it has one"
        )

    return rule


def _folding_rule(name: str) -> Callable[..., Any]:
    def rule(info: Any, in_dims: Any, *args: Any) -> Any:
        op = getattr(torch.ops.vsa, name).default

        # Of the call inside vmap: sizes alone do not tell it where nothing is mapped.
        batch = -1

        def fold(x: Any, dim: Any) -> Any:
            nonlocal batch
            if isinstance(x, (list, tuple)):
                return [fold(item, item_dim) for item, item_dim in zip(x, dim, strict=True)]
            if not isinstance(x, Tensor):
                return x
            x = x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
            batch = x.shape[1]
            return x.flatten(0, 1)

        def unfold(x: Tensor) -> Tensor:
            return x.unflatten(0, (info.batch_size, batch)) if _is_wanted(x) else x

        folded = []
        for argument, x, dim in zip(op._schema.arguments, args, in_dims, strict=False):
            if argument.name in _SHARED and dim is not None:
                raise RuntimeError(
                    f"vsa::{name}: got {argument.name} mapped by torch.func.vmap; allowed: one table for the whole "
                    "batch (in_dims=None for a layout)"
                )
            folded.append(x if argument.name in _SHARED else fold(x, dim))
        outputs = op(*folded)
        return pytree.tree_map(unfold, outputs), pytree.tree_map(lambda x: 0 if _is_wanted(x) else None, outputs)

    return rule


def _is_wanted(output: Tensor) -> bool:
    """Whether an output is one that was asked for: ``[0]`` stands for the others, and has no batch dimension."""
    return output.dim() > 1


def define_overload(
    schema: str, *, implementation: Callable[..., Any], fake: Callable[..., Any], tags: Sequence[torch.Tag] = ()
) -> None:
    """Defines another overload of an operator, with neither a gradient formula nor a batching rule."""
    name = schema.partition("(")[0]
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag, *tags))
    LIBRARY.impl(name, implementation, _KEY)
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=LIBRARY)


def supplied_by_library(unavailable: Callable[[], Exception]) -> Callable[..., Any]:
    """What stands for the implementation of an operator that a native library brings.

    A library registers for the dispatch key of its device, which goes before this one.

    Args:
        unavailable: what a call raises without a library, and on another device: a `BackendUnavailableError`.
    """

    def implementation(*args: Any, **kwargs: Any) -> Any:
        raise unavailable()

    return implementation


def define_out(schema: str, implementation: Callable[..., None]) -> None:
    """Defines the ``.out`` form of an operator: it fills the outputs it is given and returns nothing.

    Without ``Tag.out`` (2.13 and later), for which Inductor would plan the buffers itself, also the empty ones.
    """
    define_overload(schema, implementation=implementation, fake=lambda *args, **kwargs: None)


def register_autograd(name: str, backward: Callable[..., Any], setup_context: Callable[..., None]) -> None:
    """The gradient formula of ``vsa::name``, by ``register_autograd`` only: export loses an ``autograd.Function``'s.

    Under ``torch.func`` transforms, which what that registers refuses, the same formula is recorded level by level.
    """
    op = getattr(torch.ops.vsa, name).default
    # An autograd function sees no tensors inside a list.
    if _functorch_compat.FOUND and not any("List" in str(argument.type) for argument in op._schema.arguments):
        _single_level[name] = _functorch_compat.single_level_function(f"vsa_{name}", op, backward, setup_context)
    torch.library.register_autograd(f"{NAMESPACE}::{name}", backward, setup_context=setup_context, lib=LIBRARY)
