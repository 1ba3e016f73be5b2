"""Tensor descriptors of `[B, H, S, D]` operands for the copy engine (sm_90 and later).

Built on the host, so that no global Triton allocator is needed, and passed by value, so that CUDA graphs can capture
them.
"""

from __future__ import annotations

import functools

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from vsa_inductor.kernels.configs import LaunchConfig


def descriptor_ready(x: torch.Tensor) -> bool:
    """Whether the copy engine can address `[B, H, S, D]`: last stride 1, else 16-byte multiples, no zero stride."""
    return x.data_ptr() % 16 == 0 and x.numel() > 0 and _strides_ready(x.shape, x.stride(), x.element_size())


def foldable(x: torch.Tensor) -> bool:
    """Whether batch and head of `[B, H, S, D]` can be one axis.

    With a batch coordinate of its own the forward's loop is 451 instructions, folded 410 (sm_90, triton 3.6).
    """
    return x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1)


def streaming_plan(config: LaunchConfig, *operands: torch.Tensor) -> tuple[LaunchConfig, bool]:
    """The configuration that fits the streamed operands, and whether their batch and head are folded."""
    if not config.use_tma:
        return config, False
    if not all(map(descriptor_ready, operands)):
        return config.by_pointers(), False
    return config, all(map(foldable, operands))


def row_descriptor(x: torch.Tensor, rows: int, width: int, folded: bool) -> TensorDescriptor:
    """Descriptor that loads `rows` x `width` boxes of one head; columns past D read as zero.

    Args:
        x: `[B, H, S, D]` for which `descriptor_ready` holds, and `foldable` with `folded`.
        rows, width: the box.
        folded: address `[1, B * H, S, D]` instead.
    """
    # Validation on every launch would cost more than the rest of the launcher: only the base differs between calls.
    template = _template(x.shape, x.stride(), x.dtype, rows, width, folded)
    descriptor = TensorDescriptor.__new__(TensorDescriptor)
    descriptor.__dict__.update(template.__dict__)
    descriptor.base = x
    return descriptor


@functools.lru_cache(maxsize=512)
def _strides_ready(shape: torch.Size, strides: tuple[int, ...], itemsize: int) -> bool:
    unit = 16 // itemsize
    return strides[3] == 1 and all(
        s % unit == 0 and s > 0 for s, n in zip(strides[:3], shape[:3], strict=True) if n > 1
    )


@functools.lru_cache(maxsize=512)
def _template(
    shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype, rows: int, width: int, folded: bool
) -> TensorDescriptor:
    batch, heads, length, head_dim = shape
    # The stride of an axis of length 1 is arbitrary in torch and must still be valid for the copy engine.
    unit = 16 // dtype.itemsize
    row = strides[2] if length > 1 else -(-head_dim // unit) * unit
    head = strides[1] if heads > 1 else length * row
    sample = strides[0] if batch > 1 else heads * head
    if folded:
        batch, heads = 1, batch * heads
        head = head if heads > 1 and shape[1] > 1 else sample
        sample = heads * head
    carrier = torch.empty(0, dtype=dtype)
    template = TensorDescriptor(carrier, [batch, heads, length, head_dim], [sample, head, row, 1], [1, 1, rows, width])
    template.base = None
    return template
