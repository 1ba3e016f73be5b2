"""Pictures: the loss curve, and frames with the tiles that one query tile attends."""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .latents import FRAMES_PER_LATENT, PIXELS_PER_LATENT

matplotlib.use("Agg")

QUERY_COLOUR = "#ffd21f"
SELECTED_COLOUR = "#29d3ff"
_PATCH = 2


@dataclass(frozen=True)
class TileGrid:
    """Where the tiles of a video lie in tokens and on its frames.

    Attributes:
        video_shape: (T, H, W) in tokens.
        tile: extent of a tile in tokens.
    """

    video_shape: tuple[int, int, int]
    tile: tuple[int, int, int]

    @property
    def counts(self) -> tuple[int, int, int]:
        """Tiles per axis."""
        t, h, w = (-(-size // extent) for size, extent in zip(self.video_shape, self.tile, strict=True))
        return t, h, w

    def place(self, block: int) -> tuple[int, int, int]:
        """Tile coordinates of a block: blocks are row-major over the tiles."""
        _, rows, columns = self.counts
        return block // (rows * columns), block // columns % rows, block % columns

    def block(self, place: tuple[int, int, int]) -> int:
        """Block of a tile: the inverse of `place`."""
        _, rows, columns = self.counts
        return (place[0] * rows + place[1]) * columns + place[2]

    def latent_frames(self, layer: int) -> range:
        """Latent frames of the tiles at one position on the time axis; the last may have fewer than a whole tile."""
        return range(layer * self.tile[0], min((layer + 1) * self.tile[0], self.video_shape[0]))

    def box(self, place: tuple[int, int, int]) -> tuple[int, int, int, int]:
        """Pixels that a tile covers on its frames: left, top, width, height."""
        pixels = PIXELS_PER_LATENT * _PATCH
        top, left = place[1] * self.tile[1], place[2] * self.tile[2]
        bottom, right = min(top + self.tile[1], self.video_shape[1]), min(left + self.tile[2], self.video_shape[2])
        return left * pixels, top * pixels, (right - left) * pixels, (bottom - top) * pixels


def liveliest_block(frames: Tensor, grid: TileGrid, layer: int) -> int:
    """The block whose pixels change most over time, among the tiles at one position on the time axis.

    Args:
        frames: uint8 RGB [F, H, W, 3], the window's frames.
        grid: of the window.
        layer: position on the time axis, in tiles.
    """
    latent_frames = grid.latent_frames(layer)
    part = frames[latent_frames.start * FRAMES_PER_LATENT : latent_frames.stop * FRAMES_PER_LATENT]
    motion = part.to(torch.float32).var(0, correction=0).sum(-1)
    _, rows, columns = grid.counts
    places = [(layer, row, column) for row in range(rows) for column in range(columns)]

    def movement(place: tuple[int, int, int]) -> float:
        left, top, width, height = grid.box(place)
        return float(motion[top : top + height, left : left + width].mean())

    return grid.block(max(places, key=movement))


class _SelectionRecorder(TorchDispatchMode):
    """Keeps what every call of the select_blocks operator returned, in the order of the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.lists: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.vsa.select_blocks.default:
            self.lists.append((result[0].cpu(), result[1].cpu()))
        return result


def record_selection(run: Callable[[], object]) -> list[tuple[Tensor, Tensor]]:
    """Block lists of every sparse attention in an eager run, without gradients.

    Args:
        run: calls the model, not compiled.

    Returns:
        (kv_indices [B, H, N, M], kv_num_blocks [B, H, N]) on the CPU, one pair per layer.
    """
    with torch.no_grad(), _SelectionRecorder() as recorder:
        run()
    return recorder.lists


def draw_selection(frames: Tensor, grid: TileGrid, query: int, selected: list[int], title: str, path: Path) -> None:
    """Draw the frames that the query tile or a selected tile touches, one row per tile on the time axis.

    A tile spans 4 latent frames, each of 4 frames of the clip; the first of each 4 is shown.

    Args:
        frames: uint8 RGB [F, H, W, 3], the clip's frames of the window that was attended.
        grid: of the attended video.
        query: the query tile's block.
        selected: the blocks it attends.
        title: above the picture.
        path: the PNG to write.
    """
    layers = sorted({grid.place(block)[0] for block in (query, *selected)})
    columns = max(len(grid.latent_frames(layer)) for layer in layers)
    height, width = frames.shape[1:3]
    panel = 3.2
    figure = Figure(figsize=(panel * columns, (panel * height / width + 0.3) * len(layers) + 0.9), layout="constrained")
    axes = figure.subplots(len(layers), columns, squeeze=False)
    for row, layer in enumerate(layers):
        for column in range(columns):
            axis = axes[row][column]
            axis.set_axis_off()
            if column >= len(grid.latent_frames(layer)):
                continue
            frame = grid.latent_frames(layer)[column] * FRAMES_PER_LATENT
            axis.imshow(frames[frame].numpy())
            axis.set_title(f"frame {frame}", fontsize=8)
            for block in selected:
                if grid.place(block)[0] == layer:
                    _outline(axis, grid.box(grid.place(block)), SELECTED_COLOUR, fill=0.25)
            if grid.place(query)[0] == layer:
                _outline(axis, grid.box(grid.place(query)), QUERY_COLOUR, fill=0.0)
    figure.suptitle(title, fontsize=10)
    handles = [
        Rectangle((0, 0), 1, 1, fill=False, edgecolor=QUERY_COLOUR, linewidth=2.5),
        Rectangle((0, 0), 1, 1, facecolor=SELECTED_COLOUR, alpha=0.6),
    ]
    figure.legend(handles, ["query tile", "tiles it attends"], loc="outside lower center", ncols=2, fontsize=9)
    figure.savefig(path, dpi=120)


def _outline(axis: Any, box: tuple[int, int, int, int], colour: str, fill: float) -> None:
    left, top, width, height = box
    if fill:
        axis.add_patch(Rectangle((left, top), width, height, facecolor=colour, alpha=fill, edgecolor="none"))
    # Drawn half a line inside, so that neighbours stay apart.
    axis.add_patch(
        Rectangle((left + 1.5, top + 1.5), width - 4, height - 4, fill=False, edgecolor=colour, linewidth=1.6)
    )


def write_losses(losses: list[float], folder: Path) -> tuple[Path, Path]:
    """Write `loss.csv` (step, loss) and `loss.png` into `folder`; returns their paths."""
    table, curve = folder / "loss.csv", folder / "loss.png"
    with table.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["step", "loss"])
        writer.writerows((step, f"{loss:.6f}") for step, loss in enumerate(losses, start=1))
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axis = figure.subplots()
    axis.plot(range(1, len(losses) + 1), losses, marker=".", linewidth=1)
    axis.set_xlabel("step")
    axis.set_ylabel("flow-matching loss")
    axis.grid(alpha=0.3)
    figure.savefig(curve, dpi=120)
    return table, curve
