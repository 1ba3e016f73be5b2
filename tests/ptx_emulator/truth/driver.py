"""The few calls of the CUDA driver that running a case needs, by ctypes: no compiler, no framework."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np

# Enumerators of cuda.h
ELEMENTS = {
    "u8": (0, 1),
    "u16": (1, 2),
    "u32": (2, 4),
    "s32": (3, 4),
    "u64": (4, 8),
    "s64": (5, 8),
    "f16": (6, 2),
    "f32": (7, 4),
    "f64": (8, 8),
    "bf16": (9, 2),
    "f32_ftz": (10, 4),
    "tf32": (11, 4),
    "tf32_ftz": (12, 4),
}
SWIZZLES = {"none": 0, "32B": 1, "64B": 2, "128B": 3}
FILLS = {"zero": 0, "nan": 1}
ATTRIBUTE_CLUSTER = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
DYNAMIC_SHARED_BYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_uint32 * 16))


class _Launch(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


class Driver:
    """One context on the first GPU.

    Raises:
        RuntimeError: a call of the driver failed; names the call and the error.
    """

    def __init__(self) -> None:
        self.cuda = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", 0)
        device = ctypes.c_int()
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)

    def call(self, name: str, *args: object) -> None:
        """Call a function of the driver and check its result."""
        code = getattr(self.cuda, name)(*args)
        if code:
            text = ctypes.c_char_p()
            self.cuda.cuGetErrorName(code, ctypes.byref(text))
            raise RuntimeError(f"{name}: {(text.value or b'?').decode()} ({code})")

    def module(self, ptx: bytes) -> ctypes.c_void_p:
        """Compile and load PTX; the compiler's messages come with a failure."""
        log = ctypes.create_string_buffer(8192)
        # CU_JIT_ERROR_LOG_BUFFER and its size
        options = (ctypes.c_int * 2)(5, 6)
        values = (ctypes.c_void_p * 2)(ctypes.addressof(log), len(log))
        module = ctypes.c_void_p()
        try:
            self.call("cuModuleLoadDataEx", ctypes.byref(module), ptx + b"\0", 2, options, values)
        except RuntimeError as error:
            raise RuntimeError(f"{error}: {log.value.decode(errors='replace')}") from error
        return module

    def function(self, module: ctypes.c_void_p, name: str) -> ctypes.c_void_p:
        """A kernel of a module."""
        function = ctypes.c_void_p()
        self.call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
        return function

    def upload(self, array: np.ndarray) -> int:
        """The address of a copy in GPU memory."""
        array = np.ascontiguousarray(array)
        address = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(max(array.nbytes, 256)))
        self.call("cuMemcpyHtoD_v2", address, ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(array.nbytes))
        return address.value

    def download(self, address: int, like: np.ndarray) -> np.ndarray:
        """An array of the same shape and type from GPU memory."""
        out = np.empty_like(like)
        self.call(
            "cuMemcpyDtoH_v2", ctypes.c_void_p(out.ctypes.data), ctypes.c_uint64(address), ctypes.c_size_t(out.nbytes)
        )
        return out

    def free(self, address: int) -> None:
        """Give GPU memory back."""
        self.call("cuMemFree_v2", ctypes.c_uint64(address))

    def tensor_map(
        self,
        address: int,
        element: str,
        dims: Sequence[int],
        strides: Sequence[int],
        box: Sequence[int],
        traversal: Sequence[int],
        swizzle: str,
        fill: str,
    ) -> bytes:
        """The 128 bytes of a CUtensorMap."""
        rank = len(dims)
        storage = ctypes.create_string_buffer(128 + 64)
        aligned = (ctypes.addressof(storage) + 63) // 64 * 64
        self.call(
            "cuTensorMapEncodeTiled",
            ctypes.c_void_p(aligned),
            ELEMENTS[element][0],
            ctypes.c_uint32(rank),
            ctypes.c_void_p(address),
            (ctypes.c_uint64 * rank)(*dims),
            (ctypes.c_uint64 * max(rank - 1, 1))(*strides),
            (ctypes.c_uint32 * rank)(*box),
            (ctypes.c_uint32 * rank)(*traversal),
            0,
            SWIZZLES[swizzle],
            0,
            FILLS[fill],
        )
        return ctypes.string_at(aligned, 128)

    def launch(
        self,
        function: ctypes.c_void_p,
        grid: Sequence[int],
        block: Sequence[int],
        cluster: Sequence[int],
        shared: int,
        arguments: Sequence[bytes],
    ) -> None:
        """Run a kernel and wait for it."""
        if shared > 48 * 1024:
            self.call("cuFuncSetAttribute", function, DYNAMIC_SHARED_BYTES, shared)
        attribute = _Attribute(id=ATTRIBUTE_CLUSTER)
        attribute.value[:3] = tuple(cluster)
        clustered = tuple(cluster) != (1, 1, 1)
        launch = _Launch(
            grid=(ctypes.c_uint * 3)(*grid),
            block=(ctypes.c_uint * 3)(*block),
            shared=shared,
            attributes=ctypes.pointer(attribute),
            count=1 if clustered else 0,
        )
        storage = []
        for value in arguments:
            buffer = ctypes.create_string_buffer(len(value) + 64)
            aligned = (ctypes.addressof(buffer) + 63) // 64 * 64
            ctypes.memmove(aligned, value, len(value))
            storage.append((buffer, aligned))
        pointers = (ctypes.c_void_p * max(len(storage), 1))(*(aligned for _, aligned in storage))
        self.call("cuLaunchKernelEx", ctypes.byref(launch), function, pointers, None)
        self.call("cuCtxSynchronize")
