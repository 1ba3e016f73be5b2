"""Cases: Triton kernels without products."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from . import triton_row_kernels as kernels
from .case import KINDS, Case, Program, empty, program, upload
from .compile import compile_ptx
from .references import normal


def softmax(target: str, rows: int, columns: int) -> Program:
    """`softmax_rows`."""
    signature = {"x_ptr": "*fp32", "y_ptr": "*fp32", "columns": "i32"}
    compiled = compile_ptx(kernels.softmax_rows, signature, {"BLOCK": 1024}, target)

    def arguments(device: Any, rng: np.random.Generator) -> Any:
        x = normal(rng, (rows, columns))
        p = np.exp(x - x.max(1, keepdims=True))
        y = empty(device, x.shape, "fp32")
        return [upload(device, x, "fp32"), y, columns], [y.expected("Y", p / p.sum(1, keepdims=True), 1e-6)]

    return program(compiled, (rows,), arguments)


def norm(target: str, rows: int) -> Program:
    """`norm_rows` of 512 columns."""
    columns, epsilon = 512, 1e-5
    signature = {
        **dict.fromkeys(("x_ptr", "weight_ptr", "y_ptr"), "*bf16"),
        "sums_ptr": "*fp32",
        "lock_ptr": "*i32",
        "epsilon": "fp32",
    }
    compiled = compile_ptx(kernels.norm_rows, signature, {"COLUMNS": columns}, target)

    def arguments(device: Any, rng: np.random.Generator) -> Any:
        x, weight = normal(rng, (rows, columns)), normal(rng, (columns,))
        inverse = 1.0 / np.sqrt((x * x).mean(1, keepdims=True) + epsilon)
        y, sums = empty(device, x.shape, "bf16"), upload(device, np.zeros(columns), "fp32")
        tensors = [
            upload(device, x, "bf16"),
            upload(device, weight, "bf16"),
            y,
            sums,
            upload(device, np.zeros(1), "i32"),
        ]
        expected = [
            y.expected("Y", x * inverse * weight, 2 * KINDS["bf16"].rounding),
            sums.expected("sums", (x * x).sum(0), 1e-6),
        ]
        return [*tensors, epsilon], expected

    return program(compiled, (rows,), arguments)


def top(target: str, rows: int) -> Program:
    """`top_blocks`: 8 of 64."""
    count, keep = 64, 8
    signature = {"scores_ptr": "*i32", "index_ptr": "*i32"}
    compiled = compile_ptx(kernels.top_blocks, signature, {"COUNT": count, "KEEP": keep}, target, num_warps=1)

    def arguments(device: Any, rng: np.random.Generator) -> Any:
        scores = rng.integers(-20, 20, (rows, count))
        best = np.argsort(-scores, axis=1, kind="stable")[:, :keep]
        reference = np.full((rows, count), -1)
        reference[:, :keep] = best
        index = upload(device, np.full((rows, count), -1), "i32")
        return [upload(device, scores, "i32"), index], [index.expected("index", reference)]

    return program(compiled, (rows,), arguments)


def scan(target: str) -> Program:
    """`scan_rows` of 16 x 64 integers below 32."""
    rows, columns, bins = 16, 64, 32
    constants = {"ROWS": rows, "COLUMNS": columns, "BINS": bins}
    signature = dict.fromkeys(("x_ptr", "sum_ptr", "best_ptr", "histogram_ptr"), "*i32")
    compiled = compile_ptx(kernels.scan_rows, signature, constants, target)

    def arguments(device: Any, rng: np.random.Generator) -> Any:
        x = rng.integers(0, bins, (rows, columns))
        sums, best = empty(device, x.shape, "i32"), empty(device, (rows,), "i32")
        histogram = upload(device, np.zeros(bins), "i32")
        expected = [
            sums.expected("sums", x.cumsum(1)),
            best.expected("best", x.argmax(1)),
            histogram.expected("histogram", np.bincount(x.ravel(), minlength=bins)),
        ]
        return [upload(device, x, "i32"), sums, best, histogram], expected

    return program(compiled, (1,), arguments)


def convert(target: str) -> Program:
    """`convert_values` of 512 numbers."""
    block, count = 256, 512
    pointers = {"e4m3_ptr": "*fp8e4nv", "e5m2_ptr": "*fp8e5", "bf16_ptr": "*bf16", "f16_ptr": "*fp16", "i8_ptr": "*i8"}
    signature = {"x_ptr": "*fp32", **pointers}
    compiled = compile_ptx(kernels.convert_values, signature, {"BLOCK": block}, target, num_warps=1)

    def arguments(device: Any, rng: np.random.Generator) -> Any:
        x = normal(rng, (count,)) * 16.0
        erf = np.array([math.erf(value) for value in x])
        references = {
            "e4m3": x,
            "e5m2": x,
            "bf16": np.sin(x) + np.log(np.abs(x) + 1.0),
            "fp16": np.sqrt(np.abs(x)) + np.floor(x) + erf,
            "i8": np.trunc(np.clip(x, -100, 100)),
        }
        results = {kind: empty(device, x.shape, kind) for kind in references}
        # The slow mathematics is approximate: its results may round to the neighbour.
        expected = [
            results[kind].expected(kind, value, 2 * KINDS[kind].rounding if kind in ("bf16", "fp16") else None)
            for kind, value in references.items()
        ]
        return [upload(device, x, "fp32"), *results.values()], expected

    return program(compiled, (count // block,), arguments)


def chained(target: str, blocks: int) -> Program:
    """`chained_sum` over blocks of 256."""
    block = 256
    signature = {"x_ptr": "*fp32", "y_ptr": "*fp32", "flag_ptr": "*i32"}
    compiled = compile_ptx(kernels.chained_sum, signature, {"BLOCK": block}, target)

    def arguments(device: Any, rng: np.random.Generator) -> Any:
        x = normal(rng, (blocks, block))
        y, flags = empty(device, (blocks,), "fp32"), upload(device, np.zeros(blocks), "i32")
        return [upload(device, x, "fp32"), y, flags], [y.expected("Y", x.sum(1).cumsum(), 1e-6)]

    return program(compiled, (blocks,), arguments)


def cases() -> list[Case]:
    """Row kernels; in CI each once, on one of the targets."""
    found: list[Case] = []
    kernels_of = {
        "softmax": (softmax, (4, 781), "sm_100a"),
        "norm": (norm, (4,), "sm_90a"),
        "top_blocks": (top, (2,), "sm_100a"),
        "scan": (scan, (), "sm_121a"),
        "convert": (convert, (), "sm_100a"),
        "chained_sum": (chained, (4,), "sm_90a"),
    }
    for name, (make, arguments, chosen) in kernels_of.items():
        for target in ("sm_90a", "sm_100a", "sm_121a"):
            bound = lambda make=make, target=target, arguments=arguments: make(target, *arguments)  # noqa: E731
            found.append(Case(f"triton/{name}", target, target == chosen, bound))
    return found
