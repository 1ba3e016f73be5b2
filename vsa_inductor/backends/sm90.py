"""Backend `sm90`: kernels of our own for compute capability 9.0 (csrc/sm90), in the native library.

The library implements both operators behind the schemas defined here. Without it they refuse, and say why.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import native
from ..errors import BackendUnavailableError
from ..ops import _allocate
from ..ops import attention as attention_op
from ..ops import attention_backward as attention_backward_op
from .contract import AccumulatorOrder, Backend, Contract, Problem, TorchArithmetic
from .identity import backend_identity

# dq of a block stands as warps hold it (csrc/sm90/bwd/dkdv_reducer.cuh), token 16 a + 8 e + c and column 8 b + 2 d + f
# at [a 4][b D/8][c 8][d 4][e 2][f 2].
CONTRACT = Contract(dq_order=AccumulatorOrder((4, -1, 8, 4, 2, 2), (0, 4, 2, 1, 3, 5)))
CAPABILITY = (9, 0)
DTYPES = (torch.bfloat16, torch.float16)
HEAD_DIMS = (64, 128)
BLOCK_SIZES = {"forward": (64, 128), "backward": (64,)}


def _unavailable() -> Exception:
    supported = "the operators of backend 'sm90' run on CUDA tensors, by the native library"
    return BackendUnavailableError(f"{supported}; its state: {native.status().reason}")


def _allocate_gradients(
    q: Tensor, k: Tensor, v: Tensor, needs_dq: bool, needs_dkv: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """An fp32 accumulator ``[B, H, S_q, D]`` for dq; dk and dv in the operand dtype."""
    _, dk, dv = _allocate.gradients(q, k, v, False, needs_dkv)
    return q.new_empty(q.shape if needs_dq else (0,), dtype=torch.float32), dk, dv


_FORWARD = attention_op.define_in_library("sm90", _unavailable)
_BACKWARD = attention_backward_op.define_in_library("sm90", _unavailable, _allocate_gradients)
_EAGER_BACKWARD = attention_backward_op.define_eager_in_library("sm90", _unavailable)


def _listed(values: tuple[object, ...]) -> str:
    return " or ".join(map(str, values))


def _refuse(problem: Problem, direction: str) -> str | None:
    wanted = ".".join(map(str, CAPABILITY))
    if problem.device_type != "cuda" or problem.capability is None:
        return f"asked for a {problem.device_type} device; supported: CUDA devices of compute capability {wanted}"
    if problem.capability != CAPABILITY:
        return f"asked for compute capability {'.'.join(map(str, problem.capability))}; supported: {wanted}"
    if problem.dtype not in DTYPES:
        return f"asked for {problem.dtype}; supported: {_listed(DTYPES)}"
    if problem.head_dim not in HEAD_DIMS:
        return f"asked for head dim {problem.head_dim}; supported: {_listed(HEAD_DIMS)}"
    if problem.block_size not in BLOCK_SIZES[direction]:
        return f"asked for blocks of {problem.block_size} tokens; supported: {_listed(BLOCK_SIZES[direction])}"
    if not native.implements((_FORWARD if direction == "forward" else _BACKWARD)[0]):
        return f"needs the native library; its state: {native.status().reason}"
    return None


def _expected(problem: Problem) -> bool:
    """On the device it was written for, where its library is there."""
    return problem.capability == CAPABILITY and native.implements(_FORWARD[0])


BACKEND = Backend(
    name="sm90",
    identity=backend_identity("sm90", "backends"),
    refuse=_refuse,
    forward_native=_FORWARD,
    backward_native=_BACKWARD,
    contract=CONTRACT,
    arithmetic=TorchArithmetic(),
    expected=_expected,
    eager_backward=_EAGER_BACKWARD,
)
