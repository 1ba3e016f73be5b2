"""Floating-point formats of tensor cores as raw bits: bf16, f16, tf32, fp8, fp6, fp4 and scales, bit for bit.

`encode(x, name)` gives codes of a format, `decode(codes, name)` gives float32. Roundings are PTX's: "rn" nearest even,
"rz" to zero, "rm" down, "rp" up, "rna" nearest with ties away from zero. Without `saturate` a value beyond the largest
finite one becomes infinity (NaN where a format has none); with it (.satfinite) it becomes the largest finite value.
NaN becomes the format's one NaN, or the largest value in formats without NaN (PTX ISA 9.7.9.21, cvt; 5.2.3, formats).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

NAN32 = np.uint32(0x7FFFFFFF).view(np.float32)  # what float32 arithmetic of a GPU returns for every NaN


@dataclass(frozen=True)
class Format:
    name: str
    exponent: int  # bits
    mantissa: int  # bits
    bias: int
    largest: int  # code of the largest finite value
    infinity: int | None
    nan: int | None

    @property
    def bits(self) -> int:
        return 1 + self.exponent + self.mantissa

    @property
    def dtype(self) -> type:
        return np.uint8 if self.bits <= 8 else np.uint16 if self.bits <= 16 else np.uint32


FORMATS = {
    f.name: f
    for f in (
        Format("f32", 8, 23, 127, 0x7F7FFFFF, 0x7F800000, 0x7FFFFFFF),
        Format("f16", 5, 10, 15, 0x7BFF, 0x7C00, 0x7FFF),
        Format("bf16", 8, 7, 127, 0x7F7F, 0x7F80, 0x7FFF),
        Format("tf32", 8, 10, 127, 0x3FBFF, 0x3FC00, 0x3FFFF),
        Format("e5m2", 5, 2, 15, 0x7B, 0x7C, 0x7F),
        Format("e4m3", 4, 3, 7, 0x7E, None, 0x7F),
        Format("e3m2", 3, 2, 3, 0x1F, None, None),
        Format("e2m3", 2, 3, 1, 0x1F, None, None),
        Format("e2m1", 2, 1, 1, 0x07, None, None),
    )
}


# Any format ----------------------------------------------------------------------------------------------------------
def encode(x: np.ndarray, name: str, rounding: str = "rn", saturate: bool = False) -> np.ndarray:
    """Codes of float32 or float64 values, each rounded once. tf32 codes are the upper 19 bits of a float32."""
    x = np.asarray(x)
    if FORMATS[name].bits <= 8 and x.dtype == np.float32:
        # The upper 16 bits and whether more follows are all that rounding to 5 bits or fewer can see.
        bits = x.view(np.uint32)
        upper = np.right_shift(bits, np.uint32(16)) | np.not_equal(np.bitwise_and(bits, np.uint32(0xFFFF)), 0)
        return _codes_by_upper_half(name, rounding, saturate)[upper]
    return _encode(x, name, rounding, saturate)


@cache
def _codes_by_upper_half(name: str, rounding: str, saturate: bool) -> np.ndarray:
    return _encode(bf16_to_f32(np.arange(1 << 16)), name, rounding, saturate)


def _encode(x: np.ndarray, name: str, rounding: str, saturate: bool) -> np.ndarray:
    f = FORMATS[name]
    with np.errstate(all="ignore"):
        x = x.astype(np.float64)
        negative = np.signbit(x)
        size = np.abs(x)
        size[()] = np.where(np.isfinite(size), size, 0)
        lowest = 1 - f.bias
        exponent = np.maximum(np.frexp(size)[1] - 1, lowest)
        units = _round(np.ldexp(size, f.mantissa - exponent), negative, rounding)
        # Units of a normal number hold its leading one, which stands for the first step of the exponent.
        code = units.astype(np.int64) + ((exponent - lowest).astype(np.int64) << f.mantissa)
        code = np.where(size == 0, 0, code)
        code = np.where(code > f.largest, _overflow(f, negative, rounding, saturate), code)
        code = np.where(np.isinf(x), f.largest if saturate or f.infinity is None else f.infinity, code)
        if f.infinity is None and f.nan is not None and not saturate:
            code = np.where(np.isinf(x), f.nan, code)
        code |= negative.astype(np.int64) << (f.bits - 1)
        code = np.where(np.isnan(x), f.largest if f.nan is None else f.nan, code)
    return code.astype(f.dtype)


def _round(units: np.ndarray, negative: np.ndarray, rounding: str) -> np.ndarray:
    """Magnitudes to whole units."""
    if rounding == "rn":
        return np.rint(units)
    if rounding == "rna":
        return np.floor(units + 0.5)
    if rounding == "rz":
        return np.floor(units)
    if rounding in ("rm", "rp"):
        up = negative if rounding == "rm" else ~negative
        return np.where(up, np.ceil(units), np.floor(units))
    raise ValueError(f"rounding {rounding!r}: one of rn, rz, rm, rp, rna")


def _overflow(f: Format, negative: np.ndarray, rounding: str, saturate: bool) -> np.ndarray | int:
    """Code of a finite value that is larger than the largest one."""
    if saturate:
        return f.largest
    beyond = f.infinity if f.infinity is not None else f.nan if f.nan is not None else f.largest
    if rounding == "rz":
        return f.largest
    if rounding in ("rm", "rp"):
        return np.where(negative if rounding == "rm" else ~negative, beyond, f.largest)
    return beyond


@cache
def _table(name: str) -> np.ndarray:
    """float32 values of all codes."""
    f = FORMATS[name]
    codes = np.arange(1 << f.bits, dtype=np.int64)
    magnitude = codes & ((1 << (f.bits - 1)) - 1)
    exponent, fraction = magnitude >> f.mantissa, magnitude & ((1 << f.mantissa) - 1)
    lead = np.where(exponent > 0, 1 << f.mantissa, 0)
    value = np.ldexp((lead + fraction).astype(np.float64), np.maximum(exponent, 1) - f.bias - f.mantissa)
    if f.infinity is not None:
        value[magnitude == f.infinity] = np.inf
    value = np.where(codes >> (f.bits - 1), -value, value).astype(np.float32)
    if f.nan is not None:
        value[magnitude > (f.largest if f.infinity is None else f.infinity)] = NAN32
    return value


def decode(codes: np.ndarray, name: str) -> np.ndarray:
    """float32 values of codes; bits beyond those of the format are ignored."""
    if name == "bf16":
        return bf16_to_f32(codes)
    if name == "f16":
        return f16_to_f32(codes)
    f = FORMATS[name]
    if f.bits > 16:
        return (np.asarray(codes).astype(np.uint32) << np.uint32(32 - f.bits)).view(np.float32)
    return _table(name)[np.asarray(codes) & ((1 << f.bits) - 1)]


# 16 bits -------------------------------------------------------------------------------------------------------------
def bf16_to_f32(codes: np.ndarray) -> np.ndarray:
    """uint16 -> float32; exact, payloads of NaN kept."""
    return (np.asarray(codes).astype(np.uint32) << np.uint32(16)).view(np.float32)


def f32_to_bf16(x: np.ndarray, rounding: str = "rn", saturate: bool = False) -> np.ndarray:
    """float32 or float64 -> uint16."""
    x = np.asarray(x)
    if rounding != "rn" or saturate:
        return encode(x, "bf16", rounding, saturate)
    if x.dtype != np.float32:
        single = x.astype(np.float32)
        # Rounding twice differs only where float32 holds a tie that the value is not.
        tie = np.equal(np.bitwise_and(single.view(np.uint32), np.uint32(0xFFFF)), 0x8000)
        if (tie & (single != x)).any():
            return encode(x, "bf16")
        x = single
    bits = x.view(np.uint32)
    rounded = bits + (((bits >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF))
    code = (rounded >> np.uint32(16)).astype(np.uint16)
    nan = np.isnan(x)
    return np.where(nan, np.uint16(0x7FFF), code) if nan.any() else code


def f16_to_f32(codes: np.ndarray) -> np.ndarray:
    """uint16 -> float32; exact."""
    return np.asarray(codes).astype(np.uint16).view(np.float16).astype(np.float32)


def f32_to_f16(x: np.ndarray, rounding: str = "rn", saturate: bool = False) -> np.ndarray:
    """float32 or float64 -> uint16."""
    x = np.asarray(x)
    if rounding != "rn" or saturate:
        return encode(x, "f16", rounding, saturate)
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        code = x.astype(np.float16).view(np.uint16)
    nan = np.isnan(x)
    return np.where(nan, np.uint16(0x7FFF), code) if nan.any() else code


# tf32 ----------------------------------------------------------------------------------------------------------------
def f32_to_tf32(x: np.ndarray, rounding: str = "rna", saturate: bool = False) -> np.ndarray:
    """float32 -> float32 whose lower 13 bits are zero. Rounding "rna", "rn" or "rz".

    NaN, as an H200 gives it: "rna" keeps the upper 10 bits of the payload, the others return 0x7fffe000.
    """
    x = np.asarray(x, np.float32)
    bits = encode(x, "tf32", rounding, saturate) << np.uint32(13)
    if rounding == "rna" and not saturate:
        bits = np.where(np.isnan(x), x.view(np.uint32) & np.uint32(0xFFFFE000), bits)
    return bits.view(np.float32)


# 8 bits and fewer: codes are uint8, unused upper bits zero -----------------------------------------------------------
def e4m3_to_f32(codes: np.ndarray) -> np.ndarray:
    return _table("e4m3")[np.asarray(codes)]


def f32_to_e4m3(x: np.ndarray, saturate: bool = True, rounding: str = "rn") -> np.ndarray:
    """To +-448 with `saturate`, else to NaN beyond."""
    return encode(x, "e4m3", rounding, saturate)


def e5m2_to_f32(codes: np.ndarray) -> np.ndarray:
    return _table("e5m2")[np.asarray(codes)]


def f32_to_e5m2(x: np.ndarray, saturate: bool = True, rounding: str = "rn") -> np.ndarray:
    """To +-57344 with `saturate`, else to infinity beyond."""
    return encode(x, "e5m2", rounding, saturate)


def ue8m0_to_f32(codes: np.ndarray) -> np.ndarray:
    """Powers of two: 2**(code - 127); 255 is NaN."""
    codes = np.asarray(codes).astype(np.int64)
    with np.errstate(all="ignore"):
        value = np.ldexp(1.0, codes - 127).astype(np.float32)
    return np.where(codes == 255, NAN32, value)


def f32_to_ue8m0(x: np.ndarray, rounding: str = "rz", saturate: bool = True) -> np.ndarray:
    """The exponent of |x|, rounded down ("rz") or up ("rp"); beyond 2**127 it is 254 with `saturate`, else 255."""
    if rounding not in ("rz", "rp"):
        raise ValueError(f"rounding {rounding!r}: one of rz, rp")
    x = np.asarray(x, np.float32)
    size = x.view(np.uint32) & np.uint32(0x7FFFFFFF)
    code = size >> np.uint32(23)
    if rounding == "rp":
        # Code 0 stands for 2**-127, which is a subnormal float32: 0x00400000.
        inexact = ((size & np.uint32(0x7FFFFF)) != 0) & (size > 0x00400000) & (size < 0x7F800000)
        code = code + inexact
    if saturate:
        code = np.where((code == 255) & (size <= 0x7F800000), 254, code)
    return code.astype(np.uint8)
