"""Structure of the code Inductor generates for the backward, on sm_90 and sm_100 (fake_gpu/README.md).

Asserted is which kernel reads and writes what, as in test_generated_code.py.
"""

import pytest
from fake_gpu.parsed import (
    RASTER,
    ROTARY_TABLE,
    TILED,
    TRANSPOSED,
    Block,
    feeds_matrix_product,
    fixture_of,
    in_tile_order,
    is_matrix_product,
    is_product,
    opaque_calls,
    parsed,
    raster_stores,
    source,
)
from fake_gpu.session import ALL, ASKED, GENERIC, RECOGNISED, UNGATED, Run
from fake_gpu.wan_block import HEAD_DIM, HEADS
from fake_gpu.wrapper import Step, Wrapper
from torch.testing import FileCheck

pytest_plugins = ["fake_gpu.fixtures"]

# Without the last digits, which depend on how the root is taken.
SM_SCALE = f"{HEAD_DIM**-0.5:.17f}"[:14]

gated = fixture_of((*GENERIC, *RECOGNISED))
generic = fixture_of((*GENERIC, "ungated"))
recognised = fixture_of(RECOGNISED)
ungated = fixture_of(UNGATED)
asked = fixture_of(ASKED)
unasked = fixture_of([builder for builder in ALL if builder not in ASKED])

GRADIENTS = {"argvalues": [0, 1, 2], "ids": ["dq", "dk", "dv"]}
NORMED = {"argvalues": [0, 1], "ids": ["dq", "dk"]}


class TestGatedCombine:
    """The gate's backward is one kernel of ours, whatever stands in front of the tiles."""

    def test_it_gives_the_attention_dout_and_delta(self, gated: Block) -> None:
        call = combine_backward(gated)
        arguments = gated.backward_call.arguments
        assert (arguments[0], arguments[5]) == (call.outputs[0], call.outputs[1])

    def test_nothing_else_reads_the_incoming_gradient(self, gated: Block) -> None:
        call = combine_backward(gated)
        dout = str(call.arguments[0])
        assert is_product(gated.backward, dout) and gated.backward.readers(dout) == [call]

    def test_dgate_goes_straight_into_the_projection(self, gated: Block) -> None:
        assert_only_multiplied_and_summed(gated.backward, combine_backward(gated).outputs[2])

    def test_dcoarse_is_a_row_per_tile(self, gated: Block) -> None:
        buffer = gated.backward.buffers[combine_backward(gated).outputs[3]]
        assert buffer.numel * 64 == TILED and gated.backward.readers(buffer.name)


class TestGeneric:
    """Un-tile, RoPE backward and norm backward are generated."""

    @pytest.mark.parametrize("gradient", **NORMED)
    def test_untile_and_rope_backward_are_one_kernel(self, generic: Block, gradient: int) -> None:
        """Whoever reads the gradient in tile order also rotates it back: there is no un-tiled copy."""
        readers = generic.backward.readers(generic.backward_call.outputs[gradient])
        assert readers and all(reads_rotary_table(generic.backward, step) for step in readers)

    @pytest.mark.parametrize("gradient", **GRADIENTS)
    def test_no_copy_in_tile_order(self, generic: Block, gradient: int) -> None:
        """Neither scaling nor the sum with the coarse branch's gradient is stored before the un-tile."""
        for step in generic.backward.readers(generic.backward_call.outputs[gradient]):
            assert not in_tile_order(generic.backward, step.writes), step.operation

    def test_dv_goes_straight_into_the_projection(self, generic: Block) -> None:
        (step,) = generic.backward.readers(generic.backward_call.outputs[2])
        assert any(feeds_matrix_product(generic.backward, name) for name in raster_stores(generic.backward, step))

    @pytest.mark.parametrize("gradient", **NORMED)
    def test_norm_backward_too_with_higher_bounds(self, fake_gpu_run: Run, gradient: int) -> None:
        block = parsed(fake_gpu_run, "wan_one_kernel")
        tiled = block.backward_call.outputs[gradient]
        storing = [step for step in block.backward.readers(tiled) if raster_stores(block.backward, step)]
        assert len(storing) == 1
        for name in raster_stores(block.backward, storing[0]):
            assert feeds_matrix_product(block.backward, name), name
        FileCheck().check("tl.sum(").check("tl.store(").run(source(storing[0]))

    def test_unscaled_accumulator_is_scaled_where_it_is_untiled(self, generic: Block) -> None:
        accumulator = generic.backward_call.outputs[0]
        scaled = [SM_SCALE in source(step) for step in generic.backward.readers(accumulator)]
        # The contract of triton promises a final dq: scaling it again would be wrong.
        assert all(scaled) if generic.backward_backend == "eager" else not any(scaled)

    def test_opaque_calls(self, generic: Block) -> None:
        expected = {"transpose_blocks": 1, f"attention_backward_{generic.backward_backend}": 1}
        if generic.builder != "ungated":
            expected["gated_combine_backward"] = 1
        assert opaque_calls(generic.backward) == expected


class TestRecognised:
    """Un-tile, RoPE backward and norm backward are one kernel of ours for each gradient."""

    @pytest.mark.parametrize("gradient", **GRADIENTS)
    def test_one_call_from_the_attention_to_the_projection(self, recognised: Block, gradient: int) -> None:
        call = norm_rope_backward(recognised, gradient)
        assert recognised.backward.buffers[call.outputs[0]].numel == RASTER
        assert_only_multiplied_and_summed(recognised.backward, call.outputs[0])

    @pytest.mark.parametrize("gradient", **NORMED)
    def test_the_weight_gradient_comes_with_it(self, recognised: Block, gradient: int) -> None:
        backward = recognised.backward
        sums = norm_rope_backward(recognised, gradient).outputs[1]
        (step,) = backward.readers(sums)
        (weight_gradient,) = step.writes
        assert step.reads == [sums] and weight_gradient in backward.outputs
        per_head = recognised.builder == "per_head_recognised"
        assert backward.buffers[weight_gradient].numel == HEAD_DIM * (1 if per_head else HEADS)

    def test_dv_is_only_untiled(self, recognised: Block) -> None:
        call = norm_rope_backward(recognised, 2)
        # x, rstd and weight; the rows per tile are the coarse branch's gradient.
        assert call.arguments[2:5] == (None,) * 3 and not call.lists[5] and 1 not in call.outputs
        assert call.arguments[1] is not None

    def test_nothing_generated_touches_tile_order(self, recognised: Block) -> None:
        """Not even to zero dk and dv of unselected blocks: the contract of triton promises that."""
        for step in recognised.backward.launched():
            assert not in_tile_order(recognised.backward, [*step.reads, *step.writes]), step.operation

    def test_nothing_complex_of_the_tokens(self, recognised: Block) -> None:
        """What is left of complex numbers is the table that the forward kept."""
        for step in recognised.backward.called("torch.ops.aten."):
            assert all(recognised.backward.buffers[name].numel <= ROTARY_TABLE for name in step.writes), step.operation

    def test_opaque_calls(self, recognised: Block) -> None:
        expected = {"gated_combine_backward": 1, "transpose_blocks": 1, "attention_backward_triton": 1}
        assert opaque_calls(recognised.backward) == expected | {"norm_rope_tile_backward": 3}


class TestUngated:
    """Without a gate there is no kernel of ours that makes dout: it is tiled by generated code."""

    def test_tile_and_delta_are_one_kernel(self, ungated: Block) -> None:
        backward, arguments = ungated.backward, ungated.backward_call.arguments
        (step,) = backward.writers(str(arguments[0]))
        assert {*map(str, (arguments[0], arguments[5]))} == {*step.writes}
        assert in_tile_order(backward, step.reads) == [saved_name(ungated, ungated.attention.outputs[0])]
        FileCheck().check("tl.sum(").check("tl.store(").run(source(step))
        (dout,) = [name for name in step.reads if backward.buffers[name].numel == RASTER]
        assert is_product(backward, dout) and backward.readers(dout) == [step]

    def test_dv_goes_straight_into_the_projection(self, ungated: Block) -> None:
        (step,) = ungated.backward.readers(ungated.backward_call.outputs[2])
        (stored,) = step.writes
        assert_only_multiplied_and_summed(ungated.backward, stored)

    @pytest.mark.parametrize("gradient", **NORMED)
    def test_norm_and_rope_are_recognised(self, fake_gpu_run: Run, gradient: int) -> None:
        block = parsed(fake_gpu_run, "ungated_recognised")
        call = norm_rope_backward(block, gradient)
        assert call.arguments[1] is None, "there is no coarse branch to come back through the tile means"
        assert_only_multiplied_and_summed(block.backward, call.outputs[0])


class TestAsked:
    """A contract that wants transposes, and leaves dq scrambled and unscaled, dk and dv unmasked."""

    @pytest.mark.parametrize("operand", [0, 1], ids=["dout", "q"])
    def test_transposes_are_generated(self, asked: Block, operand: int) -> None:
        transposed = str(asked.backward_call.arguments[operand])
        (step,) = asked.backward.writers(transposed)
        buffer = asked.backward.buffers[transposed]
        assert step.kernel is not None
        assert (buffer.shape, buffer.dtype) == (TRANSPOSED, "torch.bfloat16")

    def test_dout_is_not_stored_in_rows(self, asked: Block) -> None:
        """What reads rows is only delta, and that gathers them itself."""
        backward = asked.backward
        stored = [name for step in backward.launched() for name in in_tile_order(backward, step.writes)]
        assert {*stored} == {*map(str, asked.backward_call.arguments[:2])}

    def test_only_where_they_are_asked_for(self, unasked: Block) -> None:
        for wrapper in (unasked.forward, unasked.backward):
            assert not [buffer for buffer in wrapper.buffers.values() if buffer.shape == TRANSPOSED]

    def test_accumulator_is_read_by_one_kernel_that_does_the_rest(self, asked: Block) -> None:
        """Un-scrambled, scaled, un-tiled and rotated back, without a copy in between."""
        backward = asked.backward
        (step,) = backward.readers(asked.backward_call.outputs[0])
        assert SM_SCALE in source(step) and reads_rotary_table(backward, step)
        stored = [backward.buffers[name] for name in step.writes]
        assert all(buffer.dtype == "torch.bfloat16" and buffer.numel != TILED for buffer in stored)

    @pytest.mark.parametrize("gradient", [1, 2], ids=["dk", "dv"])
    def test_unselected_blocks_are_masked_where_they_are_read(self, asked: Block, gradient: int) -> None:
        backward = asked.backward
        readers = backward.readers(asked.backward_call.outputs[gradient])
        assert readers
        for step in readers:
            assert q_offsets(asked) in step.reads and not in_tile_order(backward, step.writes), step.operation

    def test_nothing_is_masked_where_zeros_are_promised(self, unasked: Block) -> None:
        assert unasked.backward.readers(q_offsets(unasked)) == [unasked.backward_call]


def combine_backward(block: Block) -> Step:
    (call,) = block.backward.called("vsa.gated_combine_backward")
    return call


def norm_rope_backward(block: Block, gradient: int) -> Step:
    """The call of ours that reads the gradient of q, k or v; nothing else does."""
    (call,) = block.backward.readers(block.backward_call.outputs[gradient])
    assert call.operation.startswith("torch.ops.vsa.norm_rope_tile_backward"), call.operation
    return call


def q_offsets(block: Block) -> str:
    (call,) = block.backward.called("vsa.transpose_blocks")
    return call.outputs[1]


def saved_name(block: Block, of_forward: str) -> str:
    """The backward's name of a buffer that the forward kept."""
    (name,) = [name for name, kept in block.saved.items() if kept == of_forward]
    return name


def reads_rotary_table(wrapper: Wrapper, step: Step) -> bool:
    return any(wrapper.buffers[name].numel in (ROTARY_TABLE, ROTARY_TABLE // 2) for name in step.reads)


def assert_only_multiplied_and_summed(wrapper: Wrapper, name: str) -> None:
    """A gradient in raster order goes into matrix products, and sums for a bias: no kernel stores it again."""
    assert feeds_matrix_product(wrapper, name)
    for step in wrapper.readers(name):
        assert is_matrix_product(step) or not raster_stores(wrapper, step), step.operation
