"""A model without any operator of ours: what the tool itself is proven on."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


class PlainBlock(nn.Module):
    """RMSNorm over the channels, interleaved RoPE, Linear; x [B, S, C] bf16, cos and sin [S, C / 2] fp32."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, device="cuda", dtype=torch.bfloat16))
        self.projection = nn.Linear(channels, channels, device="cuda", dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        normed = F.rms_norm(x, x.shape[-1:], self.weight, eps=1e-6)
        even, odd = normed.float().unflatten(-1, (-1, 2)).unbind(-1)
        rotated = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)
        return self.projection(rotated.to(x.dtype))


def plain_block() -> tuple[Callable[..., Any], Sequence[Any]]:
    channels, tokens = 256, 512
    x = torch.empty(1, tokens, channels, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    table = torch.empty(tokens, channels // 2, device="cuda")
    return PlainBlock(channels), (x, table, table)
