"""Clusters: addresses, barrier.cluster, signalling stores, setmaxnreg, launch control."""

from __future__ import annotations

import numpy as np
import pytest

from .. import Device, Finding, Options, Report, load
from ..errors import (
    AlignmentError,
    BarrierError,
    ConvergenceError,
    DeadlockError,
    DescriptorError,
    RaceError,
    TransactionError,
    UninitialisedError,
    UnknownInstructions,
)
from .ptx_text import expect, init, kernel, wait

SCHEDULES = ("earliest", "latest", "random")
SYNC = "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;\n"
BAR = "smem+1024"


def launch(
    text: str, out: np.ndarray, cluster: int = 2, block: int = 32, grid: int | None = None, **options: object
) -> Report:
    """`out` is uploaded as the one argument and gets what the kernel left there."""
    dev = Device(1 << 20)
    buffer = dev.upload(out)
    report = dev.launch(
        load(text),
        args=[buffer],
        grid=(grid or cluster, 1, 1),
        block=(block, 1, 1),
        cluster=(cluster, 1, 1),
        options=Options(**options),  # type: ignore[arg-type]
    )
    out[...] = buffer.array
    return report


def test_addresses_of_other_blocks() -> None:
    """mapa and getctarank, of shared and generic addresses; a load through each."""
    body = f"""mov.u32 %r1, %cluster_ctarank; add.u32 %r2, %r1, 1; rem.u32 %r2, %r2, 4;
shl.b32 %r3, %r60, 2; mov.u32 %r4, smem; add.u32 %r4, %r4, %r3; add.u32 %r5, %r60, 100; mad.lo.u32 %r5, %r1, 1000, %r5;
st.shared.u32 [%r4], %r5; {SYNC}
mapa.shared::cluster.u32 %r6, %r4, %r2; getctarank.shared::cluster.u32 %r7, %r6; ld.shared::cluster.u32 %r8, [%r6];
cvt.u64.u32 %d1, %r4; cvta.shared.u64 %d1, %d1; mapa.u64 %d2, %d1, %r2; getctarank.u64 %r9, %d2; ld.u32 %r10, [%d2];
{SYNC}
mad.lo.u32 %r11, %r1, 32, %r60; mul.wide.u32 %d3, %r11, 16; add.u64 %d3, %d3, %out;
st.global.v4.u32 [%d3], {{%r7, %r8, %r9, %r10}};"""
    out = np.zeros((4, 32, 4), np.uint32)
    launch(kernel("out:u64", body, 2048), out, 4)
    for rank in range(4):
        peer = (rank + 1) % 4
        value = np.arange(32) + 100 + 1000 * peer
        np.testing.assert_array_equal(out[rank], np.stack([0 * value + peer, value, 0 * value + peer, value], 1))


def test_mapa_outside_of_the_cluster() -> None:
    with pytest.raises(DescriptorError, match="block rank 2: the cluster has 2 blocks"):
        launch(kernel("out:u64", "mapa.shared::cluster.u32 %r6, smem, 2;", 64), np.zeros(1, "u4"))


def exchange(before: str, after: str) -> str:
    """Each block writes a word; thread 0 of each reads the other's."""
    return kernel(
        "out:u64",
        f"""mov.u32 %r1, %cluster_ctarank; xor.b32 %r2, %r1, 1; mapa.shared::cluster.u32 %r3, smem, %r2;
@!%p7 st.shared.u32 [smem], %r1; {before}
@%p7 bra DONE; ld.shared::cluster.u32 %r4, [%r3]; mul.wide.u32 %d1, %r1, 4; add.u64 %d1, %d1, %out;
st.global.u32 [%d1], %r4;
DONE: {after}""",
        64,
    )


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_cluster_barrier_orders(schedule: str) -> None:
    out = np.zeros(2, np.uint32)
    launch(exchange(SYNC, SYNC), out, schedule=schedule)
    assert out.tolist() == [1, 0]


def test_relaxed_arrival_after_a_fence() -> None:
    out = np.zeros(2, np.uint32)
    launch(exchange("fence.acq_rel.cluster;" + SYNC.replace("release", "relaxed"), SYNC), out)
    assert out.tolist() == [1, 0]


BARRIER_FAULTS: dict[str, tuple[str, type[Finding], str]] = {
    "none": (exchange("", SYNC), Finding, "race|read before anything wrote it"),
    "relaxed": (exchange(SYNC.replace("release", "relaxed"), SYNC), RaceError, "race on shared memory of block"),
    "no wait": (exchange("barrier.cluster.arrive.aligned;", ""), Finding, "race|read before anything wrote it"),
    "twice": (exchange("barrier.cluster.arrive.aligned;" * 2, ""), BarrierError, "again before its wait"),
    "no arrival": (exchange("barrier.cluster.wait.aligned;", ""), BarrierError, "without having arrived"),
    "part of a warp": (exchange("@%p7 barrier.cluster.arrive.aligned;", ""), ConvergenceError, "a part of the warp"),
    "one block": (
        exchange(
            "setp.eq.u32 %p1, %r1, 0; @!%p1 bra W; barrier.cluster.arrive; barrier.cluster.wait; W: bar.sync 1, 64;", ""
        ),
        DeadlockError,
        "not there yet are warp 0 of block",
    ),
}


@pytest.mark.parametrize("fault", BARRIER_FAULTS)
def test_cluster_barrier_faults(fault: str) -> None:
    text, error, words = BARRIER_FAULTS[fault]
    with pytest.raises(error, match=words):
        launch(text, np.zeros(2, np.uint32))


def test_exited_threads_count_as_arrived() -> None:
    out = np.zeros(2, np.uint32)
    body = f"mov.u32 %r1, %cluster_ctarank; setp.eq.u32 %p1, %r1, 1; @%p1 ret; {SYNC} @!%p7 st.global.u32 [%out], 5;"
    launch(kernel("out:u64", body, 64), out)
    assert out.tolist() == [5, 0]


def signalling(store: str, size: int, waits: bool = True, first: str = "") -> str:
    """Thread 0 of each block sends words %r10.. (rank, 11, 12, 13) to the other, which copies four words out."""
    return kernel(
        "out:u64",
        f"""mov.u32 %r1, %cluster_ctarank; xor.b32 %r2, %r1, 1; mov.b32 %r11, 11; mov.b32 %r12, 12; mov.b32 %r13, 13;
mov.u32 %r10, %r1; mov.b64 %d5, {{%r10, %r11}}; {init(BAR)} {expect(BAR, size)} {first} {SYNC}
mapa.shared::cluster.u32 %r3, smem, %r2; {store} {wait(BAR) if waits else ""}
ld.shared.v4.u32 {{%r20, %r21, %r22, %r23}}, [smem]; mul.wide.u32 %d1, %r1, 16; add.u64 %d1, %d1, %out;
st.global.v4.u32 [%d1], {{%r20, %r21, %r22, %r23}}; {SYNC}""",
        1040,
    )


ST = "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes"
RED = "red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes"
CLEAR = "mov.b32 %r30, 0; st.shared.v4.u32 [smem], {%r30, %r30, %r30, %r30};"
STORES = {
    "v4.u32": (f"{ST}.v4.u32 [%r3], {{%r10, %r11, %r12, %r13}}, [%r3+1024];", 16, lambda peer: [peer, 11, 12, 13]),
    "v2.b32": (f"{ST}.v2.b32 [%r3+8], {{%r10, %r11}}, [%r3+1024];", 8, lambda peer: [0, 0, peer, 11]),
    "b64": (f"{ST}.b64 [%r3], %d5, [%r3+1024];", 8, lambda peer: [peer, 11, 0, 0]),
    "u32": (f"{ST}.u32 [%r3+4], %r13, [%r3+1024];", 4, lambda peer: [0, 13, 0, 0]),
}


@pytest.mark.parametrize("form", STORES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_store_async(form: str, schedule: str) -> None:
    store, size, want = STORES[form]
    out = np.zeros((2, 4), np.uint32)
    launch(signalling(store, size, first=CLEAR), out, block=1, schedule=schedule)
    assert out.tolist() == [want(1), want(0)]


@pytest.mark.parametrize("operation,value", [("add.u32", 16), ("max.s32", 13), ("inc.u32", 4), ("and.b32", 1)])
def test_reduce_async(operation: str, value: int) -> None:
    store = f"{RED}.{operation} [%r3], %r13, [%r3+1024];"
    out = np.zeros((2, 4), np.uint32)
    launch(signalling(store, 4, first=CLEAR.replace("%r30, 0", "%r30, 3")), out, block=1)
    assert out[:, 0].tolist() == [value, value]


SIGNAL_FAULTS: dict[str, tuple[str, type[Finding], str]] = {
    "no wait": (signalling(STORES["v4.u32"][0], 16, waits=False, first=CLEAR), RaceError, "st.async"),
    "nothing else": (signalling(STORES["u32"][0], 4), UninitialisedError, "0x0..0x3 read before anything wrote it"),
    "alignment": (signalling(f"{ST}.b64 [%r3+4], %d5, [%r3+1024];", 8), AlignmentError, "a multiple of 8"),
    "barrier elsewhere": (
        signalling(f"{ST}.u32 [%r3], %r13, [{BAR}];", 4),
        DescriptorError,
        "the mbarrier is in block",
    ),
    "unwritten": (
        signalling(f"{RED}.add.u32 [%r3], %r13, [%r3+1024];", 4),
        UninitialisedError,
        "a reduction onto bytes that nothing wrote",
    ),
}


@pytest.mark.parametrize("fault", SIGNAL_FAULTS)
def test_signal_faults(fault: str) -> None:
    text, error, words = SIGNAL_FAULTS[fault]
    with pytest.raises(error, match=words):
        launch(text, np.zeros((2, 4), np.uint32), block=1)


def test_bytes_left_at_the_end() -> None:
    with pytest.raises(TransactionError, match="4 bytes announced"):
        launch(
            signalling(STORES["u32"][0], 8, waits=False).replace("ld.shared.v4", SYNC + "@%p7 ld.shared.v4"),
            np.zeros((2, 4), "u4"),
            block=1,
        )


# setmaxnreg -----------------------------------------------------------------------------------------------------------
def registers(low: int, high: int) -> str:
    body = f"""setp.lt.u32 %p1, %r60, 128; @%p1 bra LESS;
setmaxnreg.inc.sync.aligned.u32 {high}; @%p1 bra LESS; bra DONE;
LESS: setmaxnreg.dec.sync.aligned.u32 {low};
DONE: @!%p7 st.global.u32 [%out], 1;"""
    return kernel("out:u64", body, 64)


def test_register_budget() -> None:
    """384 threads have 168 each: 24 + 2 * 240 of 3 * 168 fit, 32 + 2 * 240 do not."""
    out = np.zeros(1, np.uint32)
    launch(registers(24, 240), out, 1, 384)
    assert out[0] == 1
    with pytest.raises(DeadlockError, match=r"setmaxnreg: 240 registers for each thread, \d+ are free"):
        launch(registers(32, 240), out, 1, 384)


@pytest.mark.parametrize("count", (16, 100, 264))
def test_register_counts_refused(count: int) -> None:
    with pytest.raises(UnknownInstructions, match="multiples of 8 from 24 to 256"):
        load(registers(count, 240))


def test_registers_by_part_of_a_warp() -> None:
    with pytest.raises(ConvergenceError):
        launch(kernel("out:u64", "@%p7 setmaxnreg.dec.sync.aligned.u32 40;", 64), np.zeros(1, "u4"), 1)


# Launch control -------------------------------------------------------------------------------------------------------
CANCEL = "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes{}.b128 [smem], [smem+1024];\n"
QUERY = "clusterlaunchcontrol.query_cancel"


def persistent(get: str, again: str = "", waits: bool = True) -> str:
    """A block counts itself, and every block that it takes over."""
    return kernel(
        "out:u64",
        f"""{init(BAR)} mov.u32 %r1, %ctaid.x; mov.u32 %r2, 0;
LOOP: mul.wide.u32 %d1, %r1, 4; add.u64 %d1, %d1, %out; red.global.add.u32 [%d1], 1;
{expect(BAR, 16)} {CANCEL.format("")} {wait(BAR, "%r2") if waits else ""} xor.b32 %r2, %r2, 1;
ld.shared.v2.b64 {{%d2, %d3}}, [smem]; mov.b128 %q0, {{%d2, %d3}};
fence.proxy.async.shared::cta;
{QUERY}.is_canceled.pred.b128 %p1, %q0;
{get} {again}
@%p1 bra LOOP;""",
        1040,
    )


GET_X = QUERY + ".get_first_ctaid::x.b32.b128 %r1, %q0;"
GET_ALL = "@%p1 " + QUERY + ".get_first_ctaid.v4.b32.b128 {%r1, %r4, %r5, _}, %q0;"


@pytest.mark.parametrize("get", (GET_X, GET_ALL))
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("order", ("forward", "reversed", "shuffled"))
def test_launch_control(get: str, schedule: str, order: str) -> None:
    out = np.zeros(12, np.uint32)
    launch(persistent(get), out, 1, 1, 12, schedule=schedule, order=order, resident=3)
    assert out.tolist() == [1] * 12


def test_launch_control_by_clusters() -> None:
    """Rank 0 asks for both blocks of a cluster."""
    body = f"""{init(BAR)} mov.u32 %r1, %ctaid.x; mov.u32 %r2, 0; mov.u32 %r3, %cluster_ctarank;
setp.eq.u32 %p2, %r3, 0;
{SYNC}
LOOP: mul.wide.u32 %d1, %r1, 4; add.u64 %d1, %d1, %out; red.global.add.u32 [%d1], 1;
{expect(BAR, 16)} {SYNC} @%p2 {CANCEL.format(".multicast::cluster::all")} {wait(BAR, "%r2")} xor.b32 %r2, %r2, 1;
ld.shared.v2.b64 {{%d2, %d3}}, [smem]; mov.b128 %q0, {{%d2, %d3}}; {SYNC}
{QUERY}.is_canceled.pred.b128 %p1, %q0; @%p1 {GET_X} add.u32 %r1, %r1, %r3;
@%p1 bra LOOP;"""
    out = np.zeros(12, np.uint32)
    launch(kernel("out:u64", body, 1040), out, 2, 1, 12)
    assert out.tolist() == [1] * 12


CONTROL_FAULTS: dict[str, tuple[str, type[Finding], str]] = {
    "asked again": (persistent(GET_X, "@%p1 bra LOOP;" + CANCEL.format("")), BarrierError, "after no cluster was left"),
    "no wait": (persistent(GET_X, waits=False), RaceError, "clusterlaunchcontrol.try_cancel"),
    "no response": (
        persistent(GET_X).replace("mov.b128 %q0, {%d2, %d3}", "mov.b128 %q0, {%d2, %d2}"),
        DescriptorError,
        "no response",
    ),
    "alignment": (
        persistent(GET_X).replace("[smem], [smem+1024]", "[smem+8], [smem+1024]"),
        AlignmentError,
        "a multiple of 16",
    ),
}


@pytest.mark.parametrize("fault", CONTROL_FAULTS)
@pytest.mark.parametrize("schedule", ("earliest", "latest"))
def test_launch_control_faults(fault: str, schedule: str) -> None:
    text, error, words = CONTROL_FAULTS[fault]
    with pytest.raises(error, match=words):
        launch(text, np.zeros(2, np.uint32), 1, 1, 2, schedule=schedule)
