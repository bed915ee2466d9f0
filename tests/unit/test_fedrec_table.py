"""The table of FedRec and FedRec++ over published folds: FedRec++ is FedMF, and what is done is taken over."""

import json
from pathlib import Path

import numpy as np
import pytest

from coterie.cli.main import invoke
from coterie.data.folds import FOLDS

USERS, ITEMS, EACH = 66, 40, 15


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder like that of MovieLens 100K with folds, whose users rate by two tastes."""
    rng = np.random.default_rng(0)
    lines = []
    for user in range(USERS):
        for item in rng.permutation(ITEMS)[:EACH]:
            rating = np.clip(3 + 1.5 * (-1) ** (user + item) + rng.normal(0, 0.5), 1, 5)
            lines.append(f"{user + 1}\t{item + 1}\t{round(rating)}\t{len(lines)}")
    data = tmp_path / "ml-100k"
    data.mkdir()
    (data / "u.data").write_text("\n".join(lines) + "\n")
    for fold in range(1, FOLDS + 1):
        held = set(lines[fold - 1 :: FOLDS])
        (data / f"u{fold}.test").write_text("\n".join(sorted(held)) + "\n")
        (data / f"u{fold}.base").write_text("\n".join(line for line in lines if line not in held) + "\n")
    return data


def test_fedrec_pp_is_fedmf_in_every_fold_and_settings_are_chosen_by_validation(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["evaluate", "--table", "fedrec", "--seeds", "0,1", "--json"]
    arguments += ["--data", str(folder), "--out", str(tmp_path / "out"), "--set", "rounds.passes=10"]
    assert invoke(arguments) == 0, capsys.readouterr().err
    path = Path(json.loads(capsys.readouterr().out)["result"]["path"])
    rows = json.loads(path.read_text())["rows"]
    cells = {(one["row"], one["seed"]): one for one in rows}
    for seed in (0, 1):
        plain, denoised = cells["fedmf", seed], cells["fedrec++", seed]
        assert denoised["metrics"] == plain["metrics"]
        assert denoised["facts"]["secure_sum"] == "denoised"
        assert denoised["facts"]["withdrawn"] == denoised["facts"]["abandoned"] == 0
        assert denoised["facts"]["chosen"] == plain["facts"]["chosen"]
        assert cells["fedrec-average", seed]["metrics"] != plain["metrics"]
        trials = plain["facts"]["trials"]
        best = min(trials, key=lambda one: one["validation_rmse"])
        assert best["options"] == plain["facts"]["chosen"]
        assert plain["metrics"]["validation_rmse"] == best["validation_rmse"]
    assert cells["fedmf", 0]["metrics"] != cells["fedmf", 1]["metrics"]
    assert invoke([*arguments, "--resume"]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if ", seed " in line]
    assert lines
    assert all("taken over" in line for line in lines)


def test_data_without_folds_do_not_suit_the_table(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in folder.glob("u?.*"):
        file.unlink()
    assert invoke(["evaluate", "--table", "fedrec", "--data", str(folder), "--out", str(tmp_path)]) != 0
    assert "has no published hold-out" in capsys.readouterr().err
