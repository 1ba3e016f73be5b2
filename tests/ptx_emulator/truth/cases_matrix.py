"""Matrix instructions: wgmma from shared memory and registers, mma.sync, and the moves of 8x8 matrices."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from .case import Arrays, Case, Struct, always, integers, raw, u32, u64, untouched
from .exact import BF16, F16, FORMATS, from_integers
from .images import Operand, operand

# Element types: how integers become bits. tf32 has the bits of f32.
_FLOAT = {"f16": F16, "bf16": BF16, "e4m3": FORMATS["e4m3"], "e5m2": FORMATS["e5m2"], "tf32": FORMATS["f32"]}


def bits(values: np.ndarray, element: str) -> np.ndarray:
    """Integers as the bits of an element type."""
    if element in _FLOAT:
        return from_integers(values, _FLOAT[element])
    return values.astype(np.int8).view(np.uint8)


def _accumulator(values: np.ndarray, kind: str) -> np.ndarray:
    if kind == "f16":
        return from_integers(values, F16)
    return values.astype(np.float32 if kind == "f32" else np.int32)


def _operands(a: Operand, b: Operand, a_offset: int, b_offset: int, scale_d: int) -> Struct:
    """`truth::Operands` of wgmma.cuh."""
    return Struct(
        (
            "a",
            "b",
            u64(a.descriptor),
            u64(b.descriptor),
            "steps",
            u32(len(a.image)),
            u32(len(b.image)),
            u32(a_offset),
            u32(b_offset),
            u32(len(a.steps)),
            u32(scale_d),
        )
    )


def _wgmma(
    name: str,
    module: str,
    kernel: str,
    n: int,
    k: int,
    elements: tuple[str, str],
    swizzle: str | tuple[str, str] = "128B",
    accumulator: str = "f32",
    scale_d: int = 0,
    signs: tuple[int, int] = (1, 1),
    majors: str = "kk",
    limits: tuple[int, int] = (-4, 4),
    from_registers: bool = False,
    saturate: int = 0,
) -> Case:
    """One product of integer-valued operands, exact in every accumulator; saturate: C starts there (s32)."""
    seed = f"{module}/{name}"
    low = {element: 0 if element == "u8" else limits[0] for element in elements}
    values_a = integers(f"{seed}/a", (64, k), low[elements[0]], limits[1])
    values_b = integers(f"{seed}/b", (n, k), low[elements[1]], limits[1])
    values_c = integers(f"{seed}/c", (64, n), -50, 50) + saturate
    bits_a, bits_b = bits(values_a, elements[0]), bits(values_b, elements[1])
    swizzle_a, swizzle_b = (swizzle, swizzle) if isinstance(swizzle, str) else swizzle
    a = operand(bits_a, swizzle_a, majors[0] == "m")
    b = operand(bits_b, swizzle_b, majors[1] == "m", k_first=True)
    steps = np.array([a.steps, b.steps], np.int32).T.copy()
    b_offset = 0 if from_registers else -(-len(a.image) // 1024) * 1024
    product = scale_d * values_c
    for step in range(0, k, k // len(a.steps)):
        part = slice(step, step + k // len(a.steps))
        product = product + signs[0] * signs[1] * (values_a[:, part] @ values_b[:, part].T)
        if saturate:
            product = np.clip(product, -(1 << 31), (1 << 31) - 1)
    shown = bits_a.view(np.uint8).reshape(64, -1) if from_registers else a.image
    return Case(
        name=f"{module}/{name}",
        module=module,
        kernel=kernel,
        buffers={
            "a": shown,
            "b": b.image,
            "steps": steps,
            "c": _accumulator(values_c, accumulator),
            "d": untouched((64, n), _accumulator(values_c, accumulator).dtype.type),
        },
        outputs=("d",),
        args=(_operands(a, b, 0, b_offset, scale_d), "c", "d"),
        block=(128, 1, 1),
        shared=b_offset + len(b.image),
        expect=lambda _: {"d": _accumulator(product, accumulator)},
    )


def _wgmma_cases() -> Iterator[Case]:
    half, brain = ("f16", "f16"), ("bf16", "bf16")
    small = (-2, 2)
    ss = "wgmma_ss"
    yield _wgmma("f16_n8-128B", ss, "f16_n8", 8, 64, half)
    yield _wgmma("bf16_n24-64B-add", ss, "bf16_n24", 24, 32, brain, "64B", scale_d=1)
    yield _wgmma("f16_n128-128B", ss, "f16_n128", 128, 32, half, limits=small)
    yield _wgmma("bf16_n256-128B", ss, "bf16_n256", 256, 16, brain, limits=small)
    for swizzle in ("none", "32B", "64B", "128B"):
        yield _wgmma(f"bf16_n64-kk-{swizzle}", ss, "bf16_n64", 64, 64, brain, swizzle, limits=small)
        yield _wgmma(f"bf16_n64-km-{swizzle}", ss, "bf16_n64_b_mn", 64, 32, brain, swizzle, majors="km", limits=small)
        yield _wgmma(f"bf16_n64-mk-{swizzle}", ss, "bf16_n64_a_mn", 64, 32, brain, swizzle, majors="mk", limits=small)
    yield _wgmma("f16_n64-mm-128B-64B", ss, "f16_n64_ab_mn", 64, 32, half, ("128B", "64B"), majors="mm", limits=small)
    yield _wgmma("f16_n64-mm-none-32B", ss, "f16_n64_ab_mn", 64, 48, half, ("none", "32B"), majors="mm", limits=small)
    yield _wgmma("bf16_n64-negate-a", ss, "bf16_n64_negate_a", 64, 32, brain, "64B", signs=(-1, 1), limits=small)
    yield _wgmma(
        "f16_n64-negate-b", ss, "f16_n64_negate_b", 64, 32, half, "32B", scale_d=1, signs=(1, -1), limits=small
    )
    yield _wgmma("f16_n16-half", ss, "f16_n16_half", 16, 64, half, accumulator="f16")
    yield _wgmma("f16_n64-half-add", ss, "f16_n64_half", 64, 32, half, "32B", accumulator="f16", scale_d=1)

    narrow = "wgmma_narrow"
    fp8 = ("e4m3", "e4m3")
    yield _wgmma("e4m3_n64", narrow, "e4m3_n64", 64, 128, fp8)
    yield _wgmma("e5m2_e4m3_n8-negate-b", narrow, "e5m2_e4m3_n8", 8, 64, ("e5m2", "e4m3"), "64B", signs=(1, -1))
    yield _wgmma("e4m3_e5m2_n16-half", narrow, "e4m3_e5m2_n16_half", 16, 64, ("e4m3", "e5m2"), "none", "f16", 1)
    yield _wgmma("tf32_n16", narrow, "tf32_n16", 16, 32, ("tf32", "tf32"))
    yield _wgmma("s8_n32", narrow, "s8_n32", 32, 64, ("s8", "s8"), "32B", "s32", 1, limits=(-128, 127))
    top = (1 << 31) - 30000
    wide = (-90, 127)
    yield _wgmma(
        "u8_s8_n8-satfinite",
        narrow,
        "u8_s8_n8_satfinite",
        8,
        64,
        ("u8", "s8"),
        "128B",
        "s32",
        1,
        limits=wide,
        saturate=top,
    )

    rs = "wgmma_rs"
    yield _wgmma("bf16_n64", rs, "bf16_n64", 64, 64, brain, limits=small, from_registers=True)
    yield _wgmma("f16_n64-b-mn", rs, "f16_n64_b_mn", 64, 32, half, majors="km", limits=small, from_registers=True)
    yield _wgmma(
        "f16_n32-half-negate-a", rs, "f16_n32_half", 32, 32, half, "64B", "f16", 1, (-1, 1), from_registers=True
    )
    yield _wgmma("e4m3_n32", rs, "e4m3_n32", 32, 64, fp8, "64B", from_registers=True)
    yield _wgmma("tf32_n8", rs, "tf32_n8", 8, 24, ("tf32", "tf32"), "32B", scale_d=1, from_registers=True)
    yield _wgmma("s8_n16", rs, "s8_n16", 16, 64, ("s8", "s8"), "none", "s32", limits=(-128, 127), from_registers=True)


def _base_offset_cases() -> Iterator[Case]:
    """A starts 3 rows of 128 bytes after a 1024-byte boundary: swizzled by absolute addresses (base offset 0, as TMA
    writes it), or by the distance from its start (base offset 3)."""
    a_offset, b_offset = 384, 16384
    values_a = integers("base/a", (64, 64), -4, 4)
    values_b = integers("base/b", (8, 64), -4, 4)
    b = operand(bits(values_b, "f16"), "128B")
    for base_offset, origin in ((0, a_offset), (3, 0)):
        a = operand(bits(values_a, "f16"), "128B", base_offset=base_offset, origin=origin)
        yield Case(
            name=f"wgmma_ss/base-offset-{base_offset}",
            module="wgmma_ss",
            kernel="f16_n8",
            buffers={
                "a": a.image,
                "b": b.image,
                "steps": np.array([a.steps, b.steps], np.int32).T.copy(),
                "c": np.zeros((64, 8), np.float32),
                "d": untouched((64, 8), np.float32),
            },
            outputs=("d",),
            args=(_operands(a, b, a_offset, b_offset, 0), "c", "d"),
            block=(128, 1, 1),
            shared=b_offset + len(b.image),
            expect=lambda _: {"d": (values_a @ values_b.T).astype(np.float32)},
        )


def _rounding_cases() -> Iterator[Case]:
    """Sums that do not fit the accumulator: kept as facts, the rounding is not documented."""
    reason = "PTX does not specify the rounding of wgmma's sums"
    for name, kernel, module, element, kind, n in (
        ("f16_n16-half-rounding", "f16_n16_half", "wgmma_ss", "f16", "f16", 16),
        ("f16_n8-rounding", "f16_n8", "wgmma_ss", "f16", "f32", 8),
        ("e4m3_n64-rounding", "e4m3_n64", "wgmma_narrow", "e4m3", "f32", 64),
    ):
        size = 1 if element == "e4m3" else 2
        k = 32 // size
        big = {"f16_n16-half-rounding": (2048, 1), "f16_n8-rounding": (4096, 4096), "e4m3_n64-rounding": (256, 256)}[
            name
        ]
        values_a = integers(f"{name}/a", (64, k), -3, 3)
        values_b = integers(f"{name}/b", (n, k), 0, 2)
        values_a[:, 0], values_b[:, 0] = big
        a, b = operand(bits(values_a, element), "32B"), operand(bits(values_b, element), "32B")
        b_offset = -(-len(a.image) // 1024) * 1024
        yield Case(
            name=f"{module}/{name}",
            module=module,
            kernel=kernel,
            buffers={
                "a": a.image,
                "b": b.image,
                "steps": np.array([a.steps, b.steps], np.int32).T.copy(),
                "c": _accumulator(np.zeros((64, n), np.int64), kind),
                "d": untouched((64, n), np.uint16 if kind == "f16" else np.float32),
            },
            outputs=("d",),
            args=(_operands(a, b, 0, b_offset, 0), "c", "d"),
            block=(128, 1, 1),
            shared=b_offset + len(b.image),
            undefined=reason,
        )


def _fragment(values: np.ndarray, per: int, halves: int, step_rows: bool) -> np.ndarray:
    """Bits [rows, K] as [registers, 32, per]: `halves` row groups of 8; lane l holds row l / 4, K `per` (l % 4) on."""
    rows, k = values.shape
    registers = rows // 8 * (k // (4 * per))
    out = np.empty((registers, 32, per), values.dtype)
    for i in range(registers):
        group, block = (i % halves, i // halves) if step_rows else (0, i)
        for lane in range(32):
            first = block * 4 * per + lane % 4 * per
            out[i, lane] = values[group * 8 + lane // 4, first : first + per]
    return out


def _words(fragment: np.ndarray) -> np.ndarray:
    """[registers, 32] words of a fragment's elements."""
    return np.ascontiguousarray(fragment).view(np.uint32).reshape(fragment.shape[0], 32)


def _result(values: np.ndarray) -> np.ndarray:
    """[rows, 8] as the fragment of C and D: [rows / 8 * 2 elements, 32]."""
    rows = values.shape[0]
    out = np.empty((rows // 8 * 2, 32), values.dtype)
    for i in range(rows // 8 * 2):
        for lane in range(32):
            out[i, lane] = values[i // 2 * 8 + lane // 4, lane % 4 * 2 + i % 2]
    return out


def _result_words(values: np.ndarray) -> np.ndarray:
    """C and D as 32-bit words; 16-bit values of a row are packed in pairs."""
    fragment = _result(values)
    if values.dtype.itemsize == 4:
        return fragment.view(np.uint32)
    pairs = fragment.reshape(-1, 2, 32).transpose(0, 2, 1)
    return np.ascontiguousarray(pairs).view(np.uint32).reshape(-1, 32)


def _mma_cases() -> Iterator[Case]:
    top = (1 << 31) - 20000
    for kernel, rows, k, elements, kind, limits, start in (
        ("f16_k16", 16, 16, ("f16", "f16"), "f32", (-8, 8), 0),
        ("bf16_k16", 16, 16, ("bf16", "bf16"), "f32", (-8, 8), 0),
        ("f16_k8", 16, 8, ("f16", "f16"), "f32", (-8, 8), 0),
        ("bf16_k8", 16, 8, ("bf16", "bf16"), "f32", (-8, 8), 0),
        ("f16_k16_half", 16, 16, ("f16", "f16"), "f16", (-8, 8), 0),
        ("f16_k8_half", 16, 8, ("f16", "f16"), "f16", (-8, 8), 0),
        ("tf32_k8", 16, 8, ("tf32", "tf32"), "f32", (-200, 200), 0),
        ("tf32_k4", 16, 4, ("tf32", "tf32"), "f32", (-200, 200), 0),
        ("e4m3_k32", 16, 32, ("e4m3", "e4m3"), "f32", (-8, 8), 0),
        ("e5m2_e4m3_k32", 16, 32, ("e5m2", "e4m3"), "f32", (-4, 4), 0),
        ("s8_k32", 16, 32, ("s8", "s8"), "s32", (-128, 127), 0),
        ("u8_s8_k32_satfinite", 16, 32, ("u8", "s8"), "s32", (-60, 127), top),
        ("s8_k16", 16, 16, ("s8", "s8"), "s32", (-128, 127), 0),
        ("s8_m8n8k16", 8, 16, ("s8", "s8"), "s32", (-128, 127), 0),
    ):
        low = [0 if e == "u8" else limits[0] for e in elements]
        a = integers(f"mma/{kernel}/a", (rows, k), low[0], limits[1])
        b = integers(f"mma/{kernel}/b", (8, k), low[1], limits[1])
        c = integers(f"mma/{kernel}/c", (rows, 8), -100, 100) + start
        d = np.clip(a @ b.T + c, -(1 << 31), (1 << 31) - 1)
        bits_a, bits_b = bits(a, elements[0]), bits(b, elements[1])
        per = 4 // bits_a.dtype.itemsize
        expected = _result_words(_accumulator(d, kind))
        yield Case(
            name=f"mma_sync/{kernel}",
            module="mma_sync",
            kernel=kernel,
            buffers={
                "a": _words(_fragment(bits_a, per, rows // 8, True)),
                "b": _words(_fragment(bits_b, per, 1, False)),
                "c": _result_words(_accumulator(c, kind)),
                "d": untouched(expected.shape, np.uint32),
            },
            outputs=("d",),
            args=("a", "b", "c", "d"),
            expect=always(d=expected),
        )
    a = integers("mma/f64/a", (8, 4), -1000, 1000)
    b = integers("mma/f64/b", (8, 4), -1000, 1000)
    c = integers("mma/f64/c", (8, 8), -1000, 1000)
    yield Case(
        name="mma_sync/f64_m8n8k4",
        module="mma_sync",
        kernel="f64_m8n8k4",
        buffers={
            "a": a.astype(np.float64).reshape(32),
            "b": b.astype(np.float64).reshape(32),
            "c": _result(c.astype(np.float64)),
            "d": untouched((2, 32), np.float64),
        },
        outputs=("d",),
        args=("a", "b", "c", "d"),
        expect=lambda _: {"d": _result((a @ b.T + c).astype(np.float64))},
    )


def _moved(count: int, transposed: bool) -> Callable[[Arrays], Arrays]:
    def expect(given: Arrays) -> Arrays:
        halves = given["in"].view(np.uint16)
        out = np.empty((count, 32, 2), np.uint16)
        for i in range(count):
            matrix = np.stack([halves[o // 2 : o // 2 + 8] for o in given["offsets"][8 * i : 8 * i + 8]])
            matrix = matrix.T if transposed else matrix
            out[i] = matrix.reshape(32, 2)
        return {"out": out.view(np.uint32).reshape(count, 32)}

    return expect


def _stored(count: int, transposed: bool) -> Callable[[Arrays], Arrays]:
    def expect(given: Arrays) -> Arrays:
        out = np.full(512, 0xA5A5, np.uint16)
        for i in range(count):
            matrix = given["in"][i].view(np.uint16).reshape(8, 8)
            matrix = matrix.T if transposed else matrix
            for row, offset in enumerate(given["offsets"][8 * i : 8 * i + 8]):
                out[offset // 2 : offset // 2 + 8] = matrix[row]
        return {"out": out.view(np.uint8)}

    return expect


def _move_cases() -> Iterator[Case]:
    # 32 distinct 16-byte rows in an order without a pattern.
    order = np.argsort(integers("rows", (64,), 0, 1 << 30), kind="stable")[:32]
    offsets = (order * 16).astype(np.uint32)
    for count in (1, 2, 4):
        for suffix, transposed in (("", False), ("_trans", True)):
            yield Case(
                name=f"matrix_move/ldmatrix_x{count}{suffix}",
                module="matrix_move",
                kernel=f"ldmatrix_x{count}{suffix}",
                buffers={
                    "in": raw("ldmatrix", (1024,), np.uint8),
                    "offsets": offsets,
                    "out": untouched((count, 32), np.uint32),
                },
                outputs=("out",),
                args=("in", "offsets", "out"),
                expect=_moved(count, transposed),
            )
            yield Case(
                name=f"matrix_move/stmatrix_x{count}{suffix}",
                module="matrix_move",
                kernel=f"stmatrix_x{count}{suffix}",
                buffers={
                    "in": raw("stmatrix", (count, 32), np.uint32),
                    "offsets": offsets,
                    "out": untouched((1024,), np.uint8),
                },
                outputs=("out",),
                args=("in", "offsets", "out"),
                expect=_stored(count, transposed),
            )

    def transpose(given: Arrays) -> Arrays:
        matrix = given["in"].view(np.uint16).reshape(8, 8)
        return {"out": np.ascontiguousarray(matrix.T).view(np.uint32).reshape(32)}

    yield Case(
        name="matrix_move/movmatrix",
        module="matrix_move",
        kernel="movmatrix",
        buffers={"in": raw("movmatrix", (32,), np.uint32), "out": untouched((32,), np.uint32)},
        outputs=("out",),
        args=("in", "out"),
        expect=transpose,
    )


def cases() -> list[Case]:
    """All cases of this file."""
    return [*_wgmma_cases(), *_base_offset_cases(), *_rounding_cases(), *_mma_cases(), *_move_cases()]
