"""`python -m vsa_inductor demo`: from a clip on disk to a compiled training step, a report and pictures."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import os
import platform
import shutil
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import vsa_inductor as vsa

from . import picture, training
from .clip import ClipError, default_clip, read_clip
from .latents import FRAMES_PER_LATENT, patchify

# One tile of (4, 4, 4) tokens on the time axis.
MIN_LATENT_FRAMES = 4
# A few seconds of a clip are enough to learn from, and fit in memory whatever the file's length.
MAX_FRAMES = 160
# The time at which the picture's selection is made: the clip's structure stands out from the noise.
PICTURE_TIME = 0.3


class MachineError(RuntimeError):
    """This machine lacks something that compiling needs, or the device that was asked for."""


def run(arguments: argparse.Namespace) -> int:
    """Run the demo.

    Args:
        arguments: video, out, steps, sparsity, gate, device, seed as `vsa_inductor.__main__` declares them.

    Returns:
        exit status: 0 when everything ran and the loss fell, 1 when it did not fall, 2 for a clip, a machine or a
        folder that cannot be used.
    """
    try:
        return _run(arguments)
    except (ClipError, MachineError, vsa.ArgumentError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _run(arguments: argparse.Namespace) -> int:
    device = _device(arguments.device)
    try:
        arguments.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise vsa.ArgumentError("--out", arguments.out, f"a folder that can be made ({error.strerror})") from None
    size = training.CUDA_SIZE if device.type == "cuda" else training.CPU_SIZE
    gate = {"none": None, "one": 1.0, "learned": "learned"}[arguments.gate]
    seconds: dict[str, float] = {}

    with _stage("reading the clip", seconds):
        path = arguments.video or default_clip()
        frames = read_clip(path, MAX_FRAMES, size.height, size.width)
        latents = patchify(frames, MIN_LATENT_FRAMES)
    window = min(size.window, latents.shape[2])
    video_shape = (window, latents.shape[3] // 2, latents.shape[4] // 2)
    _say(f"{path.name}: {frames.shape[0]} frames, {latents.shape[2]} latent frames; a sample has {video_shape} tokens")

    model = training.build_model(size, arguments.seed).to(device)
    handle = vsa.sparsify(model, sparsity=arguments.sparsity, gate=gate)
    loss_fn = training.FlowMatching(model)
    compiled = vsa.compile(loss_fn)
    batches = training.samples(latents, window, device, arguments.seed)
    with _stage("training", seconds), _progress(arguments.steps) as progress:
        result = training.train(
            compiled, list(model.parameters()), batches, arguments.steps, size.learning_rate, progress
        )
    _say(f"loss: mean of the first quarter {result.first_quarter:.4f}, of the last {result.last_quarter:.4f}")

    table, curve = picture.write_losses(result.losses, arguments.out)
    with _stage("drawing", seconds):
        tiles = _draw(loss_fn, frames, latents, window, video_shape, batches, arguments.out / "tiles.png")
    with _stage("explaining the compiled step", seconds):
        report = vsa.explain(compiled, *next(batches).inputs())
    handle.restore()

    document = {
        "clip": {"file": path.name, "frames": frames.shape[0], "height": frames.shape[1], "width": frames.shape[2]},
        "settings": {
            "device": device.type,
            "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
            "seed": arguments.seed,
            "steps": arguments.steps,
            "sparsity": arguments.sparsity,
            "gate": arguments.gate,
            "video_shape": video_shape,
            "model": dataclasses.asdict(size),
        },
        "versions": {
            "vsa_inductor": importlib.metadata.version("vsa_inductor"),
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "losses": result.losses,
        "loss_first_quarter": result.first_quarter,
        "loss_last_quarter": result.last_quarter,
        "step_seconds": result.seconds,
        "stage_seconds": seconds,
        "backends": str(vsa.backend_report()),
        "region": report.to_dict(),
    }
    report_path = arguments.out / "report.json"
    report_path.write_text(json.dumps(document, indent=2) + "\n")
    page = arguments.out / "report.html"
    page.write_text(report.to_html(), encoding="utf-8")
    print(f"\n{report}\n")
    ours = sum(call.ours for call in report.opaque_calls)
    _say(
        f"{report.num_graphs} graph, {len(report.breaks)} breaks, {ours} opaque calls of ours, {len(report.kernels)} "
        f"generated kernels; loss {result.first_quarter:.4f} -> {result.last_quarter:.4f}"
    )
    _say("wrote " + ", ".join(str(file) for file in (report_path, page, table, curve, tiles)))
    if not result.falls:
        print(
            f"error: the loss did not fall: its mean was {result.first_quarter:.4f} in the first quarter of the steps "
            f"and {result.last_quarter:.4f} in the last",
            file=sys.stderr,
        )
        return 1
    return 0


def _draw(
    loss_fn: training.FlowMatching,
    frames: Tensor,
    latents: Tensor,
    window: int,
    video_shape: tuple[int, int, int],
    batches: Iterator[training.Sample],
    path: Path,
) -> Path:
    """Draw what the last block's first head selects for the liveliest tile in the middle of the clip's first window."""
    sample = next(batches)
    device = sample.latents.device
    part = latents[:, :, :window].to(device)
    moment = torch.tensor([PICTURE_TIME], device=device)
    lists = picture.record_selection(lambda: loss_fn(part, sample.noise, moment, sample.prompt))
    grid = picture.TileGrid(video_shape, (4, 4, 4))
    shown = frames[: window * FRAMES_PER_LATENT]
    query = picture.liveliest_block(shown, grid, grid.counts[0] // 2)
    kv_indices, kv_num_blocks = lists[-1]
    selected = kv_indices[0, 0, query, : int(kv_num_blocks[0, 0, query])].tolist()
    total = kv_indices.shape[2]
    title = f"last block, first head: the query tile attends {len(selected)} of {total} tiles"
    picture.draw_selection(shown, grid, query, selected, title, path)
    return path


def _device(wanted: str) -> torch.device:
    if wanted == "cuda" and not torch.cuda.is_available():
        raise MachineError("--device cuda was asked for, but this torch finds no CUDA device")
    _check_compiler()
    return torch.device("cuda" if wanted == "cuda" or (wanted == "auto" and torch.cuda.is_available()) else "cpu")


def _check_compiler() -> None:
    """Inductor's own message about these comes minutes later, inside a long traceback."""
    compilers = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++", "c++"]
    if not any(shutil.which(name.split()[0]) for name in compilers):
        raise MachineError(f"compiling needs a C++ compiler: none of {', '.join(compilers)} was found")
    headers = Path(sysconfig.get_paths()["include"])
    if not (headers / "Python.h").is_file():
        raise MachineError(f"compiling needs Python's C headers: there is no Python.h in {headers}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextmanager
def _stage(name: str, seconds: dict[str, float]) -> Iterator[None]:
    _say(f"{name} ...")
    begin = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - begin


@contextmanager
def _progress(steps: int) -> Iterator[Any]:
    """A progress bar over the steps; the first holds the compilation and says so."""
    from tqdm import tqdm

    with tqdm(total=steps, unit="step", desc="compiling the step") as bar:

        def progress(step: int, loss: float) -> None:
            if step == 1:
                bar.set_description("training")
            bar.set_postfix_str(f"loss {loss:.4f}")
            bar.update()

        yield progress
