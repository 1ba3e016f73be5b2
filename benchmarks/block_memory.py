"""What a stack of Wan attention blocks holds: peak memory of a training step, and what lives between two layers.

A block here has its projections, is compiled on its own, and adds to its input, as in a model. Kinds of attention:
"gated" (ours with a projected gate), "ungated" (ours without a coarse branch, which has the weights of the dense
model) and "dense"; "dense model" and "ungated model" are whole transformer blocks, with cross-attention to 512 tokens
of text and the feed-forward network, as Wan has them. With ``checkpointed`` every block runs under
``torch.utils.checkpoint`` (``use_reentrant=False``).

Two measurements of what a layer holds between its forward and its backward: the growth of the allocated memory with
every further layer (GPU only), and the tensors that its autograd node saved, by name of their size (any device; not
under a checkpoint, where looking at them would recompute them).
"""

from __future__ import annotations

import gc
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import vsa_inductor as vsa
from benchmarks.block_breakdown import Sizes
from benchmarks.block_providers import BlockCase, dense, norm_and_rotate, rope_tables
from vsa_inductor.selection import num_kept_blocks

ATTENTIONS = ("dense", "ungated", "gated", "dense model", "ungated model")
TEXT_TOKENS = 512
# Channels of the feed-forward network by those of the model: Wan 1.3B and 14B; others take the smaller ratio.
FEED_FORWARD = {1536: 8960, 5120: 13824}


class Model:
    """The compiled block, the tables that the layers of a model share, and the shapes of a layer's projections."""

    def __init__(self, case: BlockCase, attention: str) -> None:
        kind, _, whole = attention.partition(" ")
        channels = case.channels
        inner = FEED_FORWARD.get(channels, 4 * channels)
        self.case = case
        self.projections = [(channels, channels)] * (5 if kind == "gated" else 4)
        if whole:
            self.projections += [(channels, channels)] * 4 + [(inner, channels), (channels, inner)]
        layout, rope = case.layout(), rope_tables(case)
        (text,) = case.randn(1, case.batch, TEXT_TOKENS, channels)
        self.tables = (*rope, text, layout.token_slot, layout.slot_token, layout.kv_block_sizes)

        def attend(q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None) -> Tensor:
            if kind == "dense":
                return dense(q, k, v)
            out = vsa.video_sparse_attention(q, k, v, layout, sparsity=case.sparsity, gate=gate)
            assert isinstance(out, Tensor)
            return out

        def heads(x: Tensor) -> Tensor:
            return x.unflatten(2, (case.heads, -1))

        def self_attention(x: Tensor, norms: list[Tensor], projections: list[Tensor]) -> Tensor:
            to_out, *to_inputs = projections
            q, k, v, *gate = (F.linear(x, w) for w in to_inputs)
            q, k = (norm_and_rotate(y, 1 + w, rope, case.heads) for y, w in zip((q, k), norms, strict=True))
            return F.linear(attend(q, k, heads(v), heads(gate[0]) if gate else None).flatten(2), to_out)

        def block(x: Tensor, norms: list[Tensor], projections: list[Tensor]) -> Tensor:
            if not whole:
                return x + self_attention(x, norms, projections)
            to_q, to_k, to_v, to_out, up, down = projections[-6:]
            x = x + self_attention(F.layer_norm(x, (channels,)), norms, projections[:-6])
            q, k, v = F.linear(F.layer_norm(x, (channels,)), to_q), F.linear(text, to_k), F.linear(text, to_v)
            x = x + F.linear(dense(heads(q), heads(k), heads(v)).flatten(2), to_out)
            return x + F.linear(F.gelu(F.linear(F.layer_norm(x, (channels,)), up), approximate="tanh"), down)

        self.block = (
            torch.compile(block, fullgraph=True, dynamic=False)
            if kind == "dense"
            else vsa.compile(block, dynamic=False)
        )


class Stack:
    """``num_blocks`` layers of a model with their weights, an input and the gradient of the output."""

    def __init__(self, model: Model, num_blocks: int, checkpointed: bool = False) -> None:
        case, self.block, self.checkpointed = model.case, model.block, checkpointed
        generator, channels = case.generator(), case.channels

        def weight(*size: int) -> Tensor:
            w = torch.randn(size, device=case.device, dtype=case.dtype, generator=generator) * channels**-0.5
            return w.requires_grad_()

        self.weights = [
            ([weight(channels) for _ in range(2)], [weight(*shape) for shape in model.projections])
            for _ in range(num_blocks)
        ]
        self.leaves = [w for norms, matrices in self.weights for w in (*norms, *matrices)]
        self.x, self.dout = case.randn(2, case.batch, case.tokens, channels)
        # Alive whatever a layer saves.
        self.constants = {x.untyped_storage().data_ptr() for x in (*self.leaves, self.x, *model.tables)}

    def forward(self, num_blocks: int) -> tuple[Tensor, Tensor]:
        """The input, which needs a gradient as that of a model's first block does, and the output."""
        start = y = self.x.detach().requires_grad_()
        for norms, matrices in self.weights[:num_blocks]:
            if self.checkpointed:
                y = checkpoint(self.block, y, norms, matrices, use_reentrant=False)
            else:
                y = self.block(y, norms, matrices)
        return start, y

    def step(self) -> None:
        start, y = self.forward(len(self.weights))
        torch.autograd.grad(y, [start, *self.leaves], self.dout)


class Peak(NamedTuple):
    """GiB; NaN without a GPU. ``held``: what is left between steps, weights and inputs."""

    peak: float
    held: float


def peak_memory(model: Model, num_blocks: int, checkpointed: bool) -> Peak:
    """Peak of a second step, over what was allocated before there were weights and inputs."""
    on_gpu = torch.cuda.is_available()
    gc.collect()
    before = torch.cuda.memory_allocated() if on_gpu else 0
    stack = Stack(model, num_blocks, checkpointed)
    stack.step()
    gc.collect()
    if not on_gpu:
        return Peak(math.nan, math.nan)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    stack.step()
    return Peak((torch.cuda.max_memory_allocated() - before) / 2**30, (held - before) / 2**30)


def growth_per_layer(stack: Stack) -> float:
    """Allocated bytes that every further layer adds between forward and backward; NaN without a GPU."""
    if not torch.cuda.is_available():
        return math.nan
    alive = []
    for blocks in (1, len(stack.weights)):
        gc.collect()
        _, y = stack.forward(blocks)
        torch.cuda.synchronize()
        alive.append(torch.cuda.memory_allocated())
        del y, _
    return (alive[1] - alive[0]) / (len(stack.weights) - 1)


def _autograd_nodes(y: Tensor) -> Iterator[Any]:
    waiting, seen = [y.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
            yield node


class Saved(NamedTuple):
    """One tensor that a layer holds."""

    shape: tuple[int, ...]
    dtype: str
    bytes: int


def saved_per_layer(stack: Stack) -> list[Saved]:
    """What the second layer adds to the tensors saved for backward, each storage once, biggest first."""

    def saved(blocks: int) -> Counter[Saved]:
        _, y = stack.forward(blocks)
        storages: dict[int, Saved] = {}
        for node in _autograd_nodes(y):
            # Some releases keep apart the saved tensors whose version nobody has to check.
            for x in (*getattr(node, "saved_tensors", ()), *getattr(node, "_tensors_no_vc_check", ())):
                storage = x.untyped_storage()
                if storage.data_ptr() not in stack.constants:
                    dtype = str(x.dtype).removeprefix("torch.")
                    storages[storage.data_ptr()] = Saved(tuple(x.shape), dtype, storage.nbytes())
        return Counter(storages.values())

    # The first layer's input is a constant; the layers after it are all alike.
    more = saved(3)
    more.subtract(saved(2))
    return sorted(more.elements(), key=lambda x: -x.bytes)


def expected_saved_bytes(case: BlockCase, attention: str) -> dict[str, float]:
    """What backward needs of a layer, by name.

    Sparse: q, k, v and out in tile order with lse and the lists; the input of the last projection is made of them
    again. Any model: the block's input (weight gradients), q and k before their norm with its rstd; the gate and its
    factor; dense: q and k rotated, v, out (which is the projection's input) and lse.
    """
    sizes = Sizes.of(case)
    per_token = case.batch * case.tokens * 4.0
    expected = {
        "block input": sizes.tokens,
        "q, k before the norm": 2 * sizes.tokens,
        "rstd": 2 * per_token,
    }
    if attention == "dense":
        return expected | {"q, k, v, out": 4 * sizes.tokens, "lse": case.heads * per_token}
    num_blocks = case.layout().num_blocks
    rows = case.batch * case.heads * num_blocks * 4.0
    expected |= {
        "q, k, v, out in tile order": 4 * sizes.slots,
        "lse": sizes.statistic,
        "lists": rows * (num_kept_blocks(case.sparsity, num_blocks) + 1),
    }
    if attention == "gated":
        expected |= {"gate": sizes.tokens, "coarse probabilities": sizes.scores, "means and coarse": 4 * sizes.means}
    return expected


def padded(saved: list[Saved], case: BlockCase) -> int:
    """How many of the tensors are as large as one in tile order, with its empty slots."""
    slots = case.layout().num_blocks * 64
    return sum(slots in x.shape and math.prod(x.shape) >= case.batch * slots * case.channels for x in saved)
