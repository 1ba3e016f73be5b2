"""Compile caches in fresh processes: unchanged code hits, and what is changed or switched off is never answered stale.

A child process runs cases one after the other, each from a reset compiler, and says what the caches did: first with
nothing stored, then with everything stored, then with a lowering changed. Two cases have nothing but the operators'
backend argument, or nothing but the tag, to tell old code from new.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import vsa_inductor as vsa
from vsa_inductor import lowerings
from vsa_inductor.backends import identity

_CASES = """
import contextlib, json, sys
from unittest import mock
import torch
from torch._dynamo.utils import counters
cases, saved, loaded = json.loads(sys.argv[1])
import vsa_inductor as vsa
from vsa_inductor.backends import identity

if loaded:
    with open(loaded, "rb") as file:
        assert torch.compiler.load_cache_artifacts(file.read()) is not None

def nothing():
    pass

@contextlib.contextmanager
def case(name):
    with contextlib.ExitStack() as stack:
        if name != "as imported":
            stack.enter_context(torch.compiler.config.patch(cache_key_tag="mine"))
        if name.startswith("argument alone"):
            stack.enter_context(mock.patch.object(identity, "keep_cache_key_tag", nothing))
        if name.endswith("decomposition"):
            stack.enter_context(vsa.lowerings.use_tier("decomposition"))
        if name.endswith("recognition off"):
            stack.enter_context(vsa.lowerings.norm_rope_tile.recognising(False))
        yield

layout = vsa.TileLayout.from_video_shape(3, 4, 5)
def f(q, gate):
    return vsa.video_sparse_attention(q, q, q, layout, sparsity=0.5, gate=gate)

def run(name):
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    q, gate, dout = (torch.randn(1, layout.num_tokens, 1, 16) for _ in range(3))
    # Without gradients of q the backward holds no operator with a backend argument.
    inputs = [gate.requires_grad_()] if name == "tag alone" else [gate.requires_grad_(), q.requires_grad_()]
    with case(name):
        results = []
        for function in (torch.compile(f, fullgraph=True), f):
            out = function(q, gate)
            results.append([out, *torch.autograd.grad(out, inputs, dout)])
        tag = torch.compiler.config.cache_key_tag
    found = {f"{cache} {what}": counters[group][f"{prefix}_{what}"]
        for cache, group, prefix in (("fx", "inductor", "fxgraph_cache"), ("aot", "aot_autograd", "autograd_cache"))
        for what in ("hit", "miss", "bypass")}
    return {**found, "tag": tag, "factor": (results[0][1] / results[1][1]).median().item(),
            "error": max((a - b).abs().max().item() for a, b in zip(*results))}

answers = {name: run(name) for name in cases}
if saved:
    with open(saved, "wb") as file:
        file.write(torch.compiler.save_cache_artifacts()[0])
print(json.dumps(answers))
"""
ALONE = "argument alone"
SWITCHED = (f"{ALONE}, decomposition", f"{ALONE}, recognition off")
CASES = ("as imported", ALONE, *SWITCHED, "tag alone")


def _python(package: Path, caches: Path, script: str, *arguments: str) -> dict[str, Any]:
    environment = {**os.environ, "PYTHONPATH": str(package), "TORCHINDUCTOR_CACHE_DIR": str(caches)}
    file = package / "script.py"
    file.write_text(script)
    command = [sys.executable, str(file), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def _run(
    package: Path, caches: Path, cases: tuple[str, ...] = CASES, saved: Path | None = None, loaded: Path | None = None
) -> dict[str, Any]:
    names = [None if path is None else str(path) for path in (saved, loaded)]
    return _python(package, caches, _CASES, json.dumps([cases, *names]))


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    """A copy of the package, as an installation lays it out."""
    root = tmp_path_factory.mktemp("site")
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(vsa.__file__).parent, root / "vsa_inductor", ignore=ignore)
    rooms = Path(lowerings.__file__).parent
    shutil.copytree(rooms, root / "vsa_inductor" / "lowerings", ignore=ignore, dirs_exist_ok=True)
    return root


@pytest.fixture
def package(original, tmp_path) -> Path:
    """Such a copy that a test may change."""
    return shutil.copytree(original, tmp_path / "site")


@pytest.fixture(scope="module")
def first(original, tmp_path_factory) -> tuple[dict[str, Any], Path, Path]:
    """What the first process found, the caches it filled and the artifacts it saved."""
    caches, artifacts = tmp_path_factory.mktemp("caches"), tmp_path_factory.mktemp("artifacts") / "artifacts"
    return _run(original, caches, saved=artifacts), caches, artifacts


def _edit(path: Path, old: str, new: str) -> None:
    source = path.read_text()
    assert source.count(old) == 1, f"{path.name} no longer says {old!r}"
    path.write_text(source.replace(old, new))


def _missed(answer: dict[str, Any]) -> bool:
    """Nothing was answered: the pair of graphs, the forward and the backward were compiled."""
    assert not answer["aot bypass"] and not answer["fx bypass"]
    return (answer["aot hit"], answer["fx hit"], answer["aot miss"], answer["fx miss"]) == (0, 0, 1, 2)


def _hit(answer: dict[str, Any]) -> bool:
    assert not answer["aot bypass"] and not answer["fx bypass"]
    return answer["aot hit"] == 1 and not answer["aot miss"] and not answer["fx miss"]


def test_nothing_is_stored_at_first_and_every_switch_has_a_key_of_its_own(first):
    """One function throughout: with the tag overwritten, only the backend argument says what is switched off."""
    answers = first[0]
    assert tuple(answers) == CASES
    for name, answer in answers.items():
        assert _missed(answer), (name, answer)
        assert answer["error"] < 1e-5, (name, answer)
    for name in (ALONE, *SWITCHED):
        assert answers[name]["tag"] == "mine", "else the argument is not alone"
    # The user assigned "mine"; tracing put ours back behind it.
    assert answers["tag alone"]["tag"] == f"mine;{answers['as imported']['tag']}"


def test_unchanged_code_hits_in_another_process(first, original):
    for name, answer in _run(original, first[1]).items():
        assert _hit(answer), (name, answer)
        assert answer["error"] < 1e-5, (name, answer)


def test_saved_artifacts_answer_where_the_cache_is_empty(first, original, tmp_path):
    answer = _run(original, tmp_path / "caches", ("as imported",), loaded=first[2])["as imported"]
    assert _hit(answer), answer
    assert answer["error"] < 1e-5


def test_a_changed_lowering_is_never_answered_from_the_cache(first, package):
    _edit(package / "vsa_inductor/lowerings/gated_combine.py", "return load(", "return _twice(load)(")
    with (package / "vsa_inductor/lowerings/gated_combine.py").open("a") as file:
        file.write("\n\ndef _twice(load):\n    return lambda index: load(index) + load(index)\n")
    for name, answer in _run(package, first[1]).items():
        # The gate's gradient is made from the rows that the changed lowering doubles.
        factor = 2
        if name.endswith("decomposition"):
            # No lowering of ours is left in the two graphs that were traced afresh: what they are now may be stored.
            factor = 1
            assert (answer["aot hit"], answer["aot miss"]) == (0, 1), (name, answer)
        else:
            assert _missed(answer), (name, answer)
        assert answer["factor"] == pytest.approx(factor, abs=1e-4), (name, answer)


def test_a_changed_reference_is_never_answered_from_the_cache(first, package):
    """What a decomposition traces is a reference, and no part of the graph that Inductor's key is made from."""
    name = SWITCHED[0]
    # Eager goes the same way: only a stale compiled graph differs from it.
    _edit(package / "vsa_inductor/reference/gated_combine.py", "return rows.transpose", "return 2 * rows.transpose")
    answer = _run(package, first[1], (name,))[name]
    assert _missed(answer)
    assert answer["error"] < 1e-5, answer


_OTHER = """
from torch._inductor import config, decomposition, lowering
from torch._inductor.custom_graph_pass import CustomGraphPass
torch.library.define("other::scale", "(Tensor x) -> Tensor")
torch.library.define("other::shift", "(Tensor x) -> Tensor")
for name in ("scale", "shift"):
    torch.library.impl(f"other::{name}", "CompositeExplicitAutograd", torch.clone)
    torch.library.register_fake(f"other::{name}", torch.empty_like)
lowering.register_lowering(torch.ops.other.scale.default)(lambda x: lowering.lowerings[torch.ops.aten.mul.Tensor](x, 3))
decomposition.decompositions[torch.ops.other.shift.default] = lambda x: x + 7
class Pass(CustomGraphPass):
    graphs = 0
    def __call__(self, graph):
        Pass.graphs += 1
    def uuid(self):
        return sys.argv[1]
config.post_grad_custom_post_pass = Pass()
torch.compiler.config.cache_key_tag = "other library"
def other(x):
    return torch.ops.other.shift(torch.ops.other.scale(x))
"""
_COMPILE_OTHER = """
assert torch.equal(torch.compile(other)(torch.ones(8)), torch.full((8,), 10.0)) and Pass.graphs == 1
"""
_OURS = """
import vsa_inductor as vsa
"""
_COMPILE_BOTH = """
import json
layout = vsa.TileLayout.from_video_shape(3, 4, 5)
q = torch.randn(1, layout.num_tokens, 1, 16)
def both(q):
    return other(vsa.video_sparse_attention(q, q, q, layout, sparsity=0.5))
before = Pass.graphs
error = (torch.compile(both, fullgraph=True)(q) - (vsa.video_sparse_attention(q, q, q, layout, sparsity=0.5) * 3 + 7))
print(json.dumps({
    "error": error.abs().max().item(),
    "passes": Pass.graphs - before,
    "tag": torch.compiler.config.cache_key_tag,
    "tiers": vsa.lowerings.tiers(),
}))
"""


@pytest.mark.parametrize(
    "parts",
    [
        (_OTHER, _COMPILE_OTHER, _OURS),
        (_OURS, _OTHER, _COMPILE_OTHER),
    ],
    ids=["another library and its first compilation, then ours", "ours, then another library"],
)
def test_another_library_and_ours_hold_together_in_either_order(parts, original, first):
    # Neither order may be answered from what the other one stored.
    own_key = str(parts.index(_OURS))
    answer = _python(original, first[1], "".join(("import sys, torch", *parts, _COMPILE_BOTH)), own_key)
    assert answer["error"] < 1e-5, "its lowering and its decomposition, and our results"
    assert answer["passes"] == 1
    assert answer["tag"].startswith("other library;vsa_inductor@") and answer["tag"].count("vsa_inductor@") == 1
    assert set(answer["tiers"].values()) == {"lowering"}


@pytest.mark.parametrize("room", ["ops", "backends", "reference", "lowerings", "kernels"])
def test_every_room_is_part_of_the_identity(room, package, monkeypatch):
    root = package / "vsa_inductor"
    monkeypatch.setattr(identity, "_PACKAGE", root)
    monkeypatch.setattr(identity, "_lowerings", lambda: (root / "lowerings",))

    def identities() -> tuple[str, ...]:
        identity.lowering_hash.cache_clear()
        identity.backend_identity.cache_clear()
        return tuple(identity.backend_identity(*names) for names in (("eager", "reference"), ("triton", "kernels")))

    try:
        before = identities()
        assert identities() == before
        with (root / room / "gated_combine.py" if room != "backends" else root / room / "contract.py").open("a") as f:
            f.write("# changed\n")
        eager, triton = (a != b for a, b in zip(before, identities(), strict=True))
        # Kernels of one backend say nothing about the others.
        assert triton and eager == (room != "kernels")
    finally:
        monkeypatch.undo()
        identities()


@pytest.mark.parametrize(
    ("tag", "expected"),
    [
        ("", "{ours}"),
        ("theirs", "theirs;{ours}"),
        ("theirs;vsa_inductor@00000000+tier=opaque;too", "theirs;{ours};too"),
        ("vsa_inductor@00000000 and mine", "{ours} and mine"),
    ],
)
def test_our_part_of_the_tag_is_kept_once_and_the_rest_stays(tag, expected):
    with torch.compiler.config.patch(cache_key_tag=tag):
        for _ in range(2):
            identity.keep_cache_key_tag()
            assert torch.compiler.config.cache_key_tag == expected.format(
                ours=f"vsa_inductor@{identity.lowering_hash()}"
            )


def test_a_switch_compiles_again_in_the_same_process():
    """Dynamo guards the switches: no cache is asked, and yet nothing compiled before answers."""
    layout = vsa.TileLayout.from_video_shape(5, 4, 4)
    q = torch.randn(1, layout.num_tokens, 1, 16)
    graphs: list[list[str]] = []

    def backend(gm, inputs):
        names = [node.args[-2] for node in gm.graph.nodes if node.target is torch.ops.vsa.attention]
        graphs.append(names)
        return gm.forward

    @torch.compile(backend=backend, fullgraph=True)
    def f(q):
        return vsa.video_sparse_attention(q, q, q, layout, sparsity=0.5)

    plain = vsa.backends.capability.backend_named("eager").identity
    f(q)
    with lowerings.use_tier("opaque"):
        f(q)
        assert identity.switches == "+tier=opaque" and torch.compiler.config.cache_key_tag.endswith("+tier=opaque")
        with lowerings.norm_rope_tile.recognising(False):
            f(q)
    f(q)
    assert graphs == [[plain], [f"{plain}+tier=opaque"], [f"{plain}+recognition=off+tier=opaque"]]
    assert identity.switches == "" and "+" not in torch.compiler.config.cache_key_tag.partition("vsa_inductor@")[2]


def test_an_unknown_tier_is_refused_and_changes_nothing():
    before = lowerings.tiers()
    with pytest.raises(ValueError, match="'fast'; allowed: one of"), lowerings.use_tier("fast"):
        pass
    assert lowerings.tiers() == before and identity.switches == ""
