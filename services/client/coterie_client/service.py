"""Run the client-host service: keep histories, join a run, take part in it, answer users' applications."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

import grpc
import structlog

from coterie.config.services import ClientSettings
from coterie.crypto import restored
from coterie.crypto.identity import Bundle, Identity
from coterie.crypto.transparency import FalseLogError
from coterie.data.attributes import AttributeTable, read_attributes
from coterie.errors import RunError
from coterie.net.credentials import TlsFiles
from coterie.net.directory import Directory
from coterie.net.enrolment import HOLDER, enrol, identities, saved_bundles
from coterie.net.rest import Rest
from coterie.net.retry import Retry
from coterie.parties.party import HostedUsers, Party
from coterie.parties.signed_run import objections_to_signature
from coterie.process.kept_rest import KeptRest
from coterie.process.memory import return_freed_memory
from coterie.process.migration import backed_up
from coterie.process.runtime import Runtime
from coterie.rounds.privacy import privacy_of
from coterie.secure_sum.privacy import Privacy
from coterie.store.client import last_joined
from coterie.store.engine import Writer, open_sqlite
from coterie.store.packed_history import PackedHistory
from coterie.store.user_records import no_records
from coterie.systems.description import Driver
from coterie.systems.registry import driver_of, ratings_of
from coterie.wire.refusal import ErrorReason, Refusal
from coterie.wire.v1.client_pb2_grpc import add_UserAgentServicer_to_server
from coterie_client.agent import Agent
from coterie_client.history import Histories, read_histories
from coterie_client.host import Host, Recommended, TakingPart
from coterie_client.own import OwnDevice, require_one
from coterie_client.preferences import Preferences, read_preferences
from coterie_client.rounds import Rounds

if TYPE_CHECKING:
    from coterie.parties.key_holding import KeyHolding

__all__ = ["SERVICE"]

_log = structlog.get_logger("coterie.client")

_RETRY_S = 120.0


class ClientProcess:
    """A running client host."""

    def __init__(self, settings: ClientSettings, runtime: Runtime) -> None:
        self._settings = settings
        self._runtime = runtime
        runtime.require(["store", "directory", "run", *(["key"] if _holds_key(settings) else [])])
        before = backed_up("client", settings)
        engine = open_sqlite(settings.state / "client.db", "client", before=before)
        writer = Writer(engine)
        runtime.holds("store")
        bundles: Sequence[Bundle] = saved_bundles(settings.state)
        thirdparty = runtime.connect(settings.thirdparty, "thirdparty")
        cos = runtime.connect(settings.cos, "cos")
        directory_key = (settings.state / "directory.key").read_bytes()
        self._log = runtime.watch_log(thirdparty)
        self._log.gossip_with(cos)
        directory = Directory(thirdparty, directory_key, log=self._log)
        self._revocations = runtime.watch_revocations(thirdparty, on_revoked=directory.exclude)

        def party_of(on_reach: Callable[[bool], None] | None, rest: Rest | None = None) -> Party:
            return Party(cos, settings.run, runtime.shown, Retry(limit_s=_RETRY_S), on_reach, rest)

        party = party_of(lambda reached: runtime.holds("run", reached), runtime.rest)
        self._holding: KeyHolding | None = None
        if _holds_key(settings):
            from coterie_client.shared import key_holding

            # Enrolled after the users.
            bundles, own = bundles[:-1], bundles[-1]
            self._holding = key_holding(
                settings,
                runtime,
                party_of(None),
                thirdparty,
                own,
                directory.bundles,
                self._revoked,
                writer.files_when_possible,
            )
        self._host = Host(
            settings,
            runtime,
            party,
            identities(settings.state, len(bundles)),
            bundles,
            Histories(engine, writer),
            Preferences(engine, writer),
            engine,
            writer,
            directory_key,
            _told(settings),
            thirdparty,
            self._revoked,
            None if self._holding is None else self._holding.custody,
            directory,
        )
        self._way: TakingPart | None = None
        self._outside: TakingPart | None = None
        """What the host's part would be in a run that it stays out of."""
        self._standing = "waiting"
        self.device = OwnDevice(
            self._host,
            self._agent(),
            lambda: self._way,
            lambda: self._standing,
            lambda: self._way or self._outside,
        )

    def _holds(self, condition: str) -> None:
        # The condition "run" is set by the users' part, not by the key holder's.
        if condition == "key":
            self._runtime.holds(condition)

    def _revoked(self) -> Collection[bytes]:
        return self._revocations.participants

    def add_to(self, server: grpc.aio.Server) -> None:
        """Add the user agent to the gRPC server."""
        add_UserAgentServicer_to_server(self.device.agent, server)

    def _agent(self) -> Agent:
        return Agent(
            self._host.histories,
            self._host.engine,
            self._recommend,
            self._recorded,
            self._ratings,
            self._experiment,
            preferences=self._host.preferences,
            system=self._system,
            privacy=self._privacy,
        )

    async def run(self) -> None:
        """Load the histories, join the run, then carry out the COS's tasks.

        Raises
        ------
        FalseLogError
            The third party was caught; each user's receipt says so.
        """
        if isinstance(rest := self._runtime.rest, KeptRest):
            # Nothing is asked of anybody before: very many devices may be started at once.
            await rest.go_on()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._revocations.run())
                tasks.create_task(self._log.run())
                tasks.create_task(self._runtime.watch_store(self._host.writer))
                if self._holding is not None:
                    tasks.create_task(self._holding.run(tasks, self._holds))
                tasks.create_task(self._take_part(tasks))
        except* FalseLogError:
            if self._log.found is not None:
                await self._host.note_refused(self._log.thirdparty, [self._log.found.message])
            self._log.check()

    async def _take_part(self, running: asyncio.TaskGroup) -> None:
        host, party = self._host, self._host.party
        if not host.histories.names:
            await self._take_people()
        await self._log.ready()
        members = HostedUsers(host.identities, host.bundles)
        size = await party.wait_and_register(members)
        await host.note_sent("cos", "registration", len(members), size)
        wake = self._runtime.wake
        if wake is not None and (stays := _stays_connected(host)):
            raise RunError(
                f"a device cannot wake on a schedule in this run: {stays}",
                hint="run `coterie serve client` without --once, or `coterie agent`",
            )
        way = _way(host)
        if not isinstance(way, Rounds):
            await asyncio.to_thread(no_records, self._settings.state)
        objections = objections_to_signature(party, self._settings.operators) + host.consent.objections(
            party.plan, way.metrics
        )
        if cannot := host.preferences.objection(party.plan.system):
            objections.append(cannot)
        state, run = self._settings.state, self._settings.run
        if driver_of(party.plan.system, party.plan.form) is Driver.ROUNDS:
            with host.engine.connect() as connection:
                joined = last_joined(connection, run)
            objections += restored.objections(state, run, party.plan.secure_sum, joined)
        else:
            joined = None
        if objections:
            # What was published before is still deleted, once the person wishes it.
            self._outside = way
            if isinstance(way, Rounds):
                running.create_task(way.forgetting.run())
            await self._stay_out(objections)
            if wake is not None:
                if isinstance(way, Rounds):
                    wake.before_end(way.forgetting.looked)
                wake.stay_out(objections)
            return
        if lost := restored.lost(state, run, joined):
            _log.warning("goes on with a restored state", run=run, lost=lost)
        _log.info("joined", users=len(members), system=party.plan.system)
        self._runtime.holds("run")
        self._way, self._standing = way, "takes part"
        await way.begin(running)
        if wake is not None and isinstance(way, Rounds):
            wake.before_end(way.settled)
        async for tasks in party.tasks():
            await way.told(tasks)
            end = party.end_in(tasks)
            if end is not None:
                _log.info("the run has ended", reason=end.reason)
                self._standing = "ended"
                await way.finished()
                if wake is not None:
                    wake.run_over(end.reason or "the run has ended")
                return

    async def _take_people(self) -> None:
        """Take the users whom the files name, with their histories, into the store."""
        names, interactions = _people(self._settings)
        # One that is there is of a store which is no more.
        await asyncio.to_thread(no_records, self._settings.state)
        if names:
            await self._host.histories.take(names, interactions, _preferred(self._settings, names))
            self._host.preferences.load()

    async def _stay_out(self, objections: list[str]) -> None:
        """Leave a run that is outside the consent; the process still answers its users, and is not healthy."""
        self._standing = "stays out"
        _log.warning("outside this host's consent", reasons=objections)
        await self._host.note_refused("cos", objections)
        await self._host.party.leave()

    def _recorded(self, item: str) -> int:
        # Before the host has joined, the item's owners are not known; the interaction is sent with the rest later.
        return 0 if self._way is None else self._way.recorded(item)

    def _ratings(self) -> tuple[float, float] | None:
        # Before the host has joined the plan is empty, and names no system.
        plan = self._host.party.plan
        return ratings_of(plan.system, plan.settings)

    def _system(self) -> str:
        # Empty before the host has joined.
        return self._host.party.plan.system

    def _experiment(self) -> bool:
        return self._host.party.plan.rounds.experiment

    def _privacy(self) -> Privacy:
        return privacy_of(self._host.party.plan.rounds)

    async def _recommend(self, user: int, k: int) -> Recommended:
        if self._way is None:
            raise Refusal(
                ErrorReason.ERROR_REASON_NOT_READY, "this host takes no part in the run yet", field="user"
            )
        return await self._way.recommend(user, k)

    async def close(self) -> None:
        """Stop taking part and close the store."""
        if self._way is not None:
            await self._way.stop()
        self._host.writer.close()
        for way in (self._way, self._outside):
            if way is not None:
                way.close()
        self._host.engine.dispose()


def _holds_key(settings: ClientSettings) -> bool:
    """Return whether the host holds a share of the run's key, beside its users."""
    return settings.encryption is not None and settings.encryption.holds_key


def _stays_connected(host: Host) -> str:
    """Return why the devices of a run have to stay connected; empty where they may leave between check-ins."""
    plan = host.party.plan
    if driver_of(plan.system, plan.form) is not Driver.ROUNDS:
        return f"{plan.system} has no rounds, and devices pass records on at any time"
    if plan.secure_sum == "shared-key":
        return "devices share a key, and are asked for more than sums"
    if _holds_key(host.settings):
        return "this device holds a share of the run's key"
    return ""


def _way(host: Host) -> TakingPart:
    """Build the host's part in the run, by the plan's system and form."""
    match driver_of(host.party.plan.system, host.party.plan.form):
        case Driver.ROUNDS:
            return Rounds(host)
        case Driver.WINDOWS:
            from coterie_client.drift.shielded import ShieldedDrift

            return ShieldedDrift(host)
        case _:
            from coterie_client.drift.published import PublishedDrift

            return PublishedDrift(host)


def _told(settings: ClientSettings) -> tuple[dict[str, int], AttributeTable] | None:
    """Return users' attributes: row by user name, and the table; None when no file is configured."""
    return None if settings.attributes is None else read_attributes(settings.attributes, "user")


def _people(settings: ClientSettings) -> tuple[list[str], PackedHistory]:
    """Return the users that the files name, with users without a history last, and their interactions."""
    names, interactions = list[str](), PackedHistory()
    if settings.histories is not None:
        names, interactions = read_histories(settings.histories)
    known, told = set(names), _told(settings)
    return [*names, *(name for name in (told[0] if told else ()) if name not in known)], interactions


def _preferred(settings: ClientSettings, names: Sequence[str]) -> dict[int, dict[str, float]]:
    """Return what users have set for themselves by the file that the settings name, by user."""
    return {} if settings.preferences is None else read_preferences(settings.preferences, names)


class _Client:
    role = "client"

    async def enrol(self, settings: ClientSettings, tls: TlsFiles) -> None:
        # A host of very many users has large arrays for a moment each, one after the other.
        return_freed_memory()
        users = len(_people(settings)[0]) or 1
        participants: Sequence[Identity] = identities(settings.state, users)
        if _holds_key(settings):
            own = settings.state / HOLDER
            own.mkdir(exist_ok=True, mode=0o700)
            participants = [*participants, *identities(own, 1)]
        await enrol(self.role, settings, tls, participants)

    def require_one(self, settings: ClientSettings) -> None:
        """Require that files, if there are any, name one user; raises as `coterie_client.own.require_one`."""
        if settings.histories is not None or not (settings.state / "client.db").exists():
            require_one(_people(settings)[0], str(settings.histories or "no file of histories"))

    def build(self, settings: Any, runtime: Runtime) -> ClientProcess:
        return ClientProcess(settings, runtime)


SERVICE = _Client()
