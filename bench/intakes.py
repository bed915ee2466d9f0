"""Measure replicas of the COS: what a contribution costs each process, with one process, a pair, one intake and two.

The first replica of an operator's single process with a file is a pair: a process with PostgreSQL, and its standby.

The COS is real processes with PostgreSQL; parties are real connections by mutual TLS, each with a certificate and a
user of its own, played by processes that share the machine with the COS.  Each party answers each round with one
contribution to a clear sum, through the calls that a device makes.  So wall times say little about intakes on machines
of their own; the CPU time that each process takes for a contribution says where the bound is.

The variable ``COTERIE_BENCH_CONNECTIONS`` sets the number of parties, 2,000 when it is absent, and
``COTERIE_BENCH_INTAKES`` the numbers of intakes, ``0,1,2`` when it is absent.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from bench.connections import resident
from bench.rounds import cpu_of
from bench.rows import Ask, Row, higher, lower
from bench.submit import Site
from coterie.config.run import RunSettings
from coterie.launch.authority import make_token
from coterie.launch.children import Child, free_port
from coterie.parties.party import Party, Registrant

_CONNECTIONS = int(os.environ.get("COTERIE_BENCH_CONNECTIONS", "2000"))
_STAGES = tuple(int(number) for number in os.environ.get("COTERIE_BENCH_INTAKES", "0,1,2").split(","))
_COHORT = 500
"""Members of a sum: each is told of all of them, so that a round's bytes grow with the square."""
_PROCESSES = 2
"""Processes that play parties."""
_RUN = "intakes"
_ITEMS = 200
_ROUNDS = 3
_IDLE_S = 40.0
"""Time over which idle connections are measured, seconds: parties poll each 20 s."""
_WAIT_S = 600.0
_MANY = 100
"""Parties from which on the phases are told on standard error."""
_WAITS = "waits as its standby"
_STALL_S = 20.0
"""Time after which a round goes on that parties are asked in who have no connection any more, seconds."""
_TRIES = 5
"""Most rounds in which only some parties are asked, and that are not measured, before the measurement fails."""
_LIMITS = {"connections": 16_384, "calls": 32_768}


@dataclass
class _Costs:
    """CPU seconds of a round by process, and its wall seconds; one entry for each measured round."""

    cpu: list[Mapping[str, float]] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)

    def each(self, members: int) -> dict[str, float]:
        """Return the median CPU seconds of a contribution by process."""
        return {name: statistics.median(one[name] for one in self.cpu) / members for name in self.cpu[0]}

    def total(self, members: int) -> float:
        """Return the CPU seconds of a contribution of all processes but the parties."""
        return sum(spent for name, spent in self.each(members).items() if name != "parties")

    def bound(self, members: int) -> tuple[str, float]:
        """Return the process of the COS that takes the most CPU for a contribution, and how much, seconds."""
        each = {
            name: spent
            for name, spent in self.each(members).items()
            if name not in ("parties", "database", "standby")
        }
        name = max(each, key=lambda one: each[one])
        return name, each[name]


def _shared_settings(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return what all processes of the COS have in their configurations, a port of each its own apart."""
    return {"metrics": f"127.0.0.1:{free_port()}", "limits": _LIMITS, "database": dict(keys)}


class _Senders:
    """A process that plays parties.

    Parameters
    ----------
    news : asyncio.Event
        Set when the process has told something.
    """

    def __init__(self, news: asyncio.Event) -> None:
        self.news = news
        self.round = self.asked = self.done = 0
        self.refused: list[str] = []
        self._did: asyncio.Queue[str] = asyncio.Queue()

    async def start(self) -> None:
        """Start the process, which waits to be told what it plays."""
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "bench.senders", stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._reading = asyncio.create_task(self._read())

    def play(self, told: Mapping[str, Any]) -> None:
        """Say which parties the process plays; it then waits for commands."""
        self._write(told)

    def _write(self, said: Any) -> None:
        if self.process.stdin is None:
            raise AssertionError("the process has a pipe")
        self.process.stdin.write(json.dumps(said).encode() + b"\n")

    async def _read(self) -> None:
        if self.process.stdout is None:
            raise AssertionError("the process has a pipe")
        try:
            while line := await self.process.stdout.readline():
                told = json.loads(line)
                if "did" in told:
                    self._did.put_nowait(told["did"])
                self.round, self.asked = told.get("round", self.round), told.get("asked", self.asked)
                self.done = told.get("done", self.done)
                self.refused += told.get("refused", ())
                self.news.set()
        finally:
            self._did.put_nowait("end")

    def go(self, **how: Any) -> None:
        """Let the parties answer the present round."""
        self.done = 0
        self._write(["go", how])

    async def do(self, command: str, value: Any = None) -> None:
        """Do something, and return when it is done."""
        self._write([command, value])
        async with asyncio.timeout(_WAIT_S):
            if (did := await self._did.get()) != command:
                raise RuntimeError(f"a process that plays parties was to {command}, and says: {did}")

    async def stop(self) -> None:
        """End the process."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            await asyncio.wait_for(self.process.wait(), 30.0)
        except TimeoutError:
            self.process.kill()
            await self.process.wait()
        await self._reading


class _Bench:
    """The processes of a measurement.

    Parameters
    ----------
    folder : Path
    site : Site
    database : Server, optional
        The tests' server of PostgreSQL; absent where the COS is one process with a file.
    keys : mapping
        How to find it.
    senders : sequence of _Senders
        Processes that play the parties.
    members : int
        Number of parties.
    """

    def __init__(
        self,
        folder: Path,
        site: Site,
        database: Any,
        keys: Mapping[str, Any],
        senders: Sequence[_Senders],
        members: int,
    ) -> None:
        self._folder, self._site, self._database = folder, site, database
        self._keys, self.members, self.cohort = keys, members, min(members, _COHORT)
        self._senders = senders
        self._news = senders[0].news
        self.intakes: list[Child] = []
        self.before: dict[str, float] = {}
        """Bytes resident at each intake before it had connections."""
        self._spare = f"127.0.0.1:{free_port()}"
        self._standby: Child | None = None
        self._second: Child | None = None
        self._owner: asyncio.Task[None] | None = None
        self._round = self._gone = 0
        self._began = time.monotonic()

    # --- processes ---------------------------------------------------------------------------------------------

    async def enrolled(self, settings: RunSettings) -> None:
        """Enrol all parties, and the one data owner."""
        names = [f"device-{number}" for number in range(self.members)]
        for name in names:
            make_token(self._site.authority, "client", name, 1, self._folder / name / "token")
        enrolment = {
            key: str(value) if isinstance(value, Path) else value
            for key, value in self._site.enrolment("client", names[0], 1).items()
        }
        for number, one in enumerate(self._senders):
            told = {
                "run": _RUN,
                "folder": str(self._folder),
                "names": names[number :: len(self._senders)],
                "enrol": enrolment,
                "settings": settings.model_dump(mode="json", exclude_unset=True),
                "items": _ITEMS,
            }
            one.play(told)
        await asyncio.gather(*(one.do("enrol") for one in self._senders))

    async def begin(self, settings: RunSettings) -> None:
        """Begin the run, whose data owner is played here."""
        await self._site.begin(settings, users=self.members)
        owner, owners, _ = await self._site.party("data-owner", "catalogue", 1)
        of = owners[0]
        keys = [f"item-{n}" for n in range(_ITEMS)]
        await owner.register(
            [Registrant(of.identity, of.bundle, of.kind, "all", "127.0.0.1:1", "none", keys)]
        )
        self._owner = asyncio.create_task(_waiting(owner))

    async def be(self, intakes: int) -> None:
        """Let the COS be one process, or a coordinator with so many intakes, and all parties connect to it."""
        await asyncio.gather(*(one.do("close") for one in self._senders))
        # A COS that ended asks again in the round that it was in: nobody was let go in it who comes back.
        self._gone = 0
        for one in self._senders:
            one.round = one.asked = 0
        if intakes and not self.intakes:
            if self._second is not None:
                # First, because it would take over.
                await self._second.stop()
                self._second = None
            if self.members < _MANY:
                # It would wait for calls that end by themselves.
                await asyncio.to_thread(self._site.cos.kill)
            await self._site.cos.stop()
            self._site.configure_cos(
                self._site.cos, self._site.address, part="coordinator", standby=True, **self._shared()
            )
            self._site.cos.start()
            if self.members < _MANY:
                # Nothing is measured, and processes that start together start sooner.
                self._start_intake()
                self._start_standby()
        while len(self.intakes) < intakes:
            self._start_intake()
        await self._serving(*(self.intakes[:intakes] or [self._site.cos]))
        for child in self.intakes:
            self.before.setdefault(child.folder.name, resident(_pid(child)))
        addresses = [_address(one) for one in self.intakes[:intakes]] or [self._site.address]
        await asyncio.gather(*(one.do("connect", addresses) for one in self._senders))

    def _shared(self) -> dict[str, Any]:
        return _shared_settings(self._keys)

    def _start_intake(self) -> None:
        child = Child("cos", "cos", self._folder / f"intake-{len(self.intakes)}")
        coordinator = [self._site.address, self._spare]
        self._site.configure_cos(
            child, f"127.0.0.1:{free_port()}", part="intake", coordinator=coordinator, **self._shared()
        )
        child.start()
        self.intakes.append(child)

    def _start_standby(self) -> Child:
        if self._standby is None:
            self._standby = self._waiting_cos("standby", "coordinator")
        return self._standby

    def _waiting_cos(self, folder: str, part: str) -> Child:
        child = Child("cos", "cos", self._folder / folder)
        self._site.configure_cos(child, self._spare, part=part, standby=True, **self._shared())
        child.start()
        return child

    async def pair(self) -> None:
        """Let a standby wait beside the one process."""
        self._second = self._waiting_cos("second", "both")
        await self._waits(self._second)

    async def _serving(self, *children: Child) -> None:
        for child in children:
            deadline = time.monotonic() + _WAIT_S
            while not await asyncio.to_thread(_healthy, child):
                child.require_alive()
                if time.monotonic() > deadline:
                    raise RuntimeError(f"{child.folder.name} does not serve: {child.last_words()}")
                await asyncio.sleep(0.1)

    def memory(self) -> float:
        """Return the bytes that a connection takes at an intake, the mean over intakes."""
        more = sum(resident(_pid(child)) - self.before[child.folder.name] for child in self.intakes)
        return more / self.members

    def files(self) -> dict[str, int]:
        """Return the open files of each process of the COS."""
        children = {"coordinator": self._site.cos, **{child.folder.name: child for child in self.intakes}}
        return {
            name: len(list(Path(f"/proc/{_pid(child)}/fd").iterdir())) for name, child in children.items()
        }

    def tell(self, what: str) -> None:
        """Say on standard error what has been reached, where that takes long."""
        if self.members >= _MANY:
            print(f"{time.monotonic() - self._began:.0f} s: {what}", file=sys.stderr, flush=True)

    async def stop(self) -> None:
        """End the intakes, the standby and the owner."""
        if self._owner is not None:
            self._owner.cancel()
        others = [child for child in (self._standby, self._second) if child is not None]
        await asyncio.gather(*(child.stop() for child in (*self.intakes, *others)))

    # --- costs -------------------------------------------------------------------------------------------------

    def _spent(self) -> dict[str, float]:
        """Return the CPU seconds of each process so far."""
        coordinator = self._site.cos
        children = {("coordinator" if self.intakes else "cos"): coordinator}
        children |= {child.folder.name: child for child in self.intakes}
        if self._second is not None:
            children["standby"] = self._second
        found = {name: cpu_of(_pid(child)) for name, child in children.items()}
        if self._database is not None:
            found["database"] = _with_children(self._database.processes())
        found["parties"] = sum(cpu_of(one.process.pid) for one in self._senders)
        return found

    # --- rounds ------------------------------------------------------------------------------------------------

    async def asked(self) -> bool:
        """Wait until the parties are asked in a round that they were not let go; return whether all of them are."""
        heard = time.monotonic()
        deadline = heard + _WAIT_S
        seen = 0
        while True:
            self._news.clear()
            newest = max(one.round for one in self._senders)
            asked = (
                sum(one.asked for one in self._senders if one.round == newest) if newest > self._gone else 0
            )
            if asked != seen:
                seen, heard = asked, time.monotonic()
            if asked == self.cohort or (asked and time.monotonic() > heard + _STALL_S):
                self._round = newest
                return asked == self.cohort
            if time.monotonic() > deadline:
                raise RuntimeError(f"only {asked} of {self.cohort} parties are asked; {self._words()}")
            try:
                await asyncio.wait_for(self._news.wait(), 1.0)
            except TimeoutError:
                continue

    async def all_asked(self) -> None:
        """Let rounds pass in which only some parties are asked, until one asks all of them."""
        for _ in range(_TRIES):
            if await self.asked():
                return
            self.go(whole=True)
        raise RuntimeError(f"none of {_TRIES} rounds asked all {self.cohort} parties; {self._words()}")

    def _words(self) -> str:
        said = [child.last_words() for child in (self._site.cos, *self.intakes)]
        said += [one.refused[0] for one in self._senders if one.refused]
        return "; ".join(said)

    def go(self, **how: Any) -> None:
        """Let all parties answer the present round."""
        self._gone = self._round
        for one in self._senders:
            one.go(**how)

    async def done(self, members: int) -> None:
        """Wait until so many contributions are acknowledged."""
        deadline = time.monotonic() + _WAIT_S
        while (done := sum(one.done for one in self._senders)) < members:
            self._news.clear()
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"only {done} of {members} contributions are acknowledged; {self._words()}"
                )
            try:
                await asyncio.wait_for(self._news.wait(), 1.0)
            except TimeoutError:
                continue
        refused = [why for one in self._senders for why in one.refused]
        if refused:
            raise RuntimeError(f"{len(refused)} contributions were refused: {refused[0]}")

    async def measured(self, rounds: int, *, whole: bool) -> _Costs:
        """Measure rounds: all of each, or from the first contribution to the last acknowledgement."""
        costs = _Costs()
        for _ in range(rounds + _TRIES):
            await self.all_asked()
            before, began = self._spent(), time.perf_counter()
            self.go(whole=whole)
            complete = True
            if whole:
                complete = await self.asked()
            else:
                await self.done(self.cohort)
            took, after = time.perf_counter() - began, self._spent()
            if complete:
                costs.wall.append(took)
                costs.cpu.append({name: after[name] - before[name] for name in after})
            if len(costs.wall) == rounds:
                return costs
        raise RuntimeError(
            f"{len(costs.wall)} of {rounds} rounds asked all {self.cohort} parties; {self._words()}"
        )

    async def idle(self, seconds: float) -> dict[str, float]:
        """Return the share of a core that each process takes while a round waits for one party of each process."""
        await self.all_asked()
        self.go(whole=True, back=1)
        await asyncio.sleep(min(seconds, 2.0))
        before, began = self._spent(), time.perf_counter()
        await asyncio.sleep(seconds)
        took, after = time.perf_counter() - began, self._spent()
        return {name: (after[name] - before[name]) / took for name in after}

    async def taken_over(self) -> float:
        """Kill the coordinator in the middle of a sum; return the seconds until all parties are asked in the next."""
        await self._waits(self._start_standby())
        self.go(whole=True)
        await self.all_asked()
        back = self.cohort // (4 * len(self._senders))
        self.go(whole=False, back=back)
        await self.done(self.cohort - back * len(self._senders))
        began = time.perf_counter()
        await asyncio.to_thread(self._site.cos.kill)
        self.go(whole=True)
        if not await self.asked():
            raise RuntimeError(f"only some parties are asked after the take-over; {self._words()}")
        return time.perf_counter() - began

    async def _waits(self, standby: Child) -> None:
        deadline = time.monotonic() + _WAIT_S
        while not standby.log.exists() or _WAITS not in standby.log.read_text():
            standby.require_alive()
            if time.monotonic() > deadline:
                raise RuntimeError(f"the standby does not start: {standby.last_words()}")
            await asyncio.sleep(0.1)


async def _waiting(owner: Party) -> None:
    """Poll as a party does that has nothing to do."""
    async for _ in owner.tasks():
        owner.idle()


def _address(child: Child) -> str:
    return str(tomllib.loads((child.folder / "config.toml").read_text())["listen"])


def _healthy(child: Child) -> bool:
    metrics = tomllib.loads((child.folder / "config.toml").read_text())["metrics"]
    try:
        with urllib.request.urlopen(f"http://{metrics}/healthz", timeout=5) as page:
            return bool(page.status == 200)
    except OSError:
        return False


def _pid(child: Child) -> int:
    if child.process is None:
        raise RuntimeError(f"{child.folder.name} was not started")
    return child.process.pid


def _with_children(pids: Sequence[int]) -> float:
    """Return the CPU seconds of processes, the first of which is the parent of the others, and of those that ended."""
    found = 0.0
    for pid in pids:
        try:
            found += cpu_of(pid)
        except OSError:
            # It has ended since.
            continue
    ended = Path(f"/proc/{pids[0]}/stat").read_text().rpartition(")")[2].split()[13:15]
    return found + sum(map(int, ended)) / os.sysconf("SC_CLK_TCK")


def _settings(members: int) -> RunSettings:
    cohort = min(members, _COHORT)
    return RunSettings.model_validate(
        {
            "system": "fedncf",
            "secure_sum": "clear",
            "reference": False,
            "fedncf": {"model": "gmf", "dim": 8, "touch": "exact"},
            "rounds": {
                "cohorts": "random",
                "cohort": cohort,
                "passes": 1000,
                "evaluate_every": 1000,
                "party_per_user": True,
                "min_cohort": min(cohort, 20),
                "min_sum": min(cohort, 20),
                "step_timeout_s": 600,
            },
            "federation": {"hosts": 1, "party_timeout_s": 600},
        }
    )


@dataclass
class _Measured:
    alone: tuple[_Costs, _Costs] | None = None
    """Whole rounds, and contributions alone, of one process with a file."""
    whole: dict[int, _Costs] = field(default_factory=dict)
    """Whole rounds, by the number of intakes; 0: a pair, one process and its standby."""
    apart: dict[int, _Costs] = field(default_factory=dict)
    """Contributions alone, likewise."""
    idle: dict[str, float] = field(default_factory=dict)
    memory: float = 0.0
    files: dict[str, int] = field(default_factory=dict)
    taken_over: float = 0.0


async def _begun(stack: AsyncExitStack, ask: Ask, members: int, server: Any = None, **cos: Any) -> _Bench:
    """Return the processes of a measurement whose run has begun; without a database the COS has a file."""
    settings, keys = _settings(members), cos.get("database", {})
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    news = asyncio.Event()
    senders = [_Senders(news) for _ in range(ask.size(_PROCESSES, 1))]
    for one in senders:
        # They import while the services start.
        await one.start()
        stack.push_async_callback(one.stop)
    site = Site(folder, _RUN, part="both", **cos)
    await stack.enter_async_context(site)
    bench = _Bench(folder, site, server, keys, senders, members)
    await bench.enrolled(settings)
    bench.tell("all are enrolled")
    await bench.begin(settings)
    bench.tell("the run has begun")
    stack.push_async_callback(bench.stop)
    return bench


async def _costs(bench: _Bench, rounds: int) -> tuple[_Costs, _Costs]:
    """Return the costs of whole rounds and of contributions alone."""
    await bench.measured(1, whole=True)
    found = await bench.measured(rounds, whole=True), await bench.measured(rounds, whole=False)
    for costs in found:
        bench.tell(f"CPU ms for each: {_per(costs, bench.cohort)}; {statistics.median(costs.wall):.2f} s")
    return found


async def _measured(ask: Ask, members: int, database: Any) -> _Measured:
    rounds, seconds = ask.size((_ROUNDS, _IDLE_S), (1, 0.2))
    found = _Measured()
    if 0 in _STAGES:
        async with AsyncExitStack() as stack:
            metrics = f"127.0.0.1:{free_port()}"
            bench = await _begun(stack, ask, members, metrics=metrics, limits=_LIMITS)
            await bench.be(0)
            bench.tell("all are connected, one process with a file")
            found.alone = await _costs(bench, rounds)
    keys = database.keys(database.database(), timeout_s=5.0)
    async with AsyncExitStack() as stack:
        bench = await _begun(stack, ask, members, database, standby=True, **_shared_settings(keys))
        for intakes in _STAGES:
            await bench.be(intakes)
            if not intakes:
                await bench.pair()
            bench.tell(f"all are connected, {intakes} intakes")
            found.whole[intakes], found.apart[intakes] = await _costs(bench, rounds)
        found.idle = await bench.idle(seconds)
        found.memory = bench.memory()
        found.files = bench.files()
        bench.tell(f"idle, of a core: {found.idle}; {found.memory:.0f} bytes for each; files {found.files}")
        found.taken_over = await bench.taken_over()
    return found


def _per(costs: _Costs, members: int) -> str:
    each = costs.each(members)
    return ", ".join(f"{name} {1e3 * spent:.2f}" for name, spent in each.items())


def rows(ask: Ask) -> Iterator[Row]:
    """Measure one process with a file, a pair over a database, one intake and two."""
    members = ask.size(_CONNECTIONS, 4)
    cohort = min(members, _COHORT)
    postgres: Any = import_module("tests.postgres")
    with postgres.running() as database:
        found = asyncio.run(_measured(ask, members, database))
    for position, (name, costs) in enumerate((("round", found.whole), ("contribution", found.apart))):
        what = (
            "the contributions alone"
            if name == "contribution"
            else "whole rounds: contribution, plan, model, poll"
        )
        bounds = {intakes: costs[intakes].bound(cohort) for intakes in _STAGES}
        for intakes, (busiest, spent) in bounds.items():
            wall = statistics.median(costs[intakes].wall)
            yield Row(
                f"intakes.{name}.{intakes}",
                cohort / wall,
                None,
                "/s",
                None,
                f"{what}, {cohort} of {members} connections, {intakes or 'no'} intake{'s' * (intakes > 1)}, parties on "
                f"the same {os.cpu_count()} cores; most takes {busiest}, {1e3 * spent:.2f} CPU ms for each; of all: "
                f"{_per(costs[intakes], cohort)}",
            )
        if {1, 2} <= bounds.keys():
            yield higher(
                f"intakes.{name}.gain",
                1 / bounds[2][1],
                1 / bounds[1][1],
                "/CPU s",
                f"{what}: for each CPU second of the busiest process, with two intakes against one; target >= 1.7",
            )
        if {0, 1} <= bounds.keys():
            yield lower(
                f"intakes.{name}.cost",
                1e3 * costs[1].total(cohort),
                1e3 * costs[0].total(cohort),
                "CPU ms",
                f"{what}: coordinator, one intake and database against the pair; target <= 1.05 times",
            )
        if found.alone is not None:
            alone = found.alone[position]
            yield lower(
                f"intakes.{name}.pair",
                1e3 * costs[0].total(cohort),
                1e3 * alone.total(cohort),
                "CPU ms",
                f"{what}: a pair, one process with PostgreSQL and its standby, against one process with a file; target "
                f"<= 1.05 times; with a file: {_per(alone, cohort)}",
            )
    shown = ", ".join(f"{name} {share:.2f}" for name, share in found.idle.items())
    share, most = max((share, name) for name, share in found.idle.items() if name != "parties")
    yield lower(
        "intakes.idle",
        1e3 * share,
        None,
        "CPU ms/s",
        f"{most}, while {members} connections wait for a task at two intakes; of a core: {shown}",
    )
    yield lower(
        "intakes.memory",
        found.memory / 1024,
        None,
        "KiB",
        "of an intake for each connection that waits; open files: "
        + ", ".join(f"{name} {count}" for name, count in found.files.items()),
    )
    yield lower(
        "intakes.taken_over",
        found.taken_over,
        None,
        "s",
        f"kill -9 of the coordinator in the middle of a sum of {cohort} parties, to the next sum; target <= 10 s",
    )
