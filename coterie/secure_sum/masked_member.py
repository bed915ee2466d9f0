"""A member's half of the masked sum: holds its secrets for one round, and refuses whatever does not verify.

The server relays all messages, so a member takes nothing on trust: keys of neighbours carry signatures over the plan's
hash as this member computed it, shares are sealed from member to member, and shares are revealed only after enough
neighbours signed the same list of submitters.  Labels and derivations are in ``coterie.crypto.masking`` and
``coterie.secure_sum.statements``.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple, NoReturn, TypeVar

import numpy as np
from google.protobuf.message import DecodeError, Message
from numpy.typing import NDArray

from coterie.crypto import masking, shamir
from coterie.crypto.identity import Bundle, Identity, Validity
from coterie.crypto.verification import VerificationError
from coterie.crypto.verified import HostRound, Verified
from coterie.secure_sum.bundles import bundle_from_wire, bundle_to_wire
from coterie.secure_sum.chains import Chain, Chains, chained_bits, chained_bytes, is_chained
from coterie.secure_sum.graph import GraphFields, graph_fields, neighbourhoods
from coterie.secure_sum.plan import SumPlan
from coterie.secure_sum.protocol import Declined, Failed, Step
from coterie.secure_sum.statements import ADVERT, CONFIRM, SUBMIT, ascending, codes_hash, list_hash
from coterie.wire.refusal import Refusal
from coterie.wire.v1 import rounds_pb2 as wire

__all__ = ["MaskedMember"]

_STEPS = (Step.ADVERTISE, Step.SHARE, Step.SUBMIT, Step.CONFIRM, Step.UNMASK)
_MessageT = TypeVar("_MessageT", bound=Message)


class _Met(NamedTuple):
    """A neighbour's verified keys for this plan, and how long its key bundle is valid."""

    participant: bytes
    signing_public: bytes
    channel_public: bytes
    mask_public: bytes
    validity: Validity
    chained: bytes


class _Listed(NamedTuple):
    """A checked list of submitters, ascending within the cohort."""

    members: frozenset[int]
    users: int
    hash: bytes


class _ShareKeys(NamedTuple):
    """Keys of a pair: for shares from the lower participant id to the higher one, for those back, and the chain's."""

    up: bytes
    down: bytes
    next: bytes


class _Held(NamedTuple):
    """A neighbour's two shares, at most one of which is ever revealed."""

    seed: int
    mask: int


class MaskedMember:
    """A member's half of the masked sum, for one round.

    Each step is answered once, in order; the same briefing again gets the same bytes.  A different briefing for a step
    already answered is refused.  After a refusal the secrets are gone and every further question is refused.

    Parameters
    ----------
    plan : SumPlan
        As this member was shown it, with the hash of the model bytes on which it trains.
    index : int
        Position of this member in the plan.
    identity : Identity
        Keys of this member; they sign its messages.
    bundle : Bundle
        Public keys of this member, countersigned by the directory.
    directory_key : bytes
        Raw Ed25519 public key of the directory, 32 bytes.
    now : int
        Unix seconds, for the validity of bundles.
    verified : Verified, optional
        Signatures checked and keys agreed so far, shared by the members of one host.
    rule : callable, optional
        Gives degree and least threshold for a number of members; by default ``graph_fields`` with its default
        assumptions.
    revoked : collection of bytes, optional
        Participants that are revoked: the member confirms no list of submitters with one of them.
    chains : Chains, optional
        Chains of this host in the run, where its plan has them; without them members agree anew in each sum.
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
        revoked: Collection[bytes] = frozenset(),
        chains: Chains | None = None,
    ) -> None:
        self._plan = plan
        self._index = index
        self._identity = identity
        self._bundle = bundle
        self._directory_key = directory_key
        self._now = now
        self._verified = verified if verified is not None else Verified()
        self._rule = rule
        self._revoked = revoked
        self._chains = chains
        self._said: dict[Step, tuple[bytes, bytes]] = {}
        self._gone = ""
        self._channel: masking.RoundKey | None = None
        self._mask: masking.RoundKey | None = None
        self._seed = bytearray()
        self._host: HostRound | None = None
        self._near: tuple[tuple[int, ...], ...] = ()
        self._around: tuple[int, ...] = ()
        self._chained: dict[bytes, Chain] = {}
        self._following: dict[int, Chain] = {}
        self._met: dict[int, _Met] = {}
        self._opening: dict[int, bytes] = {}
        self._held: dict[int, _Held] = {}
        self._left_out: tuple[int, ...] = ()
        self._submitters: _Listed | None = None

    @property
    def submitters(self) -> Collection[int]:
        """Positions of the members on the list that this member confirmed; empty before."""
        return () if self._submitters is None else self._submitters.members

    def answer(self, step: Step, briefing: bytes, codes: NDArray[np.uint32] | None = None) -> bytes:
        """Return the message for a step.

        Parameters
        ----------
        step : Step
        briefing : bytes
            Empty for ADVERTISE; serialised ``Adverts`` for SHARE, ``ShareInbox`` for SUBMIT, ``Submitters`` for
            CONFIRM, ``Confirmations`` for UNMASK.
        codes : ndarray of uint32, shape (layout size,), optional
            The contribution, for SUBMIT; it is not changed.

        Raises
        ------
        Declined
            When a step is out of order or any check fails; the secrets are wiped.
        """
        if self._gone:
            raise Declined(f"has left the round: {self._gone}")
        if step in self._said:
            asked, message = self._said[step]
            if asked != briefing:
                self._leave(f"was asked to {step.value} again, with something else")
            return message
        following = next((one for one in _STEPS if one not in self._said), None)
        if step is not following:
            self._leave(
                f"was asked to {step.value} before {following.value}"
                if following
                else f"was asked to {step.value} at the end"
            )
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
        self._host = None
        self._met.clear()
        self._chained.clear()
        self._following.clear()
        self._opening.clear()
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
            case _:
                return self._unmask(_read(wire.Confirmations, briefing))

    # --- the steps -----------------------------------------------------------------------------------------------

    def _advertise(self) -> bytes:
        plan = self._plan
        self._require_plan()
        self._near = neighbourhoods(plan.graph_seed, len(plan.members), plan.degree)
        self._around = self._near[self._index]
        self._channel, self._mask = masking.RoundKey(), masking.RoundKey()
        keys = self._channel.public, self._mask.public
        chained = self._take_chains()
        self._host = self._verified.round(plan.hash)
        for key in keys:
            self._host.have(key)
        return wire.Advert(
            member=self._index,
            bundle=bundle_to_wire(self._bundle),
            channel_public=keys[0],
            mask_public=keys[1],
            signature=self._verified.sign(self._identity, ADVERT, plan.hash, *keys, *_signed_bits(chained)),
            chained=chained,
        ).SerializeToString()

    def _take_chains(self) -> bytes:
        """Take out the chains that this member holds with its neighbours; return the bits that say with whom."""
        if self._chains is None:
            return b""
        members, own = self._plan.members, self._identity.participant_id
        self._chained = self._chains.take(own, (members[each].participant for each in self._around))
        return chained_bits(
            self._around, (each for each in self._around if members[each].participant in self._chained)
        )

    def _require_plan(self) -> None:
        plan, members = self._plan, len(self._plan.members)
        if plan.secure_sum != "masked":
            raise Declined(f"the plan says {plan.secure_sum!r}, expected 'masked'")
        own = self._identity.participant_id
        if not 0 <= self._index < members or plan.members[self._index].participant != own:
            raise Declined("the plan's cohort does not have this participant at its place")
        if self._bundle.participant_id != own:
            raise Declined("the key bundle is another participant's")
        self._require_device(self._bundle, self._index)
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
        plan, channel, mask, host = self._plan, self._channel, self._mask, self._host
        if channel is None or mask is None or host is None:
            raise Declined("has no keys")
        positions = [advert.member for advert in adverts.adverts]
        self._require_neighbours(positions, self._around, "advertised")
        keys = {channel.public, mask.public}
        for advert in adverts.adverts:
            keys |= {advert.channel_public, advert.mask_public}
        if len(keys) != 2 * len(positions) + 2:
            raise Declined("a key was advertised twice")
        for position, advert in zip(positions, adverts.adverts, strict=True):
            # Members of a host check an advertisement once, by its bytes; only the time is checked each time.
            asked = ADVERT, self._directory_key, advert.SerializeToString()
            met = host.once(asked, self._check_advert, advert)
            met.validity.check("the key bundle", self._now)
            self._met[position] = met

        self._seed = bytearray(os.urandom(shamir.SECRET_BYTES))
        shares = shamir.split(
            [bytes(self._seed), mask.secret], plan.threshold, [position + 1 for position in positions]
        )
        message = wire.Shares(seed_hash=masking.seed_hash(plan.hash, bytes(self._seed)))
        own = self._identity.participant_id, channel.public
        for (position, met), dealt in zip(self._met.items(), shares, strict=True):
            peer = met.participant, met.channel_public
            chain = self._common_chain(position, met)
            if chain is None:
                again = self._chains is not None
                pair = host.between(own, peer, _agreed_keys, channel, plan.hash, own, peer, again)
            else:
                pair = host.between(own, peer, _chained_keys, chain, plan.hash, own, peer)
            ascends = own[0] < peer[0]
            sealing, self._opening[position] = (pair.up, pair.down) if ascends else (pair.down, pair.up)
            if pair.next:
                self._following[position] = Chain(pair.next, 1 if chain is None else chain.sums + 1)
            message.shares.add(member=position, sealed=masking.seal_share(sealing, *dealt))
        channel.wipe()
        # A chain that was advertised and not used is given up: the other member may have sealed under it.
        self._chained.clear()
        return message.SerializeToString()

    def _common_chain(self, member: int, met: _Met) -> Chain | None:
        """Return the chain with a neighbour that has one with this member, as its advertisement says; None else."""
        chain = self._chained.get(met.participant)
        if chain is None or not is_chained(met.chained, bisect_left(self._near[member], self._index)):
            return None
        return chain

    def _check_advert(self, advert: wire.Advert) -> _Met:
        """Verify a neighbour's advertisement for this plan; return the neighbour's keys."""
        bundle = bundle_from_wire(advert.bundle)
        participant = self._plan.members[advert.member].participant
        if bundle.participant_id != participant:
            raise Declined(f"member {advert.member} was advertised with another participant's keys")
        self._verified.bundle(bundle, self._directory_key, self._now)
        self._require_device(bundle, advert.member)
        keys = advert.channel_public, advert.mask_public
        if len(advert.chained) not in (0, chained_bytes(len(self._near[advert.member]))):
            raise Declined(f"member {advert.member} was advertised with chains of others than its neighbours")
        self._verified.signature(
            f"the advertisement of member {advert.member} for this plan",
            bundle.signing_public,
            advert.signature,
            ADVERT,
            self._plan.hash,
            *keys,
            *_signed_bits(advert.chained),
        )
        validity = Validity(bundle.not_before, bundle.not_after)
        return _Met(participant, bundle.signing_public, *keys, validity, advert.chained)

    def _require_device(self, bundle: Bundle, member: int) -> None:
        """Require that a member's device in the plan enrolled its keys, and has the role of this member's device."""
        bundle.require_party(self._plan.members[member].device)
        if bundle.role != self._bundle.role:
            raise Declined(f"member {member} is enrolled as a {bundle.role}, not as a {self._bundle.role}")

    def _submit(self, inbox: wire.ShareInbox, codes: NDArray[np.uint32]) -> bytes:
        plan, mask, host = self._plan, self._mask, self._host
        if mask is None or host is None:
            raise Declined("has no keys")
        if codes.dtype != np.uint32 or codes.ndim != 1:
            raise Declined(f"a contribution of {codes.ndim}-d {codes.dtype}, expected 1-d uint32")
        senders = [share.member for share in inbox.shares]
        self._require_neighbours(senders, tuple(self._met), "shared")
        left_out = []
        for share in inbox.shares:
            try:
                held = masking.open_share(self._opening[share.member], share.sealed)
                self._held[share.member] = _Held(*held)
            except VerificationError:
                left_out.append(share.member)
        self._left_out = tuple(left_out)
        self._require_enough(self._held, "sent shares that open")

        self._opening.clear()
        if self._chains is not None:
            going_on = {
                self._met[each].participant: chain
                for each, chain in self._following.items()
                if each in self._held
            }
            self._chains.give(self._identity.participant_id, going_on)
            self._following.clear()
        masked = codes.copy()
        with host.masking:
            self._mask_codes(masked, mask, host)
        mask.wipe()
        self._seed[:] = bytes(len(self._seed))
        sent = masked.astype("<u4", copy=False).tobytes()
        return wire.SummedVector(
            codes=sent,
            left_out=left_out,
            signature=self._identity.sign(SUBMIT, plan.hash, codes_hash(sent)),
        ).SerializeToString()

    def _mask_codes(self, codes: NDArray[np.uint32], mask: masking.RoundKey, host: HostRound) -> None:
        """Add this member's own mask, and the pairwise masks, signed by id, with neighbours whose shares it holds."""
        plan, own = self._plan, (self._identity.participant_id, mask.public)
        ready = host.take(own, len(codes))
        if ready.peers:
            codes += ready.vector
            ready.vector.fill(0)
        plus = [masking.own_mask_key(bytes(self._seed), plan.hash, own[0])]
        minus: list[bytes] = []
        mirrors = {}
        due = set(ready.peers)
        for member, met in self._met.items():
            peer = met.participant, met.mask_public
            held, done = member in self._held, met.participant in due
            if not held and not done:
                continue
            due.discard(met.participant)
            key = host.between(own, peer, _pair_mask_key, mask, plan.hash, own, peer)
            if held and done:
                continue
            # Without the neighbour's share, take off the mask that the neighbour, of this host, has put here already.
            (plus if (own[0] < peer[0]) is held else minus).append(key)
            waiting = host.wait_for(peer, len(codes)) if held else None
            if waiting is not None:
                waiting.peers.add(own[0])
                mirrors[key] = waiting.vector
        if due:
            raise Declined("a member of this host masked with one that never met it")
        masking.add_masks(codes, plus, minus, mirrors=mirrors)

    def _confirm(self, submitters: wire.Submitters) -> bytes:
        plan, host = self._plan, self._host
        if host is None:
            raise Declined("has no keys")
        listed = host.once(("list", submitters.SerializeToString()), self._read_list, submitters)
        if self._index not in listed.members:
            raise Declined("the list of submitters does not have this member")
        if listed.members.intersection(self._around) - self._held.keys() - set(self._left_out):
            raise Declined("the list of submitters has a neighbour that did not share")
        if listed.users < plan.min_sum:
            raise Declined(
                f"the list of submitters covers {listed.users} users, the plan's floor is {plan.min_sum}"
            )
        self._require_enough(listed.members & self._held.keys(), "submitted")
        self._submitters = listed
        return wire.Confirmation(
            member=self._index,
            signature=self._verified.sign(self._identity, CONFIRM, plan.hash, listed.hash),
        ).SerializeToString()

    def _read_list(self, submitters: wire.Submitters) -> _Listed:
        members, cohort = list(submitters.members), self._plan.members
        if not ascending(members, len(cohort)):
            raise Declined("the list of submitters does not ascend within the cohort")
        if gone := sum(cohort[member].participant in self._revoked for member in members):
            raise Declined(f"the list of submitters has {gone} members that are revoked")
        users = sum(cohort[member].users for member in members)
        return _Listed(frozenset(members), users, list_hash(members))

    def _unmask(self, confirmations: wire.Confirmations) -> bytes:
        host, listed = self._host, self._submitters
        if host is None or listed is None:
            raise Declined("has no keys")
        members = [confirmation.member for confirmation in confirmations.confirmations]
        possible = tuple(member for member in self._held if member in listed.members)
        self._require_neighbours(members, possible, "confirmed")
        for member, confirmation in zip(members, confirmations.confirmations, strict=True):
            asked = CONFIRM, listed.hash, member, confirmation.signature
            host.once(asked, self._check_confirmation, member, confirmation.signature, listed.hash)
        # Reveal one of the two shares of each neighbour, as the confirmed list says.
        message = wire.Unmasking()
        for member, held in self._held.items():
            if member in listed.members:
                message.shares.add(member=member, seed=masking.share_to_bytes(held.seed))
            else:
                message.shares.add(member=member, mask=masking.share_to_bytes(held.mask))
        self._held.clear()
        return message.SerializeToString()

    def _check_confirmation(self, member: int, signature: bytes, agreed: bytes) -> bool:
        self._verified.signature(
            f"the confirmation of member {member} for the same list",
            self._met[member].signing_public,
            signature,
            CONFIRM,
            self._plan.hash,
            agreed,
        )
        return True

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


def _agreed_keys(
    key: masking.RoundKey,
    plan_hash: bytes,
    own: tuple[bytes, bytes],
    peer: tuple[bytes, bytes],
    chained: bool,
) -> _ShareKeys:
    """Return the keys of two members that agree anew, and the first key of their chain where they have one."""
    low, high = (own[0], peer[0]) if own[0] < peer[0] else (peer[0], own[0])
    agreed = key.agree(peer[1])
    following = masking.chain_key(agreed, plan_hash, low, high) if chained else b""
    return _ShareKeys(*masking.share_keys(agreed, plan_hash, low, high), following)


def _chained_keys(
    chain: Chain, plan_hash: bytes, own: tuple[bytes, bytes], peer: tuple[bytes, bytes]
) -> _ShareKeys:
    """Return the keys of two members that go along their chain."""
    low, high = (own[0], peer[0]) if own[0] < peer[0] else (peer[0], own[0])
    return _ShareKeys(*masking.chained_keys(chain.key, plan_hash, low, high))


def _pair_mask_key(
    key: masking.RoundKey, plan_hash: bytes, own: tuple[bytes, bytes], peer: tuple[bytes, bytes]
) -> bytes:
    return masking.pair_mask_key(key.agree(peer[1]), plan_hash, own[0], peer[0])


def _signed_bits(chained: bytes) -> tuple[bytes, ...]:
    """Return what an advertisement's signature covers of its chains: nothing where it has no bits for them."""
    return (chained,) if chained else ()


def _read(kind: type[_MessageT], payload: bytes) -> _MessageT:
    try:
        return kind.FromString(payload)
    except DecodeError:
        raise Declined(f"what the server sent is no {kind.DESCRIPTOR.name}") from None
