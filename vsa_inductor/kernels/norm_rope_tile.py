"""RMSNorm, rotary embedding, tile order and tile sums of q, k and v in one launch, one pass over their rows.

    xs     each [B, S, H, D] by strides, last 1, bf16 or fp16    tables [B, S, H, D / 2] by strides
    tiled  each [B, H, S_pad, D] contiguous                       square_sums [B, S], [B, S, H] or [0] fp32
    tile_sums  each [B, H, N, D] or [0] fp32

Normed operands (q, k): a program owns a span of slots and all heads. It walks the slots that have a token `rows` at a
time:

    token of a slot -> x, tables (steps ahead, waiting in shared memory) -> squares -> rstd, into the tables
        -> weight -> rotation -> rounded pairs -> one run of D per slot and head
                                               -> sums of a block, in registers

and writes zeros to the slots behind. Plain operands (v): a program owns a span of slots and one head.

    programs    q k v..v   q k v..v   ...   v v v ...
                tile 0     tile 1           what is left of v

The operands of a tile stand next to each other, so that the tables of its tokens come from memory once. Programs of
plain operands are short: they fill the end of the launch, when long ones no longer come out even.

Heads are cut in chunks of a power of two, so that 12 or 40 heads fill every lane: a tile of the next power of two
leaves a quarter and more of them idle. Pairs travel as words, so that a thread loads and stores 16 bytes at a time;
values of tables that stand next to one that is not needed travel with it for the same reason. Every sum is made in a
fixed order, by one program or from the parts of a block.
"""

# In the language of kernels tuples grow by addition only, to other types than they began with.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment,var-annotated"

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from vsa_inductor.kernels._pairs import (
    chosen,
    chosen_index,
    distinct_tables,
    in_words,
    load_words,
    part,
    rounded,
    signed,
    store_sums,
    store_words,
    table_words,
    words,
)
from vsa_inductor.kernels.configs import on_device_of

_ROTATIONS = {"none": 0, "interleaved": 1, "half": 2}
_NORMS = {"none": 0, "head": 1, "all": 2}
# Slots of a program: with blocks of 64 the sums of a block stay in one program.
_SPAN = 64


class PrologueConfig(NamedTuple):
    """How the work is cut.

    Attributes:
        rows: slots of a step of a normed operand; divides 64.
        chunk: heads of one tensor in the kernel, a power of two.
        num_warps: warps of a program, of every operand.
        num_stages: steps under way, in shared memory; 1: none but the step's own, by way of registers.
        plain_rows: slots of a step of a plain operand; divides 64.
        beside: programs of plain operands that follow those of the normed ones of each tile; the others come last.
        max_registers: cap per thread, to fit one more program on a multiprocessor; None leaves it to the compiler.
    """

    rows: int
    chunk: int
    num_warps: int
    num_stages: int = 4
    plain_rows: int = 16
    beside: int = 0
    max_registers: int | None = None


@triton.jit
def _factor(raw, tables, i: tl.constexpr, c: tl.constexpr, COUNT: tl.constexpr, PARTS: tl.constexpr):
    """Table `i` of the four of a pair's rotation; with two tables, the last two are the first two swapped."""
    t: tl.constexpr = i if COUNT == 4 else (0 if i == 0 or i == 3 else 1)
    if PARTS[t] >= 0:
        return part(raw[c * COUNT + t], tables[t].dtype.element_ty, PARTS[t])
    else:
        return raw[c * COUNT + t].to(tl.float32)


@triton.jit
def _rotated(a, b, factors, FIRST: tl.constexpr, SIGNS: tl.constexpr):
    """The rotation of pairs by the four factors from FIRST on."""
    # Signs on products and not on tables: a table handed round with both signs would be handed round twice.
    first = signed(a * factors[FIRST], SIGNS[0]) + signed(b * factors[FIRST + 1], SIGNS[1])
    second = signed(a * factors[FIRST + 2], SIGNS[2]) + signed(b * factors[FIRST + 3], SIGNS[3])
    return first, second


@triton.jit
def _normed_span(
    x_ptr, weight_ptr, tables, slot_token_ptr, tiled_ptr, square_sums_ptr, tile_sums_ptr, num_slots, num_tokens,
    x_index, weight_index, table_index, reciprocal, eps, batch, span, spans, HEADS: tl.constexpr, HALF: tl.constexpr,
    SPAN: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr,
    NORM: tl.constexpr, ROTATION: tl.constexpr, X_APART: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    WEIGHT_APART: tl.constexpr, TABLES: tl.constexpr, TABLE_PARTS: tl.constexpr, TABLES_PER_HEAD: tl.constexpr,
    SIGNS: tl.constexpr, SUMS: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """One span of slots of one operand: norm, rotation, tiles and sums of all heads."""
    CHUNKS: tl.constexpr = (HEADS + CHUNK - 1) // CHUNK
    TABLE_CHUNKS: tl.constexpr = CHUNKS if TABLES_PER_HEAD else 1
    HALVES: tl.constexpr = ROTATION == 2
    # A norm over all heads goes into the tables that they share, once for all of them.
    IN_TABLES: tl.constexpr = NORM == 2 and ROTATION != 0 and not TABLES_PER_HEAD
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    row = tl.arange(0, ROWS)[:, None, None]
    pair = tl.arange(0, HALF)[None, None, :]
    head = tl.arange(0, CHUNK)[None, :, None].to(tl.int64)
    # Of the shape of what a step holds of one chunk.
    whole = (row >= 0) & (head >= 0) & (pair >= 0)
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
    heads = ()
    sums = ()
    weight = ()
    for c in tl.static_range(CHUNKS):
        heads = heads + ((whole & (head + c * CHUNK < HEADS)) if (c + 1) * CHUNK > HEADS else whole,)
        sums = sums + (tl.zeros([ROWS, CHUNK, HALF], tl.float32), tl.zeros([ROWS, CHUNK, HALF], tl.float32))
        if HAS_WEIGHT:
            weight = weight + (load_words(weight_ptr, w_place + c * CHUNK * weight_index[0], heads[c], WEIGHT_APART),)

    first_slot = span * SPAN + row
    # In words, or in elements where the two of a pair are stored apart.
    run: tl.constexpr = 2 * HALF if HALVES else HALF
    heads_apart = num_slots.to(tl.int64) * run
    out = tiled_ptr.to(tl.pointer_type(tl.uint16)) if HALVES else words(tiled_ptr)
    out += batch * HEADS * heads_apart + head * heads_apart + first_slot * run + pair
    # Tokens come first in a block: nothing is read or computed for the slots behind the last one.
    place = tl.arange(0, SPAN)
    held = tl.load(slot_token_ptr + (span * SPAN + place), mask=span * SPAN + place < num_slots, other=-1)
    used = tl.max(tl.where(held >= 0, place + 1, 0), 0)
    for step in tl.range(0, used, ROWS, num_stages=STAGES):
        slot = first_slot + step
        if EVEN:
            token = tl.load(slot_token_ptr + slot)
        else:
            token = tl.load(slot_token_ptr + slot, mask=slot < num_slots, other=-1)
        present = token >= 0
        at = token.to(tl.int64)
        t_raw = ()
        for c in tl.static_range(TABLE_CHUNKS):
            mask = (heads[c] & present) if TABLES_PER_HEAD else present
            for i in tl.static_range(TABLES):
                here = table_places[i] + at * table_index[5 * i + 1] + c * CHUNK * table_index[5 * i + 2]
                table = words(tables[i]) if TABLE_PARTS[i] >= 0 else tables[i]
                t_raw = t_raw + (tl.load(table + here, mask=mask, other=0),)
        values = ()
        squares = tl.zeros([ROWS, CHUNK, HALF], tl.float32)
        for c in tl.static_range(CHUNKS):
            here = x_place + at * x_index[1] + c * CHUNK * x_index[2]
            word = load_words(x_ptr, here, heads[c] & present, X_APART)
            a, b = part(word, dtype, 0), part(word, dtype, 1)
            values = values + (a, b)
            if NORM == 2:
                squares = tl.math.fma(a, a, tl.math.fma(b, b, squares))
        # rstd of an empty slot is 0 and not rsqrt(eps), which may be infinite.
        rstd = tl.where(present, 1.0, 0.0)
        if NORM == 2:
            total = tl.sum(tl.sum(squares, 2, keep_dims=True), 1, keep_dims=True)
            tl.store(square_sums_ptr + batch * num_tokens + token, total, mask=present)
            rstd = tl.where(present, tl.math.rsqrt(total * reciprocal + eps), 0.0)
        factors = ()
        for c in tl.static_range(TABLE_CHUNKS):
            for i in tl.static_range(4 if ROTATION != 0 else 0):
                factor = _factor(t_raw, tables, i, c, TABLES, TABLE_PARTS)
                factors = factors + ((factor * rstd) if IN_TABLES else factor,)
        added = ()
        for c in tl.static_range(CHUNKS):
            a, b = values[2 * c], values[2 * c + 1]
            if HAS_WEIGHT:
                a *= part(weight[c], weight_ptr.dtype.element_ty, 0)
                b *= part(weight[c], weight_ptr.dtype.element_ty, 1)
            if NORM == 1:
                total = tl.sum(values[2 * c] * values[2 * c] + values[2 * c + 1] * values[2 * c + 1], 2, keep_dims=True)
                heads_of_row = square_sums_ptr + (batch * num_tokens + token) * HEADS + (head + c * CHUNK)
                tl.store(heads_of_row, total, mask=present & (head + c * CHUNK < HEADS))
                rstd = tl.where(present, tl.math.rsqrt(total * reciprocal + eps), 0.0)
            if NORM != 0 and not IN_TABLES:
                a *= rstd
                b *= rstd
            if ROTATION != 0:
                a, b = _rotated(a, b, factors, 4 * (c % TABLE_CHUNKS), SIGNS)
            word = rounded(a, b, dtype, NATIVE)
            # What is the same for all threads is added first: it stays out of their registers.
            inside = heads[c] if EVEN else heads[c] & (slot < num_slots)
            store_words(out + (step * run + c * CHUNK * heads_apart), word, inside, HALF, HALVES)
            if SUMS:
                # Of the values as they are stored, as a later sum over the tiles would be.
                added = added + (sums[2 * c] + part(word, dtype, 0), sums[2 * c + 1] + part(word, dtype, 1))
            else:
                added = added + (sums[2 * c], sums[2 * c + 1])
        sums = added
    nothing = tl.zeros([ROWS, CHUNK, HALF], tl.uint32)
    for step in tl.range((used + ROWS - 1) // ROWS * ROWS, SPAN, ROWS, num_stages=1):
        for c in tl.static_range(CHUNKS):
            inside = heads[c] if EVEN else heads[c] & (first_slot + step < num_slots)
            store_words(out + (step * run + c * CHUNK * heads_apart), nothing, inside, HALF, HALVES)
    if SUMS:
        for c in tl.static_range(CHUNKS):
            head_out = tl.arange(0, CHUNK)[:, None] + c * CHUNK
            sums_out = tile_sums_ptr + ((batch * HEADS + head_out) * spans + span) * (2 * HALF)
            store_sums(sums_out, tl.sum(sums[2 * c], 0), tl.sum(sums[2 * c + 1], 0), head_out < HEADS, HALF, HALVES)


@triton.jit
def _plain_span(
    x_ptr, slot_token_ptr, tiled_ptr, tile_sums_ptr, num_slots, x_index, batch, span, spans, head,
    HEADS: tl.constexpr, HALF: tl.constexpr, SPAN: tl.constexpr, ROWS: tl.constexpr, EVEN: tl.constexpr,
    X_APART: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """One span of slots of one head: tiles and sums."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    row = tl.arange(0, ROWS)[:, None]
    pair = tl.arange(0, HALF)[None, :]
    first_slot = span * SPAN + row
    x_place = x_index[3] + batch * x_index[0] + head * x_index[2] + (2 if X_APART == 1 else 1) * pair
    out = words(tiled_ptr) + ((batch * HEADS + head) * num_slots + first_slot) * HALF + pair
    low = tl.zeros([ROWS, HALF], tl.float32)
    high = tl.zeros([ROWS, HALF], tl.float32)
    tokens = ()
    for step in tl.static_range(SPAN // ROWS):
        slot = first_slot + step * ROWS
        tokens = tokens + (tl.load(slot_token_ptr + slot, mask=slot < num_slots, other=-1),)
    for step in tl.static_range(SPAN // ROWS):
        token = tokens[step]
        word = load_words(x_ptr, x_place + token.to(tl.int64) * x_index[1], (token >= 0) & (pair >= 0), X_APART)
        inside = (pair >= 0) if EVEN else (pair >= 0) & (first_slot + step * ROWS < num_slots)
        tl.store(out + step * ROWS * HALF, word, mask=inside & (row >= 0))
        low += part(word, dtype, 0)
        high += part(word, dtype, 1)
    if SUMS:
        sums_out = tile_sums_ptr + ((batch * HEADS + head) * spans + span) * (2 * HALF) + tl.zeros([1, 1], tl.int32)
        first, second = tl.sum(low, 0, keep_dims=True), tl.sum(high, 0, keep_dims=True)
        store_sums(sums_out, first, second, tl.full([1, 1], True, tl.int1), HALF, False)


# num_tokens is only ever added to the number of a token: nothing is gained by compiling again where it is a multiple
# of 16.
@triton.jit(do_not_specialize=["num_tokens", "num_tiles"])
def _norm_rope_tile_kernel(
    xs, weights, tables, slot_token_ptr, tiled, square_sums, tile_sums, num_slots, num_tokens, num_tiles, x_index,
    weight_index, table_index, reciprocal, eps, NORMED: tl.constexpr, PLAIN: tl.constexpr, BESIDE: tl.constexpr,
    HEADS: tl.constexpr, HALF: tl.constexpr, SPAN: tl.constexpr, ROWS: tl.constexpr,
    CHUNK: tl.constexpr, PLAIN_ROWS: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr, NORM: tl.constexpr,
    ROTATION: tl.constexpr, X_APART: tl.constexpr, PLAIN_APART: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    WEIGHT_APART: tl.constexpr, TABLES: tl.constexpr, TABLE_PARTS: tl.constexpr, TABLES_PER_HEAD: tl.constexpr,
    SIGNS: tl.constexpr, SUMS: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    # Plain operands alone form no groups: anything to divide by.
    GROUP: tl.constexpr = NORMED + BESIDE if NORMED > 0 else 1
    pid = tl.program_id(0)
    spans = tl.cdiv(num_slots, SPAN)
    tile, member = pid // GROUP, pid % GROUP
    grouped = pid < num_tiles * (NORMED + BESIDE)
    if grouped & (member < NORMED):
        if NORMED > 0:
            weight = chosen(weights, member, NORMED if HAS_WEIGHT else 1)
            weight_at = chosen_index(weight_index, member, NORMED if HAS_WEIGHT else 1, 0, 2)
            _normed_span(
                chosen(xs, member, NORMED), weight, tables, slot_token_ptr, chosen(tiled, member, NORMED),
                chosen(square_sums, member, NORMED), chosen(tile_sums, member, NORMED), num_slots, num_tokens,
                chosen_index(x_index, member, NORMED, 0, 4), weight_at, table_index, reciprocal, eps,
                (tile // spans).to(tl.int64), tile % spans, spans, HEADS, HALF, SPAN, ROWS, CHUNK, STAGES, EVEN, NORM,
                ROTATION, X_APART, HAS_WEIGHT, WEIGHT_APART, TABLES, TABLE_PARTS, TABLES_PER_HEAD, SIGNS, SUMS, NATIVE,
            )  # fmt: skip
    elif PLAIN > 0:
        # Heads are the fastest axis: neighbours read the same rows.
        plain = tl.where(grouped, tile * BESIDE + member - NORMED, pid - num_tiles * NORMED)
        head = plain % HEADS
        tile = plain // HEADS % num_tiles
        which = plain // HEADS // num_tiles
        _plain_span(
            chosen(xs[NORMED:], which, PLAIN), slot_token_ptr, chosen(tiled[NORMED:], which, PLAIN),
            chosen(tile_sums[NORMED:], which, PLAIN), num_slots, chosen_index(x_index, which, PLAIN, 4 * NORMED, 4),
            (tile // spans).to(tl.int64), tile % spans, spans, head.to(tl.int64), HEADS, HALF, SPAN, PLAIN_ROWS, EVEN,
            PLAIN_APART, SUMS,
        )  # fmt: skip


# Elements of a step: enough for a program of 2 warps to have 3 KB per step under way.
_STEP_ELEMENTS = 1536
# Each takes a register of its own for its sum, and about as many for x and the weight.
_THREAD_ELEMENTS = 40
_MAX_CHUNKS = 8
# Past so many, 12 warps fit a multiprocessor only under a cap: 1.18 of the floor instead of 1.27 at 40 heads. With 24
# the compiler needs less, and under the cap would use all of it.
_UNCAPPED_ELEMENTS, _CAP = 32, 168


def prologue_config(heads: int, head_dim: int) -> PrologueConfig:
    """The configuration for a problem.

    Measured at 12 heads (2 warps, 24 elements to a thread: 1.149 and 1.125 of the floor at 480p and 720p) and 40 heads
    (4 warps, 40 elements: 1.136 and 1.111), D 128. Others get as many warps as their elements need.
    """
    chunk = min(heads & -heads, 16)
    while -(-heads // chunk) > _MAX_CHUNKS:
        chunk *= 2
    rows = 1
    while rows < 16 and 2 * rows * heads * head_dim <= _STEP_ELEMENTS:
        rows *= 2
    step = rows * heads * head_dim
    num_warps = 2
    while num_warps < 16 and num_warps * 32 * _THREAD_ELEMENTS < step:
        num_warps *= 2
    # Of few, large programs each has one step more under way; the largest wait in the 99 KB that every device has.
    num_stages = 3 if num_warps == 2 else 4 if step <= 8192 else 3 if step <= 16384 else 2
    # v beside q and k keeps memory busy where few programs compute at once (40 heads: 1.18 to 1.14, 1.11); eight small
    # ones do that by themselves, and lack v at the end of the launch (12 heads at 480p: 1.15 to 1.23).
    beside = 0 if num_warps == 2 else heads
    max_registers = _CAP if num_warps <= 4 and step > 32 * num_warps * _UNCAPPED_ELEMENTS else None
    return PrologueConfig(rows, chunk, num_warps, num_stages, min(8 * num_warps, 32), beside, max_registers)


def launch_norm_rope_tile(
    xs: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    tables: Sequence[torch.Tensor],
    slot_token: torch.Tensor,
    x_index: Sequence[int],
    weight_index: Sequence[int],
    table_index: Sequence[int],
    signs: Sequence[float],
    sizes: Sequence[int],
    rotation: str,
    norm: str,
    num_plain: int,
    divisor: float,
    eps: float,
    block_size: int,
    tiled: Sequence[torch.Tensor],
    square_sums: Sequence[torch.Tensor],
    tile_sums: Sequence[torch.Tensor],
    config: PrologueConfig | None = None,
) -> None:
    """Fill `tiled`, `square_sums` and `tile_sums`; arguments as those of `vsa::norm_rope_tile`.

    Args:
        xs: bf16 or fp16; D is a power of two, 32 to 256.
        tiled: `[B, H, S_pad, D]` contiguous, the dtype of x, written everywhere.
        square_sums: `[B, S]` fp32 contiguous, `[B, S, H]` with norm "head", `[0]` with "none" and of plain operands.
        tile_sums: `[B, H, S_pad / block_size, D]` fp32 contiguous, `[0]` with block_size 0.
        config: how the work is cut; by default what `prologue_config` says.
    """
    if tiled[0].numel() == 0:
        return
    if norm == "none":
        weights, weight_index = (), ()
        if rotation == "none":
            num_plain = len(xs)
    batch, num_tokens, heads, head_dim = sizes
    num_slots = slot_token.shape[0]
    num_normed = len(xs) - num_plain
    half = head_dim // 2
    apart = half if rotation == "half" else 1
    words_of = [in_words(x, x_index[4 * i : 4 * i + 4], apart if i < num_normed else 1) for i, x in enumerate(xs)]
    weight_words = [in_words(w, weight_index[2 * i : 2 * i + 2], apart) for i, w in enumerate(weights)]
    same = (
        {found[0] for found in words_of[:num_normed]},
        {found[0] for found in words_of[num_normed:]},
        {(found[0], weight.dtype) for found, weight in zip(weight_words, weights, strict=True)},
    )
    if any(len(found) > 1 for found in same):
        # One kernel reads all operands in one way.
        for i in range(len(xs)):
            launch_norm_rope_tile(
                xs[i : i + 1], weights[i : i + 1], tables, slot_token, x_index[4 * i : 4 * i + 4],
                weight_index[2 * i : 2 * i + 2], table_index, signs, sizes, *(rotation, norm, 0)
                if i < num_normed else ("none", "none", 1), divisor, eps, block_size, tiled[i : i + 1],
                square_sums[i : i + 1], tile_sums[i : i + 1], config,
            )  # fmt: skip
        return
    config = prologue_config(heads, head_dim) if config is None else config
    per_head = any(table_index[5 * i + 2] != 0 for i in range(len(tables)))
    tables, table_index = distinct_tables(tables, table_index)
    parts, table_index = table_words(tables, table_index, sizes)
    spans = -(-num_slots // _SPAN)
    tiles = batch * spans
    sums: Sequence[torch.Tensor] = tile_sums
    parts_of_block = block_size // _SPAN
    if parts_of_block > 1:
        sums = [x.new_empty(batch, heads, spans, head_dim) for x in tile_sums]
    with on_device_of(xs[0]):
        _norm_rope_tile_kernel[(tiles * (num_normed + num_plain * heads),)](
            tuple(xs),
            tuple(weights) or (xs[0],),
            tuple(tables) or (xs[0],),
            slot_token,
            tuple(tiled),
            tuple(square_sums),
            tuple(sums),
            num_slots,
            num_tokens,
            tiles,
            tuple(value for found in words_of for value in found[1]),
            tuple(value for found in weight_words for value in found[1]) or (0, 0),
            tuple(table_index) or (0,),
            1.0 / divisor,
            eps,
            NORMED=num_normed,
            PLAIN=num_plain,
            BESIDE=min(config.beside, num_plain * heads) if num_normed else 0,
            HEADS=heads,
            HALF=half,
            SPAN=_SPAN,
            ROWS=config.rows,
            CHUNK=config.chunk,
            PLAIN_ROWS=config.plain_rows,
            STAGES=config.num_stages,
            EVEN=num_slots % _SPAN == 0,
            NORM=_NORMS[norm],
            ROTATION=_ROTATIONS[rotation],
            X_APART=words_of[0][0],
            PLAIN_APART=words_of[-1][0],
            HAS_WEIGHT=bool(weights),
            WEIGHT_APART=weight_words[0][0] if weights else 0,
            TABLES=len(tables),
            TABLE_PARTS=tuple(parts) or (-1,),
            TABLES_PER_HEAD=per_head,
            SIGNS=tuple(signs) or (1.0,),
            SUMS=block_size != 0,
            NATIVE=xs[0].is_cuda,
            num_warps=config.num_warps,
            **({} if config.max_registers is None else {"maxnreg": config.max_registers}),
        )
    if parts_of_block > 1:
        for parts_of_sums, out in zip(sums, tile_sums, strict=True):
            torch.sum(parts_of_sums.unflatten(2, (-1, parts_of_block)), 3, out=out)
