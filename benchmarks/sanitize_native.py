"""compute-sanitizer over every native kernel, on problems of a few blocks: memcheck, racecheck, synccheck.

    python -m benchmarks.sanitize_native [--library PATH] [--tools memcheck,racecheck,synccheck] [--cases TEXT]

Runs the operators by the library and prints a table of findings. Exits with 1 where a tool found something that is not
explained or a case did not run to its end, with 2 where there is no tool or no device. `--list` prints the cases.

Problems are small but not simple: an odd number of kv blocks, counts that differ, 0 among them, lists so long that
every ring of the kernels goes round, sizes from 0 to full, entries past the counts that are no ids. One is long enough
for the backward to order its work. Tensors are allocations of their own, so that memcheck knows where they end.

Racecheck (2025.3.1, CUDA 13.0) does not follow one way of ours to hand over, in a kernel of a few lines neither: the
lanes of a warp write or read, meet in `__syncwarp`, and the elected one arrives at an mbarrier for all of them
(`ptx::arrive_warp`). It orders only what the arriving lane did itself. So every hazard of that kind has another lane's
access as the earlier one, and is shown as explained where no hazard between the same two places begins with the elected
lane. With an arrival of every lane it reports nothing; without any, the elected lane's access as well.

Copies by the tensor units and what wgmma reads are not seen by it: tests/ptx_emulator checks those, in every order.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

import vsa_inductor as vsa

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ("memcheck", "racecheck", "synccheck")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
HEAD_DIMS = (64, 128)
BLOCK_SIZES = (64, 128)
# What the backward launches follows from these: (deterministic, needs_dq, needs_dkv).
BACKWARD_FORMS = {
    "fused": (False, True, True),
    "deterministic": (True, True, True),
    "dq only": (False, True, False),
    "dkv only": (False, False, True),
}
# From this number of kv blocks on the backward orders its work (csrc/sm90/bwd/prepare.cu).
ORDERED_BLOCKS = 256
UNAVAILABLE = 2
# Findings shown with their details, per tool and case.
_SHOWN = 2
_BEGIN, _END = "sanitize_native: begin ", "sanitize_native: end "


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of an operator; ``form`` is "forward" or one of `BACKWARD_FORMS`."""

    form: str
    dtype: str
    head_dim: int
    block_size: int = 64
    num_q: int = 20
    num_kv: int = 13
    width: int = 12

    @property
    def name(self) -> str:
        order = ", ordered" if self.num_kv >= ORDERED_BLOCKS else ""
        return f"{self.form} {self.dtype} D {self.head_dim} block {self.block_size}{order}"

    @property
    def label(self) -> str:
        """The name as one word, for the command line and the markers."""
        return self.name.replace(",", "").replace(" ", "-")


def cases() -> list[Case]:
    """Calls that together launch every kernel of the library."""
    found = [
        Case("forward", dtype, head_dim, block, num_q=3, num_kv=33, width=31)
        for dtype in DTYPES
        for head_dim in HEAD_DIMS
        for block in BLOCK_SIZES
    ]
    found += [Case(form, dtype, head_dim) for form in BACKWARD_FORMS for dtype in DTYPES for head_dim in HEAD_DIMS]
    found.append(Case("fused", "bf16", 64, num_q=3, num_kv=ORDERED_BLOCKS + 1, width=6))
    return found


def run_case(case: Case) -> tuple[Tensor, ...]:
    """Calls the native operator once, and the forward once more without lse."""
    generator = torch.Generator().manual_seed(0)
    heads, block = 2, case.block_size

    def operand(blocks: int) -> Tensor:
        shape = (1, heads, blocks * block, case.head_dim)
        return torch.randn(shape, generator=generator).to(DTYPES[case.dtype])

    q, dout, k, v = operand(case.num_q), operand(case.num_q), operand(case.num_kv), operand(case.num_kv)
    scores = torch.rand(1, heads, case.num_q, case.num_kv, generator=generator)
    ids = scores.topk(case.width).indices.sort().values.int()
    least = case.width // 2
    counts = torch.randint(least, case.width + 1, ids.shape[:3], generator=generator, dtype=torch.int32)
    counts[..., 0], counts[..., -1] = case.width, 0
    ids[torch.arange(case.width) >= counts[..., None]] = -1
    sizes = torch.randint(0, block + 1, (case.num_kv,), generator=generator, dtype=torch.int32)
    sizes[0], sizes[1] = 0, block
    static = (case.head_dim**-0.5, block)
    on_gpu = [x.cuda() for x in (q, k, v, ids, counts, sizes)]
    if case.form == "forward":
        outputs = torch.ops.vsa.attention_sm90(*on_gpu, *static, True, False)
        return (*outputs, *torch.ops.vsa.attention_sm90(*on_gpu, *static, False, False))
    # What the kernels are given comes from the CPU: nothing but them is instrumented.
    out, lse = torch.ops.vsa.attention_eager(q, k, v, ids, counts, sizes, *static, True, False)
    transposed = torch.ops.vsa.transpose_blocks(ids, counts, case.num_kv)
    given = (dout, lse, q, k, v, out, lse, ids, counts, *transposed, sizes)
    on_gpu = [x.cuda() for x in given]
    on_gpu[1] = torch.zeros_like(on_gpu[1])  # dlse: lse of an empty row is infinite
    return tuple(torch.ops.vsa.attention_backward_sm90_eager(*on_gpu, *static, *BACKWARD_FORMS[case.form]))


def _run_labels(labels: Sequence[str]) -> None:
    by_label = {case.label: case for case in cases()}
    for label in labels:
        print(_BEGIN + label, flush=True)
        outputs = run_case(by_label[label])
        torch.cuda.synchronize()
        assert all(bool(x.float().isnan().logical_not().all()) for x in outputs), f"{label}: NaN"
        print(_END + label, flush=True)


@dataclasses.dataclass(frozen=True)
class Finding:
    """One report of a tool, or hazards of one kind between the same two places of the code.

    Attributes:
        headline, details: what it says, and the lines under it.
        explained: why it is no error, or nothing.
    """

    headline: str
    details: tuple[str, ...] = ()
    explained: str = ""


# What a tool prints that is no finding.
_CHATTER = re.compile(r"COMPUTE-SANITIZER|(ERROR|RACECHECK|LEAK) SUMMARY|Target application returned|^$")
_LINE = re.compile(r"^=========(?: (.*))?$")
_HAZARD = re.compile(r"(\w+): Potential (\w+) hazard")
_ACCESS = re.compile(r"(Read|Write) Thread \((\d+),\d+,\d+\) at (.*)\+0x\w+ in (\S+:\d+)")
_SHOWN_OF = re.compile(r"RACECHECK SUMMARY: (\d+) hazards displayed \((\d+) errors, (\d+) warnings\)")
_WARP = "only lanes that another one arrives for come first"


def parse(printed: str) -> tuple[dict[str, list[Finding]], set[str]]:
    """Findings by case, and the cases that ran to their end. Findings outside any case are under ``""``."""
    reports: dict[str, list[Finding]] = collections.defaultdict(list)
    ended: set[str] = set()
    label = ""
    for line in printed.splitlines():
        if line.startswith(_BEGIN):
            label = line.removeprefix(_BEGIN)
        elif line.startswith(_END):
            ended.add(line.removeprefix(_END))
        elif match := _LINE.match(line):
            text = match[1] or ""
            if (shown := _SHOWN_OF.search(text)) and int(shown[1]) < int(shown[2]) + int(shown[3]):
                reports[""].append(Finding(f"not all were printed: {text}"))
            if text.startswith(" ") and reports[label]:
                last = reports[label][-1]
                reports[label][-1] = dataclasses.replace(last, details=(*last.details, text.strip()))
            elif not text.startswith(" ") and not _CHATTER.search(text):
                reports[label].append(Finding(text))
    return {name: condensed(found) for name, found in reports.items() if found}, ended


def condensed(reports: Iterable[Finding]) -> list[Finding]:
    """The reports, hazards between the same two places as one, which is explained if all of them are."""
    hazards: dict[tuple[str, ...], set[int]] = collections.defaultdict(set)
    counts: collections.Counter[tuple[str, ...]] = collections.Counter()
    others = []
    for report in reports:
        accesses = [match for detail in report.details if (match := _ACCESS.match(detail))]
        hazard = _HAZARD.match(report.headline)
        if hazard is None or len(accesses) != 2:
            others.append(report)
            continue
        places = (f"{access[1]} in {_plain(access[3])}, {access[4]}" for access in accesses)
        key = (hazard[1], hazard[2], *places)
        counts[key] += 1
        hazards[key].add(int(accesses[0][2]) % _WARP_SIZE)
    found = []
    for key, lanes in hazards.items():
        severity, kind, first, second = key
        explained = "" if _ELECTED in lanes else _WARP
        listed = ", ".join(map(str, sorted(lanes)))
        headline = f"{severity}: {counts[key]} {kind} hazards, lanes {listed} first"
        found.append(Finding(headline, (f"first {first}", f"then {second}"), explained))
    return [*others, *found]


_WARP_SIZE = 32
# What elect.sync chooses in a whole warp.
_ELECTED = 0


def _plain(function: str) -> str:
    """A demangled name without template arguments and parameters."""
    before = ""
    while function != before:
        before, function = function, re.sub(r"<[^<>]*>|\([^()]*\)", "", function)
    # Of a lambda, the function that it stands in.
    return function.partition("::[")[0].strip().removesuffix(" const").rpartition(" ")[2]


@dataclasses.dataclass
class Result:
    """What one tool said about the cases."""

    tool: str
    findings: dict[str, list[Finding]] = dataclasses.field(default_factory=dict)
    ended: set[str] = dataclasses.field(default_factory=set)
    printed: str = ""

    def add(self, part: Result) -> None:
        """Takes what another process under the same tool said."""
        for label, found in part.findings.items():
            self.findings.setdefault(label, []).extend(found)
        self.ended |= part.ended
        self.printed += part.printed

    def errors(self, label: str) -> list[Finding]:
        """What it found in a case and nothing explains."""
        return [finding for finding in self.findings.get(label, ()) if not finding.explained]


def sanitize(tool: str, labels: Iterable[str], library: str | None, timeout: float) -> Result:
    """Runs cases under one tool. A case that ends the process is left behind, and the rest run in another one."""
    result, remaining = Result(tool), list(labels)
    # Allocations that are not pooled, and no wait for a compiler that nobody needs.
    env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "CUDA_MODULE_LOADING": "LAZY"}
    while remaining:
        command = [
            "compute-sanitizer",
            "--tool",
            tool,
            "--kernel-name",
            "kernel_substring=vsa",
            "--print-limit",
            "100000",
        ]
        command += ["--show-backtrace", "device", "--racecheck-report", "hazard"]
        command += [sys.executable, "-m", "benchmarks.sanitize_native", "--run", *remaining]
        if library:
            command += ["--library", library]
        try:
            ran = subprocess.run(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout, check=False,
                env=env, cwd=ROOT,
            )  # fmt: skip
            printed = ran.stdout
        except subprocess.TimeoutExpired as expired:
            partial = expired.stdout or b""
            printed = partial.decode() if isinstance(partial, bytes) else partial
            printed += f"\n========= ended by sanitize_native after {timeout:.0f} s\n"
        findings, ended = parse(printed)
        result.add(Result(tool, findings, ended, printed))
        begun = {line.removeprefix(_BEGIN) for line in printed.splitlines() if line.startswith(_BEGIN)}
        if not begun:
            break
        remaining = [label for label in remaining if label not in begun]
    return result


def formatted(results: Sequence[Result], labels: Sequence[str]) -> str:
    """A row per case and a column per tool: "clean", the number of findings, or "did not end"; then the findings."""

    def cell(result: Result, label: str) -> str:
        if errors := result.errors(label):
            return f"{len(errors)} found"
        if label not in result.ended:
            return "did not end"
        explained = len(result.findings.get(label, ()))
        return f"clean ({explained} explained)" if explained else "clean"

    width = max(map(len, labels), default=4) + 2
    lines = [f"{'case':{width}}" + "".join(f"{result.tool:21}" for result in results)]
    lines += [f"{label:{width}}" + "".join(f"{cell(result, label):21}" for result in results) for label in labels]
    for result in results:
        for label in result.findings:
            if errors := result.errors(label):
                lines += ["", f"{result.tool}, {label or 'outside any case'}: {len(errors)} found"]
            for finding in errors[:_SHOWN]:
                lines += [f"  {finding.headline}", *(f"    {detail}" for detail in finding.details[:6])]
        explained = collections.Counter(
            (finding.explained, finding.details)
            for found in result.findings.values()
            for finding in found
            if finding.explained
        )
        if explained:
            lines += ["", f"{result.tool}, explained:"]
        for (reason, details), count in sorted(explained.items()):
            lines += [f"  {reason}, {count} times", *(f"    {detail}" for detail in details)]
    return "\n".join(lines)


def clean(results: Sequence[Result], labels: Iterable[str]) -> bool:
    """Whether every case ran to its end under every tool, and nothing was found that is not explained."""
    wanted = set(labels)
    return all(wanted <= result.ended and not any(map(result.errors, result.findings)) for result in results)


def main() -> int:
    parser = argparse.ArgumentParser(description="compute-sanitizer over every native kernel.")
    parser.add_argument("--library", help="a native library to load (default: the packaged one)")
    parser.add_argument("--tools", default=",".join(TOOLS), help="of compute-sanitizer, with commas between")
    parser.add_argument("--cases", default="", help="only cases whose name holds this")
    parser.add_argument("--jobs", type=int, default=3, help="processes at a time")
    parser.add_argument("--timeout", type=float, default=600, help="seconds of one process")
    parser.add_argument("--log", type=Path, help="a folder for everything the tools print")
    parser.add_argument("--list", action="store_true", help="print the cases")
    parser.add_argument("--run", nargs="+", metavar="CASE", help="run cases in this process, without a tool")
    arguments = parser.parse_args()
    labels = [case.label for case in cases() if arguments.cases in case.label or arguments.cases in case.name]
    if arguments.list:
        print("\n".join(labels))
        return 0
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        print("sanitize_native: no device of compute capability 9.0 here")
        return UNAVAILABLE
    if arguments.run:
        if arguments.library:
            vsa.load_library(arguments.library)
        _run_labels(arguments.run)
        return 0
    if shutil.which("compute-sanitizer") is None:
        print("sanitize_native: compute-sanitizer is not on PATH; it comes with the CUDA toolkit")
        return UNAVAILABLE
    tools = arguments.tools.split(",")
    # More processes than tools: each takes a share of the cases.
    shares = max(1, arguments.jobs // len(tools))
    work = [(tool, labels[share::shares]) for tool in tools for share in range(shares)]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        done = list(pool.map(lambda item: sanitize(item[0], item[1], arguments.library, arguments.timeout), work))
    results = []
    for tool in tools:
        whole = Result(tool)
        for part in done:
            if part.tool == tool:
                whole.add(part)
        results.append(whole)
    if arguments.log:
        arguments.log.mkdir(parents=True, exist_ok=True)
        for result in results:
            (arguments.log / f"{result.tool}.txt").write_text(result.printed)
    print(formatted(results, labels))
    return 0 if clean(results, labels) else 1


if __name__ == "__main__":
    sys.exit(main())
