"""Asynchronous writes over what the generic proxy wrote or read: a note, in strict runs a failure."""

from __future__ import annotations

import numpy as np
import pytest

from .. import Device, Options, Report, load
from ..errors import ProxyReuseError
from .ptx_text import init, kernel, load_bulk, wait

FENCE = "fence.proxy.async.shared::cta;\n"
WRITE = "st.shared.u32 [smem+64], %r60;\n"
READ = "ld.shared.u32 %r1, [smem+64];\n"


def run(*parts: str, strict: bool = False) -> Report:
    """A copy into the first 64 bytes of `smem` and into the second; `parts` stand between the two."""
    body = init("smem+256") + load_bulk("smem", "%a", 128, "smem+256") + wait("smem+256", 0) + "".join(parts)
    body += load_bulk("smem", "%a", 128, "smem+256") + wait("smem+256", 1)
    device = Device(1 << 20)
    a = device.upload(np.arange(32, dtype=np.uint32))
    return device.launch(load(kernel("a:u64", body, 512)), block=(1,), args=[a], options=Options(strict=strict))


@pytest.mark.parametrize("access", [WRITE, READ], ids=["write", "read"])
def test_reuse_needs_a_proxy_fence(access: str) -> None:
    assert run(access, FENCE, strict=True).lints == []
    report = run(access)
    assert [lint.kind for lint in report.lints] == ["proxy-reuse"]
    with pytest.raises(ProxyReuseError, match=r"shared memory.*bytes 0x4[0-3]\.\.(.|\n)*missing: fence\.proxy\.async"):
        run(access, strict=True)


def test_a_fence_before_the_access_does_not_count() -> None:
    with pytest.raises(ProxyReuseError):
        run(FENCE, WRITE, strict=True)


def test_copies_over_copies_need_none() -> None:
    assert run(strict=True).lints == []
