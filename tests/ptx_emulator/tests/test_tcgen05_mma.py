"""tcgen05.mma: every kind, shape, layout and operand place against numpy, and what is refused.

The places of D in tensor memory are written here once more, from PTX ISA 9.7.16.10.5.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from .. import Options, load
from ..errors import (
    BoundsError,
    DescriptorError,
    Finding,
    RaceError,
    TensorMemoryError,
    UninitialisedError,
    UnknownInstructions,
)
from ..formats import f32_to_bf16, f32_to_e4m3, f32_to_e5m2
from .tcgen05_kernels import IMAGE, LANES, frame, instruction_descriptor, matrix_descriptor, place, run_frame

# element -> (kind, code in the instruction descriptor)
ELEMENTS = {
    "f16": ("f16", 0),
    "bf16": ("f16", 1),
    "tf32": ("tf32", 2),
    "e4m3": ("f8f6f4", 0),
    "e5m2": ("f8f6f4", 1),
    "u8": ("i8", 0),
    "s8": ("i8", 1),
}


def encode(x: np.ndarray, element: str) -> np.ndarray:
    """Small integers as raw elements."""
    if element == "f16":
        return x.astype(np.float16).view(np.uint16)
    if element == "bf16":
        return f32_to_bf16(x.astype(np.float32))
    if element == "tf32":
        return x.astype(np.float32).view(np.uint32)
    if element in ("e4m3", "e5m2"):
        return (f32_to_e4m3 if element == "e4m3" else f32_to_e5m2)(x.astype(np.float32)).astype(np.uint8)
    return x.astype(np.int8).view(np.uint8)


def numbers(rng: np.random.Generator, shape: tuple[int, ...], element: str) -> np.ndarray:
    return rng.integers(0, 9, shape) if element == "u8" else rng.integers(-4, 5, shape)


def d_place(m: int, n: int, group: int = 1, ws: bool = False, lane: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(lane, column) of D in one block, [m / group, n]."""
    row, column = np.mgrid[: m // group, :n]
    if (ws and m < 128) or (group, m) == (2, 128):
        parts = 128 // (m // group)
        return row + m // group * (column // (n // parts)), column % (n // parts)
    if m == 64:
        return row % 16 + row // 16 * 32 + lane, column
    return row, column


class Case:
    """Operands of one instruction and what D must become."""

    def __init__(self, m: int, n: int, element: str = "f16", group: int = 1, ws: bool = False, **how: Any) -> None:
        rng = np.random.default_rng(m * 1000 + n)
        self.kind, self.code = ELEMENTS[element]
        size = {"f16": 2, "tf32": 4}.get(self.kind, 1)
        self.m, self.n, self.k, self.group, self.ws = m, n, 32 // size, group, ws
        self.a, self.b = (numbers(rng, (rows, self.k), element) for rows in (m, n))
        self.raw_a, self.raw_b = encode(self.a, element), encode(self.b, element)
        self.swizzles = how.get("swizzles", ("128B", "128B"))
        self.major = how.get("major", 0)
        self.lane = how.get("lane", 0)
        self.columns = how.get("columns", max(32, n))
        self.d_code = how.get("d", 2 if self.kind == "i8" else 1)
        self.descriptor = instruction_descriptor(
            m, n, self.d_code, self.code, self.code, how.get("negate", 0), self.major, how.get("more", 0)
        )
        self.init = self.pack(rng.integers(-8, 9, (group * LANES, self.columns)))

    def pack(self, x: np.ndarray) -> np.ndarray:
        """Integers as D's cells."""
        if self.d_code == 0:
            return x.astype(np.float16).view(np.uint16).astype(np.uint32)
        return x.astype(np.int32 if self.d_code == 2 else np.float32).view(np.uint32)

    def unpack(self, cells: np.ndarray) -> np.ndarray:
        if self.d_code == 0:
            return cells.astype(np.uint16).view(np.float16).astype(np.float64)
        return cells.view(np.int32 if self.d_code == 2 else np.float32).astype(np.float64)

    def images(self) -> tuple[np.ndarray, int, int]:
        """Shared memory of each block with A, then B, and their matrix descriptors."""
        blocks, found = [], []
        for r in range(self.group):
            rows_a, rows_b = self.m // self.group, self.n // self.group
            parts: list[np.ndarray] = []
            for raw, rows, swizzle, bit in (
                (self.raw_a, rows_a, self.swizzles[0], 1),
                (self.raw_b, rows_b, self.swizzles[1], 2),
            ):
                data, leading, stride = place(raw[r * rows : (r + 1) * rows], swizzle, bool(self.major & bit))
                start = IMAGE + sum(len(p) for p in parts)
                parts.append(np.append(data, np.zeros(-len(data) % 1024, np.uint8)))
                found.append(matrix_descriptor(start, leading, stride, swizzle))
            blocks.append(np.concatenate(parts))
        return np.stack(blocks), found[0], found[1]

    def expected(self, product: np.ndarray, onto: float = 1.0, base: int = 0) -> np.ndarray:
        """All of tensor memory: D where it belongs, the rest as it was."""
        cells = self.init.copy()
        for r in range(self.group):
            rows = self.m // self.group
            lane, column = d_place(self.m, self.n, self.group, self.ws, self.lane)
            where = (r * LANES + lane, base + column)
            cells[where] = self.pack(product[r * rows : (r + 1) * rows] + onto * self.unpack(cells[where]))
        return cells

    def text(self, operands: str = "%ad, %bd, %id, %onto", d: str = "%d", before: str = "", ws: str = "") -> str:
        ws = ".ws" if self.ws else ws
        at = f"add.u32 %d, %d, {self.lane << 16};" if self.lane else ""
        back = f"sub.u32 %d, %d, {self.lane << 16};" if self.lane else ""
        line = f"tcgen05.mma{ws}.cta_group::{self.group}.kind::{self.kind} [{d}], {operands};"
        return frame(f"{before}{at}{line}{back}", columns=self.columns, group=self.group)

    def run(self, onto: bool = True, text: str | None = None, options: Options | None = None) -> np.ndarray:
        image, a, b = self.images()
        out, report = run_frame(text or self.text(), self.init, image, (a, b, self.descriptor), onto, options=options)
        assert not report.lints
        return out

    def check(self, **how: Any) -> None:
        assert (self.run() == self.expected(self.a @ self.b.T, **how)).all()


@pytest.mark.parametrize("element", ELEMENTS)
def test_elements(element: str) -> None:
    Case(128, 32, element).check()


@pytest.mark.parametrize(("m", "n", "lane"), [(64, 8, 0), (64, 32, 16), (64, 256, 0), (128, 16, 0), (128, 256, 0)])
def test_shapes_of_one_block(m: int, n: int, lane: int) -> None:
    Case(m, n, lane=lane).check()


@pytest.mark.parametrize(("m", "n"), [(32, 64), (32, 128), (64, 64), (64, 256), (128, 64)])
def test_weight_stationary(m: int, n: int) -> None:
    Case(m, n, ws=True).check()


@pytest.mark.parametrize(
    ("m", "n", "element"), [(256, 64, "f16"), (128, 64, "f16"), (256, 32, "e4m3"), (128, 256, "bf16")]
)
def test_pair_of_blocks(m: int, n: int, element: str) -> None:
    Case(m, n, element, group=2).check()


@pytest.mark.parametrize("swizzle", ["none", "32B", "64B", "128B"])
@pytest.mark.parametrize("major", [0, 1, 2, 3])
def test_swizzles_and_majors(swizzle: str, major: int) -> None:
    """A has 128 rows: several atoms of every swizzle along either direction."""
    Case(128, 64, swizzles=(swizzle, "128B"), major=major).check()
    Case(128, 64, "e5m2", swizzles=("64B", swizzle), major=major).check()


def test_mn_major_tf32() -> None:
    """32-bit elements exist with the 32-byte atom only (9.7.16.10.3)."""
    Case(128, 64, "tf32", swizzles=("128B_ATOM32B", "128B_ATOM32B"), major=3).check()
    with pytest.raises(DescriptorError, match="allowed: 128B_ATOM32B only"):
        Case(128, 64, "tf32", major=1).check()
    with pytest.raises(DescriptorError, match="128B_ATOM32B"):
        Case(128, 64, swizzles=("128B_ATOM32B", "128B"), major=1).check()


def test_accumulator_forms() -> None:
    Case(128, 32, d=0).check()
    Case(64, 32, "e4m3", d=0).check()
    case = Case(128, 32)
    assert (case.run(onto=False) == case.expected(case.a @ case.b.T, onto=0.0)).all()
    case = Case(128, 32, negate=1)
    assert (case.run() == case.expected(-(case.a @ case.b.T))).all()
    case = Case(128, 32, negate=3)
    assert (case.run() == case.expected(case.a @ case.b.T)).all()
    case = Case(128, 32)
    assert (case.run(text=case.text("%ad, %bd, %id, %onto, 3")) == case.expected(case.a @ case.b.T, 0.125)).all()


def test_integers_saturate_or_wrap() -> None:
    for more, want in ((1 << 3, 2**31 - 1), (0, -(2**31) + 31)):
        case = Case(128, 32, "s8", more=more)
        case.raw_a[:], case.raw_b[:] = 1, 1
        case.init[:] = 2**31 - 1
        assert (case.run().view(np.int32) == want).all()


@pytest.mark.parametrize("group", [1, 2])
def test_disabled_lanes(group: int) -> None:
    case = Case(128 * group, 32, group=group)
    words = [0xFFFF, 0, 0xF0F0F0F0, 1 << 31, 0, 0xFFFFFFFF, 2, 4][: 4 * group]
    moves = "".join(f"mov.b32 %v{k}, {w};" for k, w in enumerate(words))
    vector = "{" + ", ".join(f"%v{k}" for k in range(4 * group)) + "}"
    out = case.run(text=case.text(f"%ad, %bd, %id, {vector}, %onto", before=moves))
    off = np.array([w >> bit & 1 for w in words for bit in range(32)], bool)
    want = np.where(off[:, None], case.init, case.expected(case.a @ case.b.T))
    assert (out == want).all()


@pytest.mark.parametrize(
    ("m", "n", "element", "group", "lane"),
    [
        (128, 32, "f16", 1, 0),
        (64, 32, "bf16", 1, 0),
        (64, 32, "f16", 1, 16),
        (128, 32, "tf32", 1, 0),
        (128, 32, "e4m3", 1, 0),
        (256, 32, "f16", 2, 0),
        (128, 64, "f16", 2, 0),
    ],
)
def test_a_in_tensor_memory(m: int, n: int, element: str, group: int, lane: int) -> None:
    """A stands in 8 columns behind D, a row to a lane; M=128 of a pair needs it in both halves of the lanes."""
    case = Case(m, n, element, group, lane=lane, columns=2 * n)
    words = case.raw_a.view(np.uint32)
    rows = m // group
    for r in range(group):
        own = words[r * rows : (r + 1) * rows]
        lanes = d_place(m, n, group, lane=lane)[0][:, 0]
        for copy in (0, 64) if (m, group) == (128, 2) else (0,):
            case.init[r * LANES + lanes + copy, n : n + 8] = own
    at = f"add.u32 %v0, %d, {n + (lane << 16)};"
    text = case.text("[%v0], %bd, %id, %onto", before=at)
    assert (case.run(text=text) == case.expected(case.a @ case.b.T)).all()


def test_steps_along_k_accumulate_in_order() -> None:
    """Four instructions step through one 128-byte swizzled row of K=64, as every compiler emits them."""
    rng = np.random.default_rng(3)
    case = Case(128, 64)
    case.a, case.b = rng.integers(-4, 5, (128, 64)), rng.integers(-4, 5, (64, 64))
    case.raw_a, case.raw_b = encode(case.a, "f16"), encode(case.b, "f16")
    step = "add.u64 %ad, %ad, 2; add.u64 %bd, %bd, 2; setp.eq.u32 %onto, 0, 0;"
    line = "tcgen05.mma.cta_group::1.kind::f16 [%d], %ad, %bd, %id, %onto;"
    text = frame(step.join([line] * 4), columns=64)
    assert (case.run(onto=False, text=text) == case.expected(case.a @ case.b.T, onto=0.0)).all()
    for schedule in ("latest", "random"):
        options = Options(strict=True, schedule=schedule)
        assert (case.run(True, text, options) == case.expected(case.a @ case.b.T)).all()


def test_another_accumulator_is_not_ordered_in_strict_mode() -> None:
    """The pipeline keeps the order of one accumulator, shape and kind (9.7.16.6.2); by default all are in order."""
    case = Case(128, 32, columns=64)
    line = "tcgen05.mma.cta_group::1.kind::f16 [{}], %ad, %bd, %id, %onto;"
    text = frame(line.format("%d") + "add.u32 %v0, %d, 16;" + line.format("%v0"), columns=64)
    with pytest.raises(RaceError, match=r"a write by tcgen05\.mma"):
        case.run(text=text)
    case.run(text=text, options=Options())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"descriptor": instruction_descriptor(128, 264)}, "N is 264"),
        ({"descriptor": instruction_descriptor(96, 32)}, "M is 96"),
        ({"descriptor": instruction_descriptor(128, 32, d=3)}, "format 3 of D"),
        ({"descriptor": instruction_descriptor(128, 32, a=4)}, "format 4 of A"),
        ({"descriptor": instruction_descriptor(128, 32, more=1 << 23)}, "reserved bits 23-23"),
        ({"descriptor": instruction_descriptor(128, 32, more=1 << 30)}, "maximum shift"),
        ({"a": 1 << 53}, "reserved bits 53-60"),
        ({"a": -(1 << 46)}, "bits 46-48"),
        ({"b": 1 << 61}, "B: .*swizzle code 3"),
        ({"b": 1 << 52}, "bit 52"),
    ],
)
def test_descriptors_are_checked(change: dict[str, int], says: str) -> None:
    case = Case(128, 32)
    image, a, b = case.images()
    descriptors = (a + change.get("a", 0), b + change.get("b", 0), change.get("descriptor", case.descriptor))
    with pytest.raises(DescriptorError, match=says):
        run_frame(case.text(), case.init, image, descriptors)


def test_addresses_are_checked() -> None:
    case = Case(128, 32)
    image, _, b = case.images()
    far = matrix_descriptor(IMAGE + image.shape[1], 16, 1024)
    with pytest.raises(BoundsError, match="shared bytes"):
        run_frame(case.text(), case.init, image, (far, b, case.descriptor))
    for move, error, says in (
        (32, TensorMemoryError, "column 32 is not allocated; allocated: 0..31"),
        (500, TensorMemoryError, "has 128 lanes and 512 columns"),
        (16 << 16, DescriptorError, "D: tensor memory lane offset is 16"),
    ):
        text = case.text(d="%v0", before=f"add.u32 %v0, %d, {move};")
        with pytest.raises(error, match=says):
            case.run(text=text)
    text = Case(64, 32, columns=64).text("[%v0], %bd, %id, %onto", before=f"add.u32 %v0, %d, {32 + (16 << 16)};")
    with pytest.raises(DescriptorError, match="A: lane offset 16, D has 0"):
        Case(64, 32, columns=64).run(text=text)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("tcgen05.mma.sp.cta_group::1.kind::f16 [%d], %ad, %bd, [%v0], %id, %onto;", "sparse A"),
        (
            "tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale [%d], %ad, %bd, %id, [%v0], [%v1], %onto;",
            "block scaling",
        ),
        ("tcgen05.mma.ws.cta_group::1.kind::f16 [%d], %ad, %bd, %id, %onto, %ad;", "zero column mask"),
        ("tcgen05.mma.cta_group::1.kind::f16.ashift [%d], [%v0], %bd, %id, %onto;", "ashift"),
        ("tcgen05.mma.cta_group::1.kind::i8 [%d], %ad, %bd, %id, %onto, 1;", "scale-input-d 1 with .kind::i8"),
        (
            "tcgen05.mma.cta_group::1.kind::f16 [%d], %ad, %bd, %id, {%v0, %v1}, %onto;",
            "vector of 2 words; 4 are needed",
        ),
    ],
)
def test_forms_without_a_meaning_are_named(line: str, says: str) -> None:
    with pytest.raises(UnknownInstructions, match=says):
        load(frame(line))


def test_collector_modifiers_change_nothing() -> None:
    case = Case(128, 32)
    text = case.text().replace("kind::f16 [", "kind::f16.collector::a::lastuse [")
    assert (case.run(text=text) == case.expected(case.a @ case.b.T)).all()


def test_sub_byte_elements_are_refused() -> None:
    case = Case(128, 32, "e4m3")
    case.descriptor = instruction_descriptor(128, 32, a=5)
    with pytest.raises(DescriptorError, match="elements of A are e2m1"):
        case.run()


def test_accumulating_onto_nothing() -> None:
    """Columns that nothing wrote: fine for D = A * B, a finding for D = A * B + D."""
    case = Case(128, 32)
    lines = [line for line in case.text().splitlines() if "tcgen05.st" not in line]
    text = "\n".join(lines)
    assert (case.run(onto=False, text=text) == case.expected(case.a @ case.b.T, onto=0.0)).all()
    with pytest.raises(UninitialisedError, match="accumulated onto before anything wrote it"):
        case.run(onto=True, text=text)


def test_every_finding_has_its_line() -> None:
    case = Case(128, 32)
    case.descriptor = 0
    with pytest.raises(Finding, match=r"line \d+: .*tcgen05\.mma"):
        case.run()
