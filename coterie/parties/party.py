"""A party's client of the COS: registers, polls, fetches and submits, for hosts, data owners and key holders."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

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
from coterie.net.retry import Retry
from coterie.net.status import from_rpc_error, waits_for_store
from coterie.rounds.plan_features import FEATURES
from coterie.rounds.plan_hash import plan_hash
from coterie.rounds.plan_versions import check_whole, plan_version
from coterie.secure_sum.bundles import bundle_to_wire
from coterie.wire.chunks import Assembler, split
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

__all__ = ["Bundles", "Item", "Party", "Registrant", "slot_ranges"]

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
    """

    def __init__(
        self,
        channel: Channel,
        run_id: str,
        fingerprint: Callable[[], bytes],
        retry: Retry,
        on_reach: Callable[[bool], None] | None = None,
    ) -> None:
        self._channel = channel
        # Generated stubs are typed for gRPC's own channel; ours takes and returns the same messages.
        self.stub: Any = channel.stub(OrchestratorStub)
        """Stub of the COS, for calls that have no method here; make each through `call`."""
        self._run_id = run_id
        self._fingerprint = fingerprint
        self._retry = retry
        self._on_reach = on_reach or (lambda _: None)
        self.plan = wire.RunPlan()
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
        messages: list[wire.Participant] = []
        signed_for, roll = b"", None
        users = wire.ParticipantKind.PARTICIPANT_KIND_USER
        together = len(members) > 1 and all(member.kind == users for member in members)

        async def attempt() -> wire.RegisterResponse:
            nonlocal messages, signed_for, roll
            # The channel may show another certificate than at the attempt before.
            shown = self._fingerprint()
            if shown != signed_for:
                expiry = clocks.now() + _DELEGATION_S
                roll = self._roll(members, shown, expiry) if together else None
                messages = [
                    self._participant(member, shown, expiry, alone=roll is None) for member in members
                ]
                signed_for = shown
            response: wire.RegisterResponse = await self.stub.Register(requests())
            return response

        async def requests() -> AsyncIterator[wire.RegisterRequest]:
            intent = wire.RegisterIntent.REGISTER_INTENT_JOIN
            for first in range(0, len(messages), _BATCH):
                part = messages[first : first + _BATCH]
                said = None if first else own(FEATURES)
                yield wire.RegisterRequest(
                    run_id=self._run_id,
                    intent=intent,
                    participants=part,
                    protocol=said,
                    roll=None if first else roll,
                )
            for position, member in enumerate(members):
                for first in range(0, len(member.items), _ITEM_BATCH):
                    yield wire.RegisterRequest(
                        items=member.items[first : first + _ITEM_BATCH], items_of=position
                    )

        self._members = members
