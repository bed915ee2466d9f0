"""Key and key holders of encrypted sums, for runs in one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from coterie.config.run import EncryptionSettings
from coterie.crypto.identity import Bundle, Identity
from coterie.rounds.conductor import Conductor
from coterie.rounds.sides import Arrays
from coterie.rounds.training import Training
from coterie.secure_sum.obfuscators import holder_obfuscators, obfuscators
from coterie.secure_sum.plan import Member, SumPlan
from coterie.secure_sum.protocol import Subject
from coterie.studies.local_rounds import Holder
from coterie.wire.v1.orchestrator_pb2 import RunPlan

if TYPE_CHECKING:
    from coterie.crypto.paillier import Obfuscators
    from coterie.secure_sum.encrypted import Keyring
    from coterie.secure_sum.key_holder import KeyHolder

__all__ = ["LocalKey", "SharedLocalKey"]


class LocalKey:
    """A fresh Paillier key of a run in one process, with its decrypting clients.

    Parameters
    ----------
    run : str
    settings : EncryptionSettings
    bundles : mapping of bytes to Bundle
        Every contributor's bundle, by participant; may be filled afterwards.
    holders : sequence of str, optional
        Names of the holders' connections; as many decrypting clients as configured when absent.
    """

    def __init__(
        self,
        run: str,
        settings: EncryptionSettings,
        bundles: Mapping[bytes, Bundle],
        holders: Sequence[str] = (),
    ) -> None:
        from coterie.crypto.custody import HeldKey

        self._held = HeldKey.generate(run, 1, settings.terms)
        self._bundles = bundles
        self._pad_keys: dict[bytes, bytes] = {}
        self._devices = tuple(holders) or tuple(f"decrypting-client/key-{n}" for n in range(settings.holders))
        self._identities = [Identity.generate() for _ in self._devices]
        self.obfuscators = self._obfuscators(settings)
        """Source of the obfuscators with which every contributor of this process encrypts."""
        self.holders = {device: Holder(partial(self._half, n)) for n, device in enumerate(self._devices)}
        """Key holders by the names of their connections."""

    def give(self, keys: Keyring) -> None:
        """Enter the public key and its holders into a server's keyring."""
        members = [
            Member(one.participant_id, device)
            for one, device in zip(self._identities, self._devices, strict=True)
        ]
        keys.use(self._held.public, members)

    def _obfuscators(self, settings: EncryptionSettings) -> Obfuscators:
        return obfuscators(self._held.public, settings.obfuscators)

    def _half(self, number: int, plan: SumPlan) -> KeyHolder:
        from coterie.secure_sum.key_holder import KeyHolder

        own = self._identities[number]
        return KeyHolder(plan, number, own, self._held, self._holders, self._bundles, self._pad_keys)

    @property
    def _holders(self) -> list[bytes]:
        """All participants that hold the key."""
        return [one.participant_id for one in self._identities]


class SharedLocalKey(LocalKey):
    """A fresh Paillier key that the hosts of a run in one process share.

    Parameters
    ----------
    plan : RunPlan
    settings, bundles
        As for `LocalKey`.
    hosts : sequence of str
        Names of the hosts' connections.
    items : int
        Number of items in the catalogue.
    """

    def __init__(
        self,
        plan: RunPlan,
        settings: EncryptionSettings,
        bundles: Mapping[bytes, Bundle],
        hosts: Sequence[str],
        items: int,
    ) -> None:
        from coterie.parties.shared_model import SharedModels

        # A connection answers for members or for a holder, so each host's holder gets a connection of its own.
        super().__init__(plan.run_id, settings, bundles, [f"{host}/holder" for host in hosts])
        self._models = SharedModels(plan, lambda key_id: self._held)
        self._items = items

    def subject(self, conductor: Conductor, state: Training, model: bytes) -> Subject:
        """Return the subject of the next sum: the model that key holders change by it."""
        shares = tuple(conductor.shares(state).tolist())
        return Subject(model, self._items, len(conductor.population), shares)

    def opened(self, model: bytes, conductor: Conductor) -> Arrays:
        """Return a sealed version in clear: the arrays that a server keeps without a shared key."""
        return self._models.opened(model, self._items, len(conductor.groups()))[0]

    def _obfuscators(self, settings: EncryptionSettings) -> Obfuscators:
        return holder_obfuscators(self._held.secret)

    def _half(self, number: int, plan: SumPlan) -> KeyHolder:
        from coterie.secure_sum.shared_key import SharedKeyHolder

        return SharedKeyHolder(
            plan,
            number,
            self._identities[number],
            self._held,
            self._holders,
            self._bundles,
            self._pad_keys,
            apply=self._models.applied,
        )
