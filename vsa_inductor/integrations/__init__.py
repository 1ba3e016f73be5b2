"""Adapters to other libraries' models. Each imports its library only when it is handed one of its models."""

from .diffusers import SparsifyHandle, sparsify

__all__ = ["SparsifyHandle", "sparsify"]
