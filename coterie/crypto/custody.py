"""Custody of a secret Paillier key by its holders: generation, sealing for other holders, checks, storage, destruction.

A holder has a `HeldKey`: the factors of the modulus and the X25519 secret of the set key.  The holder that generated
them seals them for each other holder::

    key    = HKDF-SHA256(X25519(ephemeral, holder's agreement key), info = context)
    sealed = ephemeral public key (32 bytes) || AES-256-GCM(key, nonce 0, set secret || secret key, context)

with the explicit bytes (paillier-envelope, run, key id, epoch, generator, holder, ephemeral public key, holder's
agreement key) as context.  Every envelope has an ephemeral key of its own, so no key seals twice and the nonce may be
zero.  The holder's agreement key is taken from a bundle that the holder signed.

A holder that opens an envelope checks its content in full: the factors must be those of the modulus in the signed
record, of the form that ``coterie.crypto.paillier.keys`` asks for, and the set secret must give the record's set key.

Assumptions are those of sealed records (``coterie.crypto.sealed``).  A thief of a holder's long-term agreement key can
open recorded envelopes for this holder; the generator's long-term key opens none.  Python cannot overwrite what it
frees, so a destroyed key is gone from the disk at once and from memory when its process ends.
"""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path
from typing import NoReturn, Self

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from coterie.crypto.envelope import agree, open_envelope, seal_envelope
from coterie.crypto.explicit import encode
from coterie.crypto.identity import Bundle, Identity
from coterie.crypto.key_record import (
    COUNTERSIGNATURE,
    RECORD,
    USUAL_TERMS,
    Countersignature,
    KeyFields,
    KeyRecord,
    KeyTerms,
)
from coterie.crypto.keyfile import destroy_private_file, read_marked_file, write_marked_file
from coterie.crypto.paillier.keys import PublicKey, SecretKey, generate
from coterie.crypto.verification import Reason, VerificationError
from coterie.errors import CertificateError, CryptoError

__all__ = ["HeldKey", "countersign_record", "open_sealed", "seal_for", "sign_record"]

_HELD = b"coterie paillier key 1\n"
_FIELDS = struct.Struct(">32sQQIHH")
"""Head of a key file: set secret, epoch, created, bits, length of the run, length of the base."""
_KEY = 32


class HeldKey:
    """The secrets that the holders of a Paillier key share: secret key and set secret, checked in full.

    Neither ``repr`` nor any error shows them, and they cannot be pickled.

    Parameters
    ----------
    epoch : int
        Epoch of the key, from 1.
    secret : SecretKey
        Secret key, from `generate` or `SecretKey.from_bytes`, which both check it in full.
    set_secret : X25519PrivateKey
        Secret half of the set key in the public key.

    Raises
    ------
    VerificationError
        WRONG_KEY when the set secret is not the public key's.
    """

    __slots__ = ("_set_secret", "epoch", "secret")

    def __init__(self, epoch: int, secret: SecretKey, set_secret: X25519PrivateKey) -> None:
        if set_secret.public_key().public_bytes_raw() != secret.public.set_public:
            raise VerificationError(
                Reason.WRONG_KEY, "the set secret is not that of the set key in the public key"
            )
        self.epoch = epoch
        self.secret = secret
        self._set_secret = set_secret

    @classmethod
    def generate(cls, run: str, epoch: int, terms: KeyTerms = USUAL_TERMS) -> Self:
        """Draw a key pair and a set key; about half a second at 3,072 bits, so call it in a thread.

        Raises
        ------
        CryptoError
            The terms ask for a length that is not allowed.
        """
        set_secret = X25519PrivateKey.generate()
        secret = generate(
            run,
            set_secret.public_key().public_bytes_raw(),
            bits=terms.bits,
            subgroup=terms.subgroup,
            comparison=terms.comparison,
        )
        return cls(epoch, secret, set_secret)

    @property
    def public(self) -> PublicKey:
        """Public key."""
        return self.secret.public

    @property
    def key_id(self) -> bytes:
        """Id of the key, 32 bytes."""
        return self.secret.public.key_id

    def agree(self, public: bytes) -> bytes:
        """Return the X25519 shared secret of the set key and a contributor's agreement key, 32 bytes.

        `coterie.crypto.paillier.pads.contributor_key` derives a key from it; it is never a key itself.

        Raises
        ------
        VerificationError
            MALFORMED when the public key has another size or low order.
        """
        return agree(self._set_secret, public)

    def derived(self, purpose: str) -> bytes:
        """Derive 32 bytes for one purpose, the same for every holder and secret from everybody else.

        HKDF-SHA256 of both secrets, with the explicit bytes (purpose, run, key id, epoch) as ``info``.

        Parameters
        ----------
        purpose : str
            Use of the bytes; each use has a purpose of its own.
        """
        info = encode(purpose, self.public.run, self.key_id, self.epoch)
        return HKDF(SHA256(), _KEY, salt=None, info=info).derive(self._sealable())

    def save(self, path: Path) -> None:
        """Write the secrets to one file of mode 0600.

        Layout: a line that says what it is; set secret (32 bytes), epoch (8), created (8), bits (4), length of the
        run (2), length of the base (2); run, base, secret key; the SHA-256 of everything before it.

        Raises
        ------
        CertificateError
            The file cannot be written.
        """
        key = KeyFields.of(self.public)
        run = key.run.encode("utf-8")
        head = _FIELDS.pack(
            self._set_secret.private_bytes_raw(), self.epoch, key.created, key.bits, len(run), len(key.base)
        )
        write_marked_file(path, _HELD, head + run + key.base + self.secret.to_bytes())

    @classmethod
    def load(cls, path: Path, terms: KeyTerms = USUAL_TERMS) -> Self:
        """Read the file that ``save`` wrote, and check the key in full.

        Parameters
        ----------
        path : Path
        terms : KeyTerms, optional
            Only ``comparison`` is used; the rest is in the file.

        Raises
        ------
        CertificateError
            The file is missing, readable by others, damaged or of another kind.
        """
        content = read_marked_file(path, _HELD, "a secret Paillier key")
        try:
            set_secret, epoch, created, bits, run_size, base_size = _FIELDS.unpack_from(content)
            start = _FIELDS.size + run_size
            run = content[_FIELDS.size : start].decode("utf-8")
            base, secret = content[start : start + base_size], content[start + base_size :]
            factor = bits // 16
            modulus = int.from_bytes(secret[:factor]) * int.from_bytes(secret[factor : 2 * factor])
            held = X25519PrivateKey.from_private_bytes(set_secret)
            public = PublicKey(
                modulus,
                held.public_key().public_bytes_raw(),
                bits,
                created,
                run,
                int.from_bytes(base),
                comparison=terms.comparison,
            )
            return cls(epoch, SecretKey.from_bytes(public, secret), held)
        except (struct.error, UnicodeDecodeError, VerificationError):
            raise CertificateError(f"{path} is damaged: it holds no whole Paillier key") from None
        except CryptoError as error:
            raise CertificateError(f"{path} cannot be used: {error.message}", hint=error.hint) from None

    @staticmethod
    def destroy(path: Path) -> None:
        """Remove a key's file; drop the object too, its memory is freed but not wiped.

        Raises
        ------
        CertificateError
            The file cannot be removed.
        """
        destroy_private_file(path)

    def _sealable(self) -> bytes:
        return self._set_secret.private_bytes_raw() + self.secret.to_bytes()

    def __repr__(self) -> str:
        return f"<HeldKey {self.key_id.hex()[:16]} of epoch {self.epoch}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a HeldKey holds secrets and is never pickled")


def sign_record(identity: Identity, held: HeldKey, holders: tuple[bytes, ...]) -> KeyRecord:
    """Return the signed record of a key that this holder generated.

    Parameters
    ----------
    identity : Identity
        The generator.
    held : HeldKey
    holders : tuple of bytes
        Ids of all holders, the generator among them; ascending.

    Raises
    ------
    VerificationError
        MALFORMED when the holders are not ascending, repeat, or lack the generator.
    """
    fields = KeyFields.of(held.public)
    unsigned = KeyRecord(fields, held.epoch, holders, identity.signing_public, bytes(64))
    record = replace(unsigned, signature=identity.sign(RECORD, *unsigned.signed_fields()))
    record.check_signatures()
    return record


def countersign_record(identity: Identity, held: HeldKey, record: KeyRecord) -> Countersignature:
    """Countersign the record of a key whose secret this holder has opened or loaded, and so checked in full.

    Raises
    ------
    VerificationError
        WRONG_KEY when the record is of another key or epoch; NOT_LISTED when it does not name this holder.
    """
    _check_same(held, record)
    signature = identity.sign(COUNTERSIGNATURE, *record.countersigned_fields())
    one = Countersignature(identity.signing_public, signature)
    record.check_countersignature(one)
    return one


def seal_for(holder: Bundle, held: HeldKey, record: KeyRecord) -> bytes:
    """Seal the secrets of a key for one of its other holders.

    Parameters
    ----------
    holder : Bundle
        Bundle of the holder, verified.
    held : HeldKey
    record : KeyRecord
        Record of the key.

    Returns
    -------
    bytes
        Ephemeral public key, ciphertext and tag: 80 bytes longer than the secret key.

    Raises
    ------
    VerificationError
        NOT_LISTED when the record does not name the holder, WRONG_KEY when it is another key's, MALFORMED when the
        holder's agreement key is not usable.
    """
    _check_same(held, record)
    if holder.participant_id not in record.holders:
        raise VerificationError(
            Reason.NOT_LISTED, f"participant {holder.participant_id.hex()[:16]} is no holder of the key"
        )
    agreement = holder.agreement_public
    sealed, _ = seal_envelope(
        agreement,
        held._sealable(),
        lambda public: _context(record, holder.participant_id, public, agreement),
    )
    return sealed


def open_sealed(
    identity: Identity, record: KeyRecord, sealed: bytes, terms: KeyTerms = USUAL_TERMS
) -> HeldKey:
    """Open the envelope for this holder, and check its content against the record in full.

    Parameters
    ----------
    identity : Identity
        The holder.
    record : KeyRecord
        Record of the key, verified but for its countersignatures.
    sealed : bytes
        Envelope that `seal_for` made.
    terms : KeyTerms, optional
        The run's requirements on its key.

    Raises
    ------
    VerificationError
        NOT_AUTHENTIC when the envelope does not open: altered, or for another holder, key, run or epoch.  WRONG_KEY or
        MALFORMED when its content is not the secret of the record's key.
    """
    public_key = record.key.public_key(terms)
    content = open_envelope(
        identity.agree,
        sealed,
        lambda public: _context(record, identity.participant_id, public, identity.agreement_public),
        "a sealed Paillier key",
    )
    if len(content) < _KEY:
        raise VerificationError(Reason.MALFORMED, "a sealed Paillier key without a set secret")
    set_secret = X25519PrivateKey.from_private_bytes(content[:_KEY])
    return HeldKey(record.epoch, SecretKey.from_bytes(public_key, content[_KEY:]), set_secret)


def _context(record: KeyRecord, holder: bytes, ephemeral: bytes, agreement: bytes) -> bytes:
    return encode(
        "paillier-envelope",
        record.run,
        record.key_id,
        record.epoch,
        record.generator,
        holder,
        ephemeral,
        agreement,
    )


def _check_same(held: HeldKey, record: KeyRecord) -> None:
    if (held.key_id, held.epoch) != (record.key_id, record.epoch):
        raise VerificationError(
            Reason.WRONG_KEY,
            f"the record is of key {record.key_id.hex()[:16]} and epoch {record.epoch}, "
            f"held is {held.key_id.hex()[:16]} of epoch {held.epoch}",
        )
