"""Study of FedMF: references, attacks and tables."""

from __future__ import annotations

from coterie.evaluation.search import Choices, LogUniform, Space
from coterie.studies.study import Study
from coterie.systems.fedmf.study.attacks import attack
from coterie.systems.fedmf.study.references import fedmf_references
from coterie.systems.fedmf.study.table import FEDMF

__all__ = ["STUDY"]

_SPACE: Space = {
    "fedmf.biases": Choices((True,)),
    "fedmf.factors": Choices((10, 20, 40)),
    "fedmf.local_epochs": Choices((2, 5, 10)),
    "fedmf.rate": LogUniform(0.1, 0.4),
    "fedmf.private_rate": LogUniform(0.1, 0.4),
    "fedmf.ridge": LogUniform(0.005, 0.1),
}

STUDY = Study(references=fedmf_references, attack=attack, tables=(FEDMF,), space=_SPACE)
