"""Self-attention of a Wan block in four versions, and the problems they are measured on.

Every version takes the projected ``q, k, v, gate [B, S, H*D]``: RMSNorm over all heads together on q and k, interleaved
rotary embedding, attention, and ``[B, S, H*D]`` back. The sparse ones add the gated coarse branch; dense has none.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention

import vsa_inductor as vsa
from vsa_inductor.selection import coarse_branch, coarse_scores, num_kept_blocks, tile_means

VIDEO_SHAPES = {"480p": (21, 30, 52), "720p": (21, 45, 80), "tiny": (3, 5, 9)}
SPARSE = ("ours_eager", "ours_compiled", "flex_compiled")
PROVIDERS = ("ours_eager", "ours_compiled", "dense_compiled", "flex_compiled")

# FlexAttention's default forward for blocks of 64 is slower; its backward has a valid tile only with max-autotune.
FLEX_FORWARD: dict[str, Any] = {"BLOCK_M": 64, "BLOCK_N": 64, "fwd_num_warps": 4, "fwd_num_stages": 3}
FLEX_STEP: dict[str, Any] = {"max_autotune": True, "max_autotune_gemm_backends": "ATEN"}

Lists = tuple[Tensor, Tensor]


class Rope(NamedTuple):
    """``[1, S, 1, D]`` fp32 each, every angle twice in a row."""

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True)
class BlockCase:
    """One problem: a video, its heads, how much is attended, and where the lists come from.

    ``lists``: "selected" (what the coarse stage picks on random inputs), "random" or "overlapNN" (given, neighbouring
    query tiles share NN % of their lists).
    """

    video: str
    heads: int
    sparsity: float
    lists: str = "selected"
    batch: int = 1
    head_dim: int = 128
    seed: int = 0
    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16

    @property
    def tokens(self) -> int:
        return math.prod(VIDEO_SHAPES[self.video])

    @property
    def channels(self) -> int:
        return self.heads * self.head_dim

    @property
    def name(self) -> str:
        return f"{self.video} H{self.heads} {self.sparsity:g} {self.lists}"

    def layout(self) -> vsa.TileLayout:
        return vsa.TileLayout.from_video_shape(*VIDEO_SHAPES[self.video], device=self.device)

    def config(self, **more: Any) -> dict[str, Any]:
        """The JSON of the record."""
        num_blocks = self.layout().num_blocks
        return {
            "shape": [self.batch, self.tokens, self.heads, self.head_dim],
            "video": self.video,
            "video_shape": VIDEO_SHAPES[self.video],
            "heads": self.heads,
            "head_dim": self.head_dim,
            "block_size": 64,
            "slots": num_blocks * 64,
            "sparsity": self.sparsity,
            "density": round(num_kept_blocks(self.sparsity, num_blocks) / num_blocks, 5),
            "lists": self.lists,
            "seed": self.seed,
            "dtype": str(self.dtype).removeprefix("torch."),
            **more,
        }

    def generator(self, offset: int = 0) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(self.seed + offset)

    def randn(self, count: int, *size: int) -> list[Tensor]:
        """``count`` random tensors, the same ones for every provider."""
        generator = self.generator()
        return [torch.randn(size, device=self.device, dtype=self.dtype, generator=generator) for _ in range(count)]

    def given_lists(self) -> Lists | None:
        """kv_indices and kv_num_blocks where the selection is given, None where it is computed."""
        if self.lists == "selected":
            return None
        overlap = None if self.lists == "random" else int(self.lists.removeprefix("overlap")) / 100
        num_blocks = self.layout().num_blocks
        kept = num_kept_blocks(self.sparsity, num_blocks)
        return block_lists(self.batch, self.heads, num_blocks, kept, overlap, self.generator(1))


def block_lists(
    batch: int, heads: int, num_blocks: int, kept: int, overlap: float | None, generator: torch.Generator
) -> Lists:
    """Sorted random lists of ``kept`` ids per q block.

    Args:
        overlap: share of a list that the next q block (the neighbour along W) keeps; None draws every list on its own.

    Returns:
        kv_indices ``[B, H, N, kept]`` and kv_num_blocks ``[B, H, N]``, int32 on the generator's device.
    """
    device = generator.device
    rows = (batch, heads, num_blocks)
    if overlap is None:
        ids = torch.rand((*rows, num_blocks), device=device, generator=generator).topk(kept, -1).indices
    else:
        # Where more than half is kept, the lists of neighbours must meet in some blocks.
        entering = kept - max(round(overlap * kept), 2 * kept - num_blocks)
        stream = _stream_of_ids(rows, kept + entering, kept + (num_blocks - 1) * entering, generator)
        # A window over a stream in which no id returns too early: what a step adds is new, the rest is the neighbour's.
        ids = stream.unfold(-1, kept, entering) if entering else stream[:, :, None, :kept].expand(*rows, kept)
        ids = ids[:, :, :num_blocks]
    return ids.sort(-1).values.int(), torch.full(rows, kept, device=device, dtype=torch.int32)


def _stream_of_ids(rows: tuple[int, int, int], apart: int, length: int, generator: torch.Generator) -> Tensor:
    """Random block ids ``[B, H, length or more]``, every id at most once in ``apart`` consecutive places.

    Each round holds all ids. From round to round they are shuffled inside segments, which are short enough that no id
    comes back too early and whose bounds move, so that the ids mix.
    """
    num_blocks = rows[-1]
    segment = max(1, num_blocks - apart + 1)
    places = torch.arange(num_blocks, device=generator.device)
    ids = torch.rand(rows, device=generator.device, generator=generator).argsort(-1)
    rounds = [ids]
    for number in range(1, -(-length // num_blocks)):
        segments = (places + number * segment // 2 % segment) // segment
        noise = torch.rand(rows, device=generator.device, generator=generator, dtype=torch.float64)
        order = (segments + noise).argsort(-1)
        ids = ids.gather(-1, order)
        rounds.append(ids)
    return torch.cat(rounds, -1)


def rope_tables(case: BlockCase) -> Rope:
    """Rotary tables over (T, H, W): a third of the channels for each axis, what is left over to T."""
    across = 2 * (case.head_dim // 6)
    widths = (case.head_dim - 2 * across, across, across)
    shape = VIDEO_SHAPES[case.video]
    angles = []
    for axis, (extent, width) in enumerate(zip(shape, widths, strict=True)):
        frequencies = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
        angle = torch.outer(torch.arange(extent, dtype=torch.float64), frequencies).repeat_interleave(2, dim=1)
        place = [1, 1, 1, width]
        place[axis] = extent
        angles.append(angle.view(place).expand(*shape, width))
    table = torch.cat(angles, -1).reshape(1, case.tokens, 1, case.head_dim)
    return Rope(table.cos().float().to(case.device), table.sin().float().to(case.device))


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """The interleaved rotation of ``[B, S, H, D]``, written with strided stores as diffusers' Wan does."""
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = rope.cos[..., 0::2], rope.sin[..., 1::2]
    out = torch.empty_like(x)
    out[..., 0::2] = even * cos - odd * sin
    out[..., 1::2] = even * sin + odd * cos
    return out.type_as(x)


def norm_and_rotate(x: Tensor, weight: Tensor, rope: Rope, heads: int) -> Tensor:
    """RMSNorm over ``[B, S, H*D]`` and the rotation: ``[B, S, H, D]``."""
    normed = F.rms_norm(x, (x.shape[-1],), weight, 1e-6)
    return rotate(normed.unflatten(2, (heads, -1)), rope)


def ours(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor, layout: vsa.TileLayout, sparsity: float, lists: Lists | None
) -> Tensor:
    """vsa_inductor; with given lists the same stages around :func:`vsa_inductor.block_sparse_attention`."""
    if lists is None:
        out = vsa.video_sparse_attention(q, k, v, layout, sparsity=sparsity, gate=gate)
        assert isinstance(out, Tensor)
        return out
    tables = (layout.token_slot, layout.slot_token)
    q, k, v = (torch.ops.vsa.tile(x, *tables) for x in (q, k, v))
    sizes, block = layout.kv_block_sizes, layout.block_size
    sparse = vsa.block_sparse_attention(q, k, v, lists[0], lists[1], sizes, block_size=block)
    assert isinstance(sparse, Tensor)
    means = [tile_means(x, sizes, block) for x in (q, k, v)]
    coarse = coarse_branch(coarse_scores(means[0], means[1], q.shape[-1] ** -0.5), means[2])
    return torch.ops.vsa.gated_combine(sparse, gate, coarse, *tables, block)


class _Gather(torch.autograd.Function):
    """Rows of ``x`` by ``rows``, zero where -1; its backward gathers, where that of indexing adds with atomics."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(rows, back)
        return _rows(x, rows)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None, None]:
        _, back = ctx.saved_tensors
        return _rows(dout, back), None, None


def _rows(x: Tensor, rows: Tensor) -> Tensor:
    return torch.where((rows >= 0)[:, None, None], x[:, rows.clamp(min=0)], 0)


def flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    layout: vsa.TileLayout,
    sparsity: float,
    lists: Lists | None,
    kernel_options: Any = None,
) -> Tensor:
    """The same computation in plain torch around FlexAttention. Ragged blocks are masked, full ones are not."""
    sizes, block = layout.kv_block_sizes, layout.block_size
    q, k, v = (_Gather.apply(x, layout.slot_token, layout.token_slot).transpose(1, 2) for x in (q, k, v))
    means = [tile_means(x, sizes, block) for x in (q, k, v)]
    scores = coarse_scores(means[0], means[1], q.shape[-1] ** -0.5)
    if lists is None:
        kept = num_kept_blocks(sparsity, layout.num_blocks)
        ids = scores.detach().topk(kept, -1).indices
    else:
        ids = lists[0]
    mask = flex_mask(ids, sizes, block, torch.is_grad_enabled())
    sparse = flex_attention(q, k, v, block_mask=mask, kernel_options=kernel_options)
    coarse = coarse_branch(scores, means[2])
    per_slot = coarse[:, :, :, None].expand(-1, -1, -1, block, -1).flatten(2, 3)
    out, per_token = (
        _Gather.apply(x.transpose(1, 2), layout.token_slot, layout.slot_token) for x in (sparse, per_slot)
    )
    return (out + gate * per_token).to(out.dtype)


def flex_mask(ids: Tensor, sizes: Tensor, block: int, needs_grad: bool) -> BlockMask:
    """The BlockMask of lists ``[B, H, N, kept]`` in any order; queries in empty slots attend as any other."""
    num_blocks = sizes.shape[0]
    full = sizes[ids] == block

    def part(wanted: Tensor) -> Lists:
        # Width N, which the transposition inside BlockMask takes for the number of kv blocks.
        first = torch.where(wanted, ids, num_blocks).sort(-1).values
        padded = F.pad(torch.where(first < num_blocks, first, 0), (0, num_blocks - ids.shape[-1]))
        return wanted.sum(-1, dtype=torch.int32), padded.int()

    def real(b: Tensor, h: Tensor, q_index: Tensor, kv_index: Tensor) -> Tensor:
        return kv_index % block < sizes[kv_index // block]

    slots = num_blocks * block
    return BlockMask.from_kv_blocks(
        *part(~full), *part(full), BLOCK_SIZE=block, mask_mod=real, seq_lengths=(slots, slots),
        compute_q_blocks=needs_grad,
    )  # fmt: skip


def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Dense attention ``[B, S, H, D]``, by cuDNN on a GPU."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if q.device.type != "cuda":
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


class Block:
    """One provider on one problem: ``forward()`` and ``step()``, on the same inputs for every provider.

    A step is the forward and the gradients of q, k, v and, where there is one, the gate, from a given output gradient.
    """

    def __init__(self, provider: str, case: BlockCase) -> None:
        self.provider, self.case = provider, case
        size = (case.batch, case.tokens, case.channels)
        *self.inputs, self.dout = case.randn(5, *size)
        weights = [1 + 0.1 * w for w in case.randn(2, case.channels)]
        rope, layout, lists = rope_tables(case), case.layout(), case.given_lists()

        def around(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
            def block(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
                q, k = (norm_and_rotate(x, w, rope, case.heads) for x, w in zip((q, k), weights, strict=True))
                v, gate = (x.unflatten(2, (case.heads, -1)) for x in (v, gate))
                return attend(q, k, v, gate).flatten(2)

            return block

        def sparse(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
            return ours(q, k, v, gate, layout, case.sparsity, lists)

        def dense_only(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
            return dense(q, k, v)

        def searched(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
            return flex(q, k, v, gate, layout, case.sparsity, lists)

        def fixed(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
            return flex(q, k, v, gate, layout, case.sparsity, lists, FLEX_FORWARD if case.device == "cuda" else None)

        whole: dict[str, Any] = {"fullgraph": True, "dynamic": False}
        if provider == "ours_eager":
            self.inference = self.training = around(sparse)
        elif provider == "ours_compiled":
            self.inference = self.training = vsa.compile(around(sparse), dynamic=False)
        elif provider == "dense_compiled":
            self.inference = self.training = torch.compile(around(dense_only), **whole)
        else:
            self.inference = torch.compile(around(fixed), **whole)
            self.training = torch.compile(around(searched), options=FLEX_STEP, **whole)

    def forward(self) -> Tensor:
        with torch.no_grad():
            return self.inference(*self.inputs)

    def training_forward(self) -> Tensor:
        return self.training(*(x.requires_grad_() for x in self.inputs))

    def backward(self, out: Tensor) -> tuple[Tensor, ...]:
        leaves = self.inputs if self.provider in SPARSE else self.inputs[:3]
        return torch.autograd.grad(out, leaves, self.dout)

    def step(self) -> tuple[Tensor, ...]:
        return self.backward(self.training_forward())
