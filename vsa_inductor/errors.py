"""The typed errors a user can catch. Each message names what was given and what is allowed."""

from __future__ import annotations


class ArgumentError(ValueError):
    """An argument that cannot be used, found before anything is launched.

    Attributes:
        argument: the name of the argument, as in the signature of the called function.
        given: what was passed, in words.
        allowed: what is allowed, in words.
    """

    def __init__(self, argument: str, given: object, allowed: str) -> None:
        super().__init__(f"{argument}: got {given}; allowed: {allowed}")
        self.argument = argument
        self.given = given
        self.allowed = allowed

    def __reduce__(self) -> tuple[type[ArgumentError], tuple[str, object, str]]:
        return type(self), (self.argument, self.given, self.allowed)


class BackendUnavailableError(RuntimeError):
    """No backend can run the problem, or under ``strict=True`` not the one asked for. Holds every refusal."""


class NativeLibraryError(RuntimeError):
    """A native library could not be loaded. The message holds the path and the loader's reason."""
