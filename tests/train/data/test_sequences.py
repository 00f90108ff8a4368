"""Windows over the stream of tokens, and the order they are taken in."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader

from twell.train.data import EpochOrder, PackedDataset, RunOrder, prepare, token_files

from .corpora import process_context, small, stored, write_corpus


def dataset(folder, sizes, sequence_length=8, dtype="<u2") -> tuple[PackedDataset, np.ndarray]:
    stream = np.arange(sum(sizes)) % 60_000
    files, start = [], 0
    for i, size in enumerate(sizes):
        path = folder / f"train-{i:05d}.bin"
        stream[start : start + size].astype(dtype).tofile(path)
        files.append((path, size))
        start += size
    return PackedDataset(files, dtype=dtype, sequence_length=sequence_length), stream


def joined(data) -> np.ndarray:
    return torch.cat([data[i]["input_ids"] for i in range(len(data))]).numpy()


@pytest.mark.parametrize("sizes", [[8], [100], [5, 3, 2, 1, 1, 40], [16, 16, 7], [1] * 20])
@pytest.mark.parametrize("dtype", ["<u2", "<u4"])
def test_windows_are_the_stream(tmp_path, sizes, dtype):
    data, stream = dataset(tmp_path, sizes, dtype=dtype)
    assert len(data) == sum(sizes) // 8
    assert data.tokens == len(data) * 8
    assert np.array_equal(joined(data), stream[: data.tokens])
    item = data[-1]
    assert item["input_ids"].dtype == torch.int64
    assert torch.equal(item["input_ids"], item["labels"])
    for outside in (len(data), -len(data) - 1):
        with pytest.raises(IndexError):
            data[outside]


def test_too_little_text(tmp_path):
    with pytest.raises(ValueError, match="7 tokens; accepted: at least one sequence: 8"):
        dataset(tmp_path, [4, 3])
    with pytest.raises(ValueError, match="0 tokens"):
        PackedDataset([], dtype="<u2", sequence_length=8)
    (tmp_path / "a.txt").write_text("tiny")
    with pytest.raises(ValueError, match="training tokens; accepted: at least sequence_length"):
        prepare(small(tmp_path / "a.txt", tmp_path / "cache", held_out=0), quiet=True)


def test_a_pickled_copy_maps_the_files_itself(tmp_path):
    data, _ = dataset(tmp_path, [50, 50])
    before = joined(data)
    pickled = pickle.dumps(data)
    assert len(pickled) < 2000
    assert np.array_equal(joined(pickle.loads(pickled)), before)


@pytest.mark.parametrize("context", [None, process_context()], ids=["default", "fresh"])
def test_data_loader_with_workers(tmp_path, context):
    data, stream = dataset(tmp_path, [50, 50])
    data[0]
    loader = DataLoader(data, batch_size=3, num_workers=2, multiprocessing_context=context)
    batches = [batch["input_ids"] for batch in loader]
    assert np.array_equal(torch.cat(batches).flatten().numpy(), stream[: data.tokens])


def test_prepared_windows_cross_documents_and_shards(tmp_path, monkeypatch):
    write_corpus(tmp_path / "text")
    monkeypatch.setattr(token_files, "SHARD_TOKENS", 1000)
    prepared = prepare(small(tmp_path / "text", tmp_path / "cache"), quiet=True)
    sizes = [path.stat().st_size // 2 for path in sorted(prepared.folder.glob("train-*.bin"))]
    assert len(sizes) > 3
    assert set(sizes[:-1]) == {1000}
    assert sum(sizes) == prepared.train_tokens
    assert np.array_equal(joined(prepared.train), stored(prepared, "train")[: prepared.train.tokens])
    assert np.array_equal(joined(prepared.held_out), stored(prepared, "held_out")[: prepared.held_out.tokens])


def test_every_epoch_is_another_permutation():
    order = EpochOrder(1000, seed=3)
    first, second = order.indices(0), order.indices(1)
    assert torch.equal(first.sort().values, torch.arange(1000))
    assert not torch.equal(first, second)
    assert torch.equal(first, EpochOrder(1000, seed=3).indices(0))
    assert not torch.equal(second, EpochOrder(1000, seed=4).indices(0))


def test_the_order_is_the_same_on_every_machine():
    assert EpochOrder(10, seed=0).indices(0).tolist() == [8, 2, 4, 0, 1, 5, 6, 9, 7, 3]


def test_the_order_ignores_the_state_of_the_process():
    order = RunOrder(70_000, 140_000, seed=1)
    torch.manual_seed(0)
    first = list(order)
    torch.manual_seed(1)
    assert list(order) == first
    assert first[70_000:] == EpochOrder(70_000, 1).indices(1).tolist()


def test_accelerate_deals_out_batches_in_turn():
    data_loader = pytest.importorskip("accelerate.data_loader")
    batches = BatchSampler(RunOrder(40, 40), batch_size=4, drop_last=True)
    dealt = [
        list(data_loader.BatchSamplerShard(batches, num_processes=2, process_index=rank)) for rank in range(2)
    ]
    assert [batch for pair in zip(*dealt, strict=True) for batch in pair] == list(batches)


class TestRunOrder:
    def test_every_epoch_is_a_permutation_of_its_own(self):
        order = list(RunOrder(10, 25, seed=3))
        assert len(order) == 25
        assert sorted(order[:10]) == sorted(order[10:20]) == list(range(10))
        assert order[:10] != order[10:20]
        assert order == list(RunOrder(10, 25, seed=3))
        assert order != list(RunOrder(10, 25, seed=4))

    def test_a_longer_run_starts_the_same(self):
        assert list(RunOrder(10, 5)) == list(RunOrder(10, 12))[:5]
