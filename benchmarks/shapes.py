"""Problems that the benchmarks of attention run."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks.attention_lists import lists_named

TOKENS = (4096, 8192, 16384, 32768, 65536, 131072)
QUICK_TOKENS = (4096, 16384)


@dataclass(frozen=True)
class AttentionShape:
    """One block-sparse self-attention problem; `density` is selected over all kv blocks.

    `lists`: "random", or a name that attention_lists.py knows.
    """

    tokens: int
    batch: int = 1
    heads: int = 8
    head_dim: int = 128
    block_size: int = 64
    density: float = 0.25
    seed: int = 0
    lists: str = "random"

    @property
    def num_blocks(self) -> int:
        return self.tokens // self.block_size

    @property
    def selected(self) -> int:
        """Listed kv blocks per q block."""
        return max(1, int(self.num_blocks * self.density))

    def config(self, **more: Any) -> dict[str, Any]:
        """The JSON of the record: shape, heads, head_dim, block_size, density, seed, lists."""
        fields = asdict(self)
        shape = [fields.pop("batch"), self.heads, fields.pop("tokens"), self.head_dim]
        return {"shape": shape, **fields, "dtype": "bfloat16", **more}

    def flops(self, mode: str, *, dense: bool = False) -> float:
        """Multiply-adds count two; backward is 2.5 forwards whatever the kernels recompute."""
        keys = self.tokens if dense else self.selected * self.block_size
        forward = 4.0 * self.batch * self.heads * self.tokens * keys * self.head_dim
        return forward if mode == "forward" else 2.5 * forward

    def tensors(self, count: int) -> list[torch.Tensor]:
        """`count` random `[B, H, S, D]` bf16 CUDA tensors."""
        generator = torch.Generator("cuda").manual_seed(self.seed)
        size = (self.batch, self.heads, self.tokens, self.head_dim)
        return [torch.randn(size, device="cuda", dtype=torch.bfloat16, generator=generator) for _ in range(count)]

    def block_lists(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Sorted kv_indices, kv_num_blocks and (full) kv_block_sizes, int32 on CUDA."""
        n = self.num_blocks
        sizes = torch.full((n,), self.block_size, device="cuda", dtype=torch.int32)
        if self.lists != "random":
            return *lists_named(self.lists, self.heads, n, self.selected, self.seed), sizes
        generator = torch.Generator("cuda").manual_seed(self.seed)
        scores = torch.rand((self.batch, self.heads, n, n), device="cuda", generator=generator)
        indices = scores.topk(self.selected, -1).indices.sort(-1).values.int()
        counts = torch.full((self.batch, self.heads, n), self.selected, device="cuda", dtype=torch.int32)
        return indices, counts, sizes
