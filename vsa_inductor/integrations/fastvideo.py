"""FastVideo's switches: which backend a call of its adapter asks for.

    FASTVIDEO_VSA_SM100A=1               opts in to backend sm100 on compute capability 10.x: the forward, and the
                                         backward where supported (emulated, not yet run on silicon)
    FASTVIDEO_VSA_TRITON=1               forces Triton over everything
    FASTVIDEO_KERNEL_VSA_FORCE_TRITON=1  the same, its older name

Only "1" is on. They are read on every eager call; in traced code once, while tracing, and the answer becomes an
argument of the operator. Without any of them a device of compute capability 10.x runs Triton, as in FastVideo, and
every other device what the library chooses.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..backends import capability
from ..backends.contract import Problem
from ..errors import BackendUnavailableError
from ..options import AUTO

SM100 = "FASTVIDEO_VSA_SM100A"
TRITON = ("FASTVIDEO_VSA_TRITON", "FASTVIDEO_KERNEL_VSA_FORCE_TRITON")
# Where FastVideo's route of its own is opt-in.
_OPT_IN_MAJOR = 10


@dataclass(frozen=True)
class Switches:
    """What the environment says.

    Attributes:
        triton: Triton is forced.
        sm100: sm100 is opted in to; forced Triton goes before it.
    """

    triton: bool
    sm100: bool

    @staticmethod
    def read(environment: Mapping[str, str] | None = None) -> Switches:
        """The switches of ``environment``, by default that of this process as it is now."""
        given = os.environ if environment is None else environment
        return Switches(any(given.get(name) == "1" for name in TRITON), given.get(SM100) == "1")


def route(switches: Switches, problem: Problem) -> str | tuple[str, str]:
    """The option ``backend`` for a call of the adapter: one for both directions, or a pair of (forward, backward).

    Raises:
        BackendUnavailableError: sm100 runs this forward, and the call needs gradients that it has no backward for
            because of its block size.
    """
    if switches.triton:
        return "triton"
    if problem.capability is None or problem.capability[0] != _OPT_IN_MAJOR:
        return AUTO
    if not switches.sm100:
        return "triton"
    sm100 = capability.backend_named("sm100")
    if problem.needs_grad and problem.block_size != 64 and sm100.refuse(problem, "forward") is None:
        raise BackendUnavailableError(
            f"{SM100}=1: got a call with gradients and blocks of {problem.block_size} tokens; supported there: blocks "
            f"of 64 tokens, or calls without gradients ({TRITON[0]}=1 runs this one on Triton)"
        )
    # Where the backward is not supported on the device, nobody asked for it.
    return "sm100", "sm100" if problem.capability == (_OPT_IN_MAJOR, 0) else AUTO


@torch.compiler.assume_constant_result
def backend_option(
    device_type: str, device_index: int | None, dtype: torch.dtype, head_dim: int, block_size: int, needs_grad: bool
) -> str | tuple[str, str]:
    """`route` of the environment as it is now, for a call with as many heads of queries as of keys.

    Under tracing Dynamo calls it and bakes the answer in.
    """
    device = capability.device_capability(device_type, device_index)
    return route(Switches.read(), Problem(device_type, device, dtype, head_dim, block_size, False, needs_grad, False))
