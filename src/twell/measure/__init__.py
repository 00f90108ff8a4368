"""The measuring kit of every benchmark: time, memory, and records that say where a figure comes from.

times = compare({"dense": dense, "sparse": sparse}, device="cuda")   interleaved, so drift hits both
speedup(times["dense"], times["sparse"])                             ratio of the medians
peak_bytes(sparse, "cuda"), saved_bytes(sparse, exclude=weights)     memory of a call, and of its graph

record = make_record("ffn/decode/sparse", times["sparse"], unit="s", device="cuda", seed=0,
                     baseline="dense", baseline_timing=times["dense"], shape={"M": 1, "D": 2048})
write_records("results.jsonl", [record], append=True)                JSON Lines, all or nothing
read_records("training_runs.jsonl", RunRecord)                       the same for whole training runs
"""

from .environment import commit, hardware, versions
from .memory import peak_bytes, saved_bytes
from .records import Record, RunRecord, make_record, read_records, write_records
from .timing import Timing, compare, speedup

__all__ = [
    "Record",
    "RunRecord",
    "Timing",
    "commit",
    "compare",
    "hardware",
    "make_record",
    "peak_bytes",
    "read_records",
    "saved_bytes",
    "speedup",
    "versions",
    "write_records",
]
