"""deploy/stack.py: a Swarm stack from what compose makes of its files."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
SCRIPT = DEPLOY / "stack.py"

PARTY = {
    "image": "coterie-cos:latest",
    "build": {"context": "."},
    "depends_on": {"thirdparty": {"condition": "service_healthy"}},
    "restart": "unless-stopped",
    "security_opt": ["no-new-privileges:true"],
    "pull_policy": "never",
    "read_only": True,
    "cap_drop": ["ALL"],
    "mem_limit": "1g",
    "cpus": 1.0,
    "pids_limit": 256,
    "stop_grace_period": "20s",
    "tmpfs": ["/tmp:mode=1777,size=64m"],
    "networks": {"federation": {}},
    "volumes": ["cos:/party:rw"],
}
COMPOSE = {
    "services": {
        "cos": PARTY,
        # As the other compose says volumes.
        "owner-1": {**PARTY, "volumes": [{"type": "volume", "source": "owner-1", "target": "/party"}]},
        "owner-2": {**PARTY, "command": ["version"], "restart": "no"},
        "operator": {**PARTY, "restart": None, "entrypoint": None, "command": "operate", "networks": None},
        "bootstrap": {"image": "coterie-operator:latest", "network_mode": "none"},
    },
    "networks": {"federation": {"internal": True}, "default": None, "unused": {}},
    "volumes": {"cos": {}},
}


def convert(compose, *arguments):
    text = compose if isinstance(compose, str) else yaml.safe_dump(compose)
    return subprocess.run([sys.executable, SCRIPT, *arguments], input=text, capture_output=True, text=True)


def test_a_stack_says_in_its_way_what_the_compose_file_says():
    ended = convert(COMPOSE, "--folders", "/data")
    assert ended.returncode == 0, ended.stderr
    made = yaml.safe_load(ended.stdout)
    cos = made["services"]["cos"]
    assert cos["volumes"] == [
        {"type": "tmpfs", "target": "/tmp", "tmpfs": {"size": 64 << 20}},
        {"type": "bind", "source": "/data/cos", "target": "/party"},
    ]
    deploy = cos["deploy"]
    assert deploy["resources"]["limits"] == {"cpus": "1.0", "memory": "1g", "pids": 256}
    assert deploy["placement"]["constraints"] == ["node.labels.coterie.cos == true"]
    assert deploy["restart_policy"]["condition"] == "any"
    assert (cos["read_only"], cos["cap_drop"], cos["stop_grace_period"]) == (True, ["ALL"], "20s")
    gone = {"build", "depends_on", "restart", "security_opt", "pull_policy", "tmpfs", "cpus", "mem_limit"}
    assert not gone & cos.keys()
    assert made["services"]["owner-1"]["volumes"][1]["source"] == "/data/owner-1"
    assert made["networks"] == {
        "federation": {"driver": "overlay", "internal": True},
        "default": {"driver": "overlay", "internal": False},
    }


def test_what_ends_is_not_started_again_and_what_has_nothing_to_do_is_not_there():
    services = yaml.safe_load(convert(COMPOSE).stdout)["services"]
    assert sorted(services) == ["cos", "operator", "owner-1"]
    assert services["operator"]["deploy"]["restart_policy"]["condition"] == "on-failure"


@pytest.mark.parametrize(
    ("compose", "arguments", "said"),
    [
        ("", [], "the input is empty or no mapping"),
        ("services: {", [], "while parsing"),
        ({"services": {"web": {}}}, [], "the input has no service `cos`"),
        (
            {"services": {"cos": {**PARTY, "devices": ["/dev/x"]}}},
            [],
            "services.cos.devices: not known how to say",
        ),
        (
            {"services": {"cos": {**PARTY, "tmpfs": ["/tmp:uid=3"]}}},
            [],
            "services.cos.tmpfs: the option 'uid'",
        ),
        (
            {"services": {"cos": {**PARTY, "tmpfs": ["/tmp:size=big"]}}},
            [],
            "expected a number with k, m or g",
        ),
        (
            {"services": {"cos": {**PARTY, "volumes": ["/etc:/etc"]}}},
            [],
            "expected named volumes only, got /etc:/etc",
        ),
        (COMPOSE, ["--folders", "here"], "--folders here: expected an absolute path"),
    ],
)
def test_what_is_not_known_is_refused_and_named(compose, arguments, said):
    ended = convert(compose, *arguments)
    assert ended.returncode != 0
    assert ended.stdout == ""
    assert said in ended.stderr


def composed(*beside):
    """Return what compose makes of its file and overlays."""
    names = ["docker-compose.yml", *(f"docker-compose.{name}.yml" for name in beside)]
    files = [word for name in names for word in ("--file", name)]
    return subprocess.run(
        ["docker-compose", *files, "config"], cwd=DEPLOY, capture_output=True, text=True, check=True
    ).stdout


@pytest.mark.skipif(shutil.which("docker-compose") is None, reason="docker-compose is not installed")
def test_a_replicated_cos_is_a_stack_whose_database_is_elsewhere(tmp_path):
    config = composed("fedncf", "replicas")
    refused = convert(config)
    assert refused.returncode == 1
    assert "services.database: its socket needs one machine; expected --database-network" in refused.stderr
    ended = convert(config, "--folders", "/srv/coterie", "--database-network", "postgres")
    assert ended.returncode == 0, ended.stderr
    made = yaml.safe_load(ended.stdout)
    services, processes = made["services"], ["coordinator-0", "coordinator-1", "intake-0", "intake-1"]
    assert {"cos", "thirdparty", "owner-0", "host-0", "host-1", "operator", *processes} == set(services)
    for name in processes:
        own = services[name]
        assert [one["source"] for one in own["volumes"] if one["type"] == "bind"] == [f"/srv/coterie/{name}"]
        assert set(own["networks"]) == {"orchestration", "database"}
        assert own["deploy"]["placement"]["constraints"] == [f"node.labels.coterie.{name} == true"]
    # The balancer finds intakes by the name that both have, and has no folder.
    for name in ("intake-0", "intake-1"):
        assert services[name]["networks"]["orchestration"] == {"aliases": ["intake"]}
    assert [one["type"] for one in services["cos"]["volumes"]] == ["tmpfs"]
    assert services["cos"]["networks"] == ["federation", "orchestration"]
    assert services["cos"]["healthcheck"] == {"disable": True}
    assert services["host-0"]["networks"] == ["federation"]
    assert made["networks"]["database"] == {"external": True, "name": "postgres"}
    assert made["networks"]["orchestration"] == {"driver": "overlay", "internal": True}

    (tmp_path / "stack.yml").write_text(ended.stdout)
    checked = subprocess.run(
        ["docker", "stack", "config", "--compose-file", tmp_path / "stack.yml"],
        capture_output=True,
        text=True,
    )
    if "unknown" in checked.stderr or "Usage:" in checked.stderr:
        return  # an earlier Docker, which cannot check a stack
    assert checked.returncode == 0, checked.stderr


@pytest.mark.skipif(shutil.which("docker-compose") is None, reason="docker-compose is not installed")
@pytest.mark.parametrize(
    ("beside", "there"),
    [
        ([], {"owner-1", "owner-2", "host-1"}),
        (["fedncf", "scale"], {"owner-0", "host-3"}),
        (["privmvmf", "observability"], {"owner-0", "host-1", "key-2"}),
        (["people"], {"owner-0", "host-9"}),
    ],
)
def test_every_kind_of_run_of_the_compose_files_can_be_a_stack(beside, there):
    names = ["docker-compose.yml", *(f"docker-compose.{name}.yml" for name in beside)]
    files = [word for name in names for word in ("--file", name)]
    settings = {**os.environ, "COTERIE_METRICS": "0.0.0.0:9464"}
    compose = ["docker-compose", *files, "config"]
    config = subprocess.run(
        compose, cwd=DEPLOY, env=settings, capture_output=True, text=True, check=True
    ).stdout
    ended = convert(config)
    assert ended.returncode == 0, ended.stderr
    services = yaml.safe_load(ended.stdout)["services"]
    assert {"thirdparty", "cos", "operator", *there} <= services.keys()
    assert not {"bootstrap", "prometheus"} & services.keys()
    # In systems with rounds two owners have nothing to do.
    assert ("owner-2" in services) is (not beside)
    for name, service in services.items():
        # A swarm ends what is not healthy: a service that waits, as all do before a run, only has to answer.
        health = service.get("healthcheck")
        assert (name == "operator") == (health is None)
        assert health is None or health["test"][-2:] == ["--alive", "/party/state"]
        assert service["deploy"]["resources"]["limits"].keys() == {"cpus", "memory", "pids"}, name
        assert name == "operator" or service["environment"]["COTERIE_METRICS"] == "0.0.0.0:9464"
