"""Operators of the `vsa` namespace: schema, tags, fake, autograd, FLOP formula. One file per operator; torch only."""

from . import (
    attention,
    attention_backward,
    gated_combine,
    gated_combine_backward,
    norm_rope_tile,
    norm_rope_tile_backward,
    num_kept_blocks,
    select_blocks,
    tile,
    tile_sums,
    tile_sums_backward,
    tile_to_bhsd,
    transpose_blocks,
    untile,
)

__all__ = [
    "attention",
    "attention_backward",
    "gated_combine",
    "gated_combine_backward",
    "norm_rope_tile",
    "norm_rope_tile_backward",
    "num_kept_blocks",
    "select_blocks",
    "tile",
    "tile_sums",
    "tile_sums_backward",
    "tile_to_bhsd",
    "transpose_blocks",
    "untile",
]
