"""`twell report`: one page about training runs, profiles and records."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from .._errors import reject
from .._files import needs_space, write_atomically

_PLAIN = {"highlight": False, "markup": False, "soft_wrap": True}


def run_report(*, inputs: list[Path], out: Path, markdown: Path | None) -> None:
    from ..report import make_report

    for argument, path in (("out", out), ("markdown", markdown)):
        if path is None:
            continue
        if path.is_dir():
            reject(argument, f"{path}, a folder", "a file to write")
        if not path.absolute().parent.is_dir():
            reject(argument, str(path), "a file in a folder that exists")
        if any(path.exists() and path.samefile(given) for given in inputs if given.exists()):
            reject(argument, f"{path}, one of the inputs", "another file")
    report = make_report(inputs)
    written = [out]
    write_atomically(out, report.html())
    if markdown is not None:
        folder = markdown.with_name(f"{markdown.stem}_figures")
        drawings = report.drawings()
        with needs_space(str(folder)):
            folder.mkdir(exist_ok=True)
            for name, drawing in drawings.items():
                (folder / name).write_text(drawing, encoding="utf-8")
        write_atomically(markdown, report.markdown(folder.name))
        written += [markdown, folder]
    console = Console()
    console.print(report.headline.claim or report.headline.title, **_PLAIN)
    console.print(f"written: {', '.join(map(str, written))}", **_PLAIN)
