"""Argument checks shared by implementations and fakes: static facts only, before anything is launched."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import ArgumentError

FLOATING = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def rank(name: str, x: Tensor, layout: str) -> None:
    """``x`` has as many dimensions as ``layout``, which is written ``[B, S, H, D]``."""
    if x.dim() != layout.count(",") + 1:
        raise ArgumentError(name, f"{x.dim()} dimensions", layout)


def floating(name: str, x: Tensor) -> None:
    if x.dtype not in FLOATING:
        raise ArgumentError(name, x.dtype, f"one of {FLOATING}")


def int32(name: str, x: Tensor) -> None:
    if x.dtype != torch.int32:
        raise ArgumentError(name, x.dtype, "torch.int32")


def same_device(name: str, x: Tensor, other_name: str, other: Tensor) -> None:
    if x.device != other.device:
        raise ArgumentError(name, f"device {x.device}", f"the device of {other_name}, {other.device}")


def size(name: str, given: int, what: str, expected: int) -> None:
    """One size that another argument fixes. ``what`` names that argument's size."""
    if given != expected:
        raise ArgumentError(name, given, f"{what}, {expected}")


def slot_tables(x_name: str, x: Tensor, token_slot: Tensor, slot_token: Tensor) -> None:
    for name, table in (("token_slot", token_slot), ("slot_token", slot_token)):
        rank(name, table, "[S]")
        int32(name, table)
        same_device(name, table, x_name, x)


def block_lists(
    q: Tensor, kv_indices: Tensor, kv_num_blocks: Tensor, kv_block_sizes: Tensor, num_q_blocks: int, num_kv_blocks: int
) -> None:
    """The lists and sizes fit q ``[B, H, ...]`` and the numbers of blocks."""
    for name, x, layout in (
        ("kv_indices", kv_indices, "[B, H, N_q, M]"),
        ("kv_num_blocks", kv_num_blocks, "[B, H, N_q]"),
        ("kv_block_sizes", kv_block_sizes, "[N_kv]"),
    ):
        rank(name, x, layout)
        int32(name, x)
        same_device(name, x, "q", q)
    for name, x in (("kv_indices", kv_indices), ("kv_num_blocks", kv_num_blocks)):
        size(f"{name}.shape[0]", x.shape[0], "the batch of q", q.shape[0])
        size(f"{name}.shape[1]", x.shape[1], "the heads of q", q.shape[1])
        size(f"{name}.shape[2]", x.shape[2], "the number of q blocks", num_q_blocks)
    size("kv_block_sizes.shape[0]", kv_block_sizes.shape[0], "the number of kv blocks", num_kv_blocks)


def attention_operands(q: Tensor, k: Tensor, v: Tensor, block_size: int) -> tuple[int, int]:
    """Checks q, k, v in tile order and returns (N_q, N_kv)."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        rank(name, x, "[B, H, S_pad, D]")
        floating(name, x)
        if x.dtype != q.dtype:
            raise ArgumentError(name, x.dtype, f"the dtype of q, {q.dtype}")
        same_device(name, x, "q", q)
        size(f"{name}.shape[0]", x.shape[0], "the batch of q", q.shape[0])
        size(f"{name}.shape[3]", x.shape[3], "the head dim of q", q.shape[3])
    if block_size not in (64, 128, 256):
        raise ArgumentError("block_size", block_size, "64, 128 or 256")
    size("v.shape[1]", v.shape[1], "the heads of k", k.shape[1])
    size("v.shape[2]", v.shape[2], "the slots of k", k.shape[2])
    if k.shape[1] != q.shape[1] and (k.shape[1] == 0 or q.shape[1] % k.shape[1] != 0):
        raise ArgumentError("k.shape[1]", k.shape[1], f"a divisor of the heads of q, {q.shape[1]}")
    for name, x in (("q", q), ("k", k)):
        if x.shape[2] % block_size != 0:
            raise ArgumentError(f"{name}.shape[2]", x.shape[2], f"a multiple of block_size, {block_size}")
    return q.shape[2] // block_size, k.shape[2] // block_size
