"""A report as Markdown, for a README: headline, tables, links to the figures, commands."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from urllib.parse import quote

from .._html import clean
from . import marker
from .document import Block, Commands, Figures, HeatMap, Paragraph, Report, Table


def markdown(report: Report, figures: str = "") -> str:
    headline = report.headline
    parts = [marker.MARKDOWN, f"# {_text(headline.title)}"]
    if headline.claim:
        parts.append(f"**{_text(headline.claim)}**")
    parts += map(_text, headline.notes)
    if headline.facts:
        rows = [(fact.value, fact.label, fact.note) for fact in headline.facts]
        parts.append(_rows(("", "", ""), rows, (0, 1, 2), ()))
    for section in report.sections:
        blocks = [text for block in section.blocks if (text := _block(block, figures))]
        # The heat map needs a page: what leads to it is left out with it.
        if blocks and not any(isinstance(block, HeatMap) for block in section.blocks):
            parts += [f"## {_text(section.title)}", *blocks]
    return "\n\n".join(parts) + "\n"


def _block(block: Block, figures: str) -> str:
    match block:
        case Paragraph(text):
            return _text(text)
        case Table():
            drawn = _rows(block.columns, block.rows, block.left, block.strong)
            drawn += f"\n\n{_text(block.caption)}" if block.caption else ""
            if block.folded:
                return f"<details><summary>{_text(block.folded)}</summary>\n\n{drawn}\n\n</details>"
            return drawn
        case Figures(drawn) if figures:
            return "\n\n".join(
                f"![{_text(one.drawing.title)}]({quote(f'{figures}/{one.name}.svg')})"
                + (f"\n\n{_text(one.caption)}" if one.caption else "")
                for one in drawn
            )
        case Commands(lines):
            longest = max((len(run) for line in lines for run in re.findall("`+", line)), default=0)
            fence = "`" * max(3, longest + 1)
            return "\n".join([f"{fence}sh", *(clean(line).replace("\n", " ") for line in lines), fence])
    return ""


def _rows(
    columns: Sequence[str], rows: Sequence[Sequence[str]], left: Collection[int], strong: Collection[int]
) -> str:
    lines = [
        f"| {' | '.join(map(_text, columns))} |",
        "|" + "".join("---|" if place in left else "---:|" for place in range(len(columns))),
    ]
    for number, row in enumerate(rows):
        first, *others = map(_text, row)
        first = f"**{first}**" if number in strong and first else first
        lines.append(f"| {' | '.join([first, *others])} |")
    return "\n".join(lines)


def _text(text: str) -> str:
    """`text` on one line, with nothing in it that Markdown or HTML would take for a sign."""
    line = " ".join(clean(text).split())
    line = line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]|#~$])", r"\\\1", line)
