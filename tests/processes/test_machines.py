"""A federation across machines: who joined by an invitation trains as everybody does."""

import pytest

from coterie.launch.feed import load, make_feed
from coterie.launch.in_process import train_in_process

from .machines import Machines

FEDNCF = {
    "system": "fedncf",
    "secure_sum": "masked",
    "split": {"kind": "leave-last-out"},
    "data": {"synthetic": {"users": 60, "items": 80, "interactions": 1500}},
    "rounds": {"cohort": 20, "group": 20, "passes": 4, "evaluate_every": 2},
    "federation": {"hosts": 3, "owners": 1},
}
NAMES = ["cos", "owner-0", "host-0", "host-1", "host-2"]


@pytest.fixture(scope="module")
def alone(small):
    """What one process makes of the same settings."""
    settings = small(**FEDNCF)
    feed = make_feed(settings, load(settings), 0)
    return train_in_process(settings, feed, run_id="test", seed=0, see=lambda event: None).known


def same_numbers(report, known):
    """Whether a report has the numbers of a run in one process."""
    found = [(one["epoch"], one["metrics"]) for one in report["history"]]
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
