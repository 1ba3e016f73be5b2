"""The typed errors a user can catch. Each message names what was given and what is allowed."""

from __future__ import annotations


class ArgumentError(ValueError):
    """An argument that cannot be used, found before anything is launched.

    Attributes:
        argument: the name of the argument, as in the signature of the called function.
        given: what was passed, in words.
        allowed: what is allowed, in words.
    """

    # No constructor of its own: Dynamo cannot trace one, and its message would hide the three words.
    @property
    def argument(self) -> str:
        return self.args[0]

    @property
    def given(self) -> object:
        return self.args[1]

    @property
    def allowed(self) -> str:
        return self.args[2]

    def __str__(self) -> str:
        return f"{self.argument}: got {self.given}; allowed: {self.allowed}"


class BackendUnavailableError(RuntimeError):
    """No backend can run the problem, or under ``strict=True`` not the one asked for. Holds every refusal."""


class NativeLibraryError(RuntimeError):
    """A native library could not be loaded. The message holds the path and the loader's reason."""
