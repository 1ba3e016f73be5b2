"""Operators of the `vsa` namespace: schema, tags, fake, autograd, FLOP formula. One file per operator; torch only."""

from . import (
    attention,
    attention_backward,
    norm_rope_tile,
    select_blocks,
    tile,
    tile_to_bhsd,
    transpose_blocks,
    untile,
    untile_blocks,
)

__all__ = [
    "attention",
    "attention_backward",
    "norm_rope_tile",
    "select_blocks",
    "tile",
    "tile_to_bhsd",
    "transpose_blocks",
    "untile",
    "untile_blocks",
]
