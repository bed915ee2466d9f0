"""Answer parties' calls to the COS: check them, pass them to the run, reply."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import structlog
from google.protobuf.message import Message

from coterie.crypto import clocks
from coterie.crypto.authority import PeerIdentity, logical_name
from coterie.crypto.identity import Bundle, Delegation
from coterie.crypto.roll import RollDelegation
from coterie.crypto.transparency import BUNDLE, bundle_statement, entry_leaf
from coterie.errors import CryptoError, PeerError
from coterie.net.server import current_peer
from coterie.net.uncancelled import completed
from coterie.rounds.plan_features import check_party
from coterie.rounds.plan_hash import plan_hash
from coterie.secure_sum.bundles import bundle_from_wire
from coterie.store import cos as store
from coterie.telemetry.accounting import Accounting
from coterie.wire.chunks import CHUNK_BYTES, Assembler, split
from coterie.wire.pieces import pieces_of_stream
from coterie.wire.refusal import ErrorReason, Refusal
from coterie.wire.v1 import orchestrator_pb2 as wire
from coterie.wire.v1.common_pb2 import Protocol
from coterie.wire.v1.common_pb2 import RollDelegation as RollMessage
from coterie.wire.v1.orchestrator_pb2_grpc import OrchestratorServicer
from coterie.wire.versions import NEWEST, UnsupportedVersionError, agree_on_newest, own, release_of
from coterie_cos.drift.exchange import AsynchronousCalls
from coterie_cos.participants import Roll, ranges
from coterie_cos.run import Run

__all__ = ["HeldPoll", "Orchestrator"]

_log = structlog.get_logger("coterie.cos")

_MAX_PARTICIPANTS = 1000
_MAX_ITEMS = 20_000
_FEW = 32
"""Participants of a message whose signatures take less time than to ask the third party for a proof."""
_LOG_S = 5.0
"""Longest wait for a proof that bundles are in the third party's log, seconds."""
_MOST_REGISTRATIONS = 20
"""Registrations of a party without a poll between them after which the operator is told."""
_HELD = (wire.FetchKind.FETCH_KIND_MODEL, wire.FetchKind.FETCH_KIND_OPEN_ITEMS)
"""Payloads that parties keep from round to round, the same for all parties."""
_HASHED = (
    wire.FetchKind.FETCH_KIND_POPULATION,
    wire.FetchKind.FETCH_KIND_OUTLINE,
    wire.FetchKind.FETCH_KIND_COHORT,
    *_HELD,
)
"""Payloads whose hash is remembered: the same bytes for all parties that fetch them."""
_SHARED = (wire.FetchKind.FETCH_KIND_SUM_PLAN, *_HELD)
"""Payloads of a round that are the same for all parties."""
_SHARED_LAST, _SHARED_RUNS = 2, 16
"""Payloads of a kind and a run that intakes may ask for by their hash; runs that have such payloads."""

_ALIKE_MOST = 16
"""Most sets of payloads that answers of a run name alike."""

M = TypeVar("M", bound=Message)


class HeldPoll(NamedTuple):
    """The answer to a poll that an intake holds."""

    answer: wire.PollResponse
    alike: wire.PollResponse | None
    """What the answer names besides, attached without bytes: the same object for all parties that are told the same."""


def _kinds(role: str, secure_sum: str) -> tuple[wire.ParticipantKind.ValueType, ...]:
    """Return the kinds of participants for which a role may speak."""
    kinds = wire.ParticipantKind
    if secure_sum == "shared-key" and role in ("client", "decrypting-client"):
        both = (kinds.PARTICIPANT_KIND_USER, kinds.PARTICIPANT_KIND_KEY_HOLDER)
        return both if role == "client" else ()
    return (
        {
            "client": kinds.PARTICIPANT_KIND_USER,
            "data-owner": kinds.PARTICIPANT_KIND_DATA_OWNER,
            "decrypting-client": kinds.PARTICIPANT_KIND_KEY_HOLDER,
        }[role],
    )


class Orchestrator(OrchestratorServicer):
    """The gRPC servicer that client hosts, data owners and decrypting clients call.

    Parameters
    ----------
    find : callable
        Returns a run by id, or raises a Refusal.
    directory_key : bytes
        The directory's Ed25519 public key; every bundle must carry its countersignature.
    revoked : callable
        Tells whether a participant is revoked.
    among : callable
        Returns which leaves are shown to be in the third party's log.
    accounting : Accounting
        Counts CPU time by activity.
    max_uploads, max_payload : int
        Most uploads at once; most bytes of one item.
    stopping : asyncio.Event
        Set when this process stops.
    """

    def __init__(
        self,
        find: Callable[[str], Run],
        directory_key: bytes,
        revoked: Callable[[bytes], bool],
        among: Callable[[Sequence[bytes]], Awaitable[frozenset[bytes]]],
        accounting: Accounting,
        *,
        max_uploads: int,
        max_payload: int,
        stopping: asyncio.Event,
    ) -> None:
        self._find = find
        self._directory_key = directory_key
        self._revoked = revoked
        self._among = among
        self._accounting = accounting
        self._uploads = asyncio.Semaphore(max_uploads)
        self._max_payload = max_payload
        self._hashed: dict[int, tuple[bytes, bytes]] = {}
        # Payloads that held polls were told of by their hash, by run and kind: the last ones.
        self._shared: dict[tuple[str, int], dict[bytes, bytes]] = {}
        # What answers to held polls name alike.
        self._told_alike: WeakKeyDictionary[Run, dict[tuple[Any, ...], wire.PollResponse]] = (
            WeakKeyDictionary()
        )
        self._asynchronous = AsynchronousCalls(accounting)
        self._stopping = stopping

    # --- Register ----------------------------------------------------------------------------------------------

    async def Register(  # noqa: N802 - the contract's name
        self, request_iterator: AsyncIterator[wire.RegisterRequest], context: Any
    ) -> wire.RegisterResponse:
        """Register a party's participants and data owners' items, or take the party's leave."""
        roll = Roll()
        try:
            return await self._register(request_iterator, roll)
        finally:
            if not roll.joining:
                roll.close()

    async def _register(
        self, request_iterator: AsyncIterator[wire.RegisterRequest], roll: Roll
    ) -> wire.RegisterResponse:
        peer = current_peer()
        run: Run | None = None
        intent = wire.RegisterIntent.REGISTER_INTENT_UNSPECIFIED
        items: dict[int, list[str]] = {}
        claim = RollMessage()
        async for request in request_iterator:
            if run is None:
                run, intent = self._find(request.run_id), request.intent
                if intent != wire.RegisterIntent.REGISTER_INTENT_LEAVE:
                    _check_version(peer, request.protocol, run)
            if len(request.participants) > _MAX_PARTICIPANTS or len(request.items) > _MAX_ITEMS:
                raise Refusal(
                    ErrorReason.ERROR_REASON_TOO_LARGE,
                    f"{len(request.participants)} participants and {len(request.items)} items in one message",
                    field="participants",
                    expected=f"at most {_MAX_PARTICIPANTS} and {_MAX_ITEMS}",
                )
            if roll.tree is None and request.HasField("roll") and not roll.participants:
                roll.begin_tree()
                claim = request.roll
            shown = await self._shown(run, request.participants, roll)
            await asyncio.to_thread(self._check, run, peer, request.participants, roll, shown)
            if request.items:
                items.setdefault(request.items_of, []).extend(request.items)
        if run is None:
            raise Refusal(ErrorReason.ERROR_REASON_INVALID_FIELD, "an empty registration", field="run_id")
        if roll.tree is not None and roll.participants:
            _check_roll(run, peer, claim, roll)
        party = str(peer)
        if intent == wire.RegisterIntent.REGISTER_INTENT_LEAVE:
            slots = run.registry.slots_of(party)
            if not slots:
                raise _not_registered(party)
            await completed(run.left(party))
        elif intent == wire.RegisterIntent.REGISTER_INTENT_JOIN:
            # From here on the registration completes even if the caller is gone.
            roll.joining = True
            slots = await completed(self._join(run, party, roll, items))
            _look_for_another_plan(party, run)
        else:
            raise Refusal(
                ErrorReason.ERROR_REASON_INVALID_FIELD, "no intent", field="intent", expected="JOIN or LEAVE"
            )
        return wire.RegisterResponse(
            slots=ranges(slots),
            plan=run.plan,
            plan_hash=plan_hash(run.plan),
            plan_signature=run.request.plan_signature,
            protocol=own(),
        )

    async def _shown(
        self, run: Run, messages: Sequence[wire.Participant], roll: Roll
    ) -> Sequence[bool] | None:
        """Return which bundles of a host's roll are shown to be in the third party's log; None without looking.

        A proof for all of them takes the place of two signatures of each.
        """
        if roll.tree is None or len(messages) < _FEW or roll.without_log:
            return None
        leaves = await asyncio.to_thread(_leaves, messages)
        try:
            async with asyncio.timeout(_LOG_S):
                found = await self._among(list(dict.fromkeys(leaf for leaf in leaves if leaf)))
        except (PeerError, CryptoError, TimeoutError) as error:
            # The signatures say the same, and take more time.
            roll.without_log = True
            _log.warning(
                "a roll is checked by its signatures", run=run.plan.run_id, because=str(error) or "no answer"
            )
            return None
        return [leaf in found for leaf in leaves]

    def _check(
        self,
        run: Run,
        peer: PeerIdentity,
        messages: Sequence[wire.Participant],
        roll: Roll,
        shown: Sequence[bool] | None,
    ) -> None:
        kinds, party, now = _kinds(peer.role, run.plan.secure_sum), str(peer), clocks.now()
        with self._accounting.activity("signatures", len(messages)):
            for position, message in enumerate(messages):
                bundle = self._bundle(
                    party, kinds, message, now, logged=shown is not None and shown[position]
                )
                if roll.tree is None:
                    _check_delegation(run, peer, bundle, message, now)
                self._check_participant(peer, bundle, message)
                if not roll.takes(message):
                    raise Refusal(
                        ErrorReason.ERROR_REASON_INVALID_FIELD,
                        "users and others in one registration",
                        field="participants.kind",
                        expected="a registration of each",
                    )
                roll.add(bundle, message)

    def _bundle(
        self,
        party: str,
        kinds: Sequence[wire.ParticipantKind.ValueType],
        message: wire.Participant,
        now: int,
        *,
        logged: bool,
    ) -> Bundle:
        """Return the verified bundle of a participant, which the caller enrolled; ``logged`` as `_shown` found it."""
        if message.kind not in kinds:
            raise Refusal(
                ErrorReason.ERROR_REASON_INVALID_FIELD,
                f"a {party.partition('/')[0]} may not register this kind of participant",
                field="participants.kind",
                expected=" or ".join(map(wire.ParticipantKind.Name, kinds)) or "nobody in such a run",
            )
        try:
            bundle: Bundle = bundle_from_wire(message.bundle)
            if logged:
                bundle.check_logged(now)
            else:
                bundle.verify(self._directory_key, now)
            bundle.require_party(party)
        except CryptoError as error:
            raise _unsigned(error) from error
        return bundle

    def _check_participant(self, peer: PeerIdentity, bundle: Bundle, message: wire.Participant) -> None:
        if self._revoked(bundle.participant_id):
            raise Refusal(
                ErrorReason.ERROR_REASON_REVOKED, "a participant was revoked", field="participants.bundle"
            )
        if peer.role == "data-owner" and not (message.name and message.address and message.tls_name):
            raise Refusal(
                ErrorReason.ERROR_REASON_INVALID_FIELD,
                "a data owner without name or address",
                field="participants.address",
                expected=f"name, host:port, and a TLS name such as {logical_name(peer.role, peer.name)}",
            )
        if peer.role != "data-owner" and (message.name or message.address or message.tls_name):
            raise Refusal(
                ErrorReason.ERROR_REASON_INVALID_FIELD,
                f"a participant of a {peer.role} with a name or an address",
                field="participants.name",
                expected="empty: only data owners have a name and an address",
            )

    async def _join(
        self,
        run: Run,
        party: str,
        roll: Roll,
        items: dict[int, list[str]],
    ) -> list[int]:
        with contextlib.closing(roll):
            return await self._join_all(run, party, roll, items)

    async def _join_all(self, run: Run, party: str, roll: Roll, items: dict[int, list[str]]) -> list[int]:
        if not roll.participants or any(position >= len(roll.participants) for position in items):
            raise Refusal(
                ErrorReason.ERROR_REASON_INVALID_FIELD,
                "a registration without participants, or items of none of them",
                field="items_of",
                expected="the position of a participant of this registration",
            )
        # Some databases take no NUL in text.
        keyless = any(not key or "\0" in key for keys in items.values() for key in keys)
        if keyless or not items.keys() <= roll.owners.keys():
            raise Refusal(
                ErrorReason.ERROR_REASON_INVALID_FIELD,
                "an item without a key, with NUL in its key, or of a participant that is no data owner",
                field="items",
                expected="keys of items that data owners hold",
            )
        registry = run.registry
        before = len(registry.by_slot)
        slots = registry.add(party, roll.participants, roll.owners, roll.holders)
        catalogue_changed = False
        new: list[tuple[list[str], int]] = []
        holdings: list[tuple[int, bytes]] = []
        for position, keys in sorted(items.items()):
            indices, fresh, first = registry.add_items(keys)
            slot = slots[position]
            # Make a new catalogue even if it is the same: an owner that registers again has restarted, perhaps from a
            # backup, and hosts then check that it still has the records that they sent.
            catalogue_changed = True
            registry.hold(slot, indices)
            new.append((fresh, first))
            holdings.append((slot, indices.tobytes()))
        run_id = run.plan.run_id

        def write(connection: Any) -> None:
            for rows in roll.rows(slots, party):
                store.save_participants(connection, run_id, rows)
            for fresh, first in new:
                store.save_items(connection, run_id, fresh, first)
            for slot, held in holdings:
                store.save_holding(connection, run_id, slot, held)

        with run.writing():
            await run.term.run(write)
        more = len(registry.by_slot) > before
        await run.joined(party, catalogue=catalogue_changed, more=more)
        return slots

    # --- Poll, Fetch -------------------------------------------------------------------------------------------

    async def Poll(self, request: wire.PollRequest, context: Any) -> wire.PollResponse:  # noqa: N802
        """Return the open tasks, once they are newer than the cursor or the hold is over."""
        return await self._poll(request, submitted=False)

    async def held(self, request: wire.PollRequest, *, submitted: bool) -> HeldPoll:
        """Answer a poll that an intake holds; what many parties are told is named by its hash, for `shared`.

        Parameters
        ----------
        request : PollRequest
        submitted : bool
            Whether the poll ended a submission, whose items the intake has taken.
        """
        run, party = await self._ready(request, submitted=submitted)
        with run.charged("Poll", party):
            answer = await self._answer(run, party, request)
            alike = None
            if request.attach:
                role = current_peer().role
                for task in answer.tasks:
                    if task.kind == wire.TaskKind.TASK_KIND_ROUND:
                        self._attach(answer, CHUNK_BYTES, run, party, role, request, _own_fetches(run, task))
                        alike = self._alike(run, party, role, request, task)
            return HeldPoll(answer, alike)

    async def _poll(self, request: wire.PollRequest, *, submitted: bool) -> wire.PollResponse:
        run, party = await self._ready(request, submitted=submitted)
        with run.charged("Poll", party):
            return await self._polled(run, party, request)

    async def _ready(self, request: wire.PollRequest, *, submitted: bool) -> tuple[Run, str]:
        run, party = await self._known(request.run_id)
        if submitted:
            await run.gather()
            run.answered(party, request.cursor)
        return run, party

    async def heard(self, run_id: str) -> None:
        """Note that the caller is alive in a run, which it must have registered for."""
        await self._known(run_id)

    def shared(self, run_id: str, kind: wire.FetchKind.ValueType, sha256: bytes) -> bytes:
        """Return a payload that an answer to a held poll named by its hash.

        Raises
        ------
        Refusal
            STALE when it is not one of the last ones.
        """
        payload = self._shared.get((run_id, kind), {}).get(sha256)
        if payload is None:
            raise Refusal(
                ErrorReason.ERROR_REASON_STALE,
                "the payload is not one of the last ones of the run",
                field="sha256",
                expected="a hash of a present answer",
            )
        return payload

    async def _answer(self, run: Run, party: str, request: wire.PollRequest) -> wire.PollResponse:
        agree_on_newest(party, request.newest_protocol, lowest=run.lowest_protocol)
        hold_s, checks_in = request.hold_ms / 1e3, request.checks_in
        response = await run.poll(party, request.cursor, hold_s, checks_in=checks_in)
        response.newest_protocol = NEWEST
        return response

    async def _polled(self, run: Run, party: str, request: wire.PollRequest) -> wire.PollResponse:
        response = await self._answer(run, party, request)
        if request.attach:
            role, left = current_peer().role, CHUNK_BYTES
            for task in response.tasks:
                if task.kind == wire.TaskKind.TASK_KIND_ROUND:
                    fetches = [] if request.round == task.round.round else _shared_fetches(task)
                    fetches += _own_fetches(run, task)
                    left = self._attach(response, left, run, party, role, request, fetches)
        return response

    def _alike(
        self, run: Run, party: str, role: str, request: wire.PollRequest, task: wire.Task
    ) -> wire.PollResponse:
        """Return what all parties of a role that are asked in a round are told of, by its hash.

        It is the same object for them, made again whenever tasks may have changed.
        """
        key = run.revision, run.version, role, task.round.round, task.version, tuple(request.attach)
        made = self._told_alike.setdefault(run, {})
        if key not in made:
            if len(made) >= _ALIKE_MOST:
                made.clear()
            made[key] = found = wire.PollResponse()
            for fetch in _shared_fetches(task):
                if fetch.kind not in request.attach:
                    continue
                try:
                    version, payload = run.payload(party, role, fetch)
                except Refusal:
                    # Perhaps not to the next one.
                    made.pop(key, None)
                    continue
                sha256 = self._named(run.plan.run_id, fetch.kind, payload)
                named = wire.FetchResponse(version=version, sha256=sha256, total_bytes=len(payload))
                found.attached.add(request=fetch, response=named)
            return found
        return made[key]

    def _attach(
        self,
        answer: wire.PollResponse,
        left: int,
        run: Run,
        party: str,
        role: str,
        request: wire.PollRequest,
        fetches: Sequence[wire.FetchRequest],
    ) -> int:
        """Attach the payloads that a party would fetch for a step of a round, of the kinds that it asks for.

        Payloads that the party may not fetch, or that do not fit, are omitted.  Returns the bytes left.
        """
        for fetch in fetches:
            if fetch.kind not in request.attach:
                continue
            with contextlib.suppress(Refusal):
                version, payload = run.payload(party, role, fetch)
                response = wire.FetchResponse(version=version)
                if fetch.kind in _HELD:
                    response.sha256 = self._sha256(fetch.kind, payload)
                if response.sha256 and response.sha256 in request.held_sha256:
                    response.unchanged = True
                elif len(payload) <= left:
                    left -= len(payload)
                    response.total_bytes = len(payload)
                    response.chunk.data, response.chunk.last = payload, True
                else:
                    continue
                answer.attached.add(request=fetch, response=response)
        return left

    def _sha256(self, kind: wire.FetchKind.ValueType, payload: bytes) -> bytes:
        """Return the hash of a payload, cached for payloads that all parties fetch."""
        hashed = self._hashed.get(kind)
        if hashed is None or hashed[0] is not payload:
            hashed = payload, hashlib.sha256(payload).digest()
            if kind in _HASHED:
                self._hashed[kind] = hashed
        return hashed[1]

    def _named(self, run_id: str, kind: wire.FetchKind.ValueType, payload: bytes) -> bytes:
        """Return the hash of a payload that intakes may ask for by it."""
        last = self._shared.setdefault((run_id, kind), {})
        for sha256, known in last.items():
            if known is payload:
                return sha256
        sha256 = hashlib.sha256(payload).digest()
        last.pop(sha256, None)
        if len(last) >= _SHARED_LAST:
            del last[next(iter(last))]
        last[sha256] = payload
        if len(self._shared) > _SHARED_RUNS * len(_SHARED):
            del self._shared[next(iter(self._shared))]
        return sha256

    async def _known(self, run_id: str) -> tuple[Run, str]:
        run, party = self._find(run_id), str(current_peer())
        if not run.registry.slots_of(party):
            raise _not_registered(party)
        if run.heard(party):
            await completed(run.returned(party))
        return run, party

    async def Fetch(  # noqa: N802
        self, request: wire.FetchRequest, context: Any
    ) -> AsyncIterator[wire.FetchResponse]:
        """Stream a payload, such as the model, the catalogue or the roster."""
        run, party = await self._known(request.run_id)
        # A store that is away is no fault of the run.
        await run.read(request)
        with run.charged("Fetch", party):
            version, payload = run.payload(party, current_peer().role, request)
        sha256 = self._sha256(request.kind, payload)
        head = wire.FetchResponse(sha256=sha256, version=version, total_bytes=len(payload))
        if sha256 == request.held_sha256:
            head.unchanged = True
            yield head
            return
        for chunk in split(payload):
            head.chunk.CopyFrom(chunk)
            yield head
            head = wire.FetchResponse()

    # --- Submit ------------------------------------------------------------------------------------------------

    async def Submit(  # noqa: N802
        self, request_iterator: AsyncIterator[wire.SubmitRequest], context: Any
    ) -> wire.SubmitResponse:
        """Take items one after the other; each is accepted or refused independently of the others."""
        response = wire.SubmitResponse()
        index = 0
        head: wire.SubmitRequest | None = None
        assembler = Assembler(self._max_payload)
        poll: wire.PollRequest | None = None
        async with self._uploads:
            async for request in pieces_of_stream(request_iterator):
                if index == 0 and request.HasField("poll"):
                    poll = request.poll
                    if not request.HasField("chunk"):
                        # An intake took the items.
                        continue
                if head is None:
                    head, assembler = request, Assembler(self._max_payload)
                assembler.add(request.chunk)
                if not assembler.complete:
                    continue
                try:
                    await self._item(head, assembler.payload(head.sha256, optional=True))
                    response.accepted += 1
                except Refusal as refusal:
                    refused = wire.RefusedItem(index=index, reason=refusal.reason, message=refusal.message)
                    response.refused.append(refused)
                index, head = index + 1, None
        if head is not None:
            # Raises, because the last item is incomplete.
            assembler.payload(head.sha256)
        if poll is not None:
            response.next.CopyFrom(await self._poll(poll, submitted=True))
        return response

    async def _item(self, head: wire.SubmitRequest, payload: bytes) -> None:
        run, party = await self._known(head.round.run_id)
        slots = run.registry.own_slots(party, head.slots, owner=current_peer().role == "data-owner")
        with run.charged("Submit", party):
            # Nothing can cancel what waits for nothing; the rest completes even if the caller is gone.
            if not run.submitted_at_once(party, head, slots, payload):
                await completed(run.submitted(party, head, slots, payload))

    # --- calls of the asynchronous driver ----------------------------------------------------------------------

    async def Exchange(self, request: wire.ExchangeRequest, context: Any) -> wire.ExchangeResponse:  # noqa: N802
        """Apply an owner's gradient, if any, and return the rows for its next one (DRIFT, published form)."""
        run, party = await self._known(request.run_id)
        return await self._asynchronous.exchange(run, party, request)

    async def ExchangeMany(  # noqa: N802
        self, request_iterator: AsyncIterator[wire.ExchangeManyRequest], context: Any
    ) -> AsyncIterator[wire.ExchangeManyResponse]:
        """Make the exchanges of a party's owners, several a message, as `Exchange` makes one."""
        async for request in request_iterator:
            yield await self._asynchronous.exchange_many(self._known, request.exchanges)
            if self._stopping.is_set():
                # The party goes on at the next process; this one would wait for the call's end.
                return

    async def Recommend(self, request: wire.RecommendRequest, context: Any) -> wire.RecommendResponse:  # noqa: N802
        """Return the best items by the user's factors; the client filters out seen items (DRIFT, published form)."""
        run, party = await self._known(request.run_id)
        return self._asynchronous.recommend(run, party, request)


def _shared_fetches(task: wire.Task) -> list[wire.FetchRequest]:
    """Return how a party fetches what is the same for many in a round."""
    return [
        wire.FetchRequest(kind=wire.FetchKind.FETCH_KIND_SUM_PLAN, version=task.round.round),
        wire.FetchRequest(kind=wire.FetchKind.FETCH_KIND_OPEN_ITEMS),
        wire.FetchRequest(kind=wire.FetchKind.FETCH_KIND_MODEL, version=task.version),
    ]


def _own_fetches(run: Run, task: wire.Task) -> list[wire.FetchRequest]:
    """Return how a party fetches what is its own in a step of a round."""
    if run.plan.secure_sum == "clear" or task.step == wire.RoundStep.ROUND_STEP_ADVERTISE:
        return []
    kind = wire.FetchKind.FETCH_KIND_BRIEFINGS
    return [wire.FetchRequest(kind=kind, version=task.round.round, step=task.step)]


def _leaves(messages: Sequence[wire.Participant]) -> list[bytes]:
    """Return the leaves of bundles in the third party's log; nothing for a bundle that it cannot have."""
    found: list[bytes] = []
    for message in messages:
        try:
            found.append(entry_leaf(BUNDLE, bundle_statement(bundle_from_wire(message.bundle))))
        except (CryptoError, Refusal):
            # The check of the signatures refuses it by name.
            found.append(b"")
    return found


def _check_delegation(
    run: Run, peer: PeerIdentity, bundle: Bundle, message: wire.Participant, now: int
) -> None:
    claim = message.delegation
    try:
        Delegation(claim.certificate_fingerprint, claim.run_id, claim.expiry, claim.signature).verify(
            bundle.signing_public, peer.fingerprint, run.plan.run_id, now
        )
    except CryptoError as error:
        raise _unsigned(error) from error


def _check_roll(run: Run, peer: PeerIdentity, claim: RollMessage, roll: Roll) -> None:
    """Check that the first user of a roll signed it, with exactly the users that came.

    Raises
    ------
    Refusal
        BAD_SIGNATURE.
    """
    if roll.tree is None:
        raise AssertionError("participants that delegate one by one are no roll")
    signed = RollDelegation(
        claim.certificate_fingerprint, claim.run_id, claim.expiry, claim.root, claim.size, claim.signature
    )
    try:
        signed.verify(roll.first_public, peer.fingerprint, run.plan.run_id, clocks.now(), roll.tree)
    except CryptoError as error:
        raise _unsigned(error) from error


def _unsigned(error: CryptoError) -> Refusal:
    return Refusal(
        ErrorReason.ERROR_REASON_BAD_SIGNATURE,
        error.message,
        field="participants",
        expected="a countersigned bundle, and its signature over this certificate and run",
    )


def _check_version(peer: PeerIdentity, said: Protocol, run: Run) -> None:
    """Check that a party that registers speaks a version of this server's, and can do what the plan asks for.

    Raises
    ------
    UnsupportedVersionError
        The message says what to upgrade; it is in this server's log, too.
    """
    party, run_id = str(peer), run.plan.run_id
    try:
        protocol = check_party(party, said, run.plan)
    except UnsupportedVersionError as refusal:
        _log.warning("a party cannot join", run=run_id, party=party, error=str(refusal))
        run.unfit(party, refusal.message)
        raise
    _log.info(
        "a party registers", run=run_id, party=party, protocol=protocol, release=release_of(said) or None
    )


def _look_for_another_plan(party: str, run: Run) -> None:
    """Tell the operator of a party that registers again and again, and never asks for tasks.

    Parties of releases before version 2 of the protocol do so, without a word, when they compute another hash of the
    plan than this server.
    """
    times = run.registered(party)
    if times < _MOST_REGISTRATIONS:
        return
    why = (
        f"{party} has registered {_MOST_REGISTRATIONS} times and takes no part: it ends each time, or its release "
        "reads the plan otherwise"
    )
    if times == _MOST_REGISTRATIONS:
        _log.warning("a party registers again and again", run=run.plan.run_id, party=party, hint=why)
    run.unfit(party, why)


def _not_registered(party: str) -> Refusal:
    return Refusal(
        ErrorReason.ERROR_REASON_UNKNOWN_PARTICIPANT,
        f"{party} is not registered for this run",
        field="run_id",
        expected="a registration first",
    )
