"""Transpose of the block lists: for every kv block, which q blocks attend it, compressed and ascending.

    kv_indices [B, H, N_q, M], kv_num_blocks [B, H, N_q]
    ->  q_indices [B, H, N_q * M] (tail -1), q_offsets [B, H, N_kv + 1]

    mark    one bit per (kv block, q block) in a packed mask [B, H, N_kv, ceil(N_q / 32)] through atomic_or; the order
            of the atomics cannot show, so the result is deterministic. The same launch fills q_indices with -1.
    count   set bits per kv block
    expand  bits to ascending ids, one program per kv block, which sums up the counts before its own: one launch less
            than with a scan, and the re-read counts stay in cache
The mask costs N_q * N_kv / 8 bytes per head: 8 MB at N = 8192.
    scan    up to _SCANNED entries per head: one program per kv block reads all lists of the head, and is the only
            launch: at 4096 and 8192 tokens the launches are what the transposition costs
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vsa_inductor.kernels.configs import on_device_of

_SCANNED = 4096


@triton.jit
def _scan_kernel(
    indices_ptr,
    counts_ptr,
    q_indices_ptr,
    q_offsets_ptr,
    heads,
    num_q,
    num_kv,
    width,
    stride_ib,
    stride_ih,
    stride_in,
    stride_im,
    stride_cb,
    stride_ch,
    stride_cn,
    ENTRIES: tl.constexpr,
):
    # The program after the last kv block writes the end of the last run and what stands past it.
    head_index = tl.program_id(0) // (num_kv + 1)
    kv_block = tl.program_id(0) % (num_kv + 1)
    batch = (head_index // heads).to(tl.int64)
    head = (head_index % heads).to(tl.int64)
    entries = tl.arange(0, ENTRIES)
    q_block = entries // width
    place = entries % width
    inside = q_block < num_q
    counts = counts_ptr + batch * stride_cb + head * stride_ch + q_block.to(tl.int64) * stride_cn
    listed = inside & (place < tl.load(counts, mask=inside, other=0))
    ids = indices_ptr + batch * stride_ib + head * stride_ih + q_block.to(tl.int64) * stride_in + place * stride_im
    kv = tl.load(ids, mask=listed, other=num_kv)
    before = tl.sum((listed & (kv < kv_block)).to(tl.int32), 0)
    tl.store(q_offsets_ptr + head_index.to(tl.int64) * (num_kv + 1) + kv_block, before)
    row = q_indices_ptr + head_index.to(tl.int64) * num_q * width
    if kv_block < num_kv:
        mine = listed & (kv == kv_block)
        tl.store(row + before + tl.cumsum(mine.to(tl.int32), 0) - 1, q_block, mask=mine)
    else:
        tl.store(row + entries, -1, mask=inside & (entries >= before))


@triton.jit
def _mark_kernel(
    indices_ptr,
    counts_ptr,
    mask_ptr,
    q_indices_ptr,
    heads,
    num_q,
    num_kv,
    width,
    words,
    stride_ib,
    stride_ih,
    stride_in,
    stride_im,
    stride_cb,
    stride_ch,
    stride_cn,
    CHUNK: tl.constexpr,
):
    row = tl.program_id(0)
    head_index = row // num_q
    q_block = row % num_q
    batch = (head_index // heads).to(tl.int64)
    head = (head_index % heads).to(tl.int64)
    q_block64 = q_block.to(tl.int64)
    count = tl.load(counts_ptr + batch * stride_cb + head * stride_ch + q_block64 * stride_cn)
    list_ptr = indices_ptr + batch * stride_ib + head * stride_ih + q_block64 * stride_in
    mask_base = mask_ptr + head_index.to(tl.int64) * num_kv * words + q_block // 32
    bit = tl.full([CHUNK], 1, tl.int32) << (q_block % 32)
    for start in range(0, width, CHUNK):
        offs = start + tl.arange(0, CHUNK)
        listed = offs < count
        kv_block = tl.load(list_ptr + offs * stride_im, mask=listed, other=0)
        tl.atomic_or(mask_base + kv_block.to(tl.int64) * words, bit, mask=listed, sem="relaxed")
        tl.store(q_indices_ptr + row.to(tl.int64) * width + offs, -1, mask=offs < width)


@triton.jit
def _count_kernel(mask_ptr, row_counts_ptr, num_rows, words, ROWS: tl.constexpr, CHUNK: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    in_rows = rows < num_rows
    base = mask_ptr + rows.to(tl.int64)[:, None] * words
    total = tl.zeros([ROWS], tl.int32)
    for start in range(0, words, CHUNK):
        offs = start + tl.arange(0, CHUNK)
        x = tl.load(base + offs[None, :], mask=in_rows[:, None] & (offs < words)[None, :], other=0)
        # Set bits of a word by pairwise sums (no popcount that also runs in the interpreter).
        x = x - ((x >> 1) & 0x55555555)
        x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
        x = (x + (x >> 4)) & 0x0F0F0F0F
        x = x + (x >> 8)
        x = (x + (x >> 16)) & 0x3F
        total += tl.sum(x, 1)
    tl.store(row_counts_ptr + rows, total, mask=in_rows)


@triton.jit
def _expand_kernel(
    mask_ptr,
    row_counts_ptr,
    q_offsets_ptr,
    q_indices_ptr,
    num_kv,
    words,
    list_len,
    COUNTS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    row = tl.program_id(0)
    head_index = (row // num_kv).to(tl.int64)
    kv_block = row % num_kv
    counts = row_counts_ptr + head_index * num_kv
    before = tl.zeros([COUNTS], tl.int32)
    for start in range(0, kv_block, COUNTS):
        offs = start + tl.arange(0, COUNTS)
        before += tl.load(counts + offs, mask=offs < kv_block, other=0)
    place = tl.sum(before, 0)
    offsets = q_offsets_ptr + head_index * (num_kv + 1) + kv_block
    tl.store(offsets + 1, place + tl.load(counts + kv_block))
    if kv_block == 0:
        tl.store(offsets, 0)

    base = mask_ptr + row.to(tl.int64) * words
    out = q_indices_ptr + head_index * list_len
    for start in range(0, words * 32, CHUNK):
        ids = start + tl.arange(0, CHUNK)
        word = tl.load(base + ids // 32, mask=ids < words * 32, other=0)
        chosen = (word >> (ids % 32)) & 1
        rank = tl.cumsum(chosen, 0)
        tl.store(out + place + rank - 1, ids, mask=chosen != 0)
        place += tl.sum(chosen, 0)


def launch_transpose_blocks(
    kv_indices: torch.Tensor,
    kv_num_blocks: torch.Tensor,
    num_kv_blocks: int,
    q_indices: torch.Tensor,
    q_offsets: torch.Tensor,
) -> None:
    """Write the compressed transpose of the lists.

    Args:
        kv_indices: `[B, H, N_q, M]` int32, any strides; entries at or past the count are never used.
        kv_num_blocks: `[B, H, N_q]` int32, 0..M, any strides.
        num_kv_blocks: N_kv.
        q_indices: `[B, H, N_q * M]` int32 contiguous; past `q_offsets[..., -1]` it is filled with -1.
        q_offsets: `[B, H, N_kv + 1]` int32 contiguous.
    """
    batch, heads, num_q, width = kv_indices.shape
    if batch * heads == 0:
        return
    if num_q == 0 or num_kv_blocks == 0 or width == 0:
        q_indices.fill_(-1)
        q_offsets.zero_()
        return
    if num_q * width <= _SCANNED:
        with on_device_of(kv_indices):
            _scan_kernel[(batch * heads * (num_kv_blocks + 1),)](
                kv_indices,
                kv_num_blocks,
                q_indices,
                q_offsets,
                heads,
                num_q,
                num_kv_blocks,
                width,
                *kv_indices.stride(),
                *kv_num_blocks.stride(),
                ENTRIES=triton.next_power_of_2(num_q * width),
                num_warps=4,
            )
        return
    words = (num_q + 31) // 32
    rows = batch * heads * num_kv_blocks
    mask = torch.zeros((rows, words), dtype=torch.int32, device=kv_indices.device)
    row_counts = torch.empty(rows, dtype=torch.int32, device=kv_indices.device)
    rows_per_program = 32 if words <= 32 else 4
    with on_device_of(kv_indices):
        _mark_kernel[(batch * heads * num_q,)](
            kv_indices,
            kv_num_blocks,
            mask,
            q_indices,
            heads,
            num_q,
            num_kv_blocks,
            width,
            words,
            *kv_indices.stride(),
            *kv_num_blocks.stride(),
            CHUNK=min(1024, max(32, triton.next_power_of_2(width))),
            num_warps=4,
        )
        _count_kernel[(triton.cdiv(rows, rows_per_program),)](
            mask,
            row_counts,
            rows,
            words,
            ROWS=rows_per_program,
            CHUNK=min(256, triton.next_power_of_2(words)),
            num_warps=4,
        )
        _expand_kernel[(rows,)](
            mask,
            row_counts,
            q_offsets,
            q_indices,
            num_kv_blocks,
            words,
            num_q * width,
            COUNTS=min(1024, max(32, triton.next_power_of_2(num_kv_blocks))),
            CHUNK=min(1024, max(32, triton.next_power_of_2(words * 32))),
            num_warps=4,
        )
