"""What stands in front of the attention of a video model: RMSNorm, rotary embedding, tile order, sums over tiles.

    python -m benchmarks.bench_prologue [--providers P ...] [--workers N] [--device cpu --tiny]

q and k are normed (over all heads together as Wan does, or over each head) and rotated (interleaved pairs with strided
stores as Wan does, halves, or the complex product of diffusers); v is plain. All three go to tile order and are summed
over tiles, as `video_sparse_attention` has it. Plain torch around `vsa::tile` and `vsa::tile_sums`, no gradients.

Providers: `recognised`, compiled; `generic`, compiled with recognition of the formula off; `eager`. The last two for
Wan's form only. A short sparse attention stands behind, by which the three tiles are known to belong together; the time
is that of the kernels in front of it, from the profiler (median of calls). The floor is every row read once and every
row of tiles written once, at the rate of a device copy of the same run; tables, weights and sums are left out of it.
The bar is 1.2 of the floor.

Worker processes first compile everything into a cache.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import math
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import vsa_inductor as vsa
from benchmarks.block_breakdown import profiled
from benchmarks.block_precompile import use_cache
from benchmarks.block_providers import VIDEO_SHAPES
from benchmarks.harness import Quantiles, RowWriter, measure
from vsa_inductor.lowerings import norm_rope_tile

PROVIDERS = ("recognised", "generic", "eager")
NORMS = ("all", "head")
FORMS = ("interleaved", "half", "complex")
BAR = 1.2
RECORD = Path(__file__).resolve().parent / "data" / "bench_prologue.csv"
EPS = 1e-6


@dataclass(frozen=True)
class Case:
    """One provider on one form and shape."""

    provider: str
    form: str
    norm: str
    video: str
    heads: int
    head_dim: int = 128
    block_size: int = 64
    seed: int = 0
    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16

    @property
    def tokens(self) -> int:
        return math.prod(VIDEO_SHAPES[self.video])

    @property
    def slots(self) -> int:
        return vsa.TileLayout.from_video_shape(*VIDEO_SHAPES[self.video]).num_slots

    @property
    def name(self) -> str:
        return f"{self.video} H{self.heads} {self.form}, norm {self.norm}, {self.provider}"

    def layout(self) -> vsa.TileLayout:
        return vsa.TileLayout.from_video_shape(*VIDEO_SHAPES[self.video], device=self.device)

    def floor_bytes(self) -> int:
        """q, k, v in raster order read, in tile order written."""
        rows = 3 * (self.tokens + self.slots)
        return rows * self.heads * self.head_dim * self.dtype.itemsize

    def config(self) -> dict[str, Any]:
        """The JSON of the record."""
        return {
            "form": self.form,
            "norm": self.norm,
            "shape": [1, self.tokens, self.heads, self.head_dim],
            "video": self.video,
            "video_shape": VIDEO_SHAPES[self.video],
            "slots": self.slots,
            "heads": self.heads,
            "head_dim": self.head_dim,
            "block_size": self.block_size,
            "seed": self.seed,
            "dtype": str(self.dtype).removeprefix("torch."),
        }


def interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs (2i, 2i + 1) by strided stores; tables ``[1, S, 1, D]`` hold every angle twice in a row."""
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    c, s = cos[..., 0::2], sin[..., 1::2]
    out = torch.empty_like(x)
    out[..., 0::2] = even * c - odd * s
    out[..., 1::2] = even * s + odd * c
    return out


def half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs (i, i + D / 2); tables ``[1, S, 1, D]`` hold all angles twice, one after another."""
    first, second = x.chunk(2, -1)
    return (x * cos + torch.cat((-second, first), -1) * sin).type_as(x)


def complex_product(x: Tensor, turns: Tensor) -> Tensor:
    """Pairs (2i, 2i + 1) as complex numbers times ``turns [1, S, 1, D / 2]`` complex64."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns).flatten(-2).type_as(x)


ROTATIONS: dict[str, Callable[..., Tensor]] = {"interleaved": interleaved, "half": half, "complex": complex_product}


def tables(case: Case) -> tuple[Tensor, ...]:
    """What the rotation of ``case`` multiplies by: random angles, as no time depends on them."""
    generator = torch.Generator(case.device).manual_seed(case.seed + 1)
    angles = torch.rand(1, case.tokens, 1, case.head_dim // 2, device=case.device, generator=generator) * 2 * math.pi
    if case.form == "complex":
        return (torch.polar(torch.ones_like(angles), angles),)
    twice = torch.cat((angles, angles), -1) if case.form == "half" else angles.repeat_interleave(2, -1)
    return twice.cos(), twice.sin()


class Prologue:
    """One case with its operands: ``run()`` is what is measured."""

    def __init__(self, case: Case) -> None:
        self.case = case
        generator = torch.Generator(case.device).manual_seed(case.seed)

        def randn(*size: int) -> Tensor:
            return torch.randn(size, device=case.device, dtype=case.dtype, generator=generator)

        channels = case.heads * case.head_dim
        width = channels if case.norm == "all" else case.head_dim
        self._operands = [randn(1, case.tokens, channels) for _ in range(3)]
        self._weights = [randn(width) for _ in range(2)]
        self._tables = tables(case)
        self._layout = case.layout()
        # One block for every q block: as short as an attention can be.
        blocks = self._layout.num_blocks
        self._lists = (
            torch.zeros(1, case.heads, blocks, 1, dtype=torch.int32, device=case.device),
            torch.ones(1, case.heads, blocks, dtype=torch.int32, device=case.device),
        )
        self._run = torch.compile(self._plain, fullgraph=True, dynamic=False)
        if case.provider == "eager":
            self._run = self._plain

    def _plain(self, operands: Sequence[Tensor], weights: Sequence[Tensor], tables: Sequence[Tensor]) -> list[Tensor]:
        case, layout = self.case, self._layout
        rotate = ROTATIONS[case.form]

        def normed(x: Tensor, weight: Tensor) -> Tensor:
            if case.norm == "all":
                return F.rms_norm(x, weight.shape, weight, EPS).unflatten(2, (case.heads, -1))
            return F.rms_norm(x.unflatten(2, (case.heads, -1)), weight.shape, weight, EPS)

        q, k, v = operands
        rows = [rotate(normed(x, weight), *tables) for x, weight in zip((q, k), weights, strict=True)]
        rows.append(v.unflatten(2, (case.heads, -1)))
        tiles = [torch.ops.vsa.tile(x, layout.token_slot, layout.slot_token) for x in rows]
        sums = [torch.ops.vsa.tile_sums(x, case.block_size) for x in tiles]
        (q, k, v), (ids, counts), sizes = tiles, self._lists, layout.kv_block_sizes
        out = vsa.block_sparse_attention(q, k, v, ids, counts, sizes, block_size=case.block_size)
        assert isinstance(out, Tensor)
        return [*tiles, *sums, out]

    def run(self) -> list[Tensor]:
        """Tiles of q, k, v, their sums, and the attention's output."""
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(norm_rope_tile.recognising(self.case.provider == "recognised"))
            return self._run(self._operands, self._weights, self._tables)


def compile_once(case: Case) -> str:
    """Fills the caches; what went wrong, or an empty string."""
    try:
        Prologue(case).run()
        if case.device == "cuda":
            torch.cuda.synchronize()
    except Exception as error:
        return f"{case.name}: {type(error).__name__}: {str(error).strip()[:200]}"
    finally:
        forget(case.device)
    return ""


def forget(device: str) -> None:
    """Frees what a case held, compiled code too."""
    torch.compiler.reset()
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def precompile(cases: Sequence[Case], workers: int) -> list[str]:
    """Compiles ``cases`` in ``workers`` processes; a line for each that failed: it is compiled when it is timed."""
    # Each process compiles one kernel after another: together they fill the machine.
    before = os.environ.get("TORCHINDUCTOR_COMPILE_THREADS")
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    try:
        with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
            return [line for line in pool.map(compile_once, cases) if line]
    finally:
        os.environ.pop("TORCHINDUCTOR_COMPILE_THREADS")
        if before is not None:
            os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = before


def plan(videos: Sequence[str], heads: Sequence[int], **more: Any) -> list[Case]:
    """Every form recognised; Wan's by the other providers too."""
    cases = []
    for video, h in itertools.product(videos, heads):
        cases += [Case("recognised", form, norm, video, h, **more) for form in FORMS for norm in NORMS]
        cases += [Case(provider, FORMS[0], NORMS[0], video, h, **more) for provider in PROVIDERS[1:]]
    return cases


def time_before_attention(prologue: Prologue) -> Quantiles:
    """Milliseconds of the kernels in front of the attention; the wall clock's of everything on a CPU, to see it run."""
    prologue.run()
    if prologue.case.device != "cuda":
        started = time.perf_counter()
        prologue.run()
        elapsed = (time.perf_counter() - started) * 1e3
        return Quantiles(elapsed, elapsed, elapsed)
    kernels = profiled(lambda _: prologue.run(), repeats=9)
    total = sum(kernel.milliseconds for kernel in kernels if kernel.place == "before")
    return Quantiles(total, total, total)


def copy_rate(device: str) -> float:
    """Bytes read plus written per millisecond by a device copy."""
    size = 1 << (30 if device == "cuda" else 22)
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    if device == "cuda":
        return measure(lambda: target.copy_(source)).rate(2 * size).p50
    started = time.perf_counter()
    target.copy_(source)
    return 2 * size / ((time.perf_counter() - started) * 1e3)


def measure_case(case: Case, rate: float, writer: RowWriter) -> str:
    """Times ``case`` and writes its rows; the line of the table."""
    prologue = Prologue(case)
    times = time_before_attention(prologue)
    floor = case.floor_bytes() / rate
    over = Quantiles(*(value / floor for value in times))
    for metric, unit, quantiles in (("time", "ms", times), ("time_over_floor", "ratio", over)):
        writer.write(
            kernel="prologue",
            provider=case.provider,
            mode="inference",
            metric=metric,
            unit=unit,
            x_name="tokens",
            x_value=case.tokens,
            quantiles=quantiles,
            config=case.config(),
        )
    verdict = "" if case.provider != "recognised" else "ok" if over.p50 <= BAR else "MISSED"
    return f"{case.name:48s} {times.p50:8.4f} ms  floor {floor:7.4f}  x{over.p50:5.2f} {verdict}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a few tokens and heads: to see that it runs")
    parser.add_argument("--providers", nargs="+", choices=PROVIDERS, default=PROVIDERS)
    parser.add_argument("--workers", type=int, default=min(14, os.cpu_count() or 1), help="0: compile when timing")
    parser.add_argument("--output", type=Path, default=RECORD)
    parser.add_argument("--commit", help="of the rows, where the checkout is not one of git")
    args = parser.parse_args()
    started = time.perf_counter()
    more: dict[str, Any] = {"device": args.device}
    if args.tiny:
        more |= {"head_dim": 32, "dtype": torch.float32 if args.device == "cpu" else torch.bfloat16}
    cases = plan(("tiny",), (2,), **more) if args.tiny else plan(("480p", "720p"), (12, 40), **more)
    cases = [case for case in cases if case.provider in args.providers]
    writer = RowWriter(args.output, args.commit)
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        use_cache(Path(folder))
        if args.workers:
            for line in precompile([case for case in cases if case.provider != "eager"], args.workers):
                print(f"# not precompiled: {line}")
        rate = copy_rate(args.device)
        print(f"# copy {rate / 1e9:.2f} TB/s, {time.perf_counter() - started:.0f} s", flush=True)
        for case in cases:
            try:
                print(measure_case(case, rate, writer), flush=True)
            except Exception as error:
                failed.append(f"{case.name}: {type(error).__name__}: {str(error).strip()[:300]}")
                print(f"# failed: {failed[-1]}", flush=True)
            forget(args.device)
    print(f"# {len(writer.rows)} rows in {args.output}, {time.perf_counter() - started:.0f} s")
    if failed:
        raise SystemExit(f"{len(failed)} cases failed")


if __name__ == "__main__":
    main()
