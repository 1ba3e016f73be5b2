"""TileLayout: every token has one slot, blocks are pure, and the layout travels (pytree, pickle, copy, device)."""

from __future__ import annotations

import copy
import itertools
import json
import math
import pickle
import random
from pathlib import Path

import pytest
import torch
from torch.utils import _pytree as pytree

from vsa_inductor import ArgumentError, TileLayout

GEOMETRY = json.loads((Path(__file__).parent / "cases" / "geometry.json").read_text())
TILES = [(4, 4, 4), (1, 8, 8), (2, 2, 16), (64, 1, 1), (4, 4, 8), (2, 8, 8), (4, 8, 8), (16, 4, 4), (1, 1, 256)]


def layout_by_walking(video_shape, tile, prefix):
    """token_slot, slot_token and sizes, one token at a time."""
    block_size = math.prod(tile)
    blocks, token = [], 0
    for length in prefix:
        tokens = range(token, token + length)
        blocks += [tokens[i : i + block_size] for i in range(0, length, block_size)]
        token += length
    for corner in itertools.product(*(range(0, n, step) for n, step in zip(video_shape, tile, strict=True))):
        ranges = [range(first, min(first + step, n)) for first, step, n in zip(corner, tile, video_shape, strict=True)]
        _, H, W = video_shape
        blocks.append([token + (t * H + h) * W + w for t, h, w in itertools.product(*ranges)])
    slot_token = [-1] * (len(blocks) * block_size)
    for i, tokens in enumerate(blocks):
        slot_token[i * block_size : i * block_size + len(tokens)] = tokens
    token_slot = [0] * (token + math.prod(video_shape))
    for slot, at in enumerate(slot_token):
        if at >= 0:
            token_slot[at] = slot
    return token_slot, slot_token, [len(tokens) for tokens in blocks]


def random_shapes(number):
    rng = random.Random(0)
    for _ in range(number):
        tile = rng.choice(TILES)
        prefix = tuple(rng.choice((0, 1, 63, 64, 65, 130, 256, 300)) for _ in range(rng.randrange(4)))
        yield tuple(rng.randint(1, 11) for _ in range(3)), tile, prefix


@pytest.mark.parametrize("case", GEOMETRY, ids=lambda c: f"{c['video_shape']}-{c['tile']}-{c['prefix']}")
def test_given_geometry(case):
    layout = TileLayout.from_video_shape(*case["video_shape"], tile=tuple(case["tile"]), prefix=case["prefix"])
    assert (layout.num_tokens, layout.num_blocks) == (case["num_tokens"], case["num_blocks"])
    assert layout.kv_block_sizes.sum() == case["sum_sizes"]
    for name in ("kv_block_sizes", "token_slot"):
        if case[name] is not None:
            assert getattr(layout, name).tolist() == case[name]
    places = torch.arange(1, layout.num_tokens + 1)
    assert int((layout.token_slot.long() * places).sum()) % (10**9 + 7) == case["token_slot_checksum"]


@pytest.mark.parametrize(
    "video_shape, tile, prefix",
    [((1, 1, 1), tile, ()) for tile in TILES]
    + [((4, 4, 4), (4, 4, 4), (0,)), ((1, 1, 65), (4, 4, 4), (0, 5, 0)), ((9, 1, 2), (4, 4, 8), (129,))]
    + list(random_shapes(60)),
)
def test_equals_walking_the_tiles(video_shape, tile, prefix):
    layout = TileLayout.from_video_shape(*video_shape, tile=tile, prefix=prefix)
    token_slot, slot_token, sizes = layout_by_walking(video_shape, tile, prefix)
    assert layout.token_slot.tolist() == token_slot
    assert layout.slot_token.tolist() == slot_token
    assert layout.kv_block_sizes.tolist() == sizes
    for table in (layout.token_slot, layout.slot_token, layout.kv_block_sizes):
        assert table.dtype == torch.int32 and table.is_contiguous()
    assert (layout.video_shape, layout.tile, layout.prefix) == (video_shape, tile, prefix)
    block_size = math.prod(tile)
    assert (layout.block_size, layout.num_tokens) == (block_size, len(token_slot))
    assert (layout.num_slots, layout.num_blocks) == (len(slot_token), len(sizes))
    assert layout.num_prefix_blocks == sum(-(-length // block_size) for length in prefix)
    assert layout.num_prefix_blocks + layout.num_video_blocks == layout.num_blocks


@pytest.mark.parametrize("video_shape, tile, prefix", list(random_shapes(20)))
def test_what_every_layout_promises(video_shape, tile, prefix):
    layout = TileLayout.from_video_shape(*video_shape, tile=tile, prefix=prefix)
    tokens = torch.arange(layout.num_tokens)
    held = layout.slot_token >= 0
    assert torch.equal(layout.slot_token[layout.token_slot.long()].long(), tokens), "slot_token inverts token_slot"
    assert int(held.sum()) == layout.num_tokens, "no token has two slots"
    by_block = held.view(-1, layout.block_size)
    places = torch.arange(layout.block_size)
    assert torch.equal(by_block, places < layout.kv_block_sizes[:, None]), "tokens first, then empty slots"
    assert bool((layout.kv_block_sizes >= 1).all())
    # Segments of a block: a block that holds two kinds of token would mix the rows of two masks.
    bounds = torch.tensor([*itertools.accumulate(prefix)])
    segment = torch.bucketize(layout.slot_token.view(-1, layout.block_size), bounds, right=True)
    first = segment[:, :1].expand_as(segment)
    assert torch.equal(segment[by_block], first[by_block]), "a block holds tokens of one segment"
    assert bool((first[: layout.num_prefix_blocks] < len(prefix)).all())
    assert bool((first[layout.num_prefix_blocks :] == len(prefix)).all())


def tables(layout):
    return layout.token_slot, layout.slot_token, layout.kv_block_sizes


def assert_same_layout(layout, other):
    assert type(other) is TileLayout
    assert all(torch.equal(a, b) for a, b in zip(tables(layout), tables(other), strict=True))
    assert (layout.video_shape, layout.tile, layout.prefix) == (other.video_shape, other.tile, other.prefix)
    assert (layout.num_prefix_blocks, layout.block_size) == (other.num_prefix_blocks, other.block_size)


@pytest.fixture
def layout():
    return TileLayout.from_video_shape(5, 6, 7, prefix=(7, 0, 70))


def test_is_a_pytree(layout):
    leaves, spec = pytree.tree_flatten(layout)
    assert [x for x in leaves if isinstance(x, torch.Tensor)] == list(tables(layout))
    assert_same_layout(layout, pytree.tree_unflatten(leaves, spec))
    moved = pytree.tree_map_only(torch.Tensor, lambda x: x.to("meta"), layout)
    assert all(x.device.type == "meta" for x in tables(moved))
    assert spec == pytree.tree_structure(TileLayout.from_video_shape(5, 6, 7, prefix=(7, 0, 70)))
    assert pytree.treespec_loads(pytree.treespec_dumps(spec)) == spec


def test_survives_pickle_and_copies(layout, tmp_path):
    assert_same_layout(layout, pickle.loads(pickle.dumps(layout)))
    copied = copy.deepcopy(layout)
    assert_same_layout(layout, copied)
    assert all(a.data_ptr() != b.data_ptr() for a, b in zip(tables(layout), tables(copied), strict=True))
    torch.save(layout, tmp_path / "layout.pt")
    assert_same_layout(layout, torch.load(tmp_path / "layout.pt", weights_only=True))


def test_is_frozen(layout):
    with pytest.raises(AttributeError):
        layout.tile = (1, 8, 8)


@pytest.mark.parametrize("device", ["cpu", "meta", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_moves_to_a_device(layout, device):
    moved = layout.to(device)
    assert all(x.device.type == device for x in tables(moved))
    built = TileLayout.from_video_shape(5, 6, 7, prefix=(7, 0, 70), device=device)
    assert all(x.device.type == device for x in tables(built))
    if device != "meta":
        assert_same_layout(layout, moved.to("cpu"))
        assert_same_layout(layout, built.to("cpu"))
    assert moved.num_blocks == built.num_blocks == layout.num_blocks


def test_follows_the_default_device():
    with torch.device("meta"):
        assert TileLayout.from_video_shape(2, 3, 4).token_slot.device.type == "meta"


@pytest.mark.parametrize(
    "kwargs, argument",
    [
        ({"T": 0}, "T"),
        ({"H": -1}, "H"),
        ({"W": 0}, "W"),
        ({"tile": (4, 4, 6)}, "tile"),
        ({"tile": (2, 2, 2)}, "tile"),
        ({"tile": (-4, -4, 4)}, "tile"),
        ({"tile": (8, 8)}, "tile"),
        ({"prefix": (3, -1)}, "prefix"),
    ],
    ids=str,
)
def test_refuses(kwargs, argument):
    with pytest.raises(ArgumentError) as caught:
        TileLayout.from_video_shape(**{"T": 2, "H": 3, "W": 4, **kwargs})
    assert caught.value.argument == argument
    assert str(caught.value.given) in str(caught.value) and caught.value.allowed in str(caught.value)


def test_builds_from_symbolic_sizes():
    """One graph for every shape: the sizes are symbols, the tables arithmetic."""

    def build(x):
        built = TileLayout.from_video_shape(*x.shape, prefix=(70,))
        return built.token_slot, built.slot_token, built.kv_block_sizes

    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(build, backend=backend, fullgraph=True, dynamic=True)
    for shape in ((5, 6, 7), (9, 3, 5), (8, 8, 8), (2, 9, 4)):
        built = compiled(torch.empty(shape))
        expected = TileLayout.from_video_shape(*shape, prefix=(70,))
        assert all(torch.equal(a, b) for a, b in zip(built, tables(expected), strict=True))
    assert len(graphs) == 1


@pytest.mark.parametrize(
    ("arguments", "named"),
    [({"T": 3.5}, "T"), ({"tile": (4.0, 4, 4)}, "tile"), ({"prefix": 7}, "prefix"), ({"prefix": (-1,)}, "prefix")],
)
def test_what_is_not_a_whole_number_is_refused(arguments, named):
    with pytest.raises(ArgumentError) as caught:
        TileLayout.from_video_shape(**{"T": 3, "H": 4, "W": 5, **arguments})
    assert caught.value.argument == named


def test_more_slots_than_an_int32_counts_are_refused():
    with pytest.raises(ArgumentError, match="int32"):
        TileLayout.from_video_shape(6, 2**14, 2**14, tile=(64, 1, 1), device="meta")


def test_numpy_sizes_are_sizes():
    numpy = pytest.importorskip("numpy", reason="numpy is not installed")
    assert TileLayout.from_video_shape(numpy.int64(3), 4, 5).num_tokens == 60
