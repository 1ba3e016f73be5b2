"""tcgen05.ld, st and cp against formulas written here once more (PTX ISA 9.7.16.2.3, 9.7.16.9.2), and their checks."""

from __future__ import annotations

import numpy as np
import pytest

from .. import Device, Options, load
from ..errors import (
    BoundsError,
    ConvergenceError,
    DescriptorError,
    PoisonError,
    RaceError,
    TensorMemoryError,
    UnknownInstructions,
)
from ..memory import Buffer
from .tcgen05_kernels import IMAGE, LANES, frame, matrix_descriptor, place, run_frame
from .test_tcgen05_mma import Case

# shape -> (registers for .x1, lane of (register, thread), column of (register, thread))
SHAPES = {
    "32x32b": (1, lambda r, t: t, lambda r, t: r),
    "16x64b": (1, lambda r, t: t // 4 + 8 * (t % 2), lambda r, t: t // 2 % 2 + 2 * r),
    "16x128b": (2, lambda r, t: t // 4 + 8 * (r % 2), lambda r, t: t % 4 + 4 * (r // 2)),
    "16x256b": (4, lambda r, t: t // 4 + 8 * (r // 2 % 2), lambda r, t: r % 2 + 2 * (t % 4) + 8 * (r // 4)),
    "16x32bx2": (1, lambda r, t: t % 16, lambda r, t: r + 40 * (t // 16)),
}
SPLIT = 40  # columns between the halves of 16x32bx2


def columns_of(shape: str, count: int) -> int:
    return {"16x64b": 2, "16x128b": 4, "16x256b": 8}.get(shape, 1) * count


def distinct(columns: int) -> np.ndarray:
    """Every cell has its own value, in both halves."""
    cell = np.arange(LANES * columns, dtype=np.uint32).reshape(LANES, columns)
    return cell + 1 | (cell ^ 0x5A5A) << 16


def cells(shape: str, n: int, high: bool, packed: bool) -> tuple[np.ndarray, ...]:
    """(lane, column) of each register of each of 128 threads, [n, 128]; packed: [2, n, 128]."""
    register, thread = np.mgrid[:n, :LANES]
    _, lane, column = SHAPES[shape]
    rows = lane(register, thread % 32) + thread // 32 * 32 + (16 if high else 0)
    at = column(register, thread % 32)
    if not packed:
        return rows, at
    upper = SPLIT * (thread % 32 // 16) if shape == "16x32bx2" else 0
    at = 2 * (at - upper) + upper
    return np.stack([rows, rows]), np.stack([at, at + 1])


def vector(n: int) -> str:
    return "{" + ", ".join(f"%v{k}" for k in range(n)) + "}"


def registers_at(n: int, high: bool) -> str:
    """%o = this thread's row of %extra, %t = the address in tensor memory."""
    return (
        f"mul.lo.u32 %t, %me, {4 * n}; cvt.u64.u32 %o, %t; add.u64 %o, %extra, %o;"
        f"add.u32 %t, %quarter, {(16 << 16) if high else 0};"
    )


FORMS = [
    (shape, count, packed, high)
    for shape, counts in (
        ("32x32b", (1, 2, 8, 128)),
        ("16x64b", (1, 4, 32)),
        ("16x128b", (1, 16)),
        ("16x256b", (1, 8, 32)),
        ("16x32bx2", (1, 8)),
    )
    for count in counts
    for packed in (False, True)
    for high in ((False,) if shape == "32x32b" else (False, True))
    if count < 128 or not packed
]


@pytest.mark.parametrize(("shape", "count", "packed", "high"), FORMS)
def test_load(shape: str, count: int, packed: bool, high: bool) -> None:
    n = SHAPES[shape][0] * count
    columns = 128 if columns_of(shape, count) * (1 + packed) <= 128 else 512
    init = distinct(columns)
    split = f", {SPLIT}" if shape == "16x32bx2" else ""
    body = registers_at(n, high) + (
        f"tcgen05.ld.sync.aligned.{shape}.x{count}{'.pack::16b' if packed else ''}.b32 {vector(n)}, [%t]{split};"
        "tcgen05.wait::ld.sync.aligned;"
    )
    body += "".join(f"st.global.b32 [%o+{4 * k}], %v{k};" for k in range(n))
    found: list[Buffer] = []

    def extra(device: Device) -> Buffer:
        found.append(device.empty((LANES, n), np.uint32))
        return found[0]

    _, report = run_frame(frame("", body, columns), init, extra=extra)
    value = init[cells(shape, n, high, packed)]
    if packed:
        value = value[0] & 0xFFFF | value[1] << 16
    assert (value == found[0].array.T).all()
    assert not report.lints


@pytest.mark.parametrize(("shape", "count", "packed", "high"), FORMS)
def test_store(shape: str, count: int, packed: bool, high: bool) -> None:
    n = SHAPES[shape][0] * count
    columns = 128 if columns_of(shape, count) * (1 + packed) <= 128 else 512
    init = distinct(columns)
    given = np.random.default_rng(n).integers(0, 1 << 32, (LANES, n), dtype=np.uint32)
    split = f"{SPLIT}, " if shape == "16x32bx2" else ""
    body = registers_at(n, high) + "".join(f"ld.global.b32 %v{k}, [%o+{4 * k}];" for k in range(n))
    body += (
        f"tcgen05.st.sync.aligned.{shape}.x{count}{'.unpack::16b' if packed else ''}.b32 [%t], {split}{vector(n)};"
        "tcgen05.wait::st.sync.aligned;"
    )
    out, _ = run_frame(frame("", body, columns), init, extra=lambda device: device.upload(given))
    want = init.copy()
    want[cells(shape, n, high, packed)] = np.stack([given.T & 0xFFFF, given.T >> 16]) if packed else given.T
    assert (out == want).all()


def test_load_keeps_register_order_in_any_schedule() -> None:
    """Scattered destination registers, and engines that work late."""
    body = registers_at(2, False) + (
        "tcgen05.ld.sync.aligned.32x32b.x2.b32 {%v7, %v3}, [%t]; tcgen05.wait::ld.sync.aligned;"
        "st.global.b32 [%o], %v7; st.global.b32 [%o+4], %v3;"
    )
    for schedule in ("earliest", "latest", "random"):
        found: list[Buffer] = []

        def extra(device: Device, found: list[Buffer] = found) -> Buffer:
            found.append(device.empty((LANES, 2), np.uint32))
            return found[0]

        run_frame(frame("", body, 32), distinct(32), extra=extra, options=Options(strict=True, schedule=schedule))
        assert (found[0].array == distinct(32)[:, :2]).all()


# shape -> (rows, bytes, lanes of each row)
COPIES = {
    "128x256b": (128, 32, lambda r: (r,)),
    "128x128b": (128, 16, lambda r: (r,)),
    "4x256b": (4, 32, lambda r: (32 * r + 31,)),
    "64x128b.warpx2::02_13": (64, 16, lambda r: (r, r + 64)),
    "64x128b.warpx2::01_23": (64, 16, lambda r: (r // 32 * 64 + r % 32, r // 32 * 64 + r % 32 + 32)),
    "32x128b.warpx4": (32, 16, lambda r: (r, r + 32, r + 64, r + 96)),
}


@pytest.mark.parametrize("shape", COPIES)
@pytest.mark.parametrize("swizzle", ["none", "128B", "32B"])
@pytest.mark.parametrize("group", [1, 2])
def test_copy(shape: str, swizzle: str, group: int) -> None:
    rows, width, lanes = COPIES[shape]
    init = np.concatenate([distinct(32)] * group)
    tiles = np.random.default_rng(5).integers(0, 256, (group, rows, width), dtype=np.uint8)
    images = [place(tile, swizzle) for tile in tiles]
    descriptor = matrix_descriptor(IMAGE, images[0][1], images[0][2], swizzle)
    move = 8 + ((31 << 16) if shape == "4x256b" else 0)
    issue = f"add.u32 %v0, %d, {move}; tcgen05.cp.cta_group::{group}.{shape} [%v0], %ad;"
    image = np.stack([data for data, _, _ in images])
    out, report = run_frame(frame(issue, columns=32, group=group), init, image, (descriptor, 0, 0))
    want = init.copy()
    for r in range(group):
        for row in range(rows):
            for lane in lanes(row):
                want[r * LANES + lane, 8 : 8 + width // 4] = tiles[r, row].view(np.uint32)
    assert (out == want).all()
    assert report.bytes["tcgen05.cp shared->tensor memory"] == group * rows * width


def test_copy_then_multiply_needs_no_wait() -> None:
    """cp -> mma is a pair of the pipeline (9.7.16.6.2); cp -> cp onto the same cells is none."""
    case = Case(128, 32, columns=64)
    image, _, b = case.images()
    _, leading, stride = place(case.raw_a)
    descriptor = matrix_descriptor(IMAGE, leading, stride)
    copy = "add.u32 %v0, %d, 32; tcgen05.cp.cta_group::1.128x256b [%v0], %ad;"
    mma = "tcgen05.mma.cta_group::1.kind::f16 [%d], [%v0], %bd, %id, %onto;"
    out, _ = run_frame(frame(copy + mma), case.init, image, (descriptor, b, case.descriptor))
    assert (out[:, :32] == case.expected(case.a @ case.b.T)[:, :32]).all()
    with pytest.raises(RaceError, match=r"a write by tcgen05\.cp"):
        run_frame(frame(copy + copy), case.init, image, (descriptor, b, case.descriptor))


# Checks ---------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("line", "error", "says"),
    [
        (
            "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%v0}, [%d]; tcgen05.wait::ld.sync.aligned;",
            TensorMemoryError,
            "warp 1.*lanes 32..63.*32 rows: 32",
        ),
        (
            "add.u32 %t, %quarter, 524288; tcgen05.ld.sync.aligned.16x64b.x1.b32 {%v0}, [%t];",
            TensorMemoryError,
            "lane 8 in .*allowed for 16 rows: 0 or 16",
        ),
        (
            "add.u32 %t, %quarter, 31; tcgen05.ld.sync.aligned.32x32b.x2.b32 {%v0, %v1}, [%t];",
            TensorMemoryError,
            "columns 31..32: column 32 is not allocated",
        ),
        (
            "add.u32 %t, %quarter, 511; tcgen05.st.sync.aligned.32x32b.x2.b32 [%t], {%v0, %v1};",
            TensorMemoryError,
            "512 columns",
        ),
        (
            "add.u32 %t, %quarter, %me; tcgen05.ld.sync.aligned.32x32b.x1.b32 {%v0}, [%t];",
            TensorMemoryError,
            "all threads must name the same address",
        ),
        (
            "and.b32 %t, %me, 1; setp.eq.u32 %p3, %t, 0; @%p3 tcgen05.ld.sync.aligned.32x32b.x1.b32 {%v0}, [%quarter];",
            ConvergenceError,
            "only lanes 0x55555555",
        ),
        (
            "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%v0}, [%quarter]; add.u32 %v1, %v0, 1;",
            PoisonError,
            r"add\.u32 %v1, %v0, 1(.|\n)*tcgen05\.ld",
        ),
        (
            "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%v0}, [%quarter]; mov.b32 %v0, 1;",
            PoisonError,
            r"the wait for it",
        ),
        (
            "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%v0}, [%quarter]; tcgen05.wait::st.sync.aligned; mov.b32 %v0, 1;",
            PoisonError,
            r"the wait for it",
        ),
    ],
)
def test_checks_of_transfers(line: str, error: type, says: str) -> None:
    with pytest.raises(error, match=says):
        run_frame(frame("", line, 32), distinct(32))


def test_checks_of_copies() -> None:
    init = distinct(32)
    image = np.zeros((1, 4096), np.uint8)
    good = matrix_descriptor(IMAGE, 128, 256, "none")
    for issue, descriptor, error, says in (
        ("tcgen05.cp.cta_group::1.128x256b [%d], %ad;", good + (1 << 53), DescriptorError, "reserved bits 53-60"),
        ("tcgen05.cp.cta_group::1.128x256b [%d], %ad;", good + (64 << 32), BoundsError, "reads shared bytes up to"),
        ("add.u32 %v0, %d, 65536; tcgen05.cp.cta_group::1.128x256b [%v0], %ad;", good, TensorMemoryError, "to lane 1"),
        ("add.u32 %v0, %d, 28; tcgen05.cp.cta_group::1.128x256b [%v0], %ad;", good, TensorMemoryError, "column 32"),
    ):
        with pytest.raises(error, match=says):
            run_frame(frame(issue, columns=32), init, image, (descriptor, 0, 0))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("tcgen05.cp.cta_group::1.128x256b.b8x16.b6x16_p32 [%d], %ad;", "decompression"),
        ("tcgen05.cp.cta_group::1.64x128b [%d], %ad;", "shape .64x128b; allowed"),
        ("tcgen05.shift.cta_group::1.down [%d];", "sources disagree"),
        ("tcgen05.ld.sync.aligned.32x32b.x2.b32 {%v0}, [%quarter];", "1 registers, 2 of 32 bits are needed"),
        ("tcgen05.ld.sync.aligned.16x256b.x64.b32 {%v0}, [%quarter];", "16x256b has .x64"),
        ("tcgen05.ld.sync.aligned.16x32bx2.x1.b32 {%v0}, [%quarter];", "needs the immediate distance"),
        ("tcgen05.ld.red.sync.aligned.32x32b.x2.min.u32 {%v0, %v1}, %v2, [%quarter];", "ld.red"),
    ],
)
def test_forms_without_a_meaning_are_named(line: str, says: str) -> None:
    with pytest.raises(UnknownInstructions, match=says):
        load(frame(line))
