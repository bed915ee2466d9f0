"""Answer certified parties: look-ups of bundles, new bundles, renewals, revocations, Paillier keys."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any

import structlog
from google.protobuf.message import DecodeError

from coterie.crypto.beacon import Beacon
from coterie.net.server import Guard, certificate_of, current_peer
from coterie.net.uncancelled import completed
from coterie.parties.request_checks import check_run
from coterie.rounds.population import Population, waves_to_wire
from coterie.store.thirdparty import Renewed, Revoked, ThirdPartyStore
from coterie.telemetry.accounting import Accounting
from coterie.wire.chunks import Assembler, split
from coterie.wire.refusal import ErrorReason, Refusal
from coterie.wire.v1.common_pb2 import KeyBundle, Waves
from coterie.wire.v1.common_pb2 import Population as PopulationMessage
from coterie.wire.v1.thirdparty_pb2 import (
    CommitPopulationRequest,
    CommitPopulationResponse,
    CountersignPaillierKeyRequest,
    CountersignPaillierKeyResponse,
    DirectoryEntry,
    ExtendPopulationRequest,
    LookupRequest,
    LookupResponse,
    PaillierEnvelopeRequest,
    PaillierEnvelopeResponse,
    PaillierPublicKeyRequest,
    PaillierPublicKeyResponse,
    PublishBundlesRequest,
    PublishBundlesResponse,
    PublishPaillierKeyRequest,
    PublishPaillierKeyResponse,
    RenewCertificateRequest,
    RenewCertificateResponse,
    RevocationsRequest,
    RevocationsResponse,
    RevokeRequest,
    RevokeResponse,
    SignedWavesRequest,
    SignedWavesResponse,
)
from coterie.wire.v1.thirdparty_pb2_grpc import KeyDirectoryServicer
from coterie.wire.versions import agree, own
from coterie_thirdparty.certification import PER_MESSAGE, Certification, Countersigned, check_count
from coterie_thirdparty.paillier import PaillierRelay
from coterie_thirdparty.storing import storing

__all__ = ["KeyDirectory", "parsed_wave"]

_log = structlog.get_logger("coterie.thirdparty")

_HOLD_MS = 20_000
_PER_REVOCATION = 10_000
_DIGEST_BYTES = 32
_LARGEST_POPULATION = 1 << 26
"""Longest population taken, bytes: nearly two million users."""


class KeyDirectory(KeyDirectoryServicer):
    """The gRPC servicer of the key directory, for parties that have a certificate.

    Parameters
    ----------
    certification : Certification
        Signs certificates, bundles and beacons.
    store : ThirdPartyStore
        Keeps bundles, certificates, revocations and beacons.
    guard : Guard
        This process's guard, told of revoked certificates at once.
    paillier : PaillierRelay
        Answers the calls about Paillier keys.
    accounting : Accounting
        Counts CPU time for signatures.
    store_holds : callable
        Called with whether the store works.
    """

    def __init__(
        self,
        certification: Certification,
        store: ThirdPartyStore,
        guard: Guard,
        paillier: PaillierRelay,
        accounting: Accounting,
        store_holds: Callable[[bool], None],
    ) -> None:
        self._certification = certification
        self._store = store
        self._guard = guard
        self._paillier = paillier
        self._accounting = accounting
        self._store_holds = store_holds
        self._changed = asyncio.Event()
        self._stopping = False

    async def restore(self) -> None:
        """Load revoked certificates after a restart, so that they are refused."""
        self._guard.revoke((await self._store.revocations()).certificates)

    def release(self) -> None:
        """Answer all waiting callers, and hold no call from now on: the service stops."""
        self._stopping = True
        self._wake()
        self._paillier.release()

    async def Lookup(self, request: LookupRequest, context: Any) -> LookupResponse:  # noqa: N802 - contract
        """Return participants' bundles, in the order of the request."""
        check_count(len(request.participants), PER_MESSAGE, "participants")
        _check_digests(request.participants, "participants")
        with storing(self._store_holds):
            found = await self._store.lookup(list(dict.fromkeys(request.participants)))
        entries = []
        for participant in request.participants:
            message = found.messages.get(participant)
            entries.append(
                DirectoryEntry(
                    participant=participant,
                    bundle=None if message is None else KeyBundle.FromString(message),
                    revoked=participant in found.revoked,
                )
            )
        return LookupResponse(revision=found.revision, entries=entries)

    async def PublishBundles(  # noqa: N802 - the contract's name
        self, request: PublishBundlesRequest, context: Any
    ) -> PublishBundlesResponse:
        """Countersign and store bundles of the caller's participants, all or none."""
        check_count(len(request.bundles), PER_MESSAGE, "bundles")
        peer = current_peer()
        done = await asyncio.to_thread(self._countersign, request.bundles, str(peer))
        with storing(self._store_holds):
            await self._store.publish(peer.fingerprint, [one.published for one in done])
        return PublishBundlesResponse(countersignatures=[one.signature for one in done])

    async def RenewCertificate(  # noqa: N802 - the contract's name
        self, request: RenewCertificateRequest, context: Any
    ) -> RenewCertificateResponse:
        """Issue a certificate to replace the one that the caller shows."""
        peer = current_peer()
        self._certification.check_due(certificate_of(context))
        issued = self._certification.issue(request.certificate_request, peer.role, peer.name)
        renewed = Renewed(issued.fingerprint, issued.public_key_hash, issued.chain, int(time.time()))
        with storing(self._store_holds):
            chain = await self._store.renew(peer.fingerprint, renewed)
        _log.info("renewed a certificate", party=str(peer))
        return RenewCertificateResponse(certificate_chain=chain)

    async def Beacon(self, request: Any, context: Any) -> Any:  # noqa: N802 - the contract's name
        """Refuse: a beacon is drawn for a population."""
        raise Refusal(
            ErrorReason.ERROR_REASON_WRONG_STATE,
            "a beacon is drawn for the population of a run",
            field="population",
            expected="CommitPopulation",
        )

    async def CommitPopulation(  # noqa: N802 - the contract's name
        self, request_iterator: AsyncIterator[CommitPopulationRequest], context: Any
    ) -> CommitPopulationResponse:
        """Fix the population of a run, or a wave that extends it, and return the beacon that is drawn for it, once."""
        head: CommitPopulationRequest | None = None
        assembler = Assembler(_LARGEST_POPULATION)
        async for request in request_iterator:
            if head is None:
                head = request
                check_run(head.run_id, "run_id")
                _check_digests([head.sha256], "sha256")
            assembler.add(request.chunk)
        if head is None:
            raise Refusal(ErrorReason.ERROR_REASON_INVALID_FIELD, "an empty population", field="run_id")
        population = await asyncio.to_thread(_population, assembler.payload(head.sha256))
        return await completed(self._commit(head.run_id, population))

    async def ExtendPopulation(  # noqa: N802 - the contract's name
        self, request_iterator: AsyncIterator[ExtendPopulationRequest], context: Any
    ) -> CommitPopulationResponse:
        """Extend the population of a run by a wave, and return the beacon that is drawn for it, once."""
        head: ExtendPopulationRequest | None = None
        assembler = Assembler(_LARGEST_POPULATION)
        async for request in request_iterator:
            if head is None:
                head = request
                check_run(head.run_id, "run_id")
                _check_digests([head.sha256], "sha256")
                _check_digests([head.before_sha256], "before_sha256")
            assembler.add(request.chunk)
        if head is None or not head.number:
            raise Refusal(
                ErrorReason.ERROR_REASON_INVALID_FIELD, "no wave", field="number", expected="1 at least"
            )
        wave = await asyncio.to_thread(parsed_wave, assembler.payload(head.sha256))
        return await completed(self._extend(head, wave))

    async def _extend(self, head: ExtendPopulationRequest, wave: Population) -> CommitPopulationResponse:
        def draw(sha256: bytes) -> Beacon:
            return self._certification.beacon(head.run_id, sha256)

        with storing(self._store_holds):
            kept = await self._store.extend_population(
                head.run_id, head.number, head.before_sha256, wave, draw
            )
        _log.info("extended a population", run=head.run_id, users=len(wave), wave=head.number)
        return CommitPopulationResponse(beacon=kept.value, signature=kept.signature)

    async def _commit(self, run_id: str, population: Population) -> CommitPopulationResponse:
        def draw(sha256: bytes) -> Beacon:
            return self._certification.beacon(run_id, sha256)

        with storing(self._store_holds):
            kept = await (
                self._store.commit_wave(run_id, population, draw)
                if population.waves
                else self._store.commit_population(run_id, population.participants, population.devices, draw)
            )
        _log.info("fixed a population", run=run_id, users=len(population), waves=len(population.waves))
        return CommitPopulationResponse(beacon=kept.value, signature=kept.signature)

    async def SignedWaves(  # noqa: N802 - the contract's name
        self, request: SignedWavesRequest, context: Any
    ) -> AsyncIterator[SignedWavesResponse]:
        """Stream the waves of a run that follow those of the caller."""
        check_run(request.run_id, "run_id")
        with storing(self._store_holds):
            participants, devices, waves = await self._store.signed_waves(request.run_id, request.after)
        payload = waves_to_wire(participants, devices, waves).SerializeToString()
        head = SignedWavesResponse(sha256=hashlib.sha256(payload).digest())
        for chunk in split(payload):
            head.chunk.CopyFrom(chunk)
            yield head
            head = SignedWavesResponse()

    async def Revoke(self, request: RevokeRequest, context: Any) -> RevokeResponse:  # noqa: N802 - contract
        """Revoke participants and certificates for good; end revoked callers' calls, and answer waiting callers."""
        for field in ("participants", "certificates"):
            subjects = getattr(request, field)
            check_count(len(subjects), _PER_REVOCATION, field)
            _check_digests(subjects, field)
        if not request.participants and not request.certificates:
            raise Refusal(
                ErrorReason.ERROR_REASON_INVALID_FIELD,
                "nothing to revoke",
                field="participants",
                expected="at least one participant or certificate",
            )
        return RevokeResponse(revision=await completed(self._revoke(request)))

    async def _revoke(self, request: RevokeRequest) -> int:
        with storing(self._store_holds):
            revision = await self._store.revoke(request.participants, request.certificates)
            held = await self._store.revocations()
        # End their calls before waking others, so that no revoked caller gets another answer.
        self._guard.revoke(held.certificates)
        self._wake()
        _log.warning(
            "revoked",
            by=str(current_peer()),
            participants=len(request.participants),
            certificates=len(request.certificates),
        )
        return revision

    async def Revocations(  # noqa: N802 - the contract's name
        self, request: RevocationsRequest, context: Any
    ) -> RevocationsResponse:
        """Return all revocations, at once when they are newer than the caller's revision, otherwise after a hold."""
        agree(str(current_peer()), request.protocol)
        changed = self._changed
        held = await self._revocations()
        hold_ms = min(request.hold_ms, _HOLD_MS)
        if hold_ms and not self._stopping and _is_current(request.held_revision, held):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), hold_ms / 1000)
            held = await self._revocations()
        return RevocationsResponse(
            revision=held.revision,
            participants=held.participants,
            certificates=held.certificates,
            protocol=own(),
        )

    async def PublishPaillierKey(  # noqa: N802 - the contract's name
        self, request: PublishPaillierKeyRequest, context: Any
    ) -> PublishPaillierKeyResponse:
        """Take the Paillier key of a run's next epoch from the holder that made it."""
        await completed(self._paillier.publish(str(current_peer()), request))
        return PublishPaillierKeyResponse()

    async def CountersignPaillierKey(  # noqa: N802 - the contract's name
        self, request: CountersignPaillierKeyRequest, context: Any
    ) -> CountersignPaillierKeyResponse:
        """Take another holder's countersignature of a Paillier key."""
        complete = await completed(self._paillier.countersign(str(current_peer()), request))
        return CountersignPaillierKeyResponse(complete=complete)

    async def PaillierPublicKey(  # noqa: N802 - the contract's name
        self, request: PaillierPublicKeyRequest, context: Any
    ) -> PaillierPublicKeyResponse:
        """Return a run's public key, at once when it is newer than the caller's, otherwise after a hold."""
        return await self._paillier.public_key(request)

    async def PaillierEnvelope(  # noqa: N802 - the contract's name
        self, request: PaillierEnvelopeRequest, context: Any
    ) -> PaillierEnvelopeResponse:
        """Return the newest key and the envelope sealed for one of the caller's participants."""
        return await self._paillier.envelope(str(current_peer()), request)

    async def _revocations(self) -> Revoked:
        with storing(self._store_holds):
            return await self._store.revocations()

    def _countersign(self, bundles: Sequence[KeyBundle], party: str) -> list[Countersigned]:
        with self._accounting.activity("signatures", len(bundles)):
            return self._certification.countersign(bundles, party)

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def _is_current(revision: int, held: Revoked) -> bool:
    """Return whether a caller that holds this revision knows all revocations.

    A revision above ours comes from before this store was restored from a backup: such a caller is answered at once.
    """
    return held.newest <= revision <= held.revision and revision > 0


def _population(payload: bytes) -> Population:
    """Parse a population, and check its order."""
    return _parsed(lambda: Population.from_wire(PopulationMessage.FromString(payload)))


def parsed_wave(payload: bytes) -> Population:
    """Parse a message with one wave, and check the order of its users.

    Raises
    ------
    Refusal
        INVALID_FIELD when the message is no wave, or has several; when users do not ascend, or one comes twice.
    """

    def parse() -> Population:
        found = Population([], []).extended(Waves.FromString(payload))
        if len(found.waves) != 1:
            raise ValueError(f"{len(found.waves)} waves, expected one")
        return found

    return _parsed(parse)


def _parsed(parse: Callable[[], Population]) -> Population:
    try:
        population = parse()
        population.check_order()
    except (DecodeError, ValueError) as error:
        raise Refusal(
            ErrorReason.ERROR_REASON_INVALID_FIELD,
            str(error) if isinstance(error, ValueError) else "that is no population",
            field="population",
            expected="users in ascending order of their ids, each once; waves after each other",
        ) from error
    return population


def _check_digests(values: Iterable[bytes], field: str) -> None:
    for value in values:
        if len(value) != _DIGEST_BYTES:
            raise Refusal(
                ErrorReason.ERROR_REASON_INVALID_FIELD,
                f"{len(value)} bytes",
                field=field,
                expected=f"{_DIGEST_BYTES} bytes each",
            )
