"""A system of another distribution: installed from its wheel beside Coterie's, it trains over real services.

Nothing of Coterie knows it.  Bad plug-ins are installed beside it: the command and the services work all the same.
"""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.config.run import RunSettings
from coterie.privacy.declarations import KINDS
from coterie.studies.run_data import Feed, load, make_feed
from coterie.systems.shared.declared_rounds import declared_in_rounds

from ..plugins import EXAMPLE, install_bad
from .command import Command

pytestmark = pytest.mark.xdist_group("plugin")
"""One environment and one pair of runs for all: a worker each would make them four times."""

ROOT = EXAMPLE.parents[1]
DATA = {"users": 60, "items": 80, "interactions": 1500}
DAMPING, MIN_TOUCH = 1.0, 15
CONFIG = f"""
name = "plugin"
system = "popular"
[data.synthetic]
users = {DATA["users"]}
items = {DATA["items"]}
interactions = {DATA["interactions"]}
[popular]
damping = {DAMPING}
min_touch = {MIN_TOUCH}
[rounds]
cohort = 20
group = 20
[federation]
hosts = 3
"""
LEFT_OUT = ("broken", "their-name", "hidden")


@dataclass(frozen=True)
class Environment:
    """A virtual environment with Coterie and the plug-in, installed from wheels."""

    python: Path

    def coterie(self, folder: Path, *arguments: str) -> str:
        """Run a command that ends by itself, and return what it prints."""
        done = subprocess.run(
            [self.python, "-P", "-m", "coterie", *arguments],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def result(self, folder: Path, *arguments: str) -> Any:
        """Return what a command says to programs."""
        return json.loads(self.coterie(folder, *arguments, "--json"))["result"]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    folder = tmp_path_factory.mktemp("plugin")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = [
        *pip,
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        folder / "wheels",
        ROOT,
        EXAMPLE,
    ]
    subprocess.run(build, check=True, timeout=300)
    venv.create(folder / "env", with_pip=False)
    python = folder / "env" / "bin" / "python"
    wheels = sorted((folder / "wheels").glob("*.whl"))
    assert [wheel.name.partition("-")[0] for wheel in wheels] == ["coterie", "coterie_popular"]
    subprocess.run(
        [*pip, "--python", python, "install", "--no-deps", "--no-index", *wheels], check=True, timeout=300
    )
    (site,) = (folder / "env").glob("lib/python*/site-packages")
    # The packages that Coterie needs are those of this environment, found behind the new one's own: no test needs a
    # network.  Lines of .pth files behind it do not count, so that an editable Coterie there is not found.
    (site / "behind.pth").write_text(sysconfig.get_path("purelib") + "\n")
    for distribution in LEFT_OUT:
        install_bad(site, distribution)
    return Environment(python)


@dataclass(frozen=True)
class Trained:
    """A run that has ended."""

    report: dict[str, Any]
    folder: Path
    printed: str
    suggested: list[dict[str, Any]]


@pytest.fixture(scope="module")
def trained(
    environment: Environment, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Trained]]:
    """Return one run in clear and one under a masked sum, trained at the same time."""
    asked = {
        "clear": ("federation.transcripts=true", "federation.attacks=true"),
        "masked": ("secure_sum=masked",),
    }
    runs = {
        secure_sum: Command(
            tmp_path_factory.mktemp(secure_sum),
            *(word for one in sets for word in ("--set", one)),
            config=CONFIG,
            python=environment.python,
        )
        for secure_sum, sets in asked.items()
    }
    try:
        made = {}
        for secure_sum, run in runs.items():
            assert run.wait() == 0, run.err
            found = environment.result(run.folder, "recommend", "--user", "u3", "--k", "20")
            made[secure_sum] = Trained(run.report(), run.run, run.out, found["items"])
        yield made
    finally:
        for run in runs.values():
            run.close()


def test_it_is_installed_from_its_wheel_and_coterie_too(environment: Environment) -> None:
    asked = "import coterie as a, coterie_cos as b, coterie_popular as c; print(a.__file__, b.__file__, c.__file__)"
    done = subprocess.run([environment.python, "-P", "-c", asked], capture_output=True, text=True, check=True)
    for file in done.stdout.split():
        assert Path(file).is_relative_to(environment.python.parents[1])


def test_coterie_systems_lists_it_under_its_sums_and_names_what_is_left_out(
    environment: Environment, tmp_path: Path
) -> None:
    told = environment.result(tmp_path, "systems")
    allowed = [one["secure_sum"] for one in told["systems"] if one["system"] == "popular" and one["allowed"]]
    assert allowed == ["clear", "masked", "encrypted", "shared-key"]
    assert {one["distribution"] for one in told["left_out"]} == {f"zz-{name} 2.1" for name in LEFT_OUT}
    assert "popular" in environment.coterie(tmp_path, "systems")


def test_the_reference_of_keys_has_its_table(environment: Environment, tmp_path: Path) -> None:
    page = environment.coterie(tmp_path, "config", "reference")
    assert "| `[popular]` | table | `{}` | Settings of Popular. |" in page
    assert "| `popular.damping` | number, at least 0, at most 1 | `0.5` | Exponent by which" in page


def test_a_value_out_of_its_range_is_refused_by_name(environment: Environment, tmp_path: Path) -> None:
    run = Command(tmp_path, "--set", "popular.damping=2", config=CONFIG, python=environment.python)
    assert run.wait() == 10
    assert "popular.damping = 2" in run.err
    assert "expected number, at least 0, at most 1" in run.err
    run.close()


def test_it_trains_over_services_and_a_masked_sum_changes_no_number(trained: dict[str, Trained]) -> None:
    clear, masked = trained["clear"].report, trained["masked"].report
    same = ("epoch", "version", "users", "metrics")
    histories = [[{key: one[key] for key in same} for one in each["history"]] for each in (clear, masked)]
    assert histories[0] == histories[1]
    assert clear["chosen"] == masked["chosen"]
    assert histories[0][0]["metrics"]["hit_ratio@10"] == 0 < histories[0][-1]["metrics"]["hit_ratio@10"]
    assert (clear["abandoned"], masked["abandoned"]) == (0, 0)
    assert {one["members"] for one in masked["rounds"]} == {3}
    assert trained["clear"].suggested == trained["masked"].suggested


def test_what_it_recommends_is_what_its_settings_say(trained: dict[str, Trained]) -> None:
    # The same data and the same division, by a system of ours.
    settings = RunSettings.model_validate({"system": "fedncf", "data": {"synthetic": DATA}})
    feed: Feed = make_feed(settings, load(settings), 0)
    data, own = feed.dataset, feed.split.train
    user, item = data.user[own], data.item[own]
    each = np.bincount(user, minlength=len(data.users))[user] ** -DAMPING
    expected = np.bincount(item, each, len(data.items))
    rare = np.bincount(item, minlength=len(data.items)) < MIN_TOUCH
    assert rare.any()
    assert not rare.all()
    expected[rare] = 0
    seen = set(item[user == data.users.index("u3")].tolist())
    suggested = trained["masked"].suggested
    places = [data.items.index(one["item"]) for one in suggested]
    # Each of at most 60 users was rounded by less than a step.
    np.testing.assert_allclose([one["score"] for one in suggested], expected[places], atol=60 / (2**15 - 1))
    others = [place for place in range(len(expected)) if place not in seen and place not in places]
    assert min(one["score"] for one in suggested) >= expected[others].max() - 60 / (2**15 - 1)


def test_it_serves_a_person_who_never_took_part_as_its_users(
    environment: Environment, trained: dict[str, Trained], tmp_path: Path
) -> None:
    suggested = trained["clear"].suggested
    (tmp_path / "own.csv").write_text(f"item\n{suggested[0]['item']}\n")
    asked = ("--new-user", "own.csv", "--run", str(trained["clear"].folder), "--k", "60")
    found = environment.result(tmp_path, "recommend", *asked)
    assert found["system"] == "Popular"
    scores = {one["item"]: one["score"] for one in found["items"]}
    assert {one["item"]: one["score"] for one in suggested[1:]}.items() <= scores.items()
    assert suggested[0]["item"] not in scores


@pytest.mark.parametrize("secure_sum", ["clear", "masked"])
def test_the_report_names_it_its_version_its_settings_and_its_rows(
    trained: dict[str, Trained], secure_sum: str
) -> None:
    one = trained[secure_sum]
    assert (one.report["system"], one.report["label"]) == ("popular", "Popular")
    assert one.report["versions"]["coterie-popular"] == "1.0.0"
    assert one.report["settings"]["popular"] == {"damping": DAMPING, "min_touch": MIN_TOUCH, "bits": 16}
    assert {"popularity", "random"} <= set(one.report["reference"])
    assert "Popular" in one.printed
    assert "Popular" in (one.folder / "report.html").read_text()


def test_the_report_says_who_may_see_what_as_the_plug_in_declares_it(trained: dict[str, Trained]) -> None:
    one = trained["masked"]
    declared = declared_in_rounds("hosts", "masked")
    told = one.report["visibility"]["cos/cos"]
    assert set(told) == set(KINDS)
    for kind, (may_see, _) in declared.items():
        allowed = "cos" in may_see and may_see["cos"].allowed
        assert told[kind] == ("may see" if allowed else "may not see"), kind
    assert told["host_update"] == "may not see"
    assert "may not see" in (one.folder / "report.html").read_text()


def test_what_was_seen_is_what_may_be_seen_and_the_attacks_of_the_plug_in_are_run(
    trained: dict[str, Trained],
) -> None:
    one = trained["clear"]
    declared = declared_in_rounds("hosts", "clear")
    for party, told in one.report["visibility"].items():
        for kind in (kind for kind, word in told.items() if word == "seen"):
            assert party.partition("/")[0] in declared[kind][0], (party, kind)
    assert one.report["visibility"]["cos/cos"]["host_update"] == "seen"
    found = one.report["attacks"]["disaggregate"]
    # The contributions of single hosts were there to be seen.
    assert found["rounds"] == 9
    # However users are spread over hosts and groups, popularity tells as much, and the sums tell more.
    assert 0.6 < found["popularity_auc"] < found["auc"] - 0.02


def test_where_the_plug_in_is_not_installed_a_run_of_it_is_refused_by_name(
    trained: dict[str, Trained],
) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-P",
            "-m",
            "coterie",
            "recommend",
            "--user",
            "u3",
            "--run",
            trained["clear"].folder,
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode != 0
    assert "no system 'popular'; there are drift, " in done.stderr
