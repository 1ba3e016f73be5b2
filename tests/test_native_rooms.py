"""The rooms of the native library: each compiled for its own architectures, and none changes another's machine code."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest
from native_library import ROOT, built_library, native_build

from benchmarks import native_disassembly

ALL = "90a;100a;103a"
# By folder in csrc: the architectures it is compiled for where all are built.
ROOMS = {"sm90": {"90a"}, "sm100": {"90a", "100a", "103a"}, "sm100/fwd": {"100a", "103a"}, "sm100/bwd": {"100a"}}

pytestmark = pytest.mark.nvcc


def toolchain():
    try:
        return native_build().find_toolchain()
    except native_build().ToolchainMissing as missing:
        pytest.skip(f"native library: {missing}")


@pytest.fixture(scope="module")
def configured(tmp_path_factory):
    """Compile commands by source, of builds configured for some architectures; what CMake said where it refused."""

    @cache
    def configure(architectures: str) -> dict[str, list[str]] | str:
        tools = toolchain()
        folder = tmp_path_factory.mktemp("configured")
        command = [
            tools.cmake, "-S", str(ROOT), "-B", str(folder), f"-DCMAKE_CUDA_COMPILER={tools.nvcc}",
            f"-DVSA_TORCH={tools.torch}", f"-DVSA_ARCHITECTURES={architectures}", "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON",
        ]  # fmt: skip
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        if ran.returncode:
            return ran.stderr
        commands = json.loads((folder / "compile_commands.json").read_text())
        return {
            str(Path(entry["file"]).relative_to(ROOT)): shlex.split(entry["command"].replace(str(folder), "BUILD"))
            for entry in commands
            if Path(entry["file"]).is_relative_to(ROOT)
        }

    return configure


def images(command: list[str]) -> set[str]:
    return {match.group(1) for word in command if (match := re.fullmatch(r"-gencode=.*code=sm_(\w+)", word))}


def by_room(commands: dict[str, list[str]]) -> dict[str, set[str]]:
    found = defaultdict(set)
    for source, command in commands.items():
        if source.endswith(".cu"):
            folder = "/".join(source.split("/")[1:-1]).replace("/instantiations", "")
            found["sm90" if folder.startswith("sm90") else folder] |= images(command)
    return found


def test_a_room_is_compiled_for_its_architectures(configured):
    rooms = by_room(configured(ALL))
    assert {"sm90", "sm100"} <= set(rooms) <= set(ROOMS)
    assert all(built == ROOMS[room] for room, built in rooms.items())
    assert by_room(configured("100a")) == {room: {"100a"} for room in rooms if room != "sm90"}
    assert by_room(configured("90a")) == {"sm90": {"90a"}, "sm100": {"90a"}}


def test_other_rooms_change_no_command_of_sm90(configured):
    alone, together = configured("90a"), configured(ALL)
    sources = {source for source in alone if source.startswith("csrc/sm90/")}
    assert sources == {path.relative_to(ROOT).as_posix() for path in (ROOT / "csrc" / "sm90").rglob("*.cu")}
    assert all(alone[source] == together[source] for source in sources)


def test_an_architecture_without_a_room_is_refused(configured):
    told = configured("90a;75")
    assert isinstance(told, str) and "holds '75'" in " ".join(told.split())


def cuobjdump_or_skip() -> None:
    try:
        native_disassembly.find_cuobjdump()
    except native_disassembly.NoDisassembler as missing:
        pytest.skip(f"cuobjdump: {missing}")


def test_the_machine_code_of_sm90_is_that_of_a_build_with_it_alone(configured, tmp_path):
    """One source of kernels, to be quick; `python -m benchmarks.native_disassembly` compares whole libraries."""
    cuobjdump_or_skip()
    library = built_library()
    source = "csrc/sm90/bwd/prepare.cu"
    command = configured("90a")[source]
    alone = tmp_path / "alone.o"
    # Of what CMake runs the compiler with, the options of the language and of the machine.
    kept = [word for word in command if re.match(r"-(O|D|X|gencode|std|lineinfo|-expt)", word)]
    command = [toolchain().nvcc, *kept, f"-I{ROOT / 'csrc'}", "-c", str(ROOT / source), "-o", str(alone)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    kernels = native_disassembly.machine_code(alone)
    assert len(kernels) >= 2 and {target for target, _ in kernels} == {"sm_90a"}
    (built,) = library.parent.glob(f"CMakeFiles/*.dir/{source}.o")
    assert native_disassembly.machine_code(built) == kernels


PRINTED = """
Fatbin elf code:
================
arch = sm_90a
\t\tFunction : first
        /*0000*/                   LDC R1, c[0x0][0x28] ;                         /* 0x00000a00ff017b82 */
                                                                                  /* 0x000fe20000000800 */
\t\tFunction : second
        /*0000*/                   EXIT ;                                         /* 0x000000000000794d */
arch = sm_100a
\t\tFunction : first
        /*0000*/                   LDC R1, c[0x0][0x28] ;                         /* 0x00000a00ff017b82 */
                                                                                  /* 0x000fe20000000801 */
"""


def test_what_is_compared_is_the_encoded_instructions():
    kernels = native_disassembly.parse(PRINTED)
    assert set(kernels) == {("sm_90a", "first"), ("sm_90a", "second"), ("sm_100a", "first")}
    assert kernels["sm_90a", "first"] != kernels["sm_100a", "first"], "one bit of the schedule"
    assert native_disassembly.parse(PRINTED.replace("LDC R1, c[0x0][0x28] ;", "LDC   R1 ;")) == kernels
