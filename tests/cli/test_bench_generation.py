"""How `twell bench` times generation: rounds, noise, and calls too short to time."""

from __future__ import annotations

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")
pytest.importorskip("transformers")
from transformers import GenerationMixin

import twell.hf
from twell.measure import read_records

from .small_bench import QUICK, run

pytestmark = pytest.mark.usefixtures("small_bench")


def generate_with_times(monkeypatch, out, *times: float, options: tuple[str, ...] = QUICK):
    """times: how long calls take, two of each contender in a round: 18 tokens, then 16."""
    from twell.measure import inference

    ends = [end for seconds in times for end in (0.0, seconds)]
    monkeypatch.setattr(inference, "perf_counter", lambda: ends.pop(0))
    sizes = ("--prompt-length", "4", "--new-tokens", "2", "--workload", "generation")
    result = run("inference", *sizes, *options, "--out", str(out))
    assert ends == []
    return result


def test_rounds_in_which_times_vary_by_more_than_tokens_take_do_not_count(tmp_path, monkeypatch):
    """A sample is a difference of two times, which noise can make negative."""
    good, noisy = (20.0, 18.0), (9.0, 9.0)
    # The order changes after a round that counts.
    times = *good, *noisy, *good, *good, *noisy, *good, *good, 22.0, 18.0
    result = generate_with_times(monkeypatch, tmp_path / "records.jsonl", *times)
    assert result.exit_code == 0
    dense, ours = read_records(tmp_path / "records.jsonl")
    assert (dense.rounds, ours.rounds) == ([[1.0, 2.0]], [[1.0, 1.0]])
    assert ours.details["noisy_rounds"] == 2
    assert "2 rounds were too noisy and not counted; raise --new-tokens" in result.output


def test_noise_that_ends_a_measurement_early_is_said(tmp_path, monkeypatch):
    good, noisy = (20.0, 18.0), (9.0, 9.0)
    times = *good, *good, *(noisy * 20)
    result = generate_with_times(monkeypatch, tmp_path / "records.jsonl", *times)
    assert "1 of 2 rounds count; in 10 others, times varied by more than what is measured" in " ".join(
        result.output.split()
    )
    assert "10 rounds were too noisy" in result.output
    assert [one.rounds for one in read_records(tmp_path / "records.jsonl")] == [[[1.0]], [[1.0]]]


def test_short_calls_are_made_before_they_are_timed(tmp_path, monkeypatch):
    """What they capture for themselves belongs to no round."""
    tokens, generate = [], GenerationMixin.generate

    def counted(self, *given, **options):
        tokens.append(options["max_new_tokens"])
        return generate(self, *given, **options)

    monkeypatch.setattr(GenerationMixin, "generate", counted)
    good = (20.0, 18.0)
    generate_with_times(monkeypatch, tmp_path / "records.jsonl", *(good * 4))
    assert tokens == [18] * 6 + [16, 16] + [18, 16] * 4


def test_generation_takes_as_many_rounds_as_are_asked_for_in_turn(tmp_path, monkeypatch):
    ran, generate = [], GenerationMixin.generate

    def noted(self, *given, **options):
        if options["max_new_tokens"] == 16:  # once in a round, and once before
            ran.append("ours" if isinstance(self, twell.hf.SparseLlamaForCausalLM) else "dense")
        return generate(self, *given, **options)

    monkeypatch.setattr(GenerationMixin, "generate", noted)
    out, good = tmp_path / "records.jsonl", (20.0, 18.0)
    options = ("--rounds", "7", *QUICK[2:])
    generate_with_times(monkeypatch, out, *(good * 14), options=options)
    assert [len(one.rounds[0]) for one in read_records(out)] == [7, 7]
    ahead, back = ["dense", "ours"], ["ours", "dense"]
    assert ran == ahead + ahead + back + back + ahead + ahead + back + back


def test_noise_alone_is_no_measurement(tmp_path, monkeypatch):
    result = generate_with_times(monkeypatch, tmp_path / "records.jsonl", *[9.0] * 40)
    assert "dense-eager: 10 rounds in a row took times that vary by more than" in result.output
    assert read_records(tmp_path / "records.jsonl") == []
