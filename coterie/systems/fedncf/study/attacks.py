"""Attacks on a run of FedNCF, on the sums in the server's transcript."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.privacy.attacks import cluster, differencing, disaggregate
from coterie.privacy.attacks.rounds_view import RoundView, view_of_sum
from coterie.rounds.training import Purpose
from coterie.studies.replay import Received, Replay
from coterie.studies.study import Recorded
from coterie.systems.fedncf.networks import Architecture, gradients
from coterie.systems.fedncf.purposes import layout_of
from coterie.systems.fedncf.server import FedNcfServer
from coterie.systems.fedncf.settings import FedNcfSettings
from coterie.systems.fedncf.study import inversion
from coterie.wire.v1.orchestrator_pb2 import RunPlan

__all__ = ["attack", "views"]


def attack(recorded: Recorded) -> dict[str, dict[str, Any]]:
    """Run all attacks on the server's transcript of a run of FedNCF.

    Returns
    -------
    dict
        ``disaggregate``, ``cluster``, ``differencing`` and ``inversion``, each as its module describes; the last is
        left out where SciPy is not installed (``coterie[attacks]``).
    """
    plan, truth = recorded.plan, recorded.truth
    settings = FedNcfSettings.from_json(plan.settings)
    seen, begun = [], []
    for one in _received(recorded.transcripts, plan, settings, truth.n_items):
        seen.append(_view(one, settings))
        if not one.version:
            begun.append(one)
    trained = [view for view in seen if view.rows is not None]
    found: dict[str, dict[str, Any]] = {
        "disaggregate": dict(disaggregate.report(seen, truth)),
        "cluster": dict(cluster.report(trained, truth)),
        "differencing": dict(differencing.report(trained, truth)),
    }
    if find_spec("scipy") is not None:
        found["inversion"] = dict(inversion.report(_updates(begun, plan, settings, truth.n_items), truth))
    return found


def views(transcripts: Sequence[Path], plan: RunPlan, n_items: int) -> Iterator[RoundView]:
    """Yield the server's view of each round: single contributions in clear, or the sums that were revealed.

    Parameters
    ----------
    transcripts : sequence of Path
        Transcripts of the server, oldest first.
    plan : RunPlan
        Plan of a run of FedNCF.
    n_items : int
        Items of the run's catalogue.
    """
    settings = FedNcfSettings.from_json(plan.settings)
    for received in _received(transcripts, plan, settings, n_items):
        yield _view(received, settings)


def _received(
    transcripts: Sequence[Path], plan: RunPlan, settings: FedNcfSettings, n_items: int
) -> Iterator[Received]:
    return Replay(transcripts, plan).received(lambda purpose: layout_of(settings, purpose, n_items))


def _view(received: Received, settings: FedNcfSettings) -> RoundView:
    width = settings.architecture.gmf_width
    return view_of_sum(
        received.layout,
        received.codes,
        received.slots,
        received.version,
        # Changes of item rows are parallel to the user's own row only in the part of GMF.
        columns=slice(0, width) if width else slice(None),
        touched="supports" if received.plan.purpose == Purpose.SUPPORTS.value else "touched",
    )


def _updates(
    begun: Iterable[Received], plan: RunPlan, settings: FedNcfSettings, n_items: int
) -> Iterator[inversion.SentUpdate]:
    """Yield the updates of version 0, with which the run began, if each is one step on one batch.

    Version 0 follows from the plan, which every party has.  Where rows are weighted by label
    (`coterie.systems.fedncf.mathematics.balance`), with ``touch = "once"``, the attack as written here does not apply.
    """
    rate = settings.local_rate
    one_step = (settings.local_optimiser, settings.local_epochs, settings.batch_size) == ("sgd", 1, 0)
    if not one_step or settings.touch != "exact" or settings.aggregation != "mf-fedavg":
        return
    server = FedNcfServer(settings, n_items, plan.seed, 0)
    model = server.model(server.initial())
    gradient = _gradient(settings.architecture, model["items"], model["network"])
    for one in begun:
        if one.plan.purpose != Purpose.TRAIN.value:
            continue
        sums = one.layout.decode(one.codes, len(one.slots))
        instances = float(sums["instances"])
        if not instances:
            continue
        # Rows step against the summed loss of a participant, the network against the mean.
        by_rows, by_network = -len(one.slots) / (rate * instances), -1 / (rate * instances)
        yield inversion.SentUpdate(
            np.asarray(one.slots, np.int64),
            sums["items"] * by_rows,
            sums["network"] * by_network,
            gradient,
            bound=settings.user_bound,
            # Rounding up or down at random has a variance of at most a quarter of a step squared.
            noise=(-by_rows * one.layout["items"].step / 2, -by_network * one.layout["network"].step / 2),
        )


def _gradient(
    architecture: Architecture, items: NDArray[np.float32], network: NDArray[np.float32]
) -> inversion.BatchGradient:
    """Return the derivatives of the mean loss of distinct instances of one participant."""

    def gradient(
        user: NDArray[np.float64], batch: NDArray[np.int64], labels: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        n = len(batch)
        rows = np.ones((1, architecture.width + 1, n), np.float32)
        rows[0, :-1] = items[batch].T
        found = gradients(
            architecture,
            user.astype(np.float32)[None, :, None],
            rows,
            network,
            labels.astype(np.float32)[None],
            np.full((1, n), 1 / n, np.float32),
        )
        return found.rows[0].T.astype(np.float64), found.network[0].astype(np.float64)

    return gradient
