"""RMSNorm and rotary embedding, read out of the formula of an element.

Each element of a pair must be a sum of at most two products ``x * rstd [* weight] [* table]`` over the pair's two
elements of x, where rstd is ``rsqrt(sum of x**2 / n + eps)`` over all heads together or each head, or is missing. Pairs
are tried as interleaved (2i, 2i + 1) and as halves (i, i + D / 2).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sympy

from . import _inductor_compat as compat
from ._formula import ROTATIONS, B, Formula, H, I, OtherForm, Product, Ranges, S, places, products, strides


@dataclass(frozen=True)
class Norm:
    """What makes rstd: squares of ``divisor`` elements of x summed in the buffer ``sums``."""

    sums: str
    per_head: bool
    divisor: float
    eps: float


@dataclass(frozen=True)
class Rotation:
    """How the pairs of `Products` are combined: four tables and signs, none where nothing is rotated."""

    name: str
    tables: tuple[str, ...] = ()
    table_index: tuple[Any, ...] = ()
    signs: tuple[float, ...] = ()


@dataclass(frozen=True)
class Match:
    """What was recognised, in the terms of the operator; a head of x starts at ``base``."""

    x: str
    base: Any
    norm: Norm | None
    weight: str | None
    weight_index: tuple[Any, ...]
    rotation: Rotation

    @property
    def x_index(self) -> tuple[Any, ...]:
        return strides(self.base, (B, S, H))


def recognise(x: Any) -> Match | None:
    """The match of ``x`` ``[B, S, H, D]``, or None."""
    *_, num_heads, D = x.get_size()
    if not all(getattr(size, "is_Integer", isinstance(size, int)) for size in (num_heads, D)):
        return None
    for rotation in ROTATIONS:
        with contextlib.suppress(OtherForm):
            return _match(x, int(num_heads), int(D), rotation)
    return None


# Which element of the pair a product holds -> its factor and the loads besides it.
Row = dict[int, tuple[float, list[Formula]]]


def _match(x: Any, num_heads: int, D: int, rotation: str) -> Match:
    known = Ranges(num_heads, D // 2, x.get_size()[:2])
    pair = places(rotation, D)
    outputs = [products(compat.formula(x, (B, S, H, place), known)) for place in pair]
    roots = {atom for output in outputs for product in output for atom in product.atoms if atom[0] == "rsqrt"}
    if not roots:
        norm = None
        buffer, base = _only_operand(outputs, pair)
    elif len(roots) == 1:
        norm, buffer, base = _norm(x, roots.pop(), D, known)
    else:
        raise OtherForm
    elements = [Formula(("load", buffer, sympy.expand(base + place))) for place in pair]
    rows = [pair_row(output, elements, 0 if norm is None else 1) for output in outputs]
    weight, weight_index = (None, (0, 0)) if norm is None else take_weight(rows, [pair] * 2)
    return Match(buffer, base, norm, weight, weight_index, take_tables(rows, rotation))


def _only_operand(outputs: Sequence[Sequence[Product]], pair: Sequence[Any]) -> tuple[str, Any]:
    """x where there is no norm: the only load that follows the head, which tables and their like do not."""
    atoms = {atom for output in outputs for product in output for atom in product.atoms}
    found = set()
    for _, buffer, index in (atom.parts for atom in atoms if H in atom[2].free_symbols):
        base = sympy.expand(index - pair[0])
        if I not in base.free_symbols and Formula(("load", buffer, sympy.expand(base + pair[1]))) in atoms:
            found.add((buffer, base))
    if len(found) != 1:
        raise OtherForm
    return found.pop()


def _norm(x: Any, root: Formula, D: int, known: Ranges) -> tuple[Norm, str, Any]:
    """The norm whose rstd is ``root``, and the buffer and base of what it normalises."""
    by_atoms: dict[tuple[Formula, ...], float] = {}
    for part in products(root[1]):
        by_atoms[part.atoms] = by_atoms.get(part.atoms, 0.0) + part.factor
    loads = [atoms[0] for atoms in by_atoms if len(atoms) == 1 and atoms[0][0] == "load"]
    if len(by_atoms) != 2 or len(loads) != 1 or () not in by_atoms:
        raise OtherForm
    sums, where = loads[0][1], loads[0][2]
    divisor, eps = 1 / by_atoms[(loads[0],)], by_atoms[()]
    batch, tokens, heads, _ = x.get_size()
    inner = sympy.Symbol("r", integer=True, nonnegative=True)
    for per_head, index in ((False, (B, S, 0)), (True, (B, S, H, 0))):
        found = compat.reduction_formula(sums, index, (inner,), known)
        sizes = [batch, tokens, heads, 1, D] if per_head else [batch, tokens, 1, heads * D]
        if found is None or [*found[0]] != sizes or sympy.expand(compat.load_index(sums, index)) != where:
            continue
        (summand, *others) = products(found[1])
        if others or summand.factor != 1 or len(summand.atoms) != 2 or summand.atoms[0] != summand.atoms[1]:
            continue
        square = summand.atoms[0]
        base = sympy.expand(square[2] - inner + (0 if per_head else H * D)) if square[0] == "load" else inner
        if inner not in base.free_symbols:
            return Norm(sums, per_head, divisor, eps), square[1], base
    raise OtherForm


def pair_row(output: Sequence[Product], elements: Sequence[Formula], num_roots: int) -> Row:
    """What multiplies each element of the pair in one of the two outputs, ``num_roots`` roots aside."""
    row: Row = {}
    for product in output:
        held = [place for place, element in enumerate(elements) if element in product.atoms]
        others = [atom for atom in product.atoms if atom[0] == "load" and atom not in elements]
        # One element of x, one rstd, and loads: nothing else, and nothing twice.
        if len(held) != 1 or held[0] in row or len(product.atoms) != len(others) + 1 + num_roots:
            raise OtherForm
        row[held[0]] = (product.factor, others)
    return row


def take_weight(rows: Sequence[Row], at: Sequence[Sequence[Any]]) -> tuple[str | None, tuple[Any, ...]]:
    """Takes the norm's weight out of every product: the load that follows the channel and neither token nor batch.

    Args:
        at: for each row and element of the pair, the channel whose weight is meant.
    """
    weights: set[tuple[Any, ...] | None] = set()
    for row, channels in zip(rows, at, strict=True):
        for element, (_, loads) in row.items():
            channel = channels[element]
            following = [load for load in loads if not sympy.expand(load[2] - channel).free_symbols & {B, S, I}]
            for load in following[:1]:
                loads.remove(load)
                weights.add((load[1], *strides(sympy.expand(load[2] - channel), (H,))))
            if not following:
                weights.add(None)
    if len(weights) != 1:
        raise OtherForm
    (weight,) = weights
    if weight is None:
        return None, (0, 0)
    return weight[0], weight[1:]


def take_tables(rows: Sequence[Row], rotation: str) -> Rotation:
    """The rotation that is left in the rows when rstd and weight are out."""
    if [set(row) for row in rows] == [{0}, {1}]:
        if rotation != "interleaved" or any(row[place] != (1.0, []) for place, row in enumerate(rows)):
            raise OtherForm
        return Rotation("none")
    if any(set(row) != {0, 1} or any(len(loads) != 1 for _, loads in row.values()) for row in rows):
        raise OtherForm
    tables = [row[element][1][0] for row in rows for element in (0, 1)]
    return Rotation(
        rotation,
        tuple(table[1] for table in tables),
        tuple(value for table in tables for value in strides(table[2], (B, S, H, I))),
        tuple(row[element][0] for row in rows for element in (0, 1)),
    )
