"""A block: its threads, shared and tensor memory, barriers, and the asynchronous operations it has in flight."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import BoundsError, LeftoverError, TransactionError
from .hb import ASYNC, EMPTY, TENSOR, Access, Actor, CellShadow, Shadow, Token
from .memory import POISON_BYTE, RANK_SHIFT, Memory
from .special_registers import value
from .warp import WARP, Group, Warp

if TYPE_CHECKING:
    from .ir import Instruction
    from .launch import Launch

TENSOR_LANES, TENSOR_COLUMNS = 128, 512
TENSOR_POISON = 0x7FC0DEAD  # NaN


class AsyncOp:
    """Work of an engine. `finish` does it, once; in an ordered queue, after all that stand before it."""

    __slots__ = ("done", "name", "ordered", "queue", "work")

    def __init__(self, queue: list[AsyncOp], work: Callable[[], None], ordered: bool, name: str) -> None:
        self.queue = queue
        self.work = work
        self.ordered = ordered
        self.name = name
        self.done = False

    def finish(self) -> None:
        if self.done:
            return
        if self.ordered:
            while self.queue and self.queue[0] is not self:
                self.queue[0].finish()
        if self in self.queue:
            self.queue.remove(self)
        self.done = True
        self.work()


def span(shadow: Shadow, start: int, size: int, write: bool, atomic: bool = False) -> Access:
    """Footprint of `size` contiguous bytes."""
    return Access(shadow, slice(start >> shadow.shift, (start + size - 1 >> shadow.shift) + 1), write, atomic)


class Cta:
    def __init__(self, launch: Launch, block: tuple[int, int, int], rank: int, cluster: Any) -> None:
        self.launch = launch
        self.program = launch.program
        self.block = block
        self.rank = rank
        self.cluster = cluster
        self.order = launch.order
        self.label = f"block {block}"
        threads = launch.threads
        self.threads = threads
        count = -(-threads // WARP)
        self.registers = launch.register_file(count * WARP)
        self.shared = Memory("shared", launch.shared_bytes, POISON_BYTE)
        self.local = np.full((count * WARP, max(launch.program.kernel.local_bytes, 16)), POISON_BYTE, np.uint8)
        self.tensor: np.ndarray | None = None  # uint32 [128, 512], made by the first tcgen05.alloc
        self.tensor_shadow: CellShadow | None = None
        self.tensor_columns = np.zeros(TENSOR_COLUMNS, bool)  # allocated
        self.barriers: dict[int, Any] = {}  # mbarriers by offset in shared memory
        self.named: dict[int, Any] = {}  # bar.sync and its kin, by number
        self.queues: dict[str, list[AsyncOp]] = {}
        self.state: dict[str, Any] = {}  # engines keep what they know of a block here
        if self.order is not None:
            self.shared.shadow = Shadow(f"shared memory of {self.label}", launch.shared_bytes, launch.shared_granule)
        self.warps = [Warp(self, n, min(WARP, threads - n * WARP)) for n in range(count)]
        for w in self.warps:
            w.label = f"warp {w.number} of {self.label}" if launch.blocks > 1 else f"warp {w.number}"
            if self.order is not None:
                w.actor = Actor(self.order, w.label, w.live)
                w.actor.acquire(w.live, launch.initial)
        self.groups = [Group(self, self.warps[n : n + 4]) for n in range(0, count - 3, 4)]
        self.live = len(self.warps)

    # Identity ---------------------------------------------------------------------------------------------------------
    def special(self, name: str, start: int, width: int) -> np.ndarray:
        """The value of a special register for `width` threads from `start`."""
        return value(self, name, start, width)

    def report(self, error: type, message: str) -> None:
        """A failed check: raises or notes it, as `Options.severity` says."""
        self.launch.finding(error, f"{self.label}: {message}")

    # Asynchronous work ------------------------------------------------------------------------------------------------
    def issue(self, queue: str, work: Callable[[], None], ordered: bool = False, name: str = "") -> AsyncOp:
        """Hands work to an engine; the schedule decides when it is done. An ordered queue does its work in order."""
        q = self.queues.setdefault(queue, [])
        op = AsyncOp(q, work, ordered, name or queue)
        q.append(op)
        if self.launch.eager:
            op.finish()
        return op

    def check_async(
        self,
        warp: Warp,
        lanes: int,
        accesses: Callable[[], Iterable[Access]],
        instruction: Instruction,
        tensor: bool = False,
        ordered: int = 0,
        title: str = "",
    ) -> Token:
        """Race check of an asynchronous operation at its issue. Returns what its completion carries."""
        if self.order is None or warp.actor is None:
            return EMPTY
        kind = TENSOR if tensor else ASYNC
        return self.order.asynchronous(warp.actor, lanes, accesses(), instruction, kind, ordered, title)

    def in_flight(self) -> list[AsyncOp]:
        return [op for q in self.queues.values() for op in q]

    # Shared memory ----------------------------------------------------------------------------------------------------
    def resolve_shared(self, address: int, instruction: Instruction | None = None) -> tuple[Cta, int]:
        """Block and offset of a shared address (with a rank) or of a generic one."""
        address &= 0xFF_FFFF_FFFF if address >> 40 == 1 else 0xFFFF_FFFF_FFFF_FFFF
        rank, offset = address >> RANK_SHIFT, address & ((1 << RANK_SHIFT) - 1)
        if rank >= len(self.cluster.ctas):
            raise BoundsError(
                f"{self.label}: shared address {address:#x} names block rank {rank} of {len(self.cluster.ctas)}"
                + (f"\n  {instruction.where()}" if instruction is not None else "")
            )
        return self.cluster.ctas[rank], offset

    def check_shared(self, offset: int, size: int, instruction: Instruction) -> None:
        if offset < 0 or offset + size > self.shared.size:
            raise BoundsError(
                f"{self.label}: shared bytes {offset:#x}..{offset + size - 1:#x} of {self.shared.size:#x}\n"
                f"  {instruction.where()}"
            )

    def shared_access(self, offset: int, size: int, write: bool, atomic: bool = False) -> Access:
        """Footprint of contiguous bytes."""
        shadow = self.shared.shadow
        assert shadow is not None
        return span(shadow, offset, size, write, atomic)

    def shared_access_at(self, offsets: np.ndarray, size: int, write: bool, atomic: bool = False) -> Access:
        """Footprint of pieces of `size` bytes at these offsets."""
        shadow = self.shared.shadow
        assert shadow is not None
        index = np.asarray(offsets).ravel() >> shadow.shift
        pieces = size >> shadow.shift
        if pieces > 1:
            index = (index[:, None] + np.arange(pieces)).ravel()
        return Access(shadow, np.unique(index), write, atomic)

    # End --------------------------------------------------------------------------------------------------------------
    def retire(self, warp: Warp) -> None:
        if warp.actor is not None:
            warp.actor.leave(warp.live)
        if warp.done:
            self.live -= 1
            for barrier in self.named.values():
                barrier.leave()

    def end(self) -> None:
        """Checks what a block leaves behind, then lets engines drain."""
        for op in self.in_flight():
            op.finish()
        for offset, barrier in self.barriers.items():
            if barrier.transactions:
                self.report(
                    TransactionError,
                    f"mbarrier at {offset:#x} ends with {barrier.transactions} bytes announced and not arrived\n"
                    f"  initialised at {barrier.instruction.where()}",
                )
        if self.order is not None and self.shared.shadow is not None and len(self.cluster.ctas) > 1:
            known = 0
            for warp in self.warps:
                known |= warp.actor.ended if warp.actor is not None else 0
            self.order.after_end(self.shared.shadow, self.label, known)
        if self.tensor_columns.any():
            self.report(LeftoverError, f"{int(self.tensor_columns.sum())} tensor memory columns not given back")
        for hook in self.state.get("at_end", ()):
            hook(self)
