"""Where the tensor-core instructions find their operands: pure functions from descriptors and shapes to index arrays.

Nothing here holds emulator state. Every function returns numpy int64 arrays that are cached and therefore READ-ONLY
(copy before writing), and raises `ValueError` with a sentence that names the field, what was given and what is allowed.

Notation: lane = row of tensor memory (0..127), column = 32-bit column of tensor memory, relative to the address operand
of the instruction; `thread` 0..31 in a warp, 0..127 in a warpgroup; `sub` = position of an element inside its 32-bit
register, 0 = the low bits. Sources are PTX ISA sections: 9.7.16 (tcgen05), 9.7.15 (wgmma), 9.7.14 (mma.sync, ldmatrix).
`layout_tables/` holds tables enumerated from another description of the same hardware; the tests compare.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, TypeVar

import numpy as np

# An address's bits selected by MASK after the shift are XORed onto it. The unit is 16 bytes, 32 for the 32-byte atom.
_SWIZZLE_XOR = {
    "none": (0, 0),
    "32B": (3, 0x10),
    "64B": (3, 0x30),
    "128B": (3, 0x70),
    "128B_ATOM32B": (2, 0x60),
}
_SWIZZLE_WIDTH = {"32B": 32, "64B": 64, "128B": 128, "128B_ATOM32B": 128}
SWIZZLE_MODES = tuple(_SWIZZLE_XOR)

Address = TypeVar("Address", int, np.ndarray)


def swizzle(address: Address, mode: str, base_offset: int = 0) -> Address:
    """The shared-memory byte address after swizzling, from the ABSOLUTE byte address (int or integer array).

    The pattern depends on address bits only, so TMA and the tensor core agree without knowing each other's start
    (PTX ISA 5.5.7, 9.7.16.3.3). A matrix descriptor's `base_offset` (0..7) is subtracted from the row of the pattern;
    that is how an H200 does it with 128B (truth/data, wgmma cases with a base offset).
    ValueError for a mode not in SWIZZLE_MODES.
    """
    if mode not in _SWIZZLE_XOR:
        raise ValueError(f"swizzle mode {mode!r} is unknown; allowed: {', '.join(SWIZZLE_MODES)}")
    shift, mask = _SWIZZLE_XOR[mode]
    return address ^ (((address >> shift) - (base_offset << 7 - shift)) & mask)


@dataclass(frozen=True)
class MatrixDescriptor:
    """A shared-memory matrix descriptor (64 bits): byte addresses and strides, and the swizzle mode by name."""

    start: int
    leading: int
    stride: int
    base_offset: int
    absolute_leading: bool
    swizzle: str


_WGMMA_SWIZZLE = {0: "none", 1: "128B", 2: "64B", 3: "32B"}
_TCGEN05_SWIZZLE = {0: "none", 1: "128B_ATOM32B", 2: "128B", 4: "64B", 6: "32B"}


def _field(bits: int, low: int, high: int) -> int:
    """Bits low..high, both included."""
    return (bits >> low) & ((1 << (high - low + 1)) - 1)


def _require_zero(bits: int, ranges: tuple[tuple[int, int], ...], what: str) -> None:
    for low, high in ranges:
        if _field(bits, low, high):
            given = _field(bits, low, high)
            raise ValueError(f"{what} {bits:#x}: reserved bits {low}-{high} are {given:#x}; they must be 0")


@lru_cache(maxsize=4096)
def decode_matrix_descriptor(bits: int, generation: str) -> MatrixDescriptor:
    """Decode the 64-bit descriptor of "wgmma" (PTX ISA 9.7.15.5.1.2.2) or "tcgen05" (PTX ISA 9.7.16.4.1).

    ValueError: a reserved bit is set, the tcgen05 constant 0b001 in bits 46-48 is missing, the swizzle code is
    unassigned. Without a swizzle the base offset has no meaning and is ignored: Triton 3.8 leaves a bit of an
    unused stride there.
    """
    bits = int(bits)
    what = f"{generation} matrix descriptor"
    if generation == "wgmma":
        _require_zero(bits, ((14, 15), (30, 31), (46, 48), (52, 61)), what)
        code, names, absolute = _field(bits, 62, 63), _WGMMA_SWIZZLE, False
    elif generation == "tcgen05":
        _require_zero(bits, ((14, 15), (30, 31), (53, 60)), what)
        if _field(bits, 46, 48) != 0b001:
            raise ValueError(f"{what} {bits:#x}: bits 46-48 are {_field(bits, 46, 48):#05b}; they must be 0b001")
        code, names, absolute = _field(bits, 61, 63), _TCGEN05_SWIZZLE, bool(_field(bits, 52, 52))
    else:
        raise ValueError(f"generation {generation!r} is unknown; allowed: wgmma, tcgen05")
    if code not in names:
        raise ValueError(f"{what} {bits:#x}: swizzle code {code} is unassigned; allowed: {names}")
    base_offset = 0 if names[code] == "none" else _field(bits, 49, 51)
    return MatrixDescriptor(
        start=_field(bits, 0, 13) << 4,
        leading=_field(bits, 16, 29) << 4,
        stride=_field(bits, 32, 45) << 4,
        base_offset=base_offset,
        absolute_leading=absolute,
        swizzle=names[code],
    )


def _freeze(*arrays: np.ndarray) -> tuple[np.ndarray, ...]:
    """Cached results are shared between callers, so nobody may write into them."""
    frozen = tuple(np.ascontiguousarray(array, dtype=np.int64) for array in arrays)
    for array in frozen:
        array.setflags(write=False)
    return frozen


@lru_cache(maxsize=256)
def _matrix_offsets(
    leading: int, stride: int, mode: str, rows: int, k: int, element_bytes: int, mn_major: bool
) -> np.ndarray:
    """Unswizzled byte offsets [rows, k] from the descriptor's start."""
    row = np.arange(rows)[:, None]
    depth = np.arange(k)[None, :]
    core = 16 // element_bytes  # elements of one 16-byte unit of a core matrix
    if mode == "none":
        if mn_major:
            offset = (row // core) * stride + (row % core) * element_bytes + (depth // 8) * leading + (depth % 8) * 16
        else:
            offset = (row // 8) * stride + (row % 8) * 16 + (depth // core) * leading + (depth % core) * element_bytes
        return _freeze(offset)[0]
    width = _SWIZZLE_WIDTH[mode]
    if mn_major:
        atom_rows = width // element_bytes
        atom_depth = 4 if mode == "128B_ATOM32B" else 8
        offset = (row // atom_rows) * leading + (row % atom_rows) * element_bytes
        offset = offset + (depth // atom_depth) * stride + (depth % atom_depth) * width
    else:
        offset = (row // 8) * stride + (row % 8) * width + depth * element_bytes
    return _freeze(offset)[0]


@lru_cache(maxsize=1024)
def matrix_addresses(descriptor: MatrixDescriptor, rows: int, k: int, element_bytes: int, mn_major: bool) -> np.ndarray:
    """Byte address in shared memory of element (row, k): int64 [rows, k], swizzled.

    `rows` counts M (operand A) or N (operand B), `k` the depth of ONE instruction. Canonical layouts of PTX ISA
    9.7.16.3.2 (wgmma: 9.7.15.5.1.2); in swizzled K-major the leading offset is not used, because one instruction's
    depth of 32 bytes never leaves the swizzle width.
    ValueError: sub-byte elements, the 32-byte atom with K-major (its layout is stated nowhere), a swizzle that the
    element size excludes (9.7.16.10.3), a depth beyond the swizzle width, an absolute leading address (sm_103a only),
    or a base offset with another swizzle than 128B (no source states how the hardware applies it).
    """
    if element_bytes not in (1, 2, 4):
        raise ValueError(f"element_bytes is {element_bytes}; allowed: 1, 2, 4 (4- and 6-bit elements are not modelled)")
    if descriptor.absolute_leading:
        raise ValueError("matrix descriptor bit 52 (absolute leading address) is set; only relative mode is modelled")
    mode = descriptor.swizzle
    if descriptor.base_offset and mode != "128B":
        raise ValueError(
            f"matrix descriptor base offset is {descriptor.base_offset} with swizzle {mode}; it was seen with 128B only"
        )
    if mode == "128B_ATOM32B" and not mn_major:
        raise ValueError("swizzle 128B with 32-byte atoms is modelled for MN-major operands only, this one is K-major")
    if mn_major and (mode == "128B_ATOM32B") != (element_bytes == 4):
        raise ValueError(
            f"MN-major elements of {element_bytes} bytes have swizzle {mode}; 32-bit elements need 128B_ATOM32B, "
            "which smaller elements must not use"
        )
    if mode != "none" and not mn_major and k * element_bytes > _SWIZZLE_WIDTH[mode]:
        raise ValueError(
            f"a K-major row of {k} elements ({k * element_bytes} bytes) exceeds the swizzle width of "
            f"{_SWIZZLE_WIDTH[mode]} bytes"
        )
    offsets = _matrix_offsets(descriptor.leading, descriptor.stride, mode, rows, k, element_bytes, mn_major)
    return _freeze(swizzle(descriptor.start + offsets, mode, descriptor.base_offset))[0]


@dataclass(frozen=True)
class InstructionDescriptor:
    """The 32-bit instruction descriptor of tcgen05.mma; formats by PTX name, `max_shift` in rows (.ws only)."""

    kind: str
    sparse: bool
    sparse_selector: int
    saturate: bool
    d_format: str
    a_format: str
    b_format: str
    negate_a: bool
    negate_b: bool
    a_mn_major: bool
    b_mn_major: bool
    n: int
    m: int
    max_shift: int

    @property
    def element_bytes(self) -> int:
        """Bytes of one element of A or B in shared memory (6- and 4-bit elements take a byte each)."""
        return {"f16": 2, "tf32": 4}.get(self.kind, 1)

    @property
    def k(self) -> int:
        """Depth of one instruction in elements: 32 bytes, twice that when A is sparse."""
        return (64 if self.sparse else 32) // self.element_bytes


_D_FORMATS = {
    "f16": {0: "f16", 1: "f32"},
    "tf32": {1: "f32"},
    "f8f6f4": {0: "f16", 1: "f32"},
    "i8": {2: "s32"},
}
_AB_FORMATS = {
    "f16": {0: "f16", 1: "bf16"},
    "tf32": {2: "tf32"},
    "f8f6f4": {0: "e4m3", 1: "e5m2", 3: "e2m3", 4: "e3m2", 5: "e2m1"},
    "i8": {0: "u8", 1: "s8"},
}


def _format(bits: int, low: int, high: int, names: dict[int, str], operand: str, kind: str) -> str:
    code = _field(bits, low, high)
    if code not in names:
        raise ValueError(
            f"instruction descriptor {bits:#010x}: format {code} of {operand} is not allowed for kind::{kind}; "
            f"allowed: {names}"
        )
    return names[code]


def _check_mma_shape(result: InstructionDescriptor, cta_group: int, ws: bool, a_in_tensor: bool, where: str) -> None:
    """The shapes of PTX ISA 9.7.16.2.1. N is coarser for an MN-major B of 8 bits (9.7.16.10.1) and with A in tensor
    memory (CUTLASS asserts it)."""
    m, n, kind = result.m, result.n, result.kind
    byte_transpose = result.b_mn_major and result.element_bytes == 1
    rows: tuple[int, ...]
    if ws:
        if cta_group != 1:
            raise ValueError(f"tcgen05.mma.ws has cta_group::{cta_group}; allowed: cta_group::1")
        rows, columns = (32, 64, 128), [64, 128] if result.sparse else [64, 128, 256]
    elif cta_group == 1:
        rows = (64, 128)
        step = 16 if byte_transpose or (a_in_tensor and m == 128) else 8
        columns = [8, 16, 24, *range(32, 257, 16)] if kind == "i8" else list(range(step, 257, step))
        columns = [size for size in columns if size % step == 0]
    elif cta_group == 2:
        rows = (128, 256)
        step = 32 if kind == "i8" or byte_transpose or a_in_tensor else 16
        columns = list(range(step, 257, step))
    else:
        raise ValueError(f"cta_group is {cta_group}; allowed: 1, 2")
    if m not in rows:
        raise ValueError(f"instruction descriptor M is {m}; allowed for {where}: {rows}")
    if n not in columns:
        raise ValueError(f"instruction descriptor N is {n}; allowed for {where}, M={m}: {columns}")


@lru_cache(maxsize=512)
def decode_instruction_descriptor(
    bits: int, kind: str, cta_group: int = 1, ws: bool = False, a_in_tensor_memory: bool = False
) -> InstructionDescriptor:
    """Decode and check the instruction descriptor of tcgen05.mma kind "f16", "tf32", "f8f6f4" or "i8" (9.7.16.4.2).

    ValueError: a reserved bit, a format the kind does not have, saturation outside i8, negation inside i8, an
    MN-major operand of 4 or 6 bits or in tensor memory, a shape the instruction does not have, a shift without `.ws`.
    """
    bits = int(bits)
    if kind not in _AB_FORMATS:
        raise ValueError(f"kind::{kind} is not modelled; allowed: {', '.join(_AB_FORMATS)}")
    what = f"instruction descriptor {bits:#010x}"
    _require_zero(bits, ((6, 6), (23, 23), (29, 29), (32, 63)), "instruction descriptor")
    result = InstructionDescriptor(
        kind=kind,
        sparse=bool(_field(bits, 2, 2)),
        sparse_selector=_field(bits, 0, 1),
        saturate=bool(_field(bits, 3, 3)),
        d_format=_format(bits, 4, 5, _D_FORMATS[kind], "D", kind),
        a_format=_format(bits, 7, 9, _AB_FORMATS[kind], "A", kind),
        b_format=_format(bits, 10, 12, _AB_FORMATS[kind], "B", kind),
        negate_a=bool(_field(bits, 13, 13)),
        negate_b=bool(_field(bits, 14, 14)),
        a_mn_major=bool(_field(bits, 15, 15)),
        b_mn_major=bool(_field(bits, 16, 16)),
        n=_field(bits, 17, 22) << 3,
        m=_field(bits, 24, 28) << 4,
        max_shift=(0, 8, 16, 32)[_field(bits, 30, 31)],
    )
    if result.sparse_selector and not result.sparse:
        raise ValueError(f"{what}: sparsity selector {result.sparse_selector} without the sparsity bit; it must be 0")
    if result.saturate and kind != "i8":
        raise ValueError(f"{what}: the saturate bit is set for kind::{kind}; it is allowed for kind::i8 only")
    if kind == "i8" and (result.negate_a or result.negate_b):
        raise ValueError(f"{what}: a negate bit is set for kind::i8; integer operands cannot be negated")
    if result.d_format == "f16" and kind == "f16" and "bf16" in (result.a_format, result.b_format):
        raise ValueError(f"{what}: D is f16 with bf16 operands; bf16 operands need an f32 D")
    for name, mn_major, element in (
        ("A", result.a_mn_major, result.a_format),
        ("B", result.b_mn_major, result.b_format),
    ):
        if mn_major and element in ("e2m3", "e3m2", "e2m1"):
            raise ValueError(f"{what}: {name} is MN-major {element}; 4- and 6-bit operands must be K-major")
    if a_in_tensor_memory and result.a_mn_major:
        raise ValueError(f"{what}: A is in tensor memory and MN-major; A in tensor memory must be K-major")
    if result.max_shift and not ws:
        raise ValueError(f"{what}: maximum shift {result.max_shift} without .ws; it must be 0")
    where = f"kind::{kind}, cta_group::{cta_group}{', .ws' if ws else ''}{', sparse' if result.sparse else ''}"
    _check_mma_shape(result, cta_group, ws, a_in_tensor_memory, where)
    return result


def _grid(*counts: int) -> tuple[np.ndarray, ...]:
    """Broadcast index arrays of the given extents."""
    return tuple(np.indices(counts, dtype=np.int64))


def _check_lane_offset(lane_offset: int, allowed: tuple[int, ...], case: str) -> None:
    if lane_offset not in allowed:
        raise ValueError(f"tensor memory lane offset is {lane_offset}; allowed for {case}: {allowed}")


def accumulator_layout(m: int, cta_group: int = 1, ws: bool = False) -> str:
    """The letter PTX ISA 9.7.16.10.5 gives to the organisation of D for a dense A: A, B, D, E, F or G."""
    letters = {
        (256, 2, False): "A",
        (128, 2, False): "B",
        (128, 1, False): "D",
        (128, 1, True): "D",
        (64, 1, True): "E",
        (64, 1, False): "F",
        (32, 1, True): "G",
    }
    if (m, cta_group, ws) not in letters:
        allowed = sorted(letters)
        raise ValueError(f"no accumulator layout for (M, cta_group, .ws) = {(m, cta_group, ws)}; allowed: {allowed}")
    return letters[m, cta_group, ws]


@lru_cache(maxsize=256)
def accumulator_cells(
    m: int, n: int, cta_group: int = 1, ws: bool = False, lane_offset: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Tensor memory cell of D element (row, n): (lane, column), each int64 [rows of this CTA, n].

    `m` is the instruction's M; with cta_group 2 each CTA holds m/2 rows: CTA r of the pair rows r*m/2 and up.
    `lane_offset` is the lane field of the D address: 0, or for layout F also 16 (the upper half of each 32-lane
    quarter); it is included in the lanes returned. Columns are relative to the D address.
    Every D element takes one 32-bit column whatever its type: an f16 D sits in the low half of its column.
    """
    letter = accumulator_layout(m, cta_group, ws)
    _check_lane_offset(lane_offset, (0, 16) if letter == "F" else (0,), f"layout {letter}")
    folds = {"B": 2, "E": 2, "G": 4}.get(letter, 1)
    if n % folds:
        raise ValueError(f"N is {n}; layout {letter} needs a multiple of {folds}")
    row, column = _grid(m // cta_group, n)
    if letter == "F":
        lane = row % 16 + 32 * (row // 16) + lane_offset
    else:
        # The datapath is split in `folds` groups of lanes, each taking its share of the N columns.
        lane = row + (128 // folds) * (column // (n // folds))
        column = column % (n // folds)
    lane, column = _freeze(lane, column)
    return lane, column


@lru_cache(maxsize=256)
def a_operand_cells(
    m: int, k_bytes: int, cta_group: int = 1, ws: bool = False, lane_offset: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Operand A in tensor memory: (lane, column, byte in column), each int64 [copies, rows of this CTA, k_bytes].

    `k_bytes` is one row's depth of the instruction in bytes (32 for a dense A); elements of 8, 16 and 32 bits are
    packed 4, 2 and 1 to a column. Rows use the lanes of D (PTX ISA 9.7.16.10.5: A and D share their alignment).
    `copies` is 1 except for layout B (cta_group 2, M=128), whose two lane halves compute different columns of D and
    each read their own copy of A: copy c serves the columns n with n // (N/2) == c.
    ValueError: `.ws` with M of 32 or 64 (no source states where A lies), a depth that is not whole columns.
    """
    letter = accumulator_layout(m, cta_group, ws)
    if letter in ("E", "G"):
        raise ValueError(f"A in tensor memory with .ws and M={m} is not modelled; allowed with .ws: M=128")
    if k_bytes % 4:
        raise ValueError(f"k_bytes is {k_bytes}; it must be a multiple of 4 (whole columns)")
    _check_lane_offset(lane_offset, (0, 16) if letter == "F" else (0,), f"layout {letter}")
    copy, row, byte = _grid(2 if letter == "B" else 1, m // cta_group, k_bytes)
    lane = row % 16 + 32 * (row // 16) + lane_offset if letter == "F" else row + 64 * copy
    lane, column, byte = _freeze(lane, byte // 4, byte % 4)
    return lane, column, byte


_REGISTERS_PER_COUNT = {"32x32b": 1, "16x64b": 1, "16x128b": 2, "16x256b": 4, "16x32bx2": 1}
_MAXIMUM_COUNT = {"32x32b": 128, "16x64b": 128, "16x128b": 64, "16x256b": 32, "16x32bx2": 128}


@lru_cache(maxsize=256)
def register_cells(shape: str, count: int, split: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """tcgen05.ld/st: cell behind register r of thread t: (lane, column), each int64 [registers, 32 threads].

    Lanes and columns are relative to the address operand; `count` is the .xN suffix; `split` is the immediate column
    distance of the upper half, for "16x32bx2" only (PTX ISA 9.7.16.2.3).
    """
    if shape not in _REGISTERS_PER_COUNT:
        raise ValueError(f"tcgen05.ld/st shape {shape!r} is unknown; allowed: {', '.join(_REGISTERS_PER_COUNT)}")
    if count not in [1 << i for i in range(_MAXIMUM_COUNT[shape].bit_length())]:
        raise ValueError(f"{shape} has .x{count}; allowed: powers of two up to .x{_MAXIMUM_COUNT[shape]}")
    if split and shape != "16x32bx2":
        raise ValueError(f"{shape} has the column split {split}; only 16x32bx2 takes one")
    register, thread = _grid(count * _REGISTERS_PER_COUNT[shape], 32)
    if shape == "32x32b":
        lane, column = thread, register
    elif shape == "16x32bx2":
        lane, column = thread % 16, register + split * (thread // 16)
    elif shape == "16x64b":
        lane, column = thread // 4 + 8 * (thread % 2), (thread // 2) % 2 + 2 * register
    elif shape == "16x128b":
        lane, column = thread // 4 + 8 * (register % 2), thread % 4 + 4 * (register // 2)
    else:
        lane = thread // 4 + 8 * ((register // 2) % 2)
        column = register % 2 + 2 * (thread % 4) + 8 * (register // 4)
    lane, column = _freeze(lane, column)
    return lane, column


@lru_cache(maxsize=256)
def packed_register_cells(shape: str, count: int, split: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """tcgen05.ld.pack::16b / st.unpack::16b: cell of half h of register r: (lane, column), int64 [registers, 2, 32].

    Each half is the LOW 16 bits of a column of its own, so the instruction spans twice the columns of the plain form.
    """
    lane, column = register_cells(shape, count)
    upper = split * (np.arange(32) // 16) if shape == "16x32bx2" else 0
    if split and shape != "16x32bx2":
        raise ValueError(f"{shape} has the column split {split}; only 16x32bx2 takes one")
    half = np.arange(2)[None, :, None]
    lane, column = _freeze(lane[:, None, :] + 0 * half, 2 * column[:, None, :] + half + upper)
    return lane, column


@lru_cache(maxsize=8)
def wgmma_a_fragment(element_bytes: int) -> tuple[np.ndarray, np.ndarray]:
    """A of wgmma in registers: (row, k), each int64 [4 registers, 4/element_bytes subs, 128 threads] (9.7.15.5.1.1)."""
    if element_bytes not in (1, 2, 4):
        raise ValueError(f"element_bytes is {element_bytes}; allowed: 1, 2, 4")
    per_register = 4 // element_bytes
    register, sub, thread = _grid(4, per_register, 128)
    row = 16 * (thread // 32) + thread % 32 // 4 + 8 * (register % 2)
    k = per_register * (thread % 4) + sub + 4 * per_register * (register // 2)
    row, k = _freeze(row, k)
    return row, k


class Fragment(NamedTuple):
    """Matrix coordinates of the elements a warp holds; each int64 [registers, elements per register, 32 threads]."""

    row: np.ndarray
    column: np.ndarray


class MmaFragments(NamedTuple):
    """Operands of mma.sync: a is (m, k), b is (k, n), c is (m, n); c serves for d too."""

    a: Fragment
    b: Fragment
    c: Fragment


# (m, n) -> the k of each element size in bytes. m8n8k4 of f16 is absent: it computes four products in its own layout.
_MMA_DEPTHS: dict[tuple[int, int], dict[int, tuple[int, ...]]] = {
    (16, 8): {1: (16, 32), 2: (8, 16), 4: (4, 8), 8: (4, 8, 16)},
    (8, 8): {1: (16,), 8: (4,)},
}


@lru_cache(maxsize=64)
def mma_fragments(shape: str, element_bytes: int, accumulator_bytes: int = 4) -> MmaFragments:
    """Fragments of mma.sync "m16n8k16" and so on, for A and B elements of `element_bytes` (PTX ISA 9.7.14.5).

    A "register" has 4 bytes, or 8 for f64 (element_bytes 8). `accumulator_bytes` is 2 (f16, two to a register), 4 or 8.
    ValueError: a shape the element size does not have; sub-byte elements.
    """
    try:
        m, rest = shape.removeprefix("m").split("n")
        n, k = (int(part) for part in rest.split("k"))
        rows = int(m)
    except ValueError:
        raise ValueError(f"mma shape {shape!r} is not of the form m16n8k16") from None
    depths = _MMA_DEPTHS.get((rows, n), {}).get(element_bytes, ())
    if k not in depths:
        raise ValueError(
            f"mma shape {shape} with elements of {element_bytes} bytes is not modelled; allowed: {_MMA_DEPTHS}"
        )
    if accumulator_bytes not in ((8,) if element_bytes == 8 else (2, 4)):
        raise ValueError(f"accumulators of {accumulator_bytes} bytes do not go with elements of {element_bytes} bytes")
    per_register = max(1, 4 // element_bytes)
    row_groups = rows // 8
    register, sub, thread = _grid(row_groups * k // (4 * per_register), per_register, 32)
    a = Fragment(
        *_freeze(
            thread // 4 + 8 * (register % row_groups),
            per_register * (thread % 4) + sub + 4 * per_register * (register // row_groups),
        )
    )
    register, sub, thread = _grid(k // (4 * per_register), per_register, 32)
    b = Fragment(*_freeze(per_register * (thread % 4) + sub + 4 * per_register * register, thread // 4))
    per_register = 2 if accumulator_bytes == 2 else 1
    register, sub, thread = _grid(2 * row_groups // per_register, per_register, 32)
    value = register * per_register + sub
    c = Fragment(*_freeze(thread // 4 + 8 * (value // 2), 2 * (thread % 4) + value % 2))
    return MmaFragments(a, b, c)


@lru_cache(maxsize=8)
def copy_lanes(shape: str) -> np.ndarray:
    """tcgen05.cp: lanes that source row r is written to: int64 [copies, rows], relative to the address (9.7.16.9).

    `shape` with its multicast, such as "64x128b.warpx2::02_13". A row is 128 bits (4 columns) or 256 bits (8 columns).
    """
    row = np.arange(128)
    lanes = {
        "128x256b": row[None, :],
        "128x128b": row[None, :],
        "64x128b.warpx2::02_13": row.reshape(2, 64),
        "64x128b.warpx2::01_23": row.reshape(2, 2, 32).swapaxes(0, 1).reshape(2, 64),
        "32x128b.warpx4": row.reshape(4, 32),
        "4x256b": row[None, ::32],
    }
    if shape not in lanes:
        raise ValueError(f"tcgen05.cp shape {shape!r} is unknown; allowed: {', '.join(lanes)}")
    return _freeze(lanes[shape])[0]
