"""`compile`: torch.compile with what sparse attention needs. `explain`: how a function compiles, in words."""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import types
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy

from .generated_code import calls_in_order
from .lowerings import _inductor_compat_capture as compat
from .reporting import (
    BackendUse,
    Call,
    CompiledDirection,
    CompiledGraph,
    GraphBreak,
    GraphOutput,
    OpTier,
    RegionReport,
)

if TYPE_CHECKING:
    from .backends.capability import Refusal

NAMESPACE = "vsa"
# Recomputing the selection could pick other blocks, by a rounding difference, than the saved lse belongs to.
MUST_SAVE = ("vsa.attention", "vsa.select_blocks")
# What a kernel of ours does together with the norm and rotation around it, where their form is recognised.
FUSED_IN = {"vsa.tile": "vsa.norm_rope_tile", "vsa.untile": "vsa.norm_rope_tile_backward"}
# What un-tiles the attention's output: a gather of what is saved anyway; its result would be one tensor more per layer.
# The partitioner recomputes operators that it knows, and ours when told so.
RECOMPUTED = ("vsa.gated_combine", "vsa.untile")


class MustSavePass(compat.CustomGraphPass):
    """Forbids the partitioner to recompute :data:`MUST_SAVE` operators, whatever memory budget or checkpoint region.

    And lets it recompute :data:`RECOMPUTED` ones.

    Args:
        before: passes to run first: the user's own, or another library's, which the option would otherwise replace.
    """

    def __init__(self, before: Iterable[Any] = ()) -> None:
        self.before = tuple(before)

    def __call__(self, graph: torch.fx.Graph) -> None:
        for graph_pass in self.before:
            graph_pass(graph)
        for node in graph.nodes:
            if node.op == "call_function" and _op_name(node.target) in RECOMPUTED and _reads_attention(node):
                node.meta.setdefault("recompute", CheckpointPolicy.PREFER_RECOMPUTE)
                node.meta.setdefault("ac_graph_id", 0)
            if node.op != "call_function" or _op_name(node.target) not in MUST_SAVE:
                continue
            # A policy function that asks for recomputation by name knows what it does.
            if node.meta.get("recompute") is not CheckpointPolicy.MUST_RECOMPUTE:
                for saved in (node, *node.users):
                    if saved is node or _op_name(saved.target) == "getitem":
                        saved.meta["recompute"] = CheckpointPolicy.MUST_SAVE

    def uuid(self) -> Any:
        uuids = tuple(graph_pass.uuid() if hasattr(graph_pass, "uuid") else None for graph_pass in self.before)
        # A plain function as a pass has no identity to key a cache on: None switches the cache off, as without us.
        return None if None in uuids else (compat.get_hash_for_files((__file__,)), *uuids)

    # Dynamo reuses a compilation when the backends compare equal, and the options hold the pass.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, MustSavePass) and self.before == other.before

    def __hash__(self) -> int:
        return hash((MustSavePass, len(self.before)))


def _reads_attention(node: torch.fx.Node) -> bool:
    source = node.args[0]
    return isinstance(source, torch.fx.Node) and any(
        _op_name(n.target) == "vsa.attention" for n in source.all_input_nodes
    )


def _op_name(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return str(target.overloadpacket)
    return getattr(target, "__name__", "")


def correct_fusions() -> dict[str, tuple[Any, str]]:
    """Options that switch off what this torch is known to compile wrongly: name -> (value, what goes wrong)."""
    version: Any = torch.torch_version.TorchVersion(torch.__version__)
    # Seen with torch 2.13 in a Wan block with a learned gate: an outer loop is vectorised over tokens that share one
    # local buffer. No version is known to be free of it; the option only touches code for the CPU.
    found = {"cpp.max_horizontal_fusion_size": (1, "on the CPU gradients through four projections of one norm")}
    if version >= (2, 10):
        # Seen on an H200 with torch 2.11: gradients of Wan's scale_shift_table 20 to 480 times off, dense or sparse.
        # The code at fault stands unchanged up to 2.14.1; an upper bound waits for a release where it does not.
        reason = "on CUDA gradients of a modulation table that several norms share (pytorch issue 193061)"
        found["triton.mix_order_reduction"] = (False, reason)
    return found


_NO_MARKS = (
    "vsa_inductor.compile cannot forbid recomputation of the attention: torch {} has no {}. Results are the same; a "
    "memory budget or a checkpoint region may run it twice."
)
_WRONG_FUSION = "{} is as torch has it: {} may be wrong. vsa_inductor.compile leaves that fusion out."

# Options and `dynamic` of what `compile` returned, for `explain`: torch.compile's result does not tell.
_settings_of: weakref.WeakKeyDictionary[Any, tuple[dict[str, Any], bool | None]] = weakref.WeakKeyDictionary()


def compile(model: Any = None, *, fullgraph: bool = True, **kwargs: Any) -> Any:
    """``torch.compile`` for models with video sparse attention: one graph, and nothing of ours computed twice.

    Differs from ``torch.compile`` in three points. ``fullgraph`` is True unless given: a graph break is an error that
    names its line. And the joint graph of every compilation is marked so that neither an activation memory budget
    (``torch._functorch.config.activation_memory_budget``) nor a checkpoint region recomputes the attention or its block
    selection in the backward; a selective-checkpoint policy that answers ``MUST_RECOMPUTE`` for them is followed. The
    marks belong to this compilation and its cache key; nothing process-wide changes. And fusions that this torch is
    known to compile wrongly are off unless ``options`` says otherwise: from torch 2.10 on
    ``triton.mix_order_reduction`` (on CUDA, gradients of a modulation table that several norms share, which every Wan
    block has: pytorch issue 193061), and on the CPU horizontal fusion (gradients through four projections of one norm).

    Args:
        model: a module or function; without one, a decorator is returned.
        fullgraph: as in ``torch.compile``, default True.
        kwargs: any other argument of ``torch.compile``. ``mode`` and ``options`` may both be given: options win. A
            ``joint_custom_pre_pass`` in ``options``, or set in Inductor's configuration when this is called, runs
            before ours. Backends other than ``"inductor"`` get no marks, since they have no such pass.

    Returns:
        What ``torch.compile`` returns.

    Raises:
        Whatever ``torch.compile`` raises.
    """
    if model is None:
        return functools.partial(compile, fullgraph=fullgraph, **kwargs)
    if not _is_inductor(kwargs.get("backend")):
        return torch.compile(model, fullgraph=fullgraph, **kwargs)
    dynamic = kwargs.get("dynamic")
    options = _options(kwargs.pop("mode", None), kwargs.get("options"), dynamic)
    # torch.compile takes what is not Inductor's out of the dictionary that it is given.
    compiled = torch.compile(model, fullgraph=fullgraph, **{**kwargs, "options": dict(options)})
    if compiled is not model:  # disable=True
        _settings_of[compiled] = (options, dynamic)
    return compiled


def _is_inductor(backend: Any) -> bool:
    if backend is None:
        backend = torch.compiler.get_default_backend() if hasattr(torch.compiler, "get_default_backend") else "inductor"
    return backend == "inductor"


def _options(mode: str | None, given: dict[str, Any] | None, dynamic: bool | None) -> dict[str, Any]:
    correct = {name: value for name, (value, _) in correct_fusions().items()}
    options = {**correct, **compat.expand_mode(mode, dynamic), **(given or {})}
    if not compat.HAS_PASSES:
        warnings.warn(
            _NO_MARKS.format(torch.__version__, " and ".join(compat.missing(compat.OPTIONAL["marks"]))), stacklevel=3
        )
        return options
    name = "joint_custom_pre_pass"
    before = compat.as_passes(options[name]) if name in options else compat.pass_in_force()
    # compile(compile(f)) must not stack marks, and equal passes keep Dynamo from compiling twice.
    options[name] = MustSavePass(graph_pass for graph_pass in before if not isinstance(graph_pass, MustSavePass))
    return options


# What is captured is captured from hooks of the whole process. A function that is explained may explain another.
one_at_a_time = threading.RLock()


@torch.compiler.disable  # explained from inside of what is compiled, it runs as it is
def explain(
    fn: Callable[..., Any], *inputs: Any, backward: bool | Literal["auto"] = "auto", **kwargs: Any
) -> RegionReport:
    """Compiles ``fn`` afresh, runs it once on ``inputs``, and tells what came out.

    With ``backward`` also the gradient of the sum of all floating-point outputs is compiled and run. Graph breaks are
    allowed here, so that all of them are found. Gradients in ``.grad``, inputs, buffers and the random state are as
    before afterwards, and other compiled functions keep their code; parameters that ``fn`` itself changes (an optimizer
    step) stay changed. Parts of ``fn`` that are compiled on their own are explained as parts of the whole.

    Args:
        fn: a function, a module, or what ``torch.compile`` or :func:`compile` made of one; their options are used.
        inputs, kwargs: the arguments of ``fn``.
        backward: True, False, or ``"auto"``: whether an output requires a gradient.

    Returns:
        A :class:`RegionReport`.

    Raises:
        ValueError: ``backward=True`` and no floating-point output requires a gradient.
        RuntimeError: this torch lacks a private name that the report is read from.
    """
    compat.check_names("explain")
    original, options, dynamic = unwrap(fn)
    backend = compat.CaptureBackend(options or {})
    with one_at_a_time, restored(original, inputs, kwargs), compat.fresh_compiles(), compat.graph_breaks() as breaks:
        outputs = compat.isolated_compile(entry(original), backend, dynamic)(*inputs, **kwargs)
        differentiable = [
            leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.requires_grad and leaf.grad_fn
        ]
        if backward is True and not differentiable:
            raise ValueError("backward=True: got outputs that need no gradient; allowed: at least one that does")
        own_backward = bool(backward and differentiable) and not _run_backward(differentiable)
    unread = "the function was compiled with options that cannot be read: explained with torch.compile's defaults."
    notes = [unread] if options is None else []
    if own_backward:
        notes.append("the function runs its own backward, so that none was run for its outputs.")
    backward_code = "".join(part.code for part in backend.graphs if part.direction == "backward")
    for name, (_, wrong) in correct_fusions().items():
        if f"async_compile.{name.partition('.')[0]}" in backward_code and name not in backend.options:
            notes.append(_WRONG_FUSION.format(name, wrong))
    return _report(backend, breaks, notes)


def unwrap(fn: Callable[..., Any]) -> tuple[Callable[..., Any], dict[str, Any] | None, bool | None]:
    """What was compiled, with which options (None: it does not tell), and ``dynamic``."""
    original = getattr(fn, "_orig_mod", None) or getattr(fn, "_torchdynamo_orig_callable", None)
    if original is None:
        return fn, {}, None
    if fn in _settings_of:
        options, dynamic = _settings_of[fn]
        # Dynamo's own settings, which torch.compile accepts among the options.
        return original, {k: v for k, v in options.items() if k not in ("guard_filter_fn", "use_aoti")}, dynamic
    return original, compat.options_of(fn), None


_entries = itertools.count()


def entry(fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn`` behind a frame that nobody else compiles: its cache entries go away with it.

    Dynamo keeps compilations on code objects, and what it learnt about dynamic sizes under (file, line, name): a copied
    code object with a name of its own starts from nothing and leaves nothing.
    """

    def explained(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    code = explained.__code__.replace(co_name=f"explained_{next(_entries)}")
    return types.FunctionType(code, explained.__globals__, code.co_name, None, explained.__closure__)


def _run_backward(outputs: list[Tensor]) -> bool:
    """Runs the backward by ``autograd.grad``, which touches no ``.grad`` and fires no post-accumulate hook.

    Returns False where the function has run it already, so that its graph is gone.
    """
    leaves: dict[Tensor, None] = {}
    seen: set[Any] = set()
    pending = [output.grad_fn for output in outputs]
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(variable := getattr(node, "variable", None), Tensor):
            leaves[variable] = None
        pending.extend(following for following, _ in node.next_functions)
    try:
        torch.autograd.grad([output.sum() for output in outputs], list(leaves), allow_unused=True)
    except RuntimeError as error:
        if "a second time" not in str(error):
            raise
        return False
    return True


@contextlib.contextmanager
def restored(fn: Callable[..., Any], inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
    """Puts ``.grad``, changed inputs and buffers, and random states back."""
    reachable = (*_bound_to(fn), *tree_leaves((inputs, kwargs)))
    modules = [value for value in reachable if isinstance(value, torch.nn.Module)]
    tensors = [value for value in reachable if isinstance(value, Tensor)]
    # Parameters are not copied: a second copy of a large model would not fit.
    copied = {*tensors, *(buffer for module in modules for buffer in module.buffers())}
    graded = {*copied, *(parameter for module in modules for parameter in module.parameters())}
    copies = [(tensor, tensor._version, tensor.detach().clone()) for tensor in copied if not tensor.is_inference()]
    grads = [(tensor, tensor.grad) for tensor in graded if tensor.is_leaf]
    devices = {tensor.device for tensor in graded if tensor.device.type == "cuda"}
    for tensor, _ in grads:
        tensor.grad = None
    try:
        with torch.random.fork_rng(devices=devices), torch.compiler.set_stance("default"):
            yield
    finally:
        for tensor, grad in grads:
            tensor.grad = grad
        with torch.no_grad():
            for tensor, version, copy in copies:
                if tensor._version != version:
                    tensor.copy_(copy)


def _bound_to(fn: Any) -> Iterator[Any]:
    """What a function carries with it: itself, the object of a bound method, closure cells, arguments of a partial."""
    yield fn
    if isinstance(fn, functools.partial):
        yield from tree_leaves((fn.args, fn.keywords))
        yield from _bound_to(fn.func)
    if hasattr(fn, "__self__"):
        yield fn.__self__
    for cell in getattr(fn, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # a cell that is still empty
            yield from tree_leaves(cell.cell_contents)


def _report(backend: compat.CaptureBackend, breaks: list[tuple[str, int, str]], notes: list[str]) -> RegionReport:
    graphs = tuple(
        CompiledGraph(index, tuple(_direction(part) for part in backend.graphs if part.index == index))
        for index in range(backend.num_graphs)
    )
    # A break in a called function is met once per frame around it, at the same line; the last one knows the cause.
    located = {(file, line): GraphBreak(file, line, reason) for file, line, reason in breaks}
    firsts = (part for part in backend.graphs if part.direction != "backward")
    uses = [_use(part, node) for part in firsts for node in part.nodes if node.op == "vsa.attention"]
    notes = [*notes, *_notes(backend.graphs)]
    return RegionReport(graphs, tuple(located.values()), tuple(uses), tuple(notes), str(torch.__version__))


def _direction(part: compat.CapturedGraph) -> CompiledDirection:
    calls = []
    order = calls_in_order(part.code)
    # A kernel that prepares an operand of an opaque call has that call among its nodes, but does not carry it out.
    opaque = {call.name for call in order if call.kind == "opaque"}
    for call in order:
        elsewhere = {"getitem", *(opaque - {call.name})}
        nodes = [node for node in part.launch_nodes.get(call.handle, ()) if node.op not in elsewhere]
        # Inductor gives no handle to kernels that reduce along two axes at once, only a comment.
        fused = tuple(dict.fromkeys(node.origin for node in nodes)) if nodes else call.operators
        sources = tuple(dict.fromkeys(node.source for node in nodes if node.source))
        ours = call.kind == "opaque" and call.name.startswith(f"{NAMESPACE}.")
        moved = part.traffic.get(call.handle, (None, None))
        what = (call.kind, call.name, ours, fused, sources, call.instead_of)
        calls.append(Call(part.index, part.direction, *what, *moved))
    outputs = tuple(GraphOutput(name, tensor) for name, tensor in part.outputs.items())
    tiers = tuple(_tiers(part, calls))
    return CompiledDirection(part.direction, tuple(calls), tiers, part.code, part.inputs, outputs)


def _tiers(part: compat.CapturedGraph, calls: list[Call]) -> Iterator[OpTier]:
    opaque = {call.name for call in calls if call.kind == "opaque"}
    kept = Counter(node.op for node in part.nodes if node.op.startswith(f"{NAMESPACE}."))
    for op, count in kept.items():
        fused_in = FUSED_IN.get(op)
        how = "" if fused_in is None else f"in {fused_in}" if fused_in in opaque else "generated code"
        yield OpTier(op, count, "opaque" if op in opaque else "lowering", how)
    decomposed = {node.origin for node in part.nodes if node.origin.startswith(f"{NAMESPACE}.")} - kept.keys()
    for op in sorted(decomposed):
        # Counting calls of an operator that is gone is not possible: its pieces may have been merged.
        yield OpTier(op, 1, "decomposition")


def _use(part: compat.CapturedGraph, node: compat.CapturedNode) -> BackendUse:
    names = node.arguments["backend"], node.arguments["backward_backend"]
    return BackendUse(part.index, node.name, *names, tuple(_refusals(node.arguments, part.direction != "inference")))


def _refusals(arguments: dict[str, Any], needs_grad: bool) -> Iterator[Refusal]:
    """Every backend that could not run this call: sentences are formatted here, outside tracing."""
    from .backends import capability
    from .backends.contract import Problem

    q, k = arguments["q"], arguments["k"]
    problem = Problem(
        q.device.type,
        capability.device_capability(q.device.type, q.device.index),
        q.dtype,
        q.shape[3],
        arguments["block_size"],
        # By name: comparing symbolic sizes would add a guard to a graph that is finished.
        str(q.shape[1]) != str(k.shape[1]),
        needs_grad,
        arguments["deterministic"],
    )
    for name in capability.backend_names():
        for direction in capability.DIRECTIONS if needs_grad else ("forward",):
            sentence = capability.backend_named(name).refuse(problem, direction)
            if sentence is not None:
                yield capability.Refusal(name, direction, sentence)


def _notes(parts: list[compat.CapturedGraph]) -> Iterator[str]:
    for part in parts:
        again = Counter(node.op for node in part.nodes if node.op in MUST_SAVE and part.direction == "backward")
        if again:
            calls = " and ".join(f"{op} ({count} {'call' if count == 1 else 'calls'})" for op, count in again.items())
            yield (
                f"graph {part.index}: the backward runs {calls} again, because of an activation memory budget or a "
                "checkpoint region; vsa_inductor.compile keeps the forward's results instead."
            )
        if part.nodes and not part.code:
            yield f"graph {part.index}, {part.direction}: Inductor showed no generated code."
