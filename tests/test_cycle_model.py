"""The cycle model: what it reads of an emulated run, its arithmetic, a measured kernel between its bounds."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from benchmarks import cycle_model
from benchmarks.cycle_model import MACHINES, Usage, predict
from tests.ptx_emulator.compile import nvcc


@dataclass
class Counted:
    counts: dict[str, int] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)


def test_what_is_read_of_a_report():
    report = Counted(
        {
            "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16": 8,  # two, by four warps each
            "ex2.approx.ftz.f32": 3,
            "add.f32": 5,
        },
        {
            "TMA load global->shared": 100, "load global": 10, "store global": 7, "load shared": 20,
            "wgmma operands shared": 1000, "bulk reduce shared->global": 64, "tcgen05.ld tensor memory->registers": 32,
        },
    )  # fmt: skip
    usage = Usage.of_report(report)
    assert usage == Usage(
        tensor=2 * 2 * 64 * 128 * 16, special=96, issue=16, shared=1184, tensor_memory=32, l2=110, l2_reduce=64
    )
    assert Usage.of_report(report, flops=5).tensor == usage.tensor + 5
    assert (usage - usage * 0.5) == usage * 0.5


def test_bounds():
    machine = MACHINES["sm90"]
    found = predict(Usage(tensor=4096 * 10, issue=4 * 30), flops=4096 * 10, machine=machine)
    assert found.cycles == pytest.approx(
        {"tensor": 10, "special": 0, "issue": 30, "shared": 0, "l2": 0, "l2_reduce": 0}
    )
    assert found.binding == "issue"
    assert found.serial == pytest.approx(found.overlapped * 30 / 40)
    # Products alone: the data sheet at this clock.
    products = predict(Usage(tensor=4096.0), 4096, machine)
    assert products.overlapped == pytest.approx(989 * machine.clock / 1.83, rel=1e-2)
    assert "bound by issue" in cycle_model.formatted("x", found)


def test_what_a_machine_lacks():
    with pytest.raises(ValueError, match="tensor_memory: got 8 used; H200 has none"):
        predict(Usage(tensor_memory=8), 1, MACHINES["sm90"])


def test_published_rows_are_those_of_the_contract():
    assert list(cycle_model.PUBLISHED) == [4096 << i for i in range(8)]
    assert (min(cycle_model.PUBLISHED.values()), max(cycle_model.PUBLISHED.values())) == (381, 821)


@pytest.mark.nvcc
@pytest.mark.skipif(nvcc() is None, reason="nvcc: not found in $CUDA_HOME/bin nor on PATH")
def test_the_measured_forward_of_sm90_lies_between_the_bounds():
    usage, flops = cycle_model.sm90_forward_pair()
    assert usage.tensor == pytest.approx(flops), "every product is useful"
    assert usage.l2 == pytest.approx(16 * 1024, rel=0.1), "a pair shares the copies of K and V"
    assert usage.special == pytest.approx(64 * 64, rel=0.1), "an exponential each"
    found = predict(usage, flops, MACHINES["sm90"])
    print(cycle_model.formatted("sm90 forward", found, cycle_model.MEASURED_SM90_FORWARD))
    assert found.serial < cycle_model.MEASURED_SM90_FORWARD < found.overlapped


@pytest.mark.nvcc
@pytest.mark.skipif(nvcc() is None, reason="nvcc: not found in $CUDA_HOME/bin nor on PATH")
def test_the_bound_of_the_sm100_backward_is_above_what_was_published():
    """No more than that: nothing of it was measured."""
    usage, flops = cycle_model.sm100_backward_pair()
    assert usage.special == pytest.approx(64 * 64, rel=0.1), "an exponential each"
    assert usage.l2_reduce == 64 * 128 * 4, "a tile of dq in fp32"
    assert usage.l2 == pytest.approx(2 * 64 * 128 * 2, rel=0.1), "Q^T and dO^T once"
    found = predict(usage, flops, MACHINES["sm100"])
    print(cycle_model.formatted("sm100 backward", found))
    assert found.overlapped > max(cycle_model.PUBLISHED.values())
