"""float32 and float64: add, sub, mul, fma, div, rcp, sqrt, rsqrt, min, max, abs, neg, ex2, lg2, sin, cos, tanh, ...

PTX ISA 9.7.3 and 9.7.5 (mixed precision). Everything with a rounding mode is rounded exactly; approximations are
numpy's, closer than the hardware's, whose bits are not documented. float32 arithmetic returns NaN as 0x7fffffff.
"""

from __future__ import annotations

import numpy as np

from ..ir import CLASS_OF_SIZE, Imm, Instruction, Reg
from ..registry import Unsupported, generated
from . import exact, floats
from .code import Code
from .dispatch import allow, call, chosen, emit, operands, rule, source, sources
from .packed import arithmetic16

MODES = "rn rz rm rp"
_PLAIN = {"add": "add", "sub": "subtract", "mul": "multiply"}


def check_nan(code: Code, operand: object) -> None:
    """After a float32 result was written in place: NaN to the canonical one. A sum of squares tells cheaply."""
    assert isinstance(operand, Reg)
    target = code.target(operand, "f32")
    code.line(f"s={target}.dot({target})\nif s!=s: {call(code, floats.repair_nan32, target, code.mask)}")


def is_register(operand: object, kind: str) -> bool:
    size = 8 if kind == "f64" else 4
    return isinstance(operand, Reg) and operand.cls == CLASS_OF_SIZE[size]


# Sums and products ---------------------------------------------------------------------------------------------------
@rule("add sub mul", "f32")
def _arithmetic32(code: Code, i: Instruction) -> None:
    operands(i, 3)
    allow(i, f"{MODES} ftz sat")
    mode = chosen(i, MODES, "rn")
    a, b = sources(code, i.args[1:], "f32")
    if mode == "rn" and not i.has("ftz") and not i.has("sat") and is_register(i.args[0], "f32"):
        emit(code, _PLAIN[i.op], i.args[0], "f32", a, b)
        check_nan(code, i.args[0])
        return
    code.dst(i.args[0], "f32", call(code, arithmetic32, repr(i.op), repr(mode), i.has("ftz"), i.has("sat"), a, b))


def arithmetic32(op: str, mode: str, ftz: bool, sat: bool, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if ftz:
        a, b = floats.flush32(a), floats.flush32(b)
    if mode == "rn":
        r = np.add(a, b) if op == "add" else np.subtract(a, b) if op == "sub" else np.multiply(a, b)
    elif op == "mul":
        r = exact.product32_in(a, b, mode)
    else:
        r = exact.sum32_in(a, b if op == "add" else -b, mode)
    if ftz and op == "mul" and floats.smallest_normal(r):
        r = floats.flush_tiny(r, np.multiply(a, b, dtype=np.float64), mode)
    return floats.finish32(r, ftz, sat)


@rule("fma mad", "f32")
def _fma32(code: Code, i: Instruction) -> None:
    operands(i, 4)
    allow(i, f"{MODES} ftz sat")
    mode = chosen(i, MODES)
    texts = sources(code, i.args[1:], "f32")
    if mode == "rn" and not i.has("ftz") and not i.has("sat") and is_register(i.args[0], "f32"):
        code.dst(i.args[0], "f32", call(code, exact.fma32, *texts))
        check_nan(code, i.args[0])
        return
    code.dst(i.args[0], "f32", call(code, fma32, repr(mode), i.has("ftz"), i.has("sat"), *texts))


def fma32(mode: str, ftz: bool, sat: bool, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    if ftz:
        a, b, c = floats.flush32(a), floats.flush32(b), floats.flush32(c)
    r = exact.fma32(a, b, c) if mode == "rn" else exact.fma32_in(a, b, c, mode)
    if ftz and floats.smallest_normal(r):
        r = floats.flush_tiny(r, np.add(np.multiply(a, b, dtype=np.float64), c), mode)
    return floats.finish32(r, ftz, sat)


@rule("add sub fma", "f16 bf16")
def _by_16_bit_type(code: Code, i: Instruction) -> None:
    """add.f32.f16 and its kin add 16-bit values to float32 ones; add.f16 computes in 16 bits (packed.py)."""
    if not i.has("f32"):
        arithmetic16(code, i)
        return
    allow(i, f"{MODES} sat f32")
    fma = i.op == "fma"
    operands(i, 4 if fma else 3)
    mode = chosen(i, MODES, "" if fma else "rn")
    narrow = [floats.load(code, x, i.type) for x in i.args[1 : 3 if fma else 2]]
    c = sources(code, i.args[-1:], "f32")[0]
    flags = (repr(mode), False, i.has("sat"))
    function = (fma32, *flags) if fma else (arithmetic32, repr(i.op), *flags)
    code.dst(i.args[0], "f32", call(code, function[0], *function[1:], *narrow, c))


# Pairs of float32 ----------------------------------------------------------------------------------------------------
def _pairs(code: Code, items: tuple) -> list[str]:
    """64-bit registers as float32 [2 * width]."""
    texts = []
    for operand in items:
        text = source(code, operand, "u64")
        if isinstance(operand, Imm):
            text = f"{code.helper(np.full)}(v.width,{text})"
        texts.append(code.temp(f"{text}.view({code.helper(np.float32)})"))
    return texts


@rule("add sub mul fma", "f32x2")
def _arithmetic32x2(code: Code, i: Instruction) -> None:
    fma = i.op == "fma"
    operands(i, 4 if fma else 3)
    allow(i, f"{MODES} ftz")
    mode, ftz = chosen(i, MODES, "" if fma else "rn"), i.has("ftz")
    texts = _pairs(code, i.args[1:])
    if fma:
        value = call(code, fma32, repr(mode), ftz, False, *texts)
    elif mode == "rn" and not ftz:
        value = call(code, floats.canonical32, f"{code.helper(getattr(np, _PLAIN[i.op]))}({','.join(texts)})")
    else:
        value = call(code, arithmetic32, repr(i.op), repr(mode), ftz, False, *texts)
    code.dst(i.args[0], "u64", f"{value}.view({code.helper(np.uint64)})")


# float64 -------------------------------------------------------------------------------------------------------------
_EXACT64 = {"add": exact.sum64_in, "sub": exact.sum64_in, "mul": exact.product64_in, "div": exact.quotient64_in}


@rule("add sub mul", "f64")
def _arithmetic64(code: Code, i: Instruction) -> None:
    operands(i, 3)
    allow(i, MODES)
    mode = chosen(i, MODES, "rn")
    a, b = sources(code, i.args[1:], "f64")
    if mode == "rn":
        emit(code, _PLAIN[i.op], i.args[0], "f64", a, b)
    else:
        code.dst(i.args[0], "f64", call(code, _EXACT64[i.op], a, f"-{b}" if i.op == "sub" else b, repr(mode)))


@rule("fma mad", "f64")
def _fma64(code: Code, i: Instruction) -> None:
    operands(i, 4)
    allow(i, MODES)
    mode = chosen(i, MODES)
    texts = sources(code, i.args[1:], "f64")
    if mode == "rn":
        code.dst(i.args[0], "f64", call(code, exact.fma64, *texts))
    else:
        code.dst(i.args[0], "f64", call(code, exact.fma64_in, *texts, repr(mode)))


@rule("div rcp sqrt rsqrt", "f64")
def _quotient64(code: Code, i: Instruction) -> None:
    operands(i, 3 if i.op == "div" else 2)
    if i.op == "rsqrt" or i.has("approx"):
        if i.op == "div" or i.op == "sqrt":
            raise Unsupported(f"{i.op}.approx.f64")
        allow(i, "approx ftz")
        a = source(code, i.args[1], "f64")
        # The hardware computes with the upper word only.
        code.dst(i.args[0], "f64", call(code, approximate64, a, i.op == "rsqrt", i.op == "rcp" or i.has("ftz")))
        return
    allow(i, MODES)
    mode = chosen(i, MODES)
    texts = sources(code, i.args[1:], "f64")
    if i.op == "rcp":
        texts.insert(0, code.const(np.asarray(np.float64(1))))
    if mode == "rn":
        emit(code, "sqrt" if i.op == "sqrt" else "divide", i.args[0], "f64", *texts)
    else:
        function = exact.root64_in if i.op == "sqrt" else exact.quotient64_in
        code.dst(i.args[0], "f64", call(code, function, *texts, repr(mode)))


def approximate64(a: np.ndarray, root: bool, ftz: bool) -> np.ndarray:
    """1 / a, or 1 / sqrt(a), with 20 fraction bits: the lower word of the result is zero (rcp.approx.ftz.f64)."""
    if ftz:
        a = np.where(np.abs(a) < 2.0**-1022, np.copysign(0.0, a), a)
    r = np.asarray(1.0 / (np.sqrt(a) if root else a))
    if ftz:
        r = np.where(np.abs(r) < 2.0**-1022, np.copysign(0.0, r), r)
    bits = np.where(np.isfinite(r), r.view(np.uint64) + np.uint64(0x80000000), r.view(np.uint64))
    return (bits & np.uint64(0xFFFFFFFF00000000)).view(np.float64) if not root else r


# Quotients and roots of float32 --------------------------------------------------------------------------------------
@rule("div", "f32")
def _div32(code: Code, i: Instruction) -> None:
    operands(i, 3)
    allow(i, f"{MODES} approx full ftz")
    how = chosen(i, f"{MODES} approx full")
    a, b = sources(code, i.args[1:], "f32")
    if how in ("full", "rn") and not i.has("ftz") and is_register(i.args[0], "f32"):
        emit(code, "divide", i.args[0], "f32", a, b)
        check_nan(code, i.args[0])
    else:
        code.dst(i.args[0], "f32", call(code, quotient32, repr(how), i.has("ftz"), a, b))


def quotient32(how: str, ftz: bool, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if ftz:
        a, b = floats.flush32(a), floats.flush32(b)
    if how == "approx":
        # a times the reciprocal of b, which is a flushed zero beyond 2**126 (PTX ISA 9.7.3.8).
        r = np.where(
            (np.abs(b) > 2.0**126) & np.isfinite(b), np.multiply(a, np.copysign(np.float32(0), b)), np.divide(a, b)
        )
    else:
        r = exact.quotient32_in(a, b, "rn" if how == "full" else how)
        if ftz and floats.smallest_normal(r):
            r = floats.flush_tiny(r, np.divide(a, b, dtype=np.float64), "rn" if how == "full" else how)
    return floats.finish32(r, ftz, False)


@rule("rcp sqrt rsqrt", "f32")
def _root32(code: Code, i: Instruction) -> None:
    operands(i, 2)
    allow(i, "approx ftz" if i.op == "rsqrt" else f"{MODES} approx ftz")
    how = chosen(i, "approx" if i.op == "rsqrt" else f"{MODES} approx")
    mode = "rn" if how == "approx" else how
    a = sources(code, i.args[1:], "f32")[0]
    code.dst(i.args[0], "f32", call(code, root32, repr(i.op), repr(mode), i.has("ftz"), a))


def root32(op: str, mode: str, ftz: bool, a: np.ndarray) -> np.ndarray:
    if ftz:
        a = floats.flush32(a)
    if op == "sqrt":
        r = exact.root32_in(a, mode)
    elif op == "rcp":
        r = exact.quotient32_in(np.float32(1), a, mode)
    else:
        r = np.divide(1.0, np.sqrt(a, dtype=np.float64)).astype(np.float32)
    return floats.finish32(r, ftz, False)


# Approximations ------------------------------------------------------------------------------------------------------
_FUNCTIONS = {"ex2": np.exp2, "lg2": np.log2, "sin": np.sin, "cos": np.cos, "tanh": np.tanh}


@rule("ex2 lg2 sin cos tanh", "f32")
def _function32(code: Code, i: Instruction) -> None:
    operands(i, 2)
    allow(i, "approx" if i.op == "tanh" else "approx ftz")
    a = sources(code, i.args[1:], "f32")[0]
    if i.op == "ex2":
        code.dst(i.args[0], "f32", call(code, power32_flushed if i.has("ftz") else power32, a))
    else:
        code.dst(i.args[0], "f32", call(code, function32, repr(i.op), i.has("ftz"), a))


def power32(x: np.ndarray) -> np.ndarray:
    return floats.canonical32(np.exp2(x))


def power32_flushed(x: np.ndarray) -> np.ndarray:
    """2**x: the most frequent function of attention kernels. A flushed argument gives 1 as an unflushed one does."""
    r = np.exp2(x)
    np.copyto(r, 0, where=np.less(r, floats.TINY32))
    return floats.canonical32(r)


def function32(op: str, ftz: bool, a: np.ndarray) -> np.ndarray:
    if ftz:
        a = floats.flush32(a)
    return floats.finish32(_FUNCTIONS[op](a), ftz, False)


# Minimum, maximum, sign ----------------------------------------------------------------------------------------------
@rule("min max", "f32")
def _extreme32(code: Code, i: Instruction) -> None:
    operands(i, 3, 4)
    allow(i, "ftz NaN xorsign abs")
    if i.has("xorsign") and len(i.args) == 4:
        raise Unsupported(".xorsign with three values")
    texts = sources(code, i.args[1:], "f32")
    flags = [i.op == "max", *(i.has(m) for m in ("NaN", "abs", "xorsign", "ftz"))]
    if any(flags[1:]):
        code.dst(i.args[0], "f32", call(code, floats.extreme, *flags, *texts))
        return
    if len(texts) == 3:
        first = call(code, floats.maximum if i.op == "max" else floats.minimum, *texts[:2])
        code.dst(i.args[0], "f32", call(code, floats.maximum if i.op == "max" else floats.minimum, first, texts[2]))
        return
    constants = [
        code.names[t] for t, x in zip(texts, i.args[1:], strict=True) if isinstance(x, Imm) and t in code.names
    ]
    if any(c != 0 and c == c for c in constants):
        # Neither zeros of two signs nor two NaN can meet.
        emit(code, "fmax" if i.op == "max" else "fmin", i.args[0], "f32", *texts)
    else:
        code.dst(i.args[0], "f32", call(code, floats.maximum if i.op == "max" else floats.minimum, *texts))


@rule("min max", "f64")
def _extreme64(code: Code, i: Instruction) -> None:
    operands(i, 3)
    allow(i, "")
    texts = sources(code, i.args[1:], "f64")
    code.dst(i.args[0], "f64", call(code, floats.extreme64, i.op == "max", *texts))


@rule("abs neg", "f32 f64")
def _sign(code: Code, i: Instruction) -> None:
    operands(i, 2)
    allow(i, "ftz" if i.type == "f32" else "")
    ufunc = "absolute" if i.op == "abs" else "negative"
    text = sources(code, i.args[1:], i.type)[0]
    emit(code, ufunc, i.args[0], i.type, call(code, floats.flush32, text) if i.has("ftz") else text)
    if i.type == "f32":
        check_nan(code, i.args[0])


@rule("copysign", "f32 f64")
def _copysign(code: Code, i: Instruction) -> None:
    """The sign of a on the size of b."""
    operands(i, 3)
    allow(i, "")
    a, b = sources(code, i.args[1:], i.type)
    emit(code, "copysign", i.args[0], i.type, b, a)


@generated("testp")
def _testp(code: Code, i: Instruction) -> None:
    operands(i, 2)
    if i.type not in ("f32", "f64"):
        raise Unsupported(f"testp of .{i.type}: f32 and f64")
    allow(i, "finite infinite number notanumber normal subnormal")
    what = chosen(i, "finite infinite number notanumber normal subnormal")
    code.dst(i.args[0], "pred", call(code, has_property, repr(what), sources(code, i.args[1:], i.type)[0]))


def has_property(what: str, x: np.ndarray) -> np.ndarray:
    """Zeros count as normal (PTX ISA 9.7.3.1)."""
    size = np.abs(x)
    subnormal = (size < np.finfo(x.dtype).tiny) & (size > 0)
    if what == "subnormal":
        return subnormal
    if what == "normal":
        return np.isfinite(x) & ~subnormal
    if what in ("number", "notanumber"):
        return np.isnan(x) if what == "notanumber" else ~np.isnan(x)
    return np.isfinite(x) if what == "finite" else np.isinf(x)
