"""What the tcgen05 engines share: CTA pairs, tensor memory addresses, footprints, the order of the pipeline.

Tensor memory: 128 lanes x 512 columns of 32 bits for each block; an address is lane << 16 | column. PTX ISA 9.7.16.1.
A footprint is a list of `CellShadow` granules: 16 lanes by one column, (lane // 16) * 512 + column.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

import numpy as np

from ..cta import TENSOR_COLUMNS, TENSOR_LANES
from ..errors import ConvergenceError, TensorMemoryError
from ..ir import Instruction
from ..registry import Unsupported
from ..shadow import EMPTY, GENERIC, Access, Token

if TYPE_CHECKING:
    from ..cta import Cta
    from ..hb import Actor
    from ..warp import Warp

GRANULE_LANES = 16
QUEUE = "mma"  # the tensor core works through mma, cp and commit of a block in the order of their issue


def cta_group(i: Instruction) -> int:
    """1 or 2, from .cta_group::N."""
    for m in i.mods:
        if m.startswith("cta_group::"):
            if m in ("cta_group::1", "cta_group::2"):
                return int(m[-1])
            raise Unsupported(f".{m}: .cta_group::1 and .cta_group::2 exist")
    raise Unsupported(".cta_group::1 or .cta_group::2 is missing")


def refuse_modifiers(i: Instruction, allowed: set[str]) -> None:
    """Every modifier after the operation's name must be in `allowed`."""
    for m in i.mods[1:]:
        if m not in allowed:
            raise Unsupported(f"modifier .{m} of tcgen05.{i.mods[0]} is not modelled")


def aligned(warp: Warp, mask: np.ndarray | None, i: Instruction) -> None:
    """.sync.aligned: the whole warp executes the instruction together, and no thread of it has exited."""
    if not warp.converged(mask):
        have = warp.bits(mask)
        warp.cta.report(
            ConvergenceError,
            f"{warp.label}: tcgen05.{i.mods[0]} is .aligned, but only lanes {have:#x} of {warp.live:#x} execute it\n"
            f"  {i.where()}",
        )
    elif warp.live != 0xFFFFFFFF:
        warp.cta.report(
            ConvergenceError,
            f"{warp.label}: tcgen05.{i.mods[0]} needs 32 threads, only lanes {warp.live:#x} exist\n  {i.where()}",
        )


def blocks_of(warp: Warp, group: int, i: Instruction, alive: bool = True) -> list[Cta]:
    """The blocks an instruction works on: its own, or the pair with the even rank first. Empty after a finding."""
    cta = warp.cta
    if group == 1:
        return [cta]
    ctas = cta.cluster.ctas
    if cta.rank ^ 1 >= len(ctas):
        cta.report(
            TensorMemoryError,
            f"{warp.label}: .cta_group::2 in a cluster of {len(ctas)}: rank {cta.rank} has no peer\n  {i.where()}",
        )
        return []
    peer = ctas[cta.rank ^ 1]
    if alive and peer.live == 0:
        cta.report(
            TensorMemoryError,
            f"{warp.label}: .cta_group::2 after the peer block {peer.block} has ended\n  {i.where()}",
        )
        return []
    return [cta, peer] if cta.rank % 2 == 0 else [peer, cta]


def split_address(address: int) -> tuple[int, int]:
    """(lane, column) of a tensor memory address."""
    return address >> 16 & 0xFFFF, address & 0xFFFF


def check_cells(
    warp: Warp, cta: Cta, what: str, lanes: tuple[int, int], columns: tuple[int, int], i: Instruction
) -> bool:
    """Whether lanes[0]..lanes[1]-1 by columns[0]..columns[1]-1 exist and are allocated in `cta`; else a finding."""
    (low_lane, high_lane), (low, high) = lanes, columns
    place = f"{what} at lanes {low_lane}..{high_lane - 1}, columns {low}..{high - 1}"
    if high_lane > TENSOR_LANES or high > TENSOR_COLUMNS:
        problem = f"{place}: tensor memory has {TENSOR_LANES} lanes and {TENSOR_COLUMNS} columns"
    elif not cta.tensor_columns[low:high].all():
        missing = low + int(np.argmin(cta.tensor_columns[low:high]))
        problem = f"{place}: column {missing} is not allocated; {allocated(cta)}"
    else:
        return True
    warp.cta.report(TensorMemoryError, f"{warp.label}: {problem}\n  {i.where()}")
    return False


def allocated(cta: Cta) -> str:
    """The allocations of a block in words."""
    found: dict[int, int] = cta.state.get("tcgen05.allocations", {})
    if not found:
        return "nothing is allocated"
    return "allocated: " + ", ".join(f"{start}..{start + n - 1}" for start, n in sorted(found.items()))


def granules(lane: np.ndarray, column: np.ndarray) -> np.ndarray:
    """Footprint of cells, each granule once."""
    return np.unique(lane.ravel() // GRANULE_LANES * TENSOR_COLUMNS + column.ravel())


def granule_base(lane: int, column: int) -> int:
    """What moves a footprint relative to (0, 0) to an address; `lane` a multiple of 16."""
    return lane // GRANULE_LANES * TENSOR_COLUMNS + column


def tensor_access(cta: Cta, index: np.ndarray, write: bool) -> Access:
    assert cta.tensor_shadow is not None
    return Access(cta.tensor_shadow, index, write, proxy=False)


class Pipeline:
    """Which operations of a tensor core precede which, by the rules of its pipeline (PTX ISA 9.7.16.6.2).

    Operations with a common key go in order, where the later one's issuer knows that the earlier one was issued: it is
    the same thread, or it synchronised with that thread since. A *marker* event stands for "issued up to here"; it is
    an ordinary event of the issuing lanes, so barriers carry it.
    """

    def __init__(self) -> None:
        # key -> issuing thread -> (marker, what the last operation under it knew when done), in order of issue
        self.issued: dict[Hashable, dict[tuple[int, int, int], list[tuple[int, int]]]] = {}

    def before(self, warp: Warp, lanes: int, keys: tuple[Hashable, ...]) -> int:
        """Events that precede an operation issued now by these lanes."""
        assert warp.actor is not None
        result = 0
        knows: int | None = None
        thread = (warp.cta.rank, warp.number, lanes)
        for key in keys:
            for other, issued in self.issued.get(key, {}).items():
                if other == thread:
                    result |= issued[-1][1]
                    continue
                if knows is None:
                    knows = warp.actor.release(lanes).known
                for marker, known in reversed(issued):
                    if knows >> marker & 1:
                        result |= known
                        break
        return result

    def add(self, warp: Warp, lanes: int, key: Hashable, token: Token, marker: int | None) -> None:
        """Notes an operation. `marker`: what `open_marker` gave before its check."""
        actor = warp.actor
        assert actor is not None
        if marker is None:
            marker = actor.order.new(GENERIC, actor.label)
            actor.unsynced[marker] = lanes
        # Kept among the open events: a release of the thread closes it, and operations after that get another.
        actor.open[_marker_key(lanes)] = marker
        issued = self.issued.setdefault(key, {}).setdefault((warp.cta.rank, warp.number, lanes), [])
        if issued and issued[-1][0] == marker:
            issued[-1] = (marker, issued[-1][1] | token.known)
        else:
            issued.append((marker, token.known))


def open_marker(actor: Actor, lanes: int) -> int | None:
    """The marker under which these lanes issued last, if they released nothing since."""
    return actor.open.get(_marker_key(lanes))


def _marker_key(lanes: int) -> tuple[int, int, bool]:
    return ~lanes, GENERIC, False


def pipeline_of(ctas: list[Cta]) -> Pipeline:
    """One for a block, one for a pair (with its even block)."""
    return ctas[0].state.setdefault("tcgen05.pipeline", Pipeline())


def issued_token(warp: Warp, lanes: int) -> Token:
    """What the completion of all mma and cp of a thread so far tells."""
    return warp.state.setdefault("tcgen05.issued", {}).get(lanes, EMPTY)


def add_issued(warp: Warp, lanes: int, token: Token) -> None:
    table = warp.state.setdefault("tcgen05.issued", {})
    table[lanes] = table.get(lanes, EMPTY) | token
