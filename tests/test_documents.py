"""README and docs: generated parts match the records, code runs, named paths, commands and settings exist."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("typer")
import typer

from twell.cli.app import app
from twell.measure import Record, RunRecord, read_records

from .scripts import benchmark_modules

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.fixture(scope="module")
def tables():
    with benchmark_modules("tables") as (module,):
        yield module


def test_tables_and_figures_show_the_records(tables):
    assert tables.drifted() == [], "run `make tables`"


def test_drift_is_noticed(tables, tmp_path, monkeypatch):
    document = tmp_path / "drifted.md"
    text = (ROOT / "README.md").read_text()
    document.write_text(re.sub(r"\*\*(\d)\.", lambda m: f"**{int(m[1]) + 1}.", text, count=1))
    monkeypatch.setattr(tables, "DOCUMENTS", [document])
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "FIGURES", [])
    assert tables.drifted() == ["drifted.md"]


def test_every_record_is_valid(tables):
    files = sorted(tables.RESULTS.rglob("*.jsonl"))
    assert files
    for path in files:
        kind = RunRecord if path == tables.tables_runs.RECORDS else Record
        assert read_records(path, kind)


def fences(document: Path, language: str) -> list[tuple[int, str]]:
    """(line, text) of every fenced block of a language."""
    text = document.read_text()
    found = re.finditer(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [(text[: block.start(1)].count("\n") + 1, block[1]) for block in found]


def needs_cuda(code: str) -> bool:
    return "cuda" in code


def run_page(document: Path, with_cuda: bool) -> dict:
    """Run the Python of a page from top to bottom, as a reader would paste it; the names it leaves."""
    names: dict = {"__name__": "__main__"}
    for line, code in fences(document, "python"):
        if with_cuda or not needs_cuda(code):
            # Empty lines in front make tracebacks show the line of the page.
            exec(compile("\n" * (line - 1) + code, document.name, "exec"), names)
    return names


PAGES = [document for document in DOCUMENTS if fences(document, "python")]
pages = pytest.mark.parametrize("document", PAGES, ids=lambda p: p.name)


@pytest.fixture
def scratch(tmp_path, monkeypatch):
    """An empty working directory; what is cached lands beside it."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def require_imports_of(document: Path) -> None:
    """Skip a page whose packages are not installed: a GPU machine may hold torch and pytest only."""
    text = "".join(code for _, code in fences(document, "python"))
    if "transformers" in text or "twell.hf" in text:
        pytest.importorskip("transformers")
    if "peft" in text:
        pytest.importorskip("peft")
    if "twell.train" in text:
        for module in ("transformers", "accelerate", "tokenizers", "datasets", "yaml"):
            pytest.importorskip(module)


@pages
def test_python_of_a_page_runs(document, scratch):
    require_imports_of(document)
    run_page(document, with_cuda=False)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "document",
    [page for page in PAGES if any(needs_cuda(code) for _, code in fences(page, "python"))],
    ids=lambda p: p.name,
)
def test_python_of_a_page_runs_on_a_gpu(document, scratch):
    require_imports_of(document)
    run_page(document, with_cuda=True)


def test_the_usage_example_is_short():
    [(_, code)] = fences(ROOT / "README.md", "python")
    assert len(code.strip().splitlines()) <= 12


# click's; newer releases of typer have a copy of click inside.
USAGE_ERROR = typer.BadParameter.__base__


def inline_code(document: Path) -> list[str]:
    prose = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"`([^`]+)`", prose)


def commands(document: Path) -> list[list[str]]:
    """The words after `twell` (or `-m twell.cli`) of every command that a page shows."""
    lines = [line for _, block in fences(document, "sh") for line in block.splitlines()]
    found = []
    for line in lines + inline_code(document):
        line = f"twell train {line}" if line.startswith("--preset ") else line  # prose may leave that out
        match = re.match(r"(?:twell|(?:torchrun|accelerate)\s.*-m\s+twell\.cli)\s+(\S.*)", line, re.DOTALL)
        if match:
            found.append([word for word in shlex.split(match[1], comments=True) if word != "..."])
    return found


def check_command(words: list[str]) -> None:
    """Raise unless the command, its options and its settings exist; nothing runs."""
    group = typer.main.get_command(app)
    with group.make_context("twell", list(words), resilient_parsing=True) as context:
        name, command, rest = group.resolve_command(context, words)
        assert command is not None, f"no command {words[0]!r}"
        if rest in ([], ["--help"]):
            return  # a page names a command; its arguments stand elsewhere
        if hasattr(command, "resolve_command"):  # a group of commands
            name, command, rest = command.resolve_command(context, rest)
            assert command is not None, f"no command {' '.join(words[:2])!r}"
            if not rest:
                return
        parsed = command.make_context(name, rest, parent=context).params
    if name in ("train", "demo"):
        from twell.train.presets import PRESETS, preset
        from twell.train.settings import run_config, with_overrides

        chosen = parsed.get("preset") or "tiny"
        assert chosen in PRESETS or chosen == "NAME"
        settings = preset(chosen) if chosen in PRESETS else {}
        run_config(with_overrides(settings, parsed["overrides"] or []))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: p.name)
def test_commands_of_a_page_exist(document):
    for words in commands(document):
        check_command(words)


def test_commands_are_found():
    assert sum(len(commands(document)) for document in DOCUMENTS) > 15
    assert ["train", "--preset", "paper-0.5b"] in commands(ROOT / "docs" / "recipe.md")


@pytest.mark.parametrize(
    "words",
    [
        "tarin --preset tiny",
        "train --presets tiny",
        "train --preset huge",
        "train train.stpes=3",
        "eval m --limit x",
        "bench inferences",
        "bench training --layer 3",
    ],
)
def test_a_wrong_command_is_noticed(words):
    with pytest.raises((USAGE_ERROR, ValueError, AssertionError)):
        check_command(words.split())


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: p.name)
def test_settings_of_a_page_exist(document):
    yaml = pytest.importorskip("yaml")
    from twell.train.settings import run_config, with_overrides

    for _, block in fences(document, "yaml"):
        run_config(yaml.safe_load(block))
    named = [code for code in inline_code(document) if re.match(r"(model|data|recipe|train)\.\w+=", code)]
    run_config(with_overrides({}, named))


def test_install_commands_work():
    """No package index has twell: extras are installed from a checkout, and pyproject.toml has them."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    files = [*DOCUMENTS, *sorted((ROOT / "src").rglob("*.py"))]
    text = "".join(file.read_text() for file in files)
    assert not re.search(r"pip install ['\"]?twell", text)
    named = set(re.findall(r'pip install -e "\.\[(\w+)\]"', text))
    assert {"all", "hf", "train"} <= named <= extras.keys()
    from twell._errors import EXTRAS

    assert EXTRAS.keys() <= extras.keys()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: p.name)
def test_links_and_make_targets_exist(document):
    text = document.read_text()
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", text):
        assert (document.parent / target).exists(), f"{document.name} links to {target}"
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"\bmake ([a-z][a-z-]+)`", text):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{document.name} names `make {target}`"
    for path in re.findall(r"`((?:tests|benchmarks|docs|src)/[\w./-]+)`", text):
        assert (ROOT / path).exists(), f"{document.name} names {path}"
