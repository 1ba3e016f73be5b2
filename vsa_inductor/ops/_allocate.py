"""The one place that decides sizes, strides and dtypes of outputs: fakes and implementations both allocate here."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def tiled(x: Tensor, slot_token: Tensor) -> Tensor:
    """Raster ``[B, S, H, D]`` -> contiguous ``[B, H, S_pad, D]``."""
    return x.new_empty(x.shape[0], x.shape[2], slot_token.shape[0], x.shape[3])


def untiled(x: Tensor, token_slot: Tensor) -> Tensor:
    """``[B, H, S_pad, D]`` -> contiguous ``[B, S, H, D]``."""
    return x.new_empty(x.shape[0], token_slot.shape[0], x.shape[1], x.shape[3])


def combine_gradients(
    dout: Tensor, out: Tensor | None, coarse: Tensor, slot_token: Tensor, needs_dgate: bool, needs_dcoarse: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dout in tile order, delta ``[B, H, S_pad]``, dgate ``[B, S, H, D]``, dcoarse ``[B, H, N, D]``; else ``[0]``."""
    dout_tiles = tiled(dout, slot_token)
    return (
        dout_tiles,
        coarse.new_empty((0,) if out is None else dout_tiles.shape[:3]),
        dout.new_empty(dout.shape if needs_dgate else (0,)),
        coarse.new_empty(coarse.shape if needs_dcoarse else (0,)),
    )


def normed_tiles(
    xs: Sequence[Tensor], slot_token: Tensor, sizes: Sequence[int], norm: str, num_plain: int, block_size: int
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Of each flat x with ``sizes`` B, S, H, D: tiles ``[B, H, S_pad, D]``, square sums and tile sums.

    Square sums are ``[B, S]``, ``[B, S, H]`` with norm ``"head"``, ``[0]`` with ``"none"`` and for the last
    ``num_plain``; tile sums ``[B, H, N, D]``, ``[0]`` with block size 0. Both fp32, fp64 for fp64.
    """
    B, S, H, D = sizes
    tiles = [x.new_empty(B, H, slot_token.shape[0], D) for x in xs]
    shape = {"all": (B, S), "head": (B, S, H), "none": (0,)}[norm]
    shapes = [shape] * (len(xs) - num_plain) + [(0,)] * num_plain
    dtype = statistics_dtype(xs[0].dtype)
    square_sums = [x.new_empty(shape, dtype=dtype) for x, shape in zip(xs, shapes, strict=True)]
    return tiles, square_sums, [block_sums(x, block_size) if block_size else x.new_empty(0, dtype=dtype) for x in tiles]


def norm_gradients(x: Tensor, sizes: Sequence[int], needs_dx: bool, needs_dweight: bool) -> tuple[Tensor, Tensor]:
    """dx ``[B, S, H, D]`` in the dtype of x, and dweight ``[H, D]`` fp32, fp64 for fp64; ``[0]`` where not needed."""
    B, S, H, D = sizes
    dx = x.new_empty((B, S, H, D) if needs_dx else (0,))
    return dx, x.new_empty((H, D) if needs_dweight else (0,), dtype=statistics_dtype(x.dtype))


def block_sums(x: Tensor, block_size: int) -> Tensor:
    """Tiles ``[B, H, S_pad, D]`` -> ``[B, H, N, D]`` fp32, fp64 for fp64."""
    B, H, S_pad, D = x.shape
    return x.new_empty(B, H, S_pad // block_size, D, dtype=statistics_dtype(x.dtype))


def spread_rows(rows: Tensor, block_size: int, dtype: torch.dtype) -> Tensor:
    """Rows ``[B, H, N, D]`` -> ``[B, H, N * block_size, D]`` in ``dtype``."""
    B, H, N, D = rows.shape
    return rows.new_empty(B, H, N * block_size, D, dtype=dtype)


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
