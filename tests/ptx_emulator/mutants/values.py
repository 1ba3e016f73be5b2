"""Faults of operands: descriptors, addresses, coordinates, shapes.

A field of a value that is computed at run time is changed by an instruction put in before: `xor` or `add`.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..ir import Imm, Instruction, Kernel, Mem, Reg, TensorMem, Vec
from .edit import Mutation, changing, replacing, setting

# Fields of a descriptor: (name, add, flip). Of a matrix in shared memory: PTX ISA 9.7.16.5.1 and 9.7.15.5.1.
Fields = tuple[tuple[str, int, int], ...]
_MATRIX_COMMON: Fields = (
    ("start + 16 bytes", 1, 0),
    ("start + 1024 bytes", 64, 0),
    ("leading offset + 16 bytes", 1 << 16, 0),
    ("stride offset + 16 bytes", 1 << 32, 0),
    ("stride offset, 1024 bytes flipped", 0, 1 << 38),
    ("base offset + 1", 0, 1 << 49),
)
_MATRIX_TCGEN05: Fields = (*_MATRIX_COMMON, ("swizzle, 128B <-> 64B", 0, 6 << 61), ("fixed bits", 0, 1 << 46))
_MATRIX_WGMMA: Fields = (*_MATRIX_COMMON, ("swizzle, bits flipped", 0, 3 << 62))
# Of the product: PTX ISA 9.7.16.4.2.
_INSTRUCTION: Fields = (
    ("D format", 0, 1 << 4),
    ("A format", 0, 1 << 7),
    ("B format", 0, 1 << 10),
    ("A negated", 0, 1 << 13),
    ("A major", 0, 1 << 15),
    ("B major", 0, 1 << 16),
    ("N + 16", 2 << 17, 0),
    ("N - 16", -(2 << 17), 0),
    ("M, 64 <-> 128", 0, 12 << 24),
    ("sparse bit", 0, 1 << 2),
)
# Shared addresses of a copy's buffer move by these bytes: part of a swizzle pattern, and whole patterns.
_BUFFER_STEPS = (128, 1024, -1024)


def _fields(i: Instruction, kind: str, place: int, name: str, fields: Fields) -> Iterator[Mutation]:
    for field, add, flip in fields:
        edit = changing(i.index, (place,), add, flip)
        yield Mutation(kind, i.index, f"{name}: {field}", edit, (place, add, flip))


def descriptors(kernel: Kernel, i: Instruction) -> Iterator[Mutation]:
    if i.op == "tcgen05" and i.mods[0] in ("mma", "cp"):
        operands = ((1, "source"),) if i.mods[0] == "cp" else ((1, "A"), (2, "B"))
        for place, name in operands:
            if isinstance(i.args[place], Reg):
                yield from _fields(i, "wrong matrix descriptor", place, name, _MATRIX_TCGEN05)
        if i.mods[0] == "mma":
            yield from _fields(i, "wrong instruction descriptor", 3, "idesc", _INSTRUCTION)
    if i.op == "wgmma" and i.mods[0] == "mma_async":
        for place, name in ((1, "A"), (2, "B")):
            if isinstance(i.args[place], Reg):
                yield from _fields(i, "wrong matrix descriptor", place, name, _MATRIX_WGMMA)
        yield from _wgmma_immediates(i)


def _wgmma_immediates(i: Instruction) -> Iterator[Mutation]:
    """Signs and transposes. PTX ISA 9.7.15.5.2."""
    for k in range(4, len(i.args)):
        a = i.args[k]
        if isinstance(a, Imm):
            other = Imm(-a.value) if k < 6 else Imm(1 - a.value)
            what = f"operand {k}, {a.value} -> {other.value}"
            yield Mutation("wrong instruction descriptor", i.index, what, setting(i.index, (k,), other))


def accumulation(kernel: Kernel, i: Instruction) -> Iterator[Mutation]:
    """enable-input-d or scale-d inverted."""
    place = {"tcgen05.mma": 4, "wgmma.mma_async": 3}.get(".".join((i.op, *i.mods[:1])), -1)
    operand = i.args[place] if place >= 0 else None
    if isinstance(operand, Imm):
        yield Mutation("inverted accumulation", i.index, "", setting(i.index, (place,), Imm(1 - operand.value)))
    elif isinstance(operand, Reg) and operand.cls == "p":
        yield Mutation("inverted accumulation", i.index, "", changing(i.index, (place,)))


def tensor_addresses(kernel: Kernel, i: Instruction) -> Iterator[Mutation]:
    """Another column or lane of tensor memory."""
    if i.op != "tcgen05" or i.mods[0] not in ("ld", "st", "mma", "cp"):
        return
    for k, a in enumerate(i.args):
        for what, add in (("column + 1", 1), ("column + 8", 8), ("lane + 32", 32 << 16)) if isinstance(a, Mem) else ():
            edit = changing(i.index, (k,), add)
            yield Mutation("wrong tensor memory address", i.index, f"operand {k}, {what}", edit)


def coordinates(kernel: Kernel, i: Instruction) -> Iterator[Mutation]:
    if i.op != "cp":
        return
    for k, a in enumerate(i.args):
        if isinstance(a, TensorMem) and isinstance(a.parts[0], Vec):
            for n in range(len(a.parts[0].items)):
                yield Mutation("wrong coordinate", i.index, f"coordinate {n} + 1", changing(i.index, (k, 1, n), 1))


def shared_addresses(kernel: Kernel, i: Instruction) -> Iterator[Mutation]:
    """Another place in shared memory: a neighbour of a thread's own, or another buffer for a copy."""
    place = next((k for k, a in enumerate(i.args) if isinstance(a, Mem)), -1)
    if i.op == "cp" and "tensor" in i.mods and "prefetch" not in i.mods:
        steps: tuple[int, ...] = _BUFFER_STEPS
    elif (
        i.op in ("ldmatrix", "stmatrix")
        or (i.op in ("ld", "st") and i.mods and i.mods[0].startswith("shared"))
        or i.mods[:2] in (("async", "ca"), ("async", "cg"))
    ):
        steps = (16,)
    else:
        return
    for step in steps:
        yield Mutation("wrong shared address", i.index, f"{step:+d}", changing(i.index, (place,), step))


def matrix_fragments(kernel: Kernel, i: Instruction) -> Iterator[Mutation]:
    """ldmatrix with and without .trans; halves of an mma.sync operand exchanged."""
    kind = "wrong fragment"
    if i.op in ("ldmatrix", "stmatrix") and "b16" in i.mods:
        mods = tuple(m for m in i.mods if m != "trans")
        if mods == i.mods:
            at = i.mods.index(next(m for m in i.mods if m[0] == "x")) + 1
            mods = (*i.mods[:at], "trans", *i.mods[at:])
        yield Mutation(kind, i.index, ".trans toggled", replacing(i.index, mods=mods))
    if i.op == "mma":
        for k, name in ((1, "A"), (2, "B")):
            operand = i.args[k]
            if isinstance(operand, Vec) and len(operand.items) > 1:
                first, second, *rest = operand.items
                edit = setting(i.index, (k,), Vec((second, first, *rest)))
                yield Mutation(kind, i.index, f"{name}[0] <-> {name}[1]", edit)


RULES = (
    descriptors,
    accumulation,
    tensor_addresses,
    coordinates,
    shared_addresses,
    matrix_fragments,
)
