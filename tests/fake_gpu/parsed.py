"""The code of the builders of `wan_block.py`, parsed, and the words that tests speak of it in."""

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

import vsa_inductor as vsa

from .session import ASKED, Run
from .wan_block import HEAD_DIM, HEADS, VIDEO_SHAPE
from .wrapper import Step, Wrapper

LAYOUT = vsa.TileLayout.from_video_shape(*VIDEO_SHAPE)
# The video is ragged, so that an element count tells raster order from tile order.
RASTER = LAYOUT.num_tokens * HEADS * HEAD_DIM
TILED = LAYOUT.num_slots * HEADS * HEAD_DIM
assert RASTER != TILED
TRANSPOSED = (HEADS * HEAD_DIM, LAYOUT.num_slots)
ROTARY_TABLE = LAYOUT.num_tokens * HEAD_DIM
SCORES = HEADS * (LAYOUT.num_slots // LAYOUT.block_size) ** 2


class Block:
    """One builder's code for one architecture.

    attention, backward_call: the opaque calls of the backend.
    tiles: the buffers of q, k and v in tile order.
    saved: what the forward keeps for the backward: name in the backward -> name in the forward.
    """

    def __init__(self, run: Run, builder: str) -> None:
        self.builder = builder
        self.code = run.code(builder)
        self.forward, self.backward = Wrapper(self.code.forward), Wrapper(self.code.backward)
        self.backward_backend = (
            "asking" if builder in ASKED else "eager" if builder == "wan_eager_backward" else "triton"
        )
        (self.attention,) = self.forward.called("vsa.attention_triton")
        (self.backward_call,) = self.backward.called(f"vsa.attention_backward_{self.backward_backend}")
        self.tiles = tuple(str(name) for name in self.attention.arguments[:3])
        # The function has one output, and one gradient comes in.
        kept = zip(self.backward.inputs[:-1], self.forward.outputs[1:], strict=True)
        self.saved = {name: str(of_forward) for name, of_forward in kept}

    def projections(self, operand: int) -> list[str]:
        """What matrix products made of which q, k or v (0, 1, 2) is tiled."""
        (*_, writer) = self.forward.writers(self.tiles[operand])
        if writer.kernel is None:
            return [writer.lists[0][operand]]
        steps = self.forward.upstream(self.tiles[operand])
        return [name for step in steps for name in step.reads if is_product(self.forward, name)]

    def combining(self) -> Step:
        """The generated kernel that reads the attention's output."""
        (step,) = [step for step in self.forward.readers(self.attention.outputs[0]) if step.kernel is not None]
        return step


@functools.cache
def parsed(run: Run, builder: str) -> Block:
    return Block(run, builder)


def fixture_of(builders: Sequence[str]) -> Any:
    """A fixture: the block of each of `builders`, on each architecture."""

    def block(request: pytest.FixtureRequest, fake_gpu_run: Run) -> Block:
        return parsed(fake_gpu_run, request.param)

    fixture: Callable[..., Any] = pytest.fixture(params=builders)
    return fixture(block)


def is_matrix_product(step: Step) -> bool:
    return step.operation.startswith("extern_kernels.") and "mm" in step.operation


def is_product(wrapper: Wrapper, name: str) -> bool:
    """Whether matrix products, and nothing else, write a buffer."""
    writers = wrapper.writers(name)
    return bool(writers) and all(map(is_matrix_product, writers))


def feeds_matrix_product(wrapper: Wrapper, name: str) -> bool:
    return any(map(is_matrix_product, wrapper.readers(name)))


def raster_stores(wrapper: Wrapper, step: Step) -> list[str]:
    """Raster-order tensors that a step writes: of full size, or the half that interleaved RoPE takes apart."""
    return [name for name in step.writes if wrapper.buffers[name].numel in (RASTER, RASTER // 2)]


def in_tile_order(wrapper: Wrapper, names: Sequence[str]) -> list[str]:
    return [name for name in names if wrapper.buffers[name].numel == TILED]


def source(step: Step) -> str:
    assert step.kernel is not None, step.operation
    return step.kernel.source


def opaque_calls(wrapper: Wrapper) -> Counter[str]:
    """How often each operator of ours is called."""
    ours = wrapper.called("torch.ops.vsa.")
    return Counter(step.operation.removeprefix("torch.ops.vsa.").split(".")[0] for step in ours)
