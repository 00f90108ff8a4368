"""The training benchmark: a tiny run on the CPU, its oracle, tables and figure made of its records."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from twell import reference
from twell.measure import Record, Timing, make_record, read_records, write_records
from twell.measure.ffn import BASELINE, stock_dense

from ..scripts import benchmark_modules

TOKENS, NNZ = (4096, 16384, 65536), (24, 2800)
MIB = 2**20


@pytest.fixture(scope="module")
def modules():
    """benchmarks/tables.py, tables_training.py and ffn_training.py."""
    with benchmark_modules("tables", "tables_training", "ffn_training") as modules:
        yield modules


@pytest.fixture
def tables(modules, tmp_path, monkeypatch):
    """tables.py over a directory of its own; its records are at `tables_training.RECORDS`."""
    tables, training, _ = modules
    monkeypatch.setattr(training, "RECORDS", tmp_path / "ffn_training.jsonl")
    monkeypatch.setattr(training, "CPU_RECORDS", tmp_path / "cpu.jsonl")
    figure = next(f for f in tables.FIGURES if f.path.name == "gpu_training.png")
    moved = dataclasses.replace(figure, path=tmp_path / "figures" / "gpu_training.png")
    monkeypatch.setattr(tables, "FIGURES", [moved])
    document = tmp_path / "kernels.md"
    document.write_text("".join(f"<!-- generated: {name} -->\n<!-- end -->\n" for name in training.TABLES))
    monkeypatch.setattr(tables, "DOCUMENTS", [document])
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    return tables


@pytest.fixture
def training(modules, tables):
    return modules[1]


@pytest.fixture
def benchmark(modules, monkeypatch):
    """ffn_training.py without the compiler (seconds) and with its thread count undone."""
    benchmark = modules[2]
    monkeypatch.setattr(benchmark.Bench, "compiled", staticmethod(stock_dense))
    monkeypatch.setattr(benchmark, "SETTLING", 2)
    threads = torch.get_num_threads()
    yield benchmark
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def blank() -> Record:
    return make_record("ffn_training/total/auto", 1.0, unit="s")


def synthetic(blank: Record) -> list[Record]:
    """Dense takes 1 ms per 4,096 tokens forward, 2 ms backward; ours half of it at nnz 24, all of it else."""
    records = []

    def add(what: str, value: float, dense: float, unit: str, tokens: int, nnz: int, **more: float) -> None:
        records.append(
            dataclasses.replace(
                blank,
                what=f"ffn_training/{what}",
                value=value,
                baseline=BASELINE,
                baseline_value=dense,
                unit=unit,
                shape={"M": tokens, "D": 2048, "H": 5632},
                sparsity={"nnz": nnz + 0.5, "wanted_nnz": float(nnz), **more},
            )
        )

    for tokens in TOKENS:
        for nnz in NNZ:
            for part, dense in (("forward", 1e-3), ("backward", 2e-3), ("total", 3e-3)):
                dense *= tokens / 4096
                more = {"error_over_dense": 1.25} if (part, tokens) == ("total", 4096) else {}
                add(f"{part}/auto", dense / (2 if nnz == 24 else 1), dense, "s", tokens, nnz, **more)
    add("total/compiled", 9e-3, 12e-3, "s", 16384, 24, error_over_dense=7.0)
    for nnz in NNZ:
        add("saved/compiled", 300 * MIB, 500 * MIB, "B", 16384, nnz)
        add("saved/auto", 0, 500 * MIB, "B", 16384, nnz)
        add("peak/auto", 600 * MIB, 1200 * MIB, "bytes", 16384, nnz)
    return records


def test_without_records_every_table_says_so_and_nothing_is_drawn(tables, training, tmp_path):
    tables.regenerate()
    text = (tmp_path / "kernels.md").read_text()
    assert text.count(training.NOT_MEASURED) == len(training.TABLES)
    assert not (tmp_path / "figures").exists()
    assert tables.drifted() == []


def test_some_records_make_some_tables(tables, training, blank):
    write_records(training.RECORDS, [r for r in synthetic(blank) if "/saved/" in r.what])
    for name, table in training.TABLES.items():
        assert (table() == training.NOT_MEASURED) == (name not in ("training-memory", "training-measured-on"))


def test_total_shows_ratios_by_tokens_and_nnz(training, blank):
    write_records(training.RECORDS, synthetic(blank))
    assert training.training_total().splitlines() == [
        "| tokens | dense | nnz 24 | nnz 2800 |",
        "|---:|---:|---:|---:|",
        "| 4,096 | 3 ms | 2.00x | 1.00x |",
        "| 16,384 | 12 ms | 2.00x | 1.00x |",
        "| 65,536 | 48 ms | 2.00x | 1.00x |",
    ]


def test_the_cpu_has_records_of_its_own(training, blank):
    records = [r for r in synthetic(blank) if r.what == "ffn_training/total/auto"]
    write_records(training.CPU_RECORDS, records)
    header, _, *rows = training.training_cpu().splitlines()
    assert header.startswith("| tokens | dense | 0.43% |")
    assert rows[0] == "| 4,096 | 3 ms | 2.00x | 1.00x |"
    assert rows[-1].startswith("Measured on ")


def test_parts_are_those_of_the_middle_number_of_tokens(training, blank):
    write_records(training.RECORDS, synthetic(blank))
    header, _, sparse, dense = training.training_parts().splitlines()
    assert header.startswith("| 16,384 tokens |")
    assert sparse == "| nnz 24 | 4 ms | 2 ms | 2.00x | 8 ms | 4 ms | 2.00x | 12 ms | 6 ms | 2.00x |"
    assert dense == "| nnz 2800 | 4 ms | 4 ms | 1.00x | 8 ms | 8 ms | 1.00x | 12 ms | 12 ms | 1.00x |"


def test_memory_is_in_mib_and_empty_where_not_measured(training, blank):
    write_records(training.RECORDS, synthetic(blank))
    assert training.training_memory().splitlines() == [
        "| 16,384 tokens | MiB | dense eager | dense compiled | ours, block path | ours, automatic |",
        "|---|---|---:|---:|---:|---:|",
        "| nnz 24 | kept for the backward | 500 | 300 |  | 0 |",
        "| nnz 24 | peak of forward and backward | 1,200 |  |  | 600 |",
        "| nnz 2800 | kept for the backward | 500 | 300 |  | 0 |",
        "| nnz 2800 | peak of forward and backward | 1,200 |  |  | 600 |",
    ]


def test_the_largest_error_is_that_of_ours(training, blank):
    write_records(training.RECORDS, synthetic(blank))
    assert training.training_measured_on().endswith("at most 1.25 times those of eager dense.")


def test_the_figure_is_drawn_from_the_records_and_drift_is_noticed(tables, training, blank, tmp_path):
    records = synthetic(blank)
    write_records(training.RECORDS, records)
    assert training.curves_data()["16,384 tokens"] == [(24.5, 2.0), (2800.5, 1.0)]
    tables.regenerate()
    assert tables.drifted() == []
    assert "(figures/gpu_training.png)" in (tmp_path / "kernels.md").read_text()
    write_records(training.RECORDS, [dataclasses.replace(r, value=r.value + 1) for r in records])
    assert tables.drifted() == ["kernels.md", "figures/gpu_training.png"]
    training.RECORDS.unlink()
    assert tables.drifted() == ["kernels.md", "figures/gpu_training.png"]


def test_a_tiny_run_gives_all_records_tables_and_the_figure(benchmark, tables, training, tmp_path):
    benchmark.main(
        ["--device", "cpu", "--tiny", "--quick", "--commit", "abc", "--out", str(training.RECORDS)]
    )
    records = read_records(training.RECORDS)
    parts, names = ("forward", "backward", "total", "saved", "peak"), ("sparse", "auto", "compiled")
    assert {r.what for r in records} == {f"ffn_training/{part}/{name}" for part in parts for name in names}
    assert {r.commit for r in records} == {"abc"}
    assert {r.baseline for r in records} == {BASELINE}
    cells = {(r.shape["M"], r.sparsity["wanted_nnz"]) for r in records if r.what.endswith("total/auto")}
    assert cells == {(tokens, nnz) for tokens in benchmark.TINY.tokens for nnz in benchmark.TINY.nnz}
    for record in records:
        if record.error is not None:
            assert record.error < 1e-5
        if "error_over_dense" in record.sparsity:
            assert {f"error_{of}" for of in ("y", *benchmark.OPERANDS)} <= record.sparsity.keys()
    write_records(training.CPU_RECORDS, records)
    tables.regenerate()
    assert training.NOT_MEASURED not in (tmp_path / "kernels.md").read_text()
    assert (tmp_path / "figures" / "gpu_training.png").stat().st_size > 10_000


def test_a_tiny_run_never_lands_in_the_results(benchmark):
    with pytest.raises(SystemExit):
        benchmark.main(["--device", "cpu", "--tiny"])


def step_of(benchmark, dtype: torch.dtype = torch.float32):
    operands = [torch.randn(*shape, dtype=dtype) for shape in ((50, 8), (24, 8), (8, 24), (24, 8))]
    for operand in operands:
        operand.requires_grad_()
    return benchmark.Step(stock_dense, tuple(operands), torch.randn(50, 8, dtype=dtype))


def test_a_step_times_its_parts_within_one_call(benchmark):
    step = step_of(benchmark)
    for _ in range(5):
        step()
    timings = step.timings(3)
    assert [timing.n for timing in timings.values()] == [3, 3, 3]
    for forward, backward, total in zip(*(timing.samples for timing in timings.values()), strict=True):
        assert forward + backward == pytest.approx(total)
        assert min(forward, backward) > 0
    assert isinstance(timings["backward"], Timing)


def test_the_oracle_sums_weight_gradients_over_chunks_of_tokens(benchmark, monkeypatch):
    monkeypatch.setattr(benchmark, "CHUNK", 7)
    step = step_of(benchmark)
    wide = [operand.detach().double().requires_grad_() for operand in step.operands]
    y = reference.ffn(*wide, dtype=torch.float64).y
    expected = (y, *torch.autograd.grad(y, wide, step.grad_y.double()))
    found = benchmark.exact_step(step)
    assert list(found) == ["y", "x", "up", "down", "gate"]
    for result, exact in zip(found.values(), expected, strict=True):
        assert result.dtype == torch.float64
        assert reference.relative_error(result, exact) < 1e-14


def test_errors_name_the_gradient_that_is_off(benchmark):
    step = step_of(benchmark)

    def halved_down(x, up, down, gate):
        return stock_dense(x, up, down.detach() + (down - down.detach()) / 2, gate)

    off = benchmark.Step(halved_down, step.operands, step.grad_y)
    errors = benchmark.errors_of({BASELINE: step, "off": off})
    assert errors["off"].pop("down") == pytest.approx(0.5, rel=1e-4)
    assert max(errors["off"].values()) < 1e-5
