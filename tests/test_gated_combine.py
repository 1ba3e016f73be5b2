"""`vsa::gated_combine` and its gradients against plain torch in fp64, eager and compiled on every tier."""

from __future__ import annotations

import itertools
import math
import re

import pytest
import torch
from problems import DEVICES
from test_tile import LAYOUTS, tables, views
from torch import Tensor

import vsa_inductor as vsa
from vsa_inductor import ArgumentError, TileLayout
from vsa_inductor.lowerings import TIERS, use_tier

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
B, H, D = 2, 3, 16
# One rounding of the exact value, in relation to it; and what sums of fp32 lose.
ROUNDED = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 1e-5, torch.float64: 1e-12}


def assert_rounded(value: Tensor, exact: Tensor) -> None:
    dtype = value.dtype
    atol = 1e-12 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(value.double(), exact.double(), rtol=ROUNDED[dtype], atol=atol)


@pytest.fixture(params=LAYOUTS)
def shape(request):
    return LAYOUTS[request.param]


def branches(layout, dtype=torch.float32, device="cpu") -> tuple[Tensor, Tensor, Tensor]:
    """out, gate and coarse that need gradients; the empty slots of out hold NaN."""
    wide = torch.promote_types(dtype, torch.float32)
    out = torch.randn(B, H, layout.num_slots, D).to(device, dtype)
    out = out.masked_fill((layout.slot_token < 0)[:, None], math.nan)
    gate = torch.randn(B, layout.num_tokens, H, D).to(device, dtype)
    coarse = torch.randn(B, H, layout.num_blocks, D).to(device, wide)
    return tuple(x.requires_grad_() for x in (out, gate, coarse))


def combine(out, gate, coarse, layout):
    return torch.ops.vsa.gated_combine(out, gate, coarse, *tables(layout), layout.block_size)


def backward(dout, out, gate, coarse, layout, needs_dgate=True, needs_dcoarse=True):
    return torch.ops.vsa.gated_combine_backward(
        dout, out, gate, coarse, *tables(layout), layout.block_size, needs_dgate, needs_dcoarse
    )


def plain(out, gate, coarse, layout):
    """The meaning in fp64: index each token's slot and block."""
    slots = layout.token_slot.long()
    per_token = coarse.double()[:, :, slots // layout.block_size].transpose(1, 2)
    weighted = per_token if gate is None else gate.double() * per_token
    return out.double()[:, :, slots].transpose(1, 2) + weighted


def expected_gradients(inputs, dout, layout):
    leaves = [None if x is None else x.detach().double().requires_grad_() for x in inputs]
    given = [x for x in leaves if x is not None]
    grads = iter(torch.autograd.grad(plain(*leaves, layout), given, dout.double()))
    return [None if x is None else next(grads) for x in leaves]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gated", [True, False], ids=["gate", "no gate"])
@pytest.mark.parametrize("device", DEVICES)
def test_sum_and_gradients(device, gated, dtype, shape):
    layout = TileLayout.from_video_shape(**shape, device=device)
    out, gate, coarse = branches(layout, dtype, device)
    inputs = (out, gate if gated else None, coarse)
    combined = combine(*inputs, layout)
    assert combined.is_contiguous() and combined.dtype == dtype
    assert_rounded(combined, plain(*inputs, layout))
    dout = torch.randn_like(combined)
    leaves = [x for x in inputs if x is not None]
    expected = [x for x in expected_gradients(inputs, dout, layout) if x is not None]
    for leaf, grad, right in zip(leaves, torch.autograd.grad(combined, leaves, dout), expected, strict=True):
        assert grad.dtype == leaf.dtype and grad.is_contiguous()
        assert_rounded(grad, right)
    dout_tiles = torch.autograd.grad(combine(*inputs, layout), out, dout)[0]
    assert torch.equal(dout_tiles, torch.ops.vsa.tile(dout, *tables(layout))), "moved, not computed"


@pytest.mark.parametrize("device", DEVICES)
def test_operands_of_any_strides(device, shape):
    layout = TileLayout.from_video_shape(**shape, device=device)
    out, gate, coarse = (x.detach() for x in branches(layout, device=device))
    S_pad, N = layout.num_slots, layout.num_blocks
    gates = [*views(layout, B, H, D, device=device), torch.randn(1, 1, H, 1, device=device).expand_as(gate)]
    outs = (
        torch.randn(B, S_pad, H, D, device=device).transpose(1, 2),
        torch.randn(B, H, S_pad, 2 * D, device=device)[..., D:],
        torch.randn(B, H, D, S_pad, device=device).mT,
    )
    rows = (torch.randn(B, N, H, D, device=device).transpose(1, 2), torch.randn(1, H, 1, D, device=device))
    for o, g, c in [(out, g, coarse) for g in gates] + [(o, gate, coarse) for o in outs] + [
        (out, gate, c.expand_as(coarse)) for c in rows
    ]:  # fmt: skip
        assert_rounded(combine(o, g, c, layout), plain(o, g, c, layout))
        for dout in (g, torch.ones((), device=device).expand_as(gate)):
            given = [x.contiguous() for x in (dout, g, c)]
            for value, right in zip(
                backward(dout, o, g, c, layout), backward(given[0], o.contiguous(), *given[1:], layout), strict=True
            ):
                assert value.is_contiguous()
                torch.testing.assert_close(value, right, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_backward_gives_what_is_asked_for(dtype, device):
    layout = TileLayout.from_video_shape(5, 6, 7, prefix=(7,), device=device)
    out, gate, coarse = (x.detach() for x in branches(layout, dtype, device))
    dout = torch.randn_like(gate)
    tiles = torch.ops.vsa.tile(dout, *tables(layout))
    empty = (layout.slot_token < 0)[:, None]
    delta = (out.double().masked_fill(empty, 0) * tiles.double()).sum(-1)
    _, dgate, dcoarse = expected_gradients((out, gate, coarse), dout, layout)
    for with_out, needs_dgate, needs_dcoarse in itertools.product((True, False), repeat=3):
        results = backward(dout, out if with_out else None, gate, coarse, layout, needs_dgate, needs_dcoarse)
        assert torch.equal(results[0], tiles)
        asked = ((with_out, delta, coarse), (needs_dgate, dgate, gate), (needs_dcoarse, dcoarse, coarse))
        for value, (wanted, right, like) in zip(results[1:], asked, strict=True):
            assert value.dtype == like.dtype
            if wanted:
                assert_rounded(value, right)
            else:
                assert value.shape == (0,)


@pytest.mark.parametrize("frozen", ["out", "gate", "coarse", "gate and coarse"])
def test_only_what_needs_a_gradient_gets_one(frozen):
    layout = TileLayout.from_video_shape(3, 5, 6)
    inputs = dict(zip(("out", "gate", "coarse"), branches(layout), strict=True))
    for name in frozen.split(" and "):
        inputs[name] = inputs[name].detach()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        combined = combine(*inputs.values(), layout)
    pointers = {x.data_ptr() for x in saved}
    assert inputs["out"].data_ptr() not in pointers
    assert (inputs["gate"].data_ptr() in pointers) == (frozen != "gate and coarse")
    combined.sum().backward()
    for name, x in inputs.items():
        assert (x.grad is None) == (name in frozen), name


def test_gradcheck():
    layout = TileLayout.from_video_shape(3, 5, 6)
    out, gate, coarse = (x.detach().nan_to_num(0).requires_grad_() for x in branches(layout, torch.float64))
    for inputs in ((out, gate, coarse), (out, None, coarse)):
        assert torch.autograd.gradcheck(lambda *xs: combine(*xs, layout), inputs, fast_mode=True)


def test_second_derivatives_are_refused():
    layout = TileLayout.from_video_shape(3, 5, 6)
    out, gate, coarse = branches(layout)
    (dgate,) = torch.autograd.grad(combine(out, gate, coarse, layout).square().sum(), gate, create_graph=True)
    with pytest.raises(RuntimeError, match="a gradient of a gradient was asked for; allowed: first derivatives"):
        dgate.sum().backward()


WRONG = {
    "out.shape[2]": {"out": lambda x: x[:, :, 1:]},
    "out": {"out": lambda x: x.int()},
    "gate": {"gate": lambda x: x.double()},
    "gate.shape": {"gate": lambda x: x[:, 1:]},
    "coarse": {"coarse": lambda x: x.bfloat16()},
    "coarse.shape": {"coarse": lambda x: x[:, :, 1:]},
    "block_size": {"block_size": lambda x: 32},
    "slot_token.shape[0]": {"slot_token": lambda x: x[1:]},
    "token_slot": {"token_slot": lambda x: x.long()},
}


@pytest.mark.parametrize("name", WRONG)
def test_typed_errors(name):
    layout = TileLayout.from_video_shape(3, 5, 6)
    out, gate, coarse = (x.detach() for x in branches(layout))
    arguments = {"out": out, "gate": gate, "coarse": coarse, "token_slot": layout.token_slot,
                 "slot_token": layout.slot_token, "block_size": 64}  # fmt: skip
    ((argument, change),) = WRONG[name].items()
    arguments[argument] = change(arguments[argument])
    on_meta = {n: x.to("meta") if isinstance(x, Tensor) else x for n, x in arguments.items()}
    for given in (arguments, on_meta):
        with pytest.raises(ArgumentError, match=rf"^{re.escape(name)}: got .*; allowed: "):
            torch.ops.vsa.gated_combine(*given.values())


def test_typed_errors_of_the_backward():
    layout = TileLayout.from_video_shape(3, 5, 6)
    out, gate, coarse = (x.detach() for x in branches(layout))
    for message, arguments in (
        ("needs_dgate: got True; allowed: False, as gate is None", (gate, out, None, coarse)),
        (r"dout.shape\[1\]: got", (gate[:, 1:], out, gate, coarse)),
        ("out: got torch.float64; allowed: the dtype of dout", (gate, out.double(), gate, coarse)),
        (r"out.shape: got .*\[B, H, S_pad, D\]", (gate, out[:, :, 1:], gate, coarse)),
        (r"gate: got 3 dimensions", (gate, out, gate[0], coarse)),
    ):
        with pytest.raises(ArgumentError, match=message):
            backward(*arguments, layout)


def _block(out, gate, coarse, layout):
    """With work in front of the gate and behind the sum, as in a model."""
    return combine(out * 2, None if gate is None else gate.sigmoid(), coarse, layout) * 3


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("gated", [True, False], ids=["gate", "no gate"])
@pytest.mark.parametrize("tier", TIERS)
def test_compiled_equals_eager(tier, gated, device):
    torch._dynamo.reset()
    with use_tier(tier), torch._inductor.config.patch(force_disable_caches=True):
        compiled = torch.compile(_block, fullgraph=True, dynamic=True)
        for shape in ((3, 5, 6), (4, 4, 8)):
            layout = TileLayout.from_video_shape(*shape, device=device)
            inputs = branches(layout, device=device)
            out, gate, coarse = (x.detach().nan_to_num(0).requires_grad_() for x in inputs)
            inputs = (out, gate, coarse) if gated else (out, None, coarse)
            leaves = [x for x in inputs if x is not None]
            got, expected = compiled(*inputs, layout), _block(*inputs, layout)
            torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
            assert got.stride() == expected.stride()
            dout = torch.randn_like(got)
            for a, b in zip(*(torch.autograd.grad(y, leaves, dout) for y in (got, expected)), strict=True):
                torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
                assert a.stride() == b.stride()
    torch._dynamo.reset()


@pytest.mark.parametrize("device", DEVICES)
def test_lowered_backward_with_out(device):
    """Inside one graph, as a graph pass may write it: delta comes with the tiles."""
    torch._dynamo.reset()
    layout = TileLayout.from_video_shape(5, 6, 7, device=device)
    out, gate, coarse = (x.detach() for x in branches(layout, device=device))
    dout = torch.randn_like(gate)
    compiled = torch.compile(lambda *args: backward(*args, layout), fullgraph=True, dynamic=False)
    for got, right in zip(compiled(dout, out, gate, coarse), backward(dout, out, gate, coarse, layout), strict=True):
        torch.testing.assert_close(got, right, atol=1e-5, rtol=1e-5)
        assert got.stride() == right.stride()
    torch._dynamo.reset()


@pytest.mark.parametrize("tier", ["lowering", "opaque"])
def test_compiled_graph_saves_no_wide_tensor_in_raster_order(tier):
    """What the gate's gradient needs is the gate and one row per tile."""
    torch._dynamo.reset()
    layout = TileLayout.from_video_shape(5, 6, 7)
    q, k, v, gate = (torch.randn(1, layout.num_tokens, 2, 32).bfloat16().requires_grad_() for _ in range(4))

    def attend(q, k, v, gate):
        return vsa.video_sparse_attention(q, k, v, layout, sparsity=0.5, gate=gate * 2)

    saved = []
    with use_tier(tier), torch._inductor.config.patch(force_disable_caches=True):
        compiled = torch.compile(attend, fullgraph=True, dynamic=False)
        with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
            out = compiled(q, k, v, gate)
    raster = [x for x in saved if x.numel() >= q.numel() and x.shape[1] == layout.num_tokens]
    assert [(x.dtype, x.shape) for x in raster] == [(gate.dtype, gate.shape)]
    assert not [x.shape for x in saved if x.numel() >= q.numel() and x.dtype == torch.float32]
    out.sum().backward()
    torch._dynamo.reset()
