"""Training steps of whole models: forward, loss, backward and optimiser, dense against ours.

The dense models are stock: no L1 term, no statistics. Ours has both, as the recipe wants.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from .. import reference
from .._errors import reject
from .baselines import (
    AUTOTUNE,
    compile_layers,
    has_liger,
    many_compilations,
    quiet_autotuning,
    with_liger,
)
from .contest import Contender, Setting, Workload, doubt, largest_that_fits, ready, run_contest
from .inference import described, sparsity_of
from .memory import peak_bytes
from .models import (
    ModelPair,
    ModelSize,
    build_pair,
    decoder_layers,
    free_bytes,
    require_room,
    shared_twin,
)
from .processes import NOTE
from .results import Measured

CONTENDERS = {
    "dense-eager": "stock transformers Llama with ReLU, no L1, no statistics",
    "dense-compiled": "the same, layers and loss compiled by torch.compile",
    "dense-autotuned": "the same, compiled with max-autotune",
    "dense-liger": "the same, with Liger's norms and its loss without whole logits, layers compiled",
    "ours-eager": "our model with L1 term and firing counts, automatic plan",
    "ours-compiled": "the same, attention, norms and loss compiled by torch.compile",
}
DEFAULT = ["dense-eager", "dense-compiled", "ours-eager", "ours-compiled"]
PRECISIONS = ("bfloat16", "mixed", "float32")
L1 = 2e-5
_MARGIN = 0.92  # of free memory: what the allocator cannot use
_DOUBTFUL, _ROUNDED = 3.0, 1e-5  # errors beyond so many times dense eager's, and this, are no rounding
_NO_CHANGE = 0.0  # learning rate: the optimiser works in full, and all contenders keep the same weights


@dataclass(frozen=True, kw_only=True)
class TrainingCase:
    """A step. precision: "bfloat16" keeps weights, gradients and the optimiser's state in bfloat16; "mixed"
    keeps them in float32 and computes in bfloat16 by autocast, as `twell train` does; "float32"."""

    size: ModelSize
    name: str
    batch: int
    sequence: int
    precision: str = "bfloat16"
    device: torch.device
    seed: int = 0

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            reject("precision", repr(self.precision), " | ".join(PRECISIONS))
        if self.sequence > self.size.positions:
            reject("sequence", self.sequence, f"at most {self.size.positions}, the model's positions")
        if self.sequence < 2:
            reject("sequence", self.sequence, "at least 2 tokens: one to read, one to predict")

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.precision == "bfloat16" else torch.float32

    @property
    def bytes_per_parameter(self) -> int:
        """Weights, gradients and two moments, of two models."""
        return 2 * 4 * self.dtype.itemsize

    def build(self) -> Trained:
        return Trained(build_pair(self.size, dtype=self.dtype, device=self.device, seed=self.seed), self)

    def ids(self, batch: int | None = None) -> Tensor:
        generator = torch.Generator("cpu").manual_seed(self.seed)
        shape = (batch or self.batch, self.sequence)
        return torch.randint(self.size.vocabulary, shape, generator=generator).to(self.device)


class Trained:
    """A pair of models with an optimiser each."""

    def __init__(self, pair: ModelPair, case: TrainingCase) -> None:
        self.pair, self.case = pair, case
        pair.dense.train()
        pair.sparse.train()
        pair.sparse.l1_weight = L1
        fused = case.device.type == "cuda"
        self.optimisers = {
            kind: torch.optim.AdamW(
                model.parameters(), lr=_NO_CHANGE, betas=(0.9, 0.95), weight_decay=0.1, fused=fused
            )
            for kind, model in (("dense", pair.dense), ("ours", pair.sparse))
        }

    def optimiser(self, contender: str) -> torch.optim.Optimizer:
        return self.optimisers["ours" if contender.startswith("ours") else "dense"]

    def own_bytes(self, contender: str) -> int:
        """Weights and the optimiser's state, after its first step."""
        optimiser = self.optimiser(contender)
        weights = (p for group in optimiser.param_groups for p in group["params"])
        states = (
            value
            for state in optimiser.state.values()
            for value in state.values()
            if isinstance(value, Tensor) and value.device.type == self.case.device.type
        )
        return sum(tensor.nbytes for tensor in chain(weights, states))

    def step(self, contender: str, ids: Tensor, checkpointing: bool) -> Step:
        """One step of a contender on ids [B, S], to be called again and again."""
        model = self._prepared(contender, checkpointing)
        return Step(model, self.optimiser(contender), ids, autocast=self.case.precision == "mixed")

    def _prepared(self, contender: str, checkpointing: bool) -> nn.Module:
        from ..hf import compile_inside_checkpoints, sparse_mlps
        from ..hf.layers import enable_checkpoints

        ours = contender.startswith("ours")
        model = shared_twin(self.pair.sparse if ours else self.pair.dense)
        if contender == "dense-liger":
            if not has_liger():
                reject(
                    "contenders", "dense-liger", "an environment with liger-kernel: pip install liger-kernel"
                )
            model = with_liger(self.pair.dense)
        if checkpointing:
            enable_checkpoints(model)
        if contender.endswith("eager"):
            return model
        if not hasattr(model, "fused_loss"):
            model.loss_function = torch.compile(model.loss_function, dynamic=False)
        if not ours:
            # transformers 5.22 calls the compiled layer inside of the checkpoint; in 5.23 the checkpoint is a
            # part of what is compiled.
            mode = AUTOTUNE if contender == "dense-autotuned" else None
            return compile_layers(model, mode=mode)
        for mlp in sparse_mlps(model):
            mlp.eager = True  # an automatic plan decides between graphs
        if checkpointing:
            compile_inside_checkpoints(model, dynamic=False)
            return model
        return compile_layers(model, fullgraph=False)


class Step:
    """Forward, loss, backward and optimiser; returns the loss."""

    def __init__(
        self, model: nn.Module, optimiser: torch.optim.Optimizer, ids: Tensor, *, autocast: bool
    ) -> None:
        self._model, self._optimiser, self._ids, self._autocast = model, optimiser, ids, autocast
        self._fused_loss = getattr(model, "fused_loss", None)

    def __call__(self) -> Tensor:
        ids = self._ids
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=self._autocast):
            if self._fused_loss is not None:
                loss = self._fused_loss(ids)
            else:
                loss = self._model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        self._optimiser.step()
        self._optimiser.zero_grad(set_to_none=True)
        return loss.detach()


def bench_training(
    trained: Trained,
    checkpointing: bool,
    contenders: list[str],
    setting: Setting,
    ids: Tensor | None = None,
) -> None:
    """Compare whole steps with or without activation checkpointing.

    ids:  [B, S], of the case's batch and sequence; None: random ones.
    """
    case = trained.case
    ids = case.ids() if ids is None else ids
    trained.pair.sparse.eval()
    sparsity = sparsity_of(trained.pair, ids)
    trained.pair.sparse.train()
    word = "with" if checkpointing else "without"
    workload = Workload(
        name="checkpointed" if checkpointing else "step",
        title=f"training step, {case.batch} x {case.sequence} tokens, {word} checkpointing",
        shape=described(
            trained.pair,
            case.name,
            batch=case.batch,
            sequence=case.sequence,
            precision=case.precision,
            checkpointing=checkpointing,
        ),
        tokens=ids.numel(),
        sparsity=sparsity,
    )
    running: list[Contender] = []
    with many_compilations(), quiet_autotuning("dense-autotuned" in contenders):
        for one in contenders:
            contender = Contender(
                name=one,
                meaning=CONTENDERS[one],
                call=trained.step(one, ids, checkpointing),
                warm_up=8 if one.startswith("ours") else 3,
                sparse=one.startswith("ours"),
            )
            if ready(contender, setting):
                contender.own_bytes = trained.own_bytes(one)
                contender.details["loss"] = contender.call().item()
            running.append(contender)
        setting.say(f"{workload.title}: comparing blocks")
        _compare_blocks(trained, ids, running, setting)
        run_contest(running, workload, setting)
    running.clear()
    setting.release()


def _compare_blocks(trained: Trained, ids: Tensor, running: list[Contender], setting: Setting) -> None:
    """The largest relative error, against float32 (of float32: float64), of what some blocks compute in
    training on their real input: the output, the gradients of the input and of each weight.

    Whole models would show less: in 16 bits their gradients differ by a tenth from rounding alone, and the
    loss of random tokens hardly depends on the blocks. Compiled dense contenders have no block of their own:
    a graph holds it. Ours stay between graphs, the same ones in both contenders.
    """
    dense, sparse = (decoder_layers(model) for model in (trained.pair.dense, trained.pair.sparse))
    places = sorted({0, len(dense) // 2, len(dense) - 1})
    errors = {"dense": 0.0, "ours": 0.0}
    autocast = trained.case.precision == "mixed"
    wider = torch.float64 if trained.case.precision == "float32" else torch.float32
    try:
        for place, x in zip(places, _inputs(trained.pair.dense, places, ids), strict=True):
            wide = copy.deepcopy(dense[place].mlp).to(wider)
            grad_y = _gradient(wide, x.to(wider), x.dtype, told_apart=wider == torch.float64)
            exact = _computed(wide, x.to(wider), grad_y)
            for kind, layer in (("dense", dense[place]), ("ours", sparse[place])):
                with torch.autocast(x.device.type, torch.bfloat16, enabled=autocast):
                    found = _computed(layer.mlp, x, grad_y)
                found_errors = [reference.relative_error(found[name], exact[name]) for name in exact]
                errors[kind] = torch.tensor([errors[kind], *found_errors]).max().item()  # NaN wins
            del exact, found
            setting.release()
    except torch.OutOfMemoryError:
        setting.say(f"{NOTE}blocks are not compared: that does not fit")
        setting.release()
        return
    for one in running:
        kind = {"dense-eager": "dense", "ours-eager": "ours", "ours-compiled": "ours"}.get(one.name)
        if one.failure is None and kind is not None:
            one.error = one.details["block_error"] = errors[kind]
    doubt(running, "blocks", max(_DOUBTFUL * errors["dense"], _ROUNDED), setting)


@torch.no_grad()
def _inputs(model: nn.Module, places: list[int], ids: Tensor) -> list[Tensor]:
    """What the blocks of some layers get."""
    found: list[Tensor] = []
    layers = decoder_layers(model)
    hooks = [layers[i].mlp.register_forward_pre_hook(lambda _, args: found.append(args[0])) for i in places]
    try:
        model.model(ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return found


@torch.no_grad()
def _gradient(block: nn.Module, x: Tensor, dtype: torch.dtype, *, told_apart: bool) -> Tensor:
    """A gradient of the output of a dense block, which others compute in `dtype`.

    told_apart:  0 for tokens with a neuron next to its threshold. Two ways to round may disagree on whether
                 it fires, and its gradient is then there or not. In 16 bits that is so for every token, and
                 for dense PyTorch too.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    tokens = x[..., 0].numel()
    features = torch.randn(x.shape[-1], generator=generator).to(x)
    grad_y = features * torch.linspace(0.5, 1.5, tokens).view(*x.shape[:-1], 1).to(x)
    if not told_apart:
        return grad_y
    selector = getattr(block, "gate_proj", None) or block.up_proj
    size = x.norm(dim=-1, keepdim=True) * selector.weight.norm(dim=1)
    near = (selector(x).abs() <= 8 * torch.finfo(dtype).eps * size).any(-1, keepdim=True)
    return grad_y.masked_fill(near, 0)


def _computed(block: nn.Module, x: Tensor, grad_y: Tensor) -> dict[str, Tensor]:
    """Output and gradients of a block."""
    weights = dict(block.named_parameters())
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        y = block(x)
        grads = torch.autograd.grad(y, [x, *weights.values()], grad_y.to(y))
    return {"y": y.detach(), "x": grads[0], **dict(zip(weights, grads[1:], strict=True))}


def layers_that_fit(case: TrainingCase, setting: Setting) -> int:
    """How many layers of the case's model can be trained next to their dense twins, up to all of them.

    Measured: steps of the dense model with one layer and with two say what a layer costs.
    """
    free = free_bytes(case.device)
    if free is None:
        return case.size.layers
    needed: list[float] = []
    for layers in (1, 2):
        small = replace(case, size=replace(case.size, layers=layers))
        require_room(
            small.size, bytes_per_parameter=case.bytes_per_parameter, device=case.device, name=case.name
        )
        setting.say(f"how many layers fit: a step with {layers}")
        trained = small.build()
        step = trained.step("dense-eager", small.ids(), False)
        try:
            step()
            needed.append(2 * trained.own_bytes("dense-eager") + peak_bytes(step, case.device))
        except torch.OutOfMemoryError:
            reject(
                "batch",
                f"{case.batch} x {case.sequence} tokens, which do not fit with {layers} layers",
                "a smaller --batch",
            )
        del trained, step
        setting.release()
    by_layer = max(needed[1] - needed[0], 1)
    found = int((_MARGIN * free - needed[0]) // by_layer) + 1
    return max(1, min(found, case.size.layers))


def largest_micro_batch(
    case: TrainingCase, contender: str, checkpointing: bool, setting: Setting, memory: int | None = None
) -> int:
    """The most sequences that a step of a contender fits, alone on the device; 0 if none.

    memory:  bytes that it may take; None: all that are free, on a GPU.
    """
    if memory is None and case.device.type != "cuda":
        reject("search", "no limit of memory", "--memory GIB on a CPU, whose system would swap first")
    trained = case.build()
    ours = contender.startswith("ours")
    kept, unused = (trained.pair.sparse, trained.pair.dense)[:: 1 if ours else -1]
    for parameter in unused.parameters():
        parameter.data = torch.empty(0, dtype=parameter.dtype, device=case.device)
    setting.release()

    def fits(batch: int) -> bool:
        setting.say(f"largest micro-batch of {contender}: trying {batch}")
        try:
            step = trained.step(contender, case.ids(batch), checkpointing)
            for _ in range(3 if ours else 1):  # until layers train sparse
                step()
            setting.wait()
            if memory is None:
                return True
            return trained.own_bytes(contender) + peak_bytes(step, case.device) <= memory
        except torch.OutOfMemoryError:
            return False
        finally:
            for parameter in kept.parameters():
                parameter.grad = None
            setting.release()

    return largest_that_fits(fits, case.batch, 1024)


def batch_result(
    case: TrainingCase, contender: str, checkpointing: bool, sequences: int, memory: int | None
) -> Measured:
    """The result of a search, to emit."""
    shape: dict[str, Any] = {
        "model": case.name,
        "layers": case.size.layers,
        "sequence": case.sequence,
        "precision": case.precision,
        "checkpointing": checkpointing,
    }
    if memory is not None:
        shape["memory_gib"] = f"{memory / 2**30:g}"
    return Measured(
        workload="micro-batch",
        contender=contender,
        meaning=CONTENDERS[contender],
        shape=shape,
        tokens=max(sequences * case.sequence, 1),
        details={"sequences": sequences},
        failure=None if sequences else "no sequence fits",
    )
