"""tcgen05.alloc, dealloc, relinquish_alloc_permit, commit, fence, wait. PTX ISA 9.7.16.6, .7, .11, .12."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ..cta import TENSOR_COLUMNS, TENSOR_LANES, TENSOR_POISON
from ..errors import AlignmentError, BarrierError, TensorMemoryError
from ..ir import Instruction, Kernel
from ..operands import first_lane, lanes, scalar
from ..registry import WAIT, special
from ..shadow import EMPTY, CellShadow, Token
from .mbarrier import find
from .phases import seen_by
from .tcgen05_common import (
    GRANULE_LANES,
    QUEUE,
    aligned,
    allocated,
    blocks_of,
    cta_group,
    issued_token,
    refuse_modifiers,
    split_address,
    tensor_access,
)

if TYPE_CHECKING:
    from ..cta import AsyncOp, Cta
    from ..warp import Warp

UNIT = 32  # columns


# Allocation -----------------------------------------------------------------------------------------------------------
@special("tcgen05.alloc", kind=WAIT)
def allocate(kernel: Kernel, i: Instruction) -> Callable:
    """Blocks until the columns are free; their number a power of two, never larger than in an earlier allocation."""
    group = cta_group(i)
    refuse_modifiers(i, {"cta_group::1", "cta_group::2", "sync", "aligned", "shared::cta", "b32"})
    address, columns = scalar(i.args[0]), scalar(i.args[1])
    mixed = (
        len({m for k in kernel.instructions if k.op == "tcgen05" for m in k.mods if m.startswith("cta_group::")}) > 1
    )

    def run(warp: Warp, mask: np.ndarray | None) -> bool:
        aligned(warp, mask, i)
        # A pair whose requests have met is served, even if the peer has gone on and ended meanwhile.
        ctas = blocks_of(warp, group, i, alive="tcgen05.request" not in warp.state)
        lane = first_lane(mask)
        n = columns(warp, lane)
        if mixed:
            _refuse(
                warp, ".cta_group::1 and .cta_group::2 are mixed; all tcgen05 instructions of a kernel need the same", i
            )
        if not ctas or not _check_request(warp, n, i):
            return True
        start = _reserve(warp, ctas[0], n) if group == 1 else _reserve_pair(warp, ctas, n, i)
        if start is None:
            return False
        warp.cta.state["tcgen05.last"] = n
        _store_address(warp, lane, address(warp, lane), start, i)
        return True

    return run


def _refuse(warp: Warp, why: str, i: Instruction) -> None:
    warp.cta.report(TensorMemoryError, f"{warp.label}: tcgen05.{i.mods[0]}: {why}\n  {i.where()}")


def _check_columns(warp: Warp, n: int, i: Instruction) -> bool:
    if n & (n - 1) or not UNIT <= n <= TENSOR_COLUMNS:
        _refuse(warp, f"{n} columns; a power of two from {UNIT} to {TENSOR_COLUMNS} is allowed", i)
        return False
    return True


def _check_request(warp: Warp, n: int, i: Instruction) -> bool:
    if not _check_columns(warp, n, i):
        return False
    if warp.cta.state.get("tcgen05.relinquished"):
        _refuse(
            warp, f"the block gave up its permit before\n  before: {warp.cta.state['tcgen05.relinquished'].where()}", i
        )
        return False
    last = warp.cta.state.get("tcgen05.last", TENSOR_COLUMNS)
    if n > last:
        _refuse(warp, f"{n} columns after an allocation of {last}: the number must not grow within a block", i)
        return False
    return True


def _free_range(ctas: list[Cta], n: int) -> int | None:
    """First fit at a multiple of 32 that is free in all of these blocks."""
    used = np.logical_or.reduce([c.tensor_columns for c in ctas])
    starts = range(0, TENSOR_COLUMNS - n + 1, UNIT)
    return next((s for s in starts if not used[s : s + n].any()), None)


def _occupy(cta: Cta, start: int, n: int) -> None:
    if cta.tensor is None:
        cta.tensor = np.full((TENSOR_LANES, TENSOR_COLUMNS), TENSOR_POISON, np.uint32)
        if cta.order is not None:
            cta.tensor_shadow = CellShadow(f"tensor memory of {cta.label}")
    cta.tensor_columns[start : start + n] = True
    cta.state.setdefault("tcgen05.allocations", {})[start] = n
    report = cta.launch.report
    report.peak_tensor_columns = max(report.peak_tensor_columns, int(cta.tensor_columns.sum()))


def _reserve(warp: Warp, cta: Cta, n: int) -> int | None:
    start = _free_range([cta], n)
    if start is None:
        warp.waiting = f"tcgen05.alloc of {n} columns: {allocated(cta)}"
        return None
    _occupy(cta, start, n)
    return start


class _PairRequests:
    """Allocations with .cta_group::2: the k-th of a block meets the k-th of its peer; both get the same columns."""

    def __init__(self) -> None:
        self.asked: tuple[list[int], list[int]] = ([], [])
        self.starts: list[int] = []


def _reserve_pair(warp: Warp, ctas: list[Cta], n: int, i: Instruction) -> int | None:
    requests: _PairRequests = ctas[0].state.setdefault("tcgen05.pair_requests", _PairRequests())
    side = warp.cta.rank % 2
    number = warp.state.get("tcgen05.request")
    if number is None:
        number = warp.state["tcgen05.request"] = len(requests.asked[side])
        requests.asked[side].append(n)
    other = requests.asked[1 - side]
    if number >= len(other):
        warp.waiting = "tcgen05.alloc with .cta_group::2: the peer block has not come"
        return None
    if other[number] != n:
        _refuse(warp, f".cta_group::2: {n} columns here, {other[number]} in the peer block", i)
    if number == len(requests.starts):
        start = _free_range(ctas, n)
        if start is not None:
            requests.starts.append(start)
            for cta in ctas:
                _occupy(cta, start, n)
    if number >= len(requests.starts):
        warp.waiting = f"tcgen05.alloc of {n} columns with .cta_group::2: {allocated(warp.cta)}"
        return None
    del warp.state["tcgen05.request"]
    return requests.starts[number]


def _store_address(warp: Warp, lane: int, address: int, value: int, i: Instruction) -> None:
    """A generic write of one word, done for the whole warp: all its threads see it."""
    cta, offset = warp.cta.resolve_shared(address)
    if cta is not warp.cta:
        _refuse(warp, f"the address goes to shared memory of block rank {cta.rank}; it must be the own block's", i)
    cta.check_shared(offset, 4, i)
    if offset % 4:
        cta.report(
            AlignmentError, f"{warp.label}: tcgen05.alloc writes to {offset:#x}, no multiple of 4\n  {i.where()}"
        )
    cta.shared.u8[offset : offset + 4] = np.frombuffer(value.to_bytes(4, "little"), np.uint8)
    shadow, actor = cta.shared.shadow, warp.actor
    if shadow is None or actor is None or cta.order is None:
        return
    actor.release(warp.live)
    index = np.arange(offset >> shadow.shift, offset + 3 >> shadow.shift, dtype=np.int64)
    index = np.append(index, offset + 3 >> shadow.shift)
    cta.order.generic(actor, warp.live, shadow, index[None], np.array([[lane]]), True, i)
    event = actor.event(warp.live)
    actor.open.clear()
    del actor.unsynced[event]
    actor.known |= 1 << event


@special("tcgen05.dealloc")
def deallocate(kernel: Kernel, i: Instruction) -> Callable:
    """Gives back exactly one allocation. Accesses that are not known to be over are a race."""
    group = cta_group(i)
    refuse_modifiers(i, {"cta_group::1", "cta_group::2", "sync", "aligned", "b32"})
    address, columns = scalar(i.args[0]), scalar(i.args[1])

    def run(warp: Warp, mask: np.ndarray | None) -> None:
        aligned(warp, mask, i)
        # The peer may have given back its part and ended: a block works on its own columns only.
        if not blocks_of(warp, group, i, alive=False):
            return
        cta, lane = warp.cta, first_lane(mask)
        n = columns(warp, lane)
        row, start = split_address(address(warp, lane))
        if not _check_columns(warp, n, i):
            return
        allocations: dict[int, int] = cta.state.get("tcgen05.allocations", {})
        if row or allocations.get(start) != n:
            _refuse(warp, f"lane {row}, columns {start}..{start + n - 1} are no allocation; {allocated(cta)}", i)
            return
        assert cta.tensor is not None
        shadow = cta.tensor_shadow
        if shadow is not None:
            rows = np.arange(TENSOR_LANES // GRANULE_LANES)[:, None] * TENSOR_COLUMNS
            index = (rows + np.arange(start, start + n)).ravel()
            # No tensor event: a barrier alone orders a deallocation, it is a synchronous instruction.
            cta.check_async(warp, warp.live, lambda: [tensor_access(cta, index, True)], i)
            shadow.writer[index] = 0
            shadow.readers[index] = 0
        del allocations[start]
        cta.tensor_columns[start : start + n] = False
        cta.tensor[:, start : start + n] = TENSOR_POISON

    return run


@special("tcgen05.relinquish_alloc_permit")
def relinquish(kernel: Kernel, i: Instruction) -> Callable:
    cta_group(i)
    refuse_modifiers(i, {"cta_group::1", "cta_group::2", "sync", "aligned"})

    def run(warp: Warp, mask: np.ndarray | None) -> None:
        aligned(warp, mask, i)
        warp.cta.state["tcgen05.relinquished"] = i

    return run


# Completion -----------------------------------------------------------------------------------------------------------
@special("tcgen05.commit")
def commit(kernel: Kernel, i: Instruction) -> Callable:
    """An arrival when all mma and cp that the thread issued are done; an implicit fence::before_thread_sync."""
    cta_group(i)
    allowed = {"cta_group::1", "cta_group::2", "mbarrier::arrive::one", "shared::cluster", "multicast::cluster", "b64"}
    refuse_modifiers(i, allowed)
    address = scalar(i.args[0])
    targets = scalar(i.args[1]) if i.has("multicast::cluster") else None

    def run(warp: Warp, mask: np.ndarray | None) -> None:
        for lane in lanes(mask):
            cta, offset = warp.cta.resolve_shared(address(warp, lane))
            found = [cta] if targets is None else _multicast(warp, targets(warp, lane) & 0xFFFF, i)
            for target in found:
                find(target, offset, i, warp)
            token = issued_token(warp, 1 << lane)
            carried = Token(token.known, token.proxied, token.before | token.known)
            seen = carried | seen_by(warp, 1 << lane)
            warp.cta.issue(QUEUE, _arrival(found, offset, carried, seen, i), ordered=True, name="tcgen05.commit")

    return run


def _multicast(warp: Warp, ranks: int, i: Instruction) -> list[Cta]:
    ctas = warp.cta.cluster.ctas
    if ranks == 0 or ranks >> len(ctas):
        warp.cta.report(
            BarrierError,
            f"{warp.label}: tcgen05.commit to ranks {ranks:#x}; the cluster has 0..{len(ctas) - 1}\n  {i.where()}",
        )
    return [c for c in ctas if ranks >> c.rank & 1]


def _arrival(targets: list[Cta], offset: int, token: Token, seen: Token, i: Instruction) -> Callable[[], None]:
    def work() -> None:
        for cta in targets:
            barrier = find(cta, offset, i)
            if barrier is not None:
                barrier.arrive(1, token, i, seen)

    return work


@special("tcgen05.fence::before_thread_sync")
def fence_before(kernel: Kernel, i: Instruction) -> Callable:
    def run(warp: Warp, mask: np.ndarray | None) -> None:
        if warp.actor is not None:
            warp.actor.fence_before(warp.bits(mask))

    return run


@special("tcgen05.fence::after_thread_sync")
def fence_after(kernel: Kernel, i: Instruction) -> Callable:
    def run(warp: Warp, mask: np.ndarray | None) -> None:
        if warp.actor is not None:
            warp.actor.fence_after(warp.bits(mask), warp.state.get("taken", EMPTY))

    return run


class Transfers:
    """tcgen05.ld or tcgen05.st of a warp that no wait has covered yet."""

    def __init__(self) -> None:
        self.pending: list[tuple[AsyncOp, Token, int]] = []  # the operation, what it tells, the registers it owns


def transfers(warp: Warp, direction: str) -> Transfers:
    """`direction`: "ld" or "st"."""
    return warp.state.setdefault(f"tcgen05.{direction}", Transfers())


def _wait(direction: str) -> Callable[[Kernel, Instruction], Callable[..., Any]]:
    def build(kernel: Kernel, i: Instruction) -> Callable:
        refuse_modifiers(i, {"sync", "aligned"})

        def run(warp: Warp, mask: np.ndarray | None) -> None:
            aligned(warp, mask, i)
            group = transfers(warp, direction)
            if group.pending:
                warp.cta.launch.report.useful.add(i.index)
            for operation, token, registers in group.pending:
                operation.finish()
                if registers:
                    warp.give(registers)
                if warp.actor is not None:
                    warp.actor.acquire(warp.live, token)
            group.pending.clear()

        return run

    return build


special("tcgen05.wait::ld", owns_registers=True)(_wait("ld"))
special("tcgen05.wait::st", owns_registers=True)(_wait("st"))
