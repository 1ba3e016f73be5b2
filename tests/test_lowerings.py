"""Lowerings equal the eager operators on every tier, and the work around the backward follows any contract."""

from __future__ import annotations

import math

import pytest
import torch
from problems import DEVICES
from torch import Tensor

import vsa_inductor as vsa
from vsa_inductor import reference
from vsa_inductor.backends import capability
from vsa_inductor.backends.contract import AccumulatorOrder, Backend, Contract, TorchArithmetic
from vsa_inductor.lowerings import TIERS, _inductor_compat, install, tier_reasons, tiers, use_tier
from vsa_inductor.ops import _allocate
from vsa_inductor.ops import attention as attention_op
from vsa_inductor.ops import attention_backward as attention_backward_op

EXACT = {"atol": 0.0, "rtol": 0.0}
ROUNDED = {"atol": 1e-5, "rtol": 1e-5}


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    with torch._inductor.config.patch(force_disable_caches=True):
        yield
    torch._dynamo.reset()


def _tile_and_back(x: Tensor, layout: vsa.TileLayout) -> tuple[Tensor, Tensor]:
    tiled = torch.ops.vsa.tile(x * 2 + 1, layout.token_slot, layout.slot_token)
    return tiled, torch.ops.vsa.untile(tiled * 3, layout.token_slot, layout.slot_token) - 1


def _norm_and_tile(x: Tensor, layout: vsa.TileLayout) -> tuple[Tensor, Tensor]:
    B, S, H, D = x.shape
    normed = torch.nn.functional.layer_norm(x.flatten(2), (H * D,)).view(B, S, H, D)
    tiled = torch.ops.vsa.tile(normed, layout.token_slot, layout.slot_token)
    return tiled, torch.ops.vsa.untile(tiled, layout.token_slot, layout.slot_token)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("tier", "deterministic"), [*((tier, False) for tier in TIERS), ("lowering", True)])
def test_tile_and_untile_equal_eager_bit_for_bit(tier, deterministic, device):
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    try:
        with use_tier(tier):
            compiled = torch.compile(_tile_and_back, fullgraph=True, dynamic=True)
            for shape in ((3, 5, 6), (4, 4, 8)):
                layout = vsa.TileLayout.from_video_shape(*shape, device=device)
                x = torch.randn(2, layout.num_tokens, 3, 16, requires_grad=True, device=device)
                for got, expected in zip(compiled(x, layout), _tile_and_back(x, layout), strict=True):
                    # A multiply-add on a GPU rounds once.
                    torch.testing.assert_close(got, expected, **(EXACT if device == "cpu" else ROUNDED))
                    assert got.stride() == expected.stride()
                grads = [torch.autograd.grad(f(x, layout)[1].sum(), x)[0] for f in (compiled, _tile_and_back)]
                assert torch.equal(*grads)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(3, 5, 6), (4, 4, 8)], ids=["with empty slots", "without"])
@pytest.mark.parametrize("tier", TIERS)
def test_tile_behind_a_reduction(tier, shape, device, monkeypatch):
    """The scatter, into a zeroed buffer where a slot can be empty and an uninitialised one where none can."""
    made = []
    for name in ("zeros", "uninitialised"):
        make = getattr(_inductor_compat, name)
        monkeypatch.setattr(
            _inductor_compat, name, lambda *a, name=name, make=make, **k: made.append(name) or make(*a, **k)
        )
    layout = vsa.TileLayout.from_video_shape(*shape, device=device)
    x = torch.randn(2, layout.num_tokens, 3, 16, requires_grad=True, device=device)
    with use_tier(tier):
        got = torch.compile(_norm_and_tile, fullgraph=True, dynamic=False)(x, layout)
        expected = _norm_and_tile(x, layout)
        for value, right in zip(got, expected, strict=True):
            torch.testing.assert_close(value, right, **ROUNDED)
        dout = torch.randn_like(got[0])
        grads = [torch.autograd.grad(tiles, x, dout)[0] for tiles in (got[0], expected[0])]
        torch.testing.assert_close(*grads, **ROUNDED)
    empty = layout.slot_token < 0
    assert bool(empty.any()) == (shape == (3, 5, 6)) and not got[0][:, :, empty].any()
    expected_buffers = {"zeros"} if empty.any() else {"uninitialised"}
    assert set(made) == (expected_buffers if tier == "lowering" else set())


def test_a_missing_private_name_costs_a_tier_and_is_reported(monkeypatch):
    real = _inductor_compat._ir()

    class WithoutScatter:
        def __getattr__(self, name):
            if name == "Scatter":
                raise AttributeError("module 'torch._inductor.ir' has no attribute 'Scatter'")
            return getattr(real, name)

    try:
        monkeypatch.setattr(_inductor_compat, "_ir", WithoutScatter)
        install()
        assert tiers()["tile"] == "decomposition"
        assert "Scatter" in tier_reasons()["tile"]
        assert "Scatter" in str(vsa.backend_report())
        layout = vsa.TileLayout.from_video_shape(3, 5, 6)
        x = torch.randn(1, layout.num_tokens, 2, 16)
        compiled = torch.compile(_tile_and_back, fullgraph=True)(x, layout)
        assert all(torch.equal(a, b) for a, b in zip(compiled, _tile_and_back(x, layout), strict=True))
    finally:
        monkeypatch.undo()
        install()
    assert tiers()["tile"] == "lowering" and not tier_reasons()


# A backend whose contract asks for everything at once: transposed operands, a scrambled unscaled fp32 accumulator, and
# garbage in the dk, dv rows of unselected blocks. It computes with the reference, then spoils the form of the result.
_FACTORS, _PERMUTATION = (8, 4, 16, 8), (1, 3, 0, 2)


def _untranspose(x: Tensor, shape: torch.Size) -> Tensor:
    B, H, S, D = shape
    return x.reshape(H, D, B, S).permute(2, 0, 3, 1)


def _launch_awkward(
    dout, q, k, v, lse_log2, delta, kv_indices, kv_num_blocks, q_indices, q_offsets, sizes, sm_scale, block, dq, dk, dv
):
    assert q.dim() == 2 and q.is_contiguous() and dout.is_contiguous(), "the contract asks for transposed operands"
    B, S = lse_log2.shape[0], lse_log2.shape[2]
    shape = torch.Size((B, lse_log2.shape[1], S, k.shape[3]))
    grads = reference.attention_backward(
        _untranspose(dout, shape), _untranspose(q, shape), k, v, lse_log2, delta, kv_indices, kv_num_blocks, sizes,
        sm_scale, block, True, True,
    )  # fmt: skip
    inverse = [_PERMUTATION.index(axis) for axis in range(4)]
    in_order = [_FACTORS[axis] for axis in _PERMUTATION]
    blocks = grads[0].view(*shape[:2], S // block, *in_order)
    dq.copy_(blocks.permute(0, 1, 2, *(3 + axis for axis in inverse)).reshape(dq.shape))
    lengths = (q_offsets[..., 1:] - q_offsets[..., :-1]).unflatten(1, (k.shape[1], -1)).sum(2)
    unselected = (lengths == 0).repeat_interleave(block, 2)[..., None]
    for target, grad in ((dk, grads[1]), (dv, grads[2])):
        target.copy_(grad.masked_fill(unselected, math.nan))


def _allocate_awkward(q, k, v, needs_dq, needs_dkv):
    _, dk, dv = _allocate.gradients(k, k, v, False, True)
    # q is transposed, [H * D, B * S]; k has as many slots here.
    heads = q.shape[0] // k.shape[3]
    return k.new_empty(k.shape[0], heads, k.shape[2] // 64, 64 * k.shape[3], dtype=torch.float32), dk, dv


@pytest.fixture(scope="module")
def awkward_backend():
    assert math.prod(_FACTORS) == 64 * 64
    backend = Backend(
        name="awkward",
        identity="awkward@00000000",
        refuse=lambda problem, direction: None,
        forward_native=attention_op.define_native("awkward", reference.attention),
        backward_native=attention_backward_op.define_native("awkward", _launch_awkward, _allocate_awkward),
        arithmetic=TorchArithmetic(),
        contract=Contract(reads_rows=False, dq_order=AccumulatorOrder(_FACTORS, _PERMUTATION), writes_unselected=False),
    )
    capability._ORDER.append(backend)
    capability._resolve.cache_clear()
    yield backend
    capability._ORDER.remove(backend)
    capability._resolve.cache_clear()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("H", [2, 4], ids=["heads", "grouped heads"])
@pytest.mark.parametrize("tier", ["eager", *TIERS])
def test_any_contract_gives_the_reference_gradients(awkward_backend, tier, H, device):
    B, H_kv, N, D = 2, 2, 4, 64
    q, dout = (torch.randn(B, H, N * 64, D, device=device) for _ in range(2))
    k, v = (torch.randn(B, H_kv, N * 64, D, device=device) for _ in range(2))
    sizes = torch.tensor([64, 17, 64, 33], dtype=torch.int32, device=device)
    # Block 2 is selected by nobody.
    rows = torch.tensor([[0, 1], [1, 3], [0, 3], [0, 1]], dtype=torch.int32, device=device)
    lists = rows.expand(B, H, N, 2).contiguous()
    counts = torch.full((B, H, N), 2, dtype=torch.int32, device=device)
    dlse = torch.randn(B, H, N * 64, device=device)

    def gradients(q, k, v, backend):
        with vsa.options(backend=backend):
            out, lse = vsa.block_sparse_attention(q, k, v, lists, counts, sizes, return_lse=True)
        return out, lse

    def run(function, backend):
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        outputs = function(*inputs, backend)
        return torch.autograd.grad(outputs, inputs, (dout, dlse))

    expected = run(gradients, "eager")
    if tier == "eager":
        got = run(gradients, "awkward")
    else:
        with use_tier(tier):
            got = run(torch.compile(gradients, fullgraph=True), "awkward")
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-5)
    for grad in got[1:]:
        assert torch.equal(grad[:, :, 128:192], torch.zeros_like(grad[:, :, 128:192]))
