"""The benchmark of attention without a GPU: its lists, its bars and what it says of what is not installed."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks import attention_lists
from benchmarks.attention_bars import Case, Rates, all_rates, bars, block_lines, host_lines, table, wanted_ratio
from benchmarks.attention_lists import CLIPS, GRIDS, PIXELS, lists_named, mean_patches, neighbours_share
from benchmarks.attention_providers import PEERS, PROVIDERS, AttentionProblem, Unavailable
from benchmarks.bench_attention import asked_of, planned
from benchmarks.harness import Quantiles, RowWriter
from benchmarks.shapes import AttentionShape


@pytest.mark.parametrize("name", ["overlap25", "overlap80", *(PIXELS + clip for clip in CLIPS)])
def test_lists_are_ascending_and_overlap(name):
    ids, counts = lists_named(name, 2, 256, 64, 0, "cpu")
    assert ids.shape == (1, 2, 256, 64) and ids.dtype == counts.dtype == torch.int32
    assert bool((counts == 64).all()) and bool((ids.diff(dim=-1) > 0).all())
    assert ids.min() >= 0 and ids.max() < 256
    share = neighbours_share(ids, 256)
    if name.startswith("overlap"):
        assert share == pytest.approx(int(name.removeprefix("overlap")) / 100, abs=0.01)
    else:
        assert 0.6 < share < 0.9
    assert torch.equal(ids, lists_named(name, 2, 256, 64, 0, "cpu")[0]), "every provider gets the same ones"


def test_lists_that_there_are_not():
    with pytest.raises(ValueError, match="got lists 'selected'; allowed: overlapNN, pixels_bikes, pixels_bunny"):
        lists_named("selected", 1, 256, 64, 0, "cpu")
    with pytest.raises(ValueError, match="clip bikes: got 128 tiles; allowed: 256, 512, 1024"):
        lists_named("pixels_bikes", 1, 128, 32, 0, "cpu")
    for clip, grids in GRIDS.items():
        assert all(math.prod(grid) == number for number, grid in grids.items())
        assert all(size <= whole for grid in grids.values() for size, whole in zip(grid, CLIPS[clip], strict=True))


def test_the_record_is_made_from_the_middle_of_the_picture(tmp_path):
    np = pytest.importorskip("numpy")
    frames = np.zeros((128, 32 * 16 + 4, 32 * 32 + 8, 3), np.uint8)
    # The second tile along W of the first clip; one of the four frames of every patch in it is not black.
    left = (frames.shape[2] - 32 * 16) // 2 + 32
    frames[0:16:4, :, left : left + 32] = 100
    attention_lists.write_record(tmp_path, tmp_path / "record.npz", decode=lambda path: frames)
    with np.load(tmp_path / "record.npz") as record:
        assert {clip: record[clip].shape for clip in CLIPS} == {clip: (*CLIPS[clip], 24) for clip in CLIPS}
        tiles = record["bikes"]
    assert not tiles[:, :, 0].any() and not tiles[1:].any() and not tiles[:, :, 2:].any()
    # Two frames in one: 50 in the first half of a patch, nothing in the second.
    assert (tiles[0, :, 1, :12] == 50).all() and not tiles[0, :, 1, 12:].any()
    with pytest.raises(ValueError, match="tiles need"):
        mean_patches(frames[:8], (1, 1, 1))


def _problem(shape):
    x = torch.zeros(1, 8, 256, shape.head_dim, dtype=torch.bfloat16)
    n = 256 // shape.block_size
    lists = torch.zeros(1, 8, n, 1, dtype=torch.int32), torch.ones(1, 8, n, dtype=torch.int32)
    return AttentionProblem(shape, x, x, x, x, *lists, torch.full((n,), shape.block_size, dtype=torch.int32))


@pytest.mark.parametrize("name", ["sm90", "fastvideo_triton", "fastvideo_tk", "cudnn_bsa", "cudnn_bsa_full"])
@pytest.mark.parametrize("block_size", [64, 128])
def test_who_cannot_run_says_why(name, block_size):
    problem = _problem(AttentionShape(256, block_size=block_size))
    with pytest.raises(Unavailable, match=r"not installed|supported"):
        PROVIDERS[name](problem)["forward"]()
    if name == "sm90":
        with pytest.raises(Unavailable):
            PROVIDERS[name](problem)["backward"]()


def test_the_plan_holds_every_bar():
    shapes = planned("bars")
    cases = [Case(s.tokens, s.lists, s.head_dim, s.block_size, "eager") for s in shapes]
    promised = {mode: [c for c in cases if not math.isnan(wanted_ratio(c, mode))] for mode in ("forward", "backward")}
    assert len(promised["forward"]) == 6 + 4 + 2 and len(promised["backward"]) == 6 + 4
    assert {shape.lists for shape in shapes} >= {"overlap25", "overlap50", "overlap65", "overlap80", "pixels_bunny"}
    assert any(asked_of(shape, peer, [16384]) for shape in shapes for peer in PEERS)
    assert not any(asked_of(s, "cudnn_dense", []) for s in shapes if s.lists != "random")


def test_the_table_names_the_best_peer_and_what_was_missed(tmp_path):
    writer = RowWriter(tmp_path / "record.csv", "commit")

    def row(shape, provider, mode, rate, launch="eager"):
        writer.write(
            kernel="attention",
            provider=provider,
            mode=mode,
            metric="throughput",
            unit="TFLOPS",
            x_name="tokens",
            x_value=shape.tokens,
            quantiles=Quantiles(rate, rate, rate),
            config=shape.config(launch=launch, neighbours_share=0.25),
        )

    random, long_blocks = AttentionShape(16384), AttentionShape(16384, block_size=128)
    for provider, rate in {"sm90": 540, "triton": 600, "fastvideo_tk": 480, "cudnn_bsa": 500}.items():
        row(random, provider, "forward", rate)
        row(long_blocks, provider, "forward", rate)
    row(random, "sm90", "backward", 400)
    row(random, "fastvideo_triton", "backward", 399)
    row(AttentionShape(16384, head_dim=64), "sm90", "forward", 400)
    row(AttentionShape(16384, lists="overlap50"), "sm90", "forward", 500)
    row(AttentionShape(4096), "sm90", "forward", 500, "cuda_graph")
    found = {
        (b.case.head_dim, b.case.block_size, b.case.lists, b.case.launch, b.mode, b.name): b for b in bars(writer.rows)
    }
    assert found[128, 64, "random", "eager", "forward", "cudnn_bsa"].verdict == "reached"
    assert found[128, 64, "random", "eager", "backward", "fastvideo_triton"].verdict == "MISSED"
    assert found[64, 64, "random", "eager", "forward", "ours at D 128"].verdict == "MISSED"
    assert found[128, 128, "random", "eager", "forward", "cudnn_bsa"].verdict == "reached"
    assert found[128, 64, "overlap50", "eager", "forward", "no peer"].verdict == ""
    assert found[128, 64, "random", "cuda_graph", "forward", "no peer"].verdict == "not measured"
    text = table(writer.rows)
    assert "2 of 5 bars reached" in text and "1.080" in text
    assert "600" in all_rates(writer.rows, PROVIDERS)
    assert Rates(writer.rows).best_peer(Case(1, "random", 128, 64, "eager"), "forward")[0] == "no peer"


def test_block_and_host_against_their_limits():
    def block(provider, lists, mode, time):
        config = {"video": "480p", "heads": 12, "lists": lists, "sparsity": 0.0 if lists == "none" else 0.9}
        row = {"kernel": "attention_block", "provider": provider, "mode": mode, "metric": "time"}
        return {**row, "p50": str(time), "config": config}

    rows = [block("ours_compiled", "overlap80", "inference", 2.0), block("ours_compiled", "random", "inference", 2.7)]
    text = [" ".join(line.split()) for line in block_lines([*rows, block("dense_compiled", "none", "inference", 10.0)])]
    assert text[0] == "block 480p overlap80 inference, ms 2 <= 2.4 reached"
    assert text[1] == "dense block / block overlap80 5 >= 4 reached"
    assert text[2] == "block 480p overlap80 step, ms - <= 8.5 not measured"
    assert text[3].endswith("MISSED") and text[4] == "dense block / block random 3.7 >= 4 MISSED"
    host = [{"provider": "sm90", "mode": "forward", "p50": "15", "config": {"form": "out"}}]
    assert [line.split()[-1] for line in host_lines(host)] == ["measured", "MISSED", "measured"]
