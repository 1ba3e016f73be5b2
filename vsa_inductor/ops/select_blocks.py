"""`vsa::select_blocks`: the forced kv blocks and the k best of the rest, as ascending lists. Not differentiable.

No lowering: a top-k is not a loop that Inductor generates; the kernel writes the compact lists directly, without a
dense mask and without a host synchronisation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import ArgumentError
from . import _allocate, _check, _resolve
from ._library import define


def _check_arguments(scores: Tensor, k: int, num_forced: int) -> None:
    _check.rank("scores", scores, "[B, H, N_q, N_kv]")
    _check.floating("scores", scores)
    if num_forced < 0:
        raise ArgumentError("num_forced", num_forced, "0 <= num_forced <= N_kv")
    if k < 0 or num_forced + k > scores.shape[3]:
        raise ArgumentError("k", k, f"0 <= k <= N_kv - num_forced = {scores.shape[3]} - {num_forced}")


def _implementation(scores: Tensor, k: int, num_forced: int = 0) -> tuple[Tensor, Tensor]:
    _check_arguments(scores, k, num_forced)
    kv_indices, kv_num_blocks = _allocate.block_lists(scores, num_forced + k)
    _resolve.layout_kernels(scores).select_blocks(scores, k, num_forced, kv_indices, kv_num_blocks)
    return kv_indices, kv_num_blocks


def _fake(scores: Tensor, k: int, num_forced: int = 0) -> tuple[Tensor, Tensor]:
    _check_arguments(scores, k, num_forced)
    return _allocate.block_lists(scores, num_forced + k)


select_blocks = define(
    "select_blocks(Tensor scores, SymInt k, SymInt num_forced=0) -> (Tensor kv_indices, Tensor kv_num_blocks)",
    implementation=_implementation,
    fake=_fake,
    tags=(torch.Tag.flexible_layout,),
)
