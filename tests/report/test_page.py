"""The page: well-formed, complete in itself, with every text escaped."""

from __future__ import annotations

import dataclasses
import json
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import pytest

from twell.measure import write_records
from twell.profiling import read_profile
from twell.report import Inputs, make_report, read_inputs
from twell.report.document import HeatMap
from twell.report.heat_map import LEVELS, heat_map, level
from twell.report.run_sections import run_sections

from ..scripts import benchmark_modules
from ..test_documents import ROOT
from .conftest import STRANGE, bench_records

VOID = {"meta", "link", "br"}


class Page(HTMLParser):
    """Checks that elements are closed in their order; keeps attributes, texts and ids."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append((self.open[-1] if self.open else "", data))

    def text_of(self, *tags: str) -> str:
        return " ".join(text for tag, text in self.texts if tag in tags)


@pytest.fixture(scope="module")
def page(everything) -> Page:
    return Page(make_report(everything).html())


def test_every_section_is_there_and_linked(page):
    titles = [text for tag, text in page.texts if tag == "h2"]
    wanted = ["Forward pass: preset tiny, 2 layers, 4 x 32 tokens, 12 neurons active"]
    wanted += ["Training runs", "Speed and loss over lambda"]
    wanted += ["What each token wakes", "Layer by layer", "How neurons fire", "Environment", "Commands"]
    assert titles == wanted
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    links = [attributes["href"] for tag, attributes in page.elements if tag == "a"]
    assert len(set(ids)) == len(ids)
    assert links == [f"#{name}" for name in ids]


def test_sections_that_would_be_called_alike_are_told_apart(tmp_path):
    some = bench_records()
    elsewhere = [dataclasses.replace(r, hardware={**r.hardware, "cpu": "Another CPU"}) for r in some]
    half = [dataclasses.replace(r, shape={**r.shape, "dtype": "bfloat16"}) for r in some]
    more = [dataclasses.replace(r, date="2099-01-01T10:00:00+00:00") for r in some if "best" not in r.what]
    write_records(tmp_path / "bench.jsonl", [*more, *some, *elsewhere, *half])
    titles = [s.title for s in make_report([tmp_path / "bench.jsonl"]).sections]
    forward = [title for title in titles if title.startswith("Forward pass: ")]
    assert len(set(forward)) == len(forward) == 4
    assert any(title.endswith(", bfloat16") for title in forward)
    assert any("Another CPU" in title for title in forward)
    assert any("2099-01-01" in title for title in forward)


def test_sections_begin_with_what_matters_most(tmp_path):
    shallow = bench_records()
    deep = [dataclasses.replace(r, shape={**r.shape, "layers": 38}) for r in shallow]
    of_training = {"precision": "bfloat16", "checkpointing": False}
    steps = [
        dataclasses.replace(
            r, what=r.what.replace("inference/forward", "training/step"), shape={**r.shape, **of_training}
        )
        for r in shallow
    ]
    on_gpu = [dataclasses.replace(r, hardware={**r.hardware, "gpu": "NVIDIA H200"}) for r in shallow]
    write_records(tmp_path / "bench.jsonl", [*steps, *shallow, *deep, *on_gpu])
    titles = [s.title for s in make_report([tmp_path / "bench.jsonl"]).sections][:4]
    assert [title.partition(":")[0] for title in titles] == ["Forward pass"] * 3 + ["Training step"]
    assert titles[0].endswith("NVIDIA H200")
    assert "38 layers" in titles[1]


def test_comparisons_name_their_machine_and_the_fastest_dense_contender(tmp_path):
    def said(*records) -> str:
        write_records(tmp_path / "bench.jsonl", records)
        [paragraph, *_] = make_report([tmp_path / "bench.jsonl"]).sections[0].blocks
        return paragraph.text

    eager, best, ours = bench_records()
    text = said(eager, best, ours)
    assert text.startswith(f"{eager.hardware['cpu']}, 2 layers, D 32, H 96, float32, ")
    assert text.endswith(" Over the fastest dense contender: ours eager 1.50x (1.50-1.50).")
    wrong = dataclasses.replace(best, details={**best.details, "doubtful": 1})
    assert "Over the fastest" not in said(eager, wrong, ours)  # which is the table's baseline then


def test_searches_say_what_they_were_made_on(tmp_path):
    [first, *_] = bench_records()
    shape = {**first.shape, "precision": "mixed", "checkpointing": False, "memory_gib": "0.5"}
    found = dataclasses.replace(
        first, what="bench_training/micro-batch/dense-eager", unit="sequences", value=3.0, shape=shape
    )
    write_records(tmp_path / "bench.jsonl", [dataclasses.replace(found, quantiles={}, rounds=[], details={})])
    [said, _] = make_report([tmp_path / "bench.jsonl"]).sections[0].blocks
    assert said.text == f"{first.hardware['cpu']}, 2 layers, D 32, H 96, mixed, in 0.5 GiB."


def test_the_papers_figures_are_there(page):
    figures = [text for tag, text in page.texts if tag == "h3"]
    assert {
        "Speed",
        "Peak memory",
        "Energy",
        "Cross-entropy",
        "Loss",
        "Active neurons",
        "Speed by layer",
    } <= {*figures}
    assert {"Active neurons by position", "How often each neuron fires", "Inference, blocks"} - {
        *figures
    } == {
        "Inference, blocks"  # one profile is no curve
    }
    drawn = [attributes for tag, attributes in page.elements if tag == "svg"]
    assert len(drawn) == len(figures)
    assert all(attributes["aria-label"] and attributes["role"] == "img" for attributes in drawn)


def test_counted_figures_say_on_what(page, everything):
    summary = json.loads((everything[1] / "summary.json").read_text())
    profile = read_profile(everything[2] / "profile.json")
    said = page.text_of("p", "figcaption")
    assert "12 active neurons per token of this batch (10 to 14 by layer)" in said
    window = f"{summary['held_out_dead_window']:,} tokens of held-out text"
    assert f"Active: neurons per token and layer, on held-out text. Dead: silent in all of {window}." in said
    assert "On training text, between logs." in said
    assert "At the end of training, on held-out text." in said
    counted = f"Counted on the first {profile.tokens:,} tokens of the profiled text (text: corpus)."
    assert said.count(counted) == 2
    assert f"over the {profile.tokens:,} profiled tokens" in page.text_of("dd")


def test_dead_neurons_say_in_how_many_tokens_they_were_silent(everything):
    [run, *_] = read_inputs(everything[:1]).runs
    logs = [{**line, "dead": 0.1, "dead_window": 1000 * (1 + place)} for place, line in enumerate(run.logs)]
    [section, *_] = run_sections(Inputs((), (dataclasses.replace(run, logs=logs),), (), ()))
    [figure] = [one for one in section.blocks[1].figures if one.name == "runs-dead"]
    assert figure.caption == f"Silent in the last 1,000 to {1000 * len(logs):,} tokens of training text."


def test_runs_without_held_out_text_say_training_text(everything):
    inputs = read_inputs(everything[:2])
    runs = [
        dataclasses.replace(run, summary={"steps": run.last("step")}, evaluations=[]) for run in inputs.runs
    ]
    [section, *_] = run_sections(dataclasses.replace(inputs, runs=tuple(runs)))
    window = f"{runs[0].last('dead_window'):,} tokens of training text"
    assert f"on training text. Dead: silent in all of {window}." in section.blocks[0].caption
    assert "held-out" not in section.blocks[0].caption


def test_nothing_is_fetched(page):
    for tag, attributes in page.elements:
        assert tag not in ("img", "iframe", "object", "embed")
        for name in ("src", "href", "srcset", "action"):
            assert (attributes.get(name) or "#").startswith(("#", "data:,"))
        assert "url(" not in (attributes.get("style") or "")
    css = page.text_of("style")
    assert "url(" not in css
    assert "@import" not in css
    assert "http" not in page.text_of("script", "style")


def test_tokens_are_text_and_nothing_else(page):
    scripts = [attributes for tag, attributes in page.elements if tag == "script"]
    assert scripts == [{"type": "application/json"}, {}]
    assert not any(name.startswith("on") for _, attributes in page.elements for name in attributes)
    assert not any(tag == "b" for tag, _ in page.elements)
    shown = [text for tag, text in page.texts if tag == "bdi"]
    assert STRANGE[0] in shown
    assert "a↵b↵" in shown
    assert "\\u202eabc" in shown
    assert "\\ud800" in shown
    assert f"“{STRANGE[1]}”" in page.text_of("td")


def test_figures_in_tables_are_those_of_the_inputs(page, everything):
    summary = json.loads((everything[1] / "summary.json").read_text())
    cells = [text for tag, text in page.texts if tag == "td"]
    assert f"{summary['held_out_ce_loss']:.4f}" in cells
    layer = read_profile(everything[2] / "profile.json").layers[1]
    assert f"{layer.nnz.mean:.1f}" in cells
    assert any(cell.startswith("2.00x\n(") for cell in cells)


def test_the_map_holds_the_sample(everything):
    profile = read_profile(everything[2] / "profile.json")
    drawn = heat_map(HeatMap(profile.sample, [layer.neurons for layer in profile.layers]))
    data = json.loads(re.search(r"<script[^>]*>(.*?)</script>", drawn, re.DOTALL)[1])
    assert data["nnz"] == profile.sample.nnz
    assert data["neurons"] == profile.sample.neurons
    assert data["sizes"] == [96, 96]
    assert data["values"][0][0] == pytest.approx(profile.sample.values[0][0], rel=5e-3)
    assert drawn.count("<button") == len(profile.sample.tokens)


def test_levels_of_the_map_rise_from_nothing_to_the_most():
    found = [level(count, 500) for count in range(501)]
    assert found == sorted(found)
    assert (found[0], found[1], found[-1]) == (0, 1, LEVELS - 1)
    assert level(0, 0) == 0


def test_a_profile_without_a_sample_has_no_map_and_no_script(everything, tmp_path):
    profile = read_profile(everything[2] / "profile.json")
    dataclasses.replace(profile, sample=None).save(tmp_path / "profile.json")
    page = Page(make_report([tmp_path]).html())
    assert "What each token wakes" not in page.text_of("h2")
    assert not any(tag == "script" for tag, _ in page.elements)


def test_few_layers_have_no_correlation():
    """The profile keeps one, over 4 layers."""
    early = ROOT / "benchmarks" / "results" / "profile_small.json"
    captions = Page(make_report([early]).html()).text_of("figcaption")
    assert "A point per layer." in captions
    assert "Correlation" not in captions
    with benchmark_modules("tables_profile") as (tables,):
        assert tables.small().endswith("bfloat16.")


def test_drawings_stand_by_themselves(everything):
    drawings = make_report(everything).drawings()
    assert len(drawings) > 12
    for name, drawing in drawings.items():
        root = ElementTree.fromstring(drawing)
        assert root.tag == "{http://www.w3.org/2000/svg}svg", name
        assert "--s0" in drawing  # its colours, light and dark


def test_markdown_has_whole_tables_and_no_html(everything):
    text = make_report(everything).markdown("figures")
    tables = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert len(tables) >= 6
    for table in tables:
        columns = {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}
        assert len(columns) == 1
    assert "<script" not in text
    assert "\\|\\`\\*\\_" in text
    assert text.encode()  # a lone surrogate cannot be written
    named = set(re.findall(r"\]\(figures/(.*?)\)", text))
    assert named == set(make_report(everything).drawings())
    assert "](" not in make_report(everything).markdown().replace("\\](", "")


def test_a_notebook_shows_the_page_in_a_frame(everything):
    frame = Page(make_report(everything[3:])._repr_html_())
    [(tag, attributes)] = frame.elements
    assert tag == "iframe"
    assert "Forward pass" in Page(attributes["srcdoc"]).text_of("h2")
