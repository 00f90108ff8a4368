"""`prune_` on plain modules: exact on what was counted, every kind of projection, nothing half done."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import twell
from twell.pruning.firing import recorded_firing
from twell.pruning.selection import most_firing, rounded_size
from twell.shares import keep_shares, stored_shares
from twell.sparsify.blocks import named_blocks

from .neurons import assert_same_state, kill, state_of

D, H = 12, 40


class Gated(nn.Module):
    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.intermediate_size = H
        self.w1, self.w3 = nn.Linear(D, H, bias=bias), nn.Linear(D, H, bias=bias)
        self.w2 = nn.Linear(H, D, bias=bias)

    def forward(self, x):
        return self.w2(torch.relu(self.w1(x)) * self.w3(x))


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(D, H), nn.ReLU(), nn.Linear(H, D))

    def forward(self, x):
        return self.net(x)


class Halves(nn.Module):
    """Up first: its code splits by a size that it has kept."""

    def __init__(self, kept_as: str = "ffn_dim") -> None:
        super().__init__()
        self.fused, self.out = nn.Linear(D, 2 * H), nn.Linear(H, D)
        self.kept_as = kept_as
        setattr(self, kept_as, H)

    def forward(self, x):
        size = getattr(self, self.kept_as)
        up, gate = self.fused(x).split([size, size], dim=-1)
        return self.out(torch.relu(gate) * up)


class Alternating(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fused, self.out = nn.Linear(D, 2 * H), nn.Linear(H, D, bias=False)

    def forward(self, x):
        both = self.fused(x)
        return self.out(torch.relu(both[..., ::2]) * both[..., 1::2])


class Transposed(nn.Module):
    """As GPT-2's."""

    def __init__(self) -> None:
        super().__init__()
        conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
        self.c_fc, self.c_proj = conv1d(H, D), conv1d(D, H)

    def forward(self, x):
        return self.c_proj(torch.relu(self.c_fc(x)))


class Layer(nn.Module):
    """Projections that the code of a layer calls one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(D, H), nn.ReLU(), nn.Linear(H, D)
        self.norm = nn.LayerNorm(D)

    def forward(self, x):
        y = self.fc1(self.norm(x))
        y = self.act(y)
        y = self.fc2(y)
        return x + y


KINDS = {
    "SparseMLP": lambda: twell.SparseMLP(D, H),
    "SparseMLP, biases": lambda: twell.SparseMLP(D, H, bias=True, activation="relu2"),
    "SparseMLP, non-gated": lambda: twell.SparseMLP(D, H, gated=False, up_bias=True),
    "SparseMLP, fatrelu": lambda: twell.SparseMLP(D, H, activation="fatrelu(0.1)", neuron_major=False),
    "SparseMLP, drelu": lambda: twell.SparseMLP(D, H, activation="drelu"),
    "gated": Gated,
    "gated, biases": lambda: Gated(bias=True),
    "non-gated": Plain,
    "halves": Halves,
    "alternating": Alternating,
    "Conv1D": Transposed,
    "layer": Layer,
}


def tokens(*leading: int) -> torch.Tensor:
    return torch.randn(*leading, D, generator=torch.Generator().manual_seed(1))


def two_blocks(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(KINDS[kind](), KINDS[kind]()).eval()
    twell.sparsify_(model)
    return model


class TestEveryKind:
    @pytest.mark.parametrize("kind", KINDS)
    def test_computes_the_same_on_what_was_counted(self, kind):
        model, x = two_blocks(kind), tokens(7, 9)
        living = kill(model, 21, 16)
        with recorded_firing(model) as recorded, torch.no_grad():
            expected = model(x)
        strides = {name: p.stride() for name, p in model.named_parameters()}
        report = twell.prune_(model, data=[x[:3], x[3:]])
        fired = [(recorded[name].firing > 0).sum().item() for name in living]
        assert [row.after for row in report.blocks] == [rounded_size(n, H) for n in fired]
        assert [row.after for row in report.blocks] == [24, 16]
        assert [H - row.never_fired for row in report.blocks] == fired
        with torch.no_grad():
            torch.testing.assert_close(model(x), expected, rtol=1e-6, atol=1e-6)
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:  # stored by rows or by columns, as before
                assert (parameter.stride(0) == 1) == (strides[name][0] == 1)
        # The stock code of the pruned modules, too.
        twell.densify_(model)
        with torch.no_grad():
            torch.testing.assert_close(model(x), expected, rtol=1e-6, atol=1e-6)

    @pytest.mark.parametrize("kind", KINDS)
    def test_the_neurons_that_stay_are_those_that_fire(self, kind):
        model = two_blocks(kind)
        living = kill(model, 24)
        before = {
            name: [None if t is None else t.detach().clone() for t in block._plain_weights()]
            for name, block in named_blocks(model)
        }
        firing = {
            name: torch.zeros(H, dtype=torch.int64).index_fill(0, kept, 5) for name, kept in living.items()
        }
        twell.prune_(model, firing)
        for name, block in named_blocks(model):
            up, down, gate, up_bias, down_bias, gate_bias = before[name]
            kept = living[name]
            some = [None if t is None else t[kept] for t in (up, gate, up_bias, gate_bias)]
            wanted = (some[0], down[:, kept], some[1], some[2], down_bias, some[3])
            assert block.intermediate_size == 24
            for now, then in zip(block._plain_weights(), wanted, strict=True):
                assert (now is None) == (then is None)
                assert now is None or torch.equal(now, then)

    @pytest.mark.parametrize("kind", KINDS)
    def test_trains_and_saves_afterwards(self, kind):
        model = two_blocks(kind)
        kill(model, 16)
        model[0].requires_grad_(False)
        model.train()
        model(tokens(4)).sum().backward()
        twell.prune_(model, data=[tokens(50)])
        assert model.training
        assert not any(p.requires_grad for p in model[0].parameters())
        assert all(p.requires_grad for p in model[1].parameters())
        model(tokens(4)).sum().backward()
        assert all(p.grad.shape == p.shape for p in model[1].parameters() if p.grad is not None)
        state = model.state_dict()
        assert all(tensor.is_contiguous() for tensor in state.values())
        again = copy.deepcopy(model)
        again.load_state_dict(state)
        torch.testing.assert_close(again(tokens(4)), model(tokens(4)))


class TestSelection:
    @pytest.mark.parametrize(
        ("kept", "neurons", "size"),
        [
            (0, 40, 8),
            (1, 40, 8),
            (8, 40, 8),
            (9, 40, 16),
            (39, 39, 39),
            (33, 36, 36),
            (0, 5, 5),
            (1016, 4096, 1016),
            (1017, 4096, 1024),
            (1024, 4096, 1024),
            (1025, 4096, 1152),
            (4000, 4090, 4090),
        ],
    )
    def test_sizes(self, kept, neurons, size):
        assert rounded_size(kept, neurons) == size

    def test_fills_up_with_those_that_fired_most(self):
        firing = torch.tensor([0, 3, 1, 0, 9, 3, 0])
        assert most_firing(firing, 3).tolist() == [1, 4, 5]
        assert most_firing(firing, 5).tolist() == [0, 1, 2, 4, 5]

    def test_min_fires(self):
        model = nn.Sequential(twell.SparseMLP(D, H))
        firing = torch.arange(H)
        report = twell.prune_(model, [firing], min_fires=30)
        assert report.blocks == (twell.pruning.PrunedBlock("0", H, 16, 1),)
        up = copy.deepcopy(model[0].up_proj.weight)
        twell.prune_(model, {"0": firing[24:]}, min_fires=99)  # none: the eight that fired most stay
        assert torch.equal(model[0].up_proj.weight, up[8:])

    def test_nothing_to_remove_changes_nothing(self):
        model = two_blocks("gated")
        before = state_of(model)
        report = twell.prune_(model, [torch.ones(H, dtype=torch.int32)] * 2)
        assert report.parameters_before == report.parameters_after
        assert_same_state(model, before)


class TestReport:
    def test_counts_and_prints(self):
        model = nn.Sequential(twell.SparseMLP(D, H), nn.Linear(D, D, bias=False))
        firing = torch.zeros(H, dtype=torch.int64)
        firing[:10] = 1
        report = twell.prune_(model, {"0": firing})
        assert report.parameters_before == 3 * D * H + D * D
        assert report.parameters_after == 3 * D * 16 + D * D == sum(p.numel() for p in model.parameters())
        header, row, total = str(report).splitlines()
        assert header.split() == ["block", "neurons", "pruned", "to", "never", "fired"]
        assert row.split() == ["0", "40", "16", "30"]
        assert total == "parameters: 1,584 -> 720 (45.5%)"


class TestCounting:
    def test_flags_and_statistics_are_as_before(self):
        model = two_blocks("SparseMLP").train()
        model[1].eval()
        model[0].record = True
        twell.prune_(model, data=[tokens(5)])
        assert model.training
        assert model[0].training
        assert not model[1].training
        assert (model[0].record, model[1].record) == (True, False)
        assert not model[0]._forward_hooks
        assert not model[0]._forward_pre_hooks

    def test_recorders_inside_one_another(self):
        model, x = two_blocks("SparseMLP"), tokens(6)
        with recorded_firing(model) as outer, torch.no_grad():
            model(x)
            with recorded_firing(model) as inner:
                model(x)
                with pytest.raises(ValueError, match="x: got shape"):
                    model(torch.randn(2, D + 1))
            model(x)
        for name, block in named_blocks(model):
            assert (outer[name].tokens, inner[name].tokens) == (18, 6)
            assert torch.equal(outer[name].firing, 3 * inner[name].firing)
            assert not block.record
            assert block.last_stats is None

    def test_a_block_that_did_not_run_is_named(self):
        class Lazy(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.used, self.idle = twell.SparseMLP(D, H), twell.SparseMLP(D, H)

            def forward(self, x):
                return self.used(x)

        with pytest.raises(ValueError, match="data: got no token for which block 'idle' ran"):
            twell.prune_(Lazy(), data=[tokens(3)])


class TestRefused:
    def check(self, model, match, firing=None, **options):
        before = state_of(model)
        if firing is None and "data" not in options:
            firing = [torch.zeros(b.intermediate_size, dtype=torch.int64) for _, b in named_blocks(model)]
        with pytest.raises(ValueError, match=match):
            twell.prune_(model, firing, **options)
        assert_same_state(model, before)

    def test_arguments(self):
        model = two_blocks("SparseMLP")
        counts = torch.zeros(H, dtype=torch.int64)
        for firing, options, match in [
            (None, {"data": None}, "firing, data: got neither"),
            ([counts] * 2, {"data": [tokens(2)]}, "firing, data: got both"),
            ([counts] * 2, {"min_fires": 0}, "min_fires: got 0; accepted: an integer >= 1"),
            ([counts] * 2, {"min_fires": True}, "min_fires: got True"),
            ([counts], {}, "firing: got 1 entries"),
            (counts, {}, "firing: got a Tensor"),
            ({"0": counts}, {}, "firing: got missing block '1'"),
            ({"0": counts, "1": counts, "2": counts}, {}, "firing: got unknown block '2'"),
            ([counts, counts[1:]], {}, r"firing: got shape \(39,\) for block '1'; accepted: \(40,\)"),
            ([counts, counts.float()], {}, "firing: got torch.float32 for block '1'"),
            ([counts, counts - 1], {}, "firing: got -1 for block '1'"),
            ([counts, [0] * H], {}, "firing: got a list for block '1'"),
            (None, {"data": tokens(2)}, "data: got a Tensor"),
            (None, {"data": {"x": tokens(2)}}, "data: got a dict"),
            (None, {"data": [3]}, "data: got a batch that is a int"),
            (None, {"data": []}, "data: got no token for which block '0' ran"),
        ]:
            self.check(model, match, firing, **({"data": None} | options))
        with pytest.raises(ValueError, match="model: got a list"):
            twell.prune_([], [])

    def test_a_model_without_sparse_blocks(self):
        self.check(Plain(), r"model: got no sparse block; accepted: .*twell.sparsify_\(model\)", [])

    def test_projections_that_cannot_be_cut(self):
        def changed(change):
            model = two_blocks("SparseMLP")
            change(model[1])
            return model

        def wrap(mlp):
            mlp.up_proj = nn.Sequential(mlp.up_proj)

        for change, match in [
            (wrap, "block '1': a projection is a Sequential"),
            (lambda m: m.up_proj.register_forward_hook(lambda *_: None), "block '1': a projection has hooks"),
            (lambda m: m.up_proj.weight.register_hook(lambda g: g), "block '1': a weight has hooks"),
            (lambda m: nn.utils.parametrizations.weight_norm(m.down_proj), "block '1': a projection is"),
            (lambda m: m.to("meta"), "block '1': weights are on the meta device"),
            (lambda m: m.to(torch.float8_e4m3fn), "block '1': a projection's weight is torch.float8"),
        ]:
            self.check(changed(change), match)

    def test_weights_of_several_owners(self):
        model = two_blocks("SparseMLP")
        model[1].down_proj.weight = model[0].down_proj.weight
        self.check(model, "block '0': a weight is tied to that of another module")
        model = two_blocks("SparseMLP")
        model[1].up_proj = model[0].up_proj
        self.check(model, "block '1': a projection belongs to block '0' too")
        self.check(nn.DataParallel(two_blocks("SparseMLP")), "DataParallel; accepted: the module inside")

    def test_a_block_used_twice_is_pruned_once(self):
        mlp = twell.SparseMLP(D, H)
        model, x = nn.Sequential(mlp, nn.Tanh(), mlp), tokens(20)
        kill(model, 16)
        expected = model(x)
        assert len(twell.prune_(model, data=[x]).blocks) == 1
        torch.testing.assert_close(model(x), expected, rtol=1e-6, atol=1e-6)

    def test_code_that_keeps_its_size_elsewhere_undoes_everything(self):
        model = nn.Sequential(Gated(), Halves("breadth"))
        assert len(twell.sparsify_(model).blocks) == 2
        self.check(model, "block '1': with 8 neurons its forward is not that of a feed-forward block")


def test_a_config_that_another_model_shares_stays():
    from transformers import OPTConfig, OPTForCausalLM

    config = OPTConfig(
        vocab_size=64,
        hidden_size=32,
        ffn_dim=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        word_embed_proj_dim=32,
    )
    keep_shares(config, {"1": [0.5, 0.5]})
    model, teacher = OPTForCausalLM(config), OPTForCausalLM(config)
    twell.sparsify_(model)
    twell.prune_(model, [(torch.arange(64) < 20).long()] * 2)
    assert model.config.ffn_dim == 24
    assert model.model.decoder.config is model.config
    assert teacher.config.ffn_dim == config.ffn_dim == 64
    assert not stored_shares(model.config)  # they were shares of 64 neurons
    assert stored_shares(teacher.config)
