from __future__ import annotations

import pytest

from coterie.crypto.authority import ROLES
from coterie.net.authorisation import ALLOWED, OFFERED, callers_of, may_call
from coterie.wire.v1 import (
    client_pb2,
    data_owner_pb2,
    expansion_pb2,
    intakes_pb2,
    latency_pb2,
    latents_pb2,
    log_pb2,
    operator_pb2,
    orchestrator_pb2,
    thirdparty_pb2,
)

SERVICES = {
    service.full_name: [method.name for method in service.methods]
    for module in (
        client_pb2,
        data_owner_pb2,
        expansion_pb2,
        intakes_pb2,
        latency_pb2,
        latents_pb2,
        log_pb2,
        operator_pb2,
        orchestrator_pb2,
        thirdparty_pb2,
    )
    for service in module.DESCRIPTOR.services_by_name.values()
}

# Written down a second time, and by service: whoever opens an RPC to a role has to mean it.
CALLERS = {
    "coterie.v1.Orchestrator": {
        "client": {"Register", "Poll", "Fetch", "Submit", "Recommend"},
        "data-owner": {"Register", "Poll", "Fetch", "Submit", "Exchange", "ExchangeMany"},
        "decrypting-client": {"Register", "Poll", "Fetch", "Submit"},
    },
    # Of a coordinator, and of its own intakes: their servicer asks for the name, too.
    "coterie.v1.Intakes": {"cos": {"Follow", "Hold", "Shared"}},
    "coterie.v1.Operator": {
        "operator": {"StartRun", "StopRun", "ResumeRun", "ListRuns", "GetRun", "WatchRun", "GetReport"}
    },
    "coterie.v1.DataOwner": {
        "client": {"SubmitInteractions", "UpdateVector", "OwnerInfo"},
        "cos": {"OwnerInfo"},
        "operator": {"Flush"},
    },
    "coterie.v1.UserAgent": {
        "operator": {
            "RecordInteraction",
            "Recommend",
            "DisclosureReceipt",
            "SetPreferences",
            "ShowPreferences",
        }
    },
    "coterie.v1.KeyDirectory": {
        "client": {"Lookup", "Revocations", "PublishBundles", "RenewCertificate", "PaillierPublicKey"}
        | {"PublishPaillierKey", "CountersignPaillierKey", "PaillierEnvelope"},
        "data-owner": {"Lookup", "Revocations", "PublishBundles", "RenewCertificate", "PaillierPublicKey"},
        "decrypting-client": {
            "Lookup",
            "Revocations",
            "PublishBundles",
            "RenewCertificate",
            "PaillierPublicKey",
        }
        | {"PublishPaillierKey", "CountersignPaillierKey", "PaillierEnvelope"},
        "cos": {
            "Lookup",
            "Revocations",
            "RenewCertificate",
            "CommitPopulation",
            "ExtendPopulation",
            "SignedWaves",
        }
        | {"PaillierPublicKey"},
        "operator": {"Revoke", "RenewCertificate"},
    },
    "coterie.v1.GraphExpansion": {
        "client": {"SealingKey", "PublishGraphKey", "GraphKey"},
        "cos": {"PublishTags", "Neighbours", "Forget"},
        "operator": {"ExpansionState", "ReplaceGraphKey"},
    },
    "coterie.v1.ExpansionRelay": {"client": {"Relay"}},
    "coterie.v1.MetaLatents": {
        "client": {"OpenLatents", "LatentSet", "PseudoMetaLatents"},
        "cos": {"PublishEncrypted", "ForgetEncrypted"},
        "operator": {"LatentSet"},
    },
    "coterie.v1.LatentRelay": {"client": {"RelayLatent"}},
    "coterie.v1.TransparencyLog": {
        role: {"LogHead", "LogInclusion", "LogConsistency", "LogEntries"}
        for role in ROLES
        if role != "thirdparty"
    },
    "coterie.v1.LogGossip": {
        role: {"CompareHeads"} for role in ("client", "data-owner", "decrypting-client", "operator")
    },
    # Of the service that is asked it is those who may call it for something else: below.
    "coterie.v1.Probe": {role: {"Echo", "Carry"} for role in ROLES if role != "thirdparty"},
    "coterie.v1.Latency": {
        **{key: {"Attend"} for key in ("client", "data-owner", "decrypting-client")},
        "operator": {"Measure"},
    },
    # Enrolment is for those who have no certificate yet; its own listener lets them in, the table lets in nobody.
    "coterie.v1.Enrolment": {},
}


@pytest.mark.parametrize("role", [*ROLES, "", "root"])
@pytest.mark.parametrize("service", SERVICES)
def test_each_role_may_call_what_the_protocol_says_and_nothing_else(service: str, role: str) -> None:
    allowed = {method for method in SERVICES[service] if may_call(role, f"/{service}/{method}")}
    assert allowed == CALLERS[service].get(role, set())


def test_every_rpc_of_the_table_is_one_of_the_contract_or_of_grpc() -> None:
    contract = {f"/{service}/{method}" for service, methods in SERVICES.items() for method in methods}
    assert {name for name in ALLOWED if "/coterie." in name} <= contract
    others = {name.split("/")[1] for name in ALLOWED if "/coterie." not in name}
    assert others == {"grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}


@pytest.mark.parametrize("role", ROLES)
def test_everybody_with_a_certificate_may_ask_for_health_and_only_operators_for_the_contract(
    role: str,
) -> None:
    assert may_call(role, "/grpc.health.v1.Health/Check")
    assert may_call(role, "/grpc.health.v1.Health/Watch")
    reflection = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
    assert may_call(role, reflection) == (role == "operator")


@pytest.mark.parametrize("role", ["", "root", "COS", "client "])
def test_whoever_has_no_role_of_ours_may_call_nothing(role: str) -> None:
    assert not any(may_call(role, method) for method in ALLOWED)


@pytest.mark.parametrize("method", ["", "/", "/coterie.v1.Operator/DropAll", "coterie.v1.Operator/StartRun"])
def test_what_is_not_in_the_table_may_be_called_by_nobody(method: str) -> None:
    assert not any(may_call(role, method) for role in ROLES)


def test_who_may_probe_a_service_is_who_may_call_it() -> None:
    assert {role: callers_of(role) for role in OFFERED} == {
        "cos": {"client", "data-owner", "decrypting-client", "operator"},
        "data-owner": {"client", "cos", "operator"},
        "client": {"operator"},
        "decrypting-client": set(),
        "thirdparty": {"client", "data-owner", "decrypting-client", "cos", "operator"},
    }
