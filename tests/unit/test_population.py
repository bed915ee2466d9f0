"""The population of a run: its order, how it travels, and what is refused when it arrives."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from coterie.crypto.beacon import draw_beacon, wave_hash
from coterie.crypto.verification import VerificationError
from coterie.rounds import population
from coterie.rounds.population import Population, Wave, canonical_order, check_canonical
from coterie.wire.refusal import ErrorReason, Refusal
from coterie.wire.v1 import common_pb2 as wire
from coterie.wire.v1.orchestrator_pb2 import PrivacyPlan, RoundsPlan, RunPlan

IDS = [bytes([n]) * 32 for n in (3, 1, 2, 0)]
USERS = [(5, IDS[0], "client/b"), (2, IDS[1], "client/a"), (9, IDS[2], "client/b"), (1, IDS[3], "client/c")]


@given(st.permutations(USERS))
def test_users_stand_in_the_order_of_their_ids_however_they_came(users: list[tuple[int, bytes, str]]) -> None:
    order = canonical_order(users, RunPlan())
    assert order == [1, 2, 9, 5]
    ids = {slot: participant for slot, participant, _ in USERS}
    check_canonical([ids[slot] for slot in order])


def test_users_of_an_experiment_that_can_be_repeated_stand_by_device_and_slot_whatever_their_keys() -> None:
    plan = RunPlan(rounds=RoundsPlan(beacon=bytes(32)))
    assert canonical_order(USERS, plan) == [2, 5, 9, 1]
    others = [(slot, participant[::-1], device) for slot, participant, device in USERS[::-1]]
    assert canonical_order(others, plan) == [2, 5, 9, 1]


@given(st.lists(st.binary(min_size=32, max_size=32), min_size=1, max_size=9), st.data())
def test_a_population_travels_whole(participants: list[bytes], data: st.DataObject) -> None:
    devices = data.draw(st.lists(st.text(max_size=5), min_size=len(participants), max_size=len(participants)))
    population = Population(participants, devices, b"b" * 32, b"s" * 64)
    back = Population.from_wire(wire.Population.FromString(population.to_wire().SerializeToString()))
    assert back == population
    assert back.hash("run") == population.hash("run")


def three_waves() -> Population:
    """Return a population of two users to whom three more came by one, and by two in another wave, and by three."""
    ids = [bytes([n]) * 32 for n in range(8)]
    waves = (Wave(2, 1, b"b", b"s"), Wave(3, 4, b"c", b"t"), Wave(5, 6, b"d", b"u"))
    devices = [f"client/{n // 2}" for n in range(8)]
    return Population(ids, devices, b"a", b"r", waves)


@pytest.mark.parametrize("known", range(4))
def test_later_waves_extend_the_population_that_was_before_them_and_its_hashes_are_not_computed_again(
    known: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = three_waves()
    expected, before = whole.hashes("run"), whole.first_waves(known)
    before.hashes("run")
    numbers: list[int] = []

    def noted(run: str, number: int, *rest: Any) -> bytes:
        numbers.append(number)
        return wave_hash(run, number, *rest)

    monkeypatch.setattr(population, "wave_hash", noted)
    monkeypatch.setattr(population, "population_hash", None)
    found = before.extended(wire.Waves.FromString(whole.later_waves(known).SerializeToString()))
    assert found == whole
    assert found.hashes("run") == expected
    assert numbers == list(range(known + 1, 4))


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("waves.waves", wire.Waves(devices=["client/a"], participants=bytes(32), device=[0])),
        (
            "waves.waves",
            wire.Waves(
                devices=["client/a"], participants=bytes(64), device=[0, 0], waves=[wire.Wave(first=1)]
            ),
        ),
        (
            "waves.device",
            wire.Waves(devices=["client/a"], participants=bytes(64), device=[0], waves=[wire.Wave()]),
        ),
        (
            "waves.device",
            wire.Waves(devices=["client/a"], participants=bytes(32), device=[1], waves=[wire.Wave()]),
        ),
        ("waves.participants", wire.Waves(waves=[wire.Wave()])),
    ],
    ids=["users of no wave", "users before the first", "too few", "no such device", "nobody"],
)
def test_waves_that_do_not_hold_together_are_refused(field: str, message: wire.Waves) -> None:
    with pytest.raises(Refusal) as refused:
        three_waves().extended(message)
    assert (refused.value.reason, refused.value.field) == (ErrorReason.ERROR_REASON_INVALID_FIELD, field)


def change(field: str, value: object) -> Callable[[wire.Population], None]:
    def make(message: wire.Population) -> None:
        message.ClearField(field)  # type: ignore[arg-type]
        message.MergeFrom(wire.Population(**{field: value}))  # type: ignore[arg-type]

    return make


@pytest.mark.parametrize(
    ("field", "made"),
    [
        ("participants", change("participants", b"")),
        ("participants", change("participants", bytes(95))),
        ("device", change("device", [0])),
        ("device", change("device", [0, 2])),
        ("devices", change("devices", ["client/a", "client/a"])),
    ],
)
def test_a_population_that_cannot_be_is_refused_with_the_field_that_is_wrong(
    field: str, made: Callable[[wire.Population], None]
) -> None:
    message = Population(IDS[:2], ["client/a", "client/b"]).to_wire()
    Population.from_wire(message)
    made(message)
    with pytest.raises(Refusal, match=f"the population has a bad {field}") as refused:
        Population.from_wire(message)
    assert refused.value.reason == ErrorReason.ERROR_REASON_INVALID_FIELD
    assert refused.value.field == f"population.{field}"


def test_a_beacon_is_the_plans_where_it_names_one() -> None:
    population = Population(IDS[:1], ["client/a"], b"b" * 32)
    assert population.drawn(RunPlan()) == b"b" * 32
    named = RunPlan(rounds=RoundsPlan(beacon=b"p" * 32))
    assert dataclasses.replace(population, beacon=b"").drawn(named) == b"p" * 32


# --- users who come later


OPEN = RunPlan(
    run_id="run",
    secure_sum="masked",
    rounds=RoundsPlan(cohorts=1, group=2, min_cohort=2, min_sum=2, passes=9, most_users=8),  # type: ignore[arg-type]
)
FIRST = [bytes([n]) * 32 for n in (5, 7, 9)]
LATER = [bytes([n]) * 32 for n in (1, 6)]
LAST = [bytes([n]) * 32 for n in (2, 3, 4)]
KEY = Ed25519PrivateKey.generate()
PUBLIC = KEY.public_key().public_bytes_raw()


def devices_of(participants: Sequence[bytes]) -> list[str]:
    return [f"client/{one[0]}" for one in participants]


def wave_of(population: Population, users: list[bytes], from_pass: int) -> Population:
    """Return a population with one more wave, signed."""
    found = dataclasses.replace(
        population,
        participants=[*population.participants, *users],
        devices=[*population.devices, *devices_of(users)],
        waves=(*population.waves, Wave(len(population), from_pass)),
    )
    drawn = draw_beacon("run", found.hash("run"), KEY)
    return dataclasses.replace(found, waves=(*population.waves, Wave(len(population), from_pass, *drawn)))


def closed() -> Population:
    found = Population(FIRST, devices_of(FIRST))
    drawn = draw_beacon("run", found.hash("run"), KEY)
    return dataclasses.replace(found, beacon=drawn.value, signature=drawn.signature)


def test_a_population_that_has_grown_travels_whole_and_is_in_each_pass_what_it_was() -> None:
    once = wave_of(closed(), LATER, 2)
    twice = wave_of(once, LAST, 5)
    twice.check(OPEN, PUBLIC)
    back = Population.from_wire(wire.Population.FromString(twice.to_wire().SerializeToString()))
    assert back == twice
    assert [back.waves_by(number) for number in range(7)] == [0, 0, 1, 1, 1, 2, 2]
    assert [back.first_waves(count) for count in range(3)] == [closed_as(twice), once, twice]
    assert back.hashes("run") == (closed_as(twice).hash("run"), once.hash("run"), twice.hash("run"))
    assert back.drawn(OPEN) == twice.waves[1].beacon != once.drawn(OPEN)


def closed_as(population: Population) -> Population:
    """Return the users of the beginning of a population that has grown, built anew."""
    return Population(FIRST, devices_of(FIRST), population.beacon, population.signature)


def test_the_hash_of_a_wave_depends_on_run_number_pass_all_users_and_all_devices_before_it() -> None:
    base = wave_of(closed(), LATER, 2)
    others = [
        wave_of(closed(), LATER, 3),
        wave_of(closed(), [LATER[0]], 2),
        wave_of(dataclasses.replace(closed(), devices=["client/x", *closed().devices[1:]]), LATER, 2),
        wave_of(dataclasses.replace(closed(), participants=[LAST[0], *FIRST[1:]]), LATER, 2),
        Population([*FIRST, *LATER], devices_of([*FIRST, *LATER])),
    ]
    before, users = closed().hash("run"), (LATER, devices_of(LATER))
    numbered = [wave_hash("run", number, 2, before, *users) for number in (1, 2)]
    assert numbered[0] == base.hash("run") != numbered[1]
    found = [one.hash("run") for one in [base, *others]]
    assert len({*found, base.hash("another")}) == len(found) + 1


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (lambda: wave_of(closed(), LATER[:1], 2), "1 users on 1 devices; at least 2 on 2"),
        (lambda: wave_of(closed(), LATER[::-1], 2), "do not stand in the order"),
        (lambda: wave_of(closed(), [LATER[0], FIRST[2]], 2), "in the population twice"),
        (lambda: wave_of(closed(), LATER, 0), "begins with pass 0"),
        (lambda: wave_of(closed(), LATER, 9), "begins with pass 9"),
        (
            lambda: wave_of(wave_of(closed(), LATER, 2), LAST, 2),
            "wave 2 of the population begins with pass 2",
        ),
        (
            lambda: wave_of(wave_of(closed(), LATER, 2), [*LAST, b"\x0a" * 32], 3),
            "a population of 9 users; the run's plan allows 8",
        ),
    ],
    ids=["one user", "another order", "twice", "before the run", "after the run", "at once", "too many"],
)
def test_a_wave_that_the_plan_does_not_allow_is_refused_though_the_third_party_signed_it(
    changed: Callable[[], Population], words: str
) -> None:
    found = changed()
    # By a host that sees the population first, and by one that has checked all before the wave.
    for checked in (0, len(found.waves)):
        with pytest.raises(ValueError, match=words):
            found.check(OPEN, PUBLIC, checked)


def test_a_wave_is_refused_by_hosts_of_a_run_whose_population_is_closed_or_must_be() -> None:
    grown = wave_of(closed(), LATER, 2)
    grown.check(OPEN, PUBLIC)
    for changes, words in (
        ({"most_users": 0}, "which the run's plan does not allow"),
        ({"redraw": 50}, "groups are drawn anew"),
        ({"privacy": PrivacyPlan(noise=1.0)}, "what a user's privacy costs"),
        ({"experiment": True}, "does not in an experiment"),
        ({"cohorts": 2}, "join whole groups"),
    ):
        plan = RunPlan()
        plan.CopyFrom(OPEN)
        plan.rounds.MergeFrom(RoundsPlan(**{key: value for key, value in changes.items() if value}))  # type: ignore[arg-type]
        if not changes.get("most_users", 1):
            plan.rounds.most_users = 0
        with pytest.raises(ValueError, match=words):
            grown.check(plan, PUBLIC)
    sealed = RunPlan()
    sealed.CopyFrom(OPEN)
    sealed.secure_sum = "shared-key"
    with pytest.raises(ValueError, match="expected clear or masked"):
        grown.check(sealed, PUBLIC)
    # Before anybody came, too.
    with pytest.raises(ValueError, match="expected clear or masked"):
        closed().check(sealed, PUBLIC)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_each_wave_needs_the_third_partys_signature_of_its_own_beacon(number: int) -> None:
    grown = wave_of(wave_of(closed(), LATER, 2), LAST, 5)
    if number:
        waves = list(grown.waves)
        waves[number - 1] = waves[number - 1]._replace(beacon=bytes(32))
        grown = dataclasses.replace(grown, waves=tuple(waves))
    else:
        grown = dataclasses.replace(grown, beacon=bytes(32))
    with pytest.raises(VerificationError):
        grown.check(OPEN, PUBLIC)


def test_a_wave_that_was_not_checked_is_checked_and_those_before_it_are_not_again() -> None:
    once = wave_of(closed(), LATER, 2)
    twice = wave_of(once, LAST, 5)
    forged = dataclasses.replace(
        twice, waves=(twice.waves[0]._replace(beacon=bytes(32)), twice.waves[1]), signature=bytes(64)
    )
    forged.check(OPEN, PUBLIC, 2)
    with pytest.raises(VerificationError):
        forged.check(OPEN, PUBLIC, 1)
    last = dataclasses.replace(twice, waves=(twice.waves[0], twice.waves[1]._replace(beacon=bytes(32))))
    with pytest.raises(VerificationError):
        last.check(OPEN, PUBLIC, 2)


@pytest.mark.parametrize("checked", [0, 1, 2])
def test_somebody_who_comes_twice_is_found_whichever_waves_were_checked_before(checked: int) -> None:
    once = wave_of(closed(), LATER, 2)
    again = wave_of(once, sorted([once.participants[0], LAST[0]]), 5)
    with pytest.raises(ValueError, match="twice"):
        again.check(OPEN, PUBLIC, checked)
    # Whole ids are compared, not their beginnings.
    alike = once.participants[0][:8] + bytes([255]) * 24
    wave_of(once, sorted([alike, LAST[0]]), 5).check(OPEN, PUBLIC, checked)


@pytest.mark.parametrize("first", [0, 2, 3])
def test_a_wave_without_users_does_not_travel(first: int) -> None:
    message = closed().to_wire()
    message.waves.add(first=1, from_pass=1)
    message.waves.add(first=first, from_pass=2)
    if first == 2:
        Population.from_wire(message)
        return
    with pytest.raises(Refusal, match="the population has a bad waves"):
        Population.from_wire(message)
