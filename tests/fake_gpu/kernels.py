"""Compiles generated Triton kernels to machine code with the ptxas that Triton ships: no driver, no GPU."""

import dataclasses
import importlib.util
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch._inductor.config

from .device import fake_gpu
from .generated_code import GeneratedCode, Kernel


@dataclasses.dataclass(frozen=True)
class CompiledKernel:
    """One kernel under one launch configuration."""

    name: str
    direction: str
    config: str
    target: str
    cubin_bytes: int
    shared_bytes: int


def _autotuner(kernel: Kernel, directory: Path) -> Any:
    """Imports the kernel's module; its decorators need the source in a file."""
    path = directory / f"{kernel.direction}_{kernel.name}.py"
    path.write_text(kernel.source)
    spec = importlib.util.spec_from_file_location(f"vsa_fake_gpu_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Triton finds a kernel's globals through its module.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return getattr(module, kernel.name)


def compile_kernels(code: GeneratedCode, arch: int) -> list[CompiledKernel]:
    """Compiles each kernel of `code` under every launch configuration Inductor would try.

    arch: 90 or 100 (compiled for sm_90a, sm_100a); the one the code was generated for.
    Raises ValueError for another arch, and whatever Triton or ptxas raises for code that does not compile.
    """
    if code.arch != arch:
        raise ValueError(f"the code was generated for sm_{code.arch}, not sm_{arch}: launch configurations differ")
    compiled = []
    with (
        fake_gpu(arch),
        tempfile.TemporaryDirectory() as scratch,
        torch._inductor.config.patch(use_static_triton_launcher=False),
    ):
        for kernel in code.kernels:
            autotuner = _autotuner(kernel, Path(scratch))
            for config in autotuner.configs:
                binary = autotuner._precompile_config(config).kernel
                target = binary.asm["ptx"].split(".target", 1)[1].split()[0].rstrip(",")
                compiled.append(
                    CompiledKernel(
                        name=kernel.name,
                        direction=kernel.direction,
                        config=str(config),
                        target=target,
                        cubin_bytes=len(binary.asm["cubin"]),
                        shared_bytes=binary.metadata.shared,
                    )
                )
    return compiled
