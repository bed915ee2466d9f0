"""Study of Popular: baselines for the report of a run, and attacks on the sums that its server received."""

from typing import Any

from coterie.privacy.attacks import differencing, disaggregate
from coterie.privacy.attacks.rounds_view import view_of_sum
from coterie.studies.judges import one_held_out
from coterie.studies.replay import Replay
from coterie.studies.study import Recorded, Study
from coterie_popular.mathematics import layout
from coterie_popular.settings import PopularSettings

__all__ = ["STUDY"]


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


STUDY = Study(attack=_attack, judged=one_held_out)
