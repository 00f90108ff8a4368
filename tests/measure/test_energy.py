"""Energy: counters that tick, power samples, a management library in C, RAPL folders, and what is missing."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from pathlib import Path

import pytest
import torch

from twell.measure.energy import (
    COUNTER,
    RAPL,
    SAMPLES,
    CpuPower,
    GpuPower,
    Reading,
    energy_of,
    idle_power,
    mean_power,
    power_source,
    sampled,
)
from twell.measure.nvml import Nvml

# 300 W, counted every 5 ms, on one GPU; the second has power but no counter, the third has nothing.
LIBRARY = r"""
#include <string.h>
#include <time.h>
typedef unsigned long long u64;
static long number(void *device) { return (long)device; }
int nvmlInit_v2(void) { return 0; }
int nvmlSystemGetDriverVersion(char *out, unsigned size) { strncpy(out, "580.42", size); return 0; }
int nvmlDeviceGetHandleByUUID(const char *name, void **device) {
  if (strncmp(name, "GPU-", 4)) return 6;
  *device = (void *)(long)(name[4] - '0');
  return 0;
}
int nvmlDeviceGetTotalEnergyConsumption(void *device, u64 *millijoules) {
  struct timespec now;
  if (number(device) != 1) return 3;
  clock_gettime(CLOCK_MONOTONIC, &now);
  u64 ticks = (u64)now.tv_sec * 200 + now.tv_nsec / 5000000;
  *millijoules = ticks * 1500;
  return 0;
}
int nvmlDeviceGetPowerUsage(void *device, unsigned *out) { *out = 250000; return number(device) > 2 ? 3 : 0; }
int nvmlDeviceGetEnforcedPowerLimit(void *device, unsigned *out) { *out = 700000; return 0; }
int nvmlDeviceGetClockInfo(void *device, unsigned kind, unsigned *out) {
  *out = kind == 1 ? 1830 : 3201;
  return 0;
}
int nvmlDeviceGetTemperature(void *device, unsigned sensor, unsigned *out) { *out = 55; return sensor; }
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> str:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    folder = tmp_path_factory.mktemp("nvml")
    (folder / "nvml.c").write_text(LIBRARY)
    path = folder / "libnvidia-ml.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", path, folder / "nvml.c"], check=True)
    return str(path)


def readings(*values: tuple[float, float | None, float | None]) -> list[Reading]:
    return [Reading(seconds=s, joules=j, watts=w) for s, j, w in values]


def test_a_counter_is_read_between_its_own_ticks():
    """Half a tick at either end does not count: 100 J from 0.2 s to 0.6 s."""
    found = mean_power(
        readings((0.0, 7, 9), (0.1, 7, 9), (0.2, 50, 9), (0.4, 100, 9), (0.6, 150, 9), (0.7, 150, 9)), COUNTER
    )
    assert found.watts == pytest.approx(250)
    assert found.method == COUNTER


def test_power_samples_are_integrated_where_no_counter_moves():
    still = readings((0.0, 5, 100), (1.0, 5, 300), (3.0, 5, 300))
    none = readings((0.0, None, 100), (1.0, None, 300), (3.0, None, 300))
    for some in (still, none):
        found = mean_power(some, COUNTER)
        assert found.watts == pytest.approx((200 + 2 * 300) / 3)
        assert found.method == SAMPLES


@pytest.mark.parametrize("some", [[], readings((0.0, 5, None)), readings((0.0, 5, None), (1.0, 5, None))])
def test_too_little_was_read(some):
    assert mean_power(some, COUNTER) is None


def test_state_of_a_gpu(library):
    gpu = Nvml(library).device_with_uuid("GPU-1")
    state = gpu.state()
    assert (state.watts, state.power_limit_watts, state.temperature_c) == (250, 700, 55)
    assert (state.sm_clock_mhz, state.memory_clock_mhz) == (1830, 3201)
    assert state.joules > 0
    assert Nvml(library).driver() == "580.42"


def test_a_gpu_that_is_not_there(library):
    with pytest.raises(OSError, match="does not know the GPU nothing"):
        Nvml(library).device_with_uuid("nothing")


def test_energy_of_a_call(library):
    source = GpuPower(Nvml(library).device_with_uuid("GPU-1"))
    pause = threading.Event()
    energy = energy_of(lambda: pause.wait(0.02), source, seconds=0.4)
    assert energy.power.method == COUNTER
    assert 100 < energy.power.watts < 900  # 300 W, read by a thread that others may delay
    assert energy.joules == pytest.approx(energy.power.watts * energy.seconds)
    assert energy.calls >= 1
    assert energy.seconds >= 0.02
    assert energy.power.entries() == {
        "power_w": round(energy.power.watts, 1),
        "energy_from": COUNTER,
        "sm_clock_mhz": 1830,
        "memory_clock_mhz": 3201,
        "temperature_c": 55,
    }


def test_without_a_counter_power_is_integrated_and_marked(library):
    source = GpuPower(Nvml(library).device_with_uuid("GPU-2"))
    power = idle_power(source, 0.1)
    assert power.watts == pytest.approx(250)
    assert power.method == SAMPLES


def test_without_anything_there_is_no_energy(library):
    source = GpuPower(Nvml(library).device_with_uuid("GPU-3"))
    assert energy_of(lambda: None, source, seconds=0.05) is None


def test_a_missing_library_is_said():
    assert power_source("cuda", library="libnowhere-ml.so.1").startswith("no energy: libnowhere-ml.so.1")


def test_a_library_that_is_another_one(library, tmp_path):
    (tmp_path / "other.c").write_text("int other(void) { return 0; }")
    path = tmp_path / "libother.so"
    subprocess.run([shutil.which("cc") or "gcc", "-shared", "-o", path, tmp_path / "other.c"], check=True)
    with pytest.raises(OSError, match="has no nvmlInit_v2"):
        Nvml(str(path))


def rapl(root: Path, name: str, folder: str, energy: int, span: int = 10_000_000) -> Path:
    place = root / folder
    place.mkdir(parents=True, exist_ok=True)
    (place / "name").write_text(f"{name}\n")
    (place / "max_energy_range_uj").write_text(f"{span}\n")
    (place / "energy_uj").write_text(f"{energy}\n")
    return place / "energy_uj"


def test_rapl_adds_packages_and_memory_and_wraps(tmp_path):
    first = rapl(tmp_path, "package-0", "intel-rapl:0", 9_000_000)
    second = rapl(tmp_path, "package-1", "intel-rapl:1", 0)
    memory = rapl(tmp_path, "dram", "intel-rapl:0:1", 0)
    core = rapl(tmp_path, "core", "intel-rapl:0:0", 0)  # part of its package
    source = power_source("cpu", root=tmp_path)
    assert isinstance(source, CpuPower)
    assert source.read().joules == 0
    first.write_text("999999\n")  # 10,000,000 is 0 again: 2 J more
    second.write_text("500000\n")
    memory.write_text("250000\n")
    core.write_text("777777\n")
    assert source.read().joules == pytest.approx(2 + 0.5 + 0.25)
    assert source.counter == RAPL


def test_no_rapl_is_said(tmp_path):
    assert power_source("cpu", root=tmp_path) == f"no energy: no RAPL counters in {tmp_path}"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_counters_of_root_are_said(tmp_path):
    path = rapl(tmp_path, "package-0", "intel-rapl:0", 0)
    path.chmod(0)
    assert power_source("cpu", root=tmp_path) == f"no energy: only root may read {path}"


def test_a_source_that_breaks_keeps_what_was_read(tmp_path):
    path = rapl(tmp_path, "package-0", "intel-rapl:0", 0)
    source = CpuPower(tmp_path)
    first = source.read()
    path.unlink()
    with sampled(source, 0.001) as found:
        pass
    assert first.joules == 0
    assert found == []


def test_a_window_needs_a_length(tmp_path):
    rapl(tmp_path, "package-0", "intel-rapl:0", 0)
    with pytest.raises(ValueError, match="seconds: got 0"):
        energy_of(lambda: None, CpuPower(tmp_path), seconds=0)


@pytest.mark.gpu
def test_a_real_gpu_works_harder_than_it_idles():
    source = power_source("cuda")
    assert not isinstance(source, str), source
    x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    idle = idle_power(source, 1.0)
    busy = energy_of(lambda: x @ x, source, seconds=2.0, wait=torch.cuda.synchronize)
    assert busy.power.watts > idle.watts + 50
    assert busy.power.sm_clock_mhz > 500
