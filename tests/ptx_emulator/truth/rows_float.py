"""What every row of floating.cu, half.cu and convert.cu computes, by exact rational arithmetic on patterns."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import numpy as np

from .case import Arrays
from .exact import (
    BF16,
    F16,
    F32,
    F64,
    FORMATS,
    NAN,
    Format,
    Number,
    add,
    decode,
    divide,
    encode,
    integral,
    larger,
    multiply,
    negate,
    root,
    signed,
    smaller,
    to_integer,
    unit,
)

ONE = Number(False, Fraction(1))
M32 = 0xFFFFFFFF
Row = tuple[str, Callable[[int, int, int], int]]
FOUR = ("rn", "rz", "rm", "rp")


def operation(
    form: Format,
    function: Callable[..., Number],
    mode: str = "rn",
    ftz: bool = False,
    sat: bool = False,
    relu: bool = False,
) -> Callable[[int, int, int], int]:
    """Patterns to pattern: flush, compute exactly, clamp, round once, flush."""

    def run(*patterns: int) -> int:
        result = function(*(decode(p, form, ftz) for p in patterns))
        if sat:
            result = unit(result)
        if relu and (result.nan or result.negative):
            # .relu keeps NaN and turns negative results, -0 too, into +0.
            result = NAN if result.nan else Number()
        return encode(result, form, mode, ftz)

    return run


def _fma(mode: str) -> Callable[[Number, Number, Number], Number]:
    return lambda x, y, z: add(multiply(x, y), z, mode)


def _sum(mode: str = "rn") -> Callable[[Number, Number, Number], Number]:
    return lambda x, y, z: add(x, y, mode)


def _xorsign(pick: Callable[..., Number], nan: bool = False) -> Callable[[Number, Number, Number], Number]:
    def run(x: Number, y: Number, _: Number) -> Number:
        # A NaN that gives way still has its sign counted.
        best = pick(Number(False, x.size, x.nan), Number(False, y.size, y.nan), nan)
        return best if best.nan else Number(x.negative != y.negative, best.size)

    return run


def _sign_bits(form: Format, keep: int, flip: int, ftz: bool = False) -> Callable[[int, int, int], int]:
    """abs and neg of a pattern; NaN as of every arithmetic instruction."""
    sign = 1 << (form.bits - 1)

    def run(x: int, y: int, z: int) -> int:
        if decode(x, form).nan:
            return form.nan
        if ftz and not x >> form.mantissa & ((1 << form.exponent) - 1):
            x &= sign
        return (x & ~sign) | ((x & sign & -keep) ^ (sign & -flip))

    return run


def _arithmetic(form: Format) -> list[Row]:
    name = form.name
    op = operation
    rows: list[Row] = []
    rows += [(f"add.{m}.{name}", op(form, _sum(m), m)) for m in FOUR]
    rows += [(f"mul.{m}.{name}", op(form, lambda x, y, z: multiply(x, y), m)) for m in FOUR]
    rows += [(f"fma.{m}.{name}", op(form, _fma(m), m)) for m in FOUR]
    return rows


def singles() -> list[Row]:
    """The rows of floating.cu's f32 kernel."""
    op = operation

    def product(x: Number, y: Number, z: Number) -> Number:
        return multiply(x, y)

    rows = _arithmetic(F32)
    rows += [(f"div.{m}.f32", op(F32, lambda x, y, z: divide(x, y), m)) for m in FOUR]
    rows += [(f"rcp.{m}.f32", op(F32, lambda x, y, z: divide(ONE, x), m)) for m in FOUR]
    rows += [(f"sqrt.{m}.f32", op(F32, lambda x, y, z: root(x), m)) for m in FOUR]
    rows += [
        ("sub.rm.f32", op(F32, lambda x, y, z: add(x, negate(y), "rm"), "rm")),
        ("add.rn.ftz.f32", op(F32, _sum(), ftz=True)),
        ("mul.rz.ftz.f32", op(F32, product, "rz", ftz=True)),
        ("fma.rn.ftz.f32", op(F32, _fma("rn"), ftz=True)),
        ("div.rn.ftz.f32", op(F32, lambda x, y, z: divide(x, y), ftz=True)),
        ("add.sat.f32", op(F32, _sum(), sat=True)),
        ("fma.rn.sat.f32", op(F32, _fma("rn"), sat=True)),
        ("mul.ftz.sat.f32", op(F32, product, ftz=True, sat=True)),
        ("min.f32", op(F32, lambda x, y, z: smaller(x, y))),
        ("max.f32", op(F32, lambda x, y, z: larger(x, y))),
        ("min.NaN.f32", op(F32, lambda x, y, z: smaller(x, y, True))),
        ("max.ftz.f32", op(F32, lambda x, y, z: larger(x, y), ftz=True)),
        ("max.NaN.ftz.f32", op(F32, lambda x, y, z: larger(x, y, True), ftz=True)),
        ("min.xorsign.abs.f32", op(F32, _xorsign(smaller))),
        ("abs.f32", _sign_bits(F32, 0, 0)),
        ("neg.f32", _sign_bits(F32, 1, 1)),
        ("abs.ftz.f32", _sign_bits(F32, 0, 0, True)),
        ("neg.ftz.f32", _sign_bits(F32, 1, 1, True)),
        ("copysign.f32", lambda x, y, z: (x & 0x80000000) | (y & 0x7FFFFFFF)),
        ("cvt.rni.f32.f32", op(F32, lambda x, y, z: integral(x, "rni"))),
        ("cvt.rmi.f32.f32", op(F32, lambda x, y, z: integral(x, "rmi"))),
        ("cvt.rpi.ftz.f32.f32", op(F32, lambda x, y, z: integral(x, "rpi"), ftz=True)),
        ("cvt.rzi.f32.f32", op(F32, lambda x, y, z: integral(x, "rzi"))),
        ("cvt.sat.f32.f32", op(F32, lambda x, y, z: x, sat=True)),
    ]
    return rows


def _through_single(mode: str) -> Callable[[int, int, int], int]:
    return lambda x, y, z: encode(decode(encode(decode(x, F64), F32, mode), F32), F64)


def _unordered_less(x: int, y: int, z: int) -> int:
    a, b = decode(x, F64), decode(y, F64)
    return x if a.nan or b.nan or _compare(a, b) < 0 else y


def doubles() -> list[Row]:
    """The rows of floating.cu's f64 kernel."""
    op = operation
    return [
        *_arithmetic(F64),
        ("div.rn.f64", op(F64, lambda x, y, z: divide(x, y))),
        ("div.rp.f64", op(F64, lambda x, y, z: divide(x, y), "rp")),
        ("rcp.rn.f64", op(F64, lambda x, y, z: divide(ONE, x))),
        ("sqrt.rn.f64", op(F64, lambda x, y, z: root(x))),
        ("sqrt.rm.f64", op(F64, lambda x, y, z: root(x), "rm")),
        ("min.f64", op(F64, lambda x, y, z: smaller(x, y))),
        ("max.f64", op(F64, lambda x, y, z: larger(x, y))),
        ("abs.f64", _sign_bits(F64, 0, 0)),
        ("neg.f64", _sign_bits(F64, 1, 1)),
        ("cvt.rni.f64.f64", op(F64, lambda x, y, z: integral(x, "rni"))),
        ("cvt.rmi.f64.f64", op(F64, lambda x, y, z: integral(x, "rmi"))),
        ("cvt.rn.f32.f64", _through_single("rn")),
        ("cvt.rz.f32.f64", _through_single("rz")),
        ("cvt.rp.f32.f64", _through_single("rp")),
        ("setp.ltu.f64", _unordered_less),
    ]


def _compare(a: Number, b: Number) -> int:
    """-1, 0 or 1 of two numbers that are not NaN; zeros are equal."""

    def key(n: Number) -> tuple[int, Fraction]:
        return (0, n.value) if n.size is not None else (-1 if n.negative else 1, Fraction(0))

    return (key(a) > key(b)) - (key(a) < key(b))


def _relations(x: int, y: int, form: Format, ftz: bool = False) -> dict[str, bool]:
    a, b = decode(x, form, ftz), decode(y, form, ftz)
    nan = a.nan or b.nan
    order = 0 if nan else _compare(a, b)
    plain = {"eq": order == 0, "ne": order != 0, "lt": order < 0, "le": order <= 0, "gt": order > 0, "ge": order >= 0}
    out = {name: value and not nan for name, value in plain.items()}
    unordered = {"equ": "eq", "neu": "ne", "ltu": "lt", "leu": "le", "gtu": "gt", "geu": "ge"}
    return out | {u: plain[o] or nan for u, o in unordered.items()} | {"num": not nan, "nan": nan}


def comparisons(given: Arrays) -> Arrays:
    """Expectation of the comparisons kernel."""
    order = ["eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"]
    out = np.empty((3, 64), np.uint32)
    patterns = given["in"].view(np.uint32)
    for i in range(64):
        x, y = int(patterns[0, i]), int(patterns[1, i])
        a = decode(x, F32)
        normal = not a.nan and not a.infinite and bool(x >> 23 & 0xFF)
        flags = [_relations(x, y, F32)[name] for name in order]
        # testp.normal holds for zeros.
        flags += [not a.nan and not a.infinite, a.infinite, not a.nan, a.nan, normal or a.zero]
        flags += [not a.nan and not a.zero and not a.infinite and not normal]
        flushed = _relations(x, y, F32, True)
        flags += [flushed["eq"], flushed["lt"]]
        out[0, i] = sum(bool(f) << n for n, f in enumerate(flags))
        out[1, i] = M32 if flags[4] else 0
        out[2, i] = 0x3F800000 if flushed["le"] else 0
    return {"out": out}


def _packed(one: Callable[[int, int, int], int]) -> Callable[[int, int, int], int]:
    def run(x: int, y: int, z: int) -> int:
        low = one(x & 0xFFFF, y & 0xFFFF, z & 0xFFFF)
        return low | one(x >> 16, y >> 16, z >> 16) << 16

    return run


def _scalar(one: Callable[[int, int, int], int]) -> Callable[[int, int, int], int]:
    return lambda x, y, z: one(x & 0xFFFF, y & 0xFFFF, z & 0xFFFF)


def _one_if(form: Format, relation: str) -> Callable[[int, int, int], int]:
    one = encode(ONE, form)
    return lambda x, y, z: one if _relations(x, y, form)[relation] else 0


def _select(form: Format, relation: str) -> Callable[[int, int, int], int]:
    return lambda x, y, z: x if _relations(x, y, form)[relation] else z


def _leu_mask(x: int, y: int, z: int) -> int:
    """set.leu.u32.f16x2: one result for both halves? see the case; each half gives 16 ones."""
    return sum(0xFFFF << s for s in (0, 16) if _relations(x >> s & 0xFFFF, y >> s & 0xFFFF, F16)["leu"])


def halves() -> list[Row]:
    """The rows of half.cu's f16 kernel."""
    op = operation

    def product(x: Number, y: Number, z: Number) -> Number:
        return multiply(x, y)

    packed = [
        ("add.rn.f16x2", op(F16, _sum())),
        ("sub.f16x2", op(F16, lambda x, y, z: add(x, negate(y)))),
        ("mul.rn.f16x2", op(F16, product)),
        ("fma.rn.f16x2", op(F16, _fma("rn"))),
        ("fma.rn.relu.f16x2", op(F16, _fma("rn"), relu=True)),
        ("fma.rn.sat.f16x2", op(F16, _fma("rn"), sat=True)),
        ("add.ftz.f16x2", op(F16, _sum(), ftz=True)),
        ("mul.ftz.sat.f16x2", op(F16, product, ftz=True, sat=True)),
        ("min.f16x2", op(F16, lambda x, y, z: smaller(x, y))),
        ("max.NaN.f16x2", op(F16, lambda x, y, z: larger(x, y, True))),
        ("min.xorsign.abs.f16x2", op(F16, _xorsign(smaller))),
        ("abs.f16x2", _sign_bits(F16, 0, 0)),
        ("neg.f16x2", _sign_bits(F16, 1, 1)),
        ("set.gt.f16x2.f16x2", _one_if(F16, "gt")),
    ]
    scalar = [
        ("add.f16", op(F16, _sum())),
        ("mul.sat.f16", op(F16, product, sat=True)),
        ("fma.rn.ftz.f16", op(F16, _fma("rn"), ftz=True)),
        ("max.ftz.f16", op(F16, lambda x, y, z: larger(x, y), ftz=True)),
        ("setp.lt.f16", _select(F16, "lt")),
        ("cvt.rni.f16.f16", op(F16, lambda x, y, z: integral(x, "rni"))),
        ("cvt.rmi.f16.f16", op(F16, lambda x, y, z: integral(x, "rmi"))),
    ]
    rows: list[Row] = [(name, _packed(one)) for name, one in packed]
    rows.append(("set.leu.u32.f16x2", _leu_mask))
    return rows + [(name, _scalar(one)) for name, one in scalar]


def brains() -> list[Row]:
    """The rows of half.cu's bf16 kernel."""
    op = operation

    def product(x: Number, y: Number, z: Number) -> Number:
        return multiply(x, y)

    packed = [
        ("add.rn.bf16x2", op(BF16, _sum())),
        ("sub.rn.bf16x2", op(BF16, lambda x, y, z: add(x, negate(y)))),
        ("mul.rn.bf16x2", op(BF16, product)),
        ("fma.rn.bf16x2", op(BF16, _fma("rn"))),
        ("fma.rn.relu.bf16x2", op(BF16, _fma("rn"), relu=True)),
        ("min.bf16x2", op(BF16, lambda x, y, z: smaller(x, y))),
        ("max.NaN.bf16x2", op(BF16, lambda x, y, z: larger(x, y, True))),
        ("max.NaN.xorsign.abs.bf16x2", op(BF16, _xorsign(larger, True))),
        ("abs.bf16x2", _sign_bits(BF16, 0, 0)),
        ("neg.bf16x2", _sign_bits(BF16, 1, 1)),
        ("set.gt.bf16x2.bf16x2", _one_if(BF16, "gt")),
    ]
    scalar = [
        ("add.rn.bf16", op(BF16, _sum())),
        ("mul.rn.bf16", op(BF16, product)),
        ("fma.rn.bf16", op(BF16, _fma("rn"))),
        ("min.NaN.bf16", op(BF16, lambda x, y, z: smaller(x, y, True))),
        ("setp.gt.bf16", _select(BF16, "gt")),
    ]
    return [(name, _packed(one)) for name, one in packed] + [(name, _scalar(one)) for name, one in scalar]


def _to_int(form: Format, mode: str, bits: int, is_signed: bool, ftz: bool = False, show: int = 32, shift: int = 0):
    """cvt to an integer of the column's first value; `show` bits from `shift` on. NaN: zero but for 64-bit results
    or f64 sources, where it is the pattern with the top bit alone."""
    nan = 1 << (bits - 1) if bits == 64 or form is F64 else 0

    def run(x: int, y: int, z: int) -> int:
        value = to_integer(decode(x, form, ftz), mode, bits, is_signed, nan)
        return value >> shift & ((1 << show) - 1)

    return run


def _to_format(
    target: Format, mode: str, relu: bool = False, sat: bool = False, finite: bool = False, source: Format = F32
) -> Callable[[int], int]:
    def run(x: int) -> int:
        number = decode(x, source)
        if relu and number.negative and not number.nan:
            number = Number()
        if sat:
            number = unit(number)
        return encode(number, target, mode, finite=finite)

    return run


def _tf32(mode: str, relu: bool = False) -> Callable[[int, int, int], int]:
    form = Format("tf32", 8, 10, 0x3FFFF)

    def run(x: int, y: int, z: int) -> int:
        number = decode(x, F32)
        if number.nan:
            # .rna drops bits of the payload, the others give one pattern.
            return x & ~0x1FFF if mode == "rna" else 0x7FFFE000
        if relu and number.negative:
            number = Number()
        return encode(number, form, mode) << 13

    return run


def _widened(pattern: int, source: Format) -> int:
    """To f64: exact, and a NaN keeps its sign and payload and becomes quiet."""
    number = decode(pattern, source)
    if not number.nan:
        return encode(number, F64)
    payload = pattern & ((1 << source.mantissa) - 1)
    return (pattern >> (source.bits - 1)) << 63 | 0x7FF8 << 48 | payload << (F64.mantissa - source.mantissa)


def _first(one: Callable[[int], int]) -> Callable[[int, int, int], int]:
    return lambda x, y, z: one(x)


def _two(one: Callable[[int], int], bits: int) -> Callable[[int, int, int], int]:
    """The first source goes to the upper half."""
    return lambda x, y, z: one(x) << bits | one(y)


def from_single() -> list[Row]:
    """The rows of convert.cu from f32."""
    i = _to_int
    e4m3, e5m2 = FORMATS["e4m3"], FORMATS["e5m2"]
    return [
        ("cvt.rni.s32.f32", i(F32, "rni", 32, True)),
        ("cvt.rzi.s32.f32", i(F32, "rzi", 32, True)),
        ("cvt.rmi.s32.f32", i(F32, "rmi", 32, True)),
        ("cvt.rpi.s32.f32", i(F32, "rpi", 32, True)),
        ("cvt.rni.u32.f32", i(F32, "rni", 32, False)),
        ("cvt.rzi.ftz.u32.f32", i(F32, "rzi", 32, False, True)),
        ("cvt.rpi.ftz.s32.f32", i(F32, "rpi", 32, True, True)),
        ("cvt.rni.s16.f32", i(F32, "rni", 16, True, show=16)),
        ("cvt.rzi.u16.f32", i(F32, "rzi", 16, False, show=16)),
        ("cvt.rni.sat.s8.f32", i(F32, "rni", 8, True, show=16)),
        ("cvt.rzi.sat.u8.f32", i(F32, "rzi", 8, False, show=16)),
        *((f"cvt.{m}.f16.f32", _first(_to_format(F16, m))) for m in FOUR),
        ("cvt.rn.relu.f16.f32", _first(_to_format(F16, "rn", relu=True))),
        ("cvt.rn.sat.f16.f32", _first(_to_format(F16, "rn", sat=True))),
        *((f"cvt.{m}.bf16.f32", _first(_to_format(BF16, m))) for m in FOUR),
        ("cvt.rn.relu.bf16.f32", _first(_to_format(BF16, "rn", relu=True))),
        ("cvt.rn.f16x2.f32", _two(_to_format(F16, "rn"), 16)),
        ("cvt.rz.relu.f16x2.f32", _two(_to_format(F16, "rz", relu=True), 16)),
        ("cvt.rn.bf16x2.f32", _two(_to_format(BF16, "rn"), 16)),
        ("cvt.rz.bf16x2.f32", _two(_to_format(BF16, "rz"), 16)),
        ("cvt.rna.tf32.f32", _tf32("rna")),
        ("cvt.rn.tf32.f32", _tf32("rn")),
        ("cvt.rz.tf32.f32", _tf32("rz")),
        ("cvt.rn.relu.tf32.f32", _tf32("rn", True)),
        ("cvt.rn.satfinite.e4m3x2.f32", _two(_to_format(e4m3, "rn", finite=True), 8)),
        ("cvt.rn.satfinite.e5m2x2.f32", _two(_to_format(e5m2, "rn", finite=True), 8)),
        ("cvt.rn.satfinite.relu.e4m3x2.f32", _two(_to_format(e4m3, "rn", relu=True, finite=True), 8)),
        ("cvt.rni.s64.f32 low", i(F32, "rni", 64, True)),
        ("cvt.rzi.s64.f32 high", i(F32, "rzi", 64, True, shift=32)),
        ("cvt.rpi.u64.f32 high", i(F32, "rpi", 64, False, shift=32)),
        ("cvt.f64.f32 high", _first(lambda x: _widened(x, F32) >> 32)),
    ]


def _of(value: int, form: Format, mode: str = "rn") -> int:
    return encode(signed(Fraction(value)), form, mode)


def _s(value: int, bits: int) -> int:
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def from_integer() -> list[Row]:
    """The rows of convert.cu from integers (a 64-bit word and its low half)."""
    return [
        ("cvt.rn.f32.s32", _first(lambda d: _of(_s(d, 32), F32))),
        ("cvt.rz.f32.s32", _first(lambda d: _of(_s(d, 32), F32, "rz"))),
        ("cvt.rm.f32.s32", _first(lambda d: _of(_s(d, 32), F32, "rm"))),
        ("cvt.rp.f32.u32", _first(lambda d: _of(d & M32, F32, "rp"))),
        ("cvt.rn.f32.u32", _first(lambda d: _of(d & M32, F32))),
        ("cvt.rn.f32.s64", _first(lambda d: _of(_s(d, 64), F32))),
        ("cvt.rz.f32.u64", _first(lambda d: _of(d, F32, "rz"))),
        ("cvt.rn.f16.s32", _first(lambda d: _of(_s(d, 32), F16))),
        ("cvt.rz.f16.u32", _first(lambda d: _of(d & M32, F16, "rz"))),
        ("cvt.rn.f16.s16", _first(lambda d: _of(_s(d, 16), F16))),
        ("cvt.rn.bf16.s32", _first(lambda d: _of(_s(d, 32), BF16))),
        ("cvt.rn.f64.s64 low", _first(lambda d: _of(_s(d, 64), F64) & M32)),
        ("cvt.rp.f64.u64 low", _first(lambda d: _of(d, F64, "rp") & M32)),
        ("cvt.rn.f64.u32 high", _first(lambda d: _of(d & M32, F64) >> 32)),
    ]


def _low(one: Callable[[int], int], bits: int = 16) -> Callable[[int, int, int], int]:
    return lambda x, y, z: one(x & ((1 << bits) - 1))


def _unpack8(form: Format, relu: bool = False) -> Callable[[int, int, int], int]:
    one = _to_format(F16, "rn", relu=relu, source=form)
    return lambda x, y, z: one(x & 0xFF) | one(x >> 8 & 0xFF) << 16


def _pack8(form: Format, relu: bool = False) -> Callable[[int, int, int], int]:
    one = _to_format(form, "rn", relu=relu, finite=True, source=F16)
    return lambda x, y, z: one(x & 0xFFFF) | one(x >> 16) << 8


def from_narrow() -> list[Row]:
    """The rows of convert.cu from 16-bit and 8-bit formats."""
    e4m3, e5m2 = FORMATS["e4m3"], FORMATS["e5m2"]
    f16 = [
        _to_int(F16, m, b, s, show=show)
        for m, b, s, show in (("rni", 32, True, 32), ("rzi", 32, False, 32), ("rmi", 16, True, 16))
    ]
    return [
        ("cvt.f32.f16", _low(_to_format(F32, "rn", source=F16))),
        ("cvt.f32.bf16", _low(_to_format(F32, "rn", source=BF16))),
        ("cvt.rni.s32.f16", _low(lambda h: f16[0](h, 0, 0))),
        ("cvt.rzi.u32.f16", _low(lambda h: f16[1](h, 0, 0))),
        ("cvt.rmi.s16.f16", _low(lambda h: f16[2](h, 0, 0))),
        ("cvt.rzi.s32.bf16", _low(lambda h: _to_int(BF16, "rzi", 32, True)(h, 0, 0))),
        ("cvt.f64.f16 high", _low(lambda h: _widened(h, F16) >> 32)),
        ("cvt.rn.f16x2.e4m3x2", _unpack8(e4m3)),
        ("cvt.rn.f16x2.e5m2x2", _unpack8(e5m2)),
        ("cvt.rn.relu.f16x2.e4m3x2", _unpack8(e4m3, True)),
        ("cvt.rn.satfinite.e4m3x2.f16x2", _pack8(e4m3)),
        ("cvt.rn.satfinite.e5m2x2.f16x2", _pack8(e5m2)),
        ("cvt.rn.satfinite.relu.e5m2x2.f16x2", _pack8(e5m2, True)),
        ("cvt.rn.bf16.f16", _low(_to_format(BF16, "rn", source=F16))),
    ]


def _narrowed(mode: str, ftz: bool = False) -> Callable[[int], int]:
    return lambda x: encode(decode(x, F64), F32, mode, ftz)


def _wide_int(mode: str, bits: int, is_signed: bool) -> Callable[[int, int, int], int]:
    one = _to_int(F64, mode, bits, is_signed, show=bits)
    return lambda x, y, z: (_s(one(x, 0, 0), bits) if is_signed else one(x, 0, 0)) & ((1 << 64) - 1)


def from_double() -> list[Row]:
    """The rows of convert.cu from f64."""
    return [
        ("cvt.rni.s64.f64", _wide_int("rni", 64, True)),
        ("cvt.rzi.u64.f64", _wide_int("rzi", 64, False)),
        ("cvt.rmi.s32.f64", _wide_int("rmi", 32, True)),
        ("cvt.rpi.u32.f64", _wide_int("rpi", 32, False)),
        ("cvt.rn.f32.f64", _first(_narrowed("rn"))),
        ("cvt.rn.ftz.f32.f64", _first(_narrowed("rn", True))),
        ("cvt.rm.f32.f64", _first(_narrowed("rm"))),
        ("cvt.rn.f16.f64", _first(_to_format(F16, "rn", source=F64))),
        ("cvt.rni.s16.f64", _wide_int("rni", 16, True)),
    ]
