"""What the unchanged run of a kernel shows of its instructions: which ran, which taught something, operands."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ..engines.tcgen05_common import blocks_of, cta_group, split_address
from ..engines.tcgen05_mma import d_cells
from ..ir import Instruction, Vec
from ..layouts import InstructionDescriptor, decode_instruction_descriptor
from ..operands import first_lane, scalar
from ..registry import JUMP_TABLE

if TYPE_CHECKING:
    from ..launch import Launch
    from ..warp import Warp

_PRODUCTS = (("tcgen05", "mma"), ("tcgen05", "cp"), ("wgmma", "mma_async"))


class Trace:
    """Hangs itself into a launch (`attach`) and is filled by its run; `finish` after it."""

    def __init__(self) -> None:
        self.executed: set[int] = set()  # by at least one thread
        self.edges: set[int] = set()  # changed what a thread knows, or what registers an engine owns
        # Products: the distinct values that their operands had (0 for vectors); those whose D held more than zeros.
        self.operands: dict[int, set[tuple[int, ...]]] = {}
        self.accumulated: set[int] = set()
        self._launch: Launch | None = None

    def attach(self, launch: Launch) -> None:
        self._launch = launch
        program = launch.program
        for n, step in enumerate(program.steps):
            if step is not None and step.special is not None and step.kind != JUMP_TABLE:
                step.special = self._watch(n, program.instructions[n], step.special)

    def finish(self) -> None:
        assert self._launch is not None
        for n, step in enumerate(self._launch.program.steps):
            if step is not None and step.run is not None and step.count:
                self.executed.update(range(n, n + step.length))
        self._launch = None

    def _watch(self, n: int, i: Instruction, inner: Callable[..., Any]) -> Callable[..., Any]:
        product = (i.op, *i.mods[:1]) in _PRODUCTS
        get = [None if isinstance(a, Vec) else scalar(a) for a in i.args] if product else []

        def watched(warp: Warp, mask: np.ndarray | None) -> Any:
            self.executed.add(n)
            if product:
                lane = first_lane(mask)
                values = tuple(0 if g is None else g(warp, lane) for g in get)
                self.operands.setdefault(n, set()).add(values)
                if n not in self.accumulated and i.mods[0] != "cp" and _accumulates(warp, i, values):
                    self.accumulated.add(n)
            before = knowledge(warp)
            result = inner(warp, mask)
            if knowledge(warp) != before:
                self.edges.add(n)
            return result

        return watched


def product_shape(i: Instruction, values: tuple[int, ...]) -> InstructionDescriptor:
    """Of a tcgen05.mma, from the values of its operands."""
    kind = next(m[6:] for m in i.mods if m.startswith("kind::"))
    in_tensor = not hasattr(i.args[1], "cls")
    return decode_instruction_descriptor(values[3], kind, cta_group(i), i.has("ws"), in_tensor)


def _accumulates(warp: Warp, i: Instruction, values: tuple[int, ...]) -> bool:
    """D holds something besides zeros."""
    if isinstance(i.args[0], Vec):
        return any(warp.u32[r.index].any() for r in i.args[0].items)
    group = cta_group(i)
    shape, (lane, column) = product_shape(i, values), split_address(values[0])
    cells = d_cells(shape.m, shape.n, group, i.has("ws"), lane).flat + column
    held = [cta.tensor for cta in blocks_of(warp, group, i)]
    return any(t is None or bool(t.reshape(-1)[cells].any()) for t in held)


def knowledge(warp: Warp) -> tuple:
    """Everything that a wait or a fence can change of a warp."""
    a = warp.actor
    assert a is not None
    own = (warp.pending, warp.written, warp.state.get("fenced"))
    return (*own, a.known, a.proxied, a.before, a.after, a.parts, dict(a.extra), frozenset(a.unsynced))
