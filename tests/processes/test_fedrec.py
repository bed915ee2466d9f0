"""FedRec over real processes: the numbers of one process, and what a server learns of who rated what."""

import asyncio
from typing import Any

import pytest

from coterie.launch.federation import run_federation
from coterie.studies import experiment

from .one_process import assert_equal_to_one_process

USERS = 40
BASE: dict[str, Any] = {
    "system": "fedmf",
    "split": {"kind": "random"},
    "data": {"synthetic": {"users": USERS, "items": 200, "interactions": 1600}},
    "fedmf": {"samples": 1, "filling": "hybrid", "fill_after": 2, "min_touch": 1},
    "rounds": {"cohorts": "all", "passes": 4, "evaluate_every": 2, "party_per_user": True},
    "federation": {"hosts": 2, "attacks": True},
}


def of(**fedmf: Any) -> dict[str, Any]:
    made = {**BASE["fedmf"], **fedmf}
    if made["filling"] == "average":
        del made["fill_after"]
    return {**BASE, "fedmf": made}


@pytest.mark.parametrize(("secure_sum", "users"), [("clear", True), ("masked", False), ("masked", True)])
def test_services_and_one_process_come_to_equal_numbers(
    small: Any, federation: Any, secure_sum: str, users: bool
) -> None:
    rounds = {**BASE["rounds"], "party_per_user": users}
    settings = small(**{**BASE, "rounds": rounds, "secure_sum": secure_sum})
    report = assert_equal_to_one_process(settings, federation)
    assert report["history"][0]["metrics"] != report["history"][-1]["metrics"]


@pytest.fixture(scope="module")
def attacked(small: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    def run(secure_sum: str, **fedmf: Any) -> Any:
        output = tmp_path_factory.mktemp("attacked")
        settings = small(**{**of(**fedmf), "secure_sum": secure_sum, "output": output})
        report, _ = asyncio.run(experiment.run(settings, "test", lambda seed, event: None, run_federation))
        return report.content()["attacks"]

    return run


@pytest.mark.parametrize("filling", ["average", "hybrid"])
def test_in_clear_rows_hide_who_rated_what_and_their_values_do_not(attacked: Any, filling: str) -> None:
    found = attacked("clear", filling=filling, **({"fill_after": 0} if filling == "hybrid" else {}))
    rows, values = found["intersection"], found["values"]
    assert (rows["rounds"], values["users"]) == (4, USERS)
    # As many rows of unrated items as of rated ones, or more, whatever the number of rounds.
    assert rows["recall"] == 1
    assert rows["precision"] <= 0.5
    assert values["auc"] > 0.98 > rows["auc"] + 0.02
    assert values["auc_touched"] > 0.9 > rows["auc_touched"] + 0.1


def test_drawn_anew_in_each_round_sampled_items_are_told_from_rated_ones(attacked: Any) -> None:
    rows = attacked("clear", resample=True)["intersection"]
    # Users with a fifth of all items draw some of the others in all four rounds.
    assert rows["precision"] > 0.65
    assert rows["auc"] > 0.98


def test_a_masked_sum_tells_no_more_than_popularity(attacked: Any) -> None:
    found = attacked("masked")
    assert "values" not in found
    assert "intersection" not in found
    assert found["reconstruction"]["auc"] < found["reconstruction"]["popularity_auc"] + 0.02
