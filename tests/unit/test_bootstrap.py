"""A federation laid out: each party's folder holds what it needs, and nothing of anybody else."""

import csv
import json
import time
import tomllib

import pytest

from coterie.cli.main import invoke
from coterie.config.run import RunSettings
from coterie.crypto.roster import PAILLIER, Roster, load_roster_key
from coterie.errors import ConfigError
from coterie.launch.bootstrap import bootstrap, held_order

PARTIES = {"thirdparty", "cos", "owner-0", "owner-1", "host-0", "host-1"}
SMALL = {
    "reference": False,
    "data": {"synthetic": {"users": 20, "items": 60, "interactions": 400}},
    "federation": {"owners": 2, "hosts": 2},
}


@pytest.fixture(scope="module")
def laid_out(tmp_path_factory):
    root = tmp_path_factory.mktemp("federation") / "below" / "it"
    order = bootstrap(RunSettings.model_validate(SMALL), root, "a-run", addresses={"cos": "10.0.0.5:7450"})
    return root, order


def config(folder):
    return tomllib.loads((folder / "config.toml").read_text())


def test_every_party_and_the_operator_get_a_folder_that_nobody_else_may_enter(laid_out):
    root, _ = laid_out
    assert {folder.name for folder in root.iterdir()} == PARTIES | {"operator"}
    assert {folder.stat().st_mode & 0o777 for folder in root.iterdir()} == {0o700}


def test_a_folder_holds_what_its_party_needs_and_nothing_else(laid_out):
    root, _ = laid_out
    needed = {"config.toml", "ca.pem", "token"}
    for folder in root.iterdir():
        held = {path.name for path in folder.iterdir()}
        match folder.name.partition("-")[0]:
            case "thirdparty":
                assert held == {"config.toml", "state"}
            case "operator":
                assert held == needed | {"order.json", "run.key"}
            case "host":
                assert held == needed | {"histories.csv"}
            case "owner":
                (items,) = held - needed
                assert items.startswith("items-")
            case "cos":
                assert held == needed
        if folder.name != "thirdparty":
            assert (folder / "token").stat().st_mode & 0o777 == 0o600
    private = [root / "operator" / "run.key", *root.glob("host-*/histories.csv")]
    assert [path.stat().st_mode & 0o777 for path in private] == [0o600] * 3


def test_every_user_is_on_one_host(laid_out):
    root, order = laid_out
    users = []
    for host in ("host-0", "host-1"):
        with (root / host / "histories.csv").open(newline="") as file:
            users += {row["user"] for row in csv.DictReader(file)}
    assert len(users) == len(set(users)) == order.users


def test_parties_are_told_the_address_that_was_given_and_the_folder_where_none_was(laid_out):
    root, _ = laid_out
    owner = config(root / "owner-0")
    assert owner["cos"]["address"] == "10.0.0.5:7450"
    assert owner["thirdparty"]["address"] == "thirdparty:7443"
    assert owner["enrol"]["address"] == "thirdparty:7444"
    assert owner["advertise"] == "owner-0:7443"
    assert config(root / "operator")["cos"]["address"] == "10.0.0.5:7450"


def test_the_paths_of_a_configuration_are_relative_so_that_a_folder_can_be_moved(laid_out):
    root, _ = laid_out
    for folder in root.iterdir():
        assert str(root) not in (folder / "config.toml").read_text()


def test_the_order_is_read_as_it_was_written_and_holds_no_interaction(laid_out):
    root, order = laid_out
    assert held_order(root) == order
    assert held_order(root / "elsewhere") is None
    assert (order.run_id, order.owners) == ("a-run", 2)
    assert set(json.loads((root / "operator" / "order.json").read_text())["dataset"]) == {
        "name",
        "users",
        "items",
        "interactions",
        "notes",
    }


def test_what_is_laid_out_is_not_touched_again(laid_out, tmp_path, capsys):
    root, _ = laid_out
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    run = tmp_path / "run.toml"
    run.write_text('name = "another"\n')

    assert invoke(["bootstrap", str(run), "--into", str(root), "--json"]) == 0

    assert json.loads(capsys.readouterr().out)["result"]["run_id"] == "a-run"
    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seeds": [0, 1]}, "seeds"),
        ({"federation": {"owners": 2, "churn": {"owners": 1}}}, "churn"),
        ({"federation": {"owners": 2, "attacks": True}}, "attacks"),
    ],
)
def test_what_takes_one_machine_is_refused_before_anything_is_written(change, named, tmp_path):
    with pytest.raises(ConfigError, match=named):
        bootstrap(RunSettings.model_validate(SMALL | change), tmp_path / "federation", "a-run")
    assert not (tmp_path / "federation").exists()


def test_an_address_of_nobody_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match="'owner-7'"):
        bootstrap(RunSettings.model_validate(SMALL), tmp_path, "a-run", addresses={"owner-7": "10.0.0.9:1"})


def test_with_invitations_no_key_token_or_configuration_of_a_party_is_made(tmp_path):
    bootstrap(RunSettings.model_validate(SMALL), tmp_path, "a-run", invitations=True)
    for folder in tmp_path.iterdir():
        held = {path.name for path in folder.iterdir()}
        if folder.name == "thirdparty":
            assert held == {"config.toml", "state"}
        else:
            assert "invitation" in held
            assert not held & {"config.toml", "ca.pem", "token", "state"}
            assert (folder / "invitation").stat().st_mode & 0o777 == 0o600
    host = json.loads((tmp_path / "host-0" / "invitation").read_text())
    assert (host["role"], host["name"], host["settings"]["run"]) == ("client", "host-0", "a-run")


@pytest.mark.parametrize(("secure_sum", "holder"), [("encrypted", "key-0"), ("shared-key", "host-0")])
def test_invited_holders_of_a_key_make_it_themselves_and_the_roster_is_signed_later(
    secure_sum, holder, tmp_path, capsys
):
    run, root = tmp_path / "run.toml", tmp_path / "here"
    run.write_text(
        f'system = "fedncf"\nsecure_sum = "{secure_sum}"\nreference = false\n'
        "rounds = {min_cohort = 15, min_sum = 12}\n"
        "data = {synthetic = {users = 50, items = 60, interactions = 1000}}\n"
        "encryption = {bits = 2048}\nfederation = {hosts = 2}\n"
    )
    assert invoke(["bootstrap", str(run), "--into", str(root), "--invite"]) == 0
    assert "coterie certs roster" in capsys.readouterr().out
    assert not list(root.rglob("identities.key")), "nobody's keys are made here"
    assert not list(root.rglob("roster.txt"))
    for who in (holder, "host-1"):
        told = json.loads((root / who / "invitation").read_text())["settings"]["encryption"]
        assert (told["roster"], told["roster_key"]) == ("roster.txt", "roster.pub")
    signs = root / "operator" / "roster.key"
    assert signs.stat().st_mode & 0o777 == 0o600
    # What it signs is what everybody relies on.
    out = tmp_path / "roster.txt"
    members = ["--member", "ab" * 32, "--run", "a-run"]
    assert invoke(["certs", "roster", "--key", str(signs), "--out", str(out), *members]) == 0
    keys = {path.read_bytes() for path in root.rglob("roster.pub")}
    assert len(keys) == 1
    for path in (root / holder / "roster.pub", root / "thirdparty" / "state" / "roster.pub"):
        Roster.load(out).verify(load_roster_key(path), purpose=PAILLIER, run="a-run", now=int(time.time()))


LATENTS = {
    **SMALL,
    "system": "fedidcf",
    "secure_sum": "masked",
    "split": {"kind": "random"},
    "rounds": {"cohorts": "all", "passes": 6, "evaluate_every": 1, "min_cohort": 10, "min_sum": 10},
    "federation": {"hosts": 2},
}


def test_hosts_of_a_run_with_meta_latents_are_on_the_roster_of_its_key(tmp_path):
    bootstrap(RunSettings.model_validate(LATENTS), tmp_path, "a-run")
    for host in ("host-0", "host-1"):
        told = config(tmp_path / host)["latents"]
        assert (told["roster"], told["roster_key"], told["bits"]) == ("roster.txt", "roster.pub", 3072)
        roster = Roster.load(tmp_path / host / "roster.txt")
        key = load_roster_key(tmp_path / "thirdparty" / "state" / "roster.pub")
        roster.verify(key, purpose=PAILLIER, run="a-run", now=int(time.time()))
        assert len(roster.members) == 2
        assert "encryption" not in config(tmp_path / host)


def test_only_an_experiment_has_the_third_party_draw_combinations_from_a_seed(tmp_path):
    real = {**LATENTS["rounds"], "experiment": False, "min_cohort": 2, "min_sum": 2}
    for name, rounds, seeds in (("experiment", LATENTS["rounds"], [0]), ("real", real, [])):
        bootstrap(RunSettings.model_validate({**LATENTS, "rounds": rounds}), tmp_path / name, "a-run")
        told = config(tmp_path / name / "thirdparty")
        assert [told[key] for key in told if key == "latent_seed"] == seeds
        assert ["seed" in config(tmp_path / name / "host-0")] == [bool(seeds)]


def test_invited_hosts_of_a_run_with_meta_latents_get_their_roster_later(tmp_path, capsys):
    run, root = tmp_path / "run.toml", tmp_path / "here"
    run.write_text(
        'system = "fedidcf"\nsecure_sum = "masked"\nreference = false\nsplit = {kind = "random"}\n'
        "rounds = {min_cohort = 15, min_sum = 12, passes = 6}\n"
        "data = {synthetic = {users = 50, items = 60, interactions = 1000}}\nfederation = {hosts = 2}\n"
    )
    assert invoke(["bootstrap", str(run), "--into", str(root), "--invite"]) == 0
    assert "the key of meta-latents" in " ".join(capsys.readouterr().out.split())
    assert not list(root.rglob("roster.txt"))
    told = json.loads((root / "host-0" / "invitation").read_text())["settings"]["latents"]
    assert (told["roster"], told["roster_key"]) == ("roster.txt", "roster.pub")
