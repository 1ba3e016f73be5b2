"""The text of a wgmma.mma_async, and where its matrices lie in shared memory. PTX ISA 9.7.15.5."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from .. import layouts
from ..ir import Imm, Instruction, Reg, Vec
from ..operands import immediate, registers
from ..registry import Unsupported
from .tensor_core import ELEMENT_BYTES, shared_granules

if TYPE_CHECKING:
    from ..program import Program

_SHAPE = re.compile(r"m64n(\d+)k(\d+)")
_FP8 = ("e4m3", "e5m2")
_INTEGERS = ("s8", "u8")
# (kinds of A and B that go together, kinds of D)
_TYPES = (
    (("f16",), ("f16", "f32")),
    (("bf16",), ("f32",)),
    (("tf32",), ("f32",)),
    (_FP8, ("f16", "f32")),
    (_INTEGERS, ("s32",)),
)


class Operand:
    """A matrix in shared memory: which 16-byte pieces it consists of. `rows` counts M or N."""

    def __init__(self, descriptor: int, rows: int, k: int, size: int, mn_major: bool) -> None:
        decoded = layouts.decode_matrix_descriptor(descriptor, "wgmma")
        addresses = layouts.matrix_addresses(decoded, rows, k, size, mn_major)
        piece = 16 // size  # elements that are neighbours in every layout
        starts = addresses[::piece].T if mn_major else addresses[:, ::piece]
        self.index = np.ascontiguousarray(starts >> 4)  # [k, rows / piece], or [rows, k / piece]
        self.mn_major = mn_major
        self.first, self.last = int(starts.min()), int(starts.max()) + 16
        self._granules: dict[int, np.ndarray | slice] = {}

    def raw(self, memory: np.ndarray, dtype: type) -> np.ndarray:
        """Elements [k, rows] (MN-major) or [rows, k]. `memory` is uint64 [n, 2]."""
        return memory.take(self.index, axis=0).reshape(len(self.index), -1).view(dtype)

    def granules(self, shift: int) -> np.ndarray | slice:
        found = self._granules.get(shift)
        if found is None:
            found = self._granules[shift] = shared_granules(self.index, 16, shift)
        return found


operand_at = lru_cache(maxsize=4096)(Operand)


class Form:
    """What the text of a wgmma.mma_async says."""

    def __init__(self, i: Instruction) -> None:
        self.instruction = i
        modifiers = list(i.mods)
        match = next((m for m in (_SHAPE.fullmatch(s) for s in modifiers) if m), None)
        types = [m for m in modifiers if m in ELEMENT_BYTES or m in ("f32", "s32", "b1")]
        known = {"mma_async", "sync", "aligned", "satfinite", *types, match.group(0) if match else ""}
        if "sp" in modifiers:
            raise Unsupported("sparse wgmma is not modelled")
        if match is None or len(types) != 3 or not {"sync", "aligned"} <= set(modifiers) or not set(modifiers) <= known:
            raise Unsupported("the form is wgmma.mma_async.sync.aligned.m64nNkK{.satfinite}.dtype.atype.btype")
        self.n, self.k = int(match[1]), int(match[2])
        self.d_kind, self.a_kind, self.b_kind = types
        self.saturate = "satfinite" in modifiers
        self._check()
        self.size = ELEMENT_BYTES[self.a_kind]
        self._operands(i)
        self._bits: tuple[int, int] | None = None

    def _check(self) -> None:
        a, b, d = self.a_kind, self.b_kind, self.d_kind
        if not any(a in pair and b in pair and d in accumulators for pair, accumulators in _TYPES):
            raise Unsupported(f".{d}.{a}.{b}: no such wgmma, or not modelled")
        step = 16 if a in _INTEGERS and self.n > 32 else 8
        if not 8 <= self.n <= 256 or self.n % step:
            raise Unsupported(f"N = {self.n}; multiples of {step} up to 256 are allowed for .{a}")
        if self.k != 32 // ELEMENT_BYTES[a]:
            raise Unsupported(f"K = {self.k}; {32 // ELEMENT_BYTES[a]} is allowed for .{a}")
        if self.saturate and d != "s32":
            raise Unsupported(f".satfinite with .{d}; it is for .s32")

    def _operands(self, i: Instruction) -> None:
        """d, a or a-desc, b-desc, scale-d {, imm-scale-a, imm-scale-b {, imm-trans-a}, imm-trans-b}: 9.7.15.5.2."""
        self.d = registers(i.args[0])
        per_thread = self.n // (4 if self.d_kind == "f16" else 2)
        if len(self.d) != per_thread:
            raise Unsupported(f"D has {len(self.d)} registers; m64n{self.n} with .{self.d_kind} needs {per_thread}")
        self.a = registers(i.args[1]) if isinstance(i.args[1], Vec) else None
        if self.a is not None and len(self.a) != 4:
            raise Unsupported(f"A has {len(self.a)} registers; 4 are needed")
        self.a_descriptor = None if self.a is not None else self._descriptor(i.args[1])
        self.b_descriptor = self._descriptor(i.args[2])
        self.scale_d = i.args[3]
        if not isinstance(self.scale_d, (Imm, Reg)):
            raise Unsupported(f"scale-d: {self.scale_d!r}; a predicate or an immediate is needed")
        rest = [immediate(a, "an operand after scale-d") for a in i.args[4:]]
        scales = 0 if self.a_kind in _INTEGERS else 2
        transposes = 0 if self.size != 2 else 1 if self.a is not None else 2
        if len(rest) != scales + transposes:
            raise Unsupported(f"{len(rest)} immediates after scale-d; {scales + transposes} are needed")
        self.negative = [s == -1 for s in rest[:scales]] or [False, False]
        if any(s not in (1, -1) for s in rest[:scales]) or any(t not in (0, 1) for t in rest[scales:]):
            raise Unsupported(f"immediates {rest}: scales are 1 or -1, transposes 0 or 1")
        majors = [False] * (2 - transposes) + [t == 1 for t in rest[scales:]]
        self.a_mn, self.b_mn = majors
        # A slice where the accumulators are neighbours: numpy then adds in place.
        ascending = self.d == list(range(self.d[0], self.d[0] + len(self.d)))
        self.d_rows = slice(self.d[0], self.d[0] + len(self.d)) if ascending else self.d

    def _descriptor(self, operand: object) -> int:
        if not isinstance(operand, Reg) or operand.cls != "d":
            raise Unsupported(f"matrix descriptor {operand!r}: a 64-bit register is needed")
        return operand.index

    @property
    def accumulator(self) -> tuple:
        """What must be equal for two operations to follow each other on the same registers."""
        return self.n, self.k, self.d_kind, self.a_kind, self.b_kind

    def bits(self, program: Program) -> tuple[int, int]:
        """Register bits of D and of A."""
        if self._bits is None:
            i = self.instruction
            d = program.register_bits([Reg("w", r) for r in self.d])
            a = program.register_bits(list(i.args[1].items)) if isinstance(i.args[1], Vec) else 0
            self._bits = d, a
        return self._bits
