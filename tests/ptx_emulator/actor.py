"""What the threads of a warp know: sets of events (hb.py), for the whole warp and beyond that for single lanes.

A release by some lanes carries what those lanes did. An event that several lanes took part in is known to others when
every one of these lanes has released its share (a barrier that each thread arrives at); until then its parts are kept,
and a reader that knows lane 3's part may read what lane 3 wrote.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .shadow import EMPTY, GENERIC, HOST, NEVER, NO_PARTS, Token, merged

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .hb import Order


class Actor:
    """What the threads of one warp know."""

    def __init__(self, order: Order, label: str, lanes: int) -> None:
        self.order = order
        self.label = label
        self.all_lanes = lanes  # bits of the threads that exist
        self.known = (1 << HOST) | (1 << NEVER)
        self.proxied = 1 << HOST
        self.before = 0
        self.after = 0
        self.extra: dict[int, Token] = {}  # lane -> what it knows beyond the warp
        self.parts = NO_PARTS  # events of which all lanes know what some lanes did
        self.open: dict[
            tuple[int, int, bool], int
        ] = {}  # (lanes, kind, strong) -> event that accesses of now belong to
        self.unsynced: dict[int, int] = {}  # own event -> its lanes, until the warp synchronises
        self.checked: set[int] = set()  # values of Shadow.writer found to be known
        self.checked_sets: set[int] = {0}
        self.checked_proxy: set[int] = set()
        self.ended = 0  # events that a thread knew when it ended

    # Events of this warp ----------------------------------------------------------------------------------------------
    def event(self, lanes: int, kind: int = GENERIC, strong: bool = False) -> int:
        key = (lanes, kind, strong)
        event = self.open.get(key)
        if event is None:
            event = self.order.new(kind, self.label)
            self.open[key] = event
            self.unsynced[event] = self.order.lanes_of[event] = lanes
        return event

    def release(self, lanes: int) -> Token:
        """What a release by these lanes carries; later accesses are another event."""
        known, parts = self.known, self.parts
        if self.unsynced:
            some = {}
            for event, owners in self.unsynced.items():
                if not owners & ~lanes:
                    known |= 1 << event
                elif owners & lanes:
                    some[event] = owners & lanes
            self.open.clear()
            parts = merged(parts, some) if some else parts
        token = Token(known, self.proxied, self.before, parts)
        if self.extra:
            for lane, more in self.extra.items():
                if lanes >> lane & 1:
                    token |= more
        return token

    def acquire(self, lanes: int, token: Token) -> None:
        if lanes == self.all_lanes:
            self.known |= token.known
            self.proxied |= token.proxied
            self.before |= token.before
            if token.parts:
                self._join(token.parts)
            return
        for lane in bits(lanes):
            self.extra[lane] = self.extra.get(lane, EMPTY) | token

    def synchronise(self, lanes: int) -> None:
        """The threads of `lanes` have met, and each sees what the others did before."""
        if not self.unsynced and not self.extra:
            return
        token = self.release(lanes)
        if lanes == self.all_lanes:
            self.known, self.proxied, self.before, self.parts = token
            self.unsynced.clear()
            self.extra.clear()
            self._join(NO_PARTS)
        else:
            self.acquire(lanes, token)

    def _join(self, parts: dict[int, int]) -> None:
        """All lanes learn parts of events; an event whose every lane released its share is known."""
        self.parts = merged(self.parts, parts)
        whole = [e for e, lanes in self.parts.items() if not self.order.lanes_of[e] & ~lanes]
        if whole:
            self.known |= sum(1 << e for e in whole)
            self.parts = {e: lanes for e, lanes in self.parts.items() if e not in whole}

    def knows(self, lane: int, event: int, writer: int) -> bool:
        """Has this lane seen what lane `writer` did in an event (of its own or of another warp)."""
        if event in self.unsynced and lane == writer:
            return True
        token = self.extra.get(lane, EMPTY)
        return bool(token.known >> event & 1 or (self.parts.get(event, 0) | token.parts.get(event, 0)) >> writer & 1)

    def leave(self, live: int) -> None:
        """Lanes have ended. Barriers count warps, so the lanes that go on speak for what those did."""
        self.all_lanes = live
        for lane, token in self.extra.items():
            self.ended |= 0 if live >> lane & 1 else token.known
        if not live:
            self.ended |= self.known | sum(1 << event for event in self.unsynced)
        for event in self.unsynced if live else ():
            self.unsynced[event] &= live
            self.order.lanes_of[event] &= live
        self.extra = {lane: token for lane, token in self.extra.items() if live >> lane & 1}

    def fence_proxy(self, lanes: int) -> None:
        self.acquire(lanes, Token(0, self.release(lanes).known, 0))

    def fence_before(self, lanes: int) -> None:
        self.acquire(lanes, Token(0, 0, self.release(lanes).known))

    def fence_after(self, lanes: int, taken: Token = EMPTY) -> None:
        """tcgen05.fence::after_thread_sync; `taken`: what relaxed waits saw, of which it orders the tcgen05 part."""
        tensor = Token(taken.known & self.order.tensor_events, 0, taken.before)
        if tensor.known:
            self.acquire(lanes, tensor)
        self.after |= self.release(lanes).before | tensor.before


def bits(mask: int) -> Iterable[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
