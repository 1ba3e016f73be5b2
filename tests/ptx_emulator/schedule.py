"""Who goes on next: blocks, warps, engines. Every choice comes from the seed, so a run can be repeated.

earliest   engines work the moment they are asked; warps run until they block, four in step where they can
latest     engines work only when no warp can go on: what reads too early reads old data
random     warps run for a few instructions each in random order, engines finish at random times
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .cta import Cta
from .errors import BudgetError, DeadlockError

if TYPE_CHECKING:
    from .launch import Launch
    from .warp import Group, Warp

SCHEDULES = ("earliest", "latest", "random")
ORDERS = ("forward", "reversed", "shuffled")
# A warp that has done this many instructions in a row may be waiting for another block in a loop.
SPIN = 200_000
# So many strong accesses may be polls of a word that another block writes.
POLLED = 400
SLICE = 4000


class Cluster:
    """Blocks that run together and see each other's shared memory."""

    def __init__(self, launch: Launch, first: tuple[int, int, int]) -> None:
        self.launch = launch
        self.barrier: object = None  # engines/cluster.py keeps barrier.cluster here
        self.ctas: list[Cta] = []
        cx, cy, cz = launch.cluster
        for z in range(cz):
            for y in range(cy):
                for x in range(cx):
                    block = (first[0] + x, first[1] + y, first[2] + z)
                    self.ctas.append(Cta(launch, block, len(self.ctas), self))
        self.spun = 0

    @property
    def done(self) -> bool:
        return all(c.live == 0 for c in self.ctas)


def cluster_origins(launch: Launch) -> list[tuple[int, int, int]]:
    """First block of every cluster, in the order in which they start."""
    (gx, gy, gz), (cx, cy, cz) = launch.grid, launch.cluster
    found = [(x, y, z) for z in range(0, gz, cz) for y in range(0, gy, cy) for x in range(0, gx, cx)]
    if launch.options.order == "reversed":
        found.reverse()
    elif launch.options.order == "shuffled":
        launch.rng.shuffle(found)
        found = [tuple(int(v) for v in f) for f in found]  # type: ignore[misc]
    return found


def run_grid(launch: Launch) -> None:
    """Runs all blocks. Raises the first finding (Options.collect: those that a run cannot go on from)."""
    launch.queue = cluster_origins(launch)
    active: list[Cluster] = []
    while launch.queue or active:
        while launch.queue and len(active) < launch.options.resident:
            active.append(Cluster(launch, launch.queue.pop(0)))
        progress = sum(_turn(launch, cluster) for cluster in active)
        launch.instructions += progress
        if launch.instructions > launch.options.max_instructions:
            launch.finding(BudgetError, _waiting(launch, active, f"{launch.instructions} warp instructions and no end"))
            return
        for cluster in [c for c in active if c.done]:
            active.remove(cluster)
            for cta in cluster.ctas:
                cta.end()
                launch.release(cta)
        spinning = bool(active) and (launch.polled > POLLED or all(c.spun > SPIN for c in active))
        if launch.queue and active and (progress == 0 or spinning):
            active.append(Cluster(launch, launch.queue.pop(0)))
            for c in active:
                c.spun = 0
            launch.polled = 0
        elif active and (progress == 0 or spinning):
            # Who polls a word in memory may wait for what an engine's operation lets another warp do.
            for c in active:
                c.spun = 0
            launch.polled = 0
            if not any(_pump(launch, c) for c in active) and progress == 0:
                launch.finding(DeadlockError, _waiting(launch, active, "nobody can go on"))
                return


def _waiting(launch: Launch, active: list[Cluster], why: str) -> str:
    rows = [f"  {w.describe(launch.program)}" for c in active for cta in c.ctas for w in cta.warps if not w.done]
    return (
        f"{launch.kernel.name}: {why}; these warps wait "
        f"(replay: schedule={launch.options.schedule!r}, seed={launch.options.seed}):\n" + "\n".join(rows)
    )


def _turn(launch: Launch, cluster: Cluster) -> int:
    """Every warp of a cluster once. Returns instructions done."""
    if launch.options.schedule == "random":
        return _random_turn(launch, cluster)
    total = 0
    for cta in cluster.ctas:
        grouped = 4 * len(cta.groups)
        for group in cta.groups:
            total += _run_group(launch, group)
        for warp in cta.warps[grouped:]:
            if not warp.done:
                total += warp.run(launch.program, SLICE)
    cluster.spun += total
    return total


def _run_group(launch: Launch, group: Group) -> int:
    """In step while possible, else the warp that is furthest behind until it meets another."""
    program = launch.program
    total = group.run(program, SLICE)
    waiting = [w for w in group.members if not w.done]
    blocked: set[int] = set()
    while waiting and total < SLICE:
        ready = [w for w in waiting if w.number not in blocked]
        if not ready:
            break
        warp = min(ready, key=_place)
        others = frozenset(f.pc for w in waiting if w is not warp for f in w.fragments)
        n = warp.run(program, SLICE, others)
        total += n
        if n:
            blocked.clear()
        # One that polls gets somewhere each time: the others come first, or it would use up every slice.
        if n == 0 or (not warp.done and n < SLICE and _place(warp) not in others):
            blocked.add(warp.number)
        together = group.run(program, SLICE)
        if together:
            total += together
            blocked.clear()
        waiting = [w for w in group.members if not w.done]
    return total


def _place(warp: Warp) -> int:
    return min(f.pc for f in warp.fragments)


def _random_turn(launch: Launch, cluster: Cluster) -> int:
    rng = launch.rng
    warps = [w for cta in cluster.ctas for w in cta.warps if not w.done]
    total = 0
    # An operation that was done counts as progress: a warp that stood still may go on because of it.
    pumped = False
    for n in rng.permutation(len(warps)):
        if not warps[n].done:
            total += warps[n].run(launch.program, int(rng.integers(1, 61)))
        if rng.random() < 0.5:
            pumped |= _pump(launch, cluster)
    cluster.spun += total
    return max(total, int(pumped))


def _pump(launch: Launch, cluster: Cluster) -> bool:
    """One operation in flight is done. False where there is none."""
    queues = [q for cta in cluster.ctas for q in cta.queues.values() if q]
    if not queues:
        return False
    queue = queues[int(launch.rng.integers(len(queues)))]
    first = queue[0]
    (first if first.ordered else queue[int(launch.rng.integers(len(queue)))]).finish()
    return True
