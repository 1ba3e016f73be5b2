"""The tables of `tables.npz`: operand layouts of the tensor-core instructions as CuTe 4.2.0 states them.

CuTe describes the layouts as shapes and strides, the PTX ISA in figures and formulas, layouts.py in arithmetic of its
own: agreement of the first and the last is evidence, and the only one where no compiler emits a layout (`.ws`, two
CTAs). It is not a measurement on hardware. enumerate.cpp says how each table was made, pack.py how to make them anew.

Every function returns int32 arrays and raises KeyError with the names that exist when a table is not there.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

_FILE = Path(__file__).with_name("tables.npz")


@lru_cache(maxsize=1)
def _load() -> tuple[str, dict[str, tuple[int, tuple[int, ...]]], np.ndarray]:
    """(CUTLASS version, name -> (start, shape), all differenced words)."""
    with np.load(_FILE) as archive:
        index = json.loads(archive["index"].tobytes().decode("ascii"))
        words = np.stack([archive["low"], archive["high"]], axis=1).reshape(-1).view("<i4")
    places: dict[str, tuple[int, tuple[int, ...]]] = {}
    start = 0
    for name, shape in index["tables"].items():
        places[name] = (start, tuple(shape))
        start += int(np.prod(shape))
    return index["cutlass"], places, words


def cutlass_version() -> str:
    """The version of the headers the tables came from."""
    return _load()[0]


def names(prefix: str = "") -> list[str]:
    """Names of the tables that start with `prefix`, in the order of enumerate.cpp."""
    return [name for name in _load()[1] if name.startswith(prefix)]


def table(name: str) -> np.ndarray:
    """One table by its full name, as enumerate.cpp lays it out."""
    _, places, words = _load()
    if name not in places:
        family = name.split("/")[0] + "/"
        raise KeyError(f"no table {name!r}; there are {names(family) or names()}")
    start, shape = places[name]
    result = words[start : start + int(np.prod(shape))].reshape(shape)
    for axis in range(max(0, len(shape) - 2), len(shape)):
        result = np.cumsum(result, axis=axis, dtype=np.int32)
    return result


def tmem_accumulator(case: str, value: str, m: int, n: int, tile: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """D in tensor memory: (lane, column, bit in column), each [rows of one CTA, n].

    case "cta1", "cta2" (m counts both CTAs) or "ws"; value "f32" or "f16"; tile 1 is the second of two M=64 tiles,
    which CuTe interleaves into the other 16 lanes of each quarter. n steps by 8 (cta1), 16 (cta2), or is 64/128/256.
    """
    lane, column, bit = table(f"tmem_d/{case}/{value}/m{m}/n{n}/tile{tile}")
    return lane, column, bit


def tmem_operand_a(case: str, element_bytes: int, m: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A in tensor memory, 32 bytes deep: (lane, column, bit in column), each [rows, elements].

    case "cta1" (m 64, 128) or "cta2" (256, and 128 with 128 rows: the CTA's 64 rows and their copy).
    """
    lane, column, bit = table(f"tmem_a/{case}/{element_bytes}/m{m}")
    return lane, column, bit


def tmem_register_map(shape: str, count: int, packed: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """tcgen05.ld/st: (lane, column), each [registers, 1 or with pack::16b 2 halves, 32 threads].

    For 16x32bx2 the immediate column split is the one CuTe passes: `count`, or 2 * count packed.
    """
    lane, column = table(f"registers/{shape}/{count}" + ("/packed" if packed else ""))
    return lane, column


def tmem_copy_map(shape: str) -> tuple[np.ndarray, np.ndarray]:
    """tcgen05.cp: (source row, lane) of every row written; e.g. "128x256b", "32x128b.warpx4", "64x128b.warpx2::02_13".

    For "4x256b" CuTe counts the source rows 0, 32, 64, 96.
    """
    row, lane = table(f"copy/{shape}")
    return row, lane


@dataclass(frozen=True)
class SharedMatrix:
    """A canonical layout of shared memory.

    `offsets` [rows, k] are swizzled byte offsets from a base aligned to the pattern; `descriptor` is the 64-bit matrix
    descriptor with start address 0; `starts` [k steps] the start address in bytes of each instruction's 32-byte depth.
    """

    offsets: np.ndarray
    descriptor: int
    starts: np.ndarray


def shared_matrix(
    generation: str, major: str, swizzle: str, element_bits: int, rows: int, order: str = "rows_first"
) -> SharedMatrix:
    """generation "tcgen05" or "wgmma"; major "k" or "mn"; swizzle by its name in layouts.py; order of the atoms.

    `rows` 32, 64, 128, 256 (where one atom fits); `order` "rows_first" or "k_first" says which neighbour of an atom
    follows it in memory.
    """
    return shared_matrix_at(f"{generation}/{major}/{swizzle}/{element_bits}/{order}/{rows}")


def shared_matrix_at(path: str) -> SharedMatrix:
    """The same by the path that names("shared/") lists, without its first part."""
    words = table(f"descriptor/{path}")
    low, high = (int(word) & 0xFFFFFFFF for word in words[:2])
    return SharedMatrix(table(f"shared/{path}"), high << 32 | low, words[2:])


def instruction_words(kind: str, a: str, b: str, d: str) -> list[tuple[int, int, int, int, int]]:
    """Instruction descriptors: (M, N, A MN-major, B MN-major, 32-bit word) for formats by PTX name."""
    rows = table(f"instruction/{kind}/{a}/{b}/{d}").tolist()
    return [(m, n, a_major, b_major, word & 0xFFFFFFFF) for m, n, a_major, b_major, word in rows]


def wgmma_accumulator(n: int) -> tuple[np.ndarray, np.ndarray]:
    """D of wgmma: (row, column), each [n/2 values, 128 threads]."""
    row, column = table(f"wgmma_d/{n}")
    return row, column


def wgmma_operand_a(element_bits: int) -> tuple[np.ndarray, np.ndarray]:
    """A of wgmma in registers: (row, k), each [values, 128 threads]; element_bits 8, 16 or 32."""
    row, k = table(f"wgmma_a/{element_bits}")
    return row, k


def mma_fragment(shape: str, element: str, operand: str) -> tuple[np.ndarray, np.ndarray]:
    """mma.sync: operand "a": (m, k), "b": (n, k), "c": (m, n), each [values, 32 threads].

    element is the width of A and B in bits as text, or "fp8" for the 8-bit floating-point instruction.
    """
    first, second = table(f"mma/{shape}/{element}/{operand}")
    return first, second


def matrix_map(instruction: str, kind: str, count: int) -> tuple[np.ndarray, np.ndarray]:
    """ldmatrix / stmatrix: (thread that addresses the row, byte in that row), each [registers, 4 bytes, 32 threads].

    kind "plain" or "trans" (8x8 of 16 bits), "b8trans" (stmatrix only); count is the .xN suffix.
    """
    thread, byte = table(f"{instruction}/{kind}/{count}")
    return thread, byte
