"""The paper's experiments as data: experiment -> runs, each a preset of `twell train` with settings on top.

A run keeps its name over all scales. Names carry the paper's lambda: short runs need a larger one, so each
scale multiplies it by its own factor. Experiments share runs, and a run that several name is trained once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .._errors import reject
from ..train.config import RunConfig
from ..train.presets import PAPER_CORPUS, preset
from ..train.settings import run_config, with_overrides

LAMBDAS = (0.0, 6e-6, 1e-5, 1.5e-5, 2e-5, 3e-5, 6e-5, 1e-4)
"""The paper's sweep."""

RECOMMENDED = 2e-5
DENSE, SPARSE = "lambda-0", "lambda-2e-5"
"""The two runs that most experiments compare with: ReLU alone, and the recommended lambda."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training run.

    title:   what makes it different, in plain words.
    l1:      the paper's lambda; None for a model without zeros.
    preset:  the scale's own where None.
    settings:  key=value, on top of the preset and of the scale's settings.
    """

    title: str
    l1: float | None = RECOMMENDED
    preset: str | None = None
    settings: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """What is asked, and the runs that answer. reference: the run that losses are compared with."""

    title: str
    runs: tuple[str, ...]
    reference: str = DENSE


@dataclass(frozen=True, kw_only=True)
class Scale:
    """All experiments at one size.

    takes:      time and machine, in plain words.
    l1_factor:  times the paper's lambdas.
    settings:   of every run, on top of the preset.
    layers:     the paper's model -> layers of ours beside it; empty where presets have the paper's sizes.
    text:       where text comes from; None: the user has to say.
    lambdas:    of the sweep.
    non_gated:  neurons of a non-gated block with as many weights as the gated one.
    ramp, revive_every:  steps over which lambda rises, and between revivals.
    tasks:      lm-eval's tasks to run on every trained model.
    speed:      sequences and tokens per sequence of timed calls.
    """

    takes: str
    preset: str
    l1_factor: float
    non_gated: int
    ramp: int
    revive_every: int
    speed: tuple[int, int]
    layers: dict[str, int] = field(default_factory=dict)
    settings: tuple[str, ...] = ()
    text: str | None = None
    lambdas: tuple[float, ...] = LAMBDAS
    tasks: tuple[str, ...] = ()

    def l1(self, paper: float) -> float:
        """Our lambda for one of the paper's."""
        return float(f"{paper * self.l1_factor:.6g}")  # 6e-4, and not 6.000000000000001e-4

    def speed_shape(self, config: RunConfig) -> tuple[int, int]:
        """Sequences and tokens per sequence of timed calls: no longer than what the model has learnt on."""
        sequences, length = self.speed
        return sequences, min(length, config.data.sequence_length)


SCALES = {
    "tiny": Scale(
        takes="about 12 minutes on two CPU cores",
        preset="tiny",
        # 120 steps see 123 thousand tokens, the paper's 31 billion: at 2e-5 nothing would happen.
        l1_factor=100,
        non_gated=2304,
        ramp=60,
        revive_every=20,
        speed=(8, 128),
        layers={"0.5b": 1, "1.5b": 2, "2b": 3},
        settings=(
            "train.steps=120",
            "train.batch=8",
            "train.warmup=12",
            "train.eval_every=0",
            "train.save_every=40",
            "train.log_every=10",
            "recipe.l1_start=0",
            "recipe.l1_end=0",
        ),
        text="python",
        lambdas=(0.0, 6e-6, 1e-5, 2e-5, 3e-5, 1e-4),
    ),
    "small": Scale(
        takes="about 13 minutes on one H200",
        preset="small",
        l1_factor=30,
        non_gated=8448,
        ramp=120,
        revive_every=40,
        speed=(16, 1024),
        layers={"0.5b": 2, "1.5b": 4, "2b": 8},
        # The paper's width and fewer layers: what a block gains depends on its width.
        settings=(
            "model.hidden_size=2048",
            "model.intermediate_size=5632",
            "model.heads=32",
            "data.sequence_length=1024",
            "data.held_out_tokens=200000",
            "train.steps=240",
            "train.batch=16",
            "train.lr=6e-4",
            "train.warmup=24",
            "train.eval_every=0",
            "train.save_every=0",  # a checkpoint takes as long as 80 steps; a run less than a minute
            "train.log_every=10",
            "train.workers=2",
            "recipe.l1_start=0",
            "recipe.l1_end=0",
        ),
        lambdas=(0.0, 6e-6, 1e-5, 2e-5, 3e-5, 6e-5, 1e-4),
    ),
    "paper": Scale(
        takes="days on a cluster: 19 runs of 0.5B to 2B parameters, 10 to 42 billion tokens each",
        preset="paper-1.5b",
        l1_factor=1,
        non_gated=8448,
        ramp=3000,
        revive_every=500,
        speed=(16, 2048),
        text=PAPER_CORPUS,
        tasks=("paper",),
    ),
}

BASE_MODEL = "1.5b"
_PAPER_MODELS = ("0.5b", "1b", BASE_MODEL, "2b")


def short(l1: float) -> str:
    """2e-5, and not 2e-05 or 0.00002."""
    return f"{l1:.1e}".replace(".0e", "e").replace("e-0", "e-") if l1 else "0"


def run_name(l1: float, model: str = BASE_MODEL) -> str:
    """A run of the sweep, or the same of a smaller or larger model."""
    return f"lambda-{short(l1)}" if model == BASE_MODEL else f"{model}-lambda-{short(l1)}"


def runs_of(scale: Scale) -> dict[str, Run]:
    """name -> every run of a scale."""
    layers = () if not scale.layers else (f"model.layers={scale.layers[BASE_MODEL]}",)
    found = {
        run_name(l1): Run(title=f"ReLU, lambda {short(scale.l1(l1))}", l1=l1, settings=layers)
        for l1 in scale.lambdas
    }
    for model in _models(scale):
        for l1 in (0.0, RECOMMENDED):
            words = f"{model.upper()}, lambda {short(scale.l1(l1))}"
            sized = {"preset": f"paper-{model}"}
            if scale.layers:
                count = scale.layers[model]
                words = f"{count} layer{'s' if count > 1 else ''}, lambda {short(scale.l1(l1))}"
                sized = {"settings": (f"model.layers={count}",)}
            found.setdefault(run_name(l1, model), Run(title=words, l1=l1, **sized))
    plain = (*layers, "model.gated=false", f"model.intermediate_size={scale.non_gated}")
    ours = short(scale.l1(RECOMMENDED))
    return found | {
        "silu": Run(title="SiLU, dense", l1=None, settings=(*layers, "model.activation=silu")),
        "non-gated-lambda-0": Run(title="non-gated, lambda 0", l1=0.0, settings=plain),
        "non-gated-lambda-2e-5": Run(title=f"non-gated, lambda {ours}", settings=plain),
        "ramp": Run(
            title=f"lambda rises over {scale.ramp} steps",
            settings=(*layers, f"recipe.l1_end={scale.ramp}"),
        ),
        "revival": Run(
            title=f"dead neurons revived every {scale.revive_every} steps",
            settings=(*layers, f"recipe.revive_every={scale.revive_every}"),
        ),
    }


def experiments_of(scale: Scale) -> dict[str, Experiment]:
    """name -> every experiment of a scale."""
    sizes = tuple(run_name(l1, model) for model in _models(scale) for l1 in (0.0, RECOMMENDED))
    return {
        "lambda": Experiment(
            title="Lambda: what the penalty costs and brings", runs=tuple(map(run_name, scale.lambdas))
        ),
        "sizes": Experiment(title="Model size: do larger models gain more?", runs=sizes),
        "activation": Experiment(title="ReLU against SiLU, both dense", runs=("silu", DENSE)),
        "gate": Experiment(
            title="Gated against non-gated blocks",
            runs=(DENSE, SPARSE, "non-gated-lambda-0", "non-gated-lambda-2e-5"),
        ),
        "dead": Experiment(title="Care for dead neurons", runs=(SPARSE, "ramp", "revival"), reference=SPARSE),
    }


def _models(scale: Scale) -> Sequence[str]:
    return tuple(scale.layers) or _PAPER_MODELS


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to do: the chosen experiments, and each of their runs once with its settings."""

    scale: str
    experiments: dict[str, Experiment]
    runs: dict[str, Run]
    configs: dict[str, RunConfig]


def plan(
    scale: str, experiments: Sequence[str] = (), *, text: str | None = None, overrides: Sequence[str] = ()
) -> Plan:
    """The runs of a scale, in the order in which they should be trained.

    experiments:  names; all where empty.
    text:         data.source of every run; None: the scale's own.
    overrides:    settings of every run, on top of everything else.
    """
    if scale not in SCALES:
        reject("scale", repr(scale), " | ".join(SCALES))
    chosen = SCALES[scale]
    known = experiments_of(chosen)
    for name in experiments:
        if name not in known:
            reject("experiments", repr(name), ", ".join(known))
    source = text or chosen.text
    if source is None:
        accepted = "--text FILE, a folder, 'python' or hf:NAME: what to train on"
        reject("text", "none", f"{accepted}; 20 MB or more")
    wanted = {name: known[name] for name in known if name in experiments or not experiments}
    every = runs_of(chosen)
    names = dict.fromkeys(name for one in wanted.values() for name in one.runs)
    runs = {name: every[name] for name in names}
    return Plan(
        scale=scale,
        experiments=wanted,
        runs=runs,
        configs={name: _config(chosen, run, source, overrides) for name, run in runs.items()},
    )


def _config(scale: Scale, run: Run, source: str, overrides: Sequence[str]) -> RunConfig:
    l1 = 0.0 if run.l1 is None else scale.l1(run.l1)
    own: tuple[Any, ...] = (*scale.settings, f"recipe.l1={l1!r}", *run.settings, *overrides)
    settings = with_overrides(preset(run.preset or scale.preset), own)
    settings["data"]["source"] = source  # not parsed: a path may hold anything
    return run_config(settings)
