"""tcgen05.ld, tcgen05.st and tcgen05.cp: tensor memory from and to registers, and from shared memory.

PTX ISA 9.7.16.2.3 (shapes), 9.7.16.8 (ld, st), 9.7.16.9 (cp). tcgen05.shift is refused: see `shift`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..cta import TENSOR_COLUMNS
from ..errors import BoundsError, DescriptorError, TensorMemoryError
from ..ir import Instruction, Kernel, Reg, Vec
from ..layouts import copy_lanes, decode_matrix_descriptor, matrix_addresses, packed_register_cells, register_cells
from ..operands import immediate, lanes, registers, scalar, vector
from ..registry import Unsupported, special
from .tcgen05_common import (
    QUEUE,
    add_issued,
    aligned,
    blocks_of,
    check_cells,
    cta_group,
    granule_base,
    granules,
    open_marker,
    pipeline_of,
    refuse_modifiers,
    split_address,
    tensor_access,
)
from .tcgen05_sync import transfers

if TYPE_CHECKING:
    from ..cta import Cta
    from ..warp import Warp

QUARTER = 32  # lanes that one warp of four can reach
WORD = 4


# Registers ------------------------------------------------------------------------------------------------------------
class Cells(NamedTuple):
    """What one ld or st touches, relative to lane 0, column 0."""

    flat: np.ndarray  # lane * 512 + column, int64 [registers, 32], packed: [registers, 2, 32]
    granules: np.ndarray
    rows: int
    columns: int


@lru_cache(maxsize=256)
def cells_of(shape: str, count: int, split: int, packed: bool) -> Cells:
    lane, column = (packed_register_cells if packed else register_cells)(shape, count, split)
    return Cells(
        lane * TENSOR_COLUMNS + column,
        granules(lane, column),
        QUARTER if shape == "32x32b" else 16,
        int(column.max()) + 1,
    )


class Form(NamedTuple):
    """The modifiers and operands of a ld or st."""

    cells: Cells
    registers: list[int]
    operands: list[Reg]
    address: Callable[[Warp], np.ndarray]


_SHAPES = ("32x32b", "16x64b", "16x128b", "16x256b", "16x32bx2")


def _form(i: Instruction, data: object, memory: object, rest: list[object], packing: str) -> Form:
    refuse_modifiers(i, {"sync", "aligned", "b32", packing, *_SHAPES, *(f"x{1 << n}" for n in range(8))})
    shapes = [m for m in i.mods if m in _SHAPES]
    counts = [int(m[1:]) for m in i.mods if m[0] == "x" and m[1:].isdigit()]
    if len(shapes) != 1 or len(counts) != 1:
        raise Unsupported(f"one shape of {', '.join(_SHAPES)} and one of .x1 to .x128 are needed")
    split = 0
    if shapes[0] == "16x32bx2":
        if not rest:
            raise Unsupported("16x32bx2 needs the immediate distance of its second half")
        split = immediate(rest.pop(0), "the distance of the second half")
    if rest:
        raise Unsupported(f"{len(rest)} operand(s) too many")
    try:
        cells = cells_of(shapes[0], counts[0], split, i.has(packing))
    except ValueError as problem:
        raise Unsupported(str(problem)) from None
    items = data.items if isinstance(data, Vec) else (data,)
    if len(items) != len(cells.flat) or not all(isinstance(r, Reg) and r.cls == "w" for r in items):
        raise Unsupported(f"{len(items)} registers, {len(cells.flat)} of 32 bits are needed")
    return Form(cells, registers(data), list(items), vector(memory, "u32"))


def _place(warp: Warp, form: Form, i: Instruction) -> tuple[int, int] | None:
    """(lane, column) that all threads name, checked; None after a finding."""
    addresses = form.address(warp)
    address = int(addresses[0])
    if (addresses != address).any():
        other = int(np.argmax(addresses != address))
        warp.cta.report(
            TensorMemoryError,
            f"{warp.label}: all threads must name the same address; thread 0 has {address:#x}, thread {other} "
            f"{int(addresses[other]):#x}\n  {i.where()}",
        )
        return None
    lane, column = split_address(address)
    rows = form.cells.rows
    first = QUARTER * (warp.number % 4)
    allowed = range(first, first + QUARTER - rows + 1, 16)
    if lane not in allowed:
        warp.cta.report(
            TensorMemoryError,
            f"{warp.label}: lane {lane} in tensor memory address {address:#x}; this warp of its four reaches lanes "
            f"{first}..{first + QUARTER - 1}, allowed for {rows} rows: {' or '.join(map(str, allowed))}\n  {i.where()}",
        )
        return None
    columns = (column, column + form.cells.columns)
    if not check_cells(warp, warp.cta, f"tcgen05.{i.mods[0]}", (lane, lane + rows), columns, i):
        return None
    return lane, column


@special("tcgen05.ld")
def load(kernel: Kernel, i: Instruction) -> Callable:
    """The destination registers belong to the load until tcgen05.wait::ld."""
    if i.mods[1] == "red":
        raise Unsupported("tcgen05.ld.red exists on sm_103 and sm_110 only, which are not modelled")
    form = _form(i, i.args[0], i.args[1], list(i.args[2:]), "pack::16b")
    packed = i.has("pack::16b")
    rows = _rows(form.registers)
    owned: list[int] = []

    def run(warp: Warp, mask: np.ndarray | None) -> None:
        aligned(warp, mask, i)
        cta, place = warp.cta, _place(warp, form, i)
        if place is None:
            return
        base = place[0] * TENSOR_COLUMNS + place[1]
        assert cta.tensor is not None
        source, target = cta.tensor.reshape(-1), warp.file("w")

        def work() -> None:
            values = source[form.cells.flat + base]
            target[rows] = (values[:, 0] & 0xFFFF) | values[:, 1] << 16 if packed else values

        token = cta.check_async(
            warp,
            warp.live,
            lambda: [tensor_access(cta, form.cells.granules + granule_base(*place), False)],
            i,
            tensor=True,
        )
        if not owned:
            owned.append(cta.program.register_bits(form.operands))
        warp.take(owned[0], i.index)
        transfers(warp, "ld").pending.append((cta.issue("tcgen05.ld", work, name=i.name), token, owned[0]))
        cta.launch.count_bytes("tcgen05.ld tensor memory->registers", form.cells.flat.size * (2 if packed else WORD))

    return run


def _rows(numbers: list[int]) -> slice | list[int]:
    """An index of register rows; a slice where they follow each other."""
    first = numbers[0]
    if numbers == list(range(first, first + len(numbers))):
        return slice(first, first + len(numbers))
    return numbers


@special("tcgen05.st")
def store(kernel: Kernel, i: Instruction) -> Callable:
    """Registers are read at issue; the cells are written before tcgen05.wait::st."""
    form = _form(i, i.args[-1], i.args[0], list(i.args[1:-1]), "unpack::16b")
    unpacked = i.has("unpack::16b")
    rows = _rows(form.registers)

    def run(warp: Warp, mask: np.ndarray | None) -> None:
        aligned(warp, mask, i)
        cta, place = warp.cta, _place(warp, form, i)
        if place is None:
            return
        base = place[0] * TENSOR_COLUMNS + place[1]
        assert cta.tensor is not None
        target = cta.tensor.reshape(-1)
        values = warp.file("w")[rows].copy()
        if unpacked:
            values = np.stack((values & 0xFFFF, values >> 16), 1)

        def work() -> None:
            target[form.cells.flat + base] = values

        token = cta.check_async(
            warp,
            warp.live,
            lambda: [tensor_access(cta, form.cells.granules + granule_base(*place), True)],
            i,
            tensor=True,
        )
        transfers(warp, "st").pending.append((cta.issue("tcgen05.st", work, name=i.name), token, 0))
        cta.launch.count_bytes("tcgen05.st registers->tensor memory", form.cells.flat.size * (2 if unpacked else WORD))

    return run


# Shared memory --------------------------------------------------------------------------------------------------------
# Shape with multicast -> rows, bytes of a row (9.7.16.9.2); layouts.copy_lanes has the lanes.
_COPIES: dict[str, tuple[int, int]] = {
    "128x256b": (128, 32),
    "128x128b": (128, 16),
    "4x256b": (4, 32),
    "64x128b.warpx2::02_13": (64, 16),
    "64x128b.warpx2::01_23": (64, 16),
    "32x128b.warpx4": (32, 16),
}


class CopyCells(NamedTuple):
    flat: np.ndarray  # lane * 512 + column, int64 [copies, rows, words]
    granules: np.ndarray
    highest: int  # lane


@lru_cache(maxsize=256)
def _copy_cells(shape: str, lane_offset: int) -> CopyCells:
    lane = copy_lanes(shape)[:, :, None] + lane_offset
    column = np.arange(_COPIES[shape][1] // WORD)
    lane, column = np.broadcast_arrays(lane, column)
    return CopyCells(lane * TENSOR_COLUMNS + column, granules(lane, column), int(lane.max()))


@lru_cache(maxsize=1024)
def _copy_source(descriptor: int, rows: int, width: int) -> np.ndarray:
    """Byte address of each 16-byte unit: int64 [rows, width / 16]."""
    decoded = decode_matrix_descriptor(descriptor, "tcgen05")
    return matrix_addresses(decoded, rows, width, 1, False)[:, ::16]


@special("tcgen05.cp")
def copy(kernel: Kernel, i: Instruction) -> Callable:
    """Rows of a K-major tile in shared memory to lanes of tensor memory; .cta_group::2: in both blocks of the pair."""
    group = cta_group(i)
    if any(m.startswith(("b8x16", "b6x16", "b4x16")) for m in i.mods):
        raise Unsupported("tcgen05.cp with decompression of 4- and 6-bit elements is not modelled")
    shape = ".".join(m for m in i.mods[1:] if not m.startswith("cta_group"))
    if shape not in _COPIES:
        raise Unsupported(f"shape .{shape}; allowed: {', '.join('.' + s for s in _COPIES)}")
    rows, width = _COPIES[shape]
    address, descriptor = scalar(i.args[0]), scalar(i.args[1])

    def run(warp: Warp, mask: np.ndarray | None) -> None:
        for lane in lanes(mask):
            ctas = blocks_of(warp, group, i)
            place, column = split_address(address(warp, lane))
            try:
                source = _copy_source(descriptor(warp, lane), rows, width)
            except ValueError as problem:
                warp.cta.report(DescriptorError, f"{warp.label}: tcgen05.cp source: {problem}\n  {i.where()}")
                continue
            cells = _copy_place(warp, ctas, shape, place, column, source, i)
            if cells is not None:
                _copy(warp, lane, ctas, source, cells, column, group, i)

    return run


def _copy_place(
    warp: Warp, ctas: list[Cta], shape: str, lane: int, column: int, source: np.ndarray, i: Instruction
) -> CopyCells | None:
    """The cells written, all checked, in every block; None after a finding."""
    highest_lane = QUARTER - 1 if shape == "4x256b" else 0
    if lane > highest_lane:
        warp.cta.report(
            TensorMemoryError,
            f"{warp.label}: tcgen05.cp.{shape} to lane {lane}; allowed: 0..{highest_lane}\n  {i.where()}",
        )
        return None
    cells = _copy_cells(shape, lane)
    last = column + _COPIES[shape][1] // WORD
    fits = bool(ctas)
    for cta in ctas:
        fits = fits and check_cells(warp, cta, "tcgen05.cp", (lane, cells.highest + 1), (column, last), i)
        if fits and int(source.max()) + 16 > cta.shared.size:
            cta.report(
                BoundsError,
                f"{warp.label}: tcgen05.cp reads shared bytes up to {int(source.max()) + 15:#x} of "
                f"{cta.shared.size:#x}\n  {i.where()}",
            )
            fits = False
    return cells if fits else None


def _copy(
    warp: Warp,
    lane: int,
    ctas: list[Cta],
    source: np.ndarray,
    cells: CopyCells,
    column: int,
    group: int,
    i: Instruction,
) -> None:
    units = (source[:, :, None] >> 2) + np.arange(WORD)  # the words of each 16-byte unit
    units = units.reshape(len(source), -1)

    def work() -> None:
        for cta in ctas:
            assert cta.tensor is not None
            cta.tensor.reshape(-1)[cells.flat + column] = cta.shared.u8.view(np.uint32)[units]

    actor, bit = warp.actor, 1 << lane
    if actor is not None:
        pipeline = pipeline_of(ctas)
        marker = open_marker(actor, bit)
        key = copy_key(group, warp)
        # No pair of the strict rule ends in cp: what precedes it must be waited for.
        before = 0 if warp.cta.launch.options.strict else pipeline.before(warp, bit, (key,))
        token = warp.cta.check_async(
            warp,
            bit,
            lambda: [
                access
                for cta in ctas
                for access in (
                    cta.shared_access_at(source, 16, False),
                    tensor_access(cta, cells.granules + column, True),
                )
            ],
            i,
            tensor=True,
            ordered=before,
        )
        pipeline.add(warp, bit, key, token, marker)
        add_issued(warp, bit, token)
    warp.cta.issue(QUEUE, work, ordered=True, name=i.name)
    warp.cta.launch.count_bytes("tcgen05.cp shared->tensor memory", len(ctas) * source.size * 16)


def copy_key(group: int, warp: Warp) -> tuple:
    """Key of cp in the pipeline: one for everything by default, its own under the strict rule."""
    return ("cp", group) if warp.cta.launch.options.strict else ("all",)


@special("tcgen05.shift")
def shift(kernel: Kernel, i: Instruction) -> Callable:
    """The ISA says "all the rows, except the last" here and "31x256b" in its table of shapes: two readings."""
    raise Unsupported(
        "tcgen05.shift is not modelled: sources disagree whether rows move within 32 lanes or within all 128"
    )
