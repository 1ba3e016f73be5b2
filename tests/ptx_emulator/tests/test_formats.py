"""Formats against torch's types where torch has them, and against exact fractions elsewhere."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest

from .. import formats

RNG = np.random.default_rng(3)


def samples() -> np.ndarray:
    """float32: all bf16 and all f16 values, halfway points between them, and random bits."""
    codes = np.arange(65536, dtype=np.uint32)
    values = [
        (codes << 16).view(np.float32),
        ((codes << 16) + 0x8000).view(np.float32),
        codes.astype(np.uint16).view(np.float16).astype(np.float32),
        RNG.integers(0, 2**32, 1 << 16, dtype=np.uint32).view(np.float32),
        (RNG.standard_normal(1 << 16) * 2.0 ** RNG.integers(-20, 20, 1 << 16)).astype(np.float32),
    ]
    half = values[2].copy()
    half.view(np.uint32)[...] += 0x1000  # halfway to the next f16
    return np.concatenate([*values, half])


@pytest.mark.parametrize("name", ["bf16", "f16", "e5m2", "e4m3"])
def test_all_codes_and_roundings_against_torch(name: str) -> None:
    torch = pytest.importorskip("torch")
    types = {
        "bf16": (torch.bfloat16, torch.int16, np.uint16),
        "f16": (torch.float16, torch.int16, np.uint16),
        "e5m2": (torch.float8_e5m2, torch.uint8, np.uint8),
        "e4m3": (torch.float8_e4m3fn, torch.uint8, np.uint8),
    }
    kind, raw, dtype = types[name]
    codes = np.arange(1 << formats.FORMATS[name].bits).astype(dtype)
    exact = torch.from_numpy(codes.view(np.int16 if dtype == np.uint16 else np.uint8)).view(kind).float().numpy()
    assert np.array_equal(formats.decode(codes, name), exact, equal_nan=True)
    x = samples()
    x = x[~np.isnan(x)]
    if name == "e4m3":
        x = x[np.abs(x) <= 448]  # torch's choice beyond the largest value is not ours to copy
    want = torch.from_numpy(x).to(kind).view(raw).numpy().view(dtype)
    assert (formats.encode(x, name) == want).all()
    if name in ("bf16", "f16"):
        function = formats.f32_to_bf16 if name == "bf16" else formats.f32_to_f16
        assert (function(x) == want).all()


@pytest.mark.parametrize("name", sorted(formats.FORMATS))
def test_codes_survive_a_round_trip(name: str) -> None:
    f = formats.FORMATS[name]
    codes = np.arange(1 << f.bits) if f.bits <= 16 else RNG.integers(0, 1 << f.bits, 4096)
    values = formats.decode(codes.astype(f.dtype), name)
    number = ~np.isnan(values)
    for mode in ("rn", "rz", "rm", "rp", "rna"):
        assert (formats.encode(values[number], name, mode) == codes[number]).all()
    if f.nan is not None:
        assert (formats.encode(values[~number], name) == f.nan).all()


@pytest.mark.parametrize("name", ["e3m2", "e2m3", "e2m1", "e4m3", "e5m2"])
def test_narrow_formats_round_to_the_nearest_value(name: str) -> None:
    """By search among all values of the format: nearest, ties to the even code."""
    f = formats.FORMATS[name]
    codes = np.arange(f.largest + 1)
    values = [Fraction(float(v)) for v in formats.decode(codes, name)]
    x = (RNG.standard_normal(600) * float(values[-1])).astype(np.float32)
    middles = [float(a + b) / 2 for a, b in pairwise(values)]
    x = np.concatenate([x, np.array(middles, np.float32), -np.array(middles, np.float32)])
    got = formats.encode(x, name, "rn", True)
    for value, code in zip(x.tolist(), got.tolist(), strict=True):
        size = abs(Fraction(value))
        best = min(range(len(values)), key=lambda k: (abs(values[k] - size), k & 1))
        assert code == best | (math.copysign(1, value) < 0) << (f.bits - 1), value


def test_values_beyond_the_largest() -> None:
    x = np.array([1e9, -1e9, np.inf, -np.inf, np.nan], np.float32)
    assert formats.f32_to_e4m3(x).tolist() == [0x7E, 0xFE, 0x7E, 0xFE, 0x7F]
    assert formats.f32_to_e4m3(x, saturate=False).tolist() == [0x7F, 0xFF, 0x7F, 0xFF, 0x7F]
    assert formats.f32_to_e5m2(x).tolist() == [0x7B, 0xFB, 0x7B, 0xFB, 0x7F]
    assert formats.f32_to_e5m2(x, saturate=False).tolist() == [0x7C, 0xFC, 0x7C, 0xFC, 0x7F]
    assert formats.encode(x, "e2m1", "rn", True).tolist() == [7, 15, 7, 15, 7]
    for name in ("e2m3", "e3m2"):
        assert formats.encode(x, name, "rn", True).tolist() == [31, 63, 31, 63, 31]
    assert formats.f32_to_f16(x, "rn", True).tolist() == [0x7BFF, 0xFBFF, 0x7BFF, 0xFBFF, 0x7FFF]
    assert formats.f32_to_f16(x, "rz").tolist() == [0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7FFF]
    assert formats.f32_to_bf16(np.array([1e39, -1e39, np.inf, -np.inf, np.nan]), "rz").tolist() == [
        0x7F7F,
        0xFF7F,
        0x7F80,
        0xFF80,
        0x7FFF,
    ]


def test_tf32() -> None:
    x = samples()
    bits = x.view(np.uint32)
    number = np.isfinite(x) & (np.abs(x) < 3e38)
    away = ((bits + 0x1000) & 0xFFFFE000)[number]
    even = ((bits + 0xFFF + ((bits >> 13) & 1)) & 0xFFFFE000)[number]
    assert (formats.f32_to_tf32(x)[number].view(np.uint32) == away).all()
    assert (formats.f32_to_tf32(x, "rn")[number].view(np.uint32) == even).all()
    assert (formats.f32_to_tf32(x, "rz")[number].view(np.uint32) == (bits & 0xFFFFE000)[number]).all()
    nan = np.array([0x7FC00000, 0x7F812345], np.uint32).view(np.float32)
    assert formats.f32_to_tf32(nan).view(np.uint32).tolist() == [0x7FC00000, 0x7F812000]
    assert formats.f32_to_tf32(nan, "rn").view(np.uint32).tolist() == [0x7FFFE000] * 2


def test_scales() -> None:
    codes = np.arange(256)
    values = formats.ue8m0_to_f32(codes)
    assert values[127] == 1 and values[0] == 2.0**-127 and np.isnan(values[255])
    for mode in ("rz", "rp"):
        assert (formats.f32_to_ue8m0(values, mode) == codes).all()
        assert (formats.f32_to_ue8m0(-values[:255], mode) == codes[:255]).all()
    between = np.array([1.5, 3.0, 2.0**-127 * 1.25, 2.0**-127 * 0.75, 0.0], np.float32)
    assert formats.f32_to_ue8m0(between, "rz").tolist() == [127, 128, 0, 0, 0]
    assert formats.f32_to_ue8m0(between, "rp").tolist() == [128, 129, 1, 0, 0]
    over = np.array([1.5 * 2.0**127, np.inf], np.float32)
    assert formats.f32_to_ue8m0(over, "rp").tolist() == [254, 254]
    assert formats.f32_to_ue8m0(over, "rp", saturate=False).tolist() == [255, 255]


def test_float64_is_rounded_to_bf16_once() -> None:
    """Values beside a tie of bf16 that float32 cannot tell from it."""
    tie = formats.bf16_to_f32(np.arange(0x3F80, 0x4080)).astype(np.float64) * (1 + 2.0**-8) + 0.0
    middle = (formats.bf16_to_f32(np.arange(0x3F80, 0x3FFF)).astype(np.float64) + 2.0**-8).repeat(2)
    for step in (0.0, 2.0**-40, -(2.0**-40)):
        for x in (tie + step, middle + step, -middle - step):
            assert (formats.f32_to_bf16(x) == formats.encode(x, "bf16")).all()
            assert (
                formats.f32_to_bf16(x[:64].astype(np.float32)) == formats.encode(x[:64].astype(np.float32), "bf16")
            ).all()
    assert formats.f32_to_bf16(np.array([1 + 2.0**-8 + 2.0**-40, 1 + 2.0**-8])).tolist() == [0x3F81, 0x3F80]
