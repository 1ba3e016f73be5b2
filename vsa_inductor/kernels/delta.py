"""rowsum(out * dout) for the eager backward, in one launch; compiled graphs generate it.

    out [B, H, S, D] contiguous     dout [B, H, S, D] any strides, zero strides too     delta [B, H, S] fp32
One program per run of rows of one head; the products are exact in fp32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vsa_inductor.kernels.configs import on_device_of, padded_head_dim

_ELEMENTS = 8192


@triton.jit
def _delta_kernel(
    out_ptr,
    dout_ptr,
    delta_ptr,
    heads,
    length,
    num_runs,
    stride_b,
    stride_h,
    stride_s,
    stride_d,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    PADDED_D: tl.constexpr,
):
    pid = tl.program_id(0)
    head_index = pid // num_runs
    batch = (head_index // heads).to(tl.int64)
    head = (head_index % heads).to(tl.int64)
    rows = pid % num_runs * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, PADDED_D)
    inside = (rows < length)[:, None] & (cols < D)[None, :]
    first = head_index.to(tl.int64) * length
    out = tl.load(out_ptr + (first + rows)[:, None] * D + cols[None, :], mask=inside, other=0.0)
    dout_head = dout_ptr + batch * stride_b + head * stride_h
    dout_rows = dout_head + rows.to(tl.int64)[:, None] * stride_s
    dout = tl.load(dout_rows + cols[None, :] * stride_d, mask=inside, other=0.0)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    tl.store(delta_ptr + first + rows, delta, mask=rows < length)


def launch_delta(out: torch.Tensor, dout: torch.Tensor, delta: torch.Tensor) -> None:
    """Fill `delta` with the row sums.

    Args:
        out: `[B, H, S, D]` bf16, fp16 or fp32, contiguous.
        dout: `[B, H, S, D]`, any strides.
        delta: `[B, H, S]` fp32 contiguous, written everywhere.
    """
    batch, heads, length, head_dim = out.shape
    if out.numel() == 0:
        return
    width = padded_head_dim(head_dim)
    rows = max(1, _ELEMENTS // width)
    num_runs = triton.cdiv(length, rows)
    with on_device_of(out):
        _delta_kernel[(batch * heads * num_runs,)](
            out,
            dout,
            delta,
            heads,
            length,
            num_runs,
            *dout.stride(),
            ROWS=rows,
            D=head_dim,
            PADDED_D=width,
            num_warps=8,
        )
