"""Where the time of a compiled block goes: its GPU kernels by name, against the bytes that nothing can avoid.

One call is profiled at a time. A kernel is *opaque* when it was launched by one of our operators that the compiler
cannot see into, *coarse* when it is a matrix product, a softmax or a reduction over tiles alone, and *region*
otherwise. The order of launches splits a direction at its attention kernel into before and after.

Floors: every input and output of the fused region once, tensors in tile order with their empty slots, rotary tables and
per-row statistics left out. S tokens and P slots of C = heads * head_dim elements:
    forward, before     q, k, v to tile order                              3 S + 3 P
    forward, after      out in tile order, gate -> raster                  P + 2 S
    backward, before    dout, gate, out -> dout in tile order, dgate,      3 S + 2 P, and delta in fp32
                        delta
    backward, after     dq, dk, dv; q and k as the norm got them -> raster 3 P + 5 S
"""

from __future__ import annotations

import bisect
import json
import re
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.block_providers import BlockCase

PLACES = ("before", "after")

_DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
_RUNTIME = ("cuda_runtime", "cuda_driver")
_OPAQUE_OPS = re.compile(r"vsa::(attention|transpose_blocks|select_blocks)")
# For launches that the trace connects with no operator.
_OPAQUE_KERNELS = {
    "_attention_kernel": "attention",
    "dq_kernel": "attention_backward",
    "dkdv_kernel": "attention_backward",
    "_select_blocks_kernel": "select_blocks",
    "_mark_kernel": "transpose_blocks",
    "_count_kernel": "transpose_blocks",
    "_expand_kernel": "transpose_blocks",
}
_MATMUL = re.compile(r"gemm|gemv|nvjet|cutlass|cublas|splitK|triton_tem_fused_b?mm", re.IGNORECASE)
_REDUCES_TILES = {"sum", "mean"}
# What stands in the names of passes over all tokens: their sums belong to a norm, delta or a tile copy.
_PASSES_OVER_TOKENS = {"tile", "untile", "pow", "rsqrt", "norm", "attention", "slice", "stack", "cat", "index"}


class Kernel(NamedTuple):
    """A kernel of one profiled call, its launches at one place added up."""

    place: str
    category: str
    name: str
    operator: str
    milliseconds: float


def categorize(name: str, operator: str) -> str:
    """Category of a kernel from its name and the operator of ours that launched it ("" for none)."""
    if operator:
        return "opaque" if _OPAQUE_OPS.match(f"vsa::{operator}") else "region"
    if _MATMUL.search(name):
        return "coarse"
    if name.startswith("triton_"):
        words = set(name.split("_"))
        if "softmax" in words:
            return "coarse"
        if words & _REDUCES_TILES and not words & _PASSES_OVER_TOKENS:
            return "coarse"
    return "region"


def read_trace(events: Iterable[dict[str, Any]]) -> list[Kernel]:
    """The kernels of a Chrome trace, in the order in which they ran, not yet added up."""
    work: list[dict[str, Any]] = []
    launches: dict[int, tuple[Any, float]] = {}
    operators: dict[Any, list[tuple[float, float, str]]] = defaultdict(list)
    for event in events:
        category, arguments = event.get("cat"), event.get("args", {})
        if category in _DEVICE_WORK:
            work.append(event)
        elif category in _RUNTIME and "correlation" in arguments:
            launches[arguments["correlation"]] = (event["tid"], event["ts"])
        elif category == "cpu_op" and event["name"].startswith("vsa::"):
            operators[event["tid"]].append((event["ts"], event["ts"] + event["dur"], event["name"][5:]))
    for spans in operators.values():
        spans.sort()

    def operator_of(event: dict[str, Any]) -> str:
        tid, ts = launches.get(event.get("args", {}).get("correlation", -1), (None, 0.0))
        spans = operators.get(tid, [])
        # The innermost of nested operators starts last.
        for start, end, name in reversed(spans[: bisect.bisect_right(spans, (ts, float("inf"), ""))]):
            if start <= ts <= end:
                return name
        return _OPAQUE_KERNELS.get(event["name"], "")

    kernels = []
    place = "before"
    for event in sorted(work, key=lambda event: event["ts"]):
        operator = operator_of(event)
        if operator.startswith("attention"):
            place = "after"
        category = categorize(event["name"], operator)
        kernels.append(Kernel(place, category, event["name"], operator, event["dur"] / 1000))
    return kernels


def added_up(calls: Sequence[Sequence[Kernel]]) -> list[Kernel]:
    """One entry per place and name, in order of first launch: the median over the calls of its time in a call."""
    times: dict[tuple[str, str, str, str], list[float]] = {}
    for number, kernels in enumerate(calls):
        for kernel in kernels:
            per_call = times.setdefault(kernel[:4], [0.0] * len(calls))
            per_call[number] += kernel.milliseconds
    return [Kernel(*key, statistics.median(per_call)) for key, per_call in times.items()]


def profiled(fn: Callable[[Any], Any], prepare: Callable[[], Any] = lambda: None, repeats: int = 5) -> list[Kernel]:
    """Kernels of ``fn(prepare())``, ``prepare`` unseen, each call in a session of its own."""
    calls = []
    for _ in range(repeats):
        argument = prepare()
        _synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as session:
            fn(argument)
            _synchronize()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            session.export_chrome_trace(str(path))
            calls.append(read_trace(json.loads(path.read_text())["traceEvents"]))
    return added_up(calls)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def floor_bytes(case: BlockCase) -> dict[tuple[str, str, str], float]:
    """(direction, category, place) -> bytes. Coarse: scores and their gradient as often as the stages need them."""
    num_blocks = case.layout().num_blocks
    element = torch.empty((), dtype=case.dtype).element_size()
    row = case.batch * case.channels * element
    tokens, slots = case.tokens * row, num_blocks * 64 * row
    statistic = case.batch * case.heads * num_blocks * 64 * 4
    scores = case.batch * case.heads * num_blocks**2 * 4
    return {
        ("forward", "region", "before"): 3 * tokens + 3 * slots,
        ("forward", "region", "after"): 2 * tokens + slots,
        ("backward", "region", "before"): 3 * tokens + 2 * slots + statistic,
        ("backward", "region", "after"): 5 * tokens + 3 * slots,
        # q, k, v in, out and lse; for every pair of blocks less than is read again from L2.
        ("forward", "opaque", ""): 4 * slots + statistic,
        ("backward", "opaque", ""): 7 * slots + 2 * statistic,
        # Scores: written, read by the selection and by the softmax. Backward: read, gradient written, read twice.
        ("forward", "coarse", ""): 3 * scores,
        ("backward", "coarse", ""): 4 * scores,
    }


class Share(NamedTuple):
    """Time and floor of a category in one direction, in milliseconds; ``place`` is "" for the whole direction."""

    category: str
    place: str
    milliseconds: float
    floor: float

    @property
    def ratio(self) -> float:
        return self.milliseconds / self.floor if self.floor else float("nan")


def shares(kernels: Sequence[Kernel], case: BlockCase, direction: str, copy_bytes_per_ms: float) -> list[Share]:
    """Every category of a direction ("inference" counts as "forward"), the region by place as well."""
    direction = "forward" if direction == "inference" else direction
    floors = floor_bytes(case)

    def time(category: str, *places: str) -> float:
        return sum(k.milliseconds for k in kernels if k.category == category and k.place in places)

    def floor(category: str, place: str) -> float:
        return floors[direction, category, place] / copy_bytes_per_ms

    parts = [Share("region", place, time("region", place), floor("region", place)) for place in PLACES]
    whole = [Share(category, "", time(category, *PLACES), floor(category, "")) for category in ("opaque", "coarse")]
    return [*whole, *parts, Share("region", "", time("region", *PLACES), sum(part.floor for part in parts))]


def added_time(kernels: Sequence[Kernel]) -> float:
    """Milliseconds in all kernels."""
    return sum(kernel.milliseconds for kernel in kernels)


def selection_time(kernels: Sequence[Kernel]) -> float:
    """Milliseconds of the top-k, which counts among the opaque calls."""
    return sum(kernel.milliseconds for kernel in kernels if kernel.operator == "select_blocks")


def kernel_lines(kernels: Sequence[Kernel]) -> list[str]:
    """One line per kernel, for reading."""
    return [
        f"    {k.milliseconds:8.4f} ms  {k.category:<6} {k.place:<6} {k.name[:90]}"
        + (f"  <- {k.operator}" if k.operator else "")
        for k in kernels
    ]
