"""The prologue of sparse attention as one kernel: calls `vsa::norm_rope_tile` where RMSNorm and RoPE precede a tile.

Inductor's own loop moves no more bytes than it must, but evaluates both elements of a pair for every element, 2 bytes
at a time (2.1 sectors a load request, 7.7 a store): five times the instructions, which bound it at 30 % of the memory
limit of an H200 (`benchmarks/data/block_counters.csv`). The user's code stays ordinary torch: what is recognised is the
formula of an element, not the way it was written (`_recognition.py`). The first tile of an attention brings the others
along: q, k and v take one launch, in which q and k read the rotary tables together. Anything else takes the generic
path of `tile`.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vsa_inductor.backends.identity import switch

from . import _inductor_compat as compat
from ._formula import B, H, OtherForm, Ranges, S, products, recognition
from ._neighbourhood import (
    SUMS,
    computes,
    input_named,
    inputs_of,
    is_loop,
    name,
    only_for,
    reader,
    real_dtype,
    waits_for,
)
from ._recognition import Match, recognise
from ._substitutes import is_complex, substitute

OP = torch.ops.vsa.norm_rope_tile.default
_TILE = torch.ops.vsa.tile.default

_enabled = True


@dataclass(frozen=True)
class Operand:
    """A tile call whose input was recognised.

    Attributes:
        node: the call.
        match: what its input is made of; names are of buffers, or of inputs of a trial.
        read: from such a name to the value.
        identify: from such a name to what is the same for the same memory.
        squares: the buffer that sums squares for a root that is kept, if any.
        block_size: of the sums over tiles that are wanted, 0 for none.
    """

    node: torch.fx.Node
    match: Match
    read: Callable[[str], Any]
    identify: Callable[[str], Any]
    squares: str | None
    block_size: int

    @property
    def values(self) -> list[Any]:
        """What the launch reads for it."""
        names = [self.match.x, *([self.match.weight] if self.match.weight else []), *self.match.rotation.tables]
        return [self.read(name) for name in names]

    @property
    def plain(self) -> bool:
        """Whether it is only tiled."""
        return self.match.norm is None and not self.match.rotation.tables

    @property
    def work(self) -> tuple[Any, ...]:
        """What operands of one launch have in common; strides and weights may differ."""
        norm, rotation = self.match.norm, self.match.rotation
        kind = None if norm is None else (norm.per_head, norm.divisor, norm.eps)
        tables = tuple(map(self.identify, rotation.tables))
        return (kind, self.match.weight is None, rotation.name, tables, rotation.table_index, rotation.signs)


@contextlib.contextmanager
def recognising(enabled: bool) -> Iterator[None]:
    """Switches recognition on or off, process-wide while it lasts; for tests and for finding out what it gains.

    Part of every cache key, and of the guards of what is compiled.
    """
    before = _enabled
    _switch(enabled)
    try:
        yield
    finally:
        _switch(before)


def _switch(enabled: bool) -> None:
    global _enabled
    _enabled = enabled
    switch("recognition", None if enabled else "off")


def has_kernel(x: Any) -> bool:
    """Whether recognition is on, and a kernel runs on the device, dtype and head dim of ``x``.

    Not in an AOTInductor package, which hands an operator's empty list over as None.
    """
    return _enabled and not compat.is_package() and runs_layout_kernels(x)


def runs_layout_kernels(x: Any) -> bool:
    """Whether our kernels for whole rows run on the device, dtype and head dim of ``x``, whose last axis that is."""
    half_precision = x.get_dtype() in (torch.bfloat16, torch.float16)
    return x.get_device().type == "cuda" and half_precision and x.get_size()[-1] in (32, 64, 128, 256)


def readable(weights: Iterable[torch.dtype], tables: Iterable[torch.dtype]) -> bool:
    """Whether the kernels read weights and tables of these dtypes."""
    narrow = all(dtype in (torch.bfloat16, torch.float16, torch.float32) for dtype in weights)
    return narrow and all(dtype.is_floating_point and dtype.itemsize > 1 for dtype in tables)


def lower(x: Any, slot_token: Any) -> Any | None:
    """The tiles of ``x`` ``[B, S, H, D]`` by one kernel of ours; None where its formula has another form.

    The other tiles of the same attention that fit get their values here.
    """
    if not has_kernel(x):
        return None
    try:
        with recognition():
            first = _operand(compat.current_node(), x)
            group = [first, *_companions(first, x)]
            normed, plain = [o for o in group if not o.plain], [o for o in group if o.plain]
            block_size = max(o.block_size for o in group)
            if not normed and not block_size:
                return None  # a gather does as well, and fuses
            group = [*normed, *plain]
            arguments = _arguments(group, len(plain), x.get_size(), slot_token, block_size)
    except OtherForm:
        return None
    tiles = {}
    for one, tiled, squares, sums in zip(group, *_launch(arguments), strict=True):
        tiles[one.node] = tiled
        compat.notes()[one.node] = (block_size, sums)
        if one.squares is not None:
            # Training keeps rstd: it is made from our sums instead of by a second pass over x.
            compat.read_instead(one.squares, squares)
        if one is not first:
            compat.values()[one.node] = tiled
    compat.unalias(only_for(tiles))
    return tiles[first.node]


def _launch(arguments: list[Any]) -> Sequence[Sequence[Any]]:
    """Tiles, square sums and tile sums of the call."""
    if not compat.cpp_wrapper():
        return compat.opaque(OP, *arguments)
    results, count = compat.opaque(OP.overloadpacket.flat, *arguments), len(arguments[0])
    return [results[first : first + count] for first in range(0, 3 * count, count)]


def _arguments(group: Sequence[Operand], num_plain: int, sizes: Any, slot_token: Any, block_size: int) -> list[Any]:
    """Of the operator, for operands of the same ``sizes`` [B, S, H, D], the plain ones last."""
    shared = group[0].match
    norm, rotation = shared.norm, shared.rotation
    weighted = [o for o in group if o.match.weight is not None]
    return [
        [o.read(o.match.x) for o in group],
        [o.read(str(o.match.weight)) for o in weighted],
        [group[0].read(table) for table in rotation.tables],
        slot_token,
        [value for o in group for value in o.match.x_index],
        [value for o in weighted for value in o.match.weight_index],
        list(rotation.table_index),
        list(rotation.signs),
        list(sizes),
        rotation.name,
        "none" if norm is None else "head" if norm.per_head else "all",
        num_plain,
        1.0 if norm is None else norm.divisor,
        0.0 if norm is None else norm.eps,
        block_size,
    ]


def _operand(node: torch.fx.Node, x: Any) -> Operand:
    """The tile call ``node`` of ``x`` as an operand. Raises OtherForm where it is not recognised."""
    match = recognise(x)
    read: Callable[[str], Any] = compat.buffer_value
    identify: Callable[[str], Any] = str
    dtype_of: Callable[[str], torch.dtype] = compat.dtype_of
    squares = match.norm.sums if match is not None and match.norm is not None else None
    if match is None or match.norm is None:
        on_trial = _recognise_on_trial(node.args[0])
        if on_trial is not None:
            match, inputs, squares = on_trial
            read, identify = reader(inputs), functools.partial(input_named, inputs)
            dtype_of = functools.partial(real_dtype, inputs)
    if match is None or dtype_of(match.x) != x.get_dtype():
        raise OtherForm
    weights = [] if match.weight is None else [match.weight]
    if not readable(map(dtype_of, weights), map(dtype_of, match.rotation.tables)):
        raise OtherForm
    return Operand(node, match, read, identify, squares, _block_size_of_sums(node))


def _block_size_of_sums(node: torch.fx.Node) -> int:
    """The block size of the `vsa::tile_sums` that read the tiles; 0 where none does."""
    sizes: set[Any] = {user.args[1] for user in node.users if user.target is torch.ops.vsa.tile_sums.default}
    return sizes.pop() if len(sizes) == 1 else 0


def _companions(first: Operand, x: Any) -> Iterator[Operand]:
    """The other tiles of the attention that reads ``first``, as far as they can be made by the same launch."""
    tables = first.node.args[1:]
    attentions = [user for user in first.node.users if user.target is torch.ops.vsa.attention.default]
    tiles: list[Any] = [n for attention in attentions[:1] for n in attention.args[:3]]
    work, block_size, group = None if first.plain else first.work, first.block_size, [first]
    for node in dict.fromkeys(n for n in tiles if n is not first.node and n.target is _TILE and n.args[1:] == tables):
        if compat.values().get(node) is not None or waits_for(node.args[0], first.node):
            continue
        other: Any = compat.value_of(node.args[0])
        if [*other.get_size()] != [*x.get_size()] or other.get_dtype() != x.get_dtype():
            continue
        try:
            found = _operand(node, other)
        except OtherForm:
            continue
        if len({0, block_size, found.block_size}) > 2 or not (found.plain or work in (None, found.work)):
            continue
        # What is made of a norm's sums cannot be read by the launch that makes them.
        members = [*group, found]
        sums = {one.squares for one in members if one.squares is not None}
        if sums and any(compat.depends_on(one.values, sums) for one in members):
            continue
        work, block_size = work if found.plain else found.work, max(block_size, found.block_size)
        group.append(found)
        yield found


def _recognise_on_trial(source: Any) -> tuple[Match, list[torch.fx.Node], str | None] | None:
    """The match of a prologue that its lowered form hides, the inputs of its trial, and the buffer that sums squares.

    Inductor leaves complex products to a library. And work in front of the norm (an adapter's sum, say) becomes part of
    every element's formula; where its result is kept for the backward, the norm reads that.
    """
    through = {*SUMS, "aten.rsqrt"}
    with contextlib.suppress(OtherForm):
        inputs, met = inputs_of([source], through=through)
        roots = [n for n in met if name(n) == "aten.rsqrt"]
        for front in ([None] if any(map(is_complex, met)) else []) + _in_front_of(roots, met, source):
            inputs, _ = inputs_of([source], [front] if front else [], through)
            with compat.trial(inputs, [source], substitute) as values:
                match = recognise(values[source])
                # Roots in front of what the norm reads are of other norms.
                own = [n for n in roots if n in values]
            if match is not None and (match.norm is not None or front is None):
                kept = [value for n in own if len(own) == 1 and (value := compat.values().get(n)) is not None]
                return match, inputs, _summed_in(kept[0]) if len(kept) == 1 else None
    return None


def _in_front_of(roots: list[torch.fx.Node], met: Collection[torch.fx.Node], source: torch.fx.Node) -> list[Any]:
    """What was computed of the operand's size in front of a norm, the last of it, if it is still to be had."""
    behind, pending = set[torch.fx.Node](), list(roots)
    while pending:
        node = pending.pop()
        if node in met and node not in behind:
            behind.add(node)
            pending += node.all_input_nodes
    size, dtype = math.prod(compat.sizes_of(source)), source.meta["val"].dtype
    made = [n for n in sorted(behind) if is_loop(n) and computes(n) and n.meta["val"].dtype == dtype]
    return [n for n in made if math.prod(compat.sizes_of(n)) == size and compat.values().get(n) is not None][-1:]


def _summed_in(root: Any) -> str | None:
    """The buffer of square sums under a root that is kept."""
    formula = compat.formula(root, [*(B, S, H)[: len(root.get_size()) - 1], 0], Ranges(1, 1))
    with contextlib.suppress(OtherForm):
        loads = [atom for part in products(formula[1]) for atom in part.atoms if atom[0] == "load"]
        if len(loads) == 1 and compat.is_sum(loads[0][1]):
            return str(loads[0][1])
    return None
