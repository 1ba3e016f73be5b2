"""mma.sync: every shape against a product of whole matrices, with the fragments as PTX ISA 9.7.14.5 states them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest

from .. import Device, Options, formats, load
from ..errors import ConvergenceError, DescriptorError, UnknownInstructions

Place = Callable[[int, int], int]  # (lane, element) -> row or column


class Shape(NamedTuple):
    """Element counts a lane holds of A, B, D, and where its element i lies."""

    counts: tuple[int, int, int]
    a_row: Place
    a_column: Place
    b_row: Place
    d_row: Place


def _group(lane: int, i: int) -> int:
    return lane // 4


def _d_row(lane: int, i: int) -> int:
    return lane // 4 + 8 * (i // 2)


def _strided(lane: int, i: int) -> int:
    return lane % 4 + 4 * i


SHAPES = {
    "16 bits m16n8k16": Shape(
        (8, 4, 4),
        lambda t, i: t // 4 + (0 if i < 2 or 4 <= i < 6 else 8),
        lambda t, i: t % 4 * 2 + (i & 1) + (8 if i >= 4 else 0),
        lambda t, i: t % 4 * 2 + (i & 1) + (8 if i >= 2 else 0),
        _d_row,
    ),
    "16 bits m16n8k8": Shape(
        (4, 2, 4),
        lambda t, i: t // 4 + (8 if i >= 2 else 0),
        lambda t, i: t % 4 * 2 + (i & 1),
        lambda t, i: t % 4 * 2 + i,
        _d_row,
    ),
    "tf32 m16n8k8": Shape(
        (4, 2, 4), lambda t, i: t // 4 + 8 * (i & 1), lambda t, i: t % 4 + 4 * (i // 2), _strided, _d_row
    ),
    "tf32 m16n8k4": Shape((2, 1, 4), lambda t, i: t // 4 + 8 * i, lambda t, i: t % 4, _strided, _d_row),
    "8 bits m16n8k32": Shape(
        (16, 8, 4),
        lambda t, i: t // 4 + (0 if i < 4 or 8 <= i < 12 else 8),
        lambda t, i: t % 4 * 4 + (i & 3) + (16 if i >= 8 else 0),
        lambda t, i: t % 4 * 4 + (i & 3) + (16 if i >= 4 else 0),
        _d_row,
    ),
    "8 bits m16n8k16": Shape(
        (8, 4, 4),
        lambda t, i: t // 4 + (8 if i >= 4 else 0),
        lambda t, i: t % 4 * 4 + (i & 3),
        lambda t, i: t % 4 * 4 + i,
        _d_row,
    ),
    "8 bits m8n8k16": Shape((4, 4, 2), _group, lambda t, i: t % 4 * 4 + i, lambda t, i: t % 4 * 4 + i, _group),
    "4 bits m16n8k64": Shape(
        (32, 16, 4),
        lambda t, i: t // 4 + (0 if i < 8 or 16 <= i < 24 else 8),
        lambda t, i: t % 4 * 8 + (i & 7) + (32 if i >= 16 else 0),
        lambda t, i: t % 4 * 8 + (i & 7) + (32 if i >= 8 else 0),
        _d_row,
    ),
    "f64 m8n8k4": Shape((1, 1, 2), _group, lambda t, i: t % 4, _strided, _group),
    "f64 m16n8k4": Shape((2, 1, 4), lambda t, i: t // 4 + 8 * i, lambda t, i: t % 4, _strided, _d_row),
    "f64 m16n8k8": Shape(
        (4, 2, 4), lambda t, i: t // 4 + 8 * (i & 1), lambda t, i: t % 4 + 4 * (i // 2), _strided, _d_row
    ),
    "f64 m16n8k16": Shape(
        (8, 4, 4), lambda t, i: t // 4 + 8 * (i & 1), lambda t, i: t % 4 + 4 * (i // 2), _strided, _d_row
    ),
}
_BITS = {"f16": 16, "bf16": 16, "tf32": 32, "f32": 32, "s32": 32, "f64": 64, "e2m1 packed": 4}


def pack(elements: np.ndarray, bits: int) -> np.ndarray:
    """[count, threads] codes into registers [count * bits / 32, threads] of 32 (64 for f64) bits, the first lowest."""
    if bits == 64:
        return elements
    per = 32 // bits
    grouped = elements.astype(np.uint64).reshape(-1, per, elements.shape[1])
    return sum(grouped[:, s] << np.uint64(bits * s) for s in range(per)).astype(np.uint32)


def unpack(registers: np.ndarray, bits: int) -> np.ndarray:
    if bits == 64:
        return registers
    per = 32 // bits
    parts = [registers >> np.uint32(bits * s) & np.uint32((1 << bits) - 1) for s in range(per)]
    return np.stack(parts, axis=1).reshape(-1, registers.shape[1])


def codes(x: np.ndarray, kind: str) -> np.ndarray:
    """Raw codes of values, as the fragments of `kind` hold them."""
    if kind == "f64":
        return x.astype(np.float64).view(np.uint64)
    if kind in ("s8", "u8"):
        return x.astype(np.int64) & 0xFF
    if kind == "s32":
        return x.astype(np.int64) & 0xFFFFFFFF
    if kind == "f32" or kind == "tf32":
        return x.astype(np.float32).view(np.uint32)
    if kind == "e2m1":
        return formats.encode(x, "e2m1").astype(np.int64) << 2
    return formats.encode(x, kind.split()[0]).astype(np.int64)


def numbers(raw: np.ndarray, kind: str) -> np.ndarray:
    if kind == "f64":
        return raw.view(np.float64)
    if kind == "s32":
        return raw.astype(np.uint32).view(np.int32)
    return raw.astype(np.uint32).view(np.float32) if kind == "f32" else formats.decode(raw, kind)


def text(
    name: str, counts: tuple[int, int, int, int], threads: int, wide: bool, extra: str = "", guard: str = ""
) -> str:
    """A kernel (a, b, c, d, s): registers of A, B, C [registers, threads] in, D out; s [2, threads] to %r1, %r2."""
    size, reg = (8, "%d") if wide else (4, "%r")
    lines, groups, at = [], [], 20
    for n, count in enumerate(counts):
        names = [f"{reg}{at + r}" for r in range(count)]
        at += count
        groups.append("{" + ", ".join(names) + "}")
        lines.append(f"ld.param.u64 %d1, [p{n}]; add.s64 %d{2 + n}, %d1, %d0;")
        if n < 3:
            lines += [f"ld.global.b{8 * size} {r}, [%d{2 + n}+{k * threads * size}];" for k, r in enumerate(names)]
    lines += [
        "ld.param.u64 %d1, [p4]; mul.wide.u32 %d7, %r0, 4; add.s64 %d7, %d1, %d7;",
        f"ld.global.b32 %r1, [%d7]; ld.global.b32 %r2, [%d7+{4 * threads}];",
    ]
    a, b, c, d = groups
    # D starts as what C is: an instruction that is not executed leaves it so.
    lines += [f"mov.b{8 * size} {x}, {y};" for x, y in zip(d[1:-1].split(", "), c[1:-1].split(", "), strict=True)]
    lines.append(f"{guard} mma.sync.aligned.{name} {d}, {a}, {b}, {c}{extra};")
    lines += [f"st.global.b{8 * size} [%d5+{k * threads * size}], {r};" for k, r in enumerate(d[1:-1].split(", "))]
    params = ", ".join(f".param .u64 p{n}" for n in range(5))
    body = "\n".join(lines)
    return (
        f".version 9.0\n.target sm_120a\n.address_size 64\n.visible .entry k({params}) {{\n"
        ".reg .b32 %r<60>; .reg .b64 %d<60>; .reg .pred %p<4>;\n"
        f"mov.u32 %r0, %tid.x; mul.wide.u32 %d0, %r0, {size};\n"
        "setp.lt.u32 %p0, %r0, 32; setp.lt.u32 %p1, %r0, 7;\n"
        f"{body}\nret; }}\n"
    )


def fragments(shape: Shape, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> list[np.ndarray]:
    """Elements of A, B and C that each thread holds, [count, threads], from matrices [warps, rows, columns]."""
    warps = len(a)
    found = [np.zeros((n, 32 * warps), x.dtype) for n, x in zip(shape.counts, (a, b, c), strict=True)]
    for w in range(warps):
        for t in range(32):
            for i in range(shape.counts[0]):
                found[0][i, 32 * w + t] = a[w, shape.a_row(t, i), shape.a_column(t, i)]
            for i in range(shape.counts[1]):
                found[1][i, 32 * w + t] = b[w, shape.b_row(t, i), t // 4]
            for i in range(shape.counts[2]):
                found[2][i, 32 * w + t] = c[w, shape.d_row(t, i), t % 4 * 2 + i % 2]
    return found


def matrix_of(shape: Shape, d: np.ndarray, rows: int) -> np.ndarray:
    """[warps, rows, 8] from the elements [count, threads] of D."""
    found = np.zeros((d.shape[1] // 32, rows, 8), d.dtype)
    for thread in range(d.shape[1]):
        for i in range(d.shape[0]):
            found[thread // 32, shape.d_row(thread % 32, i), thread % 4 * 2 + i % 2] = d[i, thread]
    return found


class Case(NamedTuple):
    name: str
    shape: Shape
    a: str
    b: str
    d: str
    limit: int = 4  # largest value of A and B


def _case(shape: str, mods: str, a: str, b: str, d: str, limit: int = 4, tail: str = "") -> Case:
    mnk = shape.split()[-1]
    elements = f"{d}.{a.split()[0]}.{b.split()[0]}.{d}{tail}"
    return Case(f"{mnk}.row.col{mods}.{elements}", SHAPES[shape], a, b, d, limit)


CASES = [
    *(_case(f"16 bits m16n8k{k}", "", "f16", "f16", d) for k in (8, 16) for d in ("f16", "f32")),
    *(_case(f"16 bits m16n8k{k}", "", "bf16", "bf16", "f32") for k in (8, 16)),
    *(_case(f"tf32 m16n8k{k}", "", "tf32", "tf32", "f32") for k in (4, 8)),
    *(_case(f"f64 {s}", "", "f64", "f64", "f64") for s in ("m8n8k4", "m16n8k4", "m16n8k8", "m16n8k16")),
    *(_case(f"8 bits {s}", "", "s8", "u8", "s32", 120) for s in ("m8n8k16", "m16n8k16", "m16n8k32")),
    _case("8 bits m16n8k32", ".satfinite", "u8", "s8", "s32", 120),
    *(_case(f"8 bits m16n8k{k}", "", "e4m3", "e5m2", d) for k in (16, 32) for d in ("f16", "f32")),
    _case("8 bits m16n8k32", ".kind::f8f6f4", "e2m1", "e4m3", "f32"),
    _case("8 bits m16n8k32", ".kind::f8f6f4", "e3m2", "e2m1", "f16", 3),
    _case("8 bits m16n8k32", ".kind::f8f6f4", "e2m3", "e5m2", "f32"),
]


def execute(
    case: Case,
    warps: int,
    seed: int = 0,
    scales: np.ndarray | None = None,
    extra: str = "",
    guard: str = "",
    c: np.ndarray | None = None,
    collect: bool = False,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, list]:
    """Runs a case on random small integers: (A, B, C, D as matrices [warps, ...], findings)."""
    rng = np.random.default_rng(seed)
    m, n, k = (int(x) for x in case.name.split(".")[0][1:].replace("n", " ").replace("k", " ").split())
    low = [0 if kind == "u8" else -case.limit for kind in (case.a, case.b)]
    values = [3, 2, 1, 0] if "e2m1" in case.a + case.b else None
    a, b = (
        rng.choice(values, s) * rng.choice([-1, 1], s) if values else rng.integers(lo, case.limit + 1, s)
        for lo, s in zip(low, ((warps, m, k), (warps, k, n)), strict=True)
    )
    if c is None:
        c = rng.integers(-8, 9, (warps, m, n))
    kinds = (case.a, case.b, case.d)
    parts = [
        pack(codes(part, kind), _BITS.get(kind, 8))
        for part, kind in zip(fragments(case.shape, a, b, c), kinds, strict=True)
    ]
    device = Device()
    inputs = [device.upload(part) for part in parts]
    out = device.empty(parts[2].shape, parts[2].dtype)
    selectors = device.upload(np.zeros((2, 32 * warps), np.uint32) if scales is None else scales)
    counts = (len(parts[0]), len(parts[1]), len(parts[2]), len(parts[2]))
    ptx = text(case.name, counts, 32 * warps, case.d == "f64", extra, guard)
    options = Options(collect=collect)
    report = device.launch(load(ptx), block=(32 * warps,), args=[*inputs, out, selectors], options=options)
    d = matrix_of(case.shape, numbers(unpack(out.array, _BITS[case.d]), case.d), m)
    return a, b, c, d, report.findings


@pytest.mark.parametrize("warps", [1, 4])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_product(case: Case, warps: int) -> None:
    a, b, c, d, _ = execute(case, warps)
    np.testing.assert_array_equal(d, (a @ b + c).astype(d.dtype))


def test_integer_overflow_wraps_or_saturates() -> None:
    largest = np.full((1, 16, 8), 2**31 - 1)
    for name, expect in (("", lambda x: x.astype(np.int32)), (".satfinite", lambda x: np.clip(x, -(2**31), 2**31 - 1))):
        case = _case("8 bits m16n8k32", name, "s8", "s8", "s32", 120)
        a, b, _, d, _ = execute(case, 1, c=largest)
        np.testing.assert_array_equal(d, expect(a @ b + largest))


def test_tf32_ignores_the_low_mantissa_bits() -> None:
    case = _case("tf32 m16n8k8", "", "tf32", "tf32", "f32")
    a, b, c, d, _ = execute(case, 1)
    parts = [
        codes(x, "f32") | np.uint32(low)
        for x, low in zip(fragments(case.shape, a, b, c), (0x1FFF, 0x1FFF, 0), strict=True)
    ]
    device = Device()
    out = device.empty((4, 32), np.uint32)
    args = [*map(device.upload, parts), out, device.upload(np.zeros((2, 32), np.uint32))]
    device.launch(load(text(case.name, (4, 2, 4, 4), 32, False)), block=(32,), args=args)
    np.testing.assert_array_equal(matrix_of(case.shape, numbers(out.array, "f32"), 16), d)


def test_nan_is_canonical() -> None:
    case = _case("16 bits m16n8k16", "", "f16", "f16", "f32")
    device = Device()
    a = device.upload(np.full((4, 32), 0xFE01FE01, np.uint32))
    b, c = device.upload(np.zeros((2, 32), np.uint32)), device.upload(np.zeros((4, 32), np.uint32))
    out = device.empty((4, 32), np.uint32)
    args = [a, b, c, out, device.upload(np.zeros((2, 32), np.uint32))]
    device.launch(load(text(case.name, (4, 2, 4, 4), 32, False)), block=(32,), args=args)
    assert (out.array == 0x7FFFFFFF).all()


# Block scaling --------------------------------------------------------------------------------------------------------
SCALED = [
    ("8 bits m16n8k32", ".kind::mxf8f6f4.block_scale.scale_vec::1X", "e4m3", "e2m1", ".ue8m0", 1),
    ("8 bits m16n8k32", ".kind::mxf8f6f4.block_scale", "e5m2", "e4m3", ".ue8m0", 1),
    ("4 bits m16n8k64", ".kind::mxf4.block_scale", "e2m1 packed", "e2m1 packed", ".ue8m0", 2),
    ("4 bits m16n8k64", ".kind::mxf4nvf4.block_scale.scale_vec::2X", "e2m1 packed", "e2m1 packed", ".ue8m0", 2),
    ("4 bits m16n8k64", ".kind::mxf4nvf4.block_scale.scale_vec::4X", "e2m1 packed", "e2m1 packed", ".ue4m3", 4),
]


@pytest.mark.parametrize("thread", [(0, 0), (1, 3)])
@pytest.mark.parametrize("scaled", SCALED, ids=lambda s: s[1])
def test_block_scale(scaled: tuple, thread: tuple[int, int]) -> None:
    shape, mods, a_kind, b_kind, stype, count = scaled
    case = _case(shape, mods, a_kind, b_kind, "f32", 3, stype)
    rng = np.random.default_rng(5)
    byte = {1: 3, 2: 2, 4: 0}[count] if thread[0] else 0
    words = rng.integers(0, 256, (2, 32, 4)).astype(np.uint8)
    exponents = rng.integers(-2, 3, (2, 32, 4))
    words[:] = exponents + 127 if stype == ".ue8m0" else formats.encode(2.0**exponents, "e4m3")
    if stype == ".ue4m3":
        words |= 0x80  # the sign is not looked at
    extra = f", %r1, {{{byte}, {thread[0]}}}, %r2, {{{byte}, {thread[1]}}}"
    a, b, c, d, _ = execute(case, 1, scales=words.reshape(2, 128).view(np.uint32), extra=extra)
    k = a.shape[2]
    a_scale, b_scale = np.ones((16, k)), np.ones((k, 8))
    for step in range(k):
        s = byte + step * count // k
        for row in range(16):
            a_scale[row, step] = 2.0 ** exponents[0, 4 * (row % 8) + 2 * thread[0] + row // 8, s]
        for column in range(8):
            b_scale[step, column] = 2.0 ** exponents[1, 4 * column + thread[1], s]
    np.testing.assert_array_equal(d, (a * a_scale) @ (b * b_scale) + c)


def test_scale_selector_out_of_range() -> None:
    case = _case("4 bits m16n8k64", ".kind::mxf4.block_scale", "e2m1 packed", "e2m1 packed", "f32", 3, ".ue8m0")
    with pytest.raises(DescriptorError, match=r"byte-id-b is \[1\]"):
        execute(case, 1, extra=", %r1, {0, 0}, %r2, {1, 0}")


# Refusals and convergence ---------------------------------------------------------------------------------------------
def test_a_guard_takes_whole_warps() -> None:
    case = CASES[1]
    a, b, c, d, _ = execute(case, 4, guard="@%p0")
    want = np.concatenate([(a @ b + c)[:1], c[1:]])
    np.testing.assert_array_equal(d, want)


def test_part_of_a_warp_is_a_finding() -> None:
    with pytest.raises(ConvergenceError, match="7 of 32 threads"):
        execute(CASES[1], 1, guard="@%p1")
    _, _, c, d, findings = execute(CASES[1], 1, guard="@%p1", collect=True)
    assert len(findings) == 1
    np.testing.assert_array_equal(d, c)


@pytest.mark.parametrize(
    ("name", "counts", "why"),
    [
        ("m16n8k16.row.col.f16.f16.f16.f32", (4, 2, 4, 4), "must be the same"),
        ("m16n8k64.row.col.s32.s4.s4.s32", (4, 2, 4, 4), "s4"),
        ("m8n8k4.row.col.f32.f16.f16.f32", (2, 2, 8, 8), "m8n8k4"),
        ("m16n8k32.row.col.f32.bf16.bf16.f32", (4, 2, 4, 4), "allowed: m16n8k8, m16n8k16"),
        ("m16n8k16.col.row.f32.f16.f16.f32", (4, 2, 4, 4), "layouts"),
        ("m16n8k16.row.col.f32.f16.f16.f32", (2, 2, 4, 4), "4 are needed"),
        ("m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue8m0", (4, 2, 4, 4), "ue4m3"),
    ],
)
def test_refused(name: str, counts: tuple[int, int, int, int], why: str) -> None:
    with pytest.raises(UnknownInstructions, match=why):
        load(text(name, counts, 32, False))
