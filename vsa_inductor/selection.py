"""The coarse stage, in plain torch: tile means, scores, the blocks to attend, and the coarse branch.

Only the top-k, and the sums that come along with the tiles, are operators; the rest is good generated code.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import has_static_value

from .errors import ArgumentError


@dataclass(frozen=True)
class BlockSelection:
    """Which kv blocks each q block attends.

    Attributes:
        kv_indices: ``[B, H, N_q, M] int32``, ascending kv block ids; entries at or past the count are never read.
        kv_num_blocks: ``[B, H, N_q] int32``, how many entries of each row are meant.
    """

    kv_indices: Tensor
    kv_num_blocks: Tensor

    @classmethod
    def top_k(cls, scores: Tensor, k: int, num_forced: int = 0) -> BlockSelection:
        """The first ``num_forced`` kv blocks of every row, and the ``k`` best of the rest.

        Args:
            scores: ``[B, H, N_q, N_kv]`` floating; detached, ties to the lowest id, NaN below everything.
            k: blocks chosen by score, 1..N_kv - num_forced.
            num_forced: blocks that are always attended.

        Raises:
            ArgumentError: k or num_forced do not fit N_kv.
        """
        kv_indices, kv_num_blocks = torch.ops.vsa.select_blocks(scores.detach(), k, num_forced)
        return cls(kv_indices, kv_num_blocks)

    @classmethod
    def dense(cls, B: int, H: int, N_q: int, N_kv: int, device: torch.device | str | None = None) -> BlockSelection:
        """Every q block attends every kv block. The lists are broadcast views: N_kv ids and one count in memory."""
        ids = torch.arange(N_kv, dtype=torch.int32, device=device).expand(B, H, N_q, N_kv)
        counts = torch.full((1, 1, 1), N_kv, dtype=torch.int32, device=device).expand(B, H, N_q)
        return cls(ids, counts)

    @classmethod
    def from_block_mask(cls, mask: Tensor) -> BlockSelection:
        """The lists of a boolean block mask ``[B, H, N_q, N_kv]``; entries past the count are -1."""
        if mask.dtype != torch.bool or mask.dim() != 4:
            raise ArgumentError("mask", f"{mask.dtype} with {mask.dim()} dimensions", "a bool tensor [B, H, N_q, N_kv]")
        counts = mask.sum(-1, dtype=torch.int32)
        # A stable descending sort of the mask puts the selected ids first, ascending.
        ids = torch.sort(mask.to(torch.int8), dim=-1, descending=True, stable=True).indices.to(torch.int32)
        places = torch.arange(mask.shape[-1], device=mask.device)
        return cls(torch.where(places < counts[..., None], ids, -1), counts)


def num_kept_blocks(sparsity: float, num_blocks: int) -> int:
    """k = max(1, min(ceil((1 - sparsity) * N), N)), in float arithmetic, as video models are trained with.

    Args:
        sparsity: share of kv blocks left out, 0..1.
        num_blocks: N, for packed sequences the video's blocks only; may be symbolic.

    Returns:
        k, 1..N. Inside a compiled function whose sparsity changes from call to call: an unbacked size, so that the
        graph serves every sparsity.
    """
    if torch.compiler.is_compiling() and not has_static_value(sparsity):
        # Arithmetic on a tensor is what torch keeps of a float that is not constant.
        kept = torch.ops.vsa.num_kept_blocks(torch.ones((), dtype=torch.float64, device="cpu") - sparsity, num_blocks)
        torch._check(kept >= 1)
        torch._check(kept <= num_blocks)
        return kept
    density = (1 - sparsity) * num_blocks
    if torch.compiler.is_compiling() and not torch.compiler.is_dynamo_compiling():
        # torch.export.save knows no ceil of a symbolic number.
        whole = math.trunc(density)
        kept = torch.sym_ite(whole < density, whole + 1, whole)
    else:
        kept = math.ceil(density)
    return max(1, min(kept, num_blocks))


def tile_means(x: Tensor, kv_block_sizes: Tensor, block_size: int) -> Tensor:
    """``[B, H, S_pad, D]`` in tile order -> fp32 means ``[B, H, N, D]`` over the real tokens of each block.

    Empty slots are zero in tile order, so the sum over all slots is the sum over the tokens.
    """
    sums = torch.ops.vsa.tile_sums(x, block_size)
    return sums / kv_block_sizes.clamp(min=1)[:, None]


def coarse_scores(q_means: Tensor, k_means: Tensor, sm_scale: float) -> Tensor:
    """Scaled scores ``[B, H_q, N_q, N_kv]`` of tile means; kv heads are shared by their group of query heads."""
    groups = q_means.shape[1] // k_means.shape[1]
    if groups > 1:
        k_means = k_means.repeat_interleave(groups, dim=1)
    # The means are scaled and not the product: work behind a bmm fails in Inductor's C++ template if the backward keeps
    # the bare product (pytorch issue 185405, mode="max-autotune" on the CPU).
    return _product(q_means * sm_scale, k_means.transpose(-1, -2))


def coarse_branch(scores: Tensor, v_means: Tensor) -> Tensor:
    """softmax(scores) @ tile means of v: ``[B, H_q, N_q, D]``, one row per q block."""
    groups = scores.shape[1] // v_means.shape[1]
    if groups > 1:
        v_means = v_means.repeat_interleave(groups, dim=1)
    return _product(torch.softmax(scores, dim=-1), v_means)


def _product(x: Tensor, y: Tensor) -> Tensor:
    """``x @ y`` in their dtype, under autocast too: narrow scores tie, and select other blocks."""
    device_type = x.device.type
    # torch refuses the question for meta tensors.
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return x @ y
    with torch.autocast(device_type, enabled=False):
        return x @ y
