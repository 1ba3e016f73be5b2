"""16-bit floats, alone and in pairs; pairs of 16-bit integers; bytes and halves side by side (vadd4, vabsdiff2, ...).

PTX ISA 9.7.4 (half precision), 9.7.1 (u16x2, s16x2) and 9.7.17 (SIMD video). Float values are float32, or float64 where
a product or sum does not fit, and are rounded once, to the bits of their format.
"""

from __future__ import annotations

import numpy as np

from ..ir import Imm, Instruction
from ..registry import Unsupported, generated
from . import exact, floats
from .arithmetic import bit_field
from .code import Code
from .dispatch import allow, call, chosen, operands, rule, source

HALVES = "f16 bf16"
PAIRS = "f16x2 bf16x2"


# Arithmetic ----------------------------------------------------------------------------------------------------------
def arithmetic16(code: Code, i: Instruction) -> None:
    kind = i.type
    operands(i, 4 if i.op == "fma" else 3)
    short = kind.startswith("f16")
    allow(i, ("rn ftz sat" if short else "rn") + (" relu" if i.op == "fma" else ""))
    if i.op == "fma":
        chosen(i, "rn")
    function = (fma_f16 if short else fma_bf16) if i.op == "fma" else (plain_f16 if short else plain_bf16)
    flags = [repr(kind), i.has("ftz"), i.has("sat"), i.has("relu")]
    name = [] if i.op == "fma" else [repr(i.op)]
    texts = [floats.load(code, x, kind) for x in i.args[1:]]
    _store(code, i, call(code, function, *name, *flags, *texts))


rule("mul", HALVES)(arithmetic16)
rule("add sub mul fma", PAIRS)(arithmetic16)


def _store(code: Code, i: Instruction, text: str) -> None:
    code.dst(i.args[0], "u32" if i.type in PAIRS.split() else "u16", text)


def _flush(ftz: bool, *values: np.ndarray) -> tuple[np.ndarray, ...]:
    return tuple(floats.flush16(x) for x in values) if ftz else values


def plain_f16(op: str, kind: str, ftz: bool, sat: bool, relu: bool, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """float32 has more than twice the bits of f16, and two more: rounding twice is rounding once."""
    a, b = _flush(ftz, a, b)
    r = np.add(a, b) if op == "add" else np.subtract(a, b) if op == "sub" else np.multiply(a, b)
    return floats.finish16(r, kind, ftz, sat, relu)


def fma_f16(kind: str, ftz: bool, sat: bool, relu: bool, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Products of f16 and the sums that stay in its range are exact in float64."""
    a, b, c = _flush(ftz, a, b, c)
    return floats.finish16(np.multiply(a, b, dtype=np.float64) + c, kind, ftz, sat, relu)


def plain_bf16(op: str, kind: str, ftz: bool, sat: bool, relu: bool, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Sums as for f16; products may be subnormal in float32, so that they are rounded from float64."""
    if op == "mul":
        return floats.finish16(np.multiply(a, b, dtype=np.float64), kind)
    return floats.finish16(np.add(a, b) if op == "add" else np.subtract(a, b), kind)


def fma_bf16(kind: str, ftz: bool, sat: bool, relu: bool, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    total = exact.odd_sum(np.multiply(a, b, dtype=np.float64), c.astype(np.float64))
    return floats.finish16(total, kind, relu=relu)


@rule("min max", f"{HALVES} {PAIRS}")
def _extreme16(code: Code, i: Instruction) -> None:
    operands(i, 3)
    allow(i, "ftz NaN xorsign abs")
    texts = [floats.load(code, x, i.type) for x in i.args[1:]]
    if i.has("ftz"):
        texts = [call(code, floats.flush16, t) for t in texts]
    flags = [i.op == "max", *(i.has(m) for m in ("NaN", "abs", "xorsign")), False]
    _store(code, i, call(code, floats.finish16, call(code, floats.extreme, *flags, *texts), repr(i.type)))


@rule("abs neg", f"{HALVES} {PAIRS}")
def _sign16(code: Code, i: Instruction) -> None:
    operands(i, 2)
    allow(i, "ftz" if i.type.startswith("f16") else "")
    kind = "u32" if i.type in PAIRS.split() else "u16"
    value = floats.load(code, i.args[1], i.type)
    if i.has("ftz"):
        value = call(code, floats.flush16, value)
    value = f"{code.helper(np.negative if i.op == 'neg' else np.absolute)}({value})"
    code.dst(i.args[0], kind, call(code, floats.finish16, value, repr(i.type)))


@rule("ex2 tanh", f"{HALVES} {PAIRS}")
def _function16(code: Code, i: Instruction) -> None:
    operands(i, 2)
    bf16_power = i.op == "ex2" and i.type.startswith("bf16")
    allow(i, "approx ftz" if bf16_power else "approx")
    chosen(i, "approx")
    value = f"{code.helper(np.exp2 if i.op == 'ex2' else np.tanh)}({floats.load(code, i.args[1], i.type)})"
    if bf16_power and i.has("ftz"):
        value = call(code, floats.flush32, value)
    _store(code, i, call(code, floats.finish16, value, repr(i.type)))


# Pairs of integers ---------------------------------------------------------------------------------------------------
@rule("add min max", "u16x2 s16x2")
def _integers16(code: Code, i: Instruction) -> None:
    operands(i, 3)
    allow(i, "relu" if i.type == "s16x2" and i.op != "add" else "")
    ufunc = {"add": "add", "min": "minimum", "max": "maximum"}[i.op]
    dtype = code.helper(np.int16 if i.type[0] == "s" else np.uint16)
    texts = []
    for operand in i.args[1:]:
        text = source(code, operand, "u32")
        if isinstance(operand, Imm):
            text = f"{code.helper(np.full)}(v.width,{text})"
        texts.append(f"{text}.view({dtype})")
    value = f"{code.helper(getattr(np, ufunc))}({','.join(texts)})"
    if i.has("relu"):
        value = f"{code.helper(np.maximum)}({value},{code.const(np.asarray(np.int16(0)))})"
    code.dst(i.args[0], "u32", f"{value}.view({code.helper(np.uint32)})")


_VIDEO = ("vadd", "vsub", "vavrg", "vabsdiff", "vmin", "vmax")


@generated(*(f"{op}{lanes}" for op in _VIDEO for lanes in "24"))
def _video(code: Code, i: Instruction) -> None:
    """v<op>2 and v<op>4 on all elements in their order, which is what CUDA's SIMD intrinsics are made of."""
    operands(i, 4)
    kinds = [m for m in i.mods if m in ("u32", "s32")]
    if len(kinds) != 3 or any(m not in ("u32", "s32", "sat", "add") for m in i.mods):
        raise Unsupported(f"{i.name}: the form is {i.op}.dtype.atype.btype with .sat or .add")
    a, b, c = (source(code, x, "u32") for x in i.args[1:])
    signs = [k == "s32" for k in kinds]
    flags = (repr(i.op[:-1]), int(i.op[-1]), signs, i.has("sat"), i.has("add"))
    code.dst(i.args[0], "u32", call(code, video, *flags, a, b, c))


def video(
    op: str, lanes: int, signs: list[bool], sat: bool, add: bool, a: np.ndarray, b: np.ndarray, c: np.ndarray
) -> np.ndarray:
    """Elements of a and b combined; their sum and c with `add`. `signs`: are the result, a and b signed?"""
    size = 32 // lanes
    low, high = (-(1 << (size - 1)), (1 << (size - 1)) - 1) if signs[0] else (0, (1 << size) - 1)
    total = np.asarray(c).astype(np.int64) if add else np.int64(0)
    for k in range(lanes):
        x, y = bit_field(a, k * size, size, signs[1]), bit_field(b, k * size, size, signs[2])
        if op == "vavrg":
            t = (x + y + (x + y >= 0)) >> 1
        elif op in ("vmin", "vmax"):
            t = np.minimum(x, y) if op == "vmin" else np.maximum(x, y)
        else:
            t = x + y if op == "vadd" else x - y if op == "vsub" else np.abs(x - y)
        if sat:
            t = np.clip(t, low, high)
        total = total + t if add else total | (t & ((1 << size) - 1)) << (k * size)
    return (total & 0xFFFFFFFF).astype(np.uint32)
