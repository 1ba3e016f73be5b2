"""A :class:`~vsa_inductor.reporting.RegionReport` as a page: each generated module drawn as the calls that it makes, in
order, with the tensors that run between them.

Left of the calls, every tensor that one call makes and a later one reads is a line ("lane") from the one to the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from .page import Markup, document, el, table
from .region_flow import MAX_LANES, Flow, anchor, flow_of
from .reporting import Call, CompiledDirection, CompiledGraph, RegionReport, counted, size_of, summary

if TYPE_CHECKING:
    from .lowerings._captured import TensorAccess

# Pixels from one lane to the next.
LANE = 9
# Where a call's mark stands in its row: as high as its name.
MARK = 22


def region_page(report: RegionReport) -> str:
    """The page, as text."""
    good = report.one_region
    verdict = "One graph, no graph break." if good else f"Not one region: {_headline(report)}."
    several = sum(len(graph.directions) for graph in report.graphs) > 1
    return document(
        f"vsa_inductor: {_headline(report)}",
        el("h1", "What was compiled"),
        el("p", verdict, class_=f"verdict {'good' if good else 'bad'}"),
        el("ul", _figures(report), class_="figures"),
        _breaks(report),
        (el("h2", "Notes"), el("ul", [el("li", note) for note in report.notes])) if report.notes else None,
        el("nav", "Go to: ", _contents(report), aria_label="Generated modules") if several else None,
        _legend() if report.calls else None,
        [_graph(graph) for graph in report.graphs],
        _backends(report),
        el("h2", "What the bytes mean"),
        el("p", _BYTES),
        el("p", f"Compiled by torch {report.torch}." if report.torch else None, class_="soft"),
        style=_STYLE,
    )


_BYTES = (
    "Of a generated kernel: the least that it can move. Every element that it touches counts once, of a view only the "
    "view, of a gather no more elements than it asks for. Of an opaque or library call: its operands and results, "
    "whole and once. Attention reads fewer keys than that where its lists leave tiles out, and others more than once."
)


def _headline(report: RegionReport) -> str:
    return f"{counted(report.num_graphs, 'graph')}, {counted(len(report.breaks), 'graph break')}"


def _figures(report: RegionReport) -> Iterator[Markup]:
    directions = [direction for graph in report.graphs for direction in graph.directions]
    counts = (
        counted(report.num_graphs, "graph"),
        counted(len(report.breaks), "graph break"),
        counted(len(report.kernels), "generated kernel"),
        counted(len(report.opaque_calls), "opaque call"),
    )
    figures = [tuple(count.split(" ", 1)) for count in counts]
    figures.append((size_of(sum(direction.bytes_read for direction in directions)), "read"))
    figures.append((size_of(sum(direction.bytes_written for direction in directions)), "written"))
    for value, name in figures:
        yield el("li", el("b", value), el("span", name, class_="soft"))


def _breaks(report: RegionReport) -> Markup | None:
    if not report.breaks:
        return None
    items = [
        el("li", el("code", f"{found.file}:{found.line}"), el("pre", found.reason or "no reason given"))
        for found in report.breaks
    ]
    return el(
        "section", el("h2", "Graph breaks", id="breaks"), el("ol", items), class_="breaks", aria_labelledby="breaks"
    )


def _contents(report: RegionReport) -> Iterator[Markup]:
    for graph in report.graphs:
        for direction in graph.directions:
            title = f"graph {graph.index}, {direction.direction}"
            yield el("a", title, href=f"#{anchor(graph, direction)}", class_="entry")


def _legend() -> Markup:
    shown = [
        ("opaque ours", "an operator of vsa_inductor, which the compiler cannot see into"),
        ("opaque", "another opaque operator"),
        ("generated", "a kernel that the compiler generated"),
        ("extern", "a library routine, such as a matrix product"),
    ]
    items = [
        el("li", el("svg", _mark(kind, 8, 8), width=16, height=16, aria_hidden="true"), text) for kind, text in shown
    ]
    lanes = el(
        "li", "The lines on the left are tensors, from the call that makes them to its last reader.", class_="lanes"
    )
    return el("ul", items, lanes, class_="legend")


def _graph(graph: CompiledGraph) -> Markup:
    heading = f"graph-{graph.index}"
    return el(
        "section",
        el("h2", f"Graph {graph.index}", id=heading),
        [_module(graph, direction) for direction in graph.directions]
        or el("p", "Nothing was generated.", class_="soft"),
        aria_labelledby=heading,
    )


def _module(graph: CompiledGraph, direction: CompiledDirection) -> Markup:
    flow = flow_of(graph, direction)
    sentence = summary(graph, direction)
    sentence = f"{sentence[0].upper()}{sentence[1:]}."
    if flow.undrawn:
        sentence += f" {counted(flow.undrawn, 'tensor')} of more than {MAX_LANES} at once not drawn."
    most = max((max(call.bytes_read or 0, call.bytes_written or 0) for call in direction.calls), default=0) or 1
    steps = [_step(flow, number, most) for number in range(len(direction.calls))]
    return el(
        "details",
        el("summary", el("h3", direction.direction.capitalize())),
        el("p", sentence, class_="soft"),
        _by_kind(direction.calls),
        el("ol", steps, class_="flow") if steps else el("p", "No calls: nothing to compute."),
        _tiers(direction),
        id=anchor(graph, direction),
        open=True,
    )


_KINDS = {
    "opaque ours": "Opaque calls of vsa_inductor",
    "opaque": "Other opaque calls",
    "generated": "Generated kernels",
    "extern": "Library calls",
}


def _kind(call: Call) -> str:
    return (
        ("opaque ours" if call.ours else "opaque")
        if call.kind == "opaque"
        else "generated"
        if call.generated
        else "extern"
    )


def _by_kind(calls: Iterable[Call]) -> tuple[Markup, Markup] | None:
    """How much each kind of call moves, a bar and a table; None where there is only one kind, or nothing is known."""
    groups = {kind: [call for call in calls if _kind(call) == kind] for kind in _KINDS}
    moved = {kind: (_total(group, "bytes_read"), _total(group, "bytes_written")) for kind, group in groups.items()}
    total = sum(map(sum, moved.values()))
    if not total or sum(map(bool, groups.values())) == 1:
        return None
    shares = {kind: sum(pair) / total for kind, pair in moved.items()}
    bar = [el("i", class_=kind, style=f"width:{share:.3%}") for kind, share in shares.items() if share]
    rows = [
        (
            (el("i", class_=f"swatch {kind}"), _KINDS[kind]),
            str(len(group)),
            size_of(moved[kind][0]),
            size_of(moved[kind][1]),
            f"{shares[kind]:.0%}",
        )
        for kind, group in groups.items()
        if group
    ]
    head = ("kind", "calls", "read", "written", "share")
    return el("div", bar, class_="share", aria_hidden="true"), table(
        "What each kind of call moves", head, rows, range(1, 5)
    )


def _total(calls: Iterable[Call], name: str) -> int:
    return sum(getattr(call, name) or 0 for call in calls)


def _tiers(direction: CompiledDirection) -> Markup | None:
    if not direction.tiers:
        return None
    rows = [(el("code", tier.op), str(tier.count), tier.tier, tier.how) for tier in direction.tiers]
    return table("How the operators of vsa_inductor were compiled", ("operator", "calls", "tier", "how"), rows, (1,))


def _backends(report: RegionReport) -> Markup | None:
    if not report.backends:
        return None
    rows = [(str(use.graph), el("code", use.node), use.forward, use.backward) for use in report.backends]
    refusals = [(refusal.backend, refusal.direction, refusal.sentence) for refusal in report.refusals]
    return el(
        "section",
        el("h2", "Backends", id="backends"),
        table("The attention calls and what runs them", ("graph", "call", "forward", "backward"), rows),
        table("Backends that could not run them", ("backend", "direction", "why"), refusals) if refusals else None,
        aria_labelledby="backends",
    )


def _step(flow: Flow, step: int, most: int) -> Markup:
    call, kind = flow.calls[step], _kind(flow.calls[step])
    first = next(at for at, other in enumerate(flow.calls) if other.name == call.name)
    facts: list[Markup] = []
    if call.instead_of:
        facts.append(_fact("instead of", call.instead_of))
    if call.generated and first != step:
        facts.append(_fact("fuses", ("as in ", _link(flow, first))))
    elif call.generated and call.fused:
        facts.append(_fact("fuses", [(el("code", name), " ") for name in call.fused]))
    if call.sources and not (call.generated and first != step):
        facts.append(_fact("from" if call.generated else "for", ", ".join(call.sources)))
    left = [access.buffer for access in call.writes or () if flow.final[access.buffer] == step]
    kept = [flow.kept[buffer] for buffer in left if buffer in flow.kept]
    if kept:
        facts.append(_fact("keeps", f"{', '.join(kept)} for the backward"))
    badge = f"{call.kind} kernel" if call.generated else {"opaque": "opaque call", "extern": "library call"}[call.kind]
    return el(
        "li",
        _lanes(flow, step, kind),
        el(
            "div",
            el("div", el("span", str(step + 1), class_="step"), el("code", call.name, class_="name"), class_="title"),
            el("span", badge, ", vsa_inductor" if call.ours else "", class_="badge"),
            el("dl", facts) if facts else None,
            _bars(call, most),
            _tensors(flow, step),
            class_=f"card {kind}",
        ),
        id=f"{flow.prefix}-{step + 1}",
        style=f"padding-left:{_width(flow)}px",
    )


def _fact(title: str, content: Iterable | str) -> Markup:
    return el("div", el("dt", title), el("dd", content))


def _link(flow: Flow, step: int) -> Markup:
    return el("a", str(step + 1), href=f"#{flow.prefix}-{step + 1}")


def _bars(call: Call, most: int) -> Markup:
    def bar(title: str, num_bytes: int | None) -> Markup:
        width = 100 * (num_bytes or 0) / most
        drawn = el("i", style=f"width:{width:.2f}%") if num_bytes else None
        return el("div", el("span", title), el("span", drawn, class_="bar"), el("b", size_of(num_bytes)))

    return el("div", bar("reads", call.bytes_read), bar("writes", call.bytes_written), class_="bars")


def _tensors(flow: Flow, step: int) -> Markup | None:
    call = flow.calls[step]
    if call.reads is None or call.writes is None:
        return None
    rows = [("reads", *_tensor(access), _origin(flow, step, access.buffer)) for access in call.reads]
    rows += [("writes", *_tensor(access), _destination(flow, step, access.buffer)) for access in call.writes]
    counts = f"{counted(len(call.reads), 'tensor')} in, {len(call.writes)} out"
    caption = f"Tensors of step {step + 1}"
    return el(
        "details", el("summary", counts), table(caption, ("access", "tensor", "type", "bytes", "from, to"), rows, (3,))
    )


def _tensor(access: TensorAccess) -> tuple[Markup, str, str]:
    shape = ", ".join(map(str, access.shape))
    return el("code", access.buffer), f"{access.dtype} [{shape}]", f"{access.num_bytes:,}"


def _origin(flow: Flow, step: int, buffer: str) -> tuple[str | Markup, ...]:
    if (step, buffer) in flow.writer:
        return "from ", _link(flow, flow.writer[step, buffer])
    if buffer in flow.before:
        number = flow.before[buffer] + 1
        return "from ", el("a", f"forward {number}", href=f"#{flow.forward}-{number}")
    return ("input",)


def _destination(flow: Flow, step: int, buffer: str) -> tuple[str | Markup, ...]:
    words: list[str | Markup] = []
    for reader in flow.readers.get((step, buffer), ()):
        words += [", " if words else "to ", _link(flow, reader)]
    if flow.final[buffer] != step:
        return tuple(words)
    if buffer in flow.kept:
        words += ["; " if words else "", "kept for the backward"]
    if buffer in flow.results:
        words += ["; " if words else "", "result"]
    return tuple(words)


def _width(flow: Flow) -> int:
    """Of the lanes and the marks, in pixels."""
    return (max(flow.lanes.values(), default=-1) + 1) * LANE + 22


def _lanes(flow: Flow, step: int, kind: str) -> Markup:
    """The stretch of every lane that runs past one call or ends at it, and the call's mark."""
    at = _width(flow) - 11
    drawn: list[Markup] = []
    for tensor, lane in flow.lanes.items():
        (start, buffer), end = tensor, flow.readers[tensor][-1]
        if not start <= step <= end:
            continue
        x = at - 11 - lane * LANE
        top, bottom = "0" if step > start else str(MARK), "100%" if step < end else str(MARK)
        drawn.append(el("line", el("title", buffer), x1=x, x2=x, y1=top, y2=bottom))
        if step == start or step in flow.readers[tensor]:
            drawn.append(el("line", x1=x, x2=at, y1=MARK, y2=MARK))
            drawn.append(el("circle", el("title", buffer), cx=x, cy=MARK, r=3 if step == start else 2))
    return el("svg", drawn, _mark(kind, at, MARK), class_="lanes", width=_width(flow), aria_hidden="true")


def _mark(kind: str, x: int, y: int) -> Markup:
    if kind == "generated":
        return el("circle", cx=x, cy=y, r=6, class_=f"mark {kind}")
    if kind == "extern":
        corners = f"{x},{y - 7} {x + 7},{y} {x},{y + 7} {x - 7},{y}"
        return el("polygon", points=corners, class_=f"mark {kind}")
    return el("rect", x=x - 6, y=y - 6, width=12, height=12, class_=f"mark {kind}")


_STYLE = """
nav .entry { margin-right: 14px; white-space: nowrap; }
.legend { list-style: none; padding: 0; margin: 14px 0 0; display: flex; flex-wrap: wrap; gap: 0 22px;
  font-size: 14px; color: var(--soft); }
.legend svg { vertical-align: -3px; margin-right: 8px; }
.opaque { --own: var(--opaque); }
.generated { --own: var(--generated); }
.extern { --own: var(--extern); }
.mark { fill: var(--page); stroke: var(--own); stroke-width: 2; }
.mark.ours, .mark.generated { fill: var(--own); }
.share { display: flex; height: 14px; border-radius: 4px; overflow: hidden; margin: 8px 0; background: var(--edge); }
.share i, .swatch { background: var(--own); }
.share i + i { border-left: 2px solid var(--page); }
.share i.opaque:not(.ours), .swatch.opaque:not(.ours) { opacity: 0.55; }
.swatch { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 8px; }
.flow { list-style: none; padding: 0; margin: 10px 0; }
.flow > li { display: flex; scroll-margin-top: 12px; position: relative; }
.flow svg { position: absolute; left: 0; top: 0; height: 100%; overflow: visible; }
.flow svg line { stroke: var(--lane); stroke-width: 1.5; }
.flow svg circle:not(.mark) { fill: var(--lane); }
.card { flex: 1; min-width: 0; margin: 4px 0; padding: 8px 14px; background: var(--card); border: 1px solid var(--edge);
  border-left: 4px solid var(--own); border-radius: 6px; display: grid; gap: 2px 20px;
  align-content: start; grid-template-columns: minmax(0, 1fr) 330px; }
.flow > li:target .card { outline: 2px solid var(--own); }
.card > * { grid-column: 1; }
.title { display: flex; gap: 10px; align-items: baseline; }
.step { color: var(--soft); font-variant-numeric: tabular-nums; min-width: 18px; }
.name { font-weight: 600; }
.badge { color: var(--own); font-size: 13px; padding-left: 28px; }
.card dl { margin: 2px 0; padding-left: 28px; font-size: 14px; }
.card dl > div { display: flex; gap: 10px; }
.card dt { color: var(--soft); flex: none; width: 74px; }
.card dd { margin: 0; min-width: 0; overflow-wrap: anywhere; }
.card dd code { background: var(--page); border: 1px solid var(--edge); border-radius: 4px; padding: 0 5px;
  margin-right: 2px; }
.card details { padding-left: 28px; font-size: 14px; grid-column: 1 / -1; }
.card caption { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
.card summary { color: var(--soft); }
.card .bars { grid-column: 2; grid-row: 1 / span 2; font-size: 13px; align-self: start; }
.bars > div { display: grid; grid-template-columns: 44px 1fr 76px; gap: 8px; align-items: center; }
.bars span:first-child { color: var(--soft); }
.bar { height: 10px; background: var(--edge); border-radius: 3px; overflow: hidden; }
.bar i { display: block; height: 100%; min-width: 1px; background: var(--own); }
.bars b { text-align: right; font-weight: 500; font-variant-numeric: tabular-nums; white-space: nowrap; }
@media (max-width: 720px) {
  main { padding: 14px 12px 40px; }
  .lanes { display: none; }
  .flow > li { padding-left: 0 !important; }
  .card { grid-template-columns: minmax(0, 1fr); padding: 8px 10px; }
  .card .bars { grid-column: 1; grid-row: auto; }
  .card dl, .badge, .card details { padding-left: 0; }
}
"""
