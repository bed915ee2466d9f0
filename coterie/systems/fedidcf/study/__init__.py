"""Study of FedIDCF: references, attacks and tables."""

from __future__ import annotations

from coterie.studies.study import Study
from coterie.systems.fedidcf.study.attacks import attack
from coterie.systems.fedidcf.study.table import FEDIDCF

__all__ = ["STUDY"]

STUDY = Study(attack=attack, tables=(FEDIDCF,))
