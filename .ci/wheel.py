"""Build the wheel, check it, install it in a new environment and run the command from there.

The new environment sees the packages of the one that runs this (torch alone is gigabytes); twell it has from
the wheel only.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src"


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    print("$", *command, flush=True)
    done = subprocess.run(list(map(str, command)), cwd=cwd, text=True, stdout=subprocess.PIPE, check=True)
    return done.stdout


def build(folder: Path) -> Path:
    shutil.rmtree(ROOT / "build", ignore_errors=True)  # setuptools would pack what older builds left there
    run(sys.executable, "-m", "build", "--wheel", "--outdir", folder)
    (wheel,) = folder.glob("*.whl")
    return wheel


def check_contents(wheel: Path) -> None:
    """Every file of src is in the wheel, and nothing but those and what describes them."""
    packed = set(zipfile.ZipFile(wheel).namelist())
    ours = {
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*")
        if path.is_file() and not {"__pycache__", "twell.egg-info"} & {*path.parts}
    }
    described = {name for name in packed if ".dist-info/" in name}
    if missing := ours - packed:
        sys.exit(f"not in the wheel: {', '.join(sorted(missing))}; see package-data in pyproject.toml")
    if more := packed - ours - described:
        sys.exit(f"in the wheel, and not in src: {', '.join(sorted(more))}")
    if not any(name.endswith("licenses/LICENSE") for name in described):
        sys.exit("the wheel has no LICENSE")


def install(wheel: Path, folder: Path) -> Path:
    """A new environment with the wheel; its folder of commands."""
    run(sys.executable, "-m", "venv", folder)
    commands = folder / "bin"
    run(commands / "pip", "install", "--quiet", "--no-deps", "--no-index", wheel)
    own = run(commands / "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    # After the installation: pip would take the editable twell over there for this one.
    (Path(own) / "packages.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return commands


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wheel = build(folder / "dist")
        run(sys.executable, "-m", "twine", "check", "--strict", wheel)
        check_contents(wheel)
        commands = install(wheel, folder / "environment")
        where = "import sys, twell; print(twell.__version__, twell.__file__.startswith(sys.prefix))"
        version, inside = run(commands / "python", "-c", where, cwd=folder).split()
        if inside != "True":
            sys.exit("the new environment imports another twell than the wheel's")
        if version not in wheel.name:
            sys.exit(f"twell says {version}, the wheel is {wheel.name}")
        if (said := run(commands / "twell", "--version", cwd=folder).strip()) != f"twell {version}":
            sys.exit(f"twell --version says {said!r}")
        print(run(commands / "twell", "doctor", cwd=folder))
        print(f"{wheel.name}: built, checked, installed, runs")


if __name__ == "__main__":
    main()
