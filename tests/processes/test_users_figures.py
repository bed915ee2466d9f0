"""Users' figures that a run keeps: the same over services as in one process, with the means of the report."""

import csv
import json
from collections import defaultdict

import pytest

from coterie.cli.main import invoke

from .command import Command

CONFIG = """
name = "command"
system = "fedncf"
secure_sum = "masked"
reference = false
data.synthetic = {users = 50, items = 60, interactions = 1200}
[rounds]
cohort = 25
group = 25
passes = 4
evaluate_every = 2
min_cohort = 10
min_sum = 10
[federation]
hosts = 2
per_user_metrics = true
"""


def users(path):
    found = defaultdict(dict)
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            found[row["metric"]][row["user"]] = float(row["value"])
    return dict(found)


def test_users_figures_are_those_of_the_chosen_version_over_services_as_in_process(tmp_path, monkeypatch):
    (tmp_path / "alone").mkdir()
    command = Command(tmp_path, "--json", config=CONFIG)
    try:
        assert command.wait() == 0, command.err
        over_services, report = users(command.run / "users.csv"), command.report()
    finally:
        command.close()
    assert (command.run / "users.csv").stat().st_mode & 0o077 == 0
    monkeypatch.chdir(tmp_path / "alone")
    (tmp_path / "alone" / "run.toml").write_text(CONFIG)
    assert invoke(["run", "run.toml", "--in-process"]) == 0
    (folder,) = (tmp_path / "alone" / "runs").iterdir()
    assert over_services == users(folder / "users.csv")
    assert json.loads((folder / "report.json").read_text())["chosen"] == report["chosen"]
    for metric, mean in report["chosen"]["metrics"].items():
        values = over_services[metric].values()
        assert len(values) == report["chosen"]["users"][metric] == 50
        # Sums of a federation are of rounded codes.
        assert sum(values) / len(values) == pytest.approx(mean, abs=2e-3), metric
