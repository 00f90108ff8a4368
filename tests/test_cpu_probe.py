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

from twell import _log, policy
from twell.crossover import cpu as crossover
from twell.kernels import cpu_multiply, cpu_probe
from twell.kernels.cpu_weights import CpuSite, WeightViews

pytestmark = pytest.mark.real_cpu

SITE = CpuSite(
    tokens=64,
    hidden=128,
    neurons=512,
    dtype=torch.float64,
    gated=True,
    neuron_major_down=True,
    threads=1,
)


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("TWELL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cpu_probe, "_known", {})
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
        assert cpu_probe.agreeing(tries) == pytest.approx(value)
        assert tries.taken == taken

    def test_the_least_times_of_a_loaded_machine(self):
        """Disturbances only add: the true times come out although most rounds are disturbed."""
        one, other = Tries(9, 5, 7, 1.0, 8, 6, 4, 3, 2.5, 9), Tries(3, 2.0, 8, 5)
        assert cpu_probe.least_seconds(one, other) == [1.0, 2.0]
        assert one.taken == other.taken

    def test_an_idle_machine_takes_few_rounds(self):
        run = Tries(1.0)
        assert cpu_probe.least_seconds(run) == [1.0]
        assert run.taken == 1 + cpu_probe._QUIET_ROUNDS


class TestKeeping:
    def test_measured_once_per_machine(self):
        first, second = Tries(0.5), Tries(0.7)
        assert cpu_probe.measured("a", first, otherwise=0.0) == 0.5
        assert cpu_probe.measured("a", second, otherwise=0.0) == 0.5
        cpu_probe.forget()  # a new process
        assert cpu_probe.measured("a", second, otherwise=0.0) == 0.5
        assert second.taken == 0
        assert cpu_probe.kept_measurements() == {"a": 0.5}

    def test_measuring_again_replaces(self):
        cpu_probe.measured("a", Tries(0.5), otherwise=0.0)
        assert cpu_probe.measure_again("a", Tries(0.7)) == 0.7
        assert cpu_probe.measured("a", Tries(0.1), otherwise=0.0) == 0.7
        assert cpu_probe.kept_measurements() == {"a": 0.7}

    @pytest.mark.parametrize("changed", ["torch", "twell", "cap", "cpu"])
    def test_another_machine_or_version_measures_for_itself(self, changed, monkeypatch):
        cpu_probe.measured("a", Tries(0.5), otherwise=0.0)
        cpu_probe.forget()
        if changed == "torch":
            monkeypatch.setattr(torch, "__version__", "0.0")
        elif changed == "twell":
            monkeypatch.setattr(cpu_probe, "__version__", "0.0")
        elif changed == "cap":
            monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "SSE41")
        else:
            monkeypatch.setattr("twell._processor.cpu_name", lambda: "another")
        assert cpu_probe.measured("a", Tries(0.7), otherwise=0.0) == 0.7

    @pytest.mark.parametrize("content", ["", "[]", "null", "{", '{"MACHINE": {"a": "x", "b": -1}}', "\xff"])
    def test_a_spoilt_file_is_measured_again(self, content):
        path = cpu_probe.measurements_file()
        path.parent.mkdir(parents=True)
        path.write_bytes(content.replace("MACHINE", cpu_probe._machine()).encode("latin-1"))
        assert cpu_probe.measured("a", Tries(0.5), otherwise=0.0) == 0.5
        assert cpu_probe.kept_measurements() == {"a": 0.5}

    def test_nothing_found_is_said(self, caplog):
        with caplog.at_level(logging.WARNING, logger="twell"):
            cpu_probe.measured("row limit", Tries(0.0), otherwise=0.0)
            cpu_probe.measured("row limit", Tries(0.0), otherwise=0.0)
        assert [r.message for r in caplog.records if "no use for sparsity" in r.message] != []
        assert len(caplog.records) == 1
        assert "twell tune --device cpu" in caplog.text

    def test_a_folder_that_cannot_be_written_to(self, monkeypatch, tmp_path, caplog):
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("TWELL_CACHE", str(tmp_path / "file" / "cache"))
        with caplog.at_level(logging.WARNING, logger="twell"):
            assert cpu_probe.measured("a", Tries(0.5), otherwise=0.0) == 0.5
        assert "cannot be kept" in caplog.text

    def test_processes_take_turns_and_agree(self):
        """Three at once, each with another number to find: one measures, all go by it."""
        code = (
            "import sys, time\n"
            "from twell.kernels import cpu_probe\n"
            "def measure():\n"
            "    time.sleep(0.3)\n"
            "    return float(sys.argv[1])\n"
            "print(cpu_probe.measured('a', measure, otherwise=0.0))\n"
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
        locked, states = cpu_probe.locked, []

        @contextmanager
        def noted(path, *, wait):
            with locked(path, wait=0) as state:
                states.append(state)
                yield state

        monkeypatch.setattr(cpu_probe, "locked", noted)
        inner = Tries(0.5)

        def outer() -> float:
            return 2 * cpu_probe.measured("inner", inner, otherwise=0.0)

        assert cpu_probe.measured("outer", outer, otherwise=0.0) == 1.0
        assert states == ["held"]
        assert cpu_probe.kept_measurements() == {"inner": 0.5, "outer": 1.0}

    @pytest.mark.parametrize("content", ["[" * 100_000, '{"MACHINE": {"a": 1' + "0" * 400 + "}}"])
    def test_a_hostile_file_is_measured_again(self, content):
        path = cpu_probe.measurements_file()
        path.parent.mkdir(parents=True)
        path.write_text(content.replace("MACHINE", cpu_probe._machine()))
        assert cpu_probe.measured("a", Tries(0.5), otherwise=0.0) == 0.5


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
        cpu_probe.measured("kept", Tries(0.5), otherwise=0.0)
        cpu_probe.forget()
        assert self.in_child(lambda: cpu_probe.measured("kept", Tries(9.0), otherwise=0.25)) == 0.5

    def test_else_the_cautious_answer(self):
        assert self.in_child(lambda: cpu_probe.measured("new", Tries(9.0), otherwise=0.25)) == 0.25
        assert cpu_probe.kept_measurements() == {}

    def test_even_if_a_thread_was_measuring(self):
        with cpu_probe._lock:
            assert self.in_child(lambda: cpu_probe.measured("new", Tries(9.0), otherwise=0.25)) == 0.25


class TestRuns:
    @pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
    def test_a_fork_does_not_write_the_runs_file(self, tmp_path):
        path = tmp_path / "choices.json"
        cpu_probe.measured("kept", Tries(0.5), otherwise=0.0)
        with cpu_probe.choices_kept_in(path):
            cpu_probe.measured("a", Tries(0.6), otherwise=0.0)
            before = path.read_text()
            TestFork.in_child(lambda: cpu_probe.measured("kept", Tries(9.0), otherwise=0.0))
            assert path.read_text() == before

    def test_a_run_keeps_its_choices(self, tmp_path):
        path = tmp_path / "choices.json"
        cpu_probe.measured("a", Tries(0.5), otherwise=0.0)
        with cpu_probe.choices_kept_in(path):
            assert cpu_probe.measured("a", Tries(9.0), otherwise=0.0) == 0.5
            assert cpu_probe.measured("b", Tries(0.6), otherwise=0.0) == 0.6
        cpu_probe.measure_again("a", Tries(0.9))  # the machine is measured again between two runs
        cpu_probe.measure_again("b", Tries(0.9))
        with cpu_probe.choices_kept_in(path):
            assert cpu_probe.measured("a", Tries(9.0), otherwise=0.0) == 0.5
            assert cpu_probe.measured("b", Tries(9.0), otherwise=0.0) == 0.6
        assert cpu_probe.measured("a", Tries(9.0), otherwise=0.0) == 0.9
        assert json.loads(path.read_text()) == {cpu_probe._machine(): {"a": 0.5, "b": 0.6}}

    def test_another_process_of_the_run_reads_only(self, tmp_path):
        path = tmp_path / "choices.json"
        with cpu_probe.choices_kept_in(path):
            cpu_probe.measured("a", Tries(0.5), otherwise=0.0)
        before = path.read_text()
        with cpu_probe.choices_kept_in(path, write=False):
            assert cpu_probe.measured("a", Tries(9.0), otherwise=0.0) == 0.5
            cpu_probe.measured("b", Tries(0.6), otherwise=0.0)
        assert path.read_text() == before

    def test_choices_of_another_machine_stay_and_are_not_used(self, tmp_path):
        path = tmp_path / "choices.json"
        path.write_text(json.dumps({"elsewhere": {"a": 0.1}}))
        with cpu_probe.choices_kept_in(path):
            assert cpu_probe.measured("a", Tries(0.5), otherwise=0.0) == 0.5
        assert json.loads(path.read_text())["elsewhere"] == {"a": 0.1}


class TestLimits:
    """The probes run the real paths on this machine and give numbers that make sense."""

    @pytest.mark.parametrize("tokens", [1, 64])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("neuron_major", [True, False])
    def test_real_limits(self, tokens, dtype, neuron_major):
        site = SITE._replace(tokens=tokens, dtype=dtype, neuron_major_down=neuron_major)
        limit = crossover.row_limit(site)
        assert 0 <= limit <= 0.25
        assert crossover.row_limit(site) == limit
        assert isinstance(crossover.block_pays(site), bool)
        assert all(value >= 0 for value in cpu_probe.kept_measurements().values())

    @pytest.mark.parametrize(
        ("dense", "at_low", "at_high", "limit"),
        [
            (1.0, 2.0, 3.0, 0.0),  # never pays
            (1.0, 0.14, 0.5, 0.2),  # 0.9 = 0.1 + 4 d
            (1.0, 0.1, 0.1, 0.25),  # always: as far as was probed, and no further
            (1.0, 0.9, 1.8, 0.01),
        ],
    )
    def test_the_limit_lies_where_row_and_dense_meet(self, dense, at_low, at_high, limit):
        assert crossover.row_and_dense_meet(dense, at_low, at_high) == pytest.approx(limit)

    @pytest.mark.parametrize("tokens", [1, 64])
    @pytest.mark.parametrize("neuron_major", [True, False])
    def test_what_is_timed_computes_the_block(self, tokens, neuron_major):
        site = SITE._replace(tokens=tokens, neuron_major_down=neuron_major)
        args, *_ = crossover._probe_layers(site)
        activated = crossover._activations(site, 0.1)
        assert activated.bool().float().mean().item() == pytest.approx(0.1, abs=0.05)
        exact = (activated * (args.x @ args.up.mT)) @ args.down.mT
        for finish in (crossover._row_finish, crossover._block_finish, crossover._dense_finish):
            y = finish(WeightViews(args, tuned=False), activated.clone())
            torch.testing.assert_close(y, exact)

    def test_gains_are_dense_time_over_the_other_path(self, monkeypatch):
        monkeypatch.setattr(crossover, "_seconds", lambda layers, *finishes: [3.0, 1.5])
        assert crossover._measure_block_gain(SITE) == 2.0

    @pytest.mark.parametrize(
        ("changes", "pays"),
        [
            ({}, False),
            ({"gated": True}, True),
            ({"gated": True, "threads": 2}, False),
            ({"dtype": torch.float64}, True),
            ({"tokens": 5}, False),
            ({"tokens": 6}, True),
            ({"tokens": 6, "threads": 2}, False),
        ],
    )
    def test_there_must_be_enough_to_save(self, changes, pays, monkeypatch):
        """One token reads 4,000 bytes in 0.4 ms and multiplies in 0.2 ms."""
        monkeypatch.setattr(policy.cpu, "_READ_BYTES_PER_CORE", 1e7)
        monkeypatch.setattr(policy.cpu, "_FLOPS_PER_CORE", 1e7)
        monkeypatch.setattr(policy.cpu, "_WORTH_LOOKING_SECONDS", 0.7e-3)
        monkeypatch.setattr(policy.cpu, "_MANY_WORTH_LOOKING_SECONDS", 1.1e-3)
        small = SITE._replace(tokens=1, hidden=20, neurons=50, dtype=torch.float32, gated=False)
        assert policy.cpu.sparse_can_pay(small._replace(**changes)) == pays

    def test_tuning_measures_again_and_keeps(self, monkeypatch):
        monkeypatch.setattr(crossover, "_measure_row_limit", lambda site: 0.2)
        monkeypatch.setattr(crossover, "_measure_block_gain", lambda site: 3.0)
        assert crossover.remeasure(SITE) == (0.2, True)
        monkeypatch.setattr(crossover, "_measure_row_limit", lambda site: 0.1)
        monkeypatch.setattr(crossover, "_measure_block_gain", lambda site: 1.0)
        assert crossover.row_limit(SITE) == 0.2
        assert crossover.remeasure(SITE) == (0.1, False)
        assert crossover.row_limit(SITE) == 0.1
        assert not crossover.block_pays(SITE)

    @pytest.mark.parametrize(
        ("sizes", "probed"),
        [
            ((1, 100, 90), (1, 128, 256)),
            ((300, 3000, 14336), (256, 2048, 4096)),
            ((63, 511, 512), (16, 256, 512)),
        ],
    )
    def test_a_size_near_the_block_is_probed(self, sizes, probed):
        tokens, hidden, neurons = sizes
        site = crossover._probe_site(SITE._replace(tokens=tokens, hidden=hidden, neurons=neurons))
        assert (site.tokens, site.hidden, site.neurons) == probed
        assert site._replace(tokens=tokens, hidden=hidden, neurons=neurons) == SITE._replace(
            tokens=tokens, hidden=hidden, neurons=neurons
        )

    def test_names_tell_kinds_apart(self):
        kinds = [
            SITE,
            SITE._replace(dtype=torch.float32),
            SITE._replace(gated=False),
            SITE._replace(neuron_major_down=False),
            SITE._replace(threads=2),
            SITE._replace(tokens=1),
            SITE._replace(hidden=256),
            SITE._replace(neurons=1024),
        ]
        names = {crossover._name("row limit", crossover._probe_site(kind)) for kind in kinds}
        assert len(names) == len(kinds)

    def test_measuring_leaves_the_random_state_and_the_defaults_alone(self):
        state, dtype = torch.get_rng_state(), torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            with torch.device("meta"):
                assert 0 <= crossover.row_limit(SITE._replace(dtype=torch.float32)) <= 0.25
                cpu_multiply.best_form(1, 512, 256, 1)
                cpu_multiply.best_form(5, 512, 256, 1)
        finally:
            torch.set_default_dtype(dtype)
        assert torch.equal(torch.get_rng_state(), state)


class TestForms:
    """Products in another form than F.linear's: only if as accurate."""

    @pytest.mark.parametrize("tokens", [1, 2, 13, 64])
    @pytest.mark.parametrize(("outputs", "inputs"), [(24, 1000), (512, 256), (9, 10)])
    def test_both_forms_multiply(self, tokens, outputs, inputs):
        torch.manual_seed(0)
        x, weight = torch.randn(tokens, inputs), torch.randn(outputs, inputs)
        forms = [cpu_multiply._weight_first]
        if tokens == 1 and cpu_multiply._trial(1, outputs, inputs, 1, False)[0] is not None:
            forms.append(cpu_multiply._onednn)
        exact = x.double() @ weight.double().mT
        # However a sum of n products is ordered, it errs by at most n units of what its terms add up to.
        bound = inputs * torch.finfo(torch.float32).eps * (x.double().abs() @ weight.double().abs().mT)
        for form in forms:
            product = form(x, weight)
            assert product.is_contiguous()
            assert product.dtype == torch.float32
            assert ((product - exact).abs() <= bound).all()

    def test_a_form_that_rounds_worse_is_not_taken(self, monkeypatch):
        def careless(x, weight):
            return (x.bfloat16().float() @ weight.mT).contiguous()

        torch.manual_seed(0)
        x, weight = torch.randn(4, 64), torch.randn(32, 64)
        assert not cpu_multiply._is_as_accurate(careless, x, weight)
        assert cpu_multiply._is_as_accurate(torch.nn.functional.linear, x, weight)
        assert cpu_multiply._gain(careless, 4, 32, 64, False) == cpu_multiply._ROUNDS_WORSE

    @pytest.mark.parametrize(("gain", "other"), [(2.0, True), (1.05, False), (0.5, False), (1e-3, False)])
    @pytest.mark.parametrize("tokens", [1, 13])
    def test_a_form_must_be_clearly_faster(self, gain, other, tokens, monkeypatch):
        monkeypatch.setattr(cpu_multiply, "_ONEDNN_LINEAR", object())
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
        monkeypatch.setattr(cpu_probe, "measured", lambda name, measure, otherwise: gain)
        cpu_multiply._trial.cache_clear()
        form = cpu_multiply.best_form(tokens, 512, 512, 1)
        cpu_multiply._trial.cache_clear()
        taken = cpu_multiply._onednn if tokens == 1 else cpu_multiply._weight_first
        assert form is (taken if other else torch.nn.functional.linear)

    @pytest.mark.parametrize("reason", ["tokens", "dtype", "small", "strides", "named"])
    def test_where_there_is_no_choice_nothing_is_measured(self, reason, monkeypatch):
        monkeypatch.setattr(cpu_multiply, "best_form", None)  # a call would fail
        x, weight = torch.randn(8, 512), torch.randn(512, 512)
        if reason == "tokens":
            x = torch.randn(65, 512)
        elif reason == "dtype":
            x, weight = x.double(), weight.double()
        elif reason == "small":
            x, weight = x[:, :64], weight[:64, :64].contiguous()
        elif reason == "strides":
            weight = weight.repeat(1, 2)[:, ::2]
        product = cpu_multiply.multiply(x, weight, tuned=reason != "named")
        assert torch.equal(product, torch.nn.functional.linear(x, weight))

    @pytest.mark.parametrize("tokens", [0, 1, 2, 63, 64, 65])
    @pytest.mark.parametrize("transposed", [False, True])
    def test_few_tokens_take_the_faster_form(self, tokens, transposed, monkeypatch):
        monkeypatch.setattr(cpu_multiply, "_ONEDNN_LINEAR", object())
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
        monkeypatch.setattr(cpu_probe, "measured", lambda name, measure, otherwise: 2.0)
        weight = torch.empty(512, 768).mT if transposed else torch.empty(768, 512)
        cpu_multiply._trial.cache_clear()
        form = cpu_multiply.form_for(tokens, weight)
        cpu_multiply._trial.cache_clear()
        if 0 < tokens <= 64:
            one = tokens == 1 or transposed
            assert form is (cpu_multiply._onednn if one else cpu_multiply._weight_first)
        else:
            assert form is None

    def test_a_real_trial(self):
        form = cpu_multiply.best_form(4, 512, 512, 1)
        assert form in (torch.nn.functional.linear, cpu_multiply._weight_first)
        assert len(cpu_probe.kept_measurements()) == 1
        cpu_multiply.remeasure(4, 512, 512, 1)
        assert len(cpu_probe.kept_measurements()) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_units_for_16_bits_are_asked_for(dtype):
    assert isinstance(cpu_multiply.has_native_gemm(dtype), bool)
    assert dtype != torch.float32 or not cpu_multiply.has_native_gemm(dtype)
