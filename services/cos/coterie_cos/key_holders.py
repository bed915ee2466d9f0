"""Keep the key under which a run's sums are encrypted, and say which holders decrypt."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import structlog

from coterie.crypto.key_record import KeyRecord
from coterie.secure_sum.plan import Member, SumPlan
from coterie_cos.participants import Registry

if TYPE_CHECKING:
    from coterie.crypto.paillier import PublicKey
    from coterie.secure_sum.encrypted import Keyring

__all__ = ["KeyHolders"]

_log = structlog.get_logger("coterie.cos")


class KeyHolders:
    """The encryption key and key holders of one run; used by `RoundsRun`.

    The server takes the key as the third party gives it: contributors and holders verify it themselves against the
    operator's roster, and take part under no other key.

    Parameters
    ----------
    keys : Keyring
        The secure sum's keyring, which is told the key and the present holders.
    registry : Registry
    present, revoked : callable
        Tells whether a party was heard lately; whether a participant is revoked.
    """

    def __init__(
        self,
        keys: Keyring,
        registry: Registry,
        present: Callable[[str], bool],
        revoked: Callable[[bytes], bool],
    ) -> None:
        self._keys = keys
        self._registry = registry
        self._present = present
        self._revoked = revoked
        self._key: tuple[KeyRecord, PublicKey] | None = None

    @property
    def epoch(self) -> int:
        """Epoch of the key; 0 before there is one."""
        return 0 if self._key is None else self._key[0].epoch

    def take(self, record: KeyRecord) -> None:
        """Encrypt sums under this key from now on.

        Raises
        ------
        CryptoError
            When the record's key is malformed or cannot be a valid key.
        """
        self._key = record, record.key.as_stated()
        _log.info("paillier key", run=record.run, epoch=record.epoch, key=record.key_id.hex()[:16])
        self.choose()

    @property
    def complete(self) -> bool:
        """Whether there is a key and all of its holders are present."""
        return self._key is not None and len(self._there()) == len(self._key[0].holders)

    @property
    def outdated(self) -> str:
        """Reason why nobody encrypts under the present key, in words; empty while the key may be used.

        Contributors refuse a key once one of its holders is revoked, until the other holders have made another one.
        """
        gone = [] if self._key is None else [one for one in self._key[0].holders if self._revoked(one)]
        if self._key is None or not gone:
            return ""
        return (
            f"another key is needed, and not made yet: {len(gone)} of {len(self._key[0].holders)} holders of the key "
            f"of epoch {self.epoch} are revoked"
        )

    @property
    def says(self) -> str:
        """State of the gathering of key holders, in words, for the reason of a failed gathering."""
        if self._key is None:
            return "its key holders have no key yet"
        return f"{len(self._there())} of {len(self._key[0].holders)} key holders came"

    def choose(self) -> None:
        """Let the next sum name all holders: those that are absent are not waited for.

        Holders decrypt nothing that no majority of all holders has confirmed, so a plan names also those that are away.
        """
        if self._key is not None:
            self._keys.use(self._key[1], self._registered())

    def knows(self, plan: SumPlan) -> bool:
        """Return whether a plan's key is the present one."""
        return self._key is not None and self._key[0].key_id == plan.key_id

    def slots(self, plan: SumPlan) -> dict[int, list[int]]:
        """Return the slot of each holder of a plan, by every number under which the holder is asked."""
        found = {}
        for holder, one in enumerate(plan.holders):
            slot = self._registry.slot_of(one.participant)
            if slot is not None:
                found.update({n: [slot] for n in plan.numbers_of(plan.respondent(holder, holder))})
        return found

    def _there(self) -> list[Member]:
        return [one for one in self._registered() if self._present(one.device)]

    def _registered(self) -> list[Member]:
        if self._key is None:
            return []
        found = []
        for participant in self._key[0].holders:
            slot = self._registry.slot_of(participant)
            if slot is not None and not self._revoked(participant):
                found.append(Member(participant, self._registry.by_slot[slot].party))
        return found
