"""Sections of training runs: what came out, how they got there, and what lambda does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from .chart import COLOURS, Chart, Reference, Series
from .document import Block, Figure, Figures, Paragraph, Section, Table
from .inputs import Inputs, Profiled, Run
from .sweep import base_run, sweeps
from .wording import change, exponent, gigabytes, optional, share, short

_MOST_POINTS = 200  # of a curve: more cannot be seen


def run_sections(inputs: Inputs) -> Iterator[Section]:
    if inputs.runs:
        yield Section("Training runs", [_table(inputs.runs), Figures(_curves(inputs.runs))])
    for number, sweep in enumerate(sweeps(inputs.runs)):
        yield Section("Speed and loss over lambda", [*_sweep(sweep, inputs, f"lambda-{number}")])


def _table(runs: Sequence[Run]) -> Table:
    columns: dict[str, Callable[[Run], str]] = {
        "run": lambda run: run.name,
        "lambda": lambda run: "dense" if run.l1 is None else exponent(run.l1),
        "layers x H": lambda run: f"{run.config.model.layers} x {run.config.model.intermediate_size:,}",
        "tokens": lambda run: short(run.tokens),
        "held-out loss": lambda run: optional(run.held_out, ".4f"),
        "over lambda 0": lambda run: _over(run, runs),
        "training loss": lambda run: optional(run.last("ce_loss"), ".4f"),
        "active": lambda run: "" if run.nnz is None else short(run.nnz),
        "share": lambda run: "" if run.nnz is None else share(run.nnz / run.config.model.intermediate_size),
        "dead": lambda run: "" if run.dead is None else share(run.dead),
        "revived": lambda run: f"{run.last('revived'):,.0f}" if run.last("revived") else "",
        "tokens/s": lambda run: optional(run.late("tokens_per_second"), ",.0f"),
        "peak memory": lambda run: _memory(run),
        "state": lambda run: "" if run.summary else f"at step {run.last('step'):,.0f}",
    }
    cells = {title: [make(run) for run in runs] for title, make in columns.items()}
    shown = [title for title, column in cells.items() if any(column)]
    return Table(shown, list(zip(*(cells[title] for title in shown), strict=True)), caption=_legend(runs))


def _legend(runs: Sequence[Run]) -> str:
    parts = ["Loss: cross-entropy."]
    active = dict.fromkeys(run.nnz_text for run in runs if run.nnz is not None)
    dead = dict.fromkeys(run.dead_text for run in runs if run.dead is not None)
    if active:
        parts.append(f"Active: neurons per token and layer, on {' or '.join(active)}.")
    if dead:
        parts.append(f"Dead: silent in all of {' or '.join(dead)}.")
    parts.append(
        "Tokens/s and memory: medians of the second half of the logs. Runs that shared a machine cannot be "
        "compared by them."
    )
    return " ".join(parts)


def _over(run: Run, runs: Sequence[Run]) -> str:
    base = base_run(run, runs)
    if base is None or base is run or base.loss is None or run.loss is None:
        return ""
    return change(run.loss / base.loss)


def _memory(run: Run) -> str:
    found = run.late("peak_memory_bytes")
    return "" if found is None else gigabytes(found)


def _curves(runs: Sequence[Run]) -> list[Figure]:
    figures = []
    for key, title, scale in (
        ("ce_loss", "Cross-entropy", "linear"),
        ("nnz", "Active neurons per token", "log"),
        ("dead", "Dead neurons", "linear"),
        ("tokens_per_second", "Tokens per second", "linear"),
        ("peak_memory_bytes", "Peak memory", "linear"),
    ):
        series = []
        for number, run in enumerate(runs):
            points = [(line["tokens"], line[key]) for line in run.logs if line.get(key) is not None]
            if len(points) > 1:
                tone = number % COLOURS
                series.append(Series(run.name, _thinned(points), tone, dashed=number >= COLOURS))
            checks = [(line["tokens"], line["eval_loss"]) for line in run.evaluations]
            if key == "ce_loss" and checks:
                series.append(Series("", checks, number % COLOURS, line=False))
        if any(one.line for one in series) and any(y for one in series for _, y in one.points):
            text = {"dead": share, "peak_memory_bytes": gigabytes}.get(key, short)
            y_label = {"nnz": "neurons", "dead": "share of neurons", "tokens_per_second": "tokens/s"}.get(
                key, ""
            )
            caption = "Points: held-out text." if any(not one.line for one in series) else ""
            caption = _counted_on(key, runs) or caption
            chart = Chart(
                title,
                "training tokens",
                y_label or ("GiB" if "bytes" in key else "nats"),
                series,
                y_scale=scale,
                y_from_zero=key not in ("ce_loss", "nnz"),
                y_text=text,
            )
            figures.append(Figure(f"runs-{key}", chart, caption))
    layers = _by_layer(runs)
    return [*figures, layers] if layers else figures


def _counted_on(key: str, runs: Sequence[Run]) -> str:
    """Curves are of training text, the table beside them of held-out text: they differ."""
    if key == "nnz":
        return "On training text, between logs."
    if key != "dead":
        return ""
    windows = {line["dead_window"] for run in runs for line in run.logs if line.get("dead_window")}
    if not windows:
        return "On training text."
    least, most = min(windows), max(windows)
    span = f"{most:,}" if least == most else f"{least:,} to {most:,}"
    return f"Silent in the last {span} tokens of training text."


def _by_layer(runs: Sequence[Run]) -> Figure | None:
    series = [
        Series(run.name, list(enumerate(found)), number % COLOURS, marks=True, dashed=number >= COLOURS)
        for number, run in enumerate(runs)
        if len(found := run.by_layer("nnz")) > 1
    ]
    if not series:
        return None
    layers = max(len(one.points) for one in series)
    labels = [(place, str(place)) for place in range(layers)]
    chart = Chart("Active neurons by layer", "layer", "neurons", series, y_scale="log", x_labels=labels)
    texts = dict.fromkeys(run.by_layer_text("nnz") for run in runs if run.by_layer("nnz"))
    return Figure("runs-layers", chart, f"At the end of training, on {' or '.join(texts)}.")


def _thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    if len(points) <= _MOST_POINTS:
        return points
    last = len(points) - 1
    return [points[round(i * last / (_MOST_POINTS - 1))] for i in range(_MOST_POINTS)]


def _sweep(sweep: list[Run], inputs: Inputs, name: str) -> Iterator[Block]:
    sparse = [run for run in sweep if run.l1 is not None]
    dense = [run for run in sweep if run.l1 is None]
    values = sorted({run.l1 for run in sparse})
    labels = [(values.index(value), exponent(value)) for value in values]

    def chart(
        title: str, y_label: str, points: Sequence[tuple[Run, float | None]], caption: str = "", **options
    ) -> Figure | None:
        known = [(values.index(run.l1), value) for run, value in points if value is not None]
        if len(known) < 2:
            return None
        series = [Series("", known, 0, marks=True)]
        word = title.lower().split(",")[0].replace(" ", "-")
        drawing = Chart(title, "lambda", y_label, series, x_labels=labels, **options)
        return Figure(f"{name}-{word}", drawing, caption)

    held = all(run.held_out is not None for run in sparse)
    loss = "held-out cross-entropy" if held else "training cross-entropy"
    references = [Reference(run.loss, f"{run.config.model.activation}, dense") for run in dense if run.loss]
    figures = [
        chart("Loss", loss, [(run, run.loss) for run in sparse], references=references),
        chart("Active neurons", "neurons per token", [(run, run.nnz) for run in sparse], y_scale="log"),
        chart(
            "Dead neurons",
            "share of neurons",
            [(run, run.dead) for run in sparse],
            y_text=share,
            y_from_zero=True,
        ),
    ]
    gains = [(run, _block_gain(run, inputs.profiles)) for run in sparse]
    dense_line = [Reference(1, "dense")]
    figures.append(
        chart("Inference, blocks", "times as fast as dense", gains, references=dense_line, y_from_zero=True)
    )
    if not any(run.recorded for run in sparse):
        rates = [(run, run.late("tokens_per_second")) for run in sparse]
        note = "As each run logged it, one after the other: what else the machine did counts, too."
        figures.append(chart("Training, tokens per second", "tokens/s", rates, note, y_from_zero=True))
    yield Paragraph(
        f"{len(sparse)} runs that differ in lambda, the weight of the L1 penalty, and in nothing else. The "
        "paper recommends 2e-5 for its models, trained on 10 billion tokens or more; small models and short "
        "runs need larger values."
    )
    yield Figures([figure for figure in figures if figure is not None])


def _block_gain(run: Run, profiles: Sequence[Profiled]) -> float | None:
    """The gain of all blocks together, from the profile of this run's model, if there is one."""
    for one in profiles:
        model = one.profile.model.rstrip("/").removesuffix("/model")
        timed = [layer.speed for layer in one.profile.layers if layer.speed is not None]
        if timed and (model == run.source.rstrip("/") or model.rsplit("/", 1)[-1] == run.name):
            return sum(speed.dense_ms for speed in timed) / sum(speed.auto_ms for speed in timed)
    return None
