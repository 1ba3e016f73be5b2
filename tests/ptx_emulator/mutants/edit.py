"""Changes to a parsed kernel: instructions replaced, moved, dropped or put in; everything else stays as it is.

Nothing here touches text: a changed kernel is a new `ir.Kernel` that shares the unchanged instructions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..ir import Imm, Instruction, Kernel, Label, Mem, Reg, Targets

_ADD = {"w": ("add", ("s32",)), "d": ("add", ("s64",)), "h": ("add", ("s16",))}
_XOR = {"w": ("xor", ("b32",)), "d": ("xor", ("b64",)), "h": ("xor", ("b16",))}
Edit = Callable[["Editor"], None]


@dataclass(frozen=True)
class Mutation:
    """A single fault. `kind` names it in the table, `index` is the instruction of the unchanged kernel it is put at."""

    kind: str
    index: int
    what: str  # the fault in words, "" where the kind says it all
    edit: Edit
    field: tuple[int, int, int] = (0, 0, 0)  # of a wrong descriptor: operand, what is added, bits flipped

    def apply(self, kernel: Kernel) -> Kernel:
        editor = Editor(kernel)
        self.edit(editor)
        return editor.build()


def dropping(n: int) -> Edit:
    return lambda editor: editor.drop(n)


def changing(n: int, path: Sequence[int], add: int = 0, flip: int = 0) -> Edit:
    return lambda editor: editor.change(n, path, add, flip)


def setting(n: int, path: Sequence[int], operand: object) -> Edit:
    return lambda editor: editor.set(n, path, operand)


def replacing(n: int, **changes: Any) -> Edit:
    return lambda editor: editor.replace(n, **changes)


def moving(n: int, place: int) -> Edit:
    return lambda editor: editor.move_after(n, place)


class Editor:
    """Collects changes by index of the unchanged kernel; `build` makes the new kernel."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.counts = dict(kernel.register_counts)
        self.before: dict[int, list[Instruction]] = {}
        self.after: dict[int, list[Instruction]] = {}
        self.replaced: dict[int, Instruction] = {}

    def fresh(self, cls: str) -> Reg:
        """A register that nothing else names."""
        self.counts[cls] += 1
        return Reg(cls, self.counts[cls] - 1)

    def replace(self, n: int, **changes: Any) -> None:
        self.replaced[n] = dataclasses.replace(self.replaced.get(n, self.kernel.instructions[n]), **changes)

    def drop(self, n: int) -> None:
        """In its place stands a move that nobody reads; a wait for a predicate is answered at once."""
        i = self.kernel.instructions[n]
        if i.args and isinstance(i.args[0], Reg) and i.args[0].cls == "p":
            self.replace(n, op="setp", mods=("eq", "u32"), args=(i.args[0], Imm(0), Imm(0)))
        else:
            self.replace(n, op="mov", mods=("b32",), pred=None, args=(self.fresh("w"), Imm(0)))

    def move_after(self, n: int, place: int) -> None:
        """Instruction n is executed right after `place`."""
        self.after.setdefault(place, []).append(self.kernel.instructions[n])
        self.drop(n)

    def insert(self, n: int, op: str, mods: tuple[str, ...], args: tuple) -> None:
        """Before instruction n, for the same threads."""
        old = self.kernel.instructions[n]
        made = dataclasses.replace(old, op=op, mods=mods, pred=None, args=args, text=f"(put in) {op}")
        self.before.setdefault(n, []).append(made)

    def build(self) -> Kernel:
        old = self.kernel.instructions
        if not self.before and not self.after:
            # Unshifted: unchanged instructions are shared.
            instructions = [self.replaced.get(n, i) for n, i in enumerate(old)]
            return dataclasses.replace(self.kernel, instructions=instructions, register_counts=self.counts)
        places: list[int] = []
        flat: list[Instruction] = []
        for n, i in enumerate(old):
            places.append(len(flat))
            flat += [*self.before.get(n, ()), self.replaced.get(n, i), *self.after.get(n, ())]
        places.append(len(flat))
        moved = [
            dataclasses.replace(i, index=at, args=tuple(_retarget(a, places) for a in i.args))
            for at, i in enumerate(flat)
        ]
        labels = {name: places[target] for name, target in self.kernel.labels.items() if target >= 0}
        return dataclasses.replace(self.kernel, instructions=moved, register_counts=self.counts, labels=labels)

    # Operands ---------------------------------------------------------------------------------------------------------
    def change(self, n: int, path: Sequence[int], add: int = 0, flip: int = 0) -> None:
        """Operand at `path` (indices into args, then into vectors and brackets) plus `add`, or with bits flipped."""
        i = self.replaced.get(n, self.kernel.instructions[n])
        operand = operand_at(i.args, path)
        self.replace(n, args=_put(i.args, path, self._changed(n, operand, add, flip)))

    def set(self, n: int, path: Sequence[int], operand: object) -> None:
        i = self.replaced.get(n, self.kernel.instructions[n])
        self.replace(n, args=_put(i.args, path, operand))

    def _changed(self, n: int, operand: Any, add: int, flip: int) -> object:
        if isinstance(operand, Imm):
            return Imm((operand.value + add) ^ flip, operand.bits)
        if isinstance(operand, Mem):
            if not flip and not isinstance(operand.base, Imm):
                if isinstance(operand.base, Reg):
                    return Mem(operand.base, operand.offset + add)
                base = operand.base
                assert dataclasses.is_dataclass(base) and not isinstance(base, type)
                return Mem(dataclasses.replace(base, offset=base.offset + add))  # type: ignore[attr-defined]
            return Mem(self._changed(n, operand.base, add, flip), operand.offset)
        if isinstance(operand, Reg) and operand.cls == "p":
            return Reg("p", operand.index, not operand.negated)
        assert isinstance(operand, Reg), operand
        fresh = self.fresh(operand.cls)
        op, mods = (_XOR if flip else _ADD)[operand.cls]
        self.insert(n, op, mods, (fresh, operand, Imm(flip or add)))
        return fresh


def _retarget(a: object, places: list[int]) -> object:
    if isinstance(a, Label):
        return Label(a.name, places[a.target])
    if isinstance(a, Targets):
        return Targets(tuple(places[t] for t in a.targets))
    return a


def _parts(a: Any) -> tuple | None:
    """What a compound operand consists of, in order."""
    if hasattr(a, "items"):
        return a.items
    if hasattr(a, "parts"):
        return (a.base, *a.parts)
    return None


def operand_at(args: tuple, path: Sequence[int]) -> Any:
    found: Any = args[path[0]]
    for step in path[1:]:
        parts = _parts(found)
        assert parts is not None, found
        found = parts[step]
    return found


def _put(args: tuple, path: Sequence[int], operand: object) -> tuple:
    return tuple(_put_in(a, path[1:], operand) if k == path[0] else a for k, a in enumerate(args))


def _put_in(a: Any, path: Sequence[int], operand: object) -> Any:
    if not path:
        return operand
    parts = list(_parts(a) or ())
    parts[path[0]] = _put_in(parts[path[0]], path[1:], operand)
    if hasattr(a, "items"):
        return dataclasses.replace(a, items=tuple(parts))
    return dataclasses.replace(a, base=parts[0], parts=tuple(parts[1:]))
