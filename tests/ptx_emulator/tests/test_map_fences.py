"""A tensor map that the kernel wrote is read after fence.proxy.tensormap::generic.acquire only."""

from __future__ import annotations

import numpy as np
import pytest

from .. import Device, load
from ..errors import ProxyError
from .test_tma import replace_kernel

ACQUIRE = "fence.proxy.tensormap::generic.acquire.gpu [%map], 128;"


def run(fence: str) -> None:
    device = Device(1 << 20)
    a = device.upload(np.arange(128, dtype=np.uint32).reshape(8, 16))
    device.launch(load(replace_kernel(fence)), args=[a, device.empty(256, np.uint8), device.empty(32, np.uint32)])


@pytest.mark.parametrize(
    "fence",
    [
        "",
        "fence.proxy.async.shared::cta;",
        "fence.acq_rel.gpu;",
        ACQUIRE.replace("%map", "%map+128"),
        f"@%p7 {ACQUIRE}",
    ],
    ids=["no fence", "another proxy", "no proxy", "another map", "by other threads"],
)
def test_no_fence_that_counts(fence: str) -> None:
    with pytest.raises(ProxyError, match=r"tensor map(.|\n)*before: a write(.|\n)*fence\.proxy\.tensormap"):
        run(fence)


@pytest.mark.parametrize("fence", [ACQUIRE, f"@%p7 {ACQUIRE} bar.warp.sync 0xffffffff;"], ids=["own", "handed over"])
def test_a_fence_counts_for_its_thread_and_those_it_meets(fence: str) -> None:
    run(fence)
