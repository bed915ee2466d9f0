"""Study of Popular: baselines for the report of a run, and attacks on the sums that its server received."""

from typing import Any

import numpy as np

from coterie.config.run import RunSettings
from coterie.evaluation.baselines import from_table, popularity, random_scores
from coterie.evaluation.selection import measured_once
from coterie.privacy.attacks import differencing, disaggregate
from coterie.privacy.attacks.rounds_view import view_of_sum
from coterie.studies.reference import Reference
from coterie.studies.replay import Replay
from coterie.studies.run_data import Feed
from coterie.studies.study import Recorded, Study
from coterie_popular.mathematics import layout
from coterie_popular.settings import PopularSettings

__all__ = ["STUDY"]


def _references(settings: RunSettings, feed: Feed, seed: int) -> dict[str, Reference]:
    """Measure the baselines: plain counts of users, and random order."""
    data, train = feed.dataset, feed.split.train
    shape = users, items = len(data.users), len(data.items)
    counts = popularity(data.item[train], feed.positive[train], items)
    tables = {"popularity": np.broadcast_to(counts, shape), "random": random_scores(users, items, seed)}
    holdout = feed.leave_one_out()
    return {
        name: Reference(dict(measured_once(holdout, *from_table(table)).metrics), [])
        for name, table in tables.items()
    }


def _attack(recorded: Recorded) -> dict[str, dict[str, Any]]:
    """Guess from the sums that the server learned which user has which item."""
    settings = PopularSettings.from_json(recorded.plan.settings)
    received = Replay(recorded.transcripts, recorded.plan).received(
        lambda purpose: layout(purpose, recorded.truth.n_items, settings.bits)
    )
    views = [view_of_sum(one.layout, one.codes, one.slots, one.version) for one in received]
    return {
        "disaggregate": dict(disaggregate.report(views, recorded.truth)),
        "differencing": dict(differencing.report(views, recorded.truth)),
    }


STUDY = Study(references=_references, attack=_attack)
