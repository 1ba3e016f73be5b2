"""Threads: register files, the views of them that generated code works on, and a warp's way through the program.

A warp is a list of fragments (program counter, mask of threads). Threads that diverge are fragments of their own; the
one that is furthest behind in the text goes on first, and fragments that meet merge. With one fragment of all threads
the mask is None, and generated code takes its fast form. A `Group` is the view of four warps at the same place: a
straight-line run is then executed once for 128 threads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import BoundsError, PoisonError
from .ir import CLASS_OF_SIZE
from .memory import CONST_WINDOW, GLOBAL_BASE, LOCAL_WINDOW, RANK_SHIFT, WINDOWS
from .registry import BRANCH, EXIT, JUMP_TABLE, WAIT

if TYPE_CHECKING:
    from .cta import Cta
    from .hb import Actor, Token
    from .ir import Instruction
    from .program import Program

WARP = 32
ALL_LANES = 0xFFFFFFFF
# After so many polls another fragment goes on: threads of a warp make progress each (PTX ISA, Independent Thread
# Scheduling), and the one that is furthest behind may wait for one of the others.
POLLS = 64
# The lists of register rows that a View has besides `p` and `q`, each with the dtype of its rows.
DTYPES = {
    "u16": np.uint16,
    "s16": np.int16,
    "f16": np.float16,
    "u32": np.uint32,
    "s32": np.int32,
    "f32": np.float32,
    "u64": np.uint64,
    "s64": np.int64,
    "f64": np.float64,
}


class RegisterFile:
    """All registers of a block: [registers, threads] for each class."""

    def __init__(self, counts: dict[str, int], threads: int) -> None:
        self.files: dict[str, np.ndarray] = {
            "p": np.zeros((counts["p"], threads), bool),
            "h": np.zeros((counts["h"], threads), np.uint16),
            "w": np.zeros((counts["w"], threads), np.uint32),
            "d": np.zeros((counts["d"], threads), np.uint64),
            "q": np.zeros((counts["q"], threads, 2), np.uint64),
        }
        self.carry = np.zeros(threads, bool)  # of add.cc and its kin

    def clear(self) -> None:
        for file in self.files.values():
            file[...] = 0


class View:
    """A contiguous range of a block's threads. Lists of register rows (`u32`, `p`, ...) are made on first use."""

    def __init__(self, cta: Cta, start: int, width: int) -> None:
        self.cta = cta
        self.start = start
        self.width = width
        self.members: list[Warp] = []
        self.carry = cta.registers.carry[start : start + width]
        self._specials: dict[str, np.ndarray] = {}

    def __getattr__(self, name: str) -> Any:
        files = self.cta.registers.files
        columns = slice(self.start, self.start + self.width)
        if name in DTYPES:
            dtype = np.dtype(DTYPES[name])
            rows = list(files[CLASS_OF_SIZE[dtype.itemsize]].view(dtype)[:, columns])
        elif name in ("p", "q"):
            rows = list(files[name][:, columns])
        else:
            raise AttributeError(name)
        setattr(self, name, rows)
        return rows

    def file(self, cls: str) -> np.ndarray:
        """[registers, width] of a class: for engines that read and write many registers at once."""
        return self.cta.registers.files[cls][:, self.start : self.start + self.width]

    def special(self, name: str) -> np.ndarray:
        value = self._specials.get(name)
        if value is None:
            value = self.cta.special(name, self.start, self.width)
            if name in ("clock", "clock_hi", "clock64", "globaltimer", "globaltimer_lo", "globaltimer_hi"):
                return value
            self._specials[name] = value
        return value

    def address(self, space: str, offset: int) -> int:
        """The address of a variable, as a register of the right width would hold it."""
        if space.startswith("shared"):
            return offset + (self.cta.rank << RANK_SHIFT)
        if space == "global":
            return GLOBAL_BASE + self.cta.launch.module_base + offset
        if space == "const":
            return CONST_WINDOW + offset
        if space == "local":
            return LOCAL_WINDOW + offset
        return offset

    def window(self, space: str) -> int:
        """What cvta adds to an address of this space to make it generic."""
        return 0 if space in ("global", "const", "local") else WINDOWS[space]


class Fragment:
    __slots__ = ("mask", "pc")

    def __init__(self, pc: int, mask: np.ndarray | None) -> None:
        self.pc = pc
        self.mask = mask


class Warp(View):
    def __init__(self, cta: Cta, number: int, threads: int) -> None:
        super().__init__(cta, number * WARP, WARP)
        self.number = number
        self.members = [self]
        self.lanes = np.arange(WARP)
        self.live = (1 << threads) - 1  # bits of threads that exist and have not exited
        self.fragments = [Fragment(0, None if threads == WARP else self.lanes < threads)]
        self.done = False
        self.pending = 0  # registers that an engine owns, a bit each (Program.register_bit)
        self.owners: dict[int, int] = {}  # pending register -> index of the instruction that took it
        self.written = 0  # registers written since the last wgmma.fence
        self.rotation = 0
        self.ahead = False  # a fragment goes on before one that polls
        self.polls = 0  # strong accesses and failed waits of a diverged warp: it may spin for its own lanes
        self.actor: Actor | None = None
        self.state: dict[str, Any] = {}  # engines keep what they know of a warp here
        self.waiting = ""  # why it stands still: said by the instruction that blocks
        self.label = f"warp {number}"

    def bits(self, mask: np.ndarray | None) -> int:
        """Lanes of a mask as an integer; None = all that live."""
        return self.live if mask is None else mask_bits(mask)

    def converged(self, mask: np.ndarray | None) -> bool:
        """All living threads execute together."""
        return mask is None or mask_bits(mask) == self.live

    # Execution --------------------------------------------------------------------------------------------------------
    def run(self, program: Program, budget: int, stop: frozenset[int] = frozenset()) -> int:
        """Goes on until it blocks, ends, has done `budget` instructions or comes to `stop`; returns the count."""
        done = 0
        tries = 0
        while done < budget and not self.done:
            fragment = self._next_fragment()
            single = len(self.fragments) == 1
            before = done
            done, blocked = self._advance(program, fragment, budget, done, single, stop)
            if blocked:
                if len(self.fragments) > 1 and tries < 2 * len(self.fragments):
                    self.rotation += 1
                    self.polls, self.ahead = 0, False
                    tries += 1
                    continue
                return done
            if done > before:
                tries = 0
            if single and stop and not self.done and self.fragments[0].pc in stop:
                return done
        return done

    def _next_fragment(self) -> Fragment:
        fragments = self.fragments
        if len(fragments) == 1:
            self.polls = 0
            return fragments[0]
        fragments.sort(key=_pc)
        i = 0
        while i + 1 < len(fragments):
            a, b = fragments[i], fragments[i + 1]
            if a.pc == b.pc:
                assert a.mask is not None and b.mask is not None  # two fragments: neither has all threads
                a.mask = a.mask | b.mask
                del fragments[i + 1]
            else:
                i += 1
        if len(fragments) == 1:
            self.rotation, self.polls, self.ahead = 0, 0, False
            mask = fragments[0].mask
            if mask is not None and self.live == ALL_LANES and mask_bits(mask) == ALL_LANES:
                fragments[0].mask = None
            return fragments[0]
        if self.polls > POLLS:
            self.rotation, self.polls, self.ahead = self.rotation + 1, 0, True
        return fragments[self.rotation % len(fragments)]

    def _advance(
        self, program: Program, fragment: Fragment, budget: int, done: int, single: bool, stop: frozenset[int]
    ) -> tuple[int, bool]:
        """Runs one fragment: a step where there are others, else as far as it goes. (instructions done, blocked?)"""
        steps = program.steps
        pc, base = fragment.pc, fragment.mask
        while True:
            step = steps[pc]
            if self.pending and self.pending & step.touches and not step.owns_registers:
                self.poisoned(program, pc)
            if program.tracks_written:
                self.written |= step.writes
            step.count += 1
            if step.run is not None:
                if base is None:
                    step.run(self, None)
                else:
                    assert step.run_masked is not None
                    step.run_masked(self, base)
                pc = step.next
                done += step.length
            else:
                done += 1
                outcome = self._special(step, fragment, pc, base)
                if outcome < 0:
                    if outcome == BLOCKED:
                        step.count -= 1
                        fragment.pc = pc
                        return done - 1, True
                    return done, False  # the fragments changed
                pc = outcome
            fragment.pc = pc
            if not single or done >= budget or pc in stop:
                return done, False

    def _special(self, step: Any, fragment: Fragment, pc: int, base: np.ndarray | None) -> int:
        """One instruction that is no straight-line code. Next pc, or BLOCKED, or CHANGED."""
        mask = base
        if step.pred is not None:
            mask = self.p[step.pred.index]
            if step.pred.negated:
                mask = ~mask
            if base is not None:
                mask = mask & base
            n = np.count_nonzero(mask)
            if n == 0:
                return pc + 1
            mask = None if n == WARP and base is None else mask.copy()
            if mask is not None and base is not None and n == np.count_nonzero(base):
                mask = base
        if self.ahead and step.aligned and len(self.fragments) > 1:
            self.waiting = "the other threads of the warp"
            return BLOCKED
        kind = step.kind
        if kind == WAIT:
            self.waiting = ""
            return pc + 1 if step.special(self, mask) else BLOCKED
        if kind == BRANCH:
            if mask is base:
                return step.target
            assert mask is not None
            self.split(fragment, pc + 1, step.target, mask)
            return CHANGED
        if kind == EXIT:
            return self._exit(fragment, pc, mask)
        if kind == JUMP_TABLE:
            return self._jump(step, fragment, base)
        step.special(self, mask)
        return pc + 1

    def split(self, fragment: Fragment, next_pc: int, target: int, taken: np.ndarray) -> None:
        rest = (~taken) if fragment.mask is None else (fragment.mask & ~taken)
        fragment.pc, fragment.mask = next_pc, rest
        self.fragments.append(Fragment(target, taken))

    def _exit(self, fragment: Fragment, pc: int, mask: np.ndarray | None) -> int:
        self.live &= ~self.bits(mask)
        if mask is fragment.mask:
            self.fragments.remove(fragment)
        else:
            assert mask is not None
            fragment.mask = (~mask) if fragment.mask is None else (fragment.mask & ~mask)
            fragment.pc = pc + 1
        self.done = not self.fragments
        self.cta.retire(self)
        return CHANGED

    def _jump(self, step: Any, fragment: Fragment, base: np.ndarray | None) -> int:
        chosen = step.special(self)
        active = self.lanes if base is None else np.flatnonzero(base)
        numbers = sorted(set(chosen[active].tolist()))
        if numbers[-1] >= len(step.target):
            where = self.cta.program.instructions[fragment.pc].where()
            raise BoundsError(f"{self.label}: brx.idx {numbers[-1]} of {len(step.target)} targets\n  {where}")
        if len(numbers) == 1:
            return step.target[numbers[0]]
        self.fragments.remove(fragment)
        for number in numbers:
            mask = chosen == number
            self.fragments.append(Fragment(step.target[number], mask if base is None else mask & base))
        return CHANGED

    def learn(self, lanes: int, token: Token, instruction: Instruction) -> None:
        """A wait is over: these lanes know what it carries. Notes waits that ordered something."""
        if self.actor is None:
            return
        if token.known & ~self.actor.known:
            self.cta.launch.report.useful.add(instruction.index)
        self.actor.acquire(lanes, token)

    # Registers that engines own ---------------------------------------------------------------------------------------
    def take(self, registers: int, index: int) -> None:
        """Registers (bits) belong to an asynchronous instruction until `give`."""
        self.pending |= registers
        self.owners[registers] = index

    def give(self, registers: int) -> None:
        self.pending &= ~registers
        self.owners.pop(registers, None)

    def poisoned(self, program: Program, pc: int) -> None:
        step = program.steps[pc]
        for i in range(pc, pc + step.length):
            touched = program.registers_of[i] & self.pending
            if touched:
                owner = next((index for bits, index in self.owners.items() if bits & touched), pc)
                self.cta.report(
                    PoisonError,
                    f"{self.label} touches a register that an asynchronous instruction still owns\n"
                    f"  now:    {program.instructions[i].where()}\n"
                    f"  before: {program.instructions[owner].where()}\n  missing: the wait for it",
                )
                self.pending &= ~touched
                return

    def describe(self, program: Program) -> str:
        places = [f"{program.instructions[f.pc].where()}" for f in self.fragments]
        why = f" [{self.waiting}]" if self.waiting else ""
        return f"{self.label}{why}: " + "; ".join(places)


BLOCKED, CHANGED = -1, -2


def _pc(fragment: Fragment) -> int:
    return fragment.pc


def mask_bits(mask: np.ndarray) -> int:
    return int.from_bytes(np.packbits(mask, bitorder="little").tobytes(), "little")


class Group(View):
    """Four neighbouring warps in step."""

    def __init__(self, cta: Cta, warps: list[Warp]) -> None:
        super().__init__(cta, warps[0].start, WARP * len(warps))
        self.members = warps

    def together(self) -> int:
        """The pc that all warps stand at with all threads, or -1."""
        pc = -1
        for w in self.members:
            if w.done or len(w.fragments) != 1:
                return -1
            f = w.fragments[0]
            if f.mask is not None or (pc >= 0 and f.pc != pc):
                return -1
            pc = f.pc
        return pc

    def run(self, program: Program, budget: int) -> int:
        """In step as far as that goes; returns the number of warp instructions."""
        done = 0
        pc = self.together()
        steps = program.steps
        n = len(self.members)
        while pc >= 0 and done < budget:
            step = steps[pc]
            if step.run is None or any(w.pending & step.touches for w in self.members):
                target = step.target if step.kind == BRANCH and step.pred is None else self._uniform(step, pc)
                if target < 0:
                    count = sum(w.run(program, 1) for w in self.members)
                    done += count
                    following = self.together()
                    if count < n or following < 0:
                        return done
                    pc = following
                    continue
                step.count += n
                pc = target
                done += n
            else:
                step.run(self, None)
                step.count += n
                done += n * step.length
                if program.tracks_written:
                    for w in self.members:
                        w.written |= step.writes
                pc = step.next
            for w in self.members:
                w.fragments[0].pc = pc
        return done

    def _uniform(self, step: Any, pc: int) -> int:
        """Target of a branch that all threads of the group decide alike, or -1."""
        if step.kind != BRANCH or step.pred is None:
            return -1
        n = np.count_nonzero(self.p[step.pred.index])
        if n not in (0, self.width):
            return -1
        return step.target if (n > 0) != step.pred.negated else pc + 1
