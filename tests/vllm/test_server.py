"""`twell serve` with vLLM, asked by the real client: many at once, streaming, bad requests, the end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip(
    "vllm", reason="vLLM is not installed: make test-vllm has it in an environment of its own"
)
openai = pytest.importorskip("openai")

from .models import NEW_TOKENS, POSITIONS, greedy, prompts

ASKED = prompts(32)
START_SECONDS, STOP_SECONDS = 300, 60


class Server:
    """A process group, and what it wrote."""

    def __init__(self, folder: Path, log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.folder, self.log = folder, log
        options = ["--host", "127.0.0.1", "--port", self.port, "--dtype", "float32"]
        options += ["--max-model-len", POSITIONS, "--max-num-seqs", 32]
        command = [sys.executable, "-m", "twell.cli", "serve", folder, "--", *options]
        environment = {**os.environ, "TWELL_PLAN": "row", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
        self.process = subprocess.Popen(
            [str(part) for part in command],
            stdout=log.open("w"),
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
                self.client.models.list()
                return
            except openai.APIConnectionError:
                time.sleep(0.5)
        raise AssertionError(self.said()[-4000:])

    def said(self) -> str:
        return self.log.read_text()

    def ask(self, ids: list[int], **options):
        asked = {"model": str(self.folder), "prompt": ids, "max_tokens": NEW_TOKENS, "temperature": 0}
        return self.client.completions.create(**asked | options)

    def group_is_gone(self) -> bool:
        try:
            os.killpg(self.process.pid, 0)
        except ProcessLookupError:
            return True
        return False

    def kill(self) -> None:
        if not self.group_is_gone():
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.client.close()


@pytest.fixture(scope="module")
def server(saved, tmp_path_factory):
    server = Server(saved / "llama", tmp_path_factory.mktemp("server") / "log.txt")
    try:
        server.wait()
        yield server
    finally:
        server.kill()


@pytest.fixture(scope="module")
def wanted(saved):
    return greedy(saved / "llama", ASKED)


def ids_of(text: str) -> list[int]:
    return [int(word.removeprefix("w")) for word in text.split()]


def test_it_says_what_it_runs(server):
    said = server.said()
    assert f"serving {server.folder} with vLLM" in said
    assert "twell: 2 sparse blocks, plan row, shares of active neurons known from the checkpoint" in said


def test_many_requests_at_once(server, wanted):
    with ThreadPoolExecutor(len(ASKED)) as clients:
        answers = list(clients.map(server.ask, ASKED))
    assert [ids_of(answer.choices[0].text) for answer in answers] == wanted
    assert {answer.usage.completion_tokens for answer in answers} == {NEW_TOKENS}


def test_streaming(server, wanted):
    pieces = [chunk.choices[0].text for chunk in server.ask(ASKED[0], stream=True)]
    assert len(pieces) > 1
    assert ids_of("".join(pieces)) == wanted[0]


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        ({"temperature": -1}, openai.BadRequestError),
        ({"max_tokens": 0}, openai.BadRequestError),
        ({"prompt": [1] * (POSITIONS + 1)}, openai.BadRequestError),
        ({"model": "another"}, openai.NotFoundError),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_bad_request_is_answered(server, wanted, bad, error):
    with pytest.raises(error):
        server.ask(ASKED[1], **bad)
    assert ids_of(server.ask(ASKED[1]).choices[0].text) == wanted[1]  # and harms nobody


def test_it_ends_cleanly(server):
    """Last: the others need it."""
    server.process.send_signal(signal.SIGINT)
    server.process.wait(STOP_SECONDS)
    end = time.monotonic() + STOP_SECONDS
    while not server.group_is_gone() and time.monotonic() < end:
        time.sleep(0.2)
    assert server.process.returncode == 0, server.said()[-4000:]
    assert server.group_is_gone()
    assert "Traceback" not in server.said()
