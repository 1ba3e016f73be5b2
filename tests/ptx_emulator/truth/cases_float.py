"""Floating point: inputs with every special value, and the cases of floating.cu, half.cu, convert.cu and approx.cu."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from math import erf

import numpy as np

from . import rows_float as rows
from .case import AnyNan, Arrays, Case, Close, integers, raw, untouched
from .exact import BF16, F16, F64, Format, encode, to_float
from .rows_float import Row


def _row_case(kernel: str, module: str, table: Sequence[Row], given: np.ndarray, dtype: type, **more) -> Case:
    columns = given.shape[-1]
    return Case(
        f"{module}/{kernel}",
        module,
        kernel,
        {"in": given, "out": untouched((len(table), columns), dtype)},
        ("out",),
        ("in", "out"),
        block=(columns, 1, 1),
        expect=table_expect(table, columns),
        rows={"out": [name for name, _ in table]},
        **more,
    )


def table_expect(table: Sequence[Row], columns: int) -> Callable[[Arrays], Arrays]:
    """The expectation of a table over `in` [up to 3, columns]."""

    def expect(given: Arrays) -> Arrays:
        source = given["in"]
        unsigned = {2: np.uint16, 4: np.uint32, 8: np.uint64}[source.dtype.itemsize]
        patterns = source.view(unsigned).reshape(-1, columns)
        target = given["out"]
        out = np.empty(target.shape, {4: np.uint32, 8: np.uint64}[target.dtype.itemsize])
        for j in range(columns):
            operands = [*(int(v) for v in patterns[:, j]), 0, 0][:3]
            for i, (_, function) in enumerate(table):
                out[i, j] = function(*operands)
        return {"out": out.view(target.dtype)}

    return expect


SPECIALS_32 = (
    0x00000000, 0x80000000, 0x3F800000, 0xBF800000, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC12345, 0x7F812345,
    0x00000001, 0x80000001, 0x007FFFFF, 0x00800000, 0x807FFFFF, 0x7F7FFFFF, 0xFF7FFFFF, 0x3F7FFFFF, 0x3F800001,
    0x4B000001, 0x4B800001, 0x00ABCDEF, 0x33800000, 0x3F000000, 0x3FC00000, 0x40200000, 0xC0200000,
)  # fmt: skip
SPECIALS_64 = tuple(
    (pattern & 0x80000000) << 32
    | (2047 if pattern >> 23 & 255 == 255 else (pattern >> 23 & 255) * 8) << 52
    | (pattern & 0x7FFFFF) << 29
    | (pattern & 1)
    for pattern in SPECIALS_32
)
# Ties and limits of the narrow formats and of the integer types.
CONVERT_32 = np.array(
    (
        *(0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 127.5, -128.5, 255.5, 32767.5, -32768.5, 65535.5),
        *(448.0, 464.0, 480.0, -464.5, 57344.0, 61440.0, 65504.0, 65519.0, 65520.0, 1.0625, 1.1875),
        *(2147483648.0, -2147483648.0, 4294967296.0, 9.3e18, 1.9e19),
        *(2.0**-9, 2.0**-10, 3 * 2.0**-11, 2.0**-16, 2.0**-17, 2.0**-24, 2.0**-25),
    ),
    np.float32,
).view(np.uint32)
SPECIALS_16 = (0x0000, 0x8000, 0x3C00, 0xBC00, 0x7C00, 0xFC00, 0x7E00, 0x7D01, 0x0001, 0x83FF, 0x0400, 0x7BFF, 0xFBFF)
SPECIALS_BF16 = (0x0000, 0x8000, 0x3F80, 0xBF80, 0x7F80, 0xFF80, 0x7FC0, 0xFF81, 0x0001, 0x807F, 0x0080, 0x7F7F, 0xFF7F)


def _mixed(seed: str, rows: int, columns: int, specials: Sequence[int], near: Callable[[np.ndarray], np.ndarray]):
    """Random patterns of moderate size with the specials sprinkled over all rows at different places."""
    bits = near(raw(seed, (rows, columns), np.uint64))
    for row in range(rows):
        places = np.argsort(integers(f"{seed}/{row}", (columns,), 0, 1 << 30), kind="stable")[: len(specials)]
        bits[row, places[: columns // 2]] = specials[: columns // 2]
    return bits


def _near_32(bits: np.ndarray) -> np.ndarray:
    """Exponents 96 to 159, so that results stay finite more often than not."""
    words = (bits & np.uint64(0x807FFFFF)).astype(np.uint32)
    return words | ((bits >> np.uint64(32)).astype(np.uint32) % 64 + 96 << 23)


def _near_64(bits: np.ndarray) -> np.ndarray:
    exponent = np.uint64(1023 - 40) + (bits >> np.uint64(52)) % np.uint64(80)
    return (bits & np.uint64(0x800FFFFFFFFFFFFF)) | exponent << np.uint64(52)


def _near_halves(bits: np.ndarray) -> np.ndarray:
    return (bits & np.uint64(0xFFFF)).astype(np.uint16)


def _pairs(seed: str, rows: int, columns: int, specials: Sequence[int]) -> np.ndarray:
    """Packed 16-bit values: [rows, columns] words."""
    bits = _mixed(seed, rows, 2 * columns, specials, _near_halves)
    return np.ascontiguousarray(bits).view(np.uint32)


def _encoded(values: np.ndarray, form: Format) -> np.ndarray:
    """float64 values as patterns, rounded to nearest."""
    return np.array([encode(rows.signed(Fraction(float(v))), form) for v in values.reshape(-1)], np.uint64).reshape(
        values.shape
    )


def _exact_cases() -> Iterator[Case]:
    single = _mixed("float/single", 3, 64, SPECIALS_32, _near_32).view(np.float32)
    # Products just below the smallest normal number, which rounding to 24 bits would reach: z is zero.
    bits = single.view(np.uint32)
    bits[:, 60], bits[:, 61], bits[:, 62] = (
        (0x3F000001, 0x00FFFFFE, 0),
        (0x3F7FFFFF, 0x00800000, 0),
        (0x3F000800, 0x00FFF000, 0),
    )
    yield _row_case("singles", "floating", rows.singles(), single, np.float32)
    compared = single[:2].copy()
    compared[1, ::5] = compared[0, ::5]
    yield Case(
        "floating/comparisons",
        "floating",
        "comparisons",
        {"in": compared, "out": untouched((3, 64), np.uint32)},
        ("out",),
        ("in", "out"),
        block=(64, 1, 1),
        expect=rows.comparisons,
    )
    wide = _mixed("float/double", 3, 64, SPECIALS_64, _near_64).view(np.float64)
    yield _row_case("doubles", "floating", rows.doubles(), wide, np.float64, compare={"out": AnyNan("f64")})
    yield _row_case("halves", "half", rows.halves(), _pairs("float/half", 3, 64, SPECIALS_16), np.uint32)
    yield _row_case("brains", "half", rows.brains(), _pairs("float/brain", 3, 64, SPECIALS_BF16), np.uint32)


def _convert_cases() -> Iterator[Case]:
    single = _mixed("convert/single", 2, 128, (*SPECIALS_32, *CONVERT_32), _near_32)
    # A third at the scale of the narrow formats, a third at that of integers.
    scale = np.arange(128) % 3
    exponent = single >> 23 & 0xFF
    plain = (exponent >= 96) & (exponent < 160)
    single = np.where(plain & (scale == 0), (single & 0x807FFFFF) | (exponent % 20 + 117 << 23), single).astype(
        np.uint32
    )
    single = np.where(plain & (scale == 1), (single & 0x807FFFFF) | (exponent % 40 + 124 << 23), single).astype(
        np.uint32
    )
    single[:, 100:] = np.concatenate([CONVERT_32] * 2)[:28]
    single[1] = np.roll(single[1], 37)
    yield _row_case("from_single", "convert", rows.from_single(), single.view(np.float32), np.uint32)
    words = raw("convert/integer", (1, 128), np.uint64)
    words >>= (np.arange(128) % 60).astype(np.uint64)
    words[0, :8] = (0, 1, 0xFFFFFFFF, 0x80000000, 0x7FFFFFFF, 1 << 63, (1 << 64) - 1, 0x1000001)
    yield _row_case("from_integer", "convert", rows.from_integer(), words, np.uint32)
    narrow = _pairs("convert/narrow", 1, 128, SPECIALS_16)
    # Every byte value once among the low halves: two codes each.
    narrow[0] = (narrow[0] & 0xFFFF0000) | np.where(
        np.arange(128) < 32, narrow[0] & 0xFFFF, np.arange(128) * 0x0201 + 0x0100
    )
    yield _row_case("from_narrow", "convert", rows.from_narrow(), narrow.astype(np.uint32), np.uint32)
    double = _mixed("convert/double", 1, 128, SPECIALS_64, _near_64)
    double[0, :40] = _encoded(np.linspace(-300, 300, 40) + 0.5, F64)[:40]
    double[0, 40:60] = _encoded(2.0 ** np.linspace(-140, 70, 20) * 1.2345678, F64)
    yield _row_case("from_double", "convert", rows.from_double(), double.view(np.float64), np.uint64)


def _finite(seed: str, low: float, high: float) -> np.ndarray:
    return (low + (high - low) * integers(seed, (64,), 0, 1 << 20) / (1 << 20)).astype(np.float32)


def _approximate(given: Arrays) -> Arrays:
    x, y = given["in"].astype(np.float64)
    rows_ = [np.exp2(x)] * 2 + [np.log2(y)] * 2 + [np.sin(x), np.cos(x)] + [1 / x] * 2 + [1 / np.sqrt(y)] * 2
    rows_ += [np.sqrt(y)] * 2 + [np.tanh(x)] + [x / y] * 3
    return {"out": np.stack(rows_).astype(np.float32)}


def _approximate_packed(given: Arrays) -> Arrays:
    out = []
    for name, form in (("halves", F16), ("brains", BF16)):
        values = to_float(given[name].view(np.uint16), form)
        for function in (np.exp2, np.tanh):
            out.append(_encoded(function(values), form).astype(np.uint16).view(np.uint32))
    return {"out": np.stack(out)}


def _library(given: Arrays) -> Arrays:
    x, y = given["in"].astype(np.float64)
    error = np.array([erf(v) for v in x])
    out = [np.exp(x), np.log(y), np.exp(x) / y, np.tanh(x), np.exp2(x) / np.sqrt(y), x / y + error]
    return {"out": np.stack(out).astype(np.float32)}


APPROXIMATE = [
    "ex2.approx",
    "ex2.approx.ftz",
    "lg2.approx",
    "lg2.approx.ftz",
    "sin.approx",
    "cos.approx",
    "rcp.approx",
    "rcp.approx.ftz",
    "rsqrt.approx",
    "rsqrt.approx.ftz",
    "sqrt.approx",
    "sqrt.approx.ftz",
    "tanh.approx",
    "div.approx",
    "div.full",
    "div.approx.ftz",
]


def _approximate_cases() -> Iterator[Case]:
    given = np.stack([_finite("approx/x", -3, 3), _finite("approx/y", 0.01, 40)])
    given[0, :4], given[1, :4] = (0.5, 1.0, -1.0, 2.0), (1.0, 4.0, 0.25, 2.0)
    given[0] = np.where(np.abs(given[0]) < 0.01, np.float32(0.75), given[0])
    for kernel, expect, names in (
        ("singles", _approximate, APPROXIMATE),
        ("library", _library, ["expf", "logf", "__expf", "tanhf", "rsqrtf*exp2f", "erff"]),
    ):
        yield Case(
            f"approx/{kernel}",
            "approx",
            kernel,
            {"in": given, "out": untouched((len(names), 64), np.float32)},
            ("out",),
            ("in", "out"),
            block=(64, 1, 1),
            expect=expect,
            rows={"out": names},
            # tanh.approx has a relative error of 2^-11, the others about 2^-22; sin and cos an absolute one.
            compare={"out": Close("f32", 2.0**-10.5, 2.0**-20)},
        )
    values = _finite("approx/packed", -3, 3).astype(np.float64)
    pairs = {
        form.name: _encoded(np.concatenate([values, values[::-1] / 2]), form).astype(np.uint16) for form in (F16, BF16)
    }
    yield Case(
        "approx/packed",
        "approx",
        "packed",
        {
            "halves": pairs["f16"].view(np.uint32),
            "brains": pairs["bf16"].view(np.uint32),
            "out": untouched((4, 64), np.uint32),
        },
        ("out",),
        ("halves", "brains", "out"),
        block=(64, 1, 1),
        expect=_approximate_packed,
        rows={"out": ["ex2.approx.f16x2", "tanh.approx.f16x2", "ex2.approx.ftz.bf16x2", "tanh.approx.bf16x2"]},
        compare={"out": Close("f16|bf16", 2.0**-7, 2.0**-9)},
    )


def cases() -> list[Case]:
    """All cases of this file."""
    return [*_exact_cases(), *_convert_cases(), *_approximate_cases()]
