"""What float instructions share: subnormals flushed, saturation, the one NaN, zeros of min and max, 16-bit loads.

Arrays are float32 or float64 of any length; 16-bit formats are computed on as float32 and rounded once at the end.
"""

from __future__ import annotations

import numpy as np

from ..formats import NAN32, bf16_to_f32, f32_to_bf16, f32_to_f16
from ..registry import Unsupported
from .code import Code
from .dispatch import call, has_nan, source
from .exact import to_f32

HALVES = ("f16", "bf16")
PAIRS = ("f16x2", "bf16x2")
TINY32 = np.asarray(np.float32(2.0**-126))
TINY16 = np.asarray(np.float32(2.0**-14))
_MINUS_ZERO = b"\0\0\0\x80"
_PLUS_ZERO = b"\0\0\0\0"


# float32 -------------------------------------------------------------------------------------------------------------
def flush32(x: np.ndarray) -> np.ndarray:
    """Subnormals as zeros of their sign (.ftz)."""
    return np.multiply(x, np.greater_equal(np.abs(x), TINY32))


def smallest_normal(r: np.ndarray) -> bool:
    """Is any result the smallest normal number? Only then `flush_tiny` matters."""
    return bool(np.equal(np.abs(r), TINY32).any())


def flush_tiny(r: np.ndarray, x: np.ndarray, mode: str) -> np.ndarray:
    """Results that round up to the smallest normal number, flushed where 24 bits without a limit of the exponent would
    not have got there: so an H200 does. `x` is the float64 value.
    """
    tiny = np.abs(to_f32(x * 2.0**64, mode)) < np.float32(2.0**-62)
    return np.where(tiny & (x != 0), np.copysign(np.float32(0), r), r)


def canonical32(x: np.ndarray) -> np.ndarray:
    """Every NaN as 0x7fffffff (PTX ISA 9.7.3)."""
    return np.where(np.isnan(x), NAN32, x) if has_nan(x) else x


def repair_nan32(register: np.ndarray, mask: np.ndarray | None) -> None:
    """The same in place, for active threads."""
    found = np.isnan(register)
    if mask is not None:
        found &= mask
    register[found] = NAN32


def saturate(x: np.ndarray) -> np.ndarray:
    """Into 0 .. 1; NaN and -0 become +0 (.sat)."""
    return np.fmin(np.fmax(x, x.dtype.type(0)), x.dtype.type(1)) + x.dtype.type(0)


def finish32(x: np.ndarray, ftz: bool, sat: bool) -> np.ndarray:
    if ftz:
        x = flush32(x)
    return saturate(x) if sat else canonical32(x)


# Minimum and maximum -------------------------------------------------------------------------------------------------
def maximum(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The larger float32, the number if one is NaN; +0 is larger than -0."""
    r = np.fmax(a, b)
    if _MINUS_ZERO in r.tobytes():
        # Zeros add up to +0 unless both are -0.
        r = np.where((a == 0) & (b == 0), a + b, r)
    return canonical32(r)


def minimum(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    r = np.fmin(a, b)
    if _PLUS_ZERO in r.tobytes():
        r = np.where((a == 0) & (b == 0), -(-a + -b), r)
    return canonical32(r)


def extreme(largest: bool, nan: bool, absolute: bool, xorsign: bool, ftz: bool, *values: np.ndarray) -> np.ndarray:
    """min or max of two or three float32 arrays with the modifiers .NaN, .abs, .xorsign and .ftz (PTX ISA 9.7.3)."""
    if ftz:
        values = tuple(flush32(x) for x in values)
    sizes = tuple(np.abs(x) for x in values) if absolute else values
    r = sizes[0]
    for x in sizes[1:]:
        r = maximum(r, x) if largest else minimum(r, x)
    if xorsign:
        r = np.where(np.signbit(values[0]) ^ np.signbit(values[1]), -r, r)
    if nan:
        for x in values:
            r = np.where(np.isnan(x), NAN32, r)
    return canonical32(r)


def extreme64(largest: bool, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    r = np.fmax(a, b) if largest else np.fmin(a, b)
    zeros = a + b if largest else -(-a + -b)
    return np.where((a == 0) & (b == 0), zeros, r)


# 16-bit formats ------------------------------------------------------------------------------------------------------
def flush16(x: np.ndarray) -> np.ndarray:
    """float32 values of f16: subnormals of f16 as zeros of their sign."""
    return np.multiply(x, np.greater_equal(np.abs(x), TINY16))


def load(code: Code, operand: object, kind: str) -> str:
    """Text: float32 values of a 16-bit register [width], or of a packed one [2 * width], lower halves first."""
    if kind in HALVES:
        text = source(code, operand, "u16")
        return call(code, _from_f16 if kind == "f16" else bf16_to_f32, text)
    if kind in PAIRS:
        text = source(code, operand, "u32")
        if text in code.names:
            text = f"{code.helper(np.full)}(v.width,{text})"
        text = f"{text}.view({code.helper(np.uint16)})"
        return call(code, _from_f16 if kind == "f16x2" else bf16_to_f32, text)
    raise Unsupported(f"a 16-bit float of type .{kind}")


def _from_f16(bits: np.ndarray) -> np.ndarray:
    return bits.view(np.float16).astype(np.float32)


def finish16(x: np.ndarray, kind: str, ftz: bool = False, sat: bool = False, relu: bool = False) -> np.ndarray:
    """float32, or float64 not rounded yet, to the bits of a 16-bit format: uint16, or uint32 for packed ones."""
    if sat:
        x = saturate(x)
    codes = f32_to_f16(x) if kind in ("f16", "f16x2") else f32_to_bf16(x)
    if ftz:
        codes = np.where(codes & 0x7C00 == 0, codes & 0x8000, codes).astype(np.uint16)
    if relu:
        codes = np.where(np.greater(codes, 0x7FFF), np.uint16(0), codes)
    return codes.view(np.uint32) if kind in PAIRS else codes
