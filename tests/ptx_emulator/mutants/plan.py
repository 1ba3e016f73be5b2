"""Which faults go into which kernels."""

from __future__ import annotations

import random

from ..corpus import cases
from ..ir import Kernel
from . import drops, moves, pipeline, values
from .edit import Mutation
from .subject import Subject

RULES = (*drops.RULES, *values.RULES, *moves.RULES)

# Members of the corpus by target and name. Kernels that differ in element type or layout only are left out.
KERNELS = (
    "sm_100a/own/tensor_memory_ring",
    "sm_100a/triton/matmul-128x128x64-fp16",
    "sm_100a/triton/matmul-128x64x128-e4m3",
    "sm_100a/triton/matmul_device_descriptors-bf16",
    "sm_100a/triton/matmul_ws-128x128x64-bf16",
    "sm_100a/triton/matmul_ws_host-fp16",
    "sm_100a/triton/matmul_cluster-256x128x64",
    "sm_100a/triton/matmul_persistent_ws-fp16",
    "sm_100a/triton/attention-128x64-fp16",
    "sm_100a/triton/attention_ws-128x64",
    "sm_100a/triton/attention_backward-64x64-bf16",
    "sm_100a/triton/attention_backward_descriptors-64x128",
    "sm_100a/triton/attention_backward_ws-128x64-w8",
    "sm_100a/gluon/tensor_memory-m64-16x64b-16x128b",
    "sm_100a/gluon/tensor_memory-m64-16x256b-32x32b",
    "sm_100a/gluon/tensor_memory-packed",
    "sm_100a/gluon/product-128x64x64",
    "sm_100a/gluon/product-mn_major-64",
    "sm_100a/gluon/product-m64-n8-no_swizzle",
    "sm_100a/gluon/product-tensor_memory_a-m64-16x128b",
    "sm_100a/gluon/product-e4m3",
    "sm_100a/gluon/tensor_memory_copy-128B",
    "sm_100a/gluon/tensor_copies-out_of_bounds",
    "sm_100a/gluon/gather_scatter",
    "sm_100a/gluon/warp_specialised-64x128x64",
    "sm_100a/gluon/cluster-paired",
    "sm_100a/gluon/cluster-multicast",
    "sm_100a/gluon/launch_control",
    "sm_100a/gluon/staged_sum",
    "sm_90a/triton/matmul-128x128x64-fp16",
    "sm_90a/triton/matmul_ws-128x128x64-bf16",
    "sm_90a/triton/matmul_cluster-128x128x64",
    "sm_90a/triton/attention_backward-64x64-bf16",
    "sm_90a/gluon/wgmma-64x64x64",
    "sm_90a/gluon/wgmma-registers",
    "sm_90a/gluon/warp_specialised-64x128x64",
    "sm_90a/gluon/remote_store",
    "sm_121a/triton/matmul-64x64x32-fp16",
    "sm_121a/triton/attention-64x32-causal-fp16",
)
# What the tests run: a mutant of each kind, in kernels that are quick and together have nearly all kinds.
QUICK_KERNELS = (
    "sm_100a/own/tensor_memory_ring",
    "sm_100a/gluon/product-128x64x64",
    "sm_100a/gluon/warp_specialised-64x128x64",
    "sm_90a/gluon/wgmma-64x64x64",
    "sm_121a/triton/matmul-64x64x32-fp16",
)
# Mutants of a kind in one kernel: faults of synchronisation are what the emulator is for.
LIMIT_DROPS = 6
LIMIT_OTHERS = 2


def mutations(kernel: Kernel, executed: set[int]) -> dict[str, list[Mutation]]:
    """All faults at instructions that the run executes, by kind."""
    found: dict[str, list[Mutation]] = {}
    for i in kernel.instructions:
        if i.index in executed:
            for rule in RULES:
                for m in rule(kernel, i):
                    found.setdefault(m.kind, []).append(m)
    return found


def chosen(kernel: Kernel, executed: set[int], limit: int | None = None) -> list[Mutation]:
    """Of each kind at most `limit`, picked at random, always the same. None = the limits above, 0 = all."""
    result: list[Mutation] = []
    for kind, found in mutations(kernel, executed).items():
        most = limit if limit is not None else LIMIT_DROPS if kind.startswith("drop") else LIMIT_OTHERS
        if most and len(found) > most:
            picked = random.Random(f"{kernel.name} {kind}").sample(range(len(found)), most)
            found = [found[k] for k in sorted(picked)]
        result += found
    return result


def subject(title: str) -> Subject:
    """A kernel by target and name. Raises KeyError for one that the corpus does not have."""
    own = pipeline.case()
    if title == f"{own.target}/{own.name}":
        return Subject(own, strict=True)
    return Subject({f"{c.target}/{c.name}": c for c in cases()}[title])
