"""The block benchmark without a GPU: what it computes from lists, traces, counters and rows; and that it runs."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.bench_attention_block import jobs_of, plan
from benchmarks.block_breakdown import (
    Kernel,
    Sizes,
    added_up,
    argument_bytes,
    categorize,
    floor_bytes,
    operator_bytes,
    read_trace,
    shares,
)
from benchmarks.block_counters import ESSENTIAL, matched, read_counters, region_bytes
from benchmarks.block_memory import ATTENTIONS, Model, Stack, expected_saved_bytes, padded, saved_per_layer
from benchmarks.block_precompile import Job, precompile
from benchmarks.block_providers import PROVIDERS, BlockCase, block_lists
from benchmarks.block_report import Figures, Key, plot, report
from benchmarks.harness import Quantiles, RowWriter, latest_rows, read_rows

WAN = BlockCase("480p", 12, 0.9, device="cpu")
TINY = BlockCase("tiny", 2, 0.9, head_dim=32, device="cpu", dtype=torch.float32)
TOKENS, SLOTS = 32760 * 1536 * 2, 39936 * 1536 * 2
ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize(
    "name, operator, category",
    [
        ("_attention_kernel", "attention_triton", "opaque"),
        ("dq_kernel", "attention_backward", "opaque"),
        ("_select_blocks_kernel", "select_blocks", "opaque"),
        ("_mark_kernel", "transpose_blocks", "opaque"),
        ("_norm_rope_tile_kernel", "norm_rope_tile", "region"),
        ("_some_kernel", "norm_rope_tile_backward", "region"),
        ("_some_kernel", "gated_combine", "region"),
        ("_some_kernel", "gated_combine_backward", "region"),
        ("_tile_sums_kernel", "tile_sums", "coarse"),
        ("triton_per_fused_tile_sums_view_3", "", "coarse"),
        ("_some_kernel", "tile_sums_backward", "region"),
        ("triton_poi_fused_add_tile_sums_backward_3", "", "region"),
        ("triton_per_fused_sum_view_2", "", "coarse"),
        ("triton_per_fused__softmax_amax_mul_sub_view_3", "", "coarse"),
        ("sm80_xmma_gemm_f32f32_f32f32", "", "coarse"),
        ("triton_per_fused_sum_tile_view_0", "", "region"),
        ("triton_poi_fused_tile_view_1", "", "region"),
        ("Memset (Device)", "", "region"),
    ],
)
def test_category_of_a_kernel(name, operator, category):
    assert categorize(name, operator) == category


def test_floors_are_the_tensors_of_the_region():
    floors = floor_bytes(WAN)
    assert floors["forward", "region", "before"] == 3 * TOKENS + 3 * SLOTS
    assert floors["forward", "region", "after"] == 2 * TOKENS + SLOTS
    assert floors["backward", "region", "before"] == 3 * TOKENS + 2 * SLOTS + 12 * 39936 * 4
    assert floors["backward", "region", "after"] == 5 * TOKENS + 3 * SLOTS


def test_operators_of_a_direction_add_up_to_its_floor():
    sizes, floors = Sizes.of(WAN), floor_bytes(WAN)
    none = [[1], []]

    def added(*calls):
        return sum(operator_bytes(operator, dims, sizes) for operator, dims in calls)

    forward = [("norm_rope_tile", None)] * 3
    assert added(*forward) == floors["forward", "region", "before"]
    assert added(("gated_combine", None)) == floors["forward", "region", "after"]
    assert added(("gated_combine_backward", None)) == floors["backward", "region", "before"]
    without_norm = ("norm_rope_tile_backward", [[1], [1], []])
    backward = [("norm_rope_tile_backward", None)] * 2 + [without_norm]
    assert added(*backward) == floors["backward", "region", "after"]
    assert operator_bytes("gated_combine", none, sizes) == TOKENS + SLOTS
    assert math.isnan(operator_bytes("attention", None, sizes))


def _event(cat, name, ts, dur, tid=1, **args):
    return {"cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "args": args}


def _trace():
    """A norm of ours with two kernels, a generated copy, the attention, and a generated kernel after it."""
    tensor, slots = [1, 32760, 12, 128], [1, 12, 39936, 128]
    bf16 = "c10::BFloat16"
    dims, types = [tensor, [39936], slots, []], [bf16, "int", bf16, "Scalar"]
    return [
        _event("cpu_op", "vsa::norm_rope_tile", 0, 20, **{"Input Dims": [tensor, [1536]]}),
        _event("cuda_runtime", "cudaLaunchKernel", 5, 1, correlation=1),
        _event("cuda_runtime", "cudaLaunchKernel", 8, 1, correlation=2),
        _event("cpu_op", "triton_poi_fused_tile_view_1", 30, 10, **{"Input Dims": dims, "Input type": types}),
        _event("cuda_driver", "cuLaunchKernel", 35, 1, correlation=3),
        _event("cpu_op", "vsa::attention", 50, 30),
        _event("cpu_op", "vsa::attention_triton", 52, 20),
        _event("cuda_driver", "cuLaunchKernel", 60, 1, correlation=4),
        _event("cuda_driver", "cuLaunchKernel", 90, 1, correlation=5),
        _event("kernel", "_norm_rope_tile_kernel", 100, 80, tid=7, correlation=1),
        _event("kernel", "_finish_kernel", 180, 5, tid=7, correlation=2),
        _event("kernel", "triton_poi_fused_tile_view_1", 190, 50, tid=7, correlation=3),
        _event("kernel", "_attention_kernel", 300, 2000, tid=7, correlation=4),
        _event("kernel", "triton_poi_fused_add_mul_5", 2400, 70, tid=7, correlation=5),
    ]


def test_trace_gives_place_category_and_bytes():
    kernels = read_trace(_trace(), Sizes.of(WAN))
    assert [k.category for k in kernels] == ["region", "region", "region", "opaque", "region"]
    assert [k.place for k in kernels] == ["before"] * 3 + ["after"] * 2
    assert [k.minimal_bytes for k in kernels[:3]] == [TOKENS + SLOTS, 0.0, TOKENS + SLOTS + 39936 * 4]
    assert all(math.isnan(k.minimal_bytes) for k in kernels[3:])
    before = next(part for part in shares(kernels, WAN, "inference", 4e9) if part.place == "before")
    assert before.milliseconds == pytest.approx(0.135)
    assert before.floor == pytest.approx((3 * TOKENS + 3 * SLOTS) / 4e9)
    assert before.kernel_bytes == 2 * (TOKENS + SLOTS) + 39936 * 4


def test_trace_without_shapes_takes_every_argument_as_given():
    trace = [_event("kernel", "_gated_combine_backward_kernel", 0, 10)]
    (kernel,) = read_trace(trace, Sizes.of(WAN))
    assert kernel.operator == "gated_combine_backward"
    assert kernel.minimal_bytes == floor_bytes(WAN)["backward", "region", "before"]
    assert math.isnan(argument_bytes([[4]], ["no such type"]))


def test_calls_are_added_up_by_name():
    kernel = Kernel("before", "region", "a", "", 1.0, 1, 10.0)
    other = kernel._replace(name="b")
    calls = [[kernel, other, kernel._replace(milliseconds=m)] for m in (1.0, 2.0, 9.0)]
    assert added_up(calls) == [kernel._replace(milliseconds=3.0, launches=2, minimal_bytes=20.0), other]


@pytest.mark.parametrize("num_blocks, kept", [(24, 3), (50, 13), (50, 40), (130, 26)])
@pytest.mark.parametrize("overlap", [None, 0.0, 0.5, 0.8, 1.0])
def test_lists_are_sorted_distinct_and_overlap(num_blocks, kept, overlap):
    generator = torch.Generator().manual_seed(0)
    ids, counts = block_lists(2, 3, num_blocks, kept, overlap, generator)
    assert ids.shape == (2, 3, num_blocks, kept) and ids.dtype == counts.dtype == torch.int32
    assert bool((counts == kept).all()) and bool((ids.diff(dim=-1) > 0).all())
    assert ids.min() >= 0 and ids.max() < num_blocks
    heads = ids.flatten(0, 1)
    assert not torch.equal(heads[0], heads[1]), "every head has lists of its own"
    if overlap is not None:
        shared = max(round(overlap * kept), 2 * kept - num_blocks)
        for lists in heads.tolist():
            for row, following in itertools.pairwise(lists):
                assert len(set(row) & set(following)) == shared


def test_overlapping_lists_reach_all_blocks_and_do_not_repeat():
    ids, _ = block_lists(1, 1, 624, 63, 0.8, torch.Generator().manual_seed(0))
    assert ids.unique().numel() == 624
    assert ids[0, 0].unique(dim=0).shape[0] > 600


NCU = """\
==PROF== Connected to process 12
"ID","Process ID","Kernel Name","Block Size",{columns}
"","","","",{units}
"0","12","_norm_rope_tile_kernel","(128, 1, 1)","230,000,000","110,500,000","119.5","80000"
"1","12","void cutlass::Kernel2<float>(Params)","(128, 1, 1)","1000","1000","0","2000"
==PROF== Disconnected
""".format(columns=",".join(f'"{column}"' for column, _ in ESSENTIAL.values()), units='"byte","byte","Mbyte","ns"')


def test_counters_are_read_in_base_units_and_matched():
    launches = read_counters(NCU)
    assert [launch.name for launch in launches] == ["_norm_rope_tile_kernel", "void cutlass::Kernel2<float>(Params)"]
    first = launches[0].counters
    assert (first["dram"], first["dram_read"], first["dram_write"]) == (230e6, 110.5e6, 119.5e6)
    assert first["milliseconds"] == pytest.approx(0.08) and math.isnan(first["registers"])
    entry = {"direction": "forward", "place": "before", "category": "region", "operator": "norm_rope_tile"}
    known = [
        {"name": "_norm_rope_tile_kernel", "minimal_bytes": 200e6, **entry},
        {"name": "void cutlass::Kernel2<float>(Params)", "minimal_bytes": None, **entry, "category": "coarse"},
    ]
    for order in (known, known[::-1]):
        found = matched(launches, order)
        assert [launch.category for launch in found] == ["region", "coarse"]
        assert found[0].minimal_bytes == 200e6 and math.isnan(found[1].minimal_bytes)
        assert region_bytes(found, "forward", "before") == 230e6
    assert matched(launches, [])[0].operator == "norm_rope_tile"
    assert read_counters("==ERROR== no such metric") == []


def test_what_is_measured_by_default():
    cases = [BlockCase("480p", 12, s, lists) for s in (0.8, 0.9) for lists in ("selected", "random")]
    runs = plan(cases, list(PROVIDERS), ["times", "breakdown"], 0.9, False)
    measured = [(run.provider, run.case.sparsity, run.case.lists) for run in runs]
    assert measured == [
        ("ours_eager", 0.8, "selected"),
        ("ours_compiled", 0.8, "selected"),
        ("dense_compiled", 0.8, "selected"),
        ("ours_eager", 0.9, "selected"),
        ("ours_compiled", 0.9, "selected"),
        ("flex_compiled", 0.9, "selected"),
        ("ours_compiled", 0.9, "random"),
    ]
    assert [run.kernels for run in runs if run.breakdown] == [False, True]
    assert len(plan(cases, list(PROVIDERS), ["times"], 0.9, True)) == 3 * 4 + 1
    assert len(jobs_of(runs, [WAN])) == 2 * 5 + len(ATTENTIONS)


def _write(path, commit, **milliseconds):
    writer = RowWriter(path, commit)
    for (provider, lists), figure in {tuple(key.split("__")): value for key, value in milliseconds.items()}.items():
        config = {"video": "480p", "heads": 12, "sparsity": 0.0 if lists == "none" else 0.9, "lists": lists}
        for mode in ("inference", "step"):
            writer.write(
                kernel="attention_block",
                provider=provider,
                mode=mode,
                metric="time",
                unit="ms",
                x_name="tokens",
                x_value=32760,
                quantiles=Quantiles(figure, figure, figure),
                config=config,
            )


def test_table_and_plot_of_the_last_commit_from_several_commands(tmp_path):
    record = tmp_path / "record.csv"
    _write(record, "first", ours_compiled__selected=99.0, ours_eager__random=9.0)
    _write(record, "second", dense_compiled__none=12.0, cudnn_dense__none=10.6)
    _write(record, "second", ours_compiled__selected=4.0, flex_compiled__selected=8.0)
    _write(record, "second", ours_compiled__selected=3.0)
    rows = latest_rows(read_rows(record))
    figures = Figures(rows)
    key = Key("480p", 12, 0.9, "selected")
    assert figures.keys == [key]
    assert [figures.time(key, provider, "step") for provider in PROVIDERS[1:]] == [3.0, 12.0, 8.0]
    assert figures.fastvideo(key, "inference") == pytest.approx(4.21)
    text = report(rows)
    assert "99.0" not in text and "0.250 (1/4 ok)" in text and "4.21 / 1.3 = 3.24 ok" in text
    pytest.importorskip("matplotlib")
    assert plot(rows, tmp_path / "plots" / "figure.svg")
    assert "ours compiled" in (tmp_path / "plots" / "figure.svg").read_text()
    assert not plot([], tmp_path / "none.svg")


def test_bars_of_the_region_and_of_memory(tmp_path):
    writer = RowWriter(tmp_path / "record.csv", "commit")
    common = {"kernel": "k", "provider": "ours_compiled", "x_name": "blocks", "x_value": 8}
    case = {"video": "480p", "heads": 12, "sparsity": 0.9, "lists": "selected"}

    def row(metric, value, mode, **config):
        quantiles = Quantiles(value, value, value)
        writer.write(metric=metric, unit="", mode=mode, quantiles=quantiles, config=case | config, **common)

    for place, time in (("before", 0.3), ("after", 0.1), ("all", 0.4)):
        region = {"category": "region", "place": place}
        row("share_time", time, "inference", **region)
        row("floor", 0.25 if place == "all" else 0.125, "inference", **region)
    for attention, peak in (("dense", 10.0), ("ungated", 10.5), ("gated", 11.5)):
        row("peak_memory", peak, "step", attention=attention, checkpointed=False)
    held = {"attention": "gated", "checkpointed": True, "expected_bytes": 2**20}
    row("saved_bytes_per_layer", 3 * 2**20, "forward", **held)
    text = report(writer.rows)
    assert "0.400 /  0.250 =  1.60 MISSED (2.40, 0.80)" in text
    assert "dense 10.00 GiB, ungated 10.50 = x1.050 ok" in text and "gated 11.50 = x1.150 MISSED" in text
    assert "gated checkpointed: a layer holds 3.00 MiB, expected 1.00 MISSED" in text


def test_what_a_layer_saves_is_what_was_expected():
    saved = saved_per_layer(Stack(Model(TINY, "dense"), 3))
    assert sum(x.bytes for x in saved) == pytest.approx(sum(expected_saved_bytes(TINY, "dense").values()), rel=0.02)
    assert padded(saved, TINY) == 0
    torch.compiler.reset()


def test_precompile_reports_what_failed():
    job = Job(BlockCase("tiny", 1, 0.9, "no such lists", device="cpu"), "ours_compiled", "forward")
    (line,) = precompile([job], workers=1, timeout=100.0)
    assert "ValueError" in line and "no such lists" in line


def test_the_benchmark_runs_on_a_machine_without_a_gpu(tmp_path):
    record = tmp_path / "record.csv"
    command = [sys.executable, "-m", "benchmarks.bench_attention_block", "--device", "cpu", "--tiny"]
    command += ["--parts", "times", "--providers", "ours_eager", "dense_compiled", "--output", str(record)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "tiny H2 0.9 selected" in run.stdout
    figures = Figures(read_rows(record))
    assert figures.time(figures.keys[0], "ours_eager", "step") > 0
    assert record.with_suffix(".svg").exists()
