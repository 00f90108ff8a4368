"""The page of a reproduction: every experiment beside the paper's, also of one that is not finished."""

from __future__ import annotations

import copy
import json

import pytest

pytest.importorskip("transformers")
from typer.testing import CliRunner

from twell.cli.app import app
from twell.reproduction.page import make_page
from twell.reproduction.results import tables

from ..report.test_browser import CHROMIUM, NARROW, WIDE, in_chromium
from ..train.runs import ROOT

RECORD = ROOT / "benchmarks" / "results" / "reproduction_small.json"


@pytest.fixture(scope="module")
def results():
    return json.loads(RECORD.read_text())


def report(*arguments, out):
    return CliRunner().invoke(app, ["report", *map(str, arguments), "--out", str(out)])


def test_every_experiment_is_there_with_the_papers_figures(results):
    page = make_page(results)
    titles = [section.title for section in page.sections]
    assert titles[:5] == [table.title for table in tables(results)]
    assert titles[-2:] == ["Environment", "Commands"]
    html = page.html()
    assert "1.24x / 1.188x" in html
    assert "the paper: 1.19x" in html
    gain = results["runs"]["lambda-2e-5"]["speed"]["forward"]["gain"]
    assert page.headline.facts[0].value == f"{gain:.2f}x"
    names = set(page.drawings())
    assert {"lambda-loss.svg", "lambda-active.svg", "lambda-speed.svg", "sizes-speed.svg"} <= names
    assert "| **ReLU, lambda 6e-4** |" in page.markdown("figures")


@pytest.mark.parametrize("finished", [0, 1, 2, 5])
def test_a_page_of_what_is_there(results, finished):
    begun = copy.deepcopy(results)
    for place, (name, run) in enumerate(results["runs"].items()):
        if place >= finished:
            begun["runs"][name] = {
                key: run[key] for key in ("title", "l1", "paper_l1", "neurons", "layers")
            } | {"failure": "out of memory"}
    page = make_page(begun)
    assert "failed: out of memory" in page.html()
    if not finished:
        assert page.headline.claim == "The run with the recommended penalty has not finished yet."


def test_the_headline_claims_no_more_than_is_sure(results):
    changed = copy.deepcopy(results)
    run = changed["runs"]["lambda-2e-5"]
    run["speed"]["forward"] |= {"gain": 1.03, "low": 0.9, "high": 1.1}
    run["summary"] |= {"held_out_nnz": 0.0, "held_out_ce_loss": float("nan"), "dead": None}
    claim = make_page(changed).headline.claim
    assert claim == (
        "With lambda 6e-4, 0% of the neurons are active; a forward pass is 1.03x as fast as dense eager, "
        "which is no sure difference."
    )
    run["speed"] = {}
    assert make_page(changed).headline.claim == "With lambda 6e-4, 0% of the neurons are active."


def test_the_command_reads_the_file_and_the_folder(tmp_path, results):
    folder = tmp_path / "reproduction"
    folder.mkdir()
    (folder / "results.json").write_text(RECORD.read_text())
    for given in (folder, folder / "results.json"):
        out = tmp_path / "page.html"
        found = report(given, out=out)
        assert found.exit_code == 0
        assert "With lambda 6e-4, 0.44% of the neurons are active; cross-entropy is +0.6%;" in found.output
        assert out.read_text() == make_page(results).html()


def test_a_reproduction_beside_others_and_damaged_ones(tmp_path):
    out = tmp_path / "page.html"
    beside = report(RECORD, ROOT / "benchmarks" / "results" / "ffn_cpu.jsonl", out=out)
    assert "a reproduction alone" in str(beside.exception)
    damaged = tmp_path / "results.json"
    damaged.write_text(json.dumps({"scale": "small", "experiments": {"lambda": ["a"]}, "runs": {"a": 3}}))
    assert "a damaged file" in str(report(damaged, out=out).exception)
    damaged.write_text(json.dumps({"scale": "huge", "experiments": {}, "runs": {}}))
    assert "tiny, small, paper" in str(report(damaged, out=out).exception)
    assert not out.exists()


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium: apt-get install chromium")
def test_the_page_in_chromium(results, tmp_path):
    page = make_page(results)
    found, console = in_chromium(page.html(), tmp_path, dark=True)
    assert console == ""
    for name, width in (("wide", WIDE), ("narrow", NARROW)):
        seen = found[name]
        assert seen["errors"] == []
        assert seen["needed"] <= width
        assert len(seen["plots"]) == len(page.drawings())
        assert all(wide > 100 and high > 50 for wide, high in seen["plots"])
        assert max(seen["letters"]) < 1
