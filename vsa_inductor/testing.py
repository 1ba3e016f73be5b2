"""Checks for a user's own tests: a compiled region that falls apart fails the build, with the line that broke it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from .compiling import explain
from .reporting import RegionReport


def assert_one_region(
    fn: Callable[..., Any], *inputs: Any, backward: bool | Literal["auto"] = "auto", **kwargs: Any
) -> RegionReport:
    """Asserts that ``fn`` compiles to one graph without a break.

    Args:
        fn, inputs, backward, kwargs: as for :func:`vsa_inductor.explain`.

    Returns:
        The :class:`RegionReport`, for further assertions.

    Raises:
        AssertionError: names every break with file, line and reason, or tells how many graphs there were.
    """
    report = explain(fn, *inputs, backward=backward, **kwargs)
    if report.breaks:
        lines = "\n".join(
            f"  {graph_break.file}:{graph_break.line}\n    {graph_break.reason}" for graph_break in report.breaks
        )
        raise AssertionError(f"expected one graph and no break, got {report.num_graphs} graphs, broken at:\n{lines}")
    if report.num_graphs != 1:
        raise AssertionError(f"expected one graph, got {report.num_graphs}:\n{report}")
    return report
