"""Study of FedIDCF: references, attacks and tables."""

from __future__ import annotations

from coterie.studies.study import Study
from coterie.systems.fedidcf.study.attacks import attack
from coterie.systems.fedidcf.study.table import FEDIDCF
from coterie.systems.shared.study.references import rating_references

__all__ = ["STUDY"]

STUDY = Study(references=rating_references, attack=attack, tables=(FEDIDCF,))
