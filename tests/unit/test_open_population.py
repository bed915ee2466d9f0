"""A population that grows at the server: each wave is durable before it is asked for, and used once it is signed.

Nobody answers the sums of these runs, which are abandoned after a moment: a run comes from pass to pass by that.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from coterie_cos import census
from coterie_cos.participants import Registry
from coterie_cos.sums import SumAbandoned
from coterie_cos.waiting_users import WaitingUsers

from coterie.crypto.beacon import Beacon
from coterie.errors import PeerError
from coterie.rounds import population
from coterie.rounds.population import Population, Wave
from coterie.rounds.training import Purpose
from coterie.store import cos as store
from coterie.systems.fedncf.settings import FedNcfSettings
from coterie.wire.refusal import ErrorReason, Refusal
from coterie.wire.v1 import orchestrator_pb2 as wire
from coterie.wire.v1.common_pb2 import CohortUsers, Waves
from coterie.wire.v1.common_pb2 import Population as PopulationMessage
from tests.population_stand import DRAWN, HOSTS, Stand

OPEN = {"passes": 100_000, "evaluate_every": 100_000, "step_timeout_ms": 20, "group": 2, "most_users": 7}
EVERYBODY = [b"\x00" * 32, b"\x01" * 32, b"\x0a" * 32, b"\x0b" * 32]
WHERE = ["client/b", "client/b", "client/a", "client/a"]
UNASKED = FedNcfSettings(model="gmf", dim=3, min_touch=1, touch="exact")
LATE = [b"\x02" * 32, b"\x05" * 32]
SECOND = Beacon(b"c" * 32, b"t" * 64)


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[Callable[..., Stand]]:
    made: list[Stand] = []

    def stand(**rounds: Any) -> Stand:
        one = Stand(tmp_path, UNASKED, **{**OPEN, **rounds})
        one.request.most_abandoned = 1_000_000
        one.answers = [DRAWN]
        made.append(one)
        return one

    yield stand
    for one in made:
        await one.run.drop()
        one.writer.close()


def trains(stand: Stand, users: int) -> bool:
    """Return whether a sum of training over so many users is open, durably."""
    published = stand.run._published
    return published.purpose is Purpose.TRAIN and stand.run._sums.busy and len(published.users) == users


async def begun(stand: Stand) -> None:
    """Return once the users of the beginning train."""
    await stand.come()
    await stand.until(lambda: trains(stand, 4))


def grown(from_pass: int, beacon: Beacon = SECOND) -> Population:
    wave = Wave(4, from_pass, *beacon)
    return Population([*EVERYBODY, *LATE], [*WHERE, "client/c", "client/c"], *DRAWN, (wave,))


async def test_users_who_come_later_are_in_no_pass_before_their_wave_is_durable_asked_for_and_signed(
    make: Callable[..., Stand],
) -> None:
    stand = make()
    await begun(stand)
    stand.answers = [SECOND]
    await stand.join("client/c", LATE)
    await stand.until(lambda: trains(stand, 6))
    from_pass = stand.population.waves[0].from_pass
    assert stand.run._published.pass_number == from_pass
    assert stand.population == grown(from_pass)
    assert stand.asked[1] == grown(from_pass, Beacon(b"", b""))
    # The store had the wave, without a beacon, when the third party was asked.
    ((kept,),) = [rows for rows in stand.kept_waves if rows]
    assert (kept.number, kept.from_pass, kept.beacon) == (1, from_pass, b"")
    assert [stand.waves_after(count) for count in (0, 1)] == [grown(from_pass).later_waves(0), Waves()]
    await stand.until(lambda: any(one.HasField("grown") for one in stand.run._events))
    (told,) = [one.grown for one in stand.run._events if one.HasField("grown")]
    assert (told.users, told.total, told.from_pass) == (2, 6, from_pass)
    assert stand.run.facts()["waves"] == [{"from_pass": from_pass, "users": 2}]
    await stand.restart()
    assert stand.population == grown(from_pass)
    assert len(stand.asked) == 2


async def test_a_host_that_comes_later_is_told_an_outline_and_the_users_of_the_round_in_progress(
    make: Callable[..., Stand],
) -> None:
    stand, kinds = make(), wire.FetchKind
    await begun(stand)
    whole = PopulationMessage.FromString(stand.payload(kinds.FETCH_KIND_OUTLINE))
    assert Population.from_wire(whole) == Population(EVERYBODY, WHERE, *DRAWN)
    # To a host that has a wave, as of a server that was restored without it.
    assert stand.payload(kinds.FETCH_KIND_OUTLINE, 1) == b""
    stand.answers = [SECOND]
    await stand.join("client/c", LATE)
    await stand.until(lambda: trains(stand, 6))
    population = stand.population
    told = PopulationMessage.FromString(stand.payload(kinds.FETCH_KIND_OUTLINE))
    outline = Population.from_wire(told)
    assert (len(outline), told.participants, outline) == (6, b"", population.outlined("run"))
    assert outline.hash("run") == population.hash("run")
    later = Waves.FromString(stand.payload(kinds.FETCH_KIND_OUTLINE, 1))
    assert later == Waves()
    open_round = stand.run.state.round
    await stand.run.read(wire.FetchRequest(kind=kinds.FETCH_KIND_COHORT, version=open_round))
    assert stand.run._cohort_users[0] == open_round
    shown = CohortUsers.FromString(stand.payload(kinds.FETCH_KIND_COHORT, open_round))
    ids, devices = outline.check_shown(range(6), shown)
    assert (list(ids), devices) == ([*EVERYBODY, *LATE], [*WHERE, "client/c", "client/c"])
    for role, number in (("client", open_round - 1), ("client", open_round + 1), ("data-owner", open_round)):
        request = wire.FetchRequest(kind=kinds.FETCH_KIND_COHORT, version=number)
        with pytest.raises(Refusal) as refused:
            stand.run.payload("client/a", role, request)
        known = role == "client"
        reason = ErrorReason.ERROR_REASON_UNKNOWN_ROUND if known else ErrorReason.ERROR_REASON_INVALID_FIELD
        assert refused.value.reason == reason


async def test_a_wave_costs_the_server_its_own_users_only(
    make: Callable[..., Stand], monkeypatch: pytest.MonkeyPatch
) -> None:
    stand = make(most_users=8)
    await begun(stand)
    read: list[int] = []
    hashed: list[int] = []
    people, wave_hash = Registry.people, population.wave_hash

    def counted(self: Registry, slots: Sequence[int]) -> Any:
        read.append(len(slots))
        return people(self, slots)

    def noted(run: str, number: int, *rest: Any) -> bytes:
        hashed.append(number)
        return wave_hash(run, number, *rest)

    stand.population.hash("run")
    stand.run._conduct().population.hash("run")
    monkeypatch.setattr(Registry, "people", counted)
    monkeypatch.setattr(population, "population_hash", None)
    monkeypatch.setattr(population, "wave_hash", noted)
    for number, (party, users) in enumerate((("client/c", LATE), ("client/d", [b"\x03" * 32, b"\x04" * 32]))):
        # Who is there is looked at, and then who they are.
        del read[:], hashed[:]
        stand.answers = [SECOND]
        await stand.join(party, users)
        await stand.until(lambda users_in=6 + 2 * number: trains(stand, users_in))  # type: ignore[misc]
        stand.run._conduct().population.hash("run")
        assert set(read) == {2}
        assert hashed == [number + 1]
    assert stand.asked[2].participants == [*EVERYBODY, *LATE, b"\x03" * 32, b"\x04" * 32]
    assert stand.asked[2].waves[0].beacon == SECOND.value


async def test_the_state_of_each_round_names_no_users_and_one_of_an_earlier_release_which_does_is_taken_up(
    make: Callable[..., Stand],
) -> None:
    stand = make()
    await begun(stand)
    order = tuple(stand.run.state.users)

    def written() -> Any:
        with stand.engine.connect() as connection:
            return json.loads(connection.execute(sa.select(store.runs.c.state)).scalar_one())

    assert written()["users"] == len(order) == 4
    await stand.run.drop()
    earlier = dataclasses.replace(stand.run.state, users_apart=False).to_json()
    text = json.dumps({name: value for name, value in json.loads(earlier).items() if name != "users_apart"})
    with stand.engine.begin() as connection:
        connection.execute(store.runs.update(), {"state": text})
    await stand.restart()
    assert stand.run.state.users == order
    stand.answers = [SECOND]
    at = stand.run.state.pass_number
    await stand.until(lambda: stand.run.state.pass_number > at and written()["users"] == 4)
    assert stand.population == Population(EVERYBODY, WHERE, *DRAWN)


async def test_a_run_whose_plan_names_the_beacon_has_its_users_after_a_restart(
    make: Callable[..., Stand],
) -> None:
    stand = make(beacon=bytes(range(32)), most_users=0)
    await begun(stand)
    population, at = stand.population, stand.run.state.pass_number
    assert sorted(population.participants) == sorted(EVERYBODY)
    await stand.restart()
    assert stand.population == population
    await stand.until(lambda: stand.run.state.pass_number > at)


async def test_a_run_begins_with_no_more_users_than_its_plan_allows_the_ones_who_came_first(
    make: Callable[..., Stand],
) -> None:
    stand = make(most_users=3)
    await stand.come()
    await stand.until(lambda: trains(stand, 3))
    assert stand.population == Population(EVERYBODY[:3], WHERE[:3], *DRAWN)


async def test_users_who_came_later_are_told_the_time_of_their_own_sum(make: Callable[..., Stand]) -> None:
    stand = make(cohorts=wire.CohortKind.COHORT_KIND_RANDOM, cohort=2)
    await begun(stand)

    def turns_known() -> bool:
        return all(math.isfinite(stand.run.due_s(one)) for one in HOSTS) and stand.run._turns is not None

    # Users of the beginning have asked before.
    await stand.until(turns_known)
    stand.answers = [SECOND]
    await stand.join("client/c", LATE)
    await stand.until(lambda: trains(stand, 6))
    run, parties = stand.run, (*HOSTS, "client/c")
    # At most two of the three are in the sum in progress.
    assert all(math.isfinite(run.due_s(party)) for party in parties)
    assert run._turns is not None
    for first in range(run.state.parts):
        now = dataclasses.replace(run.state, part=first)
        parts = [dataclasses.replace(now, part=part) for part in range(first, now.parts)]
        cohorts = [{now.users[place] for place in run._conduct().cohort(part).tolist()} for part in parts]
        for party in parties:
            slots = list(run.registry.slots_of(party))
            own = next((n for n, cohort in enumerate(cohorts) if cohort & set(slots)), len(parts))
            assert run._turns.sums_before(now, slots, begun=False) == own


async def test_fewer_users_than_a_group_wait_for_others_and_no_more_come_than_the_plan_allows(
    make: Callable[..., Stand],
) -> None:
    stand = make()
    await begun(stand)
    stand.answers = [SECOND]
    await stand.join("client/c", LATE[:1])
    at = stand.run.state.pass_number
    await stand.until(lambda: stand.run.state.pass_number > at + 2)
    assert len(stand.asked) == 1
    await stand.join("client/d", [LATE[1], *(bytes([n]) * 32 for n in (20, 21))])
    await stand.until(lambda: trains(stand, 7))
    await stand.join("client/e", [bytes([n]) * 32 for n in (30, 31)])
    at = stand.run.state.pass_number
    await stand.until(lambda: stand.run.state.pass_number > at + 2)
    assert len(stand.asked) == 2


async def test_the_server_looks_for_a_wave_again_only_when_somebody_comes(
    make: Callable[..., Stand], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []
    look = WaitingUsers.present

    def counted(self: WaitingUsers, *given: Any) -> list[int]:
        found = look(self, *given)
        looks.append(len(found))
        return found

    monkeypatch.setattr(WaitingUsers, "present", counted)
    stand = make()
    await begun(stand)
    await stand.join("client/c", LATE[:1])
    await stand.until(lambda: bool(looks))
    for _ in range(20):
        stand.run._invite()
    at = stand.run.state.pass_number
    await stand.until(lambda: stand.run.state.pass_number > at + 2)
    assert looks == [1]
    # One of the population comes back, and then one of those who wait.
    for party, after in (("client/a", [1]), ("client/c", [1, 1])):
        stand.run._heard.pop(party).lost = True
        assert stand.run.heard(party)
        stand.run._invite()
        assert looks == after
    stand.answers = [SECOND]
    await stand.join("client/d", LATE[1:])
    await stand.until(lambda: trains(stand, 6))
    assert looks == [1, 1, 2]


async def test_users_on_fewer_devices_than_a_cohort_needs_wait(make: Callable[..., Stand]) -> None:
    stand = make(min_cohort=2)
    await begun(stand)
    await stand.join("client/c", LATE)
    at = stand.run.state.pass_number
    await stand.until(lambda: stand.run.state.pass_number > at + 2)
    assert len(stand.asked) == 1


async def test_a_server_that_restarts_before_it_has_the_beacon_of_a_wave_asks_for_the_same_wave(
    make: Callable[..., Stand],
) -> None:
    stand = make()
    await begun(stand)
    stand.answers = [PeerError("away"), SECOND]
    await stand.join("client/c", LATE)
    await stand.until(lambda: len(stand.asked) == 2)
    await stand.restart()
    # One who comes meanwhile is not in it: the third party may have taken the wave.
    await stand.join("client/d", [b"\x03" * 32])
    await stand.until(lambda: trains(stand, 6))
    assert stand.asked[1] == stand.asked[2]
    assert stand.population == grown(stand.asked[1].waves[0].from_pass)


async def test_no_sum_of_a_pass_is_opened_while_a_wave_that_begins_with_it_has_no_beacon(
    make: Callable[..., Stand],
) -> None:
    stand = make()
    await begun(stand)
    stand.answers = [PeerError("away")] * 2
    await stand.join("client/c", LATE)
    await stand.until(lambda: bool(stand.run.waiting))
    await stand.until(lambda: stand.run.waiting.endswith("no beacon yet for users who came later: away"))
    state = stand.run.state
    assert state.pass_number == stand.asked[1].waves[0].from_pass
    assert not stand.run._sums.busy
    await stand.until(lambda: len(stand.asked) == 3)
    assert stand.run.state == state
    stand.answers = [SECOND]
    await stand.until(lambda: trains(stand, 6))
    assert stand.run._published.pass_number == state.pass_number
    assert not stand.run.waiting


async def test_a_server_that_restarts_with_a_signed_wave_takes_it_in_and_does_not_ask_again(
    make: Callable[..., Stand],
) -> None:
    stand = make()
    await begun(stand)
    stand.answers = [SECOND]
    # The third party has answered, and the server ends before the next pass.
    stand.run.proceed = lambda: None  # type: ignore[method-assign]
    await stand.join("client/c", LATE)
    stand.run._invite()
    await stand.until(lambda: stand.run._census._waves[0].drawn)
    assert len(stand.run.state.users) == 4
    await stand.restart()
    await stand.until(lambda: trains(stand, 6))
    assert len(stand.asked) == 2
    assert stand.population == grown(stand.asked[1].waves[0].from_pass)


async def test_a_server_restored_from_a_backup_without_a_wave_learns_it_and_goes_on(
    make: Callable[..., Stand],
) -> None:
    stand = make()
    await begun(stand)
    stand.back_up()
    stand.answers = [SECOND]
    await stand.join("client/c", LATE)
    await stand.until(lambda: trains(stand, 6))
    stand.signed = [stand.population]
    from_pass = stand.population.waves[0].from_pass
    await stand.restore()
    registry = stand.run.registry
    assert registry.slot_of(LATE[0]) is None
    await stand.until(lambda: trains(stand, 6))
    assert stand.run._published.pass_number >= from_pass
    assert stand.population == grown(from_pass)
    assert len(stand.asked) == 2
    # Nobody speaks for the users before their device has registered again, which gives them the slots that they have.
    assert not registry.slots_of("client/c")
    await stand.restart()
    registry = stand.run.registry
    assert not registry.slots_of("client/c")
    assert stand.population == grown(from_pass)
    await stand.join("client/c", LATE)
    assert list(registry.slots_of("client/c")) == sorted(stand.run.state.users[4:])
    assert registry.users_at("client/c") == 2
    await stand.restart()
    assert list(stand.run.registry.slots_of("client/c")) == sorted(stand.run.state.users[4:])


async def test_a_server_whose_wave_was_not_the_one_that_the_third_party_signed_takes_the_signed_one(
    make: Callable[..., Stand],
) -> None:
    stand = make()
    await begun(stand)
    stand.answers = [PeerError("away")]
    await stand.join("client/d", [bytes([3]) * 32])
    await stand.join("client/c", LATE)
    await stand.until(lambda: len(stand.asked) == 2)
    from_pass = stand.asked[1].waves[0].from_pass
    stand.signed = [grown(from_pass)]
    await stand.restart()
    await stand.until(lambda: trains(stand, 6))
    assert stand.population == grown(from_pass)
    assert len(stand.asked) == 2


async def test_after_a_restart_no_sum_is_opened_before_the_third_party_has_said_which_waves_there_are(
    make: Callable[..., Stand],
) -> None:
    stand = make()
    await begun(stand)
    # Ends before another sum is opened.
    stand.run.proceed = lambda: None  # type: ignore[method-assign]
    await stand.until(lambda: not stand.run._sums.busy)
    stand.signed = [PeerError("away")]
    await stand.restart()
    await stand.until(lambda: stand.run.waiting.endswith("not said yet which users came later: away"))
    state = stand.run.state
    assert not stand.run._sums.busy
    await stand.until(lambda: trains(stand, 4))
    assert stand.run.state.round > state.round
    assert not stand.run.waiting


async def test_a_wave_whose_users_the_third_party_did_not_keep_ends_the_run_by_name(
    make: Callable[..., Stand],
) -> None:
    stand = make()
    await begun(stand)
    stand.signed = [Refusal(ErrorReason.ERROR_REASON_WRONG_STATE, "the users of a wave are not known here")]
    await stand.restart()
    await stand.until(lambda: stand.run.over)
    assert "cannot say who: the users of a wave are not known here" in stand.run.reason


async def test_after_a_restart_only_those_who_were_heard_again_are_taken_in_and_only_once_a_sum_was_formed(
    make: Callable[..., Stand],
) -> None:
    stand = make()
    await begun(stand)
    # Kept from the wave by the end of the server.
    stand.run._invite = lambda: None  # type: ignore[method-assign]
    await stand.join("client/c", LATE)
    await stand.restart()
    stand.run.heard("client/c")
    at = stand.run.state.pass_number
    await stand.until(lambda: stand.run.state.pass_number > at + 2)
    assert len(stand.asked) == 1
    await stand.restart()
    # As once members have formed a sum: this server is no backup that they left behind.
    stand.run._is_current = True
    at = stand.run.state.pass_number
    await stand.until(lambda: stand.run.state.pass_number > at + 2)
    assert len(stand.asked) == 1
    stand.answers = [SECOND]
    stand.run.heard("client/c")
    await stand.until(lambda: trains(stand, 6))


async def test_a_device_whose_users_wait_for_a_wave_does_not_rest_and_one_that_rests_is_not_taken_in(
    make: Callable[..., Stand],
) -> None:
    stand = make()
    stand.request.check_in_ms = 60_000
    await begun(stand)
    await stand.join("client/c", LATE)
    stand.run._expect("client/c", stand.run._parties["client/c"], 60.0)
    at = stand.run.state.pass_number
    await stand.until(lambda: stand.run.state.pass_number > at + 2)
    assert len(stand.asked) == 1
    stand.answers = [SECOND]
    answer = await stand.run.poll("client/c", 0, 0, checks_in=True)
    assert not answer.come_back_ms
    await stand.until(lambda: trains(stand, 6))
    # Nobody else may come: the devices of others rest as long as they may.
    stand.run._turns = None
    await stand.join("client/d", [bytes([30]) * 32, bytes([31]) * 32, bytes([32]) * 32])
    assert not (await stand.run.poll("client/d", 0, 0, checks_in=True)).come_back_ms
    stand.run.plan.rounds.most_users = 6
    assert (await stand.run.poll("client/d", 0, 0, checks_in=True)).come_back_ms >= 30_000


async def test_a_wave_with_somebody_who_was_revoked_is_taken_back_and_another_one_follows(
    make: Callable[..., Stand],
) -> None:
    stand = make()
    await begun(stand)
    stand.answers, stand.refused = [SECOND], {LATE[0]}
    await stand.join("client/c", LATE)
    await stand.until(lambda: len(stand.asked) > 1)
    stand.gone.add(LATE[0])
    await stand.join("client/d", [b"\x03" * 32])
    await stand.until(lambda: trains(stand, 6))
    assert [one[0] for one in stand.population.participants[4:]] == [3, 5]


async def test_after_a_wave_was_refused_the_next_one_is_not_asked_for_before_a_pause(
    make: Callable[..., Stand], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(census, "_AGAIN_S", 3600.0)
    stand = make()
    await begun(stand)
    stand.refused = {LATE[0]}
    await stand.join("client/c", LATE)
    await stand.until(lambda: len(stand.asked) == 2 and not stand.run._census._waves)
    await stand.until(lambda: bool(stand.run._census._waves))
    await stand.until(lambda: bool(stand.run.waiting))
    assert len(stand.asked) == 2


async def test_a_third_party_of_an_earlier_release_is_named_as_a_cause_why_users_wait(
    make: Callable[..., Stand], monkeypatch: pytest.MonkeyPatch
) -> None:
    stand = make()
    await begun(stand)
    stand.answers = [Refusal(ErrorReason.ERROR_REASON_INVALID_FIELD, "not in order"), SECOND]
    said: list[str] = []
    monkeypatch.setattr(census._log, "warning", lambda _, **facts: said.append(facts["reason"]))
    await stand.join("client/c", LATE)
    await stand.until(lambda: bool([one for one in said if "not in order" in one]))
    (one,) = [one for one in said if "not in order" in one]
    assert one.endswith("a third party of release 0.1 refuses every wave so: upgrade it")
    await stand.until(lambda: trains(stand, 6))


async def test_a_wave_that_the_third_party_knows_otherwise_ends_the_run(make: Callable[..., Stand]) -> None:
    stand = make()
    await begun(stand)
    stand.answers = [Refusal(ErrorReason.ERROR_REASON_CONFLICT, "this run has another wave 1")]
    await stand.join("client/c", LATE)
    await stand.until(lambda: stand.run.over)
    assert stand.run.reason == "the third party refuses users who came later: this run has another wave 1"


async def test_a_group_that_went_away_again_is_asked_three_times_with_a_pause_in_between(
    make: Callable[..., Stand], monkeypatch: pytest.MonkeyPatch
) -> None:
    stand = make(step_timeout_ms=60_000)
    await stand.come()
    await stand.until(lambda: stand.training and stand.run._sums.busy)
    # As where the members of the next sum are away: none was opened.
    stand.run._sums.close()
    stand.run.state = dataclasses.replace(
        stand.run.state, purpose=Purpose.SUPPORTS, part=1, supports=True, pass_number=1
    )
    paused: list[int] = []
    monkeypatch.setattr(stand.run, "pause", paused.append)
    for _ in range(3):
        await stand.run.count_abandoned(SumAbandoned("all are away", ()))
    assert paused == [1, 2, 0]
    assert stand.run.state.purpose is Purpose.TRAIN


async def test_nobody_comes_later_where_the_population_is_closed(make: Callable[..., Stand]) -> None:
    stand = make(most_users=0)
    await begun(stand)
    await stand.join("client/c", LATE)
    at = stand.run.state.pass_number
    await stand.until(lambda: stand.run.state.pass_number > at + 2)
    assert len(stand.asked) == 1
    assert len(stand.run.state.users) == 4
