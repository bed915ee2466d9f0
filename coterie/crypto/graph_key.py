"""Graph keys: two secrets that clients share for one epoch of a run's graph, made by a client, sealed to the roster.

The *tag key* turns items into tags, the *group key* seals users' embeddings; the third party that matches tags holds
neither.  One member of the operator's roster of the purpose ``graph`` draws both, signs the `GraphRecord` that commits
to them, and seals them for each other member (`coterie.crypto.envelope`).  A new epoch has new secrets.

An embedding is sealed under a key of its own, derived with a fresh salt::

    key    = HKDF-SHA256(group key, salt = 32 random bytes, info = (graph-embedding, run, epoch, key id))
    sealed = salt || AES-256-GCM(key, nonce 0, embedding as little-endian float32, associated = info)

Assumptions: HMAC-SHA256 is a pseudorandom function, HKDF-SHA256 and AES-256-GCM as in ``coterie.crypto.sealed``.  Every
holder can compute the tag of every item and open every embedding: a holder that shows its secrets to the third party
shows it everything.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import struct
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, NoReturn, Self

import numpy as np
import numpy.typing as npt
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from coterie.crypto.envelope import open_envelope, seal_envelope
from coterie.crypto.explicit import encode
from coterie.crypto.identity import Bundle, Identity, Validity, check_signature, participant_id
from coterie.crypto.keyfile import read_marked_file, write_marked_file
from coterie.crypto.roster import MOST_MEMBERS, Roster
from coterie.crypto.verification import Reason, VerificationError
from coterie.errors import CertificateError, CryptoError

__all__ = [
    "GRAPH",
    "GraphRecord",
    "GraphSecrets",
    "GraphTerms",
    "open_graph_secrets",
    "seal_graph_secrets",
    "sign_graph_record",
]

GRAPH = "graph"
"""Purpose of a roster of participants who may hold graph keys."""

_FILE = b"coterie graph key 1\n"
_HEAD = struct.Struct(">Q32s32s")
_ID = 32
_KEY = 32
_SALT = 32
_TAG = 16
_SIGNATURE = 64
_NONCE = bytes(12)
_LONGEST = 4096
_LONGEST_ANSWER = 1 << 20


class GraphTerms(NamedTuple):
    """The terms of a graph, which its record fixes for clients and the third party alike."""

    dimension: int
    """Length of an embedding."""
    most_tags: int = 32
    """Most tags of an upload; with so few, numbers of tags do not tell users apart."""
    bucket_users: int = 20
    """Users who share a tag, about: tags of items that more users publish are split."""
    most_neighbours: int = 128
    """Most neighbours of an upload."""

    def check(self) -> None:
        """Check the ranges of all terms.

        Raises
        ------
        VerificationError
            MALFORMED.
        """
        for name, value, least, most in (
            ("dimension", self.dimension, 1, _LONGEST),
            ("most_tags", self.most_tags, 1, 1024),
            ("bucket_users", self.bucket_users, 5, 1 << 20),
            ("most_neighbours", self.most_neighbours, 1, 1024),
        ):
            if not least <= value <= most:
                raise _malformed(f"{name} is {value}, expected {least} to {most}")
        answer = self.most_neighbours * (self.sealed_bytes + 2 * self.most_tags)
        if answer > _LONGEST_ANSWER:
            raise _malformed(
                f"{self.most_neighbours} neighbours of {self.dimension} floats and {self.most_tags} tags may take "
                f"{answer} bytes, expected at most {_LONGEST_ANSWER}: fewer neighbours, for example"
            )

    @property
    def sealed_bytes(self) -> int:
        """Length of a sealed embedding, bytes."""
        return _SALT + 4 * self.dimension + _TAG


class GraphSecrets:
    """The secrets of one epoch of a graph.  Neither ``repr`` nor any error shows them, and they cannot be pickled.

    Parameters
    ----------
    run : str
    epoch : int
        Number of the key within the run, from 1.
    tag_key, group_key : bytes
        32 bytes each.

    Raises
    ------
    VerificationError
        MALFORMED when a key has another size.
    """

    __slots__ = ("_group_key", "_tag_key", "epoch", "run")

    def __init__(self, run: str, epoch: int, tag_key: bytes, group_key: bytes) -> None:
        if len(tag_key) != _KEY or len(group_key) != _KEY:
            raise _malformed(f"secrets of {len(tag_key)} and {len(group_key)} bytes, expected {_KEY} each")
        self.run = run
        self.epoch = epoch
        self._tag_key = tag_key
        self._group_key = group_key

    @classmethod
    def generate(cls, run: str, epoch: int) -> Self:
        """Draw the secrets of an epoch."""
        return cls(run, epoch, os.urandom(_KEY), os.urandom(_KEY))

    @property
    def key_id(self) -> bytes:
        """SHA-256 that commits to both secrets, 32 bytes."""
        return hashlib.sha256(
            encode("graph-key", self.run, self.epoch, self._tag_key, self._group_key)
        ).digest()

    @property
    def tag_key(self) -> bytes:
        """Key of tags, 32 bytes; `coterie.crypto.graph_tags` computes with it."""
        return self._tag_key

    def seal_embedding(self, embedding: npt.NDArray[np.float32]) -> bytes:
        """Seal an embedding to the holders, under a fresh salt.

        Parameters
        ----------
        embedding : ndarray of float32, shape (d,)

        Returns
        -------
        bytes
            4 d + 48 bytes.

        Raises
        ------
        CryptoError
            When it is no vector of finite float32.
        """
        if embedding.ndim != 1 or embedding.dtype != np.float32:
            raise CryptoError(
                f"an embedding is a {embedding.ndim}-d array of {embedding.dtype}, expected 1-d float32"
            )
        if not np.isfinite(embedding).all():
            raise CryptoError("an embedding has values that are not finite")
        salt = os.urandom(_SALT)
        info = self._embedding_info()
        content = embedding.astype("<f4").tobytes()
        return salt + self._embedding_key(salt, info).encrypt(_NONCE, content, info)

    def open_embedding(self, sealed: bytes, dimension: int) -> npt.NDArray[np.float32]:
        """Open a sealed embedding of a given length.

        Returns
        -------
        ndarray of float32, shape (dimension,)

        Raises
        ------
        VerificationError
            NOT_AUTHENTIC when it was sealed under other secrets, or altered; MALFORMED for another length, or values
            that are not finite.
        """
        expected = _SALT + 4 * dimension + _TAG
        if len(sealed) != expected:
            raise _malformed(f"a sealed embedding of {len(sealed)} bytes, expected {expected}")
        info = self._embedding_info()
        salt, ciphertext = sealed[:_SALT], sealed[_SALT:]
        try:
            content = self._embedding_key(salt, info).decrypt(_NONCE, ciphertext, info)
        except InvalidTag:
            raise VerificationError(
                Reason.NOT_AUTHENTIC, "a sealed embedding does not open: altered, or of another run or epoch"
            ) from None
        found = np.frombuffer(content, "<f4").astype(np.float32)
        if not np.isfinite(found).all():
            raise _malformed("an embedding has values that are not finite")
        return found

    def save(self, path: Path) -> None:
        """Write the secrets to one file of mode 0600.

        Raises
        ------
        CertificateError
            The file cannot be written.
        """
        head = _HEAD.pack(self.epoch, self._tag_key, self._group_key)
        write_marked_file(path, _FILE, head + self.run.encode("utf-8"))

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read the file that ``save`` wrote.

        Raises
        ------
        CertificateError
            The file is missing, readable by others, damaged or of another kind.
        """
        content = read_marked_file(path, _FILE, "a graph key")
        try:
            epoch, tag_key, group_key = _HEAD.unpack_from(content)
            return cls(content[_HEAD.size :].decode("utf-8"), epoch, tag_key, group_key)
        except (struct.error, UnicodeDecodeError):
            raise CertificateError(f"{path} is damaged: it holds no whole graph key") from None

    def _embedding_info(self) -> bytes:
        return encode("graph-embedding", self.run, self.epoch, self.key_id)

    def _embedding_key(self, salt: bytes, info: bytes) -> AESGCM:
        return AESGCM(HKDF(SHA256(), _KEY, salt=salt, info=info).derive(self._group_key))

    def _sealable(self) -> bytes:
        return self._tag_key + self._group_key

    def __repr__(self) -> str:
        return f"<GraphSecrets of run {self.run!r}, epoch {self.epoch}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("GraphSecrets are never pickled")


@dataclass(frozen=True)
class GraphRecord:
    """The signed record of a graph key: what it commits to, its terms, its holders.

    Parameters
    ----------
    run : str
    epoch : int
        Number of the key within the run, from 1.
    key_id : bytes
        SHA-256 that commits to the secrets, 32 bytes.
    terms : GraphTerms
    expiry : int
        When the third party deletes the graph, Unix seconds.
    holders : tuple of bytes
        Ids of the participants for whom the secrets were sealed, and of the generator; ascending.
    generator_public : bytes
        Raw Ed25519 public key of the holder that made the key, 32 bytes.
    signature : bytes
        The generator's, over all fields above, 64 bytes.
    """

    run: str
    epoch: int
    key_id: bytes
    terms: GraphTerms
    expiry: int
    holders: tuple[bytes, ...]
    generator_public: bytes
    signature: bytes

    @property
    def generator(self) -> bytes:
        """Id of the holder that made the key, 32 bytes."""
        return participant_id(self.generator_public)

    def signed_fields(self) -> tuple[str | int | bytes, ...]:
        """Return the fields that the generator signs, in order."""
        return (
            self.run,
            self.epoch,
            self.key_id,
            *self.terms,
            self.expiry,
            self.generator,
            b"".join(self.holders),
        )

    def check(self) -> None:
        """Check the form of all fields, and the signature, without roster and clock.

        Raises
        ------
        VerificationError
            MALFORMED or BAD_SIGNATURE.
        """
        if not 1 <= self.epoch < 1 << 31:
            raise _malformed(f"epoch {self.epoch}, expected 1 to 2^31 - 1")
        if len(self.key_id) != _ID:
            raise _malformed(f"a key id of {len(self.key_id)} bytes, expected {_ID}")
        self.terms.check()
        if not 0 <= self.expiry < 1 << 62:
            raise _malformed(f"expiry {self.expiry}, expected Unix seconds")
        if not 0 < len(self.holders) <= MOST_MEMBERS or any(len(one) != _ID for one in self.holders):
            raise _malformed(f"{len(self.holders)} holders, expected 1 to {MOST_MEMBERS} ids of {_ID} bytes")
        if any(before >= after for before, after in itertools.pairwise(self.holders)):
            raise _malformed("holders that are not ascending, or come twice")
        if len(self.generator_public) != _KEY or self.generator not in self.holders:
            raise _malformed("a generator who is not one of the holders")
        if len(self.signature) != _SIGNATURE:
            raise _malformed(f"a signature of {len(self.signature)} bytes, expected {_SIGNATURE}")
        signed = encode("graph-record", *self.signed_fields())
        check_signature(
            self.generator_public, self.signature, signed, "the graph record", Reason.BAD_SIGNATURE
        )

    def verify(
        self, roster: Roster, roster_key: bytes, *, run: str, now: int, revoked: Collection[bytes] = ()
    ) -> None:
        """Check the record completely: form, signature, run, expiry, and that every holder is on the roster.

        Parameters
        ----------
        roster : Roster
        roster_key : bytes
            The operator's raw Ed25519 public key, 32 bytes, from the caller's own configuration.
        run : str
        now : int
            Unix seconds.
        revoked : collection of bytes, optional
            Ids of revoked participants.

        Raises
        ------
        VerificationError
            As `Roster.verify` and `check`; WRONG_RUN, EXPIRED, NOT_LISTED or REVOKED.
        """
        roster.verify(roster_key, purpose=GRAPH, run=run, now=now)
        self.check()
        if self.run != run:
            raise VerificationError(
                Reason.WRONG_RUN, f"the graph record is for run {self.run!r}, expected {run!r}"
            )
        Validity(0, self.expiry).check("the graph record", now)
        if self.expiry > roster.expiry:
            raise _malformed(f"it expires at {self.expiry}, after its roster, at {roster.expiry}")
        listed = frozenset(roster.members)
        for holder in self.holders:
            if holder not in listed:
                raise VerificationError(
                    Reason.NOT_LISTED,
                    f"holder {holder.hex()[:16]} of the graph key of epoch {self.epoch} is not on the roster",
                )
            if holder in revoked:
                raise VerificationError(
                    Reason.REVOKED,
                    f"holder {holder.hex()[:16]} of the graph key of epoch {self.epoch} was revoked",
                    hint="make the key of the next epoch",
                )


def sign_graph_record(
    identity: Identity, secrets: GraphSecrets, terms: GraphTerms, expiry: int, holders: Collection[bytes]
) -> GraphRecord:
    """Return the signed record of secrets that this participant drew.

    Parameters
    ----------
    identity : Identity
        The generator.
    secrets : GraphSecrets
    terms : GraphTerms
    expiry : int
        When the third party is to delete the graph, Unix seconds.
    holders : collection of bytes
        Ids of all holders, the generator among them, in any order.

    Raises
    ------
    VerificationError
        MALFORMED.
    """
    unsigned = GraphRecord(
        secrets.run,
        secrets.epoch,
        secrets.key_id,
        terms,
        expiry,
        tuple(sorted(holders)),
        identity.signing_public,
        bytes(_SIGNATURE),
    )
    record = replace(unsigned, signature=identity.sign("graph-record", *unsigned.signed_fields()))
    record.check()
    return record


def seal_graph_secrets(holder: Bundle, secrets: GraphSecrets, record: GraphRecord) -> bytes:
    """Seal the secrets of a record for one of its other holders, whose bundle was verified.

    Raises
    ------
    VerificationError
        NOT_LISTED when the record does not name the holder, WRONG_KEY when it is of other secrets, MALFORMED when the
        holder's agreement key is not usable.
    """
    _check_same(secrets, record)
    if holder.participant_id not in record.holders:
        raise VerificationError(
            Reason.NOT_LISTED, f"participant {holder.participant_id.hex()[:16]} is no holder of the graph key"
        )
    agreement = holder.agreement_public
    sealed, _ = seal_envelope(
        agreement,
        secrets._sealable(),
        lambda public: _context(record, holder.participant_id, public, agreement),
    )
    return sealed


def open_graph_secrets(identity: Identity, record: GraphRecord, sealed: bytes) -> GraphSecrets:
    """Open the envelope for this holder, and check that its content is what the record commits to.

    Raises
    ------
    VerificationError
        NOT_AUTHENTIC when the envelope does not open, WRONG_KEY or MALFORMED when it holds other secrets.
    """
    content = open_envelope(
        identity.agree,
        sealed,
        lambda public: _context(record, identity.participant_id, public, identity.agreement_public),
        "a sealed graph key",
    )
    secrets = GraphSecrets(record.run, record.epoch, content[:_KEY], content[_KEY:])
    _check_same(secrets, record)
    return secrets


def _context(record: GraphRecord, holder: bytes, ephemeral: bytes, agreement: bytes) -> bytes:
    return encode(
        "graph-envelope",
        record.run,
        record.epoch,
        record.key_id,
        record.generator,
        holder,
        ephemeral,
        agreement,
    )


def _check_same(secrets: GraphSecrets, record: GraphRecord) -> None:
    if (secrets.run, secrets.epoch, secrets.key_id) != (record.run, record.epoch, record.key_id):
        raise VerificationError(
            Reason.WRONG_KEY, f"the secrets are not those of the graph record of epoch {record.epoch}"
        )


def _malformed(message: str) -> VerificationError:
    return VerificationError(Reason.MALFORMED, f"the graph key cannot be used: {message}")
