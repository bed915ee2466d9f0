"""The encrypted sum: contributions under a Paillier key, added by a server that cannot read them.

Members pack their codes into plaintexts, encrypt and submit them; the server multiplies ciphertexts, and keeps one
running product for each place.  The *holders* of the secret key first sign the list of members in the sum (CONFIRM),
then each decrypts a part of it (DECRYPT).  ``coterie.secure_sum.key_holder`` has the checks that a holder makes first.
A part whose holder is gone, or whose plaintexts or pads are wrong, is given to another holder.  If the plan says so,
members leave out ciphertexts that hold only zeros (``coterie.secure_sum.sparse``).

The server learns the sum and nothing about single contributions, as long as no holder works with it: a holder and the
server together can read everything.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple, Self, TypeVar

import numpy as np
from gmpy2 import mpz
from google.protobuf.message import DecodeError, Message
from numpy.typing import NDArray

from coterie.crypto.explicit import encode
from coterie.crypto.identity import Identity, check_signature, participant_id
from coterie.crypto.key_record import KeyFields
from coterie.crypto.paillier import (
    EncryptedVector,
    Obfuscators,
    Packing,
    PublicKey,
    RunningSum,
    encrypt,
    from_bytes,
    to_bytes,
)
from coterie.crypto.paillier.pads import HASH_BYTES, contributor_key, pads, sums_hash
from coterie.crypto.paillier.proof import check
from coterie.crypto.verification import Reason, VerificationError
from coterie.errors import CryptoError
from coterie.secure_sum.contribution import Layout
from coterie.secure_sum.plan import Member, SumPlan
from coterie.secure_sum.protocol import (
    Closed,
    Declined,
    Failed,
    Pieces,
    PlanFields,
    Step,
    Subject,
    Total,
    Vector,
    bad_message,
    once,
    users_of,
)
from coterie.secure_sum.sparse import above_floor, nothing, pack_places, something, unpack_places
from coterie.secure_sum.statements import CONFIRM, list_hash
from coterie.wire.refusal import ErrorReason, Refusal
from coterie.wire.v1 import rounds_pb2 as wire
from coterie.wire.v1.thirdparty_pb2 import PaillierKey

__all__ = [
    "EncryptedMember",
    "EncryptedServer",
    "Keyring",
    "check_confirmation",
    "ciphertexts_at",
    "confirmations_in",
    "packing_of",
    "part_of",
    "proof_context",
    "read_message",
]

_MessageT = TypeVar("_MessageT", bound=Message)

_HASH_BYTES = 32
"""Bytes of the hash with which the note on a contribution begins; in a sparse sum its places follow."""


def packing_of(plan: SumPlan, public: PublicKey) -> Packing:
    """Return the packing of codes into plaintexts, with room in each slot for every user of the cohort.

    Raises
    ------
    CryptoError
        When a plaintext has no room for that.
    """
    return Packing(public.bits, plan.code_bits, plan.users)


def part_of(ciphertexts: int, part: int, parts: int) -> range:
    """Return the range of ciphertexts in part number ``part``; there are as many parts as holders."""
    return range(part * ciphertexts // parts, (part + 1) * ciphertexts // parts)


def check_confirmation(plan: SumPlan, holder: int, confirmation: wire.Confirmation, agreed: bytes) -> None:
    """Check a holder's signature of a list of submitters.

    Parameters
    ----------
    plan : SumPlan
    holder : int
        Position among the plan's holders.
    confirmation : Confirmation
    agreed : bytes
        Hash of the list.

    Raises
    ------
    VerificationError
        WRONG_KEY when the key is not the one of the plan's holder, BAD_SIGNATURE when it did not sign this list.
    """
    signing = confirmation.signing_public
    if participant_id(signing) != plan.holders[holder].participant:
        raise VerificationError(
            Reason.WRONG_KEY, f"the key of a confirmation is not that of key holder {holder}"
        )
    check_signature(
        signing,
        confirmation.signature,
        encode(CONFIRM, plan.hash, agreed),
        "a confirmation",
        Reason.BAD_SIGNATURE,
    )


class Listed(NamedTuple):
    """The list of submitters of a sum, as the server shows it to holders.

    Parameters
    ----------
    members : list of int
        Members that submitted, ascending.
    places : bytes
        In a sparse sum, the ciphertexts of each member that are added, as bits; empty otherwise.
    hash : bytes
        Hash of the list, which holders sign.
    dropped : list of int
        In a sparse sum, the ciphertexts that too few members or users sent.
    """

    members: list[int]
    places: bytes
    hash: bytes
    dropped: list[int]


@lru_cache(maxsize=4)
def _zeros(layout: Layout, packing: Packing) -> tuple[mpz, ...]:
    """Return the plaintexts of one user's contribution of zeros; cached, as many contributions of a round need them."""
    return tuple(nothing(layout, packing))


def _listed(plan: SumPlan, notes: Mapping[int, bytes]) -> Listed:
    members = sorted(notes)
    if not plan.sparse_floor:
        return Listed(members, b"", list_hash(members), [])
    sent = unpack_places(b"".join(notes[member][_HASH_BYTES:] for member in members), len(members))
    added = above_floor(plan, members, sent)
    places = pack_places(added)
    dropped = np.flatnonzero(sent.any(axis=0) & ~added.any(axis=0)).tolist()
    return Listed(members, places, list_hash(members, places), dropped)


class Keyring:
    """The public keys of a run's encrypted sums, at the server: the present key, and those of sums in progress."""

    def __init__(self) -> None:
        self._known: dict[bytes, PublicKey] = {}
        self._current: tuple[PublicKey, tuple[Member, ...]] | None = None

    def use(self, public: PublicKey, holders: Sequence[Member]) -> None:
        """Plan sums under this key from now on; ``holders`` are the key holders, absent ones included."""
        self._known[public.key_id] = public
        self._current = public, tuple(holders)

    @property
    def current(self) -> tuple[PublicKey, tuple[Member, ...]]:
        """Key and holders of the next sum.

        Raises
        ------
        Failed
            When there is no key, or no holder to decrypt.
        """
        if self._current is None or not self._current[1]:
            raise Failed("there is no key to encrypt under yet, or nobody is there who could decrypt")
        return self._current

    def of(self, plan: SumPlan) -> PublicKey:
        """Return the public key that a plan names.

        Raises
        ------
        Failed
            When the key is not known.
        """
        found = self._known.get(plan.key_id)
        if found is None:
            raise Failed(f"key {plan.key_id.hex()[:16]} of the plan is not known")
        return found


class EncryptedServer:
    """The orchestration server's half of the encrypted sum.

    Parameters
    ----------
    keys : Keyring, optional
        Public keys of the run; the service updates them as keys change.
    """

    name = "encrypted"
    steps: tuple[Step, ...] = (Step.SUBMIT, Step.CONFIRM, Step.DECRYPT)
    binding: Step | None = Step.CONFIRM
    forms_at_once = False
    compares_notes = False

    def __init__(self, keys: Keyring | None = None) -> None:
        self.keys = keys if keys is not None else Keyring()

    @classmethod
    def of_terms(cls, terms: bytes) -> Self:
        """Return a half that takes contributions under the key of which another half told by `terms`.

        Raises
        ------
        CryptoError
            When the terms have no key, or one that cannot be valid.
        """
        try:
            key = PaillierKey.FromString(terms)
        except DecodeError as error:
            raise CryptoError("the terms of a sum under a key are no public key") from error
        fields = KeyFields(key.run_id, key.bits, key.modulus, key.set_public, key.created, key.base)
        half = cls()
        half.keys.use(fields.as_stated(), ())
        return half

    def terms(self, plan: SumPlan) -> bytes:
        """Return the public key that the plan names, a serialised ``PaillierKey``."""
        key = KeyFields.of(self.keys.of(plan))
        return PaillierKey(
            run_id=key.run,
            bits=key.bits,
            modulus=key.modulus,
            set_public=key.set_public,
            created=key.created,
            base=key.base,
        ).SerializeToString(deterministic=True)

    def plan_fields(self, members: int, layout: Layout) -> PlanFields:
        """Return the plan's key id, bits of a code and holders.

        Raises
        ------
        Failed
            When there is no key, or no holder to decrypt.
        """
        public, holders = self.keys.current
        widest = max(segment.bits for segment in layout.segments)
        return PlanFields(key_id=public.key_id, code_bits=widest, holders=holders)

    # --- the sum -------------------------------------------------------------------------------------------------

    def begin(self, plan: SumPlan, layout: Layout) -> RunningSum:
        """Return an empty running sum."""
        public = self.keys.of(plan)
        packing = packing_of(plan, public)
        zeros = _zeros(layout, packing) if plan.sparse_floor else ()
        return RunningSum(public, packing, layout.size, zeros)

    def added(self, running: RunningSum, vector: Vector) -> RunningSum:
        """Return a running sum with one more contribution."""
        return running.plus(vector.addend)

    def summed(self, plan: SumPlan, layout: Layout, addends: Iterable[EncryptedVector]) -> RunningSum:
        """Return the sum of some contributions."""
        running = self.begin(plan, layout)
        for vector in addends:
            running.add(vector)
        return running

    def joined(self, running: RunningSum, other: RunningSum) -> RunningSum:
        """Return the sum of both."""
        return running.joined(other)

    def to_bytes(self, running: RunningSum) -> bytes:
        """Serialise a running sum: number of addends, 4 bytes big-endian, then the sum in a contribution's form."""
        if not running.addends:
            return b""
        return running.addends.to_bytes(4) + to_bytes(running.total())

    def from_bytes(self, plan: SumPlan, layout: Layout, stored: bytes) -> RunningSum:
        """Return the running sum that `to_bytes` wrote."""
        running = self.begin(plan, layout)
        if stored:
            addends = int.from_bytes(stored[:4])
            public, packing, size = running.public, running.packing, running.count
            running.add(from_bytes(stored[4:], public, packing, size, addends=addends))
        return running

    def _total(self, plan: SumPlan, closed: Closed, running: RunningSum) -> EncryptedVector:
        """Return the sum in the form in which it is decrypted; computed once."""

        def make() -> EncryptedVector:
            total = running.total()
            return self._above_floor(plan, closed, total, running.zeros) if plan.sparse_floor else total

        return once(closed, "total", make)

    def _above_floor(
        self, plan: SumPlan, closed: Closed, total: EncryptedVector, zeros: Sequence[mpz]
    ) -> EncryptedVector:
        """Replace ciphertexts that too few users sent by those of zeros, which everybody knows."""
        units, shifts = list(total.units), list(total.shifts)
        for place in self._listed(plan, closed).dropped:
            units[place], shifts[place] = mpz(1), total.addends * zeros[place]
        return replace(total, units=tuple(units), shifts=tuple(shifts))

    @staticmethod
    def _listed(plan: SumPlan, closed: Closed) -> Listed:
        """Return the list of submitters; computed once for a sum."""
        return once(closed, "listed", lambda: _listed(plan, closed[Step.SUBMIT]))

    # --- whom a step asks ------------------------------------------------------------------------------------------

    def expected(self, plan: SumPlan, closed: Closed, step: Step) -> tuple[int, ...]:
        """Return all members for SUBMIT, all holders for CONFIRM, each part's first choice of holder for DECRYPT."""
        if step is Step.SUBMIT:
            return tuple(range(len(plan.members)))
        own = [plan.respondent(holder, holder) for holder in range(len(plan.holders))]
        if step is Step.CONFIRM:
            return tuple(own)
        return tuple(sorted(self._first_choices(plan, closed)))

    def _first_choices(self, plan: SumPlan, closed: Closed) -> list[int]:
        present = self._confirmed(plan, closed)
        return [plan.respondent(_from(part, plan, present), part) for part in range(len(plan.holders))]

    def _confirmed(self, plan: SumPlan, closed: Closed) -> set[int]:
        """Return the holders that confirmed, without those that stand against a majority about the pads."""
        against = self._against(plan, closed)
        return {
            plan.asked_of(respondent)[0] for respondent in closed[Step.CONFIRM] if respondent not in against
        }

    def _against(self, plan: SumPlan, closed: Closed) -> tuple[int, ...]:
        """Return the respondents whose sums of pads are not those of the majority, ascending."""
        said = self._said(closed)
        agreed = _agreed(said) if self._told(plan) else None
        return () if agreed is None else tuple(one for one, own in said.items() if own != agreed)

    @staticmethod
    def _said(closed: Closed) -> dict[int, bytes]:
        """Return what each holder said of the sums of pads, by respondent; read once for a sum."""

        def make() -> dict[int, bytes]:
            return {
                respondent: wire.Confirmation.FromString(message).pads
                for respondent, message in sorted(closed[Step.CONFIRM].items())
            }

        return once(closed, "pads", make)

    def _told(self, plan: SumPlan) -> bool:
        """Return whether holders tell the server the sum, which then compares the pads that they subtracted."""
        return True

    def stand_ins(
        self,
        plan: SumPlan,
        closed: Closed,
        step: Step,
        arrived: Collection[int],
        asked: Collection[int],
        gone: Collection[int],
    ) -> tuple[int, ...]:
        """Return the next present holder, not asked before, for each part that no holder is left to decrypt."""
        if step is not Step.DECRYPT:
            return ()
        missing = {plan.asked_of(respondent)[0] for respondent in gone}
        present = self._confirmed(plan, closed) - missing
        done = {plan.asked_of(respondent)[1] for respondent in arrived}
        found = []
        for part in range(len(plan.holders)):
            tried = {holder for holder, of in map(plan.asked_of, asked) if of == part}
            if part in done or tried & present:
                continue
            if left := present - tried:
                found.append(plan.respondent(_from(part, plan, left), part))
        return tuple(found)

    def enough(self, plan: SumPlan, closed: Closed, step: Step, arrived: Collection[int]) -> bool:
        """Return whether every part is decrypted."""
        return step is Step.DECRYPT and not self._undone(plan, arrived)

    def _undone(self, plan: SumPlan, arrived: Collection[int]) -> set[int]:
        done = {plan.asked_of(respondent)[1] for respondent in arrived}
        return set(range(len(plan.holders))) - done

    def answers_as(self, plan: SumPlan, member: int, step: Step, message: bytes) -> int:
        """Return the number under which a holder, given by its own number, decrypts the part that its message names."""
        if step is not Step.DECRYPT or member < len(plan.members):
            return member
        part = read_message(wire.Decryption, step, message).part
        if part >= len(plan.holders):
            raise bad_message(step, f"a part {part}", f"one of {len(plan.holders)} parts, from 0")
        return plan.respondent(plan.asked_of(member)[0], part)

    def shortfall(self, plan: SumPlan, closed: Closed, step: Step, arrived: Mapping[int, bytes]) -> str:
        """Return a reason when too few users submitted, too few holders confirmed, or a part is not decrypted."""
        if step is Step.SUBMIT:
            users = users_of(plan, arrived)
            return (
                ""
                if users >= plan.min_sum
                else f"{users} users submitted, the plan's floor is {plan.min_sum}"
            )
        if step is Step.CONFIRM:
            if 2 * len(arrived) <= len(plan.holders):
                return f"{len(arrived)} of {len(plan.holders)} key holders confirmed who submitted; it takes a majority"
            if self._told(plan) and _agreed(self._said(closed)) is None:
                names = ", ".join(plan.holders[plan.asked_of(one)[0]].device for one in sorted(arrived))
                return f"no majority of the key holders agrees on the pads of the sum: {names}"
            return ""
        undone = self._undone(plan, arrived)
        return f"{len(undone)} of {len(plan.holders)} parts were decrypted by nobody" if undone else ""

    def lacking(self, plan: SumPlan, present: Collection[int]) -> str:
        """Return a reason when too few users or no majority of key holders are present; empty otherwise."""
        users = users_of(plan, (member for member in present if member < len(plan.members)))
        if users < plan.min_sum:
            return f"{users} users are present, the plan's floor is {plan.min_sum}"
        there = {plan.asked_of(number)[0] for number in present if number >= len(plan.members)}
        if 2 * len(there) > len(plan.holders):
            return ""
        return f"{len(there)} of {len(plan.holders)} key holders are present; it takes a majority"

    # --- messages ----------------------------------------------------------------------------------------------------

    def pieces(
        self,
        plan: SumPlan,
        closed: Closed,
        step: Step,
        member: int,
        running: RunningSum | None = None,
        subject: Subject | None = None,
    ) -> Pieces:
        """Return a holder's briefing: the submitters for CONFIRM, part of the sum and confirmations for DECRYPT."""
        if step is Step.SUBMIT:
            return Pieces()
        listed = self._listed(plan, closed)
        if running is None:
            raise AssertionError("key holders are asked without a running sum")
        if step is Step.CONFIRM:
            ciphertexts = running.packing.ciphertexts(running.count) if self._told(plan) else 0
            shown = wire.Submitters(members=listed.members, places=listed.places, ciphertexts=ciphertexts)
            return Pieces([shown.SerializeToString()])
        total = self._total(plan, closed, running)
        part = plan.asked_of(member)[1]
        places = part_of(len(total.units), part, len(plan.holders))
        task = wire.DecryptionTask(
            members=listed.members,
            places=listed.places,
            confirmations=confirmations_in(closed),
            mode=total.mode,
            part=part,
            first=places.start,
            ciphertexts=ciphertexts_at(total, places),
        )
        return Pieces(own=task.SerializeToString())

    def vector(
        self,
        plan: SumPlan,
        closed: Closed,
        notes: Mapping[int, bytes],
        member: int,
        message: bytes,
        layout: Layout,
        sha256: bytes = b"",
    ) -> Vector:
        """Check a contribution without the secret key: it has all ciphertexts, each valid under the plan's key."""
        public = self.keys.of(plan)
        packing, users = packing_of(plan, public), plan.members[member].users
        sent = read_message(wire.SummedVector, Step.SUBMIT, message)
        left_out = self._left_out(plan, sent.places, layout, packing, users)
        try:
            found = from_bytes(
                sent.ciphertexts, public, packing, layout.size, addends=users, left_out=left_out
            )
        except (VerificationError, CryptoError) as error:
            raise Refusal(
                ErrorReason.ERROR_REASON_INVALID_FIELD,
                error.message,
                field="ciphertexts",
                expected="packed ciphertexts under the key of the plan",
            ) from None
        return Vector(found, (sha256 or hashlib.sha256(message).digest()) + sent.places)

    @staticmethod
    def _left_out(
        plan: SumPlan, places: bytes, layout: Layout, packing: Packing, users: int
    ) -> dict[int, mpz]:
        """Return the ciphertexts that a member left out, each with the plaintext of zeros that stands in for it."""
        if not plan.sparse_floor:
            if places:
                raise bad_message(Step.SUBMIT, "places of a vector that is not sparse", "none")
            return {}
        ciphertexts = packing.ciphertexts(layout.size)
        try:
            (sent,) = unpack_places(places, 1, ciphertexts)
        except ValueError as error:
            raise Refusal(
                ErrorReason.ERROR_REASON_INVALID_FIELD,
                str(error),
                field="places",
                expected=f"a bit for each of {ciphertexts} ciphertexts, and nothing beyond them",
            ) from None
        zeros = _zeros(layout, packing)
        return {place: users * zeros[place] for place in np.flatnonzero(~sent).tolist()}

    def check(self, plan: SumPlan, closed: Closed, step: Step, member: int, message: bytes) -> None:
        """Check a holder's confirmation, or the form of its decryption; `unmask` checks the decryption's proof."""
        if step is Step.CONFIRM:
            confirmation = read_message(wire.Confirmation, step, message)
            holder = plan.asked_of(member)[0]
            if confirmation.member != holder:
                raise bad_message(step, f"a confirmation of key holder {confirmation.member}", f"of {holder}")
            try:
                check_confirmation(plan, holder, confirmation, self._listed(plan, closed).hash)
            except VerificationError as error:
                raise Refusal(
                    ErrorReason.ERROR_REASON_BAD_SIGNATURE,
                    error.message,
                    field="signature",
                    expected="the key holder's own, of the present list",
                ) from None
            hashes = len(plan.holders) if self._told(plan) else 0
            if len(confirmation.pads) != hashes * HASH_BYTES:
                raise bad_message(
                    step,
                    f"{len(confirmation.pads)} bytes about pads",
                    f"{HASH_BYTES} bytes for each of {hashes} parts",
                )
            return
        if step is not Step.DECRYPT:
            raise bad_message(step, "an encrypted sum has no such message", "SUBMIT, CONFIRM or DECRYPT")
        decryption = read_message(wire.Decryption, step, message)
        size = self.keys.of(plan).modulus_bytes
        if len(decryption.plaintexts) % size or len(decryption.proof) != size:
            raise bad_message(step, "plaintexts or a proof of another length", f"{size} bytes each")
        if len(decryption.pads) != len(decryption.plaintexts):
            raise bad_message(step, "more or fewer pads than plaintexts", "one for each")

    # --- the end ---------------------------------------------------------------------------------------------------

    def unmask(self, plan: SumPlan, closed: Closed, running: RunningSum) -> Total:
        """Return the sum, after checking the proof of every decrypted part, and its pads.

        Raises
        ------
        Failed
            When a part has no correct decryption, with the respondents whose answers were wrong; or when the plaintexts
            are no sum of contributions.
        """
        total, public = self._total(plan, closed, running), self.keys.of(plan)
        agreed = _agreed(self._said(closed)) or b""
        values: dict[int, list[mpz]] = {}
        wrong = []
        for respondent, message in sorted(closed[Step.DECRYPT].items()):
            part = plan.asked_of(respondent)[1]
            places = part_of(len(total.units), part, len(plan.holders))
            decryption = wire.Decryption.FromString(message)
            found, own = (
                _numbers(content, public.modulus_bytes)
                for content in (decryption.plaintexts, decryption.pads)
            )
            units, shifts = (numbers[places.start : places.stop] for numbers in (total.units, total.shifts))
            expected = agreed[part * HASH_BYTES : (part + 1) * HASH_BYTES]
            try:
                check(public, proof_context(plan, places.start), units, shifts, found, decryption.proof)
            except VerificationError:
                wrong.append(respondent)
                continue
            # The proof says nothing of how much of a plaintext is pads.
            if sums_hash(plan.hash, places.start, own, public.modulus_bytes) != expected:
                wrong.append(respondent)
                continue
            values.setdefault(
                part, [(number - pad) % public.n for number, pad in zip(found, own, strict=True)]
            )
        if len(values) < len(plan.holders):
            raise Failed("what was decrypted is not what is in the sum", tuple(wrong))
        ordered = [number for part in sorted(values) for number in values[part]]
        try:
            codes = total.packing.unpack(ordered, total.count, total.addends)
        except VerificationError as error:
            # A contribution was malicious; every other holder would decrypt the same.
            raise Failed(error.message) from None
        dropped = len(self._listed(plan, closed).dropped)
        wrong += [one for one in self._against(plan, closed) if one not in wrong]
        return Total(codes.astype(np.uint32), tuple(sorted(wrong)), dropped_places=dropped)


class EncryptedMember:
    """A member's half of the encrypted sum; its only secrets of a round are the obfuscators of its ciphertexts.

    Parameters
    ----------
    plan : SumPlan
        As this member was shown it.
    index : int
        Position of this member in the plan.
    identity : Identity
        The member's keys; its agreement key gives the pads.
    obfuscators : Obfuscators
        Source of obfuscators for the key that this member accepts; each obfuscator is used once.
    layout : Layout, optional
        Layout of the contribution; a sparse sum needs it.
    """

    def __init__(
        self,
        plan: SumPlan,
        index: int,
        identity: Identity,
        obfuscators: Obfuscators,
        layout: Layout | None = None,
    ) -> None:
        self._plan = plan
        self._index = index
        self._identity = identity
        self._obfuscators = obfuscators
        self._layout = layout
        self._gone = False

    @property
    def submitters(self) -> Collection[int]:
        """No members: key holders confirm who submitted."""
        return ()

    def answer(self, step: Step, briefing: bytes, codes: NDArray[np.uint32] | None = None) -> bytes:
        """Return the encrypted contribution, the message of SUBMIT.

        Raises
        ------
        Declined
            When asked for another step, or the plan's key is not the one that this member accepts or has no room for
            the cohort.
        """
        plan, public = self._plan, self._obfuscators.public
        if step is not Step.SUBMIT or codes is None or self._gone:
            raise Declined(f"a member of an encrypted sum has nothing to say to step {step.value}")
        if plan.key_id != public.key_id:
            raise Declined(
                f"the plan's key is {plan.key_id.hex()[:16]}; accepted is {public.key_id.hex()[:16]}"
            )
        own = plan.members[self._index]
        try:
            packing = packing_of(plan, public)
            agreed = self._identity.agree(public.set_public)
            key = contributor_key(agreed, plan.run_id, public.key_id, own.participant)
            sent = self._sent(codes, packing, own.users)
            left_out = frozenset(np.flatnonzero(~sent).tolist())
            added = [
                mpz(0) if place in left_out else pad
                for place, pad in enumerate(pads(key, plan.hash, public, len(sent)))
            ]
            found = encrypt(codes, packing, self._obfuscators, pads=added, addends=own.users, plain=left_out)
        except CryptoError as error:
            raise Declined(error.message) from None
        return wire.SummedVector(
            ciphertexts=to_bytes(found, left_out),
            places=pack_places(sent) if plan.sparse_floor else b"",
        ).SerializeToString()

    def _sent(self, codes: NDArray[np.uint32], packing: Packing, users: int) -> NDArray[np.bool_]:
        """Return which ciphertexts are sent, bool (ciphertexts,)."""
        if not self._plan.sparse_floor:
            return np.ones(packing.ciphertexts(codes.size), np.bool_)
        if self._layout is None:
            raise Declined("is asked for a sparse contribution without its layout")
        return something(codes, self._layout.zeros(users), packing)

    def forget(self) -> None:
        """Refuse every further question: the round is over, or the member has left it."""
        self._gone = True


def confirmations_in(closed: Closed) -> list[wire.Confirmation]:
    """Return the holders' confirmations, by ascending position of the holder, without what they say of pads."""
    found = [wire.Confirmation.FromString(message) for _, message in sorted(closed[Step.CONFIRM].items())]
    for one in found:
        one.ClearField("pads")
    return found


def ciphertexts_at(total: EncryptedVector, places: range) -> bytes:
    """Serialise some of a sum's ciphertexts, unit and shift of each, for the tasks of holders."""
    size = total.public.modulus_bytes
    pairs = ((total.units[place], total.shifts[place]) for place in places)
    return b"".join(number.to_bytes(size, "big") for pair in pairs for number in pair)


def proof_context(plan: SumPlan, first: int) -> bytes:
    """Return the context of a proof of decryption, as bytes: plan, and position of the first ciphertext."""
    return encode("decryption", plan.hash, first)


def _agreed(said: Mapping[int, bytes]) -> bytes | None:
    """Return what more than half of the holders that answered said of the sums of pads; None without a majority."""
    most = Counter(said.values()).most_common(1)
    return most[0][0] if most and 2 * most[0][1] > len(said) else None


def _from(part: int, plan: SumPlan, present: Collection[int]) -> int:
    """Return the first present holder, counting round from the holder with the part's own number."""
    count = len(plan.holders)
    return next(holder for n in range(count) if (holder := (part + n) % count) in present)


def _numbers(content: bytes, size: int) -> list[mpz]:
    return [mpz.from_bytes(content[start : start + size], "big") for start in range(0, len(content), size)]


def read_message(kind: type[_MessageT], step: Step, message: bytes) -> _MessageT:
    """Parse a message of a step.

    Raises
    ------
    Refusal
        When the bytes are no message of this kind.
    """
    try:
        return kind.FromString(message)
    except DecodeError:
        name = kind.DESCRIPTOR.name
        raise bad_message(step, f"the payload is no {name}", f"a serialised {name}") from None
