"""What tensor-core instructions share: values of elements, NaNs, footprints, and that a whole warp executes them."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from .. import formats
from ..errors import ConvergenceError
from ..warp import WARP

if TYPE_CHECKING:
    from ..ir import Instruction
    from ..warp import View

# Bytes that an element takes in a register; 4- and 6-bit elements of kind::f8f6f4 fill a byte each.
ELEMENT_BYTES = {
    "f64": 8,
    "tf32": 4,
    **dict.fromkeys(("f16", "bf16"), 2),
    **dict.fromkeys(("e4m3", "e5m2", "e3m2", "e2m3", "e2m1", "s8", "u8"), 1),
}
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
# The low mantissa bits of a tf32 register are not looked at (PTX ISA 9.7.14.5, .tf32 fragments).
_TF32_MASK = np.uint32(0xFFFFE000)
_NAN16 = np.uint16(0x7FFF).view(np.float16)
_NAN64 = np.uint64(0x7FFFFFFFFFFFFFFF).view(np.float64)


@cache
def _byte_table(kind: str) -> np.ndarray:
    """float32 [256]: the value of each byte. 6-bit elements are the low bits, e2m1 is bits 2..5 (PTX ISA 5.2.3)."""
    codes = np.arange(256)
    table = formats.decode(codes >> 2 if kind == "e2m1" else codes, kind).astype(np.float32)
    table.setflags(write=False)
    return table


def values(raw: np.ndarray, kind: str) -> np.ndarray:
    """Raw unsigned elements (C-contiguous, of ELEMENT_BYTES each) as float32, float64 for f64; exact for every kind."""
    if kind == "f16":
        return raw.view(np.float16).astype(np.float32)
    if kind == "bf16":
        wide = raw.astype(np.uint32)
        wide <<= np.uint32(16)
        return wide.view(np.float32)
    if kind == "tf32":
        return (raw & _TF32_MASK).view(np.float32)
    if kind == "f64":
        return raw.view(np.float64)
    if kind == "s8":
        return raw.view(np.int8).astype(np.float32)
    if kind == "u8":
        return raw.astype(np.float32)
    return _byte_table(kind).take(raw)


def canonical_nan(x: np.ndarray) -> np.ndarray:
    """The same array; every NaN in it is made the one that the hardware returns (all bits set but the sign)."""
    bad = np.isnan(x)
    if bad.any():
        x[bad] = {2: _NAN16, 4: formats.NAN32, 8: _NAN64}[x.dtype.itemsize]
    return x


def accumulate(product: np.ndarray, c: np.ndarray | None, kind: str, saturate: bool) -> np.ndarray:
    """product + c in the accumulator's type: "f32", "f64", "f16" (one rounding) or "s32" (wraps, or saturates).

    `product` is float32 (float64 for f64); integer products of one instruction are exact in it: at most
    32 * 255 * 255 < 2**24.
    """
    if kind == "s32":
        whole = product.astype(np.int32)
        if c is None:
            return whole
        if not saturate:
            return whole + c.view(np.int32)
        limits = np.iinfo(np.int32)
        return np.clip(whole.astype(np.int64) + c.view(np.int32), limits.min, limits.max).astype(np.int32)
    with np.errstate(all="ignore"):
        total = product if c is None else product + c
        return canonical_nan(total.astype(np.float16) if kind == "f16" else total)


def shared_granules(pieces: np.ndarray, size: int, shift: int) -> np.ndarray | slice:
    """Footprint of the pieces of `size` bytes that have these numbers; a slice where it has no holes."""
    each = size >> shift
    index = (np.unique(pieces)[:, None] * each + np.arange(each)).ravel()
    if len(index) == index[-1] - index[0] + 1:
        return slice(int(index[0]), int(index[-1]) + 1)
    return index


def whole_warps(view: View, mask: np.ndarray | None, i: Instruction) -> list[View]:
    """Views to execute an .aligned instruction on: the given one where all its threads are active, else its full warps.

    A warp of which a part executes it, or that has lost threads, is a finding and left out (PTX ISA 9.7.14.5.14).
    """
    if mask is None or mask.all():
        return [view]
    found: list[View] = []
    for n, warp in enumerate(view.members):
        active = int(np.count_nonzero(mask[n * WARP : (n + 1) * WARP]))
        if active == WARP:
            found.append(warp)
        elif active:
            view.cta.report(
                ConvergenceError, f"{warp.label}: {active} of 32 threads execute an .aligned instruction\n  {i.where()}"
            )
    return found
