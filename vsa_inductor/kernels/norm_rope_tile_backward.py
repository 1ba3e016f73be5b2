"""Gradient through tile order, rotary embedding and RMSNorm in one pass: whole rows, in tile order.

    dtiled [B, H, S_pad, D] contiguous    dtile_sums [B, H, N, D] fp32 contiguous, added to every row of its tile
    x [B, S, H, D], rstd [B, S] or [B, S, H], weight [H, D], tables [B, S, H, D / 2] by strides
    dx [B, S, H, D] contiguous            partials [programs, H, D] fp32, summed to dweight by the launcher

A step takes ROWS slots of one tile. Their rows of x and of the gradient stay in registers, CHUNK heads to a tensor,
between the sum over the row and the second use; nothing is read twice. A program takes one run of RUN slots after
another, `programs` runs apart, so that tiles with few tokens are spread over the programs.
Pairs are split and joined in registers: every access of a row is 16 bytes per thread.
"""

# Tuples that grow in unrolled loops have one type to mypy, and Triton reads no annotations there.
# mypy: disable-error-code="assignment, var-annotated"

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from vsa_inductor.kernels.configs import on_device_of

_ROTATIONS = {"none": 0, "interleaved": 1, "half": 2}
_NORMS = {"none": 0, "all": 1, "head": 2}


class RowConfig(NamedTuple):
    """How rows are given to programs.

    Attributes:
        rows: slots per step.
        chunk: heads per tensor; a thread holds 16 bytes of each chunk where rows * chunk * head_dim is 256 * num_warps.
        run: slots of one tile that a program takes in order, a multiple of rows.
        num_warps: warps per program.
        programs: per multiprocessor; None gives every run a program of its own.
        num_stages: steps whose rows are under way at once, by copies to shared memory.
        max_registers: cap per thread; None leaves it to the compiler.
    """

    rows: int
    chunk: int
    run: int
    num_warps: int
    programs: int | None = None
    num_stages: int = 1
    max_registers: int | None = None


@triton.jit
def _load_pairs(rows, mask, HALF: tl.constexpr, HALVES: tl.constexpr):
    """Both elements of every pair of the rows that begin at the pointers `rows` [R, C, 1]."""
    if HALVES:
        pair = tl.arange(0, HALF)[None, None, :]
        return tl.load(rows + pair, mask=mask, other=0.0), tl.load(rows + HALF + pair, mask=mask, other=0.0)
    else:
        values = tl.load(rows + tl.arange(0, 2 * HALF)[None, None, :], mask=mask, other=0.0)
        return tl.split(values.reshape(values.shape[0], values.shape[1], HALF, 2))


@triton.jit
def _store_pairs(rows, first, second, mask, HALF: tl.constexpr, HALVES: tl.constexpr):
    dtype = rows.dtype.element_ty
    if HALVES:
        pair = tl.arange(0, HALF)[None, None, :]
        tl.store(rows + pair, first.to(dtype), mask=mask)
        tl.store(rows + HALF + pair, second.to(dtype), mask=mask)
    else:
        values = tl.join(first, second).reshape(first.shape[0], first.shape[1], 2 * HALF)
        tl.store(rows + tl.arange(0, 2 * HALF)[None, None, :], values.to(dtype), mask=mask)


@triton.jit
def _table(ptr, rows, stride_i, mask, HALF: tl.constexpr, STRIDE: tl.constexpr, ODD: tl.constexpr):
    """The factor of every pair, from the offsets `rows` [R, C, 1]; in the layout of the pairs where STRIDE is known."""
    if STRIDE == 2:
        # Every value twice, as Wan keeps them: whole rows, of which one of two is used.
        values = tl.load(ptr + rows + tl.arange(0, 2 * HALF)[None, None, :], mask=mask, other=0.0)
        even, odd = tl.split(values.reshape(values.shape[0], values.shape[1], HALF, 2))
        factor = odd if ODD else even
    elif STRIDE == 1:
        factor = tl.load(ptr + rows + tl.arange(0, HALF)[None, None, :], mask=mask, other=0.0)
    else:
        factor = tl.load(ptr + rows + tl.arange(0, HALF)[None, None, :] * stride_i, mask=mask, other=0.0)
    return factor.to(tl.float32)


@triton.jit
def _tokens(ptr, program, step, num_slots, runs_of_batch, num_runs, ROWS: tl.constexpr, RUN: tl.constexpr):
    """The tokens [ROWS, 1, 1] of a step of a program, -1 where there is none."""
    run = program + step // (RUN // ROWS) * tl.num_programs(0)
    slot = run % runs_of_batch * RUN + step % (RUN // ROWS) * ROWS + tl.arange(0, ROWS)
    token = tl.load(ptr + slot, mask=(slot < num_slots) & (run < num_runs), other=-1)
    return token.to(tl.int64)[:, None, None]


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
    steps,
    x_b,
    x_s,
    x_h,
    x_offset,
    r_b,
    r_s,
    r_h,
    r_offset,
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
    inverse_divisor,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
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
    ODD0: tl.constexpr,
    ODD1: tl.constexpr,
    ODD2: tl.constexpr,
    ODD3: tl.constexpr,
    NEEDS_DX: tl.constexpr,
    NEEDS_DWEIGHT: tl.constexpr,
    STAGES: tl.constexpr,
):
    D: tl.constexpr = 2 * HALF
    CHUNKS: tl.constexpr = (HEADS + CHUNK - 1) // CHUNK
    EVEN: tl.constexpr = HEADS % CHUNK == 0
    HALVES: tl.constexpr = ROTATION == 2
    program = tl.program_id(0)
    lane = tl.arange(0, CHUNK)[None, :, None]
    accumulated = ()
    if NEEDS_DWEIGHT:
        for _ in tl.static_range(2 * CHUNKS):
            accumulated += (tl.zeros([ROWS, CHUNK, HALF], tl.float32),)
    token = _tokens(slot_token_ptr, program, 0, num_slots, runs_of_batch, num_runs, ROWS, RUN)
    for step in tl.range(0, steps, num_stages=STAGES):
        run = program + step // (RUN // ROWS) * tl.num_programs(0)
        batch = (run // runs_of_batch).to(tl.int64)
        slot = run % runs_of_batch * RUN + step % (RUN // ROWS) * ROWS + tl.arange(0, ROWS)[:, None, None]
        real = token >= 0
        # A step ahead, as every other address waits for it.
        following = _tokens(slot_token_ptr, program, step + 1, num_slots, runs_of_batch, num_runs, ROWS, RUN)

        # Everything is asked for before anything is used.
        loaded_g = ()
        loaded_x = ()
        for c in tl.static_range(CHUNKS):
            head = c * CHUNK + lane
            mask = real if EVEN else real & (head < HEADS)
            # 64 bits: a head of tile order is far from the next.
            head_row = (batch * HEADS + head) * num_slots + slot
            loaded_g += (_load_pairs(dtiled_ptr + head_row * D, mask, HALF, HALVES),)
            if NORM != 0:
                x_rows = x_ptr + (x_offset + batch * x_b + token * x_s) + head * x_h
                loaded_x += (_load_pairs(x_rows, mask, HALF, HALVES),)
        if ROTATION != 0 and not TABLES_PER_HEAD:
            at0 = offset0 + batch * b0 + token * s0 + lane * 0
            at1 = offset1 + batch * b1 + token * s1 + lane * 0
            t0 = _table(table0_ptr, at0, i0, real, HALF, TABLE_STRIDE, ODD0)
            t1 = _table(table1_ptr, at1, i1, real, HALF, TABLE_STRIDE, ODD1)
            if SHARED_TABLES:
                t2 = t1
                t3 = t0
            else:
                at2 = offset2 + batch * b2 + token * s2 + lane * 0
                at3 = offset3 + batch * b3 + token * s3 + lane * 0
                t2 = _table(table2_ptr, at2, i2, real, HALF, TABLE_STRIDE, ODD2)
                t3 = _table(table3_ptr, at3, i3, real, HALF, TABLE_STRIDE, ODD3)
            t0, t1, t2, t3 = t0 * sign0, t1 * sign1, t2 * sign2, t3 * sign3
        if NORM == 1:
            rstd = tl.load(rstd_ptr + (r_offset + batch * r_b + token * r_s), mask=real, other=0.0).to(tl.float32)

        held = ()
        sums = ()
        total = tl.zeros([ROWS, CHUNK, HALF], tl.float32)
        for c in tl.static_range(CHUNKS):
            head = c * CHUNK + lane
            mask = real if EVEN else real & (head < HEADS)
            first = loaded_g[c][0].to(tl.float32)
            second = loaded_g[c][1].to(tl.float32)
            if HAS_SUMS:
                tile = (batch * HEADS + head) * num_tiles + slot // BLOCK_SIZE
                sum1, sum2 = _load_pairs(dtile_sums_ptr + tile * D, mask, HALF, HALVES)
                first += sum1
                second += sum2
            if ROTATION != 0:
                if TABLES_PER_HEAD:
                    at0 = offset0 + batch * b0 + token * s0 + head * h0
                    at1 = offset1 + batch * b1 + token * s1 + head * h1
                    at2 = offset2 + batch * b2 + token * s2 + head * h2
                    at3 = offset3 + batch * b3 + token * s3 + head * h3
                    t0 = _table(table0_ptr, at0, i0, mask, HALF, TABLE_STRIDE, ODD0)
                    t1 = _table(table1_ptr, at1, i1, mask, HALF, TABLE_STRIDE, ODD1)
                    t2 = _table(table2_ptr, at2, i2, mask, HALF, TABLE_STRIDE, ODD2)
                    t3 = _table(table3_ptr, at3, i3, mask, HALF, TABLE_STRIDE, ODD3)
                    t0, t1, t2, t3 = t0 * sign0, t1 * sign1, t2 * sign2, t3 * sign3
                u1 = first * t0 + second * t1
                u2 = first * t2 + second * t3
            else:
                u1 = first
                u2 = second
            if NORM == 0:
                _store_pairs(dx_ptr + ((batch * num_tokens + token) * HEADS + head) * D, u1, u2, mask, HALF, HALVES)
            else:
                x1 = loaded_x[c][0].to(tl.float32)
                x2 = loaded_x[c][1].to(tl.float32)
                if NORM == 2:
                    at = r_offset + batch * r_b + token * r_s + head * r_h
                    rstd = tl.load(rstd_ptr + at, mask=mask, other=0.0).to(tl.float32)
                if NEEDS_DWEIGHT:
                    sums += (accumulated[2 * c] + u1 * (x1 * rstd), accumulated[2 * c + 1] + u2 * (x2 * rstd))
                if NEEDS_DX:
                    if HAS_WEIGHT:
                        # A row of its own for every slot, though all are the same: the layout of the pairs again.
                        weight = weight_ptr + w_offset + (head * w_h + slot * 0)
                        w1, w2 = _load_pairs(weight, mask, HALF, HALVES)
                        u1 *= w1.to(tl.float32)
                        u2 *= w2.to(tl.float32)
                    if NORM == 1:
                        total += u1 * x1 + u2 * x2
                        held += ((u1, u2, x1, x2),)
                    else:
                        dot = tl.sum(u1 * x1 + u2 * x2, 2)[:, :, None]
                        factor = rstd * rstd * rstd * inverse_divisor * dot
                        rows = dx_ptr + ((batch * num_tokens + token) * HEADS + head) * D
                        _store_pairs(rows, rstd * u1 - factor * x1, rstd * u2 - factor * x2, mask, HALF, HALVES)
        if NEEDS_DWEIGHT:
            accumulated = sums
        if NORM == 1 and NEEDS_DX:
            dot = tl.sum(tl.sum(total, 2), 1)[:, None, None]
            factor = rstd * rstd * rstd * inverse_divisor * dot
            for c in tl.static_range(CHUNKS):
                head = c * CHUNK + lane
                mask = real if EVEN else real & (head < HEADS)
                u1, u2, x1, x2 = held[c]
                rows = dx_ptr + ((batch * num_tokens + token) * HEADS + head) * D
                _store_pairs(rows, rstd * u1 - factor * x1, rstd * u2 - factor * x2, mask, HALF, HALVES)
        token = following

    if NEEDS_DWEIGHT:
        for c in tl.static_range(CHUNKS):
            head = c * CHUNK + lane
            rows = partials_ptr + (program.to(tl.int64) * HEADS + head) * D
            first = tl.sum(accumulated[2 * c], 0)[None, :, :]
            second = tl.sum(accumulated[2 * c + 1], 0)[None, :, :]
            _store_pairs(rows, first, second, head < HEADS, HALF, HALVES)


def row_config(heads: int, head_dim: int, needs_dweight: bool) -> RowConfig:
    """The configuration of a row of `heads` heads of `head_dim`, a power of two."""
    # A thread holds this many times 16 bytes of the row of x and of that of the gradient; sums of dweight besides.
    most_chunks = 3 if needs_dweight else 5
    chunk = triton.next_power_of_2(triton.cdiv(heads, most_chunks))
    rows = max(1, 512 // (chunk * head_dim))
    num_warps = max(2, rows * chunk * head_dim // 256)
    return RowConfig(rows, chunk, max(rows, 8), num_warps, max(1, 16 // num_warps) if needs_dweight else None)


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
        dx: `[B, S, H, D]` contiguous, written everywhere; `[0]` without `needs_dx`.
        dweight: `[H, D]` fp32, written everywhere; `[0]` without `needs_dweight`.
        config: in place of `row_config`'s.
    """
    batch, num_tokens, heads, head_dim = sizes
    num_slots = slot_token.shape[0]
    if dtiled.numel() == 0 or num_tokens == 0:
        dweight.zero_()
        return
    config = config or row_config(heads, head_dim, needs_dweight)
    runs_of_batch = triton.cdiv(num_slots, config.run)
    num_runs = batch * runs_of_batch
    programs = num_runs
    if config.programs is not None:
        programs = min(num_runs, config.programs * _multiprocessors(dtiled))
    partials = dtiled.new_empty((programs, heads, head_dim) if needs_dweight else (0,), dtype=torch.float32)
    index = [*table_index, *[0] * (20 - len(table_index))]
    shared = len(tables) == 4 and all(
        tables[i].data_ptr() == tables[j].data_ptr() and index[5 * i : 5 * i + 5] == index[5 * j : 5 * j + 5]
        for i, j in ((0, 3), (1, 2))
    )
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
            triton.cdiv(num_runs, programs) * (config.run // config.rows),
            *([*x_index] or [0] * 4),
            *([*rstd_index] or [0] * 4),
            *([*weight_index] or [0] * 2),
            *index,
            *([*signs] or [1.0] * 4),
            1.0 / divisor,
            HEADS=heads,
            HALF=head_dim // 2,
            ROWS=config.rows,
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
            ODD0=odd[0],
            ODD1=odd[1],
            ODD2=odd[2],
            ODD3=odd[3],
            NEEDS_DX=needs_dx,
            NEEDS_DWEIGHT=needs_dweight,
            STAGES=config.num_stages,
            num_warps=config.num_warps,
            **({} if config.max_registers is None else {"maxnreg": config.max_registers}),
        )
    if needs_dweight:
        # In a fixed order, as every sum here.
        torch.sum(partials, 0, out=dweight)


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
