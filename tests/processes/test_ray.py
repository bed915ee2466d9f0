"""Client hosts on the nodes of a Ray cluster: the figures of a run without it, a node that is lost, no cluster."""

import asyncio
import contextlib
import os
import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray.cluster_utils import Cluster

from coterie.errors import PeerError, PreflightError
from coterie.launch.children import free_port
from coterie.launch.federation import Federation, run_federation
from coterie.launch.ray_cluster import require_answer
from coterie.studies.in_process import train_in_process
from coterie.studies.run_data import load, make_feed
from coterie.studies.services_run import FinishedRun
from coterie.systems.run_settings import RaySettings

from .command import Command, descendants, gone
from .patience import WAIT_S

pytestmark = pytest.mark.xdist_group("ray")
THOROUGH = pytest.mark.full("takes another Ray Client")

NODES, HOSTS = 4, 3
FEDNCF: dict[str, Any] = {
    "system": "fedncf",
    "split": {"kind": "leave-last-out"},
    "data": {"synthetic": {"users": 60, "items": 80, "interactions": 1500}},
    "rounds": {"cohort": 20, "group": 20, "passes": 4, "evaluate_every": 2},
    "federation": {"hosts": HOSTS},
}
_STORE = 80 << 20
LONG = """
name = "long"
system = "fedncf"
secure_sum = "masked"
split = {{ kind = "leave-last-out" }}
data.synthetic = {{ users = 60, items = 80, interactions = 1500 }}
rounds = {{ cohort = 20, group = 20, passes = 5000, evaluate_every = 1 }}
federation.hosts = {hosts}
"""
"""A run that does not end by itself while a test looks at it."""

PATIENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_raylet_start_wait_time_s": "300",
    "RAY_worker_register_timeout_seconds": "300",
    "RAY_gcs_server_request_timeout_seconds": "300",
    "RAY_CLIENT_SERVER_CHECK_CHANNEL_TIMEOUT_S": "300",
    "RAY_health_check_failure_threshold": "8",
}
"""On a busy machine Ray's own processes take longer to start, and to answer, than it allows."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A head without processors, which takes Ray Clients, and nodes with one processor each, all on this machine."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in PATIENT.items():
            patch.setenv(name, value)
        head = {
            "num_cpus": 0,
            "ray_client_server_port": free_port(),
            "include_dashboard": False,
        }
        made = Cluster()
        try:
            started(made, **head)
            for _ in range(NODES):
                started(made, num_cpus=1)
            made.wait_for_nodes(timeout=300)
            made.client = f"ray://127.0.0.1:{head['ray_client_server_port']}"
            yield made
        finally:
            made.shutdown()


def started(cluster: Cluster, **options: Any) -> None:
    """Start a node; a machine under load needs another try, as Ray gives a node half a minute to come up."""
    for left in reversed(range(4)):
        try:
            cluster.add_node(object_store_memory=_STORE, **options)
        except Exception:
            if not left:
                raise
        else:
            return


def trained(settings: Any, folder: Path, see: Any = lambda event: None) -> tuple[FinishedRun, Federation]:
    """Run the federation of some settings; return what it came to, and the federation."""
    feed = make_feed(settings, load(settings), 0)
    held: list[Federation] = []
    run = run_federation(settings, feed, folder, run_id="test", seed=0, see=see, begun=held.append)
    return asyncio.run(run), held[0]


def alone(settings: Any) -> dict[str, Any]:
    """Return the facts about the same training in one process."""
    feed = make_feed(settings, load(settings), 0)
    return train_in_process(settings, feed, run_id="test", seed=0, see=lambda event: None).known


def figures(known: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the figures of a run that came to its end, to the last digit."""
    assert known["phase"] == "done"
    return [{key: one[key] for key in ("epoch", "version", "users", "metrics")} for one in known["history"]]


def hosting(cluster: Cluster) -> list[Any]:
    """Return the nodes on which a client host runs."""
    return [node for node in cluster.worker_nodes if services(node)]


def services(node: Any) -> list[int]:
    """Return the process ids of client hosts below a node's raylet."""
    (raylet,) = node.all_processes["raylet"]
    return [pid for pid in descendants(raylet.process.pid) if b"\0serve\0client\0" in command_line(pid)]


def command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@pytest.mark.parametrize(
    ("address", "secure_sum"),
    [
        ("ray", "clear"),
        ("ray", "masked"),
        # A head that is busy may not start the process of a Ray Client: nothing here can make it.
        pytest.param("ray://", "masked", marks=THOROUGH),
    ],
)
def test_hosts_on_nodes_come_to_the_numbers_of_one_process(
    cluster, small, tmp_path, monkeypatch, address, secure_sum
):
    # This machine is part of the cluster.
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    at = cluster.client if address == "ray://" else address
    settings = small(**FEDNCF, secure_sum=secure_sum, ray={"address": at})
    spread: set[int] = set()
    finished, federation = trained(settings, tmp_path, lambda event: spread.update(map(id, hosting(cluster))))
    assert figures(finished.known) == figures(alone(settings))
    assert len(spread) == HOSTS, "each host was on a node of its own"
    # Accounts, logs and stores came back; nothing is left on the nodes.
    for host in range(HOSTS):
        child = federation.children[f"client/host-{host}"]
        assert finished.accounts[child.party]["peak_rss_mb"] > 0
        assert '"stopped"' in child.log.read_text()
        assert (child.state / "client.db").is_file()
    assert hosting(cluster) == []


def test_an_address_at_which_no_ray_answers_is_named_within_seconds():
    with pytest.raises(PeerError, match="Connection refused"):
        require_answer(RaySettings(address="ray://127.0.0.1:1"))


def test_a_server_that_is_no_ray_is_named_within_seconds():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"ray://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(PeerError, match="what listens there is no Ray Client"):
            require_answer(RaySettings(address=address))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"cpus": 9.0}, "processors, and 3 hosts need 27"),
        # Together the nodes have enough, and none of them has it alone.
        ({"cpus": 1.25}, "room for 0 of 3 hosts"),
    ],
)
def test_a_cluster_with_too_little_room_is_refused_before_anything_starts(
    cluster, small, tmp_path, monkeypatch, options, problem
):
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    settings = small(**FEDNCF, secure_sum="clear", ray={"address": "ray", **options})
    with pytest.raises(PreflightError, match=problem):
        trained(settings, tmp_path)
    assert hosting(cluster) == []


@pytest.fixture
def command(tmp_path, monkeypatch, cluster):
    """Return a function that starts ``coterie run`` with hosts on the cluster, in a folder of its own."""
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    begun: list[Command] = []

    def start(name: str, hosts: int = HOSTS) -> Command:
        (tmp_path / name).mkdir()
        begun.append(Command(tmp_path / name, "--json", "--hosts", "ray", config=LONG.format(hosts=hosts)))
        return begun[-1]

    yield start
    for one in begun:
        one.close()


def actors(cluster: Cluster) -> list[int]:
    """Return the process ids of actors and client hosts below all raylets."""
    return [
        pid
        for node in cluster.worker_nodes
        for pid in descendants(node.all_processes["raylet"][0].process.pid)
        if b"NodeHost" in command_line(pid) or b"\0serve\0client\0" in command_line(pid)
    ]


def interrupted(run: Command) -> None:
    """Press Ctrl-C, which a terminal sends to all processes of a group, and check how the command ends."""
    os.killpg(run.pid, signal.SIGINT)
    assert run.wait() == 130, run.err
    assert run.envelope()["error"]["code"] == "interrupted"
    assert "Traceback" not in run.err
    assert gone(run.children, WAIT_S)


def test_ctrl_c_ends_all_hosts_on_the_cluster_whose_state_comes_back_and_the_command_with_status_130(
    cluster, command
):
    run = command("going")
    run.until(lambda: run.out + run.err and len(hosting(cluster)) == HOSTS, "host on each of three nodes")
    run.until_it_says("pass 1/")
    on_nodes = actors(cluster)
    assert len(on_nodes) == 2 * HOSTS
    interrupted(run)
    assert gone(on_nodes, WAIT_S), "actors and hosts ended"
    for host in range(HOSTS):
        (folder,) = run.run.rglob(f"host-{host}")
        assert '"stopped"' in (folder / "log.jsonl").read_text().splitlines()[-1]
        assert (folder / "state" / "client.db").is_file()


class LosesANode:
    """Kills the node of a client host, without a word to Ray, when a run has come to an epoch."""

    def __init__(self, cluster: Cluster, at: int) -> None:
        self._cluster, self._at = cluster, at
        self.changes: list[tuple[str, str]] = []
        self.orphans: list[int] = []

    def __call__(self, event: Any) -> None:
        if event.HasField("party"):
            self.changes.append((event.party.party, event.party.change))
        if not self.orphans and event.state.epoch >= self._at:
            node = hosting(self._cluster)[0]
            (raylet,) = node.all_processes["raylet"]
            # Parents first, as a machine takes all of its processes at once: none tells the launcher of another's end.
            self.orphans = descendants(raylet.process.pid)
            self._cluster.remove_node(node, allow_graceful=False)
            for pid in self.orphans:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@pytest.fixture
def losing(cluster: Cluster) -> Iterator[LosesANode]:
    """Lose one node, where as many are left as there are hosts; none of its processes is left behind."""
    while len(cluster.worker_nodes) <= HOSTS:
        started(cluster, num_cpus=1)
    cluster.wait_for_nodes(timeout=300)
    loses = LosesANode(cluster, 1)
    yield loses
    assert gone(loses.orphans, WAIT_S), "the host's process ended after its node"


@pytest.mark.parametrize(
    "secure_sum", ["clear", pytest.param("masked", marks=pytest.mark.full("loses another node"))]
)
def test_a_host_whose_node_is_lost_goes_on_from_its_state_on_another_node(
    cluster, small, tmp_path, monkeypatch, losing, secure_sum
):
    # This machine is part of the cluster.
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    # Under masks nothing is summed without the host: a round that is under way is abandoned, and formed again.
    rounds = {"rounds": {**FEDNCF["rounds"], "step_timeout_s": 30}}
    ray = {"address": "ray", "state": str(tmp_path / "shared")}
    settings = small(**FEDNCF | rounds, secure_sum=secure_sum, ray=ray)
    finished, federation = trained(settings, tmp_path / "run", losing)
    # A sum that the node took with it may have been abandoned: figures are then others than without the loss.
    ended, undisturbed = figures(finished.known), figures(alone(settings))
    assert [(one["epoch"], one["users"]) for one in ended] == [
        (one["epoch"], one["users"]) for one in undisturbed
    ]
    ((_, party, _),) = federation.restarted
    change = "was ended by the loss of its node, and was started again"
    assert (party, change) in [(one["party"], one["change"]) for one in finished.known["parties"]]
    assert finished.accounts[party]["restarted"] == 1


@pytest.mark.full("waits until a run gives up")
def test_a_masked_run_that_loses_a_host_of_every_group_without_its_state_fails_by_name_and_may_be_resumed(
    cluster, small, tmp_path, monkeypatch, losing
):
    # This machine is part of the cluster.
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    changes = {
        "rounds": {**FEDNCF["rounds"], "step_timeout_s": 5},
        "federation": {"hosts": HOSTS, "give_up_s": 20},
    }
    settings = small(**FEDNCF | changes, secure_sum="masked", ray={"address": "ray"})
    # The run may be over before Ray has found out that the node is gone.
    finished, _ = trained(settings, tmp_path, losing)
    assert losing.orphans, "a node was lost"
    assert finished.known["phase"] == "failed"
    reason = finished.known["reason"]
    assert reason.startswith("no sum was formed for 20 s; ")
    # Not the users of the others are too few, but the members.
    assert "1 of 3 members is missing, and masks bear the loss of 0 of a member's 2 neighbours" in reason
    assert re.search(r"; missing: client/host-\d$", reason)
    assert finished.known["resumable"]
    assert hosting(cluster) == []
