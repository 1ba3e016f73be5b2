"""Video sparse attention in diffusers' Wan transformer, for one model at a time and restorable.

Wan's `rope` is the one submodule that sees the 5-D input and feeds self-attention only. A wrapper around it returns the
rotary tables together with the `TileLayout` of the same video, so the geometry reaches every self-attention as an
argument: nothing is looked up by shape inside a compiled function, and nothing global changes. A processor on `attn1`
unpacks it; cross-attention (`attn2`) keeps its own.
"""

from __future__ import annotations

import numbers
import re
import sys
from collections.abc import Mapping
from types import TracebackType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from ..attention import video_sparse_attention
from ..errors import ArgumentError
from ..tiling import BLOCK_SIZES, TileLayout

LEARNED = "learned"

_GATE_KEY = re.compile(r"(?:^|\.)blocks\.(\d+)\.(?:attn1\.)?to_gate_compress\.(weight|bias)$")


class VideoGeometry(NamedTuple):
    """What the wrapped `rope` hands to every block as `rotary_emb`: a tuple, so that checkpointing and pytree take it.

    Attributes:
        cos: `[1, S, 1, D]`, the cosine of each channel's angle.
        signed_sin: `[1, S, 1, D]`, the sine, negative on even channels: see `_rotate`.
        layout: the tile layout of the S tokens.
    """

    cos: Tensor
    signed_sin: Tensor
    layout: TileLayout


class GeometryRope(nn.Module):
    """Wan's rotary embedding, returning a `VideoGeometry`.

    Args:
        rope: the `WanRotaryPosEmbed` to wrap.
        tile: extent of a tile in tokens.
    """

    def __init__(self, rope: Any, tile: tuple[int, int, int]) -> None:
        super().__init__()
        self.rope = rope
        self.patch_size = tuple(rope.patch_size)
        self.tile = tile

    def forward(self, hidden_states: Tensor) -> VideoGeometry:
        """The geometry of the latents `hidden_states` [B, C, T, H, W]; also with symbolic sizes."""
        cos, sin = self.rope(hidden_states)
        cos = cos[..., 0::2].repeat_interleave(2, dim=-1)
        sin = sin[..., 1::2]
        signed_sin = torch.stack((-sin, sin), dim=-1).flatten(-2)
        T, H, W = (size // patch for size, patch in zip(hidden_states.shape[2:], self.patch_size, strict=True))
        layout = TileLayout.from_video_shape(T, H, W, self.tile, device=hidden_states.device)
        return VideoGeometry(cos, signed_sin, layout)


class VideoSparseProcessor:
    """The processor of one self-attention: the default one's projections, norms and RoPE around sparse attention.

    Args:
        sparsity: share of key/value tiles that every query tile leaves out.
        gate: None, 1.0 or "learned" (the attention module then has a `to_gate_compress`).
        replaced: the processor that `SparsifyHandle.restore` puts back.
    """

    # diffusers sets this on every processor; it chooses among dense implementations, so it means nothing here.
    _attention_backend = None

    def __init__(self, sparsity: float, gate: float | str | None, replaced: Any) -> None:
        self.sparsity = sparsity
        self.gate = gate
        self.replaced = replaced

    @property
    def _parallel_config(self) -> None:
        return None

    @_parallel_config.setter
    def _parallel_config(self, config: Any) -> None:
        if config is not None:
            raise _context_parallel_error("config")

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: VideoGeometry | None = None,
    ) -> Tensor:
        """Self-attention of `hidden_states` [B, S, C] in raster order; returns the same shape."""
        if encoder_hidden_states is not None:
            raise ArgumentError("encoder_hidden_states", "a tensor", "None: only self-attention is sparse")
        if attention_mask is not None:
            raise ArgumentError("attention_mask", "a tensor", "None: video sparse attention takes no mask")
        if not isinstance(rotary_emb, VideoGeometry):
            raise ArgumentError(
                "rotary_emb",
                type(rotary_emb).__name__,
                "the VideoGeometry that the sparsified model's own rope returns",
            )
        if attn.fused_projections:
            query, key, value = attn.to_qkv(hidden_states).chunk(3, dim=-1)
        else:
            query, key, value = attn.to_q(hidden_states), attn.to_k(hidden_states), attn.to_v(hidden_states)
        heads = (attn.heads, -1)
        query = _rotate(attn.norm_q(query).unflatten(2, heads), rotary_emb)
        key = _rotate(attn.norm_k(key).unflatten(2, heads), rotary_emb)
        value = value.unflatten(2, heads)
        gate: Any = attn.to_gate_compress(hidden_states).unflatten(2, heads) if self.gate == LEARNED else self.gate
        out = video_sparse_attention(query, key, value, rotary_emb.layout, sparsity=self.sparsity, gate=gate)
        out = cast(Tensor, out).flatten(2, 3).type_as(query)
        for layer in attn.to_out:
            out = layer(out)
        return out


def _rotate(x: Tensor, geometry: VideoGeometry) -> Tensor:
    """Rotate channel pairs (2i, 2i + 1) of x [B, S, H, D].

    Swapping the pair and giving the sine a sign per channel keeps the whole rotation pointwise over D, so that
    generated code can go on from the norm before it to the tile order after it; every product and sum is the default
    processor's.
    """
    swapped = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return (x * geometry.cos + swapped * geometry.signed_sin).type_as(x)


class SparsifyHandle:
    """Undoes `sparsify`, and loads a learned gate. Also a context manager that restores on leaving.

    Everything it needs lies in the model, so `SparsifyHandle(copy)` makes a handle for a copied or unpickled model.

    Args:
        model: a sparsified model.

    Raises:
        ArgumentError: the model is not sparsified.
    """

    def __init__(self, model: Any) -> None:
        if not isinstance(getattr(model, "rope", None), GeometryRope):
            raise ArgumentError("model", f"a {type(model).__name__} that is not sparsified", "a sparsified model")
        self.model = model

    @property
    def sparsity(self) -> float:
        """Share of key/value tiles left out; may be set between steps, as training schedules do. A compiled model is
        compiled once more for the first change, and not again."""
        return self._processors()[0].sparsity

    @sparsity.setter
    def sparsity(self, sparsity: float) -> None:
        _check_sparsity(sparsity)
        for processor in self._processors():
            processor.sparsity = float(sparsity)

    def _processors(self) -> list[VideoSparseProcessor]:
        if not self.active:
            raise ArgumentError("model", "a model that was restored", "a sparsified model")
        return [block.attn1.processor for block in self.model.blocks]

    @property
    def active(self) -> bool:
        """Whether the model is still sparsified."""
        return isinstance(self.model.rope, GeometryRope)

    def restore(self) -> None:
        """Put the model back as `sparsify` found it: the same rope and processor objects, no gate. A second call does
        nothing."""
        if not self.active:
            return
        for block in self.model.blocks:
            attn = block.attn1
            if isinstance(attn.processor, VideoSparseProcessor):
                attn.set_processor(attn.processor.replaced)
            if hasattr(attn, "to_gate_compress"):
                del attn.to_gate_compress
        self.model.rope = self.model.rope.rope

    def load_gate_weights(self, state_dict: Mapping[str, Tensor]) -> None:
        """Load the learned gate of a checkpoint whose other weights diffusers has loaded (it drops these).

        Args:
            state_dict: may hold other keys too; taken are `blocks.{i}.attn1.to_gate_compress.*` and
                `blocks.{i}.to_gate_compress.*`, after any prefix. A checkpoint without biases leaves them zero.

        Raises:
            ArgumentError: the model has no learned gate, or the keys do not fit its blocks. Nothing is loaded then.
        """
        gates = [getattr(block.attn1, "to_gate_compress", None) for block in self.model.blocks]
        if any(gate is None for gate in gates):
            raise ArgumentError("state_dict", "gate weights for a model without a gate", 'a model with gate="learned"')
        found: dict[tuple[int, str], Tensor] = {}
        for key, tensor in state_dict.items():
            if match := _GATE_KEY.search(key):
                found[int(match[1]), match[2]] = tensor
        wanted = {(index, "weight") for index in range(len(gates))}
        missing = sorted(index for index, _ in wanted - found.keys())
        if missing:
            raise ArgumentError(
                "state_dict", f"no to_gate_compress.weight for blocks {missing}", f"one for each of {len(gates)} blocks"
            )
        for (index, name), tensor in found.items():
            target = getattr(gates[index], name).shape if index < len(gates) else None
            if tensor.shape != target:
                raise ArgumentError(
                    "state_dict",
                    f"blocks.{index} to_gate_compress.{name} of shape {tuple(tensor.shape)}",
                    "no such block in the model" if target is None else f"shape {tuple(target)}",
                )
        with torch.no_grad():
            for (index, name), tensor in found.items():
                getattr(gates[index], name).copy_(tensor)

    def __enter__(self) -> SparsifyHandle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.restore()


def sparsify(
    model: Any, sparsity: float = 0.9, gate: float | str | None = None, tile: tuple[int, int, int] = (4, 4, 4)
) -> SparsifyHandle:
    """Replace a model's self-attention by video sparse attention, in place.

    Sparsify before ``torch.compile(model)``, whose result is refused.
    Cross-attention stays dense, other models in the process stay as they are.

    Args:
        model: a diffusers `WanTransformer3DModel`.
        sparsity: share of key/value tiles that every query tile leaves out, 0..1; 0 without a gate is the dense model.
        gate: None for selection only; 1.0 adds the coarse branch; "learned" weighs it by a new zero-initialised linear
            layer `attn1.to_gate_compress` of every block: make the optimizer after this call, and load a checkpoint's
            gate with `SparsifyHandle.load_gate_weights`.
        tile: extent of a tile in tokens (T, H, W), volume 64, 128 or 256.

    Returns:
        the handle that restores the model.

    Raises:
        ArgumentError: a model that is not supported or already sparsified, or a value that is not allowed.
    """
    _check_model(model)
    _check_sparsity(sparsity)
    if gate is not None and gate != LEARNED and (isinstance(gate, str | bool) or gate != 1.0):
        raise ArgumentError("gate", repr(gate), f'None, 1.0 or "{LEARNED}"')
    if len(tile) != 3 or min(tile) < 1 or tile[0] * tile[1] * tile[2] not in BLOCK_SIZES:
        raise ArgumentError("tile", tile, f"three extents >= 1 with a volume in {BLOCK_SIZES}")

    for block in model.blocks:
        attn = block.attn1
        if gate == LEARNED:
            attn.to_gate_compress = _zero_gate(attn)
        attn.set_processor(VideoSparseProcessor(float(sparsity), gate, attn.get_processor()))
    model.rope = GeometryRope(model.rope, (tile[0], tile[1], tile[2]))
    return SparsifyHandle(model)


def _zero_gate(attn: Any) -> nn.Linear:
    """A gate of zeros, so that training starts from selection alone.

    The norm's weight gives dtype and device: quantised or layerwise-cast models keep it in the compute dtype.
    """
    like = attn.norm_q.weight
    layer = nn.Linear(attn.to_out[0].out_features, attn.inner_dim, dtype=like.dtype, device=like.device)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    layer.train(attn.training)
    return layer


def _check_sparsity(sparsity: Any) -> None:
    if isinstance(sparsity, bool) or not isinstance(sparsity, numbers.Real) or not 0 <= float(sparsity) <= 1:
        raise ArgumentError("sparsity", repr(sparsity), "a number 0..1")


def _check_model(model: Any) -> None:
    supported = "a diffusers WanTransformer3DModel"
    if hasattr(model, "_orig_mod"):
        raise ArgumentError("model", "a compiled model", f"{supported}, sparsified before it is compiled")
    # A process that never imported diffusers cannot hold one of its models.
    wan = sys.modules.get("diffusers.models.transformers.transformer_wan")
    if wan is None or not isinstance(model, wan.WanTransformer3DModel):
        raise ArgumentError("model", f"a {type(model).__name__}", supported)
    if isinstance(model.rope, GeometryRope):
        raise ArgumentError("model", "an already sparsified model", "a model without it; call handle.restore() first")
    if getattr(getattr(model, "_parallel_config", None), "context_parallel_config", None) is not None:
        raise _context_parallel_error("model")
    for index, block in enumerate(model.blocks):
        processor = block.attn1.get_processor()
        if type(processor) is not wan.WanAttnProcessor:
            raise ArgumentError(
                "model",
                f"blocks.{index}.attn1 with the processor {type(processor).__name__}",
                "the default WanAttnProcessor, whose mathematics is kept",
            )


def _context_parallel_error(argument: str) -> ArgumentError:
    return ArgumentError(
        argument,
        "context parallelism, which leaves each rank a part of the sequence",
        "the whole sequence on every rank: the choice of tiles needs all of them (never possible with a ring)",
    )
