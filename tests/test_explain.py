"""`vsa.explain` and `vsa.testing.assert_one_region`: what a run compiled, told rightly, with nothing left changed."""

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from vsa_inductor import TileLayout, video_sparse_attention
from vsa_inductor.compiling import compile, explain
from vsa_inductor.generated_code import GeneratedCall, calls_in_order
from vsa_inductor.lowerings import norm_rope_tile, norm_rope_tile_backward
from vsa_inductor.reporting import RegionReport
from vsa_inductor.testing import assert_one_region


def _mixed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """A kernel, a library call, an operator the compiler cannot see into, and a kernel again."""
    y = torch.nn.functional.layer_norm(x, x.shape[-1:]) @ w
    return (y.sort(-1).values * 2 + x).relu()


def _mixed_inputs(requires_grad: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(6, 16, requires_grad=requires_grad), torch.randn(16, 16, requires_grad=requires_grad)


def _prints(x: torch.Tensor) -> torch.Tensor:
    print(end="")
    return x * 2


def _breaks_in_a_callee(x: torch.Tensor) -> torch.Tensor:
    return _prints(x + 1) - 1


def _branches_on_data(x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:
        return x + 1
    return x - 1


def _breaks_in_a_loop(x: torch.Tensor) -> torch.Tensor:
    for _ in range(2):
        x = _prints(x)
    return x


def _line(fn: Callable[..., Any], offset: int) -> int:
    return fn.__code__.co_firstlineno + offset


class Block(torch.nn.Module):
    """Self-attention of a video transformer: norm, projections, sparse attention, output projection, residual."""

    def __init__(self, dim: int = 32, num_heads: int = 2) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm = torch.nn.LayerNorm(dim)
        self.qkv = torch.nn.Linear(dim, 3 * dim)
        self.out = torch.nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor, layout: TileLayout) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.num_heads, -1)).unbind(2)
        return x + self.out(video_sparse_attention(q, k, v, layout, sparsity=0.5).flatten(2))


@pytest.fixture(scope="module")
def block() -> tuple[Block, tuple[torch.Tensor, TileLayout]]:
    torch.manual_seed(0)
    layout = TileLayout.from_video_shape(5, 8, 4)
    return Block(), (torch.randn(1, layout.num_tokens, 32), layout)


@pytest.fixture(scope="module")
def block_report(block: tuple[Block, tuple[Any, ...]]) -> RegionReport:
    model, inputs = block
    return assert_one_region(compile(model), *inputs)


@pytest.fixture(scope="module")
def mixed_report() -> RegionReport:
    return explain(_mixed, *_mixed_inputs())


def test_calls_in_the_order_of_execution(mixed_report: RegionReport) -> None:
    assert (mixed_report.num_graphs, mixed_report.breaks) == (1, ())
    (graph,) = mixed_report.graphs
    assert [direction.direction for direction in graph.directions] == ["forward", "backward"]
    forward = graph.directions[0].calls
    kinds = [call.kind for call in forward]
    assert kinds[0] == "cpp"
    assert kinds.index("cpp") < kinds.index("extern") < kinds.index("opaque") < len(kinds) - 1
    assert [call.name for call in mixed_report.opaque_calls] == ["aten.sort"]
    assert [call.name for call in forward if call.kind == "extern"] == ["mm"]
    assert not any(call.ours for call in mixed_report.calls)


def test_what_a_kernel_fused(mixed_report: RegionReport) -> None:
    first, *_, last = (call for call in mixed_report.kernels if call.direction == "forward")
    assert "aten.native_layer_norm" in first.fused
    assert first.sources == ("layer_norm",)
    assert {"aten.mul", "aten.add", "aten.relu"} <= set(last.fused)
    # The backward names the forward calls whose gradient it computes.
    backward = {source for call in mixed_report.kernels if call.direction == "backward" for source in call.sources}
    assert {"layer_norm", "sort"} <= backward


def test_inference() -> None:
    x, w = _mixed_inputs(requires_grad=False)
    report = explain(_mixed, x, w)
    assert [direction.direction for graph in report.graphs for direction in graph.directions] == ["inference"]


def test_backward_flag() -> None:
    x = torch.randn(5, requires_grad=True)
    assert {call.direction for call in explain(torch.sin, x, backward=False).calls} == {"forward"}
    assert {call.direction for call in explain(torch.sin, x, backward=True).calls} == {"forward", "backward"}
    with pytest.raises(ValueError, match="backward=True"):
        explain(torch.sin, x.detach(), backward=True)


def test_keyword_arguments() -> None:
    report = explain(torch.nn.functional.softmax, torch.randn(3, 5), dim=-1)
    assert "aten._softmax" in report.kernels[0].fused


@pytest.mark.parametrize(
    ("fn", "where", "num_graphs"),
    [
        (_breaks_in_a_callee, (_prints, 1), 2),
        (_branches_on_data, (_branches_on_data, 1), 2),
        (_breaks_in_a_loop, (_prints, 1), 1),
    ],
)
def test_breaks_name_file_line_and_reason(
    fn: Callable[..., Any], where: tuple[Callable[..., Any], int], num_graphs: int
) -> None:
    report = explain(fn, torch.randn(4))
    assert report.num_graphs >= num_graphs
    assert (__file__, _line(*where)) in [(found.file, found.line) for found in report.breaks]
    assert all(found.reason for found in report.breaks)
    assert f"{__file__}:{_line(*where)}" in report.breaks[0].summary
    with pytest.raises(AssertionError) as failure:
        assert_one_region(fn, torch.randn(4))
    assert f"{__file__}:{_line(*where)}" in str(failure.value)


def test_nothing_compiled_is_not_one_region() -> None:
    with pytest.raises(AssertionError, match="got 0"):
        assert_one_region(lambda: 3)


def test_other_compilations_are_untouched() -> None:
    compilations = []

    def backend(graph: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> Callable[..., Any]:
        compilations.append(graph)
        return graph.forward

    compiled = torch.compile(_branches_on_data, backend=backend)
    compiled(torch.ones(4))
    before = len(compilations)
    explain(_branches_on_data, torch.ones(4))
    compiled(torch.ones(4))
    assert len(compilations) == before


def test_many_runs_meet_no_recompile_limit_and_stay_static() -> None:
    for size in range(3, 13):
        report = explain(_branches_on_data, torch.ones(size))
        assert report.num_graphs == 2
        # Automatic dynamic shapes would have made the size an argument.
        assert f"({size}, )" in report.graphs[1].directions[0].code


class Counter(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        x.mul_(2)
        return torch.nn.functional.dropout(self.linear(x), 0.5)


def test_nothing_is_left_changed() -> None:
    model = Counter()
    grad = torch.ones(4, 4)
    model.linear.weight.grad = grad
    x = torch.ones(2, 4)
    state = torch.get_rng_state()
    report = explain(model, x)
    assert {call.direction for call in report.calls} == {"forward", "backward"}
    assert model.linear.weight.grad is grad
    assert torch.equal(grad, torch.ones(4, 4))
    assert model.linear.bias.grad is None
    assert model.calls.item() == 0
    assert torch.equal(x, torch.ones(2, 4))
    assert torch.equal(torch.get_rng_state(), state)


def test_a_step_that_runs_its_own_backward_leaves_no_gradient() -> None:
    model = torch.nn.Linear(4, 4)

    def step(x: torch.Tensor) -> None:
        model(x).sum().backward()

    explain(step, torch.randn(2, 4))
    assert model.weight.grad is None


def test_compiled_functions_are_unwrapped() -> None:
    x = torch.randn(3)
    for wrap in (torch.compile, compile):
        assert explain(wrap(_branches_on_data, fullgraph=False), x).num_graphs == 2
    module = torch.nn.Linear(3, 3)
    assert explain(compile(module), x).notes == ()
    for copied in (compile(module), torch.compile(module, fullgraph=True)):
        assert all("options" not in note for note in explain(copy.deepcopy(copied), x).notes)
    assert any("options" in note for note in explain(torch.compile(torch.sin, fullgraph=True), x).notes)
    dynamic = explain(compile(torch.sin, dynamic=True), torch.randn(4, 6)).graphs[0].directions[0].code
    assert "empty_strided_cpu((4, 6)" not in dynamic


def test_attention_block(block_report: RegionReport) -> None:
    names = [call.name for call in block_report.opaque_calls if call.ours]
    assert names.index("vsa.select_blocks") < names.index("vsa.attention_eager")
    assert names.count("vsa.attention_eager") == names.count("vsa.attention_backward_eager") == 1
    (use,) = block_report.backends
    assert (use.forward.split("@")[0], use.backward.split("@")[0]) == ("eager", "eager")
    assert {(refusal.backend, refusal.direction) for refusal in block_report.refusals} == {
        (backend, direction) for backend in ("sm90", "sm100", "triton") for direction in ("forward", "backward")
    }
    assert all("cpu" in refusal.sentence for refusal in block_report.refusals)
    assert block_report.notes == ()


def test_tiers_of_the_attention_block(block_report: RegionReport) -> None:
    forward, backward = block_report.graphs[0].directions
    assert {tier.op: (tier.count, tier.tier) for tier in forward.tiers} == {
        "vsa.tile": (3, "lowering"),
        "vsa.tile_sums": (2, "lowering"),
        "vsa.select_blocks": (1, "opaque"),
        "vsa.attention": (1, "lowering"),
        "vsa.untile": (1, "lowering"),
    }
    tiers = {tier.op: tier.tier for tier in backward.tiers}
    assert tiers["vsa.attention_backward"] == "lowering"
    assert tiers["vsa.transpose_blocks"] == "opaque"
    fused = {op for call in block_report.kernels for op in call.fused}
    assert {"vsa.tile", "vsa.untile"} <= fused


@pytest.mark.parametrize("recognised", [True, False])
def test_which_path_the_prologue_took(recognised: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU the references stand for the kernels that the recognised form runs on a GPU."""
    for module in (norm_rope_tile, norm_rope_tile_backward):
        monkeypatch.setattr(module, "has_kernel", lambda x: recognised)
    layout = TileLayout.from_video_shape(3, 5, 6)
    q, k, v = (torch.randn(1, layout.num_tokens, 2, 32, requires_grad=True) for _ in range(3))
    cos, sin = (torch.randn(1, layout.num_tokens, 1, 32) for _ in range(2))

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = (torch.nn.functional.rms_norm(x, (32,), eps=1e-6) for x in (q, k))
        q, k = (x * cos + x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2) * sin for x in (q, k))
        return video_sparse_attention(q, k, v, layout, sparsity=0.5, gate=1.0)

    report = explain(run, q, k, v)
    forward, backward = ({tier.op: tier.how for tier in part.tiers} for part in report.graphs[0].directions)
    if not recognised:
        assert forward["vsa.tile"] == backward["vsa.untile"] == "generated code"
        return
    assert forward["vsa.tile"] == "in vsa.norm_rope_tile" and backward["vsa.untile"] == "in vsa.norm_rope_tile_backward"
    done = {call.name: call.instead_of for call in report.opaque_calls if call.instead_of}
    assert done["vsa.norm_rope_tile"] == "RMSNorm per head, interleaved RoPE, tile of 2; tile of 1"
    assert "un-tile, backward of RMSNorm per head, interleaved RoPE" in {
        call.instead_of for call in report.opaque_calls
    }
    assert "<- vsa_inductor: RMSNorm per head, interleaved RoPE" in " ".join(str(report).split())


def test_page_and_document(block_report: RegionReport) -> None:
    page = str(block_report)
    assert max(map(len, page.splitlines())) <= 100
    for words in ("1 graph, 0 graph breaks", "vsa.attention_eager", "triton refused", "fuses", "vsa.tile x3 lowering"):
        assert words in page
    document = json.loads(block_report.to_json())
    assert document["num_graphs"] == 1
    assert "code" not in document["graphs"][0]["directions"][0]
    assert document["backends"][0]["refusals"][0]["backend"] == "sm90"
    with_code = json.loads(block_report.to_json(code=True))
    assert "def call(" in with_code["graphs"][0]["directions"][0]["code"]


CODE_WITH_PARTITIONS = """
triton_poi_fused_add_0 = async_compile.triton('triton_poi_fused_add_0', '''
def triton_poi_fused_add_0(in_ptr0):
    other_kernel.run(in_ptr0)
''', device_str='cuda')

def partition_0(args):
    # Topologically Sorted Source Nodes: [x], Original ATen: [vsa.attention]
    buf0 = torch.ops.vsa.attention_triton.default(arg0, 0.125)
    assert_size_stride(buf0, (2,), (1,), 'torch.ops.vsa.attention_triton.default')
    with torch.cuda._DeviceGuard(0):
        # Topologically Sorted Source Nodes: [y], Original ATen: [aten.add, vsa.untile]
        # [Provenance debug handles] triton_poi_fused_add_0:7
        stream0 = get_raw_stream(0)
        triton_poi_fused_add_0.run(buf0, buf1, 128, stream=stream0)

async_compile.wait(globals())

class Runner:
    def call(self, args):
        extern_kernels.mm(arg0, reinterpret_tensor(arg1, (4, 4), (1, 4), 0), out=buf0)
        (buf2,) = self.partitions[0](partition0_args)
        triton_poi_fused_add_0.run(buf2, buf3, 128, stream=stream0)

def get_args():
    triton_poi_fused_add_0.run(buf2, buf3, 128, stream=stream0)
"""


def test_partitions_stand_where_they_are_called() -> None:
    assert calls_in_order(CODE_WITH_PARTITIONS) == (
        GeneratedCall("extern", "mm"),
        GeneratedCall("opaque", "vsa.attention_triton", "", ("vsa.attention",)),
        GeneratedCall("triton", "triton_poi_fused_add_0", "triton_poi_fused_add_0:7", ("aten.add", "vsa.untile")),
        GeneratedCall("triton", "triton_poi_fused_add_0"),
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_attention_block_on_a_gpu(block: tuple[Block, tuple[torch.Tensor, TileLayout]]) -> None:
    layout = TileLayout.from_video_shape(5, 8, 4, device="cuda")
    x = torch.randn(1, layout.num_tokens, 64, device="cuda", dtype=torch.bfloat16)
    report = assert_one_region(compile(Block(64).cuda().bfloat16()), x, layout)
    assert {call.kind for call in report.kernels} == {"triton"}
    names = [call.name for call in report.opaque_calls]
    (use,) = report.backends
    forward, backward = (name.partition("@")[0] for name in (use.forward, use.backward))
    assert {forward, backward} <= {"sm90", "triton"}
    assert names.count(f"vsa.attention_{forward}") == names.count(f"vsa.attention_backward_{backward}") == 1
    assert {"vsa.tile", "vsa.untile"} <= {op for call in report.kernels for op in call.fused}
    assert {refusal.backend for refusal in report.refusals} <= {"sm90"}


def test_a_step_that_runs_its_own_backward_and_a_disabled_function() -> None:
    x = torch.randn(4, requires_grad=True)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = x.sin().sum()
        loss.backward()
        return loss

    report = explain(step, x)
    assert any("its own backward" in note for note in report.notes) or report.breaks
    # What is compiled is what was disabled.
    assert explain(torch.compiler.disable(lambda x: x + 1), x.detach()).num_graphs == 1


def test_nested_regions_are_looked_into() -> None:
    """A region that is compiled once and called three times shows at each of its calls."""
    layout = TileLayout.from_video_shape(5, 4, 4)

    @torch.compiler.nested_compile_region
    def layer(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return video_sparse_attention(q.sin(), k, v, layout, sparsity=0.5)

    def layers(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        for _ in range(3):
            q = layer(q, k, v)
        return q

    inputs = [torch.randn(1, layout.num_tokens, 1, 16, requires_grad=True) for _ in range(3)]
    report = explain(compile(layers), *inputs)
    names = [call.name for call in report.opaque_calls]
    assert [names.count(f"vsa.{name}_eager") for name in ("attention", "attention_backward")] == [3, 3]
    slots, ids = layout.num_slots * 16 * 4, layout.num_blocks * 4
    attention = next(call for call in report.opaque_calls if call.name == "vsa.attention_eager")
    assert attention.bytes_read == 3 * slots + (1 + 1 + 1) * ids, "q, k, v, one id and one count per block, sizes"
