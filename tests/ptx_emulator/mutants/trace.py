"""What the unchanged run of a kernel shows of its instructions: which ran, which taught a thread something, operands."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ..ir import Imm, Instruction, Reg, Vec
from ..operands import first_lane, scalar

if TYPE_CHECKING:
    from ..launch import Launch
    from ..warp import Warp


class Trace:
    """Hangs itself into a launch (`attach`) and is filled by its run; `finish` after it."""

    def __init__(self) -> None:
        self.executed: set[int] = set()  # by at least one thread
        self.edges: set[int] = set()  # changed what a thread knows, or what registers an engine owns
        # Products: the distinct values of the operands named in `_watched`, and whether D held anything but zeros.
        self.operands: dict[int, set[tuple[int, ...]]] = {}
        self.accumulated: set[int] = set()
        self._launch: Launch | None = None

    def attach(self, launch: Launch) -> None:
        self._launch = launch
        program = launch.program
        for n, step in enumerate(program.steps):
            if step is not None and step.special is not None and step.kind != "jump":
                step.special = self._watch(n, program.instructions[n], step.special)

    def finish(self) -> None:
        assert self._launch is not None
        program = self._launch.program
        for n, step in enumerate(program.steps):
            if step is not None and step.run is not None and step.count:
                self.executed.update(range(n, n + step.length))
        self._launch = None

    def _watch(self, n: int, i: Instruction, inner: Callable[..., Any]) -> Callable[..., Any]:
        product = (i.op, i.mods[:1]) in (("tcgen05", ("mma",)), ("tcgen05", ("cp",)), ("wgmma", ("mma_async",)))
        get = [scalar(a) if isinstance(a, (Reg, Imm)) else None for a in i.args] if product else []
        accumulator = i.args[0].items if product and isinstance(i.args[0], Vec) else ()

        def watched(warp: Warp, mask: np.ndarray | None) -> Any:
            self.executed.add(n)
            if product:
                lane = first_lane(mask)
                values = tuple(0 if g is None else g(warp, lane) for g in get)
                self.operands.setdefault(n, set()).add(values)
                if any(warp.u32[r.index].any() for r in accumulator):
                    self.accumulated.add(n)
            before = knowledge(warp)
            result = inner(warp, mask)
            if knowledge(warp) != before:
                self.edges.add(n)
            return result

        return watched


def knowledge(warp: Warp) -> tuple:
    """Everything that a wait or a fence can change of a warp."""
    a = warp.actor
    assert a is not None
    return (a.known, a.proxied, a.before, a.after, dict(a.extra), frozenset(a.unsynced), warp.pending, warp.written,
            warp.state.get("fenced"))  # fmt: skip
