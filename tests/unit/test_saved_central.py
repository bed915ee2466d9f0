"""Central models in folders: saved, loaded, asked for scores, and refused where they are not whole."""

import hashlib
import json
import shutil
from importlib import util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import coterie as ct
from coterie.cli.main import invoke
from coterie.errors import ConfigError, CoterieError, DataError
from coterie.launch.model_folder import read_model
from coterie.serving.answers import ModelAnswers, ServedUser

from ..interactions import ratings

NAMES = {"user": "customer", "item": "sku", "rating": "stars", "time": "at", "name": "shop"}
IMPLICIT = pytest.mark.skipif(util.find_spec("implicit") is None, reason="needs the package implicit")


@pytest.fixture(scope="module")
def split() -> ct.DataSplit:
    return ct.load(ratings(), **NAMES).split("leave-last-out")


@pytest.fixture(scope="module")
def ease(split: ct.DataSplit) -> ct.FittedCentral:
    return ct.EASE(ridge=50.0).fit(split)


def own(split: ct.DataSplit, user: str) -> list[str]:
    """Return the training items of a user."""
    dataset = split.data.dataset
    at = dataset.users.index(user)
    return [dataset.items[one] for one in dataset.item[(dataset.user == at) & split.split.train]]


def refusal(call: Any, *arguments: Any, **keys: Any) -> str:
    with pytest.raises(CoterieError) as found:
        call(*arguments, **keys)
    return str(found.value)


@pytest.mark.parametrize("name", ["EASE", "ItemKNN", "iALS", "Popularity"])
def test_a_person_with_a_user_s_items_has_the_user_s_scores_and_recommendations(
    name: str, split: ct.DataSplit, tmp_path: Path
) -> None:
    fitted = getattr(ct, name)().fit(split)
    again = ct.load_model(fitted.save(tmp_path / "model"))
    history = own(split, "u4")
    # Both columns in the order of the data set.
    np.testing.assert_allclose(
        again.score(history, split.data.dataset.items), fitted.score(["u4"])[0], rtol=1e-6
    )
    assert again.recommend(history, 5)["item"].to_list() == fitted.recommend("u4", 5)["item"].to_list()


@pytest.mark.parametrize("name", ["GlobalMean", "ItemMean", "UserAndItemBiases", "BiasedMF"])
def test_a_model_of_ratings_takes_ratings_of_the_range_that_it_learned(
    name: str, split: ct.DataSplit, tmp_path: Path
) -> None:
    fitted = getattr(ct, name)().fit(split.data.split("random"))
    again = ct.load_model(fitted.save(tmp_path / "model"))
    assert again.rating_range == (1.0, 5.0)
    assert ((again.score({"i1": 5, "i2": 1.0}) > 0) & (again.score({"i1": 5, "i2": 1.0}) < 6.5)).all()
    assert "9; expected a number from 1 to 5" in refusal(again.score, {"i1": 9})
    assert "has no rating of an item that is known" in refusal(again.score, ["i1"])


@IMPLICIT
def test_a_model_without_a_place_for_newcomers_serves_vectors(split: ct.DataSplit, tmp_path: Path) -> None:
    fitted = ct.BPR(factors=8, epochs=5).fit(split)
    again = ct.load_model(fitted.save(tmp_path / "model"))
    vector = fitted.vectors(["u4"])[0]
    assert vector.shape == (again.vector_length,) == (9,)
    np.testing.assert_allclose(
        again.score(vector, split.data.dataset.items), fitted.score(["u4"])[0], rtol=1e-5, atol=1e-7
    )
    assert len(again.recommend(vector, 3)) == 3
    assert "no recommendations for people who were not in training" in refusal(again.recommend, ["i1"])
    assert "a vector of 2 values; expected 9" in refusal(again.score, np.zeros(2))
    assert "expected a vector of finite numbers" in refusal(again.score, np.array(["i1"]))
    assert "recommended to from a vector of 9 values" in again.card()


def test_a_model_that_scores_by_others_histories_is_not_saved(split: ct.DataSplit, tmp_path: Path) -> None:
    fitted = ct.UserKNN().fit(split)
    assert "its neighbours are those users, with their histories" in refusal(fitted.save, tmp_path / "model")
    assert not (tmp_path / "model").exists()
    assert "have no vector" in refusal(fitted.vectors, ["u1"])


def test_the_folder_holds_no_user(ease: ct.FittedCentral, split: ct.DataSplit, tmp_path: Path) -> None:
    folder = ease.save(tmp_path / "model")
    text = b"".join(file.read_bytes() for file in folder.iterdir() if file.suffix != ".safetensors")
    assert b'"u4"' not in text
    sizes = {array.shape for array in read_model(folder).arrays.values()}
    assert sizes == {(len(split.data.dataset.items),) * 2}


def test_the_card_says_data_split_hyper_parameters_and_figures(
    ease: ct.FittedCentral, tmp_path: Path
) -> None:
    folder = ease.save(tmp_path / "model")
    card = (folder / "card.md").read_text()
    assert card == ct.load_model(folder).card()
    for word in ("EASE, centralised", "shop", ease.split.sha256, "ridge 50", "their own items", "ndcg@10"):
        assert word in card
    assert ease.save(folder) == folder  # written over
    (folder / "thesis.tex").write_text("years of work")
    assert "thesis.tex" in refusal(ease.save, folder)


def test_any_flipped_bit_of_a_central_model_is_refused(ease: ct.FittedCentral, tmp_path: Path) -> None:
    whole = ease.save(tmp_path / "whole")
    for name in ("model.safetensors", "items.json", "model.json", "card.md"):
        folder = Path(shutil.copytree(whole, tmp_path / name))
        content = bytearray((folder / name).read_bytes())
        for at in (0, len(content) // 2, len(content) - 1):
            flipped = content.copy()
            flipped[at] ^= 1
            (folder / name).write_bytes(flipped)
            assert "is not the file that was saved" in refusal(ct.load_model, folder)
        (folder / name).unlink()
        with pytest.raises(DataError):
            ct.load_model(folder)
    assert invoke(["serve-model", str(tmp_path / "items.json"), "--json"]) == 20


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 3}, "holds a model of format 3; expected 1 or 2"),
        ({"kind": "plain"}, "of the kind 'plain'; expected 'central'"),
        ({"model": "eese-central"}, "did you mean 'ease-central'"),
        ({"model": "popularity", "hyperparameters": {}}, "arrays weights; expected counts"),
        ({"hyperparameters": {"ridge": -1.0}}, "expected more than 0"),
        ({"hyperparameters": None}, "holds no model of this version"),
        ({"ratings": 3}, "holds no model of this version"),
    ],
)
def test_what_a_folder_says_that_makes_no_sense_is_refused(
    change: dict[str, Any], message: str, ease: ct.FittedCentral, tmp_path: Path
) -> None:
    folder = rewritten(ease.save(tmp_path / "model"), "model.json", change)
    assert message in refusal(ct.load_model, folder)


def test_arrays_that_do_not_fit_the_items_are_refused_on_loading(
    ease: ct.FittedCentral, tmp_path: Path
) -> None:
    folder = ease.save(tmp_path / "model")
    rewritten(folder, "items.json", json.loads((folder / "items.json").read_text())[:-1])
    items = len(read_model(ease.save(tmp_path / "whole")).items)
    assert f"scores of {items} items; expected {items - 1}" in refusal(ct.load_model, folder)


def rewritten(folder: Path, name: str, change: Any) -> Path:
    """Write a file of a model anew, with the hash that goes with it."""
    file = folder / name
    made = json.loads(file.read_text())
    old = hashlib.sha256(file.read_bytes()).hexdigest()
    file.write_text(json.dumps({**made, **change} if isinstance(change, dict) else change))
    sums = (folder / "SHA256SUMS").read_text()
    (folder / "SHA256SUMS").write_text(sums.replace(old, hashlib.sha256(file.read_bytes()).hexdigest()))
    return folder


def test_requests_to_a_central_model_are_answered_and_what_it_has_not_is_told(
    ease: ct.FittedCentral, split: ct.DataSplit, tmp_path: Path
) -> None:
    model = read_model(ease.save(tmp_path / "model"))
    answers = ModelAnswers(model)
    history = own(split, "u4")
    (found,) = answers.recommend([ServedUser(history=[(item, None) for item in history])], 5)
    expected = ease.recommend("u4", 5)
    assert list(found.items) == expected["item"].to_list()
    assert list(found.scores) == pytest.approx(expected["score"].to_list(), rel=1e-6)
    with pytest.raises(ConfigError, match="keep no vector"):
        answers.recommend([ServedUser(vector=[1.0])])
