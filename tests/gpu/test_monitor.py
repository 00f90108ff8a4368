"""When layers are read, without a device: counts that lie on the host have arrived at once."""

from __future__ import annotations

import pytest
import torch

from twell.kernels.gpu import monitor


@pytest.fixture(autouse=True)
def _fresh():
    monitor.forget()
    yield
    monitor.forget()


def read(key, share, arrived=True):
    """A reading of two tiles, the second of which may not have been copied yet."""
    monitor.note_run(key, torch.tensor([0, round(share * 100)]), 100)
    if not arrived:
        monitor._layer(key).pending[0][1] = -1


def test_readings_at_powers_of_two_then_at_intervals():
    weight = torch.empty(1)
    due = []
    for call in range(1, 300):
        if monitor.takes_reading("a", weight):
            due.append(call)
    interval = monitor.LOOK_AGAIN
    assert due == [1, 2, 4, 8, 16, 32, interval, 2 * interval, 3 * interval, 4 * interval]


def test_the_interval_is_the_callers():
    weight = torch.empty(1)
    due = [
        n
        for n in range(1, 40)
        if monitor.wants_reading("a", weight, 10) and monitor.takes_reading("a", weight)
    ]
    assert due == [1, 2, 4, 8, 10, 20, 30]


def test_asking_first_does_not_count_twice():
    weight = torch.empty(1)
    asked = [monitor.wants_reading("a", weight) and monitor.takes_reading("a", weight) for _ in range(8)]
    assert asked == [True, True, False, True, False, False, False, True]


def test_a_reading_is_used_once_it_has_arrived():
    assert monitor.known_share("a") is None
    read("a", 0.25, arrived=False)
    assert monitor.known_share("a") is None
    read("a", 0.25)
    assert monitor.known_share("a") == 0.25
    assert monitor.known_share("a") == 0.25  # and stays


def test_no_second_reading_while_one_is_on_its_way():
    weight = torch.empty(1)
    assert monitor.takes_reading("a", weight)
    read("a", 0.5, arrived=False)
    assert not monitor.takes_reading("a", weight)


def test_another_tensor_at_the_same_address_starts_anew():
    first, second = torch.empty(1), torch.empty(1)
    for _ in range(5):
        monitor.takes_reading("a", first)
    read("a", 0.5)
    assert monitor.known_share("a") == 0.5
    assert monitor.takes_reading("a", second)
    assert monitor.known_share("a") is None


def test_tensors_that_change_with_every_call_are_known_by_address():
    for _ in range(10):
        monitor.takes_reading("a", torch.empty(1))
    read("a", 0.5)
    monitor.takes_reading("a", torch.empty(1))
    assert monitor.known_share("a") == 0.5


def test_a_reading_on_its_way_does_not_count_for_a_new_owner():
    first, second = torch.empty(1), torch.empty(1)
    monitor.takes_reading("a", first)
    read("a", 0.5)
    monitor.takes_reading("a", second)
    assert monitor.known_share("a") is None


def test_who_has_run():
    assert not monitor.has_run("a")
    monitor.note_run("a")
    assert monitor.has_run("a")
    assert monitor.known_share("a") is None


def test_layers_are_bounded(monkeypatch):
    monkeypatch.setattr(monitor, "_MOST_LAYERS", 3)
    for key in range(5):
        monitor.known_share(key)
    assert list(monitor._layers) == [2, 3, 4]


def test_calls_made_without_asking_are_counted_when_told():
    weight = torch.zeros(1)
    read, call = [], 0
    while call < 200:
        call += 1
        if monitor.wants_reading("layer", weight):
            monitor.takes_reading("layer", weight)
            read.append(call)
        else:
            ahead = monitor.calls_before_reading("layer")
            monitor.count_calls("layer", ahead)
            call += ahead
    assert read == [1, 2, 4, 8, 16, 32, 64, 128, 192]


def test_calls_that_were_not_made_do_not_bring_the_next_reading_nearer():
    weight = torch.zeros(1)
    read = []
    for call in range(1, 200):
        if monitor.wants_reading("layer", weight):
            monitor.takes_reading("layer", weight)
            read.append(call)
        elif call % 3 == 0:
            monitor.count_calls("layer", 0)  # granted, and none of it used
    assert read == [1, 2, 4, 8, 16, 32, 64, 128, 192]


def test_counting_past_a_reading_makes_it_due():
    weight = torch.zeros(1)
    for _ in range(3):
        monitor.takes_reading("layer", weight)
    monitor.count_calls("layer", 50)
    assert monitor.takes_reading("layer", weight)
    assert not monitor.takes_reading("layer", weight)
