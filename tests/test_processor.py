"""CPUs that name AMX and die on it: found out by a child that really dies, kept, and capped."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from twell import _processor as processor

CAP_OF_THE_SUITE = os.environ.get("ONEDNN_MAX_CPU_ISA", "")
WITH_AMX = "processor : 0\nmodel name : Some Xeon\nflags : fpu avx512f amx_bf16 amx_tile\n"
WITHOUT = "processor : 0\nmodel name : Some EPYC\nflags : fpu avx2\n"

# Children that stand for a CPU: they look at the cap that oneDNN would, and end as its products would.
LIVES = "print('begun')"
DIES_WITHOUT_A_CAP = """
import os, signal
print("begun", flush=True)
if not os.environ.get("ONEDNN_MAX_CPU_ISA"):
    os.kill(os.getpid(), signal.SIGILL)
"""
FAILS_ABOVE_AVX2 = """
import os
print("begun", flush=True)
if os.environ.get("ONEDNN_MAX_CPU_ISA") != "AVX2":
    raise RuntimeError("could not create a primitive")
"""
ALWAYS_DIES = "import os, signal; print('begun', flush=True); os.kill(os.getpid(), signal.SIGILL)"


@pytest.fixture(autouse=True)
def own_state(monkeypatch, tmp_path):
    monkeypatch.setenv("TWELL_CACHE", str(tmp_path / "cache"))
    for variable in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
        monkeypatch.setenv(variable, "")  # so that it is put back, whatever a test leaves
        monkeypatch.delenv(variable)
    monkeypatch.setattr(processor, "_applied", None)
    yield
    for cached in (processor.cpu_name, processor.cpu_flags):
        cached.cache_clear()


@pytest.fixture
def cpu(monkeypatch, tmp_path):
    """cpu(text, trial): this machine has that /proc/cpuinfo, and a trial ends like that program."""

    def become(cpuinfo: str, trial: str = LIVES) -> None:
        path = tmp_path / "cpuinfo"
        path.write_text(cpuinfo)
        monkeypatch.setattr(processor, "_CPUINFO", str(path))
        monkeypatch.setattr(processor, "_TRIAL", trial)
        monkeypatch.setattr(processor, "_applied", None)
        for cached in (processor.cpu_name, processor.cpu_flags):
            cached.cache_clear()

    return become


def kept() -> list[Path]:
    folder = Path(os.environ["TWELL_CACHE"])
    return sorted(folder.glob("processor-*.json")) if folder.exists() else []


def test_without_amx_nothing_is_started(cpu):
    cpu(WITHOUT, ALWAYS_DIES)
    assert processor.make_products_safe().cap == ""
    assert processor.cpu_name() == "Some EPYC"
    assert "ONEDNN_MAX_CPU_ISA" not in os.environ
    assert kept() == []


def test_amx_that_works(cpu):
    cpu(WITH_AMX)
    assert processor.make_products_safe() == ("", "AMX works")
    assert "ONEDNN_MAX_CPU_ISA" not in os.environ
    assert len(kept()) == 1


@pytest.mark.parametrize(
    ("trial", "cap"), [(DIES_WITHOUT_A_CAP, "AVX512_CORE_FP16"), (FAILS_ABOVE_AVX2, "AVX2")]
)
def test_amx_that_kills(cpu, caplog, trial, cap):
    cpu(WITH_AMX, trial)
    with caplog.at_level(logging.WARNING, logger="twell"):
        assert processor.make_products_safe().cap == cap
        assert processor.make_products_safe().cap == cap  # and says so once
    assert os.environ["ONEDNN_MAX_CPU_ISA"] == cap
    assert [record.message.count(cap) for record in caplog.records] == [1]


def test_a_kept_verdict_is_applied_without_a_trial(cpu, monkeypatch):
    cpu(WITH_AMX, DIES_WITHOUT_A_CAP)
    assert processor.apply_kept_verdict() is None  # nothing known, nothing started
    assert kept() == []
    processor.make_products_safe()
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")
    cpu(WITH_AMX, "raise SystemExit('a trial was started')")
    assert processor.apply_kept_verdict().cap == "AVX512_CORE_FP16"
    assert os.environ["ONEDNN_MAX_CPU_ISA"] == "AVX512_CORE_FP16"


def test_another_boot_tries_again(cpu, monkeypatch):
    cpu(WITH_AMX, DIES_WITHOUT_A_CAP)
    processor.make_products_safe()
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")
    monkeypatch.setattr(processor, "_boot", lambda: "another boot")
    cpu(WITH_AMX, LIVES)
    assert processor.apply_kept_verdict() is None
    assert processor.make_products_safe().cap == ""


def test_where_nothing_helps_it_says_so(cpu, caplog):
    cpu(WITH_AMX, ALWAYS_DIES)
    with caplog.at_level(logging.WARNING, logger="twell"):
        assert processor.make_products_safe().cap == ""
    assert "ONEDNN_MAX_CPU_ISA" not in os.environ
    assert "use float32" in caplog.text


@pytest.mark.parametrize("variable", ["ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"])
def test_the_users_cap_stands(cpu, monkeypatch, variable):
    cpu(WITH_AMX, ALWAYS_DIES)
    monkeypatch.setenv(variable, "SSE41")
    assert "SSE41" in processor.make_products_safe().words
    assert processor.apply_kept_verdict() is None
    assert os.environ[variable] == "SSE41"
    assert kept() == []


@pytest.mark.parametrize(
    "content", ["", "[]", "null", '{"cap": ""}', '{"cap": "rm -rf", "words": ""}', '{"cap": "", "words": 3}']
)
def test_a_spoilt_file_is_as_none(cpu, content):
    cpu(WITH_AMX)
    processor.make_products_safe()
    (path,) = kept()
    path.write_text(content)
    cpu(WITH_AMX, DIES_WITHOUT_A_CAP)
    assert processor.apply_kept_verdict() is None
    assert processor.make_products_safe().cap == "AVX512_CORE_FP16"


def test_a_trial_that_does_not_end_decides_nothing(cpu, monkeypatch):
    cpu(WITH_AMX, "import time; time.sleep(60)")
    monkeypatch.setattr(processor, "_TRIAL_SECONDS", 0.2)
    assert processor.make_products_safe().cap == ""
    assert kept() == []


@pytest.mark.parametrize("executable", [None, "/bin/false", "python that is not there"])
def test_a_trial_that_does_not_begin_decides_nothing(cpu, monkeypatch, executable):
    cpu(WITH_AMX, "import a_module_that_is_not_there")
    if executable is None:
        assert processor.make_products_safe().cap == ""
        assert kept() == []
    monkeypatch.setattr(sys, "executable", executable)
    assert processor.make_products_safe().cap == ""
    assert kept() == []


def test_a_cache_that_cannot_be_written_to(cpu, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TWELL_CACHE", str(tmp_path / "file" / "cache"))
    cpu(WITH_AMX, DIES_WITHOUT_A_CAP)
    assert processor.make_products_safe().cap == "AVX512_CORE_FP16"


def test_the_real_trial_lives_under_the_suites_own_cap():
    assert processor._survives(CAP_OF_THE_SUITE)


def test_importing_the_library_applies_what_is_kept(cpu, tmp_path):
    """In a process of its own, whose CPU is the one of `WITH_AMX`."""
    cpu(WITH_AMX, DIES_WITHOUT_A_CAP)
    processor.make_products_safe()
    del os.environ["ONEDNN_MAX_CPU_ISA"]
    code = f"""
import builtins, os
opened, instead = builtins.open, {str(tmp_path / "cpuinfo")!r}
builtins.open = lambda path, *a, **k: opened(instead if path == "/proc/cpuinfo" else path, *a, **k)
import twell
print(os.environ.get("ONEDNN_MAX_CPU_ISA"))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["AVX512_CORE_FP16"]


def test_the_file_is_plain(cpu):
    cpu(WITH_AMX, DIES_WITHOUT_A_CAP)
    processor.make_products_safe()
    (path,) = kept()
    assert json.loads(path.read_text())["cap"] == "AVX512_CORE_FP16"
