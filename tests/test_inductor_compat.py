"""Private names of Inductor: each exists here, and one that is missing costs a tier, in words, and nothing else."""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import operator
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import vsa_inductor as vsa
from vsa_inductor import exporting, lowerings
from vsa_inductor.lowerings import _inductor_compat as compat
from vsa_inductor.lowerings import _inductor_compat_capture as capture
from vsa_inductor.lowerings import _inductor_compat_registration as registration

SOURCE = Path(compat.__file__)
PACKAGE = "torch._inductor"
NEEDED = [f"{module}.{name}" for module, names in registration.NEEDED.items() for name in names]
# Looked up by `register_decomposition` itself, which is registration too.
FOR_DECOMPOSITIONS = ["decomposition.decompositions", "decomposition.fast_random_decomps"]
# Entry point, module, name.
FOR_ENTRIES = [
    (entry, module, name)
    for entry, needed in capture.NEEDED.items()
    for module, names in needed.items()
    for name in names
    # Without config.patch nothing of torch works.
    if not name.endswith("patch")
]
FOR_TRAFFIC = [(module, name) for module, names in capture.OPTIONAL["traffic"].items() for name in names]
FOR_MARKS = [(module, name) for module, names in capture.OPTIONAL["marks"].items() for name in names]
# What the capture file may not use unlooked: `torch._ops` and `torch.fx` are used everywhere.
PRIVATE = ("torch._inductor", "torch._dynamo", "torch._functorch", "torch._logging", "torch._dispatch")


def _imported(tree: ast.AST) -> dict[str, str]:
    """Local name -> dotted name below torch._inductor, of what a file imports or calls `_ir()`."""
    found = {"_ir()": "ir"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith(f"{PACKAGE}."):
            module = str(node.module)[len(PACKAGE) + 1 :]
            found |= {alias.asname or alias.name: f"{module}.{alias.name}".lstrip(".") for alias in node.names}
    return found


def _used(tree: ast.AST) -> Iterator[str]:
    """Dotted names below torch._inductor: imported ones, and attributes of modules and classes among them."""
    imported = _imported(tree)
    yield from (name for name in imported.values() if "." in name)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            first, _, rest = ast.unparse(node).partition(".")
            # `ops` answers to any name, and what stands behind V.graph is no module.
            if first in imported and first != "ops":
                yield ".".join((imported[first], *rest.split("."))[:3]).partition(".graph.")[0]


def _parent(name: str) -> tuple[Any, str]:
    """What holds the last part of a dotted name below torch._inductor, and that part."""
    module, _, rest = name.partition(".")
    holder, _, last = rest.rpartition(".")
    found = importlib.import_module(f"{PACKAGE}.{module}")
    return (operator.attrgetter(holder)(found) if holder else found), last


def _remove(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    _remove_from(monkeypatch, *_parent(name))


def _remove_from(monkeypatch: pytest.MonkeyPatch, parent: Any, last: str) -> None:
    classes = parent.__mro__ if isinstance(parent, type) else type(parent).__mro__
    # Settings stand in a table of their own.
    settings = getattr(parent, "_config", {})
    if last in settings:
        monkeypatch.delitem(settings, last)
    for owner in (parent, *classes):
        if last in vars(owner):
            monkeypatch.delattr(owner, last)


@pytest.fixture
def without(monkeypatch) -> Iterator[Any]:
    """Installs the lowerings with names missing, and puts the names back: Inductor itself has them by another name."""

    def install(*names: str) -> None:
        with monkeypatch.context() as missing:
            for name in names:
                _remove(missing, name)
            lowerings.install()

    yield install
    lowerings.install()
    assert set(lowerings.tiers().values()) == {"lowering"} and not lowerings.tier_reasons()


def test_registration_looks_up_every_name_that_the_file_uses():
    used = set(_used(ast.parse(SOURCE.read_text())))
    assert {"ir.ExternKernel.require_contiguous", "virtualized.V.graph", "graph.GraphLowering"} <= used
    for name in sorted(used):
        if not name.startswith(tuple(FOR_DECOMPOSITIONS)):
            assert any(f"{needed}.".startswith(f"{name}.") for needed in NEEDED), f"NEEDED lacks {name}"


def test_registration_looks_up_nothing_that_no_lowering_uses():
    read: set[str] = set()
    for path in SOURCE.parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                read.add(node.attr)
            elif isinstance(node, ast.ImportFrom):
                read |= {alias.name for alias in node.names}
    for name in NEEDED:
        assert name.rpartition(".")[2] in read, f"{name} is needed by nobody"


def test_importing_the_file_needs_no_private_name():
    tree = ast.parse(SOURCE.read_text())
    assert not _imported(ast.Module([node for node in tree.body if isinstance(node, ast.ImportFrom)], [])).keys() - {
        "_ir()"
    }


@pytest.mark.parametrize("name", NEEDED)
def test_a_missing_name_costs_every_operator_its_lowering_and_is_named(without, name):
    parent, last = _parent(name)
    assert hasattr(parent, last)
    without(name)
    assert set(lowerings.tiers().values()) == {"decomposition"}
    report = str(vsa.backend_report())
    for op, reason in lowerings.tier_reasons().items():
        assert reason.startswith("lowering: ") and last in reason
        assert f"{op} decomposition ({reason})" in report


@pytest.mark.parametrize("name", FOR_DECOMPOSITIONS)
def test_a_missing_name_of_decompositions_costs_nothing_where_lowerings_work(without, name):
    without(name)
    assert set(lowerings.tiers().values()) == {"lowering"}
    without(name, "ir.Scatter")
    assert set(lowerings.tiers().values()) == {"opaque"}
    for reason in lowerings.tier_reasons().values():
        assert "Scatter" in reason and name.rpartition(".")[2] in reason


@pytest.mark.parametrize("name", ["lowering.fallbacks", "lowering._maybe_layout_constraints"])
def test_tables_that_are_only_cleaned_up_may_be_missing(without, name):
    without(name)
    assert set(lowerings.tiers().values()) == {"lowering"}


@pytest.mark.parametrize(
    ("names", "tier"),
    [
        (("ir.MutationLayoutSHOULDREMOVE",), "decomposition"),
        (("lowering.pointwise_cat",), "decomposition"),
        (("graph.GraphLowering", "decomposition.decompositions"), "opaque"),
    ],
    ids=lambda value: value if isinstance(value, str) else " and ".join(value),
)
def test_what_compiles_without_a_name_equals_eager(without, names, tier):
    layout = vsa.TileLayout.from_video_shape(5, 4, 4)
    q, k, v, dout = (torch.randn(1, layout.num_tokens, 1, 16) for _ in range(4))

    def attend(q, k, v):
        return vsa.video_sparse_attention(q, k, v, layout, sparsity=0.5)

    def run(function):
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        out = function(*inputs)
        return out, *torch.autograd.grad(out, inputs, dout)

    without(*names)
    report = vsa.explain(attend, *(x.clone().requires_grad_() for x in (q, k, v)))
    found = {op.op: op.tier for graph in report.graphs for part in graph.directions for op in part.tiers}
    # Selection has no lowering: it is one opaque call on every tier.
    assert {found[op] for op in ("vsa.tile", "vsa.attention", "vsa.untile")} == {tier}
    for got, expected in zip(run(torch.compile(attend, fullgraph=True)), run(attend), strict=True):
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def _private_names(tree: ast.AST) -> set[str]:
    """Dotted names in :data:`PRIVATE` that a file imports or reads, and the settings that it patches."""
    imported = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level and str(node.module).startswith(PRIVATE):
            imported |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    used = set(imported.values())
    for node in ast.walk(tree):
        called = isinstance(node, ast.Call)
        source = ast.unparse(node.func) if called else ast.unparse(node) if isinstance(node, ast.Attribute) else ""
        first, dot, rest = source.partition(".")
        name = f"{imported[first]}{dot}{rest}" if first in imported else source
        if name.startswith(PRIVATE):
            used.add(name)
            used |= {
                f"{name.removesuffix('.patch')}.{k.arg}" for k in getattr(node, "keywords", ()) if name[-6:] == ".patch"
            }
    return used


def test_the_capture_file_looks_up_every_name_that_it_uses():
    used = _private_names(ast.parse(Path(capture.__file__).read_text()))
    assert {
        "torch._inductor.list_mode_options",
        "torch._functorch.config.enable_autograd_cache",
        "torch._logging._internal.log_state.artifact_names",
        "torch._inductor.ir.NonOwningLayout",
        "torch._inductor.debug.set_kernel_post_grad_provenance_tracing",
        "torch._dispatch.python.enable_python_dispatcher",
    } <= used
    tables = (*capture.NEEDED.values(), *capture.OPTIONAL.values())
    looked_up = {f"{module}.{name}" for table in tables for module, names in table.items() for name in names}
    for name in sorted(used):
        # What is read of a name, or on the way to one, has that name.
        known = any(f"{name}.".startswith(f"{one}.") or f"{one}.".startswith(f"{name}.") for one in looked_up)
        assert known, f"NEEDED and OPTIONAL lack {name}"


def test_importing_the_capture_file_needs_no_private_name():
    tree = ast.parse(Path(capture.__file__).read_text())
    assert not _private_names(ast.Module([node for node in tree.body if isinstance(node, ast.ImportFrom)], []))


def _take_away(monkeypatch: pytest.MonkeyPatch, module: str, name: str) -> None:
    """Removes a name of a module, a setting or a submodule."""
    found = importlib.import_module(module)
    first, _, rest = name.partition(".")
    holder, _, last = name.rpartition(".")
    for table, key in ((found, name), (getattr(found, first, None), rest)):
        if key in getattr(table, "_config", ()):
            monkeypatch.delitem(table._config, key)
            return
    if f"{module}.{name}" in sys.modules:
        # An import would find it here.
        monkeypatch.setitem(sys.modules, f"{module}.{name}", None)
    _remove_from(monkeypatch, operator.attrgetter(holder)(found) if holder else found, last)


_ENTRIES = {
    "explain": lambda path: vsa.explain(torch.sin, torch.ones(3)),
    "assert_recompiles": lambda path: capture.recompiles().__enter__(),
    "compile(mode=...)": lambda path: vsa.compile(torch.sin, backend="inductor", mode="reduce-overhead"),
    "export_training_step": lambda path: exporting.export_training_step(
        torch.nn.Linear(2, 2), lambda out: out.sum(), (torch.ones(3, 2),)
    ),
    "package": lambda path: exporting.package(
        torch.export.export(torch.nn.Linear(2, 2), (torch.ones(3, 2),)), path / "linear.pt2"
    ),
}


@pytest.mark.parametrize(("entry", "module", "name"), FOR_ENTRIES)
def test_an_entry_point_says_which_name_it_misses(entry, module, name, monkeypatch, tmp_path):
    words = f"{entry} reads {module}.{name}, which torch {torch.__version__} does not have; "
    _take_away(monkeypatch, module, name)
    with pytest.raises(RuntimeError, match=re.escape(words)):
        _ENTRIES[entry](tmp_path)


def test_an_entry_point_names_all_that_it_misses(monkeypatch):
    for name in ("_internal.log_state", "getArtifactLogger"):
        _take_away(monkeypatch, "torch._logging", name)
    words = "assert_recompiles reads torch._logging.getArtifactLogger and torch._logging._internal.log_state"
    with pytest.raises(RuntimeError, match=re.escape(words)):
        vsa.testing.assert_recompiles(torch.sin, [(torch.ones(3),)] * 2)


def test_compile_without_a_mode_needs_no_names_of_modes(monkeypatch):
    _take_away(monkeypatch, "torch._inductor", "list_mode_options")
    for mode in (None, "default"):
        x = torch.ones(3)
        torch.testing.assert_close(vsa.compile(torch.sin, backend="inductor", mode=mode)(x), x.sin())


def test_explain_without_the_ambient_options_says_that_it_used_defaults(monkeypatch):
    compiled = torch.compile(torch.sin, options={"max_autotune": True})
    assert "max_autotune" in capture.options_of(compiled)
    _take_away(monkeypatch, "torch._inductor.config", "get_config_copy")
    assert capture.options_of(compiled) is None
    assert "options that cannot be read" in str(vsa.explain(compiled, torch.ones(3)))


def _kernel_product_and_sort(x: torch.Tensor) -> torch.Tensor:
    """A kernel, a library call with one result and one with two: some names serve only one of them."""
    return (x.sin() @ x).sort().values


def test_with_all_names_all_traffic_is_known():
    moved = [call.bytes_read for call in vsa.explain(_kernel_product_and_sort, torch.ones(8, 8)).calls]
    assert len(moved) >= 3 and None not in moved


@pytest.mark.parametrize(("module", "name"), FOR_TRAFFIC)
def test_a_name_that_traffic_is_read_from_costs_the_traffic_only(module, name, monkeypatch):
    """Taken away only while the report reads it: Inductor itself has it by another way."""
    schedules, traffic = capture._schedules, capture._traffic

    @contextlib.contextmanager
    def schedules_without() -> Iterator[Any]:
        with contextlib.ExitStack() as stack:
            with monkeypatch.context() as patch:
                _take_away(patch, module, name)
                found = stack.enter_context(schedules())
            yield found

    def traffic_without(found: dict[str, Any]) -> Any:
        with monkeypatch.context() as patch:
            _take_away(patch, module, name)
            return traffic(found)

    monkeypatch.setattr(capture, "_schedules", schedules_without)
    monkeypatch.setattr(capture, "_traffic", traffic_without)
    moved = [call.bytes_read for call in vsa.explain(_kernel_product_and_sort, torch.ones(8, 8)).calls]
    assert len(moved) >= 3 and None in moved


@pytest.mark.parametrize(("module", "name"), FOR_MARKS)
def test_passes_are_off_without_any_of_their_names(module, name, monkeypatch):
    def load() -> Any:
        spec = importlib.util.spec_from_file_location(f"{capture.__package__}._again", capture.__file__)
        again = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(again)
        return again

    assert load().HAS_PASSES
    _take_away(monkeypatch, module, name)
    assert not load().HAS_PASSES and load().CustomGraphPass is object


_WITHOUT_PASSES = """
import warnings
import torch
import torch._inductor.compile_fx
import torch._inductor.custom_graph_pass as module
del module.CustomGraphPass, module.get_hash_for_files
import vsa_inductor as vsa
assert set(vsa.lowerings.tiers().values()) == {"lowering"}
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    compiled = vsa.compile(lambda x: x.sin() + 1, backend="inductor")
assert "no torch._inductor.custom_graph_pass.CustomGraphPass" in str(caught[-1].message), caught
x = torch.ones(3)
torch.testing.assert_close(compiled(x), x.sin() + 1)
"""


def test_the_package_imports_and_compiles_without_passes_and_says_so(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(_WITHOUT_PASSES)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
