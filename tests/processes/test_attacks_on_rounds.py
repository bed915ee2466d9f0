"""Attacks by a curious server on a whole FedNCF run, as its report has them: by form of the cohorts, and by the sum."""

import asyncio

import pytest

from coterie.launch.federation import run_federation
from coterie.studies import experiment

USERS = 60
SPARSE = {"synthetic": {"users": USERS, "items": 300, "interactions": 600}}
"""Few items each, of many: as in real catalogues, most rows of a round are touched by few of its users."""


@pytest.fixture
def attacked(small, tmp_path):
    """Return a function that runs a federation to its end and returns the attacks of its report."""

    def run(**changes):
        settings = small(
            system="fedncf",
            split={"kind": "leave-last-out"},
            output=tmp_path,
            federation={"hosts": 2, "attacks": True},
            **changes,
        )
        report, _ = asyncio.run(experiment.run(settings, "test", lambda seed, event: None, run_federation))
        return report.content()["attacks"]

    return run


@pytest.mark.long
def test_random_cohorts_with_exact_counts_give_users_away_whatever_the_mask(attacked):
    found = attacked(
        data=SPARSE,
        secure_sum="masked",
        fedncf={"touch": "exact"},
        rounds={"cohorts": "random", "cohort": 20, "passes": 10, "evaluate_every": 10},
    )
    assert found["disaggregate"]["smallest_cohort"] == 20
    assert found["disaggregate"]["rounds"] == 30
    assert found["disaggregate"]["auc"] > found["disaggregate"]["popularity_auc"] + 0.1


@pytest.mark.long
def test_under_a_key_that_participants_share_such_rounds_show_no_sum(attacked):
    found = attacked(
        data=SPARSE,
        secure_sum="shared-key",
        encryption={"bits": 1024, "comparison": True},
        fedncf={"touch": "exact"},
        rounds={"cohorts": "random", "cohort": 20, "passes": 4, "evaluate_every": 4},
    )
    assert found["disaggregate"]["pairs"] > 0
    assert (found["disaggregate"]["rounds"], found["disaggregate"]["auc"]) == (0, None)
    assert (found["cluster"]["rounds"], found["differencing"]["pairs"], found["inversion"]["updates"]) == (
        0,
        0,
        0,
    )


def test_fixed_groups_asked_once_tell_no_more_than_popularity(attacked):
    found = attacked(
        data={"synthetic": {"users": 200, "items": 120, "interactions": 5000}},
        secure_sum="masked",
        rounds={"cohort": 100, "group": 100, "passes": 10, "evaluate_every": 10},
    )
    assert found["disaggregate"]["smallest_cohort"] == 100
    assert found["disaggregate"]["rounds"] == 2 + 2 * 10
    assert found["disaggregate"]["auc"] == pytest.approx(found["disaggregate"]["popularity_auc"], abs=0.02)
    # No row was changed by so few that it could be traced.
    assert found["cluster"]["explained"] < 0.02
    # Nobody is in one sum and missing in another.
    assert found["differencing"]["exposed"] == 0


def test_users_as_parties_in_clear_are_known_to_the_server_item_by_item(attacked):
    found = attacked(
        data=SPARSE, rounds={"cohort": USERS, "group": USERS, "passes": 2, "party_per_user": True}
    )
    assert found["disaggregate"]["smallest_cohort"] == 1
    assert found["disaggregate"]["auc"] > 0.999
    assert found["disaggregate"]["popularity_auc"] < 0.8


TINY = {"synthetic": {"users": USERS, "items": 300, "interactions": 4 * USERS}}
"""Two training items each, with three negatives for either: batches of eight."""


@pytest.mark.parametrize(("output_bias", "exact", "auc"), [("zero", 0.8, 0.95), ("log-odds", 0.0, 0.9)])
def test_small_batches_in_clear_are_read_off_their_gradients(attacked, output_bias, exact, auc):
    # Negatives are drawn anew in each run; of twelve batches that begin at log odds four to seven are exact.
    found = attacked(
        data=TINY,
        fedncf={"touch": "exact", "negatives": 3, "output_bias": output_bias},
        rounds={"cohorts": "all", "passes": 1, "party_per_user": True},
    )["inversion"]
    assert found["updates"] == 12
    assert found["exact"] > exact
    assert found["auc"] > auc


def test_small_batches_under_a_mask_are_not_found(attacked):
    found = attacked(
        data=TINY,
        secure_sum="masked",
        fedncf={"touch": "exact", "negatives": 3},
        rounds={"cohorts": "all", "passes": 1, "party_per_user": True},
    )["inversion"]
    assert found["updates"] == 1
    assert found["exact"] == 0
    assert found["auc"] < found["popularity_auc"] + 0.02
