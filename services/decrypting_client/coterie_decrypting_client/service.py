"""A decrypting client as a service: hold the key, join a run, decrypt its sums."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import structlog

from coterie.config.services import DecryptingClientSettings
from coterie.crypto.roster import Roster, load_roster_key
from coterie.launch.process import Runtime
from coterie.net.credentials import TlsFiles
from coterie.net.custody import Custody
from coterie.net.directory import Directory
from coterie.net.enrolment import enrol, identities, saved_bundles
from coterie.net.party import Member, Party
from coterie.net.public_keys import Trust
from coterie.net.retry import Retry
from coterie.net.revocation import RevocationWatch
from coterie.wire.v1 import orchestrator_pb2 as wire
from coterie_decrypting_client.decryption import Decryption
from coterie_decrypting_client.rotation import Rotation

__all__ = ["SERVICE"]

_log = structlog.get_logger("coterie.decrypting_client")

_RETRY_S = 120.0


class DecryptingProcess:
    """A running decrypting client."""

    def __init__(self, settings: DecryptingClientSettings, runtime: Runtime) -> None:
        self._settings = settings
        self._runtime = runtime
        runtime.require(["directory", "key", "run"])
        (self._bundle,) = saved_bundles(settings.state)
        (self._identity,) = identities(settings.state, 1)
        thirdparty = runtime.connect(settings.thirdparty, "thirdparty")
        directory = Directory(thirdparty, (settings.state / "directory.key").read_bytes())
        self._revocations = RevocationWatch(
            thirdparty,
            runtime.guard,
            lambda current: runtime.holds("directory", current),
            on_revoked=directory.exclude,
        )
        encryption = settings.encryption
        trust = Trust(
            settings.run,
            Roster.load(encryption.roster),
            load_roster_key(encryption.roster_key),
            encryption.terms,
            lambda: self._revocations.participants,
        )
        self._custody = Custody(thirdparty, self._identity, trust, settings.state / "keys", directory.bundles)
        own = self._identity.participant_id
        self._rotation = Rotation(
            self._custody, settings.rotate_every, lambda: trust.eligible()[:1] == (own,)
        )
        self._party = Party(
            runtime.connect(settings.cos, "cos"),
            settings.run,
            runtime.tls.identity().fingerprint,
            Retry(limit_s=_RETRY_S),
            lambda reached: runtime.holds("run", reached),
        )
        self._decryption = Decryption(
            self._party,
            self._identity,
            self._custody.secrets,
            directory.bundles,
            settings.consent.consent(1),
            settings.state / "journal.json",
            runtime.accounting,
            self._rotation.serving,
        )

    def add_to(self, server: grpc.aio.Server) -> None:
        """Offer nothing: nobody calls a decrypting client."""

    async def run(self) -> None:
        """Hold the key, join, then decrypt what the COS asks for until the run has ended."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._revocations.run())
            tasks.create_task(self._take_part(tasks))

    async def _take_part(self, running: asyncio.TaskGroup) -> None:
        await self._custody.ensure()
        self._runtime.holds("key")
        following = running.create_task(self._custody.follow(lambda holding: self._rotation.clear()))
        kind = wire.ParticipantKind.PARTICIPANT_KIND_KEY_HOLDER
        await self._party.wait_and_register([Member(self._identity, self._bundle, kind)])
        objections = self._settings.consent.consent(1).objections(self._party.plan)
        if objections:
            _log.warning("outside this holder's consent", reasons=objections)
            await self._party.leave()
            return
        _log.info("joined", system=self._party.plan.system)
        self._runtime.holds("run")
        working = running.create_task(self._decryption.run())
        async for tasks in self._party.tasks():
            self._decryption.told(tasks)
            if any(task.kind == wire.TaskKind.TASK_KIND_FINISH for task in tasks):
                _log.info("the run has ended")
                self._decryption.finish()
                await working
                following.cancel()
                return

    async def close(self) -> None:
        """There is nothing under way that the end of the process does not end."""


class _DecryptingClient:
    role = "decrypting-client"

    async def enrol(self, settings: DecryptingClientSettings, tls: TlsFiles) -> None:
        await enrol(self.role, settings, tls, identities(settings.state, 1))

    def build(self, settings: Any, runtime: Runtime) -> DecryptingProcess:
        return DecryptingProcess(settings, runtime)


SERVICE = _DecryptingClient()
