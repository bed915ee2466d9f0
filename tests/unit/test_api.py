"""The Python interface: names, data, splits, and keywords that are checked as keys of a file are."""

import dataclasses
import doctest
import importlib
import json
import pkgutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest

import coterie as ct
import coterie.api
from coterie.api import recommenders
from coterie.config.load import load as load_file
from coterie.config.run import RunSettings
from coterie.data import read
from coterie.errors import ConfigError, CoterieError, DataError
from coterie.evaluation.central import PREDICTORS, RANKERS
from coterie.launch.children import toml
from coterie.systems.registry import systems

from ..interactions import ratings


@pytest.fixture(scope="module")
def data() -> ct.Data:
    return ct.load(ratings(), user="customer", item="sku", rating="stars", time="at", name="shop")


def refusal(call: Any, *arguments: Any, **keys: Any) -> CoterieError:
    with pytest.raises(CoterieError) as found:
        call(*arguments, **keys)
    return found.value


# --- names -----------------------------------------------------------------------------------------------------


def test_every_system_and_every_central_model_has_a_class() -> None:
    classes = ct.models()
    central = {one.model for one in classes.values() if issubclass(one, ct.CentralRecommender)}
    federated = {one.system.name for one in classes.values() if issubclass(one, ct.FederatedRecommender)}
    assert central == {*RANKERS, *PREDICTORS}
    assert federated == set(systems())
    assert all(name.isidentifier() and getattr(ct, name) is one for name, one in classes.items())


def test_a_system_with_the_title_of_a_central_model_is_named_apart() -> None:
    assert issubclass(ct.EASE, ct.CentralRecommender)
    assert issubclass(ct.FedEASE, ct.FederatedRecommender)
    assert ct.FedEASE.system.title == "EASE"


def test_systems_of_plug_ins_with_titles_that_are_taken_or_no_names_have_classes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    titles = {
        "one": "Two Towers, again",
        "two": "Data",
        "three": "3 towers",
        "four": "Popularity",
        "fi-ve": "Data",
    }
    made = {
        name: dataclasses.replace(systems()["fedncf"], name=name, title=title)
        for name, title in titles.items()
    }
    monkeypatch.setattr(recommenders, "systems", lambda: made)
    found = {
        name: one.system.name
        for name, one in recommenders.models.__wrapped__().items()
        if issubclass(one, ct.FederatedRecommender)
    }
    assert found == {
        "TwoTowersAgain": "one",
        "FedData": "two",
        "Fed3Towers": "three",
        "FedPopularity": "four",
        "FedData_fi_ve": "fi-ve",
    }


def test_an_unknown_name_is_refused_with_the_nearest_one_and_names_can_be_listed() -> None:
    with pytest.raises(AttributeError, match="did you mean 'FedNCF'"):
        _ = ct.FedNFC
    assert {"load", "compare", "load_model", "Popularity", "FedNCF"} <= set(dir(ct))


def test_modules_are_still_imported_from_the_package_and_nothing_is_loaded_for_them() -> None:
    program = "import sys, coterie; from coterie import errors; print('coterie.api' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "False\n"


def test_no_key_of_a_system_has_the_name_of_a_key_of_runs() -> None:
    # Such a key could be given by the system's table only.
    shared = {
        name: set(system.settings.model_fields) & set(RunSettings.model_fields)
        for name, system in systems().items()
    }
    assert {name for name, keys in shared.items() if keys} == set()


@pytest.mark.parametrize(
    "module", ["coterie", *(f"coterie.api.{one.name}" for one in pkgutil.iter_modules(coterie.api.__path__))]
)
def test_examples_in_docstrings_hold(module: str) -> None:
    if module == "coterie.api.lenskit_scorer":
        pytest.importorskip("lenskit", reason="LensKit is not installed: `make test-lenskit`")
    assert doctest.testmod(importlib.import_module(module)).failed == 0


def test_a_class_says_its_paper_and_keys() -> None:
    text = ct.FedNCF.__doc__ or ""
    assert all(
        word in text
        for word in (ct.FedNCF.system.paper, "secure_sum", *ct.FedNCF.system.settings.model_fields)
    )
    assert "ridge = 300.0" in (ct.EASE.__doc__ or "")


# --- data ------------------------------------------------------------------------------------------------------


def test_a_frame_of_polars_and_one_of_pandas_are_the_data_set_of_the_same_csv(tmp_path: Path) -> None:
    table = ratings()
    table.write_csv(tmp_path / "shop.csv")
    names = {"user": "customer", "item": "sku", "rating": "stars", "time": "at"}
    by_pandas = pd.DataFrame({name: table[name].to_list() for name in table.columns})
    expected = read(tmp_path / "shop.csv", columns=names)
    for source in (table, table.lazy(), by_pandas, tmp_path / "shop.csv", str(tmp_path / "shop.csv")):
        named = {} if isinstance(source, str | Path) else {"name": "shop"}
        found = ct.load(source, **names, **named).dataset
        assert (found.name, found.users, found.items, found.notes) == (
            expected.name,
            expected.users,
            expected.items,
            expected.notes,
        )
        for array in ("user", "item", "rating", "time"):
            np.testing.assert_array_equal(getattr(found, array), getattr(expected, array))


def test_a_name_is_found_below_the_folder_of_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shop").mkdir()
    ratings().write_csv(tmp_path / "shop" / "ratings.csv")
    monkeypatch.setenv("COTERIE_DATA", str(tmp_path))
    assert ct.load("shop/ratings.csv", user="customer", item="sku").users == 60


def test_a_data_set_says_its_sizes_and_notes_and_shows_itself(data: ct.Data) -> None:
    assert repr(data).startswith(
        f"Data shop: 60 users, {data.items} items, {data.interactions} interactions\n"
    )
    assert "the last of each was kept" in repr(data)
    assert "<td>shop</td>" in data._repr_html_()
    assert data.describe()["users"] == 60


def test_values_in_tables_for_notebooks_are_escaped() -> None:
    table = pl.DataFrame({"user": ["a"], "item": ["b"]})
    data = ct.load(table, name="x")
    made = ct.Data(dataclasses.replace(data.dataset, notes=("<script>",)), {})
    assert "<script>" not in made._repr_html_()
    assert "&lt;script&gt;" in made._repr_html_()


def test_filters_of_a_frame_are_those_of_a_file(tmp_path: Path) -> None:
    table = ratings(rows=300)
    table.write_csv(tmp_path / "shop.csv")
    keys: dict[str, Any] = {"user": "customer", "item": "sku", "k_core": 4}
    one, other = ct.load(table, **keys), ct.load(tmp_path / "shop.csv", **keys)
    assert one.dataset.users == other.dataset.users
    assert len(one.dataset.users) < 60


def test_a_frame_is_written_as_it_was_read_and_only_for_its_owner(tmp_path: Path, data: ct.Data) -> None:
    path = data.write(tmp_path)
    assert path.stat().st_mode & 0o777 == 0o600
    again = read(path)
    assert (again.name, again.users, again.items) == ("shop", data.dataset.users, data.dataset.items)
    for array in ("user", "item", "rating", "time"):
        np.testing.assert_array_equal(getattr(again, array), getattr(data.dataset, array))


@pytest.mark.parametrize(
    ("table", "keys", "message"),
    [
        ({"who": ["a"], "item": ["x"]}, {}, r"frame has no column 'user'; it has 'who', 'item'"),
        (
            {"user": ["a", None], "item": ["x", "y"]},
            {},
            r"frame, row 2, column 'user': nothing; expected a key",
        ),
        (
            {"user": ["a"], "item": ["x"], "rating": [9]},
            {"rating_range": (1, 5)},
            r"frame, row 1, column 'rating': 9; expected a number from 1 to 5",
        ),
        ({"user": [], "item": []}, {}, r"frame has no rows; expected interactions"),
        ({"user": ["a"], "item": ["x"]}, {"time": "when"}, r"frame has no column 'when'"),
    ],
)
def test_a_frame_that_is_wrong_is_refused_by_row_and_column(
    table: dict[str, list[Any]], keys: dict[str, Any], message: str
) -> None:
    for source in (pl.DataFrame(table), pd.DataFrame(table)):
        with pytest.raises(DataError, match=message):
            ct.load(source, **keys)


@pytest.mark.parametrize(
    ("source", "keys", "message"),
    [
        (3, {}, "int is no data set; expected a name, a path, or a pandas or polars frame"),
        ("no-such-set", {}, "no-such-set does not exist; expected a data set"),
        ("no-such-set", {"name": "x"}, "a data set from a file has the file's name"),
        (pl.DataFrame({"user": ["a"]}), {"name": "../x"}, "expected letters, digits, dots and hyphens"),
        (pl.DataFrame({"user": ["a"]}), {"layout": "csv"}, "a frame in memory has no layout"),
        (pl.DataFrame({"user": ["a"]}), {"path": "x"}, "data.path: the first argument of load says"),
        ("x", {"kcore": 3}, "data.kcore = 3: no such key; did you mean data.k_core?"),
        ("x", {"k_core": 0}, "data.k_core = 0: expected integer, at least 1"),
    ],
)
def test_wrong_arguments_of_load_are_refused(source: Any, keys: dict[str, Any], message: str) -> None:
    assert message in str(refusal(ct.load, source, **keys))


# --- splits ----------------------------------------------------------------------------------------------------


def test_a_split_has_its_digest_and_sizes(data: ct.Data) -> None:
    split = data.split("leave-last-out")
    assert split.sha256 == split.split.sha256(data.dataset)
    assert "60 validation, 60 test" in repr(split)
    assert split.sha256 in split._repr_html_()
    assert data.split("random", seed=1).sha256 != data.split("random", seed=2).sha256


@pytest.mark.parametrize(
    ("kind", "keys", "message"),
    [
        (
            "leave-lst-out",
            {},
            'split.kind = "leave-lst-out": expected one of "temporal", "random", "leave-last-out"',
        ),
        ("random", {"valdation": 0.1}, "split.valdation = 0.1: no such key; did you mean split.validation?"),
        ("random", {"seed": "x"}, "seed is 'x'; expected a whole number"),
        ("published", {}, "shop has no published hold-out"),
    ],
)
def test_wrong_keys_of_a_split_are_refused(
    data: ct.Data, kind: str, keys: dict[str, Any], message: str
) -> None:
    assert message in str(refusal(data.split, kind, **keys))


# --- keywords --------------------------------------------------------------------------------------------------

WRONG: list[dict[str, Any]] = [
    {"modl": "neumf"},
    {"model": "neumff"},
    {"secure_sm": "masked"},
    {"secure_sum": "maskd"},
    {"rounds": {"passes": 0}},
    {"rounds": {"pases": 3}},
    {"rounds": 3},
    {"seeds": []},
    {"federation": {"hosts": 0}, "model": 3},
    {"colour": "red"},
    {"rounds": {"cohort": 5}},
]


@pytest.mark.parametrize("keys", WRONG, ids=json.dumps)
def test_wrong_keywords_have_the_message_of_the_same_file(keys: dict[str, Any], tmp_path: Path) -> None:
    said = refusal(ct.FedNCF, **keys)
    own = {name: value for name, value in keys.items() if name not in RunSettings.model_fields}
    shared = {name: value for name, value in keys.items() if name not in own}
    tree = {"system": "fedncf", "name": "fedncf", **shared, **({"fedncf": own} if own else {})}
    file = tmp_path / "run.toml"
    file.write_text(toml(tree))
    assert tomllib.loads(file.read_text()) == tree
    by_file = refusal(load_file, RunSettings, file, environ={})
    assert type(said) is type(by_file) is ConfigError
    assert said.hint == by_file.hint
    assert said.message == by_file.message.replace(f" {file}", "").replace(" (file)", "")


def test_the_environment_changes_no_model(monkeypatch: pytest.MonkeyPatch, data: ct.Data) -> None:
    monkeypatch.setenv("COTERIE_ROUNDS__PASSES", "3")
    settings = ct.FedNCF(rounds={"passes": 7}).settings(data.split())
    assert settings.rounds.passes == 7


def test_keywords_are_keys_of_the_systems_table_or_of_a_run(data: ct.Data) -> None:
    split = data.split("leave-last-out", seed=4)
    model = ct.FedNCF(model="neumf", secure_sum="masked", fedncf={"min_touch": 7})
    settings = model.settings(split, hosts=3, output="elsewhere")
    table = settings.model_dump()["fedncf"]
    assert (table["model"], table["min_touch"], settings.secure_sum) == ("neumf", 7, "masked")
    assert (settings.federation.hosts, settings.output, settings.seeds) == (3, Path("elsewhere"), (4,))
    assert settings.split == split.settings
    assert repr(ct.FedNCF(model="gmf")) == "FedNCF(model='gmf')"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"data": {"k_core": 3}}, "data: no key of a model"),
        ({"split": {}}, "split: no key of a model"),
        ({"system": "fedmf"}, "system: the class says it; this one is fedncf"),
    ],
)
def test_what_the_split_or_the_class_decides_is_refused(keys: dict[str, Any], message: str) -> None:
    assert message in str(refusal(ct.FedNCF, **keys))


def test_a_split_that_does_not_suit_a_system_is_refused_before_anything_is_made(
    data: ct.Data, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"split\.kind"):
        ct.FedNCF().fit(data.split("random"), in_process=True, output=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_data_without_a_split_is_refused(data: ct.Data) -> None:
    for call in (ct.FedNCF().fit, ct.Popularity().fit, lambda given: ct.compare([ct.Popularity()], given)):
        assert "Data is no split; expected what `data.split(...)` returns" in refusal(call, data).message


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"lambda": 3}, "ease-central has no hyper-parameter 'lambda'"),
        ({"ridge": -1.0}, "ease-central: ridge is -1.0; expected more than 0"),
    ],
)
def test_wrong_hyperparameters_are_refused(keys: dict[str, Any], message: str) -> None:
    assert message in str(refusal(ct.EASE, **keys))
