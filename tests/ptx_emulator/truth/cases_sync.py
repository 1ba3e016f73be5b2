"""Threads that meet: clusters, named barriers, mbarriers, warp exchange, atomics, and the warp-specialised product."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .case import Arrays, Case, Map, always, i32, integers, raw, u32, untouched
from .exact import BF16, from_integers
from .images import load_box

PAIR = (2, 1, 1)


def _u32(values: np.ndarray) -> np.ndarray:
    return (values & 0xFFFFFFFF).astype(np.uint32)


def _peer_memory(given: Arrays) -> Arrays:
    out = np.zeros((2, 4, 64), np.int64)
    t = np.arange(64)
    mine = given["in"].astype(np.int64)
    for rank in range(2):
        other = 1 - rank
        # What the other CTA wrote here, from what it read here.
        out[rank, 0] = mine[rank][63 - t] * 3 + other
        counted = t + 100 + t
        np.add.at(counted, t // 8, 1000 * t)
        out[rank, 1] = counted
        out[rank, 2] = mine[other] * 4 + other
        out[rank, 3] = np.where(t < 8, 0, t)
    return {"out": _u32(out)}


def _remote_arrive(rounds: int) -> np.ndarray:
    values = [np.arange(32, dtype=np.int64) + 1 for _ in range(2)]
    for i in range(rounds):
        sender = i % 2
        values[1 - sender] = _u32(np.roll(values[sender], 1) * 5 + 1 - sender).astype(np.int64)
    return _u32(np.stack(values))


def _store_async(given: Arrays) -> Arrays:
    rows = given["in"].reshape(2, 32, 8)
    out = []
    for rank in range(2):
        v = rows[1 - rank]
        total = 1000 + rank + v[:, 7].astype(np.int64).reshape(8, 4).sum(axis=0)
        out.append(np.concatenate([v[:, 0], v[:, 1:3].reshape(-1), v[:, 3:7].reshape(-1), _u32(total)]))
    return {"out": np.stack(out)}


def _cluster_registers(grid: tuple[int, int, int], cluster: tuple[int, int, int]) -> np.ndarray:
    rows = []
    for z in range(grid[2]):
        for y in range(grid[1]):
            for x in range(grid[0]):
                at = np.array([x, y, z])
                size = np.array(cluster)
                inside, which, count = at % size, at // size, np.array(grid) // size
                rank = inside[0] + size[0] * (inside[1] + size[1] * inside[2])
                shape = [size[0], size[1]]
                rows.append([rank, size.prod(), *inside, *shape, *which, *count, x, grid[1], size.prod() > 1])
    return np.array(rows, np.uint32)


def _cluster(name: str, kernel: str, buffers: dict[str, np.ndarray], args: tuple, **more) -> Case:
    return Case(
        name=f"cluster/{name}", module="cluster", kernel=kernel, buffers=buffers, outputs=("out",), args=args, **more
    )


def _cluster_cases() -> Iterator[Case]:
    shape = {"grid": PAIR, "cluster": PAIR}
    yield _cluster(
        "peer-memory",
        "peer_memory",
        {"in": raw("peer", (2, 64), np.uint32) >> np.uint32(8), "out": untouched((2, 4, 64), np.uint32)},
        ("in", "out"),
        block=(64, 1, 1),
        expect=_peer_memory,
        **shape,
    )
    m = Map("tensor", "bf16", (64, 12), (128,), (64, 4), "128B")
    yield _cluster(
        "multicast",
        "multicast",
        {"tensor": raw("multicast", (12, 64), np.uint16), "out": untouched((2, 1024), np.uint8)},
        (m, u32(4), u32(512), "out"),
        shared=1024,
        expect=lambda given: {
            "out": np.stack(
                [np.concatenate([load_box(given["tensor"], m, (0, 4 * r), origin=512 * r) for r in range(2)])] * 2
            )
        },
        **shape,
    )
    yield _cluster(
        "multicast-bulk",
        "multicast_bulk",
        {"in": raw("multicast-bulk", (528,), np.uint8), "out": untouched((2, 528), np.uint8)},
        ("in", u32(528), "out"),
        shared=528,
        expect=lambda given: {"out": np.stack([given["in"]] * 2)},
        **shape,
    )
    yield _cluster(
        "remote-arrive",
        "remote_arrive",
        {"out": untouched((2, 32), np.uint32)},
        ("out", u32(7)),
        expect=lambda _: {"out": _remote_arrive(7)},
        **shape,
    )
    yield _cluster(
        "store-async",
        "store_async",
        {"in": raw("store-async", (2, 256), np.uint32), "out": untouched((2, 228), np.uint32)},
        ("in", "out"),
        expect=_store_async,
        **shape,
    )

    def to_peer(given: Arrays) -> Arrays:
        other = given["in"][::-1].astype(np.int64)
        return {"out": _u32(np.stack([other, other + np.arange(128)], axis=1))}

    yield _cluster(
        "bulk-to-peer",
        "bulk_to_peer",
        {"in": raw("bulk-to-peer", (2, 128), np.uint32), "out": untouched((2, 2, 128), np.uint32)},
        ("in", "out"),
        expect=to_peer,
        **shape,
    )
    for grid, cluster in (
        ((4, 2, 1), (2, 1, 1)),
        ((2, 4, 2), (1, 2, 1)),
        ((4, 4, 1), (2, 2, 1)),
        ((3, 2, 1), (1, 1, 1)),
    ):
        expected = _cluster_registers(grid, cluster)
        yield _cluster(
            "registers-" + "x".join(map(str, cluster)),
            "cluster_registers",
            {"out": untouched(expected.shape, np.uint32)},
            ("out",),
            block=(1, 1, 1),
            grid=grid,
            cluster=cluster,
            expect=always(out=expected),
        )


def _pairs(given: Arrays, rounds: int) -> np.ndarray:
    value = given["in"].astype(np.int64).reshape(2, 64)
    for i in range(rounds):
        value = _u32(np.roll(value, -33, axis=1) * 3 + i).astype(np.int64)
    return _u32(value.reshape(128)[::-1])


def _ring(given: Arrays, rounds: int) -> np.ndarray:
    total = np.zeros((3, 32), np.int64)
    lane = np.arange(32)
    for i in range(rounds):
        total = _u32(total * 7 + given["in"][i].astype(np.int64)[:, lane ^ 5]).astype(np.int64)
    return _u32(total)


def _barrier_reductions(given: Arrays) -> Arrays:
    value = given["in"].astype(np.int64)
    out = np.empty((4, 128), np.uint32)
    out[0] = (value % 3 == 0).sum()
    out[1] = int((value < 1000).all()) * 2 + int((value == 77).any())
    out[2] = np.repeat([(half <= 50).sum() for half in value.reshape(2, 64)], 64)
    out[3] = given["out"][3]
    out[3, :64] = (value[:64] == value[5]).any()
    return {"out": out}


def _warp_barriers(given: Arrays) -> Arrays:
    lane = np.arange(32)
    first = given["in"].astype(np.int64)
    # Reads of a half see what its own lanes have not written yet; the halves do not meet.
    second = np.where(lane % 2 == 1, first[(lane + 2) % 32] + 1, first[(lane + 4) % 32] + 2)
    return {"out": _u32(second[(lane + 1) % 32])}


def _barrier_cases() -> Iterator[Case]:
    yield Case(
        "barriers/pairs",
        "barriers",
        "pairs",
        {"in": raw("pairs", (128,), np.uint32), "out": untouched((128,), np.uint32)},
        ("out",),
        ("in", "out", u32(5)),
        block=(128, 1, 1),
        expect=lambda given: {"out": _pairs(given, 5)},
    )
    yield Case(
        "barriers/producer-consumer",
        "barriers",
        "producer_consumer",
        {"in": raw("ring", (7, 3, 32), np.uint32), "out": untouched((3, 32), np.uint32)},
        ("out",),
        ("in", "out", u32(7)),
        block=(128, 1, 1),
        expect=lambda given: {"out": _ring(given, 7)},
    )
    yield Case(
        "barriers/reductions",
        "barriers",
        "reductions",
        {"in": integers("bar.red", (128,), 0, 99).astype(np.uint32), "out": untouched((4, 128), np.uint32)},
        ("out",),
        ("in", "out"),
        block=(128, 1, 1),
        expect=_barrier_reductions,
    )
    yield Case(
        "barriers/warp",
        "barriers",
        "warp_barriers",
        {"in": raw("warp-barriers", (32,), np.uint32), "out": untouched((32,), np.uint32)},
        ("out",),
        ("in", "out"),
        expect=_warp_barriers,
    )


# What a single thread sees of its barrier, in the order of the kernel: PTX ISA 9.7.13.15. parities() is
# test_wait(0) + 2 test_wait(1).
SINGLE_THREAD = (
    2,  # nothing completed: the phase before the first has parity 1
    *(3, 0, 2, 1, 3, 1),
    *(3, 0, 0, 1, 2),
    *(2, 1, 1, 1),
    *(3, 1, 2, 0, 1, 1, 1),
    *(2, 1, 1, 2),
)


def _uneven(work: np.ndarray) -> np.ndarray:
    value = np.arange(1, 5, dtype=np.int64)
    for i in range(work.shape[1]):
        for warp in range(4):
            for _ in range(int(work[warp, i])):
                value[warp] = (value[warp] * 1664525 + 1013904223) & 0xFFFFFFFF
        value = np.roll(value, -1) ^ (value >> 3)
    return _u32(np.repeat(value, 32) + np.tile(np.arange(32), 4))


def _many(given: Arrays, rounds: int) -> np.ndarray:
    value = given["in"].astype(np.int64)
    t = np.arange(128)
    for i in range(rounds):
        value = value[(t * 5 + 17) % 128] + 3 * i
    return _u32(value)


def _mbarrier_cases() -> Iterator[Case]:
    listed = np.full(40, 0xC7C7C7C7, np.uint32)
    listed[: len(SINGLE_THREAD)] = SINGLE_THREAD
    yield Case(
        "mbarrier/single-thread",
        "mbarrier",
        "single_thread",
        {"out": untouched((40,), np.uint32)},
        ("out",),
        ("out",),
        block=(1, 1, 1),
        expect=lambda _: {"out": listed},
    )
    yield Case(
        "mbarrier/many-threads",
        "mbarrier",
        "many_threads",
        {"in": raw("many", (128,), np.uint32), "out": untouched((128,), np.uint32)},
        ("out",),
        ("in", "out", u32(5)),
        block=(128, 1, 1),
        expect=lambda given: {"out": _many(given, 5)},
    )
    yield Case(
        "mbarrier/uneven-warps",
        "mbarrier",
        "uneven_warps",
        {"work": integers("work", (4, 5), 0, 40).astype(np.uint32), "out": untouched((128,), np.uint32)},
        ("out",),
        ("work", "out", u32(5)),
        block=(128, 1, 1),
        expect=lambda given: {"out": _uneven(given["work"])},
    )


def _pipeline_cases() -> Iterator[Case]:
    m, n, k = 128, 128, 192
    a, b = integers("matmul/a", (m, k), -2, 2), integers("matmul/b", (n, k), -1, 1)
    maps = (
        Map("a", "bf16", (k, m), (2 * k,), (64, 64), "128B"),
        Map("b", "bf16", (k, n), (2 * k,), (64, 64), "128B"),
        Map("d", "bf16", (n, m), (2 * n,), (64, 64), "128B"),
    )
    half = Map("b", "bf16", (k, n), (2 * k,), (64, 32), "128B")
    for name, kernel, map_b, cluster in (
        ("matmul", "matmul", maps[1], (1, 1, 1)),
        ("matmul-cluster", "matmul_cluster", half, PAIR),
    ):
        yield Case(
            f"pipeline/{name}",
            "pipeline",
            kernel,
            {"a": from_integers(a, BF16), "b": from_integers(b, BF16), "d": untouched((m, n), np.uint16)},
            ("d",),
            (maps[0], map_b, maps[2], i32(k // 64)),
            grid=(m // 64, n // 64, 1),
            block=(256, 1, 1),
            cluster=cluster,
            shared=41 * 1024,
            expect=lambda _: {"d": from_integers(a @ b.T, BF16)},
        )


def cases() -> list[Case]:
    """All cases of this file."""
    return [*_cluster_cases(), *_barrier_cases(), *_mbarrier_cases(), *_pipeline_cases()]
