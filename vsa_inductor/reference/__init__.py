"""The meaning of every operator, in torch, on any device. Imports torch only."""

from .attention import attention
from .attention_backward import attention_backward
from .norm_rope_tile import norm_rope_tile
from .select_blocks import select_blocks
from .tile import tile, tile_by_scatter
from .tile_to_bhsd import tile_to_bhsd
from .transpose_blocks import transpose_blocks
from .untile import untile
from .untile_blocks import untile_blocks

__all__ = [
    "attention",
    "attention_backward",
    "norm_rope_tile",
    "select_blocks",
    "tile",
    "tile_by_scatter",
    "tile_to_bhsd",
    "transpose_blocks",
    "untile",
    "untile_blocks",
]
