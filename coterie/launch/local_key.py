"""The key of an encrypted sum in one process, and the parties that hold it: the services' machines without services."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from coterie.config.encryption import EncryptionSettings
from coterie.crypto.identity import Bundle, Identity
from coterie.rounds.encryption import obfuscators
from coterie.secure_sum.plan import Member, SumPlan
from coterie.simulate.rounds import Holder

if TYPE_CHECKING:
    from coterie.secure_sum.encrypted import EncryptedServer
    from coterie.secure_sum.key_holder import KeyHolder

__all__ = ["LocalKey"]


class LocalKey:
    """A fresh key, with as many holders as configured.

    Parameters
    ----------
    run : str
    settings : EncryptionSettings
    bundles : mapping of bytes to Bundle
        Of every contributor, by participant; may be filled afterwards.
    """

    def __init__(self, run: str, settings: EncryptionSettings, bundles: Mapping[bytes, Bundle]) -> None:
        from coterie.crypto.custody import HeldKey

        self._held = HeldKey.generate(run, 1, settings.terms)
        self._bundles = bundles
        self._tag_keys: dict[bytes, bytes] = {}
        self._identities = [Identity.generate() for _ in range(settings.holders)]
        self.obfuscators = obfuscators(self._held.public, settings.obfuscators)
        """What every contributor of this process encrypts with."""
        self.holders = {self._device(n): Holder(partial(self._half, n)) for n in range(settings.holders)}
        """The holders' connections by device."""

    def give(self, server: EncryptedServer) -> None:
        """Let a server form sums under this key."""
        members = [Member(one.participant_id, self._device(n)) for n, one in enumerate(self._identities)]
        server.keys.use(self._held.public, members)

    def _device(self, number: int) -> str:
        return f"decrypting-client/key-{number}"

    def _half(self, number: int, plan: SumPlan) -> KeyHolder:
        from coterie.secure_sum.key_holder import KeyHolder

        return KeyHolder(plan, number, self._identities[number], self._held, self._bundles, self._tag_keys)
