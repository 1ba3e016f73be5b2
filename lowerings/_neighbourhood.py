"""What stands around a call in the FX graph: what follows it through loops alone, and what those loops read."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch

from . import _inductor_compat as compat
from ._formula import OtherForm
from ._substitutes import REAL_FORMS, is_complex

VIEWS = {
    *("aten.view", "aten.reshape", "aten.unsqueeze", "aten.squeeze", "aten.expand", "aten.clone", "aten.alias"),
    *("aten.split", "aten.split_with_sizes", "aten.unbind"),
    *("aten.permute", "aten.transpose", "aten.select", "aten.slice", "aten.view_as_real", "aten.view_as_complex"),
    "prims.convert_element_type",
}
# Loops of Inductor's that are not tagged pointwise.
_LOOPS = {
    *VIEWS,
    *("aten.copy", "aten.slice_scatter", "aten.select_scatter", "aten.cat", "aten.stack", "aten.flip"),
    *("aten.full", "aten.constant_pad_nd", "aten._conj", "aten.complex", "prims.fma", "prims.rev"),
}
SUMS = {"aten.sum", "aten.mean"}


def name(node: torch.fx.Node) -> str:
    """``namespace.name`` of the operator that ``node`` calls, empty for anything else."""
    return str(node.target.overloadpacket) if isinstance(node.target, torch._ops.OpOverload) else ""


def is_loop(node: torch.fx.Node) -> bool:
    """Whether a trial makes a loop over elements of the call."""
    if node.target is operator.getitem:
        return is_loop(node.args[0])  # type: ignore[arg-type]
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace not in ("aten", "prims"):
        return False
    if is_complex(node):
        return str(node.target) in REAL_FORMS
    return torch.Tag.pointwise in node.target.tags or name(node) in _LOOPS


def computes(node: torch.fx.Node) -> bool:
    """Whether the call makes new elements, other than by a conversion or a sum."""
    return name(node) not in VIEWS and name(node) not in SUMS and node.target is not operator.getitem


def following(node: torch.fx.Node) -> dict[torch.fx.Node, None]:
    """What depends on ``node`` through loops and sums alone, in order."""
    inside: dict[torch.fx.Node, None] = {}
    outside: set[torch.fx.Node] = set()
    for later in compat.iter_after(node):
        needed = later.all_input_nodes
        if not any(n is node or n in inside or n in outside for n in needed):
            continue
        if (is_loop(later) or name(later) in SUMS) and not any(n in outside for n in needed):
            inside[later] = None
        else:
            outside.add(later)
    return inside


def beyond(node: torch.fx.Node, inside: Collection[torch.fx.Node]) -> Iterator[torch.fx.Node]:
    """What of ``inside``, which is in order, depends on ``node``."""
    reached = {node}
    for later in inside:
        if any(n in reached for n in later.all_input_nodes):
            reached.add(later)
            yield later


def inputs_of(
    readers: Collection[torch.fx.Node], known: Collection[torch.fx.Node] = (), through: Collection[str] = ()
) -> tuple[list[torch.fx.Node], set[torch.fx.Node]]:
    """``known``, then what ``readers`` read besides: graph inputs, results of library calls, sums and roots.

    Args:
        through: names of calls, such as roots, that are looked through as well.

    Returns:
        the inputs, and everything that was met on the way.

    Raises:
        OtherForm: what would be read has no memory to read it from.
    """
    inputs = dict.fromkeys(known)
    seen = set(known)
    pending = list(readers)
    while pending:
        reader = pending.pop()
        if reader in seen:
            continue
        seen.add(reader)
        looked_through = is_loop(reader) and name(reader) != "aten.rsqrt" and not _resolves_conjugate(reader)
        if reader in readers or looked_through or name(reader) in through:
            pending += reader.all_input_nodes
        else:
            inputs[reader] = None
            value = reader.meta.get("val")
            if value is None or (isinstance(value, torch.Tensor) and value.is_conj()):
                raise OtherForm
    return list(inputs), seen


def only_for(readers: Collection[torch.fx.Node]) -> set[torch.fx.Node]:
    """What of the graph is read by ``readers`` alone, directly or on the way to them."""
    found, pending = set(readers), [n for reader in readers for n in reader.all_input_nodes]
    while pending:
        node = pending.pop()
        if node not in found and all(user in found for user in node.users):
            found.add(node)
            pending += node.all_input_nodes
    return found - set(readers)


def reader(inputs: list[torch.fx.Node]) -> Callable[[str], Any]:
    """From a trial's input to the value that it stands for, in memory as the trial's formulas address it.

    Each is put in memory once, however often it is read. The function raises OtherForm where the graph has it no
    longer.
    """

    @functools.cache
    def read(buffer: str) -> Any:
        value = compat.with_strides(input_named(inputs, buffer))
        if value is None:
            raise OtherForm
        return value

    return read


def input_named(inputs: list[torch.fx.Node], buffer: str) -> torch.fx.Node:
    """The node that the trial's input ``buffer`` stands for."""
    if not buffer.startswith("input_"):
        raise OtherForm
    return inputs[int(buffer.removeprefix("input_"))]


def real_dtype(inputs: list[torch.fx.Node], buffer: str) -> torch.dtype:
    """The dtype that the trial's input ``buffer`` has in a trial: of a complex one, that of its parts."""
    dtype = input_named(inputs, buffer).meta["val"].dtype
    return dtype.to_real() if dtype.is_complex else dtype


def waits_for(node: torch.fx.Node, awaited: torch.fx.Node) -> bool:
    """Whether ``node`` depends on ``awaited``, which the graph has come to and not passed."""
    pending, seen = [node], set()
    while pending:
        needed = pending.pop()
        if needed is awaited:
            return True
        if needed not in seen and awaited < needed:
            seen.add(needed)
            pending += needed.all_input_nodes
    return False


def _resolves_conjugate(node: torch.fx.Node) -> bool:
    return is_complex(node) and name(node) == "aten.clone"
