"""The client of the key directory: fetches participants' key bundles, verifies and caches them."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import grpc
import structlog
from google.protobuf.message import DecodeError

from coterie.crypto import clocks
from coterie.crypto.beacon import Beacon, verify_beacon
from coterie.crypto.clocks import CLOCK_SKEW_S
from coterie.crypto.identity import Bundle, check_newer
from coterie.crypto.transparency import BUNDLE, bundle_statement
from coterie.errors import CryptoError, PeerError
from coterie.net.channel import Channel
from coterie.net.retry import Retry
from coterie.net.status import from_rpc_error
from coterie.net.transparency import LogWatch
from coterie.rounds.population import Population
from coterie.secure_sum.bundles import bundle_from_wire, bundle_to_wire
from coterie.wire.chunks import Assembler, split
from coterie.wire.refusal import ErrorReason, Refusal
from coterie.wire.v1.common_pb2 import Waves
from coterie.wire.v1.thirdparty_pb2 import (
    CommitPopulationRequest,
    CommitPopulationResponse,
    DirectoryEntry,
    ExtendPopulationRequest,
    LookupRequest,
    LookupResponse,
    PublishBundlesRequest,
    PublishBundlesResponse,
    SignedWavesRequest,
)
from coterie.wire.v1.thirdparty_pb2_grpc import KeyDirectoryStub

if TYPE_CHECKING:
    from coterie.wire.v1.thirdparty_pb2_grpc import KeyDirectoryAsyncStub

__all__ = ["PER_LOOKUP", "Directory"]

_log = structlog.get_logger("coterie.directory")

PER_LOOKUP = 1_000
"""Most participants in one look-up."""
_LARGEST_WAVES = 1 << 26
"""Longest waves taken, bytes: nearly two million users."""


class Directory:
    """A party's view of the key directory: bundles, revocations and beacons, each verified with the directory's key.

    Parameters
    ----------
    channel : Channel
        To the third party.
    directory_key : bytes
        Raw Ed25519 public key of the directory, 32 bytes, as enrolment left it in the state folder.
    retry : Retry
        Retry policy of the calls.
    log : LogWatch, optional
        The log in which every bundle has to be.
    """

    def __init__(
        self,
        channel: Channel,
        directory_key: bytes,
        retry: Retry | None = None,
        log: LogWatch | None = None,
    ) -> None:
        self._channel = channel
        self._stub: KeyDirectoryAsyncStub = channel.stub(lambda inner: KeyDirectoryStub(inner))
        self._key = directory_key
        self._retry = retry or Retry()
        self._log = log
        self._known: dict[bytes, Bundle] = {}
        self._revoked: set[bytes] = set()
        self.revision = 0
        """Revision of the directory as of the last look-up."""

    @property
    def revoked(self) -> frozenset[bytes]:
        """Participants that are known to be revoked."""
        return frozenset(self._revoked)

    def exclude(self, participants: Iterable[bytes]) -> None:
        """Remember that participants are revoked; a `RevocationWatch` may call this."""
        self._revoked.update(participants)
        for participant in self._revoked & self._known.keys():
            del self._known[participant]

    async def bundles(self, participants: Iterable[bytes]) -> dict[bytes, Bundle]:
        """Return the verified bundles of participants by id (32 bytes).

        Participants are absent that are unknown (looked up again next time), revoked (never again), or whose
        bundle does not verify now.

        Raises
        ------
        PeerError
            When the directory cannot be reached, or refuses.
        FalseLogError
            When a bundle is not in the third party's log.
        """
        wanted = list(dict.fromkeys(participants))
        now = clocks.now()
        missing = [one for one in wanted if one not in self._revoked and not self._current(one, now)]
        for first in range(0, len(missing), PER_LOOKUP):
            await self._look_up(missing[first : first + PER_LOOKUP])
        return {one: self._known[one] for one in wanted if self._current(one, now)}

    async def publish(self, bundles: Sequence[Bundle], party: str) -> tuple[Bundle, ...]:
        """Publish bundles of the caller's own participants, new or in place of earlier ones.

        Parameters
        ----------
        bundles : sequence of Bundle
        party : str
            Role and name of the caller, which its certificate says and the directory countersigns.

        Returns
        -------
        tuple of Bundle
            Countersigned, in the order given.

        Raises
        ------
        Refusal
            When the directory does not take them; of each thousand it takes all or none.
        PeerError
            When it cannot be reached, or its countersignatures do not verify.
        """
        done: list[Bundle] = []
        for first in range(0, len(bundles), PER_LOOKUP):
            part = bundles[first : first + PER_LOOKUP]
            request = PublishBundlesRequest(bundles=[bundle_to_wire(bundle) for bundle in part])

            async def attempt(request: PublishBundlesRequest = request) -> PublishBundlesResponse:
                response: PublishBundlesResponse = await self._stub.PublishBundles(request)
                return response

            try:
                response = await self._retry(attempt)
                signed = [
                    replace(bundle, countersignature=signature, party=party)
                    for bundle, signature in zip(part, response.countersignatures, strict=True)
                ]
                await asyncio.to_thread(self._verify_all, signed)
            except grpc.aio.AioRpcError as error:
                raise from_rpc_error(error, self._channel.peer) from error
            except (CryptoError, ValueError) as error:
                raise PeerError(f"{self._channel.peer}: countersignatures do not verify: {error}") from error
            done += signed
        return tuple(done)

    async def commit_population(self, run_id: str, population: Population) -> Beacon:
        """Fix the population of a run with the third party; return the beacon that it drew for it.

        Parameters
        ----------
        run_id : str
        population : Population
            Its last users without a beacon: those of the beginning, or a wave after others that have theirs.

        Raises
        ------
        PeerError
            When the directory cannot be reached, or its signature does not verify.
        Refusal
            When it refuses.
        """
        sha256 = await asyncio.to_thread(population.hash, run_id)
        response = await self._extend(run_id, population) if population.waves else None
        if response is None:
            # It may have a million users.
            payload = await asyncio.to_thread(_packed, population)
            digest = hashlib.sha256(payload).digest()

            def requests() -> Iterator[CommitPopulationRequest]:
                for chunk in split(payload):
                    yield CommitPopulationRequest(run_id=run_id, sha256=digest, chunk=chunk)

            async def attempt() -> CommitPopulationResponse:
                done: CommitPopulationResponse = await self._stub.CommitPopulation(requests())
                return done

            try:
                response = await self._retry(attempt)
            except grpc.aio.AioRpcError as error:
                raise from_rpc_error(error, self._channel.peer) from error
        try:
            verify_beacon(run_id, sha256, response.beacon, response.signature, self._key)
        except CryptoError as error:
            raise PeerError(f"{self._channel.peer}: {error.message}") from error
        return Beacon(response.beacon, response.signature)

    async def _extend(self, run_id: str, population: Population) -> CommitPopulationResponse | None:
        """Extend the population by its last wave, of which alone it is told; None where it wants the whole population.

        A third party of an earlier release does, and one that does not know who the users before are.
        """
        number = len(population.waves)
        *_, before, _ = population.hashes(run_id)
        payload = population.later_waves(number - 1).SerializeToString(deterministic=True)
        digest = hashlib.sha256(payload).digest()

        def requests() -> Iterator[ExtendPopulationRequest]:
            head = ExtendPopulationRequest(run_id=run_id, sha256=digest, number=number, before_sha256=before)
            for chunk in split(payload):
                head.chunk.CopyFrom(chunk)
                yield head
                head = ExtendPopulationRequest()

        async def attempt() -> CommitPopulationResponse:
            done: CommitPopulationResponse = await self._stub.ExtendPopulation(requests())
            return done

        try:
            return await self._retry(attempt)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                return None
            raised = from_rpc_error(error, self._channel.peer)
            if isinstance(raised, Refusal) and raised.reason == ErrorReason.ERROR_REASON_WRONG_STATE:
                return None
            raise raised from error

    async def signed_waves(self, run_id: str, population: Population) -> Population:
        """Return the population of a run with all waves that the third party has signed after those it has here.

        Raises
        ------
        PeerError
            When the directory cannot be reached, or its waves do not extend this population by its signatures.
        Refusal
            When it refuses.
        """
        request = SignedWavesRequest(run_id=run_id, after=len(population.waves))

        async def attempt() -> bytes:
            assembler, sha256 = Assembler(_LARGEST_WAVES), b""
            async for response in self._stub.SignedWaves(request):
                sha256 = sha256 or response.sha256
                assembler.add(response.chunk)
            return assembler.payload(sha256)

        try:
            payload = await self._retry(attempt)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                # One of an earlier release, which signs no waves.
                return population
            raise from_rpc_error(error, self._channel.peer) from error
        try:
            found = await asyncio.to_thread(lambda: population.extended(Waves.FromString(payload)))
            hashes = await asyncio.to_thread(found.hashes, run_id)
            first = len(population.waves) + 1
            for sha256, (beacon, signature) in zip(hashes[first:], found.beacons[first:], strict=True):
                verify_beacon(run_id, sha256, beacon, signature, self._key)
        except (CryptoError, DecodeError) as error:
            raise PeerError(f"{self._channel.peer}: its waves do not follow those here: {error}") from error
        return found

    def _current(self, participant: bytes, now: int) -> bool:
        bundle = self._known.get(participant)
        return bundle is not None and now < bundle.not_after + CLOCK_SKEW_S

    async def _look_up(self, participants: Sequence[bytes]) -> None:
        async def attempt() -> LookupResponse:
            response: LookupResponse = await self._stub.Lookup(LookupRequest(participants=participants))
            return response

        try:
            response = await self._retry(attempt)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, self._channel.peer) from error
        self.revision = response.revision
        self.exclude(entry.participant for entry in response.entries if entry.revoked)
        found = await asyncio.to_thread(self._verified, response.entries, frozenset(participants))
        if self._log is not None:
            await self._log.require(BUNDLE, [bundle_statement(bundle) for bundle in found.values()])
        # Checked again: a revocation may have arrived while the thread verified.
        self._known.update({one: bundle for one, bundle in found.items() if one not in self._revoked})

    def _verified(self, entries: Iterable[DirectoryEntry], asked: frozenset[bytes]) -> dict[bytes, Bundle]:
        now = clocks.now()
        found: dict[bytes, Bundle] = {}
        for entry in entries:
            if entry.revoked or not entry.HasField("bundle"):
                continue
            try:
                bundle = bundle_from_wire(entry.bundle)
                bundle.verify(self._key, now)
                held = self._known.get(bundle.participant_id)
                if held is not None:
                    check_newer(held, bundle)
            except (CryptoError, Refusal) as error:
                _log.warning("a bundle of the directory does not verify", reason=error.message)
                continue
            if bundle.participant_id in asked:
                found[bundle.participant_id] = bundle
        return found

    def _verify_all(self, bundles: Iterable[Bundle]) -> None:
        now = clocks.now()
        for bundle in bundles:
            bundle.verify(self._key, now)


def _packed(population: Population) -> bytes:
    return population.to_wire().SerializeToString(deterministic=True)
