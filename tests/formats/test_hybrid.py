"""Hybrid: routing of heavy rows, round trip, transpose and refusals."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from twell import Hybrid

from .cases import DTYPES, assert_exact, assert_same_bits, bits_of, stored_bytes
from .strategies import matrices

FIELDS = ("indices", "values", "counts", "route", "backup", "backup_rows")
TRANSPOSED_FIELDS = ("offsets", "tokens", "values", "backup", "backup_rows")

caps = st.one_of(st.sampled_from([0, 1, 2, 128]), st.integers(0, 50))
# Shares are powers of two, so that share * M is exact and rounding up has one answer.
backups = st.one_of(st.sampled_from([0.0, 1 / 8, 1 / 2, 1.0]), st.integers(0, 60))


def planned_rows(backup: float | int, tokens: int) -> int:
    return min(backup, tokens) if isinstance(backup, int) else math.ceil(backup * tokens)


def rows_with(*non_zeros: int, columns: int = 8) -> torch.Tensor:
    """float32 [len(non_zeros), columns] with that many leading non-zeros per row."""
    dense = torch.zeros(len(non_zeros), columns)
    for row, count in zip(dense, non_zeros, strict=True):
        row[:count] = torch.arange(1, count + 1)
    return dense


@given(matrices(), caps, backups)
def test_round_trip_is_exact(case, cap, backup):
    assert_exact(Hybrid.pack(case.dense, cap, backup), case, FIELDS)


@given(matrices(), caps, backups)
def test_rows_above_the_cap_and_only_those_are_in_the_backup(case, cap, backup):
    packed = Hybrid.pack(case.dense, cap, backup)
    tokens, columns = case.expected.shape
    heavy = [m for m in range(tokens) if np.count_nonzero(case.expected[m]) > cap]
    backup_size = max(planned_rows(backup, tokens), len(heavy))
    assert tuple(packed.backup.shape) == (backup_size, columns)
    assert sorted(m for m in packed.backup_rows.tolist() if m != -1) == heavy
    assert packed.backup_rows.numel() == backup_size
    assert [m for m, row in enumerate(packed.route.tolist()) if row != -1] == heavy
    assert packed.heavy_rows() == len(heavy)
    for m in heavy:
        row = int(packed.route[m])
        assert packed.backup_rows[row] == m
        assert packed.counts[m] == 0
        assert_same_bits(packed.backup[row], case.expected[m])


@given(matrices(), caps, backups)
def test_light_rows_are_compact_and_ascending(case, cap, backup):
    packed = Hybrid.pack(case.dense, cap, backup)
    tokens, columns = case.expected.shape
    width = min(cap, columns)
    assert tuple(packed.indices.shape) == tuple(packed.values.shape) == (tokens, width)
    integer_fields = (packed.indices, packed.counts, packed.route, packed.backup_rows)
    assert {field.dtype for field in integer_fields} == {torch.int32}
    indices, values = packed.indices.tolist(), bits_of(packed.values).tolist()
    for m, row in enumerate(case.expected.tolist()):
        entries = [(n, value) for n, value in enumerate(row) if value != 0]
        if len(entries) > cap:
            entries = []
        padding = [0] * (width - len(entries))
        assert packed.counts[m] == len(entries)
        assert indices[m] == [n for n, _ in entries] + padding
        assert values[m] == [value for _, value in entries] + padding


@given(matrices(), caps, backups)
def test_transpose_unpacks_to_the_transposed_matrix(case, cap, backup):
    transposed = Hybrid.pack(case.dense, cap, backup).transpose()
    assert transposed.dtype == transposed.unpack().dtype == case.dense.dtype
    assert_same_bits(transposed.unpack(), case.expected.T)
    assert transposed.nnz() == case.nnz
    assert transposed.shape == case.expected.T.shape
    assert transposed.memory_bytes() == stored_bytes(transposed, TRANSPOSED_FIELDS)
    assert transposed.dense_bytes() == case.expected.nbytes


@given(matrices(), caps)
def test_transpose_lists_the_light_tokens_of_each_neuron_ascending(case, cap):
    transposed = Hybrid.pack(case.dense, cap).transpose()
    light = [m for m, row in enumerate(case.expected) if np.count_nonzero(row) <= cap]
    offsets, tokens, values = [0], [], []
    for n in range(case.expected.shape[1]):
        fired = [m for m in light if case.expected[m, n] != 0]
        tokens += fired
        values += [int(case.expected[m, n]) for m in fired]
        offsets.append(len(tokens))
    assert transposed.offsets.dtype == torch.int64
    assert transposed.tokens.dtype == torch.int32
    assert transposed.offsets.tolist() == offsets
    assert transposed.tokens.tolist() == tokens
    assert bits_of(transposed.values).tolist() == values


@given(matrices(), caps, backups)
def test_error_mode_raises_exactly_when_the_backup_is_too_small(case, cap, backup):
    heavy = int((np.count_nonzero(case.expected, axis=1) > cap).sum())
    planned = planned_rows(backup, case.expected.shape[0])
    if heavy > planned:
        message = rf"^dense: got {heavy} rows with more than cap = {cap} .*at most {planned} such rows .*grow"
        with pytest.raises(ValueError, match=message):
            Hybrid.pack(case.dense, cap, backup, overflow="error")
    else:
        assert_same_bits(Hybrid.pack(case.dense, cap, backup, overflow="error").unpack(), case.expected)


def test_cap_boundary():
    packed = Hybrid.pack(rows_with(2, 3, 4, 0, 3), cap=3, backup=0)
    assert packed.route.tolist() == [-1, -1, 0, -1, -1]
    assert packed.counts.tolist() == [2, 3, 0, 0, 3]
    assert packed.backup_rows.tolist() == [2]


def test_cap_0_keeps_empty_rows_only():
    dense = rows_with(0, 1, 0, 8)
    packed = Hybrid.pack(dense, cap=0, backup=0)
    assert tuple(packed.indices.shape) == (4, 0)
    assert packed.backup_rows.tolist() == [1, 3]
    assert_same_bits(packed.unpack(), bits_of(dense))
    assert_same_bits(packed.transpose().unpack(), bits_of(dense).T)


@pytest.mark.parametrize(
    ("backup", "planned"),
    [(0, 0), (3, 3), (10, 10), (11, 10), (0.0, 0), (1 / 8, 2), (0.25, 3), (0.5, 5), (1.0, 10), (1, 1)],
)
def test_backup_is_a_share_or_a_number_of_rows(backup, planned):
    packed = Hybrid.pack(torch.zeros(10, 4), cap=1, backup=backup)
    assert tuple(packed.backup.shape) == (planned, 4)
    assert packed.backup_rows.tolist() == [-1] * planned


def test_overflow_grows_by_what_is_missing_or_raises():
    dense = rows_with(5, 1, 5, 5)
    assert Hybrid.pack(dense, cap=2, backup=1).backup_rows.tolist() == [0, 2, 3]
    assert Hybrid.pack(dense, cap=2, backup=3, overflow="error").backup_rows.tolist() == [0, 2, 3]
    message = (
        r'^dense: got 3 rows with more than cap = 2 .*at most 2 such rows \(backup=2\), or overflow="grow"'
    )
    with pytest.raises(ValueError, match=message):
        Hybrid.pack(dense, cap=2, backup=2, overflow="error")


def test_defaults_are_cap_128_and_an_eighth_of_the_rows():
    packed = Hybrid.pack(torch.zeros(16, 200))
    assert (packed.cap, tuple(packed.indices.shape), packed.backup.shape[0]) == (128, (16, 128), 2)


@given(matrices(), caps, st.sampled_from(DTYPES), st.booleans())
def test_to_dtype_casts_the_values(case, cap, dtype, transposed):
    packed = Hybrid.pack(case.dense, cap)
    cast = packed.transpose().to(dtype) if transposed else packed.to(dtype)
    zero = torch.zeros((), dtype=case.dense.dtype)
    expected = torch.where(case.dense.detach() == 0, zero, case.dense.detach()).to(dtype)
    got = cast.unpack().T if transposed else cast.unpack()
    assert cast.dtype == cast.backup.dtype == got.dtype == dtype
    assert torch.equal(got.isnan(), expected.isnan())
    assert_same_bits(got.nan_to_num(0.0), bits_of(expected.nan_to_num(0.0)))


@pytest.mark.parametrize("target", ["cpu", "meta", torch.device("cpu")])
@pytest.mark.parametrize("transposed", [False, True])
def test_to_device(target, transposed):
    dense = rows_with(1, 5, 2)
    packed = Hybrid.pack(dense, cap=2)
    expected = bits_of(dense)
    if transposed:
        packed, expected = packed.transpose(), expected.T
    moved = packed.to(target)
    assert {t.device.type for t in moved.tensors().values()} == {torch.device(target).type}
    assert moved.memory_bytes() == packed.memory_bytes()
    assert moved.shape == expected.shape
    both = packed.to(target, torch.float64)
    assert (both.device.type, both.dtype) == (torch.device(target).type, torch.float64)
    if torch.device(target).type == "cpu":
        assert_same_bits(moved.unpack(), expected)


def test_repr_states_the_key_facts():
    packed = Hybrid.pack(rows_with(1, 5, 2), cap=2, backup=2)
    # indices and values 3 * 2 * 8 bytes, counts and route 3 * 8, backup 2 * 8 * 4, backup_rows 2 * 4
    size = "144 B (150.0% of dense)"
    assert repr(packed) == (f"Hybrid(M=3, H=8, cap=2, backup=2, heavy=1, nnz/row=2.7, {size}, float32, cpu)")
    assert repr(packed.to("meta")) == f"Hybrid(M=3, H=8, cap=2, backup=2, {size}, float32, meta)"
    # offsets 9 * 8 bytes, 3 tokens and values of 8, backup as above
    assert repr(packed.transpose()) == (
        "HybridTransposed(H=8, M=3, backup=2, nnz/row=1.0, 168 B (175.0% of dense), float32, cpu)"
    )
    assert repr(Hybrid.pack(torch.zeros(0, 3))).startswith("Hybrid(M=0, H=3, cap=128, backup=0, heavy=0")


def test_repr_writes_large_sizes_in_binary_units():
    packed = Hybrid.pack(torch.zeros(64, 8), cap=8, backup=0)
    assert packed.memory_bytes() == 64 * (8 * 8 + 8)
    assert ", 4.5 KiB (225.0% of dense)" in repr(packed)


DENSE = torch.zeros(2, 8)
BACKUP_ACCEPTED = r"accepted: a float in \[0, 1\] .* or an integer >= 0"


@pytest.mark.parametrize(
    ("dense", "options", "message"),
    [
        (np.zeros((2, 2)), {}, r"^dense: got a ndarray; accepted: a 2-D floating-point torch\.Tensor"),
        (DENSE[0], {}, r"^dense: got shape \(8,\); accepted: a 2-D tensor"),
        (DENSE.int(), {}, r"^dense: got dtype torch\.int32; accepted: .*float32.*float64.*bfloat16.*float16"),
        (DENSE, {"overflow": "spill"}, r"^overflow: got 'spill'; accepted: 'grow' \| 'error'"),
        (DENSE, {"cap": -1}, r"^cap: got -1; accepted: an integer >= 0"),
        (DENSE, {"cap": 1.0}, r"^cap: got 1\.0; accepted: an integer >= 0"),
        (DENSE, {"cap": True}, r"^cap: got True; accepted: an integer >= 0"),
        (DENSE, {"cap": None}, r"^cap: got None; accepted: an integer >= 0"),
        (DENSE, {"backup": -1}, rf"^backup: got -1; {BACKUP_ACCEPTED}"),
        (DENSE, {"backup": -0.1}, rf"^backup: got -0\.1; {BACKUP_ACCEPTED}"),
        (DENSE, {"backup": 1.5}, rf"^backup: got 1\.5; {BACKUP_ACCEPTED}"),
        (DENSE, {"backup": math.nan}, rf"^backup: got nan; {BACKUP_ACCEPTED}"),
        (DENSE, {"backup": True}, rf"^backup: got True; {BACKUP_ACCEPTED}"),
        (DENSE, {"backup": "1/8"}, rf"^backup: got '1/8'; {BACKUP_ACCEPTED}"),
    ],
)
def test_bad_input_is_refused_by_name(dense, options, message):
    with pytest.raises(ValueError, match=message):
        Hybrid.pack(dense, **options)


@pytest.mark.parametrize("transposed", [False, True])
def test_to_refuses_a_dtype_that_is_not_floating_point(transposed):
    packed = Hybrid.pack(DENSE)
    with pytest.raises(ValueError, match=r"^dtype: got torch\.int8; accepted: torch\.float32, .*float16"):
        (packed.transpose() if transposed else packed).to(torch.int8)
