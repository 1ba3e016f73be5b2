"""What `generate` returns and how it is kept on disk; imports neither torch nor Triton."""

import ast
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class GraphCall:
    """One operator in the graph Inductor lowered, after every graph pass."""

    name: str
    target: str
    arguments: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One generated Triton kernel: a Python module's text that defines `name`."""

    name: str
    source: str
    direction: str

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the kernel's parameters; `out_ptr*` and `in_out_ptr*` are written, `in_ptr*` only read."""
        for node in ast.walk(ast.parse(self.source)):
            if isinstance(node, ast.FunctionDef) and node.name == self.name:
                return tuple(argument.arg for argument in node.args.args)
        raise AssertionError(f"{self.name} is not defined in its own source")


def kernels_of(source: str, direction: str) -> Iterator[Kernel]:
    """The Triton kernels that a wrapper module defines, in order."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "async_compile.triton" and len(node.args) >= 2:
            name, text = (ast.literal_eval(argument) for argument in node.args[:2])
            yield Kernel(name, text, direction)


@dataclasses.dataclass(frozen=True)
class GeneratedCode:
    """The two wrapper modules Inductor wrote for one function, with the graphs they came from."""

    arch: int
    forward: str
    backward: str
    forward_calls: tuple[GraphCall, ...]
    backward_calls: tuple[GraphCall, ...]

    @property
    def kernels(self) -> list[Kernel]:
        """Every generated Triton kernel, forward first, in order of definition."""
        return [*kernels_of(self.forward, "forward"), *kernels_of(self.backward, "backward")]

    def save(self, directory: Path) -> None:
        """Writes forward.py, backward.py (for reading: they need a GPU to run) and graphs.json."""
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "forward.py").write_text(self.forward)
        (directory / "backward.py").write_text(self.backward)
        graphs = {
            "arch": self.arch,
            "forward": [dataclasses.asdict(call) for call in self.forward_calls],
            "backward": [dataclasses.asdict(call) for call in self.backward_calls],
        }
        (directory / "graphs.json").write_text(json.dumps(graphs, indent=1))

    @classmethod
    def read(cls, directory: Path) -> "GeneratedCode":
        """The code that `save` wrote."""
        graphs = json.loads((directory / "graphs.json").read_text())
        calls = {
            direction: tuple(
                GraphCall(call["name"], call["target"], tuple(call["arguments"])) for call in graphs[direction]
            )
            for direction in ("forward", "backward")
        }
        return cls(
            arch=graphs["arch"],
            forward=(directory / "forward.py").read_text(),
            backward=(directory / "backward.py").read_text(),
            forward_calls=calls["forward"],
            backward_calls=calls["backward"],
        )
