"""Measurements of the CPU: repeated until they agree, kept, shared by processes, held still for a run."""

from __future__ import annotations

import itertools
import json
import logging
import os
import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch

from twell import _log
from twell.kernels.cpu import measurements

pytestmark = pytest.mark.real_cpu


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("TWELL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(measurements, "_known", {})
    monkeypatch.setattr(measurements, "_doubted", set())
    monkeypatch.setattr(_log, "_logged", set())


class Tries:
    """A measurement that gives these numbers in turn, and counts."""

    def __init__(self, *numbers: float) -> None:
        self.numbers, self.taken = itertools.cycle(numbers), 0

    def __call__(self) -> float:
        self.taken += 1
        return next(self.numbers)


class TestAgreement:
    @pytest.mark.parametrize(
        ("numbers", "value", "taken"),
        [
            ((0.1, 0.11), 0.105, 2),
            ((0.0, 0.1, 0.1), 0.1, 3),  # one that was disturbed
            ((0.0, 0.0), 0.0, 2),
            ((0.25, 0.0, 0.12, 0.11), 0.115, 4),
            ((1.0, 0.5, 0.0), 0.5, 5),  # never two alike: the median
        ],
    )
    def test_tries_until_two_agree(self, numbers, value, taken):
        tries = Tries(*numbers)
        assert measurements.agreeing(tries) == pytest.approx(value)
        assert tries.taken == taken

    def test_the_least_times_of_a_loaded_machine(self):
        """Disturbances only add: the true times come out although most rounds are disturbed."""
        one, other = Tries(9, 5, 7, 1.0, 8, 6, 4, 3, 2.5, 9), Tries(3, 2.0, 8, 5)
        assert measurements.least_seconds(one, other) == [1.0, 2.0]
        assert one.taken == other.taken

    def test_an_idle_machine_takes_few_rounds(self):
        run = Tries(1.0)
        assert measurements.least_seconds(run) == [1.0]
        assert run.taken == 1 + measurements._QUIET_ROUNDS


class TestKeeping:
    def test_measured_once_per_machine(self):
        first, second = Tries(0.5), Tries(0.7)
        assert measurements.measured("a", first, otherwise=0.0) == 0.5
        assert measurements.measured("a", second, otherwise=0.0) == 0.5
        measurements._known.clear()  # a new process
        assert measurements.measured("a", second, otherwise=0.0) == 0.5
        assert second.taken == 0
        assert measurements.kept_measurements() == {"a": 0.5}

    def test_what_a_busy_machine_gives_is_not_kept(self, monkeypatch, caplog):
        monkeypatch.setattr(measurements, "is_busy", lambda: True)
        assert measurements.measured("a", Tries(0.0), otherwise=0.5) == 0.0
        assert "holds for this process only" in caplog.text
        assert measurements.kept_measurements() == {}
        measurements._known.clear()  # a new process, on an idle machine
        monkeypatch.setattr(measurements, "is_busy", lambda: False)
        assert measurements.measured("a", Tries(0.7), otherwise=0.0) == 0.7

    @pytest.mark.parametrize(
        ("busy", "tries", "value", "kept"),
        [
            (True, (0.0,), 0.05, False),  # noise makes limits small
            (True, (0.02,), 0.05, False),
            (True, (0.2,), 0.2, False),
            (False, (0.0, 0.3, 0.04, 0.02, 0.01), 0.05, False),  # never two alike: other programs, too
            (False, (0.9, 0.5, 0.3, 0.2, 0.1), 0.3, True),
            (False, (0.0,), 0.0, True),  # nothing disturbs: such a CPU exists
        ],
    )
    def test_noise_does_not_turn_sparsity_off(self, busy, tries, value, kept, monkeypatch, caplog):
        monkeypatch.setattr(measurements, "is_busy", lambda: busy)
        assert measurements.measured("a", Tries(*tries), otherwise=0.0, usual=0.05) == value
        assert measurements.kept_measurements() == ({"a": value} if kept else {})
        assert measurements.was_doubted() != kept
        assert ("while other programs were busy; using 0.05" in caplog.text) == (value == 0.05)

    def test_busy_is_more_than_there_are_cores(self, monkeypatch):
        monkeypatch.undo()
        monkeypatch.setattr(os, "cpu_count", lambda: 4)
        for load, busy in ((0.5, False), (4.9, False), (5.1, True)):
            monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
            assert measurements.is_busy() == busy

    def test_measuring_again_replaces(self):
        measurements.measured("a", Tries(0.5), otherwise=0.0)
        assert measurements.measure_again("a", Tries(0.7)) == 0.7
        assert measurements.measured("a", Tries(0.1), otherwise=0.0) == 0.7
        assert measurements.kept_measurements() == {"a": 0.7}

    @pytest.mark.parametrize("changed", ["torch", "twell", "cap", "cpu"])
    def test_another_machine_or_version_measures_for_itself(self, changed, monkeypatch):
        measurements.measured("a", Tries(0.5), otherwise=0.0)
        measurements._known.clear()
        if changed == "torch":
            monkeypatch.setattr(torch, "__version__", "0.0")
        elif changed == "twell":
            monkeypatch.setattr(measurements, "__version__", "0.0")
        elif changed == "cap":
            monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "SSE41")
        else:
            monkeypatch.setattr("twell._processor.cpu_name", lambda: "another")
        assert measurements.measured("a", Tries(0.7), otherwise=0.0) == 0.7

    @pytest.mark.parametrize("content", ["", "[]", "null", "{", '{"MACHINE": {"a": "x", "b": -1}}', "\xff"])
    def test_a_spoilt_file_is_measured_again(self, content):
        path = measurements.measurements_file()
        path.parent.mkdir(parents=True)
        path.write_bytes(content.replace("MACHINE", measurements._machine()).encode("latin-1"))
        assert measurements.measured("a", Tries(0.5), otherwise=0.0) == 0.5
        assert measurements.kept_measurements() == {"a": 0.5}

    def test_nothing_found_is_said(self, caplog):
        with caplog.at_level(logging.WARNING, logger="twell"):
            measurements.measured("row limit", Tries(0.0), otherwise=0.0)
            measurements.measured("row limit", Tries(0.0), otherwise=0.0)
        assert [r.message for r in caplog.records if "no use for sparsity" in r.message] != []
        assert len(caplog.records) == 1
        assert "twell tune --device cpu" in caplog.text

    def test_a_folder_that_cannot_be_written_to(self, monkeypatch, tmp_path, caplog):
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("TWELL_CACHE", str(tmp_path / "file" / "cache"))
        with caplog.at_level(logging.WARNING, logger="twell"):
            assert measurements.measured("a", Tries(0.5), otherwise=0.0) == 0.5
        assert "cannot be kept" in caplog.text

    def test_processes_take_turns_and_agree(self):
        """Three at once, each with another number to find: one measures, all go by it."""
        code = (
            "import sys, time\n"
            "from twell.kernels.cpu import measurements\n"
            "measurements.is_busy = lambda: False\n"
            "def measure():\n"
            "    time.sleep(0.3)\n"
            "    return float(sys.argv[1])\n"
            "print(measurements.measured('a', measure, otherwise=0.0))\n"
        )
        running = [
            subprocess.Popen([sys.executable, "-c", code, str(n)], stdout=subprocess.PIPE, text=True)
            for n in (1, 2, 3)
        ]
        answers = {process.communicate(timeout=120)[0] for process in running}
        assert len(answers) == 1
        assert all(process.returncode == 0 for process in running)

    def test_a_measurement_may_need_another(self, monkeypatch):
        """Without waiting for its own lock."""
        locked, states = measurements.locked, []

        @contextmanager
        def noted(path, *, wait):
            with locked(path, wait=0) as state:
                states.append(state)
                yield state

        monkeypatch.setattr(measurements, "locked", noted)
        inner = Tries(0.5)

        def outer() -> float:
            return 2 * measurements.measured("inner", inner, otherwise=0.0)

        assert measurements.measured("outer", outer, otherwise=0.0) == 1.0
        assert states == ["held"]
        assert measurements.kept_measurements() == {"inner": 0.5, "outer": 1.0}

    @pytest.mark.parametrize("content", ["[" * 100_000, '{"MACHINE": {"a": 1' + "0" * 400 + "}}"])
    def test_a_hostile_file_is_measured_again(self, content):
        path = measurements.measurements_file()
        path.parent.mkdir(parents=True)
        path.write_text(content.replace("MACHINE", measurements._machine()))
        assert measurements.measured("a", Tries(0.5), otherwise=0.0) == 0.5


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
class TestFork:
    """A forked process has none of the threads that products run on: it must not measure."""

    @staticmethod
    def in_child(run) -> float:
        """What `run` returns in a fork."""
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            try:
                os.write(writing, str(run()).encode())
            finally:
                os._exit(0)
        os.close(writing)
        os.waitpid(child, 0)
        with os.fdopen(reading) as answer:
            return float(answer.read())

    def test_it_takes_what_is_kept(self):
        measurements.measured("kept", Tries(0.5), otherwise=0.0)
        measurements._known.clear()
        assert self.in_child(lambda: measurements.measured("kept", Tries(9.0), otherwise=0.25)) == 0.5

    def test_else_the_cautious_answer(self):
        assert self.in_child(lambda: measurements.measured("new", Tries(9.0), otherwise=0.25)) == 0.25
        assert measurements.kept_measurements() == {}

    def test_even_if_a_thread_was_measuring(self):
        with measurements._lock:
            assert self.in_child(lambda: measurements.measured("new", Tries(9.0), otherwise=0.25)) == 0.25


class TestRuns:
    @pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
    def test_a_fork_does_not_write_the_runs_file(self, tmp_path):
        path = tmp_path / "choices.json"
        measurements.measured("kept", Tries(0.5), otherwise=0.0)
        with measurements.choices_kept_in(path):
            measurements.measured("a", Tries(0.6), otherwise=0.0)
            before = path.read_text()
            TestFork.in_child(lambda: measurements.measured("kept", Tries(9.0), otherwise=0.0))
            assert path.read_text() == before

    def test_a_run_keeps_its_choices(self, tmp_path):
        path = tmp_path / "choices.json"
        measurements.measured("a", Tries(0.5), otherwise=0.0)
        with measurements.choices_kept_in(path):
            assert measurements.measured("a", Tries(9.0), otherwise=0.0) == 0.5
            assert measurements.measured("b", Tries(0.6), otherwise=0.0) == 0.6
        measurements.measure_again("a", Tries(0.9))  # the machine is measured again between two runs
        measurements.measure_again("b", Tries(0.9))
        with measurements.choices_kept_in(path):
            assert measurements.measured("a", Tries(9.0), otherwise=0.0) == 0.5
            assert measurements.measured("b", Tries(9.0), otherwise=0.0) == 0.6
        assert measurements.measured("a", Tries(9.0), otherwise=0.0) == 0.9
        assert json.loads(path.read_text()) == {measurements._machine(): {"a": 0.5, "b": 0.6}}

    def test_another_process_of_the_run_reads_only(self, tmp_path):
        path = tmp_path / "choices.json"
        with measurements.choices_kept_in(path):
            measurements.measured("a", Tries(0.5), otherwise=0.0)
        before = path.read_text()
        with measurements.choices_kept_in(path, write=False):
            assert measurements.measured("a", Tries(9.0), otherwise=0.0) == 0.5
            measurements.measured("b", Tries(0.6), otherwise=0.0)
        assert path.read_text() == before

    def test_choices_of_another_machine_stay_and_are_not_used(self, tmp_path):
        path = tmp_path / "choices.json"
        path.write_text(json.dumps({"elsewhere": {"a": 0.1}}))
        with measurements.choices_kept_in(path):
            assert measurements.measured("a", Tries(0.5), otherwise=0.0) == 0.5
        assert json.loads(path.read_text())["elsewhere"] == {"a": 0.1}
