"""`vsa::select_blocks` against the given cases and a slow oracle in plain Python: the same ids on every device."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from problems import DEVICES

CASES = json.loads((Path(__file__).parent / "cases" / "selection.json").read_text())
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
INF, NAN = math.inf, math.nan


def oracle(row: list[float], k: int, num_forced: int) -> list[int]:
    """One row: the forced ids, then the k best of the rest; ties to the lowest id, NaN after everything."""

    def rank(i):
        return (1, 0.0, i) if math.isnan(row[i]) else (0, -row[i], i)

    return [*range(num_forced), *sorted(sorted(range(num_forced, len(row)), key=rank)[:k])]


def assert_selects(scores, k, num_forced=0):
    kv_indices, kv_num_blocks = torch.ops.vsa.select_blocks(scores, k, num_forced)
    assert kv_indices.shape == (*scores.shape[:3], num_forced + k)
    assert kv_indices.dtype == kv_num_blocks.dtype == torch.int32
    assert bool((kv_num_blocks == num_forced + k).all()) and kv_num_blocks.shape == scores.shape[:3]
    expected = [oracle(row, k, num_forced) for row in scores.flatten(0, 2).tolist()]
    assert kv_indices.flatten(0, 2).tolist() == expected


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c['scores']}-{c['k']}-{c['num_forced']}")
@pytest.mark.parametrize("device", DEVICES)
def test_given_cases(device, case):
    scores = torch.tensor([float(x) for x in case["scores"]], device=device)[None, None, None]
    kv_indices, _ = torch.ops.vsa.select_blocks(scores, case["k"], case["num_forced"])
    assert kv_indices.flatten().tolist() == case["kv_indices"]
    assert oracle(scores.flatten().tolist(), case["k"], case["num_forced"]) == case["kv_indices"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "row, k, expected",
    [
        pytest.param([0.0, -0.0, 0.0, -0.0], 3, [0, 1, 2], id="signed zeros tie"),
        pytest.param([-0.0, 0.0, -1.0], 1, [0], id="-0.0 first"),
        pytest.param([NAN, -INF, NAN, -INF], 2, [1, 3], id="-inf above NaN"),
        pytest.param([NAN, NAN, NAN, 1.0], 3, [0, 1, 3], id="NaN fills what is left, by id"),
        pytest.param([NAN, NAN, NAN], 2, [0, 1], id="only NaN"),
        pytest.param([-NAN, NAN, -INF], 1, [2], id="the sign of NaN means nothing"),
        pytest.param([-1.0, -2.0, INF, -3.0, INF], 3, [0, 2, 4], id="infinities"),
        pytest.param([-2.0, -1.0, -3.0, -1.0], 2, [1, 3], id="negative"),
        pytest.param([1.0, 2.0, 3.0], 3, [0, 1, 2], id="all"),
        pytest.param([1.0], 1, [0], id="one block"),
    ],
)
@pytest.mark.parametrize("device", DEVICES)
def test_edges(device, row, k, expected, dtype):
    scores = torch.tensor(row, dtype=dtype, device=device).expand(1, 2, 3, len(row))
    kv_indices, _ = torch.ops.vsa.select_blocks(scores, k)
    assert kv_indices.flatten(0, 2).tolist() == [expected] * 6
    assert_selects(scores, k)


@pytest.mark.parametrize("bits", [0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF], ids=hex)
@pytest.mark.parametrize("device", DEVICES)
def test_every_kind_of_nan_is_lowest(device, bits):
    nan = torch.tensor(bits - (1 << 32) if bits >> 31 else bits, dtype=torch.int32).view(torch.float32)
    assert nan.isnan()
    scores = torch.tensor([0.0, -INF, 0.0, -1e38])
    scores[0] = nan
    kv_indices, _ = torch.ops.vsa.select_blocks(scores.to(device)[None, None, None], 3)
    assert kv_indices.flatten().tolist() == [1, 2, 3]


@pytest.mark.parametrize("device", DEVICES)
def test_subnormals_and_neighbours_are_told_apart(device):
    tiny = torch.tensor([0.0, 1e-45, -1e-45, 0.0])[None, None, None].to(device)
    assert torch.ops.vsa.select_blocks(tiny, 1)[0].item() == 1
    assert torch.ops.vsa.select_blocks(tiny, 3)[0].flatten().tolist() == [0, 1, 3]
    near = torch.tensor([1.0, 1.0 + 2**-52, 1.0], dtype=torch.float64)[None, None, None].to(device)
    assert torch.ops.vsa.select_blocks(near, 1)[0].item() == 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("levels", [None, 2], ids=["distinct", "ties"])
@pytest.mark.parametrize(
    "num_kv, k, num_forced", [(1, 1, 0), (37, 5, 0), (37, 5, 3), (37, 37, 0), (64, 60, 4), (130, 13, 0), (9, 0, 4)]
)
@pytest.mark.parametrize("device", DEVICES)
def test_random_rows(device, num_kv, k, num_forced, levels, dtype):
    scores = torch.randn(2, 2, 4, num_kv)
    if levels:
        scores = (scores * levels).round() / levels
    for value in (NAN, INF, -INF, 0.0, -0.0):
        scores[torch.rand(scores.shape) < 0.05] = value
    assert_selects(scores.to(device, dtype), k, num_forced)


@pytest.mark.parametrize("device", DEVICES)
def test_no_block_chosen_at_all(device):
    kv_indices, kv_num_blocks = torch.ops.vsa.select_blocks(torch.randn(1, 2, 3, 5, device=device), 0)
    assert kv_indices.shape == (1, 2, 3, 0)
    assert not kv_num_blocks.any()


@pytest.mark.parametrize("device", DEVICES)
def test_scores_of_any_strides(device):
    base = torch.randn(2, 40, 3, 17, device=device)
    views = (base.transpose(1, 2)[:, :, ::5], base.permute(0, 3, 1, 2)[..., :3], base[:, 1:9, :, 3:14])
    for scores in (*views, base[:, :1].expand(2, 4, 3, 17)):
        assert_selects(scores, 3, 0)


@pytest.mark.gpu
@pytest.mark.parametrize("num_kv, k", [(1440, 144), (8192, 1639)])
def test_long_rows_are_the_same_on_both_devices(num_kv, k):
    scores = torch.randn(1, 2, 8, num_kv, dtype=torch.bfloat16)
    on_cpu = torch.ops.vsa.select_blocks(scores, k, 7)
    on_gpu = torch.ops.vsa.select_blocks(scores.cuda(), k, 7)
    assert all(torch.equal(a, b.cpu()) for a, b in zip(on_cpu, on_gpu, strict=True))
