"""What commands with `--plot` share."""

from __future__ import annotations

from pathlib import Path

from .._errors import reject
from ..plots import figure_class

_SUFFIXES = (".png", ".pdf", ".svg")


def check_plot(path: Path | None) -> None:
    """Refuse what could not be drawn before the work starts. ImportError: matplotlib is missing."""
    if path is None:
        return
    if path.is_dir():
        reject("plot", f"{path}, a folder", "a file to write, such as plot.png")
    if path.suffix.lower() not in _SUFFIXES:
        reject("plot", str(path), f"a name that ends in {', '.join(_SUFFIXES)}")
    if not path.absolute().parent.is_dir():
        reject("plot", str(path), "a file in a folder that exists")
    figure_class()


def short_name(model: str) -> str:
    """A folder's own name: where it lies is nobody's business in a table or plot."""
    return Path(model).absolute().name if Path(model).exists() else model
