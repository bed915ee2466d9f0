"""Each compose that is installed takes the files of deploy/ together, and sees the same services in them."""

import os
import subprocess

import pytest
import yaml

from .engine import DEPLOY
from .stack import compose_commands

pytestmark = pytest.mark.containers

SETTINGS = {
    "COTERIE_METRICS": "0.0.0.0:9464",
    "COTERIE_DATA": str(DEPLOY),
    "COTERIE_DATA_NAME": "ml-100k",
}
PARTIES = {"thirdparty", "cos", *(f"owner-{n}" for n in range(3)), *(f"host-{n}" for n in range(4))}
TOGETHER = {
    "fedncf": (
        ["data", "fedncf", "observability", "postgres", "wan", "scale", "scale.wan"],
        PARTIES,
        {"prometheus", "database"},
    ),
    "replicas": (
        ["fedncf", "wan", "replicas", "observability", "replicas.observability", "scale", "scale.wan"],
        PARTIES,
        {"prometheus", "database", "coordinator-0", "coordinator-1", "intake-0", "intake-1"},
    ),
    "expansion": (["expansion", "wan", "scale", "scale.wan"], PARTIES, set()),
    "privmvmf": (
        ["privmvmf", "wan", "privmvmf.wan", "scale", "scale.wan"],
        PARTIES | {"key-0", "key-1", "key-2"},
        set(),
    ),
}


@pytest.fixture(params=["docker compose", "docker-compose"])
def compose(request):
    command = request.param.split()
    if command not in compose_commands():
        pytest.skip(f"{request.param} is not installed")
    return command


@pytest.mark.parametrize("name", TOGETHER)
def test_all_overlays_are_taken_together_and_every_party_has_its_emulator(compose, name):
    overlays, parties, others = TOGETHER[name]
    files = ["docker-compose.yml", *(f"docker-compose.{overlay}.yml" for overlay in overlays)]
    ended = subprocess.run(
        [*compose, *(word for file in files for word in ("--file", file)), "config"],
        cwd=DEPLOY,
        env={**os.environ, **SETTINGS},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    services = yaml.safe_load(ended.stdout)["services"]
    assert set(services) == {"bootstrap", "operator", *parties, *others, *(f"wan-{one}" for one in parties)}
    for party in parties:
        emulator = services[f"wan-{party}"]
        assert emulator["network_mode"] == f"service:{party}"
        assert emulator["cap_add"] == ["NET_ADMIN"]
        assert f"COTERIE_WAN_{party.upper().replace('-', '_')}" in emulator["environment"]
