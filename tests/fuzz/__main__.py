"""python -m tests.fuzz --device cpu --cases 50000 --seed 0 --record fuzz.json"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from .campaign import Campaign, prepare
from .case import Case
from .judge import judge


def main(arguments: list[str] | None = None) -> int:
    """Exit status 1 if a case failed."""
    options = _parser().parse_args(arguments)
    if options.case is not None:
        return _replay(Case.from_json(options.case))
    cases = range(options.first, options.first + options.cases)
    campaign = Campaign(options.device, options.seed, cases, options.workers, options.commit)
    try:
        campaign.run(lambda line: print(line, flush=True), options.seconds)
    except KeyboardInterrupt:
        print(f"stopped after {campaign.done:,} cases", file=sys.stderr)
    finally:
        if options.record is not None:
            options.record.parent.mkdir(parents=True, exist_ok=True)
            options.record.write_text(json.dumps(campaign.record(), indent=1) + "\n")
    return 1 if campaign.failures else 0


def _replay(case: Case) -> int:
    prepare(case.device)
    problems, ran = judge(case)
    print("paths:", ", ".join(ran) or "none")
    print("\n".join(problems) or "nothing is wrong with it")
    return 1 if problems else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda", "interpreted"), default="cpu")
    parser.add_argument("--cases", type=int, default=1000, help="how many; each follows from seed and index")
    parser.add_argument("--first", type=int, default=0, help="index of the first case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=None, help="stop after so many")
    parser.add_argument("--workers", type=int, default=1, help="processes of one thread each")
    parser.add_argument("--record", type=Path, default=None, help="write counts and failures there, as JSON")
    parser.add_argument("--commit", default=None, help="what to record where git cannot say")
    parser.add_argument("--case", default=None, help="run one case, as a failure prints it")
    return parser


if __name__ == "__main__":
    sys.exit(main())
