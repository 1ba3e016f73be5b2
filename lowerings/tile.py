"""Lowering of `vsa::tile`: a scatter by each token's slot, so that it is an epilogue of what makes the tokens.

A gather over tile order could not fuse with a reduction over raster order, such as an RMSNorm: the normed tensor would
be written out first. Empty slots are zeroed before, by a fill of the buffer that is left out where no slot can be empty.
"""

from __future__ import annotations

from typing import Any

import torch

from . import _inductor_compat as compat


def lower(x: Any, token_slot: Any, slot_token: Any) -> Any:
    """``[B, S, H, D]`` -> contiguous ``[B, H, S_pad, D]``."""
    B, S, H, D = x.get_size()
    (S_pad,) = slot_token.get_size()
    make = compat.uninitialised if S_pad == S else compat.zeros
    out = make((B, H, S_pad, D), like=x)
    slot_of = compat.position(token_slot, S_pad)
    compat.scatter(out, x, lambda index: [index[0], index[2], slot_of(index[1]), index[3]])
    return out


OP = torch.ops.vsa.tile.default
