"""Adapters that are switched, merged, unloaded, saved and copied, and the weights under them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from .adapted import (
    ALL,
    Model,
    adapted,
    as_peft,
    assert_same,
    inputs,
    is_sparse,
    mlp_of,
    peft,
    step,
    two_adapters,
)


def test_weights_are_stored_once():
    model = adapted()
    weights = [getattr(mlp_of(model), name).base_layer.weight for name in ALL]
    before = [weight.detach().clone() for weight in weights]
    model(inputs(3))
    adapted_block = mlp_of(model)._adapt(inputs(3))
    _x, up, down, gate, *_ = adapted_block.tensors
    for weight, old, operand in zip(weights, before, (gate, up, down), strict=True):
        assert torch.equal(weight, old)
        assert operand.data_ptr() == weight.data_ptr()
        assert operand.is_contiguous() or operand.mT.is_contiguous()
        assert operand.shape[0] % 8 == 0
        assert operand.shape[1] % 8 == 0


def test_state_dict_is_stock():
    model = adapted()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model(inputs(3))
    state = model.state_dict()
    assert state.keys() == before.keys()
    for name, value in state.items():
        assert torch.equal(value, before[name])
        assert value.is_contiguous()
        assert value.untyped_storage().nbytes() == value.nbytes
    twin = adapted(use_rslora=False)
    for parameter in twin.parameters():
        nn.init.zeros_(parameter)
    twin(inputs(3))
    twin.load_state_dict(state)
    assert_same(step(twin, inputs(3)), step(model, inputs(3)))
    twin.load_state_dict(state, assign=True)
    assert_same(step(twin, inputs(3)), step(model, inputs(3)))


def test_adapters_are_saved(tmp_path):
    model = adapted()
    model(inputs(3))
    model.save_pretrained(tmp_path)
    torch.manual_seed(0)
    again = peft.PeftModel.from_pretrained(Model(), tmp_path)
    assert is_sparse(again)
    torch.testing.assert_close(again(inputs(4)), model(inputs(4)))


def test_several_adapters():
    model = two_adapters()
    twin = as_peft(model)
    for name in ("default", "other", "default"):
        model.set_adapter(name), twin.set_adapter(name)
        assert is_sparse(model)
        assert_same(step(model, inputs(5)), step(twin, inputs(5)))
    for both in (model, twin):
        both.base_model.set_adapter(["default", "other"])
    assert is_sparse(model)
    assert_same(step(model, inputs(5)), step(twin, inputs(5)))
    for both in (model, twin):
        both.delete_adapter("default")
    assert is_sparse(model)
    assert_same(step(model, inputs(5)), step(twin, inputs(5)))


def test_disabled_adapters():
    model = adapted()
    torch.manual_seed(0)
    bare = Model()
    for first in (True, False):  # before there is room, and after
        with model.disable_adapter():
            assert is_sparse(model)
            torch.testing.assert_close(model(inputs(5)), bare(inputs(5)))
        if first:
            step(model, inputs(5))
    mlp_of(model).up_proj.lora_B["default"].weight.data.fill_(float("nan"))
    assert model(inputs(5)).isnan().any()
    with model.disable_adapter(), torch.no_grad():
        assert not model(inputs(5)).isnan().any()


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("before", [True, False])
def test_merged_adapters(safe, before):
    model = adapted()
    expected = as_peft(model)(inputs(5))
    if before:
        model(inputs(5))
    model.merge_adapter(safe_merge=safe)
    assert is_sparse(model)
    torch.testing.assert_close(model(inputs(5)), expected, rtol=1e-4, atol=1e-4)
    with model.disable_adapter():  # peft unmerges
        torch.manual_seed(0)
        torch.testing.assert_close(model(inputs(5)), Model()(inputs(5)), rtol=1e-4, atol=1e-4)
    assert is_sparse(model)
    torch.testing.assert_close(model(inputs(5)), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("merge", [True, False])
def test_unloaded_adapters(merge):
    model = adapted()
    torch.manual_seed(0)
    expected = (as_peft(model) if merge else Model())(inputs(5))
    model(inputs(5))
    plain = model.merge_and_unload() if merge else model.unload()
    torch.testing.assert_close(plain(inputs(5)), expected, rtol=1e-4, atol=1e-4)
    assert is_sparse(plain)
    weights = plain.mlp.gate_proj.weight, plain.mlp.up_proj.weight, plain.mlp.down_proj.weight.mT
    assert all(weight.is_contiguous() for weight in weights)
    assert all(weight.untyped_storage().nbytes() == weight.nbytes for weight in weights)


def test_adapters_by_row_of_the_batch():
    model = two_adapters().eval()
    names = ["default", "other", "__base__"]
    with torch.no_grad():
        y = model(inputs(3, 4), adapter_names=names)
        torch.testing.assert_close(y, as_peft(model)(inputs(3, 4), adapter_names=names))
    assert is_sparse(model)


def test_copies_and_casts():
    model = adapted()
    model(inputs(5))
    twin = copy.deepcopy(model)
    expected = step(as_peft(model), inputs(5))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert is_sparse(twin)
    assert_same(step(twin, inputs(5)), expected)
    twin = twin.double()
    assert_same(step(twin, inputs(5).double()), step(as_peft(twin), inputs(5).double()))


def test_weights_that_move_before_the_backward():
    model = adapted()
    y = model(inputs(5))
    weights = [getattr(mlp_of(model), name).base_layer.weight for name in ALL]
    for weight in weights:
        weight.data = weight.data.clone(memory_format=torch.contiguous_format)
    assert is_sparse(model)
    assert_same(step(model, inputs(5)), step(as_peft(model), inputs(5)))
    del y


def test_weights_of_two_blocks():
    """Another block's adapters must not write where a backward is to read."""
    one, two = adapted(), adapted(r=3)
    for name in ALL:
        mlp_of(two).get_submodule(name).base_layer.weight = mlp_of(one).get_submodule(name).base_layer.weight
    twins = as_peft(one), as_peft(two)

    def both(one, two):
        one.zero_grad(), two.zero_grad()
        (one(inputs(5)).sum() + two(inputs(5)).sum()).backward()
        return dict(enumerate(p.grad for m in (one, two) for p in m.parameters() if p.requires_grad))

    assert_same(both(one, two), both(*twins))


def test_stock_layout_is_left_alone():
    model = adapted(options={"neuron_major": False})
    assert not is_sparse(model)
    assert all(parameter.is_contiguous() for parameter in model.parameters())


def test_inference_mode_first():
    model = adapted()
    with torch.inference_mode():
        model(inputs(5))
    assert_same(step(model, inputs(5)), step(as_peft(model), inputs(5)))
    with torch.inference_mode():
        torch.testing.assert_close(model(inputs(5)), as_peft(model)(inputs(5)))
