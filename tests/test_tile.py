"""`vsa::tile`, `untile`, `tile_to_bhsd`: moves, bit for bit, with zeros in empty slots."""

from __future__ import annotations

import math

import pytest
import torch
from problems import DEVICES

from vsa_inductor import ArgumentError, TileLayout
from vsa_inductor.reference import tile_by_scatter

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
LAYOUTS = {
    "ragged": {"T": 5, "H": 6, "W": 7},
    "full": {"T": 4, "H": 4, "W": 8},
    "one token": {"T": 1, "H": 1, "W": 1},
    "prefix": {"T": 3, "H": 5, "W": 2, "prefix": (7, 0, 70)},
    "blocks of 128": {"T": 3, "H": 5, "W": 9, "tile": (4, 4, 8)},
    "blocks of 256": {"T": 3, "H": 9, "W": 9, "tile": (4, 8, 8)},
}


def tables(layout):
    return layout.token_slot, layout.slot_token


def tile(x, layout):
    return torch.ops.vsa.tile(x, *tables(layout))


def untile(x, layout):
    return torch.ops.vsa.untile(x, *tables(layout))


@pytest.fixture(params=LAYOUTS)
def shape(request):
    return LAYOUTS[request.param]


def views(layout, B=2, H=3, D=16, dtype=torch.float32, device="cpu"):
    """Raster tensors as models make them: contiguous, a chunk of fused q, k, v, head-major, expanded, and D outside."""
    S = layout.num_tokens
    yield torch.randn(B, S, H, D).to(device, dtype)
    yield torch.randn(B, S, H, 3 * D).to(device, dtype).chunk(3, -1)[1]
    yield torch.randn(B, H, S, D).to(device, dtype).transpose(1, 2)
    yield torch.randn(B, S, 1, D).to(device, dtype).expand(B, S, H, D)
    yield torch.randn(B, S, D, H).to(device, dtype).transpose(2, 3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_tile_puts_every_token_in_its_slot(device, dtype, shape):
    layout = TileLayout.from_video_shape(**shape, device=device)
    for x in views(layout, dtype=dtype, device=device):
        tiled = tile(x, layout)
        assert tiled.shape == (2, 3, layout.num_slots, 16) and tiled.is_contiguous() and tiled.dtype == dtype
        expected = torch.zeros_like(tiled)
        expected[:, :, layout.token_slot.long()] = x.transpose(1, 2)
        assert torch.equal(tiled, expected)
        assert torch.equal(tile_by_scatter(x, *tables(layout)), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_untile_takes_it_back(device, dtype, shape):
    layout = TileLayout.from_video_shape(**shape, device=device)
    for x in views(layout, dtype=dtype, device=device):
        back = untile(tile(x, layout), layout)
        assert back.is_contiguous() and torch.equal(back, x)


@pytest.mark.parametrize("device", DEVICES)
def test_untile_of_any_strides_never_reads_an_empty_slot(device, shape):
    layout = TileLayout.from_video_shape(**shape, device=device)
    empty = (layout.slot_token < 0)[:, None]
    S_pad = layout.num_slots
    for x in (
        torch.randn(2, 3, S_pad, 16, device=device),
        torch.randn(2, S_pad, 3, 16, device=device).transpose(1, 2),
        torch.randn(2, 3, S_pad, 32, device=device)[..., 16:],
        torch.randn(2, 1, S_pad, 16, device=device).expand(2, 3, S_pad, 16),
        torch.randn(2, 3, 16, S_pad, device=device).mT,
        torch.randn(2, 3, S_pad, 1, device=device).expand(2, 3, S_pad, 16),
    ):
        value = untile(x.masked_fill(empty, math.nan), layout)
        assert torch.equal(value, x[:, :, layout.token_slot.long()].transpose(1, 2))
        assert torch.equal(untile(x, layout), value)


@pytest.mark.parametrize("device", DEVICES)
def test_empty_slots_are_zero_whatever_the_tokens_are(device):
    """Where a table lookup is clamped to token 0, that token's NaN must not reach an empty slot."""
    layout = TileLayout.from_video_shape(5, 6, 7, prefix=(7,), device=device)
    empty = layout.slot_token < 0
    assert empty.any()
    x = torch.full((2, layout.num_tokens, 3, 16), math.nan, device=device)
    for tiled in (tile(x, layout), torch.ops.vsa.tile_to_bhsd([x], layout.slot_token)[0]):
        assert not tiled[:, :, empty].any() and not tiled[:, :, empty].isnan().any()
        assert not torch.signbit(tiled[:, :, empty]).any()
        assert bool(tiled[:, :, ~empty].isnan().all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("number", [0, 1, 2, 3, 4, 5])
@pytest.mark.parametrize("device", DEVICES)
def test_tile_to_bhsd_equals_tile_of_each(device, number, dtype, shape):
    layout = TileLayout.from_video_shape(**shape, device=device)
    xs = list(views(layout, dtype=dtype, device=device))[:number]
    outs = torch.ops.vsa.tile_to_bhsd(xs, layout.slot_token)
    assert len(outs) == number
    for x, out in zip(xs, outs, strict=True):
        # The old way: one scatter into a tile buffer, then a copy to head-major order.
        buffer = x.new_zeros(2, layout.num_slots, 3, 16)
        buffer[:, layout.token_slot.long()] = x
        assert torch.equal(out, buffer.transpose(1, 2))
        assert torch.equal(out, tile(x, layout)) and out.is_contiguous()


@pytest.mark.parametrize("device", DEVICES)
def test_tile_to_bhsd_takes_different_numbers_of_heads(device):
    layout = TileLayout.from_video_shape(5, 6, 7, device=device)
    xs = [torch.randn(2, layout.num_tokens, heads, 16, device=device) for heads in (6, 2, 2)]
    for x, out in zip(xs, torch.ops.vsa.tile_to_bhsd(xs, layout.slot_token), strict=True):
        assert torch.equal(out, tile(x, layout))


@pytest.mark.parametrize("other", [(1, 210, 2, 16), (2, 209, 2, 16), (2, 210, 2, 8)], ids=str)
def test_tile_to_bhsd_refuses_tensors_of_different_extents(other):
    layout = TileLayout.from_video_shape(5, 6, 7)
    with pytest.raises(ArgumentError, match=r"xs\[1\]\.shape\[\d\]: got .*; allowed: .* of xs\[0\], "):
        torch.ops.vsa.tile_to_bhsd([torch.randn(2, 210, 3, 16), torch.randn(other)], layout.slot_token)


@pytest.mark.parametrize("device", DEVICES)
def test_tile_and_untile_are_adjoint(device, shape):
    layout = TileLayout.from_video_shape(**shape, device=device)
    x = torch.randn(2, layout.num_tokens, 3, 16, device=device, dtype=torch.float64)
    y = torch.randn(2, 3, layout.num_slots, 16, device=device, dtype=torch.float64)
    torch.testing.assert_close((tile(x, layout) * y).sum(), (x * untile(y, layout)).sum())


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_are_the_inverse(device, shape):
    layout = TileLayout.from_video_shape(**shape, device=device)
    x = torch.randn(2, layout.num_tokens, 3, 16, device=device, requires_grad=True)
    y = torch.randn(2, 3, layout.num_slots, 16, device=device, requires_grad=True)
    # The gradient of a sum has zero strides only.
    for dout in (torch.randn_like(y), torch.ones((), device=device).expand(y.shape)):
        (dx,) = torch.autograd.grad(tile(x, layout), x, dout)
        assert torch.equal(dx, untile(dout, layout))
        xs = [x, x.detach(), x]
        (dx,) = torch.autograd.grad(torch.ops.vsa.tile_to_bhsd(xs, layout.slot_token)[2], x, dout)
        assert torch.equal(dx, untile(dout, layout))
    dout = torch.randn_like(x)
    (dy,) = torch.autograd.grad(untile(y, layout), y, dout)
    assert torch.equal(dy, tile(dout, layout))
    assert not dy[:, :, layout.slot_token < 0].any()


@pytest.mark.parametrize("device", DEVICES)
def test_two_derivatives(device):
    layout = TileLayout.from_video_shape(5, 6, 7, device=device)
    x = torch.randn(1, layout.num_tokens, 2, 16, device=device, requires_grad=True)
    (dx,) = torch.autograd.grad(tile(x, layout).pow(3).sum(), x, create_graph=True)
    torch.testing.assert_close(dx, 3 * x**2)
    (ddx,) = torch.autograd.grad(dx.sum(), x)
    torch.testing.assert_close(ddx, 6 * x)


@pytest.mark.gpu
def test_tile_to_bhsd_is_one_launch():
    layout = TileLayout.from_video_shape(9, 10, 11, device="cuda")
    xs = [torch.randn(2, layout.num_tokens, 4, 64, device="cuda") for _ in range(4)]
    torch.ops.vsa.tile_to_bhsd(xs, layout.slot_token)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        torch.ops.vsa.tile_to_bhsd(xs, layout.slot_token)
        torch.cuda.synchronize()
    kernels = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert len(kernels) == 1, kernels
