"""`twell explain`: our models and stock ones, on a text."""

from __future__ import annotations

import json
import shutil

import pytest

pytest.importorskip("transformers")
pytest.importorskip("datasets")
pytest.importorskip("typer")
from transformers import AutoConfig
from typer.testing import CliRunner

from twell.cli.app import app
from twell.shares import FIELD, SIZES, stored_shares
from twell.train.checkpoints import write_manifest


def run(*arguments, columns=None):
    runner = CliRunner(env={"COLUMNS": columns})
    return runner.invoke(app, ["explain", *map(str, arguments)], catch_exceptions=False)


@pytest.mark.parametrize(
    ("model", "block"), [("ours", "model.layers.0.mlp"), ("gpt2", "transformer.h.0.mlp")]
)
def test_every_block_has_a_row(saved, model, block):
    root, corpus = saved
    done = run(root / model, "--text", corpus, "--tokens", 200)
    assert done.exit_code == 0
    header, first, second, *_ = done.output.splitlines()
    assert header.split()[:5] == ["layer", "D", "x", "H", "plan"]
    assert first.startswith(block)
    assert second.split()[0] == block.replace("0", "1")
    assert "192 tokens on the CPU" in done.output  # whole windows of 64


def test_gains_are_drawn_and_every_block_is_counted(saved, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    from twell import plots

    root, corpus = saved
    drawn, timed = [], []
    real = plots.layer_gains

    def draw(active, gains, *arguments, **options):
        drawn.append((active, gains, options["subtitle"]))
        real(active, gains, *arguments, **options)

    monkeypatch.setattr(plots, "layer_gains", draw)
    monkeypatch.setattr("twell.cli.explain.Bar.reach", lambda self, done, total: timed.append((done, total)))
    plot = tmp_path / "gains.png"
    done = run(root / "ours", "--text", corpus, "--tokens", 200, "--plot", plot)
    assert done.output.splitlines()[-1] == f"plot: {plot}"
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert timed == sorted(timed)
    assert (1, 2) in timed
    assert timed[-1] == (2, 2)
    [(active, gains, subtitle)] = drawn
    _, first, second, *_ = done.output.splitlines()
    for row, share, gain in zip((first, second), active, gains, strict=True):
        assert f"{share:.1%}" in row
        assert f"{gain:.2f}x" in row
    assert subtitle == "ours, 192 tokens on the CPU"


def test_fewer_tokens_than_a_window(saved):
    root, corpus = saved
    said = run(root / "ours", "--text", corpus, "--tokens", 10).output
    assert "10 tokens on the CPU" in said
    assert "'union' is of all 10 tokens; so short a text says little: take at least 128 tokens." in said


def test_columns_are_explained(saved):
    root, corpus = saved
    said = run(root / "ours", "--text", corpus, "--tokens", 128).output
    assert "'union' is of 128 neighbouring tokens.\n" in said
    assert "'fewer products' is how many times fewer multiplications a block needs" in said
    assert "says little" not in said


def test_a_narrow_terminal_is_not_exceeded(saved):
    root, corpus = saved
    said = run(root / "ours", "--text", corpus, "--tokens", 128, columns="64").output
    header, first, *_ = lines = said.splitlines()
    assert max(map(len, lines)) <= 64
    assert header.split()[-1] == "measured"
    assert first.startswith("model.layers.0.mlp")
    assert "plan, all layers: auto" in lines
    assert "'fewer products' is" not in said  # no room for that column
    wide = run(root / "ours", "--text", corpus, "--tokens", 128).output.splitlines()
    assert wide[0].split()[-1] == "why"
    assert max(map(len, wide)) > 64


def test_a_model_without_zeros_is_refused(saved):
    root, corpus = saved
    with pytest.raises(ValueError, match=r"without blocks that have exact zeros.*relufy"):
        run(root / "silu", "--text", corpus)


def test_a_missing_text_is_named(saved):
    root, _ = saved
    with pytest.raises(ValueError, match=r"nowhere\.txt"):
        run(root / "ours", "--text", "nowhere.txt")


@pytest.fixture(scope="module")
def unsuitable(saved, tmp_path_factory):
    """Folders with an encoder-decoder, a masked language model, and models without a tokenizer."""
    import transformers as hf

    root = tmp_path_factory.mktemp("unsuitable")
    sizes = {"vocab_size": 384, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    t5 = hf.T5Config(vocab_size=384, d_model=32, d_ff=64, d_kv=16, num_layers=1, num_heads=2)
    hf.T5ForConditionalGeneration(t5).save_pretrained(root / "t5")
    hf.BertForMaskedLM(hf.BertConfig(**sizes, intermediate_size=64)).save_pretrained(root / "bert")
    opt = hf.OPTConfig(**sizes, ffn_dim=64, word_embed_proj_dim=32)
    hf.OPTForCausalLM(opt).save_pretrained(root / "none")
    shutil.copytree(saved[0] / "ours", root / "broken")
    (root / "broken" / "tokenizer.json").write_text("{}")
    return root


@pytest.mark.parametrize("command", ["explain", "prune", "eval", "generate"])
@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("t5", r"t5', a T5ForConditionalGeneration: an encoder and a decoder; accepted: a causal"),
        ("bert", r"bert', a BertForMaskedLM: it predicts masked tokens; accepted: a causal"),
        ("none", r"none', without a tokenizer; accepted: .*tokenizer\.save_pretrained"),
        ("broken", r"broken', whose tokenizer does not load.*; accepted: .*tokenizer\.save_pretrained"),
    ],
)
def test_unsuitable_models_are_refused_in_one_line(saved, unsuitable, tmp_path, command, model, message):
    text = ["--prompt", "x"] if command == "generate" else ["--text", str(saved[1])]
    out = ["--out", str(tmp_path / "out")] if command == "prune" else []
    with pytest.raises(ValueError, match=r"^model: got .*" + message) as error:
        CliRunner().invoke(app, [command, str(unsuitable / model), *text, *out], catch_exceptions=False)
    assert "\n" not in str(error.value)


def test_how_active_layers_are_is_saved(saved, tmp_path):
    root, corpus = saved
    model = shutil.copytree(root / "ours", tmp_path / "model")
    before = json.loads((model / "config.json").read_text())
    done = run(model, "--text", corpus, "--tokens", 640, "--save")
    assert f"saved the shares of active neurons in {model / 'config.json'}" in done.output
    after = json.loads((model / "config.json").read_text())
    assert after == {**before, FIELD: after[FIELD]}
    first, second = stored_shares(AutoConfig.from_pretrained(model))
    assert list(first) == list(second) == list(SIZES)
    assert 0 < first[1] < first[4] <= first[64] < 1


def test_what_cannot_be_saved_is_refused(saved):
    root, corpus = saved
    with pytest.raises(ValueError, match=r"tokens: got 64; accepted: at least 128 tokens"):
        run(root / "ours", "--text", corpus, "--tokens", 64, "--save")
    with pytest.raises(ValueError, match="on the Hub"):
        run("someone/model", "--text", corpus, "--save")


def test_a_checkpoint_stays_as_its_manifest_has_it(saved, tmp_path):
    root, corpus = saved
    checkpoint = shutil.copytree(root / "ours", tmp_path / "checkpoint-4")
    write_manifest(checkpoint)
    with pytest.raises(ValueError, match=r"checkpoint-4; accepted: a finished run"):
        run(checkpoint, "--text", corpus, "--save")
