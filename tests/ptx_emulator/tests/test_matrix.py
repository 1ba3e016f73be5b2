"""ldmatrix, stmatrix, movmatrix: where elements go, alignment, bounds, races, whole warps. PTX ISA 9.7.14.5."""

from __future__ import annotations

import numpy as np
import pytest

from .. import Device, Options, load
from ..errors import AlignmentError, BoundsError, ConvergenceError, RaceError, UnknownInstructions

SHARED = 4096  # bytes; block of 32 or 128 threads


def names(count: int) -> str:
    return "{" + ", ".join(f"%r{20 + n}" for n in range(count)) + "}"


def text(body: str) -> str:
    """A kernel (in, offsets, out): %r1 = this thread's shared address, %d0, %d2 = &in[thread], &out[thread]."""
    return (
        ".version 9.0\n.target sm_120a\n.address_size 64\n"
        ".visible .entry k(.param .u64 pin, .param .u64 poff, .param .u64 pout) {\n"
        f".reg .b32 %r<60>; .reg .b64 %d<20>; .reg .pred %p<4>; .shared .align 128 .b8 mem[{SHARED}];\n"
        "mov.u32 %r0, %tid.x; mul.wide.u32 %d9, %r0, 4; setp.lt.u32 %p0, %r0, 7;\n"
        "ld.param.u64 %d0, [pin]; add.s64 %d0, %d0, %d9; ld.param.u64 %d1, [poff]; add.s64 %d1, %d1, %d9;\n"
        "ld.param.u64 %d2, [pout]; add.s64 %d2, %d2, %d9;\n"
        "ld.global.b32 %r1, [%d1]; mov.u32 %r2, mem; add.s32 %r1, %r1, %r2;\n"
        f"{body}\nret; }}\n"
    )


def fill(threads: int, barrier: str = "bar.sync 0;") -> str:
    """Copies `in` to shared memory."""
    lines = ["shl.b32 %r3, %r0, 2; add.s32 %r3, %r3, %r2;"]
    for at in range(0, SHARED, 4 * threads):
        lines.append(f"ld.global.b32 %r4, [%d0+{at}]; st.shared.b32 [%r3+{at}], %r4;")
    return "\n".join([*lines, barrier])


def drain(threads: int) -> str:
    """Copies shared memory to `out`."""
    lines = ["bar.sync 0;", "shl.b32 %r3, %r0, 2; add.s32 %r3, %r3, %r2;"]
    for at in range(0, SHARED, 4 * threads):
        lines.append(f"ld.shared.b32 %r4, [%r3+{at}]; st.global.b32 [%d2+{at}], %r4;")
    return "\n".join(lines)


def load_registers(count: int, threads: int) -> str:
    return "\n".join(f"ld.global.b32 %r{20 + n}, [%d0+{4 * n * threads}];" for n in range(count))


def store_registers(count: int, threads: int) -> str:
    return "\n".join(f"st.global.b32 [%d2+{4 * n * threads}], %r{20 + n};" for n in range(count))


def execute(
    body: str, data: np.ndarray, offsets: np.ndarray, words: int, threads: int, options: Options | None = None
) -> np.ndarray:
    """uint32 [words, threads] that the kernel stored."""
    device = Device()
    out = device.empty((words, threads), np.uint32)
    args = [device.upload(data), device.upload(offsets.astype(np.uint32)), out]
    device.launch(load(text(body)), block=(threads,), args=args, options=options)
    return out.array


def row_offsets(count: int, threads: int, seed: int = 1) -> np.ndarray:
    """A different row of 16 bytes for each lane; lanes whose address is not looked at get one that would be refused."""
    rows = np.random.default_rng(seed).permutation(SHARED // 16)[:threads] * 16
    return np.where(np.arange(threads) % 32 < 8 * count, rows, 999_999)


@pytest.mark.parametrize("threads", [32, 128])
@pytest.mark.parametrize("trans", ["", ".trans"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ldmatrix(count: int, trans: str, threads: int) -> None:
    data = np.random.default_rng(0).integers(0, 1 << 16, SHARED // 2).astype(np.uint16)
    offsets = row_offsets(count, threads)
    load_it = f"ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {names(count)}, [%r1];"
    body = "\n".join([fill(threads), load_it, store_registers(count, threads)])
    got = execute(body, data, offsets, count, threads).view(np.uint16).reshape(count, threads, 2)
    for thread in range(threads):
        base = thread // 32 * 32
        for j in range(count):
            for s in range(2):
                row, column = thread % 32 // 4, 2 * (thread % 4) + s
                if trans:
                    row, column = column, row
                assert got[j, thread, s] == data[offsets[base + 8 * j + row] // 2 + column]


@pytest.mark.parametrize("trans", ["", ".trans"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_stmatrix_is_the_inverse(count: int, trans: str) -> None:
    threads = 128
    data = np.random.default_rng(0).integers(0, 1 << 32, (SHARED // 4)).astype(np.uint32)
    offsets = row_offsets(count, threads)
    body = "\n".join(
        [
            load_registers(count, threads),
            f"stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 [%r1], {names(count)};",
            "bar.warp.sync 0xffffffff;",
            f"ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {names(count)}, [%r1];",
            store_registers(count, threads),
        ]
    )
    got = execute(body, data, offsets, count, threads)
    np.testing.assert_array_equal(got, data[: count * threads].reshape(count, threads))


@pytest.mark.parametrize("count", [1, 2, 4])
def test_stmatrix_of_bytes(count: int) -> None:
    threads = 32
    data = np.random.default_rng(0).integers(0, 1 << 32, SHARED // 4).astype(np.uint32)
    offsets = row_offsets(count, threads)
    store = f"stmatrix.sync.aligned.m16n8.x{count}.trans.shared.b8 [%r1], {names(count)};"
    zero = "\n".join(f"st.shared.b32 [%r3+{at}], 0;" for at in range(0, SHARED, 4 * threads))
    body = "\n".join(
        [
            load_registers(count, threads),
            "shl.b32 %r3, %r0, 2; add.s32 %r3, %r3, %r2;",
            zero,
            "bar.sync 0;",
            store,
            drain(threads),
        ]
    )
    got = execute(body, data, offsets, SHARED // 4 // threads, threads).reshape(-1).view(np.uint8)
    registers = data[: count * threads].reshape(count, threads).view(np.uint8).reshape(count, threads, 4)
    for j in range(count):
        for thread in range(threads):
            for s in range(4):
                row, column = thread // 4 + 8 * (s // 2), 2 * (thread % 4) + s % 2
                assert got[offsets[8 * j + column] + row] == registers[j, thread, s]


@pytest.mark.parametrize(("form", "bits"), [("b4x16_p64", 4), ("b6x16_p32", 6)])
def test_ldmatrix_unpacks_narrow_elements(form: str, bits: int) -> None:
    data = np.random.default_rng(0).integers(0, 256, SHARED).astype(np.uint8)
    offsets = row_offsets(2, 32)
    load_it = f"ldmatrix.sync.aligned.m8n16.x2.shared.b8x16.{form} {names(2)}, [%r1];"
    body = "\n".join([fill(32), load_it, store_registers(2, 32)])
    got = execute(body, data, offsets, 2, 32).view(np.uint8).reshape(2, 32, 4)
    for j in range(2):
        for thread in range(32):
            start = offsets[8 * j + thread // 4]
            row = int.from_bytes(data[start : start + 16].tobytes(), "little")
            for s in range(4):
                element = 4 * (thread % 4) + s
                assert got[j, thread, s] == row >> bits * element & ((1 << bits) - 1)


def test_movmatrix_transposes() -> None:
    data = np.random.default_rng(0).integers(0, 1 << 32, SHARED // 4).astype(np.uint32)
    move = "movmatrix.sync.aligned.m8n8.trans.b16 %r21, %r20; mov.b32 %r20, %r21;"
    body = "\n".join([load_registers(1, 128), move, store_registers(1, 128)])
    got = execute(body, data, np.zeros(128), 1, 128)
    before = data[:128].view(np.uint16).reshape(4, 8, 8)
    np.testing.assert_array_equal(got.view(np.uint16).reshape(4, 8, 8), before.transpose(0, 2, 1))


def test_generic_address() -> None:
    data = np.arange(SHARED // 4, dtype=np.uint32)
    body = "\n".join(
        [
            fill(32),
            "cvt.u64.u32 %d5, %r1; cvta.shared.u64 %d5, %d5;",
            f"ldmatrix.sync.aligned.m8n8.x4.b16 {names(4)}, [%d5+16];",
            store_registers(4, 32),
        ]
    )
    got = execute(body, data, np.arange(32) * 16, 4, 32)
    np.testing.assert_array_equal(got.reshape(-1), data[4:132])


# Findings -------------------------------------------------------------------------------------------------------------
def _load_x4(offsets: np.ndarray, barrier: str = "bar.sync 0;", guard: str = "", threads: int = 32) -> None:
    load_it = f"{guard} ldmatrix.sync.aligned.m8n8.x4.shared.b16 {names(4)}, [%r1];"
    zero = "\n".join(f"mov.b32 %r{20 + n}, 0;" for n in range(4))
    body = "\n".join([fill(threads, barrier), zero, load_it, store_registers(4, threads)])
    execute(body, np.zeros(SHARED // 4, np.uint32), offsets, 4, threads)


def test_misaligned_row() -> None:
    with pytest.raises(AlignmentError, match="multiple of 16"):
        _load_x4(np.arange(32) * 16 + 8 * (np.arange(32) == 5))


def test_row_outside_shared_memory() -> None:
    with pytest.raises(BoundsError, match="ldmatrix"):
        _load_x4(np.arange(32) * 16 + SHARED * (np.arange(32) == 5))


def test_part_of_a_warp() -> None:
    with pytest.raises(ConvergenceError, match="7 of 32 threads"):
        _load_x4(np.arange(32) * 16, guard="@%p0")


def test_rows_of_another_warp_need_a_barrier() -> None:
    _load_x4(np.arange(128) * 16, threads=128)
    with pytest.raises(RaceError, match="ldmatrix"):
        _load_x4(np.arange(128) * 16, threads=128, barrier="bar.warp.sync 0xffffffff;")


def test_rows_of_other_lanes_need_a_barrier() -> None:
    _load_x4(np.arange(32) * 16, barrier="bar.warp.sync 0xffffffff;")
    with pytest.raises(RaceError, match="ldmatrix"):
        _load_x4(np.arange(32) * 16, barrier="")


@pytest.mark.parametrize(
    ("instruction", "why"),
    [
        (f"ldmatrix.sync.aligned.m16n16.x1.trans.shared.b8 {names(2)}, [%r1];", "m16n16"),
        (f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {names(2)}, [%r1];", "needs 4"),
        (f"stmatrix.sync.aligned.m16n8.x1.shared.b8 [%r1], {names(1)};", "trans"),
        (f"ldmatrix.sync.aligned.m8n8.x1.global.b16 {names(1)}, [%r1];", "global"),
    ],
)
def test_refused(instruction: str, why: str) -> None:
    with pytest.raises(UnknownInstructions, match=why):
        load(text(instruction))
