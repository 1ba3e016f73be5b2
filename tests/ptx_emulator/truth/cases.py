"""All cases, in the order of their modules."""

from __future__ import annotations

from functools import cache

from . import (
    cases_atomic,
    cases_copy,
    cases_float,
    cases_integer,
    cases_matrix,
    cases_memory,
    cases_sync,
    cases_tensor,
    cases_warp,
)
from .case import Case


@cache
def cases() -> tuple[Case, ...]:
    """Every case once.

    Raises:
        ValueError: two cases have one name.
    """
    families = (
        cases_integer,
        cases_float,
        cases_memory,
        cases_warp,
        cases_atomic,
        cases_sync,
        cases_tensor,
        cases_copy,
        cases_matrix,
    )
    found = sorted((case for family in families for case in family.cases()), key=lambda case: case.module)
    names = [case.name for case in found]
    if len(set(names)) < len(names):
        raise ValueError(f"cases with one name: {sorted({n for n in names if names.count(n) > 1})}")
    return tuple(found)
