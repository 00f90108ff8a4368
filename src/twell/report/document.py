"""What a report is made of, before it is HTML or Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ..profiling.schema import Sample


class Drawing(Protocol):
    """What can be drawn: a chart or bars."""

    title: str

    def svg(self, *, standalone: bool = False) -> str: ...


@dataclass(frozen=True)
class Paragraph:
    text: str


@dataclass(frozen=True)
class Table:
    """left: columns of words. strong: rows to stand out. folded: a title to hide it behind."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: Sequence[int] = (0,)
    strong: Sequence[int] = ()
    caption: str = ""
    folded: str = ""


@dataclass(frozen=True)
class Figure:
    """name: a word for its file, unique in a report."""

    name: str
    drawing: Drawing
    caption: str = ""


@dataclass(frozen=True)
class Figures:
    """Drawn side by side where there is room."""

    figures: Sequence[Figure]


@dataclass(frozen=True)
class Commands:
    lines: Sequence[str]


@dataclass(frozen=True)
class HeatMap:
    """Tokens by layers. neurons: of each layer."""

    sample: Sample
    neurons: Sequence[int]


Block = Paragraph | Table | Figures | Commands | HeatMap


@dataclass(frozen=True)
class Section:
    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Fact:
    """A figure of the headline. good: whether it is a gain; None if it is neither gain nor loss."""

    value: str
    label: str
    note: str = ""
    good: bool | None = None


@dataclass(frozen=True)
class Headline:
    """claim: the largest gain, in a sentence. notes: what it holds for, and what was measured."""

    title: str
    claim: str
    notes: Sequence[str] = ()
    facts: Sequence[Fact] = ()


@dataclass(frozen=True)
class Report:
    headline: Headline
    sections: Sequence[Section] = field(default_factory=tuple)

    def html(self) -> str:
        """One page that needs nothing else."""
        from .page import page

        return page(self)

    def markdown(self, figures: str = "") -> str:
        """figures: the folder that the SVG files of `drawings` are in; without one they are left out."""
        from .markdown import markdown

        return markdown(self, figures)

    def drawings(self) -> dict[str, str]:
        """File name -> SVG that stands by itself."""
        return {
            f"{figure.name}.svg": figure.drawing.svg(standalone=True)
            for section in self.sections
            for block in section.blocks
            if isinstance(block, Figures)
            for figure in block.figures
        }

    def _repr_html_(self) -> str:
        """In a notebook."""
        from .page import framed

        return framed(self)
