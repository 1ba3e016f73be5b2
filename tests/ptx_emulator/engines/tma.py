"""Tensor copies: tiles of 1 to 5 dimensions between global and shared memory. PTX ISA 9.7.9.25.5, 5.5.

A box lies in shared memory row after row, innermost dimension first, rows at least as far apart as the swizzle is
wide; its 16-byte chunks are then permuted by the swizzle, which depends on absolute addresses. What lies outside of the
tensor is filled by a load and left out by a store; a load signals the bytes of the whole box all the same. What lies
inside is a box too, so that data moves as one strided copy.

As an H200 does it: a store or reduction takes the rows of the tensor in whole chunks of 16 bytes, so that it writes up
to 15 bytes beyond the end of a row. The innermost coordinate must be a multiple of 16 bytes, and no coordinate of a
store or reduction may be negative (those of a load may).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .. import access
from ..cta import span
from ..errors import AlignmentError, BoundsError, ConvergenceError, DescriptorError, Finding
from ..hb import Access, Shadow
from ..ir import Instruction, Kernel, TensorMem, Vec
from ..layouts import swizzle
from ..lower.atomics import Combine
from ..memory import GLOBAL_BASE, SHARED_WINDOW, GlobalMemory
from ..operands import Scalar, first_lane, immediate, scalar, signed
from ..registry import Unsupported, special
from ..tensor_map import BYTES, NAN_BITS, TensorMap, lookup, replaced
from . import map_fences
from .bulk import (
    COMPLETION,
    GLOBAL_TYPES,
    HINT,
    OPERATIONS,
    allow,
    check_alive,
    check_initialised,
    completion,
    destinations,
    each,
    record_store,
    reducer,
)

if TYPE_CHECKING:
    from ..cta import Cta
    from ..warp import Warp

SHARED_ALIGNMENT = 128
CHUNK = 16
_DIMENSIONS = tuple(f"{n}d" for n in range(1, 6))
_ROWS = 4  # of gather4 and scatter4
# What an element of a tensor map is to a reduction; elements without an entry cannot be reduced.
_REDUCED_AS = {
    "u32": "u32",
    "s32": "s32",
    "u64": "u64",
    "s64": "s64",
    "f16": "f16",
    "bf16": "bf16",
    "f32": "f32",
    "f32_ftz": "f32",
}
_BITWISE_AS = {"u32": "b32", "s32": "b32", "u64": "b64", "s64": "b64"}


class Cut(NamedTuple):
    """The part of a box that is inside of the tensor. Outermost dimension first; the innermost counts bytes."""

    inside: tuple[slice, ...]  # of the box
    start: int  # offset of its first byte in global memory
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # bytes


@lru_cache(maxsize=4096)
def cut(m: TensorMap, coordinates: tuple[int, ...], rows: int = 0, pieces: bool = False) -> Cut | None:
    """None where nothing of the box is inside. `rows` of dimension 1, where not as many as the box has.

    `pieces`: rows of the tensor are lengthened to whole chunks.
    """
    inside, shape, strides = [], [], []
    start = m.address - GLOBAL_BASE
    for k in range(m.rank):
        count = rows if rows and k == 1 else m.counts[k]
        step = m.element_strides[k] if k else 1
        c, stride = coordinates[k], m.strides[k - 1] if k else m.size
        low = max(0, -(c // step))
        end = -(-m.dims[0] * m.size // CHUNK) * CHUNK // m.size if pieces and k == 0 else m.dims[k]
        high = min(count, -((c - end) // step))
        if low >= high:
            return None
        start += (c + low * step) * stride
        unit = 1 if k else m.size
        inside.append(slice(low * unit, high * unit))
        shape.append((high - low) * unit)
        strides.append(step * stride if k else 1)
    return Cut(tuple(inside[::-1]), start, tuple(shape[::-1]), tuple(strides[::-1]))


@lru_cache(maxsize=1024)
def _chunks(rows: int, row_bytes: int, pitch: int, start: int, mode: str) -> np.ndarray:
    """Where the chunks of a box go, as numbers of chunks from its start; `start` in chunks, modulo 64."""
    plain = np.arange(rows)[:, None] * (pitch // CHUNK) + np.arange(row_bytes // CHUNK)
    found = swizzle((start + plain.ravel()) * CHUNK, mode) // CHUNK - start
    found.setflags(write=False)
    return found


@lru_cache(maxsize=1024)
def _granules(shape: tuple[int, ...], strides: tuple[int, ...], shift: int, per_row: int) -> np.ndarray:
    """Granules of the rows of a cut, relative to the first. Strides are multiples of 16, so each row starts alike."""
    found = np.arange(per_row)
    for n, stride in zip(shape[-2::-1], strides[-2::-1], strict=True):
        found = (np.arange(n)[:, None] * (stride >> shift) + found).ravel()
    found.setflags(write=False)
    return found


def footprint(shadow: Shadow, c: Cut, write: bool, atomic: bool = False) -> Access:
    first = c.start >> shadow.shift
    size = c.shape[-1]
    contiguous = True
    for n, stride in zip(c.shape[-2::-1], c.strides[-2::-1], strict=True):
        contiguous = contiguous and (stride == size or n == 1)
        size *= n
    if contiguous:
        return span(shadow, c.start, size, write, atomic)
    per_row = (c.start + c.shape[-1] - 1 >> shadow.shift) - first + 1
    return Access(shadow, first + _granules(c.shape, c.strides, shadow.shift, per_row), write, atomic)


def _region(c: Cut, array: np.ndarray, item: int = 1) -> np.ndarray:
    """View of a cut in an array of a byte a byte; `item` > 1: as words of that many bytes."""
    shape = (*c.shape[:-1], c.shape[-1] // item)
    return np.ndarray(shape, array.dtype if item == 1 else f"u{item}", array, c.start, (*c.strides[:-1], item))


def _allocated(memory: GlobalMemory, c: Cut) -> bool:
    last = c.start + sum((n - 1) * s for n, s in zip(c.shape, c.strides, strict=True))
    if c.start < 0 or last >= memory.size:
        return False
    valid = _region(c, memory.valid)
    if c.shape[-1] <= memory.GAP:
        # Allocations are further apart than a row is long: its ends tell.
        return bool(valid[..., 0].all() and valid[..., -1].all())
    return bool(valid.all())


class Tile:
    """What one execution by one thread moves: cuts of global memory and their places in the box."""

    def __init__(self, warp: Warp, m: TensorMap, at: tuple[int, ...], scattered: bool, i: Instruction) -> None:
        self.map = m
        self.memory = warp.cta.launch.device.memory
        self.shape: tuple[int, ...] = (_ROWS, m.row_bytes) if scattered else (*m.counts[:0:-1], m.row_bytes)
        self.rows = int(np.prod(self.shape[:-1], dtype=np.int64))
        self.bytes = self.rows * m.row_bytes
        self._at, self._scattered = at, scattered
        self.inside = self._cuts(False)
        stores = i.has("bulk_group")
        # Stores end at whole chunks; what is checked ends at the tensor.
        self.cuts = self._cuts(True) if stores else self.inside
        self.legal = False
        error: type[Finding]
        if at[0] * m.size % CHUNK:
            error, words = AlignmentError, f"the first is {at[0] * m.size} bytes, a multiple of {CHUNK} is needed"
        elif stores and min(at) < 0:
            error, words = DescriptorError, "a store or reduction needs coordinates that are not negative"
        elif not all(_allocated(self.memory, c) for _, c in self.inside):
            error, words = BoundsError, f"{m} describes memory outside of every allocation"
        else:
            self.legal = True
            return
        warp.cta.report(error, f"coordinates {at}: {words}\n  {i.where()}")

    def _cuts(self, pieces: bool) -> list[tuple[slice, Cut]]:
        m, at = self.map, self._at
        if not self._scattered:
            whole = cut(m, at, 0, pieces)
            return [] if whole is None else [(slice(None), whole)]
        found = [(cut(m, (at[0], row), 1, pieces), n) for n, row in enumerate(at[1:])]
        return [(slice(n, n + 1), c) for c, n in found if c is not None]

    def accesses(self, write: bool, atomic: bool = False) -> list[Access]:
        shadow = self.memory.shadow
        assert shadow is not None
        return [footprint(shadow, c, write, atomic) for _, c in self.cuts]

    def read(self) -> np.ndarray:
        """uint8 [chunks, 16] of the box, filled where it is outside of the tensor."""
        if len(self.cuts) == 1 and self.cuts[0][1].shape == self.shape:
            data = _region(self.cuts[0][1], self.memory.u8)
            return np.ascontiguousarray(data).reshape(-1, CHUNK)
        m = self.map
        if m.fill == "nan":
            box = np.full(self.bytes // m.size, NAN_BITS[m.size], f"u{m.size}").view(np.uint8).reshape(self.shape)
        else:
            box = np.zeros(self.shape, np.uint8)
        for rows, c in self.cuts:
            box[rows][c.inside] = _region(c, self.memory.u8)
        return box.reshape(-1, CHUNK)

    def write(self, data: np.ndarray, reduce: Combine | None) -> None:
        """`data` uint8 [chunks, 16]: the box, of which the cuts are stored or reduced."""
        box = data.reshape(self.shape)
        for rows, c in self.cuts:
            part = box[rows][c.inside]
            if reduce is None:
                _region(c, self.memory.u8)[...] = part
            else:
                region = _region(c, self.memory.u8, self.map.size)
                region[...] = reduce(np.ascontiguousarray(region), np.ascontiguousarray(part).view(region.dtype))


class Place:
    """A box in shared memory: which of its 16-byte chunks lies where."""

    def __init__(self, m: TensorMap, offset: int, rows: int) -> None:
        self.offset = offset
        self.size = rows * m.pitch
        first = offset // CHUNK
        self.narrow = m.pitch != m.row_bytes
        self.chunks: slice | np.ndarray
        if m.swizzle == "none":
            self.chunks = slice(first, first + self.size // CHUNK)
        else:
            self.chunks = first + _chunks(rows, m.row_bytes, m.pitch, first % 64, m.swizzle)

    def access(self, cta: Cta, write: bool) -> Access:
        if self.narrow and not isinstance(self.chunks, slice):
            return cta.shared_access_at(CHUNK * self.chunks, CHUNK, write)
        # A box of whole spans is permuted within itself.
        return cta.shared_access(self.offset, self.size, write)


def _chunked(cta: Cta) -> np.ndarray:
    return cta.shared.u8.reshape(-1, CHUNK)


class Form:
    """The decoded operands of a tensor instruction."""

    def __init__(self, i: Instruction, bracket: object, known: tuple[str, ...]) -> None:
        dimension = next((m for m in i.mods if m in _DIMENSIONS), "")
        self.scattered = i.has("tile::gather4") or i.has("tile::scatter4")
        if any(m.startswith("im2col") for m in i.mods):
            raise Unsupported("im2col modes; .tile, .tile::gather4 and .tile::scatter4 are supported")
        allow(i, (*known, dimension, HINT, "tile"))
        if not dimension or not isinstance(bracket, TensorMem) or not isinstance(bracket.parts[0], Vec):
            raise Unsupported("a tensor operand [map, {coordinates}] and a number of dimensions .1d to .5d are needed")
        self.i = i
        self.rank = int(dimension[0])
        self.map = scalar(bracket.base)
        self.coordinates: list[Scalar] = [signed(scalar(c)) for c in bracket.parts[0].items]
        if len(self.coordinates) != (_ROWS + 1 if self.scattered else self.rank) or (self.scattered and self.rank != 2):
            raise Unsupported(f"{len(self.coordinates)} coordinates for .{dimension}")

    def find(self, warp: Warp, lane: int) -> tuple[TensorMap, int] | None:
        """The map and its address; None after a finding."""
        address = self.map(warp, lane)
        try:
            m = lookup(warp.cta.launch, address)
        except ValueError as reason:
            warp.cta.report(DescriptorError, f"{reason}\n  {self.i.where()}")
            return None
        if m.rank != self.rank or (self.scattered and m.box[1] != 1):
            needed = f"{self.rank} dimensions" + (" and a box of one row" if self.scattered else "")
            warp.cta.report(DescriptorError, f"{m}: the instruction needs {needed}\n  {self.i.where()}")
            return None
        return m, address

    def tile(self, warp: Warp, lane: int) -> tuple[Tile, int] | None:
        found = self.find(warp, lane)
        if found is None:
            return None
        map_fences.check(warp, lane, found[1], self.i)
        at = tuple(c(warp, lane) for c in self.coordinates)
        tile = Tile(warp, found[0], at, self.scattered, self.i)
        return (tile, found[1]) if tile.legal else None


def _map_access(warp: Warp, address: int) -> list[Access]:
    """The reading of a map in global memory, where a kernel may have made it."""
    shadow = warp.cta.launch.device.memory.shadow
    if address < GLOBAL_BASE or shadow is None:
        return []
    start = address - GLOBAL_BASE >> shadow.shift
    return [Access(shadow, slice(start, start + (BYTES >> shadow.shift)), False, proxy=False)]


def _place(warp: Warp, tile: Tile, cta: Cta, offset: int, i: Instruction) -> Place | None:
    if offset % SHARED_ALIGNMENT:
        warp.cta.report(
            AlignmentError, f"shared address {offset:#x}: a multiple of {SHARED_ALIGNMENT} is needed\n  {i.where()}"
        )
        return None
    place = Place(tile.map, offset, tile.rows)
    cta.check_shared(offset, place.size, i)
    return place


@special("cp.async.bulk.tensor")
def copy(kernel: Kernel, i: Instruction) -> Callable:
    if isinstance(i.args[0], TensorMem):
        form = Form(i, i.args[0], ("async", "bulk", "tensor", "global", "shared::cta", "bulk_group", "tile::scatter4"))
        return _store(form, "")
    groups = ("cta_group::1", "cta_group::2")
    known = (
        "async",
        "bulk",
        "tensor",
        "global",
        "shared::cta",
        "shared::cluster",
        COMPLETION,
        "multicast::cluster",
        "tile::gather4",
    )
    return _load(Form(i, i.args[1], (*known, *groups)))


def _load(form: Form) -> Callable:
    i = form.i
    to, mbarrier = scalar(i.args[0]), scalar(i.args[2])
    multicast = scalar(i.args[3]) if i.has("multicast::cluster") else None
    own, pair = i.has("shared::cta"), i.has("cta_group::2")

    def one(warp: Warp, lane: int) -> None:
        found = form.tile(warp, lane)
        if found is None:
            return
        tile, address = found
        cta, offset = warp.cta.resolve_shared(to(warp, lane))
        home, bar = warp.cta.resolve_shared(mbarrier(warp, lane))
        place = _place(warp, tile, cta, offset, i)
        if place is None:
            return
        if own and cta is not warp.cta:
            warp.cta.report(
                DescriptorError, f"the destination is in block rank {cta.rank}, not in this block\n  {i.where()}"
            )
        if multicast is None and home is not cta and not (pair and home.rank ^ 1 == cta.rank):
            warp.cta.report(
                DescriptorError,
                f"the mbarrier is in block rank {home.rank}, the data in {cta.rank}: the same is needed, "
                f"or its pair with .cta_group::2\n  {i.where()}",
            )
        targets = destinations(warp, i, cta, None if multicast is None else multicast(warp, lane) & 0xFFFF)
        check_alive(warp, targets, i)
        ctas = warp.cta.cluster.ctas
        homes = [home] if multicast is None else [ctas[c.rank & ~1 | home.rank & 1] if pair else c for c in targets]
        signals = [completion(warp, c, bar, i) for c in homes]
        token = warp.cta.check_async(
            warp,
            1 << lane,
            lambda: [*_map_access(warp, address), *tile.accesses(False), *(place.access(c, True) for c in targets)],
            i,
        )

        def work() -> None:
            data = tile.read()
            for c, signal in zip(targets, signals, strict=True):
                _chunked(c)[place.chunks] = data
                signal(tile.bytes, token)

        warp.cta.launch.count_bytes("TMA load global->shared", tile.bytes * len(targets))
        warp.cta.issue("tma loads", work, name=i.name)

    return each(one)


def _store(form: Form, operation: str) -> Callable:
    """From shared to global memory; `operation` "" copies."""
    i = form.i
    source = scalar(i.args[1])
    path = f"TMA {'reduce' if operation else 'store'} shared->global"

    def one(warp: Warp, lane: int) -> None:
        found = form.tile(warp, lane)
        if found is None:
            return
        tile, address = found
        cta, offset = warp.cta.resolve_shared(source(warp, lane))
        place = _place(warp, tile, cta, offset, i)
        if place is None:
            return
        if cta is not warp.cta:
            warp.cta.report(
                DescriptorError, f"the source is in block rank {cta.rank}, not in this block\n  {i.where()}"
            )
        function = None
        if operation:
            function = _reducer(warp, tile.map, operation, i)
            if function is None:
                return
            if tile.memory.shadow is not None:
                for _, c in tile.inside:
                    check_initialised(warp.cta, footprint(tile.memory.shadow, c, True), i)
        warp.cta.launch.count_bytes(path, tile.bytes)
        record_store(
            warp,
            lane,
            i,
            lambda: [*_map_access(warp, address), place.access(cta, False)],
            lambda: tile.accesses(True, bool(operation)),
            # A slice is a view, and the source may be overwritten once it is read.
            lambda: _chunked(cta)[place.chunks].copy(),
            lambda data: tile.write(data, function),
        )

    return each(one)


def _reducer(warp: Warp, m: TensorMap, operation: str, i: Instruction) -> Combine | None:
    kind = (_BITWISE_AS if operation in ("and", "or", "xor") else _REDUCED_AS).get(m.element, "")
    # The table for tensors has no f64 (PTX ISA 9.7.9.25.5.3).
    if kind not in GLOBAL_TYPES[operation]:
        warp.cta.report(
            DescriptorError, f"reduction .{operation} on elements {m.element}: no such combination\n  {i.where()}"
        )
        return None
    return reducer(operation, kind)


@special("cp.reduce.async.bulk.tensor")
def reduce_tensor(kernel: Kernel, i: Instruction) -> Callable:
    operation = next((m for m in i.mods if m in OPERATIONS), "")
    if not operation:
        raise Unsupported("a reduction without an operation")
    known = ("reduce", "async", "bulk", "tensor", "global", "shared::cta", "bulk_group", operation)
    return _store(Form(i, i.args[0], known), operation)


@special("cp.async.bulk.prefetch.tensor")
def prefetch_tensor(kernel: Kernel, i: Instruction) -> Callable:
    """A hint; map and box are checked all the same."""
    form = Form(i, i.args[0], ("async", "bulk", "prefetch", "tensor", "L2", "global", "tile::gather4"))

    def one(warp: Warp, lane: int) -> None:
        form.tile(warp, lane)

    return each(one)


# Maps that a kernel makes ---------------------------------------------------------------------------------------------
@special("tensormap.replace")
def replace(kernel: Kernel, i: Instruction) -> Callable:
    """A field of a map in shared or global memory, by the generic proxy. PTX ISA 9.7.9.26."""
    allow(i, ("replace", "tile", i.mods[2], "global", "shared::cta", "b1024", "b32", "b64"))
    field = i.mods[2]
    address, value = scalar(i.args[0]), scalar(i.args[-1])
    ordinal = immediate(i.args[1], "the ordinal") if len(i.args) > 2 else 0
    space = next((m for m in i.mods if m in ("global", "shared::cta")), "").replace("::cta", "")
    spec = access.Spec(i, space, 8, 1, True, "")

    def one(warp: Warp, lane: int) -> None:
        start = address(warp, lane)
        if start % BYTES:
            warp.cta.report(
                AlignmentError, f"tensor map address {start:#x}: a multiple of {BYTES} is needed\n  {i.where()}"
            )
        only = np.zeros(32, bool)
        only[lane] = True
        # A weak operation on all 1024 bits: the race check covers each of the 16 words.
        places = [access.locate(warp, only, spec, np.full(32, start + at, np.int64)) for at in range(0, BYTES, 8)]
        memory, first = places[0][0], int(places[0][1][0])
        try:
            fresh = replaced(memory.u8[first : first + BYTES].tobytes(), field, ordinal, value(warp, lane))
        except ValueError as reason:
            warp.cta.report(DescriptorError, f"{reason}\n  {i.where()}")
            return
        memory.u8[first : first + BYTES] = np.frombuffer(fresh, np.uint8)

    return each(one)


@special("tensormap.cp_fenceproxy")
def copy_fence(kernel: Kernel, i: Instruction) -> Callable:
    """A warp copies a map from shared to global memory and releases it to the tensormap proxy. PTX ISA 9.7.13.17."""
    allow(
        i,
        (
            "cp_fenceproxy",
            "global",
            "shared::cta",
            "tensormap::generic",
            "release",
            "cta",
            "cluster",
            "gpu",
            "sys",
            "sync",
            "aligned",
        ),
    )
    to, source, size = scalar(i.args[0]), scalar(i.args[1]), immediate(i.args[2], "the size")
    if size != BYTES:
        raise Unsupported(f"a tensor map of {size} bytes; {BYTES} are needed")
    load, store = access.Spec(i, "shared", 8, 1, False, ""), access.Spec(i, "global", 8, 1, True, "")

    def run(warp: Warp, mask: np.ndarray | None) -> None:
        if not warp.converged(mask):
            warp.cta.report(ConvergenceError, f"{warp.label}: executed by a part of the warp\n  {i.where()}")
        if warp.actor is not None:
            warp.actor.synchronise(warp.live)
        lane = first_lane(mask)
        words = np.zeros(32, bool)
        words[: BYTES // 8] = True
        # Lanes 0..15 stand for the 16 words; the whole warp executes it.
        spread = 8 * np.arange(32)
        origin, at = access.locate(warp, words, load, (source(warp, lane) & (SHARED_WINDOW - 1)) + spread)
        target, there = access.locate(warp, words, store, to(warp, lane) + spread)
        target.u64[there >> 3] = origin.u64[at >> 3]
        if warp.actor is not None:
            warp.actor.synchronise(warp.live)
        access.fence(warp, mask)

    return run
