"""Training steps and AOTInductor packages as files.

Under `torch.export` the operators of this package stay single nodes, and `vsa::attention` names its backend as the
options do: ``"auto"`` is chosen by what runs the graph, on the device it runs on; a name is binding there.
"""

from __future__ import annotations

import contextlib
import operator
import os
import tempfile
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, ShapesCollection
from torch.export.graph_signature import InputKind
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from .errors import ArgumentError
from .lowerings import _inductor_compat_capture as compat
from .tiling import TileLayout

# Says of a saved program that it is a training step.
_MARK = "vsa_inductor_training_step"

# All that a process says which cannot run a package is the name of the first operator it misses. So packages call the
# operators under this name: "Could not find schema for import_vsa_inductor_first::select_blocks".
_PACKAGED = "import_vsa_inductor_first"
_library = torch.library.Library(_PACKAGED, "DEF")
for _name in dir(torch.ops.vsa):
    _op = getattr(torch.ops.vsa, _name)
    for _overload in _op.overloads() if isinstance(_op, torch._ops.OpOverloadPacket) else ():
        _schema = str(getattr(_op, _overload)._schema).partition("::")[2]
        _library.define(_schema)
        _library.impl(_schema.partition("(")[0], getattr(_op, _overload), "CompositeExplicitAutograd")


class TrainingStep:
    """One exported training step: forward, loss and gradients in one graph, without the code of the model.

    Where it was exported it reads the parameters of the model it was made from; where it was loaded, its own. It never
    changes them: give :meth:`named_parameters` to an optimizer, or set them by :meth:`load_state_dict`.

    Attributes:
        exported: the program, for :func:`package` and for passes of your own.
        module: the same as a module; ``torch.compile`` takes it, under ``torch.no_grad()``.
    """

    def __init__(self, exported: ExportedProgram) -> None:
        self.exported = exported
        self.module: nn.Module = exported.module()

    def __call__(self, *inputs: Any) -> tuple[Tensor, dict[str, Tensor | None]]:
        """The loss and the gradients.

        Args:
            inputs: the model's inputs and then the targets, with the structure, dtypes and sizes of the example.

        Returns:
            loss, a scalar, and the gradient of each trained parameter under its name in the model: None where the loss
            does not depend on it.
        """
        with torch.no_grad():
            return self.module(*inputs)

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Every parameter under its name in the model, frozen ones too; a shared one under its first name only."""
        return dict(self.module.named_parameters())

    def state_dict(self) -> dict[str, Tensor]:
        """Parameters and buffers under their names in the model."""
        return self.module.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Copies parameters and buffers in, from the model's own state dict too; names that are not the step's are
        ignored.

        Raises:
            RuntimeError: a name is missing or a size differs.
        """
        mine = self.module.state_dict().keys()
        self.module.load_state_dict({name: x for name, x in state_dict.items() if name in mine})

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the step and its parameters to a ``.pt2`` file, for :func:`load_training_step`."""
        torch.export.save(self.exported, path, extra_files={_MARK: "1"})


def export_training_step(
    model: nn.Module,
    loss_fn: Callable[..., Tensor],
    inputs: Sequence[Any],
    *,
    targets: Sequence[Any] = (),
    dynamic_shapes: Sequence[Any] | ShapesCollection | None = None,
    strict: bool = False,
) -> TrainingStep:
    """Exports ``loss_fn(model(*inputs), *targets)`` and its gradients by the model's parameters as one graph.

    It has one ``vsa::attention`` and one ``vsa::attention_backward`` per attention call. As with ``torch.export``, the
    mode of the model (train or eval) and every plain number are fixed; dropout draws anew on every call, and buffers
    that the model changes are changed by the step.

    Args:
        model: the module to train. Parameters with ``requires_grad=False`` get no gradient.
        loss_fn: gets the model's output and then the targets, returns a scalar.
        inputs: example inputs of the model by position: tensors, a :class:`TileLayout`, numbers, containers of those.
        targets: what else ``loss_fn`` gets.
        dynamic_shapes: a ``torch.export.ShapesCollection``, or one entry per input and then per target, each as for
            ``torch.export.export``; see :func:`any_video`. What is 1 in the example (batch, kept tiles) stays fixed.
        strict: trace with Dynamo, as ``torch.export.export(strict=True)``.

    Returns:
        The step: ``loss, gradients = step(*inputs, *targets)``.

    Raises:
        ArgumentError: the model has an ``autograd.Function`` or gradient hooks, which export would drop; no parameter
            requires a gradient; the loss is no scalar or depends on none of them; one tensor
            stands for two inputs or targets.
    """
    arguments = (*inputs, *targets)
    tensors = [id(x) for x in pytree.tree_leaves(arguments) if isinstance(x, Tensor)]
    if len(set(tensors)) < len(tensors):
        # torch.export makes one input of them, silently.
        raise ArgumentError("inputs, targets", "one tensor twice", "a tensor of its own for each place")
    shapes: Any = (tuple(dynamic_shapes),) if isinstance(dynamic_shapes, Sequence) else dynamic_shapes
    trained = [_MODEL + name for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not trained:
        raise ArgumentError("model", "no parameter that requires a gradient", "at least one")
    if hooked := [name for name, parameter in model.named_parameters() if parameter._backward_hooks]:
        raise ArgumentError("model", f"gradient hooks on {hooked}", "gradients that nothing changes")
    with torch.enable_grad(), _registered_gradients_only():
        whole = _Loss(model, loss_fn, len(inputs))
        forward = torch.export.export(whole, arguments, dynamic_shapes=shapes, strict=strict)
    step = _whole_step(forward, trained)
    # Once more, for the signature: which tensors are parameters, which are constants, and what is dynamic.
    with torch.no_grad():
        return TrainingStep(torch.export.export(step, arguments, dynamic_shapes=shapes))


def load_training_step(path: str | os.PathLike[str]) -> TrainingStep:
    """The step that :meth:`TrainingStep.save` wrote; needs neither the model's class nor the loss function.

    Raises:
        ArgumentError: the file holds another exported program.
    """
    marks = {_MARK: ""}
    exported = torch.export.load(path, extra_files=marks)
    if not marks[_MARK]:
        raise ArgumentError("path", f"{os.fspath(path)!r}, another exported program", "what TrainingStep.save wrote")
    return TrainingStep(exported)


def any_video(layout: TileLayout) -> list[Any]:
    """The entry of ``dynamic_shapes`` for an argument like ``layout``: any video of two tiles or more, two of them kept
    if the example keeps two, with the same tile and prefix.

    For ``torch.export.export(strict=False)``; with ``strict=True`` torch fixes the numbers of a layout, which must then
    be made inside the model, from sizes of a tensor. The number of tokens is dynamic in q, k and v as well.
    """
    dynamic = Dim.DYNAMIC
    numbers = [(dynamic,) * 3, (None,) * 3, (None,) * len(layout.prefix)]
    return [{0: dynamic}, {0: dynamic}, {0: dynamic}, *numbers]


def package(
    program: ExportedProgram | TrainingStep,
    path: str | os.PathLike[str],
    *,
    options: Mapping[str, Any] | None = None,
) -> str:
    """Compiles a program with AOTInductor into one file.

    ``torch._inductor.aoti_load_package(path)`` runs it in any Python process that has imported ``vsa_inductor``: the
    operators that are not generated code are implemented in Python. Without the import, loading fails with "Could not
    find schema for import_vsa_inductor_first::...".

    Args:
        program: from ``torch.export.export``, best made under ``torch.no_grad()``, or a training step.
        path: where to write, ending in ``.pt2``.
        options: of Inductor, as for ``torch.compile``.

    Returns:
        ``path`` as a string.

    Raises:
        ArgumentError: ``program`` is something else, ``path`` ends otherwise, or the program is for CUDA and torch is
            2.11, where running the package crashes the process.
    """
    exported = program.exported if isinstance(program, TrainingStep) else program
    if not isinstance(exported, ExportedProgram):
        raise ArgumentError("program", type(program).__name__, "an ExportedProgram or a TrainingStep")
    _check_device(exported)
    path = os.fspath(path)
    if not path.endswith(".pt2") or not Path(path).parent.is_dir():
        raise ArgumentError("path", repr(path), "a name that ends in .pt2, in a folder that exists")
    with tempfile.TemporaryDirectory() as folder:
        compiled = str(Path(folder, Path(path).name))
        compat.compile_package(exported, compiled, dict(options or {}))
        with zipfile.ZipFile(compiled) as source, zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as target:
            for entry in source.infolist():
                content = source.read(entry)
                if entry.filename.endswith(".json"):
                    content = content.replace(b'"target": "vsa::', f'"target": "{_PACKAGED}::'.encode())
                target.writestr(entry, content)
    return path


def _check_device(exported: ExportedProgram) -> None:
    values = (node.meta.get("val") for node in exported.graph.nodes)
    if not any(isinstance(value, Tensor) and value.device.type == "cuda" for value in values):
        return
    version: Any = torch.torch_version.TorchVersion(torch.__version__)
    if version < (2, 12):
        # Seen on an H200 with torch 2.11; whether operators written in Python are the reason was not found out.
        given = f"a program for CUDA with torch {torch.__version__}"
        raise ArgumentError("program", given, "a program for the CPU, or a newer torch: running the package crashes")
    warnings.warn("vsa_inductor: packages for CUDA crashed on torch 2.11; nobody tried this torch", stacklevel=3)


_MODEL = "model."


class _Loss(nn.Module):
    """The forward half of a step. Names of what the model holds begin with `_MODEL`."""

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Tensor], num_inputs: int) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn
        self.num_inputs = num_inputs

    def forward(self, *arguments: Any) -> Tensor:
        return self.loss_fn(self.model(*arguments[: self.num_inputs]), *arguments[self.num_inputs :])


def _step_module(
    graph: nn.Module, tensors: Mapping[str, Tensor], persistent: Collection[str], trained: Sequence[str]
) -> nn.Module:
    """A whole step: ``graph`` of the tensors, which it holds, and of the leaves of its arguments."""
    names = [name.removeprefix(_MODEL) for name in tensors]
    trained = [name.removeprefix(_MODEL) for name in trained]
    if twice := sorted(name for name, count in Counter(names).items() if count > 1):
        raise ArgumentError("loss_fn", f"state under the model's own names, {twice}", "other names")

    # Without attributes of its own, which would be in the way of the model's names.
    class Step(nn.Module):
        def forward(self, *arguments: Any) -> tuple[Tensor, dict[str, Tensor | None]]:
            state = [operator.attrgetter(name)(self) for name in names]
            loss, gradients = graph(state, pytree.tree_leaves(arguments))
            return loss, dict(zip(trained, gradients, strict=True))

    step = Step()
    for name, key in zip(names, tensors, strict=True):
        _hold(step, name, tensors[key], key in persistent)
    return step


@contextlib.contextmanager
def _registered_gradients_only() -> Iterator[None]:
    """Refuses what changes gradients in a way that an exported graph does not hold, and that torch drops silently."""
    function, tensor = torch.autograd.Function, torch.Tensor
    apply, register_hook = function.__dict__["apply"], tensor.register_hook

    def refusing(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if cls.__module__ == "torch._library.autograd":  # what register_autograd makes, ours too
            return apply.__get__(None, cls)(*args, **kwargs)
        raise ArgumentError(
            "model", f"the autograd.Function {cls.__name__}", "operators with a registered gradient (register_autograd)"
        )

    def no_hook(*args: Any, **kwargs: Any) -> Any:
        raise ArgumentError("model", "a gradient hook (Tensor.register_hook)", "gradients that nothing changes")

    function.apply = classmethod(refusing)  # type: ignore[assignment,method-assign]
    tensor.register_hook = no_hook  # type: ignore[method-assign]
    try:
        yield
    finally:
        function.apply = apply  # type: ignore[method-assign]
        tensor.register_hook = register_hook  # type: ignore[method-assign]


def _hold(root: nn.Module, name: str, tensor: Tensor, persistent: bool) -> None:
    """Registers a tensor under a dotted name."""
    *folders, last = name.split(".")
    for folder in folders:
        if folder not in root._modules:
            root.add_module(folder, nn.Module())
        root = root.get_submodule(folder)
    if isinstance(tensor, nn.Parameter):
        root.register_parameter(last, tensor)
    else:
        root.register_buffer(last, tensor, persistent=persistent)


def _whole_step(forward: ExportedProgram, trained: Sequence[str]) -> nn.Module:
    """An exported loss and its gradients by the parameters named, as a graph without autograd.

    Traced with the fake tensors of the program, which know its dynamic sizes.
    """
    tensors: dict[str, Tensor] = {**forward.state_dict, **forward.constants}
    # A shared tensor has one name: the first.
    first: dict[int, str] = {}
    own_name = {name: first.setdefault(id(x), name) for name, x in tensors.items()}
    placeholders = [node.meta["val"] for node in forward.graph.nodes if node.op == "placeholder"]
    specs = forward.graph_signature.input_specs
    names = [None if spec.kind == InputKind.USER_INPUT else own_name[str(spec.target)] for spec in specs]
    fakes = {name: x for name, x in zip(names, placeholders, strict=True) if name is not None}
    leaves = [x for x, name in zip(placeholders, names, strict=True) if name is None]

    def step(state: list[Tensor], leaves: list[Any]) -> tuple[Tensor, list[Tensor | None]]:
        values = {name: x.detach() for name, x in zip(fakes, state, strict=True)}
        # A parameter that the graph does not know has no gradient.
        parameters = {name: values[name].requires_grad_() for name in map(own_name.get, trained) if name in values}
        rest = iter(leaves)
        loss = forward.graph_module(*(next(rest) if name is None else values[name] for name in names))[0]
        if not isinstance(loss, Tensor) or loss.dim() != 0:
            given = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ArgumentError("loss_fn", f"an output of {given}", "a tensor without dimensions")
        if not loss.requires_grad:
            raise ArgumentError("loss_fn", "an output without gradient", "one that depends on a trained parameter")
        gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        by_name = dict(zip(parameters, gradients, strict=True))
        return loss.detach(), [by_name.get(own_name[name]) for name in trained]

    with fakes[next(iter(fakes))].fake_mode, torch.enable_grad(), compat.symbolic_composites():
        graph = make_fx(step)(list(fakes.values()), leaves)
    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.detach.default):
        node.replace_all_uses_with(node.args[0])
        graph.graph.erase_node(node)
    graph.recompile()
    return _step_module(graph, {name: tensors[name] for name in fakes}, forward.state_dict, trained)
