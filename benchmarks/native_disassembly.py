"""Whether two builds of the native library hold the same machine code, kernel by kernel.

    python -m benchmarks.native_disassembly FIRST SECOND [--architecture sm_90a]

for libraries or object files. Prints the kernels that differ and those that only one of them has. Exits with 1 where a
kernel of both differs, with 2 where there is no disassembler. Needs no GPU.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

_FUNCTION = re.compile(r"^\s*Function : (\S+)")
_ENCODED = re.compile(r"/\* 0x([0-9a-f]{16}) \*/")
_ARCHITECTURE = re.compile(r"^arch = (\w+)")


class NoDisassembler(Exception):
    """There is no cuobjdump. The message is a sentence."""


def find_cuobjdump() -> str:
    """cuobjdump of $CUDA_HOME, of PATH, or of the package triton, which brings one."""
    home = os.environ.get("CUDA_HOME")
    inside = Path(home) / "bin" / "cuobjdump" if home else None
    if inside is not None and inside.exists():
        return str(inside)
    found = shutil.which("cuobjdump")
    if found:
        return found
    spec = importlib.util.find_spec("triton")
    if spec is not None and spec.origin is not None:
        packaged = Path(spec.origin).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        if packaged.exists():
            return str(packaged)
    raise NoDisassembler("cuobjdump was found neither in $CUDA_HOME/bin nor on PATH nor in the package triton")


def machine_code(file: Path, architecture: str | None = None) -> dict[tuple[str, str], str]:
    """(architecture, mangled kernel) -> digest of its encoded instructions, of a library or an object file."""
    command = [find_cuobjdump(), "-sass", *(["-arch", architecture] if architecture else []), str(file)]
    # Its disassembler stands beside it.
    environment = {**os.environ, "PATH": os.pathsep.join((str(Path(command[0]).parent), os.environ.get("PATH", "")))}
    printed = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    return parse(printed)


def parse(printed: str) -> dict[tuple[str, str], str]:
    """As `machine_code`, of what cuobjdump printed."""
    words: dict[tuple[str, str], list[str]] = {}
    target, current = "", None
    for line in printed.splitlines():
        if match := _ARCHITECTURE.match(line):
            target, current = match.group(1), None
        elif match := _FUNCTION.match(line):
            current = words.setdefault((target, match.group(1)), [])
        elif current is not None:
            current += _ENCODED.findall(line)
    return {kernel: hashlib.sha256(" ".join(code).encode()).hexdigest()[:16] for kernel, code in words.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description="Compares the machine code of two native libraries.")
    parser.add_argument("first", type=Path)
    parser.add_argument("second", type=Path)
    parser.add_argument("--architecture", help="such as sm_90a (default: all)")
    arguments = parser.parse_args()
    try:
        first, second = (machine_code(x, arguments.architecture) for x in (arguments.first, arguments.second))
    except NoDisassembler as missing:
        print(f"nothing is compared: {missing}", file=sys.stderr)
        return 2
    common = first.keys() & second.keys()
    different = sorted(kernel for kernel in common if first[kernel] != second[kernel])
    for title, kernels in (
        ("different", different),
        (f"only in {arguments.first}", sorted(first.keys() - common)),
        (f"only in {arguments.second}", sorted(second.keys() - common)),
    ):
        for target, kernel in kernels:
            print(f"{title}: {target} {kernel}")
    print(f"{len(common) - len(different)} of {len(common)} common kernels have the same machine code")
    return 1 if different or not common else 0


if __name__ == "__main__":
    sys.exit(main())
