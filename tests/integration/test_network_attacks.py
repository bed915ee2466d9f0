"""Attacks from the network on real services, and beside each that it would work, or that the honest form does."""

import asyncio
import contextlib

import pytest

from coterie.crypto.authority import logical_name
from coterie.wire.v1 import orchestrator_pb2 as wire
from coterie.wire.v1.thirdparty_pb2 import LookupRequest, RevokeRequest
from coterie.wire.v1.thirdparty_pb2_grpc import KeyDirectoryStub

from ..callers import (
    ROLES,
    calling,
    forged,
    in_place_of_callers,
    in_place_of_services,
    polled,
    revoked_in_mid_stream,
)
from ..relay import Between, replay
from .raw import Raw, message

SOON_S = 60.0
SECRET = "what-nobody-else-may-read"  # pragma: allowlist secret


@pytest.fixture(scope="module")
def people(shared_third_party):
    async def enrol():
        return {
            "left": await shared_third_party.enrol("client", "attacked-left", 3),
            "right": await shared_third_party.enrol("client", "attacked-right", 3),
            "owner": await shared_third_party.enrol("data-owner", "attacked-owner", 1),
        }

    return asyncio.run(enrol())


@pytest.fixture(scope="module")
def everybody(shared_third_party, tmp_path_factory):
    """TLS files of every role."""
    folder = tmp_path_factory.mktemp("everybody")
    return {role: shared_third_party.issue(folder / role, role, "somebody") for role in ROLES}


def shown(tls):
    """Return what a relay shows of a TLS folder."""
    return tls.chain, tls.key


# --- in the middle --------------------------------------------------------------------------------


async def test_who_only_hands_on_reads_nothing(cos, everybody):
    async with Between(cos.address) as wire_tap:
        name = logical_name("cos", cos.name)
        answer = await polled(wire_tap.address, everybody["client"], name, SECRET)
    assert answer == "UNKNOWN_ROUND"
    assert len(wire_tap.seen) > 500
    assert SECRET.encode() not in wire_tap.seen


async def test_a_relay_with_an_authority_of_its_own_reads_nothing(cos, everybody, third_party, tmp_path):
    name = logical_name("cos", cos.name)
    tls = forged(tmp_path / "relay", "cos", cos.name, third_party.ca_file.read_bytes())
    async with Between(cos.address, shown(tls), name, shown(everybody["client"])) as relay:
        assert await polled(relay.address, everybody["client"], name, SECRET) == "UNAVAILABLE"
        assert relay.greeted
        assert not relay.seen
        # Who believed that authority would be read.
        await polled(relay.address, everybody["client"], name, SECRET, authority=tls.chain)
        assert SECRET.encode() in relay.seen


@pytest.mark.parametrize("role", [role for role in ROLES if role != "cos"])
async def test_a_relay_with_a_certificate_of_another_role_reads_nothing(cos, everybody, role):
    caller, name = everybody["client"], logical_name("cos", cos.name)
    async with Between(cos.address, shown(everybody[role]), name) as relay:
        assert await polled(relay.address, caller, name, SECRET) == "UNAVAILABLE"
        assert relay.greeted
        assert not relay.seen
        # Who took that name for the COS would be read.
        await polled(relay.address, caller, logical_name(role, "somebody"), SECRET)
        assert SECRET.encode() in relay.seen


# --- in somebody's place --------------------------------------------------------------------------------


async def test_no_role_passes_for_another_as_a_server(cos, everybody):
    """Every certificate in place of every other: only its own name is taken."""
    name = logical_name("cos", cos.name)
    async with contextlib.AsyncExitStack() as stack:
        relays = {
            role: await stack.enter_async_context(
                Between(cos.address, shown(tls), name, shown(everybody["client"]))
            )
            for role, tls in everybody.items()
        }
        addresses = {role: relay.address for role, relay in relays.items()}
        taken = await in_place_of_services(addresses, everybody["client"], ("somebody", "other"))
    assert taken == {(role, role, "somebody") for role in ROLES}


async def test_no_role_passes_for_another_as_a_caller(cos, third_party, everybody):
    """Every role calls what is another's, and what is its own."""
    pairs = set()
    for service in (cos, third_party):
        pairs |= await in_place_of_callers(service.role, lambda role, at=service: at.channel(everybody[role]))
    # In place of everybody who may call something that not all may.
    victims = {"client", "data-owner", "operator", "cos"}
    assert {(role, victim) for role in ROLES for victim in victims if role != victim} <= pairs


async def test_nobody_speaks_for_the_participants_of_another(world, calls):
    """Messages of a party, recorded and sent again over another party's connection."""
    run = await world(per_user=True).begin("left", "right")
    left, right = run.hosts["left"], run.hosts["right"]
    task = await left.task(wire.TaskKind.TASK_KIND_ROUND)
    assert await left.answer(task) == []
    plan = await left.plan(task.round.round)
    recorded = [
        (wire.SubmitKind.SUBMIT_KIND_VECTOR, number, left.slots_of(plan, member), sent)
        for (number, _, member), sent in left.sent.items()
    ]
    assert len(recorded) == 3
    assert await right.submit(recorded) == ["UNKNOWN_PARTICIPANT"] * 3
    # Whoever sent them may send them again, and they count once.
    assert await left.submit(recorded) == []
    await asyncio.gather(*(host.play() for host in run.hosts.values()))
    assert [one["summed"] for one in (await run.report())["rounds"]] == [6, 6, 6, 6]


# --- recorded and sent again --------------------------------------------------------------------------------


async def test_a_recorded_connection_sent_again_does_nothing(third_party, everybody):
    def served():
        return third_party.metric("coterie_rpc_calls_total", side="server", rpc="Lookup")

    name = logical_name("thirdparty", third_party.name)
    async with Between(third_party.address) as wire_tap:
        before = served()
        async with calling(wire_tap.address, everybody["client"], name) as channel:
            await channel.stub(KeyDirectoryStub).Lookup(LookupRequest(), timeout=SOON_S)
        assert served() == before + 1
        (recorded,) = wire_tap.flows
        for piece in (len(recorded), 500):
            answer, closed = await replay(bytes(recorded), third_party.address, piece=piece)
            # It came far enough to be greeted.
            assert answer
            assert closed
        assert served() == before + 1
        # The same call, made anew, is served.
        async with calling(wire_tap.address, everybody["client"], name) as channel:
            await channel.stub(KeyDirectoryStub).Lookup(LookupRequest(), timeout=SOON_S)
        assert served() == before + 2


async def test_a_request_sent_again_over_a_connection_of_ones_own_is_a_request_of_ones_own(world, people):
    """The bytes of a poll of somebody who is registered, from somebody who is not."""
    run = await world(per_user=True).begin("left")
    request = message(wire.PollRequest(run_id=run.run).SerializeToString())
    answers = {}
    for who in ("left", "right"):
        raw = await (await Raw.to(run.cos, people[who].tls)).begin()
        stream = await raw.call("/coterie.v1.Orchestrator/Poll", request)
        answers[who] = 0
        async for one in raw.frames(SOON_S):
            if one.stream == stream:
                answers[who] += len(one.payload) if one.kind == 0 else 0
                if one.flags & 1:
                    break
        await raw.close()
    # Tasks for the one, for the other a refusal, which has no body.
    assert answers["left"] > 10
    assert answers["right"] == 0


# --- revoked in the middle --------------------------------------------------------------------------------


async def test_open_streams_of_a_revoked_party_end_and_those_of_others_go_on(
    cos, third_party, certificates, people
):
    victim, other = await third_party.enrol("client", "revoked-in-mid-stream", 1), people["left"]

    async def revoke():
        await third_party.directory(certificates["operator"]).Revoke(
            RevokeRequest(certificates=[victim.fingerprint])
        )

    cut, kept = await revoked_in_mid_stream(cos.channel(victim), cos.channel(other), revoke)
    assert cut == {"upload": "REVOKED", "registration": "REVOKED", "answers": "REVOKED"}
    # They came to their end, at which the messages were found wrong.
    assert kept.keys() == {"upload", "registration"}
    assert "REVOKED" not in kept.values()
    name = logical_name("cos", cos.name)
    assert await polled(cos.address, victim.tls, name, SECRET) == "REVOKED"
    assert await polled(cos.address, other.tls, name, SECRET) == "UNKNOWN_ROUND"
