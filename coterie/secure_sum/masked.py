"""The masked sum: Bonawitz et al. (2017) on the graph of Bell et al. (2020), with a confirmed list of submitters.

The orchestration server learns the sum over the members that submitted; each single contribution looks uniformly
random to it.  Every member masks its codes with a mask of its own and one for each neighbour, which the neighbour
subtracts.  After the close, neighbours reveal for each member either shares of the seed of its own mask (if it
submitted) or shares of the secret behind its pairwise masks (if it did not), never both.

The server's half here holds no secret and no state: it is a function of the plan and of the messages of closed steps.
Values derived from a closed step are remembered with it (`ClosedSteps`).
"""

from __future__ import annotations

import hashlib
import math
from array import array
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import combinations
from typing import NamedTuple, TypeVar

import numpy as np
from google.protobuf.message import DecodeError, Message
from numpy.typing import NDArray

from coterie.crypto import clocks, masking, shamir
from coterie.crypto.explicit import encode
from coterie.crypto.identity import check_signature
from coterie.crypto.verification import Reason, VerificationError
from coterie.crypto.verified import Verified
from coterie.secure_sum.bundles import bundle_from_wire
from coterie.secure_sum.chains import chained_bytes
from coterie.secure_sum.codes import CodesSum, codes_of
from coterie.secure_sum.contribution import Layout
from coterie.secure_sum.graph import GraphFields, arranged, graph_fields
from coterie.secure_sum.masked_member import MaskedMember
from coterie.secure_sum.plan import SumPlan
from coterie.secure_sum.protocol import (
    Closed,
    ClosedSteps,
    Failed,
    Pieces,
    PlanFields,
    Running,
    Step,
    Subject,
    Total,
    Vector,
    bad_message,
    once,
    parts_of,
    users_of,
)
from coterie.secure_sum.repeats import MARK_BYTES, mark_of
from coterie.secure_sum.statements import (
    ADVERT,
    CONFIRM,
    SUBMIT,
    ascending,
    codes_hash,
    list_hash,
    pack_positions,
    unpack_positions,
)
from coterie.wire.refusal import ErrorReason, Refusal
from coterie.wire.v1 import rounds_pb2 as wire

__all__ = ["MaskedMember", "MaskedServer"]

_DIGEST = 32
_MOST_ADVERT_BYTES = 1024
_TRIES = 500
"""Most subsets of shares that are tried for one secret."""

_Near = tuple[tuple[int, ...], ...]
_MessageT = TypeVar("_MessageT", bound=Message)
_Derived = TypeVar("_Derived")


class _Keys(NamedTuple):
    """A member's two public keys that the server needs after ADVERTISE, raw, 32 bytes each."""

    signing: bytes
    mask: bytes


class _Secret(NamedTuple):
    """A secret to be reconstructed: its owner, its kind, the revealed shares by holder, and a check of the result."""

    member: int
    kind: str
    holders: Sequence[int]
    share: Callable[[int], int]
    fits: Callable[[bytes], bool]


class MaskedServer(CodesSum):
    """The orchestration server's half of the masked sum.

    Parameters
    ----------
    rule : callable, optional
        Gives degree and threshold for a number of members; by default ``graph_fields`` with its default assumptions.
    directory_key : bytes, optional
        Raw Ed25519 public key of the directory, 32 bytes.  If it is given, the server checks bundles in
        advertisements too, so that one bad bundle does not make its neighbours leave.
    clock : callable, optional
        Gives Unix seconds, for the validity of bundles.
    """

    name = "masked"
    steps: tuple[Step, ...] = (Step.ADVERTISE, Step.SHARE, Step.SUBMIT, Step.CONFIRM, Step.UNMASK)
    binding: Step | None = Step.UNMASK
    compares_notes = True

    def __init__(
        self,
        rule: Callable[[int], GraphFields] = graph_fields,
        directory_key: bytes | None = None,
        clock: Callable[[], float] = clocks.now_s,
    ) -> None:
        self._rule = rule
        self._directory_key = directory_key
        self._clock = clock
        self._verified = Verified()

    def plan_fields(self, members: int, layout: Layout) -> PlanFields:
        """Return degree and threshold of the graph for ``members`` members.

        Raises
        ------
        Failed
            For fewer than two members.
        """
        degree, threshold = self._rule(members)
        return PlanFields(degree, threshold)

    def expected(self, plan: SumPlan, closed: Closed, step: Step) -> tuple[int, ...]:
        """Return the members that a step asks, ascending: those of the step before that have enough neighbours."""
        if step is Step.ADVERTISE:
            return tuple(range(len(plan.members)))
        before = self.steps[self.steps.index(step) - 1]
        return self._of(closed, before, "expected", lambda there: tuple(self._viable(plan, closed, there)))

    def pieces(
        self,
        plan: SumPlan,
        closed: Closed,
        step: Step,
        member: int,
        running: Running | None = None,
        subject: Subject | None = None,
    ) -> Pieces:
        """Return a member's briefing for a step; each advertisement or confirmation is one piece, shared by members."""
        match step:
            case Step.ADVERTISE:
                return Pieces()
            case Step.SHARE:
                adverts = self._of(closed, Step.ADVERTISE, "written adverts", _written_adverts)
                return Pieces([adverts[each] for each in self._met(plan, closed)[member]])
            case Step.SUBMIT:
                return Pieces(own=self._inbox(plan, closed, member).SerializeToString())
            case Step.CONFIRM:
                return Pieces([self._of(closed, Step.SUBMIT, "submitters", _written_submitters)])
            case _:
                signed = self._of(closed, Step.CONFIRM, "confirmations", _written_confirmations)
                near = self._kept(plan, closed, member)
                return Pieces([signed[each] for each in near if each in signed])

    def check(self, plan: SumPlan, closed: Closed, step: Step, member: int, message: bytes) -> None:
        """Check a message of any step but SUBMIT."""
        try:
            match step:
                case Step.ADVERTISE:
                    self._check_advert(plan, member, message)
                case Step.SHARE:
                    self._check_shares(plan, closed, member, message)
                case Step.CONFIRM:
                    self._check_confirmation(plan, closed, member, message)
                case Step.UNMASK:
                    self._check_unmasking(plan, closed, member, message)
                case _:
                    raise bad_message(
                        step, "a masked sum has no such message", "a message of its other steps"
                    )
        except VerificationError as error:
            raise Refusal(
                ErrorReason.ERROR_REASON_BAD_SIGNATURE,
                error.message,
                field=step.value,
                expected="what the member's own keys sign and agree on",
            ) from None

    def vector(
        self,
        plan: SumPlan,
        closed: Closed,
        notes: Mapping[int, bytes],
        member: int,
        message: bytes,
        layout: Layout,
    ) -> Vector:
        """Check a contribution: its length, signature, and the neighbours that it was masked with.

        Two members must agree on whether there is a mask between them.  The first of them to submit decides: a later
        vector is refused when it leaves out the mask that the first one has, or has the mask that the first one left
        out.
        """
        if member not in closed[Step.SHARE]:
            raise bad_message(Step.SUBMIT, f"member {member} did not share", "a member that did")
        vector, codes = codes_of(message, layout.size)
        near = self._sharing(plan, closed, member)
        left_out = tuple(vector.left_out)
        if not ascending(left_out, len(plan.members)) or not set(left_out) <= set(near):
            raise bad_message(
                Step.SUBMIT, "left_out is no ascending list of neighbours", "neighbours that sent shares"
            )
        if len(near) - len(left_out) < plan.threshold:
            raise Refusal(
                ErrorReason.ERROR_REASON_BELOW_FLOOR,
                f"a contribution masked with {len(near) - len(left_out)} neighbours",
                field="left_out",
                expected=f"at least {plan.threshold}",
            )
        self._require_agreement(notes, member, near, left_out)
        try:
            _check_signature(
                "the contribution",
                self._keys(plan, closed)[member].signing,
                vector.signature,
                SUBMIT,
                plan.hash,
                codes_hash(codes.astype("<u4", copy=False).data),
            )
        except VerificationError as error:
            raise Refusal(
                ErrorReason.ERROR_REASON_BAD_SIGNATURE,
                error.message,
                field="signature",
                expected="the member's own",
            ) from None
        return Vector(codes, mark_of(message) + pack_positions(left_out))

    def shortfall(self, plan: SumPlan, closed: Closed, step: Step, arrived: Mapping[int, bytes]) -> str:
        """Return a reason when a step cannot be closed: too few users, or masks that too few neighbours could undo."""
        if step in (Step.ADVERTISE, Step.SHARE):
            users = sum(plan.members[member].users for member in self._viable(plan, closed, arrived))
            if users >= plan.min_sum:
                return ""
            return _below(plan, f"{users} users have enough neighbours left", len(arrived))
        if step is Step.SUBMIT:
            users = users_of(plan, arrived)
            if users < plan.min_sum:
                return f"{users} users submitted, the plan's floor is {plan.min_sum}"
            closed = closed if step in closed else ClosedSteps(closed).with_step(step, arrived)
        # A member that has too few confirmations reveals nothing.
        answering = set(self._viable(plan, closed, arrived)) if step is Step.CONFIRM else set(arrived)
        short = [
            secret
            for secret in self._secrets(plan, closed)
            if len(answering.intersection(self._holders(plan, closed, secret))) < plan.threshold
        ]
        if not short:
            return ""
        return (
            f"{len(short)} members have fewer than {plan.threshold} neighbours left that could undo their masks, "
            f"among them member {short[0]}"
        )

    def lacking(self, plan: SumPlan, present: Collection[int]) -> str:
        """Return a reason when those present with enough neighbours present cover too few users; empty otherwise."""
        users = users_of(plan, self._viable(plan, {}, present))
        if users >= plan.min_sum:
            return ""
        return _below(
            plan, f"{users} users are present with {plan.threshold} neighbours of theirs", len(present)
        )

    def unmask(self, plan: SumPlan, closed: Closed, running: NDArray[np.uint32]) -> Total:
        """Return the sum of the submitters' codes, after the last step.

        Each secret is reconstructed from exactly ``t`` shares and checked against its owner's commitment.  On a
        mismatch other subsets are tried, and holders whose shares do not lie on the right polynomial are named as wrong
        (also where the secret's owner dealt a wrong share: the two cannot be told apart).  The method takes no lock and
        shares no state: call it in a thread.
        """
        wrong: set[int] = set()
        plus: list[bytes] = []
        minus: list[bytes] = []
        keys = self._keys(plan, closed)
        submitted = closed[Step.SUBMIT]
        # In a complete graph the first shares of all secrets come from these members, less each secret's owner.
        pool = tuple(sorted(closed[Step.UNMASK]))[: plan.threshold + 1]
        for secret in self._revealed(plan, closed):
            value = _reconstruct(plan, secret, pool, wrong)
            own = plan.members[secret.member].participant
            if secret.kind == "seed":
                minus.append(masking.own_mask_key(value, plan.hash, own))
                continue
            key = masking.RoundKey(value)
            for peer in self._holders(plan, closed, secret.member):
                if peer not in submitted:
                    continue
                other = plan.members[peer].participant
                agreed = key.agree(keys[peer].mask)
                # A mask that the peer added is subtracted here, and one that it subtracted is added.
                (minus if other < own else plus).append(masking.pair_mask_key(agreed, plan.hash, own, other))
            key.wipe()
        codes = running.copy()
        masking.add_masks(codes, plus, minus)
        return Total(codes, tuple(sorted(wrong)))

    # --- what closed steps say ---------------------------------------------------------------------------------------

    @staticmethod
    def _of(
        closed: Closed,
        step: Step,
        what: str,
        make: Callable[[Mapping[int, bytes]], _Derived],
    ) -> _Derived:
        """Return what ``make`` computes from a closed step's messages; computed once if ``closed`` can remember it."""
        return once(closed, (step, what), lambda: make(closed[step]))

    @staticmethod
    def _near(plan: SumPlan, closed: Closed) -> _Near:
        """Return each member's neighbours, ascending."""
        return once(closed, "near", lambda: arranged(plan.graph_seed, len(plan.members), plan.degree))

    def _viable(self, plan: SumPlan, closed: Closed, there: Collection[int]) -> Iterator[int]:
        """Yield the members in ``there``, ascending, that have enough neighbours in it."""
        near = self._near(plan, closed)
        for member in sorted(there):
            if sum(1 for each in near[member] if each in there) >= plan.threshold:
                yield member

    def _within(self, plan: SumPlan, closed: Closed, there: Collection[int]) -> dict[int, tuple[int, ...]]:
        """Return for each member in ``there`` its neighbours in it, ascending."""
        near = self._near(plan, closed)
        if len(there) == len(plan.members):
            return dict(enumerate(near))
        return {member: tuple(each for each in near[member] if each in there) for member in there}

    def _keys(self, plan: SumPlan, closed: Closed) -> dict[int, _Keys]:
        return self._of(closed, Step.ADVERTISE, "keys", _advertised_keys)

    def _met(self, plan: SumPlan, closed: Closed) -> dict[int, tuple[int, ...]]:
        """Return for each member that advertised those of its neighbours that advertised too."""
        return self._of(closed, Step.ADVERTISE, "met", lambda there: self._within(plan, closed, there))

    def _sealed(self, plan: SumPlan, closed: Closed) -> dict[int, array[int]]:
        """Return the offsets of the sealed shares in each member's message, in order."""
        return self._of(closed, Step.SHARE, "sealed", _sealed_shares)

    def _sharing(self, plan: SumPlan, closed: Closed, member: int) -> tuple[int, ...]:
        """Return the neighbours of a member that shared."""
        return self._of(closed, Step.SHARE, "sharing", lambda there: self._within(plan, closed, there))[
            member
        ]

    def _left_out(self, plan: SumPlan, closed: Closed) -> dict[int, frozenset[int]]:
        # Offsets of sealed shares are needed no more once SUBMIT is closed.
        if isinstance(closed, ClosedSteps):
            closed.forget((Step.SHARE, "sealed"))
        return self._of(
            closed,
            Step.SUBMIT,
            "left_out",
            lambda notes: {member: frozenset(_noted(note)) for member, note in notes.items()},
        )

    def _kept(self, plan: SumPlan, closed: Closed, member: int) -> tuple[int, ...]:
        """Return the neighbours with whom a submitter has masks, ascending; the submitter holds their shares."""
        left_out = self._left_out(plan, closed)[member]
        near = self._sharing(plan, closed, member)
        return tuple(each for each in near if each not in left_out) if left_out else near

    def _inbox(self, plan: SumPlan, closed: Closed, member: int) -> wire.ShareInbox:
        # Sealed shares take most of a round's memory, so they are read from the messages and not copied.
        met, sealed, part = self._met(plan, closed), self._sealed(plan, closed), parts_of(closed[Step.SHARE])
        inbox = wire.ShareInbox()
        for sender in self._sharing(plan, closed, member):
            at = sealed[sender][bisect_left(met[sender], member)]
            inbox.shares.add(member=sender, sealed=part(sender, at, at + masking.SEALED_SHARE_BYTES))
        return inbox

    def _secrets(self, plan: SumPlan, closed: Closed) -> Iterator[int]:
        """Yield the members whose secrets must be reconstructed: submitters, then missing ones with pairwise masks."""
        submitted = closed[Step.SUBMIT]
        yield from sorted(submitted)
        for member in sorted(closed[Step.SHARE].keys() - submitted.keys()):
            if any(True for _ in self._holders(plan, closed, member)):
                yield member

    def _holders(self, plan: SumPlan, closed: Closed, member: int) -> Iterator[int]:
        """Yield the submitters that hold shares of a member's secrets, ascending: those that masked with the member."""
        left_out = self._left_out(plan, closed)
        for near in self._sharing(plan, closed, member):
            if near in left_out and member not in left_out[near]:
                yield near

    def _revealed(self, plan: SumPlan, closed: Closed) -> Iterator[_Secret]:
        """Yield the secrets to be reconstructed, with what UNMASK revealed of each."""
        revealed = {holder: _revealed_shares(message) for holder, message in closed[Step.UNMASK].items()}
        part = parts_of(closed[Step.UNMASK])
        submitted, keys = closed[Step.SUBMIT], self._keys(plan, closed)
        kept = {holder: self._kept(plan, closed, holder) for holder in revealed}
        committed = self._of(closed, Step.SHARE, "seed hashes", _seed_hashes)

        def share(member: int, holder: int) -> int:
            # Read each share only when needed: all shares at once would take much memory.
            at = revealed[holder][bisect_left(kept[holder], member)]
            return masking.share_from_bytes(part(holder, at, at + masking.SHARE_BYTES))

        for member in self._secrets(plan, closed):
            holders = [holder for holder in self._holders(plan, closed, member) if holder in revealed]
            if member in submitted:
                fits = _hashes_to(plan.hash, committed[member])
            else:
                fits = _has_public(keys[member].mask)
            kind = "seed" if member in submitted else "mask"
            yield _Secret(member, kind, holders, partial(share, member), fits)

    # --- what messages must be ---------------------------------------------------------------------------------------

    def _check_advert(self, plan: SumPlan, member: int, message: bytes) -> None:
        advert = _read(wire.Advert, Step.ADVERTISE, message)
        if len(message) > _MOST_ADVERT_BYTES:
            raise bad_message(
                Step.ADVERTISE,
                f"an advertisement of {len(message)} bytes",
                f"at most {_MOST_ADVERT_BYTES} bytes",
            )
        bundle = bundle_from_wire(advert.bundle)
        if advert.member != member or bundle.participant_id != plan.members[member].participant:
            raise bad_message(
                Step.ADVERTISE, f"an advertisement of another than member {member}", "the member's own keys"
            )
        if self._directory_key is not None:
            self._verified.bundle(bundle, self._directory_key, int(self._clock()))
            bundle.require_party(plan.members[member].device)
        if advert.channel_public == advert.mask_public:
            raise bad_message(Step.ADVERTISE, "one key for two purposes", "two keys")
        if len(advert.chained) not in (0, chained_bytes(plan.degree)):
            raise bad_message(
                Step.ADVERTISE,
                f"{len(advert.chained)} bytes of bits for neighbours",
                f"none, or {chained_bytes(plan.degree)} bytes",
            )
        # Reject keys on which no agreement is possible: the neighbours would leave over them.
        for public in (advert.channel_public, advert.mask_public):
            masking.require_usable(public)
        _check_signature(
            "the advertisement",
            bundle.signing_public,
            advert.signature,
            ADVERT,
            plan.hash,
            advert.channel_public,
            advert.mask_public,
            *((advert.chained,) if advert.chained else ()),
        )

    def _check_shares(self, plan: SumPlan, closed: Closed, member: int, message: bytes) -> None:
        shares = _read(wire.Shares, Step.SHARE, message)
        met = self._met(plan, closed)[member]
        if tuple(share.member for share in shares.shares) != met:
            raise bad_message(
                Step.SHARE,
                f"shares of member {member} for others than its neighbours",
                f"{len(met)} neighbours",
            )
        if any(len(share.sealed) != masking.SEALED_SHARE_BYTES for share in shares.shares):
            raise bad_message(
                Step.SHARE, "a sealed share of another length", f"{masking.SEALED_SHARE_BYTES} bytes each"
            )
        if len(shares.seed_hash) != _DIGEST:
            raise bad_message(Step.SHARE, "no hash of the seed", f"{_DIGEST} bytes")

    def _check_confirmation(self, plan: SumPlan, closed: Closed, member: int, message: bytes) -> None:
        confirmation = _read(wire.Confirmation, Step.CONFIRM, message)
        if confirmation.member != member:
            raise bad_message(Step.CONFIRM, f"a confirmation of another than member {member}", "its own")
        agreed = self._of(closed, Step.SUBMIT, "list hash", lambda notes: list_hash(sorted(notes)))
        _check_signature(
            "the confirmation",
            self._keys(plan, closed)[member].signing,
            confirmation.signature,
            CONFIRM,
            plan.hash,
            agreed,
        )

    def _check_unmasking(self, plan: SumPlan, closed: Closed, member: int, message: bytes) -> None:
        unmasking = _read(wire.Unmasking, Step.UNMASK, message)
        expected = self._kept(plan, closed, member)
        if tuple(share.member for share in unmasking.shares) != expected:
            raise bad_message(
                Step.UNMASK,
                f"what member {member} reveals is not about its neighbours",
                f"{len(expected)} shares",
            )
        submitted = closed[Step.SUBMIT]
        for share in unmasking.shares:
            due = "seed" if share.member in submitted else "mask"
            if share.WhichOneof("share") != due:
                raise bad_message(
                    Step.UNMASK, f"another share of member {share.member}", f"that of its {due}"
                )
            masking.share_from_bytes(share.seed if due == "seed" else share.mask)

    def _require_agreement(
        self, notes: Mapping[int, bytes], member: int, near: Iterable[int], left_out: Collection[int]
    ) -> None:
        leaving = set(left_out)
        for other in near:
            note = notes.get(other)
            if note is None:
                continue
            left_by_other = len(note) > MARK_BYTES and member in _noted(note)
            if left_by_other != (other in leaving):
                raise Refusal(
                    ErrorReason.ERROR_REASON_CONFLICT,
                    f"members {member} and {other} do not agree on whether there is a mask between them, "
                    f"and member {other} was first",
                    field="left_out",
                    expected="the neighbours on which both agree",
                )


def _below(plan: SumPlan, covered: str, there: int) -> str:
    """Return why a sum cannot be formed: users that are covered, the floor, members missing, and how many may be."""
    members, spare = len(plan.members), plan.degree - plan.threshold
    why = f"{covered}, the plan's floor is {plan.min_sum}"
    if there == members:
        return why
    missing = f"{members - there} of {members} members {'is' if members - there == 1 else 'are'} missing"
    near = f"{plan.degree} neighbour{'' if plan.degree == 1 else 's'}"
    return f"{why}; {missing}, and masks bear the loss of {spare} of a member's {near}"


def _check_signature(
    what: str, signing_public: bytes, signature: bytes, purpose: str, *fields: bytes
) -> None:
    # Members remember checked signatures; the server does not, as each one of a round's thousands comes once.
    check_signature(signing_public, signature, encode(purpose, *fields), what, Reason.BAD_SIGNATURE)


def _hashes_to(plan_hash: bytes, committed: bytes) -> Callable[[bytes], bool]:
    return lambda seed: masking.seed_hash(plan_hash, seed) == committed


def _has_public(public: bytes) -> Callable[[bytes], bool]:
    return lambda secret: masking.public_of(secret) == public


def _reconstruct(plan: SumPlan, secret: _Secret, pool: tuple[int, ...], wrong: set[int]) -> bytes:
    """Reconstruct a secret; add to ``wrong`` the holders whose shares were found not to fit.

    Raises
    ------
    Failed
        When too few shares were revealed, or no subset that was tried gives the secret.
    """
    # Use the shares of holders found wrong before last.
    holders = sorted(secret.holders, key=lambda holder: (holder in wrong, holder))
    if len(holders) < plan.threshold:
        raise Failed(
            f"{len(holders)} neighbours revealed shares of the {secret.kind} of member {secret.member}, "
            f"and it takes {plan.threshold}",
            tuple(sorted(wrong)),
        )
    for attempt, chosen in enumerate(_subsets(plan, secret.member, holders)):
        chosen = sorted(chosen)
        points = {holder + 1: secret.share(holder) for holder in chosen}
        among = tuple(holder + 1 for holder in pool) if set(pool).issuperset(chosen) else ()
        value = shamir.reconstruct(points, among)
        if value < 1 << 8 * shamir.SECRET_BYTES:
            found = value.to_bytes(shamir.SECRET_BYTES)
            if secret.fits(found):
                if attempt:
                    wrong.update(
                        holder
                        for holder in holders
                        if shamir.interpolate(points, holder + 1) != secret.share(holder)
                    )
                return found
    raise Failed(
        f"no {plan.threshold} of {len(holders)} shares give the {secret.kind} of member {secret.member}: "
        "it or its neighbours dealt wrong ones",
        tuple(sorted(wrong)),
    )


def _subsets(plan: SumPlan, member: int, holders: Sequence[int]) -> Iterator[Sequence[int]]:
    """Yield the first ``t`` holders, then all other subsets of that size, or a sample of them if there are many."""
    if math.comb(len(holders), plan.threshold) <= _TRIES:
        yield from combinations(holders, plan.threshold)
        return
    yield holders[: plan.threshold]
    for attempt in range(1, _TRIES):
        # A different order in each attempt, but the same one whenever this round is computed again.
        fields = (plan.hash, member, attempt)
        drawn = sorted(
            holders,
            key=lambda holder: hashlib.sha256(encode("subset", *fields, holder)).digest(),
        )
        yield drawn[: plan.threshold]


def _noted(note: bytes) -> tuple[int, ...]:
    """Return the neighbours that a contribution left out, from its note."""
    return unpack_positions(note[MARK_BYTES:])


# Messages are parsed one at a time, here and below: parsed they take several times as much memory as their bytes.
def _advertised_keys(adverts: Mapping[int, bytes]) -> dict[int, _Keys]:
    parsed = ((member, wire.Advert.FromString(message)) for member, message in adverts.items())
    return {member: _Keys(advert.bundle.signing_public, advert.mask_public) for member, advert in parsed}


def _written_adverts(adverts: Mapping[int, bytes]) -> dict[int, bytes]:
    """Serialise each advertisement as a list of one: joined, such lists are the list of all."""
    return {
        member: wire.Adverts(adverts=[wire.Advert.FromString(message)]).SerializeToString()
        for member, message in adverts.items()
    }


def _written_confirmations(confirmations: Mapping[int, bytes]) -> dict[int, bytes]:
    """Serialise each confirmation as a list of one; joined, such lists are the list of all."""
    return {
        member: wire.Confirmations(confirmations=[wire.Confirmation.FromString(message)]).SerializeToString()
        for member, message in confirmations.items()
    }


def _written_submitters(notes: Mapping[int, bytes]) -> bytes:
    return wire.Submitters(members=sorted(notes)).SerializeToString()


def _revealed_shares(message: bytes) -> array[int]:
    """Return the offsets in a message of the shares that a member reveals."""
    return _starts(message, (share.seed or share.mask for share in wire.Unmasking.FromString(message).shares))


def _sealed_shares(shares: Mapping[int, bytes]) -> dict[int, array[int]]:
    return {
        member: _starts(message, (share.sealed for share in wire.Shares.FromString(message).shares))
        for member, message in shares.items()
    }


def _starts(message: bytes, fields: Iterable[bytes]) -> array[int]:
    """Return the offsets of fields in the message that they were parsed from, in their order.

    Each field is found by its bytes, at its own place or at an earlier one with the same bytes.
    """
    starts, end = array("I"), 0
    for each in fields:
        start = message.index(each, end)
        starts.append(start)
        end = start + len(each)
    return starts


def _seed_hashes(shares: Mapping[int, bytes]) -> dict[int, bytes]:
    return {member: wire.Shares.FromString(message).seed_hash for member, message in shares.items()}


def _read(kind: type[_MessageT], step: Step, message: bytes) -> _MessageT:
    try:
        return kind.FromString(message)
    except DecodeError:
        name = kind.DESCRIPTOR.name
        raise bad_message(step, f"the payload is no {name}", f"a serialised {name}") from None
