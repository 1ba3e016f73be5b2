"""How the native operators of backend `sm90` are launched, on its device: layouts, streams, graphs, threads, routes."""

from __future__ import annotations

import contextlib
import math
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from native_library import (
    BACKWARD,
    FORWARD,
    ON_HOPPER,
    any_library,
    load_any_library,
    native_backward_arguments,
    native_forward,
    problem_of,
)
from problems import Problem, assert_close, attention
from test_sm90_gpu import ROUTES, assert_gradients, assert_right, assert_routes_agree
from torch import Tensor

import vsa_inductor as vsa
from benchmarks import sanitize_native
from vsa_inductor.backends import sm90
from vsa_inductor.backends.contract import TorchArithmetic, backward_around

pytestmark = ON_HOPPER
MIXED: dict[str, Any] = {"counts": "varying", "sizes": "ragged", "num_q": 5, "num_kv": 9, "width": 5}


@pytest.fixture(autouse=True, scope="module")
def library():
    load_any_library()


def assert_same(values: Any, others: Any) -> None:
    for value, other in zip(values, others, strict=True):
        assert torch.equal(value, other)


def at_odd_address(x: Tensor) -> Tensor:
    """The same values at an address that is no multiple of 16 bytes."""
    room = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)
    return room[1:].copy_(x.flatten()).view(x.shape)


def rows_that_overlap(x: Tensor) -> Tensor:
    """Each row begins 16 bytes after the one before, inside it."""
    B, H, S, D = x.shape
    return (
        torch.randn(B * H * S * 8 + D, device=x.device).to(x.dtype).as_strided((B, H, S, D), (H * S * 8, S * 8, 8, 1))
    )


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "expanded heads": lambda x: x[:, :1].expand_as(x),
    "an expanded batch": lambda x: x[:1].expand_as(x),
    "an expanded row": lambda x: x[:, :, :1].expand_as(x),
    "an odd address": at_odd_address,
    "an odd address and [B, S, H, D]": lambda x: at_odd_address(x.transpose(1, 2).contiguous()).transpose(1, 2),
    "columns apart": lambda x: torch.stack((x, x), -1)[..., 0],
    "rows of an odd length": lambda x: torch.cat((x, x[..., :1]), -1)[..., :-1],
    "rows apart": lambda x: torch.cat((x, x), -1)[..., : x.shape[-1]],
    "every other head": lambda x: torch.stack((x, x), 2)[:, :, 1],
    "[B, S, H, D]": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "[S, B, H, D]": lambda x: x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3),
    "head dim first": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "rows that overlap": rows_that_overlap,
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("head_dim", sm90.HEAD_DIMS)
def test_operands_in_any_layout(head_dim, view):
    problem = problem_of({**MIXED, "batch": 2}, head_dim)
    viewed = replace(problem, **{name: VIEWS[view](getattr(problem, name)) for name in ("q", "k", "v", "dout")})
    plain = replace(viewed, **{name: getattr(viewed, name).clone(memory_format=torch.contiguous_format)
                               for name in ("q", "k", "v", "dout")})  # fmt: skip
    assert all(not x.is_contiguous() or x.data_ptr() % 16 for x in (*viewed.operands, viewed.dout))
    assert all(x.is_contiguous() and x.data_ptr() % 16 == 0 for x in (*plain.operands, plain.dout))
    assert_same(native_forward(viewed), native_forward(plain))
    arguments = native_backward_arguments(plain, deterministic=True)
    assert_same(BACKWARD(viewed.dout, *viewed.operands, *arguments[4:]), BACKWARD(*arguments))
    # Their sum of out * dout may come in another order, so not the same bits.
    expected = plain.dense_gradients()[2:]
    assert_gradients(plain, viewed.gradients("sm90"), expected)
    assert_gradients(plain, viewed.gradients("sm90", deterministic=True), expected)


def test_lists_in_any_layout():
    problem = problem_of({"num_kv": 5, "width": 4, "heads": 3, "num_q": 4}, 64)
    row, count = problem.kv_indices[:, :1, :1], problem.kv_num_blocks[:, :1, :1]
    ids, counts = row.expand_as(problem.kv_indices), count.expand_as(problem.kv_num_blocks)
    sizes = problem.kv_block_sizes.repeat_interleave(2)[::2]
    viewed = replace(problem, kv_indices=ids, kv_num_blocks=counts, kv_block_sizes=sizes)
    assert_right(viewed, *native_forward(viewed))
    assert_gradients(viewed, viewed.gradients("sm90"), viewed.dense_gradients()[2:])


@pytest.mark.parametrize("deterministic", [False, True], ids=["fused", "deterministic"])
def test_lists_and_statistics_at_odd_addresses(deterministic):
    problem = problem_of(MIXED)
    arguments = native_backward_arguments(problem, deterministic=deterministic)
    moved = [at_odd_address(x) if isinstance(x, Tensor) else x for x in arguments]
    assert all(x.data_ptr() % 16 for x in moved if isinstance(x, Tensor))
    expected, given = BACKWARD(*arguments), BACKWARD(*moved)
    assert_same(given[1:], expected[1:])
    assert_close("dq", given[0], expected[0].double(), torch.float32)
    lists = [at_odd_address(x) for x in problem.lists]
    assert_same(FORWARD(*problem.operands, *lists, problem.sm_scale, 64, True, False), native_forward(problem))


def filled_with_nan(*outputs: Tensor) -> list[Tensor]:
    return [torch.full_like(x, math.nan) for x in outputs]


@pytest.mark.parametrize("head_dim", sm90.HEAD_DIMS)
def test_out_forms_equal_the_functional_ones(head_dim):
    problem = problem_of(MIXED, head_dim)
    arguments = (*problem.operands, *problem.lists, problem.sm_scale, 64, True, False)
    expected = FORWARD(*arguments)
    into = filled_with_nan(*expected)
    FORWARD.out(*arguments, out=into[0], lse_log2=into[1])
    assert_same(into, expected)
    for needs in ((True, True), (True, False), (False, True)):
        backward = native_backward_arguments(problem, deterministic=True, needs=needs)
        grads = BACKWARD(*backward)
        for wanted, grad in zip((needs[0], needs[1], needs[1]), grads, strict=True):
            assert (grad.shape != (0,)) == wanted
        into = filled_with_nan(*grads)
        BACKWARD.out(*backward, **dict(zip(("dq_accum", "dk", "dv"), into, strict=True)))
        assert_same(into, grads)


def test_outputs_at_odd_addresses_are_refused():
    problem = problem_of(MIXED)
    static = (problem.sm_scale, 64, True, False)
    out, lse = native_forward(problem)
    allowed = "got an address between multiples of 16 bytes; allowed: a multiple of 16 bytes"
    with pytest.raises(RuntimeError, match=f"out: {allowed}"):
        FORWARD.out(*problem.operands, *problem.lists, *static, out=at_odd_address(out), lse_log2=lse)
    arguments = native_backward_arguments(problem)
    grads = dict(zip(("dq_accum", "dk", "dv"), BACKWARD(*arguments), strict=True))
    for name in grads:
        with pytest.raises(RuntimeError, match=f"{name}: {allowed}"):
            BACKWARD.out(*arguments, **{**grads, name: at_odd_address(grads[name])})


def test_nothing_that_is_given_changes():
    problem = problem_of({**MIXED, "past_count": "valid"})
    arguments = native_backward_arguments(problem)
    before = [x.clone() if isinstance(x, Tensor) else x for x in arguments]
    native_forward(problem), BACKWARD(*arguments)
    assert_same(*([x for x in given if isinstance(x, Tensor)] for given in (arguments, before)))


def test_opcheck():
    problem = problem_of({"counts": "varying", "view": "transposed"}, 64)
    forward = (*problem.operands, *problem.lists, problem.sm_scale, 64, True, False)
    torch.library.opcheck(FORWARD.default, forward)
    arguments = native_backward_arguments(problem, deterministic=True)
    torch.library.opcheck(BACKWARD.default, arguments)
    dout, q, k, v, lse, delta, *rest = arguments
    torch.library.opcheck(torch.ops.vsa.attention_backward_sm90_eager.default, (dout, delta, q, k, v, dout, lse, *rest))


@pytest.fixture
def nan_allocator():
    """Every new tensor is NaN, also what the native operators allocate."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


def leave_nan(*shapes: tuple[int, ...]) -> None:
    """Gives the allocator blocks full of NaN, which it hands out again for tensors of these sizes."""
    room = [torch.full(shape, math.nan, device="cuda") for shape in shapes for _ in range(4)]
    torch.cuda.synchronize()
    del room


@pytest.mark.parametrize("num_kv", [9, 260], ids=["short", "ordered"])
@pytest.mark.parametrize("head_dim", sm90.HEAD_DIMS)
def test_outputs_that_start_as_nan(nan_allocator, head_dim, num_kv):
    problem = problem_of({**MIXED, "batch": 2, "num_kv": num_kv}, head_dim)
    assert torch.empty(4, device="cuda").isnan().all()
    leave_nan(tuple(problem.q.shape), tuple(problem.k.shape), tuple(problem.q.shape[:3]))
    expected = problem.dense_gradients()[2:]
    assert_right(problem, *native_forward(problem))
    for deterministic in (False, True):
        assert_gradients(problem, problem.gradients("sm90", deterministic=deterministic), expected)


@pytest.mark.parametrize("view", ["an odd address", "[B, S, H, D]"])
def test_a_graph_replays_on_new_values(view):
    first, second = (problem_of({**MIXED, "num_kv": 7}, seed=seed) for seed in (0, 1))
    placed = [*(VIEWS[view](x) for x in first.operands), *(x.clone() for x in first.lists)]
    # Every kernel is loaded before, the one that copies too.
    FORWARD(*placed, first.sm_scale, 64, True, False)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = FORWARD(*placed, first.sm_scale, 64, True, False)
    for problem in (second, first, second):
        for place, value in zip(placed, (*problem.operands, *problem.lists), strict=True):
            place.copy_(value)
        graph.replay()
        assert_same((out, lse), native_forward(problem))


@pytest.mark.parametrize("num_kv", [7, 260], ids=["short", "ordered"])
@pytest.mark.parametrize("deterministic", [False, True], ids=["fused", "deterministic"])
def test_a_graph_of_a_step_replays_on_new_values(deterministic, num_kv):
    first, second = (problem_of({**MIXED, "num_kv": num_kv}, seed=seed) for seed in (0, 1))
    placed = replace(first, **{name: getattr(first, name).clone() for name in (
        "q", "k", "v", "dout", "kv_indices", "kv_num_blocks", "kv_block_sizes")})  # fmt: skip
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        placed.gradients("sm90", deterministic=deterministic)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        grads = placed.gradients("sm90", deterministic=deterministic)
    for problem in (second, first):
        for name in ("q", "k", "v", "dout", "kv_indices", "kv_num_blocks", "kv_block_sizes"):
            getattr(placed, name).copy_(getattr(problem, name))
        graph.replay()
        assert_gradients(problem, grads, problem.dense_gradients()[2:])
        if deterministic:
            assert_same(grads, problem.gradients("sm90", deterministic=True))


def test_the_current_stream_is_used():
    problem = problem_of({"num_q": 64, "num_kv": 64, "width": 32, "heads": 8})
    expected = native_forward(problem)[0]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2)]
    results = []
    for stream in streams:
        with torch.cuda.stream(stream):
            # Only work that waits on the same stream sees the copy finished.
            late = torch.empty_like(problem.q)
            torch.cuda._sleep(20_000_000)
            late.copy_(problem.q)
            results.append(native_forward(replace(problem, q=late))[0])
    torch.cuda.synchronize()
    assert all(torch.equal(result, expected) for result in results)


@pytest.mark.parametrize("view", ["[B, S, H, D]", "an odd address"])
def test_two_streams_at_a_time(view):
    """Each with problems of its own; what is copied and ordered on one is not freed for the other."""
    case = {**MIXED, "num_q": 16, "num_kv": 260, "heads": 4}
    problems = [problem_of(case, seed=seed) for seed in range(2)]
    problems = [replace(p, q=VIEWS[view](p.q), k=VIEWS[view](p.k), v=VIEWS[view](p.v)) for p in problems]
    arguments = [native_backward_arguments(p, deterministic=False) for p in problems]
    expected = [(*native_forward(p), *BACKWARD(*a)) for p, a in zip(problems, arguments, strict=True)]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in problems]
    results: list[list[tuple[Tensor, ...]]] = [[], []]
    for _ in range(10):
        for at, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                results[at].append((*native_forward(problems[at]), *BACKWARD(*arguments[at])))
    torch.cuda.synchronize()
    for given, wanted in zip(results, expected, strict=True):
        for out, lse, dq, dk, dv in given:
            assert_same((out, lse, dk, dv), (wanted[0], wanted[1], wanted[3], wanted[4]))
            assert_close("dq", dq, wanted[2].double(), torch.float32)


def test_a_thread_that_has_not_used_the_device():
    """It has no CUDA context of its own yet, and a graph or a pool may leave nothing to allocate first."""
    problem = problem_of(MIXED)
    arguments = (*problem.operands, *problem.lists, problem.sm_scale, 64, True, False)
    expected = FORWARD(*arguments)
    into = filled_with_nan(*expected)
    backward = native_backward_arguments(problem, deterministic=True)
    grads = BACKWARD(*backward)
    backward_into = filled_with_nan(*grads)
    torch.cuda.synchronize()
    failures: list[BaseException] = []

    def call() -> None:
        try:
            FORWARD.out(*arguments, out=into[0], lse_log2=into[1])
            BACKWARD.out(*backward, **dict(zip(("dq_accum", "dk", "dv"), backward_into, strict=True)))
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert not failures, failures
    torch.cuda.synchronize()
    assert_same(into, expected)
    assert_same(backward_into, grads)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
def test_another_device_than_the_current_one():
    problem = problem_of(MIXED, device="cuda:1")
    assert torch.cuda.current_device() == 0
    assert_right(problem, *native_forward(problem))
    assert_gradients(problem, problem.gradients("sm90"), problem.dense_gradients()[2:])
    with pytest.raises(RuntimeError, match="k: got cuda:0; allowed: cuda:1"):
        native_forward(replace(problem, k=problem.k.to("cuda:0")))


def native_step(problem: Problem) -> Callable[[], Any]:
    arguments = native_backward_arguments(problem)
    return lambda: (native_forward(problem), BACKWARD(*arguments))


def autograd_step(problem: Problem) -> Callable[[], Any]:
    return lambda: problem.gradients("sm90")


def public_step(problem: Problem) -> Callable[[], Any]:
    leaves = [x.detach().requires_grad_() for x in problem.operands]

    def step() -> Any:
        out, lse = vsa.block_sparse_attention(*leaves, *problem.lists, return_lse=True)
        return torch.autograd.grad(out.sum() + lse.sum(), leaves)

    return step


def video_step(problem: Problem) -> Callable[[], Any]:
    layout = vsa.TileLayout.from_video_shape(5, 8, 9, device="cuda")
    x = torch.randn(1, layout.num_tokens, 2, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def step() -> Any:
        out = vsa.video_sparse_attention(x, x, x, layout, sparsity=0.5, gate=1.0)
        assert isinstance(out, Tensor)
        return torch.autograd.grad(out.sum(), x)

    return step


STEPS = {"native": native_step, "autograd": autograd_step, "public": public_step, "video": video_step}
WAITING: dict[str, dict[str, Any]] = {
    "plain": {},
    "copied operands": {"view": "expanded"},
    "ordered": {"num_kv": 260},
    "negative scale": {"sm_scale": -0.1},
}


@contextlib.contextmanager
def no_waits() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    "step, case",
    [(step, "plain") for step in STEPS] + [("native", case) for case in WAITING if case != "plain"],
)
def test_nothing_waits_for_the_device(step, case):
    call = STEPS[step](problem_of({**MIXED, "heads": 4, **WAITING[case]}))
    call()  # kernels are compiled, modules loaded and pools filled
    with no_waits():
        call()
    # The mode above only sees waits of torch's own. A call that returns while the device sleeps has not waited either.
    torch.cuda.synchronize()
    torch.cuda._sleep(600_000_000)
    asleep = torch.cuda.Event()
    asleep.record()
    call()
    assert not asleep.query(), "the call waited for the device"
    torch.cuda.synchronize()


@pytest.mark.parametrize("dtype", sm90.DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", sm90.HEAD_DIMS)
@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)], ids=["both", "dq", "dkv"])
def test_eagers_operator_equals_the_work_that_graphs_do(head_dim, dtype, needs):
    """Bit for bit where delta is no sum; where it is, another order of it is all that differs."""
    problem = problem_of({**MIXED, "view": "transposed"}, head_dim, dtype)
    out, lse = torch.ops.vsa.attention_sm90(*problem.operands, *problem.lists, problem.sm_scale, 64, True, False)
    indices, counts, sizes = problem.lists
    transposed = torch.ops.vsa.transpose_blocks(indices, counts, sizes.shape[0])
    dout = problem.dout.transpose(1, 2).contiguous().transpose(1, 2)
    dlse = torch.randn(lse.shape[::-1], device="cuda").permute(2, 1, 0)
    for result, tolerance in ((torch.zeros_like(out), 0.0), (out, 2e-2)):
        for of_lse in (None, dlse):
            given = (dout, of_lse, *problem.operands, result, lse, indices, counts, *transposed, sizes)
            arguments = (*given, problem.sm_scale, 64, True, *needs)
            ours = torch.ops.vsa.attention_backward_sm90_eager(*arguments)
            graphs = backward_around(TorchArithmetic(), sm90.CONTRACT, BACKWARD.default, *arguments)
            for x, y in zip(ours, graphs, strict=True):
                assert (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype)
                if x.numel():
                    assert float((x.float() - y.float()).abs().max()) <= tolerance * float(y.float().abs().max())


@pytest.mark.parametrize(
    "head_dim, dtype, view",
    [
        (64, torch.bfloat16, "contiguous"),
        (64, torch.float16, "transposed"),
        (128, torch.bfloat16, "contiguous"),
        (128, torch.bfloat16, "transposed"),
    ],
)
def test_a_compiled_step_equals_the_eager_one(head_dim, dtype, view):
    """The kernels are the same; what is around them is generated there and our own kernels here."""
    problem = problem_of({**MIXED, "num_kv": 6, "view": view}, head_dim, dtype)
    leaves = [x.detach().requires_grad_() for x in problem.operands]
    # Not of rows without a key, whose lse is -inf.
    dlse = torch.randn(problem.q.shape[:3], device="cuda") * problem.mask.any(-1)

    def step(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return vsa.block_sparse_attention(q, k, v, *problem.lists, return_lse=True)

    torch._dynamo.reset()
    with vsa.options(deterministic=True, strict=True):
        outs = step(*leaves)
        grads = torch.autograd.grad(outs, leaves, (problem.dout, dlse))
        compiled = torch.compile(step, fullgraph=True)(*leaves)
        compiled_grads = torch.autograd.grad(compiled, leaves, (problem.dout, dlse))
        report = vsa.explain(step, *leaves)
    names = [call.name for call in report.opaque_calls]
    assert "vsa.attention_sm90" in names and "vsa.attention_backward_sm90" in names
    assert_same(compiled, outs)
    # delta is a sum that generated code may take in another order.
    for name, value, other in zip(("dq", "dk", "dv"), compiled_grads, grads, strict=True):
        assert_routes_agree(name, value, other, (5e-3, 1e-5))


def test_the_other_route_is_not_taken(monkeypatch):
    from vsa_inductor.kernels import attention as forward_kernels
    from vsa_inductor.kernels import attention_backward as backward_kernels

    def other_route(*args: Any) -> None:
        raise AssertionError("the Triton kernels ran")

    monkeypatch.setattr(forward_kernels, "launch_attention", other_route)
    monkeypatch.setattr(backward_kernels, "launch_attention_backward", other_route)
    problem = problem_of(MIXED)
    leaves = [x.detach().requires_grad_() for x in problem.operands]

    def step() -> tuple[Tensor, ...]:
        out = vsa.block_sparse_attention(*leaves, *problem.lists)
        assert isinstance(out, Tensor)
        return torch.autograd.grad(out, leaves, problem.dout)

    assert_gradients(problem, step(), problem.dense_gradients()[2:])
    with vsa.options(backend="triton"), pytest.raises(AssertionError, match="the Triton kernels ran"):
        step()
    with vsa.options(backend=("sm90", "triton")), pytest.raises(AssertionError, match="the Triton kernels ran"):
        step()


UNSUPPORTED: dict[str, dict[str, Any]] = {
    "head dim 96": {"head_dim": 96},
    "fp32": {"dtype": torch.float32},
    "blocks of 256": {"block_size": 256, "num_q": 2},
}


@pytest.mark.parametrize("change", UNSUPPORTED)
def test_where_it_refuses_the_fallback_runs_bit_for_bit(change):
    given = {**MIXED, "head_dim": 64, "dtype": torch.bfloat16, **UNSUPPORTED[change]}
    head_dim, dtype = given.pop("head_dim"), given.pop("dtype")
    problem = problem_of(given, head_dim, dtype)
    leaves = [x.detach().requires_grad_() for x in problem.operands]

    def step() -> tuple[Tensor, ...]:
        out = vsa.block_sparse_attention(*leaves, *problem.lists, block_size=problem.block_size)
        assert isinstance(out, Tensor)
        return (out, *torch.autograd.grad(out, leaves, problem.dout))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours = step()
    with vsa.options(backend="triton", strict=True):
        assert_same(ours, step())
    with vsa.options(strict=True), pytest.raises(vsa.BackendUnavailableError, match="strict=True forbids a fallback"):
        step()
    with pytest.raises(vsa.BackendUnavailableError, match="the graph asks for sm90"):
        problem.forward("sm90")


@pytest.mark.parametrize("head_dim", sm90.HEAD_DIMS)
def test_blocks_of_128_go_back_on_another_backend(head_dim):
    problem = problem_of({**MIXED, "block_size": 128}, head_dim)
    leaves = [x.detach().requires_grad_() for x in problem.operands]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out, _ = vsa.block_sparse_attention(*leaves, *problem.lists, block_size=128, return_lse=True)
    assert torch.equal(out, native_forward(problem)[0])
    assert_gradients(problem, torch.autograd.grad(out, leaves, problem.dout), problem.dense_gradients()[2:])
    with pytest.raises(vsa.BackendUnavailableError, match="supported: 64"):
        attention(*leaves, problem, "sm90")[0].sum().backward()


def test_either_half_on_triton():
    problem = problem_of(MIXED)
    leaves = [x.detach().requires_grad_() for x in problem.operands]
    for backends in (("sm90", "triton"), ("triton", "sm90")):
        with vsa.options(backend=backends, strict=True):
            out = vsa.block_sparse_attention(*leaves, *problem.lists)
            assert isinstance(out, Tensor)
            grads = torch.autograd.grad(out, leaves, problem.dout)
        for name, value, other in zip(("dq", "dk", "dv"), grads, problem.gradients("sm90"), strict=True):
            assert_routes_agree(name, value, other, ROUTES)


def test_sanitizer_cases_launch_every_kernel_of_the_library():
    # Every kernel has a section of its own for its parameters.
    wanted = set(re.findall(rb"\.nv\.constant0\.(_ZN3vsa\w+)", any_library().read_bytes()))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for case in sanitize_native.cases():
            sanitize_native.run_case(case)
        torch.cuda.synchronize()
    launched = {event.name for event in profile.events() if "vsa::" in event.name}
    assert len(launched) == len(wanted), f"launched {sorted(launched)} of {sorted(wanted)}"
