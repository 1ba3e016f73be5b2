"""The Triton launchers on a CUDA device, against the dense fp32 reference."""

from __future__ import annotations

import pytest
import torch
from kernel_checks import (
    SMALL_ATTENTION,
    SMALL_COMBINE,
    check_attention,
    check_combine,
    check_layout,
    check_select,
    check_select_cases,
    check_transpose,
)
from prologue_checks import SMALL_PROLOGUE, check_norm_rope_tile

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0),
        reason="needs a CUDA device of compute capability 8.0 or later",
    ),
]

RAGGED = {"sizes": "ragged", "poison": True, "full": False}
LARGE = {"batch": 2, "heads": 4, "kv_heads": 2, "num_q": 9, "num_kv": 11, "width": 6}


@pytest.mark.parametrize("name", SMALL_ATTENTION)
def test_attention_small(name):
    check_attention("cuda", **SMALL_ATTENTION[name])


@pytest.mark.parametrize("head_dim", [16, 64, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_attention_dtypes(head_dim, dtype):
    check_attention("cuda", head_dim=head_dim, dtype=dtype, **RAGGED, **LARGE)


@pytest.mark.parametrize("tail", [-1, 1])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("block_size", [64, 128, 256])
def test_attention_blocks(block_size, layout, tail):
    check_attention("cuda", head_dim=128, block_size=block_size, layout=layout, tail=tail, **RAGGED, **LARGE)


@pytest.mark.parametrize("width", [1, 2, 3, 5, 7])
def test_attention_many_waves(width):
    check_attention("cuda", heads=16, kv_heads=16, head_dim=128, num_q=33, num_kv=33, width=width)


@pytest.mark.parametrize("shape", [(5, 7, 3), (40, 33, 33), (300, 1100, 40), (1, 1, 1)])
def test_transpose_blocks(shape):
    num_q, num_kv, width = shape
    check_transpose("cuda", num_q=num_q, num_kv=num_kv, width=width, heads=3)


def test_select_blocks_cases():
    check_select_cases("cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    "num_kv, k, num_forced", [(37, 37, 0), (37, 5, 3), (1000, 100, 0), (16384, 2000, 7), (65, 0, 2)]
)
def test_select_blocks(num_kv, k, num_forced, dtype):
    for levels in (None, 3):
        check_select("cuda", shape=(1, 2, 5, num_kv), k=k, num_forced=num_forced, dtype=dtype, levels=levels)


@pytest.mark.parametrize("head_dim", [48, 64, 128])
def test_layout(head_dim):
    check_layout("cuda", tokens=700, slots=1024, head_dim=head_dim)


@pytest.mark.parametrize("name", SMALL_COMBINE)
def test_combine_small(name):
    check_combine("cuda", **SMALL_COMBINE[name])


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("block_size", [64, 128, 256])
@pytest.mark.parametrize("head_dim", [32, 64, 80, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_combine(dtype, head_dim, block_size, gated):
    check_combine("cuda", dtype=dtype, head_dim=head_dim, block_size=block_size, gated=gated, heads=12, num_blocks=17)


@pytest.mark.parametrize("name", SMALL_PROLOGUE)
def test_norm_rope_tile_small(name):
    check_norm_rope_tile("cuda", **SMALL_PROLOGUE[name])


@pytest.mark.parametrize("rotation", ["interleaved", "half", "none"])
@pytest.mark.parametrize("norm", ["all", "head", "none"])
@pytest.mark.parametrize("heads, head_dim", [(1, 256), (5, 128), (12, 128), (24, 64), (40, 128), (16, 32)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norm_rope_tile(dtype, heads, head_dim, norm, rotation):
    for block_size in (64, 256):
        check_norm_rope_tile(
            "cuda", dtype=dtype, heads=heads, head_dim=head_dim, norm=norm, rotation=rotation, block_size=block_size,
            video=(9, 10, 11), batch=2, weight_dtype=dtype,
        )  # fmt: skip
