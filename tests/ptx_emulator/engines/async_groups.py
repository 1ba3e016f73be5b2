"""Async-groups: what commit_group and wait_group of cp.async and of bulk copies keep for each thread.

PTX ISA 9.7.9.25.1.1. Kept by warp, a bit for each thread: mostly all threads, or one elected thread, go together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..hb import EMPTY, Token, bits

if TYPE_CHECKING:
    from ..cta import AsyncOp
    from ..ir import Instruction
    from ..warp import Warp


class Entry:
    """One asynchronous operation, for the threads that issued it together."""

    __slots__ = ("instruction", "lanes", "read", "read_token", "token", "unread", "write")

    def __init__(
        self, lanes: int, instruction: Instruction, read: AsyncOp, read_token: Token, write: AsyncOp, token: Token
    ) -> None:
        self.lanes = lanes
        self.unread = lanes  # threads that have not waited for the reading of its source
        self.instruction = instruction
        self.read = read
        self.read_token = read_token
        self.write = write
        self.token = token


class Group:
    __slots__ = ("entries", "lanes")

    def __init__(self, lanes: int, entries: list[Entry]) -> None:
        self.lanes = lanes  # threads that committed it and have not seen it complete
        self.entries = entries


class Groups:
    """Of one warp: operations not committed yet, and groups in the order of their commits."""

    def __init__(self) -> None:
        self.open: list[Entry] = []
        self.committed: list[Group] = []

    def commit(self, lanes: int) -> None:
        mine = [e for e in self.open if e.lanes & lanes]
        if all(not e.lanes & ~lanes for e in mine):
            self.open = [e for e in self.open if not e.lanes & lanes] if mine else self.open
            self.committed.append(Group(lanes, mine))
            return
        # Issued together, committed apart: the parts go on as entries of their own.
        parts: list[Entry] = []
        for e in mine:
            part = Entry(e.lanes & lanes, e.instruction, e.read, e.read_token, e.write, e.token)
            part.unread &= e.unread
            e.lanes &= ~lanes
            e.unread &= ~lanes
            parts.append(part)
        self.open = [e for e in self.open if e.lanes]
        self.committed.append(Group(lanes, parts))

    def wait(self, warp: Warp, lanes: int, pending: int, instruction: Instruction, reads: bool = False) -> None:
        """All but the last `pending` groups of each thread complete (`reads`: their reading does). Never blocks."""
        if any(g.lanes & lanes and lanes & ~g.lanes for g in self.committed):
            for lane in bits(lanes):
                self._wait(warp, 1 << lane, pending, instruction, reads)
        else:
            self._wait(warp, lanes, pending, instruction, reads)
        if not reads:
            self.committed = [g for g in self.committed if g.lanes]

    def _wait(self, warp: Warp, lanes: int, pending: int, instruction: Instruction, reads: bool) -> None:
        mine = [g for g in self.committed if g.lanes & lanes]
        token = EMPTY
        for g in mine[: max(0, len(mine) - pending)]:
            for e in g.entries:
                if reads:
                    if e.unread & lanes:
                        e.read.finish()
                        token |= e.read_token
                elif e.lanes & lanes:
                    e.write.finish()
                    token |= e.token
                e.unread &= ~lanes
            if not reads:
                g.lanes &= ~lanes
        if token is not EMPTY:
            warp.learn(lanes, token, instruction)

    def unread(self) -> list[Entry]:
        """Operations whose sources may still be read."""
        return [e for e in (*self.open, *(e for g in self.committed for e in g.entries)) if e.unread]


def groups_of(warp: Warp, kind: str) -> Groups:
    """Of kind "bulk" or "cp.async"; the two are apart."""
    found = warp.state.get(kind)
    if found is None:
        found = warp.state[kind] = Groups()
    return found
