"""Recognises RMSNorm and rotary embedding in front of a tile, and calls `vsa::norm_rope_tile` for all three.

The generated loop reads a row twice and evaluates both halves of a rotation for every element, with 2-byte accesses:
29 % of the memory limit on an H200. The user's code stays ordinary torch: what is recognised is the formula of an
element, not the way it was written. Each element of a pair must be a sum of at most two products
``x * rstd [* weight] [* table]`` over the pair's two elements of x, where rstd is ``rsqrt(sum of x**2 / n + eps)`` over
all heads together or each head, or is missing. Pairs are tried as interleaved (2i, 2i + 1) and as halves.
Anything else takes the generic path of `tile`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from . import _inductor_compat as compat
from ._formula import ROTATIONS, B, Formula, H, I, OtherForm, Product, Ranges, S, even, places, products, strides
from ._neighbourhood import SUMS, inputs_of, name, operand
from ._substitutes import is_complex, substitute

OP = torch.ops.vsa.norm_rope_tile.default

_enabled = True


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


@contextlib.contextmanager
def recognising(enabled: bool) -> Iterator[None]:
    """Switches recognition on or off, process-wide while it lasts; for tests and for finding out what it gains."""
    global _enabled
    before, _enabled = _enabled, enabled
    try:
        yield
    finally:
        _enabled = before


def has_kernel(x: Any, D: Any) -> bool:
    """Whether recognition is on, and a kernel runs on the device, dtype and head dim of ``x``."""
    half_precision = x.get_dtype() in (torch.bfloat16, torch.float16)
    return _enabled and x.get_device().type == "cuda" and half_precision and D in (32, 64, 128, 256)


def lower(x: Any, slot_token: Any, block_size: int) -> tuple[Any, Any] | None:
    """The tiles of ``x`` and their sums by one kernel of ours; None where its formula has another form.

    Args:
        x: ``[B, S, H, D]``, not yet computed.
        block_size: of the blocks to sum over, 0 for no sums.
    """
    match = recognise(x)
    read: Callable[[str], Any] = compat.buffer_value
    squares_read_by = match.norm.sums if match is not None and match.norm is not None else None
    if match is None or match.norm is None:
        # Inductor leaves complex products to a library, which hides the norm in front of them.
        on_trial = _recognise_complex(compat.current_node().args[0])
        if on_trial is not None:
            match, read, squares_read_by = on_trial
    if match is None or (match.norm is None and not match.rotation.tables and not block_size):
        return None
    norm = match.norm
    try:
        operands = (
            read(match.x),
            match.weight and read(match.weight),
            [read(table) for table in match.rotation.tables],
        )
    except OtherForm:
        return None
    tiled, squares, sums = compat.opaque(
        OP,
        *operands,
        slot_token,
        list(match.x_index),
        list(match.weight_index),
        list(match.rotation.table_index),
        list(match.rotation.signs),
        list(x.get_size()),
        match.rotation.name,
        "none" if norm is None else "head" if norm.per_head else "all",
        1.0 if norm is None else norm.divisor,
        0.0 if norm is None else norm.eps,
        block_size,
    )
    if squares_read_by is not None:
        # Training keeps rstd: it is made from our sums instead of by a second pass over x.
        compat.read_instead(squares_read_by, squares)
    return tiled, sums


def _recognise_complex(source: torch.fx.Node) -> tuple[Match, Callable[[str], Any], str | None] | None:
    """The match of a prologue with complex numbers, how to read its operands, and the buffer that sums squares."""
    try:
        inputs, met = inputs_of([source], through={*SUMS, "aten.rsqrt"})
    except OtherForm:
        return None
    if not any(map(is_complex, met)):
        return None
    with compat.trial(inputs, [source], substitute) as values:
        match = recognise(values[source])
    if match is None:
        return None
    roots = [value for n in met if name(n) == "aten.rsqrt" and (value := compat.value_kept(n)) is not None]
    sums = _summed_in(roots[0]) if len(roots) == 1 else None
    return match, functools.partial(operand, inputs), sums


def _summed_in(root: Any) -> str | None:
    """The buffer of square sums under a root that is kept."""
    index = [B, S, H, 0][: len(root.get_size()) - 1]
    formula = compat.formula(root, [*index, 0] if len(index) < 4 else index, Ranges(1, 1))
    with contextlib.suppress(OtherForm):
        loads = [atom for part in products(formula[1]) for atom in part.atoms if atom[0] == "load"]
        if len(loads) == 1 and compat.is_sum(loads[0][1]):
            return str(loads[0][1])
    return None


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
    known = Ranges(num_heads, D // 2)
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
    # Pairs are read as words, of x and of a weight as narrow.
    if not even(*strides(base, (B, S, H))):
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
    by_atoms = {part.atoms: part.factor for part in products(root[1])}
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
    if not even(*weight[1:]):
        raise OtherForm
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
