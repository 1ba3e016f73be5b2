"""Lowering of `vsa::attention`: the native operator of the backend that the graph names, as one opaque call.

`needs_exact_strides` on the logical operator fixes the layouts of its operands before this runs.
"""

from __future__ import annotations

from typing import Any

import torch

from vsa_inductor.backends import capability
from vsa_inductor.options import AUTO

from . import _inductor_compat as compat


def lower(*args: Any) -> Any:
    """Arguments of `vsa::attention`; ``"auto"`` stays the logical call, which chooses on the GPU that runs it."""
    *operands, backend, _ = args
    if backend == AUTO:
        return compat.opaque(OP, *args)
    return compat.opaque_at_partition(OP, capability.backend_named(backend).forward_op, *operands)


def decompose(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The native operator, called while tracing."""
    *operands, backend, _ = args
    if backend == AUTO:
        return NotImplemented
    return capability.backend_named(backend).forward_op(*operands)


OP = torch.ops.vsa.attention.default
