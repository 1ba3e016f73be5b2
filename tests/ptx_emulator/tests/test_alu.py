"""Instructions that only touch registers, each against a scalar model in Python integers and fractions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ..instruction_set import load_all
from ..lower.code import Code
from ..parse import parse
from ..registry import Unsupported, find

WIDTH = 128
ROWS = 8
_FILES = {"p": bool, "h": np.uint16, "w": np.uint32, "d": np.uint64}
_LISTS = {"u16": "h", "s16": "h", "f16": "h", "u32": "w", "s32": "w", "f32": "w", "u64": "d", "s64": "d", "f64": "d"}
_HEAD = """.version 9.0
.target sm_100a
.address_size 64
.visible .entry k() {
.reg .pred %p<8>; .reg .b16 %h<8>; .reg .b32 %r<8>; .reg .b64 %d<8>; .reg .b128 %q<8>;
"""


@pytest.fixture(autouse=True)
def _numbers_of_its_own() -> None:
    """A test's numbers must not depend on which tests ran before it in the same process."""
    RNG.bit_generator.state = np.random.default_rng(0).bit_generator.state


class View:
    """Registers p0..p7, h0.., r0.., d0.., q0.. of `WIDTH` threads: what generated code needs of a warp."""

    class Cta:
        rank = 1

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)

    def __init__(self) -> None:
        self.width = WIDTH
        self.cta = self.Cta()
        self.carry = np.zeros(WIDTH, bool)
        self.files = {name: np.zeros((ROWS, WIDTH), dtype) for name, dtype in _FILES.items()}
        self.files["q"] = np.zeros((ROWS, WIDTH, 2), np.uint64)
        for name, file in _LISTS.items():
            dtype = np.dtype({"u": "u", "s": "i", "f": "f"}[name[0]] + str(int(name[1:]) // 8))
            setattr(self, name, list(self.files[file].view(dtype)))
        self.p, self.q = list(self.files["p"]), list(self.files["q"])

    def special(self, name: str) -> np.ndarray:
        return np.arange(self.width, dtype=np.uint32)

    def address(self, space: str, offset: int) -> int:
        return {"shared": 0x1000, "global": 0x7F00_0000_0000}[space] + offset

    def window(self, space: str) -> int:
        return {"shared": 0x0100_0000_0000, "param": 0x0300_0000_0000}.get(space, 0)


def run(text: str, mask: np.ndarray | None = None, **registers: np.ndarray) -> View:
    """Executes instructions on a new view whose named registers hold the given bits."""
    load_all()
    kernel = parse(_HEAD + text + "\nret; }").kernels["k"]
    view = View()
    for name, values in registers.items():
        file = {"r": "w"}.get(name[0], name[0])
        row = view.files[file][int(name[1:])]
        row[...] = values if file == "q" or values.dtype == bool else values.view(row.dtype)
    code = Code(kernel, mask is not None)
    for i in kernel.instructions[:-1]:
        code.begin(i)
        generator = find(i)
        assert callable(generator), i.name
        generator(code, i)
    function: Any = code.build("test")
    with np.errstate(all="ignore"):
        function(view, mask)
    return view


RNG = np.random.default_rng(5)
_EDGES = {
    16: "0 1 2 7fff 8000 8001 ffff fffe 00ff 7c00 fc00 7e01 3c00 03ff 0400 7bff",
    32: "0 1 2 7fffffff 80000000 80000001 ffffffff 1f 20 21 ff 100 ffff 3f800000 7f800000 ff800000 7fc12345 00800000"
    " 007fffff 7f7fffff bf800000 4f000000 5f000000 3f000000",
    64: "0 1 2 7fffffffffffffff 8000000000000000 8000000000000001 ffffffffffffffff 1f 3f 40 41 100000000 ffffffff"
    " 3ff0000000000000 7ff0000000000000 fff0000000000000 7ff8000000001234 0010000000000000 000fffffffffffff",
}


def bits(size: int) -> np.ndarray:
    """[WIDTH] of random bits, small numbers and edge cases in random places."""
    x = RNG.integers(0, 2**size, WIDTH, dtype=np.uint64)
    x[:20] = RNG.integers(0, 40, 20)
    edges = np.array([int(e, 16) for e in _EDGES[size].split()], np.uint64)
    x[20 : 20 + len(edges)] = edges
    x[50 : 50 + len(edges)] = RNG.permutation(edges)
    return RNG.permutation(x).astype(np.dtype(f"u{size // 8}"))


def signed(x: int, size: int) -> int:
    return x - (1 << size) if x >> (size - 1) & 1 else x


_NAMES = {16: "h", 32: "r", 64: "d"}


def check(form: str, sizes: str, model: Callable[..., int], *values: np.ndarray) -> None:
    """`form`: `{0}` is the destination, `{1}`.. are sources; `sizes`: bits of each; the model gets unsigned ints."""
    to, *origins = (int(s) for s in sizes.split())
    sources = list(values) + [bits(s) for s in origins[len(values) :]]
    names = ["%" + _NAMES[to] + "0"] + [f"%{_NAMES[s]}{k + 1}" for k, s in enumerate(origins)]
    registers = {n[1:]: x for n, x in zip(names[1:], sources, strict=True)}
    old = bits(to)
    mask = RNG.integers(0, 2, WIDTH).astype(bool)
    expected = [model(*row) & ((1 << to) - 1) for row in zip(*(x.tolist() for x in sources), strict=True)]
    file, row = {"r": "w"}.get(names[0][1], names[0][1]), 0
    for m in (None, mask):
        got = run(form.format(*names) + ";", m, **registers, **{names[0][1:]: old}).files[file][row].tolist()
        for lane in range(WIDTH):
            want = expected[lane] if m is None or m[lane] else int(old[lane])
            given = [hex(int(x[lane])) for x in sources]
            assert got[lane] == want, f"{form}: {given} gives {got[lane]:#x}, not {want:#x}"


# Integers ------------------------------------------------------------------------------------------------------------
def _values(kind: str) -> Callable[[int], int]:
    size = int(kind[1:])
    return (lambda x: signed(x, size)) if kind[0] == "s" else (lambda x: x)


def _truncated(a: int, b: int) -> int:
    q = abs(a) // abs(b) if b else -1
    return -q if b and (a < 0) != (b < 0) else q


@pytest.mark.parametrize("kind", ["u16", "s16", "u32", "s32", "u64", "s64"])
def test_integer_arithmetic(kind: str) -> None:
    n, v = int(kind[1:]), _values(kind)
    three, four = f"{n} {n} {n}", f"{n} {n} {n} {n}"
    check(f"add.{kind} {{0}}, {{1}}, {{2}}", three, lambda a, b: a + b)
    check(f"sub.{kind} {{0}}, {{1}}, {{2}}", three, lambda a, b: a - b)
    check(f"mul.lo.{kind} {{0}}, {{1}}, {{2}}", three, lambda a, b: a * b)
    check(f"mul.hi.{kind} {{0}}, {{1}}, {{2}}", three, lambda a, b: v(a) * v(b) >> n)
    check(f"mad.lo.{kind} {{0}}, {{1}}, {{2}}, {{3}}", four, lambda a, b, c: a * b + c)
    check(f"mad.hi.{kind} {{0}}, {{1}}, {{2}}, {{3}}", four, lambda a, b, c: (v(a) * v(b) >> n) + c)
    check(f"div.{kind} {{0}}, {{1}}, {{2}}", three, lambda a, b: _truncated(v(a), v(b)))
    check(f"rem.{kind} {{0}}, {{1}}, {{2}}", three, lambda a, b: v(a) - v(b) * _truncated(v(a), v(b)) if b else a)
    check(f"min.{kind} {{0}}, {{1}}, {{2}}", three, lambda a, b: min(v(a), v(b)))
    check(f"max.{kind} {{0}}, {{1}}, {{2}}", three, lambda a, b: max(v(a), v(b)))
    check(f"max.{kind} {{0}}, {{1}}, 7", f"{n} {n}", lambda a: max(v(a), 7))
    check(f"sad.{kind} {{0}}, {{1}}, {{2}}, {{3}}", four, lambda a, b, c: c + abs(v(a) - v(b)))
    if kind[0] == "s":
        check(f"abs.{kind} {{0}}, {{1}}", f"{n} {n}", lambda a: abs(v(a)))
        check(f"neg.{kind} {{0}}, {{1}}", f"{n} {n}", lambda a: -a)
    if n < 64:
        check(f"mul.wide.{kind} {{0}}, {{1}}, {{2}}", f"{2 * n} {n} {n}", lambda a, b: v(a) * v(b))
        check(
            f"mad.wide.{kind} {{0}}, {{1}}, {{2}}, {{3}}", f"{2 * n} {n} {n} {2 * n}", lambda a, b, c: v(a) * v(b) + c
        )
        check(f"mul.wide.{kind} {{0}}, {{1}}, -3", f"{2 * n} {n}", lambda a: v(a) * v(-3 & ((1 << n) - 1)))


def test_saturating_and_24_bit_forms() -> None:
    def clamp(x: int) -> int:
        return max(min(x, 2**31 - 1), -(2**31))

    def s24(x: int) -> int:
        return signed(x & 0xFFFFFF, 24)

    s = _values("s32")
    check("add.sat.s32 {0}, {1}, {2}", "32 32 32", lambda a, b: clamp(s(a) + s(b)))
    check("sub.sat.s32 {0}, {1}, {2}", "32 32 32", lambda a, b: clamp(s(a) - s(b)))
    check("mad.hi.sat.s32 {0}, {1}, {2}, {3}", "32 32 32 32", lambda a, b, c: clamp((s(a) * s(b) >> 32) + s(c)))
    check("max.relu.s32 {0}, {1}, {2}", "32 32 32", lambda a, b: max(s(a), s(b), 0))
    check("min.relu.s32 {0}, {1}, {2}", "32 32 32", lambda a, b: max(min(s(a), s(b)), 0))
    check("mul24.lo.u32 {0}, {1}, {2}", "32 32 32", lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF))
    check("mul24.hi.s32 {0}, {1}, {2}", "32 32 32", lambda a, b: s24(a) * s24(b) >> 16)
    check("mad24.lo.s32 {0}, {1}, {2}, {3}", "32 32 32 32", lambda a, b, c: s24(a) * s24(b) + c)
    check("mad24.hi.sat.s32 {0}, {1}, {2}, {3}", "32 32 32 32", lambda a, b, c: clamp((s24(a) * s24(b) >> 16) + s(c)))


@pytest.mark.parametrize("size", [32, 64])
def test_carry_chains(size: int) -> None:
    """Numbers of three words added, subtracted and multiplied word by word."""
    kind, name, words = f"u{size}", _NAMES[size], 3
    a, b = [bits(size) for _ in range(words)], [bits(size) for _ in range(words)]
    for op, function in (("add", lambda x, y: x + y), ("sub", lambda x, y: x - y)):
        text = f"{op}.cc.{kind} %{name}0, %{name}0, %{name}3;"
        text += f"{op}c.cc.{kind} %{name}1, %{name}1, %{name}4; {op}c.{kind} %{name}2, %{name}2, %{name}5;"
        view = run(text, **{f"{name}{k}": x for k, x in enumerate(a + b)})
        file = view.files[{"r": "w"}.get(name, name)]
        for lane in range(WIDTH):
            x, y, r = (sum(int(w[lane]) << (size * k) for k, w in enumerate(ws)) for ws in (a, b, file[:words]))
            assert r == function(x, y) % (1 << (size * words))
    text = f"mad.lo.cc.{kind} %{name}0, %{name}2, %{name}3, %{name}4;"
    text += f"madc.hi.{kind} %{name}1, %{name}2, %{name}3, %{name}5;"
    view = run(text, **{f"{name}{k + 2}": x for k, x in enumerate(a[:2] + b[:2])})
    file = view.files[{"r": "w"}.get(name, name)]
    for lane in range(WIDTH):
        x, y, low, high = (int(w[lane]) for w in a[:2] + b[:2])
        assert int(file[0][lane]) + (int(file[1][lane]) << size) == (x * y + low + (high << size)) % (1 << (2 * size))


def test_dot_products() -> None:
    def parts(x: int, size: int, kind: str, start: int = 0) -> list[int]:
        found = [x >> (start + size * k) & ((1 << size) - 1) for k in range(4)]
        return [signed(f, size) if kind == "s32" else f for f in found]

    for ka in ("u32", "s32"):
        for kb in ("u32", "s32"):

            def dot(size: int, start: int, n: int, ka: str = ka, kb: str = kb) -> Callable[[int, int, int], int]:
                return lambda a, b, c: (
                    c + sum(x * y for x, y in zip(parts(a, size, ka)[:n], parts(b, 8, kb, start)[:n], strict=True))
                )

            check(f"dp4a.{ka}.{kb} {{0}}, {{1}}, {{2}}, {{3}}", "32 32 32 32", dot(8, 0, 4))
            check(f"dp2a.lo.{ka}.{kb} {{0}}, {{1}}, {{2}}, {{3}}", "32 32 32 32", dot(16, 0, 2))
            check(f"dp2a.hi.{ka}.{kb} {{0}}, {{1}}, {{2}}, {{3}}", "32 32 32 32", dot(16, 16, 2))


# Bits ----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("size", [16, 32, 64])
def test_logic_and_shifts(size: int) -> None:
    n, ones = size, (1 << size) - 1
    check(f"and.b{n} {{0}}, {{1}}, {{2}}", f"{n} {n} {n}", lambda a, b: a & b)
    check(f"or.b{n} {{0}}, {{1}}, {{2}}", f"{n} {n} {n}", lambda a, b: a | b)
    check(f"xor.b{n} {{0}}, {{1}}, {{2}}", f"{n} {n} {n}", lambda a, b: a ^ b)
    check(f"not.b{n} {{0}}, {{1}}", f"{n} {n}", lambda a: ~a)
    check(f"cnot.b{n} {{0}}, {{1}}", f"{n} {n}", lambda a: int(a == 0))
    check(f"shl.b{n} {{0}}, {{1}}, {{2}}", f"{n} {n} 32", lambda a, c: a << min(c, 64) & ones)
    check(f"shr.u{n} {{0}}, {{1}}, {{2}}", f"{n} {n} 32", lambda a, c: a >> min(c, 64))
    check(f"shr.b{n} {{0}}, {{1}}, {{2}}", f"{n} {n} 32", lambda a, c: a >> min(c, 64))
    check(f"shr.s{n} {{0}}, {{1}}, {{2}}", f"{n} {n} 32", lambda a, c: signed(a, n) >> min(c, 64))
    for c in (0, 3, n - 1, n, 255):
        check(f"shl.b{n} {{0}}, {{1}}, {c}", f"{n} {n}", lambda a, c=c: a << c)
        check(f"shr.s{n} {{0}}, {{1}}, {c}", f"{n} {n}", lambda a, c=c: signed(a, n) >> c)
        check(f"shr.u{n} {{0}}, {{1}}, {c}", f"{n} {n}", lambda a, c=c: a >> c)


def test_funnel_shift() -> None:
    for mode in ("clamp", "wrap"):

        def amount(c: int, mode: str = mode) -> int:
            return min(c, 32) if mode == "clamp" else c & 31

        check(
            f"shf.l.{mode}.b32 {{0}}, {{1}}, {{2}}, {{3}}",
            "32 32 32 32",
            lambda a, b, c: ((b << 32 | a) << amount(c)) >> 32,
        )
        check(f"shf.r.{mode}.b32 {{0}}, {{1}}, {{2}}, {{3}}", "32 32 32 32", lambda a, b, c: (b << 32 | a) >> amount(c))
        check(f"shf.l.{mode}.b32 {{0}}, {{1}}, {{1}}, 5", "32 32", lambda a: (a << 5) | (a >> 27))


def test_lop3_tables() -> None:
    def by_table(table: int, a: int, b: int, c: int) -> int:
        return sum((table >> ((a >> k & 1) * 4 + (b >> k & 1) * 2 + (c >> k & 1)) & 1) << k for k in range(32))

    a, b, c = (np.array(x, np.uint32).repeat(WIDTH // 4) for x in ([7, 0xF0F00000, 5, ~0 & 0xFFFFFFFF],) * 3)
    b, c = np.roll(b, 3) * np.uint32(0x9E3779B1), np.roll(c, 7) * np.uint32(0x85EBCA6B)
    for table in range(256):
        view = run(f"lop3.b32 %r0, %r1, %r2, %r3, {table};", r1=a, r2=b, r3=c)
        for lane in (0, 40, 70, 127):
            assert view.u32[0][lane] == by_table(table, int(a[lane]), int(b[lane]), int(c[lane]))
    p = RNG.integers(0, 2, WIDTH).astype(bool)
    a[::5] = 0
    view = run("lop3.and.b32 %r0|%p1, %r1, %r2, %r3, 0x80, %p1;", r1=a, r2=b, r3=c, p1=p)
    assert (view.p[1] == (((a & b & c) != 0) & p)).all() and (view.u32[0] == a & b & c).all()
    view = run("lop3.or.b32 _|%p0, %r1, %r2, %r3, 0xc0, !%p1;", r1=a, r2=b, r3=c, p1=p)
    assert (view.p[0] == (((a & b) != 0) | ~p)).all() and not view.u32[0].any()


def _permuted(a: int, b: int, controls: list[int]) -> int:
    result = 0
    for k, c in enumerate(controls):
        byte = (b << 32 | a) >> (8 * (c & 7)) & 255
        result |= ((255 if byte & 128 else 0) if c & 8 else byte) << (8 * k)
    return result


def test_prmt() -> None:
    check(
        "prmt.b32 {0}, {1}, {2}, {3}",
        "32 32 32 32",
        lambda a, b, s: _permuted(a, b, [s >> (4 * k) & 15 for k in range(4)]),
    )
    for s in (0x3340, 0x5410, 0x7632, 0x3276, 0x0123, 0xFB91, 0x4440, 0x8888):
        controls = [s >> (4 * k) & 15 for k in range(4)]
        check(f"prmt.b32 {{0}}, {{1}}, {{2}}, {s:#x}U", "32 32 32", lambda a, b, c=controls: _permuted(a, b, c))
        check(f"prmt.b32 {{0}}, {{1}}, 0x80402010, {s:#x}U", "32 32", lambda a, c=controls: _permuted(a, 0x80402010, c))
    # Tables of PTX ISA 9.7.9.7, lowest byte first.
    tables = {
        "f4e": ["0123", "1234", "2345", "3456"],
        "b4e": ["0765", "1076", "2107", "3210"],
        "rc8": ["0000", "1111", "2222", "3333"],
        "ecl": ["0123", "1123", "2223", "3333"],
        "ecr": ["0000", "0111", "0122", "0123"],
        "rc16": ["0101", "2323", "0101", "2323"],
    }
    for mode, rows in tables.items():
        controls_of = [[int(c) for c in row] for row in rows]
        check(
            f"prmt.b32.{mode} {{0}}, {{1}}, {{2}}, {{3}}",
            "32 32 32 32",
            lambda a, b, s, t=controls_of: _permuted(a, b, t[s & 3]),
        )
        for n in range(4):
            check(
                f"prmt.b32.{mode} {{0}}, {{1}}, {{2}}, {n}",
                "32 32 32",
                lambda a, b, c=controls_of[n]: _permuted(a, b, c),
            )


@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s64"])
def test_bit_fields(kind: str) -> None:
    n = int(kind[1:])

    def bfe(a: int, start: int, length: int) -> int:
        start, length = start & 255, length & 255
        sign = 0 if kind[0] == "u" or length == 0 else a >> min(start + length - 1, n - 1) & 1
        return sum((a >> (start + k) & 1 if k < length and start + k < n else sign) << k for k in range(n))

    check(f"bfe.{kind} {{0}}, {{1}}, {{2}}, {{3}}", f"{n} {n} 32 32", bfe)
    for start, length in ((0, 5), (3, 0), (7, 12), (n - 1, 1), (n - 4, 9), (n, 3), (200, 7), (0, n), (2, 255)):
        check(f"bfe.{kind} {{0}}, {{1}}, {start}, {length}", f"{n} {n}", lambda a, s=start, k=length: bfe(a, s, k))

    def bfi(a: int, b: int, start: int, length: int) -> int:
        field = ((1 << (length & 255)) - 1) << (start & 255)
        return (b & ~field) | (a << (start & 255) & field)

    check(f"bfi.b{n} {{0}}, {{1}}, {{2}}, {{3}}, {{4}}", f"{n} {n} {n} 32 32", bfi)
    check(f"bfi.b{n} {{0}}, {{1}}, {{2}}, 4, 8", f"{n} {n} {n}", lambda a, b: bfi(a, b, 4, 8))

    def bfind(a: int) -> int:
        x = signed(a, n) if kind[0] == "s" else a
        return (~x if x < 0 else x).bit_length() - 1

    check(f"bfind.{kind} {{0}}, {{1}}", f"32 {n}", bfind)
    check(f"bfind.shiftamt.{kind} {{0}}, {{1}}", f"32 {n}", lambda a: n - 1 - bfind(a) if bfind(a) >= 0 else -1)
    check(f"popc.b{n} {{0}}, {{1}}", f"32 {n}", lambda a: a.bit_count())
    check(f"clz.b{n} {{0}}, {{1}}", f"32 {n}", lambda a: n - a.bit_length())
    check(f"brev.b{n} {{0}}, {{1}}", f"{n} {n}", lambda a: int(f"{a:0{n}b}"[::-1], 2))


def test_masks_and_searches() -> None:
    def bmsk(a: int, b: int, clamp: bool) -> int:
        a, b = (min(a, 32), min(b, 32)) if clamp else (a & 31, b & 31)
        return ((1 << b) - 1) << a

    def szext(a: int, b: int, clamp: bool, kind: str) -> int:
        b = min(b, 32) if clamp else b & 31
        value = a & ((1 << b) - 1)
        return signed(value, b) if kind == "s32" and b else value

    for mode in ("clamp", "wrap"):
        check(f"bmsk.{mode}.b32 {{0}}, {{1}}, {{2}}", "32 32 32", lambda a, b, m=mode: bmsk(a, b, m == "clamp"))
        for kind in ("u32", "s32"):
            check(
                f"szext.{mode}.{kind} {{0}}, {{1}}, {{2}}",
                "32 32 32",
                lambda a, b, m=mode, k=kind: szext(a, b, m == "clamp", k),
            )

    def fns(mask: int, base: int, offset: int) -> int:
        offset = signed(offset, 32)
        places = [k for k in range(32) if mask >> k & 1]
        if offset == 0:
            return base if base in places else -1
        found = [k for k in places if k >= base] if offset > 0 else [k for k in places[::-1] if k <= base]
        return found[abs(offset) - 1] if base < 32 and abs(offset) <= len(found) else -1

    offsets = RNG.integers(-6, 7, WIDTH).astype(np.int32).view(np.uint32)
    bases = RNG.integers(0, 34, WIDTH).astype(np.uint32)
    check("fns.b32 {0}, {1}, {2}, {3}", "32 32 32 32", fns, bits(32), bases, offsets)


# Moves and comparisons -----------------------------------------------------------------------------------------------
def test_mov_packs_and_unpacks() -> None:
    h, r, d = [bits(16) for _ in range(4)], [bits(32) for _ in range(4)], [bits(64) for _ in range(2)]
    view = run("mov.b32 %r0, {%h0, %h1}; mov.b64 %d0, {%h3, %h2, %h1, %h0};", **{f"h{k}": x for k, x in enumerate(h)})
    assert (view.u32[0] == h[0] | h[1].astype(np.uint32) << 16).all()
    assert (view.u64[0].view(np.uint16).reshape(-1, 4) == np.stack(h[::-1], 1)).all()
    view = run("mov.b64 %d0, {%r1, %r2}; mov.b64 {%r3, _}, %d0; mov.b32 {_, %h5}, %r2;", r1=r[1], r2=r[2])
    assert (view.u64[0].view(np.uint32).reshape(-1, 2) == np.stack(r[1:3], 1)).all()
    assert (view.u32[3] == r[1]).all() and (view.u16[5] == r[2] >> 16).all()
    view = run("mov.b128 %q0, {%d0, %d1}; mov.b128 %q1, %q0; mov.b128 {%d3, %d4}, %q1;", d0=d[0], d1=d[1])
    assert (view.u64[3] == d[0]).all() and (view.u64[4] == d[1]).all()
    view = run("mov.b32 %r0, {%h0, %h1, %h2, %h3};", **{f"h{k}": x for k, x in enumerate(h)})
    assert (view.u32[0].view(np.uint8).reshape(-1, 4) == np.stack(h, 1) & 255).all()
    mask = RNG.integers(0, 2, WIDTH).astype(bool)
    view = run("mov.b64 %d0, {%r1, 5}; mov.b64 {%r2, %r3}, %d0;", mask, d0=d[0], r1=r[1], r2=r[2], r3=r[3])
    assert (view.u64[0] == np.where(mask, r[1] | np.uint64(5 << 32), d[0])).all()
    assert (view.u32[3] == np.where(mask, 5, r[3])).all()


def test_mov_of_everything_else() -> None:
    p = RNG.integers(0, 2, WIDTH).astype(bool)
    view = run(
        "mov.pred %p0, %p1; mov.pred %p2, !%p1; mov.pred %p3, -1; mov.u32 %r0, %tid.x; mov.f32 %r1, 0f3F800000;", p1=p
    )
    assert (view.p[0] == p).all() and (view.p[2] == ~p).all() and view.p[3].all()
    assert (view.u32[0] == np.arange(WIDTH)).all() and (view.f32[1] == 1).all()
    view = run("@%p1 mov.u32 %r0, 7; @!%p1 mov.b64 %d0, -1; @%p1 add.s32 %r2, %r2, -1;", p1=p)
    assert (view.u32[0] == np.where(p, 7, 0)).all() and (view.s64[0] == np.where(p, 0, -1)).all()
    assert (view.s32[2] == -p.astype(int)).all()


def test_addresses() -> None:
    a = np.full(WIDTH, 0x0100_0000_0000 + (1 << 24) + 64, np.uint64)
    view = run("cvta.shared.u64 %d0, %d1; cvta.to.shared.u64 %d2, %d0; cvta.to.global.u64 %d3, %d0;", d1=bits(64))
    assert (view.u64[2] == view.u64[1]).all() and (view.u64[0] - view.u64[1] == 0x0100_0000_0000).all()
    text = "isspacep.shared %p0, %d1; isspacep.global %p1, %d1;"
    text += "isspacep.shared::cluster %p2, %d1; isspacep.local %p3, %d1;"
    view = run(text, d1=a)
    assert view.p[0].all() and not view.p[1].any() and view.p[2].all() and not view.p[3].any()
    view = run(text, d1=a + np.uint64(1 << 24))
    assert not view.p[0].any() and view.p[2].all()


_COMPARE = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}


def _floats(x: np.ndarray, kind: str) -> np.ndarray:
    if kind == "bf16":
        return (x.astype(np.uint32) << 16).view(np.float32)
    return x.view({"f16": np.float16, "f32": np.float32, "f64": np.float64}[kind])


@pytest.mark.parametrize("kind", ["u16", "s16", "u32", "s32", "u64", "s64", "b32"])
def test_setp_of_integers(kind: str) -> None:
    n = int(kind[1:])
    a, b = bits(n), bits(n)
    b[::4] = a[::4]
    x, y = (z.view(np.dtype(f"i{n // 8}")) if kind[0] == "s" else z for z in (a, b))
    name, p = _NAMES[n], RNG.integers(0, 2, WIDTH).astype(bool)
    values = {f"{name}1": a, f"{name}2": b, "p1": p}
    for comparison, function in _COMPARE.items():
        if kind[0] == "b" and comparison not in ("eq", "ne"):
            continue
        want = function(x, y)
        assert (run(f"setp.{comparison}.{kind} %p0, %{name}1, %{name}2;", **values).p[0] == want).all()
        for boolean, combine in (("and", np.logical_and), ("or", np.logical_or), ("xor", np.logical_xor)):
            view = run(f"setp.{comparison}.{boolean}.{kind} %p0|%p2, %{name}1, %{name}2, !%p1;", **values)
            assert (view.p[0] == combine(want, ~p)).all() and (view.p[2] == combine(~want, ~p)).all()
            view = run(f"setp.{comparison}.{boolean}.{kind} %p1|_, %{name}1, %{name}2, %p1;", **values)
            assert (view.p[1] == combine(want, p)).all()
    if kind == "u32":
        for comparison, other in (("lo", "lt"), ("ls", "le"), ("hi", "gt"), ("hs", "ge")):
            assert (run(f"setp.{comparison}.u32 %p0, %r1, %r2;", **values).p[0] == _COMPARE[other](a, b)).all()


@pytest.mark.parametrize("kind", ["f16", "bf16", "f32", "f64"])
def test_setp_of_floats(kind: str) -> None:
    n = {"f64": 64, "f32": 32}.get(kind, 16)
    a, b = bits(n), bits(n)
    b[::4] = a[::4]
    x, y = _floats(a, kind), _floats(b, kind)
    name, nan = _NAMES[n], np.isnan(x) | np.isnan(y)
    with np.errstate(invalid="ignore"):
        expected = {c: f(x, y) & ~nan for c, f in _COMPARE.items()}
    expected |= {c + "u": value | nan for c, value in expected.items()} | {"num": ~nan, "nan": nan}
    for comparison, want in expected.items():
        view = run(f"setp.{comparison}.{kind} %p0, %{name}1, %{name}2;", **{f"{name}1": a, f"{name}2": b})
        assert (view.p[0] == want).all(), comparison
    if n == 16:
        text = f"mov.b32 %r1, {{%h1, %h2}}; mov.b32 %r2, {{%h2, %h1}}; setp.lt.{kind}x2 %p0|%p1, %r1, %r2;"
        view = run(text, h1=a, h2=b)
        assert (view.p[0] == expected["lt"]).all() and (view.p[1] == expected["gt"]).all()


def test_selections() -> None:
    a, b, c, p = bits(32), bits(32), bits(32), RNG.integers(0, 2, WIDTH).astype(bool)
    p[:3] = True
    for to in ("%r0", "%r1", "%r2"):
        view = run(f"selp.b32 {to}, %r1, %r2, %p1;", r1=a, r2=b, p1=p)
        assert (view.u32[int(to[2])] == np.where(p, a, b)).all()
    view = run(
        "selp.b32 %r0, 5, -1, %p1; slct.u32.s32 %r3, %r1, %r2, %r4; slct.f32.f32 %r5, %r1, %r2, %r4;",
        r1=a,
        r2=b,
        r4=c,
        p1=p,
    )
    assert (view.s32[0] == np.where(p, 5, -1)).all()
    assert (view.u32[3] == np.where(c.view(np.int32) >= 0, a, b)).all()
    assert (view.u32[5] == np.where(c.view(np.float32) >= 0, a, b)).all()
    view = run("set.lt.u32.s32 %r0, %r1, %r2; set.ge.f32.s32 %r3, %r1, %r2;", r1=a, r2=b)
    less = a.view(np.int32) < b.view(np.int32)
    assert (view.u32[0] == np.where(less, 0xFFFFFFFF, 0)).all() and (view.f32[3] == ~less).all()
    assert (run("and.pred %p0, %p1, !%p2; not.pred %p3, %p1;", p1=p, p2=p[::-1]).p[0] == (p & ~p[::-1])).all()


# Video and refusals --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("lanes", [2, 4])
def test_video(lanes: int) -> None:
    size = 32 // lanes

    def model(op: str, kind: str, sat: bool, add: bool) -> Callable[[int, int, int], int]:
        def value(x: int, k: int) -> int:
            part = x >> (k * size) & ((1 << size) - 1)
            return signed(part, size) if kind == "s32" else part

        def combine(a: int, b: int) -> int:
            low, high = (-(1 << (size - 1)), (1 << (size - 1)) - 1) if kind == "s32" else (0, (1 << size) - 1)
            functions = {"vadd": a + b, "vsub": a - b, "vabsdiff": abs(a - b), "vmin": min(a, b), "vmax": max(a, b)}
            functions["vavrg"] = (a + b + 1) >> 1 if a + b >= 0 else (a + b) >> 1
            return min(max(functions[op], low), high) if sat else functions[op]

        def whole(a: int, b: int, c: int) -> int:
            parts = [combine(value(a, k), value(b, k)) for k in range(lanes)]
            if add:
                return c + sum(parts)
            return sum((t & ((1 << size) - 1)) << (k * size) for k, t in enumerate(parts))

        return whole

    for op in ("vadd", "vsub", "vavrg", "vabsdiff", "vmin", "vmax"):
        for kind in ("u32", "s32"):
            for end, sat, add in (("", False, False), (".sat", True, False), (".add", False, True)):
                form = f"{op}{lanes}.{kind}.{kind}.{kind}{end} {{0}}, {{1}}, {{2}}, {{3}}"
                check(form, "32 32 32 32", model(op, kind, sat, add))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("add.sat.u32 %r0, %r1, %r2;", "modifier .sat of add"),
        ("mul.s32 %r0, %r1, %r2;", "one of .lo, .hi, .wide"),
        ("setp.ltu.s32 %p0, %r1, %r2;", "ltu of .s32"),
        ("cvt.rs.satfinite.e4m3x4.f32 %r0, {%r1, %r2, %r3, %r4}, %r5;", "from .f32 to .e4m3x4"),
        ("fma.rn.oob.f16 %h0, %h1, %h2, %h3;", "modifier .oob"),
        ("mov.b128 %q0, 5;", "mov.b128"),
        ("min.f16x2 %r0, %r1, %r2, %r3;", "min with 4 operands"),
    ],
)
def test_refusals_name_what_is_not_supported(text: str, message: str) -> None:
    with pytest.raises(Unsupported, match=message):
        run(text)
