"""Checks for a user's own tests: a compiled region that falls apart fails the build, with the line that broke it.

In pytest the fixture ``vsa_region``, a :class:`RegionGuard`, and the marker of the same name bring them along.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, get_args
from urllib.parse import quote

from .compiling import entry, explain, one_at_a_time, restored, unwrap
from .errors import ArgumentError
from .expectations import Detail, Expectation, check_count, difference, places, structure
from .lowerings import _inductor_compat_capture as compat
from .reporting import RegionReport

__all__ = ["Expectation", "RegionGuard", "assert_one_region", "assert_recompiles", "assert_region", "structure"]


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
    __tracebackhide__ = True
    return assert_region(Expectation(), fn, *inputs, backward=backward, **kwargs)


def assert_region(
    expected: Expectation,
    fn: Callable[..., Any],
    *inputs: Any,
    backward: bool | Literal["auto"] = "auto",
    **kwargs: Any,
) -> RegionReport:
    """Asserts that ``fn`` compiles to the region that ``expected`` describes.

    Args:
        expected: graphs, breaks, opaque calls, fused operators.
        fn, inputs, backward, kwargs: as for :func:`vsa_inductor.explain`.

    Returns:
        The :class:`RegionReport`, for further assertions.

    Raises:
        AssertionError: names what differs, every break with file, line and reason, and what was compiled.
    """
    __tracebackhide__ = True
    report = explain(fn, *inputs, backward=backward, **kwargs)
    differences = expected.differences(report)
    if differences:
        broken = f"\nbroken at:\n{places(report.breaks)}" if report.breaks else ""
        lines = "\n".join(f"  {line}" for line in differences)
        raise AssertionError(
            f"the compiled region is not what was expected\n{lines}{broken}\ncompiled:\n{_indented(structure(report))}"
        )
    return report


def assert_recompiles(fn: Callable[..., Any], calls: Sequence[Sequence[Any]], at_most: int = 0, **kwargs: Any) -> None:
    """Asserts that a sequence of calls compiles ``fn`` once, and ``at_most`` times more.

    ``fn`` is compiled afresh, as :func:`vsa_inductor.explain` does, with the options it was compiled with. A size that
    changes costs one recompilation, after which it is dynamic. Only the forward is run.

    Args:
        fn: a function, a module, or what ``torch.compile`` or :func:`vsa_inductor.compile` made of one.
        calls: the inputs of every call, in order: at least two.
        at_most: how many recompilations are allowed.
        kwargs: keyword arguments of ``fn``, the same in every call.

    Raises:
        AssertionError: names, for every recompilation, the call and the guards that failed; or nothing was compiled.
        ArgumentError: fewer than two calls, or one that is no tuple or list.
    """
    __tracebackhide__ = True
    check_count("at_most", at_most)
    compat.check_names("assert_recompiles")
    calls = list(calls)
    if len(calls) < 2 or not all(isinstance(inputs, (tuple, list)) for inputs in calls):
        raise ArgumentError("calls", f"{len(calls)} calls", "two or more, each a tuple or list of inputs")
    original, options, dynamic = unwrap(fn)
    backend = compat.CaptureBackend(options or {})
    recompiled: list[tuple[int, tuple[str, ...]]] = []
    with one_at_a_time, compat.fresh_compiles(), compat.recompiles() as found:
        compiled = compat.isolated_compile(entry(original), backend, dynamic)
        for number, inputs in enumerate(calls, 1):
            with restored(original, tuple(inputs), kwargs):
                compiled(*inputs, **kwargs)
            recompiled.extend((number, reasons) for reasons in found[len(recompiled) :])
    if not backend.num_graphs:
        raise AssertionError("recompiles: nothing was compiled, so that nothing could be compiled again")
    if len(recompiled) > at_most:
        lines = "\n".join(f"  call {number}: {'; '.join(reasons)}" for number, reasons in recompiled)
        raise AssertionError(
            f"recompiles: expected {f'at most {at_most}' if at_most else 'none'} in {len(calls)} calls, "
            f"got {len(recompiled)}, as these guards failed:\n{lines}"
        )


class RegionGuard:
    """The checks of one test, with the expectations that its marker declares. What the fixture ``vsa_region`` gives.

    Args:
        path: where the test's stored structure is: ``<folder of the test>/expected/<test file>.<test>.txt``.
        declared: keyword arguments of the marker: those of :meth:`check` and ``recompiles``.
        accept: write what was compiled instead of comparing with what is stored.

    Attributes:
        accepted: the files that were written.
        used: whether anything was checked.

    Raises:
        ArgumentError: a keyword that is not known.
    """

    def __init__(self, path: Path, declared: Mapping[str, Any] | None = None, accept: bool = False) -> None:
        self._path = path
        self._accept = accept
        self._stored: set[Path] = set()
        self.accepted: list[Path] = []
        self.used = False
        self._declared = _known(declared or {}, ("recompiles", *_CHECKED))
        self._recompiles = self._declared.pop("recompiles", 0)
        check_count("recompiles", self._recompiles)
        _expectation(self._declared)

    def check(
        self,
        fn: Callable[..., Any],
        *inputs: Any,
        backward: bool | Literal["auto"] = "auto",
        kwargs: Mapping[str, Any] | None = None,
        **expected: Any,
    ) -> RegionReport:
        """Asserts that ``fn`` compiles to the expected region: one graph, no break, unless declared otherwise.

        Args:
            fn, inputs, backward: as for :func:`vsa_inductor.explain`.
            kwargs: keyword arguments of ``fn``.
            expected: the attributes of :class:`Expectation`, over those of the marker; ``stored=True`` compares also
                with the structure in the test's file, ``stored="name"`` with a second one; ``detail`` is that of
                :func:`structure`. What is declared is checked first: accepting never stores a region that violates it.

        Returns:
            The :class:`RegionReport`.

        Raises:
            AssertionError: names what differs: sentences for what is declared, a unified diff for what is stored.
            ArgumentError: a keyword or value that is not known.
        """
        __tracebackhide__ = True
        self.used = True
        expectation, stored, detail = _expectation({**self._declared, **_known(expected, _CHECKED)})
        report = assert_region(expectation, fn, *inputs, backward=backward, **(kwargs or {}))
        if stored:
            self._compare(structure(report, detail), stored if isinstance(stored, str) else "", report)
        return report

    def check_recompiles(
        self, fn: Callable[..., Any], calls: Sequence[Sequence[Any]], at_most: int | None = None, **kwargs: Any
    ) -> None:
        """:func:`assert_recompiles`; ``at_most`` is the marker's ``recompiles``, or 0, unless given."""
        __tracebackhide__ = True
        self.used = True
        assert_recompiles(fn, calls, self._recompiles if at_most is None else at_most, **kwargs)

    def _compare(self, compiled: str, name: str, report: RegionReport) -> None:
        __tracebackhide__ = True
        path = self._path.with_name(f"{self._path.stem}.{quote(name, safe='')}.txt") if name else self._path
        if path in self._stored:
            raise ArgumentError("stored", repr(name or True), "a name of its own for every region of a test")
        self._stored.add(path)
        expected = path.read_text(encoding="utf-8") if path.exists() else None
        if expected == compiled:
            return
        if self._accept:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(compiled, encoding="utf-8")
            self.accepted.append(path)
            return
        where = f"{path.parent.name}/{path.name}"
        how = "to accept what was compiled: pytest --vsa-accept"
        if expected is None:
            raise AssertionError(f"no structure is stored in {where}; {how}\ncompiled:\n{_indented(compiled)}")
        broken = f"\nbroken at:\n{places(report.breaks)}" if report.breaks else ""
        raise AssertionError(
            f"the compiled region differs from {where}\n{difference(expected, compiled)}{broken}\n{how}"
        )


_CHECKED = (*(attribute.name for attribute in fields(Expectation)), "stored", "detail")


def _known(given: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    for name in given:
        if name not in names:
            raise ArgumentError(name, repr(given[name]), f"the keywords {', '.join(names)}")
    return dict(given)


def _expectation(values: Mapping[str, Any]) -> tuple[Expectation, bool | str, Any]:
    """What is declared, whether or under which name a structure is stored, and its detail."""
    rest = dict(values)
    stored, detail = rest.pop("stored", False), rest.pop("detail", "ours")
    if not isinstance(stored, (bool, str)):
        raise ArgumentError("stored", repr(stored), "True, False or a name")
    if detail not in get_args(Detail):
        raise ArgumentError("detail", repr(detail), '"ours" or "all"')
    return Expectation(**rest), stored, detail


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())
