"""A run's population at the server: durable before the third party is asked, and one for each run, whatever happens."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from coterie_cos.participants import Registry

from coterie.errors import PeerError
from coterie.rounds.population import Population
from coterie.wire.refusal import ErrorReason, Refusal
from coterie.wire.v1 import operator_pb2 as operator
from tests.population_stand import DRAWN, Stand


@pytest.fixture
async def stand(tmp_path: Path) -> AsyncIterator[Stand]:
    one = Stand(tmp_path)
    yield one
    await one.run.drop()
    one.writer.close()


EVERYBODY = [b"\x00" * 32, b"\x01" * 32, b"\x0a" * 32, b"\x0b" * 32]
WHERE = ["client/b", "client/b", "client/a", "client/a"]


async def test_the_population_is_durable_before_the_third_party_is_asked_and_its_beacon_before_rounds_begin(
    stand: Stand,
) -> None:
    stand.answers = [DRAWN]
    await stand.come()
    await stand.until(lambda: stand.training)
    # The third user was enough: hosts that come later are not in it.
    (asked,), (kept,) = stand.asked, stand.kept
    assert asked == Population(EVERYBODY, WHERE)
    assert (kept.beacon, kept.signature) == (b"", b"")
    assert stand.population == Population(EVERYBODY, WHERE, *DRAWN)
    await stand.restart()
    assert stand.training
    assert stand.population == Population(EVERYBODY, WHERE, *DRAWN)
    assert len(stand.asked) == 1


async def test_a_server_that_restarts_before_it_has_the_beacon_asks_for_the_same_population(
    stand: Stand,
) -> None:
    stand.answers = [PeerError("away"), DRAWN]
    await stand.come()
    await stand.until(lambda: len(stand.asked) == 1)
    await stand.restart()
    # A user who comes meanwhile is not in it: the third party may have taken the first population.
    stand.run.registry.add("client/c", [b"\x05" * 32], {})
    await stand.run.joined("client/c", catalogue=False, more=True)
    await stand.until(lambda: stand.training)
    assert stand.asked == [Population(EVERYBODY, WHERE)] * 2


async def test_while_the_third_party_is_away_the_run_gathers_on_and_says_why(stand: Stand) -> None:
    stand.answers = [PeerError("away")]
    await stand.come()
    await stand.until(lambda: bool(stand.run._census.says))
    assert stand.run.phase == operator.RunPhase.RUN_PHASE_GATHER
    stand.run._gather_since -= 3601
    await stand.until(lambda: stand.run.over)
    assert "the third party drew no beacon: away" in stand.run.reason


async def test_a_user_who_is_revoked_meanwhile_is_left_out_of_another_population(stand: Stand) -> None:
    stand.answers, stand.refused = [DRAWN], {EVERYBODY[1]}
    await stand.come()
    await stand.until(lambda: len(stand.asked) == 1)
    stand.gone.add(EVERYBODY[1])
    await stand.until(lambda: stand.training)
    assert stand.population.participants == [EVERYBODY[0], *EVERYBODY[2:]]


@pytest.mark.parametrize(
    "reason", [ErrorReason.ERROR_REASON_CONFLICT, ErrorReason.ERROR_REASON_UNKNOWN_PARTICIPANT]
)
async def test_a_population_that_the_third_party_refuses_for_good_ends_the_run(
    stand: Stand, reason: ErrorReason.ValueType
) -> None:
    stand.answers = [Refusal(reason, "this run has another population")]
    await stand.come()
    await stand.until(lambda: stand.run.over)
    assert stand.run.reason == "the third party refuses the population: this run has another population"
    assert len(stand.asked) == 1


async def test_users_are_looked_at_again_only_once_so_many_have_come_as_lacked(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[str] = []
    users_of = Registry.users_of

    def counted(self: Registry, party: str) -> Iterator[tuple[int, bytes]]:
        looks.append(party)
        return users_of(self, party)

    monkeypatch.setattr(Registry, "users_of", counted)
    stand.answers = [DRAWN]
    stand.request.expect_users = 5
    # Of the four users who come first three are revoked.
    stand.gone |= {bytes([n]) * 32 for n in (0, 1, 10)}
    await stand.come()
    assert looks == []
    await stand.join("client/c", [b"\x20" * 32, b"\x21" * 32])
    first = len(looks)
    assert first == 4
    # Two lack: nobody is looked at for the next one, nor as one of the revoked comes back.
    await stand.join("client/d", [b"\x22" * 32])
    await stand.run.returned("client/b")
    assert len(looks) == first
    await stand.join("client/e", [b"\x23" * 32])
    assert len(looks) > first
    await stand.until(lambda: stand.training)
    assert len(stand.population) == 5
