"""What an element of a value is made of, as a plain tree, and what such a tree says as a sum of products.

For lowerings that recognise a form instead of a way of writing it. Nodes are ``("load", buffer name, sympy index)``,
``("constant", number)``, ``("index", sympy expression)`` and ``(operation, *nodes)``. Elements are addressed by the
symbols of a raster-order tensor: ``B`` batch, ``S`` token, ``H`` head and ``I``, which of the D / 2 pairs of channels.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import sympy

B, S, H, I = sympy.symbols("b s h i", integer=True, nonnegative=True)  # noqa: E741

# Pairs of channels: which two make one, as a function of the pair's number and D.
ROTATIONS = ("interleaved", "half")


def places(rotation: str, D: int) -> tuple[Any, Any]:
    """The channels of the two elements of pair `I`."""
    return (2 * I, 2 * I + 1) if rotation == "interleaved" else (I, I + D // 2)


class OtherForm(Exception):
    """The formula is not of the form that was looked for; the generic path takes it."""


@contextlib.contextmanager
def recognition() -> Iterator[None]:
    """Makes any failure inside an `OtherForm`: what cannot be looked at must not break what compiles without a look."""
    try:
        yield
    except Exception as error:
        raise OtherForm from error


@dataclass(frozen=True)
class Formula:
    """A node; not a tuple, because Inductor takes those apart as several results."""

    parts: tuple[Any, ...]

    def __getitem__(self, place: Any) -> Any:
        return self.parts[place]


@dataclass(frozen=True)
class Product:
    """One summand: a constant factor and what it multiplies."""

    factor: float
    atoms: tuple[Formula, ...]

    @property
    def count(self) -> Counter[Formula]:
        return Counter(self.atoms)


_COMPARISONS = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}
_INDEX_FUNCTIONS = {"FloorDiv": lambda a, b: a // b, "ModularIndexing": lambda a, by, modulus: a // by % modulus}


class Ranges:
    """What is known about the indices: all values of head and pair, which are few, and how many of batch and token."""

    def __init__(self, num_heads: int, num_pairs: int, outer: Sequence[Any] = ()) -> None:
        self.extents = {H: num_heads, I: num_pairs}
        self.outer = dict(zip((B, S), outer, strict=False))

    def within(self, index: Any, size: Any) -> bool:
        """Whether ``index`` is known to stay below ``size``."""
        index = sympy.sympify(index)
        if index in self.outer:
            return bool(sympy.sympify(self.outer[index]) == sympy.sympify(size))
        if not index.free_symbols <= self.extents.keys() or not sympy.sympify(size).is_Integer:
            return False
        return max(self._values(index)) < int(size)

    def compare(self, name: str, left: Any, right: Any) -> bool | None:
        """Whether a comparison of index expressions holds everywhere or nowhere; None if that depends."""
        left, right = sympy.sympify(left), sympy.sympify(right)
        if not (left.free_symbols | right.free_symbols) <= self.extents.keys():
            return None
        holds = _COMPARISONS[name]
        found = {bool(holds(a, b)) for a, b in zip(self._values(left), self._values(right), strict=True)}
        return found.pop() if len(found) == 1 else None

    def simplified(self, index: Any) -> Any:
        """Replaces roundings and remainders that are linear in head and pair."""
        index = sympy.expand(index)
        while True:
            for part in sorted(index.atoms(sympy.Function), key=sympy.count_ops):
                line = self._linear(part)
                if line is not None:
                    index = sympy.expand(index.subs(part, line))
                    break
            else:
                return index

    def _linear(self, part: Any) -> Any | None:
        if not part.free_symbols or not part.free_symbols <= self.extents.keys():
            return None
        values = self._values(part)
        _, pairs = self.extents.values()
        at_head, at_pair = values[pairs] if len(values) > pairs else values[0], values[1] if pairs > 1 else values[0]
        line = values[0] + (at_head - values[0]) * H + (at_pair - values[0]) * I
        return line if self._values(line) == values else None

    def _values(self, expression: Any) -> list[int]:
        evaluate = _evaluator(sympy.sympify(expression))
        return [int(evaluate(*point)) for point in itertools.product(*map(range, self.extents.values()))]


@functools.lru_cache(512)
def _evaluator(expression: Any) -> Any:
    return sympy.lambdify((H, I), expression, modules=[_INDEX_FUNCTIONS, "math"])


def folded(name: str, nodes: Sequence[Formula], known: Ranges) -> Formula:
    """The node of an operation; comparisons, masks and selections that are known disappear."""

    def truth(node: Formula) -> bool | None:
        return bool(node[1]) if node[0] == "constant" else None

    if name in _COMPARISONS and all(node[0] in ("index", "constant") for node in nodes):
        held = known.compare(name, nodes[0][1], nodes[1][1])
        if held is not None:
            return Formula(("constant", held))
    if name in ("and_", "logical_and") and False in map(truth, nodes):
        return Formula(("constant", False))
    if name in ("and_", "logical_and") and True in map(truth, nodes):
        return nodes[0] if truth(nodes[1]) else nodes[1]
    if name == "where" and truth(nodes[0]) is not None:
        return nodes[1] if truth(nodes[0]) else nodes[2]
    if name == "masked" and truth(nodes[0]) is not None:
        return nodes[1] if truth(nodes[0]) else nodes[2]
    return Formula((name, *nodes))


def position_in(sizes: Sequence[Any], strides: Sequence[Any], index: Any, known: Ranges) -> list[Any] | None:
    """The indices per axis that make ``index`` under static strides; None where they cannot be told."""
    if not all(getattr(stride, "is_Integer", isinstance(stride, int)) for stride in strides):
        return None
    rest, place = sympy.expand(index), [sympy.Integer(0)] * len(sizes)
    axes = sorted((axis for axis in range(len(sizes)) if sizes[axis] != 1), key=lambda axis: -int(strides[axis]))
    for axis in axes:
        if strides[axis] == 0:
            continue
        for term in sympy.Add.make_args(rest):
            factor, symbols = term.as_coeff_Mul()
            part = sympy.floor(factor / strides[axis]) if factor >= 0 else sympy.Integer(0)
            place[axis] += part * symbols
            rest -= part * strides[axis] * symbols
    # An index that runs out of its axis belongs partly to the axis in front, unless there is none.
    if rest != 0 or not all(known.within(place[axis], sizes[axis]) for axis in axes[1:]):
        return None
    return place


def products(node: Formula, limit: int = 8) -> list[Product]:
    """The formula as a sum of at most ``limit`` products of loads and inverse roots."""
    kind, operands = node[0], node[1:]
    if kind == "constant":
        return [Product(float(operands[0]), ())]
    if kind in ("add", "sub"):
        right = products(operands[1], limit)
        if kind == "sub":
            right = [Product(-product.factor, product.atoms) for product in right]
        return products(operands[0], limit) + right
    if kind == "neg":
        return [Product(-product.factor, product.atoms) for product in products(operands[0], limit)]
    if kind == "mul":
        return _multiplied(products(operands[0], limit), products(operands[1], limit), limit)
    if kind == "fma":
        product = _multiplied(products(operands[0], limit), products(operands[1], limit), limit)
        return product + products(operands[2], limit)
    if kind == "pow" and operands[1][0] == "constant" and operands[1][1] in (1, 2, 3):
        base = products(operands[0], limit)
        return functools.reduce(lambda a, b: _multiplied(a, b, limit), [base] * int(operands[1][1]))
    if kind == "truediv" and operands[1][0] == "constant":
        by = float(operands[1][1])
        return [Product(product.factor / by, product.atoms) for product in products(operands[0], limit)]
    if kind in ("load", "rsqrt"):
        return [Product(1.0, (node,))]
    raise OtherForm


def _multiplied(left: list[Product], right: list[Product], limit: int) -> list[Product]:
    if len(left) * len(right) > limit:
        raise OtherForm
    return [Product(a.factor * b.factor, a.atoms + b.atoms) for a in left for b in right]


def strides(index: Any, symbols: Sequence[Any]) -> tuple[Any, ...]:
    """The factor of each symbol in an index that is linear in them, then what is left."""
    rest, factors = sympy.expand(index), []
    for symbol in symbols:
        factor = rest.coeff(symbol, 1)
        rest = sympy.expand(rest - factor * symbol)
        factors.append(factor)
    if any(value.free_symbols & {B, S, H, I} for value in (rest, *factors)):
        raise OtherForm
    return (*factors, rest)
