"""One case run three times: by twell, by stock PyTorch and by the float64 oracle."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from unittest import mock

import torch
from torch import Tensor

from twell import Plan, SparseMLP, ffn, ffn_with_stats, layer_state, policy, recorded_paths, reference
from twell.activations import Activation
from twell.kernels.cpu import gemm, measurements

from .case import Case
from .tensors import make_operands, make_weighting

L1_WEIGHT = 0.5

# Share of active neurons up to which the row path is taken, dense time over the block path's, 16-bit units.
CPUS = {
    "plain": (0.13, 2.0, False),
    "row": (1.0, 0.0, False),
    "block": (0.0, 2.0, False),
    "dense": (0.0, 0.0, False),
    "units": (0.13, 2.0, True),
}


@dataclass
class Outcome:
    """y, [tokens, outputs]; gradients by name, None where there is none; l1 and firing if they are known;
    l1_of_hidden: that of the hidden values as they were rounded, added up in float64."""

    y: Tensor
    gradients: dict[str, Tensor | None]
    l1: Tensor | None = None
    l1_of_hidden: Tensor | None = None
    firing: Tensor | None = None
    l0: Tensor | None = None


def run_twell(case: Case, operands: dict[str, Tensor]) -> tuple[Outcome, list[str]]:
    """The outcome of the last call, and the paths it took."""
    leaves = _leaves(case, operands)
    call = _module_call if case.entry == "module" else _function_call
    with _switches(case), recorded_paths() as ran:
        run = call(case, leaves)
        with _mode(case), _autocast(case):
            for _ in range(case.calls):
                run()
            if case.changed:
                _change(leaves)
            del ran[:]
            y, stats = run()
        if y.shape != (*case.leading, case.outputs):
            raise AssertionError(f"y: shape {tuple(y.shape)}, expected {(*case.leading, case.outputs)}")
        l1 = None if stats is None else stats.l1
        gradients = _differentiate(case, y, l1, leaves) if case.trains else {}
    outcome = Outcome(y.detach().view(case.tokens, case.outputs), gradients)
    if stats is not None:
        outcome.l1, outcome.firing, outcome.l0 = stats.l1.detach(), stats.firing, stats.l0
    return outcome, sorted({f"{piece.phase} {piece.path}" for piece in ran})


def run_stock(case: Case, operands: dict[str, Tensor]) -> Outcome:
    leaves = _leaves(case, operands)
    with torch.set_grad_enabled(case.trains), _autocast(case):
        y, l1, l1_of_hidden, firing = _stock(case, **leaves)
    gradients = _differentiate(case, y, l1, leaves) if case.trains else {}
    y = y.detach().view(case.tokens, case.outputs)
    return Outcome(y, gradients, l1.detach(), l1_of_hidden, firing)


def run_oracle(case: Case, operands: dict[str, Tensor]) -> Outcome:
    """In float64, on operands as the block computes with them."""
    compute = getattr(torch, case.compute_dtype)
    leaves = _leaves(case, {name: t.to(compute).double() for name, t in operands.items()})
    with torch.set_grad_enabled(case.trains):
        exact = reference.ffn(**leaves, activation=case.activation, dtype=torch.float64)
    gradients = _differentiate(case, exact.y, exact.l1, leaves) if case.trains else {}
    return Outcome(
        exact.y.detach().view(case.tokens, case.outputs),
        gradients,
        exact.l1.detach(),
        firing=exact.firing,
    )


def final_operands(case: Case) -> dict[str, Tensor]:
    """Those of the call that is looked at."""
    operands = make_operands(case)
    if case.changed:
        _change(operands)
    return operands


def _leaves(case: Case, operands: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: tensor.detach().requires_grad_(case.trains and name in case.trained)
        for name, tensor in operands.items()
    }


def _change(tensors: dict[str, Tensor]) -> None:
    """Other weights, in place. Halves are exact, so that it does not matter in which dtype."""
    with torch.no_grad():
        for name in ("up", "down"):
            tensors[name].data.mul_(-0.5)


def _function_call(case: Case, leaves: dict[str, Tensor]):
    plan = None if case.plan is None else Plan.parse(case.plan)

    def run():
        if case.entry == "ffn":
            return ffn(**leaves, activation=case.activation, plan=plan), None
        return ffn_with_stats(**leaves, activation=case.activation, plan=plan)

    return run


def _module_call(case: Case, leaves: dict[str, Tensor]):
    mlp = SparseMLP(
        case.features,
        case.neurons,
        gated=case.gated,
        activation=case.activation,
        plan=None if case.plan is None else Plan.parse(case.plan),
        record=True,
        neuron_major=("down", "transposed") in case.layouts,
        device=leaves["x"].device,
        dtype=leaves["x"].dtype,
        **{name: name in case.biases for name in ("gate_bias", "up_bias", "down_bias")},
    )
    for name in case.operands:
        if name != "x":
            projection = getattr(mlp, f"{name.removesuffix('_bias')}_proj")
            parameter = projection.bias if name.endswith("_bias") else projection.weight
            parameter.data.copy_(leaves[name])
            parameter.requires_grad_(leaves[name].requires_grad)
            leaves[name] = parameter

    def run():
        return mlp(leaves["x"]), mlp.last_stats

    return run


def _stock(case: Case, x, up, down, gate=None, up_bias=None, down_bias=None, gate_bias=None):
    """y and L1 as a user writes them, L1 without the roundings of its sum, firing counts."""
    linear, activation = torch.nn.functional.linear, Activation.parse(case.activation)
    hidden = linear(x, up, up_bias)
    activated = activation(hidden if gate is None else linear(x, gate, gate_bias))
    if case.activation == "drelu":
        hidden = torch.relu(hidden)
    hidden = activated if gate is None else activated * hidden
    firing = (activated.detach() != 0).reshape(-1, case.neurons).sum(0)
    wide = torch.promote_types(hidden.dtype, torch.float32)
    tokens = max(case.tokens, 1)
    l1 = hidden.abs().sum(dtype=wide) / tokens
    return linear(hidden, down, down_bias), l1, hidden.detach().double().abs().sum() / tokens, firing


def _differentiate(
    case: Case, y: Tensor, l1: Tensor | None, leaves: dict[str, Tensor]
) -> dict[str, Tensor | None]:
    if case.loss == "sum":
        loss = y.sum()
    elif case.loss == "l1":
        loss = L1_WEIGHT * l1
    elif case.loss == "transposed":
        weighting = make_weighting(case, y.shape).to(y)
        strange = weighting.reshape(case.tokens, case.outputs).mT.contiguous().mT.view(y.shape)
        found = torch.autograd.grad(y, [leaves[name] for name in case.trained], strange, allow_unused=True)
        return dict(zip(case.trained, found, strict=True))
    else:
        loss = (y * make_weighting(case, y.shape).to(y)).sum(
            dtype=torch.promote_types(y.dtype, torch.float32)
        )
        if case.loss == "weighted+l1":
            loss = loss + L1_WEIGHT * l1
    found = torch.autograd.grad(loss, [leaves[name] for name in case.trained], allow_unused=True)
    return dict(zip(case.trained, found, strict=True))


def _mode(case: Case):
    if case.mode == "inference":
        return torch.inference_mode()
    return torch.set_grad_enabled(case.trains)


def _autocast(case: Case):
    if case.autocast is None:
        return nullcontext()
    place = "cuda" if case.device == "cuda" else "cpu"
    return torch.autocast(place, getattr(torch, case.autocast))


@contextmanager
def _switches(case: Case):
    """Thresholds of speed out of the way: small blocks take sparse paths too, as `case.cpu` says."""
    with ExitStack() as stack:
        row_limit, block_gain, native = CPUS[case.cpu]
        kept = {"row limit": row_limit, "dense over block": block_gain, "linear over": 0.0}

        def measured(name, measure, *, otherwise, usual=0.0):
            return next(number for kind, number in kept.items() if name.startswith(kind))

        stack.enter_context(mock.patch.object(measurements, "measured", measured))
        for name in ("_WORTH_LOOKING_SECONDS", "_MANY_WORTH_LOOKING_SECONDS"):
            stack.enter_context(mock.patch.object(policy.cpu, name, 0.0))
        stack.enter_context(mock.patch.object(gemm, "has_native_gemm", return_value=native))
        layer_state._temporaries.cache_clear()  # a case knows no other
        policy.resolve_cached.cache_clear()  # what other thresholds gave
        stack.callback(policy.resolve_cached.cache_clear)
        if case.sparse_backward:
            for module, name, value in (
                (policy.cpu, "_STOCK_TOKENS", 1),
                (policy.cpu, "_backward_can_pay", lambda args, site: not site.native_16_bit),
                (policy.cpu, "_is_sparse", lambda *_: True),
            ):
                stack.enter_context(mock.patch.object(module, name, value))
        yield
