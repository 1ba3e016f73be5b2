"""pytest fixtures: the generated code of every builder, made once per architecture and session."""

from collections.abc import Iterator

import pytest

from .session import ARCHES, BUILDERS, Run, unavailable


@pytest.fixture(scope="session")
def fake_gpu_runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, Run]]:
    """The driver processes by architecture, started together: each keeps one core busy."""
    reason = unavailable()
    if reason:
        pytest.skip(reason)
    runs = {arch: Run(BUILDERS, arch, tmp_path_factory.mktemp(f"fake_gpu_sm{arch}")) for arch in ARCHES}
    yield runs
    for run in runs.values():
        run.stop()


@pytest.fixture(scope="session", params=ARCHES, ids=lambda arch: f"sm_{arch}")
def fake_gpu_run(request: pytest.FixtureRequest, fake_gpu_runs: dict[int, Run]) -> Run:
    """The finished run of one architecture."""
    run = fake_gpu_runs[request.param]
    run.wait()
    return run
