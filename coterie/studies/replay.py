"""Replay of the COS's transcript of a rounds-based run, for attacks: yields the vectors that the server learned.

The replay passes the messages that the COS received, in order, through the state machine that the COS ran.  So an
attack gets each contribution of a clear sum as it came, and of masked and encrypted sums exactly those revealed.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from coterie.crypto.identity import participant_id
from coterie.errors import StoreError
from coterie.parties.key_records import record_from_wire
from coterie.privacy.payloads import Assembly
from coterie.privacy.transcript import TranscriptEntry, decode, message_class, read_transcript
from coterie.rounds import server_round as machine
from coterie.rounds.conductor import model_from_bytes
from coterie.rounds.privacy import privacy_of
from coterie.rounds.server_round import RoundState, SumPhase
from coterie.rounds.training import Purpose
from coterie.secure_sum.codes import codes_of
from coterie.secure_sum.contribution import Layout
from coterie.secure_sum.plan import SumPlan
from coterie.secure_sum.protocol import Failed, ServerHalf, Step
from coterie.secure_sum.registry import KEYED, keyring_of, server_half
from coterie.secure_sum.steps import STEP_OF_KIND
from coterie.wire.refusal import Refusal
from coterie.wire.v1 import rounds_pb2
from coterie.wire.v1.common_pb2 import SlotRange
from coterie.wire.v1.orchestrator_pb2 import (
    FetchResponse,
    RegisterRequest,
    RegisterResponse,
    RunPlan,
    SubmitRequest,
)
from coterie.wire.v1.thirdparty_pb2 import PaillierPublicKeyResponse, PaillierRecord

__all__ = ["NoiseRevealed", "Received", "Replay"]

_READ = (FetchResponse, PaillierPublicKeyResponse, RegisterRequest, RegisterResponse, SubmitRequest)

_ReadT = TypeVar("_ReadT")

_IN_CLEAR = ("clear", "denoised")
"""Sums whose contributions the server sees as they came."""

_LATER = 1e9
"""Time in seconds after which every step has exceeded its limit."""


@dataclass(frozen=True, eq=False)
class Received:
    """One vector that the server learned: a contribution in clear, or a revealed sum.

    Attributes
    ----------
    plan : SumPlan
        Plan of the vector's round.
    layout : Layout
        Layout of the vector.
    slots : tuple of int
        Slots of the users whose contributions the vector covers.
    codes : ndarray of uint32, shape (layout.size,)
    version : int
        Version of the model that the round trained, counted from 0 over the models of the replayed rounds.
    """

    plan: SumPlan
    layout: Layout
    slots: tuple[int, ...]
    codes: NDArray[np.uint32]
    version: int


@dataclass(frozen=True, eq=False)
class NoiseRevealed:
    """A sum of noise that a denoiser gave the server.

    Attributes
    ----------
    plan : SumPlan
        Plan of the round.
    slots : tuple of int
        Slots of those users of the group who submitted.
    steps : ndarray of int32, shape (layout.size,)
    """

    plan: SumPlan
    slots: tuple[int, ...]
    steps: NDArray[np.int32]


class Replay:
    """A rounds-based run as its COS saw it, read from transcripts.

    Parameters
    ----------
    transcripts : sequence of Path
        Transcripts of the COS, oldest first.
    plan : RunPlan
        Plan of the run.
    models : bool, optional
        Whether to keep the models that were sent as well.

    Raises
    ------
    StoreError
        A transcript is damaged.
    """

    def __init__(self, transcripts: Sequence[Path], plan: RunPlan, *, models: bool = False) -> None:
        self._plan = plan
        self._rounds: dict[int, _Round] = defaultdict(_Round)
        self._models: dict[bytes, bytes] | None = {} if models else None
        self._slots: dict[bytes, int] = {}
        self._keys: dict[bytes, PaillierRecord] = {}
        self._submitting, self._fetching = Assembly(), Assembly()
        self._registering: dict[str, list[bytes]] = defaultdict(list)
        for entry in itertools.chain.from_iterable(map(read_transcript, transcripts)):
            self._take(entry)

    def received(self, layout: Callable[[Purpose], Layout]) -> Iterator[Received]:
        """Yield the vectors of all rounds but evaluations, oldest round first.

        Parameters
        ----------
        layout : callable
            Returns the layout of a contribution for a purpose, without noise.

        Raises
        ------
        ConfigError
            Sums were encrypted, and gmpy2 is not installed.
        """
        if self._plan.secure_sum == "shared-key":
            # Under a shared key the server learns only the sums of evaluations.
            return
        terms = privacy_of(self._plan.rounds)
        half = self._half()
        versions: dict[bytes, int] = {}
        for number in sorted(self._rounds):
            one = self._rounds[number]
            if one.plan is None or one.plan.purpose == Purpose.EVALUATE.value:
                continue
            version = versions.setdefault(one.plan.model_sha256, len(versions))
            shape = layout(Purpose(one.plan.purpose))
            if terms.on:
                shape = terms.noisy(shape, self._plan.rounds.min_sum)
            if self._plan.secure_sum in _IN_CLEAR:
                for slots, (_, codes) in one.submitted(partial(codes_of, size=shape.size)):
                    yield Received(one.plan, shape, slots, codes, version)
                continue
            revealed = one.revealed(one.plan, shape, half, self._slots)
            if revealed is not None:
                yield Received(one.plan, shape, *revealed, version)

    def noise_sums(self) -> Iterator[NoiseRevealed]:
        """Yield the sums of noise of all rounds, oldest round first, one for each group of members."""
        for _, one in sorted(self._rounds.items()):
            if one.plan is None or not one.plan.noise_floor:
                continue
            groups, number = one.plan.denoisers.groups, _numbers(one.plan, self._slots)
            submitted: dict[int, list[int]] = defaultdict(list)
            for slots, _ in one.submitted(rounds_pb2.SummedVector.FromString):
                if slots[0] in number:
                    submitted[groups[number[slots[0]]]] += slots
            told: dict[int, bytes] = {}
            for step, _, message in one.messages:
                if step is Step.UNMASK:
                    with contextlib.suppress(DecodeError):
                        found = rounds_pb2.NoiseSums.FromString(message).sums
                        told |= {each.group: each.steps for each in found if not len(each.steps) % 4}
            for group, steps in sorted(told.items()):
                yield NoiseRevealed(one.plan, tuple(submitted[group]), np.frombuffer(steps, "<i4"))

    def places(self, layout: Layout) -> Iterator[tuple[tuple[int, ...], NDArray[np.bool_], int]]:
        """Yield the places that members of sparse sums declared, oldest round first, without refused messages.

        Parameters
        ----------
        layout : Layout
            Layout of a contribution to training.

        Yields
        ------
        slots : tuple of int
            Slots of the member's users.
        sent : ndarray of bool, shape (ciphertexts,)
            Which ciphertexts the member sent.
        each : int
            Number of values of the contribution in one ciphertext.

        Raises
        ------
        ConfigError
            gmpy2 is not installed.
        """
        sparse = [
            (one, one.plan)
            for _, one in sorted(self._rounds.items())
            if one.plan is not None and one.plan.sparse_floor
        ]
        if not sparse:
            return
        # Before the imports below: it raises a ConfigError with a hint when gmpy2 is missing.
        half = self._half()
        from coterie.secure_sum.encrypted import packing_of
        from coterie.secure_sum.sparse import unpack_places

        def told(message: bytes, count: int) -> NDArray[np.bool_]:
            return unpack_places(rounds_pb2.SummedVector.FromString(message).places, 1, count)

        for one, plan in sparse:
            try:
                packing = packing_of(plan, keyring_of(half).of(plan))
            except Failed:
                # The server never had this round's key, so the round came to nothing.
                continue
            for slots, (sent,) in one.submitted(partial(told, count=packing.ciphertexts(layout.size))):
                yield slots, sent, packing.slots

    def model(self, plan: SumPlan) -> dict[str, NDArray[np.float32]] | None:
        """Return the model that a round's members were sent; None when it was not kept or is not in the transcript."""
        payload = (self._models or {}).get(plan.model_sha256)
        return None if payload is None else model_from_bytes(payload)

    def _half(self) -> ServerHalf:
        half = server_half(self._plan.secure_sum)
        if self._plan.secure_sum in KEYED:
            from coterie.secure_sum.encrypted import EncryptedServer

            if isinstance(half, EncryptedServer):
                for message in self._keys.values():
                    half.keys.use(record_from_wire(message).key.as_stated(), ())
        return half

    # --- reading -----------------------------------------------------------------------------------------------------

    def _take(self, entry: TranscriptEntry) -> None:
        if message_class(entry) not in _READ:
            return
        try:
            message = decode(entry)
        except StoreError:
            return
        match message:
            case FetchResponse():
                self._take_sent(entry, message)
            case SubmitRequest():
                self._take_message(entry, message)
            case RegisterRequest():
                bundles = (each.bundle for each in message.participants)
                self._registering[entry.peer] += [participant_id(one.signing_public) for one in bundles]
            case RegisterResponse():
                slots = _slots_in(message.slots)
                self._slots.update(zip(self._registering.pop(entry.peer, []), slots, strict=False))
            case PaillierPublicKeyResponse() if message.HasField("record"):
                self._keys[message.record.key.modulus] = message.record

    def _take_message(self, entry: TranscriptEntry, message: SubmitRequest) -> None:
        """Record a member's message once all its chunks are there."""
        try:
            whole = self._submitting.add(entry, message, message.chunk)
        except DecodeError:
            return
        if whole is None or not isinstance(whole.first, SubmitRequest):
            return
        head = whole.first
        step = STEP_OF_KIND.get(head.kind)
        if step is not None:
            sent = (step, tuple(_slots_in(head.slots)), bytes(whole.data))
            self._rounds[head.round.round].messages.append(sent)

    def _take_sent(self, entry: TranscriptEntry, message: FetchResponse) -> None:
        """Record a plan or a model that the server sent, once all its chunks are there."""
        if not message.HasField("chunk"):
            return
        try:
            whole = self._fetching.add(entry, message, message.chunk)
        except DecodeError:
            return
        if whole is None:
            return
        data = bytes(whole.data)
        try:
            plan = rounds_pb2.SumPlan.FromString(data)
            # Bytes of other messages may parse as a plan; a real plan has no unknown fields.
            plan.DiscardUnknownFields()
            if plan.ByteSize() == len(data):
                self._rounds[plan.round].plan = SumPlan.from_wire(plan)
                return
        except (DecodeError, Refusal):
            pass
        if self._models is not None and (digest := hashlib.sha256(data).digest()) not in self._models:
            try:
                found = model_from_bytes(data)
            except (DecodeError, Refusal):
                return
            if found:
                self._models[digest] = data


@dataclass
class _Round:
    """One round of a transcript: the plan that the server sent, and the messages that it received, in order."""

    plan: SumPlan | None = None
    messages: list[tuple[Step, tuple[int, ...], bytes]] = field(default_factory=list)

    def submitted(self, read: Callable[[bytes], _ReadT]) -> Iterator[tuple[tuple[int, ...], _ReadT]]:
        """Yield slots and content of each contribution; for repeated slots, of the first that can be read."""
        seen: set[tuple[int, ...]] = set()
        for step, slots, message in self.messages:
            if step is Step.SUBMIT and slots and slots not in seen:
                try:
                    found = read(message)
                except (DecodeError, Refusal, ValueError):
                    # The server refused this message as well.
                    continue
                seen.add(slots)
                yield slots, found

    def revealed(
        self, plan: SumPlan, layout: Layout, half: ServerHalf, slot_of: dict[bytes, int]
    ) -> tuple[tuple[int, ...], NDArray[np.uint32]] | None:
        """Return the slots that the revealed sum covers, and the sum; None when none was revealed."""
        clock = itertools.count(_LATER, 2.0)
        speaks = _numbers(plan, slot_of)
        covered: dict[int, tuple[int, ...]] = {}
        heard: set[tuple[Step, int]] = set()
        try:
            state, _ = machine.advance(RoundState.begin(plan, layout, half, 1.0), machine.RoundOpened(0.0))
        except Failed:
            # The server never had this round's key, so the round came to nothing.
            return None
        total: NDArray[np.uint32] | None = None
        for step, slots, message in self.messages:
            member = next((speaks[slot] for slot in slots if slot in speaks), None)
            if member is None or (member < len(plan.members) and len(slots) != plan.members[member].users):
                continue
            try:
                member = half.answers_as(plan, member, step, message)
                arrived = _at(state, step, clock)
                said = machine.Arrived(member, step, message, 0.0)
                # A member's answer that was found wrong is not taken a second time.
                after = _after(arrived, said, None if (step, member) in heard else clock)
            except Refusal:
                # The server refused this message as well, so it does not show that a step was closed.
                continue
            state = after
            heard.add((step, member))
            if member < len(plan.members):
                covered[member] = slots
            state, total = _unmasked(state, clock)
            if total is not None:
                break
        if total is None and state.phase is SumPhase.COLLECT and state.step is half.steps[-1]:
            state, _ = machine.advance(state, machine.Tick(next(clock)))
            state, total = _unmasked(state, clock)
        if total is None:
            return None
        return tuple(slot for one in state.submitters for slot in covered[one]), total


def _at(state: RoundState, step: Step, clock: Iterator[float]) -> RoundState:
    """Return the state at a step, with earlier steps closed by time, as the server's clock closed them."""
    steps = state.half.steps
    while state.phase is SumPhase.COLLECT and steps.index(state.step) < steps.index(step):
        state, _ = machine.advance(state, machine.Tick(next(clock)))
    return state


def _after(state: RoundState, arrived: machine.Arrived, clock: Iterator[float] | None) -> RoundState:
    """Return the state after a message, letting time pass where the server must have asked other key holders.

    Raises
    ------
    Refusal
        The server cannot have taken the message.
    """
    while True:
        try:
            return machine.advance(state, arrived)[0]
        except Refusal:
            if clock is None or not state.step is arrived.step is Step.DECRYPT:
                raise
            # The server asked other holders in place of those that did not answer, as long as there were any.
            later, _ = machine.advance(state, machine.Tick(next(clock)))
            if later.phase is not SumPhase.COLLECT or later.expected == state.expected:
                raise
            state = later


def _unmasked(state: RoundState, clock: Iterator[float]) -> tuple[RoundState, NDArray[np.uint32] | None]:
    """Return the state and the unmasked sum; None while the sum is incomplete or when unmasking failed."""
    if state.phase is not SumPhase.UNMASK or state.running is None:
        return state, None
    try:
        return state, state.half.unmask(state.plan, state.closed, state.running).codes
    except Failed as failed:
        return machine.advance(state, machine.UnmaskFailed(str(failed), next(clock), failed.wrong))[0], None


def _numbers(plan: SumPlan, slot_of: dict[bytes, int]) -> dict[int, int]:
    """Return the member or respondent number for which each slot answers, by slot."""
    numbers = {one.participant: number for number, one in enumerate(plan.members)}
    for holder, one in enumerate(plan.holders):
        numbers[one.participant] = plan.respondent(holder, holder)
    return {slot_of[each]: number for each, number in numbers.items() if each in slot_of}


def _slots_in(ranges: Iterable[SlotRange]) -> list[int]:
    return [slot for one in ranges for slot in range(one.first, one.first + one.count)]
