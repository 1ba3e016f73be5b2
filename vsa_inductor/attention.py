"""The public calls: validate, then plain torch around the operators of the `vsa` namespace."""

from __future__ import annotations

import math
import numbers

import torch
from torch import Tensor

from .backends import identity
from .backends.capability import choose
from .errors import ArgumentError
from .ops import _check, _functorch_compat
from .options import current as current_options
from .selection import BlockSelection, coarse_branch, coarse_scores, num_kept_blocks, tile_means
from .tiling import TileLayout

LN2 = math.log(2)


def video_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: TileLayout,
    *,
    sparsity: float = 0.9,
    gate: Tensor | float | None = None,
    sm_scale: float | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Video sparse attention over 3-D tiles (Zhang et al., "VSA: Faster Video Diffusion with Trainable Sparse
    Attention", 2025).

    Tile means of q and k score every pair of tiles; each query tile attends its best k key tiles and every prefix
    block, k = max(1, min(ceil((1 - sparsity) * N), N)) of the N video tiles. Prefix queries attend everything.

    Args:
        q: ``[B, S, H_q, D]``, raster order, bf16, fp16, fp32 (fp64 on the eager backend).
        k, v: ``[B, S, H_kv, D]``; H_q must be a multiple of H_kv.
        layout: where the S tokens stand in tile order, on the device of q.
        sparsity: share of video tiles left out, 0..1.
        gate: None: selection only, no coarse branch. A number or a tensor broadcastable to ``[B, S, H_q, D]``: the
            coarse branch, softmax over tile means, is added with this weight and differentiated.
        sm_scale: softmax scale; 1 / sqrt(D) by default.
        return_lse: also return the natural log-sum-exp of the sparse branch.

    Returns:
        out ``[B, S, H_q, D]`` in the dtype of q (under autocast, its dtype); with ``return_lse`` also lse
        ``[B, H_q, S]`` fp32, differentiable.

    Raises:
        ArgumentError: an argument does not fit; raised before anything is launched.
        BackendUnavailableError: ``strict`` is set and the backend asked for refuses.
    """
    q, k, v = _autocast(q, k, v)
    _check.operands(q, k, v, "[B, S, H, D]", 2)
    if not isinstance(layout, TileLayout):
        raise ArgumentError("layout", type(layout).__name__, "a TileLayout")
    for table in (layout.token_slot, layout.slot_token, layout.kv_block_sizes):
        if table.device != q.device:
            raise ArgumentError("layout", f"tables on {table.device}", f"tables on the device of q, {q.device}")
    for name, x in (("q", q), ("k", k), ("v", v)):
        _check.size(f"{name}.shape[1]", x.shape[1], "the number of tokens of the layout", layout.num_tokens)
    if not _is_number(sparsity):
        raise ArgumentError("sparsity", _shown(sparsity), "a number, 0 <= sparsity <= 1")
    if not 0 <= sparsity <= 1:
        raise ArgumentError("sparsity", sparsity, "0 <= sparsity <= 1")
    if isinstance(gate, Tensor):
        _check.same_device("gate", gate, "q", q)
        (gate,) = _autocast(gate)
        if gate.dtype != q.dtype:
            raise ArgumentError("gate", gate.dtype, f"the dtype of q, {q.dtype}")
        aligned = zip(reversed(gate.shape), reversed(q.shape), strict=False)
        if gate.dim() > 4 or any(extent != 1 and extent != whole for extent, whole in aligned):
            raise ArgumentError("gate", f"shape {tuple(gate.shape)}", "broadcastable to [B, S, H_q, D]")
    elif gate is not None and not _is_number(gate):
        raise ArgumentError("gate", _shown(gate), "None, a number or a tensor")
    scale = _scale(sm_scale, q)
    block_size = _static(layout.block_size)
    # As a guard it also tells the compiler that slots are whole blocks: with sizes that are quotients it cannot divide.
    num_slots = layout.num_blocks * block_size
    _check.size("layout.slot_token.shape[0]", layout.slot_token.shape[0], "num_blocks * block_size", num_slots)

    q, k, v = _to_tile_order(q, k, v, layout)
    means = [tile_means(x.detach() if gate is None else x, layout.kv_block_sizes, block_size) for x in (q, k)]
    scores = coarse_scores(means[0], means[1], scale)
    out, lse = _attend_tiles(q, k, v, scores, layout, sparsity, scale, return_lse)
    tables = (layout.token_slot, layout.slot_token)
    if gate is None:
        out = torch.ops.vsa.untile(out, *tables)
    else:
        coarse = coarse_branch(scores, tile_means(v, layout.kv_block_sizes, block_size))
        out = _combine(out, gate, coarse, tables, block_size)
    return (out, lse.index_select(2, layout.token_slot) * LN2) if return_lse else out


def block_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_indices: Tensor,
    kv_num_blocks: Tensor,
    kv_block_sizes: Tensor,
    *,
    sm_scale: float | None = None,
    block_size: int = 64,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of each q block over its own list of kv blocks, in tile order.

    Args:
        q: ``[B, H_q, S_q, D]``, S_q = N_q * block_size; bf16, fp16, fp32 (fp64 on the eager backend).
        k, v: ``[B, H_kv, S_kv, D]``, S_kv = N_kv * block_size; H_q must be a multiple of H_kv.
        kv_indices: ``[B, H_q, N_q, M] int32``, distinct kv block ids; entries at or past the count are never read.
        kv_num_blocks: ``[B, H_q, N_q] int32``, entries meant per row, 0..M.
        kv_block_sizes: ``[N_kv] int32``, real keys per block, 0..block_size; what stands past them is never read.
        sm_scale: softmax scale; 1 / sqrt(D) by default.
        block_size: 64, 128 or 256 slots.
        return_lse: also return the natural log-sum-exp.

    Returns:
        out ``[B, H_q, S_q, D]`` contiguous; with ``return_lse`` also lse ``[B, H_q, S_q]`` fp32, differentiable. A row
        without a key gives out = 0, lse = -inf and gradients 0.

    Raises:
        ArgumentError: an argument does not fit; raised before anything is launched. Ids, counts and sizes are only
            checked under ``options(debug=True)``.
        BackendUnavailableError: ``strict`` is set and the backend asked for refuses.
    """
    q, k, v = _autocast(q, k, v)
    # The rest is checked by the operator, before it launches anything.
    _check.rank("q", q, "[B, H, S_pad, D]")
    _check.rank("k", k, "[B, H, S_pad, D]")
    selection = BlockSelection(kv_indices, kv_num_blocks)
    out, lse = _attend(q, k, v, selection, kv_block_sizes, _scale(sm_scale, q), block_size, return_lse)
    return (out, lse * LN2) if return_lse else out


def _attend_tiles(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scores: Tensor,
    layout: TileLayout,
    sparsity: float,
    sm_scale: float,
    return_lse: bool,
) -> tuple[Tensor, Tensor]:
    """Selection and sparse attention in tile order: video queries by score, prefix queries over everything."""
    num_prefix, block_size = layout.num_prefix_blocks, _static(layout.block_size)
    kept = num_kept_blocks(sparsity, layout.num_video_blocks)
    sizes = layout.kv_block_sizes
    selection = BlockSelection.top_k(scores[:, :, num_prefix:] if num_prefix else scores, kept, num_prefix)
    if not num_prefix:
        return _attend(q, k, v, selection, sizes, sm_scale, block_size, return_lse)
    # A call of its own, so that the lists of the video rows keep their width.
    B, H, N, _ = scores.shape
    dense = BlockSelection.dense(B, H, num_prefix, N, q.device)
    boundary = num_prefix * block_size
    prefix_out, prefix_lse = _attend(q[:, :, :boundary], k, v, dense, sizes, sm_scale, block_size, return_lse)
    out, lse = _attend(q[:, :, boundary:], k, v, selection, sizes, sm_scale, block_size, return_lse)
    return torch.cat((prefix_out, out), 2), torch.cat((prefix_lse, lse), 2) if return_lse else lse


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selection: BlockSelection,
    kv_block_sizes: Tensor,
    sm_scale: float,
    block_size: int,
    return_lse: bool,
) -> tuple[Tensor, Tensor]:
    """`vsa::attention` on the backends that this thread's options choose; lse in base 2."""
    chosen = current_options()
    if chosen.debug:
        blocks = _check.attention_operands(q, k, v, block_size)
        _check.block_lists(q, selection.kv_indices, selection.kv_num_blocks, kv_block_sizes, *blocks)
        _check_lists(selection, kv_block_sizes, block_size)
    needs_grad = _needs_grad(q, k, v)
    deterministic = chosen.deterministic or torch.are_deterministic_algorithms_enabled()
    grouped = _holds(q.shape[1] != k.shape[1])
    if torch.compiler.is_compiling():
        # Whoever assigned to the tag since: nothing of this compilation is stored or looked up without our part.
        identity.keep_cache_key_tag()
    forward, backward = choose(
        q.device.type,
        q.device.index,
        q.dtype,
        _static(q.shape[3]),
        block_size,
        grouped,
        needs_grad,
        chosen.backend,
        deterministic,
        chosen.strict,
        identity.switches,
    )
    return torch.ops.vsa.attention(
        q,
        k,
        v,
        selection.kv_indices,
        selection.kv_num_blocks,
        kv_block_sizes,
        sm_scale,
        block_size,
        return_lse or needs_grad,
        deterministic,
        forward,
        backward,
    )


def _combine(
    out: Tensor, gate: Tensor | float, coarse: Tensor, tables: tuple[Tensor, Tensor], block_size: int
) -> Tensor:
    """out + gate * coarse in raster order. A number weighs the rows of tiles, before every token gets its own."""
    B, H, _, D = out.shape
    if isinstance(gate, Tensor):
        per_token = gate.expand(B, tables[0].shape[0], H, D)
    else:
        per_token = None
        coarse = coarse if gate == 1 else coarse * gate
    # Under autocast the products of the coarse branch come back narrow.
    coarse = coarse.to(torch.promote_types(out.dtype, torch.float32))
    return torch.ops.vsa.gated_combine(out, per_token, coarse, *tables, block_size)


def _to_tile_order(q: Tensor, k: Tensor, v: Tensor, layout: TileLayout) -> tuple[Tensor, Tensor, Tensor]:
    if not _needs_grad(q, k, v) and not torch.compiler.is_compiling():
        tiled = torch.ops.vsa.tile_to_bhsd([q, k, v], layout.slot_token)
        return tiled[0], tiled[1], tiled[2]
    tables = (layout.token_slot, layout.slot_token)
    return torch.ops.vsa.tile(q, *tables), torch.ops.vsa.tile(k, *tables), torch.ops.vsa.tile(v, *tables)


def _needs_grad(q: Tensor, k: Tensor, v: Tensor) -> bool:
    # Under vmap a tensor does not tell whether what it wraps needs a gradient.
    return torch.is_grad_enabled() and (
        q.requires_grad or k.requires_grad or v.requires_grad or _functorch_compat.transforms_active()
    )


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in the autocast dtype of their device where autocast is on, as scaled_dot_product_attention does."""
    device_type = tensors[0].device.type
    # torch refuses the question for meta tensors.
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors)


def _scale(sm_scale: float | None, q: Tensor) -> float:
    scale = 1 / math.sqrt(_static(q.shape[3])) if sm_scale is None else sm_scale
    if not _is_number(scale) or not 0 < scale < math.inf:
        raise ArgumentError("sm_scale", scale, "a finite number > 0")
    return scale


def _shown(value: object) -> str:
    """What is no number, for an error: traced code cannot spell a tensor."""
    return repr(value) if isinstance(value, str) else type(value).__name__


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) or isinstance(value, numbers.Real)  # noqa: SIM101


def _static(size: int) -> int:
    """A size that kernels are made for, as a plain number: a symbolic one is specialised."""
    return len(range(size))


def _holds(condition: bool) -> bool:
    """A comparison of sizes as a plain bool: a symbolic one becomes a guard."""
    if condition:  # noqa: SIM103
        return True
    return False


def _check_lists(selection: BlockSelection, kv_block_sizes: Tensor, block_size: int) -> None:
    """Debug mode: ids, counts and sizes are in range. In eager a typed error, in compiled code a device assertion."""
    width, num_blocks = selection.kv_indices.shape[3], kv_block_sizes.shape[0]
    counts, ids = selection.kv_num_blocks, selection.kv_indices
    listed = torch.arange(width, device=ids.device) < counts[..., None]
    ordered = torch.where(listed, ids, -1).sort(-1).values
    repeated = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
    for name, bad, given, allowed in (
        ("kv_num_blocks", (counts < 0) | (counts > width), counts, f"0 <= count <= M = {width}"),
        ("kv_indices", listed & ((ids < 0) | (ids >= num_blocks)), ids, f"0 <= id < N_kv = {num_blocks}"),
        ("kv_indices", repeated, ordered[..., 1:], "distinct ids in each row"),
        (
            "kv_block_sizes",
            (kv_block_sizes < 0) | (kv_block_sizes > block_size),
            kv_block_sizes,
            f"0 <= size <= block_size = {block_size}",
        ),
    ):
        if torch.compiler.is_compiling():
            torch.ops.aten._assert_async.msg(~bad.any(), f"{name}: allowed: {allowed}")
        elif bad.any():
            raise ArgumentError(name, f"{given[bad][0].item()} among its values", allowed)
