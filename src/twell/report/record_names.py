"""The names of records in plain words, and which of them compare like with like."""

from __future__ import annotations

from collections.abc import Collection

from .._interval import ENOUGH_ROUNDS
from ..measure.records import Record

_STEP = ("model", "layers", "sequence", "precision", "checkpointing")
# Workloads of `twell bench`, and what the shapes of their records say: titles and commands are made of it.
_BENCHES = {
    "bench_inference/forward": ("model", "layers", "dtype", "batch", "sequence"),
    "bench_inference/generation": ("model", "layers", "dtype", "batch", "prompt", "new_tokens"),
    "bench_training/step": ("batch", *_STEP),
    "bench_training/checkpointed": ("batch", *_STEP),
    "bench_training/micro-batch": _STEP,
}
_KINDS = {"model": str, "dtype": str, "precision": str, "checkpointing": bool}  # others are whole numbers
_SIZES = ("D", "H", "vocabulary")  # shown where they are known
_COUNTS = ("tokens", "processes", "rounds")
_MOST = 1 << 53

# Whole models, besides what `twell bench` compares; both sides run the same model on the same tokens.
_MODELS = {
    "generation/captured": "A generated token",
    "generation/text": "A generated token of a trained model",
    "sparsified/eager": "A forward pass of {model}, sparsified, eager",
    "sparsified/prefill": "A forward pass of {model}, sparsified, layers compiled",
    "defaults/prefill/auto": "A forward pass of a Llama, defaults only",
    "defaults/generate/auto": "A generated token, defaults only",
    "defaults/checkpointed/auto": "A checkpointed training step, defaults only",
}
# One feed-forward block as users get it. Named paths, parts of a block and time of the host stay tables.
_BLOCKS = {
    "ffn_inference/prefill/auto": "A feed-forward block at prefill",
    "ffn_inference/decode/auto": "A feed-forward block at decode",
    "ffn_training/total/auto": "A training step of a feed-forward block",
    "ffn_cpu/auto": "A feed-forward block on a CPU",
}
_WORKLOADS = {
    "forward": "A forward pass",
    "generation": "Generation",
    "step": "A training step",
    "checkpointed": "A training step with checkpointing",
}
FAMILIES = {
    "ffn_inference": "Feed-forward blocks, inference",
    "ffn_training": "Feed-forward blocks, training",
    "ffn_cpu": "Feed-forward blocks on a CPU",
    "generation": "Generation",
    "sparsified": "Stock models after `sparsify_`",
    "defaults": "Defaults, without tuning",
    "format_memory": "Memory of the formats",
    "families": "Model families",
    "pruned_model": "Pruned models",
}


def is_bench(record: Record) -> bool:
    """Whether it comes from `twell bench`."""
    return record.what.rpartition("/")[0] in _BENCHES


def broken(record: Record) -> list[str]:
    """Entries of a record of `twell bench` that are missing or no such value, as in one that was edited."""
    needed = _BENCHES.get(record.what.rpartition("/")[0])
    if needed is None:
        return []
    shape, nnz = record.shape, ("nnz_least", "nnz_most")
    found = [name for name in needed if name not in shape]
    found += [name for name in (*needed, *_SIZES) if name in shape and not _fits(name, shape[name])]
    found += [name for name in _COUNTS if not 0 <= record.details.get(name, 0) <= _MOST]
    if any(name in record.sparsity for name in nnz):
        found += [name for name in nnz if name not in record.sparsity]
    return found


def _fits(name: str, value: object) -> bool:
    if name in _KINDS:
        return isinstance(value, _KINDS[name])
    return isinstance(value, int) and not isinstance(value, bool)


def is_whole_model(record: Record) -> bool:
    """Ours against dense, same model and tokens."""
    if is_bench(record):
        return record.what.rsplit("/", 1)[-1].startswith("ours")
    return record.what in _MODELS


def is_real(record: Record) -> bool:
    """Whether the model was trained and read text, instead of being built to be sparse."""
    if is_bench(record):
        return record.shape.get("text", "random tokens") != "random tokens"
    return record.what == "generation/text"


def ran_dense(record: Record) -> bool:
    """Whether all calls of ours ran dense, so that no gain of it comes from sparsity."""
    return record.details.get("sparse_share") == 0


def is_block(record: Record) -> bool:
    """16-bit blocks on a CPU do not count: without 16-bit units most of their gain is arithmetic."""
    on_cpu = record.hardware.get("device") == "cpu"
    return record.what in _BLOCKS and not (on_cpu and record.shape.get("dtype") != "float32")


def workload(record: Record) -> tuple:
    """Equal for contenders of `twell bench` that ran the same, on machines alike."""
    shape = sorted((name, value) for name, value in record.shape.items() if name != "meaning")
    nnz = record.sparsity.get("wanted_nnz", round(record.sparsity.get("nnz", 0)))
    place = record.hardware.get("gpu") or record.hardware.get("cpu")
    return record.what.rsplit("/", 1)[0], str(shape), nnz, place, record.hardware.get("torch_threads")


def comparison(record: Record) -> tuple:
    """Equal for contenders of `twell bench` that were compared with each other, in one run of it."""
    return *workload(record), record.date, record.commit


def rounds_of(record: Record) -> int | None:
    """Over all processes; None where nobody noted them."""
    if record.rounds:
        return sum(map(len, record.rounds))
    rounds = record.details.get("rounds")
    return None if rounds is None else round(rounds * record.details.get("processes", 1))


def rounds_together(record: Record, other: Record) -> int | None:
    """Rounds in which both ran; None where nobody noted them."""
    if record.rounds and other.rounds:
        return sum(
            min(len(ours), len(theirs)) for ours, theirs in zip(record.rounds, other.rounds, strict=False)
        )
    return rounds_of(record)


def says_as_much(rounds: int | None, others: int | None) -> bool:
    """Whether so many rounds can stand in for `others`; the rounds of an interrupted run cannot."""
    return rounds is None or others is None or rounds >= min(others, ENOUGH_ROUNDS)


def has_resampled_bounds(record: Record) -> bool:
    """Whether the bounds of its gains are quantiles of resampled medians, as in records without rounds."""
    return is_bench(record) and not record.rounds


def rivals(record: Record) -> dict[str, float]:
    """How many times faster it was, by dense contender beside it."""
    return {
        name.removeprefix("over/"): value
        for name, value in record.details.items()
        if name.startswith("over/") and not name.endswith(("/low", "/high"))
    }


def gain_over_fastest(
    record: Record, doubtful: Collection[str] = ()
) -> tuple[str, float | None, float, float]:
    """The baseline, the gain over it and its interval. Of several dense contenders: the fastest.

    Contenders of `twell bench` that never ran side by side have no gain.

    doubtful: dense contenders that compute something else, which say nothing.
    """
    beside = rivals(record)
    others = {name: gain for name, gain in beside.items() if name not in doubtful}
    if others:
        name = min(others, key=others.__getitem__)  # the smallest gain is over the fastest
        low, high = (record.details.get(f"over/{name}/{end}", others[name]) for end in ("low", "high"))
        return name, others[name], low, high
    ratio = None if beside or is_bench(record) else record.ratio
    return record.baseline or "", ratio, ratio or 0.0, ratio or 0.0


def contender(record: Record) -> str:
    return record.what.rsplit("/", 1)[-1].replace("-", " ")


def described(record: Record) -> str:
    """What was measured, as the subject of a sentence."""
    shape = record.shape
    if is_bench(record):
        what = _WORKLOADS.get(record.what.split("/")[1], record.what)
        return f"{what} of {model_name(record)} ({size_of(record)})"
    if record.what in _MODELS:
        text = _MODELS[record.what].format(model=shape.get("model", "a model"))
    else:
        text = _BLOCKS.get(record.what, record.what)
    return f"{text}, {shape['M']:,} tokens at once" if isinstance(shape.get("M"), int) else text


def model_name(record: Record) -> str:
    """Of a record of `twell bench`: a preset, or a folder's name, which is enough of its path."""
    name = str(record.shape.get("model", "a model")).rstrip("/").rsplit("/", 1)[-1]
    return name if is_real(record) else f"preset {name}"


def counted_on(record: Record) -> str:
    """Which tokens the active neurons of a record of `twell bench` are of; empty for other records.

    Prompts are short, and the first tokens of a sequence wake many more neurons than later ones.
    """
    if not is_bench(record):
        return ""
    return "of the prompts" if record.what.split("/")[1] == "generation" else "of this batch"


def size_of(record: Record) -> str:
    shape = record.shape
    if "new_tokens" in shape:
        return f"{shape['batch']} x {shape['new_tokens']} tokens after {shape['prompt']}"
    if "sequence" in shape:
        if "batch" not in shape:
            return f"sequences of {shape['sequence']} tokens"
        return f"{shape['batch']} x {shape['sequence']} tokens"
    return f"{shape['batch']} sequences" if "batch" in shape else ""
