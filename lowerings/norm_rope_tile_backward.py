"""Recognises what follows the un-tile of a gradient: rotary embedding and RMSNorm backward, in one kernel of ours.

Generated code takes three passes for it: un-tile and rotation, the two sums of the norm, the norm's weight. Here, too,
what is recognised is a formula. The calls that follow `vsa::untile` are lowered on trial, with the un-tiled gradient g
as an input; looked for is the last tensor of the tokens' size whose elements are

    r * w * u  -  x * r**3 / n * (sum of w * u * x over the row or the head),     u = a rotation of pairs of g

or u alone, and sums over all tokens of u * x * r, which are gradients of w. What is found gets its value from
`vsa::norm_rope_tile_backward`; what only led there is not lowered. A gradient of a tile mean is a row per tile, added
in the same pass. A backend whose contract leaves work on dq to its surroundings, and any other form, takes the generic
path.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import operator
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from . import _inductor_compat as compat
from ._formula import (
    ROTATIONS,
    B,
    Formula,
    H,
    I,
    OtherForm,
    Product,
    Ranges,
    S,
    places,
    products,
    recognition,
    strides,
)
from ._neighbourhood import beyond, computes, following, inputs_of, is_loop, name, reader, real_dtype
from ._recognition import Rotation, Row, pair_row, take_tables, take_weight
from ._substitutes import substitute
from .norm_rope_tile import has_kernel, readable

OP = torch.ops.vsa.norm_rope_tile_backward.default

_aten = torch.ops.aten
# The last forms that are tried; further ones are parts of them.
_MAX_CANDIDATES = 6


@dataclass(frozen=True)
class NormBackward:
    """The norm in front of the rotation: where x, rstd and weight are read, among the inputs of the trial."""

    x: str
    base: Any
    rstd: Formula
    weight: str | None
    weight_index: tuple[Any, ...]
    per_head: bool
    divisor: float


@dataclass(frozen=True)
class Match:
    """What was recognised: ``gradient`` is the tensor, ``weight_gradients`` are sums over all tokens."""

    gradient: torch.fx.Node
    weight_gradients: tuple[torch.fx.Node, ...]
    norm: NormBackward | None
    rotation: Rotation


def lower(x: Any, slot_token: Any) -> Any | None:
    """The un-tiled ``x`` ``[B, H, S_pad, D]`` where sums over tiles come with it; None for the generic path.

    Nodes behind the un-tile get their values here where their form is recognised.
    """
    node = compat.current_node()
    tiled, sums, block_size = _parts(node.args[0])
    if tiled is None or not has_kernel(x) or not compat.is_buffer(tiled):
        return None
    behind = following(node)
    try:
        with recognition():
            inputs, _ = inputs_of(behind, [node])
            match = recognise(node, behind, inputs)
            alone = not any(map(computes, behind))
            if match is None and (sums is None or not alone):
                return None
            arguments = _arguments(node, tiled, sums, slot_token, block_size, inputs, match)
    except OtherForm:
        return None
    dx, dweight = compat.opaque(OP, *arguments)
    if match is None:
        return dx
    compat.values()[match.gradient] = _shaped(dx, match.gradient)
    for sum_node in match.weight_gradients:
        per_head = match.norm is not None and match.norm.per_head
        summed = compat.aten(_aten.sum.dim_IntList, dweight, [0]) if per_head else dweight
        compat.values()[sum_node] = _shaped(summed, sum_node)
    _drop_what_led_to({match.gradient, *match.weight_gradients}, behind)
    return None


def _parts(arriving: Any) -> tuple[Any, Any, int]:
    """The output of `vsa::attention_backward` in a gradient, the rows per tile added to it, and the block size."""
    added = arriving.target is _aten.add.Tensor and not arriving.kwargs
    summands: list[Any] = list(arriving.args) if added else [arriving]
    tiled, rows, block_size, rows_of = None, None, 0, 0
    for summand in summands:
        if not isinstance(summand, torch.fx.Node):
            return None, None, 0
        source: Any = summand.args[0] if summand.target is operator.getitem else None
        if isinstance(source, torch.fx.Node) and source.target is torch.ops.vsa.attention_backward.default:
            tiled, block_size = compat.notes().get(source, (None,) * 3)[summand.args[1]], source.args[13]  # type: ignore[assignment]
        elif summand.target is torch.ops.vsa.tile_sums_backward.default:
            rows_of, rows = compat.notes().get(summand, (0, None))
        else:
            return None, None, 0
    # Two gradients of either kind are a form of its own.
    if (tiled is None) + (rows is None) + len(summands) != 2 or rows_of not in (0, block_size):
        return None, None, 0
    return tiled, rows, block_size


def recognise(node: torch.fx.Node, behind: Collection[torch.fx.Node], inputs: list[torch.fx.Node]) -> Match | None:
    """The match behind the un-tile ``node``, or None."""
    dtype, (batch, tokens, num_heads, D) = node.meta["val"].dtype, compat.sizes_of(node)
    if not isinstance(num_heads, int) or not isinstance(D, int):
        return None
    shapes = ([batch, tokens, num_heads, D], [batch, tokens, num_heads * D])
    candidates = [n for n in reversed([*behind]) if _may_be_gradient(n, dtype, shapes)][:_MAX_CANDIDATES]
    sums = [n for n in behind if name(n) == "aten.sum" and math.prod(compat.sizes_of(n)) in (D, num_heads * D)]
    if not candidates:
        return None
    with compat.trial(inputs, [*candidates, *sums], substitute) as values:
        for candidate, rotation in itertools.product(candidates, ROTATIONS):
            with contextlib.suppress(OtherForm):
                form = _Form(candidate, values[candidate], num_heads, int(D), rotation, [batch, tokens])
                if form.norm is None and any(map(computes, beyond(candidate, behind))):
                    continue
                _check_dtypes(form, inputs)
                gradients = [n for n in sums if form.norm is not None and form.is_weight_gradient(values[n])]
                return Match(candidate, tuple(gradients), form.norm, form.rotation)
    return None


def _may_be_gradient(node: torch.fx.Node, dtype: torch.dtype, shapes: Sequence[Sequence[Any]]) -> bool:
    value = node.meta["val"]
    if not isinstance(value, torch.Tensor) or not is_loop(node) or value.dtype != dtype:
        return False
    sizes = compat.sizes_of(node)
    row_major = [math.prod(sizes[axis + 1 :]) for axis in range(len(sizes))]
    if sizes not in shapes or compat.strides_of(node) != row_major:
        return False
    return computes(node) or name(node) == "prims.convert_element_type"


def _check_dtypes(form: _Form, inputs: list[torch.fx.Node]) -> None:
    """The kernel reads x in the dtype of the gradient and rstd in fp32; weight and tables as the forward's does."""
    norm, dtype = form.norm, inputs[0].meta["val"].dtype

    of = functools.partial(real_dtype, inputs)
    if norm is not None and (of(norm.x), of(norm.rstd[1])) != (dtype, torch.float32):
        raise OtherForm
    weights = [] if norm is None or norm.weight is None else [norm.weight]
    if not readable(map(of, weights), map(of, form.rotation.tables)):
        raise OtherForm


class _Form:
    """The form of one candidate: norm and rotation, and what a gradient of the weight must look like."""

    def __init__(
        self, node: torch.fx.Node, value: Any, num_heads: int, D: int, rotation: str, outer: Sequence[Any]
    ) -> None:
        self.known = Ranges(num_heads, D // 2, outer)
        self.num_heads, self.D, self.outer = num_heads, D, list(outer)
        self.pair = places(rotation, D)
        flat = len(node.meta["val"].shape) == 3
        outputs = [products(self._element(value, flat, place)) for place in self.pair]
        self.g = [Formula(("load", "input_0", self._raster_index(place))) for place in self.pair]
        scaled = [[p for p in output if any(map(_is_sum, p.atoms))] for output in outputs]
        plain = [[p for p in output if not any(map(_is_sum, p.atoms))] for output in outputs]
        if not any(scaled):
            self.norm = None
            self.rotation = take_tables([pair_row(output, self.g, 0) for output in plain], rotation)
            return
        if any(len(products_with_sum) != 1 for products_with_sum in scaled):
            raise OtherForm
        sums, self.x, base, self.rstd, powers, divisor = self._scaled([part[0] for part in scaled])
        rows = [pair_row([self._without_rstd(p) for p in output], self.g, 0) for output in plain]
        weighted = [_as_products(row, self.g) for row in rows]
        weight, weight_index = take_weight(rows, [(place, place) for place in self.pair])
        self.unweighted = [_as_products(row, self.g) for row in rows]
        per_head = self._is_row_sum(sums, weighted, 3 - powers)
        self.norm = NormBackward(self.x[0][1], base, self.rstd, weight, weight_index, per_head, divisor)
        self.rotation = take_tables(rows, rotation)

    def _element(self, value: Any, flat: bool, place: Any) -> Formula:
        index = (B, S, H * self.D + place) if flat else (B, S, H, place)
        return compat.formula(value, index, self.known)

    def _raster_index(self, place: Any) -> Any:
        return self.known.simplified(compat.load_index("input_0", (B, S, H, place)))

    def _scaled(self, parts: Sequence[Product]) -> tuple[Formula, list[Formula], Any, Formula, int, float]:
        """The sum, x at both places and its base, rstd and its power, and the divisor of the norm."""
        found = []
        for part, place in zip(parts, self.pair, strict=True):
            (sums,) = [atom for atom in part.atoms if _is_sum(atom)] if len(set(part.atoms)) == 3 else [None]
            xs = [atom for atom in part.atoms if atom[0] == "load" and I in atom[2].free_symbols]
            roots = [atom for atom in part.atoms if atom is not sums and atom not in xs]
            if sums is None or len(xs) != 1 or len(set(roots)) != 1 or roots[0][0] != "load" or part.factor >= 0:
                raise OtherForm
            base = xs[0][2] - place
            found.append((sums, base.expand(), roots[0], len(roots), -1 / part.factor, xs[0]))
        if found[0][:5] != found[1][:5]:
            raise OtherForm
        sums, base, root, powers, divisor, _ = found[0]
        return sums, [entry[5] for entry in found], base, root, powers, divisor

    def _without_rstd(self, product: Product) -> Product:
        if product.count[self.rstd] != 1:
            raise OtherForm
        return Product(product.factor, tuple(atom for atom in product.atoms if atom != self.rstd))

    def _is_row_sum(self, sums: Formula, weighted: Sequence[Sequence[Product]], powers: int) -> bool:
        """Whether the norm is per head; the sum is of w * u * x, with ``powers`` of rstd, over the row or the head."""
        heads, D = self.num_heads, self.D
        for per_head, index, inner, sizes in (
            (False, (B, S, 0), lambda place: (H * D + place,), [1, heads * D]),
            (False, (B, S), lambda place: (H * D + place,), [heads * D]),
            (False, (B, S, 0, 0), lambda place: (H, place), [1, 1, heads, D]),
            (True, (B, S, H, 0), lambda place: (place,), [heads, 1, D]),
            (True, (B, S, H), lambda place: (place,), [heads, D]),
        ):
            if self._sums(sums[1], lambda place, i=index: i, inner, [*self.outer, *sizes], weighted, powers):
                if self.known.simplified(compat.load_index(sums[1], index)) != sums[2]:
                    raise OtherForm
                return per_head
        raise OtherForm

    def is_weight_gradient(self, value: Any) -> bool:
        """Whether a sum over all tokens is of u * x * rstd."""
        heads, D = self.num_heads, self.D
        per_head = self.norm is not None and self.norm.per_head
        reduced = (lambda place: (B, S, H)) if per_head else (lambda place: (B, S))
        ends = [*self.outer, heads] if per_head else self.outer
        for index, sizes in (
            [(lambda place: (0, 0, 0, place), [1, 1, 1, D]), (lambda place: (place,), [D])]
            if per_head
            else [
                (lambda place: (0, 0, H * D + place), [1, 1, heads * D]),
                (lambda place: (H * D + place,), [heads * D]),
                (lambda place: (0, 0, H, place), [1, 1, heads, D]),
                (lambda place: (H, place), [heads, D]),
            ]
        ):
            if self._sums(value.get_name(), index, reduced, [*sizes, *ends], self.unweighted, 1):
                return True
        return False

    def _sums(
        self, name: str, index: Any, inner: Any, sizes: Sequence[Any], parts: Sequence[Sequence[Product]], powers: int
    ) -> bool:
        """Whether buffer ``name`` sums ``parts`` times x times ``powers`` of rstd, for both elements of a pair."""
        for place, x, expected in zip(self.pair, self.x, parts, strict=True):
            found = compat.reduction_formula(name, index(place), inner(place), self.known)
            if found is None or [*map(str, found[0])] != [*map(str, sizes)]:
                return False
            with contextlib.suppress(OtherForm):
                wanted = [Product(p.factor, (*p.atoms, x, *[self.rstd] * powers)) for p in expected]
                if _multiset(products(found[1])) == _multiset(wanted):
                    continue
            return False
        return True


def _is_sum(atom: Formula) -> bool:
    return atom[0] == "load" and not atom[1].startswith("input_")


def _as_products(row: Row, elements: Sequence[Formula]) -> list[Product]:
    return [Product(factor, (elements[place], *loads)) for place, (factor, loads) in row.items()]


def _multiset(parts: Sequence[Product]) -> Counter[Any]:
    return Counter((part.factor, frozenset(part.count.items())) for part in parts)


def _arguments(
    node: torch.fx.Node,
    tiled: Any,
    sums: Any,
    slot_token: Any,
    block_size: int,
    inputs: list[torch.fx.Node],
    match: Match | None,
) -> list[Any]:
    """Of the operator, which gives dx ``[B, S, H, D]`` and dweight ``[H, D]`` fp32."""
    norm = None if match is None else match.norm
    rotation = Rotation("none") if match is None else match.rotation
    read = reader(inputs)
    return [
        tiled,
        sums,
        None if norm is None else read(norm.x),
        None if norm is None else read(norm.rstd[1]),
        None if norm is None or norm.weight is None else read(norm.weight),
        [read(table) for table in rotation.tables],
        slot_token,
        [0, 0, 0, 0] if norm is None else list(strides(norm.base, (B, S, H))),
        [0, 0, 0, 0] if norm is None else list(strides(norm.rstd[2], (B, S, H))),
        [0, 0] if norm is None else list(norm.weight_index),
        list(rotation.table_index),
        list(rotation.signs),
        compat.sizes_of(node),
        rotation.name,
        "none" if norm is None else "head" if norm.per_head else "all",
        1.0 if norm is None else norm.divisor,
        block_size,
        True,
        match is not None and bool(match.weight_gradients),
    ]


def _shaped(value: Any, node: torch.fx.Node) -> Any:
    """``value`` in the shape and dtype of ``node``."""
    viewed, dtype = compat.aten(_aten.view.default, value, compat.sizes_of(node)), node.meta["val"].dtype
    # A conversion to the same dtype would be a copy.
    return viewed if value.get_dtype() == dtype else compat.convert(viewed, dtype)


def _drop_what_led_to(made: set[torch.fx.Node], behind: Collection[torch.fx.Node]) -> None:
    """Keeps calls from being lowered whose results nobody reads any more."""
    unread = set(made)
    for node in reversed([*behind]):
        if node not in unread and node.users and all(user in unread for user in node.users):
            unread.add(node)
            compat.values()[node] = None
