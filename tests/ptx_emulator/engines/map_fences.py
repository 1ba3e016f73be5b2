"""Tensor maps that a kernel writes itself: readers need fence.proxy.tensormap::generic.acquire after the write.

A fence is an event that knows a write of the map; barriers carry it like every other event, so that one thread may
fence and another, which it synchronises with, use the map. PTX ISA 9.7.13.4 (membar/fence), 9.7.13.17.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..errors import ProxyError
from ..hb import GENERIC, INDEX_BITS, Token
from ..memory import GLOBAL_BASE
from ..tensor_map import BYTES

if TYPE_CHECKING:
    from ..ir import Instruction
    from ..warp import Warp


def _writes(warp: Warp, address: int) -> list[int]:
    """Packed last writes (event and instruction) of a map's bytes by the generic proxy of this launch."""
    shadow, order = warp.cta.launch.device.memory.shadow, warp.cta.order
    if address < GLOBAL_BASE or shadow is None or order is None:
        return []
    start = address - GLOBAL_BASE >> shadow.shift
    found = np.unique(shadow.writer[start : start + (BYTES >> shadow.shift)])
    return [v for v in found.tolist() if order.kinds[v >> INDEX_BITS] == GENERIC]


def acquire(warp: Warp, mask: np.ndarray | None, address: int) -> None:
    """fence.proxy.tensormap::generic.acquire on one map."""
    actor, order = warp.actor, warp.cta.order
    if actor is None or order is None:
        return
    bits = warp.bits(mask)
    known = actor.release(bits).known
    for value in _writes(warp, address):
        event = value >> INDEX_BITS
        if known >> event & 1:
            fence = order.new(GENERIC, actor.label)
            order.map_fences.setdefault(event, []).append(fence)
            actor.acquire(bits, Token(1 << fence))


def check(warp: Warp, lane: int, address: int, instruction: Instruction) -> None:
    """An operation of this lane reads the map at `address`."""
    actor, order = warp.actor, warp.cta.order
    if actor is None or order is None:
        return
    for value in _writes(warp, address):
        known = actor.release(1 << lane).known
        if not any(known >> fence & 1 for fence in order.map_fences.get(value >> INDEX_BITS, ())):
            warp.cta.report(
                ProxyError,
                f"the tensor map at {address:#x} was written by the generic proxy\n"
                f"  now:    read by {instruction.name} of {warp.label}\n          {instruction.where()}\n"
                f"  before: {order.describe(value, 'a write')}\n"
                f"  missing: fence.proxy.tensormap::generic.acquire of this map, after the write",
            )
            return
