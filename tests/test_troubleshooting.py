"""docs/troubleshooting.md quotes what the program says: every message is put together from strings in the
source, and some are provoked and compared whole."""

from __future__ import annotations

import ast
import re
from bisect import bisect_left
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

import twell
from twell import _log
from twell.measure.energy import power_source

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
ANYTHING = "..."  # how the page writes what differs from case to case
MOST_PIECES = 8  # of a message
_BEFORE = re.compile(r"(twell|\w+Error): ")  # of a message: who says it
_REPLACED = re.compile(r"%[-+.\d]*[sdgrf]")  # in strings of loggers


def quoted() -> list[str]:
    """Lines of the fences "text", and what tables quote in their first column."""
    fences = re.findall(r"^```text\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    cells = re.findall(r"^\| (`[^|]*) \|", PAGE, re.MULTILINE)
    told = [code for cell in cells for code in re.findall(r"`([^`]+)`", cell) if " " in code]
    return [line for fence in fences for line in fence.splitlines()] + told


class Pieces:
    """Strings of the source, cut where values are put in."""

    def __init__(self, texts: set[str]) -> None:
        self.whole = {piece for text in texts for piece in text.split("\0") if piece}
        self.all = "\0".join(self.whole)
        self.forward = sorted(self.whole)
        self.backward = sorted(piece[::-1] for piece in self.whole)

    def begins(self, text: str) -> bool:
        """Whether a piece begins with `text`."""
        return _begins(self.forward, text)

    def ends(self, text: str) -> bool:
        return _begins(self.backward, text[::-1])

    def make(self, text: str) -> bool:
        """Whether `text` is part of a piece; or the end of one, whole ones, and the beginning of one."""
        if text in self.all:
            return True
        reached = {place for place in range(1, len(text)) if self.ends(text[:place])}
        for _ in range(MOST_PIECES - 1):
            if any(self.begins(text[place:]) for place in reached):
                return True
            reached = {
                end
                for place in reached
                for end in range(place + 2, len(text) + 1)
                if text[place:end] in self.whole
            }
            if len(text) in reached:
                return True
        return False


def _begins(pieces: list[str], text: str) -> bool:
    place = bisect_left(pieces, text)
    return place < len(pieces) and pieces[place].startswith(text)


@cache
def pieces() -> Pieces:
    texts: set[str] = set()
    for path in (ROOT / "src").rglob("*.py"):
        tree = ast.parse(path.read_text())
        prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
                texts.add(_REPLACED.sub("\0", node.value.removeprefix("twell: ")))
            elif isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "\0" for part in node.values]
                texts.add("".join(parts).removeprefix("twell: "))
    return Pieces(texts)


def is_in_the_source(message: str) -> bool:
    message = _BEFORE.sub("", message, count=1) if _BEFORE.match(message) else message
    parts = message.replace(f"'{ANYTHING}'", ANYTHING).split(ANYTHING)
    return all(pieces().make(part) for part in parts if part.strip(" ,;:()"))


@pytest.mark.parametrize("message", quoted(), ids=lambda message: message[:60])
def test_a_quoted_message_is_in_the_source(message):
    assert is_in_the_source(message)


def test_messages_are_found():
    assert len(quoted()) > 80


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("no energy: only root may read ...", "no energy: only root can read ..."),
        ("a projection has hooks", "a projection has hook"),
        (
            "twell: --training: got a CPU; accepted: with a GPU only: on a",
            "--training: got a CPU; wanted: with",
        ),
        ("the logits processor ...", "this logits processor ..."),
    ],
)
def test_a_message_that_was_changed_is_noticed(right, wrong):
    assert is_in_the_source(right)
    assert not is_in_the_source(f"{wrong} now")


class Block(nn.Module):
    def __init__(self, activation=torch.relu) -> None:
        super().__init__()
        self.up, self.down, self.activation = nn.Linear(8, 16), nn.Linear(16, 8), activation

    def forward(self, x):
        return self.down(self.activation(self.up(x)))


def with_hook():
    model = Block()
    model.up.register_forward_hook(lambda *_: None)
    return str(twell.sparsify_(model))


def on_meta():
    twell.sparsify_(Block().to("meta"))


def scripted():
    model = Block()
    twell.sparsify_(model)
    torch.jit.script(model)


def with_a_wrong_override(monkeypatch):
    monkeypatch.setenv("TWELL_PLAN", "fast")
    twell.SparseMLP(8, 16)(torch.randn(2, 8))


def on_a_gpu_that_is_not_there():
    x, weight = torch.randn(2, 8), torch.randn(8, 8)
    twell.ffn(x, weight, weight, plan=twell.Plan(path="block", backend="gpu"))


def compiled():
    torch.compile(twell.SparseMLP(512, 2048), dynamic=True, backend="eager")(torch.randn(64, 512))


PROVOKED = {
    "hooks": with_hook,
    "silu": lambda: str(twell.sparsify_(Block(nn.SiLU()))),
    "nothing": lambda: str(twell.sparsify_(nn.Linear(2, 2))),
    "meta": on_meta,
    "script": scripted,
    "override": with_a_wrong_override,
    "no GPU": on_a_gpu_that_is_not_there,
    "energy": lambda: power_source("cpu", root=Path("nowhere")),
    "compiled": compiled,
}


@pytest.mark.parametrize("what", PROVOKED)
def test_a_provoked_message_is_quoted(what, monkeypatch, caplog):
    """What is returned, raised or logged has exactly one line of the page at its end."""
    if what == "no GPU":
        pytest.importorskip("triton")
    monkeypatch.setattr(_log, "_logged", set())
    provoke = PROVOKED[what]
    try:
        said = provoke(monkeypatch) if provoke is with_a_wrong_override else provoke()
    except (ValueError, RuntimeError) as error:
        said = f"{type(error).__name__}: {error}" if what != "override" else str(error)
    if not isinstance(said, str):
        said = next(record.getMessage() for record in caplog.records if record.name == "twell")
    patterns = [".*".join(map(re.escape, line.split(ANYTHING))) for line in quoted()]
    assert sum(re.search(f"(^|\\s){pattern}$", said) is not None for pattern in patterns) == 1, said
