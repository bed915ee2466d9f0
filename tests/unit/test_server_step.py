"""Optimisers of a run's rounds around the server's side of systems that step along sums."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load, save

from coterie.config.run import EncryptionSettings, RunSettings, ServerOptimiserSettings
from coterie.errors import ConfigError
from coterie.rounds.plan_hash import plan_hash
from coterie.rounds.training import Purpose
from coterie.studies import run_data
from coterie.studies.in_process import train_in_process, train_plan
from coterie.studies.run_data import make_feed
from coterie.studies.run_plan import run_plan
from coterie.systems.fedmf.study.references import fedmf_references
from coterie.systems.registry import systems
from coterie.systems.server_step import (
    OPTIMISER_KEYS,
    OptimisedServer,
    optimiser_of,
    planned_server_side,
)
from coterie.systems.shared.optimisers import SERVER_OPTIMISERS, ServerOptimiser
from coterie.wire.v1.orchestrator_pb2 import OptimiserPlan

SPEC = {"users": 60, "items": 80, "interactions": 1_500, "genres": 4}
ADAPTIVE = ("fedadagrad", "fedadam", "fedyogi")
FEDADAM = {"name": "fedadam", "rate": 0.05}
KEY = EncryptionSettings(bits=1024, comparison=True, obfuscators="short")


def settings(optimiser: dict[str, Any] | None = None, **more: Any) -> RunSettings:
    rounds = {"group": 60, "passes": 4, "evaluate_every": 2, **more.pop("rounds", {})}
    if optimiser is not None:
        rounds["server_optimiser"] = optimiser
    return RunSettings.model_validate(
        {
            "system": "fedmf",
            "data": {"synthetic": SPEC},
            "rounds": rounds,
            "federation": {"hosts": 2},
            **more,
        }
    )


def history(run: RunSettings, secure_sum: str = "clear") -> list[dict[str, float]]:
    feed = make_feed(run, run_data.load(run), 0)
    plan = run_plan(run, run_id="a-run", seed=0)
    plan.secure_sum = secure_sum
    done = train_plan(plan, feed, hosts=run.federation.hosts, see=lambda event: None, encryption=KEY)
    return [one["metrics"] for one in done.known["history"]]


class Adds:
    """Server's side that adds a sum to two arrays, a third of it to the second."""

    asks_supports = False
    needs_every_sum = False
    metrics = ("loss",)

    def initial(self) -> dict[str, Any]:
        return {"a": np.full(3, 0.5), "b": np.ones((2, 2), np.float32), "seen": np.zeros(1)}

    def layout(self, purpose: Purpose) -> str:
        return f"layout of {purpose.value}"

    def apply(self, arrays: dict[str, Any], summed: Any) -> dict[str, Any]:
        if summed.purpose is Purpose.SUPPORTS:
            return {**arrays, "seen": arrays["seen"] + 1}
        if summed.purpose is Purpose.EVALUATE:
            return arrays
        moved = {"a": arrays["a"] + summed.sums["a"], "b": arrays["b"] + summed.sums["b"] / 3}
        return {**arrays, **moved, "seen": arrays["seen"] + 1}

    def model(self, arrays: dict[str, Any]) -> dict[str, Any]:
        return {name: arrays[name].astype(np.float32) for name in ("a", "b")}

    def opened(self, arrays: dict[str, Any]) -> None:
        return None

    def measured(self, purpose: Purpose, sums: Any) -> dict[str, tuple[float, float]]:
        return {"loss": (1.0, 2.0)}

    def figures(self, totals: Any) -> dict[str, tuple[float, int]]:
        return {"loss": (0.5, 2)}

    def told(self, arrays: dict[str, Any], answers: Any) -> dict[str, Any]:
        return {**arrays, "told": np.array(answers)}


def summed(number: int, purpose: Purpose = Purpose.TRAIN) -> Any:
    rng = np.random.default_rng(number)
    return SimpleNamespace(
        purpose=purpose, sums={"a": rng.normal(size=3) / 8, "b": rng.normal(size=(2, 2)) / 8}
    )


def by_hand(optimiser: ServerOptimiser, rounds: int) -> dict[str, np.ndarray]:
    """Return the model after some rounds by Alg. 2 of Reddi et al., from 0 and corrected for it, value by value."""
    model = {"a": np.full(3, 0.5), "b": np.ones((2, 2))}
    for name, value in model.items():
        flat = value.reshape(-1)
        for k in range(len(flat)):
            m = v = 0.0
            for t in range(1, rounds + 1):
                delta = summed(t).sums[name].reshape(-1)[k] / {"a": 1, "b": 3}[name]
                m = optimiser.beta1 * m + (1 - optimiser.beta1) * delta
                unbiased = 1 - optimiser.beta2**t
                match optimiser.name:
                    case "fedadagrad":
                        v, unbiased = v + delta**2, 1.0
                    case "fedadam":
                        v = optimiser.beta2 * v + (1 - optimiser.beta2) * delta**2
                    case "fedyogi":
                        v -= (1 - optimiser.beta2) * delta**2 * np.sign(v - delta**2)
                step = m / (1 - optimiser.beta1**t) / (np.sqrt(v / unbiased) + optimiser.tau)
                flat[k] += optimiser.rate * step if optimiser.name in ADAPTIVE else delta
    return model


@pytest.mark.parametrize("name", ADAPTIVE)
@pytest.mark.parametrize("tau", [1e-8, 0.05])
def test_arrays_that_the_system_steps_are_moved_by_the_optimiser_as_by_hand(name: str, tau: float) -> None:
    optimiser = ServerOptimiser(name, rate=0.1, beta1=0.8, beta2=0.95, tau=tau)
    side = OptimisedServer(Adds(), optimiser, ("a", "b"))
    arrays = side.initial()
    for number in range(1, 6):
        arrays = side.apply(arrays, summed(number))
    for key, value in by_hand(optimiser, 5).items():
        np.testing.assert_allclose(arrays[key], value, rtol=2e-5)
    assert arrays["seen"] == 5
    assert arrays["a"].dtype == np.float64


def test_an_array_that_is_not_named_keeps_the_step_of_the_system() -> None:
    side = OptimisedServer(Adds(), ServerOptimiser("fedadam", rate=0.1), ("a",))
    arrays = side.apply(side.initial(), summed(1))
    np.testing.assert_allclose(arrays["b"], 1 + summed(1).sums["b"] / 3, rtol=1e-6)
    np.testing.assert_allclose(arrays["a"], 0.5 + 0.1 * np.sign(summed(1).sums["a"]), rtol=1e-5)


def test_sums_that_train_nothing_leave_the_moments_as_they_are() -> None:
    side = OptimisedServer(Adds(), ServerOptimiser("fedadam"), ("a", "b"))
    before = side.apply(side.initial(), summed(1))
    for purpose in (Purpose.EVALUATE, Purpose.SUPPORTS):
        after = side.apply(before, summed(2, purpose))
        assert after.keys() == before.keys()
        for name in before.keys() - {"seen"}:
            np.testing.assert_array_equal(after[name], before[name])
    assert after["seen"] == before["seen"] + 1


def test_a_stored_state_goes_on_as_if_nothing_had_happened_and_one_without_moments_does_not() -> None:
    side = OptimisedServer(Adds(), ServerOptimiser("fedadam", rate=0.1), ("a", "b"))
    before = side.apply(side.initial(), summed(1))
    stored = load(save({name: np.ascontiguousarray(value) for name, value in before.items()}))
    lost = {**before, **{name: value for name, value in side.initial().items() if "optimiser" in name}}
    after, again, without = (side.apply(arrays, summed(2)) for arrays in (before, stored, lost))
    for name, value in after.items():
        np.testing.assert_array_equal(again[name], value)
    assert np.abs(without["a"] - after["a"]).min() > 1e-3


def test_everything_else_is_the_systems_own() -> None:
    own = Adds()
    side = OptimisedServer(own, ServerOptimiser("fedadam"), ("a", "b"))
    assert (side.asks_supports, side.needs_every_sum, side.metrics) == (False, False, ("loss",))
    assert side.layout(Purpose.TRAIN) == own.layout(Purpose.TRAIN)
    assert side.opened(side.initial()) is None
    assert side.measured(Purpose.TRAIN, {}) == own.measured(Purpose.TRAIN, {})
    assert side.figures({}) == own.figures({})
    arrays = side.told(side.initial(), [1, 2])
    assert arrays["told"].tolist() == [1, 2]
    # Participants fetch no moments.
    assert side.model(arrays).keys() == {"a", "b"}


def test_a_system_that_says_it_steps_an_array_that_it_does_not_keep_is_told_which_it_keeps() -> None:
    side = OptimisedServer(Adds(), ServerOptimiser("fedadam"), ("a", "items"))
    with pytest.raises(ConfigError, match=r"System.stepped names items; expected some of .* a, b, seen"):
        side.initial()


def test_fedavg_is_the_step_of_the_system_to_the_bit() -> None:
    assert history(settings({"name": "fedavg"})) == history(settings())


def test_fedsgd_with_a_whole_rate_is_that_step_and_with_half_a_rate_is_another() -> None:
    plain = history(settings())
    assert history(settings({"name": "fedsgd"})) == plain
    assert history(settings({"name": "fedsgd", "rate": 0.5})) != plain


@pytest.mark.parametrize("secure_sum", ["masked", "encrypted", "shared-key"])
def test_numbers_are_the_same_under_every_sum(secure_sum: str) -> None:
    run = settings(FEDADAM, rounds={"passes": 2, "evaluate_every": 1})
    clear = history(run)
    assert history(run, secure_sum) == clear
    assert clear != history(settings(rounds={"passes": 2, "evaluate_every": 1}))


@pytest.mark.parametrize("name", ADAPTIVE)
@pytest.mark.parametrize("biases", [False, True])
def test_all_ratings_in_one_place_come_to_the_same_errors_but_for_rounding(name: str, biases: bool) -> None:
    given = {"fedmf": {"biases": biases, "local_epochs": 2}, "rounds": {"passes": 6, "evaluate_every": 2}}
    run = settings({"name": name, "rate": 0.2, "tau": 1e-3}, **given)
    feed = make_feed(run, run_data.load(run), 0)
    federated = train_in_process(run, feed, run_id="a-run", seed=0, see=lambda event: None).known["history"]
    beside = fedmf_references(run, feed, 0)["mf"].history
    for one, other in zip(federated, beside, strict=True):
        for figure in ("rmse", "train_rmse", "validation_rmse"):
            assert one["metrics"][figure] == pytest.approx(other["metrics"][figure], abs=2e-3), figure
    plain = fedmf_references(settings(**given), feed, 0)["mf"].history
    apart = [
        abs(one["metrics"]["rmse"] - other["metrics"]["rmse"])
        for one, other in zip(plain, beside, strict=True)
    ]
    assert max(apart) > 5e-3


OWN = {"fedncf": "fedncf", "fedmvmf": "mvmf", "fcf": "fcf", "fpl": "fpl"}
STEPLESS = ("drift", "ease", "ials")


def refused(system: str) -> str:
    with pytest.raises(ValueError, match=r"rounds.server_optimiser.name 'fedyogi'") as caught:
        RunSettings.model_validate(
            {"system": system, "rounds": {"server_optimiser": {"name": "fedyogi", "rate": 0.1}}}
        )
    return str(caught.value)


def own(system: str, **more: Any) -> RunSettings:
    """Return a short run of a system whose settings name an optimiser."""
    return settings(more.pop("optimiser", None), system=system, split={"kind": SPLITS[system]}, **more)


def trained(run: RunSettings) -> list[dict[str, float]]:
    """Return the metrics of a run in this process."""
    feed = make_feed(run, run_data.load(run), 0)
    known = train_in_process(run, feed, run_id="a-run", seed=0, see=lambda event: None).known
    return [one["metrics"] for one in known["history"]]


SPLITS = {"fedncf": "leave-last-out", "fedmvmf": "random", "fcf": "random", "fpl": "random"}


@pytest.mark.parametrize("name", ["fedsgd", "fedyogi"])
@pytest.mark.parametrize("system", OWN)
def test_the_optimiser_of_the_rounds_takes_the_place_of_a_systems_own_to_the_bit(
    system: str, name: str
) -> None:
    optimiser = {"name": name, "rate": 0.02, "beta1": 0.7, "beta2": 0.9, "tau": 1e-3}
    keys = {key: optimiser[field] for key, field in OPTIMISER_KEYS.items()}
    found = trained(own(system, optimiser=optimiser))
    assert found == trained(own(system, **{OWN[system]: keys}))
    assert found != trained(own(system))


@pytest.mark.parametrize("system", OWN)
def test_a_plan_of_a_system_with_its_own_optimiser_has_the_same_text_with_and_without_that_of_the_rounds(
    system: str,
) -> None:
    plain, other = (run_plan(own(system, optimiser=given), run_id="a", seed=0) for given in (None, FEDADAM))
    assert other.rounds.HasField("server_optimiser")
    assert not plain.rounds.HasField("server_optimiser")
    assert other.settings == plain.settings
    assert plan_hash(other) != plan_hash(plain)


@pytest.mark.parametrize("system", OWN)
def test_where_users_contribute_gradients_fedavg_has_no_step(system: str) -> None:
    if system == "fedncf":
        assert trained(own(system, optimiser={"name": "fedavg"})) != trained(own(system))
        return
    with pytest.raises(
        ValueError, match=rf"users of {system} contribute gradients, along which fedavg has no step"
    ):
        own(system, optimiser={"name": "fedavg"})


@pytest.mark.parametrize("system", OWN)
@pytest.mark.parametrize(
    ("key", "value"), [("server_optimiser", "fedadagrad"), ("server_rate", 0.123), ("server_tau", 0.5)]
)
def test_an_optimiser_of_the_rounds_beside_keys_of_the_systems_own_is_refused(
    system: str, key: str, value: Any
) -> None:
    given = {OWN[system]: {key: value}}
    assert own(system, **given)
    with pytest.raises(
        ValueError, match=rf"takes the place of {OWN[system]}\.{key}; expected one or the other"
    ):
        own(system, optimiser=FEDADAM, **given)


@pytest.mark.parametrize(("table", "given"), [("fedncf", {"model": "mlp"}), ("mvmf", {"preset": "paper"})])
def test_keys_that_follow_from_a_model_or_a_preset_are_no_keys_that_were_given(
    table: str, given: dict[str, Any]
) -> None:
    system = {table: name for name, table in OWN.items()}[table]
    assert own(system, optimiser=FEDADAM, **{table: given})


@pytest.mark.parametrize("text", ["[", "[]", "{}"])
def test_settings_that_are_no_systems_are_refused_with_an_optimiser_too(text: str) -> None:
    plan = run_plan(own("fpl", optimiser=FEDADAM), run_id="a-run", seed=0)
    plan.settings = text
    with pytest.raises(ConfigError):
        planned_server_side(plan, 3, 1)


@pytest.mark.parametrize("system", STEPLESS)
def test_a_system_that_does_not_step_is_refused_and_those_that_do_are_named(system: str) -> None:
    words = refused(system)
    assert f"{system} moves no model by steps along sums" in words
    assert "a system that steps: " in words
    assert all(name in words.split("steps: ")[1] for name in (*OWN, "fedmf"))


def test_every_system_of_ours_steps_has_its_own_optimiser_or_is_refused() -> None:
    stepping = {name for name, system in systems().items() if system.stepped}
    assert {"fedmf"} <= stepping
    assert {*OWN, *STEPLESS, "fedmf"} <= set(systems())
    assert not stepping & {*OWN, *STEPLESS}


@pytest.mark.parametrize(
    ("wrong", "key"),
    [
        ({"name": "adam"}, "name"),
        ({"name": "fedadam", "rate": 0}, "rate"),
        ({"name": "fedadam", "rate": float("nan")}, "rate"),
        ({"name": "fedadam", "rate": float("inf")}, "rate"),
        ({"name": "fedadam", "beta1": 1}, "beta1"),
        ({"name": "fedyogi", "beta2": -0.1}, "beta2"),
        ({"name": "fedadagrad", "tau": 0}, "tau"),
        ({"name": "fedadam", "momentum": 0.9}, "momentum"),
    ],
)
def test_values_out_of_range_are_refused_by_key(wrong: dict[str, Any], key: str) -> None:
    with pytest.raises(ValueError, match=rf"rounds\.server_optimiser\.{key}"):
        settings(wrong)


def test_the_names_in_a_file_are_those_that_are_built() -> None:
    takes = ServerOptimiserSettings.model_fields["name"].annotation
    assert set(takes.__args__) == {"none", *SERVER_OPTIMISERS}
    assert ServerOptimiserSettings(name="fedsgd").rate == 1
    assert ServerOptimiserSettings(name="fedsgd", rate=0.2).rate == 0.2
    assert ServerOptimiserSettings(name="fedadam").rate == 0.01


def test_a_plan_without_an_optimiser_is_hashed_as_before_there_were_any() -> None:
    plan = run_plan(settings(), run_id="a-run", seed=0)
    assert not plan.rounds.HasField("server_optimiser")
    assert run_plan(settings({"name": "none", "rate": 3.0}), run_id="a-run", seed=0) == plan


def test_every_value_of_the_optimiser_is_in_the_hash_of_the_plan() -> None:
    hashes = {
        plan_hash(run_plan(settings(given), run_id="a-run", seed=0))
        for given in (
            None,
            {"name": "fedadam"},
            {"name": "fedyogi"},
            {"name": "fedadam", "rate": 0.02},
            {"name": "fedadam", "beta1": 0.8},
            {"name": "fedadam", "beta2": 0.9},
            {"name": "fedadam", "tau": 1e-3},
        )
    }
    assert len(hashes) == 7


def test_a_plan_gives_back_the_optimiser_and_refuses_one_that_does_not_exist() -> None:
    run = settings({"name": "fedyogi", "rate": 0.1, "beta1": 0.3, "beta2": 0.7, "tau": 1e-3})
    plan = run_plan(run, run_id="a-run", seed=0)
    assert optimiser_of(plan.rounds) == ServerOptimiser("fedyogi", 0.1, 0.3, 0.7, 1e-3)
    plan.rounds.server_optimiser.CopyFrom(OptimiserPlan(name="adam", rate=0.1, tau=1e-8))
    with pytest.raises(ConfigError, match="server optimiser is 'adam'"):
        planned_server_side(plan, 3, 1)
    plan.rounds.server_optimiser.CopyFrom(OptimiserPlan(name="fedadam"))
    with pytest.raises(ConfigError, match=r"server rate 0\.0"):
        planned_server_side(plan, 3, 1)


def test_a_plan_of_a_system_that_does_not_step_is_refused_where_it_is_received() -> None:
    plan = run_plan(settings(FEDADAM), run_id="a-run", seed=0)
    assert isinstance(planned_server_side(plan, 3, 1), OptimisedServer)
    plan.system, plan.settings = "ials", systems()["ials"].settings().to_json()
    with pytest.raises(ConfigError, match=r"ials moves no model by steps along sums"):
        planned_server_side(plan, 3, 1)
