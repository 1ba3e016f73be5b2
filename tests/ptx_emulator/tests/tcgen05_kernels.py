"""One frame of PTX for the tcgen05 tests: it fills shared and tensor memory, runs a few lines, and dumps tensor memory.

A block of 128 threads (for .cta_group::2 a cluster of two) copies an image to shared memory at byte 1024, writes all
columns of its tensor memory from `init`, lets thread 0 (of the even block) run `issue` and commit, waits for that, runs
`after` in all threads, and copies its tensor memory to `out`.

Registers that `issue` may use: %d address of the allocation, %ad %bd matrix descriptors, %id instruction descriptor,
%onto predicate enable-input-d. `after` may also use %quarter (address of the warp's own 32 lanes), %me, %extra.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import Device, Options, Report, load

IMAGE = 1024  # where the image starts in shared memory
LANES = 128

_HEAD = """
.version 9.0
.target sm_100a
.address_size 64
.extern .shared .align 1024 .b8 smem[];
.visible .entry frame(.param .u64 image, .param .u32 image_bytes, .param .u64 init, .param .u64 out,
                      .param .u32 idesc, .param .u64 adesc, .param .u64 bdesc, .param .u32 accumulate,
                      .param .u64 extra)
{
  .reg .pred %p<8>; .reg .pred %onto; .reg .pred %lead; .reg .pred %first;
  .reg .b32 %v<140>; .reg .b32 %d; .reg .b32 %id; .reg .b32 %quarter; .reg .b32 %me; .reg .b32 %n; .reg .b32 %at;
  .reg .b32 %bar; .reg .b32 %rank; .reg .b32 %t;
  .reg .b64 %ad; .reg .b64 %bd; .reg .b64 %image; .reg .b64 %init; .reg .b64 %out; .reg .b64 %extra; .reg .b64 %o;
  mov.u32 %me, %tid.x;
  mov.u32 %rank, %cluster_ctarank;
  ld.param.u64 %image, [image];
  ld.param.u32 %n, [image_bytes];
  ld.param.u64 %init, [init];
  ld.param.u64 %out, [out];
  ld.param.u32 %id, [idesc];
  ld.param.u64 %ad, [adesc];
  ld.param.u64 %bd, [bdesc];
  ld.param.u32 %t, [accumulate];
  ld.param.u64 %extra, [extra];
  setp.ne.u32 %onto, %t, 0;
  setp.eq.u32 %first, %me, 0;
  setp.eq.and.u32 %lead, %rank, 0, %first;
  setp.lt.u32 %p0, %me, 32;
  mov.u32 %at, smem;
  add.u32 %bar, %at, 16;
  @%p0 tcgen05.alloc.cta_group::GROUP.sync.aligned.shared::cta.b32 [%at], COLUMNS;
  @%p0 tcgen05.relinquish_alloc_permit.cta_group::GROUP.sync.aligned;
  @%first mbarrier.init.shared::cta.b64 [%bar], 1;
  mul.wide.u32 %o, %rank, %n;
  add.u64 %image, %image, %o;
  mul.lo.u32 %t, %rank, LANES;
  add.u32 %t, %t, %me;
  mul.wide.u32 %o, %t, ROW;
  add.u64 %init, %init, %o;
  add.u64 %out, %out, %o;
  mul.lo.u32 %t, %me, 16;
copy:
  setp.ge.u32 %p1, %t, %n;
  @%p1 bra copied;
  cvt.u64.u32 %o, %t;
  add.u64 %o, %image, %o;
  ld.global.v4.b32 {%v0, %v1, %v2, %v3}, [%o];
  add.u32 %v4, %at, %t;
  st.shared.v4.b32 [%v4+1024], {%v0, %v1, %v2, %v3};
  add.u32 %t, %t, 2048;
  bra copy;
copied:
  fence.proxy.async;
  bar.sync 0;
  ld.shared.b32 %d, [%at];
  and.b32 %quarter, %me, 96;
  shl.b32 %quarter, %quarter, 16;
  add.u32 %quarter, %quarter, %d;
"""

_WAIT = """
  tcgen05.fence::before_thread_sync;
  SYNC
  tcgen05.fence::after_thread_sync;
  @!%lead bra issued;
  ISSUE
  COMMIT
issued:
  mbarrier.try_wait.parity.shared::cta.b64 %p2, [%bar], 0;
  @!%p2 bra issued;
  tcgen05.fence::after_thread_sync;
"""

_TAIL = """
  tcgen05.fence::before_thread_sync;
  SYNC
  @%p0 tcgen05.dealloc.cta_group::GROUP.sync.aligned.b32 %d, COLUMNS;
  ret;
}
"""


def _registers(n: int, base: int = 0) -> str:
    return "{" + ", ".join(f"%v{base + k}" for k in range(n)) + "}"


def _chunks(columns: int) -> range:
    return range(0, columns, 32)


def _fill(columns: int) -> str:
    """init -> tensor memory, 32 columns at a time."""
    text = []
    for c in _chunks(columns):
        text += [f"  ld.global.v4.b32 {_registers(4, k)}, [%init+{4 * (c + k)}];" for k in range(0, 32, 4)]
        text.append(f"  add.u32 %t, %quarter, {c};")
        text.append(f"  tcgen05.st.sync.aligned.32x32b.x32.b32 [%t], {_registers(32)};")
    return "\n".join([*text, "  tcgen05.wait::st.sync.aligned;"])


def _dump(columns: int) -> str:
    """Tensor memory -> out."""
    text = []
    for c in _chunks(columns):
        text.append(f"  add.u32 %t, %quarter, {c};")
        text.append(f"  tcgen05.ld.sync.aligned.32x32b.x32.b32 {_registers(32)}, [%t];")
        text.append("  tcgen05.wait::ld.sync.aligned;")
        text += [f"  st.global.v4.b32 [%out+{4 * (c + k)}], {_registers(4, k)};" for k in range(0, 32, 4)]
    return "\n".join(text)


def frame(issue: str, after: str = "", columns: int = 64, group: int = 1) -> str:
    """PTX text of the kernel."""
    commit = (
        "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%bar];"
        if group == 1
        else "mov.b16 %m, 3;\n"
        "  tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%bar], %m;"
    )
    sync = "bar.sync 0;" if group == 1 else "barrier.cluster.arrive.aligned;\n  barrier.cluster.wait.aligned;"
    head = _HEAD.replace(".reg .b32 %d;", ".reg .b32 %d; .reg .b16 %m;") if group == 2 else _HEAD
    text = head + _fill(columns) + _WAIT + after + "\n" + _dump(columns) + _TAIL
    for name, value in (
        ("ISSUE", issue),
        ("COMMIT", commit),
        ("SYNC", sync),
        ("COLUMNS", columns),
        ("ROW", 4 * columns),
    ):
        text = text.replace(name, str(value))
    return text.replace("LANES", str(LANES)).replace("GROUP", str(group))


def run_frame(
    text: str,
    init: np.ndarray,
    image: np.ndarray | None = None,
    descriptors: tuple[int, int, int] = (0, 0, 0),
    onto: bool = True,
    extra: Any = None,
    options: Options | None = None,
) -> tuple[np.ndarray, Report]:
    """Runs it. `init` uint32 [blocks * 128, columns], `image` uint8 [blocks, bytes], descriptors (A, B, instruction).

    Returns tensor memory afterwards, like `init`, and the report.
    """
    blocks = len(init) // LANES
    device = Device()
    if image is None:
        image = np.zeros((blocks, 16), np.uint8)
    pictures = device.upload(np.ascontiguousarray(image))
    before = device.upload(np.ascontiguousarray(init, dtype=np.uint32))
    out = device.empty(init.shape, np.uint32)
    size = image.shape[1]
    more = device.empty(1, np.uint32) if extra is None else extra(device)
    report = device.launch(
        load(text),
        grid=(blocks, 1, 1),
        block=(LANES, 1, 1),
        cluster=(blocks, 1, 1),
        shared=IMAGE + size,
        args=[pictures, size, before, out, descriptors[2], descriptors[0], descriptors[1], int(onto), more],
        options=options or Options(strict=True),
    )
    return out.array.copy(), report


# Shared memory images -------------------------------------------------------------------------------------------------
_WIDTH = {"128B": 128, "64B": 64, "32B": 32}
_CODE = {"none": 0, "128B_ATOM32B": 1, "128B": 2, "64B": 4, "32B": 6}


def place(matrix: np.ndarray, swizzle: str = "128B", mn_major: bool = False) -> tuple[np.ndarray, int, int]:
    """A tile [rows, k] of one instruction as bytes, with its leading and stride offsets (PTX ISA 9.7.16.3).

    Written as loops over 16-byte units, on purpose unlike layouts.py. The image must lie at a multiple of 1024 bytes.
    """
    rows, k = matrix.shape
    size = matrix.itemsize
    per = 16 // size
    data = np.zeros(rows * k * size * 8 + 16384, np.uint8)
    high = 0
    leading, stride = _offsets(rows, k, size, swizzle, mn_major)
    raw = np.ascontiguousarray(matrix.T if mn_major else matrix)
    for outer in range(raw.shape[0]):
        for unit in range(raw.shape[1] // per):
            at = _unit(outer, unit, swizzle, mn_major, leading, stride)
            data[at : at + 16] = raw[outer, unit * per : unit * per + per].view(np.uint8)
            high = max(high, at + 16)
    return data[: -(-high // 16) * 16], leading, stride


def _offsets(rows: int, k: int, size: int, swizzle: str, mn_major: bool) -> tuple[int, int]:
    """(leading, stride) in bytes for tightly packed atoms."""
    if swizzle == "none":
        units = (rows if mn_major else k) * size // 16
        # K-major: core matrices of 8 rows side by side along K; MN-major: side by side along the rows.
        return (128 * units, 128) if mn_major else (128, 128 * units)
    width = 128 if swizzle == "128B_ATOM32B" else _WIDTH[swizzle]
    if not mn_major:
        return 16, 8 * width
    depth = 4 if swizzle == "128B_ATOM32B" else 8
    return depth * width * (-(-k // depth)), depth * width


def _unit(outer: int, unit: int, swizzle: str, mn_major: bool, leading: int, stride: int) -> int:
    """Byte offset of 16-byte unit `unit` of line `outer`: lines are rows, MN-major steps of k."""
    if swizzle == "none":
        if mn_major:
            return unit * stride + outer // 8 * leading + outer % 8 * 16
        return outer // 8 * stride + outer % 8 * 16 + unit * leading
    if swizzle == "128B_ATOM32B":
        line, atom = unit // 8 * leading + outer // 4 * stride + outer % 4 * 128, unit % 8
        return line + (atom // 2 ^ outer % 4) * 32 + atom % 2 * 16
    width = _WIDTH[swizzle]
    units = width // 16
    phase = outer % 8 // (8 // units)
    if mn_major:
        return unit // units * leading + outer // 8 * stride + outer % 8 * width + (unit % units ^ phase) * 16
    return outer // 8 * stride + outer % 8 * width + (unit ^ phase) * 16


def matrix_descriptor(start: int, leading: int, stride: int, swizzle: str = "128B") -> int:
    """The 64 bits of PTX ISA 9.7.16.4.1."""
    code = _CODE[swizzle] << 61
    return start >> 4 & 0x3FFF | (leading >> 4) << 16 | (stride >> 4) << 32 | 1 << 46 | code


def instruction_descriptor(
    m: int, n: int, d: int = 1, a: int = 0, b: int = 0, negate: int = 0, major: int = 0, more: int = 0
) -> int:
    """The 32 bits of PTX ISA 9.7.16.4.2; `negate` and `major` have A in bit 0, B in bit 1."""
    return d << 4 | a << 7 | b << 10 | negate << 13 | major << 15 | n >> 3 << 17 | m >> 4 << 24 | more
