"""Faults of order: a synchronisation one step too late, an arrival one step too early, two buffers exchanged.

Only within straight-line code, and only where no register is written in between that the moved instruction names.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..ir import Instruction, Kernel, Mem, Reg
from ..program import destinations
from .drops import dropped_kind
from .edit import Edit, Editor, Mutation, moving, replacing

_ACCESS_OPS = ("ld", "st", "ldmatrix", "stmatrix", "atom", "red")


def straight(kernel: Kernel, n: int) -> Iterator[Instruction]:
    """What follows instruction n up to the next jump or label."""
    starts = kernel.leaders()
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
    if kind == "drop mbarrier wait" or ("wait" not in kind and kind != "drop block barrier"):
        return
    for what, test in (("signal", _signals), ("access", _accesses)):
        later = next((x for x in straight(kernel, i.index) if test(x) or dropped_kind(x) == kind), None)
        if later is not None and test(later):
            name = ".".join((later.op, *later.mods[:2]))
            edit = moving(i.index, later.index)
            yield Mutation("late wait", i.index, f"after the {what} {name} of line {later.line}", edit)


def early_commits(kernel: Kernel, i: Instruction) -> Iterator[Mutation]:
    """A commit or arrival stands before the last operation that it is for."""
    reads = i.op == "tcgen05" and i.mods[0] == "ld"
    product = (i.op == "tcgen05" and i.mods[0] in ("mma", "cp")) or (i.op == "wgmma" and i.mods[0] == "mma_async")
    copy = i.op == "cp" and len(i.args) > 1 and not any("mbarrier" in m for m in i.mods)
    if not (reads or product or copy):
        return
    used = set(i.registers())
    for later in straight(kernel, i.index):
        kind = dropped_kind(later)
        if kind == "drop commit" or (kind == "drop arrive" and reads):
            what = f"the commit of line {later.line} comes first"
            yield Mutation("early commit", i.index, what, moving(i.index, later.index))
            return
        if (later.op == i.op and later.mods[:1] == i.mods[:1]) or set(destinations(later)) & used:
            return


def swapped_buffers(kernel: Kernel, i: Instruction) -> Iterator[Mutation]:
    """Two neighbouring copies exchange their places in shared memory; a product exchanges A and B."""
    kind = "swapped buffers"
    if (i.op, i.mods[:1]) in (("tcgen05", ("mma",)), ("wgmma", ("mma_async",))):
        d, a, b, *rest = i.args
        if isinstance(a, Reg) and isinstance(b, Reg):
            yield Mutation(kind, i.index, "A <-> B", replacing(i.index, args=(d, b, a, *rest)))
    if not (i.op == "cp" and "tensor" in i.mods):
        return
    place = 0 if isinstance(i.args[0], Mem) else 1
    later = next((x for x in kernel.instructions[i.index + 1 :] if x.name == i.name), None)
    if later is None:
        return
    mine, others = i.args[place], later.args[place]
    written = {r for x in kernel.instructions[i.index : later.index] for r in destinations(x)}
    # The later copy's address must be known here already, and the earlier one's still be there.
    if mine != others and not {mine.base, others.base} & written:
        yield Mutation(
            kind, i.index, f"with the copy of line {later.line}", _exchange(i.index, later.index, place, mine, others)
        )


def _exchange(n: int, later: int, place: int, mine: Mem, others: Mem) -> Edit:
    def edit(editor: Editor) -> None:
        editor.set(n, (place,), others)
        editor.set(later, (place,), mine)

    return edit


RULES = (late_waits, early_commits, swapped_buffers)
