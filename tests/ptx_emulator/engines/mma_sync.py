"""mma.sync: one warp multiplies a small matrix held in registers. PTX ISA 9.7.14.5.14.

    D [M, N] = A [M, K] * B [K, N] + C [M, N]

Each matrix is spread over the warp's registers (layouts.mma_fragments). The instruction touches registers only, so it
is straight-line code: four warps in step multiply at once, as a stack of matrices.

Products are exact in float32 and summed by numpy in float32; hardware sums in an order, and for 8-bit elements with
fewer bits, that nobody states. Integer-valued inputs give the same bits on both.

Block scaling (.block_scale, sm_120a): PTX ISA 9.7.14.3. Not here: sparse forms, 1- and 4-bit integers, m8n8k4 of f16.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from .. import formats, layouts
from ..errors import DescriptorError
from ..ir import Imm, Instruction, Reg, Vec
from ..layouts import Fragment
from ..operands import registers
from ..registry import Unsupported, generated
from ..warp import WARP
from .tensor_core import ELEMENT_BYTES, UNSIGNED, accumulate, values, whole_warps

if TYPE_CHECKING:
    from ..lower.code import Code
    from ..warp import View

_SHAPE = re.compile(r"m(\d+)n(\d+)k(\d+)")
_TYPES = frozenset((*ELEMENT_BYTES, "f32", "s32", "s4", "u4", "b1", "ue8m0", "ue4m3"))
_FP8 = ("e4m3", "e5m2")
_NARROW = ("e4m3", "e5m2", "e3m2", "e2m3", "e2m1")
# Elements of A and B that go together, their shapes, and the accumulators.
_FORMS: tuple[tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]], ...] = (
    (("f16",), ("m16n8k8", "m16n8k16"), ("f16", "f32")),
    (("bf16",), ("m16n8k8", "m16n8k16"), ("f32",)),
    (("tf32",), ("m16n8k4", "m16n8k8"), ("f32",)),
    (("f64",), ("m8n8k4", "m16n8k4", "m16n8k8", "m16n8k16"), ("f64",)),
    (("s8", "u8"), ("m8n8k16", "m16n8k16", "m16n8k32"), ("s32",)),
    (_FP8, ("m16n8k16", "m16n8k32"), ("f16", "f32")),
)
_SCALES = {  # kind -> (elements, shape, {scales along K: scale types})
    "mxf8f6f4": (_NARROW, "m16n8k32", {1: ("ue8m0",)}),
    "mxf4": (("e2m1",), "m16n8k64", {2: ("ue8m0",)}),
    "mxf4nvf4": (("e2m1",), "m16n8k64", {2: ("ue8m0",), 4: ("ue4m3",)}),
}
_BYTE_IDS = {1: (0, 1, 2, 3), 2: (0, 2), 4: (0,)}


@dataclass(frozen=True)
class Form:
    """What the name of an mma.sync says. `scales` is the number of scales along K, 0 without block scaling."""

    m: int
    n: int
    k: int
    a: str
    b: str
    d: str
    saturate: bool
    scales: int
    scale_kind: str

    @property
    def shape(self) -> str:
        return f"m{self.m}n{self.n}k{self.k}"

    @property
    def packed(self) -> bool:
        """Two e2m1 elements in a byte."""
        return self.k == 64


def parse_form(i: Instruction) -> Form:
    """Raises `Unsupported` for a combination that does not exist or is not modelled, and says what is allowed."""
    shape, kind, scales, block_scale = "", "", 0, False
    order: list[str] = []
    types: list[str] = []
    for modifier in i.mods:
        if _SHAPE.fullmatch(modifier):
            shape = modifier
        elif modifier in ("row", "col"):
            order.append(modifier)
        elif modifier in _TYPES:
            types.append(modifier)
        elif modifier.startswith("kind::"):
            kind = modifier[6:]
        elif modifier == "block_scale":
            block_scale = True
        elif modifier.startswith("scale_vec::"):
            scales = int(modifier[11:-1])
        elif modifier in ("sp", "sp::ordered_metadata"):
            raise Unsupported("sparse matrices are not modelled")
        elif modifier not in ("sync", "aligned", "satfinite", "rn"):
            raise Unsupported(f"modifier .{modifier} of mma is not modelled")
    if "sync" not in i.mods or "aligned" not in i.mods:
        raise Unsupported("mma without .sync.aligned")
    if order != ["row", "col"]:
        raise Unsupported(f"layouts .{'.'.join(order)}; .row.col is modelled")
    if len(types) != (5 if block_scale else 4):
        raise Unsupported(
            f"types .{'.'.join(types)}; those of D, A, B and C are needed, of the scales with .block_scale"
        )
    d, a, b, c = types[:4]
    if d != c:
        raise Unsupported(f"D is .{d} and C is .{c}; they must be the same")
    if block_scale:
        scales = scales or {"mxf8f6f4": 1, "mxf4": 2}.get(kind, 0)
        _check_scaled(shape, kind, a, b, d, scales, types[4])
    elif kind:
        if kind != "f8f6f4" or shape != "m16n8k32" or not {a, b} <= set(_NARROW) or d not in ("f16", "f32"):
            raise Unsupported(f".{shape}.kind::{kind}.{d}.{a}.{b}; m16n8k32.kind::f8f6f4 with f16 or f32 is modelled")
    else:
        _check_plain(shape, a, b, d)
    if "satfinite" in i.mods and d != "s32":
        raise Unsupported(f".satfinite with .{d}; it is for .s32")
    match = _SHAPE.fullmatch(shape)
    assert match is not None
    m, n, k = (int(part) for part in match.groups())
    return Form(m, n, k, a, b, d, "satfinite" in i.mods, scales, types[4] if block_scale else "")


def _check_plain(shape: str, a: str, b: str, d: str) -> None:
    for elements, shapes, accumulators in _FORMS:
        if a in elements and b in elements:
            if shape in shapes and d in accumulators:
                return
            raise Unsupported(
                f".{shape} with .{d} for .{a} times .{b}; allowed: {', '.join(shapes)} with {accumulators}"
            )
    raise Unsupported(f".{a} times .{b} is not modelled")


def _check_scaled(shape: str, kind: str, a: str, b: str, d: str, scales: int, scale_kind: str) -> None:
    if kind not in _SCALES:
        raise Unsupported(f"kind::{kind} with .block_scale; allowed: {', '.join(_SCALES)}")
    elements, wanted, allowed = _SCALES[kind]
    if shape != wanted or a not in elements or b not in elements or d != "f32":
        raise Unsupported(f".{shape}.{d}.{a}.{b} of kind::{kind}; allowed: {wanted}.f32 with {elements}")
    if scale_kind not in allowed.get(scales, ()):
        raise Unsupported(f"scale_vec::{scales}X with .{scale_kind} of kind::{kind}; allowed: {allowed}")


# Registers <-> matrices ----------------------------------------------------------------------------------------------
def _packed_fragments() -> tuple[Fragment, Fragment]:
    """A and B of m16n8k64: eight 4-bit elements to a register, the first in the low bits (PTX ISA 9.7.14.5.11)."""
    register, sub, thread = np.indices((4, 8, WARP))
    a = Fragment(thread // 4 + 8 * (register % 2), 8 * (thread % 4) + sub + 32 * (register // 2))
    register, sub, thread = np.indices((2, 8, WARP))
    return a, Fragment(8 * (thread % 4) + sub + 32 * register, thread // 4)


def _fragment(form: Form, operand: str) -> tuple[Fragment, int]:
    """(coordinates [registers, subs, 32], columns of the matrix) of operand "a", "b" or "d"."""
    width = {"a": form.k, "b": form.n, "d": form.n}[operand]
    if form.packed:
        if operand != "d":
            return _packed_fragments()[operand == "b"], width
        return layouts.mma_fragments("m16n8k32", 1).c, width
    size = ELEMENT_BYTES[form.a]
    accumulator = {"f16": 2, "f64": 8}.get(form.d, 4)
    fragments = layouts.mma_fragments(form.shape, size, accumulator)
    return {"a": fragments.a, "b": fragments.b, "d": fragments.c}[operand], width


@lru_cache(maxsize=256)
def _gather_index(form: Form, operand: str, warps: int) -> np.ndarray:
    """[warps, rows, columns]: where a matrix element is among the raw elements [registers, warps * 32, subs]."""
    (row, column), width = _fragment(form, operand)
    subs = row.shape[1]
    register, sub, thread = np.indices(row.shape)
    place = np.empty((warps, int(row.max()) + 1, width), np.int64)
    for w in range(warps):
        place[w, row, column] = (register * warps * WARP + w * WARP + thread) * subs + sub
    return place


@lru_cache(maxsize=64)
def _scatter_index(form: Form, warps: int) -> np.ndarray:
    """[registers, warps * 32, subs]: which element of D [warps, M, N] a register holds."""
    (row, column), width = _fragment(form, "d")
    one = (row * width + column).transpose(0, 2, 1)
    return np.concatenate([one + w * form.m * form.n for w in range(warps)], axis=1)


def _load(view: View, form: Form, operand: str, rows: list[int]) -> np.ndarray:
    """Matrices of an operand, float32 or float64 [warps, rows, columns]."""
    kind = form.a if operand == "a" else form.b
    index = _gather_index(form, operand, view.width // WARP)
    if kind == "f64":
        return view.file("d")[rows].view(np.float64).take(index)
    raw = view.file("w")[rows]
    if form.packed:
        both = raw.view(np.uint8)
        # 4-bit elements become bytes with the element in bits 2..5, as values() reads e2m1.
        raw = np.stack([both << 2 & 0x3C, both >> 2 & 0x3C], axis=-1)
    else:
        raw = raw.view(UNSIGNED[ELEMENT_BYTES[kind]])
    return values(raw.take(index), kind)


def _scale(view: View, form: Form, operand: str, register: int, byte: int, thread: int) -> np.ndarray:
    """Factors of A [warps, M, K] or B [warps, K, N].

    A row of A takes its scales from lane 4 (row % 8) + 2 thread-id + row / 8, a column of B from lane
    4 column + thread-id; scale s of a lane is byte `byte` + s (PTX ISA 9.7.14.3).
    """
    if operand == "a":
        row = np.arange(form.m)
        lane = 4 * (row % 8) + 2 * thread + row // 8
    else:
        lane = 4 * np.arange(form.n) + thread
    data = np.ascontiguousarray(view.file("w")[register]).view(np.uint8).reshape(-1, WARP, 4)
    codes = data[:, lane, byte : byte + form.scales]
    # The sign of a ue4m3 is not looked at.
    factors = formats.ue8m0_to_f32(codes) if form.scale_kind == "ue8m0" else formats.decode(codes & 0x7F, "e4m3")
    spread = np.repeat(factors, form.k // form.scales, axis=2)
    return spread if operand == "a" else spread.transpose(0, 2, 1)


class _Selector:
    """{byte-id, thread-id} of a scale operand: immediates or 16-bit registers, the same in the whole warp."""

    def __init__(self, i: Instruction, data: object, pair: object, form: Form, operand: str) -> None:
        if not isinstance(data, Reg) or not isinstance(pair, Vec) or len(pair.items) != 2:
            raise Unsupported(f"scale operands of {operand.upper()}: a register and {{byte-id, thread-id}} are needed")
        self.instruction = i
        self.operand = operand
        self.register = data.index
        self.items = pair.items
        self.allowed = (_BYTE_IDS[form.scales], (0, 1) if operand == "a" else (0, 1, 2, 3))

    def read(self, view: View) -> tuple[int, int]:
        found = []
        for name, item, allowed in zip(("byte-id", "thread-id"), self.items, self.allowed, strict=True):
            if isinstance(item, Imm):
                choice = {item.value}
            else:
                (register,) = registers(item)
                choice = set(view.file(item.cls)[register].tolist())
            value = choice.pop()
            if choice or value not in allowed:
                view.cta.report(
                    DescriptorError,
                    f"{name}-{self.operand} is {sorted({value, *choice})}; one of {allowed} in all threads is allowed\n"
                    f"  {self.instruction.where()}",
                )
                value = allowed[0]
            found.append(value)
        return found[0], found[1]


# The instruction ------------------------------------------------------------------------------------------------------
def _operand_registers(form: Form, operand: str, argument: object) -> list[int]:
    fragment, _ = _fragment(form, operand)
    rows = registers(argument)
    if len(rows) != fragment.row.shape[0]:
        raise Unsupported(f"operand {operand}: {len(rows)} registers; {fragment.row.shape[0]} are needed")
    return rows


def build(i: Instruction) -> Callable[[View, np.ndarray | None], None]:
    """The instruction as `run(view, mask)`."""
    form = parse_form(i)
    if len(i.args) != (8 if form.scales else 4):
        raise Unsupported(
            f"{len(i.args)} operands; d, a, b, c are needed, and with .block_scale the four of the scales"
        )
    a, b = _operand_registers(form, "a", i.args[1]), _operand_registers(form, "b", i.args[2])
    c, d = _operand_registers(form, "d", i.args[3]), _operand_registers(form, "d", i.args[0])
    selectors = (
        (_Selector(i, i.args[4], i.args[5], form, "a"), _Selector(i, i.args[6], i.args[7], form, "b"))
        if form.scales
        else None
    )
    file = "d" if form.d == "f64" else "w"
    dtype = {"f32": np.float32, "f64": np.float64, "f16": np.float16, "s32": np.int32}[form.d]

    def multiply(view: View) -> None:
        left, right = _load(view, form, "a", a), _load(view, form, "b", b)
        with np.errstate(all="ignore"):
            if selectors is not None:
                left = left * _scale(view, form, "a", selectors[0].register, *selectors[0].read(view))
                right = right * _scale(view, form, "b", selectors[1].register, *selectors[1].read(view))
            product = left @ right
        index = _scatter_index(form, view.width // WARP)
        rows = view.file(file)
        old = rows[c].view(dtype).reshape(index.shape)
        rows[d] = accumulate(product.take(index), old, form.d, form.saturate).reshape(len(d), -1).view(rows.dtype)

    def run(view: View, mask: np.ndarray | None) -> None:
        for part in whole_warps(view, mask, i):
            multiply(part)

    return run


@generated("mma")
def mma(code: Code, i: Instruction) -> None:
    code.line(f"{code.helper(build(i))}(v,{code.mask})")
