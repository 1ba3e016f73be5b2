"""What :func:`vsa_inductor.explain` hands back: a page to print, a JSON document, and attributes to assert on."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from .lowerings._captured import TensorAccess

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
        reads, writes: the tensors that it moves, with bytes; None where this torch does not tell. What the bytes of a
            kernel and of an operator mean: :class:`~vsa_inductor.lowerings._captured.TensorAccess`.
    """

    graph: int
    direction: str
    kind: str
    name: str
    ours: bool
    fused: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    instead_of: str = ""
    reads: tuple[TensorAccess, ...] | None = None
    writes: tuple[TensorAccess, ...] | None = None

    @property
    def generated(self) -> bool:
        return self.kind not in ("opaque", "extern")

    @property
    def bytes_read(self) -> int | None:
        """Bytes of :attr:`reads`; None when unknown."""
        return None if self.reads is None else sum(access.num_bytes for access in self.reads)

    @property
    def bytes_written(self) -> int | None:
        """Bytes of :attr:`writes`; None when unknown."""
        return None if self.writes is None else sum(access.num_bytes for access in self.writes)


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
class GraphOutput:
    """A result of a generated module; ``name`` is also that of the backward's input, where it is kept for that."""

    name: str
    tensor: TensorAccess


@dataclass(frozen=True)
class CompiledDirection:
    """One generated module.

    Attributes:
        direction: ``"forward"``, ``"backward"`` or ``"inference"``.
        calls: in the order of execution.
        tiers: how the operators of ours in it were compiled.
        code: the generated Python module.
        inputs: the names of its inputs, tensors and symbolic sizes.
        outputs: its results.
    """

    direction: str
    calls: tuple[Call, ...]
    tiers: tuple[OpTier, ...]
    code: str = field(repr=False)
    inputs: tuple[str, ...] = ()
    outputs: tuple[GraphOutput, ...] = ()

    @property
    def bytes_read(self) -> int:
        """Bytes that the calls read, those of unknown traffic left out."""
        return sum(call.bytes_read or 0 for call in self.calls)

    @property
    def bytes_written(self) -> int:
        """Bytes that the calls write, those of unknown traffic left out."""
        return sum(call.bytes_written or 0 for call in self.calls)

    @property
    def unknown(self) -> int:
        """How many calls are of unknown traffic."""
        return sum(call.reads is None for call in self.calls)

    @property
    def symbolic(self) -> bool:
        """Whether a size among the tensors is symbolic, so that bytes are those of the compiled run."""
        accesses = (access for call in self.calls for access in (*(call.reads or ()), *(call.writes or ())))
        return any(isinstance(size, str) for access in accesses for size in access.shape)


@dataclass(frozen=True)
class CompiledGraph:
    """One graph of Dynamo and the modules that were generated from it."""

    index: int
    directions: tuple[CompiledDirection, ...]

    @property
    def kept(self) -> tuple[GraphOutput, ...]:
        """What the forward computes and keeps for the backward, each memory once; inputs that are kept are not."""
        if [direction.direction for direction in self.directions] != ["forward", "backward"]:
            return ()
        forward, backward = self.directions
        wanted, given = set(backward.inputs), set(forward.inputs)
        kept = {
            output.tensor.buffer: output
            for output in forward.outputs
            if output.name in wanted and output.tensor.buffer not in given
        }
        return tuple(kept.values())


@dataclass(frozen=True)
class RegionReport:
    """How a function compiles, from one run of it.

    Attributes:
        graphs: every graph, with its generated code, calls in order and tiers per direction.
        breaks: every graph break.
        backends: one entry per ``vsa::attention`` call.
        notes: sentences about what costs time or memory without being an error.
        torch: the version that compiled it.
    """

    graphs: tuple[CompiledGraph, ...]
    breaks: tuple[GraphBreak, ...]
    backends: tuple[BackendUse, ...]
    notes: tuple[str, ...]
    torch: str = ""

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

    @property
    def one_region(self) -> bool:
        """One graph and no break."""
        return self.num_graphs == 1 and not self.breaks

    def to_dict(self, code: bool = False) -> dict[str, Any]:
        """The report as plain lists and dictionaries, all that :meth:`to_html` shows.

        Keys: ``torch``, ``num_graphs``, ``one_region``, ``breaks`` [``file``, ``line``, ``reason``], ``backends``
        [``graph``, ``node``, ``forward``, ``backward``, ``refusals`` [``backend``, ``direction``, ``sentence``]],
        ``notes``, and ``graphs`` [``index``, ``kept``, ``directions``]. A direction has ``direction``, ``calls``,
        ``tiers`` [``op``, ``count``, ``tier``, ``how``], ``inputs``, ``outputs`` [``name``, ``tensor``],
        ``bytes_read``, ``bytes_written``, ``unknown`` and ``symbolic``; a call has the attributes of :class:`Call`,
        ``bytes_read`` and ``bytes_written`` among them; a tensor ``buffer``, ``shape``, ``dtype``, ``num_bytes``.
        Unknown bytes are None.

        Args:
            code: include the generated modules, as ``code`` of each direction.
        """
        report = asdict(self)
        report["num_graphs"], report["one_region"] = self.num_graphs, self.one_region
        for graph, graph_dict in zip(self.graphs, report["graphs"], strict=True):
            graph_dict["kept"] = [asdict(output) for output in graph.kept]
            for direction, direction_dict in zip(graph.directions, graph_dict["directions"], strict=True):
                if not code:
                    del direction_dict["code"]
                for name in ("bytes_read", "bytes_written", "unknown", "symbolic"):
                    direction_dict[name] = getattr(direction, name)
                for call, call_dict in zip(direction.calls, direction_dict["calls"], strict=True):
                    call_dict["bytes_read"], call_dict["bytes_written"] = call.bytes_read, call.bytes_written
        return report

    def to_json(self, code: bool = False) -> str:
        """:meth:`to_dict` as a JSON document."""
        return json.dumps(self.to_dict(code), indent=2)

    def to_html(self) -> str:
        """The report as one HTML page, drawn: no script, and nothing that it would have to load."""
        from .region_page import region_page

        return region_page(self)

    def __str__(self) -> str:
        return "\n".join(_page(self))


def _page(report: RegionReport) -> Iterator[str]:
    yield ", ".join(
        (
            counted(report.num_graphs, "graph"),
            counted(len(report.breaks), "graph break"),
            counted(len(report.kernels), "generated kernel"),
            counted(len(report.opaque_calls), "opaque call"),
        )
    )
    for graph_break in report.breaks:
        yield from _wrap(graph_break.summary, "  break: ")
    for graph in report.graphs:
        for direction in graph.directions:
            yield ""
            yield from _wrap(f"graph {graph.index}, {direction.direction}: {summary(graph, direction)}", "")
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
        yield from _wrap(f"{counted(len(nodes), 'attention call')}: forward {chosen[0]}, backward {chosen[1]}", "  ")
    for (backend, sentence), directions in _by_sentence(report.refusals).items():
        yield from _wrap(f"{backend} refused ({', '.join(directions)}): {sentence}", "    ")
    if report.notes:
        yield ""
        yield "notes"
    for note in report.notes:
        yield from _wrap(note, "  - ")


def summary(graph: CompiledGraph, direction: CompiledDirection) -> str:
    """What a generated module moves and keeps, in words."""
    words = f"reads {size_of(direction.bytes_read)}, writes {size_of(direction.bytes_written)}"
    if direction.unknown:
        words += f" ({counted(direction.unknown, 'call')} of unknown traffic left out)"
    if direction.symbolic:
        words += " at the sizes of this run"
    if direction.direction == "forward" and graph.kept:
        words += f"; keeps {size_of(sum(output.tensor.num_bytes for output in graph.kept))} for the backward"
    return words


def size_of(num_bytes: int | None) -> str:
    """Bytes in words: ``"640 B"``, ``"20.0 KiB"``, ``"unknown"`` for None."""
    if num_bytes is None:
        return "unknown"
    if num_bytes < 1024:
        return f"{num_bytes} B"
    value, units = num_bytes / 1024, ["KiB", "MiB", "GiB", "TiB"]
    # 1023.96 would be shown as 1024.0.
    while value >= 1023.95 and len(units) > 1:
        value /= 1024
        del units[0]
    return f"{value:.1f} {units[0]}"


def _calls(calls: tuple[Call, ...]) -> Iterator[str]:
    yield f"{'':6}{'kind':<7}{'reads':>10} {'writes':>10}" if calls else "  (no calls: nothing to compute)"
    described: set[str] = set()
    for number, call in enumerate(calls, 1):
        moved = f"{size_of(call.bytes_read):>10} {size_of(call.bytes_written):>10}"
        words = f"{call.name}{_remark(call, call.name in described)}"
        yield from _wrap(words, f"{number:4d}  {call.kind:<7}{moved}  ")
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


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
