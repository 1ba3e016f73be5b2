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

from tests.emulated_forward import FULL, MIXED, SIZES, TILE, Expected, Inputs, Problem, random_lists
from tests.ptx_emulator import Options, load
from tests.ptx_emulator.compile import compile_cuda, nvcc
from tests.ptx_emulator.errors import EmulatorError
from tests.ptx_emulator.launch import Module, Report
from tests.ptx_emulator.mutants.drops import drops

CSRC = Path(__file__).resolve().parents[1] / "csrc"
STRICT = Options(strict=True, max_instructions=1_000_000)
KERNEL = """
#include <cstddef>
#include "sm90/fwd/config.cuh"
#include "sm90/fwd/kernel.cuh"
using Params = vsa::AttentionForwardParams;
using Traits = vsa::sm90::fwd::{traits};
static_assert(offsetof(Params, q) == 256 && offsetof(Params, out) == 288 && offsetof(Params, B) == 328 &&
              offsetof(Params, sm_scale_log2) == 352 && sizeof(Params) == 384, "the test packs the struct by hand");
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


def launch(
    v: Variant, p: Problem, blocks: int = 1, with_lse: bool = True, options: Options = STRICT
) -> tuple[np.ndarray, np.ndarray | None, Report]:
    """Runs the kernel with `blocks` persistent blocks."""
    inputs = Inputs(v, p, with_lse)
    _, heads, length, _ = p.q.shape
    params = inputs.operand(p.k) + inputs.operand(p.v) + struct.pack("<Q", inputs.upload(p.q).address)
    params += struct.pack("<3q", heads * length * v.head_dim, v.head_dim, heads * v.head_dim) + inputs.rest
    module = v.module()
    report = inputs.device.launch(
        module,
        grid=(blocks,),
        block=(384,),
        shared=int(inputs.device.variable(module, "shared_bytes", np.int32)[0]),
        args=[params.ljust(384, b"\0")],
        options=options,
    )
    return *inputs.results(), report


def check(v: Variant, p: Problem, blocks: int = 1, with_lse: bool = True, options: Options = STRICT) -> Report:
    """Runs the kernel and compares; a finding of the emulator raises."""
    expected = Expected(v, p)
    out, lse, report = launch(v, p, blocks, with_lse, options)
    expected.compare(out, lse)
    return report


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
