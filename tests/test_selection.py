"""The coarse stage: how many blocks are kept, tile means, scores, the coarse branch, and lists from masks."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from problems import DEVICES, random_lists
from reference_attention import block_mask

from vsa_inductor import ArgumentError, BlockSelection
from vsa_inductor.selection import coarse_branch, coarse_scores, num_kept_blocks, tile_means

TOPK = json.loads((Path(__file__).parent / "cases" / "topk.json").read_text())


@pytest.mark.parametrize("case", TOPK, ids=lambda c: f"{c['sparsity']}-{c['num_blocks']}")
def test_given_numbers_of_kept_blocks(case):
    assert num_kept_blocks(case["sparsity"], case["num_blocks"]) == case["k"]


@pytest.mark.parametrize("sparsity", [0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 0.95, 1.0])
def test_number_of_kept_blocks_is_within_bounds_and_never_grows_with_sparsity(sparsity):
    for num_blocks in range(1, 200):
        k = num_kept_blocks(sparsity, num_blocks)
        assert 1 <= k <= num_blocks
        assert k <= num_kept_blocks(max(0.0, sparsity - 0.05), num_blocks)
    assert num_kept_blocks(0.0, 17) == 17
    assert num_kept_blocks(1.0, 17) == 1


def tile_order(sizes, block_size=64, heads=2, D=8, dtype=torch.float32, device="cpu"):
    """Random rows whose empty slots are zero."""
    x = torch.randn(2, heads, len(sizes), block_size, D).to(device, dtype)
    sizes = torch.tensor(sizes, dtype=torch.int32, device=device)
    held = torch.arange(block_size, device=device) < sizes[:, None]
    return x.masked_fill(~held[..., None], 0).flatten(2, 3), sizes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_tile_means_are_over_real_tokens(device, dtype):
    x, sizes = tile_order([64, 1, 17, 0], dtype=dtype, device=device)
    means = tile_means(x, sizes, 64)
    assert means.shape == (2, 2, 4, 8)
    assert means.dtype == torch.promote_types(dtype, torch.float32)
    for block, size in enumerate([64, 1, 17]):
        rows = x[:, :, block * 64 : block * 64 + size].double()
        torch.testing.assert_close(means[:, :, block].double(), rows.mean(2), rtol=1e-5, atol=1e-6)
    assert not means[:, :, 3].any(), "a block without tokens has mean 0, not NaN"


def test_scores_and_coarse_branch_share_kv_heads_by_group():
    q, k, v = torch.randn(1, 6, 4, 8), torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
    scores = coarse_scores(q, k, 0.3)
    branch = coarse_branch(scores, v)
    assert scores.shape == (1, 6, 4, 5) and branch.shape == (1, 6, 4, 8)
    for head in range(6):
        expected = 0.3 * q[0, head] @ k[0, head // 3].T
        torch.testing.assert_close(scores[0, head], expected)
        torch.testing.assert_close(branch[0, head], expected.softmax(-1) @ v[0, head // 3])


@pytest.mark.parametrize("device", DEVICES)
def test_top_k_does_not_differentiate(device):
    scores = torch.randn(1, 2, 3, 7, device=device, requires_grad=True)
    chosen = BlockSelection.top_k(scores, 3, num_forced=2)
    assert not chosen.kv_indices.requires_grad and not chosen.kv_num_blocks.requires_grad
    assert chosen.kv_indices.shape == (1, 2, 3, 5)
    assert bool((chosen.kv_indices[..., :2] == torch.arange(2, device=device)).all())
    best = scores[..., 2:].topk(3).indices.sort().values + 2
    assert torch.equal(chosen.kv_indices[..., 2:].long(), best)


@pytest.mark.parametrize("device", DEVICES)
def test_dense_lists_everything_without_memory(device):
    chosen = BlockSelection.dense(2, 3, 4, 5, device)
    assert bool(block_mask(chosen.kv_indices, chosen.kv_num_blocks, 5).all())
    assert chosen.kv_indices.dtype == chosen.kv_num_blocks.dtype == torch.int32
    assert chosen.kv_indices.untyped_storage().nbytes() == 5 * 4
    assert chosen.kv_num_blocks.untyped_storage().nbytes() == 4


@pytest.mark.parametrize("device", DEVICES)
def test_lists_of_a_mask(device):
    mask = torch.rand(2, 3, 4, 9).to(device) < 0.4
    mask[0, 0, 0], mask[1, 1, 1] = False, True
    chosen = BlockSelection.from_block_mask(mask)
    assert torch.equal(block_mask(chosen.kv_indices, chosen.kv_num_blocks, 9), mask)
    assert torch.equal(chosen.kv_num_blocks.long(), mask.sum(-1))
    for ids, count in zip(chosen.kv_indices.flatten(0, 2), chosen.kv_num_blocks.flatten().tolist(), strict=True):
        assert ids[:count].tolist() == sorted(ids[:count].tolist())
        assert ids[count:].tolist() == [-1] * (9 - count)


def test_mask_and_lists_round_trip():
    kv_indices, kv_num_blocks = random_lists(2, 3, 4, 6, 6, counts="varying")
    chosen = BlockSelection.from_block_mask(block_mask(kv_indices, kv_num_blocks, 6))
    assert torch.equal(chosen.kv_indices, kv_indices)
    assert torch.equal(chosen.kv_num_blocks, kv_num_blocks)


@pytest.mark.parametrize("mask", [torch.ones(1, 1, 2, 2), torch.ones(1, 2, 2, dtype=torch.bool)], ids=["float", "3-D"])
def test_refuses_what_is_not_a_block_mask(mask):
    with pytest.raises(ArgumentError) as caught:
        BlockSelection.from_block_mask(mask)
    assert caught.value.argument == "mask"


def test_scores_of_a_uniform_video_are_the_scores_of_its_tokens():
    """Where all tokens of a tile are equal, the coarse branch is dense attention over tiles weighted equally."""
    tile_q, tile_k, tile_v = torch.randn(3, 1, 1, 4, 8, dtype=torch.float64)
    sizes = torch.full((4,), 64, dtype=torch.int32)
    means = [tile_means(x.repeat_interleave(64, 2), sizes, 64) for x in (tile_q, tile_k, tile_v)]
    coarse = coarse_branch(coarse_scores(means[0], means[1], 8**-0.5), means[2])
    dense = torch.nn.functional.scaled_dot_product_attention(tile_q, tile_k, tile_v)
    torch.testing.assert_close(coarse, dense)
    assert math.isclose(float(means[0].sum()), float(tile_q.sum()), rel_tol=1e-12)
