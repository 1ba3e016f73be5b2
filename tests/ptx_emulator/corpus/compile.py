"""Offline compilation of Triton and Gluon functions to PTX, for GPUs that are not there.

Triton's pipeline is stopped before its assembler. The text and the facts a launch needs are kept as one JSON file per
kernel in the folder named by the environment variable PTX_EMULATOR_CACHE (a temporary folder otherwise), keyed by
the kernel's source and its callees, the signature, the constants, the options, the target and Triton's version.

Private names, as of Triton 3.8: `runtime.driver.driver._active` and `experimental.gluon._runtime.GluonASTSource`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

from ..compile import cache_folder

ARCHITECTURES = {"sm_90a": 90, "sm_100a": 100, "sm_120a": 120, "sm_121a": 121}


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What a compiled kernel says about its launch.

    `threads` counts all warps, the workers of a warp-specialised kernel included. `shared` is dynamic shared memory in
    bytes. `scratch` is global scratch memory in bytes per CTA, `scratch_align` its alignment. `descriptors` has one
    entry per host tensor descriptor, in order: swizzle code 0..3, element code, element bytes, box (outer to inner).
    """

    ptx: str
    kernel: str
    threads: int
    shared: int
    cluster: int
    scratch: int
    scratch_align: int
    descriptors: tuple[Mapping[str, Any], ...]


class _Driver:
    """The one question Triton's front end asks of a GPU: which target it is."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        return self._target


@contextlib.contextmanager
def _offline(target: Any) -> Iterator[None]:
    """Inside, the active driver answers `target`, the pipeline ends with PTX, Triton caches in a folder of its own."""
    from triton import knobs
    from triton.runtime.driver import driver

    def stop_at_ptx(*arguments: Any) -> Any:
        if not arguments:
            return "ptx-only", "ptx-only"
        arguments[1]["cubin"] = lambda ptx, metadata: b""
        return None

    before = driver._active
    with tempfile.TemporaryDirectory() as folder, knobs.runtime.scope(), knobs.cache.scope():
        knobs.runtime.add_stages_inspection_hook = stop_at_ptx
        knobs.cache.dir = folder
        driver.set_active(_Driver(target))
        try:
            yield
        finally:
            driver._active = before


def _key(source: Any, options: Mapping[str, Any], target: str) -> str:
    import triton

    text = f"{source.hash()}|{sorted(source.signature.items())}|{sorted(options.items())}|{target}|{triton.__version__}"
    return hashlib.sha256(text.encode()).hexdigest()


def compile_ptx(
    function: Any,
    signature: Mapping[str, str],
    constants: Mapping[str, Any],
    target: str,
    **options: Any,
) -> Compiled:
    """PTX of a `triton.jit` or `gluon.jit` function, from the cache or compiled.

    Args:
        signature: Triton type of each run-time parameter ("*fp16", "i32", "tensordesc<...>"). Pointers are taken
            to be multiples of 16; so is an i32 whose type is spelled "i32:16".
        constants: value of each constexpr parameter.
        target: one of ARCHITECTURES.
        options: num_warps, num_stages, num_ctas, ... as Triton names them.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    if target not in ARCHITECTURES:
        raise ValueError(f"target is {target!r}; known are {sorted(ARCHITECTURES)}")
    types: dict[str, str] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, name in enumerate(function.arg_names):
        if name in constants:
            types[name] = "constexpr"
            continue
        types[name] = signature[name].removesuffix(":16")
        if signature[name].startswith("*") or signature[name].endswith(":16"):
            attributes[(index,)] = [["tt.divisibility", 16]]
    make_source = GluonASTSource if function.is_gluon() else ASTSource
    source = make_source(function, types, dict(constants), attributes)
    gpu = GPUTarget("cuda", ARCHITECTURES[target], 32)
    with _offline(gpu):
        path = cache_folder() / f"{function.__name__}-{_key(source, options, target)}.json"
        if path.exists():
            return _from_json(path.read_text())
        compiled = _compile(source, gpu, options)
    fresh = path.with_suffix(f".{os.getpid()}.tmp")
    fresh.write_text(json.dumps(dataclasses.asdict(compiled)))
    fresh.replace(path)
    return _from_json(path.read_text())


def _from_json(text: str) -> Compiled:
    values = json.loads(text)
    values["descriptors"] = tuple(values["descriptors"])
    return Compiled(**values)


def _compile(source: Any, gpu: Any, options: Mapping[str, Any]) -> Compiled:
    import triton

    kernel = triton.compile(source, target=gpu, options=dict(options))
    metadata = kernel.metadata
    ptx = kernel.asm["ptx"]
    if re.search(r"^\s*trap;", ptx, re.MULTILINE):
        # What LLVM leaves of a kernel that an earlier pass of Triton broke.
        raise ValueError(f"{metadata.name}: Triton compiled it to a trap")
    threads = re.search(r"\.(?:reqntid|maxntid)\s+(\d+)", ptx)
    if threads is None:
        raise ValueError(f"{metadata.name}: the PTX states no .reqntid and no .maxntid")
    return Compiled(
        ptx=ptx,
        kernel=metadata.name,
        threads=int(threads.group(1)),
        shared=metadata.shared,
        cluster=metadata.num_ctas,
        scratch=metadata.global_scratch_size,
        scratch_align=metadata.global_scratch_align,
        descriptors=tuple(metadata.tensordesc_meta or ()),
    )
