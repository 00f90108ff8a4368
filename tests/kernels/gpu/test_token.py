"""What a generated token passes around its blocks, against plain PyTorch: interpreted, and on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention

from twell.kernels.gpu.token import add_and_norm, attend, attention_splits, linear_of_few
from twell.kernels.gpu.token import gpu_of as device_of

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@pytest.fixture(params=["interpreted", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if (request.param == "cuda") != torch.cuda.is_available():
        pytest.skip("kernels are interpreted where there is no GPU, and only there")
    torch.manual_seed(0)
    with torch.device("cuda" if request.param == "cuda" else "cpu") as found:
        yield found


def skip_if_interpreted(device, dtype, elements=0):
    if device.type == "cpu" and (elements > 100_000 or dtype == torch.bfloat16):
        pytest.skip("the interpreter is slow, and cuts bfloat16 off where a GPU rounds")


OF_THE_NORM = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def close(got, wanted, dtype, stock=None):
    """Value by value, and as a whole: sums over long texts are small. stock: PyTorch's own result in `dtype`,
    for what rounding changes more than by the dtype's precision."""
    got, wanted = got.double(), wanted.double()
    torch.testing.assert_close(got, wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    most = OF_THE_NORM[dtype] * wanted.norm()
    if stock is not None:
        most = max(most, 2 * (stock.double() - wanted).norm())
    assert (got - wanted).norm() <= most


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("tokens", "outputs", "features"),
    [
        (1, 24, 40),
        (1, 16, 32),
        (3, 40, 72),
        (5, 8, 16),
        (1, 6144, 2048),
        (1, 264, 8192),
        (2, 520, 2056),
        (4, 520, 2040),
        (17, 64, 2056),
    ],
)
@pytest.mark.parametrize("biased", [False, True])
def test_linear(device, tokens, outputs, features, biased, dtype):
    skip_if_interpreted(device, dtype, outputs * features)
    x, w = (
        torch.randn(tokens, features, dtype=dtype),
        torch.randn(outputs, features, dtype=dtype) / features**0.5,
    )
    bias = torch.randn(outputs, dtype=dtype) if biased else None
    wanted = linear(x.double(), w.double(), None if bias is None else bias.double())
    close(linear_of_few(x, w, bias), wanted, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("features", [32, 40, 2056])
@pytest.mark.parametrize("changed", [False, True])
def test_norm(device, features, changed, dtype):
    skip_if_interpreted(device, dtype)
    x, weight = torch.randn(3, features, dtype=dtype), torch.randn(features, dtype=dtype)
    change = torch.randn(3, features, dtype=dtype) if changed else None
    total, normed = add_and_norm(x, change, weight, 1e-3)
    assert torch.equal(total, x + change if changed else x)
    close(normed, rms_norm(total.double(), (features,), weight.double(), 1e-3), dtype)


def turned(x, cosines, sines):
    half = x.shape[-1] // 2
    return x * cosines + torch.cat((-x[..., half:], x[..., :half]), -1) * sines


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("batch", "heads", "key_heads", "size", "columns", "last"),
    [
        (2, 4, 2, 24, 48, 37),
        (1, 3, 3, 16, 96, 50),
        (1, 2, 1, 16, 96, 0),
        (2, 2, 2, 8, 16, 15),
        (1, 2, 1, 16, 96, 1),
        (1, 32, 32, 64, 256, 255),
        (8, 32, 8, 128, 1024, 700),
        (1, 32, 4, 128, 8192, 5000),
        (40, 14, 2, 64, 512, 300),
        (2, 6, 2, 96, 4096, 5),
        (1, 8, 8, 256, 1024, 1000),
    ],
)
def test_attention(device, batch, heads, key_heads, size, columns, last, dtype):
    skip_if_interpreted(device, dtype, batch * key_heads * size * columns)
    projected = torch.randn(batch, (heads + 2 * key_heads) * size, dtype=dtype)
    angles = torch.rand(batch, size // 2) * 6
    cosines, sines = (torch.cat((f(angles), f(angles)), -1).to(dtype) for f in (torch.cos, torch.sin))
    keys, values = (torch.randn(batch, key_heads, columns, size, dtype=dtype) for _ in range(2))
    mask = torch.full((batch, columns), torch.finfo(dtype).min, dtype=dtype)
    mask[:, : last + 1] = 0
    mask[-1, : last // 2] = torch.finfo(dtype).min  # padded on the left
    # Beyond the new token there is nothing; a NaN there must not be read.
    keys[:, :, last:], values[:, :, last:] = torch.nan, torch.nan

    def stock(to):
        """PyTorch's attention [B, heads * size] in the dtype `to`, and the cache with the new token."""
        cache = [keys.to(to, copy=True), values.to(to, copy=True)]
        query, key, value = projected.to(to).split([heads * size, key_heads * size, key_heads * size], -1)
        query, key, value = (t.view(batch, -1, size) for t in (query, key, value))
        query, key = (turned(t, cosines.to(to)[:, None], sines.to(to)[:, None]) for t in (query, key))
        cache[0][:, :, last], cache[1][:, :, last] = key, value
        seen = scaled_dot_product_attention(
            query[:, :, None],
            *(t[:, :, : last + 1] for t in cache),
            attn_mask=mask.to(to)[:, None, None, : last + 1],
            scale=0.3,
            enable_gqa=True,
        )
        return seen.reshape(batch, -1), cache

    wanted, theirs = stock(torch.float64)
    rounded, _ = stock(dtype)
    seen = attend(projected, cosines, sines, mask, torch.tensor([last]), keys, values, 0.3)
    close(seen, wanted, dtype, rounded)
    for got, filled in zip((keys, values), theirs, strict=True):
        close(got[:, :, last], filled[:, :, last], dtype)
        assert got[:, :, last + 1 :].isnan().all()


def test_long_texts_are_split(device):
    assert attention_splits(device_of(device), 1, 96) > 1
