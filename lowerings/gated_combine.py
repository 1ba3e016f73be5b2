"""Lowering of `vsa::gated_combine`: one gather over raster order, fused into the gate's producer and what reads it."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._sympy.functions import FloorDiv

from vsa_inductor.ops._allocate import statistics_dtype

from . import _inductor_compat as compat
from . import untile

_aten = torch.ops.aten


def lower(out: Any, gate: Any, coarse: Any, token_slot: Any, slot_token: Any, block_size: int) -> Any:
    """``[B, H, S_pad, D]``, ``[B, S, H, D]`` or None, ``[B, H, N, D]`` -> ``[B, S, H, D]``."""
    wide = statistics_dtype(out.get_dtype())
    weighted = rows_of_tokens(coarse, token_slot, slot_token, block_size)
    if gate is not None:
        weighted = compat.aten(_aten.mul.Tensor, compat.convert(gate, wide), weighted)
    sparse = compat.convert(untile.gather(out, token_slot), wide)
    return compat.convert(compat.aten(_aten.add.Tensor, sparse, weighted), out.get_dtype())


def rows_of_tokens(rows: Any, token_slot: Any, slot_token: Any, block_size: int) -> Any:
    """One row per block, given to every token of the block: ``[B, H, N, D]`` -> ``[B, S, H, D]``."""
    B, H, _, D = rows.get_size()
    (S,), (S_pad,) = token_slot.get_size(), slot_token.get_size()
    load, slot_of = rows.make_loader(), compat.position(token_slot, S_pad, rows)

    def element(index: Any) -> Any:
        return load([index[0], index[2], FloorDiv(slot_of(index[1]), block_size), index[3]])

    return compat.pointwise((B, S, H, D), rows, element)


OP = torch.ops.vsa.gated_combine.default
