"""Options of one thread: which backend, and how strict.

They live in a ``threading.local``, which Dynamo guards: a flipped option recompiles, and the context manager also works
inside a compiled function. A ``ContextVar`` would break the graph.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from types import TracebackType

from .errors import ArgumentError

AUTO = "auto"


@dataclass(frozen=True)
class Options:
    """How calls in this thread choose and check.

    Attributes:
        backend: ``"auto"``, a backend's name, or a pair (forward, backward) of those.
        deterministic: gradients must be bitwise equal from run to run; backends that cannot promise it are refused.
        strict: a named backend that refuses is an error instead of a warning and a fallback.
        debug: check block ids, counts and sizes on every call. Costs a device synchronisation in eager.
    """

    backend: str | tuple[str, str] = AUTO
    deterministic: bool = False
    strict: bool = False
    debug: bool = False


_DEFAULT = Options()
_state = threading.local()
_state.options = _DEFAULT


def current() -> Options:
    """The options in force in this thread."""
    # A thread that never entered the context manager has no attribute of its own.
    return getattr(_state, "options", _DEFAULT)


class options:
    """Context manager that replaces the options of this thread, for eager calls and inside compiled functions.

    Args:
        backend: ``"auto"``, a name of ``vsa_inductor.backend_names()``, or a pair (forward, backward) of those.
        deterministic, strict, debug: see :class:`Options`. What is not given keeps the value in force where the
            context is entered. Inside a compiled function, make the object there too.

    Raises:
        ArgumentError: ``backend`` is not a known name.
    """

    def __init__(
        self,
        backend: str | tuple[str, str] | None = None,
        deterministic: bool | None = None,
        strict: bool | None = None,
        debug: bool | None = None,
    ) -> None:
        if backend is not None:
            _check_backend(backend)
        self._asked = (backend, deterministic, strict, debug)
        # One object may be entered again while it is in force.
        self._outer: list[Options] = []

    def __enter__(self) -> Options:
        outer = current()
        backend, deterministic, strict, debug = self._asked
        self._outer.append(outer)
        _state.options = Options(
            outer.backend if backend is None else backend,
            outer.deterministic if deterministic is None else deterministic,
            outer.strict if strict is None else strict,
            outer.debug if debug is None else debug,
        )
        return current()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _state.options = self._outer.pop()


def _check_backend(backend: str | tuple[str, str]) -> None:
    from .backends.capability import backend_names

    allowed = (AUTO, *backend_names())
    names = (backend, backend) if isinstance(backend, str) else backend
    if not isinstance(names, tuple) or len(names) != 2 or any(name not in allowed for name in names):
        raise ArgumentError("backend", repr(backend), f"one of {allowed}, or a pair (forward, backward) of them")
