"""Reference of `vsa::tile_to_bhsd`: several raster tensors to tile order."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .tile import tile


def tile_to_bhsd(xs: Sequence[Tensor], slot_token: Tensor) -> list[Tensor]:
    """Each ``[B, S, H, D]`` -> contiguous ``[B, H, S_pad, D]``."""
    return [tile(x, slot_token, slot_token) for x in xs]
