"""Run the decrypting-client service: hold a share of the key, join a run, decrypt its sums."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc

from coterie.config.services import DecryptingClientSettings
from coterie.net.credentials import TlsFiles
from coterie.net.directory import Directory
from coterie.net.enrolment import enrol, identities, saved_bundles
from coterie.net.retry import Retry
from coterie.parties.key_holding import KeyHolding
from coterie.parties.party import Party
from coterie.process.key_trust import key_trust
from coterie.process.runtime import Runtime
from coterie.store.engine import keep_files

__all__ = ["SERVICE"]

_RETRY_S = 120.0


class DecryptingProcess:
    """A running decrypting client, started and closed by the process runtime."""

    def __init__(self, settings: DecryptingClientSettings, runtime: Runtime) -> None:
        self._runtime = runtime
        runtime.require(["store", "directory", "key", "run"])
        runtime.holds("store")
        (bundle,) = saved_bundles(settings.state)
        (identity,) = identities(settings.state, 1)
        thirdparty = runtime.connect(settings.thirdparty, "thirdparty")
        self._log = runtime.watch_log(thirdparty)
        key = (settings.state / "directory.key").read_bytes()
        directory = Directory(thirdparty, key, log=self._log)
        self._revocations = runtime.watch_revocations(thirdparty, on_revoked=directory.exclude)
        cos = runtime.connect(settings.cos, "cos")
        self._log.gossip_with(cos)
        party = Party(
            cos,
            settings.run,
            runtime.shown,
            Retry(limit_s=_RETRY_S),
            lambda reached: runtime.holds("run", reached),
        )
        self._holding = KeyHolding(
            party,
            thirdparty,
            identity,
            bundle,
            key_trust(settings.run, settings.encryption, lambda: self._revocations.participants),
            directory.bundles,
            settings.operators,
            settings.consent.consent(1),
            settings.state,
            runtime.accounting.process_activity,
            rotate_every=settings.rotate_every,
            keeping=self._kept,
        )

    async def _kept(self, what: str, write: Callable[[], None]) -> None:
        """Write a file; while there is no room the process is not healthy, and the sum in progress waits."""
        await keep_files(what, write, lambda waits: self._runtime.holds("store", not waits))

    def add_to(self, server: grpc.aio.Server) -> None:
        """Add nothing to the gRPC server: a decrypting client is not called."""

    async def run(self) -> None:
        """Take part in making the key, join the run, then decrypt its sums until the run has ended."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._revocations.run())
            tasks.create_task(self._log.run())
            tasks.create_task(self._holding.run(tasks, self._runtime.holds))

    async def close(self) -> None:
        """Do nothing: no work outlives the process."""


class _DecryptingClient:
    role = "decrypting-client"

    async def enrol(self, settings: DecryptingClientSettings, tls: TlsFiles) -> None:
        await enrol(self.role, settings, tls, identities(settings.state, 1))

    def build(self, settings: Any, runtime: Runtime) -> DecryptingProcess:
        return DecryptingProcess(settings, runtime)


SERVICE = _DecryptingClient()
