"""Tells what reports wrote from other files, which they must not replace."""

from __future__ import annotations

from pathlib import Path

HTML = '<meta name="generator" content="twell report">'
MARKDOWN = "<!-- twell report -->"
_PAGE, _DRAWING = "<!DOCTYPE html>", '<svg xmlns="http://www.w3.org/2000/svg" class="chart" role="img" '
# Earlier versions marked nothing: their titles tell, of pages about a reproduction the second.
_TITLES = ("<title>TwELL report: ", "<title>The paper&#x27;s experiments at scale ")
_TITLE = "# TwELL report: "
_HEAD = 4096  # bytes; all of these stand before them


def is_report(path: Path) -> bool:
    """Whether a report wrote this file: a page, Markdown or a figure."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        head = file.read(_HEAD).decode(errors="replace")
    if head.startswith(_PAGE):
        return any(mark in head for mark in (HTML, *_TITLES))
    return head.startswith((MARKDOWN, _TITLE, _DRAWING))
