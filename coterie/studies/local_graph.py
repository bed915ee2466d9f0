"""Graph expansion of a run in one process: a third party of its own, with the store and the checks of the service.

Hosts call it by the client library of the services (`coterie.parties.neighbourhood`), through the same messages, sealed
in the same way; only the network, the COS in between and the exchange of the graph key are missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import grpc
import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from numpy.typing import NDArray

from coterie.crypto.graph_key import GraphSecrets, GraphTerms, sign_graph_record
from coterie.crypto.graph_requests import SealingSecret
from coterie.crypto.identity import Identity
from coterie.parties.expansion import Expansion, UserUpload
from coterie.parties.graph_keys import GraphHolding
from coterie.parties.graph_matching import GraphMatching
from coterie.parties.graph_records import graph_record_to_wire
from coterie.parties.neighbourhood import Neighbourhood, seed_of_user
from coterie.rounds.sides import HostSide, expanding
from coterie.rounds.training import Purpose
from coterie.secure_sum.plan import SumPlan
from coterie.store.expansion import ExpansionStore
from coterie.studies.local_training import Before
from coterie.wire.v1 import expansion_pb2 as wire

__all__ = ["LocalGraph", "LocalThirdParty"]

T = TypeVar("T")

_VALID_S = 30 * 24 * 3600


class LocalGraph:
    """The graph of a run in one process, made when the first host asks for it; a context that deletes it at the end.

    Parameters
    ----------
    run : str
        Id of the run.
    """

    def __init__(self, run: str) -> None:
        self._run = run
        self._party: LocalThirdParty | None = None
        self._holding: GraphHolding | None = None
        self._slots = 0
        self._one_key_at_a_time = asyncio.Lock()

    def __enter__(self) -> LocalGraph:
        return self

    def __exit__(self, *_: object) -> None:
        if self._party is not None:
            self._party.close()

    def before(self, side: HostSide, items: Sequence[str], keys: NDArray[np.uint64]) -> Before | None:
        """Return what finds neighbours for a host's users before sums of training; None for other systems.

        Parameters
        ----------
        side : HostSide
        items : sequence of str
            Keys of the catalogue's items.
        keys : ndarray of uint64, shape (users,)
            Each user's own number.
        """
        expands = expanding(side)
        if expands is None or expands.graph_terms is None:
            return None
        terms = expands.graph_terms
        party = self._made(terms)
        uploads = [UserUpload(None, self._slots + n, seed_of_user(int(key))) for n, key in enumerate(keys)]
        self._slots += len(uploads)

        async def held(least: int) -> GraphHolding:
            async with self._one_key_at_a_time:
                if self._holding is None or self._holding.secrets.epoch < least:
                    self._holding = await self._key(party, terms, least)
                return self._holding

        found = Neighbourhood(Expansion(party, party, party.directory_key), held, uploads.__getitem__)

        def before(plan: SumPlan, model: Mapping[str, NDArray[np.float32]], users: Sequence[int]) -> None:
            if plan.purpose == Purpose.TRAIN.value:
                party.run(found.before(expands, plan, model, items, users))

        return before

    def _made(self, terms: GraphTerms) -> LocalThirdParty:
        """Return the third party, with the graph key of the run's first epoch."""
        if self._party is None:
            self._party = LocalThirdParty()
            self._holding = self._party.run(self._key(self._party, terms, 1))
        return self._party

    async def _key(self, party: LocalThirdParty, terms: GraphTerms, epoch: int) -> GraphHolding:
        """Return the graph key of an epoch, which the third party has from now on."""
        identity, secrets = Identity.generate(), GraphSecrets.generate(self._run, epoch)
        expiry = int(time.time()) + _VALID_S
        record = sign_graph_record(identity, secrets, terms, expiry, [identity.participant_id])
        kept = graph_record_to_wire(record).SerializeToString(deterministic=True)
        await party.store.publish_graph(self._run, epoch, identity.participant_id, expiry, kept, {})
        return GraphHolding(record, secrets)


class LocalThirdParty:
    """A third party in this process, called as a `Channel` is, on a thread of its own."""

    peer = "the third party in this process"

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="coterie-graph-")
        self.store = ExpansionStore(Path(self._folder.name))
        directory = Ed25519PrivateKey.generate()
        self.directory_key = directory.public_key().public_bytes_raw()
        self._key = SealingSecret.generate(directory, int(time.time()) + _VALID_S)
        self._matching = GraphMatching(self.store, lambda _: self._key, contextlib.nullcontext)
        self._calls: Mapping[str, Callable[[Any], Awaitable[Any]]] = {
            "SealingKey": self._sealing_key,
            "Relay": self._relay,
        }
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run calls to the end, also where this thread has an event loop of its own."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def close(self) -> None:
        """Delete the graph."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self.store.close()
        self._folder.cleanup()

    def stub(self, factory: Callable[[grpc.aio.Channel], T]) -> T:
        """Make a generated stub whose calls are answered here."""
        return factory(cast(grpc.aio.Channel, self))

    def unary_unary(
        self, method: str, request_serializer: Callable[[Any], bytes], response_deserializer: Any, **_: Any
    ) -> Callable[..., Awaitable[Any]]:
        """Return what answers a method of either service; messages are those of the wire."""
        answer = self._calls.get(method.rpartition("/")[2])

        async def call(request: Any, timeout: float = 0.0) -> Any:
            if answer is None:
                raise AssertionError(f"nobody calls {method} in one process")
            return await answer(request)

        return call

    async def _sealing_key(self, request: wire.SealingKeyRequest) -> wire.SealingKeyResponse:
        key = self._key.public
        return wire.SealingKeyResponse(
            key_id=key.key_id, public=key.public, expiry=key.expiry, signature=key.signature
        )

    async def _relay(self, request: wire.RelayRequest) -> wire.RelayResponse:
        match request.WhichOneof("request"):
            case "publish":
                return wire.RelayResponse(publish=await self._matching.publish(request.publish.request))
            case "neighbours":
                found = await self._matching.neighbours(request.neighbours.request)
                return wire.RelayResponse(neighbours=found)
            case other:
                raise AssertionError(f"no host relays {other} in one process")
