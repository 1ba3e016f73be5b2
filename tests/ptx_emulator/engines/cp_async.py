"""cp.async: copies of 4, 8 or 16 bytes a thread, in the generic proxy. PTX ISA 9.7.9.25.3 and 9.7.13.15.17.

Where all threads of a warp copy whole pieces, which is the rule, the warp's copy is one operation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from ..cta import AsyncOp
from ..errors import AlignmentError, BarrierError, BoundsError, DescriptorError
from ..hb import COPY, EMPTY, Access, Token
from ..ir import Instruction, Kernel, Reg
from ..memory import GLOBAL_BASE, OFFSET_MASK, RANK_SHIFT, SHARED_WINDOW
from ..operands import immediate, lanes, scalar, vector
from ..registry import Unsupported, special
from .async_groups import Entry, groups_of
from .bulk import HINT, allow
from .mbarrier import at, find
from .phases import seen_by

if TYPE_CHECKING:
    from ..warp import Warp

GROUP = "cp.async"  # key of the groups in Warp.state
HISTORY = "cp.async copies"  # key of what cp.async.mbarrier.arrive waits for
_ALL = np.arange(32)
_PREFETCH = ("L2::64B", "L2::128B", "L2::256B")


@special("cp.async.ca", "cp.async.cg")
def copy(kernel: Kernel, i: Instruction) -> Callable:
    allow(i, ("async", "ca", "cg", "shared", "shared::cta", "global", HINT, *_PREFETCH))
    size = immediate(i.args[2], "the number of bytes")
    if size not in ((16,) if i.has("cg") else (4, 8, 16)):
        raise Unsupported(f"{size} bytes: .ca copies 4, 8 or 16, .cg 16")
    to, source = vector(i.args[0]), vector(i.args[1])
    extra = i.args[3 : len(i.args) - i.has(HINT)]
    if len(extra) > 1:
        raise Unsupported(f"{len(i.args)} operands")
    portion = _portion(extra[0], size) if extra else None

    def run(warp: Warp, mask: np.ndarray | None) -> None:
        active = _ALL if mask is None else np.flatnonzero(mask)
        offsets = _shared_offsets(warp, to(warp)[active].astype(np.int64), size, i)
        starts = source(warp)[active].astype(np.int64) - GLOBAL_BASE
        counts = None if portion is None else portion(warp)[active]
        if counts is not None and (counts == size).all():
            counts = None
        if counts is not None and int(counts.max()) > size:
            warp.cta.report(DescriptorError, f"src-size {int(counts.max())} of a copy of {size} bytes\n  {i.where()}")
        _check_sources(warp, starts if counts is None else starts[counts > 0], size, counts, i)
        _issue(warp, warp.bits(mask), offsets, starts, counts, size, i)

    return run


def _portion(operand: object, size: int) -> Callable[[Warp], np.ndarray]:
    """Bytes to copy for each lane, from src-size or from the predicate ignore-src."""
    if isinstance(operand, Reg) and operand.cls == "p":
        ignored = vector(operand)
        return lambda warp: np.where(ignored(warp), 0, size)
    given = vector(operand)
    return lambda warp: given(warp).astype(np.int64)


def _shared_offsets(warp: Warp, addresses: np.ndarray, size: int, i: Instruction) -> np.ndarray:
    addresses = np.where(addresses >= SHARED_WINDOW, addresses - SHARED_WINDOW, addresses)
    offsets = addresses & OFFSET_MASK
    if (addresses >> RANK_SHIFT != warp.cta.rank).any():
        raise BoundsError(f"{warp.cta.label}: the destination is not in this block's shared memory\n  {i.where()}")
    if (offsets % size).any():
        warp.cta.report(AlignmentError, f"a shared address is no multiple of {size}\n  {i.where()}")
    warp.cta.check_shared(int(offsets.min()), size, i)
    warp.cta.check_shared(int(offsets.max()), size, i)
    return offsets


def _check_sources(warp: Warp, starts: np.ndarray, size: int, counts: np.ndarray | None, i: Instruction) -> None:
    if not len(starts):
        return
    if (starts % size).any():
        warp.cta.report(AlignmentError, f"a global address is no multiple of {size}\n  {i.where()}")
    memory = warp.cta.launch.device.memory
    last = starts + (size if counts is None else counts[counts > 0]) - 1
    if starts.min() < 0 or last.max() >= memory.size or not (memory.valid[starts].all() and memory.valid[last].all()):
        inside = (starts >= 0) & (last < memory.size)
        inside[inside] &= memory.valid[starts[inside]] & memory.valid[last[inside]]
        bad = int(starts[~inside][0]) + GLOBAL_BASE
        raise BoundsError(
            f"{warp.cta.label}: {warp.label} copies from {bad:#x}, outside every allocation\n  {i.where()}"
        )


def _issue(
    warp: Warp, bits: int, offsets: np.ndarray, starts: np.ndarray, counts: np.ndarray | None, size: int, i: Instruction
) -> None:
    cta = warp.cta
    memory = cta.launch.device.memory

    def accesses() -> list[Access]:
        found = [cta.shared_access_at(offsets, size, True)._replace(proxy=False)]
        assert memory.shadow is not None
        read = starts[:, None] + np.arange(0, size, memory.shadow.granule)
        if counts is not None:
            read = read[np.arange(0, size, memory.shadow.granule) < counts[:, None]]
        if read.size:
            found.append(Access(memory.shadow, (read >> memory.shadow.shift).ravel(), False, proxy=False))
        return found

    token = EMPTY
    if cta.order is not None and warp.actor is not None:
        token = cta.order.asynchronous(warp.actor, bits, accesses(), i, COPY)
    word = min(size, 8)

    def work() -> None:
        target, origin = cta.shared.views[word], memory.views[word]
        where, whence = offsets // word, starts // word
        if size == 16:
            where, whence = where[:, None] + np.arange(2), whence[:, None] + np.arange(2)
        if counts is None:
            target[where] = origin[whence]
            return
        target[where] = 0
        full = counts == size
        target[where[full]] = origin[whence[full]]
        for n in np.flatnonzero((counts > 0) & ~full).tolist():
            to, start, count = int(offsets[n]), int(starts[n]), int(counts[n])
            cta.shared.u8[to : to + count] = memory.u8[start : start + count]

    cta.launch.count_bytes("cp.async global->shared", size * len(offsets))
    op = cta.issue("cp.async", work, name=i.name)
    groups_of(warp, GROUP).open.append(Entry(bits, i, op, token, op, token))
    if _tracked(warp):
        warp.state.setdefault(HISTORY, []).append((bits, op, token))


def _tracked(warp: Warp) -> bool:
    """Does the kernel have cp.async.mbarrier.arrive? Only then all copies are remembered."""
    launch = warp.cta.launch
    found = warp.cta.state.get(HISTORY)
    if found is None:
        found = any(i.op == "cp" and i.mods[1:3] == ("mbarrier", "arrive") for i in launch.kernel.instructions)
        warp.cta.state[HISTORY] = found
    return found


@special("cp.async.commit_group")
def commit_group(kernel: Kernel, i: Instruction) -> Callable:
    def run(warp: Warp, mask: np.ndarray | None) -> None:
        groups_of(warp, GROUP).commit(warp.bits(mask))

    return run


@special("cp.async.wait_group")
def wait_group(kernel: Kernel, i: Instruction) -> Callable:
    pending = immediate(i.args[0], "the number of pending groups")

    def run(warp: Warp, mask: np.ndarray | None) -> None:
        groups_of(warp, GROUP).wait(warp, warp.bits(mask), pending, i)

    return run


@special("cp.async.wait_all")
def wait_all(kernel: Kernel, i: Instruction) -> Callable:
    def run(warp: Warp, mask: np.ndarray | None) -> None:
        groups, bits = groups_of(warp, GROUP), warp.bits(mask)
        groups.commit(bits)
        groups.wait(warp, bits, 0, i)

    return run


@special("cp.async.mbarrier.arrive")
def arrive(kernel: Kernel, i: Instruction) -> Callable:
    """An arrival when all earlier copies of the thread are done. Without .noinc it counts itself in first."""
    allow(i, ("async", "mbarrier", "arrive", "noinc", "shared", "shared::cta", "b64"))
    address = scalar(i.args[0])
    counted = i.has("noinc")

    def run(warp: Warp, mask: np.ndarray | None) -> None:
        together: dict[int, int] = {}
        for lane in lanes(mask):
            place = address(warp, lane)
            together[place] = together.get(place, 0) | 1 << lane
        for place, bits in together.items():
            _arrive(warp, place, bits, counted, i)

    return run


def _arrive(warp: Warp, place: int, bits: int, counted: bool, i: Instruction) -> None:
    cta = warp.cta
    barrier = at(warp, place, i)
    if barrier is None:
        return
    n = bits.bit_count()
    if not counted:
        barrier.pending += n
        if barrier.watch is not None and warp.actor is not None:
            barrier.watch.joined[warp.actor.event(bits)] = i
    ops, token = _earlier(warp, bits)
    seen = token | seen_by(warp, bits)

    def work() -> None:
        for op in ops:
            op.finish()
        now = barrier if cta.barriers.get(barrier.offset) is barrier else find(cta, barrier.offset, i)
        if now is not None:
            now.arrive(n, token, i, seen, joins=not counted)

    if barrier.cta is not cta:
        cta.report(BarrierError, f"the mbarrier is not in this block's shared memory\n  {i.where()}")
        return
    cta.issue("cp.async", work, name=i.name)


def _earlier(warp: Warp, bits: int) -> tuple[list[AsyncOp], Token]:
    """Copies of these threads so far, and what their completion carries. Those of a whole warp are then kept as one."""
    history = warp.state.setdefault(HISTORY, [])
    ops, token = [], EMPTY
    for owners, op, carried in history:
        if owners & bits:
            ops.append(op)
            token |= carried
    if history and bits == warp.live and all(owners == bits for owners, _, _ in history):
        last = history[-1][1]
        unfinished = [(bits, op, EMPTY) for op in ops if not op.done and op is not last]
        warp.state[HISTORY] = [*unfinished, (bits, last, token)]
    return ops, token
