"""Plans, the environment override, the backend registry and its fallbacks."""

from __future__ import annotations

import pytest
import torch

import twell
from twell import Backend, Plan, Site, Training, ffn
from twell.backends import get_backend
from twell.kernels.args import Saved
from twell.kernels.dense import dense_backward, dense_forward
from twell.policy import Resolution, resolve
from twell.synthetic import make_ffn

from .accuracy import stock_dense

BIG = {"dtype": torch.float32, "tokens": 2048, "hidden": 1024, "neurons": 4096, "gated": True}


def site(device_type="cpu", training=False, **changes) -> Site:
    return Site(device_type=device_type, training=training, **{**BIG, **changes})


def resolved(plan, site) -> tuple[str, int, str]:
    """Path, rows and backend, without the reason."""
    return resolve(plan, site)[:3]


@pytest.fixture
def register():
    """Register backends for one test."""
    names: list[str] = []

    def add(name: str, **options) -> None:
        defaults = {
            "paths": frozenset({"auto", "row", "block"}),
            "refusal": lambda site: None,
            "forward": lambda args, decision, record: dense_forward(args, record),
        }
        twell.register_backend(Backend(name=name, **{**defaults, **options}))
        names.append(name)

    yield add
    for name in names:
        twell.unregister_backend(name)


@pytest.mark.parametrize(
    ("text", "plan"),
    [
        ("dense", Plan(path="dense")),
        ("block,rows=16", Plan(path="block", block_rows=16)),
        ("row , backend = cpu", Plan(path="row", backend="cpu")),
    ],
)
def test_parse(text, plan):
    assert Plan.parse(text) == plan
    assert Plan.parse(plan.spec) == plan


@pytest.mark.parametrize(
    "text", ["", "fast", "row,rows=x", "row,speed=9", "row,backend=gone", "row,rows=1,rows=2"]
)
def test_parse_rejects(text):
    with pytest.raises(ValueError, match="accepted"):
        Plan.parse(text)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": "sparse"}, r"path: got 'sparse'; accepted: 'auto' \| 'dense'"),
        ({"block_rows": -1}, r"block_rows: got -1; accepted: an integer >= 0"),
        ({"block_rows": True}, "block_rows"),
        ({"backend": "gone"}, r"backend: got 'gone'; accepted: 'dense' \| 'cpu'"),
        ({"backend": []}, r"backend: got \[\]"),
    ],
)
def test_a_plan_is_validated(options, message):
    with pytest.raises(ValueError, match=message):
        Plan(**options)


def test_dense_because_of_gradients_is_said_once(caplog, monkeypatch, register):
    """Of a backend that has no backward, where no other would run."""
    monkeypatch.setattr("twell._log._logged", set())
    register("forward only")
    monkeypatch.setattr("twell.policy.resolution.candidates", lambda: (get_backend("forward only"),))
    for _ in range(2):
        assert resolve(None, site(training=True)).path == "dense"
    assert ["gradients are wanted" in record.message for record in caplog.records] == [True]


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
def test_a_backend_is_asked_about_the_call(shape, tokens, register):
    asked: list[Site] = []
    register("asked", refusal=lambda site: asked.append(site))
    _, up, down, gate = make_ffn(1, 16, 32, 4).operands()
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


def test_a_fallback_is_logged_once(caplog, register):
    register("picky", refusal=lambda site: "it is Tuesday")
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


def test_a_path_that_the_backend_lacks_falls_back(caplog, register):
    register("rows-only", paths=frozenset({"row"}))
    assert resolve(Plan(path="block", backend="rows-only"), site()).path == "dense"
    assert "it has no 'block' path" in caplog.text


def test_later_backends_win_and_their_forward_and_backward_run(register):
    calls: list[str] = []

    def forward(args, decision, record):
        calls.append(f"forward {decision.path} {decision.block_rows}")
        return dense_forward(args, record)

    def backward(args, grad_y, grad_l1, needed):
        calls.append("backward")
        return dense_backward(args, grad_y, grad_l1, needed)

    register("newer", forward=forward, backward=backward)
    x, up, down, gate = (t.requires_grad_() for t in make_ffn(3, 16, 32, 5).operands())
    y = ffn(x, up, down, gate)  # auto, although training: this backend has its own backward
    torch.testing.assert_close(y, stock_dense(x, up, down, gate))
    y.sum().backward()
    assert calls == ["forward auto 0", "backward"]


def test_a_backend_with_kernels_for_training_decides_its_backward(register):
    """No rules of other backends apply to it, not even for sizes that those could not run."""
    seen: list[tuple[str, str]] = []

    def train_forward(args, decision, record):
        nothing = torch.empty(0, dtype=torch.int32)
        return dense_forward(args, record), Saved(nothing, nothing)

    def train_backward(args, saved, decision, grad_y, grad_l1, needed):
        seen.append((decision.path, decision.backend))
        return dense_backward(args, grad_y, grad_l1, needed)

    training = Training(forward=train_forward, backward=train_backward, sizes=lambda *sizes: (0, 0))
    register("newer", training=training)
    operands = [t.requires_grad_() for t in make_ffn(3, 15, 33, 5).operands()]
    for plan in (None, Plan(path="row", backend="newer")):
        ffn(*operands, plan=plan).sum().backward()
    assert seen == [("auto", "newer"), ("row", "newer")]


def test_a_backend_that_refuses_leaves_room_for_others(register):
    register("unwilling", refusal=lambda site: "it is Tuesday")
    assert resolved(None, site()) == ("auto", 0, "cpu")


def test_registry_rejects_duplicates_and_unknown_paths(register):
    with pytest.raises(ValueError, match=r"backend.name: got 'cpu'"):
        register("cpu")
    with pytest.raises(ValueError, match=r"backend.paths: got \['diagonal'\]"):
        register("odd", paths=frozenset({"diagonal"}))
    with pytest.raises(ValueError, match="backend: got 'never'"):
        twell.unregister_backend("never")
