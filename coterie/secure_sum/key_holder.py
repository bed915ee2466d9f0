"""A key holder's half of an encrypted sum: the checks that it makes before it decrypts a part, and the decryption.

The server, like anybody with the public key, can derive other ciphertexts from those it has, and it forms the sum.  So
a holder decrypts a part of a sum only when

1. it has signed one list of submitters for this plan, each of them enrolled and not revoked, enough of them, and a
   majority of all who hold the key, by the key's record, signed the same list;
2. without the sum of the pads of exactly these submitters for this plan, every plaintext fills no more than the slots
   (``coterie.crypto.paillier.pads``);
3. in a sparse sum, the list says over which members each ciphertext is summed, and these are enough members and users;
   a ciphertext that no member sent is in the open.

So there is one sum for each plan, over a set that most holders saw, and nothing else is decrypted: no single
contribution, none counted twice or multiplied, none of another round or place.  The signed list is on disk before the
signature leaves (``coterie.rounds.holder_round``).

The proof of decryption is about plaintexts with pads, so the server is told both.  For it to see that no holder moved
an amount from one to the other, each holder sends hashes of the sums of pads with its signature.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
from gmpy2 import mpz
from google.protobuf.message import DecodeError, Message
from numpy.typing import NDArray

from coterie.crypto.identity import Bundle, Identity
from coterie.crypto.paillier import Mode, SecretKey
from coterie.crypto.paillier.decryption import decrypt
from coterie.crypto.paillier.pads import contributor_key, pad_sums, sums_hash
from coterie.crypto.paillier.proof import prove
from coterie.crypto.verification import VerificationError
from coterie.errors import CryptoError
from coterie.secure_sum.encrypted import check_confirmation, packing_of, part_of, proof_context
from coterie.secure_sum.plan import SumPlan
from coterie.secure_sum.protocol import Confirmed, Declined
from coterie.secure_sum.sparse import FEWEST_MEMBERS, covered, unpack_places
from coterie.secure_sum.statements import CONFIRM, ascending, list_hash
from coterie.wire.v1 import rounds_pb2 as wire

__all__ = ["MOST_CIPHERTEXTS", "HeldSecrets", "KeyHolder", "read_briefing"]

_MessageT = TypeVar("_MessageT", bound=Message)

MOST_CIPHERTEXTS = 1 << 17
"""Most ciphertexts of a sum for which a holder computes pads: those of more than ten million values."""


class HeldSecrets(Protocol):
    """The secrets of one Paillier key, as a key holder has them."""

    @property
    def secret(self) -> SecretKey:
        """The secret Paillier key."""
        ...

    def agree(self, public: bytes) -> bytes:
        """Return the X25519 agreement of the set key, which all holders share, and a public key, 32 bytes."""
        ...


class Decrypted(NamedTuple):
    """Checked and decrypted ciphertexts of a sum.

    Parameters
    ----------
    units, shifts : list of mpz
        The ciphertexts.
    plaintexts, pads, values : list of mpz
        Plaintexts, the sums of pads in them, and what is left without these: sums of packed codes.
    """

    units: list[mpz]
    shifts: list[mpz]
    plaintexts: list[mpz]
    pads: list[mpz]
    values: list[mpz]


class KeyHolder:
    """A key holder's half of one encrypted sum: signs the list of submitters, then decrypts a part.

    Parameters
    ----------
    plan : SumPlan
        As this holder was shown it.
    holder : int
        Position of this holder among the plan's holders.
    identity : Identity
        The holder's keys; they sign the list.
    held : HeldSecrets
        Secrets of the plan's key.
    holders : sequence of bytes
        Participants that hold the key, by its record: the plan may leave out some, and add none.
    bundles : mapping of bytes to Bundle
        Verified keys of contributors that are enrolled and not revoked, by participant.
    known : dict of bytes to bytes, optional
        Cache of contributors' pad keys, by participant; good for all sums under the same Paillier key.

    Raises
    ------
    Declined
        When the plan names another key than the one held, another holder in this position, or somebody who does not
        hold the key.
    """

    def __init__(
        self,
        plan: SumPlan,
        holder: int,
        identity: Identity,
        held: HeldSecrets,
        holders: Sequence[bytes],
        bundles: Mapping[bytes, Bundle],
        known: dict[bytes, bytes] | None = None,
    ) -> None:
        if plan.key_id != held.secret.public.key_id:
            raise Declined(f"the plan's key {plan.key_id.hex()[:16]} is not the one held")
        if plan.holders[holder].participant != identity.participant_id:
            raise Declined("the plan has another key holder in this position")
        if not {one.participant for one in plan.holders} <= set(holders):
            raise Declined("the plan names somebody as a key holder whom the key's record does not")
        self._plan = plan
        self._holder = holder
        self._identity = identity
        self._held = held
        self._holders = len(set(holders))
        self._bundles = bundles
        self._known = {} if known is None else known
        # Hash of a list, and the sums of its pads.
        self._summed: tuple[bytes, list[mpz]] = (b"", [])

    def confirm(self, briefing: bytes) -> Confirmed:
        """Check a list of submitters; return a signed confirmation of it.

        Parameters
        ----------
        briefing : bytes
            A serialised ``Submitters``.

        Raises
        ------
        Declined
            When the list is malformed, covers too few users, or names members that are not enrolled or are revoked; or
            when the sum is said to have more ciphertexts than one has.
        """
        shown = read_briefing(wire.Submitters, briefing)
        agreed, sent = self._require_set(shown.members, shown.places)
        confirmation = wire.Confirmation(
            member=self._holder,
            signature=self._identity.sign(CONFIRM, self._plan.hash, agreed),
            signing_public=self._identity.signing_public,
            pads=self._pad_hashes(agreed, shown.members, sent, shown.ciphertexts),
        )
        members, places = tuple(shown.members), shown.places
        return Confirmed(confirmation.SerializeToString(), agreed, members, places)

    def decrypt(self, briefing: bytes, agreed: bytes) -> bytes:
        """Decrypt a part of the sum over the list that this holder signed; return it with a proof, for DECRYPT.

        Parameters
        ----------
        briefing : bytes
            A serialised ``DecryptionTask``.
        agreed : bytes
            Hash of the list that this holder signed.

        Raises
        ------
        Declined
            When the task names another list, no majority signed the list, or a ciphertext is not the sum over it.
        """
        task = read_briefing(wire.DecryptionTask, briefing)
        found = self._decrypted(task, agreed, task.first)
        secret = self._held.secret
        context = proof_context(self._plan, task.first)
        proof = prove(secret, context, found.units, found.shifts, found.plaintexts)
        size = secret.public.modulus_bytes
        plaintexts, pads = (
            b"".join(number.to_bytes(size, "big") for number in numbers)
            for numbers in (found.plaintexts, found.pads)
        )
        return wire.Decryption(
            part=task.part, plaintexts=plaintexts, proof=proof, pads=pads
        ).SerializeToString()

    def _decrypted(self, task: wire.DecryptionTask | wire.ApplyTask, agreed: bytes, first: int) -> Decrypted:
        """Check a task and decrypt it.

        ``first`` is the position of the task's first ciphertext in the sum.

        Raises
        ------
        Declined
            When a check of `decrypt` fails.
        """
        plan, secret = self._plan, self._held.secret
        hashed, sent = self._require_set(task.members, task.places)
        if hashed != agreed:
            raise Declined("is asked to decrypt a sum over others than it confirmed")
        self._require_majority(task.confirmations, agreed)
        try:
            packing = packing_of(plan, secret.public)
            units, shifts = self._ciphertexts(task.ciphertexts)
            plaintexts = decrypt(secret, units, shifts, Mode(task.mode))
        except (CryptoError, VerificationError) as error:
            raise Declined(error.message) from None
        except ValueError:
            raise Declined(f"is asked to decrypt ciphertexts of an unknown mode {task.mode}") from None
        end = first + len(plaintexts)
        if sent is not None:
            self._require_known(units, sent[:, first:end])
        pads = self._pads(agreed, task.members, sent, end)[first:end]
        n = secret.public.n
        values = [(number - pad) % n for number, pad in zip(plaintexts, pads, strict=True)]
        if not packing.fits(values):
            raise Declined("is asked to decrypt what is not the sum over those that it confirmed")
        return Decrypted(units, shifts, plaintexts, pads, values)

    def _pads(
        self, agreed: bytes, members: Sequence[int], sent: NDArray[np.bool_] | None, count: int
    ) -> list[mpz]:
        """Return the sums of the pads in the first ciphertexts of the sum over a list with this hash.

        Raises
        ------
        Declined
            When these are more ciphertexts than a sum, or a sparse list, has.
        """
        most = MOST_CIPHERTEXTS if sent is None else min(MOST_CIPHERTEXTS, sent.shape[1])
        if count > most:
            raise Declined(f"is told of {count} ciphertexts, and the sum has {most} at most")
        hashed, found = self._summed
        if hashed != agreed or len(found) < count:
            plan = self._plan
            keys = (self._pad_key(plan.members[member].participant) for member in members)
            there = None if sent is None else sent[:, :count]
            found = pad_sums(keys, plan.hash, self._held.secret.public, count, there)
            self._summed = agreed, found
        return found[:count]

    def _pad_hashes(
        self, agreed: bytes, members: Sequence[int], sent: NDArray[np.bool_] | None, count: int
    ) -> bytes:
        """Return the hash of the sums of pads of each part, one after the other; nothing of no ciphertexts."""
        if not count:
            return b""
        sums, parts = self._pads(agreed, members, sent, count), len(self._plan.holders)
        size, found = self._held.secret.public.modulus_bytes, []
        for part in range(parts):
            places = part_of(count, part, parts)
            own = sums[places.start : places.stop]
            found.append(sums_hash(self._plan.hash, places.start, own, size))
        return b"".join(found)

    def _require_set(self, members: Sequence[int], places: bytes) -> tuple[bytes, NDArray[np.bool_] | None]:
        """Check a list; return its hash and, if sparse, who sent what, bool (members, ciphertexts or a few more)."""
        plan = self._plan
        if not members or not ascending(members, len(plan.members)):
            raise Declined("the list of submitters does not ascend within the cohort")
        users = sum(plan.members[member].users for member in members)
        if users < plan.min_sum:
            raise Declined(f"{users} users submitted, the plan's floor is {plan.min_sum}")
        strangers = sum(plan.members[member].participant not in self._bundles for member in members)
        if strangers:
            raise Declined(f"{strangers} of those that submitted are not enrolled, or revoked")
        for one in (plan.members[member] for member in members):
            enrolled_by = self._bundles[one.participant].party
            if enrolled_by != one.device:
                raise Declined(f"a participant of {enrolled_by!r} submitted as one of {one.device!r}")
        return list_hash(members, places), self._require_places(members, places)

    def _require_places(self, members: Sequence[int], places: bytes) -> NDArray[np.bool_] | None:
        """Require that each ciphertext that any member sent covers enough members and users."""
        plan = self._plan
        if not plan.sparse_floor:
            if places:
                raise Declined("is told what members of a sum sent that is not sparse")
            return None
        try:
            sent = unpack_places(places, len(members))
        except ValueError as error:
            raise Declined(str(error)) from None
        short = int(np.count_nonzero(sent.any(axis=0) & ~covered(plan, members, sent)))
        if short:
            raise Declined(
                f"{short} ciphertexts are of too few, the floor of the plan is {plan.sparse_floor} users, of at least "
                f"{FEWEST_MEMBERS} members"
            )
        return sent

    def _require_known(self, units: Sequence[mpz], sent: NDArray[np.bool_]) -> None:
        """Require that ciphertexts that no member sent are in the open: decrypting them tells the server nothing."""
        if sent.shape[1] < len(units):
            raise Declined("is asked to decrypt ciphertexts that the list does not have")
        nobodys = np.flatnonzero(~sent.any(axis=0)).tolist()
        if any(units[place] != 1 for place in nobodys):
            raise Declined("is asked to decrypt a ciphertext that nobody in the list sent")

    def _require_majority(self, confirmations: Sequence[wire.Confirmation], agreed: bytes) -> None:
        plan, signed = self._plan, set()
        for confirmation in confirmations:
            if confirmation.member >= len(plan.holders):
                raise Declined("a confirmation is of nobody who holds the key")
            try:
                check_confirmation(plan, confirmation.member, confirmation, agreed)
            except VerificationError as error:
                raise Declined(error.message) from None
            signed.add(confirmation.member)
        if 2 * len(signed) <= self._holders:
            raise Declined(
                f"{len(signed)} of {self._holders} key holders confirmed the list; it takes a majority"
            )

    def _ciphertexts(self, content: bytes) -> tuple[list[mpz], list[mpz]]:
        public = self._held.secret.public
        size = public.modulus_bytes
        # A part is empty when there are fewer ciphertexts than holders.
        if len(content) % (2 * size):
            raise Declined("is asked to decrypt what are no whole ciphertexts")
        numbers = [mpz.from_bytes(content[at : at + size], "big") for at in range(0, len(content), size)]
        if not all(number < public.n for number in numbers):
            raise Declined("is asked to decrypt ciphertexts that are out of range")
        return numbers[::2], numbers[1::2]

    def _pad_key(self, participant: bytes) -> bytes:
        found = self._known.get(participant)
        if found is None:
            plan = self._plan
            agreed = self._held.agree(self._bundles[participant].agreement_public)
            found = contributor_key(agreed, plan.run_id, plan.key_id, participant)
            self._known[participant] = found
        return found


def read_briefing(kind: type[_MessageT], briefing: bytes) -> _MessageT:
    """Parse the briefing of a key holder.

    Raises
    ------
    Declined
        When the bytes are no message of this kind.
    """
    try:
        return kind.FromString(briefing)
    except DecodeError:
        raise Declined(f"was told what is no {kind.DESCRIPTOR.name}") from None
