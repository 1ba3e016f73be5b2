"""Exchange between the lanes of a warp, and divergence. References in plain numpy and Python."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .case import Arrays, Case, integers, raw, u32, untouched

M32 = 0xFFFFFFFF


def _shuffle(values: np.ndarray, mode: str, b: np.ndarray, control: int) -> tuple[np.ndarray, np.ndarray]:
    """shfl.sync, PTX ISA 9.7.9.6."""
    clamp, segment = control & 31, control >> 8 & 31
    out, valid = values.copy(), np.zeros(32, np.uint32)
    for lane in range(32):
        amount = int(b[lane]) & 31
        least = lane & segment
        most = least | (clamp & ~segment & 31)
        source, ok = {
            "up": (lane - amount, lane - amount >= most),
            "down": (lane + amount, lane + amount <= most),
            "bfly": (lane ^ amount, (lane ^ amount) <= most),
            "idx": (least | (amount & ~segment & 31), (least | (amount & ~segment & 31)) <= most),
        }[mode]
        valid[lane] = ok
        out[lane] = values[source] if ok else values[lane]
    return out, valid


def _shuffles(given: Arrays) -> Arrays:
    rows = []
    full = np.full(32, 0)
    fixed = (("idx", full + 5, 0x1F), ("up", full + 3, 0), ("down", full + 7, 0x1F), ("bfly", full + 9, 0x1F))
    modes = ("idx", "up", "down", "bfly")
    for mode, b, control in (*fixed, *((m, given["b"], int(c)) for m, c in zip(modes, given["control"], strict=True))):
        rows.append(np.stack(_shuffle(given["in"], mode, b, control)))
    return {"out": np.stack(rows).astype(np.uint32)}


def _shuffle_forms(given: Arrays) -> Arrays:
    value, lane = given["in"], np.arange(32)
    from_lane = (lane & ~7) | (value % np.uint64(40)).astype(np.int64) % 8
    crossed = value[lane ^ 12]
    down = np.where(lane % 4 + 3 < 4, value[np.minimum(lane + 3, 31)], value)
    total = np.full(32, int((value & np.uint64(M32)).sum()) & M32, np.uint64)
    return {"out": np.stack([value[from_lane], crossed, down, total])}


def _mask(lanes: np.ndarray) -> int:
    return int((lanes.astype(np.int64) << np.arange(32)).sum())


def _votes(given: Arrays) -> Arrays:
    out = given["out"].copy()
    value = given["in"].astype(np.int64)
    lane = np.arange(32)
    odd = value % 2 == 1

    def match(keys: np.ndarray, among: np.ndarray) -> np.ndarray:
        return np.array([_mask((keys == keys[i]) & among) for i in range(32)], np.uint32)

    everyone = np.ones(32, bool)
    out[0] = _mask(odd)
    out[1] = int((value == value[7]).any()) * 2 + int((value < 1 << 31).all())
    out[2] = match(value % 5, everyone)
    out[3] = match(value % 3, everyone)
    out[4], out[5] = M32, 1
    out[6], out[7] = 0, 0
    out[8] = 0
    for side, ballot, keys in ((odd, lane % 3 == 0, value % 4), (~odd, lane % 5 == 0, value % 6)):
        out[9, side] = _mask(ballot & side)
        out[10, side] = match(keys, side)[side]
    out[11, odd] = int(value[odd].sum()) & M32
    out[11, ~odd] = value[~odd].max()
    out[12, odd] = value[lane[odd].min()]
    out[12, ~odd] = value[lane[~odd].max()]
    out[13] = (lane == 0).astype(np.uint32)
    out[14, 9:] = 18 + (lane[9:] == 9)
    for i in range(32):
        out[15, i] = i * 64 + (0x0FF0 >> i << i).bit_count()
    return {"out": out}


def _redux(given: Arrays) -> Arrays:
    v = given["in"].astype(np.int64)
    s = given["in"].view(np.int32).astype(np.int64)
    values = [v.sum(), v.min(), v.max(), s.min(), s.max()]
    values += [np.bitwise_and.reduce(v | 0xF0F000), np.bitwise_or.reduce(v & 0x0F0F0F0F), np.bitwise_xor.reduce(v)]
    return {"out": np.repeat([[int(x) & M32] for x in values], 32, axis=1).astype(np.uint32)}


def _path(source: int) -> int:
    value, path = source, 0
    while value > 1 and path < 60:
        value = (3 * value + 1) & M32 if value % 2 else value // 2
        path += 1
        if value == 40:
            break
        if value % 7 == 3:
            continue
        path += 100
    kind = source % 9
    if kind == 0:
        path += value.bit_count() * 1000
    elif kind in (1, 2):
        path = (path ^ 0x10000 if kind == 1 else path) * 3
    elif kind == 3:
        path -= 5
    elif kind == 4:
        path += sum(j * j for j in range(source % 5))
    elif kind == 5:
        path = ~path
    elif kind == 6:
        path = int(f"{path & M32:032b}"[::-1], 2)
    elif kind == 7:
        path <<= value % 8
    else:
        path |= 1 << 31
    return path & M32


def cases() -> Iterator[Case]:
    """All cases of this file."""
    lanes = raw("warp", (32,), np.uint32)
    wide = raw("warp64", (32,), np.uint64)
    yield Case(
        "warp/shuffles",
        "warp",
        "shuffles",
        {
            "in": lanes,
            "b": integers("shuffle-b", (32,), 0, 31).astype(np.uint32),
            "control": np.array([0x181F, 0x1000, 0x1C1F, 0x0012], np.uint32),
            "out": untouched((8, 2, 32), np.uint32),
        },
        ("out",),
        ("in", "b", "control", "out"),
        expect=_shuffles,
    )
    yield Case(
        "warp/shuffle_forms",
        "warp",
        "shuffle_forms",
        {"in": wide, "out": untouched((4, 32), np.uint64)},
        ("out",),
        ("in", "out"),
        expect=_shuffle_forms,
    )
    for kernel, rows, expect in (("votes", 16, _votes), ("reductions", 8, _redux)):
        yield Case(
            f"warp/{kernel}",
            "warp",
            kernel,
            {"in": lanes, "out": untouched((rows, 32), np.uint32)},
            ("out",),
            ("in", "out"),
            expect=expect,
        )
    given = lanes.astype(np.int64)
    targets = [given + 1000, given * 3 ^ 85, given ^ 85, given]
    yield Case(
        "warp/branch_table",
        "warp",
        "branch_table",
        {"in": lanes, "out": untouched((32,), np.uint32)},
        ("out",),
        ("in", "out"),
        expect=lambda _: {"out": (np.choose(given % 4, targets) & M32).astype(np.uint32)},
    )
    starts = integers("divergence", (100,), 1, 3000).astype(np.uint32)
    yield Case(
        "warp/divergence",
        "warp",
        "divergence",
        {"in": starts, "out": untouched((100,), np.uint32)},
        ("out",),
        ("in", "out", u32(100)),
        grid=(2, 1, 1),
        block=(64, 1, 1),
        expect=lambda given: {"out": np.array([_path(int(v)) for v in given["in"]], np.uint32)},
    )
