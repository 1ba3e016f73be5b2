"""Loads and stores of threads: windows, bounds, alignment, bytes, and the race check of each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .errors import AlignmentError, BoundsError, RaceError
from .memory import (
    CONST_WINDOW,
    GLOBAL_BASE,
    LOCAL_WINDOW,
    OFFSET_MASK,
    PARAM_WINDOW,
    RANK_SHIFT,
    SHARED_WINDOW,
    WINDOW_BYTES,
    Memory,
)
from .warp import WARP, mask_bits

if TYPE_CHECKING:
    from .ir import Instruction
    from .warp import View, Warp

LOCAL = Memory("local", 16)  # stands for every thread's own: `locate` answers with it
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class Spec:
    """What is static about a load, store or atomic."""

    __slots__ = ("bytes", "count", "instruction", "size", "space", "strong", "write")

    def __init__(self, instruction: Instruction, space: str, size: int, count: int, write: bool, strong: str) -> None:
        self.instruction = instruction
        self.space = space  # "shared", "shared::cluster", "global", "local", "const", "param" or "" (generic)
        self.size = size  # bytes of an element
        self.count = count  # elements a thread moves
        self.bytes = size * count
        self.write = write
        self.strong = strong  # "", "relaxed", "acquire", "release", "acq_rel"


def load(view: View, mask: np.ndarray | None, spec: Spec, address: np.ndarray | int) -> np.ndarray:
    """Raw unsigned values [n active, count] (or [n active] for one element)."""
    if spec.space == "" and isinstance(address, np.ndarray):
        parts = _parts(view, mask, address)
        if parts:
            shape = (view.width,) if spec.count == 1 else (view.width, spec.count)
            values = np.zeros(shape, _UNSIGNED[spec.size])
            for part in parts:
                values[part] = load(view, part, spec, address)
            return values if mask is None else values[mask]
    memory, offsets = locate(view, mask, spec, address)
    index = offsets >> (spec.size.bit_length() - 1)
    if memory is LOCAL:
        return _local(view, mask, spec, offsets)
    if spec.count > 1:
        index = index[:, None] + np.arange(spec.count)
    try:
        return memory.views[spec.size][index]
    except IndexError:
        raise out_of_bounds(view, memory, spec, offsets) from None


def store(view: View, mask: np.ndarray | None, spec: Spec, address: np.ndarray | int, values: list[np.ndarray]) -> None:
    """`values`: one array (or scalar) of the width of the view for each element."""
    if spec.space == "" and isinstance(address, np.ndarray):
        parts = _parts(view, mask, address)
        if parts:
            for part in parts:
                store(view, part, spec, address, values)
            return
    dtype = _UNSIGNED[spec.size]
    full = [v if np.ndim(v) else np.full(view.width, v, dtype) for v in values]
    order = view.cta.order
    if order is not None and len(view.members) > 1:
        # Warp by warp, so that a check sees what the warp before it stored.
        for k, warp in enumerate(view.members):
            own = slice(k * WARP, (k + 1) * WARP)
            places = address[own] if isinstance(address, np.ndarray) else address
            lanes = None if mask is None else mask[own]
            if lanes is None or lanes.any():
                store(warp, lanes, spec, places, [v[own] for v in full])
        return
    columns = full if mask is None else [v[mask] for v in full]
    if order is not None and spec.space != "local":
        order.unchanged = lambda granules: _unchanged(view, mask, spec, address, columns, granules)
    memory, offsets = locate(view, mask, spec, address)
    if order is not None:
        order.unchanged = None
    if memory is LOCAL:
        _local(view, mask, spec, offsets, columns)
        return
    words = memory.views[spec.size]
    index = offsets >> (spec.size.bit_length() - 1)
    try:
        for k, value in enumerate(columns):
            # Lanes are stored in order: of several that write one place, the highest wins.
            at = index + k if k else index
            words[at] = value
            if order is not None and (words[at] != value).any():
                _conflict(view, mask, spec, memory, at, value)
    except IndexError:
        raise out_of_bounds(view, memory, spec, offsets) from None


def _conflict(
    view: View, mask: np.ndarray | None, spec: Spec, memory: Memory, at: np.ndarray, value: np.ndarray
) -> None:
    """Lanes of one warp stored different values to one place: which stays is undefined."""
    lost = int(np.flatnonzero(memory.views[spec.size][at] != value)[0])
    won = int(np.flatnonzero(at == at[lost])[-1])
    lanes = np.arange(view.width) if mask is None else np.flatnonzero(mask)
    warp, start = view.members[0], int(at[lost]) * spec.size
    view.cta.report(
        RaceError,
        f"race on {memory.name} memory bytes {start:#x}..{start + spec.size - 1:#x}\n"
        f"  now:    writes of different values by lanes {lanes[lost] % WARP} and {lanes[won] % WARP} of {warp.label}\n"
        f"          {spec.instruction.where()}\n  missing: a choice of the lane that writes",
    )


def _unchanged(
    view: View,
    mask: np.ndarray | None,
    spec: Spec,
    address: np.ndarray | int,
    columns: list[np.ndarray],
    granules: np.ndarray,
) -> np.ndarray:
    """bool a granule: the bytes there already hold what this store writes. Asked only where a race was found."""
    places = address if isinstance(address, np.ndarray) else np.full(view.width, address, np.int64)
    places = places if mask is None else places[mask]
    if int(places[0]) >= GLOBAL_BASE:
        memory: Memory = view.cta.launch.device.memory
        places = places - GLOBAL_BASE
    elif spec.space == "shared::cluster" and len(view.cta.cluster.ctas) > 1:
        return np.zeros(granules.size, bool)
    else:
        memory, places = view.cta.shared, places & OFFSET_MASK
    assert memory.shadow is not None
    start = int(places.min()) & ~15
    before = memory.u8[start : (int(places.max()) + spec.bytes + 15) & ~15]
    after = before.copy()
    for k, value in enumerate(columns):
        after.view(_UNSIGNED[spec.size])[(places - start) // spec.size + k] = value
    n = memory.shadow.granule
    rows = granules.ravel()[:, None] * n + np.arange(n) - start
    return (after[rows] == before[rows]).all(1)


def locate(view: View, mask: np.ndarray | None, spec: Spec, address: np.ndarray | int) -> tuple[Memory, np.ndarray]:
    """Memory and byte offsets of the active threads; checks alignment, bounds and races."""
    places = address if isinstance(address, np.ndarray) else np.full(view.width, address, np.int64)
    if mask is not None:
        places = places[mask]
    cta = view.cta
    n = spec.bytes
    # All addresses at once: a negative one shows in the sign, a misaligned one in the low bits.
    union = int(np.bitwise_or.reduce(places)) if n > 1 or spec.space != "global" else 0
    if union & (n - 1):
        bad = int(places[(places & (n - 1)) != 0][0])
        cta.report(AlignmentError, f"address {bad:#x} is no multiple of {n}\n  {spec.instruction.where()}")
    space = spec.space
    if union < 0 and space not in ("", "global"):
        raise out_of_bounds(view, cta.shared, spec, places, space)
    if space == "":
        space, places = _window(view, spec, places)
    if space == "global":
        return _global(view, mask, spec, places - GLOBAL_BASE)
    if space == "local":
        return LOCAL, places - LOCAL_WINDOW
    if space == "const":
        if (places < CONST_WINDOW).any():
            raise out_of_bounds(view, cta.launch.constant, spec, places - CONST_WINDOW)
        return cta.launch.constant, places - CONST_WINDOW
    if space == "param":
        return cta.launch.params, places & (WINDOW_BYTES - 1)
    target = cta
    if len(cta.cluster.ctas) > 1:
        ranks = places >> RANK_SHIFT
        rank = int(ranks[0])
        if (ranks != rank).any():
            raise BoundsError(
                f"{cta.label}: one access to several blocks' shared memory is not supported\n"
                f"  {spec.instruction.where()}"
            )
        if rank >= len(cta.cluster.ctas) or (space != "shared::cluster" and rank != cta.rank):
            raise BoundsError(
                f"{cta.label}: shared address {int(places[0]):#x} is not of this block\n  {spec.instruction.where()}"
            )
        target = cta.cluster.ctas[rank]
        places = places & OFFSET_MASK
        if target.live == 0:
            raise BoundsError(
                f"{cta.label}: {view.members[0].label} accesses shared memory of {target.label}, which has ended\n"
                f"  {spec.instruction.where()}\n  missing: a barrier.cluster before its end"
            )
    if spec.strong:
        for warp in view.members:
            warp.polls += 1
            warp.cta.launch.polled += 1
        if int(places.max()) + n > target.shared.size:  # loads and stores find that out by themselves
            raise out_of_bounds(view, target.shared, spec, places)
    if target.shared.shadow is not None:
        _check(view, mask, spec, target.shared, places)
    cta.launch.count_bytes("load shared" if not spec.write else "store shared", n * len(places))
    return target.shared, places


def _parts(view: View, mask: np.ndarray | None, address: np.ndarray) -> list[np.ndarray]:
    """Masks of the threads whose generic addresses are in one state space each; nothing where all are in the same."""
    windows = np.minimum(address >> 40, GLOBAL_BASE >> 40)
    own = windows if mask is None else windows[mask]
    if (own == own[0]).all():
        return []
    active = np.ones(view.width, bool) if mask is None else mask
    return [active & (windows == window) for window in sorted(set(own.tolist()))]


def _window(view: View, spec: Spec, address: np.ndarray) -> tuple[str, np.ndarray]:
    windows = address >> 40
    window = int(windows[0])
    if (windows != window).any() and not (windows >= GLOBAL_BASE >> 40).all():
        raise BoundsError(
            f"{view.cta.label}: one generic access to several state spaces is not supported\n"
            f"  {spec.instruction.where()}"
        )
    if window >= GLOBAL_BASE >> 40:
        return "global", address
    names = {
        SHARED_WINDOW >> 40: "shared::cluster",
        LOCAL_WINDOW >> 40: "local",
        CONST_WINDOW >> 40: "const",
        PARAM_WINDOW >> 40: "param",
    }
    if window not in names:
        raise BoundsError(
            f"{view.cta.label}: generic address {int(address[0]):#x} is in no state space\n  {spec.instruction.where()}"
        )
    name = names[window]
    return name, address - SHARED_WINDOW if name == "shared::cluster" else address


def _global(view: View, mask: np.ndarray | None, spec: Spec, offsets: np.ndarray) -> tuple[Memory, np.ndarray]:
    memory = view.cta.launch.device.memory
    n = spec.bytes
    low, high = offsets.min(), offsets.max() + n
    if low < 0 or high > memory.top or not (memory.valid[offsets].all() and memory.valid[offsets + (n - 1)].all()):
        raise out_of_bounds(view, memory, spec, offsets)
    if spec.strong:
        for warp in view.members:
            warp.polls += 1
            warp.cta.launch.polled += 1
    if memory.shadow is not None:
        _check(view, mask, spec, memory, offsets)
    view.cta.launch.count_bytes("load global" if not spec.write else "store global", n * len(offsets))
    return memory, offsets


def _check(view: View, mask: np.ndarray | None, spec: Spec, memory: Memory, offsets: np.ndarray) -> None:
    """Race check, warp by warp."""
    shadow = memory.shadow
    assert shadow is not None and view.cta.order is not None
    index = offsets >> shadow.shift
    pieces = max(1, spec.bytes >> shadow.shift)
    atomic = bool(spec.strong)
    if pieces > 1:
        index = index[:, None] + np.arange(pieces)
    if index.size and int(index.max()) >= len(shadow.writer):
        raise out_of_bounds(view, memory, spec, offsets)
    order = view.cta.order
    start = 0
    for k, warp in enumerate(view.members):
        lane_of = warp.lanes
        bits = warp.live
        part = index
        if mask is not None:
            own = mask[k * WARP : (k + 1) * WARP]
            bits = mask_bits(own)
            lane_of = lane_of[own]
        if len(view.members) > 1:
            part = index[start : start + len(lane_of)]
            start += len(lane_of)
        if len(lane_of) == 0:
            continue
        assert warp.actor is not None
        lanes = lane_of[:, None] if pieces > 1 else lane_of
        order.generic(warp.actor, bits, shadow, part, lanes, spec.write, spec.instruction, atomic)
        if atomic:
            strong(warp, bits, memory, part.ravel(), spec.strong, spec.write)


def strong(warp: Warp, bits: int, memory: Memory, index: np.ndarray, kind: str, write: bool) -> None:
    """A strong access publishes what the thread knows (release) and takes what was published (acquire).

    Relaxed accesses do so through the fences around them: what a fence before them covered is published, and what they
    took is joined at the next fence.
    """
    order, actor = warp.cta.order, warp.actor
    assert order is not None and actor is not None
    shadow = memory.shadow
    assert shadow is not None
    for location in set(index.tolist()):
        taken = order.published(shadow.label, location)
        if kind in ("acquire", "acq_rel"):
            actor.acquire(bits, taken)
        else:
            warp.state["taken"] = warp.state.get("taken", taken) | taken
        if write:
            token = actor.release(bits) if kind in ("release", "acq_rel") else warp.state.get("fenced")
            if token is not None:
                order.publish(shadow.label, location, token)


def fence(warp: Warp, mask: np.ndarray | None) -> None:
    """A fence: what relaxed accesses before it took is known from here; those after it publish what is known here."""
    if warp.actor is None:
        return
    bits = warp.bits(mask)
    taken = warp.state.pop("taken", None)
    if taken is not None:
        warp.actor.acquire(bits, taken)
    warp.state["fenced"] = warp.actor.release(bits)


def _local(
    view: View, mask: np.ndarray | None, spec: Spec, offsets: np.ndarray, values: list[np.ndarray] | None = None
) -> np.ndarray:
    """Local memory: a row a thread. Stores where values are given; loads [n, count] or [n] otherwise."""
    local = view.cta.local
    rows = np.arange(view.start, view.start + view.width)
    rows = rows if mask is None else rows[mask]
    if offsets.min() < 0 or offsets.max() + spec.bytes > local.shape[1]:
        raise BoundsError(
            f"{view.cta.label}: local bytes {int(offsets.min()):#x}..{int(offsets.max()) + spec.bytes - 1:#x} of "
            f"{local.shape[1]:#x}\n  {spec.instruction.where()}"
        )
    dtype = _UNSIGNED[spec.size]
    words = local.view(dtype)
    index = offsets // spec.size
    if values is not None:
        for k, value in enumerate(values):
            words[rows, index + k] = value
        return offsets
    if spec.count > 1:
        return words[rows[:, None], index[:, None] + np.arange(spec.count)]
    return words[rows, index]


def out_of_bounds(view: View, memory: Memory, spec: Spec, offsets: np.ndarray, space: str = "") -> BoundsError:
    n = spec.bytes
    bad = offsets[(offsets < 0) | (offsets + n > memory.size)]
    if memory.name == "global":
        valid = view.cta.launch.device.memory.valid
        inside = (offsets >= 0) & (offsets + n <= len(valid))
        bad = np.concatenate(
            [offsets[~inside], offsets[inside][~valid[offsets[inside] + n - 1] | ~valid[offsets[inside]]]]
        )
    first = int(bad[0]) if len(bad) else int(offsets.max())
    base = GLOBAL_BASE if memory.name == "global" else 0
    who = ", ".join(w.label for w in view.members[:1])
    return BoundsError(
        f"{view.cta.label}: {who} accesses {space or memory.name} address {first + base:#x} ({n} bytes), "
        f"outside every allocation\n"
        f"  {spec.instruction.where()}"
    )


__all__ = ["Spec", "fence", "load", "locate", "store"]
