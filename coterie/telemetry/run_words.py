"""Words for the phases of a run and the purposes of its rounds, in the terminal and on the live page."""

from __future__ import annotations

from coterie.wire.v1 import operator_pb2 as wire

__all__ = ["came_later_words", "ended_words", "phase_words", "purpose_words"]

_PHASES = {
    wire.RunPhase.RUN_PHASE_GATHER: "gathering parties",
    wire.RunPhase.RUN_PHASE_INTAKE: "interactions arrive, owners train",
    wire.RunPhase.RUN_PHASE_FLUSH: "owners finish trailing blocks",
    wire.RunPhase.RUN_PHASE_EPOCH: "owners pass over their blocks",
    wire.RunPhase.RUN_PHASE_EVALUATE: "clients evaluate",
    wire.RunPhase.RUN_PHASE_SUPPORTS: "groups are asked for their items",
    wire.RunPhase.RUN_PHASE_ROUNDS: "rounds of training",
    wire.RunPhase.RUN_PHASE_VISIT: "users visit data owners",
    wire.RunPhase.RUN_PHASE_DONE: "done",
    wire.RunPhase.RUN_PHASE_FAILED: "failed",
}
_PURPOSES = {
    "supports": "a group is asked for its items",
    "evaluate": "all users evaluate",
    "train": "a cohort trains",
    "window": "owners hand over their sums",
}


def phase_words(phase: wire.RunPhase.ValueType) -> str:
    """Return a phase in words; a newer server's unknown phase by its number."""
    return _PHASES.get(phase) or f"phase {phase}"


def purpose_words(purpose: str) -> str:
    """Return the purpose of a round in words; an unknown one as it is."""
    return _PURPOSES.get(purpose, purpose)


def came_later_words(grown: wire.GrowEvent) -> str:
    """Return in words that users who came later take part."""
    return (
        f"{grown.users} users who came later take part from pass {grown.from_pass} on, {grown.total} in all"
    )


def ended_words(phase: wire.RunPhase.ValueType, unit: str, done: int, of: int) -> str:
    """Return a phase in words; for the end of a run also that it came before the last pass.

    Parameters
    ----------
    phase : RunPhase
    unit : str
        ``"pass"`` or ``"epoch"``.
    done, of : int
        Passes that were made, and passes at most.
    """
    if phase == wire.RunPhase.RUN_PHASE_DONE and 0 < done < of:
        return f"done after {unit} {done} of {of}: stopped early"
    return phase_words(phase)
