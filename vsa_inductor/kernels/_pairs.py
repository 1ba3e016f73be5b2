"""Pairs of elements as the words that travel: how kernels load, unpack, round and store them.

A pair is two neighbours in memory, one word of 32 bits (64 for fp32), or two elements some way apart. `APART` says
which: 0 for words, else how many elements lie between the first of a pair and its second.
"""

# In the language of kernels tuples grow by addition only, to other types than they began with.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment,var-annotated"

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl


@triton.jit
def words(ptr):
    """A pointer to pairs of neighbouring elements."""
    if ptr.dtype.element_ty.primitive_bitwidth == 32:
        return ptr.to(tl.pointer_type(tl.uint64))
    else:
        return ptr.to(tl.pointer_type(tl.uint32))


@triton.jit
def load_words(ptr, place, mask, APART: tl.constexpr):
    """Pairs as words, zeros where masked."""
    if APART == 0:
        return tl.load(words(ptr) + place, mask=mask, other=0)
    else:
        first = tl.load(ptr + place, mask=mask, other=0.0)
        second = tl.load(ptr + (place + APART), mask=mask, other=0.0)
        if ptr.dtype.element_ty.primitive_bitwidth == 32:
            low = first.to(tl.uint32, bitcast=True).to(tl.uint64)
            return low | (second.to(tl.uint32, bitcast=True).to(tl.uint64) << 32)
        else:
            low = first.to(tl.uint16, bitcast=True).to(tl.uint32)
            return low | (second.to(tl.uint16, bitcast=True).to(tl.uint32) << 16)


@triton.jit
def part(word, dtype: tl.constexpr, PLACE: tl.constexpr):
    """Element 0 or 1 of a pair, as fp32."""
    if dtype.primitive_bitwidth == 32:
        return (word >> (32 * PLACE)).to(tl.uint32).to(dtype, bitcast=True)
    elif dtype == tl.bfloat16:
        # The upper half of an fp32: one instruction, where an extraction takes two.
        return ((word << 16) if PLACE == 0 else (word & 0xFFFF0000)).to(tl.float32, bitcast=True)
    else:
        return (word >> (16 * PLACE)).to(tl.uint16).to(dtype, bitcast=True).to(tl.float32)


@triton.jit
def rounded(first, second, dtype: tl.constexpr, NATIVE: tl.constexpr):
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
def signed(x, SIGN: tl.constexpr):
    return x if SIGN == 1 else (-x if SIGN == -1 else x * SIGN)


@triton.jit
def store_words(ptr, word, mask, HALF: tl.constexpr, HALVES: tl.constexpr):
    """Pairs of neighbours as words, or of halves (by a pointer to 16-bit elements) to both halves."""
    if HALVES:
        tl.store(ptr, (word & 0xFFFF).to(tl.uint16), mask=mask)
        tl.store(ptr + HALF, (word >> 16).to(tl.uint16), mask=mask)
    else:
        tl.store(ptr, word, mask=mask)


@triton.jit
def store_sums(ptr, first, second, mask, HALF: tl.constexpr, HALVES: tl.constexpr):
    """Sums [heads, HALF] of both elements of the pairs to rows that begin at ptr [heads, 1]."""
    if HALVES:
        place = tl.arange(0, HALF)[None, :]
        tl.store(ptr + place, first, mask=mask)
        tl.store(ptr + HALF + place, second, mask=mask)
    else:
        both = tl.join(first, second).reshape(first.shape[0], 2 * HALF)
        tl.store(ptr + tl.arange(0, 2 * HALF)[None, :], both, mask=mask)


@triton.jit
def chosen(choices, which, COUNT: tl.constexpr):
    """Entry `which` of the first COUNT of a tuple, chosen at run time."""
    value = choices[0]
    for i in tl.static_range(1, COUNT):
        value = tl.where(which == i, choices[i], value)
    return value


@triton.jit
def chosen_index(index, which, COUNT: tl.constexpr, FIRST: tl.constexpr, WIDTH: tl.constexpr):
    """Entries `which * WIDTH` and on, of a tuple's COUNT groups of WIDTH behind the FIRST first ones."""
    found = ()
    for k in tl.static_range(WIDTH):
        value = index[FIRST + k]
        for i in tl.static_range(1, COUNT):
            value = tl.where(which == i, index[FIRST + WIDTH * i + k], value)
        found = found + (value,)
    return found


def in_words(x: torch.Tensor, index: Sequence[int], apart: int = 1) -> tuple[int, list[int]]:
    """(0, the index in words) where pairs of elements ``apart`` are words, else (``apart``, the index).

    Divided here and not in the kernel, where a quotient would no longer be known to be a multiple of 16 bytes.
    """
    if apart != 1 or x.data_ptr() % (2 * x.element_size()) != 0 or any(value % 2 != 0 for value in index):
        return apart, list(index)
    return 0, [value // 2 for value in index]


def distinct_tables(
    tables: Sequence[torch.Tensor], index: Sequence[int]
) -> tuple[Sequence[torch.Tensor], Sequence[int]]:
    """The first two of four tables, where the others are these swapped: (cos, sin, sin, cos)."""
    if len(tables) == 4 and all(
        tables[i].data_ptr() == tables[j].data_ptr()
        and tables[i].dtype == tables[j].dtype
        and list(index[5 * i : 5 * i + 5]) == list(index[5 * j : 5 * j + 5])
        for i, j in ((0, 3), (1, 2))
    ):
        return tables[:2], index[:10]
    return tables, index


def table_words(
    tables: Sequence[torch.Tensor], index: Sequence[int], sizes: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Of every table, which half of a word is meant, or -1 where it is read by elements; and the index in those units.

    A table whose pairs are two elements apart is read with the elements in between: 16 bytes per load instead of 4.
    """
    parts, places = [], []
    extents = (*sizes[:3], sizes[3] // 2)
    for i, table in enumerate(tables):
        strides, offset = list(index[5 * i : 5 * i + 4]), index[5 * i + 4]
        half = offset % 2
        last = offset - half + sum((extent - 1) * stride for extent, stride in zip(extents, strides, strict=True)) + 1
        itemsize = table.element_size()
        known = table.untyped_storage().nbytes() // itemsize - table.storage_offset()
        whole_words = table.data_ptr() % (2 * itemsize) == 0 and all(stride % 2 == 0 for stride in strides)
        if strides[3] == 2 and itemsize in (2, 4) and whole_words and last < known:
            parts.append(half)
            places += [*(stride // 2 for stride in strides), offset // 2]
        else:
            parts.append(-1)
            places += [*strides, offset]
    return parts, places
