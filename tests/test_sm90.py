"""Backend `sm90` without a GPU: what it refuses, where it stands in the order, its operators' schemas and fakes."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
from problems import random_problem
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import vsa_inductor as vsa
from vsa_inductor import native
from vsa_inductor.backends import capability, sm90, triton
from vsa_inductor.backends.contract import Problem, TorchArithmetic, backward_around
from vsa_inductor.ops import _allocate

HOPPER = Problem("cuda", (9, 0), torch.bfloat16, 128, 64, False, True, False)
FORWARD = torch.ops.vsa.attention_sm90
BACKWARD = torch.ops.vsa.attention_backward_sm90


@pytest.fixture
def with_library(monkeypatch):
    monkeypatch.setattr(native, "implements", lambda op: True)


@pytest.fixture
def without_library(monkeypatch):
    monkeypatch.setattr(native, "implements", lambda op: False)
    monkeypatch.setattr(native, "_status", native.NativeStatus(None, False, "nothing was built"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("facts", [{}, {"deterministic": True}, {"grouped": True}], ids=str)
def test_it_runs_on_hopper_before_triton(with_library, dtype, head_dim, facts):
    problem = replace(HOPPER, dtype=dtype, head_dim=head_dim, **facts)
    for options in (vsa.Options(), vsa.Options(strict=True), vsa.Options(backend="sm90", strict=True)):
        assert capability.select(problem, options) == capability.Choice("sm90", "sm90", (), ())
    choice = capability.select(problem, vsa.Options(backend="triton", strict=True))
    assert choice == capability.Choice("triton", "triton", (), ())


@pytest.mark.parametrize(
    "change, asked, supported",
    [
        ({"device_type": "cpu", "capability": None}, "a cpu device", "compute capability 9.0"),
        ({"capability": (8, 0)}, "compute capability 8.0", "9.0"),
        ({"capability": (10, 0)}, "compute capability 10.0", "9.0"),
        ({"dtype": torch.float32}, "torch.float32", "torch.bfloat16 or torch.float16"),
        ({"head_dim": 96}, "head dim 96", "64 or 128"),
        ({"block_size": 256}, "blocks of 256 tokens", "64"),
    ],
    ids=str,
)
def test_refusals(with_library, change, asked, supported):
    problem = replace(HOPPER, **change)
    choice = capability.select(problem, vsa.Options())
    refusals = [refusal for refusal in choice.refusals if refusal.backend == "sm90"]
    refused = ["forward", "backward"]
    assert [refusal.direction for refusal in refusals] == refused
    for refusal in refusals:
        assert asked in refusal.sentence and supported in refusal.sentence
    # Elsewhere than on its own device nobody waits for it.
    expected = problem.capability == (9, 0)
    assert [r.direction for r in choice.fallbacks if r.backend == "sm90"] == (refused if expected else [])
    if expected:
        with pytest.raises(vsa.BackendUnavailableError, match="strict=True forbids a fallback"):
            capability.select(problem, vsa.Options(strict=True))
    named = vsa.Options(backend="sm90", strict=True)
    with pytest.raises(vsa.BackendUnavailableError) as caught:
        capability.select(problem, named)
    assert all(str(refusal) in str(caught.value) for refusal in refusals)


class Recorded(TorchDispatchMode):
    """Names of the attention operators that are called, with the backends they are told (forward, backward)."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, ...]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "vsa" and "attention" in func.name():
            self.calls.append((func.name(), *(x.partition("@")[0] for x in args if isinstance(x, str))))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "change, forward, backward",
    [
        ({}, "sm90", "sm90"),
        ({"head_dim": 96}, "triton", "triton"),
        ({"dtype": torch.float32}, "triton", "triton"),
        ({"block_size": 128}, "sm90", "triton"),
        ({"capability": (10, 0)}, "sm100", "sm100"),
        ({"built": False}, "triton", "triton"),
    ],
    ids=str,
)
def test_fake_tensors_take_the_route_of_their_device(monkeypatch, change, forward, backward):
    given = {"head_dim": 128, "dtype": torch.bfloat16, "block_size": 64, "capability": (9, 0), "built": True, **change}
    monkeypatch.setattr(capability, "device_capability", lambda *args: given["capability"])
    monkeypatch.setattr(native, "implements", lambda op: given["built"])
    monkeypatch.setattr(triton, "_triton_version", lambda: (3, 6))
    capability.library_changed()
    try:
        with warnings.catch_warnings(), FakeTensorMode(), Recorded() as recorded:
            warnings.simplefilter("ignore")
            tokens = 2 * given["block_size"]
            q, k, v = (
                torch.empty(1, 2, tokens, given["head_dim"], dtype=given["dtype"], device="cuda") for _ in range(3)
            )
            ids = torch.empty(1, 2, 2, 1, dtype=torch.int32, device="cuda")
            counts = torch.empty(1, 2, 2, dtype=torch.int32, device="cuda")
            sizes = torch.empty(2, dtype=torch.int32, device="cuda")
            vsa.block_sparse_attention(q, k, v, ids, counts, sizes, block_size=given["block_size"])
    finally:
        capability.library_changed()
    assert recorded.calls == [("vsa::attention", forward, backward)]


def test_without_the_library_triton_runs_and_nobody_is_warned(without_library):
    for options in (vsa.Options(), vsa.Options(strict=True)):
        choice = capability.select(HOPPER, options)
        assert (choice.forward, choice.backward, choice.fallbacks) == ("triton", "triton", ())
        sentences = {r.sentence for r in choice.refusals if r.backend == "sm90"}
        assert sentences == {"needs the native library; its state: nothing was built"}
    choice = capability.select(HOPPER, vsa.Options(backend="sm90"))
    assert [r.backend for r in choice.fallbacks] == ["sm90", "sm90"], "who names it is told"
    with pytest.raises(vsa.BackendUnavailableError, match="nothing was built"):
        capability.select(HOPPER, vsa.Options(backend="sm90", strict=True))


def test_a_library_may_hold_only_the_forward(monkeypatch):
    monkeypatch.setattr(native, "implements", lambda op: op is FORWARD.default)
    choice = capability.select(HOPPER, vsa.Options())
    assert (choice.forward, choice.backward) == ("sm90", "triton")
    assert [r.direction for r in choice.fallbacks] == ["backward"]


def test_loading_a_library_forgets_choices(monkeypatch):
    monkeypatch.setattr(capability, "device_capability", lambda *args: (9, 0))
    monkeypatch.setattr(capability, "_warned", set())
    arguments = ("cuda", 77, torch.bfloat16, 128, 64, False, True, "auto", False, False)
    try:
        for present, name in ((False, "triton"), (True, "sm90")):
            monkeypatch.setattr(native, "implements", lambda op, present=present: present)
            capability.library_changed()
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                chosen = capability.choose(*arguments)
            assert [identity.partition("@")[0] for identity in chosen] == [name, name]
    finally:
        capability.library_changed()


def test_naming_it_on_a_cpu_is_a_fallback(monkeypatch):
    monkeypatch.setattr(capability, "_warned", set())
    problem = random_problem()
    with vsa.options(backend="sm90"), pytest.warns(UserWarning, match="'eager': sm90 .*asked for a cpu device") as seen:
        out = vsa.block_sparse_attention(*problem.operands, *problem.lists)
    assert len(seen) == 1, "Triton was not asked for"
    assert torch.equal(out, vsa.block_sparse_attention(*problem.operands, *problem.lists))
    with pytest.raises(vsa.BackendUnavailableError, match="the graph asks for sm90"):
        problem.forward("sm90")


FORWARD_SCHEMA = (
    "Tensor q, Tensor k, Tensor v, Tensor kv_indices, Tensor kv_num_blocks, Tensor kv_block_sizes, float sm_scale, "
    "int block_size, bool return_lse, bool deterministic"
)
BACKWARD_SCHEMA = (
    "Tensor dout, Tensor q, Tensor k, Tensor v, Tensor lse_log2, Tensor delta, Tensor kv_indices, Tensor "
    "kv_num_blocks, Tensor? q_indices, Tensor? q_offsets, Tensor kv_block_sizes, float sm_scale, int block_size, bool "
    "deterministic, bool needs_dq, bool needs_dkv"
)


def test_the_schemas_that_a_library_was_built_for():
    """A change here is a change of `native.INTERFACE`, of csrc/build_info.cpp.in and of csrc/registration.cpp."""
    assert native.INTERFACE == 2
    assert str(FORWARD.default._schema) == f"vsa::attention_sm90({FORWARD_SCHEMA}) -> (Tensor out, Tensor lse_log2)"
    outputs = "Tensor(a!) out, Tensor(b!) lse_log2"
    assert str(FORWARD.out._schema) == f"vsa::attention_sm90.out({FORWARD_SCHEMA}, *, {outputs}) -> ()"
    results = "(Tensor dq_accum, Tensor dk, Tensor dv)"
    assert str(BACKWARD.default._schema) == f"vsa::attention_backward_sm90({BACKWARD_SCHEMA}) -> {results}"
    outputs = "Tensor(a!) dq_accum, Tensor(b!) dk, Tensor(c!) dv"
    assert str(BACKWARD.out._schema) == f"vsa::attention_backward_sm90.out({BACKWARD_SCHEMA}, *, {outputs}) -> ()"
    eager = BACKWARD_SCHEMA.replace("Tensor dout, ", "Tensor dout, Tensor? dlse, ").replace(
        "Tensor v, ", "Tensor v, Tensor out, "
    )
    eager = eager.replace("Tensor delta, ", "")
    results = "(Tensor dq, Tensor dk, Tensor dv)"
    given = str(torch.ops.vsa.attention_backward_sm90_eager.default._schema)
    assert given == f"vsa::attention_backward_sm90_eager({eager}) -> {results}"


def test_tags():
    for op in (FORWARD, BACKWARD):
        assert torch.Tag.pt2_compliant_tag in op.default.tags and torch.Tag.pt2_compliant_tag in op.out.tags
        assert torch.Tag.needs_exact_strides in op.default.tags


def test_without_an_implementation_they_say_why(monkeypatch):
    monkeypatch.setattr(native, "_status", native.NativeStatus(None, False, "nothing was built"))
    problem = random_problem(head_dim=64)
    static = (problem.sm_scale, problem.block_size, True, False)
    with pytest.raises(vsa.BackendUnavailableError, match=r"run on CUDA tensors, by the native library.*nothing was"):
        FORWARD(*problem.operands, *problem.lists, *static)
    out, lse = (x.clone() for x in problem.forward("eager"))
    with pytest.raises(vsa.BackendUnavailableError, match="nothing was built"):
        FORWARD.out(*problem.operands, *problem.lists, *static, out=out, lse_log2=lse)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)], ids=["both", "dq", "dkv"])
def test_fakes_are_contiguous_whatever_the_operands_are(dtype, needs):
    problem = random_problem(head_dim=64, num_kv=5, view="transposed", dtype=dtype)
    q, k, v = (x.to("meta") for x in problem.operands)
    lists = [x.to("meta") for x in problem.lists]
    for return_lse in (True, False):
        out, lse = FORWARD(q, k, v, *lists, problem.sm_scale, 64, return_lse, False)
        assert (out.shape, out.dtype, out.is_contiguous()) == (q.shape, dtype, True)
        assert (lse.shape, lse.dtype) == (q.shape[:3] if return_lse else (0,), torch.float32)
    rows = q.new_empty(q.shape[:3], dtype=torch.float32)
    B, H, N_q, M = lists[0].shape
    transposed = (lists[0].new_empty(B, H, N_q * M), lists[0].new_empty(B, H, 6))
    dq, dk, dv = BACKWARD(
        q, q, k, v, rows, rows, *lists[:2], *transposed, lists[2], problem.sm_scale, 64, False, *needs
    )
    expected = _allocate.gradients(q, k, v, *needs)
    for name, given, wanted in zip(("dq", "dk", "dv"), (dq, dk, dv), expected, strict=True):
        assert given.shape == wanted.shape and given.stride() == wanted.stride(), name
        assert given.dtype == (torch.float32 if name == "dq" else dtype), name


def test_the_operator_of_eager_is_the_logical_one_without_its_backend():
    logical = torch.ops.vsa.attention_backward.default._schema
    eager = torch.ops.vsa.attention_backward_sm90_eager.default
    assert eager is sm90.BACKEND.eager_backward
    assert str(eager._schema) == str(logical).replace("attention_backward(", "attention_backward_sm90_eager(").replace(
        " str backend,", ""
    )
    q, k, v = (x.to("meta", torch.bfloat16) for x in random_problem(head_dim=64, num_kv=5, view="transposed").operands)
    rows = q.new_empty(q.shape[:3], dtype=torch.float32)
    lists = (rows, rows, None, None, rows)
    for needs in ((True, True), (True, False), (False, True)):
        given = eager(q, None, q, k, v, q, rows, *lists, 0.1, 64, False, *needs)
        for x, wanted in zip(given, _allocate.gradients(q, k, v, *needs), strict=True):
            assert (x.shape, x.stride(), x.dtype) == (wanted.shape, wanted.stride(), wanted.dtype)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_accumulator_is_read_in_the_order_the_kernels_write(head_dim):
    """dq[16 warp + 8 h + g][8 j + 2 c + i] stands at [warp][j][g][c][h][i] (csrc/sm90/bwd/dkdv_reducer.cuh)."""
    shape = (2, 3, 128, head_dim)
    dq = torch.randn(shape)
    blocks = dq.view(2, 3, 2, 4, 2, 8, head_dim // 8, 4, 2)  # warp, h, g, j, c, i
    accumulator = blocks.permute(0, 1, 2, 3, 6, 5, 7, 4, 8).contiguous().view(shape)
    zeros = torch.zeros(shape)

    def native_call(*args):
        return accumulator, zeros, zeros

    lists = (torch.zeros(2, 3, 2, 1).int(), torch.ones(2, 3, 2).int(), None, None, torch.full((2,), 64).int())
    given, *_ = backward_around(
        TorchArithmetic(), sm90.CONTRACT, native_call, zeros, None, zeros, zeros, zeros, zeros, zeros[..., 0], *lists,
        0.25, 64, False, True, False, zeros[..., 0],
    )  # fmt: skip
    assert torch.equal(given, dq * 0.25) and given.is_contiguous()
