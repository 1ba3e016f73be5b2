"""Cases: Gluon kernels for sm_100a. What only moves data must come back bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from triton.experimental.gluon import language as gl

from . import gluon_blackwell_kernels as kernels
from .case import KINDS, Case, Program, empty, program, upload
from .compile import compile_ptx
from .references import quarters

TARGET = "sm_100a"


def described(kind: str, shape: Sequence[int], swizzle: int, cga_layout: Sequence[Sequence[int]] = ()) -> str:
    """Triton type of a host tensor descriptor with a shared-memory swizzle of 0, 32, 64 or 128 bytes."""
    bits = KINDS[kind].encode(np.zeros(1)).itemsize * 8
    layout = gl.NVMMASharedLayout(swizzle, bits, rank=len(shape), cga_layout=[list(basis) for basis in cga_layout])
    return f"tensordesc<{KINDS[kind].triton}[{','.join(map(str, shape))}],{layout!r}>"


def round_trip(kind: str, m: int, n: int, store: str, load: str, stride: int = 1, **options: Any) -> Program:
    """`tensor_memory_round_trip`; `stride` 2 keeps 16-bit elements in a column each."""
    pointer = f"*{KINDS[kind].triton}"
    constants = {"M": m, "N": n, "STRIDE": stride, "STORE": store, "LOAD": load}
    signature = {"source_ptr": pointer, "target_ptr": pointer}
    compiled = compile_ptx(kernels.tensor_memory_round_trip, signature, constants, TARGET, **options)

    def arguments(device: Any, rng: np.random.Generator) -> Any:
        values = rng.permutation(m * n).reshape(m, n) / 4.0
        source = upload(device, values, kind)
        target = empty(device, (m, n), kind)
        return [source, target], [target.expected("target", source.kind.decode(source.buffer.array.copy()))]

    return program(compiled, (1,), arguments)


def product(
    kind: str,
    shape: tuple[int, int, int],
    swizzles: tuple[int, int] = (128, 128),
    transposed: str = "",
    tensor_memory: bool = False,
    load: str = "32x32b",
    **options: Any,
) -> Program:
    """`tcgen05_product`; `transposed` names the operands that stand column-major in shared memory ("a", "b")."""
    m, n, k = shape
    pointer = f"*{KINDS[kind].triton}"
    constants = {
        **dict(zip("MNK", shape, strict=True)),
        "SWIZZLE_A": swizzles[0],
        "SWIZZLE_B": swizzles[1],
        "TRANSPOSED_A": "a" in transposed,
        "TRANSPOSED_B": "b" in transposed,
        "A_IN_TENSOR_MEMORY": tensor_memory,
        "LOAD": load,
    }
    signature = {"a_ptr": pointer, "b_ptr": pointer, "c_ptr": "*fp32"}
    compiled = compile_ptx(kernels.tcgen05_product, signature, constants, TARGET, **options)

    def arguments(device: Any, rng: np.random.Generator) -> Any:
        a, b = quarters(rng, (m, k)), quarters(rng, (k, n))
        c = empty(device, (m, n), "fp32")
        return [upload(device, a, kind), upload(device, b, kind), c], [c.expected("C", a @ b)]

    return program(compiled, (1,), arguments)


def copy_to_tensor_memory(swizzle: int) -> Program:
    """`shared_to_tensor_memory`, 128 x 32."""
    m, n = 128, 32
    signature = {"source_desc": described("fp32", (m, n), swizzle), "target_ptr": "*fp32"}
    compiled = compile_ptx(kernels.shared_to_tensor_memory, signature, {"M": m, "N": n}, TARGET)

    def arguments(device: Any, rng: np.random.Generator) -> Any:
        values = quarters(rng, (m, n))
        target = empty(device, (m, n), "fp32")
        return [upload(device, values, "fp32", True), target], [target.expected("target", values)]

    return program(compiled, (1,), arguments)


def copies(row: int, column: int) -> Program:
    """`tensor_copies` of a 32 x 32 box over 70 x 40 integers; what sticks out reads as zero and is not written."""
    box, shape = (32, 32), (70, 40)
    names = ("source_desc", "target_desc", "added_desc", "least_desc")
    signature = {**dict.fromkeys(names, described("i32", box, 128)), "row": "i32", "column": "i32"}
    compiled = compile_ptx(kernels.tensor_copies, signature, {}, TARGET)

    def arguments(device: Any, rng: np.random.Generator) -> Any:
        arrays = [rng.integers(-1000, 1000, shape) for _ in names]
        inside = np.zeros(shape, bool)
        inside[max(row, 0) : row + box[0], max(column, 0) : column + box[1]] = True
        source, target, added, least = arrays
        results = [
            np.where(inside, source, target),
            np.where(inside, added + source, added),
            np.where(inside, np.minimum(least, source), least),
        ]
        tensors = [upload(device, array, "i32", True) for array in arrays]
        named = zip(tensors[1:], ("target", "added", "least"), results, strict=True)
        return [*tensors, row, column], [tensor.expected(name, result) for tensor, name, result in named]

    return program(compiled, (1,), arguments)


def gathered(rows: int, column: int) -> Program:
    """`gather_scatter` of fp16 rows of 64 from a table of 50 x 128."""
    table = (50, 128)
    box = described("fp16", (1, 64), 128)
    signature = {"source_desc": box, "target_desc": box, "index_ptr": "*i32", "column": "i32"}
    compiled = compile_ptx(kernels.gather_scatter, signature, {"ROWS": rows}, TARGET)

    def arguments(device: Any, rng: np.random.Generator) -> Any:
        source = quarters(rng, table)
        index = rng.permutation(table[0])[:rows]
        target = np.zeros((2 * table[0], table[1]))
        target[2 * index, column : column + 64] = source[index, column : column + 64]
        result = upload(device, np.zeros_like(target), "fp16", True)
        tensors = [upload(device, source, "fp16", True), result, upload(device, index, "i32")]
        return [*tensors, column], [result.expected("target", target)]

    return program(compiled, (1,), arguments)


def specialised(kind: str, block: tuple[int, int, int], shape: tuple[int, int, int], stages: int) -> Program:
    """`warp_specialised_product`."""
    (bm, bn, bk), (m, n, k) = block, shape
    signature = {
        "a_desc": described(kind, (bm, bk), 128),
        "b_desc": described(kind, (bn, bk), 128),
        "c_desc": described(kind, (bm, bn), 128),
        "steps": "i32",
    }
    compiled = compile_ptx(kernels.warp_specialised_product, signature, {"STAGES": stages}, TARGET)

    def arguments(device: Any, rng: np.random.Generator) -> Any:
        a, b = quarters(rng, (m, k)), quarters(rng, (n, k))
        c = empty(device, (m, n), kind, True)
        return [upload(device, a, kind, True), upload(device, b, kind, True), c, k // bk], [c.expected("C", a @ b.T)]

    return program(compiled, (m // bm, n // bn), arguments)


def clustered(block: tuple[int, int, int], steps: int, paired: bool, multicast: bool) -> Program:
    """`cluster_product` in bf16; one cluster of two CTAs."""
    m, n, k = block
    split = [[0, 1]] if paired else [[0, 0]]
    signature = {
        "a_desc": described("bf16", (m, k), 128, [[1, 0]]),
        "b_desc": described("bf16", (k, n), 64, split),
        "c_desc": described("bf16", (m, n), 128, [[1, 0]]),
        "steps": "i32",
    }
    constants = {"PAIRED": paired, "MULTICAST": multicast}
    compiled = compile_ptx(kernels.cluster_product, signature, constants, TARGET, num_ctas=2)

    def arguments(device: Any, rng: np.random.Generator) -> Any:
        a, b = quarters(rng, (m, k * steps)), quarters(rng, (k * steps, n))
        c = empty(device, (m, n), "bf16", True)
        return [upload(device, a, "bf16", True), upload(device, b, "bf16", True), c, steps], [c.expected("C", a @ b)]

    return program(compiled, (1,), arguments)


def cancelled(blocks: int) -> Program:
    """`launch_control`."""
    block = 256
    signature = {"source_ptr": "*fp32", "target_ptr": "*fp32"}
    compiled = compile_ptx(kernels.launch_control, signature, {"BLOCK": block}, TARGET)

    def arguments(device: Any, rng: np.random.Generator) -> Any:
        values = quarters(rng, (block * blocks,))
        target = empty(device, values.shape, "fp32")
        return [upload(device, values, "fp32"), target], [target.expected("target", 2 * values)]

    return program(compiled, (blocks,), arguments)


def cases() -> list[Case]:
    """All for sm_100a."""
    found: list[Case] = []

    def add(name: str, small: bool, make: Any, *arguments: Any, **options: Any) -> None:
        found.append(Case(f"gluon/{name}", TARGET, small, lambda: make(*arguments, **options)))

    shapes = ("32x32b", "16x64b", "16x128b", "16x256b")
    for m in (64, 128):
        for store, load in zip(shapes, shapes[1:] + shapes[:1], strict=True):
            add(
                f"tensor_memory-m{m}-{store}-{load}",
                m == 64 or store == "16x64b",
                round_trip,
                "fp32",
                m,
                64,
                store,
                load,
            )
    add("tensor_memory-packed", True, round_trip, "fp16", 128, 64, "32x32b", "16x128b")
    add("tensor_memory-unpacked", True, round_trip, "fp16", 128, 64, "16x64b", "16x256b", 2)
    add("tensor_memory-w8", False, round_trip, "fp32", 128, 64, "32x32b_splitn", "32x32b", num_warps=8)
    add("product-128x64x64", True, product, "fp16", (128, 64, 64), transposed="b")
    add("product-mn_major_b", True, product, "bf16", (128, 64, 64))
    add("product-m64-n8-no_swizzle", True, product, "fp16", (64, 8, 64), (128, 0))
    add("product-swizzles-64-32", True, product, "fp16", (128, 64, 64), (64, 32), "b")
    add("product-mn_major-64", True, product, "fp16", (128, 64, 64), (64, 64), "a")
    add("product-mn_major-32", True, product, "fp16", (128, 64, 64), (32, 32), "a")
    add(
        "product-tensor_memory_a-16x256b",
        True,
        product,
        "bf16",
        (128, 64, 64),
        transposed="b",
        tensor_memory=True,
        load="16x256b",
    )
    add("product-tensor_memory_a-m64-16x128b", True, product, "fp16", (64, 64, 64), tensor_memory=True, load="16x128b")
    add("product-e4m3", True, product, "e4m3", (128, 64, 128), transposed="b")
    add("product-e5m2-m64", False, product, "e5m2", (64, 64, 64), (64, 64), "b")
    add("product-tf32", True, product, "fp32", (128, 64, 32), transposed="b")
    add("product-m64-n256-16x64b", True, product, "fp16", (64, 256, 64), (128, 64), load="16x64b")
    for swizzle in (32, 64, 128):
        add(f"tensor_memory_copy-{swizzle}B", swizzle != 64, copy_to_tensor_memory, swizzle)
    add("tensor_copies", True, copies, 8, 4)
    add("tensor_copies-out_of_bounds", True, copies, 50, 20)
    add("gather_scatter", True, gathered, 32, 64)
    add("warp_specialised-128x128x64", True, specialised, "bf16", (128, 128, 64), (128, 128, 448), 3)
    add("warp_specialised-64x128x64", True, specialised, "fp16", (64, 128, 64), (128, 128, 320), 2)
    add("cluster-paired", True, clustered, (256, 64, 64), 3, True, False)
    add("cluster-paired-m128", True, clustered, (128, 64, 64), 3, True, False)
    add("cluster-paired-multicast", False, clustered, (256, 128, 64), 3, True, True)
    add("cluster-multicast", True, clustered, (256, 64, 64), 3, False, True)
    add("launch_control", True, cancelled, 6)
    return found
