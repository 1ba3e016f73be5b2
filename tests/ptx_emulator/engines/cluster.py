"""Clusters: addresses of other blocks' shared memory, barrier.cluster, stores that signal there; and setmaxnreg.

PTX ISA 9.7.9.23-24, 9.7.13.4, 9.7.9.12, 9.7.13.8, 9.7.19.5.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from ..errors import AlignmentError, BarrierError, ConvergenceError, DescriptorError
from ..hb import EMPTY
from ..ir import SIZES, Instruction, Kernel, Reg, Vec
from ..memory import RANK_SHIFT, SHARED_WINDOW
from ..operands import immediate, row, scalar, vector
from ..registry import WAIT, Unsupported, special
from .bulk import COMPLETION, OPERATIONS, SHARED_TYPES, allow, check_alive, check_initialised, completion, each, reducer
from .phases import learn_seen, seen_by

if TYPE_CHECKING:
    from ..schedule import Cluster
    from ..warp import Warp

REGISTERS = 64 * 1024  # of a multiprocessor, 32 bits each
_RANK_BITS = 0xFF


# Addresses ------------------------------------------------------------------------------------------------------------
@special("mapa")
def mapa(kernel: Kernel, i: Instruction) -> Callable:
    """The address of the same place in another block of the cluster."""
    allow(i, ("shared::cluster", "u32", "u64"))
    destination, address, rank = i.args[0], vector(i.args[1], _kind(i)), vector(i.args[2])
    if not isinstance(destination, Reg):
        raise Unsupported(f"destination {destination!r}")

    def run(warp: Warp, mask: np.ndarray | None) -> None:
        given, ranks = address(warp).astype(np.int64), rank(warp).astype(np.int64)
        active = warp.lanes if mask is None else warp.lanes[mask]
        blocks = len(warp.cta.cluster.ctas)
        if (ranks[active] >= blocks).any():
            worst = int(ranks[active].max())
            warp.cta.report(DescriptorError, f"block rank {worst}: the cluster has {blocks} blocks\n  {i.where()}")
        mapped = (given & ~(_RANK_BITS << RANK_SHIFT)) | ranks << RANK_SHIFT
        target = row(warp, destination)
        target[active] = mapped[active].astype(target.dtype)

    return run


@special("getctarank")
def getctarank(kernel: Kernel, i: Instruction) -> Callable:
    allow(i, ("shared::cluster", "u32", "u64"))
    destination, address = i.args[0], vector(i.args[1], _kind(i))
    if not isinstance(destination, Reg):
        raise Unsupported(f"destination {destination!r}")
    generic = not i.has("shared::cluster")

    def run(warp: Warp, mask: np.ndarray | None) -> None:
        given = address(warp).astype(np.int64)
        active = warp.lanes if mask is None else warp.lanes[mask]
        if generic and (given[active] >> 40 != SHARED_WINDOW >> 40).any():
            warp.cta.report(DescriptorError, f"a generic address of no shared memory\n  {i.where()}")
        warp.u32[destination.index][active] = (given[active] >> RANK_SHIFT & _RANK_BITS).astype(np.uint32)

    return run


def _kind(i: Instruction) -> str:
    return "u64" if i.has("u64") else "u32"


# barrier.cluster ------------------------------------------------------------------------------------------------------
class ClusterBarrier:
    """All threads of a cluster that have not exited. A thread arrives, then waits, once a phase."""

    def __init__(self, cluster: Cluster) -> None:
        self.warps = [w for cta in cluster.ctas for w in cta.warps]
        self.phase = 0
        self.arrived = dict.fromkeys(self.warps, 0)  # bits of threads
        self.token = EMPTY
        self.completed = EMPTY
        self.seen = self.told = EMPTY  # what has happened before arrivals, relaxed ones too: phases.py

    def missing(self) -> list[Warp]:
        return [w for w in self.warps if w.live & ~self.arrived[w]]

    def advance(self) -> None:
        """Ends the phase if everybody has come; threads that exited count as arrived."""
        if not self.missing() and any(self.arrived.values()):
            self.phase += 1
            self.arrived = dict.fromkeys(self.warps, 0)
            self.completed, self.token = self.token, EMPTY
            self.told, self.seen = self.seen, EMPTY


def _barrier(warp: Warp) -> ClusterBarrier:
    cluster = warp.cta.cluster
    if cluster.barrier is None:
        cluster.barrier = ClusterBarrier(cluster)
    return cluster.barrier


# Key in Warp.state: the phase that each thread has arrived at, -1 for none.
_PHASES = "barrier.cluster"


def _phases(warp: Warp) -> np.ndarray:
    if _PHASES not in warp.state:
        warp.state[_PHASES] = np.full(32, -1, np.int64)
    return warp.state[_PHASES]


def _aligned(warp: Warp, mask: np.ndarray | None, i: Instruction) -> None:
    if i.has("aligned") and not warp.converged(mask):
        warp.cta.report(ConvergenceError, f"{warp.label}: executed by a part of the warp\n  {i.where()}")


@special("barrier.cluster.arrive")
def arrive(kernel: Kernel, i: Instruction) -> Callable:
    allow(i, ("cluster", "arrive", "release", "relaxed", "aligned"))
    releases = not i.has("relaxed")

    def run(warp: Warp, mask: np.ndarray | None) -> None:
        _aligned(warp, mask, i)
        b, bits, phases = _barrier(warp), warp.bits(mask), _phases(warp)
        active = warp.lanes if mask is None else warp.lanes[mask]
        if (phases[active] >= 0).any():
            warp.cta.report(
                BarrierError, f"{warp.label} arrives at the cluster barrier again before its wait\n  {i.where()}"
            )
        phases[active] = b.phase
        if warp.actor is not None:
            # A relaxed arrival carries what a fence before it made visible (fence.mbarrier_init, fence.acq_rel).
            b.token |= warp.actor.release(bits) if releases else warp.state.get("fenced", EMPTY)
            b.seen |= seen_by(warp, bits)
        b.arrived[warp] |= bits
        b.advance()

    return run


@special("barrier.cluster.wait", kind=WAIT)
def wait(kernel: Kernel, i: Instruction) -> Callable:
    allow(i, ("cluster", "wait", "acquire", "aligned"))

    def run(warp: Warp, mask: np.ndarray | None) -> bool:
        _aligned(warp, mask, i)
        b, phases = _barrier(warp), _phases(warp)
        active = warp.lanes if mask is None else warp.lanes[mask]
        if (phases[active] < 0).any():
            warp.cta.report(
                BarrierError, f"{warp.label} waits at the cluster barrier without having arrived\n  {i.where()}"
            )
            return True
        if (phases[active] == b.phase).any():
            b.advance()
        if (phases[active] == b.phase).any():
            warp.waiting = f"barrier.cluster: not there yet are {', '.join(w.label for w in b.missing())}"
            return False
        phases[active] = -1
        if warp.actor is not None:
            warp.learn(warp.bits(mask), b.completed, i)
            learn_seen(warp, b.told)
        return True

    return run


# Stores and reductions that signal ------------------------------------------------------------------------------------
@special("st.async")
def store_async(kernel: Kernel, i: Instruction) -> Callable:
    """st.async.weak.shared::cluster.mbarrier::complete_tx::bytes{.v2, .v4}.type. PTX ISA 9.7.9.12."""
    allow(i, ("async", "weak", "shared::cluster", COMPLETION, "v2", "v4", i.type))
    return _signalling(i, "")


@special("red.async")
def reduce_async(kernel: Kernel, i: Instruction) -> Callable:
    """red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.op.type. PTX ISA 9.7.13.8."""
    operation = next((m for m in i.mods if m in OPERATIONS), "")
    allow(i, ("async", "relaxed", "cluster", "shared::cluster", COMPLETION, operation, i.type))
    kinds = SHARED_TYPES.get(operation, ())
    if i.type not in kinds and not (operation in ("and", "or", "xor") and i.type in ("u32", "s32")):
        raise Unsupported(f"red.async.{operation}.{i.type}: allowed are {', '.join(kinds)}")
    return _signalling(i, operation)


def _signalling(i: Instruction, operation: str) -> Callable:
    if not i.has(COMPLETION):
        raise Unsupported(f"{i.op}.async without .{COMPLETION}")
    size = SIZES[i.type]
    function = reducer(operation, i.type) if operation else None
    address, place = scalar(i.args[0]), scalar(i.args[2])
    values = [scalar(v) for v in (i.args[1].items if isinstance(i.args[1], Vec) else (i.args[1],))]
    total = size * len(values)
    word = np.dtype(f"u{size}")

    def one(warp: Warp, lane: int) -> None:
        cta, offset = warp.cta.resolve_shared(address(warp, lane))
        home, bar = warp.cta.resolve_shared(place(warp, lane))
        cta.check_shared(offset, total, i)
        if offset % total:
            warp.cta.report(
                AlignmentError, f"shared address {offset:#x}: a multiple of {total} is needed\n  {i.where()}"
            )
            return
        if home is not cta:
            warp.cta.report(
                DescriptorError, f"the mbarrier is in block rank {home.rank}, the data in {cta.rank}\n  {i.where()}"
            )
        check_alive(warp, [cta], i)
        signal = completion(warp, home, bar, i)
        data = np.array([v(warp, lane) & ((1 << 8 * size) - 1) for v in values], word)
        if function is not None and cta.shared.shadow is not None:
            check_initialised(warp.cta, cta.shared_access(offset, total, True), i)
        token = warp.cta.check_async(
            warp, 1 << lane, lambda: [cta.shared_access(offset, total, True, function is not None)], i
        )

        def work() -> None:
            where = cta.shared.views[size][offset // size : (offset + total) // size]
            where[:] = data if function is None else function(where, data)
            signal(total, token)

        warp.cta.launch.count_bytes(f"{i.op}.async shared->shared", total)
        warp.cta.issue("st.async", work, name=i.name)

    return each(one)


# setmaxnreg -----------------------------------------------------------------------------------------------------------
@special("setmaxnreg", kind=WAIT)
def setmaxnreg(kernel: Kernel, i: Instruction) -> Callable:
    """Moves registers between the warps of a block; .inc waits until others have given enough back. PTX ISA 9.7.19.5.

    The pool is what a block has when it fills a multiprocessor alone: the compiler may have given it less.
    """
    allow(i, ("inc", "dec", "sync", "aligned", "u32"))
    count = immediate(i.args[0], "the register count")
    if count % 8 or not 24 <= count <= 256:
        raise Unsupported(f"{count} registers: multiples of 8 from 24 to 256 are allowed")

    def run(warp: Warp, mask: np.ndarray | None) -> bool:
        if not warp.converged(mask):
            warp.cta.report(ConvergenceError, f"{warp.label}: executed by a part of the warp\n  {i.where()}")
        cta = warp.cta
        warps = len(cta.warps)
        initial = REGISTERS // (32 * warps) // 8 * 8
        held = cta.state.setdefault("registers", dict.fromkeys(range(warps), initial))
        others = sum(n for number, n in held.items() if number != warp.number)
        if i.has("inc") and others + count > initial * warps:
            warp.waiting = f"setmaxnreg: {count} registers for each thread, {initial * warps - others} are free"
            return False
        held[warp.number] = count
        return True

    return run
