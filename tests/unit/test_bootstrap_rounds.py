"""A federation in rounds, laid out: who is there, what each is told, and what the operator knows."""

from __future__ import annotations

import csv
import json
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
from coterie_client.history import read_histories
from coterie_data_owner.owner import read_items

from coterie.config.load import load_service
from coterie.config.run import RunSettings
from coterie.config.services import ClientSettings, ConsentSettings, DecryptingClientSettings
from coterie.crypto.identity import load_many, load_signing_key
from coterie.crypto.operator_key import OperatorKeys
from coterie.crypto.roster import PAILLIER, Roster, load_roster_key
from coterie.data.attributes import read_attributes
from coterie.errors import ConfigError
from coterie.launch.bootstrap import bootstrap, held_order
from coterie.launch.order import Order
from coterie.rounds.plan_hash import plan_hash
from coterie.studies.run_data import load, make_feed
from coterie.systems.fedmvmf.settings import FedMvmfPlan
from coterie.systems.fedncf.settings import FedNcfSettings
from coterie.wire.v1.orchestrator_pb2 import RoundsPlan, RunPlan

GIVEN: dict[str, Any] = {
    "system": "fedncf",
    "secure_sum": "masked",
    "reference": False,
    "data": {"synthetic": {"users": 50, "items": 60, "interactions": 1000}},
    "rounds": {"cohort": 20, "group": 20, "min_cohort": 15, "min_sum": 12},
    "federation": {"hosts": 2, "owners": 3},
}


@pytest.fixture(scope="module")
def laid_out(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Order]:
    root = tmp_path_factory.mktemp("federation")
    return root, bootstrap(RunSettings.model_validate(GIVEN), root, "a-run")


def config(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / "config.toml").read_text())


def test_one_data_owner_registers_every_item_in_the_order_of_the_data(laid_out: tuple[Path, Order]) -> None:
    root, order = laid_out
    assert {path.name for path in root.iterdir()} == {
        "thirdparty",
        "cos",
        "owner-0",
        "host-0",
        "host-1",
        "operator",
    }
    (owner,) = config(root / "owner-0")["owners"]
    with (root / "owner-0" / owner["items"]).open(newline="") as file:
        items = [row["item"] for row in csv.DictReader(file)]
    assert items == list(load(order.settings).items)


def test_hosts_are_told_to_accept_this_run_and_no_lower_floors(laid_out: tuple[Path, Order]) -> None:
    root, _ = laid_out
    for host in ("host-0", "host-1"):
        assert config(root / host)["consent"] == {
            "systems": ["fedncf"],
            "secure_sums": ["masked"],
            "min_cohort": 15,
            "min_sum": 12,
            "experiment": True,
            "sparse": False,
        }


def test_a_host_of_one_user_accepts_what_the_other_hosts_of_the_run_accept(tmp_path: Path) -> None:
    for counted in (True, False):
        rounds = {**GIVEN["rounds"], "experiment": counted, "min_cohort": 2, "min_sum": 2}
        folder = tmp_path / str(counted)
        settings = RunSettings.model_validate({**GIVEN, "rounds": rounds})
        bootstrap(settings, folder, "a-run")
        plan = RunPlan(rounds=RoundsPlan(experiment=counted, min_cohort=2, min_sum=2), secure_sum="masked")
        plan.system = "fedncf"
        consent = ConsentSettings.model_validate(config(folder / "host-0")["consent"])
        assert [consent.consent(users).objections(plan) for users in (1, 2)] == [[], []]


def test_users_draw_from_a_seed_that_others_know_in_experiments_only(
    laid_out: tuple[Path, Order], tmp_path: Path
) -> None:
    root, _ = laid_out
    assert config(root / "host-0")["seed"] == 0
    rounds = {**GIVEN["rounds"], "experiment": False, "min_cohort": 2, "min_sum": 2}
    bootstrap(RunSettings.model_validate({**GIVEN, "rounds": rounds}), tmp_path, "a-run")
    assert "seed" not in config(tmp_path / "host-0")


def test_histories_hold_every_interaction_as_positive_and_two_held_out_items_of_each_user(
    laid_out: tuple[Path, Order],
) -> None:
    root, order = laid_out
    rows: list[dict[str, str]] = []
    for host in ("host-0", "host-1"):
        with (root / host / "histories.csv").open(newline="") as file:
            rows += csv.DictReader(file)
    assert len(rows) == 1000
    assert {row["positive"] for row in rows} == {"1"}
    feed = make_feed(order.settings, load(order.settings), 0)
    assert sum(row["part"] == "2" for row in rows) == sum(feed.leave_one_out().test >= 0)
    assert sum(row["part"] == "1" for row in rows) == sum(feed.leave_one_out().validation >= 0)


def test_the_operator_asks_for_the_run_as_the_file_has_it(laid_out: tuple[Path, Order]) -> None:
    root, order = laid_out
    held = held_order(root)
    assert held is not None
    key = load_signing_key(root / "operator" / config(root / "operator")["signs"])
    request = held.request(key)
    for party in ("host-0", "owner-0"):
        accepted = OperatorKeys.parse(config(root / party)["operator_keys"])
        accepted.verify("a-run", plan_hash(request.plan), request.plan_signature)
    assert (request.expect_owners, request.expect_users) == (1, 50)
    (holding,) = request.plan.holdings
    assert holding.items == len(read_items(root / "owner-0" / f"items-{holding.owner}.csv"))
    assert FedNcfSettings.from_json(request.plan.settings) == order.settings.fedncf
    assert request.plan.rounds.min_cohort == 15
    assert request == order.request(key)
    assert held.protection["sum"] == "masked"
    assert held.protection["devices"]["count"] == 2


def test_users_who_cannot_fill_a_cohort_are_refused_before_anything_is_written_for_them(
    tmp_path: Path,
) -> None:
    few = {**GIVEN, "data": {"synthetic": {"users": 14, "items": 60, "interactions": 300}}}
    with pytest.raises(ConfigError, match="a cohort has 14 of 14 users"):
        bootstrap(RunSettings.model_validate(few), tmp_path, "a-run")
    assert not (tmp_path / "host-0").exists()


def test_parties_of_fedmvmf_find_ratings_attributes_and_features_and_the_plan_names_them(
    tmp_path: Path,
) -> None:
    given = {
        "system": "fedmvmf",
        "data": {"synthetic": {"users": 50, "items": 60, "interactions": 1000}},
        "mvmf": {"item_servers": 2},
        "reference": False,
    }
    settings = RunSettings.model_validate(given)
    order = bootstrap(settings, tmp_path, "a-run")
    feed = make_feed(settings, load(settings), 0)
    held = held_order(tmp_path)
    assert held is not None
    plan = held.plan()
    assert (held.owners, plan == order.plan()) == (2, True)
    assert FedMvmfPlan.from_json(plan.settings).attribute_names == feed.attribute_names
    for host in ("host-0", "host-1"):
        wanted = config(tmp_path / host)
        names, _ = read_histories(tmp_path / host / wanted["histories"])
        rows, table = read_attributes(tmp_path / host / wanted["attributes"], "user")
        assert set(rows) == set(names)
        assert table.names == feed.attribute_names
        read = load_service("client", tmp_path / host / "config.toml", environ={}).settings
        assert isinstance(read, ClientSettings)
        assert read.attributes == tmp_path / host / "attributes.csv"
    for position in range(2):
        (owner,) = config(tmp_path / f"owner-{position}")["owners"]
        rows, _ = read_attributes(tmp_path / f"owner-{position}" / owner["features"], "item")
        assert len(rows) == 30


def test_decrypting_clients_find_what_the_roster_names_and_everybody_relies_on_the_same_roster(
    tmp_path: Path,
) -> None:
    given = {
        "system": "fedmvmf",
        "mvmf": {"preset": "paper"},
        "secure_sum": "encrypted",
        "data": {"synthetic": {"users": 50, "items": 60, "interactions": 1000}},
        "reference": False,
        "encryption": {"bits": 2048, "holders": 2},
        "rounds": {"min_cohort": 15, "min_sum": 12},
    }
    settings = RunSettings.model_validate(given)

    def lay_out() -> tuple[bytes, ...]:
        bootstrap(settings, tmp_path, "a-run")
        rosters = {(tmp_path / who / "roster.txt").read_bytes() for who in (*holders, "host-0", "host-1")}
        keys = {path.read_bytes() for path in tmp_path.rglob("roster.pub")}
        assert (len(rosters), len(keys)) == (1, 1)
        roster = Roster.load(tmp_path / "key-0" / "roster.txt")
        key = load_roster_key(tmp_path / "thirdparty" / "state" / "roster.pub")
        roster.verify(key, purpose=PAILLIER, run="a-run", now=int(time.time()))
        return roster.members

    holders = ("key-0", "key-1")
    members = lay_out()
    drawn = [load_many(tmp_path / who / "state" / "identities.key") for who in holders]
    assert sorted(one.participant_id for (one,) in drawn) == list(members)
    for who in holders:
        folder = tmp_path / who
        state = folder / "state"
        assert [path.stat().st_mode & 0o777 for path in (folder, state)] == [0o700, 0o700]
        assert (state / "identities.key").stat().st_mode & 0o777 == 0o600
        assert {path.name for path in folder.iterdir()} == {
            *("ca.pem", "config.toml", "roster.pub", "roster.txt", "state", "token")
        }
        read = load_service("decrypting-client", folder / "config.toml", environ={}).settings
        assert isinstance(read, DecryptingClientSettings)
        assert (read.encryption.roster, read.encryption.bits) == (folder / "roster.txt", 2048)
        assert read.consent.secure_sums == ("encrypted",)
        assert read.consent.min_sum == 12
    host = load_service("client", tmp_path / "host-1" / "config.toml", environ={}).settings
    assert isinstance(host, ClientSettings)
    assert host.encryption is not None
    assert host.encryption.roster_key == tmp_path / "host-1" / "roster.pub"

    # A bootstrap that was interrupted is run again: it names who was there already.
    (tmp_path / "operator" / "order.json").unlink()
    assert lay_out() == members


def test_hosts_that_share_a_key_are_what_the_roster_names(tmp_path: Path) -> None:
    settings = RunSettings.model_validate(
        {
            "system": "fedncf",
            "secure_sum": "shared-key",
            "data": {"synthetic": {"users": 50, "items": 60, "interactions": 1000}},
            "reference": False,
            "encryption": {"bits": 2048, "rotate_every": 7},
            "federation": {"hosts": 2},
            "rounds": {"min_cohort": 15, "min_sum": 12},
        }
    )
    bootstrap(settings, tmp_path, "a-run")
    assert not list(tmp_path.glob("key-*")), "there are no decrypting clients"
    members = Roster.load(tmp_path / "host-0" / "roster.txt").members
    drawn = []
    tokens = [
        json.loads(line) for line in (tmp_path / "thirdparty/state/tokens.jsonl").read_text().splitlines()
    ]
    for host in ("host-0", "host-1"):
        state = tmp_path / host / "state"
        (own,) = load_many(state / "holder" / "identities.key")
        drawn.append(own.participant_id)
        assert [path.stat().st_mode & 0o777 for path in (state, state / "holder")] == [0o700, 0o700]
        read = load_service("client", tmp_path / host / "config.toml", environ={}).settings
        assert isinstance(read, ClientSettings)
        assert read.encryption is not None
        assert (read.encryption.holds_key, read.encryption.rotate_every) == (True, 7)
        assert read.consent.secure_sums == ("shared-key",)
        names, _ = read_histories(tmp_path / host / "histories.csv")
        (token,) = [one for one in tokens if one["name"] == host]
        # Its users, and the holder.
        assert token["max_participants"] == len(names) + 1
    assert sorted(drawn) == list(members)
