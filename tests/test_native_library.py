"""The native library: it builds, loads with or without CUDA, implements the operators, and refuses in words."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest
from native_library import HOOKS, ROOT, any_library, built_library, native_build, run_python

from benchmarks import native_resources, sanitize_native
from vsa_inductor import native
from vsa_inductor.backends import sm90

OPS = ("attention_sm90", "attention_backward_sm90")

SMALL = """
import json, sys
import torch
import vsa_inductor as vsa
from vsa_inductor import native

vsa.load_library(sys.argv[1])

def forward_arguments():
    B, H, S, D, N = 2, 2, 128, 64, 2
    q, k, v = (torch.randn(B, H, S, D, dtype=torch.bfloat16) for _ in range(3))
    ids = torch.zeros(B, H, N, 2, dtype=torch.int32)
    counts, sizes = torch.ones(B, H, N, dtype=torch.int32), torch.full((N,), 64, dtype=torch.int32)
    return {"q": q, "k": k, "v": v, "kv_indices": ids, "kv_num_blocks": counts, "kv_block_sizes": sizes,
            "sm_scale": 0.125, "block_size": 64, "return_lse": True, "deterministic": False}

def backward_arguments():
    given = forward_arguments()
    rows = torch.zeros(2, 2, 128)
    del given["return_lse"], given["deterministic"]
    head = {"dout": given["q"], **{name: given.pop(name) for name in ("q", "k", "v")}, "lse_log2": rows, "delta": rows}
    lists = {name: given.pop(name) for name in ("kv_indices", "kv_num_blocks")}
    transposed = {"q_indices": torch.zeros(2, 2, 4, dtype=torch.int32), "q_offsets": torch.zeros(2, 2, 3).int()}
    return {**head, **lists, **transposed, **given, "deterministic": False, "needs_dq": True, "needs_dkv": True}

def eager_arguments():
    given = backward_arguments()
    del given["delta"]
    head = {"dout": given.pop("dout"), "dlse": given["lse_log2"], **{name: given.pop(name) for name in ("q", "k", "v")}}
    return {**head, "out": head["q"], **given}

ON_CUDA = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)

def refusal(op, arguments, outputs=None):
    # Straight to what the library registered, with tensors that are on no GPU: that is what is refused last.
    try:
        op.redispatch(ON_CUDA, *arguments.values(), **(outputs or {}))
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return "nothing was refused"
"""


def run_small(code: str) -> dict:
    return json.loads(run_python(SMALL + code, str(any_library())).splitlines()[-1])


@pytest.mark.nvcc
def test_it_builds():
    assert built_library().is_file()


@pytest.mark.nvcc
def test_no_kernel_spills():
    built_library()
    kernels = native_resources.kernel_table()
    print(native_resources.formatted(kernels))
    assert kernels
    unclean = [kernel for kernel in kernels if not kernel.clean]
    assert not unclean, "\n" + native_resources.formatted(unclean)
    assert {kernel.architecture for kernel in kernels} == {f"sm_{name}" for name in architectures()}


def architectures() -> list[str]:
    found = re.search(r'set\(VSA_ARCHITECTURES "([\w;]+)"', (ROOT / "CMakeLists.txt").read_text())
    assert found is not None
    return found.group(1).split(";")


def test_it_loads_and_implements_both_operators():
    seen = run_small(
        f"names = {OPS!r}\n"
        "ops = [getattr(torch.ops.vsa, n) for n in names]\n"
        "state = native.status()\n"
        "print(json.dumps({'loaded': state.loaded, 'reason': state.reason, 'report': str(vsa.backend_report()),\n"
        "    'kernels': [torch._C._dispatch_has_kernel_for_dispatch_key(f'vsa::{n}{o}', 'CUDA')\n"
        "                for n in names for o in ('', '.out')],\n"
        "    'implements': [native.implements(op.default) for op in ops]}))"
    )
    assert seen["loaded"] and all(seen["kernels"]) and all(seen["implements"])
    for architecture in architectures():
        assert f"sm_{architecture}" in seen["reason"]
    assert "CUDA " in seen["reason"] and seen["reason"] in seen["report"]


def test_it_changes_nothing_on_a_cpu():
    seen = run_small(
        "from problems import random_problem\n"
        "problem = random_problem(counts='varying', sizes='ragged')\n"
        "out, lse = problem.forward('auto')\n"
        "expected = problem.forward('eager')\n"
        "print(json.dumps({'same': torch.equal(out, expected[0]) and torch.equal(lse, expected[1])}))"
    )
    assert seen["same"]


def test_it_needs_neither_cuda_nor_torchs_cuda_part():
    tool = shutil.which("readelf")
    if tool is None:
        pytest.skip("readelf: not on PATH")
    printed = subprocess.run([tool, "-dW", str(any_library())], capture_output=True, text=True, check=True).stdout
    needed = re.findall(r"NEEDED.*\[(.+?)\]", printed)
    assert "libtorch_cpu.so" in needed
    for name in needed:
        assert not re.match(r"lib(cuda|cudart|torch_cuda|torch_python|python|torch|c10_cuda)\b", name), name
    assert "RPATH" not in printed and "RUNPATH" not in printed, "no path of the machine that built it"


REFUSALS = {
    "q of fp32": ("q", "x.float()", "q: got Float; allowed: BFloat16 or Half"),
    "q of rank 3": ("q", "x[0]", "q: got 3 dimensions; allowed: 4 dimensions"),
    "head dim": ("q", "x[..., :32]", "q.shape[3]: got 32; allowed: 64 or 128"),
    "ragged q": ("q", "x[:, :, :100]", "q.shape[2]: got 100; allowed: a multiple of block_size, 64"),
    "k of fp16": ("k", "x.half()", "k: got Half; allowed: BFloat16"),
    "k of another batch": ("k", "x[:1]", "k: got shape (1, 2, 128, 64); allowed: (2, 2, 128, 64)"),
    "v longer than k": ("v", "torch.cat((x, x), 2)", "v: got shape (2, 2, 256, 64); allowed: (2, 2, 128, 64)"),
    "heads that do not divide": (
        "k", "torch.cat((x, x[:, :1]), 1)", "k.shape[1]: got 3; allowed: a divisor of the heads of q, 2",
    ),
    "ids of int64": ("kv_indices", "x.long()", "kv_indices: got Long; allowed: Int"),
    "ids of another number": (
        "kv_indices", "x[:, :, :1]", "kv_indices: got shape (2, 2, 1, 2); allowed: (2, 2, 2, 2)",
    ),
    "counts": ("kv_num_blocks", "x[..., None]", "kv_num_blocks: got shape (2, 2, 2, 1); allowed: (2, 2, 2)"),
    "sizes": ("kv_block_sizes", "x[:1]", "kv_block_sizes: got shape (1); allowed: (2)"),
    "blocks of 256": ("block_size", "256", "block_size: got 256; allowed: 64 or 128"),
    "a scale that is no number": ("sm_scale", "float('nan')", "sm_scale: got nan; allowed: a finite number"),
    "a scale too large for fp32": (
        "sm_scale", "-3e38", "sm_scale: got -3e+38; allowed: a number that is finite in fp32",
    ),
    "a CPU": ("q", "x", "q: got a tensor that is not on a CUDA device; allowed: CUDA tensors"),
}  # fmt: skip
BACKWARD_REFUSALS = {
    "dout of another shape": ("dout", "x[..., :32]", "dout: got shape (2, 2, 128, 32); allowed: (2, 2, 128, 64)"),
    "lse of bf16": ("lse_log2", "x.bfloat16()", "lse_log2: got BFloat16; allowed: Float"),
    "delta": ("delta", "x[:1]", "delta: got shape (1, 2, 128); allowed: (2, 2, 128)"),
    "no transposed lists": (
        "q_indices", "None", "q_indices, q_offsets: got None; allowed: the lists of vsa::transpose_blocks",
    ),
    "offsets": ("q_offsets", "x[..., :2]", "q_offsets: got shape (2, 2, 2); allowed: (2, 2, 3)"),
    "blocks of 128": ("block_size", "128", "block_size: got 128; allowed: 64"),
}  # fmt: skip
EAGER_REFUSALS = {
    **{case: refused for case, refused in {**REFUSALS, **BACKWARD_REFUSALS}.items() if case != "delta"},
    "out of another shape": ("out", "x[..., :32]", "out: got shape (2, 2, 128, 32); allowed: (2, 2, 128, 64)"),
    "dlse of bf16": ("dlse", "x.bfloat16()", "dlse: got BFloat16; allowed: Float"),
}


@cache
def refusals() -> dict:
    """Every refusal of the operators and of their .out forms, from one process."""
    given = json.dumps(json.dumps([REFUSALS, BACKWARD_REFUSALS, EAGER_REFUSALS]))
    return run_small(
        f"cases, backward_cases, eager_cases = json.loads({given})\n"
        "ops, found = torch.ops.vsa, {}\n"
        "def changed(arguments, name, change):\n"
        "    return {**arguments, name: eval(change, {'x': arguments[name], 'torch': torch})}\n"
        "for case, (name, change, _) in cases.items():\n"
        "    given = changed(forward_arguments(), name, change)\n"
        "    outs = {'out': torch.empty(2, 2, 128, 64, dtype=torch.bfloat16), 'lse_log2': torch.empty(2, 2, 128)}\n"
        "    found['forward ' + case] = refusal(ops.attention_sm90.default, given)\n"
        "    found['forward.out ' + case] = refusal(ops.attention_sm90.out, given, outs)\n"
        "def changed_backward(given, case, name, change):\n"
        "    given = changed(given, name, change)\n"
        "    if case != 'blocks of 128':\n"
        "        return given\n"
        "    return {**given, **{n: given[n][:, :, :1] for n in ('kv_indices', 'kv_num_blocks')},\n"
        "            'kv_block_sizes': given['kv_block_sizes'][:1]}\n"
        "for case, (name, change, _) in eager_cases.items():\n"
        "    given = changed_backward(eager_arguments(), case, name, change)\n"
        "    found['eager ' + case] = refusal(ops.attention_backward_sm90_eager.default, given)\n"
        "for case, (name, change, _) in {**cases, **backward_cases}.items():\n"
        "    given = changed_backward(backward_arguments(), case, name, change)\n"
        "    outs = {'dq_accum': torch.empty(2, 2, 128, 64), 'dk': torch.empty(2, 2, 128, 64).bfloat16()}\n"
        "    outs['dv'] = outs['dk'].clone()\n"
        "    found['backward ' + case] = refusal(ops.attention_backward_sm90.default, given)\n"
        "    found['backward.out ' + case] = refusal(ops.attention_backward_sm90.out, given, outs)\n"
        "print(json.dumps(found))"
    )


@pytest.mark.parametrize("form", ["", ".out"], ids=["functional", "out"])
@pytest.mark.parametrize("case", REFUSALS)
def test_refusals_of_the_forward(case, form):
    assert refusals()[f"forward{form} {case}"] == REFUSALS[case][2]


@pytest.mark.parametrize("form", ["", ".out"], ids=["functional", "out"])
@pytest.mark.parametrize("case", {**REFUSALS, **BACKWARD_REFUSALS})
def test_refusals_of_the_backward(case, form):
    assert refusals()[f"backward{form} {case}"] == {**REFUSALS, **BACKWARD_REFUSALS}[case][2]


@pytest.mark.parametrize("case", EAGER_REFUSALS)
def test_refusals_of_eagers_backward(case):
    assert refusals()[f"eager {case}"] == EAGER_REFUSALS[case][2]


def test_outputs_of_another_kind_are_refused():
    seen = run_small(
        "def outs(**change):\n"
        "    return {'out': torch.empty(2, 2, 128, 64).bfloat16(), 'lse_log2': torch.empty(2, 2, 128), **change}\n"
        "changes = [{'out': torch.empty(2, 2, 128, 64)}, {'out': torch.empty(2, 128, 2, 64).bfloat16().mT},\n"
        "           {'out': torch.empty(2, 128, 2, 64).bfloat16().transpose(1, 2)}, {'lse_log2': torch.empty(0)},\n"
        "           {'out': torch.empty(32769).bfloat16()[1:].view(2, 2, 128, 64)}]\n"
        "op = torch.ops.vsa.attention_sm90.out\n"
        "print(json.dumps({'said': [refusal(op, forward_arguments(), outs(**change)) for change in changes]}))"
    )["said"]
    assert seen[0] == "out: got Float; allowed: BFloat16"
    assert seen[1] == "out: got shape (2, 128, 64, 2); allowed: (2, 2, 128, 64)"
    assert seen[2] == "out: got strides (16384, 64, 128, 1); allowed: a contiguous tensor"
    assert seen[3] == "lse_log2: got shape (0); allowed: (2, 2, 128)"
    assert seen[4] == "out: got an address between multiples of 16 bytes; allowed: a multiple of 16 bytes"


def test_nothing_on_the_host_waits_for_a_device_or_allocates_on_it():
    waits = re.compile(
        r"Synchronize|cudaMemcpy(?!Async)|cudaMemset\(|cudaMalloc|cudaFree|cudaStreamQuery|cudaEventQuery"
    )
    for source in native_build().source_files():
        assert not waits.search(source.read_text()), source


SANITIZED = """\
========= COMPUTE-SANITIZER
sanitize_native: begin first
sanitize_native: end first
sanitize_native: begin second
========= Invalid __global__ read of size 4 bytes
=========     at vsa::sm90::kernel(int)+0x70
=========     by thread (0,0,0) in block (1,0,0)
=========
========= Error: Race reported between Write access at a and Read access at b [32 hazards]
=========
========= Target application returned an error
========= ERROR SUMMARY: 2 errors
"""


def hazard(kind: str, lane: int, *places: str) -> str:
    """As racecheck prints it: the earlier access, by ``lane`` of a warp, stands first."""
    first, second = ("Write", "Read") if kind == "RAW" else ("Read", "Write")
    return (
        f"========= Error: Potential {kind} hazard detected at __shared__ 0x4 in block (0,0,0) :\n"
        f"=========     {first} Thread ({32 + lane},0,0) at void vsa::of<T<(int)64>>(int (&)[2])+0x2 in {places[0]}\n"
        f"=========     {second} Thread (0,0,0) at vsa::Other<(bool)1>::at() const+0x10 in {places[1]}\n"
        "=========     Current Value : 1\n=========\n"
    )


def test_hazards_are_explained_by_who_comes_first():
    elected = hazard("RAW", 0, "a.cuh:1", "b.cuh:2") + hazard("RAW", 3, "a.cuh:1", "b.cuh:2")
    (found,) = sanitize_native.parse(elected)[0][""]
    assert not found.explained and found.headline == "Error: 2 RAW hazards, lanes 0, 3 first"
    assert found.details == ("first Write in vsa::of, a.cuh:1", "then Read in vsa::Other::at, b.cuh:2")
    others = hazard("WAR", 1, "a.cuh:1", "b.cuh:2") + hazard("WAR", 31, "a.cuh:1", "b.cuh:2")
    findings, ended = sanitize_native.parse(f"sanitize_native: begin x\n{others}sanitize_native: end x\n")
    assert [bool(finding.explained) for finding in findings["x"]] == [True]
    result = sanitize_native.Result("racecheck", findings, ended)
    assert sanitize_native.clean([result], ["x"]) and "clean (1 explained)" in sanitize_native.formatted(
        [result], ["x"]
    )
    cut = "========= RACECHECK SUMMARY: 20 hazards displayed (48 errors, 0 warnings)\n"
    assert "not all were printed" in sanitize_native.parse(cut)[0][""][0].headline


def test_what_the_sanitizer_found_is_told_by_case():
    findings, ended = sanitize_native.parse(SANITIZED)
    assert ended == {"first"} and set(findings) == {"second"}
    read, race = findings["second"]
    assert read.headline.startswith("Invalid __global__ read") and len(read.details) == 2 and not race.details
    assert "[32 hazards]" in race.headline
    result = sanitize_native.Result("memcheck", findings, ended)
    table = sanitize_native.formatted([result], ["first", "second", "third"])
    rows = {line.split()[0]: line.split(maxsplit=1)[1].strip() for line in table.splitlines()[1:4]}
    assert rows == {"first": "clean", "second": "2 found", "third": "did not end"}
    assert "at vsa::sm90::kernel(int)+0x70" in table
    assert not sanitize_native.clean([result], ["first"])
    assert sanitize_native.clean([sanitize_native.Result("memcheck", {}, ended)], ["first"])
    assert not sanitize_native.clean([sanitize_native.Result("memcheck", {}, ended)], ["first", "third"])


def test_sanitizer_cases_are_every_instantiation_and_form():
    labels = [case.label for case in sanitize_native.cases()]
    assert len(set(labels)) == len(labels)
    static = {
        (case.dtype, case.head_dim, case.block_size) for case in sanitize_native.cases() if case.form == "forward"
    }
    assert static == {(dtype, d, block) for dtype in ("bf16", "fp16") for d in sm90.HEAD_DIMS for block in (64, 128)}
    for form in sanitize_native.BACKWARD_FORMS:
        given = {(case.dtype, case.head_dim) for case in sanitize_native.cases() if case.form == form}
        assert given == {(dtype, d) for dtype in ("bf16", "fp16") for d in sm90.HEAD_DIMS}


def test_a_library_for_another_version_is_refused_before_it_is_loaded(tmp_path):
    assert f"interface={native.INTERFACE} " in (ROOT / "csrc" / "build_info.cpp.in").read_text()
    content = any_library().read_bytes()
    mark = f"vsa_native interface={native.INTERFACE} ".encode()
    assert content.count(mark) == 1
    other = tmp_path / "_native.so"
    other.write_bytes(content.replace(mark, b"vsa_native interface=9 "))
    before = native.status()
    with pytest.raises(native.NativeLibraryError, match=rf"for interface 9; allowed: interface {native.INTERFACE}"):
        native.load_library(other)
    assert native.status() is before
    with open("/proc/self/maps") as maps:
        assert str(other) not in maps.read()


PRINTED = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_ZN3vsa4sm905firstILi3EEEvPf' for 'sm_90a'
ptxas info    : Function properties for _ZN3vsa4sm905firstILi3EEEvPf
    40 bytes stack frame, 40 bytes spill stores, 48 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 40 bytes cumulative stack size, 256 bytes smem
ptxas info    : Compiling entry function '_Z6secondPf' for 'sm_90a'
ptxas info    : Function properties for _Z6secondPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Function properties for _Z6calleeV
    16 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 9 barriers
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized in '_Z6secondPf'
"""


def test_the_table_of_resources():
    first, second = native_resources.parse("csrc/x.cu", PRINTED)
    assert (first.registers, first.barriers, first.static_shared) == (32, 1, 256)
    assert (first.stack, first.spill_stores, first.spill_loads, first.losses) == (40, 40, 48, ())
    assert (second.registers, second.barriers, second.stack, second.spill_loads) == (168, 9, 0, 0)
    assert len(second.losses) == 1 and "serialized" in second.losses[0]
    assert not first.clean and not second.clean
    if shutil.which("c++filt"):
        assert (first.kernel, second.kernel) == ("first<3>", "second")
    table = native_resources.formatted([first, second])
    assert "40/48" in table and "sm_90a" in table and "serialized" in table


def fake_program(folder: Path, name: str, printed: str) -> Path:
    program = folder / "bin" / name
    program.parent.mkdir(exist_ok=True)
    program.write_text(f"#!/bin/sh\necho '{printed}'\n")
    program.chmod(0o755)
    return program


def test_what_is_missing_is_told_in_a_sentence(tmp_path, monkeypatch):
    build = native_build()
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.delenv(build.SWITCH, raising=False)
    nvcc = fake_program(tmp_path, "nvcc", "Cuda compilation tools, release 11.8, V11.8.89")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(build.ToolchainMissing, match=r"nvcc is CUDA 11\.8; supported: CUDA >= 12\.8"):
        build.find_nvcc()
    assert build.missing_requirements() == [], "nothing is downloaded for a build that cannot be"
    fake_program(tmp_path, "nvcc", "Cuda compilation tools, release 13.0, V13.0.88")
    assert build.find_nvcc() == str(nvcc)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(build.ToolchainMissing, match=r"no C\+\+ compiler"):
        build.find_nvcc()
    monkeypatch.delenv("CXX")
    monkeypatch.setenv(build.SWITCH, "0")
    with pytest.raises(build.ToolchainMissing, match="VSA_NATIVE was 0"):
        build.find_nvcc()
    monkeypatch.delenv(build.SWITCH)
    which = shutil.which
    monkeypatch.setattr(build.shutil, "which", lambda name: None if name == "cmake" else which(name))
    monkeypatch.setattr(build.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(build.sys, "path", [str(tmp_path)])
    with pytest.raises(build.ToolchainMissing, match=r"cmake >= 3\.24 was not found"):
        build.find_cmake()
    with pytest.raises(build.ToolchainMissing, match=r"headers of torch >= 2\.11"):
        build.find_torch()
    if which("c++"):
        assert build.missing_requirements() == ["cmake>=3.24", "torch>=2.11"]


def test_a_build_that_fails_shows_what_the_compiler_said():
    with pytest.raises(RuntimeError, match=r"does not build.*VSA_NATIVE=0(?s:.*)error: expected a semicolon"):
        native_build()._run(["sh", "-c", "echo 'ptxas info : noise'; echo 'error: expected a semicolon'; exit 1"])


@pytest.mark.parametrize("built", [True, False], ids=["with", "without"])
def test_a_wheel(tmp_path, built):
    """From a copy of the checkout; the build itself is a stand-in."""
    pytest.importorskip("setuptools", minversion="77", reason="setuptools >= 77: builds wheels")
    copy = tmp_path / "checkout"
    copy.mkdir()
    for name in ("vsa_inductor", "lowerings", "csrc"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "_native*"))
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CMakeLists.txt"):
        shutil.copy(ROOT / name, copy / name)
    (copy / "library.so").write_bytes(b"the library")
    hooks = copy / "csrc" / "build_hooks" / "native_build.py"
    stand_in = (
        "def find_toolchain():\n    return Toolchain('nvcc', 'cmake', ROOT)\n"
        "def build(toolchain):\n    return ROOT / 'library.so', ''\n"
        if built
        else "def find_toolchain():\n    raise ToolchainMissing('there is no compiler')\n"
    )
    hooks.write_text(hooks.read_text().replace('if __name__ == "__main__":', stand_in + 'if __name__ == "__main__":'))
    names = run_python(
        "import os, sys, zipfile, tarfile\n"
        "os.chdir(sys.argv[1])\n"
        "sys.path.insert(0, 'csrc/build_hooks')\n"
        "import vsa_backend\n"
        "wheel = zipfile.ZipFile(f'out/{vsa_backend.build_wheel(\"out\")}')\n"
        "names = [os.path.basename(wheel.filename), *wheel.namelist()]\n"
        "names += tarfile.open(f'out/{vsa_backend.build_sdist(\"out\")}').getnames()\n"
        "reason = [wheel.read(name).decode() for name in names if name == 'vsa_inductor/_native_build.txt']\n"
        "print('\\n'.join(['', 'BEGIN', *names, *reason]))",
        str(copy),
    ).partition("\nBEGIN\n")[2]
    assert ("vsa_inductor/_native.so" in names) == built
    assert ("-py3-none-any.whl" in names) != built and "-py3-none-" in names
    assert ("there is no compiler" in names) != built
    for needed in ("CMakeLists.txt", "csrc/registration.cpp", "csrc/build_info.cpp.in", "csrc/build_hooks/keep_log.sh"):
        assert f"/{needed}" in names, "a source distribution builds it"


def test_hooks_and_sources_are_where_the_build_looks():
    names = {path.relative_to(ROOT).as_posix() for path in native_build().source_files()}
    assert {"CMakeLists.txt", "csrc/registration.cpp", "csrc/params.h", "csrc/build_info.cpp.in"} <= names
    assert (HOOKS / "keep_log.sh").stat().st_mode & 0o111
