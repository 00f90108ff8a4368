"""Small files and cached folders are whole or absent; locks hold; a full disk is recognised."""

from __future__ import annotations

import contextlib
import errno
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from twell import _files
from twell._files import (
    digest_of_json,
    is_full,
    locked,
    make_folder,
    needs_space,
    open_or_build,
    read_json_object,
    require_writable,
    write_atomically,
    write_json,
)

SOURCE = Path(__file__).parents[1] / "src"

FULL = Path("/dev/full")  # has no room, ever


class TestSmallFiles:
    def test_old_or_new_never_a_part(self, tmp_path, monkeypatch):
        path = tmp_path / "a.json"
        write_json(path, {"old": 1})

        def fail(*_):
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fail)
            with pytest.raises(OSError, match=r"no space left to write .*a\.json"):
                write_atomically(path, "new")
        assert read_json_object(path) == {"old": 1}
        assert [p.name for p in tmp_path.iterdir()] == ["a.json"]
        write_atomically(path, "new")
        assert path.read_text() == "new"

    @pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000])
    def test_what_cannot_be_read_does_not_count(self, tmp_path, content, caplog, monkeypatch):
        monkeypatch.setattr("twell._log._logged", set())
        path = tmp_path / "a.json"
        path.write_bytes(content)
        assert read_json_object(path) is None
        assert read_json_object(path) is None
        assert len(caplog.records) == 1
        assert str(path) in caplog.text

    def test_what_is_not_there(self, tmp_path, caplog):
        assert read_json_object(tmp_path / "a.json") is None
        assert not caplog.records


@contextlib.contextmanager
def files_of_at_most(size: int):
    """C++ writers fail here as on a full disk; only the errno differs."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_the_errors_of_torch(tmp_path):
    """It fails in one of two ways, in the middle of a file or at its end."""
    state = {"weight": torch.zeros(300)}
    torch.save(state, tmp_path / "whole")
    size = (tmp_path / "whole").stat().st_size
    said = set()
    for limit in range(0, size, 16):
        (tmp_path / "part").unlink(missing_ok=True)
        with (
            pytest.raises(OSError, match="no space left to write it; free some") as caught,
            needs_space("it", discard=tmp_path / "part", advice=lambda: "free some"),
            files_of_at_most(limit),
        ):
            torch.save(state, tmp_path / "part")
        said.add("unexpected pos" in str(caught.value.__cause__))
        assert not (tmp_path / "part").exists()
    assert said == {True, False}


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
def test_the_errors_of_python_and_torch_where_nothing_fits(tmp_path):
    (tmp_path / "part").symlink_to(FULL)
    full = pytest.raises(OSError, match="no space left to write it")
    with full as caught, needs_space("it", discard=tmp_path / "part"):
        (tmp_path / "part").write_text("x")
    assert caught.value.errno == errno.ENOSPC
    (tmp_path / "part").symlink_to(FULL)
    with full, needs_space("it", discard=tmp_path / "part"):
        torch.save({"weight": torch.zeros(300)}, tmp_path / "part")


SAVE_ON_A_FULL_DISK = """
import sys, torch
from pathlib import Path
from safetensors import SafetensorError
from safetensors.torch import save_file
from twell._files import needs_space
folder = Path(sys.argv[1])
try:
    with needs_space("it", discard=folder / "part", advice=lambda: "free some"):
        (folder / "part").mkdir()
        save_file({"weight": torch.zeros(1 << 20)}, folder / "part" / "model.safetensors")
except OSError as error:
    assert isinstance(error.__cause__, SafetensorError), error
    assert not (folder / "part").exists()
    print(error)
"""


def test_the_error_of_safetensors_on_a_disk_that_is_full(tmp_path):
    """A disk of 1 MB, in a name space of its own; safetensors puts files in place under its own names."""
    pytest.importorskip("safetensors")
    mount = f"mount -t tmpfs -o size=1m none {tmp_path}"
    own = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    if shutil.which("unshare") is None or subprocess.run([*own, mount], capture_output=True).returncode:
        pytest.skip("no name spaces here")
    code = [sys.executable, "-c", SAVE_ON_A_FULL_DISK, str(tmp_path)]
    result = subprocess.run(
        [*own, f'{mount} && "$0" "$@"', *code],
        env=os.environ | {"PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
    )
    assert "no space left to write it; free some" in result.stdout, result.stderr


def test_messages_of_writers():
    rust = pytest.importorskip("safetensors").SafetensorError
    for error in (
        rust("Error while serializing: I/O error: No space left on device (os error 28)"),
        rust('Error while serializing: IoError(Os { code: 28, kind: StorageFull, message: "full" })'),
        rust("Error while serializing: I/O error: Kein Platz (os error 28)"),
        RuntimeError("basic_ios::clear: iostream error"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
    ):
        assert is_full(error), error
        wrapped = ValueError("later")
        wrapped.__context__ = error
        assert is_full(wrapped)
    for error in (
        rust("Error while serializing: I/O error: broken (os error 5)"),
        ValueError("os error 281"),
    ):
        assert not is_full(error), error


def test_json_is_json(tmp_path):
    write_json(tmp_path / "a.json", {"a": [1, "ä"]})
    assert json.loads((tmp_path / "a.json").read_text()) == {"a": [1, "ä"]}


def _build_for_ever(folder):
    def build(into):
        (into / "half").write_text("half")
        time.sleep(60)

    open_or_build(folder, lambda path: path, build)


def test_a_killed_process_blocks_nobody(tmp_path):
    folder = tmp_path / "target"
    process = multiprocessing.get_context("spawn").Process(target=_build_for_ever, args=(folder,))
    process.start()
    deadline = time.monotonic() + 30
    while not list(tmp_path.glob(".target.*/half")):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert not folder.exists()
    open_or_build(folder, lambda path: path, lambda into: (into / "whole").write_text("whole"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["target", "target.lock"]
    assert [path.name for path in folder.iterdir()] == ["whole"]


def test_the_digest_tells_parts_apart():
    assert digest_of_json([["a", "b"]]) != digest_of_json([["ab"]]) != digest_of_json(["ab"])
    assert digest_of_json({"b": 1, "a": 2}) == digest_of_json({"a": 2, "b": 1})


class TestLocks:
    def test_one_at_a_time_and_the_file_stays(self, tmp_path):
        path = tmp_path / "lock"
        with locked(path) as state:
            assert state == "held"
            with locked(path, wait=0) as other:
                assert other == "busy"
            with locked(path, wait=0.1) as other:
                assert other == "busy"
        assert path.exists()
        with locked(path, wait=0) as state:
            assert state == "held"

    def test_an_error_frees_it(self, tmp_path):
        with pytest.raises(KeyError), locked(tmp_path / "lock"):
            raise KeyError
        with locked(tmp_path / "lock", wait=0) as state:
            assert state == "held"

    def test_where_there_is_no_place(self, tmp_path):
        (tmp_path / "file").touch()
        for path in (tmp_path / "file" / "lock", tmp_path):
            with locked(path, wait=0) as state:
                assert state == "unavailable"

    @pytest.mark.skipif(not _files.fcntl, reason="needs flock")
    @pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EIO])
    @pytest.mark.parametrize("left_behind", [False, True])
    def test_a_file_system_without_locks(self, tmp_path, monkeypatch, number, left_behind):
        def fail(*_):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(_files.fcntl, "flock", fail)
        if left_behind:
            (tmp_path / "lock").touch()
        with locked(tmp_path / "lock") as state:
            assert state == "unavailable"
        assert (tmp_path / "lock").exists()

    @pytest.mark.parametrize("wait", [0, 0.1])
    def test_without_flock(self, tmp_path, monkeypatch, wait):
        monkeypatch.setattr(_files, "fcntl", None)
        with locked(tmp_path / "lock") as state, locked(tmp_path / "lock", wait=wait) as other:
            assert (state, other) == ("held", "busy")
        assert (tmp_path / "lock").exists()

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
    def test_a_forked_process_does_not_hold_it_nor_free_it(self, tmp_path):
        path = tmp_path / "lock"
        with locked(path):
            child = os.fork()
            if not child:
                held = len(_files._held)
                with locked(path, wait=0) as state:
                    os._exit(held + 2 * (state != "busy"))
            assert os.waitpid(child, 0)[1] == 0
            with locked(path, wait=0) as state:
                assert state == "busy"


@pytest.mark.parametrize("place", ["file", "file/below", "file/far/below"])
def test_a_file_where_a_folder_should_be(tmp_path, place):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=rf"^out: got '.*{place}'; accepted: a folder.*file is a file$"):
        make_folder(tmp_path / place, "out")
    make_folder(tmp_path / "new" / "folder", "out")
    make_folder(tmp_path / "new" / "folder", "out")
    assert (tmp_path / "new" / "folder").is_dir()


@pytest.mark.skipif(os.name != "posix", reason="needs modes")
def test_a_rewritten_file_keeps_its_mode(tmp_path):
    path = tmp_path / "file"
    write_atomically(path, "one")
    path.chmod(0o640)
    write_atomically(path, "two")
    assert path.stat().st_mode & 0o777 == 0o640


class TestWritable:
    def test_nothing_is_left_of_the_try(self, tmp_path):
        path = tmp_path / "new" / "records.jsonl"
        require_writable(path, "out")
        assert list(path.parent.iterdir()) == []
        path.write_text("old")
        require_writable(path, "out")
        assert path.read_text() == "old"

    @pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
    @pytest.mark.parametrize(
        ("place", "what"), [("folder", "a folder"), ("fifo", "no plain file"), ("file/below", "is a file")]
    )
    def test_what_is_no_file(self, tmp_path, place, what):
        (tmp_path / "folder").mkdir()
        (tmp_path / "file").touch()
        os.mkfifo(tmp_path / "fifo")
        with pytest.raises(ValueError, match=f"^out: got '.*{what}"):
            require_writable(tmp_path / place, "out")

    def test_a_full_disk(self, tmp_path, monkeypatch):
        def fail(*_):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "fsync", fail)
        with pytest.raises(ValueError, match=r"^out: got .*: No space left on device; accepted: a file that"):
            require_writable(tmp_path / "records.jsonl", "out")
        assert list(tmp_path.iterdir()) == []
