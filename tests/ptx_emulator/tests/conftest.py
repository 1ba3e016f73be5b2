"""Tests of the emulator: those that compile CUDA are skipped, with the reason, where there is no nvcc."""

from __future__ import annotations

import pytest

from ..compile import nvcc


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if nvcc() is not None:
        return
    for item in items:
        if item.get_closest_marker("nvcc"):
            item.add_marker(
                pytest.mark.skip(reason="nvcc: not in $CUDA_HOME/bin nor on PATH; these kernels are compiled by it")
            )
