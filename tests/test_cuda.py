"""The public face on a CUDA device: whatever path runs, results are exact and fallbacks are said."""

from __future__ import annotations

import pytest
import torch

from twell import Plan, SparseMLP, ffn, ffn_with_stats, reference
from twell.synthetic import make_ffn

from .accuracy import assert_accurate, stock_dense

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def operands(tokens=40, dtype=torch.bfloat16, **options):
    return make_ffn(tokens, 64, 256, 20, dtype=dtype, device="cuda", **options).operands()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tokens", [1, 40, 300])
@pytest.mark.parametrize("gated", [True, False])
def test_matches_the_oracle(dtype, tokens, gated):
    tensors = operands(tokens, dtype, gated=gated)
    y, stats = ffn_with_stats(*tensors)
    exact = reference.ffn(*tensors, dtype=torch.float64)
    assert_accurate(y, exact.y, stock_dense(*tensors))
    assert stats.l0.item() == pytest.approx(exact.l0.item(), rel=0.02)


def test_a_cpu_plan_falls_back_and_says_why(caplog):
    tensors = operands()
    y = ffn(*tensors, plan=Plan(path="row", backend="cpu"))
    assert torch.equal(y, stock_dense(*tensors))
    assert "the tensors are on 'cuda', not on the CPU" in caplog.text


def test_empty_batch():
    x, up, down, gate = operands()
    assert ffn(x[:0], up, down, gate).shape == (0, 64)


def test_operands_on_two_devices_are_refused():
    x, up, down, gate = operands()
    with pytest.raises(ValueError, match="down: got device cpu; accepted: cuda:0"):
        ffn(x, up, down.cpu(), gate)


@pytest.mark.parametrize("trained", [False, True])
def test_module_compiles_without_graph_break(trained):
    mlp = SparseMLP(64, 256, device="cuda", dtype=torch.bfloat16, record=True).requires_grad_(trained)
    compiled = torch.compile(mlp, fullgraph=True, dynamic=True)
    for tokens in (4, 9):
        x = torch.randn(2, tokens, 64, device="cuda", dtype=torch.bfloat16)
        exact = reference.ffn(
            x, mlp.up_proj.weight, mlp.down_proj.weight, mlp.gate_proj.weight, dtype=torch.float64
        )
        stock = stock_dense(x, mlp.up_proj.weight, mlp.down_proj.weight, mlp.gate_proj.weight)
        assert_accurate(compiled(x), exact.y, stock)
        assert mlp.last_stats.l0.item() == pytest.approx(exact.l0.item(), rel=0.02)
        if trained:
            compiled(x).sum().backward()


def test_layout_survives_the_move_to_the_device():
    mlp = SparseMLP(64, 256).cuda()
    assert mlp.down_proj.weight.mT.is_contiguous()
    assert mlp.state_dict()["down_proj.weight"].is_contiguous()


def test_autocast():
    tensors = [t.float().requires_grad_() for t in operands()]
    with torch.autocast("cuda", dtype=torch.bfloat16):
        y = ffn(*tensors)
        stock = stock_dense(*tensors)
    assert_accurate(y, reference.ffn(*tensors, dtype=torch.float64).y, stock)
    y.float().sum().backward()
    assert all(t.grad.dtype == torch.float32 for t in tensors)
