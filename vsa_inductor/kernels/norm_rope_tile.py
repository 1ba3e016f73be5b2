"""RMSNorm, rotary embedding, tile order and tile sums of one operand in one pass over its rows.

    x     [B, S, H, D] by strides, last 1, bf16 or fp16    tables [B, S, H, D / 2] by strides
    tiled [B, H, S_pad, D] contiguous                       square_sums [B, S], [B, S, H] or [0] fp32
    tile_sums [B, H, N, D] or [0] fp32

A program owns `span` slots in a row and `chunk * chunks` heads: all of them where the norm is over all heads. It walks
its slots `rows` at a time:

    token of a slot -> x, tables (waiting in registers or in shared memory, for the next steps too)
        -> squares -> rstd -> weight -> rotation -> rounded pairs -> one run of D per slot and head
                                                                  -> sums of a block, in registers

Heads are cut in chunks of a power of two, so that 12 or 40 heads fill every lane: a tile of the next power of two
leaves a quarter and more of them idle. Interleaved pairs travel as 32-bit words, so that a thread loads and stores 16
bytes at a time; values of tables that stand next to one that is not needed travel with it for the same reason. A slot
without a token is written as zeros. Every sum is made in a fixed order, by one program or from the parts of a block.
"""

# In the language of kernels tuples grow by addition only, to other types than they began with.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment"

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from vsa_inductor.kernels.configs import on_device_of

_ROTATIONS = {"none": 0, "interleaved": 1, "half": 2}
_NORMS = {"none": 0, "head": 1, "all": 2}


class PrologueConfig(NamedTuple):
    """How the work is cut.

    Attributes:
        span: slots of a program; divides block_size where sums are wanted.
        rows: slots of a step; divides span.
        chunk: heads of one tensor in the kernel, a power of two.
        chunks: chunks of a program; together they cover all heads where the norm is over all heads.
        num_warps: warps of a program.
        ahead: how many steps' loads are under way: 1, the step's own; more, those of the next ones too.
        in_shared: loads ahead wait in shared memory, by Triton's pipeliner, instead of in registers (ahead = 2 only).
        keep_weight: the weight stays in registers instead of being read from L1 at each step.
        hints: tables, which the next operand reads again, ask to stay in L2, and x to leave it; without effect on loads
            into shared memory.
        max_registers: cap per thread, to fit one more program on a multiprocessor; None leaves it to the compiler.
        wide_tables: values of a table that stand two apart travel with what is between them, 16 bytes at a time. Only
            by way of shared memory: a register that a load fills for nothing is soon wanted, and waits for the load.
    """

    span: int
    rows: int
    chunk: int
    chunks: int
    num_warps: int
    ahead: int = 1
    in_shared: bool = False
    keep_weight: bool = True
    hints: bool = False
    max_registers: int | None = None
    wide_tables: bool = False


@triton.jit
def _words(ptr):
    """A pointer to pairs of elements."""
    if ptr.dtype.element_ty.primitive_bitwidth == 32:
        return ptr.to(tl.pointer_type(tl.uint64))
    else:
        return ptr.to(tl.pointer_type(tl.uint32))


@triton.jit
def _part(word, dtype: tl.constexpr, PLACE: tl.constexpr):
    """Element 0 or 1 of a pair, as fp32."""
    if dtype.primitive_bitwidth == 32:
        return (word >> (32 * PLACE)).to(tl.uint32).to(dtype, bitcast=True)
    elif dtype == tl.bfloat16:
        # The upper half of an fp32: one instruction, where an extraction takes two.
        return ((word << 16) if PLACE == 0 else (word & 0xFFFF0000)).to(tl.float32, bitcast=True)
    else:
        return (word >> (16 * PLACE)).to(tl.uint16).to(dtype, bitcast=True).to(tl.float32)


@triton.jit
def _rounded(first, second, dtype: tl.constexpr, NATIVE: tl.constexpr):
    """Two fp32 values as a word of two elements.

    By the instruction that rounds both at once. Rounded one by one they go through the unit for special functions, at
    a sixteenth of the rate of an addition.
    """
    if not NATIVE:
        low = first.to(dtype).to(tl.uint16, bitcast=True).to(tl.uint32)
        high = second.to(dtype).to(tl.uint16, bitcast=True).to(tl.uint32)
        return low | (high << 16)
    elif dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [first, second], dtype=tl.uint32, is_pure=True, pack=1
        )
    else:
        return tl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [first, second], dtype=tl.uint32, is_pure=True, pack=1
        )


@triton.jit
def _load_pairs(
    ptr, place, stride_h, mask, chunks: tl.constexpr, CHUNK: tl.constexpr, APART: tl.constexpr, EVICT: tl.constexpr
):
    """Raw pairs of every chunk: words with APART 0, else two elements that far apart."""
    raw = ()
    for c in tl.static_range(chunks):
        here = place + c * CHUNK * stride_h
        if APART == 0:
            raw = raw + (tl.load(_words(ptr) + here, mask=mask[c], other=0, eviction_policy=EVICT),)
        else:
            first = tl.load(ptr + here, mask=mask[c], other=0.0, eviction_policy=EVICT)
            second = tl.load(ptr + (here + APART), mask=mask[c], other=0.0, eviction_policy=EVICT)
            raw = raw + (first, second)
    return raw


@triton.jit
def _pair(raw, c: tl.constexpr, dtype: tl.constexpr, APART: tl.constexpr):
    """The two elements of the pairs of chunk `c`, as fp32."""
    if APART == 0:
        return _part(raw[c], dtype, 0), _part(raw[c], dtype, 1)
    else:
        return raw[2 * c].to(tl.float32), raw[2 * c + 1].to(tl.float32)


@triton.jit
def _load_tables(
    tables, places, index, token, mask, COUNT: tl.constexpr, PARTS: tl.constexpr, chunks: tl.constexpr,
    CHUNK: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    """COUNT tables of every chunk: raw; words where PARTS says which half of a word is meant."""
    raw = ()
    for c in tl.static_range(chunks):
        for i in tl.static_range(COUNT):
            here = places[i] + token * index[5 * i + 1] + c * CHUNK * index[5 * i + 2]
            if PARTS[i] >= 0:
                raw = raw + (tl.load(_words(tables[i]) + here, mask=mask[c], other=0, eviction_policy=EVICT),)
            else:
                raw = raw + (tl.load(tables[i] + here, mask=mask[c], other=0.0, eviction_policy=EVICT),)
    return raw


@triton.jit
def _factor(raw, tables, i: tl.constexpr, c: tl.constexpr, COUNT: tl.constexpr, PARTS: tl.constexpr):
    """Table `i` of the four of a pair's rotation; with two tables, the last two are the first two swapped."""
    t: tl.constexpr = i if COUNT == 4 else (0 if i == 0 or i == 3 else 1)
    if PARTS[t] >= 0:
        return _part(raw[c * COUNT + t], tables[t].dtype.element_ty, PARTS[t])
    else:
        return raw[c * COUNT + t].to(tl.float32)


@triton.jit
def _signed(x, SIGN: tl.constexpr):
    # On products and not on tables: a table handed round with both signs would be handed round twice.
    return x if SIGN == 1 else (-x if SIGN == -1 else x * SIGN)


@triton.jit
def _load_step(
    x_ptr, x_place, x_index, tables, table_places, table_index, token, heads, CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr, X_APART: tl.constexpr, X_EVICT: tl.constexpr, TABLES: tl.constexpr,
    TABLE_PARTS: tl.constexpr, TABLE_CHUNKS: tl.constexpr, TABLE_EVICT: tl.constexpr, PER_HEAD: tl.constexpr,
):  # fmt: skip
    """What a step reads of its tokens, raw: x and the tables; zeros where there is no token."""
    present = token >= 0
    mask = ()
    for c in tl.static_range(CHUNKS):
        mask = mask + (heads[c] & present,)
    token = token.to(tl.int64)
    t_raw = _load_tables(
        tables, table_places, table_index, token, mask if PER_HEAD else (present,), TABLES, TABLE_PARTS, TABLE_CHUNKS,
        CHUNK, TABLE_EVICT,
    )  # fmt: skip
    x_raw = _load_pairs(x_ptr, x_place + token * x_index[1], x_index[2], mask, CHUNKS, CHUNK, X_APART, X_EVICT)
    return x_raw, t_raw


# Only ever added to the number of a token: nothing is gained by compiling again where it is a multiple of 16.
@triton.jit(do_not_specialize=["num_tokens"])
def _norm_rope_tile_kernel(
    x_ptr,
    weight_ptr,
    tables,
    slot_token_ptr,
    tiled_ptr,
    square_sums_ptr,
    tile_sums_ptr,
    num_slots,
    num_tokens,
    x_index,
    weight_index,
    table_index,
    divisor,
    eps,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    SPAN: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    EVEN: tl.constexpr,
    NORM: tl.constexpr,
    ROTATION: tl.constexpr,
    X_APART: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    WEIGHT_APART: tl.constexpr,
    TABLES: tl.constexpr,
    TABLE_PARTS: tl.constexpr,
    TABLES_PER_HEAD: tl.constexpr,
    SIGNS: tl.constexpr,
    SUMS: tl.constexpr,
    STAGES: tl.constexpr,
    IN_REGISTERS: tl.constexpr,
    KEEP_WEIGHT: tl.constexpr,
    HINTS: tl.constexpr,
    NATIVE: tl.constexpr,
):
    D: tl.constexpr = 2 * HALF
    GROUPS: tl.constexpr = (HEADS + CHUNK * CHUNKS - 1) // (CHUNK * CHUNKS)
    TABLE_CHUNKS: tl.constexpr = CHUNKS if TABLES_PER_HEAD else 1
    X_EVICT: tl.constexpr = "evict_first" if HINTS else ""
    TABLE_EVICT: tl.constexpr = "evict_last" if HINTS else ""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    pid = tl.program_id(0)
    # Heads are the fastest axis: neighbours read the same rows.
    group = pid % GROUPS
    spans = tl.cdiv(num_slots, SPAN)
    span = pid // GROUPS % spans
    batch = (pid // GROUPS // spans).to(tl.int64)
    row = tl.arange(0, ROWS)[:, None, None]
    pair = tl.arange(0, HALF)[None, None, :]
    head = group.to(tl.int64) * (CHUNK * CHUNKS) + tl.arange(0, CHUNK)[None, :, None]
    # Of the shape of what a step holds of one chunk.
    whole = (row >= 0) & (head >= 0) & (pair >= 0)
    heads = ()
    sums = ()
    for c in tl.static_range(CHUNKS):
        heads = heads + ((whole & (head + c * CHUNK < HEADS)) if HEADS % (CHUNK * CHUNKS) != 0 else whole,)
        sums = sums + (tl.zeros([ROWS, CHUNK, HALF], tl.float32), tl.zeros([ROWS, CHUNK, HALF], tl.float32))

    x_place = x_index[3] + batch * x_index[0] + head * x_index[2] + (2 if X_APART == 1 else 1) * pair
    w_place = weight_index[1] + head * weight_index[0] + (2 if WEIGHT_APART == 1 else 1) * pair + 0 * row
    table_places = ()
    for i in tl.static_range(TABLES):
        place = table_index[5 * i + 4] + batch * table_index[5 * i] + pair * table_index[5 * i + 3]
        # Where all heads share a table it is loaded once and handed round: every thread loading what it multiplies
        # takes several times the registers and the traffic.
        if TABLES_PER_HEAD:
            place += head * table_index[5 * i + 2]
        table_places = table_places + (place,)
    kept_weight = ()
    if HAS_WEIGHT and KEEP_WEIGHT:
        kept_weight = _load_pairs(weight_ptr, w_place, weight_index[0], heads, CHUNKS, CHUNK, WEIGHT_APART, "")

    first_slot = span * SPAN + row
    # In words, or in elements where the two of a pair are stored apart.
    run: tl.constexpr = HALF if ROTATION != 2 else D
    heads_apart = num_slots.to(tl.int64) * run
    out_place = batch * HEADS * heads_apart + head * heads_apart + first_slot * run + pair
    out_run = (_words(tiled_ptr) if ROTATION != 2 else tiled_ptr.to(tl.pointer_type(tl.uint16))) + out_place
    token = tl.load(slot_token_ptr + first_slot, mask=first_slot < num_slots, other=-1)
    x_ahead = ()
    t_ahead = ()
    if IN_REGISTERS:
        x_ahead, t_ahead = _load_step(
            x_ptr, x_place, x_index, tables, table_places, table_index, token, heads, CHUNKS, CHUNK, X_APART,
            X_EVICT, TABLES, TABLE_PARTS, TABLE_CHUNKS, TABLE_EVICT, TABLES_PER_HEAD,
        )  # fmt: skip
    for step in tl.range(0, SPAN, ROWS, num_stages=STAGES):
        slot = first_slot + step
        if STAGES > 1:
            # The pipeliner moves loads that depend on the step alone.
            token = tl.load(slot_token_ptr + slot, mask=slot < num_slots, other=-1)
            next_token = token
        else:
            # The token after this step's is read a step early: x waits for it.
            after = slot + ROWS
            next_token = tl.load(slot_token_ptr + after, mask=(after < num_slots) & (step + ROWS < SPAN), other=-1)
        present = token >= 0
        if IN_REGISTERS:
            x_raw, t_raw = x_ahead, t_ahead
        else:
            x_raw, t_raw = _load_step(
                x_ptr, x_place, x_index, tables, table_places, table_index, token, heads, CHUNKS, CHUNK, X_APART,
                X_EVICT, TABLES, TABLE_PARTS, TABLE_CHUNKS, TABLE_EVICT, TABLES_PER_HEAD,
            )  # fmt: skip
        # Unpacked before the next step's loads are issued, so that these may go to the same registers.
        factors = ()
        for c in tl.static_range(TABLE_CHUNKS):
            for i in tl.static_range(4 if ROTATION != 0 else 0):
                factors = factors + (_factor(t_raw, tables, i, c, TABLES, TABLE_PARTS),)
        values = ()
        squares = tl.zeros([ROWS, CHUNK, HALF], tl.float32)
        for c in tl.static_range(CHUNKS):
            a, b = _pair(x_raw, c, dtype, X_APART)
            values = values + (a, b)
            squares += a * a + b * b
        if IN_REGISTERS:
            x_ahead, t_ahead = _load_step(
                x_ptr, x_place, x_index, tables, table_places, table_index, next_token, heads, CHUNKS, CHUNK,
                X_APART, X_EVICT, TABLES, TABLE_PARTS, TABLE_CHUNKS, TABLE_EVICT, TABLES_PER_HEAD,
            )  # fmt: skip
        if HAS_WEIGHT and not KEEP_WEIGHT:
            weight = _load_pairs(weight_ptr, w_place, weight_index[0], heads, CHUNKS, CHUNK, WEIGHT_APART, "")
        else:
            weight = kept_weight
        # rstd of an empty slot is 0 and not rsqrt(eps), which may be infinite.
        rstd = tl.where(present, 1.0, 0.0)
        if NORM == 2:
            total = tl.sum(tl.sum(squares, 2, keep_dims=True), 1, keep_dims=True)
            tl.store(square_sums_ptr + batch * num_tokens + token, total, mask=present)
            rstd = tl.where(present, tl.math.rsqrt(total / divisor + eps), 0.0)
        added = ()
        for c in tl.static_range(CHUNKS):
            a, b = values[2 * c], values[2 * c + 1]
            if NORM == 1:
                total = tl.sum(a * a + b * b, 2, keep_dims=True)
                heads_of_row = square_sums_ptr + (batch * num_tokens + token) * HEADS + (head + c * CHUNK)
                tl.store(heads_of_row, total, mask=present & (head + c * CHUNK < HEADS))
                rstd = tl.where(present, tl.math.rsqrt(total / divisor + eps), 0.0)
            if NORM != 0:
                a = a * rstd
                b = b * rstd
            if HAS_WEIGHT:
                w_a, w_b = _pair(weight, c, weight_ptr.dtype.element_ty, WEIGHT_APART)
                a = a * w_a
                b = b * w_b
            if ROTATION != 0:
                first = _signed(a * factors[4 * (c % TABLE_CHUNKS)], SIGNS[0]) + _signed(
                    b * factors[4 * (c % TABLE_CHUNKS) + 1], SIGNS[1]
                )
                second = _signed(a * factors[4 * (c % TABLE_CHUNKS) + 2], SIGNS[2]) + _signed(
                    b * factors[4 * (c % TABLE_CHUNKS) + 3], SIGNS[3]
                )
            else:
                first = a
                second = b
            word = _rounded(first, second, dtype, NATIVE)
            inside = heads[c] if EVEN else heads[c] & (slot < num_slots)
            # What is the same for all threads is added first: it stays out of their registers.
            if ROTATION != 2:
                tl.store(out_run + (step * run + c * CHUNK * heads_apart), word, mask=inside)
            else:
                bits = out_run + (step * run + c * CHUNK * heads_apart)
                tl.store(bits, (word & 0xFFFF).to(tl.uint16), mask=inside)
                tl.store(bits + HALF, (word >> 16).to(tl.uint16), mask=inside)
            if SUMS:
                # Of the values as they are stored, as a later sum over the tiles would be.
                added = added + (sums[2 * c] + _part(word, dtype, 0), sums[2 * c + 1] + _part(word, dtype, 1))
            else:
                added = added + (sums[2 * c], sums[2 * c + 1])
        sums = added
        token = next_token
    if SUMS:
        for c in tl.static_range(CHUNKS):
            heads_out = group.to(tl.int64) * (CHUNK * CHUNKS) + c * CHUNK + tl.arange(0, CHUNK)[:, None]
            pair_out = tl.arange(0, HALF)[None, :]
            out = tile_sums_ptr + ((batch * HEADS + heads_out) * spans + span) * D
            inside_sums = (heads_out < HEADS) & (pair_out < HALF)
            low_out = (1 if ROTATION == 2 else 2) * pair_out
            high_out = low_out + (HALF if ROTATION == 2 else 1)
            tl.store(out + low_out, tl.sum(sums[2 * c], 0), mask=inside_sums)
            tl.store(out + high_out, tl.sum(sums[2 * c + 1], 0), mask=inside_sums)


# Elements of a step: as many loads as a program of 4 warps can have under way without spilling.
_STEP_ELEMENTS = 3072
_THREAD_ELEMENTS = 24
_MAX_CHUNKS = 8


def prologue_config(norm: str, heads: int, head_dim: int) -> PrologueConfig:
    """The configuration for a problem."""
    if norm == "none":
        return PrologueConfig(64, 64, 1, 1, 4)
    chunk = min(heads & -heads, 16)
    while -(-heads // chunk) > _MAX_CHUNKS:
        chunk *= 2
    rows = 1
    while rows < 16 and 2 * rows * heads * head_dim <= _STEP_ELEMENTS:
        rows *= 2
    num_warps = 4
    while num_warps < 16 and num_warps * 32 * _THREAD_ELEMENTS < rows * heads * head_dim:
        num_warps *= 2
    # Two steps in shared memory, one where a step is too large for devices with 99 KB.
    ahead = 3 if rows * heads * head_dim <= 16384 else 2
    return PrologueConfig(64, rows, chunk, -(-heads // chunk), num_warps, ahead, in_shared=True)


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
    norm: str,
    divisor: float,
    eps: float,
    block_size: int,
    tiled: torch.Tensor,
    square_sums: torch.Tensor,
    tile_sums: torch.Tensor,
    config: PrologueConfig | None = None,
) -> None:
    """Fill `tiled`, `square_sums` and `tile_sums`; arguments as those of `vsa::norm_rope_tile`.

    Args:
        x: bf16 or fp16; D is a power of two, 32 to 256.
        tiled: `[B, H, S_pad, D]` contiguous, the dtype of x, written everywhere.
        square_sums: `[B, S]` fp32 contiguous, `[B, S, H]` with norm "head", `[0]` with "none".
        tile_sums: `[B, H, S_pad / block_size, D]` fp32 contiguous, `[0]` with block_size 0.
        config: how the work is cut; by default what `prologue_config` says.
    """
    batch, num_tokens, heads, head_dim = sizes
    num_slots = slot_token.shape[0]
    if tiled.numel() == 0:
        return
    if config is None:
        config = prologue_config(norm, heads, head_dim)
    if norm == "none":
        weight = None
    half = head_dim // 2
    # Divided here and not in the kernel, where a quotient would no longer be known to be a multiple of 16 bytes.
    apart = half if rotation == "half" else 1
    x_apart, x_index = _in_words(x, x_index) if apart == 1 else (apart, x_index)
    weight_apart = apart
    if weight is not None and apart == 1:
        weight_apart, weight_index = _in_words(weight, weight_index)
    per_head = any(table_index[5 * i + 2] != 0 for i in range(len(tables)))
    tables, table_index = _distinct(tables, table_index)
    parts = [-1] * len(tables)
    if config.wide_tables:
        parts, table_index = _table_words(tables, table_index, sizes)
    groups = -(-heads // (config.chunk * config.chunks))
    spans = -(-num_slots // config.span)
    sums = tile_sums
    parts_of_block = block_size // config.span if block_size else 1
    if parts_of_block > 1:
        sums = tile_sums.new_empty(batch, heads, spans, head_dim)
    with on_device_of(x):
        _norm_rope_tile_kernel[(batch * spans * groups,)](
            x,
            x if weight is None else weight,
            tuple(tables) or (x,),
            slot_token,
            tiled,
            square_sums,
            sums,
            num_slots,
            num_tokens,
            tuple(x_index),
            tuple(weight_index) if weight is not None else (0, 0),
            tuple(table_index) or (0,),
            divisor,
            eps,
            HEADS=heads,
            HALF=half,
            SPAN=config.span,
            ROWS=config.rows,
            CHUNK=config.chunk,
            CHUNKS=config.chunks,
            EVEN=num_slots % config.span == 0,
            NORM=_NORMS[norm],
            ROTATION=_ROTATIONS[rotation],
            X_APART=x_apart,
            HAS_WEIGHT=weight is not None,
            WEIGHT_APART=weight_apart,
            TABLES=len(tables),
            TABLE_PARTS=tuple(parts) or (-1,),
            TABLES_PER_HEAD=per_head,
            SIGNS=tuple(signs) or (1.0,),
            SUMS=block_size != 0,
            STAGES=config.ahead if config.in_shared else 1,
            IN_REGISTERS=config.ahead > 1 and not config.in_shared,
            KEEP_WEIGHT=config.keep_weight,
            HINTS=config.hints,
            NATIVE=x.is_cuda,
            num_warps=config.num_warps,
            **({} if config.max_registers is None else {"maxnreg": config.max_registers}),
        )
    if parts_of_block > 1:
        torch.sum(sums.unflatten(2, (-1, parts_of_block)), 3, out=tile_sums)


def _in_words(x: torch.Tensor, index: Sequence[int]) -> tuple[int, Sequence[int]]:
    """(0, the index in words) where pairs of elements of x are words, else (1, the index)."""
    if x.data_ptr() % (2 * x.element_size()) != 0 or any(value % 2 != 0 for value in index):
        return 1, index
    return 0, [value // 2 for value in index]


def _distinct(tables: Sequence[torch.Tensor], index: Sequence[int]) -> tuple[Sequence[torch.Tensor], Sequence[int]]:
    """The first two of four tables, where the others are these swapped: (cos, sin, sin, cos)."""
    if len(tables) == 4 and all(
        tables[i].data_ptr() == tables[j].data_ptr()
        and tables[i].dtype == tables[j].dtype
        and list(index[5 * i : 5 * i + 5]) == list(index[5 * j : 5 * j + 5])
        for i, j in ((0, 3), (1, 2))
    ):
        return tables[:2], index[:10]
    return tables, index


def _table_words(
    tables: Sequence[torch.Tensor], index: Sequence[int], sizes: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Of every table, which half of a word is meant, or -1 where it is read by elements; and the index in those units.

    A table whose pairs are two elements apart is read with the elements in between: 16 bytes per load instead of 4.
    """
    parts, places = [], []
    extents = (*sizes[:3], sizes[3] // 2)
    for i, table in enumerate(tables):
        strides, offset = list(index[5 * i : 5 * i + 4]), index[5 * i + 4]
        part = offset % 2
        last = offset - part + sum((extent - 1) * stride for extent, stride in zip(extents, strides, strict=True)) + 1
        itemsize = table.element_size()
        known = table.untyped_storage().nbytes() // itemsize - table.storage_offset()
        whole_words = table.data_ptr() % (2 * itemsize) == 0 and all(stride % 2 == 0 for stride in strides)
        if strides[3] == 2 and itemsize in (2, 4) and whole_words and last < known:
            parts.append(part)
            places += [*(stride // 2 for stride in strides), offset // 2]
        else:
            parts.append(-1)
            places += [*strides, offset]
    return parts, places
