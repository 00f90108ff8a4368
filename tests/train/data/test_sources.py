"""Documents from every kind of source, and what a bad source says."""

from __future__ import annotations

import gzip
import itertools
import json
import lzma
import os
import random
import sys

import pytest

from twell import _log
from twell.train.data import DataConfig, documents, readers
from twell.train.data.sources import text_bytes

TEXTS = ["first document\nwith two lines", "zweites, mit Umlaut: ä", "third 🙂\r\n"]
OPENERS = {"": open, ".gz": gzip.open, ".xz": lzma.open}


def read(source, **settings) -> list[str]:
    return list(
        documents(DataConfig(source=source if isinstance(source, tuple) else str(source), **settings))
    )


def write(path, data: bytes):
    with OPENERS.get(path.suffix, open)(path, "wb") as file:
        file.write(data)
    return path


def json_lines(texts, field="text") -> bytes:
    return "".join(json.dumps({"id": i, field: text}) + "\n" for i, text in enumerate(texts)).encode()


def write_parquet(path, columns):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table(columns), path, row_group_size=2)
    return path


@pytest.mark.parametrize("packed", OPENERS)
def test_text(tmp_path, packed):
    path = write(tmp_path / f"a.txt{packed}", TEXTS[0].encode())
    assert read(path) == [TEXTS[0]]


@pytest.mark.parametrize("packed", OPENERS)
@pytest.mark.parametrize("block", [1, 5, 1 << 20])
def test_nul_separates_documents(tmp_path, packed, block, monkeypatch):
    monkeypatch.setattr(readers, "BLOCK_BYTES", block)
    path = write(tmp_path / f"a.txt{packed}", "\0".join(["", *TEXTS, " \n", ""]).encode())
    assert read(path) == TEXTS


@pytest.mark.parametrize("text", ["line of words\n" * 300, "ä🙂" * 900, "word " * 800, "\n" * 4000 + "x"])
def test_long_text_may_come_in_pieces(tmp_path, text, monkeypatch):
    monkeypatch.setattr(readers, "BLOCK_BYTES", 64)
    path = write(tmp_path / "a.txt", text.encode())
    pieces = list(readers.read_text(path, longest=500))
    assert "".join(pieces) == text
    assert len(pieces) > 5
    assert max(len(piece.encode()) for piece in pieces) < 700
    assert list(readers.read_text(path)) == [text]
    path = write(tmp_path / "b.txt", "\0".join(TEXTS).encode())
    assert list(documents(DataConfig(source=str(path)), longest=500)) == TEXTS


def test_a_large_file_is_streamed(tmp_path):
    data = b"".join(b"document %d %s\0" % (i, b"x" * 5000) for i in range(2000))
    path = write(tmp_path / "large.txt.xz", data)
    read_so_far = []
    original = readers._blocks

    def counted(file):
        for block in original(file):
            read_so_far.append(len(block))
            yield block

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "_blocks", counted)
        first = list(itertools.islice(documents(DataConfig(source=str(path))), 3))
    assert [text.split()[1] for text in first] == ["0", "1", "2"]
    assert sum(read_so_far) <= readers.BLOCK_BYTES < len(data)


@pytest.mark.parametrize("packed", OPENERS)
def test_json_lines(tmp_path, packed):
    path = write(tmp_path / f"a.jsonl{packed}", json_lines([*TEXTS, "", None], "body") + b"\n")
    assert read(path, text_field="body") == TEXTS


def test_parquet(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", {"id": [1, 2, 3, 4, 5], "body": [*TEXTS, None, ""]})
    assert read(path, text_field="body") == TEXTS


def test_a_folder_is_read_in_sorted_order(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / ".hidden").mkdir()
    write(tmp_path / "b" / "z.txt", b"3")
    write(tmp_path / "b" / "a.jsonl.gz", json_lines(["2"]))
    write(tmp_path / "a.txt", b"1")
    write(tmp_path / "c.TXT", b"4")
    write(tmp_path / "README.md", b"not read: there are records")
    write(tmp_path / ".hidden" / "a.txt", b"not read")
    assert read(tmp_path) == ["1", "2", "3", "4"]
    assert read((str(tmp_path / "c.TXT"), str(tmp_path / "b"))) == ["4", "2", "3"]


@pytest.mark.parametrize(
    "name", ["a.md", "a.rst", "a.py", "a.html", "a.csv", "a.json", "LICENSE", "a.md.gz", "notes.xz"]
)
def test_text_is_known_by_what_it_is(tmp_path, name):
    path = write(tmp_path / name, TEXTS[1].encode() * 9000)
    assert read(path) == read(tmp_path) == [TEXTS[1] * 9000]


@pytest.mark.parametrize("name", ["x.txt", "x.txt.xz", "x.md", "x"])
def test_random_bytes_are_not_text(tmp_path, name):
    path = write(tmp_path / name, random.Random(0).randbytes(300_000))
    with pytest.raises(ValueError, match=rf"data\.source: got the file .*{path.name}, which is not text"):
        documents(DataConfig(source=str(path)))


@pytest.mark.parametrize("encoding", ["utf-16", "iso8859-7"])
def test_text_that_is_not_utf8_is_not_text(tmp_path, encoding):
    greek = "".join(map(chr, range(0x3B1, 0x3C9)))
    path = write(tmp_path / "a.txt", f"{greek} {greek}\n".encode(encoding))
    with pytest.raises(ValueError, match=r"a\.txt, which is not text; accepted: text in UTF-8"):
        read(path)


def test_latin_letters_of_another_code_are_replaced(tmp_path):
    path = write(tmp_path / "a.txt", "schöne Grüße aus Köln, wo Bären wohnen".encode("latin-1"))
    assert read(path) == ["sch\ufffdne Gr\ufffd\ufffde aus K\ufffdln, wo B\ufffdren wohnen"]


def test_files_of_a_folder_that_are_not_text_are_skipped_and_logged(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(_log, "_logged", set())
    write(tmp_path / "a.md", b"text")
    write(tmp_path / "b.png", b"\x89PNG\r\n\x1a\n\0\0\0")
    (tmp_path / "c.md.gz").write_bytes(b"no archive")
    assert read(tmp_path) == ["text"]
    assert caplog.text.count("skipped 2 files that are not text") == 1
    write(tmp_path / "d.txt", random.Random(0).randbytes(1000))  # its name says text
    with pytest.raises(ValueError, match=r"d\.txt, which is not text"):
        read(tmp_path)


def test_bytes_that_are_not_utf8(tmp_path):
    write(tmp_path / "a.txt", b"\xef\xbb\xbfstart \xff end")
    write(tmp_path / "b.jsonl", b'{"text": "lone \\ud800, pair \\ud83d\\ude42"}')
    assert read(tmp_path) == ["start \ufffd end", "lone \ufffd, pair 🙂"]


def test_the_built_in_corpus():
    first = [len(text) for text in documents(DataConfig())]
    assert len(first) > 300
    assert sum(first) > 3_000_000
    again = documents(DataConfig())
    assert [len(text) for text in itertools.islice(again, 100)] == first[:100]


@pytest.fixture
def hub_folder(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    folder = tmp_path / "dataset"
    folder.mkdir()
    write_parquet(folder / "train.parquet", {"text": TEXTS, "id": [1, 2, 3]})
    write_parquet(folder / "test.parquet", {"text": ["only this"], "id": [4]})
    return folder


def test_a_hugging_face_dataset(hub_folder):
    assert read(f"hf:{hub_folder}") == TEXTS
    assert read(f"hf:{hub_folder}:default:test") == ["only this"]
    assert read(f"hf:{hub_folder}::test") == ["only this"]


def test_bad_hugging_face_datasets(hub_folder):
    with pytest.raises(ValueError, match=r"hf:.*, record 1: no field 'body' .*\['id', 'text'\]"):
        read(f"hf:{hub_folder}", text_field="body")
    with pytest.raises(ValueError, match=r"cannot open 'hf:.*nosplit"):
        read(f"hf:{hub_folder}:default:nosplit")
    with pytest.raises(ValueError, match="'hf:a:b:c:d'"):
        read("hf:a:b:c:d")


def test_a_dataset_out_of_reach_says_how_to_get_it(monkeypatch):
    datasets = pytest.importorskip("datasets")

    def unreachable(*arguments, **options):
        raise ConnectionError("Couldn't reach it")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(ValueError, match=r"Couldn't reach it; .*`hf download some/dataset .*hf:FOLDER"):
        read("hf:some/dataset")


@pytest.mark.parametrize(("module", "name"), [("datasets", "hf:some/dataset"), ("pyarrow", "a.parquet")])
def test_a_missing_package_is_named(tmp_path, monkeypatch, module, name):
    source = name if name.startswith("hf:") else write(tmp_path / name, b"x")
    for loaded in [key for key in sys.modules if key.partition(".")[0] == module]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf'needs {module}: pip install -e "\.\[train\]" in a checkout'):
        read(source)


def test_bad_paths(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere\.txt', which does not exist"):
        documents(DataConfig(source=str(tmp_path / "nowhere.txt")))
    with pytest.raises(ValueError, match=r"the file .*a\.zip, which is not text; accepted: text in UTF-8"):
        documents(DataConfig(source=str(write(tmp_path / "a.zip", b"PK\x03\x04\0\0"))))
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match=r"the folder .*folder, without a file to read; accepted"):
        documents(DataConfig(source=str(tmp_path / "folder")))
    with pytest.raises(ValueError, match="without text"):
        read(write(tmp_path / "empty.txt", b" \n\0\0"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"txt": "a"}', r"line 2: no field 'text' \(data.text_field\); it has \['txt'\]"),
        (b'{"text": 3}', "line 2: field 'text' is a int"),
        (b'{"text": ', "line 2: invalid JSON"),
        (b'["text"]', "line 2: a JSON list"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    path = write(tmp_path / "a.jsonl", json_lines(["good"]) + line + b"\n")
    with pytest.raises(ValueError, match=rf"a\.jsonl, {message}"):
        read(path)


def test_a_bad_parquet_file_is_named(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", {"body": ["x"]})
    with pytest.raises(ValueError, match=r"a\.parquet: no column 'text' .*\['body'\]"):
        read(path)
    path = write_parquet(tmp_path / "a.parquet", {"text": TEXTS * 100})
    data = bytearray(path.read_bytes())
    data[4:400] = bytes(396)
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"a\.parquet: not a Parquet file, or damaged"):
        read(path)
    path.write_bytes(b"no parquet")
    with pytest.raises(ValueError, match=r"a\.parquet: not a Parquet file"):
        read(path)


@pytest.mark.parametrize("packed", [".gz", ".xz"])
@pytest.mark.parametrize("damage", ["cut", "garbage"])
def test_a_damaged_archive_is_named(tmp_path, packed, damage):
    path = write(tmp_path / f"a.txt{packed}", bytes(range(1, 256)) * 100)
    path.write_bytes(path.read_bytes()[:-20] if damage == "cut" else b"garbage, no archive")
    with pytest.raises(ValueError, match=rf"a\.txt\{packed}: cut off or damaged"):
        read(path)


def test_what_lies_beside_records_is_no_data(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(_log, "_logged", set())
    (tmp_path / "data.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    for name in ("README.md", "dataset_infos.json"):
        (tmp_path / name).write_text("about the data")
    with caplog.at_level("WARNING", logger="twell"):
        assert read(tmp_path) == ["one", "two"]
    assert "skipped 2 files beside the records" in caplog.text


def test_the_size_of_plain_text_is_known(tmp_path):
    (tmp_path / "a.txt").write_text("some text\n")
    (tmp_path / "b.md").write_text("more")
    named = [str(tmp_path), str(tmp_path / "b.md")]
    assert text_bytes(DataConfig(source=named)) == 10 + 4 + 4
    assert text_bytes(DataConfig(source="python")) > 1e6
    with gzip.open(tmp_path / "c.txt.gz", "wt") as file:
        file.write("packed")
    os.mkfifo(tmp_path / "pipe")
    for unknown in (tmp_path / "c.txt.gz", tmp_path, tmp_path / "pipe", "hf:some/dataset"):
        assert text_bytes(DataConfig(source=str(unknown))) is None
