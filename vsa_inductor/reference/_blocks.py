"""What the attention references share: rows of q blocks with their gathered kv blocks, a bounded number at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

LOG2_E = math.log2(math.e)

# Elements of the gathered keys of one chunk. Bounds the memory to O(S * k * block) whatever S is: 32 MiB in fp32.
_CHUNK_ELEMENTS = 8 << 20


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp32, or fp64 for fp64 operands, which only the reference takes (for gradcheck)."""
    return torch.promote_types(dtype, torch.float32)


def as_blocks(x: Tensor, block_size: int) -> Tensor:
    """``[B, H, S, D]`` -> ``[B * H * N, block_size, D]``."""
    B, H, S, D = x.shape
    return x.reshape(B * H * (S // block_size), block_size, D)


@dataclass
class Rows:
    """A run of (batch, head, q block) rows, C of them.

    Attributes:
        span: where the rows stand among all B * H * N_q.
        block_ids: ``[C, M]``, each list entry as an index into ``as_blocks(k)``; 0 where the entry is not valid.
        key_valid: ``[C, M * block_size]``, whether the key slot is a real key of a listed block.
    """

    span: slice
    block_ids: Tensor
    key_valid: Tensor

    def gather(self, blocks: Tensor, dtype: torch.dtype) -> Tensor:
        """``[C, M * block_size, D]`` in ``dtype``: the listed blocks, with zeros wherever there is no key."""
        rows = blocks[self.block_ids].flatten(1, 2).to(dtype)
        # Masked, not multiplied: what stands in a slot without a key may be NaN.
        return rows.masked_fill(~self.key_valid[..., None], 0)


def iterate_rows(
    kv_indices: Tensor, kv_num_blocks: Tensor, kv_block_sizes: Tensor, num_kv_heads: int, block_size: int, head_dim: int
) -> Iterator[Rows]:
    """All rows in order, in chunks that bound the gathered keys."""
    B, H, N_q, M = kv_indices.shape
    N_kv = kv_block_sizes.shape[0]
    device = kv_indices.device
    heads = torch.arange(H, device=device) // max(H // max(num_kv_heads, 1), 1)
    first_block = ((torch.arange(B, device=device)[:, None] * num_kv_heads + heads) * N_kv).view(B, H, 1)
    first_block = first_block.expand(B, H, N_q).reshape(-1, 1)
    ids, counts = kv_indices.reshape(-1, M), kv_num_blocks.reshape(-1, 1)
    places, slots = torch.arange(M, device=device), torch.arange(block_size, device=device)
    step = max(1, _CHUNK_ELEMENTS // max(1, M * block_size * head_dim))
    for start in range(0, ids.shape[0], step):
        span = slice(start, start + step)
        listed = places < counts[span]
        block = torch.where(listed, ids[span], 0)
        sizes = torch.where(listed, kv_block_sizes[block] if N_kv else 0, 0)
        valid = (slots < sizes[..., None]).flatten(1)
        yield Rows(span, torch.where(listed, block + first_block[span], 0), valid)
