"""Who gives an instruction its meaning, found by the longest dotted prefix of its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from .ir import Instruction, Kernel
    from .lower.code import Code

NORMAL = "normal"  # fn(warp, mask) -> None
WAIT = "wait"  # fn(warp, mask) -> bool: False = the warp stays at this instruction
BRANCH = "branch"
JUMP_TABLE = "jump"
EXIT = "exit"

Generator = Callable[["Code", "Instruction"], None]
Builder = Callable[["Kernel", "Instruction"], Callable[..., Any]]


class SpecialEntry(NamedTuple):
    builder: Builder
    kind: str
    owns_registers: bool  # it may name registers that an engine owns (waits, chained wgmma)


class Unsupported(Exception):
    """A form of a known opcode that has no meaning here; reported like an unknown opcode, with this reason."""


_generated: dict[str, Generator] = {}
_special: dict[str, SpecialEntry] = {}


def generated(*names: str) -> Callable[[Generator], Generator]:
    """Registers a code generator for instructions whose name starts with one of `names` (whole dotted parts)."""

    def register(function: Generator) -> Generator:
        for name in names:
            assert name not in _generated and name not in _special, name
            _generated[name] = function
        return function

    return register


def special(*names: str, kind: str = NORMAL, owns_registers: bool = False) -> Callable[[Builder], Builder]:
    """Registers a closure builder. `kind` says how the executor uses the closure's result."""

    def register(function: Builder) -> Builder:
        for name in names:
            assert name not in _generated and name not in _special, name
            _special[name] = SpecialEntry(function, kind, owns_registers)
        return function

    return register


def find(instruction: Instruction) -> Generator | SpecialEntry | None:
    """The entry of the longest prefix: `ld.shared` before `ld`."""
    parts = (instruction.op, *instruction.mods)
    for n in range(len(parts), 0, -1):
        name = ".".join(parts[:n])
        entry = _special.get(name) or _generated.get(name)
        if entry is not None:
            return entry
    return None


def names() -> list[str]:
    """Every registered prefix, for the coverage listing."""
    return sorted((*_generated, *_special))
