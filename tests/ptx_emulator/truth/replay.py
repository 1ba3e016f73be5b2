"""Repeat the captured cases in the emulator: the inputs the GPU had, and each output must be what the GPU wrote."""

from __future__ import annotations

from functools import cache

import numpy as np

from .. import Device, EmulatorError, Module, Options, Report, load
from ..tensor_map import TensorMap
from .case import Case, Map, MapPointer, Struct
from .cases import cases
from .compare import describe


@cache
def module_of(name: str) -> Module:
    """The loaded PTX of a module, shared by its cases."""
    return load(next(case for case in cases() if case.module == name).ptx.read_text())


def truth(case: Case) -> dict[str, np.ndarray]:
    """The captured arrays: `in.NAME`, `out.NAME`, or `fault` for a launch that the GPU refused.

    Raises:
        FileNotFoundError: the case was never captured.
        ValueError: the case has other inputs than were captured.
    """
    with np.load(case.data) as file:
        arrays = {name: file[name] for name in file.files}
    for name, array in case.buffers.items():
        if arrays[f"in.{name}"].tobytes() != np.ascontiguousarray(array).tobytes():
            raise ValueError(f"{case.name}: input {name} is not the captured one; capture the case again")
    return arrays


def launch(case: Case, options: Options | None = None) -> tuple[dict[str, np.ndarray], Report]:
    """Run a case in the emulator; its outputs and the report.

    Raises:
        EmulatorError: a check of the emulator failed.
    """
    device = Device()
    buffers = {name: device.upload(np.ascontiguousarray(array)) for name, array in case.buffers.items()}

    def encode(m: Map) -> TensorMap:
        return device.tensor_map(
            buffers[m.buffer],
            element=m.element,
            dims=m.dims,
            strides=m.strides,
            box=m.box,
            swizzle=m.swizzle,
            fill=m.fill,
            element_strides=m.traversal,
        )

    arguments: list[object] = []
    for argument in case.args:
        if isinstance(argument, str):
            arguments.append(buffers[argument])
        elif isinstance(argument, Map):
            arguments.append(encode(argument))
        elif isinstance(argument, MapPointer):
            arguments.append(device.upload(np.frombuffer(encode(argument.map).bytes, np.uint8).copy()))
        elif isinstance(argument, Struct):
            arguments.append(argument.pack(lambda name: buffers[name].address))
        else:
            arguments.append(argument)
    report = device.launch(
        module_of(case.module),
        kernel=case.kernel,
        grid=case.grid,
        block=case.block,
        cluster=case.cluster,
        shared=case.shared,
        args=arguments,
        options=options or Options(),
    )
    return {name: buffers[name].array.copy() for name in case.outputs}, report


def check(case: Case) -> None:
    """Compare what the GPU wrote with the case's own expectation, so that a broken kernel is not held for the truth.

    Raises:
        AssertionError: an output differs, or a launch that should fault ran, or the other way round.
    """
    captured = truth(case)
    if case.faults != ("fault" in captured):
        raise AssertionError(f"{case.name}: {captured.get('fault', 'the GPU ran it')}, but faults is {case.faults}")
    if case.expect is None:
        return
    expected = case.expect({name: captured[f"in.{name}"] for name in case.buffers})
    differences = [describe(case, name, expected[name], captured[f"out.{name}"]) for name in case.outputs]
    if any(differences):
        raise AssertionError("\n".join(d for d in differences if d))


def replay(case: Case, options: Options | None = None) -> Report | None:
    """Run a case and compare it with the GPU; None for a launch that both refuse.

    Raises:
        EmulatorError: a check of the emulator failed though the GPU ran the kernel.
        AssertionError: an output differs, or the GPU faulted and the emulator did not.
    """
    captured = truth(case)
    if case.faults:
        try:
            launch(case, options)
        except EmulatorError:
            return None
        raise AssertionError(f"{case.name}: the GPU refused this launch ({captured['fault']}), the emulator ran it")
    outputs, report = launch(case, options)
    if not case.undefined:
        differences = [describe(case, name, outputs[name], captured[f"out.{name}"]) for name in case.outputs]
        if any(differences):
            raise AssertionError("\n".join(d for d in differences if d))
    return report
