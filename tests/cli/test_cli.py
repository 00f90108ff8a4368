"""The `twell` command: a block end to end, doctor, tune, bad input, missing packages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")
from PIL import Image
from typer.main import get_command
from typer.testing import CliRunner

import twell
import twell.cli.tune
from twell.backends import BACKENDS
from twell.cli import main
from twell.cli.app import _PANELS, MOST_NEURONS, app
from twell.formats.row import MAX_COLUMNS
from twell.measure import read_records

SOURCE = Path(twell.__file__).parents[1]


def run(*arguments: str):
    return CliRunner().invoke(app, arguments, catch_exceptions=False)


def test_block_checks_times_and_plots(tmp_path):
    size = ("--hidden", "64", "--neurons", "256", "--tokens", "128", "--density", "0.05")
    result = run("block", "--output", str(tmp_path / "out"), *size)
    assert result.exit_code == 0
    assert result.output.count("as exact as dense") == 3
    assert result.output.count("to the bit") == 3
    with Image.open(tmp_path / "out" / "speedup.png") as image:
        assert min(image.size) > 300
    records = read_records(tmp_path / "out" / "records.jsonl")
    assert [r.shape["M"] for r in records] == [128, 8, 1]
    assert all(r.baseline == "dense eager" and r.ratio > 0 for r in records)


@pytest.mark.parametrize("density", ["0", "1"])
def test_block_at_the_extremes(tmp_path, density):
    size = ("--hidden", "16", "--neurons", "64", "--tokens", "9", "--density", density)
    assert run("block", "--output", str(tmp_path), *size).exit_code == 0


def test_block_refuses_too_many_neurons_before_work_starts(tmp_path):
    assert MOST_NEURONS == MAX_COLUMNS
    result = run("block", "--neurons", "70000", "--output", str(tmp_path / "out"))
    assert result.exit_code == 2
    assert "65535" in result.output
    assert not (tmp_path / "out").exists()


def test_block_refuses_a_missing_package_before_work_starts(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="plots need matplotlib"):
        run("block", "--output", str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("options", "rows"), [((), 4 * 5 * 2), (("--quick",), 2 * 5)], ids=["all", "quick"])
def test_tune_on_a_cpu(options, rows, monkeypatch):
    """--quick measures two of the four dtypes, in one of the two layouts."""
    monkeypatch.setattr("twell.measure.tune.remeasure_form", lambda *arguments: None)
    monkeypatch.setattr("twell.measure.tune.remeasure", lambda site: (0.125, True))
    monkeypatch.setattr("twell.measure.tune.sparse_can_pay", lambda site: True)
    output = run("tune", "--device", "cpu", *options).output
    assert output.count("12.5% active") == rows
    assert ("float64" in output) == (options == ())


def test_limits_of_a_cpu_are_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr("twell.measure.tune.remeasure_form", lambda *arguments: None)
    monkeypatch.setattr("twell.measure.tune.remeasure", lambda site: (site.tokens / 1000, True))
    monkeypatch.setattr("twell.measure.tune.sparse_can_pay", lambda site: True)
    drawn, steps = [], []
    real = twell.cli.tune.tuned_limits

    def draw(limits, *arguments, **options):
        drawn.append(limits)
        real(limits, *arguments, **options)

    monkeypatch.setattr("twell.cli.tune.tuned_limits", draw)
    monkeypatch.setattr("twell.cli.tune.Bar.reach", lambda self, done, total: steps.append((done, total)))
    plot = tmp_path / "limits.png"
    result = run("tune", "--device", "cpu", "--quick", "--plot", str(plot))
    assert f"plot: {plot}" in result.output.splitlines()
    assert plot.read_bytes().startswith(b"\x89PNG")
    points = {tokens: tokens / 1000 for tokens in (1, 4, 16, 64, 256)}
    assert drawn == [{"float32, by neuron": points, "bfloat16, by neuron": points}]
    assert steps == [(place, len(steps)) for place in range(1, len(steps) + 1)]
    assert len(steps) == 7 * 2 + 2 * 5  # forms of up to 64 tokens, then limits


def test_gains_of_a_gpu_are_drawn(tmp_path, monkeypatch):
    """With measurements that are made up."""

    def tune(hidden, neurons, *, gated, tokens, repetitions, report):
        for count in tokens:
            report(count, 0.5, {share: 1 / (share + 0.5) for share in twell.cli.tune.SHARES})

    properties = type("Properties", (), {"name": "made-up GPU"})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr("twell.cli.tune.tune_gpu", tune)
    drawn = []
    monkeypatch.setattr(
        "twell.cli.tune.tuned_gains", lambda gains, path, **words: drawn.append((gains, words))
    )
    monkeypatch.setenv("COLUMNS", "200")
    run("tune", "--device", "cuda", "--quick", "--plot", str(tmp_path / "gains.png"))
    [(gains, words)] = drawn
    assert list(gains) == [1, 8, 64, 65, 1024, 8192]
    assert gains[8][0.1] == pytest.approx(1 / 0.6)
    assert words["subtitle"] == "made-up GPU, bfloat16, D 2048, H 5632, gated"


def test_tuning_of_training_needs_a_gpu():
    with pytest.raises(ValueError, match=r"--training: got a CPU; accepted: with a GPU only"):
        run("tune", "--training", "--device", "cpu")


def test_the_help_of_train_lists_every_setting():
    pytest.importorskip("yaml")
    from twell.train.config import RunConfig, meanings
    from twell.train.presets import PRESETS, about
    from twell.train.settings import run_config, with_overrides

    result = CliRunner().invoke(app, ["train", "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    rows = {line.split()[0]: line for line in result.output.splitlines() if line.split()}
    overrides = []
    for key, _, meaning in meanings():
        assert meaning in rows[key]
        overrides.append(f"{key}={rows[key].split()[1]}")
    assert overrides[0] == "preset=null"
    assert run_config(with_overrides({}, overrides[1:])) == RunConfig()
    assert f" {', '.join(PRESETS)}. " in result.output
    assert all(about(name) in rows[name] for name in PRESETS)


def test_doctor_names_versions_and_backends():
    output = run("doctor").output
    assert torch.__version__ in output
    for name in BACKENDS:
        assert name in output
    assert "can run" in output
    assert "Automatic plans on cpu" in output
    assert "by its activations" in output


@pytest.mark.parametrize(
    ("build", "why"), [(None, "is built without CUDA"), ("13.0", "finds no driver or no GPU; look whether")]
)
def test_doctor_says_why_there_is_no_gpu(monkeypatch, build, why):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", build)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setenv("COLUMNS", "200")
    assert why in run("doctor").output


def test_doctor_under_an_override(monkeypatch):
    monkeypatch.setenv("TWELL_PLAN", "row")
    assert "TWELL_PLAN names it" in run("doctor").output
    monkeypatch.setenv("TWELL_PLAN", "nonsense")
    assert "environment variable TWELL_PLAN='nonsense'" in run("doctor").output


def test_version():
    assert run("--version").output.split() == ["twell", twell.__version__]


def test_wrong_settings_are_refused_before_transformers_is_imported():
    code = (
        "import sys; from twell.cli.train import run_train\n"
        "try: run_train(overrides=['steps=0'], preset='tiny', config=None, out=None, resume=None)\n"
        "except ValueError as error: print(error, 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("train.steps: got 0; accepted: ")
    assert done.stdout.split()[-1] == "False"


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (("block", "--density", "2"), 2, "Invalid value for '--density'"),  # typer's own
        (("tune", "--training", "--device", "cpu"), 2, "twell: --training: got a CPU; accepted: with a GPU"),
        (
            ("block", "--tokens", str(10**14)),
            1,
            "twell: out of memory: tried to allocate 409600000000000000 bytes; a smaller batch, shorter "
            "sequences or fewer layers need less\n",
        ),
    ],
    ids=["option", "value", "memory"],
)
def test_what_goes_wrong_is_one_line_and_a_status(tmp_path, monkeypatch, capsys, arguments, status, said):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["twell", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == status
    told = capsys.readouterr().err
    assert said in told
    assert len(told.splitlines()) == 1 or "Usage" in told


def twell_command(*arguments: str, before: str) -> subprocess.CompletedProcess:
    """What the console script does; before: code that runs first."""
    code = f"""
import os, signal, sys
sys.path.insert(0, {str(SOURCE)!r})
sys.argv = ["twell", *{arguments!r}]
{before}
from _twell_command import main
main()"""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


@pytest.mark.parametrize("module", ["torch.nn", "twell.cli.app"])
def test_ctrl_c_while_modules_are_imported(module):
    """The signal comes when `module` is about to be imported."""
    before = f"""
class Interrupts:
    def find_spec(name, *rest):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupts)"""
    done = twell_command("doctor", before=before)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_a_run_in_the_background_goes_on_ignoring_ctrl_c():
    before = """
import atexit
signal.signal(signal.SIGINT, signal.SIG_IGN)
atexit.register(lambda: os.kill(os.getpid(), signal.SIGINT))"""
    done = twell_command("--version", before=before)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"twell {twell.__version__}\n", "")


def test_missing_typer_is_explained():
    code = "import sys; sys.modules['typer'] = None; from twell.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert "pip install typer rich" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_missing_extra_is_explained():
    code = (
        "import sys; sys.modules['yaml'] = None; sys.argv = ['twell', 'train', '--preset', 'tiny']\n"
        "from twell.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.strip().endswith(': pip install -e ".[train]" in a checkout of twell')
    assert "Traceback" not in done.stderr


def test_doctor_says_how_to_get_what_is_missing(monkeypatch):
    monkeypatch.setattr("twell.cli.doctor.find_spec", lambda name: None)
    monkeypatch.setenv("COLUMNS", "200")
    assert 'missing matplotlib: pip install -e ".[plot]" in a checkout of twell' in run("doctor").output


def test_missing_matplotlib_is_explained(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    from twell.plots import speedup_bars

    with pytest.raises(ImportError, match=r'pip install -e "\.\[plot\]" in a checkout'):
        speedup_bars({"a": 2.0}, tmp_path / "x.png", title="", subtitle="")


def test_every_command_is_listed_by_what_it_is_for():
    named = [name for names in _PANELS.values() for name in names]
    assert sorted(named) == sorted(get_command(app).commands)
    shown = run("--help").output
    places = [shown.index(panel) for panel in _PANELS]
    assert places == sorted(places)
    assert shown.index(" demo ") < shown.index(" generate ") < shown.index(" doctor ")
