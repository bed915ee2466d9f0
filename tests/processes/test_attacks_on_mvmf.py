"""Attacks by a curious server on a whole FedMVMF run, as its report has them: on users in clear, and on sums."""

import asyncio
import json

import pytest

from coterie.launch.federation import run_federation
from coterie.studies import experiment

USERS = 20
ROUNDS = {"cohorts": "all", "group": USERS, "passes": 2, "evaluate_every": 2, "party_per_user": True}
FEDERATION = {
    "system": "fedmvmf",
    "split": {"kind": "random"},
    "data": {"synthetic": {"users": USERS, "items": 50, "interactions": 480}},
    "mvmf": {"factors": 4, "ridge": 3.0},
    "rounds": ROUNDS,
    # A short key, drawn quickly.
    "encryption": {"bits": 1024, "comparison": True, "obfuscators": "short"},
    "federation": {"hosts": 2, "attacks": True},
}


full = pytest.mark.full("takes five seconds of a processor")
"""The other cases have this update, and these weights; `tests/unit/test_attacks_reconstruction.py` has every pair."""


@pytest.fixture
def attacked(small, tmp_path):
    """Return a function that runs a federation to its end and returns its report and its folder."""

    def run(**changes):
        settings = small(**{**FEDERATION, **changes}, output=tmp_path)
        return asyncio.run(experiment.run(settings, "test", lambda seed, event: None, run_federation))

    return run


@pytest.mark.parametrize(
    ("update", "weights", "biases"),
    [
        pytest.param("semi-als", "sampled", False, marks=full),
        ("semi-als", "incl-unc", False),
        ("semi-als", "obs-only", True),
        ("sgd", "obs-only", False),
        pytest.param("sgd", "incl-unc", False, marks=full),
    ],
)
def test_users_of_fedmvmf_in_clear_give_their_ratings_and_attributes_away(attacked, update, weights, biases):
    mvmf = {**FEDERATION["mvmf"], "update": update, "weights": weights, "biases": biases}
    report, folder = attacked(mvmf=mvmf)
    found = report.content()["attacks"]
    one = found["reconstruction"]
    assert (one["users"], one["sums"], one["smallest_sum"]) == (USERS, USERS, 1)
    assert one["rated"] > 0.95 > one["rated_guess"] + 0.25
    assert one["attributes"] > 0.95 > one["attributes_guess"] + 0.1
    assert one["auc"] > 0.98 > one["popularity_auc"] + 0.2
    assert found["intersection"]["recall"] > 0.98
    if weights == "obs-only":
        assert found["intersection"]["auc"] > 0.98
    else:
        # What users touch says less than what they sent: unrated items are among it.
        assert found["intersection"]["auc"] < one["auc"] - 0.1
    assert json.loads((folder / "report.json").read_text())["attacks"] == found
    page = (folder / "report.html").read_text()
    assert "more than popularity" in page
    assert "attributes guess" in page


@pytest.mark.parametrize("secure_sum", ["masked", "encrypted"])
def test_of_the_same_users_a_sum_tells_no_more_than_the_marginals(attacked, secure_sum):
    report, _ = attacked(secure_sum=secure_sum)
    found = report.content()["attacks"]
    one = found["reconstruction"]
    assert (one["users"], one["sums"], one["smallest_sum"]) == (USERS, 1, USERS)
    for figure in ("rated", "ratings", "attributes"):
        assert one[figure] < one[f"{figure}_guess"] + 0.02
    assert one["whole"] == 0
    assert max(one["auc"], one["auc_with_popularity"]) < one["popularity_auc"] + 0.02
    assert found["disaggregate"]["auc"] < found["disaggregate"]["popularity_auc"] + 0.02
    # Sums of how many have each item, and of each of two rounds of training.
    assert found["disaggregate"]["rounds"] == 3
    assert found["profiles"]["found"] == 0
    assert "intersection" not in found


FEW = 10
SPARSE = {
    "secure_sum": "masked",
    "data": {"synthetic": {"users": FEW, "items": 400, "interactions": 500}},
    # Too few for the floors of cohorts and sums as they come.
    "rounds": {**ROUNDS, "cohort": FEW, "group": FEW, "min_cohort": FEW, "min_sum": FEW},
}


@pytest.mark.parametrize(("min_touch", "biases"), [(1, False), (1, True), (3, True)])
def test_a_masked_sum_over_few_falls_into_profiles_unless_items_of_fewer_than_three_are_closed(
    attacked, min_touch, biases
):
    mvmf = {**FEDERATION["mvmf"], "weights": "obs-only", "biases": biases, "min_touch": min_touch}
    report, _ = attacked(**SPARSE, mvmf=mvmf)
    found = report.content()["attacks"]["profiles"]
    assert (found["sums"], found["smallest_sum"]) == (1, FEW)
    if min_touch == 1 and biases:
        # A user's bias is known up to whole stars only.
        assert found["right"] > 0.6
        assert found["found"] > 0.4
        assert found["exposed"] > 0.5
    elif min_touch == 1:
        assert found["right"] > 0.95
        assert found["found"] > 0.5
        assert found["exposed"] > 0.8
    else:
        assert found["found"] == 0
