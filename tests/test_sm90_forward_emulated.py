"""The sm_90a forward kernels in the PTX emulator: right, free of races, and never past the end of a list.

Needs nvcc for the PTX, and no GPU. The problems are a few tiles each, chosen so that every path is taken.
"""

from __future__ import annotations

import functools
import hashlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from tests.ptx_emulator import Device, Options, load
from tests.ptx_emulator.compile import compile_cuda, nvcc
from tests.ptx_emulator.errors import EmulatorError
from tests.ptx_emulator.formats import decode, encode
from tests.ptx_emulator.launch import Module, Report
from tests.ptx_emulator.memory import Buffer
from tests.ptx_emulator.mutants.drops import drops

CSRC = Path(__file__).resolve().parents[1] / "csrc"
TILE = 64
SCALE_LOG2 = 0.18
STRICT = Options(strict=True, max_instructions=1_000_000)
KERNEL = """
#include <cstddef>
#include "sm90/fwd/config.cuh"
#include "sm90/fwd/kernel.cuh"
using Params = vsa::AttentionForwardParams;
using Traits = vsa::sm90::fwd::{traits};
static_assert(offsetof(Params, q) == 256 && offsetof(Params, out) == 288 && offsetof(Params, B) == 336 &&
              offsetof(Params, sm_scale_log2) == 360 && sizeof(Params) == 384, "the test packs the struct by hand");
template __global__ void vsa::sm90::fwd::attention_forward_kernel<Traits>(const __grid_constant__ Params);
__device__ int shared_bytes = sizeof(vsa::sm90::fwd::SharedStorage<Traits>);
// {headers}
"""

pytestmark = [
    pytest.mark.nvcc,
    pytest.mark.skipif(nvcc() is None, reason="nvcc: not found in $CUDA_HOME/bin nor on PATH"),
]


@dataclass(frozen=True)
class Variant:
    """Template arguments of the kernel. Rings of four tiles are short enough for small problems to go round them; none
    are those of the instantiation that is built."""

    element: str = "bf16"
    head_dim: int = 128
    sub_blocks: int = 1
    stages: int | None = 4

    @property
    def block(self) -> int:
        return TILE * self.sub_blocks

    # The kernel with a fault, in place of the compiled one.
    fault: Module | None = field(default=None, compare=False)

    def module(self) -> Module:
        return self.fault or compiled(self)


@functools.lru_cache
def compiled(v: Variant) -> Module:
    headers = hashlib.sha256()
    for path in sorted([*CSRC.rglob("*.cuh"), *CSRC.rglob("*.h")]):
        headers.update(path.read_bytes())
    element = {"bf16": "__nv_bfloat16", "f16": "__half"}[v.element]
    built = f"Chosen<{element}, {v.head_dim}, {v.block}>"
    short = f"ForwardTraits<{element}, {v.head_dim}, {v.sub_blocks}, {v.stages}, {v.stages}>"
    source = KERNEL.format(traits=built if v.stages is None else short, headers=headers.hexdigest())
    return load(compile_cuda(source, "sm_90a", ("-lineinfo", f"-I{CSRC}")))


@dataclass
class Problem:
    """Lists by (batch, head, q block), sizes of kv blocks; q, k, v are drawn by `fill`."""

    lists: list[list[list[list[int]]]]
    sizes: list[int]
    kv_heads: int = 0  # 0: as many as heads
    filler: int = -1  # what stands past the ends of the lists
    growth: float = 0.0  # keys of block j are multiplied by 1 + j * growth: later blocks move the maxima
    q: np.ndarray = field(init=False)
    k: np.ndarray = field(init=False)
    v: np.ndarray = field(init=False)

    def fill(self, v: Variant, seed: int = 0) -> None:
        """Values that the element holds exactly; NaN wherever there is no key."""
        rng = np.random.default_rng(seed)
        batch, heads, rows = len(self.lists), len(self.lists[0]), len(self.lists[0][0])
        self.kv_heads = self.kv_heads or heads

        def draw(h: int, blocks: int, growth: float = 0.0) -> np.ndarray:
            x = rng.standard_normal((batch, h, blocks, v.block, v.head_dim), dtype=np.float32)
            x *= 1 + np.arange(blocks, dtype=np.float32)[:, None, None] * growth
            x = x.reshape(batch, h, blocks * v.block, v.head_dim)
            return decode(encode(x, v.element), v.element).astype(np.float32)

        self.q, self.v = draw(heads, rows), draw(self.kv_heads, len(self.sizes))
        self.k = draw(self.kv_heads, len(self.sizes), self.growth)
        for block, size in enumerate(self.sizes):
            for x in (self.k, self.v):
                x[:, :, block * v.block + size : (block + 1) * v.block] = np.nan

    def reference(self, v: Variant) -> tuple[np.ndarray, np.ndarray]:
        """out and lse_log2 in double precision."""
        out = np.zeros(self.q.shape, np.float64)
        lse = np.full(self.q.shape[:3], -np.inf)
        group = self.q.shape[1] // self.kv_heads
        for b, h, r in np.ndindex(len(self.lists), len(self.lists[0]), len(self.lists[0][0])):
            keys = [j * v.block + t for j in self.lists[b][h][r] for t in range(self.sizes[j])]
            if not keys:
                continue
            here = slice(r * v.block, (r + 1) * v.block)
            scores = self.q[b, h, here].astype(np.float64) @ self.k[b, h // group, keys].T * SCALE_LOG2
            peak = scores.max(1, keepdims=True)
            weights = np.exp2(scores - peak)
            total = weights.sum(1, keepdims=True)
            out[b, h, here] = weights @ self.v[b, h // group, keys] / total
            lse[b, h, here] = (peak + np.log2(total))[:, 0]
        return out, lse


def launch(
    v: Variant, p: Problem, blocks: int = 1, with_lse: bool = True, options: Options = STRICT
) -> tuple[np.ndarray, np.ndarray | None, Report]:
    """Runs the kernel with `blocks` persistent blocks."""
    device = Device(64 << 20)
    batch, heads, length, _ = p.q.shape
    rows = length // v.block
    width = max(len(row) for b in p.lists for h in b for row in h) + 1
    indices = np.full((batch, heads, rows, width), p.filler, np.int32)
    counts = np.zeros((batch, heads, rows), np.int32)
    for at in np.ndindex(batch, heads, rows):
        row = p.lists[at[0]][at[1]][at[2]]
        indices[at][: len(row)] = row
        counts[at] = len(row)

    def upload(x: np.ndarray) -> Buffer:
        """[B, H, S, D] that stands in memory as [B, S, H, D], rows apart."""
        return device.upload(encode(np.ascontiguousarray(x.transpose(0, 2, 1, 3)), v.element))

    def operand(x: np.ndarray) -> bytes:
        b, h, s, d = x.shape
        buffer = upload(x)
        row_bytes = 2 * d
        return device.tensor_map(
            buffer,
            element=v.element,
            dims=(d, s, h, b),
            strides=(h * row_bytes, row_bytes, s * h * row_bytes),
            box=(64, 64, 1, 1),
            swizzle="128B",
        ).bytes

    out = device.empty(p.q.shape, np.uint16)
    lse = device.empty(p.q.shape[:3], np.float32) if with_lse else None
    lists = [device.upload(x).address for x in (indices, counts, np.array(p.sizes, np.int32))]
    params = operand(p.k) + operand(p.v)
    params += struct.pack("<4Q", upload(p.q).address, heads * length * v.head_dim, v.head_dim, heads * v.head_dim)
    params += struct.pack("<6Q", out.address, 0 if lse is None else lse.address, *lists, 0)
    params += struct.pack("<6if", batch, heads, p.kv_heads, rows, len(p.sizes), width, SCALE_LOG2)
    module = v.module()
    report = device.launch(
        module,
        grid=(blocks,),
        block=(384,),
        shared=int(device.variable(module, "shared_bytes", np.int32)[0]),
        args=[params.ljust(384, b"\0")],
        options=options,
    )
    return decode(out.array, v.element), None if lse is None else lse.array, report


def check(v: Variant, p: Problem, blocks: int = 1, with_lse: bool = True, options: Options = STRICT) -> Report:
    """Contract 2's bars against the reference; a finding of the emulator raises."""
    p.fill(v)
    out, lse, report = launch(v, p, blocks, with_lse, options)
    expected_out, expected_lse = p.reference(v)
    error = np.abs(out - expected_out)
    assert error.max() <= 1e-2 * np.abs(expected_out).max()
    assert error.mean() <= 1e-3
    if lse is not None:
        np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(expected_lse))
        finite = np.isfinite(expected_lse)
        np.testing.assert_allclose(lse[finite], expected_lse[finite], atol=1e-3)
    return report


def random_lists(rows: int, blocks: int, most: int, seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [sorted(rng.permutation(blocks)[: rng.integers(0, most + 1)].tolist()) for _ in range(rows)]


FULL = TILE
# Blocks that all rows of a group list, that one lists, that none lists; a row without a list; counts that differ.
MIXED = [[1, 3, 4], [0, 1, 4, 5], [], [4]]
SIZES = [FULL, 17, 0, FULL, 1, 63]


def test_tiles_are_copied_once_for_both_consumers() -> None:
    report = check(Variant(), Problem([[MIXED]], SIZES))
    # The groups' unions have 5 tiles and 1.
    assert report.bytes["TMA load global->shared"] == 2 * (5 + 1) * TILE * 128 * 2


@pytest.mark.parametrize("sub_blocks", [1, 2])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("element", ["bf16", "f16"])
def test_instantiations(element: str, head_dim: int, sub_blocks: int) -> None:
    v = Variant(element, head_dim, sub_blocks, stages=None)
    sizes = [v.block - 3, v.block, 5, v.block // 2, v.block, 0, 1]
    check(v, Problem([[[[0, 1, 2, 3, 4, 6], [5], [1, 2]]]], sizes), blocks=2)


def test_entries_past_the_count_are_not_read() -> None:
    """-1 would be read out of bounds, a valid id would show in the result."""
    for filler in (-1, 3):
        check(Variant(), Problem([[[[0, 2], [1]]]], [FULL, 9, FULL, FULL], filler=filler))


def test_batches_kv_heads_and_odd_groups() -> None:
    """Five rows are two whole groups and a consumer without a q tile; two query heads share a kv head; no lse."""
    lists = [[random_lists(5, 4, 3, 10 * b + h) for h in range(2)] for b in range(2)]
    check(Variant(), Problem(lists, [FULL, 30, FULL, 2], kv_heads=1), blocks=2, with_lse=False)


def test_lists_in_any_order() -> None:
    """Distinct ids need not ascend; empty tiles may stand first, and a list may consist of them."""
    lists = [[5, 2, 0, 4], [2, 5, 1, 0], [1], [3, 1]]
    check(Variant(), Problem([[lists]], [FULL, 0, FULL, 7, 64, FULL]))


def test_maxima_that_grow() -> None:
    """The accumulator is corrected in the middle of a list, not only at its start."""
    check(Variant(), Problem([[[list(range(7)), [0, 3, 6]]]], [FULL] * 7, growth=0.6))


@pytest.mark.parametrize("schedule", ["earliest", "random"])
def test_consumer_that_waits_for_a_late_tile(schedule: str) -> None:
    """One consumer wants a tile that is several rounds of the ring away and looks at its barriers all the while."""
    lists = [[0, 15], list(range(1, 16))]
    check(Variant(), Problem([[lists]], [FULL] * 16), options=replace(STRICT, schedule=schedule))


@pytest.mark.parametrize(
    "v",
    [Variant(), Variant(stages=None)],
    ids=["four-stages", "as-built"],
)
def test_many_windows(v: Variant) -> None:
    """Lists over several windows and items, sparse enough that consumers fall a ring apart."""
    check(v, Problem([[random_lists(7, 110, 9, 3)]], [FULL] * 110))


def test_items_of_every_shape_in_one_block() -> None:
    """Turns go on from item to item: whole, odd and empty ones, and a head's last with a single q tile."""
    lists = [[0, 1, 2, 3], [4, 5, 6, 7], [0], [], [], [], [2, 3, 5], [2, 3, 4, 5, 6], [1, 7]]
    check(Variant(head_dim=64), Problem([[lists, lists[::-1]]], [FULL, FULL, 5, FULL, FULL, FULL, FULL, 60]))


# A wait, a turn or a fence between proxies that is left out must be found, whatever the result then is.
FAULTS = ("drop mbarrier wait", "drop wgmma wait", "drop proxy fence", "drop block barrier")


def faults(v: Variant) -> Iterator[tuple[str, Variant]]:
    """(fault and where, the kernel with it)."""
    parsed = compiled(v).parsed
    (name,) = parsed.kernels
    kernel = parsed.kernels[name]
    for instruction in kernel.instructions:
        for mutation in drops(kernel, instruction):
            if mutation.kind in FAULTS:
                changed = Module(replace(parsed, kernels={name: mutation.apply(kernel)}))
                yield f"{mutation.kind}: {instruction.where()}", replace(v, fault=changed)


@pytest.mark.parametrize("part", range(3))
def test_single_faults_are_found(part: int) -> None:
    """Tiles of both consumers of an item: each turn that there is, and more records than are in flight."""
    v = Variant(head_dim=64)
    counts = [(1, 2), (1, 0), (2, 1), (1, 3), (0, 0), (0, 2), (2, 2), (0, 1), (1, 0), (4, 5), (3, 1)]
    lists = [list(range(i % 3, i % 3 + n)) for i, pair in enumerate(counts) for n in pair]
    problem = Problem([[lists]], [FULL, 40, FULL, 7, FULL, FULL, 1, FULL])
    limit = check(v, problem).instructions
    missed = []
    for fault, faulty in list(faults(v))[part::3]:
        try:
            check(faulty, problem, options=replace(STRICT, max_instructions=3 * limit))
        except (EmulatorError, AssertionError):
            continue
        missed.append(fault)
    assert not missed
