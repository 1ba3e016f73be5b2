"""wgmma: products of every type, layout and operand source, and what a broken rule is answered with. PTX ISA 9.7.15."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest

from .. import Device, Options, formats, layouts, load
from ..errors import (
    BoundsError,
    ConvergenceError,
    DeadlockError,
    DescriptorError,
    EmulatorError,
    PoisonError,
    ProxyError,
    RaceError,
    UnknownInstructions,
)

SHARED = 49152
B_OFFSET = 16384
BYTES = {"f16": 2, "bf16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1, "s8": 1, "u8": 1}
SWIZZLES = {"none": 0, "128B": 1, "64B": 2, "32B": 3}
WIDTH = {"128B": 128, "64B": 64, "32B": 32}


class Case(NamedTuple):
    n: int
    d: str
    a: str
    b: str
    swizzle: str = "128B"
    a_mn: bool = False
    b_mn: bool = False
    negative: tuple[int, int] = (1, 1)
    scale_d: bool = True
    registers: bool = False  # A in registers
    mods: str = ""

    @property
    def k(self) -> int:
        return 32 // BYTES[self.a]

    @property
    def name(self) -> str:
        return f"wgmma.mma_async.sync.aligned.m64n{self.n}k{self.k}{self.mods}.{self.d}.{self.a}.{self.b}"

    @property
    def tail(self) -> str:
        scales = [] if self.a in ("s8", "u8") else list(self.negative)
        majors = ([] if self.registers else [int(self.a_mn)]) + [int(self.b_mn)] if BYTES[self.a] == 2 else []
        return "".join(f", {x}" for x in (*scales, *majors))


def codes(x: np.ndarray, kind: str) -> np.ndarray:
    """Raw elements, unsigned of the element's size."""
    if kind in ("s8", "u8"):
        return (x.astype(np.int64) & 0xFF).astype(np.uint8)
    if kind == "tf32":
        return x.astype(np.float32).view(np.uint32)
    return formats.encode(x, kind)


def fields(case: Case, rows: int, mn: bool) -> tuple[int, int]:
    """(leading, stride) bytes of a compact layout of one instruction's operand."""
    size = BYTES[case.a]
    if case.swizzle == "none":
        other = (rows * 16, 128)  # K-major: pieces of K side by side, 8 rows each 128 bytes
        return (128, 256) if mn else other
    width = WIDTH[case.swizzle]
    # MN-major: a column of K/8 atoms (stride), then the next atom along M or N (leading).
    return (case.k // 8 * 8 * width, 8 * width) if mn and size == 2 else (0, 8 * width)


def descriptor(case: Case, start: int, rows: int, mn: bool) -> int:
    leading, stride = fields(case, rows, mn)
    return start >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | SWIZZLES[case.swizzle] << 62


def place(image: np.ndarray, matrix: np.ndarray, bits: int, mn: bool) -> None:
    """Writes the elements [rows, k] of an operand where its descriptor says."""
    size = matrix.dtype.itemsize
    decoded = layouts.decode_matrix_descriptor(bits, "wgmma")
    at = layouts.matrix_addresses(decoded, *matrix.shape, size, mn)
    raw = np.ascontiguousarray(matrix).view(np.uint8).reshape(*matrix.shape, size)
    for byte in range(size):
        image[at + byte] = raw[..., byte]


def accumulator(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Row and column of value v of thread t, [n / 2, 128]."""
    v, t = np.indices((n // 2, 128))
    return 16 * (t // 32) + t % 32 // 4 + 8 * (v // 2 % 2), 8 * (v // 4) + 2 * (t % 4) + v % 2


def d_registers(matrix: np.ndarray, kind: str) -> np.ndarray:
    """[64, n] into uint32 [registers, 128]."""
    row, column = accumulator(matrix.shape[1])
    spread = matrix[row, column]
    if kind == "f16":
        halves = formats.encode(spread.astype(np.float32), "f16").astype(np.uint32).reshape(-1, 2, 128)
        return halves[:, 0] | halves[:, 1] << np.uint32(16)
    return spread.astype(np.float32 if kind == "f32" else np.int32).view(np.uint32)


def d_matrix(registers: np.ndarray, kind: str, n: int) -> np.ndarray:
    if kind == "f16":
        halves = np.stack([registers & np.uint32(0xFFFF), registers >> np.uint32(16)], 1).reshape(-1, 128)
        spread = formats.decode(halves, "f16")
    else:
        spread = registers.view(np.float32 if kind == "f32" else np.int32)
    found = np.zeros((64, n), spread.dtype)
    found[accumulator(n)] = spread
    return found


def a_registers(matrix: np.ndarray) -> np.ndarray:
    """[64, k] raw elements into uint32 [4, 128]: register q holds 4 bytes of row 16 w + l / 4 + 8 (q % 2)."""
    words = np.ascontiguousarray(matrix).view(np.uint32)  # [64, 8]
    q, t = np.indices((4, 128))
    return words[16 * (t // 32) + t % 32 // 4 + 8 * (q % 2), t % 4 + 4 * (q // 2)]


FENCE = "wgmma.fence.sync.aligned;"
COMMIT = "wgmma.commit_group.sync.aligned;"
WAIT = "wgmma.wait_group.sync.aligned 0;"


def names(first: int, count: int) -> str:
    return "{" + ", ".join(f"%r{first + n}" for n in range(count)) + "}"


def text(registers: int, body: list[str], fence_proxy: bool = True) -> str:
    """A kernel (image, c, a, out, da, db, scale): %r100.. = D, %r20..23 = A, %d1, %d2 = descriptors, %p0 = scale-d.

    %r3 = shared address of this thread's first word, %r4 = warp.
    """
    lines = [
        "mov.u32 %r0, %tid.x; mul.wide.u32 %d0, %r0, 4; shr.u32 %r4, %r0, 5; shl.b32 %r3, %r0, 2;",
        "ld.param.u64 %d3, [p0]; add.s64 %d3, %d3, %d0; ld.param.u64 %d4, [p1]; add.s64 %d4, %d4, %d0;",
        "ld.param.u64 %d5, [p2]; add.s64 %d5, %d5, %d0; ld.param.u64 %d6, [p3]; add.s64 %d6, %d6, %d0;",
        "ld.param.u64 %d1, [p4]; ld.param.u64 %d2, [p5]; ld.param.u32 %r1, [p6]; setp.ne.u32 %p0, %r1, 0;",
        "mov.u32 %r5, mem; add.s32 %r3, %r3, %r5; setp.eq.u32 %p1, %r4, 0; setp.lt.u32 %p2, %r0, 7;",
        *(f"ld.global.b32 %r6, [%d3+{at}]; st.shared.b32 [%r3+{at}], %r6;" for at in range(0, SHARED, 512)),
        *(f"ld.global.b32 %r{100 + r}, [%d4+{512 * r}];" for r in range(registers)),
        *(f"ld.global.b32 %r{20 + r}, [%d5+{512 * r}];" for r in range(4)),
        "fence.proxy.async.shared::cta;" if fence_proxy else "",
        "bar.sync 0;",
        *body,
        *(f"st.global.b32 [%d6+{512 * r}], %r{100 + r};" for r in range(registers)),
    ]
    params = ", ".join([*(f".param .u64 p{n}" for n in range(6)), ".param .u32 p6"])
    return (
        f".version 9.0\n.target sm_90a\n.address_size 64\n.visible .entry k({params}) {{\n"
        f".reg .b32 %r<400>; .reg .b64 %d<20>; .reg .pred %p<4>; .shared .align 1024 .b8 mem[{SHARED}];\n"
        + "\n".join(lines)
        + "\nret; }\n"
    )


def instruction(case: Case, first: int = 100, a: str = "%d1", b: str = "%d2", scale: str = "%p0") -> str:
    count = case.n // (4 if case.d == "f16" else 2)
    left = names(20, 4) if case.registers else a
    return f"{case.name} {names(first, count)}, {left}, {b}, {scale}{case.tail};"


def execute(
    case: Case,
    body: list[str] | None = None,
    options: Options | None = None,
    fence_proxy: bool = True,
    change: tuple[int, int] = (0, 0),
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """A [64, k], B [k, n], C and D [64, n] of a run on small integers. `change` is XORed onto the descriptors."""
    rng = np.random.default_rng(case.n)
    low = [0 if kind == "u8" else -4 for kind in (case.a, case.b)]
    a, b = rng.integers(low[0], 5, (64, case.k)), rng.integers(low[1], 5, (case.k, case.n))
    c = rng.integers(-8, 9, (64, case.n))
    image = np.zeros(SHARED, np.uint8)
    da, db = descriptor(case, 0, 64, case.a_mn), descriptor(case, B_OFFSET, case.n, case.b_mn)
    place(image, codes(a, case.a), da, case.a_mn)
    place(image, codes(b.T, case.b), db, case.b_mn)
    device = Device()
    registers = d_registers(c, case.d)
    out = device.empty(registers.shape, np.uint32)
    fragments = a_registers(codes(a, case.a))
    args: list[Any] = [*map(device.upload, (image, registers, fragments)), out]
    args += [da ^ change[0], db ^ change[1], int(case.scale_d)]
    ptx = text(len(registers), body or [FENCE, instruction(case), COMMIT, WAIT], fence_proxy)
    device.launch(load(ptx), block=(128,), args=args, options=options)
    return a, b, c, d_matrix(out.array, case.d, case.n)


PRODUCTS = [
    *(Case(n, "f32", "f16", "f16") for n in (8, 24, 64, 256)),
    *(Case(64, "f32", "bf16", "bf16", s) for s in SWIZZLES),
    *(Case(128, "f32", "f16", "f16", s, a_mn=True, b_mn=True) for s in ("128B", "64B", "32B")),
    Case(16, "f32", "bf16", "bf16", "none", a_mn=True, b_mn=True),
    Case(64, "f32", "f16", "f16", b_mn=True, negative=(1, -1)),
    Case(64, "f32", "f16", "f16", a_mn=True, negative=(-1, 1)),
    Case(64, "f32", "f16", "f16", negative=(-1, -1), scale_d=False),
    Case(32, "f16", "f16", "f16"),
    Case(16, "f16", "e4m3", "e5m2", "64B", scale_d=False),
    Case(64, "f32", "e5m2", "e4m3", "32B"),
    Case(48, "f32", "tf32", "tf32", "none"),
    Case(32, "s32", "s8", "u8"),
    Case(96, "s32", "u8", "s8", mods=".satfinite"),
    Case(64, "f32", "f16", "f16", registers=True),
    Case(128, "f32", "bf16", "bf16", b_mn=True, registers=True, negative=(-1, 1)),
    Case(8, "f16", "f16", "f16", registers=True, scale_d=False),
    Case(64, "f32", "e4m3", "e4m3", registers=True),
    Case(64, "f32", "tf32", "tf32", registers=True),
    Case(16, "s32", "s8", "s8", registers=True),
]


@pytest.mark.parametrize("schedule", ["earliest", "latest"])
@pytest.mark.parametrize("case", PRODUCTS, ids=str)
def test_product(case: Case, schedule: str) -> None:
    a, b, c, d = execute(case, options=Options(schedule=schedule))
    sign = case.negative[0] * case.negative[1]
    np.testing.assert_array_equal(d, sign * (a @ b) + (c if case.scale_d else 0))


BASE = Case(64, "f32", "f16", "f16")
ONE = instruction(BASE)


@pytest.mark.parametrize("schedule", ["earliest", "latest", "random"])
def test_chain_and_groups(schedule: str) -> None:
    """Two groups on the same accumulators, a third on others: only the last may be in flight after wait_group 1."""
    other = instruction(BASE, 140, scale="0")
    body = [FENCE, ONE, instruction(BASE, scale="1"), COMMIT, ONE, COMMIT, other, COMMIT]
    body += ["wgmma.wait_group.sync.aligned 1;", "add.f32 %r100, %r100, %r100;", WAIT, "add.f32 %r101, %r101, %r140;"]
    a, b, c, d = execute(BASE, body, Options(schedule=schedule, seed=3))
    row, column = accumulator(64)
    want = (3 * (a @ b) + c)[row, column]
    want[0] *= 2
    want[1] += (a @ b)[row, column][0]
    np.testing.assert_array_equal(d[row, column], want)


def test_random_schedules_agree() -> None:
    for seed in range(5):
        a, b, c, d = execute(BASE, options=Options(schedule="random", seed=seed))
        np.testing.assert_array_equal(d, a @ b + c)


def test_accumulators_in_any_order() -> None:
    """Registers need not be neighbours."""
    case = Case(8, "f32", "f16", "f16")
    shuffled = f"{case.name} {{%r101, %r103, %r100, %r102}}, %d1, %d2, %p0{case.tail};"
    a, b, c, d = execute(case, [FENCE, shuffled, COMMIT, WAIT])
    row, column = accumulator(8)
    order = [1, 3, 0, 2]
    got, old = d[row, column], c[row, column]
    np.testing.assert_array_equal(got[order], (a @ b)[row, column] + old[order])


def test_late_read_sees_old_registers() -> None:
    """Under the latest schedule the work is done at the wait."""
    body = [FENCE, ONE, COMMIT, "mov.b32 %r30, %r100;", WAIT, "mov.b32 %r100, %r30;"]
    a, b, c, d = execute(BASE, body, Options(schedule="latest", severity={"poison": "ignore"}))
    np.testing.assert_array_equal(d[0, 0], c[0, 0])
    np.testing.assert_array_equal(d[0, 1], (a @ b + c)[0, 1])


# Findings -------------------------------------------------------------------------------------------------------------
LOOKAHEAD = "ld.shared.b32 %r6, [%r3];"
OVERWRITE = "st.shared.b32 [%r3], 0;"
FINDINGS: dict[str, tuple[list[str], type[EmulatorError], str]] = {
    "no fence": ([ONE, COMMIT, WAIT], RaceError, "first wgmma"),
    "written after the fence": ([FENCE, "mov.b32 %r102, 0;", ONE, COMMIT, WAIT], RaceError, r"d\[2\]"),
    "written before the second": (
        [FENCE, ONE, COMMIT, WAIT, "mov.b32 %r131, 0;", ONE, COMMIT, WAIT],
        RaceError,
        r"registers d\[31\] were written",
    ),
    "read before the wait": ([FENCE, ONE, COMMIT, "mov.b32 %r6, %r100;", WAIT], PoisonError, "still owns"),
    "not committed": ([FENCE, ONE, WAIT, "mov.b32 %r6, %r100;"], PoisonError, "still owns"),
    "one group too many in flight": (
        [FENCE, ONE, COMMIT, "wgmma.wait_group.sync.aligned 1;", "mov.b32 %r6, %r100;", WAIT],
        PoisonError,
        "still owns",
    ),
    "another shape": (
        [FENCE, ONE, instruction(Case(32, "f32", "f16", "f16")), COMMIT, WAIT],
        PoisonError,
        r"d\[0\], d\[1\], d\[2\], d\[3\] and 12 more",
    ),
    "overwritten before the wait": ([FENCE, ONE, COMMIT, OVERWRITE, WAIT], RaceError, "wgmma"),
    "one warp less": ([FENCE, f"@!%p1 {ONE}", COMMIT, WAIT], DeadlockError, "3 of 4 warps"),
    "one warp less and no wait": ([FENCE, f"@!%p1 {ONE}", COMMIT, "ret;"], ConvergenceError, "3 of 4 warps"),
    "a part of a warp": ([FENCE, f"@%p2 {ONE}", COMMIT, WAIT], ConvergenceError, "7 of 32"),
    "scale-d differs": (
        ["setp.lt.u32 %p0, %r0, 32;", FENCE, ONE, COMMIT, WAIT],
        DescriptorError,
        "scale-d",
    ),
    "descriptors of threads differ": (
        ["cvt.u64.u32 %d7, %r0; add.s64 %d1, %d1, %d7;", FENCE, ONE, COMMIT, WAIT],
        DescriptorError,
        "differ between threads",
    ),
    "descriptors of warps differ": (
        ["cvt.u64.u32 %d7, %r4; add.s64 %d1, %d1, %d7;", FENCE, ONE, COMMIT, WAIT],
        DescriptorError,
        "the rest of warps 0..3",
    ),
}


@pytest.mark.parametrize("name", FINDINGS)
def test_finding(name: str) -> None:
    body, error, message = FINDINGS[name]
    with pytest.raises(error, match=message):
        execute(BASE, body)


def test_another_instruction_in_one_warp() -> None:
    body = [FENCE, "@%p1 bra one;", ONE, "bra.uni done;", "one:", ONE, "done:", COMMIT, WAIT]
    with pytest.raises(ConvergenceError, match="another wgmma than the rest"):
        execute(BASE, body)


def test_generic_writes_need_a_proxy_fence() -> None:
    with pytest.raises(ProxyError, match=r"fence\.proxy\.async"):
        execute(BASE, fence_proxy=False)


def test_overwriting_after_the_wait() -> None:
    """What a warp waited for is complete in all four: the others' reads as well."""
    execute(BASE, [FENCE, ONE, COMMIT, WAIT, OVERWRITE])
    execute(BASE, [FENCE, ONE, COMMIT, LOOKAHEAD, WAIT])


def test_a_fragment_of_another_wgmma_is_shared() -> None:
    case = Case(64, "f32", "f16", "f16", registers=True)
    second = instruction(case, 140, scale="0")
    a, b, c, d = execute(case, [FENCE, instruction(case), second, COMMIT, WAIT])
    np.testing.assert_array_equal(d, a @ b + c)
    overlap = instruction(case, 20, scale="0")
    with pytest.raises(PoisonError, match="another role"):
        execute(case, [FENCE, instruction(case), overlap, COMMIT, WAIT])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ((1 << 52, 0), DescriptorError, "reserved bits 52-61"),
        ((0, 0x3FC0), BoundsError, "shared bytes"),
    ],
)
def test_bad_descriptor(change: tuple[int, int], error: type[EmulatorError], message: str) -> None:
    with pytest.raises(error, match=message):
        execute(BASE, change=change)


@pytest.mark.parametrize(
    ("name", "registers", "tail", "why"),
    [
        ("m64n8k16.f16.bf16.bf16", 2, ", 1, 1, 0, 0", "no such wgmma"),
        ("m64n12k16.f32.f16.f16", 6, ", 1, 1, 0, 0", "multiples of 8"),
        ("m64n40k32.s32.s8.s8", 20, "", "multiples of 16"),
        ("m64n8k8.f32.f16.f16", 4, ", 1, 1, 0, 0", "K = 8"),
        ("m64n8k16.f32.f16.f16", 8, ", 1, 1, 0, 0", "needs 4"),
        ("m64n8k16.f32.f16.f16", 4, ", 1, 1", "4 are needed"),
        ("m64n8k16.f32.f16.f16", 4, ", 2, 1, 0, 0", "scales are 1 or -1"),
        ("m64n8k256.s32.b1.b1", 4, "", "b1"),
    ],
)
def test_refused(name: str, registers: int, tail: str, why: str) -> None:
    with pytest.raises(UnknownInstructions, match=why):
        load(text(4, [f"wgmma.mma_async.sync.aligned.{name} {names(100, registers)}, %d1, %d2, %p0{tail};"]))


def test_sparse_is_refused() -> None:
    form = f"wgmma.mma_async.sp.sync.aligned.m64n8k32.f32.f16.f16 {names(100, 4)}, %d1, %d2, %r6, 0, %p0, 1, 1, 0, 0;"
    with pytest.raises(UnknownInstructions, match="sparse"):
        load(text(4, [form]))
