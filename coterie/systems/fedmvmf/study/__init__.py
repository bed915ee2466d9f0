"""Study of FedMVMF: references, attacks and tables."""

from __future__ import annotations

from functools import partial
from typing import Any

from coterie.studies.study import Recorded, Study
from coterie.systems.fedmvmf.server import layouts
from coterie.systems.fedmvmf.settings import FedMvmfPlan
from coterie.systems.fedmvmf.study.biased_reconstruction import reconstruct
from coterie.systems.fedmvmf.study.metric_variants import PRIVMVMF_READINGS
from coterie.systems.fedmvmf.study.references import references
from coterie.systems.fedmvmf.study.table import PRIVMVMF
from coterie.systems.shared.study.attacks import report
from coterie.systems.shared.study.reconstruction import Marginals, Reconstruction, Seen

__all__ = ["STUDY"]


def _attack(recorded: Recorded) -> dict[str, dict[str, Any]]:
    plan = FedMvmfPlan.from_json(recorded.plan.settings)
    own = partial(_biased, settings=plan) if plan.biases else None
    return report(recorded, layouts(plan, recorded.truth.n_items), plan, own=own)


def _biased(seen: Seen, marginals: Marginals, *, first: bool, settings: FedMvmfPlan) -> Reconstruction:
    return reconstruct(seen, settings, marginals, first=first)


STUDY = Study(references=references, attack=_attack, tables=(PRIVMVMF, PRIVMVMF_READINGS))
