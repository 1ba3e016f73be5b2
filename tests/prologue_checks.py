"""Checks of `launch_norm_rope_tile` against the reference, for `kernel_checks.py` and the gpu tests."""

from __future__ import annotations

import math

import torch

import vsa_inductor as vsa
from vsa_inductor import reference
from vsa_inductor.kernels.norm_rope_tile import PrologueConfig, launch_norm_rope_tile


def table_problem(kind, batch, tokens, heads, half, dtype):
    """Tables of a rotation and their index: "twice" every value twice and heads shared, "once", or "per head"."""
    if kind == "per head":
        index = [tokens * heads * half, heads * half, half, 1, 0]
        return [torch.randn(batch, tokens, heads, half).to(dtype) for _ in range(4)], index * 4
    step = 2 if kind == "twice" else 1
    cos, sin = (torch.randn(tokens, step * half).to(dtype) for _ in range(2))
    first, second = ([0, step * half, 0, step, offset] for offset in (0, step - 1))
    return [cos, sin, sin, cos], [*first, *second, *second, *first]


def check_norm_rope_tile(
    device, *, norm="all", rotation="interleaved", video=(2, 3, 3), heads=3, head_dim=64, block_size=64, slots=None,
    tables="twice", dtype=torch.bfloat16, weight_dtype=torch.float32, table_dtype=torch.float32, batch=1, offset=0,
    config=None, seed=0,
):  # fmt: skip
    """x is the middle of a fused projection that starts at ``offset``; ``slots`` cuts the last ones off."""
    torch.manual_seed(seed)
    # Every block's real tokens come first: the tokens of a ragged video, in tiles along T.
    layout = vsa.TileLayout.from_video_shape(*video, tile=(max(block_size, 64) // 16, 4, 4))
    slot_token = layout.slot_token[:slots].contiguous()
    tokens, width = layout.num_tokens, heads * head_dim
    x = torch.randn(batch * tokens * 3 * width + offset).to(dtype)
    weight = torch.randn(width).to(weight_dtype) if norm != "none" and weight_dtype else None
    rotation_tables, table_index, signs = [], [], []
    if rotation != "none":
        rotation_tables, table_index = table_problem(tables, batch, tokens, heads, head_dim // 2, table_dtype)
        signs = [1.0, -1.0, 1.0, 1.0]
    x_index = [tokens * 3 * width, 3 * width, head_dim, width + offset]
    arguments = (
        x.to(device), None if weight is None else weight.to(device), [t.to(device) for t in rotation_tables],
        slot_token.to(device), x_index, [0 if norm == "head" else head_dim, 0], table_index, signs,
        [batch, tokens, heads, head_dim], rotation, norm, float(head_dim if norm == "head" else width), 1e-6,
        block_size,
    )  # fmt: skip
    expected = reference.norm_rope_tile(*arguments)
    outs = [torch.full(x.shape, math.nan, dtype=x.dtype, device=device) for x in expected]
    launch_norm_rope_tile(*arguments, *outs, config=config)
    empty = arguments[3] < 0
    assert not bool(outs[0][:, :, empty].any()), "empty slots"
    # One step of the last place: the order of the sums may turn a rounding over.
    limit = torch.finfo(dtype).eps
    torch.testing.assert_close(outs[0].float(), expected[0].float(), atol=limit, rtol=limit)
    real = bool((~empty).sum() == tokens)
    if norm != "none" and real:
        torch.testing.assert_close(outs[1], expected[1], atol=1e-3, rtol=1e-4)
    if block_size:
        sums = reference.tile_sums(outs[0], block_size)
        torch.testing.assert_close(outs[2], sums, atol=1e-3, rtol=1e-5)


def _cut(heads, **kwargs):
    return PrologueConfig(64, 16, 1, heads, 4, **kwargs)


SMALL_PROLOGUE = {
    **{
        f"{norm}, {rotation}": {"norm": norm, "rotation": rotation}
        for norm in ("all", "head", "none")
        for rotation in ("interleaved", "half", "none")
    },
    "tables of every head": {"tables": "per head"},
    "tables of every head, halves": {"tables": "per head", "rotation": "half", "norm": "head"},
    "compact tables, half precision": {"tables": "once", "table_dtype": torch.float16},
    "half-precision tables, wide": {"table_dtype": torch.float16, "config": _cut(3, wide_tables=True)},
    "fp32 tables, wide": {"config": _cut(3, wide_tables=True)},
    "no weight": {"weight_dtype": None},
    "half-precision weight": {"weight_dtype": torch.float16},
    "a part of a block, no sums": {"block_size": 0, "slots": 40},
    "odd offset": {"offset": 1},
    "heads that fill no chunk": {"heads": 9, "head_dim": 32, "batch": 2},
    "blocks of 128": {"block_size": 128, "video": (3, 5, 3)},
    "loads ahead in registers": {"config": _cut(3, ahead=2)},
    "loads ahead in shared memory": {"config": _cut(3, ahead=3, in_shared=True)},
}
