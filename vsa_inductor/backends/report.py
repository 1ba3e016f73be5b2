"""What can run here, and why the rest cannot: the answer of `vsa_inductor.backend_report()`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..native import NativeStatus, status
from .capability import DIRECTIONS, Refusal, backend_named, backend_names, device_capability
from .contract import Problem


@dataclass(frozen=True)
class DeviceReport:
    """The backends on one device, for bf16, head dim 128 and 64-token blocks.

    Attributes:
        device: ``"cpu"`` or ``"cuda:0 NVIDIA H200 (9.0)"``.
        backends: what runs there, best first.
        refusals: why the others do not.
    """

    device: str
    backends: tuple[str, ...]
    refusals: tuple[Refusal, ...]


@dataclass(frozen=True)
class BackendReport:
    """Every device of this process, the native library, and the tier each operator is compiled by.

    Attributes:
        devices: one entry per device; the CPU is always among them.
        native: the state of the native library.
        tiers: (operator, "lowering" | "decomposition" | "opaque"), and why where it is not the first.
    """

    devices: tuple[DeviceReport, ...]
    native: NativeStatus
    tiers: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        lines = [f"torch {torch.__version__}", f"native library: {self.native.reason}"]
        for device in self.devices:
            lines.append(f"{device.device}: {', '.join(device.backends)}")
            lines += [f"  {refusal}" for refusal in device.refusals]
        lines.append("compiled by: " + ", ".join(f"{op} {tier}" for op, tier in self.tiers))
        return "\n".join(lines)


def backend_report() -> BackendReport:
    """What can run in this process and why the rest cannot. Queries devices: not for traced code."""
    from .. import lowerings

    devices = [_device_report("cpu", None)]
    if torch.cuda.is_available():
        devices += [_device_report("cuda", index) for index in range(torch.cuda.device_count())]
    reasons = lowerings.tier_reasons()
    tiers = tuple((op, f"{tier} ({reasons[op]})" if op in reasons else tier) for op, tier in lowerings.tiers().items())
    return BackendReport(tuple(devices), status(), tiers)


def _device_report(device_type: str, index: int | None) -> DeviceReport:
    capability = device_capability(device_type, index)
    problem = Problem(device_type, capability, torch.bfloat16, 128, 64, False, True, False)
    running, refusals = [], []
    for name in backend_names():
        met = [
            Refusal(name, direction, sentence)
            for direction in DIRECTIONS
            if (sentence := backend_named(name).refuse(problem, direction)) is not None
        ]
        refusals += met
        if not met:
            running.append(name)
    title = device_type
    if capability is not None:
        title = f"cuda:{index} {torch.cuda.get_device_name(index)} ({capability[0]}.{capability[1]})"
    return DeviceReport(title, tuple(running), tuple(refusals))
