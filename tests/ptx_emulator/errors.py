"""What the emulator says when something is wrong: one class for each kind, each names the PTX line.

Two families. A `LoadError` is about text: the module cannot be run at all. A `Finding` is about a run: a check failed
while the kernel executed; `Options.severity` says whether a kind stops the run, is only noted, or is ignored.
"""

from __future__ import annotations


class EmulatorError(Exception):
    """Base of everything that this package raises on purpose."""


class LoadError(EmulatorError):
    """The text is no PTX that can be run here."""


class PtxSyntaxError(LoadError):
    """A statement that the parser cannot read; the message has its line."""


class UnknownInstructions(LoadError):
    """Opcodes without a meaning here, all of a module at once: `missing` maps an opcode to a sample line."""

    def __init__(self, missing: dict[str, str]) -> None:
        self.missing = missing
        rows = "\n".join(f"  {name}: {sample}" for name, sample in sorted(missing.items()))
        super().__init__(f"{len(missing)} instruction form(s) have no meaning in this emulator:\n{rows}")


class LaunchError(EmulatorError):
    """A launch with wrong arguments, shape or sizes; nothing ran."""


class Finding(EmulatorError):
    """A check that failed during a run. `kind` is the key of `Options.severity`."""

    kind = "finding"


class RaceError(Finding):
    """Two accesses, one of them a write, that nothing orders."""

    kind = "race"


class SameValueRace(Finding):
    """Two unordered generic writes of the same value: harmless in practice, and compilers make them."""

    kind = "same-value"


class ProxyError(Finding):
    """An asynchronous access to what the generic proxy wrote, without a fence.proxy between them."""

    kind = "proxy"


class ProxyReuseError(Finding):
    """An asynchronous write over what the generic proxy wrote or read, without a fence.proxy between them."""

    kind = "proxy-reuse"


class TcgenFenceError(Finding):
    """Tensor memory accesses of several threads ordered by a barrier, but without tcgen05.fence around it."""

    kind = "tcgen05-fence"


class PoisonError(Finding):
    """A register touched while an asynchronous instruction still owns it."""

    kind = "poison"


class UninitialisedError(Finding):
    """A read of memory that nothing wrote."""

    kind = "uninitialised"


class BoundsError(Finding):
    """An access outside every allocation of its state space."""

    kind = "bounds"


class AlignmentError(Finding):
    """An address that is no multiple of what its access needs."""

    kind = "alignment"


class BarrierError(Finding):
    """A barrier used against its rules: not initialised, invalidated, too many arrivals, counts that disagree."""

    kind = "barrier"


class LateArrivalError(Finding):
    """An mbarrier invalidated while arrivals on it may be outstanding."""

    kind = "late-arrival"


class TransactionError(Finding):
    """Bytes announced to an mbarrier and bytes that arrived there differ."""

    kind = "transaction"


class DeadlockError(Finding):
    """Nobody can go on; the message lists every waiting warp."""

    kind = "deadlock"


class ConvergenceError(Finding):
    """An instruction with .aligned (or a full member mask) executed by a part of a warp."""

    kind = "convergence"


class DescriptorError(Finding):
    """A matrix, instruction or tensor map descriptor, or an operand, with a value that is not legal."""

    kind = "descriptor"


class TensorMemoryError(Finding):
    """Tensor memory touched outside what the block has allocated, or allocated against the rules."""

    kind = "tensor-memory"


class TrapError(Finding):
    """The kernel executed trap, or a device assertion failed."""

    kind = "trap"


class LeftoverError(Finding):
    """A block ended with work in flight, tensor memory not given back, or a barrier phase half done."""

    kind = "leftover"


class BudgetError(Finding):
    """More instructions than `Options.max_instructions`: probably a loop that waits for nobody."""

    kind = "budget"


KINDS = tuple(c.kind for c in Finding.__subclasses__())
