"""Allocation, commit, waits and fences of tcgen05: what they demand, and the races that a missing one leaves."""

from __future__ import annotations

import re

import numpy as np
import pytest

from .. import Device, Options, Report, load
from ..errors import (
    BarrierError,
    DeadlockError,
    ProxyError,
    RaceError,
    TcgenFenceError,
    TensorMemoryError,
)
from .tcgen05_kernels import LANES, frame, run_frame
from .test_tcgen05_mma import Case

LD = "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%v0}, [%quarter];"
MMA = "tcgen05.mma.cta_group::1.kind::f16 [%d], %ad, %bd, %id, %onto;"


def without(text: str, *parts: str) -> str:
    """The text less the lines that contain one of these; every part must hit."""
    for part in parts:
        assert part in text, part
    return "\n".join(line for line in text.splitlines() if not any(part in line for part in parts))


def run(text: str, case: Case | None = None, options: Options | None = None) -> tuple[np.ndarray, Report]:
    case = case or Case(128, 32)
    image, a, b = case.images()
    return run_frame(text, case.init, image, (a, b, case.descriptor), options=options)


# Races ----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("options", [Options(), Options(strict=True), Options(schedule="latest")])
def test_dropped_waits_are_races(options: Options) -> None:
    """Each text lacks one wait; the same finding in every mode and schedule."""
    whole = Case(128, 32).text()
    run(whole, options=options)
    for parts, says in (
        (("@!%p2 bra issued", "mbarrier.try_wait"), r"a read by tcgen05\.ld(.|\n)*before: a write by tcgen05\.mma"),
        (("tcgen05.wait::st",), r"a write by tcgen05\.mma(.|\n)*before: a write by tcgen05\.st"),
        (("tcgen05.commit", "@!%p2 bra issued", "mbarrier.try_wait"), r"before: a write by tcgen05\.mma"),
    ):
        with pytest.raises(RaceError, match=says):
            run(without(whole, *parts), options=options)


def test_product_over_cells_that_are_being_read() -> None:
    """ld -> mma in another thread: wait::ld, a barrier, and the fences (9.7.16.6.4.4)."""
    after = (
        "WAIT tcgen05.fence::before_thread_sync; bar.sync 0; tcgen05.fence::after_thread_sync;"
        f"@!%lead bra skip; {MMA}"
        "add.u32 %bar, %bar, 8; mbarrier.init.shared::cta.b64 [%bar], 1;"
        "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%bar];"
        "again: mbarrier.try_wait.parity.shared::cta.b64 %p3, [%bar], 0; @!%p3 bra again;"
        "skip: tcgen05.wait::ld.sync.aligned; tcgen05.fence::before_thread_sync; bar.sync 0;"
        "tcgen05.fence::after_thread_sync;"
    )
    good = frame("", f"{LD} {after.replace('WAIT', 'tcgen05.wait::ld.sync.aligned;')}", columns=32)
    case = Case(128, 32)
    out, report = run(good, case)
    assert (out == case.expected(case.a @ case.b.T)).all()
    assert not report.lints
    with pytest.raises(RaceError, match=r"a write by tcgen05\.mma(.|\n)*before: a read by tcgen05\.ld"):
        run(frame("", f"{LD} {after.replace('WAIT', '')}", columns=32))


def test_store_then_load_needs_a_wait() -> None:
    store = "tcgen05.st.sync.aligned.32x32b.x1.b32 [%quarter], {%v1};"
    wait = "tcgen05.wait::st.sync.aligned;"
    load_it = f"{LD} tcgen05.wait::ld.sync.aligned;"
    run(frame("", f"mov.b32 %v1, 1; {store} {wait} {load_it}", columns=32))
    with pytest.raises(RaceError, match=r"a read by tcgen05\.ld(.|\n)*before: a write by tcgen05\.st"):
        run(frame("", f"mov.b32 %v1, 1; {store} {load_it} {wait}", columns=32))


def test_deallocation_while_in_use() -> None:
    text = without(Case(128, 32).text(), "@!%p2 bra issued", "mbarrier.try_wait", "tcgen05.ld", "st.global")
    with pytest.raises(RaceError, match=r"now:    a write by tcgen05\.dealloc(.|\n)*before: a write by tcgen05\.mma"):
        run(text)


def test_shared_memory_of_a_product() -> None:
    """Operands written without a proxy fence, or overwritten before the product is known to be done."""
    text = Case(128, 32).text()
    with pytest.raises(ProxyError, match=r"fence\.proxy\.async"):
        run(without(text, "fence.proxy.async"))
    early = text.replace("issued:", "issued: st.shared.b32 [%at+1024], %me;", 1)
    with pytest.raises(RaceError, match=r"a write by warp 0(.|\n)*before: a read by tcgen05\.mma"):
        run(early)


def test_products_of_two_threads() -> None:
    """The pipeline orders them only where the second issuer knows that the first has issued."""
    second = "setp.eq.u32 %p4, %me, 32; @!%p4 bra no; " + MMA.replace("%onto", "%p4") + "no:"
    first = f"@!%first bra skip; {MMA} skip:"
    wait = "tcgen05.fence::before_thread_sync; bar.sync 0; tcgen05.fence::after_thread_sync;"
    # The frame ends with a wait for one commit; both threads commit to a barrier that counts two.
    commit = "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%bar];"
    init = "@%first mbarrier.init.shared::cta.b64 [%bar], 1;"
    for between, good in ((wait, True), ("", False)):
        middle = first.replace("skip:", f"{commit} skip:") + between + second.replace("no:", f"{commit} no:")
        text = frame("", columns=32).replace(init, init.replace("], 1", "], 2"))
        begin = text.index("@!%lead bra issued;")
        text = text[:begin] + middle + text[text.index("issued:") :]
        case = Case(128, 32)
        if good:
            out, report = run(text, case)
            assert (out == case.expected(2 * (case.a @ case.b.T))).all()
            assert not report.lints
        else:
            with pytest.raises(RaceError, match=r"a write by tcgen05\.mma(.|\n)*before: a write by tcgen05\.mma"):
                run(text, case)


def test_commit_covers_the_own_thread_only() -> None:
    """Another thread's commit says nothing about the product."""
    text = Case(128, 32).text()
    commit = next(line for line in text.splitlines() if "tcgen05.commit" in line).strip()
    moved = without(text, "tcgen05.commit").replace("@!%lead bra issued", "@!%lead bra more")
    moved = moved.replace("issued:", f"more: setp.eq.u32 %p4, %me, 64; @%p4 {commit} issued:", 1)
    with pytest.raises(RaceError, match=r"before: a write by tcgen05\.mma"):
        run(moved)


# Fences ---------------------------------------------------------------------------------------------------------------
def test_fences_are_demanded_in_strict_mode() -> None:
    """Triton emits none, so they are a lint by default; a commit is a fence::before of its own."""
    text = Case(128, 32).text()
    lines = [k for k, line in enumerate(text.splitlines()) if "tcgen05.fence::after" in line]
    for k in lines:
        kept = "\n".join(line for n, line in enumerate(text.splitlines()) if n != k)
        with pytest.raises(TcgenFenceError, match="after_thread_sync here"):
            run(kept)
        _, report = run(kept, options=Options())
        assert any("ordered by a barrier alone" in str(lint) for lint in report.lints)
    first = text.replace("tcgen05.fence::before_thread_sync;", "", 1)
    with pytest.raises(TcgenFenceError, match="before_thread_sync"):
        run(first)


def test_a_relaxed_wait_orders_through_the_fence_after_it() -> None:
    """The ISA's own pattern: the fence, not the wait, orders what tcgen05 did."""
    text = Case(128, 32).text()
    relaxed = text.replace("mbarrier.try_wait.parity.shared::cta", "mbarrier.try_wait.parity.relaxed.cta.shared::cta")
    run(relaxed)
    head, _, tail = relaxed.rpartition("tcgen05.fence::after_thread_sync;")
    with pytest.raises(RaceError, match=r"before: a write by tcgen05\.mma"):
        run(head + tail)


# Commit ---------------------------------------------------------------------------------------------------------------
def test_commit_to_no_barrier() -> None:
    text = Case(128, 32).text()
    with pytest.raises(BarrierError, match="not initialised"):
        run(text.replace("shared::cluster.b64 [%bar]", "shared::cluster.b64 [%bar+8]"))


def test_multicast_commit_beyond_the_cluster() -> None:
    text = Case(256, 32, group=2).text()
    with pytest.raises(BarrierError, match=r"ranks 0x7; the cluster has 0..1"):
        run(text.replace("mov.b16 %m, 3", "mov.b16 %m, 7"), Case(256, 32, group=2))


def test_commit_reaches_both_blocks_of_a_pair() -> None:
    """With a mask of the even block alone the odd one waits for ever."""
    case = Case(256, 32, group=2)
    with pytest.raises(DeadlockError, match=r"block \(1, 0, 0\).*mbarrier"):
        run(case.text().replace("mov.b16 %m, 3", "mov.b16 %m, 1"), case)


# Allocation -----------------------------------------------------------------------------------------------------------
ALLOC = "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [{}], {};"
DEALLOC = "tcgen05.dealloc.cta_group::1.sync.aligned.b32 {}, {};"
GIVE_UP = "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;"


def small(body: str, blocks: int = 1, warps: int = 1, options: Options | None = None) -> tuple[np.ndarray, Report]:
    """Runs a body that has %at (shared memory), %w (the warp), %r<8> and %out; returns 8 words and the report."""
    text = f"""
.version 9.0
.target sm_100a
.address_size 64
.extern .shared .align 16 .b8 smem[];
.visible .entry small(.param .u64 out)
{{
  .reg .b32 %at; .reg .b32 %w; .reg .b32 %r<8>; .reg .b64 %out; .reg .pred %p<4>;
  mov.u32 %at, smem;
  mov.u32 %w, %tid.x;
  shr.u32 %w, %w, 5;
  setp.eq.u32 %p0, %w, 0;
  ld.param.u64 %out, [out];
  {body}
  ret;
}}
"""
    device = Device()
    out = device.empty(8, np.uint32)
    report = device.launch(
        load(text),
        grid=(blocks, 1, 1),
        block=(32 * warps, 1, 1),
        cluster=(blocks, 1, 1),
        shared=64,
        args=[out],
        options=options or Options(strict=True),
    )
    return out.array, report


def keep(n: int) -> str:
    """The words at %at, %at+4, ... into %r0, %r1, ..., and by thread 0 to out."""
    lines = "".join(f"ld.shared.b32 %r{k}, [%at+{4 * k}]; @%p3 st.global.b32 [%out+{4 * k}], %r{k};" for k in range(n))
    return f"mov.u32 %r7, %tid.x; setp.eq.u32 %p3, %r7, 0; {lines}"


def test_allocations_take_the_first_free_columns() -> None:
    body = "".join(ALLOC.format(f"%at+{4 * k}", n) for k, n in enumerate((128, 64, 64))) + keep(3)
    body += DEALLOC.format("%r1", 64) + ALLOC.format("%at+12", 32) + keep(4) + GIVE_UP
    body += "".join(DEALLOC.format(f"%r{k}", n) for k, n in ((0, 128), (2, 64), (3, 32)))
    out, report = small(body)
    assert out[:4].tolist() == [0, 128, 192, 128]
    assert report.peak_tensor_columns == 256


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (ALLOC.format("%at", 48), "48 columns; a power of two from 32 to 512"),
        (ALLOC.format("%at", 1024), "1024 columns"),
        (ALLOC.format("%at", 32) + ALLOC.format("%at+4", 64), "64 columns after an allocation of 32"),
        (GIVE_UP + ALLOC.format("%at", 32), r"gave up its permit before(.|\n)*relinquish"),
        (ALLOC.format("%at", 32) + DEALLOC.format("32", 32), r"columns 32..63 are no allocation; allocated: 0..31"),
        (ALLOC.format("%at", 64) + DEALLOC.format("0", 32), "columns 0..31 are no allocation"),
        (ALLOC.format("%at", 64) + DEALLOC.format("65536", 64), "lane 1"),
        (DEALLOC.format("0", 32), "nothing is allocated"),
        (ALLOC.format("%at", 32) + 2 * DEALLOC.format("0", 32), "nothing is allocated"),
        (ALLOC.replace("::1", "::2").format("%at", 32), "no peer"),
        (ALLOC.format("%at", 32) + GIVE_UP.replace("::1", "::2"), "are mixed"),
        ("tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r0}, [%r1];", "nothing is allocated"),
    ],
)
def test_rules_of_allocation(body: str, says: str) -> None:
    with pytest.raises(TensorMemoryError, match=says):
        small(body)


def test_allocation_waits_until_columns_are_free() -> None:
    """Warp 1 asks for all columns while warp 0 has some; it gets them when those are given back."""
    body = (
        f"@%p0 {ALLOC.format('%at', 512)} bar.sync 0; @%p0 bra zero; {ALLOC.format('%at+4', 512)}"
        f"ld.shared.b32 %r1, [%at+4]; {DEALLOC.format('%r1', 512)} bra end;"
        f"zero: {DEALLOC.format('0', 512)} end:"
    )
    for schedule in ("earliest", "random"):
        _, report = small(body, warps=2, options=Options(schedule=schedule, strict=True))
        assert report.peak_tensor_columns == 512
    with pytest.raises(DeadlockError, match=r"tcgen05\.alloc of 512 columns: allocated: 0\.\.511"):
        small(without_dealloc(body), warps=2)


def without_dealloc(body: str) -> str:
    return re.sub(r"zero: [^;]*;", "zero:", body)


def test_columns_that_nobody_gives_back_are_reported() -> None:
    _, report = small(ALLOC.format("%at", 32), options=Options())
    assert any("32 tensor memory columns not given back" in str(lint) for lint in report.lints)


def test_pairs_allocate_together() -> None:
    pair = ALLOC.replace("::1", "::2").format("%at", 64)
    free = DEALLOC.replace("::1", "::2").format("0", 64)
    _, report = small(pair + free, blocks=2)
    assert report.peak_tensor_columns == 64
    rank = "mov.u32 %r7, %cluster_ctarank; setp.eq.u32 %p1, %r7, 0;"
    with pytest.raises(DeadlockError, match="the peer block has not come"):
        small(
            f"{rank} @!%p1 bra end; {pair} end: barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;", blocks=2
        )
    other = pair.replace("64", "32")
    with pytest.raises(TensorMemoryError, match=r"columns here, .* in the peer block"):
        small(f"{rank} @%p1 bra even; {other} bra end; even: {pair} end:", blocks=2)


def test_address_is_an_ordinary_store() -> None:
    """Another warp may read it after a barrier only."""
    body = f"@%p0 {ALLOC.format('%at', 32)} SYNC ld.shared.b32 %r0, [%at]; bar.sync 0; @%p0 {DEALLOC.format('%r0', 32)}"
    small(body.replace("SYNC", "bar.sync 0;"), warps=2)
    with pytest.raises(RaceError, match=r"a read by warp 1(.|\n)*tcgen05\.alloc"):
        small(body.replace("SYNC", ""), warps=2)


def test_frames_have_four_quarters() -> None:
    """Two warps that share a quarter (0 and 4) are races to each other like any other threads."""
    assert LANES == 128
    body = (
        f"@%p0 {ALLOC.format('%at', 32)} bar.sync 0; ld.shared.b32 %r0, [%at]; mov.b32 %r1, 7;"
        "setp.eq.u32 %p1, %w, 4; @%p0 bra st; @!%p1 bra end;"
        "st: tcgen05.st.sync.aligned.32x32b.x1.b32 [%r0], {%r1}; tcgen05.wait::st.sync.aligned;"
        f"end: bar.sync 0; @%p0 {DEALLOC.format('%r0', 32)}"
    )
    with pytest.raises(RaceError, match=r"a write by tcgen05\.st(.|\n)*before: a write by tcgen05\.st"):
        small(body, warps=5)
