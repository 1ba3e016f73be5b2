"""layouts.py against the tables enumerated from CuTe, and against what both leave out: refusals and invariants."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from .. import layouts
from ..engines import matrix, wgmma
from ..layout_tables import tables


def same(ours: np.ndarray, theirs: np.ndarray, name: str) -> None:
    """Equality with the first differing place in the message."""
    assert ours.shape == theirs.shape, f"{name}: shape {ours.shape}, the table has {theirs.shape}"
    if not np.array_equal(ours, theirs):
        place = tuple(int(index) for index in np.argwhere(ours != theirs)[0])
        raise AssertionError(f"{name} differs first at {place}: {ours[place]}, the table has {theirs[place]}")


def numbers(parts: list[str]) -> dict[str, int]:
    """{"m": 64, "n": 128} from ["m64", "n128"]."""
    return {part.rstrip("0123456789"): int(part.lstrip("abcdefghijklmnopqrstuvwxyz")) for part in parts}


def test_every_family_is_there() -> None:
    families = {name.split("/")[0] for name in tables.names()}
    assert families == {
        *("tmem_d", "tmem_a", "registers", "copy", "shared", "descriptor", "instruction"),
        *("wgmma_d", "wgmma_a", "mma", "ldmatrix", "stmatrix"),
    }
    assert tables.cutlass_version() == "4.2.0"
    with pytest.raises(KeyError, match="no table 'copy/x'; there are"):
        tables.table("copy/x")


@pytest.mark.parametrize("case", ["cta1", "cta2", "ws"])
def test_accumulators(case: str) -> None:
    """All M and N; f16 takes a column per element like f32, in the low half; tile 1 is the other half of layout F."""
    seen = 0
    for name in tables.names(f"tmem_d/{case}/"):
        value, *rest = name.split("/")[2:]
        size = numbers(rest)
        m, n, tile = size["m"], size["n"], size["tile"]
        lane, column, bit = tables.tmem_accumulator(case, value, m, n, tile)
        offset = 16 * tile if layouts.accumulator_layout(m, 2 if case == "cta2" else 1, case == "ws") == "F" else 0
        ours = layouts.accumulator_cells(m, n, 2 if case == "cta2" else 1, case == "ws", offset)
        same(ours[0], lane, f"{name} lane")
        same(ours[1], column, f"{name} column")
        assert not bit.any(), name
        seen += 1
    assert seen == {"cta1": 192, "cta2": 64, "ws": 18}[case]


def test_operand_a_in_tensor_memory() -> None:
    for name in tables.names("tmem_a/"):
        case, size, m = name.split("/")[1:]
        element_bytes, rows = int(size), int(m[1:])
        lane, column, bit = tables.tmem_operand_a(case, element_bytes, rows)
        ours = layouts.a_operand_cells(rows, 32, 2 if case == "cta2" else 1)
        first_bytes = [part.reshape(-1, 32)[:, ::element_bytes] for part in ours]
        same(first_bytes[0], lane, f"{name} lane")
        same(first_bytes[1], column, f"{name} column")
        same(8 * first_bytes[2], bit, f"{name} bit")


def test_copies_of_operand_a_are_where_their_columns_of_d_are() -> None:
    lane, _ = layouts.accumulator_cells(128, 64, cta_group=2)
    a_lane = layouts.a_operand_cells(128, 32, cta_group=2)[0]
    for column in range(64):
        same(lane[:, column], a_lane[column // 32, :, 0], f"lanes of column {column}")


@pytest.mark.parametrize("shape", ["32x32b", "16x64b", "16x128b", "16x256b", "16x32bx2"])
def test_register_maps(shape: str) -> None:
    seen = tables.names(f"registers/{shape}/")
    assert len(seen) == {"16x128b": 14, "16x256b": 12}.get(shape, 16)
    for name in seen:
        count, packed = int(name.split("/")[2]), name.endswith("/packed")
        lane, column = tables.tmem_register_map(shape, count, packed)
        split = (2 * count if packed else count) if shape == "16x32bx2" else 0
        if packed:
            ours = layouts.packed_register_cells(shape, count, split)
        else:
            plain = layouts.register_cells(shape, count, split)
            ours = (plain[0][:, None, :], plain[1][:, None, :])
        same(ours[0], lane, f"{name} lane")
        same(ours[1], column, f"{name} column")


def test_register_maps_reach_every_cell_once() -> None:
    for shape, columns in (("32x32b", 8), ("16x64b", 16), ("16x128b", 32), ("16x256b", 64), ("16x32bx2", 16)):
        lane, column = layouts.register_cells(shape, 8, 8 if shape == "16x32bx2" else 0)
        cells = set(zip(lane.ravel().tolist(), column.ravel().tolist(), strict=True))
        lanes = 32 if shape == "32x32b" else 16
        assert cells == {(i, j) for i in range(lanes) for j in range(columns)}, shape


def test_tensor_memory_copies() -> None:
    for name in tables.names("copy/"):
        shape = name.split("/")[1]
        row, lane = tables.tmem_copy_map(shape)
        ours = layouts.copy_lanes(shape)
        rows = row // 32 if shape == "4x256b" else row
        pairs = {(r, int(target)) for copy in ours for r, target in enumerate(copy)}
        assert pairs == set(zip(rows.tolist(), lane.tolist(), strict=True)), shape


@pytest.mark.parametrize("generation", ["wgmma", "tcgen05"])
@pytest.mark.parametrize("major", ["k", "mn"])
def test_shared_matrices(generation: str, major: str) -> None:
    """CuTe's own descriptor, decoded here, must give CuTe's own byte offsets, instruction by instruction along K."""
    seen = tables.names(f"shared/{generation}/{major}/")
    assert (
        len(seen)
        == {("wgmma", "k"): 96, ("wgmma", "mn"): 30, ("tcgen05", "k"): 96, ("tcgen05", "mn"): 64}[generation, major]
    )
    for name in seen:
        path = name.removeprefix("shared/")
        swizzle, bits, _, rows = path.split("/")[2:]
        matrix = tables.shared_matrix_at(path)
        element_bytes = int(bits) // 8
        depth = 32 // element_bytes
        # Any base aligned to the pattern will do: the XOR must not depend on the higher bits.
        for base in (0, 0x5000):
            for step, start in enumerate(matrix.starts.tolist()):
                word = matrix.descriptor | (base + start) >> 4
                descriptor = layouts.decode_matrix_descriptor(word, generation)
                assert (descriptor.swizzle, descriptor.start) == (swizzle, base + start), name
                ours = layouts.matrix_addresses(descriptor, int(rows), depth, element_bytes, major == "mn")
                theirs = matrix.offsets[:, step * depth : (step + 1) * depth]
                same(ours - base, theirs.astype(np.int64), f"{name} step {step}")


def test_a_matrix_in_shared_memory_is_a_permutation() -> None:
    for generation, major, swizzle, bits in (("tcgen05", "mn", "128B_ATOM32B", 32), ("wgmma", "mn", "64B", 16)):
        offsets = tables.shared_matrix(generation, major, swizzle, bits, 128).offsets
        assert sorted(offsets.ravel().tolist()) == list(range(0, offsets.size * bits // 8, bits // 8))


def test_instruction_descriptors() -> None:
    for name in tables.names("instruction/"):
        kind, a, b, d = name.split("/")[1:]
        for m, n, a_major, b_major, word in tables.instruction_words(kind, a, b, d):
            decoded = layouts.decode_instruction_descriptor(word, kind)
            assert (decoded.m, decoded.n, decoded.a_format, decoded.b_format, decoded.d_format) == (m, n, a, b, d), name
            assert (decoded.a_mn_major, decoded.b_mn_major) == (bool(a_major), bool(b_major)), name
            assert not (decoded.sparse or decoded.saturate or decoded.negate_a or decoded.negate_b), name


def test_wgmma_fragments() -> None:
    """The engine is given matrices of row and of column numbers as products."""
    for name in tables.names("wgmma_d/"):
        n = int(name.split("/")[1])
        for number, theirs in zip(np.indices((64, n), dtype=np.float32), tables.wgmma_accumulator(n), strict=True):
            same(wgmma.accumulators(number, n, "f32").view(np.float32), theirs, f"{name}, f32")
            halves = wgmma.accumulators(number, n, "f16").view(np.float16).reshape(n // 4, 128, 2)
            same(halves.transpose(0, 2, 1).reshape(n // 2, 128), theirs, f"{name}, f16")
    for bits in (8, 16, 32):
        for part, theirs in zip(layouts.wgmma_a_fragment(bits // 8), tables.wgmma_operand_a(bits), strict=True):
            same(part.reshape(-1, 128), theirs, f"wgmma A, {bits} bits")


def test_mma_fragments() -> None:
    for name in tables.names("mma/"):
        shape, element, operand = name.split("/")[1:]
        element_bytes = 1 if element == "fp8" else int(element) // 8
        for accumulator_bytes in (8,) if element_bytes == 8 else (4, 2):
            fragment = getattr(layouts.mma_fragments(shape, element_bytes, accumulator_bytes), operand)
            first, second = tables.mma_fragment(shape, element, operand)
            ours = (fragment.column, fragment.row) if operand == "b" else (fragment.row, fragment.column)
            same(ours[0].reshape(-1, 32), first, f"{name} first coordinate")
            same(ours[1].reshape(-1, 32), second, f"{name} second coordinate")


def test_matrix_loads_and_stores() -> None:
    """The engine's permutations, told by numbered bytes: byte s of thread t and byte b of row r trade places."""
    moves: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        "plain": np.copy,
        "trans": matrix.transpose,
        "b8trans": matrix.columns_of_16x8,
    }
    plain = np.arange(128, dtype=np.uint8).view(np.uint32).reshape(8, 4)
    for name in [*tables.names("ldmatrix/"), *tables.names("stmatrix/")]:
        instruction, kind, count = name.split("/")
        thread, byte = tables.matrix_map(instruction, kind, int(count))
        place = moves[kind](plain).view(np.uint8).reshape(-1).astype(np.int64)
        if instruction == "stmatrix":
            place = np.argsort(place)
        place = place.reshape(32, 4).T
        for register in range(int(count)):
            same(place // 16 + 8 * register, thread[register], f"{name} row of register {register}")
            same(place % 16, byte[register], f"{name} byte of register {register}")


SOUND_TCGEN05 = 0x4000404000010000
SOUND_INSTRUCTION = 0x08200010  # f32 += f16 * f16, both K-major, M=128, N=128


@pytest.mark.parametrize(
    ("bits", "generation", "message"),
    [
        (1 << 14, "wgmma", "reserved bits 14-15"),
        (1 << 46, "wgmma", "reserved bits 46-48"),
        (1 << 61, "wgmma", "reserved bits 52-61"),
        (SOUND_TCGEN05 | 1 << 53, "tcgen05", "reserved bits 53-60"),
        (SOUND_TCGEN05 & ~(1 << 46), "tcgen05", "bits 46-48 are 0b000; they must be 0b001"),
        (SOUND_TCGEN05 | 1 << 61, "tcgen05", "swizzle code 3 is unassigned"),
        (0, "sm100", "generation 'sm100' is unknown; allowed: wgmma, tcgen05"),
    ],
)
def test_matrix_descriptors_refused(bits: int, generation: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layouts.decode_matrix_descriptor(bits, generation)


def test_matrix_addresses_refused() -> None:
    def decode(extra: int, swizzle: int = 2) -> layouts.MatrixDescriptor:
        return layouts.decode_matrix_descriptor(1 << 46 | swizzle << 61 | extra, "tcgen05")

    for descriptor, k, element_bytes, message in (
        (decode(1 << 52), 16, 2, "bit 52"),
        (decode(3 << 49, swizzle=4), 16, 2, "base offset is 3 with swizzle 64B"),
        (decode(0), 16, 8, "element_bytes is 8"),
        (decode(0, swizzle=1), 8, 4, "MN-major operands only"),
        (decode(0, swizzle=6), 32, 2, "exceeds the swizzle width of 32 bytes"),
    ):
        with pytest.raises(ValueError, match=message):
            layouts.matrix_addresses(descriptor, 128, k, element_bytes, False)
    for swizzle, element_bytes in ((1, 2), (2, 4)):
        with pytest.raises(ValueError, match="32-bit elements need 128B_ATOM32B"):
            layouts.matrix_addresses(decode(0, swizzle), 128, 8, element_bytes, True)
    with pytest.raises(ValueError, match="swizzle mode '96B' is unknown"):
        layouts.swizzle(0, "96B")


@pytest.mark.parametrize(
    ("bits", "options", "message"),
    [
        (SOUND_INSTRUCTION | 1 << 6, {}, "reserved bits 6-6"),
        (SOUND_INSTRUCTION | 1 << 23, {}, "reserved bits 23-23"),
        (SOUND_INSTRUCTION | 1 << 29, {}, "reserved bits 29-29"),
        (SOUND_INSTRUCTION | 2 << 7, {}, "format 2 of A is not allowed for kind::f16"),
        (SOUND_INSTRUCTION, {"kind": "tf32"}, "format 0 of A is not allowed for kind::tf32"),
        (SOUND_INSTRUCTION | 1, {}, "sparsity selector 1 without the sparsity bit"),
        (SOUND_INSTRUCTION | 1 << 3, {}, "saturate bit is set for kind::f16"),
        (0x08200020 | 1 << 13, {"kind": "i8"}, "integer operands cannot be negated"),
        (0x08200000 | 1 << 7, {}, "bf16 operands need an f32 D"),
        (SOUND_INSTRUCTION | 5 << 7 | 1 << 15, {"kind": "f8f6f4"}, "A is MN-major e2m1"),
        (SOUND_INSTRUCTION | 1 << 15, {"a_in_tensor_memory": True}, "A in tensor memory must be K-major"),
        (SOUND_INSTRUCTION | 1 << 30, {}, "maximum shift 8 without .ws"),
        (0x10200010, {}, "M is 256; allowed for kind::f16, cta_group::1"),
        (0x04200010, {"cta_group": 2}, "M is 64; allowed for kind::f16, cta_group::2"),
        (SOUND_INSTRUCTION, {"cta_group": 2, "ws": True}, "allowed: cta_group::1"),
        (0x08180010, {"ws": True}, "N is 96; allowed for kind::f16, cta_group::1, .ws"),
        (0x08020010, {"cta_group": 2, "a_in_tensor_memory": True}, "N is 8"),
        (0x080A0020, {"kind": "i8"}, "N is 40"),
        (0x08070010, {"kind": "f8f6f4"}, "N is 24"),
        (0x08030020, {"kind": "i8"}, "N is 8"),
        (SOUND_INSTRUCTION, {"kind": "mxf4"}, "kind::mxf4 is not modelled"),
    ],
)
def test_instruction_descriptors_refused(bits: int, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layouts.decode_instruction_descriptor(bits, **{"kind": "f16", **options})


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        ("accumulator_cells", (64, 32, 2), "no accumulator layout"),
        ("accumulator_cells", (128, 32, 1, False, 16), r"lane offset is 16; allowed for layout D: \(0,\)"),
        ("accumulator_cells", (32, 66, 1, True), "layout G needs a multiple of 4"),
        ("a_operand_cells", (64, 32, 1, True), "with .ws and M=64 is not modelled"),
        ("a_operand_cells", (128, 33), "must be a multiple of 4"),
        ("register_cells", ("16x512b", 1), "shape '16x512b' is unknown"),
        ("register_cells", ("16x256b", 64), "16x256b has .x64; allowed: powers of two up to .x32"),
        ("register_cells", ("16x64b", 1, 4), "only 16x32bx2 takes one"),
        ("packed_register_cells", ("16x64b", 1, 4), "only 16x32bx2 takes one"),
        ("wgmma_a_fragment", (8,), "element_bytes is 8"),
        ("mma_fragments", ("16x8x16", 2), "not of the form m16n8k16"),
        ("mma_fragments", ("m8n8k4", 2), "m8n8k4 with elements of 2 bytes is not modelled"),
        ("mma_fragments", ("m16n8k16", 2, 8), "accumulators of 8 bytes do not go with"),
        ("copy_lanes", ("64x128b",), "shape '64x128b' is unknown"),
    ],
)
def test_shapes_refused(function: str, arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        getattr(layouts, function)(*arguments)


def test_results_are_read_only() -> None:
    lane, _ = layouts.accumulator_cells(128, 64)
    with pytest.raises(ValueError, match="read-only"):
        lane[0, 0] = 1
