"""Reads a generated wrapper module: which step reads and writes which buffer, in the order they run.

A small parser of the few statement forms that Inductor's Python wrapper (torch 2.13) has inside `call`. Imports neither
torch nor Triton.
"""

import ast
import dataclasses
import math
import re
from collections.abc import Iterator

from .generated_code import Kernel, kernels_of

_POINTER = r"(\w*_ptr\d*)\b"
_STORE = re.compile(r"tl\.(?:store|atomic_\w+)\(\s*" + _POINTER)
_LOAD = re.compile(r"tl\.load\(\s*" + _POINTER)
_NO_WORK = {"assert_alignment", "copy_if_misaligned", "get_raw_stream"}


@dataclasses.dataclass
class Buffer:
    """A name of the wrapper. Memory that is used again under another name is another buffer."""

    name: str
    shape: tuple[int, ...] = ()
    dtype: str = ""
    reuses: "Buffer | None" = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclasses.dataclass
class Step:
    """One launch or library call.

    arguments: the positional ones, None where the argument is no buffer.
    lists: the buffers in those of the arguments that are lists, by position.
    outputs: of a call that returns several, those that are used, by position; in a list among them, by both positions.
        They are among `writes` too.
    kernel: the generated kernel; None for a call of a library or an operator.
    """

    operation: str
    arguments: tuple[str | None, ...]
    reads: list[str]
    writes: list[str]
    kernel: Kernel | None = None
    lists: dict[int, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    outputs: dict[int | tuple[int, ...], str] = dataclasses.field(default_factory=dict)


class Wrapper:
    """The `call` of one generated module, whose text is `body`: `steps` in order, `buffers` by name, `inputs` and
    `outputs` in graph order.

    Shapes and dtypes of all inputs are known where the module has Inductor's `get_args`, which makes examples of them;
    else shapes, as far as the code asserts them.
    """

    def __init__(self, source: str) -> None:
        self.steps: list[Step] = []
        self.buffers: dict[str, Buffer] = {}
        self.inputs: tuple[str, ...] = ()
        self.outputs: tuple[str | None, ...] = ()
        self._lines = source.splitlines()
        self._same: dict[str, str] = {}
        self._kernels = {kernel.name: kernel for kernel in kernels_of(source, "")}
        functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
        calls = [node for node in functions if node.name == "call"]
        if len(calls) != 1:
            raise ValueError(f"{len(calls)} functions named call; this parser knows wrappers with one")
        self.body = "\n".join(map(ast.unparse, calls[0].body))
        for statement in calls[0].body:
            self._statement(statement)
        for statement in (inner for node in functions if node.name == "get_args" for inner in node.body):
            self._example(statement)

    def writers(self, buffer: str) -> list[Step]:
        """The steps that write the buffer, in order; none for a graph input."""
        return [step for step in self.steps if buffer in step.writes]

    def readers(self, buffer: str) -> list[Step]:
        """The steps that read the buffer, in order."""
        return [step for step in self.steps if buffer in step.reads]

    def upstream(self, buffer: str) -> list[Step]:
        """The generated kernels behind a buffer, back to the nearest library calls and graph inputs."""
        found: list[Step] = []
        pending = [buffer]
        while pending:
            for step in self.writers(pending.pop()):
                if step.kernel is not None and step not in found:
                    found.append(step)
                    pending.extend(step.reads)
        return found

    def launched(self) -> list[Step]:
        """The steps that are generated kernels."""
        return [step for step in self.steps if step.kernel is not None]

    def called(self, operation: str) -> list[Step]:
        """Library calls and launches whose name contains `operation`."""
        return [step for step in self.steps if operation in step.operation]

    def _statement(self, node: ast.stmt) -> None:
        if isinstance(node, ast.With):
            for inner in node.body:
                self._statement(inner)
        elif isinstance(node, ast.Assign):
            self._assign(node)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            self._call(node.value, None)
        elif isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple):
            self.outputs = tuple(self._buffer_of(element) for element in node.value.elts)

    def _assign(self, node: ast.Assign) -> None:
        target = node.targets[0]
        if isinstance(target, ast.Tuple):
            self.inputs = tuple(ast.unparse(element) for element in target.elts)
            for name in self.inputs:
                self._new(name)
            return
        name, value = ast.unparse(target), node.value
        if ast.unparse(value) == "args":
            return
        if isinstance(value, ast.Call):
            function = ast.unparse(value.func)
            if function.startswith("empty_strided"):
                self.buffers[name] = Buffer(name, ast.literal_eval(value.args[0]), ast.unparse(value.args[2]))
                return
            if function in _NO_WORK:
                return
            if function != "reinterpret_tensor":
                self._call(value, name)
                return
        source = self._buffer_of(value)
        if source is None:
            return
        if isinstance(value, ast.Subscript):
            self._new(name)
            for step in self.writers(source):
                step.writes.append(name)
                step.outputs[_position(value)] = name
        elif self._lines[node.lineno - 1].rstrip().endswith("# reuse"):
            shape = self._shape_of(value) or self.buffers[source].shape
            self.buffers[name] = Buffer(name, shape, self.buffers[source].dtype, reuses=self.buffers[source])
        else:
            self._same[name] = source

    def _call(self, node: ast.Call, result: str | None) -> None:
        function = ast.unparse(node.func)
        arguments = [self._buffer_of(argument) for argument in node.args]
        if function == "assert_size_stride":
            if arguments[0] is not None and not self.buffers[arguments[0]].shape:
                self.buffers[arguments[0]].shape = ast.literal_eval(node.args[1])
            return
        if function in _NO_WORK:
            return
        kernel = self._kernels.get(function.removesuffix(".run"))
        if kernel is not None:
            self._launch(kernel, arguments)
            return
        named = {keyword.arg: self._buffer_of(keyword.value) for keyword in node.keywords}
        # An out variant names what it writes, and nothing else, by keyword; extern_kernels writes `out`.
        outputs = list(named) if function.endswith(".out") else ["out"]
        written = [named.pop(keyword) for keyword in outputs if keyword in named]
        if isinstance(node.func, ast.Attribute):
            # workspace_0[...].view(...).sum(dim=0): a reduction of partial sums, written as methods of a buffer.
            named["self"] = self._buffer_of(node.func.value)
        lists = {at: tuple(self._inside(value)) for at, value in enumerate(node.args) if isinstance(value, ast.List)}
        nested = [name for names in lists.values() for name in names]
        reads = [name for name in (*arguments, *named.values(), *nested) if name is not None]
        writes = [name for name in written if name is not None]
        if result is not None:
            self._new(result)
            writes.append(result)
        if reads or writes:
            self.steps.append(Step(function, tuple(arguments), reads, writes, lists=lists))

    def _launch(self, kernel: Kernel, arguments: list[str | None]) -> None:
        stored, loaded = set(_STORE.findall(kernel.source)), set(_LOAD.findall(kernel.source))
        reads, writes = [], []
        for parameter, name in zip(kernel.parameters, arguments, strict=False):
            if name is None:
                continue
            if parameter in loaded:
                reads.append(self._content(name))
            if parameter in stored:
                writes.append(name)
        self.steps.append(Step(kernel.name, tuple(arguments), reads, writes, kernel))

    def _content(self, name: str) -> str:
        """The buffer whose values a name has: in place over memory that had other names until now, the old one."""
        buffer = self.buffers[name]
        while buffer.reuses is not None and not self.writers(buffer.name):
            buffer = buffer.reuses
        return buffer.name

    def _example(self, node: ast.stmt) -> None:
        """``name = rand_strided(shape, stride, device=..., dtype=...)``: what an input looks like."""
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call):
            return
        name, call = ast.unparse(node.targets[0]), node.value
        dtypes = [ast.unparse(keyword.value) for keyword in call.keywords if keyword.arg == "dtype"]
        if ast.unparse(call.func) == "rand_strided" and name in self.inputs and dtypes:
            self.buffers[name].shape, self.buffers[name].dtype = ast.literal_eval(call.args[0]), dtypes[0]

    def _new(self, name: str) -> None:
        self.buffers[name] = Buffer(name)

    def _buffer_of(self, node: ast.expr) -> str | None:
        """The buffer behind a name, a view or an output of several."""
        while isinstance(node, ast.Call | ast.Subscript):
            if isinstance(node, ast.Subscript):
                node = node.value
            elif isinstance(node.func, ast.Attribute) and not ast.unparse(node.func).startswith("torch."):
                node = node.func.value
            elif ast.unparse(node.func) in ("reinterpret_tensor", "copy_if_misaligned"):
                node = node.args[0]
            else:
                return None
        if not isinstance(node, ast.Name):
            return None
        name = self._same.get(node.id, node.id)
        return name if name in self.buffers else None

    def _inside(self, node: ast.List) -> Iterator[str]:
        for element in node.elts:
            name = self._buffer_of(element)
            if name is not None:
                yield name

    @staticmethod
    def _shape_of(node: ast.expr) -> tuple[int, ...] | None:
        if isinstance(node, ast.Call):
            return ast.literal_eval(node.args[1])
        return None


def _position(node: ast.Subscript) -> int | tuple[int, ...]:
    """Where a subscript reads: the index, or all of them where a list among the outputs is subscripted too."""
    index, inner = ast.literal_eval(node.slice), node.value
    indices = [index]
    while isinstance(inner, ast.Subscript):
        indices.insert(0, ast.literal_eval(inner.slice))
        inner = inner.value
    return index if len(indices) == 1 else tuple(indices)
