"""The headline claims no more than the records show."""

from __future__ import annotations

import dataclasses
import json

import pytest

from twell._interval import DENSE_GAINS
from twell.measure.records import write_records
from twell.report import make_report

from .conftest import bench_records


def headline(tmp_path, records):
    write_records(tmp_path / "records.jsonl", records)
    return make_report([tmp_path / "records.jsonl"]).headline


def block(what, ratio, **shape):
    """A record of one block on a CPU."""
    [record, *_] = bench_records()
    return dataclasses.replace(
        record,
        what=what,
        baseline="dense eager",
        baseline_value=ratio,
        value=1.0,
        quantiles={},
        details={},
        shape={"M": 512, "D": 64, "H": 256, "dtype": "float32", **shape},
    )


def test_a_gain_counts_over_the_fastest_dense_contender(tmp_path):
    found = headline(tmp_path, bench_records())
    assert found.claim == "A forward pass of preset tiny (4 x 32 tokens): 1.50x as fast as best dense."
    notes = " ".join(found.notes)
    assert "96 neurons, 12 of them active per token of this batch" in notes
    assert "on random tokens" in notes
    facts = {fact.label: fact for fact in found.facts}
    assert facts["energy per token"].value == "−33.3%"  # noqa: RUF001 - a minus sign
    assert facts["peak memory"].good


@pytest.mark.parametrize(("neurons", "said"), [(96, False), (128, False), (512, True)])
def test_wide_blocks_are_said_to_be_wide(tmp_path, neurons, said):
    records = [dataclasses.replace(r, shape={**r.shape, "H": neurons}) for r in bench_records()]
    found = "Its blocks are wide: D 32, H 512, which is 16 x D." in " ".join(
        headline(tmp_path, records).notes
    )
    assert found is said


def test_comparisons_and_contenders_are_counted_apart(tmp_path):
    others = [dataclasses.replace(r, shape={**r.shape, "batch": 9}) for r in bench_records()]
    notes = headline(tmp_path, [*bench_records(), *others]).notes
    assert "Measured: 2 comparisons (6 contenders) on " in notes[-1]
    notes = headline(tmp_path, [*bench_records(), block("ffn_cpu/auto", 9.0)]).notes
    assert "Measured: 1 comparison (3 contenders) and 1 other record on " in notes[-1]
    assert "Measured: 1 record on " in headline(tmp_path, [block("ffn_cpu/auto", 9.0)]).notes[-1]


def test_what_lost_is_named_beside_what_won(tmp_path):
    lost = [
        dataclasses.replace(r, shape={**r.shape, "batch": 9}) for r in bench_records(**{"ours-eager": 1.6})
    ]
    found = headline(tmp_path, [*bench_records(), *lost])
    assert "1.50x" in found.claim
    assert "No sure gain: A forward pass of preset tiny (9 x 32 tokens), 0.94x as fast as" in " ".join(
        found.notes
    )
    assert "No sure gain" not in " ".join(headline(tmp_path, bench_records()).notes)


@pytest.mark.parametrize(("rounds", "claim"), [(3, "Nothing measured here is surely"), (4, "A forward")])
def test_few_rounds_prove_nothing(tmp_path, rounds, claim):
    few = [dataclasses.replace(r, rounds=[r.rounds[0][:rounds]]) for r in bench_records()]
    assert headline(tmp_path, few).claim.startswith(claim)


def test_rounds_of_all_processes_count(tmp_path):
    two = [dataclasses.replace(r, rounds=[r.rounds[0][:2], [], r.rounds[0][:3]]) for r in bench_records()]
    found = headline(tmp_path, two)
    assert found.claim.startswith("A forward")
    assert " The 5 rounds: " in " ".join(found.notes)


@pytest.mark.parametrize(("rounds", "claim"), [(1, "Nothing measured here is surely"), (2, "A forward")])
def test_older_records_only_say_how_many_rounds_there_were(tmp_path, rounds, claim):
    noted = [
        dataclasses.replace(r, rounds=[], details={**r.details, "rounds": rounds, "processes": 2})
        for r in bench_records()
    ]
    found = headline(tmp_path, noted)
    assert found.claim.startswith(claim)
    assert " 95% of resampled medians: 1.50x to 1.50x." in " ".join(found.notes)
    assert "95% interval" not in " ".join(found.notes)
    page = make_report([tmp_path / "records.jsonl"]).html()
    assert "In brackets: 95% of resampled medians, as earlier versions had them." in page
    assert "95% interval" not in page


def test_only_rounds_with_both_count(tmp_path):
    alone = [
        dataclasses.replace(r, rounds=[r.rounds[0][:1], [] if "dense" in r.what else r.rounds[0]])
        for r in bench_records()
    ]
    found = headline(tmp_path, alone)
    assert found.claim.startswith("Nothing measured here is surely")
    assert "One round only." in " ".join(found.notes)


def with_shares(records, share, **shape):
    """Records that say how many calls of ours ran sparse."""
    return [
        dataclasses.replace(r, shape={**r.shape, **shape}, details={**r.details, "sparse_share": share})
        if "ours" in r.what
        else dataclasses.replace(r, shape={**r.shape, **shape})
        for r in records
    ]


def test_a_gain_of_dense_calls_is_said_to_be_one(tmp_path):
    found = headline(tmp_path, with_shares(bench_records(), 0))
    assert found.claim == (
        "A forward pass of preset tiny (4 x 32 tokens): 1.50x as fast as best dense, "
        f"though no call ran sparse. {DENSE_GAINS}"
    )
    assert found.facts[0].good is None
    assert "no call ran sparse: the gain comes from how dense products are computed" in found.facts[0].note
    assert "No call of ours eager ran sparse." in make_report([tmp_path / "records.jsonl"]).html()


@pytest.mark.parametrize("share", [0.5, 1])
def test_sparse_calls_need_no_excuse(tmp_path, share):
    found = headline(tmp_path, with_shares(bench_records(), share))
    assert found.claim.endswith("1.50x as fast as best dense.")
    assert found.facts[0].good
    assert "no call ran sparse" not in found.facts[0].note


def test_a_smaller_gain_of_sparse_calls_comes_first(tmp_path):
    """Even before one of a trained model."""
    sparse = with_shares(bench_records(**{"ours-eager": 1.2}), 1)
    dense = with_shares(bench_records(), 0, model="runs/mine", text="text")
    found = headline(tmp_path, [*dense, *sparse])
    assert found.claim == "A forward pass of preset tiny (4 x 32 tokens): 1.25x as fast as best dense."
    assert " Without a sparse call: A forward pass of mine (4 x 32 tokens), 1.50x as fast" in " ".join(
        found.notes
    )


def test_dense_calls_that_gain_nothing_are_no_gain(tmp_path):
    found = headline(tmp_path, with_shares(bench_records(**{"ours-eager": 1.6}), 0))
    assert found.claim.startswith("Nothing measured here is surely faster than dense. ")
    assert "sparse" not in found.claim
    assert found.facts[0].good is False


def test_a_preset_and_a_run_of_its_name_are_told_apart(tmp_path):
    mine = [
        dataclasses.replace(r, shape={**r.shape, "model": "runs/tiny/", "text": "text"})
        for r in bench_records()
    ]
    write_records(tmp_path / "records.jsonl", [*bench_records(), *mine])
    report = make_report([tmp_path / "records.jsonl"])
    assert "A forward pass of tiny (4 x 32 tokens): 1.50x" in report.headline.claim
    titles = [section.title for section in report.sections if "Forward" in section.title]
    assert [title.partition(", ")[0] for title in titles] == [
        "Forward pass: preset tiny",
        "Forward pass: tiny",
    ]


def test_a_dense_contender_that_computes_something_else_is_no_baseline(tmp_path):
    def doubted(*names: str) -> list:
        return [
            dataclasses.replace(r, details={**r.details, "doubtful": 1}) if r.what.endswith(names) else r
            for r in bench_records()
        ]

    assert headline(tmp_path, doubted("best-dense")).claim.endswith("2.00x as fast as dense eager.")
    assert "as fast" not in headline(tmp_path, doubted("best-dense", "dense-eager")).claim


def test_a_comparison_with_fewer_dense_contenders_cannot_make_the_headline(tmp_path):
    full = bench_records()
    later = without_best_dense(bench_records())
    assert headline(tmp_path, later).claim.endswith("2.00x as fast as dense eager.")
    assert headline(tmp_path, [*full, *later]).claim.endswith("1.50x as fast as best dense.")


def without_best_dense(records):
    """A run of the same without that contender, and without what the others gain over it."""
    return [
        dataclasses.replace(
            r,
            date="2099-01-01T00:00:00+00:00",
            details={name: value for name, value in r.details.items() if "best-dense" not in name},
        )
        for r in records
        if "best-dense" not in r.what
    ]


@pytest.mark.parametrize(
    ("rounds", "doubtful", "claim"),
    [
        (6, False, "1.50x as fast as best dense."),
        (1, False, "2.00x as fast as dense eager."),  # interrupted
        (6, True, "2.00x as fast as dense eager."),
    ],
)
def test_what_says_less_cannot_weaken_a_comparison(tmp_path, rounds, doubtful, claim):
    fewer = without_best_dense(bench_records())
    more = [
        dataclasses.replace(
            r,
            rounds=[r.rounds[0][:rounds]],
            details=r.details | ({"doubtful": 1} if doubtful and "best-dense" in r.what else {}),
        )
        for r in bench_records()
    ]
    for records in ([*more, *fewer], [*fewer, *more]):
        assert headline(tmp_path, records).claim.endswith(claim)


def test_contenders_that_never_ran_side_by_side_gain_nothing(tmp_path):
    apart = [
        dataclasses.replace(
            r, details={name: value for name, value in r.details.items() if not name.startswith("over/")}
        )
        for r in bench_records()
    ]
    assert any(r.ratio for r in apart)
    found = headline(tmp_path, apart)
    assert found.claim == ""
    assert "as fast" not in " ".join(found.notes)
    assert "9.00x" in headline(tmp_path, [*apart, block("ffn_cpu/auto", 9.0)]).claim


def test_bounds_say_what_they_are(tmp_path):
    def notes(rounds=6, **details) -> str:
        some = [
            dataclasses.replace(r, rounds=[r.rounds[0][:rounds]], details={**r.details, **details})
            for r in bench_records()
        ]
        return " ".join(headline(tmp_path, some).notes)

    bounds = {"over/best-dense/low": 1.25, "over/best-dense/high": 1.75}
    assert "95% interval: 1.25x to 1.75x." in notes(**bounds)
    assert "The 5 rounds: 1.25x to 1.75x." in notes(rounds=5, **bounds)
    assert "One round only." in notes(rounds=1)


def test_what_computes_something_else_is_no_gain(tmp_path):
    wrong = [
        dataclasses.replace(r, details={**r.details, "doubtful": 1}) if "ours" in r.what else r
        for r in bench_records()
    ]
    assert "as fast" not in headline(tmp_path, wrong).claim


def test_no_gain_is_said_to_be_none(tmp_path):
    found = headline(tmp_path, bench_records(**{"ours-eager": 1.6}))
    assert found.claim.startswith("Nothing measured here is surely faster than dense.")
    assert "0.94x" in found.claim
    assert not found.facts[0].good


def test_whole_models_come_before_blocks(tmp_path):
    found = headline(tmp_path, [block("ffn_cpu/auto", 9.0), *bench_records()])
    assert "1.50x" in found.claim
    assert "9.00x" in headline(tmp_path, [block("ffn_cpu/auto", 9.0)]).claim


def test_trained_models_come_before_built_ones(tmp_path):
    def on_text(**seconds):
        return [
            dataclasses.replace(r, shape={**r.shape, "model": "mine", "text": "text"})
            for r in bench_records(**seconds)
        ]

    faster = headline(tmp_path, [*on_text(**{"ours-eager": 1.2}), *bench_records()])
    assert "of mine (4 x 32 tokens): 1.25x" in faster.claim
    assert "built to be" not in " ".join(faster.notes)
    slower = headline(tmp_path, [*on_text(**{"ours-eager": 1.6}), *bench_records()])
    assert "of preset tiny (4 x 32 tokens): 1.50x" in slower.claim
    assert "No sure gain: A forward pass of mine" in " ".join(slower.notes)


@pytest.mark.parametrize(
    ("what", "dtype"),
    [
        ("ffn_cpu/auto", "bfloat16"),  # mostly arithmetic, not sparsity
        ("ffn_inference/kernels/up", "float32"),  # part of a block
        ("mine/other", "float32"),
    ],
)
def test_what_does_not_compare_like_with_like_is_a_table_only(tmp_path, what, dtype):
    record = block(what, 9.0, dtype=dtype)
    found = headline(tmp_path, [record])
    assert not found.claim
    assert not found.facts
    write_records(tmp_path / "records.jsonl", [record])
    assert "9.00x" in make_report([tmp_path / "records.jsonl"]).html()


def test_runs_are_held_against_lambda_0(made):
    found = make_report([made / "none", made / "some"]).headline
    assert found.claim.startswith("With lambda ")
    assert "that of lambda 0" in found.claim or "With lambda 0," in found.claim


def test_the_profile_of_a_run_counts_blocks_alone(made):
    found = make_report([made / "profile"]).headline
    assert "2 feed-forward blocks" in found.claim
    assert "without attention" in " ".join(found.notes)


@pytest.mark.parametrize(("paths", "excused"), [(("dense", "dense"), True), (("dense", "row"), False)])
def test_the_profile_of_blocks_that_ran_dense_says_so(made, tmp_path, paths, excused):
    profile = json.loads((made / "profile" / "profile.json").read_text())
    for layer, path in zip(profile["layers"], paths, strict=True):
        layer["speed"] |= {"auto_path": path, "dense_ms": 2.0, "auto_ms": 1.0, "auto_speedup": 2.0}
        layer["speed"] |= {"auto_low": 1.9, "auto_high": 2.1}
    (tmp_path / "profile.json").write_text(json.dumps(profile))
    claim = make_report([tmp_path / "profile.json"]).headline.claim
    assert "2.00x as fast as dense PyTorch" in claim
    assert ("though no call ran sparse" in claim) == excused
