"""`twell serve` without vLLM is transformers' server, asked by the real client: one request after the other
for a stock ReLU model, and continuous batching for ours."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

pytest.importorskip("fastapi", reason="make test-serving installs it")
pytest.importorskip("uvicorn")
openai = pytest.importorskip("openai")

from .models import NEW_TOKENS, POSITIONS, build, greedy, prompts, tokenizer
from .server import Server, ids_of

pytestmark = pytest.mark.serving

ASKED = prompts(16)
# Without these, the cache takes more than half of the machine's memory, and is filled with zeros.
BATCHED = "--continuous-batching", "--cb-num-blocks", 16, "--cb-max-batch-tokens", 64
TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


def words(ids):
    return " ".join(f"w{token}" for token in ids)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    for name in ("llama", "relu"):
        build(name).save_pretrained(root / name)
        speaks = tokenizer()
        speaks.chat_template = TEMPLATE if name == "relu" else None
        speaks.save_pretrained(root / name)
    return root


@pytest.fixture(scope="module")
def wanted(saved):
    return {name: greedy(saved / name, ASKED) for name in ("llama", "relu")}


def started(module, folder, tmp_path_factory, *options):
    log = tmp_path_factory.mktemp("server") / "log.txt"
    server = Server(module, folder, log, "--device", "cpu", *options)
    try:
        server.wait()
        yield server
    finally:
        server.kill()


@pytest.fixture(scope="module")
def one_by_one(saved, tmp_path_factory):
    yield from started("twell.cli", saved / "relu", tmp_path_factory)


@pytest.fixture(scope="module")
def batched(saved, tmp_path_factory):
    yield from started("twell.hf", saved / "llama", tmp_path_factory, *BATCHED)


@pytest.fixture(scope="module", params=["one_by_one", "batched"])
def server(request):
    return request.getfixturevalue(request.param)


def test_models_are_loaded_as_generate_loads_them(saved, tmp_path, monkeypatch):
    from twell.generation import CapturedGeneration
    from twell.hf import serving
    from twell.sparsify.blocks import named_blocks

    build("relu").bfloat16().save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    models = serving.Models(device="cpu", force_model=str(tmp_path / "model"))
    (loaded,) = (timed.model for timed in models.loaded_models.values())
    assert isinstance(loaded, CapturedGeneration)
    assert len(named_blocks(loaded)) == 2
    assert loaded.dtype == (torch.bfloat16 if torch.accelerator.is_available() else torch.float32)
    models.shutdown()

    def no_cache(_folder):
        raise serving.CacheNotFound("nothing was downloaded", cache_dir="nowhere")

    monkeypatch.setattr(serving.model_manager, "scan_cache_dir", no_cache)
    assert serving.Models(device="cpu").get_gen_models() == []


def test_it_says_what_it_runs(one_by_one):
    """A stock ReLU model runs sparse as well."""
    said = one_by_one.said()
    assert f"serving {one_by_one.folder} with transformers" in said
    assert "twell: 2 sparse blocks, plan row" in said


def test_many_requests_at_once(server, wanted):
    with ThreadPoolExecutor(len(ASKED)) as clients:
        answers = list(clients.map(lambda ids: server.ask(words(ids)), ASKED))
    assert [ids_of(answer.choices[0].text) for answer in answers] == wanted[server.folder.name]
    assert {answer.usage.completion_tokens for answer in answers} == {NEW_TOKENS}
    assert {answer.choices[0].finish_reason for answer in answers} == {"length"}


def test_many_streams_at_once(server, wanted):
    def read(ids):
        return [chunk.choices[0].text for chunk in server.ask(words(ids), stream=True)]

    with ThreadPoolExecutor(4) as clients:
        streams = list(clients.map(read, ASKED[:4]))
    assert all(len(pieces) > NEW_TOKENS // 2 for pieces in streams)
    assert [ids_of("".join(pieces)) for pieces in streams] == wanted[server.folder.name][:4]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("bad", "status", "message"),
    [
        ({"temperature": -1}, 400, "temperature: got -1.0; accepted: 0 (greedy) or more"),
        ({"top_p": 2}, 400, "top_p: got 2.0"),
        ({"max_tokens": 0}, 400, "max_tokens: got 0; accepted: 1 or more"),
        ({"prompt": ""}, 400, "prompt: got no tokens"),
        ({"prompt": words([1] * POSITIONS)}, 400, f"fewer than the {POSITIONS} positions of the model"),
        ({"prompt": [1, 2]}, 400, "prompt must be a string"),
        ({"model": "another"}, 400, "requested 'another'"),
        ({"extra_body": {"nonsense": 1}}, 422, "nonsense"),
        ({"n": 2}, 400, "n: got 2; accepted: 1: there is one answer to a request"),
        ({"logprobs": 0}, 400, "logprobs: got 0; accepted: null or false: answers have no probabilities"),
        ({"echo": True}, 400, "echo: got True; accepted: false"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_a_bad_request_is_answered(server, wanted, bad, status, message, stream):
    with pytest.raises(openai.APIStatusError) as refused:
        server.ask(**{"text": words(ASKED[1]), "stream": stream} | bad)
    assert refused.value.status_code == status
    assert message in str(refused.value)
    answer = server.ask(words(ASKED[1]))  # and nobody else is harmed
    assert ids_of(answer.choices[0].text) == wanted[server.folder.name][1]


def test_fields_that_ask_for_nothing_are_taken(server, wanted):
    answer = server.ask(words(ASKED[1]), n=1, echo=False, logprobs=None, presence_penalty=0.0, user="me")
    assert ids_of(answer.choices[0].text) == wanted[server.folder.name][1]


def test_an_answer_ends_where_the_model_does(server):
    answer = server.ask(words([1] * 100), max_tokens=None)  # then transformers takes 1,024
    assert answer.usage.completion_tokens == POSITIONS - 100
    assert answer.choices[0].finish_reason == "length"


def test_the_served_model_is_listed(server):
    assert [model.id for model in server.client.models.list()] == [str(server.folder)]


def test_chat_and_responses(one_by_one, wanted):
    asked = {"model": str(one_by_one.folder), "temperature": 0}
    message = [{"role": "user", "content": words(ASKED[2])}]
    chat = one_by_one.client.chat.completions.create(**asked, messages=message, max_tokens=NEW_TOKENS)
    assert ids_of(chat.choices[0].message.content) == wanted["relu"][2]
    stream = one_by_one.client.chat.completions.create(
        **asked, messages=message, max_tokens=NEW_TOKENS, stream=True
    )
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream]
    assert len(pieces) > 2
    assert ids_of("".join(pieces)) == wanted["relu"][2]
    chat = one_by_one.client.chat.completions.create(**asked, messages=message, max_completion_tokens=3)
    assert chat.usage.completion_tokens == 3
    for ignored in ({"logprobs": True}, {"n": 2}):
        with pytest.raises(openai.BadRequestError, match=f"{next(iter(ignored))}: got .*; accepted: "):
            one_by_one.client.chat.completions.create(**asked, messages=message, **ignored)
    asked |= {"input": words(ASKED[2]), "max_output_tokens": NEW_TOKENS}
    answer = one_by_one.client.responses.create(**asked, stream=False)  # the server streams by default
    assert ids_of(answer.output_text) == wanted["relu"][2]
    events = one_by_one.client.responses.create(**asked, stream=True)
    pieces = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert ids_of("".join(pieces)) == wanted["relu"][2]


def test_without_a_chat_template_chats_are_refused(batched):
    message = [{"role": "user", "content": "w5"}]
    with pytest.raises(openai.BadRequestError, match="chat_template is not set"):
        batched.client.chat.completions.create(model=str(batched.folder), messages=message)


def test_a_temperature_samples(one_by_one):
    texts = {one_by_one.ask("w5 w6", temperature=2.0, seed=seed).choices[0].text for seed in (1, 2, 1)}
    assert len(texts) == 2


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"temperature": 0.7}, "sampling: got temperature 0.7; accepted: greedy, as the first request asked"),
        ({"frequency_penalty": 0.5}, "sampling: got repetition penalty 1.5; accepted: greedy"),
        ({"stop": ["w7"]}, "stop: got"),
    ],
    ids=["temperature", "penalty", "stop"],
)
def test_what_continuous_batching_would_ignore_is_refused(batched, other, message):
    batched.ask("w5")
    with pytest.raises(openai.BadRequestError) as refused:
        batched.ask("w5", **other)
    assert message in str(refused.value)


@pytest.mark.parametrize(("name", "how"), [("one_by_one", "SIGTERM"), ("batched", "SIGINT")])
def test_it_ends_cleanly(request, name, how):
    """Last: the others need it."""
    server = request.getfixturevalue(name)
    server.ask("w5")
    status = server.stop(signal.Signals[how])
    assert status == {"SIGINT": 0, "SIGTERM": -signal.SIGTERM}[how], server.said()[-4000:]
    assert "Application shutdown complete" in server.said()
    assert "Traceback" not in server.said()
    assert "Aborted" not in server.said()
