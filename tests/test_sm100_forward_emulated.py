"""The sm_100a forward kernels in the PTX emulator: right, free of races, and never past the end of a list.

Needs nvcc for the PTX, and no GPU: tcgen05 was not run on silicon. The problems are a few tiles each, chosen so that
every path is taken and the rings of tiles and rounds are gone round.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from tests.emulated_forward import FULL, MIXED, SIZES, TILE, Expected, Inputs, Problem, random_lists
from tests.ptx_emulator import Options, load
from tests.ptx_emulator.compile import compile_cuda, nvcc
from tests.ptx_emulator.errors import EmulatorError
from tests.ptx_emulator.launch import Module, Report
from tests.ptx_emulator.mutants.drops import drops

CSRC = Path(__file__).resolve().parents[1] / "csrc"
HEAD_DIM = 128
STRICT = Options(strict=True, max_instructions=1_000_000)
KERNEL = """
#include <cstddef>
#include "sm100/fwd/kernel.cuh"
using Params = vsa::sm100::ForwardParams;
using Traits = vsa::sm100::fwd::ForwardTraits<{traits}>;
static_assert(offsetof(Params, out) == 384 && offsetof(Params, B) == 424 && offsetof(Params, sm_scale_log2) == 448 &&
              sizeof(Params) == 512, "the test packs the struct by hand");
template __global__ void vsa::sm100::fwd::attention_forward_kernel<Traits>(const __grid_constant__ Params);
__device__ int shared_bytes = sizeof(vsa::sm100::fwd::SharedStorage<Traits>);
__device__ int threads = Traits::kThreads;
// {headers}
"""

pytestmark = [
    pytest.mark.nvcc,
    pytest.mark.skipif(nvcc() is None, reason="nvcc: not found in $CUDA_HOME/bin nor on PATH"),
]


@dataclass(frozen=True)
class Variant:
    """Template arguments of the kernel."""

    element: str = "bf16"
    block: int = 64
    architecture: str = "sm_100a"

    # The kernel with a fault, in place of the compiled one.
    fault: Module | None = field(default=None, compare=False)

    @property
    def head_dim(self) -> int:
        return HEAD_DIM

    def module(self) -> Module:
        return self.fault or compiled(self)


@functools.lru_cache
def compiled(v: Variant) -> Module:
    headers = hashlib.sha256()
    for path in sorted([*CSRC.rglob("*.cuh"), *CSRC.rglob("*.h")]):
        headers.update(path.read_bytes())
    element = {"bf16": "__nv_bfloat16", "f16": "__half"}[v.element]
    source = KERNEL.format(traits=f"{element}, {v.block}", headers=headers.hexdigest())
    return load(compile_cuda(source, v.architecture, ("-lineinfo", f"-I{CSRC}")))


def launch(
    v: Variant, p: Problem, blocks: int = 1, with_lse: bool = True, options: Options = STRICT
) -> tuple[np.ndarray, np.ndarray | None, Report]:
    """Runs the kernel with `blocks` persistent blocks."""
    inputs = Inputs(v, p, with_lse)
    params = inputs.operand(p.q) + inputs.operand(p.k) + inputs.operand(p.v) + inputs.rest
    module = v.module()
    report = inputs.device.launch(
        module,
        grid=(blocks,),
        block=(int(inputs.device.variable(module, "threads", np.int32)[0]),),
        shared=int(inputs.device.variable(module, "shared_bytes", np.int32)[0]),
        args=[params.ljust(512, b"\0")],
        options=options,
    )
    return *inputs.results(), report


def check(v: Variant, p: Problem, blocks: int = 1, with_lse: bool = True, options: Options = STRICT) -> Report:
    """Runs the kernel and compares; a finding of the emulator raises."""
    expected = Expected(v, p)
    out, lse, report = launch(v, p, blocks, with_lse, options)
    expected.compare(out, lse)
    return report


def test_tiles_are_copied_once_for_all_queries() -> None:
    report = check(Variant(), Problem([[MIXED]], SIZES))
    # Q, four blocks of it, and K and V of the five tiles of the union.
    assert report.bytes["TMA load global->shared"] == (4 + 2 * 5) * TILE * HEAD_DIM * 2


@pytest.mark.parametrize(
    "v",
    [Variant(), Variant(block=128), Variant("f16"), Variant("f16", 128), Variant(architecture="sm_103a")],
    ids=["bf16-64", "bf16-128", "f16-64", "f16-128", "sm_103a"],
)
def test_instantiations(v: Variant) -> None:
    """Three q blocks: a stack of two and one of one, or a stream without queries in the second item."""
    sizes = [v.block - 3, v.block, 5, v.block // 2, v.block, 0, 1]
    check(v, Problem([[[[0, 1, 2, 3, 4, 6], [5], [1, 2]]]], sizes), blocks=2)


@pytest.mark.parametrize("block", [64, 128])
def test_entries_past_the_count_are_not_read(block: int) -> None:
    """-1 would be read out of bounds, a valid id would show in the result."""
    for filler in (-1, 3):
        check(Variant(block=block), Problem([[[[0, 2], [1]]]], [block, 9, block, block], filler=filler))


@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("row", [[], [0], [1], [0, 1]], ids=str)
def test_one_q_block(block: int, row: list[int]) -> None:
    """N = 1; without a list, with one of a block without keys, with such a block first."""
    check(Variant(block=block), Problem([[[row]]], [0, 37]))


def test_batches_kv_heads_and_odd_groups() -> None:
    """Five rows are a whole group and one of a single q block; two query heads share a kv head; no lse."""
    lists = [[random_lists(5, 4, 3, 10 * b + h) for h in range(2)] for b in range(2)]
    check(Variant(), Problem(lists, [FULL, 30, FULL, 2], kv_heads=1), blocks=2, with_lse=False)


def test_lists_in_any_order() -> None:
    """Distinct ids need not ascend; empty tiles may stand first, and a list may consist of them."""
    lists = [[5, 2, 0, 4], [2, 5, 1, 0], [1], [3, 1]]
    check(Variant(), Problem([[lists]], [FULL, 0, FULL, 7, 64, FULL]))


@pytest.mark.parametrize("block", [64, 128])
def test_maxima_that_grow(block: int) -> None:
    """O is corrected in the middle of a list, not only at its start, and for one q block of a stack alone."""
    lists = [list(range(7)), [0, 3, 6], [5], [1, 2, 6]]
    check(Variant(block=block), Problem([[lists]], [block] * 7, growth=0.6))


def test_what_a_q_block_does_not_list_stays_away() -> None:
    """V of a tile that only the other q block of the stack lists may hold infinities and NaN."""
    problem, v = Problem([[[[0, 1], [0, 2], [], [2]]]], [FULL] * 3), Variant()
    problem.fill(v)
    problem.v[:, :, 2 * FULL :] = np.nan
    out, _, _ = launch(v, problem)
    expected, _ = problem.reference(v)
    for block in (0, 2):
        here = slice(block * FULL, (block + 1) * FULL)
        assert np.abs(out[:, :, here] - expected[:, :, here]).max() <= 1e-2 * np.abs(expected[:, :, here]).max()


@pytest.mark.parametrize("schedule", ["earliest", "latest", "random"])
def test_streams_that_are_far_apart(schedule: str) -> None:
    """One stream's tiles all precede the other's, but for two: more than wait for each other, so rounds of one tile."""
    lists = [[0, *range(2, 40), 43], [1, 2], [0, *range(40, 43)], []]
    check(Variant(), Problem([[lists]], [FULL] * 44), options=replace(STRICT, schedule=schedule))


def test_many_windows() -> None:
    """Lists over several windows and items, and waves of items over two blocks."""
    lists = [random_lists(9, 110, 9, 3), random_lists(9, 110, 40, 4)]
    check(Variant(), Problem([lists], [FULL, 63, *[FULL] * 108]), blocks=2)


def test_windows_of_larger_blocks() -> None:
    """A window of a list is 32 tiles: 16 blocks."""
    lists = [list(range(20)), list(range(1, 24, 2))]
    check(Variant(block=128), Problem([[lists]], [128, 65, 64, 63, *[128] * 20]))


@pytest.mark.parametrize("block", [64, 128])
def test_items_of_every_shape_in_one_block(block: int) -> None:
    """Whole, ragged and empty items in turn, and a head's last with a single q block."""
    lists = [[0, 1, 2, 3], [4, 5, 6, 7], [0], [], [], [], [], [], [2, 3, 5], [2, 3, 4, 5, 6], [1, 7], [], []]
    check(Variant(block=block), Problem([[lists, lists[::-1]]], [block, block, 5, block, 0, block, block, block - 4]))


# What is left out must be found, whatever the result then is. Kinds, and in how many parts each is tried.
FAULTS = {
    ("drop mbarrier wait",): 4,
    ("drop arrive", "drop expect", "drop commit"): 4,
    ("drop tcgen05 wait", "drop dealloc", "drop proxy fence", "drop block barrier"): 1,
    ("drop tcgen05 fence",): 1,
}
# How many of a kind are no faults here. Ahead of S = Q K^T, at four places: what Softmax did with S was fenced for when
# its P was multiplied, by the same thread. The ISA does not say that a wait for one's own products stands without one.
EQUIVALENT = {"drop tcgen05 fence": 4}


def faults(v: Variant, kinds: tuple[str, ...]) -> Iterator[tuple[str, Variant]]:
    """(fault and where, the kernel with it)."""
    parsed = compiled(v).parsed
    (name,) = parsed.kernels
    kernel = parsed.kernels[name]
    for instruction in kernel.instructions:
        for mutation in drops(kernel, instruction):
            if mutation.kind in kinds:
                changed = Module(replace(parsed, kernels={name: mutation.apply(kernel)}))
                yield f"{mutation.kind}: {instruction.where()}", replace(v, fault=changed)


# A run without a fault has 170 thousand.
FAULT_LIMIT = replace(STRICT, max_instructions=300_000)


@functools.lru_cache
def fault_problem() -> Expected:
    """Items of many shapes, enough rounds to go round every ring, maxima that grow, tiles of one q block and of all."""
    lists = [list(range(first, 12, 2)) for first in (0, 0, 1, 1)]
    counts = [(6, 6), (6, 6), (1, 2), (1, 0), (2, 1), (1, 3), (0, 0), (0, 0), (0, 2), (2, 2), (0, 1), (1, 0)]
    counts += [(0, 0), (2, 3), (0, 0), (4, 2), (3, 3), (0, 0)]
    lists += [list(range(i % 3, i % 3 + n)) for i, pair in enumerate(counts) for n in pair]
    sizes = [FULL, 40, FULL, 7, FULL, FULL, 1, FULL, FULL, 30, FULL, FULL]
    return Expected(Variant(), Problem([[lists]], sizes, growth=0.6))


def run_with_faults(v: Variant) -> Report:
    expected = fault_problem()
    out, lse, report = launch(v, expected.p, options=FAULT_LIMIT)
    expected.compare(out, lse)
    return report


def test_no_fault_is_found_where_there_is_none() -> None:
    run_with_faults(Variant())


@pytest.mark.parametrize(
    ("kinds", "part"),
    [(kinds, part) for kinds, parts in FAULTS.items() for part in range(parts)],
    ids=[
        f"{kinds[0].removeprefix('drop ').replace(' ', '-')}-{part}" for kinds, n in FAULTS.items() for part in range(n)
    ],
)
def test_single_faults_are_found(kinds: tuple[str, ...], part: int) -> None:
    missed = []
    for fault, faulty in list(faults(Variant(), kinds))[part :: FAULTS[kinds]]:
        try:
            run_with_faults(faulty)
        except (EmulatorError, AssertionError):
            continue
        missed.append(fault)
    assert len(missed) == sum(EQUIVALENT.get(kind, 0) for kind in kinds), "\n".join(missed)
