"""From a plan to a path and a backend: the environment override, the order of backends, fallbacks."""

from __future__ import annotations

import pytest
import torch

from twell import Plan, ffn
from twell.backends import Site
from twell.policy import Resolution, resolve, resolve_observed
from twell.synthetic import make_ffn

from ..backends import added, dense_backend

BIG = {"dtype": torch.float32, "tokens": 2048, "hidden": 1024, "neurons": 4096, "gated": True}


def site(device_type="cpu", training=False, **changes) -> Site:
    return Site(device_type=device_type, training=training, **{**BIG, **changes})


def resolved(plan, site) -> tuple[str, int, str]:
    """Path, rows and backend, without the reason."""
    return resolve(plan, site)[:3]


def test_auto_takes_the_cpu_backend_for_inference_and_training():
    assert resolved(None, site()) == ("auto", 0, "cpu")
    assert resolved(None, site(training=True)) == ("auto", 0, "cpu")


@pytest.mark.parametrize("tokens", [1, 2048])
def test_auto_leaves_small_work_dense_and_a_named_backend_does_not(tokens, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    tiny = site(hidden=64, neurons=256, tokens=tokens)
    assert resolve(None, tiny).path == "dense"
    assert resolve(None, site(tokens=None)).path == "auto"  # traced: the op decides as it runs
    assert resolved(Plan(backend="cpu"), tiny) == ("auto", 0, "cpu")


@pytest.mark.parametrize(
    ("shape", "tokens"), [((), 1), ((0,), 1), ((1,), 1), ((3,), 4), ((4,), 4), ((2, 3), 8), ((3, 1, 3), 16)]
)
def test_a_backend_is_asked_about_the_call(shape, tokens):
    asked: list[Site] = []
    _, up, down, gate = make_ffn(1, 16, 32, 4).operands()
    with added(dense_backend("asked", refusal=lambda site: asked.append(site))):
        ffn(torch.randn(*shape, 16), up, down, gate, plan=Plan(path="row", backend="asked"))
    assert asked == [
        Site(
            device_type="cpu",
            dtype=torch.float32,
            tokens=tokens,
            hidden=16,
            neurons=32,
            gated=True,
            training=False,
        )
    ]


def test_environment_overrides_the_plan(monkeypatch):
    monkeypatch.setenv("TWELL_PLAN", "block,rows=32")
    assert resolved(Plan(path="row"), site()) == ("block", 32, "cpu")
    assert "TWELL_PLAN" in resolve(None, site()).reason
    monkeypatch.setenv("TWELL_PLAN", "nonsense")
    with pytest.raises(ValueError, match="environment variable TWELL_PLAN='nonsense': path: got 'nonsense'"):
        resolve(None, site())


def test_a_fallback_is_logged_once(caplog):
    with added(dense_backend("picky", refusal=lambda site: "it is Tuesday")):
        for hidden in (8, 16):
            wanted = Plan(path="row", backend="picky")
            assert resolve(wanted, site(hidden=hidden)) == Resolution(
                "dense", 0, "dense", "backend 'picky': it is Tuesday"
            )
    lines = [record.message for record in caplog.records if "picky" in record.message]
    assert lines == ["twell: running dense instead of 'row': backend 'picky': it is Tuesday"]


def test_a_device_without_backend_falls_back_with_the_reason(caplog):
    assert resolve(None, site(device_type="xla")).path == "dense"
    assert "the tensors are on 'xla', not on the CPU" in caplog.text


def test_a_path_that_the_backend_lacks_falls_back(caplog):
    assert resolve(Plan(path="block", backend="dense"), site()).path == "dense"
    assert "it has no 'block' path" in caplog.text


def test_the_last_backend_of_the_table_is_tried_first():
    with added(dense_backend("newer")):
        assert resolved(None, site()) == ("auto", 0, "newer")
    assert resolved(None, site()) == ("auto", 0, "cpu")


def test_a_backend_that_refuses_leaves_room_for_others():
    with added(dense_backend("unwilling", refusal=lambda site: "it is Tuesday")):
        assert resolved(None, site()) == ("auto", 0, "cpu")


@pytest.mark.parametrize(
    ("resolution", "training", "path"),
    [
        (Resolution("auto", 0, "cpu", ""), True, "dense"),
        (Resolution("auto", 0, "cpu", ""), False, "auto"),
        (Resolution("row", 0, "cpu", ""), True, "row"),
        (Resolution("dense", 0, "dense", ""), True, "dense"),
    ],
)
def test_an_observer_of_automatic_training_sees_a_dense_block(resolution, training, path):
    found = resolve_observed(resolution, training)
    assert found.path == path
    assert (found.backend == "dense") == (path == "dense")


def test_float32_on_a_gpu_is_told_why_it_gains_nothing(caplog, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr("twell._log._logged", set())
    assert resolve(None, site("cuda")).backend == "dense"
    assert resolve(None, site("cuda", dtype=torch.bfloat16)).backend == "gpu"
    assert [line.endswith("gain nothing; cast the model to bfloat16") for line in caplog.messages] == [True]
