"""Whole models at inference: a forward pass over a batch of sequences, and generation."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter

import torch
from torch import Tensor, nn

from .. import reference
from .._errors import reject
from .._numbers import counted
from .baselines import compile_layers, dense_ways, many_compilations, quiet_autotuning
from .contest import Contender, Setting, Workload, doubt, largest_that_fits, ready, run_contest
from .models import ModelPair, active_by_layer, free_bytes, shared_twin, tensor_bytes
from .processes import NOTE
from .timing import compare, order_of_round

FORWARD = {
    "dense-eager": "stock transformers Llama with ReLU, as PyTorch runs it",
    "dense-compiled": "stock Llama, every layer compiled by torch.compile",
    "best-dense": "the fastest of three other dense ways",
    "ours-eager": "our model, same weights, automatic plan",
    "ours-compiled": "our model, every layer compiled by torch.compile",
}
GENERATION = {
    "dense-eager": "stock Llama, transformers' own loop, default cache",
    "dense-captured": "stock Llama in our generation engine (`accelerate_`)",
    "ours-captured": "our model in our generation engine",
}
_GENERATION_ON_A_CPU = {  # where nothing is captured
    "dense-eager": GENERATION["dense-eager"],
    "ours-eager": "our model, transformers' own loop, default cache",
}
CONTENDERS = list(dict.fromkeys([*FORWARD, *GENERATION]))
_COMPARED = 128  # last positions of the compared sequences
_COMPARED_SEQUENCES = 2
FIRST_TOKENS = 16  # new tokens that do not count: a step is captured meanwhile
# Errors beyond this many times dense eager's are no rounding; one block left out makes 4.6 times and more.
_DOUBTFUL, _ROUNDED = 3.0, 1e-5
_LOOKED_AT = 8192  # tokens whose active neurons are counted


def generation_contenders(device: torch.device) -> dict[str, str]:
    """name -> meaning."""
    return GENERATION if device.type == "cuda" else _GENERATION_ON_A_CPU


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Token ids [B, S] on the device. origin: where they come from, for the reader."""

    ids: Tensor
    origin: str


def described(pair: ModelPair, name: str, **more: int | str | bool) -> dict[str, int | str | bool]:
    """The shape entries that all workloads of a model share."""
    config = pair.dense.config
    return {
        "model": name,
        "layers": config.num_hidden_layers,
        "D": config.hidden_size,
        "H": getattr(config, "intermediate_size", 0) or 4 * config.hidden_size,
        "vocabulary": config.vocab_size,
        "dtype": str(pair.dense.dtype).removeprefix("torch."),
        **more,
    }


def sparsity_of(pair: ModelPair, ids: Tensor) -> dict[str, float]:
    """Active neurons per token: mean over layers, least and most active layer, on some of `ids`; and how many
    a built model was to have."""
    some = ids[: max(_LOOKED_AT // ids.shape[1], 1), :_LOOKED_AT]
    by_layer = active_by_layer(pair.sparse, some)
    if not by_layer:
        reject("model", "no block of ours with plain weights", "a model with exact zeros, not quantised")
    found = {"nnz": sum(by_layer) / len(by_layer), "nnz_least": min(by_layer), "nnz_most": max(by_layer)}
    return found if pair.wanted_nnz is None else {**found, "wanted_nnz": pair.wanted_nnz}


def bench_forward(
    pair: ModelPair,
    name: str,
    batch: Batch,
    contenders: list[str],
    setting: Setting,
    *,
    calibrated: bool,
) -> None:
    """Compare forward passes over `batch` that end with the logits of each sequence's next token.

    calibrated: whether the pair comes from `build_pair`.
    """
    ids = batch.ids
    sequences, length = ids.shape
    setting.say("counting active neurons")
    workload = Workload(
        name="forward",
        title=f"forward, {sequences} x {length} tokens",
        shape=described(pair, name, batch=sequences, sequence=length, text=batch.origin),
        tokens=ids.numel(),
        sparsity=sparsity_of(pair, ids),
    )

    def run(model: nn.Module, ids: Tensor = ids, keep: int = 1) -> Tensor:
        with torch.no_grad():
            return _logits(model, ids, keep)

    def what_fits(model: nn.Module) -> Callable[[], str]:
        return lambda: fitting_batch(lambda n: run(model, ids[:n]), sequences, length, setting)

    makers: dict[str, Callable[[], nn.Module]] = {
        "dense-eager": lambda: pair.dense,
        "dense-compiled": lambda: compile_layers(shared_twin(pair.dense)),
        "ours-eager": lambda: pair.sparse,
        "ours-compiled": lambda: compile_layers(shared_twin(pair.sparse)),
    }
    running: list[Contender] = []
    models: dict[str, nn.Module] = {}
    with many_compilations(), quiet_autotuning("best-dense" in contenders):
        for number, one in enumerate(contenders, 1):
            place = f"{number} of {len(contenders)}"
            if one == "best-dense":
                found = _best_dense(pair, run, setting, calibrated)
                if isinstance(found, str):
                    contender = Contender(name=one, meaning=FORWARD[one], call=lambda: None, failure=found)
                else:
                    contender, models[one] = found
            else:
                model = models[one] = makers[one]()
                contender = Contender(
                    name=one,
                    meaning=FORWARD[one],
                    call=lambda model=model: run(model),
                    own_bytes=tensor_bytes(model),
                    warm_up=6 if one.startswith("ours") else 3,
                    sparse=one.startswith("ours"),
                )
                eager = pair.sparse if contender.sparse else pair.dense
                ready(contender, setting, what_fits(eager), place=place)
            running.append(contender)
        if any(one.failure is None for one in running):
            setting.say(f"{workload.title}: comparing logits")
            _compare_logits(running, models, pair, ids, run, setting)
        run_contest(running, workload, setting)
    models.clear()
    setting.release()


def _logits(model: nn.Module, ids: Tensor, keep: int) -> Tensor:
    """[B, keep, V] of the last positions; of all where the model has no such option."""
    if "logits_to_keep" in inspect.signature(type(model).forward).parameters:
        return model(ids, use_cache=False, logits_to_keep=keep).logits
    return model(ids, use_cache=False).logits[:, -keep:]


def fitting_batch(call: Callable[[int], object], sequences: int, length: int, setting: Setting) -> str:
    def fits(count: int) -> bool:
        def attempt() -> bool:
            call(count)
            setting.wait()
            return True

        return bool(setting.unless_memory_runs_out(attempt))

    found = 0
    if sequences > 1:
        found = largest_that_fits(
            fits,
            max(sequences // 2, 1),
            sequences - 1,
            say=lambda text: setting.say(f"how many sequences fit: {text}"),
        )
    return f"{found} x {length} tokens would fit" if found else f"not even 1 x {length} tokens fit"


def _best_dense(
    pair: ModelPair, run: Callable[[nn.Module], Tensor], setting: Setting, calibrated: bool
) -> tuple[Contender, nn.Module] | str:
    """The fastest of the dense ways, warmed up; says which. A string: why there is none."""
    candidates: dict[str, tuple[Contender, nn.Module]] = {}
    failures: dict[str, str] = {}
    ways = dense_ways(pair.dense, pair.sparse, all_active=calibrated)
    for number, (name, way) in enumerate(ways.items(), 1):
        model, failure = setting.attempted(way.build)
        if failure is not None:
            setting.say(f"{NOTE}best dense: {name}: {failure}")
            failures[name] = failure
            continue
        contender = Contender(
            name="best-dense",
            meaning=f"{name}: {way.meaning}",
            call=lambda model=model: run(model),
            own_bytes=tensor_bytes(model),
            warm_up=5,
        )
        if ready(contender, setting, place=f"{name}, way {number} of {len(ways)}"):
            candidates[name] = contender, model
        else:
            failures[name] = contender.failure
    if not candidates:
        return "; ".join(f"{name}: {failure}" for name, failure in failures.items())
    calls = {way: contender.call for way, (contender, _) in candidates.items()}
    timings = setting.unless_memory_runs_out(
        lambda: compare(calls, device=setting.device, warmup=0, repetitions=4, calls_per_sample=1)
    )
    if timings is None:
        return "out of memory while the dense ways took turns"
    best = min(timings, key=lambda way: timings[way].median)
    times = ", ".join(f"{way} {timing.median * 1e3:.1f} ms" for way, timing in timings.items())
    setting.say(f"{NOTE}best dense is {best} ({times})")
    contender, model = candidates[best]
    for way, timing in timings.items():
        contender.details[f"way_seconds/{way}"] = timing.median
    return contender, model


def _compare_logits(
    running: list[Contender],
    models: dict[str, nn.Module],
    pair: ModelPair,
    ids: Tensor,
    run: Callable[..., Tensor],
    setting: Setting,
) -> None:
    """Each contender's logits against those of the stock model in float32 (of float32: float64), on the last
    positions of some sequences, from a call of the timed shape; where that does not fit, dense eager's.

    Logits of many positions take more memory than the timed call: where it is short, one position will do.
    """
    alive = [one for one in running if one.failure is None and "all neurons active" not in one.meaning]
    for keep in dict.fromkeys((min(_COMPARED, ids.shape[1]), 1)):
        compared = setting.unless_memory_runs_out(
            lambda keep=keep: _compare_positions(alive, models, pair, ids, run, setting, keep)
        )
        if compared:
            return
    setting.say(f"{NOTE}logits are not compared: that does not fit")


@torch.no_grad()
def _compare_positions(
    alive: list[Contender],
    models: dict[str, nn.Module],
    pair: ModelPair,
    ids: Tensor,
    run: Callable[..., Tensor],
    setting: Setting,
    keep: int,
) -> bool:
    some = slice(_COMPARED_SEQUENCES)
    exact = _wider_logits(pair.dense, ids[some], keep, setting)
    wide = exact is not None
    if exact is None:
        exact = run(pair.dense, ids[some], keep).float()
    dense_runs = any(one.name == "dense-eager" for one in alive)
    stock = run(pair.dense, ids if dense_runs else ids[some], keep)[some].float()
    for one in alive:
        found = stock if one.name == "dense-eager" else run(models[one.name], ids, keep)[some].float()
        one.error = reference.relative_error(found, exact)
        one.details |= {
            "against_float32": int(wide),
            "largest_difference": ((found - exact).abs().max() / exact.abs().max()).item(),
            "same_tokens": (found.argmax(-1) == exact.argmax(-1)).float().mean().item(),
            "same_tokens_as_dense": (found.argmax(-1) == stock.argmax(-1)).float().mean().item(),
        }
        if wide:
            most = max(_DOUBTFUL * reference.relative_error(stock, exact), _ROUNDED)
            doubt(one, "logits", one.error, most, setting)
    return True


def _wider_logits(dense: nn.Module, ids: Tensor, keep: int, setting: Setting) -> Tensor | None:
    wider = torch.float64 if dense.dtype == torch.float32 else torch.float32
    free = free_bytes(setting.device)
    if free is not None and free < 1.5 * wider.itemsize * sum(p.numel() for p in dense.parameters()):
        return None
    return setting.unless_memory_runs_out(lambda: _logits(copy.deepcopy(dense).to(wider), ids, keep))


def bench_generation(
    pair: ModelPair,
    name: str,
    batch: Batch,
    new_tokens: int,
    contenders: list[str],
    setting: Setting,
) -> None:
    """Compare greedy generation after the prompts `batch`: seconds for a token of every sequence.

    The time of 16 tokens is taken off that of 16 + `new_tokens`, so prompts do not count; energy is that of
    whole calls. Rounds in which nothing is left, since times vary by more, are taken again (`noisy_rounds`).
    """
    from ..generation import accelerate_

    ids = batch.ids
    sequences, prompt = ids.shape
    setting.say("counting active neurons")
    workload = Workload(
        name="generation",
        title=f"generation, {counted(sequences, 'sequence')}",
        shape=described(pair, name, batch=sequences, prompt=prompt, new_tokens=new_tokens, text=batch.origin),
        tokens=sequences,
        steps=FIRST_TOKENS + new_tokens,
        sparsity=sparsity_of(pair, ids),
    )
    meanings = generation_contenders(setting.device)
    makers: dict[str, Callable[[], nn.Module]] = {
        "dense-eager": lambda: pair.dense,
        "ours-eager": lambda: pair.sparse,
        "dense-captured": lambda: accelerate_(shared_twin(pair.dense)),
        "ours-captured": lambda: accelerate_(pair.sparse),
    }
    models = {one: makers[one]() for one in contenders}

    def what_fits(model: nn.Module) -> Callable[[], str]:
        def generate(count: int) -> None:
            with torch.no_grad():
                model.generate(
                    ids[:count],
                    max_new_tokens=FIRST_TOKENS + new_tokens,
                    do_sample=False,
                    eos_token_id=[],
                    pad_token_id=0,
                )

        return lambda: fitting_batch(generate, sequences, prompt, setting)

    def run(model: nn.Module, tokens: int) -> Tensor:
        with torch.no_grad():
            return model.generate(
                ids, max_new_tokens=tokens, do_sample=False, eos_token_id=[], pad_token_id=0
            )

    found: dict[str, Tensor] = {}  # what the last call of each has generated

    def whole_call(name: str) -> None:
        found[name] = run(models[name], FIRST_TOKENS + new_tokens)

    outputs: dict[str, Tensor] = {}
    running = []
    for number, (one, model) in enumerate(models.items(), 1):
        contender = Contender(
            name=one,
            meaning=meanings[one],
            call=partial(whole_call, one),
            own_bytes=tensor_bytes(model),
            warm_up=2,
            sparse=one.startswith("ours"),
            sparse_tokens=sequences,
        )
        if ready(contender, setting, what_fits(model), place=f"{number} of {len(models)}"):
            outputs[one] = found[one]
        running.append(contender)
    stock = next((outputs[name] for name in outputs if name.startswith("dense")), None)
    for one in running:
        if one.name in outputs and stock is not None:
            same = (outputs[one.name] == stock)[:, prompt:].double()
            one.details["same_tokens_as_dense"] = same.mean().item()
            one.details["same_until"] = same.cumprod(1).sum(1).mean().item()

    def seconds(model: nn.Module, tokens: int) -> float:
        setting.wait()
        began = perf_counter()
        run(model, tokens)
        setting.wait()
        return perf_counter() - began

    def take_round(running: Sequence[Contender], turn: int) -> dict[str, float] | None:
        if turn == 0:  # the short call may need a step of its own, whose capture is not to count
            for one in running:
                run(models[one.name], FIRST_TOKENS)
        taken = {}
        for one in order_of_round(running, turn):
            setting.say(f"{workload.title}: round {turn + 1}, {one.name}")
            long, short = (seconds(models[one.name], FIRST_TOKENS + more) for more in (new_tokens, 0))
            taken[one.name] = (long - short) / new_tokens
        return taken if min(taken.values()) > 0 else None

    # On a CPU, memory is counted by a profiler, which takes minutes for so many small operations.
    memory = setting.memory and setting.device.type == "cuda"
    run_contest(running, workload, replace(setting, memory=memory), take_round)
    setting.release()
