"""Sections of the other records: speed over active neurons, and every figure in a folded table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..measure.records import Record
from .chart import Chart, Reference, Series
from .document import Block, Figure, Figures, Section, Table
from .record_names import FAMILIES, is_bench
from .wording import amount, optional, short, times

_MOST_LINES = 6
_HIDDEN = ("meaning",)
_ARITHMETIC = "Without 16-bit units in the CPU, most of this gain is arithmetic, not sparsity."
_CURVES = {
    "ffn_inference/prefill/auto": "Prefill",
    "ffn_inference/decode/auto": "Decode",
    "ffn_inference/graphs/auto": "Between decode and prefill, in a CUDA graph",
    "ffn_training/forward/auto": "Training, forward",
    "ffn_training/backward/auto": "Training, backward",
    "ffn_training/total/auto": "Training, forward and backward",
    "ffn_cpu/auto": "Inference",
    "defaults/forward/auto": "Forward, called from Python",
}


def record_sections(records: Sequence[Record]) -> Iterator[Section]:
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        if not is_bench(record):
            place = str(record.hardware.get("gpu") or record.hardware.get("cpu"))
            groups.setdefault((record.what.split("/")[0], place), []).append(record)
    for number, ((family, place), group) in enumerate(groups.items()):
        title = FAMILIES.get(family, family)
        blocks: list[Block] = []
        figures = _curves(group, f"records-{number}")
        if figures:
            blocks.append(Figures(figures))
        blocks.append(_table(group, "" if len(group) <= 12 else f"All {len(group)} records"))
        yield Section(f"{title}, {place}", blocks)


def _curves(group: list[Record], name: str) -> list[Figure]:
    """Speed over active neurons, for each kind of record: a line per number of tokens."""
    kinds: dict[tuple, list[Record]] = {}
    for record in group:
        if record.what.endswith("/auto") and record.unit == "s" and record.ratio and _active(record):
            shape = record.shape
            same = tuple((key, value) for key, value in shape.items() if key not in ("M", *_HIDDEN))
            kinds.setdefault((record.what, record.baseline, same), []).append(record)
    figures = []
    for number, ((what, baseline, same), some) in enumerate(kinds.items()):
        lines: dict[int, list[tuple[float, float]]] = {}
        for record in some:
            lines.setdefault(record.shape.get("M", 0), []).append((_active(record), record.ratio))
        lines = {tokens: sorted(points) for tokens, points in sorted(lines.items()) if len(points) > 2}
        if not lines:
            continue
        tokens = list(lines)
        if len(tokens) > _MOST_LINES:  # evenly, with the first and the last
            tokens = [tokens[round(i * (len(tokens) - 1) / (_MOST_LINES - 1))] for i in range(_MOST_LINES)]
        series = [
            Series(
                f"{count:,} tokens" if count else "",
                lines[count],
                place / max(len(tokens) - 1, 1),
                marks=True,
            )
            for place, count in enumerate(tokens)
        ]
        chart = Chart(
            _title(what, dict(same)),
            "active neurons per token",
            "times as fast as dense",
            series,
            x_scale="log",
            y_from_zero=True,
            references=[Reference(1, "dense")],
            legend=[one.name for one in series],
        )
        words = ", ".join(_entry(key, value) for key, value in same)
        caption = f"Automatic plan over {baseline}; {words}."
        if some[0].hardware.get("device") == "cpu" and dict(same).get("dtype") != "float32":
            caption += f" {_ARITHMETIC}"
        figures.append(Figure(f"{name}-{number}", chart, caption))
    return figures


def _title(what: str, same: dict[str, object]) -> str:
    word = _CURVES.get(what, what.removesuffix("/auto").replace("/", ", ").replace("_", " "))
    return f"{word}, {same['dtype']}" if "dtype" in same else word


def _active(record: Record) -> float | None:
    return record.sparsity.get("nnz", record.sparsity.get("wanted_nnz"))


def _entry(key: str, value: object) -> str:
    if key == "gated":
        return "gated" if value else "not gated"
    return str(value) if key in ("dtype", "model") else f"{key} {value}"


def _table(group: list[Record], folded: str) -> Table:
    varying = [
        key
        for key in dict.fromkeys(key for record in group for key in record.shape)
        if key not in _HIDDEN and len({str(record.shape.get(key)) for record in group}) > 1
    ]
    prefix = f"{group[0].what.split('/')[0]}/"
    rows = []
    for record in group:
        active = _active(record)
        low = record.quantiles
        spread = f"{amount(low['p10'], record.unit)} to {amount(low['p90'], record.unit)}" if low else ""
        rows.append(
            (
                record.what.removeprefix(prefix),
                *(_cell(record.shape.get(key)) for key in varying),
                "" if active is None else short(active),
                amount(record.value, record.unit),
                spread,
                record.baseline or "",
                "" if record.baseline_value is None else amount(record.baseline_value, record.unit),
                "" if record.ratio is None else times(record.ratio),
                optional(record.error, ".1e"),
            )
        )
    columns = ["", *varying, "nnz", "value", "p10 to p90", "baseline", "baseline value", "ratio", "error"]
    kept = [i for i in range(len(columns)) if i == 0 or any(row[i] for row in rows)]
    left = [
        place for place, i in enumerate(kept) if i == 0 or columns[i] in ("baseline", *_words(group, varying))
    ]
    fixed = {key: value for key, value in group[0].shape.items() if key not in (*varying, *_HIDDEN)}
    caption = ", ".join(_entry(key, value) for key, value in fixed.items())
    return Table(
        [columns[i] for i in kept],
        [[row[i] for i in kept] for row in rows],
        left=left,
        caption=f"All with {caption}." if caption else "",
        folded=folded,
    )


def _words(group: list[Record], keys: list[str]) -> list[str]:
    return [key for key in keys if any(isinstance(record.shape.get(key), str) for record in group)]


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)
