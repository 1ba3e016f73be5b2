"""Compile caches in fresh processes: unchanged code hits, changed lowerings are never answered from the cache."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import vsa_inductor
from vsa_inductor import lowerings

_SCRIPT = """
import json
import torch
torch.compiler.config.cache_key_tag = "another library"
{before}
import vsa_inductor as vsa
{after}
layout = vsa.TileLayout.from_video_shape(3, 4, 5)
torch.manual_seed(0)
q = torch.randn(1, layout.num_tokens, 1, 16)
def f(q):
    return vsa.video_sparse_attention(q, q, q, layout, sparsity=0.5, gate={gate})
out = torch.compile(f, fullgraph=True)(q)
from torch._dynamo.utils import counters
print(json.dumps({{
    "hits": counters["inductor"]["fxgraph_cache_hit"],
    "misses": counters["inductor"]["fxgraph_cache_miss"],
    "ratio": (out / f(q)).mean().item(),
    "tag": torch.compiler.config.cache_key_tag,
}}))
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory) -> Path:
    """A copy of the package, as an installation lays it out, that a test may change."""
    root = tmp_path_factory.mktemp("site")
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(vsa_inductor.__file__).parent, root / "vsa_inductor", ignore=ignore)
    shutil.copytree(
        Path(lowerings.__file__).parent, root / "vsa_inductor" / "lowerings", ignore=ignore, dirs_exist_ok=True
    )
    return root


def _run(package: Path, caches: Path, before: str = "", after: str = "", gate: str = "None") -> dict:
    environment = {**os.environ, "PYTHONPATH": str(package), "TORCHINDUCTOR_CACHE_DIR": str(caches)}
    script = package / "script.py"
    script.write_text(_SCRIPT.format(before=before, after=after, gate=gate))
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_unchanged_code_hits_and_changed_lowerings_miss(package, tmp_path):
    first = _run(package, tmp_path)
    assert (first["hits"], first["misses"]) == (0, 1)
    assert first["ratio"] == pytest.approx(1, abs=1e-4)
    assert first["tag"].startswith("another library;vsa_inductor@")

    second = _run(package, tmp_path)
    assert (second["hits"], second["misses"]) == (1, 0)

    # The user overwrites the tag: the backend's identity in the graph still tells the versions apart.
    overwrite = "torch.compiler.config.cache_key_tag = 'mine'"
    assert _run(package, tmp_path, after=overwrite)["misses"] == 1

    lowering = package / "vsa_inductor" / "lowerings" / "untile.py"
    source = lowering.read_text()
    changed = source.replace("lambda index: load(", "lambda index: _twice(load(").replace("index[3]]))", "index[3]])))")
    changed += "\n\ndef _twice(x):\n    return x + x\n"
    assert changed.count("_twice") == 2 and changed != source
    lowering.write_text(changed)
    try:
        for after in ("", overwrite):
            third = _run(package, tmp_path, after=after)
            assert (third["hits"], third["misses"]) == (0, 1)
            assert third["ratio"] == pytest.approx(2, abs=1e-3)
    finally:
        lowering.write_text(source)


def test_a_changed_decomposition_misses_too(package, tmp_path):
    """What a decomposition traces is a reference, and no part of the graph that Inductor's key is made from."""
    run = {"after": "vsa.lowerings.install('decomposition')", "gate": "1.0"}
    assert _run(package, tmp_path, **run)["ratio"] == pytest.approx(1, abs=1e-4)
    reference = package / "vsa_inductor" / "reference" / "gated_combine.py"
    source = reference.read_text()
    # Eager goes the same way: only a stale compiled graph differs from it.
    reference.write_text(source.replace("token_slot // block_size)", "token_slot // block_size) * 2"))
    try:
        changed = _run(package, tmp_path, **run)
        assert (changed["hits"], changed["misses"]) == (0, 1)
        assert changed["ratio"] == pytest.approx(1, abs=1e-4)
    finally:
        reference.write_text(source)


def test_import_keeps_other_tags_and_adds_ours_once():
    tag = torch.compiler.config.cache_key_tag
    assert tag.count("vsa_inductor@") == 1
    lowerings.compat.append_cache_key_tag(f"vsa_inductor@{lowerings.lowering_hash()}")
    assert torch.compiler.config.cache_key_tag == tag
