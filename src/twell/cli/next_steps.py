"""Commands to go on with, as they can be pasted: `twell`, or the path of the one that is running."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path


def own_command() -> str:
    """How a shell here calls the twell that is running."""
    called = Path(sys.argv[0])
    found = shutil.which("twell")
    if called.stem != "twell":  # python -m twell
        return shlex.join([sys.executable, "-m", "twell"])
    if found is not None and called.exists() and called.samefile(found):
        return "twell"
    return shlex.quote(str(called))


def after_training(folder: Path, *, sparse: bool, source: str | None = None) -> list[str]:
    """What to do with a run.

    sparse:  whether its blocks have zeros to skip.
    source:  a text to explain it on, as --text takes it.
    """
    twell, run = own_command(), shlex.quote(str(folder))
    commands = [f'{twell} generate {run} --prompt "def main("']
    if sparse:
        commands.append(f"{twell} explain {run} --text {'FILE' if source is None else shlex.quote(source)}")
    return [*commands, f"{twell} report {run}"]
