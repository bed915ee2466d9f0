"""What both forms of DRIFT do when the operator resumes a run that has failed."""

from __future__ import annotations

from coterie.systems.drift.published_run import CatalogueChanged, PartyLost, RunResumed
from coterie.wire.v1 import operator_pb2 as operator
from coterie_cos.run import Run

__all__ = ["since_failure", "taken_up"]


def since_failure(run: Run) -> list[PartyLost | CatalogueChanged | RunResumed]:
    """Return the events that take a failed run to where it goes on, for its state machine."""
    return [
        *(PartyLost(party) for party in sorted(run.silent())),
        # A new catalogue, as hosts may have been told of the present one while the run had failed.
        CatalogueChanged(run.registry.catalogue_version + 1),
        RunResumed(),
    ]


def taken_up(run: Run, failure: str, number: int) -> list[operator.WatchRunResponse]:
    """Return what watchers are told of a run that goes on, after its failure in an epoch or round of this number."""
    resumed = operator.ResumeEvent(failure=failure, round=number)
    phase = operator.PhaseEvent(phase=run.phase, epoch=run.epoch)
    return [operator.WatchRunResponse(resumed=resumed), operator.WatchRunResponse(phase=phase)]
