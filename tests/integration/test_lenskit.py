"""Coterie's scorer in pipelines of LensKit: trained, asked, cloned and measured by LensKit itself."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

lenskit = pytest.importorskip("lenskit", reason="needs the extra lenskit")

import pandas as pd  # noqa: E402
from lenskit.batch import predict, recommend  # noqa: E402
from lenskit.data import ItemList, RecQuery, from_interactions_df  # noqa: E402
from lenskit.metrics import NDCG, RunAnalysis  # noqa: E402
from lenskit.pipeline import predict_pipeline, topn_pipeline  # noqa: E402
from lenskit.splitting import LastN, sample_users  # noqa: E402

import coterie as ct  # noqa: E402
from coterie.api.lenskit_scorer import CoterieScorer, CoterieScorerConfig  # noqa: E402
from coterie.errors import CoterieError  # noqa: E402

from ..interactions import ratings  # noqa: E402

ROUNDS = {"passes": 3, "evaluate_every": 1, "cohort": 30, "group": 30, "min_cohort": 10, "min_sum": 10}


@pytest.fixture(scope="module")
def frame() -> pd.DataFrame:
    given = ratings()
    return pd.DataFrame(
        {
            "user_id": given["customer"].to_list(),
            "item_id": given["sku"].to_list(),
            "rating": given["stars"].to_list(),
            "timestamp": given["at"].to_list(),
        }
    ).drop_duplicates(["user_id", "item_id"], keep="last")


@pytest.fixture(scope="module")
def data(frame: pd.DataFrame) -> Any:
    return from_interactions_df(frame)


def scorer(name: str, output: Path, keys: dict[str, Any] | None = None, **more: Any) -> CoterieScorer:
    return CoterieScorer(recommender=name, keys=keys or {}, output=str(output), **more)


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("EASE", {"ridge": 50.0}),
        ("UserKNN", {}),
        ("FedNCF", {"model": "gmf", "rounds": ROUNDS, "reference": False}),
    ],
)
def test_a_pipeline_recommends_what_users_have_not_had(
    name: str, keys: dict[str, Any], data: Any, frame: pd.DataFrame, tmp_path: Path
) -> None:
    pipeline = topn_pipeline(scorer(name, tmp_path, keys), n=5)
    pipeline.train(data)
    had = set(frame.loc[frame.user_id == "u4", "item_id"])
    found = pipeline.run("recommender", query="u4")
    assert len(found) == 5
    assert not had & set(found.ids())
    scores = found.scores()
    assert (np.diff(scores) <= 0).all()
    assert np.isfinite(scores).all()


def test_scores_are_those_of_the_run_that_the_scorer_trained(
    data: Any, frame: pd.DataFrame, tmp_path: Path
) -> None:
    own = scorer("FedNCF", tmp_path, {"model": "gmf", "rounds": ROUNDS, "reference": False})
    own.train(data)
    items = ItemList(item_ids=["i2", "i5", "unheard of"])
    scores = own("u4", items).scores()
    assert np.isnan(scores[2])
    assert own.fitted_.folder.parent == tmp_path
    # The same run from Python has the same numbers.
    table = frame.rename(columns={"timestamp": "time"}).assign(time=frame.timestamp.astype(int))
    split = ct.load(table, name="lenskit").split("leave-random-out")
    run = ct.FedNCF(model="gmf", rounds=ROUNDS, reference=False).fit(split, in_process=True, output=tmp_path)
    np.testing.assert_allclose(scores[:2], run.score(["u4"], ["i2", "i5"])[0], rtol=1e-5)


def test_every_central_model_takes_part(data: Any, tmp_path: Path) -> None:
    for name, made in ct.models().items():
        if issubclass(made, ct.CentralRecommender):
            own = scorer(name, tmp_path)
            own.train(data)
            assert np.isfinite(own("u4", ItemList(item_ids=["i2", "i5"])).scores()).all(), name
    assert not list(tmp_path.iterdir())


def test_somebody_who_was_not_in_training_is_scored_by_the_history_of_the_query(
    data: Any, frame: pd.DataFrame, tmp_path: Path
) -> None:
    own = scorer("EASE", tmp_path)
    own.train(data)
    items = ItemList(item_ids=["i2", "i5", "i9"])
    history = ItemList(item_ids=frame.loc[frame.user_id == "u4", "item_id"].to_list())
    new = RecQuery(user_id="somebody", history_items=history)
    np.testing.assert_allclose(own(new, items).scores(), own("u4", items).scores(), rtol=1e-6)
    # Without a history that is known, and by a model that has nothing for newcomers.
    assert np.isnan(own("somebody", items).scores()).all()
    assert np.isnan(own(RecQuery(history_items=ItemList(item_ids=["x"])), items).scores()).all()
    neighbours = scorer("UserKNN", tmp_path)
    neighbours.train(data)
    assert np.isnan(neighbours(new, items).scores()).all()


def test_a_federated_system_scores_somebody_by_items_or_by_ratings(data: Any, tmp_path: Path) -> None:
    items = ItemList(item_ids=["i2", "i5", "i9"])
    liked = RecQuery(history_items=ItemList(item_ids=["i1", "i3"]))
    rated = RecQuery(history_items=ItemList(item_ids=["i1", "i3"], rating=[5.0, 1.0]))
    ease = scorer("FedEASE", tmp_path, {"reference": False})
    ease.train(data)
    assert np.isfinite(ease(liked, items).scores()).all()
    factors = scorer("FedMF", tmp_path, {"factors": 4, "rounds": ROUNDS, "reference": False})
    factors.train(data)
    assert np.isfinite(factors(rated, items).scores()).all()
    assert np.isnan(factors(liked, items).scores()).all()
    neural = scorer("FedNCF", tmp_path, {"model": "gmf", "rounds": ROUNDS, "reference": False})
    neural.train(data)
    assert np.isnan(neural(liked, items).scores()).all()


def test_numbers_as_identifiers_are_those_of_the_data(tmp_path: Path) -> None:
    table = pd.DataFrame({"user_id": [1, 1, 2, 2, 3], "item_id": [10, 11, 10, 12, 11]})
    own = scorer("Popularity", tmp_path)
    own.train(from_interactions_df(table))
    found = own(2, ItemList(item_ids=[12, 10])).scores()
    np.testing.assert_array_equal(found, [1.0, 2.0])


def test_a_model_of_ratings_predicts_by_lenskit_s_own_pipeline(data: Any, tmp_path: Path) -> None:
    pipeline = predict_pipeline(scorer("BiasedMF", tmp_path), fallback=False)
    pipeline.train(data)
    found = predict(pipeline, {"u4": ItemList(item_ids=["i2", "i5"])}, n_jobs=1)
    values = next(iter(found.lists())).scores()
    assert ((values > 0.5) & (values < 5.5)).all()
    without = scorer("BiasedMF", tmp_path)
    with pytest.raises(CoterieError, match="predicts ratings, and LensKit's training data has none"):
        without.train(from_interactions_df(pd.DataFrame({"user_id": ["a"], "item_id": ["b"]})))


def test_lenskit_measures_a_federated_system_beside_a_central_model(data: Any, tmp_path: Path) -> None:
    split = sample_users(data, 30, LastN(1), rng=3)
    values = {}
    for name, keys in (
        ("FedEASE", {"secure_sum": "masked", "reference": False}),
        ("EASE", {"ridge": 300.0}),
    ):
        pipeline = topn_pipeline(scorer(name, tmp_path, keys), n=10)
        pipeline.train(split.train)
        found = recommend(pipeline, split.test, 10, n_jobs=1)
        analysis = RunAnalysis()
        analysis.add_metric(NDCG(10))
        values[name] = analysis.measure(found, split.test).list_summary()["mean"].iloc[0]
    assert 0 < values["FedEASE"] <= 1
    # They differ by what the federated system holds out to choose its version by.
    assert values["FedEASE"] == pytest.approx(values["EASE"], abs=0.15)


@pytest.mark.parametrize(
    ("name", "keys"), [("EASE", {}), ("FedNCF", {"model": "gmf", "rounds": ROUNDS, "reference": False})]
)
def test_worker_processes_of_lenskit_recommend_what_one_process_does(
    name: str, keys: dict[str, Any], data: Any, tmp_path: Path
) -> None:
    pipeline = topn_pipeline(scorer(name, tmp_path, keys), n=5)
    pipeline.train(data)
    users = ["u4", "u7", "u9"]
    one, two = (recommend(pipeline, users, 5, n_jobs=jobs).to_df() for jobs in (1, 2))
    pd.testing.assert_frame_equal(
        *(found.sort_values(["user_id", "rank"], ignore_index=True) for found in (one, two))
    )


def test_a_pipeline_is_cloned_by_its_configuration_and_trains_again_only_when_asked(
    data: Any, tmp_path: Path
) -> None:
    from lenskit.training import TrainingOptions

    pipeline = topn_pipeline(scorer("Popularity", tmp_path), n=3)
    pipeline.train(data)
    clone = pipeline.clone()
    assert clone.component("scorer").config == CoterieScorerConfig(
        recommender="Popularity", output=str(tmp_path)
    )
    assert not hasattr(clone.component("scorer"), "fitted_")
    before = pipeline.component("scorer").fitted_
    pipeline.train(data, TrainingOptions(retrain=False))
    assert pipeline.component("scorer").fitted_ is before


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"recommender": "EESE"}, "there is no recommender 'EESE'.*did you mean 'EASE'"),
        ({"recommender": "EASE", "keys": {"rigde": 3}}, "did you mean 'ridge'"),
        ({"recommender": "DRIFT"}, "gives no scores of all items"),
        ({"recommender": "FedNCF", "keys": {"secure_sm": "masked"}}, "did you mean secure_sum"),
    ],
)
def test_a_wrong_configuration_is_refused_as_from_python(given: dict[str, Any], message: str) -> None:
    with pytest.raises(CoterieError, match=message):
        CoterieScorer(**given)


def test_the_page_s_example_recommends(
    frame: pd.DataFrame, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "lenskit.md").read_text()
    (block,) = [part.partition("```")[0] for part in page.split("```python\n")[1:]]
    frame.to_csv(tmp_path / "ratings.csv", index=False)
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "docs/lenskit.md", "exec"), {})
    assert "ItemListCollection" in capsys.readouterr().out
    assert [run.name.startswith("ease-") for run in (tmp_path / "runs").iterdir()] == [True]
