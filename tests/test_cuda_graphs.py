"""CUDA graphs: what is captured once runs on new values of every input, lists, counts and sizes included."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch._inductor.cudagraph_trees
from problems import Problem, random_problem
from torch import Tensor
from torch._dynamo.utils import counters

import vsa_inductor as vsa

REPLAYS = 20
GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a CUDA device")]
# Video shapes of equal numbers of tokens and tiles whose tables differ: where the ragged tiles are, and how ragged.
SHAPES = [(5, 6, 4), (6, 5, 4), (5, 4, 6), (6, 4, 5), (4, 5, 6), (4, 6, 5)]


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    if torch.cuda.is_available():
        torch._inductor.cudagraph_trees.reset_cudagraph_trees()
    counters.clear()
    yield
    torch._dynamo.reset()


def problem_of(seed: int, device: str) -> Problem:
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    return random_problem(
        num_q=3, num_kv=5, width=4, head_dim=64, counts="varying", sizes="ragged", past_count="valid", dtype=dtype,
        device=device, seed=seed,
    )  # fmt: skip


def attend_blocks(q: Tensor, k: Tensor, v: Tensor, *lists: Tensor) -> tuple[Tensor, Tensor]:
    out, lse = vsa.block_sparse_attention(q, k, v, *lists, return_lse=True)
    return out, lse


def block_inputs(seed: int, device: str) -> list[Tensor]:
    problem = problem_of(seed, device)
    return [*problem.operands, *problem.lists]


def attend_video(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, *tables: Tensor) -> Tensor:
    """The layout's tables as tensors, so that a replay can be given others."""
    layout = vsa.TileLayout(*tables, video_shape=SHAPES[0], tile=(4, 4, 4), prefix=())
    out = vsa.video_sparse_attention(q, k, v, layout, sparsity=0.5, gate=gate)
    assert isinstance(out, Tensor)
    return out


def video_inputs(seed: int, device: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    layout = vsa.TileLayout.from_video_shape(*SHAPES[seed % len(SHAPES)], device=device)
    shape = (1, layout.num_tokens, 2, 64)
    values = [torch.randn(shape, generator=generator).to(device, dtype) for _ in range(4)]
    return [*values, layout.token_slot, layout.slot_token, layout.kv_block_sizes]


CASES: dict[str, tuple[Callable[..., Any], Callable[[int, str], list[Tensor]]]] = {
    "block_sparse_attention": (attend_blocks, block_inputs),
    "video_sparse_attention": (attend_video, video_inputs),
}


def outputs_of(function: Callable[..., Any], inputs: Sequence[Tensor], train: bool) -> list[Tensor]:
    """The outputs and, with ``train``, the gradients of the floating-point inputs, as copies."""
    inputs = [x.detach().requires_grad_(train and x.is_floating_point()) for x in inputs]
    out = function(*inputs)
    results = [*out] if isinstance(out, tuple) else [out]
    if train:
        loss = sum(torch.where(x.isinf(), 0, x).float().square().sum() for x in results)
        results += torch.autograd.grad(loss, [x for x in inputs if x.requires_grad])
    return [x.detach().clone() for x in results]


def assert_same(actual: list[Tensor], expected: list[Tensor]) -> None:
    limit = 1e-5 if expected[0].dtype == torch.float32 else 2e-2
    for place, (got, right) in enumerate(zip(actual, expected, strict=True)):
        finite = ~right.isinf()
        assert torch.equal(got.isinf(), right.isinf()), place
        got, right = got[finite].double(), right[finite].double()
        assert float((got - right).norm() / right.norm().clamp(min=1e-6)) < limit, place


def assert_all_differ(results: list[list[Tensor]]) -> None:
    """Every replay must have something new to show."""
    for outputs in zip(*results, strict=True):
        assert not any(torch.equal(a, b) for a, b in itertools.pairwise(outputs))


MODES = [
    pytest.param("cpu", True, id="cpu-training step"),
    pytest.param("cuda", False, id="cuda-inference", marks=GPU),
    pytest.param("cuda", True, id="cuda-training step", marks=GPU),
]


@pytest.mark.parametrize("device, train", MODES)
@pytest.mark.parametrize("case", CASES)
def test_reduce_overhead_on_new_values_lists_and_sizes(case, device, train):
    """On the CPU the mode makes no CUDA graphs; the same calls must be right there too."""
    function, inputs_of = CASES[case]
    compiled = vsa.compile(function, mode="reduce-overhead")
    results = []
    with torch.set_grad_enabled(train):
        for seed in range(REPLAYS + 2 if device == "cuda" else 4):
            inputs = inputs_of(seed, device)
            torch.compiler.cudagraph_mark_step_begin()
            actual, expected = outputs_of(compiled, inputs, train), outputs_of(function, inputs, train)
            assert_same(actual, expected)
            if case == "block_sparse_attention":
                # The operator alone makes it: the same kernel on the same values.
                assert torch.equal(actual[0], expected[0])
            results.append(actual)
    assert_all_differ(results)
    assert counters["stats"]["unique_graphs"] == 1, "new lists and sizes are not a reason to compile again"
    if device == "cuda":
        assert_recorded(directions=1 + train)


def assert_recorded(directions: int) -> None:
    """CUDA graphs were recorded for each direction, none was refused, and they were not recorded for every step."""
    assert counters["inductor"]["cudagraph_skips"] == 0
    manager = torch._inductor.cudagraph_trees.get_container(torch.cuda.current_device()).tree_manager
    assert manager is not None
    pending, recorded = [*manager.get_roots()], 0
    while pending:
        recorded += 1
        pending += [child for children in pending.pop().children.values() for child in children]
    assert directions <= recorded <= 2 * directions


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training step"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=GPU)])
def test_a_graph_captured_by_hand(case, train, device):
    """The eager calls under `torch.cuda.CUDAGraph`: none of them synchronises or keeps a value on the host."""
    function, inputs_of = CASES[case]
    static = [x.clone().requires_grad_(train and x.is_floating_point()) for x in inputs_of(0, device)]
    leaves = [x for x in static if x.requires_grad]

    def run() -> list[Tensor]:
        out = function(*static)
        results = [*out] if isinstance(out, tuple) else [out]
        if train:
            loss = sum(torch.where(x.isinf(), 0, x).float().square().sum() for x in results)
            results += torch.autograd.grad(loss, leaves)
        return [x.detach() for x in results]

    with torch.set_grad_enabled(train):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = run()
        results = []
        for seed in range(1, REPLAYS + 1):
            inputs = inputs_of(seed, device)
            with torch.no_grad():
                for target, value in zip(static, inputs, strict=True):
                    target.copy_(value)
            graph.replay()
            results.append([x.clone() for x in captured])
            expected = outputs_of(function, inputs, train)
            assert_same(results[-1], expected)
            if case == "block_sparse_attention":
                assert all(map(torch.equal, results[-1], expected)), "the same kernels on the same values"
    assert_all_differ(results)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=GPU)])
def test_two_layouts_of_different_lengths_get_a_graph_each(device):
    """`dynamic=True` under CUDA graphs: a length is a recording, going back to one is a replay."""

    def attend(q: Tensor, k: Tensor, v: Tensor, layout: vsa.TileLayout) -> Tensor:
        return vsa.video_sparse_attention(q, k, v, layout, sparsity=0.0)

    compiled = vsa.compile(attend, mode="reduce-overhead", dynamic=True)
    with torch.no_grad():
        for round_ in range(4):
            for shape in ((5, 6, 4), (8, 8, 8)):
                layout = vsa.TileLayout.from_video_shape(*shape, device=device)
                torch.manual_seed(round_)
                inputs = [torch.randn(1, layout.num_tokens, 2, 64, device=device).bfloat16() for _ in range(3)]
                torch.compiler.cudagraph_mark_step_begin()
                assert_same([compiled(*inputs, layout).clone()], [attend(*inputs, layout)])
    assert counters["inductor"]["cudagraph_skips"] == 0
