"""Study of FCF: references and attacks."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from coterie.studies.study import Recorded, Study
from coterie.systems.fcf.host import layouts
from coterie.systems.fcf.settings import FcfSettings
from coterie.systems.fcf.study.references import fcf_references
from coterie.systems.shared.study.attacks import report

__all__ = ["STUDY"]


def _attack(recorded: Recorded) -> dict[str, dict[str, Any]]:
    settings = FcfSettings.from_json(recorded.plan.settings)
    # FCF learns from interactions, not from ratings.
    taken = dataclasses.replace(recorded, ratings=np.ones(len(recorded.ratings)))
    return report(taken, layouts(settings, recorded.truth.n_items), settings.factor_settings())


STUDY = Study(references=fcf_references, attack=_attack)
