"""Norm and rotation around sparse attention, forward and backward: what the lowerings recognise, and that it is right.

On the CPU the references stand for the kernels, so that every form runs here too.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from problems import DEVICES
from test_norm_rope_tile import complex_product, rotated_halves, stacked_pairs, strided_writes, swapped_pairs, unrotated
from torch import Tensor

import vsa_inductor as vsa
from vsa_inductor.lowerings import norm_rope_tile, norm_rope_tile_backward

BATCH, HEADS, DIM = 2, 3, 64
SHAPE = (5, 6, 7)
EPS = 1e-6


def fused_norm(x: Tensor, weight: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, EPS)


def written_out_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).type_as(x) * weight


def no_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x


@dataclass
class Block:
    """Self-attention without its projections, and inputs for it."""

    form: object
    norm: object = fused_norm
    per_head: bool = False
    gated: bool = True
    device: str = "cpu"
    inputs: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.dtype = torch.float32 if self.device == "cpu" else torch.bfloat16
        self.layout = vsa.TileLayout.from_video_shape(*SHAPE, device=self.device)
        tokens = self.layout.num_tokens
        options = {"device": self.device, "dtype": self.dtype, "requires_grad": True}
        width = DIM if self.per_head else HEADS * DIM
        self.inputs = [torch.randn(BATCH, tokens, HEADS * DIM, **options) for _ in range(3)]
        self.inputs += [torch.randn(BATCH, tokens, HEADS, DIM, **options)] if self.gated else []
        self.weights = [torch.randn(width, **options) for _ in range(0 if self.norm is no_norm else 2)]
        self.tables = [torch.randn(1, tokens, 1, DIM, device=self.device) for _ in range(2)]

    def prologue(self, x: Tensor, weight: Tensor | None) -> Tensor:
        if self.per_head:
            return self.form(self.norm(x.unflatten(2, (HEADS, DIM)), weight), *self.tables).type_as(x)
        return self.form(self.norm(x, weight).unflatten(2, (HEADS, DIM)), *self.tables).type_as(x)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> Tensor:
        gate, weights = (rest[0], rest[1:]) if self.gated else (None, rest)
        q, k = (self.prologue(x, w) for x, w in zip((q, k), weights or (None, None), strict=True))
        # Everything selected: a rounding of scores then picks no other blocks.
        return vsa.video_sparse_attention(q, k, v.unflatten(2, (HEADS, DIM)), self.layout, sparsity=0.0, gate=gate)

    def compare(self, limit: float | None = None) -> None:
        """Compiled equals eager: the output and every gradient."""
        arguments = [*self.inputs, *self.weights]
        out, expected = torch.compile(self, fullgraph=True)(*arguments), self(*arguments)
        dout = torch.randn_like(out)
        results = [(out, expected)]
        results += zip(*(torch.autograd.grad(x, arguments, dout) for x in (out, expected)), strict=True)
        limit = limit or (1e-5 if self.dtype == torch.float32 else 3e-2)
        for number, (got, right) in enumerate(results):
            assert got.shape == right.shape and got.stride() == right.stride()
            assert float((got.float() - right.float()).norm() / right.float().norm()) < limit, number


@pytest.fixture
def recorded(monkeypatch, device):
    """The operands of prologue launches, and what followed un-tiles: matches or None, in the order of lowering."""
    torch._dynamo.reset()
    launches, backward = [], []
    call, recognise = norm_rope_tile._call, norm_rope_tile_backward.recognise

    def record_call(group, *args):
        launches.append([operand.match for operand in group])
        return call(group, *args)

    def record_match(*args):
        backward.append(recognise(*args))
        return backward[-1]

    monkeypatch.setattr(norm_rope_tile, "_call", record_call)
    monkeypatch.setattr(norm_rope_tile_backward, "recognise", record_match)
    if device == "cpu":
        for module in (norm_rope_tile, norm_rope_tile_backward):
            monkeypatch.setattr(module, "has_kernel", lambda x, D: norm_rope_tile._enabled)
    with torch._inductor.config.patch(force_disable_caches=True):
        yield launches, backward


def found(backward):
    return [match for match in backward if match is not None]


# On the CPU the backend's contract leaves dq to its surroundings: generated code, by design.
def final_gradients(device: str) -> int:
    return 1 if device == "cpu" else 2


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("per_head", [False, True], ids=["all heads", "per head"])
@pytest.mark.parametrize("form", [strided_writes, swapped_pairs, complex_product, unrotated], ids=lambda f: f.__name__)
def test_forms(form, per_head, device, recorded):
    launches, backward = recorded
    Block(form, per_head=per_head, device=device).compare()
    ((q, k, v),) = launches
    for match in (q, k):
        assert match.norm.per_head == per_head and match.weight is not None
        assert match.rotation.name == ("none" if form is unrotated else "interleaved")
    assert v.norm is None and not v.rotation.tables
    matches = found(backward)
    assert len(matches) == final_gradients(device)
    for match in matches:
        assert match.norm.per_head == per_head and match.norm.weight is not None and len(match.weight_gradients) == 1
        assert match.norm.divisor == pytest.approx(DIM if per_head else HEADS * DIM)
        assert match.rotation.name == ("none" if form is unrotated else "interleaved")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", [rotated_halves, stacked_pairs], ids=lambda f: f.__name__)
def test_forms_with_cat(form, device, recorded):
    """Forward, Inductor copies a torch.cat on the CPU; the backward is recognised everywhere."""
    launches, backward = recorded
    Block(form, device=device).compare()
    matches = found(backward)
    assert len(matches) == final_gradients(device)
    rotation = "half" if form is rotated_halves else "interleaved"
    assert {match.rotation.name for match in matches} == {rotation}
    if device != "cpu":
        assert [[match.rotation.name for match in launch] for launch in launches] == [[rotation, rotation, "none"]]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("per_head", [False, True], ids=["all heads", "per head"])
def test_a_norm_written_out(per_head, device, recorded):
    launches, backward = recorded
    Block(strided_writes, norm=written_out_norm, per_head=per_head, device=device).compare()
    assert len(launches) == 1 and len(launches[0]) == 3
    assert [len(match.weight_gradients) for match in found(backward)] == [1] * final_gradients(device)


@pytest.mark.parametrize("device", DEVICES)
def test_a_rotation_without_a_norm(device, recorded):
    launches, backward = recorded
    Block(swapped_pairs, norm=no_norm, device=device).compare()
    assert [[match.rotation.name for match in launch] for launch in launches] == [
        ["interleaved", "interleaved", "none"]
    ]
    matches = found(backward)
    assert len(matches) == final_gradients(device) and all(match.norm is None for match in matches)


@pytest.mark.parametrize("device", DEVICES)
def test_without_a_gate(device, recorded):
    """No sums over the tiles of v, no rows of tiles in the gradients."""
    launches, backward = recorded
    Block(strided_writes, gated=False, device=device).compare()
    assert len(launches) == 1 and len(found(backward)) == final_gradients(device)


def shifted_norm(x: Tensor, weight: Tensor) -> Tensor:
    return fused_norm(x, weight) + 1


def gelu_norm(x: Tensor, weight: Tensor) -> Tensor:
    return torch.nn.functional.gelu(fused_norm(x, weight))


def layer_norm(x: Tensor, weight: Tensor) -> Tensor:
    return torch.nn.functional.layer_norm(x, (x.shape[-1],), weight, None, EPS)


def norm_of_a_tanh(x: Tensor, weight: Tensor) -> Tensor:
    return fused_norm(torch.tanh(x), weight)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("norm", [shifted_norm, gelu_norm, layer_norm, norm_of_a_tanh], ids=lambda f: f.__name__)
def test_other_forms_take_the_generic_path(norm, device, recorded):
    launches, backward = recorded
    # What is added to a norm in bf16 costs eager a bit more of it.
    Block(strided_writes, norm=norm, device=device).compare(6e-2 if device != "cpu" else None)
    assert all(match.norm is None and not match.rotation.tables for launch in launches for match in launch)
    if norm is not shifted_norm:  # its derivative is the norm's
        assert not found(backward)


def adapted_norm(x: Tensor, weight: Tensor) -> Tensor:
    """As behind a projection with an adapter: the norm reads a sum of two matrix products."""
    return fused_norm(x @ torch.diag(weight) + 0.5 * (x @ torch.outer(weight, weight)), weight)


@pytest.mark.parametrize("device", DEVICES)
def test_a_norm_of_a_sum_that_is_kept(device, recorded):
    launches, backward = recorded
    Block(strided_writes, norm=adapted_norm, device=device).compare()
    assert [[match.norm is not None for match in launch] for launch in launches] == [[True, True, False]]
    assert len(found(backward)) == final_gradients(device)


@pytest.mark.parametrize("device", DEVICES)
def test_frozen_weights(device, recorded):
    _launches, backward = recorded
    block = Block(strided_writes, device=device)
    block.inputs += [w.detach() for w in block.weights]
    block.weights = []
    arguments = block.inputs
    out, expected = torch.compile(block, fullgraph=True)(*arguments), block(*arguments)
    got, right = (torch.autograd.grad(x, arguments[:4], torch.ones_like(x)) for x in (out, expected))
    for a, b in zip(got, right, strict=True):
        assert float((a - b).norm() / b.norm()) < (1e-5 if device == "cpu" else 3e-2)
    assert [match.weight_gradients for match in found(backward)] == [()] * final_gradients(device)


@pytest.mark.parametrize("device", DEVICES)
def test_dynamic_tokens(device, recorded):
    launches, backward = recorded
    torch._dynamo.reset()

    def run(q, k, v, w, cos, sin, layout):
        q, k = (strided_writes(fused_norm(x, w).unflatten(2, (HEADS, DIM)), cos, sin).type_as(x) for x in (q, k))
        return vsa.video_sparse_attention(q, k, v.unflatten(2, (HEADS, DIM)), layout, sparsity=0.0, gate=1.0)

    compiled = torch.compile(run, fullgraph=True, dynamic=True)
    for shape in (SHAPE, (4, 9, 6)):
        block = Block(strided_writes, device=device)
        layout = vsa.TileLayout.from_video_shape(*shape, device=device)
        q, k, v = (
            torch.randn(BATCH, layout.num_tokens, HEADS * DIM, device=device, dtype=block.dtype, requires_grad=True)
            for _ in range(3)
        )
        tables = [torch.randn(1, layout.num_tokens, 1, DIM, device=device) for _ in range(2)]
        out, expected = (f(q, k, v, block.weights[0], *tables, layout) for f in (compiled, run))
        leaves = (q, k, v, block.weights[0])
        got, right = (torch.autograd.grad(x.square().sum(), leaves) for x in (out, expected))
        for a, b in zip((out, *got), (expected, *right), strict=True):
            assert float((a - b).norm() / b.norm()) < (1e-4 if device == "cpu" else 3e-2)
    assert len(launches) == 1 and len(found(backward)) == final_gradients(device)


@pytest.mark.parametrize("device", DEVICES)
def test_recognition_can_be_switched_off(device, recorded):
    launches, backward = recorded
    with norm_rope_tile.recognising(False):
        Block(strided_writes, device=device).compare()
    assert not launches and not backward
