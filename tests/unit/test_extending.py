"""The plug-in of docs/extending.md, trained in one process; every allowed combination for a round."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.config.run import EncryptionSettings, RunSettings
from coterie.data import Dataset
from coterie.secure_sum.registry import NEEDS, SUMS
from coterie.studies.in_process import InProcess, train_plan
from coterie.studies.run_data import Feed, load, make_feed
from coterie.systems import registry
from coterie.systems.drift.sequential import run_in_process
from coterie.systems.drift.settings import DriftSettings
from coterie.systems.drift.study.references import in_time_order
from coterie.systems.registry import combination, combinations, system_named, systems
from coterie.wire.v1.orchestrator_pb2 import CohortKind, RoundsPlan, RunPlan

from ..plugins import EXAMPLE, install_example

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "extending.md"
CHANGES = {"fcf": {"factors": 8}, "ials": {"factors": 4}, "fpl": {"factors": 8}}
"""Settings for rounds over few users: sums over too few users for the number of factors are not decrypted."""
SHORT = EncryptionSettings(bits=1024, comparison=True)
"""A short key: how sums are put together hangs on no length, and `test_paillier_vector.py` has one of 3,072 bits."""


@pytest.fixture(scope="module")
def feed() -> Feed:
    settings = RunSettings.model_validate(
        {
            "system": "fedncf",
            "data": {"synthetic": {"users": 24, "items": 40, "interactions": 240}},
            "federation": {"hosts": 3},
        }
    )
    return make_feed(settings, load(settings), 0)


@pytest.fixture
def popular(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put the plug-in on the path, with the metadata that its wheel has: it is found by its entry point."""
    install_example(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    registry._discovered.cache_clear()
    yield
    registry._discovered.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "coterie_popular"]:
        del sys.modules[name]


def settings_of(system: str, **changes: Any) -> str:
    """Return settings as a plan carries them: those of a run that gives none, but for `CHANGES` and others."""
    table = systems()[system].table
    run = RunSettings.model_validate({"system": system, table: {**CHANGES.get(system, {}), **changes}})
    return run.own.for_plan(run)


def one_pass(
    system: str, secure_sum: str, feed: Feed, *, users: bool = False, settings: str = ""
) -> InProcess:
    rounds = RoundsPlan(
        cohorts=CohortKind.COHORT_KIND_ALL,
        cohort=24,
        group=24,
        beacon=bytes(32),
        party_per_user=users,
        min_cohort=20,
        min_sum=4 if secure_sum == "denoised" else 20,
        experiment=True,
        passes=1,
        evaluate_every=1,
        choose_by="validation_ndcg@10",
    )
    plan = RunPlan(
        run_id="a-run",
        system=system,
        form="users" if users else "hosts",
        secure_sum=secure_sum,
        settings=settings or settings_of(system),
        rounds=rounds,
    )
    return train_plan(plan, feed, hosts=3, see=lambda event: None, encryption=SHORT)


@pytest.mark.parametrize("users", [False, True])
@pytest.mark.parametrize("secure_sum", [name for name in SUMS if name not in NEEDS])
@pytest.mark.usefixtures("popular")
def test_the_example_counts_what_there_is_under_every_sum_that_it_offers(
    secure_sum: str, users: bool, feed: Feed
) -> None:
    assert combination("popular", secure_sum).allowed
    own = system_named("popular").settings(damping=0.0, min_touch=1).to_json()
    made = one_pass("popular", secure_sum, feed, users=users, settings=own)
    data: Dataset = feed.dataset
    expected = np.bincount(data.item[feed.split.train], minlength=len(data.items))
    before, after = made.known["history"]
    # Before the first round all scores are equal, which counts against them.
    assert before["metrics"]["hit_ratio@10"] == 0 < after["metrics"]["hit_ratio@10"]
    if secure_sum != "shared-key":  # whose server never has the arrays
        np.testing.assert_array_equal(made.trained.arrays["touched"], expected)
        # Without damping each user counts 1 for an item, which is not rounded.
        np.testing.assert_array_equal(made.trained.arrays["items"][:, 0], expected)
    best = made.hosts[0].recommend({"items": expected.astype(np.float32)[:, None]}, 0)
    assert int(np.argmax(best)) == int(np.argmax(expected))


@pytest.mark.usefixtures("popular")
def test_the_example_gives_the_same_numbers_under_every_sum_and_however_users_are_spread(feed: Feed) -> None:
    own = system_named("popular").settings().to_json()
    histories = [
        [
            one["metrics"]
            for one in one_pass("popular", secure_sum, feed, users=users, settings=own).known["history"]
        ]
        for secure_sum, users in (("clear", False), ("clear", True), ("masked", False))
    ]
    assert histories[0] == histories[1] == histories[2]


def blocks() -> dict[str, str]:
    """Return what the page shows, by the file that the line above each block links to."""
    link = r"\(\.\./(examples/plugin/[\w./]+)\)[^\n]*:\n\n```\w+\n(.*?)^```$"
    return dict(re.findall(link, PAGE.read_text(), re.MULTILINE | re.DOTALL))


def test_the_page_shows_the_files_of_the_example_as_they_are() -> None:
    shown = blocks()
    files = {path.relative_to(ROOT).as_posix() for path in EXAMPLE.glob("**/*") if path.is_file()}
    files = {path for path in files if path.endswith((".py", ".toml"))}
    assert set(shown) == files
    for path, found in shown.items():
        assert found == (ROOT / path).read_text(), path


@pytest.mark.parametrize("page", [PAGE, EXAMPLE / "README.md"], ids=lambda page: page.name)
def test_both_pages_install_coterie_from_the_clone_and_not_from_an_index(page: Path) -> None:
    commands = re.findall(r"^pip install (.*?)(?: +#.*)?$", page.read_text(), re.MULTILINE)
    assert commands == [". ./examples/plugin"]


def test_the_example_is_short() -> None:
    lines = [len(path.read_text().splitlines()) for path in EXAMPLE.glob("coterie_popular/*.py")]
    assert sum(lines) < 350


def cells() -> list[Any]:
    return [
        pytest.param(one.system, one.secure_sum, users, id=f"{one.system}-{one.secure_sum}{'-users' * users}")
        for one in combinations()
        if one.allowed and systems()[one.system].in_rounds
        # Noise is taken out of contributions of single users.
        for users in ((True,) if one.secure_sum == "denoised" else (False, True))
    ]


@pytest.mark.parametrize(("system", "secure_sum", "users"), cells())
def test_every_allowed_combination_runs(system: str, secure_sum: str, users: bool, feed: Feed) -> None:
    settings = settings_of(system, **({"samples": 1} if secure_sum == "denoised" else {}))
    known = one_pass(system, secure_sum, feed, users=users, settings=settings).known
    assert known["phase"] == "done"
    assert known["abandoned"] == 0
    assert known["version"] == 1
    assert {one["members"] for one in known["rounds"]} == {24 if users else 3}


def test_drift_in_clear_runs(feed: Feed) -> None:
    stream = in_time_order(feed, np.asarray(feed.split.train))
    users, items = len(feed.dataset.users), len(feed.dataset.items)
    Upsilon, Psi = run_in_process([stream], users, items, DriftSettings(dim=4), epochs=1, seed=0)
    assert np.isfinite(Upsilon).all()
    assert np.isfinite(Psi).all()


def test_every_system_and_sum_is_in_the_matrix() -> None:
    assert {(one.system, one.secure_sum) for one in combinations()} == {
        (system, secure_sum) for system in systems() for secure_sum in SUMS
    }


def test_what_does_not_go_together_says_why() -> None:
    noiseless = [one for one in combinations() if one.secure_sum == "denoised" and not one.allowed]
    assert {one.system for one in noiseless} == set(systems()) - {"fedmf"}
    assert all("add no noise" in one.why for one in noiseless)
    refused = [one for one in combinations() if not one.allowed and one not in noiseless]
    assert [(one.system, one.form, one.secure_sum) for one in refused] == [
        ("drift", "published", "masked"),
        ("drift", "published", "encrypted"),
        ("drift", "published", "shared-key"),
        ("drift", "shielded", "encrypted"),
        ("drift", "shielded", "shared-key"),
        ("ease", "", "shared-key"),
        ("fedidcf", "", "encrypted"),
        ("fedmvmf", "", "shared-key"),
    ]
    assert all("needs rounds" in one.why for one in refused[:3])
    assert all("in clear or masked" in one.why for one in refused[3:5])
    assert "the same model to the bit" in refused[5].why
    assert "need that for pseudo meta-latents" in refused[6].why
    assert "entered for clear, masked, encrypted only" in refused[7].why
    assert "no such system" in combination("sfpl", "clear").why
    assert "no such sum" in combination("fedncf", "shouted").why
