"""Measuring in processes of their own: each builds, compiles and lays out its memory anew."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch

from .._errors import OtherProcessError, ran_out_of_memory
from .results import Measured

Emit = Callable[[Measured], None]
Say = Callable[[str], None]
NOTE = "note: "  # begins what is said for the reader to keep
PART = "part: "  # begins what is said of a part of what is being done
Job = Callable[[Any, Emit, Say], None]


def run_apart(job: Job, options: Any, emit: Emit, say: Say) -> None:
    """Run job(options, emit, say) in a new process. `job` is a function of a module, options can be pickled.

    Raises ValueError as the job does, and torch.OutOfMemoryError where memory ran out. A process that dies
    raises RuntimeError. What it emitted before counts.
    """
    context = get_context("spawn")  # a forked process could not use the GPU
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(job, options, there))
    process.start()
    there.close()
    try:
        while True:
            kind, content = here.recv()
            if kind == "done":
                break
            if kind == "refused":
                raise ValueError(content)
            if kind == "memory":
                raise torch.OutOfMemoryError(content)
            if kind == "failed":
                raise OtherProcessError(f"a measuring process failed:\n{content}")
            (emit if kind == "measured" else say)(content)
    except EOFError:
        process.join()
        raise RuntimeError(
            f"a measuring process ended with exit code {process.exitcode}; what it had measured is kept"
        ) from None
    finally:
        if process.is_alive():
            process.join(timeout=10)
        if process.is_alive():
            process.terminate()
            process.join()
        here.close()


def _work(job: Job, options: Any, connection: Connection) -> None:
    try:
        job(
            options,
            lambda measured: connection.send(("measured", measured)),
            lambda text: connection.send(("say", text)),
        )
    except ValueError as error:
        connection.send(("refused", str(error)))
    except BaseException as error:
        if ran_out_of_memory(error):
            connection.send(("memory", str(error)))
        else:
            connection.send(("failed", traceback.format_exc()))
    else:
        connection.send(("done", None))
    finally:
        connection.close()
