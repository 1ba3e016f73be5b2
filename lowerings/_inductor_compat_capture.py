"""The private names of torch's compiler behind `compile` and `explain`; the other half of `_inductor_compat.py`.

:class:`CaptureBackend` compiles as ``backend="inductor"`` does and keeps what was generated, :func:`fresh_compiles`
keeps caches out of the way, :func:`graph_breaks` collects graph breaks. Checked on torch 2.11 and 2.13.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass as CustomGraphPass
from torch._inductor.custom_graph_pass import get_hash_for_files as get_hash_for_files

from ._captured import CapturedGraph, calls_of, captured


def expand_mode(mode: str | None, dynamic: bool | None) -> dict[str, Any]:
    """The Inductor options that ``torch.compile(mode=...)`` stands for."""
    from torch._inductor import list_mode_options

    return dict(list_mode_options(mode, dynamic)) if mode not in (None, "default") else {}


def pass_in_force() -> tuple[Any, ...]:
    """The joint passes that another library set process-wide: an option of the same name would hide them."""
    return as_passes(inductor_config.joint_custom_pre_pass)


def as_passes(value: Any) -> tuple[Any, ...]:
    # A list of passes is legal from 2.13 on; 2.11 knows one pass or None.
    if value is None:
        return ()
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def options_of(compiled: Any) -> dict[str, Any] | None:
    """The Inductor options of what ``torch.compile`` made: where they differ from the ambient configuration.

    None when it does not tell, which is so after ``fullgraph=True``.
    """
    try:
        config = compiled.get_compiler_config()
    except AttributeError:  # torch.compiler.disable wraps what was never compiled
        return {}
    if not config:
        return None
    ambient = inductor_config.get_config_copy()
    return {name: value for name, value in config.items() if name in ambient and value != ambient[name]}


@contextlib.contextmanager
def fresh_compiles() -> Iterator[None]:
    """No cache answers instead of the compiler, and no limit on recompiles ends the run early. Nothing is reset."""
    with (
        inductor_config.patch(fx_graph_cache=False, fx_graph_remote_cache=False),
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
# What Dynamo was doing when it met the cause; the cause follows.
_PREAMBLE = re.compile(r"\A(?:Encountered graph break when|Failed to handle graph break)[^\n]*\n\n")


@contextlib.contextmanager
def graph_breaks() -> Iterator[list[tuple[str, int, str]]]:
    """Yields a list that fills with (file, line, reason) of every graph break, frames skipped whole included."""
    found: list[tuple[str, int, str]] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            match = _BREAK.search(record.getMessage())
            if match:
                found.append((match["file"], int(match["line"]), _PREAMBLE.sub("", match["reason"]).strip()))

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

        def keep(code: str) -> None:
            codes.append(code)
            # Inductor clears this table when the compilation ends.
            launches.update(debug._inductor_triton_kernel_to_post_grad_node_info)

        previous = GraphLowering.save_output_code
        GraphLowering.save_output_code = staticmethod(keep)
        try:
            compiled = compile_fx_inner(gm, example_inputs, **kwargs)
        finally:
            GraphLowering.save_output_code = previous
        # Post-grad passes changed the graph in place; kernels speak of the nodes after them.
        after = [captured(node) for node in calls_of(gm)]
        launch_nodes = {
            handle: tuple(node for node in after if node.name in names) for handle, names in launches.items()
        }
        self.graphs.append(CapturedGraph(index, direction, nodes, codes[-1] if codes else "", launch_nodes))
        return compiled
