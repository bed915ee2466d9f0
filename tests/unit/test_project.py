"""Projects that ``coterie new`` writes: each system's can be run as it is, here and in containers."""

from pathlib import Path

import pytest
import yaml

from coterie.cli.main import invoke
from coterie.config.load import load
from coterie.config.run import RunSettings
from coterie.errors import ConfigError, PreflightError
from coterie.launch.bootstrap import bootstrap
from coterie.launch.examples import example, example_names
from coterie.launch.project import new_project
from coterie.systems.registry import systems

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("system", sorted(systems()))
def test_the_file_of_a_project_is_a_run_whose_parties_its_compose_file_starts(
    system: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "my-shop"
    made = new_project(folder, system)
    assert all(path.is_file() for path in made)
    monkeypatch.chdir(folder)
    settings = load(RunSettings, Path("run.toml")).settings
    assert (settings.name, settings.system) == ("my-shop", system)
    assert settings.secure_sum == ("clear" if system == "drift" else "masked")
    quick = settings.model_copy(update={"reference": False})
    bootstrap(quick, tmp_path / "laid", "test")
    parties = {path.name for path in (tmp_path / "laid").iterdir()}
    compose = yaml.safe_load((folder / "compose.yaml").read_text())
    assert set(compose["services"]) - {"bootstrap"} == parties
    assert set(compose["volumes"]) == parties | {"report"}
    mounted = {one.partition(":")[2] for one in compose["services"]["bootstrap"]["volumes"][2:]}
    assert mounted == {f"/federation/{party}" for party in parties}
    for name, service in compose["services"].items():
        assert set(service.get("depends_on", {})) <= set(compose["services"]), name
        assert service["read_only"] is True
    assert compose["services"]["host-0"]["image"].startswith("coterie-client:")


def test_the_images_are_those_of_the_compose_files_of_the_clone(tmp_path: Path) -> None:
    new_project(tmp_path / "a", "fedncf")
    used = {
        service["image"]
        for service in yaml.safe_load((tmp_path / "a" / "compose.yaml").read_text())["services"].values()
    }
    known = (ROOT / "deploy" / "services.yml").read_text() + (
        ROOT / "deploy" / "docker-compose.data.yml"
    ).read_text()
    assert all(f"image: {one}\n" in known for one in used)


def test_a_project_is_never_written_over_files_or_under_a_name_that_runs_cannot_have(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "notes").write_text("mine")
    with pytest.raises(PreflightError, match="holds 'notes'"):
        new_project(tmp_path / "there", "fedncf")
    assert [one.name for one in (tmp_path / "there").iterdir()] == ["notes"]
    for name in ("My-Shop", "-a", "a_b", "a" * 40):
        with pytest.raises(ConfigError, match="it names the runs"):
            new_project(tmp_path / name, "fedncf")
    with pytest.raises(ConfigError, match="there is no system 'fedncff'") as refused:
        new_project(tmp_path / "b", "fedncff")
    assert refused.value.hint == "did you mean 'fedncf'?"
    with pytest.raises(PreflightError, match="cannot write into"):
        new_project(tmp_path / "there" / "notes" / "c", "fedncf")


def test_an_example_is_found_without_a_clone_and_a_missing_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert example(Path("examples/first.toml")).read_text() == (ROOT / "examples" / "first.toml").read_text()
    assert example(Path("mine.toml")) == Path("mine.toml")
    with pytest.raises(ConfigError, match=r"no file examples/nothing.toml, and no example"):
        example(Path("examples/nothing.toml"))
    assert {"first", "drift", "fedncf-masked"} <= set(example_names())
    assert invoke(["run"]) == 2
    assert invoke(["run", "--demo", "mine.toml"]) == 2
    assert "expected FILE, or --demo" in capsys.readouterr().err
