"""Dense masked attention in fp64, differentiated by autograd: block-sparse attention written another way.

Shares nothing with `vsa_inductor.reference`: the lists become a mask over every pair of tokens, and torch's softmax and
logsumexp do the rest.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def block_mask(kv_indices: Tensor, kv_num_blocks: Tensor, num_kv_blocks: int) -> Tensor:
    """The lists as a bool mask ``[B, H, N_q, N_kv]``, entry by entry."""
    B, H, N_q, _ = kv_indices.shape
    mask = torch.zeros(B * H * N_q, num_kv_blocks, dtype=torch.bool)
    rows = zip(kv_indices.flatten(0, 2).tolist(), kv_num_blocks.flatten().tolist(), strict=True)
    for row, (ids, count) in enumerate(rows):
        for block in ids[:count]:
            mask[row, block] = True
    return mask.view(B, H, N_q, num_kv_blocks).to(kv_indices.device)


def token_mask(kv_indices: Tensor, kv_num_blocks: Tensor, kv_block_sizes: Tensor, block_size: int) -> Tensor:
    """Which query slot attends which key slot: bool ``[B, H, S_q, S_kv]``."""
    blocks = block_mask(kv_indices, kv_num_blocks, kv_block_sizes.shape[0])
    pairs = blocks.repeat_interleave(block_size, 2).repeat_interleave(block_size, 3)
    return pairs & key_is_real(kv_block_sizes, block_size)


def key_is_real(kv_block_sizes: Tensor, block_size: int) -> Tensor:
    """bool ``[S_kv]``: whether a slot holds a key, by the size of its block."""
    return (torch.arange(block_size, device=kv_block_sizes.device) < kv_block_sizes[:, None]).flatten()


def dense_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sm_scale: float) -> tuple[Tensor, Tensor]:
    """out ``[B, H_q, S_q, D]`` and lse_log2 ``[B, H_q, S_q]`` in fp64; a row without a key gives 0 and -inf."""
    q, k, v = q.double(), k.double(), v.double()
    groups = q.shape[1] // k.shape[1]
    # Keys that nobody attends may hold NaN, and 0 * NaN is NaN.
    attended = mask.any(2)[..., None]
    k, v = (x.repeat_interleave(groups, 1).masked_fill(~attended, 0) for x in (k, v))
    row_has_key = mask.any(-1)
    scores = (q @ k.transpose(-1, -2)) * sm_scale
    # A dead row scores 0 everywhere and is dropped after the softmax, so that no derivative meets inf - inf.
    scores = scores.masked_fill(~mask & row_has_key[..., None], -math.inf)
    out = torch.softmax(scores, -1) @ v
    lse = torch.logsumexp(scores, -1) / math.log(2)
    return out.masked_fill(~row_has_key[..., None], 0), lse.masked_fill(~row_has_key, -math.inf)


def dense_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    sm_scale: float,
    dout: Tensor | None,
    dlse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """out, lse_log2, dq, dk, dv in fp64 of the loss sum(out * dout) + sum(lse_log2 * dlse) over rows with a key."""
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    out, lse = dense_attention(q, k, v, mask, sm_scale)
    loss = out.new_zeros(())
    if dout is not None:
        loss = loss + (out * dout.double()).sum()
    if dlse is not None:
        row_has_key = mask.any(-1)
        loss = loss + (lse[row_has_key] * dlse.double()[row_has_key]).sum()
    dq, dk, dv = torch.autograd.grad(loss, (q, k, v), allow_unused=True, materialize_grads=True)
    return out.detach(), lse.detach(), dq, dk, dv
