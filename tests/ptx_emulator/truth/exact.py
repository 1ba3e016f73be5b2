"""Floating point by exact rational arithmetic: one rounding at the end, in any of the formats and modes.

The reference for the arithmetic cases. Slow (a few microseconds per operation) and simple on purpose; nothing of it is
shared with the emulator. Rules: IEEE 754; NaN results, min/max and saturation as in PTX ISA sections 9.7.3 to 9.7.5.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import isqrt

import numpy as np


@dataclass(frozen=True)
class Format:
    """A binary format; `nan` is the pattern of a NaN result, `infinite` says whether it has infinities."""

    name: str
    exponent: int
    mantissa: int
    nan: int
    infinite: bool = True

    @property
    def bits(self) -> int:
        return 1 + self.exponent + self.mantissa

    @property
    def bias(self) -> int:
        return (1 << (self.exponent - 1)) - 1

    @property
    def largest(self) -> int:
        """The pattern of the largest finite value."""
        return (((1 << self.exponent) - 1) << self.mantissa) - 1 if self.infinite else self.nan - 1


FORMATS = {
    f.name: f
    for f in (
        Format("f16", 5, 10, 0x7FFF),
        Format("bf16", 8, 7, 0x7FFF),
        Format("f32", 8, 23, 0x7FFFFFFF),
        Format("f64", 11, 52, 0x7FFFFFFFFFFFFFFF),
        Format("e5m2", 5, 2, 0x7F),
        Format("e4m3", 4, 3, 0x7F, infinite=False),
    )
}
F16, BF16, F32, F64 = (FORMATS[name] for name in ("f16", "bf16", "f32", "f64"))


@dataclass(frozen=True)
class Number:
    """A value: `size` is its magnitude, None for infinity; a NaN has `nan` set."""

    negative: bool = False
    size: Fraction | None = Fraction(0)
    nan: bool = False

    @property
    def infinite(self) -> bool:
        return self.size is None and not self.nan

    @property
    def zero(self) -> bool:
        return self.size == 0 and not self.nan

    @property
    def value(self) -> Fraction:
        """The signed value of a finite number."""
        assert self.size is not None
        return -self.size if self.negative else self.size


NAN = Number(nan=True)


def decode(pattern: int, form: Format, ftz: bool = False) -> Number:
    """The number of a pattern; ftz reads a subnormal as a zero of its sign."""
    negative = bool(pattern >> (form.bits - 1) & 1)
    exponent = pattern >> form.mantissa & ((1 << form.exponent) - 1)
    fraction = pattern & ((1 << form.mantissa) - 1)
    if form.infinite and exponent == (1 << form.exponent) - 1:
        return Number(negative, nan=True) if fraction else Number(negative, None)
    if not form.infinite and pattern & ((1 << (form.bits - 1)) - 1) == form.nan:
        return Number(negative, nan=True)
    if exponent == 0:
        return Number(negative, Fraction(0) if ftz else Fraction(fraction, 1 << (form.bias - 1 + form.mantissa)))
    scale = exponent - form.bias - form.mantissa
    size = Fraction(fraction | 1 << form.mantissa) * (Fraction(2) ** scale)
    return Number(negative, size)


def _whole(value: Fraction, negative: bool, mode: str) -> int:
    """A non-negative magnitude rounded to an integer: rn (ties to even), rna (ties away), rz, rm or rp."""
    floor, rest = divmod(value.numerator, value.denominator)
    if rest == 0 or mode == "rz" or mode == ("rp" if negative else "rm"):
        return floor
    if mode in ("rm", "rp"):
        return floor + 1
    twice = 2 * rest
    up = twice > value.denominator or (twice == value.denominator and (mode == "rna" or floor % 2 == 1))
    return floor + up


def encode(number: Number, form: Format, mode: str = "rn", ftz: bool = False, finite: bool = False) -> int:
    """The pattern of a number rounded once; `finite` clamps to the largest value (.satfinite).

    ftz flushes results below the normal range.
    """
    sign = int(number.negative) << (form.bits - 1)
    if number.nan:
        return form.nan
    if number.size is None:
        return sign | (form.largest if finite else form.largest + 1)
    if number.size == 0:
        return sign
    size = number.size
    # 2^power <= size < 2^(power + 1)
    power = size.numerator.bit_length() - size.denominator.bit_length()
    if Fraction(2) ** power > size:
        power -= 1
    lowest = 1 - form.bias
    unit = Fraction(2) ** (max(power, lowest) - form.mantissa)
    steps = _whole(size / unit, number.negative, mode)
    pattern = steps if power < lowest else steps + ((power - lowest) << form.mantissa)
    if ftz and power < lowest:
        # Tiny is what stays below the normal range when rounded as if the exponent had no end.
        digits = _whole(size / Fraction(2) ** (power - form.mantissa), number.negative, mode)
        if power + (digits >> (form.mantissa + 1)) < lowest:
            return sign
    if pattern > form.largest:
        away = mode in ("rn", "rna") or mode == ("rm" if number.negative else "rp")
        pattern = form.largest + 1 if away and not finite else form.largest
    return sign | pattern


def signed(value: Fraction, zero_negative: bool = False) -> Number:
    """A finite number; `zero_negative` is the sign of an exact zero."""
    return Number(value < 0 or (value == 0 and zero_negative), abs(value))


def add(a: Number, b: Number, mode: str = "rn") -> Number:
    """The exact sum (the mode decides the sign of x - x)."""
    if a.nan or b.nan or (a.infinite and b.infinite and a.negative != b.negative):
        return NAN
    if a.infinite or b.infinite:
        return a if a.infinite else b
    if a.zero and b.zero:
        return Number(a.negative and b.negative if a.negative == b.negative else mode == "rm")
    return signed(a.value + b.value, mode == "rm")


def negate(a: Number) -> Number:
    """The number with the other sign."""
    return Number(not a.negative, a.size, a.nan)


def multiply(a: Number, b: Number) -> Number:
    """The exact product."""
    negative = a.negative != b.negative
    if a.nan or b.nan or (a.infinite and b.zero) or (a.zero and b.infinite):
        return NAN
    if a.infinite or b.infinite:
        return Number(negative, None)
    assert a.size is not None and b.size is not None
    return Number(negative, a.size * b.size)


def divide(a: Number, b: Number) -> Number:
    """The exact quotient."""
    negative = a.negative != b.negative
    if a.nan or b.nan or (a.infinite and b.infinite) or (a.zero and b.zero):
        return NAN
    if a.infinite or b.zero:
        return Number(negative, None)
    if b.infinite or a.zero:
        return Number(negative)
    assert a.size is not None and b.size is not None
    return Number(negative, a.size / b.size)


def root(a: Number) -> Number:
    """The square root to about 160 bits, never on a boundary unless exact."""
    if a.nan or (a.negative and not a.zero):
        return NAN
    if a.infinite or a.zero:
        return a
    assert a.size is not None
    shift = 320 + 2 * a.size.denominator.bit_length()
    scaled, rest = divmod(a.size.numerator << shift, a.size.denominator)
    whole = isqrt(scaled)
    inexact = rest != 0 or whole * whole != scaled
    return Number(False, Fraction(2 * whole + inexact, 1 << (shift // 2 + 1)))


def smaller(a: Number, b: Number, nan: bool = False) -> Number:
    """min of PTX: a NaN gives way unless `nan`; -0 is below +0."""
    if a.nan or b.nan:
        return NAN if nan or (a.nan and b.nan) else (b if a.nan else a)
    return a if _order(a) <= _order(b) else b


def larger(a: Number, b: Number, nan: bool = False) -> Number:
    """max of PTX, likewise."""
    if a.nan or b.nan:
        return NAN if nan or (a.nan and b.nan) else (b if a.nan else a)
    return a if _order(a) >= _order(b) else b


def _order(a: Number) -> tuple[int, Fraction, int]:
    infinity = 0 if not a.infinite else (-1 if a.negative else 1)
    return infinity, Fraction(0) if a.infinite else a.value, 0 if a.negative else 1


def unit(a: Number) -> Number:
    """.sat: clamped to [0, 1], NaN to +0."""
    if a.nan or a.negative or a.zero:
        return Number()
    return Number(False, Fraction(1)) if a.infinite or a.value > 1 else a


def to_integer(a: Number, mode: str, bits: int, is_signed: bool, nan: int = 0) -> int:
    """cvt to an integer type, clamped to its range; `nan` is the result for NaN. Modes rni, rzi, rmi, rpi."""
    low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if is_signed else (0, (1 << bits) - 1)
    if a.nan:
        return nan
    if a.infinite:
        return low if a.negative else high
    assert a.size is not None
    whole = _whole(a.size, a.negative, mode[:2])
    return max(low, min(high, -whole if a.negative else whole))


def integral(a: Number, mode: str) -> Number:
    """cvt to an integral value of the same format."""
    if a.nan or a.size is None:
        return a
    return Number(a.negative, Fraction(_whole(a.size, a.negative, mode[:2])))


def to_float(patterns: np.ndarray, form: Format) -> np.ndarray:
    """float64 values of an array of patterns."""
    out = np.empty(patterns.shape, np.float64)
    for index, pattern in enumerate(patterns.reshape(-1)):
        number = decode(int(pattern), form)
        magnitude = np.nan if number.nan else np.inf if number.size is None else float(number.size)
        out.reshape(-1)[index] = -magnitude if number.negative else magnitude
    return out


def from_integers(values: np.ndarray, form: Format) -> np.ndarray:
    """Patterns (uint8, uint16, uint32 or uint64) of integers, exactly or rounded to nearest."""
    dtype = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}[form.bits]
    table = {int(v): encode(signed(Fraction(int(v))), form) for v in np.unique(values)}
    return np.array([table[int(v)] for v in values.reshape(-1)], dtype).reshape(values.shape)
