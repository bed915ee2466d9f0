"""Study of FedIDCF: references, attacks and tables."""

from __future__ import annotations

from coterie.studies.study import Study
from coterie.systems.fedidcf.study.attacks import attack

__all__ = ["STUDY"]

STUDY = Study(attack=attack)
