"""Backend `sm90` on a device of compute capability 9.0: contracts 2 and 8, what the kernels compute.

How they are launched is in test_native_launch_gpu.py.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from native_library import BACKWARD, ON_HOPPER, load_any_library, native_backward_arguments, native_forward, problem_of
from problems import Problem, assert_close, assert_lse_close, attention
from test_attention import CASES
from torch import Tensor

import vsa_inductor as vsa
from benchmarks.sanitize_native import ORDERED_BLOCKS
from vsa_inductor.backends import sm90

pytestmark = ON_HOPPER
DTYPES = [torch.bfloat16, torch.float16]
# (bars of max|diff| / max|ref| and mean|diff|) of two routes against each other, and of long sequences.
ROUTES, LONG = (2e-2, 2e-3), (2e-2, 1e-4)
# Of the largest value: what another order of a sum of fp32 changes.
SUMMATION_NOISE = 1e-5
MORE_CASES = {
    "one key": {"sizes": (1, 1, 1, 1)},
    "a list of 7 of 9": {"num_q": 9, "num_kv": 9, "width": 7},
    "lists longer than a warp reads at once": {"num_q": 3, "num_kv": 90, "width": 70, "counts": "varying"},
    "every block": {"num_q": 8, "num_kv": 33, "width": 33, "sizes": "ragged"},
    "negative scale": {"sm_scale": -0.2, "counts": "varying"},
    "scale 0": {"sm_scale": 0.0, "counts": "varying", "sizes": "ragged"},
    "a scale that is 0 in fp32": {"sm_scale": 1e-50, "counts": "varying", "sizes": "ragged"},
    "contract default": {"heads": 4, "num_q": 8, "num_kv": 8, "width": 4},
    "two neighbours of different counts": {"num_q": 2, "num_kv": 40, "width": 37, "counts": "varying", "heads": 5},
    "sizes 32 to 64": {"sizes": (64, 32, 47, 63, 33, 58, 40, 51), "num_q": 8, "num_kv": 8, "width": 4},
    "one query block": {"num_q": 1, "num_kv": 9, "width": 7, "counts": "varying", "heads": 6},
    "more work than multiprocessors": {"num_q": 33, "num_kv": 7, "width": 5, "heads": 9, "counts": "varying"},
}
SUPPORTED = {
    name: case
    for name, case in {**CASES, **MORE_CASES}.items()
    if case.get("head_dim", 64) in sm90.HEAD_DIMS and case.get("block_size", 64) in sm90.BLOCK_SIZES["forward"]
}
# Gradients so large that rounding them to bf16 alone passes the bar of the mean error: dout is scaled down.
LARGE_GRADIENTS = {"own scale": 0.25, "one key": 0.25}
BACKWARD_SUPPORTED = {name: case for name, case in SUPPORTED.items() if case.get("block_size", 64) == 64}


@pytest.fixture(autouse=True, scope="module")
def library():
    load_any_library()


def assert_right(problem: Problem, out: Tensor, lse: Tensor) -> None:
    expected_out, expected_lse = problem.dense()
    assert out.dtype == problem.q.dtype and out.is_contiguous() and lse.dtype == torch.float32
    assert_close("out", out, expected_out, problem.q.dtype)
    assert_lse_close(lse, expected_lse, problem.q.dtype)
    assert not out[expected_lse == -math.inf].any(), "out of a row without a key"


def assert_gradients(problem: Problem, grads: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for name, x, grad, reference in zip(("dq", "dk", "dv"), problem.operands, grads, expected, strict=True):
        assert grad.dtype == x.dtype and grad.is_contiguous()
        assert_close(name, grad, reference, x.dtype)
    hidden = problem.unread()
    assert not grads[1][hidden].any() and not grads[2][hidden].any(), "dk, dv of slots that nobody reads"
    assert not grads[0][~problem.mask.any(-1)].any(), "dq of a row without a key"


def assert_routes_agree(name: str, value: Tensor, other: Tensor, bars: tuple[float, float]) -> None:
    difference = (value.float() - other.float()).abs()
    ratio, mean = (float(x.detach()) for x in (difference.max() / other.float().abs().max(), difference.mean()))
    assert ratio <= bars[0] and mean <= bars[1], f"{name}: {ratio:.2e}, mean {mean:.2e}; allowed {bars}"


@pytest.mark.parametrize("case", SUPPORTED)
@pytest.mark.parametrize("block_size", sm90.BLOCK_SIZES["forward"])
@pytest.mark.parametrize("head_dim", sm90.HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_forward_equals_the_dense_reference(dtype, head_dim, block_size, case):
    problem = problem_of(SUPPORTED[case], head_dim, dtype, block_size=block_size)
    out, lse = native_forward(problem)
    assert_right(problem, out, lse)
    without, empty = native_forward(problem, return_lse=False)
    assert torch.equal(without, out) and empty.shape == (0,) and empty.dtype == torch.float32


@pytest.mark.parametrize("case", BACKWARD_SUPPORTED)
@pytest.mark.parametrize("head_dim", sm90.HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_backward_equals_autograd_of_the_dense_reference(dtype, head_dim, case):
    problem = problem_of(BACKWARD_SUPPORTED[case], head_dim, dtype)
    problem = replace(problem, dout=problem.dout * LARGE_GRADIENTS.get(case, 1))
    expected = problem.dense_gradients()[2:]
    for deterministic in (False, True):
        assert_gradients(problem, problem.gradients("sm90", deterministic=deterministic), expected)


@pytest.mark.parametrize("deterministic", [False, True], ids=["fused", "deterministic"])
@pytest.mark.parametrize("sizes", ["ragged", (0, 0, 0, 0, 64, 0, 64, 0, 0)], ids=["ragged", "mostly 0"])
@pytest.mark.parametrize("head_dim", sm90.HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_backward_from_given_statistics(dtype, head_dim, sizes, deterministic):
    """Contract 2: the reference's lse, its out in the operand dtype, lists from transpose_blocks."""
    case = {"sizes": sizes, "counts": "varying", "num_q": 7, "num_kv": 9, "width": 5, "batch": 2}
    problem = problem_of(case, head_dim, dtype)
    out, lse, *expected = problem.dense_gradients()
    transposed = torch.ops.vsa.transpose_blocks(*problem.lists[:2], problem.kv_block_sizes.shape[0])
    grads = torch.ops.vsa.attention_backward(
        problem.dout, None, *problem.operands, out.to(dtype), lse.float(), *problem.lists[:2], *transposed,
        problem.kv_block_sizes, problem.sm_scale, 64, deterministic, "sm90", True, True,
    )  # fmt: skip
    assert_gradients(problem, grads, tuple(expected))


@pytest.mark.parametrize("width", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("head_dim", sm90.HEAD_DIMS)
def test_lists_of_every_width(head_dim, width):
    problem = problem_of({"num_q": 9, "num_kv": 8, "width": width}, head_dim)
    assert_right(problem, *native_forward(problem))
    assert_gradients(problem, problem.gradients("sm90"), problem.dense_gradients()[2:])


@pytest.mark.parametrize("num_blocks", [1, 2, 4, 5, 8, 16])
@pytest.mark.parametrize("head_dim", sm90.HEAD_DIMS)
def test_every_length(head_dim, num_blocks):
    case = {"num_q": num_blocks, "num_kv": num_blocks, "width": min(4, num_blocks), "counts": "varying"}
    problem = problem_of(case, head_dim, batch=2)
    assert_right(problem, *native_forward(problem))
    assert_gradients(problem, problem.gradients("sm90"), problem.dense_gradients()[2:])


@pytest.mark.parametrize("distance", [-1, 0, 1])
def test_either_side_of_the_length_from_which_on_work_is_ordered(distance):
    case = {"num_q": 3, "num_kv": ORDERED_BLOCKS + distance, "width": 40, "counts": "varying", "sizes": "ragged"}
    problem = problem_of(case, heads=4, kv_heads=2)
    expected = problem.dense_gradients()[2:]
    for deterministic in (False, True):
        assert_gradients(problem, problem.gradients("sm90", deterministic=deterministic), expected)


@pytest.mark.parametrize("block_size", sm90.BLOCK_SIZES["forward"])
@pytest.mark.parametrize("head_dim", sm90.HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nothing_leaks_from_slots_that_hold_no_key(dtype, head_dim, block_size):
    case = {"sizes": "ragged", "counts": "varying", "num_q": 4, "num_kv": 6, "width": 2, "past_count": "valid"}
    problem = problem_of(case, head_dim, dtype, block_size=block_size)
    assert problem.unselected().any()
    poisoned = problem.poisoned()
    for clean, value in zip(native_forward(problem), native_forward(poisoned), strict=True):
        assert torch.equal(clean, value)
    if block_size in sm90.BLOCK_SIZES["backward"]:
        # Reductions arrive in any order, and sums of fp32 depend on it; two-pass dq does not.
        both = (p.gradients("sm90", deterministic=True) for p in (problem, poisoned))
        for clean, value in zip(*both, strict=True):
            assert torch.equal(clean, value)
        assert_gradients(poisoned, poisoned.gradients("sm90"), problem.dense_gradients()[2:])


@pytest.mark.parametrize("case", ["short", "long"])
@pytest.mark.parametrize("past", ["valid", 2**30])
def test_entries_past_the_count_are_never_read(past, case):
    lengths = {"short": {"num_kv": 6, "width": 4}, "long": {"num_kv": 80, "width": 70}}[case]
    given = {"counts": "varying", "batch": 2, "num_q": 5, **lengths}
    absent, present = (problem_of(given, past_count=other) for other in (-1, past if past == "valid" else -1))
    if past != "valid":
        ids = absent.kv_indices
        present = replace(absent, kv_indices=ids.masked_fill(ids < 0, past))
    assert not torch.equal(absent.kv_indices, present.kv_indices)
    for value, other in zip(native_forward(absent), native_forward(present), strict=True):
        assert torch.equal(value, other)
    both = (p.gradients("sm90", deterministic=True) for p in (absent, present))
    for value, other in zip(*both, strict=True):
        assert torch.equal(value, other)
    assert_gradients(present, present.gradients("sm90"), absent.dense_gradients()[2:])


@pytest.mark.parametrize("block_size", sm90.BLOCK_SIZES["forward"])
def test_lists_need_not_ascend_for_the_right_result(block_size):
    case = {"num_q": 4, "num_kv": 40, "width": 36, "sizes": "ragged"}
    problem = problem_of(case, block_size=block_size)
    order = torch.randperm(36, device="cuda")
    shuffled = replace(problem, kv_indices=problem.kv_indices[..., order])
    assert_right(problem, *native_forward(shuffled))
    if block_size in sm90.BLOCK_SIZES["backward"]:
        for deterministic in (False, True):
            grads = shuffled.gradients("sm90", deterministic=deterministic)
            assert_gradients(problem, grads, problem.dense_gradients()[2:])


@pytest.mark.parametrize("factor", [1, 4, 16])
@pytest.mark.parametrize("head_dim", sm90.HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_inputs(dtype, head_dim, factor):
    problem = problem_of({"sizes": "ragged", "num_q": 4, "num_kv": 6, "width": 4}, head_dim, dtype)
    problem = replace(problem, q=problem.q * factor, k=problem.k * factor, v=problem.v * factor)
    out, lse = native_forward(problem)
    expected_out, expected_lse = problem.dense()
    # A softmax of scores in the hundreds picks one key: bars that scale with the values, lse's with its own size.
    assert_close("out", out / factor, expected_out / factor, dtype)
    assert float(((lse - expected_lse).abs() / expected_lse.abs().clamp(min=1)).max()) <= 1e-3
    # dP - delta is then a small difference of large numbers, and out was rounded: both routes are given the same one.
    transposed = torch.ops.vsa.transpose_blocks(*problem.lists[:2], 6)
    arguments = (problem.dout, None, *problem.operands, out, lse, *problem.lists[:2], *transposed)
    arguments = (*arguments, problem.kv_block_sizes, problem.sm_scale, 64)
    expected = torch.ops.vsa.attention_backward(*arguments, True, "triton", True, True)
    for deterministic in (False, True):
        grads = torch.ops.vsa.attention_backward(*arguments, deterministic, "sm90", True, True)
        for name, grad, other in zip(("dq", "dk", "dv"), grads, expected, strict=True):
            assert_routes_agree(name, grad / factor, other / factor, ROUTES)


@pytest.mark.parametrize("needs", [(True, False), (False, True)], ids=["dq", "dkv"])
@pytest.mark.parametrize("head_dim", sm90.HEAD_DIMS)
def test_frozen_inputs_skip_their_half(head_dim, needs):
    problem = problem_of({"counts": "varying", "sizes": "ragged", "num_q": 5}, head_dim)
    leaves = [x.detach().clone() for x in problem.operands]
    for leaf, wanted in zip(leaves, (needs[0], needs[1], needs[1]), strict=True):
        leaf.requires_grad_(wanted)
    out, _ = attention(*leaves, problem, "sm90")
    out.backward(problem.dout)
    for name, leaf, expected in zip("qkv", leaves, problem.dense_gradients()[2:], strict=True):
        if leaf.requires_grad:
            assert_close(f"d{name}", leaf.grad, expected, torch.bfloat16)


def test_gradient_of_a_sum_and_of_lse():
    problem = problem_of({"counts": "varying", "sizes": "ragged", "batch": 2}, 64)
    leaves = [x.detach().requires_grad_() for x in problem.operands]
    out, lse = attention(*leaves, problem, "sm90")
    dlse = torch.randn_like(lse)
    live = problem.mask.any(-1)
    loss = out.float().sum() + (lse[live] * dlse[live]).sum()
    grads = torch.autograd.grad(loss, leaves)
    assert_gradients(problem, grads, problem.dense_gradients(dlse, torch.ones_like(problem.dout))[2:])


@pytest.mark.parametrize("head_dim", sm90.HEAD_DIMS)
def test_deterministic_gradients_have_the_same_bits_every_run(head_dim):
    problem = problem_of({"num_q": 64, "num_kv": 64, "width": 20, "heads": 4}, head_dim)
    first = problem.gradients("sm90", deterministic=True)
    for _ in range(5):
        for value, other in zip(first, problem.gradients("sm90", deterministic=True), strict=True):
            assert torch.equal(value, other)
    # dk and dv have, in both forms.
    for value, other in zip(first[1:], problem.gradients("sm90")[1:], strict=True):
        assert torch.equal(value, other)


REPEATED = {"num_q": 33, "num_kv": 33, "width": 9, "heads": 16, "sizes": "ragged", "counts": "varying"}


@pytest.mark.parametrize("block_size", sm90.BLOCK_SIZES["forward"])
@pytest.mark.parametrize("head_dim", sm90.HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_200_launches_of_the_forward_have_the_same_bits(dtype, head_dim, block_size):
    problem = problem_of(REPEATED, head_dim, dtype, block_size=block_size)
    out, lse = native_forward(problem)
    assert not out.isnan().any() and not lse.isnan().any()
    same = torch.ones((), dtype=torch.bool, device="cuda")
    for _ in range(200):
        again = native_forward(problem)
        same &= (again[0] == out).all() & (again[1] == lse).all()
    assert bool(same)


@pytest.mark.parametrize("deterministic", [False, True], ids=["fused", "deterministic"])
@pytest.mark.parametrize("head_dim", sm90.HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_200_launches_of_the_backward_differ_by_summation_noise(dtype, head_dim, deterministic):
    problem = problem_of(REPEATED, head_dim, dtype)
    arguments = native_backward_arguments(problem, deterministic=deterministic)
    dq, dk, dv = BACKWARD(*arguments)
    same = torch.ones((), dtype=torch.bool, device="cuda")
    worst = torch.zeros((), device="cuda")
    for _ in range(200):
        again = BACKWARD(*arguments)
        same &= (again[1] == dk).all() & (again[2] == dv).all()
        worst = torch.maximum(worst, (again[0] - dq).abs().max())  # NaN stays
    assert bool(same), "dk or dv"
    allowed = 0.0 if deterministic else SUMMATION_NOISE * float(dq.abs().max())
    assert float(worst) <= allowed, f"dq: {float(worst):.2e}; allowed {allowed:.2e}"


def long_problem(length: int, heads: int, width: int, head_dim: int, dtype: torch.dtype) -> Problem:
    blocks = length // 64
    generator = torch.Generator("cuda").manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", generator=generator).to(dtype)

    scores = torch.rand(1, heads, blocks, blocks, device="cuda", generator=generator)
    ids = scores.topk(width).indices.sort().values.int()
    counts = torch.full((1, heads, blocks), width, dtype=torch.int32, device="cuda")
    sizes = torch.full((blocks,), 64, dtype=torch.int32, device="cuda")
    q, k, v, dout = (random(1, heads, length, head_dim) for _ in range(4))
    return Problem(q, k, v, dout, ids, counts, sizes, head_dim**-0.5, 64)


@pytest.mark.parametrize(
    "length, heads, width, head_dim, dtype",
    [
        (65536, 4, 128, 128, torch.bfloat16),
        (65536, 2, 32, 64, torch.float16),
        (262144, 2, 32, 128, torch.bfloat16),
    ],
)
def test_long_sequences_agree_with_triton_and_with_themselves(length, heads, width, head_dim, dtype):
    """Contract 2's known trap: errors that only large problems show. The first has its 1024 blocks, 12.5 % of them."""
    problem = long_problem(length, heads, width, head_dim, dtype)
    first = (*native_forward(problem), *problem.gradients("sm90"))
    others = {
        "triton": (*problem.forward("triton"), *problem.gradients("triton")),
        "again": (*native_forward(problem), *problem.gradients("sm90")),
        "deterministic": (*native_forward(problem), *problem.gradients("sm90", deterministic=True)),
    }
    for route, results in others.items():
        for name, value, other in zip(("out", "lse", "dq", "dk", "dv"), first, results, strict=True):
            assert_routes_agree(f"{name}, {route}", value, other, LONG)


def test_it_is_what_runs_here_and_triton_agrees():
    problem = problem_of({"num_q": 16, "num_kv": 16, "width": 5, "heads": 4})
    assert vsa.backend_report().devices[1].backends[0] == "sm90"
    leaves = [x.detach().requires_grad_() for x in problem.operands]

    def results(**options: Any) -> tuple[Tensor, ...]:
        with vsa.options(strict=True, **options):
            out = vsa.block_sparse_attention(*leaves, *problem.lists)
            assert isinstance(out, Tensor)
            return (out, *torch.autograd.grad(out.square().sum(), leaves))

    ours = results()
    assert torch.equal(ours[0], native_forward(problem)[0])
    for name, value, other in zip(("out", "dq", "dk", "dv"), ours, results(backend="triton"), strict=True):
        assert_routes_agree(name, value, other, ROUTES)


@pytest.mark.parametrize("shape", [{"num_q": 0}, {"batch": 0}, {"width": 0}], ids=str)
def test_nothing_to_do(shape):
    problem = problem_of({"num_q": 2, "num_kv": 3, "width": 2, "counts": 0, **shape}, 64)
    out, lse = native_forward(problem)
    assert out.shape == problem.q.shape and not out.any() and bool((lse == -math.inf).all())
    if "width" in shape or "num_q" in shape:
        assert all(not grad.any() for grad in problem.gradients("sm90"))
