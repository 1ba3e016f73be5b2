"""Tensor maps and tensor copies: bytes, signals, races, refusals."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from .. import Device, Finding, Options, Report, load
from ..errors import (
    AlignmentError,
    BoundsError,
    DescriptorError,
    LaunchError,
    ProxyError,
    RaceError,
    TransactionError,
    UninitialisedError,
)
from ..memory import Buffer
from ..tensor_map import TensorMap, decode, encode
from .ptx_text import expect, init, kernel, load_bulk, store_bulk, wait

SCHEDULES = ("earliest", "latest", "random")
SWIZZLE_MASK = {"none": 0, "32B": 0x10, "64B": 0x30, "128B": 0x70}
LOAD = "cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
COMMIT, WAIT = "cp.async.bulk.commit_group;\n", "cp.async.bulk.wait_group 0;\n"


def coordinates(at: tuple[int, ...]) -> str:
    return "{" + ", ".join(str(c) for c in at) + "}"


def reference_positions(m: TensorMap, at: tuple[int, ...], store: bool = False) -> list[tuple[int, int | None]]:
    """(byte in shared memory, byte offset in the tensor or None) of every element, one by one, box at address 0."""
    row, span = m.box[0] * m.size, {"none": 0, "32B": 32, "64B": 64, "128B": 128}[m.swizzle]
    # The end of a row that a store respects is that of its last 16 bytes.
    dims = (-(-m.dims[0] * m.size // 16) * 16 // m.size if store else m.dims[0], *m.dims[1:])
    counts = [-(-b // s) if k else b for k, (b, s) in enumerate(zip(m.box, m.element_strides, strict=True))]
    found = []
    for n, index in enumerate(itertools.product(*(range(c) for c in counts[::-1]))):
        place = [
            c + i * (s if k else 1) for k, (c, i, s) in enumerate(zip(at, index[::-1], m.element_strides, strict=True))
        ]
        address = n * m.size // row * max(row, span) + n * m.size % row
        address ^= (address >> 3) & SWIZZLE_MASK[m.swizzle]
        inside = all(0 <= p < d for p, d in zip(place, dims, strict=True))
        offset = sum(p * s for p, s in zip(place, (m.size, *m.strides), strict=True))
        found.append((address, offset if inside else None))
    return found


def image_bytes(m: TensorMap) -> int:
    """Of a box in shared memory, with the gaps between rows that are narrower than the swizzle."""
    return m.box_bytes // m.row_bytes * m.pitch


def reference_load(m: TensorMap, tensor: np.ndarray, at: tuple[int, ...], fill: bytes) -> np.ndarray:
    out = np.zeros(image_bytes(m), np.uint8)
    for address, offset in reference_positions(m, at):
        part = np.frombuffer(fill, np.uint8) if offset is None else tensor[offset : offset + m.size]
        out[address : address + m.size] = part
    return out


CASES = [
    ("u8", (100,), (), (48,), (64,), "none", None),
    ("u8", (100,), (), (48,), (-32,), "none", None),
    ("u64", (9, 5), (80,), (4, 3), (6, 3), "32B", None),
    ("bf16", (40, 10), (80,), (32, 8), (8, 1), "64B", None),
    ("bf16", (40, 10), (96,), (64, 8), (-8, 5), "128B", None),
    ("bf16", (43, 10), (96,), (64, 8), (0, 5), "128B", None),
    ("f32", (40, 10), (160,), (32, 4), (40, 0), "128B", None),
    ("f16", (40, 10), (80,), (32, 9), (8, 0), "none", (1, 2)),
    ("u16", (40, 10), (80,), (16, 9), (8, 3), "128B", None),
    ("s32", (20, 5, 4), (80, 400), (8, 3, 2), (16, 3, 3), "32B", None),
    ("u16", (20, 9, 8), (48, 432), (8, 6, 5), (8, -1, 2), "none", (1, 3, 2)),
    ("f64", (5, 4, 3, 2), (48, 192, 576), (4, 2, 2, 2), (2, 3, 1, 1), "32B", None),
    ("u8", (32, 3, 2, 3, 2), (32, 96, 192, 576), (32, 2, 2, 2, 2), (16, 2, 1, 1, 1), "none", None),
]


def tensor_bytes(dims: tuple[int, ...], strides: tuple[int, ...], size: int) -> int:
    return strides[-1] * dims[-1] if strides else dims[0] * size


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]}-{len(c[1])}d-{c[5]}-{c[4][0]}")
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_load(case: tuple, schedule: str) -> None:
    element, dims, strides, box, at, swizzle, steps = case
    dev = Device(1 << 20)
    rng = np.random.default_rng(1)
    size = encode(0, Buffer(256, np.zeros(0)), element=element, dims=dims, strides=strides, box=box).size
    tensor = rng.integers(0, 256, tensor_bytes(dims, strides, size), np.uint8)
    m = dev.tensor_map(
        dev.upload(tensor),
        element=element,
        dims=dims,
        strides=strides,
        box=box,
        swizzle=swizzle,
        element_strides=steps,
    )
    out = dev.empty(image_bytes(m), np.uint8)
    bar = "smem+8192"
    body = init(bar) + expect(bar, m.box_bytes)
    body += f"{LOAD.format(rank=len(dims))} [smem], [%m, {coordinates(at)}], [{bar}];\n"
    # Gaps between narrow rows are never written: zeros first.
    fill = load_bulk("smem", "%zeros", image_bytes(m), "smem+8200") + wait("smem+8200")
    body = init("smem+8200") + fill + body + wait(bar) + store_bulk("%out", "smem", image_bytes(m))
    args = [m, out, dev.upload(np.zeros(image_bytes(m), np.uint8))]
    module = load(kernel("m:map out:u64 zeros:u64", body, 8208))
    report = dev.launch(module, block=(1, 1, 1), args=args, options=Options(schedule=schedule))
    np.testing.assert_array_equal(out.array, reference_load(m, tensor, at, bytes(m.size)))
    assert report.bytes["TMA load global->shared"] == m.box_bytes


@pytest.mark.parametrize("element,pattern", [("f16", b"\xf7\x7f"), ("bf16", b"\xf7\x7f"), ("f32", b"\xf7\x7f\xf7\x7f")])
def test_load_fills_with_nan(element: str, pattern: bytes) -> None:
    dev = Device(1 << 20)
    tensor = np.arange(320).astype(np.uint8)
    m = dev.tensor_map(dev.upload(tensor), element=element, dims=(13, 5), strides=(64,), box=(8, 4), fill="nan")
    out = dev.empty(m.box_bytes, np.uint8)
    body = init("smem+1024") + expect("smem+1024", m.box_bytes)
    body += f"{LOAD.format(rank=2)} [smem], [%m, {{8, 3}}], [smem+1024];\n" + wait("smem+1024")
    body += store_bulk("%out", "smem", m.box_bytes)
    dev.launch(load(kernel("m:map out:u64", body, 1032)), block=(1, 1, 1), args=[m, out])
    np.testing.assert_array_equal(out.array, reference_load(m, tensor, (8, 3), pattern))


def store_kernel(rank: int, at: tuple[int, ...], size: int, operation: str = "") -> str:
    bar = "smem+8192"
    name = f"cp.{'reduce.' if operation else ''}async.bulk.tensor.{rank}d.global.shared::cta"
    name += f".{operation}.tile.bulk_group" if operation else ".tile.bulk_group"
    body = init(bar) + load_bulk("smem", "%image", size, bar) + wait(bar)
    body += f"{name} [%m, {coordinates(at)}], [smem];\n" + COMMIT + WAIT
    return kernel("m:map image:u64", body, 8200)


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]}-{len(c[1])}d-{c[5]}-{c[4][0]}")
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_store_clips(case: tuple, schedule: str) -> None:
    element, dims, strides, box, at, swizzle, steps = case
    dev = Device(1 << 20)
    rng = np.random.default_rng(2)
    size = encode(0, Buffer(256, np.zeros(0)), element=element, dims=dims, strides=strides, box=box).size
    before = rng.integers(0, 256, tensor_bytes(dims, strides, size), np.uint8)
    tensor = dev.upload(before)
    m = dev.tensor_map(
        tensor, element=element, dims=dims, strides=strides, box=box, swizzle=swizzle, element_strides=steps
    )
    image = rng.integers(0, 256, image_bytes(m), np.uint8)
    module = load(store_kernel(len(dims), at, image_bytes(m)))
    where: dict[str, Any] = {"block": (1, 1, 1), "args": [m, dev.upload(image)], "options": Options(schedule=schedule)}
    if min(at) < 0:
        with pytest.raises(DescriptorError, match="not negative"):
            dev.launch(module, **where)
        return
    dev.launch(module, **where)
    want = before.copy()
    for address, offset in reference_positions(m, at, True):
        if offset is not None:
            want[offset : offset + m.size] = image[address : address + m.size]
    np.testing.assert_array_equal(tensor.array, want)


REDUCTIONS: dict[tuple[str, str], Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    ("add", "f32"): np.add,
    ("min", "s32"): np.minimum,
    ("max", "u64"): np.maximum,
    ("inc", "u32"): lambda old, new: np.where(old >= new, 0, old + 1),
    ("dec", "u32"): lambda old, new: np.where((old == 0) | (old > new), new, old - 1),
    ("xor", "u64"): np.bitwise_xor,
    ("add", "f16"): np.add,
}
DTYPES = {"f32": np.float32, "s32": np.int32, "u64": np.uint64, "u32": np.uint32, "f16": np.float16}


@pytest.mark.parametrize("operation,element", REDUCTIONS)
def test_reduce(operation: str, element: str) -> None:
    dev = Device(1 << 20)
    rng = np.random.default_rng(3)
    dtype = DTYPES[element]
    before = rng.integers(0, 40, (6, 16)).astype(dtype)
    tensor = dev.upload(before)
    m = dev.tensor_map(tensor, element=element, dims=(16, 6), box=(8, 4))
    image = rng.integers(0, 40, (4, 8)).astype(dtype)
    dev.launch(
        load(store_kernel(2, (8, 3), m.box_bytes, operation)),
        grid=(2, 1, 1),
        block=(1, 1, 1),
        args=[m, dev.upload(image)],
    )
    want = before.copy()
    for _ in range(2):
        want[3:, 8:] = REDUCTIONS[operation, element](want[3:, 8:], image[:3])
    np.testing.assert_array_equal(tensor.array, want)


def test_reduce_add_f32_flushes_subnormals() -> None:
    dev = Device(1 << 20)
    tensor = dev.upload(np.array([1e-40, -1e-40, 2.0**-126, 1], np.float32))
    image = dev.upload(np.array([1e-40, -1e-40, -(2.0**-126) * 1.5, 1e-40], np.float32))
    m = dev.tensor_map(tensor, element="f32", dims=(4,), box=(4,))
    dev.launch(load(store_kernel(1, (0,), 16, "add")), block=(1, 1, 1), args=[m, image])
    assert tensor.array.view(np.uint32).tolist() == [0, 0x80000000, 0x80000000, 0x3F800000]


@pytest.mark.parametrize("operation,element", [("add", "u8"), ("min", "f32"), ("add", "s64"), ("and", "f32")])
def test_reduce_refuses(operation: str, element: str) -> None:
    dev = Device(1 << 20)
    tensor = dev.upload(np.zeros(64, np.uint8))
    m = dev.tensor_map(
        tensor, element=element, dims=(4 if element != "u8" else 16,), box=(4 if element != "u8" else 16,)
    )
    with pytest.raises(DescriptorError, match="no such combination"):
        dev.launch(load(store_kernel(1, (0,), m.box_bytes, operation)), block=(1, 1, 1), args=[m, tensor])


def test_reduce_onto_nothing() -> None:
    dev = Device(1 << 20)
    m = dev.tensor_map(dev.empty(4, np.float32), element="f32", dims=(4,), box=(4,))
    with pytest.raises(UninitialisedError):
        dev.launch(
            load(store_kernel(1, (0,), 16, "add")), block=(1, 1, 1), args=[m, dev.upload(np.ones(4, np.float32))]
        )


def run(body: str, schedule: str = "earliest", threads: int = 32, **severity: str) -> tuple[Report, np.ndarray]:
    """A kernel with maps %m (16x8 words of a ramp, box 8x4 = 128 bytes, read) and %o (the same, written), out %out."""
    dev = Device(1 << 20)
    ramp = np.arange(128, dtype=np.uint32).reshape(8, 16)
    a, b, out = dev.upload(ramp), dev.upload(0 * ramp), dev.upload(np.zeros(64, np.uint32))
    m, o = (dev.tensor_map(x, element="u32", dims=(16, 8), box=(8, 4)) for x in (a, b))
    report = dev.launch(
        load(kernel("m:map o:map out:u64", body, 2048)),
        block=(threads, 1, 1),
        args=[m, o, out],
        options=Options(schedule=schedule, severity=severity),
    )
    return report, b.array


BAR = "smem+1024"
FETCH = expect(BAR, 128) + f"{LOAD.format(rank=2)} [smem], [%m, {{0, 0}}], [{BAR}];\n"
PUT = "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%o, {0, 0}], [smem];\n"


def test_pipeline_is_clean() -> None:
    body = init(BAR) + FETCH + wait(BAR) + PUT + COMMIT + "cp.async.bulk.wait_group.read 0;\n"
    body += FETCH + wait(BAR, 1) + PUT.replace("{0, 0}", "{8, 0}") + COMMIT + WAIT
    for schedule in SCHEDULES:
        report, stored = run(body, schedule, 1)
        np.testing.assert_array_equal(stored[:4], np.tile(np.arange(128).reshape(8, 16)[:4, :8], 2))
        assert not report.lints


FAULTS = {
    "load not waited for": (init(BAR) + FETCH + "ld.shared.u32 %r1, [smem+64];\n", RaceError, "a read by warp 0"),
    "store before the load is done": (init(BAR) + FETCH + PUT + COMMIT + WAIT + wait(BAR), RaceError, "cp.async.bulk"),
    "source overwritten": (
        init(BAR) + FETCH + wait(BAR) + PUT + COMMIT + "st.shared.u32 [smem], 1;\n",
        RaceError,
        "a write",
    ),
    "overwritten, not committed": (
        init(BAR) + FETCH + wait(BAR) + PUT + WAIT + "st.shared.u32 [smem], 1;\n",
        RaceError,
        "a write",
    ),
    "no proxy fence": (
        init(BAR) + FETCH + wait(BAR) + "st.shared.u32 [smem+4], 1;\n" + PUT + COMMIT + WAIT,
        ProxyError,
        "fence.proxy.async",
    ),
    "too many bytes": (init(BAR) + expect(BAR, 144) + FETCH.split("\n", 1)[1], TransactionError, "16 bytes announced"),
    "unwritten source": (PUT + COMMIT + WAIT, UninitialisedError, "read before anything wrote it"),
    "misaligned coordinate": (init(BAR) + FETCH.replace("{0, 0}", "{2, 0}"), AlignmentError, "the first is 8 bytes"),
    "negative store": (init(BAR) + PUT.replace("{0, 0}", "{0, -1}"), DescriptorError, "not negative"),
    "misaligned": (init(BAR) + FETCH.replace("[smem]", "[smem+64]"), AlignmentError, "0x40: a multiple of 128"),
    "beyond shared memory": (init(BAR) + FETCH.replace("[smem]", "[smem+8192]"), BoundsError, "0x2000"),
    "other rank": (
        init(BAR) + FETCH.replace(".2d.", ".1d.").replace("{0, 0}", "{0}"),
        DescriptorError,
        "the instruction needs 1 dim",
    ),
    "no map": (init(BAR) + FETCH.replace("%m", "%out"), DescriptorError, "hold no tensor map"),
    "no address": (init(BAR) + FETCH.replace("%m", "%d9"), DescriptorError, "a generic address of .param"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("schedule", ("earliest", "latest"))
def test_faults(fault: str, schedule: str) -> None:
    body, error, words = FAULTS[fault]
    with pytest.raises(error, match=words):
        run(body, schedule, 1)


def test_read_wait_does_not_show_the_result() -> None:
    """wait_group.read frees the source; the destination is another matter."""
    start = init(BAR) + FETCH + wait(BAR) + PUT.replace("%o", "%m") + COMMIT
    again = FETCH + wait(BAR, 1)
    run(start + WAIT + again, threads=1)
    with pytest.raises(RaceError, match="global memory"):
        run(start + "cp.async.bulk.wait_group.read 0;\n" + again, threads=1)


def test_end_without_wait_is_noted() -> None:
    body = init(BAR) + FETCH + wait(BAR) + PUT + COMMIT
    report, _ = run(body, threads=1)
    assert any("whose source was not waited for" in str(lint) for lint in report.lints)
    with pytest.raises(Finding, match="wait_group"):
        run(body, threads=1, leftover="error")


def test_groups_wait_for_all_but_the_last() -> None:
    """wait_group 1 covers the first group only."""
    two = PUT.replace("[smem]", "[smem+128]")
    body = init(BAR) + expect(BAR, 256) + FETCH.split("\n", 1)[1]
    body += FETCH.split("\n", 1)[1].replace("[smem]", "[smem+128]") + wait(BAR) + PUT + COMMIT
    body += two.replace("{0, 0}", "{8, 0}") + COMMIT + "cp.async.bulk.wait_group 1;\n"
    for place, ok in (("smem", True), ("smem+128", False)):
        text = body + f"st.shared.u32 [{place}], 1;\n" + WAIT
        if ok:
            run(text, threads=1)
        else:
            with pytest.raises(RaceError):
                run(text, threads=1)


def test_map_outside_of_its_buffer() -> None:
    dev = Device(1 << 20)
    a = dev.upload(np.zeros((4, 16), np.uint32))
    m = dev.tensor_map(a, element="u32", dims=(16, 5), box=(8, 4))
    with pytest.raises(BoundsError, match="outside of every allocation"):
        dev.launch(
            load(kernel("m:map", init(BAR) + FETCH.replace("{0, 0}", "{0, 1}"), 2048)), block=(1, 1, 1), args=[m]
        )


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_gather_and_scatter(schedule: str) -> None:
    dev = Device(1 << 20)
    ramp = np.arange(16 * 40, dtype=np.uint16).reshape(16, 40)
    a, b = dev.upload(ramp), dev.upload(0 * ramp)
    m, o = (dev.tensor_map(x, element="u16", dims=(40, 16), box=(32, 1), swizzle="64B") for x in (a, b))
    rows = (3, -1, 15, 7)
    at = coordinates((16, *rows))
    to = coordinates((8, 0, 4, 16, 2))  # row 16 does not exist
    body = init(BAR) + expect(BAR, 256)
    gather = "cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4.mbarrier::complete_tx::bytes"
    body += f"{gather} [smem], [%m, {at}], [{BAR}];\n"
    body += wait(BAR) + f"cp.async.bulk.tensor.2d.global.shared::cta.tile::scatter4.bulk_group [%o, {to}], [smem];\n"
    text = kernel("m:map o:map", body + COMMIT + WAIT, 2048)
    dev.launch(load(text), block=(1, 1, 1), args=[m, o], options=Options(schedule=schedule))
    want = 0 * ramp
    for source, target in zip(rows, (0, 4, 16, 2), strict=True):
        if target < 16:
            want[target, 8:] = 0
            if source >= 0:
                want[target, 8:32] = ramp[source, 16:]
    np.testing.assert_array_equal(b.array, want)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_multicast(schedule: str) -> None:
    """Each block of two loads its half for both."""
    dev = Device(1 << 20)
    ramp = np.arange(128, dtype=np.uint32).reshape(8, 16)
    m = dev.tensor_map(dev.upload(ramp), element="u32", dims=(16, 8), box=(8, 4))
    out = dev.empty((2, 64), np.uint32)
    body = f"""mov.u32 %r1, %cluster_ctarank; shl.b32 %r2, %r1, 2; shl.b32 %r3, %r1, 7; mov.b16 %h1, 3;
{init(BAR)} {expect(BAR, 256)}
barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;
mov.u32 %r4, smem; add.u32 %r4, %r4, %r3;
{LOAD.format(rank=2).replace(".tile", "")}.multicast::cluster [%r4], [%m, {{0, %r2}}], [{BAR}], %h1;
{wait(BAR)} mul.wide.u32 %d1, %r1, 256; add.u64 %d1, %d1, %out;
{store_bulk("%d1", "smem", 256)}
barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;"""
    module = load(kernel("m:map out:u64", body, 2048))
    args = [m, out]
    dev.launch(
        module, grid=(2, 1, 1), cluster=(2, 1, 1), block=(1, 1, 1), args=args, options=Options(schedule=schedule)
    )
    np.testing.assert_array_equal(out.array, np.tile(ramp[:, :8].reshape(-1), (2, 1)))


def pair_kernel(group: str) -> str:
    """Both blocks load their own tile and signal the barrier of block 0, where both are waited for."""
    return kernel(
        "m:map out:u64",
        f"""mov.u32 %r1, %cluster_ctarank; shl.b32 %r2, %r1, 2; setp.eq.s32 %p1, %r1, 0;
{init(BAR)} mov.u32 %r3, {BAR}; and.b32 %r3, %r3, 0xFEFFFFFF;
@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [{BAR}], 256;
barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;
{LOAD.format(rank=2)}{group} [smem], [%m, {{0, %r2}}], [%r3];
@!%p1 bra DONE;
{wait(BAR)}
mapa.shared::cluster.u32 %r5, smem, 1; ld.shared::cluster.u32 %r6, [%r5+4]; st.global.u32 [%out], %r6;
DONE: barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;""",
        2048,
    )


def test_pair_signals_the_leader() -> None:
    dev = Device(1 << 20)
    m = dev.tensor_map(
        dev.upload(np.arange(128, dtype=np.uint32).reshape(8, 16)), element="u32", dims=(16, 8), box=(8, 4)
    )
    out = dev.empty(1, np.uint32)
    where = {"grid": (2, 1, 1), "cluster": (2, 1, 1), "block": (1, 1, 1)}
    dev.launch(load(pair_kernel(".cta_group::2")), args=[m, out], **where)  # type: ignore[arg-type]
    assert out.array[0] == 65
    with pytest.raises(DescriptorError, match="its pair with"):
        dev.launch(load(pair_kernel("")), args=[m, out], **where)  # type: ignore[arg-type]


def replace_kernel(fence: str) -> str:
    """Builds a map in shared memory from zeros, copies it to global memory and loads through it."""
    fields = {
        "global_address": ("b64", "%a"),
        "rank": ("b32", "1"),
        "box_dim": ("b32", "0, 8", "1, 4"),
        "global_dim": ("b32", "0, 16", "1, 8"),
        "global_stride": ("b64", "0, %d2"),
        "element_stride": ("b32", "0, 1", "1, 1"),
        "elemtype": ("b32", "2"),
        "interleave_layout": ("b32", "0"),
        "swizzle_mode": ("b32", "1"),
        "fill_mode": ("b32", "0"),
    }
    changes = "\n".join(
        f"@!%p7 tensormap.replace.tile.{field}.shared::cta.b1024.{kind} [smem+512], {value};"
        for field, (kind, *values) in fields.items()
        for value in values
    )
    return kernel(
        "a:u64 map:u64 out:u64",
        f"""shl.b32 %r1, %r60, 2; mov.u32 %r2, smem; add.u32 %r1, %r1, %r2; st.shared.u32 [%r1+512], 0;
mov.b64 %d2, 64; bar.warp.sync 0xffffffff;
{changes}
bar.warp.sync 0xffffffff;
tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%map], [smem+512], 128;
{fence}
@%p7 bra DONE;
{init(BAR)} {FETCH.replace("%m", "%map")} {wait(BAR)} {store_bulk("%out", "smem", 128)}
DONE:""",
        2048,
    )


def test_map_made_by_the_kernel() -> None:
    dev = Device(1 << 20)
    ramp = np.arange(128, dtype=np.uint32).reshape(8, 16)
    a, out = dev.upload(ramp), dev.empty(32, np.uint32)
    text = replace_kernel("fence.proxy.tensormap::generic.acquire.gpu [%map], 128;")
    dev.launch(load(text), args=[a, dev.empty(128, np.uint8), out])
    m = encode(0, a, element="u32", dims=(16, 8), box=(8, 4), swizzle="32B")
    want = reference_load(m, ramp.view(np.uint8).reshape(-1), (0, 0), bytes(4))
    np.testing.assert_array_equal(out.array.view(np.uint8), want)


def test_map_copied_to_global_memory() -> None:
    dev = Device(1 << 20)
    a = dev.upload(np.arange(128, dtype=np.uint32).reshape(8, 16))
    m = dev.tensor_map(a, element="u32", dims=(16, 8), box=(8, 4))
    copy, out = dev.upload(np.frombuffer(m.bytes, np.uint8)), dev.empty(32, np.uint32)
    body = init(BAR) + FETCH + wait(BAR) + store_bulk("%out", "smem", 128)
    dev.launch(load(kernel("m:u64 out:u64", body, 2048)), block=(1, 1, 1), args=[copy, out])
    np.testing.assert_array_equal(out.array.reshape(4, 8), a.array[:4, :8])


REFUSED: dict[str, dict[str, Any]] = {
    "address": {"address_offset": 8},
    "strides": {"strides": (200,)},
    "box": {"box": (64, 257)},
    "multiple of 16": {"box": (4, 4)},
    "swizzle 32B allows": {"box": (64, 4), "swizzle": "32B"},
    "element_strides": {"element_strides": (1, 9)},
    "dims": {"dims": (0, 8)},
    "interleave": {"interleave": "16B"},
    "element=": {"element": "f8"},
    "swizzle=": {"swizzle": "96B"},
    "only floating-point": {"element": "u16", "fill": "nan"},
    "1 to 5 dimensions": {"dims": (8,) * 6},
}


@pytest.mark.parametrize("words", REFUSED)
def test_encode_refuses(words: str) -> None:
    arguments: dict[str, Any] = {"element": "bf16", "dims": (64, 8), "box": (32, 4), **REFUSED[words]}
    with pytest.raises(LaunchError, match=words):
        encode(0, Buffer(0x7F00_0000_1000, np.zeros(0)), **arguments)


def test_encode_and_decode() -> None:
    m = encode(
        3,
        Buffer(0x7F00_0000_1000, np.zeros(0)),
        element="bf16",
        dims=(1 << 32, 9, 2),
        strides=(1 << 34, 1 << 39),
        box=(64, 4, 2),
        swizzle="128B_ATOM32B",
        fill="nan",
        element_strides=(1, 2, 8),
        address_offset=16,
    )
    assert len(m.bytes) == 128
    found = decode(m.bytes)
    assert (found.dims, found.strides, found.box, found.element_strides) == (
        m.dims,
        m.strides,
        m.box,
        m.element_strides,
    )
    assert (found.id, found.address, found.swizzle, found.fill, found.element) == (
        3,
        m.address,
        m.swizzle,
        "nan",
        "bf16",
    )
    assert m.counts == (64, 2, 1) and m.box_bytes == 256
    with pytest.raises(ValueError, match="no tensor map"):
        decode(bytes(128))
