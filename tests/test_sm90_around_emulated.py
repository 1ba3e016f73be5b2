"""The kernels around the fused sm_90a backward, which eager runs, in the PTX emulator: delta, and the end of dq."""

from __future__ import annotations

import functools
import hashlib
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.ptx_emulator import Device, Options, load
from tests.ptx_emulator.compile import compile_cuda, nvcc
from tests.ptx_emulator.launch import Module
from vsa_inductor.backends.contract import TorchArithmetic, _by_token
from vsa_inductor.backends.sm90 import CONTRACT

CSRC = Path(__file__).resolve().parents[1] / "csrc"
THREADS = 256
STRICT = Options(strict=True)
SOURCE = """
#include <cstddef>
#include "sm90/bwd/around.cuh"
using namespace vsa::sm90;
static_assert(offsetof(DeltaParams, dlse) == 40 && offsetof(DeltaParams, delta) == 72 && sizeof(DeltaParams) == 96,
              "the test packs the struct by hand");
template __global__ void bwd::delta_kernel<{element}, {head_dim}>(const __grid_constant__ DeltaParams);
template __global__ void bwd::finish_dq_kernel<{element}, {head_dim}>(const float*, {element}*, float, int64_t);
// {headers}
"""
ELEMENTS = {torch.bfloat16: "__nv_bfloat16", torch.float16: "__half"}
CASES = pytest.mark.parametrize(
    "dtype, head_dim", [(torch.bfloat16, 128), (torch.float16, 64)], ids=["bf16-d128", "fp16-d64"]
)

pytestmark = [
    pytest.mark.nvcc,
    pytest.mark.skipif(nvcc() is None, reason="nvcc: not found in $CUDA_HOME/bin nor on PATH"),
]


@functools.lru_cache
def module(dtype: torch.dtype, head_dim: int) -> Module:
    headers = hashlib.sha256()
    for path in sorted([*CSRC.rglob("*.cuh"), *CSRC.rglob("*.h")]):
        headers.update(path.read_bytes())
    source = SOURCE.format(element=ELEMENTS[dtype], head_dim=head_dim, headers=headers.hexdigest())
    return load(compile_cuda(source, "sm_90a", ("-lineinfo", f"-I{CSRC}")))


def kernel(of: Module, stem: str) -> str:
    (name,) = (name for name in of.parsed.kernels if stem in name)
    return name


def bits(x: torch.Tensor) -> np.ndarray:
    return x.contiguous().view(torch.int16).numpy().view(np.uint16)


@CASES
@pytest.mark.parametrize("with_dlse", [False, True])
def test_delta(dtype: torch.dtype, head_dim: int, with_dlse: bool) -> None:
    """Of rows that do not fill the last block; dout stands as [B, S, H, D], dlse as [S, H, B]."""
    B, H, S = 2, 3, 7
    out, dout = (torch.randn(B, H, S, head_dim).to(dtype) for _ in range(2))
    dlse = torch.randn(B, H, S)
    device = Device(1 << 20)
    delta = device.empty((B, H, S), np.float32)
    of_dlse = device.upload(dlse.permute(2, 1, 0).contiguous().numpy()).address if with_dlse else 0
    params = struct.pack("<2Q", device.upload(bits(out)).address, device.upload(bits(dout.transpose(1, 2))).address)
    params += struct.pack("<3q", S * H * head_dim, head_dim, H * head_dim)
    params += struct.pack("<Q3qQ3i", of_dlse, 1, B, B * H, delta.address, B, H, S)
    of = module(dtype, head_dim)
    rows = THREADS // (head_dim // 8)
    device.launch(
        of, kernel=kernel(of, "delta_kernel"), grid=(-(-B * H * S // rows),), block=(THREADS,),
        args=[params.ljust(96, b"\0")], options=STRICT,
    )  # fmt: skip
    expected = (out.double() * dout.double()).sum(-1) - (dlse.double() / np.log(2) if with_dlse else 0)
    torch.testing.assert_close(torch.from_numpy(delta.array.copy()).double(), expected, rtol=1e-6, atol=1e-5)


@CASES
def test_end_of_dq(dtype: torch.dtype, head_dim: int) -> None:
    """As the contract says to compiled graphs."""
    B, H, N, scale = 1, 2, 3, 0.0883
    accumulator = torch.randn(B, H, N * 64, head_dim)
    device = Device(1 << 21)
    dq = device.empty((B, H, N * 64, head_dim), np.uint16)
    of = module(dtype, head_dim)
    device.launch(
        of, kernel=kernel(of, "finish_dq_kernel"), grid=(-(-B * H * N * 4 * head_dim // THREADS),), block=(THREADS,),
        args=[device.upload(accumulator.numpy()).address, dq.address, np.float32(scale), np.int64(B * H * N)],
        options=STRICT,
    )  # fmt: skip
    assert CONTRACT.dq_order is not None
    by_token = _by_token(TorchArithmetic(), CONTRACT.dq_order, accumulator, accumulator.shape, 64)
    expected = (by_token * np.float32(scale)).reshape(accumulator.shape).to(dtype)
    np.testing.assert_array_equal(dq.array, bits(expected))
