"""The measuring kit on a GPU: event timings, exact peaks."""

from __future__ import annotations

import time

import pytest
import torch

from twell.measure import Record, compare, hardware, make_record, peak_bytes, saved_bytes, speedup

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MIB = 1 << 20


def wall_seconds(fn, calls: int = 20) -> float:
    fn()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        fn()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / calls


def test_matmul_agrees_with_an_explicit_measurement():
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    timing = compare({"fn": lambda: a @ a}, device="cuda", warmup=10)["fn"]
    assert timing.n == 20
    assert 0.5 < timing.median / wall_seconds(lambda: a @ a) < 2


@pytest.mark.parametrize("calls", [None, 1, 5])
def test_time_is_per_call(calls):
    a = torch.randn(2048, 2048, device="cuda")
    timing = compare({"fn": lambda: a @ a}, device="cuda:0", warmup=10, calls_per_sample=calls)["fn"]
    assert 0.3 < timing.median / wall_seconds(lambda: a @ a) < 3


def test_queued_samples_do_not_see_the_launches():
    """A hundred tiny kernels: the host takes longer to launch them than the device to run them."""
    x = torch.zeros(8, device="cuda")

    def fn() -> None:
        for _ in range(100):
            x.add_(1)

    options = {"device": "cuda", "repetitions": 10, "calls_per_sample": 1}
    launched, queued = (compare({"fn": fn}, queued=value, **options)["fn"] for value in (False, True))
    assert queued.median < launched.median


def test_compare_ranks_work():
    small, large = (torch.randn(n, n, device="cuda") for n in (2048, 4096))
    rounds: list[None] = []
    timings = compare(
        {"large": lambda: large @ large, "small": lambda: small @ small},
        device="cuda",
        repetitions=10,
        progress=lambda: rounds.append(None),
    )
    assert len(rounds) == 10
    assert 3 < speedup(timings["large"], timings["small"]) < 20


def test_peak_of_a_known_allocation_is_exact():
    existing = torch.empty(8 * MIB, dtype=torch.uint8, device="cuda")

    def fn() -> None:
        first = torch.empty(32 * MIB, dtype=torch.uint8, device="cuda")
        second = torch.empty(16 * MIB, dtype=torch.uint8, device="cuda")
        del first, second
        torch.empty(20 * MIB, dtype=torch.uint8, device="cuda")

    torch.empty(512 * MIB, dtype=torch.uint8, device="cuda")  # an earlier peak must not count
    assert peak_bytes(fn, "cuda") == 48 * MIB
    assert peak_bytes(lambda: existing.fill_(1), "cuda") == 0


def test_cpu_peak_ignores_gpu_memory():
    def fn() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.empty(MIB, dtype=torch.uint8), torch.empty(4 * MIB, dtype=torch.uint8, device="cuda")

    assert peak_bytes(fn, "cpu") == MIB


def test_saved_bytes_by_hand():
    x = torch.randn(MIB, device="cuda", requires_grad=True)
    assert saved_bytes(lambda: x.relu().square()) == 4 * MIB
    assert saved_bytes(lambda: x.square(), exclude=[x]) == 0


def test_hardware_names_the_gpu():
    machine = hardware("cuda")
    assert machine["device"] == "cuda"
    assert machine["gpu"] == torch.cuda.get_device_name()
    assert machine["sm_count"] > 0
    assert machine["gpu_memory_gib"] > 0
    assert machine["l2_mib"] > 0
    assert machine["capability"] == ".".join(map(str, torch.cuda.get_device_capability()))
    made = make_record("gpu/test", 1.0, unit="x", device="cuda")
    assert made.hardware == machine
    assert Record.from_json(made.to_json()) == made
