"""Attacks on a run of iALS, on the sums in the server's transcript."""

from __future__ import annotations

from typing import Any

from coterie.privacy.attacks import differencing, disaggregate
from coterie.privacy.attacks.rounds_view import RoundView, view_of_sum
from coterie.studies.replay import Received, Replay
from coterie.studies.study import Recorded
from coterie.systems.ials.settings import IalsSettings

__all__ = ["attack"]


def attack(recorded: Recorded) -> dict[str, dict[str, Any]]:
    """Run all attacks on the server's transcript of a run of iALS.

    Returns
    -------
    dict
        ``disaggregate`` and ``differencing``, as for other systems in rounds; rows are sums of users' factors.
    """
    settings, truth = IalsSettings.from_json(recorded.plan.settings), recorded.truth
    layouts = settings.layouts(truth.n_items)
    views = [_view(one) for one in Replay(recorded.transcripts, recorded.plan).received(layouts.layout)]
    trained = [view for view in views if view.rows is not None]
    return {
        "disaggregate": dict(disaggregate.report(views, truth)),
        "differencing": dict(differencing.report(trained, truth)),
    }


def _view(received: Received) -> RoundView:
    return view_of_sum(
        received.layout, received.codes, received.slots, received.version, rows="users", touched="supports"
    )
