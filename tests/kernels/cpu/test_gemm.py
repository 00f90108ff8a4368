"""Products in another form than F.linear's: taken only if clearly faster and as accurate."""

from __future__ import annotations

import pytest
import torch

from twell.kernels.cpu import gemm, measurements

pytestmark = pytest.mark.real_cpu


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("TWELL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(measurements, "_known", {})


@pytest.mark.parametrize("tokens", [1, 2, 13, 64])
@pytest.mark.parametrize(("outputs", "inputs"), [(24, 1000), (512, 256), (9, 10)])
def test_both_forms_multiply(tokens, outputs, inputs):
    torch.manual_seed(0)
    x, weight = torch.randn(tokens, inputs), torch.randn(outputs, inputs)
    forms = [gemm._weight_first]
    if tokens == 1 and gemm._trial(1, outputs, inputs, 1, False)[0] is not None:
        forms.append(gemm._onednn)
    exact = x.double() @ weight.double().mT
    # However a sum of n products is ordered, it errs by at most n units of what its terms add up to.
    bound = inputs * torch.finfo(torch.float32).eps * (x.double().abs() @ weight.double().abs().mT)
    for form in forms:
        product = form(x, weight)
        assert product.is_contiguous()
        assert product.dtype == torch.float32
        assert ((product - exact).abs() <= bound).all()


def test_a_form_that_rounds_worse_is_not_taken(monkeypatch):
    def careless(x, weight):
        return (x.bfloat16().float() @ weight.mT).contiguous()

    torch.manual_seed(0)
    x, weight = torch.randn(4, 64), torch.randn(32, 64)
    assert not gemm._is_as_accurate(careless, x, weight)
    assert gemm._is_as_accurate(torch.nn.functional.linear, x, weight)
    assert gemm._gain(careless, 4, 32, 64, False) == gemm._ROUNDS_WORSE


@pytest.mark.parametrize(("gain", "other"), [(2.0, True), (1.05, False), (0.5, False), (1e-3, False)])
@pytest.mark.parametrize("tokens", [1, 13])
def test_a_form_must_be_clearly_faster(gain, other, tokens, monkeypatch):
    monkeypatch.setattr(gemm, "_ONEDNN_LINEAR", object())
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(measurements, "measured", lambda name, measure, otherwise: gain)
    gemm._trial.cache_clear()
    form = gemm.best_form(tokens, 512, 512, 1)
    gemm._trial.cache_clear()
    taken = gemm._onednn if tokens == 1 else gemm._weight_first
    assert form is (taken if other else torch.nn.functional.linear)


@pytest.mark.parametrize("reason", ["tokens", "dtype", "small", "strides", "named"])
def test_where_there_is_no_choice_nothing_is_measured(reason, monkeypatch):
    monkeypatch.setattr(gemm, "best_form", None)  # a call would fail
    x, weight = torch.randn(8, 512), torch.randn(512, 512)
    if reason == "tokens":
        x = torch.randn(65, 512)
    elif reason == "dtype":
        x, weight = x.double(), weight.double()
    elif reason == "small":
        x, weight = x[:, :64], weight[:64, :64].contiguous()
    elif reason == "strides":
        weight = weight.repeat(1, 2)[:, ::2]
    product = gemm.multiply(x, weight, tuned=reason != "named")
    assert torch.equal(product, torch.nn.functional.linear(x, weight))


@pytest.mark.parametrize("tokens", [0, 1, 2, 63, 64, 65])
@pytest.mark.parametrize("transposed", [False, True])
def test_few_tokens_take_the_faster_form(tokens, transposed, monkeypatch):
    monkeypatch.setattr(gemm, "_ONEDNN_LINEAR", object())
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(measurements, "measured", lambda name, measure, otherwise: 2.0)
    weight = torch.empty(512, 768).mT if transposed else torch.empty(768, 512)
    gemm._trial.cache_clear()
    form = gemm.form_for(tokens, weight)
    gemm._trial.cache_clear()
    if 0 < tokens <= 64:
        one = tokens == 1 or transposed
        assert form is (gemm._onednn if one else gemm._weight_first)
    else:
        assert form is None


def test_a_real_trial():
    form = gemm.best_form(4, 512, 512, 1)
    assert form in (torch.nn.functional.linear, gemm._weight_first)
    assert len(measurements.kept_measurements()) == 1
    gemm.remeasure(4, 512, 512, 1)
    assert len(measurements.kept_measurements()) == 1


def test_trials_leave_the_random_state_and_the_defaults_alone():
    state, dtype = torch.get_rng_state(), torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            gemm.best_form(1, 512, 256, 1)
            gemm.best_form(5, 512, 256, 1)
    finally:
        torch.set_default_dtype(dtype)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_units_for_16_bits_are_asked_for(dtype):
    assert isinstance(gemm.has_native_gemm(dtype), bool)
    assert dtype != torch.float32 or not gemm.has_native_gemm(dtype)
