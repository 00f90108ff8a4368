"""A checkpoint with any damage, also in its manifest, is not whole; the one before it is used."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("transformers")

from twell.train.checkpoints import MANIFEST, fault, find_model, newest_whole, write_manifest


@pytest.fixture
def saved(tmp_path):
    """Two checkpoints of a run."""
    folders = []
    for step in (5, 100):
        folder = tmp_path / f"checkpoint-{step}"
        (folder / "deep").mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(b"weights")
        (folder / "rng_state_0.pth").write_bytes(b"state")
        (folder / "rng_state_1.pth").write_bytes(b"state")
        (folder / "deep" / "x").write_bytes(b"")
        write_manifest(folder)
        folders.append(folder)
    return folders


def test_every_flipped_byte_is_found(saved, tmp_path):
    _, last = saved
    good = (last / MANIFEST).read_bytes()
    content = json.loads(good)
    for place in range(len(good)):
        for bits in (0x01, 0x20, 0x80):
            bad = bytearray(good)
            bad[place] ^= bits
            (last / MANIFEST).write_bytes(bad)
            if fault(last) is None:  # white space that became other white space
                assert json.loads(bad) == content, bad
    (last / MANIFEST).write_bytes(good)
    assert newest_whole(tmp_path) == last


ENTRY = {"bytes": 7, "blake2b": "0" * 32}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"null",
        b"3",
        b'"files"',
        b"{}",
        b'{"files": []}',
        b'{"files": {}}',
        b'{"files": null}',
        b"\xff\xfe",
        b"[" * 100_000,
        json.dumps({"files": {"model.safetensors": None}}).encode(),
        json.dumps({"files": {"model.safetensors": []}}).encode(),
        json.dumps({"files": {"model.safetensors": {"bytes": 7}}}).encode(),
        json.dumps({"files": {"model.safetensors": ENTRY | {"more": 1}}}).encode(),
        json.dumps({"files": {"model.safetensors": ENTRY | {"bytes": "7"}}}).encode(),
        json.dumps({"files": {"deep/x": ENTRY | {"bytes": False}}}).encode(),
        json.dumps({"files": {"model.safetensors": ENTRY | {"blake2b": [1]}}}).encode(),
        json.dumps({"files": {"model\0safetensors": ENTRY}}).encode(),
        json.dumps({"files": {"m" * 5000: ENTRY}}).encode(),
        json.dumps({"files": {"../checkpoint-5/model.safetensors": ENTRY}}).encode(),
        json.dumps({"files": {"deep": ENTRY}}).encode(),
    ],
    ids=lambda content: content[:40].decode(errors="replace"),
)
def test_other_contents_are_no_manifest(saved, tmp_path, content, caplog):
    before, last = saved
    (last / MANIFEST).write_bytes(content)
    assert newest_whole(tmp_path) == before
    assert [record.message for record in caplog.records] == [
        f"checkpoint {last} is skipped: {fault(last)}",
    ]


def test_a_manifest_that_lists_fewer_files_is_damaged(saved):
    _, last = saved
    content = json.loads((last / MANIFEST).read_text())
    del content["files"]["rng_state_0.pth"]
    (last / MANIFEST).write_text(json.dumps(content))
    assert "its own digest" in fault(last)


def test_a_manifest_of_an_earlier_version_counts(saved):
    _, last = saved
    content = json.loads((last / MANIFEST).read_text())
    (last / MANIFEST).write_text(json.dumps({"files": content["files"]}))
    assert fault(last) is None


def test_a_manifest_that_is_a_folder(saved, tmp_path):
    before, last = saved
    (last / MANIFEST).unlink()
    (last / MANIFEST).mkdir()
    assert newest_whole(tmp_path) == before


@pytest.mark.parametrize("parent", [True, False])
@pytest.mark.parametrize(
    ("name", "made"), [("runs/demo", "demo"), ("runs/tiny", "tiny"), ("runs/mine", "NAME"), ("runs", "NAME")]
)
def test_a_run_that_is_not_there_is_not_looked_for_on_the_hub(tmp_path, monkeypatch, parent, name, made):
    monkeypatch.chdir(tmp_path)
    if parent and "/" in name:
        (tmp_path / "runs").mkdir()
    hint = f"`twell train --preset {made}` makes runs/{made}"
    with pytest.raises(ValueError, match=rf"^model: got '{name}', which does not exist; .*; {hint}$"):
        find_model(name)


@pytest.mark.parametrize("name", ["./a", "../a", "/nowhere/a", "~/nowhere/a", "a/b/c", "a/b/"])
def test_other_paths_are_not_looked_for_either(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=rf"^model: got '{name}', which does not exist; .* on the Hub$"):
        find_model(name)


@pytest.mark.parametrize("name", ["someone/model", "runsome/demo"])
def test_other_names_are_left_to_the_hub(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    assert find_model(name) == name


class TestManifests:
    def save(self, run, step, content=b"weights"):
        folder = run / f"checkpoint-{step}"
        (folder / "deep").mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(content)
        (folder / "deep" / "state.bin").write_bytes(b"state")
        write_manifest(folder)
        return folder

    def test_the_newest_whole_checkpoint(self, tmp_path, caplog):
        first, second, third, fourth = (self.save(tmp_path, step) for step in (5, 100, 200, 300))
        assert newest_whole(tmp_path) == fourth
        (fourth / MANIFEST).unlink()
        assert "not finished" in fault(fourth)
        (third / "model.safetensors").write_bytes(b"weightz")
        assert fault(third) == "model.safetensors is damaged"
        (second / "deep" / "state.bin").unlink()
        assert "is missing" in fault(second)
        assert newest_whole(tmp_path) == first
        assert len(caplog.records) == 3
        (first / "model.safetensors").write_bytes(b"weight")
        assert "6 bytes instead of 7" in fault(first)
        (first / MANIFEST).write_text("{")
        assert "cannot be read" in fault(first)
        assert newest_whole(tmp_path) is None
