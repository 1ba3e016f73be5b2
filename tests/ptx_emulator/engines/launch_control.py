"""Cluster launch control: a running block takes over a cluster that has not started. PTX ISA 9.7.13.16.

Encoding of the 16-byte response, which is opaque on the hardware: four 32-bit words x, y, z of the first block of the
cancelled cluster, then the state: `TAKEN` or `NONE_LEFT`. Anything else is no response.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from ..errors import AlignmentError, BarrierError, DescriptorError
from ..ir import Instruction, Kernel, Reg, Sink, Vec
from ..operands import lanes, scalar
from ..registry import Unsupported, special
from .bulk import COMPLETION, allow, completion, each

if TYPE_CHECKING:
    from ..warp import Warp

BYTES = 16
TAKEN, NONE_LEFT = 0xC1C00001, 0xC1C00000
# Coordinates of a failed response are undefined; these are outside of every grid.
UNDEFINED = 0xFFFFFFFF
FAILED = "launch control failed"  # key in Cta.state: a thread has seen that no cluster is left


@special("clusterlaunchcontrol.try_cancel")
def try_cancel(kernel: Kernel, i: Instruction) -> Callable:
    allow(i, ("try_cancel", "async", "shared::cta", COMPLETION, "multicast::cluster::all", "b128"))
    address, place = scalar(i.args[0]), scalar(i.args[1])
    everywhere = i.has("multicast::cluster::all")

    def one(warp: Warp, lane: int) -> None:
        own, offset = warp.cta.resolve_shared(address(warp, lane))
        home, bar = warp.cta.resolve_shared(place(warp, lane))
        own.check_shared(offset, BYTES, i)
        if offset % BYTES:
            warp.cta.report(
                AlignmentError, f"response address {offset:#x}: a multiple of {BYTES} is needed\n  {i.where()}"
            )
            return
        if not own is home is warp.cta:
            warp.cta.report(
                DescriptorError, f"response and mbarrier must be in this block's shared memory\n  {i.where()}"
            )
        if warp.cta.state.get(FAILED):
            warp.cta.report(BarrierError, f"{warp.label} asks again after no cluster was left\n  {i.where()}")
        targets = warp.cta.cluster.ctas if everywhere else [own]
        signals = [completion(warp, c, bar, i) for c in targets]
        token = warp.cta.check_async(
            warp, 1 << lane, lambda: [c.shared_access(offset, BYTES, True) for c in targets], i
        )
        queue = warp.cta.launch.queue

        def work() -> None:
            response = (*queue.pop(0), TAKEN) if queue else (UNDEFINED, UNDEFINED, UNDEFINED, NONE_LEFT)
            for c, signal in zip(targets, signals, strict=True):
                c.shared.u32[offset // 4 : offset // 4 + 4] = response
                signal(BYTES, token)

        warp.cta.issue("launch control", work, name=i.name)

    return each(one)


def _words(value: int) -> list[int]:
    return [value >> 32 * n & 0xFFFFFFFF for n in range(4)]


def _state(warp: Warp, words: list[int], i: Instruction) -> int:
    if words[3] not in (TAKEN, NONE_LEFT):
        warp.cta.report(DescriptorError, f"{words[3]:#010x}...: no response of try_cancel\n  {i.where()}")
    return words[3]


@special("clusterlaunchcontrol.query_cancel.is_canceled")
def is_canceled(kernel: Kernel, i: Instruction) -> Callable:
    allow(i, ("query_cancel", "is_canceled", "pred", "b128"))
    destination, response = i.args[0], scalar(i.args[1])
    if not isinstance(destination, Reg):
        raise Unsupported(f"destination {destination!r}")

    def run(warp: Warp, mask: np.ndarray | None) -> None:
        for lane in lanes(mask):
            state = _state(warp, _words(response(warp, lane)), i)
            warp.p[destination.index][lane] = state == TAKEN
            if state == NONE_LEFT:
                for cta in warp.cta.cluster.ctas:
                    cta.state[FAILED] = True

    return run


@special(
    "clusterlaunchcontrol.query_cancel.get_first_ctaid",
    *(f"clusterlaunchcontrol.query_cancel.get_first_ctaid::{axis}" for axis in "xyz"),
)
def get_first_ctaid(kernel: Kernel, i: Instruction) -> Callable:
    """Coordinates of a failed response are undefined; compilers may ask before they branch, so that is no finding."""
    form = i.mods[1]
    allow(i, ("query_cancel", form, "v4", "b32", "b128"))
    response = scalar(i.args[1])
    if i.has("v4"):
        if not isinstance(i.args[0], Vec) or len(i.args[0].items) != 4:
            raise Unsupported(f"destination {i.args[0]!r}")
        wanted = list(enumerate(i.args[0].items))
    else:
        wanted = [("xyz".index(form[-1]), i.args[0])] if form[-3:-1] == "::" else []
    if not wanted or not all(isinstance(r, (Reg, Sink)) for _, r in wanted):
        raise Unsupported(f"form {i.name}")

    def run(warp: Warp, mask: np.ndarray | None) -> None:
        for lane in lanes(mask):
            words = _words(response(warp, lane))
            _state(warp, words, i)
            for n, register in wanted:
                if isinstance(register, Reg):
                    warp.u32[register.index][lane] = words[n] if n < 3 else 0

    return run
