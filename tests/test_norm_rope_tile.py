"""RMSNorm, rotary embedding and tile order in one kernel: the operator, and which formulas are recognised."""

from __future__ import annotations

import pytest
import torch
from problems import DEVICES
from torch import Tensor

import vsa_inductor as vsa
from vsa_inductor.lowerings import norm_rope_tile

HEADS, DIM = 3, 64
SHAPE = (5, 6, 7)
EPS = 1e-6


def strided_writes(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x1, x2 = x.unflatten(-1, (-1, 2)).unbind(-1)
    out = torch.empty_like(x)
    out[..., 0::2] = x1 * cos[..., 0::2] - x2 * sin[..., 1::2]
    out[..., 1::2] = x1 * sin[..., 1::2] + x2 * cos[..., 0::2]
    return out


def swapped_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos + x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2) * sin


def rotated_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x1, x2 = x.chunk(2, -1)
    return x * cos + torch.cat((-x2, x1), -1) * sin


def stacked_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    c, s = cos[..., 0::2], sin[..., 0::2]
    return torch.stack((a * c - b * s, a * s + b * c), -1).flatten(-2)


def complex_product(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As diffusers multiplies: pairs as complex numbers, in a wider type."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    turned = pairs * torch.complex(cos[..., 0::2].contiguous(), sin[..., 1::2].contiguous())
    return torch.view_as_real(turned).flatten(-2).type_as(x)


def unrotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x


def rotated_and_shifted(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return strided_writes(x, cos, sin) + 1


def rotated_by_itself(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos * x


def prologue(form, per_head: bool, weighted: bool):
    def run(qkv: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, layout: vsa.TileLayout) -> Tensor:
        x = qkv.chunk(3, -1)[1]
        width = DIM if per_head else HEADS * DIM
        x = x.unflatten(2, (HEADS, DIM)) if per_head else x
        x = torch.nn.functional.rms_norm(x, (width,), weight[:width] if weighted else None, EPS)
        x = x if per_head else x.unflatten(2, (HEADS, DIM))
        rotated = form(x, cos, sin).type_as(qkv)
        return torch.ops.vsa.tile(rotated, layout.token_slot, layout.slot_token)

    return run


def inputs(device: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    layout = vsa.TileLayout.from_video_shape(*SHAPE, device=device)
    tokens = layout.num_tokens
    qkv = torch.randn(2, tokens, 3 * HEADS * DIM, device=device, dtype=dtype, requires_grad=True)
    weight = torch.randn(HEADS * DIM, device=device, dtype=dtype, requires_grad=True)
    cos, sin = (torch.randn(1, tokens, 1, DIM, device=device) for _ in range(2))
    return qkv, weight, cos, sin, layout


@pytest.fixture
def matches(monkeypatch, device):
    """What the lowering recognised, in order. On the CPU the reference stands for the kernel."""
    torch._dynamo.reset()
    found = []
    recognise = norm_rope_tile.recognise

    def record(x):
        found.append(recognise(x))
        return found[-1]

    monkeypatch.setattr(norm_rope_tile, "recognise", record)
    if device == "cpu":
        monkeypatch.setattr(norm_rope_tile, "has_kernel", lambda x: norm_rope_tile._enabled)
    with torch._inductor.config.patch(force_disable_caches=True):
        yield found


def compare(function, arguments, dtype) -> None:
    """Compiled equals eager, the tiles and the gradients of what made them."""
    tiles, expected = (f(*arguments) for f in (torch.compile(function, fullgraph=True), function))
    assert tiles.stride() == expected.stride()
    exact = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 3e-2, "rtol": 3e-2}
    torch.testing.assert_close(tiles, expected, **exact)
    empty = arguments[4].slot_token < 0
    assert empty.any() and not tiles[:, :, empty].any()
    dtiles = torch.randn_like(tiles)
    got, right = (torch.autograd.grad(out, arguments[:2], dtiles, allow_unused=True) for out in (tiles, expected))
    for a, b in zip(got, right, strict=True):
        if b is None:
            assert a is None
            continue
        limit = 2e-2 if dtype != torch.float32 else 1e-5
        assert float((a - b).norm() / b.norm()) < limit


FORMS = [strided_writes, swapped_pairs, unrotated]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("weighted", [True, False], ids=["weight", "no weight"])
@pytest.mark.parametrize("per_head", [False, True], ids=["all heads", "per head"])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_recognised_forms(form, per_head, weighted, device, matches):
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    compare(prologue(form, per_head, weighted), inputs(device, dtype), dtype)
    (match,) = matches
    assert match is not None and match.norm.per_head == per_head and (match.weight is not None) == weighted
    assert match.rotation.name == ("none" if form is unrotated else "interleaved")
    assert match.norm.eps == pytest.approx(EPS) and match.norm.divisor == (DIM if per_head else HEADS * DIM)


@pytest.mark.parametrize("device", [device for device in DEVICES if device != "cpu"])
@pytest.mark.parametrize("per_head", [False, True], ids=["all heads", "per head"])
def test_rotated_halves_are_recognised_where_cat_is_generated_code(per_head, device, matches):
    compare(prologue(rotated_halves, per_head, True), inputs(device, torch.bfloat16), torch.bfloat16)
    assert [match.rotation.name for match in matches] == ["half"]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("per_head", [False, True], ids=["all heads", "per head"])
def test_complex_products_are_recognised(per_head, device, matches):
    """Inductor leaves them to a library: what it lowered is another form, the graph in front of it is not."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    compare(prologue(complex_product, per_head, True), inputs(device, dtype), dtype)
    match = matches[-1]
    assert match is not None and match.norm is not None and match.norm.per_head == per_head
    assert match.rotation.name == "interleaved" and match.weight is not None


@pytest.mark.parametrize("device", [device for device in DEVICES if device != "cpu"])
def test_stacked_pairs_are_recognised_where_stack_is_generated_code(device, matches):
    compare(prologue(stacked_pairs, False, True), inputs(device, torch.bfloat16), torch.bfloat16)
    assert [match.rotation.name for match in matches] == ["interleaved"]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", [strided_writes, unrotated], ids=lambda form: form.__name__)
def test_without_a_norm(form, device, matches):
    """A rotation alone, or no work at all, goes with the sums over tiles."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16

    def run(qkv: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, layout: vsa.TileLayout) -> tuple[Tensor, Tensor]:
        x = form(qkv.chunk(3, -1)[1].unflatten(2, (HEADS, DIM)), cos, sin).type_as(qkv)
        tiles = torch.ops.vsa.tile(x, layout.token_slot, layout.slot_token)
        return tiles, torch.ops.vsa.tile_sums(tiles, layout.block_size)

    arguments = inputs(device, dtype)
    results, expected = (f(*arguments) for f in (torch.compile(run, fullgraph=True), run))
    for got, right in zip(results, expected, strict=True):
        assert float((got - right).norm() / right.norm()) < (1e-6 if dtype == torch.float32 else 1e-2)
    (match,) = matches
    assert match is not None and match.norm is None
    assert match.rotation.name == ("none" if form is unrotated else "interleaved")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", [rotated_and_shifted, rotated_by_itself], ids=lambda form: form.__name__)
def test_other_forms_take_the_generic_path(form, device, matches):
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    compare(prologue(form, False, True), inputs(device, dtype), dtype)
    assert matches == [None]


@pytest.mark.parametrize("device", DEVICES)
def test_recognition_can_be_switched_off(device, matches):
    with norm_rope_tile.recognising(False):
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        compare(prologue(strided_writes, False, True), inputs(device, dtype), dtype)
    assert matches == []


def operator_arguments(rotation, norm, block_size, device, dtype):
    """Arguments of the operator for q, k and v of a fused projection, with tables shared by heads and by batch."""
    layout = vsa.TileLayout.from_video_shape(3, 5, 3, tile=tile_shape(block_size), device=device)
    B, S, H, D = 2, layout.num_tokens, HEADS, DIM
    qkv = torch.randn(B, S, 3, H, D, device=device, dtype=dtype)
    width = D if norm == "head" else H * D
    weights = [] if norm == "none" else [torch.randn(width, device=device, dtype=dtype) for _ in range(2)]
    cos, sin = (torch.randn(S, D // 2, device=device) for _ in range(2))
    rotated = rotation != "none"
    table_index, signs = ([0, D // 2, 0, 1, 0] * 4, [1.0, -1.0, 1.0, 1.0]) if rotated else ([], [])
    x_index = [value for i in range(3) for value in (S * 3 * H * D, 3 * H * D, D, i * H * D)]
    arguments = (
        [qkv] * 3, weights, [cos, sin, sin, cos] if rotated else [], layout.slot_token, x_index,
        [D if norm == "all" else 0, 0] * len(weights), table_index, signs, [B, S, H, D], rotation, norm, 1,
        float(width), EPS, block_size,
    )  # fmt: skip
    return arguments, layout, cos, sin


def tile_shape(block_size):
    return {0: (4, 4, 4), 64: (4, 4, 4), 128: (8, 4, 4), 256: (8, 8, 4)}[block_size]


@pytest.mark.parametrize("block_size", [0, 64, 128, 256])
@pytest.mark.parametrize("rotation", ["interleaved", "half", "none"])
@pytest.mark.parametrize("norm", ["all", "head", "none"])
@pytest.mark.parametrize("device", DEVICES)
def test_operator_equals_plain_torch(rotation, norm, block_size, device):
    dtype = torch.float32 if device == "cpu" else torch.float16
    arguments, layout, cos, sin = operator_arguments(rotation, norm, block_size, device, dtype)
    results = torch.ops.vsa.norm_rope_tile(*arguments)
    axes = (3,) if norm == "head" else (2, 3)
    for i, (tiled, square_sums, tile_sums) in enumerate(zip(*results, strict=True)):
        x = arguments[0][i][:, :, i].float()
        B, _, H, D = x.shape
        normed = x
        if norm != "none" and i < 2:
            normed = x * torch.rsqrt(x.square().mean(axes, keepdim=True) + EPS) * arguments[1][i].float().view(-1, D)
        if rotation != "none" and i < 2:
            axis, pair = (-1, (-1, 2)) if rotation == "interleaved" else (-2, (2, -1))
            a, b = normed.unflatten(-1, pair).unbind(axis)
            c, s = cos[:, None], sin[:, None]
            normed = torch.stack((a * c - b * s, a * s + b * c), axis).flatten(-2)
        expected = torch.zeros(B, H, layout.num_slots, D, device=device)
        expected[:, :, layout.token_slot.long()] = normed.transpose(1, 2)
        limit = 1e-5 if dtype == torch.float32 else 1e-2
        torch.testing.assert_close(tiled.float(), expected, atol=limit, rtol=limit)
        if norm == "none" or i == 2:
            assert square_sums.shape == (0,) and square_sums.dtype == torch.float32
        else:
            torch.testing.assert_close(square_sums, x.square().sum(axes), atol=1e-3, rtol=1e-4)
        if block_size == 0:
            assert tile_sums.shape == (0,) and tile_sums.dtype == torch.float32
        else:
            # Of the tiles as they are stored, whatever they were rounded to.
            sums = tiled.float().unflatten(2, (-1, block_size)).sum(3)
            torch.testing.assert_close(tile_sums, sums, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("block_size", [0, 64])
@pytest.mark.parametrize("norm", ["all", "head", "none"])
@pytest.mark.parametrize("device", DEVICES)
def test_fake_of_the_operator(norm, block_size, device):
    dtype = torch.float32 if device == "cpu" else torch.float16
    arguments, *_ = operator_arguments("interleaved", norm, block_size, device, dtype)
    torch.library.opcheck(torch.ops.vsa.norm_rope_tile.default, arguments, test_utils="test_faketensor")


PLACES = (
    "xs", "weights", "tables", "slot_token", "x_index", "weight_index", "table_index", "signs", "sizes", "rotation",
    "norm", "num_plain", "divisor", "eps", "block_size",
)  # fmt: skip


@pytest.mark.parametrize(
    "changed, argument",
    [
        ({"rotation": "quarter"}, "rotation"),
        ({"norm": "rows"}, "norm"),
        ({"block_size": 32}, "block_size"),
        ({"block_size": 256}, "slot_token.shape[0]"),
        ({"xs": []}, "xs"),
        ({"xs": [torch.zeros(1), torch.zeros(1), torch.zeros(1, dtype=torch.float16)]}, "xs[2]"),
        ({"num_plain": 4}, "num_plain"),
        ({"num_plain": 2}, "weights"),
        ({"weights": [torch.zeros(DIM)]}, "weights"),
        ({"x_index": [0, 0, 0, 0]}, "x_index"),
        ({"weight_index": [0, 0]}, "weight_index"),
        ({"rotation": "half"}, "tables"),
        ({"table_index": [0] * 5}, "table_index"),
        ({"signs": [1.0]}, "signs"),
    ],
)
def test_operator_refuses(changed, argument):
    arguments, *_ = operator_arguments("none", "all", 64, "cpu", torch.float32)
    given = {**dict(zip(PLACES, arguments, strict=True)), **changed}
    with pytest.raises(vsa.ArgumentError) as caught:
        torch.ops.vsa.norm_rope_tile(*given.values())
    assert caught.value.argument == argument
