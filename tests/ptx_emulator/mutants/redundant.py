"""Proofs that a mutant does the same as the kernel: a fault that no test could find.

no edge      in the unchanged run the wait or fence teaches no thread anything, and frees no register: without it the
             happens-before order is the same
ordered      in a run of the mutant every pair of conflicting accesses is ordered that was so before. All pairs are
             compared, lane by lane and with nothing forgotten (history.py), not only those that the checker keeps;
             the results are the same bits. What one run orders, all do: no phase of an mbarrier depends on the
             schedule (engines/phases.py), or the mutant would have been found
same place   the descriptor with the fault names the same bytes in the same order: its layout does not use the field
zero sum     the accumulator holds zeros there: adding to it or not is the same
unread       what the store writes is never read, neither at the right nor at the wrong place: with NaN instead of its
             values the results are the same bits
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from ..engines.tcgen05_mma import shared_operand
from ..engines.wgmma_form import Form, operand_at
from ..errors import EmulatorError
from ..ir import Imm, Instruction, Vec
from .edit import Editor, Mutation
from .history import History, Pair
from .subject import Subject
from .trace import Trace, product_shape

if TYPE_CHECKING:
    from ..ir import Kernel
    from ..launch import Launch

# Kinds that only change what is ordered: a mutant that orders enough is the same program.
_ORDER = ("drop", "weaker", "late", "early", "wrong barrier")
_TEACHING = ("wait", "fence", "barrier")
_QUIET = dict.fromkeys(("race", "proxy", "same-value", "tcgen05-fence"), "ignore")
_NAN = 0x7FC00001


class Prover:
    """What is known of the unchanged kernel."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.trace = Trace()
        _, expected = subject.launch(subject.kernel, subject.options(), self.trace.attach)
        self.trace.finish()
        self.results = [e.buffer.array.tobytes() for e in expected]
        self._pairs: set[Pair] | None = None

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
        if kind == "inverted accumulation" and n not in self.trace.accumulated:
            return "zero sum"
        if (i.op, i.mods[:1]) == ("tcgen05", ("st",)) and self._unread(i, mutation):
            return "unread"
        return ""

    # ordered ----------------------------------------------------------------------------------------------------------
    def _ordered(self, mutant: Kernel) -> bool:
        if self._pairs is None:
            self._pairs = self._exhaustive(self.subject.kernel) or set()
        found = self._exhaustive(mutant)
        return found is not None and found <= self._pairs

    def _exhaustive(self, kernel: Kernel) -> set[Pair] | None:
        """Unordered pairs of a run; None where it does not end with the results of the unchanged kernel."""
        kept: list[History] = []

        def prepare(launch: Launch) -> None:
            kept.append(History(launch.finding, kernel.instructions))
            launch.order = kept[0]

        if not self._same_results(kernel, prepare):
            return None
        # A kernel that has no tcgen05.fence itself is not held to it.
        lint = self.subject.severity["tcgen05-fence"] == "lint"
        return {p for p in kept[0].unordered if not (lint and p.missing == "tcgen05 fence")}

    def _same_results(self, kernel: Kernel, prepare: Callable[[Launch], None] | None = None) -> bool:
        options = self.subject.options()
        if prepare is not None:
            options = dataclasses.replace(options, severity={**options.severity, **_QUIET})
        try:
            _, expected = self.subject.launch(kernel, options, prepare)
        except EmulatorError:
            return False
        return [e.buffer.array.tobytes() for e in expected] == self.results

    # Others -----------------------------------------------------------------------------------------------------------
    def _same_place(self, i: Instruction, mutation: Mutation) -> bool:
        """The changed descriptor means the same addresses, for all values that it had."""
        place, add, flip = mutation.field
        if i.mods[0] == "cp":
            return False
        for values in self.trace.operands[i.index]:
            old = values[place]
            new = ((old + add) ^ flip) & ((1 << 64) - 1)
            try:
                if not np.array_equal(_addresses(i, place, values, old), _addresses(i, place, values, new)):
                    return False
            except ValueError:
                return False
        return True

    def _unread(self, i: Instruction, mutation: Mutation) -> bool:
        last = len(i.args) - 1

        def poison(editor: Editor) -> None:
            nan = editor.fresh("w")
            editor.insert(i.index, "mov", ("b32",), (nan, Imm(_NAN)))
            editor.set(i.index, (last,), Vec((nan,) * len(i.args[last].items)))

        def both(editor: Editor) -> None:
            poison(editor)
            mutation.edit(editor)

        kernel = self.subject.kernel
        return all(self._same_results(Mutation("", i.index, "", e).apply(kernel)) for e in (poison, both))


def _addresses(i: Instruction, place: int, values: tuple[int, ...], descriptor: int) -> np.ndarray:
    """Where the elements of an operand are, in order."""
    if i.op == "wgmma":
        form = Form(i)
        rows, mn_major = (64, form.a_mn) if place == 1 else (form.n, form.b_mn)
        return operand_at(descriptor, rows, form.k, form.size, mn_major).index
    group = 2 if i.has("cta_group::2") else 1
    t = product_shape(i, values)
    rows, mn_major = (t.m, t.a_mn_major) if place == 1 else (t.n, t.b_mn_major)
    return shared_operand(descriptor, rows // group, t.k, t.element_bytes, mn_major).units
