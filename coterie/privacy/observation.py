"""What kinds of datum passed a party, read off the fields of the messages in its transcript.

This needs no canaries, so it works on every recorded run.  A field that the table does not know counts as
``unclassified``, which nobody may see: a new field of the contract cannot pass unnoticed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message

from coterie.errors import StoreError
from coterie.privacy.transcript import Entry, decode, message_class, read_transcript, role_of
from coterie.wire.v1.common_pb2 import DType, Tensor
from coterie.wire.v1.orchestrator_pb2 import Catalogue, FetchResponse, SubmitKind, SubmitRequest

__all__ = [
    "FIELD_KINDS",
    "PROTOCOL_MESSAGES",
    "UNCLASSIFIED",
    "kinds_in",
    "observed_kinds",
    "reachable_kinds",
]

UNCLASSIFIED = "unclassified"

PROTOCOL_MESSAGES: frozenset[str] = frozenset(
    {
        "FetchRequest",
        "FetchResponse",
        "FlushRequest",
        "GetReportRequest",
        "GetRunRequest",
        "OwnerProgress",
        "PollRequest",
        "PollResponse",
        "RefusedBatch",
        "RefusedItem",
        "RoundRef",
        "StopRunRequest",
        "SubmitRequest",
        "SubmitResponse",
        "Task",
        "WatchRunRequest",
    }
)
"""Messages of nothing but the protocol's own numbers: rounds, versions, hashes, cursors, deadlines."""

_BY_MESSAGE: dict[str, dict[str, str]] = {
    # client.proto
    "RecordInteractionRequest": {"user": "user_name", "item": "interaction", "positive": "interaction"},
    "RecordInteractionResponse": {"owners": "holding"},
    "UserRecommendRequest": {"user": "user_name", "k": "recommendation"},
    "UserRecommendResponse": {"items": "recommendation", "scores": "recommendation", "version": "protocol"},
    "DisclosureReceiptRequest": {"user": "user_name"},
    "DisclosureReceiptResponse": {"disclosures": "disclosure"},
    # common.proto
    "KeyBundle": dict.fromkeys(
        (
            "signing_public",
            "agreement_public",
            "version",
            "not_before",
            "not_after",
            "signature",
            "countersignature",
        ),
        "public_key",
    ),
    "Delegation": dict.fromkeys(
        ("certificate_fingerprint", "run_id", "expiry", "signature"),
        "delegation",
    ),
    "SlotRange": {"first": "slot", "count": "slot"},
    # data_owner.proto
    "SealedBatch": {"user": "participant_id", "header": "record_count", "ciphertext": "sealed_record"},
    "SubmitInteractionsRequest": {"run_id": "protocol", "owner": "participant_id"},
    "SubmitInteractionsResponse": {"durable": "record_count", "duplicates": "protocol"},
    "OwnerInfoRequest": {"run_id": "protocol", "owner": "participant_id"},
    "OwnerInfoResponse": {"items": "holding"},
    "Prekey": dict.fromkeys(("prekey_id", "public", "expiry", "signature"), "public_key"),
    "FlushResponse": {"blocks": "block_count"},
    # operator.proto
    "StartRunRequest": {"plan": "plan"}
    | dict.fromkeys(
        ("expect_owners", "expect_users", "phase_timeout_ms", "party_timeout_ms", "evaluate_every"),
        "run_state",
    ),
    "StartRunResponse": {"plan_hash": "plan"},
    "ListRunsResponse": {"runs": "run_state"},
    "GetRunResponse": {"run": "run_state"},
    "WatchRunResponse": {
        "number": "protocol",
        "time_ms": "protocol",
        "state": "run_state",
        "phase": "run_state",
    },
    "MetricsEvent": dict.fromkeys(("names", "means", "users"), "metric_mean")
    | dict.fromkeys(("epoch", "version", "owners", "withheld"), "run_state"),
    "PartyEvent": {"party": "endpoint", "change": "run_state"},
    "ProgressEvent": {"blocks": "block_count", "interactions": "block_count", "loss": "metric_mean"}
    | dict.fromkeys(("updates", "bytes_in", "bytes_out", "stale"), "run_state"),
    "GetReportResponse": {"json": "run_state"},
    # orchestrator.proto
    "RegisterRequest": {
        "run_id": "protocol",
        "intent": "protocol",
        "items": "item_key",
        "items_of": "holding",
    },
    "Participant": {"kind": "protocol", "name": "endpoint", "address": "endpoint", "tls_name": "endpoint"},
    "RegisterResponse": {"plan": "plan", "plan_hash": "plan"},
    "Catalogue": {
        "version": "protocol",
        "items": "item_key",
        "owner_counts": "holding",
        "owner_positions": "holding",
    },
    "CatalogueOwner": {"slot": "slot", "name": "endpoint", "address": "endpoint", "tls_name": "endpoint"},
    "ExchangeRequest": {
        "run_id": "protocol",
        "owner": "slot",
        "sequence": "protocol",
        "users": "requested_rows",
        "items": "requested_rows",
    },
    "Gradient": {
        "rows_version": "protocol",
        "epoch": "protocol",
        "first_block": "block_count",
        "blocks": "block_count",
        "interactions": "block_count",
        "loss": "block_loss",
        "users": "requested_rows",
        "items": "requested_rows",
        "user_gradient": "user_gradient",
        "item_gradient": "item_gradient",
    },
    "ExchangeResponse": {"version": "protocol", "user_rows": "user_factor", "item_rows": "item_factor"},
    "RecommendRequest": {"run_id": "protocol", "slot": "slot", "k": "recommendation"},
    "RecommendResponse": {"items": "recommendation", "scores": "recommendation", "version": "protocol"},
    # thirdparty.proto
    "EnrolRequest": {
        "token": "enrolment_token",
        "role": "endpoint",
        "name": "endpoint",
        "certificate_request": "public_key",
    },
    "EnrolResponse": {
        "certificate_chain": "public_key",
        "directory_key": "public_key",
        "countersignatures": "public_key",
    },
    "LookupRequest": {"participants": "participant_id"},
    "LookupResponse": {"revision": "protocol"},
    "DirectoryEntry": {"participant": "participant_id", "revoked": "participant_id"},
    "RevokeRequest": {"participants": "participant_id", "certificates": "public_key"},
    "RevokeResponse": {"revision": "protocol"},
    "RevocationsRequest": {"held_revision": "protocol", "hold_ms": "protocol"},
    "RevocationsResponse": {
        "revision": "protocol",
        "participants": "participant_id",
        "certificates": "public_key",
    },
    "PublishBundlesResponse": {"countersignatures": "public_key"},
}

FIELD_KINDS: Mapping[str, str] = MappingProxyType(
    {f"{message}.{name}": kind for message, fields in _BY_MESSAGE.items() for name, kind in fields.items()}
)
"""Kind of datum by ``Message.field``.  A field that holds a message and is not listed is looked into."""

_CARRIERS = (FetchResponse, SubmitRequest)
"""Messages that carry others in chunks."""

_SUBMITTED = {
    SubmitKind.SUBMIT_KIND_DELIVERED: "record_count",
    SubmitKind.SUBMIT_KIND_EPOCH_DONE: "block_count",
    SubmitKind.SUBMIT_KIND_METRICS: "metric_sum",
}


def kinds_in(message: Message) -> Iterator[str]:
    """Yield the kinds of the fields that are set in a message, at any depth; kinds may repeat."""
    for descriptor, value in message.ListFields():
        kind = _kind_of(descriptor)
        if kind is not None:
            yield kind
        else:
            for each in (value,) if isinstance(value, Message) else value:
                yield from kinds_in(each)


def observed_kinds(transcripts: Mapping[str, Iterable[Path | str]]) -> dict[str, set[str]]:
    """Return which kinds of datum each party received, or sent and so held.

    Parameters
    ----------
    transcripts : mapping of str to iterable of Path
        Transcript files by party.

    Returns
    -------
    dict of str to set of str
        Kinds by party.
    """
    return {party: _observed_by(party, tuple(paths)) for party, paths in transcripts.items()}


def _observed_by(party: str, paths: tuple[Path | str, ...]) -> set[str]:
    seen: set[str] = set()
    fetched = _Fetched()
    for path in paths:
        for entry in read_transcript(path):
            cls = message_class(entry)
            if cls is None or (cls not in _CARRIERS and reachable_kinds(cls.DESCRIPTOR) <= seen):
                # Nothing new can show: most messages are of a few kinds, and parsing them is most of the work.
                continue
            try:
                message = decode(entry)
            except StoreError:
                # Recorded before it was refused as malformed: what it held cannot be told.
                seen.add(UNCLASSIFIED)
                continue
            seen.update(kinds_in(message))
            if isinstance(message, FetchResponse):
                fetched.add(entry, message)
            elif isinstance(message, SubmitRequest):
                seen.update(filter(None, [_SUBMITTED.get(message.kind)]))
    seen.update(fetched.kinds())
    if "sealed_record" in seen and role_of(party) == "data-owner":
        # Records are sealed for the owner that they are sent to: it opens them.
        seen.add("interaction")
    return seen


class _Fetched:
    """Finds out what the payloads of ``Fetch`` were: an answer does not repeat what was asked for."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, str], list[bytearray]] = defaultdict(list)
        self._kinds: set[str] = set()
        self._items: set[int] = set()
        self._factor_rows: set[int] = set()

    def add(self, entry: Entry, message: FetchResponse) -> None:
        """Take the next message; payloads of concurrent calls are told apart by their chunks' offsets."""
        if not message.HasField("chunk"):
            return
        chunk = message.chunk
        payloads = self._open[entry.peer, entry.direction]
        if chunk.offset == 0:
            payload = bytearray()
            payloads.append(payload)
        else:
            continued = [each for each in payloads if len(each) == chunk.offset]
            if not continued:
                self._kinds.add(UNCLASSIFIED)
                return
            payload = continued[0]
        payload += chunk.data
        if chunk.last:
            payloads[:] = [each for each in payloads if each is not payload]
            self._classify(bytes(payload))

    def kinds(self) -> set[str]:
        """Return the kinds of all payloads."""
        kinds = set(self._kinds)
        for rows in self._factor_rows:
            # Item factors have a row for each item of the catalogue; without one both readings count.
            kinds |= (
                {"item_factor" if rows in self._items else "user_factor"}
                if self._items
                else {"item_factor", "user_factor"}
            )
        return kinds

    def _classify(self, payload: bytes) -> None:
        tensor = _parsed(Tensor, payload)
        if tensor is not None and _is_array(tensor):
            if tensor.dtype == DType.DTYPE_FLOAT32:
                self._factor_rows.add(tensor.shape[0])
            else:
                # The roster: participant ids by slot.
                self._kinds |= {"participant_id", "slot"}
            return
        catalogue = _parsed(Catalogue, payload)
        if catalogue is None:
            self._kinds.add(UNCLASSIFIED)
        else:
            self._items.add(len(catalogue.items))
            self._kinds.update(kinds_in(catalogue))


M = TypeVar("M", bound=Message)


def _parsed(cls: type[M], payload: bytes) -> M | None:
    try:
        return cls.FromString(payload)
    except DecodeError:
        return None


def _is_array(tensor: Tensor) -> bool:
    """Whether a message that parsed as an array is one: many bytes parse as many messages."""
    size = {DType.DTYPE_FLOAT32: 4, DType.DTYPE_UINT8: 1}.get(tensor.dtype)
    return size is not None and len(tensor.shape) == 2 and size * prod(tensor.shape) == len(tensor.data)


def _kind_of(descriptor: FieldDescriptor) -> str | None:
    """Return the kind of a field; None for a message to look into."""
    owner = descriptor.containing_type.name if descriptor.containing_type else ""
    kind = FIELD_KINDS.get(f"{owner}.{descriptor.name}")
    if kind is not None:
        return kind
    if owner in PROTOCOL_MESSAGES and (
        descriptor.message_type is None or descriptor.message_type.name == "Chunk"
    ):
        return "protocol"
    # An array says nothing by itself: the field that holds it must be in the table.
    if descriptor.message_type is None or descriptor.message_type.name in ("Tensor", "Chunk"):
        return UNCLASSIFIED
    return None


@cache
def reachable_kinds(descriptor: Descriptor) -> frozenset[str]:
    """Return all kinds that the fields of a message may show; what a chunk carries is not among them."""
    kinds: set[str] = set()
    for field in descriptor.fields:
        kind = _kind_of(field)
        kinds |= reachable_kinds(field.message_type) if kind is None else {kind}
    return frozenset(kinds)
