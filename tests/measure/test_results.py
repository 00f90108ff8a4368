"""Results of several processes: merged, with intervals, as records."""

from __future__ import annotations

import dataclasses
import json
import os

import numpy as np
import pytest
import torch

from twell._errors import OtherProcessError, ran_out_of_memory
from twell._interval import paired_gain
from twell.measure import Record, read_records, write_records
from twell.measure.contest import largest_that_fits
from twell.measure.processes import run_apart
from twell.measure.records import source
from twell.measure.results import Measured, merge, records_of

SHAPE = {"model": "tiny", "layers": 2, "batch": 2, "sequence": 8}


def measured(contender: str, *seconds: float, **more) -> Measured:
    return Measured(
        workload="forward",
        contender=contender,
        meaning=f"{contender} in words",
        shape=SHAPE,
        tokens=16,
        seconds=seconds,
        **more,
    )


def test_gains_pair_the_rounds():
    """Both slow down by the same factor from round to round: the ratio does not."""
    gain = paired_gain([[1.0, 2.0, 4.0]], [[0.5, 1.0, 2.0]])
    assert (gain.low, gain.middle, gain.high) == pytest.approx((2, 2, 2))


def test_intervals_show_how_processes_differ():
    same = paired_gain([[1.0] * 4] * 2, [[0.5] * 4] * 2)
    apart = paired_gain([[1.0] * 4] * 2, [[0.5] * 4, [0.4] * 4])
    assert same.high - same.low == pytest.approx(0)
    assert (apart.low, apart.high) == pytest.approx((2.0, 2.5))
    assert str(same) == "2.00x"


def test_few_rounds_are_bounded_by_all_of_them():
    few = paired_gain([[1.0, 1.1, 1.2, 1.3]], [[1.0] * 4])
    assert (few.low, few.high) == (1.0, 1.3)


@pytest.mark.parametrize("rounds", [6, 8, 9, 12, 20, 40])
def test_intervals_hold_the_truth_as_often_as_they_say(rounds):
    """With skewed noise, too: others on the machine only slow things down."""
    generator = np.random.default_rng(7)
    for drawn in (generator.normal(0, 0.02, (2000, rounds)), generator.exponential(0.02, (2000, rounds))):
        times = np.exp(drawn)
        truth = np.exp(0.02 * np.log(2)) if drawn.min() >= 0 else 1.0
        found = [paired_gain([some.tolist()], [[1.0] * rounds]) for some in times]
        share = np.mean([gain.low <= truth <= gain.high for gain in found])
        assert 0.94 <= share <= 0.995


def test_intervals_of_processes_that_differ_are_wider():
    """Processes that differ as much as rounds do; a resampled median held the truth in 80 to 91%."""
    generator = np.random.default_rng(7)
    own = generator.normal(0, 0.02, (1000, 2, 1))
    times = np.exp(own + generator.normal(0, 0.02, (1000, 2, 8)))
    found = [paired_gain(some.tolist(), [[1.0] * 8] * 2) for some in times]
    assert np.mean([gain.low <= 1 <= gain.high for gain in found]) >= 0.94
    pooled = [paired_gain([some.ravel().tolist()], [[1.0] * 16]) for some in times]
    assert all(one.low <= two.low and one.high >= two.high for one, two in zip(found, pooled, strict=True))


def test_outliers_do_not_widen_intervals_of_many_rounds():
    gain = paired_gain([[1.0] * 8 + [9.0]], [[1.0] * 9])
    assert (gain.low, gain.middle, gain.high) == (1.0, 1.0, 1.0)


def test_one_round_has_no_interval():
    assert str(paired_gain([[3.0]], [[2.0]])) == "1.50x"


def test_processes_merge():
    dense, ours, compiled = merge(
        [
            measured("dense-eager", 1.0, 1.2, joules=(8.0,), details={"peak_bytes": 100}),
            measured("ours-eager", 0.5, 0.6, joules=(4.0,), error=1e-3, details={"peak_bytes": 90}),
            measured("dense-compiled", 0.8, 0.96),
            measured("dense-eager", 1.4, 1.6, process=1, joules=(9.0,), details={"peak_bytes": 120}),
            measured(
                "ours-eager", 0.7, 0.8, process=1, joules=(6.0,), error=2e-3, details={"peak_bytes": 80}
            ),
        ]
    )
    assert dense.gains.keys() == {"dense-compiled"}
    assert dense.tokens_per_ms == pytest.approx(16 / 1300)
    assert dense.detail("peak_bytes") == 120
    assert ours.gain.middle == pytest.approx(2)
    assert ours.gains["dense-compiled"].middle == pytest.approx(1.6)
    assert ours.joules == 5
    assert ours.millijoules_per_token == pytest.approx(5e3 / 16)
    assert ours.error == 2e-3
    assert compiled.gain.middle == pytest.approx(1.25)


def test_processes_that_lack_a_contender_are_not_paired_with_others():
    ours, _ = merge(
        [
            measured("ours-eager", 1.0, 1.0),
            measured("ours-eager", 2.0, 2.0, process=1),
            measured("best-dense", 3.6, 3.6, process=1),
        ]
    )
    assert ours.gains["best-dense"].middle == pytest.approx(1.8)


def test_records_have_a_place_for_every_process():
    found = [measured("ours-eager", 1.0), measured("dense-eager", 3.0, process=1)]
    ours, dense = records_of("bench_inference", found, source=source("cpu", None), seed=0)
    assert (ours.rounds, dense.rounds) == ([[1.0], []], [[], [3.0]])


def test_records_hold_everything():
    found = [
        measured("dense-eager", 1.0, 1.2, power={"sm_clock_mhz": 1800, "power_w": 650.5}),
        measured("ours-eager", 0.5, 0.6, joules=(4.0,), error=1e-3, sparsity={"nnz": 24.0}),
        measured("best-dense", failure="out of memory: 3 x 8 tokens would fit"),
    ]
    dense, ours = records_of(
        "bench_inference", found, source=source("cpu", None) | {"commit": "abc1234"}, seed=7
    )
    assert ours.what == "bench_inference/forward/ours-eager"
    assert ours.baseline == "dense-eager"
    assert ours.ratio == pytest.approx(2)
    assert ours.details["over/dense-eager"] == pytest.approx(2)
    assert ours.details["millijoules_per_token"] == pytest.approx(250)
    assert (ours.error, ours.seed, ours.commit) == (1e-3, 7, "abc1234")
    assert ours.shape["meaning"] == "ours-eager in words"
    assert dense.baseline is None
    assert dense.hardware["sm_clock_mhz"] == 1800
    assert dense.hardware["cpu"]
    assert ours.rounds == [[0.5, 0.6]]
    assert Record.from_json(ours.to_json()) == ours


def test_intervals_can_be_computed_from_records():
    found = [
        measured(contender, *(base + round_ / 100 for round_ in range(6)), process=process)
        for process in range(2)
        for contender, base in (("dense-eager", 1.0), ("ours-eager", 0.6))
    ]
    dense, ours = records_of("bench_inference", found, source=source("cpu", None), seed=0)
    gain = paired_gain(dense.rounds, ours.rounds)
    kept = [ours.details[f"over/dense-eager{end}"] for end in ("/low", "", "/high")]
    assert kept == [gain.low, gain.middle, gain.high]


def test_samples_have_to_be_numbers():
    (record,) = records_of(
        "bench_inference", [measured("dense-eager", 1.0)], source=source("cpu", None), seed=0
    )
    with pytest.raises(ValueError, match=r"^rounds\[0\]: got -1.0"):
        dataclasses.replace(record, rounds=[[1.0, -1.0]])


def test_numbers_of_sequences_are_records_too():
    found = [
        measured(one, details={"sequences": count}) for one, count in (("dense-eager", 4), ("ours-eager", 6))
    ]
    _, ours = records_of("bench_training", found, source=source("cpu", None), seed=0)
    assert (ours.value, ours.unit, ours.baseline_value) == (6, "sequences", 4)
    assert ours.rounds == []


def test_without_dense_the_first_is_the_baseline():
    ours, compiled = merge([measured("ours-eager", 1.0), measured("ours-compiled", 0.5)])
    assert ours.gain is None
    assert compiled.gain.middle == pytest.approx(2)


def test_early_records_have_neither_details_nor_rounds(tmp_path):
    (record,) = records_of(
        "bench_inference", [measured("dense-eager", 1.0)], source=source("cpu", None), seed=0
    )
    path = tmp_path / "old.jsonl"
    entries = json.loads(record.to_json())
    assert entries.pop("details")
    assert entries.pop("rounds") == [[1.0]]
    path.write_text(json.dumps(entries) + "\n")
    (old,) = read_records(path)
    assert (old.details, old.rounds) == ({}, [])
    write_records(path, [old])
    assert read_records(path) == [old]


@pytest.mark.parametrize("limit", [0, 1, 2, 5, 8, 13, 64])
@pytest.mark.parametrize("guess", [1, 4, 8])
def test_the_largest_that_fits(limit, guess):
    tried = []

    def fits(count: int) -> bool:
        tried.append(count)
        return count <= limit

    assert largest_that_fits(fits, guess, most=64) == min(limit, 64)
    assert len(tried) == len(set(tried)) <= 12


def test_contenders_that_never_ran_side_by_side_are_not_compared():
    """One failed in the first process, the other in the second."""
    dense, ours = measured("dense-eager", 1.0), measured("ours-eager", 1.0)
    failed = {"seconds": (), "failure": "out of memory"}
    merged = merge(
        [dense.plus(**failed), ours, dense.plus(process=1), ours.plus(process=1, **failed)],
    )
    assert [one.gains for one in merged] == [{}, {}]
    found = [one for both in merged for one in both.processes]
    records = records_of("bench_inference", found, source=source("cpu", None), seed=0)
    assert [(one.baseline, one.baseline_value) for one in records] == [(None, None)] * 2


def test_the_state_of_the_gpu_is_that_of_all_processes():
    processes = [
        measured("dense-eager", 1.0).plus(
            power={"sm_clock_mhz": clock, "temperature_c": warm, "energy_from": "NVML"}
        )
        for clock, warm in ((1700, 50), (1801, 61))
    ]
    (record,) = records_of("bench_inference", processes, source=source("cpu", None), seed=0)
    found = {name: record.hardware[name] for name in ("sm_clock_mhz", "temperature_c", "energy_from")}
    assert found == {"sm_clock_mhz": 1750, "temperature_c": 61, "energy_from": "NVML"}


def test_clocks_are_rounded_and_known_where_one_process_knows_them():
    processes = [
        measured("dense-eager", 1.0, power={"sm_clock_mhz": None, "power_limit_w": None}),
        measured("dense-eager", 1.0, process=1, power={"sm_clock_mhz": 1750, "power_limit_w": None}),
        measured("dense-eager", 1.0, process=2, power={"sm_clock_mhz": 1753, "power_limit_w": None}),
        measured("dense-eager", 1.0, process=3, power={"sm_clock_mhz": 1752, "power_limit_w": None}),
    ]
    (merged,) = merge(processes)
    assert merged.power == {"sm_clock_mhz": 1752, "power_limit_w": None}
    assert isinstance(merged.power["sm_clock_mhz"], int)


def test_every_method_of_energy_is_named_once():
    methods = ("counter", "counter and samples", "counter")
    (merged,) = merge(
        measured("dense-eager", 1.0, process=n, power={"energy_from": one, "energy_temperature_c": 50 + n})
        for n, one in enumerate(methods)
    )
    assert merged.power == {"energy_from": "counter and samples", "energy_temperature_c": 52}


def test_the_largest_micro_batch_fits_in_every_process():
    found = [
        measured(one, process=process, details={"sequences": count})
        for process, counts in enumerate(({"dense-eager": 40, "ours-eager": 57}, {"ours-eager": 54}))
        for one, count in counts.items()
    ]
    dense, ours = records_of("bench_training", found, source=source("cpu", None), seed=0)
    assert (dense.value, ours.value, ours.baseline_value) == (40, 54, 40)


def test_what_could_not_be_widened_in_one_process_counts():
    (merged,) = merge(measured("a", 1.0, process=n, details={"against_float32": 1 - n}) for n in range(2))
    assert merged.detail("against_float32") == 0


def test_ways_keep_their_names_and_the_winner_of_every_process_is_noted():
    def way(name: str, process: int, **seconds: float) -> Measured:
        details = {f"way_seconds/{one}": value for one, value in seconds.items()}
        return measured("best-dense", 1.0, process=process, details=details).plus(meaning=f"{name} in words")

    differ = [way("merged", 0, autotuned=3.0, merged=2.0), way("autotuned", 1, autotuned=1.0)]
    (record,) = records_of("bench_inference", differ, source=source("cpu", None), seed=0)
    assert record.shape["meaning"] == "process 1: merged in words; process 2: autotuned in words"
    assert (record.details["way_seconds/autotuned"], record.details["way_seconds/merged"]) == (2.0, 2.0)
    (record,) = records_of("bench_inference", differ[:1], source=source("cpu", None), seed=0)
    assert record.shape["meaning"] == "merged in words"
    failed = measured("best-dense", failure="out of memory")
    (record,) = records_of("bench_inference", [failed, differ[1]], source=source("cpu", None), seed=0)
    assert record.shape["meaning"] == "autotuned in words"


def test_contenders_that_ran_in_different_processes_have_one_sparsity():
    """Or a report could not tell that they were compared."""
    dense = [measured("dense-eager", 1.0, process=n, sparsity={"nnz": 24.0 + n}) for n in range(2)]
    failed = measured("ours-eager", failure="out of memory", sparsity={"nnz": 24.0})
    ours = [failed, measured("ours-eager", 0.5, process=1, sparsity={"nnz": 25.0})]
    records = records_of("bench_inference", [*dense, *ours], source=source("cpu", None), seed=0)
    assert [record.sparsity for record in records] == [{"nnz": 24.5}] * 2


def test_what_is_counted_is_added_up_over_processes():
    some = [measured("dense-eager", 1.0, process=n, details={"noisy_rounds": n + 1}) for n in range(2)]
    (merged,) = merge(some)
    assert merged.detail("noisy_rounds") == 3


def test_a_contender_that_failed_in_the_first_process_has_what_the_others_measured():
    dense = [measured("dense-eager", *[1.0] * 9, process=process) for process in range(2)]
    state = {"idle_power_w": 80.0}
    ours = [
        measured("ours-eager", failure="out of memory", power=state),
        measured(
            "ours-eager",
            *[0.5] * 9,
            process=1,
            joules=(3.0,),
            power={**state, "sm_clock_mhz": 1900, "energy_from": "NVML"},
        ),
    ]
    _, record = records_of("bench_inference", [*dense, *ours], source=source("cpu", None), seed=0)
    assert (record.details["processes"], record.details["rounds"]) == (1, 9)
    assert record.details["over/dense-eager"] == 2.0
    assert [len(rounds) for rounds in record.rounds] == [0, 9]
    assert record.hardware["sm_clock_mhz"] == 1900
    assert record.hardware["energy_from"] == "NVML"


def good(options, emit, say) -> None:
    say("working")
    emit(measured("dense-eager", float(options)))


def refuses(options, emit, say) -> None:
    emit(measured("dense-eager", 1.0))
    raise ValueError("batch: got 9; accepted: 8")


def runs_out_of_memory(options, emit, say) -> None:
    emit(measured("dense-eager", 1.0))
    raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")


def fails_and_speaks_of_memory(options, emit, say) -> None:
    emit(measured("dense-eager", 1.0))
    raise KeyError("a weight, after the cache ran out of memory")


def dies(options, emit, say) -> None:
    emit(measured("dense-eager", 1.0))
    os._exit(9)


def test_a_process_of_its_own():
    found, said = [], []
    run_apart(good, 3, found.append, said.append)
    assert [m.seconds for m in found] == [(3.0,)]
    assert said == ["working"]


@pytest.mark.parametrize(
    ("job", "kind", "message"),
    [
        (refuses, ValueError, "batch: got 9; accepted: 8"),
        (runs_out_of_memory, torch.OutOfMemoryError, "ALLOC_FAILED"),
        (fails_and_speaks_of_memory, OtherProcessError, "KeyError: 'a weight"),
        (dies, RuntimeError, "exit code 9; what it had measured is kept"),
    ],
)
def test_what_a_process_measured_before_its_end_is_kept(job, kind, message):
    found = []
    with pytest.raises(kind, match=message):
        run_apart(job, None, found.append, lambda text: None)
    assert len(found) == 1


def test_the_words_of_another_process_say_nothing_about_memory():
    assert not ran_out_of_memory(OtherProcessError("... CUDA out of memory ..."))
    assert ran_out_of_memory(RuntimeError("... CUDA out of memory ..."))
