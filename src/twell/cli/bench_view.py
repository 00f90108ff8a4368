"""The tables that `twell bench` ends with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .._interval import DENSE_GAINS, MEANING
from .._numbers import counted, digits
from ..formats.base import format_bytes
from ..measure import Record
from ..measure.results import Merged
from .progress import NOISY

ON_A_CPU = "No GPU is used: all runs on the CPU, without compiled contenders unless --contenders names them."
_WIDE = 100  # columns of a terminal


def label(one: Merged) -> str:
    shape = one.first.shape
    batch = shape["batch"]
    size = f"{batch} x {shape['sequence']}" if "sequence" in shape else counted(batch, "sequence")
    return f"{one.first.workload}, {size}: {one.first.contender}"


def show(console: Console, merged: Sequence[Merged], records: Sequence[Record]) -> None:
    groups: dict[tuple, list[Merged]] = {}
    for one in merged:
        groups.setdefault(one.first.group, []).append(one)
    meanings: dict[str, str] = {}
    for group in groups.values():
        if group[0].first.workload == "micro-batch":
            _show_batches(console, group)
        else:
            _show_group(console, group, meanings)
    legend = dict.fromkeys(line for group in groups.values() for line in _legend(group))
    if legend:
        console.print("in this table:" if len(groups) == 1 else "in these tables:", highlight=False)
    for line in legend:
        console.print(f"  {line}", highlight=False, soft_wrap=True)
    for line in where(records):
        console.print(line, highlight=False)


def _show_group(console: Console, group: list[Merged], meanings: dict[str, str]) -> None:
    """meanings: of contenders, as last said; not said again."""
    first = group[0].first
    wide = console.width >= _WIDE
    rows = [_row(one, wide) for one in group]
    # Nothing may break inside a number, so headers do.
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    baseline = (group[0].baseline or "").replace("-", "-\n")
    headers = [
        "",
        "tokens\n/ms",
        "time",
        f"over\n{baseline}",
        "mJ\n/token",
        "memory",
        "differ-\nence",
        "same\ntokens",
    ]
    shown = [place for place in range(len(headers)) if any(row[place] for row in rows)]
    for place in shown:
        table.add_column(headers[place], justify="right" if place else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(row[place] for place in shown))
    console.print(f"[italic]{_title(group)}[/]", highlight=False, soft_wrap=True)
    console.print(table)
    for one in group:
        if one.failure is not None:
            said = escape(f"{one.first.contender}: {one.failure}")  # compilers write brackets
            console.print(f"  [yellow]{said}[/]", highlight=False, soft_wrap=True)
    for one in group:
        if meanings.get(one.first.contender) != one.meaning:
            console.print(f"  {one.first.contender}: {one.meaning}", highlight=False, soft_wrap=True)
        meanings[one.first.contender] = one.meaning
    for line in (*_notes(group), *_comparisons(group)):
        console.print(f"  {line}", highlight=False, soft_wrap=True)
    if any(one.gain is not None and one.gain.is_wide for one in group):
        console.print(f"  {NOISY}", style="yellow", highlight=False, soft_wrap=True)
    nnz = first.sparsity
    if nnz:
        text = "" if _is_built(group) else ", on this text"
        console.print(
            f"  active neurons per token: {nnz['nnz']:.1f} ({nnz['nnz_least']:.1f} to {nnz['nnz_most']:.1f} "
            f"by layer){text}\n",
            highlight=False,
            soft_wrap=True,
        )


def _row(one: Merged, wide: bool) -> list[str]:
    """wide: whether there is room for the interval, which is also below the table."""
    if one.failure is not None:
        return [one.first.contender, "-", "-", *[""] * 5]
    gain = "" if one.gain is None else str(one.gain) if wide else f"{one.gain.middle:.2f}x"
    energy, memory = one.millijoules_per_token, one.detail("peak_bytes")
    agreement = one.detail("same_tokens_as_dense")
    return [
        one.first.contender,
        digits(one.tokens_per_ms, 4),
        f"{digits(one.first.tokens / one.tokens_per_ms, 4)} ms",
        gain,
        "" if energy is None else digits(energy),
        "" if memory is None else format_bytes(int(memory)),
        "" if one.difference is None else f"{one.difference:.1e}",
        "" if agreement is None else f"{agreement:.1%}",
    ]


def _title(group: list[Merged]) -> str:
    shape, first = group[0].first.shape, group[0].first
    what = {"forward": "forward", "generation": "generation"}.get(first.workload, "training step")
    size = f"{shape['batch']} x {shape.get('sequence', shape.get('prompt'))} tokens"
    if first.workload == "generation":
        size = (
            f"{counted(shape['batch'], 'sequence')}, {shape['new_tokens']} new tokens after {shape['prompt']}"
        )
    more = (
        ""
        if "checkpointing" not in shape
        else (", with checkpointing" if shape["checkpointing"] else ", without checkpointing")
    )
    precision = shape.get("precision", shape["dtype"])
    return f"{what} of {shape['model']}, {counted(shape['layers'], 'layer')}, {size}, {precision}{more}"


def _notes(group: list[Merged]) -> list[str]:
    """What a reader has to know of this table."""
    lines = []
    workload, shape = group[0].first.workload, group[0].first.shape
    if workload == "generation":
        from ..measure.inference import FIRST_TOKENS  # not before: it imports torch's compiler

        timed, equal = shape["new_tokens"], _figures(group, "same_until", ".0f")
        until = f"; new tokens until the first that differs from dense: {equal}" if equal else ""
        lines.append(
            f"timed are the last {timed} of {FIRST_TOKENS + timed} new tokens, without the prompt{until}"
        )
        noisy = group[0].detail("noisy_rounds")
        if noisy:
            rounds = "1 round was" if noisy == 1 else f"{noisy:.0f} rounds were"
            lines.append(f"{rounds} too noisy and not counted; raise --new-tokens")
    elif workload in ("step", "checkpointed"):
        lines.append(
            f"errors of some blocks' outputs and gradients: {_figures(group, 'block_error', '.1e')}; "
            f"losses: {_figures(group, 'loss', '.5f')} (ours has the L1 term in it)"
        )
    for one in group:
        if one.detail("doubtful"):
            lines.append(f"[red]{one.first.contender} computes something else: its speed means nothing[/]")
        lines += _dense_calls(one)
    return lines


def _dense_calls(one: Merged) -> Iterator[str]:
    """How many of its calls ran dense, and why."""
    share = one.detail("sparse_share")
    if share is None or share == 1:
        return
    dense = "all" if share == 0 else f"{1 - share:.0%}"
    why = f": {escape(one.dense_reason)}" if one.dense_reason else ""
    yield f"{one.first.contender} ran {dense} of its feed-forward calls dense{why}"
    if not _is_built([one]):
        tokens = max(one.first.tokens, 2)
        yield f"layer by layer: `twell explain MODEL --text FILE --tokens {tokens}`"


def _is_built(group: list[Merged]) -> bool:
    """Whether it is a preset's, not a model of the user's."""
    return group[0].first.shape.get("text", "random tokens") == "random tokens"


def _legend(group: list[Merged]) -> Iterator[str]:
    """What is the same for all tables of a kind."""
    workload = group[0].first.workload
    details = {name for one in group for name in one.first.details}
    if any(one.gains for one in group if one.first.contender.startswith("ours")):
        yield (
            f"gains: medians of the ratios inside rounds, in brackets their {MEANING}; on a machine that "
            "others use, another run may differ by more"
        )
    if workload == "forward" and "against_float32" in details:
        wider = "float64" if group[0].first.shape["dtype"] == "float32" else "float32"
        widened = {m.details.get("against_float32") for one in group for m in one.processes} - {None}
        against = f"the same model in {wider}" if 1 in widened else "dense eager"
        if len(widened) > 1:
            against += ", in some processes from dense eager"
        yield (f"difference: the largest of a logit from {against}, relative to the largest logit")
        yield "same tokens of a forward pass: as dense eager predicts next"
    elif workload == "generation" and "same_tokens_as_dense" in details:
        compared = [one.first.contender for one in group if one.detail("same_tokens_as_dense") is not None]
        stock = next(name for name in compared if name.startswith("dense")).replace("-", " ")
        yield (
            f"same tokens of generation: as {stock}'s; after a first difference, which rounding can make, "
            "all may differ"
        )
    elif workload in ("step", "checkpointed"):
        yield (
            "difference: of the last hidden states from those of the same model in a wider dtype, relative"
        )
    if group[0].first.sparsity and _is_built(group):
        yield (
            "active neurons: built so on every layer's real input, with firing rates as skewed as a trained "
            "model's"
        )
    if any(one.detail("sparse_share") == 0 and one.gain is not None and one.gain.low > 1 for one in group):
        yield DENSE_GAINS


def _figures(group: list[Merged], detail: str, form: str) -> str:
    found = {one.first.contender: one.detail(detail) for one in group}
    return ", ".join(f"{name} {value:{form}}" for name, value in found.items() if value is not None)


def _comparisons(group: list[Merged]) -> list[str]:
    """Ours over each dense contender, in time and energy."""
    by_name = {one.first.contender: one for one in group}
    lines = []
    for name, one in by_name.items():
        if not name.startswith("ours") or not one.gains:
            continue
        parts = []
        for other, gain in one.gains.items():
            theirs = by_name[other].joules
            energy = f", {one.joules / theirs:.2f}x its energy" if one.joules and theirs else ""
            parts.append(f"{gain} {other}{energy}")
        lines.append(f"{name}: {'; '.join(parts)}")
    return lines


def _show_batches(console: Console, group: list[Merged]) -> None:
    shape = group[0].first.shape
    word = "with" if shape["checkpointing"] else "without"
    console.print(f"largest micro-batch, {word} checkpointing, {shape['sequence']} tokens a sequence")
    table = Table(box=SIMPLE_HEAD)
    table.add_column("")
    table.add_column("sequences", justify="right")
    for one in group:
        table.add_row(one.first.contender, str(int(one.detail("sequences") or 0)))
    console.print(table)


def where(records: Sequence[Record]) -> list[str]:
    """The machine, its clocks and power, and what energy comes from."""
    if not records:
        return []
    hardware, versions = records[-1].hardware, records[-1].versions
    lines = [
        f"{hardware.get('gpu') or hardware['cpu']}, torch {versions['torch']}, commit {records[-1].commit}"
    ]
    timed = [record.hardware for record in records if record.unit == "s"]
    clocks = [one["sm_clock_mhz"] for one in timed if one.get("sm_clock_mhz") is not None]
    watts = [one["power_w"] for one in timed if one.get("power_w") is not None]
    if clocks and watts:
        warmest = max(one.get("temperature_c") or 0 for one in timed)
        limit, idle = hardware.get("power_limit_w"), hardware.get("idle_power_w", "?")
        lines.append(
            f"{min(clocks)} to {max(clocks)} MHz, {min(watts):.0f} to {max(watts):.0f} W of "
            f"{limit} W, up to {warmest} C; idle {idle} W"
        )
    methods = sorted({str(r.hardware["energy_from"]) for r in records if r.hardware.get("energy_from")})
    if methods:  # else it was said why not, before anything ran
        lines.append(f"energy: {', '.join(methods)}")
    return lines
