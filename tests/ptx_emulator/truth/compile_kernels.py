"""Compile `kernels/*.cu` to `ptx/*.ptx` with nvcc: `python compile_kernels.py [NAME ...]`.

The PTX is committed, so that a comparison needs no compiler; run this after a kernel changed, then capture again.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
FLAGS = ("-ptx", "-arch=sm_90a", "-lineinfo")
FILE_DIRECTIVE = re.compile(r'^(\s*\.file\s+\d+\s+)"(?:[^"]*/)?([^"/]+)"', re.MULTILINE)


def portable(ptx: str) -> str:
    """The same PTX with the base names of its sources only.

    Raises:
        ValueError: a path is left over.
    """
    ptx = FILE_DIRECTIVE.sub(r'\1"\2"', ptx)
    for number, line in enumerate(ptx.splitlines(), start=1):
        if str(FOLDER) in line or re.search(r'"/', line):
            raise ValueError(f"line {number} still names a path: {line.strip()}")
    return ptx


def compile_kernels(names: list[str]) -> None:
    """Compile the named sources (without suffix), or all of them."""
    (FOLDER / "ptx").mkdir(exist_ok=True)
    for source in sorted((FOLDER / "kernels").glob("*.cu")):
        if names and source.stem not in names:
            continue
        target = FOLDER / "ptx" / f"{source.stem}.ptx"
        subprocess.run(["nvcc", *FLAGS, source.name, "-o", str(target)], cwd=source.parent, check=True)
        target.write_text(portable(target.read_text()))
        print(f"{target.name}: {target.stat().st_size} bytes")


if __name__ == "__main__":
    compile_kernels(sys.argv[1:])
