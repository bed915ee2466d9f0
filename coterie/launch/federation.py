"""A federation on one machine: each service is a child process on loopback, connected by mutual TLS.

Client hosts may run on the nodes of a Ray cluster instead (`coterie.launch.ray_cluster`).

>>> # async with Federation(settings, feed, folder, run_id="example") as federation:
>>> #     await federation.start()
>>> #     async for event in federation.watch():
>>> #         ...
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coterie.config.base import EnrolSettings, Peer, ServiceSettings
from coterie.config.run import RunSettings
from coterie.crypto.identity import load_signing_key, save_signing_key
from coterie.crypto.operator_key import public_text
from coterie.crypto.roster import save_roster_key
from coterie.errors import RunError
from coterie.launch.authority import TOKENS, make_authority, make_token
from coterie.launch.children import Child, free_port
from coterie.launch.laid_out import LaidOut, clear_away, configured_address, laid_out_in, require_free
from coterie.launch.operator_connection import OperatorConnection
from coterie.launch.parties import (
    DIRECTORY,
    JOIN_S,
    OPERATOR_SIGNS,
    ROSTER_KEY,
    Laid,
    PartyPlace,
    lay_out,
    seed_of_combinations,
    start_request,
)
from coterie.launch.replicas import require_one_process
from coterie.net.credentials import TlsFiles
from coterie.net.uncancelled import to_the_end
from coterie.process.runtime import in_use
from coterie.studies.run_data import Feed
from coterie.studies.run_plan import run_plan
from coterie.studies.services_run import FinishedRun
from coterie.wire.v1 import operator_pb2 as wire
from coterie.wire.v1.orchestrator_pb2 import RunPlan

if TYPE_CHECKING:
    from coterie.launch.ray_cluster import Cluster

__all__ = ["Federation", "run_federation"]

_HOST = "127.0.0.1"
_ENDING_S = 30.0
_LOOK_S = 0.2
_LOST = (
    "was lost with its node; the run goes on where its floor allows, else waits until federation.give_up_s"
)


class Federation:
    """All services of one run, as child processes: third party, COS, data owners, client hosts, key holders.

    Parameters
    ----------
    settings : RunSettings
        The run.
    feed : Feed
        The data, divided.
    folder : Path
        Folder of this federation, with one folder per process.
    run_id : str
        Id of the run, a DNS label.
    seed : int
        Seed of the learning.
    """

    def __init__(self, settings: RunSettings, feed: Feed, folder: Path, *, run_id: str, seed: int) -> None:
        require_one_process(settings)
        self._settings = settings
        self._feed = feed
        self._folder = folder
        self._run_id = run_id
        self._seed = seed
        self.children: dict[str, Child] = {}
        self.restarted: list[tuple[float, str, str]] = []
        """Time in seconds, party and signal of each process that was ended from outside, and was started again."""
        self.lost: list[tuple[float, str, str]] = []
        """Time in seconds, party and reason of each client host whose node was lost, with its state."""
        self._late: list[Child] = []
        self._cluster: Cluster | None = None
        self._signs = Ed25519PrivateKey.generate()
        self._operator: OperatorConnection | None = None
        self.started_at = 0.0
        self.start_seconds = 0.0

    async def __aenter__(self) -> Self:
        """Make the folder; `start` starts the processes."""
        self._folder.mkdir(parents=True, exist_ok=True)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop every process, also after an error."""
        # Whoever cancels meanwhile, as by Ctrl-C at the end of a run, waits: half a federation must not stay.
        await to_the_end(self.stop())

    @property
    def cos(self) -> Child:
        """Process of the COS, the orchestration server."""
        return self.children["cos/cos"]

    def plan(self) -> RunPlan:
        """Return the run's plan, as every participant receives it."""
        return run_plan(
            self._settings,
            run_id=self._run_id,
            seed=self._seed,
            attributes=self._feed.attribute_names,
            holdings=self._feed.holdings(self._settings.federation.owner_processes),
        )

    # --- starting ----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start every process, enrol the operator and create the run.

        Raises
        ------
        RunError
            When a process ends or the COS does not answer in time.
        """
        begun = time.perf_counter()
        laid = laid_out_in(self._folder)
        if laid is None and self._settings.ray.address:
            await self._connect()
        if laid is None:
            made = self._configure()
            laid = LaidOut(tuple(self.children.values()), made.owners, made.users)
            if not self._late and self._cluster is None:
                # Owners that come and go are not taken up: they may have left already.  Hosts on other machines leave
                # their state there when the launcher is killed.
                laid.write(self._folder)
        else:
            await self._take_up(laid)
        for child in self.children.values():
            if child not in self._late:
                child.start()
        if self._cluster is not None:
            await asyncio.to_thread(self._cluster.placed, self.children.values())
        operator = self._folder / "operator"
        settings = ServiceSettings(
            name="operator",
            state=operator,
            listen=f"{_HOST}:0",
            enrol=EnrolSettings(
                address=self._addresses["enrol"],
                ca_file=self._folder / "thirdparty" / "state" / "ca.pem",
                token_file=operator / "token",
                timeout_s=JOIN_S,
            ),
        )
        cos = self.cos_peer()
        thirdparty = Peer(address=self._addresses["thirdparty"], name=DIRECTORY)
        self._operator = await OperatorConnection.enrolled(
            settings, cos, self._require_alive, thirdparty=thirdparty
        )
        request = start_request(
            self._settings, self.plan(), self._signs, owners=laid.owners, users=laid.users
        )
        await self._operator.start(request)
        self.started_at = time.time()
        self.start_seconds = time.perf_counter() - begun

    async def _connect(self) -> None:
        """Connect to the Ray cluster of the client hosts."""
        # Ray is an optional package, and takes half a second to import.
        from coterie.launch.ray_cluster import Cluster

        authority = Child("thirdparty", DIRECTORY, self._folder / "thirdparty")
        self._cluster = Cluster(self._settings, self._run_id, authority.state / "ca.pem")
        await asyncio.to_thread(self._cluster.connect)

    async def _take_up(self, laid: LaidOut) -> None:
        """Take the parties as an interrupted launcher left them: they go on from their stores."""
        self.children = {child.party: child for child in laid.children}
        deadline = time.monotonic() + _ENDING_S
        # Children of a launcher that was killed notice that within a second, and stop in order.
        while held := [child.party for child in laid.children if in_use(child.state)]:
            if time.monotonic() > deadline:
                raise RunError(f"{held[0]} of the interrupted run still runs", hint="end it first")
            await asyncio.sleep(_LOOK_S)
        require_free(laid.children)
        thirdparty, cos = (self.children[party] for party in (f"thirdparty/{DIRECTORY}", "cos/cos"))
        self._addresses = {
            "thirdparty": configured_address(thirdparty),
            "enrol": configured_address(thirdparty, "enrol_listen"),
            "cos": configured_address(cos),
        }
        self._signs = load_signing_key(self._folder / "operator" / OPERATOR_SIGNS)

    def _configure(self) -> Laid:
        own = _HOST if self._cluster is None else self._cluster.address
        self._addresses = {name: f"{own}:{free_port(own)}" for name in ("thirdparty", "enrol", "cos")}
        authority = Child("thirdparty", DIRECTORY, self._folder / "thirdparty")
        make_authority(authority.state)
        transcript = self._settings.federation.transcripts or self._settings.federation.attacks
        authority.configure(
            {
                "listen": self._addresses["thirdparty"],
                "enrol_listen": self._addresses["enrol"],
                "tokens": authority.state / TOKENS,
                "transcript": transcript,
                **seed_of_combinations(self._settings, self._seed),
            }
        )
        self.children[authority.party] = authority
        make_token(authority.state, "operator", "operator", 0, self._folder / "operator" / "token")

        (self._folder / "operator").mkdir(parents=True, exist_ok=True)
        save_signing_key(self._folder / "operator" / OPERATOR_SIGNS, self._signs)
        laid = lay_out(
            self._settings,
            self._feed,
            self._place,
            public_text(self._signs),
            run_id=self._run_id,
            seed=self._seed,
        )
        if laid.roster_key is not None:
            save_roster_key(authority.state / ROSTER_KEY, laid.roster_key)
        for party in laid.parties:
            child = self._child(party.role, party.name, party.place.folder)
            token = child.folder / "token"
            make_token(authority.state, child.role, child.name, party.participants, token)
            child.configure(
                {
                    "listen": party.place.listen,
                    **party.values,
                    "transcript": transcript,
                    "thirdparty": {"address": self._addresses["thirdparty"], "name": DIRECTORY},
                    "enrol": {
                        "address": self._addresses["enrol"],
                        "name": DIRECTORY,
                        "ca_file": authority.state / "ca.pem",
                        "token_file": token,
                        "timeout_s": JOIN_S,
                    },
                }
            )
            self.children[child.party] = child
            if party.late:
                self._late.append(child)
        return laid

    def _child(self, role: str, name: str, folder: Path) -> Child:
        if self._cluster is None or role != "client":
            return Child(role, name, folder)
        from coterie.launch.ray_cluster import NodeChild

        return NodeChild(role, name, folder, cluster=self._cluster)

    def _place(self, role: str, name: str, position: int) -> PartyPlace:
        folder = self._folder / (f"owner-{name}" if role == "data-owner" else name)
        listen = self._addresses["cos"] if role == "cos" else f"{_HOST}:{free_port()}"
        return PartyPlace(folder, listen)

    # --- running -----------------------------------------------------------------------------------------------

    async def watch(self) -> AsyncGenerator[wire.WatchRunResponse, None]:
        """Yield the run's events until it has ended, and start late data owners (churn) when their epoch comes.

        Raises
        ------
        RunError
            When a process ends by itself, or too often from outside; or the COS cannot be reached for too long.
        """
        told = gone = 0
        join_after = math.floor(
            self._settings.own.passes(self._settings) * self._settings.federation.churn.join_at
        )
        async with contextlib.aclosing(self._connected.watch(self._run_id)) as events:
            async for event in events:
                for child in self._late:
                    if child.process is None and event.state.epoch > join_after:
                        child.start()
                while told < len(self.restarted):
                    _, party, name = self.restarted[told]
                    told += 1
                    change = wire.PartyEvent(party=party, change=f"was ended by {name}, and is started again")
                    yield wire.WatchRunResponse(state=event.state, party=change)
                while gone < len(self.lost):
                    _, party, _ = self.lost[gone]
                    gone += 1
                    change = wire.PartyEvent(party=party, change=_LOST)
                    yield wire.WatchRunResponse(state=event.state, party=change)
                yield event

    watched: bool = True
    """Whether a child that ends by itself fails the run; tests that kill children turn it off."""

    def _require_alive(self) -> None:
        """Start processes again that were ended from outside, as long as the run has restarts left.

        One that crashed is not started again: it would most likely crash again, and its state may be wrong.

        Raises
        ------
        RunError
            A process has ended by itself, or no restart is left.
        """
        if not self.watched:
            return
        for child in self.children.values():
            # An owner that leaves the run ends as asked.
            if child in self._late and child.process is not None and child.process.poll() == 0:
                continue
            name = child.killed_by or ("the loss of its node" if child.lost else "")
            if child.lost and not self._goes_on_elsewhere(child):
                continue
            # Before the run exists a process may have used up its token, and not yet kept its certificate.
            if (
                name
                and not child.crashed
                and self.started_at
                and len(self.restarted) < self._settings.federation.restarts
            ):
                self.restarted.append((time.time(), child.party, name))
                child.start()
            child.require_alive()

    def _goes_on_elsewhere(self, child: Child) -> bool:
        """Whether a host whose node was lost goes on on another one; if not, note that the run goes on without it.

        Raises
        ------
        RunError
            The run had not begun, or no client host is left.
        """
        if any(party == child.party for _, party, _ in self.lost):
            return False
        if not self.started_at:
            raise RunError(f"{child.party} was lost before the run began: {child.lost}")
        restarts_left = len(self.restarted) < self._settings.federation.restarts
        if self._cluster is not None and self._cluster.keeps_state and restarts_left:
            return True
        self.lost.append((time.time(), child.party, child.lost))
        hosts = [one for one in self.children.values() if one.role == child.role]
        if len(self.lost) == len(hosts):
            raise RunError(
                f"no client host is left; {child.party} was lost last: {child.lost}",
                hint="ray.state names a folder that all nodes share, from which hosts go on",
            )
        return False

    async def report(self) -> dict[str, Any]:
        """Return the COS's facts about the run, for the report, and which processes were started again."""
        known = await self._connected.report(self._run_id)
        known["parties"] += [
            {
                "time_ms": round(at * 1e3),
                "party": party,
                "change": f"was ended by {name}, and was started again",
            }
            for at, party, name in self.restarted
        ]
        known["parties"] += [
            {"time_ms": round(at * 1e3), "party": party, "change": _LOST} for at, party, _ in self.lost
        ]
        return known

    async def run_state(self) -> wire.RunState:
        """Return the state of the run."""
        return await self._connected.state(self._run_id)

    def operator_access(self) -> tuple[TlsFiles, Peer]:
        """Return the operator's certificate, and the COS that takes it."""
        return TlsFiles(self._folder / "operator" / "tls"), self.cos_peer()

    def cos_peer(self) -> Peer:
        """Return where the COS is."""
        return Peer(address=self._addresses["cos"], name="cos")

    async def stop_run(self, reason: str) -> None:
        """End the run now; its processes go on until they are stopped."""
        await self._connected.stop(self._run_id, reason)

    @property
    def _connected(self) -> OperatorConnection:
        if self._operator is None:
            raise RunError("the federation has not been started", hint="await start() first")
        return self._operator

    def processes(self) -> list[tuple[str, int]]:
        """Return party and process id of each process that was started."""
        return [
            (child.party, child.process.pid)
            for child in list(self.children.values())
            # Processes of other machines have no id here.
            if child.process is not None and child.process.pid
        ]

    # --- stopping ----------------------------------------------------------------------------------------------

    async def stop(self) -> None:
        """Stop every process: clients and owners first, the third party last."""
        if self._operator is not None:
            await self._operator.close()
            self._operator = None
        order = ("client", "data-owner", "decrypting-client", "cos", "thirdparty")
        for role in order:
            await asyncio.gather(*(child.stop() for child in self.children.values() if child.role == role))
        if self._cluster is not None:
            await asyncio.to_thread(self._cluster.close)
            self._cluster = None

    def accounts(self) -> dict[str, dict[str, Any]]:
        """Return the accounts of all processes that stopped in order, by party."""
        found = {party: child.account() for party, child in self.children.items()}
        again = Counter(party for _, party, _ in self.restarted)
        return {
            party: {**account, "restarted": again[party]}
            for party, account in found.items()
            if account is not None
        }


async def run_federation(
    settings: RunSettings,
    feed: Feed,
    folder: Path,
    *,
    run_id: str,
    seed: int,
    see: Callable[[wire.WatchRunResponse], None],
    go_on: bool = False,
    begun: Callable[[Federation], None] | None = None,
) -> FinishedRun:
    """Run a federation from its first process to its last; parameters as for `Federation`.

    Parameters
    ----------
    see : callable
        Receives each event.
    go_on : bool
        Whether a federation that an interrupted launcher left in the folder goes on from its stores.  Otherwise it is
        cleared away, and begins anew.
    begun : callable, optional
        Receives the federation before its processes start.

    Raises
    ------
    RunError
        When a process ends by itself or the COS does not answer in time.
    """
    if not go_on or laid_out_in(folder) is None:
        await asyncio.to_thread(clear_away, folder)
    async with Federation(settings, feed, folder, run_id=run_id, seed=seed) as federation:
        if begun is not None:
            begun(federation)
        await federation.start()
        async with contextlib.aclosing(federation.watch()) as events:
            async for event in events:
                see(event)
        known = await federation.report()
    # Accounts are complete when the processes have stopped.
    states = {party: child.state for party, child in federation.children.items()}
    return FinishedRun(federation.plan(), known, federation.start_seconds, federation.accounts(), states)
