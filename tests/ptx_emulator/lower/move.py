"""Moves, comparisons and selections; conversion of addresses; what has no effect on results.

mov, cvta, isspacep, createpolicy (PTX ISA 9.7.9), setp, set, selp, slct (9.7.6, 9.7.7), and instructions that only
touch caches, counters or the start of dependent grids.
"""

from __future__ import annotations

import numpy as np

from ..ir import CLASS_OF_SIZE, Imm, Instruction, Name, Pair, Reg, Sink, Special, Vec
from ..memory import GLOBAL_BASE, RANK_SHIFT, WINDOW_BYTES, WINDOWS
from ..registry import Unsupported, generated
from . import floats
from .code import Code
from .dispatch import INTEGERS, UNSIGNED, allow, call, chosen, dtype_of, emit, operands, rule, source

_PARTS = {8: "b8", 16: "b16", 32: "b32", 64: "b64"}


# mov -----------------------------------------------------------------------------------------------------------------
@rule("mov", f"pred b16 b32 b64 b128 f32 f64 f16 bf16 f16x2 bf16x2 {INTEGERS}")
def _mov(code: Code, i: Instruction) -> None:
    operands(i, 2)
    allow(i, "")
    to, origin = i.args
    if isinstance(origin, Name):
        raise Unsupported(f"the address of the function {origin.name!r}")
    if isinstance(origin, Vec):
        _pack(code, to, origin, i.type)
    elif isinstance(to, Vec):
        _unpack(code, to, origin, i.type)
    elif i.type == "b128":
        if not isinstance(to, Reg) or not isinstance(origin, Reg):
            raise Unsupported("mov.b128 of something other than a register")
        _copy(code, code.target(to, "b128"), code.src(origin, "b128"), "[:,None]")
    elif i.type == "pred":
        # %is_explicit_cluster is a predicate among the special registers.
        value = f"({code.src(origin, 'u32')}!=0)" if isinstance(origin, Special) else code.src(origin, "pred")
        code.dst(to, "pred", value)
    else:
        kind = i.type if isinstance(origin, Imm) else f"u{dtype_of(i.type)(0).itemsize * 8}"
        code.dst(to, kind, source(code, origin, kind))


def _copy(code: Code, target: str, value: str, axes: str = "") -> None:
    if code.mask == "None":
        code.line(f"{target}[...]={value}")
    else:
        code.line(f"copyto({target},{value},where={code.mask}{axes},casting='unsafe')")


def _part(vector: Vec, bits: int) -> tuple[str, int]:
    """Type and bits of the items of a vector that a value of `bits` bits is made of."""
    n = len(vector.items)
    part = bits // n
    if part not in _PARTS or part * n != bits:
        raise Unsupported(f"{n} parts of a value of {bits} bits")
    return _PARTS[part], part


def _pack(code: Code, to: object, vector: Vec, kind: str) -> None:
    bits = 128 if kind == "b128" else dtype_of(kind)(0).itemsize * 8
    part, size = _part(vector, bits)
    dtype = code.helper(np.dtype(f"u{size // 8}"))
    n = len(vector.items)
    if bits == 128:
        if not isinstance(to, Reg):
            raise Unsupported(f"destination {to!r}")
        view = code.temp(f"{code.target(to, 'b128')}.view({dtype})")
        for k, item in enumerate(vector.items):
            _copy(code, f"{view}[:,{k}]", source(code, item, part))
        return
    # Straight into the register where all threads are active: its parts cannot be registers of its own class.
    direct = code.mask == "None" and isinstance(to, Reg) and size >= 16 and to.cls == {32: "w", 64: "d"}.get(bits)
    whole = f"u{bits}"
    if direct:
        assert isinstance(to, Reg)
        target = code.target(to, whole)
    else:
        target = code.temp(f"{code.helper(np.empty)}(v.width,{code.helper(dtype_of(whole))})")
    view = code.temp(f"{target}.view({dtype})")
    for k, item in enumerate(vector.items):
        code.line(f"{view}[{k}::{n}]={source(code, item, part)}")
    if not direct:
        code.dst(to, whole, target)


def _unpack(code: Code, to: Vec, origin: object, kind: str) -> None:
    bits = 128 if kind == "b128" else dtype_of(kind)(0).itemsize * 8
    part, size = _part(to, bits)
    dtype = code.helper(np.dtype(f"u{size // 8}"))
    n = len(to.items)
    if bits == 128:
        view = code.temp(f"{code.src(origin, 'b128')}.view({dtype})")
        texts = [f"{view}[:,{k}]" for k in range(n)]
    else:
        text = source(code, origin, f"u{bits}")
        if not isinstance(origin, Reg):
            text = f"{code.helper(np.full)}(v.width,{text})"
        view = code.temp(f"{text}.view({dtype})")
        texts = [f"{view}[{k}::{n}]" for k in range(n)]
    for item, text in zip(to.items, texts, strict=True):
        if not isinstance(item, Sink):
            code.dst(item, part, text)


# Addresses -----------------------------------------------------------------------------------------------------------
def _space(i: Instruction) -> str:
    found = [m for m in i.mods if m in WINDOWS]
    if len(found) != 1:
        raise Unsupported(f"{i.op} needs one state space out of {', '.join(WINDOWS)}; it has {found or 'none'}")
    return found[0]


@rule("cvta", "u64")
def _cvta(code: Code, i: Instruction) -> None:
    operands(i, 2)
    space = _space(i)
    value = source(code, i.args[1], "u64")
    base = f"{code.helper(np.uint64)}(v.window({space!r}))"
    if space in ("global", "const", "local"):
        code.dst(i.args[0], "u64", value)
    else:
        emit(code, "subtract" if i.has("to") else "add", i.args[0], "u64", value, base)


@generated("isspacep")
def _isspacep(code: Code, i: Instruction) -> None:
    operands(i, 2)
    space = _space(i)
    rank = "v.cta.rank" if space in ("shared", "shared::cta") else None
    code.dst(i.args[0], "pred", call(code, inside, source(code, i.args[1], "u64"), repr(space), rank))


def inside(address: np.ndarray, space: str, rank: int | None) -> np.ndarray:
    """Is a generic address in a state space; with `rank`, in the shared memory of that block of the cluster."""
    if space == "global":
        return address >= np.uint64(GLOBAL_BASE)
    offset = np.subtract(address, np.uint64(WINDOWS[space]))
    found = offset < np.uint64(WINDOW_BYTES)
    return found if rank is None else found & ((offset >> np.uint64(RANK_SHIFT)) == np.uint64(rank))


# Comparisons ---------------------------------------------------------------------------------------------------------
_ORDERED = {"eq": "equal", "ne": "not_equal", "lt": "less", "le": "less_equal", "gt": "greater", "ge": "greater_equal"}
_UNSIGNED_ORDER = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
_NEGATED = {"equ": "ne", "ltu": "ge", "leu": "gt", "gtu": "le", "geu": "lt"}
_COMPARISONS = " ".join((*_ORDERED, *_UNSIGNED_ORDER, *_NEGATED, "neu", "num", "nan"))
_BOOLEAN = "and or xor"
_COMPARED = f"b16 b32 b64 {INTEGERS} f16 bf16 f16x2 bf16x2 f32 f64"


def _compare(code: Code, comparison: str, kind: str, a: str, b: str) -> tuple[str, tuple[str, ...]]:
    """A ufunc and its sources for a comparison of two texts. Unordered forms hold for NaN, ordered ones do not."""
    floating = kind in ("f32", "f64")
    if not floating and comparison in (*_NEGATED, "neu", "num", "nan"):
        raise Unsupported(f"comparison {comparison} of .{kind}: it is for floats")
    if comparison in _UNSIGNED_ORDER:
        if kind not in UNSIGNED.split():
            raise Unsupported(f"comparison {comparison} of .{kind}: it is for unsigned integers")
        comparison = _UNSIGNED_ORDER[comparison]
    if kind[0] == "b" and comparison not in ("eq", "ne"):
        raise Unsupported(f"comparison {comparison} of .{kind}: eq and ne only")
    if floating and comparison == "ne":
        return "bitwise_or", (f"({a}<{b})", f"({a}>{b})")
    if comparison == "neu":
        return "not_equal", (a, b)
    if comparison == "num":
        return "bitwise_and", (f"({a}=={a})", f"({b}=={b})")
    if comparison == "nan":
        return "bitwise_or", (f"({a}!={a})", f"({b}!={b})")
    if comparison in _NEGATED:
        ufunc, texts = _compare(code, _NEGATED[comparison], kind, a, b)
        return "invert", (f"{code.helper(getattr(np, ufunc))}({','.join(texts)})",)
    return _ORDERED[comparison], (a, b)


def _compared(code: Code, i: Instruction, kind: str) -> tuple[str, str, str]:
    """Texts of operands 1 and 2 as numpy compares them, and the type that they have then."""
    if kind in ("f16", "bf16", "f16x2", "bf16x2"):
        texts = [floats.load(code, x, kind) for x in i.args[1:3]]
        if i.has("ftz"):
            texts = [call(code, floats.flush16, t) for t in texts]
        return code.temp(texts[0]), code.temp(texts[1]), "f32"
    texts = [source(code, x, kind) for x in i.args[1:3]]
    if i.has("ftz"):
        if kind != "f32":
            raise Unsupported(f".ftz of .{kind}")
        texts = [code.temp(call(code, floats.flush32, t)) for t in texts]
    return texts[0], texts[1], kind


def _outcome(code: Code, i: Instruction, kind: str) -> tuple[str, tuple[str, ...], str, str]:
    """Comparison (ufunc, sources), boolean operation ("" for none) and its predicate."""
    boolean = chosen(i, _BOOLEAN, "none")
    operands(i, 3 if boolean == "none" else 4)
    a, b, held = _compared(code, i, kind)
    ufunc, texts = _compare(code, chosen(i, _COMPARISONS), held if held[0] == "f" else kind, a, b)
    if boolean == "none":
        return ufunc, texts, "", ""
    return ufunc, texts, f"bitwise_{boolean}", code.src(i.args[3], "pred")


@rule("setp", _COMPARED)
def _setp(code: Code, i: Instruction) -> None:
    kind = i.type
    allow(i, f"{_COMPARISONS} {_BOOLEAN} ftz")
    ufunc, texts, boolean, other = _outcome(code, i, kind)
    to = i.args[0]
    if not isinstance(to, Pair):
        if kind.endswith("x2"):
            raise Unsupported(f"setp of .{kind} needs p|q")
        if boolean:
            value = f"{code.helper(getattr(np, ufunc))}({','.join(texts)})"
            ufunc, texts = boolean, (value, other)
        emit(code, ufunc, to, "pred", *texts)
        return
    value = code.temp(f"{code.helper(getattr(np, ufunc))}({','.join(texts)})")
    results = [f"{value}[0::2]", f"{value}[1::2]"] if kind.endswith("x2") else [value, f"~{value}"]
    if boolean:
        # Both are known before one is written: c may be a destination.
        results = [code.temp(f"{code.helper(getattr(np, boolean))}({r},{other})") for r in results]
    for register, result in zip((to.first, to.second), results, strict=True):
        if not isinstance(register, Sink):
            code.dst(register, "pred", result)


@generated("set")
def _set(code: Code, i: Instruction) -> None:
    """set.CmpOp{.BoolOp}.dtype.stype: all ones, or 1.0, where the comparison holds."""
    kinds = [m for m in i.mods if m in _COMPARED.split()]
    if len(kinds) != 2:
        raise Unsupported(f"set needs two types; it has {kinds or 'none'}")
    result, kind = kinds
    allow(i, f"{_COMPARISONS} {_BOOLEAN} ftz {result}")
    ones = {"f32": 0x3F800000, "f16": 0x3C00, "bf16": 0x3F80}.get(result.removesuffix("x2"))
    if (ones is None and result not in INTEGERS.split()) or (result.endswith("x2") and result != kind):
        raise Unsupported(f"set of .{kind} into .{result}")
    ufunc, texts, boolean, other = _outcome(code, i, kind)
    value = f"{code.helper(getattr(np, ufunc))}({','.join(texts)})"
    if kind.endswith("x2"):
        if result not in (kind, "u32", "s32"):
            raise Unsupported(f"set of .{kind} into .{result}")
        if boolean:
            other = f"{code.helper(np.repeat)}({other},2)"
            value = f"{code.helper(getattr(np, boolean))}({value},{other})"
        code.dst(i.args[0], "u32", call(code, chosen_halves, value, 0xFFFF if ones is None else ones))
        return
    if boolean:
        value = f"{code.helper(getattr(np, boolean))}({value},{other})"
    dtype = np.dtype(f"u{dtype_of(result)(0).itemsize}").type
    yes, no = (code.const(np.asarray(dtype(x))) for x in (np.iinfo(dtype).max if ones is None else ones, 0))
    code.dst(i.args[0], f"u{np.dtype(dtype).itemsize * 8}", f"{code.helper(np.where)}({value},{yes},{no})")


def chosen_halves(condition: np.ndarray, one: int) -> np.ndarray:
    return np.where(condition, np.uint16(one), np.uint16(0)).view(np.uint32)


# Selections ----------------------------------------------------------------------------------------------------------
@rule("selp", f"b16 b32 b64 f32 f64 {INTEGERS}")
def _selp(code: Code, i: Instruction) -> None:
    operands(i, 4)
    allow(i, "")
    kind = i.type
    to, a, b, p = i.args
    x, y = source(code, a, kind), source(code, b, kind)
    condition = code.src(p, "pred")
    fits = isinstance(to, Reg) and to.cls == CLASS_OF_SIZE[dtype_of(kind)(0).itemsize]
    if code.mask != "None" or not fits or to == a:
        code.dst(to, kind, f"{code.helper(np.where)}({condition},{x},{y})")
        return
    # Two copies take two thirds of np.where's time.
    assert isinstance(to, Reg)
    if to != b:
        code.dst(to, kind, y)
    code.line(f"copyto({code.target(to, kind)},{x},where={condition})")


@generated("slct")
def _slct(code: Code, i: Instruction) -> None:
    """d = c >= 0 ? a : b; NaN selects b."""
    operands(i, 4)
    kinds = [m for m in i.mods if m in _COMPARED.split()]
    if len(kinds) != 2 or kinds[1] not in ("s32", "f32"):
        raise Unsupported(f"slct of types {kinds}: the second is s32 or f32")
    a, b = (source(code, x, kinds[0]) for x in i.args[1:3])
    # A flushed subnormal is a zero of either sign, and both select a.
    limit = "-1.1754943508222875e-38" if i.has("ftz") else "0"
    compare = ">" if i.has("ftz") else ">="
    code.dst(
        i.args[0], kinds[0], f"{code.helper(np.where)}({source(code, i.args[3], kinds[1])}{compare}{limit},{a},{b})"
    )


# No effect on results ------------------------------------------------------------------------------------------------
@generated("griddepcontrol", "applypriority", "discard", "pmevent", "prefetch", "prefetchu")
def _nothing(code: Code, i: Instruction) -> None:
    pass


@generated("createpolicy")
def _createpolicy(code: Code, i: Instruction) -> None:
    """A cache policy: any value, since caches are not modelled."""
    code.dst(i.args[0], "u64", code.const(np.asarray(np.uint64(0x12F0000000000000))))
