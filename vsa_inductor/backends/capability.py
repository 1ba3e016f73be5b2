"""The choice of a backend: a pure function of static facts, with every refusal in words.

Forward and backward are chosen independently. A new backend is one file beside this one and one line in `_ORDER`.
"""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import BackendUnavailableError
from ..options import AUTO, Options
from . import eager, sm90, sm100, triton
from .contract import Backend, Problem
from .layout import LayoutKernels

# Best first. The last one takes everything.
_ORDER: list[Backend] = [sm90.BACKEND, sm100.BACKEND, triton.BACKEND, eager.BACKEND]
DIRECTIONS = ("forward", "backward")


@dataclass(frozen=True)
class Refusal:
    """Why a backend does not run one direction of a problem.

    Attributes:
        backend: its name.
        direction: "forward" or "backward".
        sentence: what was asked, what is supported, what differs.
    """

    backend: str
    direction: str
    sentence: str

    def __str__(self) -> str:
        return f"{self.backend} ({self.direction}): {self.sentence}"


@dataclass(frozen=True)
class Choice:
    """The chosen backends and every refusal met on the way.

    Attributes:
        forward, backward: names of backends.
        refusals: one per backend and direction that was asked and refused, in the order asked.
        fallbacks: the refusals of backends that were named, or are expected on the device.
    """

    forward: str
    backward: str
    refusals: tuple[Refusal, ...]
    fallbacks: tuple[Refusal, ...]


def backend_names() -> tuple[str, ...]:
    """Every backend, best first."""
    return tuple(backend.name for backend in _ORDER)


def backend_named(name: str) -> Backend:
    """The backend a name or an op argument ``name@hash`` means. Raises BackendUnavailableError for an unknown name."""
    plain = name.partition("@")[0]
    for backend in _ORDER:
        if backend.name == plain:
            return backend
    raise BackendUnavailableError(f"there is no backend {plain!r}; this installation has {', '.join(backend_names())}")


def select(problem: Problem, options: Options) -> Choice:
    """Chooses a backend for each direction.

    A backend that refuses falls back to the next one. Where it was named, or is what one expects to run on the device
    (`Backend.expected`), that is a surprise: a warning, and with ``options.strict`` an error.

    Raises:
        BackendUnavailableError: strict, and a fallback would be needed.
    """
    requested = (options.backend, options.backend) if isinstance(options.backend, str) else options.backend
    chosen: list[str] = []
    refusals: list[Refusal] = []
    fallbacks: list[Refusal] = []
    for direction, name in zip(DIRECTIONS, requested, strict=True):
        candidates = list(_ORDER)
        if name != AUTO:
            candidates.insert(0, backend_named(name))
        met: list[Refusal] = []
        for backend in candidates:
            sentence = backend.refuse(problem, direction)
            if sentence is None:
                chosen.append(backend.name)
                break
            refusal = Refusal(backend.name, direction, sentence)
            if refusal not in met:
                met.append(refusal)
        else:
            raise BackendUnavailableError("no backend can run this: " + "; ".join(map(str, met)))
        refusals += met
        # A direction that never runs cannot be a surprise.
        if direction == "forward" or problem.needs_grad:
            fallbacks += [r for r in met if r.backend == name or backend_named(r.backend).expected(problem)]
    if options.strict and fallbacks:
        raise BackendUnavailableError("strict=True forbids a fallback: " + "; ".join(map(str, fallbacks)))
    return Choice(chosen[0], chosen[1], tuple(refusals), tuple(fallbacks))


def device_capability(device_type: str, device_index: int | None) -> tuple[int, int] | None:
    """The compute capability of a CUDA device, None for any other. Never called in traced code."""
    if device_type != "cuda":
        return None
    return torch.cuda.get_device_capability(device_index)


def _problem(device_type: str, device_index: int | None, *facts: Any) -> Problem:
    """A problem on a device of this process; ``facts`` are the fields of `Problem` after its capability."""
    return Problem(device_type, device_capability(device_type, device_index), *facts)


_warned: set[Refusal] = set()


@torch.compiler.assume_constant_result
def choose(
    device_type: str,
    device_index: int | None,
    dtype: torch.dtype,
    head_dim: int,
    block_size: int,
    grouped: bool,
    needs_grad: bool,
    backend: str | tuple[str, str],
    deterministic: bool,
    strict: bool,
    switches: str = "",
) -> tuple[str, str]:
    """The backend arguments of `vsa::attention` for this problem: identities of (forward, backward).

    ``switches``: `identity.switches`, which become part of them, hence of cache keys.

    Under tracing Dynamo calls it with constants and bakes the result in; its arguments carry the guards. Warns once per
    cause of a fallback. Under `torch.export` they are the option's own words: what runs the graph, and with which
    version of the package, is not known yet; `resolve` chooses there, and refuses there.
    """
    # Asked here and not in traced code: Dynamo of torch 2.11 takes it for true in every compilation.
    if torch.compiler.is_exporting():
        return (backend, backend) if isinstance(backend, str) else backend
    choice = _choose(
        device_type, device_index, dtype, head_dim, block_size, grouped, needs_grad, backend, deterministic, strict
    )
    for refusal in choice.fallbacks:
        _warn(refusal, choice)
    forward, backward = backend_named(choice.forward), backend_named(choice.backward)
    return forward.identity + switches, backward.identity + switches


def _warn(refusal: Refusal, choice: Choice) -> None:
    if refusal not in _warned:
        _warned.add(refusal)
        used = choice.forward if refusal.direction == "forward" else choice.backward
        warnings.warn(f"vsa_inductor runs the {refusal.direction} on {used!r}: {refusal}", stacklevel=3)


@functools.cache
def _choose(
    device_type: str,
    device_index: int | None,
    dtype: torch.dtype,
    head_dim: int,
    block_size: int,
    grouped: bool,
    needs_grad: bool,
    backend: str | tuple[str, str],
    deterministic: bool,
    strict: bool,
) -> Choice:
    # Facts of this process that do not change while it runs: an eager call pays for them once.
    problem = _problem(device_type, device_index, dtype, head_dim, block_size, grouped, needs_grad, deterministic)
    return select(problem, Options(backend, deterministic, strict))


def resolve(argument: str, direction: str, q: Tensor, block_size: int, grouped: bool, deterministic: bool) -> Backend:
    """The backend that an op's argument names, for real tensors.

    Raises:
        BackendUnavailableError: it is unknown here, or cannot run on the device of ``q``.
    """
    return _resolve(
        argument, direction, q.device.type, q.device.index, q.dtype, q.shape[3], block_size, grouped, deterministic
    )


@functools.cache
def _resolve(
    argument: str,
    direction: str,
    device_type: str,
    device_index: int | None,
    dtype: torch.dtype,
    head_dim: int,
    block_size: int,
    grouped: bool,
    deterministic: bool,
) -> Backend:
    problem = _problem(device_type, device_index, dtype, head_dim, block_size, grouped, True, deterministic)
    if argument == AUTO:
        choice = select(problem, Options(deterministic=deterministic))
        for refusal in choice.fallbacks:
            if refusal.direction == direction:
                _warn(refusal, choice)
        return backend_named(choice.forward if direction == "forward" else choice.backward)
    backend = backend_named(argument)
    sentence = backend.refuse(problem, direction)
    if sentence is not None:
        raise BackendUnavailableError(f"the graph asks for {Refusal(backend.name, direction, sentence)}")
    return backend


def library_changed() -> None:
    """Forgets what was chosen without the native library that has just been loaded."""
    _choose.cache_clear()
    _resolve.cache_clear()


@functools.cache
def layout_kernels(device: torch.device) -> LayoutKernels:
    """Who runs tile, untile, select_blocks and transpose_blocks on a device."""
    problem = _problem(device.type, device.index, torch.bfloat16, 64, 64, False, False, True)
    return eager.LAYOUT_KERNELS if triton.BACKEND.refuse(problem, "forward") else triton.LAYOUT_KERNELS
