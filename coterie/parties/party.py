"""A party's client of the COS: registers, polls, fetches and submits, for hosts, data owners and key holders."""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, overload

import grpc
import structlog
from google.protobuf.message import DecodeError, Message

from coterie.crypto import clocks
from coterie.crypto.identity import Bundle, Identity
from coterie.crypto.identity import Delegation as SignedDelegation
from coterie.crypto.roll import RollDelegation as SignedRoll
from coterie.crypto.roll import roll_of
from coterie.errors import PeerError
from coterie.net.channel import Channel
from coterie.net.rest import Rest
from coterie.net.retry import Retry
from coterie.net.status import from_rpc_error, waits_for_store
from coterie.rounds.plan_features import FEATURES
from coterie.rounds.plan_hash import plan_hash
from coterie.rounds.plan_versions import check_whole, plan_version
from coterie.secure_sum.bundles import bundle_to_wire
from coterie.wire.chunks import CHUNK_BYTES, Assembler, fill, offsets
from coterie.wire.pieces import SINCE, TOGETHER, TOGETHER_BYTES
from coterie.wire.refusal import LATER, ErrorReason, Refusal
from coterie.wire.v1 import orchestrator_pb2 as wire
from coterie.wire.v1.common_pb2 import Delegation, RollDelegation, RoundRef, SlotRange
from coterie.wire.v1.orchestrator_pb2_grpc import OrchestratorStub
from coterie.wire.versions import (
    NEWEST,
    UnsupportedVersionError,
    agree,
    agree_on_newest,
    own,
    release,
    release_of,
)

__all__ = ["Bundles", "HostedUsers", "Item", "Party", "Registrant", "slot_ranges"]

_log = structlog.get_logger("coterie.party")

T = TypeVar("T")

Bundles = Callable[[Iterable[bytes]], Awaitable[Mapping[bytes, Bundle]]]
"""Gives verified bundles of participants by id, without unknown or revoked ones."""

_POLL_HOLD_S = 20.0
_LULL_S = 0.2
"""Longest wait for a submission's answer before tasks are polled for beside the work, seconds."""
_SUBMIT_S = 30.0
_REACH_S = 2.0
"""Longest time that a poll is tried before the COS counts as out of reach, seconds."""
_AWAY_S, _LONGEST_AWAY_S = 1.0, 120.0
"""Pause before a COS that is away is looked for again, and the longest one of a device that checks in, seconds."""
_LEAST_REST_S, _LONGEST_REST_S = 1.0, 86_400.0
"""Shortest and longest time for which a device rests, whatever the COS says, seconds."""
_BATCH = 500
_ITEM_BATCH = 10_000
_MAX_FETCH = 1 << 30
_STORE_S = 1.0
"""Pause before a call is repeated that the COS could not store, or after it has forgotten the party, seconds."""
_FORGOTTEN_HINT = (
    "was the COS restored from a backup of before the run, or of another one? Restore a later backup of it; this party "
    "waits, and goes on then"
)
_DELEGATION_S = 30 * 24 * 3600
_TOGETHER = 20_000
"""Most users of a host whom it registers in one call: the COS checks so many within seconds, also on a busy machine."""
_HELD = (wire.FetchKind.FETCH_KIND_MODEL, wire.FetchKind.FETCH_KIND_OPEN_ITEMS)
"""Kinds of payload that callers keep from round to round, and need not get again."""


@dataclass(frozen=True)
class Registrant:
    """A participant of a party, as the party registers it.

    ``name``, ``address``, ``tls_name`` and ``items`` belong to data owners.
    """

    identity: Identity
    bundle: Bundle
    kind: wire.ParticipantKind.ValueType
    name: str = ""
    address: str = ""
    tls_name: str = ""
    items: Sequence[str] = ()


class HostedUsers(Sequence[Registrant]):
    """The users of a host as it registers them, each put together when it is asked for: there may be very many.

    Parameters
    ----------
    identities : sequence of Identity
    bundles : sequence of Bundle
        In the same order.
    within : range, optional
        Positions of the users; all where it is absent.
    """

    def __init__(
        self, identities: Sequence[Identity], bundles: Sequence[Bundle], within: range | None = None
    ) -> None:
        if len(identities) != len(bundles):
            raise ValueError(f"{len(identities)} identities and {len(bundles)} bundles")
        self._identities, self._bundles = identities, bundles
        self._within = range(len(bundles)) if within is None else within

    def __len__(self) -> int:
        return len(self._within)

    def parts(self, most: int) -> list[HostedUsers]:
        """Return the same users in parts of at most ``most``, in their order."""
        within = self._within
        return [
            HostedUsers(self._identities, self._bundles, within[first : first + most])
            for first in range(0, len(within), most)
        ]

    @overload
    def __getitem__(self, at: int) -> Registrant: ...
    @overload
    def __getitem__(self, at: slice) -> list[Registrant]: ...
    def __getitem__(self, at: int | slice) -> Registrant | list[Registrant]:
        if isinstance(at, slice):
            return [self[position] for position in range(*at.indices(len(self)))]
        place, user = self._within[at], wire.ParticipantKind.PARTICIPANT_KIND_USER
        return Registrant(self._identities[place], self._bundles[place], user)

    def ids(self) -> Iterator[bytes]:
        """Yield the participants' ids."""
        for place in self._within:
            yield self._bundles[place].participant_id

    def messages(self, first: int, count: int) -> list[wire.Participant]:
        """Return the messages of some users who delegate together."""
        return [
            wire.Participant(bundle=bundle_to_wire(bundle), kind=wire.ParticipantKind.PARTICIPANT_KIND_USER)
            for bundle in map(self._bundles.__getitem__, self._within[first : first + count])
        ]


@dataclass(frozen=True)
class Item:
    """One item of a submission.

    Parameters
    ----------
    kind : SubmitKind
    slots : sequence of int
        Slots that the item covers.
    payload : bytes
    """

    kind: wire.SubmitKind.ValueType
    slots: Sequence[int]
    payload: bytes


def slot_ranges(slots: Iterable[int]) -> list[SlotRange]:
    """Return slots as ranges, in the order given."""
    found: list[SlotRange] = []
    for slot in slots:
        if found and found[-1].first + found[-1].count == slot:
            found[-1].count += 1
        else:
            found.append(SlotRange(first=slot, count=1))
    return found


def _messages(round_: RoundRef, items: Sequence[Item], *, together: bool) -> Iterator[wire.SubmitRequest]:
    """Yield the messages of a submission.

    Parameters
    ----------
    round_ : RoundRef
    items : sequence of Item
    together : bool
        Whether several pieces travel in one message, and items of one chunk without a hash.
    """
    message, size = None, 0
    for item in items:
        for offset in offsets(item.payload):
            length = min(len(item.payload) - offset, CHUNK_BYTES)
            room = (
                message is not None and len(message.more) + 1 < TOGETHER and size + length <= TOGETHER_BYTES
            )
            if message is not None and together and room:
                piece = message.more.add()
            else:
                if message is not None:
                    yield message
                message = piece = wire.SubmitRequest()
                size = 0
            size += length
            if not offset:
                piece.round.CopyFrom(round_)
                piece.kind = item.kind
                piece.slots.extend(slot_ranges(item.slots))
                if not together or len(item.payload) > CHUNK_BYTES:
                    piece.sha256 = hashlib.sha256(item.payload).digest()
            fill(piece.chunk, item.payload, offset)
    if message is not None:
        yield message


class Party:
    """A connection to the COS that speaks for one or more participants of a run.

    Parameters
    ----------
    channel : Channel
        To the COS.
    run_id : str
        The run to take part in.
    fingerprint : callable
        Returns the SHA-256 of the certificate that the channel shows; participants delegate to this certificate.
    retry : Retry
        Retries of the calls, all of which may be repeated.
    on_reach : callable, optional
        Called after each poll with whether the COS could be reached: a condition of health.
    rest : Rest, optional
        The rest of a device that checks in: it rests for as long as the COS says while nothing is asked of it.
    """

    def __init__(
        self,
        channel: Channel,
        run_id: str,
        fingerprint: Callable[[], bytes],
        retry: Retry,
        on_reach: Callable[[bool], None] | None = None,
        rest: Rest | None = None,
    ) -> None:
        self._rest = rest
        self._channel = channel
        # Generated stubs are typed for gRPC's own channel; ours takes and returns the same messages.
        self.stub: Any = channel.stub(OrchestratorStub)
        """Stub of the COS, for calls that have no method here; make each through `call`."""
        self._run_id = run_id
        self._fingerprint = fingerprint
        self._retry = retry
        self._on_reach = on_reach or (lambda _: None)
        self.plan = wire.RunPlan()
        # Version of the protocol that the plan asks for.
        self._lowest = plan_version(self.plan)
        self.plan_signature = b""
        """The operator's signature over the plan, as the COS sent it; `coterie.parties.signed_run` checks it."""
        self.slots: list[int] = []
        self._members: Sequence[Registrant] = ()
        self.protocol = 0
        """Version of the protocol that is spoken with the COS; 0 before the registration."""
        self.asked_at = 0.0
        """Time at which the newest poll was sent, ``time.monotonic`` seconds; tasks may be as old as that."""
        self.attach: Sequence[wire.FetchKind.ValueType] = ()
        """Kinds of payload that answers to polls may have attached, so that they need not be fetched."""
        self.carries = False
        """Whether the last submission of each step waits for the next tasks; `idle` says when none is submitted."""
        self._cursor = 0
        # Whether the last answer said that the run has failed and may be resumed.
        self._failed = False
        self._attached: dict[tuple[int, int, int], wire.FetchResponse] = {}
        self._round = 0
        self._held: dict[int, bytes] = {}
        # The poll answer that a submission brought; whether a submission is under way that will bring one, and
        # whether one has brought one since `idle`.
        self._brought: tuple[wire.PollResponse, float] | None = None
        self._carrying = self._carried = self._polling = False
        self._wake = asyncio.Event()

    @property
    def channel(self) -> Channel:
        """Connection to the COS."""
        return self._channel

    async def register(self, members: Sequence[Registrant]) -> int:
        """Join the run with these participants; a restarted party joins again and gets the same slots.

        A host of very many users registers them by parts, each with a call of its own: what the COS has taken stays
        taken where a later call fails, and no call takes longer than calls may.

        Returns
        -------
        int
            Bytes sent about the participants.

        Raises
        ------
        UnsupportedVersionError
            When the COS and this party have no version of the protocol in common, or the COS announces a plan that this
            release does not know whole, or to which it gives another hash.
        PeerError
            When the COS refuses for another reason, or announces the plan of another run.
        """
        size, slots = 0, list[int]()
        parts: Sequence[Sequence[Registrant]] = [members]
        if isinstance(members, HostedUsers) and len(members) > _TOGETHER:
            parts = members.parts(_TOGETHER)
        for part in parts:
            size += await self._register(part)
            slots += self.slots
        self._members, self.slots = members, slots
        return size

    async def _register(self, members: Sequence[Registrant]) -> int:
        """Register some participants in one call, as `register` does."""
        messages: list[wire.Participant] = []
        signed_for, roll, size = b"", None, 0
        users = wire.ParticipantKind.PARTICIPANT_KIND_USER
        hosted = members if isinstance(members, HostedUsers) else None
        together = len(members) > 1 and (hosted is not None or all(one.kind == users for one in members))

        async def attempt() -> wire.RegisterResponse:
            nonlocal messages, signed_for, roll
            # The channel may show another certificate than at the attempt before.
            shown = self._fingerprint()
            if shown != signed_for:
                expiry = clocks.now() + _DELEGATION_S
                roll = await asyncio.to_thread(self._roll, members, shown, expiry) if together else None
                messages = []
                if roll is None or hosted is None:
                    messages = [
                        self._participant(member, shown, expiry, alone=roll is None) for member in members
                    ]
                signed_for = shown
            response: wire.RegisterResponse = await self.stub.Register(requests())
            return response

        def batch(first: int) -> list[wire.Participant]:
            if hosted is None or roll is None:
                return messages[first : first + _BATCH]
            return hosted.messages(first, _BATCH)

        async def requests() -> AsyncIterator[wire.RegisterRequest]:
            nonlocal size
            intent = wire.RegisterIntent.REGISTER_INTENT_JOIN
            size = 0 if roll is None else roll.ByteSize()
            for first in range(0, len(members), _BATCH):
                part = batch(first)
                size += sum(message.ByteSize() for message in part)
                said = None if first else own(FEATURES)
                yield wire.RegisterRequest(
                    run_id=self._run_id,
                    intent=intent,
                    participants=part,
                    protocol=said,
                    roll=None if first else roll,
                )
            for position, member in enumerate(members if hosted is None else ()):
                for first in range(0, len(member.items), _ITEM_BATCH):
                    yield wire.RegisterRequest(
                        items=member.items[first : first + _ITEM_BATCH], items_of=position
                    )

        try:
            response = await self.call(attempt)
        except Refusal as refusal:
            if not together or refusal.reason != ErrorReason.ERROR_REASON_BAD_SIGNATURE:
                raise
            # A COS of a release before rolls finds no delegation: each user signs one of its own.
            signed_for, together = b"", False
            response = await self.call(attempt)
        peer = self._channel.peer
        check_whole(response.plan, peer, "this party")
        # The plan is signed, and so keeps the COS from naming a lower version than the operator asks for.
        protocol = agree(peer, response.protocol, lowest=plan_version(response.plan))
        if plan_hash(response.plan) != response.plan_hash:
            said = f"release {told}" if (told := release_of(response.protocol)) else "an older release"
            raise UnsupportedVersionError(
                f"{peer} announced a plan whose hash is another one here: it is of {said}, this party of {release()}",
                field="plan_hash",
                expected="the same release at both",
            )
        if response.plan.run_id != self._run_id:
            raise PeerError(f"{self._channel.peer} announced the plan of another run than {self._run_id}")
        if protocol != self.protocol:
            _log.info("speaks with the COS", protocol=protocol, release=release_of(response.protocol) or None)
        self.protocol = protocol
        self.plan, self.plan_signature = response.plan, response.plan_signature
        self._lowest = plan_version(self.plan)
        self.slots = [slot for part in response.slots for slot in range(part.first, part.first + part.count)]
        return size

    async def wait_and_register(self, members: Sequence[Registrant], pause_s: float = 0.5) -> int:
        """Join the run as soon as the operator has started it and the COS can be reached; return as `register` does.

        Raises
        ------
        Refusal
            When the COS refuses for good; among others an UnsupportedVersionError, as from `register`.
        """
        announced = ""
        while True:
            try:
                return await self.register(members)
            except Refusal as refusal:
                if refusal.reason != ErrorReason.ERROR_REASON_UNKNOWN_ROUND and refusal.reason not in LATER:
                    raise
                why = refusal.message
            except PeerError as error:
                if type(error) is not PeerError:
                    raise
                why = error.message
            if why != announced:
                _log.info("waiting for the run", run=self._run_id, because=why)
                announced = why
            await asyncio.sleep(pause_s)

    async def leave(self) -> None:
        """Leave the run; submissions that the COS has acknowledged stay counted."""

        async def requests() -> AsyncIterator[wire.RegisterRequest]:
            yield wire.RegisterRequest(run_id=self._run_id, intent=wire.RegisterIntent.REGISTER_INTENT_LEAVE)

        await self.call(lambda: self.stub.Register(requests()))

    def _roll(self, members: Sequence[Registrant], shown: bytes, expiry: int) -> RollDelegation:
        ids = (
            members.ids()
            if isinstance(members, HostedUsers)
            else (one.bundle.participant_id for one in members)
        )
        roll = roll_of(ids)
        signed = SignedRoll.sign(members[0].identity, shown, self._run_id, expiry, roll)
        return RollDelegation(
            certificate_fingerprint=signed.certificate_fingerprint,
            run_id=signed.run_id,
            expiry=signed.expiry,
            root=signed.root,
            size=signed.size,
            signature=signed.signature,
        )

    def _participant(
        self, member: Registrant, shown: bytes, expiry: int, *, alone: bool = True
    ) -> wire.Participant:
        delegation = None
        if alone:
            signed = SignedDelegation.sign(member.identity, shown, self._run_id, expiry)
            delegation = Delegation(
                certificate_fingerprint=signed.certificate_fingerprint,
                run_id=signed.run_id,
                expiry=signed.expiry,
                signature=signed.signature,
            )
        return wire.Participant(
            bundle=bundle_to_wire(member.bundle),
            delegation=delegation,
            kind=member.kind,
            name=member.name,
            address=member.address,
            tls_name=member.tls_name,
        )

    async def tasks(self) -> AsyncIterator[list[wire.Task]]:
        """Yield the open tasks whenever they may have changed; poll an unreachable COS again without end."""
        reachable, said, pause = True, False, _AWAY_S
        while True:
            brought = await self._lull() if self.carries else None
            try:
                response = await self._poll() if brought is None else brought[0]
            except PeerError as error:
                # A COS that does not know yet whom it may trust, cannot store, or is overloaded counts as out of reach,
                # like one that does not answer.
                refused = error.reason if isinstance(error, Refusal) else None
                passing = waits_for_store(error) or refused in LATER
                forgotten = refused == ErrorReason.ERROR_REASON_UNKNOWN_ROUND
                if refused == ErrorReason.ERROR_REASON_UNKNOWN_PARTICIPANT:
                    await self._register_again(error)
                    await asyncio.sleep(_STORE_S)
                    continue
                if refused is not None and not passing and not forgotten:
                    raise
                if forgotten and not said:
                    _log.error(
                        "the COS does not know the run any more, in which this party takes part",
                        run=self._run_id,
                        hint=_FORGOTTEN_HINT,
                    )
                elif reachable and not forgotten:
                    _log.warning("cannot reach the COS", error=error.message)
                said = forgotten
                reachable = False
                self._on_reach(reachable)
                await asyncio.sleep(pause)
                if self._rest is not None:
                    # Very many devices may find the COS away, and none of them holds up a round meanwhile.
                    pause = random.uniform(0.5, 1.0) * min(2 * pause, _LONGEST_AWAY_S)  # noqa: S311 - jitter
                continue
            if brought is not None:
                self.asked_at = brought[1]
            reachable, said, pause = True, False, _AWAY_S
            self._on_reach(reachable)
            self._cursor = response.revision
            self._heed_version(response)
            self._take(response)
            self._wake.clear()
            if self._rest is not None:
                self._rest.heard(
                    asked=any(task.kind == wire.TaskKind.TASK_KIND_ROUND for task in response.tasks)
                )
            yield list(response.tasks)
            if self._rest is not None and response.come_back_ms:
                await self._rest.rest(min(max(response.come_back_ms / 1000, _LEAST_REST_S), _LONGEST_REST_S))

    async def _register_again(self, refused: PeerError) -> None:
        """Register as before at a COS that has forgotten this party, as after a restore from an earlier backup.

        Raises
        ------
        PeerError
            The COS refuses, or announces another plan or other slots than before: what this party works with is of
            those.  A host in an open population takes other slots: its users may be in a wave that the COS has learned
            from the third party, and nothing but the addresses of messages depends on slots there.
        """
        plan, slots = plan_hash(self.plan), self.slots
        _log.warning(
            "the COS has forgotten this party, as after a restore from a backup: it registers again",
            run=self._run_id,
            because=refused.message,
        )
        await self.wait_and_register(self._members)
        moves = bool(self.plan.rounds.most_users) and isinstance(self._members, HostedUsers)
        if plan_hash(self.plan) != plan or (self.slots != slots and not moves):
            raise PeerError(
                f"{self._channel.peer} has forgotten this party, and took it in anew with another plan or other slots: "
                "it was restored from a backup of before this party registered",
                hint="start this service again: it goes on with what the COS says now",
            )

    def _heed_version(self, response: wire.PollResponse) -> None:
        """Take note of the version that the COS speaks, which may have been upgraded or set back since the last answer.

        Raises
        ------
        UnsupportedVersionError
            When this party does not speak it, or it is lower than the run's plan asks for.
        """
        protocol = agree_on_newest(self._channel.peer, response.newest_protocol, lowest=self._lowest)
        if protocol != self.protocol:
            _log.info("speaks another version with the COS", protocol=protocol, before=self.protocol)
        self.protocol = protocol

    def end_in(self, tasks: Sequence[wire.Task]) -> wire.Task | None:
        """Return the task that ends the caller's part in the run; None while the run goes on.

        A failed run that the operator may resume does not end it: the caller keeps polling, and goes on when it is
        resumed.
        """
        end = next((task for task in tasks if task.kind == wire.TaskKind.TASK_KIND_FINISH), None)
        failed = end is not None and end.resumable
        if end is not None and failed and not self._failed:
            _log.warning("the run has failed, and may be resumed", reason=end.reason)
        elif self._failed and end is None:
            _log.info("the run goes on")
        self._failed = failed
        return None if failed else end

    def idle(self) -> None:
        """Say that nothing more is submitted now: tasks are polled for at once unless a submission brought them."""
        if not self._carried:
            self._wake.set()
        self._carried = False

    async def _lull(self) -> tuple[wire.PollResponse, float] | None:
        """Wait for the tasks that a submission brings; return None when a poll is to be made instead."""
        try:
            async with asyncio.timeout(_LULL_S if self._cursor else 0):
                await self._wake.wait()
        except TimeoutError:
            if self._carrying:
                await self._wake.wait()
        self._wake.clear()
        brought, self._brought = self._brought, None
        return brought

    def _request(self) -> wire.PollRequest:
        return wire.PollRequest(
            run_id=self._run_id,
            cursor=self._cursor,
            hold_ms=int(_POLL_HOLD_S * 1000),
            attach=self.attach,
            round=self._round,
            held_sha256=list(self._held.values()) if self.attach else [],
            newest_protocol=NEWEST,
            checks_in=self._rest is not None,
        )

    def _take(self, response: wire.PollResponse) -> None:
        """Keep an answer's attached payloads, in place of those of the answer before."""
        self._attached = {}
        for one in response.attached:
            asked = one.request
            if asked.kind == wire.FetchKind.FETCH_KIND_SUM_PLAN:
                self._round = asked.version
            self._attached[asked.kind, asked.version, asked.step] = one.response

    async def _poll(self) -> wire.PollResponse:
        async def attempt() -> wire.PollResponse:
            self.asked_at = time.monotonic()
            response: wire.PollResponse = await self.stub.Poll(self._request(), timeout=_POLL_HOLD_S + 10)
            return response

        self._polling = True
        try:
            return await self.call(attempt, Retry(limit_s=_REACH_S))
        finally:
            self._polling = False

    async def fetch(
        self,
        kind: wire.FetchKind.ValueType,
        *,
        version: int = 0,
        held_sha256: bytes = b"",
        step: wire.RoundStep.ValueType = wire.RoundStep.ROUND_STEP_UNSPECIFIED,
        first: int = 0,
    ) -> tuple[int, bytes | None]:
        """Return a payload of the COS, such as a model, roster or plan: fetched, or as attached to an answer.

        Returns
        -------
        version : int
            Version of the payload.
        payload : bytes or None
            None when the caller's copy, by its hash ``held_sha256``, is current.
        """
        attached = self._attached.pop((kind, version, step), None) if not first else None
        if attached is not None and not attached.unchanged:
            self._hold(kind, attached.sha256)
            return attached.version, attached.chunk.data
        if attached is not None and attached.sha256 == held_sha256:
            return attached.version, None
        request = wire.FetchRequest(
            run_id=self._run_id, kind=kind, version=version, held_sha256=held_sha256, step=step, first=first
        )

        async def whole() -> tuple[int, bytes | None]:
            assembler, head = Assembler(_MAX_FETCH), None
            async for response in self.stub.Fetch(request, timeout=120.0):
                if head is None:
                    head = response
                    if head.unchanged:
                        return head.version, None
                assembler.add(response.chunk)
            if head is None:
                raise PeerError(f"{self._channel.peer} answered a fetch with nothing")
            self._hold(kind, head.sha256)
            return head.version, assembler.payload(head.sha256)

        return await self.call(whole)

    def _hold(self, kind: wire.FetchKind.ValueType, sha256: bytes) -> None:
        if kind in _HELD:
            self._held[kind] = sha256

    async def briefings(self, number: int, step: wire.RoundStep.ValueType) -> dict[int, bytes]:
        """Fetch the briefings of the caller's members for a step of a round, by the members' positions in its plan.

        Raises
        ------
        PeerError
            When the COS sends malformed briefings.
        """
        found: dict[int, bytes] = {}
        first = 0
        while True:
            _, payload = await self.fetch(
                wire.FetchKind.FETCH_KIND_BRIEFINGS, version=number, step=step, first=first
            )
            try:
                message = wire.Briefings.FromString(payload or b"")
                parts = list(message.parts)
                for one in message.briefings:
                    of = b"".join([parts[position] for position in one.of])
                    found[one.member] = message.common + of + one.payload
            except (DecodeError, IndexError) as error:
                raise PeerError("the COS sent what are no briefings") from error
            if not message.next:
                return found
            if message.next <= first:
                raise PeerError("the COS sends the same briefings again and again")
            first = message.next

    async def submit(
        self,
        kind: wire.SubmitKind.ValueType,
        round_: RoundRef,
        payload: Message,
        *,
        slots: Sequence[int] = (),
    ) -> None:
        """Submit one item.

        Raises
        ------
        Refusal
            When the COS refuses the item.
        """
        item = Item(kind, slots, payload.SerializeToString(deterministic=True))
        for refused in await self.submit_many(round_, [item]):
            raise Refusal(refused.reason, refused.message, field="submission")

    async def submit_many(
        self, round_: RoundRef, items: Sequence[Item], *, last: bool = False
    ) -> list[wire.RefusedItem]:
        """Submit items in one stream.

        Parameters
        ----------
        round_ : RoundRef
        items : sequence of Item
        last : bool
            Whether nothing else follows for this step.  If also ``carries``, the COS answers when there are new tasks,
            and `tasks` yields them.

        Returns
        -------
        list of RefusedItem
            Items that the COS refuses, each with its position and the reason; the others are accepted.
        """
        poll = self._request() if last and self.carries and not self._polling else None

        async def requests() -> AsyncIterator[wire.SubmitRequest]:
            polled = poll
            for message in _messages(round_, items, together=self.protocol >= SINCE):
                if polled is not None:
                    message.poll.CopyFrom(polled)
                    polled = None
                yield message

        async def attempt() -> wire.SubmitResponse:
            nonlocal poll
            sent_at = time.monotonic()
            try:
                if poll is None:
                    response: wire.SubmitResponse = await self.stub.Submit(requests())
                else:
                    response = await self.stub.Submit(requests(), timeout=_SUBMIT_S + _POLL_HOLD_S)
                    if response.HasField("next"):
                        self._brought, self._carried = (response.next, sent_at), True
                return response
            finally:
                if poll is not None:
                    # After a failed attempt too: further attempts carry no poll, and tasks are polled for beside them.
                    poll, self._carrying = None, False
                    self._wake.set()

        self._carrying = poll is not None
        return list((await self.call(attempt)).refused)

    async def call(self, attempt: Callable[[], Awaitable[T]], retry: Retry | None = None) -> T:
        """Make a call with retries; raise a failure as the refusal that the COS sent, or as a PeerError.

        While the COS answers that its store takes no writes now, the call is repeated without end, unless ``retry`` is
        given.
        """
        while True:
            try:
                return await (retry or self._retry)(attempt)
            except grpc.aio.AioRpcError as error:
                if retry is not None or not waits_for_store(error):
                    raise from_rpc_error(error, self._channel.peer) from error
            await asyncio.sleep(_STORE_S)
