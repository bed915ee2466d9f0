"""Meta-latents at a client host: open a set, publish vectors, read pseudo meta-latents, have vectors forgotten.

A host that holds the run's Paillier key (`coterie.parties.custody`) calls `LatentCalls`.  Vectors are encrypted under
that key, sealed to the third party, and go through the COS: neither can read one, and only the COS knows whose it is.
"""

from __future__ import annotations

import base64
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import grpc
import numpy as np
import numpy.typing as npt
import structlog

from coterie.crypto import clocks
from coterie.crypto.graph_requests import Kind, UploadPlace, upload_id_of
from coterie.crypto.identity import Identity
from coterie.crypto.latent_codes import encode_latent, latents_of_sums
from coterie.crypto.latent_terms import FRACTION_BITS, LatentRecord, LatentTerms, sign_latent_record
from coterie.crypto.verification import Reason, VerificationError
from coterie.errors import CryptoError, PeerError
from coterie.net.channel import Channel
from coterie.net.retry import Retry
from coterie.net.status import from_rpc_error
from coterie.parties.custody import Holding
from coterie.parties.latent_records import latent_record_from_wire, latent_record_to_wire
from coterie.parties.sealed_requests import RequestSealer, is_gone
from coterie.parties.upload_file import read_upload, seeded_secret, write_upload
from coterie.wire.refusal import ErrorReason, Refusal
from coterie.wire.v1 import expansion_pb2
from coterie.wire.v1 import latents_pb2 as wire
from coterie.wire.v1.latents_pb2_grpc import LatentRelayStub, MetaLatentsStub

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from coterie.crypto.paillier import Obfuscators
    from coterie.wire.v1.latents_pb2_grpc import LatentRelayAsyncStub, MetaLatentsAsyncStub

__all__ = ["LatentCalls", "LatentSet", "LatentUpload", "LatentUploads"]

_log = structlog.get_logger("coterie.expansion")

T = TypeVar("T")

_CALL_S = 10.0
"""Longest time for one call, seconds: a round that is about to be answered waits for it."""
_LOOK_S = 10.0
_SECRET = 32


class LatentSet(NamedTuple):
    """A set of meta-latents, as a holder of the Paillier key knows it."""

    record: LatentRecord
    """Verified."""
    ready: bool
    """Whether pseudo meta-latents can be read."""
    void: bool
    """Whether there are none, and will be none."""
    key_users: int


class LatentUpload:
    """What a host keeps of one user's vector in one run: the upload of the newest epoch.

    Parameters
    ----------
    path : Path
        File of this user and run, mode 0600; made at the first use.
    slot : int
        The user's slot in the run.
    seed : bytes, optional
        Seed of an experiment, of which upload ids follow, so that combinations do; the operating system's randomness
        if left out.

    Raises
    ------
    CertificateError
        When the file is damaged, or readable by others.
    """

    def __init__(self, path: Path, slot: int, seed: bytes = b"") -> None:
        self.slot = slot
        self._path = path
        self._seed = seed
        self.epoch = 0
        self.secret = b""
        """Secret of the upload, 32 bytes; empty without an upload."""
        self.pending = b""
        """Content of an upload that is not acknowledged yet, which is sent again after a restart."""
        self.older: tuple[int, bytes] | None = None
        """Epoch and secret of the upload before: its set may stand beside the newest one."""
        if path.exists():
            self._read()

    @property
    def published(self) -> bool:
        """Whether the third party has the vector."""
        return bool(self.secret) and not self.pending

    @property
    def forgotten(self) -> bool:
        """Whether the user had an upload deleted; it publishes nothing more in this run."""
        return self.epoch > 0 and not self.secret

    def begin(self, epoch: int, vector: bytes) -> None:
        """Keep the upload of an epoch, durably, before anything of it is sent.

        Raises
        ------
        CertificateError
            When the file cannot be written.
        """
        if self.secret:
            self.older = self.epoch, self.secret
        self.epoch, self.secret = (
            epoch,
            seeded_secret(self._seed, epoch) if self._seed else os.urandom(_SECRET),
        )
        self.pending = wire.LatentUpload(secret=self.secret, vector=vector).SerializeToString()
        self._save()

    def acknowledged(self) -> None:
        """Note durably that the third party has the vector."""
        self.pending = b""
        self._save()

    def end(self) -> None:
        """Forget the upload, durably."""
        self.secret, self.pending = b"", b""
        self._save()

    def end_older(self) -> None:
        """Forget the upload before the newest, durably."""
        self.older = None
        self._save()

    def _save(self) -> None:
        content = {
            "epoch": self.epoch,
            "secret": self.secret.hex(),
            "pending": base64.b64encode(self.pending).decode(),
            "older": None if self.older is None else [self.older[0], self.older[1].hex()],
        }
        write_upload(self._path, content)

    def _read(self) -> None:
        with read_upload(self._path) as content:
            self.epoch = int(content["epoch"])
            self.secret = bytes.fromhex(content["secret"])
            self.pending = base64.b64decode(content["pending"])
            # Files of earlier releases have none.
            if older := content.get("older"):
                self.older = int(older[0]), bytes.fromhex(older[1])


class LatentUploads:
    """Calls about the vectors of a host's users in one run, which the COS relays.

    Parameters
    ----------
    cos : Channel
        To the COS, at which the users are registered.
    thirdparty : Channel
        To the third party.
    directory_key : bytes
        The directory's raw Ed25519 public key, 32 bytes, as enrolment left it in the state folder.
    retry : Retry, optional
        Retries of calls, all of which may be repeated.
    clock : callable, optional
        Gives Unix seconds.

    Notes
    -----
    Every method raises `Refusal` when COS or third party refuse, and `PeerError` when they cannot be reached.
    """

    def __init__(
        self,
        cos: Channel,
        thirdparty: Channel,
        directory_key: bytes,
        retry: Retry | None = None,
        clock: Callable[[], float] = clocks.now_s,
    ) -> None:
        self._relay: LatentRelayAsyncStub = cos.stub(lambda inner: LatentRelayStub(inner))
        self._peers = cos.peer, thirdparty.peer
        self._retry = retry or Retry()
        self._clock = clock
        self._sealer = RequestSealer(thirdparty, directory_key, self._retry, clock)

    async def publish(
        self,
        user: LatentUpload,
        opened: LatentSet,
        latent: npt.NDArray[np.floating],
        obfuscators: Obfuscators,
    ) -> None:
        """Publish a key user's vector, once in an epoch; one that was not acknowledged is sent again as it was.

        Parameters
        ----------
        user : LatentUpload
        opened : LatentSet
        latent : ndarray of float, shape (d,)
            Values beyond the terms' bound are clipped.
        obfuscators : Obfuscators
            Source of obfuscators of the set's key.

        Raises
        ------
        CryptoError
            When the vector has another length, or values that are not finite, or the key is another one.
        """
        record = opened.record
        if obfuscators.public.key_id != record.key_id:
            raise CryptoError(
                f"obfuscators of Paillier key {obfuscators.public.key_id.hex()[:16]}, and the set is under "
                f"{record.key_id.hex()[:16]}"
            )
        if user.epoch != record.epoch or not user.secret:
            user.begin(record.epoch, _encrypted(latent, record.terms, obfuscators))
        if user.published:
            return

        async def relay(sealed: expansion_pb2.SealedRequest) -> wire.RelayLatentResponse:
            return await self._relayed(
                wire.RelayLatentRequest(slot=user.slot, publish=wire.PublishEncryptedRequest(request=sealed))
            )

        place = UploadPlace(record.run, user.epoch, upload_id_of(user.secret))
        await self._sealer.ask(Kind.PUBLISH_LATENT, place, user.pending, relay)
        user.acknowledged()

    async def forget(self, user: LatentUpload, run: str) -> None:
        """Have a user's vectors deleted at the third party, with all pseudo meta-latents of their sets.

        The newest and the one before it; one that the third party has no more, or never received, counts as deleted.
        """
        if user.older is not None:
            await self._delete(user.slot, run, *user.older)
            user.end_older()
        if user.secret:
            await self._delete(user.slot, run, user.epoch, user.secret)
            user.end()

    async def _delete(self, slot: int, run: str, epoch: int, secret: bytes) -> None:
        async def relay(sealed: expansion_pb2.SealedRequest) -> wire.RelayLatentResponse:
            return await self._relayed(
                wire.RelayLatentRequest(slot=slot, forget=wire.ForgetEncryptedRequest(request=sealed))
            )

        place = UploadPlace(run, epoch, upload_id_of(secret))
        order = wire.LatentForgetOrder(secret=secret).SerializeToString()
        try:
            await self._sealer.ask(Kind.FORGET_LATENT, place, order, relay)
        except Refusal as refusal:
            if not is_gone(refusal):
                raise

    async def _relayed(self, request: wire.RelayLatentRequest) -> wire.RelayLatentResponse:
        return await self._called(partial(self._relay.RelayLatent, request, timeout=_CALL_S), self._peers[0])

    async def _called(self, call: Callable[[], Awaitable[T]], peer: str = "") -> T:
        async def attempt() -> T:
            return await call()

        try:
            return await self._retry(attempt)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, peer or self._peers[1]) from error


class LatentCalls(LatentUploads):
    """Calls about meta-latents of a holder of the run's Paillier key, and about the vectors of its host's users.

    Parameters
    ----------
    cos : Channel
        To the COS, at which the users are registered.
    thirdparty : Channel
        To the third party.
    directory_key : bytes
        The directory's raw Ed25519 public key, 32 bytes, as enrolment left it in the state folder.
    identity : Identity
        Of the host's participant that holds the Paillier key.
    terms : LatentTerms
        Terms of a set that this host opens, and that it demands of others' sets.
    retry : Retry, optional
        Retries of calls, all of which may be repeated.
    clock : callable, optional
        Gives Unix seconds.

    Notes
    -----
    Every method raises `Refusal` when COS or third party refuse, and `PeerError` when they cannot be reached.
    """

    def __init__(
        self,
        cos: Channel,
        thirdparty: Channel,
        directory_key: bytes,
        identity: Identity,
        terms: LatentTerms,
        retry: Retry | None = None,
        clock: Callable[[], float] = clocks.now_s,
    ) -> None:
        terms.check()
        super().__init__(cos, thirdparty, directory_key, retry, clock)
        self._stub: MetaLatentsAsyncStub = thirdparty.stub(lambda inner: MetaLatentsStub(inner))
        self._identity = identity
        self._terms = terms

    async def open(self, holding: Holding, *, open_s: int, valid_s: int) -> LatentSet:
        """Open the set of a key's epoch, or return the one that another holder opened.

        Parameters
        ----------
        holding : Holding
            The Paillier key, of which this host's participant is a holder.
        open_s : int
            Time for which the set takes vectors, seconds.
        valid_s : int
            Time after which the third party deletes the set, seconds from now.

        Raises
        ------
        VerificationError
            When another holder opened a set that does not verify, or that has other terms.
        """
        now = int(self._clock())
        record = sign_latent_record(self._identity, holding.record, self._terms, now + open_s, now + valid_s)
        request = wire.OpenLatentsRequest(record=latent_record_to_wire(record))
        try:
            await self._called(partial(self._stub.OpenLatents, request, timeout=_CALL_S))
        except Refusal as refusal:
            # Another holder was first.
            if refusal.reason != ErrorReason.ERROR_REASON_CONFLICT:
                raise
        found = await self.look(holding)
        if found is None:
            raise PeerError(f"{self._peers[1]} took a set of meta-latents and hands out none")
        return found

    async def stands(self, run: str, epoch: int) -> bool:
        """Return whether the set of an epoch is neither void nor followed by another, as the third party says.

        Parameters
        ----------
        run : str
        epoch : int
        """
        request = wire.LatentSetRequest(run_id=run)
        response = await self._called(partial(self._stub.LatentSet, request, timeout=_CALL_S))
        newest = response.record.epoch if response.HasField("record") else 0
        return newest < epoch or (newest == epoch and response.state != wire.LATENT_STATE_VOID)

    async def look(self, holding: Holding, hold_s: float = 0.0, *, ready: bool = False) -> LatentSet | None:
        """Return the set of a key's epoch, verified; None when there is none.

        Parameters
        ----------
        holding : Holding
        hold_s : float, optional
            Longest time to wait for it, seconds.
        ready : bool, optional
            Whether to wait until it takes no more vectors and is combined, too.

        Raises
        ------
        VerificationError
            When the record does not verify, or has other terms.
        """
        ends = time.monotonic() + hold_s
        while True:
            left = max(0.0, min(_LOOK_S, ends - time.monotonic()))
            request = wire.LatentSetRequest(
                run_id=holding.record.key.run,
                epoch=holding.record.epoch,
                hold_ms=int(1000 * left),
                until_ready=ready,
            )
            response = await self._called(partial(self._stub.LatentSet, request, timeout=left + _CALL_S))
            state = response.state
            busy = state in (wire.LATENT_STATE_OPEN, wire.LATENT_STATE_CLOSED)
            there = response.HasField("record") and response.record.epoch >= holding.record.epoch
            if (there and not (ready and busy)) or time.monotonic() >= ends:
                break
        if not there:
            return None
        record = latent_record_from_wire(response.record)
        self._check(record, holding)
        return LatentSet(
            record, state == wire.LATENT_STATE_READY, state == wire.LATENT_STATE_VOID, response.key_users
        )

    def _check(self, record: LatentRecord, holding: Holding) -> None:
        record.verify(holding.record, int(self._clock()))
        if record.terms != self._terms:
            raise VerificationError(
                Reason.MALFORMED,
                f"a set of meta-latents with the terms {tuple(record.terms)}, expected {tuple(self._terms)}",
                hint="all hosts of a run need the same settings",
            )

    async def read(self, opened: LatentSet, holding: Holding) -> npt.NDArray[np.float64]:
        """Return the pseudo meta-latents of a set, decrypted; not yet rescaled (`coterie.crypto.latent_codes`).

        Returns
        -------
        ndarray of float64, shape (count, d)

        Raises
        ------
        PeerError
            When what the third party hands out cannot be decrypted, or is no combination.
        """
        from coterie.crypto.paillier import decrypt_vector, from_bytes

        record, terms = opened.record, opened.record.terms
        vectors: list[bytes] = []
        while len(vectors) < terms.combinations:
            request = wire.PseudoMetaLatentsRequest(
                run_id=record.run,
                epoch=record.epoch,
                participant=self._identity.participant_id,
                first=len(vectors),
            )
            response = await self._called(partial(self._stub.PseudoMetaLatents, request, timeout=_CALL_S))
            if not response.vectors:
                raise PeerError(
                    f"{self._peers[1]} hands out {len(vectors)} of {terms.combinations} meta-latents"
                )
            vectors += response.vectors
        secret = holding.secrets.secret
        packing = terms.packing(secret.public.bits)
        found = np.empty((terms.combinations, terms.dimension))
        try:
            for row, content in zip(found, vectors[: terms.combinations], strict=True):
                vector = from_bytes(
                    content, secret.public, packing, terms.dimension, addends=1 << FRACTION_BITS
                )
                codes = decrypt_vector(vector, secret)
                if not codes.all():
                    raise VerificationError(
                        Reason.MALFORMED, "a meta-latent that is no combination of vectors"
                    )
                row[:] = latents_of_sums(codes, terms)
        except VerificationError as error:
            raise PeerError(f"{self._peers[1]}: {error.message}") from error
        return found


def _encrypted(latent: npt.NDArray[np.floating], terms: LatentTerms, obfuscators: Obfuscators) -> bytes:
    from coterie.crypto.paillier import encrypt, to_bytes

    packing, codes = terms.packing(obfuscators.public.bits), encode_latent(latent, terms)
    return to_bytes(encrypt(codes, packing, obfuscators))
