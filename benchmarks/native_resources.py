"""What ptxas gave every kernel of the native library: registers, spills, stack, static shared memory. Builds it first.

    python -m benchmarks.native_resources [--build FOLDER]

Exits with 1 where a kernel spills, or ptxas reports that it did not do as the kernel is written; with 0 where nothing
can be built. Dynamic shared memory is chosen at launch (the traits of each room) and not seen here.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "native"
# Exit status of csrc/build_hooks/native_build.py where something that a build needs is missing.
NOT_BUILT = 2

_ENTRY = re.compile(r"Compiling entry function '(\w+)' for '(\w+)'")
_FUNCTION = re.compile(r"Function properties for (\w+)")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers(?:, used (\d+) barriers)?")
_SHARED = re.compile(r"(\d+) bytes smem")
_MANGLED = re.compile(r"'_Z\w+'")
# Among them: wgmma made serial (C7510 and its kin), setmaxnreg ignored (C7508).
_LOSS = re.compile(r"Potential Performance Loss|setmaxnreg ignored|ptxas warning")


@dataclasses.dataclass(frozen=True)
class KernelResources:
    """One kernel as ptxas reports it; sizes in bytes, registers and spills per thread.

    Attributes:
        source: the file that instantiates it, relative to the checkout.
        kernel: its demangled name without its parameters.
        architecture: such as ``"sm_90a"``.
        losses: what ptxas said it could not do as written.
    """

    source: str
    kernel: str
    architecture: str
    registers: int
    barriers: int
    static_shared: int
    stack: int
    spill_stores: int
    spill_loads: int
    losses: tuple[str, ...]

    @property
    def clean(self) -> bool:
        """Whether nothing of it lives in local memory and ptxas kept its asynchronous instructions."""
        return not (self.spill_stores or self.spill_loads or self.stack or self.losses)


def parse(source: str, printed: str) -> list[KernelResources]:
    """The kernels in what nvcc with ``-Xptxas=-v`` printed for one source file."""
    found: list[KernelResources] = []
    losses = [line.strip() for line in printed.splitlines() if _LOSS.search(line)]
    entry, architecture, current = "", "", ""
    stack = stores = loads = 0
    for line in printed.splitlines():
        if match := _ENTRY.search(line):
            entry, architecture = match.groups()
            stack = stores = loads = 0
        elif match := _FUNCTION.search(line):
            current = match.group(1)
        elif (match := _FRAME.search(line)) and current == entry:
            # Functions that a kernel calls without inlining them have a frame of their own.
            stack, stores, loads = map(int, match.groups())
        elif entry and (match := _USED.search(line)):
            registers, barriers = (int(group or 0) for group in match.groups())
            shared = _SHARED.search(line)
            found.append(
                KernelResources(
                    source, entry, architecture, registers, barriers, int(shared.group(1)) if shared else 0, stack,
                    stores, loads, tuple(loss for loss in losses if entry in loss or not _MANGLED.search(loss)),
                )
            )  # fmt: skip
            entry = ""
    names = _demangled([kernel.kernel for kernel in found])
    return [dataclasses.replace(kernel, kernel=name) for kernel, name in zip(found, names, strict=True)]


def _demangled(names: list[str]) -> list[str]:
    tool = shutil.which("c++filt")
    if tool is None or not names:
        return names
    printed = subprocess.run([tool], input="\n".join(names), capture_output=True, text=True, check=True).stdout
    return [_shortened(name) for name in printed.splitlines()]


def _shortened(name: str) -> str:
    """``void vsa::sm90::(anonymous namespace)::k<T>(P)`` without return type, namespaces of ours, and parameters."""
    name = re.sub(r"\((?:anonymous namespace|_GLOBAL__\w*)\)::|_GLOBAL__N__\w+::|\bvsa::(sm\w+::)?", "", name)
    name = name.removeprefix("void ")
    depth = 0
    for place, letter in enumerate(name):
        depth += (letter == "<") - (letter == ">")
        if letter == "(" and depth == 0:
            return name[:place]
    return name


def kernel_table(build: Path = BUILD) -> list[KernelResources]:
    """Every kernel of a build folder, by source and name. Logs of sources that are gone do not count."""
    return sorted(
        (kernel for source, printed in _logs(build) for kernel in parse(source, printed)),
        key=lambda kernel: (kernel.source, kernel.kernel),
    )


def _logs(build: Path) -> Iterator[tuple[str, str]]:
    for log in sorted(build.glob("CMakeFiles/*.dir/csrc/**/*.cu.o.log")):
        source = str(log).partition(".dir/")[2].removesuffix(".o.log")
        if (ROOT / source).exists():
            yield source, log.read_text()


def formatted(kernels: list[KernelResources]) -> str:
    """The kernels as a table, one a line; what ptxas could not do follows the kernel it concerns."""
    lines = [f"{'registers':>9} {'barriers':>8} {'shared':>7} {'stack':>5} {'spills':>11}  kernel"]
    for k in kernels:
        spills = f"{k.spill_stores}/{k.spill_loads}"
        lines.append(
            f"{k.registers:>9} {k.barriers:>8} {k.static_shared:>7} {k.stack:>5} {spills:>11}  {k.kernel} "
            f"[{k.architecture}, {k.source}]"
        )
        lines += [f"          {loss}" for loss in k.losses]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="Registers and spills of the native kernels.")
    parser.add_argument("--build", type=Path, help="a build folder that is up to date (default: builds build/native)")
    arguments = parser.parse_args()
    if arguments.build is None:
        built = subprocess.run([sys.executable, str(ROOT / "csrc" / "build_hooks" / "native_build.py")], check=False)
        # It has said what is missing, or what the compilers said.
        if built.returncode:
            return 0 if built.returncode == NOT_BUILT else 1
    kernels = kernel_table(arguments.build or BUILD)
    if not kernels:
        print("no kernel was found", file=sys.stderr)
        return 1
    print(formatted(kernels))
    return 0 if all(kernel.clean for kernel in kernels) else 1


if __name__ == "__main__":
    sys.exit(main())
