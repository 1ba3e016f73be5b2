"""Special registers: %tid, %ctaid, %laneid, %cluster_ctarank, %clock and the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .cta import Cta

_CLOCK_STEP = 16
_TRIPLES = ("tid", "ntid", "ctaid", "nctaid", "cluster_nctaid", "cluster_ctaid", "clusterid", "nclusterid")
_CLOCKS = ("clock", "clock_hi", "globaltimer_lo", "globaltimer_hi")
_WIDE_CLOCKS = ("clock64", "globaltimer")
NAMES = frozenset(
    (
        *(f"{base}.{axis}" for base in _TRIPLES for axis in "xyz"),
        *(f"lanemask_{kind}" for kind in ("eq", "lt", "le", "gt", "ge")),
        *_CLOCKS,
        *_WIDE_CLOCKS,
        *("laneid", "warpid", "nwarpid", "smid", "nsmid", "gridid"),
        *("cluster_ctarank", "cluster_nctarank", "is_explicit_cluster"),
        *("total_smem_size", "dynamic_smem_size", "aggr_smem_size", "reserved_smem_offset_0"),
    )
)


def value(cta: Cta, name: str, start: int, width: int) -> np.ndarray:
    """[width] uint32 (uint64 for the 64-bit clocks) for threads start..start+width-1 of the block.

    `name` is one of `NAMES`. Clocks count on with every read; they are no measure of time.
    """
    launch = cta.launch
    thread = np.arange(start, start + width, dtype=np.uint32)
    base, _, axis = name.partition(".")
    n = "xyz".find(axis)
    if base == "tid":
        x, y, _z = launch.block
        return (thread % x, thread // x % y, thread // (x * y))[n].astype(np.uint32)
    triples = {
        "ntid": launch.block,
        "ctaid": cta.block,
        "nctaid": launch.grid,
        "cluster_nctaid": launch.cluster,
        "cluster_ctaid": tuple(b % c for b, c in zip(cta.block, launch.cluster, strict=True)),
        "clusterid": tuple(b // c for b, c in zip(cta.block, launch.cluster, strict=True)),
        "nclusterid": tuple(g // c for g, c in zip(launch.grid, launch.cluster, strict=True)),
    }
    if base in triples:
        return np.full(width, triples[base][n], np.uint32)
    lane = thread % 32
    if name == "laneid":
        return lane.astype(np.uint32)
    if name == "warpid":
        return (thread // 32).astype(np.uint32)
    if name.startswith("lanemask_"):
        return _lane_mask(name[9:], lane)
    if name in _WIDE_CLOCKS:
        launch.clock += _CLOCK_STEP
        return np.full(width, launch.clock, np.uint64)
    if name in _CLOCKS:
        launch.clock += _CLOCK_STEP
        return np.full(width, launch.clock if name in ("clock", "globaltimer_lo") else 0, np.uint32)
    constants = {
        "nwarpid": -(-cta.threads // 32),
        "smid": 0,
        "nsmid": 132,
        "gridid": 0,
        "cluster_ctarank": cta.rank,
        "cluster_nctarank": launch.cluster[0] * launch.cluster[1] * launch.cluster[2],
        "is_explicit_cluster": int(launch.cluster != (1, 1, 1)),
        "total_smem_size": launch.shared_bytes,
        "dynamic_smem_size": launch.dynamic_bytes,
        "aggr_smem_size": launch.shared_bytes,
        "reserved_smem_offset_0": 0,
    }
    return np.full(width, constants[name], np.uint32)


def _lane_mask(kind: str, lane: np.ndarray) -> np.ndarray:
    one = np.uint64(1)
    at = lane.astype(np.uint64)
    below = (one << at) - one
    full = np.uint64(0xFFFFFFFF)
    masks = {
        "eq": one << at,
        "lt": below,
        "le": below | one << at,
        "gt": full & ~(below | one << at),
        "ge": full & ~below,
    }
    return masks[kind].astype(np.uint32)
