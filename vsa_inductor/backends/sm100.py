"""Backend `sm100`: kernels of our own for compute capability 10.0, forward also 10.3 (csrc/sm100).

Emulated, not yet run on silicon. Without a native library that
implements its operators it refuses, and says why.

The backward reads Q and dO only through their transposes. In compiled graphs generated code writes those, delta, and dq
out of its accumulator; in eager kernels of the library do, in one trip from Python. The sizes of everything that stands
between them are functions here, for the eager path, the fakes and the lowering alike.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from .. import native
from ..errors import BackendUnavailableError
from ..ops import _allocate
from ..ops import attention as attention_op
from ..ops import attention_backward as attention_backward_op
from ..ops._library import define, define_overload, supplied_by_library
from .contract import AccumulatorOrder, Backend, Contract, Problem, TorchArithmetic
from .identity import backend_identity

# dq of a block as its Drain writes it (csrc/sm100/accumulator_order.h): token 4 c + i and column 32 w + l at
# [w 4][c 16][l 32][i 4].
CONTRACT = Contract(reads_rows=False, dq_order=AccumulatorOrder((4, 16, 32, 4), (1, 3, 0, 2)))
CAPABILITIES = {"forward": ((10, 0), (10, 3)), "backward": ((10, 0),)}
DTYPES = {"forward": (torch.bfloat16, torch.float16), "backward": (torch.bfloat16,)}
HEAD_DIMS = (128,)
BLOCK_SIZES = {"forward": (64, 128), "backward": (64,)}
STATE = "emulated, not yet run on silicon"

# Of csrc/sm100/order.h, which a test compares: kv blocks of a sequence from which on a kernel orders the work, and how
# many it can (two ints each in 227 KB of shared memory, less 256 bytes).
ORDERED_BLOCKS = 1024
MAX_ORDERED_BLOCKS = (227 * 1024 - 256) // 8


def transposed_shape(B: int, H: int, S: int, D: int) -> tuple[int, int]:
    """Of Q^T and dO^T, token contiguous."""
    return H * D, B * S


def accumulator_shape(B: int, H: int, S: int, D: int) -> tuple[int, int, int, int]:
    """Of dq's accumulator, fp32, each block in the order of the contract."""
    return B, H, S, D


def work_order_bytes(B: int, H: int, N_kv: int, order_given: bool = False) -> int:
    """Scratch of the native backward: the order of its work items, where it computes one."""
    return 0 if order_given or N_kv < ORDERED_BLOCKS else 4 * B * H * N_kv


# What a library says it was built for, in the reason that native.py keeps.
_BUILT_FOR = re.compile(r"\((sm_\w+(?:, sm_\w+)*);")


def _unavailable() -> Exception:
    supported = f"the operators of backend 'sm100' ({STATE}) run on CUDA tensors, by the native library"
    return BackendUnavailableError(f"{supported}; its state: {native.status().reason}")


def _allocate_gradients(
    q: Tensor, k: Tensor, v: Tensor, needs_dq: bool, needs_dkv: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """dq's accumulator in fp32, dk and dv; ``q`` is Q^T, ``[H * D, B * S]``."""
    _, dk, dv = _allocate.gradients(k, k, v, False, needs_dkv)
    B, D = k.shape[0], k.shape[3]
    shape = accumulator_shape(B, q.shape[0] // D, q.shape[1] // B, D) if needs_dq else (0,)
    return q.new_empty(shape, dtype=torch.float32), dk, dv


def _prepared(dout: Tensor, dlse: Tensor | None, q: Tensor, out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    B, H, S, D = q.shape
    shape = transposed_shape(B, H, S, D)
    return q.new_empty(shape), q.new_empty(shape), q.new_empty((B, H, S), dtype=torch.float32)


def _finished(dq_accum: Tensor, sm_scale: float) -> Tensor:
    return dq_accum.new_empty(dq_accum.shape, dtype=torch.bfloat16)


def _ordered(q_offsets: Tensor, num_q_blocks: int, bin_width: int, snake: bool) -> Tensor:
    return q_offsets.new_empty(q_offsets.shape[0] * q_offsets.shape[1] * (q_offsets.shape[2] - 1))


def _supplied(schema: str, fake: Any) -> torch._ops.OpOverload:
    return define(
        schema,
        implementation=supplied_by_library(_unavailable),
        fake=fake,
        tags=(torch.Tag.needs_exact_strides,),
        batched=False,
    )


_FORWARD = attention_op.define_in_library("sm100", _unavailable)
_BACKWARD = attention_backward_op.define_in_library("sm100", _unavailable, _allocate_gradients)
# With an explicit order of the work items, int32 [B * H * N_kv]: place n takes item (b * H + h) * N_kv + kv block. It
# has to be a permutation, which nobody checks. Any number of kv blocks; results do not depend on it.
_ARGUMENTS = str(_BACKWARD[0]._schema).partition("(")[2].rpartition(") -> ")[0]
define_overload(
    f"attention_backward_sm100.ordered({_ARGUMENTS}, Tensor work_order) -> (Tensor dq_accum, Tensor dk, Tensor dv)",
    implementation=supplied_by_library(_unavailable),
    fake=lambda dout, q, k, v, *args: _allocate_gradients(q, k, v, args[10], args[11]),
)
_EAGER_BACKWARD = attention_backward_op.define_eager_in_library("sm100", _unavailable)
# Its parts that need no tcgen05, each by itself: the kernels are plain CUDA, and so tested on other GPUs too.
PREPARE = _supplied(
    "prepare_backward_sm100(Tensor dout, Tensor? dlse, Tensor q, Tensor out) -> (Tensor dout_transposed,"
    " Tensor q_transposed, Tensor delta)",
    _prepared,
)
FINISH = _supplied("finish_dq_sm100(Tensor dq_accum, float sm_scale) -> Tensor dq", _finished)
ORDER = _supplied(
    "work_order_sm100(Tensor q_offsets, int num_q_blocks, int bin_width, bool snake) -> Tensor order", _ordered
)


def _listed(values: tuple[Any, ...]) -> str:
    return " or ".join(map(_capability_text if values and isinstance(values[0], tuple) else str, values))


def _capability_text(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def _refuse(problem: Problem, direction: str) -> str | None:
    wanted = CAPABILITIES[direction]
    if problem.device_type != "cuda" or problem.capability is None:
        return (
            f"asked for a {problem.device_type} device; supported: CUDA devices of compute capability {_listed(wanted)}"
        )
    if problem.capability not in wanted:
        return f"asked for compute capability {_capability_text(problem.capability)}; supported: {_listed(wanted)}"
    if problem.dtype not in DTYPES[direction]:
        return f"asked for {problem.dtype}; supported: {_listed(DTYPES[direction])}"
    if problem.head_dim not in HEAD_DIMS:
        return f"asked for head dim {problem.head_dim}; supported: {_listed(HEAD_DIMS)}"
    if problem.block_size not in BLOCK_SIZES[direction]:
        return f"asked for blocks of {problem.block_size} tokens; supported: {_listed(BLOCK_SIZES[direction])}"
    if problem.grouped and direction == "backward":
        return "asked for more heads of queries than of keys; supported: as many of both"
    ops = (_FORWARD[0],) if direction == "forward" else (_BACKWARD[0], _EAGER_BACKWARD)
    missing = [op for op in ops if not native.implements(op)]
    state = f"its state: {native.status().reason}"
    if not missing:
        image = "sm_{}{}a".format(*problem.capability)
        built = _BUILT_FOR.search(native.status().reason)
        if built is None or image in built.group(1).split(", "):
            return None
        return f"needs a native library with code for {image}; {state}"
    if not native.status().loaded:
        return f"needs the native library; {state}"
    # Other rooms of it may be there.
    lacking = f"{_listed(tuple(missing))} ({STATE}), which the native library does not implement"
    return f"needs {lacking}; {state}"


def _expected(problem: Problem) -> bool:
    """On a device that runs all of what is asked, where the library holds it."""
    directions = ("forward", "backward") if problem.needs_grad else ("forward",)
    runs = all(problem.capability in CAPABILITIES[direction] for direction in directions)
    return runs and native.implements(_FORWARD[0])


BACKEND = Backend(
    name="sm100",
    identity=backend_identity("sm100", "backends"),
    refuse=_refuse,
    forward_native=_FORWARD,
    backward_native=_BACKWARD,
    contract=CONTRACT,
    arithmetic=TorchArithmetic(),
    expected=_expected,
    eager_backward=_EAGER_BACKWARD,
    note=STATE,
)
