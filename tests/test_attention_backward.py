"""Gradients of `vsa::attention` against autograd of a dense masked fp64 reference."""

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
from test_attention import CASES, DTYPES
from torch import Tensor

import vsa_inductor as vsa


def assert_gradients(problem: Problem, grads: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for name, x, grad, reference in zip(("dq", "dk", "dv"), problem.operands, grads, expected, strict=True):
        assert grad.dtype == x.dtype
        assert_close(name, grad, reference, x.dtype)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("device, backend", BACKENDS)
def test_equals_autograd_of_the_dense_reference(device, backend, dtype, case):
    problem = random_problem(dtype=dtype, device=device, **CASES[case])
    expected = problem.dense_gradients()[2:]
    grads = problem.gradients(backend)
    assert_gradients(problem, grads, expected)
    hidden = problem.unread()
    assert not grads[1][hidden].any() and not grads[2][hidden].any(), "dk, dv of slots that nobody reads"
    row_has_key = problem.mask.any(-1)
    assert not grads[0][~row_has_key].any(), "dq of a row without a key"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("device, backend", BACKENDS)
def test_from_given_statistics(device, backend, dtype):
    """The operator itself, given the reference's lse and its out in the operand dtype."""
    problem = random_problem(
        device=device, dtype=dtype, sizes="ragged", counts="varying", num_kv=6, width=4, head_dim=64, heads=4,
        kv_heads=2,
    )  # fmt: skip
    out, lse, *expected = problem.dense_gradients()
    transposed = torch.ops.vsa.transpose_blocks(*problem.lists[:2], problem.kv_block_sizes.shape[0])
    grads = torch.ops.vsa.attention_backward(
        problem.dout, None, *problem.operands, out.to(dtype), lse.float(), *problem.lists[:2], *transposed,
        problem.kv_block_sizes, problem.sm_scale, problem.block_size, False, backend, True, True,
    )  # fmt: skip
    assert_gradients(problem, grads, tuple(expected))
    assert all(grad.is_contiguous() for grad in grads)


@pytest.mark.parametrize("width", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("device, backend", BACKENDS)
def test_lists_of_every_width(device, backend, width):
    problem = random_problem(device=device, num_q=9, num_kv=8, width=width, dtype=torch.bfloat16, head_dim=64, heads=1)
    assert_gradients(problem, problem.gradients(backend), problem.dense_gradients()[2:])


@pytest.mark.parametrize("device, backend", BACKENDS)
def test_blocks_that_nobody_selects_get_exact_zeros(device, backend):
    problem = random_problem(device=device, num_kv=9, width=2, heads=4, kv_heads=2, counts="varying")
    unselected = problem.unselected()
    assert unselected.any() and not unselected.all()
    for grad in problem.gradients(backend)[1:]:
        blocks = grad.unflatten(2, (-1, problem.block_size))
        assert not blocks[unselected].any()
        assert blocks[~unselected].flatten(1).any(1).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("device, backend", BACKENDS)
def test_nothing_leaks_from_slots_that_hold_no_key(device, backend, dtype):
    problem = random_problem(
        device=device, dtype=dtype, sizes="ragged", counts="varying", num_q=2, num_kv=6, width=2, past_count="valid"
    )
    assert problem.unselected().any()
    for clean, value in zip(problem.gradients(backend), problem.poisoned().gradients(backend), strict=True):
        assert_same_values(value, clean, backend)


@pytest.mark.parametrize("device, backend", BACKENDS)
def test_entries_past_the_count_are_never_read(device, backend):
    settings = {"device": device, "counts": "varying", "num_kv": 6, "width": 4, "batch": 2}
    absent, valid = (random_problem(past_count=past, **settings) for past in (-1, "valid"))
    for value, other in zip(absent.gradients(backend), valid.gradients(backend), strict=True):
        assert torch.equal(value, other)


def _ones_by_sum(problem: Problem, backend: str) -> tuple[tuple[Tensor, ...], Tensor]:
    leaves = [x.detach().requires_grad_() for x in problem.operands]
    out, _ = attention(*leaves, problem, backend)
    return torch.autograd.grad(out.sum(), leaves), torch.ones_like(out)


def _dout_by_cat(problem: Problem, backend: str) -> tuple[tuple[Tensor, ...], Tensor]:
    """The gradient of a half of torch.cat along D: a slice with the strides of the whole."""
    leaves = [x.detach().requires_grad_() for x in problem.operands]
    out, _ = attention(*leaves, problem, backend)
    both = torch.randn(*out.shape[:3], 2 * out.shape[3], device=out.device, dtype=out.dtype)
    (torch.cat((out, out.detach()), -1) * both).sum().backward()
    return tuple(x.grad for x in leaves), both[..., : out.shape[3]]


def _dout_transposed(problem: Problem, backend: str) -> tuple[tuple[Tensor, ...], Tensor]:
    dout = operand(problem.q.shape, "transposed", problem.q.dtype, problem.q.device)
    return problem.gradients(backend, dout), dout


@pytest.mark.parametrize("arriving", [_ones_by_sum, _dout_by_cat, _dout_transposed])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("device, backend", BACKENDS)
def test_gradient_that_arrives_with_any_strides(device, backend, dtype, arriving):
    problem = random_problem(device=device, dtype=dtype, sizes="ragged", counts="varying", batch=2)
    seen = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.vsa.attention_backward.default:
                seen.append(args[0].stride())
            return func(*args, **(kwargs or {}))

    with Watch():
        grads, dout = arriving(problem, backend)
    contiguous = torch.empty(problem.q.shape).stride()
    assert len(seen) == 1 and seen[0] != contiguous, "the case must hand over a gradient that is not contiguous"
    if arriving is _ones_by_sum:
        assert set(seen[0]) == {0}
    assert_gradients(problem, grads, problem.dense_gradients(dout=dout)[2:])


@pytest.mark.parametrize("with_dout", [True, False])
@pytest.mark.parametrize("device, backend", BACKENDS)
def test_loss_on_lse(device, backend, with_dout):
    problem = random_problem(device=device, sizes="ragged", counts="varying", num_kv=6, width=4, heads=4, kv_heads=2)
    dlse = torch.randn(problem.q.shape[:3]).to(device)
    dout = problem.dout if with_dout else None
    leaves = [x.detach().requires_grad_() for x in problem.operands]
    out, lse = attention(*leaves, problem, backend)
    live = problem.mask.any(-1)
    loss = (lse[live] * dlse[live]).sum()
    if with_dout:
        loss = loss + (out * dout).sum()
    grads = torch.autograd.grad(loss, leaves, materialize_grads=True)
    expected = problem.dense_gradients(dlse, dout if with_dout else torch.zeros_like(problem.dout))[2:]
    assert expected[0].any()
    assert_gradients(problem, grads, expected)


@pytest.mark.parametrize("device, backend", BACKENDS)
def test_loss_on_the_public_lse(device, backend):
    """d(natural lse) / dq is the mean of the keys weighted by the softmax."""
    problem = random_problem(device=device)
    q = problem.q.detach().requires_grad_()
    with vsa.options(backend=backend, strict=True):
        _, lse = vsa.block_sparse_attention(q, problem.k, problem.v, *problem.lists, return_lse=True)
    (dq,) = torch.autograd.grad(lse.sum(), q)
    attended = problem.mask
    scores = (problem.q.double() @ problem.k.double().mT) * problem.sm_scale
    weights = torch.softmax(scores.masked_fill(~attended, -math.inf), -1)
    assert_close("dq", dq, weights @ problem.k.double() * problem.sm_scale, torch.float32)


@pytest.mark.parametrize("frozen", ["q", "k", "v", "kv", "qk", "qv"])
@pytest.mark.parametrize("device, backend", BACKENDS)
def test_frozen_inputs_skip_their_half(device, backend, frozen):
    problem = random_problem(device=device, counts="varying", sizes="ragged")
    leaves = {name: x.detach().clone() for name, x in zip("qkv", problem.operands, strict=True)}
    for name, x in leaves.items():
        x.requires_grad_(name not in frozen)
    flags = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            outputs = func(*args, **(kwargs or {}))
            if func is torch.ops.vsa.attention_backward.default:
                flags.append((args[-2:], tuple(x.shape for x in outputs)))
            assert func is not torch.ops.vsa.transpose_blocks.default or not {"k", "v"} <= set(frozen)
            return outputs

    with Watch():
        out, _ = attention(*leaves.values(), problem, backend)
        out.backward(problem.dout)
    needs_dq, needs_dkv = "q" not in frozen, not {"k", "v"} <= set(frozen)
    ((given, shapes),) = flags
    assert given == (needs_dq, needs_dkv)
    full = [problem.q.shape if needs_dq else (0,), *((problem.k.shape if needs_dkv else (0,),) * 2)]
    assert [tuple(shape) for shape in shapes] == [tuple(shape) for shape in full]
    for (name, x), expected in zip(leaves.items(), problem.dense_gradients()[2:], strict=True):
        if name in frozen:
            assert x.grad is None
        else:
            assert_close(f"d{name}", x.grad, expected, torch.float32)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("device, backend", BACKENDS)
def test_two_runs_give_the_same_bits(device, backend, deterministic):
    problem = random_problem(
        device=device, heads=4, kv_heads=2, num_q=12, num_kv=6, width=5, dtype=torch.bfloat16, head_dim=64, batch=2
    )
    first, second = (problem.gradients(backend, deterministic=deterministic) for _ in range(2))
    for value, other in zip(first, second, strict=True):
        assert torch.equal(value, other)


@pytest.mark.parametrize("device, backend", BACKENDS)
def test_nothing_depends_on_the_order_of_a_list(device, backend):
    problem = random_problem(device=device, num_kv=6, width=4, sizes="ragged")
    reversed_lists = replace(problem, kv_indices=problem.kv_indices.flip(-1))
    out, lse, *expected = problem.dense_gradients()
    value, value_lse = reversed_lists.forward(backend)
    assert_close("out", value, out, torch.float32)
    assert_lse_close(value_lse, lse, torch.float32)
    assert_gradients(problem, reversed_lists.gradients(backend), tuple(expected))


@pytest.mark.parametrize("device, backend", BACKENDS)
def test_no_list_at_all(device, backend):
    problem = random_problem(device=device)
    none = replace(
        problem, kv_indices=problem.kv_indices[..., :0], kv_num_blocks=torch.zeros_like(problem.kv_num_blocks)
    )
    for x, grad in zip(problem.operands, none.gradients(backend), strict=True):
        assert grad.shape == x.shape and not grad.any()


@pytest.mark.parametrize("forward, backward", [("eager", "triton"), ("triton", "eager")])
@pytest.mark.gpu
def test_one_backend_forward_another_backward(forward, backward):
    problem = random_problem(device="cuda", counts="varying", sizes="ragged", head_dim=64)
    leaves = [x.detach().requires_grad_() for x in problem.operands]
    out, _ = torch.ops.vsa.attention(
        *leaves, *problem.lists, problem.sm_scale, problem.block_size, True, False, forward, backward
    )
    assert_gradients(problem, torch.autograd.grad(out, leaves, problem.dout), problem.dense_gradients()[2:])


def test_a_gradient_needs_the_lse():
    problem = random_problem()
    q = problem.q.detach().requires_grad_()
    with pytest.raises(RuntimeError, match=r"return_lse=False with a gradient needed; allowed: return_lse=True"):
        attention(q, problem.k, problem.v, problem, "eager", return_lse=False)
    with torch.no_grad():
        assert attention(q, problem.k, problem.v, problem, "eager", return_lse=False)[1].shape == (0,)
    out = vsa.block_sparse_attention(q, problem.k, problem.v, *problem.lists)
    assert torch.autograd.grad(out.sum(), q)[0].any()


def test_double_backward_is_refused():
    problem = random_problem()
    leaves = [x.detach().requires_grad_() for x in problem.operands]
    out, _ = attention(*leaves, problem, "eager")
    (dq,) = torch.autograd.grad(out.square().sum(), leaves[0], create_graph=True)
    with pytest.raises(RuntimeError, match="a gradient of a gradient was asked for; allowed: first derivatives"):
        dq.sum().backward()


def test_forward_mode_is_refused():
    problem = random_problem()
    with pytest.raises(RuntimeError, match=r"vsa::attention: got a tensor with a tangent.*allowed: reverse-mode"):
        torch.func.jvp(lambda q: attention(q, problem.k, problem.v, problem, "eager")[0], (problem.q,), (problem.q,))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("q_indices", lambda x: x.long()),
        ("q_indices", lambda x: x[..., :1]),
        ("q_offsets", lambda x: x.float()),
        ("q_offsets", lambda x: x[..., :1]),
        ("dout", lambda x: x.to("meta")),
        ("out", lambda x: x[:, :, :64]),
        ("lse_log2", lambda x: x.half()),
    ],
)
def test_operands_that_do_not_fit_are_refused(name, change):
    """The kernels index with these: what is too short would be read past its end."""
    problem = random_problem()
    out, lse = problem.forward("eager")
    lists = torch.ops.vsa.transpose_blocks(problem.kv_indices, problem.kv_num_blocks, problem.kv_block_sizes.shape[0])
    q, k, v = problem.operands
    arguments = {
        "dout": torch.randn_like(out), "dlse": None, "q": q, "k": k, "v": v, "out": out, "lse_log2": lse,
        "kv_indices": problem.kv_indices, "kv_num_blocks": problem.kv_num_blocks, "q_indices": lists[0],
        "q_offsets": lists[1], "kv_block_sizes": problem.kv_block_sizes, "sm_scale": 0.1, "block_size": 64,
        "deterministic": False, "backend": "eager", "needs_dq": True, "needs_dkv": True,
    }  # fmt: skip
    torch.ops.vsa.attention_backward(**arguments)
    arguments[name] = change(arguments[name])
    with pytest.raises(vsa.ArgumentError) as caught:
        torch.ops.vsa.attention_backward(**arguments)
    assert caught.value.argument.startswith(name)


@pytest.mark.parametrize("device, backend", BACKENDS)
def test_a_gradient_that_is_nan_stays_in_its_row(device, backend):
    """Nobody lists block 0, and row 2 lists nothing: what comes into rows 0 and 2 must not reach either."""
    problem = random_problem(device=device, num_q=3, num_kv=3, width=2, dtype=torch.float32)
    lists = torch.tensor([[2, -1], [1, -1], [0, -1]], dtype=torch.int32, device=device).expand_as(problem.kv_indices)
    counts = torch.tensor([1, 1, 0], dtype=torch.int32, device=device).expand_as(problem.kv_num_blocks)
    leaves = [x.detach().requires_grad_() for x in problem.operands]
    with vsa.options(backend=backend):
        out, lse = vsa.block_sparse_attention(
            *leaves, lists.contiguous(), counts.contiguous(), problem.kv_block_sizes, return_lse=True
        )
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    dout[:, :, :64] = math.nan
    dout[:, :, 128:] = dlse[:, :, 128:] = math.nan
    dq, dk, dv = torch.autograd.grad((out, lse), leaves, (dout, dlse))
    assert not dq[:, :, 128:].any() and dq[:, :, 64:128].isfinite().all()
    for grad in (dk, dv):
        assert not grad[:, :, :64].any() and grad[:, :, 64:128].isfinite().all()
