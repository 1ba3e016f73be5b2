"""Cases: Triton matrix products. Inputs are multiples of 1/4, so sums are exact and C is known to the last bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import triton.language as tl

from . import triton_matmul_kernels as kernels
from .case import KINDS, Case, Program, empty, program, upload
from .compile import compile_ptx
from .references import quarters

BLOCK = (128, 128, 64)
SIZES = {"M": "i32:16", "N": "i32:16", "K": "i32:16"}


def _blocks(m: int, n: int, k: int) -> dict[str, int]:
    return {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k}


def pointers(
    target: str,
    kind: str,
    out: str,
    block: tuple[int, int, int],
    shape: tuple[int, int, int],
    transposed: str = "",
    masked: bool = False,
    accumulator: tl.dtype = tl.float32,
    **options: Any,
) -> Program:
    """`matmul`; `transposed` names the operands ("a", "b") whose memory order is swapped."""
    m, n, k = shape
    constants = {**_blocks(*block), "MASKED": masked, "ACCUMULATOR": accumulator}
    constants["stride_am" if "a" in transposed else "stride_ak"] = 1
    constants["stride_bk" if "b" in transposed else "stride_bn"] = 1
    signature = {
        "a_ptr": f"*{KINDS[kind].triton}",
        "b_ptr": f"*{KINDS[kind].triton}",
        "c_ptr": f"*{KINDS[out].triton}",
        **(dict.fromkeys("MNK", "i32") if masked else SIZES),
        **dict.fromkeys(("stride_am", "stride_ak", "stride_bk", "stride_bn"), "i32" if masked else "i32:16"),
    }
    compiled = compile_ptx(kernels.matmul, signature, constants, target, **options)

    def arguments(device: Any, rng: np.random.Generator) -> Any:
        a, b = quarters(rng, (m, k)), quarters(rng, (k, n))
        if kind == "i8":
            a, b = a * 4, b * 4
        a_tensor = upload(device, a.T if "a" in transposed else a, kind)
        b_tensor = upload(device, b.T if "b" in transposed else b, kind)
        c_tensor = empty(device, (m, n), out)
        strides = [m if "a" in transposed else k, k if "b" in transposed else n]
        return [a_tensor, b_tensor, c_tensor, m, n, k, *strides], [c_tensor.expected("C", a @ b)]

    return program(compiled, (-(-m // block[0]), -(-n // block[1])), arguments)


def split_k(target: str, block: tuple[int, int, int], shape: tuple[int, int, int], splits: int) -> Program:
    """`matmul_split_k` in bf16 with float32 results."""
    m, n, k = shape
    signature = {"a_ptr": "*bf16", "b_ptr": "*bf16", "c_ptr": "*fp32", **SIZES}
    compiled = compile_ptx(kernels.matmul_split_k, signature, {**_blocks(*block), "SPLITS": splits}, target)

    def arguments(device: Any, rng: np.random.Generator) -> Any:
        a, b = quarters(rng, (m, k)), quarters(rng, (k, n))
        c = upload(device, np.zeros((m, n)), "fp32")
        return [upload(device, a, "bf16"), upload(device, b, "bf16"), c, m, n, k], [c.expected("C", a @ b)]

    return program(compiled, (m // block[0], n // block[1], splits), arguments)


def device_descriptors(
    target: str,
    kind: str,
    block: tuple[int, int, int],
    shape: tuple[int, int, int],
    warp_specialize: bool = False,
    **options: Any,
) -> Program:
    """`matmul_device_descriptors`; sizes need not be multiples of the block."""
    m, n, k = shape
    signature = {**dict.fromkeys(("a_ptr", "b_ptr", "c_ptr"), f"*{KINDS[kind].triton}"), **SIZES, "M": "i32"}
    constants = {**_blocks(*block), "WARP_SPECIALIZE": warp_specialize}
    compiled = compile_ptx(kernels.matmul_device_descriptors, signature, constants, target, **options)

    def arguments(device: Any, rng: np.random.Generator) -> Any:
        a, b = quarters(rng, (m, k)), quarters(rng, (n, k))
        c = empty(device, (m, n), kind)
        return [upload(device, a, kind), upload(device, b, kind), c, m, n, k], [c.expected("C", a @ b.T)]

    return program(compiled, (-(-m // block[0]), -(-n // block[1])), arguments)


def _described(kind: str, shape: Sequence[int]) -> str:
    return f"tensordesc<{KINDS[kind].triton}[{','.join(map(str, shape))}]>"


def host_descriptors(
    target: str,
    kind: str,
    out: str,
    block: tuple[int, int, int],
    shape: tuple[int, int, int],
    transposed: str = "",
    warp_specialize: bool = False,
    **options: Any,
) -> Program:
    """`matmul_host_descriptors`; num_ctas=2 in `options` makes clusters of two."""
    bm, bn, bk = block
    m, n, k = shape
    signature = {
        "a_desc": _described(kind, (bk, bm) if "a" in transposed else (bm, bk)),
        "b_desc": _described(kind, (bn, bk) if "b" in transposed else (bk, bn)),
        "c_desc": _described(out, (bm, bn)),
        "K": "i32:16",
    }
    constants = {
        **_blocks(*block),
        "WARP_SPECIALIZE": warp_specialize,
        "TRANSPOSED_A": "a" in transposed,
        "TRANSPOSED_B": "b" in transposed,
    }
    compiled = compile_ptx(kernels.matmul_host_descriptors, signature, constants, target, **options)

    def arguments(device: Any, rng: np.random.Generator) -> Any:
        a, b = quarters(rng, (m, k)), quarters(rng, (k, n))
        a_tensor = upload(device, a.T if "a" in transposed else a, kind, described=True)
        b_tensor = upload(device, b.T if "b" in transposed else b, kind, described=True)
        c_tensor = empty(device, (m, n), out, described=True)
        return [a_tensor, b_tensor, c_tensor, k], [c_tensor.expected("C", a @ b)]

    return program(compiled, (-(-m // bm), -(-n // bn)), arguments)


def persistent(
    target: str,
    kind: str,
    block: tuple[int, int, int],
    shape: tuple[int, int, int],
    programs: int,
    warp_specialize: bool = False,
    **options: Any,
) -> Program:
    """`matmul_persistent`; more tiles than programs, so that accumulators and phases wrap around."""
    bm, bn, bk = block
    m, n, k = shape
    signature = {
        "a_desc": _described(kind, (bm, bk)),
        "b_desc": _described(kind, (bn, bk)),
        "c_desc": _described(kind, (bm, bn)),
        **SIZES,
    }
    constants = {**_blocks(*block), "PROGRAMS": programs, "WARP_SPECIALIZE": warp_specialize}
    compiled = compile_ptx(kernels.matmul_persistent, signature, constants, target, **options)

    def arguments(device: Any, rng: np.random.Generator) -> Any:
        a, b = quarters(rng, (m, k)), quarters(rng, (n, k))
        tensors = [upload(device, a, kind, True), upload(device, b, kind, True), empty(device, (m, n), kind, True)]
        return [*tensors, m, n, k], [tensors[2].expected("C", a @ b.T)]

    return program(compiled, (programs,), arguments)


def _sm100(add: Callable[..., None]) -> None:
    t = "sm_100a"
    add("matmul-128x128x64-fp16", t, True, pointers, "fp16", "fp16", BLOCK, (128, 128, 320))
    add("matmul-64x128x64-bf16", t, True, pointers, "bf16", "bf16", (64, 128, 64), (128, 128, 256))
    add("matmul-128x64x128-e4m3", t, True, pointers, "e4m3", "fp16", (128, 64, 128), (128, 64, 384))
    add("matmul-128x64x64-e5m2", t, False, pointers, "e5m2", "fp32", (128, 64, 64), (128, 128, 256))
    add("matmul-128x64x32-tf32", t, True, pointers, "fp32", "fp32", (128, 64, 32), (128, 64, 128))
    add("matmul-128x64x64-i8", t, True, pointers, "i8", "i32", (128, 64, 64), (128, 64, 256), accumulator=tl.int32)
    add("matmul-transposed_a-fp16", t, True, pointers, "fp16", "fp16", (128, 64, 64), (128, 64, 256), "a")
    add(
        "matmul-transposed_ab-256x128x64-w8",
        t,
        False,
        pointers,
        "bf16",
        "bf16",
        (256, 128, 64),
        (256, 128, 192),
        "ab",
        num_warps=8,
    )
    add("matmul-masked-fp16", t, True, pointers, "fp16", "fp32", (64, 64, 64), (100, 77, 145), masked=True)
    add(
        "matmul-fp16_accumulator",
        t,
        True,
        pointers,
        "fp16",
        "fp16",
        (128, 64, 64),
        (128, 64, 128),
        accumulator=tl.float16,
    )
    add("matmul_split_k-bf16", t, True, split_k, (128, 64, 64), (128, 64, 512), 2)
    add("matmul_device_descriptors-bf16", t, True, device_descriptors, "bf16", BLOCK, (200, 136, 200))
    add("matmul_ws-128x128x64-bf16", t, True, device_descriptors, "bf16", BLOCK, (128, 256, 448), True)
    add("matmul_host_descriptors-fp16", t, True, host_descriptors, "fp16", "fp16", BLOCK, (136, 128, 264))
    add(
        "matmul_host_descriptors-64x64x32-e4m3",
        t,
        True,
        host_descriptors,
        "e4m3",
        "fp16",
        (64, 64, 32),
        (128, 64, 160),
        "b",
    )
    add(
        "matmul_host_descriptors-transposed_ab", t, True, host_descriptors, "bf16", "bf16", BLOCK, (128, 128, 192), "ab"
    )
    add("matmul_ws_host-fp16", t, True, host_descriptors, "fp16", "fp16", (128, 64, 64), (256, 64, 384), "", True)
    add(
        "matmul_cluster-256x128x64",
        t,
        True,
        host_descriptors,
        "fp16",
        "fp16",
        (256, 128, 64),
        (256, 128, 192),
        num_ctas=2,
    )
    add("matmul_persistent-fp16", t, True, persistent, "fp16", (128, 64, 64), (384, 128, 192), 2)
    add("matmul_persistent_ws-fp16", t, True, persistent, "fp16", (128, 64, 64), (384, 128, 192), 2, True)
    add("matmul_persistent_ws-large", t, False, persistent, "bf16", BLOCK, (768, 512, 512), 4, True)


def _sm90(add: Callable[..., None]) -> None:
    t = "sm_90a"
    add("matmul-128x128x64-fp16", t, True, pointers, "fp16", "fp16", BLOCK, (128, 128, 256))
    add("matmul-64x64x64-e4m3", t, True, pointers, "e4m3", "fp16", (64, 64, 64), (64, 64, 256))
    add("matmul-64x64x32-tf32", t, True, pointers, "fp32", "fp32", (64, 64, 32), (64, 64, 128))
    add("matmul_ws-128x128x64-bf16", t, True, device_descriptors, "bf16", BLOCK, (128, 128, 448), True)
    add("matmul_cluster-128x128x64", t, True, host_descriptors, "fp16", "fp16", BLOCK, (128, 128, 192), num_ctas=2)
    add("matmul_persistent-fp16", t, False, persistent, "fp16", BLOCK, (384, 256, 192), 2)


def _sm12x(add: Callable[..., None]) -> None:
    for t in ("sm_120a", "sm_121a"):
        small = t == "sm_121a"
        add("matmul-64x64x32-fp16", t, small, pointers, "fp16", "fp16", (64, 64, 32), (64, 64, 128), num_stages=2)
        add("matmul-64x64x64-e4m3", t, small, pointers, "e4m3", "fp16", (64, 64, 64), (64, 64, 128), num_stages=2)
        add("matmul-64x64x32-tf32", t, small, pointers, "fp32", "fp32", (64, 64, 32), (64, 64, 96), num_stages=2)
        add(
            "matmul_device_descriptors-bf16",
            t,
            small,
            device_descriptors,
            "bf16",
            (64, 64, 64),
            (72, 64, 136),
            num_stages=2,
        )


def cases() -> list[Case]:
    """The products, by target."""
    found: list[Case] = []

    def add(name: str, target: str, small: bool, make: Any, *arguments: Any, **options: Any) -> None:
        found.append(Case(f"triton/{name}", target, small, lambda: make(target, *arguments, **options)))

    for family in (_sm100, _sm90, _sm12x):
        family(add)
    return found
