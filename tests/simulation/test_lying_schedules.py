"""A server that may say anything gets no two sums of the same values over other members; without a ledger it does."""

import os
from dataclasses import replace

import pytest

from coterie.rounds.holder_round import HolderRound
from coterie.rounds.ledger import Ledger
from coterie.rounds.member_round import MemberRound
from tests.simulation.rig.__main__ import main
from tests.simulation.rig.lying import lie, solved

SCHEDULES = 100_000 if os.environ.get("COTERIE_FULL") else 1_000

SUMS = ("masked", "encrypted")


@pytest.mark.parametrize("secure_sum", SUMS)
def test_no_schedule_of_lies_gives_a_member_away(secure_sum):
    # Schedules of another seed each time would be another test each time.
    total = lie(range(SCHEDULES), secure_sum)
    assert total.schedules == SCHEDULES
    assert total.sums > SCHEDULES / 4, "lies that nobody believes show nothing"
    assert total.solved == ()
    assert total.fewest_apart is None
    assert total.fewest is not None
    assert total.fewest >= 2


def _forgets(kind):
    """Return a state machine that knows of no sum that was revealed before its own."""

    def make(plan, journal, half):
        return kind(plan, replace(journal, ledger=Ledger()), half)

    return make


@pytest.mark.parametrize(
    ("secure_sum", "machines"),
    [("masked", {"member": _forgets(MemberRound)}), ("encrypted", {"holder": _forgets(HolderRound)})],
    ids=SUMS,
)
def test_without_a_ledger_lies_give_members_away(secure_sum, machines):
    total = lie(range(1_000), secure_sum, **machines)
    assert len(total.solved) > 10
    assert total.fewest_apart == 1


@pytest.mark.parametrize(
    ("sets", "found"),
    [
        ([], set()),
        ([{1, 2}], set()),
        ([{1}], {1}),
        ([{1, 2, 3}, {1, 2}], {3}),
        ([{1, 2}, {2, 3}, {1, 3}], {1, 2, 3}),
        ([{1, 2}, {3, 4}, {1, 3}, {2, 4}], set()),
        ([{1, 2, 3, 4}, {1, 2}, {3}], {3, 4}),
    ],
)
def test_members_are_solved_for_by_linear_algebra(sets, found):
    assert solved([frozenset(one) for one in sets]) == found


def test_the_command_counts_schedules_and_says_what_they_show(capsys):
    assert main(["--lying", "--sum", "masked", "--schedules", "300"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("masked, a server that lies: 300 schedules")
    assert "schedules that give somebody away: 0" in told
    with pytest.raises(SystemExit):
        main(["--lying", "--sum", "clear"])
    assert "--lying takes --sum masked or encrypted" in capsys.readouterr().err
