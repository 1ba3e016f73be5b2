"""Bad input to the public calls: an error that names the argument, what was given and what is allowed; no launch."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest
import torch
from problems import random_problem

import vsa_inductor as vsa

LAYOUT = vsa.TileLayout.from_video_shape(3, 5, 6)
S = LAYOUT.num_tokens


def raster(B=1, tokens=S, H=4, D=16, dtype=torch.float32, device="cpu"):
    return torch.zeros(B, tokens, H, D, dtype=dtype, device=device)


def video_arguments(**changes: Any) -> dict[str, Any]:
    return {"q": raster(), "k": raster(), "v": raster(), "layout": LAYOUT, **changes}


def block_arguments(**changes: Any) -> dict[str, Any]:
    problem = random_problem(heads=4, kv_heads=2, num_q=3, num_kv=4, width=3, head_dim=16)
    names = ("q", "k", "v", "kv_indices", "kv_num_blocks", "kv_block_sizes")
    return dict(zip(names, (*problem.operands, *problem.lists), strict=True)) | changes


def tiles(H=2, slots=256, D=16, B=1, dtype=torch.float32):
    return torch.zeros(B, H, slots, D, dtype=dtype)


def ints(*shape, dtype=torch.int32, device="cpu"):
    return torch.zeros(shape, dtype=dtype, device=device)


ALL_DTYPES = "(torch.bfloat16, torch.float16, torch.float32, torch.float64)"

# name -> (changed arguments, argument named, what was given, what is allowed)
VIDEO = {
    "integers": ({"q": raster(dtype=torch.int32)}, "q", "torch.int32", ALL_DTYPES),
    "complex": ({"v": raster(dtype=torch.complex64)}, "v", "torch.complex64", ALL_DTYPES),
    "mixed dtypes": ({"k": raster(dtype=torch.float16)}, "k", "torch.float16", "the dtype of q, torch.float32"),
    "mixed dtypes of v": ({"v": raster(dtype=torch.bfloat16)}, "v", "torch.bfloat16", "the dtype of q, torch.float32"),
    "rank": ({"q": raster()[0]}, "q", "3 dimensions", "[B, S, H, D]"),
    "rank of v": ({"v": raster()[None]}, "v", "5 dimensions", "[B, S, H, D]"),
    "sequence": ({"q": raster(tokens=80)}, "q.shape[1]", "80", "tokens of the layout, 90"),
    "sequence of k": ({"k": raster(tokens=91)}, "k.shape[1]", "91", "tokens of the layout, 90"),
    "layout elsewhere": ({"layout": LAYOUT.to("meta")}, "layout", "tables on meta", "the device of q, cpu"),
    "k elsewhere": ({"k": raster(device="meta")}, "k", "device meta", "the device of q, cpu"),
    "batch": ({"k": raster(B=2), "v": raster(B=2)}, "k.shape[0]", "2", "the batch of q, 1"),
    "head dim": ({"k": raster(D=32)}, "k.shape[3]", "32", "the head dim of q, 16"),
    "head dim of v": ({"v": raster(D=32)}, "v.shape[3]", "32", "the head dim of q, 16"),
    "heads": ({"k": raster(H=3), "v": raster(H=3)}, "k.shape[", "3", "a divisor of the heads of q, 4"),
    "heads of v": ({"v": raster(H=2)}, "v.shape[", "2", "the heads of k, 4"),
    "sparsity above 1": ({"sparsity": 1.5}, "sparsity", "1.5", "0 <= sparsity <= 1"),
    "sparsity below 0": ({"sparsity": -0.1}, "sparsity", "-0.1", "0 <= sparsity <= 1"),
    "sparsity NaN": ({"sparsity": math.nan}, "sparsity", "nan", "0 <= sparsity <= 1"),
    "sm_scale 0": ({"sm_scale": 0.0}, "sm_scale", "0.0", "a finite number > 0"),
    "sm_scale NaN": ({"sm_scale": math.nan}, "sm_scale", "nan", "a finite number > 0"),
    "sm_scale infinite": ({"sm_scale": math.inf}, "sm_scale", "inf", "a finite number > 0"),
    "rank of gate": (
        {"gate": torch.zeros(1, 1, 1, 1, 1)},
        "gate",
        "(1, 1, 1, 1, 1)",
        "broadcastable to [B, S, H_q, D]",
    ),
    "dtype of gate": ({"gate": torch.zeros(1, dtype=torch.bfloat16)}, "gate", "torch.bfloat16", "the dtype of q"),
    "complex gate": ({"gate": torch.zeros(1, dtype=torch.complex64)}, "gate", "torch.complex64", "the dtype of q"),
    "gate elsewhere": ({"gate": torch.zeros(1, device="meta")}, "gate", "device meta", "the device of q, cpu"),
    "gate in words": ({"gate": "learned"}, "gate", "learned", "None, a number or a tensor"),
    "no layout": ({"layout": None}, "layout", "NoneType", "a TileLayout"),
    "sparsity in words": ({"sparsity": "0.5"}, "sparsity", "0.5", "0 <= sparsity <= 1"),
    "shape of gate": (
        {"gate": torch.zeros(S + 1, 1, 1)},
        "gate",
        f"({S + 1}, 1, 1)",
        "broadcastable to [B, S, H_q, D]",
    ),
}
BLOCKS = {
    "integers": ({"q": tiles(4, 192, dtype=torch.int32)}, "q", "torch.int32", ALL_DTYPES),
    "mixed dtypes": ({"k": tiles(dtype=torch.bfloat16)}, "k", "torch.bfloat16", "the dtype of q, torch.float32"),
    "rank": ({"k": tiles()[0]}, "k", "3 dimensions", "[B, H, S_pad, D]"),
    "batch": ({"v": tiles(B=2)}, "v.shape[0]", "2", "the batch of q, 1"),
    "head dim": ({"k": tiles(D=32)}, "k.shape[3]", "32", "the head dim of q, 16"),
    "heads": ({"k": tiles(3), "v": tiles(3)}, "k.shape[1]", "3", "a divisor of the heads of q, 4"),
    "heads of v": ({"v": tiles(4)}, "v.shape[1]", "4", "the heads of k, 2"),
    "slots of v": ({"v": tiles(slots=192)}, "v.shape[2]", "192", "the slots of k, 256"),
    "half a block": ({"q": tiles(4, 200)}, "q.shape[2]", "200", "a multiple of block_size, 64"),
    "k elsewhere": ({"k": tiles().to("meta")}, "k", "device meta", "the device of q, cpu"),
    "block_size 96": ({"block_size": 96}, "block_size", "96", "64, 128 or 256"),
    "block_size 0": ({"block_size": 0}, "block_size", "0", "64, 128 or 256"),
    "int64 ids": ({"kv_indices": ints(1, 4, 3, 3, dtype=torch.int64)}, "kv_indices", "torch.int64", "torch.int32"),
    "float counts": ({"kv_num_blocks": torch.ones(1, 4, 3)}, "kv_num_blocks", "torch.float32", "torch.int32"),
    "rank of ids": ({"kv_indices": ints(1, 4, 3)}, "kv_indices", "3 dimensions", "[B, H, N_q, M]"),
    "rank of sizes": ({"kv_block_sizes": ints(1, 4)}, "kv_block_sizes", "2 dimensions", "[N_kv]"),
    "heads of ids": ({"kv_indices": ints(1, 2, 3, 3)}, "kv_indices.shape[1]", "2", "the heads of q, 4"),
    "batch of counts": ({"kv_num_blocks": ints(2, 4, 3)}, "kv_num_blocks.shape[0]", "2", "the batch of q, 1"),
    "rows of counts": ({"kv_num_blocks": ints(1, 4, 4)}, "kv_num_blocks.shape[2]", "4", "the number of q blocks, 3"),
    "number of sizes": ({"kv_block_sizes": ints(5)}, "kv_block_sizes.shape[0]", "5", "the number of kv blocks, 4"),
    "ids elsewhere": (
        {"kv_indices": ints(1, 4, 3, 3, device="meta")}, "kv_indices", "device meta", "the device of q, cpu"
    ),
    "sm_scale 0": ({"sm_scale": 0.0}, "sm_scale", "0.0", "a finite number > 0"),
    "sm_scale negative": ({"sm_scale": -1.0}, "sm_scale", "-1.0", "a finite number > 0"),
    "sm_scale NaN": ({"sm_scale": math.nan}, "sm_scale", "nan", "a finite number > 0"),
    "sm_scale infinite": ({"sm_scale": math.inf}, "sm_scale", "inf", "a finite number > 0"),
}  # fmt: skip
CASES = [
    pytest.param(function, arguments(**changes), *named, id=f"{function.__name__}: {name}")
    for function, arguments, cases in (
        (vsa.video_sparse_attention, video_arguments, VIDEO),
        (vsa.block_sparse_attention, block_arguments, BLOCKS),
    )
    for name, (changes, *named) in cases.items()
]


class Launches(torch.utils._python_dispatch.TorchDispatchMode):
    """The operators of ours that ran to their end. They check their arguments before they launch anything."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.namespace == "vsa":
            self.names.append(str(func))
        return result


def assert_names(error: vsa.ArgumentError, argument: str, given: str, allowed: str) -> None:
    assert error.argument.startswith(argument)
    assert given in str(error.given) and allowed in error.allowed
    assert str(error) == f"{error.argument}: got {error.given}; allowed: {error.allowed}"


def test_the_cases_are_changes_of_calls_that_work():
    assert vsa.video_sparse_attention(**video_arguments()).shape == (1, S, 4, 16)
    assert vsa.block_sparse_attention(**block_arguments()).shape == (1, 4, 192, 16)


@pytest.mark.parametrize("needs_grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("function, arguments, argument, given, allowed", CASES)
def test_eager(function, arguments, argument, given, allowed, needs_grad):
    if needs_grad:
        arguments = {
            name: x.clone().requires_grad_() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
            for name, x in arguments.items()
        }
    with Launches() as launches, pytest.raises(vsa.ArgumentError) as caught:
        function(**arguments)
    assert_names(caught.value, argument, given, allowed)
    assert launches.names == []


def told(error: BaseException) -> str:
    """Everything an error and its causes say."""
    chain: list[str] = []
    link: BaseException | None = error
    while link is not None:
        chain.append(f"{type(link).__name__}: {link}")
        link = link.__cause__ or link.__context__
    return "\n".join(chain)


@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.parametrize("function, arguments, argument, given, allowed", CASES)
def test_compiled(function, arguments, argument, given, allowed, fullgraph):
    """Dynamo may wrap the error of a traced function; what it says has to survive."""
    torch._dynamo.reset()
    compiled = torch.compile(lambda: function(**arguments), backend="eager", fullgraph=fullgraph)
    with pytest.raises(Exception) as caught:
        compiled()
    if isinstance(caught.value, vsa.ArgumentError):
        assert_names(caught.value, argument, given, allowed)
    else:
        text = told(caught.value)
        assert "ArgumentError" in text
        assert argument in text and given in text and allowed in text, text


def with_entry(tensor, index, value):
    changed = tensor.clone()
    changed[index] = value
    return changed


LISTS = random_problem(heads=4, kv_heads=2, num_q=3, num_kv=4, width=3, head_dim=16, counts=2).lists
IN_DEBUG_MODE = {
    "negative id": ("kv_indices", with_entry(LISTS[0], (0, 0, 0, 1), -1), "-1", "0 <= id < N_kv = 4"),
    "id too large": ("kv_indices", with_entry(LISTS[0], (0, 3, 2, 0), 4), "4", "0 <= id < N_kv = 4"),
    "id far too large": ("kv_indices", with_entry(LISTS[0], (0, 3, 2, 0), 1 << 30), "1073741824", "0 <= id < N_kv = 4"),
    "id twice": (
        "kv_indices", with_entry(LISTS[0], (0, 1, 1), torch.tensor([2, 2, -1], dtype=torch.int32)), "2", "distinct ids"
    ),
    "negative count": ("kv_num_blocks", with_entry(LISTS[1], (0, 2, 1), -3), "-3", "0 <= count <= M = 3"),
    "count too large": ("kv_num_blocks", with_entry(LISTS[1], (0, 0, 0), 4), "4", "0 <= count <= M = 3"),
    "negative size": ("kv_block_sizes", with_entry(LISTS[2], 1, -1), "-1", "0 <= size <= block_size = 64"),
    "size too large": ("kv_block_sizes", with_entry(LISTS[2], 3, 65), "65", "0 <= size <= block_size = 64"),
}  # fmt: skip


def lists_with(name, value):
    return dict(zip(("kv_indices", "kv_num_blocks", "kv_block_sizes"), LISTS, strict=True)) | {name: value}


@pytest.mark.parametrize("case", IN_DEBUG_MODE)
def test_values_in_debug_mode(case):
    name, value, given, allowed = IN_DEBUG_MODE[case]
    with vsa.options(debug=True), Launches() as launches, pytest.raises(vsa.ArgumentError) as caught:
        vsa.block_sparse_attention(**block_arguments(**lists_with(name, value)))
    assert_names(caught.value, name, given, allowed)
    assert launches.names == []


def test_an_id_twice_in_debug_mode_need_not_be_side_by_side():
    ids = torch.tensor([2, 0, 2], dtype=torch.int32).expand_as(LISTS[0])
    with vsa.options(debug=True), pytest.raises(vsa.ArgumentError) as caught:
        vsa.block_sparse_attention(**block_arguments(kv_indices=ids, kv_num_blocks=torch.full_like(LISTS[1], 3)))
    assert caught.value.argument == "kv_indices"


@pytest.mark.parametrize("case", IN_DEBUG_MODE)
def test_values_in_debug_mode_compiled(case):
    """A compiled graph cannot raise a typed error; it asserts on the device, with the same sentence."""
    name, value, _, allowed = IN_DEBUG_MODE[case]
    torch._dynamo.reset()
    problem = random_problem(heads=4, kv_heads=2, num_q=3, num_kv=4, width=3, head_dim=16)
    compiled = torch.compile(vsa.block_sparse_attention, backend="aot_eager", fullgraph=True)
    with vsa.options(debug=True):
        good = compiled(*problem.operands, *LISTS)
        assert torch.equal(good, vsa.block_sparse_attention(*problem.operands, *LISTS))
        with pytest.raises(RuntimeError, match=f"{name}: allowed: .*{allowed}"):
            compiled(*problem.operands, *lists_with(name, value).values())


@pytest.mark.parametrize("tail", [-1, 7, 1 << 30])
def test_what_stands_past_a_count_is_not_checked(tail):
    ids = LISTS[0].clone()
    ids[..., 2:] = tail
    with vsa.options(debug=True):
        assert vsa.block_sparse_attention(**block_arguments(**lists_with("kv_indices", ids))).isfinite().all()


def test_debug_mode_passes_a_whole_video():
    with vsa.options(debug=True):
        assert vsa.video_sparse_attention(**video_arguments(sparsity=0.5)).shape == (1, S, 4, 16)


def test_the_error_is_a_value_error_that_travels():
    error = vsa.ArgumentError("q", 3, "4")
    assert isinstance(error, ValueError)
    other = pickle.loads(pickle.dumps(error))
    assert type(other) is vsa.ArgumentError and str(other) == str(error) == "q: got 3; allowed: 4"
    assert (other.argument, other.given, other.allowed) == ("q", 3, "4")
