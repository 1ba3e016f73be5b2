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
    tables="twice", dtype=torch.bfloat16, weight_dtype=torch.float32, table_dtype=torch.float32, batch=1, offsets=(0,),
    num_plain=0, config=None, seed=0,
):  # fmt: skip
    """One operand per offset, the middle of a fused projection that starts there; ``slots`` cuts the last ones off.

    ``weight_dtype`` may be one for each normed operand.
    """
    torch.manual_seed(seed)
    # Every block's real tokens come first: the tokens of a ragged video, in tiles along T.
    layout = vsa.TileLayout.from_video_shape(*video, tile=(max(block_size, 64) // 16, 4, 4))
    slot_token = layout.slot_token[:slots].contiguous()
    tokens, width = layout.num_tokens, heads * head_dim
    num_normed = len(offsets) - num_plain
    xs = [torch.randn(batch * tokens * 3 * width + offset).to(dtype) for offset in offsets]
    dtypes = weight_dtype if isinstance(weight_dtype, tuple) else (weight_dtype,) * num_normed
    weights = [torch.randn(width).to(dtype) for dtype in dtypes] if norm != "none" and weight_dtype else []
    rotation_tables, table_index, signs = [], [], []
    if rotation != "none":
        rotation_tables, table_index = table_problem(tables, batch, tokens, heads, head_dim // 2, table_dtype)
        signs = [1.0, -1.0, 1.0, 1.0]
    x_index = [value for offset in offsets for value in (tokens * 3 * width, 3 * width, head_dim, width + offset)]
    arguments = (
        [x.to(device) for x in xs], [w.to(device) for w in weights], [t.to(device) for t in rotation_tables],
        slot_token.to(device), x_index, [0 if norm == "head" else head_dim, 0] * len(weights), table_index, signs,
        [batch, tokens, heads, head_dim], rotation, norm, num_plain, float(head_dim if norm == "head" else width),
        1e-6, block_size,
    )  # fmt: skip
    expected = reference.norm_rope_tile(*arguments)
    outs = [[torch.full(x.shape, math.nan, dtype=x.dtype, device=device) for x in part] for part in expected]
    launch_norm_rope_tile(*arguments, *outs, config=config)
    empty = arguments[3] < 0
    real = bool((~empty).sum() == tokens)
    # One step of the last place: the order of the sums may turn a rounding over.
    limit = torch.finfo(dtype).eps
    for i, (tiled, square_sums, tile_sums) in enumerate(zip(*outs, strict=True)):
        assert not bool(tiled[:, :, empty].any()), "empty slots"
        torch.testing.assert_close(tiled.float(), expected[0][i].float(), atol=limit, rtol=limit)
        if square_sums.numel() and real:
            torch.testing.assert_close(square_sums, expected[1][i], atol=1e-3, rtol=1e-4)
        if block_size:
            sums = reference.tile_sums(tiled, block_size)
            torch.testing.assert_close(tile_sums, sums, atol=1e-3, rtol=1e-5)


SMALL_PROLOGUE = {
    **{
        f"{norm}, {rotation}": {"norm": norm, "rotation": rotation}
        for norm in ("all", "head", "none")
        for rotation in ("interleaved", "half", "none")
    },
    "q, k, v": {"offsets": (0, 8, 2), "num_plain": 1},
    "q, k, v, halves, per head": {
        "offsets": (0, 0, 0), "num_plain": 1, "norm": "head", "rotation": "half", "batch": 2, "heads": 6,
    },
    "q, two v beside it": {
        "offsets": (0, 2, 4), "num_plain": 2, "config": PrologueConfig(4, 1, 4, 2, 16, 3), "video": (6, 5, 3),
        "batch": 2,
    },
    "q, k, no v, loads as they come": {
        "offsets": (0, 2), "config": PrologueConfig(2, 2, 4, 1, 16), "video": (6, 5, 3), "heads": 5,
    },
    "alignments that differ": {"offsets": (0, 1, 3, 0), "num_plain": 2},
    "weights that differ": {"offsets": (0, 0, 0), "num_plain": 1, "weight_dtype": (torch.float32, torch.float16)},
    "plain operands alone": {"offsets": (0, 3), "num_plain": 2, "rotation": "half"},
    "tables of every head": {"tables": "per head", "offsets": (0, 0)},
    "tables of every head, halves": {"tables": "per head", "rotation": "half", "norm": "head"},
    "compact tables, half precision": {"tables": "once", "table_dtype": torch.float16},
    "half-precision tables": {"table_dtype": torch.float16},
    "no weight": {"weight_dtype": None},
    "half-precision weight": {"weight_dtype": torch.float16},
    "a part of a block, no sums": {"block_size": 0, "slots": 40, "offsets": (0, 0), "num_plain": 1},
    "heads that fill no chunk": {"heads": 9, "head_dim": 32, "batch": 2, "config": PrologueConfig(4, 4, 4)},
    "blocks of 128": {"block_size": 128, "video": (3, 5, 3), "offsets": (0, 0), "num_plain": 1},
    "loads as they come": {"config": PrologueConfig(16, 1, 4, 1)},
}  # fmt: skip
