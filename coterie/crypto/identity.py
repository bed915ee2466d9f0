"""Identities of participants: long-term keys, the bundle that publishes them, delegations and prekeys.

Primitives and assumptions: Ed25519 signatures (RFC 8032, unforgeable under chosen messages),
X25519 key agreement (RFC 7748, gap Diffie-Hellman), SHA-256 (collision resistant).  Everything signed is made
of explicit bytes under a purpose of its own, so no signature can be taken for another kind.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, NoReturn, Self, overload

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from coterie.crypto.clocks import CLOCK_SKEW_S, apart, moment
from coterie.crypto.explicit import encode
from coterie.crypto.keyfile import (
    MarkedContent,
    destroy_private_file,
    read_marked_file,
    write_marked_file,
)
from coterie.crypto.made_when_asked import MadeWhenAsked
from coterie.crypto.verification import Reason, VerificationError
from coterie.errors import CertificateError

__all__ = [
    "GRACE_SECONDS",
    "Bundle",
    "Delegation",
    "Identities",
    "Identity",
    "KeptBundles",
    "Prekey",
    "PublicPrekey",
    "Validity",
    "check_newer",
    "check_signature",
    "countersign",
    "countersigned",
    "load_many",
    "load_signing_key",
    "participant_id",
    "save_many",
    "save_signing_key",
]

GRACE_SECONDS = 3600
"""Time for which an owner still opens batches sealed for an expired prekey, before it destroys the prekey, seconds."""

_IDENTITIES = b"coterie identities 1\n"
_SIGNING_KEY = b"coterie signing key 1\n"
_PREKEY = b"coterie prekey 1\n"
_PREKEY_FIELDS = struct.Struct(">32s8s32sQ64s")
_KEY = 32
_SIGNATURE = 64
_MADE = 4096
"""Most identities of a sequence whose keys are kept made."""
_BUNDLE = struct.Struct(">32s32sQQQ64s64sBI")


def participant_id(signing_public: bytes) -> bytes:
    """Return the self-certifying id of a participant: SHA-256 of its raw Ed25519 public key, 32 bytes."""
    return hashlib.sha256(signing_public).digest()


class Validity(NamedTuple):
    """The half-open interval [not_before, not_after), in Unix seconds, by the clock of whoever stated it."""

    not_before: int
    not_after: int

    def check(self, what: str, now: int) -> None:
        """Raise unless ``now`` lies in the interval, or at most `CLOCK_SKEW_S` outside of it.

        Raises
        ------
        VerificationError
            NOT_YET_VALID or EXPIRED.
        """
        clock = f"this machine's clock says {moment(now)}"
        if now < self.not_before - CLOCK_SKEW_S:
            raise VerificationError(
                Reason.NOT_YET_VALID,
                f"{what} is valid from {moment(self.not_before)}, and {clock}",
                hint=f"this machine's clock is {apart(now - self.not_before, 'that of the one that made it')}, or "
                f"more: set it, or the other; {CLOCK_SKEW_S} s are tolerated",
            )
        if now >= self.not_after + CLOCK_SKEW_S:
            raise VerificationError(
                Reason.EXPIRED, f"{what} expired at {moment(self.not_after)}, and {clock}"
            )


class Identity:
    """The long-term secrets of one participant: an Ed25519 signing key and an X25519 agreement key.

    Neither ``repr`` nor any error shows a secret, and an identity cannot be pickled.  The keys stay in the
    memory of the process; Python cannot promise to wipe them.

    Parameters
    ----------
    signing : Ed25519PrivateKey
        Signs bundles, delegations and prekeys; nothing else.
    agreement : X25519PrivateKey
        Agrees on keys with prekeys, set keys and the ephemeral keys of envelopes; each use has a label of its own.
    """

    __slots__ = ("_agreement", "_signing", "agreement_public", "participant_id", "signing_public")

    def __init__(self, signing: Ed25519PrivateKey, agreement: X25519PrivateKey) -> None:
        self._signing = signing
        self._agreement = agreement
        self.signing_public = signing.public_key().public_bytes_raw()
        self.agreement_public = agreement.public_key().public_bytes_raw()
        self.participant_id = participant_id(self.signing_public)

    @classmethod
    def generate(cls) -> Self:
        """Draw a new identity from the randomness of the operating system."""
        return cls(Ed25519PrivateKey.generate(), X25519PrivateKey.generate())

    def sign(self, purpose: str, *fields: bytes | str | int) -> bytes:
        """Sign explicit bytes (``coterie.crypto.explicit``) with Ed25519.

        Returns
        -------
        bytes
            The signature, 64 bytes.
        """
        return self._signing.sign(encode(purpose, *fields))

    def agree(self, public: bytes) -> bytes:
        """Return the X25519 shared secret with a public key, 32 bytes; derive keys from it, never use it as a key.

        Raises
        ------
        VerificationError
            MALFORMED when the public key has another size or low order.
        """
        return _agree(self._agreement, public)

    def bundle(self, version: int, validity: tuple[int, int]) -> Bundle:
        """Return the signed statement of this identity's public keys, not yet countersigned.

        Parameters
        ----------
        version : int
            Above the version of every bundle published before.
        validity : tuple of int
            ``(not_before, not_after)``, Unix seconds.
        """
        not_before, not_after = validity
        unsigned = Bundle(self.signing_public, self.agreement_public, version, not_before, not_after, b"")
        return replace(unsigned, signature=self.sign("bundle", *unsigned.signed_fields()))

    def save(self, path: Path) -> None:
        """Write the private keys to one file of mode 0600."""
        save_many(path, [self])

    @classmethod
    def load(cls, path: Path) -> Identity:
        """Read the file that ``save`` wrote.

        Raises
        ------
        CertificateError
            The file is missing, readable by others, damaged, or holds more or less than one identity.
        """
        identities = load_many(path)
        if len(identities) != 1:
            raise CertificateError(f"{path} holds {len(identities)} identities, expected 1")
        return identities[0]

    def _secrets(self) -> bytes:
        return self._signing.private_bytes_raw() + self._agreement.private_bytes_raw()

    def __repr__(self) -> str:
        return f"<Identity {self.participant_id.hex()[:16]}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("an Identity holds secrets and is never pickled")


class Identities(Sequence[Identity]):
    """Identities of a process's participants, 64 bytes each: the keys of one are made when it is asked for.

    A host may speak for hundreds of thousands of users, and needs the keys of few of them after enrolment.  Neither
    ``repr`` nor any error shows a secret, and identities cannot be pickled.

    Parameters
    ----------
    secrets : bytes or MarkedContent
        Ed25519 seed and X25519 private key of each, 64 bytes; of very many as the file that has them.
    """

    __slots__ = ("_made", "_secrets")

    def __init__(self, secrets: bytes | MarkedContent = b"") -> None:
        self._secrets = secrets
        self._made: dict[int, Identity] = {}

    def more(self, count: int) -> Identities:
        """Return these identities and so many new ones, drawn from the randomness of the operating system.

        Both private keys are 32 random bytes by their standards (RFC 8032, 5.1.5; RFC 7748, 5).
        """
        return Identities(self._secrets[:] + os.urandom(2 * _KEY * count))

    def __len__(self) -> int:
        return len(self._secrets) // (2 * _KEY)

    @overload
    def __getitem__(self, at: int) -> Identity: ...
    @overload
    def __getitem__(self, at: slice) -> list[Identity]: ...
    def __getitem__(self, at: int | slice) -> Identity | list[Identity]:
        if isinstance(at, slice):
            return [self[position] for position in range(*at.indices(len(self)))]
        position = range(len(self))[at]
        made = self._made.get(position)
        if made is None:
            if len(self._made) >= _MADE:
                self._made = {}
            made = self._made[position] = _identity(self._secrets, position)
        return made

    def __iter__(self) -> Iterator[Identity]:
        if len(self) <= _MADE:
            yield from (self[position] for position in range(len(self)))
        else:
            yield from (_identity(self._secrets, position) for position in range(len(self)))

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return f"<{len(self)} identities>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("identities hold secrets and are never pickled")


def _identity(secrets: bytes | MarkedContent, position: int) -> Identity:
    start = 2 * _KEY * position
    own = secrets[start : start + 2 * _KEY]
    return Identity(
        Ed25519PrivateKey.from_private_bytes(own[:_KEY]), X25519PrivateKey.from_private_bytes(own[_KEY:])
    )


def save_many(path: Path, identities: Iterable[Identity]) -> None:
    """Write the private keys of all ``identities``, in order, to one file of mode 0600.

    Layout: the line ``coterie identities 1``, then 64 bytes each (Ed25519 seed, X25519 private key), then the
    SHA-256 of everything before it.

    Raises
    ------
    CertificateError
        The file cannot be written.
    """
    if isinstance(identities, Identities):
        secrets = identities._secrets[:]
    else:
        secrets = b"".join(identity._secrets() for identity in identities)
    write_marked_file(path, _IDENTITIES, secrets)


def load_many(path: Path) -> Identities:
    """Read the file that ``save_many`` wrote, in the same order.

    Raises
    ------
    CertificateError
        The file is missing, readable by others, damaged or of another kind.
    """
    secrets: bytes | MarkedContent = MarkedContent(path, _IDENTITIES, "identities")
    if len(secrets) % (2 * _KEY):
        raise CertificateError(f"{path} is damaged: identities take {2 * _KEY} bytes each")
    return Identities(secrets[:] if len(secrets) <= 2 * _KEY * _MADE else secrets)


def save_signing_key(path: Path, key: Ed25519PrivateKey) -> None:
    """Write a bare signing key, such as the directory's, to one file of mode 0600.

    Raises
    ------
    CertificateError
        The file cannot be written.
    """
    write_marked_file(path, _SIGNING_KEY, key.private_bytes_raw())


def load_signing_key(path: Path) -> Ed25519PrivateKey:
    """Read the file that ``save_signing_key`` wrote.

    Raises
    ------
    CertificateError
        The file is missing, readable by others, damaged or of another kind.
    """
    secret = read_marked_file(path, _SIGNING_KEY, "a signing key")
    if len(secret) != _KEY:
        raise CertificateError(f"{path} is damaged: a signing key takes {_KEY} bytes")
    return Ed25519PrivateKey.from_private_bytes(secret)


@dataclass(frozen=True)
class Bundle:
    """A participant's published keys: self-certifying, and countersigned by the directory.

    Peers take a participant's keys from its verified bundle only.

    Parameters
    ----------
    signing_public : bytes
        Raw Ed25519 public key, 32 bytes; its SHA-256 is the participant's id.
    agreement_public : bytes
        Raw X25519 public key, 32 bytes.
    version : int
        Grows with every replacement.
    not_before, not_after : int
        Validity [not_before, not_after), Unix seconds.
    signature : bytes
        The participant's, over all fields above, 64 bytes.
    countersignature : bytes
        The directory's, over the same fields, ``signature`` and ``party``, 64 bytes; empty before enrolment.
    party : str
        Role and name of the party that enrolled the participant, such as ``client/host-0``; empty before enrolment.
    """

    signing_public: bytes
    agreement_public: bytes
    version: int
    not_before: int
    not_after: int
    signature: bytes
    countersignature: bytes = b""
    party: str = ""

    @property
    def participant_id(self) -> bytes:
        """SHA-256 of the signing key, 32 bytes."""
        return participant_id(self.signing_public)

    @property
    def role(self) -> str:
        """Role of the party that enrolled the participant, such as ``client``; empty before enrolment."""
        return self.party.rpartition("/")[0]

    def require_party(self, party: str) -> None:
        """Require that one party enrolled the participant; the countersignature is verified elsewhere.

        Raises
        ------
        VerificationError
            WRONG_PARTY.
        """
        if self.party != party:
            raise VerificationError(
                Reason.WRONG_PARTY, f"the key bundle is of {self.party[:80]!r}, expected {party!r}"
            )

    def signed_fields(self) -> tuple[bytes, bytes, int, int, int]:
        """Return the fields that the participant signs, in order, under the purpose ``bundle``."""
        return self.signing_public, self.agreement_public, self.version, self.not_before, self.not_after

    def verify_signature(self) -> None:
        """Check the fields and the participant's own signature, all that can be checked before enrolment.

        Raises
        ------
        VerificationError
            MALFORMED or BAD_SIGNATURE.
        """
        self._check_fields()
        check_signature(
            self.signing_public,
            self.signature,
            encode("bundle", *self.signed_fields()),
            "the key bundle",
            Reason.BAD_SIGNATURE,
        )

    def check_logged(self, now: int) -> None:
        """Check what is left to check of a bundle whose countersigned bytes are shown to be in the directory's log.

        The signed head of the log takes the place of the countersignature; the directory verified the participant's own
        signature before it signed and logged the bundle, and is trusted for that as for the enrolment.

        Raises
        ------
        VerificationError
            MALFORMED, BAD_VERSION when no party is named, NOT_YET_VALID or EXPIRED.
        """
        self._check_fields()
        self._check_named()
        Validity(self.not_before, self.not_after).check("the key bundle", now)

    def _check_fields(self) -> None:
        what = "the key bundle"
        _check_size(what, "signing key", self.signing_public, _KEY)
        _check_size(what, "agreement key", self.agreement_public, _KEY)
        _check_number(what, "version", self.version)
        _check_number(what, "not_before", self.not_before)
        _check_number(what, "not_after", self.not_after)
        if self.not_before >= self.not_after:
            raise VerificationError(Reason.MALFORMED, f"{what} ends ({self.not_after}) before it begins")

    def _check_named(self) -> None:
        if not self.party:
            raise VerificationError(
                Reason.BAD_VERSION,
                "the directory's entry for the key bundle does not name its party, as in earlier releases",
                hint="restart the bundle's party, which has it countersigned again",
            )

    def verify(self, directory_key: bytes, now: int) -> None:
        """Check that a peer may rely on these keys: both signatures and the validity, but not revocation.

        Parameters
        ----------
        directory_key : bytes
            Raw Ed25519 public key of the directory, 32 bytes.
        now : int
            Unix seconds.

        Raises
        ------
        VerificationError
            MALFORMED, BAD_SIGNATURE, NOT_COUNTERSIGNED, BAD_VERSION when the countersignature names no party,
            BAD_COUNTERSIGNATURE, NOT_YET_VALID or EXPIRED.
        """
        self.verify_signature()
        self._check_countersignature(directory_key, now)

    def verify_countersignature(self, directory_key: bytes, now: int) -> None:
        """Check a bundle of one's own as `verify` does, without one's own signature.

        Whoever made the signature need not verify it; the countersignature covers it, and peers verify both.

        Raises
        ------
        VerificationError
            As for `verify`.
        """
        self._check_fields()
        self._check_countersignature(directory_key, now)

    def _check_countersignature(self, directory_key: bytes, now: int) -> None:
        if not self.countersignature:
            raise VerificationError(
                Reason.NOT_COUNTERSIGNED,
                "the key bundle is not countersigned by the directory",
                hint="enrol it",
            )
        self._check_named()
        check_signature(
            directory_key,
            self.countersignature,
            countersigned(self),
            "the directory's entry for the key bundle",
            Reason.BAD_COUNTERSIGNATURE,
        )
        Validity(self.not_before, self.not_after).check("the key bundle", now)


class KeptBundles(MadeWhenAsked[Bundle]):
    """Bundles of a process's participants, 221 bytes each: one is made when it is asked for.

    Parameters
    ----------
    bundles : iterable of Bundle

    Raises
    ------
    VerificationError
        MALFORMED when a key or a signature does not have its size, or a number does not fit.
    """

    __slots__ = ("_packed", "_parties")

    def __init__(self, bundles: Iterable[Bundle] = ()) -> None:
        packed, parties = bytearray(), dict[str, int]()
        for one in bundles:
            what = "the key bundle"
            _check_size(what, "signing key", one.signing_public, _KEY)
            _check_size(what, "agreement key", one.agreement_public, _KEY)
            _check_size(what, "signature", one.signature, _SIGNATURE)
            if one.countersignature:
                _check_size(what, "countersignature", one.countersignature, _SIGNATURE)
            for name in ("version", "not_before", "not_after"):
                _check_number(what, name, getattr(one, name))
            packed += _BUNDLE.pack(
                one.signing_public,
                one.agreement_public,
                one.version,
                one.not_before,
                one.not_after,
                one.signature,
                one.countersignature,
                bool(one.countersignature),
                parties.setdefault(one.party, len(parties)),
            )
        self._packed, self._parties = packed, list(parties)

    def ids(self) -> Iterator[bytes]:
        """Yield the participants' ids, 32 bytes each."""
        for start in range(0, len(self._packed), _BUNDLE.size):
            yield participant_id(bytes(self._packed[start : start + _KEY]))

    def __len__(self) -> int:
        return len(self._packed) // _BUNDLE.size

    def _make(self, first: int, last: int) -> Iterator[Bundle]:
        return map(self._made, range(first, last))

    def _made(self, position: int) -> Bundle:
        signing, agreement, version, begin, end, signature, countersignature, has, party = (
            _BUNDLE.unpack_from(self._packed, position * _BUNDLE.size)
        )
        signed = countersignature if has else b""
        return Bundle(signing, agreement, version, begin, end, signature, signed, self._parties[party])


def countersign(bundle: Bundle, directory_key: Ed25519PrivateKey, party: str) -> Bundle:
    """Return ``bundle`` with the countersignature of the directory.

    The participant's signature is checked first, so that the directory vouches only for keys that were claimed.

    Parameters
    ----------
    bundle : Bundle
    directory_key : Ed25519PrivateKey
    party : str
        Role and name of the party that enrols the participant, by its token or certificate.

    Raises
    ------
    VerificationError
        MALFORMED or BAD_SIGNATURE.
    """
    bundle.verify_signature()
    named = replace(bundle, party=party)
    return replace(named, countersignature=directory_key.sign(countersigned(named)))


def check_newer(old: Bundle, new: Bundle) -> None:
    """Raise unless ``new`` may take the place of ``old``: a higher version, or the same bundle again.

    Both are taken as verified.

    Raises
    ------
    VerificationError
        WRONG_PARTICIPANT, or OLD_VERSION for a lower version and for the same version with other content.
    """
    if old.signing_public != new.signing_public:
        raise VerificationError(Reason.WRONG_PARTICIPANT, "a key bundle cannot replace another participant's")
    if new.version < old.version or (
        new.version == old.version and new.signed_fields() != old.signed_fields()
    ):
        raise VerificationError(
            Reason.OLD_VERSION,
            f"a key bundle of version {new.version} cannot replace version {old.version}",
            hint=f"publish it as version {old.version + 1}",
        )


@dataclass(frozen=True)
class Delegation:
    """A participant's statement that a TLS connection may speak for it in one run.

    Parameters
    ----------
    certificate_fingerprint : bytes
        SHA-256 of the connection's certificate (DER), 32 bytes.
    run_id : str
        The run.
    expiry : int
        First second at which it no longer holds, Unix seconds.
    signature : bytes
        The participant's, 64 bytes.
    """

    certificate_fingerprint: bytes
    run_id: str
    expiry: int
    signature: bytes

    @classmethod
    def sign(cls, identity: Identity, certificate_fingerprint: bytes, run_id: str, expiry: int) -> Self:
        """Sign a delegation with a participant's identity.

        Raises
        ------
        VerificationError
            MALFORMED when the fingerprint is not 32 bytes.
        """
        _check_size("the delegation", "certificate fingerprint", certificate_fingerprint, _KEY)
        signature = identity.sign("delegation", certificate_fingerprint, run_id, expiry)
        return cls(certificate_fingerprint, run_id, expiry, signature)

    def verify(self, signing_public: bytes, certificate_fingerprint: bytes, run_id: str, now: int) -> None:
        """Check that the participant lets this connection speak for it in this run, now.

        Parameters
        ----------
        signing_public : bytes
            The participant's key, from its verified bundle.
        certificate_fingerprint : bytes
            SHA-256 of the certificate that the connection really showed, 32 bytes.
        run_id : str
            The run in which it wants to speak.
        now : int
            Unix seconds.

        Raises
        ------
        VerificationError
            MALFORMED, BAD_SIGNATURE, WRONG_CERTIFICATE, WRONG_RUN or EXPIRED.
        """
        self._check_fields()
        signed = encode("delegation", self.certificate_fingerprint, self.run_id, self.expiry)
        check_signature(signing_public, self.signature, signed, "the delegation", Reason.BAD_SIGNATURE)
        self.check_bounds(certificate_fingerprint, run_id, now)

    def check_bounds(self, certificate_fingerprint: bytes, run_id: str, now: int) -> None:
        """Check certificate, run and expiry, and not the signature.

        Raises
        ------
        VerificationError
            MALFORMED, WRONG_CERTIFICATE, WRONG_RUN or EXPIRED.
        """
        what = "the delegation"
        self._check_fields()
        if self.certificate_fingerprint != certificate_fingerprint:
            raise VerificationError(
                Reason.WRONG_CERTIFICATE,
                f"{what} is for certificate {self.certificate_fingerprint.hex()[:16]}, "
                f"and the connection showed {certificate_fingerprint.hex()[:16]}",
                hint="sign a new delegation after renewing the certificate",
            )
        if self.run_id != run_id:
            raise VerificationError(
                Reason.WRONG_RUN, f"{what} is for run {self.run_id!r}, expected {run_id!r}"
            )
        Validity(0, self.expiry).check(what, now)

    def _check_fields(self) -> None:
        what = "the delegation"
        _check_size(what, "certificate fingerprint", self.certificate_fingerprint, _KEY)
        _check_number(what, "expiry", self.expiry)


@dataclass(frozen=True)
class PublicPrekey:
    """The public half of an owner's prekey, signed by the owner's identity.

    Parameters
    ----------
    run : str
        The run for which it was made.
    prekey_id : bytes
        Random id, 8 bytes.
    public : bytes
        Raw X25519 public key, 32 bytes.
    expiry : int
        First second at which nothing new may be sealed for it, Unix seconds.
    signature : bytes
        The owner's, over all fields above, 64 bytes.
    """

    run: str
    prekey_id: bytes
    public: bytes
    expiry: int
    signature: bytes

    def verify(self, signing_public: bytes, now: int) -> None:
        """Check that the owner with this signing key offers the prekey, and that it may still be sealed for.

        Raises
        ------
        VerificationError
            MALFORMED, BAD_SIGNATURE or EXPIRED.
        """
        what = "the prekey"
        _check_size(what, "id", self.prekey_id, 8)
        _check_size(what, "public key", self.public, _KEY)
        _check_number(what, "expiry", self.expiry)
        signed = encode("prekey", self.run, self.prekey_id, self.public, self.expiry)
        check_signature(signing_public, self.signature, signed, what, Reason.BAD_SIGNATURE)
        Validity(0, self.expiry).check(what, now)


class Prekey:
    """A short-lived X25519 key of an owner, for which clients seal.

    Once it is destroyed, theft of the *owner's* long-term keys opens nothing that was sealed for it.  The
    user's agreement key is long-term: whoever steals that one opens this user's recorded traffic.

    Parameters
    ----------
    private : X25519PrivateKey
        The secret half.
    public : PublicPrekey
        The signed public half.
    """

    __slots__ = ("_private", "public")

    def __init__(self, private: X25519PrivateKey, public: PublicPrekey) -> None:
        self._private = private
        self.public = public

    @classmethod
    def generate(cls, identity: Identity, run: str, expiry: int) -> Self:
        """Draw a prekey of the owner ``identity`` for one run, usable until ``expiry`` (Unix seconds)."""
        private = X25519PrivateKey.generate()
        prekey_id = os.urandom(8)
        public = private.public_key().public_bytes_raw()
        signature = identity.sign("prekey", run, prekey_id, public, expiry)
        return cls(private, PublicPrekey(run, prekey_id, public, expiry, signature))

    def agree(self, public: bytes) -> bytes:
        """Return the X25519 shared secret with a public key, 32 bytes; derive keys from it, never use it as a key.

        Raises
        ------
        VerificationError
            MALFORMED when the public key has another size or low order.
        """
        return _agree(self._private, public)

    def expired(self, now: int) -> bool:
        """Return whether the grace hour after the expiry has passed, so that the prekey must be destroyed."""
        return now >= self.public.expiry + GRACE_SECONDS

    def save(self, path: Path) -> None:
        """Write the prekey to one file of mode 0600.

        Raises
        ------
        CertificateError
            The file cannot be written.
        """
        public = self.public
        fields = _PREKEY_FIELDS.pack(
            self._private.private_bytes_raw(),
            public.prekey_id,
            public.public,
            public.expiry,
            public.signature,
        )
        write_marked_file(path, _PREKEY, fields + public.run.encode("utf-8"))

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read the file that ``save`` wrote.

        Raises
        ------
        CertificateError
            The file is missing, readable by others, damaged or of another kind.
        """
        content = read_marked_file(path, _PREKEY, "a prekey")
        try:
            private, prekey_id, public, expiry, signature = _PREKEY_FIELDS.unpack_from(content)
            run = content[_PREKEY_FIELDS.size :].decode("utf-8")
        except (struct.error, UnicodeDecodeError):
            raise CertificateError(f"{path} is damaged: it holds no whole prekey") from None
        return cls(
            X25519PrivateKey.from_private_bytes(private),
            PublicPrekey(run, prekey_id, public, expiry, signature),
        )

    @staticmethod
    def destroy(path: Path) -> None:
        """Remove a prekey's file; drop the object too, its memory is freed but not wiped.

        Raises
        ------
        CertificateError
            The file cannot be removed.
        """
        destroy_private_file(path)

    def __repr__(self) -> str:
        return f"<Prekey {self.public.prekey_id.hex()} of run {self.public.run!r}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Prekey holds a secret and is never pickled")


def countersigned(bundle: Bundle) -> bytes:
    """Return the bytes of a bundle that the directory signs.

    Earlier releases signed them under a label of its own and without the party.  A bundle without one gives those
    bytes, which are in logs of such releases; `Bundle.verify` refuses it.
    """
    if not bundle.party:
        return encode("bundle-countersignature", *bundle.signed_fields(), bundle.signature)
    return encode("bundle-countersignature-2", *bundle.signed_fields(), bundle.signature, bundle.party)


def _agree(private: X25519PrivateKey, public: bytes) -> bytes:
    _check_size("the peer", "agreement key", public, _KEY)
    try:
        return private.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        # A point of low order: the result would be zero whatever our secret is.
        raise VerificationError(
            Reason.MALFORMED, "the peer's agreement key is a point of low order"
        ) from None


def check_signature(public: bytes, signature: bytes, message: bytes, what: str, reason: Reason) -> None:
    """Raise unless a message carries an Ed25519 signature by a raw public key.

    Parameters
    ----------
    public, signature, message : bytes
    what : str
        Name of the signed object, for the error's message.
    reason : Reason
        Reason of the error.

    Raises
    ------
    VerificationError
        The given reason.
    """
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, message)
    except (InvalidSignature, ValueError):
        raise VerificationError(reason, f"{what} does not carry a signature of {public.hex()[:16]}") from None


def _check_size(what: str, field: str, value: bytes, expected: int) -> None:
    if len(value) != expected:
        raise VerificationError(
            Reason.MALFORMED, f"the {field} of {what} has {len(value)} bytes, expected {expected}"
        )


def _check_number(what: str, field: str, value: int) -> None:
    if not 0 <= value < 1 << 63:
        raise VerificationError(Reason.MALFORMED, f"{field} of {what} is {value}, expected 0 to 2^63 - 1")
