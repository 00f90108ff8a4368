"""The console script `twell`. It stands outside of the package, because importing that takes seconds, most of
them torch's: Ctrl-C meanwhile ends the command without a traceback."""

from __future__ import annotations

import os
import signal

INTERRUPTED = 130  # as in `twell.cli.status`


def main() -> None:
    # In a script's background Ctrl-C is ignored, and stays so.
    interruptible = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if interruptible:
        # Nothing has begun that wants to be cleaned up; an exception would get lost in some of the imports.
        signal.signal(signal.SIGINT, lambda _signal, _frame: os._exit(INTERRUPTED))
    from twell.cli import main as run

    if interruptible:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


if __name__ == "__main__":
    main()
