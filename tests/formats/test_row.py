"""Row TwELL: layout, round trip, overflow and refusals."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from twell import TwELL

from .cases import MatrixCase, assert_same_bits, bits_of, from_bits, special_patterns, stored_bytes
from .strategies import matrices

FIELDS = ("words", "spill_rows", "spill_indices", "spill_values")
PAPER_GEOMETRIES = [(256, 2), (256, 4), (256, 8)]
SMALL_GEOMETRIES = [(2, 1), (5, 1), (4, 2), (6, 3), (8, 2), (8, 4), (16, 8), (64, 8)]


@st.composite
def row_cases(draw: st.DrawFn) -> tuple[MatrixCase, int, int]:
    """A bf16 matrix of a few tiles whose width is often just off a multiple of the tile."""
    tile, compression = draw(st.sampled_from(PAPER_GEOMETRIES + SMALL_GEOMETRIES))
    near_tiles = st.builds(
        lambda tiles, off: max(0, tiles * tile + off), st.integers(0, 3), st.integers(-2, 2)
    )
    columns = st.one_of(near_tiles, st.sampled_from([0, 1, 2, 13, 509, 521]))
    case = draw(matrices((torch.bfloat16,), rows=st.integers(0, 6), columns=columns))
    return case, tile, compression


def pack_by_the_spec(
    bits: np.ndarray, tile: int, compression: int
) -> tuple[list[list[int]], list[tuple[int, int, int]]]:
    """Words and spilled (row, neuron, bits), written word by word from the format's description."""
    words_per_tile = tile // compression
    words, spilled = [], []
    for m, row in enumerate(bits.tolist()):
        row_words = []
        for first in range(0, len(row), tile):
            entries = [(n, row[n]) for n in range(first, min(first + tile, len(row))) if row[n] != 0]
            held, excess = entries[: words_per_tile - 1], entries[words_per_tile - 1 :]
            tile_words = [len(held)] + [value * 65536 + neuron for neuron, value in held]
            row_words += tile_words + [0] * (words_per_tile - len(tile_words))
            spilled += [(m, neuron, value) for neuron, value in excess]
        words.append(row_words)
    return words, spilled


def spilled_entries(packed: TwELL) -> list[tuple[int, int, int]]:
    """The side store as (row, neuron, bits)."""
    rows, neurons = packed.spill_rows.tolist(), packed.spill_indices.tolist()
    return list(zip(rows, neurons, bits_of(packed.spill_values).tolist(), strict=True))


def one_tile_with(non_zeros: int, columns: int = 256) -> torch.Tensor:
    """bf16 [3, columns]: row 1 has its first `non_zeros` columns active, the others none."""
    dense = torch.zeros(3, columns, dtype=torch.bfloat16)
    dense[1, :non_zeros] = 1.5
    return dense


@given(row_cases())
def test_layout_is_the_specification_bit_by_bit(case_and_geometry):
    case, tile, compression = case_and_geometry
    packed = TwELL.pack(case.dense, tile, compression, overflow="spill")
    words, spilled = pack_by_the_spec(case.expected, tile, compression)
    rows, columns = case.expected.shape
    assert packed.words.dtype == torch.uint32
    assert tuple(packed.words.shape) == (rows, -(-columns // tile) * (tile // compression))
    assert packed.words.tolist() == words
    assert (packed.spill_rows.dtype, packed.spill_indices.dtype) == (torch.int32, torch.int32)
    assert packed.spill_values.dtype == torch.bfloat16
    assert spilled_entries(packed) == spilled


@given(row_cases())
def test_spill_round_trip_is_exact(case_and_geometry):
    case, tile, compression = case_and_geometry
    packed = TwELL.pack(case.dense, tile, compression, overflow="spill")
    assert packed.unpack().dtype == torch.bfloat16
    assert_same_bits(packed.unpack(), case.expected)
    assert packed.nnz() == case.nnz
    assert packed.shape == case.expected.shape
    assert packed.memory_bytes() == stored_bytes(packed, FIELDS)
    assert packed.dense_bytes() == 2 * case.expected.size
    assert not any(tensor.requires_grad for tensor in packed.tensors().values())


@given(row_cases())
def test_word_0_never_exceeds_the_capacity(case_and_geometry):
    case, tile, compression = case_and_geometry
    packed = TwELL.pack(case.dense, tile, compression, overflow="spill")
    words_per_tile = tile // compression
    counts = np.array(packed.words.tolist(), dtype=np.int64).reshape(packed.words.shape)[:, ::words_per_tile]
    assert packed.capacity == words_per_tile - 1
    assert counts.max(initial=0) <= words_per_tile - 1
    assert counts.sum() + packed.spill_rows.numel() == case.nnz
    assert packed.counts().tolist() == counts.tolist()


@given(row_cases())
def test_error_mode_raises_exactly_when_a_tile_overflows(case_and_geometry):
    case, tile, compression = case_and_geometry
    capacity = tile // compression - 1
    fullest = max(
        (int(case.active[:, first : first + tile].sum(axis=1).max(initial=0)))
        for first in range(0, case.expected.shape[1] + 1, tile)
    )
    if fullest > capacity:
        with pytest.raises(ValueError, match=rf"^dense: .*\b{fullest} non-zeros.*at most {capacity}\b"):
            TwELL.pack(case.dense, tile, compression)
        return
    packed = TwELL.pack(case.dense, tile, compression)
    assert packed.spill_rows.numel() == packed.spill_indices.numel() == packed.spill_values.numel() == 0
    assert_same_bits(packed.unpack(), case.expected)


@pytest.mark.parametrize(("tile", "compression"), [*PAPER_GEOMETRIES, (2, 1), (8, 4)])
def test_capacity_boundary(tile, compression):
    capacity = tile // compression - 1
    fits, overflows = one_tile_with(capacity, tile), one_tile_with(capacity + 1, tile)
    assert_same_bits(TwELL.pack(fits, tile, compression, overflow="error").unpack(), bits_of(fits))
    with pytest.raises(ValueError, match=r"1 overflowing tiles \(row 1, tile 0 has"):
        TwELL.pack(overflows, tile, compression, overflow="error")
    spilled = TwELL.pack(overflows, tile, compression, overflow="spill")
    assert spilled_entries(spilled) == [(1, capacity, bits_of(overflows)[1, capacity])]


@pytest.mark.parametrize("pattern", [*special_patterns(torch.bfloat16), 0x3F80, 0xBF80])
def test_value_bits_are_high_and_index_low(pattern):
    bits = np.zeros((1, 600), np.uint16)
    bits[0, 517] = pattern
    words = TwELL.pack(from_bits(bits, torch.bfloat16)).words.tolist()[0]
    assert words[64] == 1
    assert words[65] == pattern << 16 | 517
    assert sum(word != 0 for word in words) == 2


@given(row_cases(), st.randoms(use_true_random=False))
def test_reader_ignores_entry_order_and_unused_words(case_and_geometry, shuffler: random.Random):
    case, tile, compression = case_and_geometry
    words_per_tile = tile // compression
    packed = TwELL.pack(case.dense, tile, compression, overflow="spill")
    words, _ = pack_by_the_spec(case.expected, tile, compression)
    for row in words:
        for start in range(0, len(row), words_per_tile):
            count = row[start]
            entries = row[start + 1 : start + 1 + count]
            shuffler.shuffle(entries)
            row[start + 1 : start + words_per_tile] = entries + [0xFFFFFFFF] * (words_per_tile - 1 - count)
    shuffled = torch.from_numpy(np.array(words, np.uint32).reshape(packed.words.shape))
    assert_same_bits(dataclasses.replace(packed, words=shuffled).unpack(), case.expected)


def test_widest_matrix_packs_and_one_column_more_is_refused():
    dense = torch.zeros(2, 65_535, dtype=torch.bfloat16)
    dense[0, 65_534], dense[1, 32_768], dense[1, 0] = -3.0, 2.0, -1.0
    packed = TwELL.pack(dense)
    assert_same_bits(packed.unpack(), bits_of(dense))
    assert packed.words.tolist()[0][-31] == 0xC040 << 16 | 65_534
    with pytest.raises(ValueError, match=r"^dense: got H = 65536 columns; accepted: at most 65535"):
        TwELL.pack(torch.zeros(2, 65_536, dtype=torch.bfloat16))


def test_defaults_are_tile_256_compression_8_error():
    packed = TwELL.pack(one_tile_with(31))
    assert (packed.tile, packed.compression, packed.words_per_tile, packed.capacity) == (256, 8, 32, 31)
    with pytest.raises(ValueError, match="at most 31 non-zeros per tile"):
        TwELL.pack(one_tile_with(32))


@pytest.mark.parametrize("target", ["cpu", "meta", torch.device("cpu")])
def test_to_device(target):
    packed = TwELL.pack(one_tile_with(40), overflow="spill")
    moved = packed.to(target)
    assert {t.device.type for t in moved.tensors().values()} == {torch.device(target).type}
    assert moved.memory_bytes() == packed.memory_bytes()
    assert (moved.shape, moved.tile, moved.compression) == (packed.shape, packed.tile, packed.compression)
    assert [t.dtype for t in moved.tensors().values()] == [t.dtype for t in packed.tensors().values()]
    if torch.device(target).type == "cpu":
        assert_same_bits(moved.unpack(), bits_of(one_tile_with(40)))


def test_to_dtype_accepts_bfloat16_only():
    packed = TwELL.pack(one_tile_with(3))
    assert_same_bits(packed.to(torch.bfloat16).unpack(), bits_of(one_tile_with(3)))
    for dtype in (torch.float32, torch.float64, torch.float16):
        with pytest.raises(ValueError, match=rf"^dtype: got {dtype}; accepted: torch\.bfloat16"):
            packed.to(dtype=dtype)
    with pytest.raises(ValueError, match=r"^dtype: got torch\.int32; accepted: .*torch\.bfloat16"):
        packed.to(torch.int32)


def test_repr_states_the_key_facts():
    packed = TwELL.pack(one_tile_with(40, columns=300), overflow="spill")
    # 3 rows of 2 tiles of 32 words of 4 bytes, 9 spilled entries of 10 bytes
    assert repr(packed) == (
        "TwELL(M=3, H=300, tile=256, compression=8, spilled=9, nnz/row=13.3, "
        f"858 B ({858 / 1800:.1%} of dense), bfloat16, cpu)"
    )
    assert "meta" in repr(packed.to("meta"))
    assert "nnz" not in repr(packed.to("meta"))
    assert repr(TwELL.pack(torch.zeros(0, 7, dtype=torch.bfloat16))).startswith("TwELL(M=0, H=7, tile=256")


BF16 = torch.zeros(2, 8, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("dense", "options", "message"),
    [
        ([[1.0]], {}, r"^dense: got a list; accepted: a 2-D floating-point torch\.Tensor"),
        (None, {}, r"^dense: got a NoneType; accepted: a 2-D floating-point torch\.Tensor"),
        (BF16[0], {}, r"^dense: got shape \(8,\); accepted: a 2-D tensor"),
        (BF16[None], {}, r"^dense: got shape \(1, 2, 8\); accepted: a 2-D tensor"),
        (BF16.int(), {}, r"^dense: got dtype torch\.int32; accepted: .*torch\.bfloat16"),
        (BF16.float(), {}, r"^dense: got dtype torch\.float32; accepted: torch\.bfloat16"),
        (BF16.half(), {}, r"^dense: got dtype torch\.float16; accepted: torch\.bfloat16"),
        (BF16, {"overflow": "grow"}, r"^overflow: got 'grow'; accepted: 'error' \| 'spill'"),
        (BF16, {"overflow": None}, r"^overflow: got None; accepted: 'error' \| 'spill'"),
        (BF16, {"tile": 0}, r"^tile: got 0; accepted: an integer >= 1"),
        (BF16, {"tile": -8}, r"^tile: got -8; accepted: an integer >= 1"),
        (BF16, {"tile": 8.0}, r"^tile: got 8\.0; accepted: an integer >= 1"),
        (BF16, {"tile": True}, r"^tile: got True; accepted: an integer >= 1"),
        (BF16, {"compression": 0}, r"^compression: got 0; accepted: an integer >= 1"),
        (BF16, {"compression": "8"}, r"^compression: got '8'; accepted: an integer >= 1"),
        (BF16, {"compression": 3}, r"^compression: got 3 with tile 256; accepted: a divisor of tile"),
        (BF16, {"compression": 256}, r"^compression: got 256 with tile 256; .* at least 2 words"),
        (BF16, {"tile": 4, "compression": 8}, r"^compression: got 8 with tile 4; accepted: a divisor"),
    ],
)
def test_bad_input_is_refused_by_name(dense, options, message):
    with pytest.raises(ValueError, match=message):
        TwELL.pack(dense, **options)
