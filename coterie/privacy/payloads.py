"""The chunked payloads of ``Fetch`` and ``Submit`` in a transcript, reassembled and classified by kind of datum.

A payload of ``Submit`` names its kind; what a contribution shows depends on the plan of its sum and on the number of
users that it covers.  An answer of ``Fetch`` does not repeat the request: it is read as each kind that the peer has
asked for and that it parses as, and where no request was recorded, as every kind that it parses as.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple, TypeVar

from google.protobuf.message import DecodeError, Message

from coterie.crypto.beacon import BEACON_BYTES
from coterie.privacy.fields import UNCLASSIFIED, kinds_in, reachable_kinds
from coterie.privacy.transcript import TranscriptEntry
from coterie.wire.v1.common_pb2 import Chunk, DType, Population, Tensor, Waves
from coterie.wire.v1.orchestrator_pb2 import (
    Briefings,
    Catalogue,
    FetchKind,
    FetchRequest,
    FetchResponse,
    ItemFactors,
    MetricSums,
    Model,
    SubmitKind,
    SubmitRequest,
)
from coterie.wire.v1.rounds_pb2 import (
    Advert,
    Adverts,
    AppliedSum,
    ApplyTask,
    Confirmation,
    Confirmations,
    Decryption,
    DecryptionTask,
    NoiseInbox,
    NoiseSums,
    NoiseTask,
    OpenedNoise,
    SealedModel,
    ShareInbox,
    Shares,
    Submitters,
    SummedVector,
    SumPlan,
    Unmasking,
)
from coterie.wire.v1.thirdparty_pb2 import (
    CommitPopulationRequest,
    ExtendPopulationRequest,
    SignedWavesResponse,
)

__all__ = ["CARRIERS", "Assembly", "CarriedPayloads", "Payloads"]

CARRIERS = (
    FetchRequest,
    FetchResponse,
    SubmitRequest,
    CommitPopulationRequest,
    ExtendPopulationRequest,
    SignedWavesResponse,
)
"""Messages that carry payloads in chunks, or announce them."""

_LABELLED = {
    SubmitKind.SUBMIT_KIND_DELIVERED: "record_count",
    SubmitKind.SUBMIT_KIND_EPOCH_DONE: "block_count",
    SubmitKind.SUBMIT_KIND_METRICS: "metric_sum",
    SubmitKind.SUBMIT_KIND_VISITS: "visit_count",
    SubmitKind.SUBMIT_KIND_DECLINED: "cohort",
}
"""Kinds of datum of the ``Submit`` items that their label determines."""

_STEPS: Mapping[SubmitKind.ValueType, type[Message]] = {
    SubmitKind.SUBMIT_KIND_ADVERT: Advert,
    SubmitKind.SUBMIT_KIND_SHARES: Shares,
    SubmitKind.SUBMIT_KIND_CONFIRMATION: Confirmation,
    SubmitKind.SUBMIT_KIND_UNMASKING: Unmasking,
    SubmitKind.SUBMIT_KIND_DECRYPTION: Decryption,
    SubmitKind.SUBMIT_KIND_ITEM_FACTORS: ItemFactors,
}
"""Messages of a round's steps, whose fields determine the kinds of datum; contributions are not among them."""

_OF_DENOISERS: Mapping[SubmitKind.ValueType, type[Message]] = {
    SubmitKind.SUBMIT_KIND_CONFIRMATION: OpenedNoise,
    SubmitKind.SUBMIT_KIND_UNMASKING: NoiseSums,
}
"""Messages of denoisers, which answer the steps of others."""

_REVEALING = (SubmitKind.SUBMIT_KIND_UNMASKING, SubmitKind.SUBMIT_KIND_DECRYPTION)
"""Payloads that reveal a sum."""

_IN_CLEAR: Mapping[str, Mapping[bool, frozenset[str]]] = {
    "train": {
        True: frozenset({"user_update", "user_metric"}),
        False: frozenset({"host_update", "metric_sum"}),
    },
    "evaluate": {True: frozenset({"user_metric"}), False: frozenset({"metric_sum"})},
    "supports": {True: frozenset({"user_items"}), False: frozenset({"host_items"})},
    # The members are data owners, so that each contribution covers one.
    "window": {True: frozenset({"window_vector"}), False: frozenset({"window_vector"})},
}
"""Kinds of datum in a contribution in clear, by purpose of its sum and whether it covers one user."""

_SUMS = {"train": "round_sum", "evaluate": "round_sum", "supports": "item_support", "window": "round_sum"}
"""Kind of datum that the party that forms a sum learns, by the sum's purpose."""

_PARTICIPANT_BYTES = _KEY_ID_BYTES = 32
_SIGNATURE_BYTES = 64
_SEALED_BYTES = 81

_Round = tuple[str, int]
"""A run and the number of a round in it."""


class _Contribution(NamedTuple):
    round: _Round
    one_user: bool
    signed: bool
    encrypted: bool


class Whole(NamedTuple):
    """A payload and the message that began it."""

    first: Message
    data: bytearray


class Assembly:
    """Reassembles payloads from chunks; the chunks' offsets tell concurrent calls apart."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, str], list[Whole]] = defaultdict(list)

    def add(self, entry: TranscriptEntry, message: Message, chunk: Chunk) -> Whole | None:
        """Take the next chunk; return the payload that it completes.

        Raises
        ------
        DecodeError
            When the chunk continues nothing.
        """
        payloads = self._open[entry.peer, entry.direction]
        if chunk.offset == 0:
            found = Whole(message, bytearray())
            payloads.append(found)
        else:
            continued = [each for each in payloads if len(each.data) == chunk.offset]
            if not continued:
                raise DecodeError("a chunk without those before it")
            found = continued[0]
        found.data.extend(chunk.data)
        if not chunk.last:
            return None
        payloads[:] = [each for each in payloads if each is not found]
        return found


class CarriedPayloads:
    """Reads the payloads in one party's transcripts as messages."""

    def __init__(self) -> None:
        self._fetched = Assembly()
        self._submitted = Assembly()
        self._asked: dict[str, set[FetchKind.ValueType]] = defaultdict(set)

    def add(self, entry: TranscriptEntry, message: Message) -> list[Message | bytes]:
        """Take the next message of a type in ``CARRIERS``; return the payload that it completes.

        Returns
        -------
        list of Message or bytes
            The payload as each message that it can be, arrays left out; its bytes where it is none.

        Raises
        ------
        DecodeError
            When a chunk continues nothing.
        """
        if isinstance(message, FetchRequest):
            self._asked[entry.peer].add(message.kind)
        if not isinstance(message, FetchResponse | SubmitRequest) or not message.HasField("chunk"):
            return []
        fetched = isinstance(message, FetchResponse)
        whole = (self._fetched if fetched else self._submitted).add(entry, message, message.chunk)
        if whole is None or not whole.data:
            return []
        payload = bytes(whole.data)
        if fetched:
            read = _readings(payload, self._asked[entry.peer]) or _readings(payload, _READERS)
            found = [part for each in read.values() for part in _parts(each)]
        elif isinstance(whole.first, SubmitRequest) and whole.first.kind in _SUBMITTED:
            found = [_submitted(whole.first.kind, payload)]
        else:
            return [payload]
        if not found:
            return [payload]
        return [each for each in found if not isinstance(each, Tensor)]


class Payloads:
    """Classifies the payloads in one party's transcripts."""

    def __init__(self) -> None:
        self._kinds: set[str] = set()
        self._fetched = Assembly()
        self._submitted = Assembly()
        self._committed = Assembly()
        self._extended = Assembly()
        self._learned = Assembly()
        self._asked: dict[str, set[FetchKind.ValueType]] = defaultdict(set)
        self._items: set[int] = set()
        self._factor_rows: set[int] = set()
        self._plans: dict[_Round, SumPlan] = {}
        self._contributions: set[_Contribution] = set()
        self._revealed: set[_Round] = set()

    def add(self, entry: TranscriptEntry, message: Message) -> None:
        """Take the next message of a type in ``CARRIERS``."""
        try:
            if isinstance(message, FetchRequest):
                self._asked[entry.peer].add(message.kind)
            elif isinstance(message, FetchResponse):
                self._add_fetched(entry, message)
            elif isinstance(message, SubmitRequest):
                self._add_submitted(entry, message)
            elif isinstance(message, CommitPopulationRequest):
                self._add_people(self._committed.add(entry, message, message.chunk), _population)
            elif isinstance(message, ExtendPopulationRequest):
                self._add_people(self._extended.add(entry, message, message.chunk), _waves)
            elif isinstance(message, SignedWavesResponse):
                self._add_people(self._learned.add(entry, message, message.chunk), _waves)
        except DecodeError:
            self._kinds.add(UNCLASSIFIED)

    def kinds(self) -> set[str]:
        """Return the kinds of datum that all payloads show."""
        kinds = set(self._kinds)
        for rows in self._factor_rows:
            # Item factors have a row for each item of the catalogue; without one both readings count.
            kinds |= (
                {"item_factor" if rows in self._items else "user_factor"}
                if self._items
                else {"item_factor", "user_factor"}
            )
        for contribution in self._contributions:
            kinds |= self._kinds_of(contribution)
        return kinds

    def sums(self) -> set[str]:
        """Return the kinds of the sums that can be formed from the submissions: in clear, or revealed."""
        rounds = self._revealed | {each.round for each in self._contributions if not self._is_hidden(each)}
        return {_SUMS.get(purpose, UNCLASSIFIED) for each in rounds for purpose in self._purposes(each)}

    def _add_people(self, whole: Whole | None, read: Callable[[bytes], Message | None]) -> None:
        # Without users there are no more waves.
        if whole is not None and whole.data:
            self._kinds.update(kinds_in(_present(read(bytes(whole.data)))))

    # --- Submit ------------------------------------------------------------------------------------------------------

    def _add_submitted(self, entry: TranscriptEntry, message: SubmitRequest) -> None:
        self._kinds.update(filter(None, [_LABELLED.get(message.kind)]))
        if not message.HasField("chunk"):
            return
        whole = self._submitted.add(entry, message, message.chunk)
        if whole is None or not isinstance(whole.first, SubmitRequest):
            return
        kind, of_round = whole.first.kind, (whole.first.round.run_id, whole.first.round.round)
        if kind in _STEPS:
            told = _present(_step(kind, bytes(whole.data)))
            self._kinds.update(kinds_in(told))
            if kind in _REVEALING and not isinstance(told, AppliedSum):
                self._revealed.add(of_round)
        elif kind == SubmitKind.SUBMIT_KIND_VECTOR:
            vector = _present(_strictly(SummedVector, bytes(whole.data)))
            self._contributions.add(
                _Contribution(
                    of_round,
                    # A contribution without slots counts as one user's.
                    one_user=sum(slots.count for slots in whole.first.slots) <= 1,
                    signed=len(vector.signature) == _SIGNATURE_BYTES,
                    encrypted=bool(vector.ciphertexts),
                )
            )
            if vector.left_out:
                self._kinds.add("cohort")
            if vector.places:
                self._kinds.add("sent_places")
            if vector.noise:
                self._kinds.add("sealed_noise")
        elif kind not in _LABELLED:
            self._kinds.add(UNCLASSIFIED)

    def _is_hidden(self, contribution: _Contribution) -> bool:
        return contribution.encrypted or self._is_masked(contribution)

    def _is_masked(self, contribution: _Contribution) -> bool:
        """Return whether a contribution is masked: it is signed, and its plan, where known, is of a masked sum."""
        plan = self._plans.get(contribution.round)
        return contribution.signed and (plan is None or plan.secure_sum == "masked")

    def _purposes(self, of_round: _Round) -> Iterable[str]:
        """Return the possible purposes of a round: its plan's, or all of them without a plan."""
        plan = self._plans.get(of_round)
        return _IN_CLEAR if plan is None else (plan.purpose,)

    def _kinds_of(self, contribution: _Contribution) -> set[str]:
        kinds = {"round_key"} if contribution.signed else set()
        if contribution.encrypted:
            return kinds | {"encrypted_vector"}
        if self._is_masked(contribution):
            return kinds | {"masked_vector"}
        for purpose in self._purposes(contribution.round):
            shown = _IN_CLEAR.get(purpose)
            kinds |= {UNCLASSIFIED} if shown is None else shown[contribution.one_user]
        return kinds

    # --- Fetch -------------------------------------------------------------------------------------------------------

    def _add_fetched(self, entry: TranscriptEntry, message: FetchResponse) -> None:
        if not message.HasField("chunk"):
            return
        whole = self._fetched.add(entry, message, message.chunk)
        if whole is None or not whole.data:
            return
        payload, asked = bytes(whole.data), self._asked[entry.peer]
        read = _readings(payload, asked) or _readings(payload, _READERS)
        if not read:
            self._kinds.add(UNCLASSIFIED)
        if read.keys() >= _ROWS:
            # Rows of items and of users look alike; the catalogue's length tells them apart, once it is known.
            self._factor_rows.add(read.pop(FetchKind.FETCH_KIND_MODEL).shape[0])
            del read[FetchKind.FETCH_KIND_USER_ROWS]
        for kind, found in read.items():
            self._note(kind, found)

    def _note(self, kind: FetchKind.ValueType, found: Message) -> None:
        if isinstance(found, Tensor):
            self._kinds |= _ARRAYS[kind]
            return
        self._kinds.update(kinds_in(found))
        if isinstance(found, Catalogue):
            self._items.add(len(found.items))
        elif isinstance(found, SumPlan):
            self._plans[found.run_id, found.round] = found
        elif isinstance(found, Briefings):
            # Parts are whole messages, too.
            for part in {found.common, *found.parts, *(each.payload for each in found.briefings)} - {b""}:
                message = _briefing(part)
                # Nearly all of their fields are set, so the type's kinds are taken: looking at each field would be
                # most of the work.
                told = {UNCLASSIFIED} if message is None else reachable_kinds(message.DESCRIPTOR)
                self._kinds |= told if getattr(message, "places", b"") else told - {"sent_places"}


# --- what bytes can be -----------------------------------------------------------------------------------------------

M = TypeVar("M", bound=Message)


def _strictly(cls: type[M], payload: bytes) -> M | None:
    """Parse bytes as a message without unknown fields, since many bytes parse as several types; None otherwise."""
    try:
        message = cls.FromString(payload)
    except DecodeError:
        return None
    message.DiscardUnknownFields()
    return message if message.ByteSize() == len(payload) else None


def _step(kind: SubmitKind.ValueType, payload: bytes) -> Message | None:
    """Parse the message of a round's step: of a member, a key holder or a denoiser."""
    applied = _strictly(AppliedSum, payload) if kind == SubmitKind.SUBMIT_KIND_DECRYPTION else None
    if applied is not None and applied.model and applied.agreement:
        return applied
    found = _strictly(_STEPS[kind], payload)
    other = _OF_DENOISERS.get(kind)
    return found if found is not None or other is None else _strictly(other, payload)


def _array(payload: bytes, dtype: DType.ValueType, axes: int = 2) -> Tensor | None:
    tensor = _strictly(Tensor, payload)
    return tensor if tensor is not None and _is_array(tensor, dtype, axes) else None


def _is_array(tensor: Tensor, dtype: DType.ValueType, axes: int) -> bool:
    size = {DType.DTYPE_UINT8: 1}.get(tensor.dtype, 4)
    whole = size * prod(tensor.shape) == len(tensor.data)
    return whole and tensor.dtype == dtype and len(tensor.shape) == axes


def _model(payload: bytes) -> Message | None:
    sealed = _strictly(SealedModel, payload)
    if sealed is not None and sealed.round and len(sealed.key_id) == _KEY_ID_BYTES:
        return sealed
    model = _strictly(Model, payload)
    if model is None or not all(each.name and each.tensor.data for each in model.tensors):
        return _array(payload, DType.DTYPE_FLOAT32)
    return model


def _roster(payload: bytes) -> Tensor | None:
    tensor = _array(payload, DType.DTYPE_UINT8)
    return tensor if tensor is not None and tensor.shape[1] == _PARTICIPANT_BYTES else None


def _sum_plan(payload: bytes) -> SumPlan | None:
    plan = _strictly(SumPlan, payload)
    return plan if plan is not None and plan.round and plan.members else None


def _population(payload: bytes) -> Population | None:
    found = _strictly(Population, payload)
    # Waves have messages in the place of the beacon.
    if found is None or len(found.beacon) not in (0, BEACON_BYTES):
        return None
    return found if len(found.participants) == _PARTICIPANT_BYTES * len(found.device) > 0 else None


def _waves(payload: bytes) -> Waves | None:
    found = _strictly(Waves, payload)
    users = 0 if found is None or not found.waves else len(found.device)
    return found if found is not None and len(found.participants) == _PARTICIPANT_BYTES * users > 0 else None


def _briefings(payload: bytes) -> Briefings | None:
    found = _strictly(Briefings, payload)
    # Strings alone are a catalogue.
    return found if found is None or found.briefings or not found.parts else None


def _briefing(payload: bytes) -> Message | None:
    """Parse a member's briefing; the lengths of keys, shares and signatures tell the message types apart."""
    adverts = _strictly(Adverts, payload)
    if adverts is not None and all(each.channel_public and each.mask_public for each in adverts.adverts):
        return adverts
    confirmations = _strictly(Confirmations, payload)
    if confirmations is not None and all(
        len(each.signature) == _SIGNATURE_BYTES for each in confirmations.confirmations
    ):
        return confirmations
    inbox = _strictly(ShareInbox, payload)
    if inbox is not None and all(len(each.sealed) == _SEALED_BYTES for each in inbox.shares):
        return inbox
    applying = _strictly(ApplyTask, payload)
    if applying is not None and applying.items and applying.ciphertexts:
        return applying
    task = _strictly(DecryptionTask, payload)
    if task is not None and task.mode and task.members:
        return task
    for cls in (NoiseInbox, NoiseTask):
        denoising = _strictly(cls, payload)
        if denoising is not None:
            return denoising
    submitters = _strictly(Submitters, payload)
    if submitters is not None and all(a < b for a, b in pairwise(submitters.members)):
        return submitters
    return None


_SUBMITTED: Mapping[SubmitKind.ValueType, type[Message]] = {
    **_STEPS,
    SubmitKind.SUBMIT_KIND_VECTOR: SummedVector,
    SubmitKind.SUBMIT_KIND_METRICS: MetricSums,
}


def _submitted(kind: SubmitKind.ValueType, payload: bytes) -> Message | bytes:
    """Parse a payload of ``Submit``, unknown fields included; return its bytes where it is not what its label says."""
    classes: list[type[Message]] = [AppliedSum] if kind == SubmitKind.SUBMIT_KIND_DECRYPTION else []
    if kind in _OF_DENOISERS and (found := _strictly(_OF_DENOISERS[kind], payload)) is not None:
        return found
    for cls in (*classes, _SUBMITTED[kind]):
        try:
            message = cls.FromString(payload)
        except DecodeError:
            continue
        if not isinstance(message, AppliedSum) or (message.model and message.agreement):
            return message
    return payload


def _parts(message: Message) -> list[Message | bytes]:
    """Return a fetched message, or of briefings each one's message."""
    if not isinstance(message, Briefings):
        return [message]
    parts = {message.common, *message.parts, *(each.payload for each in message.briefings)} - {b""}
    return [message, *((_briefing(part) or part) for part in parts)]


_READERS: Mapping[FetchKind.ValueType, Callable[[bytes], Message | None]] = {
    FetchKind.FETCH_KIND_MODEL: _model,
    FetchKind.FETCH_KIND_USER_ROWS: lambda payload: _array(payload, DType.DTYPE_FLOAT32),
    FetchKind.FETCH_KIND_CATALOGUE: lambda payload: _strictly(Catalogue, payload),
    FetchKind.FETCH_KIND_ROSTER: _roster,
    FetchKind.FETCH_KIND_SUM_PLAN: _sum_plan,
    FetchKind.FETCH_KIND_BRIEFINGS: _briefings,
    FetchKind.FETCH_KIND_POPULATION: _population,
    FetchKind.FETCH_KIND_WAVES: _waves,
    FetchKind.FETCH_KIND_OPEN_ITEMS: lambda payload: _array(payload, DType.DTYPE_UINT8),
}
"""Parsers of payloads by the kind that was asked for; they return None for other bytes."""

_ROWS = {FetchKind.FETCH_KIND_MODEL, FetchKind.FETCH_KIND_USER_ROWS}

_ARRAYS: Mapping[FetchKind.ValueType, frozenset[str]] = {
    FetchKind.FETCH_KIND_MODEL: frozenset({"item_factor"}),
    FetchKind.FETCH_KIND_USER_ROWS: frozenset({"user_factor"}),
    FetchKind.FETCH_KIND_ROSTER: frozenset({"participant_id", "slot"}),
    FetchKind.FETCH_KIND_OPEN_ITEMS: frozenset({"open_items"}),
}
"""Kinds of datum in payloads that are arrays without names."""


def _readings(payload: bytes, asked: Iterable[FetchKind.ValueType]) -> dict[FetchKind.ValueType, Any]:
    """Return the parsed payload by each kind that was asked for and that it parses as."""
    read = {kind: _READERS[kind](payload) for kind in asked if kind in _READERS}
    return {kind: message for kind, message in read.items() if message is not None}


def _present(message: M | None) -> M:
    if message is None:
        raise DecodeError("not what its label says")
    return message
