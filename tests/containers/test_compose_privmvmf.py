"""PrivMVMF on three owners with items and four hosts; decrypting clients die, and the numbers are those in clear."""

import csv
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from .engine import DEPLOY
from .same_run import in_one_process
from .stack import OWNERS, Stack

pytestmark = pytest.mark.containers

HOLDERS = ("key-0", "key-1", "key-2")
HOSTS = ("host-0", "host-1", "host-2", "host-3")
PARTIES = (*HOLDERS, *HOSTS, *OWNERS, "cos")
SETTINGS = {
    # A short key is drawn and used quickly.  What long ones take, the benchmarks show.
    "COTERIE_ENCRYPTION__BITS": "1024",
    "COTERIE_ENCRYPTION__COMPARISON": "true",
    "COTERIE_REFERENCE": "false",
    "COTERIE_ROUNDS__PASSES": "60",
    "COTERIE_ROUNDS__EVALUATE_EVERY": "1",
    "COTERIE_FEDERATION__PARTY_TIMEOUT_S": "10",
}


@dataclass(frozen=True)
class Trained:
    """A training in which decrypting clients died, as it ended."""

    stack: Stack
    running_at_second_death: bool
    report: dict
    folders: dict[str, Path]


@pytest.fixture(scope="module")
def trained(engine, images, tmp_path_factory):
    """Train; crash one decrypting client, wait until it is back, kill another for good; wait for the end."""
    into = tmp_path_factory.mktemp("parties")
    owners = into / "owners.yml"
    told = [sys.executable, "-I", "-S", DEPLOY / "scale.py", "--owners", str(len(OWNERS))]
    owners.write_text(subprocess.run(told, check=True, capture_output=True, text=True).stdout)
    stack = Stack(
        engine, {**images, **SETTINGS}, "docker-compose.privmvmf.yml", "docker-compose.scale.yml", owners
    )
    try:
        stack.compose("up", "--detach", "operator")
        stack.until(lambda: "rounds of training" in stack.logs("operator"), "training begins")
        stack.until(lambda: "pass 2/" in stack.logs("operator"), "the second pass ends")
        stack.crash("key-1")
        # Not until it is probed again: the run does not wait for that.
        stack.until(
            lambda: stack.logs("key-1").count('"joined"') == 2, "key-1 is started again and takes part"
        )
        # For the engine this is a wish, and it does not start it again.
        stack.container("key-2").kill()
        running = stack.state("operator")["Running"]
        stack.until(lambda: not stack.state("operator")["Running"], "the run ends")
        assert stack.state("operator")["ExitCode"] == 0, stack.logs("operator")
        report = stack.copy("operator", "/report", into)
        folders = {party: stack.copy(party, "/party", into / party) for party in PARTIES}
        yield Trained(stack, running, json.loads((report / "report.json").read_text()), folders)
    finally:
        stack.compose("down", "--volumes", "--remove-orphans", "--timeout", "10")


def test_an_encrypted_run_goes_on_when_a_decrypting_client_crashes_and_when_another_is_gone(trained):
    report = trained.report
    assert (report["system"], report["secure_sum"], report["form"]) == ("fedmvmf", "encrypted", "hosts")
    assert trained.running_at_second_death
    assert not trained.stack.state("key-2")["Running"]
    said = trained.stack.logs("operator")
    assert "decrypting-client/key-1 returned" in said
    assert "decrypting-client/key-2 lost" in said
    assert report["abandoned"] == 0
    assert trained.stack.container("key-1").attrs["RestartCount"] == 1


def test_the_numbers_are_those_of_sums_in_clear_in_one_process(images, trained):
    sets = [
        "secure_sum=clear",
        f"federation.hosts={len(HOSTS)}",
        f"federation.owners={len(OWNERS)}",
        f"mvmf.item_servers={len(OWNERS)}",
    ]
    alone = in_one_process("privmvmf", {**images, **SETTINGS}, sets=sets)
    history, wanted = trained.report["history"], alone["history"]
    assert [one["epoch"] for one in history] == [one["epoch"] for one in wanted]
    counted = [one["metrics"] for one in history]
    # Not exactly: what is encrypted was rounded to whole numbers of small steps before, each member's for itself.
    assert counted == [pytest.approx(one["metrics"], rel=1e-6) for one in wanted]
    assert trained.report["chosen"] == alone["chosen"]
    assert counted[-1]["rmse"] < counted[0]["rmse"]


def test_every_decrypting_client_holds_the_key_and_nobody_else_does(trained):
    held = {party: sorted(folder.rglob("keys/*.key")) for party, folder in trained.folders.items()}
    assert {party for party, found in held.items() if found} == set(HOLDERS)
    for party in HOLDERS:
        secrets = [*held[party], trained.folders[party] / "state/identities.key"]
        assert {path.stat().st_mode & 0o777 for path in secrets} == {0o600}
    # A folder's own mode is not copied.
    assert trained.stack.execute("key-0", "stat", "-c", "%a", "/party/state") == (0, "700\n")


def held_items(folder):
    """Return the items that a data owner was given."""
    (given,) = folder.glob("items-*.csv")
    with given.open(newline="", encoding="utf-8") as lines:
        return {line["item"] for line in csv.DictReader(lines)}


def test_three_owners_divide_the_items_and_work_until_the_end(trained):
    assert all(trained.stack.state(owner)["Running"] for owner in OWNERS)
    items = [held_items(trained.folders[owner]) for owner in OWNERS]
    assert min(map(len, items)) > 50
    assert len(set.union(*items)) == sum(map(len, items)) == trained.report["dataset"]["items"]
    assert [one["silent_owners"] for one in trained.report["rounds"]] == [[]] * len(trained.report["rounds"])
