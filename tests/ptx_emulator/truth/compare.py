"""Outputs against the truth: bit for bit, or as the case says; and the words for a difference."""

from __future__ import annotations

import numpy as np

from .case import AnyNan, Arrays, Case, Close
from .exact import FORMATS, Format, to_float

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def _bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(_UNSIGNED[array.dtype.itemsize])


def _is_nan(bits: np.ndarray, form: Format) -> np.ndarray:
    magnitude = bits & bits.dtype.type((1 << (form.bits - 1)) - 1)
    return magnitude > bits.dtype.type(((1 << form.exponent) - 1) << form.mantissa)


def _values(array: np.ndarray, formats: str) -> np.ndarray:
    """float64 values; `a|b` reads the first half of the rows in format a and the second in b."""
    names = formats.split("|")
    parts = np.array_split(array, len(names))
    decoded = []
    for name, part in zip(names, parts, strict=True):
        form = FORMATS[name]
        patterns = np.ascontiguousarray(part).view(_UNSIGNED[form.bits // 8])
        decoded.append(to_float(patterns, form))
    return np.concatenate(decoded)


def wrong(case: Case, name: str, got: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """A boolean array of the elements of one output that differ from the truth."""
    rule = case.compare.get(name)
    if isinstance(rule, Close):
        a, b = _values(got, rule.format), _values(truth, rule.format)
        with np.errstate(invalid="ignore"):
            near = np.abs(a - b) <= rule.relative * np.abs(b) + rule.absolute
        return ~(near | (a == b) | (np.isnan(a) & np.isnan(b)))
    different = _bits(got) != _bits(truth)
    if isinstance(rule, AnyNan):
        form = FORMATS[rule.format]
        different &= ~(_is_nan(_bits(got), form) & _is_nan(_bits(truth), form))
    return different


def describe(case: Case, name: str, got: np.ndarray, truth: np.ndarray, limit: int = 4) -> str:
    """The first differences of an output, with the instruction where the case names it; empty if there is none."""
    bad = np.argwhere(wrong(case, name, got, truth))
    if not len(bad):
        return ""
    rows = case.rows.get(name)
    lines = [f"{case.name}: {len(bad)} of {truth.size} elements of {name} differ"]
    shown = bad
    if rows is not None:
        # One line per instruction that differs.
        firsts = np.unique(bad[:, 0], return_index=True)[1]
        shown, limit = bad[firsts], max(limit, len(firsts))
    if case.compare.get(name) and isinstance(case.compare[name], Close):
        lines.append(f"  at {[tuple(int(v) for v in index) for index in bad[:limit]]}")
        return "\n".join(lines)
    width = 2 * truth.dtype.itemsize
    for index in shown[:limit]:
        at = tuple(int(v) for v in index)
        a, b = int(_bits(got)[at]), int(_bits(truth)[at])
        label = f" {rows[at[0]]}" if rows is not None else ""
        operands = f" of {_column(case.buffers, at[-1])}" if rows is not None else ""
        lines.append(f"  {at}{label}{operands}: got {a:#0{width + 2}x}, truth {b:#0{width + 2}x}")
    return "\n".join(lines)


def _column(buffers: Arrays, column: int) -> list[str]:
    given = buffers.get("in")
    return [] if given is None or given.ndim != 2 else [f"{int(v):#x}" for v in _bits(given)[:, column]]
