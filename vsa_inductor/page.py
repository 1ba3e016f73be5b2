"""HTML pages that stand alone: elements whose text cannot become markup, and the style that the reports share."""

from __future__ import annotations

import html
from collections.abc import Iterable
from typing import Any


class Markup(str):
    """Text that is HTML already; every other string is escaped where it enters an element."""

    __slots__ = ()


Content = str | Iterable[Any] | None


def el(tag: str, *content: Content, **attributes: str | int | bool | None) -> Markup:
    """An element.

    Args:
        tag: its name.
        content: strings, elements, or iterables of them; None is nothing.
        attributes: ``class_`` means ``class``, ``aria_label`` ``aria-label``; True is an attribute without a value, and
            None and False leave it out.
    """
    head = [tag]
    for name, value in attributes.items():
        if value is True:
            head.append(name)
        elif value is not None and value is not False:
            head.append(f'{name.rstrip("_").replace("_", "-")}="{_escaped(str(value))}"')
    inner = "".join(_rendered(part) for part in content)
    return Markup(f"<{' '.join(head)}>{inner}" + ("" if tag == "meta" else f"</{tag}>"))


def _rendered(content: Content) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content if isinstance(content, Markup) else _escaped(content)
    return "".join(map(_rendered, content))


def _escaped(text: str) -> str:
    # A file name may hold bytes that are no text; they would stop the page from being written.
    return html.escape(text.encode("utf-8", "backslashreplace").decode("utf-8"))


def table(caption: str, head: Iterable[str], rows: Iterable[Iterable[Content]], numbers: Iterable[int] = ()) -> Markup:
    """A table that scrolls on its own where it is wider than the page.

    Args:
        caption: what it is, for those who cannot see it as well.
        head: the columns' titles.
        rows: their cells.
        numbers: which columns are aligned to the right.
    """
    right = set(numbers)

    def cells(tag: str, row: Iterable[Content], **attributes: str) -> Iterable[Markup]:
        return [el(tag, cell, class_="number" if at in right else None, **attributes) for at, cell in enumerate(row)]

    return el(
        "div",
        el(
            "table",
            el("caption", caption),
            el("thead", el("tr", cells("th", head, scope="col"))),
            el("tbody", [el("tr", cells("td", row)) for row in rows]),
        ),
        class_="scroll",
    )


def document(title: str, *body: Content, style: str = "") -> str:
    """A whole page. Its policy lets a browser load nothing and run nothing, whatever became part of it.

    Args:
        title: of the window.
        body: what it shows.
        style: rules of its own, after those that all pages share.
    """
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    head = (
        el("meta", charset="utf-8"),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", name="color-scheme", content="light dark"),
        el("meta", http_equiv="Content-Security-Policy", content=policy),
        el("title", title),
        el("style", Markup(_STYLE + style)),
    )
    return "<!doctype html>\n" + el("html", el("head", head), el("body", el("main", *body)), lang="en") + "\n"


# Colours have a contrast of at least 4.5 to what they stand on, in both schemes.
_STYLE = """
:root { --page: #ffffff; --card: #f6f8fa; --text: #1b1f24; --soft: #535b65; --edge: #d0d7de; --lane: #858e98;
  --opaque: #7a3fd0; --generated: #0860c4; --extern: #59636e; --bad: #b91c26; --good: #17703a; --bad-back: #fff1f0; }
@media (prefers-color-scheme: dark) { :root { --page: #0f1319; --card: #181e26; --text: #e4e9ee; --soft: #a2abb6;
  --edge: #343c47; --lane: #75808d; --opaque: #c19bff; --generated: #69b1ff; --extern: #a9b2bd; --bad: #ff8a82;
  --good: #56c477; --bad-back: #2d1718; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 20px 20px 60px; }
h1 { font-size: 26px; line-height: 1.25; margin: 0 0 4px; }
h2 { font-size: 20px; margin: 36px 0 8px; }
h3 { font-size: 17px; margin: 0; display: inline; }
p { margin: 4px 0 10px; }
a { color: var(--generated); }
code, pre { font: 13px/1.45 ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; overflow-wrap: anywhere; }
.soft { color: var(--soft); }
.verdict { font-weight: 600; }
.good { color: var(--good); }
.bad { color: var(--bad); }
.figures { display: flex; flex-wrap: wrap; gap: 8px; padding: 0; margin: 14px 0; list-style: none; }
.figures li { background: var(--card); border: 1px solid var(--edge); border-radius: 8px; padding: 6px 14px; }
.figures b { display: block; font-size: 20px; line-height: 1.3; }
.breaks { border: 2px solid var(--bad); border-radius: 8px; background: var(--bad-back); padding: 2px 16px 8px;
  margin: 20px 0; }
.breaks h2 { margin-top: 10px; color: var(--bad); }
.breaks ol { padding-left: 24px; }
.breaks pre { white-space: pre-wrap; margin: 4px 0 12px; }
.scroll { overflow-x: auto; margin: 6px 0 14px; }
table { border-collapse: collapse; font-size: 14px; }
caption { text-align: left; color: var(--soft); padding-bottom: 2px; }
th, td { text-align: left; vertical-align: top; padding: 3px 16px 3px 0; border-bottom: 1px solid var(--edge); }
th { color: var(--soft); font-weight: 600; }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
details > summary { cursor: pointer; }
"""
