"""A COS of several processes laid out: a folder, a token and a part each, and one name for all."""

import json
import tomllib

import pytest

from coterie.cli.main import invoke
from coterie.config.load import load_service
from coterie.config.run import RunSettings
from coterie.errors import ConfigError
from coterie.launch.bootstrap import bootstrap
from coterie.launch.federation import Federation

SMALL = {
    "system": "fedncf",
    "reference": False,
    "data": {"synthetic": {"users": 20, "items": 60, "interactions": 400}},
    "rounds": {"cohort": 20, "group": 20},
}
URL = "postgresql+psycopg://coterie@db.example.org/coterie"


def settings(**federation):
    return RunSettings.model_validate(SMALL | {"federation": {"hosts": 2, **federation}})


def laid_out(root, addresses=None, *, invitations=False, **federation):
    bootstrap(settings(**federation), root, "a-run", addresses=addresses, invitations=invitations)
    return {path.name: path for path in root.iterdir()}


def config(folder):
    return tomllib.loads((folder / "config.toml").read_text())


def test_coordinators_and_intakes_have_one_name_and_a_folder_a_token_and_an_address_each(tmp_path):
    folders = laid_out(tmp_path / "it", coordinators=2, intakes=2)
    processes = ["coordinator-0", "coordinator-1", "intake-0", "intake-1"]
    assert set(folders) == {"thirdparty", "owner-0", "host-0", "host-1", "operator", *processes}
    tokens = {(folders[name] / "token").read_text() for name in processes}
    assert len(tokens) == 4
    for name in processes:
        assert config(folders[name])["name"] == "cos"
        assert {path.name for path in folders[name].iterdir()} == {"config.toml", "ca.pem", "token"}
    for name in ("coordinator-0", "coordinator-1"):
        own = config(folders[name])
        assert (own["part"], own["standby"]) == ("coordinator", True)
    for name in ("intake-0", "intake-1"):
        own = config(folders[name])
        assert (own["part"], own["coordinator"]) == ("intake", ["coordinator-0:7443", "coordinator-1:7443"])


def test_everybody_calls_the_balancer_at_the_address_that_was_given_or_at_the_name_of_the_cos(tmp_path):
    for name, addresses, wanted in [
        ("usual", {}, "cos:7443"),
        ("given", {"cos": "10.0.0.9:443", "coordinator-1": "10.0.0.2:7443"}, "10.0.0.9:443"),
    ]:
        folders = laid_out(tmp_path / name, addresses, coordinators=2, intakes=1)
        for party in ("owner-0", "host-1", "operator"):
            assert config(folders[party])["cos"] == {"name": "cos", "address": wanted}
        first = config(folders["intake-0"])["coordinator"]
        assert first == ["coordinator-0:7443", addresses.get("coordinator-1", "coordinator-1:7443")]


def test_a_pair_without_intakes_is_named_to_everybody_by_both_addresses(tmp_path):
    folders = laid_out(tmp_path / "it", {"cos-1": "10.0.0.2:7443"}, coordinators=2)
    assert {"cos-0", "cos-1"} <= set(folders)
    for party in ("owner-0", "host-1", "operator"):
        assert config(folders[party])["cos"] == {
            "name": "cos",
            "address": "cos-0:7443",
            "standbys": ["10.0.0.2:7443"],
        }
    for name in ("cos-0", "cos-1"):
        own = config(folders[name])
        assert own["standby"] is True
        assert "part" not in own


def test_the_configuration_of_each_process_is_valid_with_the_database_of_the_run_or_of_the_environment(
    tmp_path, monkeypatch
):
    named = laid_out(tmp_path / "named", coordinators=2, intakes=1, database=URL)
    for name in ("coordinator-1", "intake-0"):
        assert load_service("cos", named[name] / "config.toml").settings.database.url == URL
    unnamed = laid_out(tmp_path / "unnamed", coordinators=2, intakes=1)
    with pytest.raises(ConfigError, match="database"):
        load_service("cos", unnamed["intake-0"] / "config.toml")
    monkeypatch.setenv("COTERIE_DATABASE__URL", URL)
    for name in ("coordinator-0", "intake-0"):
        found = load_service("cos", unnamed[name] / "config.toml").settings
        assert (found.part, found.database.url) == (name.partition("-")[0], URL)


def test_processes_are_invited_one_by_one_with_what_they_need_to_join(tmp_path):
    folders = laid_out(tmp_path / "it", invitations=True, coordinators=2, intakes=1, database=URL)
    told = {
        name: json.loads((folders[name] / "invitation").read_text())
        for name in ("coordinator-0", "coordinator-1", "intake-0")
    }
    assert len({one["token"] for one in told.values()}) == 3
    assert {(one["role"], one["name"]) for one in told.values()} == {("cos", "cos")}
    assert told["coordinator-1"]["settings"]["standby"] is True
    assert told["intake-0"]["settings"]["coordinator"] == ["coordinator-0:7443", "coordinator-1:7443"]
    assert {one["settings"]["database"]["url"] for one in told.values()} == {URL}


def test_a_run_of_drift_may_have_a_standby_too(tmp_path):
    drift = RunSettings.model_validate(
        {"system": "drift", "reference": False, "federation": {"coordinators": 2, "intakes": 1}}
    )
    bootstrap(drift, tmp_path / "federation", "a-run")
    assert (tmp_path / "federation" / "coordinator-1").is_dir()


def test_the_launcher_of_one_machine_refuses_several_processes_and_says_what_prepares_them(tmp_path, capsys):
    with pytest.raises(ConfigError, match=r"federation\.intakes = 2") as refused:
        Federation(settings(intakes=2), None, tmp_path, run_id="a-run", seed=0)
    assert "coterie bootstrap" in refused.value.hint
    run = tmp_path / "run.toml"
    run.write_text('system = "fedncf"\n[federation]\nintakes = 2\n')
    assert invoke(["run", str(run)]) != 0
    assert "federation.intakes = 2" in capsys.readouterr().err


def test_an_address_of_the_cos_is_refused_where_a_pair_has_no_balancer(tmp_path):
    with pytest.raises(ConfigError, match="'cos'"):
        laid_out(tmp_path / "it", {"cos": "10.0.0.9:443"}, coordinators=2)
