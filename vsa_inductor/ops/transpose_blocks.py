"""`vsa::transpose_blocks`: the q blocks of every kv block, compressed rows per head. Called in the backward formula.

No lowering: a counting sort is not a loop that Inductor generates.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import ArgumentError
from . import _allocate, _check, _resolve
from ._library import define


def _check_arguments(kv_indices: Tensor, kv_num_blocks: Tensor, num_kv_blocks: int) -> None:
    _check.rank("kv_indices", kv_indices, "[B, H, N_q, M]")
    _check.rank("kv_num_blocks", kv_num_blocks, "[B, H, N_q]")
    _check.int32("kv_indices", kv_indices)
    _check.int32("kv_num_blocks", kv_num_blocks)
    _check.same_device("kv_num_blocks", kv_num_blocks, "kv_indices", kv_indices)
    for i in range(3):
        _check.size(f"kv_num_blocks.shape[{i}]", kv_num_blocks.shape[i], "that of kv_indices", kv_indices.shape[i])
    if num_kv_blocks < 0:
        raise ArgumentError("num_kv_blocks", num_kv_blocks, "an integer >= 0")


def _implementation(kv_indices: Tensor, kv_num_blocks: Tensor, num_kv_blocks: int) -> tuple[Tensor, Tensor]:
    _check_arguments(kv_indices, kv_num_blocks, num_kv_blocks)
    q_indices, q_offsets = _allocate.transposed_lists(kv_indices, num_kv_blocks)
    kernels = _resolve.layout_kernels(kv_indices)
    kernels.transpose_blocks(kv_indices, kv_num_blocks, num_kv_blocks, q_indices, q_offsets)
    return q_indices, q_offsets


def _fake(kv_indices: Tensor, kv_num_blocks: Tensor, num_kv_blocks: int) -> tuple[Tensor, Tensor]:
    _check_arguments(kv_indices, kv_num_blocks, num_kv_blocks)
    return _allocate.transposed_lists(kv_indices, num_kv_blocks)


transpose_blocks = define(
    "transpose_blocks(Tensor kv_indices, Tensor kv_num_blocks, SymInt num_kv_blocks)"
    " -> (Tensor q_indices, Tensor q_offsets)",
    implementation=_implementation,
    fake=_fake,
    tags=(torch.Tag.flexible_layout,),
)
