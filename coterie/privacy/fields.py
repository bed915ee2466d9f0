"""The classification of every field of the gRPC contract by its kind of datum.

A field that the table does not have counts as ``unclassified``, which nobody may see, so that a new field is noticed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from types import MappingProxyType

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

__all__ = [
    "FIELD_KINDS",
    "MISPLACED",
    "PROTOCOL_MESSAGES",
    "UNCLASSIFIED",
    "is_misplaced",
    "kind_of",
    "kinds_in",
    "reachable_kinds",
]

UNCLASSIFIED = "unclassified"
MISPLACED = "misplaced"

_OWNERS_FIELDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "RegisterRequest": ("items", "items_of"),
        "Participant": ("name", "address", "tls_name"),
    }
)
"""Fields that only a data owner fills in: a client's are empty, and say nothing of its users."""

PROTOCOL_MESSAGES: frozenset[str] = frozenset(
    {
        "Attachment",
        "AttendResponse",
        "CarryRequest",
        "CarryResponse",
        "CommitPopulationRequest",
        "ExtendPopulationRequest",
        "FetchRequest",
        "FetchResponse",
        "FlushRequest",
        "FollowResponse",
        "GetReportRequest",
        "GetRunRequest",
        "HeardCaller",
        "HeldAnswer",
        "HeldPoll",
        "HoldRequest",
        "MeasureOrder",
        "OwnerProgress",
        "PollRequest",
        "PollResponse",
        "RefusedBatch",
        "RefusedItem",
        "ResumeRunRequest",
        "RoundRef",
        "SharedRequest",
        "StopRunRequest",
        "SignedWavesResponse",
        "SubmitRequest",
        "SubmitResponse",
        "Task",
        "WatchRunRequest",
    }
)
"""Messages with only the protocol's own numbers: rounds, versions, hashes, cursors, deadlines."""

_BY_MESSAGE: dict[str, dict[str, str]] = {
    # client.proto
    "RecordInteractionRequest": {"user": "user_name"}
    | dict.fromkeys(("item", "positive", "rating"), "interaction"),
    "RecordInteractionResponse": {"owners": "holding"},
    "UserRecommendRequest": {"user": "user_name", "k": "recommendation"},
    "UserRecommendResponse": {"items": "recommendation", "scores": "recommendation", "version": "protocol"},
    "DisclosureReceiptRequest": {"user": "user_name"},
    "DisclosureReceiptResponse": {"disclosures": "disclosure", "declined": "disclosure"},
    "SetPreferencesRequest": {"user": "user_name", "changes": "preference"},
    "SetPreferencesResponse": {"preferences": "preference"},
    "ShowPreferencesRequest": {"user": "user_name"},
    "ShowPreferencesResponse": {"preferences": "preference"},
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
            "party",
        ),
        "public_key",
    ),
    "Delegation": dict.fromkeys(
        ("certificate_fingerprint", "run_id", "expiry", "signature"),
        "delegation",
    ),
    "RollDelegation": dict.fromkeys(
        ("certificate_fingerprint", "run_id", "expiry", "root", "size", "signature"),
        "delegation",
    ),
    "SlotRange": {"first": "slot", "count": "slot"},
    "Protocol": dict.fromkeys(("oldest", "newest", "release", "features"), "protocol"),
    # data_owner.proto
    "SealedBatch": {"user": "participant_id", "header": "record_count", "ciphertext": "sealed_record"},
    "SubmitInteractionsRequest": {"run_id": "protocol", "owner": "participant_id"},
    "SubmitInteractionsResponse": {"durable": "record_count", "duplicates": "protocol"},
    "SealedReply": {"header": "protocol", "ciphertext": "sealed_reply"},
    "UpdateVectorRequest": {"run_id": "protocol", "owner": "participant_id", "epoch": "protocol"},
    "UpdateVectorResponse": {"durable": "record_count", "duplicates": "protocol"},
    "OwnerInfoRequest": {"run_id": "protocol", "owner": "participant_id"},
    "OwnerInfoResponse": {"items": "holding"},
    "Prekey": dict.fromkeys(("prekey_id", "public", "expiry", "signature"), "public_key"),
    "FlushResponse": {"blocks": "block_count"},
    # expansion.proto
    "SealedRequest": {"run_id": "protocol", "epoch": "protocol", "key_id": "protocol"}
    | {"upload_id": "upload_id", "sealed": "sealed_expansion"},
    "TagUpload": {
        "secret": "item_tag",  # pragma: allowlist secret
        "sequence": "protocol",
        "tags": "item_tag",
    }
    | {"embedding": "sealed_embedding"},
    "NeighbourQuery": {"secret": "item_tag", "tags": "item_tag"},  # pragma: allowlist secret
    "ForgetOrder": {"secret": "item_tag"},  # pragma: allowlist secret
    "Neighbour": {"embedding": "sealed_embedding", "tags": "item_tag"},
    "SealingKeyResponse": dict.fromkeys(("key_id", "public", "expiry", "signature"), "public_key"),
    "GraphRecord": {"holders": "participant_id"}
    | dict.fromkeys(("key_id", "generator_public", "signature"), "public_key")
    | dict.fromkeys(
        (
            "run_id",
            "epoch",
            "dimension",
            "most_tags",
            "bucket_users",
            "most_neighbours",
            "expiry",
        ),
        "protocol",
    ),
    "SealedGraphKey": {"holder": "participant_id", "sealed": "sealed_key"},
    "GraphKeyRequest": {"participant": "participant_id"}
    | dict.fromkeys(("run_id", "held_epoch", "hold_ms"), "protocol"),
    "GraphKeyResponse": {"sealed": "sealed_key", "least_epoch": "protocol"},
    "NeighboursResponse": {"sealed": "sealed_expansion"},
    "RelayRequest": {"slot": "slot"},
    "ExpansionStateRequest": {"run_id": "protocol"},
    "ExpansionStateResponse": {"epoch": "protocol"}
    | dict.fromkeys(("uploads", "tags", "served_tags", "questions", "neighbours"), "graph_counts"),
    "ReplaceGraphKeyRequest": {"run_id": "protocol"},
    "ReplaceGraphKeyResponse": {"epoch": "protocol"},
    "RefusedExpansion": {"reason": "protocol", "count": "graph_counts"},
    # intakes.proto
    "HeldCaller": {"number": "protocol", "certificate": "public_key"},
    # latency.proto
    "AttendRequest": {"number": "protocol", "more": "protocol", "declined": "protocol"},
    "MeasureRequest": {"parties": "endpoint"},
    "MeasureResponse": {"party": "endpoint", "without": "protocol"},
    "PairTimes": dict.fromkeys(("source", "target"), "endpoint")
    | dict.fromkeys(
        ("echo_ms", "server_ms", "connect_ms", "handshake_ms", "first_ms", "carried", "failure"), "latency"
    ),
    "CarriedTimes": dict.fromkeys(("size", "up", "ms"), "latency"),
    # latents.proto
    "LatentRecord": dict.fromkeys(("key_id", "opener_public", "signature"), "public_key")
    | dict.fromkeys(
        (
            "run_id",
            "epoch",
            "dimension",
            "combinations",
            "least",
            "most",
            "bound",
            "members",
            "bits",
            "closes",
            "expiry",
        ),
        "protocol",
    ),
    "LatentUpload": {
        "secret": "latent_ciphertext",  # pragma: allowlist secret
        "vector": "latent_ciphertext",
    },
    "LatentForgetOrder": {"secret": "latent_ciphertext"},  # pragma: allowlist secret
    "LatentSetRequest": dict.fromkeys(("run_id", "epoch", "hold_ms", "until_ready"), "protocol"),
    "LatentSetResponse": {"state": "protocol", "key_users": "latent_counts"},
    "PseudoMetaLatentsRequest": {"participant": "participant_id"}
    | dict.fromkeys(("run_id", "epoch", "first"), "protocol"),
    "PseudoMetaLatentsResponse": {"vectors": "pseudo_latent"},
    "RelayLatentRequest": {"slot": "slot"},
    # operator.proto
    "StartRunRequest": {"plan": "plan", "plan_signature": "plan"}
    | dict.fromkeys(
        (
            "expect_owners",
            "expect_users",
            "phase_timeout_ms",
            "party_timeout_ms",
            "evaluate_every",
            "most_abandoned",
            "give_up_ms",
            "check_in_ms",
        ),
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
        "round": "run_state",
        "wait": "run_state",
        "resumed": "run_state",
        "grown": "run_state",
    },
    "GrowEvent": dict.fromkeys(("users", "total", "from_pass"), "run_state"),
    "WaitEvent": {"reason": "run_state"},
    "ResumeEvent": {"failure": "run_state", "round": "run_state"},
    "MetricsEvent": dict.fromkeys(("names", "means", "users"), "metric_mean")
    | dict.fromkeys(("epoch", "version", "owners", "withheld", "epsilon"), "run_state"),
    "PartyEvent": {"party": "endpoint", "change": "run_state"},
    "ProgressEvent": {"blocks": "block_count", "interactions": "block_count", "loss": "metric_mean"}
    | dict.fromkeys(("updates", "bytes_in", "bytes_out", "stale", "round"), "run_state"),
    "GetReportResponse": {"json": "run_state"},
    # orchestrator.proto
    "RegisterRequest": {
        "run_id": "protocol",
        "intent": "protocol",
        "items": "item_key",
        "items_of": "holding",
    },
    "Participant": {"kind": "protocol", "name": "endpoint", "address": "endpoint", "tls_name": "endpoint"},
    "RegisterResponse": {"plan": "plan", "plan_hash": "plan", "plan_signature": "plan"},
    "Catalogue": {
        "version": "protocol",
        "items": "item_key",
        "owner_counts": "holding",
        "owner_positions": "holding",
    },
    "NamedTensor": {"name": "protocol", "tensor": "item_factor"},
    # A briefing's bytes are read as a payload of its own.
    "Briefings": {"common": "protocol", "parts": "protocol", "next": "protocol"},
    "Briefing": {"member": "protocol", "payload": "protocol", "of": "protocol"},
    "Population": dict.fromkeys(("devices", "participants", "device"), "population")
    | dict.fromkeys(("beacon", "beacon_signature"), "protocol"),
    "Waves": dict.fromkeys(("devices", "participants", "device"), "population"),
    "Wave": dict.fromkeys(("first", "from_pass"), "population")
    | dict.fromkeys(("beacon", "beacon_signature"), "protocol"),
    "Places": {"users": "cohort", "places": "cohort"},
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
    "ItemFactors": {
        "version": "protocol",
        "items": "holding",
        "pull": "item_pull",
        "new_items": "holding",
        "rows": "item_pull",
    },
    "VisitStatus": {"visits": "visit_count", "held": "visit_count"},
    "RecommendRequest": {"run_id": "protocol", "slot": "slot", "k": "recommendation"},
    "RecommendResponse": {"items": "recommendation", "scores": "recommendation", "version": "protocol"},
    "Holding": dict.fromkeys(("owner", "items", "items_sha256", "party"), "plan"),
    "OptimiserPlan": dict.fromkeys(("name", "rate", "beta1", "beta2", "tau"), "plan"),
    "Aggregation": dict.fromkeys(("rule", "byzantine", "norm_bound"), "plan"),
    "PrivacyPlan": dict.fromkeys(
        (
            "place",
            "mechanism",
            "noise",
            "clip",
            "most_items",
            "most_metrics",
            "delta",
            "colluders",
            "per_value",
            "epsilon",
        ),
        "plan",
    ),
    # rounds.proto
    "SumInput": dict.fromkeys(("name", "sha256"), "protocol"),
    "RoundMember": {"participant": "participant_id", "device": "cohort", "users": "cohort"},
    "Place": dict.fromkeys(("purpose", "pass_number", "part"), "plan"),
    "Standing": {"joined": "protocol", "places": "plan"},
    "SumPlan": {"devices": "cohort"}
    | dict.fromkeys(
        (
            "version",
            "run_id",
            "round",
            "purpose",
            "secure_sum",
            "model_sha256",
            "layout_sha256",
            "degree",
            "threshold",
            "min_sum",
            "pass_number",
            "part",
            "key_id",
            "code_bits",
            "sparse_floor",
            "run_plan_sha256",
            "model_version",
            "inputs",
            "population_sha256",
            "beacon",
            "noise_floor",
        ),
        "protocol",
    ),
    "KeyHolder": {"participant": "participant_id", "device": "cohort"},
    "Advert": {"member": "protocol", "chained": "protocol"}
    | dict.fromkeys(("channel_public", "mask_public", "signature"), "round_key"),
    "SealedShare": {"member": "protocol", "sealed": "sealed_share"},
    "Shares": {"seed_hash": "round_key"},
    # The most private kind that the codes can be; plan and slots tell the actual one.
    "SummedVector": {
        "codes": "user_update",
        "left_out": "cohort",
        "signature": "round_key",
        "ciphertexts": "encrypted_vector",
        "places": "sent_places",
        "noise": "sealed_noise",
    },
    "SealedNoise": {"member": "cohort", "sealed": "sealed_noise"},
    "OpenedNoise": {"failed": "cohort", "refused": "protocol"},
    "NoiseTask": {"members": "cohort"},
    "NoiseSum": {"group": "cohort", "steps": "noise_sum"},
    "NoiseSums": {"refused": "protocol"},
    "Submitters": {"members": "cohort", "places": "sent_places", "ciphertexts": "protocol"},
    "Confirmation": {
        "member": "protocol",
        "signature": "round_key",
        "signing_public": "round_key",
        "pads": "protocol",
    },
    "RevealedShare": {"member": "cohort", "seed": "revealed_share", "mask": "revealed_share"},
    "DecryptionTask": {"members": "cohort", "ciphertexts": "encrypted_sum", "places": "sent_places"}
    | dict.fromkeys(("mode", "part", "first"), "protocol"),
    "Decryption": {"part": "protocol", "plaintexts": "round_sum", "proof": "protocol", "pads": "protocol"},
    "SealedModel": {"key_id": "protocol", "round": "protocol", "sealed": "sealed_model"},
    "ApplyTask": {
        "members": "cohort",
        "ciphertexts": "encrypted_sum",
        "model": "sealed_model",
        "shares": "cohort",
        "places": "sent_places",
    }
    | dict.fromkeys(("mode", "items", "population"), "protocol"),
    "AppliedSum": {"model": "sealed_model", "agreement": "round_key"},
    "CohortMetric": dict.fromkeys(("name", "total", "count"), "cohort_metric"),
    # log.proto
    "LogHead": dict.fromkeys(
        ("size", "root", "time_ms", "log_key", "certification", "signature"), "protocol"
    ),
    "LogInclusionRequest": {"leaves": "public_key", "size": "protocol", "joint": "protocol"},
    "LogInclusionResponse": {"positions": "protocol", "path": "protocol"},
    "InclusionProof": dict.fromkeys(("found", "index", "path"), "protocol"),
    "LogConsistencyRequest": {"first": "protocol", "second": "protocol"},
    "LogConsistencyResponse": {"path": "protocol"},
    "LogEntriesRequest": {"first": "protocol", "count": "protocol"},
    "LogEntry": {"kind": "protocol", "statement": "public_key"},
    "CompareHeadsRequest": {"hold_ms": "protocol"},
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
    "BeaconRequest": {"run_id": "protocol"},
    "BeaconResponse": {"beacon": "protocol", "signature": "protocol"},
    "SignedWavesRequest": {"run_id": "protocol", "after": "population"},
    "CommitPopulationResponse": {"beacon": "protocol", "signature": "protocol"},
    "RevocationsRequest": {"held_revision": "protocol", "hold_ms": "protocol"},
    "RevocationsResponse": {
        "revision": "protocol",
        "participants": "participant_id",
        "certificates": "public_key",
    },
    "RenewCertificateRequest": {"certificate_request": "public_key"},
    "RenewExpiredRequest": {
        "certificate": "public_key",
        "certificate_request": "public_key",
        "signature": "public_key",
        "time": "protocol",
    },
    "RenewCertificateResponse": {"certificate_chain": "public_key"},
    "PublishBundlesResponse": {"countersignatures": "public_key"},
    "Roster": {"members": "participant_id", "signature": "public_key"}
    | dict.fromkeys(("purpose", "run_id", "issued", "expiry"), "protocol"),
    "PaillierKey": dict.fromkeys(("run_id", "bits", "created"), "protocol")
    | dict.fromkeys(("modulus", "set_public", "base"), "public_key"),
    "PaillierCountersignature": dict.fromkeys(("signing_public", "signature"), "public_key"),
    "PaillierRecord": {"epoch": "protocol", "holders": "participant_id"}
    | dict.fromkeys(("generator_public", "signature"), "public_key"),
    "SealedPaillierKey": {"holder": "participant_id", "sealed": "sealed_key"},
    "CountersignPaillierKeyRequest": {"run_id": "protocol", "epoch": "protocol"},
    "CountersignPaillierKeyResponse": {"complete": "protocol"},
    "PaillierPublicKeyRequest": dict.fromkeys(("run_id", "epoch", "held_epoch", "hold_ms"), "protocol"),
    "PaillierEnvelopeRequest": {"participant": "participant_id"}
    | dict.fromkeys(("run_id", "held_epoch", "hold_ms"), "protocol"),
    "PaillierEnvelopeResponse": {"sealed": "sealed_key"},
}

FIELD_KINDS: Mapping[str, str] = MappingProxyType(
    {f"{message}.{name}": kind for message, fields in _BY_MESSAGE.items() for name, kind in fields.items()}
)
"""Kind of datum by ``Message.field``.  A field that holds a message and is not listed is looked into."""


def kinds_in(message: Message) -> Iterator[str]:
    """Yield the kinds of the fields that are set in a message, at any depth; kinds may repeat."""
    for descriptor, value in message.ListFields():
        kind = kind_of(descriptor)
        if kind is not None:
            yield kind
        else:
            for each in (value,) if isinstance(value, Message) else value:
                yield from kinds_in(each)


def is_misplaced(message: Message) -> bool:
    """Return whether a message of a client or a key holder has a field that only data owners fill in."""
    if any(getattr(message, name) for name in _OWNERS_FIELDS.get(message.DESCRIPTOR.name, ())):
        return True
    return message.DESCRIPTOR.name == "RegisterRequest" and any(
        is_misplaced(each) for each in getattr(message, "participants", ())
    )


def kind_of(descriptor: FieldDescriptor) -> str | None:
    """Return the kind of a field; None for a field that holds a message with kinds of its own."""
    owner = descriptor.containing_type.name if descriptor.containing_type else ""
    kind = FIELD_KINDS.get(f"{owner}.{descriptor.name}")
    if kind is not None:
        return kind
    if owner in PROTOCOL_MESSAGES and (
        descriptor.message_type is None or descriptor.message_type.name == "Chunk"
    ):
        return "protocol"
    # An array has no kind by itself: the field that holds it must be in the table.
    if descriptor.message_type is None or descriptor.message_type.name in ("Tensor", "Chunk"):
        return UNCLASSIFIED
    return None


@cache
def reachable_kinds(descriptor: Descriptor) -> frozenset[str]:
    """Return all kinds that the fields of a message type may show, without the contents of chunks."""
    kinds: set[str] = set()
    for field in descriptor.fields:
        if field.message_type is descriptor:
            # A message within one of its own type shows nothing else.
            continue
        kind = kind_of(field)
        kinds |= reachable_kinds(field.message_type) if kind is None else {kind}
    return frozenset(kinds)
