"""cvt and cvt.pack. PTX ISA 9.7.9.21 and 9.7.9.22.

Integers keep their value modulo the width of the result, or are clamped with .sat. Floats become integers with a
rounding modifier and are always clamped; NaN becomes 0, or the value with only the top bit set when the source is f64
or the result has 64 bits. Narrow floats: formats.py.
"""

from __future__ import annotations

import numpy as np

from .. import formats
from ..ir import CLASS_OF_SIZE, Instruction, Reg
from ..registry import Unsupported, generated
from . import exact, floats
from .code import Code
from .dispatch import call, chosen, has_nan, operands, source, sources

_INTEGERS = ("u8", "u16", "u32", "u64", "s8", "s16", "s32", "s64")
_FLOATS = ("f16", "bf16", "f32", "f64")
_NARROW_PAIRS = ("e4m3x2", "e5m2x2", "e3m2x2", "e2m3x2", "e2m1x2")
_NARROW_FOURS = ("e4m3x4", "e5m2x4", "e3m2x4", "e2m3x4", "e2m1x4")
_TYPES = (*_INTEGERS, *_FLOATS, "f16x2", "bf16x2", "tf32", "ue8m0x2", *_NARROW_PAIRS, *_NARROW_FOURS)
_TO_INTEGER = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
_MODES = "rn rz rm rp"
_INTEGER_MODES = "rni rzi rmi rpi"


@generated("cvt")
def _cvt(code: Code, i: Instruction) -> None:
    kinds = [m for m in i.mods if m in _TYPES]
    if len(kinds) != 2:
        raise Unsupported(f"cvt needs two types; it has {kinds or i.mods}")
    to, origin = kinds
    known = (*_TYPES, *_MODES.split(), *_INTEGER_MODES.split(), "rna", "rs", "ftz", "sat", "relu", "satfinite")
    for m in i.mods:
        if m not in known:
            raise Unsupported(f"modifier .{m} of cvt")
    if to in _INTEGERS and origin in _INTEGERS:
        _integer_to_integer(code, i, to, origin)
    elif to in _FLOATS and origin in _INTEGERS:
        _integer_to_float(code, i, to, origin)
    elif to in _INTEGERS and origin in _FLOATS:
        _float_to_integer(code, i, to, origin)
    elif to in _FLOATS and origin in _FLOATS:
        _float_to_float(code, i, to, origin)
    elif to == "tf32" and origin == "f32":
        _to_tf32(code, i)
    elif to in floats.PAIRS and origin == "f32":
        _pack_halves(code, i, to)
    elif to in ("ue8m0x2", *_NARROW_PAIRS):
        _pack_narrow(code, i, to, origin)
    elif to in floats.PAIRS:
        _unpack_narrow(code, i, to, origin)
    else:
        raise Unsupported(f"cvt from .{origin} to .{to}")


# Sources and results -------------------------------------------------------------------------------------------------
def _integer(code: Code, operand: object, kind: str) -> str:
    """The value of an integer source; 8-bit ones are the lower bits of their register."""
    if not kind.endswith("8"):
        return sources(code, (operand,), kind)[0]
    return f"{sources(code, (operand,), 'u16')[0]}.astype({code.helper(np.uint8 if kind == 'u8' else np.int8)})"


def _float(code: Code, operand: object, kind: str, ftz: bool) -> str:
    """A float source as float32, or float64 if it is f64."""
    text = floats.load(code, operand, kind) if kind in floats.HALVES else sources(code, (operand,), kind)[0]
    return call(code, floats.flush32, text) if ftz and kind == "f32" else text


def _dtype(kind: str) -> np.dtype:
    size = int(kind[1:]) // 8
    return np.dtype(f"{'i' if kind[0] == 's' else kind[0]}{size}")


# Integers ------------------------------------------------------------------------------------------------------------
def _integer_to_integer(code: Code, i: Instruction, to: str, origin: str) -> None:
    operands(i, 2)
    target = i.args[0]
    value = _integer(code, i.args[1], origin)
    if i.has("sat"):
        value = call(code, clamped, value, code.helper(_dtype(to)))
    elif not (isinstance(target, Reg) and target.cls == CLASS_OF_SIZE[_dtype(to).itemsize] and not to.endswith("8")):
        # Cut to the type first: the register may be wider, and is then extended from there.
        value = f"{value}.astype({code.helper(_dtype(to))})"
    code.dst(target, to, value)


def clamped(a: np.ndarray, dtype: np.dtype) -> np.ndarray:
    to, origin = np.iinfo(dtype), np.iinfo(a.dtype)
    return np.clip(a, max(to.min, origin.min), min(to.max, origin.max)).astype(dtype)


def _integer_to_float(code: Code, i: Instruction, to: str, origin: str) -> None:
    operands(i, 2)
    mode = chosen(i, _MODES, "rn" if to == "f64" else "")
    value = _integer(code, i.args[1], origin)
    if mode == "rn" and to in ("f32", "f64") and not i.has("sat"):
        code.dst(i.args[0], to, f"{value}.astype({code.helper(_dtype(to))})")
    else:
        code.dst(
            i.args[0],
            to if to[0] == "f" else "u16",
            call(code, integer_to_float, value, repr(to), repr(mode), i.has("sat")),
        )


def integer_to_float(a: np.ndarray, to: str, mode: str, sat: bool) -> np.ndarray:
    if a.dtype.itemsize == 8:
        upper, lower = (
            (a >> a.dtype.type(32)).astype(np.float64) * 2.0**32,
            (a & a.dtype.type(0xFFFFFFFF)).astype(np.float64),
        )
        if to == "f64":
            return floats.saturate(upper + lower) if sat else exact.sum64_in(upper, lower, mode)
        x = exact.odd_sum(upper, lower)
    else:
        x = a.astype(np.float64)
    return narrow(x, to, mode, False, sat)


def _float_to_integer(code: Code, i: Instruction, to: str, origin: str) -> None:
    operands(i, 2)
    mode = chosen(i, _INTEGER_MODES)
    value = _float(code, i.args[1], origin, i.has("ftz"))
    nan_is_zero = origin != "f64" and not to.endswith("64")
    text = call(code, float_to_integer, value, repr(mode), code.helper(_dtype(to)), nan_is_zero)
    code.dst(i.args[0], to, text)


def float_to_integer(x: np.ndarray, mode: str, dtype: np.dtype, nan_is_zero: bool) -> np.ndarray:
    limits = np.iinfo(dtype)
    y = _TO_INTEGER[mode](x.astype(np.float64))
    if dtype.itemsize <= 4 and nan_is_zero and not has_nan(x):
        return np.fmin(np.fmax(y, limits.min), limits.max).astype(np.int64).astype(dtype)
    top = 2.0 ** (limits.bits - (1 if limits.min < 0 else 0))
    inside = (y >= float(limits.min)) & (y < top)
    r = np.where(inside, y, 0.0)
    r = _unsigned64(r) if dtype == np.uint64 else r.astype(np.int64).astype(dtype)
    r = np.where(inside, r, np.where(y < 0, dtype.type(limits.min), dtype.type(limits.max)))
    nan = 0 if nan_is_zero else limits.min if limits.min < 0 else 1 << (limits.bits - 1)
    return np.where(np.isnan(x), dtype.type(nan), r)


def _unsigned64(y: np.ndarray) -> np.ndarray:
    """Whole float64 values in 0 .. 2**64 - 1."""
    upper = np.floor(y / 2.0**32)
    lower = y - upper * 2.0**32
    return (upper.astype(np.int64).astype(np.uint64) << np.uint64(32)) | lower.astype(np.int64).astype(np.uint64)


# Floats --------------------------------------------------------------------------------------------------------------
def _float_to_float(code: Code, i: Instruction, to: str, origin: str) -> None:
    operands(i, 2)
    target, ftz = i.args[0], i.has("ftz")
    result = "u16" if to == "bf16" else to
    whole = chosen(i, _INTEGER_MODES, "none")
    if whole != "none":
        value = _float(code, i.args[1], origin, ftz)
        value = f"{code.helper(_TO_INTEGER[whole])}({value})"
        code.dst(target, result, call(code, narrow, value, repr(to), repr("rn"), ftz, i.has("sat")))
        return
    order = {"f16": 1, "bf16": 1, "f32": 2, "f64": 3}
    widens = order[to] > order[origin] or to == origin
    mode = chosen(i, _MODES, "rn" if widens else "")
    if to == "f32" and origin == "bf16" and not i.has("sat"):
        code.dst(target, to, _float(code, i.args[1], origin, False))
        return
    if to in floats.HALVES and (i.has("relu") or i.has("satfinite")):
        value = _float(code, i.args[1], origin, ftz)
        text = call(code, halves, value, repr(to), repr(mode), i.has("relu"), i.has("satfinite"))
        code.dst(target, "u16", text)
        return
    value = _float(code, i.args[1], origin, ftz)
    code.dst(target, result, call(code, narrow, value, repr(to), repr(mode), ftz, i.has("sat")))


def narrow(x: np.ndarray, to: str, mode: str, ftz: bool, sat: bool) -> np.ndarray:
    """float32 or float64 (exact, or rounded to odd) to a float type; f16 comes as float16, bf16 as uint16."""
    if sat:
        x = floats.saturate(x)
    if to == "f64":
        return x.astype(np.float64)
    if to == "f32":
        y = exact.to_f32(x, mode) if x.dtype == np.float64 else x
        return floats.finish32(y, ftz, False)
    if to == "f16":
        return formats.f32_to_f16(x, mode).view(np.float16)
    return formats.f32_to_bf16(x, mode)


def halves(x: np.ndarray, to: str, mode: str, relu: bool, satfinite: bool) -> np.ndarray:
    """uint16 of f16 or bf16 with .relu (negative to 0) and .satfinite."""
    codes = (formats.f32_to_f16 if to == "f16" else formats.f32_to_bf16)(x, mode, satfinite)
    return np.where(codes > 0x7FFF, np.uint16(0), codes) if relu else codes


def _to_tf32(code: Code, i: Instruction) -> None:
    operands(i, 2)
    mode = chosen(i, "rna rn rz")
    text = call(code, to_tf32, sources(code, i.args[1:], "f32")[0], repr(mode), i.has("relu"), i.has("satfinite"))
    code.dst(i.args[0], "f32", text)


def to_tf32(x: np.ndarray, mode: str, relu: bool, satfinite: bool) -> np.ndarray:
    y = formats.f32_to_tf32(x, mode, satfinite)
    return np.where(np.signbit(y), np.float32(0), y) if relu else y


# Pairs ---------------------------------------------------------------------------------------------------------------
def _pack_halves(code: Code, i: Instruction, to: str) -> None:
    """d = {upper: a, lower: b}."""
    mode = chosen(i, "rn rz rs")
    operands(i, 4 if mode == "rs" else 3)
    a, b = (source(code, x, "f32") for x in i.args[1:3])
    kind = repr(to.removesuffix("x2"))
    if mode == "rs":
        bits = source(code, i.args[3], "u32")
        text = call(code, pack_stochastic, "v.width", a, b, bits, kind, i.has("relu"), i.has("satfinite"))
    elif mode == "rn" and not i.has("relu") and not i.has("satfinite"):
        text = call(code, pack_f16 if to == "f16x2" else pack_bf16, "v.width", a, b)
    else:
        text = call(code, pack_halves, "v.width", a, b, kind, repr(mode), i.has("relu"), i.has("satfinite"))
    code.dst(i.args[0], "u32", text)


def interleave(width: int, upper: np.ndarray, lower: np.ndarray, dtype: type = np.float32) -> np.ndarray:
    """[2 * width]: lower 0, upper 0, lower 1, ..."""
    both: np.ndarray = np.empty(2 * width, dtype)
    both[0::2] = lower
    both[1::2] = upper
    return both


_SIXTEEN, _ONE, _HALF = (np.asarray(np.uint32(x)) for x in (16, 1, 0x7FFF))


def pack_f16(width: int, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    both = interleave(width, a, b)
    s = both.dot(both)
    if s != s:
        return formats.f32_to_f16(both).view(np.uint32)
    return both.astype(np.float16).view(np.uint32)


def pack_bf16(width: int, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    both = interleave(width, a, b)
    s = both.dot(both)
    if s != s:
        return formats.f32_to_bf16(both).view(np.uint32)
    bits = both.view(np.uint32)
    r = np.right_shift(bits, _SIXTEEN)
    np.bitwise_and(r, _ONE, r)
    np.add(r, _HALF, r)
    np.add(r, bits, r)
    return np.right_shift(r, _SIXTEEN, r).astype(np.uint16).view(np.uint32)


def pack_halves(
    width: int, a: np.ndarray, b: np.ndarray, kind: str, mode: str, relu: bool, satfinite: bool
) -> np.ndarray:
    return halves(interleave(width, a, b), kind, mode, relu, satfinite).view(np.uint32)


def pack_stochastic(
    width: int, a: np.ndarray, b: np.ndarray, bits: np.ndarray, kind: str, relu: bool, satfinite: bool
) -> np.ndarray:
    """.rs: random bits are added below the last bit that is kept, then the rest is cut off. Of each half of `bits`, f16
    takes the lower 13, bf16 all 16. Results that are subnormal in f16: PTX leaves open how; here as the others.
    """
    x = interleave(width, a, b)
    noise = interleave(width, bits >> np.uint32(16), bits & np.uint32(0xFFFF), np.uint32)
    noise &= np.uint32(0x1FFF if kind == "f16" else 0xFFFF)
    y = np.where(np.isfinite(x), (x.view(np.uint32) + noise).view(np.float32), x)
    beyond = ~(np.abs(y) < (65536.0 if kind == "f16" else np.inf)) & ~np.isnan(x)
    codes = halves(np.where(beyond, np.copysign(np.float32(np.inf), x), y), kind, "rz", False, satfinite)
    return (np.where(codes > 0x7FFF, np.uint16(0), codes) if relu else codes).view(np.uint32)


def _pack_narrow(code: Code, i: Instruction, to: str, origin: str) -> None:
    """Two f32, or a pair of f16 or bf16, to two codes of 8, 6 or 4 bits: {upper: a, lower: b}."""
    if origin == "f32":
        operands(i, 3)
        a, b = (source(code, x, "f32") for x in i.args[1:])
        both = call(code, interleave, "v.width", a, b)
    elif origin in floats.PAIRS:
        operands(i, 2)
        both = floats.load(code, i.args[1], origin)
    else:
        raise Unsupported(f"cvt from .{origin} to .{to}")
    if to == "ue8m0x2":
        mode = chosen(i, "rz rp")
    else:
        mode = chosen(i, "rn")
        if not i.has("satfinite"):
            raise Unsupported(f"cvt to .{to} without .satfinite")
    text = call(code, pack_narrow, both, repr(to.removesuffix("x2")), repr(mode), i.has("relu"), i.has("satfinite"))
    code.dst(i.args[0], "u16", text)


def pack_narrow(both: np.ndarray, kind: str, mode: str, relu: bool, satfinite: bool) -> np.ndarray:
    """[2 * width] values, lower first, to uint16 [width]; 4-bit codes share the lower byte."""
    if kind == "ue8m0":
        codes = formats.f32_to_ue8m0(both, mode, satfinite)
    else:
        if relu:
            both = np.where(both < 0, both.dtype.type(0), both)
        codes = formats.encode(both, kind, "rn", True)
        if relu:
            codes = np.where(both == 0, np.uint8(0), codes)
    if kind == "e2m1":
        return (codes[0::2] | (codes[1::2] << np.uint8(4))).astype(np.uint16)
    return codes.view(np.uint16)


def _unpack_narrow(code: Code, i: Instruction, to: str, origin: str) -> None:
    operands(i, 2)
    allowed = {"f16x2": _NARROW_PAIRS, "bf16x2": ("ue8m0x2",)}[to]
    if origin not in allowed:
        raise Unsupported(f"cvt from .{origin} to .{to}: from one of {', '.join(allowed)}")
    chosen(i, "rn")
    a = sources(code, i.args[1:], "u16")[0]
    text = call(code, unpack_narrow, a, repr(origin.removesuffix("x2")), repr(to), i.has("relu"))
    code.dst(i.args[0], "u32", text)


def unpack_narrow(a: np.ndarray, origin: str, to: str, relu: bool) -> np.ndarray:
    if origin == "e2m1":
        codes = interleave(a.size, a >> np.uint16(4), a, np.uint8) & np.uint8(15)
    else:
        codes = np.ascontiguousarray(a).view(np.uint8)
    values = formats.ue8m0_to_f32(codes) if origin == "ue8m0" else formats.decode(codes, origin)
    return floats.finish16(values, to, relu=relu)


# cvt.pack ------------------------------------------------------------------------------------------------------------
@generated("cvt.pack")
def _cvt_pack(code: Code, i: Instruction) -> None:
    """cvt.pack.sat.T.s32{.b32} d, a, b{, c}: a and b clamped to T and packed; with c they move its lower bits up."""
    mods = [m for m in i.mods if m not in ("pack", "sat")]
    if not i.has("sat") or len(mods) < 2 or mods[1] != "s32":
        raise Unsupported("cvt.pack: the form is cvt.pack.sat.T.s32")
    small = {"u16": 16, "s16": 16, "u8": 8, "s8": 8, "u4": 4, "s4": 4, "u2": 2, "s2": 2}
    if mods[0] not in small:
        raise Unsupported(f"cvt.pack to .{mods[0]}: to one of {', '.join(small)}")
    bits = small[mods[0]]
    operands(i, 3 if bits == 16 else 4)
    if bits < 16 and mods[2:] != ["b32"]:
        raise Unsupported(f"cvt.pack to .{mods[0]} takes .b32 and a third source")
    a, b = sources(code, i.args[1:3], "s32")
    c = "None" if bits == 16 else source(code, i.args[3], "u32")
    code.dst(i.args[0], "u32", call(code, pack_integers, a, b, c, bits, mods[0][0] == "s"))


def pack_integers(a: np.ndarray, b: np.ndarray, c: np.ndarray | None, bits: int, signed: bool) -> np.ndarray:
    low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)
    field = (1 << bits) - 1
    packed = ((np.clip(a, low, high) & field).astype(np.int64) << bits) | (np.clip(b, low, high) & field)
    if c is not None:
        packed = packed | (c.astype(np.int64) << (2 * bits))
    return (packed & 0xFFFFFFFF).astype(np.uint32)
