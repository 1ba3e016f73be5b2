"""Choice of a generator by the type of an instruction, and the operand forms that register-only instructions share."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..ir import Imm, Instruction, Reg
from ..registry import Generator, Unsupported, generated
from ..warp import DTYPES
from .code import Code, view_type

UNSIGNED = "u16 u32 u64"
SIGNED = "s16 s32 s64"
INTEGERS = f"{UNSIGNED} {SIGNED}"
BITS = "b16 b32 b64"

_rules: dict[str, dict[str, Generator]] = {}


def rule(ops: str, types: str) -> Callable[[Generator], Generator]:
    """Registers a generator for `ops` whose last type modifier is one of `types`; both are separated by blanks."""

    def register(function: Generator) -> Generator:
        for op in ops.split():
            if op not in _rules:
                _rules[op] = {}
                generated(op)(_dispatch)
            for kind in types.split():
                assert kind not in _rules[op], (op, kind)
                _rules[op][kind] = function
        return function

    return register


def _dispatch(code: Code, i: Instruction) -> None:
    table = _rules[i.op]
    function = table.get(i.type)
    if function is None:
        raise Unsupported(f"type {i.type or 'none'!r} of {i.op}: one of {', '.join(table)}")
    function(code, i)


def allow(i: Instruction, modifiers: str) -> None:
    """Refuses modifiers besides `modifiers` (separated by blanks) and the type."""
    allowed = modifiers.split()
    for m in i.mods:
        if m not in allowed and m != i.type:
            raise Unsupported(f"modifier .{m} of {i.op}: allowed here are {', '.join((*allowed, i.type))}")


def chosen(i: Instruction, options: str, default: str = "") -> str:
    """The one modifier out of `options` (separated by blanks)."""
    found = [m for m in i.mods if m in options.split()]
    if len(found) > 1 or not (found or default):
        raise Unsupported(f"{i.op} needs one of .{options.replace(' ', ', .')}; it has {found or 'none'}")
    return found[0] if found else default


def operands(i: Instruction, *counts: int) -> None:
    if len(i.args) not in counts:
        raise Unsupported(f"{i.op} with {len(i.args)} operands: {' or '.join(map(str, counts))} are supported")


def dtype_of(kind: str) -> type:
    return DTYPES[view_type(kind)]


def source(code: Code, operand: object, kind: str) -> str:
    """`code.src`, with a constant as an array of no dimension: ufuncs take those twice as fast as numpy scalars."""
    text = code.src(operand, kind)
    return code.const(np.asarray(code.names[text])) if isinstance(operand, Imm) and kind != "pred" else text


def sources(code: Code, items: tuple, kind: str) -> list[str]:
    """Source operands, at least one of them an array of all threads."""
    texts = [source(code, operand, kind) for operand in items]
    if all(isinstance(operand, Imm) for operand in items):
        texts[0] = f"np.full(v.width,{texts[0]})"
    return texts


def emit(code: Code, ufunc: str, operand: object, kind: str, *texts: str) -> None:
    """`code.ufunc` that also writes predicates in place."""
    if isinstance(operand, Reg) and operand.cls == "p":
        where = "" if code.mask == "None" else f",where={code.mask}"
        code.line(f"{code.helper(getattr(np, ufunc))}({','.join(texts)},out={code.target(operand, 'pred')}{where})")
    else:
        code.ufunc(ufunc, operand, kind, *texts)


def call(code: Code, function: Callable, *texts: object) -> str:
    """Text of a call of a helper function."""
    return f"{code.helper(function)}({','.join(map(str, texts))})"


def has_nan(x: np.ndarray) -> bool:
    """Any NaN in float32 values? A sum of squares is NaN then and only then, and takes a third of isnan().any()."""
    total = x.dot(x)
    return bool(total != total)
