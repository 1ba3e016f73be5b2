"""The modes of torch.compile: a step in each equals eager, and does no work that nobody asked for."""

from __future__ import annotations

import contextlib
import re
import zipfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo.compiled_autograd as compiled_autograd
from problems import DEVICES
from torch import Tensor, nn
from torch._dynamo.testing import AotEagerAndRecordGraphs
from torch._inductor.utils import run_and_get_code

import vsa_inductor as vsa
from vsa_inductor.lowerings import norm_rope_tile, norm_rope_tile_backward

SHAPE, HEADS, DIM = (5, 6, 4), 2, 32  # four tiles, two of them ragged
CHANNELS = HEADS * DIM
ATTENTION, BACKWARD = torch.ops.vsa.attention.default, torch.ops.vsa.attention_backward.default


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def sparsity_on(device: str) -> float:
    # On CUDA a 16-bit rounding of scores would pick other blocks than eager: there everything is selected.
    return 0.5 if device == "cpu" else 0.0


class Block(nn.Module):
    """q, k, v (and gate) projections, RMSNorm over all heads, rotary embedding, sparse attention."""

    def __init__(self, device: str = "cpu", dtype: torch.dtype | None = None, gated: bool = True) -> None:
        super().__init__()
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.to_q, self.to_k, self.to_v = (nn.Linear(CHANNELS, CHANNELS, **factory) for _ in range(3))
        self.to_gate = nn.Linear(CHANNELS, CHANNELS, **factory) if gated else None
        self.norm_q, self.norm_k = (nn.RMSNorm(CHANNELS, eps=1e-6, **factory) for _ in range(2))
        self.layout = vsa.TileLayout.from_video_shape(*SHAPE, device=device)
        angles = torch.randn(self.layout.num_tokens, 1, DIM // 2, device=device)
        self.cos, self.sin = angles.cos(), angles.sin()
        self.sparsity = sparsity_on(device)

    def prologue(self, x: Tensor, norm: nn.Module) -> Tensor:
        a, b = norm(x).unflatten(2, (HEADS, DIM)).unflatten(-1, (-1, 2)).unbind(-1)
        rotated = torch.stack((a * self.cos - b * self.sin, a * self.sin + b * self.cos), -1)
        return rotated.flatten(-2).type_as(x)

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.prologue(self.to_q(x), self.norm_q), self.prologue(self.to_k(x), self.norm_k)
        v = self.to_v(x).unflatten(2, (HEADS, DIM))
        gate = None if self.to_gate is None else self.to_gate(x).unflatten(2, (HEADS, DIM))
        out = vsa.video_sparse_attention(q, k, v, self.layout, sparsity=self.sparsity, gate=gate)
        assert isinstance(out, Tensor)
        return out.flatten(2)


def dtype_on(device: str) -> torch.dtype:
    return torch.float32 if device == "cpu" else torch.bfloat16


def make_block(device: str, **kwargs: Any) -> tuple[Block, Tensor]:
    block = Block(device, dtype_on(device), **kwargs)
    x = torch.randn(1, block.layout.num_tokens, CHANNELS).to(device, dtype_on(device)).requires_grad_()
    return block, x


def step(function: Callable[[Tensor], Tensor], block: nn.Module, x: Tensor, dout: Tensor | None = None) -> list[Tensor]:
    """The output and the gradient of everything that wants one."""
    leaves = [x, *(parameter for parameter in block.parameters() if parameter.requires_grad)]
    out = function(x)
    dout = torch.linspace(-1, 1, out.numel(), device=x.device).view(out.shape).to(out.dtype) if dout is None else dout
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def assert_same(actual: list[Tensor], expected: list[Tensor], limit: float | None = None) -> None:
    for place, (got, right) in enumerate(zip(actual, expected, strict=True)):
        assert got.shape == right.shape and got.dtype == right.dtype
        exact = 1e-5 if right.device.type == "cpu" else 1e-3
        allowed = limit or (exact if right.dtype == torch.float32 else 5e-2)
        error = float((got.double() - right.double()).norm() / right.double().norm())
        assert error <= allowed, f"{place}: {error:.2e} > {allowed:.0e}"


# ---------------------------------------------------------------------------------------------------------------------
# One step of the same block in the modes of Inductor.

MODES: dict[str, dict[str, Any]] = {"default": {}, "reduce-overhead": {"mode": "reduce-overhead"}}
CPP_WRAPPER = {"cpp_wrapper": True}
# On the CPU test_cuda_graphs.py and the recognised prologue below run the other two.
STEPS = [("default", "cpu"), *(pytest.param(mode, "cuda", marks=pytest.mark.gpu) for mode in MODES)]


@pytest.mark.parametrize("mode, device", STEPS)
def test_a_training_step_of_a_block(mode, device):
    block, x = make_block(device)
    expected = step(block, block, x)
    compiled = vsa.compile(block, **MODES[mode])
    for _ in range(3):  # with CUDA graphs: warm up, record, replay
        torch.compiler.cudagraph_mark_step_begin()
        assert_same([value.clone() for value in step(compiled, block, x)], expected)


@pytest.mark.gpu
def test_cpp_wrapper_on_a_gpu():
    """The operators that take or return lists are called from C++ too."""
    block, x = make_block("cuda")
    with torch.no_grad():
        actual, code = run_and_get_code(lambda: vsa.compile(block, options=CPP_WRAPPER)(x))
        assert_same([actual], [block(x)])
    assert any("norm_rope_tile.flat" in module for module in code)
    weights = torch.randn(2, 64, 64, device="cuda", requires_grad=True)
    try:
        torch.compile(torch.softmax, options=CPP_WRAPPER)(weights, -1).square().sum().backward()
    except Exception as error:
        pytest.skip(f"backward: this torch cannot compile that of a plain softmax under cpp_wrapper: {error}")
    assert_same(step(vsa.compile(block, options=CPP_WRAPPER), block, x), step(block, block, x))


@pytest.mark.parametrize("device", DEVICES)
def test_max_autotune(device):
    """The coarse stage's products are what it tunes. On the CPU they meet Inductor's C++ template for bmm."""
    layout = vsa.TileLayout.from_video_shape(*SHAPE, device=device)
    shape = (1, layout.num_tokens, HEADS, DIM)
    inputs = [torch.randn(shape).to(device, dtype_on(device)).requires_grad_() for _ in range(4)]

    def attend(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
        return vsa.video_sparse_attention(q, k, v, layout, sparsity=sparsity_on(device), gate=gate)

    def run(function: Callable[..., Tensor]) -> list[Tensor]:
        out = function(*inputs)
        return [out.detach(), *torch.autograd.grad(out.float().square().sum(), inputs)]

    expected, compiled = run(attend), vsa.compile(attend, mode="max-autotune")
    for _ in range(3):  # with CUDA graphs: warm up, record, replay
        torch.compiler.cudagraph_mark_step_begin()
        assert_same([value.clone() for value in run(compiled)], expected)


@contextlib.contextmanager
def recognised(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The one launch for norm, rotation and tile on the CPU too, by its reference."""
    for module in (norm_rope_tile, norm_rope_tile_backward):
        monkeypatch.setattr(module, "has_kernel", lambda x: True)
    with torch._inductor.config.patch(force_disable_caches=True):
        yield


def test_the_recognised_prologue_under_cpp_wrapper(monkeypatch):
    """Its operator takes and returns lists, which few C++ calls can."""
    block, x = make_block("cpu")
    expected = step(block, block, x)
    compiled = vsa.compile(block, options=CPP_WRAPPER)
    with recognised(monkeypatch):
        actual, code = run_and_get_code(lambda: step(compiled, block, x))
    assert "vsa.norm_rope_tile." in code[0], "the prologue was not recognised"
    assert_same(actual, expected)


def test_a_package_generates_the_prologue(monkeypatch, tmp_path):
    """AOTInductor cannot hand over the lists of the operator that would take its place."""
    monkeypatch.setattr(norm_rope_tile, "runs_layout_kernels", lambda x: True)
    block, x = make_block("cpu")
    with torch.no_grad(), torch._inductor.config.patch(force_disable_caches=True):
        path = vsa.package(torch.export.export(block, (x.detach(),)), tmp_path / "block.pt2")
        assert_same([torch._inductor.aoti_load_package(path)(x.detach())], [block(x)])
    with zipfile.ZipFile(path) as archive:
        tables = "".join(archive.read(name).decode() for name in archive.namelist() if name.endswith(".json"))
    assert "import_vsa_inductor_first::attention" in tables and "norm_rope_tile" not in tables


@pytest.mark.parametrize("device", DEVICES)
def test_graph_partitions(device):
    """Partitions that end at the attention, whose ``.out`` form hands over tensors and no tuple."""
    native = "eager" if device == "cpu" else "triton"
    names = [f"vsa::attention_{native}.out", f"vsa::attention_backward_{native}.out"]
    block, x = make_block(device)
    expected = step(block, block, x)
    options = {"graph_partition": True, "custom_should_partition_ops": names}
    if device == "cuda":
        options["triton.cudagraphs"] = True
    compiled = vsa.compile(block, options=options)

    def run() -> None:
        for _ in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            assert_same([value.clone() for value in step(compiled, block, x)], expected)

    _, code = run_and_get_code(run)
    assert len(code) == 2
    for module in code:
        call = module[module.index("def call(") :]
        assert any(f"torch.ops.{name.replace('::', '.')}(" in call for name in names), "not between the partitions"
        if device == "cuda":
            assert len(re.findall(r"self\.partitions\[\d+\]\(", call)) >= 2, "work before it, and after"


@pytest.mark.parametrize("name", ["vsa::attention", "vsa::attention_eager"])
def test_graph_partitions_by_a_name_whose_results_are_a_tuple(name):
    block, x = make_block("cpu", gated=False)
    compiled = torch.compile(block, options={"graph_partition": True, "custom_should_partition_ops": [name]})
    sentence = f"custom_should_partition_ops: got '{name}'; allowed: 'vsa::attention_eager.out', which returns no tuple"
    with pytest.raises(Exception, match=re.escape(sentence)):
        compiled(x)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_inference(context, device):
    """Gate and packed prefix; no lse is asked for, and nothing of the backward is there."""
    layout = vsa.TileLayout.from_video_shape(*SHAPE, prefix=(7,), device=device)
    shape = (1, layout.num_tokens, HEADS, DIM)
    q, k, v, gate = (torch.randn(shape).to(device, dtype_on(device)).requires_grad_() for _ in range(4))

    def attend(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
        gated = vsa.video_sparse_attention(q, k, v, layout, sparsity=sparsity_on(device), gate=gate)
        return gated, vsa.video_sparse_attention(q, k, v, layout, sparsity=sparsity_on(device))

    graphs = AotEagerAndRecordGraphs()
    with context():
        expected = attend(q, k, v, gate)
        assert_same([*torch.compile(attend, fullgraph=True, backend=graphs)(q, k, v, gate)], [*expected])
        # One compilation by Inductor stands for both contexts.
        if device == "cuda" or context is torch.inference_mode:
            assert_same([*vsa.compile(attend)(q, k, v, gate)], [*expected])
    calls = [node for node in graphs.fw_graphs[0].graph.nodes if node.target is ATTENTION]
    assert len(calls) == 4 and not graphs.bw_graphs
    assert not any(node.args[8] for node in calls), "return_lse"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_dtypes(dtype, device):
    if device == "cuda" and dtype == torch.float64:
        pytest.skip("fp64: the eager backend only, which the CPU test runs")
    layout = vsa.TileLayout.from_video_shape(4, 4, 5, device=device)
    inputs = [torch.randn(1, 80, 1, DIM).to(device, dtype).requires_grad_() for _ in range(3)]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return vsa.video_sparse_attention(q * 1.5, k, v, layout, sparsity=0.0)

    def run(function: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
        out = function(*inputs)
        return [out.detach(), *torch.autograd.grad(out.square().sum(), inputs)]

    # On the CPU every dtype is other C++ code to compile; fp32 is in all the other tests.
    backend = "inductor" if device == "cuda" or dtype.itemsize == 2 else "aot_eager"
    actual = run(torch.compile(attend, fullgraph=True, backend=backend), inputs)
    assert [value.dtype for value in actual] == [dtype] * 4
    assert_same(actual, run(attend, inputs), 2e-2 if dtype.itemsize == 2 else 1e-3 if device == "cuda" else 1e-5)


# ---------------------------------------------------------------------------------------------------------------------
# Frozen weights: the backward holds what is needed and nothing else.


class Adapter(nn.Module):
    """A frozen projection; with ``trained``, a low-rank update beside it that is not."""

    def __init__(self, projection: nn.Linear, trained: bool) -> None:
        super().__init__()
        self.projection = projection.requires_grad_(False)
        factory: dict[str, Any] = {"device": projection.weight.device, "dtype": projection.weight.dtype}
        self.down = nn.Linear(CHANNELS, 2, bias=False, **factory).requires_grad_(trained)
        self.up = nn.Linear(2, CHANNELS, bias=False, **factory).requires_grad_(trained)

    def forward(self, x: Tensor) -> Tensor:
        return self.projection(x) + self.up(self.down(x))


def adapted(device: str, trained: str, gated: bool) -> tuple[Block, Tensor]:
    """A block whose projections named in ``trained`` (q, k, v, g) have trained adapters; norms and input are frozen."""
    block, x = make_block(device, gated=gated)
    block.requires_grad_(False)
    for letter, name in (("q", "to_q"), ("k", "to_k"), ("v", "to_v"), ("g", "to_gate")):
        if getattr(block, name) is not None:
            setattr(block, name, Adapter(getattr(block, name), letter in trained))
    return block, x.detach()


def graphs_of(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[list[torch.fx.Node], list[torch.fx.Node]]:
    """The calls of the forward and of the backward, after partitioning."""
    graphs = AotEagerAndRecordGraphs()
    out = torch.compile(function, fullgraph=True, backend=graphs)(x)
    if out.requires_grad:
        out.float().square().sum().backward()
    return tuple(
        [node for graph in recorded for node in graph.graph.nodes if node.op == "call_function"]
        for recorded in (graphs.fw_graphs, graphs.bw_graphs)
    )


# trained: (needs_dq, needs_dkv), or None for no backward of the attention at all.
NEEDED = {
    "": None,
    "q": (True, False),
    "k": (False, True),
    "v": (False, True),
    "kv": (False, True),
    "qv": (True, True),
    "g": None,
    "qg": (True, False),
}


@pytest.mark.parametrize("trained", NEEDED, ids=lambda letters: letters or "nothing")
def test_adapters_on_some_projections(trained):
    gated = "g" in trained
    block, x = adapted("cpu", trained, gated)
    forward, backward = graphs_of(block, x)
    calls = [node.args[-2:] for node in backward if node.target is BACKWARD]
    assert calls == ([] if NEEDED[trained] is None else [NEEDED[trained]])
    # The transposed lists are what dk and dv walk.
    transposes = [node for node in backward if node.target is torch.ops.vsa.transpose_blocks.default]
    assert len(transposes) == bool(NEEDED[trained] and NEEDED[trained][1])
    returns_lse = [node.args[8] for node in forward if node.target is ATTENTION]
    assert returns_lse == [NEEDED[trained] is not None]
    if not trained:
        assert not backward
    # Each projection's gradients leave the tiles once, and only those that are needed.
    of_operands = len(set(trained) - {"g"})
    assert len([node for node in backward if node.target is torch.ops.vsa.untile.default]) == of_operands


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("trained", ["v", "qv"])
def test_gradients_of_adapters(trained, device):
    """Equal to eager, and to those of the same block with everything trained."""
    block, x = adapted(device, trained, gated=True)
    everything = [parameter for parameter in block.parameters()]
    wanted = [parameter for parameter in everything if parameter.requires_grad]
    function = vsa.compile(block) if device == "cuda" else torch.compile(block, fullgraph=True, backend="aot_eager")

    def gradients(call: Callable[[Tensor], Tensor]) -> list[Tensor]:
        return [*torch.autograd.grad(call(x).float().square().sum(), wanted)]

    actual, expected = gradients(function), gradients(block)
    assert_same(actual, expected)
    block.requires_grad_(True)
    assert_same(expected, gradients(block))


def test_one_operand_that_needs_a_gradient_in_block_sparse_attention():
    lists = vsa.BlockSelection.dense(1, 1, 2, 2)
    sizes = torch.tensor([64, 40], dtype=torch.int32)
    for place, needs in enumerate([(True, False), (False, True), (False, True)]):
        inputs = [torch.randn(1, 1, 128, 16, requires_grad=i == place) for i in range(3)]

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return vsa.block_sparse_attention(q, k, v, lists.kv_indices, lists.kv_num_blocks, sizes)

        graphs = AotEagerAndRecordGraphs()
        out = torch.compile(attend, fullgraph=True, backend=graphs)(*inputs)
        (grad,) = torch.autograd.grad(out.square().sum(), inputs[place])
        (expected,) = torch.autograd.grad(attend(*inputs).square().sum(), inputs[place])
        torch.testing.assert_close(grad, expected)
        (call,) = [node for node in graphs.bw_graphs[0].graph.nodes if node.target is BACKWARD]
        assert call.args[-2:] == needs
        torch._dynamo.reset()


# ---------------------------------------------------------------------------------------------------------------------
# Whole models: one backward graph, one graph for many layers.


class Layer(nn.Module):
    """Residual attention with one projection: the least that is a layer."""

    def __init__(self, layout: vsa.TileLayout, sparsity: float, **factory: Any) -> None:
        super().__init__()
        self.to_qkv = nn.Linear(DIM, 3 * DIM, **factory)
        self.layout, self.sparsity = layout, sparsity

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(2, (1, DIM)) for part in self.to_qkv(x).chunk(3, dim=-1))
        out = vsa.video_sparse_attention(q, k, v, self.layout, sparsity=self.sparsity)
        assert isinstance(out, Tensor)
        return x + out.flatten(2)


class Layers(nn.Module):
    def __init__(self, device: str, count: int, region: bool = False) -> None:
        super().__init__()
        layout = vsa.TileLayout.from_video_shape(*SHAPE, device=device)
        factory: dict[str, Any] = {"device": device, "dtype": dtype_on(device)}
        self.layers = nn.ModuleList(Layer(layout, sparsity_on(device), **factory) for _ in range(count))
        self.input = torch.randn(1, layout.num_tokens, DIM).to(**factory).requires_grad_()

        def call(layer: nn.Module, x: Tensor) -> Tensor:
            return layer(x)

        self.call = torch.compiler.nested_compile_region(call) if region else call

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.call(layer, x)
        return x


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("forward", ["eager", "compiled"])
def test_compiled_autograd(forward, device):
    count = 2
    model = Layers(device, count)
    x = model.input
    expected = step(model, model, x)
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    function = model if forward == "eager" else torch.compile(model, fullgraph=True, backend="aot_eager")
    leaves = [x, *model.parameters()]
    out = function(x)
    dout = torch.linspace(-1, 1, out.numel(), device=x.device).view(out.shape).to(out.dtype)
    with compiled_autograd._enable(lambda graph: torch.compile(graph, backend=keep, fullgraph=True)):
        out.backward(dout)
    assert_same([out.detach(), *(leaf.grad for leaf in leaves)], expected)
    # One node per layer, whether it is traced through an autograd formula or through a compiled backward.
    targets = [str(node.target).removesuffix(".default") for graph in graphs for node in graph.graph.nodes]
    assert targets.count("vsa.attention_backward") == count


@pytest.mark.skipif(not hasattr(torch.compiler, "nested_compile_region"), reason="this torch has no compile regions")
@pytest.mark.parametrize("device", DEVICES)
def test_layers_in_nested_compile_regions_share_one_graph(device):
    count = 3
    model = Layers(device, count, region=True)
    expected = step(model, model, model.input)
    graphs = AotEagerAndRecordGraphs()
    assert_same(step(torch.compile(model, fullgraph=True, backend=graphs), model, model.input), expected)
    for direction, op in ((graphs.fw_graphs, ATTENTION), (graphs.bw_graphs, BACKWARD)):
        nodes = [node for part in direction[0].modules() if hasattr(part, "graph") for node in part.graph.nodes]
        assert len([node for node in nodes if "invoke_subgraph" in str(node.target)]) == count
        assert len([node for node in nodes if node.target is op]) == 1


# ---------------------------------------------------------------------------------------------------------------------
# Deterministic algorithms, and gradients that arrive in other layouts than the output has.


@pytest.fixture
def deterministic(monkeypatch):
    # cuBLAS refuses to run without it.
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_deterministic_algorithms(compiled, device, deterministic):
    """Every operator has a deterministic form, the same bits come out, and no new memory is read (torch fills it)."""
    block, x = make_block(device)
    function = vsa.compile(block) if compiled else block
    first, *others = [step(function, block, x) for _ in range(4)]
    for other in others:
        for place, (a, b) in enumerate(zip(first, other, strict=True)):
            assert torch.equal(a, b), place
    torch.use_deterministic_algorithms(False)
    assert_same(first, step(block, block, x))


def tangents(like: Tensor) -> dict[str, Tensor]:
    """Gradients of the shape of ``like [B, S, H, D]`` that stand otherwise in memory."""
    B, S, H, D = like.shape
    values = {
        "sum": like.new_ones(()).expand(B, S, H, D),
        "expanded over tokens": torch.randn(B, 1, H, D).to(like).expand(B, S, H, D),
        "expanded over channels": torch.randn(B, S, H, 1).to(like).expand(B, S, H, D),
        "heads first": torch.randn(B, H, S, D).to(like).transpose(1, 2),
        "channels first": torch.randn(B, D, S, H).to(like).permute(0, 2, 3, 1),
        "part of a cat": torch.randn(B, S, H, 3 * D).to(like)[..., D : 2 * D],
        "every other token": torch.randn(B, 2 * S, H, D).to(like)[:, ::2],
        "misaligned": torch.randn(B * S * H * D + 1).to(like)[1:].view(B, S, H, D),
    }
    assert all(value.shape == like.shape for value in values.values())
    return values


@pytest.mark.parametrize("device", DEVICES)
def test_tangents_in_any_layout(device):
    """The backward was compiled for whatever layout was guessed; it must read every other one right."""
    layout = vsa.TileLayout.from_video_shape(*SHAPE, device=device)
    shape = (1, layout.num_tokens, HEADS, DIM)
    inputs = [torch.randn(shape).to(device, dtype_on(device)).requires_grad_() for _ in range(4)]

    def attend(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
        return vsa.video_sparse_attention(
            q * 1.5, k, v, layout, sparsity=sparsity_on(device), gate=gate, return_lse=True
        )

    compiled = vsa.compile(attend)
    dlse = torch.randn(1, layout.num_tokens, HEADS, device=device).transpose(1, 2)
    for name, dout in tangents(inputs[0].detach()).items():
        results = []
        for function in (compiled, attend):
            out, lse = function(*inputs)
            results.append([out.detach(), lse.detach(), *torch.autograd.grad((out, lse), inputs, (dout, dlse))])
        try:
            assert_same(*results)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None
