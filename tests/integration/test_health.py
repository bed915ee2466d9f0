"""Health of a service whose store fails, and who may ask; reflection."""

import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from coterie.net.authorisation import OFFERED
from coterie.net.enrolment import saved_bundles
from coterie.wire.v1 import data_owner_pb2
from coterie.wire.v1.data_owner_pb2_grpc import DataOwnerStub

SOON_S = 60.0
"""Bound for a service that starts, or finds out that a peer has gone, on a machine under load."""

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def status_of(service, tls, name=""):
    """Ask the health service over mutual TLS; None where nobody answers."""
    stub = service.channel(tls).stub(health_pb2_grpc.HealthStub)
    try:
        return (await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=5)).status
    except grpc.aio.AioRpcError as error:
        if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
            return None
        raise


async def becomes(expected, tls, *services):
    """Wait until services say of themselves what is expected, by every name and on the page."""
    async with asyncio.timeout(SOON_S):
        for service in services:
            for name in ("", f"coterie.{service.role}"):
                while await status_of(service, tls, name) != expected:
                    await asyncio.sleep(0.1)
            while service.healthy() != (expected == SERVING):
                await asyncio.sleep(0.1)


async def test_a_data_owner_whose_store_takes_no_writes_does_not_serve_and_still_answers(
    start_member, third_party, cos, operator, certificates, calls, tmp_path
):
    run = "store-health"
    items = tmp_path / "items.csv"
    items.write_text("item\na\nb\n")
    tls = certificates["operator"]
    await operator.start(run, owners=1, users=1)
    owner = await asyncio.to_thread(
        start_member,
        "data-owner",
        "letters",
        third_party,
        participants=1,
        cos={"address": cos.address, "name": cos.name},
        run=run,
        owners=[{"name": "letters", "items": items}],
    )
    await becomes(SERVING, tls, owner)
    # Somebody else holds the file for longer than the ten seconds that a write waits.
    with owner.store_held("data_owner.db"):
        request = data_owner_pb2.FlushRequest(run_id=run)
        flush = owner.channel(tls).stub(DataOwnerStub).Flush(request, timeout=12)
        # The owner waits for its store as long as the caller does.
        assert await calls.code_of(flush) == grpc.StatusCode.DEADLINE_EXCEEDED
        await becomes(NOT_SERVING, tls, owner)
        known = saved_bundles(owner.state)[0].participant_id
        question = data_owner_pb2.OwnerInfoRequest(run_id=run, owner=known)
        stub = owner.channel(certificates["client"]).stub(DataOwnerStub)
        assert (await stub.OwnerInfo(question)).items == 2
    # Nobody has to write for it to find out that it can again.
    await becomes(SERVING, tls, owner)


@pytest.mark.parametrize("role", ["cos", "data-owner", "client", "thirdparty", "operator"])
async def test_everybody_with_a_certificate_may_ask_for_health_and_nobody_else(
    cos, third_party, certificates, role
):
    assert await status_of(cos, certificates[role]) == SERVING
    assert await status_of(third_party, certificates[role]) == SERVING


async def test_health_of_a_service_that_is_not_here_is_unknown(cos, certificates):
    stub = cos.channel(certificates["client"]).stub(health_pb2_grpc.HealthStub)
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await stub.Check(health_pb2.HealthCheckRequest(service="coterie.client"))
    assert failed.value.code() == grpc.StatusCode.NOT_FOUND


async def test_every_service_by_its_name_has_the_health_of_its_process(cos, third_party, certificates):
    for one in (cos, third_party):
        for name in OFFERED[one.role]:
            assert await status_of(one, certificates["client"], f"coterie.v1.{name}") == SERVING


async def test_the_port_for_enrolments_tells_its_health_to_probes_without_a_certificate(third_party, calls):
    stub = third_party.anonymous_channel(third_party.enrol_address).stub(health_pb2_grpc.HealthStub)
    for name in ("", "coterie.v1.Enrolment"):
        assert (await stub.Check(health_pb2.HealthCheckRequest(service=name))).status == SERVING
    # A watch would hold a call for as long as the caller likes.
    refusal = await calls.refused(lambda: anext(stub.Watch(health_pb2.HealthCheckRequest())))
    assert refusal.reason == "WRONG_ROLE"


# --- Reflection --------------------------------------------------------------------------------------------------


async def listed(service, tls):
    """Return the services that reflection lists."""
    stub = service.channel(tls).stub(reflection_pb2_grpc.ServerReflectionStub)

    async def question():
        yield reflection_pb2.ServerReflectionRequest(list_services="")

    answer = await anext(stub.ServerReflectionInfo(question(), timeout=30))
    return {one.name for one in answer.list_services_response.service}


async def test_reflection_is_off_by_default(cos, third_party, certificates):
    async def nothing_yet():
        # Whether there is such an RPC is known before a question comes.
        await asyncio.Event().wait()
        yield reflection_pb2.ServerReflectionRequest()

    for service in (cos, third_party):
        stub = service.channel(certificates["operator"]).stub(reflection_pb2_grpc.ServerReflectionStub)
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await anext(stub.ServerReflectionInfo(nothing_yet(), timeout=30))
        assert failed.value.code() == grpc.StatusCode.UNIMPLEMENTED


async def test_reflection_is_for_operators_where_it_is_on(start_member, third_party, certificates, calls):
    cos = await asyncio.to_thread(start_member, "cos", "open-cos", third_party, reflection=True)
    found = await listed(cos, certificates["operator"])
    # What this process offers, and nothing that others do.
    assert found == {
        "coterie.v1.Orchestrator",
        "coterie.v1.Operator",
        "coterie.v1.ExpansionRelay",
        "coterie.v1.LatentRelay",
        "coterie.v1.Latency",
        "coterie.v1.LogGossip",
        "coterie.v1.Probe",
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }
    for role in ("client", "data-owner", "cos", "thirdparty"):
        stub = cos.channel(certificates[role]).stub(reflection_pb2_grpc.ServerReflectionStub)
        question = reflection_pb2.ServerReflectionRequest()
        why = await calls.refused(lambda stub=stub, q=question: stub.ServerReflectionInfo(calls.each(q)))
        assert why.reason == "WRONG_ROLE"
