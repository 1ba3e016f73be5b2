"""What a test expects of a compiled region: declared in numbers, or stored as a text of the region's structure."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from .backends.capability import backend_names
from .errors import ArgumentError
from .reporting import CompiledDirection, GraphBreak, RegionReport

Detail = Literal["ours", "all"]
# Addresses of functions, in the words of a reason.
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


@dataclass(frozen=True)
class Expectation:
    """What a compiled region has to be. None, or an empty value: not checked.

    Attributes:
        graphs: how many graphs Dynamo makes.
        breaks: how many places break a graph; a line that breaks many times is one place.
        opaque_calls: operator -> how many calls of it stand in the whole region, forward and backward. Operators are
            named without their backend (``"vsa.attention"``, ``"vsa.attention_backward"``, ``"aten.sort"``); with it
            (``"vsa.attention_eager"``) the backend is part of the expectation.
        opaque_per_layer: the same per layer, for ``layers`` layers.
        layers: how many layers the region has.
        fused: groups of operators; those of a group have to stand in one generated kernel.

    Raises:
        ArgumentError: a value of another form.
    """

    graphs: int | None = 1
    breaks: int | None = 0
    opaque_calls: Mapping[str, int] | None = field(default_factory=dict)
    opaque_per_layer: Mapping[str, int] | None = field(default_factory=dict)
    layers: int = 1
    fused: Sequence[Sequence[str]] | None = ()

    def __post_init__(self) -> None:
        for name in ("graphs", "breaks"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))
        check_count("layers", self.layers)
        for name in ("opaque_calls", "opaque_per_layer"):
            counts = getattr(self, name) or {}
            if not isinstance(counts, Mapping):
                raise ArgumentError(name, repr(counts), "a dictionary from an operator's name to a number of calls")
            for op, count in counts.items():
                check_count(f"{name}[{op!r}]", count)
        if not isinstance(self.fused or (), Sequence) or not all(map(_is_group, self.fused or ())):
            raise ArgumentError("fused", repr(self.fused), 'groups of operators, such as [("vsa.tile", "aten.mul")]')

    def differences(self, report: RegionReport) -> list[str]:
        """A sentence per expectation that ``report`` does not meet."""
        return [*self._numbers(report), *self._fusions(report)]

    def _numbers(self, report: RegionReport) -> Iterator[str]:
        for name, got in (("graphs", report.num_graphs), ("breaks", len(report.breaks))):
            expected = getattr(self, name)
            if expected is not None and expected != got:
                yield f"{name}: expected {expected}, got {got}"
        counts = Counter(name for call in report.opaque_calls for name in {call.name, without_backend(call.name)})
        for op, expected in (self.opaque_calls or {}).items():
            if counts[op] != expected:
                yield f"opaque calls of {op}: expected {expected}, got {counts[op]}"
        for op, each in (self.opaque_per_layer or {}).items():
            if counts[op] != each * self.layers:
                expected = f"{each * self.layers} ({each} in each of {self.layers} layers)"
                yield f"opaque calls of {op}: expected {expected}, got {counts[op]}"

    def _fusions(self, report: RegionReport) -> Iterator[str]:
        kernels = [set(kernel.fused) for kernel in report.kernels]
        for group in self.fused or ():
            if not any(kernel.issuperset(group) for kernel in kernels):
                where = (f"{op} in {sum(op in kernel for kernel in kernels)}" for op in group)
                yield f"fused: expected {', '.join(group)} in one kernel; of {len(kernels)} kernels, {', '.join(where)}"


def _is_group(group: Any) -> bool:
    return isinstance(group, Sequence) and not isinstance(group, str) and all(isinstance(op, str) for op in group)


def check_count(name: str, given: Any) -> None:
    """Raises :class:`ArgumentError` unless ``given`` is a number of things."""
    if isinstance(given, bool) or not isinstance(given, int) or given < 0:
        raise ArgumentError(name, repr(given), "an integer, 0 or more")


def without_backend(name: str) -> str:
    """``vsa.attention`` for ``vsa.attention_eager``; other names as they are."""
    if name.startswith("vsa."):
        for backend in backend_names():
            if name.endswith(f"_{backend}"):
                return name.removesuffix(f"_{backend}")
    return name


def structure(report: RegionReport, detail: Detail = "ours") -> str:
    """A region's structure as text that stays the same while the region does: to store, or to compare in a test.

    It holds the number of graphs, every break without its line number, and per graph and direction what is called in
    which order, with how the operators of vsa_inductor were compiled. No generated name, path, backend or version.

    Args:
        report: of :func:`vsa_inductor.explain`.
        detail: ``"ours"``: opaque calls, and the kernels that hold operators of vsa_inductor, with these only; the same
            from torch 2.11 to 2.13. ``"all"``: every call and kernel with all that it fuses, which new versions of
            torch change.

    Raises:
        ArgumentError: another ``detail``.
    """
    if detail not in get_args(Detail):
        raise ArgumentError("detail", repr(detail), '"ours" or "all"')
    return "\n".join(_lines(report, detail)) + "\n"


def _lines(report: RegionReport, detail: Detail) -> Iterator[str]:
    yield f"graphs: {report.num_graphs}"
    yield f"breaks: {len(report.breaks)}"
    for graph_break in report.breaks:
        reason = _ADDRESS.sub("", graph_break.reason.partition("\n")[0])
        yield f"  {Path(graph_break.file).name}: {reason}"
    for graph in report.graphs:
        for direction in graph.directions:
            yield f"graph {graph.index}, {direction.direction}"
            yield from _steps(direction, detail)


def _steps(direction: CompiledDirection, detail: Detail) -> Iterator[str]:
    for call in direction.calls:
        if call.generated:
            fused = sorted(op for op in set(call.fused) if detail == "all" or op.startswith("vsa."))
            if fused:
                yield f"  kernel  {', '.join(fused)}"
        elif call.kind == "opaque" or detail == "all":
            instead_of = f": {call.instead_of}" if call.instead_of else ""
            yield f"  {call.kind:<7} {without_backend(call.name)}{instead_of}"
    for tier in sorted(direction.tiers, key=lambda tier: tier.op):
        yield f"  {tier.op} x{tier.count}: {f'{tier.tier}, {tier.how}' if tier.how else tier.tier}"


def difference(expected: str, got: str) -> str:
    """A unified diff between two structures, empty where they are equal."""
    lines = difflib.unified_diff(expected.splitlines(), got.splitlines(), "expected", "compiled", lineterm="", n=3)
    return "\n".join(lines)


def places(breaks: Sequence[GraphBreak]) -> str:
    """Every break with file, line and reason, indented."""
    lines = []
    for graph_break in breaks:
        lines.append(f"  {graph_break.file}:{graph_break.line}")
        lines.extend(f"    {line}".rstrip() for line in graph_break.reason.splitlines())
    return "\n".join(lines)
