"""Share of users' items that is closed to learning, in the report of a run in rounds."""

from pathlib import Path

import pytest

from coterie.config.load import load
from coterie.config.run import RunSettings
from coterie.studies.in_process import train_in_process
from coterie.studies.run_data import load as load_dataset
from coterie.studies.run_data import make_feed
from coterie.telemetry.quantities import percent
from coterie.telemetry.report import Report
from coterie.telemetry.report_rounds import rounds_lines

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = {
    "data.synthetic.users": 40,
    "data.synthetic.items": 60,
    "data.synthetic.interactions": 600,
    "rounds.cohort": 20,
    "rounds.group": 20,
    "rounds.passes": 1,
}


def trained(example, **more):
    sets = [f"{key}={value}" for key, value in (SMALL | more).items()]
    settings = load(RunSettings, EXAMPLES / f"{example}.toml", sets=sets).settings
    feed = make_feed(settings, load_dataset(settings), 0)
    return train_in_process(settings, feed, run_id="test", seed=0, see=lambda event: None), settings


@pytest.mark.parametrize(("example", "setting"), [("fedncf", "fedncf"), ("fedmf", "fedmf")])
def test_it_is_the_share_of_the_training_items_that_too_few_of_a_group_have(example, setting):
    run, settings = trained(example)
    supports = run.trained.arrays["supports"]
    assert supports.any()
    few = supports < getattr(settings, setting).min_touch
    share = run.known["closed_share"]
    assert share == pytest.approx(supports[few].sum() / supports.sum())
    assert 0 < share < 1
    said = dict(rounds_lines(Report(rounds=run.known["rounds"], closed_share=share)))["Held back"]
    assert said.startswith(f"{percent(share)} of what users have")


def test_nothing_is_closed_where_touches_are_counted_and_nothing_is_said():
    run, _ = trained("fedncf", **{"fedncf.touch": "exact"})
    assert run.known["closed_share"] is None
    assert "Held back" not in dict(rounds_lines(Report(rounds=run.known["rounds"], closed_share=None)))


@pytest.mark.parametrize(("share", "told"), [(0.05, False), (0.86, True)])
def test_where_groups_are_too_small_for_the_data_the_report_says_what_helps(share, told):
    said = dict(rounds_lines(Report(rounds=[{"purpose": "train"}], closed_share=share)))["Held back"]
    assert ("rounds.group" in said) is told
