"""The library's log: one line per process and message."""

from __future__ import annotations

import logging

_log = logging.getLogger("twell")
_logged: set[str] = set()


def log_once(message: str) -> None:
    """One warning per process and message: fallbacks are never silent, and never noisy."""
    if message not in _logged:
        _logged.add(message)
        _log.warning("twell: %s", message)
