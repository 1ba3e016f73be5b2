"""The plugin in runs of pytest of its own, on models that break, recompile or change on purpose."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
import torch
from conftest import PLUGIN

import vsa_inductor
from vsa_inductor import ArgumentError, explain
from vsa_inductor.testing import Expectation, RegionGuard, assert_recompiles

PACKAGE = Path(vsa_inductor.__file__).parent

# Products alone: what is compiled needs no C++ compiler, and runs of a test stay short.
BROKEN = """
    import torch


    def helper(x):
        print("here")
        return x @ x


    class Broken(torch.nn.Module):
        def forward(self, x):
            return helper(x @ x) @ x


    def whole(x):
        return x @ x


    X = torch.ones(4, 4)
"""


@pytest.fixture(scope="module", autouse=True)
def _everything_is_imported() -> None:
    """Modules that torch imports while it compiles would go with the run inside this one that imported them."""
    x = torch.ones(3, 3, requires_grad=True)
    explain(lambda x: _breaks(x @ x) @ x, x)
    assert_recompiles(lambda x, n: x @ x, [(x, 1), (torch.ones(4, 4), 2)], at_most=2)


@pytest.fixture
def run(pytester: pytest.Pytester) -> Callable[..., pytest.RunResult]:
    def in_process(test: str, *args: str) -> pytest.RunResult:
        pytester.makepyfile(test_model=BROKEN + test)
        options = ("-p", PLUGIN, "-p", "no:cacheprovider", "--strict-markers", "-q")
        return pytester.runpytest_inprocess(*options, *args)

    return in_process


def _breaks(x: torch.Tensor) -> torch.Tensor:
    torch._dynamo.graph_break()
    return x


def test_a_break_fails_with_file_line_and_reason(run) -> None:
    result = run(
        """
    def test_whole(vsa_region):
        assert vsa_region.check(whole, X).num_graphs == 1

    def test_broken(vsa_region):
        vsa_region.check(Broken(), X)
    """
    )
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        [
            "*AssertionError: the compiled region is not what was expected",
            "*  graphs: expected 1, got 3",
            "*  breaks: expected 0, got 1",
            "*broken at:",
            "*test_model.py:5",  # the print
            "*`print`*",
            "*Called by: forward (*test_model.py:11)",
            "*compiled:",
            "*  graph 2, inference",
        ]
    )
    # The place of the check, none of the plugin's own code, and no trace of the compiler.
    result.stdout.fnmatch_lines(["test_model.py:*: AssertionError"])
    result.stdout.no_fnmatch_line("*vsa_inductor/testing.py*")
    result.stdout.no_fnmatch_line("*torch.__trace*")


def test_the_marker_declares_and_a_call_overrides(run) -> None:
    result = run(
        """
    import pytest

    @pytest.mark.vsa_region(graphs=3, breaks=1)
    class TestBroken:
        def test_declared(self, vsa_region):
            vsa_region.check(Broken(), X)

        @pytest.mark.vsa_region(breaks=0)
        def test_closest_marker(self, vsa_region):
            vsa_region.check(Broken(), X)

        def test_call(self, vsa_region):
            vsa_region.check(whole, X, graphs=1, breaks=0)

        def test_unchecked(self, vsa_region):
            vsa_region.check(whole, X, graphs=None, breaks=None)
    """,
        "-rA",
    )
    result.assert_outcomes(passed=3, failed=1)
    result.stdout.fnmatch_lines(["*  breaks: expected 0, got 1", "FAILED *test_closest_marker*"])


@pytest.mark.parametrize(
    ("marker", "arguments", "sentence"),
    [
        (
            "graph=1",
            "vsa_region",
            "*test_it: marker vsa_region: graph: got 1; allowed: the keywords recompiles, graphs, *",
        ),
        ("breaks='no'", "vsa_region", "*breaks: got 'no'; allowed: an integer, 0 or more*"),
        ("recompiles=-1", "vsa_region", "*recompiles: got -1; allowed: an integer, 0 or more*"),
        ("detail='most'", "vsa_region", '*detail: got \'most\'; allowed: "ours" or "all"*'),
        ("3", "vsa_region", "*the marker vsa_region takes keywords only, got (3,)*"),
        ("graphs=1", "", "*the marker vsa_region needs the fixture of that name*"),
    ],
)
def test_a_marker_that_means_nothing_is_an_error(pytester, marker: str, arguments: str, sentence: str) -> None:
    pytester.makepyfile(
        f"""
    import pytest

    @pytest.mark.vsa_region({marker})
    def test_it({arguments}):
        pass
    """
    )
    result = pytester.runpytest_inprocess("-p", PLUGIN, "-p", "no:cacheprovider", "--strict-markers", "-q")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines([f"*UsageError: {sentence}"])


STORED = """
    import pytest

    @pytest.mark.parametrize("power", ["a/b"])
    @pytest.mark.vsa_region(stored=True, detail="all")
    def test_stored(vsa_region, power):
        vsa_region.check({fn}, X, graphs={graphs}, breaks=None)
"""


def test_a_stored_structure_is_missing_accepted_kept_wrong_and_accepted_again(run, pytester, monkeypatch) -> None:
    monkeypatch.delenv("EXPECTTEST_ACCEPT", raising=False)
    file = pytester.path / "expected" / "test_model.test_stored[a%2Fb].txt"
    whole = STORED.format(fn="whole", graphs=1)
    result = run(whole)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["*no structure is stored in expected/test_model.test_stored?a%2Fb?.txt; *--vsa-accept*"]
    )
    assert not file.exists()

    result = run(whole, "--vsa-accept")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*vsa_region: accepted what was compiled*", str(file)])
    kept = "graphs: 1\nbreaks: 0\ngraph 0, inference\n  extern  mm\n"
    assert file.read_text() == kept
    run(whole).assert_outcomes(passed=1)

    # What is declared is not for accepting.
    run(STORED.format(fn="Broken()", graphs=1), "--vsa-accept").assert_outcomes(failed=1)
    assert file.read_text() == kept

    broken = STORED.format(fn="Broken()", graphs="None")
    result = run(broken)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "*differs from expected/*",
            "*--- expected",
            "*+++ compiled",
            "*-graphs: 1",
            "*-breaks: 0",
            "*+graphs: 3",
            "*+breaks: 1",
            "*+  test_model.py: Failed to trace builtin operator",
            "*+graph 1, inference",
            "*+  extern  mm",
            "*broken at:",
            "*test_model.py:5",
            "*to accept what was compiled: pytest --vsa-accept",
        ]
    )
    monkeypatch.setenv("EXPECTTEST_ACCEPT", "1")
    run(broken).assert_outcomes(passed=1)
    monkeypatch.delenv("EXPECTTEST_ACCEPT")
    run(broken).assert_outcomes(passed=1)
    assert file.read_text() == (
        "graphs: 3\nbreaks: 1\n  test_model.py: Failed to trace builtin operator\n"
        "graph 0, inference\n  extern  mm\ngraph 1, inference\n  extern  mm\ngraph 2, inference\n  extern  mm\n"
    )


def test_two_stored_regions_of_one_test_need_two_names(tmp_path: Path) -> None:
    guard = RegionGuard(tmp_path / "expected" / "test_x.test_y.txt", accept=True)
    x = torch.ones(3, 3)
    for name in (True, "second"):
        guard.check(torch.mm, x, x, stored=name)
    assert [path.name for path in guard.accepted] == ["test_x.test_y.txt", "test_x.test_y.second.txt"]
    with pytest.raises(ArgumentError, match="a name of its own"):
        guard.check(torch.mm, x, x, stored=True)


def test_recompiles_name_the_call_and_the_guard(run) -> None:
    result = run(
        """
    import pytest

    def scaled(x, n):
        return x @ x if n > 2 else (x @ x) @ x

    CALLS = [(X, 1), (X, 1), (X, 3), (torch.ones(5, 5), 3)]

    def test_none_allowed(vsa_region):
        vsa_region.check_recompiles(scaled, CALLS)

    @pytest.mark.vsa_region(recompiles=2)
    def test_two_allowed(vsa_region):
        vsa_region.check_recompiles(scaled, CALLS)
    """
    )
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        [
            "*recompiles: expected none in 4 calls, got 2, as these guards failed:",
            "*  call 3: args?1? == 1",
            "*  call 4: *tensor 'args?0?' size mismatch at index 0. expected 4, actual 5*",
        ]
    )


def test_recompiles_leave_the_logs_alone_and_must_compile_something(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    logs = torch._logging._internal.log_state
    monkeypatch.setattr(logs, "artifact_names", {"graph_breaks"})
    calls = [(torch.ones(2, 2),), (torch.ones(3, 3),)]
    with pytest.raises(AssertionError, match="got 1"):
        assert_recompiles(lambda x: x @ x, calls)
    assert_recompiles(lambda x: x @ x, calls, at_most=1)
    assert logs.artifact_names == {"graph_breaks"}
    assert "Recompiling" not in capfd.readouterr().err
    with pytest.raises(AssertionError, match="nothing was compiled"):
        assert_recompiles(lambda x: 3, calls)
    for too_few in ([], calls[:1], [torch.ones(2), torch.ones(3)]):
        with pytest.raises(ArgumentError, match="calls: got"):
            assert_recompiles(torch.mm, too_few)


def test_opaque_calls_per_layer_and_fused_operators(tmp_path: Path) -> None:
    def layer(scores: torch.Tensor) -> torch.Tensor:
        kv_indices, _ = torch.ops.vsa.select_blocks(scores, 2)
        return (scores.sin() + 1) * kv_indices[..., :1]

    def model(scores: torch.Tensor) -> torch.Tensor:
        return layer(layer(scores))

    guard = RegionGuard(tmp_path / "test.txt", {"opaque_per_layer": {"vsa.select_blocks": 1}, "layers": 2})
    scores = torch.randn(1, 1, 4, 4)
    guard.check(
        model, scores, opaque_calls={"vsa.select_blocks": 2, "vsa.attention": 0}, fused=[("aten.sin", "aten.add")]
    )
    with pytest.raises(AssertionError) as failure:
        guard.check(
            model, scores, layers=3, opaque_calls={"vsa.attention": 1}, fused=[("aten.sin", "vsa.select_blocks")]
        )
    for sentence in (
        "opaque calls of vsa.select_blocks: expected 3 (1 in each of 3 layers), got 2",
        "opaque calls of vsa.attention: expected 1, got 0",
        "fused: expected aten.sin, vsa.select_blocks in one kernel; of 2 kernels, "
        "aten.sin in 2, vsa.select_blocks in 0",
        "  opaque  vsa.select_blocks",
    ):
        assert sentence in str(failure.value)
    assert "graphs:" not in str(failure.value).partition("compiled:")[0]


@pytest.mark.parametrize(
    ("values", "argument"),
    [
        ({"graphs": True}, "graphs"),
        ({"layers": -1}, "layers"),
        ({"opaque_calls": ["vsa.attention"]}, "opaque_calls"),
        ({"opaque_per_layer": {"vsa.attention": "1"}}, "opaque_per_layer['vsa.attention']"),
        ({"fused": ("vsa.tile", "aten.mul")}, "fused"),
    ],
)
def test_expectations_of_another_form_are_refused(values, argument: str) -> None:
    with pytest.raises(ArgumentError) as error:
        Expectation(**values)
    assert error.value.argument == argument


def test_a_session_that_does_not_use_it_imports_no_torch(tmp_path: Path) -> None:
    """pytest loads the plugin wherever the package is installed."""
    (tmp_path / "test_it.py").write_text("import sys\n\ndef test_it():\n    assert 'torch' not in sys.modules\n")
    # As the package of its own that an installation makes of the folder.
    run = f"import sys; sys.path.append({str(PACKAGE)!r}); import pytest; sys.exit(pytest.main())"
    command = [sys.executable, "-c", run, "-p", "pytest_plugin", "-p", "no:vsa_inductor_pytest", "-q"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_entry_point_is_named_as_the_module() -> None:
    """Else a session that also names the module would register it twice, which pytest refuses."""
    tomllib = pytest.importorskip("tomllib", reason="tomllib: Python >= 3.11")
    project = PACKAGE.parent / "pyproject.toml"
    if not project.exists():
        pytest.skip("pyproject.toml: not a checkout")
    table = tomllib.loads(project.read_text())
    (name,) = table["project"]["entry-points"]["pytest11"].values()
    assert table["project"]["entry-points"]["pytest11"] == {name: name}
    assert table["tool"]["setuptools"]["package-dir"][name] == "vsa_inductor/pytest_plugin"


def test_an_installation_has_the_entry_point() -> None:
    try:
        installed = metadata.distribution("vsa_inductor")
    except metadata.PackageNotFoundError:
        pytest.skip("vsa_inductor is on the path, not installed")
    found = [entry for entry in installed.entry_points if entry.group == "pytest11"]
    if not found:
        pytest.skip("the installation is older than the plugin")
    assert [entry.load() for entry in found] == [importlib.import_module(PLUGIN)]


def test_a_marker_that_nothing_checks_is_an_error(run) -> None:
    result = run("""
    import pytest


    @pytest.mark.vsa_region(graphs=7)
    def test_it(vsa_region):
        pass
    """)
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*the marker vsa_region declares what the test never checks*"])
