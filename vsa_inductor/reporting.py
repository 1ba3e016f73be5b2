"""What :func:`vsa_inductor.explain` hands back: a page to print, a JSON document, and attributes to assert on."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .backends.capability import Refusal

WIDTH = 100


@dataclass(frozen=True)
class GraphBreak:
    """Where Dynamo ended a graph early, and its reason in its own words."""

    file: str
    line: int
    reason: str

    @property
    def summary(self) -> str:
        """``file:line: ``, what happened and Dynamo's explanation, without its hints."""
        lines = [line.strip() for line in self.reason.splitlines()] or ["no reason given"]
        explanation = next((line for line in lines if line.startswith("Explanation: ")), "")
        return f"{self.file}:{self.line}: {lines[0].rstrip('.')}. {explanation.partition(' ')[2]}".rstrip()


@dataclass(frozen=True)
class Call:
    """One call of a generated module.

    Attributes:
        graph, direction: where it stands.
        kind: ``"triton"`` or ``"cpp"`` (a generated kernel), ``"opaque"`` (an operator that the compiler cannot see
            into), ``"extern"`` (a library routine such as ``mm``).
        name: of the kernel, operator (``vsa.attention_triton``) or routine.
        ours: the operator belongs to vsa_inductor.
        fused: the operators whose work it does, in graph order.
        sources: the calls of the traced program that they belong to; in the backward, those whose gradient they are.
        instead_of: in words, the work of the program that an operator of ours takes the place of.
    """

    graph: int
    direction: str
    kind: str
    name: str
    ours: bool
    fused: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    instead_of: str = ""

    @property
    def generated(self) -> bool:
        return self.kind not in ("opaque", "extern")


@dataclass(frozen=True)
class OpTier:
    """How an operator of ours reached the generated code: ``"lowering"``, ``"decomposition"`` or ``"opaque"``.

    ``how``: for ``vsa.tile`` and ``vsa.untile``, the kernel of ours that does them with the norm and rotation around
    them, where their form is recognised, else ``"generated code"``.
    """

    op: str
    count: int
    tier: str
    how: str = ""


@dataclass(frozen=True)
class BackendUse:
    """The backends of one ``vsa::attention`` call, as its arguments name them, and why the others could not run it."""

    graph: int
    node: str
    forward: str
    backward: str
    refusals: tuple[Refusal, ...]


@dataclass(frozen=True)
class CompiledDirection:
    """One generated module: ``direction`` is ``"forward"``, ``"backward"`` or ``"inference"``."""

    direction: str
    calls: tuple[Call, ...]
    tiers: tuple[OpTier, ...]
    code: str = field(repr=False)


@dataclass(frozen=True)
class CompiledGraph:
    """One graph of Dynamo and the modules that were generated from it."""

    index: int
    directions: tuple[CompiledDirection, ...]


@dataclass(frozen=True)
class RegionReport:
    """How a function compiles, from one run of it.

    Attributes:
        graphs: every graph, with its generated code, calls in order and tiers per direction.
        breaks: every graph break.
        backends: one entry per ``vsa::attention`` call.
        notes: sentences about what costs time or memory without being an error.
    """

    graphs: tuple[CompiledGraph, ...]
    breaks: tuple[GraphBreak, ...]
    backends: tuple[BackendUse, ...]
    notes: tuple[str, ...]

    @property
    def num_graphs(self) -> int:
        return len(self.graphs)

    @property
    def calls(self) -> tuple[Call, ...]:
        """Every call, in the order of graphs, directions and execution."""
        return tuple(call for graph in self.graphs for direction in graph.directions for call in direction.calls)

    @property
    def opaque_calls(self) -> tuple[Call, ...]:
        """The calls that the compiler cannot see into, in order."""
        return tuple(call for call in self.calls if call.kind == "opaque")

    @property
    def kernels(self) -> tuple[Call, ...]:
        """Every generated kernel once, at its first launch."""
        first: dict[tuple[int, str, str], Call] = {}
        for call in self.calls:
            if call.generated:
                first.setdefault((call.graph, call.direction, call.name), call)
        return tuple(first.values())

    @property
    def refusals(self) -> tuple[Refusal, ...]:
        """Every refusal of a backend, once."""
        return tuple(dict.fromkeys(refusal for use in self.backends for refusal in use.refusals))

    def to_dict(self, code: bool = False) -> dict[str, Any]:
        """The report as plain lists and dictionaries; ``code`` includes the generated modules."""
        report = asdict(self)
        report["num_graphs"] = self.num_graphs
        if not code:
            for graph in report["graphs"]:
                for direction in graph["directions"]:
                    del direction["code"]
        return report

    def to_json(self, code: bool = False) -> str:
        """:meth:`to_dict` as a JSON document."""
        return json.dumps(self.to_dict(code), indent=2)

    def __str__(self) -> str:
        return "\n".join(_page(self))


def _page(report: RegionReport) -> Iterator[str]:
    yield ", ".join(
        (
            _count(report.num_graphs, "graph"),
            _count(len(report.breaks), "graph break"),
            _count(len(report.kernels), "generated kernel"),
            _count(len(report.opaque_calls), "opaque call"),
        )
    )
    for graph_break in report.breaks:
        yield from _wrap(graph_break.summary, "  break: ")
    for graph in report.graphs:
        for direction in graph.directions:
            yield ""
            yield f"graph {graph.index}, {direction.direction}"
            yield from _calls(direction.calls)
            if direction.tiers:
                tiers = (
                    f"{tier.op} x{tier.count} {tier.tier}{f' ({tier.how})' if tier.how else ''}"
                    for tier in direction.tiers
                )
                yield from _wrap(", ".join(tiers), "  ours: ")
    if report.backends:
        yield ""
        yield "backends"
    for chosen, nodes in _alike(report.backends).items():
        yield from _wrap(f"{_count(len(nodes), 'attention call')}: forward {chosen[0]}, backward {chosen[1]}", "  ")
    for (backend, sentence), directions in _by_sentence(report.refusals).items():
        yield from _wrap(f"{backend} refused ({', '.join(directions)}): {sentence}", "    ")
    if report.notes:
        yield ""
        yield "notes"
    for note in report.notes:
        yield from _wrap(note, "  - ")


def _calls(calls: tuple[Call, ...]) -> Iterator[str]:
    if not calls:
        yield "  (no calls: nothing to compute)"
    described: set[str] = set()
    for number, call in enumerate(calls, 1):
        yield from _wrap(f"{call.name}{_remark(call, call.name in described)}", f"{number:4d}  {call.kind:<7} ")
        # An operator stands for itself, and layers share their kernels.
        if call.generated and call.name not in described:
            described.add(call.name)
            for title, names in (("fuses", call.fused), ("from ", call.sources)):
                yield from _wrap(", ".join(names), f"{'':14}{title} ") if names else ()


def _remark(call: Call, described: bool) -> str:
    if call.ours:
        return "  <- vsa_inductor" + (f": {call.instead_of}" if call.instead_of else "")
    if call.kind == "extern" and call.sources:
        return f"  for {', '.join(call.sources)}"
    return "  (as above)" if described else ""


def _alike(uses: tuple[BackendUse, ...]) -> dict[tuple[str, str], list[str]]:
    groups: dict[tuple[str, str], list[str]] = {}
    for use in uses:
        groups.setdefault((use.forward, use.backward), []).append(use.node)
    return groups


def _by_sentence(refusals: tuple[Refusal, ...]) -> dict[tuple[str, str], list[str]]:
    groups: dict[tuple[str, str], list[str]] = {}
    for refusal in refusals:
        groups.setdefault((refusal.backend, refusal.sentence), []).append(refusal.direction)
    return groups


def _wrap(text: str, prefix: str) -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=prefix,
        subsequent_indent=" " * min(len(prefix), 20),
        break_long_words=True,
        break_on_hyphens=False,
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
