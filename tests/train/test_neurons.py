"""Firing statistics, and the revival of dead neurons."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from twell import SparseMLP
from twell.train.distributed import generator_of
from twell.train.neurons import FiringTracker, revive


class TestFiringTracker:
    def test_counts_and_silence(self):
        tracker = FiringTracker([3, 2])
        tracker.add([torch.tensor([4, 0, 1]), torch.tensor([0, 2])], tokens=10)
        tracker.add([torch.tensor([1, 0, 0]), torch.tensor([0, 0])], tokens=10)
        tracker.finish_step()
        assert tracker.silent.tolist() == [0, 20, 0, 20, 0]
        tracker.add([torch.tensor([0, 1, 0]), torch.tensor([0, 0])], tokens=5)
        tracker.finish_step()
        assert tracker.silent.tolist() == [5, 0, 5, 25, 5]
        assert tracker.active_per_token() == [7 / 25, 2 / 25]
        assert tracker.active_per_token() is None
        assert [dead.tolist() for dead in tracker.dead(after=25)] == [[False] * 3, [True, False]]
        assert tracker.dead_shares(after=5) == ([pytest.approx(2 / 3), 1.0], 5)

    def test_the_share_of_dead_neurons_is_that_of_a_window(self):
        """Three neurons: one fires in every step, one in every third, one never."""
        tracker = FiringTracker([3])
        assert tracker.dead_shares(after=30) == ([0.0], 0)
        found = []
        for step in range(1, 7):
            tracker.add([torch.tensor([5, int(step % 3 == 1), 0])], tokens=10)
            tracker.finish_step()
            found.append([tracker.dead_shares(after) for after in (10, 30)])
        one, two = pytest.approx(1 / 3), pytest.approx(2 / 3)
        by_batch = [([one], 10), ([two], 10), ([two], 10)] * 2
        assert [last for last, _ in found] == by_batch
        windows = [10, 20, 30, 30, 30, 30]  # shorter while there were not as many tokens
        assert [last for _, last in found] == [([one], window) for window in windows]
        assert tracker.dead_shares() == ([one], 60)

    def test_a_window_survives(self):
        tracker, other = FiringTracker([2]), FiringTracker([2])
        tracker.add([torch.tensor([1, 0])], tokens=3)
        tracker.finish_step()
        state = tracker.state_dict()
        other.load_state_dict(state)
        assert other.dead_shares(100) == ([0.5], 3)
        del state["seen"]  # as earlier versions saved it
        other.load_state_dict(state)
        assert other.dead_shares(100) == ([0.5], 3)

    def test_state_survives(self):
        tracker, other = FiringTracker([2]), FiringTracker([2])
        tracker.add([torch.tensor([1, 0])], tokens=3)
        tracker.finish_step()
        other.load_state_dict(tracker.state_dict())
        assert other.silent.tolist() == [0, 3]
        assert other.active_per_token() == tracker.active_per_token()

    def test_other_layers_are_refused(self):
        with pytest.raises(ValueError, match=r"firing: got layers of \(3,\); accepted: layers of \(2,\)"):
            FiringTracker([2]).add([torch.zeros(3, dtype=torch.int64)], tokens=1)
        with pytest.raises(ValueError, match="firing state"):
            FiringTracker([2]).load_state_dict(FiringTracker([3]).state_dict())


class TestRevival:
    @pytest.mark.parametrize("gated", [True, False])
    def test_dead_rows_are_drawn_again_and_their_moments_cleared(self, gated):
        torch.manual_seed(0)
        mlp = SparseMLP(16, 32, gated=gated)
        optimizer = torch.optim.AdamW(mlp.parameters())
        mlp(torch.randn(8, 16)).square().sum().backward()
        optimizer.step()
        selector = mlp.gate_proj if gated else mlp.up_proj
        others = [p for p in mlp.parameters() if p is not selector.weight]
        before, untouched = selector.weight.detach().clone(), [p.detach().clone() for p in others]
        dead = torch.zeros(32, dtype=torch.bool)
        dead[[3, 17]] = True
        neurons = revive(mlp, dead, std=0.5, generator=generator_of(0, 7, 1), optimizer=optimizer)
        assert neurons.tolist() == [3, 17]
        changed = (selector.weight != before).any(1)
        assert torch.equal(changed, dead)
        rows = torch.randn(2, 16, generator=generator_of(0, 7, 1)) * 0.5
        assert torch.equal(selector.weight[dead], rows)
        for name in ("exp_avg", "exp_avg_sq"):
            moments = optimizer.state[selector.weight][name]
            assert not moments[dead].any()
            assert moments[~dead].any()
        assert all(torch.equal(p, q) for p, q in zip(others, untouched, strict=True))

    def test_nobody_dead(self):
        mlp = SparseMLP(16, 32)
        before = mlp.gate_proj.weight.detach().clone()
        none = revive(
            mlp, torch.zeros(32, dtype=torch.bool), std=1.0, generator=generator_of(0, 0, 0), optimizer=None
        )
        assert none.numel() == 0
        assert torch.equal(mlp.gate_proj.weight, before)

    def test_flattened_weights_are_refused(self):
        mlp = SparseMLP(16, 32)
        mlp.gate_proj.weight.data = mlp.gate_proj.weight.data.flatten()  # as FSDP 1 keeps them
        dead = torch.ones(32, dtype=torch.bool)
        with pytest.raises(ValueError, match=r"revive_every: got weights of shape \(512,\).*FSDP 2"):
            revive(mlp, dead, std=1.0, generator=generator_of(0), optimizer=None)

    def test_seeds_differ(self):
        drawn = {
            torch.rand(1, generator=generator_of(*numbers)).item()
            for numbers in [(0, 1, 0), (0, 0, 1), (1, 0, 0)]
        }
        assert len(drawn) == 3
