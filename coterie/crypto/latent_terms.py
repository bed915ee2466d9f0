"""Terms of a set of meta-latents: what key users encrypt, how the third party combines it, when the set is closed.

A *key user* encrypts its latent vector under the run's Paillier key.  The third party, which has no secret key,
publishes *pseudo meta-latents*: weighted means of a few key users each.  A holder of the Paillier key opens the set by
a signed `LatentRecord`; a set belongs to one epoch of the key, and its combinations are drawn once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from coterie.crypto.explicit import encode
from coterie.crypto.identity import Identity, Validity, check_signature, participant_id
from coterie.crypto.key_record import KeyRecord
from coterie.crypto.verification import Reason, VerificationError

if TYPE_CHECKING:
    from coterie.crypto.paillier.packing import Packing

__all__ = ["FRACTION_BITS", "LATENT_RECORD", "LatentRecord", "LatentTerms", "sign_latent_record"]

FRACTION_BITS = 16
"""Bits of a weight: the weights of a combination sum to 2^16."""
LATENT_RECORD = "latent-record"
"""Purpose of the opener's signature, as explicit bytes."""

_ID = 32
_KEY = 32
_SIGNATURE = 64
_LEAST_KEY_USERS = 20
_MOST_KEY_USERS = 1 << 20
_MOST_VALUES = 1 << 20
"""Values of all combinations together: they are drawn at once, and read in one go."""


class LatentTerms(NamedTuple):
    """The terms of a set, which its record fixes for key users, the third party and whoever asks."""

    dimension: int
    """Length d of a latent vector."""
    combinations: int
    """Number of pseudo meta-latents."""
    least: int
    """Fewest key users; with fewer there are no pseudo meta-latents in this epoch."""
    most: int
    """Key users with whom the set is closed before its time."""
    bound: int
    """Largest value of a latent vector, thousandths; larger ones are clipped."""
    members: int = 5
    """Key users m behind a pseudo meta-latent."""
    bits: int = 24
    """Bits b of a value."""

    def check(self) -> None:
        """Check the ranges of all terms.

        Raises
        ------
        VerificationError
            MALFORMED.
        """
        for name, value, least, most in (
            ("dimension", self.dimension, 1, 4096),
            ("combinations", self.combinations, 1, 4096),
            ("members", self.members, 3, 100),
            ("bits", self.bits, 8, 31),
            ("bound", self.bound, 1, 10**9),
            ("most", self.most, _LEAST_KEY_USERS, _MOST_KEY_USERS),
            ("least", self.least, max(_LEAST_KEY_USERS, 2 * self.members, self.combinations), self.most),
        ):
            if not least <= value <= most:
                raise _malformed(f"{name} is {value}, expected {least} to {most}")
        if self.combinations * self.dimension > _MOST_VALUES:
            raise _malformed(
                f"{self.combinations} pseudo meta-latents of {self.dimension} values, expected at most {_MOST_VALUES} "
                "values"
            )

    def packing(self, key_bits: int) -> Packing:
        """Return the layout of a vector under a key: slots of b + 16 bits, so that no combination overflows.

        Raises
        ------
        CryptoError
            When a slot does not fit under the key.
        """
        from coterie.crypto.paillier.packing import Packing

        return Packing(key_bits, self.bits, 1 << FRACTION_BITS)


@dataclass(frozen=True)
class LatentRecord:
    """The signed record that opens a set of meta-latents.

    Parameters
    ----------
    run : str
    epoch : int
        Epoch of the Paillier key, from 1.
    key_id : bytes
        Id of the Paillier key, 32 bytes.
    terms : LatentTerms
    closes : int
        When the set is closed, however many key users it has by then, Unix seconds.
    expiry : int
        When the third party deletes the set, Unix seconds.
    opener_public : bytes
        Raw Ed25519 public key of the holder that opened the set, 32 bytes.
    signature : bytes
        The opener's, over all fields above, 64 bytes.
    """

    run: str
    epoch: int
    key_id: bytes
    terms: LatentTerms
    closes: int
    expiry: int
    opener_public: bytes
    signature: bytes

    @property
    def opener(self) -> bytes:
        """Id of the holder that opened the set, 32 bytes."""
        return participant_id(self.opener_public)

    def signed_fields(self) -> tuple[str | int | bytes, ...]:
        """Return the fields that the opener signs, in order."""
        return (self.run, self.epoch, self.key_id, *self.terms, self.closes, self.expiry, self.opener)

    def check(self) -> None:
        """Check the form of all fields, and the signature, without key and clock.

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
        if not 0 <= self.closes < self.expiry < 1 << 62:
            raise _malformed(
                f"a set that closes at {self.closes} and expires at {self.expiry}, expected Unix seconds in this order"
            )
        if len(self.opener_public) != _KEY or len(self.signature) != _SIGNATURE:
            raise _malformed("the opener's key or signature has another length")
        signed = encode(LATENT_RECORD, *self.signed_fields())
        check_signature(self.opener_public, self.signature, signed, "the latent record", Reason.BAD_SIGNATURE)

    def verify(self, key: KeyRecord, now: int) -> None:
        """Check the record completely: form, signature, expiry, and that a holder of the Paillier key opened the set.

        Parameters
        ----------
        key : KeyRecord
            Record of the run's Paillier key, verified.
        now : int
            Unix seconds.

        Raises
        ------
        VerificationError
            As `check`; WRONG_RUN, WRONG_KEY, NOT_LISTED or EXPIRED.
        """
        self.check()
        if self.run != key.key.run:
            raise VerificationError(
                Reason.WRONG_RUN, f"the latent record is for run {self.run!r}, expected {key.key.run!r}"
            )
        if (self.epoch, self.key_id) != (key.epoch, key.key.key_id):
            raise VerificationError(
                Reason.WRONG_KEY,
                f"the latent record is for Paillier key {self.key_id.hex()[:16]} of epoch {self.epoch}, expected "
                f"{key.key.key_id.hex()[:16]} of epoch {key.epoch}",
            )
        if self.opener not in key.holders:
            raise VerificationError(
                Reason.NOT_LISTED,
                f"{self.opener.hex()[:16]} opened the set and does not hold the Paillier key",
            )
        Validity(0, self.expiry).check("the latent record", now)


def sign_latent_record(
    identity: Identity, key: KeyRecord, terms: LatentTerms, closes: int, expiry: int
) -> LatentRecord:
    """Return the signed record by which a holder of a Paillier key opens a set.

    Parameters
    ----------
    identity : Identity
        The opener.
    key : KeyRecord
    terms : LatentTerms
    closes, expiry : int
        Unix seconds.

    Raises
    ------
    VerificationError
        MALFORMED.
    """
    unsigned = LatentRecord(
        key.key.run,
        key.epoch,
        key.key.key_id,
        terms,
        closes,
        expiry,
        identity.signing_public,
        bytes(_SIGNATURE),
    )
    record = replace(unsigned, signature=identity.sign(LATENT_RECORD, *unsigned.signed_fields()))
    record.check()
    return record


def _malformed(message: str) -> VerificationError:
    return VerificationError(Reason.MALFORMED, message)
