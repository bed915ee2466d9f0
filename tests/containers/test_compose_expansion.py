"""The compose files bring up FedGNN and FedIDCF: the third party's container matches tags, and combines vectors."""

import contextlib
import json
import sqlite3
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from .same_run import EXAMPLES, in_one_process
from .stack import Stack

pytestmark = pytest.mark.containers

PASSES = {"COTERIE_REFERENCE": "false", "COTERIE_ROUNDS__EVALUATE_EVERY": "2"}
FEDGNN = {
    **PASSES,
    "COTERIE_FEDGNN__NEIGHBOURS": "12",
    "COTERIE_FEDGNN__REFRESH": "2",
    "COTERIE_ROUNDS__PASSES": "6",
}
FEDIDCF = {
    **PASSES,
    "COTERIE_RUN": str(EXAMPLES / "fedidcf.toml"),
    "COTERIE_FEDIDCF__FACTOR_PASSES": "4",
    "COTERIE_FEDIDCF__LATENTS": "32",
    "COTERIE_ENCRYPTION__BITS": "1024",
    "COTERIE_ENCRYPTION__COMPARISON": "true",
    "COTERIE_ROUNDS__PASSES": "8",
}


@dataclass(frozen=True)
class Trained:
    """A stack whose run has ended, its report, and the third party's files."""

    stack: Stack
    report: dict[str, Any]
    thirdparty: Path


@contextlib.contextmanager
def trained(engine, settings, into):
    stack = Stack(engine, settings, "docker-compose.expansion.yml")
    try:
        stack.compose("up", "--detach", "operator")
        stack.until(lambda: not stack.state("operator")["Running"], "the run ends")
        assert stack.state("operator")["ExitCode"] == 0, stack.logs("operator")
        report = json.loads((stack.copy("operator", "/report", into) / "report.json").read_text())
        yield Trained(stack, report, stack.copy("thirdparty", "/party", into))
    finally:
        stack.compose("down", "--volumes", "--remove-orphans", "--timeout", "10")


@pytest.fixture(scope="module")
def fedgnn(engine, images, tmp_path_factory):
    with trained(engine, {**images, **FEDGNN}, tmp_path_factory.mktemp("fedgnn")) as found:
        yield found


@pytest.fixture(scope="module")
def fedidcf(engine, images, tmp_path_factory):
    with trained(engine, {**images, **FEDIDCF}, tmp_path_factory.mktemp("fedidcf")) as found:
        yield found


def assert_equal_to_one_process(report, example, settings, epochs):
    alone = in_one_process(example, settings, sets=["federation.hosts=2", "secure_sum=clear"])
    found, wanted = (
        [(one["epoch"], one["version"], one["metrics"]) for one in history]
        for history in (report["history"], alone["history"])
    )
    assert found == wanted
    assert [epoch for epoch, _, _ in found] == epochs
    assert report["chosen"] == alone["chosen"]


def kept(thirdparty, query):
    with contextlib.closing(sqlite3.connect(thirdparty / "state" / "expansion.db")) as connection:
        return connection.execute(query).fetchall()


def test_users_train_with_neighbours_that_the_third_party_found(fedgnn):
    report = fedgnn.report
    assert (report["system"], report["secure_sum"], report["form"]) == ("fedgnn", "masked", "hosts")
    assert report["abandoned"] == 0
    assert "Secure sum: masked" in fedgnn.stack.logs("operator")
    found = [one["metrics"]["with_neighbours"] for one in report["history"]]
    assert found[0] == 0
    assert found[-1] > 0.9
    assert report["history"][-1]["metrics"]["neighbours_current"] == 1


def test_the_numbers_of_fedgnn_are_exactly_those_of_one_process(fedgnn, images):
    assert_equal_to_one_process(fedgnn.report, "fedgnn", {**images, **FEDGNN}, [0, 2, 4, 6])


def test_the_third_party_keeps_an_upload_of_each_user_and_the_report_says_what_hosts_asked(fedgnn):
    report = fedgnn.report
    ((uploads,),) = kept(fedgnn.thirdparty, "SELECT count(*) FROM graph_uploads")
    asked = report["third_party"]["expansion"]
    assert asked["counters"]["uploads"] == uploads == report["dataset"]["users"]
    assert asked["counters"]["neighbours"] > 0
    assert set(asked["hosts"]) == {"client/host-0", "client/host-1"}
    answered = [one["answered"] for one in asked["hosts"].values()]
    assert sum(one["ask"] for one in answered) == asked["counters"]["questions"]
    assert [one["refused"] for one in (asked, *asked["hosts"].values())] == [{}, {}, {}]


def test_users_who_never_trained_are_predicted_for_by_what_the_third_party_combined(fedidcf):
    report = fedidcf.report
    assert (report["system"], report["secure_sum"], report["form"]) == ("fedidcf", "masked", "hosts")
    assert report["abandoned"] == 0
    assert "Secure sum: masked" in fedidcf.stack.logs("operator")
    last = report["history"][-1]["metrics"]
    assert last["with_latents"] == 1
    assert last["query_spread"] > 0


def test_the_numbers_of_fedidcf_are_exactly_those_of_one_process(fedidcf, images):
    assert_equal_to_one_process(fedidcf.report, "fedidcf", {**images, **FEDIDCF}, [0, 2, 4, 6, 8])


def test_the_third_party_keeps_combinations_and_no_vector_that_went_into_them(fedidcf):
    report = fedidcf.report
    ((uploads, vectors),) = kept(
        fedidcf.thirdparty, "SELECT count(*), sum(length(vector) > 0) FROM latent_uploads"
    )
    asked = report["third_party"]["latents"]
    assert 32 <= uploads == asked["counters"]["key_users"] < report["dataset"]["users"]
    assert vectors == 0
    assert asked["counters"]["combinations"] == 32
    assert set(asked["hosts"]) == {"client/host-0", "client/host-1"}
