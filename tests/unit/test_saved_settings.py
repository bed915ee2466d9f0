"""Settings that are kept beside the stores of a run."""

from pathlib import Path

import pytest

from coterie.config.run import RunSettings
from coterie.data import SyntheticSpec, generate, random
from coterie.errors import PreflightError
from coterie.studies.run_data import load, make_feed
from coterie.studies.saved_settings import SAVED_SETTINGS, save_settings


def test_saved_settings_read_the_same_files_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, elsewhere = tmp_path / "there", tmp_path / "elsewhere"
    there.mkdir()
    elsewhere.mkdir()
    monkeypatch.chdir(there)
    data = generate(SyntheticSpec(users=20, items=30, interactions=200, genres=2, seed=0))
    Path("ratings.csv").write_text(
        "user,item,rating\n"
        + "".join(
            f"{data.users[user]},{data.items[item]},{rating:g}\n"
            for user, item, rating in zip(data.user, data.item, data.rating, strict=True)
        )
    )
    given = {
        "system": "fcf",
        "output": "runs",
        "data": {"path": "ratings.csv"},
        "split": {"kind": "file", "path": "split.csv"},
        "mvmf": {"genome": "genome"},
    }
    settings = RunSettings.model_validate(given)
    dataset = load(settings)
    random(dataset, seed=7).write(Path("split.csv"), dataset)
    before = make_feed(settings, dataset, 0)
    save_settings(settings, Path("runs/one"))

    monkeypatch.chdir(elsewhere)
    saved = RunSettings.model_validate_json((there / "runs" / "one" / SAVED_SETTINGS).read_text())
    after = make_feed(saved, load(saved), 0)
    assert after.split.sha256(after.dataset) == before.split.sha256(before.dataset)
    assert (saved.output, saved.mvmf.genome) == (there / "runs", there / "genome")


def test_a_folder_that_cannot_be_written_is_refused() -> None:
    with pytest.raises(PreflightError, match="cannot write into /dev/null/run"):
        save_settings(RunSettings(), Path("/dev/null/run"))
