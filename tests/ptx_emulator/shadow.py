"""What is remembered of memory: for every granule its last write, the reads since, and unordered atomics.

A write is packed as event << INDEX_BITS | number of the instruction, so that a report can name both.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

NEVER, HOST, BARRIER = 0, 1, 2  # events: unwritten, written before the launch, an mbarrier lives here
INDEX_BITS = 20
INDEX_MASK = (1 << INDEX_BITS) - 1
# Kinds of events; TENSOR: tcgen05 operations; COPY: cp.async, which is asynchronous but of the generic proxy;
# STRONG_READ: relaxed, acquire and volatile loads, which no strong write races with.
GENERIC, ASYNC, TENSOR, COPY, STRONG_READ = 1, 2, 3, 4, 5


# Of no event a part. Nobody may change it: tokens share it.
NO_PARTS: dict[int, int] = {}


class Token(NamedTuple):
    """What a release carries: sets of events, as integers."""

    known: int = 0
    proxied: int = 0
    before: int = 0
    parts: dict[int, int] = NO_PARTS  # event of which only some lanes released their share -> those lanes

    def __or__(self, other: Token) -> Token:
        parts = merged(self.parts, other.parts) if other.parts else self.parts
        return Token(self.known | other.known, self.proxied | other.proxied, self.before | other.before, parts)


def merged(a: dict[int, int], b: dict[int, int]) -> dict[int, int]:
    if not a:
        return b
    return a | {event: lanes | a.get(event, 0) for event, lanes in b.items()}


EMPTY = Token()


class Shadow:
    """What is remembered of a memory, an element a granule."""

    def __init__(self, label: str, size: int, granule: int, written: np.ndarray | None = None) -> None:
        self.label = label
        self.granule = granule
        self.shift = granule.bit_length() - 1
        n = -(-size // granule)
        self.writer = np.zeros(n, np.int64)  # event << INDEX_BITS | instruction
        self.lane = np.zeros(n, np.int8)  # of the last generic write
        self.readers = np.zeros(n, np.int32)  # number of a set of reads since that write
        self.atomics: np.ndarray | None = None  # the same of atomics, made when first needed
        if written is not None:
            grain = written[: n * granule].reshape(-1, granule) if granule > 1 else written[:n]
            self.writer[(grain.all(1) if granule > 1 else grain)] = HOST << INDEX_BITS

    def locate(self, granule: int) -> str:
        start = int(granule) * self.granule
        return f"{self.label} bytes {start:#x}..{start + self.granule - 1:#x}"


class CellShadow(Shadow):
    """Of tensor memory: granules of 16 lanes by one column, index = (lane // 16) * 512 + column."""

    def __init__(self, label: str) -> None:
        super().__init__(label, 8 * 512, 1)

    def locate(self, granule: int) -> str:
        row, column = divmod(int(granule), 512)
        return f"{self.label} lanes {16 * row}..{16 * row + 15}, column {column}"


class Access(NamedTuple):
    """A part of an asynchronous operation's footprint."""

    shadow: Shadow
    index: np.ndarray | slice  # type: ignore[assignment]  # granules; tuple.index is not needed
    write: bool
    atomic: bool = False  # a reduction: unordered with other reductions
    proxy: bool = True  # goes through the async proxy (needs a proxy fence after generic writes)
