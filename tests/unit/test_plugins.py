"""Systems of other distributions: a bad one is named with its distribution, and all others go on working."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coterie.systems import registry
from coterie.systems.registry import discover, systems

from ..plugins import BAD, install, install_bad, install_example

OURS = tuple(systems())
"""The systems of this distribution."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder in which Python finds distributions, and what it imports of them is forgotten afterwards."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_a_plug_in_stands_behind_our_systems_with_its_distribution(folder: Path) -> None:
    install_example(folder)
    found = discover()
    assert list(found.systems) == [*OURS, "popular"]
    assert found.distributions["popular"] == "coterie-popular 1.0.0"
    assert {found.distributions[name] for name in OURS} == {registry.distribution_of("fcf")}
    assert found.failures == ()


@pytest.mark.parametrize("distribution", BAD)
def test_a_bad_plug_in_is_named_with_its_distribution_and_all_others_go_on(
    folder: Path, distribution: str
) -> None:
    install_example(folder)
    install_bad(folder, distribution)
    found = discover()
    (failure,) = found.failures
    name = BAD[distribution].name or distribution
    assert (failure.name, failure.distribution) == (name, f"zz-{distribution} 2.1")
    assert BAD[distribution].why in failure.why
    assert str(failure).startswith(f"system {name!r} of zz-{distribution} 2.1 is left out: ")
    assert list(found.systems) == [*OURS, "popular"]


def test_of_two_plug_ins_with_one_name_the_first_by_distribution_is_taken(folder: Path) -> None:
    for distribution in ("a-first", "b-second"):
        module = distribution.replace("-", "_")
        source = "from dataclasses import replace\nfrom coterie.systems.fcf import SYSTEM as FCF\n"
        (folder / f"{module}.py").write_text(f"{source}SYSTEM = replace(FCF, name='same', table='same')\n")
        install(folder, distribution, "1", f"same = {module}:SYSTEM")
    found = discover()
    assert found.distributions["same"] == "a-first 1"
    (failure,) = found.failures
    assert (failure.distribution, failure.why) == (
        "b-second 1",
        "the name 'same' is taken by FCF of a-first 1",
    )


def test_the_table_of_a_name_with_a_hyphen_can_be_a_key(folder: Path) -> None:
    source = "from dataclasses import replace\nfrom coterie.systems.fcf import SYSTEM as FCF\n"
    (folder / "two_words.py").write_text(f"{source}SYSTEM = replace(FCF, name='two-words', table='')\n")
    install(folder, "two-words", "1", "two-words = two_words:SYSTEM")
    assert discover().systems["two-words"].table == "two_words"


def coterie(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a folder whose distributions Python finds."""
    return subprocess.run(
        [sys.executable, "-P", "-m", "coterie", *arguments],
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(folder), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.fixture(scope="module")
def beside_all_bad(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the example, every bad plug-in, and one whose study cannot be loaded."""
    folder = tmp_path_factory.mktemp("distributions")
    install_example(folder)
    for distribution in BAD:
        install_bad(folder, distribution)
    package = folder / "unstudied"
    package.mkdir()
    source = "from dataclasses import replace\nfrom coterie.systems.fcf import SYSTEM as FCF\n"
    (package / "__init__.py").write_text(
        f"{source}SYSTEM = replace(FCF, name='unstudied', table='unstudied', study='unstudied.study')\n"
    )
    (package / "study.py").write_text("import numpies\n")
    install(folder, "zz-unstudied", "0.3", "unstudied = unstudied:SYSTEM")
    return folder


def result(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["result"]


def test_coterie_systems_prints_what_is_left_out_and_why(beside_all_bad: Path) -> None:
    told = result(coterie(beside_all_bad, "systems", "--json"))
    left_out = {one["distribution"]: one for one in told["left_out"]}
    assert set(left_out) == {f"zz-{distribution} 2.1" for distribution in BAD}
    for distribution, bad in BAD.items():
        assert bad.why in left_out[f"zz-{distribution} 2.1"]["why"]
    assert {one["system"] for one in told["systems"]} == {*OURS, "popular", "unstudied"}
    printed = coterie(beside_all_bad, "systems")
    assert "system 'broken' of zz-broken 2.1 is left out: it cannot be imported" in printed.stdout


def test_a_run_of_a_system_that_is_left_out_says_why_and_another_one_can_be_run(beside_all_bad: Path) -> None:
    (beside_all_bad / "run.toml").write_text("system = 'broken'\n[broken]\nfactors = 3\n")
    refused = coterie(beside_all_bad, "run", "run.toml")
    assert refused.returncode == 10
    why = "system 'broken' of zz-broken 2.1 is left out: it cannot be imported: No module named 'numpies'"
    assert why in refused.stderr
    assert "no such key" not in refused.stderr
    (beside_all_bad / "run.toml").write_text("system = 'popular'\n[popular]\ndamping = 1.0\n")
    told = result(coterie(beside_all_bad, "preflight", "run.toml", "--json"))
    found = [one for one in told["findings"] if one["check"] == "systems"]
    assert found[0]["status"] == "ok"
    assert found[0]["note"].endswith(", popular, unstudied")
    assert {one["status"] for one in found[1:]} == {"warn"}
    assert len(found) == 1 + len(BAD)
    assert any("zz-hidden 2.1" in one["problem"] for one in found)


def test_the_reference_of_keys_and_the_tables_of_papers_are_there_beside_bad_plug_ins(
    beside_all_bad: Path,
) -> None:
    page = coterie(beside_all_bad, "config", "reference").stdout
    assert "| `popular.min_touch` | integer, at least 1 | `3` |" in page
    assert "| `rounds.passes` | Popular | `1` | `60` |" in page
    assert "broken" not in page
    refused = coterie(beside_all_bad, "evaluate", "--table", "no-table", "--data", ".")
    assert refused.returncode in (2, 10)
    assert "drift" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_a_study_that_cannot_be_loaded_is_named_with_its_distribution(beside_all_bad: Path) -> None:
    asked = "from coterie.studies.study import studies, study_of; print(len(list(studies()))); study_of('unstudied')"
    done = subprocess.run(
        [sys.executable, "-c", asked],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(beside_all_bad)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert int(done.stdout) == len(OURS) + 1
    assert (
        "the study of system 'unstudied' of zz-unstudied 0.3 cannot be loaded: No module named 'numpies'"
        in done.stderr
    )
