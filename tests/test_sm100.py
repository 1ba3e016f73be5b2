"""Backend `sm100` without a GPU: the routes of every device as a table, proven by making the others raise; refusals,
sizes of what stands between its kernels, and its operators' schemas and fakes.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from native_library import any_library, run_python
from problems import random_problem

import vsa_inductor as vsa
from vsa_inductor import native
from vsa_inductor.backends import capability, eager, sm100, triton
from vsa_inductor.backends.contract import Problem, TorchArithmetic, backward_around

BLACKWELL = Problem("cuda", (10, 0), torch.bfloat16, 128, 64, False, True, False)
BACKWARD = torch.ops.vsa.attention_backward_sm100
# By device and block size, (forward, backward) where everything is built; where nothing is, Triton runs both. sm121 is
# not there yet.
ROUTES = {
    ((9, 0), 64): ("sm90", "sm90"),
    ((9, 0), 128): ("sm90", "triton"),
    ((10, 0), 64): ("sm100", "sm100"),
    ((10, 0), 128): ("sm100", "triton"),
    ((10, 3), 64): ("sm100", "triton"),
    ((10, 3), 128): ("sm100", "triton"),
    ((12, 1), 64): ("triton", "triton"),
    ((12, 1), 128): ("triton", "triton"),
    ((8, 0), 64): ("triton", "triton"),
    ((8, 0), 128): ("triton", "triton"),
}
OTHERS = ("triton", "triton")


@pytest.fixture(autouse=True)
def triton_is_there_and_no_library(monkeypatch):
    monkeypatch.setattr(triton, "_triton_version", lambda: (3, 6))
    # The installed package may have one.
    monkeypatch.setattr(native, "_status", native.NativeStatus(None, False, "nothing was built"))
    monkeypatch.setattr(native, "implements", lambda op: False)


@pytest.fixture
def with_library(monkeypatch):
    monkeypatch.setattr(native, "implements", lambda op: True)


@pytest.mark.parametrize("built", [True, False], ids=["built", "not-built"])
@pytest.mark.parametrize("device, block_size", ROUTES, ids=str)
def test_routes(monkeypatch, device, block_size, built):
    monkeypatch.setattr(native, "implements", lambda op: built)
    problem = replace(BLACKWELL, capability=device, block_size=block_size)
    expected = ROUTES[device, block_size] if built else OTHERS
    choice = capability.select(problem, vsa.Options())
    assert (choice.forward, choice.backward) == expected
    forced = capability.select(problem, vsa.Options(backend="triton", strict=True))
    assert (forced.forward, forced.backward) == OTHERS


class Ran:
    """Backends that compute with the reference and say that they ran, or raise."""

    def __init__(self, monkeypatch, device: tuple[int, int], allowed: tuple[str, str]) -> None:
        self.calls: list[tuple[str, str]] = []
        # Tensors are on the CPU: only the choice believes in the device.
        monkeypatch.setattr(
            capability, "_problem", lambda kind, index, *facts: Problem("cuda", device, *facts), raising=True
        )
        monkeypatch.setattr(native, "implements", lambda op: True)
        order = [
            replace(
                backend,
                forward_native=(backend.forward_op, self.recorded(backend.name, "forward", allowed[0])),
                backward_native=(backend.backward_op, self.recorded(backend.name, "backward", allowed[1])),
                eager_backward=self.recorded(backend.name, "backward", allowed[1]),
            )
            for backend in capability._ORDER
        ]
        monkeypatch.setattr(capability, "_ORDER", order)
        capability.library_changed()

    def recorded(self, name: str, direction: str, allowed: str):
        def run(*args):
            if name != allowed:
                raise AssertionError(f"the {direction} of {name} ran")
            self.calls.append((name, direction))
            return eager.BACKEND.forward(*args) if direction == "forward" else eager.BACKEND.run_backward(*args)

        return run


@pytest.mark.filterwarnings("ignore:vsa_inductor runs the backward on 'triton'")
@pytest.mark.parametrize("device, block_size", ROUTES, ids=str)
def test_the_route_that_runs(monkeypatch, device, block_size):
    """Every other one raises; the result is the fallback's, bit for bit."""
    problem = random_problem(head_dim=128, block_size=block_size, dtype=torch.bfloat16, num_q=2, num_kv=3)
    operands = [x.detach().requires_grad_() for x in problem.operands]
    expected = vsa.block_sparse_attention(*operands, *problem.lists, block_size=block_size)
    wanted = torch.autograd.grad(expected.float().sum(), operands)
    ran = Ran(monkeypatch, device, ROUTES[device, block_size])
    try:
        out = vsa.block_sparse_attention(*operands, *problem.lists, block_size=block_size)
        given = torch.autograd.grad(out.float().sum(), operands)
    finally:
        monkeypatch.undo()
        capability.library_changed()
    forward, backward = ROUTES[device, block_size]
    assert ran.calls == [(forward, "forward"), (backward, "backward")]
    assert torch.equal(out, expected) and all(map(torch.equal, given, wanted))


def test_another_route_would_have_raised(monkeypatch):
    problem = random_problem(head_dim=128, dtype=torch.bfloat16)
    Ran(monkeypatch, (10, 0), ("sm100", "sm100"))
    try:
        with vsa.options(backend="triton"), pytest.raises(AssertionError, match="the forward of triton ran"):
            vsa.block_sparse_attention(*problem.operands, *problem.lists)
    finally:
        monkeypatch.undo()
        capability.library_changed()


@pytest.mark.parametrize("device, block_size", [*ROUTES, ((10, 0), 256)], ids=str)
def test_strict_on_devices_it_is_for(with_library, device, block_size):
    """A fallback is an error where sm100 is what one expects; where it has no backward at all, nobody waits for it."""
    problem = replace(BLACKWELL, capability=device, block_size=block_size)
    falls_back = (device, block_size) in (((10, 0), 128), ((10, 0), 256))
    if falls_back:
        with pytest.raises(vsa.BackendUnavailableError, match=r"strict=True.*sm100 \(backward\): asked for blocks of"):
            capability.select(problem, vsa.Options(strict=True))
    elif device != (9, 0):
        choice = capability.select(problem, vsa.Options(strict=True))
        assert (choice.forward, choice.backward) == ROUTES[device, block_size]


@pytest.mark.parametrize(
    "change, refused, asked, supported",
    [
        ({"device_type": "cpu", "capability": None}, "both", "a cpu device", "CUDA devices of compute capability 10.0"),
        ({"capability": (9, 0)}, "both", "compute capability 9.0", "10.0"),
        ({"capability": (12, 1)}, "both", "compute capability 12.1", "10.0"),
        ({"capability": (10, 3)}, "backward", "compute capability 10.3", "10.0"),
        ({"dtype": torch.float16}, "backward", "torch.float16", "torch.bfloat16"),
        ({"dtype": torch.float32}, "both", "torch.float32", "torch.bfloat16"),
        ({"head_dim": 64}, "both", "head dim 64", "128"),
        ({"block_size": 256}, "both", "blocks of 256 tokens", "64"),
        ({"block_size": 128}, "backward", "blocks of 128 tokens", "64"),
        ({"grouped": True}, "backward", "more heads of queries than of keys", "as many of both"),
    ],
    ids=str,
)
def test_refusals(with_library, change, refused, asked, supported):
    problem = replace(BLACKWELL, **change)
    for direction in capability.DIRECTIONS:
        sentence = sm100.BACKEND.refuse(problem, direction)
        if refused not in ("both", direction):
            assert sentence is None
            continue
        assert sentence is not None and asked in sentence
        assert supported in sentence.partition("supported: ")[2]
    forced = vsa.Options(backend="sm100", strict=True)
    with pytest.raises(vsa.BackendUnavailableError, match=r"sm100 \(backward\): asked for"):
        capability.select(problem, forced)


def test_without_a_library_it_says_so():
    choice = capability.select(BLACKWELL, vsa.Options())
    sentences = {r.sentence for r in choice.refusals if r.backend == "sm100"}
    assert sentences == {"needs the native library; its state: nothing was built"}
    assert choice.fallbacks == ()


def test_a_library_without_its_operators_is_told_by_name(monkeypatch):
    """What a build has as long as the main kernels are not registered."""
    monkeypatch.setattr(native, "_status", native.NativeStatus("x.so", True, "loaded from x.so"))
    around = (sm100.PREPARE, sm100.FINISH, sm100.ORDER)
    monkeypatch.setattr(native, "implements", lambda op: op in around or "sm90" in str(op))
    for strict in (False, True):
        choice = capability.select(BLACKWELL, vsa.Options(strict=strict))
        assert (choice.forward, choice.backward, choice.fallbacks) == ("triton", "triton", ())
    for direction, op in (("forward", "vsa.attention_sm100.default"), ("backward", "vsa.attention_backward_sm100")):
        sentence = sm100.BACKEND.refuse(BLACKWELL, direction)
        assert sentence is not None and op in sentence and "does not implement; its state: loaded from x.so" in sentence
        assert sm100.STATE in sentence
    hopper = capability.select(replace(BLACKWELL, capability=(9, 0)), vsa.Options(strict=True))
    assert (hopper.forward, hopper.backward) == ("sm90", "sm90"), "nothing changes for sm90"


def test_a_library_without_code_for_the_device(monkeypatch, with_library):
    path = "/x/(sm_103a; y)/_native.so"

    def refused(images: str, device: tuple[int, int]) -> str | None:
        reason = f"loaded from /x/y.so ({images}; CUDA 13.0; sources 1)"
        monkeypatch.setattr(native, "_status", native.NativeStatus(path, True, reason))
        return sm100.BACKEND.refuse(replace(BLACKWELL, capability=device), "forward")

    assert refused("sm_90a, sm_100a", (10, 0)) is None and refused("sm_90a, sm_100a, sm_103a", (10, 3)) is None
    assert refused("sm_100a", (10, 3)).startswith(
        "needs a native library with code for sm_103a; its state: loaded from"
    )
    assert refused("sm_90a, sm_103a", (10, 0)).startswith("needs a native library with code for sm_100a")


def test_users_see_that_it_never_ran_on_silicon(monkeypatch, with_library):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "GB200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (10, 0))
    report = vsa.backend_report()
    assert report.devices[1].backends[0] == "sm100"
    for text in (str(report), report.to_html()):
        assert "sm100 (emulated, not yet run on silicon), triton" in text


def test_naming_it_where_it_cannot_run_is_an_error_in_strict_mode():
    with pytest.raises(vsa.BackendUnavailableError, match="nothing was built"):
        capability.select(BLACKWELL, vsa.Options(backend="sm100", strict=True))


# Sizes


@pytest.mark.parametrize("B, H, N_q, N_kv", [(1, 1, 1, 1), (2, 3, 5, 5), (1, 2, 3, 7)])
@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)], ids=["both", "dq", "dkv"])
def test_sizes_are_the_same_in_fakes_and_around_them(B, H, N_q, N_kv, needs):
    D, S = 128, N_q * 64
    q, dout, out = (torch.empty(B, H, S, D, dtype=torch.bfloat16, device="meta") for _ in range(3))
    k, v = (torch.empty(B, H, N_kv * 64, D, dtype=torch.bfloat16, device="meta") for _ in range(2))
    lse = torch.empty(B, H, S, device="meta")
    ids = torch.empty(B, H, N_q, 1, dtype=torch.int32, device="meta")
    counts, sizes = ids[..., 0], torch.empty(N_kv, dtype=torch.int32, device="meta")
    transposed = (torch.empty_like(ids[:, :, :, 0]), counts.new_empty(B, H, N_kv + 1))
    dout_t, q_t, delta = sm100.PREPARE(dout, lse, q, out)
    assert dout_t.shape == q_t.shape == sm100.transposed_shape(B, H, S, D) and q_t.dtype == torch.bfloat16
    assert delta.shape == lse.shape and delta.dtype == torch.float32
    dq, dk, dv = BACKWARD(dout_t, q_t, k, v, lse, delta, ids, counts, *transposed, sizes, 0.1, 64, False, *needs)
    assert dq.shape == (sm100.accumulator_shape(B, H, S, D) if needs[0] else (0,)) and dq.dtype == torch.float32
    ordered = BACKWARD.ordered(
        dout_t, q_t, k, v, lse, delta, ids, counts, *transposed, sizes, 0.1, 64, False, *needs,
        counts.new_empty(B * H * N_kv),
    )  # fmt: skip
    assert [x.shape for x in ordered] == [x.shape for x in (dq, dk, dv)]
    assert dk.shape == dv.shape == (k.shape if needs[1] else (0,)) and dk.dtype == torch.bfloat16
    if needs[0]:
        finished = sm100.FINISH(dq, 0.1)
        assert finished.shape == q.shape and finished.dtype == torch.bfloat16 and finished.is_contiguous()
    order = sm100.ORDER(transposed[1], N_q, 8, False)
    assert order.shape == (B * H * N_kv,) and order.dtype == torch.int32


def test_traced_backward_gives_the_native_operator_what_its_fake_expects():
    """The decomposition of the logical operator: transposes and delta before, one view of the accumulator after."""
    B, H, S, D = 2, 3, 192, 128
    dout, q, k, v, out = (torch.randn(B, H, S, D, device="meta", dtype=torch.bfloat16) for _ in range(5))
    rows = torch.empty(B, H, S, device="meta")
    ids = torch.empty(B, H, 3, 1, dtype=torch.int32, device="meta")
    lists = (ids, ids[..., 0], ids[..., 0], ids.new_empty(B, H, 4), ids.new_empty(3))
    dq, dk, dv = sm100.BACKEND.trace_backward(dout, None, q, k, v, out, rows, *lists, 0.1, 64, False, True, True)
    for given in (dq, dk, dv):
        assert given.shape == q.shape and given.dtype == torch.bfloat16 and given.is_contiguous()


def test_the_accumulator_is_read_in_the_order_the_kernels_write():
    """dq[4 c + i][32 w + l] stands at [w 4][c 16][l 32][i 4] (csrc/sm100/accumulator_order.h)."""
    shape = (2, 3, 128, 128)
    dq = torch.randn(shape)
    blocks = dq.view(2, 3, 2, 16, 4, 4, 32)  # c, i, w, l
    accumulator = blocks.permute(0, 1, 2, 5, 3, 6, 4).contiguous().view(shape)
    zeros = torch.zeros(shape)
    lists = (torch.zeros(2, 3, 2, 1).int(), torch.ones(2, 3, 2).int(), None, None, torch.full((2,), 64).int())
    seen = {}

    def native_call(dout_t, q_t, *rest):
        seen.update(dout=dout_t, q=q_t)
        return accumulator, zeros, zeros

    given, *_ = backward_around(
        TorchArithmetic(), sm100.CONTRACT, native_call, dq, None, dq, zeros, zeros, zeros, zeros[..., 0], *lists,
        0.25, 64, False, True, False, zeros[..., 0],
    )  # fmt: skip
    assert torch.equal(given, dq * 0.25) and given.is_contiguous()
    for x in seen.values():
        assert torch.equal(x, dq.permute(1, 3, 0, 2).reshape(3 * 128, 2 * 128)) and x.is_contiguous()


@pytest.mark.parametrize("blocks, expected", [(1, 0), (1023, 0), (1024, 4 * 6 * 1024), (29024, 4 * 6 * 29024)])
def test_scratch_for_the_order_of_work(blocks, expected):
    assert sm100.work_order_bytes(2, 3, blocks) == expected
    assert sm100.work_order_bytes(2, 3, blocks, order_given=True) == 0


# The library


REFUSALS = {
    "prepare q of fp16": ("PREPARE", "(x, None, x.half(), x)", "q: got Half; allowed: BFloat16"),
    "prepare q of rank 3": ("PREPARE", "(x, None, x[0], x)", "q: got 3 dimensions; allowed: 4 dimensions"),
    "prepare head dim": ("PREPARE", "(x, None, x[..., :64], x)", "q.shape[3]: got 64; allowed: 128"),
    "prepare ragged": ("PREPARE", "(x, None, x[:, :, :100], x)", "q.shape[2]: got 100; allowed: a multiple of 64"),
    "prepare dout": ("PREPARE", "(x[:1], None, x, x)", "dout: got shape (1, 3, 128, 128); allowed: (2, 3, 128, 128)"),
    "prepare out": ("PREPARE", "(x, None, x, x.float())", "out: got Float; allowed: BFloat16"),
    "prepare dlse": ("PREPARE", "(x, x[..., 0], x, x)", "dlse: got BFloat16; allowed: Float"),
    "prepare on a CPU": (
        "PREPARE", "(x, None, x, x)", "q: got a tensor that is not on a CUDA device; allowed: CUDA tensors",
    ),
    "finish of bf16": ("FINISH", "(x, 0.1)", "dq_accum: got BFloat16; allowed: Float"),
    "finish scale": ("FINISH", "(x.float(), float('inf'))", "sm_scale: got inf; allowed: a finite number"),
    "order width": ("ORDER", "(o, 2, 0, False)", "bin_width: got 0; allowed: 1 or more"),
    "order of int64": ("ORDER", "(o.long(), 2, 8, False)", "q_offsets: got Long; allowed: Int"),
    "order at the limit": (
        "ORDER", "(o.new_zeros(1, 1, 29025), 2, 8, False)",
        "q_offsets: got a tensor that is not on a CUDA device; allowed: CUDA tensors",
    ),
    "order one past it": (
        "ORDER", "(o.new_zeros(1, 1, 29026), 2, 8, True)",
        "k.shape[2]: got 29025 blocks of 64 tokens; allowed: at most 29024, or any number with work_order given",
    ),
}  # fmt: skip


FORWARD = "(x, x, x, i, i[..., 0], o[0, 0, :2], {scale}, {block}, True, False)"
BACKWARD_ARGUMENTS = (
    "({dout}, {q}, x, x, r, {delta}, i, i[..., 0], {lists}, o[0, 0, :2], 0.1, {block}, False, True, True)"
)
EAGER = (
    "({dout}, None, x, x, x, x, r, i, i[..., 0], i[..., 0], {offsets}, o[0, 0, :2], 0.1, {block}, False, True, True)"
)


def forward(old: str = "", new: str = "", scale: str = "0.1", block: str = "64") -> str:
    return FORWARD.format(scale=scale, block=block).replace(old, new, 1)


def backward(**change: str) -> str:
    given = {"dout": "t", "q": "t", "delta": "r", "lists": "i[..., 0], o", "block": "64", **change}
    return BACKWARD_ARGUMENTS.format(**given)


def whole(**change: str) -> str:
    return EAGER.format(**{"dout": "x", "offsets": "o", "block": "64", **change})


# One kv block more than the order kernel takes; all of it is one row in memory.
TOO_MANY = (
    "(t[:128, :64], t[:128, :64], *2 * (x[:1, :1, :1].expand(1, 1, 29025 * 64, 128),), r[:1, :1, :64], r[:1, :1, :64],"
    " i[:1, :1, :1], i[:1, :1, :1, 0], i[:1, :1, :1, 0], o.new_zeros(1, 1, 29026), o.new_zeros(29025), 0.1, 64, False,"
    " True, True{})"
)
NO_GPU = "q: got a tensor that is not on a CUDA device; allowed: CUDA tensors"
MAIN_REFUSALS = {
    "forward head dim": (
        "attention_sm100", forward("x, x, x", "*3 * (x[..., :64],)"), "q.shape[3]: got 64; allowed: 128",
    ),
    "forward fp32": ("attention_sm100", forward("x,", "x.float(),"), "q: got Float; allowed: BFloat16 or Half"),
    "forward block": ("attention_sm100", forward(block="256"), "block_size: got 256; allowed: 64 or 128"),
    "forward scale": ("attention_sm100", forward(scale="float('nan')"), "sm_scale: got nan; allowed: a finite number"),
    "forward on a CPU": ("attention_sm100", forward(), NO_GPU),
    "backward rows": (
        "attention_backward_sm100", backward(q="x"), "q: got 4 dimensions; allowed: 2 dimensions: [H * D, B * S]",
    ),
    "backward ragged": (
        "attention_backward_sm100", backward(q="t[:, :100]"),
        "q.shape[1]: got 100; allowed: a multiple of block_size, 64, for each of 2",
    ),
    "backward fp16": ("attention_backward_sm100", backward(q="t.half()"), "q: got Half; allowed: BFloat16"),
    "backward dout": (
        "attention_backward_sm100", backward(dout="t[:128]"), "dout: got shape (128, 256); allowed: (384, 256)",
    ),
    "backward delta": (
        "attention_backward_sm100", backward(delta="r[:1]"), "delta: got shape (1, 3, 128); allowed: (2, 3, 128)",
    ),
    "backward lists": (
        "attention_backward_sm100", backward(lists="None, None"),
        "q_indices, q_offsets: got None; allowed: the lists of vsa::transpose_blocks",
    ),
    "backward block": ("attention_backward_sm100", backward(block="128"), "block_size: got 128; allowed: 64"),
    "backward on a CPU": ("attention_backward_sm100", backward(), NO_GPU),
    "ordered": (
        "attention_backward_sm100.ordered", backward()[:-1] + ", o.new_zeros(11))",
        "work_order: got shape (11); allowed: (12)",
    ),
    "ordered on a CPU": ("attention_backward_sm100.ordered", backward()[:-1] + ", o.new_zeros(12))", NO_GPU),
    "too many blocks": ("attention_backward_sm100", TOO_MANY.format(""), "k.shape[2]: got 29025 blocks of 64 tokens; "
                        "allowed: at most 29024, or any number with work_order given"),
    "too many blocks, ordered": ("attention_backward_sm100.ordered", TOO_MANY.format(", o.new_zeros(29025)"), NO_GPU),
    "whole dout": (
        "attention_backward_sm100_eager", whole(dout="x[:1]"),
        "dout: got shape (1, 3, 128, 128); allowed: (2, 3, 128, 128)",
    ),
    "whole offsets": (
        "attention_backward_sm100_eager", whole(offsets="o[..., :2]"),
        "q_offsets: got shape (2, 3, 2); allowed: (2, 3, 3)",
    ),
    "whole on a CPU": ("attention_backward_sm100_eager", whole(), NO_GPU),
}  # fmt: skip


def test_refusals_of_the_library_before_a_gpu_is_touched():
    around = {"PREPARE": "prepare_backward_sm100", "FINISH": "finish_dq_sm100", "ORDER": "work_order_sm100"}
    cases = {case: (around[op], *rest) for case, (op, *rest) in REFUSALS.items()} | MAIN_REFUSALS
    printed = run_python(
        "import json, sys, torch\n"
        "import vsa_inductor as vsa\n"
        "from vsa_inductor.backends import sm100\n"
        "vsa.load_library(sys.argv[1])\n"
        "keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)\n"
        "x, o = torch.zeros(2, 3, 128, 128).bfloat16(), torch.zeros(2, 3, 3).int()\n"
        "t, r, i = torch.zeros(384, 256).bfloat16(), torch.zeros(2, 3, 128), torch.zeros(2, 3, 2, 1).int()\n"
        "found = {}\n"
        "for case, (op, arguments, _) in json.loads(sys.argv[2]).items():\n"
        "    try:\n"
        "        name, _, overload = op.partition('.')\n"
        "        getattr(getattr(torch.ops.vsa, name), overload or 'default').redispatch(keys, *eval(arguments))\n"
        "    except RuntimeError as error:\n"
        "        found[case] = str(error).splitlines()[0]\n"
        "ops = ('attention_sm100', 'attention_backward_sm100', 'attention_backward_sm100_eager')\n"
        "have = [torch._C._dispatch_has_kernel_for_dispatch_key('vsa::' + n, 'CUDA') for n in ops]\n"
        "from vsa_inductor.backends.contract import Problem\n"
        "asked = Problem('cuda', (10, 0), torch.bfloat16, 128, 64, False, True, False)\n"
        "why = [sm100.BACKEND.refuse(asked, d) for d in ('forward', 'backward')]\n"
        "print(json.dumps([found, have, why]))",
        str(any_library()),
        json.dumps(cases),
    )
    found, have, why = json.loads(printed.splitlines()[-1])
    for implemented, sentence in ((have[0], why[0]), (have[1] and have[2], why[1])):
        assert implemented == (sentence is None), "refused exactly as long as it is not implemented"
    # An installed library may have been built for sm_90a alone.
    lacking = [
        op for op, there in zip(("attention_sm100", "attention_backward_sm100"), have, strict=False) if not there
    ]
    for case, (op, _, words) in cases.items():
        if op.partition(".")[0].removesuffix("_eager") not in lacking:
            assert found[case] == words, case
