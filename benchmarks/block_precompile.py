"""Fills the disk caches of Inductor and Triton by several processes at once, so that timing starts warm and alone.

Compilation bounds the block benchmark: a cold case takes half a minute and more, its timing a second. Each worker is a
fresh process that builds a block and runs it once; nothing it measures is recorded. What Inductor measures to choose
between configurations is cached too, so such measurements take turns by a lock across the workers.
"""

from __future__ import annotations

import fcntl
import functools
import gc
import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, cast

import torch

import vsa_inductor as vsa
from benchmarks.block_memory import ATTENTIONS, Model, Stack
from benchmarks.block_providers import Block, BlockCase

# Tensors of one block's q alive at once, at most, as seen and rounded up; FlexAttention also tunes on copies.
_TENSORS = {"forward": 16, "step": 28}
_TENSORS_FLEX_STEP = 45


@dataclass(frozen=True)
class Job:
    """One thing to compile: ``what`` is "forward" or "step" of a provider, or "stack" of an attention of a model."""

    case: BlockCase
    provider: str
    what: str

    @property
    def name(self) -> str:
        return f"{self.case.name} {self.provider} {self.what}"

    @property
    def memory(self) -> float:
        """Bytes of device memory, roughly."""
        tensors = _TENSORS.get(self.what, 28)
        if self.provider == "flex_compiled" and self.what == "step":
            tensors = _TENSORS_FLEX_STEP
        return self.case.batch * self.case.tokens * self.case.channels * 2.0 * tensors + 2**30

    @property
    def order(self) -> tuple[bool, bool, float]:
        """What takes longest comes first: searches, then both directions."""
        return self.provider != "flex_compiled", self.what == "forward", -self.memory

    def run(self) -> None:
        if self.what == "stack":
            Stack(Model(self.case, self.provider), 1).step()
        elif self.what == "step":
            Block(self.provider, self.case).step()
        else:
            Block(self.provider, self.case).forward()


def stack_jobs(case: BlockCase) -> list[Job]:
    """What the memory part compiles."""
    return [Job(case, attention, "stack") for attention in ATTENTIONS]


def use_cache(folder: Path) -> None:
    """Caches of this process and its children; variables that are set already stay."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))
    os.environ.setdefault("TRITON_CACHE_DIR", str(folder / "triton"))


class _Turns:
    """A lock across processes on one file; the same process may take it again."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT)
        self._thread = threading.RLock()
        self._depth = 0

    def __enter__(self) -> None:
        self._thread.acquire()
        if self._depth == 0:
            fcntl.flock(self._file, fcntl.LOCK_EX)
        self._depth += 1

    def __exit__(self, *_: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            fcntl.flock(self._file, fcntl.LOCK_UN)
        self._thread.release()


def _take_turns(turns: _Turns) -> None:
    """Inductor's own measurements of this process hold the lock."""
    from torch._inductor.runtime.benchmarking import benchmarker

    def alone(measure: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(measure)
        def measured(*args: Any, **kwargs: Any) -> Any:
            with turns:
                return measure(*args, **kwargs)

        return measured

    for name in ("benchmark_gpu", "benchmark_gpu_with_cuda_graph"):
        if hasattr(benchmarker, name):
            setattr(benchmarker, name, alone(getattr(benchmarker, name)))


def _work(connection: Connection, lock: str, backend: str) -> None:
    _take_turns(_Turns(lock))
    while (job := connection.recv()) is not None:
        started, error = time.perf_counter(), ""
        try:
            with vsa.options(backend=backend) if backend != "auto" else nullcontext():
                job.run()
            if job.case.device == "cuda":
                torch.cuda.synchronize()
        except Exception as failure:
            error = f"{type(failure).__name__}: {str(failure).strip()[:200]}"
        torch.compiler.reset()
        gc.collect()
        if job.case.device == "cuda":
            torch.cuda.empty_cache()
        connection.send((job, time.perf_counter() - started, error))


def precompile(jobs: Sequence[Job], workers: int, backend: str = "auto", timeout: float = 240.0) -> list[str]:
    """Runs every job once in one of ``workers`` processes, as many at a time as the device's memory holds.

    Args:
        backend: as in ``vsa.options``; "auto" sets none.

    Returns:
        A line for each job that failed or did not end in ``timeout`` seconds: it is compiled when it is timed.
    """
    waiting = sorted(dict.fromkeys(jobs), key=lambda job: job.order)
    free = 0.85 * torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else float("inf")
    threads = max(1, (os.cpu_count() or 1) // workers)
    context = multiprocessing.get_context("spawn")
    running: dict[Connection, Job] = {}
    processes: list[Any] = []
    failed: list[str] = []
    deadline = time.monotonic() + timeout
    with tempfile.TemporaryDirectory() as folder:
        before = {name: os.environ.get(name) for name in ("TORCHINDUCTOR_COMPILE_THREADS", "OMP_NUM_THREADS")}
        os.environ |= dict.fromkeys(before, str(threads))
        idle: list[Connection] = []
        for _ in range(min(workers, len(waiting))):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, str(Path(folder) / "turns"), backend), daemon=False)
            process.start()
            theirs.close()  # so that a worker's death ends the connection
            processes.append(process)
            idle.append(ours)
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
        while waiting or running:
            for job in list(waiting):
                # With nothing running, a job larger than the estimate of what is free is tried all the same.
                if idle and (job.memory <= free or not running):
                    waiting.remove(job)
                    connection = idle.pop()
                    connection.send(job)
                    running[connection] = job
                    free -= job.memory
            ready = wait(list(running), max(0.0, deadline - time.monotonic())) if running else []
            if not ready:
                failed += [f"{job.name}: not compiled in {timeout:.0f} s" for job in (*running.values(), *waiting)]
                break
            for ended in ready:
                connection = cast(Connection, ended)
                job = running.pop(connection)
                free += job.memory
                try:
                    _, seconds, error = connection.recv()
                    idle.append(connection)
                    print(f"# compiled {job.name}: {seconds:.1f} s {error}", flush=True)
                except EOFError:
                    error = "its worker died"
                if error:
                    failed.append(f"{job.name}: {error}")
        for connection in idle:
            connection.send(None)
        for process in processes:
            process.join(0.0 if running else 20.0)
            if process.is_alive():
                process.terminate()
                process.join(20.0)
    return failed
