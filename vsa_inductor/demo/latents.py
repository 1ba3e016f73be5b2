"""Latents without an autoencoder: space-to-depth of a clip, its principal components as channels.

A trained video autoencoder would have to be downloaded. The stand-in has the geometry of Wan's (4 frames and 8 x 8
pixels become one latent of 16 channels, each of zero mean and unit variance) and is a linear map fitted to the clip.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .clip import ClipError

FRAMES_PER_LATENT = 4
PIXELS_PER_LATENT = 8
CHANNELS = 16


def space_to_depth(frames: Tensor) -> Tensor:
    """Cut a clip into cells of 4 frames and 8 x 8 pixels.

    Args:
        frames: uint8 RGB [F, H, W, 3]; frames past a multiple of 4 and pixels past a multiple of 8 are left out.

    Returns:
        float32 in [-1, 1], [F // 4, H // 8, W // 8, 768].
    """
    t, h, w = (
        frames.shape[0] // FRAMES_PER_LATENT,
        frames.shape[1] // PIXELS_PER_LATENT,
        frames.shape[2] // PIXELS_PER_LATENT,
    )
    frames = frames[: t * FRAMES_PER_LATENT, : h * PIXELS_PER_LATENT, : w * PIXELS_PER_LATENT]
    cells = frames.reshape(t, FRAMES_PER_LATENT, h, PIXELS_PER_LATENT, w, PIXELS_PER_LATENT, 3)
    return cells.permute(0, 2, 4, 1, 3, 5, 6).reshape(t, h, w, -1).to(torch.float32) / 127.5 - 1.0


def patchify(frames: Tensor, min_latent_frames: int = 1) -> Tensor:
    """Latents of a clip.

    Args:
        frames: uint8 RGB [F, H, W, 3].
        min_latent_frames: the fewest latent frames the caller can use.

    Returns:
        float32 [1, 16, F // 4, H // 8, W // 8], every channel of zero mean and unit variance over the clip. Channels
        are the leading principal components of the cells, the strongest first, each with the sign that makes its
        largest weight positive, so that every machine gets the same latents up to rounding.

    Raises:
        ClipError: fewer than 4 * min_latent_frames frames, or pictures without any variation.
    """
    needed = FRAMES_PER_LATENT * min_latent_frames
    if frames.shape[0] < needed:
        raise ClipError(f"the clip has {frames.shape[0]} frames: at least {needed} are needed")
    cells = space_to_depth(frames)
    flat = cells.flatten(0, 2)
    flat -= flat.mean(0)
    _, components = torch.linalg.eigh((flat.T @ flat).to(torch.float64))
    components = components.flip(1)[:, :CHANNELS]
    strongest = components.gather(0, components.abs().argmax(0, keepdim=True))
    channels = flat @ (components * strongest.sign()).to(torch.float32)
    deviation = channels.std(0, correction=0)
    if float(deviation.min()) < 1e-4:
        raise ClipError(f"the clip's pictures have fewer than {CHANNELS} independent components: it is (nearly) blank")
    latents = (channels / deviation).unflatten(0, cells.shape[:3])
    return latents.permute(3, 0, 1, 2)[None].contiguous()
