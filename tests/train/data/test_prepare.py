"""The cache: built once, never half, by one process at a time."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time

import numpy as np
import pytest

pytest.importorskip("transformers")

from twell import _files, _log
from twell.train.data import DataConfig, prepare, token_files
from twell.train.data.token_files import TokenWriter

from .corpora import process_context, small, stored, text


@pytest.fixture
def built(monkeypatch) -> list[str]:
    """Grows by one entry whenever a corpus is tokenised."""
    calls = []
    original = token_files.write_token_files

    def counted(folder, *args, **kwargs):
        calls.append(str(folder))
        original(folder, *args, **kwargs)

    monkeypatch.setattr(token_files, "write_token_files", counted)
    return calls


def left_behind(config) -> list[str]:
    """Folders of tokens that look like anything but a finished one."""
    return [path.name for path in (config.cache_folder / "tokens").iterdir() if path.name.startswith(".")]


def test_the_second_time_comes_from_the_cache(config, built):
    first = prepare(config, quiet=True)
    second = prepare(config, quiet=True, verify=True)
    assert len(built) == 1
    assert second.folder == first.folder
    assert second.train_tokens == first.train_tokens == len(stored(first, "train"))
    assert second.vocab_size == first.vocab_size == len(first.tokenizer)


def test_equal_settings_elsewhere_give_equal_files(config, tmp_path):
    other = prepare(small(config.source, tmp_path / "elsewhere"), quiet=True)
    for path in prepare(config, quiet=True).folder.glob("[!.]*.*"):
        assert path.read_bytes() == (other.folder / path.name).read_bytes()


def test_a_changed_file_is_read_again(config, built, tmp_path):
    first = prepare(config, quiet=True)
    path = tmp_path / "text" / "part-0.txt"
    data = path.read_bytes()
    path.write_bytes(data.replace(b"tensor", b"TENSOR"))  # the same size
    second = prepare(config, quiet=True)
    assert (len(built), first.folder == second.folder) == (2, False)
    (tmp_path / "text" / "part-9.txt").write_text(text(999))
    third = prepare(config, quiet=True)
    assert third.train_documents + third.held_out_documents == 101


def test_what_does_not_change_tokens_changes_no_folder(config, built):
    prepare(config, quiet=True)
    prepare(small(config.source, config.cache_folder, sequence_length=64), quiet=True)
    assert len(built) == 1
    for changes in ({"seed": 1}, {"held_out": 0.1}, {"max_tokens": 500}, {"vocab_size": 310}):
        prepare(small(config.source, config.cache_folder, **changes), quiet=True)
    assert len(built) == 5


def test_max_tokens(config):
    whole = prepare(config, quiet=True)
    cut = prepare(small(config.source, config.cache_folder, max_tokens=1234), quiet=True)
    assert cut.train_tokens == 1234
    assert np.array_equal(stored(cut, "train"), stored(whole, "train")[:1234])


def test_batches_do_not_show(config, tmp_path, monkeypatch):
    whole = prepare(config, quiet=True)
    monkeypatch.setattr(token_files, "BATCH_DOCUMENTS", 3)
    other = prepare(small(config.source, tmp_path / "elsewhere"), quiet=True)
    assert np.array_equal(stored(other, "train"), stored(whole, "train"))
    assert np.array_equal(stored(other, "held_out"), stored(whole, "held_out"))


def test_the_bar_is_shown_unless_quiet(config, capfd):
    prepare(config)
    shown = capfd.readouterr().err
    assert "tokenising" in shown
    assert "tokens/s" in shown
    prepare(small(config.source, config.cache_folder, seed=1), quiet=True)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "failure", [KeyboardInterrupt(), RuntimeError("broken"), OSError(errno.EIO, "broken disk")]
)
def test_an_interrupted_build_leaves_nothing(config, monkeypatch, failure):
    original = TokenWriter.add

    def add(self, tokens):
        original(self, tokens)
        if self.tokens > 1000:
            raise failure

    with monkeypatch.context() as patch:
        patch.setattr(TokenWriter, "add", add)
        with pytest.raises(type(failure)):
            prepare(config, quiet=True)
    assert left_behind(config) == []
    assert not [path for path in (config.cache_folder / "tokens").iterdir() if path.is_dir()]
    prepare(config, quiet=True, verify=True)


def test_a_full_disk_is_explained(config, monkeypatch):
    def add(self, tokens):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(TokenWriter, "add", add)
    with pytest.raises(
        OSError, match=r"no space left to write .*tokens.*; free some, or set data\.cache"
    ) as caught:
        prepare(config, quiet=True)
    assert caught.value.errno == errno.ENOSPC
    assert left_behind(config) == []


def test_a_bad_document_late_in_the_corpus_leaves_nothing(config, tmp_path):
    (tmp_path / "text" / "z.jsonl").write_text('{"text": "good"}\n{"txt": "bad"}\n')
    with pytest.raises(ValueError, match=r"z\.jsonl, line 2: no field 'text'"):
        prepare(config, quiet=True)
    assert not list(config.cache_folder.glob("*/[!.]*/*"))


@pytest.mark.parametrize("damage", ["shorter", "missing", "index", "other format"])
def test_damage_is_named_and_repaired(config, built, caplog, monkeypatch, damage):
    monkeypatch.setattr(_log, "_logged", set())
    first = prepare(config, quiet=True)
    before = stored(first, "train")
    path = first.folder / ("index.json" if damage in ("index", "other format") else "train-00000.bin")
    if damage == "shorter":
        os.truncate(path, path.stat().st_size - 2)
    elif damage == "missing":
        path.unlink()
    elif damage == "index":
        path.write_text(path.read_text()[:-20])
    else:
        path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 0}))
    again = prepare(config, quiet=True)
    assert len(built) == 2
    assert str(path) in caplog.text
    assert "building it again" in caplog.text
    assert np.array_equal(stored(again, "train"), before)
    assert left_behind(config) == []


def _prepare_in_process(config, start, results):
    builds = []
    original = token_files.write_token_files

    def slow(folder, *args, **kwargs):
        builds.append(folder)
        time.sleep(0.5)
        original(folder, *args, **kwargs)

    token_files.write_token_files = slow
    start.wait()
    prepared = prepare(config, quiet=True, verify=True)
    results.put((str(prepared.folder), prepared.train_tokens, len(builds)))


def _run_two(config, *, locks: bool):
    context = process_context()
    start, results = context.Barrier(2), context.Queue()
    target = _prepare_in_process if locks else _prepare_without_locks
    processes = [context.Process(target=target, args=(config, start, results)) for _ in range(2)]
    for process in processes:
        process.start()
    answers = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    return answers


def _prepare_without_locks(config, start, results):
    @contextlib.contextmanager
    def unavailable(path, **_options):
        yield "unavailable"

    _files.locked = unavailable
    _prepare_in_process(config, start, results)


@pytest.mark.parametrize("locks", [True, False])
def test_two_processes_share_one_folder(config, locks):
    answers = _run_two(config, locks=locks)
    assert answers[0][:2] == answers[1][:2]
    if locks:
        assert sorted(builds for *_, builds in answers) == [0, 1]
    folders = [path for path in (config.cache_folder / "tokens").iterdir() if path.is_dir()]
    assert [str(path) for path in folders] == [answers[0][0]]


def test_a_prepared_folder_can_be_carried_elsewhere(config, built, tmp_path):
    first = prepare(config, quiet=True)
    moved = first.folder.rename(tmp_path / "carried")
    second = prepare(DataConfig(source=f"prepared:{moved}", sequence_length=config.sequence_length))
    assert len(built) == 1
    assert second.train_tokens == first.train_tokens
    assert second.tokenizer.get_vocab() == first.tokenizer.get_vocab()
    assert second.train[0]["input_ids"].tolist() == stored(second, "train")[: config.sequence_length].tolist()
    with pytest.raises(ValueError, match=r"data.source: got 'prepared:.*nowhere'"):
        prepare(DataConfig(source=f"prepared:{tmp_path / 'nowhere'}"))
    (moved / "train-00000.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"train-00000.bin is damaged"):
        prepare(DataConfig(source=f"prepared:{moved}", sequence_length=config.sequence_length))
