"""Reports of training runs, profiles and records: `twell report`.

report = make_report(["runs/tiny", "profile", "bench.jsonl"])
Path("report.html").write_text(report.html())      one page that needs nothing else
report                                             at the end of a notebook's cell: the page
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from .document import Report
from .inputs import Inputs, read_inputs

__all__ = ["Inputs", "Report", "make_report", "read_inputs"]


def make_report(paths: Sequence[str | Path]) -> Report:
    """A report of any mix of runs' folders, profiles and files of records.

    Sections without data are left out. Raises ValueError for a path that is none of these.
    """
    from .bench_sections import bench_sections
    from .headline import make_headline
    from .origin_sections import origin_sections
    from .profile_sections import profile_sections
    from .record_sections import record_sections
    from .run_sections import run_sections
    from .sweep import ordered

    inputs = read_inputs(paths)
    inputs = replace(inputs, runs=ordered(inputs.runs))
    sections = [
        *bench_sections(inputs.records),
        *run_sections(inputs),
        *profile_sections(inputs.profiles),
        *record_sections(inputs.records),
        *origin_sections(inputs),
    ]
    return Report(make_headline(inputs), sections)
