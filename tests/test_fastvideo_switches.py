"""FastVideo's switches as a table, without a GPU: what a call of its adapter asks for, and which backend then runs."""

from __future__ import annotations

import warnings

import pytest
import torch

import vsa_inductor as vsa
from vsa_inductor import native
from vsa_inductor.backends import capability
from vsa_inductor.backends.contract import Problem
from vsa_inductor.integrations import fastvideo
from vsa_inductor.integrations.fastvideo import Switches, backend_option, route

ALL = ("FASTVIDEO_VSA_SM100A", "FASTVIDEO_VSA_TRITON", "FASTVIDEO_KERNEL_VSA_FORCE_TRITON")
NOTHING, OPT_IN = {}, {ALL[0]: "1"}
# By device and what is set: the backends of a 64-token call with gradients where everything is built.
ROUTES = {
    (9, 0): {"nothing": ("sm90", "sm90"), "opt in": ("sm90", "sm90")},
    (10, 0): {"nothing": ("triton", "triton"), "opt in": ("sm100", "sm100")},
    (10, 3): {"nothing": ("triton", "triton"), "opt in": ("sm100", "triton")},
    (12, 1): {"nothing": ("triton", "triton"), "opt in": ("triton", "triton")},
    (8, 0): {"nothing": ("triton", "triton"), "opt in": ("triton", "triton")},
}


def problem(device: tuple[int, int], block_size: int = 64, needs_grad: bool = True) -> Problem:
    return Problem("cuda", device, torch.bfloat16, 128, block_size, False, needs_grad, False)


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for name in ALL:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(native, "implements", lambda op: True)
    monkeypatch.setattr(vsa.backends.triton, "_triton_version", lambda: (3, 6))


def chosen(environment: dict[str, str], asked: Problem) -> tuple[str, str]:
    choice = capability.select(asked, vsa.Options(backend=route(Switches.read(environment), asked)))
    assert not choice.fallbacks, "a switch surprises nobody"
    return choice.forward, choice.backward


@pytest.mark.parametrize("device", ROUTES, ids=str)
@pytest.mark.parametrize("label, environment", [("nothing", NOTHING), ("opt in", OPT_IN)])
def test_who_runs(device, label, environment):
    assert chosen(environment, problem(device)) == ROUTES[device][label]


@pytest.mark.parametrize("device", ROUTES, ids=str)
@pytest.mark.parametrize("name", ALL[1:])
@pytest.mark.parametrize("environment", [NOTHING, OPT_IN], ids=["alone", "with opt in"])
@pytest.mark.parametrize("block_size", [64, 128])
def test_triton_goes_before_everything(device, name, environment, block_size):
    assert chosen({**environment, name: "1"}, problem(device, block_size)) == ("triton", "triton")


@pytest.mark.parametrize("value", ["0", "", "true", "2"])
def test_only_1_is_on(value):
    assert Switches.read(dict.fromkeys(ALL, value)) == Switches(triton=False, sm100=False)


def test_blocks_of_128_with_gradients():
    for device in ((10, 0), (10, 3)):
        with pytest.raises(vsa.BackendUnavailableError, match=r"FASTVIDEO_VSA_SM100A=1: got a call with gradients and"):
            chosen(OPT_IN, problem(device, 128))
        assert chosen(OPT_IN, problem(device, 128, needs_grad=False))[0] == "sm100"
        assert chosen(NOTHING, problem(device, 128)) == ("triton", "triton")
    assert chosen(OPT_IN, problem((12, 1), 128)) == ("triton", "triton")


def test_without_the_library_an_opt_in_is_told_why(monkeypatch):
    monkeypatch.setattr(native, "implements", lambda op: False)
    asked = problem((10, 0))
    choice = capability.select(asked, vsa.Options(backend=route(Switches.read(OPT_IN), asked)))
    assert (choice.forward, choice.backward) == ("triton", "triton")
    assert {(r.backend, r.direction) for r in choice.fallbacks} == {("sm100", "forward"), ("sm100", "backward")}
    # Nothing of sm100 would have run: no reason to refuse.
    asked = problem((10, 0), 128)
    assert capability.select(asked, vsa.Options(backend=route(Switches.read(OPT_IN), asked))).forward == "triton"


ARGUMENTS = ("cuda", 0, torch.bfloat16, 128, 64, True)


def test_every_eager_call_reads_them(monkeypatch):
    monkeypatch.setattr(capability, "device_capability", lambda *args: (10, 0))
    assert backend_option(*ARGUMENTS) == "triton"
    monkeypatch.setenv(ALL[0], "1")
    assert backend_option(*ARGUMENTS) == ("sm100", "sm100")
    monkeypatch.setenv(ALL[2], "1")
    assert backend_option(*ARGUMENTS) == "triton"


def test_traced_code_has_the_value_of_trace_time(monkeypatch):
    monkeypatch.setattr(capability, "device_capability", lambda *args: (10, 0))
    monkeypatch.setenv(ALL[0], "1")

    def told(x):
        return x + (1 if fastvideo.backend_option("cuda", 0, torch.bfloat16, 128, 64, True) == "triton" else 2)

    compiled = torch.compile(told, backend="eager", fullgraph=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compiled(torch.zeros(1)).item() == 2
        monkeypatch.setenv(ALL[1], "1")
        assert compiled(torch.zeros(1)).item() == 2, "neither read again nor compiled again"
        assert told(torch.zeros(1)).item() == 1
    torch.compiler.reset()
