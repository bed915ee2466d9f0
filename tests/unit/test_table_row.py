"""Rows of tables: what is tried in tuning, and how options become settings of a run."""

import numpy as np
import pytest

from coterie.config.run import RunSettings
from coterie.errors import ConfigError
from coterie.evaluation.selection import SelectedModel
from coterie.studies.run_data import Feed, load, make_feed
from coterie.studies.tables.row import (
    Choices,
    LogUniform,
    Row,
    configured,
    draw,
    enumerated,
    limited,
    shortened,
    with_options,
)


def never(*_: object) -> SelectedModel:
    raise AssertionError("this row is not trained here")


def row(name: str = "one", **more: object) -> Row:
    space = {"rate": LogUniform(1e-4, 1e-1), "dim": Choices((8, 16, 32))}
    return Row(name, name, never, options={"rate": 0.5, "fixed": True}, space=space, **more)  # type: ignore[arg-type]


def test_the_first_trial_is_the_row_as_it_stands_and_the_others_stay_in_the_space() -> None:
    first, *others = draw(row(), 50, seed=0)
    assert first == {"rate": 0.5, "fixed": True}
    assert len(others) == 49
    assert all(1e-4 <= one["rate"] <= 1e-1 and one["dim"] in (8, 16, 32) and one["fixed"] for one in others)
    magnitudes = np.histogram(np.log10([one["rate"] for one in others]), bins=[-4, -3, -2, -1])[0]
    assert magnitudes.min() >= 8


def test_more_trials_begin_with_the_fewer_and_rows_do_not_depend_on_each_other() -> None:
    assert list(draw(row(), 9, seed=3))[:4] == list(draw(row(), 4, seed=3))
    assert list(draw(row("one"), 4, seed=3))[1:] != list(draw(row("two"), 4, seed=3))[1:]
    assert list(draw(row(), 4, seed=3))[1:] != list(draw(row(), 4, seed=4))[1:]


def test_choices_can_be_enumerated_and_nothing_else() -> None:
    both = Row("r", "R", never, options={"c": 0}, space={"a": Choices((1, 2)), "b": Choices((3, 4))})
    assert list(enumerated(both)) == [{"c": 0, "a": a, "b": b} for a in (1, 2) for b in (3, 4)]
    with pytest.raises(TypeError, match="rate of row one"):
        list(enumerated(row()))


def test_options_are_keys_of_a_run() -> None:
    settings = with_options(
        RunSettings(), {"drift.rate": 0.7, "secure_sum": "clear", "federation.churn.owners": 2}
    )
    assert (settings.drift.rate, settings.federation.churn.owners) == (0.7, 2)
    assert settings.drift.dim == RunSettings().drift.dim


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drift.rat": 0.7}, r"drift\.rat, but a run has no such key.*'rate'"),
        ({"drif.rate": 0.7}, r"no such key.*'drift'"),
        ({"name.rate": 0.7}, "no such key"),
        ({"drift.rate": -1.0}, "make no run"),
    ],
)
def test_options_that_no_run_has_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        with_options(RunSettings(), options)


def test_a_run_is_trained_with_its_options_in_its_settings() -> None:
    seen = []

    def train(settings: RunSettings, feed: Feed, seed: int) -> SelectedModel:
        seen.append((settings.drift.rate, feed, seed))
        return SelectedModel([{"step": 1, "metrics": {}}], 0, {})

    settings = RunSettings()
    feed = make_feed(settings, load(settings), 0)
    configured(train)(settings, {"drift.rate": 0.3}, feed, 5)
    assert seen == [(0.3, feed, 5)]


def test_a_row_of_a_quick_table_tries_the_middle_choice_and_makes_few_passes() -> None:
    short = shortened(Row("r", "R", never, options={"passes": 9, "rate": 1}, space=row().space), 2, "passes")
    assert short.options == {"passes": 2, "rate": 1}
    assert short.space == {"rate": LogUniform(1e-4, 1e-1), "dim": Choices((16,))}
    assert shortened(short, 5, "passes").options["passes"] == 2
    assert shortened(row(), 2, "passes").options == row().options


@pytest.mark.parametrize(("key", "expected"), [("drift.epochs", 3), ("rounds.passes", 3)])
def test_passes_of_a_run_are_limited_and_never_raised(key: str, expected: int) -> None:
    table, name = key.split(".")
    once = limited(RunSettings(), key, expected)
    assert getattr(getattr(once, table), name) == expected
    assert getattr(getattr(limited(once, key, 50), table), name) == expected
    with pytest.raises(ConfigError, match="no such key"):
        limited(RunSettings(), "drift.epoch", 3)
