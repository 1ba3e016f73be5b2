"""Shapes that change between calls: how often a function is compiled, and that every size gives the right answer."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from problems import DEVICES, GPU
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from vsa_inductor import ArgumentError, BlockSelection, TileLayout, block_sparse_attention, video_sparse_attention
from vsa_inductor.selection import num_kept_blocks

# Video shape and sparsity of six calls. No two sizes of one call are equal by accident: torch would assume it.
CALLS = [
    ((5, 4, 8), 0.5),
    ((6, 8, 9), 0.5),
    ((6, 8, 9), 0.6),
    ((8, 12, 9), 0.8),
    ((7, 12, 9), 0.9),
    ((4, 12, 9), 0.3),
]


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _tensors(layout: TileLayout, batch: int = 2, heads: int = 3, kv_heads: int = 3, dim: int = 16) -> list[Tensor]:
    device = layout.token_slot.device
    return [
        torch.randn(batch, layout.num_tokens, H, dim, device=device, requires_grad=True)
        for H in (heads, kv_heads, kv_heads)
    ]


def _video(q: Tensor, k: Tensor, v: Tensor, layout: TileLayout, sparsity: float) -> Tensor:
    out = video_sparse_attention(q.sin(), k.cos(), v * 2, layout, sparsity=sparsity, gate=1.0)
    assert isinstance(out, Tensor)
    return out.sin()


def _assert_same_step(compiled: Callable[..., Tensor], fn: Callable[..., Tensor], leaves: list[Tensor], *rest: Any):
    """Output and gradients of the compiled function are those of the eager one."""
    for got, expected in zip(_step(compiled, leaves, *rest), _step(fn, leaves, *rest), strict=True):
        torch.testing.assert_close(got, expected, rtol=2e-3, atol=2e-4)


def _step(fn: Callable[..., Tensor], leaves: list[Tensor], *rest: Any) -> list[Tensor]:
    out = fn(*leaves, *rest)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]


@pytest.mark.parametrize(("dynamic", "most"), [(None, 3), (True, 1)], ids=["automatic", "dynamic"])
def test_video_shape_and_sparsity_change(dynamic, most):
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(_video, fullgraph=True, dynamic=dynamic, backend=counter)
    for shape, sparsity in CALLS:
        layout = TileLayout.from_video_shape(*shape)
        _assert_same_step(compiled, _video, _tensors(layout), layout, sparsity)
    assert counter.frame_count <= most


@pytest.mark.parametrize("device", DEVICES)
def test_one_inductor_graph_for_every_shape_and_sparsity(device):
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(_video, fullgraph=True, dynamic=True, backend=counter)
    for shape, sparsity in CALLS:
        layout = TileLayout.from_video_shape(*shape, device=device)
        _assert_same_step(compiled, _video, _tensors(layout), layout, sparsity)
    assert counter.frame_count == 1


def test_static_shapes_compile_once_each():
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(_video, fullgraph=True, dynamic=False, backend=counter)
    shapes = [(5, 4, 8), (6, 8, 9), (8, 12, 9)]
    for shape in shapes * 2:
        layout = TileLayout.from_video_shape(*shape)
        with torch.no_grad():
            compiled(*_tensors(layout), layout, 0.5)
    assert counter.frame_count == len(shapes)


def test_a_constant_sparsity_is_a_constant_size():
    """The count is unbacked only where the float changes: constant sizes make better code and CUDA graphs."""
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(_video, fullgraph=True, backend=keep)
    layout = TileLayout.from_video_shape(5, 4, 8)
    for sparsity in (0.5, 0.6):
        compiled(*_tensors(layout), layout, sparsity)
    called = [[node.target for node in graph.graph.nodes] for graph in graphs]
    assert [torch.ops.vsa.num_kept_blocks in names for names in called] == [False, True]


def test_a_changing_sparsity_on_another_default_device():
    """The count is made on the host, whatever device new tensors are made on."""
    layout = TileLayout.from_video_shape(5, 4, 8)
    compiled = torch.compile(_video, fullgraph=True, backend="aot_eager")
    for sparsity in (0.5, 0.3):
        tensors = [x.detach() for x in _tensors(layout)]
        with torch.device("meta"):
            out = compiled(*tensors, layout, sparsity)
        torch.testing.assert_close(out, _video(*tensors, layout, sparsity))


@pytest.mark.parametrize("sparsity", [-0.1, 1.1, float("nan")])
def test_a_changing_sparsity_out_of_range_is_an_error(sparsity):
    compiled = torch.compile(_video, fullgraph=True, backend="aot_eager")
    layout = TileLayout.from_video_shape(5, 4, 8)
    tensors = _tensors(layout)
    for good in (0.5, 0.6):
        compiled(*tensors, layout, good)
    with pytest.raises(Exception, match=r"ArgumentError\(.*'sparsity'.*0 <= sparsity <= 1"):
        compiled(*tensors, layout, sparsity)


def test_count_of_kept_blocks_from_a_tensor():
    def kept(density: float, num_blocks: int) -> int:
        return torch.ops.vsa.num_kept_blocks(torch.tensor(density, dtype=torch.float64), num_blocks)

    for sparsity, num_blocks in itertools.product([0, 0.1, 0.3, 0.5, 0.7, 0.9, 0.999, 1], [1, 3, 10, 624, 1440]):
        assert kept(1 - sparsity, num_blocks) == num_kept_blocks(sparsity, num_blocks)
    with pytest.raises(ArgumentError, match=r"density: got 1\.5"):
        kept(1.5, 4)
    with pytest.raises(ArgumentError, match="num_blocks: got 0"):
        kept(0.5, 0)
    with pytest.raises(ArgumentError, match="scalar tensor"):
        torch.ops.vsa.num_kept_blocks(torch.ones(3), 4)


def _lists(batch: int, heads: int, N_q: int, N_kv: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random lists with random counts, empty ones too, and ragged blocks."""
    ids = torch.stack([torch.randperm(N_kv)[:width].sort().values for _ in range(batch * heads * N_q)])
    counts = torch.randint(0, width + 1, (batch, heads, N_q), dtype=torch.int32)
    sizes = torch.randint(0, 65, (N_kv,), dtype=torch.int32)
    return ids.to(torch.int32).view(batch, heads, N_q, width), counts, sizes


def _block_sparse(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, counts: Tensor, sizes: Tensor) -> Tensor:
    out, lse = block_sparse_attention(q.sin(), k, v, ids, counts, sizes, return_lse=True)
    return out * torch.where(lse.isinf(), 0, lse)[..., None]


def _tile_order(batch: int, heads: int, kv_heads: int, N_q: int, N_kv: int, dim: int = 16) -> list[Tensor]:
    shapes = [(heads, N_q), (kv_heads, N_kv), (kv_heads, N_kv)]
    return [torch.randn(batch, H, N * 64, dim, requires_grad=True) for H, N in shapes]


# batch, N_q, N_kv, M: each changes alone, then all together.
SIZES = [(3, 4, 6, 5), (7, 4, 6, 5), (7, 9, 6, 5), (7, 9, 8, 5), (7, 9, 8, 3), (5, 2, 9, 4)]


@pytest.mark.parametrize(("dynamic", "most"), [(None, 5), (True, 1)], ids=["automatic", "dynamic"])
def test_batch_blocks_and_width_of_the_lists_change(dynamic, most):
    """Automatic: one graph more for each of the four sizes that turns out to change, and none after that."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(_block_sparse, fullgraph=True, dynamic=dynamic, backend=counter)
    for batch, N_q, N_kv, width in SIZES:
        leaves = _tile_order(batch, 2, 1, N_q, N_kv)
        _assert_same_step(compiled, _block_sparse, leaves, *_lists(batch, 2, N_q, N_kv, width))
    assert counter.frame_count <= most


def _mark(tensor: Tensor, *dims: int) -> None:
    for dim in dims:
        torch._dynamo.decorators.mark_unbacked(tensor, dim)


def test_unbacked_batch_and_lists():
    """Sizes that nothing at all is known of, as behind a `nonzero`: no guard, so none may be asked for."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(_block_sparse, fullgraph=True, backend=counter)
    for batch, width in [(3, 2), (1, 1), (2, 5)]:
        leaves, lists = _tile_order(batch, 2, 1, 4, 5), _lists(batch, 2, 4, 5, width)
        for x in leaves:
            _mark(x, 0)
        _mark(lists[0], 0, 3)
        _mark(lists[1], 0)
        _assert_same_step(compiled, _block_sparse, leaves, *lists)
    assert counter.frame_count == 1


def test_unbacked_number_of_blocks():
    def fn(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        """Drops kv blocks, as many as the data say, and attends what is left."""
        kept = keep.nonzero().flatten()
        k, v = (x.unflatten(2, (-1, 64)).index_select(2, kept).flatten(2, 3) for x in (k, v))
        N_q, N_kv = q.shape[2] // 64, kept.shape[0]
        lists = BlockSelection.dense(q.shape[0], q.shape[1], N_q, N_kv)
        sizes = torch.full((N_kv,), 64, dtype=torch.int32)
        out = block_sparse_attention(q, k, v, lists.kv_indices, lists.kv_num_blocks, sizes)
        assert isinstance(out, Tensor)
        return out

    counter = CompileCounterWithBackend("aot_eager")
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(fn, fullgraph=True, backend=counter)
        for keep in ([1, 0, 1, 1, 0], [0, 0, 0, 1, 0], [1, 1, 1, 1, 1]):
            _assert_same_step(compiled, fn, _tile_order(2, 2, 1, 4, 5), torch.tensor(keep))
    assert counter.frame_count == 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("shape", "batch", "heads", "kv_heads"),
    [
        pytest.param((1, 1, 1), 1, 1, 1, id="one token"),
        pytest.param((4, 4, 4), 1, 1, 1, id="one full tile"),
        pytest.param((1, 3, 5), 1, 2, 1, id="one ragged tile"),
        pytest.param((1, 1, 9), 2, 1, 1, id="a line"),
        pytest.param((5, 4, 8), 0, 2, 1, id="no batch"),
        pytest.param((5, 4, 8), 1, 4, 2, id="grouped queries"),
    ],
)
def test_small_sizes(device, shape, batch, heads, kv_heads):
    layout = TileLayout.from_video_shape(*shape, device=device)
    compiled = torch.compile(_video, fullgraph=True, backend="aot_eager")
    _assert_same_step(compiled, _video, _tensors(layout, batch, heads, kv_heads), layout, 0.5)


def test_a_size_becomes_one():
    """0 and 1 are what torch specialises in a graph with dynamic sizes."""
    compiled = torch.compile(_video, fullgraph=True, backend="aot_eager", dynamic=True)
    for shape, batch in [((6, 8, 9), 3), ((1, 3, 5), 1), ((7, 9, 8), 2)]:
        layout = TileLayout.from_video_shape(*shape)
        _assert_same_step(compiled, _video, _tensors(layout, batch), layout, 0.5)


@pytest.mark.parametrize("device", DEVICES)
def test_nothing_in_a_batch_through_inductor(device):
    layout = TileLayout.from_video_shape(5, 4, 8, device=device)
    compiled = torch.compile(_video, fullgraph=True)
    _assert_same_step(compiled, _video, _tensors(layout, 0, 2, 1), layout, 0.5)


def _plain(q: Tensor, k: Tensor, v: Tensor, layout: TileLayout) -> Tensor:
    out = video_sparse_attention(q, k, v, layout, sparsity=0.99)
    assert isinstance(out, Tensor)
    return out


def _normed_and_gated(q: Tensor, k: Tensor, v: Tensor, layout: TileLayout) -> Tensor:
    """A prologue that is recognised, and a gate: the other kernels around the attention."""
    q, k = (torch.nn.functional.rms_norm(x, x.shape[-1:]) for x in (q, k))
    out = video_sparse_attention(q, k, v, layout, sparsity=0.99, gate=v.sigmoid())
    assert isinstance(out, Tensor)
    return out


@GPU
def test_offsets_past_2_31_elements():
    """Tensors above 4 GiB in bf16: what stands last in them is what a small problem of its own gives.

    One test, because two of these at once would not fit.
    """
    batches = ((2200, 1024, 8, 128), (4, 16, 16), (slice(2199, None),))
    tokens = ((1, 30 * 136 * 136, 32, 128), (30, 136, 136), (slice(None), slice(None), slice(30, None)))
    for (shape, video, last), fn in itertools.product((batches, tokens), (_plain, _normed_and_gated)):
        layout = TileLayout.from_video_shape(*video, device="cuda")
        leaves = [torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
        assert leaves[0].numel() > 2**31
        small = [x.detach()[last].clone().requires_grad_() for x in leaves]
        compiled = torch.compile(fn, fullgraph=True, dynamic=False)
        for run in (fn, compiled):
            expected = _bf16_step(run, small, layout)
            for got, right in zip(_bf16_step(run, leaves, layout), expected, strict=True):
                # Rounding of scores could select other tiles somewhere: as good as all tokens have to be the same.
                wrong = ((got[last].float() - right.float()).abs() > 0.05).any(-1).float().mean().item()
                assert right.abs().max() > 0 and wrong < 0.01, f"{fn.__name__}: {wrong:.1%} of the rows differ"
            del got
            torch.cuda.empty_cache()


@GPU
def test_a_view_of_memory_past_2_31_elements():
    """What a view steps over counts too: the gather of a narrow slice of fused projections."""
    layout = TileLayout.from_video_shape(30, 136, 136, device="cuda")
    fused = torch.randn(1, layout.num_tokens, 32, 128, device="cuda", dtype=torch.bfloat16)

    def fn(fused: Tensor, layout: TileLayout) -> Tensor:
        return torch.ops.vsa.tile(fused[:, :, 30:] * 2, layout.token_slot, layout.slot_token)

    got = torch.compile(fn, fullgraph=True, dynamic=False)(fused, layout)
    assert torch.equal(got, fn(fused, layout))


def _bf16_step(fn: Callable[..., Tensor], leaves: list[Tensor], layout: TileLayout) -> list[Tensor]:
    out = fn(*leaves, layout)
    return [out.detach(), *torch.autograd.grad(out, leaves, out.detach())]
