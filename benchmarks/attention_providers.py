"""Everybody who runs block-sparse attention forward and backward, on one problem.

Each is called the way its package offers it, on tensors that are in place: what it computes from the lists (their
transposition above all), from out and dout, and on its own gradients is inside its backward. Ours are the logical
operators, with one backend each. Packages of others are imported, never copied; what is not installed says so.

FlexAttention builds its transposed lists with the mask, outside of what is measured.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from benchmarks.block_providers import FLEX_FORWARD
from benchmarks.shapes import AttentionShape
from vsa_inductor.errors import BackendUnavailableError

Steps = dict[str, Callable[[], Any]]


class Unavailable(Exception):
    """A provider cannot run a problem here; the sentence says why."""


@dataclass(frozen=True)
class AttentionProblem:
    """The tensors that every provider of a row gets."""

    shape: AttentionShape
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    kv_indices: Tensor
    kv_num_blocks: Tensor
    kv_block_sizes: Tensor

    @staticmethod
    def of(shape: AttentionShape) -> AttentionProblem:
        q, k, v, dout = shape.tensors(4)
        return AttentionProblem(shape, q, k, v, dout, *shape.block_lists())

    @property
    def sm_scale(self) -> float:
        return self.shape.head_dim**-0.5


def ours(problem: AttentionProblem, name: str) -> Steps:
    """`vsa::attention`, and what autograd makes of it: `vsa::transpose_blocks` and `vsa::attention_backward`."""
    x, block_size = problem, problem.shape.block_size
    backend = importlib.import_module(f"vsa_inductor.backends.{name}").BACKEND.identity
    static = (x.sm_scale, block_size)
    outputs: list[tuple[Tensor, Tensor]] = []

    def forward() -> Any:
        lists = (x.kv_indices, x.kv_num_blocks, x.kv_block_sizes)
        try:
            return torch.ops.vsa.attention(x.q, x.k, x.v, *lists, *static, True, False, backend, backend)
        except BackendUnavailableError as error:
            raise Unavailable(str(error)) from error

    def backward() -> Any:
        if not outputs:
            outputs.append(forward())
        out, lse = outputs[0]
        lists = (x.kv_indices, x.kv_num_blocks)
        transposed = torch.ops.vsa.transpose_blocks(*lists, x.kv_block_sizes.shape[0])
        saved = (x.dout, None, x.q, x.k, x.v, out, lse)
        try:
            return torch.ops.vsa.attention_backward(
                *saved, *lists, *transposed, x.kv_block_sizes, *static, False, backend, True, True
            )
        except BackendUnavailableError as error:
            raise Unavailable(str(error)) from error

    return {"forward": forward, "backward": backward}


def fastvideo(problem: AttentionProblem, kernels: str) -> Steps:
    """fastvideo-kernel's operators: "triton", or "sm90", its ThunderKittens extension."""
    x = problem
    if x.shape.block_size != 64:
        raise Unavailable(f"asked for blocks of {x.shape.block_size} tokens; supported: 64")
    module = _installed("fastvideo_kernel.block_sparse_attn", "fastvideo-kernel")
    if kernels == "sm90":
        _installed("fastvideo_kernel._C.fastvideo_kernel_ops", "fastvideo-kernel with its sm_90 extension")
    attend = getattr(module, f"block_sparse_attn_{kernels}")
    differentiate = getattr(module, f"block_sparse_attn_backward_{kernels}")
    lists = (x.kv_indices, x.kv_num_blocks, x.kv_block_sizes)
    saved: list[Any] = []

    def backward() -> Any:
        if not saved:
            saved.extend(attend(x.q, x.k, x.v, *lists))
        return differentiate(x.dout, x.q, x.k, x.v, *saved, *lists)

    return {"forward": lambda: attend(x.q, x.k, x.v, *lists), "backward": backward}


def cudnn_bsa(problem: AttentionProblem, ragged: bool) -> Steps:
    """cuDNN's block-sparse attention; ragged: with counts and sizes, as ours takes them, else without."""
    x = problem
    api = _installed("cudnn.block_sparse_attention.api", "nvidia-cudnn-frontend with its CuTe DSL")
    options: dict[str, Any] = {"q2k_block_index": x.kv_indices, "softmax_scale": x.sm_scale}
    options["sparse_block_size"] = x.shape.block_size
    if ragged:
        options |= {"q2k_block_nums": x.kv_num_blocks, "block_sizes": x.kv_block_sizes}
    saved: list[Any] = []

    def forward() -> Any:
        result = api.block_sparse_attention_forward(x.q, x.k, x.v, **options)
        return result["o_tensor"], result["lse_tensor"]

    def backward() -> Any:
        if not saved:
            saved.extend(forward())
        result = api.block_sparse_attention_backward(x.dout, x.q, x.k, x.v, *saved, **options)
        return tuple(result[name] for name in ("dq_tensor", "dk_tensor", "dv_tensor"))

    return {"forward": forward, "backward": backward}


def flex(problem: AttentionProblem) -> Steps:
    """FlexAttention with every listed block full: no mask is evaluated inside a block.

    Its default backward has no valid tile at 64, whatever its options: only max-autotune finds one.
    """
    x, shape = problem, problem.shape
    padded = F.pad(x.kv_indices, (0, shape.num_blocks - shape.selected))
    mask = BlockMask.from_kv_blocks(
        torch.zeros_like(x.kv_num_blocks),
        torch.zeros_like(padded),
        x.kv_num_blocks,
        padded,
        BLOCK_SIZE=shape.block_size,
    )
    torch.compiler.reset()
    tuned: Callable[..., Tensor] = torch.compile(flex_attention, dynamic=False)
    steps: Steps = {}

    def backward() -> Any:
        if not steps:
            searched: Callable[..., Tensor] = torch.compile(
                flex_attention, dynamic=False, mode="max-autotune-no-cudagraphs"
            )
            steps.update(_autograd_steps(lambda *leaves: searched(*leaves, block_mask=mask), x))
        return steps["backward"]()

    forward = lambda: tuned(x.q, x.k, x.v, block_mask=mask, kernel_options=FLEX_FORWARD)  # noqa: E731
    return {"forward": forward, "backward": backward}


def dense(problem: AttentionProblem) -> Steps:
    """What sparsity has to beat: cuDNN's dense attention through SDPA."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v)

    return _autograd_steps(attend, problem)


def _autograd_steps(attend: Callable[..., Tensor], problem: AttentionProblem) -> Steps:
    leaves = [x.detach().requires_grad_() for x in (problem.q, problem.k, problem.v)]
    outputs: list[Tensor] = []

    def forward() -> Tensor:
        with torch.no_grad():
            return attend(*leaves)

    def backward() -> Any:
        if not outputs:
            outputs.append(attend(*leaves))
        return torch.autograd.grad(outputs[0], leaves, problem.dout, retain_graph=True)

    return {"forward": forward, "backward": backward}


def _installed(module: str, what: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise Unavailable(f"{what} is not installed ({error})") from error


PROVIDERS: dict[str, Callable[[AttentionProblem], Steps]] = {
    "sm90": lambda problem: ours(problem, "sm90"),
    "sm100": lambda problem: ours(problem, "sm100"),
    "triton": lambda problem: ours(problem, "triton"),
    "fastvideo_triton": lambda problem: fastvideo(problem, "triton"),
    "fastvideo_tk": lambda problem: fastvideo(problem, "sm90"),
    "cudnn_bsa": lambda problem: cudnn_bsa(problem, True),
    "cudnn_bsa_full": lambda problem: cudnn_bsa(problem, False),
    "flex_attention": flex,
    "cudnn_dense": dense,
}
PEERS = ("fastvideo_triton", "fastvideo_tk", "cudnn_bsa", "cudnn_bsa_full", "flex_attention")
