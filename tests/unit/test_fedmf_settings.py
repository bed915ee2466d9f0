"""Configuration of FedMF and FCF: what is usual, what steps bring along, what is refused and in which words."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.config import load as config
from coterie.config.run import RunSettings
from coterie.errors import DataError
from coterie.studies.protection import protection
from coterie.studies.run_data import load, make_feed
from coterie.studies.run_plan import run_plan
from coterie.systems.fcf.settings import FcfSettings
from coterie.systems.fedmf.settings import FedMfSettings
from coterie.systems.registry import fewest_users
from coterie.systems.visibility import matrix

ROOT = Path(__file__).parents[2]


def run(**given: Any) -> RunSettings:
    return RunSettings.model_validate({"system": "fedmf", **given})


def test_steps_that_add_up_bring_along_rates_and_a_bound_that_suit_them() -> None:
    printed = FedMfSettings(steps="sum")
    assert not printed.biases
    assert (printed.factors, printed.local_epochs) == (10, 1)
    assert (printed.rate, printed.private_rate, printed.change_bound) == (1e-4, 1e-4, 0.02)
    given = FedMfSettings(steps="sum", rate=1e-3)
    assert (given.rate, given.private_rate, given.change_bound) == (1e-3, 1e-4, 0.02)
    plain = FedMfSettings(biases=False)
    assert (plain.factors, plain.local_epochs) == (10, 1)
    assert (plain.rate, plain.private_rate, plain.change_bound) == (0.05, 0.05, 4.0)
    usual = FedMfSettings(steps="mean")
    assert usual.biases
    assert (usual.rate, usual.private_rate, usual.change_bound) == (0.3, 0.3, 4.0)
    assert usual == FedMfSettings()


def test_a_plan_of_the_printed_prediction_keeps_its_meaning():
    # Written by a release in which biases were off unless given.
    text = (
        '{"biases":false,"bits":16,"change_bound":4.0,"factors":10,"highest":5.0,"local_epochs":1,"lowest":0.5,'
        '"min_touch":3,"private_rate":0.05,"rate":0.05,"ridge":0.02,"steps":"mean"}'
    )
    plan = FedMfSettings.from_json(text)
    assert plan == FedMfSettings(biases=False)
    assert plan.to_json() == text


@pytest.mark.parametrize("system", ["fedmf", "fcf"])
def test_a_run_divides_at_random_has_everybody_in_each_round_and_chooses_by_its_own_metric(
    system: str,
) -> None:
    made = RunSettings.model_validate({"system": system})
    assert (made.split.kind, made.rounds.cohorts, made.rounds.group) == ("random", "all", 1000)
    assert made.rounds.choose_by == {"fedmf": "validation_rmse", "fcf": "validation_ndcg@10"}[system]
    assert made.own.width == {"fedmf": 22, "fcf": 20}[system]
    assert made.own.room == 65537
    plan = run_plan(made, run_id="a-run", seed=3)
    assert (plan.system, plan.settings) == (system, getattr(made, system).to_json())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"fedmf": {"local_epochs": 0}}, "local_epochs"),
        ({"fedmf": {"rate": math.nan}}, "fedmf.rate\n  Input should be a finite number"),
        ({"fedmf": {"ridge": math.inf}}, "fedmf.ridge\n  Input should be a finite number"),
        ({"fedmf": {"lowest": 4.0, "highest": 3.0}}, "lowest is 4.0, highest 3.0"),
        ({"fcf": {"confidence": math.inf}}, "fcf.confidence\n  Input should be a finite number"),
        ({"split": {"kind": "cold-users"}}, "split.kind 'cold-users': fedmf is measured by held-out items"),
        ({"split": {"kind": "leave-last-out"}}, "expected 'random' or 'temporal'"),
        ({"system": "fcf", "split": {"kind": "cold-items"}}, "'random' or 'temporal' or 'leave-last-out'"),
        ({"rounds": {"choose_by": "validation_hit_ratio@10"}}, "is not measured; expected one of"),
        ({"system": "fcf", "rounds": {"choose_by": "validation_rmse"}}, "'validation_rmse' is not measured"),
        ({"secure_sum": "masked", "federation": {"hosts": 1}}, "a sum over one member protects nothing"),
        ({"rounds": {"cohorts": "random", "cohort": 200}, "fedmf": {"bits": 26}}, "fedmf.bits 26 leave room"),
        (
            {"fedmf": {"biases": False, "lowest": 0, "highest": 100}},
            "expected their sum below 0.02, such as 0.005 each",
        ),
    ],
    ids=str,
)
def test_what_does_not_go_together_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        run(**given)


@pytest.mark.parametrize(
    "given",
    [
        {"lowest": 0, "highest": 100, "biases": False, "rate": 0.005, "private_rate": 0.005},
        {"lowest": 0, "highest": 100},
        {"lowest": 0, "highest": 100, "steps": "sum"},
        {"lowest": -10, "highest": 10},
        {"lowest": -5, "highest": -1},
        {"lowest": 3, "highest": 3},
    ],
    ids=str,
)
def test_any_range_of_ratings_is_learned_with_steps_that_suit_it(given: dict[str, Any]) -> None:
    settings = run(fedmf=given)
    assert settings.own.rating_range == (given["lowest"], given["highest"])


@pytest.mark.parametrize("sum_", ["clear", "masked", "encrypted", "shared-key"])
@pytest.mark.parametrize("system", ["fedmf", "fcf"])
def test_every_sum_can_be_asked_for(system: str, sum_: str) -> None:
    assert RunSettings.model_validate({"system": system, "secure_sum": sum_}).secure_sum == sum_


def test_a_data_set_without_ratings_is_refused_by_fedmf_and_taken_by_fcf() -> None:
    settings = run()
    data = load(settings)
    same = dataclasses.replace(data, rating=np.ones(len(data), np.float32))
    with pytest.raises(DataError, match="there is nothing to predict") as caught:
        make_feed(settings, same, 0)
    assert caught.value.hint == "fedmf needs a data set with ratings"
    feed = make_feed(RunSettings.model_validate({"system": "fcf"}), same, 0)
    assert not feed.explicit
    assert feed.attributes is None


def test_ratings_out_of_the_range_are_refused_before_anything_starts() -> None:
    settings = run(fedmf={"highest": 4.0})
    with pytest.raises(DataError, match=r"are out of range, the lowest .* expected 0.5 to 4") as caught:
        make_feed(settings, load(settings), 0)
    assert caught.value.hint == "fedmf.lowest and fedmf.highest say what the range is"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"secure_sum": "clear"}, "shows which it has rated"),
        ({"fedmf": {"min_touch": 2}}, "fedmf.min_touch 2"),
        ({"rounds": {"cohorts": "independent"}}, "cohorts are no groups"),
        ({"system": "fcf", "fcf": {"min_touch": 1}}, "fcf.min_touch 1"),
    ],
    ids=str,
)
def test_what_a_setting_gives_away_is_a_warning(given: dict[str, Any], words: str) -> None:
    asked = run(**{"secure_sum": "masked", "federation": {"hosts": 3}, **given})
    usual = run(system=asked.system, secure_sum="masked", federation={"hosts": 3})
    assert any(words in one for one in protection(asked, [149, 150])["warnings"])
    assert not any(words in one for one in protection(usual, [149, 150])["warnings"])


@pytest.mark.parametrize("sum_", ["clear", "masked", "encrypted", "shared-key"])
@pytest.mark.parametrize("form", ["hosts", "users"])
@pytest.mark.parametrize("system", ["fedmf", "fcf"])
def test_who_may_see_what_is_declared_as_for_fedncf(system: str, form: str, sum_: str) -> None:
    mine, same = matrix(system, form, sum_), matrix("fedncf", form, sum_)
    for role, entries in mine.items():
        # FedMF's PartText shows in which places there is something, to those who add and those who decrypt.
        shown = entries["sent_places"].allowed
        by_whom = {"encrypted": ("client", "cos", "decrypting-client"), "shared-key": ("client", "cos")}
        assert shown is (system == "fedmf" and role in by_whom.get(sum_, ())), role
        assert {**entries, "sent_places": same[role]["sent_places"]} == same[role]
    # Who opens the model's versions has what the server has in other runs.
    assert matrix(system, form, sum_)["client"]["item_support"].allowed is (sum_ == "shared-key")
    assert matrix(system, form, sum_)["cos"]["item_factor"].allowed is (sum_ != "shared-key")


def test_no_sum_over_fewer_users_than_twice_the_factors_is_decrypted() -> None:
    assert fewest_users("fedmf", FedMfSettings(biases=False, factors=7).to_json()) == 14
    assert fewest_users("fedmf", FedMfSettings(factors=7).to_json()) == 18
    assert fewest_users("fcf", FcfSettings(factors=9).to_json()) == 18


@pytest.mark.parametrize(
    ("name", "system", "sum_"),
    [("fedmf", "fedmf", "masked"), ("fcf", "fcf", "masked"), ("secure-fedmf", "fedmf", "shared-key")],
)
def test_an_example_is_a_run_of_the_embedded_data(name: str, system: str, sum_: str) -> None:
    found = config.load(RunSettings, ROOT / "examples" / f"{name}.toml").settings
    assert (found.system, found.secure_sum, found.data.path) == (system, sum_, None)
