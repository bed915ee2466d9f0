"""Sealed records: end-to-end encryption between a user and a data owner, with exactly-once sequence numbers.

Key of a session (one sender process, one user, one owner prekey, one direction)::

    HKDF-SHA256(X25519(user, owner prekey), salt = session id,
                info = (sealed, run, user, owner, prekey id, direction))

with AES-256-GCM under the nonce ``4 zero bytes || counter (8 bytes, big-endian)``.  The session id is drawn
afresh for each sender process, so a restarted process cannot repeat a nonce: it does not repeat a key.
Counters live in memory only.

Primitives and assumptions: X25519 (RFC 7748, gap Diffie-Hellman), HKDF-SHA256 (RFC 5869, a random
oracle on the shared secret), AES-256-GCM (NIST SP 800-38D, an AEAD as long as no nonce repeats under one
key).  The key agreement authenticates the sender: only holders of the user's agreement key or of the prekey
can seal.  It follows that a stolen prekey lets the thief pose as any user towards that owner for as long as
the prekey lives.  A *virtual machine* that is resumed twice from one snapshot repeats session ids and
counters: never resume a sender from a snapshot of memory.

A replayed or reordered batch does open; ``SequenceGate`` rejects it by its durable sequence numbers.
"""

from __future__ import annotations

import enum
import hashlib
import os
import struct
import threading
import weakref
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, NoReturn, Self

import numpy as np
import numpy.typing as npt
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from coterie.crypto.explicit import encode
from coterie.crypto.identity import Bundle, Identity, Prekey, PublicPrekey
from coterie.crypto.verification import Reason, VerificationError
from coterie.errors import CryptoError, DataError

__all__ = [
    "HEADER_SIZE",
    "RECORD_DTYPE",
    "Agreement",
    "Decision",
    "Direction",
    "Header",
    "OpeningSession",
    "SealedBatch",
    "SealedBatches",
    "SealingSession",
    "SenderProcess",
    "SequenceGate",
    "decode_records",
    "encode_records",
]

_VERSION = 1
_LAYOUT = struct.Struct(">BBH32s8sQQI")
_FIXED = struct.Struct(">BBH32s8s")
_VARYING = struct.Struct(">QQI")
_NONCE_SIZE = 12
_CONTEXT_SIZE = 32
_COUNTERS = 1 << 64
_MESSAGES_AT_ONCE = 1024  # headers, nonces and ciphertexts of one part stay in the processor's cache

HEADER_SIZE = _LAYOUT.size
"""Bytes of a header: 64."""

# One row of associated data: the header, then the digest of run, user, owner and direction.
_ASSOCIATED = np.dtype(
    [
        ("fixed", f"V{_FIXED.size}"),
        ("counter", ">u8"),
        ("first", ">u8"),
        ("count", ">u4"),
        ("context", f"V{_CONTEXT_SIZE}"),
    ]
)
_NONCE = np.dtype([("zero", ">u4"), ("counter", ">u8")])

RECORD_DTYPE = np.dtype([("item", "<u4"), ("positive", "u1")])
"""One interaction, 5 bytes: item number, and 1 for a positive or 0 for a negative interaction."""


class Direction(enum.IntEnum):
    """The direction of a session, to the owner or to the user; the two never share a key."""

    TO_OWNER = 1
    """The user's records, to the data owner."""
    TO_USER = 2
    """The owner's replies, to the user."""

    @property
    def label(self) -> str:
        """The direction in explicit bytes."""
        return "to-owner" if self is Direction.TO_OWNER else "to-user"


_DIRECTIONS = {int(direction): direction for direction in Direction}


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a sealed batch, sent in clear and authenticated with the batch.

    Layout, big-endian, 64 bytes: version (1), direction (1), zero (2), session id (32), prekey id (8),
    counter (8), first sequence number (8), number of records (4).
    """

    direction: Direction
    session_id: bytes
    prekey_id: bytes
    counter: int
    first_sequence: int
    count: int

    @property
    def last_sequence(self) -> int:
        """Sequence number of the last record."""
        return self.first_sequence + self.count - 1

    @classmethod
    def parse(cls, header: bytes) -> Self:
        """Parse a header; nothing in it is authentic until its batch was opened.

        Raises
        ------
        VerificationError
            MALFORMED, BAD_VERSION or WRONG_DIRECTION (a direction that does not exist).
        """
        if len(header) != HEADER_SIZE:
            raise VerificationError(
                Reason.MALFORMED, f"a sealed header has {len(header)} bytes, expected {HEADER_SIZE}"
            )
        version, direction, zero, session_id, prekey_id, counter, first, count = _LAYOUT.unpack(header)
        if version != _VERSION or zero:
            raise VerificationError(
                Reason.BAD_VERSION, f"a sealed header has version {version}.{zero}, expected {_VERSION}.0"
            )
        known = _DIRECTIONS.get(direction)
        if known is None:
            raise VerificationError(
                Reason.WRONG_DIRECTION, f"a sealed header has direction {direction}, expected 1 or 2"
            )
        return cls(known, session_id, prekey_id, counter, first, count)


class SealedBatch(NamedTuple):
    """One sealed message: the header (64 bytes) and the ciphertext with its 16-byte tag."""

    header: bytes
    ciphertext: bytes


class SealedBatches(NamedTuple):
    """Many sealed messages, as two lists of equal length."""

    headers: list[bytes]
    ciphertexts: list[bytes]


class SenderProcess:
    """The session id of a sender process: 32 random bytes, drawn at its start and after a fork.

    Make one per process and hand it to all sealing sessions.
    """

    __slots__ = ("__weakref__", "session_id")

    _living: ClassVar[weakref.WeakSet[SenderProcess]] = weakref.WeakSet()

    def __init__(self) -> None:
        self.session_id = os.urandom(32)
        SenderProcess._living.add(self)

    @classmethod
    def _renew_after_fork(cls) -> None:
        for process in cls._living:
            process.session_id = os.urandom(32)


# Process ids would not do: they are reused.  Every forked child runs this hook.
os.register_at_fork(after_in_child=SenderProcess._renew_after_fork)


@dataclass(frozen=True, repr=False)
class Agreement:
    """The shared secret of one user and one owner under one prekey in one run; both directions' keys derive from it.

    The key agreement (about 35 microseconds) happens once here; sessions only derive keys.

    Parameters
    ----------
    secret : bytes
        X25519 shared secret, 32 bytes.
    run : str
        The run.
    user, owner : bytes
        Participant ids, 32 bytes each.
    prekey_id : bytes
        Id of the owner's prekey, 8 bytes.
    """

    secret: bytes
    run: str
    user: bytes
    owner: bytes
    prekey_id: bytes

    @classmethod
    def of_user(cls, user: Identity, owner: bytes, prekey: PublicPrekey) -> Self:
        """Agree as the user with the verified prekey of an owner (id, 32 bytes).

        Raises
        ------
        VerificationError
            MALFORMED when the prekey is no usable public key.
        """
        return cls(user.agree(prekey.public), prekey.run, user.participant_id, owner, prekey.prekey_id)

    @classmethod
    def of_owner(cls, prekey: Prekey, owner: bytes, user: Bundle) -> Self:
        """Agree as an owner (id, 32 bytes) with a user whose bundle was verified.

        Raises
        ------
        VerificationError
            MALFORMED when the user's agreement key is not usable.
        """
        public = prekey.public
        return cls(
            prekey.agree(user.agreement_public), public.run, user.participant_id, owner, public.prekey_id
        )

    def context(self, direction: Direction) -> bytes:
        """Return the SHA-256 of run, user, owner and direction, the last part of the associated data."""
        fields = encode("sealed-context", self.run, self.user, self.owner, direction.label)
        return hashlib.sha256(fields).digest()

    def key(self, direction: Direction, session_id: bytes) -> AESGCM:
        """Derive the AES-GCM key of one session."""
        info = encode("sealed", self.run, self.user, self.owner, self.prekey_id, direction.label)
        return AESGCM(HKDF(SHA256(), 32, salt=session_id, info=info).derive(self.secret))

    def __repr__(self) -> str:
        return f"<Agreement under prekey {self.prekey_id.hex()} of run {self.run!r}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("an Agreement holds a secret and is never pickled")


class SealingSession:
    """The sender's side of a session, which seals messages and never repeats a nonce.  Safe to share between threads.

    Parameters
    ----------
    agreement : Agreement
        Agreement with the peer.
    direction : Direction
        Ours: ``TO_OWNER`` at the user, ``TO_USER`` at the owner.
    process : SenderProcess
        Session id of this process.
    """

    __slots__ = ("_aead", "_context", "_fixed", "_lock", "_next", "_process", "_session_id")

    def __init__(self, agreement: Agreement, direction: Direction, process: SenderProcess) -> None:
        self._process = process
        self._session_id = process.session_id
        self._aead = agreement.key(direction, self._session_id)
        self._context = agreement.context(direction)
        self._fixed = _FIXED.pack(_VERSION, direction, 0, self._session_id, agreement.prekey_id)
        self._next = 0
        self._lock = threading.Lock()

    def seal(self, first_sequence: int, payload: bytes, count: int) -> SealedBatch:
        """Seal one message.

        Parameters
        ----------
        first_sequence : int
            Sequence number of the first record, in [0, 2^64).
        payload : bytes
            Content of the message, which only the peer can read.
        count : int
            Number of records, in [0, 2^32).

        Raises
        ------
        CryptoError
            A number is out of range.
        VerificationError
            EXHAUSTED when no nonce is left, FORKED in a child of the process that made the session.
        """
        _check_range(first_sequence, 1, count)
        counter = self._reserve(1)
        header = self._fixed + _VARYING.pack(counter, first_sequence, count)
        ciphertext = self._aead.encrypt(counter.to_bytes(_NONCE_SIZE, "big"), payload, header + self._context)
        return SealedBatch(header, ciphertext)

    def seal_many(
        self, first_sequence: int, records: npt.NDArray[np.void], records_per_message: int
    ) -> SealedBatches:
        """Seal consecutive records, cut into messages, with the same result as repeated ``seal`` and faster.

        Parameters
        ----------
        first_sequence : int
            Sequence number of the first record.
        records : ndarray of RECORD_DTYPE, shape (n,)
            The records, in order.
        records_per_message : int
            At least 1; the last message may hold fewer.

        Raises
        ------
        CryptoError
            A number is out of range, or ``records`` is not an (n,) array of ``RECORD_DTYPE``.
        VerificationError
            EXHAUSTED or FORKED, as for ``seal``.
        """
        if records.dtype != RECORD_DTYPE or records.ndim != 1:
            raise CryptoError(f"records are {records.ndim}-d {records.dtype}, expected 1-d {RECORD_DTYPE}")
        _check_range(first_sequence, len(records), records_per_message)
        if records_per_message < 1:
            raise CryptoError("records_per_message is 0, expected at least 1")
        messages = -(-len(records) // records_per_message)
        counter = self._reserve(messages)
        sealed = SealedBatches([], [])
        for start in range(0, messages, _MESSAGES_AT_ONCE):
            stop = min(start + _MESSAGES_AT_ONCE, messages)
            begin = start * records_per_message
            part = records[begin : stop * records_per_message]
            headers, ciphertexts = self._seal_part(
                counter + start, first_sequence + begin, part, records_per_message
            )
            sealed.headers.extend(headers)
            sealed.ciphertexts.extend(ciphertexts)
        return sealed

    def _seal_part(
        self, counter: int, first_sequence: int, records: npt.NDArray[np.void], records_per_message: int
    ) -> tuple[list[bytes], list[bytes]]:
        whole, rest = divmod(len(records), records_per_message)
        cut = whole * records_per_message
        # An array of voids turns into a list of bytes in one step, several times faster than slicing.
        payloads = _cut(records[:cut], RECORD_DTYPE.itemsize * records_per_message)
        if rest:
            payloads.append(records[cut:].tobytes())

        messages = len(payloads)
        index = np.arange(messages, dtype=np.uint64)
        rows = np.empty(messages, dtype=_ASSOCIATED)
        rows["fixed"] = np.void(self._fixed)
        rows["counter"] = index + np.uint64(counter)
        rows["first"] = index * np.uint64(records_per_message) + np.uint64(first_sequence)
        rows["count"] = records_per_message
        if rest:
            rows["count"][-1] = rest
        rows["context"] = np.void(self._context)
        nonces = np.zeros(messages, dtype=_NONCE)
        nonces["counter"] = rows["counter"]

        associated = _cut(rows, _ASSOCIATED.itemsize)
        headers = _cut(rows.view(np.uint8).reshape(messages, rows.itemsize)[:, :HEADER_SIZE], HEADER_SIZE)
        return headers, list(map(self._aead.encrypt, _cut(nonces, _NONCE_SIZE), payloads, associated))

    def _reserve(self, counters: int) -> int:
        # Before the lock: a fork may have copied it while another thread held it.
        if self._process.session_id != self._session_id:
            raise VerificationError(
                Reason.FORKED,
                "a sealing session cannot be used in a forked child: it would repeat nonces",
                hint="make a new session in the child",
            )
        with self._lock:
            first = self._next
            if first + counters > _COUNTERS:
                raise VerificationError(
                    Reason.EXHAUSTED,
                    f"a sealing session has {_COUNTERS - first} nonces left, and {counters} were asked for",
                    hint="restart the sender: a new session begins at 0",
                )
            self._next = first + counters
        return first

    def __repr__(self) -> str:
        return f"<SealingSession {self._session_id.hex()[:16]}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a SealingSession holds a secret and is never pickled")


class OpeningSession:
    """The receiver's side: opens the batches that one peer seals in one direction, also after the peer has restarted.

    The key of the last session is kept.  For another session id a key is derived; it replaces the kept key only after
    a batch under it has opened, so forged headers displace nothing.

    Parameters
    ----------
    agreement : Agreement
        Agreement with the peer.
    direction : Direction
        The peer's: ``TO_OWNER`` at the owner, ``TO_USER`` at the user.
    """

    __slots__ = ("_agreement", "_context", "_current", "_direction", "_prepared")

    def __init__(self, agreement: Agreement, direction: Direction) -> None:
        self._agreement = agreement
        self._direction = direction
        self._context = agreement.context(direction)
        self._current: tuple[bytes, AESGCM] | None = None
        self._prepared: tuple[bytes, AESGCM] | None = None

    def prepare(self, session_id: bytes) -> None:
        """Derive the key of a session ahead of its first batch; the kept key stays until a batch opens."""
        if self._current is None or self._current[0] != session_id:
            self._prepared = (session_id, self._agreement.key(self._direction, session_id))

    def open(self, header: bytes, ciphertext: bytes) -> bytes:
        """Return the payload of an authentic batch.

        Raises
        ------
        VerificationError
            MALFORMED, BAD_VERSION, WRONG_DIRECTION, UNKNOWN_PREKEY, or NOT_AUTHENTIC: altered, or sealed by
            or for somebody else, or for another run.
        """
        parsed = Header.parse(header)
        if parsed.direction is not self._direction:
            raise VerificationError(
                Reason.WRONG_DIRECTION,
                f"a batch was sealed {parsed.direction.label}, expected {self._direction.label}",
            )
        if parsed.prekey_id != self._agreement.prekey_id:
            raise VerificationError(
                Reason.UNKNOWN_PREKEY,
                f"a batch was sealed for prekey {parsed.prekey_id.hex()}, "
                f"expected {self._agreement.prekey_id.hex()}",
                hint="fetch the owner's prekey again",
            )
        held = (each for each in (self._current, self._prepared) if each is not None)
        aead = next((key for session, key in held if session == parsed.session_id), None)
        if aead is None:
            aead = self._agreement.key(self._direction, parsed.session_id)
        try:
            payload = aead.decrypt(
                parsed.counter.to_bytes(_NONCE_SIZE, "big"), ciphertext, header + self._context
            )
        except InvalidTag:
            raise VerificationError(
                Reason.NOT_AUTHENTIC,
                "a sealed batch does not open: altered, or of another user, owner, run or direction",
            ) from None
        self._current, self._prepared = (parsed.session_id, aead), None
        return payload

    def __repr__(self) -> str:
        return f"<OpeningSession {self._direction.label} under prekey {self._agreement.prekey_id.hex()}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("an OpeningSession holds a secret and is never pickled")


def encode_records(items: npt.NDArray[np.uint32], positive: npt.NDArray[np.bool_]) -> bytes:
    """Return interactions as bytes, 5 each (``RECORD_DTYPE``).

    Parameters
    ----------
    items : ndarray of uint32, shape (n,)
        Item numbers.
    positive : ndarray of bool, shape (n,)
        Whether each interaction is positive.

    Raises
    ------
    DataError
        The arrays have other types or shapes.
    """
    if items.dtype != np.uint32 or positive.dtype != np.bool_:
        raise DataError(f"records of {items.dtype} and {positive.dtype}, expected uint32 and bool")
    if items.ndim != 1 or items.shape != positive.shape:
        raise DataError(f"records of shapes {items.shape} and {positive.shape}, expected (n,) twice")
    records = np.empty(len(items), dtype=RECORD_DTYPE)
    records["item"] = items
    records["positive"] = positive
    return records.tobytes()


def decode_records(payload: bytes, count: int) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.bool_]]:
    """Return the items and flags of ``count`` records, as arrays of uint32 and bool of shape (count,).

    Raises
    ------
    DataError
        ``payload`` is not 5 bytes a record, or a flag is neither 0 nor 1.
    """
    expected = count * RECORD_DTYPE.itemsize
    if len(payload) != expected:
        raise DataError(f"{count} records take {expected} bytes, and there are {len(payload)}")
    records = np.frombuffer(payload, dtype=RECORD_DTYPE)
    flags = records["positive"]
    if (flags > 1).any():
        raise DataError(f"the flag of record {int(np.argmax(flags > 1))} is out of range, expected 0 or 1")
    return records["item"].astype(np.uint32), flags.astype(np.bool_)


class Decision(enum.Enum):
    """An owner's decision on a batch of records."""

    ACCEPT = "accept"
    """The batch has the next records: store them, then acknowledge."""
    DUPLICATE = "duplicate"
    """The records are durable already: change nothing, acknowledge again, count the duplicate."""
    MISMATCH = "mismatch"
    """The batch leaves a gap or overlaps: refuse it, and name the expected number."""


@dataclass(frozen=True, slots=True)
class SequenceGate:
    """The sequence check by which an owner accepts each record of a user exactly once and in order.

    Pure: the owner keeps ``durable`` in its store and moves it in the transaction that stores the records.

    Parameters
    ----------
    durable : int
        Number of the last record stored; 0 before the first.
    """

    durable: int = 0

    @property
    def expected(self) -> int:
        """Number of the next batch's first record."""
        return self.durable + 1

    def judge(self, first: int, last: int) -> Decision:
        """Decide on the batch of records numbered ``first`` to ``last``, both included.

        Raises
        ------
        VerificationError
            MALFORMED when the batch is empty or begins below 1.
        """
        if not 1 <= first <= last:
            raise VerificationError(
                Reason.MALFORMED, f"a batch of records [{first}, {last}], expected 1 <= first <= last"
            )
        if first == self.expected:
            return Decision.ACCEPT
        return Decision.DUPLICATE if last <= self.durable else Decision.MISMATCH

    def after(self, first: int, last: int) -> SequenceGate:
        """Return the state after a batch: ``durable`` is ``last`` if the batch is accepted, unchanged otherwise."""
        return SequenceGate(last) if self.judge(first, last) is Decision.ACCEPT else self


def _cut(rows: npt.NDArray[np.generic], size: int) -> list[bytes]:
    if not rows.size:
        return []
    pieces: list[bytes] = np.frombuffer(rows.tobytes(), dtype=f"V{size}").tolist()
    return pieces


def _check_range(first_sequence: int, records: int, count: int) -> None:
    if not (first_sequence >= 0 and first_sequence + max(records, 1) <= 1 << 64):
        raise CryptoError(f"records from number {first_sequence} on, expected 0 to 2^64 - 1")
    if not 0 <= count < 1 << 32:
        raise CryptoError(f"{count} records in a message, expected 0 to 2^32 - 1")
