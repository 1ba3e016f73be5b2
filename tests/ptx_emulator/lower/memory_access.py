"""ld, st and their kin: state space, vector width, order and extension from the modifiers. PTX ISA 9.7.9."""

from __future__ import annotations

import numpy as np

from .. import access
from ..ir import SIZES, Address, Instruction, Mem, Reg, Sink, Vec
from ..registry import Unsupported, generated
from ..warp import DTYPES
from .code import CLASS_BITS, Code, view_type

_SPACES = ("global", "shared::cluster", "shared::cta", "shared", "local", "const", "param")
_ORDERS = ("relaxed", "acquire", "release", "acq_rel", "volatile", "mmio")


def space_of(i: Instruction) -> str:
    """ "" for generic; param without ::func is the kernel's parameters."""
    for m in i.mods:
        if m in _SPACES:
            return "shared" if m == "shared::cta" else m
        if m in ("param::entry", "param::func"):
            return "param"
    return ""


def order_of(i: Instruction) -> str:
    found = next((m for m in i.mods if m in _ORDERS), "")
    return "relaxed" if found in ("volatile", "mmio") else found


def count_of(i: Instruction) -> int:
    return next((int(m[1:]) for m in i.mods if m in ("v2", "v4", "v8")), 1)


def make_spec(i: Instruction, write: bool) -> access.Spec:
    kind = i.type
    if kind not in SIZES:
        raise Unsupported(f"type .{kind}")
    size, count = SIZES[kind], count_of(i)
    if kind == "b128":
        size, count = 8, 2 * count
    return access.Spec(i, space_of(i), size, count, write, order_of(i))


def _elements(operand: object, count: int) -> tuple:
    """The registers of a load or store, as many as its vector modifier says."""
    found = operand.items if isinstance(operand, Vec) else (operand,)
    if len(found) != count:
        raise Unsupported(f"{len(found)} operand(s) where {count} are moved")
    return found


def _parameter(code: Code, i: Instruction, memory: Mem) -> None:
    """ld.param of a kernel's parameter: the same value for all threads."""
    assert isinstance(memory.base, Address)
    kind = i.type
    size = SIZES[kind]
    at = memory.base.offset + memory.offset
    total = size * len(_elements(i.args[0], count_of(i)))
    if at < 0 or at + total > code.kernel.param_bytes or at % total:
        raise Unsupported(f"parameter bytes {at}..{at + total - 1} of {code.kernel.param_bytes}, or misaligned")
    for k, register in enumerate(_elements(i.args[0], count_of(i))):
        value = f"v.cta.launch.params.views[{size}][{(at + k * size) // size}]"
        code.dst(register, kind, _as(code, value, kind, size))


def _as(code: Code, raw: str, kind: str, size: int) -> str:
    """Raw unsigned bits as the dtype of the type (bytes widen to 16 bits)."""
    want = view_type(kind)
    if size == 1:
        return (
            f"{raw}.view({code.helper(np.int8)}).astype({code.helper(np.int16)})"
            if kind == "s8"
            else (f"{raw}.astype({code.helper(np.uint16)})")
        )
    if want[0] == "u":
        return raw
    return f"{raw}.view({code.helper(DTYPES[want])})"


@generated("ld", "ldu")
def load(code: Code, i: Instruction) -> None:
    memory = i.args[1]
    space = space_of(i)
    if (
        space == "param"
        and isinstance(memory, Mem)
        and isinstance(memory.base, Address)
        and memory.base.space == "param"
    ):
        _parameter(code, i, memory)
        return
    spec = make_spec(i, False)
    if space == "param":
        # Arguments of an inlined call are the caller's local variables.
        spec.space = "local" if isinstance(memory, Mem) and isinstance(memory.base, Address) else "param"
    kind = "b64" if i.type == "b128" else i.type
    address = code.address(memory)
    empty = f"{code.mask} is not None and not {code.mask}.any()"
    raw = code.temp(f"None if {empty} else {code.helper(access.load)}(v,{code.mask},{code.helper(spec)},{address})")
    code.line(f"if {raw} is not None:")
    body = code.lines
    start = len(body)
    registers = _elements(i.args[0], count_of(i))
    if i.type == "b128":
        for k, register in enumerate(registers):
            array = code.target(register, "b128")
            rows = "..." if code.mask == "None" else code.mask
            code.line(f"{array}[{rows}]={raw}[:,{2 * k}:{2 * k + 2}]")
    else:
        for k, register in enumerate(registers):
            if isinstance(register, Sink):
                continue
            column = raw if spec.count == 1 else f"{raw}[:,{k}]"
            _assign(code, register, kind, _as(code, column, kind, spec.size))
    body[start:] = [" " + line for line in body[start:]] or [" pass"]


def _assign(code: Code, register: Reg, kind: str, expression: str) -> None:
    """Assigns values of the active threads only (already compressed by the mask)."""
    if code.mask == "None":
        code.dst(register, kind, expression)
        return
    want = view_type(kind)
    bits = CLASS_BITS[register.cls]
    if int(want[1:]) != bits:
        if want[0] == "f":
            expression = f"({expression}).view({code.helper(DTYPES['u' + want[1:]])})"
        want = ("s" if want[0] == "s" else "u") + str(bits)
    code.line(f"{code.target(register, want)}[{code.mask}]={expression}")


@generated("st")
def store(code: Code, i: Instruction) -> None:
    memory = i.args[0]
    spec = make_spec(i, True)
    if space_of(i) == "param":
        spec.space = "local"
    if i.type == "b128":
        values = [f"{code.src(r, 'b128')}[:,{half}]" for r in _elements(i.args[1], count_of(i)) for half in (0, 1)]
    else:
        raw = f"u{max(16, 8 * spec.size)}"
        values = [code.src(r, raw) for r in _elements(i.args[1], count_of(i))]
        if spec.size == 1:
            values = [f"{value}.astype({code.helper(np.uint8)})" for value in values]
    call = f"{code.helper(access.store)}(v,{code.mask},{code.helper(spec)},{code.address(memory)},[{','.join(values)}])"
    code.line(call if code.mask == "None" else f"if {code.mask}.any(): {call}")
