"""Exit statuses of the commands."""

FAILED = 1  # it was begun, and did not succeed
REFUSED = 2  # bad input, or a package is missing; typer's own refusals have it, too
INTERRUPTED = 130  # that of Ctrl-C in a shell, so that a script stops too
