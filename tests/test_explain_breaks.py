"""`explain` on functions that break: file, line and reason of every break, wherever it stands, and who called it."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vsa_inductor import explain
from vsa_inductor.reporting import RegionReport

# Products alone compile without a C++ compiler.


def prints(x: Tensor) -> Tensor:
    print(end="")
    return x @ x


def calls_what_prints(x: Tensor) -> Tensor:
    return prints(x @ x) @ x


def calls_a_library(x: Tensor) -> Tensor:
    x = x @ x
    json.dumps({"a": 1}, indent=1)
    return x @ x


def loops(x: Tensor) -> Tensor:
    for _ in range(2):
        x = x @ x
        torch._dynamo.graph_break()
    return x


class Layer(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x @ x
        return y @ x if y[0, 0].item() else y


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def breaks_thrice(x: Tensor) -> Tensor:
    x = prints(x)
    torch._dynamo.graph_break()
    x = x @ x
    if x[0, 0]:
        x = x @ x
    return x


def skipped_whole(x: Tensor) -> Tensor:
    x = x @ x
    try:
        torch._dynamo.graph_break()
    finally:
        x = x @ x
    return x


@torch.compiler.disable
def disabled(x: Tensor) -> Tensor:
    return x @ x


def calls_what_is_disabled(x: Tensor) -> Tensor:
    return disabled(x @ x) @ x


def place(code: Any, text: str) -> tuple[str, int]:
    """Where ``text`` stands in the source of a function or class."""
    lines, first = inspect.getsourcelines(code)
    (number,) = (number for number, line in enumerate(lines, first) if text in line)
    return __file__, number


def broken(fn: Callable[..., Any]) -> RegionReport:
    report = explain(fn, torch.ones(3, 3))
    assert all(found.reason for found in report.breaks)
    return report


@pytest.mark.parametrize(
    ("fn", "places", "words", "num_graphs"),
    [
        # What is before the print, what follows it in its function, and the rest of the caller.
        (calls_what_prints, [place(prints, "print(")], ["print"], 3),
        # Nothing resumes inside a loop or a try block: Dynamo leaves the whole function to eager.
        (loops, [place(loops, "graph_break")], ["graph break in loop"], 0),
        (skipped_whole, [place(skipped_whole, "graph_break")], ["graph_break()"], None),
        # Two layers of one class break at one place, and share their code.
        (Model(), [place(Layer, "item()")], ["Tensor.item()"], None),
        (
            breaks_thrice,
            [place(prints, "print("), place(breaks_thrice, "graph_break"), place(breaks_thrice, "if x[0, 0]")],
            ["print", "graph_break()", "Data-dependent branching"],
            3,
        ),
        (calls_what_is_disabled, [place(calls_what_is_disabled, "disabled(x @ x)")], ["torch.compiler.disable"], 2),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__) if callable(value) else "",
)
def test_every_break_has_file_line_and_reason(
    fn: Callable[..., Any], places: list[tuple[str, int]], words: list[str], num_graphs: int | None
) -> None:
    report = broken(fn)
    assert [(found.file, found.line) for found in report.breaks] == places
    assert all(word in found.reason for word, found in zip(words, report.breaks, strict=True))
    assert num_graphs is None or report.num_graphs == num_graphs
    page = str(report).replace("\n", "").replace(" ", "")
    assert all(f"{file}:{line}" in page for file, line in places)


def test_a_break_in_a_called_function_names_the_callers() -> None:
    file, line = place(calls_what_prints, "prints(x @ x)")
    for _ in range(2):  # Dynamo leaves a stack out where it has reported it before
        (found,) = broken(calls_what_prints).breaks
        assert found.reason.splitlines()[-1] == f"Called by: calls_what_prints ({file}:{line})"
    (found,) = broken(loops).breaks
    assert "Called by" not in found.reason


def test_a_break_in_a_library_names_the_line_of_the_user() -> None:
    file, line = place(calls_a_library, "json.dumps")
    found = broken(calls_a_library).breaks[0]
    assert found.file != __file__
    assert f"Called by: calls_a_library ({file}:{line}), dumps ({json.__file__}:" in found.reason
