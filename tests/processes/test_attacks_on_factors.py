"""Attacks by a curious server on a run of FedMF or FCF: all of a user in clear, nothing of a sum over many."""

import asyncio
import json

import pytest

from coterie.launch.federation import run_federation
from coterie.studies import experiment

USERS = 40
BASE = {
    "split": {"kind": "random"},
    "data": {"synthetic": {"users": USERS, "items": 200, "interactions": 1600}},
    # A short key, drawn quickly.
    "encryption": {"bits": 1024, "comparison": True, "obfuscators": "short"},
    "federation": {"hosts": 2, "attacks": True},
}
ROUNDS = {"cohorts": "all", "passes": 2, "evaluate_every": 2, "party_per_user": True}
SYSTEMS = {
    # Holders of a key decrypt no sum over fewer users than twice the values of a row.
    "fedmf": {"system": "fedmf", "fedmf": {"factors": 8}},
    "fedmf, no biases": {"system": "fedmf", "fedmf": {"biases": False}},
    "fedmf, printed steps, several epochs": {"system": "fedmf", "fedmf": {"steps": "sum", "local_epochs": 2}},
    "fcf": {"system": "fcf", "fcf": {"factors": 8}},
}
ENCRYPTED, SHARED_KEY = (
    pytest.mark.xdist_group(f"attacks on factors, {secure_sum}") for secure_sum in ("encrypted", "shared-key")
)
"""Tests that attack the same run."""

full = pytest.mark.full("takes ten seconds of a processor")
"""The other cases show the same of this system, and of this sum."""

EVERY_ITEM = {"min_touch": 1}
"""Rows of items that few have rated leave, too."""


@pytest.fixture(scope="module")
def attacked(small, tmp_path_factory):
    """Return a function that runs a federation to its end, once, and returns the attacks of its report."""
    made = {}

    def run(system, secure_sum, *, encryption=BASE["encryption"], rounds=None, **options):
        given = SYSTEMS[system]
        name = given["system"]
        given = {**given, name: {**given.get(name, {}), **options}, "encryption": encryption}
        given["rounds"] = {**ROUNDS, **(rounds or {})}
        key = json.dumps([given, secure_sum])
        if key not in made:
            output = tmp_path_factory.mktemp("attacked")
            settings = small(**{**BASE, **given, "secure_sum": secure_sum, "output": output})
            report, _ = asyncio.run(
                experiment.run(settings, "test", lambda seed, event: None, run_federation)
            )
            made[key] = report.content()["attacks"]
        return made[key]

    return run


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_users_contribution_in_clear_is_its_ratings(attacked, system):
    found = attacked(system, "clear", **EVERY_ITEM)["reconstruction"]
    assert (found["sums"], found["smallest_sum"]) == (USERS, 1)
    assert found["auc"] > 0.999 > found["popularity_auc"] + 0.1
    assert found["ratings"] > 0.95
    assert found["ratings"] > found["ratings_guess"]


@pytest.mark.parametrize(
    ("secure_sum", "system"),
    [
        pytest.param("masked", "fedmf", marks=full),
        ("masked", "fcf"),
        pytest.param("encrypted", "fedmf", marks=ENCRYPTED),
        pytest.param("encrypted", "fcf", marks=full),
    ],
)
def test_a_sum_over_everybody_tells_no_more_than_popularity(attacked, system, secure_sum):
    attacks = attacked(system, secure_sum)
    found = attacks["reconstruction"]
    assert (found["sums"], found["smallest_sum"]) == (1, USERS)
    assert found["auc"] < found["popularity_auc"] + 0.02
    assert found["ratings"] < found["ratings_guess"]
    assert attacks["profiles"]["exposed"] == 0


@pytest.mark.parametrize(
    "secure_sum",
    [pytest.param("encrypted", marks=ENCRYPTED), pytest.param("shared-key", marks=SHARED_KEY)],
)
def test_sparse_contributions_show_near_which_items_a_user_has_rated_and_whole_ones_do_not(
    attacked, secure_sum
):
    sparse = attacked(
        "fedmf", secure_sum, encryption={**BASE["encryption"], "sparse": True}, rounds={"min_sum": 3}
    )
    found = sparse["places"]
    assert found["users"] == USERS
    assert found["recall"] > 0.5
    assert found["auc"] > found["popularity_auc"] + 0.1
    assert "places" not in attacked("fedmf", secure_sum)


@SHARED_KEY
def test_under_a_key_that_participants_share_there_is_no_sum_to_attack(attacked):
    attacks = attacked("fedmf", "shared-key")
    assert attacks["reconstruction"]["sums"] == 0
    assert attacks["reconstruction"]["auc"] is None
    assert "profiles" not in attacks
