"""Tables and images as HTML, with every text escaped: for reports and for notebooks (`_repr_html_`)."""

from __future__ import annotations

import base64
import unicodedata
from collections.abc import Iterable, Sequence
from html import escape

_LONG = 30  # characters of a cell that may take several lines
_SHOWN = {"\n": "↵", "\t": "⇥", "\r": "␍"}


def escaped(text: object) -> str:
    """`text` for HTML and its attributes."""
    return escape(clean(str(text)), quote=True)


def clean(text: str) -> str:
    """`text` with � for characters that a file of HTML or Markdown cannot hold."""
    return "".join("\N{REPLACEMENT CHARACTER}" if _unfit(c) else c for c in text)


def visible(text: str) -> str:
    """`text` on one line, for a reader: line breaks and tabs as signs, what has no shape as its number.

    Marks that turn the direction of writing are among these: they would reorder the text around them.
    """
    return "".join(_SHOWN.get(c) or (f"\\u{ord(c):04x}" if _shapeless(c) else c) for c in text)


def _unfit(character: str) -> bool:
    return unicodedata.category(character) in ("Cc", "Cs") and character not in "\n\t"


def _shapeless(character: str) -> bool:
    return unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp")


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    left: Iterable[int] = (0,),
    strong: Iterable[int] = (),
    caption: str = "",
) -> str:
    """A table that scrolls by itself where it is too wide.

    left:    columns of words; others hold numbers and are aligned to the right.
    strong:  rows to stand out.
    """
    left, strong = set(left), set(strong)

    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{_wrapping(cell)}{_alignment(place in left)}>{escaped(cell)}</{tag}>"
            for place, cell in enumerate(row)
        )

    body = "".join(
        f"<tr{' class=strong' if place in strong else ''}>{cells('td', row)}</tr>"
        for place, row in enumerate(rows)
    )
    # Not a <caption>, which would scroll with the table.
    below = f'<p class="caption">{escaped(caption)}</p>' if caption else ""
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="table"><table>'
        f"<thead><tr>{cells('th', columns)}</tr></thead><tbody>{body}</tbody></table></div>{below}"
    )


def image(png: bytes, description: str) -> str:
    """An image that needs no file beside the page."""
    data = base64.b64encode(png).decode()
    return f'<img src="data:image/png;base64,{data}" alt="{escaped(description)}" style="max-width:760px">'


def _wrapping(cell: str) -> str:
    return " class=wrap" if len(cell) > _LONG else ""


def _alignment(left: bool) -> str:
    # In the element itself: notebooks have no style sheet of ours.
    return ' style="text-align:left"' if left else ' style="text-align:right"'
