"""Training steps of whole models: forward, loss, backward and optimiser, dense against ours.

The dense models are stock: no L1 term, no statistics. Ours has both, as the recipe wants.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from .._errors import ran_out_of_memory, reject
from .baselines import (
    AUTOTUNE,
    compile_layers,
    has_liger,
    many_compilations,
    quiet_autotuning,
    with_liger,
)
from .comparison import compare_steps
from .contest import Contender, Setting, Workload, largest_that_fits, ready, run_contest
from .inference import described, fitting_batch, sparsity_of
from .memory import peak_bytes
from .models import ModelPair, ModelSize, build_pair, free_bytes, layers_in, require_room, shared_twin
from .results import Measured

CONTENDERS = {
    "dense-eager": "stock transformers Llama with ReLU, no L1, no statistics",
    "dense-compiled": "stock Llama, layers and loss compiled by torch.compile",
    "dense-autotuned": "stock Llama, layers and loss compiled with max-autotune",
    "dense-liger": "stock Llama with Liger's norms and its loss without whole logits, layers compiled",
    "ours-eager": "our model with L1 term and firing counts, automatic plan",
    "ours-compiled": "our model; attention, norms and loss compiled by torch.compile",
}
DEFAULT = ["dense-eager", "dense-compiled", "ours-eager", "ours-compiled"]
PRECISIONS = ("bfloat16", "mixed", "float32")
L1 = 2e-5
_MARGIN = 0.92  # of free memory: what the allocator cannot use
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

    def build(self, say: Callable[[str], None] = lambda text: None) -> Trained:
        pair = build_pair(self.size, dtype=self.dtype, device=self.device, seed=self.seed, say=say)
        return Trained(pair, self)

    def ids(self, batch: int | None = None) -> Tensor:
        generator = torch.Generator("cpu").manual_seed(self.seed)
        shape = (batch or self.batch, self.sequence)
        return torch.randint(self.size.vocabulary, shape, generator=generator).to(self.device)


def require_contenders(names: Sequence[str], device: str) -> None:
    """Refuse contenders that cannot run here."""
    if "dense-liger" not in names:
        return
    if not device.startswith("cuda"):
        reject("contenders", "dense-liger on a CPU", "others: Liger's kernels need a GPU")
    if not has_liger():
        reject("contenders", "dense-liger", "an environment with liger-kernel: pip install liger-kernel")


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
        self.model, self._optimiser, self._ids, self._autocast = model, optimiser, ids, autocast
        self._fused_loss = getattr(model, "fused_loss", None)

    def __call__(self) -> Tensor:
        with self._freed_after_failure():
            loss = self._forward()
            loss.backward()
            self._optimiser.step()
        self._optimiser.zero_grad(set_to_none=True)
        return loss.detach()

    @contextmanager
    def _freed_after_failure(self) -> Iterator[None]:
        """Frees what an interrupted step holds: gradients, the graph behind the blocks' L1, and moments of
        AdamW that came without their twin, which no later step could use."""
        from ..hf import sparse_mlps

        try:
            yield
        except BaseException:
            self._optimiser.zero_grad(set_to_none=True)
            for mlp in sparse_mlps(self.model):
                mlp.last_stats = None
            states = self._optimiser.state
            for parameter in [one for one, state in states.items() if "exp_avg_sq" not in state]:
                del states[parameter]
            raise

    def _forward(self) -> Tensor:
        ids = self._ids
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=self._autocast):
            if self._fused_loss is not None:
                return self._fused_loss(ids)
            return self.model(input_ids=ids, labels=ids, use_cache=False).loss

    def hidden_states(self) -> Tensor:
        """[B, S, D], the last ones of the step's own forward."""
        found: list[Tensor] = []
        hook = self.model.model.register_forward_hook(
            lambda module, given, output: found.append(output.last_hidden_state.detach())
        )
        try:
            with self._freed_after_failure():
                self._forward()
        finally:
            hook.remove()
        return found[0]


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
        for number, one in enumerate(contenders, 1):
            contender = Contender(
                name=one,
                meaning=CONTENDERS[one],
                call=trained.step(one, ids, checkpointing),
                warm_up=8 if one.startswith("ours") else 3,
                sparse=one.startswith("ours"),
            )
            fits = partial(_what_fits, trained, one, checkpointing, setting)
            if ready(contender, setting, fits, place=f"{number} of {len(contenders)}"):
                contender.own_bytes = trained.own_bytes(one)
                contender.details["loss"] = contender.call().item()
            running.append(contender)
        setting.say(f"{workload.title}: comparing hidden states and blocks")
        steps = {one.name: one.call for one in running}
        if "dense-eager" not in steps:
            steps["dense-eager"] = trained.step("dense-eager", ids, checkpointing)
        compare_steps(trained.pair, steps, running, ids, setting, precision=case.precision)
        run_contest(running, workload, setting)
    running.clear()
    setting.release()


def _what_fits(trained: Trained, contender: str, checkpointing: bool, setting: Setting) -> str:
    """How many sequences would fit, next to the other models. Without a compiler: it would compile again for
    every number."""
    case, eager = trained.case, "ours-eager" if contender.startswith("ours") else "dense-eager"

    def step(sequences: int) -> None:
        one_step = trained.step(eager, case.ids(sequences), checkpointing)
        for _ in range(_steps_until_sparse(eager)):
            one_step()

    return fitting_batch(step, case.batch, case.sequence, setting)


def _steps_until_sparse(contender: str) -> int:
    """Steps until the memory of one is that of all later ones: our layers begin dense."""
    return 3 if contender.startswith("ours") else 1


def layers_that_fit(case: TrainingCase, setting: Setting) -> int:
    """How many layers of the case's model can be trained next to their dense twins, up to all of them.

    No more than `require_room` takes. Measured: steps of the dense model with one layer and with two say what
    a layer costs.
    """
    free = free_bytes(case.device)
    if free is None:
        return case.size.layers
    # With a margin, since memory that is free now may be taken by the time the models are built.
    most = max(layers_in(_MARGIN * free, case.size, case.bytes_per_parameter), 1)
    needed: list[float] = []
    for layers in (1, 2)[:most]:
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
        except RuntimeError as error:
            if not ran_out_of_memory(error):
                raise
            reject(
                "batch",
                f"{case.batch} x {case.sequence} tokens, which do not fit with {layers} layers",
                "a smaller --batch",
            )
        del trained, step
        setting.release()
    if most == 1:
        return most
    by_layer = max(needed[1] - needed[0], 1)
    found = int((_MARGIN * free - needed[0]) // by_layer) + 1
    return max(1, min(found, most))


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
        step = None
        try:
            step = trained.step(contender, case.ids(batch), checkpointing)
            for _ in range(_steps_until_sparse(contender)):
                step()
            setting.wait()
            if memory is None:
                return True
            return trained.own_bytes(contender) + peak_bytes(step, case.device) <= memory
        except RuntimeError as error:
            if not ran_out_of_memory(error):
                raise
            return False
        finally:
            step = None  # it holds memory until it is gone, which the next trial needs
            for parameter in kept.parameters():
                parameter.grad = None
            setting.release()

    return largest_that_fits(
        fits, case.batch, 1024, say=lambda text: setting.say(f"largest micro-batch of {contender}: {text}")
    )


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
        sparsity={"wanted_nnz": float(case.size.nnz)},
        details={"sequences": sequences},
        failure=None if sequences else "no sequence fits",
    )
