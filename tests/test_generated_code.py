"""Structure of the code Inductor generates around our operators, on sm_90 and sm_100 (fake_gpu/README.md): the forward,
what it keeps, and what holds of both directions. The backward's own structure is in test_generated_backward.py.

Asserted is which kernel reads and writes what. How many kernels there are is Inductor's business and moves.
"""

import re
from collections import Counter

import pytest
from fake_gpu.parsed import (
    RASTER,
    ROTARY_TABLE,
    SCORES,
    TILED,
    Block,
    feeds_matrix_product,
    fixture_of,
    in_tile_order,
    is_matrix_product,
    is_product,
    opaque_calls,
    raster_stores,
    source,
)
from fake_gpu.session import ALL, ASKED, GENERIC, RECOGNISED, UNGATED, Run
from fake_gpu.wrapper import Step, Wrapper
from torch.testing import FileCheck

pytest_plugins = ["fake_gpu.fixtures"]

HOST_SYNC = re.compile(r"\.(?:item|cpu|tolist|numpy)\(|_local_scalar_dense|synchronize")

block = fixture_of(ALL)
gated = fixture_of([builder for builder in ALL if not builder.startswith("ungated")])
generic = fixture_of((*GENERIC, "ungated"))
recognised = fixture_of((*RECOGNISED, "ungated_recognised", *ASKED))
ungated = fixture_of((*UNGATED, "ungated_asked"))


class TestGenericPrologue:
    """Norm, RoPE and tile are generated."""

    @pytest.mark.parametrize("operand", [0, 1], ids=["q", "k"])
    def test_norm_rope_and_tile_are_one_kernel(self, generic: Block, operand: int) -> None:
        forward, tiled = generic.forward, generic.tiles[operand]
        assert forward.buffers[tiled].numel == TILED
        # The rest of the writers only zero the empty slots.
        storing = [step for step in forward.writers(tiled) if any(map(is_matrix_product, producers(forward, step)))]
        assert len(storing) == 1, [step.operation for step in forward.writers(tiled)]
        FileCheck().check("tl.sum(").check("rsqrt(").check("tl.store(").run(source(storing[0]))

    @pytest.mark.parametrize("operand", [0, 1, 2], ids=["q", "k", "v"])
    def test_no_raster_store_before_the_tile(self, generic: Block, operand: int) -> None:
        upstream = generic.forward.upstream(generic.tiles[operand])
        stores = {step.operation: raster_stores(generic.forward, step) for step in upstream}
        assert stores and not any(stores.values()), stores

    def test_opaque_calls(self, generic: Block) -> None:
        assert opaque_calls(generic.forward) == {"select_blocks": 1, "attention_triton": 1}


class TestRecognisedPrologue:
    """Where the formula in front of the tiles is recognised, norm, RoPE, tile and tile sums are one kernel of ours."""

    def test_one_call_writes_the_tiles_of_q_k_and_v(self, recognised: Block) -> None:
        call = prologue(recognised)
        assert [recognised.forward.writers(tiled) for tiled in recognised.tiles] == [[call]] * 3
        assert [call.outputs[0, operand] for operand in range(3)] == [*recognised.tiles]

    def test_it_reads_the_projections(self, recognised: Block) -> None:
        projections = prologue(recognised).lists[0]
        assert len({*projections}) == 3 and all(is_product(recognised.forward, name) for name in projections)

    def test_nothing_else_reads_the_projections(self, recognised: Block) -> None:
        """Not even for the rstd that the backward keeps."""
        call = prologue(recognised)
        for name in call.lists[0]:
            readers = recognised.forward.readers(name)
            assert readers == [call], [step.operation for step in readers]

    def test_nothing_complex_of_the_tokens(self, recognised: Block) -> None:
        """What is left of complex numbers is the rotary table."""
        for step in recognised.forward.called("torch.ops.aten."):
            assert all(recognised.forward.buffers[name].numel <= ROTARY_TABLE for name in step.writes), step.operation

    def test_tile_sums_come_with_the_tiles(self, recognised: Block) -> None:
        forward, call = recognised.forward, prologue(recognised)
        for step in forward.steps[: forward.steps.index(recognised.attention)]:
            assert not in_tile_order(forward, step.reads), step.operation
        # Without the coarse branch only q and k are averaged.
        summed = range(2 if recognised.builder.startswith("ungated") else 3)
        assert all(forward.readers(call.outputs[2, operand]) for operand in summed)

    @pytest.mark.parametrize("operand", [0, 1], ids=["q", "k"])
    def test_rstd_comes_from_its_square_sums(self, recognised: Block, operand: int) -> None:
        forward, squares = recognised.forward, prologue(recognised).outputs[1, operand]
        (step,) = forward.readers(squares)
        assert step.reads == [squares] and {*step.writes} <= {*forward.outputs}
        FileCheck().check("rsqrt(").check("tl.store(").run(source(step))

    def test_opaque_calls(self, recognised: Block) -> None:
        expected = {"norm_rope_tile": 1, "select_blocks": 1, "attention_triton": 1}
        assert opaque_calls(recognised.forward) == expected


class TestEpilogue:
    def test_untile_and_gate_are_one_kernel_before_the_projection(self, gated: Block) -> None:
        forward, step = gated.forward, gated.combining()
        (combined,) = raster_stores(forward, step)
        assert forward.buffers[combined].dtype == "torch.bfloat16" and feeds_matrix_product(forward, combined)
        # The gate comes straight from its projection, the coarse branch as one row per tile.
        (gate,) = [name for name in step.reads if forward.buffers[name].numel == RASTER]
        assert is_product(forward, gate)
        assert in_tile_order(forward, step.reads) == [gated.attention.outputs[0]]

    def test_untile_is_one_store_before_the_projection(self, ungated: Block) -> None:
        forward, step = ungated.forward, ungated.combining()
        (stored,) = step.writes
        assert forward.buffers[stored].numel == RASTER and feeds_matrix_product(forward, stored)

    def test_nothing_wide_is_stored(self, block: Block) -> None:
        """No coarse branch per token and no normed or rotated row, in more than 16 bits."""
        for buffer in block.forward.buffers.values():
            if buffer.numel in (RASTER, RASTER // 2, TILED, TILED // 2):
                ours = all("vsa." in step.operation for step in block.forward.writers(buffer.name))
                assert buffer.dtype == "torch.bfloat16" or ours, buffer

    def test_no_dense_mask(self, block: Block) -> None:
        """Neither one of tokens nor a flag for each pair of tiles: selection is lists."""
        for wrapper in (block.forward, block.backward):
            for buffer in wrapper.buffers.values():
                assert buffer.numel <= TILED, buffer
                assert buffer.numel < SCORES or buffer.dtype not in ("torch.bool", "torch.int8", "torch.uint8"), buffer


class TestMemory:
    """What the forward keeps for the backward."""

    def test_four_tensors_in_tile_order(self, block: Block) -> None:
        kept = in_tile_order(block.forward, [*block.saved.values()])
        assert Counter(kept) == Counter([*block.tiles, block.attention.outputs[0]])

    def test_projections_and_the_combined_output_in_raster_order(self, block: Block) -> None:
        forward, combining = block.forward, block.combining()
        kept = [name for name in block.saved.values() if forward.buffers[name].numel == RASTER]
        expected = [*raster_stores(forward, combining), *block.projections(0), *block.projections(1)]
        expected += [name for name in combining.reads if is_product(forward, name) and is_raster(forward, name)]
        # The projections' own input is an input of the graph.
        assert {*kept} - {*forward.inputs} == {*expected} and len({*kept} & {*forward.inputs}) == 1

    def test_nothing_wide(self, block: Block) -> None:
        for name in block.saved:
            buffer = block.backward.buffers[name]
            assert buffer.numel < min(RASTER, TILED) // 2 or buffer.dtype == "torch.bfloat16", buffer


class TestGraphs:
    def test_nothing_of_ours_twice(self, block: Block) -> None:
        for calls in (block.code.forward_calls, block.code.backward_calls):
            ours = Counter((call.target, call.arguments) for call in calls if call.target.startswith("vsa."))
            assert ours and not [call for call, count in ours.items() if count > 1]

    def test_no_opaque_call_twice(self, block: Block) -> None:
        for wrapper in (block.forward, block.backward):
            ours = Counter((step.operation, *step.reads) for step in wrapper.called("torch.ops.vsa."))
            assert not [call for call, count in ours.items() if count > 1]

    def test_backward_recomputes_neither_selection_nor_attention(self, block: Block) -> None:
        again = {call.target for call in block.code.backward_calls} & {
            "vsa.select_blocks.default",
            "vsa.attention.default",
        }
        assert not again


def test_nothing_waits_for_the_device(block: Block) -> None:
    for wrapper in (block.forward, block.backward):
        assert not HOST_SYNC.findall(wrapper.body)


def test_no_atomics(block: Block) -> None:
    """Generated code adds in a fixed order, so that what surrounds a deterministic backend is deterministic too."""
    assert not [kernel.name for kernel in block.code.kernels if "tl.atomic_" in kernel.source]


def test_every_kernel_compiles(block: Block, fake_gpu_run: Run) -> None:
    compiled = fake_gpu_run.compiled(block.builder)
    assert {record["name"] for record in compiled} == {kernel.name for kernel in block.code.kernels}
    assert {record["target"] for record in compiled} == {f"sm_{fake_gpu_run.arch}a"}


def prologue(block: Block) -> Step:
    """The call that makes the tiles."""
    (call,) = block.forward.called("vsa.norm_rope_tile")
    return call


def producers(wrapper: Wrapper, step: Step) -> list[Step]:
    return [producer for name in step.reads for producer in wrapper.writers(name)]


def is_raster(wrapper: Wrapper, name: str) -> bool:
    return wrapper.buffers[name].numel == RASTER
