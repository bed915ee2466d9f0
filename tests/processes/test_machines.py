"""A federation across machines: who joined by an invitation trains as everybody does."""

import asyncio
import contextlib
import socket

import pytest

import coterie as ct
from coterie.errors import ConfigError
from coterie.studies.in_process import train_in_process
from coterie.studies.run_data import load, make_feed

from .machines import Machines

FEDNCF = {
    "system": "fedncf",
    "secure_sum": "masked",
    "split": {"kind": "leave-last-out"},
    "data": {"synthetic": {"users": 60, "items": 80, "interactions": 1500}},
    "rounds": {"cohort": 20, "group": 20, "passes": 4, "evaluate_every": 2},
    "federation": {"hosts": 3, "owners": 1},
}
pytestmark = pytest.mark.xdist_group("machines")

HAS_IPV6 = False
with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as probe:
    probe.bind(("::1", 0))
    HAS_IPV6 = True
NAMES = ["cos", "owner-0", "host-0", "host-1", "host-2"]


@pytest.fixture(scope="module")
def alone(small):
    """The same settings trained in one process."""
    settings = small(**FEDNCF)
    feed = make_feed(settings, load(settings), 0)
    return train_in_process(settings, feed, run_id="test", seed=0, see=lambda event: None).known


def same_numbers(report, known):
    """Whether a report has the numbers of a run in one process."""
    found = [(one.epoch, one.metrics) for one in report.history]
    assert found == [(one["epoch"], one["metrics"]) for one in known["history"]]
    assert len(found) > 2
    return True


def test_parties_that_joined_by_invitations_come_to_the_numbers_of_one_process(small, alone, tmp_path):
    hosts = {name: f"127.0.0.{number}" for number, name in enumerate(["thirdparty", *NAMES], 2)}
    machines = Machines(small(**FEDNCF), tmp_path, NAMES, hosts=hosts)
    assert same_numbers(machines.run(), alone)
    for name in NAMES:
        # The key was made there and is nowhere else.
        key = (tmp_path / "machines" / name / "state" / "tls" / "key.pem").read_bytes()
        others = [path for path in tmp_path.rglob("*") if path.is_file() and path.read_bytes() == key]
        assert len(others) == 1


def test_python_carries_out_the_run_of_a_federation_that_stands(small, alone, tmp_path):
    machines = Machines(small(**FEDNCF), tmp_path, NAMES)
    try:
        machines.join()
        connection = ct.connect(machines.operator / "config.toml", output=tmp_path / "reports")
        assert (connection.settings.system, connection.settings.secure_sum) == ("fedncf", "masked")
        with pytest.raises(ConfigError, match=r"secure_sum = 'clear': the prepared run .* has 'masked'"):
            connection.run(ct.FedNCF(secure_sum="clear"))
        with pytest.raises(ConfigError, match=r"fedncf\.model = 'mlp': the prepared run .* has 'gmf'"):
            connection.run(ct.FedNCF(model="mlp"))
        other = ct.load(synthetic={"users": 30, "items": 40, "interactions": 300}).split("leave-last-out")
        with pytest.raises(ConfigError, match="expected the same"):
            connection.run(split=other)
        run = connection.run(ct.FedNCF(model="gmf", secure_sum="masked"))
    finally:
        asyncio.run(machines.stop())
    assert same_numbers(run.report.content, alone)
    assert run.folder == tmp_path / "reports"
    assert run.report.path.is_file()
    assert run.metrics["row"][0] == run.report.content.label


@pytest.mark.skipif(not HAS_IPV6, reason="this machine has no IPv6")
async def test_everybody_may_come_back_at_another_address_and_the_run_is_the_same(small, alone, tmp_path):
    """From IPv4 to IPv6, killed while two hosts of three have joined: they keep their places."""
    machines = Machines(small(**FEDNCF), tmp_path, NAMES, invitations=False)
    late = "host-2"
    try:
        machines.join(late)
        operating = asyncio.create_task(machines.operate())
        for name in ("host-0", "host-1"):
            await machines.logs(name, "joined")
        operating.cancel()
        await asyncio.gather(operating, return_exceptions=True)
        told = machines.move("[::1]", late)
        machines.start(late, *machines.told(late, told))
        assert same_numbers(await machines.operate(*told), alone)
    finally:
        await machines.stop()
