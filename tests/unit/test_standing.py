"""A server restored from a backup follows its members: where they say that they stand, and what a run makes of it."""

import dataclasses

import pytest

from coterie.rounds.ledger import Entry, Ledger
from coterie.rounds.member_round import Journal
from coterie.rounds.standing import Standing, agreed
from coterie.rounds.training import (
    Purpose,
    RoundSummed,
    ServerBehind,
    Started,
    Training,
    TrainingPhase,
    begin_round,
    step,
)
from coterie.wire.refusal import Refusal
from tests.unit.test_training import new


def journal(joined, *entries):
    return Journal(joined, b"", Ledger(tuple(Entry(*one, bytes(32)) for one in entries)))


def test_a_party_says_where_the_furthest_of_its_journals_is():
    said = Standing.of(
        [journal(7, ("train", 2, 1)), journal(9, ("train", 1, 5)), journal(3, ("evaluate", 2, 0))]
    )
    assert said == Standing(9, {"train": (2, 1), "evaluate": (2, 0)})
    assert Standing.from_bytes(said.to_bytes()) == said
    assert Standing.from_bytes(b"") == Standing()


@pytest.mark.parametrize("payload", [b"\xff", Standing(1, {f"p{n}": (0, 0) for n in range(17)}).to_bytes()])
def test_what_is_no_standing_is_refused(payload):
    with pytest.raises(Refusal, match="no Standing"):
        Standing.from_bytes(payload)


@pytest.mark.parametrize(
    ("joined", "parties", "expected"),
    [
        ([9, 9, 9], 3, 9),
        ([9, 7], 3, 7),
        # One of three, or two of four, might be lying.
        ([10**9], 3, 0),
        ([9, 9], 4, 0),
        ([10**9, 7, 6], 4, 6),
        ([8], 1, 8),
        ([], 2, 0),
    ],
)
def test_a_server_goes_where_more_than_half_of_the_parties_are_at_least(joined, parties, expected):
    said = [Standing(one, {"train": (one, 0)}) for one in joined]
    found = agreed(said, parties)
    assert found.joined == expected
    assert found.places.get("train", (0, 0)) == (expected, 0)


def run(**changes) -> Training:
    plan = {"supports": False, "passes": 10, "evaluate_every": 2, **changes}
    state = step(new(**plan), Started(tuple(range(6)), 2, 2, 1))
    while state.purpose is not Purpose.TRAIN:
        state = step(begin_round(state), RoundSummed())
    return begin_round(state)


def test_a_run_goes_on_after_the_last_sum_that_its_members_revealed():
    state = run()
    behind = step(state, ServerBehind(40, {"evaluate": (4, 0), "train": (5, 0)}))
    assert (behind.round, behind.purpose, behind.pass_number, behind.part) == (40, Purpose.TRAIN, 5, 1)
    assert behind.version == state.version, "versions since the backup are lost"
    assert begin_round(behind).round == 41
    behind = step(state, ServerBehind(40, {"train": (5, 1)}))
    assert (behind.purpose, behind.pass_number) == (Purpose.EVALUATE, 6)
    behind = step(state, ServerBehind(40, {"evaluate": (6, 0), "train": (5, 1)}))
    assert (behind.purpose, behind.pass_number, behind.part) == (Purpose.TRAIN, 6, 0)
    assert behind.evaluations == state.evaluations


def test_a_run_only_takes_a_higher_number_where_its_members_have_revealed_nothing_more():
    state = run()
    for places in ({}, {"train": (0, 0)}, {"evaluate": (0, 0)}, {"window": (90, 0)}, {"train": (99, 0)}):
        behind = step(dataclasses.replace(state, part=1), ServerBehind(40, places))
        assert (behind.round, behind.purpose, behind.pass_number, behind.part) == (40, Purpose.TRAIN, 0, 1), (
            places
        )
    assert step(state, ServerBehind(state.round, {})) == state
    assert step(state, ServerBehind(0, {})) == state


def test_a_run_whose_rest_is_behind_its_members_is_done():
    behind = step(run(), ServerBehind(40, {"evaluate": (10, 0), "train": (9, 1)}))
    assert behind.phase is TrainingPhase.DONE


@pytest.mark.parametrize(("redraw", "pass_number"), [(0, 3), (4, 5)])
def test_a_run_that_lacks_what_groups_say_once_fails_and_says_so(redraw, pass_number):
    if redraw:
        state = run(supports=True, redraw=redraw)
    else:
        state = begin_round(step(new(supports=True), Started(tuple(range(6)), 2, 2, 1)))
        assert step(state, ServerBehind(9, {"supports": (0, 0)})).phase is TrainingPhase.ROUNDS
    behind = step(state, ServerBehind(40, {"supports": (0, 1), "train": (pass_number, 0)}))
    assert behind.phase is TrainingPhase.FAILED
    assert "groups say it once" in behind.reason
