"""How every operator of the `vsa` namespace is registered: one library, one helper, one place for what all refuse.

Schemas and tags are defined here in Python, so that fakes, autograd and lowerings work without a native library; a
native library only adds implementations. Nothing here imports a backend.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

NAMESPACE = "vsa"
LIBRARY = torch.library.Library(NAMESPACE, "DEF")


def define(
    schema: str,
    *,
    implementation: Callable[..., Any],
    fake: Callable[..., Any],
    tags: Sequence[torch.Tag],
    dispatch_key: str = "CompositeExplicitAutograd",
    no_vmap: str = "fold the mapped dimension into the batch dimension",
) -> torch._ops.OpOverload:
    """Defines one operator and returns its default overload.

    Args:
        schema: the schema without the namespace.
        implementation: runs on real tensors of any device.
        fake: returns outputs with exactly the sizes and strides of ``implementation``.
        tags: besides ``pt2_compliant_tag``, which every operator has.
        no_vmap: what to do instead of ``torch.func.vmap``, which every operator refuses.
    """
    name = schema.partition("(")[0]
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag, *tags))
    LIBRARY.impl(name, implementation, dispatch_key)
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=LIBRARY)
    packet, _, overload = name.partition(".")

    def refuse_vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        raise RuntimeError(f"vsa::{name} does not support torch.func.vmap: {no_vmap}")

    op = getattr(getattr(torch.ops.vsa, packet), overload or "default")
    if not overload:
        torch.library.register_vmap(f"{NAMESPACE}::{name}", refuse_vmap, lib=LIBRARY)
    return op


def register_autograd(name: str, backward: Callable[..., Any], setup_context: Callable[..., None]) -> None:
    """The gradient formula of ``vsa::name``, by ``register_autograd`` only: export loses an ``autograd.Function``'s."""
    torch.library.register_autograd(f"{NAMESPACE}::{name}", backward, setup_context=setup_context, lib=LIBRARY)
