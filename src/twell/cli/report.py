"""`twell report`: one page about training runs, profiles and records."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from .._errors import reject
from .._files import needs_space, read_json_object, write_atomically

if TYPE_CHECKING:
    from ..report import Report

_RESULTS = "results.json"  # of a reproduction
_ACCEPTED = "a new file, or an older report to replace; to use this name, move that file away"
_PLAIN = {"highlight": False, "markup": False, "soft_wrap": True}


def _reproduction(path: Path) -> dict[str, Any] | None:
    """What results.json of a reproduction holds, or its folder; None of anything else."""
    file = path / _RESULTS if path.is_dir() else path
    if file.suffix != ".json" or not file.is_file():
        return None
    found = read_json_object(file) or {}
    return found if {"scale", "experiments", "runs"} <= set(found) else None


def _of_reproduction(results: dict[str, Any]) -> Report:
    from ..reproduction.page import make_page
    from ..reproduction.recipes import SCALES

    if results["scale"] not in SCALES:
        reject("input", f"a reproduction at scale {results['scale']!r}", f"{', '.join(SCALES)}")
    try:
        return make_page(results)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        return reject(
            "input", f"a damaged file of a reproduction ({reason})", "one as `twell reproduce` writes"
        )


def _holds(given: Path, path: Path) -> bool:
    """Whether `path` is an input, or in the folder that is one."""
    return path.samefile(given) or (given.is_dir() and path.resolve().is_relative_to(given.resolve()))


def _check_target(argument: str, path: Path, inputs: list[Path]) -> None:
    """An older report may be replaced, wherever it is, and an empty file that is not part of an input."""
    from ..report.marker import is_report

    if path.is_dir():
        reject(argument, f"{path}, a folder", "a file to write")
    if not path.absolute().parent.is_dir():
        reject(argument, str(path), "a file in a folder that exists")
    if not path.exists() or is_report(path):
        return
    if any(_holds(given, path) for given in inputs if given.exists()):
        reject(argument, f"{path}, an input or a file of one", "another file")
    if not path.is_file() or path.stat().st_size:
        reject(argument, f"{path}, which is no report", _ACCEPTED)


def _figures_folder(markdown: Path, drawings: Iterable[str]) -> Path:
    from ..report.marker import is_report

    folder = markdown.with_name(f"{markdown.stem}_figures")
    if folder.exists() and not folder.is_dir():
        reject("markdown", f"{folder}, a file where its figures go", _ACCEPTED)
    for path in (folder / name for name in drawings):
        if path.exists() and not is_report(path):
            reject("markdown", f"{path}, which is no figure of a report", _ACCEPTED)
    return folder


def run_report(*, inputs: list[Path], out: Path, markdown: Path | None) -> None:
    from ..report import make_report

    for argument, path in (("out", out), ("markdown", markdown)):
        if path is not None:
            _check_target(argument, path, inputs)
    if markdown is not None and markdown.absolute() == out.absolute():
        reject("markdown", f"{markdown}, the file of --out", "another file")
    results = [found for path in inputs if (found := _reproduction(path)) is not None]
    if results and len(inputs) > 1:
        reject("input", "a reproduction beside others", "a reproduction alone, or any of the others")
    report = _of_reproduction(results[0]) if results else make_report(inputs)
    drawings = report.drawings()
    folder = None if markdown is None else _figures_folder(markdown, drawings)
    written = [out]
    write_atomically(out, report.html())
    if markdown is not None and folder is not None:
        with needs_space(str(folder)):
            folder.mkdir(exist_ok=True)
            for name, drawing in drawings.items():
                (folder / name).write_text(drawing, encoding="utf-8")
        write_atomically(markdown, report.markdown(folder.name))
        written += [markdown, folder]
    console = Console()
    console.print(report.headline.claim or report.headline.title, **_PLAIN)
    console.print(f"written: {', '.join(map(str, written))}", **_PLAIN)
