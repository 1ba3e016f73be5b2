"""Atomics and reductions on memory. References in plain numpy and Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from .case import Arrays, Case, integers, raw, untouched
from .cases_integer import signed
from .exact import BF16, F16, F32, F64, Format, add, decode, encode, from_integers

M32 = 0xFFFFFFFF


def _float_add(form: Format, ftz: bool = False) -> Callable[[int, int], int]:
    """One element; f32 atomics on global memory keep subnormals only where they say so."""
    return lambda a, b: encode(add(decode(a, form, ftz), decode(b, form, ftz)), form, ftz=ftz)


def _packed_add(form: Format) -> Callable[[int, int], int]:
    one = _float_add(form)
    return lambda a, b: one(a & 0xFFFF, b & 0xFFFF) | one(a >> 16, b >> 16) << 16


def _atomic_table(bits: int) -> dict[str, Callable[[int, int, int], int]]:
    """New values from (old, operand, compare)."""

    def s(v: int) -> int:
        return signed(v, bits)

    table: dict[str, Callable[[int, int, int], int]] = {
        "add": lambda o, v, c: o + v,
        "umin": lambda o, v, c: min(o, v),
        "umax": lambda o, v, c: max(o, v),
        "smin": lambda o, v, c: o if s(o) <= s(v) else v,
        "smax": lambda o, v, c: o if s(o) >= s(v) else v,
        "and": lambda o, v, c: o & v,
        "or": lambda o, v, c: o | v,
        "xor": lambda o, v, c: o ^ v,
        "inc": lambda o, v, c: 0 if o >= v else o + 1,
        "dec": lambda o, v, c: v if o == 0 or o > v else o - 1,
        "exch": lambda o, v, c: v,
        "cas": lambda o, v, c: v if o == c else o,
        "f32": lambda o, v, c: _float_add(F32)(o, v),
        "f64": lambda o, v, c: _float_add(F64)(o, v),
        "f16": lambda o, v, c: _float_add(F16)(o, v),
        "bf16": lambda o, v, c: _float_add(BF16)(o, v),
        "f16x2": lambda o, v, c: _packed_add(F16)(o, v),
        "bf16x2": lambda o, v, c: _packed_add(BF16)(o, v),
    }
    return table


ATOMS_32 = [
    "add",
    "add",
    "umin",
    "umax",
    "smin",
    "smax",
    "and",
    "or",
    "xor",
    "inc",
    "dec",
    "exch",
    "cas",
    "cas",
    "add",
    "f32",
    "f16x2",
    "bf16x2",
    "exch",
    "add",
]
ATOMS_64 = ["add", "umin", "umax", "smin", "smax", "and", "or", "xor", "exch", "cas", "f64"]
ATOMS_16 = ["f16", "bf16", "cas"]


def _old_values(names: list[str], bits: int) -> Callable[[Arrays], Arrays]:
    def expect(given: Arrays) -> Arrays:
        table = _atomic_table(bits)
        words = given["words"].copy()
        for row, name in enumerate(names):
            for t in range(64):
                operand, compare = int(given["in"][0, t]), int(given["in"][1, t])
                words[row, t] = table[name](int(words[row, t]), operand, compare) & ((1 << bits) - 1)
        return {"words": words, "out": given["words"]}

    return expect


def _atomic_inputs(names: list[str], bits: int) -> dict[str, np.ndarray]:
    """Bits that are finite in every format; a quarter of the words equal what compare-and-swap compares with."""
    dtype = {16: np.uint16, 32: np.uint32, 64: np.uint64}[bits]
    given = raw(f"atomics/{bits}/in", (2, 64), dtype)
    words = raw(f"atomics/{bits}/words", (len(names), 64), dtype)
    if bits < 64:
        # Exponents in the middle range of f16 and bf16 alike, in both halves of a word.
        keep, base = (0xBFFF, 0x2000) if bits == 16 else (0xBFFFBFFF, 0x20002000)
        given, words = (given & dtype(keep)) | dtype(base), (words & dtype(keep)) | dtype(base)
    else:
        given, words = given & dtype(0xBFFFFFFFFFFFFFFF), words & dtype(0xBFFFFFFFFFFFFFFF)
    for row, name in enumerate(names):
        if name == "cas":
            words[row, ::4] = given[1, ::4]
        if name in ("inc", "dec"):
            words[row, ::3] = given[0, ::3]
            words[row, 1::6] = 0
    return {"words": words, "in": given, "out": untouched(words.shape, dtype)}


# Word of `totals` (plus the bin): the new value from the old one and a thread's.
CONTENDED: tuple[tuple[int, Callable[[int, int], int]], ...] = (
    (0, lambda o, v: o + v),
    (4, min),
    (8, lambda o, v: max(signed(o), signed(v))),
    (12, lambda o, v: o & (v | 0xFF00)),
    (16, lambda o, v: o | (v & 0xFF00FF)),
    (20, lambda o, v: o ^ v),
    (24, lambda o, v: 0 if o >= 12 else o + 1),
    (32, lambda o, v: o + v),
    (48, max),
)


def _contended(given: Arrays) -> Arrays:
    totals = [int(v) for v in given["totals"]]
    wide = [int(v) for v in given["wide"]]
    real, sums = np.zeros(4), np.zeros(4)
    local = np.zeros((2, 8), np.int64)
    for i, v in enumerate(map(int, given["in"])):
        bin_ = v % 4
        for base, new in CONTENDED:
            totals[base + bin_] = new(totals[base + bin_], v) & M32
        real[bin_] += v % 64 - 32
        wide[bin_] = (wide[bin_] + (v << 20)) & ((1 << 64) - 1)
        wide[4 + bin_] = max(wide[4 + bin_], v << 8)
        sums[bin_] += v % 1000
        block = local[i // 128]
        block[bin_] = (block[bin_] + v) & M32
        block[4 + bin_] = max(signed(int(block[4 + bin_])), signed(v)) & M32
    totals[28:32] = [int(np.float32(r).view(np.uint32)) for r in real]
    totals[40:48] = [int(v) & M32 for v in local.sum(axis=0)]
    wide[8:12] = [int(v) for v in sums.view(np.uint64)]
    return {"totals": np.array(totals, np.uint32), "wide": np.array(wide, np.uint64)}


def _last_block(given: Arrays) -> Arrays:
    partial = given["in"].astype(np.int64).reshape(5, 8, 32).sum(axis=1)
    total = np.zeros(32, np.int64)
    for row in partial:
        total = (total * 3 + row) & M32
    return {
        "partial": (partial & M32).astype(np.uint32),
        "counter": np.zeros(1, np.uint32),
        "out": total.astype(np.uint32),
    }


def _vector_red(given: Arrays) -> Arrays:
    data = given["in"]
    one = {"floats": 0, "halves": 512, "brains": 1024}
    out: dict[str, np.ndarray] = {}
    for name, base in one.items():
        words = given[name].view(np.uint32).copy()
        for block in range(2):
            for i in range(256):
                old, new = int(words[i]), int(data[base + block * 256 + i])
                if name == "floats":
                    words[i] = _float_add(F32)(old, new)
                elif name == "halves":
                    words[i] = _packed_add(F16)(old, new)
                elif i % 4 < 2:
                    words[i] = _packed_add(BF16)(old, new)
                else:
                    pairs = [(old >> s & 0xFFFF, new >> s & 0xFFFF) for s in (0, 16)]
                    best = [a if decode(a, BF16).value >= decode(b, BF16).value else b for a, b in pairs]
                    words[i] = best[0] | best[1] << 16
        out[name] = words.view(given[name].dtype)
    return out


def cases() -> Iterator[Case]:
    """All cases of this file."""
    for bits, names in ((32, ATOMS_32), (64, ATOMS_64), (16, ATOMS_16)):
        yield Case(
            f"atomics/old-values-{bits}",
            "atomics",
            f"old_values_{bits}",
            _atomic_inputs(names, bits),
            ("words", "out"),
            ("words", "in", "out"),
            block=(64, 1, 1),
            expect=_old_values(names, bits),
            rows={"words": names, "out": names},
        )
    totals = np.zeros(64, np.uint32)
    totals[4:8], totals[12:16], totals[8:12] = M32, M32, 1 << 31
    yield Case(
        "atomics/contended",
        "atomics",
        "contended",
        {"totals": totals, "wide": np.zeros(16, np.uint64), "in": raw("contended", (256,), np.uint32)},
        ("totals", "wide"),
        ("totals", "wide", "in"),
        grid=(2, 1, 1),
        block=(128, 1, 1),
        expect=_contended,
    )

    def halves(seed: str, count: int, form: Format) -> np.ndarray:
        return from_integers(integers(seed, (2 * count,), -40, 40), form).view(np.uint32)

    given = np.concatenate(
        [
            integers("vector/f32", (512,), -999, 999).astype(np.float32).view(np.uint32),
            halves("vector/f16", 512, F16),
            halves("vector/bf16", 512, BF16),
        ]
    )
    yield Case(
        "atomics/vector-red",
        "atomics",
        "vector_red",
        {
            "floats": integers("vector/0", (256,), -99, 99).astype(np.float32),
            "halves": halves("vector/1", 256, F16),
            "brains": halves("vector/2", 256, BF16),
            "in": given,
        },
        ("floats", "halves", "brains"),
        ("floats", "halves", "brains", "in"),
        grid=(2, 1, 1),
        block=(64, 1, 1),
        expect=_vector_red,
    )
    yield Case(
        "atomics/last-block",
        "atomics",
        "last_block",
        {
            "in": raw("last", (40, 32), np.uint32),
            "partial": untouched((5, 32), np.uint32),
            "counter": np.zeros(1, np.uint32),
            "out": untouched((32,), np.uint32),
        },
        ("partial", "counter", "out"),
        ("in", "partial", "counter", "out"),
        grid=(5, 1, 1),
        expect=_last_block,
    )
