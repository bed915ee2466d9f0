"""A party that poses as a data owner: it answers clients with its own certificate, and opens what they seal for it."""

import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc

from coterie.crypto.authority import logical_name
from coterie.crypto.identity import Prekey, load_many
from coterie.crypto.sealed import Agreement, Direction, Header, OpeningSession, decode_records
from coterie.launch.children import Child
from coterie.net.credentials import TlsFiles
from coterie.net.enrolment import IDENTITIES, saved_bundles
from coterie.secure_sum.bundles import bundle_to_wire
from coterie.wire.v1 import data_owner_pb2 as wire
from coterie.wire.v1.data_owner_pb2_grpc import DataOwnerServicer, add_DataOwnerServicer_to_server
from coterie.wire.v1.orchestrator_pb2 import CatalogueOwner

_HOUR_S = 3600


class Accomplice(DataOwnerServicer):
    """The accomplice of a COS; use it with ``async with``, once its party is enrolled.

    Parameters
    ----------
    party, victim : Child
        The client host or data owner whose certificate and first participant it uses, and the client host whose
        records it opens.  Of the victim it reads only public keys, which the COS could give it.
    run_id : str
    introduction : Path
        File in which the COS finds how to introduce it.
    """

    def __init__(self, party: Child, victim: Child, run_id: str, introduction: Path) -> None:
        self._party = party
        self._run_id = run_id
        self._identity = load_many(party.state / IDENTITIES)[0]
        self._prekey = Prekey.generate(self._identity, run_id, int(time.time()) + _HOUR_S)
        self._victim = victim
        self._introduction = introduction
        self._server = grpc.aio.server()
        self.opened: set[int] = set()
        """Items, by their numbers in the catalogue, with which the victim's users interacted."""
        self.asked = 0
        """Number of calls."""

    async def __aenter__(self) -> Self:
        add_DataOwnerServicer_to_server(self, self._server)
        tls = TlsFiles(self._party.state / "tls").server_credentials()
        address = f"127.0.0.1:{self._server.add_secure_port('127.0.0.1:0', tls)}"
        await self._server.start()
        owner = CatalogueOwner(
            bundle=bundle_to_wire(saved_bundles(self._party.state)[0]),
            address=address,
            tls_name=logical_name(self._party.role, self._party.name),
        )
        self._introduction.write_bytes(owner.SerializeToString())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._server.stop(None)

    async def OwnerInfo(self, request: wire.OwnerInfoRequest, context: Any) -> wire.OwnerInfoResponse:  # noqa: N802
        """Offer a prekey, as an owner does."""
        self.asked += 1
        public = self._prekey.public
        return wire.OwnerInfoResponse(
            prekey=wire.Prekey(
                prekey_id=public.prekey_id,
                public=public.public,
                expiry=public.expiry,
                signature=public.signature,
            )
        )

    async def SubmitInteractions(  # noqa: N802
        self, request_iterator: AsyncIterator[wire.SubmitInteractionsRequest], context: Any
    ) -> AsyncIterator[wire.SubmitInteractionsResponse]:
        """Open records of the victim's users, and acknowledge them."""
        async for request in request_iterator:
            self.asked += 1
            yield wire.SubmitInteractionsResponse(durable=[self._open(batch) for batch in request.batches])

    def _open(self, batch: wire.SealedBatch) -> int:
        header = Header.parse(batch.header)
        (user,) = [one for one in saved_bundles(self._victim.state) if one.participant_id == batch.user]
        agreement = Agreement.of_owner(self._prekey, self._identity.participant_id, user)
        records = OpeningSession(agreement, Direction.TO_OWNER).open(batch.header, batch.ciphertext)
        items, _ = decode_records(records, header.count)
        self.opened.update(items.tolist())
        return header.last_sequence
