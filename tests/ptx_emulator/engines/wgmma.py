"""wgmma: the four warps of a warpgroup multiply matrices in shared memory (A also in registers). PTX ISA 9.7.15.

    D [64, N] = A [64, K] * B [K, N] (+ D), D in registers, K = 32 bytes of A

Each warp issues the instruction; when the fourth has done so it is one operation: checked for races with what all four
know, and handed to the warpgroup's queue, which works in order. A warp's wait_group blocks until the others have issued
what it waits for. Completion is that of the whole warpgroup: whoever waited knows that all four warps' reads are done.

Registers of D, and of A, belong to the operation from its issue to the wait (PoisonError when touched); another wgmma
may use D again when its shape and registers are the same, and A may be read again. A register that was written since
the last wgmma.fence, or no fence at all, is a RaceError.

Values: products are exact in float32 and summed by numpy. Hardware's sums are not documented; captures of an H200
(truth/data, wgmma_*-rounding) agree with sums rounded toward zero, and for 8-bit floats with products cut 11 to 13 bits
below the largest of the instruction. Integer-valued inputs that stay within that give the same bits. Sparse and 1-bit
forms are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from .. import layouts
from ..errors import ConvergenceError, DescriptorError, LeftoverError, PoisonError, RaceError
from ..hb import EMPTY, Access, Actor, Token
from ..ir import Imm, Instruction, Kernel, Reg
from ..operands import immediate
from ..registry import WAIT, Unsupported, special
from ..warp import WARP
from .tensor_core import UNSIGNED, accumulate, values
from .wgmma_form import Form, Operand, operand_at

if TYPE_CHECKING:
    from ..cta import AsyncOp, Cta
    from ..warp import Warp

WARPS = 4
ROWS = 64


class Product:
    """One wgmma.mma_async of a warpgroup. `warps` counts those that have issued it."""

    __slots__ = ("a", "b", "form", "op", "scale_d", "token", "warps")

    def __init__(self, form: Form, a: int | None, b: int, scale_d: bool) -> None:
        self.form = form
        self.a = a
        self.b = b
        self.scale_d = scale_d
        self.warps: list[Token] = []
        self.token = EMPTY
        self.op: AsyncOp | None = None  # None until all warps have issued it


class Warpgroup:
    """Four neighbouring warps, the first a multiple of four."""

    def __init__(self, cta: Cta, number: int) -> None:
        self.cta = cta
        self.number = number
        self.start = number * WARPS * WARP
        self.label = f"warps {number * WARPS}..{number * WARPS + WARPS - 1}"
        if cta.launch.blocks > 1:
            self.label += f" of {cta.label}"
        self.partial: list[Product] = []  # not yet issued by all warps, oldest first
        self.complete = 0  # products that stood before those
        # What all four warps know is what an operation of the four may rely on.
        self.actor = None if cta.order is None else Actor(cta.order, self.label, (1 << WARP) - 1)

    def start_product(self, product: Product) -> None:
        """All warps have issued it: race check, then the queue."""
        cta, form = self.cta, product.form
        operands = self._operands(product)
        order, shadow = cta.order, cta.shared.shadow
        if self.actor is not None and order is not None and shadow is not None and operands is not None:
            known, proxied, before = product.warps[0][:3]
            for token in product.warps[1:]:
                known, proxied, before = known & token.known, proxied & token.proxied, before & token.before
            actor = self.actor
            actor.known, actor.proxied, actor.before = known, proxied, before
            accesses: Iterable[Access] = [Access(shadow, o.granules(shadow.shift), False) for o in operands if o]
            product.token = order.asynchronous(actor, actor.all_lanes, accesses, form.instruction)
        work = (lambda: None) if operands is None else (lambda: self._multiply(product, operands))
        product.op = cta.issue(f"wgmma {self.number}", work, ordered=True, name="wgmma")

    def _operands(self, product: Product) -> tuple[Operand | None, Operand] | None:
        """A (None where it is in registers) and B; None after a finding that leaves nothing to multiply."""
        form, cta = product.form, self.cta
        found: list[Operand | None] = []
        for name, bits, rows, mn_major in (
            ("A", product.a, ROWS, form.a_mn),
            ("B", product.b, form.n, form.b_mn),
        ):
            if bits is None:
                found.append(None)
                continue
            try:
                operand = operand_at(bits, rows, form.k, form.size, mn_major)
            except ValueError as reason:
                cta.report(DescriptorError, f"{name} of {self.label}: {reason}\n  {form.instruction.where()}")
                return None
            cta.check_shared(operand.first, operand.last - operand.first, form.instruction)
            found.append(operand)
        a, b = found
        assert b is not None
        return a, b

    def _multiply(self, product: Product, operands: tuple[Operand | None, Operand]) -> None:
        form, cta = product.form, self.cta
        threads = slice(self.start, self.start + WARPS * WARP)
        file = cta.registers.files["w"][:, threads]
        memory = cta.shared.u8.view(np.uint64).reshape(-1, 2)
        dtype = UNSIGNED[form.size]
        if operands[0] is None:
            raw = file[form.a].view(dtype).take(_fragment_index(form.size))
        else:
            raw = operands[0].raw(memory, dtype)
            raw = raw.T if form.a_mn else raw
        a = values(np.ascontiguousarray(raw), form.a_kind)
        b = values(operands[1].raw(memory, dtype), form.b_kind)
        if form.negative[0] != form.negative[1]:
            a = -a
        with np.errstate(all="ignore"):
            d = a @ (b if form.b_mn else b.T)
        old = file[form.d_rows] if product.scale_d else None
        file[form.d_rows] = accumulators(d, form.n, form.d_kind, old, form.saturate)
        cta.launch.count_bytes("wgmma operands shared", sum(16 * o.index.size for o in operands if o))


def accumulators(
    product: np.ndarray, n: int, kind: str, old: np.ndarray | None = None, saturate: bool = False
) -> np.ndarray:
    """Registers of D, uint32 [registers, 128], from float32 [64, N] and what they held.

    Row 16 w + 8 h + g, column 8 j + 2 q + b is value 4 j + 2 h + b of lane 4 g + q of warp w (9.7.15.5.1.1); an f16
    accumulator packs the two of b in a register.
    """
    j = n // 8
    parts = product.reshape(4, 2, 8, j, 4, 2)  # w h g j q b
    if kind == "f16":
        spread = parts.transpose(3, 1, 0, 2, 4, 5).reshape(2 * j, 256)
        c = None if old is None else np.ascontiguousarray(old).view(np.float16)
    else:
        spread = parts.transpose(3, 1, 5, 0, 2, 4).reshape(4 * j, 128)
        c = None if old is None else old.view(np.float32 if kind == "f32" else np.int32)
    return accumulate(spread, c, kind, saturate).view(np.uint32)


@lru_cache(maxsize=4)
def _fragment_index(size: int) -> np.ndarray:
    """[64, K]: place of an element of A among raw elements [4 registers, 128 threads, subs]."""
    row, k = layouts.wgmma_a_fragment(size)
    register, sub, thread = np.indices(row.shape)
    place = np.empty((ROWS, 32 // size), np.int64)
    place[row, k] = (register * 128 + thread) * (4 // size) + sub
    return place


class State:
    """What one warp has issued."""

    def __init__(self, group: Warpgroup) -> None:
        self.group = group
        self.issued = 0
        self.fenced = False
        self.open: list[Product] = []  # not committed
        self.committed: list[list[Product]] = []

    def pending(self) -> list[Product]:
        return [p for products in self.committed for p in products] + self.open


def state_of(warp: Warp) -> State:
    found = warp.state.get("wgmma")
    if found is None:
        cta = warp.cta
        groups = cta.state.setdefault("wgmma", {})
        if not groups:
            cta.state.setdefault("at_end", []).append(_at_end)
        number = warp.number // WARPS
        if number not in groups:
            groups[number] = Warpgroup(cta, number)
        found = warp.state["wgmma"] = State(groups[number])
    return found


def _at_end(cta: Cta) -> None:
    for group in cta.state["wgmma"].values():
        for product in group.partial:
            cta.report(
                ConvergenceError,
                f"{group.label}: {len(product.warps)} of 4 warps executed a wgmma\n"
                f"  {product.form.instruction.where()}",
            )
    for warp in cta.warps:
        found = warp.state.get("wgmma")
        pending = found.pending() if found is not None else []
        if pending:
            where = pending[0].form.instruction.where()
            cta.report(LeftoverError, f"{warp.label} ends with {len(pending)} wgmma that nobody waited for\n  {where}")


def _aligned(warp: Warp, mask: np.ndarray | None, i: Instruction) -> bool:
    """True where all 32 threads execute it and the warpgroup is complete; a finding otherwise."""
    if mask is not None and not mask.all():
        active = int(np.count_nonzero(mask))
        warp.cta.report(
            ConvergenceError, f"{warp.label}: {active} of 32 threads execute an .aligned instruction\n  {i.where()}"
        )
        return False
    if warp.number // WARPS * WARPS + WARPS > len(warp.cta.warps):
        warp.cta.report(
            ConvergenceError,
            f"{warp.label}: wgmma needs four warps, the first a multiple of four; the block has {len(warp.cta.warps)}\n"
            f"  {i.where()}",
        )
        return False
    return True


def _only_aligned(i: Instruction) -> None:
    if i.mods[1:] != ("sync", "aligned"):
        raise Unsupported(f"wgmma.{i.mods[0]}.sync.aligned is the only form")


# Instructions ---------------------------------------------------------------------------------------------------------
@special("wgmma.fence")
def fence(kernel: Kernel, i: Instruction) -> Callable[[Warp, np.ndarray | None], None]:
    """wgmma.fence.sync.aligned: registers written so far may be used by the wgmma that follow. PTX ISA 9.7.15.7.1."""
    _only_aligned(i)

    def run(warp: Warp, mask: np.ndarray | None) -> None:
        if _aligned(warp, mask, i):
            warp.written = 0
            state_of(warp).fenced = True

    return run


@special("wgmma.mma_async", owns_registers=True)
def mma_async(kernel: Kernel, i: Instruction) -> Callable[[Warp, np.ndarray | None], None]:
    form = Form(i)

    def run(warp: Warp, mask: np.ndarray | None) -> None:
        if not _aligned(warp, mask, i):
            return
        state = state_of(warp)
        d, a = form.bits(warp.cta.program)
        _check_registers(warp, state, form, d, a)
        product = _join(warp, state, form)
        state.issued += 1
        state.open.append(product)
        warp.take(d | a, i.index)
        product.warps.append(EMPTY if warp.actor is None else warp.actor.release(warp.live))
        if len(product.warps) == WARPS:
            state.group.partial.remove(product)
            state.group.complete += 1
            state.group.start_product(product)

    return run


def _join(warp: Warp, state: State, form: Form) -> Product:
    """The operation that the warpgroup's other warps issue as theirs of this number."""
    i, group = form.instruction, state.group
    a = None if form.a_descriptor is None else _uniform(warp, form.a_descriptor, "A", i)
    b = _uniform(warp, form.b_descriptor, "B", i)
    scale_d = _scale_d(warp, form)
    ahead = state.issued - group.complete
    if ahead == len(group.partial):
        group.partial.append(Product(form, a, b, scale_d))
    product = group.partial[ahead]
    if product.form is not form:
        warp.cta.report(
            ConvergenceError,
            f"{warp.label} executes another wgmma than the rest of {group.label}\n  {i.where()}\n"
            f"  the rest: {product.form.instruction.where()}",
        )
    elif (product.a, product.b) != (a, b):
        given, others = [tuple(f"{x or 0:#x}" for x in pair) for pair in ((a, b), (product.a, product.b))]
        warp.cta.report(
            DescriptorError,
            f"{warp.label} gives matrix descriptors {given}, the rest of {group.label} {others}\n  {i.where()}",
        )
    elif product.scale_d != scale_d:
        warp.cta.report(
            DescriptorError, f"{warp.label}: scale-d is {scale_d}, {product.scale_d} in {group.label}\n  {i.where()}"
        )
    return product


def _uniform(warp: Warp, register: int, name: str, i: Instruction) -> int:
    row = warp.u64[register]
    if row.tobytes() != row[:1].tobytes() * WARP:
        found = sorted({hex(v) for v in row.tolist()})
        warp.cta.report(
            DescriptorError, f"{warp.label}: descriptors of {name} differ between threads: {found[:4]}\n  {i.where()}"
        )
    return int(row[0])


def _scale_d(warp: Warp, form: Form) -> bool:
    operand = form.scale_d
    if isinstance(operand, Imm):
        return operand.value != 0
    assert isinstance(operand, Reg)
    row = warp.p[operand.index]
    count = int(np.count_nonzero(row))
    if count not in (0, WARP):
        warp.cta.report(
            DescriptorError,
            f"{warp.label}: scale-d is set in {count} of 32 threads; it must be the same in all\n"
            f"  {form.instruction.where()}",
        )
    return (count > 0) != operand.negated


def _check_registers(warp: Warp, state: State, form: Form, d: int, a: int) -> None:
    i = form.instruction
    written = warp.written & (d | a)
    if not state.fenced or written:
        names = _named(warp, form, written)
        why = f"registers {names} were written" if state.fenced else "this is the first wgmma of the warp"
        warp.cta.report(RaceError, f"{warp.label}: {why}, and no wgmma.fence stands before this\n  {i.where()}")
    owned = warp.pending & (d | a)
    if not owned:
        return
    for product in state.pending():
        other = product.form
        other_d, other_a = other.bits(warp.cta.program)
        same = other_d == d and other.accumulator == form.accumulator
        clash = (other_d & a) | (other_a & d) | (0 if same else other_d & d)
        if clash:
            warp.cta.report(
                PoisonError,
                f"{warp.label}: registers {_named(warp, form, clash)} still belong to a wgmma of another shape or in "
                f"another role\n  now:    {i.where()}\n  before: {other.instruction.where()}\n"
                f"  missing: wgmma.wait_group",
            )
            return


def _named(warp: Warp, form: Form, bits: int) -> str:
    """Operands among register bits: "d[0], a[3]"."""
    bit = warp.cta.program.register_bit
    found = [f"d[{n}]" for n, r in enumerate(form.d) if bits & bit(Reg("w", r))]
    found += [f"a[{n}]" for n, r in enumerate(form.a or ()) if bits & bit(Reg("w", r))]
    return ", ".join(found[:4]) + (f" and {len(found) - 4} more" if len(found) > 4 else "")


@special("wgmma.commit_group")
def commit_group(kernel: Kernel, i: Instruction) -> Callable[[Warp, np.ndarray | None], None]:
    """wgmma.commit_group.sync.aligned. PTX ISA 9.7.15.7.2."""
    _only_aligned(i)

    def run(warp: Warp, mask: np.ndarray | None) -> None:
        if _aligned(warp, mask, i):
            state = state_of(warp)
            state.committed.append(state.open)
            state.open = []

    return run


@special("wgmma.wait_group", kind=WAIT)
def wait_group(kernel: Kernel, i: Instruction) -> Callable[[Warp, np.ndarray | None], bool]:
    """wgmma.wait_group.sync.aligned N: all but the newest N groups are complete. PTX ISA 9.7.15.7.3."""
    _only_aligned(i)
    keep = immediate(i.args[0], "N")
    if keep < 0:
        raise Unsupported(f"N = {keep}; it must not be negative")

    def run(warp: Warp, mask: np.ndarray | None) -> bool:
        if not _aligned(warp, mask, i):
            return True
        state = state_of(warp)
        n = max(0, len(state.committed) - keep)
        finished = [p for group in state.committed[:n] for p in group]
        missing = next((p for p in finished if p.op is None), None)
        if missing is not None:
            warp.waiting = (
                f"wgmma of line {missing.form.instruction.line}: {len(missing.warps)} of 4 warps have issued it"
            )
            return False
        token = EMPTY
        for product in finished:
            assert product.op is not None
            product.op.finish()
            token = token | product.token
        if warp.actor is not None and finished:
            warp.actor.acquire(warp.live, token)
        del state.committed[:n]
        _give(warp, state, finished)
        return True

    return run


def _give(warp: Warp, state: State, finished: list[Product]) -> None:
    """Registers of finished operations are free, but for those that one in flight uses as well."""
    program = warp.cta.program
    for product in finished:
        d, a = product.form.bits(program)
        warp.give(d | a)
    for product in state.pending():
        d, a = product.form.bits(program)
        warp.take(d | a, product.form.instruction.index)
