"""Activation checkpointing: how often the attention really runs in a step, in eager and in compiled code."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import vsa_inductor as vsa
from vsa_inductor import checkpointing

LAYOUT = vsa.TileLayout.from_video_shape(8, 4, 4)
LAYERS = 2
POLICY = checkpointing.context_fn()


def inputs() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shape = (1, LAYOUT.num_tokens, 1, 16)
    return tuple(torch.randn(shape, generator=generator, requires_grad=True) for _ in range(3))


def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return vsa.video_sparse_attention(q.sin(), k.cos(), v, LAYOUT, sparsity=0.5)


def layers(q: Tensor, k: Tensor, v: Tensor, **checkpoint_arguments: Any) -> Tensor:
    for _ in range(LAYERS):
        if checkpoint_arguments:
            q = checkpoint(layer, q, k, v, use_reentrant=False, **checkpoint_arguments)
        else:
            q = layer(q, k, v)
    return q


FULL = functools.partial(layers, preserve_rng_state=False)
SELECTIVE = functools.partial(layers, preserve_rng_state=False, context_fn=POLICY)


class Dispatched(TorchDispatchMode):
    """Counts what is dispatched below autograd: in eager, what runs."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[str(op.overloadpacket)] += 1
        return op(*args, **(kwargs or {}))


def eager_runs(fn: Callable[..., Tensor]) -> tuple[Counter[str], Counter[str]]:
    """What the forward and the backward of ``fn`` run."""
    with Dispatched() as forward:
        out = fn(*inputs())
    with Dispatched() as backward:
        out.square().sum().backward()
    return forward.count, backward.count


def compiled_runs(fn: Callable[..., Tensor]) -> Counter[tuple[str, str]]:
    """Opaque calls of a compiled step: (direction, operator without the backend's name)."""
    calls = vsa.explain(fn, *inputs()).opaque_calls
    return Counter((call.direction, call.name.replace("_eager", "")) for call in calls)


def gradients(fn: Callable[..., Tensor]) -> tuple[Tensor, ...]:
    operands = inputs()
    return torch.autograd.grad(fn(*operands).square().sum(), operands)


@pytest.mark.parametrize("fn, again", [(layers, 0), (FULL, LAYERS), (SELECTIVE, 0)], ids=["none", "full", "selective"])
def test_eager_runs_of_the_attention(fn: Callable[..., Tensor], again: int) -> None:
    forward, backward = eager_runs(fn)
    for op in ("vsa.attention", "vsa.select_blocks"):
        assert forward[op] == LAYERS
        assert backward[op] == again, f"{op} in the backward"
    assert backward["vsa.attention_backward"] == LAYERS
    # q, k and v in tile order are the large tensors that a region gives up; one tile per layer is that of dout.
    assert backward["vsa.tile"] == (LAYERS if fn is layers else 4 * LAYERS)


@pytest.mark.parametrize("wrap", [lambda fn: fn, vsa.compile], ids=["torch.compile", "vsa.compile"])
def test_compiled_code_never_runs_a_kept_attention_again(wrap: Callable[..., Any]) -> None:
    runs = compiled_runs(wrap(SELECTIVE))
    for op in ("vsa.attention", "vsa.select_blocks"):
        assert runs["forward", op] == LAYERS
        assert runs["backward", op] == 0
    assert runs["backward", "vsa.attention_backward"] == LAYERS


def test_compiled_without_a_region_runs_it_once() -> None:
    """Plain torch.compile, no budget: the min-cut partitioner saves what an opaque operator gave."""
    runs = compiled_runs(layers)
    assert runs["forward", "vsa.attention"] == LAYERS and runs["backward", "vsa.attention"] == 0
    assert runs["forward", "vsa.select_blocks"] == LAYERS and runs["backward", "vsa.select_blocks"] == 0


@pytest.mark.parametrize("fn", [FULL, SELECTIVE], ids=["full", "selective"])
def test_eager_gradients_are_those_without_a_region(fn: Callable[..., Tensor]) -> None:
    for got, expected in zip(gradients(fn), gradients(layers), strict=True):
        assert torch.equal(got, expected)


def test_compiled_gradients_are_those_of_eager() -> None:
    torch.testing.assert_close(gradients(vsa.compile(SELECTIVE)), gradients(layers), rtol=1e-4, atol=1e-5)


def test_a_base_policy_decides_about_the_rest() -> None:
    def save_sin(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        assert op not in checkpointing.saved_operators(), "the base was asked about one of ours"
        saved = op is torch.ops.aten.sin.default
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    _, backward = eager_runs(functools.partial(layers, context_fn=checkpointing.context_fn(save_sin)))
    # The gradient of cos is a sin, one per layer; the regions' own sin is kept and cos computed again: the gradient of
    # sin is a cos, too.
    assert backward["vsa.attention"] == 0
    assert backward["aten.sin"] == LAYERS
    assert backward["aten.cos"] == 2 * LAYERS


def test_a_list_of_operators_works_as_well() -> None:
    context = functools.partial(create_selective_checkpoint_contexts, list(checkpointing.saved_operators()))
    _, backward = eager_runs(functools.partial(layers, context_fn=context))
    assert backward["vsa.attention"] == backward["vsa.select_blocks"] == 0


def test_asking_by_name_for_recomputation_is_followed_by_vsa_compile() -> None:
    def recompute(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_RECOMPUTE

    context = functools.partial(create_selective_checkpoint_contexts, recompute)
    runs = compiled_runs(vsa.compile(functools.partial(layers, context_fn=context)))
    assert runs["backward", "vsa.attention"] == LAYERS


def test_checkpointing_of_a_diffusers_model() -> None:
    pytest.importorskip("diffusers", reason="diffusers is not installed")
    from test_diffusers_wan import forward, make_inputs, make_model

    model, latents = make_model(num_attention_heads=1, attention_head_dim=32).train(), make_inputs((5, 8, 8))
    vsa.sparsify(model, sparsity=0.5)
    for context, again in (({}, 2), ({"context_fn": POLICY}, 0)):
        model.enable_gradient_checkpointing(functools.partial(checkpoint, use_reentrant=False, **context))
        model.zero_grad(set_to_none=True)
        with Dispatched() as forwards:
            loss = forward(model, latents).square().mean()
        with Dispatched() as backward:
            loss.backward()
        assert forwards.count["vsa.attention"] == 2
        assert backward.count["vsa.attention"] == again
