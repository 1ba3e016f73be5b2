"""From a backend argument of an op to what runs it. Imports backends at call time only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from ..backends.contract import Backend
    from ..backends.layout import LayoutKernels


def backend(argument: str, direction: str, q: Tensor, block_size: int, grouped: bool, deterministic: bool) -> Backend:
    """The backend an op argument such as ``"triton@3f2a90c1"`` names; ``"auto"`` chooses for this device."""
    from ..backends import capability

    return capability.resolve(argument, direction, q, block_size, grouped, deterministic)


def layout_kernels(x: Tensor) -> LayoutKernels:
    """Who runs the operators that take no backend argument on the device of ``x``."""
    from ..backends import capability

    return capability.layout_kernels(x.device)
