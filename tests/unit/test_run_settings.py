"""Settings of a run: what goes together, and what is refused with its reason."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from coterie.config.load import load
from coterie.config.run import RunSettings
from coterie.errors import ConfigError
from coterie.systems.drift.settings import DriftSettings
from coterie.systems.fedmvmf.settings import PRESETS, FedMvmfPlan, FedMvmfSettings
from coterie.systems.fedncf.networks import MODELS
from coterie.systems.fedncf.settings import FedNcfSettings, tuned
from coterie.wire.v1.orchestrator_pb2 import RunPlan


def settings(**given: Any) -> RunSettings:
    return RunSettings.model_validate({"system": "fedncf", **given})


def refusal(**given: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        settings(**given)
    return str(caught.value)


def test_fedncf_holds_one_item_out_unless_the_file_says_which_way() -> None:
    assert settings().split.kind == "leave-last-out"
    assert settings(split={"ties": "file"}).split.model_dump() == {
        **RunSettings().split.model_dump(),
        "kind": "leave-last-out",
        "ties": "file",
    }
    assert settings(split={"kind": "published"}).split.kind == "published"
    assert RunSettings().split.kind == "temporal"


def test_the_form_says_who_the_parties_are() -> None:
    assert RunSettings().form == "published"
    assert settings().form == "hosts"
    assert settings(rounds={"party_per_user": True}).form == "users"


def test_devices_are_asked_to_come_back_after_a_second_at_least() -> None:
    assert "check_in_s 0.5, expected 0, or 1 to 86400" in refusal(federation={"check_in_s": 0.5})
    for check_in_s in (0, 1):
        assert settings(federation={"check_in_s": check_in_s}).federation.check_in_s == check_in_s


@pytest.mark.parametrize("model", MODELS)
def test_what_is_not_given_is_what_was_found_for_the_model(model: str) -> None:
    assert settings(fedncf={"model": model}).fedncf == tuned(model)
    given = FedNcfSettings.model_validate({"model": model, "server_rate": 0.123, "decay": 0.5})
    assert (given.server_rate, given.decay) == (0.123, 0.5)
    assert given.private_rate == tuned(model).private_rate


def test_without_any_key_the_model_is_gmf() -> None:
    assert FedNcfSettings() == tuned("gmf")


def test_every_setting_of_the_learning_can_be_given() -> None:
    options = FedNcfSettings(
        model="neumf",
        dim=5,
        mlp_embedding=6,
        layers=(7, 8),
        negatives=9,
        local_epochs=10,
        batch_size=11,
        local_optimiser="sgd",
        local_rate=0.12,
        private_optimiser="sgd",
        private_rate=0.13,
        proximal=0.14,
        scaffold=True,
        aggregation="fedavg",
        touch="exact",
        min_touch=15,
        popularity=0.5,
        server_optimiser="fedyogi",
        server_rate=0.16,
        server_beta1=0.17,
        server_beta2=0.18,
        server_tau=0.19,
        decay=0.2,
        n_cap=21,
        bits=22,
        metric_bits=12,
        row_bound=23.0,
        network_bound=24.0,
        user_bound=0.25,
        output_bias="zero",
    )
    assert options.model_fields_set == FedNcfSettings.model_fields.keys()
    usual = FedNcfSettings()
    # SCAFFOLD goes with SGD alone, which is the default.
    same = {name for name in FedNcfSettings.model_fields if getattr(options, name) == getattr(usual, name)}
    assert same == {"local_optimiser"}
    assert dataclasses.asdict(options.architecture) == {
        "model": "neumf",
        "dim": 5,
        "mlp_embedding": 6,
        "layers": (7, 8),
    }
    assert dataclasses.asdict(options.server) == {
        "name": "fedyogi",
        "rate": 0.16,
        "beta1": 0.17,
        "beta2": 0.18,
        "tau": 0.19,
    }
    assert FedNcfSettings.from_json(options.to_json()) == options


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"secure_sum": "masked", "federation": {"hosts": 1}}, "a sum over one member protects nothing"),
        ({"rounds": {"cohort": 19}}, "cohort 19 is below min_cohort 20"),
        ({"rounds": {"group": 19}}, "group 19 is below min_cohort 20"),
        ({"rounds": {"min_sum": 201}}, "min_sum 201 is above cohort 200"),
        ({"rounds": {"experiment": False}}, "rounds.experiment false counts devices"),
        ({"rounds": {"choose_by": "validation_map@10"}}, "is not measured"),
        ({"rounds": {"choose_by": "hit_ratio@10"}}, "validation_"),
        ({"split": {"kind": "temporal"}}, "expected one of 'leave-last-out', 'leave-random-out'"),
        ({"split": {"validation": 0}}, "leaves no item"),
        ({"fedncf": {"bits": 27}}, "room for sums over 32 users"),
        ({"fedncf": {"scaffold": True, "local_optimiser": "adam"}}, "scaffold needs"),
        (
            {"system": "drift", "drift": {"form": "shielded", "compare_theta": [2]}},
            "drift.compare_theta is for the",
        ),
        ({"drift": {"compare_theta": [2, 0]}}, "0 is no value of theta; expected 1 to 1024"),
        ({"secure_sum": "encrypted", "scheme": "bfv"}, "there is no sum in BFV"),
        ({"secure_sum": "encrypted", "encryption": {"scheme": "bfv"}}, "expected secure_sum = 'encrypted'"),
        ({"secure_sum": "bfv"}, "docs/bfv.md"),
        ({"scheme": ["bfv"]}, "scheme"),
        (
            {"secure_sum": "clear", "rounds": {"channel_rounds": 5}},
            "rounds.channel_rounds 5 with secure_sum 'clear'",
        ),
        (
            {"secure_sum": "masked", "rounds": {"channel_rounds": 1001}},
            "rounds.channel_rounds",
        ),
        ({"federation": {"churn": {"owners": 1}}}, "federation.churn.owners is for systems without rounds"),
    ],
)
def test_what_does_not_go_together_is_refused_with_the_reason(given: dict[str, Any], words: str) -> None:
    assert words in refusal(**given)


def test_values_of_theta_to_compare_are_read_where_earlier_releases_had_them() -> None:
    assert RunSettings(study={"theta": [2, 8]}).drift.compare_theta == (2, 8)
    assert RunSettings(study={"theta": [2]}, drift={"compare_theta": [4]}).drift.compare_theta == (4,)
    saved = RunSettings().model_dump() | {"study": {"theta": []}}
    assert RunSettings.model_validate(saved) == RunSettings()
    with pytest.raises(ValueError, match="study"):
        RunSettings(study={"ridge": [0.1]})


def test_a_plan_does_not_carry_the_values_of_theta_to_compare() -> None:
    for form in ("published", "shielded"):
        plans = [RunPlan(form=form), RunPlan(form=form)]
        for plan, compared in zip(plans, ((), (2, 8)), strict=True):
            DriftSettings(form=form, compare_theta=compared).fill(plan)
        assert plans[0] == plans[1]


def test_a_sum_that_needs_rounds_is_refused_where_there_are_none() -> None:
    with pytest.raises(ValueError, match="a sum needs rounds"):
        RunSettings(secure_sum="masked")


def test_what_is_allowed_though_it_looks_odd() -> None:
    settings(secure_sum="masked", federation={"hosts": 1}, rounds={"party_per_user": True})
    settings(rounds={"cohorts": "all", "cohort": 1})
    settings(rounds={"cohorts": "random", "cohort": 20})


def test_a_refusal_reaches_the_reader_with_its_place(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('system = "fedncf"\n[rounds]\ncohort = 5\n')
    with pytest.raises(ConfigError) as caught:
        load(RunSettings, file, environ={})
    assert "rounds" in caught.value.message
    assert "cohort 5 is below min_cohort 20" in caught.value.message


def mvmf(**given: Any) -> RunSettings:
    return RunSettings.model_validate({"system": "fedmvmf", **given})


def test_fedmvmf_takes_its_own_split_cohorts_and_choice_unless_the_file_says_otherwise() -> None:
    usual = mvmf(split={"train": 0.7}, rounds={"passes": 3})
    assert (usual.split.kind, usual.split.train) == ("random", 0.7)
    assert (usual.rounds.cohorts, usual.rounds.group, usual.rounds.passes) == ("all", 1000, 3)
    assert usual.rounds.choose_by == "validation_ndcg_rated@10"
    given = mvmf(split={"kind": "cold-users"}, rounds={"cohorts": "groups", "group": 50, "cohort": 50})
    assert (given.split.kind, given.rounds.cohorts, given.rounds.group) == ("cold-users", "groups", 50)


def test_fedncf_may_make_more_passes_than_others_unless_the_file_says_otherwise() -> None:
    assert RunSettings.model_validate({"system": "fedncf"}).rounds.passes == 300
    assert RunSettings.model_validate({"system": "fedncf", "rounds": {"passes": 3}}).rounds.passes == 3
    assert mvmf().rounds.passes == 60


@pytest.mark.parametrize("preset", PRESETS)
def test_what_is_not_given_is_what_the_preset_has(preset: str) -> None:
    made = FedMvmfSettings.model_validate({"preset": preset})
    assert made == FedMvmfSettings().model_copy(update={**PRESETS[preset], "preset": preset})
    given = FedMvmfSettings.model_validate({"preset": preset, "factors": 7})
    assert given == made.model_copy(update={"factors": 7})


def carried(settings, attributes=()):
    return FedMvmfPlan.from_json(settings.own.for_plan(settings, attributes))


def test_the_plan_of_fedmvmf_names_attributes_and_whether_new_items_alone_are_ranked() -> None:
    plan = carried(mvmf(mvmf={"min_touch": 5}), ["age: 1"])
    assert (plan.attribute_names, plan.min_touch, plan.new_items) == (("age: 1",), 5, False)
    assert carried(mvmf(split={"kind": "cold-items"})).new_items


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"split": {"kind": "leave-last-out"}},
            "expected 'random', 'temporal', 'cold-users' or 'cold-items'",
        ),
        ({"split": {"validation": 0}}, "leaves no item"),
        ({"rounds": {"choose_by": "validation_mae"}}, "is not measured"),
        ({"rounds": {"choose_by": "validation_ndcg@10"}}, "is not measured"),
        ({"secure_sum": "masked", "federation": {"hosts": 1}}, "a sum over one member protects nothing"),
        ({"mvmf": {"lowest": 5, "highest": 1}}, "expected the lowest rating, then the highest"),
        ({"mvmf": {"bits": 27}, "rounds": {"cohorts": "groups"}}, "room for sums over 32 users"),
    ],
)
def test_what_does_not_go_with_fedmvmf_is_refused_with_the_reason(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError) as caught:
        mvmf(**given)
    assert words in str(caught.value)


def test_drift_does_not_hold_whole_users_or_items_out() -> None:
    with pytest.raises(ValueError, match="DRIFT has nothing to say"):
        RunSettings(split={"kind": "cold-users"})  # type: ignore[arg-type]
