"""What every operator owes the compiler: schema, fake with the same strides, gradient formula, FLOP count, refusals."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch
from problems import BACKENDS, VIEWS, operand, random_problem
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from vsa_inductor import TileLayout
from vsa_inductor.backends.capability import backend_named

LAYOUT = {"T": 3, "H": 5, "W": 6}
LAYOUTS = ("tile", "untile", "tile_to_bhsd")
# Arguments that are one for the whole batch.
TABLES = ("token_slot", "slot_token", "kv_block_sizes")
DIFFERENTIABLE = (*LAYOUTS, "gated_combine", "attention")


def raster(view: str, heads: int = 2, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Tensor:
    """``[B, S, H, D]`` in the views of `operand`; the transposed one is head-major in memory."""
    S = TileLayout.from_video_shape(**LAYOUT).num_tokens
    x = operand((2, heads, S, 16), view, dtype, device)
    if view == "contiguous":
        return x.transpose(1, 2).contiguous()
    return x.contiguous().transpose(1, 2) if view == "transposed" else x.transpose(1, 2)


def leaf(x: Tensor, requires_grad: bool) -> Tensor:
    return x.detach().requires_grad_(requires_grad)


def norm_rope_tile_arguments(name: str, layout: TileLayout, x: Tensor) -> tuple[Any, ...]:
    """With neither norm nor rotation."""
    index = [*x.stride()[:3], 0]
    if name == "norm_rope_tile":
        indices = (layout.slot_token, index, [], [], [])
        return [x], [], [], *indices, list(x.shape), "none", "none", 0, 1.0, 0.0, 64
    dtiled, dsums = (x.new_ones(2, 2, n, 16) for n in (layout.num_slots, layout.num_blocks))
    indices = (layout.slot_token, [], [], [], [], [])
    return dtiled, dsums, None, None, None, [], *indices, list(x.shape), "none", "none", 1.0, 64, True, False


def call(
    name: str,
    view: str = "contiguous",
    device: str = "cpu",
    backend: str = "eager",
    grad: bool = False,
    **settings: Any,
) -> tuple[torch._ops.OpOverload, tuple[Any, ...], dict[str, Any]]:
    """An overload with arguments of some view; ``grad`` asks for gradients of the floating ones."""
    op = getattr(torch.ops.vsa, name.removesuffix(".out"))
    op = op.out if name.endswith(".out") else op.default
    layout = TileLayout.from_video_shape(**LAYOUT, device=device)
    tables = (layout.token_slot, layout.slot_token)
    if name == "tile":
        return op, (leaf(raster(view, device=device), grad), *tables), {}
    if name == "untile":
        return op, (leaf(operand((2, 2, layout.num_slots, 16), view, device=device), grad), *tables), {}
    if name.startswith("gated_combine"):
        out, coarse = (operand((2, 2, n, 16), view, device=device) for n in (layout.num_slots, layout.num_blocks))
        out, gate, coarse = (leaf(x, grad) for x in (out, raster(view, device=device), coarse))
        if name == "gated_combine":
            return op, (out, gate, coarse, *tables, 64), {}
        return op, (leaf(raster(view, device=device), grad), out, gate, coarse, *tables, 64, True, True), {}
    if name == "tile_to_bhsd":
        return op, ([leaf(raster(view, heads, device), grad) for heads in (2, 1, 4)], tables[1]), {}
    if name in ("tile_sums", "tile_sums_backward"):
        blocks = layout.num_slots if name == "tile_sums" else layout.num_blocks
        rest = (64,) if name == "tile_sums" else (64, torch.float32)
        return op, (leaf(operand((2, 2, blocks, 16), view, device=device), grad), *rest), {}
    if name == "num_kept_blocks":
        return op, (torch.tensor(0.5), 6), {}
    if name.startswith("norm_rope_tile"):
        return op, norm_rope_tile_arguments(name, layout, raster(view, device=device)), {}
    if name == "select_blocks":
        return op, (operand((2, 2, 4, 6), view, device=device), 3, 1), {}
    problem = random_problem(
        **{
            "batch": 2, "num_q": 2, "num_kv": 3, "width": 2, "head_dim": 16, "counts": "varying", "sizes": "ragged",
            "view": view, "device": device, **settings,
        }
    )  # fmt: skip
    ids, counts, sizes = problem.lists
    if view == "expanded":
        ids, counts = ids[:, :1].expand_as(ids), counts[:, :1].expand_as(counts)
    elif view != "contiguous":
        ids = ids.transpose(1, 2).contiguous().transpose(1, 2)
    q, k, v = (leaf(x, grad) for x in problem.operands)
    if name == "transpose_blocks":
        return op, (ids, counts, sizes.shape[0]), {}
    static = (problem.sm_scale, problem.block_size)
    if name == "attention":
        return op, (q, k, v, ids, counts, sizes, *static, True, False, backend, backend), {}
    if name.startswith(f"attention_{backend}"):
        outs = {"out": torch.empty(q.shape), "lse_log2": torch.empty(q.shape[:3])} if name.endswith(".out") else {}
        return op, (q, k, v, ids, counts, sizes, *static, True, False), {n: x.to(device) for n, x in outs.items()}
    with torch.no_grad():
        out, lse = torch.ops.vsa.attention(q, k, v, ids, counts, sizes, *static, True, False, backend, backend)
        transposed = torch.ops.vsa.transpose_blocks(ids, counts, sizes.shape[0])
    dout = leaf(problem.dout, grad)
    if name == "attention_backward":
        dlse = torch.randn_like(lse).masked_fill(lse.isinf(), 0)
        head = (dout, dlse, q, k, v, out, lse, ids, counts, *transposed, sizes)
        return op, (*head, *static, False, backend, True, True), {}
    assert name.startswith(f"attention_backward_{backend}")
    delta = (out * problem.dout).sum(-1)
    outs = {"dq_accum": q, "dk": k, "dv": v} if name.endswith(".out") else {}
    head = (dout, q, k, v, lse, delta, ids, counts, *transposed, sizes)
    return op, (*head, *static, False, True, True), {n: torch.empty(x.shape, device=device) for n, x in outs.items()}


COMBINE = ["gated_combine", "gated_combine_backward"]
LOGICAL = [*LAYOUTS, *COMBINE, "select_blocks", "transpose_blocks", "attention", "attention_backward"]
NATIVE = ["attention_{}", "attention_backward_{}", "attention_{}.out", "attention_backward_{}.out"]
# Operators without a backend argument run by device: one backend per device is enough for them.
CALLS = [
    pytest.param(*case.values, name, id=f"{case.id}-{name}", marks=case.marks)
    for case, template in itertools.product(BACKENDS, LOGICAL + NATIVE)
    if "attention" in template or case.id != "cuda-eager"
    for name in [template.format(case.values[1])]
]


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("device, backend, name", CALLS)
def test_opcheck(device, backend, name, view):
    # The backward has no second derivative and the native operators no gradient at all.
    op, args, kwargs = call(name, view, device, backend, grad=name in DIFFERENTIABLE)
    results = torch.library.opcheck(op, args, kwargs)
    assert set(results) == {
        "test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"
    }  # fmt: skip
    assert set(results.values()) == {"SUCCESS"}


def described(outputs: Any) -> list[tuple[Any, ...]]:
    return [(tuple(x.shape), x.stride(), x.dtype, x.device.type) for x in pytree.tree_leaves(outputs)]


def as_fake(tree: Any, mode: FakeTensorMode) -> Any:
    return pytree.tree_map_only(Tensor, mode.from_tensor, tree)


def assert_fake_is_like_real(op: Any, args: tuple[Any, ...]) -> None:
    real = described(op(*args))
    with FakeTensorMode() as mode:
        assert described(op(*as_fake(args, mode))) == real
    on_meta = pytree.tree_map_only(Tensor, lambda x: x.to("meta"), args)
    assert described(op(*on_meta)) == [(*x[:3], "meta") for x in real]


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("device, backend, name", [c for c in CALLS if not c.values[2].endswith(".out")])
def test_fake_has_the_strides_of_the_operator(device, backend, name, view):
    op, args, _ = call(name, view, device, backend)
    assert_fake_is_like_real(op, args)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("device, backend", BACKENDS)
def test_fake_without_lse(device, backend, view):
    for name in ("attention", f"attention_{backend}"):
        op, args, _ = call(name, view, device, backend)
        assert_fake_is_like_real(op, (*args[:8], False, *args[9:]))


@pytest.mark.parametrize("needs_dq, needs_dkv", [(True, False), (False, True), (False, False)])
@pytest.mark.parametrize("device, backend", BACKENDS)
def test_fake_of_a_half_backward(device, backend, needs_dq, needs_dkv):
    for name in ("attention_backward", f"attention_backward_{backend}"):
        op, args, _ = call(name, device=device, backend=backend)
        args = (*args[:-2], needs_dq, needs_dkv)
        assert_fake_is_like_real(op, args)
        assert [x.numel() > 0 for x in op(*args)] == [needs_dq, needs_dkv, needs_dkv]


def gradients_through(name: str, args: tuple[Any, ...], dout: str) -> list[Tensor]:
    """Gradients by autograd, with a gradient of the output that is contiguous, a sum's, or a slice of a cat's."""
    outputs = getattr(torch.ops.vsa, name)(*args)
    out = outputs if isinstance(outputs, Tensor) else outputs[0]
    loss = out.sum() if dout == "sum" else (out * torch.ones_like(out)).sum()
    if dout == "cat":
        both = torch.cat((out, out.detach()), -1)
        loss = (both * torch.ones_like(both)).sum()
    leaves = [x for x in pytree.tree_leaves(args) if isinstance(x, Tensor) and x.requires_grad]
    return list(torch.autograd.grad(loss, leaves[:1] if name == "tile_to_bhsd" else leaves))


@pytest.mark.parametrize("dout", ["contiguous", "sum", "cat"])
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("name", DIFFERENTIABLE)
@pytest.mark.parametrize("device, backend", BACKENDS)
def test_fake_gradients_have_the_strides_of_the_real_ones(device, backend, name, view, dout):
    _, args, _ = call(name, view, device, backend, grad=True)
    real = gradients_through(name, args, dout)
    with FakeTensorMode() as mode:
        fake = gradients_through(name, as_fake(args, mode), dout)
    assert described(real) == described(fake)


@pytest.mark.parametrize("view", ["contiguous", "chunk"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_gradcheck_of_layouts(name, view):
    op, args, _ = call(name, view)
    args = pytree.tree_map_only(Tensor, lambda x: leaf(x.double(), True) if x.is_floating_point() else x, args)
    x, rest = args[0], args[1:]
    if name == "tile_to_bhsd":
        assert torch.autograd.gradcheck(lambda *xs: tuple(op(list(xs), *rest)), x, fast_mode=True)
    else:
        assert torch.autograd.gradcheck(lambda x: op(x, *rest), x, fast_mode=True)
        assert torch.autograd.gradgradcheck(lambda x: op(x, *rest), x, fast_mode=True)


@pytest.mark.parametrize("outputs", [(0,), (1,), (0, 1)], ids=["out", "lse", "both"])
@pytest.mark.parametrize("settings", [{}, {"heads": 2, "kv_heads": 1}, {"num_q": 3, "counts": "full"}], ids=str)
def test_gradcheck_of_attention(settings, outputs):
    settings = {"batch": 1, "heads": 1, "num_kv": 2, "sizes": (64, 17), "dtype": torch.float64, **settings}
    op, args, _ = call("attention", grad=True, **settings)
    q, k, v, *rest = args
    row_has_key = op(*args)[1].detach() > -torch.inf

    def function(q, k, v):
        out, lse = op(q, k, v, *rest)
        return tuple((out, lse[row_has_key])[i] for i in outputs)

    assert row_has_key.any()
    # v does not reach lse: its gradient there is None, which gradcheck takes for a missing formula.
    given = (q, k, v.detach()) if outputs == (1,) else (q, k, v)
    assert torch.autograd.gradcheck(function, given, fast_mode=True)


@pytest.mark.parametrize("view", ["contiguous", "expanded"])
@pytest.mark.parametrize("frozen, products", [("", 5), ("q", 4), ("kv", 3)], ids=str)
def test_flops_count_the_listed_blocks(frozen, products, view):
    op, args, _ = call("attention", view, grad=True, heads=4, kv_heads=2, num_q=3, num_kv=5, width=2, head_dim=32)
    for x, name in zip(args[:3], "qkv", strict=True):
        x.requires_grad_(name not in frozen)
    one_product = 2 * 2 * 4 * (3 * 64) * (2 * 64) * 32
    with FlopCounterMode(display=False) as counter:
        out, _ = op(*args)
        assert counter.get_total_flops() == 2 * one_product
        out.sum().backward()
    counts = counter.get_flop_counts()["Global"]
    assert counts[torch.ops.vsa.attention] == 2 * one_product
    assert counts[torch.ops.vsa.attention_backward] == products * one_product
    assert counter.get_total_flops() == (2 + products) * one_product


def test_flops_of_the_layouts_are_none():
    for name in (*LAYOUTS, *COMBINE, "select_blocks", "transpose_blocks"):
        op, args, kwargs = call(name)
        with FlopCounterMode(display=False) as counter:
            op(*args, **kwargs)
        assert counter.get_total_flops() == 0, name


@pytest.mark.parametrize("name", [*DIFFERENTIABLE, "gated_combine_backward", "attention_backward"])
def test_forward_mode_is_refused(name):
    op, args, _ = call(name)
    flat, spec = pytree.tree_flatten(args)

    def first(x):
        return pytree.tree_leaves(op(*pytree.tree_unflatten([x, *flat[1:]], spec)))[0]

    with pytest.raises(RuntimeError, match=f"vsa::{name}: got a tensor with a tangent"):
        torch.func.jvp(first, (flat[0],), (flat[0],))
    with torch.autograd.forward_ad.dual_level(), pytest.raises(RuntimeError, match="allowed: reverse-mode"):
        first(torch.autograd.forward_ad.make_dual(flat[0], flat[0]))
    assert torch.equal(first(flat[0]), first(flat[0])), "without a tangent nothing is refused"


# Of the operators around a native backward, their arguments from those of `attention_backward`.
AROUND_BACKWARD = {
    "prepare_backward": lambda dout, dlse, q, k, v, out, *rest: (dout, dlse, q, out),
    "finish_dq": lambda dout, *rest: (dout, 0.5),
    "work_order": lambda *args: (args[10], 2, 8, False),
}


@pytest.mark.parametrize("name", sorted(torch.ops.vsa))
def test_vmap_is_a_loop_or_refused(name):
    """Every operator there is, whoever defined it: folded only if the batch dimension of every tensor comes first."""
    if name.removesuffix("_sm100") in AROUND_BACKWARD:
        _, args, _ = call("attention_backward")
        args = AROUND_BACKWARD[name.removesuffix("_sm100")](*args)
    elif re.fullmatch(r"attention_backward_sm\d+_eager", name):  # the logical operator without its backend
        _, args, _ = call("attention_backward")
        args = (*args[:15], *args[16:])
    else:  # the native operators have the arguments of eager
        _, args, _ = call(re.sub(r"^(attention(_backward)?)_(?!backward)\w+", r"\1_eager", name))
    op = getattr(torch.ops.vsa, name).default
    is_table = [argument.name in TABLES for argument in op._schema.arguments]

    def run(*tensors):
        rest = iter(tensors)
        return op(
            *(
                x if table else pytree.tree_map_only(Tensor, lambda _: next(rest), x)
                for x, table in zip(args, is_table, strict=True)
            )
        )

    mapped = pytree.tree_leaves([x for x, table in zip(args, is_table, strict=True) if not table])
    tensors = [x for x in mapped if isinstance(x, Tensor)]
    # Valid and different inputs: one has its batch the other way round. Three, for a batch of two.
    flipped = [x.flip(0) if x.dim() else x for x in tensors]
    samples = (tensors, flipped, tensors)
    stacked = [torch.stack(each) for each in zip(*samples, strict=True)]
    if name not in (*LOGICAL, "tile_sums", "tile_sums_backward"):
        with pytest.raises(RuntimeError, match=f"vsa::{name} does not support torch.func.vmap: call it in a loop"):
            torch.func.vmap(run)(*stacked)
        return
    outputs = pytree.tree_leaves(torch.func.vmap(run)(*stacked))
    for i, one in enumerate(samples):
        torch.testing.assert_close([x[i] for x in outputs], pytree.tree_leaves(run(*one)))


def test_every_operator_says_that_it_is_compliant():
    names = [*LOGICAL, *(template.format(backend) for template in NATIVE for backend in ("eager", "triton"))]
    for name in names:
        op = getattr(torch.ops.vsa, name.removesuffix(".out"))
        assert torch.Tag.pt2_compliant_tag in (op.out if name.endswith(".out") else op.default).tags, name
    for name in ("tile", "untile", "gated_combine"):
        assert torch.Tag.pointwise in getattr(torch.ops.vsa, name).default.tags
    for name in ("attention", "attention_backward"):
        assert torch.Tag.needs_exact_strides in getattr(torch.ops.vsa, name).default.tags


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("device, backend", BACKENDS)
def test_out_forms_equal_the_functional_ones(device, backend, view):
    for name in (f"attention_{backend}", f"attention_backward_{backend}"):
        op, args, _ = call(name, view, device, backend)
        outputs = op(*args)
        names = [a.name for a in getattr(torch.ops.vsa, name).out._schema.arguments if a.kwarg_only]
        # What stood in the buffers must not show.
        into = [torch.full_like(x, float("nan")) for x in outputs]
        getattr(torch.ops.vsa, name).out(*args, **dict(zip(names, into, strict=True)))
        assert all(torch.equal(a, b) for a, b in zip(outputs, into, strict=True))


def test_native_operators_are_those_of_the_backends():
    for name in ("eager", "triton"):
        backend = backend_named(name)
        assert backend.forward_op is getattr(torch.ops.vsa, f"attention_{name}").default
        assert backend.backward_op is getattr(torch.ops.vsa, f"attention_backward_{name}").default
