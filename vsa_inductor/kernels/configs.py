"""Fixed launch configurations of the Triton kernels: a table lookup, never a run-time autotune.

Sizes that matter when choosing (D = 128, bf16): a 64-row operand tile is 16 KB of shared memory, a 64 x D fp32
accumulator is 64 registers per thread of a 4-warp program. sm_90 and sm_100 have 227 KB of shared memory per program,
sm_80 163 KB, the rest 99 KB: the last two get smaller tiles and no tensor descriptors.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, NamedTuple

import torch

Pass = Literal["forward", "dq", "dkdv"]


class LaunchConfig(NamedTuple):
    """Tile and pipeline numbers of one attention pass.

    Attributes:
        rows: rows of the stationary operand per program (queries in `forward` and `dq`, keys in `dkdv`);
            divides block_size.
        cols: rows of the streamed operand per step; divides block_size.
        num_warps: warps per program; wgmma wants multiples of 4.
        num_stages: depth of the software pipeline of the streamed loads.
        use_tma: stream through tensor descriptors (sm_90 and later) instead of pointers.
        max_registers: cap per thread, to fit one more program on a multiprocessor; None leaves it to the compiler.
    """

    rows: int
    cols: int
    num_warps: int
    num_stages: int
    use_tma: bool = False
    max_registers: int | None = None

    def by_pointers(self) -> LaunchConfig:
        """The form without descriptors, for operands that the copy engine cannot address."""
        return LaunchConfig(min(self.rows, 64), self.cols, 4, 2)

    def options(self) -> dict[str, int]:
        """Launch options of the Triton call."""
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return options if self.max_registers is None else {**options, "maxnreg": self.max_registers}


def padded_head_dim(head_dim: int) -> int:
    """Next power of two of head_dim, at least 16: the width of the tiles (columns past head_dim are zero)."""
    return max(16, 1 << (head_dim - 1).bit_length())


@functools.cache
def attention_config(
    which: Pass, head_dim: int, itemsize: int, block_size: int, capability: tuple[int, int]
) -> LaunchConfig:
    """Configuration of one pass; `itemsize` is 2 (bf16, fp16) or 4 (fp32), `capability` (major, minor)."""
    width = padded_head_dim(head_dim)
    if itemsize == 4:
        # ieee fp32 has no tensor core path: small tiles keep the FMA operands in registers and within 99 KB.
        return LaunchConfig(32, 32, 4, 1) if width <= 128 else LaunchConfig(16, 16, 4, 1)
    if capability[0] not in (9, 10):
        return LaunchConfig(64, 32, 4, 2) if width <= 128 else LaunchConfig(32, 32, 4, 1)
    if width > 128:
        # sm_100 keeps second operands in shared memory that sm_90 keeps in registers: 257 KB with two stages.
        return LaunchConfig(64, 64, 8, 2 if capability[0] == 9 else 1)
    if capability[0] == 10:
        # Compiled, never run: the plain pipelined form, without sm_90's register cap.
        return LaunchConfig(64, 64, 4, 2, use_tma=True)
    return _SM90[which, 64 if width <= 64 else 128, block_size > 64]


# H200, S = 16384 and 65536, 25 % density; the sweeps are in NOTES.md. Key: pass, padded head dim, blocks above 64.
_SM90: dict[tuple[Pass, int, bool], LaunchConfig] = {
    # Four unpipelined programs per multiprocessor hide loads and softmax better than two pipelined ones.
    ("forward", 128, False): LaunchConfig(64, 64, 4, 1, use_tma=True, max_registers=128),
    # Twice the rows per loaded key block; more than four warps lose more than they gain, here and below.
    ("forward", 128, True): LaunchConfig(128, 64, 4, 2, use_tma=True),
    ("forward", 64, False): LaunchConfig(64, 64, 4, 3, use_tma=True),
    ("forward", 64, True): LaunchConfig(64, 64, 4, 3, use_tma=True),
    ("dq", 128, False): LaunchConfig(64, 64, 4, 2, use_tma=True),
    ("dq", 128, True): LaunchConfig(64, 64, 4, 2, use_tma=True),
    ("dq", 64, False): LaunchConfig(64, 64, 4, 2, use_tma=True),
    ("dq", 64, True): LaunchConfig(64, 64, 4, 2, use_tma=True),
    ("dkdv", 128, False): LaunchConfig(64, 64, 4, 2, use_tma=True),
    ("dkdv", 128, True): LaunchConfig(64, 64, 4, 2, use_tma=True),
    ("dkdv", 64, False): LaunchConfig(64, 64, 4, 3, use_tma=True),
    ("dkdv", 64, True): LaunchConfig(64, 64, 4, 3, use_tma=True),
}


@functools.cache
def _capability(device_index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device_index)


def capability_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Compute capability of the tensor's device; CPU tensors (Triton's interpreter) count as sm_80: no descriptors."""
    return _capability(tensor.device.index) if tensor.is_cuda else (8, 0)


def on_device_of(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Make the tensor's device current: Triton launches on the current device, not on the operands' one."""
    if not tensor.is_cuda or tensor.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(tensor.device)
