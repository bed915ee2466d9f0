"""Long faults under whole federations of real processes: services are dead or stand still for seconds to minutes.

    python -m tests.processes.long_faults --faults 200 --seed 1 --side-by-side 12

Each federation is of one kind: FedNCF under one of the sums, FedMVMF with an item server, DRIFT in either form.  Of
the first ones half have nobody to spare: every user has to be in every sum, so that a run waits while anybody is away.
Faults strike one service, or two at once, for a time drawn between ``--shortest`` and ``--longest`` seconds, as many
short as long ones.  A fault is recovered from when two further versions of the model are made after it.  Prints a line
per fault and a summary; the exit status is 0 when no run ended and every fault was recovered from.
"""

import argparse
import asyncio
import json
import math
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from coterie.config.run import RunSettings
from coterie.errors import CoterieError
from coterie.studies.run_data import load, make_feed
from coterie.wire.v1 import operator_pb2 as wire

from .running import Running

RUNS = ("masked", "encrypted", "shared-key", "item server", "published", "windows")
"""FedNCF under these sums, FedMVMF with an item server, DRIFT's published form, its shielded form under masks."""

KINDS = ("dead", "still")
"""Killed and started again after the time; stopped by SIGSTOP and continued after it."""

BACK_S = 600.0
"""Within which a run must go on after a fault; beside many others on one machine a round takes long."""

LOOK_S = 1.0
USERS = 24


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes
    ----------
    parties : tuple of str
        Whom it strikes at once, as ``client/host-0``.
    kind : str
        One of `KINDS`.
    seconds : float
        How long it lasts.
    """

    parties: tuple[str, ...]
    kind: str
    seconds: float


def draw(drawn: random.Random, parties: Sequence[str], shortest: float, longest: float) -> Fault:
    """Draw a fault of one party, or of two in one of four cases; the logarithm of its time is uniform."""
    struck = drawn.sample(parties, 2 if drawn.random() < 0.25 else 1)
    seconds = math.exp(drawn.uniform(math.log(shortest), math.log(longest)))
    return Fault(tuple(sorted(struck)), drawn.choice(KINDS), round(seconds, 1))


def settings_of(kind: str, everybody: bool) -> RunSettings:
    """Return settings of a run of one of `RUNS` that goes on for longer than anybody watches."""
    if kind in ("published", "windows"):
        return drift(kind)
    items = kind == "item server"
    return RunSettings.model_validate(
        {
            "reference": False,
            "system": "fedmvmf" if items else "fedncf",
            "secure_sum": "masked" if items else kind,
            "split": {"kind": "random" if items else "leave-last-out"},
            "encryption": {"bits": 1024, "comparison": True},
            "data": {"synthetic": {"users": USERS, "items": 60, "interactions": 600}},
            "rounds": {
                "cohort": USERS,
                "group": USERS,
                "min_cohort": USERS if everybody else 5,
                "min_sum": USERS if everybody else 5,
                "passes": 100_000,
                "patience": 0,
                "evaluate_every": 1000,
            },
            "federation": {"owners": 1, "hosts": 4, "min_users": 20, "party_timeout_s": 5.0},
        }
    )


def drift(kind: str) -> RunSettings:
    """Return settings of a run of DRIFT; windows need three owners, their evaluations three hosts."""
    windows = {"form": "shielded", "k_min": 3, "window": 40} if kind == "windows" else {}
    return RunSettings.model_validate(
        {
            "reference": False,
            "system": "drift",
            "secure_sum": "masked" if windows else "clear",
            "data": {"synthetic": {"users": USERS, "items": 60, "interactions": 600}},
            "drift": {"dim": 8, "epochs": 10_000, **windows},
            "federation": {"owners": 3, "hosts": 4, "min_users": 5, "party_timeout_s": 5.0},
        }
    )


class Endurance:
    """One federation, and the faults that strike it one after the other.

    Parameters
    ----------
    running : Running
    name : str
        For what is printed.
    """

    def __init__(self, running: Running, name: str) -> None:
        self._running = running
        self.name = name
        self.ended = ""
        """Why the run ended; empty while it goes on."""

    async def state(self) -> wire.RunState | None:
        """Ask the orchestration server for the run's state; None while it does not answer."""
        try:
            async with asyncio.timeout(10):
                return await self._running.run_state()
        except (CoterieError, TimeoutError):
            return None

    async def versions(self, more: int) -> float:
        """Wait until so many further versions are made; return the seconds that it took, infinite when it did not."""
        begun, first = time.monotonic(), None
        while time.monotonic() - begun < BACK_S:
            state = await self.state()
            if state is not None:
                if state.phase in (wire.RUN_PHASE_FAILED, wire.RUN_PHASE_DONE):
                    self.ended = state.reason or "done"
                    return math.inf
                first = state.version if first is None else first
                if state.version >= first + more:
                    return time.monotonic() - begun
            await asyncio.sleep(LOOK_S)
        return math.inf

    async def endure(self, fault: Fault) -> dict[str, object]:
        """Let a fault happen and wait until the run has gone on; return what happened."""
        children = [self._running.children[party] for party in fault.parties]
        for child in children:
            if fault.kind == "dead":
                child.kill()
            else:
                self._running.signal(child.party, signal.SIGSTOP)
        await asyncio.sleep(fault.seconds)
        state = await self.state()
        for child in children:
            if fault.kind == "dead":
                child.start()
            else:
                self._running.signal(child.party, signal.SIGCONT)
        recovered = await self.versions(2)
        waited = state.waiting if state is not None else ""
        gone = [party for party, child in self._running.children.items() if not child.alive]
        row = {
            "run": self.name,
            **asdict(fault),
            "waiting": waited,
            "recovered_s": round(recovered, 1),
            "ended": self.ended,
            "processes_that_ended": gone,
        }
        print(json.dumps(row), flush=True)
        return row


async def endure(
    folder: Path,
    kind: str,
    everybody: bool,
    count: int,
    drawn: random.Random,
    lasting: tuple[float, float],
) -> list[dict[str, object]]:
    """Train a federation under so many faults; return what each did."""
    settings = settings_of(kind, everybody)
    feed = make_feed(settings, load(settings), 0)
    rows = []
    async with Running(settings, feed, folder) as running:
        await running.start()
        name = f"{kind}, {'everybody' if everybody else 'most'} needed" if kind in RUNS[:4] else kind
        one = Endurance(running, name)
        if math.isinf(await one.versions(2)):
            raise AssertionError(f"{name}: no version was made before any fault: {running.last_words()}")
        for _ in range(count):
            row = await one.endure(draw(drawn, list(running.children), *lasting))
            rows.append(row)
            if math.isinf(float(str(row["recovered_s"]))):
                print(running.last_words(), flush=True)
                break
        await running.stop()
    return rows


async def all_of(
    into: Path,
    kinds: Sequence[str],
    faults: int,
    seed: int,
    side_by_side: int,
    lasting: tuple[float, float],
) -> list[dict[str, object]]:
    """Train federations side by side, each under its share of the faults."""
    shares = [faults // side_by_side + (n < faults % side_by_side) for n in range(side_by_side)]
    found = await asyncio.gather(
        *(
            endure(
                into / str(n),
                kinds[n % len(kinds)],
                n // len(kinds) % 2 == 0,
                share,
                random.Random(f"{seed} {n}"),
                lasting,
            )
            for n, share in enumerate(shares)
        )
    )
    return [row for rows in found for row in rows]


def summary(rows: Sequence[dict[str, object]]) -> str:
    """Return a table of the faults by run."""
    lines = [
        f"{'run':30}{'faults':>8}{'longest s':>11}{'back, median s':>16}{'back, longest s':>17}{'ended':>7}"
    ]
    for name in sorted({str(row["run"]) for row in rows}):
        those = [row for row in rows if row["run"] == name]
        back = [float(str(row["recovered_s"])) for row in those]
        longest = max(float(str(row["seconds"])) for row in those)
        ended = sum(bool(row["ended"]) for row in those)
        lines.append(
            f"{name:30}{len(those):8}{longest:11.1f}{statistics.median(back):16.1f}{max(back):17.1f}{ended:7}"
        )
    return "\n".join(lines)


def command_line(
    description: str | None,
    runs: Sequence[str],
    *,
    faults: int,
    side_by_side: int,
    shortest: float,
    longest: float,
) -> argparse.ArgumentParser:
    """Return the options of a program that draws faults; given are the kinds of federations, and the defaults."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def takes(option: str, default: float, words: str) -> None:
        parser.add_argument(option, type=type(default), default=default, help=f"{words} ({default:g})")

    takes("--faults", faults, "how many")
    takes("--seed", 1, "what draws them")
    parser.add_argument("--runs", nargs="+", choices=runs, default=runs, help="kinds of federations (all)")
    takes("--side-by-side", side_by_side, "federations that train at once")
    takes("--shortest", shortest, "shortest fault, seconds")
    takes("--longest", longest, "longest fault, seconds")
    parser.add_argument("--table", type=Path, help="file for what each fault did, JSON")
    return parser


def main() -> int:
    """Run the faults that the command line asks for and return the exit status."""
    parser = command_line(__doc__, RUNS, faults=200, side_by_side=12, shortest=5.0, longest=600.0)
    options = parser.parse_args()
    # Training in many federations at once must leave the machine usable.
    os.nice(10)
    with tempfile.TemporaryDirectory(prefix="coterie-", ignore_cleanup_errors=True) as folder:
        lasting = options.shortest, options.longest
        rows = asyncio.run(
            all_of(Path(folder), options.runs, options.faults, options.seed, options.side_by_side, lasting)
        )
    if options.table:
        options.table.write_text(json.dumps(rows, indent=1) + "\n")
    print(summary(rows))
    return int(any(math.isinf(float(str(row["recovered_s"]))) for row in rows) or len(rows) < options.faults)


if __name__ == "__main__":
    sys.exit(main())
