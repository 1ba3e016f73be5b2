"""A kernel made runnable: its steps, one for each straight-line run and one for each other instruction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .errors import UnknownInstructions
from .instruction_set import load_all
from .ir import Instruction, Kernel, Label, Mem, Pair, Reg, Targets, Vec
from .lower.code import Code
from .registry import BRANCH, EXIT, JUMP_TABLE, NORMAL, WAIT, SpecialEntry, Unsupported, find

# How builders fail on operands that are missing or of a wrong kind; the form is then refused like an unknown one.
_MALFORMED = (ArithmeticError, AttributeError, LookupError, StopIteration, TypeError, ValueError)
# A longer run is cut: what is generated stays small, and a warp gives way now and then.
LONGEST_RUN = 400
_STORES = ("st", "red", "stmatrix", "bar", "barrier", "mbarrier", "cp", "fence", "prefetch", "setmaxnreg", "wgmma")


@dataclass(slots=True, eq=False)
class Step:
    kind: str = NORMAL
    pred: Reg | None = None
    run: Callable[..., Any] | None = None  # straight-line code, all threads active
    run_masked: Callable[..., Any] | None = None
    special: Callable[..., Any] | None = None
    next: int = 0
    length: int = 1
    target: Any = None
    touches: int = 0  # registers named, a bit each
    writes: int = 0  # registers written
    owns_registers: bool = False
    aligned: bool = False  # all threads of the warp execute it together
    count: int = 0  # executions by a warp


class Program:
    """A lowered kernel. Masked forms of straight-line runs are generated when first needed."""

    def __init__(self, kernel: Kernel) -> None:
        load_all()
        self.kernel = kernel
        self.instructions = kernel.instructions
        self._base: dict[str, int] = {}
        total = 0
        for cls, n in kernel.register_counts.items():
            self._base[cls] = total
            total += n
        self.registers_of = [self.register_bits(i.registers()) for i in self.instructions]
        self.written_by = [self.register_bits(destinations(i)) for i in self.instructions]
        self.tracks_written = any(i.op == "wgmma" for i in self.instructions)
        self.steps: list[Step] = [None] * len(self.instructions)  # type: ignore[list-item]
        self._lower()

    def register_bit(self, reg: Reg) -> int:
        return 1 << (self._base[reg.cls] + reg.index)

    def register_bits(self, registers: list[Reg]) -> int:
        total = 0
        for r in registers:
            total |= self.register_bit(r)
        return total

    def _lower(self) -> None:
        missing: dict[str, str] = {}
        entries = []
        for i in self.instructions:
            entry = find(i)
            if entry is None and i.op not in ("bra", "brx", "ret", "exit"):
                missing.setdefault(i.name, i.where())
            entries.append(entry)
        if missing:
            # Forms of known opcodes that are refused are found by lowering: collect them as well.
            for i, entry in zip(self.instructions, entries, strict=True):
                self._try(i, entry, missing)
            raise UnknownInstructions(missing)
        leaders = self.kernel.leaders()
        start = None
        for i, entry in zip(self.instructions, entries, strict=True):
            straight = callable(entry)
            if start is not None and (not straight or i.index in leaders or i.index - start >= LONGEST_RUN):
                self._run(start, i.index, entries, missing)
                start = None
            if straight:
                start = i.index if start is None else start
            else:
                self._special(i, entry, missing)
        if start is not None:
            self._run(start, len(self.instructions), entries, missing)
        if missing:
            raise UnknownInstructions(missing)

    def _try(self, i: Instruction, entry: Any, missing: dict[str, str]) -> None:
        try:
            if isinstance(entry, SpecialEntry):
                entry.builder(self.kernel, i)
            elif entry is not None:
                code = Code(self.kernel, False)
                code.begin(i)
                entry(code, i)
        except Unsupported as reason:
            missing.setdefault(i.name, f"{i.where()} -- {reason}")
        except _MALFORMED as reason:
            missing.setdefault(i.name, f"{i.where()} -- operands ({type(reason).__name__}: {reason})")

    def _run(self, start: int, end: int, entries: list[Any], missing: dict[str, str]) -> None:
        step = Step(next=end, length=end - start)
        for n in range(start, end):
            step.touches |= self.registers_of[n]
            step.writes |= self.written_by[n]
        self.steps[start] = step
        try:
            step.run = self._generate(start, end, entries, False)
        except (Unsupported, *_MALFORMED, SyntaxError):
            for n in range(start, end):
                self._try(self.instructions[n], entries[n], missing)
            if not missing:
                raise
            return

        def masked(view: Any, mask: Any) -> None:
            step.run_masked = self._generate(start, end, entries, True)
            step.run_masked(view, mask)

        step.run_masked = masked

    def _generate(self, start: int, end: int, entries: list[Any], masked: bool) -> Any:
        code = Code(self.kernel, masked)
        for n in range(start, end):
            code.begin(self.instructions[n])
            entries[n](code, self.instructions[n])
        return code.build(
            f"<{self.kernel.name} lines {self.instructions[start].line}..{self.instructions[end - 1].line}>"
        )

    def _special(self, i: Instruction, entry: Any, missing: dict[str, str]) -> None:
        n = i.index
        step = Step(pred=i.pred, next=n + 1, touches=self.registers_of[n], writes=self.written_by[n])
        self.steps[n] = step
        if i.op == "bra":
            if len(i.args) != 1 or not isinstance(i.args[0], Label):
                missing.setdefault(i.name, f"{i.where()} -- one label is needed")
                return
            step.kind, step.target = BRANCH, i.args[0].target
        elif i.op in ("ret", "exit"):
            step.kind = EXIT
        elif i.op == "brx":
            register, table = i.args if len(i.args) == 2 else (None, None)
            if not isinstance(register, Reg) or register.cls != "w" or not isinstance(table, Targets) or i.pred:
                missing.setdefault(i.name, f"{i.where()} -- a 32-bit register and .branchtargets are needed, no guard")
                return
            step.kind, step.target = JUMP_TABLE, table.targets
            index = register.index
            step.special = lambda warp: warp.u32[index]
        else:
            step.kind, step.owns_registers = entry.kind, entry.owns_registers
            try:
                step.special, step.aligned = entry.builder(self.kernel, i), i.op == "bar" or i.has("aligned")
            except (Unsupported, *_MALFORMED):
                self._try(i, entry, missing)

    def reset_counts(self) -> None:
        for step in self.steps:
            if step is not None:
                step.count = 0


def destinations(i: Instruction) -> list[Reg]:
    """Registers that an instruction writes: the first operand, unless that is an address or nothing is written."""
    if not i.args or i.op in _STORES or (i.op in ("tcgen05",) and "ld" not in i.mods):
        return []
    stack, found = [i.args[0]], []
    while stack:
        a = stack.pop()
        if isinstance(a, Reg):
            found.append(a)
        elif isinstance(a, Vec):
            stack.extend(a.items)
        elif isinstance(a, Pair):
            stack.extend((a.first, a.second))
        elif isinstance(a, Mem):
            return []
    return found


__all__ = ["WAIT", "Program", "Step", "destinations"]
