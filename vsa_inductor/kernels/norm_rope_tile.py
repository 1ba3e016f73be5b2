"""RMSNorm + rotary embedding + tile order of one operand, one program per slot.

    x     [B, S, H, D] by strides, last 1, bf16 or fp16    tables [B, S, H, D / 2] by strides
    tiled [B, H, S_pad, D] contiguous                       sums   [B, S] or [B, S, H] fp32

A program reads the whole row of its slot's token once (a norm over all heads needs it), normalises, rotates and writes
H runs of D; programs next to each other write next to each other. A slot without a token is written as zeros.
Interleaved pairs travel as 32-bit words, so that a thread loads and stores 16 bytes at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from vsa_inductor.kernels.configs import on_device_of

_ROTATIONS = {"none": 0, "interleaved": 1, "half": 2}


@triton.jit
def _low(word, dtype: tl.constexpr):
    return (word & 0xFFFF).to(tl.uint16).to(dtype, bitcast=True).to(tl.float32)


@triton.jit
def _high(word, dtype: tl.constexpr):
    return (word >> 16).to(tl.uint16).to(dtype, bitcast=True).to(tl.float32)


@triton.jit
def _table(ptr, batch, token, head, pair, stride_b, stride_s, stride_h, stride_i, offset, mask, PER_HEAD: tl.constexpr):
    row = ptr + offset + batch * stride_b + token * stride_s + pair * stride_i
    if PER_HEAD:
        return tl.load(row + head * stride_h, mask=mask, other=0.0).to(tl.float32)
    return tl.load(row).to(tl.float32)


@triton.jit
def _norm_rope_tile_kernel(
    x_ptr,
    weight_ptr,
    table0_ptr,
    table1_ptr,
    table2_ptr,
    table3_ptr,
    slot_token_ptr,
    tiled_ptr,
    sums_ptr,
    num_slots,
    num_tokens,
    x_b,
    x_s,
    x_h,
    x_offset,
    w_h,
    w_offset,
    b0,
    s0,
    h0,
    i0,
    offset0,
    b1,
    s1,
    h1,
    i1,
    offset1,
    b2,
    s2,
    h2,
    i2,
    offset2,
    b3,
    s3,
    h3,
    i3,
    offset3,
    sign0,
    sign1,
    sign2,
    sign3,
    divisor,
    eps,
    HEADS: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    WEIGHT_WORDS: tl.constexpr,
    ROTATION: tl.constexpr,
    PER_HEAD: tl.constexpr,
    TABLES_PER_HEAD: tl.constexpr,
    SHARED_TABLES: tl.constexpr,
):
    pid = tl.program_id(0)
    batch = (pid // num_slots).to(tl.int64)
    slot = pid % num_slots
    token = tl.load(slot_token_ptr + slot).to(tl.int64)
    head = tl.arange(0, PADDED_HEADS)[:, None]
    pair = tl.arange(0, HALF)[None, :]
    mask = (head < HEADS) & (pair < HALF)
    dtype = x_ptr.dtype.element_ty
    D: tl.constexpr = 2 * HALF
    WORDS: tl.constexpr = ROTATION != 2
    # Scalars are 64 bits wide, what is left of an address inside the tile 32: except a head of the output.
    out_row = (batch * HEADS * num_slots + slot) * D
    out_head = head.to(tl.int64) * num_slots * D
    out_words = tiled_ptr.to(tl.pointer_type(tl.uint32)) + out_row // 2 + (head.to(tl.int64) * num_slots * HALF + pair)
    if token < 0:
        tl.store(out_words, tl.zeros([PADDED_HEADS, HALF], tl.uint32), mask=mask)
    else:
        # In words or in elements, as the launcher gave the strides.
        row = x_offset + batch * x_b + token * x_s
        inner = head * x_h + pair
        if WORDS:
            word = tl.load(x_ptr.to(tl.pointer_type(tl.uint32)) + row + inner, mask=mask, other=0)
            first = _low(word, dtype)
            second = _high(word, dtype)
        else:
            first = tl.load(x_ptr + row + inner, mask=mask, other=0.0).to(tl.float32)
            second = tl.load(x_ptr + row + HALF + inner, mask=mask, other=0.0).to(tl.float32)
        squares = tl.sum(first * first + second * second, 1)
        if PER_HEAD:
            sums_row = sums_ptr + (batch * num_tokens + token) * HEADS
            heads_of_row = tl.arange(0, PADDED_HEADS)
            tl.store(sums_row + heads_of_row, squares, mask=heads_of_row < HEADS)
            rstd = tl.math.rsqrt(squares / divisor + eps)[:, None]
        else:
            total = tl.sum(squares, 0)
            tl.store(sums_ptr + batch * num_tokens + token, total)
            rstd = tl.math.rsqrt(total / divisor + eps)
        a = first * rstd
        b = second * rstd
        if HAS_WEIGHT:
            w_inner = head * w_h + pair
            w_dtype = weight_ptr.dtype.element_ty
            if WEIGHT_WORDS:
                word = tl.load(weight_ptr.to(tl.pointer_type(tl.uint32)) + w_offset + w_inner, mask=mask, other=0)
                a = a * _low(word, w_dtype)
                b = b * _high(word, w_dtype)
            elif WORDS:
                weights = weight_ptr + w_offset + head * w_h + 2 * pair
                a = a * tl.load(weights, mask=mask, other=0.0).to(tl.float32)
                b = b * tl.load(weights + 1, mask=mask, other=0.0).to(tl.float32)
            else:
                a = a * tl.load(weight_ptr + w_offset + w_inner, mask=mask, other=0.0).to(tl.float32)
                b = b * tl.load(weight_ptr + w_offset + HALF + w_inner, mask=mask, other=0.0).to(tl.float32)
        if ROTATION != 0:
            c0 = _table(table0_ptr, batch, token, head, pair, b0, s0, h0, i0, offset0, mask, TABLES_PER_HEAD)
            c1 = _table(table1_ptr, batch, token, head, pair, b1, s1, h1, i1, offset1, mask, TABLES_PER_HEAD)
            if SHARED_TABLES:
                c2 = c1
                c3 = c0
            else:
                c2 = _table(table2_ptr, batch, token, head, pair, b2, s2, h2, i2, offset2, mask, TABLES_PER_HEAD)
                c3 = _table(table3_ptr, batch, token, head, pair, b3, s3, h3, i3, offset3, mask, TABLES_PER_HEAD)
            first = a * (c0 * sign0) + b * (c1 * sign1)
            second = a * (c2 * sign2) + b * (c3 * sign3)
        else:
            first = a
            second = b
        if WORDS:
            low = first.to(dtype).to(tl.uint16, bitcast=True).to(tl.uint32)
            high = second.to(dtype).to(tl.uint16, bitcast=True).to(tl.uint32)
            tl.store(out_words, low | (high << 16), mask=mask)
        else:
            tl.store(tiled_ptr + out_row + (out_head + pair), first.to(dtype), mask=mask)
            tl.store(tiled_ptr + out_row + HALF + (out_head + pair), second.to(dtype), mask=mask)


def launch_norm_rope_tile(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    tables: Sequence[torch.Tensor],
    slot_token: torch.Tensor,
    x_index: Sequence[int],
    weight_index: Sequence[int],
    table_index: Sequence[int],
    signs: Sequence[float],
    sizes: Sequence[int],
    rotation: str,
    per_head: bool,
    divisor: float,
    eps: float,
    tiled: torch.Tensor,
    sums: torch.Tensor,
) -> None:
    """Fill `tiled` and `sums`; arguments as those of `vsa::norm_rope_tile`.

    Args:
        x: bf16 or fp16; its strides and offset in `x_index` are even, D is a power of two, 32 to 256.
        tiled: `[B, H, S_pad, D]` contiguous, the dtype of x, written everywhere.
        sums: `[B, S]` fp32 contiguous, or `[B, S, H]` with `per_head`.
    """
    batch, num_tokens, heads, head_dim = sizes
    num_slots = slot_token.shape[0]
    if tiled.numel() == 0:
        return
    padding = [x] * (4 - len(tables))
    index = [*table_index, *[0] * (20 - len(table_index))]
    shared = len(tables) == 4 and all(
        tables[i].data_ptr() == tables[j].data_ptr() and index[5 * i : 5 * i + 5] == index[5 * j : 5 * j + 5]
        for i, j in ((0, 3), (1, 2))
    )
    padded_heads = triton.next_power_of_2(heads)
    # Divided here and not in the kernel, where a quotient would no longer be known to be a multiple of 16 bytes.
    words = rotation != "half"
    weight_words = words and weight is not None and weight.element_size() == 2
    x_index = [value // 2 for value in x_index] if words else x_index
    weight_index = [value // 2 for value in weight_index] if weight_words else weight_index
    with on_device_of(x):
        _norm_rope_tile_kernel[(batch * num_slots,)](
            x,
            x if weight is None else weight,
            *tables,
            *padding,
            slot_token,
            tiled,
            sums,
            num_slots,
            num_tokens,
            *x_index,
            *weight_index,
            *index,
            *([*signs] or [1.0] * 4),
            divisor,
            eps,
            HEADS=heads,
            PADDED_HEADS=padded_heads,
            HALF=head_dim // 2,
            HAS_WEIGHT=weight is not None,
            WEIGHT_WORDS=weight_words,
            ROTATION=_ROTATIONS[rotation],
            PER_HEAD=per_head,
            TABLES_PER_HEAD=any(index[5 * i + 2] != 0 for i in range(4)),
            SHARED_TABLES=shared,
            num_warps=4 if padded_heads * head_dim <= 2048 else 8,
        )
