"""The `twell` command."""

from __future__ import annotations

import sys
from typing import NoReturn

from .status import FAILED, INTERRUPTED, REFUSED


def main() -> None:
    """Entry point of the console script."""
    try:
        _run()
    except KeyboardInterrupt:  # while `app` is imported; typer takes care of it afterwards
        sys.exit(INTERRUPTED)


def _run() -> None:
    try:
        from .app import app
    except ImportError as error:
        if error.name not in ("typer", "rich"):
            raise
        _end(f"the twell command needs typer and rich ({error}): pip install typer rich", REFUSED)
    try:
        app()
    except ImportError as error:
        from .._errors import explained

        _end(f"twell: {explained(error)}", REFUSED)
    except ValueError as error:
        _end(f"twell: {error}", REFUSED)
    except (OSError, FloatingPointError) as error:
        _end(f"twell: {error}", FAILED)
    except RuntimeError as error:
        from .._errors import asked_too_much

        asked = asked_too_much(error)
        if asked is None:
            raise
        less = "a smaller batch, shorter sequences or fewer layers need less"
        _end(f"twell: out of memory: {asked}; {less}", FAILED)


def _end(said: str, status: int) -> NoReturn:
    print(said, file=sys.stderr)
    sys.exit(status)
