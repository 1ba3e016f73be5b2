"""Options of a thread, and the choice of a backend as a pure function of static facts."""

from __future__ import annotations

import threading
import warnings
from dataclasses import replace

import pytest
import torch
from problems import random_problem

import vsa_inductor as vsa
from vsa_inductor import native
from vsa_inductor.backends import capability
from vsa_inductor.backends.contract import Problem
from vsa_inductor.options import current

CUDA = Problem("cuda", (9, 0), torch.bfloat16, 128, 64, False, True, False)
CPU = replace(CUDA, device_type="cpu", capability=None)


@pytest.fixture(autouse=True)
def no_native_library(monkeypatch):
    """What the backends without a library do, whether this installation has one or not; test_sm90.py has the rest."""
    monkeypatch.setattr(native, "implements", lambda op: False)


def by(backend, refusals):
    return tuple(refusal for refusal in refusals if refusal.backend == backend)


@pytest.fixture
def fresh_warnings(monkeypatch):
    monkeypatch.setattr(capability, "_warned", set())


def attend(problem=None, **leaf):
    problem = problem or random_problem(**leaf)
    return vsa.block_sparse_attention(*problem.operands, *problem.lists)


def test_nesting_keeps_what_is_not_given():
    assert current() == vsa.Options()
    with vsa.options(backend="eager", debug=True) as outer:
        assert current() is outer and outer == vsa.Options(backend="eager", debug=True)
        with vsa.options(strict=True, debug=False):
            assert current() == vsa.Options(backend="eager", strict=True)
            with vsa.options(backend=("triton", "auto"), deterministic=True):
                assert current() == vsa.Options(("triton", "auto"), deterministic=True, strict=True)
            assert current() == vsa.Options(backend="eager", strict=True)
        assert current() is outer
    assert current() == vsa.Options()


def test_an_exception_restores():
    with pytest.raises(KeyError), vsa.options(backend="eager"), vsa.options(strict=True):
        raise KeyError
    assert current() == vsa.Options()


def test_what_is_in_force_is_read_on_entry():
    """Not given means: as it is where the context is entered, not where options() was called."""
    with vsa.options(strict=True):
        manager = vsa.options(backend="eager")
    with manager as inside:
        assert inside == vsa.Options(backend="eager")
    assert current() == vsa.Options()


def test_threads_do_not_see_each_other():
    seen, inside, checked = {}, threading.Event(), threading.Event()

    def other():
        seen["before"] = current()
        with vsa.options(backend="eager", strict=True):
            inside.set()
            checked.wait(10)
            seen["within"] = current()

    thread = threading.Thread(target=other)
    with vsa.options(debug=True):
        thread.start()
        assert inside.wait(10)
        assert current() == vsa.Options(debug=True)
        checked.set()
        thread.join(10)
    assert seen == {"before": vsa.Options(), "within": vsa.Options(backend="eager", strict=True)}


@pytest.mark.parametrize("backend", ["cutlass", "", ("eager",), ("eager", "cutlass"), ("eager", "eager", "eager")])
def test_an_unknown_backend_is_a_typed_error(backend):
    with pytest.raises(vsa.ArgumentError) as caught:
        vsa.options(backend=backend)
    assert caught.value.argument == "backend"
    for name in ("auto", *vsa.backend_names()):
        assert repr(name) in str(caught.value)
    assert repr(backend) in str(caught.value)
    assert current() == vsa.Options()


def test_names_are_best_first_and_the_last_takes_everything():
    assert vsa.backend_names() == ("sm90", "sm100", "triton", "eager")


@pytest.mark.parametrize(
    "change, asked, supported",
    [
        ({"capability": (7, 5)}, "compute capability 7.5", "8.0 and later"),
        ({"dtype": torch.float64}, "torch.float64", "torch.bfloat16, torch.float16, torch.float32"),
        ({"head_dim": 100}, "head dim 100", "multiples of 16 up to 256"),
        ({"head_dim": 512}, "head dim 512", "multiples of 16 up to 256"),
        ({"head_dim": 8}, "head dim 8", "multiples of 16 up to 256"),
        ({"device_type": "cpu", "capability": None}, "a cpu device", "CUDA devices of compute capability >= 8.0"),
        ({"device_type": "xpu", "capability": None}, "a xpu device", "CUDA devices of compute capability >= 8.0"),
    ],
    ids=str,
)
def test_refusals_of_triton(change, asked, supported):
    problem = replace(CUDA, **change)
    choice = capability.select(problem, vsa.Options())
    assert (choice.forward, choice.backward) == ("eager", "eager")
    refusals = by("triton", choice.refusals)
    assert [r.direction for r in refusals] == ["forward", "backward"]
    for refusal in refusals:
        assert asked in refusal.sentence and supported in refusal.sentence
        assert str(refusal) == f"triton ({refusal.direction}): {refusal.sentence}"
    # Eager is what a CPU runs; on a GPU nobody asked for it.
    assert choice.fallbacks == (refusals if problem.device_type == "cuda" else ())
    named = vsa.Options(backend="triton", strict=True)
    with pytest.raises(vsa.BackendUnavailableError, match="strict=True forbids a fallback") as caught:
        capability.select(problem, named)
    assert all(str(refusal) in str(caught.value) for refusal in refusals)


@pytest.mark.parametrize("least", [(8, 0), (8, 6), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "facts", [{}, {"head_dim": 16}, {"head_dim": 256}, {"block_size": 256, "grouped": True}], ids=str
)
def test_triton_takes_what_it_supports(least, dtype, facts):
    problem = replace(CUDA, capability=least, dtype=dtype, deterministic=True, **facts)
    for options in (vsa.Options(), vsa.Options(backend="triton", strict=True), vsa.Options(strict=True)):
        choice = capability.select(problem, options)
        assert (choice.forward, choice.backward, choice.fallbacks) == ("triton", "triton", ())
        assert not by("triton", choice.refusals)


def test_eager_can_be_named_on_a_gpu():
    choice = capability.select(CUDA, vsa.Options(backend="eager", strict=True))
    assert choice == capability.Choice("eager", "eager", (), ())


@pytest.mark.parametrize("pair", [("eager", "triton"), ("triton", "eager"), ("auto", "eager"), ("eager", "auto")])
def test_a_pair_names_forward_and_backward(pair):
    choice = capability.select(CUDA, vsa.Options(backend=pair))
    assert (choice.forward, choice.backward) == tuple("triton" if name == "auto" else name for name in pair)
    on_cpu = capability.select(CPU, vsa.Options(backend=pair))
    assert (on_cpu.forward, on_cpu.backward) == ("eager", "eager")
    asked = [d for d, name in zip(capability.DIRECTIONS, pair, strict=True) if name == "triton"]
    assert [r.direction for r in on_cpu.fallbacks] == asked


def test_a_direction_that_never_runs_is_no_fallback():
    inference = replace(CPU, needs_grad=False)
    choice = capability.select(inference, vsa.Options(backend=("eager", "triton"), strict=True))
    assert (choice.forward, choice.backward) == ("eager", "eager") and choice.fallbacks == ()
    assert [r.direction for r in by("triton", choice.refusals)] == ["backward"]


def test_the_choice_is_a_pure_function(monkeypatch):
    def touched(*args):
        raise AssertionError("select() asked the device")

    monkeypatch.setattr(torch.cuda, "get_device_capability", touched)
    monkeypatch.setattr(torch.cuda, "is_available", touched)
    for problem in (CPU, CUDA, replace(CUDA, capability=(7, 5))):
        assert capability.select(problem, vsa.Options()) == capability.select(problem, vsa.Options())


@pytest.mark.parametrize(("version", "found"), [(None, "not installed"), ((2, 1), "version 2.1")])
def test_a_missing_or_old_triton_is_a_refusal(monkeypatch, version, found):
    from vsa_inductor.backends import triton

    monkeypatch.setattr(triton, "_triton_version", lambda: version)
    choice = capability.select(CUDA, vsa.Options())
    assert choice.forward == "eager"
    sentence = by("triton", choice.refusals)[0].sentence
    assert found in sentence and ">= 3.6" in sentence


def test_strict_names_every_refusal(fresh_warnings):
    problem = random_problem()
    q = problem.q.detach().requires_grad_()
    with vsa.options(backend="triton", strict=True):
        with pytest.raises(vsa.BackendUnavailableError) as inference:
            attend(problem)
        with pytest.raises(vsa.BackendUnavailableError) as training:
            vsa.block_sparse_attention(q, problem.k, problem.v, *problem.lists)
    assert "triton (forward): asked for a cpu device" in str(inference.value)
    assert "triton (backward)" not in str(inference.value)
    for direction in capability.DIRECTIONS:
        assert f"triton ({direction}): asked for a cpu device" in str(training.value)


def test_strict_without_a_named_backend_is_content_with_a_cpu():
    with vsa.options(strict=True):
        assert attend().shape == (1, 2, 192, 32)


def test_a_fallback_warns_once_per_cause(fresh_warnings):
    problem = random_problem()
    with vsa.options(backend="triton"):
        with pytest.warns(
            UserWarning, match=r"runs the forward on 'eager': triton \(forward\): asked for a cpu"
        ) as seen:
            expected = attend(problem)
        assert len(seen) == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert torch.equal(attend(problem), expected)
            attend(head_dim=64)
        with pytest.warns(UserWarning, match="runs the backward on 'eager'") as seen:
            vsa.block_sparse_attention(problem.q.detach().requires_grad_(), problem.k, problem.v, *problem.lists)
        assert len(seen) == 1, "the forward's cause was told before"
    with vsa.options(backend="eager"):
        assert torch.equal(attend(problem), expected)


def test_deterministic_reaches_the_operator():
    problem = random_problem()
    seen = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.vsa.attention.default:
                seen.append(args[9])
            return func(*args, **(kwargs or {}))

    with Watch():
        attend(problem)
        with vsa.options(deterministic=True):
            attend(problem)
        torch.use_deterministic_algorithms(True)
        try:
            attend(problem)
        finally:
            torch.use_deterministic_algorithms(False)
    assert seen == [False, True, True]


def test_the_operator_gets_names_with_the_hash_of_their_sources():
    names = capability.choose("cpu", None, torch.float32, 64, 64, False, True, "auto", False, False)
    assert names == (capability.backend_named("eager").identity,) * 2
    name, _, digest = names[0].partition("@")
    assert name == "eager" and len(digest) == 8 and int(digest, 16) >= 0
    assert capability.backend_named("triton").identity.partition("@")[2] != digest


def test_an_unknown_name_in_an_operator_argument():
    problem = random_problem()
    known = "no backend 'cutlass'; this installation has sm90, sm100, triton, eager"
    with pytest.raises(vsa.BackendUnavailableError, match=known):
        problem.forward("cutlass@12345678")


def test_the_report_says_what_runs_here_and_why_the_rest_cannot():
    report = vsa.backend_report()
    cpu = report.devices[0]
    assert cpu.device == "cpu" and cpu.backends == ("eager",)
    assert {refusal.backend for refusal in cpu.refusals} == {"sm90", "sm100", "triton"}
    text = str(report)
    assert f"torch {torch.__version__}" in text and "cpu: eager" in text
    assert all(str(refusal) in text for refusal in cpu.refusals)


@pytest.mark.gpu
def test_the_report_of_a_gpu():
    device = vsa.backend_report().devices[1]
    assert device.device.startswith("cuda:0 ")
    assert device.backends[-2:] == ("triton", "eager")
    assert {refusal.backend for refusal in device.refusals} <= {"sm90"}


def test_one_object_entered_twice_and_later():
    again = vsa.options(backend="eager", debug=True)
    with again, again:
        pass
    assert current() == vsa.Options()
    with vsa.options(deterministic=True), again:
        assert current() == vsa.Options("eager", deterministic=True, debug=True)
    assert current() == vsa.Options()
