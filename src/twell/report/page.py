"""A report as one HTML page: no network, no web fonts, light and dark, narrow and wide, on paper."""

from __future__ import annotations

import re

from .._html import escaped, table
from . import marker
from .chart import style_sheet
from .document import Block, Commands, Figure, Figures, HeatMap, Paragraph, Report, Section, Table
from .heat_map import heat_map

_STYLES = ("colours.css", "chart.css", "page.css")


def page(report: Report) -> str:
    headline = report.headline
    sections = list(zip(_anchors(report), report.sections, strict=True))
    links = "".join(f'<li><a href="#{anchor}">{escaped(one.title)}</a></li>' for anchor, one in sections)
    script = style_sheet("heat_map.js") if _has_heat_map(report) else ""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        # No icon: a browser would otherwise ask the server for one.
        '<link rel="icon" href="data:,">\n'
        f"{marker.HTML}\n<title>{escaped(headline.title)}</title>\n"
        f"<style>\n{''.join(map(style_sheet, _STYLES))}</style>\n</head>\n<body>\n<main>\n"
        f'{_header(report)}\n<nav aria-label="sections"><ul>{links}</ul></nav>\n'
        f"{''.join(_section(anchor, one) for anchor, one in sections)}"
        f"</main>\n{f'<script>{script}</script>' if script else ''}\n</body>\n</html>\n"
    )


def framed(report: Report) -> str:
    """For a notebook: the page in a frame, so that its styles stay inside."""
    return (
        f'<iframe srcdoc="{escaped(page(report))}" style="width:100%;height:720px;border:0" '
        f'title="{escaped(report.headline.title)}"></iframe>'
    )


def _header(report: Report) -> str:
    headline = report.headline
    parts = [f"<h1>{escaped(headline.title)}</h1>"]
    if headline.claim:
        parts.append(f'<p class="claim">{escaped(headline.claim)}</p>')
    parts += [f'<p class="quiet">{escaped(t)}</p>' for t in headline.notes]
    facts = []
    for fact in headline.facts:
        tone = {True: " good", False: " bad", None: ""}[fact.good]
        note = f'<dd class="quiet">{escaped(fact.note)}</dd>' if fact.note else ""
        facts.append(
            f'<div><dd class="value{tone}">{escaped(fact.value)}</dd><dt>{escaped(fact.label)}</dt>'
            f"{note}</div>"
        )
    if facts:
        parts.append(f'<dl class="facts">{"".join(facts)}</dl>')
    return f"<header>{''.join(parts)}</header>"


def _section(anchor: str, section: Section) -> str:
    body = "\n".join(map(_block, section.blocks))
    return f'<section id="{anchor}">\n<h2>{escaped(section.title)}</h2>\n{body}\n</section>\n'


def _block(block: Block) -> str:
    match block:
        case Paragraph(text):
            return f"<p>{escaped(text)}</p>"
        case Table():
            return _table(block)
        case Figures(figures):
            return f'<div class="figures">{"".join(map(_figure, figures))}</div>'
        case Commands(lines):
            items = "".join(f"<li><code>{escaped(line)}</code></li>" for line in lines)
            return f'<ul class="commands">{items}</ul>'
        case HeatMap():
            return heat_map(block)


def _figure(figure: Figure) -> str:
    caption = f"<figcaption>{escaped(figure.caption)}</figcaption>" if figure.caption else ""
    return f"<figure><h3>{escaped(figure.drawing.title)}</h3>{figure.drawing.svg()}{caption}</figure>"


def _table(block: Table) -> str:
    drawn = table(block.columns, block.rows, left=block.left, strong=block.strong, caption=block.caption)
    if not block.folded:
        return drawn
    return f"<details><summary>{escaped(block.folded)}</summary>{drawn}</details>"


def _anchors(report: Report) -> list[str]:
    found: list[str] = []
    for section in report.sections:
        word = re.sub(r"[^a-z0-9]+", "-", section.title.lower()).strip("-")
        found.append(f"{word}-{found.count(word)}" if word in found else word)
    return found


def _has_heat_map(report: Report) -> bool:
    return any(isinstance(block, HeatMap) for section in report.sections for block in section.blocks)
