"""What `twell bench` runs, here or in a process of its own: builds models and hands them to `measure`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .._errors import reject
from ..measure.contest import Setting
from ..measure.energy import PowerSource, idle_power, power_source
from ..measure.models import ModelPair, build_pair, preset_size, require_room
from ..measure.processes import NOTE, PART, Emit, Say
from ..measure.results import Measured
from .plot_file import short_name
from .text import text_source

_QUICK = 5e7  # weights of a model whose token takes a CPU a few ms at most, which 16 tokens time badly
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Common:
    """Options of both benchmarks. preset: None for a model of one's own."""

    preset: str | None
    layers: int | None
    nnz: float | None
    contenders: tuple[str, ...]
    device: str
    rounds: int
    energy_seconds: float
    seed: int


@dataclass(frozen=True, kw_only=True)
class InferenceOptions(Common):
    """shapes: batch and sequence length of forward passes; none: one that the model takes.
    prompts: sequences of generations. new_tokens: None, as many as it takes to time the model."""

    model: str | None
    text: tuple[str, ...]
    dtype: str
    workloads: tuple[str, ...]
    shapes: tuple[tuple[int, int], ...]
    prompts: tuple[int, ...]
    prompt_length: int
    new_tokens: int | None


@dataclass(frozen=True, kw_only=True)
class TrainingOptions(Common):
    """layers: None, as many as fit. memory: bytes for the search of micro-batches; None: all."""

    batch: int
    sequence: int
    precision: str
    checkpointing: tuple[bool, ...]
    search: bool
    memory: int | None


def _setting(options: Common, emit: Emit, say: Say) -> Setting:
    """With idle power, measured before anything runs, in every result."""
    device = torch.device(options.device)
    source: PowerSource | str = power_source(device)
    if isinstance(source, str):
        if options.energy_seconds > 0:
            say(f"{NOTE}{source}")
        source = None
    idle: dict[str, float] = {}
    if source is not None and options.energy_seconds > 0:
        if device.type == "cuda":
            torch.zeros(1, device=device)  # a GPU in use idles higher than one that sleeps
        say("idle power")
        power = idle_power(source, min(1.0, options.energy_seconds))
        if power is not None:
            idle = {"idle_power_w": round(power.watts, 1)}

    def emit_with_idle(measured: Measured) -> None:
        emit(measured.plus(power={**measured.power, **idle}))

    return Setting(
        device=device,
        rounds=options.rounds,
        source=source,
        energy_seconds=options.energy_seconds,
        emit=emit_with_idle,
        say=say,
    )


def inference_job(options: InferenceOptions, emit: Emit, say: Say) -> None:
    from ..measure.inference import (
        FORWARD,
        Batch,
        bench_forward,
        bench_generation,
        generation_contenders,
    )

    setting = _setting(options, emit, say)
    say("building the models" if options.preset is not None else f"loading {options.model}")
    pair, tokens = _built(options, say) if options.preset is not None else _loaded(options)
    name = options.preset or short_name(str(options.model))
    shapes = options.shapes or (_usual_shape(pair, setting.device),)
    prompts = [(batch, options.prompt_length) for batch in options.prompts]
    # All of them before anything runs: a text may be too short for some.
    batches = {
        workload: [Batch(ids=ids, origin=origin) for ids, origin in (tokens(*shape) for shape in wanted)]
        for workload, wanted in (("forward", shapes), ("generation", prompts))
        if workload in options.workloads
    }
    chosen = [one for one in FORWARD if one in options.contenders]
    for batch in batches.get("forward", ()):
        bench_forward(pair, name, batch, chosen, setting, calibrated=options.preset is not None)
    chosen = [one for one in generation_contenders(setting.device) if one in options.contenders]
    for batch in batches.get("generation", ()):
        new_tokens = options.new_tokens or _usual_new_tokens(pair, options)
        bench_generation(pair, name, batch, new_tokens, chosen, setting)


def _usual_shape(pair: ModelPair, device: torch.device) -> tuple[int, int]:
    """The paper's, on a CPU a small one; shorter where the model has fewer positions."""
    batch, sequence = (32, 2048) if device.type == "cuda" else (2, 256)
    return batch, min(sequence, getattr(pair.dense.config, "max_position_embeddings", None) or sequence)


def _usual_new_tokens(pair: ModelPair, options: InferenceOptions) -> int:
    """So many that their time stands out of the noise, yet few where each takes long; as many as fit."""
    from ..measure.inference import FIRST_TOKENS

    weights = sum(parameter.numel() for parameter in pair.dense.parameters())
    wanted = 16 if options.device == "cpu" and weights > _QUICK else 64
    positions = getattr(pair.dense.config, "max_position_embeddings", None)
    return wanted if positions is None else min(wanted, positions - options.prompt_length - FIRST_TOKENS)


def _require_positions(options: InferenceOptions, positions: int, whose: str) -> None:
    """Refuse sequences and generations that are longer than a model has positions."""
    from ..measure.inference import FIRST_TOKENS

    longest = max((length for _, length in options.shapes), default=0)
    if "forward" in options.workloads and longest > positions:
        reject("shape", f"sequences of {longest} tokens", f"at most {positions}, {whose} positions")
    prompt, new = options.prompt_length, options.new_tokens or 1
    if "generation" in options.workloads and prompt + FIRST_TOKENS + new > positions:
        reject(
            "prompt_length, new_tokens",
            f"{prompt} and {new}",
            f"together at most {positions - FIRST_TOKENS}: {whose} {positions} positions less {FIRST_TOKENS} "
            "first tokens, which are not timed; or --workload forward",
        )


def _by_layer(say: Say) -> Callable[[str], None]:
    """Says which layer is being built, while "building the models" goes on."""
    return lambda text: say(f"{PART}{text}")


def _built(options: InferenceOptions, say: Say):
    size = preset_size(options.preset, layers=options.layers, nnz=options.nnz)
    _require_positions(options, size.positions, "the preset's")
    dtype = DTYPES[options.dtype]
    # Two models; the float32 one that logits are compared with is left out where it does not fit.
    require_room(size, bytes_per_parameter=2 * dtype.itemsize, device=options.device, name=options.preset)
    device, seed = options.device, options.seed
    pair = build_pair(size, dtype=dtype, device=device, seed=seed, say=_by_layer(say))

    def tokens(batch: int, length: int) -> tuple[Tensor, str]:
        generator = torch.Generator("cpu").manual_seed(options.seed)
        ids = torch.randint(size.vocabulary, (batch, length), generator=generator)
        return ids.to(options.device), "random tokens"

    return pair, tokens


def _loaded(options: InferenceOptions):
    from ..evaluation import check_ids, load_model, require_sparse_blocks, text_windows
    from ..train.data.sources import documents

    source = text_source(options.text)
    sparse, tokenizer = load_model(options.model, dtype=options.dtype, device=options.device)
    require_sparse_blocks(sparse)
    positions = getattr(sparse.config, "max_position_embeddings", None)
    if positions is not None:
        _require_positions(options, positions, "the model's")
    pair = ModelPair(_stock_twin(sparse), sparse)

    def tokens(batch: int, length: int) -> tuple[Tensor, str]:
        windows = text_windows(sparse, tokenizer, documents(source), length)
        whole: list[list[int]] = []
        read = 0
        for window in windows:
            read += len(window)
            if len(window) == length:
                whole.append(window)
            if len(whole) == batch:
                break
        if not whole:
            reject("text", f"{read} tokens", f"at least {length}, one sequence; or a shorter --shape")
        origin = "text" if len(whole) == batch else f"text, {len(whole)} sequences repeated"
        ids = torch.tensor([whole[place % len(whole)] for place in range(batch)])
        check_ids(ids, sparse)
        return ids.to(options.device), origin

    return pair, tokens


def _stock_twin(sparse: torch.nn.Module) -> torch.nn.Module:
    """The same weights in transformers' own class."""
    from ..hf import to_stock
    from ..hf.families import FAMILIES
    from ..sparsify import densify_

    if type(sparse) in {family.sparse_class for family in FAMILIES.values()}:
        return to_stock(sparse).eval()
    dense = copy.deepcopy(sparse)
    densify_(dense)
    return dense.eval()


def layers_job(options: TrainingOptions, emit: Emit, say: Say) -> None:
    """Emits how many layers fit."""
    from ..measure.training import layers_that_fit

    case = _case(options)
    setting = Setting(device=torch.device(options.device), rounds=1, say=say)
    found = layers_that_fit(case, setting)
    emit(
        Measured(
            workload="layers", contender="layers", meaning="", shape={}, tokens=1, details={"layers": found}
        )
    )


def training_job(options: TrainingOptions, emit: Emit, say: Say) -> None:
    from ..measure.training import batch_result, bench_training, largest_micro_batch

    setting = _setting(options, emit, say)
    case = _case(options)
    require_room(case.size, bytes_per_parameter=case.bytes_per_parameter, device=case.device, name=case.name)
    say("building the models")
    trained = case.build(_by_layer(say))
    for checkpointing in options.checkpointing:
        bench_training(trained, checkpointing, list(options.contenders), setting)
    del trained
    setting.release()
    if not options.search:
        return
    for checkpointing in options.checkpointing:
        for one in options.contenders:
            if one.endswith("eager"):  # compiled steps would compile again for every size
                found = largest_micro_batch(case, one, checkpointing, setting, options.memory)
                setting.emit(batch_result(case, one, checkpointing, found, options.memory))


def _case(options: TrainingOptions):
    from ..measure.training import TrainingCase

    size = preset_size(options.preset, layers=options.layers, nnz=options.nnz)
    return TrainingCase(
        size=size,
        name=options.preset,
        batch=options.batch,
        sequence=options.sequence,
        precision=options.precision,
        device=torch.device(options.device),
        seed=options.seed,
    )


def of_process(options: Common, process: int) -> Common:
    """Each process has weights and tokens of its own."""
    return replace(options, seed=options.seed + process)
