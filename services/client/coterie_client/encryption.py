"""Fetch and check the public key under which a host's members encrypt; an older key is never accepted again."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import structlog

from coterie.crypto.verification import VerificationError
from coterie.errors import CertificateError, ConfigError, PeerError
from coterie.parties.public_keys import PublicKeys
from coterie.process.key_trust import key_trust
from coterie.secure_sum.obfuscators import holder_obfuscators, obfuscators
from coterie.secure_sum.plan import SumPlan
from coterie.secure_sum.protocol import Declined
from coterie_client.host import Host

if TYPE_CHECKING:
    from coterie.crypto.paillier import Obfuscators, SecretKey
    from coterie.parties.custody import Custody

__all__ = ["Encryption"]

_log = structlog.get_logger("coterie.client")

_FIRST_S = 60.0
"""Longest wait for a run's first key, seconds."""
_NEWER_S = 5.0
"""Longest wait for a newer key when a plan names an unknown one, seconds."""


class Encryption:
    """The encryption key of a host in one run, with tables that speed up encryption; used by `HostMembers`.

    Parameters
    ----------
    host : Host

    Raises
    ------
    ConfigError
        The host's configuration has no ``[encryption]``.
    """

    def __init__(self, host: Host) -> None:
        settings = host.settings.encryption
        if settings is None or host.thirdparty is None:
            raise ConfigError(
                "this run encrypts its sums, and the host's configuration has no [encryption]",
                hint="name the operator's roster and roster_key there",
            )
        self._way = settings.obfuscators
        self._custody = host.custody
        trust = key_trust(host.settings.run, settings, host.revoked)
        self._keys = PublicKeys(host.thirdparty, trust, host.settings.state / "paillier.json")
        # Made once for each key: building the tables takes seconds.
        self._made: tuple[bytes, Obfuscators] | None = None

    async def for_plan(self, plan: SumPlan) -> Obfuscators:
        """Return the tables with which the members of a plan encrypt.

        Raises
        ------
        Declined
            When the plan's key is not the accepted one, or the plan lets others than its holders decrypt.
        """
        try:
            record = self._keys.record
            if record is None:
                record = await self._keys.newest(_FIRST_S)
            if record.key_id != plan.key_id:
                record = await self._keys.newer(_NEWER_S) or record
            public = self._keys.public()
        except (CertificateError, PeerError, VerificationError) as error:
            raise Declined(f"there is no key to encrypt under: {error.message}") from None
        if record.key_id != plan.key_id:
            raise Declined(
                f"the plan's key is {plan.key_id.hex()[:16]}; accepted is {record.key_id.hex()[:16]}"
            )
        if not {holder.participant for holder in plan.holders} <= set(record.holders):
            raise Declined("the plan lets somebody decrypt who does not hold its key")
        if self._made is None or self._made[0] != record.key_id:
            _log.info("making tables for a paillier key", key=record.key_id.hex()[:16])
            if self._custody is None:
                made = await asyncio.to_thread(obfuscators, public, self._way)
            else:
                made = await asyncio.to_thread(holder_obfuscators, self._held(record.key_id, self._custody))
            self._made = record.key_id, made
        return self._made[1]

    @staticmethod
    def _held(key_id: bytes, custody: Custody) -> SecretKey:
        try:
            return custody.secrets(key_id).secret
        except (CertificateError, VerificationError) as error:
            raise Declined(f"this host does not hold the plan's key: {error.message}") from None
