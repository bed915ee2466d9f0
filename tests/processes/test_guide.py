"""The guide to several machines, word for word: each machine is a network namespace with the address of the guide."""

import json
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from .networks import Network, may_make_networks
from .patience import FULL, WAIT_S

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "machines.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```sh\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)
LINES = [line for block in BLOCKS for line in block.replace("\\\n", " ").splitlines()]
SMALL = {
    "DATA__SYNTHETIC__USERS": "60",
    "DATA__SYNTHETIC__ITEMS": "80",
    "DATA__SYNTHETIC__INTERACTIONS": "1500",
    "ROUNDS__COHORT": "20",
    "ROUNDS__GROUP": "20",
    "ROUNDS__PASSES": "2",
    "ROUNDS__EVALUATE_EVERY": "1",
}
"""Settings that make the example a small one; the commands stay as they are."""
MACHINES = {
    "thirdparty": "10.0.0.1",
    "cos": "10.0.0.2",
    "owner-0": "10.0.1.1",
    "host-0": "10.0.2.1",
    "host-1": "10.0.2.2",
    "host-2": "10.0.2.3",
    "operator": "10.0.2.4",
}


def command(start: str) -> str:
    """Return the one command of the guide that begins like this."""
    (found,) = {line for line in LINES if line.startswith(start)}
    return found


def slow_on_networks(test):
    late = pytest.mark.full("takes half a minute of a processor")
    rights = pytest.mark.skipif(
        FULL and not may_make_networks(), reason="takes network namespaces, which need root"
    )
    return late(rights(test))


def joined(network: Network, **variables: str) -> Path:
    """Lay a federation out, serve its third party, and let everybody else join; return the folder laid out."""
    network.type("thirdparty", command("coterie bootstrap"), **SMALL, **variables)
    network.start("thirdparty", command("coterie serve thirdparty"))
    prepared = network.at("thirdparty") / "federation"
    shown = network.type("thirdparty", command("coterie certs show"))
    fingerprint = re.search(r"fingerprint +([0-9a-f]{64})", shown)[1]
    for machine in MACHINES.keys() - {"thirdparty"}:
        shutil.copytree(prepared / machine, network.at(machine) / machine)
        line = command("coterie enrol").replace("host-0", machine).replace("SHA256", fingerprint)
        assert "is enrolled" in network.type(machine, line)
    return prepared


def serving_all(network: Network) -> dict[str, subprocess.Popen[bytes]]:
    """Start everybody who has joined."""
    serving = {}
    for machine in ("cos", "owner-0", "host-0", "host-1", "host-2"):
        role = {"cos": "cos", "owner-0": "data-owner"}.get(machine, "client")
        line = command(f"coterie serve {role}").replace("host-0", machine)
        serving[machine] = network.start(machine, line)
    return serving


def operated(network: Network) -> list[int]:
    """Let the operator run it; return the epochs of its report."""
    network.type("operator", command("coterie operate"))
    report = network.at("operator") / "state" / "operator" / "report" / "report.json"
    return [one["epoch"] for one in json.loads(report.read_text())["history"]]


@slow_on_networks
def test_hosts_that_share_a_key_join_by_invitation_and_are_named_afterwards(tmp_path):
    sums = {"SECURE_SUM": "shared-key", "ENCRYPTION__BITS": "1024", "ENCRYPTION__COMPARISON": "true"}
    with Network(tmp_path, MACHINES) as network:
        prepared = joined(network, **sums)
        hosts = [machine for machine in MACHINES if machine.startswith("host")]
        ids = [
            network.type(host, command("coterie certs participants").replace("host-0", host)).split()[-1]
            for host in hosts
        ]
        (network.at("thirdparty") / "holders.txt").write_text("\n".join(ids))
        run = json.loads((prepared / "operator" / "order.json").read_text())["run_id"]
        network.type("thirdparty", command("coterie certs roster").replace("RUN", run))
        for host in hosts:
            shutil.copy(network.at("thirdparty") / "roster.txt", network.at(host) / "state" / host)
        serving_all(network)
        assert operated(network) == [0, 1, 2]


@slow_on_networks
def test_the_commands_of_the_guide_make_a_federation_of_several_machines(tmp_path):
    with Network(tmp_path, MACHINES) as network:
        prepared = joined(network)
        serving = serving_all(network)
        assert operated(network) == [0, 1, 2]

        # Somebody joins later, by an invitation of its own and with a token for later.
        order = json.loads((prepared / "operator" / "order.json").read_text())
        network.type("thirdparty", command("coterie certs invite").replace("RUN", order["run_id"]))
        assert (network.at("thirdparty") / "client-host-7.invitation").is_file()
        network.type("thirdparty", command("coterie certs token"))

        # Before it starts again, a host looks around.
        serving["host-0"].send_signal(signal.SIGTERM)
        serving["host-0"].wait(WAIT_S)
        (preflight,) = re.findall(r"`(coterie preflight [^`]+)`", GUIDE)
        said = network.type("host-0", preflight)
        assert "clock of thirdparty/directory" in said
        assert "mutual TLS, healthy" in said
