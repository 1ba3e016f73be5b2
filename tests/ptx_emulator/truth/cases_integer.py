"""Integer instructions: every row of the kernels of integer.cu, with Python's integers as the reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from .case import Arrays, Case, integers, raw, untouched

M32 = 0xFFFFFFFF
M64 = (1 << 64) - 1
Row = tuple[str, Callable[[int, int, int, int], int]]


def signed(value: int, bits: int = 32) -> int:
    """Two's complement."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def clamp(value: int, bits: int, is_signed: bool) -> int:
    """Saturated to a type."""
    low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if is_signed else (0, (1 << bits) - 1)
    return max(low, min(high, value))


def quotient(a: int, b: int) -> int:
    """Division that truncates."""
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def remainder(a: int, b: int) -> int:
    """The sign of the dividend."""
    return a - b * quotient(a, b)


def highest(value: int, bits: int, is_signed: bool) -> int:
    """bfind: the position of the most significant bit that is not the sign; all ones if there is none."""
    if is_signed and signed(value, bits) < 0:
        value = ~value & ((1 << bits) - 1)
    return value.bit_length() - 1


def extract(value: int, position: int, length: int, bits: int, is_signed: bool) -> int:
    """bfe, PTX ISA 9.7.1.20: bits beyond the word read as the sign (or zero); position and length are bytes."""
    position, length = position & 0xFF, length & 0xFF
    if not is_signed:
        return value >> position & ((1 << length) - 1) if length else 0
    if not length:
        return 0
    wide = signed(value, bits)
    last = min(position + length - 1, bits - 1)
    fill = wide >> last & 1
    field = wide >> min(position, bits) & ((1 << length) - 1)
    keep = max(0, min(length, bits - position))
    field &= (1 << keep) - 1
    return field - (fill << keep) if keep < bits else signed(field, bits)


def insert(a: int, b: int, position: int, length: int, bits: int) -> int:
    """bfi: the low bits of a into b."""
    position, length = position & 0xFF, length & 0xFF
    mask = ((1 << length) - 1) << position & ((1 << bits) - 1)
    return (b & ~mask) | (a << position & mask)


def permute(a: int, b: int, selector: int, mode: str = "") -> int:
    """prmt, PTX ISA 9.7.9.7."""
    source = [(a | b << 32) >> 8 * i & 0xFF for i in range(8)]
    s = selector & 3
    if not mode:
        out = 0
        for i in range(4):
            nibble = selector >> 4 * i & 0xF
            byte = source[nibble & 7]
            out |= (0xFF * (byte >> 7) if nibble & 8 else byte) << 8 * i
        return out
    pick = {
        "f4e": [s, s + 1, s + 2, s + 3],
        "b4e": [s, (s - 1) % 8, (s - 2) % 8, (s - 3) % 8],
        "rc8": [s] * 4,
        "ecl": [max(s, i) for i in range(4)],
        "ecr": [min(s, i) for i in range(4)],
        "rc16": [2 * (s & 1), 2 * (s & 1) + 1] * 2,
    }[mode]
    return sum(source[p] << 8 * i for i, p in enumerate(pick))


def logic(a: int, b: int, c: int, table: int) -> int:
    """lop3."""
    out = 0
    for i in range(32):
        index = (a >> i & 1) << 2 | (b >> i & 1) << 1 | (c >> i & 1)
        out |= (table >> index & 1) << i
    return out


def dots(a: int, b: int, c: int, a_signed: bool, b_signed: bool) -> int:
    """dp4a."""
    for i in range(4):
        p, q = a >> 8 * i & 0xFF, b >> 8 * i & 0xFF
        c += (signed(p, 8) if a_signed else p) * (signed(q, 8) if b_signed else q)
    return c


def pair_dots(a: int, b: int, c: int, a_signed: bool, b_signed: bool, high: bool) -> int:
    """dp2a: halves of a with the low or high bytes of b."""
    for i in range(2):
        p, q = a >> 16 * i & 0xFFFF, b >> (8 * i + 16 * high) & 0xFF
        c += (signed(p, 16) if a_signed else p) * (signed(q, 8) if b_signed else q)
    return c


def lanes16(operation: Callable[[int, int], int], a: int, b: int, is_signed: bool) -> int:
    """A packed 16-bit operation."""
    out = 0
    for shift in (0, 16):
        p, q = a >> shift & 0xFFFF, b >> shift & 0xFFFF
        if is_signed:
            p, q = signed(p, 16), signed(q, 16)
        out |= (operation(p, q) & 0xFFFF) << shift
    return out


def funnel(a: int, b: int, c: int, left: bool, wrap: bool) -> int:
    """shf on the pair b:a."""
    n = c & 31 if wrap else min(c, 32)
    both = b << 32 | a
    return both << n >> 32 if left else both >> n


def reverse(value: int, bits: int) -> int:
    """brev."""
    return int(f"{value:0{bits}b}"[::-1], 2)


def extend(value: int, n: int, is_signed: bool, wrap: bool) -> int:
    """szext: sign- or zero-extends the low n bits."""
    n = n & 31 if wrap else min(n, 32)
    if n == 0:
        return 0
    low = value & ((1 << n) - 1)
    return signed(low, n) if is_signed else low


def bit_mask(a: int, b: int, wrap: bool) -> int:
    """bmsk: b ones from position a on."""
    a, b = (a & 31, b & 31) if wrap else (min(a, 32), min(b, 32))
    return ((1 << b) - 1) << a


def nth_set(mask: int, base: int, offset: int) -> int:
    """fns for a positive offset: the position of the offset-th set bit from base on."""
    found = [i for i in range(base, 32) if mask >> i & 1]
    return found[offset - 1] if len(found) >= offset else M32


S = signed
WORDS: list[Row] = [
    ("mul.lo.u32", lambda x, y, z, w: x * y),
    ("mul.hi.u32", lambda x, y, z, w: x * y >> 32),
    ("mul.hi.s32", lambda x, y, z, w: S(x) * S(y) >> 32),
    ("mad.lo.s32", lambda x, y, z, w: x * y + z),
    ("mad.hi.u32", lambda x, y, z, w: (x * y >> 32) + z),
    ("mad.hi.s32", lambda x, y, z, w: (S(x) * S(y) >> 32) + z),
    ("mul24.lo.u32", lambda x, y, z, w: (x & 0xFFFFFF) * (y & 0xFFFFFF)),
    ("mul24.hi.s32", lambda x, y, z, w: S(x, 24) * S(y, 24) >> 16),
    ("mad24.lo.s32", lambda x, y, z, w: S(x, 24) * S(y, 24) + z),
    ("sad.u32", lambda x, y, z, w: abs(x - y) + z),
    ("sad.s32", lambda x, y, z, w: abs(S(x) - S(y)) + z),
    ("div.u32", lambda x, y, z, w: x // w),
    ("div.s32", lambda x, y, z, w: quotient(S(x), w)),
    ("rem.u32", lambda x, y, z, w: x % w),
    ("rem.s32", lambda x, y, z, w: remainder(S(x), w)),
    ("abs.s32", lambda x, y, z, w: abs(S(x))),
    ("neg.s32", lambda x, y, z, w: -x),
    ("min.u32", lambda x, y, z, w: min(x, y)),
    ("max.s32", lambda x, y, z, w: max(S(x), S(y))),
    ("add.sat.s32", lambda x, y, z, w: clamp(S(x) + S(y), 32, True)),
    ("sub.sat.s32", lambda x, y, z, w: clamp(S(x) - S(y), 32, True)),
    ("popc.b32", lambda x, y, z, w: x.bit_count()),
    ("clz.b32", lambda x, y, z, w: 32 - x.bit_length()),
    ("brev.b32", lambda x, y, z, w: reverse(x, 32)),
    ("bfind.u32", lambda x, y, z, w: highest(x, 32, False)),
    ("bfind.s32", lambda x, y, z, w: highest(x, 32, True)),
    ("bfind.shiftamt.u32", lambda x, y, z, w: 31 - highest(x, 32, False) if x else M32),
    ("bfe.u32 w, 9", lambda x, y, z, w: extract(x, w, 9, 32, False)),
    ("bfe.s32 w, 9", lambda x, y, z, w: extract(x, w, 9, 32, True)),
    ("bfe.s32 27, w", lambda x, y, z, w: extract(x, 27, w, 32, True)),
    ("bfi.b32 w, 7", lambda x, y, z, w: insert(x, y, w, 7, 32)),
    ("bfi.b32 13, w", lambda x, y, z, w: insert(x, y, 13, w, 32)),
    *(
        (f"prmt.b32.{m}", lambda x, y, z, w, m=m: permute(x, y, z, m))
        for m in ("", "f4e", "b4e", "rc8", "ecl", "ecr", "rc16")
    ),
    *((f"lop3.b32 {t:#x}", lambda x, y, z, w, t=t: logic(x, y, z, t)) for t in (0x96, 0xCA, 0x1B)),
    ("shf.l.wrap", lambda x, y, z, w: funnel(x, y, w, True, True)),
    ("shf.r.wrap", lambda x, y, z, w: funnel(x, y, w, False, True)),
    ("shf.l.clamp", lambda x, y, z, w: funnel(x, y, w, True, False)),
    ("shf.r.clamp", lambda x, y, z, w: funnel(x, y, w, False, False)),
    ("shl.b32", lambda x, y, z, w: x << w if w < 32 else 0),
    ("shr.u32", lambda x, y, z, w: x >> w),
    ("shr.s32", lambda x, y, z, w: S(x) >> w),
    ("not.b32", lambda x, y, z, w: ~x),
    ("cnot.b32", lambda x, y, z, w: int(w == 0)),
    ("szext.wrap.s32", lambda x, y, z, w: extend(x, w, True, True)),
    ("szext.clamp.u32", lambda x, y, z, w: extend(x, w, False, False)),
    ("bmsk.wrap.b32", lambda x, y, z, w: bit_mask(w, 5, True)),
    ("bmsk.clamp.b32", lambda x, y, z, w: bit_mask(w, w, False)),
    ("dp4a.u32.u32", lambda x, y, z, w: dots(x, y, z, False, False)),
    ("dp4a.s32.s32", lambda x, y, z, w: dots(x, y, z, True, True)),
    ("dp4a.u32.s32", lambda x, y, z, w: dots(x, y, z, False, True)),
    ("dp2a.lo.s32.s32", lambda x, y, z, w: pair_dots(x, y, z, True, True, False)),
    ("dp2a.hi.u32.s32", lambda x, y, z, w: pair_dots(x, y, z, False, True, True)),
    ("slct.u32.s32", lambda x, y, z, w: x if S(z) >= 0 else y),
    ("set.gt.u32.s32", lambda x, y, z, w: -int(S(x) > S(y))),
    ("set.lo.and.u32.u32", lambda x, y, z, w: -int(x < y)),
    ("min.s16x2", lambda x, y, z, w: lanes16(min, x, y, True)),
    ("max.u16x2", lambda x, y, z, w: lanes16(max, x, y, False)),
    ("add.u16x2", lambda x, y, z, w: lanes16(lambda a, b: a + b, x, y, False)),
    ("min.relu.s32", lambda x, y, z, w: max(0, min(S(x), S(y)))),
    ("max.relu.s16x2", lambda x, y, z, w: lanes16(lambda a, b: max(a, b, 0), x, y, True)),
    ("setp.lt.s32 p|q", lambda x, y, z, w: z if S(x) < S(y) else 8),
    ("setp.ne.xor.s32", lambda x, y, z, w: int((z != 0) != (x >= y))),
    ("mov.b32 halves", lambda x, y, z, w: x >> 16 | x << 16),
    ("mov.b32 bytes", lambda x, y, z, w: int.from_bytes(x.to_bytes(4, "little"), "big")),
    ("fns.b32", lambda x, y, z, w: nth_set(x, 5, 2)),
]

DOUBLEWORDS: list[Row] = [
    ("mul.lo.s64", lambda x, y, z, w: x * y),
    ("mul.hi.u64", lambda x, y, z, w: x * y >> 64),
    ("mul.hi.s64", lambda x, y, z, w: S(x, 64) * S(y, 64) >> 64),
    ("mad.lo.u64", lambda x, y, z, w: x * y + z),
    ("mad.hi.s64", lambda x, y, z, w: (S(x, 64) * S(y, 64) >> 64) + z),
    ("mul.wide.u32", lambda x, y, z, w: (x & M32) * (y & M32)),
    ("mad.wide.s32", lambda x, y, z, w: S(x) * S(y) + z),
    ("div.u64", lambda x, y, z, w: x // z),
    ("div.s64", lambda x, y, z, w: quotient(S(x, 64), S(z, 64))),
    ("rem.u64", lambda x, y, z, w: x % z),
    ("rem.s64", lambda x, y, z, w: remainder(S(x, 64), S(z, 64))),
    ("shl.b64", lambda x, y, z, w: x << w),
    ("shr.u64", lambda x, y, z, w: x >> w),
    ("shr.s64", lambda x, y, z, w: S(x, 64) >> w),
    ("brev.b64", lambda x, y, z, w: reverse(x, 64)),
    ("popc.b64", lambda x, y, z, w: x.bit_count()),
    ("clz.b64", lambda x, y, z, w: 64 - z.bit_length()),
    ("bfind.s64", lambda x, y, z, w: highest(x, 64, True)),
    ("bfe.s64 w, 21", lambda x, y, z, w: extract(x, w, 21, 64, True)),
    ("bfe.u64 40, w", lambda x, y, z, w: extract(x, 40, w, 64, False)),
    ("bfi.b64 w, 21", lambda x, y, z, w: insert(x, y, w, 21, 64)),
    ("min.s64", lambda x, y, z, w: min(S(x, 64), S(y, 64))),
    ("max.u64", lambda x, y, z, w: max(x, y)),
    ("abs.s64", lambda x, y, z, w: abs(S(x, 64))),
    ("mov.b64 pack", lambda x, y, z, w: x >> 32 | ((x + (x >> 32)) & M32) << 32),
    ("slct.u64.s32", lambda x, y, z, w: x if S(w) >= 0 else y),
    ("cvt.s64.s32", lambda x, y, z, w: S(w)),
    ("setp.gt.s64", lambda x, y, z, w: x if S(x, 64) > S(y, 64) else z),
]


def _s16(value: int) -> int:
    return signed(value, 16)


NARROWING: list[Row] = [
    ("cvt.u8.u64", lambda x, y, z, w: x & 0xFF),
    ("cvt.s8.s64", lambda x, y, z, w: S(x, 8)),
    ("cvt.u16.u64", lambda x, y, z, w: x & 0xFFFF),
    ("cvt.s16.s64", lambda x, y, z, w: S(x, 16)),
    ("cvt.sat.u32.s64", lambda x, y, z, w: clamp(S(x, 64), 32, False)),
    ("cvt.sat.s32.s64", lambda x, y, z, w: clamp(S(x, 64), 32, True)),
    ("cvt.sat.s16.s64", lambda x, y, z, w: clamp(S(x, 64), 16, True)),
    ("cvt.sat.u16.s64", lambda x, y, z, w: clamp(S(x, 64), 16, False)),
    ("cvt.sat.s8.s64", lambda x, y, z, w: clamp(S(x, 64), 8, True)),
    ("cvt.sat.u8.s64", lambda x, y, z, w: clamp(S(x, 64), 8, False)),
    ("cvt.sat.s64.u64", lambda x, y, z, w: clamp(x, 64, True)),
    ("cvt.sat.u64.s64", lambda x, y, z, w: clamp(S(x, 64), 64, False)),
    ("mul.lo.u16", lambda x, y, z, w: x * y & 0xFFFF),
    ("mul.hi.s16", lambda x, y, z, w: _s16(x) * _s16(y) >> 16),
    ("mul.wide.s16", lambda x, y, z, w: _s16(x) * _s16(y)),
    ("add.u16, shr.u16", lambda x, y, z, w: ((x + y) & 0xFFFF) >> 3),
    ("min.s16, shr.s16", lambda x, y, z, w: min(_s16(x), _s16(y)) >> 2),
    ("xor.b16, not.b16", lambda x, y, z, w: ~(x ^ y) & 0xFFFF),
]


def rows_of(table: Sequence[Row], bits: int) -> Callable[[Arrays], Arrays]:
    """The expectation of a table: `in` [4, n], `out` [rows, n]."""

    def expect(given: Arrays) -> Arrays:
        columns = [[int(v) for v in column] for column in given["in"].T]
        out = np.empty((len(table), len(columns)), np.uint64)
        for i, (_, function) in enumerate(table):
            for j, column in enumerate(columns):
                padded = [*column, 0, 0, 0, 0][:4]
                padded[3] &= M32
                out[i, j] = function(*padded) & ((1 << bits) - 1)
        return {"out": out.astype(given["out"].dtype)}

    return expect


def _carries(given: Arrays) -> Arrays:
    out = np.empty((12, 64), np.uint32)
    for i in range(64):
        a, b = (sum(int(given["in"][base + j, i]) << 32 * j for j in range(4)) for base in (0, 4))
        low = (1 << 64) - 1
        for base, value in ((0, a + b), (4, a - b), (8, (a & low) * (b & low))):
            for j in range(4):
                out[base + j, i] = value >> 32 * j & M32
    return {"out": out}


EDGES = (0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x00FF00FF, 0x80007FFF)


def _inputs() -> dict[str, np.ndarray]:
    words = raw("integer/words", (4, 64), np.uint32)
    words[0, : len(EDGES)] = EDGES
    words[1, 3 : 3 + len(EDGES)] = EDGES
    words[3] = np.where(np.arange(64) % 2, integers("w", (64,), 1, 40), 1 + words[3] % 31)
    words[3, 60:] = (31, 32, 33, 255)
    wide = raw("integer/doublewords", (4, 64), np.uint64)
    wide[0, : len(EDGES)] = EDGES
    wide[0, 20:24] = (1 << 63, (1 << 63) - 1, M64, M64 - 1)
    wide[1, 22:26] = (1 << 63, (1 << 63) - 1, M64, 3)
    wide[2] >>= integers("shifts", (64,), 0, 62).astype(np.uint64)
    wide[2] |= np.uint64(1)
    wide[3] = integers("w64", (64,), 0, 63)
    narrow = raw("integer/narrow", (2, 64), np.uint64)
    signs = integers("narrow-shift", (64,), 0, 60).astype(np.uint64)
    narrow[0] = (narrow[0].view(np.int64) >> signs.view(np.int64)).view(np.uint64)
    return {"words": words, "doublewords": wide, "narrowing": narrow}


def cases() -> Iterator[Case]:
    """All cases of this file."""
    inputs = _inputs()
    for kernel, table, bits in (("words", WORDS, 32), ("doublewords", DOUBLEWORDS, 64), ("narrowing", NARROWING, 64)):
        dtype = np.uint32 if bits == 32 else np.uint64
        yield Case(
            f"integer/{kernel}",
            "integer",
            kernel,
            {"in": inputs[kernel], "out": untouched((len(table), 64), dtype)},
            ("out",),
            ("in", "out"),
            block=(64, 1, 1),
            expect=rows_of(table, bits),
            rows={"out": [name for name, _ in table]},
        )
    carries = raw("integer/carries", (8, 64), np.uint32)
    carries[:, :8] = np.where(carries[:, :8] % 2, np.uint32(M32), np.uint32(0))
    yield Case(
        "integer/carries",
        "integer",
        "carries",
        {"in": carries, "out": untouched((12, 64), np.uint32)},
        ("out",),
        ("in", "out"),
        block=(64, 1, 1),
        expect=_carries,
    )
