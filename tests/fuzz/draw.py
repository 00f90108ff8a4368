"""Random cases: of the CPU's size and variety, and of a GPU's, where every kind costs compile time.

A case is drawn from (seed, index) alone. On a GPU Triton compiles a kernel for every dtype, activation, set
of biases, number of rows, divisibility by 16 and power of two of neurons, seconds each: such things come from
a pool of kinds that depends on the seed, and only the rest is drawn for every case.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from random import Random

from .case import NAMES, Case, consistent

KINDS = 16  # of a run on a GPU, of 5 to 20 kernels each
_VALUES = ("nan", "inf", "-inf", "-0.0", "subnormal", "huge")
_BIASES = ("up_bias", "down_bias", "gate_bias")


def draw(device: str, seed: int, index: int) -> Case:
    random = Random(f"twell {device} {seed} {index}")
    if device == "cpu":
        return _draw_cpu(random)
    return _draw_gpu(random, device, _kinds(device, seed)[index % KINDS])


def _draw_cpu(random: Random) -> Case:
    large = random.random() < 0.03
    tokens = _tokens(random, large)
    features = random.choice((1, 2, 3)) if random.random() < 0.1 else _between(random, 4, 96)
    neurons = _between(random, 8, 256)
    if large:
        features, neurons = random.choice((128, 129, 192, 256)), random.randrange(400, 1501)
    dtype = random.choices(("float32", "float64", "bfloat16", "float16"), (5, 2, 3, 2))[0]
    case = Case(
        features=features,
        neurons=neurons,
        dtype=dtype,
        plan=_cpu_plan(random),
        gated=random.random() < 0.6,
        activation=_activation(random),
        biases=tuple(name for name in _BIASES if random.random() < 0.35),
        sparse_backward=random.random() < 0.5,
        cpu=random.choice(("plain", "plain", "row", "block", "dense", "units")),
    )
    return _vary(random, case, tokens, random.random() < 0.5)


def _tokens(random: Random, large: bool) -> int:
    if large:
        return _between(random, 64, 600)
    return random.choice((0, 1, 1, 2, 3)) if random.random() < 0.3 else _between(random, 4, 80)


def _cpu_plan(random: Random) -> str | None:
    path = random.choice((None, None, "auto", "dense", "row", "row", "block", "block"))
    if path is None:
        return None
    rows = random.choice((0, 0, 1, 4, 7, 16, 64)) if path == "block" else 0
    backend = ",backend=cpu" if random.random() < 0.4 else ""
    return f"{path}{f',rows={rows}' if rows else ''}{backend}"


def _activation(random: Random) -> str:
    fatrelu = f"fatrelu({random.choice((0.0, 0.01, 0.25, 1.5))})"
    return random.choice(("relu", "relu", "relu2", fatrelu, "drelu"))  # drelu without a gate: relu


def _vary(random: Random, case: Case, tokens: int, trains: bool) -> Case:
    """`case` with all that costs no compile time."""
    values = {
        "seed": random.randrange(2**31),
        "leading": _leading(random, tokens),
        "outputs": case.features if random.random() < 0.7 else _other_size(random, case),
        "density": random.choice((0.0, 0.01, 0.05, 0.1, 0.3, 0.5, 0.9, 1.0)),
        "skewed": random.random() < 0.4,
        "specials": _specials(random, case),
        "layouts": _layouts(random),
        "entry": random.choice(("ffn", "ffn", "stats", "stats", "module")),
        "mode": random.choice(("grad", "grad", "grad", "no_grad", "inference")),
        "loss": random.choice(
            ("weighted", "weighted", "sum", "transposed", "weighted+l1", "weighted+l1", "l1")
        ),
        "calls": random.choice((0, 0, 0, 0, 1, 2)),
    }
    values["changed"] = values["calls"] > 0 and random.random() < 0.5
    trained: tuple[str, ...] = ()
    if case.device == "cpu" and case.dtype == "float32" and random.random() < 0.2:
        values["autocast"] = random.choice(("bfloat16", "bfloat16", "float16"))
    if trains:
        values["mode"], trained = "grad", case.trained or _subset(random)
    elif values["mode"] != "grad" and random.random() < 0.5:
        trained = _subset(random)  # of which nobody asks for gradients then
    if not trains:
        values["loss"] = "weighted"
    return consistent(replace(case, **values, trained=trained))


def _subset(random: Random) -> tuple[str, ...]:
    if random.random() < 0.4:
        return NAMES
    return tuple(name for name in NAMES if random.random() < 0.5) or (random.choice(NAMES[:3]),)


def _leading(random: Random, tokens: int) -> tuple[int, ...]:
    """1-D to 4-D x's with about so many tokens."""
    if tokens == 1 and random.random() < 0.3:
        return ()
    dimensions = random.choice((1, 1, 1, 2, 3))
    sizes = []
    for _ in range(dimensions - 1):
        sizes.append(random.choice((1, 2, 3)))
        tokens = -(-tokens // sizes[-1])
    sizes.append(tokens)
    random.shuffle(sizes)
    return tuple(sizes)


def _other_size(random: Random, case: Case) -> int:
    return _between(random, 1, 128) if case.device == "cpu" else case.features + 64


def _specials(random: Random, case: Case) -> tuple[tuple[str, str], ...]:
    if random.random() < 0.75:
        return ()
    return tuple((random.choice(NAMES), random.choice(_VALUES)) for _ in range(random.choice((1, 1, 2, 3))))


def _layouts(random: Random) -> tuple[tuple[str, str], ...]:
    found = []
    for name in NAMES[:4]:
        if random.random() < 0.4:
            kinds = ["transposed", "sliced", "offset"] + (["expanded"] if name == "x" else [])
            found.append((name, random.choice(["transposed"] if name == "down" else kinds)))
    if random.random() < 0.1:
        found.append(("down", random.choice(("sliced", "offset"))))
    return tuple(dict(found).items())


def _between(random: Random, low: int, high: int) -> int:
    """Small more often than large."""
    return min(high, int(low * (high / low) ** random.random() + random.random()))


@dataclass(frozen=True)
class _Kind:
    """What decides which kernels are compiled: a case to vary, the sizes and losses to draw from."""

    case: Case
    most_tokens: int
    features: tuple[int, ...]
    neurons: tuple[int, ...]
    losses: tuple[str, ...]


@lru_cache(maxsize=8)
def _kinds(device: str, seed: int) -> tuple[_Kind, ...]:
    random = Random(f"kinds {device} {seed}")
    return tuple(_draw_kind(random, device, number) for number in range(KINDS))


def _draw_kind(random: Random, device: str, number: int) -> _Kind:
    """In turn few tokens, the block path and training, so that every run has all of them."""
    small = device == "interpreted"
    trains = number % 2 == 0
    few = number % 4 == 1
    path = "row" if number % 8 == 3 else "block" if random.random() < 0.9 else "auto"
    dtypes = ("float16", "float32") if small else ("bfloat16", "bfloat16", "float16", "float32")
    rows = 0
    if path == "block" and not few:
        rows = random.choice((16, 32) if small else (0, 64, 128))
    backend = "interpreted" if small else "gpu"
    step = (8, 64)[number // 2 % 2]  # Hopper's kernels take whole steps of 64 features
    odd = 8 if random.random() < 0.25 else 0  # a multiple of 8 that is none of 16
    if small:
        features = tuple(size for size in range(8, 65, 8) if size % 16 == odd)
        neurons = tuple(size for size in range(16, 97, 8) if size % 16 == odd)
    else:
        # Kernels are compiled by powers of two.
        top = random.choice((256, 512, 1024, 2048))
        features = tuple(range(top // 2 + 64, top + 1, 64))
        if step == 8:
            features = tuple(size for size in range(top // 2 + 8, top, 8) if size % 16 == odd and size % 64)
        top = random.choice((512, 2048, 4096, 8192, 8192))
        neurons = tuple(size for size in range(top // 2 + 8, min(top, 6000) + 1, 8) if size % 16 == odd)
    case = Case(
        device=device,
        dtype=random.choice(dtypes),
        gated=random.random() < 0.7,
        activation=_activation(random),
        biases=tuple(name for name in _BIASES if random.random() < 0.3),
        plan=f"{path}{f',rows={rows}' if rows else ''},backend={backend}",
        trained=random.choice((NAMES, NAMES, _subset(random))) if trains else (),
    )
    features = tuple(random.sample(features, min(6, len(features))))
    losses = random.choice((("weighted", "sum", "transposed"), ("weighted+l1", "weighted+l1", "l1")))
    return _Kind(case, 40 if small else 64 if few else 4096, features, neurons, losses)


def _draw_gpu(random: Random, device: str, kind: _Kind) -> Case:
    tokens = 0 if random.random() < 0.01 else _between(random, 1, kind.most_tokens)
    if random.random() < 0.25:  # Hopper's forward wants many
        tokens = random.randrange(kind.most_tokens // 4, kind.most_tokens + 1)
    sizes = {"features": random.choice(kind.features), "neurons": random.choice(kind.neurons)}
    case = _vary(random, replace(kind.case, **sizes), tokens, bool(kind.case.trained))
    if case.trains:
        case = consistent(replace(case, loss=random.choice(kind.losses), trained=kind.case.trained))
    return case
