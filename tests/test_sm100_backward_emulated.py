"""The sm_100a backward kernels in the PTX emulator: right, free of races, and never past the end of a list.

Emulated, not yet run on silicon. Needs nvcc for the PTX, and no GPU. The meaning is that of `vsa_inductor/reference`, in
fp32; problems are a few blocks.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.ptx_emulator import Device, Options, load
from tests.ptx_emulator.compile import compile_cuda, nvcc
from tests.ptx_emulator.launch import Module, Report
from tests.ptx_emulator.memory import Buffer
from tests.test_sm90_backward_emulated import Problem, assert_close, make_problem, random_lists
from vsa_inductor.reference.transpose_blocks import transpose_blocks

CSRC = Path(__file__).resolve().parents[1] / "csrc"
BLOCK, DIM = 64, 128
LOG2_E = math.log2(math.e)
KERNELS = """
#include <cstddef>
#include "sm100/bwd/kernel.cuh"
using namespace vsa::sm100::bwd;
using Params = vsa::sm100::BackwardParams;
static_assert(offsetof(Params, lse_log2) == 512 && offsetof(Params, B) == 600, "the test has a copy of the struct");
static_assert(offsetof(Params, with_dq) == 640 && sizeof(Params) == 768, "the test has a copy of the struct");
using Static = BackwardTraits<false>;
using Stealing = BackwardTraits<true>;
template __global__ void vsa::sm100::bwd::backward_kernel<Static>(const __grid_constant__ Params);
template __global__ void vsa::sm100::bwd::backward_kernel<Stealing>(const __grid_constant__ Params);
__device__ int backward_numbers[] = {{Static::kThreads, Static::kSharedBytes}};
// {headers}
"""

pytestmark = pytest.mark.skipif(nvcc() is None, reason="nvcc: not found in $CUDA_HOME/bin nor on PATH")


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
    for path in sorted([*CSRC.rglob("*.cuh"), *CSRC.rglob("*.h")]):
        headers.update(path.read_bytes())
    source = KERNELS.format(headers=headers.hexdigest())
    return load(compile_cuda(source, "sm_100a", ("-lineinfo", "--expt-relaxed-constexpr", f"-I{CSRC}")))


@dataclass(frozen=True)
class Kernel:
    """One kernel of the module, or of a changed one."""

    stem: str = "backward_kernel"
    launch_control: bool = False
    changed: Module | None = None

    @property
    def module(self) -> Module:
        return self.changed or module()

    @property
    def name(self) -> str:
        flag = f"Lb{int(self.launch_control)}"
        return next(name for name in self.module.parsed.kernels if self.stem in name and flag in name)


class Launch:
    """A problem on an emulated device."""

    def __init__(self, problem: Problem, order: list[int] | None = None) -> None:
        self.problem = p = problem
        self.device = Device(64 << 20)
        batch, self.heads, length, _ = p.q.shape
        self.num_kv = p.kv_block_sizes.shape[0]
        self.items = batch * self.heads * self.num_kv
        q_indices, q_offsets = transpose_blocks(p.kv_indices, p.kv_num_blocks, self.num_kv)
        self.dk, self.dv = (self.device.empty(p.k.shape, np.uint16) for _ in range(2))
        # The preprocess zeroes it.
        self.dq = self.device.upload(np.zeros(p.q.shape, np.float32))
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
        threads, shared = self.device.variable(kernel.module, "backward_numbers", np.int32)
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
        accumulator = torch.from_numpy(self.dq.array.copy())
        batch, heads, length, _ = accumulator.shape
        order = accumulator.view(batch, heads, length // BLOCK, 4, 16, 32, 4)
        dq = order.permute(0, 1, 2, 4, 6, 3, 5).reshape(accumulator.shape)
        return dq * self.problem.sm_scale


def check(problem: Problem, kernel: Kernel | None = None, blocks: int = 2, options: Options | None = None,
          order: list[int] | None = None) -> Report:
    kernel = kernel or Kernel()
    launch = Launch(problem, order)
    report = launch.run(kernel, blocks, options)
    dk, dv = launch.gradient(launch.dk), launch.gradient(launch.dv)
    assert_close("dk", dk, problem.dk)
    assert_close("dv", dv, problem.dv)
    unused = (torch.arange(BLOCK) >= problem.kv_block_sizes[:, None]).flatten()
    for x, expected in ((dk, problem.dk), (dv, problem.dv)):
        assert not x[:, :, unused].any()
        assert not x[(expected == 0).all(-1)].any()
    assert_close("dq", launch.scaled_dq(), problem.dq)
    return report


def test_one_block() -> None:
    check(make_problem([[[[0]]]], [BLOCK]), blocks=1)


def test_default() -> None:
    check(make_problem(random_lists(1, 8, 8), [BLOCK] * 8))


# Lists of one kv block with 1, 2, 3, 5 and 7 q blocks of it: every ragged end of a group of two, and groups in numbers.
@pytest.mark.parametrize("k", [1, 2, 3, 5, 7])
def test_ragged_groups(k: int) -> None:
    rows = [[0] if row < k else [] for row in range(8)]
    check(make_problem([[rows]], [BLOCK]), blocks=1)


def top_lists(k: int, rows: int, blocks: int, heads: int = 1, batch: int = 1) -> list[list[list[list[int]]]]:
    """k blocks in every row, different ones."""
    draw = np.random.default_rng(k)
    return [
        [[sorted(draw.permutation(blocks)[:k].tolist()) for _ in range(rows)] for _ in range(heads)]
        for _ in range(batch)
    ]


@pytest.mark.parametrize("k", [1, 2, 3, 5, 7])
def test_top_k(k: int) -> None:
    check(make_problem(top_lists(k, 8, 8), [BLOCK] * 8))


@pytest.mark.parametrize("n", [4, 5])
def test_lengths(n: int) -> None:
    check(make_problem(top_lists(2, n, n), [BLOCK] * n))


def test_batches_and_heads() -> None:
    check(make_problem(top_lists(2, 3, 3, heads=2, batch=2), [BLOCK, 33, BLOCK]))


def test_ragged_sizes() -> None:
    """Keys that are none hold NaN, in blocks that end inside what a group, a warp's row and a vector hold."""
    check(make_problem(top_lists(3, 5, 6), [63, 32, 17, 40, 1, BLOCK]))


def test_blocks_without_keys_and_without_lists() -> None:
    """Runs of empty items, longer than the ring of items, before, between and after others."""
    lists = [[[[5], [5, 6], [1, 6], [12, 5], []]]]
    sizes = [BLOCK, 0, *[BLOCK] * 3, 20, 0, *[BLOCK] * 7]
    check(make_problem(lists, sizes), blocks=1)


def test_lists_of_blocks_without_keys() -> None:
    """A list that is not empty, all of whose blocks are: P = 0, and no NaN."""
    check(make_problem([[[[1], [0, 1], [1]]]], [BLOCK, 0]))


def test_entries_past_the_count_are_not_read() -> None:
    check(make_problem([[[[0], [0, 1], [], [2]]]], [BLOCK] * 3, filler=2))


def test_order() -> None:
    problem = make_problem(top_lists(2, 4, 4), [BLOCK] * 4)
    check(problem, order=[2, 0, 3, 1])


def test_launch_control() -> None:
    """Blocks take over blocks that have not started: a grid of all items, three of them resident."""
    problem = make_problem(top_lists(3, 4, 5, heads=2), [BLOCK, 9, BLOCK, 0, BLOCK])
    check(problem, Kernel(launch_control=True), blocks=10, options=Options(strict=True, resident=3))


@pytest.mark.parametrize("schedule", ["latest", "random"])
def test_other_schedules(schedule: str) -> None:
    problem = make_problem(top_lists(3, 5, 4), [BLOCK, 0, 21, BLOCK])
    check(problem, options=Options(strict=True, schedule=schedule, seed=1))
