"""Robust rules, against references written user by user and value by value."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from coterie.secure_sum.aggregation import Aggregation
from coterie.secure_sum.contribution import Contribution, Layout, Segment
from coterie.secure_sum.robust_rules import SparseSteps, Submitted, robust_sum

LAYOUT = Layout(
    (
        Segment("items", (6, 2), 1.0, 8, "touched"),
        Segment.whole("touched", (6,), 1),
        Segment("network", (3,), 4.0, 10),
        Segment("scale", (), 2.0, 12),
    )
)
VALUES = [segment for segment in LAYOUT.segments if segment.clip]
FILTERS = ("krum", "distance", "spectral")
RULES = ("median", "trimmed-mean", "norm-bound", *FILTERS)


def terms(rule, byzantine=0.2):
    return Aggregation(rule, byzantine, 1.5 if rule == "norm-bound" else 0.0)


def drawn(rng, users):
    """Return the steps of a contribution of some users, by segment; most rows of items are zero."""
    found = {}
    for segment in LAYOUT.segments:
        most = segment.levels * users if segment.clip else users
        values = rng.integers(-most if segment.clip else 0, most, segment.shape, endpoint=True)
        if segment.name == "items":
            values[rng.random(6) < 0.6] = 0
        found[segment.name] = values
    found["touched"] = np.minimum(found["touched"], (found["items"] != 0).any(axis=1) * users)
    return found


def vector(steps):
    return np.concatenate([np.asarray(steps[segment.name], np.int64).ravel() for segment in LAYOUT.segments])


def handed(members, users):
    """Return contributions as the server has them: from codes."""
    sparse = [
        SparseSteps.of(vector(one).astype(np.uint32) + LAYOUT.zeros(count), count, LAYOUT)
        for one, count in zip(members, users, strict=True)
    ]
    return Submitted(LAYOUT, np.array(users, np.int64), sparse)


def rounds(seed, members=9, most=3):
    rng = np.random.default_rng(seed)
    users = rng.integers(1, most, members, endpoint=True).tolist()
    return [drawn(rng, count) for count in users], users


# --- references --------------------------------------------------------------------------------------------------


def as_rows(values):
    return np.asarray(values, float).reshape(len(values), -1) if np.ndim(values) else np.full((1, 1), values)


def located(members, users, place):
    """Return the reference of a rule by coordinate; ``place`` returns the location of a list of numbers."""
    total = {}
    for segment in LAYOUT.segments:
        own = [as_rows(one[segment.name]) for one in members]
        found = np.zeros_like(own[0])
        for row in range(len(found)):
            touching = [m for m in range(len(members)) if not segment.clip or any(own[m][row])]
            for column in range(found.shape[1]):
                if not segment.clip:
                    found[row, column] = sum(own[m][row, column] for m in touching)
                elif touching:
                    means = sorted(own[m][row, column] / users[m] for m in touching)
                    found[row, column] = round(place(means) * sum(users[m] for m in touching))
        total[segment.name] = found
    return total


def middle(means):
    half = len(means) // 2
    return means[half] if len(means) % 2 else (means[half - 1] + means[half]) / 2


def trimmed(share):
    def place(means):
        cut = min(math.ceil(share * len(means) - 1e-9), (len(means) - 1) // 2)
        kept = means[cut : len(means) - cut]
        return sum(kept) / len(kept)

    return place


def real(one, users):
    """Return a member's mean over its users, in values: one list of all segments but counts."""
    return np.concatenate([np.ravel(one[s.name]) * s.step / users for s in VALUES])


def krum_scores(members, users, liars):
    means = [real(*pair) for pair in zip(members, users, strict=True)]
    scores = []
    for m, one in enumerate(means):
        apart = sorted(float(((one - other) ** 2).sum()) for n, other in enumerate(means) if n != m)
        scores.append(sum(apart[: len(means) - liars - 2]))
    return scores


def distance_scores(members, users, _liars):
    squared, counted = [0.0] * len(members), [0] * len(members)
    for segment in VALUES:
        own = [as_rows(one[segment.name]) / count for one, count in zip(members, users, strict=True)]
        for row in range(len(own[0])):
            touching = [m for m in range(len(members)) if any(own[m][row])]
            for column in range(own[0].shape[1]):
                centre = middle(sorted(own[m][row, column] for m in touching)) if touching else 0
                for m in touching:
                    squared[m] += ((own[m][row, column] - centre) * segment.step) ** 2
                    counted[m] += 1
    return [math.sqrt(total / max(n, 1)) for total, n in zip(squared, counted, strict=True)]


def spectral_scores(members, users, _liars):
    means = np.stack([real(*pair) for pair in zip(members, users, strict=True)])
    centred = means - means.mean(axis=0)
    _, _, directions = np.linalg.svd(centred)
    return ((centred @ directions[0]) ** 2).tolist()


SCORES = {"krum": krum_scores, "distance": distance_scores, "spectral": spectral_scores}


def same(found, expected):
    flat = vector({name: np.rint(values) for name, values in expected.items()})
    # Halves of a step may be rounded either way.
    assert np.abs(found.steps - flat).max() <= 1
    assert np.count_nonzero(found.steps - flat) <= len(flat) / 8


# --- tests -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_the_median_is_that_of_the_members_who_touched_the_row_times_their_users(seed):
    members, users = rounds(seed)
    same(robust_sum(handed(members, users), terms("median")), located(members, users, middle))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("share", [0.1, 0.2, 0.34])
def test_the_trimmed_mean_leaves_out_a_share_of_those_who_touched_the_row(seed, share):
    members, users = rounds(seed)
    found = robust_sum(handed(members, users), terms("trimmed-mean", share))
    same(found, located(members, users, trimmed(share)))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("rule", FILTERS)
def test_filters_leave_out_the_members_of_the_highest_scores_and_add_the_others(rule, seed):
    members, users = rounds(seed)
    found = robust_sum(handed(members, users), terms(rule, 2))
    scores = SCORES[rule](members, users, 2)
    assert set(found.left_out) == set(np.argsort(scores)[-2:].tolist())
    kept = [vector(one) for m, one in enumerate(members) if m not in found.left_out]
    assert np.array_equal(found.steps, sum(kept))


@pytest.mark.parametrize("seed", range(4))
def test_the_norm_bound_shortens_what_is_longer_for_each_user_and_nothing_else(seed):
    members, users = rounds(seed)
    expected = np.zeros(LAYOUT.size)
    for one, count in zip(members, users, strict=True):
        norm = np.linalg.norm(real(one, 1))
        factor = min(1, 1.5 * count / norm)
        scaled = {s.name: one[s.name] * (factor if s.clip else 1) for s in LAYOUT.segments}
        expected += np.concatenate([np.ravel(scaled[s.name]) for s in LAYOUT.segments])
    found = robust_sum(handed(members, users), terms("norm-bound"))
    assert np.abs(found.steps - expected).max() <= 0.5 + 1e-9
    assert found.left_out == ()


@given(st.integers(0, 2**32), st.sampled_from(RULES))
@hypothesis_settings(deadline=None, max_examples=40)
def test_a_rule_gives_a_sum_within_the_bounds_of_its_users(seed, rule):
    members, users = rounds(seed, members=7)
    found = robust_sum(handed(members, users), terms(rule))
    counted = sum(count for m, count in enumerate(users) if m not in found.left_out)
    codes = found.steps.astype(np.uint32) + LAYOUT.zeros(counted)
    assert LAYOUT.possible(codes, counted)


@pytest.mark.parametrize("rule", ["median", "trimmed-mean", "krum", "distance", "spectral"])
def test_liars_as_far_as_codes_go_move_a_rule_less_than_honest_members_differ(rule):
    rng = np.random.default_rng(1)
    honest = []
    for _ in range(16):
        steps = {s.name: rng.integers(10, 20, s.shape) for s in LAYOUT.segments}
        honest.append({**steps, "touched": np.ones(6, np.int64)})
    lie = {s.name: np.full(s.shape, -s.levels) for s in LAYOUT.segments} | {"touched": np.ones(6, np.int64)}
    users = [1] * 20
    found = robust_sum(handed([*honest, *[lie] * 4], users), terms(rule))
    kept = 20 - len(found.left_out)
    for segment in VALUES:
        mean = found.steps[LAYOUT.places[segment.name]] / kept
        assert np.all((mean >= 10) & (mean < 20)), (rule, segment.name)
    plain = sum(vector(one) for one in [*honest, *[lie] * 4])[LAYOUT.places["network"]] / 20
    assert np.all(plain < 0)


def test_a_row_that_nobody_touched_stays_zero_and_one_that_one_member_touched_is_its_own():
    nothing = {s.name: np.zeros(s.shape, np.int64) for s in LAYOUT.segments}
    alone = {
        **nothing,
        "items": np.array([[0, 0], [5, -7], *[[0, 0]] * 4]),
        "touched": np.eye(6, dtype=np.int64)[1],
    }
    found = robust_sum(handed([nothing, alone, nothing], [1, 1, 1]), terms("median"))
    assert found.steps[:12].tolist() == [0, 0, 5, -7, *[0] * 8]
    assert found.steps[12:18].tolist() == [0, 1, 0, 0, 0, 0]


def test_steps_come_from_the_codes_of_a_contribution():
    made = Contribution(LAYOUT)
    made.add("items", np.array([[0.5, -1.0]]), np.random.default_rng(0), rows=np.array([4]))
    made.count(2)
    steps = SparseSteps.of(made.codes(), 2, LAYOUT)
    assert steps.positions.tolist() == [8, 9]
    assert steps.values.tolist()[1] == -127
    assert 63 <= steps.values.tolist()[0] <= 64
    assert steps.within(slice(9, 12)).positions.tolist() == [0]
