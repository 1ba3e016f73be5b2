"""Private names of Inductor: each exists here, and one that is missing costs a tier, in words, and nothing else."""

from __future__ import annotations

import ast
import importlib
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
from vsa_inductor import lowerings
from vsa_inductor.lowerings import _inductor_compat as compat
from vsa_inductor.lowerings import _inductor_compat_capture as capture

SOURCE = Path(compat.__file__)
PACKAGE = "torch._inductor"
NEEDED = [f"{module}.{name}" for module, names in compat.NEEDED.items() for name in names]
# Looked up by `register_decomposition` itself, which is registration too.
FOR_DECOMPOSITIONS = ["decomposition.decompositions", "decomposition.fast_random_decomps"]
FOR_REPORTS = [(module, name) for module, names in capture.NEEDED.items() for name in names]


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


# Without config.patch nothing of torch works.
@pytest.mark.parametrize(("module", "name"), [pair for pair in FOR_REPORTS if not pair[1].endswith("patch")])
def test_explain_says_which_name_it_misses(module, name, monkeypatch):
    holder, _, last = name.rpartition(".")
    found = importlib.import_module(module)
    _remove_from(monkeypatch, operator.attrgetter(holder)(found) if holder else found, last)
    with pytest.raises(
        RuntimeError, match=re.escape(f"explain reads {module}.{name}, which torch {torch.__version__}")
    ):
        vsa.explain(torch.sin, torch.ones(3))


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
