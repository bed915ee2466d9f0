"""Attacks by users who lie: what they make of data and contributions, and what rules leave of the harm."""

import dataclasses

import numpy as np
import pytest

from coterie.config.run import RunSettings
from coterie.errors import ConfigError
from coterie.evaluation.holdout import TRAIN, VALIDATION
from coterie.rounds.sides import User
from coterie.secure_sum.contribution import Layout, Segment
from coterie.secure_sum.plan import Member, SumPlan, layout_hash
from coterie.studies.poisoning import (
    POISONINGS,
    NormRecorder,
    PoisonedSide,
    chosen_liars,
    poisoned_host,
    pushed_item,
)
from coterie.studies.run_data import load, make_feed
from coterie.systems.shared.host_data import HostData

LAYOUT = Layout(
    (
        Segment("rows", (4, 2), 1.0, 8),
        Segment.whole("count", (), 5),
        Segment("metrics", (2,), 1.0, 8, measures=True),
    )
)
USERS = 4


def feed_of(**synthetic):
    sizes = {"users": 60, "items": 40, "interactions": 900, **synthetic}
    settings = RunSettings.model_validate(
        {"system": "fedmf", "split": {"kind": "random"}, "data": {"synthetic": sizes}}
    )
    return make_feed(settings, load(settings), 0)


class Honest:
    """A side whose user ``u`` contributes steps of ``u + 1`` in row ``u``, and the same metrics."""

    def __init__(self):
        self.measured = {}

    def layout(self, purpose):
        return LAYOUT

    def inputs(self, purpose):
        return ()

    def recommend(self, model, user):
        return np.zeros(4, np.float32)

    def contributions(self, plan, model, opened, members):
        for member, users in members.items():
            steps = np.zeros(LAYOUT.size, np.int64)
            for user in users:
                steps[2 * user.index] += plan.round * (user.index + 1)
                steps[8:] += 1
            yield member, steps.astype(np.uint32) + LAYOUT.zeros(len(users))


def sent(attack, liars, *, round_=1, purpose="train", side=None, members=None):
    """Return the steps that each member sends."""
    members = members or {n: [User(n, 0)] for n in range(USERS)}
    plan = SumPlan(
        "run",
        round_,
        purpose,
        "clear",
        bytes(32),
        layout_hash(LAYOUT),
        tuple(Member(bytes([n]) * 32, "host", len(users)) for n, users in members.items()),
    )
    side = side or PoisonedSide(Honest(), POISONINGS[attack], liars)
    return {
        member: (codes - LAYOUT.zeros(len(members[member]))).view(np.int32)
        for member, codes in side.contributions(plan, {}, None, members)
    }


def test_boosted_contributions_are_ten_times_as_long_but_for_counts_and_metrics():
    found = sent("boosted", {1, 3})
    assert sorted(found) == [0, 1, 2, 3]
    assert [found[n][2 * n] for n in range(4)] == [1, 20, 3, 40]
    assert all(np.array_equal(found[n][8:], [1, 1, 1]) for n in range(4))


def test_a_lie_is_cut_off_where_the_server_would_refuse_it():
    found = sent("boosted", {3}, round_=20)
    assert found[3][6] == 127
    assert LAYOUT.possible((found[3].astype(np.uint32) + LAYOUT.zeros(1)), 1)


def test_sybils_send_the_opposite_of_their_sum_all_of_them():
    found = sent("sybils", {1, 2})
    assert np.array_equal(found[1][:8], found[2][:8])
    assert found[1][:8].tolist() == [0, 0, -2, 0, -3, 0, 0, 0]
    assert found[0][0] == 1


def test_free_riders_send_zeros_or_their_first_contribution_or_one_of_the_right_size():
    assert not sent("zeros", {2})[2][:8].any()
    side = PoisonedSide(Honest(), POISONINGS["stale"], {2})
    assert sent("stale", {2}, side=side)[2][4] == 3
    assert sent("stale", {2}, side=side, round_=5)[2][4] == 3
    assert sent("stale", {2}, side=side, round_=5)[1][2] == 10
    noise = [sent("noise", {2}, round_=n)[2][:8] for n in (1, 2, 3, 4)]
    assert all(sorted(one.tolist()) == [*[0] * 7, 3 * n] for n, one in enumerate(noise, 1))
    assert len({int(np.argmax(one)) for one in noise}) > 1
    assert np.array_equal(noise[1], sent("noise", {2}, round_=2)[2][:8])


def test_a_member_lies_only_if_all_its_users_do_and_only_in_training():
    members = {0: [User(0, 0), User(1, 0)], 1: [User(2, 0), User(3, 0)]}
    found = sent("zeros", {1, 2, 3}, members=members)
    assert found[0][[0, 2]].tolist() == [1, 2]
    assert not found[1][:8].any()
    assert sent("zeros", {1}, purpose="evaluate")[1][2] == 2


def test_the_norms_of_the_first_round_of_training_are_noted():
    norms = []
    side = NormRecorder(Honest(), norms)
    assert sent("none", {}, side=side, purpose="evaluate")
    assert norms == []
    assert sent("none", {}, side=side, round_=2)
    assert sent("none", {}, side=side, round_=3)
    assert norms == pytest.approx([2 * n / 127 for n in (1, 2, 3, 4)])


# --- data --------------------------------------------------------------------------------------------------------

DATA = HostData(
    ("a", "b"),
    tuple("vwxyz"),
    np.array([0, 0, 0, 1, 1]),
    np.array([0, 1, 2, 0, 3]),
    np.array([TRAIN, TRAIN, VALIDATION, TRAIN, TRAIN]),
    np.array([1.0, 4.0, 5.0, 2.0, 3.0], np.float32),
)
LIAR = np.array([True, False])


def poisoned(name, data=DATA, ratings=(1.0, 5.0), target=4):
    kept = []
    poisoned_host(
        POISONINGS[name], LIAR, target, ratings, 0, data, lambda made: kept.append(made) or Honest()
    )
    return kept[0]


def test_liars_rate_the_opposite_in_training_and_nobody_elses_ratings_change():
    assert poisoned("label-flip").rating.tolist() == [5, 2, 5, 2, 3]


def test_without_ratings_liars_have_items_that_they_never_chose():
    plain = dataclasses.replace(DATA, rating=np.full(5, np.nan))
    made = poisoned("label-flip", plain, None)
    assert set(made.item[:2].tolist()) <= {3, 4}
    assert made.item[2:].tolist() == [2, 0, 3]


def test_liars_have_the_pushed_item_and_rate_it_best():
    made = poisoned("push")
    assert (made.user[5:].tolist(), made.item[5:].tolist(), made.rating[5:].tolist()) == ([0], [4], [5.0])
    assert made.part[5:].tolist() == [TRAIN]
    assert poisoned("push", target=0).rating.tolist() == [5, 4, 5, 2, 3]
    assert len(poisoned("push", target=0).user) == 5


@pytest.mark.parametrize("name", ["none", "zeros", "sybils", "noise", "stale"])
def test_other_liars_have_honest_data(name):
    assert poisoned(name) is DATA


def test_liars_are_a_share_of_the_users_drawn_with_the_seed():
    feed = feed_of()
    one, same, other = chosen_liars(feed, 0.1, 0), chosen_liars(feed, 0.1, 0), chosen_liars(feed, 0.1, 1)
    assert one.sum() == 6
    assert np.array_equal(one, same)
    assert not np.array_equal(one, other)
    assert chosen_liars(feed, 0.001, 0).sum() == 1


def test_the_pushed_item_is_the_rarest_that_five_users_have():
    feed = feed_of()
    data, train = feed.dataset, feed.split.part == TRAIN
    counts = np.bincount(data.item[train], minlength=len(data.items))
    assert counts[pushed_item(feed)] == counts[counts >= 5].min()
    with pytest.raises(ConfigError, match="no item has 5 users in training"):
        pushed_item(feed_of(users=4, items=20, interactions=40))


def test_attacks_are_found_by_these_names():
    assert set(POISONINGS) == {"none", "label-flip", "boosted", "sybils", "push", "zeros", "stale", "noise"}
