"""What every test starts from: a fixed seed, one thread, fresh options, and gpu tests skipped where there is no GPU."""

from __future__ import annotations

import importlib.util

import pytest
import torch

# Under its own name only where the package is installed; by either name it is registered once.
PLUGIN = "vsa_inductor_pytest" if importlib.util.find_spec("vsa_inductor_pytest") else "vsa_inductor.pytest_plugin"
pytest_plugins = ["pytester", PLUGIN]

LEAST_CAPABILITY = (8, 0)


def _why_no_gpu() -> str | None:
    if not torch.cuda.is_available():
        return "gpu: no CUDA device of compute capability >= 8.0 here (torch sees no CUDA device)"
    capability = torch.cuda.get_device_capability()
    if capability < LEAST_CAPABILITY:
        return f"gpu: no CUDA device of compute capability >= 8.0 here (found {capability[0]}.{capability[1]})"
    return None


def pytest_configure(config: pytest.Config) -> None:
    # The shapes are small: more threads only wait for each other.
    torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)  # before xdist reads the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.pluginmanager.hasplugin("xdist"):
        # What these share takes a minute to make: one process does it.
        for item in items:
            if "fake_gpu_runs" in getattr(item, "fixturenames", ()):
                item.add_marker(pytest.mark.xdist_group("fake_gpu"))
    marked = [item for item in items if item.get_closest_marker("gpu")]
    reason = _why_no_gpu() if marked else None
    if reason:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)
