"""The one place that decides sizes, strides and dtypes of outputs: fakes and implementations both allocate here."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def tiled(x: Tensor, slot_token: Tensor) -> Tensor:
    """Raster ``[B, S, H, D]`` -> contiguous ``[B, H, S_pad, D]``."""
    return x.new_empty(x.shape[0], x.shape[2], slot_token.shape[0], x.shape[3])


def untiled(x: Tensor, token_slot: Tensor) -> Tensor:
    """``[B, H, *, D]``, slots or blocks, -> contiguous ``[B, S, H, D]``."""
    return x.new_empty(x.shape[0], token_slot.shape[0], x.shape[1], x.shape[3])


def normed_tiles(x: Tensor, slot_token: Tensor, sizes: Sequence[int], per_head: bool) -> tuple[Tensor, Tensor]:
    """Tiles ``[B, H, S_pad, D]`` of a flat x with ``sizes`` B, S, H, D, and fp32 sums ``[B, S]`` or ``[B, S, H]``."""
    B, S, H, D = sizes
    sums = x.new_empty((B, S, H) if per_head else (B, S), dtype=statistics_dtype(x.dtype))
    return x.new_empty(B, H, slot_token.shape[0], D), sums


def block_lists(scores: Tensor, num_listed: int) -> tuple[Tensor, Tensor]:
    """kv_indices ``[B, H, N_q, M]`` and kv_num_blocks ``[B, H, N_q]``, int32."""
    B, H, N_q, _ = scores.shape
    return (
        scores.new_empty(B, H, N_q, num_listed, dtype=torch.int32),
        scores.new_empty(B, H, N_q, dtype=torch.int32),
    )


def transposed_lists(kv_indices: Tensor, num_kv_blocks: int) -> tuple[Tensor, Tensor]:
    """q_indices ``[B, H, N_q * M]`` and q_offsets ``[B, H, N_kv + 1]``, int32."""
    B, H, N_q, M = kv_indices.shape
    return kv_indices.new_empty(B, H, N_q * M), kv_indices.new_empty(B, H, num_kv_blocks + 1)


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """dtype of lse and delta: fp32, or fp64 for fp64 operands (the reference only)."""
    return torch.promote_types(dtype, torch.float32)


def attention_outputs(q: Tensor, return_lse: bool) -> tuple[Tensor, Tensor]:
    """out, contiguous like the shape of q, and lse_log2 ``[B, H, S_q]`` or, if not wanted, ``[0]``."""
    lse = q.new_empty(q.shape[:3] if return_lse else (0,), dtype=statistics_dtype(q.dtype))
    return q.new_empty(q.shape), lse


def gradients(q: Tensor, k: Tensor, v: Tensor, needs_dq: bool, needs_dkv: bool) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv, contiguous; ``[0]`` for the half that is not needed."""
    return (
        q.new_empty(q.shape if needs_dq else (0,)),
        k.new_empty(k.shape if needs_dkv else (0,)),
        v.new_empty(v.shape if needs_dkv else (0,)),
    )
