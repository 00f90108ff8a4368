"""A disk that fills up while something is saved."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def saving(folder: Path, what: str, then: Callable[[], str]) -> Iterator[None]:
    """Around whatever writes `folder`: if there is no room for it, it is removed and an OSError says so.

    what:  is saved, for the reader.
    then:  what is left or to be done; asked once the folder is gone.
    """
    try:
        yield
    except Exception as error:
        if not _is_full(error):
            raise
        shutil.rmtree(folder, ignore_errors=True)
        raise OSError(errno.ENOSPC, f"no space left to save {what}; {then()}") from error


def _is_full(error: BaseException | None) -> bool:
    """Writers in C++ and Rust raise errors of their own."""
    while error is not None:
        if getattr(error, "errno", None) == errno.ENOSPC or "no space left" in str(error).lower():
            return True
        if "inline_container" in str(error) and "unexpected pos" in str(error):  # torch.save
            return True
        error = error.__cause__ or error.__context__
    return False
