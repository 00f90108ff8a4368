"""The row path in Triton's interpreter: words, overflow, outputs; tiles of 64 neurons and 32 tokens there."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from twell import reference
from twell.activations import Activation
from twell.formats.row import TwELL
from twell.kernels.gpu.device import gpu_of
from twell.kernels.gpu.operands import prepare
from twell.kernels.gpu.row import run as rows
from twell.problem import FfnArgs
from twell.synthetic import make_ffn

from ...accuracy import assert_accurate, every_activation, stock_dense

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="with a GPU the kernels themselves are tested"
)

TILE, HIDDEN, NEURONS = 64, 40, 104  # neither is a multiple of a tile
TOKENS = 35
SOME, MANY, ALL = -20, 0, 200  # biases: about 6%, half and all neurons active


@pytest.fixture(params=[True, False], ids=["hopper", "portable"])
def form(request, monkeypatch):
    """Both forms of the packing kernel."""
    original = rows.row_tiles
    monkeypatch.setattr(rows, "row_tiles", lambda *a: replace(original(*a), pack_hopper=request.param))


def integers(tokens=TOKENS, neurons=NEURONS, shift=SOME, gated=True, seed=0):
    """Operands whose pre-activations are small integers: exact in float16, whatever the order of a sum."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randint(-2, 3, shape, generator=generator).to(torch.float16)

    x, up, down, gate = draw(tokens, HIDDEN), draw(neurons, HIDDEN), draw(HIDDEN, neurons) / 8, None
    bias = torch.full((neurons,), float(shift), dtype=torch.float16)
    biases = {"up_bias": bias, "down_bias": draw(HIDDEN)}
    if gated:
        gate = draw(neurons, HIDDEN)
        biases |= {"gate_bias": bias, "up_bias": draw(neurons)}
    return (x, up, down, gate), biases


def operands_of(tensors, biases=None, activation="relu"):
    names = ("up_bias", "down_bias", "gate_bias")
    return prepare(FfnArgs(*tensors, *((biases or {}).get(n) for n in names), Activation.parse(activation)))


def selector_activations(tensors, biases, activation):
    """float16 [M, H], exact for `integers`."""
    x, up, _, gate = tensors
    weight, bias = (up, biases["up_bias"]) if gate is None else (gate, biases["gate_bias"])
    return Activation.parse(activation)((x.float() @ weight.float().mT + bias.float()).half())


def check(tensors, biases=None, activation="relu", compression=8):
    biases = biases or {}
    y = rows.run_rows(operands_of(tensors, biases, activation), compression)
    exact = reference.ffn(*tensors, activation=activation, dtype=torch.float64, **biases)
    assert_accurate(y, exact.y, stock_dense(*tensors, activation=activation, **biases))


def check_words(words, expected, compression, tile=TILE):
    """Against activations [M, H]: every count, every entry of a tile that fits, no word beyond."""
    capacity = tile // compression - 1
    tokens, neurons = expected.shape
    tiles = -(-neurons // tile)
    words = words.view(tokens, tiles, capacity + 1)
    padded = torch.nn.functional.pad(expected, (0, tiles * tile - neurons)).view(tokens, tiles, tile)
    counts = (padded != 0).sum(-1)
    assert torch.equal(words[..., 0].long(), counts)
    entries, held = words[..., 1:], counts.clamp(max=capacity)
    used = torch.arange(capacity) < held.unsqueeze(-1)
    assert not entries[~used].any()

    m, t, slot = used.nonzero(as_tuple=True)
    word = entries[m, t, slot]
    index, value = word & 0xFFFF, (word >> 16).to(torch.int16).view(torch.float16)
    assert torch.equal(index // tile, t.int())
    found = torch.zeros_like(expected)
    found[m, index] = value
    assert (found != 0).sum() == held.sum()  # no neuron twice
    torch.testing.assert_close(found[found != 0], expected[found != 0], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("shift", [-200, SOME, MANY, ALL], ids=["none", "some", "many", "all"])
@pytest.mark.parametrize("compression", [2, 4, 8])
def test_words_hold_the_activations(form, shift, compression):
    tensors, biases = integers(shift=shift)
    words = rows.packed_words(operands_of(tensors, biases), compression)
    check_words(words, selector_activations(tensors, biases, "relu"), compression)


@every_activation(3)
def test_words_of_every_activation(form, activation, gated):
    tensors, biases = integers(neurons=128, gated=gated, seed=1)  # whole tiles
    words = rows.packed_words(operands_of(tensors, biases, activation))
    check_words(words, selector_activations(tensors, biases, activation), 8)


@pytest.mark.parametrize("shift", [-16, MANY, ALL], ids=["some", "many", "all"])
def test_words_of_real_tiles(form, shift, monkeypatch):
    """256 neurons: ranks up to 255 in the bytes that count them, of which 127 fit."""
    small = rows.row_tiles
    monkeypatch.setattr(rows, "row_tiles", lambda *a: replace(small(*a), tile=256))
    tensors, biases = integers(neurons=300, shift=shift)
    words = rows.packed_words(operands_of(tensors, biases), 2)
    check_words(words, selector_activations(tensors, biases, "relu"), 2, tile=256)


def test_words_agree_with_the_format():
    """Counts and neurons of each tile are those of `TwELL.pack`, which keeps the excess elsewhere."""
    tensors, biases = integers(shift=-14)
    words = rows.packed_words(operands_of(tensors, biases)).view(TOKENS, -1, 8)
    dense = selector_activations(tensors, biases, "relu").bfloat16()
    packed = TwELL.pack(dense, TILE, 8, overflow="spill")
    assert packed.words.numel() == words.numel()
    assert 0 < packed.spill_rows.numel() < packed.nnz()
    assert torch.equal(words[..., 0].clamp(max=7), packed.counts())
    fits = words[..., 0] <= 7
    theirs = packed.words.view(torch.int32).view_as(words)[..., 1:] & 0xFFFF
    assert torch.equal((words[..., 1:] & 0xFFFF)[fits].sort(-1).values, theirs[fits].sort(-1).values)


def test_a_nan_is_active_and_nothing_past_the_borders_is(form):
    """Zero padding times NaN is NaN: for tokens past M and neurons past H, it must not be packed."""
    (x, up, down, gate), biases = integers()
    x[3, 5], gate[7, 2] = float("nan"), float("nan")
    operands = operands_of((x, up, down, gate), biases)
    target = gpu_of(x.device)
    tiles = rows.row_tiles(target, HIDDEN, HIDDEN)
    words = torch.full((64, 2 * 8), -1, dtype=torch.int32)  # as many tokens as the matmul tiles cover
    rows._launch_pack(operands, operands.x, words, target, tiles, 8)
    assert (words[TOKENS:] == -1).all()
    assert words[3, [0, 8]].tolist() == [TILE, NEURONS - TILE]
    expected = selector_activations((x, up, down, gate), biases, "relu")
    check_words(rows.packed_words(operands), expected, 8)


def test_a_nan_reaches_the_output():
    (x, up, down, gate), biases = integers(tokens=5)
    x[3, 5] = float("nan")
    y = rows.run_rows(operands_of((x, up, down, gate), biases))
    assert torch.isnan(y).all(-1).tolist() == [False, False, False, True, False]
    assert not torch.isnan(y[[0, 1, 2, 4]]).any()
    gate[7, 2] = float("nan")  # a gate of every token
    assert torch.isnan(rows.run_rows(operands_of((x, up, down, gate), biases))).all()


@pytest.mark.parametrize("nnz", [0, 1, 12, NEURONS])
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
def test_matches_the_oracle(nnz, gated):
    """From none to all active; at 12 some tiles overflow, at the end all do."""
    tokens = 5 if nnz == NEURONS else 12
    check(make_ffn(tokens, HIDDEN, NEURONS, nnz, gated=gated, dtype=torch.float16, seed=2).operands())


@every_activation(3)
@pytest.mark.parametrize("shift", [SOME, MANY], ids=["some", "overflowing"])
def test_activations_and_biases(activation, gated, shift):
    tensors, biases = integers(tokens=4, shift=shift, gated=gated, seed=3)
    check(tensors, biases, activation)


def test_overflow_adds_nothing_and_drops_nothing():
    """A compression under which tiles overflow gives what one gives under which none does."""
    tensors, biases = integers(tokens=6, shift=-10, seed=4)
    operands = operands_of(tensors, biases)
    counts = rows.packed_words(operands, 8)[:, ::8]
    assert 7 < counts.max() <= 31
    torch.testing.assert_close(rows.run_rows(operands, 8), rows.run_rows(operands, 2), rtol=2e-3, atol=0)


def test_slices_of_a_wide_output():
    x, up, down, gate = make_ffn(4, HIDDEN, NEURONS, 9, dtype=torch.float16, seed=5).operands()
    check((x, up, torch.cat([down, down.flip(0)]), gate))  # 80 outputs, 64 in one slice


def test_slabs_change_nothing(monkeypatch):
    tensors, biases = integers(tokens=70, shift=-40, seed=6)
    operands = operands_of(tensors, biases)
    whole = rows.run_rows(operands)
    monkeypatch.setattr(rows, "WORDS_BYTES", 4 * 16 * 40)
    assert rows._slab_tokens(70, 16, 32) == 32
    assert torch.equal(rows.run_rows(operands), whole)


def test_slabs_fill_the_buffer():
    assert rows._slab_tokens(65_536, 704, 128) == 65_536
    assert rows._slab_tokens(1_000_000, 704, 128) * 704 * 4 <= rows.WORDS_BYTES
    assert rows._slab_tokens(1, 10**9, 128) == 128


def test_no_tokens():
    (x, up, down, gate), _ = integers(tokens=0)
    operands = operands_of((x, up, down, gate))
    assert rows.run_rows(operands).shape == (0, HIDDEN)
    assert rows.packed_words(operands).shape == (0, 16)


def test_refusals():
    (x, up, down, gate), _ = integers(tokens=1)
    with pytest.raises(ValueError, match=r"x: got dtype torch\.float32; accepted: torch\.bfloat16"):
        rows.run_rows(operands_of((x.float(), up.float(), down.float(), gate.float())))
    with pytest.raises(ValueError, match=r"compression: got 1; accepted: 2 \| 4 \| 8"):
        rows.run_rows(operands_of((x, up, down, gate)), 1)
    wide = torch.zeros(65_536, 8, dtype=torch.float16)
    with pytest.raises(ValueError, match="up: got H = 65536 neurons"):
        rows.packed_words(operands_of((x[:, :8], wide, wide.mT, None)))


@pytest.mark.parametrize(
    ("features", "outputs", "slices", "depth"),
    [(2048, 2048, 1, 1024), (40, 24, 1, 64), (5120, 9000, 3, 2048)],
)
def test_tiles_of_real_devices(features, outputs, slices, depth):
    for capability in [(8, 0), (9, 0), (10, 0)]:
        target = replace(gpu_of(torch.device("cpu")), capability=capability)
        tiles = rows.row_tiles(target, features, outputs)
        assert tiles.tile == 256
        assert tiles.pack_hopper == (capability == (9, 0))
        assert -(-outputs // tiles.apply_width) == slices
        assert tiles.apply_depth == depth
