"""The meaning of every operator, in torch, on any device. Imports torch only."""

from .attention import attention
from .attention_backward import attention_backward
from .gated_combine import gated_combine
from .gated_combine_backward import gated_combine_backward
from .norm_rope_tile import norm_rope_tile
from .norm_rope_tile_backward import norm_rope_tile_backward
from .select_blocks import select_blocks
from .tile import tile, tile_by_scatter
from .tile_sums import tile_sums
from .tile_sums_backward import tile_sums_backward
from .tile_to_bhsd import tile_to_bhsd
from .transpose_blocks import transpose_blocks
from .untile import untile

__all__ = [
    "attention",
    "attention_backward",
    "gated_combine",
    "gated_combine_backward",
    "norm_rope_tile",
    "norm_rope_tile_backward",
    "select_blocks",
    "tile",
    "tile_by_scatter",
    "tile_sums",
    "tile_sums_backward",
    "tile_to_bhsd",
    "transpose_blocks",
    "untile",
]
