"""What runs the operators that take no backend argument: tile, untile, select_blocks and their kin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor


class LayoutKernels(Protocol):
    """Each method fills every element of its preallocated, contiguous outputs."""

    def tile(self, xs: Sequence[Tensor], slot_token: Tensor, outs: Sequence[Tensor]) -> None: ...

    def norm_rope_tile(self, xs: Sequence[Tensor], *args: Any) -> None: ...

    def norm_rope_tile_backward(self, dtiled: Tensor, *args: Any) -> None: ...

    def tile_sums(self, x: Tensor, block_size: int, out: Tensor) -> None: ...

    def untile(self, x: Tensor, token_slot: Tensor, out: Tensor) -> None: ...

    def gated_combine(self, out: Tensor, gate: Tensor | None, *args: Any) -> None: ...

    def gated_combine_backward(self, dout: Tensor, out: Tensor | None, gate: Tensor | None, *args: Any) -> None: ...

    def select_blocks(
        self, scores: Tensor, k: int, num_forced: int, kv_indices: Tensor, kv_num_blocks: Tensor
    ) -> None: ...

    def transpose_blocks(
        self, kv_indices: Tensor, kv_num_blocks: Tensor, num_kv_blocks: int, q_indices: Tensor, q_offsets: Tensor
    ) -> None: ...
