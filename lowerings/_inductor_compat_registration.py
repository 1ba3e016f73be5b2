"""The private names of torch's compiler behind the registration of lowerings, and all that lowerings then rely on.

The names themselves are used in `_inductor_compat.py`. Checked on torch 2.11, 2.13 and 2.14.1.
"""

from __future__ import annotations

import contextlib
import importlib
import operator
from collections.abc import Callable
from typing import Any

import torch

from . import _inductor_compat as compat

# Module of torch._inductor -> what lowerings read there while they run. Registration looks all of it up: a name that
# this torch lacks costs the operators a tier, and does not end a compilation halfway.
NEEDED = {
    "config": ("custom_should_partition_ops", "patch"),
    "graph": (
        "GraphLowering.register_buffer",
        "GraphLowering.register_operation",
        "GraphLowering.run_node",
        "GraphLowering.try_get_buffer",
    ),
    "ir": (
        "BaseView",
        "BaseView.unwrap_view",
        "Buffer",
        "Buffer.freeze_layout",
        "Buffer.get_defining_op",
        "Buffer.get_layout",
        "Buffer.get_name",
        "Buffer.get_origin_node",
        "Buffer.get_output_spec",
        "Buffer.get_stride",
        "Buffer.make_indexer",
        "Buffer.make_loader",
        "ComputedBuffer.get_read_names",
        "ExternKernel.copy_input",
        "ExternKernel.require_contiguous",
        "ExternKernel.require_exact_strides",
        "FallbackKernel.create",
        "FallbackKernel.process_kernel",
        "FlexibleLayout.allow_indexing",
        "Layout.storage_size",
        "Loops",
        "MutationLayoutSHOULDREMOVE",
        "Pointwise.create",
        "Reduction",
        "Scatter",
        "StorageBox",
        "StorageBox.realize",
        "TensorBox",
        "convert_shape_to_inductor",
    ),
    "lowering": ("fallback_handler", "lowerings", "pointwise_cat", "register_lowering"),
    "ops_handler": ("DefaultHandler",),
    "sizevars": ("SizeVarAllocator.statically_known_leq",),
    "virtualized": ("V.graph", "V.set_current_node", "V.set_graph_handler", "V.set_ops_handler", "ops"),
}


def check_names() -> None:
    """Raises AttributeError or ImportError, with the name, where this torch lacks something of :data:`NEEDED`."""
    for module, names in NEEDED.items():
        found = compat._ir() if module == "ir" else importlib.import_module(f"torch._inductor.{module}")
        for name in names:
            operator.attrgetter(name)(found)


def register(op: torch._ops.OpOverload, lowering: Callable[..., Any]) -> None:
    """Makes ``lowering`` the way Inductor builds ``op``; arguments arrive as IR boxes and sympy sizes."""
    from torch._inductor.lowering import register_lowering

    check_names()
    register_lowering(op, type_promotion_kind=None)(lowering)


def unregister(op: torch._ops.OpOverload) -> None:
    """Takes away the lowering of ``op``, and the fallback that Inductor made for it while it had none."""
    tables: tuple[tuple[str, str, tuple[Any, ...]], ...] = (
        ("lowering", "lowerings.pop", (op, None)),
        ("lowering", "fallbacks.discard", (op,)),
        ("lowering", "_maybe_layout_constraints.pop", (op, None)),
        ("decomposition", "decompositions.pop", (op, None)),
        ("decomposition", "fast_random_decomps.cache_clear", ()),
    )
    for module, name, arguments in tables:
        # A table that this torch does not have holds nothing.
        with contextlib.suppress(AttributeError, ImportError):
            operator.attrgetter(name)(importlib.import_module(f"torch._inductor.{module}"))(*arguments)


def register_decomposition(op: torch._ops.OpOverload, decomposition: Callable[..., Any]) -> None:
    """Makes ``decomposition`` replace ``op`` in the graphs that Inductor is given."""
    from torch._inductor.decomposition import decompositions, fast_random_decomps

    decompositions[op] = decomposition
    # Inductor keeps a copy of the table from its first compilation on.
    fast_random_decomps.cache_clear()
