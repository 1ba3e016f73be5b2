"""Faults of order: a synchronisation one step too late, an arrival one step too early, two buffers exchanged.

Only within straight-line code, and only where no register is written in between that the moved instruction names.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..ir import Instruction, Kernel, Label, Mem, Reg, Targets
from ..program import destinations
from .drops import dropped_kind
from .edit import Mutation

_ACCESS_OPS = ("ld", "st", "ldmatrix", "stmatrix", "atom", "red")


def leaders(kernel: Kernel) -> set[int]:
    """Instructions that something jumps to."""
    found = {0}
    for i in kernel.instructions:
        for a in i.args:
            if isinstance(a, Label):
                found.add(a.target)
            elif isinstance(a, Targets):
                found.update(a.targets)
    return found


def straight(kernel: Kernel, n: int) -> Iterator[Instruction]:
    """What follows instruction n up to the next jump or label."""
    starts = leaders(kernel)
    for i in kernel.instructions[n + 1 :]:
        if i.index in starts or i.op in ("bra", "brx", "ret", "exit", "trap"):
            return
        yield i


def _signals(i: Instruction) -> bool:
    """It tells others, or lets an engine begin: what stands before it must be over."""
    if dropped_kind(i) in ("drop arrive", "drop commit", "drop dealloc"):
        return True
    if i.op == "tcgen05":
        return i.mods[0] in ("mma", "cp")
    return (i.op == "cp" and "bulk" in i.mods and len(i.args) > 1) or (i.op == "mbarrier" and i.mods[0] == "inval")


def _accesses(i: Instruction) -> bool:
    return i.op in _ACCESS_OPS and "param" not in i.mods


def late_waits(kernel: Kernel, i: Instruction) -> Iterator[Mutation]:
    """A wait or barrier stands after what it must precede: the next signal, or the next access to memory."""
    kind = dropped_kind(i)
    if "wait" not in kind and kind != "drop block barrier" or kind == "drop mbarrier wait":
        return
    named = {"signal": _signals, "access": _accesses}
    for what, test in named.items():
        later = next((x for x in straight(kernel, i.index) if test(x) or dropped_kind(x) == kind), None)
        if later is not None and test(later):
            name = ".".join((later.op, *later.mods[:2]))
            yield Mutation(
                "late wait", i.index, f"after the {what} {name} of line {later.line}",
                lambda e, n=later.index: e.move_after(i.index, n),
            )  # fmt: skip


def early_commits(kernel: Kernel, i: Instruction) -> Iterator[Mutation]:
    """A commit or arrival stands before the last operation that it is for."""
    own = (i.op == "tcgen05" and i.mods[0] in ("mma", "cp", "ld")) or (i.op == "wgmma" and i.mods[0] == "mma_async")
    own = own or (i.op == "cp" and len(i.args) > 1 and not any("mbarrier" in m for m in i.mods))
    if not own:
        return
    used = set(i.registers())
    for later in straight(kernel, i.index):
        if dropped_kind(later) == "drop commit" or (dropped_kind(later) == "drop arrive" and i.mods[0] == "ld"):
            yield Mutation(
                "early commit", i.index, f"the commit of line {later.line} comes first",
                lambda e, n=later.index: e.move_after(i.index, n),
            )  # fmt: skip
            return
        if later.op == i.op and later.mods[:1] == i.mods[:1]:
            return
        if {Reg(r.cls, r.index) for r in destinations(later)} & used:
            return


def swapped_buffers(kernel: Kernel, i: Instruction) -> Iterator[Mutation]:
    """Two neighbouring copies exchange their places in shared memory; a product exchanges A and B."""
    if i.op == "tcgen05" and i.mods[0] == "mma" and isinstance(i.args[1], Reg) and isinstance(i.args[2], Reg):
        args = (i.args[0], i.args[2], i.args[1], *i.args[3:])
        yield Mutation("swapped buffers", i.index, "A <-> B", lambda e: e.replace(i.index, args=args))
    if i.op == "wgmma" and i.mods[0] == "mma_async" and isinstance(i.args[1], Reg):
        args = (i.args[0], i.args[2], i.args[1], *i.args[3:])
        yield Mutation("swapped buffers", i.index, "A <-> B", lambda e: e.replace(i.index, args=args))
    if not (i.op == "cp" and "tensor" in i.mods):
        return
    place = 0 if isinstance(i.args[0], Mem) else 1
    for later in kernel.instructions[i.index + 1 :]:
        if later.name == i.name:
            mine, others = i.args[place], later.args[place]
            written = {r for x in kernel.instructions[i.index : later.index] for r in destinations(x)}
            if mine != others and not {others.base} & written:
                # The later copy's address is known here already; the earlier's is still there.
                def edit(e, mine=mine, others=others, n=later.index):
                    e.set(i.index, (place,), others)
                    e.set(n, (place,), mine)

                yield Mutation("swapped buffers", i.index, f"with the copy of line {later.line}", edit)
            return


RULES = (late_waits, early_commits, swapped_buffers)
