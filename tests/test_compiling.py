"""`vsa.compile`: torch.compile in everything, except that nothing of ours runs twice and a graph break is an error."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch._dynamo.utils import counters
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.utils.checkpoint import checkpoint

from vsa_inductor import TileLayout, compiling, video_sparse_attention

LAYOUT = TileLayout.from_video_shape(8, 4, 4)


def _inputs() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shape = (1, LAYOUT.num_tokens, 1, 16)
    return tuple(torch.randn(shape, generator=generator, requires_grad=True) for _ in range(3))


def _layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return video_sparse_attention(q.sin(), k, v, LAYOUT, sparsity=0.5)


def _three_layers(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        q = _layer(q, k, v)
    return q


def _three_checkpointed_layers(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        q = checkpoint(_layer, q, k, v, use_reentrant=False)
    return q


def _runs(fn: Callable[..., Any]) -> dict[str, int]:
    """How often a compiled step calls the attention and the selection, over forward and backward."""
    report = compiling.explain(fn, *_inputs())
    names = [call.name for call in report.opaque_calls]
    attention = [name for name in names if name.startswith("vsa.attention") and "backward" not in name]
    notes = [note for note in report.notes if "leaves that fusion out" not in note]
    return {"attention": len(attention), "select_blocks": names.count("vsa.select_blocks"), "notes": len(notes)}


@pytest.mark.parametrize("budget", [0.5, 0.1])
def test_memory_budget_recomputes_nothing_of_ours(budget: float) -> None:
    with functorch_config.patch(activation_memory_budget=budget):
        assert _runs(compiling.compile(_three_layers)) == {"attention": 3, "select_blocks": 3, "notes": 0}


def test_plain_compile_recomputes_and_explain_says_so() -> None:
    with functorch_config.patch(activation_memory_budget=0.1):
        runs = _runs(_three_layers)
    assert runs["attention"] > 3
    assert runs["notes"] == 1


def test_checkpoint_region_recomputes_nothing_of_ours() -> None:
    assert _runs(compiling.compile(_three_checkpointed_layers)) == {"attention": 3, "select_blocks": 3, "notes": 0}
    assert _runs(_three_checkpointed_layers) == {"attention": 6, "select_blocks": 6, "notes": 1}


def test_gradients_equal_eager_under_a_memory_budget() -> None:
    inputs = _inputs()
    expected = torch.autograd.grad(_three_layers(*inputs).square().sum(), inputs)
    with functorch_config.patch(activation_memory_budget=0.1):
        actual = torch.autograd.grad(compiling.compile(_three_layers)(*inputs).square().sum(), inputs)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


class _Spy(CustomGraphPass):
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.calls += 1

    def uuid(self) -> Any:
        return "spy"


def _small(x: torch.Tensor) -> torch.Tensor:
    return (x * 2).relu()


def test_a_pass_of_the_user_runs_too() -> None:
    spy = _Spy()
    options = {"joint_custom_pre_pass": spy, "fx_graph_cache": False}
    with functorch_config.patch(enable_autograd_cache=False):
        compiling.compile(_small, options=options)(torch.randn(7))
    assert spy.calls == 1
    assert options == {"joint_custom_pre_pass": spy, "fx_graph_cache": False}


def test_a_pass_of_another_library_survives() -> None:
    spy = _Spy()
    with (
        inductor_config.patch(joint_custom_pre_pass=spy, fx_graph_cache=False),
        functorch_config.patch(enable_autograd_cache=False),
    ):
        compiling.compile(_small)(torch.randn(8))
        assert inductor_config.joint_custom_pre_pass is spy
    assert spy.calls == 1


def test_nothing_process_wide_changes() -> None:
    before = inductor_config.get_config_copy()
    compiling.compile(_small, mode="reduce-overhead")(torch.randn(9))
    assert inductor_config.get_config_copy() == before


def test_mode_and_options_together() -> None:
    x = torch.randn(10)
    compiled = compiling.compile(_small, mode="max-autotune-no-cudagraphs", options={"shape_padding": False})
    torch.testing.assert_close(compiled(x), _small(x))
    options, _ = compiling._settings_of[compiled]
    assert options["max_autotune"] is True
    assert options["shape_padding"] is False


def test_another_backend_goes_through() -> None:
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    x = torch.randn(11)
    torch.testing.assert_close(compiling.compile(_small, backend=backend)(x), _small(x))
    torch.testing.assert_close(compiling.compile(_small, backend="eager")(x), _small(x))
    assert len(graphs) == 1


def test_fullgraph_is_the_default() -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x + 1

    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiling.compile(broken, backend="eager")(torch.randn(3))
    assert compiling.compile(broken, fullgraph=False, backend="eager")(torch.zeros(3)).tolist() == [1.0] * 3


def test_as_decorator() -> None:
    @compiling.compile(dynamic=True)
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    assert fn(torch.zeros(3)).tolist() == [1.0] * 3


def test_disabled_returns_the_function() -> None:
    assert compiling.compile(_small, disable=True)(torch.zeros(2)).tolist() == [0.0, 0.0]


def test_modules_are_compiled_as_modules() -> None:
    model = torch.nn.Linear(3, 2)
    compiled = compiling.compile(model)
    assert list(dict(compiled.named_parameters())) == ["_orig_mod.weight", "_orig_mod.bias"]
    x = torch.randn(4, 3)
    torch.testing.assert_close(compiled(x), model(x))


def test_identity_of_the_pass() -> None:
    spy = _Spy()
    assert compiling.MustSavePass() == compiling.MustSavePass()
    assert compiling.MustSavePass([spy]) == compiling.MustSavePass([spy]) != compiling.MustSavePass()
    assert compiling.MustSavePass([spy]).uuid() != compiling.MustSavePass().uuid() is not None
    # A function has no identity: the cache must stay off.
    assert compiling.MustSavePass([lambda graph: None]).uuid() is None


def test_marks_are_part_of_the_cache_key(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def hits(compile_it: Callable[..., Any]) -> int:
        torch._dynamo.reset()
        counters.clear()
        with inductor_config.patch(fx_graph_cache=True), functorch_config.patch(enable_autograd_cache=False):
            compile_it(_small)(torch.randn(12))
        return counters["inductor"]["fxgraph_cache_hit"]

    assert hits(torch.compile) == 0
    assert hits(compiling.compile) == 0
    assert hits(compiling.compile) == 1
    assert hits(torch.compile) == 1


def test_a_second_wrapper_reuses_the_compilation() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x - 3

    counters.clear()
    for _ in range(3):
        compiling.compile(fn)(torch.randn(5))
    assert counters["stats"]["unique_graphs"] == 1


def test_the_coarse_branch_is_not_saved_in_raster_order():
    layout = TileLayout.from_video_shape(5, 6, 7)
    q, k, v, gate = (torch.randn(1, layout.num_tokens, 2, 64, requires_grad=True) for _ in range(4))

    def block(q, k, v, gate):
        return video_sparse_attention(q.sin(), k.sin(), v.sin(), layout, sparsity=0.5, gate=gate).sin()

    saved: list[torch.Size] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.shape) or x, lambda x: x):
        out = compiling.compile(block)(q, k, v, gate)
    # The combined output, which sin needs again, is made once more from what is saved in tile order.
    assert saved.count(q.shape) == 4, f"q, k, v and gate of the caller are the only raster tensors: {saved}"
    coarse_rows = layout.num_blocks * 2 * 64
    assert any(shape.numel() == coarse_rows and shape[-1] == 64 for shape in saved)
    got = torch.autograd.grad(out.square().sum(), (q, k, v, gate))
    expected = torch.autograd.grad(block(q, k, v, gate).square().sum(), (q, k, v, gate))
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(not compiling.correct_fusions(), reason="this torch is not known to compile any fusion wrongly")
def test_a_fusion_that_computes_wrong_gradients_is_off_unless_asked_for():
    name = "triton.mix_order_reduction"
    assert compiling._options(None, None, None)[name] is False
    assert compiling._options("max-autotune-no-cudagraphs", None, None)[name] is False
    assert compiling._options(None, {name: True}, None)[name] is True


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gradients_of_a_shared_modulation_table():
    """Two modulated norms that take their shifts and scales from one table, as every Wan block has (issue 193061)."""
    tokens, dim = 32768, 1024

    def blocks(x, table):
        shift, scale, shift2, scale2 = table.chunk(4, dim=1)
        for shift_, scale_ in ((shift, scale), (shift2, scale2)):
            x = x + torch.nn.functional.layer_norm(x, (dim,)) * (1 + scale_) + shift_
        return x

    x = torch.randn(1, tokens, dim, device="cuda")
    table = torch.randn(1, 4, dim, device="cuda", requires_grad=True)
    dout = torch.randn_like(x)
    expected = torch.autograd.grad(blocks(x, table), table, dout)[0]
    got = torch.autograd.grad(compiling.compile(blocks)(x, table), table, dout)[0]
    torch.testing.assert_close(got, expected, atol=0.3, rtol=1e-3)


def test_plain_compile_is_told_about_wrong_fusions() -> None:
    (note,) = (note for note in compiling.explain(_three_layers, *_inputs()).notes if "fusion" in note)
    assert "cpp.max_horizontal_fusion_size" in note and "gradients" in note
