"""Happens-before: who has seen which access complete, and accesses that nothing orders.

An *event* is an asynchronous operation, or what a warp did between two points where it released something (one event
for each set of lanes that accessed memory there). What a warp knows is a set of events, kept as a Python integer with a
bit for each; single lanes may know more (`extra`). Barriers carry a `Token`: what the arriving side knew.

A granule of memory (as small as the smallest access of the kernel) remembers its last write, the reads since, and
unordered atomics. An access races when one of those, at least one of the two a write, is not among what the accessing
thread knows. One run is enough for a path through the kernel: no particular interleaving has to happen.

Also tracked: which generic writes a fence.proxy.async has made visible to asynchronous reads (`proxied`), and which
tensor memory events stand between a tcgen05.fence::before_thread_sync and an ::after_thread_sync (`before`, `after`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .actor import Actor, bits
from .errors import (
    BarrierError,
    ProxyError,
    ProxyReuseError,
    RaceError,
    SameValueRace,
    TcgenFenceError,
    UninitialisedError,
)
from .shadow import (
    ASYNC,
    BARRIER,
    COPY,
    EMPTY,
    GENERIC,
    HOST,
    INDEX_BITS,
    INDEX_MASK,
    NEVER,
    STRONG_READ,
    TENSOR,
    Access,
    CellShadow,
    Shadow,
    Token,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from .ir import Instruction

# Instructions that write shared or global memory by the async proxy. PTX ISA 9.7.9.25.1.
BY_ASYNC_PROXY = ("cp", "clusterlaunchcontrol")


class Order:
    """The events of one launch and the checks. `report` receives (error class, message)."""

    def __init__(self, report: Callable[[type, str], None], instructions: list[Instruction]) -> None:
        self.report = report
        self.instructions = instructions
        self.kinds = bytearray((0, 0, 0))
        self.tensor_events = 0
        self.owners: list[str] = ["nobody", "the host", "an mbarrier"]
        self.sets: list[tuple[int, ...]] = [()]
        self._numbers: dict[tuple[int, ...], int] = {(): 0}
        self._added: dict[tuple[int, int], int] = {}
        self.lanes_of: dict[int, int] = {}  # event of a warp -> lanes that took part in it
        self.map_fences: dict[int, list[int]] = {}  # write of a tensor map -> the fences after it (map_fences.py)
        self.variables: dict[tuple[str, int], Token] = {}  # strong accesses: location -> released knowledge
        # Set around a store: granules -> which of them it leaves as they are.
        self.unchanged: Callable[[np.ndarray], np.ndarray] | None = None
        self._pairs: set[tuple[int, int]] = set()
        self._allocations = [i.index for i in instructions if i.op == "tcgen05" and i.mods[0] == "alloc"]

    def _generic(self, event: int) -> bool:
        """Of the generic proxy: asynchronous reads need a proxy fence after it."""
        return self.kinds[event] in (GENERIC, COPY)

    def new(self, kind: int, owner: str) -> int:
        if kind == TENSOR:
            self.tensor_events |= 1 << len(self.kinds)
        self.kinds.append(kind)
        self.owners.append(owner)
        return len(self.kinds) - 1

    # Generic accesses -------------------------------------------------------------------------------------------------
    def generic(
        self,
        actor: Actor,
        lanes: int,
        shadow: Shadow,
        index: np.ndarray,
        lane_of: np.ndarray,
        write: bool,
        instruction: Instruction,
        atomic: bool = False,
    ) -> None:
        """An access by ld, st, atom, ... `index` [n] or [n, k] granules, `lane_of` [n] or [n, 1] the lane of each row.

        `atomic`: a strong access (atomics, relaxed, acquire, release, volatile), unordered with other strong ones.
        """
        event = actor.event(lanes, GENERIC if write or not atomic else STRONG_READ, atomic)
        packed = event << INDEX_BITS | instruction.index
        values = shadow.writer[index]
        found = set(values.ravel().tolist())
        if not found <= actor.checked:
            self._check_writes(actor, shadow, index, lane_of, values, found, write, instruction)
        if shadow.atomics is not None and not atomic:
            self._check_set(actor, shadow, shadow.atomics, index, lane_of, write, instruction, "an atomic")
        if write:
            self._check_set(actor, shadow, shadow.readers, index, lane_of, write, instruction, "a read")
        if atomic and shadow.atomics is None:
            shadow.atomics = np.zeros(len(shadow.writer), np.int32)
        if atomic:
            assert shadow.atomics is not None
            self._add(actor, shadow.atomics, index, packed)
        if atomic and write:
            fresh = values < HOST << INDEX_BITS
            if fresh.any():
                shadow.writer[index] = np.where(fresh, HOST << INDEX_BITS, values)
        elif write:
            shadow.writer[index] = packed
            shadow.lane[index] = lane_of
            shadow.readers[index] = 0
            if shadow.atomics is not None:
                shadow.atomics[index] = 0
        elif not atomic:
            self._add(actor, shadow.readers, index, packed)

    def _add(self, actor: Actor, table: np.ndarray, index: np.ndarray | slice, packed: int) -> None:
        numbers = table[index]
        old = set(numbers.ravel().tolist())
        if len(old) == 1:
            table[index] = self._with(actor, old.pop(), packed)
            return
        fresh = numbers.copy()
        for number in old:
            fresh[numbers == number] = self._with(actor, number, packed)
        table[index] = fresh

    def _with(self, actor: Actor, number: int, packed: int) -> int:
        """Number of the set with one more access; accesses that happened before it are implied and left out."""
        key = (number, packed)
        result = self._added.get(key)
        if result is None:
            event = packed >> INDEX_BITS
            lanes = actor.unsynced.get(event, 0)
            kept = []
            for other in self.sets[number]:
                e = other >> INDEX_BITS
                implied = e == event or actor.known >> e & 1 or (e in actor.unsynced and not actor.unsynced[e] & ~lanes)
                if not implied:
                    kept.append(other)
            result = self._added[key] = self._number((*kept, packed))
        return result

    def _number(self, members: tuple[int, ...]) -> int:
        """Number of a set of accesses; the same set has the same."""
        number = self._numbers.setdefault(members, len(self.sets))
        if number == len(self.sets):
            self.sets.append(members)
        return number

    def _check_writes(
        self,
        actor: Actor,
        shadow: Shadow,
        index: np.ndarray,
        lane_of: np.ndarray,
        values: np.ndarray,
        found: set[int],
        write: bool,
        instruction: Instruction,
    ) -> None:
        for value in found - actor.checked:
            event = value >> INDEX_BITS
            if event == NEVER:
                if not write or instruction.op in ("atom", "red"):
                    self._unwritten(actor.label, shadow, _first(shadow, index, values == value), instruction)
                continue
            if event == BARRIER:
                self._occupied(actor.label, shadow, _first(shadow, index, values == value), instruction)
                continue
            if actor.known >> event & 1:
                actor.checked.add(value)
                continue
            hit = values == value
            lanes = np.broadcast_to(lane_of, values.shape)[hit]
            writers = shadow.lane[index][hit]
            if event in actor.unsynced and (writers == lanes).all():
                continue
            pairs = list(zip(lanes.tolist(), writers.tolist(), strict=True))
            bad = {pair for pair in set(pairs) if not actor.knows(pair[0], event, pair[1])}
            if not bad:
                continue
            places = np.broadcast_to(index, values.shape)[hit][[pair in bad for pair in pairs]]
            same = write and self.kinds[event] == GENERIC and self.unchanged is not None
            error = SameValueRace if same and self.unchanged(places).all() else RaceError  # type: ignore[misc]
            self._race(actor.label, shadow, places.flat[0], write, instruction, value, "a write", error)

    def _check_set(
        self,
        actor: Actor,
        shadow: Shadow,
        table: np.ndarray,
        index: np.ndarray,
        lane_of: np.ndarray,
        write: bool,
        instruction: Instruction,
        what: str,
    ) -> None:
        numbers = table[index]
        found = set(numbers.ravel().tolist())
        if found <= actor.checked_sets:
            return
        for number in found - actor.checked_sets:
            certain = True
            for value in self.sets[number]:
                event = value >> INDEX_BITS
                if actor.known >> event & 1:
                    continue
                certain = False
                if not write and self.kinds[event] == STRONG_READ:
                    continue
                if any(t.known >> event & 1 for t in actor.extra.values()):
                    continue
                # Which lane read is not kept, only which lanes did: enough where none of them is here now.
                owners = actor.unsynced.get(event)
                if owners is not None:
                    here = set(np.broadcast_to(lane_of, numbers.shape)[numbers == number].tolist())
                    if owners == actor.all_lanes or any(owners >> lane & 1 for lane in here):
                        continue
                granule = np.broadcast_to(index, numbers.shape)[numbers == number].flat[0]
                self._race(actor.label, shadow, granule, write, instruction, value, what)
            if certain:
                actor.checked_sets.add(number)

    # Asynchronous operations ------------------------------------------------------------------------------------------
    def asynchronous(
        self,
        actor: Actor,
        lanes: int,
        accesses: Iterable[Access],
        instruction: Instruction,
        kind: int = ASYNC,
        ordered: int = 0,
        title: str = "",
    ) -> Token:
        """Checks an operation issued by these lanes; returns what its completion carries.

        `ordered`: events that precede it by the rules of its engine, beyond what the issuing threads know.
        """
        base = actor.release(lanes)
        label = f"{title or instruction.name} issued by {actor.label}"
        event = self.new(kind, label)
        known = base.known | ordered
        for access in accesses:
            self._asynchronous_access(actor, access, known, base, event, instruction, label, kind, ordered)
        return Token(known | 1 << event, base.proxied, base.before)

    def _asynchronous_access(
        self,
        actor: Actor,
        access: Access,
        known: int,
        base: Token,
        event: int,
        instruction: Instruction,
        label: str,
        kind: int,
        ordered: int,
    ) -> None:
        shadow, index = access.shadow, access.index
        packed = event << INDEX_BITS | instruction.index
        values = shadow.writer[index]
        for value in _distinct(values):
            e = value >> INDEX_BITS
            if e == BARRIER:
                self._occupied(label, shadow, _first(shadow, index, values == value), instruction)
            elif value not in actor.checked and not known >> e & 1:
                self._race(
                    label, shadow, _first(shadow, index, values == value), access.write, instruction, value, "a write"
                )
            elif e == NEVER and (not access.write):
                self._unwritten(label, shadow, _first(shadow, index, values == value), instruction)
            elif not access.write and access.proxy and self._generic(e) and value not in actor.checked_proxy:
                if base.proxied >> e & 1:
                    actor.checked_proxy.add(value)
                else:
                    self._proxy(label, shadow, _first(shadow, index, values == value), instruction, value)
            elif kind == TENSOR and self.kinds[e] == TENSOR:
                self._tcgen_fence(actor, e, ordered, shadow, index, values == value, label, instruction, value)
        if access.write:
            self._check_sets(shadow, shadow.readers, access, known, label, instruction, "a read", actor, ordered, kind)
        if access.write and access.proxy and instruction.op in BY_ASYNC_PROXY:
            self._check_reuse(shadow, index, values, base, label, instruction)
        if shadow.atomics is not None and not access.atomic:
            self._check_sets(
                shadow, shadow.atomics, access, known, label, instruction, "a reduction", actor, ordered, kind
            )
        if access.write and access.atomic:
            if shadow.atomics is None:
                shadow.atomics = np.zeros(len(shadow.writer), np.int32)
            self._add_async(shadow.atomics, index, packed, known)
        elif access.write:
            shadow.writer[index] = packed
            shadow.readers[index] = 0
            if shadow.atomics is not None:
                shadow.atomics[index] = 0
        else:
            self._add_async(shadow.readers, index, packed, known)

    def _check_sets(
        self,
        shadow: Shadow,
        table: np.ndarray,
        access: Access,
        known: int,
        label: str,
        instruction: Instruction,
        what: str,
        actor: Actor,
        ordered: int,
        kind: int,
    ) -> None:
        numbers = table[access.index]
        for number in _distinct(numbers):
            for value in self.sets[number]:
                e = value >> INDEX_BITS
                hit = numbers == number
                if not access.write and self.kinds[e] == STRONG_READ:
                    continue
                if not known >> e & 1:
                    self._race(label, shadow, _first(shadow, access.index, hit), access.write, instruction, value, what)
                elif kind == TENSOR and self.kinds[e] == TENSOR:
                    self._tcgen_fence(actor, e, ordered, shadow, access.index, hit, label, instruction, value)

    def _add_async(self, table: np.ndarray, index: np.ndarray | slice, packed: int, known: int) -> None:
        numbers = table[index]
        old = _distinct(numbers)
        fresh = numbers if len(old) == 1 else numbers.copy()
        for number in old:
            key = (number, packed)
            result = self._added.get(key)
            if result is None:
                kept = (v for v in self.sets[number] if not known >> (v >> INDEX_BITS) & 1)
                result = self._added[key] = self._number((*kept, packed))
            if len(old) == 1:
                table[index] = result
                return
            fresh[numbers == number] = result
        table[index] = fresh

    def after_end(self, shadow: Shadow, label: str, known: int) -> None:
        """Shared memory ends with its block: what other blocks did there must have happened before.

        `label` of the block, `known` to its threads when they ended. PTX ISA, "Distributed shared memory".
        """
        tables = [("a read", shadow.readers), ("an atomic", shadow.atomics)]
        found = [("a write", int(v)) for v in np.unique(shadow.writer)]
        found += [
            (what, v) for what, table in tables if table is not None for n in np.unique(table) for v in self.sets[n]
        ]
        for what, value in found:
            event = value >> INDEX_BITS
            if event > BARRIER and not known >> event & 1 and not self.owners[event].endswith(label):
                self.report(
                    RaceError,
                    f"race on {shadow.label}\n  now:    {label} ends\n  before: {self.describe(value, what)}\n"
                    f"  missing: a barrier.cluster, or a wait by {label}, after it",
                )
                return

    # Strong accesses: a location that is synchronised through ---------------------------------------------------------
    def publish(self, memory: str, location: int, token: Token) -> None:
        key = (memory, location)
        self.variables[key] = self.variables.get(key, EMPTY) | token

    def published(self, memory: str, location: int) -> Token:
        return self.variables.get((memory, location), EMPTY)

    # Messages ---------------------------------------------------------------------------------------------------------
    def describe(self, value: int, what: str) -> str:
        event, index = value >> INDEX_BITS, value & INDEX_MASK
        where = "" if event <= BARRIER else f"\n          {self.instructions[index].where()}"
        return f"{what} by {self.owners[event]}{where}"

    def _unwritten(self, label: str, shadow: Shadow, granule: int, instruction: Instruction) -> None:
        where = shadow.locate(granule)
        self.report(UninitialisedError, f"{where} read before anything wrote it by {label}\n  {instruction.where()}")

    def _occupied(self, label: str, shadow: Shadow, granule: int, instruction: Instruction) -> None:
        where = shadow.locate(granule)
        self.report(BarrierError, f"{where} holds a live mbarrier; {label} accesses it\n  {instruction.where()}")

    def _race(
        self,
        label: str,
        shadow: Shadow,
        granule: int,
        write: bool,
        instruction: Instruction,
        value: int,
        what: str,
        error: type = RaceError,
    ) -> None:
        event = value >> INDEX_BITS
        if error is SameValueRace and self._noted(instruction, value):
            return
        if shadow.label == "global memory" and self.kinds[event] in (GENERIC, STRONG_READ):
            missing = (
                f"a barrier, or a release by {self.owners[event]} after it (a fence and then a strong write or an "
                f"atomic) that {label} acquires before this (sees it, then a fence)"
            )
        elif self.kinds[event] in (GENERIC, STRONG_READ):
            missing = f"a barrier that {self.owners[event]} arrives at after it and {label} waits for before this"
        else:
            missing = (
                f"a wait, by {label} or by somebody it synchronised with since, for the completion of the earlier one"
            )
        self.report(
            error,
            f"race on {shadow.locate(granule)}\n"
            f"  now:    {'a write' if write else 'a read'} by {label}\n          {instruction.where()}\n"
            f"  before: {self.describe(value, what)}\n  missing: {missing}",
        )

    def _noted(self, instruction: Instruction, value: int) -> bool:
        """One note is enough for a pair of instructions where correct programs have many."""
        pair = (instruction.index, value & INDEX_MASK)
        known = pair in self._pairs
        self._pairs.add(pair)
        return known

    def _proxy(self, label: str, shadow: Shadow, granule: int, instruction: Instruction, value: int) -> None:
        self.report(
            ProxyError,
            f"{shadow.locate(granule)}: an asynchronous read of what the generic proxy wrote\n"
            f"  now:    a read by {label}\n          {instruction.where()}\n"
            f"  before: {self.describe(value, 'a write')}\n"
            f"  missing: fence.proxy.async after the write, before the barrier that orders the two",
        )

    def _check_reuse(
        self,
        shadow: Shadow,
        index: np.ndarray | slice,
        values: np.ndarray,
        base: Token,
        label: str,
        instruction: Instruction,
    ) -> None:
        """What the generic proxy did at a place before the async proxy writes there."""
        numbers = shadow.readers[index]
        found = [(values == v, v, "a write") for v in _distinct(values)]
        found += [(numbers == n, v, "a read") for n in _distinct(numbers) for v in self.sets[n]]
        for hit, value, what in found:
            event = value >> INDEX_BITS
            if not self._generic(event) or base.proxied >> event & 1:
                continue
            # The word with the address of tensor memory becomes part of a buffer in all that Triton makes.
            hit = hit & ~np.isin(values & INDEX_MASK, self._allocations)
            if hit.any() and not self._noted(instruction, value):
                self.report(
                    ProxyReuseError,
                    f"{shadow.locate(_first(shadow, index, hit))}: an asynchronous write over {what} of the generic "
                    f"proxy\n  now:    {label}\n          {instruction.where()}\n"
                    f"  before: {self.describe(value, what)}\n"
                    f"  missing: fence.proxy.async after that, before the barrier that orders the two",
                )

    def _tcgen_fence(
        self,
        actor: Actor,
        event: int,
        ordered: int,
        shadow: Shadow,
        index: np.ndarray | slice,
        hit: np.ndarray,
        label: str,
        instruction: Instruction,
        value: int,
    ) -> None:
        if actor.after >> event & 1 or ordered >> event & 1 or self.owners[event].endswith(actor.label):
            return
        if self._noted(instruction, value):
            return
        self.report(
            TcgenFenceError,
            f"{shadow.locate(_first(shadow, index, hit))}: ordered by a barrier alone\n"
            f"  now:    {label}\n          {instruction.where()}\n  before: {self.describe(value, 'an access')}\n"
            f"  missing: tcgen05.fence::before_thread_sync (or a commit) there, tcgen05.fence::after_thread_sync here",
        )


def _distinct(values: np.ndarray) -> list[int]:
    """The different values, fast where all are the same."""
    if values.size == 0:
        return []
    first = values.flat[0]
    if (values == first).all():
        return [int(first)]
    if values.size <= 64:
        return list(set(values.ravel().tolist()))
    return np.unique(values).tolist()


def _first(shadow: Shadow, index: np.ndarray | slice, hit: np.ndarray) -> int:
    if isinstance(index, slice):
        index = np.arange(len(shadow.writer))[index]
    return int(np.broadcast_to(index, hit.shape)[hit].flat[0])


__all__ = [
    "ASYNC",
    "BARRIER",
    "COPY",
    "EMPTY",
    "GENERIC",
    "HOST",
    "INDEX_BITS",
    "TENSOR",
    "Access",
    "Actor",
    "CellShadow",
    "Order",
    "Shadow",
    "Token",
    "bits",
]
