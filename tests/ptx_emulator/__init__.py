"""A PTX emulator: sm_90a, sm_100a and sm_12xa kernels on a CPU, and their races in one run (README.md)."""

from .errors import EmulatorError, Finding, LoadError
from .launch import Device, Module, Options, Report, load

__all__ = ["Device", "EmulatorError", "Finding", "LoadError", "Module", "Options", "Report", "load"]
