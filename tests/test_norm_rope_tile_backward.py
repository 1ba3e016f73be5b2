"""`vsa::norm_rope_tile_backward`: against autograd through plain torch; its kernel against the reference.

`TRITON_INTERPRET=1 python tests/test_norm_rope_tile_backward.py` runs the kernel on CPU tensors.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from problems import DEVICES
from torch import Tensor

import vsa_inductor as vsa
from vsa_inductor import reference

EPS = 1e-6
OP = torch.ops.vsa.norm_rope_tile_backward.default
BLOCK = 64
NORMS = ("all", "head", "none")
ROTATIONS = ("interleaved", "half", "none")


def arguments(
    norm: str = "all",
    rotation: str = "interleaved",
    *,
    shape: tuple[int, int, int] = (3, 5, 6),
    heads: int = 3,
    dim: int = 32,
    dtype: torch.dtype = torch.float32,
    weight_dtype: torch.dtype | None = torch.float32,
    sums: bool = True,
    tables: str = "wan",
    needs_dx: bool = True,
    needs_dweight: bool = True,
    device: str = "cpu",
) -> list:
    """Arguments of the operator. x: amid a fused qkv. tables: "wan" (every value twice), "halved", "heads"."""
    g = torch.Generator().manual_seed(0)
    wide = torch.promote_types(dtype, torch.float32)

    def randn(*size: int, dtype: torch.dtype = wide) -> Tensor:
        return torch.randn(*size, generator=g, dtype=torch.float64).to(device, dtype)

    layout = vsa.TileLayout.from_video_shape(*shape, device=device)
    B, S, H, D = 2, layout.num_tokens, heads, dim
    dtiled = randn(B, H, layout.num_slots, D, dtype=dtype)
    dtile_sums = randn(B, H, layout.num_blocks, D) if sums else None
    factors, table_index, signs = [], [], []
    if rotation != "none":
        signs = [1.0, 0.5, -2.0, 1.0]
        if tables == "wan":
            cos, sin = (randn(S, D // 2).repeat_interleave(2, -1) for _ in range(2))
            factors = [cos, sin, sin, cos]
            table_index = [value for offset in (0, 1, 1, 0) for value in (0, D, 0, 2, offset)]
        elif tables == "halved":
            cos, sin = (randn(S, D // 2) for _ in range(2))
            factors = [cos, sin, sin, cos]
            table_index = [0, D // 2, 0, 1, 0] * 4
        else:
            factors = [randn(B, S, H, D // 2) for _ in range(4)]
            table_index = [S * H * D // 2, H * D // 2, D // 2, 1, 0] * 4
    x = rstd = weight = None
    x_index, rstd_index, weight_index = [], [], []
    if norm != "none":
        x = randn(B, S, 3, H, D, dtype=dtype)
        x_index = [S * 3 * H * D, 3 * H * D, D, H * D]
        axes = (3,) if norm == "head" else (2, 3)
        rstd = torch.rsqrt(x[:, :, 1].to(wide).square().mean(axes) + EPS)
        rstd_index = [S * H, H, 1, 0] if norm == "head" else [S, 1, 0, 0]
        if weight_dtype is not None:
            weight = randn(D if norm == "head" else H * D, dtype=weight_dtype)
        weight_index = [0 if norm == "head" else D, 0]
    return [
        dtiled, dtile_sums, x, rstd, weight, factors, layout.slot_token, x_index, rstd_index, weight_index,
        table_index, signs, [B, S, H, D], rotation, norm, float(D if norm == "head" else H * D), BLOCK,
        needs_dx, needs_dweight and norm != "none",
    ]  # fmt: skip


def by_autograd(args: list) -> tuple[Tensor, Tensor | None]:
    """dx, dweight of what `vsa::norm_rope_tile` computes, written down the plain way."""
    dtiled, dtile_sums, x, _, weight, tables, slot_token, *_ = args
    _, S, H, D = args[12]
    rotation, norm = args[13:15]
    token_slot = torch.empty(S, dtype=torch.long, device=slot_token.device)
    token_slot[slot_token[slot_token >= 0].long()] = (slot_token >= 0).nonzero()[:, 0]
    row = torch.zeros(args[12], dtype=dtiled.dtype, device=dtiled.device) if x is None else x[:, :, 1].clone()
    row.requires_grad_()
    full = torch.ones(H, D, dtype=row.dtype, device=row.device)
    if weight is not None:
        full = weight.view(-1, D).expand(H, D).clone()
    full.requires_grad_()
    y = row
    if norm != "none":
        y = y * torch.rsqrt(y.square().mean((3,) if norm == "head" else (2, 3), keepdim=True) + EPS) * full
    if rotation != "none":
        # (a, b) turned by the transposed matrix of what the backward multiplies by.
        m = [
            sign * table.flatten()[offset::stride].view(S, 1, D // 2)
            for table, sign, stride, offset in zip(tables, args[11], args[10][3::5], args[10][4::5], strict=True)
        ]
        a, b = (y[..., 0::2], y[..., 1::2]) if rotation == "interleaved" else y.chunk(2, -1)
        turned = (a * m[0] + b * m[2], a * m[1] + b * m[3])
        y = torch.stack(turned, -1).flatten(-2) if rotation == "interleaved" else torch.cat(turned, -1)
    y = y.transpose(1, 2)
    loss = (y * dtiled[:, :, token_slot]).sum()
    if dtile_sums is not None:
        loss = loss + (y * dtile_sums[:, :, token_slot // BLOCK]).sum()
    grads = torch.autograd.grad(loss, (row, full), allow_unused=True)
    return grads[0], grads[1]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sums", [True, False], ids=["sums", "no sums"])
@pytest.mark.parametrize("weighted", [True, False], ids=["weight", "no weight"])
@pytest.mark.parametrize("rotation", ROTATIONS)
@pytest.mark.parametrize("norm", NORMS)
def test_equals_autograd(norm, rotation, weighted, sums, device):
    dtype = torch.float64 if device == "cpu" else torch.float32
    args = arguments(
        norm, rotation, dtype=dtype, weight_dtype=dtype if weighted else None, sums=sums, device=device
    )  # fmt: skip
    dx, dweight = OP(*args)
    expected_dx, expected_dweight = by_autograd(args)
    bars = {"atol": 1e-10, "rtol": 1e-10} if dtype == torch.float64 else {"atol": 1e-4, "rtol": 1e-4}
    torch.testing.assert_close(dx, expected_dx, **bars)
    if norm == "none":
        assert dweight.shape == (0,)
    else:
        torch.testing.assert_close(dweight, expected_dweight, **bars)


def test_empty_slots_are_not_read():
    args = arguments()
    expected = OP(*args)
    args[0] = args[0].masked_fill((args[6] < 0)[:, None], torch.nan)
    for value, right in zip(OP(*args), expected, strict=True):
        assert torch.equal(value, right)


@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True), (False, False)], ids=str)
@pytest.mark.parametrize("norm", NORMS)
def test_contract(norm, needs):
    args = arguments(norm, needs_dx=needs[0], needs_dweight=needs[1], dtype=torch.bfloat16)
    torch.library.opcheck(OP, tuple(args), test_utils=("test_schema", "test_faketensor"))
    dx, dweight = OP(*args)
    B, S, H, D = args[12]
    assert dx.shape == ((B, S, H, D) if needs[0] else (0,)) and dx.is_contiguous() and dx.dtype == torch.bfloat16
    assert dweight.shape == ((H, D) if args[-1] else (0,)) and dweight.dtype == torch.float32


@pytest.mark.parametrize(
    "place, value, sentence",
    [
        (0, torch.zeros(2, 3, 60, 32), "dtiled.shape"),
        (1, torch.zeros(2, 3, 5, 32), "dtile_sums.shape"),
        (2, None, "x: got None"),
        (3, None, "rstd: got None"),
        (6, torch.zeros(512), "slot_token"),
        (12, [2, 90, 4, 32], "dtiled.shape"),
        (14, "layer", "norm: got"),
        (16, 0, "block_size: got 0"),
    ],
)
def test_refusals(place, value, sentence):
    args = arguments()
    args[place] = value
    with pytest.raises(vsa.ArgumentError, match=sentence):
        OP(*args)


def test_refuses_a_weight_without_a_norm():
    args = arguments("none")
    args[-1] = True
    with pytest.raises(vsa.ArgumentError, match="weight"):
        OP(*args)


def check_kernel(device: str, config=None, repeat: bool = False, **settings) -> None:
    """The launcher against the reference; where the kernel rounds once more, by a unit of the last place."""
    from vsa_inductor.kernels.norm_rope_tile_backward import launch_norm_rope_tile_backward

    # Not bf16 in the interpreter, which computes with its raw bits.
    settings = {"dtype": torch.float16 if device == "cpu" else torch.bfloat16, **settings}
    args = arguments(device=device, **settings)
    expected = reference.norm_rope_tile_backward(*args)

    def run() -> tuple[Tensor, Tensor]:
        B, S, H, D = args[12]
        dx = torch.full((B, S, H, D) if args[-2] else (0,), torch.nan, device=device, dtype=settings["dtype"])
        dweight = torch.full((H, D) if args[-1] else (0,), torch.nan, device=device)
        launch_norm_rope_tile_backward(*args, dx, dweight, config)
        return dx, dweight

    got = run()
    for name, value, right in zip(("dx", "dweight"), got, expected, strict=True):
        if right is not None:
            error = float((value.float() - right.float()).norm() / right.float().norm())
            assert error < 1e-3, f"{name}: {error:.1e} {settings}"
    if repeat:
        assert all(torch.equal(a, b) for a, b in zip(run(), got, strict=True)), f"not reproducible: {settings}"


@pytest.mark.parametrize("needs_dweight", [True, False])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("heads, dim", [(1, 32), (5, 64), (12, 128), (40, 128), (128, 256)])
def test_configuration_fits_a_multiprocessor(heads, dim, norm, needs_dweight):
    pytest.importorskip("triton")
    from vsa_inductor.kernels.norm_rope_tile_backward import row_config

    config = row_config(heads, dim, norm, needs_dweight, 39936, 132)
    assert config.chunk * dim >= 256 and -(-heads // config.chunk) <= 5
    assert 64 % config.run == 0 and config.num_warps <= 32
    assert (config.programs is not None) == needs_dweight
    threads = 32 * config.num_warps * (config.programs or 1)
    assert threads * (config.max_registers or 64) <= 65536


def test_runs_are_shorter_where_few_programs_would_be_left():
    pytest.importorskip("triton")
    from vsa_inductor.kernels.norm_rope_tile_backward import row_config

    runs = [row_config(12, 128, "all", False, slots, 132).run for slots in (512, 16384, 39936)]
    assert runs == [1, 4, 8]


SMALL = {"shape": (2, 3, 5), "dim": 32}


def main() -> None:
    """The cases of the interpreter, which takes seconds for each."""
    torch.set_num_threads(1)
    check_kernel("cpu", norm="all", rotation="interleaved", **SMALL)
    check_kernel("cpu", norm="all", rotation="interleaved", heads=16, needs_dweight=False, **SMALL)
    check_kernel("cpu", norm="all", rotation="half", tables="halved", weight_dtype=torch.float16, **SMALL)
    check_kernel("cpu", norm="head", rotation="interleaved", tables="heads", weight_dtype=torch.float16, **SMALL)
    check_kernel("cpu", norm="none", rotation="none", **SMALL)
    check_kernel("cpu", norm="all", rotation="none", needs_dx=False, weight_dtype=None, sums=False, **SMALL)


def test_kernel_in_the_interpreter():
    pytest.importorskip("triton")
    result = subprocess.run(
        [sys.executable, str(Path(__file__))],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("heads, dim", [(12, 128), (5, 64)])
@pytest.mark.parametrize("norm", NORMS)
def test_kernel(norm, heads, dim):
    for rotation, tables in (("interleaved", "wan"), ("interleaved", "heads"), ("half", "halved"), ("none", "wan")):
        check_kernel(
            "cuda", repeat=True, norm=norm, rotation=rotation, tables=tables, heads=heads, dim=dim,
            weight_dtype=torch.bfloat16,
        )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_kernel_of_long_rows():
    for needs_dweight in (True, False):
        check_kernel("cuda", repeat=True, heads=40, dim=128, needs_dweight=needs_dweight)


if __name__ == "__main__":
    main()
