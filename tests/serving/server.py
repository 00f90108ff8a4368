"""A server as a process, and the real client."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import openai

from .models import NEW_TOKENS

START_SECONDS, STOP_SECONDS = 300, 60


class Server:
    """A process group, and what it wrote."""

    def __init__(self, module: str, folder: Path, log: Path, *options: Any) -> None:
        """module: what `python -m` starts; options: of its server, besides host, port and dtype."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.folder, self.log = folder, log
        place = ["--host", "127.0.0.1", "--port", self.port, "--dtype", "float32"]
        command = [sys.executable, "-m", module, "serve", folder, *place, *options]
        environment = {**os.environ, "TWELL_PLAN": "row", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
        with log.open("w") as output:
            self.process = subprocess.Popen(
                [str(part) for part in command],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        self.client = openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", timeout=120)

    def wait(self) -> None:
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            assert self.process.poll() is None, self.said()[-4000:]
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=5).close()
                return
            except OSError:
                time.sleep(0.5)
        raise AssertionError(self.said()[-4000:])

    def said(self) -> str:
        return self.log.read_text()

    def ask(self, text: list[int] | str, **options: Any) -> Any:
        asked = {"model": str(self.folder), "prompt": text, "max_tokens": NEW_TOKENS, "temperature": 0}
        return self.client.completions.create(**asked | options)

    def group_is_gone(self) -> bool:
        try:
            os.killpg(self.process.pid, 0)
        except ProcessLookupError:
            return True
        return False

    def stop(self, how: signal.Signals = signal.SIGINT) -> int:
        """As Ctrl-C does; its exit status, once no process is left."""
        self.process.send_signal(how)
        self.process.wait(STOP_SECONDS)
        end = time.monotonic() + STOP_SECONDS
        while not self.group_is_gone():
            assert time.monotonic() < end, "processes are left"
            time.sleep(0.2)
        return self.process.returncode

    def kill(self) -> None:
        if not self.group_is_gone():
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.client.close()


def ids_of(text: str) -> list[int]:
    return [int(word.removeprefix("w")) for word in text.split()]
