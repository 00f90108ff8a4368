"""The `twell` command."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point of the console script."""
    try:
        from .app import app
    except ImportError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit(f"the twell command needs typer and rich ({error}): pip install typer rich")
    try:
        app()
    except ImportError as error:
        from .._errors import explained

        sys.exit(f"twell: {explained(error)}")
    except (ValueError, OSError, FloatingPointError) as error:
        sys.exit(f"twell: {error}")
