"""Streaming counts of a block against the same figures computed from all of its activations at once."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

pytest.importorskip("transformers")
from twell.formats import TwELL
from twell.profiling.counts import TILE, UNION_SIZES, BlockCounts, curve_ranks, position_starts

CPU = torch.device("cpu")


def activity(sequences: int, length: int, neurons: int, seed: int = 0) -> torch.Tensor:
    """bool [B, S, H]: neurons of very different rates, some dead, neighbours alike, one token with many."""
    generator = torch.Generator().manual_seed(seed)
    rates = torch.rand(neurons, generator=generator) ** 6
    rates[::5] = 0
    drawn = torch.rand(sequences, length, neurons, generator=generator)
    drawn[:, 1::2] = torch.where(drawn[:, 1::2] < 0.5, drawn[:, :-1:2][:, : length // 2], drawn[:, 1::2])
    active = drawn < rates
    active[0, 3, :] = True
    active[0, 5, :] = False
    active[0, 6, :] = False
    return active


@pytest.mark.parametrize(("length", "neurons"), [(64, 48), (37, 300), (32, 512)])
def test_batches_add_up_to_the_whole(length, neurons):
    whole = activity(12, length, neurons)
    counts = BlockCounts(neurons, length, CPU)
    returned = torch.cat([counts.add(part, ordered=True) for part in whole.split((5, 4, 3))])
    flat, nnz = whole.flatten(0, 1), whole.sum(-1)
    assert torch.equal(returned, nnz)
    assert counts.tokens == 12 * length

    ordered = nnz.flatten().sort().values
    found = counts.nnz()
    assert found.mean == pytest.approx(nnz.double().mean().item())
    assert found.share == pytest.approx(found.mean / neurons)
    assert found.max == neurons
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        value = getattr(found, name)
        assert (ordered <= value).double().mean() >= share
        assert (ordered <= value - 1).double().mean() < share

    rates, order = flat.double().mean(0).sort(descending=True)
    firing = counts.firing()
    assert firing.dead == int((flat.sum(0) == 0).sum())
    assert firing.rank[0] == 1
    assert firing.rank[-1] == neurons
    assert firing.rate == pytest.approx([rates[rank - 1].item() for rank in firing.rank])
    assert firing.hottest[0].rate == pytest.approx(rates[0].item())
    assert flat[:, firing.hottest[0].neuron].double().mean() == pytest.approx(rates[0].item())
    assert len(order) == neurons

    starts = position_starts(length)
    places = nnz.double().mean(0)
    ends = [*starts[1:], length]
    expected = [places[a:b].mean().item() for a, b in zip(starts, ends, strict=True)]
    assert counts.by_position(starts) == pytest.approx(expected)


def test_unions_are_of_the_tokens_that_a_batch_has_in_a_row():
    """Over the ends of sequences, as the kernels see them, but never over the ends of batches."""
    whole = activity(12, 40, 100)
    counts = BlockCounts(100, 40, CPU)
    parts = whole.split((5, 7))
    for part in parts:
        counts.add(part, ordered=True)
    for size, union, apart in zip(UNION_SIZES, counts.unions(), counts.unions_apart(), strict=True):
        together, spread = [], []
        for part in parts:
            flat = part.flatten(0, 1)
            groups = len(flat) // size
            together += [flat[g * size : (g + 1) * size].any(0).sum().item() for g in range(groups)]
            spread += [flat[g : groups * size : groups].any(0).sum().item() for g in range(groups)]
        assert union == (pytest.approx(sum(together) / len(together)) if together else None)
        assert apart == (pytest.approx(sum(spread) / len(spread)) if spread else None)
    assert counts.unions()[-1] is not None  # 280 tokens hold 256
    few = BlockCounts(100, 40, CPU)
    few.add(whole[:2], ordered=True)
    assert few.unions()[-2:] == [None, None]


def test_overlap_is_of_neighbours_in_a_sequence():
    whole = activity(4, 30, 80)
    counts = BlockCounts(80, 30, CPU)
    for part in whole.split(2):
        counts.add(part, ordered=True)
    kept, jaccard = [], []
    for sequence in whole:
        for before, now in pairwise(sequence):
            both, either = (before & now).sum().item(), (before | now).sum().item()
            kept.append(both / now.sum().item() if now.any() else 1.0)
            jaccard.append(both / either if either else 1.0)
    found = counts.overlap()
    assert found.kept == pytest.approx(sum(kept) / len(kept))
    assert found.jaccard == pytest.approx(sum(jaccard) / len(jaccard))
    assert 0 < found.kept_by_chance < found.kept < 1


def test_chance_is_what_unrelated_tokens_share():
    generator = torch.Generator().manual_seed(1)
    rates = torch.rand(200, generator=generator) ** 3
    active = torch.rand(8, 500, 200, generator=generator) < rates
    counts = BlockCounts(200, 500, CPU)
    counts.add(active, ordered=True)
    found = counts.overlap()
    assert found.kept == pytest.approx(found.kept_by_chance, rel=0.02)


@pytest.mark.parametrize("neurons", [600, 512, 200])
def test_overflow_is_what_the_format_itself_says(neurons):
    active = activity(2, 50, neurons, seed=3)
    active[1, ::7, : neurons // 2] = True
    counts = BlockCounts(neurons, 50, CPU)
    counts.add(active, ordered=True)
    found = counts.overflow()
    flat = active.flatten(0, 1)
    for entry in found.by_compression:
        packed = TwELL.pack(flat.bfloat16(), TILE, entry.compression, overflow="spill")
        assert entry.capacity == packed.capacity
        assert entry.rows == pytest.approx(packed.spill_rows.unique().numel() / len(flat))
        tiles = {
            (m, n // TILE)
            for m, n in zip(packed.spill_rows.tolist(), packed.spill_indices.tolist(), strict=True)
        }
        assert entry.tiles == pytest.approx(len(tiles) / (len(flat) * packed.tiles))
    assert found.fullest_tile == min(neurons, TILE)
    assert found.heavy_rows == pytest.approx((flat.sum(1) > 128).double().mean().item())
    assert found.by_compression[-1].rows > 0


def test_tokens_of_unknown_order_are_counted_without_their_order():
    active = activity(2, 30, 60)
    counts = BlockCounts(60, 30, CPU)
    counts.add(active.flatten(0, 1)[None, :17], ordered=False)
    assert counts.tokens == 17
    assert counts.by_position([0, 1]) is None
    assert counts.overlap() is None
    assert set(counts.unions()) == {None}
    assert counts.nnz().mean == pytest.approx(active.flatten(0, 1)[:17].sum(1).double().mean().item())


@pytest.mark.parametrize("size", [1, 2, 7, 300, 5632])
def test_ranks_and_positions_cover_everything(size):
    ranks = curve_ranks(size)
    assert ranks == sorted(set(ranks))
    assert (ranks[0], ranks[-1]) == (0, size - 1)
    starts = position_starts(size)
    assert starts == sorted(set(starts))
    assert starts[0] == 0
    assert starts[-1] < size
    assert len(starts) <= min(size, 64)
