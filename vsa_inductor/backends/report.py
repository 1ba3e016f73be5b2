"""What can run here, and why the rest cannot: the answer of `vsa_inductor.backend_report()`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..native import NativeStatus, status
from ..page import document, el, table
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
            lines.append(f"{device.device}: {', '.join(_with_note(name) for name in device.backends)}")
            lines += [f"  {refusal}" for refusal in device.refusals]
        lines.append("compiled by: " + ", ".join(f"{op} {tier}" for op, tier in self.tiers))
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Keys: ``torch``, ``devices`` [``device``, ``backends``, ``refusals`` [``backend``, ``direction``,
        ``sentence``]], ``native`` (the fields of its status) and ``tiers`` {operator: tier}."""
        report = {**asdict(self), "tiers": dict(self.tiers)}
        return {"torch": str(torch.__version__), **report}

    def to_json(self) -> str:
        """:meth:`to_dict` as a JSON document."""
        return json.dumps(self.to_dict(), indent=2)

    def to_html(self) -> str:
        """The report as one HTML page: no script, and nothing that it would have to load."""
        devices = []
        for number, device in enumerate(self.devices):
            refusals = [(refusal.backend, refusal.direction, refusal.sentence) for refusal in device.refusals]
            why = (
                table("Backends that cannot run there", ("backend", "direction", "why"), refusals) if refusals else None
            )
            heading, running = f"device-{number}", ", ".join(map(_with_note, device.backends)) or "nothing"
            devices.append(
                el(
                    "section",
                    el("h2", device.device, id=heading),
                    el("p", f"Runs {running}."),
                    why,
                    aria_labelledby=heading,
                )
            )
        tiers = table("Each operator and how it is compiled", ("operator", "compiled by"), self.tiers)
        return document(
            "vsa_inductor: what can run here",
            el("h1", "What can run here"),
            el("p", f"torch {torch.__version__}. Native library: {self.native.reason}"),
            devices,
            el("h2", "Operators"),
            tiers,
        )


def backend_report() -> BackendReport:
    """What can run in this process and why the rest cannot. Queries devices: not for traced code."""
    from .. import lowerings

    devices = [_device_report("cpu", None)]
    if torch.cuda.is_available():
        devices += [_device_report("cuda", index) for index in range(torch.cuda.device_count())]
    reasons = lowerings.tier_reasons()
    tiers = tuple((op, f"{tier} ({reasons[op]})" if op in reasons else tier) for op, tier in lowerings.tiers().items())
    return BackendReport(tuple(devices), status(), tiers)


def _with_note(name: str) -> str:
    note = backend_named(name).note
    return f"{name} ({note})" if note else name


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
