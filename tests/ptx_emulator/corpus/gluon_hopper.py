"""Cases: Gluon kernels for sm_90a; the two that use no wgmma also for sm_100a."""

from __future__ import annotations

from typing import Any

import numpy as np
from triton.experimental.gluon import language as gl

from . import gluon_hopper_kernels as kernels
from .case import KINDS, Case, Program, empty, program, upload
from .compile import compile_ptx
from .gluon_blackwell import described
from .references import quarters


def product(
    target: str,
    kind: str,
    shape: tuple[int, int, int],
    swizzles: tuple[int, int] = (128, 128),
    transposed: str = "",
    registers: bool = False,
    **options: Any,
) -> Program:
    """`wgmma_product`; `transposed` names the operands that stand column-major in shared memory ("a", "b")."""
    m, n, k = shape
    pointer = f"*{KINDS[kind].triton}"
    constants = {
        **dict(zip("MNK", shape, strict=True)),
        "SWIZZLE_A": swizzles[0],
        "SWIZZLE_B": swizzles[1],
        "TRANSPOSED_A": "a" in transposed,
        "TRANSPOSED_B": "b" in transposed,
        "A_IN_REGISTERS": registers,
        "INSTRUCTION_K": 32 // KINDS[kind].encode(np.zeros(1)).itemsize,
    }
    signature = {"a_ptr": pointer, "b_ptr": pointer, "c_ptr": "*fp32"}
    compiled = compile_ptx(kernels.wgmma_product, signature, constants, target, **options)

    def arguments(device: Any, rng: np.random.Generator) -> Any:
        a, b = quarters(rng, (m, k)), quarters(rng, (k, n))
        c = empty(device, (m, n), "fp32")
        return [upload(device, a, kind), upload(device, b, kind), c], [c.expected("C", a @ b)]

    return program(compiled, (1,), arguments)


def specialised(
    target: str, kind: str, block: tuple[int, int, int], shape: tuple[int, int, int], stages: int
) -> Program:
    """`warp_specialised_product`."""
    (bm, bn, bk), (m, n, k) = block, shape
    signature = {
        "a_desc": described(kind, (bm, bk), 128),
        "b_desc": described(kind, (bk, bn), 128),
        "c_desc": described(kind, (bm, bn), 128),
        "steps": "i32",
    }
    compiled = compile_ptx(kernels.warp_specialised_product, signature, {"STAGES": stages}, target)

    def arguments(device: Any, rng: np.random.Generator) -> Any:
        a, b = quarters(rng, (m, k)), quarters(rng, (k, n))
        c = empty(device, (m, n), kind, True)
        return [upload(device, a, kind, True), upload(device, b, kind, True), c, k // bk], [c.expected("C", a @ b)]

    return program(compiled, (m // bm, n // bn), arguments)


def clustered(target: str, block: tuple[int, int, int], steps: int) -> Program:
    """`cluster_product` in fp16; one cluster of two CTAs."""
    m, n, k = block
    signature = {
        "a_desc": described("fp16", (m, k), 128, [[1, 0]]),
        "b_desc": described("fp16", (k, n), 64, [[0, 0]]),
        "c_desc": described("fp16", (m, n), 128, [[1, 0]]),
        "steps": "i32",
    }
    compiled = compile_ptx(kernels.cluster_product, signature, {}, target, num_ctas=2)

    def arguments(device: Any, rng: np.random.Generator) -> Any:
        a, b = quarters(rng, (m, k * steps)), quarters(rng, (k * steps, n))
        c = empty(device, (m, n), "fp16", True)
        return [upload(device, a, "fp16", True), upload(device, b, "fp16", True), c, steps], [c.expected("C", a @ b)]

    return program(compiled, (1,), arguments)


def remote(target: str) -> Program:
    """`remote_store`, 32 x 32 values between two CTAs of two warps."""
    m = n = 32
    constants = {
        "M": m,
        "N": n,
        "by_rows": gl.BlockedLayout([1, 4], [8, 4], [2, 1], [1, 0], cga_layout=[[1, 0]]),
        "by_columns": gl.BlockedLayout([1, 4], [8, 4], [2, 1], [1, 0], cga_layout=[[0, 1]]),
        "shared": gl.SwizzledSharedLayout(1, 1, 1, [1, 0], cga_layout=[[0, 1]]),
    }
    signature = {"source_ptr": "*fp32", "target_ptr": "*fp32"}
    compiled = compile_ptx(kernels.remote_store, signature, constants, target, num_ctas=2, num_warps=2)

    def arguments(device: Any, rng: np.random.Generator) -> Any:
        values = quarters(rng, (m, n))
        result = empty(device, (m, n), "fp32")
        return [upload(device, values, "fp32"), result], [result.expected("target", values)]

    return program(compiled, (1,), arguments)


def staged(target: str, rows: int, stages: int) -> Program:
    """`staged_sum` of rows of 512."""
    columns = 512
    constants = {"N": columns, "STAGES": stages}
    signature = {"source_ptr": "*fp32", "target_ptr": "*fp32", "rows": "i32"}
    compiled = compile_ptx(kernels.staged_sum, signature, constants, target)

    def arguments(device: Any, rng: np.random.Generator) -> Any:
        values = quarters(rng, (rows, columns))
        result = empty(device, (columns,), "fp32")
        return [upload(device, values, "fp32"), result, rows], [result.expected("target", values.sum(0))]

    return program(compiled, (1,), arguments)


def cases() -> list[Case]:
    """For sm_90a, and a few for sm_100a."""
    found: list[Case] = []

    def add(name: str, target: str, small: bool, make: Any, *arguments: Any, **options: Any) -> None:
        found.append(Case(f"gluon/{name}", target, small, lambda: make(target, *arguments, **options)))

    t = "sm_90a"
    add("wgmma-64x64x64", t, True, product, "fp16", (64, 64, 64), transposed="b")
    add("wgmma-mn_major-64-32", t, True, product, "fp16", (64, 64, 64), (64, 32), "a")
    add("wgmma-registers", t, True, product, "bf16", (64, 64, 64), transposed="b", registers=True)
    add("wgmma-128x256x64", t, False, product, "bf16", (128, 256, 64))
    add("wgmma-e4m3", t, True, product, "e4m3", (64, 64, 128), transposed="b")
    add("wgmma-e5m2-registers", t, True, product, "e5m2", (64, 64, 128), transposed="b", registers=True)
    add("wgmma-tf32", t, True, product, "fp32", (64, 64, 32), transposed="b")
    add("warp_specialised-64x128x64", t, True, specialised, "bf16", (64, 128, 64), (128, 128, 448), 3)
    add("cluster-multicast", t, True, clustered, (128, 64, 64), 3)
    for t in ("sm_90a", "sm_100a"):
        add("remote_store", t, t == "sm_90a", remote)
        add("staged_sum", t, True, staged, 7, 3)
    return found
