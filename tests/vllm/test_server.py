"""`twell serve` with vLLM, asked by the real client: many at once, streaming, bad requests, the end."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-vllm installs it")
openai = pytest.importorskip("openai")

from ..serving.models import NEW_TOKENS, POSITIONS, greedy, prompts
from ..serving.server import Server, ids_of

ASKED = prompts(32)


@pytest.fixture(scope="module")
def server(saved, tmp_path_factory):
    log = tmp_path_factory.mktemp("server") / "log.txt"
    limits = "--max-model-len", POSITIONS, "--max-num-seqs", 32
    server = Server("twell.cli", saved / "llama", log, *limits)
    try:
        server.wait()
        yield server
    finally:
        server.kill()


@pytest.fixture(scope="module")
def wanted(saved):
    return greedy(saved / "llama", ASKED)


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
    assert server.stop() == 0, server.said()[-4000:]


def test_transformers_server_knows_our_models(saved, tmp_path):
    """What `twell serve` starts without vLLM."""
    server = Server("twell.hf", saved / "qwen2", tmp_path / "log.txt", "--device", "cpu")
    words = " ".join(f"w{token}" for token in ASKED[0])
    try:
        server.wait()
        assert [ids_of(server.ask(words).choices[0].text)] == greedy(saved / "qwen2", ASKED[:1])
        server.stop()
    finally:
        server.kill()
