"""Study of FPL: references, attacks, table, settings to tune."""

from __future__ import annotations

from coterie.evaluation.search import Choices, LogUniform, Space
from coterie.studies.study import Study
from coterie.systems.fpl.study.attacks import attack
from coterie.systems.fpl.study.references import references
from coterie.systems.fpl.study.table import FPL
from coterie.systems.shared.study.taken_up import ranked

__all__ = ["STUDY"]

_SPACE: Space = {
    "fpl.pi": Choices((0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)),
    "fpl.factors": Choices((10, 20, 40)),
    "fpl.private_rate": LogUniform(0.01, 0.2),
    "fpl.ridge": LogUniform(1e-3, 0.1),
    "fpl.server_rate": LogUniform(3e-3, 0.05),
    "fpl.popularity": Choices((0.0, 0.1, 0.3, 1.0, 3.0)),
}

STUDY = Study(attack=attack, references=references, tables=(FPL,), space=_SPACE, judged=ranked)
