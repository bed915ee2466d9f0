"""Study of FedMVMF: references, attacks and tables."""

from __future__ import annotations

from typing import Any

from coterie.studies.study import Recorded, Study
from coterie.systems.fedmvmf.server import layouts
from coterie.systems.fedmvmf.settings import FedMvmfPlan
from coterie.systems.fedmvmf.study.metric_variants import PRIVMVMF_READINGS
from coterie.systems.fedmvmf.study.references import references
from coterie.systems.fedmvmf.study.table import PRIVMVMF
from coterie.systems.shared.study.attacks import report

__all__ = ["STUDY"]


def _attack(recorded: Recorded) -> dict[str, dict[str, Any]]:
    plan = FedMvmfPlan.from_json(recorded.plan.settings)
    return report(recorded, layouts(plan, recorded.truth.n_items), plan)


STUDY = Study(references=references, attack=_attack, tables=(PRIVMVMF, PRIVMVMF_READINGS))
