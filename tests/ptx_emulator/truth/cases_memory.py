"""State spaces, calls, special registers, parameters. References in plain numpy and Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from .case import Arrays, Case, Struct, raw, u32, untouched
from .cases_integer import signed

M32 = 0xFFFFFFFF
TABLE = (5, -3, 17, 99, -1000, 65536, 0, 1, -1, 42, 7, 123456789)
BYTES = (250, 1, 2, 128, 77)
SCALES = (1.0, -2.5, 0.125, 1024.0, -0.0, 3.0)
MIXED = ((1, 2, 3, 4), (250, 65000, 0xDEADBEEF, 0x0102030405060708))
COUNTER = 0x123456789ABCDEF0


def _local_arrays(given: Arrays) -> Arrays:
    source = [int(v) for v in given["in"]]
    size = len(source)
    out = np.empty((2, size), np.uint32)
    for i in range(size):
        bins = list(range(16))
        for j in range(24):
            bins[source[(i + j) % size] % 16] += source[(i * 3 + j) % size] % 100
        order = sorted(range(16), key=lambda k: bins[k])  # stable, as the kernel's insertion sort
        digest = 0
        for k in order:
            digest = (digest * 31 + k) & M32
        out[:, i] = digest, bins[source[i] % 16]
    return {"out": out}


def _collatz(value: int, limit: int) -> int:
    steps = 0
    while value != 1 and steps < limit:
        value = 3 * value + 1 if value & 1 else value >> 1
        steps += 1
    return steps


def _calls(given: Arrays) -> Arrays:
    out = []
    for v in map(int, given["in"]):
        total = _collatz(v % 1000 + 1, 200)
        if v % 2:
            total += _collatz(v % 77 + 1, v % 50)
        byte, _, _, wide = MIXED[v % 2]
        for _ in range(v % 4):
            total = (total * 3 + wide + byte) & ((1 << 64) - 1)
        out.append(total)
    return {"out": np.array(out, np.uint64)}


def _variables(given: Arrays) -> Arrays:
    out = given["out"].copy()
    for i, j in enumerate(map(int, given["in"])):
        out[0, i] = TABLE[j % 12] & M32
        out[1, i] = BYTES[j % 5]
        out[2, i] = np.float32(SCALES[j % 6] * (j % 64 - 32)).view(np.uint32)
        out[3, i] = 0
        out[4, i] = COUNTER >> 32 * (j % 2) & M32
        byte, half, word, wide = MIXED[j % 2]
        out[5, i] = byte + (half << 8)
        out[6, i] = word
        out[7, i] = wide >> j % 32 & M32
    written = given["in"][:40] & 0xFFFF
    out[8, :40] = written[::-1] + 1
    return {"out": out}


def _access_forms(given: Arrays) -> Arrays:
    out = given["out"].copy()
    data = given["in"]
    words = data.view(np.uint32).reshape(64, 4)
    halves = data.view(np.uint16).reshape(64, 8)
    for i in range(64):
        w, h, b = ([int(v) for v in a[i]] for a in (words, halves, data))
        shared = [int(v) for v in words[i ^ 21]]
        shared_halves = [int(v) for v in halves[i ^ 21]]
        pair = (shared[0] | shared[1] << 32) + (shared[2] | shared[3] << 32)
        u8 = b[5]
        picked = ((w[0] + w[1]), (shared[0] + shared[1]), u8 + 1 + i)[i % 3]
        row = out[i]
        row[0] = w[0] ^ w[3]
        row[1] = (w[2] + 3 * w[3]) & M32
        row[2], row[3] = pair & M32, pair >> 32 & M32
        row[4:8] = signed(b[3], 8) & M32, u8, signed(shared_halves[3], 16) & M32, shared_halves[4]
        row[8] = h[3] | h[1] << 16
        row[9] = h[2] | u8 << 16 | 0xC7 << 24
        row[10] = (w[3] - shared[0]) & M32
        row[11] = picked & M32
        row[12] = (4, 1, 2)[i % 3]
        row[13], row[14] = w[0], h[0]
    return {"out": out}


def _special_registers(grid: tuple[int, int, int], block: tuple[int, int, int], shared: int) -> np.ndarray:
    def packed(v: tuple[int, int, int]) -> int:
        return v[0] + 100 * v[1] + 10000 * v[2]

    rows = []
    threads = block[0] * block[1] * block[2]
    for at in np.ndindex(*grid[::-1]):
        for n, t in enumerate(np.ndindex(*block[::-1])):
            lane = n % 32
            masks = (1 << lane, (1 << lane) - 1, (2 << lane) - 1, M32 & ~((2 << lane) - 1))
            rows.append(
                [
                    packed(t[::-1]),
                    packed(block),
                    packed(at[::-1]),
                    packed(grid),
                    lane,
                    *masks,
                    shared,
                    ((n + 7) % threads) ** 2,
                ]
            )
    return np.array(rows, np.uint32)


def cases() -> Iterator[Case]:
    """All cases of this file."""

    def simple(kernel: str, given: np.ndarray, out: np.ndarray, expect: Callable[[Arrays], Arrays], *more) -> Case:
        return Case(
            f"memory/{kernel}",
            "memory",
            kernel,
            {"in": given, "out": out},
            ("out",),
            ("in", "out", *more),
            block=(len(given), 1, 1),
            expect=expect,
        )

    yield simple("local_arrays", raw("local", (64,), np.uint32), untouched((2, 64), np.uint32), _local_arrays, u32(64))
    yield simple("calls", raw("calls", (64,), np.uint32), untouched((64,), np.uint64), _calls)
    yield simple("variables", raw("variables", (64,), np.uint32), untouched((9, 64), np.uint32), _variables)
    yield simple("access_forms", raw("access", (64, 16), np.uint8), untouched((64, 16), np.uint32), _access_forms)
    grid, block = (2, 1, 3), (5, 4, 2)
    expected = _special_registers(grid, block, 160)
    yield Case(
        "memory/special_registers",
        "memory",
        "special_registers",
        {"out": untouched(expected.shape, np.uint32)},
        ("out",),
        ("out",),
        grid=grid,
        block=block,
        shared=160,
        expect=lambda _: {"out": expected},
    )
    scalars = (np.int8(-7), np.uint8(200), np.int16(-30000), np.uint16(60000), np.int32(-5), np.uint32(4000000000))
    wide = (np.int64(-(1 << 40)), np.uint64((1 << 63) + 9), np.float32(1.5), np.float64(-2.25))
    struct = Struct((np.uint8(9), np.uint16(8000), np.uint32(0xCAFEF00D), np.uint64(1 << 50)))
    listed = [int(v) for v in (*scalars, *wide[:2])]
    listed += [
        int(wide[2].view(np.uint32)),
        int(wide[3].view(np.uint64)),
        9 + (8000 << 8) + (0xCAFEF00D << 32),
        1 << 50,
    ]
    parameters = np.array([v & ((1 << 64) - 1) for v in listed], np.uint64)
    yield Case(
        "memory/parameters",
        "memory",
        "parameters",
        {"out": untouched((12,), np.uint64)},
        ("out",),
        ("out", *scalars, *wide, struct),
        expect=lambda _: {"out": parameters},
    )
