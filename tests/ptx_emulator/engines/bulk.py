"""Bulk copies and reductions, and the bulk groups that they share with tensor stores. PTX ISA 9.7.9.25.4 and .6.

A copy from global memory, or into another block's shared memory, signals an mbarrier; one into global memory belongs
to the issuing thread's bulk group. The latter is two operations here: the reading of its source, which wait_group.read
waits for, and the writing. All go through the asynchronous proxy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import numpy as np

from ..cta import span
from ..errors import AlignmentError, BoundsError, DescriptorError, LeftoverError, UninitialisedError
from ..hb import Access, Token
from ..ir import SIZES, Instruction, Kernel
from ..lower.atomics import Combine, flushing
from ..memory import GLOBAL_BASE
from ..operands import Scalar, immediate, lanes, scalar
from ..registry import Unsupported, special
from .async_groups import Entry, groups_of
from .mbarrier import find

if TYPE_CHECKING:
    from ..cta import Cta
    from ..warp import Warp

ALIGNMENT = 16
GROUP = "bulk"  # key of the bulk groups in Warp.state
COMPLETION = "mbarrier::complete_tx::bytes"
HINT = "L2::cache_hint"
OPERATIONS = ("add", "min", "max", "inc", "dec", "and", "or", "xor")
_HALF = ("f16", "bf16")
# Element types of each operation (PTX ISA 9.7.9.25.4.2).
GLOBAL_TYPES = {
    "add": ("u32", "s32", "u64", "f32", "f64", *_HALF),
    **dict.fromkeys(("min", "max"), ("u32", "s32", "u64", "s64", *_HALF)),
    **dict.fromkeys(("inc", "dec"), ("u32",)),
    **dict.fromkeys(("and", "or", "xor"), ("b32", "b64")),
}
SHARED_TYPES = {
    "add": ("u32", "s32", "u64"),
    **dict.fromkeys(("min", "max"), ("u32", "s32")),
    **dict.fromkeys(("inc", "dec"), ("u32",)),
    **dict.fromkeys(("and", "or", "xor"), ("b32",)),
}

Complete = Callable[[int, Token], None]


# What bulk and tensor operations have in common ----------------------------------------------------------------------
def allow(i: Instruction, known: Iterable[str]) -> None:
    """Refuses modifiers without a meaning here."""
    strange = [m for m in i.mods if m not in known]
    if strange:
        raise Unsupported(f"modifier(s) {', '.join('.' + m for m in strange)}")


def completion(warp: Warp, cta: Cta, offset: int, i: Instruction) -> Complete:
    """`signal(bytes, token)` of the mbarrier that is there now, for use when the operation is done."""
    barrier = find(cta, offset, i, warp)

    def signal(size: int, token: Token) -> None:
        # It may have been invalidated, and initialised anew, while the operation was in flight.
        now = barrier if cta.barriers.get(offset) is barrier else find(cta, offset, i)
        if barrier is not None and now is not None:
            now.complete_transactions(size, token, i)

    return signal


def destinations(warp: Warp, i: Instruction, cta: Cta, mask: int | None) -> list[Cta]:
    """Blocks that receive the data: `cta`, or those of a multicast mask."""
    if mask is None:
        return [cta]
    ctas = warp.cta.cluster.ctas
    if mask == 0 or mask >> len(ctas):
        warp.cta.report(
            DescriptorError, f"ctaMask {mask:#x}: it names blocks of {len(ctas)}, at least one\n  {i.where()}"
        )
    return [c for rank, c in enumerate(ctas) if mask >> rank & 1]


def check_alive(warp: Warp, targets: Iterable[Cta], i: Instruction) -> None:
    """Shared memory of a block is gone when the block has ended."""
    for cta in targets:
        if cta.live == 0:
            warp.cta.report(BoundsError, f"block rank {cta.rank} has ended, its shared memory is gone\n  {i.where()}")


def record_store(
    warp: Warp,
    lane: int,
    i: Instruction,
    reads: Callable[[], Iterable[Access]],
    writes: Callable[[], Iterable[Access]],
    read: Callable[[], np.ndarray],
    write: Callable[[np.ndarray], None],
) -> None:
    """Issues an operation of the bulk group of one thread: `write` gets what `read` returned."""
    cta, bit = warp.cta, 1 << lane
    read_token = cta.check_async(warp, bit, reads, i)
    token = cta.check_async(warp, bit, writes, i, ordered=read_token.known) | read_token
    held: list[np.ndarray] = []
    reading = cta.issue("bulk reads", lambda: held.append(read()), name=i.name)

    def work() -> None:
        reading.finish()
        write(held.pop())

    writing = cta.issue("bulk writes", work, name=i.name)
    groups_of(warp, GROUP).open.append(Entry(bit, i, reading, read_token, writing, token))
    if GROUP not in cta.state:
        cta.state[GROUP] = True
        cta.state.setdefault("at_end", []).append(_check_end)


def _check_end(cta: Cta) -> None:
    """A block's shared memory is gone when it ends: what reads it must have been waited for."""
    for warp in cta.warps:
        left = groups_of(warp, GROUP).unread()
        if left:
            cta.report(
                LeftoverError,
                f"{warp.label} ends with {len(left)} bulk operation(s) whose source was not waited for\n"
                f"  {left[0].instruction.where()}\n"
                f"  missing: cp.async.bulk.wait_group.read 0 (after a commit_group)",
            )


def reducer(operation: str, kind: str) -> Combine:
    """`f(old, operand)` on raw words. f32 additions flush subnormals to zero of their sign (PTX ISA 9.7.9.25.4.2)."""
    return flushing(operation, {"b32": "u32", "b64": "u64"}.get(kind, kind))


def check_initialised(cta: Cta, access: Access, i: Instruction) -> None:
    """A reduction reads its destination."""
    unwritten = access.shadow.writer[access.index] == 0
    if unwritten.any():
        cta.report(
            UninitialisedError, f"{access.shadow.label}: a reduction onto bytes that nothing wrote\n  {i.where()}"
        )


# Addresses ------------------------------------------------------------------------------------------------------------
def global_offset(warp: Warp, address: int, size: int, i: Instruction) -> int:
    """Offset of a range of global memory; a finding, and -1, where a byte of it is outside every allocation."""
    memory = warp.cta.launch.device.memory
    offset = address - GLOBAL_BASE
    if offset < 0 or offset + size > memory.size or not memory.valid[offset : offset + size].all():
        warp.cta.report(
            BoundsError,
            f"global bytes {address:#x}..{address + size - 1:#x} are not all inside one allocation\n  {i.where()}",
        )
        return -1
    return offset


def global_access(cta: Cta, offset: int, size: int, write: bool, atomic: bool = False) -> Access:
    shadow = cta.launch.device.memory.shadow
    assert shadow is not None
    return span(shadow, offset, size, write, atomic)


def _aligned(warp: Warp, i: Instruction, size: int, **addresses: int) -> bool:
    """Size and addresses are multiples of 16; False also where nothing is to be moved (and signalled)."""
    for name, value in (("size", size), *addresses.items()):
        if value % ALIGNMENT:
            error = DescriptorError if name == "size" else AlignmentError
            warp.cta.report(error, f"{name} {value:#x}: a multiple of {ALIGNMENT} is needed\n  {i.where()}")
            return False
    return size > 0


def _shared(warp: Warp, address: int, size: int, i: Instruction, own: bool) -> tuple[Cta, int]:
    cta, offset = warp.cta.resolve_shared(address)
    if own and cta is not warp.cta:
        warp.cta.report(
            DescriptorError,
            f"shared address {address:#x} is of block rank {cta.rank}, not of this block\n  {i.where()}",
        )
    cta.check_shared(offset, size, i)
    return cta, offset


# cp.async.bulk --------------------------------------------------------------------------------------------------------
@special("cp.async.bulk")
def copy(kernel: Kernel, i: Instruction) -> Callable:
    spaces = i.mods[2:4]
    allow(i, ("async", "bulk", *spaces, COMPLETION, "bulk_group", "multicast::cluster", HINT, "cp_mask"))
    if spaces in (("shared::cluster", "global"), ("shared::cta", "global")):
        return _load(i)
    if spaces == ("shared::cluster", "shared::cta"):
        return _to_peer(i, None)
    if spaces == ("global", "shared::cta"):
        return _store(i, None)
    raise Unsupported(f"bulk copies from .{spaces[1]} to .{spaces[0]}")


def _load(i: Instruction) -> Callable:
    to, source, size, place = (scalar(a) for a in i.args[:4])
    multicast = scalar(i.args[4]) if i.has("multicast::cluster") else None
    own = i.has("shared::cta")

    def one(warp: Warp, lane: int) -> None:
        n, start = size(warp, lane), source(warp, lane)
        cta, offset = _shared(warp, to(warp, lane), n, i, own)
        at = global_offset(warp, start, n, i) if _aligned(warp, i, n, source=start, destination=offset) else -1
        if at < 0:
            return
        home, bar = warp.cta.resolve_shared(place(warp, lane))
        targets = destinations(warp, i, cta, None if multicast is None else multicast(warp, lane) & 0xFFFF)
        if multicast is None and home is not cta:
            warp.cta.report(
                DescriptorError, f"the mbarrier is in block rank {home.rank}, the data in {cta.rank}\n  {i.where()}"
            )
        check_alive(warp, targets, i)
        signals = [completion(warp, c if multicast else home, bar, i) for c in targets]
        token = warp.cta.check_async(
            warp,
            1 << lane,
            lambda: [global_access(cta, at, n, False), *(c.shared_access(offset, n, True) for c in targets)],
            i,
        )
        memory = warp.cta.launch.device.memory

        def work() -> None:
            for c, signal in zip(targets, signals, strict=True):
                c.shared.u8[offset : offset + n] = memory.u8[at : at + n]
                signal(n, token)

        warp.cta.launch.count_bytes("bulk global->shared", n * len(targets))
        warp.cta.issue("bulk loads", work, name=i.name)

    return each(one)


def _to_peer(i: Instruction, reduce: tuple[Combine, int] | None) -> Callable:
    """From this block's shared memory into that of another block of the cluster, copied or reduced."""
    to, source, size, place = (scalar(a) for a in i.args[:4])

    def one(warp: Warp, lane: int) -> None:
        n = size(warp, lane)
        own, start = _shared(warp, source(warp, lane), n, i, True)
        cta, offset = _shared(warp, to(warp, lane), n, i, False)
        if not _aligned(warp, i, n, source=start, destination=offset):
            return
        check_alive(warp, [cta], i)
        home, bar = warp.cta.resolve_shared(place(warp, lane))
        if home is not cta:
            warp.cta.report(
                DescriptorError, f"the mbarrier is in block rank {home.rank}, the data in {cta.rank}\n  {i.where()}"
            )
        signal = completion(warp, home, bar, i)
        atomic = reduce is not None
        if atomic and cta.shared.shadow is not None:
            check_initialised(warp.cta, cta.shared_access(offset, n, True), i)
        token = warp.cta.check_async(
            warp, 1 << lane, lambda: [own.shared_access(start, n, False), cta.shared_access(offset, n, True, atomic)], i
        )

        def work() -> None:
            _combine(cta.shared.views, offset, own.shared.u8[start : start + n], reduce)
            signal(n, token)

        warp.cta.launch.count_bytes(f"bulk {'reduce' if reduce else 'copy'} shared->shared", n)
        warp.cta.issue("bulk loads", work, name=i.name)

    return each(one)


def _combine(views: dict[int, np.ndarray], offset: int, data: np.ndarray, reduce: tuple[Combine, int] | None) -> None:
    if reduce is None:
        views[1][offset : offset + len(data)] = data
        return
    function, size = reduce
    where = views[size][offset // size : (offset + len(data)) // size]
    where[:] = function(where, data.view(where.dtype))


def _store(i: Instruction, reduce: tuple[Combine, int] | None) -> Callable:
    """From shared to global memory, copied or reduced; `.cp_mask` keeps some bytes of each 16."""
    to, source, size = (scalar(a) for a in i.args[:3])
    keep: Scalar | None = scalar(i.args[-1]) if i.has("cp_mask") else None
    path = f"bulk {'reduce' if reduce else 'store'} shared->global"

    def one(warp: Warp, lane: int) -> None:
        n, target = size(warp, lane), to(warp, lane)
        cta, start = _shared(warp, source(warp, lane), n, i, True)
        at = global_offset(warp, target, n, i) if _aligned(warp, i, n, source=start, destination=target) else -1
        if at < 0:
            return
        memory = cta.launch.device.memory
        chosen = np.arange(16)[_bits16(keep(warp, lane))] if keep is not None else None
        atomic = reduce is not None
        if atomic and memory.shadow is not None:
            check_initialised(cta, global_access(cta, at, n, True), i)

        def writes() -> list[Access]:
            if chosen is None:
                return [global_access(cta, at, n, True, atomic)]
            assert memory.shadow is not None
            index = (at + np.arange(0, n, 16)[:, None] + chosen).ravel() >> memory.shadow.shift
            return [Access(memory.shadow, np.unique(index), True)]

        def write(data: np.ndarray) -> None:
            if chosen is None:
                _combine(memory.views, at, data, reduce)
            else:
                memory.u8[at : at + n].reshape(-1, 16)[:, chosen] = data.reshape(-1, 16)[:, chosen]

        cta.launch.count_bytes(path, n)
        record_store(
            warp,
            lane,
            i,
            lambda: [cta.shared_access(start, n, False)],
            writes,
            lambda: cta.shared.u8[start : start + n].copy(),
            write,
        )

    return each(one)


def _bits16(value: int) -> np.ndarray:
    return (value >> np.arange(16) & 1).astype(bool)


def each(one: Callable[[Warp, int], None]) -> Callable:
    """Runs `one(warp, lane)` for each active thread."""

    def run(warp: Warp, mask: np.ndarray | None) -> None:
        for lane in lanes(mask):
            one(warp, lane)

    return run


@special("cp.reduce.async.bulk")
def reduce_bulk(kernel: Kernel, i: Instruction) -> Callable:
    spaces = i.mods[3:5]
    operation = next((m for m in i.mods[5:] if m in OPERATIONS), "")
    kind = i.mods[-1]
    allow(i, ("reduce", "async", "bulk", *spaces, COMPLETION, "bulk_group", HINT, operation, "noftz", kind))
    to_global = spaces == ("global", "shared::cta")
    if not to_global and spaces != ("shared::cluster", "shared::cta"):
        raise Unsupported(f"bulk reductions from .{spaces[1]} to .{spaces[0]}")
    allowed = (GLOBAL_TYPES if to_global else SHARED_TYPES).get(operation, ())
    # and, or, xor are written with .u32, .s32 as well as .b32: the assembler accepts them.
    if kind not in allowed and not (
        operation in ("and", "or", "xor") and kind[0] in "us" and "b" + kind[1:] in allowed
    ):
        raise Unsupported(f"bulk reduction .{operation}.{kind}: allowed are {', '.join(allowed)}")
    if kind in _HALF and operation == "add" and not i.has("noftz"):
        raise Unsupported(f"bulk reduction .add.{kind} needs .noftz")
    reduce = (reducer(operation, kind), SIZES[kind])
    return _store(i, reduce) if to_global else _to_peer(i, reduce)


@special("cp.async.bulk.prefetch")
def prefetch(kernel: Kernel, i: Instruction) -> Callable:
    """A hint; its range is checked all the same."""
    source, size = scalar(i.args[0]), scalar(i.args[1])

    def one(warp: Warp, lane: int) -> None:
        if _aligned(warp, i, size(warp, lane), source=source(warp, lane)):
            global_offset(warp, source(warp, lane), size(warp, lane), i)

    return each(one)


@special("cp.async.bulk.commit_group")
def commit_group(kernel: Kernel, i: Instruction) -> Callable:
    def run(warp: Warp, mask: np.ndarray | None) -> None:
        groups_of(warp, GROUP).commit(warp.bits(mask))

    return run


@special("cp.async.bulk.wait_group")
def wait_group(kernel: Kernel, i: Instruction) -> Callable:
    pending, reads = immediate(i.args[0], "the number of pending groups"), i.has("read")

    def run(warp: Warp, mask: np.ndarray | None) -> None:
        groups_of(warp, GROUP).wait(warp, warp.bits(mask), pending, i, reads)

    return run
