"""Dtypes: autocast as `scaled_dot_product_attention` behaves under it, and a typed error for every other mixture."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from problems import DEVICES, random_problem
from torch import Tensor

import vsa_inductor as vsa
from vsa_inductor import ArgumentError

SHAPE = (5, 4, 4)  # two tiles, the second ragged
NARROW = (torch.bfloat16, torch.float16)
WIDE = (torch.float32, torch.float64)


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def tokens(*dtypes: torch.dtype, device: str = "cpu") -> list[Tensor]:
    shape = (1, 80, 2, 16)
    return [torch.randn(shape).to(device, dtype).requires_grad_() for dtype in dtypes]


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


def vsa_of(device: str, gate: float | None = None) -> Callable[..., Tensor]:
    layout = vsa.TileLayout.from_video_shape(*SHAPE, device=device)

    def attend(q: Tensor, k: Tensor, v: Tensor, given: Tensor | None = None) -> Tensor:
        out = vsa.video_sparse_attention(q, k, v, layout, sparsity=0.5, gate=gate if given is None else given)
        assert isinstance(out, Tensor)
        return out

    return attend


def dtypes_of(attend: Callable[..., Tensor], inputs: list[Tensor], autocast: torch.dtype) -> list[torch.dtype]:
    """dtype of out and of every gradient."""
    with torch.autocast(inputs[0].device.type, dtype=autocast):
        out = attend(*inputs)
    return [out.dtype, *(grad.dtype for grad in torch.autograd.grad(out.double().square().sum(), inputs))]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("autocast", NARROW, ids=str)
@pytest.mark.parametrize("dtype", [*NARROW, *WIDE], ids=str)
def test_dtypes_of_outputs_and_gradients_are_those_of_sdpa(dtype, autocast, device):
    inputs = tokens(*[dtype] * 4, device=device)
    expected = dtypes_of(sdpa, inputs[:3], autocast)
    assert dtypes_of(vsa_of(device), inputs[:3], autocast) == expected
    assert dtypes_of(vsa_of(device), inputs, autocast) == [*expected, dtype]
    if autocast == torch.bfloat16:
        compiled = torch.compile(vsa_of(device), fullgraph=True, backend="aot_eager")
        assert dtypes_of(compiled, inputs, autocast) == [*expected, dtype]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("gate", [None, 1.0, "tensor"], ids=["no gate", "gate 1", "gate tensor"])
def test_autocast_is_casting_the_inputs(gate, device):
    """Bit for bit, the selection included: the coarse stage keeps its precision."""
    layout = vsa.TileLayout.from_video_shape(12, 16, 16, device=device)
    inputs = [torch.randn(1, layout.num_tokens, 2, 16, device=device) for _ in range(4)]

    def attend(q: Tensor, k: Tensor, v: Tensor, given: Tensor) -> Tensor:
        weight = given if gate == "tensor" else gate
        return vsa.video_sparse_attention(q, k, v, layout, sparsity=0.8, gate=weight)

    with torch.autocast(device, dtype=torch.bfloat16):
        cast = attend(*inputs)
    assert torch.equal(cast, attend(*(x.bfloat16() for x in inputs)))


@pytest.mark.parametrize("device", DEVICES)
def test_autocast_around_a_step_compiled_by_inductor(device):
    dim = 16 if device == "cpu" else 32
    layout = vsa.TileLayout.from_video_shape(*SHAPE, device=device)
    to_qkv = torch.nn.Linear(dim, 3 * dim, device=device)
    x = torch.randn(1, layout.num_tokens, dim, device=device)

    def step(x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(2, (1, dim)) for part in to_qkv(x).chunk(3, dim=-1))
        out = vsa.video_sparse_attention(q, k, v, layout, sparsity=0.0, gate=1.0)
        assert isinstance(out, Tensor)
        return out

    results = []
    for function in (step, vsa.compile(step)):
        with torch.autocast(device, dtype=torch.bfloat16):
            out = function(x)
        assert out.dtype == torch.bfloat16
        (grad,) = torch.autograd.grad(out.float().square().sum(), to_qkv.weight)
        assert grad.dtype == torch.float32
        results.append((out, grad))
    for got, expected in zip(*results, strict=True):
        got, expected = got.detach().float(), expected.detach().float()
        assert float((got - expected).norm() / expected.norm()) < 3e-2


def test_block_sparse_attention_is_cast_too():
    problem = random_problem()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return vsa.block_sparse_attention(q, k, v, *problem.lists, return_lse=True)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, lse = attend(*problem.operands)
    expected = attend(*(x.bfloat16() for x in problem.operands))
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    # Nothing inside is computed in fewer bits than without autocast.
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])


def test_a_backward_under_autocast_computes_in_the_same_precision():
    problem = random_problem(dtype=torch.bfloat16)
    expected = problem.gradients("eager")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = problem.gradients("eager")
    for got, right in zip(actual, expected, strict=True):
        assert torch.equal(got, right)


def test_autocast_switched_off_inside():
    attend = vsa_of("cpu", gate=1.0)

    def step(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", enabled=False):
            inner = attend(q, k, v)
        return inner, attend(q, k, v)

    inputs = tokens(*[torch.float32] * 3)
    expected = attend(*inputs)
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inner, outer = function(*inputs)
        assert (inner.dtype, outer.dtype) == (torch.float32, torch.bfloat16)
        torch.testing.assert_close(inner, expected)


def test_a_compiled_function_follows_autocast_when_it_is_switched():
    compiled = torch.compile(vsa_of("cpu"), fullgraph=True, backend="aot_eager")
    inputs = tokens(*[torch.float32] * 3)
    seen = []
    for dtype in (None, torch.bfloat16, torch.float16, None):
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            seen.append(compiled(*inputs).dtype)
    assert seen == [torch.float32, torch.bfloat16, torch.float16, torch.float32]


def outcome(attend: Callable[..., Tensor], inputs: list[Tensor], autocast: bool) -> torch.dtype | str:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        try:
            return attend(*inputs).dtype
        except (ArgumentError, RuntimeError):
            return "refused"


@pytest.mark.parametrize("autocast", [False, True], ids=["no autocast", "autocast"])
def test_every_mixture_is_refused_where_sdpa_refuses_it(autocast):
    attend = vsa_of("cpu")
    accepted = 0
    for dtypes in itertools.product((torch.float32, torch.bfloat16, torch.float64), repeat=3):
        inputs = tokens(*dtypes)
        assert outcome(attend, inputs, autocast) == outcome(sdpa, inputs, autocast), dtypes
        accepted += outcome(attend, inputs, autocast) != "refused"
    # Without autocast the three that do not mix; with it every mixture without fp64, and fp64 alone.
    assert accepted == (9 if autocast else 3)


MIXTURES = [
    ("k", 0, (torch.float16, torch.bfloat16, torch.float16, torch.float16), "torch.bfloat16", "torch.float16"),
    ("v", 0, (torch.float32, torch.float32, torch.float64, torch.float32), "torch.float64", "torch.float32"),
    ("gate", 0, (torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.float32), "torch.float32", "torch.bfloat16"),
    # What autocast leaves alone.
    ("gate", 1, (torch.float32, torch.float32, torch.float32, torch.float64), "torch.float64", "torch.bfloat16"),
    ("k", 1, (torch.float64, torch.float32, torch.float64, torch.float64), "torch.bfloat16", "torch.float64"),
]


@pytest.mark.parametrize("argument, autocast, dtypes, given, of_q", MIXTURES)
def test_a_mixture_is_a_typed_error_whose_words_reach_the_user_of_compile(argument, autocast, dtypes, given, of_q):
    inputs = tokens(*dtypes)
    sentence = f"{argument}: got {given}; allowed: the dtype of q, {of_q}"
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bool(autocast)):
        with pytest.raises(ArgumentError) as error:
            vsa_of("cpu")(*inputs)
        assert (error.value.argument, str(error.value)) == (argument, sentence)
        # Dynamo shows an exception by its arguments, up to 2.11 each with its kind.
        with pytest.raises(Exception, match=rf"'{argument}'.*{given}.*'the dtype of q, {of_q}'"):
            torch.compile(vsa_of("cpu"), fullgraph=True, backend="eager")(*inputs)


def test_other_operators_of_a_mixture_are_refused_by_their_operator():
    problem = random_problem()
    half = problem.q.to(torch.bfloat16)
    with pytest.raises(ArgumentError, match=r"^k: got torch.float32; allowed: the dtype of q, torch.bfloat16$"):
        vsa.block_sparse_attention(half, problem.k, problem.v, *problem.lists)
    with pytest.raises(ArgumentError, match=r"^q: got torch.int64; allowed: one of"):
        vsa.block_sparse_attention(problem.q.long(), problem.k, problem.v, *problem.lists)
