"""Lowering of `vsa::tile`: one kernel of ours where the whole prologue or the sums over tiles can be had from it, a
scatter behind any other reduction, a gather everywhere else.

Our kernel (`lowerings/norm_rope_tile.py`) norms, rotates, tiles and sums over each tile in one pass.
Scatter, by each token's slot: it is an epilogue of the reduction over raster order (an RMSNorm) that makes the tokens,
which a gather over tile order could not fuse with. Empty slots are zeroed before by a fill of the buffer; where no slot
is empty it is left out.
Gather, by each slot's token: writes every slot once, zeros included, reads every token once, and fuses with what reads
the tiles in their order: delta, or transposes.
"""

from __future__ import annotations

from typing import Any

import torch

from . import _inductor_compat as compat
from . import attention_backward, norm_rope_tile


def lower(x: Any, token_slot: Any, slot_token: Any) -> Any:
    """``[B, S, H, D]`` -> contiguous ``[B, H, S_pad, D]``."""
    tiled = norm_rope_tile.lower(x, slot_token)
    if tiled is not None:
        return tiled
    for reader in attention_backward.readers_of(compat.current_node()):
        attention_backward.free_dout(reader)
    return scatter(x, token_slot, slot_token) if compat.reads_a_reduction(x) else gather(x, slot_token)


def scatter(x: Any, token_slot: Any, slot_token: Any) -> Any:
    """One store per token at its slot, into a buffer whose empty slots are zero."""
    B, S, H, D = x.get_size()
    (S_pad,) = slot_token.get_size()
    make = compat.uninitialised if S_pad == S else compat.zeros
    out = make((B, H, S_pad, D), like=x)
    slot_of = compat.position(token_slot, S_pad, out)
    compat.scatter(out, x, lambda index: [index[0], index[2], slot_of(index[1]), index[3]])
    return out


def gather(x: Any, slot_token: Any) -> Any:
    """One masked load per slot."""
    B, S, H, D = x.get_size()
    (S_pad,) = slot_token.get_size()
    load, token_of = x.make_loader(), compat.optional_position(slot_token, S, x)

    def element(index: Any) -> Any:
        token, present = token_of(index[2])
        return compat.where_present(present, lambda: load([index[0], token, index[1], index[3]]))

    return compat.pointwise((B, H, S_pad, D), x, element)


OP = torch.ops.vsa.tile.default
