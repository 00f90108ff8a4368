"""What commands show while they work: on a terminal only, and gone before results."""

from __future__ import annotations

import io
import re
import shutil

import pytest

pytest.importorskip("rich")
from rich.console import Console

from twell.cli import progress as progress_module
from twell.cli.progress import Bar, Steps, announce_tasks, showing


class Screen:
    """A terminal: `frames` are the lines it showed, `left` is what stays."""

    def __init__(self, width: int = 80) -> None:
        self.console = Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)

    @property
    def frames(self) -> list[str]:
        text = re.sub(r"\x1b\[[0-9;?]*[A-JL-Za-z]", "", self.console.file.getvalue())
        return [line.strip() for line in re.split(r"\r|\n|\x1b\[2K", text) if line.strip()]

    @property
    def left(self) -> list[str]:
        """Each line that is not cleared after it was written."""
        lines, current = [], ""
        for part in re.findall(r"\x1b\[2K|\x1b\[1A|\n|\r|[^\r\n\x1b]+", self.console.file.getvalue()):
            if part == "\x1b[2K":
                current = ""
            elif part == "\x1b[1A":
                current = lines.pop()
            elif part == "\n":
                lines.append(current)
                current = ""
            elif part != "\r" and not part.startswith("["):
                current = part
        return [line for line in [*lines, current] if line]


@pytest.fixture
def clock(monkeypatch):
    """Seconds, which tests set; bars refresh at every change."""
    now = [0.0]
    real = progress_module.Bars

    def with_clock(*columns, **options):
        return real(*columns, get_time=lambda: now[0], auto_refresh=False, **options)

    monkeypatch.setattr(progress_module, "Bars", with_clock)
    return now


def test_a_line_shows_what_is_done_and_vanishes():
    screen = Screen()
    with showing(screen.console, "loading runs/[bold]tiny"):
        pass
    screen.console.print("result")
    assert any("loading runs/[bold]tiny" in frame for frame in screen.frames)
    assert screen.left == ["result"]


def test_a_line_vanishes_before_an_error():
    screen = Screen()
    with pytest.raises(ValueError, match="bad"), showing(screen.console, "loading"):
        raise ValueError("bad")
    assert screen.left == []


def test_a_bar_shows_counts_pace_and_what_is_left(clock):
    screen = Screen()
    with Bar(screen.console, "evaluating [x]", 40_000) as bar:
        for second in (1, 2, 3):
            clock[0] = second
            bar.advance(10_000)
        bar._bars.refresh()
        shown = screen.frames[-1]
    assert shown.startswith("evaluating [x] ")
    assert "30,000/40,000 tokens" in shown
    assert "10,000 tokens/s" in shown
    assert shown.endswith("0:00:01 left")
    assert screen.left == []


def test_a_total_that_was_too_small_is_left_out(clock):
    screen = Screen()
    with Bar(screen.console, "evaluating", total=1000) as bar:
        for amount, shown in ((1000, " 1,000/1,000 tokens"), (500, " 1,500 tokens")):
            bar.advance(amount)
            bar._bars.refresh()
            assert shown in screen.frames[-1]


def test_without_a_total_the_time_that_has_passed_is_shown(clock):
    screen = Screen()
    with Bar(screen.console, "counting") as bar:
        clock[0] = 65
        bar.advance(7)
        bar._bars.refresh()
        assert re.search(r"counting .* 7 tokens +0:01:05$", screen.frames[-1])


def test_other_units_have_no_pace(clock):
    screen = Screen()
    with Bar(screen.console, "timing", 4, "blocks") as bar:
        for second in (1, 2):
            clock[0] = second
            bar.advance()
        bar._bars.refresh()
        assert re.search(r"timing .* 2/4 blocks 0:00:02 left$", screen.frames[-1])
        bar.reach(3, 6)
        bar.show("measuring")
        bar._bars.refresh()
        assert re.search(r"measuring .* 3/6 blocks", screen.frames[-1])


def test_large_numbers_fit_a_narrow_terminal(clock):
    screen = Screen(width=80)
    with Bar(screen.console, "evaluating", 12_345_678) as bar:
        for second in (1, 2):
            clock[0] = second
            bar.advance(100_000)
        bar._bars.refresh()
        assert screen.frames[-1].endswith("200,000/12,345,678 tokens 100,000 tokens/s 0:02:02 left")


def test_a_bar_stays_on_one_line(clock):
    screen = Screen(width=50)
    with Bar(screen.console, "evaluating", 12_345_678) as bar:
        for second in (1, 2):
            clock[0] = second
            bar.advance(100_000)
        before = len(screen.frames)
        bar._bars.refresh()
        assert len(screen.frames) == before + 1


def test_a_cleared_bar_counts_on_unseen():
    screen = Screen()
    with Bar(screen.console, "counting", 10) as bar:
        bar.clear()
        announce_tasks(screen.console, ["piqa", "[x]"])
        bar.advance(5)
    assert screen.left == ["lm-eval: piqa, [x]"]


@pytest.fixture
def words(saved, tmp_path):
    root, corpus = saved
    return {"MODEL": str(root / "ours"), "TEXT": str(corpus), "OUT": str(tmp_path / "out")}


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (("eval", "MODEL", "--text", "TEXT", "--max-tokens", "640"), "evaluating"),
        (("explain", "MODEL", "--text", "TEXT", "--tokens", "200"), "timing blocks on 192 tokens"),
        (("profile", "MODEL", "--text", "TEXT", "--tokens", "640", "--no-speed"), "counting"),
        (("prune", "MODEL", "--text", "TEXT", "--tokens", "640", "--out", "OUT"), "checking"),
        (
            ("verify", "MODEL", "--text", "TEXT", "--tokens", "640", "--skip", "tasks", "--expect", "nnz=9"),
            "counting",
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_commands_say_what_they_do_on_a_terminal_only(words, arguments, shown):
    from typer.testing import CliRunner

    from twell.cli.app import app

    arguments = [words.get(word, word) for word in arguments]
    on_a_terminal = CliRunner(env={"FORCE_COLOR": "1", "COLUMNS": "200"}).invoke(app, arguments).output
    assert f"loading {words['MODEL']}" in on_a_terminal
    assert shown in on_a_terminal
    shutil.rmtree(words["OUT"], ignore_errors=True)
    piped = CliRunner(env={"COLUMNS": "200"}).invoke(app, arguments).output
    assert "loading" not in piped
    assert shown not in piped
    assert "\x1b" not in piped
    assert len(piped.splitlines()) > 3


def test_piped_output_stays_clean():
    console = Console(file=io.StringIO())
    with showing(console, "loading"):
        pass
    with Bar(console, "evaluating", 10) as bar:
        bar.advance(3)
        bar.show("counting")
        bar.reach(4, 5)
    announce_tasks(console, ["piqa"])
    assert console.file.getvalue() == ""


def test_bars_follow_each_other(clock):
    screen = Screen()
    with Steps(screen.console) as steps:
        steps.reach("timing", 0, 2, "blocks")
        steps.reach("timing", 1.5, 2, "blocks")
        clock[0] = 5
        steps.advance("counting", 300, 1000)
        steps.advance("counting", 300, 1000)
    assert any("1/2 blocks" in frame for frame in screen.frames)
    assert any("counting" in frame and "600/1,000 tokens" in frame for frame in screen.frames)
    assert screen.left == []
    with Steps(screen.console):
        pass  # nothing to show
