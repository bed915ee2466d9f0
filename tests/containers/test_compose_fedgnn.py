"""The compose files bring FedGNN up with anonymous neighbours, which the third party's container finds."""

import contextlib
import json
import sqlite3

import pytest

from .same_run import in_one_process
from .stack import Stack

pytestmark = pytest.mark.containers

SETTINGS = {
    "COTERIE_REFERENCE": "false",
    "COTERIE_FEDGNN__NEIGHBOURS": "12",
    "COTERIE_FEDGNN__REFRESH": "2",
    "COTERIE_ROUNDS__PASSES": "6",
    "COTERIE_ROUNDS__EVALUATE_EVERY": "2",
}


@pytest.fixture(scope="module")
def trained(engine, images, tmp_path_factory):
    """Train; return the stack, the report, and where the third party's files are."""
    stack = Stack(engine, {**images, **SETTINGS}, "docker-compose.fedgnn.yml")
    try:
        stack.compose("up", "--detach", "operator")
        stack.until(lambda: not stack.state("operator")["Running"], "the run ends")
        assert stack.state("operator")["ExitCode"] == 0, stack.logs("operator")
        into = tmp_path_factory.mktemp("parties")
        report = json.loads((stack.copy("operator", "/report", into) / "report.json").read_text())
        yield stack, report, stack.copy("thirdparty", "/party", into)
    finally:
        stack.compose("down", "--volumes", "--remove-orphans", "--timeout", "10")


def test_users_train_with_neighbours_that_the_third_party_found(trained):
    stack, report, _ = trained
    assert (report["system"], report["secure_sum"], report["form"]) == ("fedgnn", "masked", "hosts")
    assert report["abandoned"] == 0
    assert "Secure sum: masked" in stack.logs("operator")
    found = [one["metrics"]["with_neighbours"] for one in report["history"]]
    assert found[0] == 0
    assert found[-1] > 0.9
    assert report["history"][-1]["metrics"]["neighbours_current"] == 1


def test_the_numbers_are_exactly_those_of_one_process(trained, images):
    _, report, _ = trained
    alone = in_one_process("fedgnn", {**images, **SETTINGS}, sets=["federation.hosts=2", "secure_sum=clear"])
    found, wanted = (
        [(one["epoch"], one["version"], one["metrics"]) for one in history]
        for history in (report["history"], alone["history"])
    )
    assert found == wanted
    assert [epoch for epoch, _, _ in found] == [0, 2, 4, 6]
    assert report["chosen"] == alone["chosen"]


def test_the_third_party_keeps_an_upload_of_each_user_and_the_report_says_what_hosts_asked(trained):
    _, report, thirdparty = trained
    with contextlib.closing(sqlite3.connect(thirdparty / "state" / "expansion.db")) as connection:
        (uploads,) = connection.execute("SELECT count(*) FROM graph_uploads").fetchone()
    asked = report["third_party"]["expansion"]
    assert asked["counters"]["uploads"] == uploads == report["dataset"]["users"]
    assert asked["counters"]["neighbours"] > 0
    assert set(asked["hosts"]) == {"client/host-0", "client/host-1"}
    answered = [one["answered"] for one in asked["hosts"].values()]
    assert sum(one["ask"] for one in answered) == asked["counters"]["questions"]
    assert [one["refused"] for one in (asked, *asked["hosts"].values())] == [{}, {}, {}]
