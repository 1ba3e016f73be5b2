"""Bytes that the kernels of a compiled block really move, from the GPU's counters, against what they must move.

    python -m benchmarks.block_counters [--video 480p] [--heads 12] [--paths recognised generic] [--output CSV]

Profiles one training step of the block (``block_providers.Block``, ours compiled) under Nsight Compute, once with
RMSNorm, RoPE and tile recognised and done by kernels of ours, and once with the code that Inductor generates where they
are not (``lowerings.norm_rope_tile.recognising(False)``). Each path compiles in a cache of its own. A first process
lists the kernels of the step with their categories and minimal bytes, as block_breakdown has them; a second one runs
under ``ncu``, whose rows are matched with that list in order of launch.

``ncu`` empties the caches before each kernel, so reads are those of a cold L2. What a kernel wrote last stays in L2 and
is not in its DRAM bytes, which can hide up to the L2's 60 MB of writes: the bytes that L2 was asked to take stand
beside them. Rows (metric ``dram_bytes``, one a kernel, every counter in its config) go to data/block_counters.csv.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.block_breakdown import Kernel, Sizes, floor_bytes, operator_of_kernel, traced
from benchmarks.block_providers import VIDEO_SHAPES, Block, BlockCase
from benchmarks.harness import Quantiles, RowWriter
from vsa_inductor.lowerings import norm_rope_tile

PATHS = ("recognised", "generic")
DIRECTIONS = ("forward", "backward")

# Our name, ncu's, and the factor from its base unit to ours.
ESSENTIAL = {
    "dram": ("dram__bytes.sum", 1.0),
    "dram_read": ("dram__bytes_read.sum", 1.0),
    "dram_write": ("dram__bytes_write.sum", 1.0),
    "milliseconds": ("gpu__time_duration.sum", 1e-6),
}
# What tells a kernel that waits for memory from one that cannot issue: width of accesses, occupancy, stalls.
EXPLAINING = {
    "dram_percent": ("dram__throughput.avg.pct_of_peak_sustained_elapsed", 1.0),
    "l2_read": ("lts__t_sectors_op_read.sum", 32.0),
    "l2_write": ("lts__t_sectors_op_write.sum", 32.0),
    "sm_percent": ("sm__throughput.avg.pct_of_peak_sustained_elapsed", 1.0),
    "warps_percent": ("sm__warps_active.avg.pct_of_peak_sustained_active", 1.0),
    "issue_percent": ("smsp__issue_active.avg.pct_of_peak_sustained_active", 1.0),
    "instructions": ("smsp__inst_executed.sum", 1.0),
    "load_sectors_per_request": ("l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_ld.ratio", 1.0),
    "store_sectors_per_request": ("l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_st.ratio", 1.0),
    "load_requests": ("l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum", 1.0),
    "store_requests": ("l1tex__t_requests_pipe_lsu_mem_global_op_st.sum", 1.0),
    "stalled_on_memory": ("smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio", 1.0),
    "stalled_on_queue": ("smsp__average_warps_issue_stalled_lg_throttle_per_issue_active.ratio", 1.0),
    "stalled_on_barrier": ("smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio", 1.0),
    "registers": ("launch__registers_per_thread", 1.0),
    "grid": ("launch__grid_size", 1.0),
    "block": ("launch__block_size", 1.0),
}
_SCALES = {"k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}


@dataclass(frozen=True)
class Counted:
    """One launch under ncu; ``counters`` by our names, absent ones NaN."""

    name: str
    counters: dict[str, float]
    direction: str = ""
    place: str = ""
    category: str = ""
    operator: str = ""
    minimal_bytes: float = math.nan


def _in_base_unit(text: str, unit: str) -> float:
    """``1,234.5`` and its unit, such as Kbyte or usecond: bytes, nanoseconds, or the number itself."""
    try:
        value = float(text.replace(",", ""))
    except ValueError:
        return math.nan
    unit = unit.lower()
    if unit.endswith("byte") and unit != "byte":
        return value * _SCALES.get(unit[0], math.nan)
    if unit in ("ns", "nsecond"):
        return value
    if unit in ("us", "usecond", "ms", "msecond", "s", "second"):
        # "ms" is milli, where "Mbyte" is mega.
        return value * {"u": 1e3, "m": 1e6, "s": 1e9}[unit[0]]
    return value


def read_counters(text: str) -> list[Counted]:
    """Launches of ``ncu --csv --page raw``, in order; lines of the profiled program and of ncu itself are skipped."""
    lines = text.splitlines()
    start = next((number for number, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        return []
    rows = csv.reader(io.StringIO("\n".join(line for line in lines[start:] if line.startswith('"'))))
    header, units = next(rows), next(rows, [])
    names = {column: (name, factor) for name, (column, factor) in {**ESSENTIAL, **EXPLAINING}.items()}
    launches = []
    for row in rows:
        counters = {name: math.nan for name in (*ESSENTIAL, *EXPLAINING)}
        kernel = ""
        for column, unit, text in zip(header, units, row, strict=False):
            if column == "Kernel Name":
                kernel = text
            elif column in names:
                name, factor = names[column]
                counters[name] = _in_base_unit(text, unit) * factor
        launches.append(Counted(kernel, counters))
    return launches


def matched(launches: Sequence[Counted], known: Sequence[dict[str, Any]]) -> list[Counted]:
    """The launches with what the first process knew of them: by order where both saw the same ones, else by name."""

    def same(launch: Counted, entry: dict[str, Any]) -> bool:
        # ncu and the profiler write the arguments of C++ kernels differently.
        return launch.name.split("(")[0].split("<")[0] in entry["name"]

    in_order = len(launches) == len(known) and all(map(same, launches, known))
    found = []
    for number, launch in enumerate(launches):
        entry = known[number] if in_order else next((k for k in known if same(launch, k)), None)
        if entry is None:
            found.append(replace(launch, operator=operator_of_kernel(launch.name)))
            continue
        minimum = math.nan if entry["minimal_bytes"] is None else entry["minimal_bytes"]
        about = {name: entry[name] for name in ("direction", "place", "category", "operator")}
        found.append(replace(launch, minimal_bytes=minimum, **about))
    return found


def table(launches: Sequence[Counted], floors: dict[tuple[str, str, str], float]) -> list[str]:
    """Every region kernel, and the region of both directions against its floor."""
    lines = [
        f"{'kernel':<44} {'MB moved':>9} {'minimum':>9} {'ratio':>6} {'L2 write':>9} {'ms':>7} {'DRAM %':>6} "
        f"{'SM %':>5} {'warps %':>7} {'regs':>5} {'ld s/r':>6} {'st s/r':>6} {'instr M':>8}"
    ]
    for launch in launches:
        if launch.category != "region":
            continue
        c, minimum = launch.counters, launch.minimal_bytes
        lines.append(
            f"{launch.name[:44]:<44} {c['dram'] / 1e6:>9.1f} {minimum / 1e6:>9.1f} {c['dram'] / minimum:>6.2f} "
            f"{c['l2_write'] / 1e6:>9.1f} {c['milliseconds']:>7.3f} {c['dram_percent']:>6.1f} {c['sm_percent']:>5.1f} "
            f"{c['warps_percent']:>7.1f} {c['registers']:>5.0f} {c['load_sectors_per_request']:>6.1f} "
            f"{c['store_sectors_per_request']:>6.1f} {c['instructions'] / 1e6:>8.2f}"
            if minimum
            else f"{launch.name[:44]:<44} {c['dram'] / 1e6:>9.1f} {'(part of the operator before)':>26}"
        )
    for direction in DIRECTIONS:
        for place in ("before", "after"):
            moved, floor = region_bytes(launches, direction, place), floors[direction, "region", place]
            lines.append(
                f"region {direction} {place:<6}: {moved / 1e6:.1f} MB moved, floor {floor / 1e6:.1f}, "
                f"ratio {moved / floor:.2f}"
            )
    return lines


def region_bytes(launches: Sequence[Counted], direction: str, place: str) -> float:
    """DRAM bytes of the region's kernels in one place."""
    return sum(
        launch.counters["dram"]
        for launch in launches
        if (launch.direction, launch.place, launch.category) == (direction, place, "region")
    )


@contextmanager
def _profiler_range() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    yield
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def _entries(kernels: Sequence[Kernel], direction: str) -> list[dict[str, Any]]:
    """For JSON. Copies and fills are no kernels to ncu."""
    return [
        {
            **kernel._asdict(),
            "direction": direction,
            "minimal_bytes": None if math.isnan(kernel.minimal_bytes) else kernel.minimal_bytes,
        }
        for kernel in kernels
        if not kernel.name.startswith(("Memcpy", "Memset"))
    ]


def run_child(task: str, path: str, case: BlockCase, listing: Path) -> None:
    """In a process of its own: lists the kernels of a step, or runs the step for ncu to count."""
    with norm_rope_tile.recognising(path == "recognised"):
        block = Block("ours_compiled", case)
        block.step(), block.step()
        kept: list[torch.Tensor] = []

        def forward() -> None:
            kept[:] = [block.training_forward()]

        def backward() -> None:
            block.backward(kept[0])

        if task == "list":
            sizes = Sizes.of(case)
            entries = [
                entry
                for direction, run in zip(DIRECTIONS, (forward, backward), strict=True)
                for entry in _entries(traced(run, sizes), direction)
            ]
            listing.write_text(json.dumps(entries))
        else:
            for run in (forward, backward):
                with _profiler_range():
                    run()


def _child_command(task: str, path: str, case: BlockCase, listing: Path) -> list[str]:
    words = ["--child", task, path, str(listing), "--video", case.video, "--heads", str(case.heads)]
    return [sys.executable, "-m", "benchmarks.block_counters", *words, "--sparsity", str(case.sparsity)]


def _run(command: list[str], environment: dict[str, str], what: str) -> str:
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"{what} ended with {result.returncode}: {(result.stderr or result.stdout)[-2000:]}")
    return result.stdout


def _environment(path: str, folder: Path) -> dict[str, str]:
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(folder / path), "TRITON_CACHE_DIR": str(folder / path / "triton")}
    return {**os.environ, **caches}


def list_kernels(case: BlockCase, path: str, folder: Path) -> list[dict[str, Any]]:
    """What the profiler knows of the kernels of one step; compiles it into the path's cache."""
    listing = folder / f"{path}.json"
    command = _child_command("list", path, case, listing)
    _run(command, _environment(path, folder), f"listing the kernels ({path})")
    entries: list[dict[str, Any]] = json.loads(listing.read_text())
    return entries


def count(case: BlockCase, path: str, folder: Path, ncu: str, known: Sequence[dict[str, Any]]) -> list[Counted]:
    """The launches of one step on one path; ``folder`` holds its caches and its files."""
    log = folder / f"{path}.csv"
    # Compiled already; a pool of compilers would be one more tree of processes under the profiler.
    environment = {**_environment(path, folder), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    for metrics in ({**ESSENTIAL, **EXPLAINING}, ESSENTIAL):
        options = ["--clock-control", "none", "--profile-from-start", "off", "--csv", "--page", "raw"]
        options += ["--print-units", "base", "--target-processes", "application-only", "--log-file", str(log), "-f"]
        options += ["--metrics", ",".join(metric for metric, _ in metrics.values())]
        try:
            _run([ncu, *options, *_child_command("count", path, case, log)], environment, f"ncu ({path})")
        except RuntimeError as error:
            # Another release of ncu may not have every metric: the bytes alone are worth having.
            print(error, log.read_text()[-2000:] if log.exists() else "", sep="\n", file=sys.stderr)
            continue
        launches = read_counters(log.read_text())
        if launches and not math.isnan(launches[0].counters["dram"]):
            return matched(launches, known)
        print(f"ncu ({path}) counted nothing: {log.read_text()[-2000:]}", file=sys.stderr)
    raise RuntimeError(f"ncu counted nothing on the {path} path")


def write_rows(writer: RowWriter, case: BlockCase, path: str, launches: Sequence[Counted]) -> None:
    """A row per launch, and one per place of the region."""

    def record(metric: str, unit: str, value: float, mode: str, x: tuple[str, float], **config: Any) -> None:
        writer.write(
            kernel="attention_block",
            provider="ours_compiled",
            mode=mode,
            metric=metric,
            unit=unit,
            x_name=x[0],
            x_value=x[1],
            quantiles=Quantiles(value, value, value),
            config=case.config(path=path, **config),
        )

    for order, launch in enumerate(launches):
        counters = {k: float(f"{v:.6g}") for k, v in launch.counters.items() if not math.isnan(v)}
        minimum = None if math.isnan(launch.minimal_bytes) else launch.minimal_bytes
        record(
            "dram_bytes", "bytes", launch.counters["dram"], launch.direction, ("order", order),
            kernel_name=launch.name, place=launch.place, category=launch.category, operator=launch.operator,
            minimal_bytes=minimum, counters=counters,
        )  # fmt: skip
    floors = floor_bytes(case)
    for direction in DIRECTIONS:
        for place in ("before", "after"):
            floor = floors[direction, "region", place]
            ratio = region_bytes(launches, direction, place) / floor
            x = ("tokens", float(case.tokens))
            record("dram_over_floor", "ratio", ratio, direction, x, place=place, category="region", floor_bytes=floor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--video", choices=tuple(VIDEO_SHAPES), default="480p")
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--sparsity", type=float, default=0.9)
    parser.add_argument("--paths", nargs="+", choices=PATHS, default=list(PATHS))
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "data" / "block_counters.csv")
    parser.add_argument("--keep", type=Path, help="a folder for ncu's own files and the lists of kernels")
    parser.add_argument("--commit", help="recorded commit, where the checkout has no git")
    parser.add_argument("--child", nargs=3, metavar=("TASK", "PATH", "LISTING"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    case = BlockCase(args.video, args.heads, args.sparsity)
    if args.child:
        task, path, listing = args.child
        return run_child(task, path, case, Path(listing))
    ncu = shutil.which("ncu")
    if ncu is None or not torch.cuda.is_available():
        parser.error("needs ncu (Nsight Compute) on the PATH and a CUDA device")
    writer = RowWriter(args.output, args.commit)
    with tempfile.TemporaryDirectory() as folder:
        # Compilation is what takes time here. The counters are the device's: one process at a time may move bytes.
        with ThreadPoolExecutor(len(args.paths)) as pool:
            known = list(pool.map(lambda path: list_kernels(case, path, Path(folder)), args.paths))
        counted = [
            count(case, path, Path(folder), ncu, kernels) for path, kernels in zip(args.paths, known, strict=True)
        ]
        if args.keep:
            args.keep.mkdir(parents=True, exist_ok=True)
            for file in (*Path(folder).glob("*.csv"), *Path(folder).glob("*.json")):
                shutil.copy(file, args.keep)
    for path, launches in zip(args.paths, counted, strict=True):
        write_rows(writer, case, path, launches)
        print(f"{case.name}, {path}", *table(launches, floor_bytes(case)), sep="\n")


if __name__ == "__main__":
    main()
