"""The authorisation table: roles that may call each RPC, and the largest message; nobody may call an RPC not listed."""

from __future__ import annotations

__all__ = ["ALLOWED", "LARGEST", "OFFERED", "callers_of", "may_call"]

_EVERY_SERVICE = frozenset({"cos", "data-owner", "client", "decrypting-client", "thirdparty", "operator"})
_PARTIES = frozenset({"client", "data-owner", "decrypting-client"})
_HOLDERS = frozenset({"client", "decrypting-client"})

ALLOWED: dict[str, frozenset[str]] = {
    "/coterie.v1.Orchestrator/Register": _PARTIES,
    "/coterie.v1.Orchestrator/Poll": _PARTIES,
    "/coterie.v1.Orchestrator/Fetch": _PARTIES,
    "/coterie.v1.Orchestrator/Submit": _PARTIES,
    "/coterie.v1.Orchestrator/Exchange": frozenset({"data-owner"}),
    "/coterie.v1.Orchestrator/ExchangeMany": frozenset({"data-owner"}),
    "/coterie.v1.Orchestrator/Recommend": frozenset({"client"}),
    # A coordinator narrows these to intakes of its own service.
    "/coterie.v1.Intakes/Follow": frozenset({"cos"}),
    "/coterie.v1.Intakes/Hold": frozenset({"cos"}),
    "/coterie.v1.Intakes/Shared": frozenset({"cos"}),
    "/coterie.v1.Operator/StartRun": frozenset({"operator"}),
    "/coterie.v1.Operator/StopRun": frozenset({"operator"}),
    "/coterie.v1.Operator/ResumeRun": frozenset({"operator"}),
    "/coterie.v1.Operator/ListRuns": frozenset({"operator"}),
    "/coterie.v1.Operator/GetRun": frozenset({"operator"}),
    "/coterie.v1.Operator/WatchRun": frozenset({"operator"}),
    "/coterie.v1.Operator/GetReport": frozenset({"operator"}),
    "/coterie.v1.DataOwner/SubmitInteractions": frozenset({"client"}),
    "/coterie.v1.DataOwner/UpdateVector": frozenset({"client"}),
    "/coterie.v1.DataOwner/OwnerInfo": frozenset({"client", "cos"}),
    "/coterie.v1.DataOwner/Flush": frozenset({"operator"}),
    "/coterie.v1.UserAgent/RecordInteraction": frozenset({"operator"}),
    "/coterie.v1.UserAgent/Recommend": frozenset({"operator"}),
    "/coterie.v1.UserAgent/DisclosureReceipt": frozenset({"operator"}),
    "/coterie.v1.UserAgent/SetPreferences": frozenset({"operator"}),
    "/coterie.v1.UserAgent/ShowPreferences": frozenset({"operator"}),
    "/coterie.v1.KeyDirectory/Lookup": _PARTIES | {"cos"},
    "/coterie.v1.KeyDirectory/Revoke": frozenset({"operator"}),
    "/coterie.v1.KeyDirectory/Revocations": _PARTIES | {"cos"},
    "/coterie.v1.KeyDirectory/PublishBundles": _PARTIES,
    "/coterie.v1.KeyDirectory/RenewCertificate": _PARTIES | {"cos", "operator"},
    "/coterie.v1.KeyDirectory/CommitPopulation": frozenset({"cos"}),
    "/coterie.v1.KeyDirectory/ExtendPopulation": frozenset({"cos"}),
    "/coterie.v1.KeyDirectory/SignedWaves": frozenset({"cos"}),
    "/coterie.v1.KeyDirectory/PublishPaillierKey": _HOLDERS,
    "/coterie.v1.KeyDirectory/CountersignPaillierKey": _HOLDERS,
    "/coterie.v1.KeyDirectory/PaillierPublicKey": _PARTIES | {"cos"},
    "/coterie.v1.KeyDirectory/PaillierEnvelope": _HOLDERS,
    "/coterie.v1.GraphExpansion/SealingKey": frozenset({"client"}),
    "/coterie.v1.GraphExpansion/PublishGraphKey": frozenset({"client"}),
    "/coterie.v1.GraphExpansion/GraphKey": frozenset({"client"}),
    # Users' requests come through the COS only: a client that called itself would show who it is.
    "/coterie.v1.GraphExpansion/PublishTags": frozenset({"cos"}),
    "/coterie.v1.GraphExpansion/Neighbours": frozenset({"cos"}),
    "/coterie.v1.GraphExpansion/Forget": frozenset({"cos"}),
    "/coterie.v1.GraphExpansion/ExpansionState": frozenset({"operator"}),
    "/coterie.v1.GraphExpansion/ReplaceGraphKey": frozenset({"operator"}),
    "/coterie.v1.ExpansionRelay/Relay": frozenset({"client"}),
    "/coterie.v1.MetaLatents/OpenLatents": frozenset({"client"}),
    "/coterie.v1.MetaLatents/LatentSet": frozenset({"client", "operator"}),
    "/coterie.v1.MetaLatents/PublishEncrypted": frozenset({"cos"}),
    "/coterie.v1.MetaLatents/ForgetEncrypted": frozenset({"cos"}),
    "/coterie.v1.MetaLatents/PseudoMetaLatents": frozenset({"client"}),
    "/coterie.v1.LatentRelay/RelayLatent": frozenset({"client"}),
    "/coterie.v1.TransparencyLog/LogHead": _PARTIES | {"cos", "operator"},
    "/coterie.v1.TransparencyLog/LogInclusion": _PARTIES | {"cos", "operator"},
    "/coterie.v1.TransparencyLog/LogConsistency": _PARTIES | {"cos", "operator"},
    "/coterie.v1.TransparencyLog/LogEntries": _PARTIES | {"cos", "operator"},
    # A data owner narrows this to roles that may call another of its RPCs, too.
    "/coterie.v1.LogGossip/CompareHeads": _PARTIES | {"operator"},
    # `Probe` narrows this to roles that may call another RPC of the same process: `callers_of`.
    "/coterie.v1.Probe/Echo": _PARTIES | {"cos", "operator"},
    "/coterie.v1.Probe/Carry": _PARTIES | {"cos", "operator"},
    "/coterie.v1.Latency/Attend": _PARTIES,
    "/coterie.v1.Latency/Measure": frozenset({"operator"}),
    "/grpc.health.v1.Health/Check": _EVERY_SERVICE,
    "/grpc.health.v1.Health/Watch": _EVERY_SERVICE,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": frozenset({"operator"}),
}
"""Roles that may call an RPC, by full method name."""

_SMALL = 1 << 16

LARGEST: dict[str, int] = dict.fromkeys(
    (
        "/coterie.v1.Orchestrator/Poll",
        "/coterie.v1.Orchestrator/Fetch",
        "/coterie.v1.Orchestrator/Recommend",
        "/coterie.v1.Intakes/Follow",
        "/coterie.v1.Intakes/Shared",
        "/coterie.v1.Operator/StopRun",
        "/coterie.v1.Operator/ResumeRun",
        "/coterie.v1.Operator/ListRuns",
        "/coterie.v1.Operator/GetRun",
        "/coterie.v1.Operator/WatchRun",
        "/coterie.v1.Operator/GetReport",
        "/coterie.v1.DataOwner/OwnerInfo",
        "/coterie.v1.DataOwner/Flush",
        "/coterie.v1.UserAgent/RecordInteraction",
        "/coterie.v1.UserAgent/Recommend",
        "/coterie.v1.UserAgent/DisclosureReceipt",
        "/coterie.v1.UserAgent/SetPreferences",
        "/coterie.v1.UserAgent/ShowPreferences",
        "/coterie.v1.KeyDirectory/Revocations",
        "/coterie.v1.KeyDirectory/PaillierPublicKey",
        "/coterie.v1.KeyDirectory/PaillierEnvelope",
        "/coterie.v1.GraphExpansion/SealingKey",
        "/coterie.v1.GraphExpansion/GraphKey",
        "/coterie.v1.GraphExpansion/Forget",
        "/coterie.v1.GraphExpansion/ExpansionState",
        "/coterie.v1.GraphExpansion/ReplaceGraphKey",
        "/coterie.v1.TransparencyLog/LogHead",
        "/coterie.v1.TransparencyLog/LogInclusion",
        "/coterie.v1.TransparencyLog/LogConsistency",
        "/coterie.v1.TransparencyLog/LogEntries",
        "/coterie.v1.MetaLatents/OpenLatents",
        "/coterie.v1.MetaLatents/LatentSet",
        "/coterie.v1.MetaLatents/PseudoMetaLatents",
        "/coterie.v1.LogGossip/CompareHeads",
        "/coterie.v1.Probe/Echo",
        "/coterie.v1.Latency/Measure",
        "/grpc.health.v1.Health/Check",
        "/grpc.health.v1.Health/Watch",
    ),
    _SMALL,
)
"""Largest message of an RPC by full method name, bytes, where it is below `limits.message_kib`."""

OFFERED: dict[str, tuple[str, ...]] = {
    "cos": ("Orchestrator", "Operator", "Latency", "ExpansionRelay", "LatentRelay", "LogGossip"),
    "data-owner": ("DataOwner", "LogGossip"),
    "client": ("UserAgent",),
    "decrypting-client": (),
    "thirdparty": ("KeyDirectory", "GraphExpansion", "MetaLatents", "TransparencyLog"),
}
"""gRPC services by the role of the process that offers them to others; every process offers ``Probe``, too.

A coordinator of the COS also offers ``Intakes``, to processes of the COS alone.
"""


def callers_of(role: str) -> frozenset[str]:
    """Return the roles that may call any RPC of a process of this role, ``Probe`` and ``LogGossip`` apart."""
    prefixes = tuple(f"/coterie.v1.{service}/" for service in OFFERED[role] if service != "LogGossip")
    return frozenset().union(*(roles for name, roles in ALLOWED.items() if name.startswith(prefixes)))


def may_call(role: str, method: str) -> bool:
    """Return whether a certificate of this role may call this method."""
    return role in ALLOWED.get(method, frozenset())
