"""The pytest plugin: fixture and marker ``vsa_region``, option ``--vsa-accept``.

Installed as the package ``vsa_inductor_pytest``: pytest loads plugins in every session of an environment, and importing
any module of ``vsa_inductor`` imports torch. What the fixture gives is :class:`vsa_inductor.testing.RegionGuard`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pytest

if TYPE_CHECKING:
    from vsa_inductor.testing import RegionGuard

NAME = "vsa_region"
_PASSED = pytest.StashKey[bool]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("vsa_inductor").addoption(
        "--vsa-accept",
        action="store_true",
        help="store what was compiled as what is expected (also: EXPECTTEST_ACCEPT=1)",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        f"{NAME}(graphs=1, breaks=0, opaque_calls={{}}, opaque_per_layer={{}}, layers=1, fused=(), recompiles=0, "
        f"stored=False, detail='ours'): what the fixture {NAME} expects of the regions that a test compiles",
    )


def _declared(item: pytest.Item) -> dict[str, Any]:
    """The keywords of a test's markers, the closest one first."""
    declared: dict[str, Any] = {}
    for marker in item.iter_markers(NAME):
        if marker.args:
            raise pytest.UsageError(f"{item.nodeid}: the marker {NAME} takes keywords only, got {marker.args!r}")
        declared = {**marker.kwargs, **declared}
    return declared


def pytest_runtest_setup(item: pytest.Item) -> None:
    # Of a marker alone nothing would come.
    if item.get_closest_marker(NAME) and NAME not in getattr(item, "fixturenames", ()):
        raise pytest.UsageError(f"{item.nodeid}: the marker {NAME} needs the fixture of that name, which checks it")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "call":
        item.stash[_PASSED] = report.passed
    return report


@pytest.fixture
def vsa_region(request: pytest.FixtureRequest) -> Iterator[RegionGuard]:
    """Checks how a callable compiles: ``vsa_region.check(fn, *inputs)``, ``vsa_region.check_recompiles(fn, calls)``."""
    from vsa_inductor.errors import ArgumentError
    from vsa_inductor.testing import RegionGuard

    item = request.node
    # No two tests of a folder share a file, and every name is one that file systems take.
    test = ".".join(quote(part, safe="[]=,+") for part in item.nodeid.split("::")[1:])
    path = item.path.parent / "expected" / f"{item.path.stem}.{test}.txt"
    accept = item.config.getoption("--vsa-accept") or os.environ.get("EXPECTTEST_ACCEPT", "0") not in ("", "0")
    try:
        guard = RegionGuard(path, _declared(item), accept)
    except ArgumentError as error:
        raise pytest.UsageError(f"{item.nodeid}: marker {NAME}: {error}") from None
    # pytest 9 collects torch's structured trace: a hundred empty lines under every failure.
    trace = logging.getLogger("torch.__trace")
    disabled, trace.disabled = trace.disabled, trace.disabled or "TORCH_TRACE" not in os.environ
    yield guard
    trace.disabled = disabled
    if item.get_closest_marker(NAME) and not guard.used and item.stash.get(_PASSED, False):
        pytest.fail(f"the marker {NAME} declares what the test never checks: vsa_region.check(...) was not called")
    # Properties reach the summary from other processes too.
    item.user_properties.extend((f"{NAME} accepted", str(written)) for written in guard.accepted)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    written = {
        value
        for reports in terminalreporter.stats.values()
        for report in reports
        for name, value in getattr(report, "user_properties", ())
        if name == f"{NAME} accepted"
    }
    if written:
        terminalreporter.section(f"{NAME}: accepted what was compiled")
        for path in sorted(written):
            terminalreporter.line(path)
