"""A CUDA device that exists only in torch's, Inductor's and Triton's answers.

Checked on torch 2.13.0 (CPU wheel) with triton 3.8.0; the names patched here are private and move between versions.
"""

import contextlib
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

CHECKED_TORCH = "2.13"

_COMMON = {
    "max_threads_per_block": 1024,
    "max_threads_per_multi_processor": 2048,
    "regs_per_multiprocessor": 65536,
    "shared_memory_per_block": 49152,
    "shared_memory_per_block_optin": 232448,
    "shared_memory_per_multiprocessor": 233472,
    "warp_size": 32,
    "is_integrated": 0,
    "gcnArchName": "",
}

# What Inductor and Triton read of the device; the figures of an H200 and of a B200 (clock rates in kHz).
PROPERTIES: dict[int, dict[str, Any]] = {
    90: _COMMON
    | {
        "name": "fake sm_90",
        "major": 9,
        "minor": 0,
        "multi_processor_count": 132,
        "total_memory": 141 << 30,
        "L2_cache_size": 50 << 20,
        "memory_bus_width": 6144,
        "memory_clock_rate": 3201000,
        "clock_rate": 1980000,
    },
    100: _COMMON
    | {
        "name": "fake sm_100",
        "major": 10,
        "minor": 0,
        "multi_processor_count": 148,
        "total_memory": 180 << 30,
        "L2_cache_size": 126 << 20,
        "memory_bus_width": 8192,
        "memory_clock_rate": 3996000,
        "clock_rate": 1965000,
    },
}


class FakeDriver:
    """What Inductor and Triton's compiler ask of `triton.runtime.driver.active`, answered without a driver."""

    def __init__(self, arch: int) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", arch, 32)
        properties = PROPERTIES[arch]
        self.utils = types.SimpleNamespace(
            get_device_properties=lambda index: {
                "max_shared_mem": properties["shared_memory_per_block_optin"],
                "multiprocessor_count": properties["multi_processor_count"],
                "max_num_regs": properties["regs_per_multiprocessor"],
                "warpSize": properties["warp_size"],
            }
        )

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_device_interface(self) -> Any:
        return torch.cuda

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def _always(value: Any) -> Any:
    return lambda *args, **kwargs: value


def _cached_answers() -> list[Any]:
    """Memoised functions that may have answered while no GPU was there, and must forget when it leaves again."""
    import torch._inductor.utils
    import torch.utils._triton
    from torch._inductor.runtime.hints import DeviceProperties

    found = [DeviceProperties.create]
    for module in (torch._inductor.utils, torch.utils._triton):
        found += [value for value in vars(module).values() if hasattr(value, "cache_clear")]
    return found


@contextlib.contextmanager
def fake_gpu(arch: int) -> Iterator[types.SimpleNamespace]:
    """Inside, one GPU of compute capability `arch` (90 or 100) seems to exist; yields its properties.

    Only fake tensors may live on it. Backward graphs need `preload.load()` before torch was imported.
    """
    from torch._dynamo import device_interface
    from torch._inductor.fx_passes import joint_graph, post_grad
    from torch._inductor.runtime import triton_helpers
    from triton.runtime.driver import driver

    if arch not in PROPERTIES:
        raise ValueError(f"arch is {arch}; known are {sorted(PROPERTIES)}")
    properties = types.SimpleNamespace(**PROPERTIES[arch])
    capability = (properties.major, properties.minor)

    # The pattern tables trace real example tensors, on a GPU if one seems to exist: fill them while none does.
    for module in (joint_graph, post_grad):
        module.lazy_init(torch.device("cpu"))

    torch_cuda = {
        "is_available": _always(True),
        "is_bf16_supported": _always(True),
        "device_count": _always(1),
        "current_device": _always(0),
        "get_device_properties": _always(properties),
        "get_device_capability": _always(capability),
        "get_device_name": _always(properties.name),
        "memory_allocated": _always(0),
        "synchronize": _always(None),
        "get_rng_state": lambda *args: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": _always(None),
        "_is_compiled": _always(True),
        "_lazy_init": _always(None),
        "_exchange_device": _always(0),
        "_maybe_exchange_device": _always(0),
    }
    # CudaInterface copied these functions of torch.cuda when it was defined.
    interface = {
        name: staticmethod(torch_cuda[name])
        for name in (
            "current_device",
            "device_count",
            "get_device_properties",
            "is_bf16_supported",
            "memory_allocated",
            "synchronize",
        )
    } | {"get_raw_stream": staticmethod(_always(0))}

    with contextlib.ExitStack() as stack:
        for target, replacements in ((torch.cuda, torch_cuda), (device_interface.CudaInterface, interface)):
            for name, value in replacements.items():
                stack.enter_context(mock.patch.object(target, name, value))
        for module in (joint_graph, post_grad):
            stack.enter_context(mock.patch.object(module, "lazy_init", _always(None)))
        for target, name, value in (
            (torch.version, "cuda", "13.0"),
            (driver, "_active", FakeDriver(arch)),
            (triton_helpers, "set_driver_to_gpu", _always(None)),
        ):
            stack.enter_context(mock.patch.object(target, name, value))
        for table, value in (
            (device_interface.caching_worker_device_properties, [properties]),
            (device_interface.caching_worker_current_devices, 0),
        ):
            stack.enter_context(mock.patch.dict(table, {"cuda": value}))

        cached = _cached_answers()
        for function in cached:
            function.cache_clear()
        try:
            yield properties
        finally:
            for function in cached:
                function.cache_clear()
            torch._dynamo.reset()
