"""`twell profile`: our models and stock ones, gated and not; what it refuses, and what it keeps."""

from __future__ import annotations

import json
import os
import signal

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("datasets")
pytest.importorskip("typer")
pytest.importorskip("matplotlib")
from PIL import Image
from typer.testing import CliRunner

from twell.cli.app import app
from twell.cli.text import text_source
from twell.evaluation import evaluate_windows, load_model, text_windows
from twell.profiling import profile_model, read_profile
from twell.profiling.run import _Counting
from twell.profiling.tokens import LEADING
from twell.shares import active_neurons
from twell.sparsify.blocks import named_blocks
from twell.train.data import DataConfig, sources
from twell.train.data.sources import documents

LENGTH = 32
PLOTS = {"layers", "firing_rates", "positions", "unions", "overflow", "speed", "sample"}


def run(*arguments, **options):
    runner = CliRunner(env={"COLUMNS": "80"})
    return runner.invoke(app, ["profile", *map(str, arguments)], catch_exceptions=False, **options)


@pytest.fixture(scope="module")
def profiled(saved, tmp_path_factory):
    """name -> (what was printed, the folder that was written), of 20 sequences."""
    root, corpus = saved
    found = {}
    for name in ("ours", "gpt2"):
        out = tmp_path_factory.mktemp("profiled") / name
        options = ("--tokens", 20 * LENGTH, "--sequence-length", LENGTH, "--batch", 6, "--sample", 20)
        done = run(root / name, "--text", corpus, "--out", out, *options)
        assert done.exit_code == 0, done.output
        found[name] = done.output, out
    return found


def windows_of(model, tokenizer, corpus):
    source = documents(DataConfig(source=str(corpus)))
    windows = list(text_windows(model, tokenizer, source, LENGTH))
    return torch.tensor([window for window in windows if len(window) == LENGTH][:20])


@pytest.mark.parametrize("name", ["ours", "gpt2"])
class TestFigures:
    def test_nnz_and_dead_neurons_are_those_of_eval(self, saved, profiled, name):
        root, corpus = saved
        model, tokenizer = load_model(str(root / name))
        windows = windows_of(model, tokenizer, corpus)
        expected = evaluate_windows(model, windows.tolist())
        profile = read_profile(profiled[name][1] / "profile.json")
        assert profile.tokens == expected.tokens == 20 * LENGTH
        assert [layer.nnz.mean for layer in profile.layers] == pytest.approx(expected.l0, rel=1e-4)
        silent = [layer.firing.dead / layer.neurons for layer in profile.layers]
        assert silent == pytest.approx(expected.silent)
        assert [layer.gated for layer in profile.layers] == [name == "ours"] * 2

    def test_positions_tokens_and_sample_are_those_of_the_text(self, saved, profiled, name):
        root, corpus = saved
        model, tokenizer = load_model(str(root / name))
        windows = windows_of(model, tokenizer, corpus)
        profile = read_profile(profiled[name][1] / "profile.json")
        seen = {}
        for block_name, block in named_blocks(model):
            block.register_forward_pre_hook(
                lambda block, inputs, key=block_name: seen.update(
                    {key: active_neurons(block, inputs[0].flatten(0, -2), block._plain_weights())}
                )
            )
        with torch.no_grad():
            model(input_ids=windows, use_cache=False)
        for index, layer in enumerate(profile.layers):
            nnz = seen[layer.name].sum(1).view(20, LENGTH)
            assert layer.nnz_by_position[0] == pytest.approx(nnz[:, 0].double().mean().item())
            assert profile.sample.nnz[index] == nnz[0, :20].tolist()
            later = nnz[:, LEADING:]
            assert layer.most[0].nnz == later.max()
            assert layer.fewest[0].nnz == later.min()
            assert [token.nnz for token in layer.most] == sorted((t.nnz for t in layer.most), reverse=True)
            row, position = divmod(int(later.flatten().max(0).indices), LENGTH - LEADING)
            first = layer.most[0]
            assert (first.position, first.token) == (
                position + LEADING,
                windows[row, position + LEADING].item(),
            )
            assert tokenizer.decode(windows[row, : first.position].tolist()).endswith(first.before)
            for token, neurons in enumerate(profile.sample.neurons[index]):
                assert len(neurons) == min(8, nnz[0, token])
                assert seen[layer.name].view(20, LENGTH, -1)[0, token, neurons].all()
        assert "".join(profile.sample.text) == tokenizer.decode(windows[0, :20].tolist())
        means = torch.stack([active.sum(1) for active in seen.values()]).double().mean(0).view(20, LENGTH)
        common = profile.most[0]
        places = (windows == common.token) & (torch.arange(LENGTH) >= LEADING)
        assert (common.count, common.nnz) == (places.sum(), pytest.approx(means[places].mean().item()))
        assert common.count >= 5

    def test_every_layer_is_timed(self, profiled, name):
        profile = read_profile(profiled[name][1] / "profile.json")
        for layer in profile.layers:
            assert layer.speed.tokens == 6 * LENGTH
            assert layer.speed.sparse_speedup == pytest.approx(layer.speed.dense_ms / layer.speed.sparse_ms)
            assert layer.speed.sparse_path == "row"
        assert profile.correlation.sparse is None  # of two layers
        assert profile.correlation.paper == -0.996

    def test_the_table_and_the_plots_show_it(self, profiled, name):
        output, folder = profiled[name]
        profile = read_profile(folder / "profile.json")
        rows = [line for line in output.splitlines() if line.startswith("│")]
        assert len(rows) == 2 * len(profile.layers) == 4  # two tables
        assert f" {profile.layers[0].nnz.mean:.1f} " in rows[0]
        assert "…" not in output
        assert "hardly sparse" in output  # half of the neurons that are alive fire
        assert {path.stem for path in folder.glob("*.png")} == PLOTS
        for path in folder.glob("*.png"):
            with Image.open(path) as image:
                assert min(image.size) > 200


def test_a_profile_reads_back_as_it_was_saved(profiled, tmp_path):
    _, folder = profiled["ours"]
    profile = read_profile(folder / "profile.json")
    profile.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == (folder / "profile.json").read_text()
    content = json.loads((folder / "profile.json").read_text())
    for change, message in [
        ({"version": 2}, "of version 2"),
        ({"format": "x"}, "something else"),
        ({"layers": [{}]}, "damaged"),
    ]:
        (tmp_path / "bad.json").write_text(json.dumps(content | change))
        with pytest.raises(ValueError, match=message):
            read_profile(tmp_path / "bad.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ValueError, match="no JSON"):
        read_profile(tmp_path / "bad.json")


def test_ctrl_c_keeps_what_was_counted(saved, tmp_path, monkeypatch):
    root, corpus = saved
    add = _Counting.add

    def interrupted(self, ids):
        add(self, ids)
        if self._tokens == 2 * 4 * LENGTH:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(_Counting, "add", interrupted)
    before = signal.getsignal(signal.SIGINT)
    options = ("--sequence-length", LENGTH, "--batch", 4, "--no-speed", "--out", tmp_path / "out")
    done = run(root / "ours", "--text", corpus, *options)
    assert done.exit_code == 130
    assert "stopped: interrupted; the figures are of 256 tokens" in done.output
    profile = read_profile(tmp_path / "out" / "profile.json")
    assert (profile.tokens, profile.stopped) == (8 * LENGTH, "interrupted")
    assert {layer.tokens for layer in profile.layers} == {8 * LENGTH}
    assert {layer.speed for layer in profile.layers} == {None}
    assert not (tmp_path / "out" / "speed.png").exists()
    assert signal.getsignal(signal.SIGINT) is before


def test_text_that_breaks_off_keeps_what_was_counted(saved, tmp_path):
    root, _ = saved
    good = json.dumps({"text": "def main():\n    return 3\n" * 60})
    (tmp_path / "broken.jsonl").write_text(f"{good}\n{good}\nnot json\n")
    options = ("--sequence-length", 16, "--batch", 2, "--no-speed")
    done = run(root / "ours", "--text", tmp_path / "broken.jsonl", *options)
    assert done.exit_code == 1
    assert "line 3: invalid JSON" in done.output
    assert "hardly sparse" in done.output
    (tmp_path / "broken.jsonl").write_text("not json\n")
    with pytest.raises(ValueError, match="line 1: invalid JSON"):
        run(root / "ours", "--text", tmp_path / "broken.jsonl", *options)


def test_bad_input(saved, tmp_path):
    root, corpus = saved
    (tmp_path / "short.txt").write_text("import torch\n")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    for arguments, message in [
        (
            (root / "ours", "--text", tmp_path / "short.txt"),
            r"text: got \d+ tokens; accepted: at least one sequence of 64 tokens; --sequence-length",
        ),
        ((root / "silu", "--text", corpus), "without blocks that have exact zeros.*relufy"),
        ((root / "ours", "--text", tmp_path / "nowhere"), "nowhere"),
        (
            (root / "ours", "--text", tmp_path / "full" / "file"),
            rf"^--text: got '{tmp_path}/full/file', without text; accepted: ",
        ),
        (
            (root / "silu", "--text", tmp_path / "full", "--text", tmp_path / "full" / "file"),
            rf"^--text: got '{tmp_path}/full', '{tmp_path}/full/file', without text; accepted: ",
        ),
        ((tmp_path / "nowhere", "--text", corpus), "model: got"),
        ((root / "ours", "--text", corpus, "--out", tmp_path / "full"), "out: got .*new or empty folder"),
        ((root / "ours", "--text", corpus, "--out", tmp_path / "no" / "where"), "one that exists"),
        ((root / "ours", "--text", corpus, "--sequence-length", 65), "sequence_length: got 65"),
    ]:
        with pytest.raises(ValueError, match=message):
            run(*arguments)
    assert run(root / "ours", "--text", corpus, "--batch", 0).exit_code == 2


def test_a_dataset_on_the_hub_is_not_opened_to_see_whether_it_has_text(monkeypatch):
    def opened(*arguments):
        pytest.fail("opened twice")

    monkeypatch.setattr(sources, "_read_hub", opened)
    assert text_source(["hf:nobody/nothing"]).sources == ("hf:nobody/nothing",)


def test_a_model_in_training_mode_stays_so(saved):
    root, _ = saved
    model, tokenizer = load_model(str(root / "ours"))
    model.train()
    profile = profile_model(
        model, tokenizer, ["import torch\n" * 40], sequence_length=16, batch=2, sample=0, repetitions=0
    )
    assert model.training
    assert profile.sample is None
    assert not any(block._forward_pre_hooks for _, block in named_blocks(model))
