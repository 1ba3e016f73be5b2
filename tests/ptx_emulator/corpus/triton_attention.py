"""Cases: Triton attention, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from . import triton_attention_kernels as kernels
from .case import KINDS, Case, Program, empty, program, upload
from .compile import compile_ptx
from .references import attention, attention_backward, normal

# P and dS are rounded to the inputs' format before they are multiplied again.
TOLERANCE = {"fp16": 1e-3, "bf16": 8e-3}
LSE_TOLERANCE = 1e-6


def _signature(kind: str) -> dict[str, str]:
    narrow = f"*{KINDS[kind].triton}"
    return {
        **dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "o_ptr", "do_ptr", "dk_ptr", "dv_ptr"), narrow),
        **dict.fromkeys(("lse_ptr", "delta_ptr", "dq_ptr"), "*fp32"),
        **dict.fromkeys(("index_ptr", "count_ptr"), "*i32"),
        **dict.fromkeys(("queries", "keys"), "i32:16"),
        "scale": "fp32",
    }


def _descriptors(kind: str, rows: Mapping[str, int], d: int) -> dict[str, str]:
    return {f"{name}_desc": f"tensordesc<{KINDS[kind].triton}[{count},{d}]>" for name, count in rows.items()}


def forward(
    target: str,
    kind: str,
    d: int,
    block: tuple[int, int],
    lengths: tuple[int, int],
    heads: int = 1,
    causal: bool = False,
    **options: Any,
) -> Program:
    """`attention_forward` over `lengths` = (queries, keys)."""
    queries, keys = lengths
    constants = {"D": d, "BLOCK_M": block[0], "BLOCK_N": block[1], "CAUSAL": causal}
    compiled = compile_ptx(kernels.attention_forward, _signature(kind), constants, target, **options)
    scale = d**-0.5

    def arguments(device: Any, rng: np.random.Generator) -> Any:
        q = normal(rng, (heads, queries, d))
        k, v = normal(rng, (heads, keys, d)), normal(rng, (heads, keys, d))
        mask = np.arange(queries)[:, None] >= np.arange(keys)[None, :] if causal else None
        out, lse = attention(q, k, v, scale, mask)
        o_tensor, lse_tensor = empty(device, q.shape, kind), empty(device, lse.shape, "fp32")
        inputs = [upload(device, x, kind) for x in (q, k, v)]
        expected = [o_tensor.expected("O", out, TOLERANCE[kind]), lse_tensor.expected("LSE", lse, LSE_TOLERANCE)]
        return [*inputs, o_tensor, lse_tensor, queries, keys, scale], expected

    return program(compiled, (queries // block[0], heads), arguments)


def forward_descriptors(
    target: str,
    kind: str,
    d: int,
    block: tuple[int, int],
    lengths: tuple[int, int],
    heads: int = 1,
    warp_specialize: bool = True,
    **options: Any,
) -> Program:
    """`attention_descriptors` over `lengths` = (queries, keys)."""
    queries, keys = lengths
    rows = {"q": block[0], "k": block[1], "v": block[1], "o": block[0]}
    signature = {**_signature(kind), **_descriptors(kind, rows, d)}
    constants = {"D": d, "BLOCK_M": block[0], "BLOCK_N": block[1], "WARP_SPECIALIZE": warp_specialize}
    compiled = compile_ptx(kernels.attention_descriptors, signature, constants, target, **options)
    scale = d**-0.5

    def arguments(device: Any, rng: np.random.Generator) -> Any:
        q = normal(rng, (heads, queries, d))
        k, v = normal(rng, (heads, keys, d)), normal(rng, (heads, keys, d))
        out, lse = attention(q, k, v, scale)
        inputs = [upload(device, x.reshape(-1, d), kind, described=True) for x in (q, k, v)]
        o_tensor = empty(device, (heads * queries, d), kind, described=True)
        lse_tensor = empty(device, lse.shape, "fp32")
        expected = [o_tensor.expected("O", out, TOLERANCE[kind]), lse_tensor.expected("LSE", lse, LSE_TOLERANCE)]
        return [*inputs, o_tensor, lse_tensor, queries, keys, scale], expected

    return program(compiled, (queries // block[0], heads), arguments)


def block_sparse(target: str, kind: str, d: int, block: int, blocks: int, slots: int, **options: Any) -> Program:
    """`attention_blocks` with between one and `slots` key blocks for each query block."""
    length = block * blocks
    constants = {"D": d, "BLOCK": block, "SLOTS": slots}
    compiled = compile_ptx(kernels.attention_blocks, _signature(kind), constants, target, **options)
    scale = d**-0.5

    def arguments(device: Any, rng: np.random.Generator) -> Any:
        q, k, v = (normal(rng, (1, length, d)) for _ in range(3))
        index = np.stack([rng.permutation(blocks)[:slots] for _ in range(blocks)])
        count = rng.integers(1, slots + 1, blocks)
        chosen = np.zeros((blocks, blocks), bool)
        for row in range(blocks):
            chosen[row, index[row, : count[row]]] = True
        out, _ = attention(q, k, v, scale, chosen.repeat(block, 0).repeat(block, 1))
        o_tensor = empty(device, q.shape, kind)
        inputs = [upload(device, x, kind) for x in (q, k, v)]
        lists = [upload(device, index, "i32"), upload(device, count, "i32")]
        expected = [o_tensor.expected("O", out, TOLERANCE[kind])]
        return [*inputs, o_tensor, *lists, length, length, scale], expected

    return program(compiled, (blocks, 1), arguments)


def delta(target: str, kind: str, d: int, rows: int, block: int) -> Program:
    """`attention_delta`."""
    compiled = compile_ptx(kernels.attention_delta, _signature(kind), {"D": d, "BLOCK_M": block}, target)

    def arguments(device: Any, rng: np.random.Generator) -> Any:
        o, do = normal(rng, (rows, d)), normal(rng, (rows, d))
        result = empty(device, (rows,), "fp32")
        return [upload(device, o, kind), upload(device, do, kind), result], [
            result.expected("delta", (o * do).sum(1), 1e-6)
        ]

    return program(compiled, (rows // block,), arguments)


def backward(
    target: str,
    kind: str,
    d: int,
    block: tuple[int, int],
    lengths: tuple[int, int],
    descriptors: bool = False,
    warp_specialize: bool = False,
    **options: Any,
) -> Program:
    """`attention_backward`, or `attention_backward_descriptors`, over one head."""
    queries, keys = lengths
    constants: dict[str, Any] = {"D": d, "BLOCK_M": block[0], "BLOCK_N": block[1]}
    signature = _signature(kind)
    function = kernels.attention_backward
    if descriptors:
        function = kernels.attention_backward_descriptors
        constants["WARP_SPECIALIZE"] = warp_specialize
        rows = {"q": block[0], "do": block[0], "k": block[1], "v": block[1], "dk": block[1], "dv": block[1]}
        signature |= {**_descriptors(kind, rows, d), **_descriptors("fp32", {"dq": block[0]}, d)}
    compiled = compile_ptx(function, signature, constants, target, **options)
    scale = d**-0.5

    def arguments(device: Any, rng: np.random.Generator) -> Any:
        q, do = normal(rng, (queries, d)), normal(rng, (queries, d))
        k, v = normal(rng, (keys, d)), normal(rng, (keys, d))
        lse, row_sums, dq, dk, dv = attention_backward(q, k, v, do, scale)
        inputs = [upload(device, x, kind, descriptors) for x in (q, k, v, do)]
        statistics = [upload(device, lse, "fp32"), upload(device, row_sums, "fp32")]
        # dQ is added to, so it starts as zeros.
        gradients = [
            upload(device, np.zeros_like(dq), "fp32", descriptors),
            empty(device, dk.shape, kind, descriptors),
            empty(device, dv.shape, kind, descriptors),
        ]
        named = zip(gradients, ("dQ", "dK", "dV"), (dq, dk, dv), strict=True)
        expected = [tensor.expected(name, reference, TOLERANCE[kind]) for tensor, name, reference in named]
        return [*inputs, *statistics, *gradients, queries, keys, scale], expected

    return program(compiled, (keys // block[1], 1), arguments)


def _sm100_forward(add: Callable[..., None]) -> None:
    t = "sm_100a"
    add("attention_ws", t, False, forward_descriptors, "fp16", 64, (128, 128), (128, 4096), num_stages=2)
    add("attention_ws-128x64", t, True, forward_descriptors, "fp16", 64, (128, 64), (128, 320), num_stages=2)
    add("attention_ws-heads", t, False, forward_descriptors, "bf16", 64, (128, 128), (256, 512), 2, num_stages=3)
    add("attention-128x64-fp16", t, True, forward, "fp16", 64, (128, 64), (128, 192), num_stages=2)
    add("attention-64x64-causal-bf16", t, True, forward, "bf16", 64, (64, 64), (192, 192), 1, True, num_stages=2)
    add(
        "attention-128x64-d128-w8-bf16",
        t,
        False,
        forward,
        "bf16",
        128,
        (128, 64),
        (128, 256),
        2,
        num_stages=2,
        num_warps=8,
    )
    add(
        "attention_descriptors-128x64",
        t,
        True,
        forward_descriptors,
        "fp16",
        64,
        (128, 64),
        (128, 192),
        1,
        False,
        num_stages=2,
    )
    add("attention_blocks-bf16", t, True, block_sparse, "bf16", 64, 64, 4, 3, num_stages=2)
    add("attention_delta-bf16", t, True, delta, "bf16", 64, 128, 64)


def _sm100_backward(add: Callable[..., None]) -> None:
    t = "sm_100a"
    add("attention_backward-64x64-bf16", t, True, backward, "bf16", 64, (64, 64), (128, 64), num_stages=1)
    # The pipelined loop has no fence.proxy.async between waiting for cp.async and the tcgen05.mma that reads what it
    # brought; the other kernels with cp.async have one.
    add(
        "attention_backward-64x128-fp16-w8",
        t,
        False,
        backward,
        "fp16",
        64,
        (64, 128),
        (256, 256),
        num_stages=2,
        num_warps=8,
        known=("proxy",),
    )
    add(
        "attention_backward_descriptors-64x128",
        t,
        True,
        backward,
        "bf16",
        64,
        (64, 128),
        (128, 128),
        True,
        num_stages=2,
        num_warps=8,
    )
    add(
        "attention_backward_descriptors-128x128",
        t,
        False,
        backward,
        "bf16",
        64,
        (128, 128),
        (256, 256),
        True,
        num_stages=1,
        num_warps=8,
    )
    # Most other shapes fail in the pipeliner of Triton 3.8 or become a lone trap, which compile_ptx refuses.
    add(
        "attention_backward_ws-128x64-w8",
        t,
        True,
        backward,
        "bf16",
        64,
        (128, 64),
        (256, 64),
        True,
        True,
        num_stages=1,
        num_warps=8,
    )


def _sm90(add: Callable[..., None]) -> None:
    t = "sm_90a"
    add("attention-64x64-fp16", t, True, forward, "fp16", 64, (64, 64), (64, 192), num_stages=2)
    add(
        "attention_descriptors-128x64",
        t,
        False,
        forward_descriptors,
        "fp16",
        64,
        (128, 64),
        (128, 256),
        1,
        False,
        num_stages=2,
    )
    add("attention_backward-64x64-bf16", t, True, backward, "bf16", 64, (64, 64), (128, 64), num_stages=1)


def _sm12x(add: Callable[..., None]) -> None:
    for t in ("sm_120a", "sm_121a"):
        small = t == "sm_121a"
        add("attention-64x32-causal-fp16", t, small, forward, "fp16", 64, (64, 32), (64, 64), 1, True, num_stages=2)
        add("attention_backward-32x32-bf16", t, small, backward, "bf16", 64, (32, 32), (64, 32), num_stages=1)


def cases() -> list[Case]:
    """Attention, by target. `triton/attention_ws` is what speed is measured on."""
    found: list[Case] = []

    def add(
        name: str, target: str, small: bool, make: Any, *arguments: Any, known: tuple[str, ...] = (), **options: Any
    ) -> None:
        found.append(Case(f"triton/{name}", target, small, lambda: make(target, *arguments, **options), known))

    for family in (_sm100_forward, _sm100_backward, _sm90, _sm12x):
        family(add)
    return found
