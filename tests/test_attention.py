"""`vsa::attention`, forward, against a dense masked fp64 reference; and the public calls in front of it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from problems import (
    BACKENDS,
    Problem,
    assert_close,
    assert_lse_close,
    assert_same_values,
    attention,
    operand,
    random_problem,
)
from torch.testing import assert_close as assert_equal_or_close

import vsa_inductor as vsa
from vsa_inductor.reference import _blocks

DTYPES = [torch.bfloat16, torch.float16, torch.float32]

CASES = {
    "plain": {},
    "one block": {"num_q": 1, "num_kv": 1, "width": 1},
    "odd number of blocks": {"num_q": 5, "num_kv": 5, "width": 3},
    "more keys than queries": {"num_q": 2, "num_kv": 7, "width": 4},
    "fewer keys than queries": {"num_q": 7, "num_kv": 2, "width": 2},
    "counts differ": {"num_kv": 6, "width": 5, "counts": "varying", "heads": 3},
    "every count 0": {"counts": 0},
    "counts of 1 of 4": {"width": 4, "counts": 1},
    "ragged": {"sizes": "ragged", "num_kv": 6, "width": 4},
    "size 0 stands first": {"sizes": (0, 64, 17, 1), "width": 4},
    "only sizes 0": {"sizes": (0, 0), "num_kv": 2, "width": 2},
    "ragged, counts differ, valid ids past the count": {
        "sizes": "ragged",
        "counts": "varying",
        "past_count": "valid",
        "num_kv": 7,
        "width": 5,
        "batch": 2,
    },
    "batch 2": {"batch": 2, "heads": 3},
    "grouped queries": {"heads": 6, "kv_heads": 2, "counts": "varying"},
    "one kv head": {"heads": 4, "kv_heads": 1, "sizes": "ragged", "batch": 2},
    "blocks of 128": {"block_size": 128, "num_q": 2, "sizes": "ragged"},
    "blocks of 256": {"block_size": 256, "num_q": 2, "num_kv": 3, "width": 2, "sizes": "ragged"},
    "own scale": {"sm_scale": 0.3},
    "transposed views": {"view": "transposed", "batch": 2},
    "chunk views": {"view": "chunk", "batch": 2, "counts": "varying"},
    "expanded views": {"view": "expanded", "heads": 4},
    "head dim 64": {"head_dim": 64},
    "head dim 128": {"head_dim": 128, "num_q": 2},
    "head dim 80": {"head_dim": 80},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("device, backend", BACKENDS)
def test_equals_the_dense_reference(device, backend, dtype, case):
    problem = random_problem(dtype=dtype, device=device, **CASES[case])
    out, lse = problem.forward(backend)
    expected_out, expected_lse = problem.dense()
    assert out.dtype == dtype and out.is_contiguous()
    assert lse.dtype == torch.float32
    assert_close("out", out, expected_out, dtype)
    assert_lse_close(lse, expected_lse, dtype)
    assert not out[expected_lse == -math.inf].any(), "out of a row without a key"


@pytest.mark.parametrize("device, backend", BACKENDS)
def test_without_lse(device, backend):
    problem = random_problem(device=device, counts="varying", sizes="ragged")
    out, lse = problem.forward(backend, return_lse=False)
    assert lse.shape == (0,) and lse.dtype == torch.float32
    assert torch.equal(out, problem.forward(backend)[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("device, backend", BACKENDS)
def test_nothing_leaks_from_slots_that_hold_no_key(device, backend, dtype):
    problem = random_problem(
        device=device, dtype=dtype, sizes="ragged", counts="varying", heads=4, kv_heads=2, num_q=2, num_kv=6, width=2,
        past_count="valid",
    )  # fmt: skip
    assert problem.unselected().any(), "the case must have a kv block that nobody lists"
    poisoned = problem.poisoned()
    assert poisoned.k.isnan().any()
    for clean, value in zip(problem.forward(backend), poisoned.forward(backend), strict=True):
        assert_same_values(value, clean, backend)


@pytest.mark.parametrize("device, backend", BACKENDS)
def test_entries_past_the_count_are_never_read(device, backend):
    settings = {"device": device, "counts": "varying", "num_kv": 6, "width": 4, "batch": 2}
    absent, valid = (random_problem(past_count=past, **settings) for past in (-1, "valid"))
    assert not torch.equal(absent.kv_indices, valid.kv_indices)
    for value, other in zip(absent.forward(backend), valid.forward(backend), strict=True):
        assert torch.equal(value, other)


@pytest.mark.parametrize("device, backend", BACKENDS)
def test_a_list_may_be_an_expanded_view(device, backend):
    problem = random_problem(device=device, num_kv=5, width=4)
    row, count = problem.kv_indices[:, :1, :1], problem.kv_num_blocks[:, :1, :1]
    broadcast = replace(
        problem,
        kv_indices=row.expand_as(problem.kv_indices),
        kv_num_blocks=count.expand_as(problem.kv_num_blocks),
    )
    copied = replace(
        broadcast, kv_indices=broadcast.kv_indices.contiguous(), kv_num_blocks=broadcast.kv_num_blocks.contiguous()
    )
    assert 0 in broadcast.kv_indices.stride()
    for value, other in zip(broadcast.forward(backend), copied.forward(backend), strict=True):
        assert torch.equal(value, other)


def split_in_64s(problem: Problem) -> Problem:
    """The same problem with every block cut in 64s: both halves of a q block share its list."""
    parts, H = problem.block_size // 64, problem.kv_indices.shape[1]
    B, _, N_q, M = problem.kv_indices.shape
    offsets = torch.arange(parts, dtype=torch.int32, device=problem.q.device)
    listed = torch.arange(M, device=problem.q.device) < problem.kv_num_blocks[..., None]
    ids = torch.where(listed, problem.kv_indices, 0)[..., None] * parts + offsets
    ids = torch.where(listed[..., None], ids, -1).view(B, H, N_q, M * parts)
    sizes = (problem.kv_block_sizes[:, None] - offsets * 64).clamp(0, 64).flatten()
    return replace(
        problem,
        kv_indices=ids.repeat_interleave(parts, 2),
        kv_num_blocks=(problem.kv_num_blocks * parts).repeat_interleave(parts, 2),
        kv_block_sizes=sizes,
        block_size=64,
    )


@pytest.mark.parametrize("block_size", [128, 256])
@pytest.mark.parametrize("device, backend", BACKENDS)
def test_larger_blocks_are_blocks_of_64_side_by_side(device, backend, block_size):
    problem = random_problem(
        device=device, block_size=block_size, sizes="ragged", counts="varying", num_q=2, num_kv=4, width=3,
        dtype=torch.float64 if backend == "eager" else torch.float32,
    )  # fmt: skip
    split = split_in_64s(problem)
    values, others = (x.forward(backend) for x in (problem, split))
    if backend == "triton":
        # The kernel walks 64 slots at a time whatever the block is: the same bits.
        assert torch.equal(values[0], others[0]) and torch.equal(values[1], others[1])
    else:
        assert_equal_or_close(values, others, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("device, backend", BACKENDS)
def test_two_runs_give_the_same_bits(device, backend):
    problem = random_problem(device=device, heads=4, num_q=8, num_kv=8, width=5, dtype=torch.bfloat16, head_dim=64)
    first, second = problem.forward(backend), problem.forward(backend)
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])


@pytest.mark.parametrize("device, backend", [b for b in BACKENDS if b.values[1] == "eager"])
def test_memory_does_not_grow_with_the_number_of_rows(device, backend, monkeypatch):
    """The reference gathers at most one chunk of keys, however many rows there are."""
    largest = []
    gather = _blocks.Rows.gather

    def measured(self, blocks, dtype):
        rows = gather(self, blocks, dtype)
        largest.append(rows.numel())
        return rows

    monkeypatch.setattr(_blocks.Rows, "gather", measured)
    monkeypatch.setattr(_blocks, "_CHUNK_ELEMENTS", 8 * 64 * 16)
    problem = random_problem(device=device, num_q=40, num_kv=40, width=2, heads=1, head_dim=16)
    out, _ = problem.forward(backend)
    assert max(largest) <= 8 * 64 * 16
    assert len(largest) == 2 * math.ceil(40 / 4)
    assert_close("out", out, problem.dense()[0], torch.float32)


@pytest.mark.parametrize("device, backend", BACKENDS)
def test_a_long_sequence_fits(device, backend):
    """131072 tokens: the dense scores would be 64 GiB."""
    num_blocks = 2048
    ids = torch.arange(num_blocks, dtype=torch.int32, device=device).view(1, 1, -1, 1)
    x = operand((1, 1, num_blocks * 64, 16), device=device)
    problem = Problem(
        x, x, x, x, ids, torch.ones_like(ids[..., 0]), torch.full_like(ids[0, 0, :, 0], 64), 0.25, 64
    )  # fmt: skip
    out, _ = problem.forward(backend)
    blocks = x.view(num_blocks, 64, 16)
    expected = torch.nn.functional.scaled_dot_product_attention(blocks.double(), blocks.double(), blocks.double())
    assert_close("out", out.view_as(blocks), expected, torch.float32)


@pytest.mark.parametrize("device, backend", BACKENDS)
def test_no_list_or_no_key_at_all(device, backend):
    problem = random_problem(device=device)
    for sliced in (
        replace(problem, kv_indices=problem.kv_indices[..., :0], kv_num_blocks=torch.zeros_like(problem.kv_num_blocks)),
        replace(
            problem,
            k=problem.k[:, :, :0],
            v=problem.v[:, :, :0],
            kv_indices=problem.kv_indices[..., :0],
            kv_num_blocks=torch.zeros_like(problem.kv_num_blocks),
            kv_block_sizes=problem.kv_block_sizes[:0],
        ),
    ):
        out, lse = sliced.forward(backend)
        assert out.shape == problem.q.shape and not out.any()
        assert bool((lse == -math.inf).all())


@pytest.mark.parametrize("device, backend", BACKENDS)
def test_public_call_gives_the_natural_lse_and_the_default_scale(device, backend):
    problem = random_problem(device=device, counts="varying", sizes="ragged")
    with vsa.options(backend=backend, strict=True):
        out, lse = vsa.block_sparse_attention(*problem.operands, *problem.lists, return_lse=True)
        alone = vsa.block_sparse_attention(*problem.operands, *problem.lists)
        scaled = vsa.block_sparse_attention(*problem.operands, *problem.lists, sm_scale=0.5)
    expected_out, expected_lse = problem.dense()
    assert torch.equal(out, alone)
    assert_close("out", out, expected_out, torch.float32)
    assert_lse_close(lse / math.log(2), expected_lse, torch.float32)
    assert_close("out", scaled, replace(problem, sm_scale=0.5).dense()[0], torch.float32)


@pytest.mark.parametrize("name", ["auto", "eager", "eager@0123abcd"])
def test_backend_argument(name):
    problem = random_problem()
    for value, expected in zip(problem.forward(name), problem.forward("eager"), strict=True):
        assert torch.equal(value, expected)


@pytest.mark.gpu
def test_auto_is_triton_on_a_gpu():
    problem = random_problem(device="cuda", head_dim=64)
    for value, expected in zip(problem.forward("auto"), problem.forward("triton"), strict=True):
        assert torch.equal(value, expected)


def test_a_backend_that_cannot_run_here_is_an_error():
    problem = random_problem()
    with pytest.raises(vsa.BackendUnavailableError, match=r"triton \(forward\).*cpu"):
        problem.forward("triton")
    with pytest.raises(vsa.BackendUnavailableError, match="no backend 'sm999'"):
        attention(*problem.operands, problem, "sm999@00000000")
