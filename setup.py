"""The native library as an extension module, where it can be built; everything else is in pyproject.toml."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).resolve().parent / "csrc" / "build_hooks"))
import native_build

NAME = "vsa_inductor._native"
# Of vsa_inductor/native.py, which reads the file.
REASON_FILE = Path("vsa_inductor") / "_native_build.txt"

try:
    TOOLCHAIN, REASON = native_build.find_toolchain(), None
except native_build.ToolchainMissing as missing:
    TOOLCHAIN, REASON = None, str(missing)


class BuildNative(build_ext):
    """Builds it with CMake. A failure ends the installation with the words of the compilers."""

    def get_ext_filename(self, fullname: str) -> str:
        # No part of Python's ABI is used: no tag of it in the name.
        return str(Path(*fullname.split(".")).with_suffix(".so"))

    def build_extension(self, ext: Extension) -> None:
        library, _ = native_build.build(toolchain=TOOLCHAIN)
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        # Renamed into place: a process may have the old one mapped.
        partial = target.with_suffix(".partial")
        shutil.copyfile(library, partial)
        partial.replace(target)


class BuildPython(build_py):
    """Leaves the reason beside the package where there is no library."""

    def run(self) -> None:
        super().run()
        target = REASON_FILE if self.editable_mode else Path(self.build_lib) / REASON_FILE
        if REASON is None:
            target.unlink(missing_ok=True)
        else:
            print(f"vsa_inductor is installed without its native library: {REASON}", file=sys.stderr)
            target.write_text(REASON + "\n")


class PlatformWheel(bdist_wheel):
    """For this platform, and for every Python."""

    def get_tag(self) -> tuple[str, str, str]:
        python, abi, platform = super().get_tag()
        return (python, abi, platform) if TOOLCHAIN is None else ("py3", "none", platform)


setup(
    ext_modules=[] if TOOLCHAIN is None else [Extension(NAME, sources=[])],
    cmdclass={"build_ext": BuildNative, "build_py": BuildPython, "bdist_wheel": PlatformWheel},
)
