"""The models against transformers' own: weights, logits, generation, loss, gradients."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch

pytest.importorskip("transformers")

from accelerate.utils import compile_regions
from transformers import AutoModel, AutoModelForCausalLM

from twell import Plan, SparseMLP, hf

from .tiny import SPARSE, STOCK, gradients_of, is_neuron_major, sparse_model, stock_model, tokens

families = pytest.mark.parametrize("family", ["llama", "qwen2"])


@families
@pytest.mark.parametrize("activation", ["relu", "relu2"])
def test_same_seed_gives_the_stock_model(family, activation):
    sparse = sparse_model(family, sparsity_activation=activation)
    stock = stock_model(family, hidden_act=activation)
    ours, theirs = sparse.state_dict(), stock.state_dict()
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    assert is_neuron_major(sparse)
    ids = tokens()
    torch.testing.assert_close(sparse(ids).logits, stock(ids).logits, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(sparse(ids).logits, stock_model(family, hidden_act="silu")(ids).logits)


def test_blocks_of_other_sizes_are_drawn_as_the_stock_ones():
    sparse = sparse_model(sparsity_layer_sizes=[4000, 3000], sparsity_gated_mlp=False, mlp_bias=True)
    for mlp, size in zip(hf.sparse_mlps(sparse), (4000, 3000), strict=True):
        assert mlp.intermediate_size == size
        assert not mlp.gated
        assert not mlp.up_proj.bias.any()
        assert abs(mlp.up_proj.weight.std().item() / 0.2 - 1) < 0.02
        assert abs(mlp.down_proj.weight.std().item() / 0.2 - 1) < 0.02
    assert is_neuron_major(sparse)


@families
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_weights_load_in_the_stock_class(family, dtype, tmp_path):
    sparse_model(family).to(dtype).save_pretrained(tmp_path)
    sparse = SPARSE[family][1].from_pretrained(tmp_path)
    stock = STOCK[family][1].from_pretrained(tmp_path)
    assert stock.config.hidden_act == "relu"
    assert stock.dtype == dtype
    ids = tokens()
    logits, expected = sparse(ids).logits, stock(ids).logits
    if dtype == torch.float32:
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        return
    exact = copy.deepcopy(stock).double()(ids).logits
    assert (logits - exact).abs().max() <= 2 * (expected - exact).abs().max()
    # Run dense and laid out as stock, ours are the products that stock makes: the same bits.
    for mlp in hf.sparse_mlps(sparse):
        mlp.plan = Plan(path="dense")
    hf.set_neuron_major(sparse, False)
    assert torch.equal(sparse(ids).logits, expected)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"sparsity_layer_sizes": [24, 72]},
        {"sparsity_gated_mlp": False},
        {"sparsity_activation": "fatrelu(0.1)", "tie_word_embeddings": True},
        {"sparsity_activation": "drelu"},
        {"mlp_bias": True},
    ],
    ids=lambda fields: "-".join(fields) or "plain",
)
def test_save_and_load(fields, tmp_path):
    sparse = sparse_model(**fields)
    sparse.save_pretrained(tmp_path)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is type(sparse)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert is_neuron_major(loaded)
    assert [m.intermediate_size for m in hf.sparse_mlps(loaded)] == sparse.config.neurons_per_layer()
    ids = tokens()
    assert torch.equal(loaded(ids).logits, sparse(ids).logits)
    backbone = AutoModel.from_pretrained(tmp_path)
    assert type(backbone) is hf.SparseLlamaModel
    assert is_neuron_major(backbone)
    expected = sparse.model(ids).last_hidden_state
    assert torch.equal(backbone(ids).last_hidden_state, expected)


def test_saved_tensors_are_contiguous(tmp_path):
    from safetensors.torch import load_file

    sparse = sparse_model()
    sparse.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert saved.keys() == stock_model().state_dict().keys()
    down = sparse.model.layers[1].mlp.down_proj.weight
    assert torch.equal(saved["model.layers.1.mlp.down_proj.weight"], down)


@families
def test_greedy_generation_is_that_of_the_stock_model(family):
    sparse, stock = sparse_model(family), stock_model(family)
    ids = tokens(rows=2, length=5)
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    generated = sparse.generate(ids, **options)
    assert torch.equal(generated, stock.generate(ids, **options))
    assert generated.shape[1] > ids.shape[1]


def test_generation_records_nothing(monkeypatch):
    sparse = sparse_model()
    sparse(tokens(), labels=tokens())
    recorded = []
    forward = SparseMLP.forward

    def spy(mlp, x):
        recorded.append(mlp.record)
        return forward(mlp, x)

    monkeypatch.setattr(SparseMLP, "forward", spy)
    sparse.generate(tokens(length=3), max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert recorded
    assert not any(recorded)


def test_when_statistics_are_there():
    sparse, ids = sparse_model(), tokens()
    plain = sparse(ids)
    assert plain.l0 is plain.l1_loss is plain.firing is plain.loss is None
    asked = sparse(ids, record_sparsity=True)
    assert asked.l0.shape == (2,)
    assert asked.loss is asked.ce_loss is None
    assert sparse(ids, labels=ids).l0 is not None
    assert sparse.train()(ids).l0 is not None
    assert all(mlp.last_stats is None for mlp in hf.sparse_mlps(sparse))


def test_statistics_by_hand():
    sparse, ids = sparse_model(sparsity_layer_sizes=[24, 40]), tokens()
    hidden = []
    for layer in sparse.model.layers:
        layer.post_attention_layernorm.register_forward_hook(lambda m, a, out: hidden.append(out.detach()))
    output = sparse(ids, record_sparsity=True)
    l1 = []
    for x, mlp, l0, firing in zip(hidden, hf.sparse_mlps(sparse), output.l0, output.firing, strict=True):
        gate = torch.relu(mlp.gate_proj(x))
        active = gate > 0
        assert firing.dtype == torch.int64
        assert torch.equal(firing, active.flatten(0, 1).sum(0))
        torch.testing.assert_close(l0, active.sum(-1).float().mean())
        l1.append((gate * mlp.up_proj(x)).abs().sum(-1).mean())
    torch.testing.assert_close(output.l1_loss, torch.stack(l1).mean())


@families
def test_loss_is_cross_entropy_and_weighted_l1(family):
    sparse, stock, ids = sparse_model(family, sparsity_l1_coeff=0.25).train(), stock_model(family), tokens()
    assert sparse.l1_weight == 0.25
    labels = ids.clone()
    labels[0, :5] = -100
    output = sparse(ids, labels=labels)
    torch.testing.assert_close(output.ce_loss, stock(ids, labels=labels).loss, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(output.loss, output.ce_loss + 0.25 * output.l1_loss)
    assert output.l1_loss > 0
    sparse.l1_weight = 2e-5
    assert sparse.l1_weight == 2e-5
    changed = sparse(ids, labels=labels)
    torch.testing.assert_close(changed.loss, output.ce_loss + 2e-5 * output.l1_loss)
    assert sparse.config.sparsity_l1_coeff == 0.25
    as_tuple = sparse(ids, labels=labels, return_dict=False)
    assert torch.equal(as_tuple[0], changed.loss)
    assert torch.equal(as_tuple[1], changed.logits)


@families
def test_loss_in_eval_mode_is_the_cross_entropy(family):
    sparse, stock, ids = sparse_model(family, sparsity_l1_coeff=0.25), stock_model(family), tokens()
    for items in (None, 40):
        output = sparse(ids, labels=ids, num_items_in_batch=items)
        assert torch.equal(output.loss, output.ce_loss)
        expected = stock(ids, labels=ids, num_items_in_batch=items).loss
        torch.testing.assert_close(output.loss, expected, rtol=1e-4, atol=1e-4)
        assert output.l1_loss > 0
    assert torch.equal(sparse(ids, labels=ids, return_dict=False)[0], sparse(ids, labels=ids).ce_loss)
    assert sparse.train()(ids, labels=ids).loss > output.ce_loss + 0.2 * output.l1_loss


def test_stock_trainer_evaluates_the_cross_entropy(tmp_path):
    """And hands the logits, not our statistics, to its metrics."""
    from transformers import Trainer, TrainingArguments

    seen = []

    def metrics(prediction):
        seen.append(prediction.predictions)
        return {}

    rows = [{"input_ids": row, "labels": row} for row in tokens(rows=6)]
    arguments = TrainingArguments(tmp_path, per_device_eval_batch_size=2, report_to=[], use_cpu=True)
    losses = [
        Trainer(model, arguments, eval_dataset=rows, compute_metrics=metrics).evaluate()["eval_loss"]
        for model in (sparse_model(sparsity_l1_coeff=0.25), stock_model())
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert [type(predictions).__name__ for predictions in seen] == ["ndarray"] * 2


def _padding_lines(caplog):
    return [record for record in caplog.records if "training on padding" in record.getMessage()]


def test_training_on_padding_is_said_once(caplog, monkeypatch):
    monkeypatch.setattr("twell._log._logged", set())
    sparse, ids = sparse_model(sparsity_l1_coeff=0.5), tokens()
    padded, full = torch.ones_like(ids), torch.ones_like(ids)
    padded[1, 7:] = 0
    labels = ids.masked_fill(padded == 0, -100)
    sparse(ids, attention_mask=padded, labels=labels)
    sparse.train()
    sparse(ids, attention_mask=padded)
    sparse(ids, attention_mask=full, labels=ids)
    sparse(ids, attention_mask=full.bool()[:, None, None].expand(2, 1, 11, 11), labels=ids)
    sparse(ids, labels=ids)
    assert not _padding_lines(caplog)
    for _ in range(2):
        sparse(ids, attention_mask=padded, labels=labels)
        sparse_model().train()(ids, attention_mask=padded.bool(), labels=labels)
    assert [record.levelname for record in _padding_lines(caplog)] == ["WARNING"]


def test_only_the_first_masks_are_looked_at(caplog, monkeypatch):
    """To look at one on a GPU is to wait for it."""
    monkeypatch.setattr("twell._log._logged", set())
    sparse, ids = sparse_model(num_hidden_layers=1).train(), tokens()
    mask = torch.ones_like(ids)
    for _ in range(6):
        sparse(ids, attention_mask=mask, labels=ids)
    mask[0, :3] = 0
    sparse(ids, attention_mask=mask, labels=ids)
    assert not _padding_lines(caplog)


def test_padding_breaks_no_graph(caplog, monkeypatch):
    monkeypatch.setattr("twell._log._logged", set())
    torch._dynamo.reset()
    sparse, ids = sparse_model(num_hidden_layers=1).train(), tokens()
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    compiled = torch.compile(partial(sparse, use_cache=False), fullgraph=True, backend="eager")
    output = compiled(input_ids=ids, attention_mask=mask, labels=ids)
    assert not _padding_lines(caplog)
    torch.testing.assert_close(output.loss, sparse(ids, attention_mask=mask, labels=ids).loss)


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_bad_l1_weight(weight):
    with pytest.raises(ValueError, match="l1_weight"):
        sparse_model().l1_weight = weight


@pytest.mark.parametrize("as_tensor", [False, True])
def test_micro_batches_add_up_to_the_mean(as_tensor):
    sparse = sparse_model(sparsity_l1_coeff=0.5).train()
    ids = tokens(rows=4)
    labels = ids.clone()
    labels[2, :6] = -100
    items = int((labels[:, 1:] != -100).sum())
    parts = []
    for rows in (slice(0, 2), slice(2, 4)):
        given = torch.tensor(items) if as_tensor else items
        output = sparse(ids[rows], labels=labels[rows], num_items_in_batch=given)
        here = int((labels[rows, 1:] != -100).sum())
        torch.testing.assert_close(output.loss, output.ce_loss + 0.5 * output.l1_loss * here / items)
        output.loss.backward()
        parts.append((output, here))
    # The stock way to say the same: sums over tokens, divided by the tokens of the step.
    whole = sparse(ids, labels=labels)
    torch.testing.assert_close(sum(output.ce_loss for output, _ in parts), whole.ce_loss)
    weighted = sum(output.l1_loss * here for output, here in parts) / items
    total = sum(output.loss for output, _ in parts)
    torch.testing.assert_close(total, whole.ce_loss + 0.5 * weighted)


def test_equal_micro_batches_give_the_gradients_of_the_whole():
    sparse = sparse_model(sparsity_l1_coeff=0.5).train()
    ids = tokens(rows=4)
    sparse(ids, labels=ids).loss.backward()
    whole = gradients_of(sparse)
    sparse.zero_grad()
    for rows in (slice(0, 2), slice(2, 4)):
        sparse(ids[rows], labels=ids[rows], num_items_in_batch=4 * 10).loss.backward()
    torch.testing.assert_close(gradients_of(sparse), whole, rtol=1e-3, atol=1e-5)


def test_shift_labels_are_counted_as_given():
    sparse, ids = sparse_model(sparsity_l1_coeff=0.5).train(), tokens()
    shifted = torch.nn.functional.pad(ids, (0, 1), value=-100)[:, 1:].contiguous()
    expected = sparse(ids, labels=ids, num_items_in_batch=40)
    output = sparse(ids, labels=ids, shift_labels=shifted, num_items_in_batch=40)
    torch.testing.assert_close(output.loss, expected.loss)


@families
def test_gradient_checkpointing_keeps_the_l1_gradient(family):
    sparse, ids = sparse_model(family, sparsity_l1_coeff=0.5).train(), tokens()
    plain = sparse(ids, labels=ids)
    plain.loss.backward()
    expected = gradients_of(sparse)
    sparse.zero_grad()
    sparse.gradient_checkpointing_enable({"use_reentrant": False})
    output = sparse(ids, labels=ids, use_cache=False)
    output.loss.backward()
    torch.testing.assert_close(gradients_of(sparse), expected, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(output.l0, plain.l0)
    # A graph kept here would keep what checkpointing is there to free.
    assert all(mlp.last_stats is None for mlp in hf.sparse_mlps(sparse))
    sparse.zero_grad()
    sparse.l1_weight = 0.0
    sparse(ids, labels=ids, use_cache=False).loss.backward()
    gate = "model.layers.0.mlp.gate_proj.weight"
    assert not torch.allclose(gradients_of(sparse)[gate], expected[gate], rtol=1e-3, atol=1e-5)


def test_reentrant_checkpointing_is_refused_where_it_would_lose_the_l1():
    sparse, ids = sparse_model(sparsity_l1_coeff=0.5).train(), tokens()
    sparse.gradient_checkpointing_enable({"use_reentrant": True})
    sparse.enable_input_require_grads()
    with pytest.raises(ValueError, match="use_reentrant"):
        sparse(ids, labels=ids, use_cache=False)
    sparse.l1_weight = 0.0
    sparse(ids, labels=ids, use_cache=False).loss.backward()
    sparse.l1_weight = 0.5
    assert sparse.eval()(ids, labels=ids).l1_loss > 0


def test_the_l1_weight_reaches_shallow_copies():
    """accelerate trains one where it compiles layer by layer."""
    sparse, ids = sparse_model(sparsity_l1_coeff=0.5).train(), tokens()
    copied = compile_regions(sparse, backend="eager")
    assert copied is not sparse
    for weight in (0.0, 0.25):
        sparse.l1_weight = weight
        output = copied(input_ids=ids, labels=ids)
        torch.testing.assert_close(output.loss - output.ce_loss, weight * output.l1_loss)


def test_the_l1_weight_of_a_model_from_inference_mode():
    with torch.inference_mode():
        sparse = sparse_model()
    sparse.l1_weight = 0.25
    assert sparse.l1_weight == 0.25


def test_the_l1_weight_may_be_set_before_the_backward():
    sparse, ids = sparse_model(sparsity_l1_coeff=0.5).double().train(), tokens()
    gradients = []
    for later in (0.5, 0.0):
        sparse.zero_grad()
        sparse.l1_weight = 0.5
        loss = sparse(ids, labels=ids).loss
        sparse.l1_weight = later
        loss.backward()
        gradients.append(gradients_of(sparse))
    torch.testing.assert_close(*gradients)


def test_no_cache_is_filled_in_training():
    sparse, ids = sparse_model().train(), tokens()
    assert sparse(ids, labels=ids).past_key_values is None
    assert sparse(ids, labels=ids, use_cache=True).past_key_values is not None
    assert sparse.eval()(ids, labels=ids).past_key_values is not None


def test_contiguous_layout_on_request():
    sparse, ids = sparse_model(), tokens()
    expected = sparse(ids).logits
    parameters = [id(p) for p in sparse.parameters()]
    hf.set_neuron_major(sparse, False)
    assert all(p.is_contiguous() for p in sparse.parameters())
    assert [id(p) for p in sparse.parameters()] == parameters
    torch.testing.assert_close(sparse(ids).logits, expected, rtol=1e-4, atol=1e-4)
    sparse.load_state_dict(sparse.state_dict(), assign=True)
    assert all(p.is_contiguous() for p in sparse.parameters())
    hf.set_neuron_major(sparse, True)
    assert is_neuron_major(sparse)


def test_hidden_states_and_attentions_are_still_captured():
    output = sparse_model(attn_implementation="eager")(
        tokens(), output_hidden_states=True, output_attentions=True
    )
    assert len(output.hidden_states) == 3
    assert len(output.attentions) == 2


def test_deepcopy_keeps_the_weight_of_the_l1():
    sparse = sparse_model()
    sparse.l1_weight = 0.75
    assert copy.deepcopy(sparse).l1_weight == 0.75


def test_masks_that_are_not_there_are_not_looked_at():
    from torch._subclasses import FakeTensorMode

    model = sparse_model().train()
    ids = tokens()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = mode.from_tensor(ids)
        output = model(input_ids=fake, attention_mask=torch.ones_like(fake), labels=fake)
        assert output.loss.shape == ()
