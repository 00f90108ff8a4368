"""Tables and the figure of the GPU benchmark, for tables.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from twell.measure import Record, read_records
from twell.plots import speedup_curves

RECORDS = Path(__file__).resolve().parent / "results" / "ffn_inference.jsonl"


def gpu_records(section: str, **shape: object) -> list[Record]:
    """Records of one section of the GPU benchmark whose shape has all the given entries."""
    records = read_records(RECORDS)
    wanted = f"ffn_inference/{section}"
    return [r for r in records if r.what.startswith(wanted) and shape.items() <= r.shape.items()]


def by_nnz(records: list[Record]) -> dict[int, dict[int, Record]]:
    """tokens -> wanted nnz -> record."""
    cells: dict[int, dict[int, Record]] = {}
    for record in records:
        nnz = round(record.sparsity["wanted_nnz"])
        cells.setdefault(record.shape["M"], {})[nnz] = record
    return cells


def nnz_name(nnz: int, neurons: int = 5632) -> str:
    return "all active" if nnz == neurons else f"nnz {nnz}"


def grid(
    rows: dict[int, dict[int, Record]], dense: Callable[[float], str], cell: Callable[[int, int], str]
) -> str:
    """Tokens down, nnz across. dense: formats dense's time; cell: the text at (tokens, nnz)."""
    columns = sorted(next(iter(rows.values())))
    lines = [
        "| tokens | dense | " + " | ".join(map(nnz_name, columns)) + " |",
        "|---:|---:|" + "---:|" * len(columns),
    ]
    for tokens, row in sorted(rows.items()):
        cells = " | ".join(cell(tokens, nnz) for nnz in columns)
        lines.append(f"| {tokens:,} | {dense(row[24].baseline_value)} | {cells} |")
    return "\n".join(lines)


def gpu_prefill() -> str:
    """Automatic plan over eager dense, tokens x nnz."""
    cells = by_nnz(gpu_records("prefill/auto", D=2048, H=5632, gated=True))
    cells = {tokens: cells[tokens] for tokens in (8192, 16384, 65536, 131072)}
    return grid(cells, ms, lambda tokens, nnz: f"{cells[tokens][nnz].ratio:.2f}x")


def gpu_decode() -> str:
    """The few-token kernels inside CUDA graphs over dense inside CUDA graphs, tokens x nnz."""
    cells = by_nnz(gpu_records("decode/sparse", D=2048, H=5632))
    return grid(cells, _us, lambda tokens, nnz: f"{cells[tokens][nnz].ratio:.2f}x")


def gpu_graphs() -> str:
    """Between few and many tokens, in CUDA graphs: the block path, and automatic plans in brackets."""
    sparse, auto = (by_nnz(gpu_records(f"graphs/{name}")) for name in ("sparse", "auto"))

    def both(tokens: int, nnz: int) -> str:
        return f"{sparse[tokens][nnz].ratio:.2f}x ({auto[tokens][nnz].ratio:.2f}x)"

    return grid(sparse, _us, both)


def gpu_decode_other() -> str:
    """Few tokens in CUDA graphs, other shapes: the sparse kernels, and automatic plans in brackets."""
    lines = [
        "| D | H | active | 1 token | 8 | 32 | 64 |",
        "|---:|---:|---:|---:|---:|---:|---:|",
    ]
    rows: dict[tuple[int, int, float], dict[int, list[float]]] = {}
    for name in ("sparse", "auto"):
        for r in gpu_records(f"decode/{name}"):
            if r.shape["D"] != 2048:
                key = (r.shape["D"], r.shape["H"], r.sparsity["wanted_nnz"] / r.shape["H"])
                rows.setdefault(key, {}).setdefault(r.shape["M"], []).append(r.ratio)
    for (hidden, neurons, share), row in sorted(rows.items()):
        cells = " | ".join(f"{row[m][0]:.2f}x ({row[m][1]:.2f}x)" for m in sorted(row))
        lines.append(f"| {hidden} | {neurons} | {share:.1%} | {cells} |")
    return "\n".join(lines)


def gpu_rows() -> str:
    """The row path over eager dense."""
    cells = by_nnz(gpu_records("prefill/row"))
    columns = sorted(cells[65536])
    lines = [
        "| tokens | " + " | ".join(map(nnz_name, columns)) + " |",
        "|---:|" + "---:|" * len(columns),
    ]
    for tokens, row in sorted(cells.items()):
        lines.append(f"| {tokens:,} | " + " | ".join(f"{row[n].ratio:.2f}x" for n in columns) + " |")
    return "\n".join(lines)


def gpu_kernels() -> str:
    """Each kernel of the block path alone, against the GPU's own matmul in the same run."""
    lines = [
        "| nnz | union of 128 tokens | `x @ gate.T` | select | select and list | up | down |",
        "|---:|---:|---:|---:|---:|---:|---:|",
    ]
    rows: dict[int, dict[str, Record]] = {}
    for record in gpu_records("kernels/"):
        rows.setdefault(round(record.sparsity["nnz"]), {})[record.what.rsplit("/", 1)[1]] = record
    for nnz, row in sorted(rows.items()):
        names = ("matmul", "select", "select_list", "up", "down")
        cells = " | ".join(f"{ms(row[n].value)}, {row[n].sparsity['tflops']:.0f}" for n in names)
        lines.append(f"| {nnz} | {row['up'].sparsity['union']:.0f} | {cells} |")
    return "\n".join(lines)


def gpu_traces() -> str:
    """List, up and down on recorded activations."""
    lines = [
        "| trace | nnz | union of 128 tokens | one warp per token at 9 TB/s | ours | ratio | error |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for record in gpu_records("traces/"):
        nnz, union = record.sparsity["nnz"], record.sparsity["union"]
        lines.append(
            f"| {record.what.rsplit('_', 1)[1]} | {nnz:.0f} | {union:.0f} | {ms(record.baseline_value)} "
            f"| {ms(record.value)} | {record.ratio:.2f}x | {record.error:.0e} |"
        )
    return "\n".join(lines)


def gpu_other() -> str:
    """Other shapes, the non-gated block and torch.compile'd dense."""
    lines = [
        "| block | tokens | D | H | nnz | dense eager | | ratio |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    compiled = gpu_records("prefill/compiled")
    others = [
        r
        for r in gpu_records("prefill/auto")
        if not r.shape["gated"] or (r.shape["D"], r.shape["H"]) != (2048, 5632)
    ]
    for record in compiled + others:
        shape = record.shape
        name = "gated" if shape["gated"] else "non-gated"
        ours = "dense compiled" if record in compiled else "ours"
        lines.append(
            f"| {name} | {shape['M']:,} | {shape['D']} | {shape['H']} | {record.sparsity['nnz']:.0f} "
            f"| {ms(record.baseline_value)} | {ours} {ms(record.value)} | {record.ratio:.2f}x |"
        )
    return "\n".join(lines)


def gpu_plain() -> str:
    """Blocks without a gate: the block path over eager dense, by the union of 128 tokens."""
    rows: dict[tuple[int, int, int], list[Record]] = {}
    for record in gpu_records("plain/block"):
        shape = record.shape
        rows.setdefault((shape["D"], shape["H"], shape["M"]), []).append(record)
    unions = [f"{record.sparsity['union']:.0%}" for record in next(iter(rows.values()))]
    lines = [
        "| D | H | tokens | dense | " + " | ".join(f"union {union}" for union in unions) + " |",
        "|---:|---:|---:|---:|" + "---:|" * len(unions),
    ]
    for (hidden, neurons, tokens), row in rows.items():
        gains = " | ".join(f"{record.ratio:.2f}x" for record in row)
        lines.append(f"| {hidden} | {neurons} | {tokens:,} | {ms(row[0].baseline_value)} | {gains} |")
    return "\n".join(lines)


def gpu_measured_on() -> str:
    """The GPU, versions and commits behind the GPU figures."""
    records = gpu_records("")
    record = records[-1]
    commits = ", ".join(sorted({r.commit for r in records}))
    hardware, versions = record.hardware, record.versions
    return (
        f"Measured on one {hardware['gpu']}, torch {versions['torch']}, triton {versions['triton']}, "
        f"commit {commits}, {record.date[:10]}; medians of interleaved runs, outputs compared with "
        "float32 in the same run."
    )


def curves_data() -> dict[str, list[tuple[float, float]]]:
    curves: dict[str, list[tuple[float, float]]] = {}
    prefill = [r for r in gpu_records("prefill/auto", D=2048, H=5632, gated=True) if r.shape["M"] == 65536]
    decode = [r for r in gpu_records("decode/sparse", D=2048, H=5632) if r.shape["M"] == 1]
    for name, records in (("65,536 tokens", prefill), ("1 token, CUDA graph", decode)):
        curves[name] = [(r.sparsity["nnz"] / r.shape["H"], r.ratio) for r in records if r.sparsity["nnz"] > 0]
    return curves


def draw_curves(data: object, path: Path, metadata: dict[str, str]) -> None:
    speedup_curves(
        data,
        path,
        title="Sparse feed-forward on an H200: exact at any sparsity",
        subtitle="bf16, D 2048, H 5632, over eager PyTorch (1 token: both in CUDA graphs)",
        metadata=metadata,
    )


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} us"


TABLES: dict[str, Callable[[], str]] = {
    "gpu-prefill": gpu_prefill,
    "gpu-decode": gpu_decode,
    "gpu-decode-other": gpu_decode_other,
    "gpu-graphs": gpu_graphs,
    "gpu-rows": gpu_rows,
    "gpu-kernels": gpu_kernels,
    "gpu-traces": gpu_traces,
    "gpu-other": gpu_other,
    "gpu-plain": gpu_plain,
    "gpu-measured-on": gpu_measured_on,
}
