"""What a case of the corpus is: a compiled kernel, its launch, its inputs and the numbers it must produce."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import formats

if TYPE_CHECKING:
    from ..launch import Device, Module, Options, Report
    from ..memory import Buffer
    from .compile import Compiled


@dataclasses.dataclass(frozen=True)
class Kind:
    """A number format: Triton's name, the element name of tensor maps, how its bits are stored and converted.

    `encode` takes float64 to stored bits (to nearest even), `decode` stored bits to float64. `rounding` is the largest
    relative error of that.
    """

    triton: str
    element: str
    encode: Callable[[np.ndarray], np.ndarray]
    decode: Callable[[np.ndarray], np.ndarray]
    rounding: float


def _float64(decode: Callable[[np.ndarray], np.ndarray]) -> Callable[[np.ndarray], np.ndarray]:
    return lambda bits: decode(bits).astype(np.float64)


def _through_float32(encode: Callable[[np.ndarray], np.ndarray]) -> Callable[[np.ndarray], np.ndarray]:
    return lambda values: encode(np.asarray(values, np.float32))


def _numpy(triton: str, element: str, dtype: Any, rounding: float) -> Kind:
    return Kind(triton, element, lambda x: np.asarray(x).astype(dtype), lambda x: x.astype(np.float64), rounding)


KINDS = {
    "fp32": _numpy("fp32", "f32", np.float32, 2.0**-24),
    "fp16": _numpy("fp16", "f16", np.float16, 2.0**-11),
    "i32": _numpy("i32", "s32", np.int32, 0.0),
    "i8": _numpy("i8", "u8", np.int8, 0.0),
    "bf16": Kind("bf16", "bf16", _through_float32(formats.f32_to_bf16), _float64(formats.bf16_to_f32), 2.0**-8),
    "e4m3": Kind("fp8e4nv", "u8", _through_float32(formats.f32_to_e4m3), _float64(formats.e4m3_to_f32), 2.0**-4),
    "e5m2": Kind("fp8e5", "u8", _through_float32(formats.f32_to_e5m2), _float64(formats.e5m2_to_f32), 2.0**-3),
}


@dataclasses.dataclass
class Expected:
    """`reference` is float64 in the shape of `buffer`; `tolerance` bounds max |error| / max |reference|."""

    name: str
    buffer: Buffer
    reference: np.ndarray
    tolerance: float
    decode: Callable[[np.ndarray], np.ndarray]

    def error(self) -> float:
        """max |error| / max |reference|; infinite where a value is no number and the reference is one."""
        values = self.decode(self.buffer.array)
        difference = np.abs(values - self.reference)
        difference[np.isnan(values) & np.isnan(self.reference)] = 0.0
        difference[np.isnan(difference)] = np.inf
        scale = np.nanmax(np.abs(self.reference))
        return float(difference.max() / (scale or 1.0))

    def check(self) -> None:
        """Raises AssertionError with the numbers and the first element that is off."""
        error = self.error()
        if error <= self.tolerance:
            return
        values = self.decode(self.buffer.array)
        off = ~(np.abs(values - self.reference) <= self.tolerance * np.nanmax(np.abs(self.reference)))
        first = tuple(int(i) for i in np.argwhere(off)[0])
        raise AssertionError(
            f"{self.name}: error {error:.3g} of the largest value, allowed {self.tolerance:.3g}; "
            f"{int(off.sum())} of {off.size} are off, first {first}: {values[first]} for {self.reference[first]}"
        )


Build = Callable[["Device", np.random.Generator], "tuple[list[Any], list[Expected]]"]


@dataclasses.dataclass
class Program:
    """A kernel and its launch; `grid` counts CTAs, `shared` is dynamic shared memory in bytes.

    `build` uploads the inputs and returns the kernel's arguments and what must stand in memory afterwards.
    """

    ptx: str
    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    shared: int
    build: Build

    def launch(self, device: Device, module: Module, args: list[Any], options: Options) -> Report:
        """Runs it on arguments that `build` made; `module` is the loaded `ptx`."""
        return device.launch(
            module,
            kernel=self.kernel,
            grid=self.grid,
            block=self.block,
            cluster=self.cluster,
            shared=self.shared,
            args=args,
            options=options,
        )


@dataclasses.dataclass(frozen=True)
class Case:
    """A named member of the corpus.

    `small`: part of the set that CI runs. `known`: kinds of findings (errors.KINDS) that the compiler's code does
    have; they are noted as lints instead of raised.
    """

    name: str
    target: str
    small: bool
    make: Callable[[], Program]
    known: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A dense row-major array on the device, to be passed as a pointer or, by `described`, as a tensor descriptor."""

    buffer: Buffer
    kind: Kind
    described: bool = False

    def expected(self, name: str, reference: np.ndarray, tolerance: float | None = None) -> Expected:
        """The array must hold `reference` up to `tolerance`; without one, exactly what it rounds to in its format."""
        reference = np.asarray(reference, np.float64).reshape(self.buffer.array.shape)
        if tolerance is None:
            reference = self.kind.decode(self.kind.encode(reference))
        return Expected(name, self.buffer, reference, tolerance or 0.0, self.kind.decode)


def upload(device: Device, values: np.ndarray, kind: str, described: bool = False) -> Tensor:
    """Puts float64 `values` on the device in a format of KINDS."""
    return Tensor(device.upload(KINDS[kind].encode(values)), KINDS[kind], described)


def empty(device: Device, shape: Sequence[int], kind: str, described: bool = False) -> Tensor:
    """An array that the kernel must write before anybody reads it."""
    dtype = KINDS[kind].encode(np.zeros(1)).dtype
    return Tensor(device.empty(tuple(shape), dtype), KINDS[kind], described)


def program(compiled: Compiled, grid: Sequence[int], arguments: Callable[..., Any]) -> Program:
    """A Program whose `grid` is given as Triton counts it (clusters along x).

    `arguments(device, rng)` returns the values of the source's run-time parameters (Tensor or number) and the list of
    Expected; tensor descriptors and Triton's scratch memory are added here.
    """
    x, y, z = (*grid, 1, 1)[:3]
    blocks = (x * compiled.cluster, y, z)

    def build(device: Device, rng: np.random.Generator) -> tuple[list[Any], list[Expected]]:
        values, expected = arguments(device, rng)
        return _launch_arguments(device, compiled, values, blocks), expected

    return Program(
        ptx=compiled.ptx,
        kernel=compiled.kernel,
        grid=blocks,
        block=(compiled.threads, 1, 1),
        cluster=(compiled.cluster, 1, 1),
        shared=compiled.shared,
        build=build,
    )


def _launch_arguments(
    device: Device, compiled: Compiled, values: Sequence[Any], blocks: tuple[int, int, int]
) -> list[Any]:
    """Triton's parameter list: a descriptor is its map, shape and strides; two scratch pointers come last."""
    flat: list[Any] = []
    descriptors = iter(compiled.descriptors)
    for value in values:
        if not isinstance(value, Tensor):
            flat.append(value)
        elif not value.described:
            flat.append(value.buffer)
        else:
            flat += _descriptor(device, value, next(descriptors))
    scratch: Any = 0
    if compiled.scratch:
        if compiled.scratch_align > 256:
            raise ValueError(
                f"{compiled.kernel}: scratch memory aligned to {compiled.scratch_align}, 256 is what we have"
            )
        scratch = device.empty((compiled.scratch * blocks[0] * blocks[1] * blocks[2],), np.uint8)
    return [*flat, scratch, 0]


def _descriptor(device: Device, tensor: Tensor, made_for: Any) -> list[Any]:
    array = tensor.buffer.array
    strides = [stride // array.itemsize for stride in array.strides]
    tensor_map = device.tensor_map(
        tensor.buffer,
        element=tensor.kind.element,
        dims=tuple(reversed(array.shape)),
        strides=tuple(reversed(array.strides[:-1])),
        box=tuple(reversed(made_for["block_size"])),
        swizzle=("none", "32B", "64B", "128B")[made_for["swizzle"]],
    )
    return [tensor_map, *array.shape, *strides]
