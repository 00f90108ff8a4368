"""Evaluation and generation from saved models: text, lm-eval's own harness on a local task, the commands."""

from __future__ import annotations

import json
import math

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("datasets")
from transformers import AutoConfig
from typer.testing import CliRunner

from twell.cli.app import app
from twell.evaluation import automatic_dtype, evaluate_text, evaluate_windows, load_model
from twell.hf import SparseLlamaConfig, SparseLlamaForCausalLM, to_stock
from twell.train.data import DataConfig, prepare
from twell.train.presets import preset
from twell.train.run import train
from twell.train.run_folder import CONFIG
from twell.train.settings import run_config, to_yaml

from .train.runs import small_run, write_corpus


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with a small model and its tokenizer, and one with the text."""
    root = tmp_path_factory.mktemp("evaluation")
    corpus = write_corpus(root / "corpus")
    data = prepare(
        DataConfig(source=str(corpus), vocab_size=384, sequence_length=16, cache=str(root / "cache")),
        quiet=True,
    )
    torch.manual_seed(0)
    config = SparseLlamaConfig(
        vocab_size=384,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        eos_token_id=data.tokenizer.eos_token_id,
        bos_token_id=None,
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    SparseLlamaForCausalLM(config).save_pretrained(root / "model")
    data.tokenizer.save_pretrained(root / "model")
    return root / "model", corpus


def run(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)


class TestText:
    def test_is_what_the_model_itself_says(self, saved):
        """Windows of 16 tokens, one at a time, through the model's own loss; the last is shorter."""
        model, tokenizer = load_model(str(saved[0]))
        texts = ["import torch\n", "def main():\n    return 3\n" * 4]
        found = evaluate_text(model, tokenizer, texts, sequence_length=16, batch=3)
        ids = [t for text in texts for t in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]
        windows = [torch.tensor([ids[i : i + 16]]) for i in range(0, len(ids), 16)]
        windows = [w for w in windows if w.shape[1] > 1]
        total, firing = 0.0, torch.zeros(2, 64, dtype=torch.int64)
        with torch.no_grad():
            for window in windows:
                output = model(input_ids=window, labels=window)
                total += output.ce_loss.item() * (window.shape[1] - 1)
                firing += torch.stack(output.firing)
        assert found.tokens == sum(w.shape[1] for w in windows)
        assert found.predicted == found.tokens - len(windows)
        assert found.cross_entropy == pytest.approx(total / found.predicted, rel=1e-5)
        assert found.perplexity == pytest.approx(math.exp(found.cross_entropy))
        assert found.l0 == pytest.approx((firing.sum(1) / found.tokens).tolist())
        assert found.silent == pytest.approx((firing == 0).double().mean(1).tolist())
        assert all(value > 0 for value in found.l1)

    def test_stock_models_have_no_sparsity(self, saved):
        model, tokenizer = load_model(str(saved[0]))
        sparse = evaluate_text(model, tokenizer, ["import torch\n" * 9])
        dense = evaluate_text(to_stock(model), tokenizer, ["import torch\n" * 9])
        assert dense.l0 == ()
        assert dense.cross_entropy == pytest.approx(sparse.cross_entropy, rel=1e-5)

    def test_runs_in_eval_mode_and_leaves_the_mode_alone(self, saved):
        model, tokenizer = load_model(str(saved[0]))
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.5
        text = ["import torch\n" * 9]
        expected = evaluate_text(model, tokenizer, text)
        model.train().model.norm.eval()
        assert evaluate_text(model, tokenizer, text) == expected
        assert model.training
        assert not model.model.norm.training
        with pytest.raises(ValueError, match="tokenizer"):
            evaluate_windows(model, [[1, model.config.vocab_size]])
        assert model.training

    def test_limits(self, saved):
        model, tokenizer = load_model(str(saved[0]))
        assert evaluate_text(model, tokenizer, ["import torch\n" * 99], max_tokens=40).tokens == 40
        windows = [[1, 2, 3, 4]] * 5
        assert [evaluate_windows(model, windows, max_tokens=n).tokens for n in (2, 9, 10, 99)] == [
            2,
            8,
            10,
            20,
        ]
        with pytest.raises(ValueError, match="max_tokens: got 0"):
            evaluate_windows(model, windows, max_tokens=0)
        with pytest.raises(ValueError, match=r"sequence_length: got 65; accepted: 2 to 64"):
            evaluate_text(model, tokenizer, ["a"], sequence_length=65)
        with pytest.raises(ValueError, match="documents: got 0 tokens"):
            evaluate_text(model, tokenizer, [])

    def test_ids_of_another_vocabulary_are_refused(self, saved):
        model, _ = load_model(str(saved[0]))
        size = model.config.vocab_size
        with pytest.raises(ValueError, match=rf"tokenizer: got token {size + 3}; accepted: ids below {size}"):
            evaluate_windows(model, [[1, 2, size + 3]])


class TestAutomaticDtype:
    """On a GPU a run computes in what it was trained in: its stored float32 weights would run dense."""

    @pytest.fixture
    def model(self, tmp_path):
        (tmp_path / CONFIG).write_text(to_yaml(run_config(preset("small"))))
        return str(tmp_path / "model")

    def test_a_run_under_autocast(self, model):
        assert automatic_dtype(model, "cuda") is torch.bfloat16
        assert automatic_dtype(model, "cuda:1") is torch.bfloat16

    def test_a_cpu_computes_in_float32(self, model):
        assert automatic_dtype(model, "cpu") is torch.float32

    @pytest.mark.parametrize(
        "text", [None, "", "train: 3", "train: {precision: [1]}", "train: {precision: int8}", "{", "- a"]
    )
    def test_other_models_are_left_to_transformers(self, tmp_path, text):
        if text is not None:
            (tmp_path / CONFIG).write_text(text)
        assert automatic_dtype(str(tmp_path / "model"), "cuda") == "auto"
        assert automatic_dtype("SakanaAI/SparseLM0.5B", "cuda") == "auto"


def test_eval_command(saved, tmp_path):
    model, corpus = saved
    result = run("eval", model, "--text", corpus, "--max-tokens", 500, "--out", tmp_path / "found.json")
    assert result.exit_code == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["tokens"] == 500
    assert len(found["l0"]) == 2
    assert f"{found['cross_entropy']:.4f}" in result.output


def test_eval_of_a_run_stops_after_max_tokens(tmp_path):
    corpus = write_corpus(tmp_path / "corpus")
    train(small_run(corpus, "train.steps=2"), tmp_path / "run")
    found = [tmp_path / name for name in ("all.json", "some.json")]
    for out, options in zip(found, [(), ("--max-tokens", 40)], strict=True):
        assert run("eval", tmp_path / "run", "--out", out, *options).exit_code == 0
    everything, some = (json.loads(out.read_text())["tokens"] for out in found)
    assert everything > some == 40


def test_tasks_through_the_real_harness(saved, tmp_path):
    """A multiple-choice task of our own: the accuracy is that of scoring the choices by hand."""
    pytest.importorskip("lm_eval")
    questions = [
        {"query": "import", "choices": [" torch", " the"], "gold": 0},
        {"query": "def", "choices": [" self", " main"], "gold": 1},
        {"query": "return", "choices": [" None", " x"], "gold": 0},
    ]
    data = tmp_path / "questions.jsonl"
    data.write_text("".join(json.dumps(q) + "\n" for q in questions))
    (tmp_path / "own.yaml").write_text(
        f"""task: twell_own
dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{query}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: gold
target_delimiter: ""
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
    )
    options = ("--tasks", "twell_own", "--include", tmp_path, "--out", tmp_path / "found.json")
    result = run("eval", saved[0], *options)
    assert result.exit_code == 0, result.output
    model, tokenizer = load_model(str(saved[0]))
    right = 0
    for question in questions:
        scores = []
        for choice in question["choices"]:
            start = tokenizer(question["query"])["input_ids"]
            ids = torch.tensor([tokenizer(question["query"] + choice)["input_ids"]])
            with torch.no_grad():
                log = model(input_ids=ids).logits.log_softmax(-1)
            at = torch.arange(len(start), ids.shape[1])
            scores.append(log[0, at - 1, ids[0, at]].sum().item())
        right += scores.index(max(scores)) == question["gold"]
    assert json.loads((tmp_path / "found.json").read_text())["tasks"] == {
        "twell_own": pytest.approx(right / 3)
    }
    with pytest.raises(ValueError, match="tasks: got no_such_task"):
        run("eval", saved[0], "--tasks", "no_such_task")


def test_generate_command_writes_what_generate_does(saved):
    result = run("generate", saved[0], "--prompt", "import", "--tokens", 6)
    assert result.exit_code == 0
    model, tokenizer = load_model(str(saved[0]))
    prompt = tokenizer("import", return_tensors="pt").input_ids
    wanted = to_stock(model).generate(prompt, max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert tokenizer.decode(wanted[0], skip_special_tokens=True).strip() in result.output
    assert "tokens/s" in result.output
    again = [
        run("generate", saved[0], "--prompt", "def", "--temperature", 1, "--seed", 3).stdout for _ in range(2)
    ]
    assert again[0] == again[1]


def test_bad_input(saved, tmp_path):
    for arguments, message in [
        (("eval", saved[0]), "text: got"),
        (("eval", saved[0], "--sequence-length", 8), "--sequence-length: got 8; accepted: with --text only"),
        (("eval", tmp_path / "nowhere"), "model: got"),
        (("generate", tmp_path / "nowhere", "--prompt", "a"), "model: got"),
        (("eval", tmp_path / "nowhere", "--text", "python"), "model: got"),
        (("eval", tmp_path, "--text", "python"), "config.json"),
        (("generate", saved[0], "--prompt", "x", "--tokens", 64), "tokens: got 64; accepted: at most 63"),
        (("generate", saved[0], "--prompt", "", "--tokens", 4), "prompt: got ''"),
        (("generate", saved[0], "--prompt", "x", "--dtype", "int4"), "dtype: got 'int4'"),
    ]:
        with pytest.raises(ValueError, match=message):
            run(*arguments)


def test_a_name_that_is_neither_here_nor_within_reach(tmp_path, monkeypatch):
    def unreachable(*_, **__):
        raise OSError("We couldn't connect to the Hub\nand more")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(AutoConfig, "from_pretrained", unreachable)
    expected = r"^model: got 'some/model', which is no folder here .* Hub \(We couldn't .* Hub\); acc"
    with pytest.raises(ValueError, match=expected):
        load_model("some/model")
