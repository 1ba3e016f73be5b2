"""What a compilation by Inductor leaves behind, as plain values: what `explain` reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class CapturedNode:
    """A call in an FX graph.

    ``op`` is what it calls, ``origin`` the operator it was decomposed from, both as ``namespace.name``; ``source`` the
    call in the traced program that it belongs to, also from the backward; empty for what a pass added.
    """

    name: str
    op: str
    origin: str
    source: str
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TensorAccess:
    """A tensor that a call reads or writes.

    Attributes:
        buffer: Inductor's name for its memory: a graph input (``primals_1``), or ``buf0`` and so on.
        shape: of the whole tensor; a size that is symbolic is its expression, as text.
        dtype: ``"float32"``.
        num_bytes: how much of it moves. For a generated kernel the least possible: every element once, of a view the
            view alone, of a gather no more elements than it asks for. For a call, the whole operand or result, though
            lists may select less of it. Symbolic sizes count as in the run that was compiled for; of a call where one
            comes out of the graph's own values, such as how many blocks are kept, the traffic is unknown.
    """

    buffer: str
    shape: tuple[int | str, ...]
    dtype: str
    num_bytes: int


@dataclass(frozen=True)
class CapturedGraph:
    """One compilation by Inductor.

    Attributes:
        index: which of Dynamo's graphs it belongs to, from 0.
        direction: ``"forward"``, ``"backward"``, or ``"inference"`` when no gradient was asked for.
        nodes: the calls of the graph that Inductor was given, after decomposition and partitioning.
        code: the generated Python module; empty when there was nothing to generate.
        launch_nodes: handle of a launch in ``code`` -> the calls that it carries out, in graph order.
        traffic: handle of a launch -> what it reads and what it writes; without an entry where that is unknown.
        inputs: the names of the graph's inputs.
        outputs: the graph's results, by the name that the backward has for those that it keeps.
    """

    index: int
    direction: str
    nodes: tuple[CapturedNode, ...]
    code: str
    launch_nodes: dict[str, tuple[CapturedNode, ...]]
    traffic: dict[str, tuple[tuple[TensorAccess, ...], tuple[TensorAccess, ...]]] = field(default_factory=dict)
    inputs: tuple[str, ...] = ()
    outputs: dict[str, TensorAccess] = field(default_factory=dict)


def calls_of(gm: torch.fx.GraphModule) -> Iterator[torch.fx.Node]:
    """The calls of a graph, in order; those of a nested region behind each call of it."""
    for node in gm.graph.nodes:
        if node.op == "call_function":
            yield node
            if node.target is torch.ops.higher_order.invoke_subgraph:
                yield from calls_of(getattr(gm, node.args[0].target))


def captured(node: torch.fx.Node) -> CapturedNode:
    """``node`` as a plain value."""
    op = _op_name(node.target)
    origin = _op_name(node.meta.get("original_aten")) or op
    # Backward nodes carry the stack of the forward call whose gradient they belong to.
    stack = node.meta.get("fwd_source_fn_stack") or node.meta.get("source_fn_stack")
    source = stack[-1][0] if stack else ""
    return CapturedNode(node.name, op, origin, source, _arguments(node))


def _op_name(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return str(target.overloadpacket)
    if isinstance(target, torch._ops.OpOverloadPacket):
        return str(target)
    if isinstance(target, torch._ops.HigherOrderOperator):
        return target.name()
    return getattr(target, "__name__", "") if target is not None else ""


def _arguments(node: torch.fx.Node) -> dict[str, Any]:
    """Argument name -> value, nodes replaced by the fake tensors that they stand for."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return {}
    values: dict[str, Any] = {}
    for position, argument in enumerate(node.target._schema.arguments):
        value = (
            node.args[position] if position < len(node.args) else node.kwargs.get(argument.name, argument.default_value)
        )
        values[argument.name] = torch.fx.map_arg(value, lambda n: n.meta.get("val"))
    return values
