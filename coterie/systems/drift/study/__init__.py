"""Study of DRIFT: references, attacks, tables and further federations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from coterie.config.run import RunSettings
from coterie.studies.reference import Reference
from coterie.studies.run_data import Feed
from coterie.studies.study import Further, Recorded, Study
from coterie.systems.drift.settings import DriftSettings
from coterie.systems.drift.study import published_attacks as published
from coterie.systems.drift.study import windows_attacks as windows
from coterie.systems.drift.study.references import judged, references
from coterie.systems.drift.study.table import DRIFT
from coterie.systems.drift.study.unseen_table import DRIFT_UNSEEN

__all__ = ["STUDY"]


def _references(settings: RunSettings, feed: Feed, seed: int) -> dict[str, Reference]:
    return references(feed, settings.table(DriftSettings), seed)


def _attack(recorded: Recorded) -> dict[str, Any]:
    attacks = windows if recorded.plan.form == "shielded" else published
    return dict(attacks.report(recorded.transcripts, recorded.truth, recorded.plan))


def _thetas(settings: RunSettings) -> Iterator[Further]:
    """Yield the run's federation once for each Theta of ``drift.compare_theta``."""
    own = settings.table(DriftSettings)
    for theta in own.compare_theta:
        other = settings.with_table(own.model_copy(update={"theta": theta, "compare_theta": ()}))
        yield Further("theta_study", f"theta-{theta}", {"theta": theta}, other)


STUDY = Study(
    attack=_attack, references=_references, tables=(DRIFT, DRIFT_UNSEEN), further=_thetas, judged=judged
)
