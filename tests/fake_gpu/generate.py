"""Runs torch.compile on fake CUDA tensors and keeps what Inductor wrote instead of running it."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch._functorch.config
import torch._inductor.config
from torch._inductor.graph import GraphLowering
from torch._subclasses.fake_tensor import FakeTensorMode

from .device import fake_gpu
from .generated_code import GeneratedCode, GraphCall

# A builder makes what is compiled: called under FakeTensorMode, so `device="cuda"` allocates nothing.
Builder = Callable[[], tuple[Callable[..., Any], Sequence[Any]]]


class _NotExecuted(Exception):
    """Raised by the first call of a compiled graph: by then both directions have been generated."""


class _UnrunnableModule:
    """Stands for the generated Python module, which needs a GPU from its first line on."""

    __file__ = "<not executed>"

    @staticmethod
    def call(*args: Any) -> None:
        raise _NotExecuted


def inductor_options(**options: Any) -> Callable[[Builder], Builder]:
    """Decorates a builder with the `options` that torch.compile gets for it."""

    def attach(build: Builder) -> Builder:
        build.options = options  # type: ignore[attr-defined]
        return build

    return attach


def within(context: Callable[[], contextlib.AbstractContextManager[Any]]) -> Callable[[Builder], Builder]:
    """Decorates a builder with a context in which its function is compiled."""

    def attach(build: Builder) -> Builder:
        build.context = context  # type: ignore[attr-defined]
        return build

    return attach


def _graph_calls(graph: torch.fx.Graph) -> list[GraphCall]:
    calls = []
    for node in graph.nodes:
        if node.op == "call_function":
            arguments = [str(argument) for argument in node.args]
            arguments += [f"{name}={value}" for name, value in sorted(node.kwargs.items())]
            calls.append(GraphCall(node.name, str(node.target), tuple(arguments)))
    return calls


class _Recorder:
    """Collects source text and graph of every GraphLowering, under "forward" or "backward"."""

    def __init__(self) -> None:
        self.source: dict[str, str] = {}
        self.calls: dict[str, list[GraphCall]] = {}

    def compile_to_module(self, lowering: GraphLowering) -> Any:
        direction = "backward" if lowering.is_backward else "forward"
        if direction in self.source:
            raise AssertionError(f"a second {direction} graph was compiled; the function is more than one region")
        self.source[direction] = lowering.codegen()[0].value
        self.calls[direction] = _graph_calls(lowering.orig_gm.graph)
        return _UnrunnableModule


@contextlib.contextmanager
def _recording() -> Iterator[_Recorder]:
    recorder = _Recorder()
    with (
        mock.patch.object(GraphLowering, "compile_to_module", lambda lowering: recorder.compile_to_module(lowering)),
        torch._inductor.config.patch(
            {
                "force_disable_caches": True,
                "compile_threads": 1,
                # Both would run kernels: one to fold constants, one to time padded matrix products.
                "joint_graph_constant_folding": False,
                "shape_padding": False,
            }
        ),
        torch._functorch.config.patch(enable_autograd_cache=False, force_non_lazy_backward_lowering=True),
    ):
        yield recorder


def generate(build: Builder, arch: int, backward: bool = True) -> GeneratedCode:
    """Inductor's source code for `build()` on a fake GPU of compute capability `arch`.

    build: called without arguments under FakeTensorMode; returns a function (or module) and its inputs. Parameters and
        inputs live on "cuda"; with `backward` at least one needs a gradient.
    backward: generate the backward graph too (for contiguous incoming gradients); without it runs under no_grad.

    Raises AssertionError when the function is not one graph.
    """
    torch._dynamo.reset()
    # Fake tensors with the same id in two FakeTensorModes would mix: everything happens in this one.
    with fake_gpu(arch), FakeTensorMode(allow_non_fake_inputs=True), torch.set_grad_enabled(backward):
        function, inputs = build()
        context = getattr(build, "context", contextlib.nullcontext)
        with context(), _recording() as recorder, contextlib.suppress(_NotExecuted):
            options = getattr(build, "options", None)
            torch.compile(function, fullgraph=True, dynamic=False, options=options)(*inputs)
    missing = ({"forward", "backward"} if backward else {"forward"}) - set(recorder.source)
    if missing:
        raise AssertionError(f"no {' and '.join(sorted(missing))} graph was compiled")
    return GeneratedCode(
        arch=arch,
        forward=recorder.source["forward"],
        backward=recorder.source.get("backward", ""),
        forward_calls=tuple(recorder.calls["forward"]),
        backward_calls=tuple(recorder.calls.get("backward", ())),
    )
