"""Where the time of a compiled block goes: its GPU kernels by name, against the bytes that nothing can avoid.

One call is profiled at a time. A kernel is *opaque* when it belongs to attention, the selection or the transposition of
its lists; *coarse* when it is a matrix product, a softmax or a reduction over tiles alone; and *region* otherwise, also
where the kernel is one of ours. The order of launches splits a direction at its attention kernel into before and after.

Floors: every input and output of the fused region once, tensors in tile order with their empty slots, rotary tables,
means and per-row statistics left out. S tokens and P slots of C = heads * head_dim elements:
    forward, before     q, k, v to tile order                              3 S + 3 P
    forward, after      out in tile order, gate -> raster                  P + 2 S
    backward, before    dout, gate, out -> dout in tile order, dgate,      3 S + 2 P, and delta in fp32
                        delta
    backward, after     dq, dk, dv; q and k as the norm got them -> raster 3 P + 5 S

Each region kernel has a minimum of its own: what an operator of ours reads and writes (the same terms), or every
argument of a generated kernel once, as the profiler saw them. Their sum over the floor says what the cut into kernels
costs, and the time over the sum how well the kernels run; `block_counters` measures the bytes that really move.
"""

from __future__ import annotations

import bisect
import json
import math
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
DIRECTIONS = ("inference", "forward", "backward")

_DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
_RUNTIME = ("cuda_runtime", "cuda_driver")
_OPAQUE_OPERATORS = re.compile(r"attention|transpose_blocks|select_blocks")
# For launches that the trace connects with no operator; a longer name stands before the one that it contains.
_OPERATOR_OF_KERNEL = {
    "_attention_kernel": "attention",
    "dq_kernel": "attention_backward",
    "dkdv_kernel": "attention_backward",
    "_select_blocks_kernel": "select_blocks",
    "_mark_kernel": "transpose_blocks",
    "_count_kernel": "transpose_blocks",
    "_expand_kernel": "transpose_blocks",
}
_REGION_KERNELS = ("norm_rope_tile_backward", "norm_rope_tile", "gated_combine_backward", "gated_combine")
_MATMUL = re.compile(r"gemm|gemv|nvjet|cutlass|cublas|splitK|triton_tem_fused_b?mm", re.IGNORECASE)
_REDUCES_TILES = {"sum", "mean", "sums"}
# What stands in the names of passes over all tokens: their sums belong to a norm, delta or a tile copy.
_PASSES_OVER_TOKENS = {"tile", "untile", "pow", "rsqrt", "norm", "attention", "slice", "stack", "cat", "index"}
_ITEM_SIZES = {
    "c10::BFloat16": 2, "c10::Half": 2, "float": 4, "double": 8, "int": 4, "long int": 8, "long": 8, "bool": 1,
    "unsigned char": 1,
}  # fmt: skip


class Kernel(NamedTuple):
    """A kernel of one profiled call, its launches at one place added up.

    ``minimal_bytes``: what it reads and writes, each tensor once; NaN where that is not known.
    """

    place: str
    category: str
    name: str
    operator: str
    milliseconds: float
    launches: int = 1
    minimal_bytes: float = math.nan


def categorize(name: str, operator: str) -> str:
    """Category of a kernel from its name and the operator of ours that launched it ("" for none)."""
    if operator:
        if operator == "tile_sums":  # its gradient writes every slot, which the region has to do as well
            return "coarse"
        return "opaque" if _OPAQUE_OPERATORS.match(operator) else "region"
    if _MATMUL.search(name):
        return "coarse"
    if name.startswith("triton_"):
        words = set(re.sub(r"tile_sums(?!_backward)", "sums", name).split("_"))
        if "softmax" in words:
            return "coarse"
        if words & _REDUCES_TILES and not words & _PASSES_OVER_TOKENS:
            return "coarse"
    return "region"


def operator_of_kernel(name: str) -> str:
    """The operator of ours that a kernel implements, by its name alone; "" for none."""
    if name in _OPERATOR_OF_KERNEL or name.startswith("triton_"):
        return _OPERATOR_OF_KERNEL.get(name, "")
    return next((operator for operator in _REGION_KERNELS if operator in name), "")


class Sizes(NamedTuple):
    """Bytes of what the stages of a case exchange.

    ``tokens``, ``slots``: one tensor in raster and in tile order; ``statistic``: fp32 per row in tile order; ``means``:
    fp32 per block ``[B, H, N, D]``; ``scores``: fp32 per pair of blocks.
    """

    tokens: float
    slots: float
    statistic: float
    means: float
    scores: float

    @classmethod
    def of(cls, case: BlockCase) -> Sizes:
        num_blocks = case.layout().num_blocks
        row = case.batch * case.channels * torch.empty((), dtype=case.dtype).element_size()
        per_block = case.batch * case.heads * num_blocks * 4
        return cls(
            case.tokens * row, num_blocks * 64 * row, 64 * per_block, case.head_dim * per_block, num_blocks * per_block
        )


def operator_bytes(operator: str, dims: Sequence[Any] | None, sizes: Sizes) -> float:
    """What a call of an operator of ours reads and writes at least; NaN for operators that have no such bound.

    Args:
        dims: the sizes of its arguments as the profiler has them, empty for None; None where they are not known, then
            every optional argument counts as given.
    """

    def given(place: int) -> bool:
        return dims is None or (len(dims) > place and bool(dims[place]))

    tokens, slots = sizes.tokens, sizes.slots
    if operator in ("norm_rope_tile", "tile", "untile"):
        return tokens + slots
    if operator in ("tile_sums", "tile_sums_backward"):
        return slots
    if operator == "norm_rope_tile_backward":
        return slots + (2 * tokens if given(2) else tokens)
    if operator == "gated_combine":
        return slots + (2 * tokens if given(1) else tokens)
    if operator == "gated_combine_backward":
        delta = slots + sizes.statistic if given(1) else 0
        return tokens + slots + delta + (2 * tokens if given(2) else 0)
    return math.nan


def argument_bytes(dims: Sequence[Any], types: Sequence[str]) -> float:
    """Every tensor argument of a generated kernel once; NaN for a type that is not known."""
    total = 0.0
    for size, name in zip(dims, types, strict=False):
        if size and all(isinstance(extent, int) for extent in size):
            total += math.prod(size) * _ITEM_SIZES.get(name, math.nan)
    return total or math.nan


class _Span(NamedTuple):
    """A recorded function on the host; ``end`` is infinite in a search key."""

    start: float
    end: float
    name: str
    dims: Any
    types: Any


def read_trace(events: Iterable[dict[str, Any]], sizes: Sizes | None = None) -> list[Kernel]:
    """The kernels of a Chrome trace in the order in which they ran, one a launch; with ``sizes`` their bytes too."""
    work: list[dict[str, Any]] = []
    launches: dict[int, tuple[Any, float]] = {}
    spans: dict[Any, list[_Span]] = defaultdict(list)
    for event in events:
        category, arguments = event.get("cat"), event.get("args", {})
        if category in _DEVICE_WORK:
            work.append(event)
        elif category in _RUNTIME and "correlation" in arguments:
            launches[arguments["correlation"]] = (event["tid"], event["ts"])
        elif category == "cpu_op" and event["name"].startswith(("vsa::", "triton_")):
            dims, types = arguments.get("Input Dims"), arguments.get("Input type", ())
            spans[event["tid"]].append(_Span(event["ts"], event["ts"] + event["dur"], event["name"], dims, types))
    for host_spans in spans.values():
        host_spans.sort(key=lambda span: span.start)

    def around(event: dict[str, Any], prefix: str) -> _Span | None:
        tid, ts = launches.get(event.get("args", {}).get("correlation", -1), (None, 0.0))
        host_spans = spans.get(tid, [])
        # The innermost of nested functions starts last.
        for span in reversed(host_spans[: bisect.bisect_right(host_spans, ts, key=lambda span: span.start)]):
            if span.name.startswith(prefix) and span.start <= ts <= span.end:
                return span
        return None

    kernels: list[Kernel] = []
    calls: dict[tuple[float, str], list[int]] = defaultdict(list)
    place = "before"
    for event in sorted(work, key=lambda event: event["ts"]):
        name, span, minimum = event["name"], around(event, "vsa::"), math.nan
        operator = span.name[5:] if span else operator_of_kernel(name)
        if operator.startswith("attention"):
            place = "after"
        if span:
            calls[span.start, operator].append(len(kernels))
        elif sizes and operator:
            minimum = operator_bytes(operator, None, sizes)
        elif sizes and (launch := around(event, name)) and launch.dims is not None:
            minimum = argument_bytes(launch.dims, launch.types)
        if event["cat"] != "kernel":
            minimum = event.get("args", {}).get("bytes", math.nan)
        category = categorize(name, operator)
        kernels.append(Kernel(place, category, name, operator, event["dur"] / 1000, 1, minimum))
    if sizes is None:
        return kernels
    by_start = {(span.start, span.name[5:]): span for host_spans in spans.values() for span in host_spans}
    for call, numbers in calls.items():
        # What an operator moves belongs to its longest kernel; the others work on what that one left.
        longest = max(numbers, key=lambda number: kernels[number].milliseconds)
        for number in numbers:
            minimum = operator_bytes(call[1], by_start[call].dims, sizes) if number == longest else 0.0
            kernels[number] = kernels[number]._replace(minimal_bytes=minimum)
    return kernels


def added_up(calls: Sequence[Sequence[Kernel]]) -> list[Kernel]:
    """One entry per place and name, in order of first launch: the median over the calls of its time in a call."""
    times: dict[tuple[str, str, str, str], list[float]] = {}
    launches: dict[tuple[str, str, str, str], int] = {}
    minima: dict[tuple[str, str, str, str], float] = {}
    for number, kernels in enumerate(calls):
        counted: dict[tuple[str, str, str, str], tuple[int, float]] = defaultdict(lambda: (0, 0.0))
        for kernel in kernels:
            key = kernel[:4]
            times.setdefault(key, [0.0] * len(calls))[number] += kernel.milliseconds
            counted[key] = (counted[key][0] + kernel.launches, counted[key][1] + kernel.minimal_bytes)
        for key, (count, minimum) in counted.items():
            launches[key], minima[key] = count, minimum
    return [Kernel(*key, statistics.median(times[key]), launches[key], minima[key]) for key in times]


def traced(fn: Callable[[], Any], sizes: Sizes | None = None) -> list[Kernel]:
    """The launches of one ``fn()``, in order."""
    _synchronize()
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities, record_shapes=sizes is not None) as session:
        fn()
        _synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        session.export_chrome_trace(str(path))
        return read_trace(json.loads(path.read_text())["traceEvents"], sizes)


def profiled(
    fn: Callable[[Any], Any], prepare: Callable[[], Any] = lambda: None, repeats: int = 5, sizes: Sizes | None = None
) -> list[Kernel]:
    """Kernels of ``fn(prepare())``, ``prepare`` unseen, each call in a session of its own."""
    calls = []
    for _ in range(repeats):
        argument = prepare()
        calls.append(traced(lambda argument=argument: fn(argument), sizes))  # type: ignore[misc]
    return added_up(calls)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def floor_bytes(case: BlockCase) -> dict[tuple[str, str, str], float]:
    """(direction, category, place) -> bytes. Coarse: scores and their gradient as often as the stages need them."""
    tokens, slots, statistic, _, scores = Sizes.of(case)
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
    """Time and floor of a category in one direction, in milliseconds; ``place`` is "" for the whole direction.

    ``kernel_bytes``: the minima of its kernels added up, NaN where one is not known; ``floor_bytes``: of the whole.
    """

    category: str
    place: str
    milliseconds: float
    floor: float
    kernel_bytes: float
    floor_bytes: float

    @property
    def ratio(self) -> float:
        return self.milliseconds / self.floor if self.floor else math.nan


def shares(kernels: Sequence[Kernel], case: BlockCase, direction: str, copy_bytes_per_ms: float) -> list[Share]:
    """Opaque, coarse, region before, region after, region; "inference" counts as "forward"."""
    direction = "forward" if direction == "inference" else direction
    floors = floor_bytes(case)

    def share(category: str, place: str, *places: str) -> Share:
        own = [k for k in kernels if k.category == category and k.place in places]
        needed = floors.get((direction, category, place)) or sum(floors[direction, category, p] for p in places)
        milliseconds, moved = sum(k.milliseconds for k in own), sum(k.minimal_bytes for k in own)
        return Share(category, place, milliseconds, needed / copy_bytes_per_ms, moved, needed)

    whole = [share(category, "", *PLACES) for category in ("opaque", "coarse")]
    return [*whole, *(share("region", place, place) for place in PLACES), share("region", "", *PLACES)]


def added_time(kernels: Sequence[Kernel]) -> float:
    """Milliseconds in all kernels."""
    return sum(kernel.milliseconds for kernel in kernels)


def selection_time(kernels: Sequence[Kernel]) -> float:
    """Milliseconds of the top-k, which counts among the opaque calls."""
    return sum(kernel.milliseconds for kernel in kernels if kernel.operator == "select_blocks")


def kernel_lines(kernels: Sequence[Kernel], copy_bytes_per_ms: float) -> list[str]:
    """One line per kernel, for reading: time, the time its bytes need, how often it was launched."""
    return [
        f"    {k.milliseconds:8.4f} ms {k.minimal_bytes / copy_bytes_per_ms:8.4f} x{k.launches:<2} {k.category:<6} "
        f"{k.place:<6} {k.name[:80]}" + (f"  <- {k.operator}" if k.operator else "")
        for k in kernels
    ]
