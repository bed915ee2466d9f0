"""A member's half of the masked sum: its secrets for one round, and everything that it refuses.

The server relays all messages, so nothing that it says is taken on trust: keys of neighbours carry signatures over the
plan's hash as this member computed it, shares are sealed from member to member, and shares are revealed only after
enough neighbours signed the same list of submitters.  Labels and derivations are in ``coterie.crypto.masking`` and
``coterie.secure_sum.statements``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, NoReturn, TypeVar

import numpy as np
from google.protobuf.message import DecodeError, Message
from numpy.typing import NDArray

from coterie.crypto import masking, shamir
from coterie.crypto.identity import Bundle, Identity
from coterie.crypto.verification import VerificationError
from coterie.crypto.verified import Verified
from coterie.secure_sum.bundles import bundle_from_wire, bundle_to_wire
from coterie.secure_sum.graph import GraphFields, graph_fields, neighbourhoods
from coterie.secure_sum.plan import SumPlan
from coterie.secure_sum.protocol import Declined, Failed, Step
from coterie.secure_sum.statements import ADVERT, CONFIRM, SUBMIT, ascending, codes_hash, list_hash
from coterie.wire.refusal import Refusal
from coterie.wire.v1 import rounds_pb2 as wire

__all__ = ["MaskedMember"]

_STEPS = tuple(Step)
_MessageT = TypeVar("_MessageT", bound=Message)


class _Neighbour(NamedTuple):
    """What was verified about a neighbour, and the key under which it seals for this member."""

    signing_public: bytes
    mask_public: bytes
    opening_key: bytes


class _Held(NamedTuple):
    """A neighbour's shares, of which at most one is ever revealed."""

    seed: int
    mask: int


class MaskedMember:
    """The half of one member, for one round.

    Each step is answered once, in order; the same question again gets the same bytes, another one gets nothing.  After
    a refusal the secrets are gone and every further question is refused.

    Parameters
    ----------
    plan : SumPlan
        As this member was shown it, with the hash of the model bytes on which it trains.
    index : int
        Position of this member in the plan.
    identity : Identity
        Signs for it.
    bundle : Bundle
        Its public keys, countersigned by the directory.
    directory_key : bytes
        Raw Ed25519 public key of the directory, 32 bytes.
    now : int
        Unix seconds, for the validity of bundles.
    verified : Verified, optional
        Memory of signatures, shared by the members of one host.
    rule : callable, optional
        Degree and least threshold for a number of members; ``graph_fields`` with its default assumptions when left out.
    """

    def __init__(
        self,
        plan: SumPlan,
        index: int,
        identity: Identity,
        bundle: Bundle,
        directory_key: bytes,
        now: int,
        verified: Verified | None = None,
        rule: Callable[[int], GraphFields] = graph_fields,
    ) -> None:
        self._plan = plan
        self._index = index
        self._identity = identity
        self._bundle = bundle
        self._directory_key = directory_key
        self._now = now
        self._verified = verified if verified is not None else Verified()
        self._rule = rule
        self._said: dict[Step, tuple[bytes, bytes]] = {}
        self._gone = ""
        self._channel: masking.RoundKey | None = None
        self._mask: masking.RoundKey | None = None
        self._seed = bytearray()
        self._around: tuple[int, ...] = ()
        self._met: dict[int, _Neighbour] = {}
        self._held: dict[int, _Held] = {}
        self._left_out: tuple[int, ...] = ()
        self._submitters: frozenset[int] = frozenset()

    def answer(self, step: Step, briefing: bytes, codes: NDArray[np.uint32] | None = None) -> bytes:
        """Return the message for a step.

        Parameters
        ----------
        step : Step
        briefing : bytes
            ADVERTISE: empty.  SHARE: ``Adverts``.  SUBMIT: ``ShareInbox``.  CONFIRM: ``Submitters``.  UNMASK:
            ``Confirmations``.
        codes : ndarray of uint32, shape (layout size,), optional
            The contribution, for SUBMIT; it is not changed.

        Raises
        ------
        Declined
            When anything is not as it should be; the secrets are wiped.
        """
        if self._gone:
            raise Declined(f"has left the round: {self._gone}")
        if step in self._said:
            asked, message = self._said[step]
            if asked != briefing:
                self._leave(f"was asked to {step.value} again, with something else")
            return message
        if step is not _STEPS[len(self._said)]:
            self._leave(f"was asked to {step.value} before {_STEPS[len(self._said)].value}")
        try:
            message = self._answer(step, briefing, codes)
        except Declined as declined:
            self._leave(str(declined))
        except (VerificationError, Refusal) as error:
            self._leave(error.message)
        self._said[step] = (briefing, message)
        return message

    def forget(self) -> None:
        """Wipe the secrets; every further question is refused."""
        self._gone = self._gone or "its secrets are wiped"
        for key in (self._channel, self._mask):
            if key is not None:
                key.wipe()
        self._channel = self._mask = None
        self._seed[:] = bytes(len(self._seed))
        self._met.clear()
        self._held.clear()
        self._said.clear()

    def _leave(self, reason: str) -> NoReturn:
        self._gone = reason
        self.forget()
        raise Declined(reason) from None

    def _answer(self, step: Step, briefing: bytes, codes: NDArray[np.uint32] | None) -> bytes:
        match step:
            case Step.ADVERTISE:
                return self._advertise()
            case Step.SHARE:
                return self._share(_read(wire.Adverts, briefing))
            case Step.SUBMIT:
                if codes is None:
                    raise Declined("has no contribution")
                return self._submit(_read(wire.ShareInbox, briefing), codes)
            case Step.CONFIRM:
                return self._confirm(_read(wire.Submitters, briefing))
            case Step.UNMASK:
                return self._unmask(_read(wire.Confirmations, briefing))

    # --- the steps -----------------------------------------------------------------------------------------------

    def _advertise(self) -> bytes:
        plan = self._plan
        self._require_plan()
        self._around = neighbourhoods(plan.hash, len(plan.members), plan.degree)[self._index]
        self._channel, self._mask = masking.RoundKey(), masking.RoundKey()
        keys = self._channel.public, self._mask.public
        return wire.Advert(
            member=self._index,
            bundle=bundle_to_wire(self._bundle),
            channel_public=keys[0],
            mask_public=keys[1],
            signature=self._identity.sign(ADVERT, plan.hash, *keys),
        ).SerializeToString()

    def _require_plan(self) -> None:
        plan, members = self._plan, len(self._plan.members)
        if plan.secure_sum != "masked":
            raise Declined(f"the plan says {plan.secure_sum!r}, expected 'masked'")
        own = self._identity.participant_id
        if not 0 <= self._index < members or plan.members[self._index].participant != own:
            raise Declined("the plan's cohort does not have this participant at its place")
        if self._bundle.participant_id != own:
            raise Declined("the key bundle is another participant's")
        if len({member.participant for member in plan.members}) != members:
            raise Declined("the plan's cohort has a participant twice")
        if not 1 <= plan.min_sum <= plan.users:
            raise Declined(f"a floor of {plan.min_sum} users for a cohort of {plan.users}")
        try:
            least = self._rule(members)
        except Failed as failed:
            raise Declined(str(failed)) from None
        if plan.degree != least.degree or not least.threshold <= plan.threshold <= plan.degree:
            raise Declined(
                f"degree {plan.degree} and threshold {plan.threshold} for {members} members, "
                f"expected {least.degree} and at least {least.threshold}"
            )

    def _share(self, adverts: wire.Adverts) -> bytes:
        plan, channel, mask = self._plan, self._channel, self._mask
        if channel is None or mask is None:
            raise Declined("has no keys")
        positions = [advert.member for advert in adverts.adverts]
        self._require_neighbours(positions, self._around, "advertised")
        keys = {channel.public, mask.public}
        for advert in adverts.adverts:
            keys |= {advert.channel_public, advert.mask_public}
        if len(keys) != 2 * len(positions) + 2:
            raise Declined("a key was advertised twice")

        self._seed = bytearray(os.urandom(shamir.SECRET_BYTES))
        shares = shamir.split(
            [bytes(self._seed), mask.secret], plan.threshold, [position + 1 for position in positions]
        )
        own = self._identity.participant_id
        message = wire.Shares(seed_hash=masking.seed_hash(plan.hash, bytes(self._seed)))
        for advert, pair in zip(adverts.adverts, shares, strict=True):
            signing_public = self._check_advert(advert)
            peer = plan.members[advert.member].participant
            agreed = channel.agree(advert.channel_public)
            sealing = masking.share_key(agreed, plan.hash, own, peer)
            opening = masking.share_key(agreed, plan.hash, peer, own)
            self._met[advert.member] = _Neighbour(signing_public, advert.mask_public, opening)
            message.shares.add(member=advert.member, sealed=masking.seal_share(sealing, *pair))
        channel.wipe()
        return message.SerializeToString()

    def _check_advert(self, advert: wire.Advert) -> bytes:
        """Return the signing key of a neighbour whose advertisement is its own, for this plan."""
        bundle = bundle_from_wire(advert.bundle)
        if bundle.participant_id != self._plan.members[advert.member].participant:
            raise Declined(f"member {advert.member} was advertised with another participant's keys")
        self._verified.bundle(bundle, self._directory_key, self._now)
        self._verified.signature(
            f"the advertisement of member {advert.member} for this plan",
            bundle.signing_public,
            advert.signature,
            ADVERT,
            self._plan.hash,
            advert.channel_public,
            advert.mask_public,
        )
        return bundle.signing_public

    def _submit(self, inbox: wire.ShareInbox, codes: NDArray[np.uint32]) -> bytes:
        plan, mask = self._plan, self._mask
        if mask is None:
            raise Declined("has no keys")
        if codes.dtype != np.uint32 or codes.ndim != 1:
            raise Declined(f"a contribution of {codes.ndim}-d {codes.dtype}, expected 1-d uint32")
        senders = [share.member for share in inbox.shares]
        self._require_neighbours(senders, tuple(self._met), "shared")
        left_out = []
        for share in inbox.shares:
            try:
                self._held[share.member] = _Held(
                    *masking.open_share(self._met[share.member].opening_key, share.sealed)
                )
            except VerificationError:
                left_out.append(share.member)
        self._left_out = tuple(left_out)
        self._require_enough(self._held, "sent shares that open")

        own = self._identity.participant_id
        plus = [masking.own_mask_key(bytes(self._seed), plan.hash, own)]
        minus: list[bytes] = []
        for member in self._held:
            peer = plan.members[member].participant
            agreed = mask.agree(self._met[member].mask_public)
            (plus if own < peer else minus).append(masking.pair_mask_key(agreed, plan.hash, own, peer))
        masked = codes.copy()
        masking.add_masks(masked, plus, minus)
        mask.wipe()
        self._seed[:] = bytes(len(self._seed))
        sent = masked.astype("<u4", copy=False).tobytes()
        return wire.SummedVector(
            codes=sent,
            left_out=left_out,
            signature=self._identity.sign(SUBMIT, plan.hash, codes_hash(sent)),
        ).SerializeToString()

    def _confirm(self, submitters: wire.Submitters) -> bytes:
        plan = self._plan
        members = list(submitters.members)
        if not ascending(members, len(plan.members)):
            raise Declined("the list of submitters does not ascend within the cohort")
        listed = frozenset(members)
        if self._index not in listed:
            raise Declined("the list of submitters does not have this member")
        if listed.intersection(self._around) - self._held.keys() - set(self._left_out):
            raise Declined("the list of submitters has a neighbour that did not share")
        users = sum(plan.members[member].users for member in members)
        if users < plan.min_sum:
            raise Declined(f"the list of submitters covers {users} users, the plan's floor is {plan.min_sum}")
        self._require_enough(listed & self._held.keys(), "submitted")
        self._submitters = listed
        return wire.Confirmation(
            member=self._index, signature=self._identity.sign(CONFIRM, plan.hash, list_hash(members))
        ).SerializeToString()

    def _unmask(self, confirmations: wire.Confirmations) -> bytes:
        members = [confirmation.member for confirmation in confirmations.confirmations]
        possible = tuple(member for member in self._held if member in self._submitters)
        self._require_neighbours(members, possible, "confirmed")
        agreed = list_hash(sorted(self._submitters))
        for confirmation in confirmations.confirmations:
            self._verified.signature(
                f"the confirmation of member {confirmation.member} for the same list",
                self._met[confirmation.member].signing_public,
                confirmation.signature,
                CONFIRM,
                self._plan.hash,
                agreed,
            )
        # One of the two for each neighbour, by the one list that was confirmed.
        message = wire.Unmasking()
        for member, held in self._held.items():
            if member in self._submitters:
                message.shares.add(member=member, seed=masking.share_to_bytes(held.seed))
            else:
                message.shares.add(member=member, mask=masking.share_to_bytes(held.mask))
        self._held.clear()
        return message.SerializeToString()

    # --- what is required of a list --------------------------------------------------------------------------------

    def _require_neighbours(self, members: Sequence[int], among: Iterable[int], did: str) -> None:
        if not ascending(members, len(self._plan.members)) or not set(members) <= set(among):
            raise Declined(f"those said to have {did} are no ascending list of neighbours")
        self._require_enough(members, did)

    def _require_enough(self, members: Iterable[int], did: str) -> None:
        count = sum(1 for _ in members)
        if count < self._plan.threshold:
            raise Declined(f"{count} neighbours {did}, and it takes {self._plan.threshold}")

    def __repr__(self) -> str:
        return f"<MaskedMember {self._index} of round {self._plan.round}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a MaskedMember holds secrets and is never pickled")


def _read(kind: type[_MessageT], payload: bytes) -> _MessageT:
    try:
        return kind.FromString(payload)
    except DecodeError:
        raise Declined(f"what the server sent is no {kind.DESCRIPTOR.name}") from None
