"""Keep connections, prekeys and users' sealing sessions for the data owners to which a host sends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from coterie.crypto import clocks
from coterie.crypto.identity import Bundle, Identity, PublicPrekey
from coterie.crypto.sealed import Agreement, Direction, OpeningSession, SealingSession, SenderProcess
from coterie.net.channel import Channel
from coterie.process.runtime import Runtime
from coterie.secure_sum.bundles import bundle_from_wire
from coterie.wire.v1 import data_owner_pb2 as wire
from coterie.wire.v1.data_owner_pb2_grpc import DataOwnerStub
from coterie.wire.v1.orchestrator_pb2 import CatalogueOwner
from coterie_client.history import Outbox

__all__ = ["Recipient", "Recipients", "Session"]


@dataclass
class Recipient:
    """A data owner to which a host's users send."""

    owner: bytes
    name: str
    bundle: Bundle
    channel: Channel
    prekey: PublicPrekey | None = None
    latest: Outbox | None = None
    """Outbox with the owner's latest acknowledgement, which an owner restored from a backup lacks first."""

    @property
    def stub(self) -> Any:
        """Client stub of the owner's service."""
        return self.channel.stub(DataOwnerStub)


class Session(NamedTuple):
    """The two sessions of a user with an owner: for sealing to the owner, and opening its replies."""

    sealing: SealingSession
    opening: OpeningSession


class Recipients:
    """All data owners that a host has known in a run; used by `Delivery` and `Visits`.

    Parameters
    ----------
    runtime : Runtime
        For channels and accounts.
    run_id : str
    identities : sequence of Identity
        Keys of the users; user ``n`` at position ``n - 1``.
    directory_key : bytes
        The directory's public key; owners' bundles must carry its countersignature.
    """

    def __init__(
        self, runtime: Runtime, run_id: str, identities: Sequence[Identity], directory_key: bytes
    ) -> None:
        self._runtime = runtime
        self._run_id = run_id
        self._identities = identities
        self._directory_key = directory_key
        self._process = SenderProcess()
        self._known: dict[bytes, Recipient] = {}
        self._channels: dict[tuple[str, str], Channel] = {}
        self._sessions: dict[tuple[int, bytes, bytes], Session] = {}

    def __getitem__(self, owner: bytes) -> Recipient:
        """Return an owner by participant id, at its last known address."""
        return self._known[owner]

    def know(self, owners: Iterable[CatalogueOwner]) -> tuple[set[bytes], list[Recipient]]:
        """Learn the owners of a catalogue.

        Returns
        -------
        present : set of bytes
            Their participant ids.
        new : list of Recipient
            Owners that are new, or at another address than before.

        Raises
        ------
        VerificationError
            When an owner's bundle does not carry the directory's countersignature.
        """
        present, new = set(), []
        for owner in owners:
            bundle = bundle_from_wire(owner.bundle)
            bundle.verify(self._directory_key, clocks.now())
            self._runtime.note(bundle)
            place = (owner.address, owner.tls_name)
            if place not in self._channels:
                self._channels[place] = self._runtime.connect_to(
                    owner.address, tls_name=owner.tls_name, peer=f"data-owner/{owner.name}"
                )
                self._runtime.compare_heads_with(self._channels[place])
            held = self._known.get(bundle.participant_id)
            if held is None or held.channel is not self._channels[place]:
                recipient = Recipient(bundle.participant_id, owner.name, bundle, self._channels[place])
                self._known[recipient.owner] = recipient
                new.append(recipient)
            present.add(bundle.participant_id)
        return present, new

    async def prekey(self, recipient: Recipient) -> PublicPrekey:
        """Return an owner's current prekey; ask the owner when none is held or it has expired.

        Raises
        ------
        FalseLogError
            The owner's bundle is not in the third party's log.
        """
        await self._runtime.settled()
        held = recipient.prekey
        if held is not None and held.expiry > clocks.now_s():
            return held
        request = wire.OwnerInfoRequest(run_id=self._run_id, owner=recipient.owner)
        offered = (await recipient.stub.OwnerInfo(request)).prekey
        prekey = PublicPrekey(
            self._run_id, offered.prekey_id, offered.public, offered.expiry, offered.signature
        )
        prekey.verify(recipient.bundle.signing_public, clocks.now())
        recipient.prekey = prekey
        return prekey

    def sessions(self, recipient: Recipient, prekey: PublicPrekey, users: Sequence[int]) -> list[Session]:
        """Return a session for each user, running key agreement for those that are missing."""
        keys = [(user, recipient.owner, prekey.prekey_id) for user in users]
        missing = {key for key in keys if key not in self._sessions}
        if missing:
            with self._runtime.accounting.activity("key agreement", len(missing)):
                for key in missing:
                    agreement = Agreement.of_user(self._identities[key[0] - 1], recipient.owner, prekey)
                    self._sessions[key] = Session(
                        SealingSession(agreement, Direction.TO_OWNER, self._process),
                        OpeningSession(agreement, Direction.TO_USER),
                    )
        return [self._sessions[key] for key in keys]
