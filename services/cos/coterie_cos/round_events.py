"""Events of a run with rounds that watchers and the report get, and its phase as operators see it."""

from __future__ import annotations

from coterie.rounds.training import Evaluation, Purpose, Training, TrainingPhase
from coterie.wire.v1 import operator_pb2 as operator

__all__ = ["consequences", "run_phase"]

_PURPOSES = {
    Purpose.SUPPORTS: operator.RunPhase.RUN_PHASE_SUPPORTS,
    Purpose.EVALUATE: operator.RunPhase.RUN_PHASE_ROUNDS,
    Purpose.TRAIN: operator.RunPhase.RUN_PHASE_ROUNDS,
}


def run_phase(state: Training) -> operator.RunPhase.ValueType:
    """Return the phase of a run as operators see it."""
    match state.phase:
        case TrainingPhase.GATHER:
            return operator.RunPhase.RUN_PHASE_GATHER
        case TrainingPhase.ROUNDS:
            return _PURPOSES[state.purpose]
        case TrainingPhase.DONE:
            return operator.RunPhase.RUN_PHASE_DONE
        case TrainingPhase.FAILED:
            return operator.RunPhase.RUN_PHASE_FAILED


def consequences(before: Training, after: Training, owners: int) -> list[operator.WatchRunResponse]:
    """Return events for what a round's end changed: a complete evaluation, a new phase.

    ``owners`` is the number of data owners that are present.
    """
    events = []
    if len(after.evaluations) > len(before.evaluations):
        events.append(_evaluated(after.evaluations[-1], owners))
    if run_phase(after) != run_phase(before):
        phase = operator.PhaseEvent(phase=run_phase(after), epoch=after.pass_number)
        events.append(operator.WatchRunResponse(phase=phase))
    return events


def _evaluated(made: Evaluation, owners: int) -> operator.WatchRunResponse:
    return operator.WatchRunResponse(
        metrics=operator.MetricsEvent(
            epoch=made.pass_number,
            version=made.version,
            names=list(made.metrics),
            means=list(made.metrics.values()),
            users=[made.users[name] for name in made.metrics],
            owners=owners,
        )
    )
