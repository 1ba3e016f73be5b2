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
    arguments_of, recognise = norm_rope_tile._arguments, norm_rope_tile_backward.recognise

    def record_call(group, *args):
        launches.append([operand.match for operand in group])
        return arguments_of(group, *args)

    def record_match(*args):
        backward.append(recognise(*args))
        return backward[-1]

    monkeypatch.setattr(norm_rope_tile, "_arguments", record_call)
    monkeypatch.setattr(norm_rope_tile_backward, "recognise", record_match)
    if device == "cpu":
        for module in (norm_rope_tile, norm_rope_tile_backward):
            monkeypatch.setattr(module, "has_kernel", lambda x: norm_rope_tile._enabled)
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


def norm_with_two_eps(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 0.5 + 0.25) * weight


def norm_of_twice_the_mean(x: Tensor, weight: Tensor) -> Tensor:
    mean = x.square().mean(-1, keepdim=True)
    return x * torch.rsqrt(mean + mean + EPS) * weight


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("norm", [norm_with_two_eps, norm_of_twice_the_mean], ids=lambda f: f.__name__)
def test_terms_under_the_root_add_up(norm, device, recorded):
    Block(strided_writes, norm=norm, device=device).compare()


@pytest.mark.parametrize("device", DEVICES)
def test_tables_of_frames(device, recorded):
    """A rotation in [B, T, HW, H, D], whose buffer a matrix product reads too: a token overruns the axis HW."""
    block = Block(unrotated, device=device)
    frames = SHAPE[0]
    cos, sin = (torch.randn(1, frames, 1, 1, DIM, device=device) for _ in range(2))

    def run(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, matrix: Tensor) -> list[Tensor]:
        q, k = (fused_norm(x, weight).view(BATCH, frames, -1, HEADS, DIM) for x in (q, k))
        q, k = (strided_writes(x, cos, sin).type_as(x) for x in (q, k))
        v = v.unflatten(2, (HEADS, DIM))
        out = vsa.video_sparse_attention(q.flatten(1, 2), k.flatten(1, 2), v, block.layout, sparsity=0.0, gate=1.0)
        return [out, q @ matrix, k @ matrix]

    matrix = torch.randn(DIM, DIM, device=device, dtype=block.dtype)
    with torch.no_grad():
        arguments = (*block.inputs[:3], block.weights[0], matrix)
        for got, right in zip(torch.compile(run, fullgraph=True)(*arguments), run(*arguments), strict=True):
            limit = 1e-5 if device == "cpu" else 3e-2
            assert float((got.float() - right.float()).norm() / right.float().norm()) < limit


@pytest.mark.parametrize("device", DEVICES)
def test_a_norm_of_a_norm(device, recorded):
    """Whose roots are both kept: the sums of one are not those of the other."""
    block = Block(strided_writes, device=device)

    def run(q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        root = torch.rsqrt(q.float().square().mean(-1, keepdim=True) + EPS)
        h = (q * root).type_as(q) * weight
        q, k = (block.prologue(x, weight) for x in (h, k))
        v = v.unflatten(2, (HEADS, DIM))
        return vsa.video_sparse_attention(q, k, v, block.layout, sparsity=0.0, gate=1.0), h, root

    with torch.no_grad():
        arguments = (*block.inputs[:3], block.weights[0])
        for got, right in zip(torch.compile(run, fullgraph=True)(*arguments), run(*arguments), strict=True):
            limit = 1e-5 if device == "cpu" else 3e-2
            assert float((got.float() - right.float()).norm() / right.float().norm()) < limit


def written_into(x: Tensor) -> Tensor:
    """Rows of other tokens mixed in, as packed text is."""
    places = torch.arange(0, x.shape[1], 3, device=x.device)
    return x.index_put((torch.zeros_like(places), places), 2 * x[0, places + 1])


def narrowed(x: Tensor) -> Tensor:
    return (x + x.detach().to(torch.float8_e4m3fn).to(x.dtype)).to(x.dtype)


def truncated(x: Tensor) -> Tensor:
    return x + (4 * x.detach()).to(torch.int32).to(x.dtype)


def gathered(x: Tensor) -> Tensor:
    return x[:, torch.arange(x.shape[1] - 1, -1, -1, device=x.device)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("operand", ["v", "q behind the norm"])
@pytest.mark.parametrize("change", [written_into, narrowed, truncated, gathered], ids=lambda f: f.__name__)
def test_what_changes_values_is_not_looked_through(change, operand, device, recorded):
    block = Block(strided_writes, device=device)

    class Changed(Block):
        def prologue(self, x, weight):
            x = self.norm(x, weight)
            x = change(x) if operand != "v" and weight is self.changed else x
            return self.form(x.unflatten(2, (HEADS, DIM)), *self.tables).type_as(x)

        def __call__(self, q, k, v, *rest):
            self.changed = rest[1]
            return Block.__call__(self, q, k, change(v) if operand == "v" else v, *rest)

    block.__class__ = Changed
    # What is rounded in bf16 once more or less falls on the other side of a step of a narrow type.
    stepped = operand != "v" and change in (narrowed, truncated)
    block.compare(0.15 if stepped and device != "cpu" else None)


@pytest.mark.parametrize("device", DEVICES)
def test_operands_made_of_another_operands_norm(device, recorded):
    """One launch cannot read what is made of the sums that it gives itself."""
    block = Block(unrotated, device=device)
    block.weights = [torch.randn(HEADS * DIM, HEADS * DIM, device=device, dtype=block.dtype) * 0.1 for _ in range(2)]
    block.weights = [w.requires_grad_() for w in block.weights]

    class Shared(Block):
        def __call__(self, q, k, v, gate, to_k, to_v):
            h = torch.nn.functional.rms_norm(q, (HEADS * DIM,), None, EPS)
            q, k, v = (x.unflatten(2, (HEADS, DIM)) for x in (h, h @ to_k + k, h @ to_v + v))
            return vsa.video_sparse_attention(q, k, v, self.layout, sparsity=0.0, gate=gate)

    block.__class__ = Shared
    block.compare()


@pytest.mark.parametrize("device", DEVICES)
def test_recognition_adds_no_guards(device, recorded):
    """A look at sizes must not tie a compilation to them."""
    block = Block(strided_writes, device=device)

    def compiles(enabled: bool) -> int:
        torch._dynamo.reset()
        counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")
        with norm_rope_tile.recognising(enabled):
            compiled = torch.compile(Block.__call__, backend=counter, dynamic=True)
            for batch in (2, 3, 5):
                inputs = [x[:1].detach().repeat(batch, *[1] * (x.dim() - 1)).requires_grad_() for x in block.inputs]
                compiled(block, *inputs, *block.weights).sum().backward()
        return counter.frame_count

    assert compiles(True) == compiles(False)
