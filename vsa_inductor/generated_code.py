"""Reads the order of calls out of a module that Inductor generated.

Inductor keeps no record of the final call order: the text is the only source. ``tests/test_explain.py`` holds its form.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

_KERNEL_SOURCE = re.compile(r"'''.*?'''", re.DOTALL)
_KERNEL_DEFINITION = re.compile(r"^(\w+) = async_compile\.(\w+)\(", re.MULTILINE)
# What follows is a benchmark harness with kernel launches of its own.
_HARNESS = re.compile(r"^def (?:get_args|benchmark_compiled_module)\b", re.MULTILINE)
_HANDLE = re.compile(r"^ *# \[Provenance debug handles\] (\S+:\d+)$")
_OPERATORS = re.compile(r"^ *# .*Original ATen: \[(.*)\]$")
_FUNCTION = re.compile(r"^ *def (\w+)\(")
# The brackets belong to the pattern: assertions after a call name the same operator in a string.
_CALL = re.compile(
    r"(?:torch\.ops\.(?P<opaque>\w+\.\w+)(?:\.\w+)?|extern_kernels\.(?P<extern>\w+)"
    r"|self\.partitions\[(?P<partition>\d+)\]|\b(?P<kernel>\w+)(?:\.run)?)\("
)
# Calls of ours that take the place of work which the user wrote: what that was stands among their arguments.
_FUSED = re.compile(
    r"vsa\.norm_rope_tile(?:_backward)?\.default\((?P<operands>\[[^\]]*\])?.*"
    r"'(?P<rotation>interleaved|half|none)', '(?P<norm>all|head|none)', (?P<plain>\d+)?"
)
# torch.ops calls that only name memory.
_NO_WORK = {"inductor._reinterpret_tensor", "inductor._alloc_from_pool"}


@dataclass(frozen=True)
class GeneratedCall:
    """A call in a generated module.

    Attributes:
        kind: ``"opaque"`` (an operator), ``"extern"`` (a library), or a kernel's language: ``"triton"``, ``"cpp"``.
        name: of the operator, without its overload, of the library routine or of the kernel.
        handle: Inductor's name for this very launch, empty where it gave none.
        operators: the operators that the comment at the call names, empty where there is none.
        instead_of: in words, the user's work that an operator of ours takes the place of; empty for other calls.
    """

    kind: str
    name: str
    handle: str = ""
    operators: tuple[str, ...] = ()
    instead_of: str = ""


def calls_in_order(code: str) -> tuple[GeneratedCall, ...]:
    """The kernels, operators and library routines that a generated module calls, in the order in which it calls them.

    Args:
        code: the Python module that Inductor wrote, with the Python wrapper (not ``cpp_wrapper``).
    """
    kinds = {name: method.partition("_")[0] for name, method in _KERNEL_DEFINITION.findall(code)}
    text = _KERNEL_SOURCE.sub("", code)
    harness = _HARNESS.search(text)
    functions = _calls_by_function(text[: harness.start()] if harness else text, kinds)
    return tuple(_expand("call", functions))


def _calls_by_function(text: str, kinds: dict[str, str]) -> dict[str, list[GeneratedCall]]:
    functions: dict[str, list[GeneratedCall]] = {}
    current, handle, operators = "", "", ""
    for line in text.splitlines():
        if start := _FUNCTION.match(line):
            current = start[1]
            functions[current] = []
        elif comment := _HANDLE.match(line):
            handle = comment[1]
        elif comment := _OPERATORS.match(line):
            operators = comment[1]
        elif current and not line.lstrip().startswith("#"):
            for match in _CALL.finditer(line):
                if call := _call(match, kinds, functions):
                    comments = (handle, tuple(filter(None, operators.split(", "))))
                    functions[current].append(GeneratedCall(*call, *comments, _instead_of(line)))
                    # Comments stand before the call that they speak of, sometimes with lines between.
                    handle = operators = ""
    return functions


def _call(match: re.Match[str], kinds: dict[str, str], functions: Collection[str]) -> tuple[str, str] | None:
    if match["opaque"]:
        return None if match["opaque"] in _NO_WORK else ("opaque", match["opaque"])
    if match["extern"]:
        return "extern", match["extern"]
    if match["partition"]:
        return "partition", f"partition_{match['partition']}"
    name = match["kernel"]
    if name in functions:  # a nested region, which the module has as a function in front of those that call it
        return "partition", name
    return (kinds[name], name) if name in kinds else None


def _instead_of(line: str) -> str:
    match = _FUSED.search(line)
    if match is None:
        return ""
    norm = {"all": "RMSNorm over all heads", "head": "RMSNorm per head", "none": ""}[match["norm"]]
    rotation = "" if match["rotation"] == "none" else f"{match['rotation']} RoPE"
    work = ", ".join(filter(None, (norm, rotation)))
    if not match["operands"]:
        return f"un-tile, backward of {work}" if work else "un-tile"
    plain = int(match["plain"] or 0)
    others = match["operands"].count(",") + 1 - plain
    parts = [f"{work}, tile of {others}"] if others else []
    return "; ".join(parts + ([f"tile of {plain}"] if plain else []))


def _expand(function: str, functions: dict[str, list[GeneratedCall]]) -> list[GeneratedCall]:
    """The calls of a function, with those of the CUDA-graph partitions that it runs in their place."""
    calls: list[GeneratedCall] = []
    for call in functions.get(function, []):
        calls.extend(_expand(call.name, functions) if call.kind == "partition" else [call])
    return calls
