"""Client hosts on a Ray cluster, as far as no cluster is needed: the address, the missing package, a host's files."""

import sys
import time
from typing import Any

import pytest
from pydantic import ValidationError

from coterie.cli.main import invoke
from coterie.errors import PreflightError
from coterie.launch.node_host import CONFIG, NodeHost, packed, unpack
from coterie.launch.ray_cluster import objection_to_nodes, require_answer
from coterie.process.runtime import alone_in
from coterie.systems.run_settings import RaySettings


@pytest.mark.parametrize(
    ("address", "head"), [("", None), ("ray", None), ("ray://head.example:10001", ("head.example", 10001))]
)
def test_a_cluster_is_named_by_its_head_or_is_this_machines_own(address, head):
    assert RaySettings(address=address).head == head


@pytest.mark.parametrize("address", ["auto", "head:10001", "ray://head", "ray://head:port", "rays://head:1"])
def test_another_address_is_refused_with_what_is_expected(address):
    with pytest.raises(ValidationError, match="is no Ray cluster, expected ray://HOST:PORT, or ray"):
        RaySettings(address=address)


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(PreflightError, match="client hosts on a Ray cluster need ray") as caught:
        require_answer(RaySettings(address="ray"))
    assert "coterie[ray]" in str(caught.value)


def node(cpus: float, memory_mb: float = 1000, *, alive: bool = True) -> dict[str, Any]:
    """Return a node as Ray describes it; one without processors has no entry for them."""
    there = {"CPU": cpus, "memory": memory_mb * 2**20}
    return {"Alive": alive, "Resources": {name: amount for name, amount in there.items() if amount}}


@pytest.mark.parametrize(
    ("nodes", "options", "problem"),
    [
        ([node(0), node(1), node(1), node(1)], {}, ""),
        ([node(0), node(1), node(2)], {"cpus": 1.0}, ""),
        ([node(0.9)], {"cpus": 0.3}, ""),
        ([node(1), node(1)], {"cpus": 1.0}, "has 2 processors, and 3 hosts need 3"),
        ([node(1), node(1), node(1, alive=False)], {"cpus": 1.0}, "has 2 processors, and 3 hosts need 3"),
        (
            [node(3), node(3)],
            {"cpus": 2.0},
            "room for 2 of 3 hosts, each of which needs 2 processors of one node",
        ),
        (
            [node(8, 500), node(1, 2000)],
            {"cpus": 1.0, "memory_mb": 400},
            "room for 2 of 3 hosts, each of which needs 1 processors and 400 MiB of one node",
        ),
    ],
)
def test_a_cluster_that_can_never_hold_all_hosts_is_refused_and_no_other(nodes, options, problem):
    found = objection_to_nodes(nodes, 3, RaySettings(address="ray", **options))
    assert problem in found
    assert bool(problem) == bool(found)


def test_hosts_on_a_cluster_and_one_process_exclude_each_other(capsys):
    assert invoke(["run", "--demo", "--in-process", "--hosts", "ray"]) == 2
    assert "--hosts and --in-process" in " ".join(capsys.readouterr().err.split())


def test_files_of_a_host_arrive_with_their_modes_and_over_those_that_are_there(tmp_path):
    there, back = tmp_path / "there", tmp_path / "back"
    (there / "state" / "tls").mkdir(parents=True)
    (there / "state" / "tls" / "key.pem").write_bytes(b"secret")
    (there / "state" / "tls" / "key.pem").chmod(0o400)
    (there / "config.toml").write_bytes(b"new")
    back.mkdir()
    (back / "config.toml").write_bytes(b"an older and longer one")
    unpack(packed(there), back)
    assert packed(back) == packed(there)
    assert (back / "state" / "tls").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("name", ["../config.toml", "/etc/config.toml", "state/../../config.toml"])
def test_a_file_that_leads_out_of_the_folder_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match="leads out of the folder"):
        unpack({name: (0o600, b"")}, tmp_path)


def test_a_host_does_not_start_while_another_process_uses_its_shared_state(tmp_path):
    host = NodeHost(
        "host-0", {CONFIG: (0o600, b"nothing that can be read"), "state/x": (0o600, b"")}, str(tmp_path)
    )
    with alone_in(tmp_path / "state"):
        host.start()
        assert host.look() == (None, b"")
        # Its files are not taken from under that process either.
        assert host.end()[0] is None
        assert (tmp_path / "state" / "x").is_file()
        host.start()
    status, log = until(host)
    assert status == 10
    assert b"config" in log


def until(host: NodeHost) -> tuple[int, bytes]:
    """Return a host's status and log when its process has ended."""
    logged, deadline = b"", time.monotonic() + 300
    while time.monotonic() < deadline:
        status, new = host.look()
        logged += new
        if status is not None:
            return status, logged
        time.sleep(0.05)
    raise TimeoutError("the host's process has not ended")
