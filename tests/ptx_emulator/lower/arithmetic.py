"""Integer arithmetic: add, sub, mul, mad, div, rem, sad, abs, neg, min, max, 24-bit and carry forms, dp4a, dp2a.

PTX ISA 9.7.1 and 9.7.2 (extended precision). Division by zero is unspecified there; here the quotient is all ones and
the remainder the dividend.
"""

from __future__ import annotations

import numpy as np

from ..ir import Imm, Instruction
from ..registry import Unsupported
from .code import Code
from .dispatch import (
    INTEGERS,
    SIGNED,
    allow,
    call,
    chosen,
    dtype_of,
    emit,
    operands,
    rule,
    source,
    sources,
)

WIDER = {"u16": "u32", "s16": "s32", "u32": "u64", "s32": "s64"}


def _unsigned(kind: str) -> str:
    return "u" + kind[1:]


# Sums ----------------------------------------------------------------------------------------------------------------
@rule("add sub", INTEGERS)
def _add_sub(code: Code, i: Instruction) -> None:
    operands(i, 3)
    kind = i.type
    allow(i, "cc sat" if kind == "s32" else "cc")
    if i.has("cc"):
        _carry_sum(code, i, "0")
        return
    if i.has("sat"):
        a, b = (source(code, x, kind) for x in i.args[1:])
        code.dst(i.args[0], kind, call(code, saturated_add if i.op == "add" else saturated_sub, a, b))
        return
    ufunc = "add" if i.op == "add" else "subtract"
    emit(code, ufunc, i.args[0], kind, *sources(code, i.args[1:], kind))


def _saturate32(wide: np.ndarray) -> np.ndarray:
    return np.minimum(np.maximum(wide, -(1 << 31)), (1 << 31) - 1).astype(np.int32)


def saturated_add(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return _saturate32(np.add(a, b, dtype=np.int64))


def saturated_sub(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return _saturate32(np.subtract(a, b, dtype=np.int64))


@rule("addc subc", "u32 s32 u64 s64")
def _addc_subc(code: Code, i: Instruction) -> None:
    operands(i, 3)
    allow(i, "cc")
    _carry_sum(code, i, "v.carry")


def _carry_sum(code: Code, i: Instruction, carry: str) -> None:
    kind = _unsigned(i.type)
    if kind == "u16":
        raise Unsupported("a carry of 16-bit values")
    a, b = sources(code, i.args[1:], kind)
    function = add_with_carry if i.op.startswith("add") else sub_with_borrow
    _finish_carry(code, i, code.temp(call(code, function, a, b, carry)), kind)


def _finish_carry(code: Code, i: Instruction, pair: str, kind: str) -> None:
    code.dst(i.args[0], kind, f"{pair}[0]")
    if i.has("cc"):
        code.line(f"v.carry[...]={pair}[1]" if code.mask == "None" else f"copyto(v.carry,{pair}[1],where={code.mask})")


def add_with_carry(a: np.ndarray, b: np.ndarray, carry: np.ndarray | int) -> tuple[np.ndarray, np.ndarray]:
    first = np.add(a, b)
    second = np.add(first, np.asarray(carry, a.dtype))
    return second, (first < a) | (second < first)


def sub_with_borrow(a: np.ndarray, b: np.ndarray, borrow: np.ndarray | int) -> tuple[np.ndarray, np.ndarray]:
    first = np.subtract(a, b)
    second = np.subtract(first, np.asarray(borrow, a.dtype))
    return second, (a < b) | (second > first)


# Products ------------------------------------------------------------------------------------------------------------
def _product(code: Code, i: Instruction, mode: str, kind: str) -> str:
    """Text of the product of operands 1 and 2; of the wider type for "wide"."""
    a, b = sources(code, i.args[1:3], kind)
    if mode == "lo":
        return f"{code.helper(np.multiply)}({a},{b})"
    if mode == "wide":
        wide = code.helper(dtype_of(WIDER[kind]))
        texts = []
        for operand, text in zip(i.args[1:3], (a, b), strict=True):
            if isinstance(operand, Imm) and text in code.names:
                texts.append(code.const(np.asarray(code.names[text]).astype(dtype_of(WIDER[kind]))))
            else:
                texts.append(f"{text}.astype({wide})")
        return f"{code.helper(np.multiply)}({','.join(texts)})"
    return call(code, high_product, a, b)


def high_product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The upper half of the product of two integers of one type."""
    bits = a.dtype.itemsize * 8
    if bits < 64:
        wide = np.int64 if a.dtype.kind == "i" else np.uint64
        return (np.multiply(a, b, dtype=wide) >> wide(bits)).astype(a.dtype)
    x, y = a.view(np.uint64), b.view(np.uint64)
    half, low = np.uint64(32), np.uint64(0xFFFFFFFF)
    x0, x1, y0, y1 = x & low, x >> half, y & low, y >> half
    middle = x1 * y0 + ((x0 * y0) >> half)
    other = x0 * y1 + (middle & low)
    high = x1 * y1 + (middle >> half) + (other >> half)
    if a.dtype.kind == "i":
        high = high - np.where(a < 0, y, np.uint64(0)) - np.where(b < 0, x, np.uint64(0))
    return high.view(a.dtype)


@rule("mul", INTEGERS)
def _mul(code: Code, i: Instruction) -> None:
    operands(i, 3)
    allow(i, "lo hi wide")
    mode, kind = chosen(i, "lo hi wide"), i.type
    if mode == "lo":
        emit(code, "multiply", i.args[0], kind, *sources(code, i.args[1:], kind))
        return
    if mode == "wide" and kind not in WIDER:
        raise Unsupported(f"mul.wide of .{kind}")
    code.dst(i.args[0], WIDER[kind] if mode == "wide" else kind, _product(code, i, mode, kind))


@rule("mad", INTEGERS)
def _mad(code: Code, i: Instruction) -> None:
    operands(i, 4)
    allow(i, "lo hi wide cc sat")
    mode, kind = chosen(i, "lo hi wide"), i.type
    if i.has("cc"):
        _carry_mad(code, i, mode, "0")
        return
    if mode == "wide" and kind not in WIDER:
        raise Unsupported(f"mad.wide of .{kind}")
    if i.has("sat"):
        if (mode, kind) != ("hi", "s32"):
            raise Unsupported("mad.sat: PTX has mad.hi.sat.s32 only")
        product = _product(code, i, mode, kind)
        code.dst(i.args[0], kind, call(code, saturated_add, product, source(code, i.args[3], kind)))
        return
    result = WIDER[kind] if mode == "wide" else kind
    emit(code, "add", i.args[0], result, _product(code, i, mode, kind), source(code, i.args[3], result))


@rule("madc", "u32 s32 u64 s64")
def _madc(code: Code, i: Instruction) -> None:
    operands(i, 4)
    allow(i, "lo hi cc")
    _carry_mad(code, i, chosen(i, "lo hi"), "v.carry")


def _carry_mad(code: Code, i: Instruction, mode: str, carry: str) -> None:
    if mode == "wide" or i.type.endswith("16"):
        raise Unsupported("a carry of mad.wide or of 16-bit values")
    kind = _unsigned(i.type)
    product = _product(code, i, mode, i.type) + f".view({code.helper(dtype_of(kind))})"
    pair = code.temp(call(code, add_with_carry, product, source(code, i.args[3], kind), carry))
    _finish_carry(code, i, pair, kind)


@rule("mul24 mad24", "u32 s32")
def _mul24(code: Code, i: Instruction) -> None:
    operands(i, 3 if i.op == "mul24" else 4)
    allow(i, "lo hi sat" if i.op == "mad24" else "lo hi")
    mode, kind = chosen(i, "lo hi"), i.type
    product = call(code, product24, *sources(code, i.args[1:3], kind), mode == "hi")
    if i.op == "mul24":
        code.dst(i.args[0], kind, product)
        return
    c = source(code, i.args[3], kind)
    if i.has("sat"):
        if (mode, kind) != ("hi", "s32"):
            raise Unsupported("mad24.sat: PTX has mad24.hi.sat.s32 only")
        code.dst(i.args[0], kind, call(code, saturated_add, product, c))
    else:
        emit(code, "add", i.args[0], kind, product, c)


def product24(a: np.ndarray, b: np.ndarray, high: bool) -> np.ndarray:
    """Bits 31..0, or 47..16, of the product of the lower 24 bits."""
    eight = a.dtype.type(8)
    wide = np.int64 if a.dtype.kind == "i" else np.uint64
    product = np.multiply((a << eight) >> eight, (b << eight) >> eight, dtype=wide)
    return ((product >> wide(16)) if high else product).astype(a.dtype)


# Quotients -----------------------------------------------------------------------------------------------------------
@rule("div rem", INTEGERS)
def _div_rem(code: Code, i: Instruction) -> None:
    operands(i, 3)
    allow(i, "")
    function = quotient if i.op == "div" else remainder
    code.dst(i.args[0], i.type, call(code, function, *sources(code, i.args[1:], i.type)))


def _magnitudes(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Unsigned sizes of both; a divisor of zero as one."""
    unsigned = np.dtype(f"u{a.dtype.itemsize}")
    return np.abs(a).view(unsigned), np.maximum(np.abs(b).view(unsigned), 1)


def quotient(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Rounded towards zero."""
    x, y = _magnitudes(a, b)
    q = np.floor_divide(x, y).view(a.dtype)
    if a.dtype.kind == "i":
        q = np.where((a < 0) != (b < 0), np.negative(q), q)
    return np.where(b == 0, np.invert(np.zeros_like(q)), q)


def remainder(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """With the sign of the dividend."""
    x, y = _magnitudes(a, b)
    r = np.remainder(x, y).view(a.dtype)
    if a.dtype.kind == "i":
        r = np.where(a < 0, np.negative(r), r)
    return np.where(b == 0, a, r)


# The rest ------------------------------------------------------------------------------------------------------------
@rule("sad", INTEGERS)
def _sad(code: Code, i: Instruction) -> None:
    operands(i, 4)
    allow(i, "")
    code.dst(i.args[0], i.type, call(code, absolute_difference, *(source(code, x, i.type) for x in i.args[1:])))


def absolute_difference(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    return np.add(np.subtract(np.maximum(a, b), np.minimum(a, b)), c)


@rule("abs neg", SIGNED)
def _abs_neg(code: Code, i: Instruction) -> None:
    operands(i, 2)
    allow(i, "")
    emit(code, "absolute" if i.op == "abs" else "negative", i.args[0], i.type, *sources(code, i.args[1:], i.type))


@rule("min max", INTEGERS)
def _min_max(code: Code, i: Instruction) -> None:
    operands(i, 3)
    allow(i, "relu" if i.type == "s32" else "")
    ufunc = "minimum" if i.op == "min" else "maximum"
    texts = sources(code, i.args[1:], i.type)
    if i.has("relu"):
        texts = [f"{code.helper(getattr(np, ufunc))}({','.join(texts)})", code.const(np.asarray(np.int32(0)))]
        ufunc = "maximum"
    emit(code, ufunc, i.args[0], i.type, *texts)


@rule("dp4a dp2a", "u32 s32")
def _dot_product(code: Code, i: Instruction) -> None:
    operands(i, 4)
    kinds = [m for m in i.mods if m in ("u32", "s32")]
    if len(kinds) != 2:
        raise Unsupported(f"{i.op} needs the types of a and b; it has {kinds}")
    signed_a, signed_b = (k == "s32" for k in kinds)
    high = i.op == "dp2a" and chosen(i, "lo hi") == "hi"
    a, b, c = (source(code, x, "u32") for x in i.args[1:])
    function = dot4 if i.op == "dp4a" else dot2
    code.dst(i.args[0], "u32", call(code, function, a, b, c, signed_a, signed_b, *([high] if i.op == "dp2a" else [])))


def bit_field(x: np.ndarray, start: int, bits: int, signed: bool) -> np.ndarray:
    """A field of a register as int64."""
    value = (np.asarray(x).astype(np.int64) >> start) & ((1 << bits) - 1)
    half = 1 << (bits - 1)
    return (value ^ half) - half if signed else value


def dot4(a: np.ndarray, b: np.ndarray, c: np.ndarray, signed_a: bool, signed_b: bool) -> np.ndarray:
    """c plus the sum of products of the four bytes of a and b, modulo 2**32."""
    total = np.asarray(c).astype(np.int64)
    for k in range(4):
        total = total + bit_field(a, 8 * k, 8, signed_a) * bit_field(b, 8 * k, 8, signed_b)
    return (total & 0xFFFFFFFF).astype(np.uint32)


def dot2(a: np.ndarray, b: np.ndarray, c: np.ndarray, signed_a: bool, signed_b: bool, high: bool) -> np.ndarray:
    """c plus the products of a's halves with two bytes of b: the lower pair, or the upper."""
    total = np.asarray(c).astype(np.int64)
    for k in range(2):
        total = total + bit_field(a, 16 * k, 16, signed_a) * bit_field(b, 8 * k + 16 * high, 8, signed_b)
    return (total & 0xFFFFFFFF).astype(np.uint32)
