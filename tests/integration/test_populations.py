"""The population of a run at a real third party: what it takes from a server, and what it refuses."""

import asyncio
import dataclasses
import hashlib
import itertools
from types import SimpleNamespace

import pytest

from coterie.crypto.beacon import verify_beacon
from coterie.errors import PeerError
from coterie.net.directory import Directory
from coterie.rounds.population import Population, Wave
from coterie.wire.chunks import split
from coterie.wire.v1.common_pb2 import Chunk
from coterie.wire.v1.thirdparty_pb2 import (
    BeaconRequest,
    CommitPopulationRequest,
    CommitPopulationResponse,
    ExtendPopulationRequest,
    RevokeRequest,
    SignedWavesRequest,
)

NUMBER = itertools.count()


@pytest.fixture
async def people(third_party):
    """Return the population of two hosts, of three users and one, in order, and the directory's key."""
    number = next(NUMBER)
    parties = [
        await third_party.enrol("client", f"{name}-{number}", n) for name, n in (("many", 3), ("one", 1))
    ]
    users = sorted((bundle.participant_id, one.party) for one in parties for bundle in one.bundles)
    population = Population([who for who, _ in users], [device for _, device in users])
    return population, parties[0].directory_key


@pytest.fixture
def run():
    return f"peopled-{next(NUMBER)}"


def requests(run, population, sha256=None, chunks=None):
    payload = population if isinstance(population, bytes) else population.to_wire().SerializeToString()
    digest = hashlib.sha256(payload).digest() if sha256 is None else sha256
    return [
        CommitPopulationRequest(run_id=run, sha256=digest, chunk=chunk)
        for chunk in (split(payload) if chunks is None else chunks)
    ]


@pytest.fixture
def commit(third_party, certificates, run):
    async def send(population, *, run=run, **how):
        directory = third_party.directory(certificates["cos"])
        return await directory.CommitPopulation(requests(run, population, **how))

    return send


async def test_the_first_population_of_a_run_has_a_beacon_and_no_other_ever_has(people, commit, run, calls):
    population, key = people
    first = await commit(population)
    verify_beacon(run, population.hash(run), first.beacon, first.signature, key)
    assert await commit(population) == first
    other = Population(population.participants[1:], population.devices[1:])
    refused = await calls.refused(lambda: commit(other))
    assert (refused.reason, refused.field) == ("CONFLICT", "population")
    assert (await commit(other, run=f"{run}-again")).beacon != first.beacon
    assert await commit(population) == first


async def test_of_two_populations_at_once_one_is_taken(people, commit, run, calls):
    population, _ = people
    others = [
        Population(population.participants[:n], population.devices[:n])
        for n in (4, 3, 2, 1)
        for _ in range(3)
    ]
    answers = await asyncio.gather(*map(commit, others), return_exceptions=True)
    drawn = {answer.beacon for answer in answers if not isinstance(answer, Exception)}
    assert len(drawn) == 1
    assert sum(not isinstance(answer, Exception) for answer in answers) == 3


async def test_users_in_another_order_or_twice_are_refused(people, commit, calls):
    population, _ = people
    ids, devices = population.participants, population.devices
    for wrong, words in (
        (Population(ids[::-1], devices[::-1]), "do not stand in the order of their ids"),
        (Population([ids[0], *ids], [devices[0], *devices]), "is in the population twice"),
    ):
        refused = await calls.refused(lambda wrong=wrong: commit(wrong))
        assert (refused.reason, refused.field) == ("INVALID_FIELD", "population")
        assert words in refused.text


async def test_users_of_other_devices_strangers_and_revoked_ones_are_refused(
    people, commit, calls, third_party, certificates
):
    population, _ = people
    ids, devices = population.participants, population.devices
    for strange in (
        Population(ids, devices[1:] + devices[:1]),
        Population([*ids, b"\xff" * 32], [*devices, devices[0]]),
    ):
        refused = await calls.refused(lambda strange=strange: commit(strange))
        assert refused.reason == "UNKNOWN_PARTICIPANT"
        assert refused.says_nothing_of(*ids)
    directory = third_party.directory(certificates["operator"])
    await directory.Revoke(RevokeRequest(participants=ids[:1]))
    refused = await calls.refused(lambda: commit(population))
    assert refused.reason == "REVOKED"
    await commit(Population(ids[1:], devices[1:]))


@pytest.mark.parametrize(
    ("reason", "how"),
    [
        ("INVALID_FIELD", {"population": b"\xff\xff"}),
        ("INVALID_FIELD", {"population": b""}),
        ("INVALID_FIELD", {"run": "No Run"}),
        ("INVALID_FIELD", {"sha256": bytes(31)}),
        ("HASH_MISMATCH", {"sha256": bytes(32)}),
        ("TRUNCATED", {"chunks": [Chunk(data=b"some")]}),
        ("TRUNCATED", {"chunks": [Chunk(data=b"some", offset=9, last=True)]}),
        ("INVALID_FIELD", {"chunks": []}),
    ],
    ids=["no message", "nobody", "no run", "short hash", "other hash", "cut off", "no beginning", "nothing"],
)
async def test_what_is_no_population_is_refused(people, commit, calls, reason, how):
    population, _ = people
    refused = await calls.refused(
        lambda: commit(
            how.get("population", population),
            **{name: value for name, value in how.items() if name != "population"},
        )
    )
    assert refused.reason == reason
    # Nothing was fixed.
    await commit(population)


@pytest.mark.parametrize("role", ["client", "data-owner", "operator"])
async def test_nobody_but_a_server_fixes_a_population(people, third_party, certificates, calls, run, role):
    population, _ = people
    directory = third_party.directory(certificates[role])
    refused = await calls.refused(lambda: directory.CommitPopulation(requests(run, population)))
    assert refused.code.name == "PERMISSION_DENIED"


async def test_no_beacon_is_drawn_without_a_population(third_party, certificates, calls, run):
    directory = third_party.directory(certificates["cos"])
    refused = await calls.refused(lambda: directory.Beacon(BeaconRequest(run_id=run)))
    assert refused.code.name == "PERMISSION_DENIED"


# --- users who come later


@pytest.fixture
async def latecomers(third_party):
    """Return the population of two more hosts, of two users each."""
    number = next(NUMBER)
    parties = [await third_party.enrol("client", f"{name}-{number}", 2) for name in ("late", "later")]
    return sorted((bundle.participant_id, one.party) for one in parties for bundle in one.bundles)


def extended(population, users, from_pass=1):
    """Return a population with one more wave, for which there is no beacon yet."""
    return dataclasses.replace(
        population,
        participants=[*population.participants, *(who for who, _ in users)],
        devices=[*population.devices, *(device for _, device in users)],
        waves=(*population.waves, Wave(len(population), from_pass)),
    )


async def test_a_population_is_extended_by_waves_one_after_the_other_and_each_has_one_beacon(
    people, latecomers, commit, run, calls
):
    population, key = people
    once = extended(population, latecomers[:2])
    refused = await calls.refused(lambda: commit(once))
    assert (refused.reason, refused.field) == ("CONFLICT", "population")
    first = await commit(population)
    drawn = await commit(once)
    verify_beacon(run, once.hash(run), drawn.beacon, drawn.signature, key)
    assert drawn.beacon != first.beacon
    twice = extended(once, latecomers[2:], 4)
    last = await commit(twice)
    verify_beacon(run, twice.hash(run), last.beacon, last.signature, key)
    # Whoever asks again gets the same answer, of whichever wave.
    assert [await commit(one) for one in (population, once, twice)] == [first, drawn, last]


async def test_a_second_wave_of_the_same_number_is_refused_whatever_it_changes(
    people, latecomers, commit, calls
):
    population, _ = people
    await commit(population)
    once = extended(population, latecomers[:2])
    drawn = await commit(once)
    for other in (
        extended(population, latecomers[:2], 2),
        extended(population, latecomers[:1]),
        extended(population, latecomers[2:]),
    ):
        refused = await calls.refused(lambda other=other: commit(other))
        assert refused.reason == "CONFLICT"
        assert "another wave 1" in refused.text
    assert await commit(once) == drawn


async def test_a_wave_that_removes_or_changes_earlier_users_is_refused(people, latecomers, commit, calls):
    population, _ = people
    await commit(population)
    once = extended(population, latecomers[:2])
    await commit(once)
    fewer = Population(population.participants[1:], population.devices[1:])
    swapped = Population(population.participants, population.devices[::-1])
    for changed in (
        extended(fewer, latecomers[:2]),
        extended(extended(fewer, latecomers[:2]), latecomers[2:], 4),
        extended(extended(swapped, latecomers[:2]), latecomers[2:], 4),
        extended(extended(population, latecomers[:1]), latecomers[2:], 4),
        extended(extended(once, latecomers[2:3], 4), latecomers[3:], 5),
    ):
        refused = await calls.refused(lambda changed=changed: commit(changed))
        assert (refused.reason, refused.field) == ("CONFLICT", "population")
    await commit(extended(once, latecomers[2:], 4))


async def test_strangers_users_of_other_devices_revoked_ones_and_known_ones_do_not_come_later(
    people, latecomers, commit, calls, third_party, certificates
):
    population, _ = people
    await commit(population)
    directory = third_party.directory(certificates["operator"])
    await directory.Revoke(RevokeRequest(participants=[latecomers[0][0]]))
    for reason, users in (
        ("UNKNOWN_PARTICIPANT", [*latecomers[1:], (b"\xff" * 32, latecomers[1][1])]),
        ("UNKNOWN_PARTICIPANT", [(who, population.devices[0]) for who, _ in latecomers[1:]]),
        ("REVOKED", latecomers),
        ("INVALID_FIELD", sorted([latecomers[1], (population.participants[0], population.devices[0])])),
        ("INVALID_FIELD", latecomers[:0:-1]),
    ):
        refused = await calls.refused(lambda users=users: commit(extended(population, users)))
        assert refused.reason == reason
    await commit(extended(population, latecomers[1:]))


@pytest.fixture
def extend(third_party, certificates, run):
    """Return a function that tells the third party of the last wave of a population alone."""

    async def send(population, *, number=None, before=None, run=run):
        number = len(population.waves) if number is None else number
        payload = population.later_waves(len(population.waves) - 1).SerializeToString()
        before = population.hashes(run)[-2] if before is None else before
        head = {"run_id": run, "sha256": hashlib.sha256(payload).digest(), "number": number}
        requests = [
            ExtendPopulationRequest(**head, before_sha256=before, chunk=chunk) for chunk in split(payload)
        ]
        return await third_party.directory(certificates["cos"]).ExtendPopulation(requests)

    return send


async def test_a_wave_is_taken_without_the_users_before_once_they_are_known_and_has_one_beacon(
    people, latecomers, commit, extend, run, calls
):
    population, key = people
    once = extended(population, latecomers[:2])
    refused = await calls.refused(lambda: extend(once))
    assert (refused.reason, refused.field) == ("CONFLICT", "population")
    await commit(population)
    # Of the beginning only the hash is known.
    refused = await calls.refused(lambda: extend(once))
    assert (refused.reason, refused.field) == ("WRONG_STATE", "before_sha256")
    first = await commit(once)
    twice = extended(once, latecomers[2:3], 4)
    drawn = await extend(twice)
    verify_beacon(run, twice.hash(run), drawn.beacon, drawn.signature, key)
    thrice = extended(twice, latecomers[3:], 5)
    last = await extend(thrice)
    # The same answers again, of whichever wave and in either way.
    assert [await extend(one) for one in (once, twice, thrice)] == [first, drawn, last]
    assert [await commit(one) for one in (once, twice, thrice)] == [first, drawn, last]


async def test_a_wave_alone_is_refused_as_one_with_all_users_is(
    people, latecomers, commit, extend, calls, third_party, certificates
):
    population, _ = people
    await commit(population)
    once = extended(population, latecomers[:1])
    await commit(once)
    known = [(population.participants[0], population.devices[0]), latecomers[0]]
    directory = third_party.directory(certificates["operator"])
    await directory.Revoke(RevokeRequest(participants=[latecomers[1][0]]))
    for reason, users in (
        ("UNKNOWN_PARTICIPANT", [(b"\xff" * 32, latecomers[2][1])]),
        ("UNKNOWN_PARTICIPANT", [(latecomers[2][0], population.devices[0])]),
        ("REVOKED", latecomers[1:]),
        ("INVALID_FIELD", latecomers[:1:-1]),
        ("INVALID_FIELD", [latecomers[2]] * 2),
        *(("INVALID_FIELD", sorted([one, latecomers[2]])) for one in known),
    ):
        refused = await calls.refused(lambda users=users: extend(extended(once, users, 4)))
        assert refused.reason == reason
    twice = extended(once, latecomers[2:3], 4)
    for reason, wrong in (
        ("CONFLICT", {"number": 1}),
        ("CONFLICT", {"number": 3}),
        ("CONFLICT", {"before": bytes(32)}),
        ("INVALID_FIELD", {"before": b""}),
        ("INVALID_FIELD", {"number": 0}),
    ):
        refused = await calls.refused(lambda wrong=wrong: extend(twice, **wrong))
        assert refused.reason == reason
    await extend(twice)
    refused = await calls.refused(lambda: extend(extended(once, latecomers[3:], 4)))
    assert refused.reason == "CONFLICT"
    assert "another wave 2" in refused.text


async def test_a_server_sends_all_users_to_a_third_party_that_does_not_know_the_call_for_a_wave(
    people, latecomers, third_party, certificates, run, monkeypatch
):
    population, key = people
    channel = third_party.channel(certificates["cos"])
    server = Directory(channel, key)
    unheard = channel.stub(
        lambda inner: SimpleNamespace(
            ExtendPopulation=inner.stream_unary(
                "/coterie.v1.KeyDirectory/Unheard",
                request_serializer=ExtendPopulationRequest.SerializeToString,
                response_deserializer=CommitPopulationResponse.FromString,
            )
        )
    )
    monkeypatch.setattr(server._stub, "ExtendPopulation", unheard.ExtendPopulation, raising=False)
    population = population.signed(*await server.commit_population(run, population))
    once = extended(population, latecomers[:2])
    once = once.signed(*await server.commit_population(run, once))
    twice = extended(once, latecomers[2:], 4)
    # Refused before it was read to its end.
    padded = [*latecomers[2:], *((b"\xff" * 32, "client/" + "x" * 90),) * 20_000]
    assert await server._extend(run, extended(once, padded, 4)) is None
    beacon, signature = await server.commit_population(run, twice)
    verify_beacon(run, twice.hash(run), beacon, signature, key)


async def test_a_server_sends_all_users_with_the_first_wave_and_then_the_wave_alone(
    people, latecomers, third_party, certificates, run
):
    population, key = people
    server = Directory(third_party.channel(certificates["cos"]), key)
    population = population.signed(*await server.commit_population(run, population))
    once = extended(population, latecomers[:2])
    assert await server._extend(run, once) is None
    once = once.signed(*await server.commit_population(run, once))
    twice = extended(once, latecomers[2:], 4)
    drawn = await server._extend(run, twice)
    assert drawn is not None
    assert await server.commit_population(run, twice) == (drawn.beacon, drawn.signature)
    # What it lost it learns again, however it was signed.
    found = await server.signed_waves(run, population)
    assert found == twice.signed(drawn.beacon, drawn.signature)


async def test_a_server_that_has_lost_waves_gets_them_signed_from_the_third_party_and_nobody_else_does(
    people, latecomers, commit, third_party, certificates, run, calls
):
    population, key = people
    server = Directory(third_party.channel(certificates["cos"]), key)
    assert await server.signed_waves(run, population) is population
    population = dataclasses.replace(population, beacon=(await commit(population)).beacon)
    assert await server.signed_waves(run, population) is population
    once = extended(population, latecomers[:2])
    twice = extended(once, latecomers[2:], 4)
    drawn = [await commit(one) for one in (once, twice)]
    found = await server.signed_waves(run, population)
    waves = [
        wave._replace(beacon=one.beacon, signature=one.signature)
        for wave, one in zip(twice.waves, drawn, strict=True)
    ]
    assert found == dataclasses.replace(twice, waves=tuple(waves))
    first = dataclasses.replace(once, waves=tuple(waves[:1]))
    assert await server.signed_waves(run, first) == found
    # They follow from the users that the third party has, not from those of another server.
    other = Population(population.participants[1:], population.devices[1:])
    with pytest.raises(PeerError, match="its waves do not follow those here"):
        await server.signed_waves(run, other)
    for role in ("client", "data-owner", "operator"):
        directory = third_party.directory(certificates[role])
        refused = await calls.refused(lambda directory=directory: read(directory, run))
        assert refused.code.name == "PERMISSION_DENIED"


async def read(directory, run):
    return [piece async for piece in directory.SignedWaves(SignedWavesRequest(run_id=run))]
