"""The formats on a GPU: packing there gives the very tensors that packing on the CPU gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from twell import BlockTwELL, Hybrid, TwELL

from .cases import DTYPES, LAYOUTS, PATTERNS, VALUES, MatrixCase, assert_same_bits, bits_of, build_case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch sees none"),
]

DEVICE = "cuda"
ROW_PACKERS = {
    "TwELL 256/8": lambda dense: TwELL.pack(dense, overflow="spill"),
    "TwELL 256/2": lambda dense: TwELL.pack(dense, compression=2, overflow="spill"),
    "TwELL 8/4": lambda dense: TwELL.pack(dense, 8, 4, overflow="spill"),
}
OTHER_PACKERS = {
    "BlockTwELL 128": BlockTwELL.pack,
    "BlockTwELL 7": lambda dense: BlockTwELL.pack(dense, rows=7),
    "Hybrid": Hybrid.pack,
    "Hybrid cap 0": lambda dense: Hybrid.pack(dense, cap=0, backup=0.0),
    "Hybrid cap 20": lambda dense: Hybrid.pack(dense, cap=20, backup=3),
    "Hybrid transposed": lambda dense: Hybrid.pack(dense, cap=20).transpose(),
}
PACKERS = ROW_PACKERS | OTHER_PACKERS
SHAPES = [(0, 5), (5, 0), (1, 1), (7, 256), (128, 521), (129, 257), (300, 31), (64, 1000)]


def random_case(seed: int, dtypes: tuple[torch.dtype, ...]) -> MatrixCase:
    """Every shape and pattern in turn; the rest at random."""
    rng = np.random.default_rng(seed)
    return build_case(
        rng,
        SHAPES[seed % len(SHAPES)],
        dtypes[rng.integers(len(dtypes))],
        pattern=PATTERNS[seed % len(PATTERNS)],
        values=VALUES[rng.integers(len(VALUES))],
        layout=LAYOUTS[rng.integers(len(LAYOUTS))],
        negative_zeros=bool(rng.integers(2)),
    )


def on_device(dense: Tensor) -> Tensor:
    """A copy on the GPU with the same strides and offset, which `Tensor.to` would not keep."""
    stored = dense.untyped_storage().nbytes() // dense.element_size()
    flat = dense.detach().as_strided((stored,), (1,), 0).to(DEVICE)
    return flat.as_strided(dense.shape, dense.stride(), dense.storage_offset())


@pytest.mark.parametrize("name", PACKERS)
@pytest.mark.parametrize("seed", range(len(SHAPES) * len(PATTERNS)))
def test_pack_equals_the_cpu_field_by_field_and_round_trips(name, seed):
    case = random_case(seed, (torch.bfloat16,) if name in ROW_PACKERS else DTYPES)
    packed, on_cpu = PACKERS[name](on_device(case.dense)), PACKERS[name](case.dense)
    assert packed.shape == on_cpu.shape
    assert packed.tensors().keys() == on_cpu.tensors().keys()
    for field, expected in on_cpu.tensors().items():
        got = packed.tensors()[field]
        assert got.device.type == torch.device(DEVICE).type, field
        assert got.dtype == expected.dtype, field
        assert_same_bits(got, bits_of(expected))
    transposed = name == "Hybrid transposed"
    assert packed.unpack().device.type == torch.device(DEVICE).type
    assert_same_bits(packed.unpack(), case.expected.T if transposed else case.expected)
    assert packed.nnz() == case.nnz


@pytest.mark.parametrize("name", PACKERS)
def test_moving_to_the_gpu_and_back_keeps_every_field(name):
    dense = torch.relu(torch.randn(37, 300, generator=torch.Generator().manual_seed(0))).bfloat16()
    packed = PACKERS[name](dense)
    returned = packed.cuda().cpu()
    assert packed.cuda().device.type == "cuda"
    for field, expected in packed.tensors().items():
        assert_same_bits(returned.tensors()[field], bits_of(expected))
    assert "cuda" in repr(packed.cuda())


def test_overflow_errors_are_raised_on_the_gpu():
    dense = torch.ones(2, 256, dtype=torch.bfloat16, device=DEVICE)
    with pytest.raises(ValueError, match="at most 31 non-zeros per tile"):
        TwELL.pack(dense)
    with pytest.raises(ValueError, match="at most 1 such rows"):
        Hybrid.pack(dense, cap=10, backup=1, overflow="error")
