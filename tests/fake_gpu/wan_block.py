"""Self-attention blocks around `video_sparse_attention`, in the shapes of Wan 1.3B at 480p.

Fake tensors cost nothing, so the sizes are real ones: toy sizes make Inductor split reductions that it would fuse.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import vsa_inductor as vsa
from vsa_inductor.integrations import diffusers

from .contract import everything_asked
from .generate import inductor_options, within

HEADS, HEAD_DIM = 12, 128
VIDEO_SHAPE = (21, 30, 52)

Rope = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def interleaved_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """As diffusers' WanAttnProcessor rotates: strided writes into an uninitialised tensor. x [B, S, H, D]."""
    x1, x2 = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[..., 0::2], sin[..., 1::2]
    out = torch.empty_like(x)
    out[..., 0::2] = x1 * cos - x2 * sin
    out[..., 1::2] = x1 * sin + x2 * cos
    return out.type_as(x)


def rotate_half_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The form with torch.cat, which Inductor materialises unless every user is pointwise. x [B, S, H, D]."""
    x1, x2 = x.chunk(2, dim=-1)
    rotated = torch.cat((-x2, x1), dim=-1)
    return (x.float() * cos + rotated.float() * sin).type_as(x)


def complex_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """As a product of complex numbers, for which Inductor generates no code. x [B, S, H, D]."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    rotated = pairs * torch.complex(cos[..., 0::2], sin[..., 0::2])
    return torch.view_as_real(rotated).flatten(-2).type_as(x)


def swapped_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """As our integration with diffusers rotates; sin has a sign per channel. x [B, S, H, D]."""
    return diffusers._rotate(x, diffusers.VideoGeometry(cos, sin, layout=None))  # type: ignore[arg-type]


class SelfAttention(nn.Module):
    """q, k, v and gate projections, RMSNorm of q and k, RoPE, sparse attention, output projection; bf16.

    norm: "all heads" (Wan: one norm over H * D) or "per head" (over D).
    gated: with the coarse branch, under a gate from the same hidden states.
    """

    def __init__(self, rope: Rope, norm: str, gated: bool, backend: str | tuple[str, str]) -> None:
        super().__init__()
        channels = HEADS * HEAD_DIM
        factory: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(channels, channels, **factory) for _ in range(4))
        self.to_gate = nn.Linear(channels, channels, **factory) if gated else None
        self.per_head = norm == "per head"
        width = HEAD_DIM if self.per_head else channels
        self.norm_q = nn.RMSNorm(width, eps=1e-6, **factory)
        self.norm_k = nn.RMSNorm(width, eps=1e-6, **factory)
        self.rope = rope
        self.backend = backend

    def forward(
        self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layout: vsa.TileLayout
    ) -> torch.Tensor:
        def normed(x: torch.Tensor, norm: nn.Module) -> torch.Tensor:
            if self.per_head:
                return norm(x.unflatten(-1, (HEADS, HEAD_DIM)))
            return norm(x).unflatten(-1, (HEADS, HEAD_DIM))

        q = self.rope(normed(self.to_q(hidden), self.norm_q), cos, sin)
        k = self.rope(normed(self.to_k(hidden), self.norm_k), cos, sin)
        v = self.to_v(hidden).unflatten(-1, (HEADS, HEAD_DIM))
        gate = None if self.to_gate is None else self.to_gate(hidden).unflatten(-1, (HEADS, HEAD_DIM))
        with vsa.options(backend=self.backend, strict=True):
            attended = vsa.video_sparse_attention(q, k, v, layout, sparsity=0.9, gate=gate)
        assert isinstance(attended, torch.Tensor)
        return self.to_out(attended.flatten(2))


Built = tuple[Callable[..., Any], Sequence[Any]]


def _build(
    rope: Rope = interleaved_rope,
    norm: str = "all heads",
    gated: bool = True,
    backend: str | tuple[str, str] = "triton",
) -> Built:
    layout = vsa.TileLayout.from_video_shape(*VIDEO_SHAPE, device="cuda")
    shape = (1, layout.num_tokens, HEADS * HEAD_DIM)
    hidden = torch.empty(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    table = torch.empty(1, layout.num_tokens, 1, HEAD_DIM, device="cuda")
    return SelfAttention(rope, norm, gated, backend), (hidden, table, table.clone(), layout)


# The loops that Inductor generates are one half of what is checked, the kernels of ours that a recognised prologue and
# its backward become the other: the names say which.
generic = within(lambda: vsa.lowerings.norm_rope_tile.recognising(False))


@generic
def wan() -> Built:
    return _build()


@generic
def wan_eager_backward() -> Built:
    """The eager backend's contract leaves dq as an unscaled fp32 accumulator: more post-processing to fuse."""
    return _build(backend=("triton", "eager"))


@generic
@inductor_options(realize_reads_threshold=30, realize_opcount_threshold=200, realize_acc_reads_threshold=40)
def wan_one_kernel() -> Built:
    """Inductor materialises what reads many tensors and has several users. With higher bounds nothing of ours is."""
    return _build()


@generic
def per_head_rotate_half() -> Built:
    return _build(rope=rotate_half_rope, norm="per head")


@generic
def ungated() -> Built:
    return _build(gated=False)


def wan_recognised() -> Built:
    return _build()


def rotate_half_recognised() -> Built:
    return _build(rope=rotate_half_rope)


def per_head_recognised() -> Built:
    return _build(norm="per head")


def complex_recognised() -> Built:
    return _build(rope=complex_rope)


def swapped_recognised() -> Built:
    return _build(rope=swapped_rope)


def ungated_recognised() -> Built:
    return _build(gated=False)


@within(everything_asked)
def wan_asked() -> Built:
    return _build(backend=("triton", "asking"))


@within(everything_asked)
def ungated_asked() -> Built:
    return _build(gated=False, backend=("triton", "asking"))
