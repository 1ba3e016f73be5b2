"""Backend `sm100` on a GPU: what stands around its backward on any that the plain kernels are built for, the attention
itself on compute capability 10.0 and 10.3. Not yet run on silicon: no such device was at hand.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from native_library import load_any_library
from problems import assert_close, assert_lse_close, random_problem
from test_sm90_gpu import assert_routes_agree
from test_sm100_prepare_emulated import expected_order
from torch import Tensor

import vsa_inductor as vsa
from vsa_inductor.backends import sm100
from vsa_inductor.backends.contract import Problem

DEVICE = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
BUILT_FOR = ((9, 0), *sm100.CAPABILITIES["forward"])
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE not in BUILT_FOR, reason="sm100: no device of compute capability 9.0, 10.0 or 10.3 here"),
]


@pytest.fixture(autouse=True, scope="module")
def library():
    load_any_library()


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda").bfloat16()


@pytest.mark.parametrize("B, H, N", [(1, 1, 1), (2, 3, 7), (1, 2, 1030)])
@pytest.mark.parametrize("view", ["contiguous", "by token", "expanded", "odd address"])
def test_transposes_and_delta(B, H, N, view):
    S, D = 64 * N, 128
    q, dout, out = (normal(B, H, S, D) for _ in range(3))
    if view == "by token":
        q, dout = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, dout))
    elif view == "expanded":
        dout = dout[..., :1, :1].expand_as(dout)
    elif view == "odd address":
        q = torch.cat((q.flatten()[:1], q.flatten()))[1:].view_as(q)
    dlse = torch.randn(B, H, S, device="cuda") if N == 7 else None
    given_dout, given_q, delta = sm100.PREPARE(dout, dlse, q, out)
    for given, x in ((given_q, q), (given_dout, dout)):
        assert torch.equal(given, x.permute(1, 3, 0, 2).reshape(H * D, B * S))
    expected = (out.double() * dout.double()).sum(-1) - (0 if dlse is None else dlse.double() / math.log(2))
    torch.testing.assert_close(delta.double(), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("shape", [(1, 1, 64, 128), (2, 3, 448, 128), (1, 2, 64 * 1030, 128)], ids=str)
def test_dq_out_of_the_accumulator(shape):
    dq = torch.randn(shape, device="cuda") * 30
    order = sm100.CONTRACT.dq_order
    assert order is not None
    axes = [order.factors[axis] for axis in order.permutation]
    inverse = [3 + order.permutation.index(axis) for axis in range(len(axes))]
    blocks = dq.view(*shape[:2], shape[2] // 64, *axes)
    accumulator = blocks.permute(0, 1, 2, *inverse).contiguous().view(shape)
    assert torch.equal(sm100.FINISH(accumulator, 0.125), (dq * 0.125).bfloat16())


@pytest.mark.parametrize("snake", [False, True])
@pytest.mark.parametrize("blocks", [1, 1023, 1024, 8192, sm100.MAX_ORDERED_BLOCKS])
def test_order_of_work(blocks, snake):
    lengths = torch.randint(0, 300, (3, blocks))
    offsets = torch.cat((torch.zeros(3, 1), lengths.cumsum(-1)), -1).int()[None].cuda()
    given = sm100.ORDER(offsets, blocks, 12 if snake else 8, snake)
    expected = expected_order(lengths.numpy(), blocks, 12 if snake else 8, snake)
    assert given.tolist() == expected.tolist()


def test_one_block_past_the_limit():
    offsets = torch.zeros(1, 1, sm100.MAX_ORDERED_BLOCKS + 2, dtype=torch.int32, device="cuda")
    with pytest.raises(RuntimeError, match=f"allowed: at most {sm100.MAX_ORDERED_BLOCKS}"):
        sm100.ORDER(offsets, 8, 8, False)


def test_in_a_cuda_graph():
    q, dout, out = (normal(1, 2, 448, 128) for _ in range(3))
    offsets = torch.arange(0, 2000, dtype=torch.int32, device="cuda")[None, None]

    def everything() -> tuple[Tensor, ...]:
        return (*sm100.PREPARE(dout, None, q, out), sm100.FINISH(q.float(), 0.5), sm100.ORDER(offsets, 64, 8, True))

    expected = everything()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        given = everything()
    q.copy_(normal(*q.shape))
    graph.replay()
    assert torch.equal(given[1], sm100.PREPARE(dout, None, q, out)[1]) and torch.equal(given[4], expected[4])


def runs(direction: str, block_size: int = 64) -> bool:
    if not torch.cuda.is_available():
        return False
    problem = Problem("cuda", DEVICE, torch.bfloat16, 128, block_size, False, True, False)
    return sm100.BACKEND.refuse(problem, direction) is None


CASES: dict[str, dict[str, Any]] = {
    "default": {"heads": 4, "num_q": 8, "num_kv": 8, "width": 4},
    "batch of two, odd": {"batch": 2, "num_q": 5, "num_kv": 5, "width": 3, "counts": "varying", "sizes": "ragged"},
    "one block": {"num_q": 1, "num_kv": 1, "width": 1},
    "strided": {"num_q": 4, "num_kv": 4, "width": 2, "view": "transposed"},
    "many waves": {"num_q": 33, "num_kv": 33, "width": 7, "heads": 9, "counts": "varying", "sizes": "ragged"},
}


@pytest.mark.parametrize("block_size", [64, 128])
@pytest.mark.parametrize("case", CASES)
def test_forward(case, block_size):
    if not runs("forward", block_size):
        pytest.skip("sm100: this device or library has no forward of it")
    problem = random_problem(**{"dtype": torch.bfloat16, "device": "cuda", "head_dim": 128, **CASES[case],
                                "block_size": block_size})  # fmt: skip
    out, lse = problem.forward("sm100")
    expected_out, expected_lse = problem.dense()
    assert_close("out", out, expected_out, torch.bfloat16)
    assert_lse_close(lse, expected_lse, torch.bfloat16)


@pytest.mark.parametrize("case", CASES)
def test_backward(case):
    if not runs("backward"):
        pytest.skip("sm100: this device or library has no backward of it")
    problem = random_problem(**{"dtype": torch.bfloat16, "device": "cuda", "head_dim": 128, **CASES[case]})
    for name, x, y in zip(("dq", "dk", "dv"), problem.gradients("sm100"), problem.dense_gradients()[2:], strict=True):
        assert_close(name, x, y, torch.bfloat16)


@pytest.mark.parametrize("blocks, width", [(1024, 128), (4096, 32)])
def test_long_sequences_agree_with_triton_and_with_themselves(blocks, width):
    """From 1024 kv blocks on work is ordered, from 4096 on launched in waves."""
    if not runs("backward"):
        pytest.skip("sm100: this device or library has no backward of it")
    problem = random_problem(heads=2, num_q=blocks, num_kv=blocks, width=width, head_dim=128, dtype=torch.bfloat16,
                             device="cuda")  # fmt: skip
    first = problem.gradients("sm100")
    for route, bars in (("sm100", (2e-2, 1e-4)), ("triton", (2e-2, 2e-3))):
        for name, x, y in zip(("dq", "dk", "dv"), first, problem.gradients(route), strict=True):
            assert_routes_agree(f"{name}, {route}", x, y, bars)


def test_it_is_what_runs_here():
    if not runs("backward"):
        pytest.skip("sm100: this device or library has no backward of it")
    assert vsa.backend_report().devices[1].backends[0] == "sm100"
