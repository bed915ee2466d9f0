"""The bound of a contribution's norm, which hosts enforce before they round."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.config.run import RunSettings
from coterie.data.keyed_order import key_hash
from coterie.errors import ConfigError
from coterie.rounds.plan_hash import plan_hash
from coterie.secure_sum.contribution import Contribution, Layout, Segment
from coterie.studies.in_process import train_in_process
from coterie.studies.run_data import load, make_feed
from coterie.studies.run_plan import run_plan
from coterie.systems.ease.settings import EaseSettings
from coterie.systems.registry import host_side
from coterie.systems.shared.host_data import HostData

EARLIER = "87a4f310422c3ac887f414deb2cb145e11edc9dc6332456b664a8c31e77e7bc0"  # pragma: allowlist secret
"""Hash of the plan of FedMF by the defaults of then, with empty settings, before plans had terms of aggregation."""

LAYOUT = Layout(
    (
        Segment("rows", (4, 3), 50.0, 24, "touched"),
        Segment.whole("touched", (4,), 1),
        Segment("network", (5,), 50.0, 24),
    )
)


def made(rng, bound, users=1):
    found = Contribution(LAYOUT, norm_bound=bound)
    values = []
    for _ in range(users):
        rows, network = rng.normal(0, 3, (2, 3)), rng.normal(0, 3, 5)
        found.add("rows", rows, rng, rows=np.array([0, 2]))
        found.add("touched", np.ones(2), rng, rows=np.array([0, 2]))
        found.add("network", network, rng)
        found.count()
        values.append(np.concatenate([rows.ravel(), network]))
    return found, values


def norms(found, users=1):
    sums = LAYOUT.decode(found.codes(), users)
    return np.linalg.norm(np.concatenate([sums["rows"].ravel(), sums["network"]]))


@given(st.integers(0, 2**32), st.floats(0.1, 30))
@settings(deadline=None)
def test_a_contribution_is_as_long_as_the_bound_allows_and_counts_stay(seed, bound):
    found, [values] = made(np.random.default_rng(seed), bound)
    length = np.linalg.norm(values)
    assert norms(found) == pytest.approx(min(length, bound), abs=1e-4)
    assert found.shortened == (length > bound)
    assert LAYOUT.decode(found.codes(), 1)["touched"].tolist() == [1, 0, 1, 0]


@given(st.integers(0, 2**32))
@settings(deadline=None)
def test_what_is_within_the_bound_has_the_codes_that_it_has_without_one(seed):
    free, values = made(np.random.default_rng(seed), 0.0, users=3)
    most = max(np.linalg.norm(one) for one in values)
    bounded, _ = made(np.random.default_rng(seed), most * 1.001, users=3)
    assert np.array_equal(free.codes(), bounded.codes())
    assert bounded.shortened == 0


def test_each_user_of_a_host_is_bounded_alone():
    found, _ = made(np.random.default_rng(0), 0.5, users=4)
    assert found.shortened == 4
    assert norms(found, 4) <= 4 * 0.5 + 1e-3
    alone = []
    rng = np.random.default_rng(0)
    for _ in range(4):
        one, _ = made(rng, 0.5)
        alone.append(one.codes())
    assert np.array_equal(found.codes(), np.sum(alone, axis=0, dtype=np.uint32))


def test_values_may_change_after_they_were_added():
    found = Contribution(LAYOUT, norm_bound=1.0)
    values = np.full(5, 0.1)
    found.add("network", values, np.random.default_rng(0))
    values[:] = 40
    found.count()
    assert norms(found) == pytest.approx(0.1 * np.sqrt(5), abs=1e-4)


# --- in the systems ----------------------------------------------------------------------------------------------

SMALL = {"users": 40, "items": 50, "interactions": 900}
SPLITS = {"fedmf": "random", "fcf": "random", "fedmvmf": "random"}


def run(system, secure_sum="clear", **aggregation):
    return RunSettings.model_validate(
        {
            "system": system,
            "secure_sum": secure_sum,
            "split": {"kind": SPLITS.get(system, "leave-last-out")},
            "data": {"synthetic": SMALL},
            "rounds": {"passes": 2, "evaluate_every": 1, "min_sum": 2, "aggregation": aggregation},
            "federation": {"hosts": 3},
        }
    )


def trained(settings):
    feed = make_feed(settings, load(settings), 0)
    return train_in_process(settings, feed, run_id="test", seed=0, see=lambda event: None)


@pytest.mark.parametrize("system", ["fedmf", "fcf", "fedmvmf", "fedncf", "fpl", "ials"])
def test_a_small_bound_changes_what_a_system_learns_and_a_large_one_nothing(system):
    free, small, large = (trained(run(system, norm_bound=bound)).trained for bound in (0.0, 0.01, 1e6))
    assert free.state.evaluations == large.state.evaluations
    assert all(np.array_equal(value, large.arrays[name]) for name, value in free.arrays.items())
    assert any(not np.array_equal(value, small.arrays[name]) for name, value in free.arrays.items())


def test_a_masked_sum_of_bounded_contributions_is_the_clear_one():
    clear, masked = (
        trained(run("fedmf", secure_sum, norm_bound=0.05)).trained for secure_sum in ("clear", "masked")
    )
    assert all(np.array_equal(value, masked.arrays[name]) for name, value in clear.arrays.items())


def test_the_server_shortens_what_a_lying_host_does_not():
    bounded = trained(run("fedmf", norm_bound=0.05)).trained.arrays
    both = trained(run("fedmf", rule="norm-bound", norm_bound=0.05)).trained.arrays
    # Honest hosts have bounded each user, so that the server shortens nothing but what rounding made longer.
    assert np.abs(bounded["model.items"] - both["model.items"]).max() < 1e-3


def test_a_system_whose_hosts_bound_no_norms_refuses_a_bound():
    data = HostData(
        ("u",), ("a", "b"), np.zeros(1, int), np.zeros(1, int), np.zeros(1, int), np.full(1, np.nan)
    )
    with pytest.raises(ConfigError, match="hosts of the system 'ease' bound no norms"):
        host_side(
            "ease",
            EaseSettings().to_json(),
            data,
            key_hash(("u",), 0),
            0,
            lambda found: found,
            norm_bound=1.0,
        )


# --- settings and plans ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"aggregation": {"rule": "mean"}}, "rule"),
        ({"aggregation": {"norm_bound": -1}}, "greater than or equal to 0"),
        ({"aggregation": {"norm_bound": float("nan")}}, "finite"),
        ({"aggregation": {"rule": "norm-bound"}}, "expected rounds.aggregation.norm_bound above 0"),
        (
            {"aggregation": {"rule": "krum", "byzantine": 0.6}},
            "a share above 0 and below 0.5, or a whole number",
        ),
        (
            {"aggregation": {"rule": "krum"}},
            "needs 5 members, and 3 are there; expected more, or rounds.party_per_user",
        ),
        ({"aggregation": {"rule": "median"}, "hosts": 2}, "2 hosts, each of which is one member"),
        (
            {
                "aggregation": {"rule": "krum", "byzantine": 30},
                "party_per_user": True,
                "cohorts": "groups",
                "cohort": 40,
            },
            "40 rounds.cohort users",
        ),
        ({"aggregation": {"rule": "median"}, "secure_sum": "masked"}, "which hosts enforce under every sum"),
        (
            {"aggregation": {"rule": "median"}, "system": "drift"},
            "is for systems in rounds, and drift has none",
        ),
        ({"aggregation": {"norm_bound": 1}, "system": "ease"}, "ease sums exact counts"),
    ],
)
def test_settings_that_cannot_be_met_are_refused_before_a_run(given, said):
    top = {"system": given.pop("system", "fedmf"), "secure_sum": given.pop("secure_sum", "clear")}
    federation = {"hosts": given.pop("hosts", 3)}
    with pytest.raises(ValueError, match=said):
        RunSettings.model_validate({**top, "rounds": {"group": 40, **given}, "federation": federation})


def planned(**aggregation):
    settings = RunSettings.model_validate(
        {"system": "fedmf", "rounds": {"party_per_user": True, "aggregation": aggregation}}
    )
    return run_plan(settings, run_id="run", seed=0)


def test_a_plan_carries_the_terms_and_without_them_is_what_it_was():
    plain = planned()
    assert not plain.rounds.HasField("aggregation")
    assert plain.SerializeToString() == planned(rule="sum", byzantine=0.3).SerializeToString()
    made = planned(rule="trimmed-mean", byzantine=0.25, norm_bound=2.5).rounds.aggregation
    assert (made.rule, made.byzantine, made.norm_bound) == ("trimmed-mean", 0.25, 2.5)
    hashes = {plan_hash(one) for one in (plain, planned(norm_bound=1), planned(rule="median"))}
    assert len(hashes) == 3


def test_the_hash_of_a_plan_without_terms_is_that_of_earlier_releases():
    settings = RunSettings.model_validate({"system": "fedmf", "rounds": {"passes": 60}})
    plan = run_plan(settings, run_id="run", seed=0)
    plan.settings = "{}"
    assert plan_hash(plan).hex() == EARLIER
