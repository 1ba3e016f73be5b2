"""Gradient through tile order, rotary embedding and RMSNorm in one pass: whole rows, in tile order.

    dtiled [B, H, S_pad, D] contiguous    dtile_sums [B, H, N, D] fp32 contiguous, added to every row of its tile
    x [B, S, H, D], rstd [B, S] or [B, S, H], weight [H, D], tables [B, S, H, D / 2] by strides
    dx [B, S, H, D] contiguous            partials [programs, H, D] fp32, summed to dweight by a second kernel

A program takes runs of slots, `programs` runs apart, and of a run one row after another up to its last token. The row
of x and that of the gradient stay in registers, CHUNK heads to a tensor, between the sum over the row and the second
use; nothing is read twice. Pairs are split and joined in registers: every access of a row is 16 bytes per thread.

        slot_token --> row of dtiled (+ row of dtile_sums) --> turned back by the tables = u
                   --> row of x, rstd --+-- u * x * rstd, summed over rows --------------> partials
                                        +-- u * weight * x, summed over the row --> dx
"""

# Tuples that grow in unrolled loops have one type to mypy, and Triton reads no annotations there.
# mypy: disable-error-code="assignment, var-annotated"

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from vsa_inductor.kernels._pairs import distinct_tables, signed
from vsa_inductor.kernels.configs import on_device_of

_ROTATIONS = {"none": 0, "interleaved": 1, "half": 2}
_NORMS = {"none": 0, "all": 1, "head": 2}
# Of the sum of partials: 64 bytes of every row, and few steps, as each waits for memory.
_SUM_ROWS, _SUM_COLS = 512, 16


class RowConfig(NamedTuple):
    """How rows are given to programs.

    Attributes:
        chunk: heads per tensor, a power of two; 16 bytes to a thread where chunk * head_dim is 256 * num_warps.
        run: slots that a program takes in order; divides every block size.
        num_warps: warps per program.
        programs: per multiprocessor; None gives every run a program of its own.
        max_registers: cap per thread; None leaves it to the compiler.
    """

    chunk: int
    run: int
    num_warps: int
    programs: int | None = None
    max_registers: int | None = None


@triton.jit
def _load_pairs(rows, mask, HALF: tl.constexpr, HALVES: tl.constexpr):
    """Both elements of every pair of the rows that begin at the pointers `rows` [C, 1]."""
    if HALVES:
        pair = tl.arange(0, HALF)[None, :]
        return tl.load(rows + pair, mask=mask), tl.load(rows + HALF + pair, mask=mask)
    else:
        values = tl.load(rows + tl.arange(0, 2 * HALF)[None, :], mask=mask)
        return tl.split(values.reshape(values.shape[0], HALF, 2))


@triton.jit
def _store_pairs(rows, first, second, mask, HALF: tl.constexpr, HALVES: tl.constexpr):
    dtype = rows.dtype.element_ty
    if HALVES:
        pair = tl.arange(0, HALF)[None, :]
        tl.store(rows + pair, first.to(dtype), mask=mask)
        tl.store(rows + HALF + pair, second.to(dtype), mask=mask)
    else:
        values = tl.join(first, second).reshape(first.shape[0], 2 * HALF)
        tl.store(rows + tl.arange(0, 2 * HALF)[None, :], values.to(dtype), mask=mask)


@triton.jit
def _table(ptr, rows, stride_i, mask, HALF: tl.constexpr, STRIDE: tl.constexpr, ODD: tl.constexpr):
    """The factor of every pair, from the offsets `rows` [C, 1]; in the layout of the pairs where STRIDE is known."""
    if STRIDE == 2:
        # Every value twice, as Wan keeps them: whole rows, of which one of two is used.
        values = tl.load(ptr + rows + tl.arange(0, 2 * HALF)[None, :], mask=mask)
        even, odd = tl.split(values.reshape(values.shape[0], HALF, 2))
        factor = odd if ODD else even
    elif STRIDE == 1:
        factor = tl.load(ptr + rows + tl.arange(0, HALF)[None, :], mask=mask)
    else:
        factor = tl.load(ptr + rows + tl.arange(0, HALF)[None, :] * stride_i, mask=mask)
    return factor.to(tl.float32)


@triton.jit
def _turned(first, second, t0, t1, t2, t3, SIGNS: tl.constexpr):
    u1 = signed(first * t0, SIGNS[0]) + signed(second * t1, SIGNS[1])
    u2 = signed(first * t2, SIGNS[2]) + signed(second * t3, SIGNS[3])
    return u1, u2


# Sizes that no address of 16 bytes depends on: one compilation for all videos.
@triton.jit(do_not_specialize=["num_slots", "num_tokens", "num_tiles", "runs_of_batch", "num_runs", "r_b"])
def _norm_rope_tile_backward_kernel(
    dtiled_ptr,
    dtile_sums_ptr,
    x_ptr,
    rstd_ptr,
    weight_ptr,
    table0_ptr,
    table1_ptr,
    table2_ptr,
    table3_ptr,
    slot_token_ptr,
    dx_ptr,
    partials_ptr,
    num_slots,
    num_tokens,
    num_tiles,
    runs_of_batch,
    num_runs,
    x_b,
    x_s,
    x_offset,
    r_b,
    r_s,
    r_h,
    r_offset,
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
    inverse_divisor,
    X_H: tl.constexpr,
    W_H: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    CHUNK: tl.constexpr,
    RUN: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_SUMS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    ROTATION: tl.constexpr,
    NORM: tl.constexpr,
    TABLES_PER_HEAD: tl.constexpr,
    SHARED_TABLES: tl.constexpr,
    TABLE_STRIDE: tl.constexpr,
    ODD: tl.constexpr,
    SIGNS: tl.constexpr,
    NEEDS_DX: tl.constexpr,
    NEEDS_DWEIGHT: tl.constexpr,
    PERSISTENT: tl.constexpr,
    WIDE: tl.constexpr,
):
    D: tl.constexpr = 2 * HALF
    CHUNKS: tl.constexpr = (HEADS + CHUNK - 1) // CHUNK
    HALVES: tl.constexpr = ROTATION == 2
    program = tl.program_id(0)
    lane = tl.arange(0, CHUNK)[:, None]
    accumulated = ()
    if NEEDS_DWEIGHT:
        for _ in tl.static_range(2 * CHUNKS):
            accumulated += (tl.zeros([CHUNK, HALF], tl.float32),)
    last = num_runs if PERSISTENT else program + 1
    for run in range(program, last, tl.num_programs(0)):
        batch = (run // runs_of_batch).to(tl.int64)
        first_slot = run % runs_of_batch * RUN
        # A tile's tokens come before its empty slots.
        count = tl.sum((tl.load(slot_token_ptr + first_slot + tl.arange(0, RUN)) >= 0).to(tl.int32), 0)
        for slot in range(first_slot, first_slot + count):
            token = tl.load(slot_token_ptr + slot).to(tl.int64)
            # Everything is asked for before anything is used.
            loaded_g = ()
            loaded_x = ()
            for c in tl.static_range(CHUNKS):
                head = c * CHUNK + lane
                mask = None if HEADS % CHUNK == 0 else head < HEADS
                # What all threads share is added first, and 64 bits only where needed: fewer registers.
                g_rows = dtiled_ptr + (batch * HEADS * num_slots + slot) * D
                if WIDE:
                    g_rows += head.to(tl.int64) * num_slots * D
                else:
                    g_rows += head * (num_slots * D)
                loaded_g += (_load_pairs(g_rows, mask, HALF, HALVES),)
                if NORM != 0:
                    x_rows = x_ptr + (x_offset + batch * x_b + token * x_s) + head * X_H
                    loaded_x += (_load_pairs(x_rows, mask, HALF, HALVES),)
            at0 = offset0 + batch * b0 + token * s0
            at1 = offset1 + batch * b1 + token * s1
            at2 = offset2 + batch * b2 + token * s2
            at3 = offset3 + batch * b3 + token * s3
            if ROTATION != 0 and not TABLES_PER_HEAD:
                t0 = _table(table0_ptr, at0 + lane * 0, i0, None, HALF, TABLE_STRIDE, ODD[0])
                t1 = _table(table1_ptr, at1 + lane * 0, i1, None, HALF, TABLE_STRIDE, ODD[1])
                if SHARED_TABLES:
                    t2 = t1
                    t3 = t0
                else:
                    t2 = _table(table2_ptr, at2 + lane * 0, i2, None, HALF, TABLE_STRIDE, ODD[2])
                    t3 = _table(table3_ptr, at3 + lane * 0, i3, None, HALF, TABLE_STRIDE, ODD[3])
            if NORM == 1:
                rstd = tl.load(rstd_ptr + (r_offset + batch * r_b + token * r_s)).to(tl.float32)

            held = ()
            sums = ()
            total = tl.zeros([CHUNK, HALF], tl.float32)
            dx_rows = dx_ptr + (batch * num_tokens + token) * (HEADS * D)
            for c in tl.static_range(CHUNKS):
                head = c * CHUNK + lane
                mask = None if HEADS % CHUNK == 0 else head < HEADS
                u1 = loaded_g[c][0].to(tl.float32)
                u2 = loaded_g[c][1].to(tl.float32)
                if HAS_SUMS:
                    sum_rows = dtile_sums_ptr + (batch * HEADS * num_tiles + slot // BLOCK_SIZE) * D
                    sum1, sum2 = _load_pairs(sum_rows + head * (num_tiles * D), mask, HALF, HALVES)
                    u1 += sum1
                    u2 += sum2
                if ROTATION != 0:
                    if TABLES_PER_HEAD:
                        t0 = _table(table0_ptr, at0 + head * h0, i0, mask, HALF, TABLE_STRIDE, ODD[0])
                        t1 = _table(table1_ptr, at1 + head * h1, i1, mask, HALF, TABLE_STRIDE, ODD[1])
                        t2 = _table(table2_ptr, at2 + head * h2, i2, mask, HALF, TABLE_STRIDE, ODD[2])
                        t3 = _table(table3_ptr, at3 + head * h3, i3, mask, HALF, TABLE_STRIDE, ODD[3])
                    u1, u2 = _turned(u1, u2, t0, t1, t2, t3, SIGNS)
                if NORM == 0:
                    _store_pairs(dx_rows + head * D, u1, u2, mask, HALF, HALVES)
                else:
                    x1 = loaded_x[c][0].to(tl.float32)
                    x2 = loaded_x[c][1].to(tl.float32)
                    if NORM == 2:
                        at = r_offset + batch * r_b + token * r_s + head * r_h
                        rstd = tl.load(rstd_ptr + at, mask=mask).to(tl.float32)
                    if NEEDS_DWEIGHT:
                        sums += (accumulated[2 * c] + u1 * (x1 * rstd), accumulated[2 * c + 1] + u2 * (x2 * rstd))
                    if NEEDS_DX:
                        if HAS_WEIGHT:
                            w1, w2 = _load_pairs(weight_ptr + w_offset + head * W_H, mask, HALF, HALVES)
                            u1 *= w1.to(tl.float32)
                            u2 *= w2.to(tl.float32)
                        if NORM == 1:
                            part = u1 * x1 + u2 * x2
                            total += part if HEADS % CHUNK == 0 else tl.where(mask, part, 0.0)
                            held += ((u1, u2, x1, x2),)
                        else:
                            dot = tl.sum(u1 * x1 + u2 * x2, 1)[:, None]
                            factor = rstd * rstd * rstd * inverse_divisor * dot
                            out1, out2 = rstd * u1 - factor * x1, rstd * u2 - factor * x2
                            _store_pairs(dx_rows + head * D, out1, out2, mask, HALF, HALVES)
            if NEEDS_DWEIGHT:
                accumulated = sums
            if NORM == 1 and NEEDS_DX:
                factor = rstd * rstd * rstd * inverse_divisor * tl.sum(tl.sum(total, 1), 0)
                for c in tl.static_range(CHUNKS):
                    head = c * CHUNK + lane
                    mask = None if HEADS % CHUNK == 0 else head < HEADS
                    u1, u2, x1, x2 = held[c]
                    out1, out2 = rstd * u1 - factor * x1, rstd * u2 - factor * x2
                    _store_pairs(dx_rows + head * D, out1, out2, mask, HALF, HALVES)

    if NEEDS_DWEIGHT:
        for c in tl.static_range(CHUNKS):
            head = c * CHUNK + lane
            rows = partials_ptr + (program.to(tl.int64) * HEADS + head) * D
            _store_pairs(rows, accumulated[2 * c], accumulated[2 * c + 1], head < HEADS, HALF, HALVES)


@triton.jit
def _sum_partials_kernel(
    partials_ptr, out_ptr, num_partials, width, ROWS: tl.constexpr, COLS: tl.constexpr, STEPS: tl.constexpr
):
    """[num_partials, width] -> [width]: COLS columns per program, ROWS rows under way at once."""
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    total = tl.zeros([ROWS, COLS], tl.float32)
    for step in tl.static_range(STEPS):
        rows = step * ROWS + tl.arange(0, ROWS)[:, None]
        total += tl.load(partials_ptr + rows * width + cols[None, :], mask=rows < num_partials, other=0.0)
    tl.store(out_ptr + cols, tl.sum(total, 0))


# Of a multiprocessor, and of a thread besides what it holds of a row: addresses, tables.
_REGISTERS, _OTHER_REGISTERS = 65536, 48
_MAX_CHUNKS = 5
# Programs per place on the device, at least: of the last that run, most places stand idle for half a program.
_ROUNDS = 3


def row_config(
    heads: int, head_dim: int, norm: str, needs_dweight: bool, num_slots: int, multiprocessors: int
) -> RowConfig:
    """The configuration for `num_slots` rows, of all batches, of `heads` heads of `head_dim`, a power of two.

    Few threads per row, each with as many 16 bytes as its registers hold: more programs then wait for memory at once.
    Registers are capped only where the programs of a multiprocessor are counted: elsewhere every cap was slower than
    none (720p: 1.29 and more for 1.26 at 12 heads, 1.21 and more for 1.15 at 40).
    """
    chunk = max(triton.next_power_of_2(triton.cdiv(heads, _MAX_CHUNKS)), 256 // head_dim)
    chunks = triton.cdiv(heads, chunk)
    num_warps = chunk * head_dim // 256
    # Two rows in fp32, and with dweight its sums; without a norm one.
    registers = _OTHER_REGISTERS + (24 if needs_dweight else 16) * chunks
    if norm == "none":
        registers = _OTHER_REGISTERS // 2 + 8 * chunks
    # 32 programs are the most that a multiprocessor takes.
    resident = max(1, min(32, _REGISTERS // (32 * num_warps * registers)))
    # Shorter where a row is, and where many small programs share all runs: the last of them leaves less idle.
    run = 4 if norm == "none" or (needs_dweight and num_warps <= 2) else 8
    while run > 1 and num_slots // run < _ROUNDS * resident * multiprocessors:
        run //= 2
    if not needs_dweight:
        return RowConfig(chunk, run, num_warps)
    return RowConfig(chunk, run, num_warps, resident, _REGISTERS // (32 * num_warps * resident) // 8 * 8)


def launch_norm_rope_tile_backward(
    dtiled: torch.Tensor,
    dtile_sums: torch.Tensor | None,
    x: torch.Tensor | None,
    rstd: torch.Tensor | None,
    weight: torch.Tensor | None,
    tables: Sequence[torch.Tensor],
    slot_token: torch.Tensor,
    x_index: Sequence[int],
    rstd_index: Sequence[int],
    weight_index: Sequence[int],
    table_index: Sequence[int],
    signs: Sequence[float],
    sizes: Sequence[int],
    rotation: str,
    norm: str,
    divisor: float,
    block_size: int,
    needs_dx: bool,
    needs_dweight: bool,
    dx: torch.Tensor,
    dweight: torch.Tensor,
    config: RowConfig | None = None,
) -> None:
    """Fill `dx` and `dweight`; arguments as those of `vsa::norm_rope_tile_backward`.

    Args:
        dtiled: `[B, H, S_pad, D]` bf16, fp16 or fp32, contiguous; D is a power of two, 32 to 256.
        dtile_sums: `[B, H, N, D]` fp32 contiguous or None.
        slot_token: the tokens of a block come before its empty slots, as a `TileLayout` has them.
        dx: `[B, S, H, D]` contiguous, written everywhere; `[0]` without `needs_dx`.
        dweight: `[H, D]` fp32, written everywhere; `[0]` without `needs_dweight`.
        config: in place of `row_config`'s.
    """
    batch, num_tokens, heads, head_dim = sizes
    num_slots = slot_token.shape[0]
    if dtiled.numel() == 0 or num_tokens == 0:
        dweight.zero_()
        return
    multiprocessors = _multiprocessors(dtiled)
    if config is None:
        config = row_config(heads, head_dim, norm, needs_dweight, batch * num_slots, multiprocessors)
    runs_of_batch = num_slots // config.run
    num_runs = batch * runs_of_batch
    programs = num_runs
    if config.programs is not None:
        # Odd: no program gets the same part of every tile, as the last parts are empty more often.
        programs = min(num_runs, (config.programs * multiprocessors - 1) | 1)
    partials = dtiled.new_empty((programs, heads, head_dim) if needs_dweight else (0,), dtype=torch.float32)
    x_b, x_s, x_h, x_offset = [*x_index] or [0] * 4
    w_h, w_offset = [*weight_index] or [0] * 2
    index = [*table_index, *[0] * (20 - len(table_index))]
    shared = len(distinct_tables(tables, table_index)[0]) == 2
    stride, odd = _table_access(tables, index)
    for i in range(4):
        index[5 * i + 4] -= odd[i]
    per_head = any(index[5 * i + 2] != 0 for i in range(4))
    with on_device_of(dtiled):
        _norm_rope_tile_backward_kernel[(programs,)](
            dtiled,
            dtiled if dtile_sums is None else dtile_sums,
            dtiled if x is None else x,
            dtiled if rstd is None else rstd,
            dtiled if weight is None else weight,
            *tables,
            *[dtiled] * (4 - len(tables)),
            slot_token,
            dx,
            partials,
            num_slots,
            num_tokens,
            0 if dtile_sums is None else dtile_sums.shape[2],
            runs_of_batch,
            num_runs,
            x_b,
            x_s,
            x_offset,
            *([*rstd_index] or [0] * 4),
            w_offset,
            *index,
            1.0 / divisor,
            # Known, so that heads are reached by immediate offsets: few addresses fit in registers.
            X_H=x_h,
            W_H=w_h,
            HEADS=heads,
            HALF=head_dim // 2,
            CHUNK=config.chunk,
            RUN=config.run,
            BLOCK_SIZE=max(block_size, 1),
            HAS_SUMS=dtile_sums is not None,
            HAS_WEIGHT=weight is not None,
            ROTATION=_ROTATIONS[rotation],
            NORM=_NORMS[norm],
            TABLES_PER_HEAD=per_head,
            SHARED_TABLES=shared and not per_head,
            TABLE_STRIDE=stride,
            ODD=tuple(odd),
            SIGNS=tuple(signs) or (1.0,),
            NEEDS_DX=needs_dx,
            NEEDS_DWEIGHT=needs_dweight,
            PERSISTENT=programs < num_runs,
            WIDE=heads * num_slots * head_dim >= 2**31,
            num_warps=config.num_warps,
            **({} if config.max_registers is None else {"maxnreg": config.max_registers}),
        )
        if needs_dweight:
            width = heads * head_dim
            _sum_partials_kernel[(width // _SUM_COLS,)](
                partials, dweight, programs, width, _SUM_ROWS, _SUM_COLS, triton.cdiv(programs, _SUM_ROWS), num_warps=8
            )


def _table_access(tables: Sequence[torch.Tensor], index: Sequence[int]) -> tuple[int, list[bool]]:
    """Stride of the pairs where all tables have that of 1 or 2, else 0; and which begin at the second of a pair."""
    rows = [index[5 * i : 5 * i + 5] for i in range(len(tables))]
    strides = {row[3] for row in rows}
    aligned = all(value % 2 == 0 for row in rows for value in row[:3])
    # A whole pair may be one element more than the formula reads, but no other 16 bytes.
    aligned = aligned and all(table.data_ptr() % 16 == 0 for table in tables)
    stride = 1 if strides == {1} else 2 if strides == {2} and aligned else 0
    return stride, [stride == 2 and index[5 * i + 4] % 2 == 1 for i in range(4)]


def _multiprocessors(x: torch.Tensor) -> int:
    return torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 1
