"""A second opinion on races: every access is compared with all earlier ones of its place, nothing is forgotten.

The checker keeps of each place the last write and the reads since, groups lanes, and remembers what it has found to be
known. Here every pair of conflicting accesses is looked at, lane by lane. Slow; used to prove mutants redundant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..actor import Actor
from ..hb import BY_ASYNC_PROXY, COPY, EMPTY, GENERIC, STRONG_READ, TENSOR, Access, Order, Shadow, Token

if TYPE_CHECKING:
    from ..ir import Instruction

ASYNC_LANE = -1


class Entry(NamedTuple):
    """One access to a place."""

    event: int
    lane: int  # ASYNC_LANE for an engine
    write: bool
    atomic: bool
    line: int


class Pair(NamedTuple):
    """Two accesses that nothing orders: PTX lines, and what is missing between them."""

    before: int
    now: int
    missing: str  # "order", "proxy fence" or "tcgen05 fence"


class History(Order):
    """Keeps all accesses of a launch; `unordered` has the pairs that no happens-before edge orders."""

    def __init__(self, report: Callable[[type, str], None], instructions: list[Instruction]) -> None:
        super().__init__(report, instructions)
        self.tables: dict[int, np.ndarray] = {}
        self.shadows: list[Shadow] = []  # kept alive: tables are found by identity
        self.entries: list[tuple[Entry, ...]] = [()]
        self.events: list[tuple[int, int]] = [(0, 0)]  # of each set of entries: events of its writes, of all
        self.numbers: dict[tuple[Entry, ...], int] = {(): 0}
        self.unordered: set[Pair] = set()

    def _table(self, shadow: Shadow) -> np.ndarray:
        table = self.tables.get(id(shadow))
        if table is None:
            table = self.tables[id(shadow)] = np.zeros(len(shadow.writer), np.int64)
            self.shadows.append(shadow)
        return table

    def _append(self, number: int, entry: Entry) -> int:
        entries = self.entries[number]
        if entry in entries:
            return number
        longer = (*entries, entry)
        found = self.numbers.get(longer)
        if found is None:
            found = self.numbers[longer] = len(self.entries)
            self.entries.append(longer)
            writes, every = self.events[number]
            bit = 1 << entry.event
            self.events.append((writes | bit if entry.write else writes, every | bit))
        return found

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
        super().generic(actor, lanes, shadow, index, lane_of, write, instruction, atomic)
        event = actor.event(lanes, GENERIC if write or not atomic else STRONG_READ, atomic)
        table = self._table(shadow)
        places = np.asarray(index)
        owner = np.broadcast_to(lane_of, places.shape)
        for lane in set(owner.ravel().tolist()):
            mine = places[owner == lane]
            numbers = table[mine]
            for number in set(numbers.tolist()):
                entry = Entry(event, lane, write, atomic, instruction.line)
                self._compare(number, entry, actor.known, partial(self._lane_has_seen, actor, lane))
                table[mine[numbers == number]] = self._append(number, entry)

    def _lane_has_seen(self, actor: Actor, lane: int, entry: Entry) -> bool:
        e = entry.event
        if entry.lane == ASYNC_LANE:
            return bool(actor.extra.get(lane, EMPTY).known >> e & 1)
        return actor.knows(lane, e, entry.lane)

    def _compare(self, number: int, entry: Entry, known: int, seen: Callable[[Entry], bool]) -> None:
        """`known` events need no further question, `seen` answers for others."""
        if not self.events[number][entry.write] & ~known:
            return
        for old in self.entries[number]:
            if known >> old.event & 1:
                continue
            conflict = (old.write or entry.write) and not (old.atomic and entry.atomic)
            if conflict and not seen(old):
                self.unordered.add(Pair(old.line, entry.line, "order"))

    # Asynchronous operations ------------------------------------------------------------------------------------------
    def asynchronous(
        self,
        actor: Actor,
        lanes: int,
        accesses: Iterable[Access],
        instruction: Instruction,
        kind: int = 2,
        ordered: int = 0,
        title: str = "",
    ) -> Token:
        accesses = list(accesses)
        base = actor.release(lanes)
        known = base.known | ordered
        token = super().asynchronous(actor, lanes, accesses, instruction, kind, ordered, title)
        event = len(self.kinds) - 1
        line = instruction.line
        for access in accesses:
            table = self._table(access.shadow)
            numbers = table[access.index]
            entry = Entry(event, ASYNC_LANE, access.write, access.atomic, line)
            changed = numbers.copy()
            for number in np.unique(numbers).tolist():
                self._compare(number, entry, known | 1 << event, lambda e: False)
                if access.proxy and (not access.write or instruction.op in BY_ASYNC_PROXY):
                    self._compare_proxy(number, entry, base.proxied)
                if kind == TENSOR:
                    self._compare_fences(number, entry, actor, ordered)
                changed[numbers == number] = self._append(number, entry)
            table[access.index] = changed
        return token

    def _compare_proxy(self, number: int, entry: Entry, proxied: int) -> None:
        """The async proxy reads what the generic proxy wrote last, and writes over all it did, after a fence only."""
        earlier = [e for e in self.entries[number] if entry.write or e.write]
        for old in earlier if entry.write else earlier[-1:]:
            if self.kinds[old.event] in (GENERIC, COPY) and not proxied >> old.event & 1:
                self.unordered.add(Pair(old.line, entry.line, "proxy fence"))

    def _compare_fences(self, number: int, entry: Entry, actor: Actor, ordered: int) -> None:
        """Tensor memory accesses of different threads need tcgen05.fence, or the order of the pipeline."""
        for old in self.entries[number]:
            conflict = (old.write or entry.write) and self.kinds[old.event] == TENSOR
            fenced = (actor.after | ordered) >> old.event & 1 or self.owners[old.event].endswith(actor.label)
            if conflict and not fenced:
                self.unordered.add(Pair(old.line, entry.line, "tcgen05 fence"))
