"""Run the third-party service on two listeners: one for certified parties, one for enrolment without a certificate."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc
import structlog

from coterie.config.services import ThirdPartySettings
from coterie.errors import CertificateError, PreflightError, StoreError
from coterie.net.admission import Limits
from coterie.net.credentials import TlsFiles
from coterie.net.server import Guard, make_server
from coterie.process.migration import backed_up
from coterie.process.runtime import GRACE_S, Runtime
from coterie.store.authority import create_secrets, load_secrets, log_key, secrets_exist
from coterie.store.expansion import ExpansionStore
from coterie.store.latents import LatentStore
from coterie.store.postgres import DatabaseAddress
from coterie.store.thirdparty import ThirdPartyStore
from coterie.store.tokens import TokenFile
from coterie.wire.v1.expansion_pb2_grpc import add_GraphExpansionServicer_to_server
from coterie.wire.v1.latents_pb2_grpc import add_MetaLatentsServicer_to_server
from coterie.wire.v1.log_pb2_grpc import add_TransparencyLogServicer_to_server
from coterie.wire.v1.thirdparty_pb2_grpc import (
    add_EnrolmentServicer_to_server,
    add_KeyDirectoryServicer_to_server,
)
from coterie_thirdparty.certification import Certification
from coterie_thirdparty.directory import KeyDirectory
from coterie_thirdparty.enrolment import Enrolment
from coterie_thirdparty.expansion import GraphExpansion
from coterie_thirdparty.id_tokens import IdTokens
from coterie_thirdparty.issuer_keys import IssuerKeys
from coterie_thirdparty.late_renewal import LateRenewal
from coterie_thirdparty.latents import MetaLatents
from coterie_thirdparty.log import LogServicer
from coterie_thirdparty.paillier import ROSTER_KEY, PaillierRelay

__all__ = ["SERVICE"]

_log = structlog.get_logger("coterie.thirdparty")

_STORE = "directory.db"
_TOKENS = "tokens.jsonl"
_SEALING_KEYS = "expansion-sealing.keys"
_ENROLMENT = "coterie.v1.Enrolment"
_ENROL, _RENEW = f"/{_ENROLMENT}/Enrol", f"/{_ENROLMENT}/RenewExpired"
_HEALTH = "/grpc.health.v1.Health/Check"
_TICK_S = 2.0
_RENEWAL_S = 60.0
_LOOKS_A_DAY = 24 * 3600 / 20
"""Seconds between two checks of its own certificate, for each day of validity; at most ``_RENEWAL_S``."""


class ThirdPartyProcess:
    """A running third party."""

    def __init__(self, settings: ThirdPartySettings, runtime: Runtime) -> None:
        self._settings = settings
        self._runtime = runtime
        runtime.require(["store", "authority", "graphs"])
        self._certification = Certification(load_secrets(settings.state), settings.certificate_days)
        self._store = ThirdPartyStore(settings.state / _STORE, backed_up("thirdparty", settings))
        tokens = TokenFile(settings.tokens or settings.state / _TOKENS)
        self._directory = KeyDirectory(
            self._certification,
            self._store,
            runtime.guard,
            PaillierRelay(self._store, settings.state / ROSTER_KEY, self._store_holds),
            runtime.accounting,
            self._store_holds,
        )
        database = settings.expansion_database
        self._graphs = ExpansionStore(
            settings.state, None if database is None else DatabaseAddress(**database.model_dump())
        )
        sealing = self._certification.sealing_keys(settings.state / _SEALING_KEYS)
        self._latents = MetaLatents(
            LatentStore(self._graphs),
            self._store,
            sealing,
            runtime.accounting,
            self._graphs_hold,
            settings.latent_seed,
        )
        self._expansion = GraphExpansion(
            self._graphs,
            self._store,
            sealing,
            settings.state,
            runtime.accounting,
            self._graphs_hold,
        )
        self._log = LogServicer(
            self._certification.log_key(log_key(settings.state)), self._store, self._store_holds
        )
        # Refuse all callers until revocations are loaded.
        runtime.guard.fail_closed(True)
        self._enrolment_server = make_server(self._enrolment_guard())
        add_EnrolmentServicer_to_server(
            Enrolment(
                self._certification,
                tokens,
                self._store,
                runtime.accounting,
                self._store_holds,
                LateRenewal(
                    self._certification,
                    self._store,
                    settings.name,
                    settings.late_renewal_days,
                    runtime.tls.authority.read_bytes,
                    self._store_holds,
                ),
                None if settings.oidc is None else IdTokens(settings.oidc, IssuerKeys(settings.oidc)),
            ),
            self._enrolment_server,
        )
        # Probes of this port need not have a certificate; what they hear is no secret.
        runtime.beside.append(_ENROLMENT)
        runtime.add_health(self._enrolment_server)
        try:
            self._enrolment_server.add_secure_port(
                settings.enrol_listen, runtime.tls.server_credentials(require_client=False)
            )
        except RuntimeError as error:
            raise PreflightError(
                f"cannot listen on {settings.enrol_listen}",
                hint="is the port taken, or the address not this machine's?",
            ) from error

    def _enrolment_guard(self) -> Guard:
        runtime = self._runtime
        guard = Guard(
            runtime.guard.meter,
            recorder=runtime.transcript.side("server") if runtime.transcript else None,
            anonymous=[_ENROL, _RENEW, _HEALTH],
            debug=runtime.guard.debug,
            limits=Limits(**self._settings.enrol_limits.model_dump()),
        )
        # Count refusals of both listeners together.
        guard.refusals = runtime.guard.refusals
        guard.admission.turned_away = runtime.guard.admission.turned_away
        return guard

    def _store_holds(self, value: bool) -> None:
        self._runtime.holds("store", value)

    def _graphs_hold(self, value: bool) -> None:
        self._runtime.holds("graphs", value)

    def add_to(self, server: grpc.aio.Server) -> None:
        """Add directory, graph expansion, meta-latents and log to the gRPC server that demands certificates."""
        add_KeyDirectoryServicer_to_server(self._directory, server)
        add_GraphExpansionServicer_to_server(self._expansion, server)
        add_MetaLatentsServicer_to_server(self._latents, server)
        add_TransparencyLogServicer_to_server(self._log, server)

    async def run(self) -> None:
        """Serve enrolments, and keep health and the process's own certificate up to date."""
        await self._directory.restore()
        await self._log_own()
        self._runtime.guard.fail_closed(False)
        await self._enrolment_server.start()
        _log.info("taking enrolments", address=self._settings.enrol_listen)
        try:
            renewed = time.monotonic()
            while True:
                self._runtime.holds("authority", self._certification.valid)
                try:
                    await self._store.probe()
                except StoreError as error:
                    _log.error("the store does not work", message=error.message)
                    self._store_holds(False)
                else:
                    self._store_holds(True)
                await self._expansion.tend()
                await self._latents.tend()
                if time.monotonic() - renewed >= min(
                    _RENEWAL_S, self._settings.certificate_days * _LOOKS_A_DAY
                ):
                    renewed = time.monotonic()
                    if await asyncio.to_thread(self._renew):
                        await self._log_own()
                await asyncio.sleep(_TICK_S)
        finally:
            self._directory.release()
            self._expansion.release()
            self._latents.release()

    def _renew(self) -> bool:
        try:
            renewed = self._certification.certify_self(self._runtime.tls, self._settings.name)
        except CertificateError as error:
            _log.error("cannot renew the certificate of this process", message=str(error))
            return False
        if renewed:
            _log.info("renewed the certificate of this process")
        return renewed

    async def _log_own(self) -> None:
        """Add the certificate of this process to the log; while the store takes no writes, try again."""
        chain = await asyncio.to_thread(self._runtime.tls.chain.read_bytes)
        while True:
            try:
                await self._store.log_certificate(chain)
                return
            except StoreError as error:
                if not error.trouble:
                    raise
                _log.error("cannot log the certificate of this process", message=error.message)
                await asyncio.sleep(_TICK_S)

    async def close(self) -> None:
        """Finish enrolments under way and close the store."""
        await self._enrolment_server.stop(GRACE_S / 4)
        await asyncio.to_thread(self._store.close)
        await asyncio.to_thread(self._graphs.close)


class _ThirdParty:
    role = "thirdparty"

    async def enrol(self, settings: ThirdPartySettings, tls: TlsFiles) -> None:
        """Make the authority at the first start, and certify this process."""
        if not secrets_exist(settings.state):
            if (settings.state / _STORE).exists():
                raise CertificateError(
                    f"{settings.state} holds a directory but no authority",
                    hint="restore ca.pem, ca-key.pem and directory-signing.key from a backup",
                )
            create_secrets(settings.state)
            _log.info("made an authority", certificate=str(settings.state / "ca.pem"))
        certification = Certification(load_secrets(settings.state), settings.certificate_days)
        certification.certify_self(tls, settings.name)

    def build(self, settings: Any, runtime: Runtime) -> ThirdPartyProcess:
        return ThirdPartyProcess(settings, runtime)


SERVICE = _ThirdParty()
