"""Block-sparse attention, backward, in Triton: two passes, no atomics, bitwise the same every run.

    q,dout [B, Hq, Sq, D]      dq     [B, Hq, Sq, D]     lse_log2, delta [B, Hq, Sq] fp32
    k,v    [B, Hkv, Skv, D]    dk,dv  [B, Hkv, Skv, D]   q_indices, q_offsets: the transposed lists, compressed

Seven products where a fused kernel needs five; in exchange no fp32 accumulator in memory, no reductions, no order.
"""

from __future__ import annotations

import math

import torch

from vsa_inductor.kernels.attention_backward_dkdv import dkdv_kernel
from vsa_inductor.kernels.attention_backward_dq import dq_kernel
from vsa_inductor.kernels.configs import (
    LaunchConfig,
    attention_config,
    capability_of,
    on_device_of,
    padded_head_dim,
)
from vsa_inductor.kernels.descriptors import row_descriptor, streaming_plan


def launch_attention_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lse_log2: torch.Tensor,
    delta: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_num_blocks: torch.Tensor,
    q_indices: torch.Tensor | None,
    q_offsets: torch.Tensor | None,
    kv_block_sizes: torch.Tensor,
    sm_scale: float,
    block_size: int,
    dq: torch.Tensor | None,
    dk: torch.Tensor | None,
    dv: torch.Tensor | None,
    dq_config: LaunchConfig | None = None,
    dkdv_config: LaunchConfig | None = None,
) -> None:
    """Write the final gradients; a pass whose outputs are None is not launched.

    Args:
        dout, q: `[B, Hq, Sq, D]` bf16, fp16 or fp32, last stride 1, rows 16-byte aligned.
        k, v: `[B, Hkv, Skv, D]`, the same dtype.
        lse_log2: `[B, Hq, Sq]` fp32, base-2 log-sum-exp of the forward.
        delta: `[B, Hq, Sq]` fp32, rowsum(out * dout) - dlse_log2 / ln 2.
        kv_indices, kv_num_blocks: the lists `[B, Hq, N_q, M]` and counts `[B, Hq, N_q]`, int32, any strides.
        q_indices, q_offsets: their transpose `[B, Hq, N_q * M]`, `[B, Hq, N_kv + 1]`, int32 contiguous; may be None
            without dk and dv.
        kv_block_sizes: `[N_kv]` int32.
        dq, dk, dv: contiguous outputs in the operand dtype; every slot is written.
        dq_config, dkdv_config: override the table (benchmarks and tests).
    """
    batch, heads, q_len, head_dim = q.shape
    kv_heads, kv_len = k.shape[1], k.shape[2]
    width = padded_head_dim(head_dim)
    scale_log2 = sm_scale * math.log2(math.e)
    lse_log2, delta = lse_log2.contiguous(), delta.contiguous()
    table = (head_dim, q.element_size(), block_size, capability_of(q))
    with on_device_of(q):
        if dq is not None and dq.numel() > 0:
            config, folded = streaming_plan(dq_config or attention_config("dq", *table), k, v)
            num_row_tiles = q_len // config.rows
            dq_kernel[(batch * heads * num_row_tiles,)](
                q,
                k,
                v,
                dout,
                row_descriptor(k, config.cols, width, folded) if config.use_tma else None,
                row_descriptor(v, config.cols, width, folded) if config.use_tma else None,
                lse_log2,
                delta,
                kv_indices,
                kv_num_blocks,
                kv_block_sizes,
                dq,
                sm_scale,
                scale_log2,
                heads,
                heads // kv_heads,
                num_row_tiles,
                *q.stride()[:3],
                *k.stride()[:3],
                *v.stride()[:3],
                *dout.stride()[:3],
                *kv_indices.stride(),
                *kv_num_blocks.stride(),
                ROWS=config.rows,
                COLS=config.cols,
                BLOCK=block_size,
                D=head_dim,
                PADDED_D=width,
                USE_TMA=config.use_tma,
                FOLDED=folded,
                STAGES=config.num_stages,
                **config.options(),
            )
        if dk is not None and dv is not None and dk.numel() > 0:
            if q_indices is None or q_offsets is None:
                raise ValueError("q_indices and q_offsets: None given; dk and dv need the transposed lists")
            config, folded = streaming_plan(dkdv_config or attention_config("dkdv", *table), q, dout)
            num_row_tiles = kv_len // config.rows
            dkdv_kernel[(batch * kv_heads * num_row_tiles,)](
                q,
                k,
                v,
                dout,
                row_descriptor(q, config.cols, width, folded) if config.use_tma else None,
                row_descriptor(dout, config.cols, width, folded) if config.use_tma else None,
                lse_log2,
                delta,
                q_indices,
                q_offsets,
                kv_block_sizes,
                dk,
                dv,
                sm_scale,
                scale_log2,
                kv_heads,
                num_row_tiles,
                q_len,
                q_indices.shape[-1],
                kv_len // block_size,
                *q.stride()[:3],
                *k.stride()[:3],
                *v.stride()[:3],
                *dout.stride()[:3],
                GROUP=heads // kv_heads,
                ROWS=config.rows,
                COLS=config.cols,
                BLOCK=block_size,
                D=head_dim,
                PADDED_D=width,
                USE_TMA=config.use_tma,
                FOLDED=folded,
                STAGES=config.num_stages,
                **config.options(),
            )
