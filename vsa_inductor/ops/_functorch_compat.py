"""The only place that knows private names of torch's autograd and of functorch.

They record a gradient formula for one level of `torch.func`, as torch does for its built-in operators; an operator of
`torch.library.register_autograd` alone is refused under every transform that differentiates. By use:

    torch._C._are_functorch_transforms_active                           whether a transform is around the call
    torch._C._functorch.get_single_level_autograd_function_allowed      to call a function of one level
    torch._C._functorch.set_single_level_autograd_function_allowed
    torch.autograd.function._SingleLevelFunction                        to make one
    torch._C._AutoDispatchBelowAutograd                                 to go on at the levels around it
    torch.autograd.forward_ad._set_fwd_grad_enabled
    torch.autograd.forward_ad._current_level                            whether there can be tangents at all

torch 2.11, 2.13 and 2.14.1 have them all. Where one is missing, ``FOUND`` is False and torch's refusal remains; without
the last one tangents are looked for in every call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

try:
    _active = torch._C._are_functorch_transforms_active
    _is_allowed = torch._C._functorch.get_single_level_autograd_function_allowed
    _allow = torch._C._functorch.set_single_level_autograd_function_allowed
    _Function = torch.autograd.function._SingleLevelFunction
    _below_autograd = torch._C._AutoDispatchBelowAutograd
    _forward_mode = forward_ad._set_fwd_grad_enabled
    FOUND = True
except AttributeError:
    FOUND = False


def transforms_active() -> bool:
    """Whether a transform of `torch.func` is around the call."""
    return FOUND and _active()


def may_have_tangents() -> bool:
    """False outside every dual level."""
    return getattr(forward_ad, "_current_level", 0) >= 0


def single_level_function(
    name: str, op: Callable[..., Any], backward: Callable[..., Any], setup_context: Callable[..., None]
) -> Any:
    """``op`` with a gradient formula as an autograd function for one level. Needs ``FOUND``."""

    def forward(*args: Any) -> Any:
        # A function's forward runs without gradients; the levels around this one need theirs.
        with _below_autograd(), torch.enable_grad(), _forward_mode(True):
            return op(*args)

    methods = {"forward": forward, "setup_context": setup_context, "backward": backward}
    return type(name, (_Function,), {method: staticmethod(function) for method, function in methods.items()})


def apply_on_this_level(function: Any, args: tuple[Any, ...]) -> Any:
    """Records ``function`` for the innermost transform alone, as the built-in operators do; what it calls recurses."""
    allowed = _is_allowed()
    _allow(True)
    try:
        return function.apply(*args)
    finally:
        _allow(allowed)
