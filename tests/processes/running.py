"""A whole federation as real processes: started in any order, followed by its events, stopped, killed, silenced."""

import asyncio
import contextlib
import datetime
import json
import os
import signal
import sqlite3
import time
import tomllib
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import text_format
from grpc_health.v1 import health_pb2, health_pb2_grpc

from coterie.config.run import RunSettings
from coterie.crypto.authority import logical_name
from coterie.errors import CoterieError
from coterie.launch.children import free_port
from coterie.launch.federation import Federation
from coterie.launch.parties import Laid
from coterie.net.channel import Channel, connect
from coterie.net.credentials import TlsFiles
from coterie.net.meter import Meter
from coterie.store.engine import open_sqlite
from coterie.studies.run_data import Feed
from coterie.wire.v1 import operator_pb2 as wire

from .patience import PAUSE_S, WAIT_S, until_next
from .stores import KEEP_UPDATES, Stores


class Running(Federation):
    """A federation whose processes a test may hold back, stop, kill and start again.

    Parameters
    ----------
    hold : iterable of str
        Parties that wait for `release`.
    keys : mapping
        Configuration beside that of the launcher, by role or by party; what is a mapping goes into a table that the
        launcher writes.
    expect_users : int, optional
        For how many users the run waits, when not for all.
    """

    def __init__(
        self,
        settings: RunSettings,
        feed: Feed,
        folder: Path,
        *,
        hold: Iterable[str] = (),
        keys: Mapping[str, Mapping[str, object]] | None = None,
        expect_users: int | None = None,
    ) -> None:
        super().__init__(settings, feed, folder, run_id="test", seed=0)
        self.settings, self.feed, self.folder = settings, feed, folder
        self.stores = Stores(self)
        self.hold = list(hold)
        self.expect_users = expect_users
        self.events: list[wire.WatchRunResponse] = []
        self.metrics: dict[str, str] = {}
        self.keys = dict(keys or {})
        self._news = asyncio.Event()
        self._following: asyncio.Task[None] | None = None
        # A process that ends is this test's doing.
        self.watched = False

    # --- before ------------------------------------------------------------------------------------------------

    def _configure(self) -> Laid:
        laid = super()._configure()
        for party, child in self.children.items():
            self.metrics[party] = f"127.0.0.1:{free_port()}"
            keys = {
                "metrics": self.metrics[party],
                **self.keys.get(child.role, {}),
                **self.keys.get(party, {}),
            }
            config = child.folder / "config.toml"
            text = config.read_text()
            for table, held in keys.items():
                if isinstance(held, Mapping):
                    text = text.replace(f"[{table}]\n", f"[{table}]\n{_toml(held)}")
            config.write_text(_toml(keys) + text)
        self.cos.state.mkdir(mode=0o700)
        open_sqlite(self.cos.state / "cos.db", "cos").dispose()
        with contextlib.closing(sqlite3.connect(self.cos.state / "cos.db")) as connection:
            for statement in KEEP_UPDATES:
                connection.execute(statement)
            connection.commit()
        self._late += [self.children[party] for party in self.hold]
        return laid if self.expect_users is None else Laid(laid.parties, self.expect_users)

    async def start(self) -> None:
        """Start everybody who is not held back, and follow the run."""
        await super().start()
        # Who is held back waits for the test, and not for an epoch.
        self._late = [child for child in self._late if child.party not in self.hold]
        self._following = asyncio.create_task(self._follow())

    def follow_again(self) -> None:
        """Follow a run that has failed from its first event once more."""
        self.events = []
        self._following = asyncio.create_task(self._follow())

    def release(self, *parties: str) -> None:
        """Start processes that were held back."""
        for party in parties:
            self.hold.remove(party)
            self.children[party].start()

    async def _follow(self) -> None:
        try:
            async for event in self.watch():
                self.events.append(event)
                self._news.set()
        finally:
            self._news.set()

    # --- while it runs -----------------------------------------------------------------------------------------

    async def until(self, wanted: Callable[[wire.WatchRunResponse], object], what: str) -> None:
        """Wait for an event, or take it as come when it has."""
        assert self._following is not None
        looked_at = 0
        try:
            async with asyncio.timeout(WAIT_S):
                while True:
                    self._news.clear()
                    while looked_at < len(self.events):
                        looked_at += 1
                        if wanted(self.events[looked_at - 1]):
                            return
                    if self._following.done():
                        self._following.result()
                        pytest.fail(f"the run ended before {what}; {self.last_words()}")
                    await self._news.wait()
        except TimeoutError:
            pytest.fail(f"no {what} within {WAIT_S} s; {self.last_words()}")

    async def a_round(self, what: str, **expected: object) -> None:
        """Wait for a round of training that ends like this, of those still to come."""
        seen = max((event.number for event in self.events), default=0)

        def wanted(event: wire.WatchRunResponse) -> bool:
            one = event.round
            found = {key: getattr(one, key) for key in expected}
            return event.number > seen and one.purpose == "train" and found == expected

        await self.until(wanted, what)

    async def waits(self, *words: str) -> None:
        """Wait until the run waits for parties, of the times still to come, and says these words."""
        seen = max((event.number for event in self.events), default=0)
        await self.until(
            lambda event: (
                event.number > seen
                and bool(event.wait.reason)
                and all(word in event.wait.reason for word in words)
            ),
            f"the run waits: {', '.join(words)}",
        )

    async def phase(self, phase: str, epoch: int = 0) -> None:
        """Wait until the run has come to a phase, and at least to an epoch."""
        number = wire.RunPhase.Value(f"RUN_PHASE_{phase.upper()}")
        await self.until(
            lambda event: (
                event.HasField("phase") and event.phase.phase == number and event.phase.epoch >= epoch
            ),
            f"phase {phase} of epoch {epoch}",
        )

    async def epochs(self, more: int) -> None:
        """Wait until the run is so many epochs further."""
        await self.phase("epoch", (await self.run_state()).epoch + more)

    async def change(self, party: str, change: str, times: int = 1) -> None:
        """Wait until a party has joined, left, was lost or has returned, for the first or another time."""

        def enough(_: wire.WatchRunResponse) -> bool:
            seen = [(event.party.party, event.party.change) for event in self.events]
            return seen.count((party, change)) >= times

        await self.until(enough, f"{party} {change} ({times})")

    async def comes_true(self, condition: Callable[[], object], what: str) -> None:
        """Wait for something that no event tells of."""
        try:
            async with asyncio.timeout(WAIT_S):
                looked_at = time.monotonic()
                while not condition():
                    await asyncio.sleep(until_next(looked_at))
                    looked_at = time.monotonic()
        except TimeoutError:
            pytest.fail(f"not within {WAIT_S} s: {what}; {self.last_words()}")

    async def updates(self, more: int) -> None:
        """Wait until so many more updates are applied."""
        try:
            async with asyncio.timeout(WAIT_S):
                wanted = (await self.run_state()).version + more
                while (await self.run_state()).version < wanted:
                    await asyncio.sleep(PAUSE_S)
        except TimeoutError:
            pytest.fail(f"not {more} updates within {WAIT_S} s; {self.last_words()}")

    def last_words(self) -> str:
        """Return how every process is, what it said last, and the last events: why a wait was in vain."""
        told = ["the processes said last:"]
        for party, child in self.children.items():
            status = "not started" if child.process is None else child.process.poll()
            how = "runs" if status is None else f"ended: {status}"
            told.append(f"{party} ({how}): {child.last_words()[:500]}")
        told.append(f"the last of {len(self.events)} events:")
        for event in self.events[-8:]:
            kind = event.WhichOneof("event")
            content = text_format.MessageToString(getattr(event, kind), as_one_line=True) if kind else ""
            told.append(f"{event.number}, {event.time_ms} ms, {kind}: {content[:500]}")
        return "\n".join(told)

    def signal(self, party: str, number: signal.Signals) -> None:
        """Send a signal to one of the processes."""
        process = self.children[party].process
        assert process is not None
        os.kill(process.pid, number)

    def kill_and_restart(self, *parties: str) -> None:
        """End processes as a crash would, all of them, and start them again with the same configuration."""
        for party in parties:
            self.children[party].kill()
        for party in parties:
            self.children[party].start()

    async def up(self, *parties: str) -> None:
        """Wait until processes have started; whoever is asked to stop before that just ends."""

        def answers(party: str) -> bool:
            with contextlib.suppress(OSError):
                return bool(self.page(party))
            return False

        for party in parties:
            await self.comes_true(lambda party=party: answers(party), f"{party} is up")

    def address(self, party: str) -> str:
        """Return where a process listens."""
        config = self.children[party].folder / "config.toml"
        return str(tomllib.loads(config.read_text())["listen"])

    def channel(self, party: str) -> Channel:
        """Return a channel to a process with the operator's certificate."""
        child = self.children[party]
        return connect(
            self.address(party),
            TlsFiles(self.folder / "operator" / "tls").channel_credentials(),
            tls_name=logical_name(child.role, child.name),
            peer=party,
            meter=Meter(),
        )

    async def health(self, party: str) -> str | None:
        """Ask a process by gRPC how it is; None when it does not answer."""
        channel = self.channel(party)
        # Generated stubs are typed for gRPC's own channel; ours takes and returns the same messages.
        stub: Any = channel.stub(health_pb2_grpc.HealthStub)
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=WAIT_S)
        except grpc.aio.AioRpcError as error:
            if error.code() != grpc.StatusCode.UNAVAILABLE:
                raise
            return None
        finally:
            await channel.close()
        return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)

    async def first_health(self, party: str) -> str:
        """Return what a process says of its health as soon as it answers."""
        try:
            async with asyncio.timeout(WAIT_S):
                while (said := await self.health(party)) is None:
                    await asyncio.sleep(PAUSE_S)
        except TimeoutError:
            pytest.fail(f"{party} does not answer within {WAIT_S} s; {self.last_words()}")
        return said

    async def becomes(self, wanted: str | None, *parties: str) -> None:
        """Wait until processes say of their health what is wanted."""
        for party in parties:
            try:
                async with asyncio.timeout(WAIT_S):
                    while (said := await self.health(party)) != wanted:
                        await asyncio.sleep(PAUSE_S)
            except TimeoutError:
                pytest.fail(f"{party} is {said} and not {wanted}")

    def page(self, party: str, path: str = "/metrics") -> str:
        """Return a page of a process's second port."""
        with urllib.request.urlopen(f"http://{self.metrics[party]}{path}", timeout=10) as page:
            return page.read().decode()

    # --- the end -----------------------------------------------------------------------------------------------

    async def ended(self) -> None:
        """Wait for the end of the run; every process goes on."""
        assert self._following is not None
        try:
            async with asyncio.timeout(2 * WAIT_S):
                await self._following
        except TimeoutError:
            pytest.fail(f"the run does not end; {self.last_words()}")

    async def finish(self) -> dict[str, Any]:
        """Wait for the end of the run, stop every process and return what the COS knew."""
        await self.ended()
        report = await self.report()
        await self.stop()
        return report

    async def stop(self) -> None:
        """Stop every process, one that was silenced by a signal included."""
        if self._following is not None:
            self._following.cancel()
            with contextlib.suppress(asyncio.CancelledError, CoterieError):
                await self._following
        for party, child in self.children.items():
            if child.alive:
                self.signal(party, signal.SIGCONT)
        await super().stop()

    def ended_well(self) -> bool:
        """Whether every process that was started ended with status 0 and logged nothing that is no JSON."""
        ends = {party: child.process.returncode for party, child in self.children.items() if child.process}
        assert not any(ends.values()), self.last_words()
        for party in ends:
            assert self.log(party)[-1]["event"] == "stopped"
        return True

    def log(self, party: str) -> list[dict[str, Any]]:
        """Return the lines of a process's log, each with what every line must have."""
        # A line without its end is still being written.
        text = self.children[party].log.read_text()
        lines = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
        for line in lines:
            assert line["service"] == party
            assert line["level"] in ("debug", "info", "warning", "error")
            assert line["event"]
            assert datetime.datetime.fromisoformat(line["timestamp"]).tzinfo
        return lines

    def parties(self, role: str) -> list[str]:
        """Return the parties of a role."""
        return [party for party, child in self.children.items() if child.role == role]


def _toml(keys: Mapping[str, object]) -> str:
    """Return lines of TOML; a JSON string, number or truth value is TOML as well."""
    return "".join(
        f"{key} = {json.dumps(value)}\n" for key, value in keys.items() if not isinstance(value, Mapping)
    )
