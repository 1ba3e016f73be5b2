"""What stands around the sm_100a backward, in the PTX emulator: transposes and delta, zeros, order of work, dq.

Plain CUDA, so compiled for sm_90a as well. Needs nvcc for the PTX, and no GPU. What the host decides is
called as it is.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests import test_sm100_backward_emulated as sm100_backward
from tests.ptx_emulator import Device, Options, load
from tests.ptx_emulator.compile import cache_folder, compile_cuda, nvcc
from tests.ptx_emulator.errors import EmulatorError
from tests.ptx_emulator.formats import decode, encode
from tests.ptx_emulator.launch import Module
from tests.ptx_emulator.mutants.drops import drops
from tests.test_sm90_backward_emulated import make_problem
from vsa_inductor.backends import sm100
from vsa_inductor.reference.attention import attention

CSRC = Path(__file__).resolve().parents[1] / "csrc"
BLOCK, D = 64, 128
THREADS = {"transpose": 256, "clear": 256, "order": 1024, "postprocess": 256}
ARCHITECTURES = ("sm_90a", "sm_100a")
STRICT = Options(strict=True, max_instructions=3_000_000)
KERNELS = """
#include <cstddef>
#include "sm100/accumulator_order.h"
#include "sm100/order.cuh"
#include "sm100/postprocess.cuh"
#include "sm100/prepare.cuh"
namespace vsa::sm100 {
template __global__ void transpose_kernel<128>(const __grid_constant__ TransposeParams);
template __global__ void clear_kernel<128>(const __grid_constant__ ClearParams, int, int64_t);
template __global__ void postprocess_kernel<AccumulatorOrder>(const __grid_constant__ PostprocessParams);
}
static_assert(offsetof(vsa::sm100::TransposeParams, dlse) == 96 && sizeof(vsa::sm100::TransposeParams) == 144 &&
              sizeof(vsa::sm100::ClearParams) == 48 && sizeof(vsa::sm100::OrderParams) == 40 &&
              sizeof(vsa::sm100::PostprocessParams) == 32, "the test packs the structs by hand");
// {headers}
"""

pytestmark = [
    pytest.mark.nvcc,
    pytest.mark.skipif(nvcc() is None, reason="nvcc: not found in $CUDA_HOME/bin nor on PATH"),
]


@functools.lru_cache
def compiled(architecture: str) -> Module:
    headers = hashlib.sha256()
    for path in sorted([*(CSRC / "sm100").glob("*.cuh"), *(CSRC / "sm100").glob("*.h"), CSRC / "checks.h"]):
        headers.update(path.read_bytes())
    source = KERNELS.replace("{headers}", headers.hexdigest())
    return load(compile_cuda(source, architecture, ("-lineinfo", "--expt-relaxed-constexpr", f"-I{CSRC}")))


def kernel_name(module: Module, stem: str) -> str:
    (name,) = (name for name in module.parsed.kernels if f"{stem}_kernel" in name)
    return name


def run(
    device: Device,
    stem: str,
    grid: int,
    args: list[bytes | int | np.integer],
    *,
    module: Module | None = None,
    shared: int = 0,
    options: Options = STRICT,
) -> int:
    """Launches a kernel; returns the warp instructions it took. A finding of the emulator raises."""
    module = module or compiled("sm_100a")
    report = device.launch(
        module, grid=(grid,), block=(THREADS[stem],), args=args, shared=shared, options=options,
        kernel=kernel_name(module, stem),
    )  # fmt: skip
    return report.instructions


def bf16(x: np.ndarray) -> np.ndarray:
    return decode(encode(x, "bf16"), "bf16").astype(np.float32)


# Transposes and delta


@dataclass
class Rows:
    """q, dout and out in bf16 values, and a gradient of lse or None."""

    B: int
    H: int
    N: int
    by_token: bool = False  # stand in memory as [B, S, H, D]
    with_dlse: bool = False

    def run(self, module: Module | None = None, options: Options = STRICT) -> int:
        rng = np.random.default_rng(self.B + 10 * self.N)
        shape = (self.B, self.H, self.N * BLOCK, D)
        q, dout, out = (bf16(rng.standard_normal(shape, dtype=np.float32)) for _ in range(3))
        device = Device(64 << 20)
        strides, addresses = [], []
        for x in (q, dout, out):
            # out is always the operator's own, contiguous.
            apart = self.by_token and x is not out
            kept = np.ascontiguousarray(x.transpose(0, 2, 1, 3)) if apart else x
            S, H = shape[2], shape[1]
            strides.append((S * H * D, D, H * D) if apart else (H * S * D, S * D, D))
            addresses.append(device.upload(encode(kept, "bf16")).address)
        dlse = rng.standard_normal(shape[:3], dtype=np.float32) if self.with_dlse else None
        transposed = [device.empty((self.H * D, self.B * shape[2]), np.uint16) for _ in range(2)]
        delta = device.empty(shape[:3], np.float32)
        params = struct.pack("<3Q", *addresses) + b"".join(struct.pack("<3q", *x) for x in strides)
        params += struct.pack("<Q", 0 if dlse is None else device.upload(dlse).address)
        params += struct.pack("<3Q", *(x.address for x in transposed), delta.address)
        params += struct.pack("<3i4x", self.B, self.H, self.N)
        count = run(device, "transpose", self.B * self.H * self.N, [params], module=module, options=options)
        for given, x in zip(transposed, (q, dout), strict=True):
            expected = x.transpose(1, 3, 0, 2).reshape(given.array.shape)
            np.testing.assert_array_equal(decode(given.array, "bf16"), expected)
        rows = (out.astype(np.float64) * dout).sum(-1)
        if dlse is not None:
            rows = rows - dlse.astype(np.float64) / np.log(2)
        np.testing.assert_allclose(delta.array, rows, atol=2e-5)
        return count


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(
    "rows",
    [Rows(1, 1, 1), Rows(2, 3, 3), Rows(2, 2, 2, by_token=True, with_dlse=True), Rows(1, 4, 5, by_token=True)],
    ids=str,
)
def test_transposes_and_delta(rows: Rows, architecture: str) -> None:
    rows.run(compiled(architecture))


# Zeros


def clear(lengths: np.ndarray, with_dq: bool = True, with_dkv: bool = True, n_q: int = 3) -> None:
    """``lengths`` [B, H, Nkv] of lists. What is not to be cleared keeps what it was."""
    B, H, n_kv = lengths.shape
    device = Device(64 << 20)
    rng = np.random.default_rng(1)
    before = rng.standard_normal((B, H, n_q * BLOCK, D), dtype=np.float32)
    accumulator = device.upload(before)
    kept = rng.integers(0, 1 << 16, (2, B, H, n_kv, BLOCK, D)).astype(np.uint16)
    dk, dv = (device.upload(x) for x in kept)
    offsets = np.concatenate([np.zeros((B, H, 1), np.int64), lengths.cumsum(-1)], -1).astype(np.int32)
    params = struct.pack(
        "<4Q4i", accumulator.address * with_dq, dk.address * with_dkv, dv.address * with_dkv,
        device.upload(offsets).address, B, H, n_q, n_kv,
    )  # fmt: skip
    vectors = before.size // 4 if with_dq else 0
    # Fewer than the launcher takes: a thread has several turns, the last a part of one.
    blocks = 3 if with_dq else 0
    grid = blocks + B * H * n_kv * with_dkv
    run(device, "clear", grid, [params, np.int32(blocks), np.int64(vectors)])
    assert not accumulator.array.any() if with_dq else (accumulator.array == before).all()
    cleared = lengths == 0 if with_dkv else np.zeros_like(lengths, bool)
    for given, was in zip((dk, dv), kept, strict=True):
        np.testing.assert_array_equal(given.array, np.where(cleared[..., None, None], 0, was))


@pytest.mark.parametrize("with_dq, with_dkv", [(True, True), (True, False), (False, True)])
def test_zeros_where_nothing_is_added_and_nobody_looks(with_dq: bool, with_dkv: bool) -> None:
    clear(np.array([[[0, 2, 0, 1], [1, 0, 0, 0]], [[3, 3, 3, 3], [0, 0, 0, 0]]]), with_dq, with_dkv)


# Order


def expected_order(lengths: np.ndarray, n_q: int, width: int, snake: bool) -> np.ndarray:
    """``lengths`` [rows, Nkv] -> items by place, as csrc/sm100/order.cuh says in words."""
    rows, n_kv = lengths.shape
    walk = list(range(n_kv))
    if snake:
        middle = n_kv // 2
        walk = [middle + (p + 1) // 2 * (1 if p % 2 == 0 else -1) for p in walk]
    order = []
    for row in range(rows):
        bins: dict[int, list[int]] = {}
        for block in walk:
            number = min((n_q - int(lengths[row, block])) // width, n_kv - 1, n_q // width)
            bins.setdefault(number, []).append(row * n_kv + block)
        for number in sorted(bins):
            order += bins[number][::-1] if snake and number % 2 else bins[number]
    return np.array(order, np.int32)


def order(
    lengths: np.ndarray, n_q: int, width: int, snake: bool, module: Module | None = None, options: Options = STRICT
) -> int:
    rows, n_kv = lengths.shape
    device = Device(64 << 20)
    offsets = np.concatenate([np.zeros((rows, 1), np.int64), lengths.cumsum(-1)], -1).astype(np.int32)
    out = device.empty((rows * n_kv,), np.int32)
    params = struct.pack("<2Q4i?7x", device.upload(offsets).address, out.address, rows, n_q, n_kv, width, snake)
    count = run(device, "order", rows, [params], module=module, shared=8 * n_kv, options=options)
    assert sorted(out.array) == list(range(rows * n_kv))
    np.testing.assert_array_equal(out.array, expected_order(lengths, n_q, width, snake))
    return count


def random_lengths(rows: int, n_kv: int, n_q: int) -> np.ndarray:
    return np.random.default_rng(n_kv).integers(0, n_q + 1, (rows, n_kv))


@pytest.mark.parametrize("snake", [False, True])
@pytest.mark.parametrize("n_kv", [1, 2, 5, 33, 1024, 1025])
def test_work_in_the_order_of_bins(n_kv: int, snake: bool) -> None:
    for width in (8, 12) if n_kv < 1024 else (12,):
        order(random_lengths(2, n_kv, n_kv), n_kv, width, snake)


@pytest.mark.parametrize("snake", [False, True])
def test_orders_of_odd_lists(snake: bool) -> None:
    order(np.full((1, 40), 0), 40, 8, snake)
    order(np.full((1, 40), 40), 40, 8, snake)
    order(random_lengths(3, 5, 1000), 1000, 8, snake)  # more bins than kv blocks
    order(random_lengths(2, 70, 2), 2, 8, snake)  # one bin


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_as_many_blocks_as_shared_memory_holds(architecture: str) -> None:
    """Words and indices still fit: the last ids, places beyond 2^14. Few bins, to be quick here."""
    most = sm100.MAX_ORDERED_BLOCKS
    lengths = random_lengths(1, most, 40)
    options = replace(STRICT, race=architecture == "sm_100a")
    order(lengths, 40, 12, True, compiled(architecture), options)


# Dq


def test_dq_out_of_the_accumulator() -> None:
    rows, n = 3, 2
    dq = np.random.default_rng(0).standard_normal((rows, n, BLOCK, D)).astype(np.float32) * 30
    # [token, column] seen as factors of the accumulator's axes in the contract's permutation.
    contract = sm100.CONTRACT.dq_order
    assert contract is not None
    factors = [contract.factors[axis] for axis in contract.permutation]
    inverse = np.argsort(contract.permutation)
    accumulator = dq.reshape(rows, n, *factors).transpose(0, 1, *(2 + inverse))
    device = Device(64 << 20)
    out = device.empty(dq.shape, np.uint16)
    given = device.upload(np.ascontiguousarray(accumulator))
    params = struct.pack("<2Q2if4x", given.address, out.address, rows, n, 0.125)
    for architecture in ARCHITECTURES:
        out.array[:] = 0
        run(device, "postprocess", rows * n, [params], module=compiled(architecture))
        np.testing.assert_array_equal(out.array, encode(dq * np.float32(0.125), "bf16"))


# Faults


def faulty_modules(stem: str) -> Iterator[tuple[str, Module]]:
    parsed = compiled("sm_100a").parsed
    name = kernel_name(compiled("sm_100a"), stem)
    kernel = parsed.kernels[name]
    for instruction in kernel.instructions:
        for mutation in drops(kernel, instruction):
            if mutation.kind == "drop block barrier":
                yield instruction.where(), Module(replace(parsed, kernels={name: mutation.apply(kernel)}))


@pytest.mark.parametrize("stem, barriers", [("transpose", 1), ("order", 4), ("postprocess", 1)])
def test_a_barrier_that_is_left_out_is_found(stem: str, barriers: int) -> None:
    faults = list(faulty_modules(stem))
    assert len(faults) >= barriers
    missed = []
    for fault, module in faults:
        try:
            if stem == "transpose":
                Rows(1, 1, 1).run(module)
            elif stem == "order":
                # More blocks than threads: a thread's words come from others.
                order(random_lengths(1, 1030, 40), 40, 8, True, module)
            else:
                device = Device(8 << 20)
                out = device.empty((BLOCK, D), np.uint16)
                given = device.upload(np.zeros((BLOCK, D), np.float32))
                params = struct.pack("<2Q2if4x", given.address, out.address, 1, 1, 0.125)
                run(device, stem, 1, [params], module=module)
        except (EmulatorError, AssertionError):
            continue
        missed.append(fault)
    assert not missed


# What the host decides

HOST = """
#include <cstring>
#include "sm100/order.h"
using namespace vsa::sm100;
extern "C" int plan(long kv_blocks, long tokens, long element, bool given, long ordered, long wave, int* out,
                    char* words) {
  try {
    const WorkPlan p = plan_work(kv_blocks, tokens, element, given, WorkThresholds{ordered, wave});
    out[0] = static_cast<int>(p.order), out[1] = p.waves, out[2] = p.bin_width, out[3] = p.snake;
    out[4] = static_cast<int>(order_bytes(p, 3, kv_blocks));
    return 1;
  } catch (const std::exception& error) {
    std::strncpy(words, error.what(), 500);
    return 0;
  }
}
extern "C" int most_blocks() { return kMaxOrderedBlocks; }
// DIGEST
"""


@functools.lru_cache
def host() -> ctypes.CDLL:
    text = (CSRC / "sm100" / "order.h").read_text() + (CSRC / "checks.h").read_text() + HOST
    target = cache_folder() / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.so"
    if not target.exists():
        source = target.with_suffix(".cpp")
        source.write_text(HOST)
        command = [str(nvcc()), "-std=c++17", "-shared", "-Xcompiler", "-fPIC", f"-I{CSRC}", str(source)]
        subprocess.run([*command, "-o", str(target)], check=True, capture_output=True, text=True)
    return ctypes.CDLL(str(target))


def plan(
    kv_blocks: int, tokens: int, element: int = 4, given: bool = False, ordered: int = 1024, wave: int = 1 << 20
) -> list[int] | str:
    """[order, waves, bin width, snake, bytes of three rows], or the words of the refusal."""
    out, words = (ctypes.c_int * 5)(), ctypes.create_string_buffer(512)
    longs = [ctypes.c_long(x) for x in (kv_blocks, tokens, element)]
    ok = host().plan(*longs, ctypes.c_bool(given), ctypes.c_long(ordered), ctypes.c_long(wave), out, words)
    return list(out) if ok else words.value.decode()


IDENTITY, DEVICE, EXPLICIT = 0, 1, 2


@pytest.mark.parametrize(
    "blocks, element, expected",
    [
        (1, 4, [IDENTITY, 0, 8, 0]),
        (1023, 4, [IDENTITY, 0, 8, 0]),
        (1024, 4, [DEVICE, 0, 8, 0]),
        (4095, 4, [DEVICE, 0, 8, 0]),
        (4096, 4, [DEVICE, 1, 12, 1]),
        (4096, 2, [DEVICE, 0, 8, 0]),
        (8192, 2, [DEVICE, 1, 12, 1]),
        (sm100.MAX_ORDERED_BLOCKS, 4, [DEVICE, 1, 12, 1]),
    ],
)
def test_the_plan_by_length(blocks: int, element: int, expected: list[int]) -> None:
    bytes_of_three = sm100.work_order_bytes(1, 3, blocks)
    assert plan(blocks, blocks * BLOCK, element) == [*expected, bytes_of_three]
    explicit = plan(blocks, blocks * BLOCK, element, given=True)
    assert explicit == [EXPLICIT, *expected[1:], 0], "a given order is always taken, and takes no scratch"


def test_one_block_past_the_limit_needs_an_order() -> None:
    most = host().most_blocks()
    assert most == sm100.MAX_ORDERED_BLOCKS
    told = plan(most + 1, (most + 1) * BLOCK)
    assert told == (
        f"k.shape[2]: got {most + 1} blocks of 64 tokens; allowed: at most {most}, or any number with work_order given"
    )
    assert plan(most + 1, (most + 1) * BLOCK, given=True) == [EXPLICIT, 1, 12, 1, 0]


def test_waves_without_an_order_are_refused() -> None:
    told = plan(8, 8 * BLOCK, ordered=1024, wave=1024)
    assert isinstance(told, str) and told.startswith("work_order: got the order of identity for a launch in waves")
    assert plan(8, 8 * BLOCK, ordered=8, wave=1024) == [DEVICE, 1, 12, 1, 96], "both thresholds lowered"
    assert plan(8, 8 * BLOCK, ordered=1024, wave=1024, given=True) == [EXPLICIT, 1, 12, 1, 0]


# All of it, as eager runs it


@pytest.mark.parametrize("snake", [False, True])
def test_the_whole_backward_of_eager(snake: bool) -> None:
    """transpose, clear, order, the main kernel and postprocess after each other, each reading what the others wrote."""
    lists = [[[[0, 2, 3], [1], [], [0, 1, 2, 3], [3]], [[2], [0, 3], [1, 2], [3], [0]]]] * 2
    p = make_problem(lists, [BLOCK, 17, BLOCK, 40])
    (B, H, S, _), n_kv = p.q.shape, 4
    n_q, rows = S // BLOCK, B * H
    out = torch.empty(p.q.shape)
    attention(
        p.q.float(), p.k.float(), p.v.float(), p.kv_indices, p.kv_num_blocks, p.kv_block_sizes, p.sm_scale, BLOCK, out,
        torch.empty(p.q.shape[:3]),
    )  # fmt: skip
    launch = sm100_backward.Launch(p)
    device = launch.device

    def upload(x: torch.Tensor) -> int:
        return device.upload(x.bfloat16().contiguous().view(torch.int16).numpy().view(np.uint16)).address

    transposed = [device.empty((H * D, B * S), np.uint16) for _ in range(2)]
    delta = device.empty((B, H, S), np.float32)
    dense = struct.pack("<3q", H * S * D, S * D, D)
    params = struct.pack("<3Q", upload(p.q), upload(p.dout), upload(out)) + 3 * dense
    params += struct.pack("<4Q", 0, *(x.address for x in transposed), delta.address)
    run(device, "transpose", rows * n_q, [params + struct.pack("<3i4x", B, H, n_q)])
    accumulator = device.empty((B, H, S, D), np.float32)
    params = struct.pack("<4Q4i", accumulator.address, 0, 0, 0, B, H, n_q, n_kv)
    run(device, "clear", 2, [params, np.int32(2), np.int64(accumulator.array.size // 4)])
    order_of_work = device.empty((rows * n_kv,), np.int32)
    params = struct.pack("<2Q4i?7x", launch.params.q_offsets, order_of_work.address, rows, n_q, n_kv, 1, snake)
    run(device, "order", rows, [params], shared=8 * n_kv)
    launch.dq = accumulator
    for name, buffer in (("order", order_of_work), ("dq_accum", accumulator), ("delta", delta)):
        setattr(launch.params, name, buffer.address)
    for name, buffer in zip(("q_transposed", "dout_transposed"), transposed, strict=True):
        made = device.tensor_map(buffer, element="bf16", dims=(B * S, H * D), box=(BLOCK, D), swizzle="128B")
        launch.maps[name] = made.bytes
    launch.run(sm100_backward.STATIC, 3)
    dq = device.empty((B, H, S, D), np.uint16)
    params = struct.pack("<2Q2if4x", accumulator.address, dq.address, rows, n_q, p.sm_scale)
    run(device, "postprocess", rows * n_q, [params])
    sm100_backward.assert_dkdv(launch)
    # NaN of dout in rows without a key reaches nothing.
    given = torch.from_numpy(decode(dq.array, "bf16").astype(np.float32))
    sm100_backward.assert_close("dq", given, p.dq)
