"""References, attacks and tables of FedNCF."""

from __future__ import annotations

from typing import Any

from coterie.config.run import RunSettings
from coterie.studies.reference import Reference
from coterie.studies.run_data import Feed
from coterie.studies.study import Recorded, Study
from coterie.systems.fedncf.settings import FedNcfOptions
from coterie.systems.fedncf.study.attacks import report
from coterie.systems.fedncf.study.references import ncf_references
from coterie.systems.fedncf.study.table import FEDNCF

__all__ = ["STUDY"]


def _references(settings: RunSettings, feed: Feed, seed: int) -> dict[str, Reference]:
    return ncf_references(feed, settings.table(FedNcfOptions), settings.rounds.passes, seed)


def _attack(recorded: Recorded) -> dict[str, dict[str, Any]]:
    return report(recorded.transcripts, recorded.truth, recorded.plan)


STUDY = Study(references=_references, attack=_attack, tables=(FEDNCF,))
