"""Which call makes which tensor and which calls read it: the flow through one generated module, to be drawn."""

from __future__ import annotations

from dataclasses import dataclass, field

from .reporting import Call, CompiledDirection, CompiledGraph

# More would leave no room for the calls; the rest is only in the tables.
MAX_LANES = 12


@dataclass
class Flow:
    """The tensors that run through one generated module.

    Attributes:
        prefix: of the anchors of its steps.
        calls: the steps, from 0.
        readers: (step, buffer) -> the steps that read what it writes there.
        writer: (step, buffer) -> the step that wrote what it reads there; without an entry for inputs.
        final: buffer -> the last step that writes it.
        lanes: (step, buffer) of the writer -> lane, from 0, next to the calls.
        undrawn: how many tensors have no lane.
        kept: buffer -> the name under which the backward has it.
        results: buffers that leave the module otherwise.
        before: name of an input of the backward -> the forward's step that made it.
        forward: prefix of the anchors of those.
    """

    prefix: str
    calls: tuple[Call, ...]
    readers: dict[tuple[int, str], list[int]] = field(default_factory=dict)
    writer: dict[tuple[int, str], int] = field(default_factory=dict)
    final: dict[str, int] = field(default_factory=dict)
    lanes: dict[tuple[int, str], int] = field(default_factory=dict)
    undrawn: int = 0
    kept: dict[str, str] = field(default_factory=dict)
    results: set[str] = field(default_factory=set)
    before: dict[str, int] = field(default_factory=dict)
    forward: str = ""


def anchor(graph: CompiledGraph, direction: CompiledDirection) -> str:
    """The name of a generated module within a page."""
    return f"graph-{graph.index}-{direction.direction}"


def flow_of(graph: CompiledGraph, direction: CompiledDirection) -> Flow:
    """The flow through ``direction``, one of the modules of ``graph``."""
    flow = Flow(anchor(graph, direction), direction.calls)
    for step, call in enumerate(direction.calls):
        for access in call.reads or ():
            if access.buffer in flow.final:
                writer = flow.writer[step, access.buffer] = flow.final[access.buffer]
                flow.readers.setdefault((writer, access.buffer), []).append(step)
        for access in call.writes or ():
            flow.final[access.buffer] = step
    _give_lanes(flow)
    kept = {output.name: output.tensor.buffer for output in graph.kept}
    if direction.direction == "forward":
        flow.kept = {buffer: name for name, buffer in kept.items()}
    flow.results = {output.tensor.buffer for output in direction.outputs} - flow.kept.keys()
    if direction.direction == "backward" and kept:
        forward = graph.directions[0]
        flow.forward = anchor(graph, forward)
        made = {access.buffer: step for step, call in enumerate(forward.calls) for access in call.writes or ()}
        flow.before = {name: made[buffer] for name, buffer in kept.items() if buffer in made}
    return flow


def _give_lanes(flow: Flow) -> None:
    busy_until: list[int] = []
    # Of those that start together the short ones lie innermost.
    for tensor in sorted(flow.readers, key=lambda tensor: (tensor[0], flow.readers[tensor][-1])):
        start, end = tensor[0], flow.readers[tensor][-1]
        lane = next((lane for lane, until in enumerate(busy_until) if until < start), len(busy_until))
        if lane >= MAX_LANES:
            flow.undrawn += 1
            continue
        busy_until[lane : lane + 1] = [end]
        flow.lanes[tensor] = lane
