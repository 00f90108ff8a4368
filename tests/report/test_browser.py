"""The page in headless Chromium: no errors, plots drawn, nothing too wide, tokens that answer."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess

import pytest

from twell.report import make_report

CHROMIUM = shutil.which("chromium")
WIDE, NARROW = 1200, 390
PROBE = r"""
<script>
function wakeTokens() {
  const tokens = [...document.querySelectorAll(".tokens button")];
  const woken = () => document.querySelector(".woken p").textContent;
  const before = woken();
  tokens[3].focus();
  const focused = woken();
  tokens[3].dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight", bubbles: true }));
  const moved = tokens.indexOf(document.activeElement);
  tokens[20].dispatchEvent(new PointerEvent("pointerover", { bubbles: true, pointerType: "mouse" }));
  const pointed = woken();
  document.querySelector(".woken .neuron").click();
  return {
    before, focused, moved, pointed,
    same: document.querySelectorAll(".tokens .same").length,
    columns: getComputedStyle(document.querySelector(".heat")).gridTemplateColumns.split(" ").length,
  };
}
addEventListener("load", () => {
  const found = {
    ...(document.querySelector(".heat") ? wakeTokens() : {}),
    errors,
    width: innerWidth,
    needed: document.documentElement.scrollWidth,
    paper: getComputedStyle(document.body).backgroundColor,
    intervals: [...document.querySelectorAll("td")].filter((cell) => /x\s\(\d/.test(cell.textContent)).map(
      (cell) => [cell.getBoundingClientRect().right, cell.innerText.split("\n").length]),
    // Of the tables that are too wide: how many shades and covers.
    shades: [...document.querySelectorAll(".scroll")].filter((box) => box.scrollWidth > box.clientWidth).map(
      (box) => getComputedStyle(box).backgroundAttachment),
    plots: [...document.querySelectorAll("svg.chart")].map((svg) => [svg.clientWidth, svg.clientHeight]),
    stroke: getComputedStyle(document.querySelector("svg.chart .line")).stroke,
    letters: [...document.querySelectorAll("svg.chart text")].map(
      (text) => text.getBoundingClientRect().right - text.ownerSVGElement.getBoundingClientRect().right),
  };
  parent.document.body.dataset[innerWidth > 800 ? "wide" : "narrow"] = JSON.stringify(found);
});
</script>"""
WATCH = (
    '<script>const errors = []; addEventListener("error", (event) => errors.push(event.message));</script>'
)


def in_chromium(page: str, folder, *, dark: bool) -> tuple[dict[str, dict], str]:
    """What the probe found on a wide and on a narrow screen, and what the console said."""
    probed = page.replace("<head>", f"<head>{WATCH}", 1).replace("</body>", f"{PROBE}</body>", 1)
    frames = "".join(
        f'<iframe srcdoc="{html.escape(probed)}" style="border:0;width:{width}px;height:900px"></iframe>'
        for width in (WIDE, NARROW)
    )
    (folder / "frames.html").write_text(f"<!DOCTYPE html><body>{frames}</body>")
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    command += [f"--user-data-dir={folder / 'user'}", "--virtual-time-budget=3000", "--dump-dom"]
    command += [f"--blink-settings=preferredColorScheme={0 if dark else 1}"]
    done = subprocess.run(
        [*command, (folder / "frames.html").as_uri()], capture_output=True, text=True, timeout=120
    )
    [body] = re.findall(r"<body[^>]*>", done.stdout)
    found = {
        name: json.loads(html.unescape(value)) for name, value in re.findall(r'data-(\w+)="(.*?)"', body)
    }
    return found, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium: apt-get install chromium")
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_page_in_chromium(everything, tmp_path, dark):
    report = make_report(everything)
    found, console = in_chromium(report.html(), tmp_path, dark=dark)
    assert console == ""
    assert found.keys() == {"wide", "narrow"}
    for name, width in (("wide", WIDE), ("narrow", NARROW)):
        page = found[name]
        assert page["errors"] == []
        assert page["width"] == width
        assert page["needed"] <= width
        assert len(page["plots"]) == len(report.drawings())
        assert all(wide > 250 and high > 80 for wide, high in page["plots"])
        assert max(page["letters"]) < 2  # no label leaves its plot
        assert page["intervals"]
        lines = 1 if name == "wide" else 2
        assert all(right <= width and count == lines for right, count in page["intervals"])
        assert set(page["shades"]) <= {"local, local, scroll, scroll"}
        assert page["paper"] == ("rgb(18, 23, 29)" if dark else "rgb(255, 255, 255)")
        assert page["stroke"] not in ("none", "rgb(0, 0, 0)")
        assert page["columns"] == (2 if name == "wide" else 1)
        assert "Token 9 of 32" in page["before"]
        assert "Token 4 of 32" in page["focused"]
        assert page["moved"] == 4
        assert "Token 21 of 32" in page["pointed"]
        assert page["same"] >= 1
    assert found["narrow"]["shades"]  # some table is too wide, or the check checks nothing


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium: apt-get install chromium")
def test_the_probe_can_fail(everything, tmp_path):
    broken = make_report(everything).html().replace("const data = JSON.parse", "const data = nothing.parse")
    found, console = in_chromium(broken, tmp_path, dark=False)
    assert "nothing is not defined" in console
    assert not found or found["wide"]["errors"]
