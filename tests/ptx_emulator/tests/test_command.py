"""The commands, as a user types them: a kernel run by hand, its page of figures, findings and refusals."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from .. import Device, Options, load
from ..__main__ import main
from ..compile import compile_cuda
from ..errors import LaunchError
from ..profile import by_class, class_of

pytestmark = pytest.mark.nvcc
ROOT = Path(__file__).resolve().parents[3]

SOURCE = r"""
extern "C" __global__ void scale(const float* x, float* y, int n, float by) {
  __shared__ float s[128];
  int i = blockIdx.x * 128 + threadIdx.x;
  s[threadIdx.x] = i < n ? x[i] * by : 0.f;
  __syncthreads();
  if (i < n) y[i] = s[127 - threadIdx.x];
}
extern "C" __global__ void broken(float* y) {
  __shared__ float s[64];
  s[threadIdx.x] = threadIdx.x;
  y[threadIdx.x] = s[63 - threadIdx.x];
}
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ptx") / "scale.ptx"
    path.write_text(compile_cuda(SOURCE))
    return path


def test_a_kernel_run_by_hand(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x = np.arange(256, dtype=np.float32)
    np.save(tmp_path / "x.npy", x)
    arrays = ["--array", f"x={tmp_path}/x.npy", "--array", f"y=empty:float32:256:{tmp_path}/y.npy"]
    shape = ["--kernel", "scale", "--grid", "2", "--block", "128"]
    assert main(["run", str(file), *shape, *arrays, "--args", "x", "y", "256", "3.0"]) == 0
    assert (np.load(tmp_path / "y.npy") == 3 * x.reshape(2, 128)[:, ::-1].reshape(-1)).all()
    page = capsys.readouterr().out
    for part in (
        "scale: 2 blocks",
        "instructions by class",
        "load and store",
        "barrier",
        "load global",
        "store shared",
    ):
        assert part in page
    assert "512 bytes a block" in page


def test_findings_end_with_a_status_of_their_own(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["--kernel", "broken", "--block", "64", "--array", "y=empty:float32:64", "--args", "y"]
    assert main(["run", str(file), *shape]) == 1
    assert "uninitialised" in capsys.readouterr().err
    assert main(["run", str(file), *shape, "--collect", "--severity", "uninitialised=ignore"]) == 1
    assert "race" in capsys.readouterr().out
    assert main(["run", str(file), *shape, "--no-race"]) == 0


def test_the_module_is_a_command() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "tests.ptx_emulator", "opcodes"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0
    for name in ("tcgen05.mma", "wgmma.mma_async", "mma", "cp.async.bulk.tensor", "mbarrier.try_wait", "setmaxnreg"):
        assert name in ran.stdout.split()


def test_opcodes_of_a_file_that_are_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.ptx"
    path.write_text(".version 9.0\n.target sm_90a\n.address_size 64\n.entry k()\n{\nfoo.b32 1;\nret;\n}\n")
    assert main(["opcodes", str(path)]) == 1
    assert "foo.b32" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("tcgen05.mma.cta_group::1.kind::f16", "tensor core"),
        ("tcgen05.ld.sync.aligned.32x32b.x32.b32", "tensor memory"),
        ("mbarrier.try_wait.parity.shared::cta.b64", "barrier"),
        ("fma.rn.f32", "float arithmetic"),
        ("add.s32", "integer arithmetic"),
        ("barrier.cluster.wait", "barrier"),
        ("cp.async.bulk.tensor.2d", "asynchronous copy"),
    ],
)
def test_classes(name: str, title: str) -> None:
    assert class_of(name) == title


def test_figures_add_up(file: Path) -> None:
    device = Device()
    x, y = device.upload(np.ones(256, np.float32)), device.empty(256, np.float32)
    args = [x, y, 256, 1.0]
    report = device.launch(load(file.read_text()), kernel="scale", grid=(2,), block=(128,), args=args)
    assert report.instructions == sum(report.counts.values()) == sum(by_class(report).values())
    assert report.counts["bar.sync"] == 8  # warps
    assert report.bytes["load global"] == report.bytes["store global"] == 1024


@pytest.mark.parametrize(
    "wrong", [{"schedule": "soon"}, {"order": "up"}, {"severity": {"race": "loud"}}, {"severity": {"rice": "lint"}}]
)
def test_options_are_checked(wrong: dict) -> None:
    with pytest.raises(LaunchError, match=r"allowed|kinds are"):
        Options(**wrong)


def test_a_name_that_no_case_has(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["truth", "no-such-case"]) == 1
    assert "no-such-case" in capsys.readouterr().err
