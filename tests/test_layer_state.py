"""What is known of a layer, without a device: when it is read, how it trains, whose it is."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from collections import Counter

import pytest
import torch

from twell import Plan, SparseMLP, ffn, training_states
from twell.layer_state import LOOK_AGAIN_INFERENCE, LOOK_AGAIN_TRAINING, LayerState, Reading, layer_of

POWERS_THEN_INTERVALS = [1, 2, 4, 8, 16, 32, *(times * LOOK_AGAIN_TRAINING for times in (1, 2, 3))]


def read(reading, share, arrived=True):
    """Counts of two tiles, on the host already; the second may not have been copied yet."""
    reading.take(torch.tensor([0, round(share * 100)]), 100)
    if not arrived:
        reading._host[1] = -1


class TestReadings:
    def test_due_at_powers_of_two_then_at_intervals(self):
        reading = Reading()
        assert [call for call in range(1, 200) if reading.is_due()] == POWERS_THEN_INTERVALS

    def test_the_interval_is_the_callers(self):
        reading = Reading()
        assert [call for call in range(1, 40) if reading.is_due(10)] == [1, 2, 4, 8, 16, 26, 36]

    @pytest.mark.real_pace
    def test_layers_of_a_model_are_read_in_different_calls(self):
        layers = [LayerState() for _ in range(24)]
        readings = [layer.reading(torch.empty(8, 8), 1, training=False) for layer in layers]
        due = Counter(
            call
            for reading in readings
            for call in range(1, 2000)
            if reading.is_due(LOOK_AGAIN_INFERENCE) and call > 64
        )
        assert max(due.values()) <= 4
        assert len(due) > 24 * 6 / 2

    def test_used_once_it_has_arrived(self):
        reading = Reading()
        assert reading.share is None
        read(reading, 0.25, arrived=False)
        assert reading.share is None
        read(reading, 0.25)
        assert reading.share == 0.25
        assert reading.share == 0.25  # and stays

    @pytest.mark.parametrize(("late", "news"), [(0, True), (1, False)])
    def test_half_of_it_is_not_used(self, late, news):
        """The copy has no order: who looks at the last count only may hear of news too early."""
        reading = Reading()
        read(reading, 0.25)
        reading._host[late] = -1
        assert reading.has_news == news
        assert reading.share is None
        reading._host[late] = 25
        assert reading.has_news
        assert reading.share is not None
        assert not reading.has_news

    def test_counts_of_another_size(self):
        reading = Reading()
        for tiles in (1, 3, 2):
            reading.take(torch.full((tiles, 2), 5), 100)
            assert reading.share == pytest.approx(tiles * 0.1)

    def test_inference_mode_and_others_take_turns(self):
        reading = Reading()
        with torch.inference_mode():
            read(reading, 0.25)
        read(reading, 0.5)
        assert reading.share == 0.5

    def test_threads_may_look_at_once(self):
        reading, failed = Reading(), []

        def look():
            try:
                for _ in range(300):
                    read(reading, 0.25)
                    assert reading.share in (None, 0.25)
                    _ = reading.has_news
            except Exception as error:
                failed.append(error)

        threads = [threading.Thread(target=look) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed

    def test_no_second_one_while_one_is_on_its_way(self):
        reading = Reading()
        assert reading.is_due()
        read(reading, 0.5, arrived=False)
        assert not reading.is_due()

    def test_calls_made_without_asking_are_counted_when_told(self):
        reading, due, call = Reading(), [], 0
        while call < 200:
            call += 1
            if reading.is_due():
                due.append(call)
            else:
                ahead = reading.calls_ahead
                reading.count(ahead)
                call += ahead
        assert due == POWERS_THEN_INTERVALS

    def test_calls_that_were_not_made_do_not_bring_the_next_one_nearer(self):
        reading, due = Reading(), []
        for call in range(1, 200):
            if reading.is_due():
                due.append(call)
            elif call % 3 == 0:
                reading.count(0)  # prepared, and none of it used
        assert due == POWERS_THEN_INTERVALS

    def test_counting_past_one_makes_it_due(self):
        reading = Reading()
        for _ in range(3):
            reading.is_due()
        reading.count(50)
        assert reading.is_due()
        assert not reading.is_due()


class TestTraining:
    def decide(self, reading, *shares):
        found = []
        for share in shares:
            if share is not None:
                read(reading, share)
            found.append(reading.trains_sparse(enter=0.5, leave=0.6, layer="a layer"))
        return found

    def test_dense_until_something_is_known(self):
        assert self.decide(Reading(), None, None) == [False, False]

    def test_it_does_not_flap_between_the_limits(self):
        reading = Reading()
        shares = 0.55, 0.5, 0.55, 0.6, 0.61, 0.55, 0.4
        assert self.decide(reading, *shares) == [False, True, True, True, False, False, True]
        assert (reading.sparse, reading.share, reading.switches) == (True, 0.4, 3)

    def test_switches_are_logged(self, caplog):
        with caplog.at_level("INFO", logger="twell"):
            self.decide(Reading(), 0.25, 0.25, 0.75)
        assert [record.message for record in caplog.records] == [
            "training switches to sparse: 25.0% of the neurons are active in a layer",
            "training switches to dense: 75.0% of the neurons are active in a layer",
        ]

    def test_states_of_all_layers_that_live(self):
        def mine():
            return [state for state in training_states() if state.layer.startswith("D 16, H 48, ")]

        layers = [LayerState() for _ in range(2)]
        weight = torch.empty(48, 16)
        for tokens, layer in zip((100, 7), layers, strict=True):
            layer.reading(weight, tokens, training=True)
            layer.reading(weight, tokens, training=False)
        read(layers[0].reading(weight, 128, training=True), 0.3)
        assert layers[0].reading(weight, 65, training=True).trains_sparse(0.5, 0.6, "")
        first, second = mine()
        assert first == ("D 16, H 48, 128 tokens on cpu", True, 0.3, 1)
        assert second == ("D 16, H 48, 8 tokens on cpu", False, None, 0)
        del layers[0], layer
        gc.collect()
        assert mine() == [second]


def test_token_counts_of_one_power_of_two_share_a_reading():
    layer, weight = LayerState(), torch.empty(8, 4)
    assert layer.reading(weight, 5, False) is layer.reading(weight, 8, False)
    assert layer.reading(weight, 5, False) is not layer.reading(weight, 4, False)
    assert layer.reading(weight, 5, False) is not layer.reading(weight, 5, True)
    assert layer.reading(weight, 0, False) is layer.reading(weight, 1, False)
    assert layer.reading(weight, 5, False) is not layer.reading(weight.to("meta"), 5, False)


class TestWhoseItIs:
    def test_the_weights(self):
        first, second = torch.empty(4, 2), torch.empty(4, 2)
        assert layer_of(first) is layer_of(first)
        assert layer_of(first) is not layer_of(second)

    def test_aliases_and_views_are_known_by_their_place(self):
        fused = torch.nn.Parameter(torch.empty(8, 2))
        assert layer_of(fused) is layer_of(fused.data) is layer_of(fused.detach())
        assert layer_of(fused[:4]) is layer_of(fused.chunk(2)[0])
        assert layer_of(fused[:4]) is not layer_of(fused[4:])
        assert layer_of(fused[:4]) is not layer_of(fused)
        with torch.inference_mode():
            experts = torch.empty(3, 4, 2)
            assert layer_of(experts[1]) is layer_of(experts[1])
            assert layer_of(experts[1]) is not layer_of(experts[2])

    @pytest.mark.parametrize("of", [lambda weight: weight, lambda weight: weight[:2]], ids=["whole", "view"])
    def test_freed_with_the_weight_at_once(self, of):
        weight = torch.empty(4, 2)
        state = weakref.ref(layer_of(of(weight)))
        assert state() is not None
        del weight
        assert state() is None

    @pytest.mark.parametrize("of", [lambda weight: weight, lambda weight: weight[:2]], ids=["whole", "view"])
    def test_weights_made_for_every_call_share_what_is_known(self, of):
        states = [layer_of(of(torch.empty(4, 2))) for _ in range(10)]
        assert len(set(map(id, states[:5]))) == 5
        assert len(set(map(id, states[5:]))) == 1
        assert layer_of(torch.empty(4, 3)) not in states

    def test_one_that_stays_gets_its_own(self):
        for _ in range(10):
            shared = layer_of(torch.empty(4, 2))
        first, second = torch.empty(4, 2), torch.empty(4, 2)
        assert layer_of(first) is shared
        assert layer_of(first) is not shared
        states = [layer_of(weight) for weight in (first, second, first, second)]
        assert states[0] is states[2]
        assert states[3] not in (shared, states[0])

    def test_weights_that_live_for_many_calls_do_not_share(self):
        """As in a script that measures one configuration after the other."""
        states = []
        for _ in range(10):
            weight = torch.empty(4, 2)
            states += [layer_of(weight) for _ in range(3)]
        assert len(set(map(id, states))) == 10

    def test_parameters_never_do(self):
        states = [layer_of(torch.nn.Parameter(torch.empty(4, 2))) for _ in range(10)]
        assert len(set(map(id, states))) == 10

    def test_a_module_owns_its_state(self):
        mlp = SparseMLP(16, 32).requires_grad_(False)
        x = torch.randn(2, 16)
        mlp(x)
        known = mlp._layer
        mlp.double()
        mlp(x.double())
        assert mlp._layer is known
        mlp.load_state_dict(mlp.state_dict(), assign=True)
        mlp(x.double())
        assert mlp._layer is not known  # other weights are another layer

    def test_parameters_can_still_be_swapped(self):
        mlp = SparseMLP(16, 32, plan=Plan(path="row"))
        torch.compile(mlp, backend="eager")(torch.randn(2, 16))
        mlp(torch.randn(2, 16))
        before = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            assert mlp.double()(torch.randn(2, 16).double()).dtype == torch.float64
        finally:
            torch.__future__.set_swap_module_params_on_conversion(before)

    def test_a_copy_of_a_module_is_another_layer(self):
        mlp = SparseMLP(16, 32, gated=False).requires_grad_(False)
        x = torch.randn(2, 16)
        expected = mlp(x)
        for other in (copy.deepcopy(mlp), pickle.loads(pickle.dumps(mlp))):
            assert other._layer is None
            assert torch.equal(other(x), expected)
            assert other._layer is not mlp._layer
        assert copy.deepcopy(mlp._layer) is not mlp._layer
        assert not pickle.loads(pickle.dumps(mlp._layer)).prepared

    def test_a_layer_is_freed_at_once_although_calls_were_prepared(self):
        x = torch.randn(2, 16)
        up, down, gate = (torch.randn(shape) for shape in ((32, 16), (16, 32), (32, 16)))
        with torch.no_grad():
            ffn(x, up, down, gate)
        assert layer_of(gate).prepared
        weight, state = weakref.ref(gate), weakref.ref(layer_of(gate))
        del gate
        assert (weight(), state()) == (None, None)
