"""FSDP2, DDP and LoRA around a sparsified Wan: gradients are those of one process, or of the merged weights.

Two processes on gloo, started once; each check is a function of its own that both ranks run.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import vsa_inductor as vsa

pytest.importorskip("diffusers", reason="diffusers is not installed")
from test_diffusers_wan import forward, make_inputs, make_model

WORLD = 2
SHAPE = (5, 8, 8)
needs_gloo = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="this torch has no torch.distributed with gloo"
)


def small_model(num_layers: int = 1) -> nn.Module:
    model = make_model(num_attention_heads=1, attention_head_dim=32, ffn_dim=32, num_layers=num_layers).train()
    vsa.sparsify(model, sparsity=0.5, gate=1.0)
    return model


def local_inputs(rank: int) -> tuple[Tensor, ...]:
    return make_inputs(SHAPE, seed=10 + rank)


def backward(model: nn.Module, rank: int) -> Tensor:
    loss = forward(model, local_inputs(rank)).square().mean()
    loss.backward()
    return loss.detach()


def reference(num_layers: int = 1) -> dict[str, Tensor]:
    """The mean over ranks of the gradients, by one eager model."""
    model = small_model(num_layers)
    for rank in range(WORLD):
        backward(model, rank)
    return {name: p.grad / WORLD for name, p in model.named_parameters() if p.grad is not None}


def assert_gradients(model: nn.Module, expected: dict[str, Tensor]) -> None:
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            grad = parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
            found[name.replace("_orig_mod.", "").removeprefix("module.")] = grad
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-3, atol=1e-6, msg=name)


def compilations_of_a_step(model: nn.Module, rank: int) -> int:
    from torch._dynamo.utils import counters

    counters.clear()
    backward(model, rank)
    return counters["stats"]["unique_graphs"]


def check_fsdp2_with_compiled_blocks(rank: int) -> None:
    """The usual order: each block compiled, then sharded."""
    from torch.distributed.fsdp import fully_shard

    model = small_model(num_layers=2)
    for i, block in enumerate(model.blocks):
        model.blocks[i] = vsa.compile(block, backend="aot_eager")
    for block in (*model.blocks, model):
        fully_shard(block)
    backward(model, rank)
    assert_gradients(model, reference(num_layers=2))
    assert compilations_of_a_step(model, rank) == 0


def check_fsdp2_in_mixed_precision(rank: int) -> None:
    """Its hooks cast the floating tensors of the geometry that every block gets, and leave the tables alone."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = small_model()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*model.blocks, model):
        fully_shard(module, mp_policy=policy)
    loss = backward(model, rank)
    torch.testing.assert_close(loss.float(), backward(small_model(), rank), rtol=2e-2, atol=0.0)
    assert all(p.grad.full_tensor().isfinite().all() for p in model.blocks.parameters())


def check_ddp(rank: int) -> None:
    from torch.nn.parallel import DistributedDataParallel

    expected = reference()
    inside = DistributedDataParallel(vsa.compile(small_model(), backend="aot_eager"))
    backward(inside, rank)
    assert_gradients(inside, expected)
    # Dynamo cuts this one into a graph per bucket.
    outside = vsa.compile(DistributedDataParallel(small_model()), fullgraph=False, backend="aot_eager")
    backward(outside, rank)
    assert_gradients(outside.module, expected)


CHECKS: list[Callable[[int], None]] = [check_fsdp2_with_compiled_blocks, check_fsdp2_in_mixed_precision, check_ddp]


def worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    for check in CHECKS:
        torch._dynamo.reset()
        try:
            check(rank)
            outcome = "passed"
        except Exception:
            outcome = traceback.format_exc()
        (Path(folder) / f"{check.__name__}.{rank}").write_text(outcome)
        if outcome != "passed":
            break  # The other rank may wait in a collective; the next check would meet it there.
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    context = torch.multiprocessing.get_context("spawn")
    processes = [context.Process(target=worker, args=(rank, str(folder))) for rank in range(WORLD)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=240)
    for process in processes:
        if process.is_alive():
            process.kill()
    return folder


@needs_gloo
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_two_processes(outcomes: Path, check: Callable[[int], None]) -> None:
    for rank in range(WORLD):
        outcome = outcomes / f"{check.__name__}.{rank}"
        assert outcome.exists(), f"rank {rank} did not get through; see the checks before this one"
        assert outcome.read_text() == "passed", outcome.read_text()


class LoRA(nn.Module):
    """A frozen linear layer with a trainable product of two thin matrices beside it."""

    def __init__(self, linear: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.down = nn.Linear(linear.in_features, rank, bias=False)
        self.up = nn.Linear(rank, linear.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.up(self.down(x))


def with_adapters(model: nn.Module) -> nn.Module:
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(3)
    for block in model.blocks:
        for name in ("to_q", "to_v"):
            adapter = LoRA(getattr(block.attn1, name))
            for part in (adapter.down, adapter.up):
                part.weight.data = torch.randn(part.weight.shape, generator=generator) * 0.1
            setattr(block.attn1, name, adapter)
    return model


def test_lora_adapters() -> None:
    """Put on after a compiled step, as `add_adapter` does: seen by the compiled model, and the only ones trained."""
    model, merged = small_model(), small_model()
    torch._dynamo.reset()
    compiled = vsa.compile(model, backend="aot_eager")
    before = backward(compiled, 0)
    model.zero_grad(set_to_none=True)
    with_adapters(model)
    for block, other in zip(merged.blocks, model.blocks, strict=True):
        for name in ("to_q", "to_v"):
            adapter = getattr(other.attn1, name)
            getattr(block.attn1, name).weight.data += adapter.up.weight.data @ adapter.down.weight.data
    expected, loss = backward(merged, 0), backward(compiled, 0)
    assert (loss - before).abs() > 1e-6
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-6)
    trained = {name for name, p in model.named_parameters() if p.grad is not None}
    assert trained and all(".up." in name or ".down." in name for name in trained)
    # The chain rule through the product, from the gradient of the merged weight.
    for block, other in zip(merged.blocks, model.blocks, strict=True):
        for name in ("to_q", "to_v"):
            adapter, dweight = getattr(other.attn1, name), getattr(block.attn1, name).weight.grad
            torch.testing.assert_close(adapter.up.weight.grad, dweight @ adapter.down.weight.T, rtol=1e-3, atol=1e-6)
            torch.testing.assert_close(adapter.down.weight.grad, adapter.up.weight.T @ dweight, rtol=1e-3, atol=1e-6)
