"""Study of FCF: references and attacks."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from coterie.evaluation.search import Choices, LogUniform, Space
from coterie.studies.study import Recorded, Study
from coterie.systems.fcf.host import layouts
from coterie.systems.fcf.settings import FcfSettings
from coterie.systems.fcf.study.references import fcf_references
from coterie.systems.shared.study.attacks import report
from coterie.systems.shared.study.taken_up import ranked

__all__ = ["STUDY"]


_SPACE: Space = {
    "fcf.factors": Choices((10, 20, 40)),
    "fcf.confidence": LogUniform(0.5, 50.0),
    "fcf.ridge": LogUniform(0.5, 50.0),
    "fcf.server_rate": LogUniform(0.01, 0.2),
    "fcf.popularity": Choices((0.0, 0.01, 0.03, 0.1, 0.3)),
}


def _attack(recorded: Recorded) -> dict[str, dict[str, Any]]:
    settings = FcfSettings.from_json(recorded.plan.settings)
    # FCF learns from interactions, not from ratings.
    taken = dataclasses.replace(recorded, ratings=np.ones(len(recorded.ratings)))
    return report(taken, layouts(settings, recorded.truth.n_items), settings.factor_settings())


STUDY = Study(attack=_attack, references=fcf_references, space=_SPACE, judged=ranked)
