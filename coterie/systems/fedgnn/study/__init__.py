"""Study of FedGNN: references, attacks and tables."""

from __future__ import annotations

from coterie.studies.study import Study
from coterie.systems.fedgnn.study.attacks import attack
from coterie.systems.fedgnn.study.references import fedgnn_references
from coterie.systems.fedgnn.study.table import FEDGNN, SPACE

__all__ = ["STUDY"]

STUDY = Study(attack=attack, references=fedgnn_references, tables=(FEDGNN,), space=SPACE)
