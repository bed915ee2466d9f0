"""A drawn schedule of faults under whole federations of real processes, and what became of each.

    python -m tests.processes.fault_schedule --faults 500 --seed 1 --side-by-side 10 --table build/fault-schedule.json

Federations are of five kinds: FedNCF under masks, alone and with a standby of the COS over PostgreSQL; PrivMVMF, whose
sums are encrypted; DRIFT's shielded form under masks; EASE under masks.  Each fault strikes one service, two, all of
them, or the database, for some seconds.  A fault is recovered from when two further versions of the model are made
after it; in EASE, whose runs have three sums, when one further sum is formed.

After the faults of a federation its report must show versions without a gap, every process must have stopped in order,
and every state folder must be as its service left it (`coterie check`).  A run of EASE goes to its end, and its metrics
must be those of a run in one process.  The exit status is 0 when no run ended, nothing was lost, and every fault was
recovered from.
"""

import asyncio
import contextlib
import json
import math
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from coterie.config.run import RunSettings
from coterie.errors import CoterieError
from coterie.launch.state_check import check_state
from coterie.studies.in_process import train_in_process
from coterie.studies.run_data import load, make_feed
from coterie.wire.v1 import operator_pb2 as wire

from .. import postgres
from ..volumes import fill, small_volume
from .gate import Cable
from .long_faults import command_line
from .programs import ProgramChild
from .running import Running
from .test_clocks import FAKETIME
from .test_standby import FIRST, SECOND, Doubled

RUNS = ("FedNCF", "FedNCF, standby", "PrivMVMF", "DRIFT", "EASE")

KINDS = (
    "killed",
    "two killed",
    "held still",
    "power loss",
    "cut off",
    "disk full",
    "clock wrong",
    "store damaged",
)
"""Faults of every federation.

SIGKILL of one service or of two at once, and a start after the time; SIGSTOP, and SIGCONT after it; SIGKILL of all
services; a client host or data owner without a way to the COS; a disk without room; a clock that is off by up to ten
minutes; a killed service whose store has a page of zeros when it starts: it must say so, and gets its files back.
"""

DOUBLED = (
    "COS killed for good",
    "COS held still",
    "COS cut from database",
    "database killed",
    "database hangs",
)
"""Faults of a federation with a standby, beside the others; the first three are over once the standby serves."""

BACK_S = 400.0
"""Within which a run must go on after a fault: many federations share a machine."""

LOOK_S = 0.5
USERS = 24
OFF_S = 600
DISK = "24m"
DISKS = ("cos", "client", "data-owner")
"""Roles whose state folders are disks of this size."""

CUT = ("client/host-0", "client/host-1")
STORES = {"cos": "cos.db", "client": "client.db", "data-owner": "data_owner.db", "thirdparty": "directory.db"}
PAGE = 4096
ROUNDED = 1e-3
"""By how much metrics of a repeated round differ at most."""


DATA = {"synthetic": {"users": USERS, "items": 60, "interactions": 600}}
FEDERATION = {"owners": 1, "hosts": 4, "min_users": 20, "party_timeout_s": 5.0}


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes
    ----------
    kind : str
        One of `KINDS` or `DOUBLED`.
    parties : tuple of str
        Whom it strikes at once; ``postgresql`` is the database.
    seconds : float
        How long it lasts; 0 where it ends with the recovery.
    off_s : int
        By how much a clock is wrong.
    """

    kind: str
    parties: tuple[str, ...]
    seconds: float
    off_s: int = 0


def kinds_in_turn(drawn: random.Random, kinds: Sequence[str]) -> Iterator[str]:
    """Yield kinds without an end, each as often as any other, in an order that is drawn."""
    while True:
        yield from drawn.sample(kinds, len(kinds))


def settings_of(run: str, everybody: bool) -> RunSettings:
    """Return settings of a run of one of `RUNS`; all but EASE's go on for longer than anybody watches."""
    # With these settings key holders decrypt sums over 44 users or more.
    users, fewest = (60, 45) if run == "PrivMVMF" else (USERS, 5)
    common = {"reference": False, "data": DATA, "federation": FEDERATION}
    least = users if everybody else fewest
    rounds = {
        "cohort": users,
        "group": users,
        "min_cohort": least,
        "min_sum": least,
        "passes": 100_000,
        "patience": 0,
        "evaluate_every": 1000,
    }
    match run:
        case "DRIFT":
            own = {
                "system": "drift",
                "secure_sum": "masked",
                "drift": {"form": "shielded", "k_min": 3, "window": 40, "dim": 8, "epochs": 10_000},
                "federation": {**FEDERATION, "owners": 3, "min_users": 5},
            }
        case "EASE":
            own = {
                "system": "ease",
                "secure_sum": "masked",
                "split": {"kind": "leave-last-out"},
                "ease": {"ridge": 50.0, "min_touch": 2, "sketch": 16},
                "rounds": {"passes": 3, "evaluate_every": 3, "min_sum": USERS},
            }
        case "PrivMVMF":
            own = {
                "system": "fedmvmf",
                "secure_sum": "encrypted",
                "split": {"kind": "random"},
                "data": {"synthetic": {"users": users, "items": 60, "interactions": 1500}},
                "encryption": {"bits": 1024, "comparison": True},
                "rounds": rounds,
            }
        case _:
            own = {
                "system": "fedncf",
                "secure_sum": "masked",
                "split": {"kind": "leave-last-out"},
                "rounds": rounds,
            }
    return RunSettings.model_validate({**common, **own})


class Struck(Running):
    """A federation in which hosts have a cable to the COS, parties a disk of their own, one a clock of its own."""

    cables: dict[str, Cable]
    timed: str = ""
    """The party with a clock of its own."""
    disks: contextlib.ExitStack

    def _configure(self) -> Any:
        laid = super()._configure()
        for party, cable in self.cables.items():
            config = self.children[party].folder / "config.toml"
            text = config.read_text()
            assert self._addresses["cos"] in text
            config.write_text(text.replace(self._addresses["cos"], cable.address))
            cable.target = self._addresses["cos"]
        for child in self.children.values():
            # In those of the others there is something already.
            if child.role in DISKS:
                self.disks.enter_context(small_volume(child.state, DISK))
        if self.timed:
            right = self.children[self.timed]
            self.clock = right.folder / "clock"
            self.set_clock(0)
            variables = {
                "LD_PRELOAD": str(FAKETIME),
                "FAKETIME_TIMESTAMP_FILE": str(self.clock),
                "FAKETIME_NO_CACHE": "1",
                "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            }
            wrong = ProgramChild(
                right.role,
                right.name,
                right.folder,
                program=["coterie", "serve", right.role],
                variables=variables,
            )
            self.children[self.timed] = wrong
            self._late = [wrong if child is right else child for child in self._late]
        return laid

    def set_clock(self, off_s: int) -> None:
        """Let the clock of the party be off by some seconds from now on."""
        new = self.clock.with_suffix(".new")
        new.write_text(f"{off_s:+d}s\n")
        new.replace(self.clock)


class StruckDouble(Struck, Doubled):
    """Such a federation whose COS has a standby."""


class Schedule:
    """One federation, and the faults that strike it one after the other.

    Parameters
    ----------
    running : Struck
    run : str
        One of `RUNS`.
    drawn : random.Random
    lasting : tuple of float
        Shortest and longest fault, seconds.
    tell : callable
        Takes the row of each fault.
    database : postgres.Server, optional
    way : Cable, optional
        From the first COS to the database.
    """

    def __init__(
        self,
        running: Struck,
        run: str,
        drawn: random.Random,
        lasting: tuple[float, float],
        tell: Callable[[dict[str, Any]], None],
        database: Any = None,
        way: Cable | None = None,
    ) -> None:
        self._running = running
        self.run = run
        self._drawn = drawn
        self._lasting = lasting
        self._tell = tell
        self._database = database
        self._way = way
        self.ended = ""
        """Why the run ended; empty while it goes on."""
        self.short = run == "EASE"

    # --- what there is to see ----------------------------------------------------------------------------------

    async def state(self) -> wire.RunState | None:
        """Ask the orchestration server for the run's state; None while it does not answer."""
        try:
            async with asyncio.timeout(10):
                return await self._running.run_state()
        except (CoterieError, TimeoutError):
            return None

    async def there(self) -> wire.RunState:
        """Return the run's state as soon as there is an answer."""
        deadline = time.monotonic() + BACK_S
        while (state := await self.state()) is None:
            if time.monotonic() > deadline:
                raise AssertionError(f"{self.run}: the COS does not answer; {self._running.last_words()}")
            await asyncio.sleep(LOOK_S)
        return state

    async def steps(self, more: int, least: int = 0) -> tuple[float, str]:
        """Wait until so many further versions are made.

        Returns
        -------
        float
            How long it took, seconds; infinite when it did not come to it.
        str
            What was lost: versions below ``least``, which had been made before.
        """
        begun, first, lost = time.monotonic(), None, ""
        while time.monotonic() - begun < BACK_S:
            state = await self.state()
            if state is not None:
                if state.phase == wire.RUN_PHASE_FAILED or (
                    state.phase == wire.RUN_PHASE_DONE and not self.short
                ):
                    self.ended = state.reason or "done"
                    return math.inf, lost
                if state.version < least:
                    lost = f"version {state.version} after version {least}"
                first = state.version if first is None else first
                if state.phase == wire.RUN_PHASE_DONE or state.version >= first + more:
                    return time.monotonic() - begun, lost
            await asyncio.sleep(LOOK_S)
        return math.inf, lost

    # --- faults ------------------------------------------------------------------------------------------------

    def kinds(self) -> tuple[str, ...]:
        """Return the kinds of faults that this federation can have."""
        found = [kind for kind in KINDS if kind != "clock wrong" or self._running.timed]
        return (*found, *(DOUBLED if self._database is not None else ()))

    def draw(self, kind: str) -> Fault:
        """Draw a fault of a kind; the logarithm of its time is uniform."""
        drawn, children = self._drawn, self._running.children
        shortest, longest = self._lasting
        seconds = round(math.exp(drawn.uniform(math.log(shortest), math.log(longest))), 1)
        everybody = sorted(children)
        match kind:
            case "two killed":
                return Fault(kind, tuple(sorted(drawn.sample(everybody, 2))), seconds)
            case "power loss":
                return Fault(kind, tuple(everybody), seconds)
            case "cut off":
                return Fault(kind, (drawn.choice(sorted(self._running.cables)),), seconds)
            case "disk full":
                return Fault(
                    kind, (drawn.choice([p for p in everybody if children[p].role in DISKS]),), seconds
                )
            case "clock wrong":
                return Fault(kind, (self._running.timed,), seconds, drawn.choice((-1, 1)) * OFF_S)
            case "store damaged":
                stored = [
                    p
                    for p in everybody
                    if children[p].role in STORES and (self._database is None or children[p].role != "cos")
                ]
                return Fault(kind, (drawn.choice(stored),), seconds)
            case "COS killed for good" | "COS held still":
                return Fault(kind, ("office",), 0)
            case "COS cut from database":
                return Fault(kind, (FIRST,), 0)
            case "database killed" | "database hangs":
                return Fault(kind, ("postgresql",), seconds)
            case _:
                return Fault(kind, (drawn.choice(everybody),), seconds)

    @contextlib.asynccontextmanager
    async def struck(self, fault: Fault) -> AsyncIterator[str]:
        """Let a fault begin, and end it; yields what was wrong with how it was taken, if anything."""
        running, children = self._running, self._running.children
        match fault.kind:
            case "killed" | "two killed" | "power loss":
                for party in fault.parties:
                    children[party].kill()
                yield ""
                for party in fault.parties:
                    children[party].start()
            case "held still":
                running.signal(fault.parties[0], signal.SIGSTOP)
                yield ""
                running.signal(fault.parties[0], signal.SIGCONT)
            case "cut off":
                running.cables[fault.parties[0]].cut()
                yield ""
                running.cables[fault.parties[0]].mend()
            case "disk full":
                ballast = await asyncio.to_thread(fill, children[fault.parties[0]].state)
                yield ""
                ballast.unlink()
            case "clock wrong":
                running.set_clock(fault.off_s)
                yield ""
                running.set_clock(0)
            case "store damaged":
                yield await self.damaged(fault.parties[0])
            case "database killed":
                self._database.stop()
                yield ""
                await asyncio.to_thread(self._database.start)
            case "database hangs":
                with self._database.hung():
                    yield ""
            case _:
                raise AssertionError(fault.kind)

    async def damaged(self, party: str) -> str:
        """Kill a service, damage its store, see it refuse to start, and give it back its files."""
        child = self._running.children[party]
        child.kill()
        store = child.state / STORES[child.role]
        kept = child.folder / "kept"
        kept.mkdir()
        for path in child.state.glob(f"{store.name}*"):
            shutil.copy2(path, kept / path.name)
        # What the log holds is brought into the file, as a service that starts does before it looks.
        for path in child.state.glob(f"{store.name}-*"):
            path.unlink()
        with store.open("r+b") as file:
            pages = store.stat().st_size // PAGE
            file.seek(PAGE * self._drawn.randrange(1, pages))
            file.write(bytes(PAGE))
        said = child.log.stat().st_size
        child.start()
        deadline = time.monotonic() + 60
        while child.alive and time.monotonic() < deadline:
            await asyncio.sleep(LOOK_S)
        text = child.log.read_bytes()[said:].decode(errors="replace")
        found = "" if not child.alive and store.name in text else f"{party} began with a damaged store"
        child.kill()
        for path in child.state.glob(f"{store.name}*"):
            path.unlink()
        for path in kept.iterdir():
            shutil.copy2(path, child.state / path.name)
        shutil.rmtree(kept)
        child.start()
        return found

    async def office(self) -> str:
        """Return which COS serves."""
        deadline = time.monotonic() + BACK_S
        while time.monotonic() < deadline:
            for party in (FIRST, SECOND):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(5):
                        if await self._running.health(party) == "SERVING":
                            return party
            await asyncio.sleep(LOOK_S)
        raise AssertionError(f"{self.run}: no COS serves; {self._running.last_words()}")

    async def taken_over(self, kind: str, least: int) -> tuple[tuple[str, ...], float, str]:
        """Take the COS in office away until the run has gone on without it.

        Returns
        -------
        tuple of str
            Which COS it was.
        float
            How long it took from the fault on, seconds.
        str
            What was lost.
        """
        running = self._running
        if kind == "COS cut from database":
            party = FIRST
            assert self._way is not None
            self._way.cut()
            took, lost = await self.steps(2, least)
            self._way.mend()
        elif kind == "COS killed for good":
            party = await self.office()
            running.children[party].kill()
            took, lost = await self.steps(2, least)
            running.children[party].start()
        else:
            party = await self.office()
            running.signal(party, signal.SIGSTOP)
            took, lost = await self.steps(2, least)
            running.signal(party, signal.SIGCONT)
        return (party,), took, lost

    async def endure(self, fault: Fault) -> bool:
        """Let a fault happen and wait until the run has gone on; return whether it has."""
        before = await self.there()
        wrong = waiting = ""
        parties = fault.parties
        if fault.kind in DOUBLED[:3]:
            parties, took, lost = await self.taken_over(fault.kind, before.version)
        else:
            async with self.struck(fault) as wrong:
                await asyncio.sleep(fault.seconds)
                meanwhile = await self.state()
                waiting = "" if meanwhile is None else meanwhile.waiting
            took, lost = await self.steps(1 if self.short else 2, before.version)
        gone = [party for party, child in self._running.children.items() if not child.alive]
        row = {
            "run": self.run,
            **asdict(fault),
            "parties": parties,
            "waiting": waiting,
            "recovered_s": round(took, 1) if math.isfinite(took) else None,
            "lost": lost or wrong,
            "ended": self.ended,
            "processes_that_ended": gone,
        }
        self._tell(row)
        # A service that ended by itself is one that an orchestrator of containers starts again: told, and not hidden.
        for party in gone:
            self._running.children[party].start()
        return math.isfinite(took)

    # --- the end -----------------------------------------------------------------------------------------------

    async def what_is_left(self) -> list[str]:
        """Stop everything; return what is wrong with the run's report, its processes, its state folders."""
        running = self._running
        await self.there()
        if self.short:
            deadline = time.monotonic() + BACK_S
            while (await self.there()).phase != wire.RUN_PHASE_DONE and time.monotonic() < deadline:
                await asyncio.sleep(LOOK_S)
        report = await running.report()
        await running.stop()
        found = of_ease(running, report) if self.short else []
        numbers = [one["round"] for one in report["rounds"]]
        if numbers != sorted(set(numbers)):
            found.append("a round ended twice")
        versions = [
            one["version"]
            for one in report["rounds"]
            if one["purpose"] in ("train", "window") and not one["reason"]
        ]
        if versions != list(range(1, len(versions) + 1)):
            found.append(f"versions are not without a gap: {len(versions)} of them up to {max(versions)}")
        for party, child in running.children.items():
            status = child.process.returncode if child.process is not None else 0
            # Asked to stop while it started, after the last fault.
            if status not in (0, -signal.SIGTERM):
                found.append(f"{party} ended with status {status}: {child.last_words()}")
            found += [
                f"{party}: {one.check}: {one.problem}"
                for one in await asyncio.to_thread(check_state, child.state)
                if one.status == "fail"
            ]
        return found


def of_ease(running: Running, report: dict[str, Any]) -> list[str]:
    """Return what is wrong with the end of a run of EASE, beside a run in one process."""
    if report["phase"] != "done":
        return [f"the run ended as {report['phase']}: {report['reason']}"]
    clear = running.settings.model_copy(update={"secure_sum": "clear"})
    alone = train_in_process(clear, running.feed, run_id="test", seed=0, see=lambda event: None).known
    theirs, ours = (known["history"][-1]["metrics"] for known in (alone, report))
    # Metrics are rounded at random, by the number of their round: another one after an abandoned round.
    least = ROUNDED if report["abandoned"] else 0.0
    same = theirs.keys() == ours.keys() and all(abs(theirs[name] - ours[name]) <= least for name in ours)
    return [] if same else [f"metrics differ from those of one process: {theirs} and {ours}"]


class Endurance:
    """Federations side by side, and rows of what they endured.

    Parameters
    ----------
    folder : Path
    lasting : tuple of float
        Shortest and longest fault, seconds.
    table : Path, optional
        File for the rows, JSON; written anew after each fault.
    """

    def __init__(self, folder: Path, lasting: tuple[float, float], table: Path | None) -> None:
        self._folder = folder
        self._lasting = lasting
        self._table = table
        self.faults: list[dict[str, Any]] = []
        self.left: list[dict[str, Any]] = []

    def save(self) -> None:
        """Write the rows."""
        if self._table is not None:
            content = {"faults": self.faults, "federations": self.left}
            self._table.write_text(json.dumps(content, indent=1) + "\n")

    def _tell(self, row: dict[str, Any]) -> None:
        self.faults.append(row)
        print(json.dumps(row), flush=True)
        self.save()

    @contextlib.asynccontextmanager
    async def federation(
        self, run: str, everybody: bool, number: str, drawn: random.Random
    ) -> AsyncIterator[Schedule]:
        """Start a federation of a kind in a folder of its own."""
        settings = settings_of(run, everybody)
        feed = make_feed(settings, load(settings), 0)
        folder = self._folder / number
        async with contextlib.AsyncExitStack() as stack:
            # Disks are the last to go.
            disks = stack.enter_context(contextlib.ExitStack())
            if run == "FedNCF, standby":
                database = stack.enter_context(postgres.running())
                way = await stack.enter_async_context(Cable(f"127.0.0.1:{database.port}"))
                keys = database.keys(database.database(), timeout_s=5.0)
                running: Struck = StruckDouble(settings, feed, folder, database=keys, way=way.address)
                running.cables = {}
            else:
                database = way = None
                running = Struck(settings, feed, folder)
                running.cables = {party: await stack.enter_async_context(Cable()) for party in CUT}
            running.disks = disks
            if FAKETIME is not None:
                timed = ["client/host-2", "thirdparty/directory"]
                running.timed = drawn.choice(timed if database else [*timed, FIRST])
            await stack.enter_async_context(running)
            await running.start()
            yield Schedule(running, run, drawn, self._lasting, self._tell, database, way)

    async def endure(self, run: str, everybody: bool, count: int, seed: str) -> None:
        """Strike federations of a kind with so many faults: one federation, or as many as runs of EASE it takes."""
        drawn = random.Random(seed)
        turn: Iterator[str] | None = None
        done = tries = 0
        while done < count:
            tries += 1
            number = f"{seed}-{tries}".replace(" ", "-")
            async with self.federation(run, everybody, number, drawn) as one:
                kinds = [kind for kind in one.kinds() if kind != "cut off" or one._running.cables]
                turn = turn or kinds_in_turn(drawn, kinds)
                if not one.short and math.isinf((await one.steps(2))[0]):
                    raise AssertionError(f"{run}: no version before any fault; {one._running.last_words()}")
                for _ in range(min(2, count - done) if one.short else count - done):
                    if (await one.there()).phase == wire.RUN_PHASE_DONE:
                        break
                    done += 1
                    kind = next(turn)
                    if not await one.endure(one.draw(kind if kind in kinds else "killed")):
                        print(one._running.last_words(), flush=True)
                        break
                problems = [] if one.ended else await one.what_is_left()
            self.left.append({"run": run, "number": number, "ended": one.ended, "problems": problems})
            print(json.dumps(self.left[-1]), flush=True)
            self.save()
            if not problems and not one.ended:
                shutil.rmtree(self._folder / number, ignore_errors=True)

    async def all_of(self, runs: Sequence[str], faults: int, seed: int, side_by_side: int) -> None:
        """Train federations side by side, each under its share of the faults."""
        shares = [faults // side_by_side + (n < faults % side_by_side) for n in range(side_by_side)]
        found = await asyncio.gather(
            *(
                self.endure(runs[n % len(runs)], n // len(runs) % 2 == 0, share, f"{seed} {n}")
                for n, share in enumerate(shares)
            ),
            return_exceptions=True,
        )
        for error in found:
            if isinstance(error, BaseException):
                print("".join(traceback.format_exception(error)), file=sys.stderr, flush=True)
                self.left.append({"run": "", "number": "", "ended": "", "problems": [repr(error)[:4000]]})
        self.save()

    @property
    def well(self) -> bool:
        """Whether no run ended, nothing was lost, and every fault was recovered from."""
        return not any(one["ended"] or one["problems"] for one in self.left) and not any(
            row["ended"] or row["lost"] or row["recovered_s"] is None for row in self.faults
        )


def summary(rows: Sequence[dict[str, Any]], by: str = "kind") -> str:
    """Return a table of the faults in Markdown, by kind of fault or by run."""
    lines = [
        f"| {by} | faults | longest, s | recovery, median s | recovery, worst s | lost | runs ended |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    names = sorted({row[by] for row in rows}, key=[*KINDS, *DOUBLED, *RUNS].index)
    for name in (*names, "all"):
        those = [row for row in rows if name in (row[by], "all")]
        back = [math.inf if row["recovered_s"] is None else row["recovered_s"] for row in those]
        lost = sum(bool(row["lost"]) for row in those)
        ended = sum(bool(row["ended"]) for row in those)
        longest = max(row["seconds"] for row in those)
        lines.append(
            f"| {name} | {len(those)} | {longest:.1f} | {statistics.median(back):.1f} | {max(back):.1f} "
            f"| {lost} | {ended} |"
        )
    return "\n".join(lines)


def main() -> int:
    """Run the faults that the command line asks for and return the exit status."""
    parser = command_line(__doc__, RUNS, faults=500, side_by_side=10, shortest=1.0, longest=15.0)
    parser.add_argument("--folder", type=Path, help="for the federations; those with a finding are kept")
    options = parser.parse_args()
    if os.geteuid() != 0:
        print("error: to fill a disk takes root, to mount a small one", file=sys.stderr)
        return 2
    # Training in many federations at once must leave the machine usable.
    os.nice(10)
    with contextlib.ExitStack() as stack:
        folder = options.folder or Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="coterie-", ignore_cleanup_errors=True))
        )
        schedule = Endurance(folder, (options.shortest, options.longest), options.table)
        asyncio.run(schedule.all_of(options.runs, options.faults, options.seed, options.side_by_side))
    print(summary(schedule.faults), summary(schedule.faults, "run"), sep="\n\n")
    return int(not schedule.well or len(schedule.faults) < options.faults)


if __name__ == "__main__":
    sys.exit(main())
