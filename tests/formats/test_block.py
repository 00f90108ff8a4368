"""Block TwELL: unions, round trip, strided slots and refusals."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from twell import BlockTwELL

from .cases import DTYPES, assert_exact, assert_same_bits, bits_of
from .strategies import matrices

FIELDS = ("starts", "counts", "neurons", "values")

block_rows = st.one_of(st.sampled_from([1, 2, 3, 7, 16, 64, 128]), st.integers(1, 50))


def naive_unions(active: np.ndarray, rows: int) -> list[list[int]]:
    """Per block of `rows` tokens, the sorted neurons that any of its tokens activates."""
    unions = []
    for first in range(0, active.shape[0], rows):
        fired = {n for token in active[first : first + rows].tolist() for n, on in enumerate(token) if on}
        unions.append(sorted(fired))
    return unions


def block_slices(packed: BlockTwELL) -> list[slice]:
    starts, counts = packed.starts.tolist(), packed.counts.tolist()
    return [slice(start, start + count) for start, count in zip(starts, counts, strict=True)]


def spread_slots(packed: BlockTwELL, stride: int) -> BlockTwELL:
    """The same blocks, in reverse order in memory and `stride` slots apart, garbage in between."""
    blocks = packed.counts.numel()
    neurons = torch.full((blocks * stride,), 2**31 - 1, dtype=torch.int32)
    values = torch.full((blocks * stride, packed.rows), float("nan"), dtype=packed.dtype)
    starts = torch.arange(blocks - 1, -1, -1, dtype=torch.int64) * stride
    for source, start in zip(block_slices(packed), starts.tolist(), strict=True):
        target = slice(start, start + source.stop - source.start)
        neurons[target], values[target] = packed.neurons[source], packed.values[source]
    return BlockTwELL(starts, packed.counts, neurons, values, shape=packed.shape, rows=packed.rows)


@given(matrices(), block_rows)
def test_round_trip_is_exact(case, rows):
    assert_exact(BlockTwELL.pack(case.dense, rows), case, FIELDS)


@given(matrices(), block_rows)
def test_neurons_of_a_block_are_the_ascending_union(case, rows):
    packed = BlockTwELL.pack(case.dense, rows)
    unions = naive_unions(case.active, rows)
    assert packed.blocks == len(unions)
    assert packed.counts.tolist() == [len(union) for union in unions]
    assert [packed.neurons[block].tolist() for block in block_slices(packed)] == unions
    assert packed.neurons.numel() == packed.values.shape[0] == sum(map(len, unions))
    assert packed.mean_union() == sum(map(len, unions)) / max(len(unions), 1)
    dtypes = (packed.starts.dtype, packed.counts.dtype, packed.neurons.dtype)
    assert dtypes == (torch.int64, torch.int32, torch.int32)


@given(matrices(), block_rows)
def test_slot_values_are_the_tokens_of_the_block(case, rows):
    packed = BlockTwELL.pack(case.dense, rows)
    assert packed.values.shape[1] == rows
    values = bits_of(packed.values)
    for b, union in enumerate(naive_unions(case.active, rows)):
        tokens = case.expected[b * rows : (b + 1) * rows]
        expected = np.zeros((len(union), rows), tokens.dtype)
        expected[:, : tokens.shape[0]] = tokens[:, union].T
        start = int(packed.starts[b])
        np.testing.assert_array_equal(values[start : start + len(union)], expected)


@given(matrices(), block_rows, st.integers(0, 9))
def test_blocks_may_lie_anywhere(case, rows, gap):
    packed = BlockTwELL.pack(case.dense, rows)
    spread = spread_slots(packed, stride=case.expected.shape[1] + gap)
    assert_same_bits(spread.unpack(), case.expected)
    assert spread.nnz() == case.nnz


def test_strided_blocks_written_by_hand():
    nan = float("nan")
    packed = BlockTwELL(
        starts=torch.tensor([0, 4, 8]),
        counts=torch.tensor([2, 0, 1], dtype=torch.int32),
        neurons=torch.tensor([1, 3, 99, 99, 99, 99, 99, 99, 0, 99, 99, 99], dtype=torch.int32),
        values=torch.tensor([[1.0, 2.0], [0.0, 3.0], *[[nan, nan]] * 6, [4.0, 0.0], *[[nan, nan]] * 3]),
        shape=(5, 4),
        rows=2,
    )
    dense = torch.tensor(
        [
            [0.0, 1.0, 0.0, 0.0],
            [0.0, 2.0, 0.0, 3.0],
            [0.0, 0.0, 0.0, 0.0],
            [0.0, 0.0, 0.0, 0.0],
            [4.0, 0.0, 0.0, 0.0],
        ]
    )
    assert_same_bits(packed.unpack(), bits_of(dense))
    assert packed.nnz() == 4
    assert packed.mean_union() == 1.0
    # 3 starts of 8 bytes, 3 counts and 12 neurons of 4, 24 values of 4: unused slots included
    assert packed.memory_bytes() == 24 + 12 + 48 + 96


def test_more_columns_than_a_16_bit_index():
    dense = torch.zeros(3, 70_000)
    dense[0, 69_999], dense[2, 65_536], dense[1, 0] = 1.0, -2.0, 3.0
    packed = BlockTwELL.pack(dense, rows=2)
    assert packed.neurons.tolist() == [0, 69_999, 65_536]
    assert_same_bits(packed.unpack(), bits_of(dense))


def test_default_block_has_128_tokens():
    packed = BlockTwELL.pack(torch.ones(129, 2))
    assert (packed.rows, packed.blocks, tuple(packed.values.shape)) == (128, 2, (4, 128))


@given(matrices(), block_rows, st.sampled_from(DTYPES))
def test_to_dtype_casts_the_values(case, rows, dtype):
    packed = BlockTwELL.pack(case.dense, rows)
    cast = packed.to(dtype)
    zero = torch.zeros((), dtype=case.dense.dtype)
    expected = torch.where(case.dense.detach() == 0, zero, case.dense.detach()).to(dtype)
    got = cast.unpack()
    assert cast.dtype == got.dtype == dtype
    assert torch.equal(got.isnan(), expected.isnan())
    assert_same_bits(got.nan_to_num(0.0), bits_of(expected.nan_to_num(0.0)))
    assert cast.neurons.tolist() == packed.neurons.tolist()


@pytest.mark.parametrize("target", ["cpu", "meta", torch.device("cpu")])
def test_to_device(target):
    packed = BlockTwELL.pack(torch.eye(5), rows=2)
    moved = packed.to(target)
    assert {t.device.type for t in moved.tensors().values()} == {torch.device(target).type}
    assert moved.memory_bytes() == packed.memory_bytes()
    assert (moved.shape, moved.rows) == ((5, 5), 2)
    both = packed.to(target, torch.float16)
    assert (both.device.type, both.dtype) == (torch.device(target).type, torch.float16)
    if torch.device(target).type == "cpu":
        assert_same_bits(moved.unpack(), bits_of(torch.eye(5)))
        assert_same_bits(both.unpack(), bits_of(torch.eye(5, dtype=torch.float16)))


def test_repr_states_the_key_facts():
    packed = BlockTwELL.pack(torch.eye(5), rows=2)
    # 3 starts of 8 bytes, 3 counts of 4, 5 slots of 4 + 2 * 4
    assert repr(packed) == (
        "BlockTwELL(M=5, H=5, rows=2, blocks=3, union/block=1.7, nnz/row=1.0, "
        "96 B (96.0% of dense), float32, cpu)"
    )
    assert repr(packed.to("meta")) == (
        "BlockTwELL(M=5, H=5, rows=2, blocks=3, 96 B (96.0% of dense), float32, meta)"
    )
    assert repr(BlockTwELL.pack(torch.zeros(0, 3))).startswith("BlockTwELL(M=0, H=3, rows=128, blocks=0")


DENSE = torch.zeros(2, 8)


@pytest.mark.parametrize(
    ("dense", "rows", "message"),
    [
        ("x", 2, r"^dense: got a str; accepted: a 2-D floating-point torch\.Tensor"),
        (DENSE[0], 2, r"^dense: got shape \(8,\); accepted: a 2-D tensor"),
        (DENSE[None], 2, r"^dense: got shape \(1, 2, 8\); accepted: a 2-D tensor"),
        (DENSE.long(), 2, r"^dense: got dtype torch\.int64; accepted: .*float32.*float64.*bfloat16.*float16"),
        (DENSE.bool(), 2, r"^dense: got dtype torch\.bool; accepted: torch\.float32"),
        (DENSE, 0, r"^rows: got 0; accepted: an integer >= 1"),
        (DENSE, -1, r"^rows: got -1; accepted: an integer >= 1"),
        (DENSE, 2.0, r"^rows: got 2\.0; accepted: an integer >= 1"),
        (DENSE, True, r"^rows: got True; accepted: an integer >= 1"),
        (DENSE, None, r"^rows: got None; accepted: an integer >= 1"),
    ],
)
def test_bad_input_is_refused_by_name(dense, rows, message):
    with pytest.raises(ValueError, match=message):
        BlockTwELL.pack(dense, rows)


def test_to_refuses_a_dtype_that_is_not_floating_point():
    with pytest.raises(ValueError, match=r"^dtype: got torch\.int8; accepted: torch\.float32, .*float16"):
        BlockTwELL.pack(DENSE).to(torch.int8)


@pytest.mark.parametrize("device", [torch.zeros(1), 1.5, object()], ids=["tensor", "float", "object"])
def test_a_device_that_is_none_is_refused(device):
    with pytest.raises(ValueError, match=r"device: got a .*; accepted: a torch.device"):
        BlockTwELL.pack(torch.eye(4)).to(device)
