"""The model, the flow-matching loss and the training steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from diffusers import WanTransformer3DModel
from torch import Tensor, nn
from torch.nn import functional

from .latents import CHANNELS

# Steps between the fractional parts of multiples of the golden ratio's inverse are as even as a sequence can have them:
# times drawn so make the loss comparable between short stretches of steps.
_GOLDEN_STEP = (math.sqrt(5) - 1) / 2

PROMPT_TOKENS = 32
PROMPT_CHANNELS = 64


@dataclass(frozen=True)
class Size:
    """What one kind of machine trains in the demo's time.

    Attributes:
        height, width: pixels of the frames, multiples of 16.
        window: latent frames of one training sample.
        heads, head_dim, layers: of the transformer.
        learning_rate: of AdamW, after a warm-up.
    """

    height: int
    width: int
    window: int
    heads: int
    head_dim: int
    layers: int
    learning_rate: float


# Tokens (8, 13, 22): edge tiles are ragged on two axes. A step takes about a second on two cores.
CPU_SIZE = Size(height=208, width=352, window=8, heads=4, head_dim=64, layers=2, learning_rate=1e-3)
# Tokens (21, 30, 52), the 480p shape that Wan is trained at.
CUDA_SIZE = Size(height=480, width=832, window=21, heads=8, head_dim=128, layers=4, learning_rate=5e-4)


def build_model(size: Size, seed: int) -> nn.Module:
    """diffusers' Wan transformer with random weights, in fp32 on the CPU."""
    torch.manual_seed(seed)
    dim = size.heads * size.head_dim
    model: Any = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=size.heads,
        attention_head_dim=size.head_dim,
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        text_dim=PROMPT_CHANNELS,
        freq_dim=256,
        ffn_dim=4 * dim,
        num_layers=size.layers,
    )
    return model


class FlowMatching(nn.Module):
    """The loss of one training step: mean squared error of the velocity on the straight path from latents to noise.

    Args:
        transformer: predicts the velocity from the noisy latents, the time (times 1000) and a prompt embedding.
    """

    def __init__(self, transformer: nn.Module) -> None:
        super().__init__()
        self.transformer = transformer

    def forward(self, latents: Tensor, noise: Tensor, time: Tensor, prompt: Tensor) -> Tensor:
        """Scalar fp32 loss.

        Args:
            latents, noise: [B, 16, T, H, W].
            time: [B] in 0..1; 0 is the clip, 1 is noise.
            prompt: [B, tokens, channels].
        """
        t = time.view(-1, 1, 1, 1, 1)
        noisy = (1 - t) * latents + t * noise
        # bf16 matrix products on a GPU; a CPU without bf16 units would only be slower.
        with torch.autocast(latents.device.type, torch.bfloat16, enabled=latents.device.type == "cuda"):
            velocity = self.transformer(noisy, time * 1000, prompt, return_dict=False)[0]
        return functional.mse_loss(velocity.float(), noise - latents)


@dataclass(frozen=True)
class Sample:
    """The inputs of one step, in the order of `FlowMatching.forward`."""

    latents: Tensor
    noise: Tensor
    time: Tensor
    prompt: Tensor

    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.latents, self.noise, self.time, self.prompt


def samples(latents: Tensor, window: int, device: torch.device, seed: int) -> Iterator[Sample]:
    """Endless training samples: a window of the clip, noise and a time, the same on every machine for one seed.

    Args:
        latents: [1, 16, T, H, W] on the CPU.
        window: latent frames of a sample, at most T.
        device: where the samples go.
        seed: of windows, noise and prompt.
    """
    generator = torch.Generator().manual_seed(seed)
    prompt = torch.randn(1, PROMPT_TOKENS, PROMPT_CHANNELS, generator=generator).to(device)
    starts = latents.shape[2] - window + 1
    step = 0
    while True:
        start = int(torch.randint(starts, (), generator=generator))
        part = latents[:, :, start : start + window].contiguous()
        noise = torch.randn(part.shape, generator=generator)
        step += 1
        time = torch.tensor([step * _GOLDEN_STEP % 1.0])
        yield Sample(part.to(device), noise.to(device), time.to(device), prompt)


@dataclass(frozen=True)
class Training:
    """What the steps did.

    Attributes:
        losses: one per step.
        seconds: wall time of each step; the first holds the compilation.
    """

    losses: list[float]
    seconds: list[float]

    @property
    def first_quarter(self) -> float:
        """Mean loss of the first quarter of the steps."""
        count = max(1, len(self.losses) // 4)
        return sum(self.losses[:count]) / count

    @property
    def last_quarter(self) -> float:
        """Mean loss of the last quarter of the steps."""
        count = max(1, len(self.losses) // 4)
        return sum(self.losses[-count:]) / count

    @property
    def falls(self) -> bool:
        """Whether the last quarter's mean is below the first quarter's (never for a loss that is not a number)."""
        return self.last_quarter < self.first_quarter


def train(
    loss_fn: Callable[..., Tensor],
    parameters: list[nn.Parameter],
    batches: Iterator[Sample],
    steps: int,
    learning_rate: float,
    progress: Callable[[int, float], None],
) -> Training:
    """Run AdamW for `steps` steps.

    Args:
        loss_fn: the (compiled) loss, called with a sample's inputs.
        parameters: what is trained.
        batches: where the samples come from.
        steps: how many.
        learning_rate: reached after a tenth of the steps.
        progress: called after each step with its number (from 1) and loss.
    """
    optimizer = torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=0.0)
    warm_up = max(1, steps // 10)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warm_up))
    losses, seconds = [], []
    for step in range(1, steps + 1):
        begin = perf_counter()
        loss = loss_fn(*next(batches).inputs())
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        scheduler.step()
        losses.append(loss.item())
        seconds.append(perf_counter() - begin)
        progress(step, losses[-1])
    return Training(losses, seconds)
