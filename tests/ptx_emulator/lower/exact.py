"""Exactly rounded float32 and float64 arithmetic in all four rounding modes, on numpy arrays.

An exact sum is held as a float64 rounded to odd: when it is inexact, the neighbour with an odd last bit stands for it.
Rounded again to 51 bits or fewer, in any mode, that gives what the exact value would give (Boldo and Melquiond,
"Emulation of FMA and correctly rounded sums: proved algorithms using rounding to odd", 2008).
Modes: "rn", "rz", "rm", "rp".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np

F64 = np.float64
F32 = np.float32
_SHIFT = np.asarray(np.uint32(3))
_SPLIT = 134217729.0  # 2**27 + 1


def two_sum(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """a + b as the nearest float64 and what that leaves out (Knuth)."""
    s = a + b
    t = s - a
    return s, (a - (s - t)) + (b - t)


def odd_sum(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a + b of float64, rounded to odd."""
    s, rest = two_sum(a, b)
    s = np.atleast_1d(s)
    if not rest.any():
        return s
    bits = s.view(np.int64)
    # NaN in `rest` comes from infinite sums, which need no correction.
    fix = (rest != 0) & ((bits & 1) == 0) & np.isfinite(s)
    outwards = (rest > 0) == (s > 0)
    return np.where(fix, bits + np.where(outwards, 1, -1), bits).view(F64)


def to_f32(x: np.ndarray, mode: str) -> np.ndarray:
    """float64 (exact or rounded to odd) to float32."""
    f = x.astype(F32)
    if mode == "rn":
        return f
    back = f.astype(F64)
    if mode == "rz":
        return np.where(np.abs(back) > np.abs(x), np.nextafter(f, F32(0)), f)
    if mode == "rm":
        return np.where(back > x, np.nextafter(f, F32(-np.inf)), f)
    return np.where(back < x, np.nextafter(f, F32(np.inf)), f)


def _zero_of_sum(result: np.ndarray, a: np.ndarray, b: np.ndarray, mode: str) -> np.ndarray:
    """Rounding down makes a sum that cancels -0 instead of +0 (IEEE 754, 6.3)."""
    if mode != "rm":
        return result
    cancelled = (result == 0) & (a == -b) & (np.signbit(a) | np.signbit(b))
    return np.where(cancelled, -np.abs(result), result)


# float32 -------------------------------------------------------------------------------------------------------------
def fma32(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Nearest float32 of a * b + c; one of a, b, c is an array [width].

    The product is exact in float64. The sum rounds there and again to float32, which differs from one rounding only
    when the float64 sum is a tie of float32: its low word times 8 is then the bytes 00 00 00 80. Not looked for are
    ties of subnormal results: there the product must lie within 2**-30 of half the smallest subnormal.
    """
    x = np.add(np.multiply(a, b, dtype=F64), c)
    if b"\0\0\0\x80" in np.left_shift(x.view(np.uint32), _SHIFT).tobytes():
        x = odd_sum(np.multiply(a, b, dtype=F64), np.asarray(c, F64))
    return x.astype(F32)


def fma32_in(a: np.ndarray, b: np.ndarray, c: np.ndarray, mode: str) -> np.ndarray:
    product, c = np.multiply(a, b, dtype=F64), np.asarray(c, F64)
    return _zero_of_sum(to_f32(odd_sum(product, c), mode), product, c, mode)


def sum32_in(a: np.ndarray, b: np.ndarray, mode: str) -> np.ndarray:
    a, b = np.asarray(a, F64), np.asarray(b, F64)
    return _zero_of_sum(to_f32(odd_sum(a, b), mode), a, b, mode)


def product32_in(a: np.ndarray, b: np.ndarray, mode: str) -> np.ndarray:
    return to_f32(np.multiply(a, b, dtype=F64), mode)


def quotient32_in(a: np.ndarray, b: np.ndarray, mode: str) -> np.ndarray:
    """The nearest float32 of a / b, then moved where its product with b says that it lies on the wrong side."""
    a, b = np.asarray(a, F64), np.asarray(b, F64)
    f = np.divide(a, b).astype(F32)
    if mode == "rn":
        return f
    # f * b is exact in float64. sign(f - a / b) = sign(f * b - a) * sign(b); an infinite f came from an overflow.
    over = np.isinf(f) & np.isfinite(a) & (b != 0)
    side = np.where(over, np.sign(f), np.sign(f.astype(F64) * b - a) * np.sign(b))
    side = np.where(np.isfinite(a) & np.isfinite(b) & (b != 0), side, 0)
    return _move(f, side, np.signbit(a) != np.signbit(b), mode)


def root32_in(a: np.ndarray, mode: str) -> np.ndarray:
    a = np.asarray(a, F64)
    f = np.sqrt(a).astype(F32)
    if mode == "rn":
        return f
    side = np.where(np.isfinite(a) & (a > 0), np.sign(f.astype(F64) ** 2 - a), 0)
    return _move(f, side, np.zeros(f.shape, bool), mode)


def _move(f: np.ndarray, side: np.ndarray, negative: np.ndarray, mode: str) -> np.ndarray:
    """One step down where f is too large (side > 0), or up, as the mode asks. `negative`: is the exact value?"""
    down = (side > 0) & (True if mode == "rm" else ~negative if mode == "rz" else False)
    up = (side < 0) & (True if mode == "rp" else negative if mode == "rz" else False)
    f = np.where(down, np.nextafter(f, F32(-np.inf)), f)
    return np.where(up, np.nextafter(f, F32(np.inf)), f)


# float64 -------------------------------------------------------------------------------------------------------------
def fma64(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Nearest float64 of a * b + c."""
    a, b, c = np.broadcast_arrays(np.asarray(a, F64), b, c)
    product = a * b
    low = _product_rest(a, b, product)
    upper, lower = two_sum(c, low)
    high, rest = two_sum(product, upper)
    result = high + odd_sum(rest, lower)
    # Where parts of it may leave the range of float64, the lane is done with fractions.
    size = np.abs(product)
    safe = (size < 1e290) & ((size > 1e-260) | (product == 0) & ((a == 0) | (b == 0))) & (np.abs(c) < 1e290)
    safe &= (np.abs(a) < 1e290) & (np.abs(b) < 1e290)
    plain = product + c
    result = np.where(safe, np.where(low == 0, plain, result), plain)
    finite = np.isfinite(a) & np.isfinite(b)
    result = np.where(finite & np.isinf(c), c, result)
    for lane in np.flatnonzero(~safe & finite & np.isfinite(c)):
        x, y, z = float(a[lane]), float(b[lane]), float(c[lane])
        exact = Fraction(x) * Fraction(y) + Fraction(z)
        result[lane] = _rounded(exact, "rn") if exact else plain[lane]
    return result


def _product_rest(a: np.ndarray, b: np.ndarray, product: np.ndarray) -> np.ndarray:
    """a * b - product, exact unless it leaves the range of float64 (Dekker)."""
    t = a * _SPLIT
    a_high = t - (t - a)
    t = b * _SPLIT
    b_high = t - (t - b)
    a_low, b_low = a - a_high, b - b_high
    return ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low


def _rounded(exact: Fraction, mode: str) -> float:
    """float64 of a number that is not zero."""
    sign = 1 if exact > 0 else -1
    try:
        nearest = float(exact)
    except OverflowError:
        nearest = math.copysign(math.inf, sign)
    if mode == "rn":
        return nearest
    difference = math.copysign(1, nearest) if math.isinf(nearest) else Fraction(nearest) - exact
    if difference > 0 and (mode == "rm" or (mode == "rz" and exact > 0)):
        return math.nextafter(nearest, -math.inf)
    if difference < 0 and (mode == "rp" or (mode == "rz" and exact < 0)):
        return math.nextafter(nearest, math.inf)
    # A number too small for float64 is a zero of its own sign.
    return math.copysign(nearest, sign)


def _directed64(exact: Callable[..., Fraction], nearest: np.ndarray, mode: str, *sources: np.ndarray) -> np.ndarray:
    """Lane by lane with fractions: directed rounding of float64 is rare in kernels."""
    result = np.array(nearest, F64)
    columns = [np.broadcast_to(np.asarray(s, F64), result.shape).tolist() for s in sources]
    for lane, values in enumerate(zip(*columns, strict=True)):
        if all(map(math.isfinite, values)):
            try:
                value = exact(*map(Fraction, values))
            except ZeroDivisionError:
                continue
            if value:
                result[lane] = _rounded(value, mode)
    return result


def sum64_in(a: np.ndarray, b: np.ndarray, mode: str) -> np.ndarray:
    return _zero_of_sum(_directed64(lambda x, y: x + y, a + b, mode, a, b), a, b, mode)


def product64_in(a: np.ndarray, b: np.ndarray, mode: str) -> np.ndarray:
    return _directed64(lambda x, y: x * y, a * b, mode, a, b)


def fma64_in(a: np.ndarray, b: np.ndarray, c: np.ndarray, mode: str) -> np.ndarray:
    product = a * b
    # A finite product that leaves the range is no infinity here.
    nearest = np.where(np.isfinite(a) & np.isfinite(b) & np.isinf(c), c, product + c)
    # A product too small for float64 is no zero: with a zero it makes no zero sum.
    least = np.copysign(5e-324, product)
    product = np.where((product == 0) & (a != 0) & (b != 0), least, product)
    return _zero_of_sum(_directed64(lambda x, y, z: x * y + z, nearest, mode, a, b, c), product, c, mode)


def quotient64_in(a: np.ndarray, b: np.ndarray, mode: str) -> np.ndarray:
    return _directed64(lambda x, y: x / y, np.divide(a, b), mode, a, b)


def root64_in(a: np.ndarray, mode: str) -> np.ndarray:
    result = np.sqrt(np.atleast_1d(a))
    for lane, x in enumerate(np.broadcast_to(a, result.shape).tolist()):
        if math.isfinite(x) and x > 0:
            nearest = float(result[lane])
            side = Fraction(nearest) ** 2 - Fraction(x)
            if side > 0 and mode in ("rm", "rz"):
                result[lane] = math.nextafter(nearest, 0)
            elif side < 0 and mode == "rp":
                result[lane] = math.nextafter(nearest, math.inf)
    return result
