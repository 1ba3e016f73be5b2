"""Logic, shifts and bit fields: and, or, xor, not, cnot, lop3, shl, shr, shf, prmt, bfe, bfi, bfind, popc, clz, ...

PTX ISA 9.7.8 (logic and shift) and 9.7.1 (bit fields and counts). numpy shifts by the width or more give 0, or the
sign, which is what PTX's clamped shifts give.
"""

from __future__ import annotations

import numpy as np

from ..ir import Imm, Instruction, Pair, Sink
from ..registry import Unsupported
from .code import Code
from .dispatch import BITS, allow, call, chosen, dtype_of, emit, operands, rule, source, sources


# Logic ---------------------------------------------------------------------------------------------------------------
@rule("and or xor", f"pred {BITS}")
def _logic(code: Code, i: Instruction) -> None:
    operands(i, 3)
    allow(i, "")
    kind = i.type
    texts = [code.src(x, kind) for x in i.args[1:]] if kind == "pred" else sources(code, i.args[1:], kind)
    emit(code, f"bitwise_{i.op}", i.args[0], kind, *texts)


@rule("not", f"pred {BITS}")
def _not(code: Code, i: Instruction) -> None:
    operands(i, 2)
    allow(i, "")
    emit(code, "invert", i.args[0], i.type, source(code, i.args[1], i.type))


@rule("cnot", BITS)
def _cnot(code: Code, i: Instruction) -> None:
    operands(i, 2)
    allow(i, "")
    code.dst(i.args[0], i.type, f"({source(code, i.args[1], i.type)}==0).astype({code.helper(dtype_of(i.type))})")


@rule("lop3", "b32")
def _lop3(code: Code, i: Instruction) -> None:
    """Any function of three bits; with a predicate output `(d != 0) op q` (lop3.or, lop3.and)."""
    allow(i, "or and")
    operands(i, 6 if len(i.mods) > 1 else 5)
    table = i.args[4]
    if not isinstance(table, Imm):
        raise Unsupported("lop3 with a table that is no constant")
    a, b, c = (source(code, x, "b32") for x in i.args[1:4])
    value = _function_of_three(code, table.value & 0xFF, a, b, c)
    if len(i.mods) == 1:
        code.dst(i.args[0], "b32", value)
        return
    pair = i.args[0]
    if not isinstance(pair, Pair):
        raise Unsupported("lop3 with a boolean operation needs d|p")
    value = code.temp(value)
    combine = f"bitwise_{chosen(i, 'or and')}"
    texts = (f"({value}!=0)", code.src(i.args[5], "pred"))
    if isinstance(pair.first, Sink):
        emit(code, combine, pair.second, "pred", *texts)
        return
    # The predicate may be the one that q names: it is written after it was read.
    outcome = code.temp(f"{code.helper(getattr(np, combine))}({','.join(texts)})")
    code.dst(pair.first, "b32", value)
    code.dst(pair.second, "pred", outcome)


_TWO = {  # functions of two bits b, c by their table: bit 2 * b + c
    0b0001: "~({b}|{c})",
    0b0010: "(~{b}&{c})",
    0b0011: "~{b}",
    0b0100: "({b}&~{c})",
    0b0101: "~{c}",
    0b0110: "({b}^{c})",
    0b0111: "~({b}&{c})",
    0b1000: "({b}&{c})",
    0b1001: "~({b}^{c})",
    0b1010: "{c}",
    0b1011: "(~{b}|{c})",
    0b1100: "{b}",
    0b1101: "({b}|~{c})",
    0b1110: "({b}|{c})",
}


def _function_of_three(code: Code, table: int, a: str, b: str, c: str) -> str:
    """f(0, b, c) ^ (a & (f(0, b, c) ^ f(1, b, c))); bit 4 * a + 2 * b + c of the table is the value (a = 0xF0, ...)."""
    base, change = table & 15, (table & 15) ^ (table >> 4)
    zeros = f"{code.helper(np.zeros)}(v.width,{code.helper(np.uint32)})"
    constant = {0: zeros, 15: f"~{zeros}"}

    def two(value: int) -> str:
        return constant[value] if value in constant else _TWO[value].format(b=b, c=c)

    if change == 0:
        return two(base)
    selected = a if change == 15 else f"({a}&{two(change)})"
    if base == 0:
        return selected
    return f"~{selected}" if base == 15 else f"({two(base)}^{selected})"


# Shifts --------------------------------------------------------------------------------------------------------------
def _amount(code: Code, operand: object, kind: str, bits: int) -> str:
    """A shift amount as the type of what is shifted; amounts that do not fit there are clamped first."""
    dtype = dtype_of(kind)
    if isinstance(operand, Imm):
        return code.const(np.asarray(dtype(min(operand.value & 0xFFFFFFFF, bits))))
    text = source(code, operand, "u32")
    if kind == "u32":
        return text
    return f"{code.helper(np.minimum)}({text},{code.const(np.asarray(np.uint32(bits)))}).astype({code.helper(dtype)})"


@rule("shl", BITS)
def _shl(code: Code, i: Instruction) -> None:
    operands(i, 3)
    allow(i, "")
    kind = "u" + i.type[1:]
    amount = _amount(code, i.args[2], kind, int(kind[1:]))
    emit(code, "left_shift", i.args[0], kind, _first(code, i, kind), amount)


@rule("shr", f"{BITS} u16 u32 u64 s16 s32 s64")
def _shr(code: Code, i: Instruction) -> None:
    operands(i, 3)
    allow(i, "")
    kind = i.type if i.type[0] == "s" else "u" + i.type[1:]
    amount = _amount(code, i.args[2], kind, int(kind[1:]))
    emit(code, "right_shift", i.args[0], kind, _first(code, i, kind), amount)


def _first(code: Code, i: Instruction, kind: str) -> str:
    """What is shifted; an array of all threads when the amount is a constant as well."""
    if isinstance(i.args[2], Imm):
        return sources(code, i.args[1:2], kind)[0]
    return source(code, i.args[1], kind)


@rule("shf", "b32")
def _shf(code: Code, i: Instruction) -> None:
    operands(i, 4)
    allow(i, "l r clamp wrap")
    left, wrap = chosen(i, "l r") == "l", chosen(i, "clamp wrap") == "wrap"
    a, b, c = (source(code, x, "b32") for x in i.args[1:])
    code.dst(i.args[0], "b32", call(code, funnel, a, b, c, left, wrap))


def funnel(a: np.ndarray, b: np.ndarray, c: np.ndarray, left: bool, wrap: bool) -> np.ndarray:
    """The upper half of {b, a} << n, or the lower half of {b, a} >> n."""
    n = (c & np.uint32(31)) if wrap else np.minimum(c, np.uint32(32))
    both = (b.astype(np.uint64) << np.uint64(32)) | a
    if left:
        return ((both << n) >> np.uint64(32)).astype(np.uint32)
    return (both >> n).astype(np.uint32)


# Bytes ---------------------------------------------------------------------------------------------------------------
@rule("prmt", "b32")
def _prmt(code: Code, i: Instruction) -> None:
    operands(i, 4)
    allow(i, "f4e b4e rc8 ecl ecr rc16")
    mode = chosen(i, "f4e b4e rc8 ecl ecr rc16", "none")
    a, b = (source(code, x, "b32") for x in i.args[1:3])
    selector = i.args[3]
    if not isinstance(selector, Imm):
        code.dst(i.args[0], "b32", call(code, permute, a, b, source(code, selector, "b32"), repr(mode)))
        return
    result = code.temp(f"{code.helper(np.empty)}(v.width,{code.helper(np.uint32)})")
    width, picks = _picks(selector.value, mode)
    part = code.helper(np.uint16 if width == 2 else np.uint8)
    view = code.temp(f"{result}.view({part})")
    step = 4 // width
    for k, (byte, sign) in enumerate(picks):
        origin = i.args[1] if byte < 4 else i.args[2]
        at = byte % 4 // width
        if isinstance(origin, Imm):
            value = f"{origin.value >> (8 * width * at) & (256**width - 1)}"
        else:
            value = f"{a if byte < 4 else b}.view({part})[{at}::{step}]"
        if sign:
            value = f"-({value}>>7)&255" if isinstance(origin, Imm) else f"{value}.view({code.helper(np.int8)})>>7"
        code.line(f"{view}[{k}::{step}]={value}")
    code.dst(i.args[0], "b32", result)


_CONTROLS = {
    "f4e": lambda n: (n, n + 1, n + 2, n + 3),
    "b4e": lambda n: (n, (n - 1) % 8, (n - 2) % 8, (n - 3) % 8),
    "rc8": lambda n: (n, n, n, n),
    "ecl": lambda n: tuple(max(k, n) for k in range(4)),
    "ecr": lambda n: tuple(min(k, n) for k in range(4)),
    "rc16": lambda n: (0, 1, 0, 1) if n % 2 == 0 else (2, 3, 2, 3),
}


def _controls(selector: int, mode: str) -> list[int]:
    """Four selections, 0..7, plus 8 where the sign of the byte is spread."""
    if mode == "none":
        return [selector >> (4 * k) & 15 for k in range(4)]
    return list(_CONTROLS[mode](selector & 3))


def _picks(selector: int, mode: str) -> tuple[int, list[tuple[int, bool]]]:
    """Width in bytes of what moves (2 where whole halves do), and (source byte, spread its sign) of each part."""
    controls = _controls(selector, mode)
    halves = all(controls[k] < 8 and controls[k] % 2 == 0 and controls[k + 1] == controls[k] + 1 for k in (0, 2))
    if halves:
        return 2, [(controls[0], False), (controls[2], False)]
    return 1, [(c & 7, c >= 8) for c in controls]


def permute(a: np.ndarray, b: np.ndarray, selector: np.ndarray, mode: str) -> np.ndarray:
    """prmt with selections in a register."""
    both = (b.astype(np.int64) << 32) | a.astype(np.int64)
    result = np.zeros(np.broadcast(a, b, selector).shape, np.int64)
    if mode == "none":
        choices = selector.astype(np.int64)
    else:
        table = np.array([sum(c << (4 * k) for k, c in enumerate(_controls(n, mode))) for n in range(4)], np.int64)
        choices = table[selector & np.uint32(3)]
    for k in range(4):
        choice = choices >> (4 * k)
        byte = (both >> ((choice & 7) << 3)) & 255
        spread = np.where(byte >= 128, 255, 0)
        result |= np.where(choice & 8, spread, byte) << (8 * k)
    return result.astype(np.uint32)


# Bit fields ----------------------------------------------------------------------------------------------------------
@rule("bfe", "u32 u64 s32 s64")
def _bfe(code: Code, i: Instruction) -> None:
    operands(i, 4)
    allow(i, "")
    kind = i.type
    bits, dtype = int(kind[1:]), dtype_of(kind)
    a = sources(code, i.args[1:2], kind)[0]
    if not (isinstance(i.args[2], Imm) and isinstance(i.args[3], Imm)):
        fields = (source(code, x, "u32") for x in i.args[2:])
        code.dst(i.args[0], kind, call(code, extract, a, *fields))
        return
    first, length = i.args[2].value & 255, i.args[3].value & 255
    if length == 0 or (kind[0] == "u" and first >= bits):
        code.dst(i.args[0], kind, code.const(np.asarray(dtype(0))))
    elif first + length >= bits:
        emit(code, "right_shift", i.args[0], kind, a, code.const(np.asarray(dtype(min(first, bits - 1)))))
    elif kind[0] == "u":
        low = a if first == 0 else f"{code.helper(np.right_shift)}({a},{code.const(np.asarray(dtype(first)))})"
        emit(code, "bitwise_and", i.args[0], kind, low, code.const(np.asarray(dtype((1 << length) - 1))))
    else:
        up = f"{code.helper(np.left_shift)}({a},{code.const(np.asarray(dtype(bits - first - length)))})"
        emit(code, "right_shift", i.args[0], kind, up, code.const(np.asarray(dtype(bits - length))))


def extract(a: np.ndarray, start: np.ndarray, length: np.ndarray) -> np.ndarray:
    """bfe with start and length in registers."""
    unsigned = np.dtype(f"u{a.dtype.itemsize}").type
    bits = a.dtype.itemsize * 8
    x, one = a.view(unsigned), unsigned(1)
    start, length = (start & np.uint32(255)).astype(np.int64), (length & np.uint32(255)).astype(np.int64)
    at, n = np.minimum(start, bits).astype(unsigned), np.minimum(length, bits).astype(unsigned)
    mask = (one << n) - one
    value = (x >> at) & mask
    if a.dtype.kind == "i":
        top = np.clip(start + length - 1, 0, bits - 1).astype(unsigned)
        sign = ((x >> top) & one).astype(bool) & (length > 0)
        held = mask & (~unsigned(0) >> at)
        value = np.where(sign, value | ~held, value)
    return value.view(a.dtype)


@rule("bfi", "b32 b64")
def _bfi(code: Code, i: Instruction) -> None:
    operands(i, 5)
    allow(i, "")
    a, b = (source(code, x, i.type) for x in i.args[1:3])
    start, length = (source(code, x, "u32") for x in i.args[3:])
    code.dst(i.args[0], i.type, call(code, insert, a, b, start, length))


def insert(a: np.ndarray, b: np.ndarray, start: np.ndarray, length: np.ndarray) -> np.ndarray:
    unsigned = a.dtype.type
    bits = a.dtype.itemsize * 8
    at = np.minimum(start & np.uint32(255), bits).astype(unsigned)
    n = np.minimum(length & np.uint32(255), bits).astype(unsigned)
    mask = ((unsigned(1) << n) - unsigned(1)) << at
    return (b & ~mask) | ((a << at) & mask)


@rule("bmsk", "b32")
def _bmsk(code: Code, i: Instruction) -> None:
    operands(i, 3)
    allow(i, "clamp wrap")
    a, b = sources(code, i.args[1:], "b32")
    code.dst(i.args[0], "b32", call(code, bit_mask, a, b, chosen(i, "clamp wrap") == "clamp"))


def bit_mask(start: np.ndarray, width: np.ndarray, clamp: bool) -> np.ndarray:
    """`width` ones from bit `start` on; "wrap" takes both modulo 32."""
    start, width = start.astype(np.int64), width.astype(np.int64)
    if clamp:
        start, width = np.minimum(start, 32), np.minimum(width, 32)
    else:
        start, width = start & 31, width & 31
    return ((((1 << width) - 1) << start) & 0xFFFFFFFF).astype(np.uint32)


@rule("szext", "u32 s32")
def _szext(code: Code, i: Instruction) -> None:
    operands(i, 3)
    allow(i, "clamp wrap")
    a, b = sources(code, i.args[1:], "u32")
    code.dst(i.args[0], "u32", call(code, extend, a, b, chosen(i, "clamp wrap") == "clamp", i.type == "s32"))


def extend(a: np.ndarray, width: np.ndarray, clamp: bool, signed: bool) -> np.ndarray:
    """The lower `width` bits, extended; a width of 0 gives 0."""
    n = (np.minimum(width, np.uint32(32)) if clamp else width & np.uint32(31)).astype(np.int64)
    value = a.astype(np.int64) & ((1 << n) - 1)
    if signed:
        half = np.where(n > 0, 1 << np.maximum(n - 1, 0), 0)
        value = (value ^ half) - half
    return (value & 0xFFFFFFFF).astype(np.uint32)


# Counts --------------------------------------------------------------------------------------------------------------
@rule("popc clz", "b32 b64")
def _count(code: Code, i: Instruction) -> None:
    operands(i, 2)
    allow(i, "")
    a = sources(code, i.args[1:], i.type)[0]
    code.dst(i.args[0], "u32", call(code, ones if i.op == "popc" else leading_zeros, a))


_ONES = np.array([bin(n).count("1") for n in range(256)], np.uint8)
_MIRRORED = np.array([int(f"{n:08b}"[::-1], 2) for n in range(256)], np.uint8)


def ones(a: np.ndarray) -> np.ndarray:
    return _ONES[a.view(np.uint8)].reshape(-1, a.dtype.itemsize).sum(axis=1, dtype=np.uint32)


def leading_zeros(a: np.ndarray) -> np.ndarray:
    if a.dtype == np.uint64:
        high = leading_zeros((a >> np.uint64(32)).astype(np.uint32))
        return np.where(high == 32, np.uint32(32) + leading_zeros(a.astype(np.uint32)), high)
    # frexp gives the number of bits of an integer that float64 holds exactly.
    return (32 - np.frexp(a.astype(np.float64))[1]).astype(np.uint32)


@rule("bfind", "u32 u64 s32 s64")
def _bfind(code: Code, i: Instruction) -> None:
    operands(i, 2)
    allow(i, "shiftamt")
    a = sources(code, i.args[1:], i.type)[0]
    code.dst(i.args[0], "u32", call(code, find_leading, a, i.has("shiftamt")))


def find_leading(a: np.ndarray, shift: bool) -> np.ndarray:
    """Position of the highest bit unlike the sign, or the shift that brings it to the top; all ones without one."""
    if a.dtype.kind == "i":
        a = np.where(a < 0, ~a, a).view(np.dtype(f"u{a.dtype.itemsize}"))
    zeros = leading_zeros(a)
    found = zeros if shift else np.uint32(a.dtype.itemsize * 8 - 1) - zeros
    return np.where(a == 0, np.uint32(0xFFFFFFFF), found)


@rule("brev", "b32 b64")
def _brev(code: Code, i: Instruction) -> None:
    operands(i, 2)
    allow(i, "")
    code.dst(i.args[0], i.type, call(code, mirror, sources(code, i.args[1:], i.type)[0]))


def mirror(a: np.ndarray) -> np.ndarray:
    return _MIRRORED[a.view(np.uint8)].view(a.dtype).byteswap()


@rule("fns", "b32")
def _fns(code: Code, i: Instruction) -> None:
    operands(i, 4)
    allow(i, "")
    mask, base = sources(code, i.args[1:3], "u32")
    code.dst(i.args[0], "u32", call(code, find_nth, "v.width", mask, base, source(code, i.args[3], "s32")))


def find_nth(width: int, mask: np.ndarray, base: np.ndarray, offset: np.ndarray) -> np.ndarray:
    columns = (np.broadcast_to(x, width).tolist() for x in (mask, base, offset))
    return np.array([_nth(*values) for values in zip(*columns, strict=True)], np.uint32)


def _nth(mask: int, base: int, offset: int) -> int:
    """Position of the |offset|-th set bit from `base` on, upwards or downwards; offset 0: `base` itself."""
    if base > 31:
        return 0xFFFFFFFF
    step = -1 if offset < 0 else 1
    last = base if offset == 0 else 31 if step > 0 else 0
    left = max(abs(offset), 1)
    for position in range(base, last + step, step):
        if mask >> position & 1:
            left -= 1
            if left == 0:
                return position
    return 0xFFFFFFFF
