"""Play many parties of a run, each with a certificate, a connection and a user of its own, for the suite ``intakes``.

The process takes commands as lines of JSON on standard input, and tells on standard output what came of them.  A party
answers each round with one contribution, as a device does: with the poll for the next tasks in the same call, or, when
it is told to, with the contribution alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from pathlib import Path
from typing import Any

from bench.submit import made_item
from coterie.config.base import EnrolSettings, ServiceSettings
from coterie.config.run import RunSettings
from coterie.crypto.authority import logical_name
from coterie.net.channel import Channel, connect
from coterie.net.credentials import TlsFiles
from coterie.net.enrolment import enrol, identities
from coterie.net.meter import Meter
from coterie.net.retry import Retry
from coterie.parties.party import Item, Party, Registrant
from coterie.rounds.training import Purpose
from coterie.telemetry.logs import configure
from coterie.wire.v1 import orchestrator_pb2 as wire
from coterie.wire.v1 import rounds_pb2

__all__ = ["main"]

_AT_ONCE = 16
_RETRY_S = 60.0
_END_S = 10.0
_LINE = 1 << 24
"""Longest line of standard input, bytes: the first one names all parties of the process."""
_ATTACHED = (wire.FetchKind.FETCH_KIND_SUM_PLAN, wire.FetchKind.FETCH_KIND_MODEL)


def _tell(**told: Any) -> None:
    print(json.dumps(told), flush=True)


class _Device:
    """One party with one user."""

    def __init__(self, tls: TlsFiles, member: Registrant) -> None:
        self.tls = tls
        self.member = member
        self.channel: Channel | None = None

    async def joined(self, address: str, run_id: str) -> Party:
        """Connect to the COS, or an intake of it, and register."""
        fingerprint = self.tls.identity().fingerprint
        self.channel = connect(
            address,
            self.tls.channel_credentials(),
            tls_name=logical_name("cos", "cos"),
            peer="cos/cos",
            meter=Meter(),
        )
        party = Party(self.channel, run_id, lambda: fingerprint, Retry(limit_s=_RETRY_S))
        party.attach, party.carries = _ATTACHED, True
        await party.wait_and_register([self.member])
        return party

    async def leave(self) -> None:
        """Close the connection."""
        if self.channel is not None:
            await self.channel.close()
            self.channel = None


class _Senders:
    """The parties of this process.

    Parameters
    ----------
    told : mapping
        Name of the run, folder, enrolment, items, settings of the run, and the number of the first party.
    """

    def __init__(self, told: dict[str, Any]) -> None:
        self._told = told
        self._settings = RunSettings.model_validate(told["settings"])
        self._devices: list[_Device] = []
        self._playing: list[asyncio.Task[None]] = []
        self._turns = asyncio.Semaphore(_AT_ONCE)
        self._items: dict[Purpose, Item] = {}
        # Of the round in progress: its number, who is asked, and how they are to answer.
        self._round = self._asked = self._done = 0
        self._go = asyncio.Event()
        self._how: dict[str, Any] = {}

    async def enrol(self) -> None:
        """Enrol every party."""

        async def one(name: str) -> _Device:
            async with self._turns:
                folder = Path(self._told["folder"]) / name
                told = {**self._told["enrol"], "token_file": str(folder / "token")}
                how = EnrolSettings.model_validate(told)
                settings = ServiceSettings(name=name, state=folder, listen="127.0.0.1:0", enrol=how)
                tls, people = TlsFiles(folder / "tls"), identities(folder, 1)
                bundles = await enrol("client", settings, tls, people)
                user = wire.ParticipantKind.PARTICIPANT_KIND_USER
                return _Device(tls, Registrant(people[0], bundles[0], user))

        self._devices = list(await asyncio.gather(*map(one, self._told["names"])))

    async def connect(self, addresses: list[str]) -> None:
        """Let every party connect and register, one after the other at each address, and play its part."""

        async def one(number: int, device: _Device) -> None:
            async with self._turns:
                party = await device.joined(addresses[number % len(addresses)], self._told["run"])
            playing = asyncio.create_task(self._play(party))
            playing.add_done_callback(_told)
            self._playing.append(playing)

        await asyncio.gather(*(one(*each) for each in enumerate(self._devices)))

    async def close(self) -> None:
        """Close every connection."""
        for task in self._playing:
            task.cancel()
        await asyncio.gather(*self._playing, return_exceptions=True)
        self._playing.clear()
        await asyncio.gather(*(device.leave() for device in self._devices))
        self._round = self._asked = 0

    def go(self, how: dict[str, Any]) -> None:
        """Let the parties answer the round that they are asked in."""
        self._how, self._done = how, 0
        self._go.set()

    async def _play(self, party: Party) -> None:
        answered = 0
        async for tasks in party.tasks():
            for task in tasks:
                if task.kind == wire.TaskKind.TASK_KIND_ROUND and task.round.round > answered:
                    await self._answer(party, task)
                    answered = task.round.round
                    break
            else:
                party.idle()

    async def _answer(self, party: Party, task: wire.Task) -> None:
        round_ = task.round.round
        _, payload = await party.fetch(wire.FetchKind.FETCH_KIND_SUM_PLAN, version=round_)
        plan = rounds_pb2.SumPlan.FromString(payload or b"")
        await party.fetch(wire.FetchKind.FETCH_KIND_MODEL, version=task.version)
        if round_ > self._round:
            self._round, self._asked = round_, 0
            self._go.clear()
        self._asked = place = self._asked + 1
        _tell(round=round_, asked=self._asked)
        await self._go.wait()
        how = self._how
        while place <= how.get("back", 0):
            await asyncio.sleep(0.1)
            how = self._how
        item = self._item(Purpose(plan.purpose))
        slots = [slot for part in task.slots for slot in range(part.first, part.first + part.count)]
        mine = Item(item.kind, slots, item.payload)
        refused = await party.submit_many(task.round, [mine], last=how["whole"])
        if refused:
            _tell(refused=[one.message for one in refused])
        elif not how["whole"] and round_ == self._round:
            # With a poll the answer may come rounds later.
            self._done += 1
            _tell(done=self._done)

    def _item(self, purpose: Purpose) -> Item:
        found = self._items.get(purpose)
        if found is None:
            found = self._items[purpose] = made_item(0, purpose, self._settings, self._told["items"])
        return found


def _told(playing: asyncio.Task[None]) -> None:
    """Say why a party ended, which none does by itself."""
    if not playing.cancelled() and (error := playing.exception()) is not None:
        _tell(refused=[f"a party ended: {error!r}"])


async def main() -> None:
    """Do what standard input says, line by line, until it ends."""
    configure("error", service="bench")
    reader = asyncio.StreamReader(limit=_LINE)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    senders = _Senders(json.loads(await reader.readline()))
    doing: asyncio.Task[None] | None = None
    while line := await reader.readline():
        command, value = json.loads(line)
        if command == "go":
            senders.go(value)
        else:
            # Beside the reading, so that the end of the measurement ends what is under way.
            doing = asyncio.create_task(_do(senders, command, value))
    if doing is not None:
        doing.cancel()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(senders.close(), _END_S)


async def _do(senders: _Senders, command: str, value: Any) -> None:
    did = command
    try:
        match command:
            case "enrol":
                await senders.enrol()
            case "connect":
                await senders.connect(value)
            case "close":
                await senders.close()
    except Exception as error:
        did = f"failed to {command}: {error!r}"
    _tell(did=did)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main())
