"""Sums over the slots of a block: the operator, its gradients, what it refuses, and the means made of them."""

from __future__ import annotations

import pytest
import torch
from problems import DEVICES, VIEWS, operand

from vsa_inductor import ArgumentError
from vsa_inductor.selection import tile_means

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def tiles(view="contiguous", block_size=64, device="cpu", dtype=torch.float32):
    return operand((2, 3, 4 * block_size, 16), view, dtype, device)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("block_size", [64, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_equals_plain_torch(dtype, block_size, view, device):
    x = tiles(view, block_size, device, dtype)
    sums = torch.ops.vsa.tile_sums(x, block_size)
    assert sums.dtype == torch.promote_types(dtype, torch.float32) and sums.is_contiguous()
    expected = x.double().unflatten(2, (-1, block_size)).sum(3)
    torch.testing.assert_close(sums.double(), expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_gradient_is_the_row_of_the_block_in_the_dtype_of_x(dtype, device):
    x = tiles(device=device, dtype=dtype).detach().requires_grad_()
    sums = torch.ops.vsa.tile_sums(x, 64)
    dsums = torch.randn_like(sums)
    (dx,) = torch.autograd.grad(sums, x, dsums)
    assert dx.dtype == dtype
    assert torch.equal(dx, dsums.to(dtype).repeat_interleave(64, 2))


def test_second_derivative():
    x = torch.randn(1, 1, 64, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: torch.ops.vsa.tile_sums(x, 64).square(), x)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("device", DEVICES)
def test_opcheck(view, device):
    x = tiles(view, device=device).detach().requires_grad_()
    results = torch.library.opcheck(torch.ops.vsa.tile_sums.default, (x, 64))
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("device", DEVICES)
def test_means_are_sums_over_the_number_of_real_tokens(device):
    x = tiles(device=device)
    sizes = torch.tensor([64, 1, 0, 17], dtype=torch.int32, device=device)
    means = tile_means(x, sizes, 64)
    expected = torch.ops.vsa.tile_sums(x, 64) / torch.tensor([64.0, 1.0, 1.0, 17.0], device=device)[:, None]
    torch.testing.assert_close(means, expected)


@pytest.mark.parametrize(
    "x, block_size, argument",
    [
        (torch.zeros(3, 64, 8), 64, "x"),
        (torch.zeros(1, 1, 64, 8, dtype=torch.int32), 64, "x"),
        (torch.zeros(1, 1, 64, 8), 32, "block_size"),
        (torch.zeros(1, 1, 64, 8), 0, "block_size"),
        (torch.zeros(1, 1, 96, 8), 64, "x.shape[2]"),
    ],
    ids=["three dimensions", "integers", "other blocks", "no blocks", "a part of a block"],
)
def test_refuses(x, block_size, argument):
    for device in ("cpu", "meta"):
        with pytest.raises(ArgumentError) as caught:
            torch.ops.vsa.tile_sums(x.to(device), block_size)
        assert caught.value.argument == argument
