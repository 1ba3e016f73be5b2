"""Triton kernels without products: what surrounds attention in a model, and the memory operations that order CTAs."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def softmax_rows(x_ptr, y_ptr, columns, BLOCK: tl.constexpr):
    """Masked row softmax: reductions over warps by shuffles and shared memory."""
    row = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * columns + lanes, mask=lanes < columns, other=float("-inf"))
    p = tl.exp(x - tl.max(x, 0))
    tl.store(y_ptr + row * columns + lanes, p / tl.sum(p, 0), mask=lanes < columns)


@triton.jit
def norm_rows(x_ptr, weight_ptr, y_ptr, sums_ptr, lock_ptr, COLUMNS: tl.constexpr, epsilon):
    """RMS norm in bf16; column sums of squares meet under a spin lock (atomic cas and exch)."""
    row = tl.program_id(0)
    lanes = tl.arange(0, COLUMNS)
    x = tl.load(x_ptr + row * COLUMNS + lanes).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, 0) / COLUMNS + epsilon)
    y = x * inverse * tl.load(weight_ptr + lanes).to(tl.float32)
    tl.store(y_ptr + row * COLUMNS + lanes, y.to(y_ptr.dtype.element_ty))
    while tl.atomic_cas(lock_ptr, 0, 1) == 1:
        pass
    tl.store(sums_ptr + lanes, tl.load(sums_ptr + lanes) + x * x)
    tl.debug_barrier()
    tl.atomic_xchg(lock_ptr, 0)


@triton.jit
def top_blocks(scores_ptr, index_ptr, COUNT: tl.constexpr, KEEP: tl.constexpr):
    """The KEEP largest of each row: scores and positions packed into one sorted integer."""
    row = tl.program_id(0)
    lanes = tl.arange(0, COUNT)
    scores = tl.load(scores_ptr + row * COUNT + lanes)
    packed = (scores.to(tl.int64) << 32) | (COUNT - 1 - lanes)
    best = tl.sort(packed, descending=True)
    tl.store(index_ptr + row * COUNT + lanes, (COUNT - 1 - (best & 0xFFFFFFFF)).to(tl.int32), mask=lanes < KEEP)


@triton.jit
def scan_rows(x_ptr, sum_ptr, best_ptr, histogram_ptr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BINS: tl.constexpr):
    """Prefix sums, argmax and a histogram of small integers."""
    rows = tl.arange(0, ROWS)
    lanes = tl.arange(0, COLUMNS)
    x = tl.load(x_ptr + rows[:, None] * COLUMNS + lanes[None, :])
    tl.store(sum_ptr + rows[:, None] * COLUMNS + lanes[None, :], tl.cumsum(x, 1))
    tl.store(best_ptr + rows, tl.argmax(x, 1))
    counts = tl.histogram(tl.reshape(x, (ROWS * COLUMNS,)), BINS)
    tl.atomic_add(histogram_ptr + tl.arange(0, BINS), counts)


@triton.jit
def convert_values(x_ptr, e4m3_ptr, e5m2_ptr, bf16_ptr, f16_ptr, i8_ptr, BLOCK: tl.constexpr):
    """float32 to every narrow type, and a little of the slow mathematics."""
    where = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + where)
    tl.store(e4m3_ptr + where, x.to(tl.float8e4nv))
    tl.store(e5m2_ptr + where, x.to(tl.float8e5))
    tl.store(bf16_ptr + where, (tl.sin(x) + tl.log(tl.abs(x) + 1.0)).to(tl.bfloat16))
    tl.store(f16_ptr + where, (tl.sqrt(tl.abs(x)) + tl.floor(x) + tl.erf(x)).to(tl.float16))
    tl.store(i8_ptr + where, tl.clamp(x, -100.0, 100.0).to(tl.int8))


@triton.jit
def chained_sum(x_ptr, y_ptr, flag_ptr, BLOCK: tl.constexpr):
    """Prefix sums of blocks: a program waits for its predecessor's flag (acquire) and sets its own (release)."""
    block = tl.program_id(0)
    where = block * BLOCK + tl.arange(0, BLOCK)
    total = tl.sum(tl.load(x_ptr + where), 0)
    before = 0.0
    if block > 0:
        while tl.atomic_add(flag_ptr + block - 1, 0, sem="acquire", scope="gpu") == 0:
            pass
        before = tl.load(y_ptr + block - 1, volatile=True)
    tl.store(y_ptr + block, before + total)
    tl.atomic_xchg(flag_ptr + block, 1, sem="release", scope="gpu")
