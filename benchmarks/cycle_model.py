"""How fast a kernel can be, from what the emulator counted of it and the rates of a machine: bounds, not measurements.

    python -m benchmarks.cycle_model

What a work item costs is the difference of two emulated runs that differ by it (`Usage.of_report`). Each resource of a
multiprocessor then takes so many cycles; the slowest is the bound if all overlap, their sum if none do. Where a machine
was measured, what was measured has to lie between the two (tests/test_cycle_model.py).

Assumptions, beside the numbers of `MACHINES`:
* every multiprocessor has the same work, and launches, first copies and ends of lists cost nothing: long sequences;
* instructions are those of PTX: what ptxas merges or adds is not seen;
* bank conflicts, latencies and waiting cost nothing;
* what tcgen05.mma multiplies is not in its name: callers give its operations (`flops`), and every shape of it is taken
  to run at the full rate.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Protocol

WARP = 32
WARPGROUP_WARPS = 4
# TFLOPS of the backward on a GB200, by tokens: B 1, H 8, D 128, 25 %, kernels only. What a prediction stands beside.
PUBLISHED = {
    4096: 381, 8192: 575, 16384: 715, 32768: 794, 65536: 821, 131072: 736, 262144: 784, 524288: 771,
}  # fmt: skip


class Counted(Protocol):
    """Of tests.ptx_emulator's Report: executions by a warp by opcode, and bytes by path."""

    counts: dict[str, int]
    bytes: dict[str, int]


@dataclass(frozen=True)
class Usage:
    """What some work takes of each resource of a multiprocessor.

    Attributes:
        tensor: operations of the tensor core, two a multiply-add.
        special: results of the special function unit, one a lane.
        issue: warp instructions.
        shared: bytes of shared memory, operands of the tensor core among them.
        tensor_memory: bytes of tensor memory that threads load or store.
        l2: bytes from L2 to shared memory or registers.
        l2_reduce: bytes of reductions in L2.
    """

    tensor: float = 0
    special: float = 0
    issue: float = 0
    shared: float = 0
    tensor_memory: float = 0
    l2: float = 0
    l2_reduce: float = 0

    @staticmethod
    def of_report(report: Counted, flops: float = 0) -> Usage:
        """Of an emulated launch. ``flops``: those of its tcgen05.mma."""
        special = sum(n for name, n in report.counts.items() if _SPECIAL.match(name))
        return Usage(
            tensor=flops + sum(n * _wgmma_flops(name) / WARPGROUP_WARPS for name, n in report.counts.items()),
            special=special * WARP,
            issue=sum(report.counts.values()),
            **{name: sum(n for path, n in report.bytes.items() if test(path)) for name, test in _PATHS.items()},
        )

    def __sub__(self, other: Usage) -> Usage:
        return Usage(**{f.name: getattr(self, f.name) - getattr(other, f.name) for f in fields(self)})

    def __mul__(self, factor: float) -> Usage:
        return Usage(**{f.name: getattr(self, f.name) * factor for f in fields(self)})


_SPECIAL = re.compile(r"(ex2|lg2|rcp|rsqrt|sqrt|sin|cos|tanh)\.approx")
_WGMMA = re.compile(r"wgmma\.mma_async\.\w+\.aligned\.m(\d+)n(\d+)k(\d+)\.")
_PATHS: Mapping[str, Callable[[str], bool]] = {
    "shared": lambda path: "shared" in path,
    "tensor_memory": lambda path: path.startswith(("tcgen05.ld", "tcgen05.st")),
    "l2": lambda path: (
        path == "load global" or path.startswith(("TMA load global", "bulk global->", "cp.async global->"))
    ),
    "l2_reduce": lambda path: "reduce shared->global" in path,
}


def _wgmma_flops(name: str) -> float:
    match = _WGMMA.match(name)
    if match is None:
        return 0
    m, n, k = map(int, match.groups())
    return 2 * m * n * k


@dataclass(frozen=True)
class Machine:
    """Rates of a multiprocessor by cycle, and how many there are.

    Attributes:
        rates: what `Usage` counts, a cycle; 0 where the machine lacks the resource.
        clock: GHz under this load.
        sources: where each number is from.
    """

    name: str
    multiprocessors: int
    clock: float
    rates: Usage
    sources: str


MACHINES = {
    "sm90": Machine(
        "H200",
        multiprocessors=132,
        clock=1.70,
        # 9.0 and 3.78 TB/s over 132 multiprocessors at 1.70 GHz.
        rates=Usage(tensor=4096, special=16, issue=4, shared=128, l2=40.1, l2_reduce=16.8),
        sources="tensor: 989 TFLOPS at 1.83 GHz, data sheet; special, issue, shared: CUDA programming guide; L2 and "
        "clock: measured",
    ),
    "sm100": Machine(
        "B200",
        multiprocessors=148,
        clock=1.85,
        rates=Usage(tensor=8192, special=16, issue=4, shared=128, tensor_memory=512, l2=40.1, l2_reduce=18.8),
        sources="tensor: 2250 TFLOPS, data sheet; special, issue, shared: as sm90; tensor memory: assumed a word a "
        "lane and cycle; L2: reads as sm90, by multiprocessor and cycle, reductions what the published 821 TFLOPS need "
        "at least, which says nothing about how much more there is. Nothing of it was measured",
    ),
}


@dataclass(frozen=True)
class Prediction:
    """Cycles of a multiprocessor by resource for some useful operations, of one or of all.

    Attributes:
        cycles: by resource, those the machine has.
        flops: useful operations in them.
    """

    machine: Machine
    cycles: dict[str, float]
    flops: float

    @property
    def binding(self) -> str:
        """The resource that takes longest."""
        return max(self.cycles, key=lambda name: self.cycles[name])

    def tflops(self, cycles: float) -> float:
        return self.flops / cycles * self.machine.multiprocessors * self.machine.clock * 1e9 / 1e12

    @property
    def overlapped(self) -> float:
        """TFLOPS where everything overlaps: no kernel with this usage is faster."""
        return self.tflops(max(self.cycles.values()))

    @property
    def serial(self) -> float:
        """TFLOPS where nothing does: a kernel that waits for no latency is not slower."""
        return self.tflops(sum(self.cycles.values()))


def predict(usage: Usage, flops: float, machine: Machine) -> Prediction:
    """The bounds of work that uses ``usage`` for ``flops`` useful operations.

    Raises:
        ValueError: it uses what the machine lacks.
    """
    cycles = {}
    for field in fields(usage):
        used, rate = getattr(usage, field.name), getattr(machine.rates, field.name)
        if used and not rate:
            raise ValueError(f"{field.name}: got {used:g} used; {machine.name} has none")
        if rate:
            cycles[field.name] = used / rate
    return Prediction(machine, cycles, flops)


def formatted(title: str, prediction: Prediction, measured: float | None = None) -> str:
    """A table of one prediction."""
    lines = [f"{title} on {prediction.machine.name} ({prediction.machine.sources})"]
    for name, cycles in sorted(prediction.cycles.items(), key=lambda item: -item[1]):
        lines.append(f"  {name:14} {cycles:9.0f} cycles {prediction.tflops(cycles) if cycles else 0:7.0f} TFLOPS alone")
    lines.append(f"  bound by {prediction.binding}: {prediction.overlapped:.0f} TFLOPS; nothing overlapped: ")
    lines[-1] += f"{prediction.serial:.0f}" + (f"; measured: {measured:.0f}" if measured else "")
    return "\n".join(lines)


def sm90_forward_pair() -> tuple[Usage, float]:
    """Usage and operations of one more tile pair of the sm_90a forward (D 128, 64-token blocks), as emulated."""
    from dataclasses import replace

    from tests import test_sm90_forward_emulated as forward

    def run(length: int) -> Usage:
        variant = forward.Variant(stages=7)
        problem = forward.Problem([[[list(range(length))] * 2]], [forward.TILE] * length)
        return Usage.of_report(forward.check(variant, problem, options=replace(forward.STRICT, race=False)))

    # Two more entries in the lists of two q blocks that share their copies.
    pair = (run(6) - run(4)) * (1 / 4)
    return pair, 4 * 64 * 64 * 128


def sm100_backward_pair() -> tuple[Usage, float]:
    """Usage and operations of one more tile pair of the sm_100a backward (D 128), as emulated.

    In even lists: the last step of an odd one is twice as expensive.
    """
    from tests import test_sm100_backward_emulated as backward
    from tests.ptx_emulator import Options

    flops = 5 * 2 * 64 * 64 * 128

    def run(length: int) -> Usage:
        problem = backward.make_problem([[[[0]] * length]], [backward.BLOCK])
        report = backward.check(problem, blocks=1, options=Options(strict=True, race=False))
        return Usage.of_report(report, flops=length * flops)

    return (run(6) - run(4)) * (1 / 2), flops


# Of benchmarks/data/sm90_forward_variants.csv: 65536 tokens, lists that share 80 %.
MEASURED_SM90_FORWARD = 603


def main() -> int:
    usage, flops = sm90_forward_pair()
    print(formatted("sm90 forward, a tile pair of lists that are the same", predict(usage, flops, MACHINES["sm90"]),
                    MEASURED_SM90_FORWARD))  # fmt: skip
    usage, flops = sm100_backward_pair()
    found = predict(usage, flops, MACHINES["sm100"])
    print("\nEmulated, not yet run on silicon:")
    print(formatted("sm100 backward, a tile pair", found))
    print("tokens  published  bound  binding")
    for tokens, published in PUBLISHED.items():
        print(f"{tokens:6}  {published:9}  {found.overlapped:5.0f}  {found.binding}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
