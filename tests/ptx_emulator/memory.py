"""State spaces: address windows, byte arrays with typed views, and the allocations of global memory.

Generic addresses: a window a state space. Shared addresses carry the block's rank in its cluster in bits 24 and up, as
on the hardware, so that an address of one's own block is also a cluster address.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .errors import LaunchError

if TYPE_CHECKING:
    from .hb import Shadow

SHARED_WINDOW = 0x0100_0000_0000
LOCAL_WINDOW = 0x0200_0000_0000
PARAM_WINDOW = 0x0300_0000_0000
CONST_WINDOW = 0x0400_0000_0000
GLOBAL_BASE = 0x7F00_0000_0000
WINDOW_BYTES = 0x0100_0000_0000
WINDOWS = {
    "shared": SHARED_WINDOW,
    "shared::cta": SHARED_WINDOW,
    "shared::cluster": SHARED_WINDOW,
    "local": LOCAL_WINDOW,
    "param": PARAM_WINDOW,
    "const": CONST_WINDOW,
    "global": 0,
}
RANK_SHIFT = 24
OFFSET_MASK = (1 << RANK_SHIFT) - 1
# What unwritten shared memory holds: NaN in every float format.
POISON_BYTE = 0xFF


class Memory:
    """Bytes with typed views, and the shadow that race detection keeps of them (None without it)."""

    def __init__(self, name: str, size: int, fill: int = 0) -> None:
        self.name = name
        self.size = size
        padded = -(-size // 16) * 16
        # Pages of zeros cost nothing until they are touched.
        self.u8 = np.full(padded, fill, np.uint8) if fill else np.zeros(padded, np.uint8)
        self.views: dict[int, np.ndarray] = {
            1: self.u8,
            2: self.u8.view(np.uint16),
            4: self.u8.view(np.uint32),
            8: self.u8.view(np.uint64),
        }
        self.u16, self.u32, self.u64 = self.views[2], self.views[4], self.views[8]
        self.shadow: Shadow | None = None


class Buffer:
    """An allocation of global memory. `array` is a live view of it."""

    def __init__(self, address: int, array: np.ndarray) -> None:
        self.address = address
        self.array = array

    def __repr__(self) -> str:
        return f"Buffer({self.address:#x}, {self.array.dtype}{list(self.array.shape)})"


class GlobalMemory(Memory):
    """One array for all allocations, with gaps between them; `valid` and `written` hold a byte a byte."""

    GAP = 256

    def __init__(self, size: int) -> None:
        super().__init__("global", size)
        self.valid = np.zeros(size, bool)
        self.written = np.zeros(size, bool)
        self.top = self.GAP

    def allocate(self, size: int, written: bool) -> int:
        """Offset of new memory, 256 bytes aligned."""
        start = self.top
        end = start + max(size, 1)
        if end + self.GAP > self.size:
            raise LaunchError(f"global memory of {self.size} bytes is full: {size} more were asked; Device(bytes=...)")
        self.top = -(-end // self.GAP) * self.GAP + self.GAP
        self.valid[start : start + size] = True
        self.written[start : start + size] = written
        return start

    def upload(self, array: np.ndarray) -> Buffer:
        array = np.ascontiguousarray(array)
        start = self.allocate(array.nbytes, True)
        self.u8[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
        return self._buffer(start, array.shape, array.dtype)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Buffer:
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        start = self.allocate(size, False)
        self.u8[start : start + size] = POISON_BYTE
        return self._buffer(start, shape, dtype)

    def _buffer(self, start: int, shape: tuple[int, ...], dtype: np.dtype) -> Buffer:
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        return Buffer(GLOBAL_BASE + start, self.u8[start : start + size].view(dtype).reshape(shape))
