"""Structure of the code Inductor generates around our operators, on sm_90 and sm_100 (fake_gpu/README.md).

Asserted is which kernel reads and writes what. How many kernels there are is Inductor's business and moves.
"""

import functools
from collections import Counter

import pytest
from fake_gpu.generated_code import GraphCall
from fake_gpu.session import Run
from fake_gpu.wan_block import HEAD_DIM, HEADS, VIDEO_SHAPE
from fake_gpu.wrapper import Step, Wrapper
from torch.testing import FileCheck

import vsa_inductor as vsa

pytest_plugins = ["fake_gpu.fixtures"]

LAYOUT = vsa.TileLayout.from_video_shape(*VIDEO_SHAPE)
# The video is ragged, so that an element count tells raster order from tile order.
RASTER = LAYOUT.num_tokens * HEADS * HEAD_DIM
ROTARY_TABLE = LAYOUT.num_tokens * HEAD_DIM
TILED = LAYOUT.num_slots * HEADS * HEAD_DIM
assert RASTER != TILED
# Without the last digits, which depend on how the root is taken.
SM_SCALE = f"{HEAD_DIM**-0.5:.17f}"[:14]


class Block:
    """One builder's code for one architecture, parsed; `attention` and `backward_call` are the opaque calls."""

    def __init__(self, run: Run, builder: str) -> None:
        self.builder = builder
        self.code = run.code(builder)
        self.forward, self.backward = Wrapper(self.code.forward), Wrapper(self.code.backward)
        self.backward_backend = "eager" if builder == "wan_eager_backward" else "triton"
        (self.attention,) = self.forward.called("vsa.attention_triton")
        (self.backward_call,) = self.backward.called(f"vsa.attention_backward_{self.backward_backend}")


@functools.cache
def parsed(run: Run, builder: str) -> Block:
    return Block(run, builder)


@pytest.fixture(params=["wan", "wan_eager_backward", "wan_one_kernel", "rotate_half", "per_head_norm"])
def block(request: pytest.FixtureRequest, fake_gpu_run: Run) -> Block:
    return parsed(fake_gpu_run, request.param)


def raster_stores(wrapper: Wrapper, step: Step) -> list[str]:
    """Raster-order tensors that a step writes: of full size, or the half that interleaved RoPE takes apart."""
    sizes = {name: wrapper.buffers[name].numel for name in step.writes}
    return [name for name, size in sizes.items() if size in (RASTER, RASTER // 2)]


def feeds_matrix_product(wrapper: Wrapper, name: str) -> bool:
    return any(map(is_matrix_product, wrapper.readers(name)))


def is_matrix_product(step: Step) -> bool:
    return step.operation.startswith("extern_kernels.") and "mm" in step.operation


def source(step: Step) -> str:
    assert step.kernel is not None, step.operation
    return step.kernel.source


class TestForward:
    @pytest.mark.parametrize("operand", [0, 1], ids=["q", "k"])
    def test_norm_rope_and_tile_are_one_kernel(self, block: Block, operand: int) -> None:
        forward, tiled = block.forward, block.attention.arguments[operand]
        assert tiled is not None and forward.buffers[tiled].numel == TILED
        # The rest of the writers only zero the empty slots.
        storing = [step for step in forward.writers(tiled) if any(map(is_matrix_product, _producers(forward, step)))]
        assert len(storing) == 1, [step.operation for step in forward.writers(tiled)]
        FileCheck().check("tl.sum(").check("rsqrt(").check("tl.store(").run(source(storing[0]))

    @pytest.mark.parametrize("operand", [0, 1, 2], ids=["q", "k", "v"])
    def test_no_raster_store_before_the_tile(self, block: Block, operand: int) -> None:
        tiled = block.attention.arguments[operand]
        assert tiled is not None
        stores = {step.operation: raster_stores(block.forward, step) for step in block.forward.upstream(tiled)}
        assert stores and not any(stores.values()), stores

    def test_untile_and_gate_are_one_kernel_before_the_projection(self, block: Block) -> None:
        readers = block.forward.readers(block.attention.outputs[0])
        (combining,) = [step for step in readers if step.kernel is not None]
        stored = raster_stores(block.forward, combining)
        assert len(stored) == 1, {name: block.forward.buffers[name].dtype for name in stored}
        (combined,) = stored
        assert feeds_matrix_product(block.forward, combined)

    def test_one_opaque_call_of_each_kind(self, block: Block) -> None:
        assert _opaque_calls(block.forward) == {"select_blocks": 1, "attention_triton": 1}


class TestBackward:
    @pytest.mark.parametrize("gradient", [0, 1], ids=["dq", "dk"])
    def test_untile_and_rope_backward_are_one_kernel(self, block: Block, gradient: int) -> None:
        """Whoever reads the gradient in tile order also rotates it back: there is no un-tiled copy."""
        backward = block.backward
        readers = backward.readers(block.backward_call.outputs[gradient])
        assert readers
        for step in readers:
            sizes = [backward.buffers[name].numel for name in step.reads]
            assert ROTARY_TABLE in sizes or ROTARY_TABLE // 2 in sizes, step.operation

    @pytest.mark.parametrize("gradient", [0, 1, 2], ids=["dq", "dk", "dv"])
    def test_no_copy_in_tile_order(self, block: Block, gradient: int) -> None:
        """Neither scaling nor the sum with the coarse branch's gradient is stored before the un-tile."""
        backward = block.backward
        for step in backward.readers(block.backward_call.outputs[gradient]):
            assert all(backward.buffers[name].numel != TILED for name in step.writes), step.operation

    def test_dv_goes_straight_into_the_projection(self, block: Block) -> None:
        backward = block.backward
        (step,) = backward.readers(block.backward_call.outputs[2])
        assert any(feeds_matrix_product(backward, name) for name in raster_stores(backward, step))

    @pytest.mark.parametrize("gradient", [0, 1], ids=["dq", "dk"])
    def test_norm_backward_too_with_higher_bounds(self, fake_gpu_run: Run, gradient: int) -> None:
        block = parsed(fake_gpu_run, "wan_one_kernel")
        tiled = block.backward_call.outputs[gradient]
        storing = [step for step in block.backward.readers(tiled) if raster_stores(block.backward, step)]
        assert len(storing) == 1
        for name in raster_stores(block.backward, storing[0]):
            assert feeds_matrix_product(block.backward, name), name
        FileCheck().check("tl.sum(").check("tl.store(").run(source(storing[0]))

    def test_unscaled_accumulator_is_scaled_where_it_is_untiled(self, block: Block) -> None:
        accumulator = block.backward_call.outputs[0]
        scaled = [SM_SCALE in source(step) for step in block.backward.readers(accumulator)]
        # The contract of triton promises a final dq: scaling it again would be wrong.
        assert all(scaled) if block.backward_backend == "eager" else not any(scaled)

    def test_delta_is_generated(self, block: Block) -> None:
        delta = block.backward_call.arguments[5]
        assert delta is not None
        (step,) = block.backward.writers(delta)
        FileCheck().check("tl.sum(").check("tl.store(").run(source(step))

    def test_one_opaque_call_of_each_kind(self, block: Block) -> None:
        expected = {"transpose_blocks": 1, f"attention_backward_{block.backward_backend}": 1}
        assert _opaque_calls(block.backward) == expected


class TestGraphs:
    def test_nothing_of_ours_twice(self, block: Block) -> None:
        for calls in (block.code.forward_calls, block.code.backward_calls):
            ours = Counter((call.target, call.arguments) for call in calls if _is_ours(call))
            assert ours and not [call for call, count in ours.items() if count > 1]

    def test_no_opaque_call_twice(self, block: Block) -> None:
        for wrapper in (block.forward, block.backward):
            ours = Counter((step.operation, step.arguments) for step in wrapper.called("torch.ops.vsa."))
            assert not [call for call, count in ours.items() if count > 1]

    def test_backward_recomputes_neither_selection_nor_attention(self, block: Block) -> None:
        again = {call.target for call in block.code.backward_calls} & {
            "vsa.select_blocks.default",
            "vsa.attention.default",
        }
        assert not again


class TestRecognisedPrologue:
    """RMSNorm, RoPE and tile as one kernel of ours, where the formula in front of the tile is recognised."""

    @pytest.fixture(params=["wan_recognised", "rotate_half_recognised", "per_head_recognised"])
    def recognised(self, request: pytest.FixtureRequest, fake_gpu_run: Run) -> Block:
        return parsed(fake_gpu_run, request.param)

    @pytest.mark.parametrize("operand", [0, 1], ids=["q", "k"])
    def test_tiles_come_from_the_projection_by_one_call(self, recognised: Block, operand: int) -> None:
        forward, tiled = recognised.forward, recognised.attention.arguments[operand]
        assert tiled is not None
        (writer,) = forward.writers(tiled)
        assert writer.operation.startswith("torch.ops.vsa.norm_rope_tile"), writer.operation
        # Nothing else of the forward reads the projection: not even for the rstd that the backward keeps.
        readers = {step.operation for name in writer.reads for step in forward.readers(name)}
        projections = [name for name in writer.reads if any(map(is_matrix_product, forward.writers(name)))]
        assert len(projections) == 1, writer.reads
        assert {step.operation for step in forward.readers(projections[0])} == {writer.operation}, readers

    def test_opaque_calls(self, recognised: Block) -> None:
        expected = {"norm_rope_tile": 2, "select_blocks": 1, "attention_triton": 1}
        assert _opaque_calls(recognised.forward) == expected

    def test_every_kernel_compiles(self, recognised: Block, fake_gpu_run: Run) -> None:
        compiled = fake_gpu_run.compiled(recognised.builder)
        assert {record["name"] for record in compiled} == {kernel.name for kernel in recognised.code.kernels}


def test_no_atomics(block: Block) -> None:
    """Generated code adds in a fixed order, so that what surrounds a deterministic backend is deterministic too."""
    assert not [kernel.name for kernel in block.code.kernels if "tl.atomic_" in kernel.source]


def test_every_kernel_compiles(block: Block, fake_gpu_run: Run) -> None:
    compiled = fake_gpu_run.compiled(block.builder)
    assert {record["name"] for record in compiled} == {kernel.name for kernel in block.code.kernels}
    assert {record["target"] for record in compiled} == {f"sm_{fake_gpu_run.arch}a"}


def _producers(wrapper: Wrapper, step: Step) -> list[Step]:
    return [producer for name in step.reads for producer in wrapper.writers(name)]


def _opaque_calls(wrapper: Wrapper) -> Counter[str]:
    return Counter(
        step.operation.removeprefix("torch.ops.vsa.").split(".")[0] for step in wrapper.called("torch.ops.vsa.")
    )


def _is_ours(call: GraphCall) -> bool:
    return call.target.startswith("vsa.")
