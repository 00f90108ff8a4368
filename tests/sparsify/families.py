"""Walks the language models of transformers: which of them `sparsify_` runs, exactly, and why not the others.

python -m tests.sparsify.families              every model type, one line each
python -m tests.sparsify.families llama opt    some of them
python -m tests.sparsify.families --record     and write benchmarks/results/families.jsonl
"""

from __future__ import annotations

import argparse
import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import twell
from twell.measure import Record, make_record, write_records

from . import tiny_models

RECORDS = Path(__file__).parents[2] / "benchmarks" / "results" / "families.jsonl"
PLAN = twell.Plan.parse("row")  # a named sparse plan: sparse kernels are what is tested
TOLERANCE = 1e-4  # of the largest output: noise of a few float32 layers; all types are below 1e-5
EFFECT = 1e-2  # of the blocks on the output: with less, an error could hide

# Gated attention and recurrences apply the activation of the config, too, and are no feed-forward blocks.
_MIXER = re.compile(r"(^|[._])(attn|attention|mamba|temporal_block)([._]|$)")


@dataclass(frozen=True)
class Outcome:
    """What became of a model type.

    verdict: "sparse", "partly" (some blocks are), "refused", "no relu", "cannot run" or "WRONG".
    reason:  of every verdict but "sparse".
    how:     how blocks were recognised, if they were.
    blocks, tokens: found ones, and how many tokens they took in one forward, sparse.
    error:   of the output, relative to its largest value.
    """

    model_type: str
    verdict: str
    reason: str = ""
    how: str = ""
    blocks: int = 0
    tokens: int = 0
    error: float = 0.0

    @property
    def accepts_relu(self) -> bool:
        return self.verdict not in ("no relu", "cannot run")


class CannotRunError(Exception):
    """Why a model type cannot be built or run, even stock."""


def judge(model_type: str) -> Outcome:
    try:
        return _judge(model_type)
    except CannotRunError as reason:
        return Outcome(model_type, "cannot run", str(reason))


def _judge(model_type: str) -> Outcome:
    model = _built(model_type)
    inputs, stock = _stock_run(model)
    zeros = _Zeros(model, inputs)
    if not zeros.readers and not zeros.experts:
        return Outcome(model_type, "no relu", "no projection of a feed-forward block reads zeros of ReLU")
    kinds = {name: type(module) for name, module in model.named_modules()}
    state = {name: tensor.clone() for name, tensor in _tensor_state(model)}

    report = twell.sparsify_(model, plan=PLAN)
    how = _how_recognised(model)
    last = {model.get_submodule(f"{row.block}.{row.projections[-1]}".strip(".")) for row in report.blocks}
    outcome = Outcome(model_type, "sparse", how=how, blocks=len(report.blocks))
    wrong = ["its state dict changed"] if not _equal_states(state, model) else []
    with twell.recorded_paths() as ran:
        try:
            output = _run(model, inputs)
        except Exception as error:
            return replace(outcome, verdict="WRONG", reason=f"sparsified, it raises {_words(error)}")
    tokens = sum(piece.tokens for piece in ran if piece.path != "dense")
    outcome = replace(outcome, tokens=tokens, error=_difference(stock, output))
    if outcome.error > TOLERANCE:
        wrong.append(f"its output differs by {outcome.error:.1e}")
    wanted = sum(zeros.tokens[module] for module in last)
    if tokens != wanted:
        wrong.append(f"{tokens} tokens ran sparse of {wanted}")

    twell.densify_(model)
    if kinds != {name: type(module) for name, module in model.named_modules()}:
        wrong.append("densify_ left classes")
    if not _equal_states(state, model) or _difference(stock, _run(model, inputs)) != 0:
        wrong.append("densify_ did not restore it")
    if tokens and _effect(model, inputs, stock, last) < EFFECT:
        wrong.append("its output hardly depends on its blocks")
    left = zeros.left(last)
    if wrong:
        return replace(outcome, verdict="WRONG", reason="; ".join(wrong))
    if left:
        reason = _reason(report, left)
        return replace(outcome, verdict="partly" if tokens else "refused", reason=reason)
    return outcome


def _built(model_type: str) -> nn.Module:
    try:
        return tiny_models.build(model_type)
    except Exception as error:
        raise CannotRunError(f"not built: {_words(error)}") from error


def _words(error: Exception) -> str:
    first = str(error).strip().splitlines()[-1:] or [""]
    return f"{type(error).__name__}: {' '.join(first[0].split())[:120]}"


def _stock_run(model: nn.Module) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Inputs that the model takes, and what it makes of them."""
    first: Exception | None = None
    for inputs in tiny_models.candidate_inputs(model):
        try:
            output = _run(model, inputs)
        except Exception as error:
            first = first or error
            continue
        if output and all(torch.isfinite(tensor).any() for tensor in output):
            return inputs, output
        first = first or ValueError("its output is not finite")
    raise CannotRunError(f"no input found: {_words(first)}" if first else "no input found")


def _run(model: nn.Module, inputs: dict[str, Tensor]) -> list[Tensor]:
    torch.manual_seed(0)
    with torch.no_grad():
        return list(_floats(model(**inputs)))


def _floats(value: Any) -> Iterator[Tensor]:
    """The tensors of floats in what a model returns; caches are left out."""
    if isinstance(value, Tensor):
        if value.is_floating_point() and value.numel():
            yield value
    elif isinstance(value, dict):
        for entry in value.values():
            yield from _floats(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _floats(entry)


def _difference(wanted: list[Tensor], got: list[Tensor]) -> float:
    """The largest one, relative to the largest finite value of the tensor it is in."""
    if [tensor.shape for tensor in wanted] != [tensor.shape for tensor in got]:
        return float("inf")
    worst = 0.0
    for one, other in zip(wanted, got, strict=True):
        finite = torch.isfinite(one)
        if not torch.equal(finite, torch.isfinite(other)):
            return float("inf")
        if finite.any():
            scale = one[finite].abs().max().item() or 1.0
            worst = max(worst, (one - other)[finite].abs().max().item() / scale)
    return worst


def _tensor_state(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [(name, value) for name, value in model.state_dict().items() if isinstance(value, Tensor)]


def _equal_states(wanted: dict[str, Tensor], model: nn.Module) -> bool:
    """Keys in their order, values and strides."""
    state = dict(_tensor_state(model))
    return list(wanted) == list(state) and all(
        tensor.stride() == state[name].stride() and torch.equal(tensor, state[name])
        for name, tensor in wanted.items()
    )


class _Zeros:
    """Who reads ReLU's zeros in a stock run. Nothing here knows what sparsify_ looks for.

    tokens:   how many each projection takes.
    readers:  projections that are given many zeros, which only ReLU makes, and their names.
    experts:  names of modules that apply a ReLU and hold weights that are no projections.
    """

    def __init__(self, model: nn.Module, inputs: dict[str, Tensor]) -> None:
        self.tokens: Counter[nn.Module] = Counter()
        self.readers: dict[nn.Module, str] = {}
        self.experts: list[str] = []
        names = {module: name for name, module in model.named_modules()}

        def reads(module: nn.Module, given: tuple) -> None:
            zero = given[0].reshape(-1, given[0].shape[-1]) == 0
            self.tokens[module] += len(zero)
            share = zero[~zero.all(-1)].float().mean().item()  # rows of zeros are padding
            if 0.1 < share < 0.99 and not _is_mixer(model, names[module]):
                self.readers[module] = names[module]

        def applies(module: nn.Module, given: tuple) -> None:
            holder = names[module].rpartition(".")[0]
            weights = model.get_submodule(holder).parameters()
            if any(weight.dim() == 3 for weight in weights) and not _is_mixer(model, names[module]):
                self.experts.append(holder)

        handles = []
        for module in model.modules():
            if isinstance(module, nn.Linear | Conv1D):
                handles.append(module.register_forward_pre_hook(reads))
            elif type(module).__name__ in ("ReLU", "ReLUSquaredActivation"):
                handles.append(module.register_forward_pre_hook(applies))
        _run(model, inputs)
        for handle in handles:
            handle.remove()

    def left(self, found: set[nn.Module]) -> list[str]:
        """Names of what reads zeros and is not among `found`."""
        return [name for module, name in self.readers.items() if module not in found] + self.experts


def _is_mixer(model: nn.Module, name: str) -> bool:
    """Whether a module is part of one; a recurrence has a convolution beside its projections."""
    holder = model.get_submodule(name.rpartition(".")[0])
    return bool(_MIXER.search(name)) or any(isinstance(child, nn.Conv1d) for child in holder.children())


def _how_recognised(model: nn.Module) -> str:
    found = set()
    for module in model.modules():
        carrier = module.__dict__.get("_twell_carrier")
        if "_twell_block" in module.__dict__:
            found.add("a module of its own")
        elif carrier is not None:
            found.add("intermediate and output" if carrier.activation is None else "projections in the layer")
    return ", ".join(sorted(found))


def _effect(model: nn.Module, inputs: dict[str, Tensor], stock: list[Tensor], last: set[nn.Module]) -> float:
    """How much the output changes if blocks return what they do the other way round."""
    handles = [
        module.register_forward_hook(lambda _module, _given, result: result.flip(-1)) for module in last
    ]
    flipped = _run(model, inputs)
    for handle in handles:
        handle.remove()
    return _difference(stock, flipped)


def _reason(report: twell.SparsifyReport, left: list[str]) -> str:
    """Why these were refused, by the report."""
    reasons = [
        row.reason
        for row in report.skipped
        if any(f"{name}.".startswith(f"{row.name}.") or row.name.startswith(f"{name}.") for name in left)
    ]
    return (
        "; ".join(dict.fromkeys(reasons)) or f"`{left[0].rpartition('.')[2]}` is no part of a block we know"
    )


def types_to_walk() -> list[str]:
    return [name for name in tiny_models.model_types() if tiny_models.is_language_model(name)]


def record_of(outcome: Outcome, template: Record) -> Record:
    fields = asdict(outcome)
    shape = {name: fields[name] for name in ("model_type", "verdict", "reason", "how", "tokens")}
    return replace(
        template,
        what=f"families/{outcome.model_type.lower()}",
        value=float(outcome.blocks),
        shape=shape,
        error=outcome.error,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("types", nargs="*", help="model types; default all")
    parser.add_argument("--record", action="store_true", help=f"write {os.path.relpath(RECORDS)}")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    outcomes = []
    for model_type in arguments.types or types_to_walk():
        outcome = judge(model_type)
        outcomes.append(outcome)
        figures = f"{outcome.blocks:3} blocks {outcome.tokens:5} tokens {outcome.error:.0e}"
        print(
            f"{model_type:24} {outcome.verdict:10} {figures} {outcome.how or '-'}; {outcome.reason}",
            flush=True,
        )
    print(Counter(outcome.verdict for outcome in outcomes).most_common())
    if arguments.record:
        template = make_record("families/any", 0.0, unit="blocks", seed=0)
        template = replace(template, versions={**template.versions, "transformers": transformers.__version__})
        write_records(RECORDS, [record_of(outcome, template) for outcome in outcomes])


if __name__ == "__main__":
    main()
