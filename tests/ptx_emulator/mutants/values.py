"""Faults of operands: descriptors, addresses, coordinates, shapes.

A field of a value that is computed at run time is changed by an instruction put in before: `xor` or `add`.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..ir import Imm, Instruction, Kernel, Mem, Reg, TensorMem
from .edit import Mutation

# Fields of a matrix descriptor in shared memory: (name, add, flip). PTX ISA 9.7.16.5.1 and 9.7.15.5.1.
_MATRIX_COMMON = (
    ("start + 16 bytes", 1, 0),
    ("start + 1024 bytes", 64, 0),
    ("leading offset + 16 bytes", 1 << 16, 0),
    ("stride offset + 16 bytes", 1 << 32, 0),
    ("stride offset doubled bit", 0, 1 << 38),
)
_MATRIX_TCGEN05 = (
    *_MATRIX_COMMON,
    ("swizzle 128B <-> 64B", 0, 6 << 61),
    ("fixed bits", 0, 1 << 46),
    ("base offset + 1", 0, 1 << 49),
)
_MATRIX_WGMMA = (*_MATRIX_COMMON, ("swizzle bits flipped", 0, 3 << 62), ("base offset + 1", 0, 1 << 49))
# Fields of the instruction descriptor. PTX ISA 9.7.16.4.2.
_INSTRUCTION = (
    ("D format", 0, 1 << 4),
    ("A format", 0, 1 << 7),
    ("B format", 0, 1 << 10),
    ("A negated", 0, 1 << 13),
    ("A major", 0, 1 << 15),
    ("B major", 0, 1 << 16),
    ("N + 16", 2 << 17, 0),
    ("N - 16", -(2 << 17), 0),
    ("M 64 <-> 128", 0, 12 << 24),
    ("sparse bit", 0, 1 << 2),
)


def _fields(i: Instruction, kind: str, place: int, name: str, fields: tuple) -> Iterator[Mutation]:
    for field, add, flip in fields:
        yield Mutation(
            kind, i.index, f"{name}: {field}",
            lambda e, a=add, f=flip: e.change(i.index, (place,), add=a, flip=f), (place, add, flip),
        )  # fmt: skip


def descriptors(kernel: Kernel, i: Instruction) -> Iterator[Mutation]:
    if i.op == "tcgen05" and i.mods[0] in ("mma", "cp"):
        operands = {"cp": ((1, "source"),), "mma": ((1, "A"), (2, "B"))}[i.mods[0]]
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
            what = f"operand {k} {a.value} -> {other.value}"
            yield Mutation("wrong instruction descriptor", i.index, what, lambda e, k=k, o=other: e.set(i.index, (k,), o))


def accumulation(kernel: Kernel, i: Instruction) -> Iterator[Mutation]:
    """enable-input-d or scale-d inverted."""
    place = {"tcgen05.mma": 4, "wgmma.mma_async": 3}.get(".".join((i.op, *i.mods[:1])), -1)
    if place < 0:
        return
    operand = i.args[place]
    if isinstance(operand, Imm):
        yield Mutation("inverted accumulation", i.index, "", lambda e: e.set(i.index, (place,), Imm(1 - operand.value)))
    elif isinstance(operand, Reg) and operand.cls == "p":
        yield Mutation("inverted accumulation", i.index, "", lambda e: e.change(i.index, (place,)))


def tensor_addresses(kernel: Kernel, i: Instruction) -> Iterator[Mutation]:
    """Another column or lane of tensor memory."""
    if i.op != "tcgen05" or i.mods[0] not in ("ld", "st", "mma", "cp"):
        return
    places = [k for k, a in enumerate(i.args) if isinstance(a, Mem)]
    for k in places:
        for what, add, flip in (("column + 1", 1, 0), ("column + 8", 8, 0), ("lane + 32", 32 << 16, 0)):
            yield Mutation(
                "wrong tensor memory address", i.index, f"operand {k}: {what}",
                lambda e, k=k, a=add, f=flip: e.change(i.index, (k,), add=a, flip=f),
            )  # fmt: skip


def coordinates(kernel: Kernel, i: Instruction) -> Iterator[Mutation]:
    for k, a in enumerate(i.args):
        if not (isinstance(a, TensorMem) and i.op == "cp"):
            continue
        parts = a.parts[0].items
        for n, part in enumerate(parts):
            if isinstance(part, (Reg, Imm)):
                yield Mutation(
                    "wrong coordinate", i.index, f"{n}: + 1",
                    lambda e, k=k, n=n: e.change(i.index, (k, 1, n), add=1),
                )  # fmt: skip


def shared_addresses(kernel: Kernel, i: Instruction) -> Iterator[Mutation]:
    """Another place in shared memory: a neighbour of a thread's own, or another buffer for a copy."""
    kind = "wrong shared address"
    if i.op == "cp" and "tensor" in i.mods and i.args and "prefetch" not in i.mods:
        place = 0 if isinstance(i.args[0], Mem) else 1
        for step in (128, 1024, -1024):
            yield Mutation(kind, i.index, f"{step:+d}", lambda e, s=step: e.change(i.index, (place,), add=s))
        return
    if i.op in ("ldmatrix", "stmatrix") or (i.op in ("ld", "st") and i.mods and i.mods[0].startswith("shared")):
        place = next(k for k, a in enumerate(i.args) if isinstance(a, Mem))
        yield Mutation(kind, i.index, "+16", lambda e: e.change(i.index, (place,), add=16))
    elif i.op == "cp" and i.mods[:2] in (("async", "ca"), ("async", "cg")):
        yield Mutation(kind, i.index, "+16", lambda e: e.change(i.index, (0,), add=16))


def matrix_fragments(kernel: Kernel, i: Instruction) -> Iterator[Mutation]:
    """ldmatrix with and without .trans; halves of an mma.sync operand exchanged."""
    if i.op in ("ldmatrix", "stmatrix") and "b16" in i.mods:
        mods = tuple(m for m in i.mods if m != "trans")
        if mods == i.mods:
            at = i.mods.index(next(m for m in i.mods if m[0] == "x")) + 1
            mods = (*i.mods[:at], "trans", *i.mods[at:])
        yield Mutation("wrong fragment", i.index, ".trans toggled", lambda e: e.replace(i.index, mods=mods))
    if i.op == "mma":
        for k, name in ((1, "A"), (2, "B")):
            items = getattr(i.args[k], "items", ())
            if len(items) > 1:
                other = type(i.args[k])((items[1], items[0], *items[2:]))
                yield Mutation(
                    "wrong fragment", i.index, f"{name}[0] <-> {name}[1]",
                    lambda e, k=k, o=other: e.set(i.index, (k,), o),
                )  # fmt: skip


RULES = (
    descriptors,
    accumulation,
    tensor_addresses,
    coordinates,
    shared_addresses,
    matrix_fragments,
)
