"""Problems of the native forward kernels for the emulator: inputs, reference, and what their structs have in common.

The kernels differ in template arguments and in how they take Q; tests of each pack those themselves.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from tests.ptx_emulator import Device
from tests.ptx_emulator.formats import decode, encode
from tests.ptx_emulator.memory import Buffer

TILE = 64
SCALE_LOG2 = 0.18


class Shape(Protocol):
    """What a problem has to know of a kernel."""

    @property
    def element(self) -> str: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def block(self) -> int: ...


@dataclass
class Problem:
    """Lists by (batch, head, q block), sizes of kv blocks; q, k, v are drawn by `fill`."""

    lists: list[list[list[list[int]]]]
    sizes: list[int]
    kv_heads: int = 0  # 0: as many as heads
    filler: int = -1  # what stands past the ends of the lists
    growth: float = 0.0  # keys of block j are multiplied by 1 + j * growth: later blocks move the maxima
    q: np.ndarray = field(init=False)
    k: np.ndarray = field(init=False)
    v: np.ndarray = field(init=False)

    def fill(self, v: Shape, seed: int = 0) -> None:
        """Values that the element holds exactly; NaN wherever there is no key."""
        rng = np.random.default_rng(seed)
        batch, heads, rows = len(self.lists), len(self.lists[0]), len(self.lists[0][0])
        self.kv_heads = self.kv_heads or heads

        def draw(h: int, blocks: int, growth: float = 0.0) -> np.ndarray:
            x = rng.standard_normal((batch, h, blocks, v.block, v.head_dim), dtype=np.float32)
            x *= 1 + np.arange(blocks, dtype=np.float32)[:, None, None] * growth
            x = x.reshape(batch, h, blocks * v.block, v.head_dim)
            return decode(encode(x, v.element), v.element).astype(np.float32)

        self.q, self.v = draw(heads, rows), draw(self.kv_heads, len(self.sizes))
        self.k = draw(self.kv_heads, len(self.sizes), self.growth)
        for block, size in enumerate(self.sizes):
            for x in (self.k, self.v):
                x[:, :, block * v.block + size : (block + 1) * v.block] = np.nan

    def reference(self, v: Shape) -> tuple[np.ndarray, np.ndarray]:
        """out and lse_log2 in double precision."""
        out = np.zeros(self.q.shape, np.float64)
        lse = np.full(self.q.shape[:3], -np.inf)
        group = self.q.shape[1] // self.kv_heads
        for b, h, r in np.ndindex(len(self.lists), len(self.lists[0]), len(self.lists[0][0])):
            keys = [j * v.block + t for j in self.lists[b][h][r] for t in range(self.sizes[j])]
            if not keys:
                continue
            here = slice(r * v.block, (r + 1) * v.block)
            scores = self.q[b, h, here].astype(np.float64) @ self.k[b, h // group, keys].T * SCALE_LOG2
            peak = scores.max(1, keepdims=True)
            weights = np.exp2(scores - peak)
            total = weights.sum(1, keepdims=True)
            out[b, h, here] = weights @ self.v[b, h // group, keys] / total
            lse[b, h, here] = (peak + np.log2(total))[:, 0]
        return out, lse


@dataclass
class Expected:
    """A problem that is filled, and contract 1's bars against its reference."""

    v: Shape
    p: Problem
    out: np.ndarray = field(init=False)
    lse: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.p.fill(self.v)
        self.out, self.lse = self.p.reference(self.v)

    def compare(self, out: np.ndarray, lse: np.ndarray | None) -> None:
        error = np.abs(out - self.out)
        assert error.max() <= 1e-2 * np.abs(self.out).max()
        assert error.mean() <= 1e-3
        if lse is not None:
            np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(self.lse))
            finite = np.isfinite(self.lse)
            np.testing.assert_allclose(lse[finite], self.lse[finite], atol=1e-3)


class Inputs:
    """A problem in the memory of a device, with room for its results."""

    def __init__(self, v: Shape, p: Problem, with_lse: bool) -> None:
        self.element, self.device = v.element, Device(64 << 20)
        batch, heads, length, _ = p.q.shape
        rows = length // v.block
        width = max(len(row) for b in p.lists for h in b for row in h) + 1
        indices = np.full((batch, heads, rows, width), p.filler, np.int32)
        counts = np.zeros((batch, heads, rows), np.int32)
        for at in np.ndindex(batch, heads, rows):
            row = p.lists[at[0]][at[1]][at[2]]
            indices[at][: len(row)] = row
            counts[at] = len(row)
        self._out = self.device.empty(p.q.shape, np.uint16)
        self._lse = self.device.empty(p.q.shape[:3], np.float32) if with_lse else None
        lists = [self.device.upload(x).address for x in (indices, counts, np.array(p.sizes, np.int32))]
        # From `out` on to `sm_scale_log2`.
        self.rest = struct.pack("<5Q", self._out.address, 0 if self._lse is None else self._lse.address, *lists)
        self.rest += struct.pack("<6if", batch, heads, p.kv_heads, rows, len(p.sizes), width, SCALE_LOG2)

    def upload(self, x: np.ndarray) -> Buffer:
        """[B, H, S, D] that stands in memory as [B, S, H, D], rows apart."""
        return self.device.upload(encode(np.ascontiguousarray(x.transpose(0, 2, 1, 3)), self.element))

    def operand(self, x: np.ndarray) -> bytes:
        """The same as the 128 bytes of a map of boxes of 64 rows and columns."""
        b, h, s, d = x.shape
        row_bytes = 2 * d
        return self.device.tensor_map(
            self.upload(x),
            element=self.element,
            dims=(d, s, h, b),
            strides=(h * row_bytes, row_bytes, s * h * row_bytes),
            box=(64, 64, 1, 1),
            swizzle="128B",
        ).bytes

    def results(self) -> tuple[np.ndarray, np.ndarray | None]:
        """out and lse_log2."""
        return decode(self._out.array, self.element), None if self._lse is None else self._lse.array


def random_lists(rows: int, blocks: int, most: int, seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [sorted(rng.permutation(blocks)[: rng.integers(0, most + 1)].tolist()) for _ in range(rows)]


FULL = TILE
# Blocks that all rows of a pair list, that one lists, that none lists; a row without a list; counts that differ.
MIXED = [[1, 3, 4], [0, 1, 4, 5], [], [4]]
SIZES = [FULL, 17, 0, FULL, 1, 63]
