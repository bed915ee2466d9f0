"""Study of FedMF: references, attacks and tables."""

from __future__ import annotations

from coterie.studies.study import Study
from coterie.systems.fedmf.study.attacks import attack
from coterie.systems.fedmf.study.fedrec_table import FEDREC
from coterie.systems.fedmf.study.references import fedmf_references
from coterie.systems.fedmf.study.space import SPACE
from coterie.systems.fedmf.study.table import FEDMF

__all__ = ["STUDY"]

STUDY = Study(references=fedmf_references, attack=attack, tables=(FEDMF, FEDREC), space=SPACE)
