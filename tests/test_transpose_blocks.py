"""`vsa::transpose_blocks` against the lists themselves."""

from __future__ import annotations

import itertools

import pytest
import torch
from problems import DEVICES, random_lists
from reference_attention import block_mask

SHAPES = [
    pytest.param(1, 1, 1, 1, 1, id="one block"),
    pytest.param(2, 3, 5, 7, 4, id="more kv blocks"),
    pytest.param(1, 2, 9, 3, 3, id="more q blocks"),
    pytest.param(2, 1, 8, 20, 1, id="width 1"),
    pytest.param(1, 2, 40, 33, 33, id="all listed"),
]


def transpose(kv_indices, kv_num_blocks, num_kv_blocks):
    q_indices, q_offsets = torch.ops.vsa.transpose_blocks(kv_indices, kv_num_blocks, num_kv_blocks)
    B, H, N_q, M = kv_indices.shape
    assert q_indices.shape == (B, H, N_q * M) and q_offsets.shape == (B, H, num_kv_blocks + 1)
    assert q_indices.dtype == q_offsets.dtype == torch.int32
    return q_indices, q_offsets


def transpose_by_loops(kv_indices, kv_num_blocks, num_kv_blocks):
    B, H, N_q, M = kv_indices.shape
    q_indices, q_offsets = [], []
    for ids_of_head, counts in zip(
        kv_indices.flatten(0, 1).tolist(), kv_num_blocks.flatten(0, 1).tolist(), strict=True
    ):
        attending = [[] for _ in range(num_kv_blocks)]
        for q_block, (ids, count) in enumerate(zip(ids_of_head, counts, strict=True)):
            for kv_block in ids[:count]:
                attending[kv_block].append(q_block)
        flat = [q_block for blocks in attending for q_block in blocks]
        q_indices.append(flat + [-1] * (N_q * M - len(flat)))
        q_offsets.append([sum(map(len, attending[:j])) for j in range(num_kv_blocks + 1)])
    return torch.tensor(q_indices).view(B, H, -1), torch.tensor(q_offsets).view(B, H, -1)


@pytest.mark.parametrize("past_count", [-1, "valid"])
@pytest.mark.parametrize("counts", ["full", "varying", 0])
@pytest.mark.parametrize("B, H, N_q, N_kv, M", SHAPES)
@pytest.mark.parametrize("device", DEVICES)
def test_equals_walking_the_lists(device, B, H, N_q, N_kv, M, counts, past_count):
    lists = random_lists(B, H, N_q, N_kv, M, counts=counts, past_count=past_count)
    q_indices, q_offsets = transpose(*(x.to(device) for x in lists), N_kv)
    expected_indices, expected_offsets = transpose_by_loops(*lists, N_kv)
    assert torch.equal(q_offsets.cpu().long(), expected_offsets)
    assert torch.equal(q_indices.cpu().long(), expected_indices)


@pytest.mark.parametrize("device", DEVICES)
def test_what_every_transpose_promises(device):
    kv_indices, kv_num_blocks = (x.to(device) for x in random_lists(2, 3, 13, 11, 6, counts="varying"))
    q_indices, q_offsets = transpose(kv_indices, kv_num_blocks, 11)
    assert torch.equal(q_offsets[..., -1], kv_num_blocks.sum(-1))
    assert not q_offsets[..., 0].any()
    assert bool((q_offsets.diff(dim=-1) >= 0).all())
    for ids, offsets in zip(q_indices.flatten(0, 1).tolist(), q_offsets.flatten(0, 1).tolist(), strict=True):
        for first, last in itertools.pairwise(offsets):
            row = ids[first:last]
            assert row == sorted(set(row)), "ascending, without duplicates"
        assert ids[offsets[-1] :] == [-1] * (len(ids) - offsets[-1])


@pytest.mark.parametrize("device", DEVICES)
def test_twice_is_the_same_lists(device):
    kv_indices, kv_num_blocks = (x.to(device) for x in random_lists(1, 2, 7, 5, 3, counts="varying"))
    q_indices, q_offsets = transpose(kv_indices, kv_num_blocks, 5)
    # As lists again: row j of the transpose, padded to the width N_q.
    counts = q_offsets.diff(dim=-1)
    places = torch.arange(7, dtype=torch.int32, device=device)
    at = (q_offsets[..., :-1, None] + places).clamp(max=q_indices.shape[-1] - 1)
    rows = q_indices[:, :, None].expand(-1, -1, 5, -1).gather(-1, at.long())
    rows = torch.where(places < counts[..., None], rows, -1)
    back, back_offsets = transpose(rows, counts, 7)
    back_counts = back_offsets.diff(dim=-1)
    assert torch.equal(back_counts, kv_num_blocks)
    for ids, listed, count in zip(
        back.flatten(0, 1).tolist(),
        kv_indices.flatten(0, 1).tolist(),
        kv_num_blocks.flatten(0, 1).tolist(),
        strict=True,
    ):
        assert [x for x in ids if x >= 0] == [x for row, n in zip(listed, count, strict=True) for x in row[:n]]


@pytest.mark.parametrize("device", DEVICES)
def test_lists_that_are_views(device):
    kv_indices, kv_num_blocks = (x.to(device) for x in random_lists(2, 1, 5, 6, 4, counts="varying"))
    expanded = kv_indices.expand(2, 3, 5, 4), kv_num_blocks.expand(2, 3, 5)
    sliced = random_lists(2, 6, 5, 6, 4, counts=3)
    transposed = kv_indices.transpose(0, 1).contiguous().transpose(0, 1), kv_num_blocks
    for ids, counts in (expanded, transposed, tuple(x[:, ::2].to(device) for x in sliced)):
        value = transpose(ids, counts, 6)
        expected = transpose(ids.contiguous(), counts.contiguous(), 6)
        assert all(torch.equal(a, b) for a, b in zip(value, expected, strict=True))
        mask = block_mask(ids, counts, 6)
        assert torch.equal(value[1].diff(dim=-1).long(), mask.sum(2))


@pytest.mark.parametrize("device", DEVICES)
def test_nothing_listed_or_nothing_to_list(device):
    ids = torch.empty(1, 2, 3, 0, dtype=torch.int32, device=device)
    counts = torch.zeros(1, 2, 3, dtype=torch.int32, device=device)
    q_indices, q_offsets = transpose(ids, counts, 4)
    assert q_indices.numel() == 0 and not q_offsets.any()
    q_indices, q_offsets = transpose(ids, counts, 0)
    assert q_offsets.shape == (1, 2, 1) and not q_offsets.any()


@pytest.mark.gpu
def test_many_blocks_are_the_same_on_both_devices():
    scores = torch.randn(1, 2, 1100, 1024)
    lists = torch.ops.vsa.select_blocks(scores, 64)
    on_cpu, on_gpu = transpose(*lists, 1024), transpose(*(x.cuda() for x in lists), 1024)
    assert all(torch.equal(a, b.cpu()) for a, b in zip(on_cpu, on_gpu, strict=True))
