"""Proofs that a mutant does the same as the kernel: a fault that no test could find.

no edge      in the unchanged run the wait or fence teaches no thread anything, and frees no register: without it the
             happens-before order is the same
ordered      in the run of the mutant every pair of conflicting accesses is ordered, or was unordered before: all pairs
             are compared (history.py), not only those that the checker keeps; the results are the same bits
same place   the descriptor with the fault names the same bytes in the same order (the field is not used by its layout)
zero sum     the accumulator holds zeros there, adding to it or not is the same
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from ..engines.tcgen05_mma import shared_operand
from ..engines.wgmma_form import Form, operand_at
from ..errors import KINDS, EmulatorError
from ..layouts import decode_instruction_descriptor
from ..launch import Launch, Options
from .history import History, Pair
from .subject import Subject
from .trace import Trace

if TYPE_CHECKING:
    from ..ir import Instruction, Kernel
    from .edit import Mutation

# Kinds that only change what is ordered: a mutant that orders enough is the same program.
_ORDER = ("drop", "weaker", "late", "early", "wrong barrier")
_TEACHING = ("wait", "fence", "barrier")


class Prover:
    """What is known of the unchanged kernel."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.trace = Trace()
        subject.launch(subject.kernel, subject.options(), self.trace.attach)
        self.trace.finish()
        self._same: tuple[set[Pair], list[bytes]] | None = None

    def proof(self, mutation: Mutation, mutant: Kernel) -> str:
        """Name of the proof, "" where there is none."""
        kind, n = mutation.kind, mutation.index
        i = self.subject.kernel.instructions[n]
        if kind.startswith("drop") and kind.endswith(_TEACHING) and n not in self.trace.edges:
            return "no edge"
        if kind.startswith(_ORDER) and self._ordered(mutant):
            return "ordered"
        if kind == "wrong matrix descriptor" and self._same_place(i, mutation):
            return "same place"
        if kind == "inverted accumulation" and i.op == "wgmma" and n not in self.trace.accumulated:
            return "zero sum"
        return ""

    def _ordered(self, mutant: Kernel) -> bool:
        if self._same is None:
            self._same = self._exhaustive(self.subject.kernel)
        pairs, outputs = self._same
        try:
            found, results = self._exhaustive(mutant)
        except EmulatorError:
            return False
        return found <= pairs and results == outputs

    def _exhaustive(self, kernel: Kernel) -> tuple[set[Pair], list[bytes]]:
        """Unordered pairs, and the results."""
        kept: list[History] = []

        def prepare(launch: Launch) -> None:
            order = History(launch.finding, kernel.instructions)
            order.begin([i.line for i in kernel.instructions])
            launch.order = order
            kept.append(order)

        quiet = dict.fromkeys(("race", "proxy", "same-value", "tcgen05-fence"), "ignore")
        options = dataclasses.replace(self.subject.options(), severity={**self.subject.severity, **quiet})
        _, expected = self.subject.launch(kernel, options, prepare)
        return kept[0].unordered, [e.buffer.array.tobytes() for e in expected]

    def _same_place(self, i: Instruction, mutation: Mutation) -> bool:
        """The changed descriptor of A or B means the same addresses, for all values that it had."""
        place, add, flip = mutation.field
        for values in self.trace.operands[i.index]:
            old = values[place]
            new = ((old + add) ^ flip) & ((1 << 64) - 1)
            try:
                if not np.array_equal(_addresses(i, place, values, old), _addresses(i, place, values, new)):
                    return False
            except ValueError:
                return False
        return True


def _addresses(i: Instruction, place: int, values: tuple[int, ...], descriptor: int) -> np.ndarray:
    """Where the elements of an operand are, in order."""
    if i.op == "wgmma":
        form = Form(i)
        rows, mn_major = (64, form.a_mn) if place == 1 else (form.n, form.b_mn)
        return operand_at(descriptor, rows, form.k, form.size, mn_major).index
    kind = next(m[6:] for m in i.mods if m.startswith("kind::"))
    group = 2 if "cta_group::2" in i.mods else 1
    t = decode_instruction_descriptor(values[3], kind, group, i.has("ws"), values[1] == 0)
    rows, mn_major = (t.m, t.a_mn_major) if place == 1 else (t.n, t.b_mn_major)
    return shared_operand(descriptor, rows // group, t.k, t.element_bytes, mn_major).units


__all__ = ["KINDS", "Options", "Prover"]
