"""The sm_100a backward kernels in the PTX emulator: right, free of races, and never past the end of a list.

Emulated, not yet run on silicon. Needs nvcc for the PTX, and no GPU. The meaning is that of `vsa_inductor/reference`,
in fp32; problems are a few blocks.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.ptx_emulator import Device, Options, load
from tests.ptx_emulator.compile import compile_cuda, nvcc
from tests.ptx_emulator.errors import EmulatorError
from tests.ptx_emulator.ir import Instruction
from tests.ptx_emulator.launch import Module, Report
from tests.ptx_emulator.memory import Buffer
from tests.ptx_emulator.mutants.drops import drops, wrong_phases
from tests.test_sm90_backward_emulated import Problem, assert_close, make_problem, random_lists
from vsa_inductor.reference.transpose_blocks import transpose_blocks

CSRC = Path(__file__).resolve().parents[1] / "csrc"
ROOMS = ("", "common", "ptx", "sm100/bwd")
BLOCK, DIM = 64, 128
LOG2_E = math.log2(math.e)
KERNELS = """
#include <cstddef>
#include "sm100/bwd/dq_kernel.cuh"
#include "sm100/bwd/kernel.cuh"
using namespace vsa::sm100::bwd;
using Params = vsa::sm100::BackwardParams;
static_assert(offsetof(Params, lse_log2) == 512 && offsetof(Params, B) == 600, "the test has a copy of the struct");
static_assert(offsetof(Params, with_dq) == 640 && sizeof(Params) == 768, "the test has a copy of the struct");
using Static = BackwardTraits<false>;
using Stealing = BackwardTraits<true>;
template __global__ void vsa::sm100::bwd::backward_kernel<Static>(const __grid_constant__ Params);
template __global__ void vsa::sm100::bwd::backward_kernel<Stealing>(const __grid_constant__ Params);
using Narrow = BackwardTraits<false, __half>;
template __global__ void vsa::sm100::bwd::backward_kernel<Narrow>(const __grid_constant__ Params);
template __global__ void vsa::sm100::bwd::dq_kernel<DqTraits>(const __grid_constant__ Params);
__device__ int backward_numbers[] = {{Static::kThreads, Static::kSharedBytes}};
__device__ int dq_numbers[] = {{DqTraits::kThreads, DqTraits::kSharedBytes}};
// {headers}
"""

pytestmark = [
    pytest.mark.nvcc,
    pytest.mark.skipif(nvcc() is None, reason="nvcc: not found in $CUDA_HOME/bin nor on PATH"),
]


class Params(ctypes.Structure):
    """`vsa::sm100::BackwardParams`."""

    _fields_ = (
        *((name, ctypes.c_char * 128) for name in ("k", "v", "q_transposed", "dout_transposed")),
        *(
            (name, ctypes.c_uint64)
            for name in (
                "lse_log2", "delta", "kv_indices", "kv_num_blocks", "q_indices", "q_offsets", "kv_block_sizes",
                "order", "dq_accum", "dk", "dv",
            )
        ),
        *((name, ctypes.c_int32) for name in ("B", "H", "Nq", "Nkv", "M", "first", "items")),
        ("sm_scale", ctypes.c_float),
        ("sm_scale_log2", ctypes.c_float),
        ("evict_last", ctypes.c_float),
        ("with_dq", ctypes.c_bool),
        ("padding", ctypes.c_char * 127),
    )  # fmt: skip


@functools.lru_cache
def module() -> Module:
    headers = hashlib.sha256()
    for path in sorted(path for room in ROOMS for path in (CSRC / room).glob("*") if path.is_file()):
        headers.update(path.read_bytes())
    source = KERNELS.format(headers=headers.hexdigest())
    return load(compile_cuda(source, "sm_100a", ("-lineinfo", "--expt-relaxed-constexpr", f"-I{CSRC}")))


@dataclass(frozen=True)
class Kernel:
    """One kernel of the module, or of a changed one."""

    stem: str = "backward_kernel"
    launch_control: bool = False
    accumulator: type = np.float32
    changed: Module | None = None

    @property
    def module(self) -> Module:
        return self.changed or module()

    @property
    def name(self) -> str:
        letter = "f" if self.accumulator is np.float32 else "6__half"
        flag = f"Lb{int(self.launch_control)}E{letter}" if self.stem == "backward_kernel" else ""
        return next(name for name in self.module.parsed.kernels if self.stem in name and flag in name)


STATIC = Kernel()
LAUNCH_CONTROL = Kernel(launch_control=True)
NARROW = Kernel(accumulator=np.float16)
DQ_PASS = Kernel("dq_kernel")


class Launch:
    """A problem on an emulated device."""

    def __init__(self, problem: Problem, order: list[int] | None = None, accumulator: type = np.float32) -> None:
        self.problem = p = problem
        self.device = Device(64 << 20)
        batch, self.heads, length, _ = p.q.shape
        self.num_kv = p.kv_block_sizes.shape[0]
        self.items = batch * self.heads * self.num_kv
        q_indices, q_offsets = transpose_blocks(p.kv_indices, p.kv_num_blocks, self.num_kv)
        self.dk, self.dv = (self.device.empty(p.k.shape, np.uint16) for _ in range(2))
        # The preprocess zeroes it.
        self.dq = self.device.upload(np.zeros(p.q.shape, accumulator))
        buffers = {
            name: self.device.upload(x.numpy())
            for name, x in (
                ("lse_log2", p.lse_log2),
                ("delta", p.delta),
                ("kv_indices", p.kv_indices),
                ("kv_num_blocks", p.kv_num_blocks),
                ("q_indices", q_indices),
                ("q_offsets", q_offsets),
                ("kv_block_sizes", p.kv_block_sizes),
            )
        } | {"dk": self.dk, "dv": self.dv, "dq_accum": self.dq}
        if order is not None:
            buffers["order"] = self.device.upload(np.array(order, np.int32))
        self.params = Params(
            B=batch, H=self.heads, Nq=length // BLOCK, Nkv=self.num_kv, M=p.kv_indices.shape[3], items=self.items
        )
        self.params.sm_scale, self.params.sm_scale_log2 = p.sm_scale, p.sm_scale * LOG2_E
        self.params.with_dq = True
        for name, buffer in buffers.items():
            setattr(self.params, name, buffer.address)
        # Kept apart: a field of characters would end at the first zero.
        self.maps = {
            "k": self.map(p.k, (64, BLOCK, 1, 1)),
            "v": self.map(p.v, (64, BLOCK, 1, 1)),
            "q_transposed": self.map(self.transposed(p.q), (BLOCK, DIM)),
            "dout_transposed": self.map(self.transposed(p.dout), (BLOCK, DIM)),
        }

    @staticmethod
    def transposed(x: Tensor) -> Tensor:
        """[H * D, B * S]"""
        b, h, s, d = x.shape
        return x.permute(1, 3, 0, 2).reshape(h * d, b * s).contiguous()

    def map(self, x: Tensor, box: tuple[int, ...]) -> bytes:
        buffer = self.device.upload(x.view(torch.int16).numpy().view(np.uint16))
        dims = tuple(reversed(x.shape))
        return self.device.tensor_map(buffer, element="bf16", dims=dims, box=box, swizzle="128B").bytes

    def run(self, kernel: Kernel, blocks: int, options: Options | None = None) -> Report:
        """The dq pass takes one block for each q block of each head, launch control one for each item."""
        threads, shared = self.device.variable(kernel.module, kernel.stem.replace("kernel", "numbers"), np.int32)
        params = bytearray(self.params)
        for name, made in self.maps.items():
            at = getattr(Params, name).offset
            params[at : at + 128] = made
        return self.device.launch(
            kernel.module,
            grid=(blocks,),
            block=(int(threads),),
            shared=int(shared),
            args=[bytes(params)],
            kernel=kernel.name,
            options=options or Options(strict=True),
        )

    def gradient(self, buffer: Buffer) -> Tensor:
        return torch.from_numpy(buffer.array.copy().view(np.int16)).view(torch.bfloat16).float()

    def scaled_dq(self) -> Tensor:
        """The accumulator in token order, times the scale: csrc/sm100/bwd/drain.cuh has its order."""
        accumulator = torch.from_numpy(self.dq.array.astype(np.float32))
        batch, heads, length, _ = accumulator.shape
        order = accumulator.view(batch, heads, length // BLOCK, 4, 16, 32, 4)
        dq = order.permute(0, 1, 2, 4, 6, 3, 5).reshape(accumulator.shape)
        return dq * self.problem.sm_scale


def assert_dkdv(launch: Launch) -> None:
    """The gradients, and exact zeros where they have to be."""
    problem = launch.problem
    unused = (torch.arange(BLOCK) >= problem.kv_block_sizes[:, None]).flatten()
    for name, buffer, expected in (("dk", launch.dk, problem.dk), ("dv", launch.dv, problem.dv)):
        found = launch.gradient(buffer)
        assert_close(name, found, expected)
        assert not found[:, :, unused].any()
        assert not found[(expected == 0).all(-1)].any()


def check(
    problem: Problem,
    kernel: Kernel = STATIC,
    blocks: int = 2,
    options: Options | None = None,
    order: list[int] | None = None,
) -> Report:
    launch = Launch(problem, order, kernel.accumulator)
    report = launch.run(kernel, launch.items if kernel.launch_control else blocks, options)
    assert_dkdv(launch)
    assert_close("dq", launch.scaled_dq(), problem.dq)
    return report


def check_without_dq(problem: Problem, kernel: Kernel = STATIC, options: Options | None = None) -> Report:
    """The main kernel beside a dq pass: it must not touch dq."""
    launch = Launch(problem)
    launch.params.with_dq = False
    launch.dq.array[:] = np.nan
    report = launch.run(kernel, launch.items if kernel.launch_control else 1, options)
    assert_dkdv(launch)
    assert np.isnan(launch.dq.array).all()
    return report


def check_dq_pass(problem: Problem, kernel: Kernel = DQ_PASS, options: Options | None = None) -> Report:
    """Into an accumulator that nobody zeroed."""
    launch = Launch(problem)
    launch.dq.array[:] = np.nan
    report = launch.run(kernel, launch.heads * problem.q.shape[0] * (problem.q.shape[2] // BLOCK), options)
    assert_close("dq", launch.scaled_dq(), problem.dq)
    return report


def top_lists(k: int, rows: int, blocks: int, heads: int = 1, batch: int = 1) -> list[list[list[list[int]]]]:
    """k blocks in every row, different ones."""
    draw = np.random.default_rng(k)
    return [
        [[sorted(draw.permutation(blocks)[:k].tolist()) for _ in range(rows)] for _ in range(heads)]
        for _ in range(batch)
    ]


def test_one_block() -> None:
    check(make_problem([[[[0]]]], [40]), blocks=1)


def test_default() -> None:
    check(make_problem(top_lists(4, 8, 8, heads=2), [BLOCK] * 8))


@pytest.mark.parametrize("k", [1, 2, 3, 5, 7])
def test_ragged_groups(k: int) -> None:
    """One kv block with k q blocks: every ragged end of a group."""
    rows = [[0] if row < k else [] for row in range(8)]
    check(make_problem([[rows]], [BLOCK]), blocks=1)


@pytest.mark.parametrize("k", [1, 2, 3, 5, 7])
def test_top_k(k: int) -> None:
    check(make_problem(top_lists(k, 8, 8), [BLOCK] * 8))


@pytest.mark.parametrize("n", [4, 5])
def test_lengths(n: int) -> None:
    check(make_problem(top_lists(2, n, n), [BLOCK] * n))


def test_batches_and_heads() -> None:
    check(make_problem(top_lists(2, 3, 3, heads=2, batch=2), [BLOCK, 33, BLOCK]))


@pytest.mark.parametrize("sizes", [[63, 32, 47, 40, 33, BLOCK], [0, 1, 17, 40, 31, BLOCK]])
def test_ragged_sizes(sizes: list[int]) -> None:
    """Keys that are none hold NaN, in blocks that end inside what a group, a warp's row and a vector hold."""
    check(make_problem(top_lists(3, 5, 6), sizes))


def test_blocks_without_keys_and_without_lists() -> None:
    """Runs of empty items, longer than the ring of items, before, between and after others."""
    lists = [[[[5], [5, 6], [1, 6], [12, 5], []]]]
    sizes = [BLOCK, 0, *[BLOCK] * 3, 20, 0, *[BLOCK] * 7]
    check(make_problem(lists, sizes), blocks=1)


def test_lists_of_blocks_without_keys() -> None:
    """A list that is not empty, all of whose blocks are: P = 0, and no NaN."""
    check(make_problem([[[[1], [0, 1], [1]]]], [BLOCK, 0]))


def test_entries_past_the_count_are_not_read() -> None:
    problem = make_problem([[[[0], [0, 1], [], [2]]]], [BLOCK] * 3, filler=2)
    check(problem)
    check_dq_pass(problem)


def test_order_and_waves() -> None:
    """Launches of three items each, in an order, with a policy for the accumulator's lines."""
    problem = make_problem(top_lists(2, 4, 4, heads=2), [BLOCK] * 4)
    launch = Launch(problem, [2, 7, 0, 3, 5, 1, 4, 6])
    launch.params.evict_last = 0.5
    for first in range(0, launch.items, 3):
        launch.params.first, launch.params.items = first, min(3, launch.items - first)
        launch.run(STATIC, 3)
    assert_dkdv(launch)
    assert_close("dq", launch.scaled_dq(), problem.dq)


def test_launch_control() -> None:
    """Blocks take over blocks that have not started: a grid of all items, three of them resident."""
    problem = make_problem(top_lists(3, 4, 5, heads=2), [BLOCK, 9, BLOCK, 0, BLOCK])
    check(problem, LAUNCH_CONTROL, options=Options(strict=True, resident=3, order="shuffled", seed=1))


def test_accumulator_of_half_precision() -> None:
    check(make_problem(top_lists(3, 4, 4), [BLOCK] * 4), NARROW)


@pytest.mark.parametrize("schedule", ["latest", "random"])
def test_other_schedules(schedule: str) -> None:
    problem = make_problem(top_lists(3, 5, 4), [BLOCK, 0, 21, BLOCK])
    check(problem, options=Options(strict=True, schedule=schedule, seed=1))


def test_without_dq() -> None:
    check_without_dq(make_problem(top_lists(2, 5, 3), [BLOCK, 17, BLOCK]))


def test_dq_pass() -> None:
    """Lists of one step and of many, of odd lengths, of blocks without keys, and none."""
    lists = [[[[0], [0, 1], [], [0, 1, 2, 3, 4], [1]]]]
    check_dq_pass(make_problem(lists, [BLOCK, 0, 17, BLOCK, 63]))


def test_dq_pass_batches_and_heads() -> None:
    check_dq_pass(make_problem(random_lists(2, 3, 4, 2), [BLOCK, 40, BLOCK, 1]))


def test_dq_pass_is_deterministic() -> None:
    problem = make_problem(top_lists(3, 3, 4), [BLOCK, 40, BLOCK, BLOCK])
    found = []
    for order in ("forward", "shuffled"):
        launch = Launch(problem)
        launch.run(DQ_PASS, 3, Options(strict=True, order=order, resident=2))
        found.append(launch.dq.array.tobytes())
    assert found[0] == found[1]


# Faults --------------------------------------------------------------------------------------------------------------
# One item of one step first, so that no ring is full for it; an item that is empty; an odd list of several steps;
# single steps, one of them of two q blocks.
FAULT_PROBLEM = ([[[[0, 2], [2, 3], [2, 4], [4]]]], [40, *[BLOCK] * 4])

# Each kind of single fault, whatever the result then is. Fences of tensor memory around a block barrier are not among
# them: allocation and release are synchronous, so that they are caution.
FAULTS = {
    "waits": ("drop mbarrier wait", "drop tcgen05 wait", "drop bulk wait"),
    "phases": ("wrong phase",),
    "arrivals": ("drop arrive",),
    "commits": ("drop commit",),
    "fences": ("drop proxy fence", "drop tcgen05 fence"),
}


def mutants(kernel: Kernel, kinds: tuple[str, ...]) -> Iterator[tuple[str, Kernel]]:
    """(fault and where, the kernel with it)."""
    parsed = kernel.module.parsed
    text = parsed.kernels[kernel.name]

    def is_block_barrier(i: Instruction) -> bool:
        return i.op in ("bar", "barrier") and not i.has("warp")

    for at, instruction in enumerate(text.instructions):
        for mutation in (*drops(text, instruction), *wrong_phases(text, instruction)):
            if mutation.kind not in kinds:
                continue
            if mutation.kind == "drop tcgen05 fence" and any(map(is_block_barrier, text.instructions[at - 1 : at + 2])):
                continue
            changed = Module(replace(parsed, kernels={**parsed.kernels, kernel.name: mutation.apply(text)}))
            yield f"{mutation.kind}: {instruction.where()}", replace(kernel, changed=changed)


def faults_found(
    kernel: Kernel, kinds: tuple[str, ...], runs: list[Callable[[Kernel, Options | None], Report]]
) -> dict[str, str]:
    """Fault -> the first error of the runs, "" where none of them finds it."""
    limits = [3 * run(kernel, None).instructions for run in runs]

    def error_of(mutant: Kernel) -> str:
        for run, limit in zip(runs, limits, strict=True):
            try:
                run(mutant, Options(strict=True, max_instructions=limit))
            except (EmulatorError, AssertionError) as error:
                return f"{type(error).__name__}: {error}"
        return ""

    return {fault: error_of(mutant) for fault, mutant in mutants(kernel, kinds)}


def check_faults(kinds: tuple[str, ...]) -> list[str]:
    """All faults of these kinds are found: how."""
    problem = make_problem(*FAULT_PROBLEM)
    # Of the kernel with launch control: it has what the static one has, and more. One block takes all items over.
    runs: list[Callable[[Kernel, Options | None], Report]] = [
        lambda kernel, options: check(problem, kernel, options=options),
        lambda kernel, options: check_without_dq(problem, kernel, options),
    ]
    found = faults_found(LAUNCH_CONTROL, kinds, runs)
    assert all(found.values()), [fault for fault, error in found.items() if not error]
    return list(found.values())


# The others in `main`: what they make of a barrier is a deadlock nearly always.
@pytest.mark.parametrize("kinds", ["commits", "fences"])
def test_single_faults_are_found(kinds: str) -> None:
    check_faults(FAULTS[kinds])


def test_missing_waits_are_found() -> None:
    """Among them tensor memory used again too early: dq over dq that Drain reads, dv and dk over those that the
    Epilogue reads, K^T over that which dq reads. Their kind once passed every test up to 16 kv blocks."""
    errors = check_faults(FAULTS["waits"])
    assert sum("race on tensor memory" in error for error in errors) >= 3


def test_single_faults_of_the_dq_pass_are_found() -> None:
    problem = make_problem([[[[0, 1, 2, 3, 4]]]], [40, BLOCK, 33, BLOCK, BLOCK])
    kinds = tuple(kind for kinds in FAULTS.values() for kind in kinds)
    found = faults_found(DQ_PASS, kinds, [lambda kernel, options: check_dq_pass(problem, kernel, options)])
    assert all(found.values()), [fault for fault, error in found.items() if not error]


def main() -> None:
    """The cases that are too large for a test: `python -m tests.test_sm100_backward_emulated`."""
    for kernel in (STATIC, LAUNCH_CONTROL):
        for heads, n, k in ((4, 8, 4), *((1, 16, k) for k in (1, 2, 3, 5, 7, 16))):
            print(f"{kernel.launch_control=}: {heads=} {n=} {k=}", flush=True)
            check(make_problem(top_lists(k, n, n, heads), [BLOCK] * n), kernel)
    sizes = np.random.default_rng(0).integers(0, BLOCK + 1, 16).tolist()
    for order in ("forward", "reversed"):
        print(f"{sizes=} {order=}", flush=True)
        check(make_problem(top_lists(5, 16, 16), sizes), options=Options(strict=True, order=order, resident=2))
    check_dq_pass(make_problem(top_lists(5, 16, 16), sizes))
    for kinds in FAULTS:
        print(f"faults: {kinds}, {len(check_faults(FAULTS[kinds]))} found")


if __name__ == "__main__":
    main()
