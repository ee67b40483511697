"""Reports as pages of HTML: what folds, bars, boxes and tables, with no script.

Pages are trees of elements, and are escaped where they are written.
"""

from __future__ import annotations

import base64
import dataclasses
import math
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from string import Template
from xml.etree.ElementTree import Element, indent, tostring

from jhost import errors

PAGE = ".html"
"""What the name of a saved page ends in."""

# All greys are made of the color of the text, so that the page suits a notebook's
# theme, light or dark, which nothing tells it.  The others are of the palette of Okabe
# and Ito, which color-blind readers can tell apart.
_STYLE = """
.jhost { font: 14px/1.45 system-ui, sans-serif; --rule: color-mix(in srgb, currentColor 25%, transparent); }
.jhost details { margin: .3em 0; padding-left: 1em; border-left: 2px solid var(--rule); }
.jhost summary { cursor: pointer; font-weight: 600; margin-left: -.6em; }
.jhost h4 { margin: .8em 0 .2em; }
.jhost p, .jhost ul { margin: .2em 0; }
.jhost p, .jhost li, .jhost summary, .jhost h4, .jhost .box { overflow-wrap: anywhere; }
.jhost table { display: block; overflow-x: auto; border-collapse: collapse; margin: .2em 0; }
.jhost th, .jhost td { padding: .1em .8em .1em 0; text-align: left; vertical-align: top; font-weight: normal; }
.jhost thead th { border-bottom: 1px solid var(--rule); }
.jhost .bar { display: flex; width: min(20em, 40vw); height: 1.2em; }
.jhost .bar i, .jhost .key { background: #0072b2; }
.jhost .bar .communication, .jhost .key.communication { background: #009e73; }
.jhost .bar .exposed, .jhost .key.exposed { background: #d55e00; }
.jhost .bar .predicted, .jhost .key.predicted { background: #999999; }
.jhost .bar .idle, .jhost .key.idle { background: var(--rule); }
.jhost .axis { display: flex; justify-content: space-between; width: min(20em, 40vw); border-top: 1px solid; }
.jhost .axis span { font-size: 12px; }
.jhost .key { display: inline-block; color: white; padding: 0 .5em; margin-right: .5em; }
.jhost .key.idle { color: inherit; }
.jhost .boxes { display: flex; flex-wrap: wrap; gap: .5em; margin: .4em 0; }
.jhost .box { border: 1px solid var(--rule); border-left: 4px solid #0072b2; padding: .2em .6em; box-sizing: border-box; max-width: min(23em, 100%); }
.jhost .box.communication { border-left-color: #009e73; }
.jhost .box.loop { border-left-color: var(--rule); max-width: 100%; }
.jhost code, .jhost pre { font: 12px/1.4 ui-monospace, monospace; background: none; color: inherit; }
.jhost code { display: block; overflow-wrap: anywhere; }
.jhost pre { overflow-x: auto; }
.jhost img { max-width: 100%; }
"""  # noqa: E501

_PAGE = Template("""\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
$title
</head>
<body>
$body
</body>
</html>
""")


# --- A page ----------------------------------------------------------------------- #


def fragment(*parts: Element) -> str:
    """Parts of a page with their style, as a notebook shows them."""
    root = element("div", element("style", _STYLE), *parts, cls="jhost")
    indent(root)
    return tostring(root, encoding="unicode", method="html")


def save_page(path: str | os.PathLike[str], title: str, *parts: Element) -> None:
    """Writes a page that needs no other file.

    Raises:
        OptionError: the path ends in anything but `.html`.
    """
    path = Path(path)
    if path.suffix.lower() != PAGE:
        raise errors.OptionError(
            f"This report is saved as a page ({PAGE}).", [ends_in(path)]
        )
    # UTF-8 on any machine: a name of the user's may have any letter.
    path.write_text(page(title, *parts), encoding="utf-8")


def page(title: str, *parts: Element) -> str:
    """A whole page."""
    head = tostring(element("title", title), encoding="unicode", method="html")
    return _PAGE.substitute(title=head, body=fragment(*parts))


def ends_in(path: Path) -> str:
    """The ending of a path that is refused for it."""
    return f"{path.name!r} ends in {path.suffix!r}"


# --- Its parts -------------------------------------------------------------------- #


def element(
    name: str, *inner: Element | str, cls: str = "", **attributes: str
) -> Element:
    """An element around others, after a text or none."""
    made = Element(name, ({"class": cls} if cls else {}) | attributes)
    for each in inner:
        # ElementTree keeps the text before the first element inside, so it comes first.
        if isinstance(each, str):
            made.text = each
        else:
            made.append(each)
    return made


def fold(title: str, *parts: Element) -> Element:
    """Parts that a click on their title folds."""
    return element("details", element("summary", title), *parts, open="open")


def image(svg: bytes, text: str) -> Element:
    """A picture, as a file in the page: its names meet no others, its scripts none."""
    source = f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}"
    return element("img", src=source, alt=text)


def titled(title: str, *parts: Element) -> list[Element]:
    """Parts below their title."""
    return [element("h4", title), *parts]


def listed(texts: Iterable[str]) -> Element:
    """A line a text."""
    return element("ul", *(element("li", text) for text in texts))


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> Element:
    """Cells below the names of their columns."""
    head = element("thead", _row("th", header))
    return element("table", head, element("tbody", *(_row("td", row) for row in rows)))


def _row(cell: str, texts: Sequence[str]) -> Element:
    return element("tr", *(element(cell, text) for text in texts))


@dataclasses.dataclass(frozen=True, slots=True)
class Bar:
    """A bar between two texts, of parts one behind the other: what each is, how long.

    A part can be computation, communication, exposed (communication), idle, measured
    or predicted.
    """

    label: str
    parts: tuple[tuple[str, float], ...]
    text: str


def bars(rows: Sequence[Bar], what: str, text: Callable[[float], str]) -> Element:
    """Bars one below another, to one scale, with an axis below.

    `what` says what the lengths are, and `text` says a length with its unit.
    """
    lengths = [sum(_length(size) for _, size in row.parts) for row in rows]
    longest = max(lengths, default=0.0)
    drawn = [_bar_row(row, longest or 1.0) for row in rows]
    return element("table", *drawn, *([_axis_row(text(longest), what)] * (longest > 0)))


def _axis_row(end: str, what: str) -> Element:
    axis = element("div", element("span", "0"), element("span", end), cls="axis")
    cells = element("th", ""), element("td", axis), element("td", what)
    return element("tr", *cells)


def _bar_row(row: Bar, longest: float) -> Element:
    parts = [
        element("i", cls=what, style=f"width: {100 * _length(size) / longest:.1f}%")
        for what, size in row.parts
    ]
    bar = element("div", *parts, cls="bar")
    cells = element("th", row.label), element("td", bar), element("td", row.text)
    return element("tr", *cells)


def _length(size: float) -> float:
    """What can be drawn: of a number that is not known, nothing."""
    return max(size, 0.0) if math.isfinite(size) else 0.0


def key(names: dict[str, str]) -> Element:
    """What the parts of bars are called."""
    spans = [element("span", text, cls=f"key {what}") for what, text in names.items()]
    return element("p", *spans)
