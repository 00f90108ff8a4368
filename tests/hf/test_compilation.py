"""Compiled models: as a whole, around blocks that stay eager, inside checkpoints."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch

pytest.importorskip("transformers")

from twell import hf, recorded_paths
from twell.hf.layers import enable_checkpoints

from .tiny import gradients_of, sparse_model, tokens


def assert_same_steps(sparse, compiled, ids):
    """Losses and gradients, with weights of L1 that change."""
    losses, gradients = {}, {}
    for weight in (0.5, 0.125):
        sparse.l1_weight = weight
        for name, run in (("eager", sparse), ("compiled", compiled)):
            sparse.zero_grad()
            output = run(input_ids=ids, labels=ids)
            output.loss.backward()
            losses[name], gradients[name] = output.loss.detach(), gradients_of(sparse)
            assert len(output.firing) == sparse.config.num_hidden_layers
        torch.testing.assert_close(losses["compiled"], losses["eager"])
        torch.testing.assert_close(gradients["compiled"], gradients["eager"], rtol=1e-3, atol=1e-5)


class CountingBackend:
    """A compiler that compiles nothing and counts how often each graph runs."""

    def __init__(self):
        self.calls = []

    def __call__(self, graph, inputs):
        place = len(self.calls)
        self.calls.append(0)

        def run(*inputs):
            self.calls[place] += 1
            return graph.forward(*inputs)

        return run


@pytest.mark.parametrize("checkpointing", [False, True])
def test_compiled_around_eager_blocks(checkpointing, fresh_compiler):
    """More layers than one function may be recompiled for: they share their compiled code."""
    sparse, ids = sparse_model(num_hidden_layers=10, sparsity_l1_coeff=0.5).train(), tokens()
    if checkpointing:
        enable_checkpoints(sparse)
    for mlp in hf.sparse_mlps(sparse):
        mlp.eager = True
    backend = CountingBackend()
    compiled = torch.compile(sparse, backend=backend)
    assert_same_steps(sparse, compiled, ids)
    if not checkpointing:  # a checkpoint with a break in it is not compiled
        assert sum(count == 2 * 10 for count in backend.calls) >= 1, f"one graph for all: {backend.calls}"
        assert len(backend.calls) < 10


def test_layers_compiled_inside_their_checkpoints(fresh_compiler):
    """Blocks stay between graphs that all layers share, and that run when a layer is computed again."""
    sparse, ids = sparse_model(num_hidden_layers=10, sparsity_l1_coeff=0.5).train(), tokens()
    eager = copy.deepcopy(sparse)
    for model in (sparse, eager):
        enable_checkpoints(model)
    backend = CountingBackend()
    hf.compile_inside_checkpoints(sparse, backend=backend)
    compiled = torch.compile(sparse, backend=backend)
    for weight in (0.5, 0.125):
        losses = []
        before = list(backend.calls)
        for model, run in ((eager, eager), (sparse, compiled)):
            model.l1_weight = weight
            model.zero_grad()
            with recorded_paths() as ran:
                output = run(input_ids=ids, labels=ids)
                output.loss.backward()
            losses.append(output.loss.detach())
        assert len(ran) == 2 * 10  # every block outside of graphs, once more when it is computed again
        torch.testing.assert_close(*losses)
        torch.testing.assert_close(gradients_of(sparse), gradients_of(eager), rtol=1e-3, atol=1e-5)
        runs = [now - then for now, then in zip(backend.calls, before + [0] * 99, strict=False)]
        assert 2 * 10 in runs, f"attention, in the forward and once more: {runs}"
    assert len(backend.calls) < 20
    with torch.no_grad():
        torch.testing.assert_close(sparse.eval()(ids).logits, eager.eval()(ids).logits)


def test_a_copy_of_a_model_compiled_inside_runs_its_own_layers(fresh_compiler):
    sparse, ids = sparse_model().train(), tokens()
    enable_checkpoints(sparse)
    hf.compile_inside_checkpoints(sparse, backend="aot_eager")
    sparse.model(ids)
    copied, plain = copy.deepcopy(sparse), sparse_model().train()
    plain.load_state_dict(sparse.state_dict())
    for model in (copied, plain):
        with torch.no_grad():
            for parameter in model.model.layers.parameters():
                parameter.mul_(1.5)
    expected, found = (model.model(ids).last_hidden_state for model in (plain, copied))
    torch.testing.assert_close(found, expected)
    found.sum().backward()
    assert all(parameter.grad is not None for parameter in copied.model.layers.parameters())
    assert all(parameter.grad is None for parameter in sparse.parameters())


def test_compiling_inside_checkpoints_wants_checkpoints():
    with pytest.raises(ValueError, match="gradient_checkpointing_enable"):
        hf.compile_inside_checkpoints(sparse_model())


def test_compiled_whole_and_l1_weight_without_recompiling():
    torch._dynamo.reset()
    sparse, ids = sparse_model(sparsity_l1_coeff=0.5).train(), tokens()
    compilations = []

    def backend(graph, inputs):
        compilations.append(graph)
        return graph.forward

    compiled = torch.compile(partial(sparse, use_cache=False), fullgraph=True, backend=backend)
    assert_same_steps(sparse, compiled, ids)
    assert len(compilations) == 1
