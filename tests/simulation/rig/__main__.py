"""Run many schedules: ``python -m tests.simulation.rig --schedules 100000 --sum clear``.

With ``--lying`` the server lies, and everything else does what it should.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from tests.simulation.rig.lying import Tally, lie
from tests.simulation.rig.schedule import Found, Scenario, find, run
from tests.simulation.rig.sums import SUMS
from tests.simulation.rig.watch import Violation

__all__ = ["main"]

_PART = 200
_SAY_EVERY = 5000


def _some(secure_sum: str, seeds: range) -> tuple[Counter[str], list[Found]]:
    counted: Counter[str] = Counter()
    found = []
    for seed in seeds:
        scenario = Scenario.drawn(seed, secure_sum)
        faults = scenario.faults()
        try:
            watch = run(scenario, faults)
        except Exception as error:
            # Any other error than a violation is a finding as well.
            one = find(scenario)
            kind = "violations" if isinstance(error, Violation) else "errors"
            counted[kind] += 1
            if one is not None:
                found.append(one)
            continue
        counted.update(schedules=1, applied=len(watch.applied), abandoned=len(watch.abandoned))
        counted.update(fault.what for fault in faults.recorded)
        counted["refused"] += watch.refusals.total()
    return counted, found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run schedules; return 0 when none failed, 1 when some did."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.rig", description=__doc__)
    parser.add_argument("--schedules", type=int, default=1000, help="how many (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the first; the others follow (default: 0)")
    parser.add_argument("--sum", choices=SUMS, default="clear", help="the secure sum")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default: 1)")
    parser.add_argument("--found", type=Path, help="folder for failing schedules, one JSON file each")
    parser.add_argument(
        "--lying", action="store_true", help="schedules in which the server lies (masked or encrypted)"
    )
    parser.add_argument("--replay", type=Path, help="run one such file again instead")
    options = parser.parse_args(arguments)
    if options.replay:
        return _replay(options.replay)
    if options.lying:
        if options.sum not in ("masked", "encrypted"):
            parser.error(f"--lying takes --sum masked or encrypted; the sum is {options.sum}")
        return _lying(options.sum, range(options.seed, options.seed + options.schedules), options.jobs)

    began = time.monotonic()
    last = options.seed + options.schedules
    parts = [range(one, min(one + _PART, last)) for one in range(options.seed, last, _PART)]
    total: Counter[str] = Counter()
    failed = 0
    work = partial(_some, options.sum)
    with ProcessPoolExecutor(options.jobs) as pool:
        for counted, found in (pool.map if options.jobs > 1 else map)(work, parts):
            before, total = total["schedules"], total + counted
            if before // _SAY_EVERY < total["schedules"] // _SAY_EVERY:
                print(f"{total['schedules']:,} schedules, {failed} failed", file=sys.stderr)
            for one in found:
                failed += 1
                print(f"\n{one}", file=sys.stderr)
                if options.found:
                    options.found.mkdir(parents=True, exist_ok=True)
                    path = options.found / f"{options.sum}-{one.scenario.seed}.json"
                    path.write_text(one.to_json(), encoding="utf-8")
    took = time.monotonic() - began
    print(f"{options.sum}: seeds {options.seed} to {last - 1}, {failed} failed, {took:.0f} s")
    print(", ".join(f"{what} {count:,}" for what, count in total.most_common()))
    return 1 if failed else 0


def _lying(secure_sum: str, seeds: range, jobs: int) -> int:
    parts = [seeds[first : first + _PART] for first in range(0, len(seeds), _PART)]
    with ProcessPoolExecutor(jobs) as pool:
        total = sum((pool.map if jobs > 1 else map)(partial(lie, secure_sum=secure_sum), parts), Tally())
    print(f"{secure_sum}, a server that lies: {total}")
    if total.solved:
        print(f"seeds {', '.join(map(str, total.solved[:20]))}", file=sys.stderr)
    return 1 if total.solved or total.fewest_apart is not None else 0


def _replay(path: Path) -> int:
    found = Found.from_json(path.read_text(encoding="utf-8"))
    what = found.again()
    print(what or "this schedule no longer fails")
    return 1 if what else 0


if __name__ == "__main__":
    sys.exit(main())
