"""The private names of torch's compiler behind `compile`, `explain`, `assert_recompiles` and export.

:class:`CaptureBackend` compiles as ``backend="inductor"`` does and keeps what was generated, :func:`fresh_compiles`
keeps caches out of the way, :func:`graph_breaks` collects graph breaks, :func:`recompiles` recompilations. Checked on
torch 2.11, 2.13 and 2.14.1.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import logging
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._pytree import tree_leaves

from ._captured import CapturedGraph, TensorAccess, calls_of, captured

Names = Mapping[str, tuple[str, ...]]

_CAPTURE: Names = {
    "torch._dynamo": ("config.patch", "config.recompile_limit", "config.accumulated_recompile_limit"),
    "torch._functorch": ("config.patch", "config.enable_autograd_cache"),
    "torch._inductor.compile_fx": ("compile_fx", "compile_fx_inner"),
    "torch._inductor.config": (
        "patch",
        "cpp_wrapper",
        "fx_graph_cache",
        "fx_graph_remote_cache",
        "trace.provenance_tracking_level",
    ),
    "torch._inductor.debug": ("_inductor_triton_kernel_to_post_grad_node_info",),
    "torch._inductor.graph": ("GraphLowering.save_output_code",),
    "torch._logging": ("getArtifactLogger",),
}
# Entry point -> module -> what it cannot do without.
NEEDED: Mapping[str, Names] = {
    "explain": _CAPTURE,
    "assert_recompiles": {**_CAPTURE, "torch._logging": ("getArtifactLogger", "_internal.log_state.artifact_names")},
    "compile(mode=...)": {"torch._inductor": ("list_mode_options",)},
    "export_training_step": {"torch._dispatch.python": ("enable_python_dispatcher",)},
    "package": {"torch._inductor": ("aoti_compile_and_package",)},
}
_STILL = {
    "explain": "only the report is missing, what compiles is the same",
    "assert_recompiles": "only the assertion is missing, what compiles is the same",
    "compile(mode=...)": "without a mode it compiles, and what the mode stands for can be given as options",
    "export_training_step": "torch.export of the model alone needs none of it",
    "package": "the exported program is not touched by that",
}
# What is lost -> module -> names without which it is.
OPTIONAL: Mapping[str, Names] = {
    # `compile` then goes without its marks, and says so.
    "marks": {
        "torch._inductor.config": ("joint_custom_pre_pass",),
        "torch._inductor.custom_graph_pass": ("CustomGraphPass", "get_hash_for_files"),
    },
    # `explain` then uses torch.compile's defaults, and says so.
    "options": {"torch._inductor.config": ("get_config_copy",)},
    # The report then says "unknown".
    "traffic": {
        "torch._inductor.codegen": ("cpp", "triton"),
        "torch._inductor.debug": ("set_kernel_post_grad_provenance_tracing",),
        "torch._inductor.dependencies": ("MemoryDep", "StarDep", "WeakDep"),
        "torch._inductor.ir": ("Buffer", "IRNode", "Layout", "NonOwningLayout"),
        "torch._inductor.virtualized": ("V.graph",),
    },
}


def missing(names: Names) -> list[str]:
    """Those of ``names`` that this torch lacks, dotted."""
    found = []
    for module, attributes in names.items():
        for name in attributes:
            try:
                operator.attrgetter(name)(importlib.import_module(module))
            except (AttributeError, ImportError):
                found.append(f"{module}.{name}")
    return found


def check_names(entry: str) -> None:
    """Raises RuntimeError, with the names, where this torch lacks something of :data:`NEEDED` for ``entry``."""
    if lacking := missing(NEEDED[entry]):
        wanted = f"{entry} reads {' and '.join(lacking)}, which torch {torch.__version__} does not have"
        raise RuntimeError(f"{wanted}; {_STILL[entry]}")


CustomGraphPass: Any
HAS_PASSES = not missing(OPTIONAL["marks"])
if HAS_PASSES:
    from torch._inductor.custom_graph_pass import CustomGraphPass
    from torch._inductor.custom_graph_pass import get_hash_for_files as get_hash_for_files
else:
    CustomGraphPass = object


def expand_mode(mode: str | None, dynamic: bool | None) -> dict[str, Any]:
    """The Inductor options that ``torch.compile(mode=...)`` stands for.

    Raises:
        RuntimeError: this torch does not tell them.
    """
    if mode in (None, "default"):
        return {}
    check_names("compile(mode=...)")
    from torch._inductor import list_mode_options

    return dict(list_mode_options(mode, dynamic))


def pass_in_force() -> tuple[Any, ...]:
    """The joint passes that another library set process-wide: an option of the same name would hide them."""
    from torch._inductor import config

    return as_passes(config.joint_custom_pre_pass)


def as_passes(value: Any) -> tuple[Any, ...]:
    # A list of passes is legal from 2.13 on; 2.11 knows one pass or None.
    if value is None:
        return ()
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def options_of(compiled: Any) -> dict[str, Any] | None:
    """The Inductor options of what ``torch.compile`` made: where they differ from the ambient configuration.

    None when it does not tell, which is so of functions after ``fullgraph=True``, or this torch does not.
    """
    # A module, also a copied or unpickled one, keeps its backend under the wrappers of Dynamo.
    backend = getattr(getattr(compiled, "dynamo_ctx", None), "callback", None)
    while backend is not None and not hasattr(backend, "get_compiler_config"):
        inner = getattr(backend, "_torchdynamo_orig_backend", None)
        backend = inner or getattr(backend, "_torchdynamo_orig_callable", None)
    try:
        given = (compiled if backend is None else backend).get_compiler_config()
    except AttributeError:  # torch.compiler.disable wraps what was never compiled
        return {}
    if not given or missing(OPTIONAL["options"]):
        return None
    from torch._inductor import config

    ambient = config.get_config_copy()
    return {name: value for name, value in given.items() if name in ambient and value != ambient[name]}


@contextlib.contextmanager
def fresh_compiles() -> Iterator[None]:
    """No cache answers instead of the compiler, and no limit on recompiles ends the run early. Nothing is reset."""
    from torch._inductor import config

    with (
        config.patch(fx_graph_cache=False, fx_graph_remote_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
        torch._dynamo.config.patch(recompile_limit=1 << 20, accumulated_recompile_limit=1 << 20),
    ):
        yield


def isolated_compile(fn: Callable[..., Any], backend: Callable[..., Any], dynamic: bool | None) -> Callable[..., Any]:
    """``torch.compile`` with graph breaks allowed, whose cache entries do not count against those of other compiles."""
    kwargs: dict[str, Any] = {}
    # isolate_recompiles is 2.13+; on 2.11 the frames after a graph break share the code object's list of entries.
    if "isolate_recompiles" in inspect.signature(torch.compile).parameters:
        kwargs["isolate_recompiles"] = True
    return torch.compile(fn, backend=backend, fullgraph=False, dynamic=dynamic, **kwargs)


_BREAK = re.compile(
    r"in user code at (?P<file>.+?):(?P<line>\d+)\n"
    r"Graph Break Reason: (?P<reason>.*?)(?:\n\n(?:Stack variable source attribution|User code traceback):|\Z)",
    re.DOTALL,
)
_FRAME = re.compile(r'^  File "(?P<file>.+?)", line (?P<line>\d+), in (?P<function>.+)$', re.MULTILINE)
# What Dynamo was doing when it met the cause; the cause follows.
_PREAMBLE = re.compile(r"\A(?:Encountered graph break when|Failed to handle graph break)[^\n]*\n\n")


@contextlib.contextmanager
def graph_breaks() -> Iterator[list[tuple[str, int, str]]]:
    """Yields a list that fills with (file, line, reason) of every graph break, frames skipped whole included.

    Of a break inside a called function, a library's for example, the reason ends with the calls that led there.
    """
    found: list[tuple[str, int, str]] = []
    callers: dict[tuple[str, int], str] = {}

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            message = record.getMessage()
            match = _BREAK.search(message)
            if match:
                place = match["file"], int(match["line"])
                # The stack stands in the first of the records of one break.
                path = callers.setdefault(place, _callers(message.partition("\nUser code traceback:")[2]))
                found.append((*place, _PREAMBLE.sub("", match["reason"]).strip() + path))

    # The log is the only place that also sees frames which break before they have a graph.
    log = torch._logging.getArtifactLogger("torch._dynamo.symbolic_convert", "graph_breaks")
    handler, level, propagate, disabled = Collector(), log.level, log.propagate, log.disabled
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    log.propagate, log.disabled = False, False
    try:
        yield found
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
        log.propagate, log.disabled = propagate, disabled


def _callers(stack: str) -> str:
    """The calls between the explained function's caller and the place of a break, as a last line of its reason."""
    traced: list[re.Match[str]] = []
    for frame in _FRAME.finditer(stack):
        traced = [] if frame["function"].startswith("explained_") else [*traced, frame]
    calls = ", ".join(f"{frame['function']} ({frame['file']}:{frame['line']})" for frame in traced[:-1])
    return f"\nCalled by: {calls}" if calls else ""


_FAILED_GUARD = re.compile(r"^ +- (?P<entry>\d+/\d+\S*): (?P<reason>.*?)(?: +# .*)?$", re.MULTILINE)


@contextlib.contextmanager
def recompiles() -> Iterator[list[tuple[str, ...]]]:
    """Yields a list that fills with the failed guards of every recompilation, those of the latest compilation first.

    Raises:
        RuntimeError: this torch lacks a name that `assert_recompiles` needs.
    """
    check_names("assert_recompiles")
    found: list[tuple[str, ...]] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            reasons = [match["reason"] for match in _FAILED_GUARD.finditer(record.getMessage())]
            # What somebody else compiled with the same code is no compilation of ours.
            ours = [reason for reason in reasons if not reason.startswith("BACKEND_MATCH")]
            if ours or not reasons:
                found.append(tuple(dict.fromkeys(ours)) or ("for a reason that Dynamo does not tell",))

    # Dynamo works the reasons out only where this log is on; its own handlers would print them.
    log = torch._logging.getArtifactLogger("torch._dynamo.guards", "recompiles")
    names = torch._logging._internal.log_state.artifact_names
    before, level, propagate, disabled = set(names), log.level, log.propagate, log.disabled
    handlers, log.handlers = log.handlers, [Collector()]
    log.setLevel(logging.DEBUG)
    log.propagate, log.disabled = False, False
    names.add("recompiles")
    names.discard("recompiles_verbose")
    try:
        yield found
    finally:
        names.clear()
        names.update(before)
        log.handlers = handlers
        log.setLevel(level)
        log.propagate, log.disabled = propagate, disabled


@contextlib.contextmanager
def _schedules() -> Iterator[dict[str, Any]]:
    """Yields a table that fills with handle of a launch -> its graph (a nested region has one of its own), and the
    scheduler's nodes in the launch, or the IR node of a call."""
    found: dict[str, Any] = {}
    try:
        from torch._inductor import debug
        from torch._inductor.codegen import cpp, triton
        from torch._inductor.virtualized import V

        # What numbers the launches also knows their nodes.
        original: Any = debug.set_kernel_post_grad_provenance_tracing
    except (AttributeError, ImportError):
        # With the table empty, traffic is unknown.
        yield found
        return

    def keep(*args: Any, **kwargs: Any) -> Any:
        number = original(*args, **kwargs)
        # A report must not stop the compilation that it tells of.
        with contextlib.suppress(Exception):
            schedule, kernel_name = args[:2]
            kept = list(schedule) if isinstance(schedule, (list, tuple)) else schedule
            found[f"{kernel_name}:{number}"] = V.graph, kept
        return number

    # Imported by name, hence three times the same function.
    name = "set_kernel_post_grad_provenance_tracing"
    holders = [module for module in (debug, cpp, triton) if getattr(module, name, None) is original]
    for module in holders:
        setattr(module, name, keep)
    try:
        yield found
    finally:
        for module in holders:
            setattr(module, name, original)


Accesses = tuple[TensorAccess, ...]


class _UnknownSize(Exception):
    """A size that only the run tells."""


# Buffer -> the number of elements that are touched, by each way of touching it.
Touched = dict[str, dict[Any, Any]]


def _traffic(schedules: dict[str, Any]) -> tuple[dict[str, tuple[Accesses, Accesses]], dict[str, TensorAccess]]:
    """What every launch reads and writes, each tensor once, and the results of the graph that is being generated."""
    found: dict[str, tuple[Accesses, Accesses]] = {}
    outputs: dict[str, TensorAccess] = {}
    # A report must not stop the compilation that it tells of, whatever became of the names below.
    unknown = contextlib.suppress(Exception)
    for handle, (own, schedule) in schedules.items():
        with unknown:
            reads, writes = (_of_kernel if isinstance(schedule, list) else _of_call)(own, schedule)
            found[handle] = tuple(_accesses(own, reads)), tuple(_accesses(own, writes))
    with unknown:
        from torch._inductor.virtualized import V

        graph = V.graph
        (result,) = (node for node in graph.graph.nodes if node.op == "output")
        for node, value in zip(tree_leaves(result.args), graph.graph_outputs, strict=True):
            with contextlib.suppress(_UnknownSize):
                if isinstance(node, torch.fx.Node) and (name := value.maybe_get_name()):
                    whole = {_storage(graph, name): {None: math.prod(value.get_size())}}
                    outputs.update((node.name, access) for access in _accesses(graph, whole))
    return found, outputs


def _of_kernel(graph: Any, schedule: list[Any]) -> tuple[Touched, Touched]:
    from torch._inductor.dependencies import MemoryDep, StarDep, WeakDep

    leaves = [leaf for node in schedule if hasattr(node, "get_nodes") for leaf in node.get_nodes()]
    mutations = {name for leaf in leaves for out in leaf.get_outputs() for name in out.get_mutations()}
    mutated = {_storage(graph, name) for name in mutations}
    unstored = {*graph.removed_buffers, *graph.inplaced_to_remove}
    made: set[str] = set()
    reads: Touched = {}
    writes: Touched = {}

    def touch(into: Touched, dep: Any) -> None:
        numel, way = dep.get_numel(), None
        if isinstance(dep, MemoryDep):
            if dep.is_indirect():
                numel = math.prod(dep.size)
            normal = dep.normalize_with_stride_order()
            way = (dep.name, normal.index, normal.size)
        into.setdefault(_storage(graph, dep.name), {})[way] = numel

    for leaf in leaves:
        for dep in leaf.read_writes.reads:
            name = _storage(graph, dep.name)
            only_order = isinstance(dep, WeakDep) or (isinstance(dep, StarDep) and name in mutated)
            # What the kernel itself made is still at hand.
            if not only_order and name not in made:
                touch(reads, dep)
        for dep in leaf.read_writes.writes:
            made.add(_storage(graph, dep.name))
            if dep.name not in unstored:
                touch(writes, dep)
    return reads, writes


def _of_call(graph: Any, node: Any) -> tuple[Touched, Touched]:
    from torch._inductor import ir

    reads: Touched = {}
    writes: Touched = {}
    for operand in tree_leaves((list(node.inputs), list(node.constant_args), node.kwargs)):
        if isinstance(operand, ir.IRNode) and (name := operand.maybe_get_name()):
            size = tuple(operand.get_size())
            reads.setdefault(_storage(graph, name), {})[size] = math.prod(size)
    outputs = [output for output in tree_leaves(getattr(node, "outputs", ())) if isinstance(output, ir.Buffer)]
    for name in (*(output.get_name() for output in outputs or [node]), *node.get_mutation_names()):
        if _is_tensor(graph, name):
            writes.setdefault(_storage(graph, name), {})[name] = graph.get_numel(name)
    return reads, writes


def _storage(graph: Any, name: str) -> str:
    """The buffer whose memory ``name`` is: a mutated one has a name per version, and a part of a cat one of its own."""
    from torch._inductor import ir

    name = graph.scheduler.mutation_real_name.get(name, name)
    layout = graph.try_get_buffer(name).get_output_spec() if _is_tensor(graph, name) else None
    return _storage(graph, layout.view.get_name()) if isinstance(layout, ir.NonOwningLayout) else name


def _is_tensor(graph: Any, name: str) -> bool:
    from torch._inductor import ir

    buffer = graph.try_get_buffer(name)
    return buffer is not None and isinstance(buffer.get_output_spec(), ir.Layout)


def _accesses(graph: Any, touched: Touched) -> Iterator[TensorAccess]:
    """The tensors behind ``touched``; raises :class:`_UnknownSize` where it takes a value to know how much moves."""

    def hint(size: Any) -> int:
        if free_unbacked_symbols(size):
            raise _UnknownSize(size)
        return int(graph.sizevars.optimization_hint(size, fallback=0))

    for name, ways in touched.items():
        if not _is_tensor(graph, name):
            continue
        buffer = graph.try_get_buffer(name)
        dtype, sizes = buffer.get_dtype(), buffer.get_size()
        # Two ways of touching may meet the same elements, but there are no more than all.
        elements = min(sum(map(hint, ways.values())), hint(graph.get_numel(name)))
        shape = tuple(str(size) if getattr(size, "free_symbols", ()) else int(size) for size in sizes)
        yield TensorAccess(name, shape, str(dtype).removeprefix("torch."), elements * dtype.itemsize)


class CaptureBackend:
    """A backend for ``torch.compile``: compiles with Inductor and keeps a :class:`CapturedGraph` per compilation."""

    def __init__(self, options: dict[str, Any]) -> None:
        # The order of calls is read from the Python wrapper; level 1 records the nodes behind every kernel, C++ too.
        self.options = {**options, "cpp_wrapper": False, "trace.provenance_tracking_level": 1}
        self.graphs: list[CapturedGraph] = []
        self.num_graphs = 0

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        from torch._inductor.compile_fx import compile_fx

        index = self.num_graphs
        self.num_graphs += 1

        def inner(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
            return self._compile_inner(index, gm, example_inputs, **kwargs)

        return compile_fx(gm, example_inputs, inner_compile=inner, config_patches=self.options)

    def _compile_inner(self, index: int, gm: torch.fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
        from torch._inductor import debug
        from torch._inductor.compile_fx import compile_fx_inner
        from torch._inductor.graph import GraphLowering

        direction = (
            "backward" if kwargs.get("is_backward") else "inference" if kwargs.get("is_inference") else "forward"
        )
        nodes = tuple(captured(node) for node in calls_of(gm))
        codes: list[str] = []
        launches: dict[str, list[str]] = {}
        traffic: dict[str, tuple[Accesses, Accesses]] = {}
        outputs: dict[str, TensorAccess] = {}

        def keep(code: str) -> None:
            codes.append(code)
            moved, results = _traffic(schedules)
            traffic.update(moved)
            outputs.update(results)
            # Inductor clears this table when the compilation ends.
            launches.update(debug._inductor_triton_kernel_to_post_grad_node_info)

        previous = GraphLowering.save_output_code
        GraphLowering.save_output_code = staticmethod(keep)
        try:
            with _schedules() as schedules:
                compiled = compile_fx_inner(gm, example_inputs, **kwargs)
        finally:
            GraphLowering.save_output_code = previous
        # Post-grad passes changed the graph in place; kernels speak of the nodes after them.
        after = [captured(node) for node in calls_of(gm)]
        launch_nodes = {
            handle: tuple(node for node in after if node.name in names) for handle, names in launches.items()
        }
        inputs = tuple(node.name for node in gm.graph.nodes if node.op == "placeholder")
        code = codes[-1] if codes else ""
        self.graphs.append(CapturedGraph(index, direction, nodes, code, launch_nodes, traffic, inputs, outputs))
        return compiled


# Export part.


def compile_package(exported: torch.export.ExportedProgram, path: str, options: dict[str, Any]) -> None:
    """AOTInductor's package of a program, written to ``path``.

    Raises:
        RuntimeError: this torch has no function for that.
    """
    check_names("package")
    torch._inductor.aoti_compile_and_package(exported, package_path=path, inductor_configs=options)


def symbolic_composites() -> contextlib.AbstractContextManager[Any]:
    """Composite operators such as matmul keep symbolic sizes while traced; in C++ some of them make them constants.

    Raises:
        RuntimeError: this torch has no switch for that.
    """
    check_names("export_training_step")
    from torch._dispatch.python import enable_python_dispatcher

    return enable_python_dispatcher()
