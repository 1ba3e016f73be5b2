"""What one case is: a kernel of a committed PTX file, its launch, its buffers and what its outputs must be.

The same description drives the capture on a GPU and the replay in the emulator. Buffers are filled by a generator that
is written out here, so that they do not depend on the version of numpy.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).resolve().parent
Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Map:
    """A tensor map over a buffer, in the terms of cuTensorMapEncodeTiled.

    dims and box are in elements, innermost first; strides in bytes, of every dimension but the innermost.
    """

    buffer: str
    element: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: str = "none"
    fill: str = "zero"
    element_strides: tuple[int, ...] = ()

    @property
    def traversal(self) -> tuple[int, ...]:
        """The element strides, ones where none were given."""
        return self.element_strides or (1,) * len(self.dims)


@dataclass(frozen=True)
class MapPointer:
    """The address of a tensor map that lies in global memory."""

    map: Map


@dataclass(frozen=True)
class Struct:
    """A structure parameter with natural alignment; a string stands for the address of that buffer."""

    fields: tuple[str | np.generic, ...]

    def pack(self, address_of: Callable[[str], int]) -> bytes:
        """The bytes of the parameter."""
        out = bytearray()
        largest = 1
        for value in self.fields:
            raw = np.uint64(address_of(value)).tobytes() if isinstance(value, str) else value.tobytes()
            out += bytes(-len(out) % len(raw)) + raw
            largest = max(largest, len(raw))
        return bytes(out + bytes(-len(out) % largest))


Argument = str | np.generic | Map | MapPointer | Struct


@dataclass(frozen=True)
class Close:
    """Outputs of approximate functions: as floating point, within a relative plus an absolute error."""

    format: str  # of exact.FORMATS
    relative: float
    absolute: float = 0.0


@dataclass(frozen=True)
class AnyNan:
    """Bit for bit, but any NaN equals any other: where PTX leaves the payload open."""

    format: str


@dataclass(frozen=True)
class Case:
    """One launch.

    expect: from the inputs (initial contents of all buffers) to the outputs that numpy can state, else None.
    rows: for an output whose rows are one instruction each, the instructions, so that a difference can be named.
    compare: how an output is compared where it is not bit for bit.
    faults: the GPU refuses the launch with an error, and so must the emulator; no outputs are kept.
    undefined: why the outputs are kept as a fact but not demanded of the emulator; empty for an ordinary case.
    """

    name: str
    module: str
    kernel: str
    buffers: Arrays
    outputs: tuple[str, ...]
    args: tuple[Argument, ...]
    grid: tuple[int, int, int] = (1, 1, 1)
    block: tuple[int, int, int] = (32, 1, 1)
    cluster: tuple[int, int, int] = (1, 1, 1)
    shared: int = 0
    expect: Callable[[Arrays], Arrays] | None = None
    rows: Mapping[str, Sequence[str]] = field(default_factory=dict)
    compare: Mapping[str, Close | AnyNan] = field(default_factory=dict)
    faults: bool = False
    undefined: str = ""

    @property
    def ptx(self) -> Path:
        """The file with the kernel."""
        return FOLDER / "ptx" / f"{self.module}.ptx"

    @property
    def data(self) -> Path:
        """The file with what the GPU read and wrote: arrays `in.NAME` and `out.NAME`."""
        return FOLDER / "data" / f"{self.name.replace('/', '.')}.npz"


def words(seed: str, count: int) -> np.ndarray:
    """`count` uint64 words, evenly distributed: the splitmix64 sequence of the text's checksum."""
    with np.errstate(over="ignore"):
        state = np.uint64(zlib.crc32(seed.encode())) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(
            0x9E3779B97F4A7C15
        )
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return state ^ (state >> np.uint64(31))


def integers(seed: str, shape: tuple[int, ...], low: int, high: int) -> np.ndarray:
    """int64 integers from low to high, both included."""
    count = int(np.prod(shape))
    return (words(seed, count) % np.uint64(high - low + 1)).astype(np.int64).reshape(shape) + low


def raw(seed: str, shape: tuple[int, ...], dtype: type[np.generic]) -> np.ndarray:
    """Evenly distributed bits of an integer type."""
    count = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return words(seed, -(-count // 8)).view(np.uint8)[:count].view(dtype).reshape(shape).copy()


def untouched(shape: tuple[int, ...], dtype: type[np.generic]) -> np.ndarray:
    """The content of an output before the launch: a byte pattern that no result has by chance."""
    count = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.full(count, 0xC7, np.uint8).view(dtype).reshape(shape)


def always(**outputs: np.ndarray) -> Callable[[Arrays], Arrays]:
    """An expectation that is known without the inputs."""
    return lambda _: outputs


def i32(value: int) -> np.int32:
    """A C int."""
    return np.int32(value)


def u32(value: int) -> np.uint32:
    """A C unsigned int."""
    return np.uint32(value)


def u64(value: int) -> np.uint64:
    """A C unsigned 64-bit integer."""
    return np.uint64(value)
