"""`torch.func`, second derivatives, meta tensors and fake mode: right, or refused in a sentence."""

from __future__ import annotations

import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from problems import random_problem
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.func import functional_call, functionalize, grad, hessian, jacrev, jvp, vjp, vmap

import vsa_inductor as vsa
from vsa_inductor.ops import _functorch_compat

LAYOUT = vsa.TileLayout.from_video_shape(5, 4, 4)
SHAPE = (1, LAYOUT.num_tokens, 2, 16)
NO_TANGENT = r"vsa::\w+: got a tensor with a tangent .*allowed: reverse-mode"
NO_SECOND = "a gradient of a gradient was asked for; allowed: first derivatives"


def operands(*batch: int, requires_grad: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(*batch, *SHAPE, generator=generator, requires_grad=requires_grad) for _ in range(3))
    return q, k, v


def attend(q: Tensor, k: Tensor, v: Tensor, gate: Any = None) -> Tensor:
    out = vsa.video_sparse_attention(q, k, v, LAYOUT, sparsity=0.5, gate=gate)
    assert isinstance(out, Tensor)
    return out


def loss(q: Tensor, k: Tensor, v: Tensor, gate: Any = None) -> Tensor:
    return attend(q, k, v, gate).square().sum()


def eager_gradients(*args: Tensor, of: Callable[..., Tensor] = loss) -> tuple[Tensor, ...]:
    leaves = [x.detach().requires_grad_() for x in args]
    return torch.autograd.grad(of(*leaves), leaves)


@pytest.mark.parametrize("gated", [False, True], ids=["no_gate", "gate"])
def test_func_grad(gated: bool) -> None:
    args = (*operands(), *([torch.rand(SHAPE)] if gated else []))
    for got, expected in zip(grad(loss, argnums=tuple(range(len(args))))(*args), eager_gradients(*args), strict=True):
        assert torch.equal(got, expected)


def test_func_grad_of_the_gate_alone() -> None:
    """Nothing in front of the attention needs a gradient, so it gives no lse."""
    q, k, v = operands()
    gate = torch.rand(SHAPE, requires_grad=True)
    got = grad(lambda gate: loss(q, k, v, gate))(gate.detach())
    assert torch.equal(got, torch.autograd.grad(loss(q, k, v, gate), gate)[0])


def test_vjp_keeps_its_result_after_the_transform() -> None:
    q, k, v = operands()
    out, pull = vjp(attend, q, k, v)
    for got, expected in zip(pull(2 * out), eager_gradients(q, k, v), strict=True):
        torch.testing.assert_close(got, expected)


def test_jacrev_is_one_vjp_per_output() -> None:
    q, k, v = operands()
    rows = jacrev(lambda v: attend(q, k, v)[0, :3, 0, 0])(v)
    leaf = v.clone().requires_grad_()
    for i in range(3):
        torch.testing.assert_close(rows[i], torch.autograd.grad(attend(q, k, leaf)[0, i, 0, 0], leaf)[0])


def test_per_sample_gradients_of_a_module() -> None:
    """vmap over grad, with the parameters shared: what differential privacy and influence functions are made of."""
    linear = torch.nn.Linear(16, 16)
    parameters = dict(linear.named_parameters())
    q, k, v = operands(3)

    def sample(parameters: dict[str, Tensor], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return loss(functional_call(linear, parameters, (q,)), k, v, 1.0)

    each = vmap(grad(sample), in_dims=(None, 0, 0, 0))(parameters, q, k, v)
    for i in range(3):
        (expected,) = torch.autograd.grad(loss(linear(q[i]), k[i], v[i], 1.0), linear.weight)
        torch.testing.assert_close(each["weight"][i], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("gate", [None, 1.0])
@pytest.mark.parametrize("in_dims", [(0, 0, 0), (2, None, 0), (None, 1, None), (-1, 0, None)], ids=str)
def test_vmap(in_dims: tuple[int | None, ...], gate: float | None) -> None:
    args = [x if dim is None else torch.stack([x, -x, 2 * x], dim) for x, dim in zip(operands(), in_dims, strict=True)]
    out = vmap(lambda q, k, v: attend(q, k, v, gate), in_dims=in_dims)(*args)
    for i in range(3):
        one = [x if dim is None else x.select(dim, i) for x, dim in zip(args, in_dims, strict=True)]
        torch.testing.assert_close(out[i], attend(*one, gate))


@pytest.mark.parametrize("gate", [None, 1.0])
def test_vmap_over_nothing(gate: float | None) -> None:
    """The sizes of a result without elements do not say how large the batch inside vmap was."""
    q, k, v = (torch.empty(0, 2, *SHAPE[1:]) for _ in range(3))
    assert vmap(lambda q, k, v: attend(q, k, v, gate))(q, k, v).shape == q.shape
    assert (
        vmap(grad(loss), in_dims=(0, None, None))(q, k.new_ones(q.shape[1:]), v.new_ones(q.shape[1:])).shape == q.shape
    )


def test_vmap_gradients_of_what_is_mapped_and_what_is_shared() -> None:
    q, k, v = operands(requires_grad=True)
    weights = torch.tensor([1.0, -2.0])
    out = vmap(lambda w: attend(q * w, k, v, 1.0))(weights)
    got = torch.autograd.grad(out.square().sum(), (q, k, v))
    expected = torch.autograd.grad(sum(loss(q * w, k, v, 1.0) for w in weights), (q, k, v))
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_vmap_of_lists_and_lse() -> None:
    problem = random_problem(batch=2, counts="varying", sizes="ragged")

    def one(q: Tensor, ids: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        return vsa.block_sparse_attention(q, problem.k, problem.v, ids, counts, problem.kv_block_sizes, return_lse=True)  # type: ignore[return-value]

    qs, ids, counts = (torch.stack([x, x.flip(0)]) for x in (problem.q, problem.kv_indices, problem.kv_num_blocks))
    out, lse = vmap(one)(qs, ids, counts)
    for i in range(2):
        expected = one(qs[i], ids[i], counts[i])
        assert torch.equal(out[i], expected[0]) and torch.equal(lse[i], expected[1])


def test_vmap_over_a_layout_is_refused() -> None:
    problem = random_problem()
    sizes = torch.stack([problem.kv_block_sizes] * 2)
    with pytest.raises(RuntimeError, match=r"got kv_block_sizes mapped by torch\.func\.vmap; allowed: one"):
        vmap(lambda s: vsa.block_sparse_attention(*problem.operands, *problem.lists[:2], s))(sizes)


def test_vmap_over_flat_memory_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"vsa::norm_rope_tile does not support torch\.func\.vmap"):
        vmap(
            lambda x: torch.ops.vsa.norm_rope_tile(
                [x], [], [], LAYOUT.slot_token, [0] * 4, [], [], [], list(SHAPE), "none", "none", 0, 1.0, 0.0, 0
            )
        )(torch.randn(2, *SHAPE))


COMPILED = {
    "grad": lambda q, k, v: grad(loss)(q, k, v),
    "vjp": lambda q, k, v: vjp(attend, q, k, v)[1](q)[0],
    "vmap": lambda q, k, v: vmap(attend, in_dims=(0, None, None))(torch.stack([q, -q]), k, v),
    "vmap_grad": lambda q, k, v: vmap(grad(loss), in_dims=(0, None, None))(torch.stack([q, -q]), k, v),
}


@pytest.mark.parametrize("name", COMPILED)
def test_transforms_inside_compiled_code(name: str) -> None:
    fn = COMPILED[name]
    compiled = torch.compile(fn, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*operands()), fn(*operands()), rtol=1e-4, atol=1e-5)


def test_functionalize() -> None:
    assert torch.equal(functionalize(attend)(*operands()), attend(*operands()))


@pytest.mark.parametrize("place", range(3), ids=["q", "k", "v"])
@pytest.mark.parametrize("gate", [None, 1.0])
def test_forward_mode_is_refused(place: int, gate: float | None) -> None:
    args = list(operands())

    def of_one(x: Tensor) -> Tensor:
        return attend(*args[:place], x, *args[place + 1 :], gate)

    x = args[place]
    with pytest.raises(RuntimeError, match=NO_TANGENT):
        jvp(of_one, (x,), (x,))
    for requires_grad in (False, True):
        with forward_ad.dual_level(), pytest.raises(RuntimeError, match=NO_TANGENT):
            of_one(forward_ad.make_dual(x.detach().requires_grad_(requires_grad), x))
    with forward_ad.dual_level():
        assert torch.equal(of_one(x), attend(*args, gate)), "a level without a tangent refuses nothing"


def test_forward_mode_over_the_gate_and_the_lists_call_is_refused() -> None:
    problem, gate = random_problem(), torch.rand(SHAPE)
    with pytest.raises(RuntimeError, match=NO_TANGENT):
        jvp(lambda gate: attend(*operands(), gate), (gate,), (gate,))
    with pytest.raises(RuntimeError, match=NO_TANGENT):
        jvp(lambda v: vsa.block_sparse_attention(*problem.operands[:2], v, *problem.lists), (problem.v,), (problem.v,))


def test_forward_mode_inside_compiled_code_is_refused() -> None:
    q, k, v = operands()
    with pytest.raises(Exception, match=NO_TANGENT):
        torch.compile(lambda q: jvp(lambda q: attend(q, k, v), (q,), (q,))[1], fullgraph=True, backend="eager")(q)


SECOND = {
    "grad of grad": (lambda f: lambda x: grad(lambda x: grad(f)(x).sum())(x), NO_SECOND),
    "vjp of vjp": (lambda f: lambda x: vjp(lambda x: vjp(f, x)[1](torch.tensor(1.0))[0], x)[1](x), NO_SECOND),
    "jvp of grad": (lambda f: lambda x: jvp(grad(f), (x,), (x,)), NO_TANGENT),
    "hessian": (hessian, NO_TANGENT),
    "autograd.functional.hvp": (lambda f: lambda x: torch.autograd.functional.hvp(f, x, x), NO_SECOND),
}


@pytest.mark.parametrize("gate", [None, 1.0])
@pytest.mark.parametrize("name", SECOND)
def test_second_derivatives_are_refused(name: str, gate: float | None) -> None:
    """Never a zero: recorded level by level, a second level must not lose what the first one did."""
    q, k, v = operands()
    transform, sentence = SECOND[name]
    with pytest.raises(RuntimeError, match=sentence):
        transform(lambda q: loss(q, k, v, gate))(q)


def test_second_derivatives_of_the_layouts_are_right() -> None:
    """tile and untile are linear: the second derivative of the square of a tile is 2 everywhere."""
    x = operands()[0]
    tables = (LAYOUT.token_slot, LAYOUT.slot_token)

    def cubed(x: Tensor) -> Tensor:
        return torch.ops.vsa.untile(torch.ops.vsa.tile(x, *tables).pow(3), *tables).sum()

    torch.testing.assert_close(grad(lambda x: grad(cubed)(x).sum())(x), 6 * x)
    leaf = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(cubed(leaf), leaf, create_graph=True)
    torch.testing.assert_close(torch.autograd.grad(first.sum(), leaf)[0], 6 * x)


@pytest.mark.parametrize("backend", [None, "aot_eager"], ids=["eager", "compiled"])
def test_create_graph_alone_works(backend: str | None) -> None:
    q, k, v = operands(requires_grad=True)
    fn = attend if backend is None else torch.compile(attend, fullgraph=True, backend=backend)
    (dq,) = torch.autograd.grad(fn(q, k, v).square().sum(), q, create_graph=True)
    torch.testing.assert_close(dq.detach(), eager_gradients(q, k, v)[0])
    sentence = NO_SECOND if backend is None else "does not currently support double backward"
    with pytest.raises(RuntimeError, match=sentence):
        torch.autograd.grad(dq.sum(), q)


def described(x: Tensor) -> tuple[Any, ...]:
    return x.shape, x.stride(), x.dtype


def step(layout: vsa.TileLayout, make: Callable[..., Tensor], gate: float | None, needs_grad: bool) -> list[Tensor]:
    """out, lse and gradients of a call on a batch of 2."""
    args = [make(2, *SHAPE[1:], dtype=torch.bfloat16, requires_grad=needs_grad) for _ in range(3)]
    out, lse = vsa.video_sparse_attention(*args, layout, sparsity=0.5, gate=gate, return_lse=True)
    grads = torch.autograd.grad((out.sum(), lse.sum()), args) if needs_grad else ()
    return [out, lse, *grads]


@pytest.mark.parametrize("needs_grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("gate", [None, 1.0])
@pytest.mark.parametrize("where", ["meta", "fake"])
def test_meta_and_fake_tensors(where: str, gate: float | None, needs_grad: bool) -> None:
    expected = [described(x) for x in step(LAYOUT, torch.randn, gate, needs_grad)]
    if where == "meta":
        shape_only = step(LAYOUT.to("meta"), lambda *a, **k: torch.empty(*a, device="meta", **k), gate, needs_grad)
    else:
        with FakeTensorMode():
            layout = vsa.TileLayout.from_video_shape(*LAYOUT.video_shape)
            shape_only = step(layout, torch.empty, gate, needs_grad)
    assert [described(x) for x in shape_only] == expected


def test_a_layout_on_another_device_than_meta_is_named() -> None:
    with pytest.raises(vsa.ArgumentError, match="tables on cpu; allowed: tables on the device of q, meta"):
        vsa.video_sparse_attention(*(x.to("meta") for x in operands()), LAYOUT)


def test_sparsify_a_model_on_meta() -> None:
    pytest.importorskip("diffusers", reason="diffusers is not installed")
    from test_diffusers_wan import forward, make_inputs, make_model

    with torch.device("meta"):
        model = make_model(num_layers=1).train()
    vsa.sparsify(model, sparsity=0.5, gate="learned")
    assert model.blocks[0].attn1.to_gate_compress.weight.is_meta
    latents = tuple(x.to("meta") for x in make_inputs((5, 8, 8)))
    out = forward(model, latents)
    out.mean().backward()
    assert out.is_meta and out.shape == latents[0].shape
    assert model.blocks[0].attn1.to_q.weight.grad.shape == model.blocks[0].attn1.to_q.weight.shape


# What records a gradient formula for one level; where one is missing, nothing is recorded.
LEVELS = (
    "_C._are_functorch_transforms_active",
    "_C._functorch.get_single_level_autograd_function_allowed",
    "_C._functorch.set_single_level_autograd_function_allowed",
    "_C._AutoDispatchBelowAutograd",
    "autograd.function._SingleLevelFunction",
    "autograd.forward_ad._set_fwd_grad_enabled",
)


@pytest.mark.parametrize("name", LEVELS)
def test_one_missing_private_name_is_enough(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file = _functorch_compat.__file__
    assert runpy.run_path(file)["FOUND"]
    monkeypatch.delattr(f"torch.{name}")
    assert not runpy.run_path(file)["FOUND"]


def test_without_the_dual_level_tangents_are_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not _functorch_compat.may_have_tangents()
    monkeypatch.delattr(forward_ad, "_current_level")
    assert _functorch_compat.may_have_tangents()


WITHOUT_PRIVATE_NAMES = """
import operator, sys
import torch._dynamo  # reads one of them as it is imported
places = [(operator.attrgetter(place)(torch), name) for place, _, name in (x.rpartition(".") for x in sys.argv[1:])]
values = [getattr(*place) for place in places]
for place in places:
    delattr(*place)
import vsa_inductor
# torch itself needs them.
for place, value in zip(places, values):
    setattr(*place, value)

from test_transforms import attend, eager_gradients, loss, operands
assert not vsa_inductor.ops._functorch_compat.FOUND
torch.save((attend(*operands()), eager_gradients(*operands())), "plain.pt")
try:
    torch.func.grad(loss)(*operands())
except RuntimeError as error:
    print(error)
"""


def test_a_torch_without_the_private_names(tmp_path: Path) -> None:
    """The package imports, plain calls and gradients are the same, and torch's refusal of torch.func remains."""
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n{WITHOUT_PRIVATE_NAMES}"
    result = subprocess.run(
        [sys.executable, "-c", code, *LEVELS], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "setup_context" in result.stdout, "torch.func.grad: " + result.stdout
    out, gradients = torch.load(tmp_path / "plain.pt")
    assert torch.equal(out, attend(*operands()))
    assert all(torch.equal(a, b) for a, b in zip(gradients, eager_gradients(*operands()), strict=True))


@pytest.mark.parametrize("gate", [None, 1.0], ids=["no gate", "gate"])
def test_gradient_through_vmap(gate: float | None) -> None:
    """Inside vmap a tensor does not tell that a gradient is wanted around it."""
    layout = vsa.TileLayout.from_video_shape(4, 4, 8)
    x = torch.randn(3, 1, layout.num_tokens, 1, 16)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return vsa.video_sparse_attention(x, x, x, layout, sparsity=0.5, gate=gate).square().sum()

    expected = torch.stack([torch.func.grad(loss)(part) for part in x])
    around = torch.func.grad(lambda x: torch.func.vmap(loss)(x).sum())(x)
    leaf = x.clone().requires_grad_()
    torch.func.vmap(loss)(leaf).sum().backward()
    for got in (around, leaf.grad):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
