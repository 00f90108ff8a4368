"""`twell generate`: options, what it says, bad input in one line, Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("typer")
transformers = pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

from twell.cli import generate, main
from twell.evaluation import load_model
from twell.hf import SparseLlamaConfig, SparseLlamaForCausalLM
from twell.train.data.tokenizer import train_tokenizer, wrapped

POSITIONS = 60_000  # more than anybody waits for


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "ours"
    words = [f"def name{i}(value): return value + {i}\n" for i in range(200)]
    tokenizer = wrapped(train_tokenizer(words, vocab_size=300))
    tokenizer.eos_token = None  # texts end where the tests say so
    torch.manual_seed(0)
    config = SparseLlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=POSITIONS,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
    )
    SparseLlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def twell(monkeypatch, capsys):
    """Runs the command; what it printed, and its exit status."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["twell", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main()
        told = capsys.readouterr()
        return SimpleNamespace(out=told.out, err=told.err, status=end.value.code or 0)

    return run


def wanted(folder, prompt, **options):
    model, tokenizer = load_model(str(folder))
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    torch.manual_seed(0)
    made = model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **options)
    return [tokenizer.decode(row, skip_special_tokens=True) for row in made]


def test_what_it_says(twell, folder, monkeypatch):
    monkeypatch.setenv("TWELL_PLAN", "row")
    done = twell("generate", folder, "--prompt", "def", "--tokens", 12)
    assert done.status == 0
    assert done.out.rstrip("\n") == wanted(folder, "def", max_new_tokens=12, do_sample=False)[0]
    said = r"12 tokens in [\d.]+ s: the first 2 after [\d.]+ s, then [\d.]+ tokens/s; "
    assert re.fullmatch(said + "100% of the feed-forward calls ran sparse", done.err.strip())


def test_it_says_why_calls_ran_dense(twell, folder):
    done = twell("generate", folder, "--prompt", "def", "--tokens", 6)
    assert "0% of the feed-forward calls ran sparse (dense: too little work: looking" in done.err


@pytest.mark.parametrize(
    ("options", "meaning"),
    [
        (("--repetition-penalty", 1.9), {"do_sample": False, "repetition_penalty": 1.9}),
        (("--temperature", 0.9, "--top-k", 1), {"do_sample": True, "top_k": 1}),
        (
            ("--temperature", 0.9, "--top-k", 7, "--top-p", 0.8),
            {"do_sample": True, "temperature": 0.9, "top_k": 7, "top_p": 0.8},
        ),
        (("--temperature", 2), {"do_sample": True, "temperature": 2.0, "top_k": 0, "top_p": 0.95}),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_sampling(twell, folder, options, meaning):
    done = twell("generate", folder, "--prompt", "def", "--tokens", 20, *options)
    assert done.out.rstrip("\n") == wanted(folder, "def", max_new_tokens=20, **meaning)[0]


def test_a_batch_is_printed_when_it_is_done(twell, folder):
    done = twell("generate", folder, "--prompt", "def", "--tokens", 9, "--temperature", 1, "--batch", 3)
    texts = wanted(
        folder, ["def"] * 3, max_new_tokens=9, do_sample=True, temperature=1.0, top_k=0, top_p=0.95
    )
    assert len(set(texts)) == 3
    places = [done.out.index(text) for text in texts]
    assert places == sorted(places)
    said = r"27 tokens of 3 texts in [\d.]+ s: the first 2 after [\d.]+ s, then [\d.]+ tokens/s"
    assert re.match(said, done.err)


def test_it_ends_at_the_end_of_the_text(twell, folder, tmp_path):
    """Also where only the tokenizer knows the token."""
    model, tokenizer = load_model(str(folder))
    ids = tokenizer("def", return_tensors="pt").input_ids
    tokens = model.generate(ids, max_new_tokens=9, do_sample=False)[0, ids.shape[1] :].tolist()
    stop = tokens[5]
    model.save_pretrained(tmp_path)
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(stop)
    tokenizer.save_pretrained(tmp_path)
    done = twell("generate", tmp_path, "--prompt", "def", "--tokens", 9)
    assert done.err.startswith(f"{tokens.index(stop) + 1} tokens in ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--prompt", ""), "twell: prompt: got ''; accepted: text of at least one token"),
        (("--prompt", "x " * POSITIONS), f"fewer than the {POSITIONS} positions of the model"),
        (("--prompt", "x", "--tokens", POSITIONS), f"tokens: got {POSITIONS}; accepted: at most"),
        (("--prompt", "x", "--dtype", "int4"), "twell: dtype: got 'int4'; accepted: auto | float32"),
        (("--prompt", "x", "--batch", 4), "twell: batch: got 4; accepted: 1 with temperature 0"),
        (("--prompt", "x", "--top-k", 4), "twell: top-k: got 4; accepted: 0 with temperature 0"),
        (
            ("--prompt", "x", "--batch", 10**13, "--temperature", 1),
            r"twell: batch: got 10000000000000; accepted: at most \d+: keys and values of \d+ tokens take",
        ),
    ],
    ids=lambda value: str(value)[:30],
)
def test_bad_input_is_one_line(twell, folder, options, message):
    done = twell("generate", folder, *options)
    assert done.status == 2
    assert re.search(message.replace("(", r"\("), done.err), done.err
    assert len(done.err.strip().splitlines()) == 1
    assert not done.out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--top-a", "3"), "No such option: --top-a"),
        (("--top-p", "2"), "Invalid value for '--top-p'"),
        (("--top-k", "-1"), "Invalid value for '--top-k'"),
        (("--repetition-penalty", "0"), "Invalid value for '--repetition-penalty'"),
        (("--temperature", "hot"), "Invalid value for '--temperature'"),
        (("--batch", "0"), "Invalid value for '--batch'"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_options_that_do_not_exist_or_are_out_of_range(twell, folder, monkeypatch, options, message):
    monkeypatch.setenv("COLUMNS", "200")
    done = twell("generate", folder, "--prompt", "x", *options)
    assert done.status == 2
    assert message in done.err


def test_what_is_no_model(twell, folder, tmp_path):
    (tmp_path / "notes.txt").write_text("no model")
    for place, message in (
        (tmp_path, "a folder with a config.json, or a run's folder with a checkpoint"),
        (tmp_path / "nowhere", "a folder with a model, a run's folder, or a name on the Hub"),
    ):
        done = twell("generate", place, "--prompt", "x")
        assert done.status == 2
        assert done.err.startswith(f"twell: model: got '{place}'")
        assert f"; accepted: {message}" in done.err
        assert ("which does not exist" in done.err) == (not place.exists())
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in ("config.json", "model.safetensors"):
        (bare / file).write_bytes((folder / file).read_bytes())
    done = twell("generate", bare, "--prompt", "x")
    assert done.status == 2
    assert done.err.startswith(f"twell: model: got '{bare}', without a tokenizer; accepted: a model with the")
    assert len(done.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("_sample", "batch: got 1 of 9 tokens; accepted: fewer or shorter texts: 1.5 GiB were free"),
        ("from_pretrained", "model: got '{folder}'; accepted: one that fits this machine's memory"),
    ],
)
def test_memory_that_runs_out_is_told_in_one_line(twell, folder, monkeypatch, method, message):
    def full(*_given, **_options):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4 PiB.\nGPU 0 has ...")

    monkeypatch.setattr(SparseLlamaForCausalLM, method, full)
    monkeypatch.setattr(generate, "_free_bytes", lambda device: 3 * 2**29)
    done = twell("generate", folder, "--prompt", "x", "--tokens", 8)
    assert done.status == 2
    assert done.err.startswith(f"twell: {message.format(folder=folder)}")
    assert len(done.err.strip().splitlines()) == 1


def test_ctrl_c_while_the_model_is_loaded(twell, folder, monkeypatch):
    def interrupted(*_given, **_options):
        raise KeyboardInterrupt

    monkeypatch.setattr(SparseLlamaForCausalLM, "from_pretrained", interrupted)
    done = twell("generate", folder, "--prompt", "x")
    assert (done.status, done.err, done.out) == (130, "stopped\n", "")


def test_ctrl_c_while_streaming(folder):
    """On a terminal, which shows what it does until text comes."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "twell.cli", "generate", str(folder), "--prompt", "def name"]
    process = subprocess.Popen(
        [*command, "--tokens", str(POSITIONS - 10), "--temperature", "2"],
        stdout=subprocess.PIPE,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
    )
    os.close(theirs)
    said: list[bytes] = []
    reader = threading.Thread(target=_read_all, args=(ours, said))
    reader.start()
    try:
        start = process.stdout.read(200)
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
        reader.join(60)
        os.close(ours)
    terminal = b"".join(said).decode()
    assert process.returncode == 130, terminal
    assert start.startswith(b"def name")
    assert rest.endswith(b"\n")
    assert f"loading {folder}" in terminal
    assert "Traceback" not in terminal
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal).strip().splitlines()
    assert re.fullmatch(r"stopped after \d+ tokens", lines[-1].strip())


def _read_all(terminal: int, said: list[bytes]) -> None:
    with contextlib.suppress(OSError):  # the other end is closed
        while chunk := os.read(terminal, 4096):
            said.append(chunk)
