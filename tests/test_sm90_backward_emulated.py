"""The sm_90a backward kernels in the PTX emulator: right, free of races, and never past the end of a list.

Needs nvcc for the PTX, and no GPU. The meaning is that of `vsa_inductor/reference`, in fp32; problems are a few blocks.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.ptx_emulator import Device, Options, load
from tests.ptx_emulator.compile import compile_cuda, nvcc
from tests.ptx_emulator.errors import EmulatorError
from tests.ptx_emulator.launch import Module, Report
from tests.ptx_emulator.memory import Buffer
from tests.ptx_emulator.mutants.drops import drops
from vsa_inductor.reference.attention import attention
from vsa_inductor.reference.attention_backward import attention_backward
from vsa_inductor.reference.transpose_blocks import transpose_blocks

CSRC = Path(__file__).resolve().parents[1] / "csrc"
BLOCK = 64
WARPGROUP = 128
CONSUMERS = 2
PAIRING_GROUP = 128
LOG2_E = math.log2(math.e)
KERNELS = """
#include <cstddef>
#include "sm90/bwd/dkdv_kernel.cuh"
#include "sm90/bwd/dq_kernel.cuh"
#include "sm90/bwd/prepare.cuh"
using Params = vsa::AttentionBackwardParams;
using namespace vsa::sm90::bwd;
static_assert(offsetof(Params, lse_log2) == 512 && offsetof(Params, B) == 600, "the test has a copy of the struct");
static_assert(offsetof(Params, deterministic) == 632 && sizeof(Params) == 640, "the test has a copy of the struct");
using Dkdv = DkdvTraits<{element}, {head_dim}, {with_dq}>;
template __global__ void vsa::sm90::bwd::dkdv_kernel<Dkdv>(const __grid_constant__ Params);
__device__ int dkdv_numbers[] = {{Dkdv::kThreads, Dkdv::kSharedBytes}};
using Dq = DqTraits<{element}, {head_dim}>;
template __global__ void vsa::sm90::bwd::dq_kernel<Dq>(const __grid_constant__ Params);
__device__ int dq_numbers[] = {{Dq::kThreads, Dq::kSharedBytes}};
static_assert(kPairingGroup == 128, "the test has its own number");
__device__ int prepare_numbers[] = {{kPrepareThreads, 0}};
__device__ int order_numbers[] = {{kPrepareThreads, 0}};
// {headers}
"""
ELEMENTS = {torch.bfloat16: ("bf16", "__nv_bfloat16"), torch.float16: ("f16", "__half")}

pytestmark = [
    pytest.mark.nvcc,
    pytest.mark.skipif(nvcc() is None, reason="nvcc: not found in $CUDA_HOME/bin nor on PATH"),
]


class Params(ctypes.Structure):
    """`vsa::AttentionBackwardParams`."""

    _fields_ = (
        *((name, ctypes.c_char * 128) for name in ("q", "k", "v", "dout")),
        *(
            (name, ctypes.c_uint64)
            for name in (
                "lse_log2", "delta", "kv_indices", "kv_num_blocks", "q_indices", "q_offsets", "kv_block_sizes",
                "dq_accum", "dk", "dv", "workspace",
            )
        ),
        *((name, ctypes.c_int32) for name in ("B", "Hq", "Hkv", "Nq", "Nkv", "M")),
        ("sm_scale", ctypes.c_float),
        ("sm_scale_log2", ctypes.c_float),
        ("deterministic", ctypes.c_bool),
        ("padding", ctypes.c_char * 7),
    )  # fmt: skip


@dataclass(frozen=True)
class Kernels:
    """The instantiations for one operand type and head dim, and a launch of them."""

    dtype: torch.dtype = torch.bfloat16
    head_dim: int = 128
    with_dq: bool = True

    @functools.cached_property
    def module(self) -> Module:
        headers = hashlib.sha256()
        for path in sorted([*CSRC.rglob("*.cuh"), *CSRC.rglob("*.h")]):
            headers.update(path.read_bytes())
        source = KERNELS.format(
            element=ELEMENTS[self.dtype][1],
            head_dim=self.head_dim,
            with_dq=str(self.with_dq).lower(),
            headers=headers.hexdigest(),
        )
        return load(compile_cuda(source, "sm_90a", ("-lineinfo", f"-I{CSRC}")))

    def kernel(self, stem: str) -> str:
        return next(name for name in self.module.parsed.kernels if stem in name)

    def numbers(self, device: Device, stem: str) -> tuple[int, int]:
        """(threads, bytes of dynamic shared memory) of a kernel."""
        threads, shared = device.variable(self.module, f"{stem}_numbers", np.int32)
        return int(threads), int(shared)


@functools.lru_cache
def kernels(dtype: torch.dtype = torch.bfloat16, head_dim: int = 128, with_dq: bool = True) -> Kernels:
    return Kernels(dtype, head_dim, with_dq)


@dataclass
class Problem:
    """Operands in their type, lists, and the gradients that the reference gives in fp32."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    lse_log2: Tensor
    delta: Tensor
    kv_indices: Tensor
    kv_num_blocks: Tensor
    kv_block_sizes: Tensor
    sm_scale: float
    dq: Tensor
    dk: Tensor
    dv: Tensor


def make_problem(
    lists: Sequence[Sequence[Sequence[Sequence[int]]]],
    sizes: Sequence[int],
    dtype: torch.dtype = torch.bfloat16,
    head_dim: int = 128,
    kv_heads: int | None = None,
    filler: int = -1,
    seed: int = 0,
) -> Problem:
    """`lists[b][h][q block]` are ids of kv blocks; `filler` stands past their ends.

    Key slots that are no keys hold NaN, and so do dout and delta of rows without a key.
    """
    generator = torch.Generator().manual_seed(seed)
    batch, heads, rows = len(lists), len(lists[0]), len(lists[0][0])
    kv_heads = heads if kv_heads is None else kv_heads
    length, kv_length = rows * BLOCK, len(sizes) * BLOCK

    def draw(h: int, s: int) -> Tensor:
        return torch.randn(batch, h, s, head_dim, generator=generator).to(dtype)

    q, dout = draw(heads, length), draw(heads, length)
    k, v = draw(kv_heads, kv_length), draw(kv_heads, kv_length)
    kv_block_sizes = torch.tensor(sizes, dtype=torch.int32)
    unused = (torch.arange(BLOCK) >= kv_block_sizes[:, None]).flatten()
    k[:, :, unused] = v[:, :, unused] = torch.nan
    width = max(1, max(len(row) for of_batch in lists for of_head in of_batch for row in of_head))
    kv_indices = torch.full((batch, heads, rows, width), filler, dtype=torch.int32)
    kv_num_blocks = torch.zeros(batch, heads, rows, dtype=torch.int32)
    for at in np.ndindex(batch, heads, rows):
        row = lists[at[0]][at[1]][at[2]]
        kv_indices[at][: len(row)] = torch.tensor(row, dtype=torch.int32)
        kv_num_blocks[at] = len(row)

    sm_scale = head_dim**-0.5
    wide_q, wide_k, wide_v = q.float(), k.float(), v.float()
    out, lse = torch.empty(q.shape), torch.empty(q.shape[:3])
    attention(wide_q, wide_k, wide_v, kv_indices, kv_num_blocks, kv_block_sizes, sm_scale, BLOCK, out, lse)
    delta = (out.to(dtype).float() * dout.float()).sum(-1)
    keyless = lse == -torch.inf
    dout[keyless] = delta[keyless] = torch.nan
    gradients = attention_backward(
        dout.float(),
        wide_q,
        wide_k,
        wide_v,
        lse,
        delta,
        kv_indices,
        kv_num_blocks,
        kv_block_sizes,
        sm_scale,
        BLOCK,
        True,
        True,
    )
    dq, dk, dv = (x for x in gradients if x is not None)
    return Problem(
        q, k, v, dout, lse, delta, kv_indices, kv_num_blocks, kv_block_sizes, sm_scale, dq * sm_scale, dk, dv
    )


class Launch:
    """A problem on an emulated device."""

    def __init__(self, of: Kernels, problem: Problem) -> None:
        self.of, self.problem = of, problem
        self.device = Device(64 << 20)
        p = problem
        batch, heads, length, _ = p.q.shape
        self.heads = batch * heads
        self.kv_heads, self.num_kv = p.k.shape[1], p.kv_block_sizes.shape[0]
        self.items = batch * self.kv_heads * -(-self.num_kv // CONSUMERS)
        num_q = length // BLOCK
        q_indices, q_offsets = transpose_blocks(p.kv_indices, p.kv_num_blocks, self.num_kv)
        self.dk, self.dv = (self.device.empty(p.k.shape, np.uint16) for _ in range(2))
        inputs = {
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
        }
        params = Params(B=batch, Hq=heads, Hkv=self.kv_heads, Nq=num_q, Nkv=self.num_kv, M=p.kv_indices.shape[3])
        params.sm_scale, params.sm_scale_log2 = p.sm_scale, p.sm_scale * LOG2_E
        buffers = {**inputs, "dk": self.dk, "dv": self.dv}
        for name, buffer in buffers.items():
            setattr(params, name, buffer.address)
        self.params = bytearray(params)
        # Raw bytes: a field of characters would end at the first zero.
        for name in ("q", "k", "v", "dout"):
            at = getattr(Params, name).offset
            self.params[at : at + 128] = self.map(getattr(p, name))

    def map(self, x: Tensor) -> bytes:
        b, h, s, d = x.shape
        made = self.device.tensor_map(
            self.device.upload(x.view(torch.int16).numpy().view(np.uint16)),
            element=ELEMENTS[x.dtype][0],
            dims=(d, s, h, b),
            box=(64, BLOCK, 1, 1),
            swizzle="128B",
        )
        return made.bytes

    def set(self, name: str, buffer: Buffer) -> None:
        at = getattr(Params, name).offset
        self.params[at : at + 8] = buffer.address.to_bytes(8, "little")

    def run(self, stem: str, blocks: int, options: Options | None, *more: np.generic) -> Report:
        threads, shared = self.of.numbers(self.device, stem)
        return self.device.launch(
            self.of.module,
            grid=(blocks,),
            block=(threads,),
            shared=shared,
            args=[bytes(self.params), *more],
            kernel=self.of.kernel(f"{stem}_kernel"),
            options=options or Options(strict=True),
        )

    def prepare(self, ordered: bool) -> None:
        """Zeros for dq; pairs of kv blocks and their order where they are asked for."""
        self.dq = self.device.empty(self.problem.q.shape, np.float32)
        self.set("dq_accum", self.dq)
        rows = self.heads // self.problem.q.shape[1] * self.kv_heads
        pairing = rows * -(-self.num_kv // PAIRING_GROUP) if ordered else 0
        if ordered:
            self.schedule = self.device.empty(5 * self.items, np.int32)
            self.set("workspace", self.schedule)
        self.run("prepare", pairing + 2, None, np.int32(pairing), np.int64(self.dq.array.size // 4))
        if ordered:
            self.run("order", rows, None)

    def dkdv(self, options: Options | None = None) -> Report:
        return self.run("dkdv", self.items, options)

    def dq_pass(self, options: Options | None = None) -> Report:
        self.dq = self.device.empty(self.problem.q.shape, np.float32)
        self.set("dq_accum", self.dq)
        return self.run("dq", self.heads * -(-(self.problem.q.shape[2] // BLOCK) // CONSUMERS), options)

    def gradient(self, buffer: Buffer) -> Tensor:
        return torch.from_numpy(buffer.array.copy().view(np.int16)).view(self.of.dtype).float()

    def scaled_dq(self) -> Tensor:
        """The accumulator in token order, times the scale: csrc/sm90/bwd/dkdv_reducer.cuh has its order."""
        accumulator = torch.from_numpy(self.dq.array.copy())
        batch, heads, length, dim = accumulator.shape
        order = accumulator.view(batch, heads, length // BLOCK, 4, dim // 8, 8, 4, 2, 2)
        dq = order.permute(0, 1, 2, 3, 7, 5, 4, 6, 8).reshape(accumulator.shape)
        return dq * self.problem.sm_scale


def assert_close(name: str, found: Tensor, expected: Tensor) -> None:
    error = (found - expected).abs()
    largest = expected.abs().max().item()
    print(f"{name}: max {error.max().item():.2e} of {largest:.2e}, mean {error.mean().item():.2e}")
    assert error.max().item() <= 1e-2 * largest, name
    assert error.mean().item() <= 1e-3, name


def check(of: Kernels, problem: Problem, options: Options | None = None, ordered: bool = False) -> Report:
    """Runs the fused kernel; its gradients against the reference, and exact zeros where they have to be."""
    launch = Launch(of, problem)
    launch.prepare(ordered)
    report = launch.dkdv(options)
    dk, dv = launch.gradient(launch.dk), launch.gradient(launch.dv)
    assert_close("dk", dk, problem.dk)
    assert_close("dv", dv, problem.dv)
    unused = (torch.arange(BLOCK) >= problem.kv_block_sizes[:, None]).flatten()
    for x, expected in ((dk, problem.dk), (dv, problem.dv)):
        assert not x[:, :, unused].any()
        assert not x[(expected == 0).all(-1)].any()
    if of.with_dq:
        assert_close("dq", launch.scaled_dq(), problem.dq)
    return report


def check_dq_pass(of: Kernels, problem: Problem, options: Options | None = None) -> Report:
    """Runs the dq pass into an accumulator that nobody zeroed."""
    launch = Launch(of, problem)
    report = launch.dq_pass(options)
    assert_close("dq", launch.scaled_dq(), problem.dq)
    return report


# Five q blocks over three kv blocks: in both lists of a pair, in one of them, in none.
LISTS = [[[[0, 1], [0], [1, 2], [], [0, 1, 2]]]]
FULL = [BLOCK] * 3
# Blocks that end in the middle of what a thread, a warp and a piece of 16 rows hold; one without keys, alone in a list.
RAGGED_LISTS = [[[[0, 1], [1], [1, 2], [], [0, 1, 2]]]]
RAGGED = [17, 0, 63]


def test_loads_shared_between_kv_blocks() -> None:
    report = check(kernels(), make_problem(LISTS, FULL))
    # Q and dO of a q block that both kv blocks want are loaded once: 4 steps of the pair, 2 of the single block.
    row_block = BLOCK * 128 * 2
    assert report.bytes["TMA load global->shared"] == (2 * (4 + 2) + 2 * 3) * row_block


@pytest.mark.parametrize("schedule", ["latest", "random"])
def test_other_schedules(schedule: str) -> None:
    problem = make_problem(LISTS, FULL, torch.float16, 64)
    check(kernels(torch.float16, 64), problem, Options(strict=True, schedule=schedule, seed=1))


def test_ragged() -> None:
    check(kernels(), make_problem(RAGGED_LISTS, RAGGED))


def test_entries_past_the_count_are_not_read() -> None:
    check(kernels(torch.float16, 64), make_problem(LISTS, FULL, torch.float16, 64, filler=2))


def test_one_block() -> None:
    check(kernels(), make_problem([[[[0]]]], [40]))


def test_blocks_nobody_lists() -> None:
    check(kernels(), make_problem([[[[2], [], [2]]]], [BLOCK] * 4))


def random_lists(heads: int, rows: int, blocks: int, batch: int = 1) -> list[list[list[list[int]]]]:
    """Each entry present with probability 1/2."""
    present = np.random.default_rng(1).random((batch, heads, rows, blocks)) < 0.5
    return [[[np.flatnonzero(row).tolist() for row in head] for head in of_batch] for of_batch in present]


def test_every_ring_wraps() -> None:
    """More steps than the ring of planned steps has, on fp16 and D 64, whose rings are the longest."""
    check(kernels(torch.float16, 64), make_problem(random_lists(1, 24, 2), [BLOCK, 30], torch.float16, 64))


def test_a_consumer_that_skips_more_steps_than_are_planned_ahead() -> None:
    """Nobody waits for what it has to say meanwhile."""
    rows = [[0, 1] if row in (0, 26) else [0] for row in range(28)]
    check(kernels(torch.float16, 64), make_problem([[rows]], [BLOCK, BLOCK], torch.float16, 64))


def test_batches_grouped_heads_and_order() -> None:
    """Two query heads to a kv head, two batches; kv blocks paired by what their lists share, costly items first."""
    problem = make_problem(random_lists(4, 3, 5, 2), [BLOCK, 5, BLOCK, 0, BLOCK], torch.float16, 64, kv_heads=2)
    of = kernels(torch.float16, 64)
    check(of, problem, ordered=True)
    launch = Launch(of, problem)
    launch.prepare(ordered=True)
    # [batch * kv heads, kv block, query head * q block]
    listed = torch.zeros(2, 4, 5, 3)
    for at in np.ndindex(2, 4, 3):
        listed[at[0], at[1], problem.kv_indices[at][: problem.kv_num_blocks[at]].long(), at[2]] = 1
    listed = (listed * (problem.kv_block_sizes > 0)[:, None]).view(2, 2, 2, 5, 3).transpose(2, 3).reshape(4, 5, 6)
    pairs = torch.from_numpy(launch.schedule.array.copy())[: 2 * launch.items].view(4, 3, 2)
    for row, items in zip(listed, pairs.tolist(), strict=True):
        assert sorted(block for item in items for block in item) == [-1, 0, 1, 2, 3, 4]
        common = row @ row.T
        costs = []
        for a, b in items:
            costs.append(2 * int(row[a].sum()) + (2 * int(row[b].sum()) - int(common[a, b]) if b >= 0 else 0))
        assert costs == sorted(costs, reverse=True)
        # The best pair of all is one of them.
        best = common.fill_diagonal_(-1).max()
        assert best == max(common[a, b] for a, b in items if b >= 0)


@pytest.mark.parametrize("with_dq", [False, True], ids=["without-dq", "with-dq"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_instantiations(dtype: torch.dtype, head_dim: int, with_dq: bool) -> None:
    check(kernels(dtype, head_dim, with_dq=with_dq), make_problem(LISTS, RAGGED, dtype, head_dim))


@pytest.mark.parametrize("sizes", [FULL, RAGGED])
def test_dq_pass(sizes: list[int]) -> None:
    check_dq_pass(kernels(), make_problem(RAGGED_LISTS, sizes))


def test_dq_pass_batches_and_grouped_heads() -> None:
    problem = make_problem(random_lists(4, 3, 9, 2), [BLOCK] * 8 + [9], torch.float16, 64, kv_heads=2)
    check_dq_pass(kernels(torch.float16, 64), problem)


# A wait or a fence between proxies that is left out must be found, whatever the result then is.
FAULTS = ("drop mbarrier wait", "drop wgmma wait", "drop proxy fence", "drop bulk wait")


def mutants(of: Kernels, stem: str) -> Iterator[tuple[str, Kernels]]:
    """(fault and where, the kernels with it)."""
    name = of.kernel(f"{stem}_kernel")
    parsed = of.module.parsed
    kernel = parsed.kernels[name]
    for instruction in kernel.instructions:
        for mutation in drops(kernel, instruction):
            if mutation.kind in FAULTS:
                changed = Module(replace(parsed, kernels={**parsed.kernels, name: mutation.apply(kernel)}))
                yield f"{mutation.kind}: {instruction.where()}", Mutant(of.dtype, of.head_dim, of.with_dq, changed)


@dataclass(frozen=True)
class Mutant(Kernels):
    changed: Module | None = None

    @property
    def module(self) -> Module:
        assert self.changed is not None
        return self.changed


@pytest.mark.parametrize("stem, run", [("dkdv", check), ("dq", check_dq_pass)])
def test_single_faults_are_found(stem: str, run: Callable[..., Report]) -> None:
    of = kernels(torch.float16, 64)
    lists = random_lists(1, 9, 2) if stem == "dkdv" else random_lists(1, 2, 10)
    sizes = [40, BLOCK] if stem == "dkdv" else [40, BLOCK] * 5
    problem = make_problem(lists, sizes, of.dtype, of.head_dim)
    limit = run(of, problem).instructions
    missed = []
    for fault, mutant in mutants(of, stem):
        try:
            run(mutant, problem, Options(strict=True, max_instructions=3 * limit))
        except (EmulatorError, AssertionError):
            continue
        missed.append(fault)
    assert not missed
