"""Lowering of `vsa::gated_combine_backward`: one kernel of ours where there is one, generated code elsewhere.

Generated, the output gradient is read four times, by a gather in tile order, by the gate's gradient, by the sum over
each tile and by delta, since loops over different orders do not fuse.
"""

from __future__ import annotations

from typing import Any

import torch

from vsa_inductor.ops._allocate import statistics_dtype

from . import _inductor_compat as compat
from . import attention_backward, tile
from .gated_combine import rows_of_tokens
from .norm_rope_tile import runs_layout_kernels

_aten = torch.ops.aten


def lower(
    dout: Any,
    out: Any,
    gate: Any,
    coarse: Any,
    token_slot: Any,
    slot_token: Any,
    block_size: int,
    needs_dgate: bool,
    needs_dcoarse: bool,
) -> Any:
    """Arguments of `vsa::gated_combine_backward`."""
    dout_tiles = [output for output in compat.current_node().users if output.args[1] == 0]
    reader = next((one for output in dout_tiles for one in attention_backward.readers_of(output)), None)
    attention_backward.free_dout(reader)
    if not runs_layout_kernels(dout) or not attention_backward.reads_rows(reader):
        return _generate(dout, out, gate, coarse, token_slot, slot_token, block_size, needs_dgate, needs_dcoarse)
    of_out: Any = None
    if out is None and reader is not None:
        # Autograd leaves it out; what the softmax backward subtracts comes out of the same pass.
        out = compat.value_of(reader.args[5])
        of_out = None if out is None else reader.args[5]
    results = compat.opaque(OP, dout, out, gate, coarse, token_slot, slot_token, block_size, needs_dgate, needs_dcoarse)
    compat.notes()[compat.current_node()] = (of_out, results[1])
    return results


def _generate(
    dout: Any,
    out: Any,
    gate: Any,
    coarse: Any,
    token_slot: Any,
    slot_token: Any,
    block_size: int,
    needs_dgate: bool,
    needs_dcoarse: bool,
) -> tuple[Any, Any, Any, Any]:
    wide = statistics_dtype(dout.get_dtype())
    tiles = tile.gather(dout, slot_token)
    delta, dgate = compat.uninitialised((0,), like=coarse), compat.uninitialised((0,), like=dout)
    dcoarse = compat.uninitialised((0,), like=coarse)
    if out is not None:
        delta = _delta(out, tiles, slot_token, wide)
    if needs_dgate:
        rows = rows_of_tokens(coarse, token_slot, slot_token, block_size)
        dgate = compat.convert(compat.aten(_aten.mul.Tensor, compat.convert(dout, wide), rows), dout.get_dtype())
    if needs_dcoarse:
        weighted = compat.convert(dout, wide)
        if gate is not None:
            weighted = compat.aten(_aten.mul.Tensor, compat.convert(gate, wide), weighted)
        dcoarse = _block_sums(weighted, slot_token, coarse.get_size()[2], block_size)
    return tiles, delta, dgate, dcoarse


def _delta(out: Any, tiles: Any, slot_token: Any, wide: torch.dtype) -> Any:
    """Row sums of the product ``[B, H, S_pad]``; zero in empty slots, whatever stands there."""
    load, (present_extent,) = out.make_loader(), slot_token.get_size()
    token_of = compat.optional_position(slot_token, present_extent, out)

    def element(index: Any) -> Any:
        _, present = token_of(index[2])
        return compat.where_present(present, lambda: load(index))

    real = compat.pointwise(out.get_size(), out, element)
    product = compat.aten(_aten.mul.Tensor, compat.convert(real, wide), compat.convert(tiles, wide))
    return compat.aten(_aten.sum.dim_IntList, product, [-1])


def _block_sums(x: Any, slot_token: Any, num_blocks: Any, block_size: int) -> Any:
    """Sums of raster ``x [B, S, H, D]`` over each block's tokens: ``[B, H, N, D]``."""
    B, S, H, D = x.get_size()
    load, token_of = x.make_loader(), compat.optional_position(slot_token, S, x)

    def element(index: Any) -> Any:
        token, present = token_of(index[2] * block_size + index[3])
        return compat.where_present(present, lambda: load([index[0], token, index[1], index[4]]))

    blocks = compat.pointwise((B, H, num_blocks, block_size, D), x, element)
    return compat.aten(_aten.sum.dim_IntList, blocks, [3])


OP = torch.ops.vsa.gated_combine_backward.default
