"""`SparseMLP` against Hugging Face's LlamaMLP, and how its memory layout stays inside."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from twell import Plan, SparseMLP, reference

PLANS = [None, Plan(path="row"), Plan(path="block"), Plan(path="dense")]


def llama_mlp(bias: bool = False) -> LlamaMLP:
    config = LlamaConfig(hidden_size=32, intermediate_size=96, hidden_act="relu", mlp_bias=bias)
    return LlamaMLP(config)


def neuron_major(mlp: SparseMLP) -> bool:
    return mlp.down_proj.weight.shape == (32, 96) and mlp.down_proj.weight.mT.is_contiguous()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("assign", [False, True])
def test_state_dict_goes_both_ways(bias, assign):
    stock, ours = llama_mlp(bias), SparseMLP(32, 96, bias=bias)
    ours.load_state_dict(stock.state_dict(), assign=assign)
    assert neuron_major(ours)
    back = llama_mlp(bias)
    back.load_state_dict(ours.state_dict(), assign=assign)
    x = torch.randn(2, 5, 32)
    for plan in PLANS:
        ours.plan = plan
        torch.testing.assert_close(ours(x), stock(x))
    assert torch.equal(back(x), stock(x))
    for key, tensor in stock.state_dict().items():
        assert torch.equal(ours.state_dict()[key], tensor)


def test_layout_never_leaks_into_a_state_dict_or_file(tmp_path):
    model = nn.Sequential(SparseMLP(32, 96), SparseMLP(32, 96))
    state = model.state_dict()
    assert all(tensor.is_contiguous() for tensor in state.values())
    save_file(state, tmp_path / "model.safetensors")  # refuses non-contiguous tensors
    read = load_file(tmp_path / "model.safetensors")
    assert torch.equal(read["1.down_proj.weight"], model[1].down_proj.weight)
    assert set(state) == {f"{i}.{name}_proj.weight" for i in (0, 1) for name in ("gate", "up", "down")}


def test_keep_vars_gives_the_parameters_themselves():
    mlp = SparseMLP(32, 96)
    assert mlp.state_dict(keep_vars=True)["down_proj.weight"] is mlp.down_proj.weight


@pytest.mark.parametrize(
    "move",
    [
        lambda mlp: mlp.to(torch.bfloat16),
        lambda mlp: mlp.double().float(),
        copy.deepcopy,
        lambda mlp: pickle.loads(pickle.dumps(mlp)),
        lambda mlp: mlp.to("meta").to_empty(device="cpu"),
    ],
    ids=["bf16", "double", "deepcopy", "pickle", "to_empty"],
)
def test_layout_survives(move):
    assert neuron_major(move(SparseMLP(32, 96)))


def test_loading_keeps_the_parameter_that_optimisers_hold():
    mlp = SparseMLP(32, 96)
    mlp.down_proj.weight.data = mlp.down_proj.weight.data.contiguous()
    held = mlp.down_proj.weight
    mlp.load_state_dict(mlp.state_dict())
    assert mlp.down_proj.weight is held
    assert neuron_major(mlp)


def test_an_optimiser_step_keeps_layout_and_reduces_loss():
    mlp = SparseMLP(32, 96, bias=True, record=True)
    optimiser = torch.optim.AdamW(mlp.parameters(), lr=1e-2)
    x, target = torch.randn(64, 32), torch.randn(64, 32)
    losses = []
    for _ in range(20):
        loss = (mlp(x) - target).square().mean() + 1e-3 * mlp.last_stats.l1
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    assert neuron_major(mlp)


@pytest.mark.parametrize(("gated", "activation"), [(True, "relu2"), (False, "relu2"), (True, "drelu")])
@pytest.mark.parametrize("plan", PLANS)
def test_recorded_statistics_match_the_oracle(gated, activation, plan):
    mlp = SparseMLP(32, 96, gated=gated, activation=activation, up_bias=True, record=True, plan=plan)
    x = torch.randn(3, 7, 32)
    mlp(x)
    gate = mlp.gate_proj.weight if gated else None
    exact = reference.ffn(
        x, mlp.up_proj.weight, mlp.down_proj.weight, gate, activation=activation, up_bias=mlp.up_proj.bias
    )
    assert torch.equal(mlp.last_stats.firing, exact.firing)
    torch.testing.assert_close(mlp.last_stats.l0, exact.l0)
    torch.testing.assert_close(mlp.last_stats.l1, exact.l1)


def test_drelu_through_wrapped_projections():
    mlp = SparseMLP(32, 96, activation="drelu", record=True)
    x = torch.randn(3, 7, 32)
    wanted, stats = mlp(x), mlp.last_stats
    mlp.up_proj.register_forward_hook(lambda *_: None)  # its own forward has to run
    torch.testing.assert_close(mlp(x), wanted)
    torch.testing.assert_close(mlp.last_stats.l1, stats.l1)
    assert torch.equal(mlp.last_stats.firing, stats.firing)
    assert "drelu" in repr(mlp)


def test_nothing_is_recorded_unless_asked():
    mlp = SparseMLP(32, 96)
    mlp(torch.randn(2, 32))
    assert mlp.last_stats is None


def test_a_copy_does_not_carry_the_graph():
    mlp = SparseMLP(32, 96, record=True)
    mlp(torch.randn(2, 32))
    assert mlp.last_stats.l1.requires_grad
    assert copy.deepcopy(mlp).last_stats is None


class _Doubled(nn.Module):
    """A wrapper that changes a projection, as adapters do."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return 2 * self.inner(x)


class TestProjectionsThatAreNotPlain:
    """Their own forward must run: reading `.weight` would silently drop what they add."""

    @pytest.mark.parametrize("gated", [True, False])
    def test_wrapped(self, gated, caplog, monkeypatch):
        monkeypatch.setattr("twell._log._logged", set())
        mlp = SparseMLP(32, 96, gated=gated, record=True, plan=Plan(path="row"))
        x = torch.randn(4, 32)
        plain = mlp(x)
        stats = mlp.last_stats
        mlp.down_proj = _Doubled(mlp.down_proj)
        torch.testing.assert_close(mlp(x), 2 * plain)
        torch.testing.assert_close(mlp.last_stats.l1, stats.l1)
        assert torch.equal(mlp.last_stats.firing, stats.firing)
        assert "not a plain nn.Linear" in caplog.text

    def test_hooked(self):
        mlp = SparseMLP(32, 96)
        seen = []
        mlp.up_proj.register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
        mlp(torch.randn(4, 32))
        assert seen == [(4, 96)]

    def test_patched_forward(self):
        mlp = SparseMLP(32, 96)
        mlp.up_proj.forward = lambda x: torch.zeros(*x.shape[:-1], 96)
        assert not mlp(torch.randn(4, 32)).any()

    def test_backward_hook(self):
        mlp = SparseMLP(32, 96)
        seen = []
        mlp.up_proj.register_full_backward_hook(lambda module, inputs, outputs: seen.append(module))
        mlp(torch.randn(4, 32)).sum().backward()
        assert seen == [mlp.up_proj]

    def test_offloaded_by_accelerate(self):
        accelerate = pytest.importorskip("accelerate")
        mlp = SparseMLP(32, 96)
        x = torch.randn(4, 32)
        plain = mlp(x)
        accelerate.cpu_offload(mlp, execution_device=torch.device("cpu"))
        torch.testing.assert_close(mlp(x), plain)

    def test_a_wrapped_down_projection_saves_contiguous(self):
        mlp = SparseMLP(32, 96)
        mlp.down_proj = _Doubled(mlp.down_proj)
        assert mlp.state_dict()["down_proj.inner.weight"].is_contiguous()

    def test_parametrised(self):
        mlp = SparseMLP(32, 96)
        x = torch.randn(4, 32)
        plain = mlp(x)
        nn.utils.parametrizations.weight_norm(mlp.up_proj)
        torch.testing.assert_close(mlp(x), plain)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("record", [False, True])
def test_compiles_without_graph_break(fresh_compiler, plan, record):
    mlp = SparseMLP(32, 96, plan=plan, record=record)
    compiled = torch.compile(mlp, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 5, 32)
    torch.testing.assert_close(compiled(x), mlp(x))
    compiled(x).sum().backward()
    assert mlp.down_proj.weight.grad.abs().sum() > 0


def test_repr_says_what_it_is():
    text = repr(SparseMLP(32, 96, gated=False, activation="fatrelu(0.5)", plan=Plan(path="row")))
    assert "non-gated" in text
    assert "fatrelu(0.5)" in text
    assert "path='row'" in text


def test_stock_strides_on_request():
    mlp = SparseMLP(32, 96, neuron_major=False)
    stock = llama_mlp()
    mlp.load_state_dict(stock.state_dict(), assign=True)
    assert all(parameter.is_contiguous() for parameter in mlp.parameters())
    x = torch.randn(4, 32)
    for plan in PLANS:
        mlp.plan = plan
        torch.testing.assert_close(mlp(x), stock(x))


def test_switching_the_record_off_forgets_the_statistics():
    mlp = SparseMLP(32, 96, record=True)
    mlp(torch.randn(2, 32))
    mlp.record = False
    mlp(torch.randn(2, 32))
    assert mlp.last_stats is None


def test_meta_device():
    mlp = SparseMLP(32, 96, device="meta")
    assert mlp(torch.empty(2, 32, device="meta")).shape == (2, 32)


def test_bad_options():
    with pytest.raises(ValueError, match=r"plan: got a str; accepted: a twell.Plan"):
        SparseMLP(32, 96, plan="row")
    with pytest.raises(ValueError, match="activation: got 'drelu' for a non-gated block; accepted: 'relu'"):
        SparseMLP(32, 96, gated=False, activation="drelu")
    with pytest.raises(ValueError, match="gate_bias: got True; accepted: None or False"):
        SparseMLP(32, 96, gated=False, gate_bias=True)


@pytest.mark.parametrize("sizes", [(0, 96), (32, -1), (32.0, 96)])
def test_bad_sizes(sizes):
    with pytest.raises(ValueError, match="accepted: an integer >= 1"):
        SparseMLP(*sizes)


def test_projections_whose_parameters_became_plain_tensors():
    """As in the replicas of nn.DataParallel, and in FSDP1's flat parameters."""
    torch.manual_seed(0)
    mlp = SparseMLP(16, 32, bias=True)
    x = torch.randn(3, 16)
    expected = mlp(x)
    for projection in (mlp.gate_proj, mlp.up_proj, mlp.down_proj):
        for name in ("weight", "bias"):
            tensor = projection._parameters.pop(name).detach()
            setattr(projection, name, tensor)
    assert torch.equal(mlp(x), expected)


def test_x_of_another_width_is_named():
    with pytest.raises(ValueError, match=r"x: got shape \(3, 17\)"):
        SparseMLP(16, 32)(torch.randn(3, 17))


@pytest.mark.parametrize("plan", [None, Plan(path="row")], ids=["auto", "row"])
def test_an_eager_call_does_not_make_compiled_code_compile_again(fresh_compiler, plan):
    torch._dynamo.utils.counters.clear()
    mlp, x = SparseMLP(16, 32, plan=plan).requires_grad_(False), torch.randn(3, 16)
    compiled = torch.compile(mlp, backend="eager", fullgraph=True)
    for _ in range(2):
        compiled(x)
        mlp(x)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_a_dtype_that_is_not_the_blocks_is_named():
    with pytest.raises(ValueError, match=r"x: got dtype torch\.float64; accepted: torch\.float32"):
        SparseMLP(16, 32)(torch.randn(3, 16, dtype=torch.float64))
