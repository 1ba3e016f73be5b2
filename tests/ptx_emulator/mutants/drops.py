"""Faults of synchronisation: waits, commits, arrivals, fences, barriers left out, weakened, or meeting the wrong one.

Each rule looks at one instruction and yields its mutations.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..ir import Imm, Instruction, Kernel, Mem
from .edit import Mutation, changing, dropping, setting

BARRIER_BYTES = 8
_MBARRIER = {
    "try_wait": "drop mbarrier wait",
    "test_wait": "drop mbarrier wait",
    "arrive": "drop arrive",
    "init": "drop init",
    "expect_tx": "drop expect",
}
_TCGEN05 = {
    "wait::ld": "drop tcgen05 wait",
    "wait::st": "drop tcgen05 wait",
    "commit": "drop commit",
    "fence::before_thread_sync": "drop tcgen05 fence",
    "fence::after_thread_sync": "drop tcgen05 fence",
    "dealloc": "drop dealloc",
}
_WGMMA = {"wait_group": "drop wgmma wait", "commit_group": "drop commit", "fence": "drop wgmma fence"}


def dropped_kind(i: Instruction) -> str:
    """The kind "drop ..." of an instruction, "" where leaving it out is no fault that is asked for."""
    op, mods = i.op, i.mods
    first = mods[0] if mods else ""
    for name, kinds in (("mbarrier", _MBARRIER), ("tcgen05", _TCGEN05), ("wgmma", _WGMMA)):
        if op == name:
            return kinds.get(first, "")
    if op == "cp" and first == "async":
        if "wait_group" in mods or "wait_all" in mods:
            return "drop bulk wait" if "bulk" in mods else "drop cp.async wait"
        if "commit_group" in mods:
            return "drop commit"
        return "drop arrive" if "mbarrier" in mods else ""
    if op in ("bar", "barrier"):
        if "arrive" in mods:
            return "drop arrive"
        return {"warp": "drop warp barrier", "cluster": "drop cluster barrier"}.get(first, "drop block barrier")
    if op in ("fence", "membar"):
        if "proxy" in mods:
            return "drop proxy fence" if any(m.startswith("async") for m in mods) else "drop tensor map fence"
        return "drop memory fence"
    return ""


def drops(kernel: Kernel, i: Instruction) -> Iterator[Mutation]:
    kind = dropped_kind(i)
    if kind:
        yield Mutation(kind, i.index, "", dropping(i.index))


def weaker_waits(kernel: Kernel, i: Instruction) -> Iterator[Mutation]:
    """wait_group N lets one group more be in flight."""
    if "wait_group" in i.mods and i.args and isinstance(i.args[0], Imm):
        n = i.args[0].value
        yield Mutation("weaker wait", i.index, f"{n} -> {n + 1}", setting(i.index, (0,), Imm(n + 1)))


def wrong_phases(kernel: Kernel, i: Instruction) -> Iterator[Mutation]:
    if i.op == "mbarrier" and i.mods[0] in ("try_wait", "test_wait") and i.has("parity"):
        yield Mutation("wrong phase", i.index, "parity flipped", changing(i.index, (2,), flip=1))


def wrong_byte_counts(kernel: Kernel, i: Instruction) -> Iterator[Mutation]:
    if i.op != "mbarrier" or not i.has("expect_tx"):
        return
    last = len(i.args) - 1
    for step in (16, -16):
        yield Mutation("wrong byte count", i.index, f"{step:+d}", changing(i.index, (last,), add=step))
    if isinstance(i.args[last], Imm):
        yield Mutation("wrong byte count", i.index, "half", setting(i.index, (last,), Imm(i.args[last].value // 2)))


def _named(i: Instruction) -> bool:
    return i.op in ("bar", "barrier") and bool(i.mods) and i.mods[0] in ("sync", "arrive", "cta")


def wrong_counts(kernel: Kernel, i: Instruction) -> Iterator[Mutation]:
    """Arrivals that a barrier expects: one more or less, or a warp more or less."""
    kind = "wrong barrier count"
    if i.op == "mbarrier" and i.mods[0] == "init":
        given = i.args[1].value if isinstance(i.args[1], Imm) else 0
        for step in (1, -1) if given != 1 else (1,):
            yield Mutation(kind, i.index, f"{step:+d}", changing(i.index, (1,), add=step))
    if _named(i) and len(i.args) == 2:
        for step in (32, -32):
            yield Mutation(kind, i.index, f"{step:+d}", changing(i.index, (1,), add=step))


def barrier_operand(i: Instruction) -> int:
    """Which operand is the address of an mbarrier; -1 for none."""
    if i.op == "mbarrier":
        return next(k for k, a in enumerate(i.args) if isinstance(a, Mem))
    if i.op == "tcgen05" and i.mods[0] == "commit":
        return 0
    if any("mbarrier::complete_tx" in m for m in i.mods):
        return 2 if i.op in ("cp", "st", "red") else 1
    return 0 if i.op == "cp" and "mbarrier" in i.mods else -1


def wrong_barriers(kernel: Kernel, i: Instruction) -> Iterator[Mutation]:
    """The barrier beside the right one; another named barrier."""
    place = barrier_operand(i)
    if place >= 0 and not (i.op == "mbarrier" and i.mods[0] in ("init", "inval")):
        yield Mutation(
            "wrong barrier", i.index, f"{BARRIER_BYTES:+d} bytes", changing(i.index, (place,), BARRIER_BYTES)
        )
    # Named barriers that warps meet at from different places of the text; elsewhere the number does not matter.
    if i.op == "barrier" and _named(i):
        yield Mutation("wrong barrier", i.index, "number + 2", changing(i.index, (0,), 2))


def wrong_multicasts(kernel: Kernel, i: Instruction) -> Iterator[Mutation]:
    """A copy or commit to several blocks leaves out the first; a remote address is of the other block."""
    if "multicast::cluster" in i.mods:
        yield Mutation("wrong multicast", i.index, "mask bit 0", changing(i.index, (len(i.args) - 1,), flip=1))
    if i.op == "mapa":
        yield Mutation("wrong multicast", i.index, "rank bit 0", changing(i.index, (2,), flip=1))


RULES = (
    drops,
    weaker_waits,
    wrong_phases,
    wrong_byte_counts,
    wrong_counts,
    wrong_barriers,
    wrong_multicasts,
)
