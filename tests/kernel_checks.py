"""Checks of the Triton launchers against plain torch, shared by the interpreter run (CPU) and the gpu tests.

`TRITON_INTERPRET=1 python tests/kernel_checks.py` runs the small set on CPU tensors.
"""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import torch
from prologue_checks import SMALL_PROLOGUE, check_norm_rope_tile

from vsa_inductor.kernels.attention import launch_attention
from vsa_inductor.kernels.attention_backward import launch_attention_backward
from vsa_inductor.kernels.configs import LaunchConfig
from vsa_inductor.kernels.gated_combine import launch_gated_combine
from vsa_inductor.kernels.gated_combine_backward import launch_gated_combine_backward
from vsa_inductor.kernels.select_blocks import launch_select_blocks
from vsa_inductor.kernels.tile_to_bhsd import launch_tile_to_bhsd
from vsa_inductor.kernels.transpose_blocks import launch_transpose_blocks
from vsa_inductor.kernels.untile import launch_untile

INT = torch.int32


def random_lists(batch, heads, num_q, num_kv, width, *, full=True, tail=-1, generator=None):
    """Sorted random lists; with full=False counts are drawn from 0..width and the tail is `tail`."""
    scores = torch.rand(batch, heads, num_q, num_kv, generator=generator)
    counts = torch.full((batch, heads, num_q), width, dtype=INT)
    if not full:
        counts = torch.randint(0, width + 1, (batch, heads, num_q), dtype=INT, generator=generator)
        counts[0, 0, 0] = 0
        counts[-1, -1, -1] = width
    indices = torch.full((batch, heads, num_q, width), tail, dtype=INT)
    for b, h, i in itertools.product(range(batch), range(heads), range(num_q)):
        n = int(counts[b, h, i])
        indices[b, h, i, :n] = scores[b, h, i].topk(n).indices.sort().values.to(INT)
    return indices, counts


def key_mask(indices, counts, sizes, block_size):
    """Dense boolean mask [B, H, Sq, Skv] of the lists: the meaning of the sparse problem."""
    batch, heads, num_q, width = indices.shape
    num_kv = sizes.numel()
    blocks = torch.zeros(batch, heads, num_q, num_kv + 1, dtype=torch.bool, device=indices.device)
    listed = torch.arange(width, device=indices.device) < counts[..., None]
    blocks.scatter_(3, torch.where(listed, indices, num_kv).long(), True)
    real = torch.arange(block_size, device=indices.device) < sizes[:, None]
    mask = blocks[..., :num_kv].repeat_interleave(block_size, 2)[..., None] & real
    return mask.flatten(3)


def dense_reference(q, k, v, dout, mask, sm_scale):
    """fp32 masked attention and its gradients; empty rows give 0, -inf and 0."""
    group = q.shape[1] // k.shape[1]
    q, k, v = (x.detach().float().requires_grad_() for x in (q, k, v))
    scores = q @ k.repeat_interleave(group, 1).transpose(2, 3) * sm_scale
    scores = scores.masked_fill(~mask, -math.inf)
    lse = torch.logsumexp(scores, 3)
    p = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None])
    out = p @ v.repeat_interleave(group, 1)
    grads = torch.autograd.grad((out * dout.float()).sum(), (q, k, v))
    return out.detach(), lse.detach() * math.log2(math.e), *grads


def assert_close(name, value, reference, largest, mean):
    """Contract bars: max|diff| / max|ref| and mean|diff|; NaN never passes."""
    diff = (value.float() - reference).abs()
    top = reference.abs().max().clamp(min=1e-6)
    assert bool(diff.max() / top <= largest), f"{name}: max|diff|/max|ref| = {float(diff.max() / top):.2e}"
    assert bool(diff.mean() <= mean), f"{name}: mean|diff| = {float(diff.mean()):.2e}"


def check_attention(
    device,
    *,
    batch=1,
    heads=2,
    kv_heads=2,
    num_q=3,
    num_kv=4,
    width=2,
    head_dim=64,
    block_size=64,
    dtype=torch.bfloat16,
    sm_scale=None,
    full=True,
    tail=-1,
    sizes="full",
    poison=False,
    layout="bhsd",
    configs=(None, None, None),
    seed=0,
):
    """Forward, transposition and backward of one problem against the dense fp32 reference."""
    g = torch.Generator().manual_seed(seed)
    sm_scale = head_dim**-0.5 if sm_scale is None else sm_scale

    def operand(n_heads, length):
        if layout == "bhsd":
            return torch.randn(batch, n_heads, length, head_dim, generator=g).to(device, dtype)
        x = torch.randn(batch, length, n_heads, 2 * head_dim, generator=g).to(device, dtype)
        return x[..., :head_dim].transpose(1, 2)

    q, dout = (operand(heads, num_q * block_size) for _ in range(2))
    k, v = (operand(kv_heads, num_kv * block_size) for _ in range(2))
    kv_sizes = torch.full((num_kv,), block_size, dtype=INT)
    if sizes == "ragged":
        kv_sizes = torch.randint(0, block_size + 1, (num_kv,), dtype=INT, generator=g)
        kv_sizes[0] = 0
    indices, counts = random_lists(batch, heads, num_q, num_kv, width, full=full, tail=tail, generator=g)
    if sizes == "ragged":
        indices[..., 0] = torch.where(counts > 0, torch.zeros((), dtype=INT), indices[..., 0])
        indices[:, :, -1, :1], counts[:, :, -1] = 0, 1
    indices, counts, kv_sizes = indices.to(device), counts.to(device), kv_sizes.to(device)
    mask = key_mask(indices, counts, kv_sizes, block_size)
    ref_out, ref_lse, ref_dq, ref_dk, ref_dv = dense_reference(q, k, v, dout, mask, sm_scale)
    if poison:
        empty = (torch.arange(block_size, device=device) >= kv_sizes[:, None]).flatten()
        k[:, :, empty] = math.nan
        v[:, :, empty] = math.nan

    def unwritten(*shape, of=dtype):
        return torch.full(shape, math.nan, dtype=of, device=device)

    out, lse = unwritten(*q.shape), unwritten(*q.shape[:3], of=torch.float32)
    launch_attention(q, k, v, indices, counts, kv_sizes, sm_scale, block_size, out, lse, config=configs[0])
    bars = (1e-4, 1e-5) if dtype == torch.float32 else (1e-2, 1e-3)
    assert_close("out", out, ref_out, *bars)
    empty_rows = ref_lse == -math.inf
    assert bool(((lse == -math.inf) == empty_rows).all()), "lse of empty rows"
    assert not bool(out[empty_rows].any()), "out of empty rows"
    assert bool(((lse - ref_lse)[~empty_rows].abs() <= 1e-3).all()), "lse"

    q_indices = torch.full((batch, heads, num_q * width), -7, dtype=INT, device=device)
    q_offsets = torch.full((batch, heads, num_kv + 1), -7, dtype=INT, device=device)
    launch_transpose_blocks(indices, counts, num_kv, q_indices, q_offsets)
    delta = (ref_out.to(dtype).float() * dout.float()).sum(-1)
    dq, dk, dv = (unwritten(*x.shape) for x in (q, k, v))
    lists = (indices, counts, q_indices, q_offsets, kv_sizes)
    launch_attention_backward(
        dout, q, k, v, ref_lse, delta, *lists, sm_scale, block_size, dq, dk, dv, configs[1], configs[2]
    )
    for name, value, ref in (("dq", dq, ref_dq), ("dk", dk, ref_dk), ("dv", dv, ref_dv)):
        assert_close(name, value, ref, *bars)
        assert not bool(value[ref.abs().sum(-1) == 0].any()), f"{name}: rows that owe exact zeros"


def check_transpose(device, *, batch=1, heads=2, num_q=5, num_kv=7, width=3, full=False, seed=0):
    """Against a loop over the lists; an expanded view over the heads as well."""
    g = torch.Generator().manual_seed(seed)
    indices, counts = random_lists(batch, heads, num_q, num_kv, width, full=full, generator=g)
    if heads > 1:
        indices, counts = (x[:, :1].expand(-1, heads, *[-1] * (x.dim() - 2)) for x in (indices, counts))
    listed = torch.arange(width) < counts[..., None]
    blocks = torch.zeros(batch, heads, num_q, num_kv + 1, dtype=torch.bool)
    blocks.scatter_(3, torch.where(listed, indices, num_kv).long(), True)
    by_kv = blocks[..., :num_kv].transpose(2, 3)
    q_indices = torch.full((batch, heads, num_q * width), -7, dtype=INT, device=device)
    q_offsets = torch.full((batch, heads, num_kv + 1), -7, dtype=INT, device=device)
    launch_transpose_blocks(indices.to(device), counts.to(device), num_kv, q_indices, q_offsets)
    for b, h in itertools.product(range(batch), range(heads)):
        ids = by_kv[b, h].nonzero()[:, 1].to(INT)
        offsets = torch.cat([torch.zeros(1, dtype=INT), by_kv[b, h].sum(1).cumsum(0).to(INT)])
        assert torch.equal(q_offsets[b, h].cpu(), offsets), "q_offsets"
        assert torch.equal(q_indices[b, h, : ids.numel()].cpu(), ids), "q_indices"
        assert bool((q_indices[b, h, ids.numel() :] == -1).all()), "tail of q_indices"


def select_reference(scores, k, num_forced):
    """Stable sort: NaN as the lowest, then ascending ids."""
    ranked = scores[..., num_forced:].float()
    order = torch.where(ranked.isnan(), torch.full_like(ranked, -math.inf), ranked)
    by_value = order.argsort(dim=-1, descending=True, stable=True)
    was_nan = ranked.isnan().gather(-1, by_value).to(torch.int8)
    by_value = by_value.gather(-1, was_nan.argsort(dim=-1, stable=True))
    best = by_value[..., :k].sort(-1).values + num_forced
    forced = torch.arange(num_forced, device=scores.device).expand(*scores.shape[:-1], num_forced)
    return torch.cat([forced, best], -1).to(INT)


def check_select(device, *, shape=(1, 2, 3, 37), k=5, num_forced=0, dtype=torch.float32, levels=None, seed=0):
    """`levels` draws scores from few values, so that ties decide; NaN, infinities and signed zeros are mixed in."""
    g = torch.Generator().manual_seed(seed)
    scores = torch.randn(shape, generator=g)
    if levels:
        scores = (scores * levels).round() / levels
    for value in (math.nan, math.inf, -math.inf, 0.0, -0.0):
        scores[torch.rand(shape, generator=g) < 0.05] = value
    scores = scores.to(device, dtype)
    run_select(scores, k, num_forced, select_reference(scores, k, num_forced))


def run_select(scores, k, num_forced, expected):
    batch, heads, num_q, _ = scores.shape
    indices = torch.full((batch, heads, num_q, num_forced + k), -7, dtype=INT, device=scores.device)
    counts = torch.full((batch, heads, num_q), -7, dtype=INT, device=scores.device)
    launch_select_blocks(scores, k, num_forced, indices, counts)
    assert torch.equal(indices, expected.to(indices.device)), (scores, indices, expected)
    assert bool((counts == num_forced + k).all())


def check_select_cases(device):
    cases = json.loads((Path(__file__).parent / "cases" / "selection.json").read_text())
    for case in cases if isinstance(cases, list) else cases["cases"]:
        scores = torch.tensor([float(x) for x in case["scores"]], device=device)[None, None, None]
        run_select(scores, case["k"], case["num_forced"], torch.tensor(case["kv_indices"], dtype=INT)[None, None, None])


def check_layout(device, *, batch=2, tokens=70, slots=128, head_dim=64, dtype=torch.bfloat16, seed=0):
    """tile_to_bhsd and untile: bit-exact against indexing; heads may differ, inputs may be chunk views."""
    g = torch.Generator().manual_seed(seed)
    token_slot = torch.randperm(slots, generator=g)[:tokens].to(INT)
    slot_token = torch.full((slots,), -1, dtype=INT)
    slot_token[token_slot.long()] = torch.arange(tokens, dtype=INT)
    token_slot, slot_token = token_slot.to(device), slot_token.to(device)
    fused = torch.randn(batch, tokens, 3, 3 * head_dim, generator=g).to(device, dtype)
    xs = [*fused.chunk(3, -1), torch.randn(batch, tokens, 2, head_dim, generator=g).to(device, dtype)]
    for count in (1, 3, 4):
        outs = [torch.full((batch, x.shape[2], slots, head_dim), math.nan, device=device, dtype=dtype) for x in xs]
        launch_tile_to_bhsd(xs[:count], slot_token, outs[:count])
        for x, out in zip(xs[:count], outs[:count], strict=True):
            expected = torch.where((slot_token >= 0)[:, None, None], x[:, slot_token.clamp(min=0).long()], 0.0)
            assert torch.equal(out, expected.transpose(1, 2)), "tile_to_bhsd"
            back = torch.full((batch, tokens, x.shape[2], head_dim), math.nan, device=device, dtype=dtype)
            launch_untile(out, token_slot, back)
            assert torch.equal(back, x), "untile"


def check_combine(
    device, *, gated=True, batch=2, heads=3, num_blocks=3, block_size=64, head_dim=64, dtype=torch.bfloat16, seed=0
):
    """gated_combine and its backward against plain torch; gate and dout are views, empty slots of out hold NaN."""
    g = torch.Generator().manual_seed(seed)
    # Every block's real tokens come first, the last block has one.
    sizes = torch.randint(1, block_size + 1, (num_blocks,), generator=g)
    sizes[0], sizes[-1] = block_size, 1
    real = (torch.arange(block_size) < sizes[:, None]).flatten()
    tokens = int(sizes.sum())
    slot_token = torch.full((num_blocks * block_size,), -1, dtype=INT)
    slot_token[real] = torch.randperm(tokens, generator=g).to(INT)
    token_slot = torch.empty(tokens, dtype=INT)
    token_slot[slot_token[real].long()] = real.nonzero()[:, 0].to(INT)
    tables = (token_slot.to(device), slot_token.to(device))
    fused = torch.randn(batch, tokens, heads, 2 * head_dim, generator=g).to(device, dtype)
    gate, dout = fused.chunk(2, -1)
    gate = gate if gated else None
    out = torch.randn(batch, heads, num_blocks * block_size, head_dim, generator=g).to(device, dtype)
    coarse = torch.randn(batch, heads, num_blocks, head_dim, generator=g).to(device)
    weight = 1.0 if gate is None else gate.float()
    by_slot, by_block = tables[0].long(), tables[0].long() // block_size
    per_token = coarse[:, :, by_block].transpose(1, 2)
    # Against references rounded as the results are: what is left is a rounding turned over here and there.
    bars = (1e-5, 1e-5) if dtype == torch.float32 else (1e-2, 1e-4)

    combined = torch.full_like(dout, math.nan).contiguous()
    launch_gated_combine(out, gate, coarse, *tables, block_size, combined)
    expected_sum = out[:, :, by_slot].transpose(1, 2).float() + weight * per_token
    assert_close("combined", combined, expected_sum.to(dtype).float(), *bars)

    out[:, :, ~real.to(device)] = math.nan
    tiled = torch.zeros(out.shape, device=device)
    tiled[:, :, by_slot] = dout.transpose(1, 2).float()
    weighted = torch.zeros(out.shape, device=device)
    weighted[:, :, by_slot] = (weight * dout.float()).transpose(1, 2)
    expected = (
        tiled,
        (out.float().masked_fill(~real.to(device)[:, None], 0) * tiled).sum(-1),
        (dout.float() * per_token).to(dtype).float(),
        weighted.unflatten(2, (num_blocks, block_size)).sum(3),
    )
    names, dtypes = ("dout_tiles", "delta", "dgate", "dcoarse"), (dtype, torch.float32, dtype, torch.float32)
    for needs_delta, needs_dgate, needs_dcoarse in itertools.product((True, False), (gated, False), (True, False)):
        results = [
            torch.full(x.shape, math.nan, dtype=of, device=device) for x, of in zip(expected, dtypes, strict=True)
        ]
        launch_gated_combine_backward(
            dout, out if needs_delta else None, gate, coarse, *tables, block_size, needs_dgate, needs_dcoarse,
            *results,
        )  # fmt: skip
        assert torch.equal(results[0].float(), tiled), "dout_tiles"
        asked = (True, needs_delta, needs_dgate, needs_dcoarse)
        for name, wanted, value, ref in zip(names, asked, results, expected, strict=True):
            if wanted:
                assert_close(name, value, ref, *((1e-5, 1e-5) if value.dtype == torch.float32 else bars))
            else:
                assert bool(value.isnan().all()), f"{name}: written, and nobody asked for it"


SMALL_COMBINE = {
    "plain": {},
    "without a gate": {"gated": False},
    "blocks of 128, D 48": {"block_size": 128, "head_dim": 48, "num_blocks": 2},
    "blocks of 256": {"block_size": 256, "head_dim": 32, "num_blocks": 2, "heads": 1},
    "fp32": {"dtype": torch.float32, "head_dim": 128, "num_blocks": 2},
}

SMALL_ATTENTION = {
    "plain": {},
    "counts": {"full": False, "num_kv": 5, "width": 3},
    "ragged, poisoned": {"sizes": "ragged", "poison": True, "full": False, "tail": 1, "width": 3},
    "grouped, strided, batch 2": {"batch": 2, "heads": 4, "layout": "bshd", "num_q": 2, "num_kv": 3},
    "fp32, D 48": {"dtype": torch.float32, "head_dim": 48, "num_q": 2},
    "blocks of 128, ragged": {"block_size": 128, "sizes": "ragged", "poison": True, "num_q": 2, "num_kv": 3},
    "negative scale": {"sm_scale": -0.125, "num_q": 2},
    "descriptors, batch as an axis": {
        **{"batch": 2, "heads": 4, "layout": "bshd", "num_q": 2, "num_kv": 3},
        "configs": (LaunchConfig(64, 64, 4, 2, True),) * 3,
    },
    "descriptors, batch folded into heads": {
        **{"batch": 2, "heads": 2, "kv_heads": 1, "num_q": 2, "num_kv": 3},
        "configs": (LaunchConfig(64, 64, 4, 2, True),) * 3,
    },
    "descriptors, ragged, poisoned": {
        "sizes": "ragged",
        "poison": True,
        "width": 3,
        "configs": (LaunchConfig(64, 64, 4, 3, True),) * 3,
    },
}


def main() -> None:
    torch.set_num_threads(1)
    for name, kwargs in SMALL_ATTENTION.items():
        # Not bf16: the interpreter multiplies its raw bits.
        check_attention("cpu", **{"dtype": torch.float16, **kwargs})
        print("ok attention:", name, flush=True)
    for kwargs in ({}, {"num_q": 40, "num_kv": 33, "width": 33, "batch": 2, "heads": 1}, {"full": True}):
        check_transpose("cpu", **kwargs)
    print("ok transpose_blocks", flush=True)
    check_select_cases("cpu")
    for kwargs in ({}, {"levels": 2, "num_forced": 3}, {"k": 0, "num_forced": 2}, {"dtype": torch.bfloat16, "k": 37}):
        check_select("cpu", **kwargs)
    print("ok select_blocks", flush=True)
    check_layout("cpu", head_dim=48)
    print("ok tile_to_bhsd, untile", flush=True)
    for name, kwargs in SMALL_COMBINE.items():
        check_combine("cpu", **{"dtype": torch.float16, **kwargs})
        print("ok gated_combine:", name, flush=True)
    for name, kwargs in SMALL_PROLOGUE.items():
        check_norm_rope_tile("cpu", **{"dtype": torch.float16, **kwargs})
        print("ok norm_rope_tile:", name, flush=True)


if __name__ == "__main__":
    main()
