"""The oracle, checked against a loop over tokens and neurons and against stock modules."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from twell import Activation
from twell.reference import ffn, relative_error

# A few hundred float64 additions in another order: far above the rounding, far below any mistake.
TIGHT = {"rtol": 1e-12, "atol": 1e-13}
SPECS = [
    *((gated, spec) for gated in (True, False) for spec in ("relu", "relu2", "fatrelu(0.3)")),
    (True, "drelu"),
]


def scalar_activation(spec: str, value: float) -> float:
    if value <= (0.3 if spec.startswith("fatrelu") else 0.0):
        return 0.0
    return value**2 if spec == "relu2" else value


def dot(left: list[float], right: list[float], bias: float = 0.0) -> float:
    return math.fsum([a * b for a, b in zip(left, right, strict=True)] + [bias])


def naive_ffn(operands: dict[str, Tensor], spec: str) -> dict[str, list | float]:
    """One token and one neuron at a time, in Python floats."""
    x, up, down = (operands[name].tolist() for name in ("x", "up", "down"))
    gate = operands["gate"].tolist() if "gate" in operands else None
    neurons, outputs = len(up), len(down)
    up_bias, gate_bias, down_bias = (
        operands[name].tolist() if name in operands else [0.0] * size
        for name, size in (("up_bias", neurons), ("gate_bias", neurons), ("down_bias", outputs))
    )
    y, hidden, l1_terms, fired = [], [], [], [0] * neurons
    for token in x:
        row = []
        for n in range(neurons):
            value = dot(token, up[n], up_bias[n])
            if gate is None:
                selected = value = scalar_activation(spec, value)
            else:
                selected = scalar_activation(spec, dot(token, gate[n], gate_bias[n]))
                value = selected * (scalar_activation(spec, value) if spec == "drelu" else value)
            fired[n] += selected != 0
            row.append(value)
        l1_terms += [abs(value) for value in row]
        hidden.append(row)
        y.append([dot(row, down[d], down_bias[d]) for d in range(outputs)])
    tokens = len(x)
    return {
        "y": y,
        "hidden": hidden,
        "l1": math.fsum(l1_terms) / tokens,
        "l0": sum(fired) / tokens,
        "firing": fired,
    }


def random_operands(*, gated: bool, biased: bool, tokens: int = 6, seed: int = 0) -> dict[str, Tensor]:
    hidden, neurons, outputs = 5, 11, 4  # an output width of its own, to catch a mixed-up axis
    generator = torch.Generator().manual_seed(seed)
    shapes = {"x": (tokens, hidden), "up": (neurons, hidden), "down": (outputs, neurons)}
    if gated:
        shapes["gate"] = (neurons, hidden)
    if biased:
        shapes |= {"up_bias": (neurons,), "down_bias": (outputs,)}
        if gated:
            shapes["gate_bias"] = (neurons,)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()
    }


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(("gated", "spec"), SPECS)
def test_equals_the_loop_over_tokens_and_neurons(gated, biased, spec):
    operands = random_operands(gated=gated, biased=biased)
    expected = naive_ffn(operands, spec)
    result = ffn(**operands, activation=spec, dtype=torch.float64)
    for name in ("y", "hidden", "l1", "l0"):
        got = getattr(result, name)
        torch.testing.assert_close(got, torch.tensor(expected[name], dtype=torch.float64), **TIGHT)
    assert result.firing.dtype == torch.int64
    assert result.firing.tolist() == expected["firing"]
    assert 0 < sum(expected["firing"]) < 66  # the case holds both active and inactive neurons
    if spec == "drelu":  # and active ones whose up is clamped
        assert (result.hidden != 0).sum() < result.firing.sum()


def test_float32_is_the_default_and_stays_within_its_rounding():
    operands = random_operands(gated=True, biased=True)
    result = ffn(**operands)
    assert {t.dtype for t in (result.y, result.hidden, result.l1, result.l0)} == {torch.float32}
    assert relative_error(result.y, torch.tensor(naive_ffn(operands, "relu")["y"])) < 1e-6


def test_low_precision_operands_are_widened_before_any_arithmetic():
    operands = {name: t.bfloat16() for name, t in random_operands(gated=True, biased=True).items()}
    result = ffn(**operands, dtype=torch.float64)
    exact = naive_ffn({name: t.double() for name, t in operands.items()}, "relu")
    torch.testing.assert_close(result.y, torch.tensor(exact["y"], dtype=torch.float64), **TIGHT)


def test_leading_dimensions_are_kept():
    operands = random_operands(gated=True, biased=True, tokens=6)
    flat = ffn(**operands, dtype=torch.float64)
    operands["x"] = operands["x"].reshape(2, 3, 5)
    shaped = ffn(**operands, dtype=torch.float64)
    assert tuple(shaped.y.shape) == (2, 3, 4)
    assert tuple(shaped.hidden.shape) == (6, 11)
    torch.testing.assert_close(shaped.y.reshape(6, 4), flat.y, **TIGHT)
    operands["x"] = operands["x"][0, 0]
    assert tuple(ffn(**operands).y.shape) == (4,)


def test_activation_object_is_accepted():
    operands = random_operands(gated=True, biased=False)
    by_object = ffn(**operands, activation=Activation("fatrelu", 0.3), dtype=torch.float64)
    expected = naive_ffn(operands, "fatrelu(0.3)")["y"]
    torch.testing.assert_close(by_object.y, torch.tensor(expected, dtype=torch.float64), **TIGHT)


@pytest.mark.parametrize("shape", [(0, 5), (2, 0, 5)])
def test_empty_batch(shape):
    operands = random_operands(gated=True, biased=True)
    operands["x"] = torch.zeros(shape, dtype=torch.float64)
    result = ffn(**operands)
    assert tuple(result.y.shape) == (*shape[:-1], 4)
    assert tuple(result.hidden.shape) == (0, 11)
    assert (result.l1.item(), result.l0.item()) == (0.0, 0.0)
    assert result.firing.tolist() == [0] * 11


@pytest.mark.parametrize("spec", [spec for gated, spec in SPECS if gated])
def test_nan_gate_is_active_and_reaches_its_token_only(spec):
    gate = torch.tensor([[math.nan, 1.0], [1.0, 0.0]])
    x = torch.tensor([[1.0, 1.0], [2.0, 0.0]])
    up, down = torch.ones(2, 2), torch.ones(3, 2)
    result = ffn(x, up, down, gate, activation=spec)
    assert result.firing.tolist() == [2, 2]
    assert result.y.isnan().all()
    gate_bias = torch.tensor([math.nan, -9.0])
    gate = torch.tensor([[0.0, 0.0], [9.0, 9.0]])
    result = ffn(x, up, down, gate, gate_bias=gate_bias, activation=spec)
    assert result.firing.tolist() == [2, 2]
    assert result.hidden.isnan().tolist() == [[True, False], [True, False]]
    x = torch.tensor([[math.nan, 1.0], [1.0, 0.0]])
    result = ffn(x, up, down, torch.eye(2), activation=spec)
    assert result.firing.tolist() == [2, 1]
    assert result.y.isnan().tolist() == [[True] * 3, [False] * 3]


def test_l0_counts_the_gate_even_where_the_product_is_zero():
    x = torch.tensor([[1.0, 0.0]])
    result = ffn(x, torch.zeros(2, 2), torch.ones(2, 2), torch.eye(2))
    assert (result.l0.item(), result.l1.item()) == (1.0, 0.0)
    assert result.firing.tolist() == [1, 0]


def test_drelu_by_hand():
    """Hidden values are not 0 where gate and up are above 0; firing counts those with a gate above 0."""
    nan = math.nan
    x = torch.ones(1, 1)
    gate = torch.tensor([[2.0], [2.0], [2.0], [-2.0], [-2.0], [0.0], [2.0]])
    up = torch.tensor([[3.0], [-3.0], [0.0], [3.0], [-3.0], [3.0], [nan]])
    result = ffn(x, up, torch.eye(7), gate, activation="drelu")
    assert result.firing.tolist() == [1, 1, 1, 0, 0, 0, 1]
    assert result.hidden[0, :6].tolist() == [6.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert result.hidden[0, 6].isnan()
    gate, up = (weight[:6].clone().requires_grad_() for weight in (gate, up))
    result = ffn(x, up, torch.eye(6), gate, activation="drelu")
    for loss in (result.y.sum(), result.l1):  # L1's sign is 0 where hidden is
        grads = torch.autograd.grad(loss, (gate, up), retain_graph=True)
        assert [grad.flatten().tolist() for grad in grads] == [[3.0] + [0.0] * 5, [2.0] + [0.0] * 5]


def test_drelu_needs_a_gate():
    operands = random_operands(gated=False, biased=False)
    with pytest.raises(ValueError, match="activation: got 'drelu' for a non-gated block; accepted: 'relu'"):
        ffn(**operands, activation="drelu")


def test_l1_gradient_is_the_sign_of_the_hidden_values_over_tokens():
    operands = random_operands(gated=True, biased=False)
    up = operands["up"].requires_grad_()
    result = ffn(**operands, dtype=torch.float64)
    (gradient,) = torch.autograd.grad(result.l1, up)
    activated = torch.relu(operands["x"] @ operands["gate"].T)
    signed = activated * (operands["x"] @ up.detach().T).sign()
    torch.testing.assert_close(gradient, signed.T @ operands["x"] / 6, **TIGHT)
    assert not result.l0.requires_grad


@pytest.mark.parametrize(("gated", "spec"), [(True, "relu"), (False, "relu"), (True, "drelu")])
def test_differentiable_in_every_operand(gated, spec):
    operands = random_operands(gated=gated, biased=True, tokens=3)
    names = list(operands)

    def outputs(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        result = ffn(**dict(zip(names, tensors, strict=True)), activation=spec, dtype=torch.float64)
        return result.y, result.l1

    leaves = tuple(tensor.requires_grad_() for tensor in operands.values())
    assert torch.autograd.gradcheck(outputs, leaves)


@pytest.mark.parametrize("biased", [False, True])
def test_equals_the_stock_llama_mlp(biased):
    llama = pytest.importorskip("transformers.models.llama.modeling_llama", reason="needs transformers")
    config = llama.LlamaConfig(
        hidden_size=24, intermediate_size=56, num_attention_heads=4, hidden_act="relu", mlp_bias=biased
    )
    torch.manual_seed(0)
    mlp = llama.LlamaMLP(config).double()
    x = torch.randn(2, 7, 24, dtype=torch.float64)
    biases = (
        {f"{name}_bias": getattr(mlp, f"{name}_proj").bias for name in ("gate", "up", "down")}
        if biased
        else {}
    )
    weights = (mlp.up_proj.weight, mlp.down_proj.weight, mlp.gate_proj.weight)
    result = ffn(x, *weights, **biases, dtype=torch.float64)
    torch.testing.assert_close(result.y, mlp(x), **TIGHT)
    assert relative_error(ffn(x, *weights, **biases).y, mlp(x)) < 1e-6


def test_equals_the_stock_nemotron_mlp():
    """A non-gated block with squared ReLU."""
    nemotron = pytest.importorskip(
        "transformers.models.nemotron.modeling_nemotron", reason="needs transformers"
    )
    config = nemotron.NemotronConfig(
        hidden_size=24, intermediate_size=56, num_attention_heads=4, hidden_act="relu2", mlp_bias=True
    )
    torch.manual_seed(0)
    mlp = nemotron.NemotronMLP(config).double()
    x = torch.randn(9, 24, dtype=torch.float64)
    result = ffn(
        x,
        mlp.up_proj.weight,
        mlp.down_proj.weight,
        activation="relu2",
        up_bias=mlp.up_proj.bias,
        down_bias=mlp.down_proj.bias,
        dtype=torch.float64,
    )
    torch.testing.assert_close(result.y, mlp(x), **TIGHT)


def test_relative_error_by_hand():
    exact = torch.tensor([3.0, 4.0])
    assert relative_error(exact, exact) == 0.0
    assert relative_error(torch.tensor([3.0, 4.5]), exact) == pytest.approx(0.1, rel=1e-12)
    assert relative_error(torch.zeros(2), torch.zeros(2)) == 0.0
    assert relative_error(exact, torch.zeros(2)) == math.inf
    assert math.isnan(relative_error(torch.tensor([math.nan, 4.0]), exact))
    # float32 sums of squares would overflow
    assert relative_error(torch.tensor([2e30]), torch.tensor([1e30])) == pytest.approx(1.0, rel=1e-6)
