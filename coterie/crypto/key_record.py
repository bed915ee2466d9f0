"""Records of Paillier keys: a run's public key in an epoch, the holders of its secret, and their signatures.

One holder makes a key pair and signs its record; the others open their envelopes, check the secret key in full, and
countersign.  A party that encrypts relies on the signatures of holders that the operator's roster names, and not on
the third party, which only passes records on.  A record carries the signers' public keys; a participant's id is the
SHA-256 of its key, so no look-up is needed.

This module does not compute with the key, so the third party checks records without ``gmpy2``.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from coterie.crypto.explicit import encode
from coterie.crypto.identity import check_signature, participant_id
from coterie.crypto.key_id import paillier_key_id
from coterie.crypto.roster import MOST_MEMBERS, PAILLIER, Roster
from coterie.crypto.verification import Reason, VerificationError

if TYPE_CHECKING:
    from coterie.crypto.paillier.keys import PublicKey

__all__ = [
    "COUNTERSIGNATURE",
    "COUNTERSIGNERS",
    "RECORD",
    "USUAL_TERMS",
    "Countersignature",
    "KeyFields",
    "KeyRecord",
    "KeyTerms",
    "check_epoch",
    "countersigners_needed",
]

COUNTERSIGNERS = 2
"""Number of holders, besides the generator, that must countersign a key, where there are so many."""

RECORD = "paillier-record"
"""Purpose of the generator's signature, as explicit bytes."""
COUNTERSIGNATURE = "paillier-countersignature"
"""Purpose of the other holders' signatures, as explicit bytes."""
_ID = 32
_KEY = 32
_SIGNATURE = 64
_MOST_BITS = 1 << 14


class KeyTerms(NamedTuple):
    """A run's requirements on its Paillier key, from the configuration of the party that relies on it."""

    bits: int = 3072
    """Length of the modulus."""
    subgroup: bool = False
    """Whether it is a subgroup key."""
    comparison: bool = False
    """Whether the run is a comparison with a paper, for which 1,024 bits are allowed."""


USUAL_TERMS = KeyTerms()
"""The default requirements: a key of 3,072 bits, no subgroup key."""


def countersigners_needed(eligible: int) -> int:
    """Return the number of countersignatures needed with ``eligible`` unrevoked members on the roster: at most two."""
    return max(0, min(COUNTERSIGNERS, eligible - 1))


class KeyFields(NamedTuple):
    """The fields of a public Paillier key as bytes; ``coterie.crypto.paillier.PublicKey`` computes with them."""

    run: str
    bits: int
    """Declared length of the modulus."""
    modulus: bytes
    """Big-endian, ``bits / 8`` bytes."""
    set_public: bytes
    """X25519 public half of the set key, 32 bytes."""
    created: int
    """Unix seconds."""
    base: bytes
    """Base of the subgroup, as long as the modulus; empty unless this is a subgroup key."""

    @classmethod
    def of(cls, public: PublicKey) -> KeyFields:
        """Return the fields of a public key."""
        size = public.modulus_bytes
        base = int(public.base).to_bytes(size) if public.subgroup else b""
        modulus = int(public.n).to_bytes(size)
        return cls(public.run, public.bits, modulus, public.set_public, public.created, base)

    @property
    def key_id(self) -> bytes:
        """SHA-256 of the key, 32 bytes."""
        return paillier_key_id(self.modulus, self.set_public, self.bits, self.created, self.run, self.base)

    def check_form(self) -> None:
        """Check lengths and ranges of the fields.

        Raises
        ------
        VerificationError
            MALFORMED.
        """
        if not 0 < self.bits <= _MOST_BITS or self.bits % 16:
            raise _malformed(f"a modulus of {self.bits} bits, expected a multiple of 16 up to {_MOST_BITS}")
        size = self.bits // 8
        if len(self.modulus) != size or self.modulus[0] < 128:
            held = 8 * len(self.modulus) - (8 - self.modulus[0].bit_length()) if self.modulus else 0
            raise _malformed(f"a modulus of {held} bits, and {self.bits} are declared")
        if len(self.set_public) != _KEY:
            raise _malformed(f"a set key of {len(self.set_public)} bytes, expected {_KEY}")
        if len(self.base) not in (0, size):
            raise _malformed(f"a base of {len(self.base)} bytes, expected none or {size}")
        if not 0 <= self.created < 1 << 63:
            raise _malformed(f"created at {self.created}, expected Unix seconds")

    def as_stated(self) -> PublicKey:
        """Return the key without requirements on its size and kind, for parties that do not encrypt under it.

        Raises
        ------
        VerificationError
            MALFORMED.
        CryptoError
            The fields cannot be a Paillier key.
        """
        return self.public_key(KeyTerms(bits=self.bits, subgroup=bool(self.base), comparison=True))

    def public_key(self, terms: KeyTerms) -> PublicKey:
        """Return the key, checked against the run's requirements as far as possible without the secret key.

        Raises
        ------
        VerificationError
            MALFORMED, also when the key is not what the run asks for.
        CryptoError
            The run asks for a key that is too short.
        """
        from coterie.crypto.paillier.keys import PublicKey

        self.check_form()
        if (self.bits, bool(self.base)) != (terms.bits, terms.subgroup):
            raise _malformed(
                f"a {_kind(bool(self.base))} of {self.bits} bits, "
                f"expected a {_kind(terms.subgroup)} of {terms.bits}"
            )
        return PublicKey(
            int.from_bytes(self.modulus),
            self.set_public,
            self.bits,
            self.created,
            self.run,
            int.from_bytes(self.base),
            comparison=terms.comparison,
        )


class Countersignature(NamedTuple):
    """A holder's statement that it holds the secret of a key and has checked it."""

    signing_public: bytes
    """The holder's raw Ed25519 public key, 32 bytes."""
    signature: bytes
    """64 bytes."""

    @property
    def participant(self) -> bytes:
        """Id of the holder, 32 bytes."""
        return participant_id(self.signing_public)


@dataclass(frozen=True)
class KeyRecord:
    """A run's public Paillier key in one epoch, with its holders and their signatures.

    Parameters
    ----------
    key : KeyFields
        The public key.
    epoch : int
        Number of the key within the run, from 1.
    holders : tuple of bytes
        Ids of the generator and of the participants for whom the secret was sealed; ascending.
    generator_public : bytes
        Raw Ed25519 public key of the holder that made the key, 32 bytes.
    signature : bytes
        The generator's, 64 bytes.
    countersignatures : tuple of Countersignature
        Signatures of other holders, ascending by id.
    """

    key: KeyFields
    epoch: int
    holders: tuple[bytes, ...]
    generator_public: bytes
    signature: bytes
    countersignatures: tuple[Countersignature, ...] = ()

    @property
    def generator(self) -> bytes:
        """Id of the holder that made the key, 32 bytes."""
        return participant_id(self.generator_public)

    @property
    def key_id(self) -> bytes:
        """Id of the key, 32 bytes."""
        return self.key.key_id

    @property
    def run(self) -> str:
        """Id of the run."""
        return self.key.run

    def signed_fields(self) -> tuple[bytes, int, bytes, bytes]:
        """Return the fields that the generator signs, in order, under the purpose `RECORD`."""
        return self.key_id, self.epoch, self.generator, b"".join(self.holders)

    def countersigned_fields(self) -> tuple[bytes, int, bytes, bytes, bytes]:
        """Return the fields that the other holders sign, in order, under the purpose `COUNTERSIGNATURE`."""
        return *self.signed_fields(), self.signature

    def without_countersignatures(self) -> KeyRecord:
        """Return the record as its generator published it."""
        return replace(self, countersignatures=())

    def with_countersignature(self, added: Countersignature) -> KeyRecord:
        """Return a copy with one countersignature added, in place of an earlier one of the same holder."""
        others = [one for one in self.countersignatures if one.signing_public != added.signing_public]
        return replace(
            self, countersignatures=tuple(sorted([*others, added], key=lambda one: one.participant))
        )

    def check_signatures(self) -> None:
        """Check the fields and every signature, without roster and clock.

        Raises
        ------
        VerificationError
            MALFORMED, BAD_SIGNATURE, or BAD_COUNTERSIGNATURE.
        """
        self._check_form()
        signed = encode(RECORD, *self.signed_fields())
        check_signature(self.generator_public, self.signature, signed, "the key record", Reason.BAD_SIGNATURE)
        for one in self.countersignatures:
            self.check_countersignature(one)

    def check_countersignature(self, one: Countersignature) -> None:
        """Check a countersignature: that it is valid and of a holder other than the generator.

        Raises
        ------
        VerificationError
            NOT_LISTED or BAD_COUNTERSIGNATURE.
        """
        if one.participant not in self.holders or one.signing_public == self.generator_public:
            raise VerificationError(
                Reason.NOT_LISTED,
                f"participant {one.participant.hex()[:16]} countersigned a key record, "
                "and is not one of the other holders",
            )
        check_signature(
            one.signing_public,
            one.signature,
            encode(COUNTERSIGNATURE, *self.countersigned_fields()),
            f"the countersignature of holder {one.participant.hex()[:16]}",
            Reason.BAD_COUNTERSIGNATURE,
        )

    def check_holders(self, roster: Roster, revoked: Collection[bytes]) -> None:
        """Check that every holder is on the roster and not revoked, and that there are enough holders.

        Raises
        ------
        VerificationError
            NOT_LISTED, REVOKED or TOO_FEW.
        """
        listed = frozenset(roster.members)
        for holder in self.holders:
            if holder not in listed:
                raise VerificationError(
                    Reason.NOT_LISTED,
                    f"holder {holder.hex()[:16]} of the key of epoch {self.epoch} is not on the roster",
                )
            if holder in revoked:
                raise VerificationError(
                    Reason.REVOKED,
                    f"holder {holder.hex()[:16]} of the key of epoch {self.epoch} was revoked",
                    hint="wait until the holders have rotated",
                )
        needed = countersigners_needed(len(roster.eligible(revoked)))
        if len(self.holders) <= needed:
            raise VerificationError(
                Reason.TOO_FEW,
                f"a key with {len(self.holders)} holders, expected {needed + 1} of the roster at least",
            )

    def check_complete(self, roster: Roster, revoked: Collection[bytes]) -> None:
        """Check that enough holders have countersigned.

        Raises
        ------
        VerificationError
            NOT_COUNTERSIGNED.
        """
        needed = countersigners_needed(len(roster.eligible(revoked)))
        if len(self.countersignatures) < needed:
            raise VerificationError(
                Reason.NOT_COUNTERSIGNED,
                f"{len(self.countersignatures)} other holders countersigned the key of epoch {self.epoch}, "
                f"expected {needed}",
            )

    def verify_statement(
        self,
        roster: Roster,
        roster_key: bytes,
        *,
        run: str,
        now: int,
        revoked: Collection[bytes] = (),
        complete: bool = True,
    ) -> None:
        """Check the record completely but for the key's numbers, which need ``gmpy2``.

        Parameters
        ----------
        roster : Roster
        roster_key : bytes
            The operator's raw Ed25519 public key, 32 bytes.
        run : str
        now : int
            Unix seconds.
        revoked : collection of bytes, optional
            Ids of revoked participants.
        complete : bool, optional
            Whether the countersignatures must be there.

        Raises
        ------
        VerificationError
            As `Roster.verify`, `check_signatures`, `check_holders` and `check_complete`; WRONG_RUN.
        """
        roster.verify(roster_key, purpose=PAILLIER, run=run, now=now)
        self.check_signatures()
        if self.run != run:
            raise VerificationError(
                Reason.WRONG_RUN, f"the key record is for run {self.run!r}, expected {run!r}"
            )
        self.check_holders(roster, revoked)
        if complete:
            self.check_complete(roster, revoked)

    def verify(
        self,
        roster: Roster,
        roster_key: bytes,
        *,
        run: str,
        now: int,
        revoked: Collection[bytes] = (),
        terms: KeyTerms = USUAL_TERMS,
        complete: bool = True,
    ) -> PublicKey:
        """Check the record completely, and return the key to encrypt with.

        Parameters
        ----------
        roster, roster_key, run, now, revoked, complete
            As in `verify_statement`.
        terms : KeyTerms, optional
            The run's requirements on its key.

        Raises
        ------
        VerificationError
            As `verify_statement`; MALFORMED when the key is not what the run asks for.
        CryptoError
            The run asks for a key that is too short.
        """
        self.verify_statement(roster, roster_key, run=run, now=now, revoked=revoked, complete=complete)
        return self.key.public_key(terms)

    def _check_form(self) -> None:
        self.key.check_form()
        if not 1 <= self.epoch < 1 << 32:
            raise _malformed(f"epoch {self.epoch}, expected 1 to 2^32 - 1")
        if not 0 < len(self.holders) <= MOST_MEMBERS or any(len(one) != _ID for one in self.holders):
            raise _malformed(f"{len(self.holders)} holders, expected 1 to {MOST_MEMBERS} ids of {_ID} bytes")
        if not _ascending(self.holders):
            raise _malformed("holders that are not ascending, or come twice")
        if len(self.generator_public) != _KEY or self.generator not in self.holders:
            raise _malformed("a generator who is not one of the holders")
        if len(self.signature) != _SIGNATURE:
            raise _malformed(f"a signature of {len(self.signature)} bytes, expected {_SIGNATURE}")
        if not _ascending([one.participant for one in self.countersignatures]):
            raise _malformed("countersignatures that are not ascending by holder, or come twice")


def check_epoch(epoch: int, key_id: bytes, seen_epoch: int, seen_key_id: bytes) -> None:
    """Check that a key may follow a key seen before.

    Raises
    ------
    VerificationError
        OLD_EPOCH for a lower epoch, and for another key of the same epoch.
    """
    if epoch < seen_epoch:
        raise VerificationError(
            Reason.OLD_EPOCH,
            f"a key of epoch {epoch}, and one of epoch {seen_epoch} was seen before",
            hint="the third party may have been restored from a backup",
        )
    if epoch == seen_epoch and key_id != seen_key_id:
        raise VerificationError(
            Reason.OLD_EPOCH,
            f"key {key_id.hex()[:16]} of epoch {epoch}, "
            f"and another one of that epoch was seen before: {seen_key_id.hex()[:16]}",
        )


def _ascending(ids: Collection[bytes]) -> bool:
    return all(before < after for before, after in itertools.pairwise(ids))


def _kind(subgroup: bool) -> str:
    return "subgroup key" if subgroup else "key"


def _malformed(message: str) -> VerificationError:
    return VerificationError(Reason.MALFORMED, f"the key record cannot be used: {message}")
