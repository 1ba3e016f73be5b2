"""The private names of torch's compiler that lowerings use.

No file of the package but this one, `_inductor_compat_registration.py` and `_inductor_compat_capture.py` touches a
private ``torch._inductor``, ``torch._dynamo`` or ``torch._functorch`` name, so that a new torch is checked by reading
the three. Checked on torch 2.11, 2.13 and 2.14.1.

Parts: lowerings, formulas, and what stands around a call in its graph. All names are looked up at registration.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch

from ._formula import Formula, OtherForm, Ranges, folded, position_in

# ---------------------------------------------------------------------------------------------------------------------
# Lowering part: what the files of this room build their IR from.


def _ir() -> Any:
    from torch._inductor import ir

    return ir


def aten(op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    """The IR of an ATen or prims operator on boxes."""
    from torch._inductor.lowering import lowerings

    return lowerings[op](*args, **kwargs)


def convert(x: Any, dtype: torch.dtype) -> Any:
    """``x`` in ``dtype``."""
    return aten(torch.ops.prims.convert_element_type.default, x, dtype)


def opaque(op: torch._ops.OpOverload, *args: Any) -> Any:
    """A call of ``op`` that the generated code makes as it stands."""
    from torch._inductor.lowering import fallback_handler

    return fallback_handler(op, add_to_fallback_set=False)(*args)


def cpp_wrapper() -> bool:
    """Whether the graph is called from generated C++."""
    return bool(_graph().cpp_wrapper)


def is_package() -> bool:
    """Whether the graph becomes an AOTInductor package."""
    return bool(_graph().aot_mode)


def opaque_at_partition(logical: torch._ops.OpOverload, op: torch._ops.OpOverload, *args: Any) -> Any:
    """:func:`opaque`; where the user's graph partitions end at the ``.out`` form of ``op``, that, into new buffers.

    The next partition would be handed the tuple of the functional form, and a CUDA graph takes tensors only.
    """
    from torch._inductor import config
    from torch._inductor.virtualized import V

    from vsa_inductor.errors import ArgumentError

    form = op.overloadpacket.out
    names = config.custom_should_partition_ops
    for name in (logical.name(), op.name()):
        if name in names:
            raise ArgumentError("custom_should_partition_ops", repr(name), f"{form.name()!r}, which returns no tuple")
    if form.name() not in names:
        return opaque(op, *args)
    ir = _ir()
    with V.graph.fake_mode:
        examples = ir.FallbackKernel.process_kernel(op, *args)[0]
    outputs = {}
    for argument, example in zip((a for a in form._schema.arguments if a.kwarg_only), examples, strict=True):
        extents = (ir.convert_shape_to_inductor(values) for values in (example.size(), example.stride()))
        options = {"dtype": example.dtype, "device": example.device}
        outputs[argument.name] = aten(torch.ops.aten.empty_strided.default, *extents, **options)
        outputs[argument.name].realize()
    ir.FallbackKernel.create(form, *args, **outputs)
    return tuple(outputs.values())


def contiguous(x: Any) -> Any:
    """``x`` materialised with row-major strides; copied only if its layout is fixed and another."""
    ir = _ir()
    if isinstance(x.data, ir.BaseView) and isinstance(x.data.unwrap_view().data, ir.Loops):
        # To realise a view of what is not computed yet is to store what it views, and then the copy.
        x = ir.ExternKernel.copy_input(x)
    x.realize()
    return ir.ExternKernel.require_contiguous(x)


def zeros(size: Sequence[Any], like: Any) -> Any:
    """A new zeroed contiguous buffer with the dtype and device of ``like``."""
    buffer = aten(torch.ops.aten.full.default, list(size), 0, dtype=like.get_dtype(), device=like.get_device())
    buffer.realize()
    return contiguous(buffer)


def uninitialised(size: Sequence[Any], like: Any) -> Any:
    """A new contiguous buffer with the dtype and device of ``like``."""
    strides = [1]
    for extent in reversed(list(size)[1:]):
        strides.insert(0, strides[0] * extent)
    options = {"dtype": like.get_dtype(), "device": like.get_device()}
    buffer = aten(torch.ops.aten.empty_strided.default, list(size), strides, **options)
    buffer.realize()
    return buffer


def scatter(target: Any, values: Any, place: Callable[[Sequence[Any]], Sequence[Any]]) -> None:
    """``target[place(index)] = values[index]``, fused into what makes ``values``. Places must differ: no atomics."""
    from torch._inductor.virtualized import V

    ir = _ir()
    loop = ir.Scatter(
        device=values.get_device(),
        dtype=target.get_dtype(),
        inner_fn=values.make_loader(),
        ranges=list(values.get_size()),
        output_indexer=place,
        scatter_mode=None,
    )
    buffer = ir.ComputedBuffer(name=None, layout=ir.MutationLayoutSHOULDREMOVE(target), data=loop)
    buffer.name = V.graph.register_buffer(buffer)
    V.graph.register_operation(buffer)


def pointwise(size: Sequence[Any], like: Any, element: Callable[[Sequence[Any]], Any]) -> Any:
    """The tensor whose element at an index is ``element(index)``; fused into what reads it."""
    return _ir().Pointwise.create(device=like.get_device(), dtype=like.get_dtype(), inner_fn=element, ranges=list(size))


def position(table: Any, extent: Any, indexed: Any) -> Callable[[Any], Any]:
    """From an index into the int ``table`` to the index into ``indexed`` stored there, 0..extent-1, unchecked."""
    from torch._inductor.virtualized import ops

    load = _index_loader(table, indexed)
    return lambda index: ops.indirect_indexing(load(index), extent, check=False, wrap_neg=False)


def optional_position(table: Any, extent: Any, indexed: Any) -> Callable[[Any], tuple[Any, Any]]:
    """Like :func:`position`, for a table that may hold -1: the position, 0 for -1, and whether there is one."""
    from torch._inductor.virtualized import ops

    load = _index_loader(table, indexed)

    def position_of(index: Any) -> tuple[Any, Any]:
        value = load(index)
        zero = ops.constant(0, _index_dtype(table, indexed))
        # Made here and not in the masked body: an indirect index is computed for every lane.
        return ops.indirect_indexing(ops.maximum(value, zero), extent, check=False, wrap_neg=False), ops.ge(value, zero)

    return position_of


def _index_loader(table: Any, indexed: Any) -> Callable[[Any], Any]:
    from torch._inductor.virtualized import ops

    load, dtype = table.make_loader(), _index_dtype(table, indexed)
    if dtype == table.get_dtype():
        return lambda index: load([index])
    return lambda index: ops.to_dtype(load([index]), dtype)


def _index_dtype(table: Any, indexed: Any) -> torch.dtype:
    """Generated code computes an offset in the dtype of the index: int64 unless every offset fits the table's."""
    dtype, sizes = table.get_dtype(), _graph().sizevars
    # A view steps over what it leaves out: what counts is the memory that it lies in, or is computed from.
    lengths = [_buffer(name).get_layout().storage_size() for name in _names_behind(indexed)]
    fits = all(sizes.statically_known_leq(length, torch.iinfo(dtype).max) for length in lengths)
    return dtype if fits else torch.int64


def _names_behind(x: Any) -> list[str]:
    """The buffer that ``x`` is or views; of what is not computed yet, those that it reads."""
    ir = _ir()
    data = x
    while isinstance(data, (ir.TensorBox, ir.StorageBox, ir.BaseView)):
        data = data.data
    return [data.get_name()] if isinstance(data, ir.Buffer) else list(x.get_read_names())


def where_present(present: Any, load: Callable[[], Any]) -> Any:
    """``load()`` where ``present``, else zero; nothing is read where it is not."""
    from torch._inductor.virtualized import ops

    return ops.masked(present, load, 0.0)


def reads_a_reduction(x: Any) -> bool:
    """Whether a reduction of this graph makes ``x``, through pointwise work only. Library calls end the search."""
    from torch._inductor.virtualized import V

    ir = _ir()
    # Pointwise results may be buffers already: a rotated q exceeds Inductor's read bound, a saved rstd is an output.
    pending = _names_behind(x)
    seen = set()
    while pending:
        name = pending.pop()
        buffer = V.graph.try_get_buffer(name)
        if name in seen or not isinstance(buffer, ir.ComputedBuffer):
            continue
        seen.add(name)
        if isinstance(buffer.data, ir.Reduction):
            return True
        if isinstance(buffer.data, ir.Pointwise):
            pending += buffer.get_read_names()
    return False


# ---------------------------------------------------------------------------------------------------------------------
# Formula part: what a value that is not a buffer yet is made of (_formula.py), for lowerings that recognise a form.


def formula(x: Any, index: Sequence[Any], known: Ranges) -> Formula:
    """The formula of one element of ``x``, buffers that are pointwise work of this graph looked through.

    Conversions of dtype are left out. Where a comparison of index expressions is known, masks and selections disappear.
    """
    from torch._inductor.virtualized import V

    with _indexing(), V.set_ops_handler(_recorder(known)):
        return _node(x.make_loader()(list(index)))


def reduction_formula(
    name: str, index: Sequence[Any], inner: Sequence[Any], known: Ranges
) -> tuple[Sequence[Any], Formula] | None:
    """Sizes (outer, then reduced) and summand of a sum that makes buffer ``name``; None if it is anything else."""
    from torch._inductor.virtualized import V

    if not is_sum(name):
        return None
    data = _buffer(name).data
    if (len(data.ranges), len(data.reduction_ranges)) != (len(index), len(inner)):
        return None
    with _indexing(), V.set_ops_handler(_recorder(known)):
        return [*data.ranges, *data.reduction_ranges], _node(data.inner_fn(list(index), list(inner)))


def dtype_of(name: str) -> torch.dtype:
    """The dtype of buffer ``name``."""
    return _buffer(name).get_dtype()


def is_sum(name: str) -> bool:
    """Whether a sum makes buffer ``name``."""
    data = getattr(_unchanging(name), "data", None)
    return isinstance(data, _ir().Reduction) and data.reduction_type == "sum"


def load_index(name: str, index: Sequence[Any]) -> Any:
    """Where element ``index`` of buffer ``name`` stands in its memory."""
    with _indexing():
        return _buffer(name).make_indexer()(list(index))


def buffer_value(name: str) -> Any:
    """The buffer or graph input ``name`` as a value; its layout is final from here on."""
    ir = _ir()
    buffer = _unchanging(name)
    if isinstance(buffer, ir.TensorBox):
        return buffer
    if isinstance(buffer.get_output_spec(), ir.FlexibleLayout):
        buffer.freeze_layout()
    return ir.TensorBox(ir.StorageBox(buffer))


def read_instead(name: str, source: Any) -> None:
    """Makes reduction buffer ``name`` a copy of ``source``, which has its elements without the trailing axis."""
    buffer, load = _buffer(name), source.make_loader()
    buffer.data = _ir().Pointwise(
        device=buffer.get_device(),
        dtype=buffer.get_dtype(),
        inner_fn=lambda index: load(index[:-1]),
        ranges=list(buffer.get_size()),
    )


def _unchanging(name: str) -> Any:
    """Buffer ``name``; raises OtherForm where anything writes into it after it was made."""
    if name in _graph().mutated_buffers:
        raise OtherForm
    return _buffer(name)


def depends_on(values: Sequence[Any], names: Collection[str]) -> bool:
    """Whether one of the buffers ``names`` is read on the way to ``values``."""
    pending, seen = [value.get_name() for value in values], set[str]()
    while pending:
        name = pending.pop()
        if name in names:
            return True
        buffer = _buffer(name)
        if name not in seen and isinstance(buffer, _ir().Buffer) and buffer.get_defining_op() is not None:
            pending += buffer.get_defining_op().get_read_names()
        seen.add(name)
    return False


def _buffer(name: str) -> Any:
    return _graph().try_get_buffer(name)


@contextlib.contextmanager
def _indexing() -> Iterator[None]:
    """Lets buffers be addressed whose layout is not final, as Inductor does to find out what a loop reads."""
    layout = _ir().FlexibleLayout
    before, layout.allow_indexing = layout.allow_indexing, True
    try:
        yield
    finally:
        layout.allow_indexing = before


def _node(value: Any) -> Formula:
    while not isinstance(value, Formula):
        value = value.value if hasattr(value, "value") else Formula(("constant", value))
    return value


def _recorder(known: Ranges) -> Any:
    import sympy
    from torch._inductor.ops_handler import DefaultHandler

    class Recorder(DefaultHandler):
        def _default(self, name: str, args: Any, kwargs: Any) -> Formula:
            return folded(name, [_node(arg) for arg in args], known)

        def load(self, name: str, index: Any) -> Formula:
            # Inductor wraps what must not be simplified in an Identity.
            index = known.simplified(sympy.expand(index, identity=True))
            buffer, ir = _unchanging(name), _ir()
            if isinstance(buffer, ir.ComputedBuffer) and isinstance(buffer.data, ir.Pointwise):
                place = position_in(buffer.get_size(), buffer.get_stride(), index, known)
                if place is not None:
                    return self.to_dtype(buffer.data.inner_fn(place), buffer.get_dtype())
            return Formula(("load", name, index))

        def indirect_indexing(self, *args: Any, **kwargs: Any) -> Any:
            raise OtherForm

        def masked(self, mask: Any, body: Callable[[], Any], other: Any) -> Formula:
            return folded("masked", (_node(mask), _node(body()), Formula(("constant", other))), known)

        def constant(self, value: Any, dtype: Any) -> Formula:
            return Formula(("constant", value))

        def index_expr(self, expr: Any, dtype: Any) -> Formula:
            expr = known.simplified(sympy.expand(sympy.sympify(expr), identity=True))
            return Formula(("constant", int(expr)) if expr.is_Integer else ("index", expr))

        def to_dtype(self, x: Any, dtype: torch.dtype, *args: Any, **kwargs: Any) -> Formula:
            # Roundings between the floating types that norms are computed in; anything narrower is meant.
            kept = dtype.is_floating_point and dtype.itemsize > 1
            return _node(x) if kept else Formula(("to_dtype", dtype, _node(x)))

    return Recorder()


# ---------------------------------------------------------------------------------------------------------------------
# Graph part: what stands around the call that is being lowered.


def current_node() -> Any:
    """The call that is being lowered."""
    return _graph().current_node


def _graph() -> Any:
    from torch._inductor.virtualized import V

    return V.graph


def notes() -> dict[torch.fx.Node, Any]:
    """What lowerings of this graph leave, by call, for those that read its result: values may be gone by then."""
    return _graph().__dict__.setdefault("_vsa_notes", {})


def is_buffer(x: Any) -> bool:
    """Whether ``x`` is a buffer or graph input as it stands: neither a view of one nor yet to be computed."""
    ir = _ir()
    while isinstance(x, (ir.TensorBox, ir.StorageBox)):
        x = x.data
    return isinstance(x, ir.Buffer)


def values() -> dict[torch.fx.Node, Any]:
    """Values of this graph by call, as long as they are still to be read. A call that has one is not lowered."""
    return _graph().env


def value_of(node: torch.fx.Node) -> Any | None:
    """The value of ``node``, made now where the graph has not come to it yet; None where it is no longer to be had."""
    graph, pending = _graph(), [node]
    if node.op == "placeholder":
        return graph.graph_inputs[str(node.target)]
    if node not in graph.env and node < graph.current_node:
        # Values are dropped after their last reader; a buffer stays.
        made = [buffer.get_name() for buffer in graph.buffers if buffer.get_origin_node() is node]
        return buffer_value(made[0]) if len(made) == 1 else None
    between = itertools.takewhile(lambda n: n < node, iter_after(graph.current_node))
    if any(getattr(getattr(n.target, "_schema", None), "is_mutable", False) for n in between):
        return None  # what is made early would not see what is written in between
    while pending:
        missing = [needed for needed in pending[-1].all_input_nodes if needed not in graph.env]
        if pending[-1] in graph.env:
            pending.pop()
        elif missing:
            pending += missing
        else:
            # The interpreter passes over nodes that have a value.
            graph.env[pending[-1]] = graph.run_node(pending[-1])
    return graph.env[node]


def free_layouts(node: torch.fx.Node) -> None:
    """Lets the operands of the call ``node`` reach its lowering as they are, and not in memory as eager has them."""
    node.meta.pop("eager_input_vals", None)


def unalias(nodes: Collection[torch.fx.Node]) -> None:
    """Lets library calls among ``nodes``, whose results nobody reads, be removed; Inductor keeps what shares memory."""
    for operation in list(_graph().operations):
        if isinstance(operation, _ir().FallbackKernel) and operation.get_origin_node() in nodes:
            operation.alias_names.clear()


def with_strides(node: torch.fx.Node) -> Any | None:
    """The value of ``node`` in memory, with the strides that the graph says; None where it is no longer to be had."""
    value, meant = value_of(node), _real(node.meta["val"])
    if value is None:
        return None
    if node.meta["val"].is_complex():
        value = opaque(torch.ops.aten.view_as_real.default, value)
    value.realize()
    return _ir().ExternKernel.require_exact_strides(value, meant.stride())


def _real(value: Any) -> Any:
    return torch.view_as_real(value) if isinstance(value, torch.Tensor) and value.is_complex() else value


def sizes_of(node: torch.fx.Node) -> list[Any]:
    """The shape of ``node`` as lowerings have it: comparing such sizes adds no guard."""
    return [_expression(size) for size in node.meta["val"].shape]


def strides_of(node: torch.fx.Node) -> list[Any]:
    """The strides of ``node``, likewise."""
    return [_expression(stride) for stride in node.meta["val"].stride()]


def _expression(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size


def iter_after(node: torch.fx.Node) -> Iterator[torch.fx.Node]:
    """The nodes behind ``node``, in order."""
    node = node.next
    while node.op != "root":
        yield node
        node = node.next


def _lowering_call(lowering: Callable[..., Any]) -> Callable[..., Any]:
    """A function that Inductor calls with boxes instead of looking for its lowering."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return lowering(*args, **kwargs)

    call._inductor_lowering_function = True  # type: ignore[attr-defined]
    return call


def cat_in_loops(inputs: Sequence[Any], dim: int = 0) -> Any:
    """`aten.cat` as a loop that selects: Inductor copies each part into place where that is cheaper."""
    from torch._inductor.lowering import pointwise_cat

    return pointwise_cat(inputs, dim % len(inputs[0].get_size()))


@contextlib.contextmanager
def trial(
    inputs: Sequence[torch.fx.Node],
    outputs: Sequence[torch.fx.Node],
    substitute: Callable[[torch.fx.Node], Callable[..., Any] | None],
) -> Iterator[dict[torch.fx.Node, Any]]:
    """Lowers what stands between ``inputs`` and ``outputs`` in a graph of its own, to read formulas from.

    Yields the values by node, good inside the context only; the input at place n is a buffer called ``input_n``. Sums
    stay whole, pointwise work is not materialised, the real graph sees nothing of it. ``substitute`` may name another
    lowering for a call; complex inputs are real, with a last axis of two. Raises OtherForm where it fails.
    """
    from torch._inductor import config
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    graph, copies = torch.fx.Graph(), {}
    values = [_real(node.meta["val"]) for node in inputs]
    for place, (node, value) in enumerate(zip(inputs, values, strict=True)):
        copies[node] = graph.placeholder(f"input_{place}")
        copies[node].meta["val"] = value

    def copy(node: torch.fx.Node) -> torch.fx.Node:
        if node not in copies:
            for needed in node.all_input_nodes:
                copy(needed)
            copies[node] = graph.node_copy(node, copies.__getitem__)
            replacement = substitute(node)
            if replacement is not None:
                copies[node].target = _lowering_call(replacement)
        return copies[node]

    for node in outputs:
        copy(node)
    graph.output(())
    whole = {"split_reductions": False, "realize_reads_threshold": 1 << 20, "realize_opcount_threshold": 1 << 20}
    lowering = GraphLowering(torch.fx.GraphModule({}, graph), values, shape_env=V.graph._shape_env)
    lowering.args_iter = iter(values)
    with (
        config.patch(whole),
        V.graph._shape_env.suppress_guards(),
        V.set_graph_handler(lowering),
        V.set_current_node(None),
    ):
        try:
            for node in graph.nodes:
                if node.op != "output":
                    lowering.env[node] = lowering.run_node(node)
        except Exception as error:
            # Whatever does not lower alone is no known form.
            raise OtherForm from error
        yield {node: lowering.env[copied] for node, copied in copies.items()}
