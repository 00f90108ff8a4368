"""Memory: peaks and saved tensors against sizes computed by hand."""

from __future__ import annotations

import os
import weakref

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from twell.measure import peak_bytes, saved_bytes

KIB = 1024


def buffer(kib: int) -> Tensor:
    return torch.empty(kib * KIB, dtype=torch.uint8)


@torch.library.custom_op("twell_test_measure::scratch", mutates_args=())
def scratch(x: Tensor, kib: int) -> Tensor:
    """Allocates `kib` KiB that never leave the op, then returns a copy of `x`."""
    temporary = buffer(kib)
    result = x.clone()
    del temporary
    return result


@scratch.register_fake
def _(x: Tensor, kib: int) -> Tensor:
    return torch.empty_like(x)


scratch.register_autograd(
    lambda ctx, grad: (grad * ctx.saved_tensors[0].sum(), None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0] * 2),
)


def test_peak_of_one_allocation():
    assert peak_bytes(lambda: buffer(64)) == 64 * KIB


def test_peak_counts_what_lives_together():
    def fn() -> Tensor:
        first = buffer(100)
        del first
        second, third = buffer(30), buffer(40)
        del second
        return third

    assert peak_bytes(fn, "cpu") == 100 * KIB


def test_peak_of_tensors_that_live_together():
    assert peak_bytes(lambda: (buffer(30), buffer(40))) == 70 * KIB


def test_peak_ignores_what_existed_before():
    existing = buffer(512)
    assert peak_bytes(lambda: existing.zero_()) == 0
    assert peak_bytes(lambda: None) == 0


def test_peak_of_an_expression():
    x = torch.ones(64 * KIB // 4)
    assert peak_bytes(lambda: x.relu().square()) == 2 * 64 * KIB
    assert peak_bytes(lambda: x.relu().relu_()) == 64 * KIB


def test_peak_sees_inside_custom_ops():
    x = torch.ones(16 * KIB // 4)
    assert peak_bytes(lambda: scratch(x, 200)) == 216 * KIB


def test_peak_includes_the_backward_pass():
    x = torch.ones(16 * KIB // 4, requires_grad=True)

    forward = peak_bytes(lambda: x.exp().sum())
    backward = peak_bytes(lambda: x.exp().sum().backward())
    assert 16 * KIB <= forward < 17 * KIB
    assert 32 * KIB <= backward < 33 * KIB


def test_peak_is_repeatable_and_quiet(capfd):
    assert [peak_bytes(lambda: buffer(8)) for _ in range(3)] == [8 * KIB] * 3
    assert capfd.readouterr() == ("", "")


def test_standard_error_works_inside_and_after_a_failure(capfd):
    def fn() -> None:
        os.write(2, b"inside\n")
        raise RuntimeError("from the function")

    with pytest.raises(RuntimeError, match="from the function"):
        peak_bytes(fn)
    os.write(2, b"after\n")
    assert capfd.readouterr().err == "inside\nafter\n"
    assert peak_bytes(lambda: buffer(8)) == 8 * KIB


def test_peak_on_an_unknown_device_is_refused():
    with pytest.raises(ValueError, match="device: got 'meta'"):
        peak_bytes(lambda: None, "meta")


N = 1000
BYTES = 4 * N


@pytest.fixture
def x() -> Tensor:
    return torch.linspace(-1, 1, N, requires_grad=True)


def test_relu_saves_its_output(x):
    assert saved_bytes(lambda: x.relu()) == BYTES


def test_relu_and_square_share_one_storage(x):
    """relu keeps its output, square keeps its input: the same tensor."""
    assert saved_bytes(lambda: x.relu().square()) == BYTES


def test_a_chain_keeps_each_link_once(x):
    """relu's output, and square's, which the second square keeps."""
    assert saved_bytes(lambda: x.relu().square().square()) == 2 * BYTES


def test_excluded_tensors_do_not_count(x):
    weight = torch.ones(N, requires_grad=True)
    assert saved_bytes(lambda: (x * weight).exp()) == 3 * BYTES
    assert saved_bytes(lambda: (x * weight).exp(), exclude=[weight]) == 2 * BYTES
    assert saved_bytes(lambda: (x * weight).exp(), exclude=iter([x, weight])) == BYTES


def test_excluding_a_view_excludes_its_storage(x):
    assert saved_bytes(lambda: x.square(), exclude=[x.detach()[:10]]) == 0


def test_views_of_one_storage_count_once_and_whole(x):
    """Two halves of one tensor, kept twice each: its storage, once."""
    assert saved_bytes(lambda: [x[: N // 2].square(), x[N // 2 :].square(), x.square()]) == BYTES
    assert saved_bytes(lambda: x[:10].square()) == BYTES


def test_dtype_sets_the_size():
    half = torch.ones(N, dtype=torch.bfloat16, requires_grad=True)
    assert saved_bytes(lambda: half.relu()) == 2 * N


def test_linear_layer_by_hand():
    layer = torch.nn.Linear(32, 48)
    tokens = torch.randn(8, 32)
    assert saved_bytes(lambda: layer(tokens).relu()) == 4 * (8 * 32 + 8 * 48)
    assert saved_bytes(lambda: layer(tokens).relu(), exclude=[tokens, *layer.parameters()]) == 4 * 8 * 48


def test_nothing_is_saved_without_a_graph(x):
    def no_grad() -> Tensor:
        with torch.no_grad():
            return x.relu().square()

    assert saved_bytes(no_grad) == 0
    assert saved_bytes(lambda: x.detach().relu()) == 0


def test_only_what_is_still_kept_counts(x):
    """A graph that fn drops, or whose backward pass has run, keeps nothing."""
    assert saved_bytes(lambda: x.exp().detach()) == 0
    assert saved_bytes(lambda: (x.exp().detach(), x.relu())) == BYTES
    assert saved_bytes(lambda: x.exp().sum().backward()) == 0


def test_backward_still_works(x):
    results: list[Tensor] = []

    def fn() -> Tensor:
        results.append(x.exp().square())
        return results[0]

    assert saved_bytes(fn) == BYTES
    results[0].sum().backward()
    torch.testing.assert_close(x.grad, 2 * (2 * x.detach()).exp())


def test_custom_op_saves_are_seen(x):
    """Its autograd saves a new tensor, twice the input."""
    assert saved_bytes(lambda: scratch(x, 1)) == BYTES


class Token:
    """Something to attach to a graph node, to see when the node goes."""


def test_measuring_leaks_nothing(x):
    tokens: list[weakref.ref[Token]] = []

    def fn() -> Tensor:
        y = x.exp()  # saves its own output
        token = y.grad_fn.metadata["token"] = Token()
        tokens.append(weakref.ref(token))
        return y.square()

    assert saved_bytes(fn) == BYTES
    assert tokens[0]() is None


def test_checkpoint_keeps_its_input_alone(x):
    def block(x: Tensor) -> Tensor:
        return x.exp().sin().square().exp()

    assert saved_bytes(lambda: block(x)) == 3 * BYTES
    assert saved_bytes(lambda: checkpoint(block, x, use_reentrant=False)) == BYTES


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
def test_sparse_tensors_count_with_their_indices(layout):
    """Six ones on a diagonal: int64 indices and float32 values."""
    if layout is torch.sparse_coo:
        sparse = torch.sparse_coo_tensor(torch.arange(6).repeat(2, 1), torch.ones(6), (6, 6))
        indices = 2 * 6
    else:
        sparse = torch.sparse_compressed_tensor(
            torch.arange(7), torch.arange(6), torch.ones(6), (6, 6), layout=layout
        )
        indices = 7 + 6

    class Keep(torch.autograd.Function):
        @staticmethod
        def forward(ctx, dense: Tensor) -> Tensor:
            ctx.save_for_backward(sparse)
            return dense.clone()

        @staticmethod
        def backward(ctx, grad: Tensor) -> Tensor:
            return grad

    dense = torch.ones(3, requires_grad=True)
    assert saved_bytes(lambda: Keep.apply(dense)) == 8 * indices + 4 * 6
    assert saved_bytes(lambda: Keep.apply(dense), exclude=[sparse]) == 0
