"""What `twell bench` prints: tables, legends and reasons."""

from __future__ import annotations

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")
pytest.importorskip("transformers")


from .light_job import seconds_by_seed
from .small_bench import QUICK, run

pytestmark = pytest.mark.usefixtures("small_bench")


def test_tables_fit_a_terminal_of_80_columns(monkeypatch):
    from rich.console import Console

    from twell.cli import bench_view
    from twell.measure.results import Measured, merge

    shape = {"model": "paper-2b", "layers": 38, "batch": 32, "sequence": 2048, "dtype": "bfloat16"}
    found = [
        Measured(
            workload="forward",
            contender=contender,
            meaning="in words",
            shape=shape,
            tokens=65536,
            seconds=(seconds, seconds * 1.1),
            joules=(400.0,),
            sparsity={"nnz": 24.1, "nnz_least": 23.9, "nnz_most": 24.4},
            details={"peak_bytes": 123.4 * 2**20, "largest_difference": 5e-7, "same_tokens_as_dense": 1.0},
        )
        for contender, seconds in (("dense-eager", 7.1), ("dense-compiled", 0.5), ("ours-compiled", 0.035))
    ]
    console = Console(width=80)
    with console.capture() as captured:
        bench_view.show(console, merge(found), [])
    table = captured.get().split("dense-eager: in words")[0]
    for figure in ("123.4 MiB", "5.0e-07", "100.0%", "6.1", "202.86x", "dense-compiled"):
        assert figure in table
    assert max(len(line) for line in table.splitlines()[1:]) <= 80


@pytest.mark.parametrize(("slowest", "noisy"), [(1.1, False), (3.0, True)])
def test_times_that_vary_are_said_to(slowest, noisy):
    from rich.console import Console

    from twell.cli import bench_view
    from twell.measure.results import Measured, merge

    shape = {"model": "tiny", "layers": 2, "batch": 2, "sequence": 16, "dtype": "float32"}
    rounds = {"dense-eager": (2.0,) * 6, "ours-eager": (1.0,) * 5 + (slowest,)}
    found = [
        Measured(
            workload="forward", contender=name, meaning="in words", shape=shape, tokens=32, seconds=seconds
        )
        for name, seconds in rounds.items()
    ]
    console = Console(width=80)
    with console.capture() as captured:
        bench_view.show(console, merge(found), [])
    assert ("These times vary a lot" in captured.get()) == noisy


@pytest.mark.parametrize(
    ("widened", "against"),
    [
        ((1, 1), "from the same model in float32, relative"),
        ((0, 0), "from dense eager, relative"),
        ((1, 0), "from the same model in float32, in some processes from dense eager, relative"),
    ],
)
def test_the_legend_says_what_logits_were_compared_with(widened, against):
    from twell.cli import bench_view
    from twell.measure.results import Measured, merge

    found = [
        Measured(
            workload="forward",
            contender="ours-eager",
            meaning="in words",
            shape={"dtype": "bfloat16"},
            tokens=8,
            process=process,
            seconds=(1.0,),
            details={"against_float32": wide},
        )
        for process, wide in enumerate(widened)
    ]
    assert against in " ".join(bench_view._legend(merge(found)))


def shown(*groups: dict, **seconds: float) -> str:
    """What is printed of tables whose contenders took so long. groups: changes of their results."""
    from rich.console import Console

    from twell.cli import bench_view
    from twell.measure.results import Measured, merge

    shape = {"model": "tiny", "layers": 2, "batch": 2, "sequence": 16, "dtype": "float32"}
    found = [
        Measured(
            **{
                "workload": "forward",
                "meaning": "in words",
                "tokens": 32,
                "seconds": (took,) * 6,
                **changes,
                "contender": name.replace("_", "-"),
                "shape": {**shape, **changes.get("shape", {})},
            }
        )
        for changes in groups
        for name, took in {"dense_eager": 2.0, "ours_eager": 1.0, **seconds}.items()
    ]
    console = Console(width=80)
    with console.capture() as captured:
        bench_view.show(console, merge(found), [])
    return captured.get()


def test_what_all_tables_share_is_said_once_at_the_end():
    details = {"against_float32": 1, "same_tokens_as_dense": 1.0}
    output = shown(*({"shape": {"sequence": length}, "details": details} for length in (16, 32, 64)))
    for line in (
        "gains: medians of",
        "difference: the largest",
        "dense-eager: in words",
        "ours-eager: in words",
    ):
        assert output.count(line) == 1
    assert (
        output.index("2 x 64 tokens") < output.index("in these tables:") < output.index("gains: medians of")
    )
    assert output.count("ours-eager: 2.00x dense-eager") == 3
    assert "in this table:" in shown({"details": details})


def test_a_contender_that_means_something_else_is_explained_again():
    output = shown({"meaning": "one way"}, {"meaning": "another", "shape": {"sequence": 32}})
    assert "ours-eager: one way" in output
    assert "ours-eager: another" in output


@pytest.mark.parametrize(("text", "hint"), [("random tokens", False), ("text", True)])
@pytest.mark.parametrize(
    ("share", "seconds", "said", "gained"),
    [
        (0.0, 1.0, "ran all of its feed-forward calls dense: too small [for D 8]", True),
        (0.0, 2.0, "ran all of its feed-forward calls dense: too small [for D 8]", False),
        (0.75, 1.0, "ran 25% of its feed-forward calls dense: too small [for D 8]", False),
        (1.0, 1.0, None, False),
    ],
)
def test_why_calls_ran_dense(text, hint, share, seconds, said, gained):
    why = {"details": {"sparse_share": share}, "dense_reason": "too small [for D 8]", "shape": {"text": text}}
    output = shown(why, ours_eager=seconds)
    assert ("feed-forward calls dense" in output) == (said is not None)
    assert said is None or f"ours-eager {said}\n" in output
    explain = "`twell explain MODEL --text FILE --tokens 32`"
    assert (explain in output) == (hint and said is not None)
    assert ("What blocks gain that ran dense" in output) == gained


def test_a_run_says_why_its_calls_ran_dense():
    """And once why there is no energy."""
    sizes = ("--shape", "2x16", "--prompts", "2", "--prompt-length", "4", "--new-tokens", "3")
    result = run("inference", *sizes, "--rounds", "2", "--energy-seconds", "0.01", "--device", "cpu")
    assert result.exit_code == 0
    assert result.output.count("ours-eager ran all of its feed-forward calls dense: ") == 2
    assert "twell explain" not in result.output
    assert result.output.count("energy") == 1


def test_the_same_note_of_several_processes_is_printed_once(monkeypatch):
    from twell.measure.processes import NOTE

    def noting(options, emit, say):
        say(f"{NOTE}no energy: none is counted here")
        seconds_by_seed(options, emit, say)
        say(f"{NOTE}no energy: none is counted here")

    monkeypatch.setattr("twell.cli.bench.inference_job", noting)
    result = run("inference", *QUICK)
    assert result.output.count("no energy") == 1
