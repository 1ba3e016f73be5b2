"""One region: graphs, shapes, options and numerics of compiled calls, forward and backward, against eager and fp64."""

from __future__ import annotations

import math

import pytest
import torch
from problems import DEVICES
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import vsa_inductor as vsa

SHAPES = [(5, 6, 7), (4, 8, 8), (6, 5, 9), (3, 9, 9)]


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _tokens(shape, heads=2, dim=64) -> list[Tensor]:
    return [torch.randn(1, math.prod(shape), heads, dim, requires_grad=True) for _ in range(4)]


def _attend(q, k, v, layout, gate=None):
    return vsa.video_sparse_attention(q, k, v, layout, sparsity=0.5, gate=gate)


def _attend_shape(q, k, v, T, H, W, gate=None):
    return _attend(q, k, v, vsa.TileLayout.from_video_shape(T, H, W, device=q.device), gate)


def _nodes(graph: torch.fx.GraphModule, name: str) -> list[torch.fx.Node]:
    return [node for node in graph.graph.nodes if name in str(node.target)]


def test_one_graph_whatever_the_coarse_stage_selects():
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(_attend, fullgraph=True, backend=counter)
    layout = vsa.TileLayout.from_video_shape(5, 6, 7)
    picks = set()
    for _ in range(3):
        q, k, v, gate = _tokens((5, 6, 7))
        tiled = [torch.ops.vsa.tile(x.detach(), layout.token_slot, layout.slot_token) for x in (q, k)]
        means = [vsa.selection.tile_means(x, layout.kv_block_sizes, 64) for x in tiled]
        picks.add(tuple(torch.ops.vsa.select_blocks(means[0] @ means[1].mT, 4)[0].flatten().tolist()))
        out = compiled(q, k, v, layout, gate)
        torch.testing.assert_close(out, _attend(q, k, v, layout, gate))
        out.sum().backward()
    assert len(picks) == 3, "the inputs must select differently for this test to mean anything"
    assert counter.frame_count == 1
    assert torch._dynamo.utils.counters["graph_break"] == {}
    assert len(_nodes(counter.graphs[0], "vsa.attention")) == 1


@pytest.mark.parametrize("build_inside", [False, True], ids=["layout argument", "layout built inside"])
@pytest.mark.parametrize(("dynamic", "most"), [(None, 2), (True, 1)])
def test_four_video_shapes(build_inside, dynamic, most):
    counter = CompileCounterWithBackend("aot_eager")
    function = _attend_shape if build_inside else _attend
    compiled = torch.compile(function, fullgraph=True, backend=counter, dynamic=dynamic)
    for shape in SHAPES:
        q, k, v, gate = _tokens(shape)
        where = shape if build_inside else (vsa.TileLayout.from_video_shape(*shape),)
        out, expected = compiled(q, k, v, *where, gate), function(q, k, v, *where, gate)
        torch.testing.assert_close(out, expected)
        got = torch.autograd.grad(out.square().sum(), (q, k, v, gate))
        for a, b in zip(got, torch.autograd.grad(expected.square().sum(), (q, k, v, gate)), strict=True):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
    assert counter.frame_count <= most


def test_packed_prefix_makes_two_attention_calls_with_their_own_lists():
    counter = CompileCounterWithBackend("aot_eager")
    layout = vsa.TileLayout.from_video_shape(5, 6, 7, prefix=(7, 70))
    q, k, v = (torch.randn(1, layout.num_tokens, 2, 64, requires_grad=True) for _ in range(3))
    out = torch.compile(_attend, fullgraph=True, backend=counter)(q, k, v, layout)
    torch.testing.assert_close(out, _attend(q, k, v, layout))
    widths = [node.args[3].meta["example_value"].shape[-1] for node in _nodes(counter.graphs[0], "vsa.attention")]
    assert widths == [11, 3 + 4], "prefix rows list all 11 blocks, video rows the 3 prefix blocks and half of 8"
    # Prefix queries are dense: they equal dense attention.
    dense = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)
    torch.testing.assert_close(out[:, :77], dense[:, :77])


class TestOptions:
    @staticmethod
    def _names(counter) -> list[list[str]]:
        graphs = [[node.args[-2] for node in _nodes(graph, "vsa.attention")] for graph in counter.graphs]
        return [[name.partition("@")[0] for name in names] for names in graphs]

    def test_flipping_after_compiling_takes_effect(self):
        counter = CompileCounterWithBackend("eager")
        compiled = torch.compile(_attend, fullgraph=True, backend=counter)
        layout = vsa.TileLayout.from_video_shape(4, 4, 8)
        q, k, v, _ = _tokens((4, 4, 8))
        compiled(q, k, v, layout)
        with vsa.options(deterministic=True):
            compiled(q, k, v, layout)
        assert [_nodes(graph, "vsa.attention")[0].args[9] for graph in counter.graphs] == [False, True]
        compiled(q, k, v, layout)
        assert counter.frame_count == 2, "going back uses the first graph again"
        with vsa.options(backend="triton", strict=True), pytest.raises(Exception, match=r"strict=True.*cpu device"):
            compiled(q, k, v, layout)

    def test_nesting_and_use_inside_a_compiled_function(self):
        def function(q, k, v, layout):
            with vsa.options(deterministic=True):
                with vsa.options(backend="eager"):
                    inner = _attend(q, k, v, layout)
                outer = _attend(q, k, v, layout)
            return inner + outer + _attend(q, k, v, layout)

        counter = CompileCounterWithBackend("eager")
        layout = vsa.TileLayout.from_video_shape(4, 4, 8)
        q, k, v, _ = _tokens((4, 4, 8))
        out = torch.compile(function, fullgraph=True, backend=counter)(q, k, v, layout)
        torch.testing.assert_close(out, function(q, k, v, layout))
        assert [node.args[9] for node in _nodes(counter.graphs[0], "vsa.attention")] == [True, True, False]
        assert vsa.options().__enter__() == vsa.Options(), "nothing leaks out of the compiled function"

    def test_implementation_hash_is_in_the_graph(self):
        counter = CompileCounterWithBackend("eager")
        layout = vsa.TileLayout.from_video_shape(4, 4, 8)
        torch.compile(_attend, fullgraph=True, backend=counter)(*_tokens((4, 4, 8))[:3], layout)
        (node,) = _nodes(counter.graphs[0], "vsa.attention")
        for name in node.args[-2:]:
            assert name == vsa.backends.capability.backend_named("eager").identity


def _dense(q, k, v, lists, counts, sizes, block):
    """fp64 attention under the mask that the lists and sizes mean; out and natural lse, 0 and -inf for empty rows."""
    B, H, N_q, M = lists.shape
    N_kv = sizes.shape[0]
    device = lists.device
    listed = torch.zeros(B, H, N_q, N_kv + 1, dtype=torch.bool, device=device)
    valid = torch.arange(M, device=device) < counts[..., None]
    listed.scatter_(3, torch.where(valid, lists, N_kv).long(), True)
    mask = listed[..., :N_kv, None] & (torch.arange(block, device=device) < sizes[:, None])
    mask = mask.flatten(3).repeat_interleave(block, 2)
    q, k, v = (x.double() for x in (q, k, v))
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~mask, -math.inf)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0)[..., None])
    return weights @ v, lse


def _problem(B, H, H_kv, N_q, N_kv, M, ragged, empty_row=False, unselected=None):
    block, D = 64, 64
    ids = torch.stack([torch.randperm(N_kv)[:M].sort().values for _ in range(B * H * N_q)]).view(B, H, N_q, M)
    counts = torch.randint(1, M + 1, (B, H, N_q), dtype=torch.int32)
    if unselected is not None:
        # A list may not name a block twice: only the first entry of a row is meant where one was replaced.
        ids = torch.where(ids == unselected, (unselected + 1) % N_kv, ids)
        counts.clamp_(max=1)
    if empty_row:
        counts[:, :, 0] = 0
    sizes = torch.randint(0, block + 1, (N_kv,), dtype=torch.int32) if ragged else torch.full((N_kv,), block)
    q = torch.randn(B, H, N_q * block, D)
    k, v = (torch.randn(B, H_kv, N_kv * block, D) for _ in range(2))
    return q, k, v, ids.int(), counts, sizes.int()


# Sizes only: the tensors are drawn in the test, after its seed.
PROBLEMS = {
    "plain": dict(B=1, H=2, H_kv=2, N_q=4, N_kv=4, M=2, ragged=False),
    "ragged": dict(B=2, H=2, H_kv=2, N_q=4, N_kv=6, M=3, ragged=True),
    "cross length": dict(B=1, H=2, H_kv=2, N_q=3, N_kv=8, M=5, ragged=True),
    "empty row": dict(B=1, H=2, H_kv=2, N_q=4, N_kv=4, M=3, ragged=False, empty_row=True),
    "unselected kv block": dict(B=1, H=2, H_kv=2, N_q=4, N_kv=5, M=3, ragged=False, unselected=2),
    "odd block counts": dict(B=2, H=2, H_kv=2, N_q=7, N_kv=5, M=3, ragged=True),
    "grouped queries": dict(B=2, H=4, H_kv=2, N_q=3, N_kv=4, M=2, ragged=True),
}


@pytest.fixture(scope="module")
def compiled_blocks():
    """One compilation for every problem: a loss that sends zero-stride, cat-made and lse gradients back."""

    def step(q, k, v, lists, counts, sizes, form):
        scaled = q * 1.5
        out, lse = vsa.block_sparse_attention(scaled, k, v, lists, counts, sizes, return_lse=True)
        finite = torch.where(torch.isinf(lse), 0, lse)
        if form == "sum":
            return out, lse, out.sum()
        if form == "cat":
            joined = torch.cat((out, scaled), dim=2)
            return out, lse, (joined * torch.linspace(0, 1, 64, device=q.device)).square().sum()
        return out, lse, (finite * finite.sin()).sum()

    return step, torch.compile(step, fullgraph=True, dynamic=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", ["sum", "cat", "lse"])
@pytest.mark.parametrize("name", list(PROBLEMS))
def test_compiled_block_equals_eager_and_fp64(compiled_blocks, name, form, device, fresh_dynamo):
    step, compiled = compiled_blocks
    q, k, v, lists, counts, sizes = (x.to(device) for x in _problem(**PROBLEMS[name]))

    def run(function, inputs):
        inputs = [x.clone().requires_grad_() for x in inputs]
        out, lse, loss = function(*inputs, lists, counts, sizes, form)
        return out, lse, torch.autograd.grad(loss, inputs, allow_unused=True)

    def dense(q, k, v, lists, counts, sizes, form):
        out, lse = _dense(q * 1.5, k, v, lists, counts, sizes, 64)
        if form == "sum":
            return out, lse, out.sum()
        if form == "cat":
            joined = torch.cat((out, q * 1.5), dim=2)
            return out, lse, (joined * torch.linspace(0, 1, 64, device=q.device)).square().sum()
        finite = torch.where(torch.isinf(lse), 0, lse)
        return out, lse, (finite * finite.sin()).sum()

    results = [run(compiled, (q, k, v)), run(step, (q, k, v))]
    out, lse, grads = run(dense, [x.double() for x in (q, k, v)])
    for got_out, got_lse, got_grads in results:
        torch.testing.assert_close(got_out.double(), out, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(got_lse.double(), lse, atol=1e-5, rtol=1e-5)
        for got, expected in zip(got_grads, grads, strict=True):
            expected = torch.zeros_like(got) if expected is None else expected
            torch.testing.assert_close(got.double(), expected.double(), atol=5e-4, rtol=1e-4)
    if name == "unselected kv block":
        for grad in results[0][2][1:]:
            assert torch.equal(grad[:, :, 128:192], torch.zeros_like(grad[:, :, 128:192]))


def test_sm_scale_and_sparsity_may_be_arguments():
    layout = vsa.TileLayout.from_video_shape(4, 4, 8)
    q, k, v, _ = _tokens((4, 4, 8))

    def attend(q, sm_scale, sparsity):
        return vsa.video_sparse_attention(q, k, v, layout, sparsity=sparsity, sm_scale=sm_scale)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for arguments in ((0.1, 0.5), (0.2, 0.5), (0.3, 0.0)):
        torch.testing.assert_close(compiled(q, *arguments), attend(q, *arguments))
