"""Faults of synchronisation: waits, commits, arrivals, fences and barriers left out, weakened, or meeting the wrong one.

Each function looks at one instruction and yields its mutations.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..ir import Imm, Instruction, Kernel, Mem
from .edit import Mutation

BARRIER_BYTES = 8


def dropped_kind(i: Instruction) -> str:
    """The kind "drop ..." of an instruction, "" where leaving it out is no fault that is asked for."""
    op, mods = i.op, i.mods
    first = mods[0] if mods else ""
    if op == "mbarrier":
        return {
            "try_wait": "drop mbarrier wait", "test_wait": "drop mbarrier wait", "arrive": "drop arrive",
            "init": "drop init", "expect_tx": "drop expect",
        }.get(first, "")  # fmt: skip
    if op == "tcgen05":
        return {
            "wait::ld": "drop tcgen05 wait", "wait::st": "drop tcgen05 wait", "commit": "drop commit",
            "fence::before_thread_sync": "drop tcgen05 fence", "fence::after_thread_sync": "drop tcgen05 fence",
            "dealloc": "drop dealloc",
        }.get(first, "")  # fmt: skip
    if op == "wgmma":
        return {"wait_group": "drop wgmma wait", "commit_group": "drop commit", "fence": "drop wgmma fence"}.get(first, "")
    if op == "cp" and first == "async":
        if "wait_group" in mods or "wait_all" in mods:
            return "drop bulk wait" if "bulk" in mods else "drop cp.async wait"
        if "commit_group" in mods:
            return "drop commit"
        return "drop arrive" if "mbarrier" in mods else ""
    if op in ("bar", "barrier"):
        if first == "warp":
            return "drop warp barrier"
        if first == "cluster":
            return "drop arrive" if "arrive" in mods else "drop cluster barrier"
        return "drop arrive" if "arrive" in mods else "drop block barrier"
    if op in ("fence", "membar"):
        if "proxy" in mods:
            return "drop proxy fence" if any(m.startswith("async") for m in mods) else "drop tensor map fence"
        return "drop memory fence"
    return ""


def drops(kernel: Kernel, i: Instruction) -> Iterator[Mutation]:
    kind = dropped_kind(i)
    if kind:
        yield Mutation(kind, i.index, "", lambda e: e.drop(i.index))


def weaker_waits(kernel: Kernel, i: Instruction) -> Iterator[Mutation]:
    """wait_group N lets one group more be in flight."""
    if "wait_group" in i.mods and i.args and isinstance(i.args[0], Imm):
        n = i.args[0].value
        yield Mutation("weaker wait", i.index, f"{n} -> {n + 1}", lambda e: e.set(i.index, (0,), Imm(n + 1)))


def wrong_phases(kernel: Kernel, i: Instruction) -> Iterator[Mutation]:
    if i.op == "mbarrier" and i.mods[0] in ("try_wait", "test_wait") and i.has("parity"):
        yield Mutation("wrong phase", i.index, "parity flipped", lambda e: e.change(i.index, (2,), flip=1))


def wrong_byte_counts(kernel: Kernel, i: Instruction) -> Iterator[Mutation]:
    if i.op != "mbarrier" or not i.has("expect_tx"):
        return
    last = len(i.args) - 1
    for step in (16, -16):
        yield Mutation("wrong byte count", i.index, f"{step:+d}", lambda e, s=step: e.change(i.index, (last,), add=s))
    if isinstance(i.args[last], Imm):
        half = Imm(i.args[last].value // 2)
        yield Mutation("wrong byte count", i.index, "half", lambda e: e.set(i.index, (last,), half))


def wrong_counts(kernel: Kernel, i: Instruction) -> Iterator[Mutation]:
    """Arrivals that a barrier expects: one more or less, or a warp more or less."""
    if i.op == "mbarrier" and i.mods[0] == "init":
        given = i.args[1].value if isinstance(i.args[1], Imm) else 0
        for step in (1, -1) if given != 1 else (1,):
            yield Mutation(
                "wrong barrier count", i.index, f"{step:+d}", lambda e, s=step: e.change(i.index, (1,), add=s)
            )
    if i.op in ("bar", "barrier") and i.mods and i.mods[0] in ("sync", "arrive", "cta") and len(i.args) == 2:
        for step in (32, -32):
            yield Mutation(
                "wrong barrier count", i.index, f"{step:+d}", lambda e, s=step: e.change(i.index, (1,), add=s)
            )


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
            "wrong barrier", i.index, f"{BARRIER_BYTES:+d} bytes",
            lambda e: e.change(i.index, (place,), add=BARRIER_BYTES),
        )  # fmt: skip
    # Named barriers that warps meet at from different places of the text; elsewhere the number does not matter.
    if i.op == "barrier" and i.mods[0] in ("sync", "arrive", "cta"):
        yield Mutation("wrong barrier", i.index, "number + 2", lambda e: e.change(i.index, (0,), add=2))


def wrong_multicasts(kernel: Kernel, i: Instruction) -> Iterator[Mutation]:
    """A copy or commit to several blocks leaves out the first; a remote address is of the other block."""
    if "multicast::cluster" in i.mods:
        last = len(i.args) - 1
        yield Mutation("wrong multicast", i.index, "mask bit 0 flipped", lambda e: e.change(i.index, (last,), flip=1))
    if i.op == "mapa":
        yield Mutation("wrong multicast", i.index, "rank bit 0 flipped", lambda e: e.change(i.index, (2,), flip=1))


RULES = (
    drops,
    weaker_waits,
    wrong_phases,
    wrong_byte_counts,
    wrong_counts,
    wrong_barriers,
    wrong_multicasts,
)
