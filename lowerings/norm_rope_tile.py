"""Recognises RMSNorm and rotary embedding in front of a tile, and calls `vsa::norm_rope_tile` for all three.

The generated loop reads a row twice and evaluates both halves of a rotation for every element, with 2-byte accesses:
29 % of the memory limit on an H200. The user's code stays ordinary torch: what is recognised is the formula of an
element, not the way it was written. Each element of a pair must be a sum of at most two products
``x * rstd [* weight] [* table]`` over the pair's two elements of x, where rstd is ``rsqrt(sum of x**2 / n + eps)`` over
all heads together or each head. Pairs are tried as interleaved (2i, 2i + 1) and as halves (i, i + D / 2). Anything else
takes the generic path of `tile`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from . import _inductor_compat as compat

OP = torch.ops.vsa.norm_rope_tile.default

_B, _S, _H, _I = sympy.symbols("b s h i", integer=True, nonnegative=True)
_enabled = True


@dataclass(frozen=True)
class Product:
    """One summand: a constant factor and what it multiplies."""

    factor: float
    atoms: tuple[compat.Formula, ...]


@dataclass(frozen=True)
class Norm:
    """What makes rstd: squares of ``divisor`` elements of x summed in ``sums``; a head of x starts at ``base``."""

    x: str
    sums: str
    base: Any
    per_head: bool
    divisor: float
    eps: float


@dataclass(frozen=True)
class Match:
    """What was recognised, in the terms of the operator."""

    norm: Norm
    weight: str | None
    weight_index: tuple[Any, ...]
    tables: tuple[str, ...]
    table_index: tuple[Any, ...]
    signs: tuple[float, ...]
    rotation: str

    @property
    def x_index(self) -> tuple[Any, ...]:
        return _strides(self.norm.base, (_B, _S, _H))


class _OtherForm(Exception):
    """The formula is not of the form; the generic path takes it."""


@contextlib.contextmanager
def recognising(enabled: bool) -> Iterator[None]:
    """Switches recognition on or off, process-wide while it lasts; for tests and for finding out what it gains."""
    global _enabled
    before, _enabled = _enabled, enabled
    try:
        yield
    finally:
        _enabled = before


def lower(x: Any, slot_token: Any) -> Any | None:
    """The tiles of ``x`` by one kernel of ours; None where its formula has another form or no kernel can run it."""
    B, S, H, D = x.get_size()
    if not _enabled or not _has_kernel(x, D):
        return None
    match = recognise(x, int(D))
    if match is None:
        return None
    tiled, sums = compat.opaque(
        OP,
        compat.buffer_value(match.norm.x),
        None if match.weight is None else compat.buffer_value(match.weight),
        [compat.buffer_value(table) for table in match.tables],
        slot_token,
        list(match.x_index),
        list(match.weight_index),
        list(match.table_index),
        list(match.signs),
        [B, S, H, D],
        match.rotation,
        match.norm.per_head,
        match.norm.divisor,
        match.norm.eps,
    )
    # Training keeps rstd: it is made from our sums instead of by a second pass over x.
    compat.read_instead(match.norm.sums, sums)
    return tiled


def _has_kernel(x: Any, D: Any) -> bool:
    half_precision = x.get_dtype() in (torch.bfloat16, torch.float16)
    return x.get_device().type == "cuda" and half_precision and D in (32, 64, 128, 256)


def recognise(x: Any, D: int) -> Match | None:
    """The match of ``x`` ``[B, S, H, D]``, or None."""
    for rotation, places in (("interleaved", (2 * _I, 2 * _I + 1)), ("half", (_I, _I + D // 2))):
        try:
            return _match(x, D, rotation, places)
        except _OtherForm:
            continue
    return None


class _PairRange:
    """`compat.Known`: the pair's number runs from 0 to D / 2, few enough to try all."""

    def __init__(self, D: int) -> None:
        self.values = range(D // 2)

    def holds(self, relation: Any) -> bool | None:
        if relation in (sympy.true, sympy.false):
            return bool(relation)
        if relation.free_symbols != {_I}:
            return None
        found = {bool(relation.subs(_I, value)) for value in self.values}
        return found.pop() if len(found) == 1 else None

    def simplified(self, index: Any) -> Any:
        """Replaces roundings and remainders of the pair's number that are linear in it."""
        index = sympy.sympify(index)
        for part in sorted(index.atoms(sympy.Function), key=sympy.count_ops):
            if part.free_symbols == {_I}:
                first, second = (part.subs(_I, value) for value in (0, 1))
                line = first + (second - first) * _I
                if all(part.subs(_I, value) == line.subs(_I, value) for value in self.values):
                    index = index.subs(part, line)
        return index


# Which element of the pair a product holds -> its sign and the loads besides x.
_Row = dict[int, tuple[float, list[compat.Formula]]]


def _match(x: Any, D: int, rotation: str, places: tuple[Any, Any]) -> Match:
    known = _PairRange(D)
    outputs = [_products(compat.formula(x, (_B, _S, _H, place), known)) for place in places]
    norm = _norm(x, outputs[0][0], D, known)
    # Pairs are read as 32-bit words, of x and of a weight as narrow.
    if any(not (value.is_Integer and int(value) % 2 == 0) for value in _strides(norm.base, (_B, _S, _H))):
        raise _OtherForm
    elements = [compat.Formula(("load", norm.x, sympy.expand(norm.base + place))) for place in places]
    rows = [_row(products, elements) for products in outputs]
    weight, weight_index = _take_weight(rows, places)
    if any(not (value.is_Integer and int(value) % 2 == 0) for value in map(sympy.sympify, weight_index)):
        raise _OtherForm
    tables: list[compat.Formula] = []
    signs: list[float] = []
    if [set(row) for row in rows] == [{0}, {1}]:
        if rotation != "interleaved" or any(row[place] != (1.0, []) for place, row in enumerate(rows)):
            raise _OtherForm
        rotation = "none"
    else:
        for row in rows:
            if set(row) != {0, 1} or any(len(loads) != 1 for _, loads in row.values()):
                raise _OtherForm
            tables += [row[element][1][0] for element in (0, 1)]
            signs += [row[element][0] for element in (0, 1)]
    return Match(
        norm,
        weight,
        weight_index,
        tuple(table[1] for table in tables),
        tuple(value for table in tables for value in _strides(table[2], (_B, _S, _H, _I))),
        tuple(signs),
        rotation,
    )


def _products(node: compat.Formula) -> list[Product]:
    """The formula as a sum of products."""
    kind, operands = node[0], node[1:]
    if kind == "constant":
        return [Product(float(operands[0]), ())]
    if kind in ("add", "sub"):
        right = _products(operands[1])
        if kind == "sub":
            right = [Product(-product.factor, product.atoms) for product in right]
        return _products(operands[0]) + right
    if kind == "neg":
        return [Product(-product.factor, product.atoms) for product in _products(operands[0])]
    if kind == "mul":
        left, right = _products(operands[0]), _products(operands[1])
        if len(left) * len(right) > 8:
            raise _OtherForm
        return [Product(a.factor * b.factor, a.atoms + b.atoms) for a in left for b in right]
    if kind == "truediv" and operands[1][0] == "constant":
        by = float(operands[1][1])
        return [Product(product.factor / by, product.atoms) for product in _products(operands[0])]
    if kind in ("load", "rsqrt"):
        return [Product(1.0, (node,))]
    raise _OtherForm


def _norm(x: Any, product: Product, D: int, known: compat.Known) -> Norm:
    """The norm whose rstd is in ``product``."""
    roots = [atom for atom in product.atoms if atom[0] == "rsqrt"]
    if len(roots) != 1:
        raise _OtherForm
    by_atoms = {part.atoms: part.factor for part in _products(roots[0][1])}
    loads = [atoms[0] for atoms in by_atoms if len(atoms) == 1 and atoms[0][0] == "load"]
    if len(by_atoms) != 2 or len(loads) != 1 or () not in by_atoms:
        raise _OtherForm
    sums, where = loads[0][1], loads[0][2]
    divisor, eps = 1 / by_atoms[(loads[0],)], by_atoms[()]
    B, S, H, _ = x.get_size()
    inner = sympy.Symbol("r", integer=True, nonnegative=True)
    for per_head, index in ((False, (_B, _S, 0)), (True, (_B, _S, _H, 0))):
        found = compat.reduction_formula(sums, index, (inner,), known)
        sizes = [B, S, H, 1, D] if per_head else [B, S, 1, H * D]
        if found is None or [*found[0]] != sizes or sympy.expand(compat.load_index(sums, index)) != where:
            continue
        (summand, *others) = _products(found[1])
        if others or summand.factor != 1 or len(summand.atoms) != 2 or summand.atoms[0] != summand.atoms[1]:
            continue
        square = summand.atoms[0]
        base = sympy.expand(square[2] - inner + (0 if per_head else _H * D)) if square[0] == "load" else inner
        if inner not in base.free_symbols:
            return Norm(square[1], sums, base, per_head, divisor, eps)
    raise _OtherForm


def _row(products: list[Product], elements: Sequence[compat.Formula]) -> _Row:
    """What multiplies each element of the pair in one of the two outputs."""
    row: _Row = {}
    for product in products:
        held = [place for place, element in enumerate(elements) if element in product.atoms]
        others = [atom for atom in product.atoms if atom[0] == "load" and atom not in elements]
        # One element of x, one rstd, and loads: nothing else, and nothing twice.
        if len(held) != 1 or held[0] in row or len(product.atoms) != len(others) + 2:
            raise _OtherForm
        row[held[0]] = (product.factor, others)
    return row


def _take_weight(rows: list[_Row], places: tuple[Any, Any]) -> tuple[str | None, tuple[Any, ...]]:
    """Takes the norm's weight out of every product: the load that follows the channel and neither token nor batch."""
    weights: set[tuple[Any, ...] | None] = set()
    for row in rows:
        for element, (_, loads) in row.items():
            following = [
                load for load in loads if not sympy.expand(load[2] - places[element]).free_symbols & {_B, _S, _I}
            ]
            for load in following[:1]:
                loads.remove(load)
                weights.add((load[1], *_strides(sympy.expand(load[2] - places[element]), (_H,))))
            if not following:
                weights.add(None)
    if len(weights) != 1:
        raise _OtherForm
    (weight,) = weights
    return (None, (0, 0)) if weight is None else (weight[0], weight[1:])


def _strides(index: Any, symbols: Sequence[Any]) -> tuple[Any, ...]:
    """The factor of each symbol in an index that is linear in them, then what is left."""
    rest, factors = sympy.expand(index), []
    for symbol in symbols:
        factor = rest.coeff(symbol, 1)
        rest = sympy.expand(rest - factor * symbol)
        factors.append(factor)
    if any(value.free_symbols & {_B, _S, _H, _I} for value in (rest, *factors)):
        raise _OtherForm
    return (*factors, rest)
