"""A host that shares the run's key trains on no version older than the last one that it trained on."""

import pytest
from coterie_client.learner import HighestVersion

from coterie.errors import CertificateError
from coterie.secure_sum.protocol import Declined


def test_the_same_version_or_a_later_one_is_taken_and_an_earlier_one_refused(tmp_path):
    highest = HighestVersion(tmp_path / "trained.json", "run")
    for made_in in (0, 0, 3, 3, 7):
        highest.raise_to(made_in)
    with pytest.raises(
        Declined, match="model that round 3 made; this host trained on that of round 7 already"
    ):
        highest.raise_to(3)
    with pytest.raises(Declined, match="round 0 made"):
        highest.raise_to(0)


def test_it_is_remembered_over_a_restart_and_counts_for_its_run_only(tmp_path):
    path = tmp_path / "trained.json"
    HighestVersion(path, "run").raise_to(5)
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(Declined, match="round 4 made"):
        HighestVersion(path, "run").raise_to(4)
    HighestVersion(path, "another").raise_to(1)


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b'{"run": "run", "round": "x"}'])
def test_a_damaged_file_is_named(tmp_path, content):
    path = tmp_path / "trained.json"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(CertificateError, match=r"trained\.json is damaged"):
        HighestVersion(path, "run")
