"""Copies and pickles of what a user holds, sparsify around compilation, and two threads that compile at once."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import vsa_inductor as vsa
from vsa_inductor import compiling

LAYOUT = vsa.TileLayout.from_video_shape(5, 4, 4)


def operands(requires_grad: bool = False) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shape = (1, LAYOUT.num_tokens, 2, 16)
    return tuple(torch.randn(shape, generator=generator, requires_grad=requires_grad) for _ in range(3))


def saved(value: Any, weights_only: bool = False) -> Any:
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=weights_only)


WAYS: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "torch.save": saved,
}
ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


@ways
def test_layouts(way: Callable[[Any], Any]) -> None:
    layout = vsa.TileLayout.from_video_shape(5, 6, 4, prefix=(3, 70))
    other = way(layout)
    assert other is not layout and repr(other) == repr(layout)
    for name in ("token_slot", "slot_token", "kv_block_sizes"):
        assert torch.equal(getattr(other, name), getattr(layout, name))
        assert getattr(other, name) is not getattr(layout, name)
    q, k, v = (torch.randn(1, layout.num_tokens, 1, 16) for _ in range(3))
    out, expected = (vsa.video_sparse_attention(q, k, v, x, sparsity=0.5) for x in (other, layout))
    assert torch.equal(out, expected)


@ways
def test_selections_options_and_errors(way: Callable[[Any], Any]) -> None:
    lists = vsa.BlockSelection.from_block_mask(torch.eye(3, dtype=torch.bool)[None, None])
    other = way(lists)
    assert torch.equal(other.kv_indices, lists.kv_indices) and torch.equal(other.kv_num_blocks, lists.kv_num_blocks)
    options = vsa.Options(backend=("auto", "eager"), strict=True)
    assert way(options) == options
    error = way(vsa.ArgumentError("q", 1, "2"))
    assert (error.argument, error.given, error.allowed) == ("q", 1, "2")


def test_weights_only_loading_of_named_classes() -> None:
    lists = vsa.BlockSelection.dense(1, 1, 2, 2)
    with pytest.raises(pickle.UnpicklingError, match=r"vsa_inductor\.selection\.BlockSelection"):
        saved(lists, weights_only=True)
    # Leaving the context forgets what it was given: not the layout, which the package registers.
    with torch.serialization.safe_globals([vsa.BlockSelection]):
        assert torch.equal(saved(LAYOUT, weights_only=True).token_slot, LAYOUT.token_slot)
        assert torch.equal(saved(lists, weights_only=True).kv_indices, lists.kv_indices)


class Block(nn.Module):
    """Module level, so that it can be pickled."""

    def __init__(self) -> None:
        super().__init__()
        self.to_q = nn.Linear(16, 16)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = vsa.video_sparse_attention(self.to_q(q), k, v, LAYOUT, sparsity=0.5)
        assert isinstance(out, Tensor)
        return out


@ways
def test_compiled_modules(way: Callable[[Any], Any]) -> None:
    block = Block()
    compiled = vsa.compile(block, backend="aot_eager")
    compiled(*operands())
    other = way(compiled)
    expected = block(*operands())
    with torch.no_grad():
        block.to_q.weight.zero_()
    torch.testing.assert_close(other(*operands()), expected, msg="it has its own weights")
    other(*operands()).sum().backward()
    assert other._orig_mod.to_q.weight.grad.any() and block.to_q.weight.grad is None


@ways
def test_the_options_travel_with_a_compiled_module(way: Callable[[Any], Any]) -> None:
    """The marks of `vsa.compile` among them: a copy does not recompute the attention either."""
    callback = way(vsa.compile(Block())).dynamo_ctx.callback
    while not hasattr(callback, "get_compiler_config"):
        callback = getattr(callback, "_torchdynamo_orig_backend", None) or callback._torchdynamo_orig_callable
    options = callback.get_compiler_config()
    assert isinstance(options["joint_custom_pre_pass"], compiling.MustSavePass)
    assert options["cpp.max_horizontal_fusion_size"] == 1


COMPILED_FIRST: dict[str, Callable[[Any], Any]] = {
    "nn.Module.compile": lambda model: model.compile(fullgraph=True, backend="aot_eager"),
    "compile_repeated_blocks": lambda model: model.compile_repeated_blocks(fullgraph=True, backend="aot_eager"),
}


@pytest.mark.parametrize("way", COMPILED_FIRST)
def test_sparsify_after_a_dense_run_of_compiled_code(way: str) -> None:
    """Guards on the processor: what was compiled dense is not run again once the model is sparse, nor after restore."""
    pytest.importorskip("diffusers", reason="diffusers is not installed")
    from test_diffusers_wan import forward, make_inputs, make_model

    torch._dynamo.reset()
    model, expected = (make_model(num_attention_heads=1, attention_head_dim=32, num_layers=1) for _ in range(2))
    latents = make_inputs((5, 8, 8))
    with torch.no_grad():
        dense = forward(expected, latents)
        vsa.sparsify(expected, sparsity=0.9)
        sparse = forward(expected, latents)
        assert (dense - sparse).abs().max() > 1e-2
        COMPILED_FIRST[way](model)
        torch.testing.assert_close(forward(model, latents), dense, rtol=1e-4, atol=1e-5)
        handle = vsa.sparsify(model, sparsity=0.9)
        torch.testing.assert_close(forward(model, latents), sparse, rtol=1e-4, atol=1e-5)
        handle.restore()
        torch.testing.assert_close(forward(model, latents), dense, rtol=1e-4, atol=1e-5)


def in_threads(*jobs: Callable[[], Any]) -> list[Any]:
    """Runs all jobs at once; raises what one of them raised."""
    barrier, results = threading.Barrier(len(jobs)), [None] * len(jobs)
    errors: list[BaseException] = []

    def run(i: int) -> None:
        try:
            barrier.wait()
            results[i] = jobs[i]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def gradients(fn: Callable[..., Tensor]) -> tuple[Tensor, ...]:
    leaves = operands(requires_grad=True)
    return torch.autograd.grad(fn(*leaves).square().sum(), leaves)


def test_two_threads_compile_at_once() -> None:
    def plain(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return vsa.video_sparse_attention(q.sin(), k, v, LAYOUT, sparsity=0.5)

    def gated(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return vsa.video_sparse_attention(q, k.cos(), v, LAYOUT, sparsity=0.5, gate=1.0)

    shared = vsa.compile(gated)
    jobs = [lambda: gradients(vsa.compile(plain)), lambda: gradients(shared), lambda: gradients(shared)]
    for got, fn in zip(in_threads(*jobs), (plain, gated, gated), strict=True):
        torch.testing.assert_close(got, gradients(fn), rtol=1e-4, atol=1e-5)


def test_options_of_one_thread_do_not_reach_another() -> None:
    inside, checked = threading.Event(), threading.Event()

    def with_options() -> vsa.Options:
        with vsa.options(backend="eager", strict=True) as options:
            inside.set()
            assert checked.wait(60)
            return options

    def without() -> vsa.Options:
        assert inside.wait(60)
        from vsa_inductor.options import current

        seen = current()
        checked.set()
        return seen

    assert in_threads(with_options, without) == [vsa.Options(backend="eager", strict=True), vsa.Options()]


def test_one_compiled_function_follows_the_options_of_each_thread() -> None:
    compiled = torch.compile(lambda q, k, v: vsa.video_sparse_attention(q, k, v, LAYOUT), backend="eager")

    def strict_triton() -> str:
        with (
            vsa.options(backend="triton", strict=True),
            pytest.raises(Exception, match="strict=True forbids") as caught,
        ):
            compiled(*operands())
        return str(caught.value)

    def default() -> Tensor:
        return compiled(*operands())

    # Operands on the CPU, which the triton backend refuses on every machine.
    first, out, again = in_threads(strict_triton, default, default)
    assert "triton" in first and torch.equal(out, again)


def test_two_threads_explain_at_once() -> None:
    """Each gets its own region: what is captured comes from hooks of the whole process."""

    def attentions(fn: Callable[..., Any]) -> int:
        calls = vsa.explain(fn, *operands(), backward=False).opaque_calls
        return sum(call.name.startswith("vsa.attention") for call in calls)

    def once(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return vsa.video_sparse_attention(q, k, v, LAYOUT, sparsity=0.5)

    def twice(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return once(once(q, k, v), k, v)

    assert in_threads(lambda: attentions(once), lambda: attentions(twice)) == [1, 2]


def test_threads_count_their_own_recompilations() -> None:
    """As `explain`: reasons come from torch's log, whose settings are those of before afterwards."""
    before = torch._logging._internal.log_state.artifact_names.copy()

    def check(most: int) -> str:
        calls = [(torch.ones(n, n),) for n in (3, 4)]
        try:
            vsa.testing.assert_recompiles(lambda x: x @ x, calls, at_most=most)
        except AssertionError as error:
            return str(error).splitlines()[0]
        return "passed"

    results = in_threads(*(lambda most=most: check(most) for most in (0, 1, 0, 1)))
    assert [result == "passed" for result in results] == [False, True, False, True], results
    assert all("got 1" in result for result in results if result != "passed")
    assert torch._logging._internal.log_state.artifact_names == before
