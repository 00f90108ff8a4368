"""The sparse activations: values, derivatives, parsing and refusals."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from twell import Activation, fatrelu

NAN, INF = math.nan, math.inf
SPECS = ["relu", "relu2", "fatrelu(0.25)", "fatrelu(0)", "drelu"]
EDGE_CASES = [NAN, -NAN, INF, -INF, 0.0, -0.0, 0.25, 0.2500001, 1e-45, -1e-45, 1e-20, -1.0, 3.0]

singles = st.floats(width=32, allow_nan=True, allow_infinity=True)


def by_definition(spec: str, value: float) -> float:
    """One pre-activation in Python floats, which hold every float32 product of two exactly."""
    threshold = 0.25 if spec == "fatrelu(0.25)" else 0.0
    if value <= threshold:
        return 0.0
    return value * value if spec == "relu2" else value


def derivative(act: Activation, pre: torch.Tensor) -> torch.Tensor:
    return act.backward(torch.ones_like(pre), pre)


def assert_same(got: torch.Tensor, expected: list[float]) -> None:
    """Equal element by element, NaN where NaN is expected, nothing where it is not."""
    torch.testing.assert_close(
        got, torch.tensor(expected, dtype=torch.float64).to(got.dtype), rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("spec", SPECS)
@given(values=st.lists(singles, max_size=20))
def test_value_is_the_definition(spec, values):
    expected = [by_definition(spec, value) for value in values]
    pre = torch.tensor(values, dtype=torch.float32)
    assert_same(Activation.parse(spec)(pre), expected)
    assert_same(pre, values)  # left alone
    activated = Activation.parse(spec).apply_(pre)
    assert activated is pre
    assert_same(pre, expected)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_edge_cases_in_every_dtype(spec, dtype):
    pre = torch.tensor(EDGE_CASES, dtype=torch.float64).to(dtype)
    expected = [by_definition(spec, value) for value in pre.tolist()]
    got = Activation.parse(spec)(pre)
    assert got.dtype == dtype
    assert_same(got, expected)
    assert_same(Activation.parse(spec).apply_(pre.clone()), expected)


@pytest.mark.parametrize("spec", SPECS)
def test_nan_is_active_and_zero_is_not(spec):
    activated = Activation.parse(spec)(torch.tensor([NAN, 0.0, -0.0, -INF, INF]))
    assert (activated != 0).tolist() == [True, False, False, False, True]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fatrelu_compares_with_the_threshold_itself_in_low_precision(dtype):
    """0.1 is not representable: the nearest value above it is active, the nearest below is not."""
    candidates = torch.arange(0.09, 0.11, 1e-5, dtype=torch.float64).to(dtype)
    above, below = candidates[candidates.double() > 0.1].min(), candidates[candidates.double() < 0.1].max()
    activated = fatrelu(0.1)(torch.stack([below, above]))
    assert activated.tolist() == [0.0, above.item()]


@pytest.mark.parametrize("spec", SPECS)
def test_derivative_is_what_autograd_gives(spec):
    pre = torch.tensor([v for v in EDGE_CASES if not math.isinf(v)], dtype=torch.float64, requires_grad=True)
    act = Activation.parse(spec)
    (gradient,) = torch.autograd.grad(act(pre).sum(), pre)
    torch.testing.assert_close(derivative(act, pre.detach()), gradient, rtol=0, atol=0, equal_nan=True)


def test_derivative_by_hand():
    pre = torch.tensor([-1.0, 0.0, 0.25, 0.5, 3.0, NAN])
    assert_same(derivative(Activation("relu"), pre), [0, 0, 1, 1, 1, 1])
    assert_same(derivative(Activation("relu2"), pre), [0, 0, 0.5, 1, 6, NAN])
    assert_same(derivative(fatrelu(0.25), pre), [0, 0, 0, 1, 1, 1])


@pytest.mark.parametrize("spec", SPECS)
def test_derivative_against_finite_differences(spec):
    pre = torch.tensor([-2.0, -0.3, 0.1, 0.6, 2.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(Activation.parse(spec), (pre,))


def test_any_shape():
    pre = torch.tensor([[[-1.0, 2.0]], [[0.0, -3.0]]])
    assert Activation("relu2")(pre).tolist() == [[[0.0, 4.0]], [[0.0, 0.0]]]
    assert tuple(fatrelu(1)(torch.zeros(3, 0)).shape) == (3, 0)


@pytest.mark.parametrize(
    ("spec", "activation"),
    [
        ("relu", Activation("relu", 0.0)),
        ("relu2", Activation("relu2", 0.0)),
        ("drelu", Activation("drelu", 0.0)),
        ("fatrelu(0.1)", Activation("fatrelu", 0.1)),
        ("fatrelu( 1e-3 )", Activation("fatrelu", 0.001)),
        ("fatrelu(2)", Activation("fatrelu", 2.0)),
        (Activation("fatrelu", 0.5), Activation("fatrelu", 0.5)),
    ],
)
def test_parse(spec, activation):
    assert Activation.parse(spec) == activation


@given(st.floats(min_value=0, allow_infinity=False))
def test_spec_reads_back_as_the_same_activation(threshold):
    assert Activation.parse(fatrelu(threshold).spec) == Activation("fatrelu", threshold)


def test_spec_of_the_plain_activations():
    names = ["relu", "relu2", "drelu"]
    assert [Activation(name).spec for name in names] == names
    assert Activation() == Activation("relu", 0.0)


@pytest.mark.parametrize("spec", SPECS)
def test_factor_is_up_or_its_relu(spec):
    act, up = Activation.parse(spec), torch.tensor(EDGE_CASES, dtype=torch.float64, requires_grad=True)
    factor = act.factor(up)
    expected = torch.relu(up) if spec == "drelu" else up
    assert_same(factor.detach(), expected.tolist())
    assert_same(act.factor_(up.detach().clone()), expected.tolist())
    (gradient,) = torch.autograd.grad(expected.sum(), up)
    assert_same(act.factor_backward(torch.ones_like(factor), up.detach()), gradient.tolist())
    infinite = act.factor_backward(torch.full_like(factor, INF), up.detach())
    assert not infinite.isnan().any()


@pytest.mark.parametrize("spec", SPECS)
def test_only_drelu_needs_a_gate(spec):
    act = Activation.parse(spec)
    act.check_gated(True)
    if spec != "drelu":
        act.check_gated(False)
        return
    message = r"^activation: got 'drelu' for a non-gated block; accepted: .*'drelu' for gated blocks only"
    with pytest.raises(ValueError, match=message):
        act.check_gated(False)


@pytest.mark.parametrize("spec", ["silu", "", "ReLU", "fatrelu", "fatrelu()", "fatrelu(x)", "drelu(0)"])
def test_parse_refuses_other_strings_by_name(spec):
    accepted = r"'relu' \| 'relu2' \| 'fatrelu\(THRESHOLD\)' with THRESHOLD >= 0 \| 'drelu'"
    with pytest.raises(ValueError, match=rf"^activation: got .*; accepted: {accepted}") as error:
        Activation.parse(spec)
    assert repr(spec) in str(error.value)


@pytest.mark.parametrize("threshold", ["-1", "nan", "inf"])
def test_parse_refuses_other_thresholds_by_name(threshold):
    message = rf"^activation threshold: got {threshold}.*; accepted: a finite number >= 0"
    with pytest.raises(ValueError, match=message):
        Activation.parse(f"fatrelu({threshold})")


@pytest.mark.parametrize("spec", [None, 3, torch.relu])
def test_parse_refuses_other_types_by_name(spec):
    with pytest.raises(ValueError, match=rf"^activation: got a {type(spec).__name__}; accepted: 'relu'"):
        Activation.parse(spec)


def test_constructor_refuses_by_name():
    with pytest.raises(
        ValueError, match=r"^activation: got 'gelu'; accepted: 'relu' \| 'relu2' \| 'fatrelu'"
    ):
        Activation("gelu")
    for threshold in (-0.5, NAN, INF):
        with pytest.raises(
            ValueError, match=r"^activation threshold: got .*; accepted: a finite number >= 0"
        ):
            fatrelu(threshold)
    for name in ("relu", "relu2", "drelu"):
        with pytest.raises(ValueError, match=rf"^activation threshold: got 0\.5; accepted: 0 for '{name}'"):
            Activation(name, 0.5)
