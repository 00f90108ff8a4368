"""Activation matrices for the format tests, built and compared as integer bit patterns.

Everything here works on unsigned integers, so that a NaN payload, a denormal or the sign of a zero
can neither be lost by the test nor be excused by a floating-point comparison.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

# dtype: (bits of a value, bits of its mantissa)
_LAYOUT = {
    torch.float64: (64, 52),
    torch.float32: (32, 23),
    torch.float16: (16, 10),
    torch.bfloat16: (16, 7),
}
_TORCH_INT = {64: torch.int64, 32: torch.int32, 16: torch.int16}
DTYPES = tuple(_LAYOUT)

PATTERNS = ("empty", "full", "sparse", "half", "skewed rows", "skewed columns", "one full row")
VALUES = ("any bits", "special", "ordinary")
LAYOUTS = ("contiguous", "transposed", "stepped", "column slice")


def _uint(width: int) -> type:
    return np.dtype(f"uint{width}").type


def sign_bit(dtype: torch.dtype) -> int:
    return 1 << (_LAYOUT[dtype][0] - 1)


def special_patterns(dtype: torch.dtype) -> list[int]:
    """NaN with several payloads, infinities, denormals, the ends of the normal range."""
    width, mantissa_bits = _LAYOUT[dtype]
    sign, mantissa = 1 << (width - 1), (1 << mantissa_bits) - 1
    infinity = (sign - 1) ^ mantissa
    quiet_nan = infinity | 1 << (mantissa_bits - 1)
    positive = [
        quiet_nan,
        quiet_nan | 5,
        infinity | 1,  # a signalling NaN
        infinity | mantissa,
        infinity,
        infinity - 1,  # largest finite
        mantissa + 1,  # smallest normal
        mantissa,  # largest denormal
        1,  # smallest denormal
    ]
    return positive + [pattern | sign for pattern in positive]


def bits_of(tensor: Tensor) -> np.ndarray:
    """The tensor's values as unsigned integers."""
    width = tensor.element_size() * 8
    integers = tensor.detach().cpu().contiguous().view(_TORCH_INT[width]).numpy()
    return integers.view(_uint(width))


def from_bits(bits: np.ndarray, dtype: torch.dtype) -> Tensor:
    """The inverse of `bits_of`."""
    width = _LAYOUT[dtype][0]
    integers = np.ascontiguousarray(bits, dtype=_uint(width)).view(f"int{width}")
    return torch.from_numpy(integers.copy()).view(dtype)


def active_mask(bits: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """True where the pattern is neither +0 nor -0."""
    return (bits & _uint(_LAYOUT[dtype][0])(sign_bit(dtype) - 1)) != 0


def assert_same_bits(got: Tensor, expected_bits: np.ndarray) -> None:
    assert tuple(got.shape) == expected_bits.shape
    np.testing.assert_array_equal(bits_of(got), expected_bits)


def stored_bytes(packed: object, fields: tuple[str, ...]) -> int:
    """Bytes that the named tensors really hold in memory."""
    return sum(getattr(packed, name).untyped_storage().nbytes() for name in fields)


@dataclass(frozen=True)
class MatrixCase:
    """A matrix to pack and the bits that must come back.

    dense:     the input, in any memory layout, possibly requiring grad and holding -0.0
    expected:  unsigned integers [M, H], the input's bits with -0.0 replaced by +0.0
    """

    dense: Tensor
    expected: np.ndarray

    @property
    def active(self) -> np.ndarray:
        return self.expected != 0

    @property
    def nnz(self) -> int:
        return int(np.count_nonzero(self.expected))


def assert_exact(packed: object, case: MatrixCase, fields: tuple[str, ...]) -> None:
    """`packed` holds the matrix of `case` bit by bit, and says how much; fields: all of its tensors."""
    assert packed.dtype == packed.unpack().dtype == case.dense.dtype
    assert_same_bits(packed.unpack(), case.expected)
    assert packed.nnz() == case.nnz
    assert packed.shape == case.expected.shape
    assert packed.memory_bytes() == stored_bytes(packed, fields)
    assert packed.dense_bytes() == case.expected.nbytes
    assert not any(tensor.requires_grad for tensor in packed.tensors().values())


def build_case(
    rng: np.random.Generator,
    shape: tuple[int, int],
    dtype: torch.dtype,
    *,
    pattern: str,
    values: str,
    layout: str,
    negative_zeros: bool,
) -> MatrixCase:
    """A random matrix of the given kind: one of PATTERNS, one of VALUES, one of LAYOUTS."""
    bits = np.where(
        _pattern(rng, pattern, shape),
        _values(rng, values, shape, dtype),
        _zeros(rng, negative_zeros, shape, dtype),
    )
    expected = np.where(active_mask(bits, dtype), bits, 0).astype(bits.dtype)
    return MatrixCase(_lay_out(bits, layout, dtype), expected)


def _values(rng: np.random.Generator, kind: str, shape: tuple[int, int], dtype: torch.dtype) -> np.ndarray:
    uint = _uint(_LAYOUT[dtype][0])
    if kind == "any bits":
        return rng.integers(0, np.iinfo(uint).max, shape, dtype=uint, endpoint=True)
    if kind == "special":
        return rng.choice(np.array(special_patterns(dtype), dtype=uint), shape)
    return bits_of(torch.from_numpy(rng.standard_normal(shape)).to(dtype))


def _zeros(
    rng: np.random.Generator, negative: bool, shape: tuple[int, int], dtype: torch.dtype
) -> np.ndarray:
    uint = _uint(_LAYOUT[dtype][0])
    if not negative:
        return np.zeros(shape, uint)
    return np.where(rng.random(shape) < 0.5, uint(sign_bit(dtype)), uint(0))


def _pattern(rng: np.random.Generator, kind: str, shape: tuple[int, int]) -> np.ndarray:
    rows, columns = shape
    rates = {
        "empty": 0.0,
        "full": 1.0,
        "sparse": 0.05,
        "half": 0.5,
        "skewed rows": rng.random((rows, 1)) ** 3,
        "skewed columns": rng.random((1, columns)) ** 3,
        "one full row": (np.arange(rows) == rng.integers(max(rows, 1)))[:, None] + 0.02,
    }
    return rng.random(shape) < rates[kind]


def _lay_out(bits: np.ndarray, layout: str, dtype: torch.dtype) -> Tensor:
    """A tensor of the given bits; memory between the elements of a strided one is all ones (a NaN)."""
    rows, columns = bits.shape
    matrix = from_bits(bits, dtype)
    if layout == "contiguous":
        return matrix
    if layout == "transposed":
        return from_bits(bits.T, dtype).T
    if layout == "stepped":
        around = np.full((2 * rows + 1, 3 * columns + 2), ~bits.dtype.type(0))
        window = np.s_[1 : 2 * rows + 1 : 2, 2 : 3 * columns + 2 : 3]
    else:
        around = np.full((rows, columns + 5), ~bits.dtype.type(0))
        window = np.s_[:, 3 : columns + 3]
    around[window] = bits
    return from_bits(around, dtype)[window]
