"""Float instructions and conversions, each against exact fractions rounded once."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest

from .. import formats
from ..lower import exact
from .test_alu import RNG, WIDTH, View, bits, run, signed

# Bits of the significand, smallest exponent, largest exponent.
_SHAPES = {
    "f16": (11, -14, 15),
    "bf16": (8, -126, 127),
    "tf32": (11, -126, 127),
    "f32": (24, -126, 127),
    "f64": (53, -1022, 1023),
}
_NAMES = {"f16": "h", "bf16": "h", "f32": "r", "f64": "d"}
_DTYPES = {"f16": np.float16, "f32": np.float32, "f64": np.float64}
MODES = ("rn", "rz", "rm", "rp")


@pytest.fixture(autouse=True)
def _numbers_of_its_own() -> None:
    """A test's numbers must not depend on which tests ran before it in the same process."""
    RNG.bit_generator.state = np.random.default_rng(0).bit_generator.state


def rounded(x: Fraction, kind: str, mode: str) -> float:
    """A fraction as the float of a format in a rounding mode; zero is +0."""
    precision, lowest, highest = _SHAPES[kind]
    size = abs(x)
    if not size:
        return 0.0
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent -= size < Fraction(2) ** exponent
    unit = Fraction(2) ** (max(exponent, lowest) - precision + 1)
    count, rest = divmod(size / unit, 1)
    up = rest > 0 and ((mode == "rp" and x > 0) or (mode == "rm" and x < 0))
    up |= mode == "rn" and (rest > Fraction(1, 2) or (rest == Fraction(1, 2) and count % 2 == 1))
    up |= mode == "rna" and rest >= Fraction(1, 2)
    value = (count + up) * unit
    largest = (2 - Fraction(2) ** (1 - precision)) * Fraction(2) ** highest
    if value > largest:
        inwards = mode == "rz" or (mode == "rp" and x < 0) or (mode == "rm" and x > 0)
        return math.copysign(float(largest) if inwards else math.inf, 1 if x > 0 else -1)
    return math.copysign(float(value), 1 if x > 0 else -1)


def decoded(x: np.ndarray, kind: str) -> list[float]:
    """Register bits as Python floats."""
    if kind == "bf16":
        return formats.bf16_to_f32(x).tolist()
    return x.view(_DTYPES[kind]).tolist()


def encoded(values: list[float], kind: str) -> np.ndarray:
    """Python floats that the format holds as register bits, NaN canonical (except f64)."""
    if kind in ("f16", "bf16"):
        return formats.encode(np.array(values), kind)
    x = np.array(values).astype(_DTYPES[kind])
    out = x.view(f"u{x.itemsize}").copy()
    if kind == "f32":
        out[np.isnan(x)] = 0x7FFFFFFF
    return out


def flushed(x: float, kind: str) -> float:
    return math.copysign(0.0, x) if abs(x) < 2.0 ** _SHAPES[kind][1] else x


def same(got: np.ndarray, want: np.ndarray, kind: str, what: str, *sources: np.ndarray) -> None:
    """Equal bits; NaN of f64 in any form."""
    equal = got == want
    if kind == "f64":
        equal |= np.isnan(got.view(np.float64)) & np.isnan(want.view(np.float64))
    for lane in np.flatnonzero(~equal)[:1]:
        given = [hex(int(s[lane])) for s in sources]
        raise AssertionError(f"{what}: {given} gives {int(got[lane]):#x}, not {int(want[lane]):#x}")


def numbers(kind: str) -> np.ndarray:
    """Bits of a format: any, near one, small integers, and subnormals."""
    size = {"f64": 64, "f32": 32}.get(kind, 16)
    x = bits(size)
    near = encoded((RNG.standard_normal(WIDTH) * 2.0 ** RNG.integers(-3, 4, WIDTH)).tolist(), kind)
    whole = encoded(RNG.integers(-9, 10, WIDTH).astype(float).tolist(), kind)
    mantissa = _SHAPES[kind][0] - 1
    tiny = RNG.integers(0, 1 << (mantissa + 2), WIDTH).astype(x.dtype)
    return np.choose(RNG.integers(0, 4, WIDTH), [x, near, whole, tiny])


def _special(f: Callable[..., float], *values: float) -> float:
    with np.errstate(all="ignore"):
        return float(f(*(np.float64(v) for v in values)))


def _model(op: str, kind: str, mode: str, values: tuple[float, ...]) -> float:
    """What IEEE 754 gives for one operation."""
    functions: dict[str, Callable] = {
        "add": lambda a, b: a + b,
        "sub": lambda a, b: a - b,
        "mul": lambda a, b: a * b,
        "div": lambda a, b: a / b,
        "fma": lambda a, b, c: a * b + c,
    }
    f = functions[op]
    if not all(map(math.isfinite, values)) or (op == "div" and values[1] == 0):
        return _special(f, *values)
    exact = f(*map(Fraction, values))
    if exact:
        return rounded(exact, kind, mode)
    # Signs of zeros: of products by the rule of signs; of sums by the addends, and by the mode where they cancel.
    if op in ("mul", "div"):
        return math.copysign(0.0, math.copysign(1, values[0]) * math.copysign(1, values[1]))
    last = -values[-1] if op == "sub" else values[-1]
    first = values[0]
    if op == "fma":
        first = math.copysign(
            float(bool(values[0] * values[1])), math.copysign(1, values[0]) * math.copysign(1, values[1])
        )
    signs = {math.copysign(1, first), math.copysign(1, last)}
    negative = signs == {-1.0} or (len(signs) == 2 and mode == "rm")
    return -0.0 if negative else 0.0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["f32", "f64"])
@pytest.mark.parametrize("op", ["add", "sub", "mul", "div", "fma"])
def test_rounded_arithmetic(op: str, kind: str, mode: str) -> None:
    n, name = 3 if op == "fma" else 2, _NAMES[kind]
    for _ in range(4):
        xs = [numbers(kind) for _ in range(n)]
        xs[-1][::9] = xs[0][::9] ^ np.array(1 << (8 * xs[0].itemsize - 1), xs[0].dtype)  # cancel
        names = ", ".join(f"%{name}{k + 1}" for k in range(n))
        registers = {f"{name}{k + 1}": x for k, x in enumerate(xs)}
        rows = list(zip(*(decoded(x, kind) for x in xs), strict=True))
        got = run(f"{op}.{mode}.{kind} %{name}0, {names};", **registers).files[{"r": "w"}.get(name, name)][0]
        same(got, encoded([_model(op, kind, mode, row) for row in rows], kind), kind, f"{op}.{mode}.{kind}", *xs)
        if kind == "f32":
            flat = [flushed(_model(op, kind, mode, tuple(flushed(v, kind) for v in row)), kind) for row in rows]
            # What rounds up to the smallest normal number: test_flushing_where_rounding_reaches_the_normal_numbers.
            edge = np.abs(np.array(flat)) == 2.0**-126
            got = run(f"{op}.{mode}.ftz.f32 %r0, {names};", **registers).files["w"][0]
            same(np.where(edge, 0, got), np.where(edge, 0, encoded(flat, kind)), kind, f"{op}.{mode}.ftz.f32", *xs)
        if kind == "f32" and op != "div":
            got = run(f"{op}.{mode}.sat.f32 %r0, {names};", **registers).files["w"][0]
            limited = [min(max(v, 0.0), 1.0) if v == v else 0.0 for v in (_model(op, kind, mode, row) for row in rows)]
            same(got, encoded([abs(v) for v in limited], kind), kind, f"{op}.{mode}.sat.f32", *xs)


def test_fma_rounds_once() -> None:
    """Sums whose float64 is a tie of float32 although the exact sum is not."""
    one, up = np.float32(1), np.float32(1 + 2.0**-12)
    a = np.array([up, up, -up, 2.0**-60, 3.0], np.float32)
    b = np.array([up, up, up, 2.0**-60, 2.0**-24], np.float32)
    c = np.array([2.0**-80, -(2.0**-80), 2.0**-80, 1 + 2.0**-23, 1.0], np.float32)
    x = [np.resize(v, WIDTH).view(np.uint32) for v in (a, b, c)]
    got = run("fma.rn.f32 %r0, %r1, %r2, %r3;", r1=x[0], r2=x[1], r3=x[2]).u32[0]
    rows = zip(*(decoded(v, "f32") for v in x), strict=True)
    same(got, encoded([_model("fma", "f32", "rn", row) for row in rows], "f32"), "f32", "fma", *x)
    assert one + up > 2


def test_flushing_where_rounding_reaches_the_normal_numbers() -> None:
    """Measured on an H200: 1 - 2**-24 times the smallest normal number is flushed, 1 - 2**-46 times it is not."""
    a = np.resize(np.array([0x3F7FFFFF, 0x3F000001], np.uint32), WIDTH)
    b = np.resize(np.array([0x00800000, 0x00FFFFFE], np.uint32), WIDTH)
    for text in ("mul.ftz.f32 %r0, %r1, %r2;", "fma.rn.ftz.f32 %r0, %r1, %r2, 0f00000000;"):
        assert run(text, r1=a, r2=b).u32[0][:2].tolist() == [0, 0x00800000]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["f32", "f64"])
def test_roots_and_reciprocals(kind: str, mode: str) -> None:
    x, name = numbers(kind), _NAMES[kind]
    file = {"r": "w"}.get(name, name)
    got = run(f"rcp.{mode}.{kind} %{name}0, %{name}1;", **{f"{name}1": x}).files[file][0]
    same(got, encoded([_model("div", kind, mode, (1.0, v)) for v in decoded(x, kind)], kind), kind, f"rcp.{mode}", x)
    got = run(f"sqrt.{mode}.{kind} %{name}0, %{name}1;", **{f"{name}1": x}).files[file][0]

    def root(v: float) -> float:
        if not math.isfinite(v) or v <= 0:
            return _special(np.sqrt, v)
        # 64 bits more than a float64 has, with a sticky bit below.
        scale = 4 ** (Fraction(v).denominator.bit_length() + 64)
        whole = math.isqrt(int(Fraction(v) * scale))
        exact = whole * whole == Fraction(v) * scale
        return rounded(Fraction(2 * whole + (not exact), 2) / Fraction(math.isqrt(scale)), kind, mode)

    same(got, encoded([root(v) for v in decoded(x, kind)], kind), kind, f"sqrt.{mode}", x)


def test_pairs_of_float32() -> None:
    for mode in ("rn", "rz"):
        for op, n in (("add", 2), ("sub", 2), ("mul", 2), ("fma", 3)):
            low, high = [numbers("f32") for _ in range(n)], [numbers("f32") for _ in range(n)]
            packed = [a | b.astype(np.uint64) << np.uint64(32) for a, b in zip(low, high, strict=True)]
            names = ", ".join(f"%d{k + 1}" for k in range(n))
            mask = RNG.integers(0, 2, WIDTH).astype(bool)
            for m in (None, mask):
                got = run(f"{op}.{mode}.f32x2 %d0, {names};", m, **{f"d{k + 1}": x for k, x in enumerate(packed)}).u64[
                    0
                ]
                for half, xs in ((0, low), (1, high)):
                    rows = zip(*(decoded(x, "f32") for x in xs), strict=True)
                    want = encoded([_model(op, "f32", mode, row) for row in rows], "f32")
                    want = want if m is None else np.where(m, want, 0)
                    same(got.view(np.uint32)[half::2], want, "f32", f"{op}.{mode}.f32x2", *xs)


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("op", ["add", "sub", "mul", "fma"])
def test_16_bit_arithmetic(op: str, kind: str) -> None:
    n = 3 if op == "fma" else 2
    for _ in range(4):
        xs = [numbers(kind) for _ in range(n)]
        ys = [numbers(kind) for _ in range(n)]
        names = ", ".join(f"%h{k + 1}" for k in range(n))
        single = {f"h{k + 1}": x for k, x in enumerate(xs)}
        want = [
            encoded([_model(op, kind, "rn", row) for row in zip(*(decoded(x, kind) for x in zs), strict=True)], kind)
            for zs in (xs, ys)
        ]
        same(run(f"{op}.rn.{kind} %h0, {names};", **single).u16[0], want[0], kind, f"{op}.{kind}", *xs)
        pairs = {f"r{k + 1}": x | y.astype(np.uint32) << 16 for k, (x, y) in enumerate(zip(xs, ys, strict=True))}
        got = run(f"{op}.rn.{kind}x2 %r0, {names.replace('h', 'r')};", **pairs).u32[0].view(np.uint16)
        same(got[0::2], want[0], kind, f"{op}.{kind}x2", *xs)
        same(got[1::2], want[1], kind, f"{op}.{kind}x2", *ys)
        if op == "fma":
            relu = np.where(want[0] > 0x7FFF, 0, want[0])
            same(run(f"fma.rn.relu.{kind} %h0, {names};", **single).u16[0], relu, kind, "relu", *xs)
        if kind == "f16":
            flat = [
                flushed(_model(op, kind, "rn", tuple(flushed(v, kind) for v in row)), kind)
                for row in zip(*(decoded(x, kind) for x in xs), strict=True)
            ]
            edge = np.abs(np.array(flat)) == 2.0**-14
            got = np.where(edge, 0, run(f"{op}.rn.ftz.f16 %h0, {names};", **single).u16[0])
            same(got, np.where(edge, 0, encoded(flat, kind)), kind, f"{op}.ftz.f16", *xs)
        if op != "mul":
            r = numbers("f32")
            mixed = names.rsplit(", ", 1)[0] + ", %r1"
            rows = zip(*(decoded(x, kind) for x in xs[:-1]), decoded(r, "f32"), strict=True)
            wide = encoded([_model(op, "f32", "rz", row) for row in rows], "f32")
            same(
                run(f"{op}.rz.f32.{kind} %r0, {mixed};", **single, r1=r).u32[0],
                wide,
                "f32",
                f"{op}.f32.{kind}",
                *xs[:-1],
                r,
            )


def _extreme(largest: bool, nan: bool, *values: float) -> float:
    if nan and any(v != v for v in values):
        return math.nan
    real = [v for v in values if v == v]
    if not real:
        return math.nan
    return (max if largest else min)(real, key=lambda v: (v, math.copysign(1, v)))


@pytest.mark.parametrize("kind", ["f16", "bf16", "f32", "f64"])
def test_min_max(kind: str) -> None:
    name = _NAMES[kind]
    file = {"r": "w"}.get(name, name)
    a, b, c = (numbers(kind) for _ in range(3))
    zeros = np.array([0, 1 << (8 * a.itemsize - 1)], a.dtype)
    a[::5], b[::5], c[::5] = zeros[RNG.integers(0, 2, (3, len(a[::5])))]
    x, y, z = (decoded(v, kind) for v in (a, b, c))
    registers = {f"{name}1": a, f"{name}2": b, f"{name}3": c}
    for op in ("min", "max"):
        for nan in (False, True):
            if nan and kind == "f64":
                continue
            word = f"{op}{'.NaN' if nan else ''}"
            want = encoded([_extreme(op == "max", nan, p, q) for p, q in zip(x, y, strict=True)], kind)
            got = run(f"{word}.{kind} %{name}0, %{name}1, %{name}2;", **registers).files[file][0]
            same(got, want, kind, word, a, b)
            if kind != "f64":
                want = encoded(
                    [
                        math.copysign(1, p) * math.copysign(1, q) * _extreme(op == "max", nan, abs(p), abs(q))
                        for p, q in zip(x, y, strict=True)
                    ],
                    kind,
                )
                got = run(f"{word}.xorsign.abs.{kind} %{name}0, %{name}1, %{name}2;", **registers).files[file][0]
                same(got, want, kind, word + ".xorsign.abs", a, b)
            if kind == "f32":
                want = encoded([_extreme(op == "max", nan, *row) for row in zip(x, y, z, strict=True)], kind)
                got = run(f"{word}.f32 %r0, %r1, %r2, %r3;", **registers).u32[0]
                same(got, want, kind, word + " of three", a, b, c)
                for constant, value in (
                    ("0f00000000", 0.0),
                    ("0f80000000", -0.0),
                    ("0fFF800000", -math.inf),
                    ("0f3F800000", 1.0),
                ):
                    want = encoded([_extreme(op == "max", nan, p, value) for p in x], kind)
                    same(run(f"{word}.f32 %r0, %r1, {constant};", **registers).u32[0], want, kind, word + constant, a)


def test_signs_and_properties() -> None:
    x, y = bits(32), bits(32)
    view = run("abs.f32 %r0, %r1; neg.f32 %r2, %r1; copysign.f32 %r3, %r1, %r4; abs.ftz.f32 %r5, %r1;", r1=x, r4=y)
    assert (view.u32[3] == (x & 0x80000000 | y & 0x7FFFFFFF)).all()
    flat = np.where(x & 0x7F800000 == 0, 0, x & 0x7FFFFFFF)
    assert (view.u32[5] == np.where(np.isnan(x.view(np.float32)), 0x7FFFFFFF, flat)).all()
    f = x.view(np.float32)
    nan = np.isnan(f)
    assert (view.u32[0] == np.where(nan, 0x7FFFFFFF, x & 0x7FFFFFFF)).all()
    assert (view.u32[2] == np.where(nan, 0x7FFFFFFF, x ^ 0x80000000)).all()
    view = run("neg.bf16x2 %r0, %r1; abs.f16x2 %r2, %r1;", r1=x)
    h = x.view(np.uint16)
    bf16, f16 = (h & 0x7FFF > 0x7F80), (h & 0x7FFF > 0x7C00)
    assert (view.u32[0].view(np.uint16) == np.where(bf16, 0x7FFF, h ^ 0x8000)).all()
    assert (view.u32[2].view(np.uint16) == np.where(f16, 0x7FFF, h & 0x7FFF)).all()
    subnormal = (x & 0x7F800000 == 0) & (f != 0)
    for what, want in (
        ("finite", np.isfinite(f)),
        ("infinite", np.isinf(f)),
        ("number", ~np.isnan(f)),
        ("notanumber", np.isnan(f)),
        ("normal", np.isfinite(f) & ~subnormal),
        ("subnormal", subnormal),
    ):
        assert (run(f"testp.{what}.f32 %p0, %r1;", r1=x).p[0] == want).all(), what


def test_approximations() -> None:
    x = (RNG.standard_normal(WIDTH) * 8).astype(np.float32)
    x[:6] = [np.inf, -np.inf, np.nan, 0, -0.0, 1e-40]
    exact = x.astype(np.float64)
    h = formats.f32_to_f16(x)
    with np.errstate(all="ignore"):
        half = np.exp2(formats.f16_to_f32(h).astype(np.float64)).astype(np.float16).astype(np.float32)
        for text, want in (
            ("ex2.approx.f32", np.exp2(exact)),
            ("ex2.approx.ftz.f32", np.exp2(exact)),
            ("lg2.approx.f32", np.log2(exact)),
            ("sin.approx.f32", np.sin(exact)),
            ("cos.approx.f32", np.cos(exact)),
            ("tanh.approx.f32", np.tanh(exact)),
            ("rcp.approx.f32", 1 / exact),
            ("rsqrt.approx.f32", 1 / np.sqrt(exact)),
            ("sqrt.approx.f32", np.sqrt(exact)),
        ):
            got = run(f"{text} %r0, %r1;", r1=x.view(np.uint32)).f32[0]
            np.testing.assert_allclose(got, want.astype(np.float32), rtol=5e-7, atol=1e-38, err_msg=text)
            assert (got.view(np.uint32)[np.isnan(got)] == 0x7FFFFFFF).all(), text
    small = np.full(WIDTH, -130, np.float32).view(np.uint32)
    assert (run("ex2.approx.ftz.f32 %r0, %r1;", r1=small).u32[0] == 0).all()
    assert (run("ex2.approx.f32 %r0, %r1;", r1=small).f32[0] == np.float32(2.0**-130)).all()
    got = run("ex2.approx.f16 %h0, %h1;", h1=h).f16[0].astype(np.float32)
    np.testing.assert_allclose(got, half, rtol=1e-3)


# Conversions ---------------------------------------------------------------------------------------------------------
_KINDS = ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64")


def _register(kind: str) -> str:
    return {8: "h", 16: "h", 32: "r", 64: "d"}[int(kind.lstrip("busf"))]


def _limits(kind: str) -> tuple[int, int]:
    n = int(kind[1:])
    return (-(1 << (n - 1)), (1 << (n - 1)) - 1) if kind[0] == "s" else (0, (1 << n) - 1)


def _integers(x: np.ndarray, kind: str) -> list[int]:
    n = int(kind[1:])
    values = [v & ((1 << n) - 1) for v in x.tolist()]
    return [signed(v, n) for v in values] if kind[0] == "s" else values


def _file(view: View, kind: str) -> np.ndarray:
    return view.files[{"r": "w"}.get(_register(kind), _register(kind))][0]


@pytest.mark.parametrize("to", _KINDS)
@pytest.mark.parametrize("origin", _KINDS)
def test_integer_conversions(to: str, origin: str) -> None:
    a, b = _register(origin), _register(to)
    x = bits({"h": 16, "r": 32, "d": 64}[a])
    width = {"h": 16, "r": 32, "d": 64}[b]
    low, high = _limits(to)
    for sat in (False, True):
        got = _file(run(f"cvt.{'sat.' if sat else ''}{to}.{origin} %{b}0, %{a}1;", **{f"{a}1": x}), to).tolist()
        for g, v in zip(got, _integers(x, origin), strict=True):
            n = int(to[1:])
            want = min(max(v, low), high) if sat else v & ((1 << n) - 1)
            want = signed(want, n) if to[0] == "s" and not sat else want
            assert g == want & ((1 << width) - 1), (to, origin, sat, v)


@pytest.mark.parametrize("to", ["f16", "bf16", "f32", "f64"])
@pytest.mark.parametrize("origin", _KINDS)
def test_integers_to_floats(to: str, origin: str) -> None:
    a = _register(origin)
    x = bits({"h": 16, "r": 32, "d": 64}[a])
    for mode in MODES:
        got = _file(run(f"cvt.{mode}.{to}.{origin} %{_NAMES[to]}0, %{a}1;", **{f"{a}1": x}), to)
        want = [rounded(Fraction(v), to, mode) for v in _integers(x, origin)]
        same(got, encoded(want, to), to, f"cvt.{mode}.{to}.{origin}", x)


@pytest.mark.parametrize("to", _KINDS)
@pytest.mark.parametrize("origin", ["f16", "bf16", "f32", "f64"])
def test_floats_to_integers(to: str, origin: str) -> None:
    x = numbers(origin)
    scaled = (RNG.standard_normal(WIDTH) * 2.0 ** RNG.integers(0, 70, WIDTH)).astype(np.float32).astype(np.float64)
    x[::3] = formats.encode(scaled, origin)[::3] if origin in ("f16", "bf16") else encoded(scaled.tolist(), origin)[::3]
    low, high = _limits(to)
    n = int(to[1:])
    nan = 1 << (n - 1) if origin == "f64" or n == 64 else 0
    functions: dict[str, Callable] = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}
    width = 8 * np.dtype({"h": "u2", "r": "u4", "d": "u8"}[_register(to)]).itemsize
    for mode, function in functions.items():
        view = run(f"cvt.{mode}.{to}.{origin} %{_register(to)}0, %{_NAMES[origin]}1;", **{f"{_NAMES[origin]}1": x})
        for g, v in zip(_file(view, to).tolist(), decoded(x, origin), strict=True):
            if v != v:
                want = signed(nan, n) if to[0] == "s" else nan
            elif math.isinf(v):
                want = high if v > 0 else low
            else:
                want = min(max(int(function(Fraction(v))), low), high)
            assert g == want & ((1 << width) - 1), (mode, to, origin, v)


@pytest.mark.parametrize("to", ["f16", "bf16", "f32", "f64"])
@pytest.mark.parametrize("origin", ["f16", "bf16", "f32", "f64"])
def test_floats_to_floats(to: str, origin: str) -> None:
    order = {"f16": 1, "bf16": 1, "f32": 2, "f64": 3}
    x = numbers(origin)
    values = decoded(x, origin)
    if to == "f32" and origin == "bf16":
        got = run("cvt.f32.bf16 %r0, %h1;", h1=x).u32[0]
        assert (got == x.astype(np.uint32) << 16).all()
        return
    for mode in MODES if order[to] < order[origin] or (to != origin and order[to] == 1) else ("",):

        def convert(v: float, mode: str = mode) -> float:
            return math.copysign(rounded(Fraction(v), to, mode or "rn"), v) if math.isfinite(v) else v

        dot = f".{mode}" if mode else ""
        got = _file(run(f"cvt{dot}.{to}.{origin} %{_NAMES[to]}0, %{_NAMES[origin]}1;", **{f"{_NAMES[origin]}1": x}), to)
        same(got, encoded([convert(v) for v in values], to), to, f"cvt.{mode}.{to}.{origin}", x)
    if to == origin:
        got = _file(run(f"cvt.rmi.{to}.{to} %{_NAMES[to]}0, %{_NAMES[to]}1;", **{f"{_NAMES[to]}1": x}), to)
        want = [math.copysign(math.floor(v), v) if math.isfinite(v) else v for v in values]
        same(got, encoded(want, to), to, f"cvt.rmi.{to}.{to}", x)


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_packed_halves(kind: str) -> None:
    a, b = numbers("f32"), numbers("f32")
    encode = formats.f32_to_f16 if kind == "f16" else formats.f32_to_bf16
    for word, mode, saturate, relu in (
        ("rn", "rn", False, False),
        ("rz", "rz", False, False),
        ("rn.relu", "rn", False, True),
        ("rn.satfinite", "rn", True, False),
        ("rz.relu.satfinite", "rz", True, True),
    ):
        high, low = (encode(x.view(np.float32), mode, saturate) for x in (a, b))
        if relu:
            high, low = (np.where(x > 0x7FFF, 0, x) for x in (high, low))
        got = run(f"cvt.{word}.{kind}x2.f32 %r0, %r1, %r2;", r1=a, r2=b).u32[0]
        assert (got == (low | high.astype(np.uint32) << 16)).all(), word
        got16 = run(f"cvt.{word}.{kind}.f32 %h0, %r1;", r1=a).u16[0]
        assert (got16 == high).all(), word
    finite = np.full(WIDTH, 1.0 + 2.0**-12, np.float32).view(np.uint32)
    low_bits, shift = (0x1FFF, 13) if kind == "f16" else (0xFFFF, 16)
    noise = RNG.integers(0, 2**32, WIDTH, dtype=np.uint32)
    got = run(f"cvt.rs.{kind}x2.f32 %r0, %r1, %r1, %r2;", r1=finite, r2=noise).u32[0].view(np.uint16).reshape(-1, 2)
    for half in (0, 1):
        added = finite + (noise >> np.uint32(16 * half) & np.uint32(low_bits))
        assert (got[:, half] == encode((added >> shift << shift).view(np.float32))).all()


def test_tf32() -> None:
    x = numbers("f32")
    for mode in ("rna", "rn", "rz"):
        got = run(f"cvt.{mode}.tf32.f32 %r0, %r1;", r1=x).u32[0]
        want = [
            math.copysign(rounded(Fraction(v), "tf32", mode), v) if math.isfinite(v) else v for v in decoded(x, "f32")
        ]
        number = ~np.isnan(x.view(np.float32))
        same(np.where(number, got, 0), np.where(number, encoded(want, "f32"), 0), "f32", mode, x)


@pytest.mark.parametrize("kind", ["e4m3", "e5m2", "e3m2", "e2m3", "e2m1"])
def test_narrow_pairs(kind: str) -> None:
    a, b = numbers("f32"), numbers("f32")
    shift = 4 if kind == "e2m1" else 8
    high, low = (formats.encode(x.view(np.float32), kind, "rn", True) for x in (a, b))
    got = run(f"cvt.rn.satfinite.{kind}x2.f32 %h0, %r1, %r2;", r1=a, r2=b).u16[0]
    assert (got == (low | high.astype(np.uint16) << shift)).all()
    got = run(f"cvt.rn.relu.satfinite.{kind}x2.f32 %h0, %r1, %r2;", r1=a, r2=b).u16[0]
    top = 1 << (formats.FORMATS[kind].bits - 1)
    high, low = (np.where(x & top, 0, x) for x in (high, low))
    assert (got == (low | high.astype(np.uint16) << shift)).all()
    codes = bits(16)
    got = run(f"cvt.rn.f16x2.{kind}x2 %r0, %h1;", h1=codes).u32[0]
    low, high = codes & (15 if kind == "e2m1" else 255), codes >> shift
    want = [formats.f32_to_f16(formats.decode(x, kind)) for x in (low, high)]
    assert (got == (want[0] | want[1].astype(np.uint32) << 16)).all()
    pair = bits(32)
    if kind in ("e4m3", "e5m2"):
        got = run(f"cvt.rn.satfinite.{kind}x2.f16x2 %h0, %r1;", r1=pair).u16[0]
        want = [formats.encode(formats.f16_to_f32(x), kind, "rn", True) for x in (pair & 0xFFFF, pair >> 16)]
        assert (got == (want[0] | want[1].astype(np.uint16) << 8)).all()


def test_scales_and_integer_packs() -> None:
    a, b = numbers("f32"), numbers("f32")
    for mode in ("rz", "rp"):
        got = run(f"cvt.{mode}.satfinite.ue8m0x2.f32 %h0, %r1, %r2;", r1=a, r2=b).u16[0]
        want = [formats.f32_to_ue8m0(x.view(np.float32), mode) for x in (b, a)]
        assert (got == (want[0] | want[1].astype(np.uint16) << 8)).all()
    codes = bits(16)
    got = run("cvt.rn.bf16x2.ue8m0x2 %r0, %h1;", h1=codes).u32[0]
    want = [formats.f32_to_bf16(formats.ue8m0_to_f32(x)) for x in (codes & 255, codes >> 8)]
    assert (got == (want[0] | want[1].astype(np.uint32) << 16)).all()
    c = bits(32)
    view = run("cvt.pack.sat.u8.s32.b32 %r0, %r1, %r2, %r3; cvt.pack.sat.s16.s32 %r4, %r1, %r2;", r1=a, r2=b, r3=c)
    x, y = a.view(np.int32), b.view(np.int32)
    assert (view.u32[0] == (np.clip(x, 0, 255) << 8 | np.clip(y, 0, 255) | c.astype(np.int64) << 16) & 0xFFFFFFFF).all()
    assert (view.s16[0] == 0).all()
    halves = view.u32[4].view(np.int16)
    assert (halves[1::2] == np.clip(x, -32768, 32767)).all() and (halves[0::2] == np.clip(y, -32768, 32767)).all()


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("zero", [0.0, -0.0])
@pytest.mark.parametrize(("mode", "up", "down"), [("rm", 0.0, -5e-324), ("rp", 5e-324, -0.0), ("rz", 0.0, -0.0)])
def test_a_product_below_float64_and_a_zero(sign: int, zero: float, mode: str, up: float, down: float) -> None:
    a, b, c = np.array([sign * 1e-200]), np.array([1e-200]), np.array([zero])
    got = exact.fma64_in(a, b, c, mode)
    want = up if sign > 0 else down
    assert got[0] == want and np.signbit(got[0]) == np.signbit(want)
