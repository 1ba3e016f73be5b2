"""torch.export, exported training steps, ahead-of-time compiled functions and AOTInductor packages.

What is saved is loaded in a process that knows the package and not the model.
"""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from collections import Counter

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.export import Dim, ShapesCollection
from torch.export.passes import move_to_device_pass

import vsa_inductor as vsa
from vsa_inductor.exporting import any_video, load_training_step

HEADS, HEAD_DIM = 2, 16
CHANNELS = HEADS * HEAD_DIM
VIDEO = (5, 4, 4)


class Attention(nn.Module):
    """A residual self-attention with its projections."""

    def __init__(self, gate: bool = False) -> None:
        super().__init__()
        self.qkv = nn.Linear(CHANNELS, 3 * CHANNELS)
        self.gate = nn.Linear(CHANNELS, CHANNELS) if gate else None
        self.out = nn.Linear(CHANNELS, CHANNELS)

    def forward(self, x: torch.Tensor, layout: vsa.TileLayout) -> torch.Tensor:
        q, k, v = (y.unflatten(-1, (HEADS, HEAD_DIM)) for y in self.qkv(x).chunk(3, -1))
        gate = None if self.gate is None else self.gate(x).unflatten(-1, (HEADS, HEAD_DIM))
        return x + self.out(vsa.video_sparse_attention(q, k, v, layout, sparsity=0.5, gate=gate).flatten(-2))


class Model(nn.Module):
    def __init__(self, layers: int = 2, gate: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention(gate) for _ in range(layers))

    def forward(self, x: torch.Tensor, layout: vsa.TileLayout) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, layout)
        return x


class Bare(nn.Module):
    """The attention and one parameter: little for a C++ compiler to do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(HEAD_DIM))

    def forward(self, x: torch.Tensor, layout: vsa.TileLayout) -> torch.Tensor:
        y = (x * 0.1).unflatten(-1, (HEADS, HEAD_DIM))
        return vsa.video_sparse_attention(y * self.weight, y, y, layout, sparsity=0.5).flatten(-2)


def function_of_a_parameter(x, y, layout, weight):
    z = x.unflatten(-1, (HEADS, HEAD_DIM))
    return squared_error(vsa.video_sparse_attention(z * weight, z, z, layout, sparsity=0.5).flatten(-2), y)


def squared_error(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def _layout(video=VIDEO, prefix=()):
    return vsa.TileLayout.from_video_shape(*video, prefix=prefix)


def _tokens(layout, batch=1):
    return torch.randn(batch, layout.num_tokens, CHANNELS)


def _calls(exported):
    """How often each `vsa` operator is called."""
    return Counter(
        str(node.target).removesuffix(".default")
        for node in exported.graph.nodes
        if node.op == "call_function" and str(node.target).startswith("vsa.")
    )


def _backends(exported):
    """The backend arguments of every `vsa::attention` and `vsa::attention_backward`."""
    names = []
    for node in exported.graph.nodes:
        if node.target is torch.ops.vsa.attention.default:
            names += node.args[10:12]
        elif node.target is torch.ops.vsa.attention_backward.default:
            names.append(node.args[15])
    return names


def _gradients(model, loss):
    parameters = {name: x for name, x in model.named_parameters() if x.requires_grad}
    return dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values()), allow_unused=True), strict=True))


def _assert_step_equals_eager(step, model, inputs, target):
    expected = squared_error(model(*inputs), target)
    loss, gradients = step(*inputs, target)
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(gradients, _gradients(model, expected))


def _reloaded(exported):
    file = io.BytesIO()
    torch.export.save(exported, file)
    file.seek(0)
    return torch.export.load(file)


class TestTorchExport:
    @pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])
    @pytest.mark.parametrize("case", ["plain", "gate", "prefix"])
    def test_operators_stay_whole_and_differentiable(self, case, strict):
        """Exported at batch 2, run at batch 3; the backend is left to what runs it."""
        layout = _layout(prefix=(70,) if case == "prefix" else ())
        model = Attention(gate=case == "gate")
        x = _tokens(layout, 2)
        shapes = ShapesCollection()
        shapes[x] = {0: Dim.DYNAMIC}
        exported = torch.export.export(model, (x, layout), dynamic_shapes=shapes, strict=strict)
        assert _calls(exported)["vsa.attention"] == (2 if case == "prefix" else 1)
        assert set(_backends(exported)) == {"auto"}

        x = _tokens(layout, 3)
        module = _reloaded(exported).module()
        output, expected = module(x, layout), model(x, layout)
        torch.testing.assert_close(output, expected)
        torch.testing.assert_close(
            _gradients(module, output.square().sum()), _gradients(model, expected.square().sum())
        )

    def test_a_named_backend_is_binding_where_the_graph_runs(self):
        layout = _layout()
        inputs = (_tokens(layout), layout)
        with vsa.options(backend=("eager", "triton")):
            exported = torch.export.export(Attention(), inputs)
        assert _backends(exported) == ["eager", "triton"]
        output = exported.module()(*inputs)
        with pytest.raises(vsa.BackendUnavailableError, match=r"graph asks for triton \(backward\).*cpu device"):
            output.sum().backward()

    def test_a_graph_made_without_gradients_says_so(self):
        layout = _layout()
        inputs = (_tokens(layout), layout)
        with torch.no_grad():
            exported = torch.export.export(Attention(), inputs)
        with pytest.raises(RuntimeError, match="exported without gradients must be made again with them"):
            exported.module()(*inputs)

    def test_one_program_for_every_video(self):
        layout, other = _layout((9, 8, 6)), _layout((6, 5, 8))
        model = Attention(gate=True)
        dynamic = {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}
        shapes = (dynamic, any_video(layout))
        exported = torch.export.export(model, (_tokens(layout, 2), layout), dynamic_shapes=shapes)
        x = _tokens(other, 3)
        torch.testing.assert_close(_reloaded(exported).module()(x, other), model(x, other))

    def test_without_dynamic_shapes_another_video_is_refused(self):
        layout, other = _layout((5, 4, 4)), _layout((4, 5, 4))
        exported = torch.export.export(Attention(), (_tokens(layout), layout))
        with pytest.raises(AssertionError, match="video_shape"):
            exported.module()(_tokens(other), other)


class TestTrainingStep:
    @pytest.mark.parametrize("gate, strict", [(False, True), (True, False)], ids=["no gate, strict", "gate"])
    def test_one_attention_and_one_backward_per_layer(self, gate, strict):
        layout = _layout()
        model, x, y = Model(gate=gate), _tokens(layout), _tokens(layout)
        step = vsa.export_training_step(model, squared_error, (x, layout), targets=(y,), strict=strict)
        calls = _calls(step.exported)
        assert (calls["vsa.attention"], calls["vsa.attention_backward"], calls["vsa.select_blocks"]) == (2, 2, 2)
        assert set(_backends(step.exported)) == {"auto"}
        _assert_step_equals_eager(step, model, (x, layout), y)

    def test_one_step_for_every_video(self):
        layout, other = _layout((9, 8, 6)), _layout((6, 5, 8))
        model, x, y = Bare(), _tokens(layout, 2), _tokens(layout, 2)
        dynamic = {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}
        shapes = (dynamic, any_video(layout), dynamic)
        step = vsa.export_training_step(model, squared_error, (x, layout), targets=(y,), dynamic_shapes=shapes)
        step = vsa.exporting.TrainingStep(_reloaded(step.exported))
        _assert_step_equals_eager(step, model, (_tokens(other, 3), other), _tokens(other, 3))

    def test_what_a_model_may_hold(self):
        """Frozen, shared and unused parameters; buffers that change and that do not; constants; dropout."""

        class Odd(Attention):
            def __init__(self):
                super().__init__()
                self.out.bias.requires_grad_(False)
                self.twin = nn.Linear(CHANNELS, CHANNELS)
                self.twin.weight = self.out.weight
                self.unused = nn.Parameter(torch.zeros(3))
                self.constant = torch.full((CHANNELS,), 2.0)
                self.register_buffer("steps", torch.zeros(()))
                self.norm = nn.BatchNorm1d(CHANNELS)
                self.dropout = nn.Dropout(0.5)

            def forward(self, x, layout):
                self.steps += 1
                x = self.norm(x.mT).mT
                with torch.no_grad():
                    x = x * self.constant
                return self.dropout(self.twin(super().forward(x, layout))) * self.steps

        layout = _layout()
        model, x, y = Odd(), _tokens(layout), _tokens(layout)
        step = vsa.export_training_step(model, squared_error, (x, layout), targets=(y,))
        step = vsa.exporting.TrainingStep(_reloaded(step.exported))
        assert "twin.weight" not in step.named_parameters()

        def run(function):
            torch.manual_seed(3)
            return function()

        for _ in range(2):
            loss, gradients = run(lambda: step(x, layout, y))
            expected = run(lambda: squared_error(model(x, layout), y))
            torch.testing.assert_close(loss, expected.detach())
            torch.testing.assert_close(gradients, _gradients(model, expected))
            assert gradients["unused"] is None and "out.bias" not in gradients
        buffers = {name: x for name, x in step.state_dict().items() if name in dict(model.named_buffers())}
        assert buffers["steps"] == 2
        torch.testing.assert_close(buffers, dict(model.named_buffers()))

    def test_parameters_are_the_models_until_loaded_and_then_replaceable(self):
        layout = _layout()
        model, x, y = Model(1), _tokens(layout), _tokens(layout)
        step = vsa.export_training_step(model, squared_error, (x, layout), targets=(y,))
        loaded = vsa.exporting.TrainingStep(_reloaded(step.exported))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)
        _assert_step_equals_eager(step, model, (x, layout), y)
        assert not torch.allclose(loaded(x, layout, y)[0], step(x, layout, y)[0]), "the file holds what was saved"
        loaded.load_state_dict(model.state_dict())
        _assert_step_equals_eager(loaded, model, (x, layout), y)

    def test_it_compiles_as_one_graph(self):
        layout = _layout()
        x, y = _tokens(layout), _tokens(layout)
        step = vsa.export_training_step(Bare(), squared_error, (x, layout), targets=(y,))
        with torch.no_grad():
            compiled = torch.compile(step.module, fullgraph=True)
            torch.testing.assert_close(compiled(x, layout, y), step(x, layout, y))

    @pytest.mark.parametrize(
        "loss_fn, sentence",
        [
            (lambda output: output, r"loss_fn: got an output of shape \(1, 80, 32\); allowed: a tensor without dim"),
            (lambda output: output.sum().detach(), "loss_fn: got an output without gradient; allowed: one that dep"),
            (lambda output: 1.0, "loss_fn: got an output of float; allowed: a tensor without dimensions"),
        ],
    )
    def test_no_loss(self, loss_fn, sentence):
        layout = _layout()
        with pytest.raises(vsa.ArgumentError, match=sentence):
            vsa.export_training_step(Attention(), loss_fn, (_tokens(layout), layout))

    def test_no_parameter(self):
        layout = _layout()
        for model in (Attention().requires_grad_(False), nn.Identity()):
            with pytest.raises(vsa.ArgumentError, match="model: got no parameter that requires a gradient"):
                vsa.export_training_step(model, torch.sum, (_tokens(layout), layout))

    def test_a_loss_that_depends_on_none(self):
        layout = _layout()
        with pytest.raises(vsa.ArgumentError, match="loss_fn: got an output without gradient"):
            vsa.export_training_step(Attention(), lambda out: out.detach().sum(), (_tokens(layout), layout))

    @pytest.mark.parametrize("way", ["function", "hook", "parameter hook"])
    def test_gradients_that_export_would_drop(self, way):
        """Else the step's gradients differ from those of the model without a word."""

        class Scaled(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x * 2

            @staticmethod
            def backward(ctx, dout):
                return dout * 7

        class Model(Attention):
            def forward(self, x, layout):
                out = super().forward(x, layout)
                if way == "function":
                    return Scaled.apply(out)
                if way == "hook":
                    out.register_hook(lambda dout: dout * 3)
                return out

        model, layout = Model(), _layout()
        if way == "parameter hook":
            next(model.parameters()).register_hook(lambda dout: dout * 3)
        apply, register_hook = torch.autograd.Function.apply, torch.Tensor.register_hook
        match = "model: got the autograd.Function Scaled" if way == "function" else "model: got (a )?gradient hook"
        with pytest.raises(Exception, match=match):
            vsa.export_training_step(model, lambda out: out.square().mean(), (_tokens(layout), layout))
        assert (torch.autograd.Function.apply, torch.Tensor.register_hook) == (apply, register_hook)

    def test_names_of_the_model_and_of_the_loss(self):
        class Loss(nn.Module):
            def __init__(self):
                super().__init__()
                self.x = nn.Linear(1, 1)

            def forward(self, out):
                return self.x(out.sum()[None]).sum()

        class Model(Attention):
            def __init__(self):
                super().__init__()
                self.loss_fn = Loss()

            def forward(self, x, layout):
                return super().forward(x, layout) * self.loss_fn.x.weight.sum()

        layout = _layout()
        with pytest.raises(vsa.ArgumentError, match=r"loss_fn: got state under the model's own names, \['loss_fn.x"):
            vsa.export_training_step(Model(), Loss(), (_tokens(layout), layout))

    def test_any_name_of_a_parameter(self):
        class Model(Attention):
            def __init__(self):
                super().__init__()
                for name in ("_names", "_trained"):
                    self.register_parameter(name, nn.Parameter(torch.ones(())))

            def forward(self, x, layout):
                return super().forward(x, layout) * self._names * self._trained

        model, layout = Model(), _layout()
        x = _tokens(layout)
        step = vsa.export_training_step(model, lambda out: out.square().mean(), (x, layout))
        loss, gradients = step(x, layout)
        expected = model(x, layout).square().mean()
        expected.backward()
        torch.testing.assert_close(loss, expected.detach())
        torch.testing.assert_close(gradients["_names"], model._names.grad)

    def test_one_tensor_for_two_arguments(self):
        """torch.export makes one input of it, and the loss would compare that with itself for ever."""
        layout = _layout()
        x = _tokens(layout)
        with pytest.raises(vsa.ArgumentError, match="inputs, targets: got one tensor twice; allowed: a tensor of its"):
            vsa.export_training_step(Attention(), squared_error, (x, layout), targets=(x,))

    def test_another_program_is_no_step(self, tmp_path):
        path = tmp_path / "other.pt2"

        class LooksLikeOne(nn.Linear):
            def forward(self, x):
                out = super().forward(x)
                return out.sum(), {"weight": out}

        torch.export.save(torch.export.export(LooksLikeOne(2, 2), (torch.randn(2, 2),)), path)
        with pytest.raises(vsa.ArgumentError, match=r"path: got .*other.pt2', another exported program; allowed: what"):
            load_training_step(path)


_LOADER = """
import json, sys
from pathlib import Path
import torch

folder = Path(sys.argv[1])
# A saved compiled function guards it.
torch.set_num_threads(int(sys.argv[2]))
try:
    torch._inductor.aoti_load_package(str(folder / "package.pt2"))
    message = "loaded"
except RuntimeError as error:
    message = str(error)

import vsa_inductor as vsa
from vsa_inductor.exporting import load_training_step

x, y, video = torch.load(folder / "inputs.pt")
layout = vsa.TileLayout.from_video_shape(*video)
results = {
    "exported": torch.export.load(folder / "exported.pt2").module()(x, layout),
    "step": load_training_step(folder / "step.pt2")(x, layout, y),
    "package": torch._inductor.aoti_load_package(str(folder / "package.pt2"))(x, layout),
}
weight = torch.load(folder / "weight.pt").requires_grad_()
with open(folder / "function.bin", "rb") as file:
    loss = torch.compiler.load_compiled_function(file)(x, y, layout, weight)
results["function"] = (loss, torch.autograd.grad(loss, weight)[0])
torch.save(results, folder / "results.pt")
print(json.dumps({"message": message, "knows the model": "test_export" in sys.modules}))
"""


def _aot_compile_enabled():
    """A switch of torch 2.11; later versions have the method without it."""
    if hasattr(torch._dynamo.config, "enable_aot_compile"):
        return torch._dynamo.config.patch(enable_aot_compile=True)
    return contextlib.nullcontext()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """What was computed here, by name; what the other process computed; what it printed."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("saved")
    layout = _layout()
    x, y = _tokens(layout), _tokens(layout)
    torch.save((x, y, VIDEO), folder / "inputs.pt")
    expected = {}

    attention = Attention(gate=True)
    torch.export.save(torch.export.export(attention, (x, layout)), folder / "exported.pt2")
    expected["exported"] = attention(x, layout).detach()

    model = Model(gate=True)
    vsa.export_training_step(model, squared_error, (x, layout), targets=(y,)).save(folder / "step.pt2")
    loss = squared_error(model(x, layout), y)
    expected["step"] = (loss.detach(), _gradients(model, loss))

    bare = Bare()
    with torch.no_grad():
        program = torch.export.export(bare, (x, layout))
        vsa.package(program, folder / "package.pt2", options={"aot_inductor.compile_wrapper_opt_level": "O0"})
        expected["package"] = bare(x, layout)

    weight = torch.randn(HEAD_DIM, requires_grad=True)
    torch.save(weight.detach(), folder / "weight.pt")
    with _aot_compile_enabled():
        function = torch.compile(function_of_a_parameter, fullgraph=True)
        compiled = function.aot_compile(((x, y, layout, weight), {}))
    compiled.save_compiled_function(str(folder / "function.bin"))
    loss = function_of_a_parameter(x, y, layout, weight)
    expected["function"] = (loss.detach(), torch.autograd.grad(loss, weight)[0])

    done = subprocess.run(
        [sys.executable, "-c", _LOADER, str(folder), str(torch.get_num_threads())],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout.splitlines()[-1])
    assert not printed["knows the model"]
    return expected, torch.load(folder / "results.pt"), printed


class TestFreshProcess:
    """Everything that can be saved, loaded where only the package is known."""

    @pytest.mark.parametrize("what", ["exported", "step", "package", "function"])
    def test_results_are_equal(self, saved, what):
        expected, results, _ = saved
        torch.testing.assert_close(results[what], expected[what], check_stride=False)

    def test_without_the_import_the_message_names_the_package(self, saved):
        assert "Could not find schema for import_vsa_inductor_first::" in saved[2]["message"]


def test_every_operator_is_callable_from_a_package():
    """The second name of an operator runs the first: same schema, same result."""
    layout = _layout()
    x = torch.randn(1, layout.num_tokens, 2, 16)
    for name in dir(torch.ops.vsa):
        packet = getattr(torch.ops.vsa, name)
        if isinstance(packet, torch._ops.OpOverloadPacket):
            again = getattr(torch.ops.import_vsa_inductor_first, name).default
            assert str(again._schema).partition("::")[2] == str(packet.default._schema).partition("::")[2]
    tables = (layout.token_slot, layout.slot_token)
    assert torch.equal(torch.ops.import_vsa_inductor_first.tile(x, *tables), torch.ops.vsa.tile(x, *tables))


@pytest.mark.parametrize(
    "program, path, sentence",
    [
        (nn.Linear(2, 2), "model.pt2", "program: got Linear; allowed: an ExportedProgram or a TrainingStep"),
        (None, "model.so", "path: got 'model.so'; allowed: a name that ends in .pt2"),
    ],
)
def test_what_package_refuses(program, path, sentence):
    if program is None:
        program = torch.export.export(nn.Linear(2, 2), (torch.randn(2, 2),))
    with pytest.raises(vsa.ArgumentError, match=sentence):
        vsa.package(program, path)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_step_exported_on_the_cpu_runs_on_a_gpu():
    """Its backend is chosen there: Triton, whose gradients differ from the reference by rounding only."""
    layout = _layout()
    model, x, y = Model(gate=True), _tokens(layout), _tokens(layout)
    step = vsa.export_training_step(model, squared_error, (x, layout), targets=(y,))
    expected = step(x, layout, y)
    moved = vsa.exporting.TrainingStep(move_to_device_pass(step.exported, "cuda"))
    loss, gradients = moved(x.cuda(), layout.to("cuda"), y.cuda())
    q = torch.empty(1, HEADS, layout.num_slots, HEAD_DIM, device="cuda")
    assert vsa.backends.capability.resolve("auto", "forward", q, layout.block_size, False, False).name == "triton"
    torch.testing.assert_close(loss.cpu(), expected[0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close({name: x.cpu() for name, x in gradients.items()}, expected[1], atol=1e-3, rtol=1e-3)


def test_packages_for_cuda_are_refused_where_they_crash(monkeypatch, tmp_path):
    program = torch.export.export(nn.Linear(2, 2), (torch.randn(2, 2),))
    with FakeTensorMode():
        next(iter(program.graph.nodes)).meta["val"] = torch.empty(2, 2, device="cuda")
    monkeypatch.setattr(torch, "__version__", "2.11.0")
    with pytest.raises(vsa.ArgumentError, match=r"program: got a program for CUDA with torch 2\.11\.0"):
        vsa.package(program, tmp_path / "p.pt2")
    assert not list(tmp_path.iterdir())
