"""Argument checks shared by implementations and fakes: static facts only, before anything is launched."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false

from ..errors import ArgumentError

FLOATING = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def differ(given: int, expected: int) -> bool:
    """Whether two sizes are known to differ. Of unbacked sizes, which may, the graph asserts equality when it runs."""
    different = given != expected
    # Dynamo takes a symbolic comparison for a bool.
    if torch.compiler.is_dynamo_compiling() or isinstance(different, torch.SymBool):
        different = guard_or_false(different)
        if not different:
            torch._check(given == expected)
    return different


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
    if differ(given, expected):
        raise ArgumentError(name, given, f"{what}, {expected}")


def whole_blocks(name: str, slots: int, block_size: int) -> None:
    """``slots`` are whole blocks of a size that the attention kernels have."""
    if block_size not in (64, 128, 256):
        raise ArgumentError("block_size", block_size, "64, 128 or 256")
    if differ(slots % block_size, 0):
        raise ArgumentError(name, slots, f"a multiple of block_size, {block_size}")


def slot_tables(x_name: str, x: Tensor, token_slot: Tensor, slot_token: Tensor) -> None:
    for name, table in (("token_slot", token_slot), ("slot_token", slot_token)):
        rank(name, table, "[S]")
        int32(name, table)
        same_device(name, table, x_name, x)


def block_lists(
    q: Tensor, kv_indices: Tensor, kv_num_blocks: Tensor, kv_block_sizes: Tensor, num_q_blocks: int, num_kv_blocks: int
) -> None:
    """The lists and sizes fit q ``[B, H, ...]`` and the numbers of blocks."""
    for name, x, layout, dims in (
        ("kv_indices", kv_indices, "[B, H, N_q, M]", 4),
        ("kv_num_blocks", kv_num_blocks, "[B, H, N_q]", 3),
        ("kv_block_sizes", kv_block_sizes, "[N_kv]", 1),
    ):
        if x.dim() != dims:
            rank(name, x, layout)
        if x.dtype != torch.int32:
            int32(name, x)
        if x.device != q.device:
            same_device(name, x, "q", q)
    rows = (
        (0, "the batch of q", q.shape[0]),
        (1, "the heads of q", q.shape[1]),
        (2, "the number of q blocks", num_q_blocks),
    )
    for name, x in (("kv_indices", kv_indices), ("kv_num_blocks", kv_num_blocks)):
        for axis, what, expected in rows:
            if differ(x.shape[axis], expected):
                size(f"{name}.shape[{axis}]", x.shape[axis], what, expected)
    if differ(kv_block_sizes.shape[0], num_kv_blocks):
        size("kv_block_sizes.shape[0]", kv_block_sizes.shape[0], "the number of kv blocks", num_kv_blocks)


def operands(q: Tensor, k: Tensor, v: Tensor, layout: str, heads: int) -> None:
    """What q, k, v have in common in any order of their dimensions; ``heads`` is the place of H in ``layout``."""
    # Compared first and named only when they differ: this runs on every eager call.
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            rank(name, x, layout)
        if x.dtype not in FLOATING:
            floating(name, x)
        if x.dtype != q.dtype:
            raise ArgumentError(name, x.dtype, f"the dtype of q, {q.dtype}")
        if x.device != q.device:
            same_device(name, x, "q", q)
        if differ(x.shape[0], q.shape[0]):
            size(f"{name}.shape[0]", x.shape[0], "the batch of q", q.shape[0])
        if x.shape[3] != q.shape[3]:
            size(f"{name}.shape[3]", x.shape[3], "the head dim of q", q.shape[3])
    H_q, H_kv = q.shape[heads], k.shape[heads]
    if differ(v.shape[heads], H_kv):
        size(f"v.shape[{heads}]", v.shape[heads], "the heads of k", H_kv)
    if q.shape[3] == 0:
        raise ArgumentError("q.shape[3]", 0, "a head dim >= 1")
    if H_kv == 0 or (H_kv != H_q and H_q % H_kv != 0):
        raise ArgumentError(f"k.shape[{heads}]", H_kv, f"a divisor of the heads of q, {H_q}")


def attention_operands(q: Tensor, k: Tensor, v: Tensor, block_size: int) -> tuple[int, int]:
    """Checks q, k, v in tile order and returns (N_q, N_kv)."""
    operands(q, k, v, "[B, H, S_pad, D]", 1)
    if block_size not in (64, 128, 256):
        raise ArgumentError("block_size", block_size, "64, 128 or 256")
    S_q, S_kv = q.shape[2], k.shape[2]
    if differ(v.shape[2], S_kv):
        size("v.shape[2]", v.shape[2], "the slots of k", S_kv)
    for name, slots in (("q", S_q), ("k", S_kv)):
        if differ(slots % block_size, 0):
            raise ArgumentError(f"{name}.shape[2]", slots, f"a multiple of block_size, {block_size}")
    return S_q // block_size, S_kv // block_size
