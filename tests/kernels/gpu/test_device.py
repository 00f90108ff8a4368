"""The kernels on a GPU: every path over shapes, sparsities and token counts, against float32."""

from __future__ import annotations

import pytest
import torch

from twell import Plan, SparseMLP, ffn, ffn_with_stats, recorded_paths, reference
from twell.layer_state import layer_of
from twell.synthetic import firing_rates

from ...accuracy import every_activation

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

WIDTHS = [256, 768, 1024, 2048, 2560, 4096, 5120]
NEURONS = [1024, 3072, 5632, 8192, 11008, 14336]
TOKENS = [1, 2, 7, 64, 127, 128, 129, 1000, 4096, 16384]
CHECKED = 192  # tokens of a call that are compared: the first, the last and some between


def weights(hidden, neurons, dtype=torch.bfloat16, gated=True):
    """up, down (neuron-major), gate; the selector's first feature is to be set by `fire`."""

    def normal(*shape):
        return torch.randn(*shape, device="cuda", dtype=torch.float32)

    up = (normal(neurons, hidden) / hidden**0.5).to(dtype)
    gate = (normal(neurons, hidden) / hidden**0.5).to(dtype) if gated else None
    down = (normal(neurons, hidden) / neurons**0.5).to(dtype).mT
    return up, down, gate


def fire(selector, nnz):
    """Set the weight on the constant feature x[:, 0] = 8 so that about `nnz` neurons fire per token."""
    neurons = selector.shape[0]
    if nnz in (0, neurons):
        selector[:, 0] = -100.0 if nnz == 0 else 100.0
        return
    realistic = nnz <= 0.3 * neurons
    rates = firing_rates(neurons, nnz, dead=0.3 if realistic else 0.0, max_rate=0.5 if realistic else 1.0)
    quantile = torch.special.ndtri(1 - rates).clamp(-12, 12).to(selector)
    selector[:, 0] = -quantile * selector[:, 1:].float().norm(dim=1).to(selector.dtype) / 8


def tokens_of(count, hidden, dtype=torch.bfloat16):
    x = torch.randn(count, hidden, device="cuda", dtype=torch.float32)
    x[:, 0] = 8.0
    return x.to(dtype)


def assert_exact(y, x, up, down, gate, activation="relu", **biases):
    """At most twice dense's own error against float32, on a sample of tokens; no NaN anywhere."""
    assert y.shape == (x.shape[0], down.shape[0])
    assert not torch.isnan(y).any()
    rows = torch.arange(x.shape[0], device="cuda")
    if x.shape[0] > CHECKED:
        third = CHECKED // 3
        middle = torch.randint(x.shape[0], (third,), device="cuda")
        rows = torch.cat([rows[:third], middle, rows[-third:]])
    part = x[rows]
    exact = reference.ffn(part, up, down, gate, activation=activation, dtype=torch.float32, **biases).y
    dense = ffn(part, up, down, gate, activation=activation, plan=Plan(path="dense"), **biases)
    error, own = reference.relative_error(y[rows], exact), reference.relative_error(dense, exact)
    assert error <= 2 * own + 1e-6, f"error {error:.2e}, dense's own {own:.2e}"


@pytest.fixture(autouse=True, scope="module")
def _exact_float32():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize("neurons", NEURONS)
@pytest.mark.parametrize("hidden", WIDTHS)
def test_block_path_over_the_grid(hidden, neurons):
    up, down, gate = weights(hidden, neurons)
    for nnz in (0, 24, neurons // 8, neurons):
        fire(gate, nnz)
        for count in TOKENS:
            x = tokens_of(count, hidden)
            assert_exact(ffn(x, up, down, gate, plan=Plan(path="block")), x, up, down, gate)


@pytest.mark.parametrize("rows", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@every_activation()
def test_variants(rows, dtype, gated, activation):
    hidden, neurons = 512, 1544  # 1544 = 6 * 256 + 8
    up, down, gate = weights(hidden, neurons, dtype, gated)
    biases = {"up_bias": torch.randn(neurons, device="cuda", dtype=dtype)}
    biases["down_bias"] = torch.randn(hidden, device="cuda", dtype=dtype)
    if gated:
        biases["gate_bias"] = 0.1 * torch.randn(neurons, device="cuda", dtype=dtype)
    fire(up if gate is None else gate, 60)
    for count in (1, 33, 700, 4999):
        x = tokens_of(count, hidden, dtype)
        for plan in (Plan(path="block", block_rows=rows), Plan(path="block")):
            y = ffn(x, up, down, gate, activation=activation, plan=plan, **biases)
            assert_exact(y, x, up, down, gate, activation, **biases)


@pytest.mark.parametrize(
    ("hidden", "neurons"),
    [(896, 1000), (2048, 5632), (2560, 9216), (4096, 14336), (5888, 1024), (512, 26000)],
    ids=["odd", "one tile each", "two tiles each", "x stays of 16", "x does not stay", "four tiles each"],
)
def test_few_tokens(hidden, neurons):
    """Counts at and beside the borders of what the decode kernels take together; from none to all active."""
    up, down, gate = weights(hidden, neurons)
    for nnz in (0, 24, neurons // 16, neurons // 6, neurons):
        fire(gate, nnz)
        for count in (1, 3, 8, 15, 16, 17, 31, 32, 33, 63, 64):
            x = tokens_of(count, hidden)
            y = ffn(x, up, down, gate, plan=Plan(path="block"))
            assert_exact(y, x, up, down, gate)
            assert torch.equal(ffn(x, up, down, gate, plan=Plan(path="block")), y)


@pytest.mark.parametrize("count", [2, 20, 50, 300])
def test_nan_and_inf_reach_the_tokens_that_meet_them(count):
    up, down, gate = weights(512, 2048)
    fire(gate, 30)
    x = tokens_of(count, 512)
    clean = ffn(x, up, down, gate, plan=Plan(path="block"))
    x[1, 5] = float("nan")  # every gate of token 1 is NaN, and NaN is active
    y = ffn(x, up, down, gate, plan=Plan(path="block"))
    others = torch.arange(count, device="cuda") != 1
    assert torch.isnan(y[1]).all()
    assert torch.isfinite(y[others]).all()
    assert reference.relative_error(y[others], clean[others]) < 1e-2
    x[1, 5] = 0.0
    neuron = int((x @ gate.mT)[1].argmax())  # active for token 1
    up[neuron] = float("inf")
    y = ffn(x, up, down, gate, plan=Plan(path="block"))
    active = (x @ gate.mT)[:, neuron] > 0
    assert not torch.isfinite(y[active]).any()
    assert torch.isfinite(y[~active]).all()


def test_odd_widths():
    for hidden, neurons in ((8, 8), (72, 200), (328, 1000), (200, 4104)):
        up, down, gate = weights(hidden, neurons)
        fire(gate, neurons // 4)
        for count in (1, 5, 300):
            x = tokens_of(count, hidden)
            assert_exact(ffn(x, up, down, gate, plan=Plan(path="block")), x, up, down, gate)


def test_heavy_layers():
    """What makes fixed capacities overflow: hundreds of actives per token, uneven between tokens."""
    up, down, gate = weights(2048, 5632)
    for nnz in (255, 660, 2800):
        fire(gate, nnz)
        x = tokens_of(4096, 2048)
        x[::7] *= 4
        x[::7, 0] = -8.0  # every seventh token fires almost everything else
        for path in ("block", "row"):
            y = ffn(x, up, down, gate, plan=Plan(path=path))
            assert_exact(y, x, up, down, gate)


@pytest.mark.parametrize("compression", [2, 4, 8])
@pytest.mark.parametrize("shape", [(256, 1024), (2048, 5632), (2560, 8192)], ids=str)
def test_row_path(shape, compression):
    from twell.activations import Activation
    from twell.kernels.gpu.operands import prepare
    from twell.kernels.gpu.row.run import run_rows
    from twell.problem import FfnArgs

    hidden, neurons = shape
    up, down, gate = weights(hidden, neurons)
    for nnz in (0, 24, 300, neurons):
        fire(gate, nnz)
        for count in (1, 129, 1000) if nnz < neurons else (3,):
            x = tokens_of(count, hidden)
            args = FfnArgs(x, up, down, gate, None, None, None, Activation("relu"))
            assert_exact(run_rows(prepare(args), compression), x, up, down, gate)


@pytest.mark.parametrize("count", [1, 40, 5000])
def test_nan_reaches_the_output(count):
    up, down, gate = weights(256, 1024)
    fire(gate, 24)
    x = tokens_of(count, 256)
    x[count // 2, 9] = float("nan")
    for path in ("block", "row"):
        y = ffn(x, up, down, gate, plan=Plan(path=path))
        assert torch.isnan(y[count // 2]).all()
        assert not torch.isnan(y[: count // 2]).any()


def test_statistics():
    up, down, gate = weights(512, 2048)
    fire(gate, 40)
    x = tokens_of(5000, 512)
    _, stats = ffn_with_stats(x, up, down, gate, plan=Plan(path="block"))
    _, dense = ffn_with_stats(x, up, down, gate, plan=Plan(path="dense"))
    # a pre-activation next to 0 may round to either side in another order of summation
    assert (stats.firing - dense.firing).abs().sum() <= 2e-4 * dense.firing.sum() + 2
    assert stats.l1.item() == pytest.approx(dense.l1.item(), rel=2e-3)


@pytest.mark.parametrize("count", [1, 17, 64, 300, 5000])
def test_repeats_are_equal_to_the_bit(count):
    up, down, gate = weights(1024, 4096)
    fire(gate, 30)
    x = tokens_of(count, 1024)
    for path in ("block", "row"):
        first = ffn(x, up, down, gate, plan=Plan(path=path))
        for _ in range(20):
            assert torch.equal(ffn(x, up, down, gate, plan=Plan(path=path)), first)


@pytest.mark.parametrize("count", [1, 32, 4096])
def test_no_synchronisation(count):
    up, down, gate = weights(1024, 4096)
    fire(gate, 30)
    x = tokens_of(count, 1024)
    for plan in (Plan(path="block"), Plan()):
        ffn(x, up, down, gate, plan=plan)  # compiles
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(3):
                ffn(x, up, down, gate, plan=plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("count", [1, 32, 4096])
def test_cuda_graph(count):
    up, down, gate = weights(1024, 4096)
    fire(gate, 30)
    x = tokens_of(count, 1024)
    y = ffn(x, up, down, gate)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = ffn(x, up, down, gate)
    for _ in range(3):
        x.copy_(tokens_of(count, 1024))
        graph.replay()
        assert_exact(captured, x, up, down, gate)
    assert y.shape == captured.shape


@pytest.mark.parametrize(("nnz", "path"), [(4096, "dense"), (24, "decode")])
def test_automatic_plan_learns_how_active_a_layer_is(nnz, path):
    """Eager calls take readings; they and a capture then go by them."""
    up, down, gate = weights(1024, 4096)
    fire(gate, nnz)
    x = tokens_of(1, 1024)
    with recorded_paths() as ran:
        for _ in range(3):
            ffn(x, up, down, gate)
            torch.cuda.synchronize()
        (reading,) = layer_of(gate).readings().values()
        assert (reading.share <= 0.1) == (path == "decode")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = ffn(x, up, down, gate)
    assert [piece.path for piece in ran] == ["decode", path, path, path]
    graph.replay()
    assert_exact(y, x, up, down, gate)


@pytest.mark.parametrize(
    ("shares", "sparse_up_to"), [({32: 0.1, 64: 0.2}, 64), ({32: 0.4, 64: 0.4}, 32), ({}, 0)]
)
def test_captures_of_an_engine_go_by_expected_shares(shares, sparse_up_to):
    """As vLLM does it: compiled once for any number of tokens, merged weights, warmed up once and captured on
    zeros, the largest batch first; then real tokens."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the limits are a Hopper's")
    hidden, neurons = 2048, 5632
    up, down, gate = weights(hidden, neurons)
    fire(gate, 24)
    merged = torch.cat([gate, up])
    layer_of(merged[:neurons]).expect(shares)

    @torch.compile(fullgraph=True, dynamic=True)
    def block(x):
        return ffn(x, merged[neurons:], down, merged[:neurons])

    with torch.no_grad():
        for count in (512, 256, 128, 64, 48, 40, 32, 24, 16, 8, 4, 2, 1):
            x = torch.zeros(count, hidden, device="cuda", dtype=torch.bfloat16)
            block(x)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with recorded_paths() as ran, torch.cuda.graph(graph):
                y = block(x)
            assert [piece.path for piece in ran] == ["decode" if count <= sparse_up_to else "dense"], count
            for _ in range(2):
                x.copy_(tokens_of(count, hidden))
                graph.replay()
                assert_exact(y, x, up, down, gate)


def test_other_streams_and_devices_current():
    up, down, gate = weights(512, 2048)
    fire(gate, 30)
    x = tokens_of(3000, 512)
    expected = ffn(x, up, down, gate, plan=Plan(path="block"))
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        y = ffn(x, up, down, gate, plan=Plan(path="block"))
    stream.synchronize()
    assert torch.equal(y, expected)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_llama_with_sparse_mlps_compiles_whole(mode, monkeypatch):
    transformers = pytest.importorskip("transformers")
    from twell.kernels.gpu import forward

    launched = []
    run_decode = forward.run_decode
    monkeypatch.setattr(forward, "run_decode", lambda *given: launched.append(1) or run_decode(*given))
    config = transformers.LlamaConfig(
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=512,
        hidden_act="relu",
        max_position_embeddings=2048,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).cuda().bfloat16().eval()
    ids = torch.randint(512, (2, 32), device="cuda")
    with torch.no_grad():
        stock = model(ids).logits
        for layer in model.model.layers:
            sparse = SparseMLP(256, 1024, device="cuda", dtype=torch.bfloat16, plan=Plan(path="block"))
            sparse.load_state_dict(layer.mlp.state_dict())
            layer.mlp = sparse
        eager = model(ids).logits
        assert len(launched) == 2
        compiled = torch.compile(model, fullgraph=True, mode=mode)
        for _ in range(3):
            logits = compiled(ids).logits.clone()
        assert len(launched) > 2
    assert reference.relative_error(eager, stock) < 2e-2
    assert reference.relative_error(logits, stock) < 2e-2


def test_outputs_of_another_width():
    up, _, gate = weights(512, 2048)
    fire(gate, 40)
    for outputs in (8, 72, 320, 1024):
        down = (torch.randn(2048, outputs, device="cuda") / 2048**0.5).bfloat16().mT
        for count in (1, 50, 4999):
            x = tokens_of(count, 512)
            assert_exact(ffn(x, up, down, gate, plan=Plan(path="block")), x, up, down, gate)


def test_slabs(monkeypatch):
    up, down, gate = weights(512, 2048)
    fire(gate, 40)
    x = tokens_of(40000, 512)
    whole = ffn(x, up, down, gate, plan=Plan(path="block"))
    monkeypatch.setattr("twell.kernels.gpu.block.WORKSPACE_BYTES", 100 << 20)
    assert torch.equal(ffn(x, up, down, gate, plan=Plan(path="block")), whole)


def test_token_counts_do_not_compile_anew():
    """A capture must never meet a kernel that was not loaded: one per kind of call, whatever the tokens."""
    from twell.kernels.gpu.hopper.launch_decode import decode_down_hopper, decode_select_up_hopper
    from twell.kernels.gpu.triton.decode import decode_down, decode_select_up

    kernels = (decode_select_up, decode_down, decode_select_up_hopper, decode_down_hopper)
    up, down, gate = weights(512, 2048)
    fire(gate, 40)

    def compiled():
        return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())

    ffn(tokens_of(9, 512), up, down, gate, plan=Plan(path="block"))
    before = compiled()
    assert before > 0
    for count in (10, 12, 15, 16):
        ffn(tokens_of(count, 512), up, down, gate, plan=Plan(path="block"))
    assert compiled() == before
