"""Contents of token files: checked once, again when a file has changed, always on request."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("transformers")

from twell import _log
from twell.train.data import prepare, token_files
from twell.train.data.token_files import open_token_files


@pytest.fixture
def read(monkeypatch) -> list[str]:
    """Names of the files that were read whole."""
    names = []
    original = token_files.digest_of_file

    def counted(path):
        names.append(path.name)
        return original(path)

    monkeypatch.setattr(token_files, "digest_of_file", counted)
    return names


def flip(path, place=10):
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def test_once_per_file(config, read):
    folder = prepare(config, quiet=True).folder
    files = ["train-00000.bin", "held_out.bin"]
    assert read == files
    prepare(config, quiet=True)
    assert read == files
    os.utime(folder / files[1])
    prepare(config, quiet=True)
    assert read == [*files, files[1]]
    prepare(config, quiet=True, verify=True)
    assert read == [*files, files[1], *files]


@pytest.mark.parametrize("name", ["train-00000.bin", "held_out.bin"])
def test_a_flipped_bit_is_an_error_and_removing_the_folder_repairs_it(config, name):
    folder = prepare(config, quiet=True).folder
    flip(folder / name)
    message = rf"data: got .*{name}, whose contents have changed since it was written; accepted: .* remove "
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            prepare(config, quiet=True)
    flip(folder / name)
    prepare(config, quiet=True)
    flip(folder / name)
    for path in folder.glob("*.bin"):
        path.unlink()
    prepare(config, quiet=True)


def test_a_change_that_leaves_size_and_time_is_found_on_request(config):
    path = prepare(config, quiet=True).folder / "train-00000.bin"
    before = path.stat()
    flip(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    prepare(config, quiet=True)
    with pytest.raises(ValueError, match="contents have changed"):
        prepare(config, quiet=True, verify=True)


@pytest.mark.parametrize("content", [b"", b"[]", b'{"train-00000.bin": 3}'])
def test_notes_that_are_damaged_do_not_count(config, read, content):
    folder = prepare(config, quiet=True).folder
    (folder / ".verified.json").write_bytes(content)
    read.clear()
    open_token_files(folder)
    assert read == ["train-00000.bin", "held_out.bin"]
    open_token_files(folder)
    assert len(read) == 2


def test_where_nothing_can_be_noted_files_are_read_every_time(config, read, monkeypatch, caplog):
    monkeypatch.setattr(_log, "_logged", set())

    def fail(path, value):
        if path.name == ".verified.json":
            raise PermissionError(13, "read-only")
        write_json(path, value)

    write_json = token_files.write_json
    monkeypatch.setattr(token_files, "write_json", fail)
    folder = prepare(config, quiet=True).folder
    open_token_files(folder)
    assert read == ["train-00000.bin", "held_out.bin"] * 2
    assert caplog.text.count("cannot be written") == 1


def test_an_index_whose_sizes_do_not_fit_is_damaged(config):
    folder = prepare(config, quiet=True).folder
    text = (folder / "index.json").read_text()
    (folder / "index.json").write_text(text.replace('"<u2"', '"<u4"'))
    with pytest.raises(ValueError, match=r"index\.json is damaged"):
        open_token_files(folder)
