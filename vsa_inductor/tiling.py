"""TileLayout: where every token of a video stands in tile order.

Raster order is row-major over (T, H, W), after the packed prefix segments. In tile order each tile is one block of
``block_size`` slots; a ragged edge tile holds its real tokens first (row-major inside the tile), then empty slots. A
prefix segment is cut into blocks of its own, so that no block straddles two segments.

The tables are closed-form arithmetic on ``arange``: they can be built inside a compiled function from symbolic sizes,
and nothing is cached by shape, which would make one graph per shape.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import ArgumentError

BLOCK_SIZES = (64, 128, 256)
_MOST_SLOTS = 2**31 - 1


@dataclass(frozen=True, eq=False, repr=False)
class TileLayout:
    """The tile layout of one video, passed to :func:`vsa_inductor.video_sparse_attention` as an argument.

    A frozen dataclass and a pytree (``torch.export.register_dataclass``); make it with :meth:`from_video_shape`.

    Attributes:
        token_slot: ``[S] int32``, the slot of each token.
        slot_token: ``[S_pad] int32``, the token in each slot, -1 where the slot is empty.
        kv_block_sizes: ``[N] int32``, real tokens per block, 1..block_size.
        video_shape: (T, H, W) in tokens.
        tile: extent of a tile on each axis, in tokens.
        prefix: lengths of the packed segments that stand before the video, in tokens.
    """

    token_slot: Tensor
    slot_token: Tensor
    kv_block_sizes: Tensor
    video_shape: tuple[int, int, int]
    tile: tuple[int, int, int]
    prefix: tuple[int, ...]

    def __repr__(self) -> str:
        return (
            f"TileLayout(video_shape={self.video_shape}, tile={self.tile}, prefix={self.prefix}, "
            f"num_tokens={self.num_tokens}, num_blocks={self.num_blocks}, device={self.token_slot.device})"
        )

    @property
    def block_size(self) -> int:
        """Slots per block: the volume of a tile."""
        return self.tile[0] * self.tile[1] * self.tile[2]

    @property
    def num_tokens(self) -> int:
        """S: tokens of the prefix and the video."""
        return self.token_slot.shape[0]

    @property
    def num_slots(self) -> int:
        """S_pad: num_blocks * block_size."""
        return self.slot_token.shape[0]

    @property
    def num_blocks(self) -> int:
        """N: blocks of the prefix and the video."""
        return self.kv_block_sizes.shape[0]

    @property
    def num_prefix_blocks(self) -> int:
        """Blocks that hold prefix tokens; they come first."""
        return sum(_cdiv(n, self.block_size) for n in self.prefix)

    @property
    def num_video_blocks(self) -> int:
        """Blocks that hold video tokens: one per tile."""
        return self.num_blocks - self.num_prefix_blocks

    def to(self, device: torch.device | str) -> TileLayout:
        """The same layout with its tables on ``device``."""
        return TileLayout(
            self.token_slot.to(device),
            self.slot_token.to(device),
            self.kv_block_sizes.to(device),
            self.video_shape,
            self.tile,
            self.prefix,
        )

    @classmethod
    def from_video_shape(
        cls,
        T: int,
        H: int,
        W: int,
        tile: tuple[int, int, int] = (4, 4, 4),
        prefix: Sequence[int] = (),
        device: torch.device | str | None = None,
    ) -> TileLayout:
        """The layout of a video of T x H x W tokens after ``prefix`` segments.

        Args:
            T, H, W: extent of the video in tokens, each >= 1; may be symbolic inside a compiled function.
            tile: extent of a tile; its volume must be 64, 128 or 256.
            prefix: lengths of packed segments that precede the video, each >= 0.
            device: where the tables live.

        Raises:
            ArgumentError: a size is below its least value or the tile's volume is not supported.
        """
        for name, size in (("T", T), ("H", H), ("W", W)):
            if not _is_whole(size) or size < 1:
                raise ArgumentError(name, size, "an integer >= 1")
        if (
            len(tile) != 3
            or not all(map(_is_whole, tile))
            or any(extent < 1 for extent in tile)
            or math.prod(tile) not in BLOCK_SIZES
        ):
            raise ArgumentError("tile", tuple(tile), f"three extents >= 1 with a volume in {BLOCK_SIZES}")
        if not isinstance(prefix, (tuple, list)) or not all(_is_whole(length) and length >= 0 for length in prefix):
            raise ArgumentError("prefix", prefix, "a sequence of segment lengths >= 0")

        blocks = _cdiv(T, tile[0]) * _cdiv(H, tile[1]) * _cdiv(W, tile[2])
        slots = (blocks + sum(_cdiv(length, math.prod(tile)) for length in prefix)) * math.prod(tile)
        if slots > _MOST_SLOTS:
            raise ArgumentError(
                "T, H, W", (T, H, W), f"at most {_MOST_SLOTS} slots: the tables are int32; here {slots}"
            )

        tables = [_prefix_tables(length, math.prod(tile), device) for length in prefix]
        tables.append(_video_tables(T, H, W, tile, device))
        token_slot, slot_token, sizes = tables[0]
        if len(tables) > 1:
            token_slots, slot_tokens = [], []
            tokens = slots = 0
            for part_token_slot, part_slot_token, _ in tables:
                token_slots.append(part_token_slot + slots)
                slot_tokens.append(torch.where(part_slot_token < 0, part_slot_token, part_slot_token + tokens))
                tokens += part_token_slot.shape[0]
                slots += part_slot_token.shape[0]
            token_slot, slot_token = torch.cat(token_slots), torch.cat(slot_tokens)
            sizes = torch.cat([part_sizes for _, _, part_sizes in tables])
        return cls(token_slot, slot_token, sizes, (T, H, W), (tile[0], tile[1], tile[2]), tuple(prefix))


torch.export.register_dataclass(TileLayout, serialized_type_name="vsa_inductor.TileLayout")
# Tables and numbers only. A saved program holds its example inputs, and `torch.export.load` fails over types that
# torch.load was not told of.
torch.serialization.add_safe_globals([TileLayout])


def _is_whole(value: object) -> bool:
    # Plain numbers first: the rest is not for traced code, where a size is an int as well.
    return isinstance(value, int) or isinstance(value, (torch.SymInt, numbers.Integral))  # noqa: SIM101


def _cdiv(a: int, b: int) -> int:
    return (a + b - 1) // b


def _arange(n: int, device: torch.device | str | None) -> Tensor:
    return torch.arange(n, dtype=torch.int32, device=device)


def _prefix_tables(length: int, block_size: int, device: torch.device | str | None) -> tuple[Tensor, Tensor, Tensor]:
    """token_slot, slot_token and block sizes of one segment, counted from its own start."""
    num_blocks = _cdiv(length, block_size)
    slots = _arange(num_blocks * block_size, device)
    sizes = (length - _arange(num_blocks, device) * block_size).clamp(max=block_size)
    return _arange(length, device), torch.where(slots < length, slots, -1), sizes


def _video_tables(
    T: int, H: int, W: int, tile: tuple[int, int, int], device: torch.device | str | None
) -> tuple[Tensor, Tensor, Tensor]:
    """token_slot, slot_token and block sizes of the video, counted from its own start."""
    a, b, c = tile
    block_size = a * b * c
    nT, nH, nW = _cdiv(T, a), _cdiv(H, b), _cdiv(W, c)

    token = _arange(T * H * W, device)
    t, h, w = token // (H * W), token // W % H, token % W
    it, ih, iw = t // a, h // b, w // c
    height, width = (H - ih * b).clamp(max=b), (W - iw * c).clamp(max=c)
    local = ((t - it * a) * height + h - ih * b) * width + w - iw * c
    token_slot = ((it * nH + ih) * nW + iw) * block_size + local

    def position_and_extent(block: Tensor) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
        """First (t, h, w) of a tile, and how many tokens of the video it holds on each axis."""
        first = (block // (nH * nW) * a, block // nW % nH * b, block % nW * c)
        extent = ((T - first[0]).clamp(max=a), (H - first[1]).clamp(max=b), (W - first[2]).clamp(max=c))
        return first, extent

    slot = _arange(nT * nH * nW * block_size, device)
    local = slot % block_size
    (t, h, w), (depth, height, width) = position_and_extent(slot // block_size)
    t, h, w = t + local // (height * width), h + local // width % height, w + local % width
    slot_token = torch.where(local < depth * height * width, (t * H + h) * W + w, -1)

    # From block ids, not as an outer product over the axes: broadcasting would guard on every axis having one tile.
    _, (depth, height, width) = position_and_extent(_arange(nT * nH * nW, device))
    return token_slot, slot_token, depth * height * width
