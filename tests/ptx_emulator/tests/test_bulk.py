"""Bulk copies and reductions, cp.async: bytes, groups, races, refusals."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from .. import Device, Options, load
from ..errors import (
    AlignmentError,
    BarrierError,
    BoundsError,
    DescriptorError,
    Finding,
    ProxyError,
    RaceError,
    UninitialisedError,
    UnknownInstructions,
)
from ..formats import bf16_to_f32, f32_to_bf16
from .ptx_text import init, kernel, load_bulk, store_bulk, wait

SCHEDULES = ("earliest", "latest", "random")
BAR = "smem+4096"
COMMIT, WAIT = "cp.async.bulk.commit_group;\n", "cp.async.bulk.wait_group 0;\n"
CLUSTER_SYNC = "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;\n"


def launch(
    text: str, *args: object, schedule: str = "earliest", block: int = 1, blocks: int = 1, cluster: int = 1
) -> Device:
    """Runs with numpy arrays as arguments that are uploaded; they are overwritten with what the kernel left there."""
    dev = Device(1 << 20)
    buffers = [dev.upload(a) if isinstance(a, np.ndarray) else a for a in args]
    dev.launch(
        load(text),
        args=buffers,
        block=(block, 1, 1),
        grid=(blocks, 1, 1),
        cluster=(cluster, 1, 1),
        options=Options(schedule=schedule),
    )
    for a, b in zip(args, buffers, strict=True):
        if isinstance(a, np.ndarray):
            a[...] = b.array  # type: ignore[attr-defined]
    return dev


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("size", (16, 1040, 4096))
def test_there_and_back(size: int, schedule: str) -> None:
    a, b = np.random.default_rng(0).integers(0, 256, size, np.uint8), np.zeros(size + 16, np.uint8)
    body = init(BAR) + load_bulk("smem", "%a", "%n", BAR) + wait(BAR) + store_bulk("%b", "smem", "%n")
    launch(kernel("a:u64 b:u64 n:u32", body, 4104), a, b, size, schedule=schedule)
    np.testing.assert_array_equal(b[:size], a)
    assert not b[size:].any()


def test_masked_store() -> None:
    a, b = np.arange(64, dtype=np.uint8), np.full(64, 255, np.uint8)
    body = init(BAR) + load_bulk("smem", "%a", 64, BAR) + wait(BAR) + "mov.b16 %h1, 0x8103;\n"
    body += f"cp.async.bulk.global.shared::cta.bulk_group.cp_mask [%b], [smem], 64, %h1;\n{COMMIT}{WAIT}"
    launch(kernel("a:u64 b:u64", body, 4104), a, b)
    kept = np.isin(np.arange(64) % 16, (0, 1, 8, 15))
    np.testing.assert_array_equal(b, np.where(kept, a, 255))


Function = Callable[[np.ndarray, np.ndarray], np.ndarray]
REDUCTIONS: dict[tuple[str, str, str], Function] = {
    ("add", "f32", "f4"): np.add,
    ("add", "f64", "f8"): np.add,
    ("add.noftz", "f16", "f2"): np.add,
    ("min", "f16", "f2"): np.minimum,
    ("add", "u32", "u4"): np.add,
    ("add", "s32", "i4"): np.add,
    ("add", "u64", "u8"): np.add,
    ("min", "s64", "i8"): np.minimum,
    ("max", "u32", "u4"): np.maximum,
    ("inc", "u32", "u4"): lambda old, new: np.where(old >= new, 0, old + 1),
    ("dec", "u32", "u4"): lambda old, new: np.where((old == 0) | (old > new), new, old - 1),
    ("and", "b32", "u4"): np.bitwise_and,
    ("or", "b64", "u8"): np.bitwise_or,
    ("xor", "b32", "u4"): np.bitwise_xor,
}


def reduce_kernel(operation: str, kind: str, size: int) -> str:
    body = init(BAR) + load_bulk("smem", "%a", size, BAR) + wait(BAR)
    body += (
        f"cp.reduce.async.bulk.global.shared::cta.bulk_group.{operation}.{kind} [%b], [smem], {size};\n" + COMMIT + WAIT
    )
    return kernel("a:u64 b:u64", body, 4104)


@pytest.mark.parametrize("form", REDUCTIONS, ids=lambda f: f"{f[0]}-{f[1]}")
def test_reduce(form: tuple[str, str, str]) -> None:
    """By two blocks, whose reductions nothing orders: that is no race."""
    operation, kind, code = form
    rng = np.random.default_rng(1)
    low = 0 if code[0] == "u" else -40
    a, b = (rng.integers(low, 40, 32).astype(code) for _ in range(2))
    want = b
    for _ in range(2):
        want = REDUCTIONS[form](want, a).astype(code)
    launch(reduce_kernel(operation, kind, a.nbytes), a, b, blocks=2)
    np.testing.assert_array_equal(b, want)


def test_reduce_bf16() -> None:
    a, b = (f32_to_bf16(np.arange(n, n + 16, dtype=np.float32)) for n in (1, 100))
    launch(reduce_kernel("add.noftz", "bf16", 32), a, b)
    np.testing.assert_array_equal(bf16_to_f32(b), np.arange(16) * 2 + 101)


@pytest.mark.parametrize(
    "operation,kind,words",
    [
        ("add", "f16", "needs .noftz"),
        ("min", "f32", "allowed are"),
        ("add", "s64", "allowed are"),
        ("mul", "u32", "modifier"),
    ],
)
def test_reduce_refuses(operation: str, kind: str, words: str) -> None:
    with pytest.raises(UnknownInstructions, match=words):
        load(reduce_kernel(operation, kind, 32))


FETCH = init(BAR) + load_bulk("smem", "%a", 64, BAR)
PUT = "cp.async.bulk.global.shared::cta.bulk_group [%b], [smem], 64;\n"
FAULTS = {
    "no wait": (FETCH + PUT + COMMIT + WAIT, RaceError, "shared memory"),
    "no proxy fence": (FETCH + wait(BAR) + "st.shared.u32 [smem], 1;\n" + PUT, ProxyError, "fence.proxy.async"),
    "source overwritten": (FETCH + wait(BAR) + PUT + COMMIT + "st.shared.u32 [smem], 1;\n", RaceError, "a read by cp"),
    "size": (FETCH.replace("64", "24"), DescriptorError, "size 0x18: a multiple of 16"),
    "source alignment": (FETCH.replace("[%a]", "[%a+8]"), AlignmentError, "source 0x7f0000000"),
    "target alignment": (FETCH.replace("[smem]", "[smem+8]"), AlignmentError, "destination 0x8"),
    "global bounds": (FETCH.replace("[%a]", "[%a+16]"), BoundsError, "not all inside one allocation"),
    "shared bounds": (FETCH.replace("[smem]", "[smem+4064]").replace("4096", "16"), BoundsError, "0xfe0"),
    "no barrier": (FETCH.split(";", 1)[1].split(";", 2)[2], BarrierError, "not initialised"),
    "onto a barrier": (FETCH.replace("[smem]", "[smem+4048]"), BarrierError, "holds a live mbarrier"),
    "unwritten source": (PUT, UninitialisedError, "shared memory"),
    "own block": (
        FETCH.replace(".global", ".shared::cta").replace("[%a]", "[smem+1024]"),
        UninitialisedError,
        "read before anything wrote it",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("schedule", ("earliest", "latest"))
def test_faults(fault: str, schedule: str) -> None:
    body, error, words = FAULTS[fault]
    a, b = np.zeros(16, np.uint32), np.zeros(16, np.uint32)
    with pytest.raises(error, match=words):
        launch(kernel("a:u64 b:u64", body, 4104), a, b, schedule=schedule)


def test_reduce_onto_nothing() -> None:
    dev = Device(1 << 20)
    with pytest.raises(UninitialisedError, match="a reduction onto bytes that nothing wrote"):
        dev.launch(
            load(reduce_kernel("add", "u32", 32)),
            block=(1, 1, 1),
            args=[dev.upload(np.ones(8, "u4")), dev.empty(8, "u4")],
        )


def peer_kernel(operation: str, wait_text: str) -> str:
    """Each block of two fills 64 bytes with its numbers and sends them to the other; the receiver copies them out."""
    name = "cp.reduce.async.bulk" if operation else "cp.async.bulk"
    return kernel(
        "a:u64 b:u64",
        f"""mov.u32 %r1, %cluster_ctarank; xor.b32 %r2, %r1, 1; mul.wide.u32 %d1, %r1, 64;
add.u64 %d2, %d1, %a; add.u64 %d3, %d1, %b;
{init(BAR)} {init("smem+4104")} {load_bulk("smem", "%d2", 64, BAR)}
{load_bulk("smem+64", "%d2", 64, "smem+4104")} {wait(BAR)} {wait("smem+4104")}
mbarrier.arrive.expect_tx.shared.b64 _, [{BAR}], 64;
{CLUSTER_SYNC}
mov.u32 %r3, smem; mapa.shared::cluster.u32 %r4, %r3, %r2;
{name}.shared::cluster.shared::cta.mbarrier::complete_tx::bytes{operation} [%r4+64], [%r3], 64, [%r4+4096];
{wait_text}
{store_bulk("%d3", "smem+64", 64)}
{CLUSTER_SYNC}""",
        4112,
    )


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("operation", ("", ".add.u32", ".max.s32"))
def test_to_the_peer(operation: str, schedule: str) -> None:
    a, b = np.arange(-16, 16, dtype=np.int32), np.zeros(32, np.int32)
    launch(peer_kernel(operation, wait(BAR, 1)), a, b, schedule=schedule, blocks=2, cluster=2)
    swapped = np.concatenate([a[16:], a[:16]])
    want = {"": swapped, ".add.u32": a + swapped, ".max.s32": np.maximum(a, swapped)}[operation]
    np.testing.assert_array_equal(b, want)


@pytest.mark.parametrize("operation", ("", ".add.u32"))
def test_to_the_peer_without_wait(operation: str) -> None:
    a, b = np.arange(32, dtype=np.int32), np.zeros(32, np.int32)
    with pytest.raises(RaceError):
        launch(peer_kernel(operation, ""), a, b, blocks=2, cluster=2)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_multicast(schedule: str) -> None:
    a, b = np.arange(16, dtype=np.uint32), np.zeros((2, 16), np.uint32)
    body = f"""mov.u32 %r1, %cluster_ctarank; setp.eq.s32 %p1, %r1, 0; mul.wide.u32 %d1, %r1, 64; add.u64 %d1, %d1, %b;
{init(BAR)} mbarrier.arrive.expect_tx.shared.b64 _, [{BAR}], 64; mov.b16 %h1, 3;
{CLUSTER_SYNC}
@%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster
[smem], [%a], 64, [{BAR}], %h1;
{wait(BAR)} {store_bulk("%d1", "smem", 64)} {CLUSTER_SYNC}"""
    launch(kernel("a:u64 b:u64", body, 4104), a, b, schedule=schedule, blocks=2, cluster=2)
    np.testing.assert_array_equal(b, np.tile(a, (2, 1)))


# cp.async -------------------------------------------------------------------------------------------------------------
def lanes_kernel(size: int, copy: str, finish: str) -> str:
    """32 threads copy `size` bytes each (source %d1, target %r2), finish, and store 16 bytes from shared memory."""
    return kernel(
        "a:u64 b:u64 n:u64",
        f"""mov.u32 %r1, smem; mad.lo.u32 %r2, %r60, 16, %r1; mul.wide.u32 %d4, %r60, 16;
add.u64 %d1, %d4, %a; add.u64 %d2, %d4, %b; mul.wide.u32 %d3, %r60, 4; add.u64 %d3, %d3, %n;
@!%p7 mbarrier.init.shared.b64 [{BAR}], 33; bar.sync 0;
mov.b32 %r9, 0; st.shared.v4.u32 [%r2], {{%r9, %r9, %r9, %r9}};
ld.global.u32 %r3, [%d3]; setp.ne.s32 %p1, %r3, 0;
{copy}
{finish}
ld.shared.v4.u32 {{%r4, %r5, %r6, %r7}}, [%r2]; st.global.v4.u32 [%d2], {{%r4, %r5, %r6, %r7}};""",
        4104,
    )


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("size", (4, 8, 16))
@pytest.mark.parametrize("portion", ("whole", "src-size", "ignore-src"))
def test_cp_async(size: int, portion: str, schedule: str) -> None:
    rng = np.random.default_rng(2)
    a, b = rng.integers(0, 256, (32, 16), np.uint8), np.zeros((32, 16), np.uint8)
    n = rng.integers(0, 2 if portion == "ignore-src" else size + 1, 32).astype(np.uint32)
    extra = {"whole": "", "src-size": ", %r3", "ignore-src": ", %p1"}[portion]
    copy = f"cp.async.{'cg' if size == 16 else 'ca'}.shared.global.L2::128B [%r2], [%d1], {size}{extra};"
    launch(lanes_kernel(size, copy, "cp.async.wait_all;"), a, b, n, schedule=schedule, block=32)
    counts = {"whole": 0 * n + size, "src-size": n, "ignore-src": np.where(n, 0, size)}[portion]
    np.testing.assert_array_equal(b, np.where(np.arange(16) < counts[:, None], a, 0))


COPY = "cp.async.cg.shared.global [%r2], [%d1], 16;\n"
GROUP = "cp.async.commit_group;\n"
ARRIVE = "cp.async.mbarrier.arrive{}.shared.b64 [" + BAR + "];\n"
FINISHES = {
    "group": (GROUP + "cp.async.wait_group 0;", None),
    "arrive": (ARRIVE.format(".noinc") + f"@!%p7 mbarrier.arrive.shared.b64 _, [{BAR}];" + wait(BAR), None),
    "nothing": ("", RaceError),
    "not committed": ("cp.async.wait_group 0;", RaceError),
    "one pending": (GROUP + "cp.async.wait_group 1;", RaceError),
    "empty group": (GROUP + GROUP + "cp.async.wait_group 1;", None),
    "counted in": (
        ARRIVE.format("")
        + "mbarrier.arrive.shared.b64 _, ["
        + BAR
        + "];\n@!%p7 mbarrier.arrive.shared.b64 _, ["
        + BAR
        + "];"
        + wait(BAR),
        None,
    ),
}


@pytest.mark.parametrize("finish", FINISHES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_cp_async_groups(finish: str, schedule: str) -> None:
    text, error = FINISHES[finish]
    a, b, n = np.arange(512, dtype=np.uint8), np.zeros(512, np.uint8), np.zeros(32, np.uint32)
    module = lanes_kernel(16, COPY, text)
    if error is None:
        launch(module, a, b, n, schedule=schedule, block=32)
        np.testing.assert_array_equal(b, a)
    else:
        with pytest.raises(error):
            launch(module, a, b, n, schedule=schedule, block=32)


def test_cp_async_groups_by_thread() -> None:
    """Thread 0 has one group more than the others, so that its wait covers the copy and theirs does not."""
    finish = GROUP + "@!%p7 cp.async.commit_group;\ncp.async.wait_group 1;\n"
    a, b, n = np.arange(512, dtype=np.uint8), np.zeros(512, np.uint8), np.zeros(32, np.uint32)
    with pytest.raises(RaceError):
        launch(lanes_kernel(16, COPY, finish), a, b, n, block=32)
    text = (
        lanes_kernel(16, COPY, finish)
        .replace("ld.shared.v4", "@%p7 bra DONE;\nld.shared.v4")
        .replace("\nret;", "\nDONE: cp.async.wait_all;\nret;")
    )
    launch(text, a, b, n, block=32)
    np.testing.assert_array_equal(b[:16], a[:16])


CP_FAULTS: dict[str, tuple[str, type[Finding], str]] = {
    "source alignment": (COPY.replace("[%d1]", "[%d1+4]"), AlignmentError, "global address"),
    "target alignment": (COPY.replace("[%r2]", "[%r2+8]"), AlignmentError, "shared address"),
    "global bounds": (COPY.replace("[%d1]", "[%d1+16]"), BoundsError, "outside every allocation"),
    "shared bounds": (COPY.replace("[%r2]", "[%r2+8192]"), BoundsError, "shared bytes"),
    "src-size": (COPY.replace("16;", "16, 17;"), DescriptorError, "src-size 17"),
}


@pytest.mark.parametrize("fault", CP_FAULTS)
def test_cp_async_faults(fault: str) -> None:
    copy, error, words = CP_FAULTS[fault]
    a, b, n = np.arange(512, dtype=np.uint8), np.zeros(512, np.uint8), np.zeros(32, np.uint32)
    with pytest.raises(error, match=words):
        launch(lanes_kernel(16, copy, "cp.async.wait_all;"), a, b, n, block=32)


def test_cp_async_is_the_generic_proxy() -> None:
    """What it wrote needs fence.proxy.async before a bulk copy reads it."""
    for fence in ("", "fence.proxy.async.shared::cta;\n"):
        finish = f"cp.async.wait_all;\n{fence}bar.sync 0;\n@%p7 bra DONE;\n{store_bulk('%b', 'smem', 512)}\nDONE:"
        a, b, n = np.arange(512, dtype=np.uint8), np.zeros(512, np.uint8), np.zeros(32, np.uint32)
        text = lanes_kernel(16, COPY, finish + "\nret;")
        if fence:
            launch(text, a, b, n, block=32)
            np.testing.assert_array_equal(b, a)
        else:
            with pytest.raises(ProxyError):
                launch(text, a, b, n, block=32)
