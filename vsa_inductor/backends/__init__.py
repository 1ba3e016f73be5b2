"""Who can run a problem, why not, and how to launch. One file per backend; no backend imports another."""

from . import eager, sm90, sm100, triton

__all__ = ["eager", "sm90", "sm100", "triton"]
