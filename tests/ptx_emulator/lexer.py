"""PTX text into statements: comments away, braces and labels as statements of their own, line numbers kept."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .errors import PtxSyntaxError

_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.S)
# Debug data: nothing there is executed, and its lines do not end like statements.
_SECTION = re.compile(r"\.section\s+[^{]*\{[^}]*\}", re.S)
_PIECE = re.compile(r'((?:[^;{}:"\n]|"[^"\n]*"|::)*)(.|\n)')
_LABEL = re.compile(r"[$\w]+")
# Directives that end with their line.
_LINE_DIRECTIVE = re.compile(r"\s*\.(loc|file|version|target|address_size|pragma|noreturn)\b")


@dataclass(slots=True)
class Statement:
    text: str  # blanks squeezed; "{" and "}" alone are scopes; a label ends with ":"
    line: int


def without_comments(text: str) -> str:
    """The text with comments and debug sections blanked, every line where it was."""
    for pattern in (_COMMENT, _SECTION):
        text = pattern.sub(lambda m: " " + "\n" * m.group(0).count("\n"), text)
    return text


def _directive_lines(text: str) -> str:
    """Gives directives that end with their line a semicolon, so that all statements end alike."""
    lines = []
    for line in text.split("\n"):
        if _LINE_DIRECTIVE.match(line) and ";" not in line:
            line += ";"
        lines.append(line)
    return "\n".join(lines)


def statements(text: str) -> list[Statement]:
    """All statements of a module or body, in order. Braces inside operands and initialisers stay in their statement."""
    text = _directive_lines(without_comments(text))
    found: list[Statement] = []
    current: list[str] = []
    started = line = 1
    depth = position = 0
    blank = True
    while True:
        piece = _PIECE.match(text, position)
        if piece is None:
            break
        position = piece.end()
        run, end = piece.groups()
        if blank and run.strip():
            started, blank = line, False
        current.append(run)
        if end == "\n":
            current.append(" ")
            line += 1
        elif end == ";" and depth == 0:
            if not blank:
                found.append(Statement(" ".join("".join(current).split()), started))
            current, blank = [], True
        elif end == ":" and depth == 0 and _LABEL.fullmatch("".join(current).strip()):
            found.append(Statement("".join(current).strip() + ":", line))
            current, blank = [], True
        elif end in "{}" and depth == 0 and (blank or (end == "{" and _opens_body("".join(current)))):
            if not blank:
                found.append(Statement(" ".join("".join(current).split()), started))
            found.append(Statement(end, line))
            current, blank = [], True
        else:
            depth += (end == "{") - (end == "}")
            current.append(end)
            blank = blank and not end.strip()
    if not blank:
        raise PtxSyntaxError(f"line {started}: a statement without its end: {''.join(current).strip()[:80]!r}")
    return found


def _opens_body(text: str) -> bool:
    """A brace after a function header or a section opens a scope; elsewhere it is a list."""
    return bool(re.match(r"\s*(\.(visible|weak|extern|common)\s+)*\.(entry|func)\b", text))


def split_arguments(text: str) -> list[str]:
    """The parts between commas outside brackets."""
    if "{" not in text and "[" not in text and "(" not in text:
        return [part.strip() for part in text.split(",") if part.strip()]
    parts, depth, start = [], 0, 0
    for i, c in enumerate(text):
        if c in "[{(":
            depth += 1
        elif c in "]})":
            depth -= 1
        elif c == "," and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    parts.append(text[start:].strip())
    return [p for p in parts if p]
