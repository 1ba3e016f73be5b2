"""`vsa::num_kept_blocks`: how many kv blocks a density keeps, as a size that the graph does not know beforehand.

A Python float that changes from call to call is a scalar tensor in a graph, and torch makes every size that is computed
from one a constant of the graph. Behind this operator the count is an unbacked size, and one graph serves every
sparsity. A constant float never comes here. Runs on the host; no lowering, not differentiable.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..errors import ArgumentError
from . import _check
from ._library import define


def _check_arguments(density: Tensor, num_blocks: int) -> None:
    if density.dim() != 0:
        raise ArgumentError("density", f"{density.dim()} dimensions", "a scalar tensor")
    _check.floating("density", density)
    if num_blocks < 1:
        raise ArgumentError("num_blocks", num_blocks, "an integer >= 1")


def _implementation(density: Tensor, num_blocks: int) -> int:
    _check_arguments(density, num_blocks)
    value = density.item()
    if not 0 <= value <= 1:
        raise ArgumentError("density", value, "0 <= density <= 1")
    return max(1, min(math.ceil(value * num_blocks), num_blocks))


def _fake(density: Any, num_blocks: int) -> torch.SymInt:
    _check_arguments(density, num_blocks)
    # Not `get_ctx().new_dynamic_size()`, which torch.compile only allows where the user has set a flag of Dynamo's.
    return density.fake_mode.shape_env.create_unbacked_symint()


num_kept_blocks = define(
    "num_kept_blocks(Tensor density, SymInt num_blocks) -> SymInt",
    implementation=_implementation,
    fake=_fake,
    tags=(),
    batched=False,
)
