"""Nothing imports upward: the layers of docs/architecture.md, checked on the import statements."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "twell"

# From the ground up; a module may import from its own layer and from those above it in this list.
LAYERS = [
    {"_errors", "_files", "_html", "_interval", "_log", "_numbers", "_observers", "_text_table"},
    {"_processor", "_version"},
    {"activations", "layer_state"},
    {"reference", "formats", "synthetic"},
    {"problem", "projections"},
    {"low_rank"},
    {"kernels"},
    {"backends", "accumulation", "crossover"},
    {"plan"},
    {"policy"},
    {"prepared"},
    {"flops", "ops"},
    {"training_step"},
    {"functional"},
    {"block_table"},
    {"nn"},
    {"sparsify"},
    {"pruning"},
    {"shares"},
    {"explanation"},
    {"__init__"},
    {"generation"},
    {"hf"},
    {"vllm"},
    {"measure"},
    {"plots"},
    {"train"},
    {"evaluation"},
    {"profiling"},
    {"verification"},
    {"report"},
    {"reproduction"},
    {"cli"},
    {"__main__"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def unit_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_units(path: Path) -> set[str]:
    """The top-level parts of twell that a file imports, relative or absolute."""
    units: set[str] = set()
    package = ("twell", *path.relative_to(PACKAGE).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = (*base, *(node.module.split(".") if node.module else ()))
            if module == ("twell",):
                units |= {a.name if a.name in LEVEL else "__init__" for a in node.names}
            elif module[0] == "twell":
                units.add(module[1])
        elif isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
            units |= {(name[1] if len(name) > 1 else "__init__") for name in names if name[0] == "twell"}
    return units


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_no_upward_import(path):
    unit = unit_of(path)
    assert unit in LEVEL, f"{unit} has no layer: add it to LAYERS and to docs/architecture.md"
    upward = {name for name in imported_units(path) if LEVEL[name] > LEVEL[unit]}
    assert not upward, f"{path.name} (layer {unit}) imports upward: {sorted(upward)}"


def test_the_check_can_fail(tmp_path, monkeypatch):
    monkeypatch.setattr(f"{__name__}.PACKAGE", tmp_path)
    bad = tmp_path / "kernels" / "bad.py"
    bad.parent.mkdir()
    bad.write_text("from ..nn import SparseMLP\nfrom . import dense\nimport twell.cli\n")
    assert imported_units(bad) == {"nn", "kernels", "cli"}
