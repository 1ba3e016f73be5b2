"""The page of a report: it shows what the report holds, stands alone, and no text in it becomes markup."""

import dataclasses
import itertools
import json
import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

import vsa_inductor as vsa
from vsa_inductor import page
from vsa_inductor.__main__ import main
from vsa_inductor.backends.capability import Refusal
from vsa_inductor.lowerings._captured import TensorAccess
from vsa_inductor.region_flow import MAX_LANES, flow_of
from vsa_inductor.reporting import (
    BackendUse,
    Call,
    CompiledDirection,
    CompiledGraph,
    GraphBreak,
    GraphOutput,
    OpTier,
    RegionReport,
    size_of,
)


def _tensor(buffer: str, num_bytes: int = 1024) -> TensorAccess:
    return TensorAccess(buffer, (num_bytes // 4,), "float32", num_bytes)


def _call(
    name: str, kind: str, reads: list[TensorAccess], writes: list[TensorAccess], direction: str = "forward", **more: Any
) -> Call:
    return Call(0, direction, kind, name, name.startswith("vsa."), reads=tuple(reads), writes=tuple(writes), **more)


def _region() -> RegionReport:
    """A norm, a product, sparse attention and a sum, with what the backward does with what is kept."""
    x, w, a, b, c, d = (
        _tensor(name, size)
        for name, size in zip(("x", "w", "a", "b", "c", "d"), (1 << n for n in range(10, 16)), strict=True)
    )
    forward = (
        _call("triton_norm", "triton", [x], [a], fused=("aten.pow", "aten.rsqrt"), sources=("rms_norm",)),
        _call("mm", "extern", [a, w], [b], sources=("linear",)),
        _call("vsa.attention_triton", "opaque", [a, b], [c], instead_of="everything"),
        _call("triton_sum", "triton", [a, c], [d], fused=("aten.add",), sources=("add",)),
        _call("triton_sum", "triton", [d], [d], fused=("aten.add",), sources=("add",)),
        dataclasses.replace(_call("cpp_unknown", "cpp", [], []), reads=None, writes=None),
    )
    backward = (_call("aten.sort", "opaque", [_tensor("saved", 4096)], [_tensor("g")], "backward"),)
    directions = (
        CompiledDirection(
            "forward",
            forward,
            (OpTier("vsa.tile", 3, "lowering", "generated code"),),
            "",
            ("x", "w"),
            (GraphOutput("y", d), GraphOutput("saved", b), GraphOutput("x", x)),
        ),
        CompiledDirection(
            "backward", backward, (), "", ("saved", "x", "tangents_1"), (GraphOutput("dx", _tensor("g")),)
        ),
    )
    refusal = Refusal("eager", "backward", "asked for nothing; supported: everything")
    use = BackendUse(0, "attention_1", "triton@1", "triton@2", (refusal,))
    return RegionReport((CompiledGraph(0, directions),), (), (use,), ("something costs time",), "2.13.0")


class Page(HTMLParser):
    """What a browser makes of a page: its elements, its text, and whether every element ends where it should."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(source)
        self.close()
        assert not self._open, self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag != "meta":
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open and self._open.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] not in ("style", "title"):
            self.texts.append(data)

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def named(self, attribute: str) -> list[str | None]:
        return [attributes[attribute] for _, attributes in self.elements if attribute in attributes]


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _strings(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _strings(inner)


HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>&lt;</style></pre><!--"


def _hostile(value: Any, path: str = "") -> Any:
    """The same report with every text that a user or a library chose replaced."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        # What the report itself decides on; the code is not part of the page.
        fixed = ("kind", "direction", "code")
        changes = {
            name.name: _hostile(getattr(value, name.name), name.name)
            for name in dataclasses.fields(value)
            if name.name not in fixed
        }
        return dataclasses.replace(value, **changes)
    if isinstance(value, tuple):
        return tuple(_hostile(inner, path) for inner in value)
    return f"{HOSTILE}{value}" if isinstance(value, str) and value else value


class TestPage:
    def test_every_text_of_the_document_is_shown(self) -> None:
        report = _region()
        document = report.to_dict()
        # Inputs and outputs are shown as where tensors come from and go to.
        for direction in document["graphs"][0]["directions"]:
            del direction["inputs"], direction["outputs"]
        shown = Page(report.to_html()).text.lower()
        assert {text for text in _strings(document) if text.lower() not in shown} == {"extern"}
        assert "library call" in shown

    def test_bytes_of_every_call_and_their_sums(self) -> None:
        report = _region()
        shown = Page(report.to_html()).texts
        sizes = [text for text in shown if re.fullmatch(r"unknown|[\d.]+ (?:B|[KMGT]iB)", text)]
        for call in report.calls:
            assert size_of(call.bytes_read) in sizes and size_of(call.bytes_written) in sizes
        forward = report.graphs[0].directions[0]
        assert size_of(forward.bytes_read) in Page(report.to_html()).text
        assert (forward.bytes_read, forward.unknown) == (
            1024 + (4096 + 2048) + (4096 + 8192) + (4096 + 16384) + 32768,
            1,
        )
        assert "1 call of unknown traffic left out" in Page(report.to_html()).text

    def test_stands_alone(self) -> None:
        source = _region().to_html()
        parsed = Page(source)
        assert not {"script", "img", "link", "iframe", "object"} & {tag for tag, _ in parsed.elements}
        assert not parsed.named("src") and all(href and href.startswith("#") for href in parsed.named("href"))
        assert "url(" not in source and "@import" not in source and "//" not in source
        assert any(value and "default-src 'none'" in value for value in parsed.named("content"))

    def test_links_lead_somewhere(self) -> None:
        parsed = Page(_region().to_html())
        ids = parsed.named("id")
        assert len(ids) == len(set(ids))
        assert {href[1:] for href in parsed.named("href") if href} <= set(ids)
        assert set(parsed.named("aria-labelledby")) <= set(ids)

    def test_headings_and_tables_tell_what_they_are(self) -> None:
        elements = Page(_region().to_html()).elements
        tags = [tag for tag, _ in elements]
        levels = [int(tag[1]) for tag in tags if re.fullmatch("h[1-6]", tag)]
        assert levels[0] == 1 and levels.count(1) == 1
        assert all(below - above <= 1 for above, below in itertools.pairwise(levels))
        assert tags.count("caption") == tags.count("table") > 0
        assert all(attributes.get("scope") == "col" for tag, attributes in elements if tag == "th")
        assert ("html", {"lang": "en"}) in elements

    def test_text_stays_text(self) -> None:
        calm, hostile = _region(), _hostile(_region())
        breaks = tuple(GraphBreak(HOSTILE, 3, f"{HOSTILE}\n  because") for _ in range(2))
        parsed = Page(dataclasses.replace(hostile, breaks=breaks).to_html())
        expected = Page(dataclasses.replace(calm, breaks=(GraphBreak("f", 3, "g\n  because"),) * 2).to_html())
        assert {tag for tag, _ in parsed.elements} == {tag for tag, _ in expected.elements}
        assert {name for _, attributes in parsed.elements for name in attributes} == {
            name for _, attributes in expected.elements for name in attributes
        }
        assert parsed.text.count(HOSTILE) > 20

    def test_a_file_name_that_is_no_text(self) -> None:
        broken = RegionReport((), (GraphBreak("f\udcff.py", 1, ""),), (), ())
        assert b"f\\udcff.py:1" in broken.to_html().encode()

    def test_breaks_come_first_and_whole(self) -> None:
        found = GraphBreak("model.py", 12, "Failed to trace\n  Hint: try something else")
        shown = Page(dataclasses.replace(_region(), breaks=(found,)).to_html()).text
        assert "Not one region: 1 graph, 1 graph break." in shown
        assert shown.index("model.py:12") < shown.index(found.reason) < shown.index("Graph 0")
        assert "One graph, no graph break." in Page(_region().to_html()).text

    def test_nothing_compiled(self) -> None:
        assert "Not one region: 0 graphs, 0 graph breaks." in Page(RegionReport((), (), (), ()).to_html()).text

    def test_the_document_survives_json(self) -> None:
        report = _region()
        document = json.loads(report.to_json())
        forward = document["graphs"][0]["directions"][0]
        assert [call["bytes_read"] for call in forward["calls"]] == [1024, 6144, 12288, 20480, 32768, None]
        assert forward["calls"][0]["reads"] == [{"buffer": "x", "shape": [256], "dtype": "float32", "num_bytes": 1024}]
        assert [kept["name"] for kept in document["graphs"][0]["kept"]] == ["saved"]
        assert (document["one_region"], document["torch"]) == (True, "2.13.0")


class TestFlow:
    def test_who_makes_and_who_reads(self) -> None:
        (graph,) = _region().graphs
        flow = flow_of(graph, graph.directions[0])
        assert flow.readers == {(0, "a"): [1, 2, 3], (1, "b"): [2], (2, "c"): [3], (3, "d"): [4]}
        assert flow.writer[2, "a"] == 0 and (0, "x") not in flow.writer
        assert (flow.kept, flow.results) == ({"b": "saved"}, {"d", "x"})
        assert flow_of(graph, graph.directions[1]).before == {"saved": 1}

    def test_in_words(self) -> None:
        parsed = Page(_region().to_html())
        shown = parsed.text
        for words in ("to 2, 3, 4", "from 1", "from forward 2", "to 3; kept for the backward", "as in 4", "input"):
            assert words in shown
        # Of two calls that write a result, the last leaves it.
        assert parsed.texts.count("result") == 2 and "to 5result" not in shown.replace("; ", "")

    def test_tensors_that_are_alive_at_once_have_lanes_of_their_own(self) -> None:
        (graph,) = _region().graphs
        flow = flow_of(graph, graph.directions[0])
        for (start, name), lane in flow.lanes.items():
            for (other_start, other), other_lane in flow.lanes.items():
                alive = other_start <= flow.readers[start, name][-1] and start <= flow.readers[other_start, other][-1]
                assert name == other or not alive or lane != other_lane
        assert len(flow.lanes) == 4

    def test_no_more_lanes_than_there_is_room_for(self) -> None:
        tensors = [_tensor(f"buf{number}") for number in range(MAX_LANES + 3)]
        calls = (_call("a", "opaque", [], tensors), _call("b", "opaque", tensors, []))
        graph = CompiledGraph(0, (CompiledDirection("inference", calls, (), ""),))
        flow = flow_of(graph, graph.directions[0])
        assert (len(flow.lanes), flow.undrawn) == (MAX_LANES, 3)
        assert "3 tensors of more than 12 at once not drawn" in Page(RegionReport((graph,), (), (), ()).to_html()).text


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_can_be_told_apart(scheme: str) -> None:
    """Contrast as WCAG 2.2 defines it: 4.5 for text, 3 for what is drawn."""
    light, dark = (dict(re.findall(r"--([\w-]+): (#\w{6})", part)) for part in page._STYLE.split("@media", 1))
    colours = light if scheme == "light" else dark
    assert light.keys() == dark.keys()

    def luminance(colour: str) -> float:
        channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return sum(share * value for share, value in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    def contrast(one: str, other: str) -> float:
        darker, lighter = sorted((luminance(colours[one]), luminance(colours[other])))
        return (lighter + 0.05) / (darker + 0.05)

    for text in ("text", "soft", "opaque", "generated", "extern", "bad", "good"):
        for back in ("page", "card"):
            assert contrast(text, back) >= 4.5, (text, back)
    for text in ("text", "bad"):
        assert contrast(text, "bad-back") >= 4.5
    assert contrast("lane", "page") >= 3


class TestCommands:
    def test_report(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = tmp_path / "report.html"
        assert main(["report", "--json", "--html", str(path)]) == 0
        printed = capsys.readouterr()
        document = json.loads(printed.out)
        assert "wrote" in printed.err
        assert document["devices"][0]["backends"] == ["eager"]
        shown = Page(path.read_text(encoding="utf-8")).text
        missing = {text for text in _strings(document) if text not in shown}
        assert not missing and all(op in shown for op in document["tiers"])

    def test_explain_writes_the_page_of_a_broken_function_too(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        step = "def step(x):\n    print(end='')\n    return x + 1\n"
        made = "def made():\n    return step, torch.ones(3)\n"
        (tmp_path / "steps_for_a_page.py").write_text(f"import torch\n{step}{made}")
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "path", list(sys.path))
        path = tmp_path / "page.html"
        assert main(["explain", "steps_for_a_page:made", "--html", str(path)]) == 1
        assert "1 graph break" in capsys.readouterr().out
        shown = Page(path.read_text(encoding="utf-8")).text
        assert "steps_for_a_page.py:3" in shown and "aten.add" in shown

    def test_a_page_that_cannot_be_written(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["report", "--html", str(tmp_path / "missing" / "page.html")]) == 2
        assert "--html" in capsys.readouterr().err


def test_a_compiled_attention() -> None:
    """What is kept and read again is found in what torch really generates."""
    layout = vsa.TileLayout.from_video_shape(5, 4, 4)
    q, k, v = (torch.randn(1, layout.num_tokens, 1, 16, requires_grad=True) for _ in range(3))
    report = vsa.explain(
        vsa.compile(lambda q, k, v: vsa.video_sparse_attention(q, k, v, layout, sparsity=0.5)), q, k, v
    )
    (graph,) = report.graphs
    forward, backward = (flow_of(graph, direction) for direction in graph.directions)
    attention = next(at for at, call in enumerate(report.calls) if call.name == "vsa.attention_eager")
    tiles = [access.buffer for access in forward.calls[attention].reads[:3]]
    # q, k and v in tile order come from a kernel and are kept.
    assert all((attention, tile) in forward.writer and tile in forward.kept for tile in tiles)
    again = next(call for call in backward.calls if call.name == "vsa.attention_backward_eager")
    assert {forward.kept[tile] for tile in tiles} <= {access.buffer for access in again.reads}
    assert {forward.kept[tile] for tile in tiles} <= backward.before.keys()
    shown = Page(report.to_html()).text
    assert "vsa.attention_eager" in shown and "kept for the backward" in shown and "triton" in shown
