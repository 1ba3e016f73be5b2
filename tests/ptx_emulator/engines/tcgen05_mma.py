"""tcgen05.mma: D = A * B + D on tensor memory. PTX ISA 9.7.16.10.

Kinds f16, tf32, f8f6f4 (8-bit elements), i8; A in shared memory or in tensor memory; .cta_group::1 and ::2; .ws. A is
[M, K], B is [N, K] (its rows are columns of the product). With .cta_group::2 the even block has the first half of the
rows of A, B and D, the odd one the second. Products are summed in float32: exact for small integers, else the order
of the hardware's sum is not known. Sparse A, block scaling, .ashift and a zero column mask are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..cta import TENSOR_COLUMNS, TENSOR_LANES
from ..errors import DescriptorError, UninitialisedError
from ..ir import Imm, Instruction, Kernel, Mem, Reg, Vec
from ..layouts import (
    InstructionDescriptor,
    a_operand_cells,
    accumulator_cells,
    decode_instruction_descriptor,
    decode_matrix_descriptor,
    matrix_addresses,
)
from ..operands import Scalar, immediate, lanes, scalar
from ..registry import Unsupported, special
from ..shadow import HOST, INDEX_BITS, Access
from .tcgen05_common import (
    GRANULE_LANES,
    QUEUE,
    add_issued,
    blocks_of,
    check_cells,
    cta_group,
    granules,
    open_marker,
    pipeline_of,
    refuse_modifiers,
    split_address,
    tensor_access,
)
from .tcgen05_memory import copy_key
from .tensor_core import ELEMENT_BYTES, UNSIGNED, accumulate, shared_granules, values

if TYPE_CHECKING:
    from ..cta import Cta
    from ..warp import Warp

KINDS = ("f16", "tf32", "f8f6f4", "i8")
UNIT = 8  # bytes gathered at once: no layout splits them
_COLLECTORS = {
    f"collector::{b}::{o}" for b in ("a", "b0", "b1", "b2", "b3") for o in ("fill", "use", "lastuse", "discard")
}


OperandKey = tuple[int, int, int, int, bool]  # arguments of shared_operand


# Where operands are ---------------------------------------------------------------------------------------------------
class SharedOperand(NamedTuple):
    """One operand of one instruction in shared memory."""

    units: np.ndarray  # indices of 8-byte units: [rows, units], MN-major: [k, units]
    mn_major: bool
    low: int
    high: int  # last byte + 1

    def read(self, cta: Cta, element: str) -> np.ndarray:
        """float32 [rows, k]."""
        raw = cta.shared.u8.view(np.uint64)[self.units].view(UNSIGNED[ELEMENT_BYTES[element]])
        decoded = values(raw, element)
        return decoded.T if self.mn_major else decoded


@lru_cache(maxsize=4096)
def shared_operand(bits: int, rows: int, k: int, element_bytes: int, mn_major: bool) -> SharedOperand:
    """ValueError as layouts.matrix_addresses, and for a swizzle that the element size does not have (9.7.16.10.3)."""
    descriptor = decode_matrix_descriptor(bits, "tcgen05")
    if mn_major and (descriptor.swizzle == "128B_ATOM32B") != (element_bytes == 4):
        allowed = "128B_ATOM32B only" if element_bytes == 4 else "none, 32B, 64B, 128B"
        raise ValueError(
            f"swizzle {descriptor.swizzle} with MN-major elements of {element_bytes} bytes; allowed: {allowed}"
        )
    addresses = matrix_addresses(descriptor, rows, k, element_bytes, mn_major)
    step = UNIT // element_bytes
    starts = addresses[::step].T if mn_major else addresses[:, ::step]
    starts = np.ascontiguousarray(starts)
    return SharedOperand(starts // UNIT, mn_major, int(starts.min()), int(starts.max()) + UNIT)


@lru_cache(maxsize=4096)
def _shared_granules(operand_key: OperandKey, shift: int) -> np.ndarray | slice:
    return shared_granules(shared_operand(*operand_key).units, UNIT, shift)


class TensorCells(NamedTuple):
    """Cells of an operand in tensor memory relative to column 0; a lane offset is in them."""

    flat: np.ndarray  # lane * 512 + column
    granules: np.ndarray
    lanes: tuple[int, int]
    columns: int
    whole: bool  # flat is [128, n] and plain: lane = row


def _tensor_cells(lane: np.ndarray, column: np.ndarray) -> TensorCells:
    flat = lane * TENSOR_COLUMNS + column
    span = (int(lane.min()), int(lane.max()) + 1)
    plain = lane.ndim == 2 and len(lane) == TENSOR_LANES
    plain = plain and bool(
        (lane == np.arange(TENSOR_LANES)[:, None]).all() and (column == np.arange(lane.shape[1])).all()
    )
    return TensorCells(flat, granules(lane, column), span, int(column.max()) + 1, plain)


@lru_cache(maxsize=256)
def d_cells(m: int, n: int, group: int, ws: bool, lane_offset: int) -> TensorCells:
    """D of one block: flat is [rows of the block, n]."""
    return _tensor_cells(*accumulator_cells(m, n, group, ws, lane_offset))


@lru_cache(maxsize=256)
def a_cells(m: int, k_bytes: int, group: int, ws: bool, lane_offset: int) -> TensorCells:
    """A of one block: flat is [copies, rows of the block, k_bytes / 4]."""
    lane, column, _ = a_operand_cells(m, k_bytes, group, ws, lane_offset)
    return _tensor_cells(lane[..., ::4], column[..., ::4])


# The instruction as decoded from its text -----------------------------------------------------------------------------
class Form(NamedTuple):
    """Modifiers and operands of a tcgen05.mma."""

    instruction: Instruction
    kind: str
    group: int
    ws: bool
    d: Scalar
    a: Scalar
    a_in_tensor: bool
    b: Scalar
    descriptor: Scalar
    accumulate: Scalar
    scale: int  # D is divided by 2 ** scale
    disabled: list[Scalar]  # words of the mask of lanes that stay as they are


def _decode(i: Instruction) -> Form:
    if i.has("sp"):
        raise Unsupported("sparse A (.sp) is not modelled")
    if i.has("block_scale") or any(m.startswith("kind::mx") for m in i.mods):
        raise Unsupported("block scaling (.block_scale, kinds mxf8f6f4, mxf4, mxf4nvf4) is not modelled")
    if i.has("ashift"):
        raise Unsupported(".ashift is not modelled")
    kinds = [m[6:] for m in i.mods if m.startswith("kind::")]
    if len(kinds) != 1 or kinds[0] not in KINDS:
        raise Unsupported(f"one of {', '.join('.kind::' + k for k in KINDS)} is needed")
    group, ws = cta_group(i), i.has("ws")
    refuse_modifiers(i, {"ws", f"cta_group::{group}", f"kind::{kinds[0]}", *_COLLECTORS})
    if ws and group != 1:
        raise Unsupported("tcgen05.mma.ws exists with .cta_group::1 only")
    d, a, b, descriptor, *rest = i.args
    disabled: list[Scalar] = []
    if rest and isinstance(rest[0], Vec):
        words = rest.pop(0).items
        if ws or len(words) != 4 * group:
            raise Unsupported(
                f"a disable-output-lane vector of {len(words)} words; {4 * group} are needed, none with .ws"
            )
        disabled = [scalar(w) for w in words]
    if not rest or not isinstance(rest[0], Reg) or rest[0].cls != "p":
        raise Unsupported("the predicate enable-input-d is missing")
    accumulate, scale = scalar(rest.pop(0)), 0
    if rest:
        if ws or not isinstance(rest[0], Imm):
            raise Unsupported("a zero column mask descriptor is not modelled")
        scale = immediate(rest.pop(0), "scale-input-d")
        if kinds[0] not in ("f16", "tf32") or not 0 <= scale <= 15:
            raise Unsupported(
                f"scale-input-d {scale} with .kind::{kinds[0]}; 0..15 are allowed, with f16 and tf32 only"
            )
    if rest:
        raise Unsupported(f"{len(rest)} operand(s) too many")
    return Form(
        instruction=i,
        kind=kinds[0],
        group=group,
        ws=ws,
        d=scalar(d),
        a=scalar(a),
        a_in_tensor=isinstance(a, Mem),
        b=scalar(b),
        descriptor=scalar(descriptor),
        accumulate=accumulate,
        scale=scale,
        disabled=disabled,
    )


@special("tcgen05.mma")
def multiply(kernel: Kernel, i: Instruction) -> Callable:
    """Every executing thread issues one whole product."""
    form = _decode(i)

    def run(warp: Warp, mask: np.ndarray | None) -> None:
        for lane in lanes(mask):
            product = _prepare(warp, lane, form)
            if product is not None:
                product.issue()

    return run


def _prepare(warp: Warp, lane: int, form: Form) -> Product | None:
    """Reads the operands and checks all that can be checked; None after a finding."""
    i = form.instruction
    ctas = blocks_of(warp, form.group, i)
    if not ctas:
        return None
    what = "instruction descriptor"
    try:
        bits = form.descriptor(warp, lane)
        t = decode_instruction_descriptor(bits, form.kind, form.group, form.ws, form.a_in_tensor)
        _check_elements(t, form)
        what = "D"
        d_lane, d_column = split_address(form.d(warp, lane))
        d = d_cells(t.m, t.n, form.group, form.ws, d_lane)
        what = "B"
        size = t.element_bytes
        b_key = (form.b(warp, lane), t.n // form.group, t.k, size, t.b_mn_major)
        operands = [(b_key, shared_operand(*b_key))]
        what, a, a_column = "A", None, 0
        if form.a_in_tensor:
            a_lane, a_column = split_address(form.a(warp, lane))
            a = a_cells(t.m, t.k * size, form.group, form.ws, a_lane)
            if a_lane != d_lane:
                raise ValueError(f"lane offset {a_lane}, D has {d_lane}; both must be the same")
        else:
            a_key = (form.a(warp, lane), t.m // form.group, t.k, size, t.a_mn_major)
            operands.append((a_key, shared_operand(*a_key)))
    except ValueError as problem:
        warp.cta.report(DescriptorError, f"{warp.label}: tcgen05.mma {what}: {problem}\n  {i.where()}")
        return None
    for cta in ctas:
        if not check_cells(warp, cta, "D", d.lanes, (d_column, d_column + d.columns), i):
            return None
        if a is not None and not check_cells(warp, cta, "A", a.lanes, (a_column, a_column + a.columns), i):
            return None
        for _, operand in operands:
            if operand.high > cta.shared.size:
                cta.check_shared(operand.low, operand.high - operand.low, i)
    disabled = _disabled_lanes([w(warp, lane) for w in form.disabled])
    accumulate = bool(form.accumulate(warp, lane))
    return Product(warp, lane, form, t, ctas, d, d_column, a, a_column, operands, accumulate, disabled)


def _check_elements(t: InstructionDescriptor, form: Form) -> None:
    if t.sparse:
        raise ValueError("the sparsity bit is set, the instruction has no .sp")
    for name, element in (("A", t.a_format), ("B", t.b_format)):
        if element in ("e2m3", "e3m2", "e2m1"):
            raise ValueError(
                f"elements of {name} are {element}; of kind::{form.kind} only the 8-bit formats are modelled"
            )
    step = 16 * form.group
    if t.b_mn_major and t.element_bytes == 1 and t.n % step:
        raise ValueError(f"N is {t.n} with MN-major 8-bit B; allowed: multiples of {step}")


def _disabled_lanes(words: list[int]) -> np.ndarray | None:
    """bool [blocks * 128], None where no lane is disabled."""
    if not any(words):
        return None
    packed = np.array(words, dtype="<u4").view(np.uint8)
    return np.unpackbits(packed, bitorder="little").astype(bool)


@dataclass
class Product:
    """One tcgen05.mma with its operands known."""

    warp: Warp
    lane: int
    form: Form
    shape: InstructionDescriptor
    ctas: list[Cta]
    d: TensorCells
    d_column: int
    a: TensorCells | None  # None: in shared memory, the second of `operands`
    a_column: int
    operands: list[tuple[OperandKey, SharedOperand]]  # B first
    accumulate: bool
    disabled: np.ndarray | None  # bool [blocks * 128]: lanes that stay as they are

    # Issue ------------------------------------------------------------------------------------------------------------
    def issue(self) -> None:
        warp, form = self.warp, self.form
        i, bit = form.instruction, 1 << self.lane
        if warp.actor is not None:
            pipeline = pipeline_of(self.ctas)
            marker = open_marker(warp.actor, bit)
            key, before = self._keys()
            ordered = pipeline.before(warp, bit, before)
            token = warp.cta.check_async(warp, bit, self._accesses, i, tensor=True, ordered=ordered)
            pipeline.add(warp, bit, key, token, marker)
            add_issued(warp, bit, token)
        warp.cta.issue(QUEUE, self.work, ordered=True, name=i.name)
        size = sum(operand.units.size * UNIT for _, operand in self.operands) * len(self.ctas)
        warp.cta.launch.count_bytes("tcgen05.mma shared->tensor core", size)
        if self.a is not None:
            warp.cta.launch.count_bytes("tcgen05.mma tensor memory->tensor core", self.a.flat.size * 4 * len(self.ctas))

    def _keys(self) -> tuple[Hashable, tuple[Hashable, ...]]:
        """Own key in the pipeline, and those that precede. Strict (9.7.16.6.2): same accumulator, shape, kind; cp."""
        form, shape = self.form, self.shape
        copies = copy_key(form.group, self.warp)
        if not self.warp.cta.launch.options.strict:
            return copies, (copies,)
        own = ("mma", form.group, self.d.lanes[0], self.d_column, shape.m, shape.n, form.kind, form.ws)
        return own, (own, copies)

    def _accesses(self) -> Iterator[Access]:
        for number, cta in enumerate(self.ctas):
            shadow = cta.shared.shadow
            assert shadow is not None
            for key, _ in self.operands:
                yield Access(shadow, _shared_granules(key, shadow.shift), False)
            if self.a is not None:
                yield tensor_access(cta, self.a.granules + self.a_column, False)
            index = self._written(number)
            if self.accumulate:
                self._initialised(cta, index)
            yield tensor_access(cta, index, True)

    def _written(self, number: int) -> np.ndarray:
        index = self.d.granules
        if self.disabled is not None:
            off = self.disabled[number * TENSOR_LANES : (number + 1) * TENSOR_LANES]
            untouched = np.asarray(off.reshape(-1, GRANULE_LANES).all(axis=1))
            index = index[~untouched[index // TENSOR_COLUMNS]]
        return index + self.d_column

    def _initialised(self, cta: Cta, index: np.ndarray) -> None:
        """D is read and written by one access, so the race check alone does not see that it reads."""
        shadow = cta.tensor_shadow
        assert shadow is not None
        fresh = shadow.writer[index] < HOST << INDEX_BITS
        if fresh.any():
            i = self.form.instruction
            where = shadow.locate(index[int(np.argmax(fresh))])
            cta.report(
                UninitialisedError,
                f"{where} accumulated onto before anything wrote it by {self.warp.label}\n  {i.where()}",
            )

    # Arithmetic -------------------------------------------------------------------------------------------------------
    def work(self) -> None:
        shape = self.shape
        _, b = self.operands[0]
        columns = (
            np.concatenate([b.read(cta, shape.b_format) for cta in self.ctas])
            if len(self.ctas) > 1
            else b.read(self.ctas[0], shape.b_format)
        )
        if shape.negate_a != shape.negate_b:
            columns = -columns
        for number, cta in enumerate(self.ctas):
            self._accumulate(cta, number, self._multiply(cta, columns))

    def _multiply(self, cta: Cta, columns: np.ndarray) -> np.ndarray:
        """float32 [rows of the block, n]."""
        if self.a is None:
            return self.operands[1][1].read(cta, self.shape.a_format) @ columns.T
        assert cta.tensor is not None
        element = self.shape.a_format
        raw = cta.tensor.reshape(-1)[self.a.flat + self.a_column]
        copies = values(raw.view(UNSIGNED[ELEMENT_BYTES[element]]), element)
        if len(copies) == 1:
            return copies[0] @ columns.T
        # Each half of the lanes computes its own columns from its own copy of A.
        half = len(columns) // 2
        return np.concatenate([copies[0] @ columns[:half].T, copies[1] @ columns[half:].T], 1)

    def _accumulate(self, cta: Cta, number: int, product: np.ndarray) -> None:
        assert cta.tensor is not None
        shape, column = self.shape, self.d_column
        plain = self.d.whole and self.disabled is None
        flat = self.d.flat + column if not plain else None
        old = cta.tensor[:, column : column + shape.n] if flat is None else cta.tensor.reshape(-1)[flat]
        result = _combine(old, product, shape, self.accumulate, self.form.scale)
        if flat is None:
            cta.tensor[:, column : column + shape.n] = result
            return
        if self.disabled is not None:
            off = self.disabled[number * TENSOR_LANES : (number + 1) * TENSOR_LANES]
            result = np.where(off[self.d.flat // TENSOR_COLUMNS], old, result)
        cta.tensor.reshape(-1)[flat] = result


def _combine(old: np.ndarray, product: np.ndarray, shape: InstructionDescriptor, onto: bool, scale: int) -> np.ndarray:
    """uint32 of the new D. An f16 D is the low half of its cell (9.7.16.10.4.1)."""
    before: np.ndarray | None = None
    if onto and shape.d_format == "s32":
        before = old.view(np.int32)
    elif onto:
        before = old.view(np.float32) if shape.d_format == "f32" else values(old.astype(np.uint16), "f16")
        before = before * np.float32(2.0**-scale) if scale else before
    result = accumulate(product, before, shape.d_format, shape.saturate)
    return result.view(np.uint16).astype(np.uint32) if shape.d_format == "f16" else result.view(np.uint32)
